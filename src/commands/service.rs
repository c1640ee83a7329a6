//! Connection of a command to the service: address, credentials and calls.
//!
//! All commands that call the service use [`EndpointArguments`] for their arguments and [`ServiceClient`] for their calls.
//! Secrets are read from files, and never from arguments.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Args;
use prost::Message;

use rm_client::{ApiCall, ClientError, ClientIdentity, ClientSettings, Follower, RmClient, TlsSettings};

use super::{error::CommandFailure, output::progress};

/// Timeout of a call.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// Timeout of calls that read, count or change everything.
pub const TIMEOUT_LONG: Duration = Duration::from_secs(600);

/// Maximum number of attempts: a user waits for the failure.
const ATTEMPTS: u32 = 3;

/// Connection arguments: address, token and certificates. They are global: valid before and after the command.
#[derive(Debug, Clone, Args)]
pub struct EndpointArguments {
    /// HOST:PORT, https://HOST:PORT or unix:/PATH of the service; of several, separated by commas, the first that serves is used.
    #[arg(
        short,
        long,
        global = true,
        env = "LINKIS_RM_ADDRESS",
        hide_env_values = true,
        default_value = "127.0.0.1:50051",
        value_name = "ADDRESS"
    )]
    pub address: String,

    /// File with the token of the caller.
    #[arg(long, global = true, env = "LINKIS_RM_TOKEN_FILE", hide_env_values = true, value_name = "FILE")]
    token_file: Option<PathBuf>,

    /// File with the certificate authorities (PEM) that are trusted at https [default: those of browsers].
    #[arg(long, global = true, env = "LINKIS_RM_CA_CERT", hide_env_values = true, value_name = "FILE")]
    ca_cert: Option<PathBuf>,

    /// File with the certificate (PEM) of the caller.
    #[arg(
        long,
        global = true,
        env = "LINKIS_RM_CLIENT_CERT",
        hide_env_values = true,
        value_name = "FILE",
        requires = "client_key"
    )]
    client_cert: Option<PathBuf>,

    /// File with the key (PEM) of that certificate.
    #[arg(
        long,
        global = true,
        env = "LINKIS_RM_CLIENT_KEY",
        hide_env_values = true,
        value_name = "FILE",
        requires = "client_cert"
    )]
    client_key: Option<PathBuf>,

    /// Name in the certificate of the service [default: the host of its address].
    #[arg(long, global = true, env = "LINKIS_RM_TLS_SERVER_NAME", hide_env_values = true, value_name = "NAME")]
    tls_server_name: Option<String>,
}

/// A service with its client.
#[derive(Debug, Clone)]
pub struct ServiceClient {
    client: RmClient,
    address: String,
}

impl EndpointArguments {
    /// Returns a client with a call timeout. With several addresses, unreachable ones are skipped.
    ///
    /// # Errors
    /// [`CommandFailure::Service`] if the address, a certificate, a key or a token is not usable.
    pub fn connect(&self, timeout: Duration) -> Result<ServiceClient, CommandFailure> {
        self.client(self.settings(timeout))
    }

    /// Returns a client that repeats no call.
    ///
    /// # Errors
    /// As [`EndpointArguments::connect`].
    pub fn connect_once(&self, timeout: Duration) -> Result<ServiceClient, CommandFailure> {
        self.client(self.settings(timeout).map(|settings| ClientSettings { attempts: 1, ..settings }))
    }

    fn client(&self, settings: Result<ClientSettings, ClientError>) -> Result<ServiceClient, CommandFailure> {
        let client = settings.and_then(|settings| RmClient::with(&self.address, &settings));
        let failed = |error| CommandFailure::Service { error, address: self.address.clone() };
        Ok(ServiceClient { client: client.map_err(failed)?, address: self.address.clone() })
    }

    /// Returns the client settings, with credentials and a call timeout.
    ///
    /// # Errors
    /// [`ClientError::Secret`] if a certificate, a key or a token cannot be read.
    pub fn settings(&self, timeout: Duration) -> Result<ClientSettings, ClientError> {
        let set = |file: &Option<PathBuf>| file.clone().filter(|file| !file.as_os_str().is_empty());
        let identity = match (set(&self.client_cert), set(&self.client_key)) {
            (Some(cert), Some(key)) => {
                Some(ClientIdentity { certificates: read("--client-cert", &cert)?, key: read("--client-key", &key)? })
            }
            _ => None,
        };
        let ca = set(&self.ca_cert).map(|file| read("--ca-cert", &file)).transpose()?;
        let server_name = self.tls_server_name.clone().filter(|name| !name.is_empty());
        let token = set(&self.token_file).map(|file| read("--token-file", &file)).transpose()?;
        let token = token.map(|token| String::from_utf8_lossy(&token).trim().to_owned());
        let tls = TlsSettings { ca, identity, server_name };
        Ok(ClientSettings { attempts: ATTEMPTS, tls, token, ..ClientSettings::new(timeout) })
    }
}

impl ServiceClient {
    /// Returns the address of the service.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Follows the history from now on.
    pub fn follow(&self) -> Follower {
        self.client.follow_actions("")
    }

    /// Returns the failure of a call to this service.
    pub fn failed(&self, error: ClientError) -> CommandFailure {
        CommandFailure::Service { error, address: self.address.clone() }
    }

    /// Makes a call.
    ///
    /// # Errors
    /// [`CommandFailure::Service`].
    pub async fn make<Q, A>(&self, call: &ApiCall<Q, A>, question: &Q) -> Result<A, CommandFailure>
    where
        Q: Message,
        A: Message + Default + 'static,
    {
        let answer = self.client.make(call, question).await;
        answer.map_err(|error| self.failed(error))
    }

    /// As [`ServiceClient::make`], and shows the duration on a terminal.
    pub async fn make_slowly<Q, A>(&self, what: &str, call: &ApiCall<Q, A>, question: &Q) -> Result<A, CommandFailure>
    where
        Q: Message,
        A: Message + Default + 'static,
    {
        progress::shown(what, self.make(call, question)).await
    }
}

/// Maximum size of a file with a secret, in bytes: the certificates of some dozen authorities.
const SECRET_BYTES_MAX: u64 = 4 << 20;

/// Reads the file of a setting.
fn read(setting: &str, file: &Path) -> Result<Vec<u8>, ClientError> {
    let wrong = |error: &dyn std::fmt::Display| {
        ClientError::Secret(format!("{setting}: {} cannot be read: {error}", file.display()))
    };
    let size = std::fs::metadata(file).map_err(|error| wrong(&error))?.len();
    if size > SECRET_BYTES_MAX {
        return Err(wrong(&format_args!("it has {size} bytes")));
    }
    std::fs::read(file).map_err(|error| wrong(&error))
}
