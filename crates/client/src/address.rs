//! Addresses of service instances, parsed from their text. Callers: `settings`, `pool` and `health`.

use std::path::PathBuf;

use http::Uri;

use super::ClientError;

/// Maximum number of addresses of one client.
const ADDRESSES_MAX: usize = 64;

/// Address of one instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InstanceAddress {
    pub place: Endpoint,
    pub is_tls: bool,
    /// URI in front of the path of each call.
    pub origin: Uri,
    /// Text of the address.
    pub text: String,
}

/// Transport endpoint of an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Endpoint {
    Tcp { host: String, port: u16 },
    Unix(PathBuf),
}

impl InstanceAddress {
    /// Parses `http://host:port`, `https://host:port`, `host:port` (as http) or `unix:/path`, separated by commas.
    /// Duplicates are dropped.
    pub fn parse_all(text: &str) -> Result<Vec<Self>, ClientError> {
        let wrong = |part: &str| ClientError::Address(part.to_owned());
        let mut addresses = Vec::new();
        for part in text.split(',').map(str::trim) {
            let address = Self::parse(part).ok_or_else(|| wrong(part))?;
            if !addresses.contains(&address) {
                addresses.push(address);
            }
            if addresses.len() > ADDRESSES_MAX {
                return Err(ClientError::TooManyAddresses { most: ADDRESSES_MAX });
            }
        }
        Ok(addresses)
    }

    fn parse(text: &str) -> Option<Self> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            let place = Endpoint::Unix(path.into());
            let origin = Uri::from_static("http://localhost");
            return (!path.is_empty()).then(|| Self { place, is_tls: false, origin, text: text.to_owned() });
        }
        let with_scheme = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
        let origin: Uri = with_scheme.parse().ok()?;
        let authority = origin.authority()?.as_str();
        let default_port = match origin.scheme_str()? {
            // Without a scheme, the port is required.
            "http" if text.contains("://") => Some(80),
            "http" => None,
            "https" => Some(443),
            _ => return None,
        };
        // The part after a colon must be a port; user names are not supported.
        let has_odd_port = origin.port_u16().is_none() && authority.ends_with(|c: char| c != ']') && {
            authority.rsplit_once(']').map_or(authority, |(_, rest)| rest).contains(':')
        };
        if origin.path() != "/" || origin.query().is_some() || authority.contains('@') || has_odd_port {
            return None;
        }
        let host = origin.host()?.trim_start_matches('[').trim_end_matches(']').to_owned();
        let port = origin.port_u16().or(default_port).filter(|port| *port != 0)?;
        let is_tls = origin.scheme_str() == Some("https");
        (!host.is_empty()).then(|| Self { place: Endpoint::Tcp { host, port }, is_tls, origin, text: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Vec<String> {
        let place = |address: InstanceAddress| match address.place {
            Endpoint::Tcp { host, port } => format!("{host} {port}{}", if address.is_tls { " tls" } else { "" }),
            Endpoint::Unix(path) => format!("unix {}", path.display()),
        };
        InstanceAddress::parse_all(text).unwrap().into_iter().map(place).collect()
    }

    #[test]
    fn address_in_any_spelling_is_parsed() {
        for (text, places) in [
            ("127.0.0.1:50051", &["127.0.0.1 50051"][..]),
            ("http://rm1:50051/", &["rm1 50051"]),
            ("https://rm.example.com", &["rm.example.com 443 tls"]),
            ("http://rm", &["rm 80"]),
            ("[::1]:7, https://[fe80::1]", &["::1 7", "fe80::1 443 tls"]),
            ("unix:/run/rm.sock", &["unix /run/rm.sock"]),
            ("unix:///run/rm.sock", &["unix /run/rm.sock"]),
            ("rm1:1,rm2:1, rm1:1", &["rm1 1", "rm2 1"]),
        ] {
            assert_eq!(parsed(text), places, "{text}");
        }
        for wrong in [
            "",
            "rm1",
            "rm1:0",
            "rm1:99999",
            "rm1:x",
            "ftp://rm1:1",
            "http://rm1:1/path",
            "http://me@rm1:1",
            "unix:",
            "rm1:1,",
        ] {
            assert!(matches!(InstanceAddress::parse_all(wrong), Err(ClientError::Address(_))), "{wrong}");
        }
        let many = (0..=ADDRESSES_MAX).map(|n| format!("rm{n}:1")).collect::<Vec<_>>().join(",");
        assert!(matches!(InstanceAddress::parse_all(&many), Err(ClientError::TooManyAddresses { .. })));
    }
}
