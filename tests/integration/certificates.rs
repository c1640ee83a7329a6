//! TLS: authentication by certificates, their renewal under load, and their expiry.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, SanType, date_time_ymd};
use rm_client::{ClientSettings, RmClient};
use rm_proto::v1::{self as proto, usage_service_client::UsageServiceClient};
use rustls::{
    ClientConfig, HandshakeKind, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
};
use time::OffsetDateTime;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint},
};

use crate::{
    command_line::program,
    harness::*,
    identity::{ask, em_message, granted, reason, register, rm_of, token},
};

/// Time within which a changed file is used.
const TAKEN_UP_WITHIN: Duration = Duration::from_secs(10);

pub type Authority = CertifiedIssuer<'static, KeyPair>;

/// A certificate authority.
pub fn authority(name: &str) -> Authority {
    let mut params = CertificateParams::new(vec![]).unwrap();
    params.distinguished_name.push(rcgen::DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// A certificate and its key, both in PEM.
#[derive(Clone)]
pub struct Identity {
    pub cert: String,
    pub key: String,
}

/// Returns a certificate for these host names and URIs, valid until `year`.
pub fn certify(by: &Authority, hosts: &[&str], uris: &[&str], year: i32) -> Identity {
    certify_until(by, hosts, uris, date_time_ymd(year, 1, 1))
}

/// A certificate with an end of validity.
fn certify_until(by: &Authority, hosts: &[&str], uris: &[&str], end: OffsetDateTime) -> Identity {
    let mut params = CertificateParams::new(hosts.iter().map(|host| (*host).to_owned()).collect::<Vec<_>>()).unwrap();
    params.subject_alt_names.extend(uris.iter().map(|uri| SanType::URI((*uri).try_into().unwrap())));
    (params.not_before, params.not_after) = (date_time_ymd(2020, 1, 1), end);
    let key = KeyPair::generate().unwrap();
    let cert = params.signed_by(&key, by).unwrap();
    Identity { cert: cert.pem(), key: key.serialize_pem() }
}

pub const FAR: i32 = 2100;

/// Files in a new folder.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        let folder = scratch(name);
        fs::create_dir_all(&folder).unwrap();
        remove_at_end(&folder);
        Self(folder)
    }

    pub fn tls(&self, settings: Settings) -> Settings {
        let file = |name| self.0.join(name).display().to_string();
        let settings = settings.with("--tls-cert", file("cert")).with("--tls-key", file("key"));
        settings.with("--tls-client-ca", file("ca"))
    }

    /// Replaces a file atomically, as a changed link.
    pub fn write(&self, name: &str, text: &str) {
        let next = self.0.join("next");
        fs::write(&next, text).unwrap();
        fs::rename(next, self.0.join(name)).unwrap();
    }

    pub fn write_all(&self, server: &Identity, ca: &Authority) {
        self.write("cert", &server.cert);
        self.write("key", &server.key);
        self.write("ca", &ca.as_ref().pem());
    }
}

async fn start_tls(database: &Database, folder: &Folder) -> Instance {
    Instance::start_with(database, folder.tls(settings())).await
}

/// The client configuration that trusts `ca`, with an optional identity.
pub fn config(server_ca: &Authority, identity: Option<&Identity>) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(server_ca.as_ref().der().clone()).unwrap();
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots);
    let mut config = match identity {
        None => builder.with_no_client_auth(),
        Some(Identity { cert, key }) => {
            let cert = CertificateDer::from_pem_slice(cert.as_bytes()).unwrap();
            builder.with_client_auth_cert(vec![cert], PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap()).unwrap()
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Arc::new(config)
}

/// A connection that trusts `ca` and presents `identity`.
async fn connect(
    rm: &Instance,
    server_ca: &Authority,
    identity: Option<&Identity>,
) -> Result<Channel, tonic::transport::Error> {
    connect_to(rm.address.strip_prefix("http://").unwrap(), server_ca, identity).await
}

/// A connection to the server at an address.
pub async fn connect_to(
    address: &str,
    server_ca: &Authority,
    identity: Option<&Identity>,
) -> Result<Channel, tonic::transport::Error> {
    let connector = tokio_rustls::TlsConnector::from(config(server_ca, identity));
    let address = address.to_owned();
    let connect = tower::service_fn(move |_: http::Uri| {
        let (connector, address) = (connector.clone(), address.clone());
        async move {
            let stream = tokio::net::TcpStream::connect(address).await?;
            let stream = connector.connect(ServerName::try_from("rm.example").unwrap(), stream).await?;
            Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(stream))
        }
    });
    Endpoint::from_static("http://rm.example").connect_with_connector(connect).await
}

/// Result of a call that presents `identity` and no token.
async fn asks(rm: &Instance, server_ca: &Authority, identity: Option<&Identity>, host: &str) -> Result<(), Status> {
    let unavailable = |error: tonic::transport::Error| Status::unavailable(error.to_string());
    let call = async {
        let channel = connect(rm, server_ca, identity).await.map_err(unavailable)?;
        UsageServiceClient::new(channel).get_em(proto::GetEmRequest { em: em_message(host) }).await.map(|_| ())
    };
    // A call without a reply must not stop the test for ever.
    tokio::time::timeout(LONG, call).await.unwrap_or_else(|_| Err(Status::deadline_exceeded("no reply")))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificate_authorizes_only_its_em() {
    let (database, folder) = (Database::fresh().await, Folder::new("certificates"));
    let admin = token(&database, "admin", &["--role", "admin"]);
    let (ca, other_ca) = (authority("ca"), authority("other"));
    let server = certify(&ca, &["rm.example"], &[], FAR);
    folder.write_all(&server, &ca);
    let rm = start_tls(&database, &folder).await;

    let application = "linkis-rm://ecm/linkis-cg-engineconnmanager/host1";
    let by_uri = certify(&ca, &["host2"], &[application], FAR);
    let by_host = certify(&ca, &["host2", "*.example"], &[], FAR);
    let nameless = certify(&ca, &[], &["spiffe://somebody/else"], FAR);
    let of_admin = connect(&rm, &ca, None).await.unwrap();
    for host in ["host1", "host2"] {
        rm_of(&of_admin, &admin).register(register(host)).await.unwrap();
    }
    for (identity, host, refused) in [
        (Some(&by_uri), "host1", None),
        (Some(&by_uri), "host2", Some((Code::PermissionDenied, "ROLE_DENIED"))),
        (Some(&by_host), "host2", None),
        (Some(&by_host), "host1", Some((Code::PermissionDenied, "ROLE_DENIED"))),
        (Some(&nameless), "host1", Some((Code::Unauthenticated, "TOKEN_MISSING"))),
        (None, "host1", Some((Code::Unauthenticated, "TOKEN_MISSING"))),
    ] {
        let got = asks(&rm, &ca, identity, host).await;
        let got = got.as_ref().map_err(|status| (status.code(), reason(status)));
        assert_eq!(got.err(), refused.map(|(code, reason)| (code, reason.to_owned())), "{host}");
    }
    assert_eq!(handshakes_failed(&rm), 0);

    // An unverified client fails at the handshake, and the server counts it.
    let (stranger, late) = (certify(&other_ca, &["host1"], &[], FAR), certify(&ca, &["host1"], &[], 2024));
    for identity in [&stranger, &late] {
        let before = handshakes_failed(&rm);
        let status = asks(&rm, &ca, Some(identity), "host1").await.unwrap_err();
        assert!(
            [Code::Unavailable, Code::Unknown, Code::Cancelled].contains(&status.code()) && reason(&status).is_empty(),
            "{status:?}"
        );
        // The alert reaches the client before the server has counted the failure.
        eventually("it is counted", Duration::from_secs(5), async || handshakes_failed(&rm) > before).await;
    }

    // A token takes precedence over a certificate. The history names the certificate as the actor.
    let channel = connect(&rm, &ca, Some(&by_uri)).await.unwrap();
    rm_of(&channel, &admin).register(register("host3")).await.unwrap();
    let ticket = granted(rm_of(&channel, "").request_resource(ask("host1", "alice", 1)).await.unwrap().into_inner());
    let mut usage = UsageServiceClient::new(crate::identity::with(&of_admin, &admin));
    let of_ticket = proto::ListActionsRequest { ticket_id: ticket, ..Default::default() };
    let lines = usage.list_actions(of_ticket).await.unwrap().into_inner().actions;
    assert_eq!(lines[0].actor, "ecm/linkis-cg-engineconnmanager/host1");
    assert!(usage.get_server_info(proto::GetServerInfoRequest {}).await.unwrap().into_inner().tls);
}

fn handshakes_failed(rm: &Instance) -> u64 {
    counted("linkis_rm_tls_handshake_failures_total", &rm.metrics.text())
}

/// Returns the value of a metric without labels.
fn counted(name: &str, text: &str) -> u64 {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.unwrap_or_else(|| panic!("no {name} in {text}")).trim().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificate_reload_under_load_fails_no_call() {
    let (database, folder) = (Database::fresh().await, Folder::new("changing-certificates"));
    let admin = token(&database, "admin", &["--role", "admin"]);
    let (old_ca, new_ca) = (authority("old"), authority("new"));
    // The authority of the server certificate stays, so that callers can always verify the server.
    let server_ca = Arc::new(authority("server"));
    folder.write_all(&certify(&server_ca, &["rm.example"], &[], FAR), &old_ca);
    let rm = Arc::new(start_tls(&database, &folder).await);
    let (old, new) = (certify(&old_ca, &["host1"], &[], FAR), certify(&new_ca, &["host1"], &[], FAR));
    let kept = connect(&rm, &server_ca, Some(&old)).await.unwrap();
    rm_of(&kept, "").register(register("host1")).await.unwrap();
    assert!(asks(&rm, &server_ca, Some(&new), "host1").await.is_err(), "not yet");

    // Continuous calls on one connection, and on a new connection each.
    let (stop, calls) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let load = tokio::spawn({
        let (rm, stop, calls, server_ca, kept) =
            (rm.clone(), stop.clone(), calls.clone(), server_ca.clone(), kept.clone());
        async move {
            let get_em = || proto::GetEmRequest { em: em_message("host1") };
            while !stop.load(Ordering::Relaxed) {
                UsageServiceClient::new(kept.clone()).get_em(get_em()).await.unwrap();
                let fresh = connect(&rm, &server_ca, None).await.unwrap();
                UsageServiceClient::new(crate::identity::with(&fresh, &admin)).get_em(get_em()).await.unwrap();
                calls.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    folder.write_all(&certify(&server_ca, &["rm.example"], &[], FAR), &new_ca);
    let is_new = || async { asks(&rm, &server_ca, Some(&new), "host1").await.is_ok() };
    eventually("the new authority is believed", TAKEN_UP_WITHIN, is_new).await;
    assert!(asks(&rm, &server_ca, Some(&old), "host1").await.is_err(), "and the old one is not any more");

    for (file, garbage) in
        [("cert", "garbage"), ("ca", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")]
    {
        let before = failed_reloads(&rm);
        folder.write(file, garbage);
        let got = || async { failed_reloads(&rm) > before };
        eventually("the log names the unusable file", TAKEN_UP_WITHIN, got).await;
        assert!(
            asks(&rm, &server_ca, Some(&new), "host1").await.is_ok()
                && asks(&rm, &server_ca, Some(&old), "host1").await.is_err()
        );
    }
    stop.store(true, Ordering::Relaxed);
    load.await.expect("no call failed");
    assert!(calls.load(Ordering::Relaxed) > 10);
}

/// A connection that presented a certificate ends when the certificate expires.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificate_after_expiry_ends_its_connection() {
    let (database, folder) = (Database::fresh().await, Folder::new("certificate-over"));
    let ca = authority("ca");
    folder.write_all(&certify(&ca, &["rm.example"], &[], FAR), &ca);
    let rm = start_tls(&database, &folder).await;
    let soon = certify_until(
        &ca,
        &["host1"],
        &[],
        OffsetDateTime::from(std::time::SystemTime::now()) + Duration::from_secs(15),
    );
    let channel = connect(&rm, &ca, Some(&soon)).await.unwrap();
    rm_of(&channel, "").register(register("host1")).await.unwrap();
    let got = Mutex::new(None);
    eventually("it is over", LONG, async || {
        let asked = proto::GetEmRequest { em: em_message("host1") };
        *got.lock().unwrap() = UsageServiceClient::new(channel.clone()).get_em(asked).await.err();
        got.lock().unwrap().is_some()
    })
    .await;
    let status = got.lock().unwrap().take().unwrap();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::Unauthenticated, "CERTIFICATE_EXPIRED"));
    let none_left = || async { counted("linkis_rm_connections", &rm.metrics.text()) == 0 };
    eventually("its connection ends", Duration::from_secs(10), none_left).await;
}

/// Each connection verifies its certificate.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_session_is_never_resumed() {
    let (database, folder) = (Database::fresh().await, Folder::new("certificate-sessions"));
    let ca = authority("ca");
    folder.write_all(&certify(&ca, &["rm.example"], &[], FAR), &ca);
    let rm = start_tls(&database, &folder).await;
    let config = config(&ca, Some(&certify(&ca, &["host1"], &[], FAR)));
    for _ in 0..2 {
        let stream = tokio::net::TcpStream::connect(rm.address.strip_prefix("http://").unwrap()).await.unwrap();
        let name = ServerName::try_from("rm.example").unwrap();
        let mut stream = tokio_rustls::TlsConnector::from(config.clone()).connect(name, stream).await.unwrap();
        // A session ticket would arrive before the first reply.
        stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
        stream.read_u8().await.unwrap();
        assert_eq!(stream.get_ref().1.handshake_kind(), Some(HandshakeKind::Full));
    }
}

fn failed_reloads(rm: &Instance) -> u64 {
    counted("linkis_rm_tls_reload_failures_total", &rm.metrics.text())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_without_tls_ends_at_handshake_timeout() {
    let (database, folder) = (Database::fresh().await, Folder::new("no-tls"));
    let ca = authority("ca");
    folder.write_all(&certify(&ca, &["rm.example"], &[], FAR), &ca);
    let options = folder.tls(settings()).with("--handshake-timeout", "3s");
    let rm = Instance::start_with(&database, options).await;
    let (address, http, config) = (rm.address.strip_prefix("http://").unwrap().to_owned(), rm.http, config(&ca, None));
    tokio::task::spawn_blocking(move || {
        let (mut silent, mut plain) = (TcpStream::connect(&address).unwrap(), TcpStream::connect(&address).unwrap());
        plain.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
        for stream in [&mut silent, &mut plain] {
            stream.set_read_timeout(Some(LONG)).unwrap();
            let mut rest = Vec::new();
            // The connection may send an alert before its end.
            let ended = stream.read_to_end(&mut rest);
            assert!(ended.is_ok() || ended.unwrap_err().kind() == std::io::ErrorKind::ConnectionReset);
            assert!(rest.len() < 100, "{rest:?}");
        }
        let mut config = Arc::unwrap_or_clone(config);
        config.alpn_protocols.clear();
        let tls = rustls::ClientConnection::new(Arc::new(config), ServerName::try_from("rm.example").unwrap()).unwrap();
        let mut stream = rustls::StreamOwned::new(tls, TcpStream::connect(http).unwrap());
        stream.write_all(b"GET /livez HTTP/1.1\r\nhost: rm\r\n\r\n").unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8(answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("alive\n"), "{answer}");
    })
    .await
    .unwrap();
    assert_eq!(handshakes_failed(&rm), 1);
    let none_left = || async { counted("linkis_rm_connections", &rm.metrics.text()) == 0 };
    eventually("their places are free again", Duration::from_secs(5), none_left).await;
}

/// The RM client verifies the server by its authority, and authenticates by a token or a certificate.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_over_tls_sends_token_or_certificate() {
    let (database, folder) = (Database::fresh().await, Folder::new("certificates-client"));
    let admin = token(&database, "admin", &["--role", "admin"]);
    let (ca, other_ca) = (authority("ca"), authority("other"));
    folder.write_all(&certify(&ca, &["127.0.0.1"], &[], FAR), &ca);
    let rm = start_tls(&database, &folder).await;
    let address = rm.address.replace("http://", "https://");
    let client = |ca: &Authority, token: Option<&str>, identity: Option<&Identity>| {
        let identity = identity.map(|Identity { cert, key }| rm_client::ClientIdentity {
            certificates: cert.clone().into_bytes(),
            key: key.clone().into_bytes(),
        });
        let tls = rm_client::TlsSettings { ca: Some(ca.as_ref().pem().into_bytes()), identity, ..Default::default() };
        let settings = ClientSettings { tls, token: token.map(str::to_owned), ..ClientSettings::once(LONG) };
        RmClient::with(&address, &settings).unwrap()
    };
    let host1 = em("host1");
    client(&ca, Some(&admin), None).register(registration(host1.clone(), load(10, 10, 10))).await.unwrap();
    let of_host = |host: &str| certify(&ca, &[host], &[], FAR);
    client(&ca, None, Some(&of_host("host1"))).em(&host1).await.unwrap();
    for (client, got) in [
        (client(&ca, None, Some(&of_host("host2"))), Some("ROLE_DENIED")),
        (client(&ca, None, None), Some("TOKEN_MISSING")),
        (client(&ca, Some("lrm_unknown"), None), Some("TOKEN_UNKNOWN")),
        (client(&other_ca, Some(&admin), None), None),
    ] {
        let error = client.em(&host1).await.unwrap_err();
        assert_eq!(error.reason().as_deref(), got, "{error}");
    }
}

/// Commands verify the service by authority and name, and authenticate by a token or a certificate, from arguments or variables.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_over_tls_send_token_or_certificate() {
    let (database, folder) = (Database::fresh().await, Folder::new("certificates-commands"));
    let admin = token(&database, "admin", &["--role", "admin"]);
    let ca = authority("ca");
    // The certificate has another name than the address.
    folder.write_all(&certify(&ca, &["rm.example"], &[], FAR), &ca);
    let rm = start_tls(&database, &folder).await;
    let address = rm.address.replace("http://", "https://");
    let file = |name: &str, text: &str| {
        let path = folder.0.join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let host = certify(&ca, &["host1"], &[], FAR);
    let (token, trusted) = (file("token", &format!("{admin}\n")), file("trusted", &ca.as_ref().pem()));
    let (cert, key) = (file("host-cert", &host.cert), file("host-key", &host.key));
    let run = |words: &[&str], variables: &[(&str, &str)]| {
        let mut command = program("", words);
        command.env_remove("LINKIS_RM_ADDRESS");
        command.envs(variables.iter().map(|(name, value)| (format!("LINKIS_RM_{name}"), value)));
        let ran = ran(&mut command);
        (ran.code, ran.err)
    };
    let by_words = |words: &[&str]| run(&[words, &["--address", &address, "--ca-cert", &trusted]].concat(), &[]);
    let with = |words: &[&str]| by_words(&[words, &["--tls-server-name", "rm.example"]].concat());
    assert_eq!(with(&["ticket", "list", "--token-file", &token]).0, Some(0));
    let (code, error) = with(&["em", "get", "host1:9102", "--client-cert", &cert, "--client-key", &key]);
    assert!(code == Some(1) && error.contains("host1:9102"), "an EM can read itself: {error}");
    let (code, error) = with(&["ticket", "list", "--client-cert", &cert, "--client-key", &key]);
    assert!(code == Some(2) && error.contains("needs"), "{error}");
    let (code, error) = with(&["ticket", "list"]);
    assert!(code == Some(2) && error.contains("--token-file"), "{error}");
    let (code, error) = by_words(&["ticket", "list", "--token-file", &token]);
    assert!(code == Some(2) && error.contains("certificate"), "the certificate has another name: {error}");
    let (code, error) = with(&["ticket", "list", "--client-cert", &cert]);
    assert!(code == Some(64) && error.contains("--client-key"), "{error}");

    let by_variables = |words: &[&str], more: &[(&str, &str)]| {
        let all = [("ADDRESS", address.as_str()), ("CA_CERT", &trusted), ("TLS_SERVER_NAME", "rm.example")];
        run(words, &[&all, more].concat())
    };
    assert_eq!(by_variables(&["ticket", "list"], &[("TOKEN_FILE", &token)]), (Some(0), String::new()));
    let (code, error) = by_variables(&["em", "get", "host1:9102"], &[("CLIENT_CERT", &cert), ("CLIENT_KEY", &key)]);
    assert!(code == Some(1) && error.contains("host1:9102"), "an EM can read itself: {error}");
    let (code, error) =
        by_variables(&["ticket", "list"], &[("TOKEN_FILE", &token), ("TLS_SERVER_NAME", "other.example")]);
    assert!(code == Some(2) && error.contains("certificate"), "the certificate has another name: {error}");
    let (code, error) = by_variables(&["ticket", "list"], &[("TOKEN_FILE", &token), ("CA_CERT", "/nowhere")]);
    assert!(code == Some(64) && error.contains("--ca-cert: /nowhere"), "{error}");

    // An address without https names the encrypted one.
    let plain = rm.address.strip_prefix("http://").unwrap();
    for address in [plain, &rm.address, &format!("{plain},{plain}/")] {
        let (code, error) = run(&["em", "list", "--address", address], &[]);
        assert!(code == Some(2) && error.contains(&format!("If it uses TLS: --address https://{plain}")), "{error}");
        assert!(!error.contains("Start one"), "{error}");
    }
}
