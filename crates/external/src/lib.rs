//! Clients of external clusters (YARN, Kubernetes): configuration and fetching of queues and applications.
//!
//! [`ExternalCluster`] is the interface of a cluster type; [`yarn`] and [`kubernetes`] implement it. [`http`] bounds
//! each request in time and size, [`allowed`] restricts the hosts, [`check`] parses the keys that all types share.
//! Internal: `connector` connects, `background_parse` parses large replies on a low-priority thread, `fake` has test
//! servers.
//!
//! The module knows no database and no caller. Errors never contain data of a response: a caller that may set an
//! address could otherwise read other services with it. Callers: `rm_service::external`, and `rm_service::jwt` for key sets.

#![warn(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::unreachable,
    clippy::print_stdout,
    clippy::too_many_lines
)]

use std::{fmt, future::Future, pin::Pin};

use rm_model::{
    external::{CheckRules, KUBERNETES, YARN},
    name::FieldError,
    queue::{Application, QueueTree},
};
use secrecy::SecretString;
use url::Url;

pub mod allowed;
mod background_parse;
pub mod check;
mod connector;
#[cfg(test)]
mod fake;
pub mod http;
pub mod kubernetes;
pub mod yarn;

use http::{ClusterHttp, HttpFailure};

/// Future of a fetch.
pub type FetchFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, FetchError>> + Send + 'a>>;

/// A configured external cluster.
pub trait ExternalCluster: fmt::Debug + Send + Sync {
    /// Returns the addresses in the configuration. Addresses in files of an instance are checked at each fetch.
    fn addresses(&self) -> &[ServerAddress];

    /// Returns the whole configuration as JSON, secrets included, for storage.
    fn stored(&self) -> SecretString;

    /// Returns the configuration as JSON without secrets.
    fn shown(&self) -> String;

    /// Returns the rules by which requests are checked against the queues.
    fn rules(&self) -> CheckRules;

    /// Fetches all queues.
    fn queues<'a>(&'a self, http: &'a ClusterHttp) -> FetchFuture<'a, QueueTree>;

    /// Fetches the running and pending applications, ordered by id.
    fn applications<'a>(&'a self, http: &'a ClusterHttp) -> FetchFuture<'a, Vec<Application>>;
}

/// Parser of a configuration. The second argument is the stored configuration, for secrets that the new one omits.
type ConfigReader = fn(&str, Option<&str>) -> Result<Box<dyn ExternalCluster>, FieldError>;

/// All cluster types, by the names that Linkis uses.
const TYPES: [(&str, ConfigReader); 2] = [(YARN, yarn::read), (KUBERNETES, kubernetes::read)];

/// Parses the configuration of a cluster. Omitted secrets are copied from `before`, the stored configuration, if they
/// belong to the same addresses.
///
/// # Errors
/// Names `resource_type` if the type is unknown, or else the faulty key of `config`.
pub fn read(resource_type: &str, config: &str, before: Option<&str>) -> Result<Box<dyn ExternalCluster>, FieldError> {
    let known = TYPES.iter().find(|(name, _)| *name == resource_type);
    let unknown = || {
        let names: Vec<_> = TYPES.iter().map(|(name, _)| *name).collect();
        FieldError::new("resource_type", format!("is unknown; known types are {}", names.join(", ")))
    };
    known.ok_or_else(unknown)?.1(config, before)
}

/// Address of a server: scheme, host, port and path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerAddress {
    text: String,
    url: Url,
}

impl ServerAddress {
    /// Parses an address.
    ///
    /// # Errors
    /// The expected form, if the text is no address.
    pub fn parse(text: &str) -> Result<Self, String> {
        const FORM: &str = "must be http://HOST:PORT or https://HOST:PORT, with a path at most";
        // The error repeats neither the text nor the parser's error, which may contain a password.
        let url: Url = text.trim_end_matches('/').parse().map_err(|_| FORM.to_owned())?;
        let is_plain = matches!(url.scheme(), "http" | "https")
            && url.has_host()
            && url.username().is_empty()
            && url.password().is_none()
            && url.query().is_none()
            && url.fragment().is_none();
        match is_plain {
            true => Ok(Self { text: url.as_str().trim_end_matches('/').to_owned(), url }),
            false => Err(FORM.to_owned()),
        }
    }

    /// Returns the normalized text.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns whether the connection is encrypted.
    fn is_encrypted(&self) -> bool {
        self.url.scheme() == "https"
    }

    /// Returns the URL of a path, with its query, at the address.
    fn join(&self, path: &str) -> Result<Url, HttpFailure> {
        format!("{}{path}", self.text).parse().map_err(|_| HttpFailure::Address)
    }
}

/// Error of a fetch: the failure at each address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchError {
    /// Address and failure, in the order of the attempts.
    pub failures: Vec<(String, HttpFailure)>,
}

impl FetchError {
    /// Returns whether a retry may succeed.
    pub fn may_pass(&self) -> bool {
        self.failures.iter().any(|(_, failure)| failure.may_pass())
    }

    /// Returns the class of the most significant failure, for metrics. `NotActive` is the least significant.
    pub fn class(&self) -> &'static str {
        let failures = || self.failures.iter().map(|(_, failure)| failure);
        let telling = failures().find(|failure| **failure != HttpFailure::NotActive).or(failures().next());
        telling.map_or("not_asked", HttpFailure::class)
    }
}

impl fmt::Display for FetchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (address, failure)) in self.failures.iter().enumerate() {
            write!(f, "{}{address} {failure}", if number == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}

impl std::error::Error for FetchError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_address_is_scheme_host_port_and_path() {
        for (text, kept) in [
            ("http://rm1:8088", Some("http://rm1:8088")),
            ("https://gate/gateway/yarn/", Some("https://gate/gateway/yarn")),
            ("http://[::1]:8088/", Some("http://[::1]:8088")),
            ("HTTP://RM1:80", Some("http://rm1")),
            ("rm1:8088", None),
            ("http://", None),
            ("file:///etc/passwd", None),
            ("http://a@rm1", None),
            ("http://rm1#x", None),
            ("", None),
        ] {
            assert_eq!(ServerAddress::parse(text).ok().as_ref().map(ServerAddress::as_str), kept, "{text}");
        }
        let joined = ServerAddress::parse("https://gate/yarn/").unwrap().join("/ws/v1/cluster/info").unwrap();
        assert_eq!(joined.as_str(), "https://gate/yarn/ws/v1/cluster/info");
    }

    #[test]
    fn unknown_resource_type_error_lists_known_types() {
        let error = read("Mesos", "{}", None).unwrap_err();
        assert_eq!(error.to_string(), "resource_type: is unknown; known types are Yarn, Kubernetes");
        assert_eq!(read("Yarn", "{}", None).unwrap_err().field, "config.rmWebAddress");
    }
}
