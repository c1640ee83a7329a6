//! Hosts that the service may contact. Administrators of the service set addresses; the operator of the process limits
//! the hosts by `--external-hosts`. Caller: `http`.

use super::{ServerAddress, http::HttpFailure};

/// Patterns of allowed hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowedHosts(Vec<HostPattern>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct HostPattern {
    host: HostName,
    /// Port to match; `None` for any.
    port: Option<u16>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum HostName {
    Any,
    /// Names that end in this text, which begins with a dot.
    Under(String),
    Named(String),
}

impl AllowedHosts {
    /// Allows no host.
    pub const NONE: Self = Self(Vec::new());

    /// Parses a comma-separated list of `HOST`, `HOST:PORT`, `*.DOMAIN`, `*.DOMAIN:PORT` and `*`. Hosts are names or IP
    /// addresses as written in an address; they are compared as text and never resolved.
    ///
    /// # Errors
    /// The first invalid part.
    pub fn parse(text: &str) -> Result<Self, String> {
        let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
        parts.map(pattern).collect::<Result<_, _>>().map(Self)
    }

    /// Checks that the host of an address is allowed.
    ///
    /// # Errors
    /// [`HttpFailure::NotAllowed`].
    pub fn check(&self, address: &ServerAddress) -> Result<(), HttpFailure> {
        let (host, port) = (address.url.host_str().unwrap_or_default(), address.url.port_or_known_default());
        let is_allowed = self.0.iter().any(|pattern| pattern.allows(host, port));
        is_allowed.then_some(()).ok_or(HttpFailure::NotAllowed)
    }
}

impl HostPattern {
    fn allows(&self, host: &str, port: Option<u16>) -> bool {
        let is_host = match &self.host {
            HostName::Any => true,
            HostName::Under(domain) => host.strip_suffix(domain.as_str()).is_some_and(|rest| !rest.is_empty()),
            HostName::Named(name) => host == name,
        };
        is_host && self.port.is_none_or(|own| port == Some(own))
    }
}

fn pattern(text: &str) -> Result<HostPattern, String> {
    let wrong = || format!("{text:?} has an unknown form; write HOST, HOST:PORT, *.DOMAIN or *");
    let (host, port) = match text.rsplit_once(':') {
        // The colons of an IPv6 address are within brackets.
        Some((host, port)) if !port.ends_with(']') => (host, Some(port.parse().map_err(|_| wrong())?)),
        _ => (text, None),
    };
    let host = host.to_ascii_lowercase();
    let is_name =
        |name: &str| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || ".-_[]:".contains(c));
    let host = match host.strip_prefix('*') {
        Some("") => HostName::Any,
        Some(domain) if domain.starts_with('.') && is_name(domain) && domain.len() > 1 => {
            HostName::Under(domain.to_owned())
        }
        None if is_name(&host) => HostName::Named(host),
        _ => return Err(wrong()),
    };
    Ok(HostPattern { host, port })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allows(hosts: &str, address: &str) -> bool {
        AllowedHosts::parse(hosts).unwrap().check(&ServerAddress::parse(address).unwrap()).is_ok()
    }

    #[test]
    fn allowed_hosts_match_host_port_and_domain() {
        for (hosts, address, allowed) in [
            ("", "http://rm1:8088", false),
            ("rm1", "http://rm1:8088", true),
            ("rm1", "http://RM1", true),
            ("rm1", "http://rm1.evil", false),
            ("rm1:8088", "http://rm1:8089", false),
            ("rm1:80", "http://rm1", true),
            ("rm1:443", "https://rm1", true),
            ("rm2, rm1:8088", "http://rm1:8088", true),
            ("*.example.com", "http://rm1.example.com:1", true),
            ("*.example.com:2", "http://rm1.example.com:1", false),
            ("*.example.com", "http://example.com", false),
            ("*.example.com", "http://xexample.com", false),
            ("*", "http://169.254.169.254", true),
            ("*:8088", "http://169.254.169.254", false),
            ("127.0.0.1", "http://localhost", false),
            ("127.0.0.1", "http://2130706433", true),
            ("[::1]:8088", "http://[::1]:8088", true),
            ("[::1]", "http://[::1]:8088", true),
        ] {
            assert_eq!(allows(hosts, address), allowed, "{hosts} {address}");
        }
    }

    #[test]
    fn allowed_hosts_malformed_entry_is_refused() {
        for wrong in ["http://rm1", "rm1:port", "rm1:99999", "*example.com", "a*", "*.", "a b", "rm1/x"] {
            assert!(AllowedHosts::parse(wrong).is_err(), "{wrong}");
        }
    }
}
