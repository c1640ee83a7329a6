//! Settings of a client: timeouts, attempts, TLS and token.
//!
//! Never: shows a key or a token in `Debug` output. Callers: programs that create a client, and `check_health`.

use std::{fmt, sync::Arc, time::Duration};

use tokio_rustls::{
    TlsConnector,
    rustls::{
        ClientConfig, RootCertStore, crypto,
        pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    },
};
use tonic::metadata::{Ascii, MetadataValue};

use super::{ClientError, address::InstanceAddress, pool};

/// Settings of a client. Fixed for all clients: 3 seconds for a connection setup, a keep-alive ping after 10 seconds
/// without data, 5 seconds for its reply.
#[derive(Clone)]
pub struct ClientSettings {
    /// Timeout of a call over all attempts, in addition to the wait timeout of its request.
    pub timeout: Duration,
    /// Maximum number of attempts, including the first. With 1, requests get no generated request id.
    pub attempts: u32,
    /// TLS of `https://` addresses.
    pub tls: TlsSettings,
    /// Token, sent with every call as `authorization: Bearer …`. Over addresses without `https://`, it is readable on the
    /// network.
    pub token: Option<String>,
}

impl ClientSettings {
    /// Creates settings with a call timeout and 8 attempts.
    pub fn new(timeout: Duration) -> Self {
        Self { timeout, attempts: 8, tls: TlsSettings::default(), token: None }
    }

    /// Creates settings with a call timeout and a single attempt.
    pub fn once(timeout: Duration) -> Self {
        Self { attempts: 1, ..Self::new(timeout) }
    }

    /// Returns the TLS of the connections; `None` if no address uses it.
    pub(super) fn encryption(&self, addresses: &[InstanceAddress]) -> Result<Option<pool::PoolTls>, ClientError> {
        if !addresses.iter().any(|address| address.is_tls) {
            return Ok(None);
        }
        Ok(Some(pool::PoolTls { connector: self.tls.connector()?, name: self.tls.server_name()? }))
    }

    pub(super) fn authorization(&self) -> Result<Option<MetadataValue<Ascii>>, ClientError> {
        let wrong = |_| ClientError::Secret("the token has characters that a header cannot carry".to_owned());
        let value = |token: &String| format!("Bearer {token}").parse::<MetadataValue<Ascii>>().map_err(wrong);
        let mut authorization = self.token.as_ref().map(value).transpose()?;
        if let Some(value) = &mut authorization {
            // Excluded from header compression tables and `Debug` output.
            value.set_sensitive(true);
        }
        Ok(authorization)
    }
}

impl fmt::Debug for ClientSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { timeout, attempts, tls, token } = self;
        let mut settings = f.debug_struct("ClientSettings");
        settings.field("timeout", timeout).field("attempts", attempts).field("tls", tls);
        settings.field("has_token", &token.is_some()).finish()
    }
}

/// Trusted certificates and the client identity for `https://` addresses.
#[derive(Clone, Debug, Default)]
pub struct TlsSettings {
    /// Trusted CA certificates as PEM; `None` for those that browsers trust.
    pub ca: Option<Vec<u8>>,
    /// Client certificate, if the service requires one.
    pub identity: Option<ClientIdentity>,
    /// Required name of the service's certificate; `None` for the host of the address.
    pub server_name: Option<String>,
}

/// A client certificate with its key.
#[derive(Clone)]
pub struct ClientIdentity {
    /// The certificate and its chain as PEM.
    pub certificates: Vec<u8>,
    /// Private key of the first certificate as PEM.
    pub key: Vec<u8>,
}

impl fmt::Debug for ClientIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").finish_non_exhaustive()
    }
}

impl TlsSettings {
    /// Returns the required name of the certificate, if set.
    ///
    /// # Errors
    /// [`ClientError::Secret`] if the text is not a server name.
    pub(super) fn server_name(&self) -> Result<Option<ServerName<'static>>, ClientError> {
        let wrong = |name: &String| ClientError::Secret(format!("{name:?} is not the name of a server"));
        let parse = |name: &String| ServerName::try_from(name.clone()).map_err(|_| wrong(name));
        self.server_name.as_ref().map(parse).transpose()
    }

    /// Creates the connector for these settings.
    ///
    /// # Errors
    /// [`ClientError::Secret`] for PEM without a certificate or key, and for a key that does not match the certificate.
    pub(super) fn connector(&self) -> Result<TlsConnector, ClientError> {
        let wrong =
            |what: &str, error: &dyn fmt::Display| ClientError::Secret(format!("{what} cannot be used: {error}"));
        let mut roots = RootCertStore::empty();
        match &self.ca {
            None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
            Some(pem) => {
                for certificate in certificates("the CA", pem)? {
                    roots.add(certificate).map_err(|error| wrong("the CA", &error))?;
                }
            }
        }
        let provider = Arc::new(crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.map_err(|error| wrong("TLS", &error))?.with_root_certificates(roots);
        let mut config = match &self.identity {
            None => config.with_no_client_auth(),
            Some(ClientIdentity { certificates: chain, key }) => {
                let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| wrong("the client's key", &error))?;
                let chain = certificates("the client's certificate", chain)?;
                config.with_client_auth_cert(chain, key).map_err(|error| wrong("the client's certificate", &error))?
            }
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(TlsConnector::from(Arc::new(config)))
    }
}

fn certificates(what: &str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, ClientError> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match read {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        Ok(_) => Err(ClientError::Secret(format!("{what} cannot be used: its PEM holds no certificate"))),
        Err(error) => Err(ClientError::Secret(format!("{what} cannot be used: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_checked_and_hidden() {
        let settings = ClientSettings { token: Some("s3cret".into()), ..ClientSettings::new(Duration::from_secs(1)) };
        assert!(!format!("{settings:?}").contains("s3cret"));
        let authorization = settings.authorization().unwrap().unwrap();
        assert_eq!(authorization.to_str().unwrap(), "Bearer s3cret");
        assert!(!format!("{authorization:?}").contains("s3cret"));
        let broken = ClientSettings { token: Some("a\nb".into()), ..settings };
        assert!(matches!(broken.authorization(), Err(ClientError::Secret(_))));

        assert!(TlsSettings::default().connector().is_ok());
        let named = |name: &str| TlsSettings { server_name: Some(name.into()), ..TlsSettings::default() }.server_name();
        assert!(named("rm.example.com").is_ok() && matches!(named("not a name"), Err(ClientError::Secret(_))));
        let ca = |pem: &str| {
            TlsSettings { ca: Some(pem.into()), ..TlsSettings::default() }.connector().err().unwrap().to_string()
        };
        assert_eq!(ca("nothing"), "the CA cannot be used: its PEM holds no certificate");
        let identity = ClientIdentity { certificates: "nothing".into(), key: "k3y".into() };
        assert!(!format!("{identity:?}").contains("107"), "the key's first byte");
        let error =
            TlsSettings { identity: Some(identity), ..TlsSettings::default() }.connector().err().unwrap().to_string();
        assert!(error.starts_with("the client's key cannot be used"), "{error}");
    }
}
