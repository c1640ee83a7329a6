//! What lives elsewhere: clusters whose queues somebody else keeps.
//!
//! - [`ExternalResource`]: what a type of cluster has to offer, one file or folder each: [`yarn`], [`kubernetes`];
//! - [`http`]: requests to them, bounded in time and size;
//! - [`allowed`]: which hosts may be asked;
//! - [`check`]: what every configuration says of how queues are judged.
//!
//! Nothing here knows the database or a caller. What an answer holds stands in no error: otherwise whoever may name an address could
//! read by it what is not meant for him.
//!
//! `patient` reads what is large in a thread that lets all others go first; `turns` says who may send it; `fake` are servers for tests.

use std::{fmt, future::Future, pin::Pin};

use reqwest::Url;
use secrecy::SecretString;

use crate::domain::{
    external::{CheckRules, KUBERNETES, YARN},
    name::FieldError,
    queue::{Application, Queues},
};

pub mod allowed;
pub mod check;
#[cfg(test)]
mod fake;
pub mod http;
pub mod kubernetes;
mod patient;
mod turns;
pub mod yarn;

use http::{Failure, Http};

/// Something that is being fetched.
pub type Fetching<'a, T> = Pin<Box<dyn Future<Output = Result<T, FetchError>> + Send + 'a>>;

/// A cluster that can be asked what it has.
pub trait ExternalResource: fmt::Debug + Send + Sync {
    /// Where it is asked, as far as its configuration says. What files of an instance say is checked when it is asked.
    fn addresses(&self) -> &[Address];

    /// Its whole configuration, secrets included, as it is kept.
    fn stored(&self) -> SecretString;

    /// The same without secrets.
    fn shown(&self) -> String;

    /// How its queues are judged.
    fn rules(&self) -> CheckRules;

    /// All its queues.
    fn queues<'a>(&'a self, http: &'a Http) -> Fetching<'a, Queues>;

    /// The applications that run in it, or wait to, by their ids.
    fn applications<'a>(&'a self, http: &'a Http) -> Fetching<'a, Vec<Application>>;
}

/// Reads a configuration; what it leaves out of secrets may be taken from the one before.
type Read = fn(&str, Option<&str>) -> Result<Box<dyn ExternalResource>, FieldError>;

/// All types, by the names that Linkis has for them.
const TYPES: [(&str, Read); 2] = [(YARN, yarn::read), (KUBERNETES, kubernetes::read)];

/// Reads the configuration of a cluster of a type. Secrets that it leaves out are those of `before`, the configuration that was stored
/// last, if they are for the same addresses.
///
/// # Errors
/// An unknown type, and whatever is wrong with the configuration: `resource_type`, or `config` with the key.
pub fn read(resource_type: &str, config: &str, before: Option<&str>) -> Result<Box<dyn ExternalResource>, FieldError> {
    let known = TYPES.iter().find(|(name, _)| *name == resource_type);
    let unknown = || {
        let names: Vec<_> = TYPES.iter().map(|(name, _)| *name).collect();
        FieldError::new("resource_type", format!("is not known; known is {}", names.join(", ")))
    };
    known.ok_or_else(unknown)?.1(config, before)
}

/// Where a server is: scheme, host, port and path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    text: String,
    url: Url,
}

impl Address {
    /// Checks an address.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &str) -> Result<Self, String> {
        const FORM: &str = "must be http://HOST:PORT or https://HOST:PORT, with a path at most";
        // Neither the text nor the parser's error is repeated: there may be a password in it.
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

    /// As it is kept.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether nobody on the way can read what is sent there.
    fn is_encrypted(&self) -> bool {
        self.url.scheme() == "https"
    }

    /// What stands there under a path with its query.
    fn join(&self, path: &str) -> Result<Url, Failure> {
        format!("{}{path}", self.text).parse().map_err(|_| Failure::Address)
    }
}

/// Why nothing was fetched: what became of it at each address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchError {
    /// Address by address.
    pub failures: Vec<(String, Failure)>,
}

impl FetchError {
    /// Whether it is about the moment: trying again may help.
    pub fn may_pass(&self) -> bool {
        self.failures.iter().any(|(_, failure)| failure.may_pass())
    }

    /// The failure that tells most: that another is active says little where that one failed, too.
    pub fn class(&self) -> &'static str {
        let failures = || self.failures.iter().map(|(_, failure)| failure);
        let telling = failures().find(|failure| **failure != Failure::NotActive).or(failures().next());
        telling.map_or("not_asked", Failure::class)
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
    fn an_address_is_a_host_and_a_path_at_most() {
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
            assert_eq!(Address::parse(text).ok().as_ref().map(Address::as_str), kept, "{text}");
        }
        let joined = Address::parse("https://gate/yarn/").unwrap().join("/ws/v1/cluster/info").unwrap();
        assert_eq!(joined.as_str(), "https://gate/yarn/ws/v1/cluster/info");
    }

    #[test]
    fn an_unknown_type_is_told_with_those_that_are_known() {
        let error = read("Mesos", "{}", None).unwrap_err();
        assert_eq!(error.to_string(), "resource_type: is not known; known is Yarn, Kubernetes");
        assert_eq!(read("Yarn", "{}", None).unwrap_err().field, "config.rmWebAddress");
    }
}
