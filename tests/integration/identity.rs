//! Roles, their scopes, and the tokens that authenticate callers.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::{Command, Stdio},
    time::Duration,
};

use rm_proto::v1::{
    self as proto, limit_service_client::LimitServiceClient,
    resource_manager_service_client::ResourceManagerServiceClient, usage_service_client::UsageServiceClient,
};
use tonic::{
    Code, Request, Status, codegen::http::uri::PathAndQuery, metadata::MetadataValue,
    service::interceptor::InterceptedService, transport::Channel,
};
use tonic_prost::ProstCodec;
use tonic_types::StatusExt as _;

use crate::{certificates, harness::*, jwt};

mod user_scope;

/// Maximum time until instances apply a new or revoked token.
const KNOWN_WITHIN: Duration = Duration::from_secs(5);

/// Runs `linkis-rm token` with these arguments on a database.
pub fn tokens_command(database: &Database, words: &[&str]) -> Command {
    let mut command = Command::new(*PROGRAM);
    command.arg("token").args(words).env("DATABASE_URL", database.url()).env_remove("LINKIS_RM_DATA_DIR");
    command
}

/// Runs `tokens` with success. Returns its output.
pub fn tokens(database: &Database, words: &[&str]) -> String {
    let mut command = tokens_command(database, words);
    if words.first() == Some(&"revoke") {
        command.args(["--yes", "--reason", "a test"]);
    }
    let done = command.output().unwrap();
    assert!(done.status.success(), "{words:?}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

/// Creates a token.
pub fn token(database: &Database, name: &str, rights: &[&str]) -> String {
    let words = [&["create", "--name", name, "--owner", "the tests"], rights].concat();
    tokens(database, &words).trim_end().to_owned()
}

/// Sends a token with every call.
#[derive(Clone)]
pub struct Show(pub String);

impl tonic::service::Interceptor for Show {
    fn call(&mut self, mut call: Request<()>) -> Result<Request<()>, Status> {
        if !self.0.is_empty() {
            let shown = MetadataValue::try_from(format!("Bearer {}", self.0)).unwrap();
            call.metadata_mut().insert("authorization", shown);
        }
        Ok(call)
    }
}

type With = InterceptedService<Channel, Show>;

/// Returns a client with a token; without one if it is empty.
pub fn with(channel: &Channel, token: &str) -> With {
    InterceptedService::new(channel.clone(), Show(token.to_owned()))
}

pub fn rm_of(channel: &Channel, token: &str) -> ResourceManagerServiceClient<With> {
    ResourceManagerServiceClient::new(with(channel, token))
}

fn usage_of(channel: &Channel, token: &str) -> UsageServiceClient<With> {
    UsageServiceClient::new(with(channel, token))
}

pub fn reason(status: &Status) -> String {
    status.get_details_error_info().map(|info| info.reason).unwrap_or_default()
}

fn fact(status: &Status, field: &str) -> String {
    status.get_details_error_info().and_then(|info| info.metadata.get(field).cloned()).unwrap_or_default()
}

pub fn em_message(host: &str) -> Option<proto::EmInstance> {
    let em = em(host);
    let (application_name, instance) = (em.application_name.to_string(), em.instance.to_string());
    Some(proto::EmInstance { application_name, instance })
}

pub fn amount(cores: i64) -> Option<proto::Resource> {
    let amounts = proto::LoadInstanceResource { memory: cores * GB, cores, instances: cores };
    Some(proto::Resource { kind: Some(proto::resource::Kind::LoadInstance(amounts)) })
}

pub fn register(host: &str) -> proto::RegisterRequest {
    proto::RegisterRequest { em: em_message(host), total: amount(16), ..Default::default() }
}

pub fn ask(host: &str, user: &str, cores: i64) -> proto::RequestResourceRequest {
    proto::RequestResourceRequest {
        em: em_message(host),
        user: user.into(),
        creator: "IDE".into(),
        resource: amount(cores),
        ..Default::default()
    }
}

pub fn granted(answer: proto::RequestResourceResponse) -> String {
    match answer.result {
        Some(proto::request_resource_response::Result::Available(available)) => available.ticket_id,
        other => panic!("{other:?}"),
    }
}

/// Result of a call with an empty message.
async fn empty_call(channel: &Channel, token: &str, path: &str, is_unary: bool) -> Result<(), Status> {
    let mut grpc = tonic::client::Grpc::new(with(channel, token));
    grpc.ready().await.unwrap();
    let (path, codec) = (path.parse::<PathAndQuery>().unwrap(), ProstCodec::<(), ()>::default());
    match is_unary {
        true => grpc.unary(Request::new(()), path, codec).await.map(|_| ()),
        false => grpc.server_streaming(Request::new(()), path, codec).await.map(|_| ()),
    }
}

/// Returns every call of the descriptors, with whether it is unary.
fn described() -> BTreeMap<String, bool> {
    let sets = [
        proto::DESCRIPTORS,
        tonic_health::pb::FILE_DESCRIPTOR_SET,
        tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET,
        tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET,
    ];
    let methods = sets.into_iter().flat_map(methods);
    methods.map(|method| (format!("/{}/{}", method.service, method.name), method.is_unary)).collect()
}

/// Permitted callers of each method: without credentials, ecm, manager, viewer, operator, admin.
const MATRIX: &str = "
    Register            e---a      Unregister         e---a      Heartbeat           e---a
    RequestResource     em--a      ResourceInited     em--a      ResourceReported    em--a
    ResourceReleased    em--a      GetServerInfo      emvoa      GetEm               emvoa
    BatchGetEms         emvoa      ListEms            -mvoa      GetTicket           -mvoa
    BatchGetTickets     -mvoa      ListTickets        -mvoa      ListScopes          -mvoa
    ListWaiting         -mvoa      ListActions        -mvoa      ListLimits          -mvoa
    ListPolicies        -mvoa      SetLimit           ----a      DeleteLimit         ----a
    ReplaceLimits       ----a      SetPolicy          ----a      Audit               ---oa
    Repair              ----a      AdoptTicket        ----a      Drain               e--oa
    Resume              e--oa      ForceRelease       ---oa      Hold                ---oa
    RemoveWaiting       ---oa      ReleaseHold        ---oa      ListHolds          ---oa      PutProvider         ----a
    DeleteProvider      ----a      ListProviders      ---oa      GetQueue            -mvoa
    ListQueues          -mvoa      ListApplications   -mvoa      GetOverview         -mvoa
    ListInstances       -mvoa      ListTasks          -mvoa      UsageService/Watch  -mvoa
    ListRefusals        -mvoa      GetUsage           -mvoa      FollowActions       -mvoa
    GetScope            -mvoa      ListUsers          -mvoa      CheckProvider       ---oa
    GetOrder            -mvoa      SetOrder           ----a      ListPriorities      -mvoa
    SetPriority         ----a      DeletePriority     ----a      ListReclaimPolicies -mvoa
    WithdrawReclaim     ---oa
    SetReclaimPolicy    ----a      DeleteReclaimPolicy ----a      ListReclaims        -mvoa
    ServerReflectionInfo emvoa     Check              *emvoa     Watch               *emvoa";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn role_matrix_allows_exactly_its_calls() {
    let database = Database::fresh().await;
    let bound = ["--user", "alice"];
    let roles: [(char, String); 6] = [
        ('*', String::new()),
        ('e', token(&database, "an ecm", &["--role", "ecm", "--em", "host1"])),
        ('m', token(&database, "a manager", &[&["--role", "manager"], &bound[..]].concat())),
        ('v', token(&database, "a viewer", &[&["--role", "viewer"], &bound[..]].concat())),
        ('o', token(&database, "an operator", &["--role", "operator"])),
        ('a', token(&database, "an admin", &["--role", "admin"])),
    ];
    let words: Vec<&str> = MATRIX.split_whitespace().collect();
    let matrix: BTreeMap<&str, &str> = words.chunks(2).map(|pair| (pair[0], pair[1])).collect();
    let rm = Instance::start(&database).await;
    let channel = channel_to(&rm.address).await;
    let methods = described();
    let mut seen = BTreeSet::new();
    for (path, is_unary) in &methods {
        // The matrix names the service of a call instead, if two services have a call with this name.
        let (package, name) = (path.rsplit('.').next().unwrap(), path.rsplit('/').next().unwrap());
        let name = if matrix.contains_key(package) { package } else { name };
        let allowed = matrix.get(name).unwrap_or_else(|| panic!("{path} is in no table: who may call it?"));
        seen.insert(name);
        for (role, token) in &roles {
            let ended = empty_call(&channel, token, path, *is_unary).await;
            let (code, reason) =
                ended.as_ref().map_or_else(|status| (status.code(), reason(status)), |()| (Code::Ok, String::new()));
            let got = format!("{role} {path}: {ended:?}");
            match (allowed.contains(*role), role) {
                (true, _) => assert!(
                    ![Code::Unauthenticated, Code::PermissionDenied, Code::Unimplemented].contains(&code),
                    "{got}"
                ),
                (false, '*') => assert_eq!((code, reason.as_str()), (Code::Unauthenticated, "TOKEN_MISSING"), "{got}"),
                (false, _) => {
                    assert_eq!((code, reason.as_str()), (Code::PermissionDenied, "ROLE_DENIED"), "{got}");
                    let status = ended.unwrap_err();
                    assert!(
                        fact(&status, "role").starts_with(*role) && fact(&status, "needs").contains("admin"),
                        "{got}"
                    );
                }
            }
        }
    }
    assert_eq!(seen.len(), matrix.len(), "a call that there is no more");
    let no_such = empty_call(&channel, &roles[5].1, "/linkis.rm.v1.AdminService/NoSuchCall", true).await.unwrap_err();
    assert_eq!(no_such.code(), Code::Unimplemented);
    let no_such = empty_call(&channel, "", "/linkis.rm.v1.AdminService/NoSuchCall", true).await.unwrap_err();
    assert_eq!(no_such.code(), Code::Unauthenticated);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn first_token_requires_authentication_of_every_caller() {
    let database = Database::fresh().await;
    let open = Instance::start(&database).await;
    let folder = certificates::Folder::new("closed");
    folder.write("keys", &jwt::key_set(&[&jwt::Signer::ec("k")]));
    folder.write("jwt", &jwt::config(folder.0.join("keys").to_str().unwrap(), serde_json::json!({})).to_string());
    let closed = Instance::start_with(&database, settings().with("--jwt-config", folder.0.join("jwt").display())).await;
    open.client.register(registration(em("host1"), load(64, 16, 16))).await.unwrap();
    let refused = closed.client.register(registration(em("host1"), load(64, 16, 16))).await.unwrap_err();
    assert_eq!(refused.reason().as_deref(), Some("TOKEN_MISSING"));

    let channel = channel_to(&open.address).await;
    let follow = proto::FollowActionsRequest::default();
    let mut followed = UsageServiceClient::new(channel.clone()).follow_actions(follow).await.unwrap().into_inner();
    let admin = token(&database, "first", &["--role", "admin"]);
    let locks = || async { empty_call(&channel, "", "/linkis.rm.v1.UsageService/ListEms", true).await.is_err() };
    eventually("the first token locks the door", KNOWN_WITHIN, locks).await;
    let got = async {
        loop {
            if let Err(status) = followed.message().await {
                return status;
            }
        }
    };
    let status = tokio::time::timeout(KNOWN_WITHIN, got).await.expect("an earlier unauthenticated stream ends");
    assert_eq!((status.code(), reason(&status).as_str()), (Code::Unauthenticated, "TOKEN_MISSING"));
    usage_of(&channel, &admin).list_ems(proto::ListEmsRequest::default()).await.unwrap();
    let info = usage_of(&channel, &admin).get_server_info(proto::GetServerInfoRequest {}).await.unwrap();
    assert!(info.into_inner().authentication);

    // An instance that required authentication keeps requiring it after its tokens are revoked.
    tokens(&database, &["revoke", "--name", "first"]);
    let another = Instance::start(&database).await;
    let refused = another.client.ems().await.unwrap_err();
    assert_eq!(refused.reason().as_deref(), Some("TOKEN_MISSING"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_token_is_rejected_with_reason() {
    let database = Database::fresh().await;
    let good = token(&database, "good", &["--role", "admin"]);
    let expired = token(&database, "expired", &["--role", "admin", "--lifetime", "1s"]);
    let revoked = token(&database, "revoked", &["--role", "admin"]);
    let id = tokens(&database, &["list"]).lines().find(|line| line.contains("  revoked  ")).unwrap()[..36].to_owned();
    let asked = tokens_command(&database, &["revoke", "--id", &id]).stdin(Stdio::null()).output().unwrap();
    let got = String::from_utf8_lossy(&asked.stderr).into_owned();
    assert!(asked.status.code() == Some(64) && got.contains("add --yes"), "there is no terminal: {got}");
    assert_eq!(tokens(&database, &["revoke", "--id", &id]), format!("revoked {id}\n"));
    let listed = tokens(&database, &["list"]);
    for token in [&good, &expired, &revoked] {
        assert!(!listed.contains(&token[4..47]), "{listed}");
    }
    let unknown = token(&Database::fresh().await, "elsewhere", &["--role", "admin"]);
    let rm = Instance::start(&database).await;
    let channel = channel_to(&rm.address).await;
    let over = || async { rm_of(&channel, &expired).register(register("host1")).await.is_err() };
    eventually("its time is over", KNOWN_WITHIN, over).await;
    rm_of(&channel, &good)
        .unregister(proto::UnregisterRequest { em: em_message("host1"), ..Default::default() })
        .await
        .ok();
    for (shown, why) in [
        ("", "TOKEN_MISSING"),
        (&good[..53], "TOKEN_UNKNOWN"),
        ("hunter2", "TOKEN_UNKNOWN"),
        (&unknown, "TOKEN_UNKNOWN"),
        (&expired, "TOKEN_EXPIRED"),
        (&revoked, "TOKEN_REVOKED"),
    ] {
        let status = rm_of(&channel, shown).register(register("host1")).await.unwrap_err();
        assert_eq!((status.code(), reason(&status).as_str()), (Code::Unauthenticated, why), "{status:?}");
        assert!(shown.len() < 8 || !format!("{status:?}").contains(shown), "{status:?}");
    }
    let mut twice = Request::new(register("host1"));
    for _ in 0..2 {
        twice.metadata_mut().append("authorization", format!("Bearer {good}").parse().unwrap());
    }
    let status = ResourceManagerServiceClient::new(channel.clone()).register(twice).await.unwrap_err();
    assert_eq!(reason(&status), "TOKEN_UNKNOWN", "which of them?");
    let ems = usage_of(&channel, &good).list_ems(proto::ListEmsRequest::default()).await.unwrap().into_inner().ems;
    assert!(ems.is_empty(), "nothing was done: {ems:?}");
    assert_eq!(database.count("SELECT count(*) FROM linkis_rm_token WHERE last_used_time IS NULL").await, 3);
}

/// Unknown tokens cause no database query; the database cannot reply here.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_tokens_cause_no_database_query() {
    let database = Database::fresh().await;
    let good = token(&database, "good", &["--role", "viewer"]);
    let unknown = token(&Database::fresh().await, "elsewhere", &["--role", "admin"]);
    let (proxy, behind) = database.behind_proxy("tokens");
    let rm = Instance::start(&behind).await;
    let channel = channel_to(&rm.address).await;
    proxy.close();
    proxy.cut_all();
    for _ in 0..1000 {
        let status = usage_of(&channel, &unknown).list_ems(proto::ListEmsRequest::default()).await.unwrap_err();
        assert_eq!(status.code(), Code::Unauthenticated);
    }
    usage_of(&channel, &good).get_server_info(proto::GetServerInfoRequest {}).await.unwrap();
    let status = usage_of(&channel, &good).list_ems(proto::ListEmsRequest::default()).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "it is known, and the database is away: {status:?}");
    proxy.open();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn token_revocation_ends_streams_and_waiting_calls() {
    use tonic_reflection::pb::v1::{ServerReflectionRequest, server_reflection_client::ServerReflectionClient};

    let database = Database::fresh().await;
    let (gone, stays) =
        (token(&database, "gone", &["--role", "admin"]), token(&database, "stays", &["--role", "admin"]));
    let shown = token(&database, "shown", &["--role", "viewer", "--user", "alice"]);
    let instances = [Instance::start(&database).await, Instance::start(&database).await];
    let mut streams = Vec::new();
    for rm in &instances {
        for token in [&gone, &stays] {
            let (asking, questions) = tokio::sync::mpsc::channel::<ServerReflectionRequest>(1);
            let mut client = ServerReflectionClient::new(with(&channel_to(&rm.address).await, token));
            let questions = tokio_stream::wrappers::ReceiverStream::new(questions);
            streams.push((asking, client.server_reflection_info(questions).await.unwrap().into_inner()));
        }
    }
    let channel = channel_to(&instances[0].address).await;
    rm_of(&channel, &stays).register(register("host1")).await.unwrap();
    rm_of(&channel, &stays).request_resource(ask("host1", "alice", 16)).await.unwrap();
    let wait = proto::RequestResourceRequest {
        wait_timeout: Some(prost_types::Duration { seconds: 60, nanos: 0 }),
        ..ask("host1", "alice", 1)
    };
    let mut waiter = rm_of(&channel, &gone);
    let waiting = tokio::spawn(async move { waiter.request_resource(wait).await });
    database.waiting(1).await;
    let mut watch = usage_of(&channel, &shown).watch(proto::WatchRequest {}).await.unwrap().into_inner();
    let first = watch.message().await.unwrap().unwrap().overview.unwrap();
    assert!(first.snapshot_time.is_some() && first.tickets.is_none() && first.scopes.is_none(), "{first:?}");

    tokens(&database, &["revoke", "--name", "gone"]);
    tokens(&database, &["revoke", "--name", "shown"]);
    for stream in [0, 2] {
        let ended =
            tokio::time::timeout(KNOWN_WITHIN, streams[stream].1.message()).await.expect("the call ends in time");
        let status = ended.unwrap_err();
        assert_eq!((status.code(), reason(&status).as_str()), (Code::Unauthenticated, "TOKEN_REVOKED"));
    }
    let status =
        tokio::time::timeout(KNOWN_WITHIN, waiting).await.expect("the call ends in time").unwrap().unwrap_err();
    assert_eq!(reason(&status), "TOKEN_REVOKED");
    let status = loop {
        match tokio::time::timeout(KNOWN_WITHIN, watch.message()).await.expect("the watch ends in time") {
            Ok(overview) => assert!(overview.is_some(), "the watch ends with a status"),
            Err(status) => break status,
        }
    };
    assert_eq!((status.code(), reason(&status).as_str()), (Code::Unauthenticated, "TOKEN_REVOKED"));
    for stream in [1, 3] {
        // A stream with a valid token still replies to queries.
        streams[stream].0.send(ServerReflectionRequest::default()).await.unwrap();
        streams[stream].1.message().await.unwrap().unwrap();
    }
    database.waiting(0).await;
}

/// The task that reads tokens replaces a silent connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn token_revocation_over_silent_connection_is_noticed() {
    let database = Database::fresh().await;
    let gone = token(&database, "gone", &["--role", "viewer"]);
    let (proxy, behind) = database.behind_proxy("forgotten");
    let rm = Instance::start(&behind).await;
    let channel = channel_to(&rm.address).await;
    let ask = || usage_of(&channel, &gone);
    ask().get_server_info(proto::GetServerInfoRequest {}).await.unwrap();
    // The task has read the tokens on the connection that is now silent.
    let reads = || async {
        let query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%token%'";
        database.count(query).await > 1
    };
    eventually("the tokens were looked at", Duration::from_secs(10), reads).await;
    proxy.forget_all();
    tokens(&database, &["revoke", "--name", "gone"]);
    let refused = || async {
        let answer = ask().get_server_info(proto::GetServerInfoRequest {}).await;
        answer.is_err_and(|status| reason(&status) == "TOKEN_REVOKED")
    };
    eventually("it is revoked here, too", Duration::from_secs(30), refused).await;
}

#[test]
fn tokens_command_with_invalid_arguments_is_refused() {
    for (words, got) in [
        (&["create", "--name", "a", "--owner", "o", "--role", "boss"][..], "\"boss\" must be one of ecm, manager"),
        (&["create", "--name", "a", "--owner", "o", "--role", "ecm"], "is required for the role ecm"),
        (&["create", "--name", "a", "--owner", "o", "--role", "ecm", "--em", "*"], "matches every EM"),
        (&["create", "--name", "a", "--owner", "o", "--role", "admin", "--em", "h"], "not allowed for other roles"),
        (&["create", "--name", "a", "--owner", "o", "--role", "admin", "--user", "u"], "managers and viewers"),
        (&["create", "--name", "linkis-rm", "--owner", "o", "--role", "admin"], "is reserved for the service"),
        (&["create", "--name", "anonymous", "--owner", "o", "--role", "admin"], "is reserved for the service"),
        (&["create", "--name", "a", "--owner", "o", "--role", "admin", "--lifetime", "10y"], "366d"),
        (&["revoke", "--name", ""], "--name"),
    ] {
        let done = Command::new(*PROGRAM)
            .arg("token")
            .args(words)
            .env("DATABASE_URL", "postgres://nowhere.invalid/x")
            .output()
            .unwrap();
        let error = String::from_utf8(done.stderr).unwrap();
        assert!(done.status.code() == Some(64) && error.contains(got), "{words:?}: {error}");
    }
    let done = Command::new(*PROGRAM)
        .args(["token", "list"])
        .env("DATABASE_URL", "postgres://x:hunter2@127.0.0.1:1/x")
        .output()
        .unwrap();
    let error = String::from_utf8(done.stderr).unwrap();
    assert!(done.status.code() == Some(2) && !error.contains("hunter2"), "{error}");
}
