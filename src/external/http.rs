//! Requests over HTTP to clusters: bounded in time and size, never redirected, and with credentials for named addresses alone.

use std::{
    ops::Deref,
    sync::{Arc, OnceLock},
    time::Duration,
};

use reqwest::{
    Certificate, Client, ClientBuilder, Identity, RequestBuilder, Response, StatusCode, Url, header, redirect,
};
use secrecy::{ExposeSecret as _, SecretString};
use tokio::time::{Instant, timeout_at};
use tokio_rustls::rustls;

use super::{
    Address,
    allowed::AllowedHosts,
    turns::{Turn, Turns},
};

/// How long things may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    /// A connection.
    pub connect: Duration,
    /// Until the other side says something, or something more.
    pub read: Duration,
    /// An answer, with all that stands in it, but for the wait for a turn.
    pub answer: Duration,
    /// What is left of an answer that has its turn, or it is slow.
    pub turn: Duration,
    /// All that is asked, of whichever addresses and however often, until something is fetched.
    pub fetch: Duration,
}

const TIMES: Times = Times {
    connect: Duration::from_secs(2),
    read: Duration::from_secs(5),
    answer: Duration::from_secs(10),
    turn: Duration::from_secs(2),
    fetch: Duration::from_secs(20),
};

/// The largest answer, unpacked: that of 3,000 queues of a capacity scheduler.
const BODY_BYTES_MAX: usize = 32 << 20;

/// What is no larger waits for no turn: of all clusters together it is little.
const SMALL_BYTES_MAX: usize = 64 << 10;

/// How often a cluster is tried, with a rest between: neither too many instances at the same moment, nor all the while.
pub(super) const ROUNDS_MAX: u32 = 3;
const REST: Duration = Duration::from_millis(200);

/// How long to rest before a round: each time twice as long, and up to twice as long as that, so that instances do not come back together.
pub(super) fn rest(round: u32) -> Duration {
    let least = REST * 2_u32.saturating_pow(round.saturating_sub(1));
    // A few bits of chance; a clock's would do as well.
    let chance = u32::try_from(uuid::Uuid::new_v4().as_u128() % 1000).unwrap_or_default();
    least + least * chance / 1000
}

/// Asks clusters; clones share it.
#[derive(Debug, Clone)]
pub struct Http {
    /// Why there is none, if it cannot be made.
    client: Arc<OnceLock<Result<Client, Failure>>>,
    allowed: Arc<AllowedHosts>,
    turns: Turns,
    times: Times,
    /// By which certificates the other side is believed, in PEM; `None` for those of the machine.
    ca: Option<Arc<Vec<u8>>>,
}

/// What stands at an address. If it is large, it has its turn for as long as this lives.
#[derive(Debug)]
pub(super) struct Answer {
    body: Vec<u8>,
    turn: Option<Turn>,
}

impl Deref for Answer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.body
    }
}

/// Who asks: a user and a password.
pub type Login<'a> = (&'a str, &'a SecretString);

/// Why an address gave no answer that can be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// It is not among the hosts that may be asked.
    #[error(
        "is not among the hosts that this server may ask: start it with --external-hosts (LINKIS_RM_EXTERNAL_HOSTS) that name it"
    )]
    NotAllowed,
    /// It cannot be asked.
    #[error("is no address that can be asked")]
    Address,
    /// There is no connection.
    #[error("cannot be connected to")]
    Connect,
    /// Its certificate is none that is trusted here, or it speaks no TLS.
    #[error("has no certificate that is trusted here, or speaks no TLS")]
    Tls,
    /// It took too long.
    #[error("did not answer in time")]
    Timeout,
    /// The connection broke, or what came was no HTTP.
    #[error("broke off its answer, or gave none in HTTP")]
    Broken,
    /// It is there, but another one is active.
    #[error("is not the active ResourceManager")]
    NotActive,
    /// It wants credentials, or others.
    #[error("answered {0}: it wants a user and a password, or others; see authorEnable, user and pwd")]
    Unauthorized(u16),
    /// It sends elsewhere.
    #[error("answered {0}: it sends elsewhere, and no redirect is followed; name the address that answers")]
    Redirect(u16),
    /// It refuses.
    #[error("answered {0}")]
    Status(u16),
    /// What it answered is too large.
    #[error("answered more than {0} bytes")]
    TooLarge(usize),
    /// What it answered is something else.
    #[error("answered what {0}")]
    Unreadable(String),
    /// Whoever asks is not known there.
    #[error(
        "answered 401: it does not know who asks; see that the token, or the certificate, is its own and still valid"
    )]
    Unknown,
    /// Whoever asks may not.
    #[error(
        "answered 403: whoever asks may not list {0}; give it the ClusterRole of deploy/kubernetes/external-resources.yaml"
    )]
    Forbidden(&'static str),
    /// It is not known how to ask.
    #[error("cannot be asked: {0}")]
    NoAccess(&'static str),
    /// The server could not prepare to ask.
    #[error("cannot be asked: this server has no trusted certificates; install the system's (ca-certificates)")]
    NoClient,
    /// The server stopped while it read the answer.
    #[error("was asked by a server that stops")]
    Stopping,
}

impl Failure {
    /// Whether it is about the moment: trying again may help.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Connect | Self::Timeout | Self::Broken | Self::NotActive => true,
            Self::Status(status) => *status >= 500 || *status == 429,
            _ => false,
        }
    }

    /// What kind it is, for metrics.
    pub fn class(&self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Tls => "tls",
            Self::Timeout => "timeout",
            Self::NotActive => "not_active",
            Self::Unauthorized(_) | Self::Unknown | Self::Forbidden(_) => "unauthorized",
            Self::NotAllowed | Self::Address | Self::NoAccess(_) | Self::NoClient | Self::Stopping => "not_asked",
            Self::Broken | Self::Redirect(_) | Self::Status(_) | Self::TooLarge(_) | Self::Unreadable(_) => {
                "bad_answer"
            }
        }
    }
}

impl Http {
    /// Asks no hosts but these.
    pub fn new(allowed: AllowedHosts) -> Self {
        Self::with_times(allowed, TIMES)
    }

    pub(super) fn with_times(allowed: AllowedHosts, times: Times) -> Self {
        let turns = Turns::new(times.turn);
        Self { client: Arc::default(), allowed: Arc::new(allowed), turns, times, ca: None }
    }

    /// The same, and believes those whom these certificates vouch for, in PEM, and nobody else; `None` for whom the machine believes.
    pub fn believing(allowed: AllowedHosts, ca: Option<Vec<u8>>) -> Self {
        Self { ca: ca.map(Arc::new), ..Self::new(allowed) }
    }

    /// Made when it is first needed: it reads the machine's trusted certificates.
    fn client(&self) -> Result<&Client, Failure> {
        let client = self.client.get_or_init(|| {
            let client = self.builder();
            let client = match self.ca.as_deref().map(|pem| Certificate::from_pem_bundle(pem)) {
                None => client.build(),
                Some(roots) => roots.and_then(|roots| client.tls_certs_only(roots).build()),
            };
            client.map_err(|error| {
                tracing::warn!(error = &error as &dyn std::error::Error, "no cluster can be asked");
                Failure::NoClient
            })
        });
        client.as_ref().map_err(Clone::clone)
    }

    fn builder(&self) -> ClientBuilder {
        // Whoever was first has installed the same one.
        let _ = rustls::crypto::ring::default_provider().install_default();
        Client::builder()
            .connect_timeout(self.times.connect)
            .redirect(redirect::Policy::none())
            // A proxy of the environment would be told credentials, and asked for hosts that nobody allowed it.
            .no_proxy()
            .pool_max_idle_per_host(1)
            .referer(false)
            .user_agent(concat!("linkis-rm/", env!("CARGO_PKG_VERSION")))
    }

    /// What asks a server that is believed by these certificates alone, if there are any, and is shown this one.
    pub(super) fn client_of(
        &self,
        roots: Option<Vec<Certificate>>,
        identity: Option<Identity>,
    ) -> Result<Client, Failure> {
        let client = match roots {
            Some(roots) => self.builder().tls_certs_only(roots),
            None => self.builder(),
        };
        let client = match identity {
            Some(identity) => client.identity(identity),
            None => client,
        };
        client.build().map_err(|_| Failure::NoAccess("its certificates are none that can be used"))
    }

    /// Whether an address may be asked.
    ///
    /// # Errors
    /// [`Failure::NotAllowed`].
    pub fn check(&self, address: &Address) -> Result<(), Failure> {
        self.allowed.check(address)
    }

    /// How long all may take until something is fetched.
    pub(super) fn fetch_timeout(&self) -> Duration {
        self.times.fetch
    }

    /// What stands under `path` at an address.
    pub(super) async fn get(&self, address: &Address, path: &str, login: Option<Login<'_>>) -> Result<Answer, Failure> {
        self.check(address)?;
        let url: Url = address.join(path)?;
        let request = self.client()?.get(url).header(header::ACCEPT, "application/json");
        let request = match login {
            Some((user, password)) => request.basic_auth(user, Some(password.expose_secret())),
            None => request,
        };
        self.answer(request, BODY_BYTES_MAX).await
    }

    /// What stands under `path` with this query at an address, by a client of its own, for whoever shows this token.
    pub(super) async fn get_by(
        &self,
        client: &Client,
        address: &Address,
        (path, query): (&str, &[(&str, &str)]),
        token: Option<&SecretString>,
    ) -> Result<Answer, Failure> {
        self.check(address)?;
        let mut url = address.join(path)?;
        url.query_pairs_mut().extend_pairs(query);
        let request = client.get(url).header(header::ACCEPT, "application/json");
        let request = match token {
            Some(token) => request.bearer_auth(token.expose_secret()),
            None => request,
        };
        self.answer(request, BODY_BYTES_MAX).await
    }

    /// The document at an address, of at most so many bytes, for whoever shows this token.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn get_document(
        &self,
        address: &Address,
        token: Option<&SecretString>,
        most: usize,
    ) -> Result<Vec<u8>, Failure> {
        self.check(address)?;
        let request = self.client()?.get(address.url.clone()).header(header::ACCEPT, "application/json");
        let request = match token {
            Some(token) => request.bearer_auth(token.expose_secret()),
            None => request,
        };
        Ok(self.answer(request, most).await?.body)
    }

    /// The answer to a request, of at most so many bytes.
    async fn answer(&self, request: RequestBuilder, most: usize) -> Result<Answer, Failure> {
        let mut deadline = Instant::now() + self.times.answer;
        let mut response = self.until(deadline, request.send()).await?;
        check_status(&response)?;
        // As it comes: nothing is kept for what is only said to come, and who says nothing has no turn that others wait for.
        let mut answer = Answer { body: Vec::new(), turn: None };
        loop {
            let coming = self.until(deadline, response.chunk());
            let come = match &mut answer.turn {
                Some(turn) => turn.keep(coming).await?,
                None => coming.await?,
            };
            let Some(chunk) = come else { break };
            let bytes = answer.body.len() + chunk.len();
            if bytes > most {
                return Err(Failure::TooLarge(most));
            }
            if bytes > SMALL_BYTES_MAX && answer.turn.is_none() {
                let asked = Instant::now();
                answer.turn = Some(self.turns.wait(response.url()).await?);
                deadline += asked.elapsed();
            }
            answer.body.extend_from_slice(&chunk);
        }
        if let Some(turn) = &mut answer.turn {
            turn.read();
        }
        Ok(answer)
    }

    /// What the other side says next, if it does in time. Its time is counted here: a client's own would go on while a turn is waited for.
    async fn until<T>(
        &self,
        deadline: Instant,
        coming: impl Future<Output = Result<T, reqwest::Error>>,
    ) -> Result<T, Failure> {
        match timeout_at(deadline.min(Instant::now() + self.times.read), coming).await {
            Ok(come) => come.map_err(|error| failure(&error)),
            Err(_) => Err(Failure::Timeout),
        }
    }
}

fn check_status(response: &Response) -> Result<(), Failure> {
    let status = response.status();
    match status {
        StatusCode::OK => Ok(()),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(Failure::Unauthorized(status.as_u16())),
        _ if status.is_redirection() => Err(Failure::Redirect(status.as_u16())),
        _ => Err(Failure::Status(status.as_u16())),
    }
}

/// What has failed, without what it says: that may hold the address with all that stands in it.
fn failure(error: &reqwest::Error) -> Failure {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = source {
        if error.is::<rustls::Error>() {
            return Failure::Tls;
        }
        // Its source would be that of what it wraps.
        let wrapped = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        source = match wrapped {
            Some(wrapped) => Some(wrapped),
            None => error.source(),
        };
    }
    match error {
        error if error.is_timeout() => Failure::Timeout,
        error if error.is_connect() => Failure::Connect,
        _ => Failure::Broken,
    }
}

#[cfg(test)]
mod tests {
    use tokio::{task::JoinSet, time::timeout};

    use super::*;
    use crate::external::{
        fake::{self, Fake, Reply, client},
        turns::LARGE_ANSWERS_MAX,
    };

    #[tokio::test]
    async fn what_is_large_waits_for_its_turn_in_nobodys_time() {
        let fake = Fake::start(|path| Reply::Json("x".repeat(if path == "/large" { 1 << 20 } else { 100 }))).await;
        let (http, address) = (client("127.0.0.1"), Address::parse(&format!("http://{}", fake.address)).unwrap());
        let others = http.turns.all().await;
        assert_eq!(http.get(&address, "/small", None).await.unwrap().len(), 100);
        let large = tokio::spawn({
            let http = http.clone();
            async move { http.get(&address, "/large", None).await }
        });
        // Longer than an answer may take.
        tokio::time::sleep(http.times.answer * 2).await;
        assert!(!large.is_finished());
        drop(others);
        let large = large.await.unwrap().unwrap();
        assert_eq!((large.len(), http.turns.free()), (1 << 20, LARGE_ANSWERS_MAX - 1));
        drop(large);
        assert_eq!(http.turns.free(), LARGE_ANSWERS_MAX);
    }

    #[tokio::test]
    async fn who_is_slow_leaves_a_turn_to_others() {
        let seconds = Duration::from_secs;
        let (read, turn) = (seconds(60), Duration::from_millis(200));
        let times = Times { connect: seconds(2), read, answer: seconds(60), turn, fetch: seconds(60) };
        let http = Http::with_times(AllowedHosts::parse("127.0.0.1").unwrap(), times);
        let fake = Fake::start(|path| match path {
            "/large" => Reply::Json("x".repeat(1 << 20)),
            _ => Reply::Begun(fake::http("200 OK", "application/json", &"x".repeat(1 << 20))[..1 << 19].to_owned()),
        })
        .await;
        let address = Address::parse(&format!("http://{}", fake.address)).unwrap();
        // The first time it is not known of them; then it is, and they wait for one another.
        for round in 0..2 {
            let slow: JoinSet<_> = (0..2 * LARGE_ANSWERS_MAX)
                .map(|n| {
                    let (http, address) = (http.clone(), address.clone());
                    async move { http.get(&address, &format!("/slow{n}"), None).await.map(drop) }
                })
                .collect();
            let begun = || fake.paths().iter().filter(|path| path.starts_with("slow")).count();
            while http.turns.free() > 1 || begun() < (round + 1) * 2 * LARGE_ANSWERS_MAX {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            for _ in 0..3 {
                let large = timeout(seconds(30), http.get(&address, "/large", None)).await;
                assert_eq!(large.expect("it has its turn").unwrap().len(), 1 << 20);
            }
            drop(slow);
        }
    }
}
