//! What a client can be told.

use std::{fmt, sync::Arc, time::Duration};

use tokio_rustls::{
    TlsConnector,
    rustls::{
        ClientConfig, RootCertStore, crypto,
        pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    },
};
use tonic::metadata::{Ascii, MetadataValue};

use super::{ClientError, address::Address, pool};

/// How a client behaves. What is not set here is the same for all: a connection has 3 seconds to be made, and is asked for a sign of life
/// when nothing was heard for 10 seconds, for which it has 5.
#[derive(Clone)]
pub struct ClientSettings {
    /// How long a call may take, all its tries together, besides what its request is ready to wait in line.
    pub timeout: Duration,
    /// How often a call is tried, counting the first: as long as it is safe to repeat, worth it, and there is time. With 1, no request id
    /// is made either.
    pub attempts: u32,
    /// How `https://` addresses are spoken to.
    pub tls: Tls,
    /// What says who calls: sent with every call as `authorization: Bearer …`. To addresses that are not `https://`, too: whoever
    /// listens there reads it.
    pub token: Option<String>,
}

impl ClientSettings {
    /// Calls may take so long; what is safe to repeat is repeated.
    pub fn new(timeout: Duration) -> Self {
        Self { timeout, attempts: 8, tls: Tls::default(), token: None }
    }

    /// The same, and whatever fails is the caller's to judge: nothing is repeated.
    pub fn once(timeout: Duration) -> Self {
        Self { attempts: 1, ..Self::new(timeout) }
    }

    /// How connections with these are encrypted, if any are.
    pub(super) fn encryption(&self, addresses: &[Address]) -> Result<Option<pool::Tls>, ClientError> {
        if !addresses.iter().any(|address| address.is_tls) {
            return Ok(None);
        }
        Ok(Some(pool::Tls { connector: self.tls.connector()?, name: self.tls.server_name()? }))
    }

    pub(super) fn authorization(&self) -> Result<Option<MetadataValue<Ascii>>, ClientError> {
        let wrong = |_| ClientError::Secret("the token has characters that no header takes".to_owned());
        let value = |token: &String| format!("Bearer {token}").parse::<MetadataValue<Ascii>>().map_err(wrong);
        let mut authorization = self.token.as_ref().map(value).transpose()?;
        if let Some(value) = &mut authorization {
            // Not to be kept in tables of headers, nor shown.
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

/// Whom to trust at `https://` addresses, and as whom to come there.
#[derive(Clone, Debug, Default)]
pub struct Tls {
    /// The certificates, as PEM, of those who may vouch for the service; `None` for those whom browsers trust.
    pub ca: Option<Vec<u8>>,
    /// What shows who calls, if the service asks for it.
    pub identity: Option<Identity>,
    /// The name that the service's certificate has to be for; `None` for the host of its address.
    pub server_name: Option<String>,
}

/// A certificate and its key.
#[derive(Clone)]
pub struct Identity {
    /// The certificate and those that vouch for it, as PEM.
    pub certificates: Vec<u8>,
    /// The private key of the first of them, as PEM.
    pub key: Vec<u8>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").finish_non_exhaustive()
    }
}

impl Tls {
    /// The name that certificates have to be for, if it is not that of the address.
    ///
    /// # Errors
    /// [`ClientError::Secret`] for what is no name.
    pub(super) fn server_name(&self) -> Result<Option<ServerName<'static>>, ClientError> {
        let wrong = |name: &String| ClientError::Secret(format!("{name:?} is not the name of a server"));
        let parse = |name: &String| ServerName::try_from(name.clone()).map_err(|_| wrong(name));
        self.server_name.as_ref().map(parse).transpose()
    }

    /// What opens connections so.
    ///
    /// # Errors
    /// [`ClientError::Secret`] for PEM that holds no certificate or key, and for a key that is not the certificate's.
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
            Some(Identity { certificates: chain, key }) => {
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
    fn secrets_are_checked_and_not_shown() {
        let settings = ClientSettings { token: Some("s3cret".into()), ..ClientSettings::new(Duration::from_secs(1)) };
        assert!(!format!("{settings:?}").contains("s3cret"));
        let authorization = settings.authorization().unwrap().unwrap();
        assert_eq!(authorization.to_str().unwrap(), "Bearer s3cret");
        assert!(!format!("{authorization:?}").contains("s3cret"));
        let broken = ClientSettings { token: Some("a\nb".into()), ..settings };
        assert!(matches!(broken.authorization(), Err(ClientError::Secret(_))));

        assert!(Tls::default().connector().is_ok());
        let named = |name: &str| Tls { server_name: Some(name.into()), ..Tls::default() }.server_name();
        assert!(named("rm.example.com").is_ok() && matches!(named("not a name"), Err(ClientError::Secret(_))));
        let ca = |pem: &str| Tls { ca: Some(pem.into()), ..Tls::default() }.connector().err().unwrap().to_string();
        assert_eq!(ca("nothing"), "the CA cannot be used: its PEM holds no certificate");
        let identity = Identity { certificates: "nothing".into(), key: "k3y".into() };
        assert!(!format!("{identity:?}").contains("107"), "the key's first byte");
        let error = Tls { identity: Some(identity), ..Tls::default() }.connector().err().unwrap().to_string();
        assert!(error.starts_with("the client's key cannot be used"), "{error}");
    }
}
