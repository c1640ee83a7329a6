//! JWTs: accepted issuers, the rights by their claims, their expiry, and changed keys.

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use axum::{
    Router,
    extract::State,
    http::{HeaderMap, StatusCode},
    routing::get,
};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use hyper::server::conn::http1;
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use rcgen::{KeyPair, PKCS_ED25519};
use ring::{
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair},
};
use rm_model::access::JWT_BYTES_MAX;
use rm_proto::v1::{self as proto, usage_service_client::UsageServiceClient};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
use serde_json::{Value, json};
use tokio::{net::TcpListener, task::JoinSet};
use tonic::{Code, Status, transport::Channel};

use crate::{
    certificates::{FAR, Folder, Identity, authority, certify},
    harness::*,
    identity::{ask, em_message, granted, reason, register, rm_of, token, with},
};

/// How long a file that changed may not be taken up.
const TAKEN_UP_WITHIN: Duration = Duration::from_secs(10);

/// How long after its end a JWT is still good.
const LEEWAY: i64 = 30;

const ISSUER: &str = "https://idp.example";

/// A key that signs JWTs.
pub struct Signer {
    id: String,
    pair: KeyPair,
    is_ed: bool,
}

fn encoded(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

impl Signer {
    /// For ES256.
    pub fn ec(id: &str) -> Self {
        Self { id: id.into(), pair: KeyPair::generate().unwrap(), is_ed: false }
    }

    /// For EdDSA.
    fn ed(id: &str) -> Self {
        Self { id: id.into(), pair: KeyPair::generate_for(&PKCS_ED25519).unwrap(), is_ed: true }
    }

    /// Its public part.
    fn public(&self) -> Value {
        let raw = self.pair.public_key_raw();
        match self.is_ed {
            true => json!({"kty": "OKP", "crv": "Ed25519", "kid": self.id, "x": encoded(raw)}),
            false => json!({"kty": "EC", "crv": "P-256", "kid": self.id, "use": "sig", "alg": "ES256",
                "x": encoded(&raw[1..33]), "y": encoded(&raw[33..])}),
        }
    }

    /// A JWT of these claims.
    pub fn sign(&self, claims: &Value) -> String {
        let algorithm = if self.is_ed { "EdDSA" } else { "ES256" };
        self.sign_as(&json!({"typ": "JWT", "alg": algorithm, "kid": self.id}), claims)
    }

    fn sign_as(&self, header: &Value, claims: &Value) -> String {
        let message = format!("{}.{}", encoded(header.to_string()), encoded(claims.to_string()));
        let (key, random) = (self.pair.serialize_der(), SystemRandom::new());
        let signed = match self.is_ed {
            true => {
                Ed25519KeyPair::from_pkcs8_maybe_unchecked(&key).unwrap().sign(message.as_bytes()).as_ref().to_vec()
            }
            false => {
                let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &key, &random).unwrap();
                pair.sign(&random, message.as_bytes()).unwrap().as_ref().to_vec()
            }
        };
        format!("{message}.{}", encoded(signed))
    }
}

/// The public keys, as issuers publish them.
pub fn key_set(signers: &[&Signer]) -> String {
    json!({"keys": signers.iter().map(|signer| signer.public()).collect::<Vec<_>>()}).to_string()
}

fn now() -> i64 {
    i64::try_from(SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs()).unwrap()
}

/// Claims of a subject, with these further claims.
pub fn claims(subject: &str, more: Value) -> Value {
    let mut claims = json!({"iss": ISSUER, "aud": ["others", "linkis-rm"], "sub": subject, "exp": now() + 600});
    more.as_object().unwrap().iter().for_each(|(name, value)| claims[name] = value.clone());
    claims
}

/// A configuration of one issuer with its keys there.
pub fn config(keys: &str, more: Value) -> Value {
    let mut issuer = json!({"name": "idp", "issuer": ISSUER, "audiences": ["linkis-rm"], "keys": keys, "grants": [
        {"if": {"sub": "boss"}, "roles": ["admin"]},
        {"if": {"groups": "asks"}, "roles": ["manager"], "users_from": "users"},
        {"if": {"/kubernetes.io/namespace": "linkis"}, "roles": ["ecm"], "ems_from": "/kubernetes.io/node/name"},
    ]});
    more.as_object().unwrap().iter().for_each(|(name, value)| issuer[name] = value.clone());
    json!({ "issuers": [issuer] })
}

/// Settings with this configuration.
fn believing(config: PathBuf) -> Settings {
    settings().with("--jwt-config", config.display())
}

async fn start_with_keys(database: &Database, folder: &Folder, signers: &[&Signer]) -> Instance {
    folder.write("keys", &key_set(signers));
    folder.write("config", &config(folder.0.join("keys").to_str().unwrap(), json!({})).to_string());
    Instance::start_with(database, believing(folder.0.join("config"))).await
}

/// Result of a call with this JWT.
async fn asks(channel: &Channel, shown: &str) -> Result<(), Status> {
    let mut usage = UsageServiceClient::new(with(channel, shown));
    usage.get_server_info(proto::GetServerInfoRequest {}).await.map(|_| ())
}

/// Reason of the rejection of this JWT.
async fn refused(channel: &Channel, shown: &str) -> String {
    asks(channel, shown).await.map_or_else(|status| reason(&status), |()| "authenticated".into())
}

fn counted(rm: &Instance, name: &str) -> u64 {
    let text = rm.metrics.text();
    let value = text.lines().find_map(|line| line.strip_prefix(&format!("linkis_rm_jwt_{name} ")));
    value.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jwt_claims_grant_roles_and_mistakes_are_rejected() {
    let (database, folder) = (Database::fresh().await, Folder::new("jwt"));
    let admin = token(&database, "admin", &["--role", "admin"]);
    let (ec, ed, stranger) = (Signer::ec("ec"), Signer::ed("ed"), Signer::ec("ec"));
    let rm = start_with_keys(&database, &folder, &[&ec, &ed]).await;
    let channel = channel_to(&rm.address).await;
    let boss = ec.sign(&claims("boss", json!({})));
    for host in ["host1", "host2"] {
        rm_of(&channel, &boss).register(register(host)).await.unwrap();
    }

    // A manager of its users, an ecm of its node, and a caller without claims.
    let asking = ed.sign(&claims("job", json!({"groups": ["asks"], "users": ["alice", "carol"]})));
    let mut manager = rm_of(&channel, &asking);
    let ticket = granted(manager.request_resource(ask("host1", "alice", 1)).await.unwrap().into_inner());
    let node = |host: &str| json!({"namespace": "linkis", "node": {"name": host}});
    let of_host = ec.sign(&claims("ecm", json!({"kubernetes.io": node("host2")})));
    rm_of(&channel, &of_host).register(register("host2")).await.unwrap();
    let anybody = ec.sign(&claims("anybody", json!({"groups": ["admins"]})));
    for status in [
        manager.request_resource(ask("host1", "bob", 1)).await.unwrap_err(),
        rm_of(&channel, &of_host).register(register("host1")).await.unwrap_err(),
        rm_of(&channel, &anybody).register(register("host1")).await.unwrap_err(),
        asks(&channel, &anybody).await.unwrap_err(),
    ] {
        assert_eq!((status.code(), reason(&status).as_str()), (Code::PermissionDenied, "ROLE_DENIED"), "{status:?}");
    }

    // Tokens remain valid beside JWTs, and the history names the caller.
    let mut usage = UsageServiceClient::new(with(&channel, &admin));
    let call = proto::ListActionsRequest { ticket_id: ticket, ..Default::default() };
    assert_eq!(usage.list_actions(call).await.unwrap().into_inner().actions[0].actor, "idp/job");

    let header = json!({"alg": "ES256", "kid": "ec"});
    let (message, signature) = boss.rsplit_once('.').unwrap();
    let claims_as = |more| claims("boss", more);
    let before = counted(&rm, "refused_total");
    let bad = [
        ("", "TOKEN_MISSING"),
        ("hunter2", "JWT_MALFORMED"),
        ("a.b.c", "JWT_MALFORMED"),
        (message, "JWT_MALFORMED"),
        (&format!("{boss}.{signature}"), "JWT_MALFORMED"),
        (&stranger.sign(&claims_as(json!({}))), "JWT_SIGNATURE"),
        (&format!("{message}."), "JWT_SIGNATURE"),
        (&Signer::ec("new").sign(&claims_as(json!({}))), "JWT_KEY_UNKNOWN"),
        (&ec.sign_as(&json!({"alg": "ES256"}), &claims_as(json!({"iss": "else"}))), "JWT_ISSUER"),
        (&ec.sign(&claims_as(json!({"iss": "https://idp.example/"}))), "JWT_ISSUER"),
        (&ec.sign(&claims_as(json!({"iss": null}))), "JWT_ISSUER"),
        (&ec.sign(&claims_as(json!({"iss": [ISSUER, "else"]}))), "JWT_MALFORMED"),
        (&ec.sign(&claims_as(json!({"aud": "others"}))), "JWT_AUDIENCE"),
        (&ec.sign(&claims_as(json!({"aud": ["linkis-rm2"]}))), "JWT_AUDIENCE"),
        (&ec.sign(&claims_as(json!({"aud": null}))), "JWT_AUDIENCE"),
        (&ec.sign(&claims_as(json!({"exp": now() - LEEWAY - 1}))), "JWT_EXPIRED"),
        (&ec.sign(&claims_as(json!({"exp": null}))), "JWT_MALFORMED"),
        (&ec.sign(&claims_as(json!({"exp": "2100-01-01"}))), "JWT_MALFORMED"),
        (&ec.sign(&claims_as(json!({"nbf": now() + LEEWAY + 60}))), "JWT_NOT_YET_VALID"),
        (&ec.sign(&claims_as(json!({"sub": null}))), "JWT_MALFORMED"),
        (&ec.sign_as(&json!({"alg": "HS256", "kid": "ec"}), &claims_as(json!({}))), "JWT_ALGORITHM"),
        (&ec.sign_as(&json!({"alg": "ES384", "kid": "ec"}), &claims_as(json!({}))), "JWT_ALGORITHM"),
        (&ec.sign_as(&json!({"alg": "EdDSA", "kid": "ec"}), &claims_as(json!({}))), "JWT_ALGORITHM"),
        (&ec.sign_as(&json!({"alg": "none", "kid": "ec"}), &claims_as(json!({}))), "JWT_MALFORMED"),
        (&ec.sign_as(&json!({"alg": "ES256", "kid": "ec", "crit": ["b64"]}), &claims_as(json!({}))), "JWT_MALFORMED"),
        (&ec.sign(&claims_as(json!({"groups": "g".repeat(JWT_BYTES_MAX * 3 / 4)}))), "JWT_TOO_LARGE"),
        (&format!("lrm_{boss}"), "TOKEN_UNKNOWN"),
    ];
    for (shown, why) in bad {
        let status = rm_of(&channel, shown).register(register("host3")).await.unwrap_err();
        assert_eq!((status.code(), reason(&status).as_str()), (Code::Unauthenticated, why), "{shown}: {status:?}");
        assert!(shown.len() < 8 || !format!("{status:?}").contains(shown), "{status:?}");
    }
    let of_tokens = bad.iter().filter(|(_, why)| why.starts_with("TOKEN_")).count();
    assert_eq!(counted(&rm, "refused_total") - before, u64::try_from(bad.len() - of_tokens).unwrap());
    let call = proto::GetEmRequest { em: em_message("host3") };
    assert_eq!(usage.get_em(call).await.unwrap_err().code(), Code::NotFound, "nothing was done");
    // Without a key's id, if only one is for that way to sign; a little after the end, and a little before the beginning.
    for good in [
        ec.sign_as(&json!({"alg": "ES256"}), &claims_as(json!({}))),
        ec.sign_as(&header, &claims_as(json!({"exp": now() - 1, "nbf": now() + 5, "aud": "linkis-rm"}))),
        ec.sign_as(&header, &claims_as(json!({"exp": 1e15}))),
    ] {
        asks(&channel, &good).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jwt_key_change_applies_without_restart() {
    let (database, folder) = (Database::fresh().await, Folder::new("jwt-changes"));
    let (old, stays, new) = (Signer::ec("old"), Signer::ed("stays"), Signer::ec("new"));
    let rm = start_with_keys(&database, &folder, &[&old, &stays]).await;
    let channel = channel_to(&rm.address).await;
    let by = |signer: &Signer, name: &str| signer.sign(&claims(name, json!({})));
    let boss = by(&stays, "boss");
    rm_of(&channel, &boss).register(register("host1")).await.unwrap();
    rm_of(&channel, &boss).request_resource(ask("host1", "alice", 16)).await.unwrap();
    let wait = proto::RequestResourceRequest {
        wait_timeout: Some(prost_types::Duration { seconds: 60, nanos: 0 }),
        ..ask("host1", "alice", 1)
    };
    let mut waiting = Vec::new();
    for signer in [&old, &stays] {
        let (mut waiter, wait) = (rm_of(&channel, &by(signer, "boss")), wait.clone());
        waiting.push(tokio::spawn(async move { waiter.request_resource(wait).await }));
    }
    let stand = |count| {
        let database = &database;
        move || async move { database.count("SELECT count(*) FROM linkis_resource_waiting").await == count }
    };
    eventually("both stand in line", Duration::from_secs(5), stand(2)).await;

    // Garbage first: the keys stay.
    let failures = counted(&rm, "reload_failures_total");
    folder.write("keys", "garbage");
    let got = || async { counted(&rm, "reload_failures_total") == failures + 1 };
    eventually("the failure is counted", TAKEN_UP_WITHIN, got).await;
    assert_eq!(refused(&channel, &by(&old, "boss")).await, "authenticated");

    folder.write("keys", &key_set(&[&stays, &new]));
    let is_new = || async { asks(&channel, &by(&new, "boss")).await.is_ok() };
    eventually("the new key is believed", TAKEN_UP_WITHIN, is_new).await;
    assert_eq!(refused(&channel, &by(&old, "boss")).await, "JWT_KEY_UNKNOWN", "and the old one is not any more");
    let status = waiting.remove(0).await.unwrap().unwrap_err();
    assert_eq!(reason(&status), "JWT_WITHDRAWN", "a waiting call with the old key ends");
    eventually("the other request still waits", Duration::from_secs(5), stand(1)).await;

    // A change of the mapping of claims ends streams and calls that it no longer permits.
    let keys = folder.0.join("keys");
    folder.write("config", &config(keys.to_str().unwrap(), json!({"audiences": []})).to_string());
    let got = || async { counted(&rm, "reload_failures_total") == failures + 2 };
    eventually("the failure is counted", TAKEN_UP_WITHIN, got).await;
    assert_eq!(refused(&channel, &boss).await, "authenticated");
    let grants =
        json!({"grants": [{"if": {"sub": "boss"}, "roles": ["viewer"]}, {"if": {"sub": "heir"}, "roles": ["admin"]}]});
    folder.write("config", &config(keys.to_str().unwrap(), grants).to_string());
    let heir = by(&stays, "heir");
    let inherits = || async { asks(&channel, &heir).await.is_ok() };
    eventually("the new claims are believed", TAKEN_UP_WITHIN, inherits).await;
    let status = rm_of(&channel, &boss).register(register("host1")).await.unwrap_err();
    assert_eq!(reason(&status), "ROLE_DENIED", "the JWT has fewer rights now");
    let status = waiting.remove(0).await.unwrap().unwrap_err();
    assert_eq!(reason(&status), "JWT_WITHDRAWN");
    eventually("no request waits", Duration::from_secs(5), stand(0)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jwt_expiry_ends_streams_and_waiting_calls() {
    use tonic_reflection::pb::v1::{ServerReflectionRequest, server_reflection_client::ServerReflectionClient};

    let (database, folder, signer) = (Database::fresh().await, Folder::new("jwt-ends"), Signer::ec("k"));
    let rm = start_with_keys(&database, &folder, &[&signer]).await;
    let channel = channel_to(&rm.address).await;
    let boss = signer.sign(&claims("boss", json!({})));
    rm_of(&channel, &boss).register(register("host1")).await.unwrap();
    rm_of(&channel, &boss).request_resource(ask("host1", "alice", 16)).await.unwrap();
    let short = signer.sign(&claims("boss", json!({"exp": now() - LEEWAY + 15})));
    let (asking, questions) = tokio::sync::mpsc::channel::<ServerReflectionRequest>(1);
    let mut client = ServerReflectionClient::new(with(&channel, &short));
    let questions = tokio_stream::wrappers::ReceiverStream::new(questions);
    let mut stream = client.server_reflection_info(questions).await.unwrap().into_inner();
    let wait_timeout = Some(prost_types::Duration { seconds: 60, nanos: 0 });
    let wait = proto::RequestResourceRequest { wait_timeout, ..ask("host1", "alice", 1) };
    let mut waiter = rm_of(&channel, &short);
    let waiting = tokio::spawn(async move { waiter.request_resource(wait).await });
    let status = tokio::time::timeout(LONG, stream.message()).await.expect("it ends in time").unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::Unauthenticated, "JWT_EXPIRED"));
    let status = tokio::time::timeout(LONG, waiting).await.expect("it ends in time").unwrap().unwrap_err();
    assert_eq!(reason(&status), "JWT_EXPIRED");
    assert_eq!(refused(&channel, &short).await, "JWT_EXPIRED");
    asks(&channel, &boss).await.expect("another's goes on");
    drop(asking);
}

/// A server of keys over HTTP, with or without TLS.
struct Publisher {
    address: String,
    state: Arc<Published>,
}

#[derive(Default)]
struct Published {
    /// The reply; `None` is 503.
    keys: Mutex<Option<String>>,
    asked: AtomicUsize,
    /// The last credential that it received.
    shown: Mutex<String>,
}

async fn publish(State(state): State<Arc<Published>>, headers: HeaderMap) -> Result<String, StatusCode> {
    state.asked.fetch_add(1, Ordering::SeqCst);
    let shown = headers.get("authorization").map(|shown| shown.to_str().unwrap().to_owned());
    *state.shown.lock().unwrap() = shown.unwrap_or_default();
    state.keys.lock().unwrap().clone().ok_or(StatusCode::SERVICE_UNAVAILABLE)
}

impl Publisher {
    async fn start(keys: &str, identity: Option<&Identity>) -> Self {
        let state = Arc::<Published>::default();
        *state.keys.lock().unwrap() = Some(keys.to_owned());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let scheme = if identity.is_some() { "https" } else { "http" };
        let address = format!("{scheme}://{}/keys", listener.local_addr().unwrap());
        let router = Router::new().route("/keys", get(publish)).with_state(state.clone());
        let acceptor = identity.map(|Identity { cert, key }| {
            let builder =
                rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
            let builder = builder.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
            let cert = vec![CertificateDer::from_pem_slice(cert.as_bytes()).unwrap()];
            let config =
                builder.with_single_cert(cert, PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap()).unwrap();
            tokio_rustls::TlsAcceptor::from(Arc::new(config))
        });
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (service, acceptor) = (TowerToHyperService::new(router.clone()), acceptor.clone());
                tokio::spawn(async move {
                    match acceptor {
                        None => drop(http1::Builder::new().serve_connection(TokioIo::new(stream), service).await),
                        Some(acceptor) => {
                            if let Ok(stream) = acceptor.accept(stream).await {
                                drop(http1::Builder::new().serve_connection(TokioIo::new(stream), service).await);
                            }
                        }
                    }
                });
            }
        });
        Self { address, state }
    }

    fn tell(&self, keys: Option<String>) {
        *self.state.keys.lock().unwrap() = keys;
    }

    fn asked(&self) -> usize {
        self.state.asked.load(Ordering::SeqCst)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jwt_unknown_key_refetches_keys_at_bounded_rate() {
    let (database, folder) = (Database::fresh().await, Folder::new("jwt-address"));
    let (old, new) = (Signer::ec("old"), Signer::ec("new"));
    let publisher = Publisher::start(&key_set(&[&old]), None).await;
    folder.write("config", &config(&publisher.address, json!({})).to_string());
    let rm = Instance::start_with(&database, believing(folder.0.join("config"))).await;
    let channel = channel_to(&rm.address).await;
    assert_eq!(publisher.asked(), 1, "before it serves");
    let (boss, heir) = (old.sign(&claims("boss", json!({}))), new.sign(&claims("boss", json!({}))));
    for _ in 0..50 {
        asks(&channel, &boss).await.unwrap();
    }
    assert_eq!((publisher.asked(), counted(&rm, "cache_entries")), (1, 1));

    // Many unknown keys, and an unreachable address, cause few fetches.
    let (failures, begun) = (counted(&rm, "reload_failures_total"), Instant::now());
    let too_much = format!("{}{}", key_set(&[&new]), " ".repeat(1 << 20));
    for answer in [None, Some(too_much), Some(key_set(&[]))] {
        publisher.tell(answer);
        let before = counted(&rm, "reload_failures_total");
        let got = || async {
            assert_eq!(refused(&channel, &heir).await, "JWT_KEY_UNKNOWN");
            counted(&rm, "reload_failures_total") > before
        };
        eventually("the failed read is counted", Duration::from_secs(15), got).await;
        asks(&channel, &boss).await.expect("the keys before stay in force");
    }
    assert!(counted(&rm, "reload_failures_total") >= failures + 3);
    let asked = publisher.asked();
    assert!(asked <= 5 + begun.elapsed().as_secs() as usize / 2, "{asked}");
    publisher.tell(Some(key_set(&[&old, &new])));
    let is_new = || async { asks(&channel, &heir).await.is_ok() };
    eventually("it asks again, and not only in a minute", Duration::from_secs(15), is_new).await;
    asks(&channel, &boss).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jwt_key_address_requires_trusted_certificate() {
    let (database, folder, signer) = (Database::fresh().await, Folder::new("jwt-https"), Signer::ec("k"));
    let ca = authority("ca");
    let publisher = Publisher::start(&key_set(&[&signer]), Some(&certify(&ca, &["127.0.0.1"], &[], FAR))).await;
    let (own, token) = (folder.0.join("ca"), folder.0.join("token"));
    folder.write("ca", &authority("other").as_ref().pem());
    folder.write("token", "s3cret\n");
    folder.write("config", &config(&publisher.address, json!({"ca": own, "token_file": token})).to_string());
    let rm = Instance::start_with(&database, believing(folder.0.join("config"))).await;
    let channel = channel_to(&rm.address).await;
    let boss = signer.sign(&claims("boss", json!({})));
    assert_eq!(refused(&channel, &boss).await, "JWT_KEY_UNKNOWN", "the certificate of the address is not trusted");
    assert_eq!((publisher.asked(), counted(&rm, "reload_failures_total") > 0), (0, true));
    folder.write("ca", &ca.as_ref().pem());
    let believed = || async { asks(&channel, &boss).await.is_ok() };
    eventually("the file is read each time", Duration::from_secs(15), believed).await;
    assert_eq!(*publisher.state.shown.lock().unwrap(), "Bearer s3cret");
}

/// Invalid JWTs are not cached, and cause no database query; the database cannot reply here.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_jwt_crowd_delays_no_valid_caller() {
    let all = crowd_of(2000);
    let (database, folder) = (Database::fresh().await, Folder::new("jwt-crowd"));
    let (signer, stranger) = (Signer::ec("k"), Signer::ec("k"));
    let (proxy, behind) = database.behind_proxy("jwt");
    let rm = start_with_keys(&behind, &folder, &[&signer]).await;
    let (channel, crowded) = (channel_to(&rm.address).await, channel_to(&rm.address).await);
    let boss = signer.sign(&claims("boss", json!({})));
    asks(&channel, &boss).await.unwrap();
    proxy.close();
    // Each is as good as possible: only its signature is wrong.
    let bad: Arc<Vec<String>> =
        Arc::new((0..all).map(|n| stranger.sign(&claims("boss", json!({ "jti": n })))).collect());
    let next = Arc::<AtomicUsize>::default();
    let mut crowd = JoinSet::new();
    for _ in 0..64 {
        let (bad, next, crowded) = (bad.clone(), next.clone(), crowded.clone());
        crowd.spawn(async move {
            while let Some(jwt) = bad.get(next.fetch_add(1, Ordering::Relaxed)) {
                assert_eq!(refused(&crowded, jwt).await, "JWT_SIGNATURE");
            }
        });
    }
    while next.load(Ordering::Relaxed) < all {
        tokio::time::timeout(LONG, asks(&channel, &boss)).await.expect("a reply").unwrap();
    }
    crowd.join_all().await;
    assert_eq!((counted(&rm, "cache_entries"), counted(&rm, "refused_total")), (1, u64::try_from(all).unwrap()));
    proxy.open();
}

#[test]
fn jwt_configuration_mistake_ends_the_start() {
    let folder = Folder::new("jwt-wrong");
    folder.write("keys", "{}");
    folder.write("sound", &key_set(&[&Signer::ec("k")]));
    let keys = |name: &str| folder.0.join(name).to_str().unwrap().to_owned();
    for (config, got) in [
        ("{".to_owned(), "EOF while parsing"),
        (config(&keys("missing"), json!({})).to_string(), "missing: cannot be read: No such file"),
        (config(&keys("keys"), json!({})).to_string(), "keys: is not a JSON Web Key Set"),
        (config("https://idp.example/keys", json!({})).to_string(), "issuers[0].keys: is not an allowed host"),
        (
            config(&keys("sound"), json!({"grants": [{"roles": ["admin"]}]})).to_string(),
            "issuers[0].grants[0].if: is missing",
        ),
    ] {
        folder.write("config", &config);
        let mut command = std::process::Command::new(*PROGRAM);
        command.args(["--listen", "127.0.0.1:0", "--http-listen", "", "--database-url", "postgres://127.0.0.1:1/x"]);
        let done = command.args(["--jwt-config".as_ref(), folder.0.join("config").as_os_str()]).output().unwrap();
        let error = String::from_utf8(done.stderr).unwrap();
        assert!(
            done.status.code() == Some(1) && error.contains("--jwt-config") && error.contains(got),
            "{got}: {error}"
        );
    }
}
