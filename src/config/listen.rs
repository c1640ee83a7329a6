//! Listen addresses: host names, IP addresses and Unix sockets.
//!
//! Addresses beyond this machine are accepted only with encryption or explicitly without.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _};

use rm_edge::edge::ListenAddress;

/// Name of a listen setting, and an example value.
type ListenSetting = (&'static str, &'static str);

const LISTEN: ListenSetting = ("--listen (LINKIS_RM_LISTEN)", "127.0.0.1:50051");
pub(super) const HTTP_LISTEN: ListenSetting = ("--http-listen (LINKIS_RM_HTTP_LISTEN)", "127.0.0.1:51051");

/// Offset of the default HTTP port from the gRPC port.
const HTTP_PORT_ABOVE: u16 = 1000;

/// Default HTTP port if gRPC has no port.
const HTTP_PORT: u16 = 51_051;

/// Prefix of a socket path.
const UNIX: &str = "unix:";

/// Returns the default HTTP address: always local, at the gRPC port plus the offset. A free port is used if gRPC uses one
/// or the sum is out of range.
pub(super) fn http_default(listen: &ListenAddress) -> SocketAddr {
    let first = match listen {
        ListenAddress::Tcp(addresses) => addresses.first(),
        ListenAddress::Unix(_) => None,
    };
    let Some(listen) = first else { return (Ipv4Addr::LOCALHOST, HTTP_PORT).into() };
    let loopback: IpAddr = if listen.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
    let port = if listen.port() == 0 { 0 } else { listen.port().checked_add(HTTP_PORT_ABOVE).unwrap_or(0) };
    SocketAddr::new(loopback, port)
}

/// Parses the gRPC address. A Unix socket is local, and its file permissions control the callers.
pub(super) fn parse_listen(text: &str, may_leave: bool) -> Result<ListenAddress, String> {
    let Some(path) = text.strip_prefix(UNIX) else {
        return parse_addresses(LISTEN, text, may_leave).map(ListenAddress::Tcp);
    };
    let path = path.strip_prefix("//").unwrap_or(path);
    match path {
        "" => Err(format!("{}: {text:?} names no file; for example unix:/run/linkis-rm/rm.sock", LISTEN.0)),
        path => Ok(ListenAddress::Unix(path.into())),
    }
}

/// Returns all addresses of a host name, each with the port.
pub(super) fn parse_addresses(
    (name, example): ListenSetting,
    text: &str,
    may_leave: bool,
) -> Result<Vec<SocketAddr>, String> {
    let has_port = text.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    if !has_port {
        return Err(format!("{name}: {text:?} is not HOST:PORT; for example {example}"));
    }
    let found = text.to_socket_addrs().map_err(|error| format!("{name}: {text:?} cannot be resolved: {error}"))?;
    let addresses: Vec<_> = found.collect();
    match addresses.iter().find(|address| !address.ip().is_loopback()) {
        None if addresses.is_empty() => Err(format!("{name}: {text:?} has no address")),
        Some(address) if !may_leave => Err(format!(
            "{name}: {address} is reachable from other machines without encryption; add --tls-cert and --tls-key, \
             or --insecure (LINKIS_RM_INSECURE=true) if the network is closed"
        )),
        _ => Ok(addresses),
    }
}
