//! HTTP client for external clusters. Requests are bounded in time and size and are never redirected. Credentials are
//! sent only to configured addresses.
//!
//! Callers: `yarn` and `kubernetes`, and the fetch of JWT key sets.

use std::{
    error::Error,
    future::{Future, poll_fn},
    io::{self, Write as _},
    ops::Deref,
    pin::Pin,
    sync::{Arc, OnceLock},
    time::Duration,
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use flate2::write::MultiGzDecoder;
use hyper::{
    HeaderMap, Request, StatusCode,
    body::{Body as _, Bytes, Incoming},
    header::{self, HeaderValue},
};
use secrecy::{ExposeSecret as _, SecretString};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout_at},
};
use tokio_rustls::rustls;
use url::Url;

use super::{
    ServerAddress,
    allowed::AllowedHosts,
    connector::{self, Certificates, ClientIdentity, HttpClient},
};

/// Timeouts of a fetch.
#[derive(Debug, Clone, Copy)]
pub(super) struct HttpTimeouts {
    /// Timeout of a connection.
    pub connect: Duration,
    /// Timeout between two pieces of a response.
    pub read: Duration,
    /// Timeout of a response, without the wait for a permit.
    pub answer: Duration,
    /// Timeout of a fetch over all addresses and attempts.
    pub fetch: Duration,
}

const TIMES: HttpTimeouts = HttpTimeouts {
    connect: Duration::from_secs(2),
    read: Duration::from_secs(5),
    answer: Duration::from_secs(10),
    fetch: Duration::from_secs(20),
};

/// Maximum size of an unpacked response, in bytes: that of 3,000 queues of a capacity scheduler.
const BODY_BYTES_MAX: usize = 32 << 20;

/// Maximum size of a response that needs no permit, in bytes: little, even for all clusters together.
const SMALL_BYTES_MAX: usize = 64 << 10;

/// Maximum number of concurrent large responses. Each may have the maximum size, plus the memory of its parsed form.
const LARGE_REPLIES_MAX: usize = 4;

/// Bytes that are unpacked at once: at most a thousand times as many, and so little above a maximum.
const PACKED_BYTES: usize = 1 << 10;

/// Maximum number of attempts per fetch, and the minimum pause before the second. Pauses keep instances from retrying
/// in lockstep or continuously.
pub(super) const ROUNDS_MAX: u32 = 3;
const REST: Duration = Duration::from_millis(200);

/// Returns the pause before an attempt: doubled with each attempt, plus up to its own length at random, so that
/// instances do not retry together.
pub(super) fn rest(round: u32) -> Duration {
    let least = REST * 2_u32.saturating_pow(round.saturating_sub(1));
    // A few random bits; of any source.
    let chance = u32::try_from(uuid::Uuid::new_v4().as_u128() % 1000).unwrap_or_default();
    least + least * chance / 1000
}

/// HTTP client for external clusters. Clones share it.
#[derive(Debug, Clone)]
pub struct ClusterHttp {
    /// The client, or the reason why it cannot be created.
    client: Arc<OnceLock<Result<HttpClient, HttpFailure>>>,
    allowed: Arc<AllowedHosts>,
    permits: Arc<Semaphore>,
    times: HttpTimeouts,
    /// Trusted certificates in PEM; `None` for the system's.
    ca: Option<Arc<Vec<u8>>>,
}

/// Body of a response. A large body owns its permit until dropped.
#[derive(Debug)]
pub(super) struct HttpReply {
    body: Vec<u8>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Deref for HttpReply {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.body
    }
}

/// User and password.
pub type Credentials<'a> = (&'a str, &'a SecretString);

/// Failure of a request to one address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HttpFailure {
    /// The host is not among the allowed ones.
    #[error("is not an allowed host; add it to --external-hosts (LINKIS_RM_EXTERNAL_HOSTS) of this server")]
    NotAllowed,
    /// The address is invalid.
    #[error("is not a usable address")]
    Address,
    /// The connection failed.
    #[error("cannot be connected to")]
    Connect,
    /// The certificate is not trusted, or the server does not use TLS.
    #[error("has a certificate that this server does not trust, or does not use TLS")]
    Tls,
    /// A timeout expired.
    #[error("did not answer in time")]
    Timeout,
    /// The connection broke, or the response is no HTTP.
    #[error("broke off its reply, or did not reply in HTTP")]
    Broken,
    /// The ResourceManager is a standby.
    #[error("is not the active ResourceManager")]
    NotActive,
    /// The credentials are missing or rejected.
    #[error("answered {0}: it requires a user and a password, or rejects these; see authorEnable, user and pwd")]
    Unauthorized(u16),
    /// The response is a redirect.
    #[error("answered {0}: it redirects, and redirects are not followed; name the final address")]
    Redirect(u16),
    /// Another error status.
    #[error("answered {0}")]
    Status(u16),
    /// The response exceeds the maximum size.
    #[error("answered more than {0} bytes")]
    TooLarge(usize),
    /// The response has an unexpected content.
    #[error("answered what {0}")]
    Unreadable(String),
    /// The Kubernetes server rejects the token or certificate.
    #[error(
        "answered 401: it does not accept the credential; check that the token or certificate is issued for it and \
            still valid"
    )]
    Unknown,
    /// The Kubernetes role may not list this kind of object.
    #[error(
        "answered 403: the account may not list {0}; bind it to the ClusterRole of \
            deploy/kubernetes/external-resources.yaml"
    )]
    Forbidden(&'static str),
    /// The configuration does not define the access.
    #[error("cannot be reached: {0}")]
    NoAccess(&'static str),
    /// The system has no trusted certificates.
    #[error("cannot be reached: this server has no trusted certificates; install the system's (ca-certificates)")]
    NoClient,
    /// The instance stopped during the parsing of the response.
    #[error("was not fetched: this server is shutting down")]
    Stopping,
}

impl HttpFailure {
    /// Classifies an error and drops its text, which may contain the address with its secrets.
    pub(super) fn of(error: &(dyn Error + 'static)) -> Self {
        let mut source = Some(error);
        while let Some(error) = source {
            if let Some(failure) = error.downcast_ref::<Self>() {
                return failure.clone();
            }
            if error.is::<rustls::Error>() {
                return Self::Tls;
            }
            // The `source` of an I/O error is the source of the wrapped error, not the wrapped error.
            let wrapped = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
            source = match wrapped {
                Some(wrapped) => Some(wrapped),
                None => error.source(),
            };
        }
        Self::Broken
    }

    /// Returns whether a retry may succeed.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Connect | Self::Timeout | Self::Broken | Self::NotActive => true,
            Self::Status(status) => *status >= 500 || *status == 429,
            _ => false,
        }
    }

    /// Returns the class of the failure, for metrics.
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

impl ClusterHttp {
    /// Creates a client for the hosts `allowed`.
    pub fn new(allowed: AllowedHosts) -> Self {
        Self::with_times(allowed, TIMES)
    }

    pub(super) fn with_times(allowed: AllowedHosts, times: HttpTimeouts) -> Self {
        let permits = Arc::new(Semaphore::new(LARGE_REPLIES_MAX));
        Self { client: Arc::default(), allowed: Arc::new(allowed), permits, times, ca: None }
    }

    /// Creates a client for the hosts `allowed` that trusts only the certificates `ca` (PEM); `None` for the system's.
    pub fn believing(allowed: AllowedHosts, ca: Option<Vec<u8>>) -> Self {
        Self { ca: ca.map(Arc::new), ..Self::new(allowed) }
    }

    /// Returns the client, created at first use because it reads the system's certificates.
    fn client(&self) -> Result<&HttpClient, HttpFailure> {
        let client = self.client.get_or_init(|| {
            let roots = self.ca.as_deref().map(|pem| connector::certificates(pem)).transpose();
            let roots = roots.inspect_err(|error| tracing::warn!(%error, "no external cluster can be reached"));
            self.client_of(roots.map_err(|_| HttpFailure::NoClient)?, None)
        });
        client.as_ref().map_err(Clone::clone)
    }

    /// Returns a client that trusts only `roots`, if given, and authenticates with `identity`.
    pub(super) fn client_of(
        &self,
        roots: Option<Certificates>,
        identity: Option<ClientIdentity>,
    ) -> Result<HttpClient, HttpFailure> {
        let client = connector::client(roots, identity, self.times.connect);
        client.map_err(|_| HttpFailure::NoAccess("its certificates cannot be used"))
    }

    /// Checks that the host of an address is allowed.
    ///
    /// # Errors
    /// [`HttpFailure::NotAllowed`].
    pub fn check(&self, address: &ServerAddress) -> Result<(), HttpFailure> {
        self.allowed.check(address)
    }

    /// Returns the timeout of a fetch over all addresses and attempts.
    pub(super) fn fetch_timeout(&self) -> Duration {
        self.times.fetch
    }

    /// Fetches `path` at an address, with basic authentication if `login` is given.
    pub(super) async fn get(
        &self,
        address: &ServerAddress,
        path: &str,
        login: Option<Credentials<'_>>,
    ) -> Result<HttpReply, HttpFailure> {
        self.check(address)?;
        let login = login.map(|(user, password)| {
            format!("Basic {}", BASE64_STANDARD.encode(format!("{user}:{}", password.expose_secret())))
        });
        self.answer(self.client()?, &address.join(path)?, login, BODY_BYTES_MAX).await
    }

    /// Fetches `path` with a query at an address, with the given client and bearer token.
    pub(super) async fn get_by(
        &self,
        client: &HttpClient,
        address: &ServerAddress,
        (path, query): (&str, &[(&str, &str)]),
        token: Option<&SecretString>,
    ) -> Result<HttpReply, HttpFailure> {
        self.check(address)?;
        let mut url = address.join(path)?;
        url.query_pairs_mut().extend_pairs(query);
        self.answer(client, &url, token.map(bearer), BODY_BYTES_MAX).await
    }

    /// Fetches the document at an address, with a bearer token if given.
    ///
    /// # Errors
    /// [`HttpFailure`]; [`HttpFailure::TooLarge`] above `most` bytes.
    pub async fn get_document(
        &self,
        address: &ServerAddress,
        token: Option<&SecretString>,
        most: usize,
    ) -> Result<Vec<u8>, HttpFailure> {
        self.check(address)?;
        Ok(self.answer(self.client()?, &address.url, token.map(bearer), most).await?.body)
    }

    /// Sends a request and reads the body, of at most `most` bytes.
    async fn answer(
        &self,
        client: &HttpClient,
        url: &Url,
        authorization: Option<String>,
        most: usize,
    ) -> Result<HttpReply, HttpFailure> {
        let mut deadline = Instant::now() + self.times.answer;
        let response = self.until(deadline, client.request(request(url, authorization)?)).await?;
        check_status(response.status())?;
        // Memory grows with the received bytes only, and a silent server gets no permit.
        let (head, mut body) = response.into_parts();
        let (mut buffer, mut permit) = (ReplyBuffer::new(&head.headers), None);
        while let Some(data) = self.until(deadline, next_data(&mut body)).await? {
            for data in data.chunks(PACKED_BYTES) {
                let bytes = buffer.add(data).map_err(|_| HttpFailure::Broken)?;
                if bytes > most {
                    return Err(HttpFailure::TooLarge(most));
                }
                if bytes > SMALL_BYTES_MAX && permit.is_none() {
                    let begin = Instant::now();
                    let free = self.permits.clone().acquire_owned().await;
                    permit = Some(free.map_err(|_| HttpFailure::Stopping)?);
                    deadline += begin.elapsed();
                }
            }
        }
        let body = buffer.finish().map_err(|_| HttpFailure::Broken)?;
        // The decoder keeps the last bytes until here.
        (body.len() <= most).then_some(HttpReply { body, _permit: permit }).ok_or(HttpFailure::TooLarge(most))
    }

    /// Waits for the next piece. The timeout excludes the wait for a permit.
    async fn until<T, E: Error + 'static>(
        &self,
        deadline: Instant,
        coming: impl Future<Output = Result<T, E>>,
    ) -> Result<T, HttpFailure> {
        match timeout_at(deadline.min(Instant::now() + self.times.read), coming).await {
            Ok(come) => come.map_err(|error| HttpFailure::of(&error)),
            Err(_) => Err(HttpFailure::Timeout),
        }
    }
}

/// Body of a response as it comes, unpacked if the head says that it is packed.
enum ReplyBuffer {
    Plain(Vec<u8>),
    Gzip(Box<MultiGzDecoder<Vec<u8>>>),
}

impl ReplyBuffer {
    fn new(head: &HeaderMap) -> Self {
        match head.get(header::CONTENT_ENCODING).is_some_and(|coding| coding == "gzip") {
            true => Self::Gzip(Box::new(MultiGzDecoder::new(Vec::new()))),
            false => Self::Plain(Vec::new()),
        }
    }

    /// Adds received bytes. Returns the length of the body so far.
    fn add(&mut self, data: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(body) => {
                body.extend_from_slice(data);
                Ok(body.len())
            }
            Self::Gzip(decoder) => {
                decoder.write_all(data)?;
                Ok(decoder.get_ref().len())
            }
        }
    }

    fn finish(self) -> io::Result<Vec<u8>> {
        match self {
            Self::Plain(body) => Ok(body),
            Self::Gzip(decoder) => decoder.finish(),
        }
    }
}

fn request(url: &Url, authorization: Option<String>) -> Result<Request<String>, HttpFailure> {
    let mut request = Request::get(url.as_str())
        .header(header::ACCEPT, "application/json")
        .header(header::ACCEPT_ENCODING, "gzip")
        .header(header::USER_AGENT, concat!("linkis-rm/", env!("CARGO_PKG_VERSION")));
    if let Some(authorization) = authorization {
        let mut value = HeaderValue::try_from(authorization).map_err(|_| HttpFailure::Address)?;
        value.set_sensitive(true);
        request = request.header(header::AUTHORIZATION, value);
    }
    request.body(String::new()).map_err(|_| HttpFailure::Address)
}

fn bearer(token: &SecretString) -> String {
    format!("Bearer {}", token.expose_secret())
}

/// Receives the next data of a body; `None` at its end.
async fn next_data(body: &mut Incoming) -> Result<Option<Bytes>, hyper::Error> {
    while let Some(frame) = poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await {
        if let Ok(data) = frame?.into_data() {
            return Ok(Some(data));
        }
    }
    Ok(None)
}

fn check_status(status: StatusCode) -> Result<(), HttpFailure> {
    match status {
        StatusCode::OK => Ok(()),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(HttpFailure::Unauthorized(status.as_u16())),
        _ if status.is_redirection() => Err(HttpFailure::Redirect(status.as_u16())),
        _ => Err(HttpFailure::Status(status.as_u16())),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::fake::{FakeReply, FakeServer, client, gzip};

    #[tokio::test]
    async fn large_reply_waits_for_permit_outside_its_timeout() {
        let fake =
            FakeServer::start(|path| FakeReply::Json("x".repeat(if path == "/large" { 1 << 20 } else { 100 }))).await;
        let (http, address) = (client("127.0.0.1"), ServerAddress::parse(&format!("http://{}", fake.address)).unwrap());
        let others = http.permits.clone().acquire_many_owned(LARGE_REPLIES_MAX as u32).await.unwrap();
        assert_eq!(http.get(&address, "/small", None).await.unwrap().len(), 100);
        let large = tokio::spawn({
            let http = http.clone();
            async move { http.get(&address, "/large", None).await }
        });
        // Longer than the timeout of a response.
        tokio::time::sleep(http.times.answer * 2).await;
        assert!(!large.is_finished());
        drop(others);
        let large = large.await.unwrap().unwrap();
        assert_eq!((large.len(), http.permits.available_permits()), (1 << 20, LARGE_REPLIES_MAX - 1));
        drop(large);
        assert_eq!(http.permits.available_permits(), LARGE_REPLIES_MAX);
    }

    #[tokio::test]
    async fn packed_reply_is_unpacked_within_its_bound() {
        let text = "gr8 ".repeat(50_000);
        let (packed, bomb) = (gzip(&text), gzip(&"0".repeat(BODY_BYTES_MAX + 1)));
        assert!(bomb.len() < 1 << 17, "{}", bomb.len());
        let fake = FakeServer::start(move |path| {
            FakeReply::Gzip(match path {
                "/whole" => packed.clone(),
                "/two" => [&packed[..], &packed].concat(),
                "/cut" => packed[..packed.len() - 9].to_vec(),
                "/wrong" => [&packed[..], b"no gzip"].concat(),
                _ => bomb.clone(),
            })
        })
        .await;
        let (http, address) = (client("127.0.0.1"), ServerAddress::parse(&format!("http://{}", fake.address)).unwrap());
        let get = async |path: &str| http.get(&address, path, None).await;
        assert_eq!(get("/whole").await.unwrap()[..], *text.as_bytes());
        assert_eq!(get("/two").await.unwrap().len(), 2 * text.len());
        assert_eq!(get("/cut").await.map(drop).unwrap_err(), HttpFailure::Broken);
        assert_eq!(get("/wrong").await.map(drop).unwrap_err(), HttpFailure::Broken);
        assert_eq!(get("/bomb").await.map(drop).unwrap_err(), HttpFailure::TooLarge(BODY_BYTES_MAX));
        let document = ServerAddress::parse(&format!("http://{}/document", fake.address)).unwrap();
        assert_eq!(http.get_document(&document, None, 1000).await.unwrap_err(), HttpFailure::TooLarge(1000));
        assert_eq!(http.permits.available_permits(), LARGE_REPLIES_MAX);
    }

    #[tokio::test]
    async fn unpacking_ends_soon_above_bound() {
        let bomb = gzip(&"0".repeat(8 << 20));
        let head = HeaderMap::from_iter([(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"))]);
        let mut buffer = ReplyBuffer::new(&head);
        for piece in bomb.chunks(PACKED_BYTES) {
            let before = buffer.add(&[]).unwrap();
            assert!(buffer.add(piece).unwrap() - before <= 2 << 20, "a piece grows by a thousand times at most");
        }
        assert_eq!(buffer.finish().unwrap().len(), 8 << 20);
    }

    #[tokio::test]
    async fn connection_serves_several_requests() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = ServerAddress::parse(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
        let served = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            for _ in 0..2 {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(stream.read_u8().await.unwrap());
                }
                stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}").await.unwrap();
            }
        });
        let http = client("127.0.0.1");
        for _ in 0..2 {
            assert_eq!(http.get(&address, "/", None).await.unwrap()[..], *b"{}");
        }
        served.await.unwrap();
    }
}
