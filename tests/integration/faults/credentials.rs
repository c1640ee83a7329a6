//! Credentials of callers and authorities: they are replaced during calls, and the old ones become invalid.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{RwLock, RwLockReadGuard},
    time::{Duration, Instant},
};

use rm_client::{ClientSettings, RmClient};

use super::{random::Random, workload::Hosts};
use crate::{
    certificates::{Authority, FAR, Identity, authority, certify},
    harness::*,
};

/// Maximum time until instances accept new credentials and reject old ones. They poll certificates every 3 s, tokens every 2 s.
const KNOWN_WITHIN: Duration = Duration::from_secs(10);

/// Timeout of one check.
const LOOK_TIMEOUT: Duration = Duration::from_secs(3);

/// The current credentials.
pub struct Credentials {
    folder: PathBuf,
    /// The database URL, without the proxies.
    url: String,
    authorities: [Authority; 2],
    shown: RwLock<Shown>,
}

/// Credentials of the callers.
#[derive(Clone)]
struct Shown {
    token: String,
    token_id: String,
    /// Certificates of the reporting EMs.
    of_hosts: Identity,
    /// Index of the authority of all certificates.
    by: usize,
}

impl Credentials {
    /// Creates all credentials, directly in the database.
    pub fn begin(folder: &Path, url: String) -> Self {
        let folder = folder.join("credentials");
        fs::create_dir_all(&folder).unwrap();
        let authorities = [authority("one"), authority("other")];
        let (token_id, token) = create_token(&url);
        let of_hosts = certify(&authorities[0], &Hosts::REPORTING, &[], FAR);
        let begun = Self { folder, url, authorities, shown: RwLock::new(Shown { token, token_id, of_hosts, by: 0 }) };
        begun.write_certificates(0);
        begun
    }

    /// Settings of an instance.
    pub fn arguments(&self) -> Vec<String> {
        let files = [("--tls-cert", "cert"), ("--tls-key", "key"), ("--tls-client-ca", "ca")];
        files.into_iter().flat_map(|(flag, name)| [flag.to_owned(), self.path(name)]).collect()
    }

    /// A client with the current token.
    pub fn client(&self, address: &str, timeout: Duration) -> RmClient {
        self.with_token(address, timeout, &self.shown().token)
    }

    /// Returns a client with a certificate, for the reporting EMs.
    pub fn host(&self, address: &str, timeout: Duration) -> RmClient {
        self.with_certificate(address, timeout, &self.shown().of_hosts, &[0, 1])
    }

    /// Creates another token, passes it to all callers by `hand_out`, and revokes the earlier one.
    ///
    /// # Errors
    /// Fails if an instance does not accept the new token in time, or still accepts the old one.
    pub async fn replace_token(&self, addresses: &[String], hand_out: impl FnOnce()) -> Result<(), String> {
        let before = self.shown().clone();
        let url = self.url.clone();
        let (token_id, token) = tokio::task::spawn_blocking(move || create_token(&url)).await.unwrap();
        for address in addresses {
            let rm = self.with_token(address, LOOK_TIMEOUT, &token);
            within(&format!("{address} knows the new token"), async || rm.policies().await.is_ok()).await?;
        }
        {
            let mut shown = self.shown.write().unwrap();
            (shown.token, shown.token_id) = (token, token_id);
        }
        hand_out();
        let url = self.url.clone();
        let words =
            ["revoke", "--id", &before.token_id, "--yes", "--reason", "a new one is handed out"].map(str::to_owned);
        tokio::task::spawn_blocking(move || tokens(&url, &words)).await.unwrap();
        for address in addresses {
            let rm = self.with_token(address, LOOK_TIMEOUT, &before.token);
            let refused = async || {
                let answer = rm.policies().await;
                answer.is_err_and(|error| error.reason().as_deref() == Some("TOKEN_REVOKED"))
            };
            within(&format!("{address} knows that the old token is revoked"), refused).await?;
        }
        Ok(())
    }

    /// Replaces the certificates of the instances and of the EMs, and their authority, sometimes after garbage.
    ///
    /// # Errors
    /// Fails if an instance does not use the new files in time, still accepts the old ones, or fails on garbage.
    pub async fn replace_certificates(
        &self,
        addresses: &[String],
        random: &mut Random,
        hand_out: impl FnOnce(),
    ) -> Result<(), String> {
        let before = self.shown().clone();
        let by = 1 - before.by;
        if random.percent(50) {
            self.write(random.pick(["cert", "key", "ca"]), "garbage");
            tokio::time::sleep(Duration::from_secs(4)).await;
            for address in addresses {
                let rm = self.with_certificate(address, LOOK_TIMEOUT, &before.of_hosts, &[before.by]);
                within(&format!("{address} goes on with what was before the garbage"), async || asks(&rm).await)
                    .await?;
            }
        }
        self.write_certificates(by);
        let of_hosts = certify(&self.authorities[by], &Hosts::REPORTING, &[], FAR);
        for address in addresses {
            let got = format!("{address} has the new certificates and believes them");
            let taken_up = async || asks(&self.with_certificate(address, LOOK_TIMEOUT, &of_hosts, &[by])).await;
            within(&got, taken_up).await?;
        }
        {
            let mut shown = self.shown.write().unwrap();
            (shown.of_hosts, shown.by) = (of_hosts, by);
        }
        hand_out();
        for address in addresses {
            let old = self.with_certificate(address, LOOK_TIMEOUT, &before.of_hosts, &[by]);
            if asks(&old).await {
                return Err(format!("{address} believes a certificate of the authority before"));
            }
        }
        Ok(())
    }

    fn shown(&self) -> RwLockReadGuard<'_, Shown> {
        self.shown.read().unwrap()
    }

    fn with_token(&self, address: &str, timeout: Duration, token: &str) -> RmClient {
        let tls = rm_client::TlsSettings { ca: Some(self.believed(&[0, 1])), identity: None, server_name: None };
        let settings = ClientSettings { tls, token: Some(token.to_owned()), ..ClientSettings::once(timeout) };
        RmClient::with(address, &settings).unwrap()
    }

    fn with_certificate(&self, address: &str, timeout: Duration, own: &Identity, believed: &[usize]) -> RmClient {
        let identity = rm_client::ClientIdentity { certificates: own.cert.clone().into(), key: own.key.clone().into() };
        let tls =
            rm_client::TlsSettings { ca: Some(self.believed(believed)), identity: Some(identity), server_name: None };
        RmClient::with(address, &ClientSettings { tls, ..ClientSettings::once(timeout) }).unwrap()
    }

    fn believed(&self, authorities: &[usize]) -> Vec<u8> {
        authorities.iter().map(|number| self.authorities[*number].as_ref().pem()).collect::<String>().into_bytes()
    }

    fn write_certificates(&self, by: usize) {
        let server = certify(&self.authorities[by], &["127.0.0.1"], &[], FAR);
        self.write("cert", &server.cert);
        self.write("key", &server.key);
        self.write("ca", &self.authorities[by].as_ref().pem());
    }

    /// Replaces a file atomically, as a changed link.
    fn write(&self, name: &str, text: &str) {
        fs::write(self.path("next"), text).unwrap();
        fs::rename(self.path("next"), self.path(name)).unwrap();
    }

    fn path(&self, name: &str) -> String {
        self.folder.join(name).to_str().unwrap().to_owned()
    }
}

/// Whether the call of a reporting EM is served.
async fn asks(rm: &RmClient) -> bool {
    let answer = rm.em(&em(Hosts::REPORTING[0])).await;
    // The EM may not be registered yet.
    answer.as_ref().map_or_else(|error| error.reason().as_deref() == Some("EM_NOT_REGISTERED"), |_| true)
}

async fn within(what: &str, holds: impl AsyncFn() -> bool) -> Result<(), String> {
    let start = Instant::now();
    let mut is_last = false;
    while !holds().await {
        if is_last {
            return Err(format!("not within {KNOWN_WITHIN:?}: {what}"));
        }
        is_last = start.elapsed() > KNOWN_WITHIN;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

/// Id and secret of a token.
fn create_token(url: &str) -> (String, String) {
    let words = ["create", "--name", "callers", "--owner", "the faults", "--role", "admin"].map(str::to_owned);
    let (token, got) = tokens(url, &words);
    let id = got.lines().find_map(|line| line.strip_prefix("token ")?.split(' ').next()).unwrap().to_owned();
    (id, token.trim_end().to_owned())
}

/// Runs `tokens`. Returns its output and its errors.
fn tokens(url: &str, words: &[String]) -> (String, String) {
    let mut command = Command::new(*PROGRAM);
    command.arg("token").args(words).env("DATABASE_URL", url).env_remove("LINKIS_RM_DATA_DIR");
    let done = command.output().unwrap();
    let [out, got] = [done.stdout, done.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(done.status.success(), "{words:?}: {got}");
    (out, got)
}
