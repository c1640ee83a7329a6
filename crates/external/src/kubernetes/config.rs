//! Configuration of a Kubernetes provider: the keys of Linkis and a context.
//!
//! Parses and validates JSON, and formats it with and without secrets. Errors name a key and never repeat a value.
//! Callers: the parent module and `access`.

use std::fmt;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::{Map, Value};

use crate::{
    ExternalCluster, ServerAddress,
    check::{self, wrong},
    connector::{self, Certificates, ClientIdentity},
};
use rm_model::{external::CheckRules, name::FieldError};

use super::Kubernetes;

/// Maximum length of a text value, in bytes: a bundle of certificates.
const TEXT_BYTES_MAX: usize = 16 * 1024;

const KEYS: &str = "k8sConfig, context, k8sMasterUrl, k8sCaCertData, k8sClientCertData, k8sClientKeyData, whenDown, maxAge, lastKnownFor \
                    and refreshInterval";

/// Configuration of a provider.
#[derive(Debug)]
pub(super) struct KubernetesConfig {
    /// Source of the access data.
    pub source: AccessSource,
    /// Rules by which requests are checked against the namespaces.
    pub rules: CheckRules,
}

/// Source of the access data of a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum AccessSource {
    /// The service account of this instance's pod.
    InCluster,
    /// A kubeconfig on the machine of each instance.
    Kubeconfig {
        /// Path of the file.
        path: String,
        /// Context in the file; `None` for the current one.
        context: Option<String>,
    },
    /// The configuration itself.
    Named(Box<NamedServer>),
}

/// A server with its access data in the configuration.
#[derive(Debug, Clone)]
pub(super) struct NamedServer {
    /// Address of the server.
    pub address: ServerAddress,
    /// Trusted certificates (PEM or base64 of it); `None` for the system's.
    pub ca: Option<String>,
    /// Client certificate and key; `None` for no client authentication.
    pub client: Option<(String, SecretString)>,
}

impl PartialEq for NamedServer {
    fn eq(&self, other: &Self) -> bool {
        let keys = [self, other].map(|named| named.client.as_ref().map(|(cert, key)| (cert, key.expose_secret())));
        (&self.address, &self.ca) == (&other.address, &other.ca) && keys[0] == keys[1]
    }
}

impl Eq for NamedServer {}

/// Name of the cluster in failures.
impl fmt::Display for AccessSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InCluster => f.write_str("the cluster of this server's pod"),
            Self::Kubeconfig { path, context: None } => write!(f, "the cluster of {path}"),
            Self::Kubeconfig { path, context: Some(context) } => write!(f, "the cluster of {context:?} in {path}"),
            Self::Named(named) => f.write_str(named.address.as_str()),
        }
    }
}

impl AccessSource {
    /// Returns the address, if the configuration contains it.
    pub fn address(&self) -> Option<&ServerAddress> {
        match self {
            Self::Named(named) => Some(&named.address),
            Self::InCluster | Self::Kubeconfig { .. } => None,
        }
    }
}

/// Returns the PEM in `text`, which is plain or base64 as in a kubeconfig.
pub(super) fn pem(text: &str) -> Option<Vec<u8>> {
    const BEGIN: &[u8] = b"-----BEGIN ";
    let is_pem = |bytes: &[u8]| bytes.windows(BEGIN.len()).any(|window| window == BEGIN);
    if is_pem(text.as_bytes()) {
        return Some(text.as_bytes().to_vec());
    }
    let base64: String = text.chars().filter(|c| !c.is_ascii_whitespace()).collect();
    BASE64_STANDARD.decode(base64).ok().filter(|decoded| is_pem(decoded))
}

/// Parses the certificates in a text; `None` if there are none.
pub(super) fn certificates(text: &str) -> Option<Certificates> {
    connector::certificates(&pem(text)?).ok().filter(|all| !all.is_empty())
}

/// Parses a client certificate with its key; `None` if they are invalid.
pub(super) fn identity(certificate: &str, key: &SecretString) -> Option<ClientIdentity> {
    ClientIdentity::parse(&pem(certificate)?, &pem(key.expose_secret())?)
}

/// Parses a configuration. An omitted key is copied from `before`, if it belongs to the same certificate and address.
///
/// # Errors
/// Names the faulty key.
pub fn read(json: &str, before: Option<&str>) -> Result<Box<dyn ExternalCluster>, FieldError> {
    let before = before.and_then(|before| parse(before, None).ok());
    let config = parse(json, before.as_ref().map(|before| &before.source))?;
    Ok(Box::new(Kubernetes { config }))
}

fn parse(json: &str, before: Option<&AccessSource>) -> Result<KubernetesConfig, FieldError> {
    let mut keys = check::keys(json)?;
    // Linkis writes a missing value as an empty text.
    let mut text =
        |key: &str| check::text(&mut keys, key, TEXT_BYTES_MAX).map(|text| text.filter(|text| !text.trim().is_empty()));
    let (path, context, address) = (text("k8sConfig")?, text("context")?, text("k8sMasterUrl")?);
    let (ca, certificate, key) = (text("k8sCaCertData")?, text("k8sClientCertData")?, text("k8sClientKeyData")?);
    let rules = check::read(&mut keys)?;
    check::nothing_else(&keys, KEYS)?;
    let named = [
        ("k8sCaCertData", ca.is_some()),
        ("k8sClientCertData", certificate.is_some()),
        ("k8sClientKeyData", key.is_some()),
    ];
    let stray = named.into_iter().find(|(_, is_there)| *is_there).filter(|_| address.is_none());
    if let Some((key, _)) = stray {
        return Err(wrong(key, "belongs to k8sMasterUrl; omit it, or set k8sMasterUrl"));
    }
    if context.is_some() && path.is_none() {
        return Err(wrong("context", "belongs to k8sConfig; omit it, or set k8sConfig"));
    }
    let source = match (path, address) {
        (Some(_), Some(_)) => {
            return Err(wrong("k8sMasterUrl", "conflicts with the kubeconfig of k8sConfig; omit one of the two"));
        }
        (Some(path), None) => {
            AccessSource::Kubeconfig { path: checked_path(path)?, context: checked_context(context)? }
        }
        (None, None) => AccessSource::InCluster,
        (None, Some(address)) => {
            let address = ServerAddress::parse(&address).map_err(|problem| wrong("k8sMasterUrl", problem))?;
            AccessSource::Named(Box::new(named_source(address, ca, certificate, key, before)?))
        }
    };
    Ok(KubernetesConfig { source, rules })
}

fn checked_path(path: String) -> Result<String, FieldError> {
    match path.starts_with('/') && path.len() <= 4096 && !path.chars().any(char::is_control) {
        true => Ok(path),
        false => Err(wrong("k8sConfig", "must be the absolute path of a file")),
    }
}

fn checked_context(context: Option<String>) -> Result<Option<String>, FieldError> {
    match &context {
        Some(name) if name.len() > 255 || name.chars().any(char::is_control) => {
            Err(wrong("context", "must have at most 255 bytes, and no control characters"))
        }
        _ => Ok(context),
    }
}

fn named_source(
    address: ServerAddress,
    ca: Option<String>,
    certificate: Option<String>,
    key: Option<String>,
    before: Option<&AccessSource>,
) -> Result<NamedServer, FieldError> {
    const NONE: &str = "is not PEM, or base64 of PEM";
    if ca.as_deref().is_some_and(|ca| certificates(ca).is_none()) {
        return Err(wrong("k8sCaCertData", NONE));
    }
    let client = match (certificate, key) {
        (None, None) => None,
        (None, Some(_)) => return Err(wrong("k8sClientCertData", "is required with k8sClientKeyData")),
        (Some(certificate), Some(key)) => Some((certificate, SecretString::from(key))),
        (Some(certificate), None) => {
            let kept = match before {
                Some(AccessSource::Named(before)) if before.address == address => before.client.as_ref(),
                _ => None,
            };
            let kept = kept.filter(|(before, _)| *before == certificate);
            let missing = || wrong("k8sClientKeyData", "is required again for another certificate or address");
            Some(kept.ok_or_else(missing)?.clone())
        }
    };
    if let Some((certificate, key)) = &client {
        if !address.is_encrypted() {
            return Err(wrong("k8sMasterUrl", "must begin with https:// because a certificate is sent to it"));
        }
        if identity(certificate, key).is_none() {
            return Err(wrong("k8sClientCertData", format!("{NONE}, or k8sClientKeyData is not its key")));
        }
    }
    Ok(NamedServer { address, ca, client })
}

impl KubernetesConfig {
    fn keys(&self) -> Map<String, Value> {
        let mut keys = Map::new();
        let mut put = |key: &str, text: &str| drop(keys.insert(key.to_owned(), text.into()));
        match &self.source {
            AccessSource::InCluster => {}
            AccessSource::Kubeconfig { path, context } => {
                put("k8sConfig", path);
                context.iter().for_each(|context| put("context", context));
            }
            AccessSource::Named(named) => {
                put("k8sMasterUrl", named.address.as_str());
                named.ca.iter().for_each(|ca| put("k8sCaCertData", ca));
                named.client.iter().for_each(|(certificate, _)| put("k8sClientCertData", certificate));
            }
        }
        check::write(&self.rules, &mut keys);
        keys
    }

    /// Returns the whole configuration as JSON, secrets included.
    pub fn stored(&self) -> SecretString {
        let mut keys = self.keys();
        if let AccessSource::Named(named) = &self.source
            && let Some((_, key)) = &named.client
        {
            keys.insert("k8sClientKeyData".to_owned(), key.expose_secret().into());
        }
        Value::Object(keys).to_string().into()
    }

    /// Returns the configuration as JSON without the key.
    pub fn shown(&self) -> String {
        Value::Object(self.keys()).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a certificate and its key in PEM.
    fn certified(name: &str) -> (String, String) {
        let own = rcgen::generate_simple_self_signed([name.to_owned()]).unwrap();
        (own.cert.pem(), own.signing_key.serialize_pem())
    }

    fn source(json: Value) -> AccessSource {
        parse(&json.to_string(), None).unwrap().source
    }

    #[test]
    fn linkis_kubernetes_keys_are_accepted() {
        assert_eq!(source(serde_json::json!({})), AccessSource::InCluster);
        let kubeconfig =
            source(serde_json::json!({"k8sConfig": "/etc/kube/config", "k8sMasterUrl": "", "context": "prod"}));
        assert_eq!(
            kubeconfig,
            AccessSource::Kubeconfig { path: "/etc/kube/config".into(), context: Some("prod".into()) }
        );
        assert_eq!(
            (kubeconfig.address(), kubeconfig.to_string().as_str()),
            (None, r#"the cluster of "prod" in /etc/kube/config"#)
        );
        let (certificate, key) = certified("linkis");
        let json = serde_json::json!({"k8sMasterUrl": "https://k8s:6443/", "k8sCaCertData": BASE64_STANDARD.encode(&certificate),
            "k8sClientCertData": certificate, "k8sClientKeyData": BASE64_STANDARD.encode(&key)});
        let named = source(json);
        assert_eq!(named.address().unwrap().as_str(), "https://k8s:6443");
        let again =
            parse(KubernetesConfig { source: named.clone(), rules: check::DEFAULT }.stored().expose_secret(), None)
                .unwrap();
        assert_eq!(again.source, named);
    }

    #[test]
    fn kubernetes_config_error_names_key() {
        let ((certificate, key), (other, _)) = (certified("linkis"), certified("other"));
        let named = |more: Value| {
            let mut all = serde_json::json!({"k8sMasterUrl": "https://k8s"});
            all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            all
        };
        for (json, at) in [
            (serde_json::json!([]), "config"),
            (serde_json::json!({"k8sConfig": 1}), "config.k8sConfig"),
            (serde_json::json!({"k8sConfig": "config"}), "config.k8sConfig"),
            (serde_json::json!({"k8sConfig": "/a\u{0}"}), "config.k8sConfig"),
            (serde_json::json!({"context": "prod"}), "config.context"),
            (serde_json::json!({"k8sMasterUrl": "k8s:6443"}), "config.k8sMasterUrl"),
            (serde_json::json!({"k8sMasterUrl": "https://u:p@k8s"}), "config.k8sMasterUrl"),
            (named(serde_json::json!({"k8sConfig": "/config"})), "config.k8sMasterUrl"),
            (serde_json::json!({"k8sCaCertData": certificate}), "config.k8sCaCertData"),
            (named(serde_json::json!({"k8sCaCertData": "x"})), "config.k8sCaCertData"),
            (named(serde_json::json!({"k8sClientKeyData": key})), "config.k8sClientCertData"),
            (named(serde_json::json!({"k8sClientCertData": certificate})), "config.k8sClientKeyData"),
            (named(serde_json::json!({"k8sClientCertData": "x", "k8sClientKeyData": key})), "config.k8sClientCertData"),
            (named(serde_json::json!({"token": "x"})), "config.token"),
            (named(serde_json::json!({"maxAge": "1"})), "config.maxAge"),
        ] {
            let FieldError { field, problem } = read(&json.to_string(), None).unwrap_err();
            assert_eq!(field, at, "{json}");
            assert!(!problem.contains("BEGIN") && !problem.contains("u:p"), "{problem}");
        }
        let open = named(
            serde_json::json!({"k8sMasterUrl": "http://k8s", "k8sClientCertData": other, "k8sClientKeyData": key}),
        );
        assert_eq!(
            read(&open.to_string(), None).unwrap_err().field,
            "config.k8sMasterUrl",
            "the certificate would not be sent"
        );
    }

    #[test]
    fn client_key_is_hidden_and_reused_only_for_same_server() {
        let (certificate, key) = certified("linkis");
        let with = |address: &str, key: Option<&str>| {
            let mut json = serde_json::json!({"k8sMasterUrl": address, "k8sClientCertData": certificate});
            if let Some(key) = key {
                json["k8sClientKeyData"] = key.into();
            }
            json.to_string()
        };
        let line = key.lines().nth(1).unwrap();
        let first = read(&with("https://k8s", Some(&key)), None).unwrap();
        assert!(!first.shown().contains(line) && !format!("{first:?}").contains(line));
        let stored = first.stored();
        let before = Some(stored.expose_secret());
        let again = read(&with("https://k8s", None), before).unwrap();
        assert_eq!(again.stored().expose_secret(), stored.expose_secret());
        assert_eq!(read(&with("https://elsewhere", None), before).unwrap_err().field, "config.k8sClientKeyData");
    }
}
