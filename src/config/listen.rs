//! Where to listen: addresses by name or number, and files.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _};

use crate::transport::edge::Listen;

/// A setting that says where to listen, and an example of it.
type ListenSetting = (&'static str, &'static str);

const LISTEN: ListenSetting = ("--listen (LINKIS_RM_LISTEN)", "127.0.0.1:50051");
pub(super) const HTTP_LISTEN: ListenSetting = ("--http-listen (LINKIS_RM_HTTP_LISTEN)", "127.0.0.1:51051");

/// How far above the port of gRPC that of metrics and health is, unless it is set.
const HTTP_PORT_ABOVE: u16 = 1000;

/// Where metrics and health are if gRPC is at no port.
const HTTP_PORT: u16 = 51_051;

/// What stands before a path.
const UNIX: &str = "unix:";

/// On this machine only, wherever gRPC is served; on any free port if gRPC is, or if there is none so far above it.
pub(super) fn http_default(listen: &Listen) -> SocketAddr {
    let first = match listen {
        Listen::Tcp(addresses) => addresses.first(),
        Listen::Unix(_) => None,
    };
    let Some(listen) = first else { return (Ipv4Addr::LOCALHOST, HTTP_PORT).into() };
    let loopback: IpAddr = if listen.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
    let port = if listen.port() == 0 { 0 } else { listen.port().checked_add(HTTP_PORT_ABOVE).unwrap_or(0) };
    SocketAddr::new(loopback, port)
}

/// A file that is a socket is on this machine, and its rights say who may call.
pub(super) fn parse_listen(text: &str, may_leave: bool) -> Result<Listen, String> {
    let Some(path) = text.strip_prefix(UNIX) else { return parse_addresses(LISTEN, text, may_leave).map(Listen::Tcp) };
    let path = path.strip_prefix("//").unwrap_or(path);
    match path {
        "" => Err(format!("{}: {text:?} names no file; for example unix:/run/linkis-rm/rm.sock", LISTEN.0)),
        path => Ok(Listen::Unix(path.into())),
    }
}

/// All addresses that a host has, each with the port.
pub(super) fn parse_addresses(
    (name, example): ListenSetting,
    text: &str,
    may_leave: bool,
) -> Result<Vec<SocketAddr>, String> {
    let has_port = text.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    if !has_port {
        return Err(format!("{name}: {text:?} is not HOST:PORT; for example {example}"));
    }
    let found = text.to_socket_addrs().map_err(|error| format!("{name}: {text:?} cannot be found: {error}"))?;
    let addresses: Vec<_> = found.collect();
    match addresses.iter().find(|address| !address.ip().is_loopback()) {
        None if addresses.is_empty() => Err(format!("{name}: {text:?} has no address")),
        Some(address) if !may_leave => Err(format!(
            "{name}: {address} can be reached from other machines, and nothing is encrypted; add --tls-cert and --tls-key, \
             or --insecure (LINKIS_RM_INSECURE=true) if the network is closed"
        )),
        _ => Ok(addresses),
    }
}
