//! Test servers that reply as clusters do, or wrongly. Callers: the unit tests of this crate.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::TcpListener,
};
use tokio_rustls::{TlsAcceptor, rustls};

use super::{
    allowed::AllowedHosts,
    http::{ClusterHttp, HttpTimeouts},
};

/// Response of a test server.
pub(super) enum FakeReply {
    Json(String),
    /// The whole response as sent.
    Raw(String),
    /// JSON, packed by gzip to these bytes.
    Gzip(Vec<u8>),
    /// A head, followed by spaces without end.
    Endless(&'static str),
    Silence,
}

/// Test server that records the heads of its requests.
pub(super) struct FakeServer {
    pub address: SocketAddr,
    pub heads: Arc<Mutex<Vec<String>>>,
}

impl FakeServer {
    /// Starts a server whose reply depends on the path.
    pub async fn start(reply: impl Fn(&str) -> FakeReply + Send + Sync + 'static) -> Self {
        Self::start_with(on_path(reply), None).await
    }

    /// Starts a server whose reply depends on the whole head.
    pub async fn start_with(
        reply: impl Fn(&str) -> FakeReply + Send + Sync + 'static,
        tls: Option<TlsAcceptor>,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, heads) = (listener.local_addr().unwrap(), Arc::<Mutex<Vec<String>>>::default());
        let (seen, reply) = (heads.clone(), Arc::new(reply));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (seen, reply, tls) = (seen.clone(), reply.clone(), tls.clone());
                tokio::spawn(async move {
                    match tls {
                        None => answer(stream, seen, &*reply).await,
                        Some(tls) => {
                            if let Ok(stream) = tls.accept(stream).await {
                                answer(stream, seen, &*reply).await;
                            }
                        }
                    }
                });
            }
        });
        Self { address, heads }
    }

    /// Returns the last path segment of each request.
    pub fn paths(&self) -> Vec<String> {
        let path = |head: &String| head.split([' ', '?']).nth(1).unwrap().rsplit('/').next().unwrap().to_owned();
        self.heads.lock().unwrap().iter().map(path).collect()
    }
}

async fn answer(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    seen: Arc<Mutex<Vec<String>>>,
    reply: &(dyn Fn(&str) -> FakeReply + Send + Sync),
) {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        if stream.read_exact(&mut byte).await.is_err() {
            return;
        }
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    seen.lock().unwrap().push(head.clone());
    let answer = match reply(&head) {
        FakeReply::Json(body) => http("200 OK", "application/json", &body),
        FakeReply::Raw(answer) => answer,
        FakeReply::Gzip(packed) => {
            let head = http("200 OK", "application/json\r\nContent-Encoding: gzip", "");
            let head = head.replace("Content-Length: 0", &format!("Content-Length: {}", packed.len()));
            let _ = stream.write_all(&[head.as_bytes(), &packed].concat()).await;
            return;
        }
        FakeReply::Endless(head) => {
            let _ = stream.write_all(head.as_bytes()).await;
            while stream.write_all(&[b' '; 65_536]).await.is_ok() {}
            return;
        }
        FakeReply::Silence => return std::future::pending().await,
    };
    let _ = stream.write_all(answer.as_bytes()).await;
}

/// Returns a complete HTTP response that closes the connection.
pub(super) fn http(status: &str, content_type: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
}

/// Packs a text by gzip.
pub(super) fn gzip(text: &str) -> Vec<u8> {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    std::io::Write::write_all(&mut packed, text.as_bytes()).unwrap();
    packed.finish().unwrap()
}

/// Adapts a function of the path to one of the head.
pub(super) fn on_path(reply: impl Fn(&str) -> FakeReply + Send + Sync) -> impl Fn(&str) -> FakeReply + Send + Sync {
    move |head| reply(head.split(' ').nth(1).unwrap())
}

/// Returns a client with short timeouts for the allowed hosts.
pub(super) fn client(allowed: &str) -> ClusterHttp {
    let millis = Duration::from_millis;
    let (connect, read, answer) = (millis(500), millis(300), millis(600));
    let times = HttpTimeouts { connect, read, answer, fetch: millis(3000) };
    ClusterHttp::with_times(AllowedHosts::parse(allowed).unwrap(), times)
}

/// Returns a TLS acceptor with a self-signed certificate for `names`, and that certificate in PEM.
pub(super) fn certified(names: &[&str]) -> (TlsAcceptor, String) {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
    let own = rcgen::generate_simple_self_signed(names).unwrap();
    let key = rustls::pki_types::PrivateKeyDer::try_from(own.signing_key.serialize_der()).unwrap();
    let config = rustls::ServerConfig::builder().with_no_client_auth();
    let config = config.with_single_cert(vec![own.cert.der().clone()], key).unwrap();
    (TlsAcceptor::from(Arc::new(config)), own.cert.pem())
}
