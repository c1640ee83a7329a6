//! Access to a Kubernetes server: address, trusted certificates and credentials.
//!
//! Files are read again for each fetch, because tokens and certificates are renewed in place. The size of each file is
//! bounded, and errors never repeat its content. Caller: `fetch`.

use std::{
    fs::File,
    io::Read as _,
    path::{Path, PathBuf},
};

use secrecy::{ExposeSecret as _, SecretString};

use crate::{
    ServerAddress,
    connector::{Certificates, ClientIdentity, HttpClient},
    http::{ClusterHttp, HttpFailure},
};

use super::{
    config::{AccessSource, certificates, identity},
    kubeconfig::{self, KubeconfigError},
};

/// Files and environment variables that Kubernetes provides to each pod.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
const SERVICE_HOST: &str = "KUBERNETES_SERVICE_HOST";
const SERVICE_PORT: &str = "KUBERNETES_SERVICE_PORT";

/// Maximum size of a file, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

const NO_POD: &str = "this server does not run in a pod with access to its cluster; set k8sConfig or k8sMasterUrl";
const NO_KUBECONFIG: &str = "k8sConfig does not name a readable kubeconfig of at most 1 MiB";
const NO_CONTEXT: &str =
    "its kubeconfig has no such context, no current context, or lacks the context's cluster or user";
const NO_ADDRESS: &str = "its kubeconfig does not name a server as https://HOST:PORT";
const NO_CERTIFICATE: &str = "its certificates or their key are malformed or unreadable";
const NO_TOKEN: &str = "its token cannot be read";
const NOT_ENCRYPTED: &str = "its address must begin with https:// because a token or a certificate is sent to it";
const NOT_OFFERED: &str = "its kubeconfig uses a program, a password, impersonation, a proxy, or unverified \
    certificates, which are not supported; use a token, a token file or a client certificate";

#[derive(Debug)]
pub(super) struct ServerAccess {
    pub address: ServerAddress,
    pub token: Option<SecretString>,
    pub client: HttpClient,
}

/// Access data before the client is built.
struct AccessConfig {
    address: ServerAddress,
    roots: Option<Certificates>,
    identity: Option<ClientIdentity>,
    token: Option<SecretString>,
}

impl ServerAccess {
    /// Reads the present access data of a source.
    ///
    /// # Errors
    /// [`HttpFailure::NoAccess`], [`HttpFailure::NotAllowed`].
    pub async fn read(source: &AccessSource, http: &ClusterHttp) -> Result<Self, HttpFailure> {
        let source = source.clone();
        let config =
            tokio::task::spawn_blocking(move || access_config(&source)).await.map_err(|_| HttpFailure::Stopping)??;
        let AccessConfig { address, roots, identity, token } = config;
        http.check(&address)?;
        if (token.is_some() || identity.is_some()) && !address.is_encrypted() {
            return Err(HttpFailure::NoAccess(NOT_ENCRYPTED));
        }
        Ok(Self { client: http.client_of(roots, identity)?, address, token })
    }
}

fn access_config(source: &AccessSource) -> Result<AccessConfig, HttpFailure> {
    match source {
        AccessSource::InCluster => {
            let [host, port] = [SERVICE_HOST, SERVICE_PORT].map(|name| std::env::var(name).unwrap_or_default());
            in_cluster(&host, &port, Path::new(SERVICE_ACCOUNT))
        }
        AccessSource::Kubeconfig { path, context } => kubeconfig(Path::new(path), context.as_deref()),
        AccessSource::Named(named) => Ok(AccessConfig {
            address: named.address.clone(),
            roots: named.ca.as_deref().map(read_certificates).transpose()?,
            identity: named.client.as_ref().map(|(certificate, key)| read_identity(certificate, key)).transpose()?,
            token: None,
        }),
    }
}

fn in_cluster(host: &str, port: &str, folder: &Path) -> Result<AccessConfig, HttpFailure> {
    if host.is_empty() {
        return Err(HttpFailure::NoAccess(NO_POD));
    }
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    let port = if port.is_empty() { "443" } else { port };
    let address = ServerAddress::parse(&format!("https://{host}:{port}")).map_err(|_| HttpFailure::NoAccess(NO_POD))?;
    let ca = read_file(&folder.join("ca.crt")).ok_or(HttpFailure::NoAccess(NO_POD))?;
    Ok(AccessConfig {
        address,
        roots: Some(read_certificates(ca.expose_secret())?),
        identity: None,
        token: Some(read_token(&folder.join("token"))?),
    })
}

fn kubeconfig(path: &Path, context: Option<&str>) -> Result<AccessConfig, HttpFailure> {
    let text = read_file(path).ok_or(HttpFailure::NoAccess(NO_KUBECONFIG))?;
    let (cluster, user) = kubeconfig::choose(text.expose_secret(), context).map_err(|error| {
        HttpFailure::NoAccess(match error {
            KubeconfigError::Unreadable => NO_KUBECONFIG,
            KubeconfigError::NoContext => NO_CONTEXT,
            KubeconfigError::NotOffered => NOT_OFFERED,
        })
    })?;
    let server = cluster.server.unwrap_or_default();
    let address = ServerAddress::parse(&server).map_err(|_| HttpFailure::NoAccess(NO_ADDRESS))?;
    // Relative paths in a kubeconfig start from its own directory.
    let folder = path.parent().unwrap_or(path);
    let text = |data: Option<String>, file: Option<String>| match (data, file) {
        (Some(data), _) => Ok(Some(SecretString::from(data))),
        (None, Some(file)) => {
            read_file(&folder.join(PathBuf::from(file))).map(Some).ok_or(HttpFailure::NoAccess(NO_CERTIFICATE))
        }
        (None, None) => Ok(None),
    };
    let roots = text(cluster.certificate_authority_data, cluster.certificate_authority)?;
    let certificate = text(user.client_certificate_data, user.client_certificate)?;
    let key = text(user.client_key_data.map(|key| key.expose_secret().to_owned()), user.client_key)?;
    let identity = match (certificate, key) {
        (None, None) => None,
        (Some(certificate), Some(key)) => Some(read_identity(certificate.expose_secret(), &key)?),
        _ => return Err(HttpFailure::NoAccess(NO_CERTIFICATE)),
    };
    let token = match (user.token, user.token_file) {
        (Some(token), _) => Some(token),
        (None, Some(file)) => Some(read_token(&folder.join(PathBuf::from(file)))?),
        (None, None) => None,
    };
    let roots = roots.map(|roots| read_certificates(roots.expose_secret())).transpose()?;
    Ok(AccessConfig { address, roots, identity, token })
}

fn read_certificates(text: &str) -> Result<Certificates, HttpFailure> {
    certificates(text).ok_or(HttpFailure::NoAccess(NO_CERTIFICATE))
}

fn read_identity(certificate: &str, key: &SecretString) -> Result<ClientIdentity, HttpFailure> {
    identity(certificate, key).ok_or(HttpFailure::NoAccess(NO_CERTIFICATE))
}

fn read_token(path: &Path) -> Result<SecretString, HttpFailure> {
    let token = read_file(path).map(|token| SecretString::from(token.expose_secret().trim()));
    token.filter(|token| !token.expose_secret().is_empty()).ok_or(HttpFailure::NoAccess(NO_TOKEN))
}

/// Reads a text of at most [`FILE_BYTES_MAX`]. Rejects anything but plain files: a device may never end, a pipe may
/// never begin.
fn read_file(path: &Path) -> Option<SecretString> {
    if !std::fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let mut text = String::new();
    File::open(path).ok()?.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).ok()?;
    (u64::try_from(text.len()).ok()? <= FILE_BYTES_MAX).then(|| text.into())
}

#[cfg(test)]
#[path = "access_tests.rs"]
mod tests;
