//! Who may do what: roles, what they are bound to, and the tokens by which callers are known.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
    time::Duration,
};

use linkis_rm::{
    server::Options,
    transport::{
        observe,
        proto::{
            self, limit_service_client::LimitServiceClient,
            resource_manager_service_client::ResourceManagerServiceClient, usage_service_client::UsageServiceClient,
        },
    },
};
use tonic::{
    Code, Request, Status,
    codegen::http::uri::PathAndQuery,
    metadata::MetadataValue,
    service::interceptor::InterceptedService,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;
use tonic_types::StatusExt as _;

use crate::harness::*;

/// How long a token that was made or revoked may be unknown, and a stream go on.
const KNOWN_WITHIN: Duration = Duration::from_secs(5);

/// `linkis-rm tokens` with these words, on this database; answers what it printed.
fn tokens(database: &Database, words: &[&str]) -> String {
    let mut command = Command::new(PROGRAM);
    command.arg("tokens").args(words).env("DATABASE_URL", database.url()).env_remove("LINKIS_RM_DATA_DIR");
    let done = command.output().unwrap();
    assert!(done.status.success(), "{words:?}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

/// A new token.
pub fn token(database: &Database, name: &str, rights: &[&str]) -> String {
    let words = [&["create", "--name", name, "--owner", "the tests"], rights].concat();
    tokens(database, &words).trim_end().to_owned()
}

/// Shows a token with every call.
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

/// One who shows a token; none if it is empty.
pub fn with(channel: &Channel, token: &str) -> With {
    InterceptedService::new(channel.clone(), Show(token.to_owned()))
}

pub fn rm_of(channel: &Channel, token: &str) -> ResourceManagerServiceClient<With> {
    ResourceManagerServiceClient::new(with(channel, token))
}

fn usage_of(channel: &Channel, token: &str) -> UsageServiceClient<With> {
    UsageServiceClient::new(with(channel, token))
}

async fn connect(rm: &Instance) -> Channel {
    Endpoint::from_shared(rm.address.clone()).unwrap().connect().await.unwrap()
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

/// How a call ends that sends nothing at all, whatever it is.
async fn empty_call(channel: &Channel, token: &str, path: &str, is_unary: bool) -> Result<(), Status> {
    let mut grpc = tonic::client::Grpc::new(with(channel, token));
    grpc.ready().await.unwrap();
    let (path, codec) = (path.parse::<PathAndQuery>().unwrap(), ProstCodec::<(), ()>::default());
    match is_unary {
        true => grpc.unary(Request::new(()), path, codec).await.map(|_| ()),
        false => grpc.server_streaming(Request::new(()), path, codec).await.map(|_| ()),
    }
}

/// Every call that is described, with whether it is without streams.
fn described() -> BTreeMap<String, bool> {
    let sets = [
        proto::DESCRIPTORS,
        tonic_health::pb::FILE_DESCRIPTOR_SET,
        tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET,
        tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET,
    ];
    let methods = observe::methods(&sets).unwrap().into_iter();
    methods
        .map(|method| (format!("/{}/{}", method.grpc_service, method.grpc_method), method.grpc_type == "unary"))
        .collect()
}

/// Who is let in: nobody, ecm, manager, viewer, operator, admin.
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
    ReleaseHold         ---oa      ListHolds          ---oa      PutProvider         ----a
    DeleteProvider      ----a      ListProviders      ---oa      GetQueue            -mvoa
    ListQueues          -mvoa      ListApplications   -mvoa      GetOverview         -mvoa
    ListInstances       -mvoa      ListTasks          -mvoa      UsageService/Watch  -mvoa
    ListRefusals        -mvoa      GetUsage           -mvoa
    ServerReflectionInfo emvoa     Check              *emvoa     Watch               *emvoa";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_role_makes_its_calls_and_no_others() {
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
    let channel = connect(&rm).await;
    let methods = described();
    let mut seen = BTreeSet::new();
    for (path, is_unary) in &methods {
        // Where two services have a call of the same name, the service's stands before it.
        let (package, name) = (path.rsplit('.').next().unwrap(), path.rsplit('/').next().unwrap());
        let name = if matrix.contains_key(package) { package } else { name };
        let allowed = matrix.get(name).unwrap_or_else(|| panic!("{path} is in no table: who may call it?"));
        seen.insert(name);
        for (role, token) in &roles {
            let ended = empty_call(&channel, token, path, *is_unary).await;
            let (code, reason) =
                ended.as_ref().map_or_else(|status| (status.code(), reason(status)), |()| (Code::Ok, String::new()));
            let told = format!("{role} {path}: {ended:?}");
            match (allowed.contains(*role), role) {
                (true, _) => assert!(
                    ![Code::Unauthenticated, Code::PermissionDenied, Code::Unimplemented].contains(&code),
                    "{told}"
                ),
                (false, '*') => assert_eq!((code, reason.as_str()), (Code::Unauthenticated, "TOKEN_MISSING"), "{told}"),
                (false, _) => {
                    assert_eq!((code, reason.as_str()), (Code::PermissionDenied, "ROLE_DENIED"), "{told}");
                    let status = ended.unwrap_err();
                    assert!(
                        fact(&status, "role").starts_with(*role) && fact(&status, "needs").contains("admin"),
                        "{told}"
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
async fn everybody_may_do_everything_until_there_is_a_token_and_only_where_that_is_allowed() {
    let database = Database::fresh().await;
    let open = Instance::start(&database).await;
    let closed = closed(&database).await;
    open.client.register(registration(em("host1"), load(64, 16, 16))).await.unwrap();
    let refused = closed.client.register(registration(em("host1"), load(64, 16, 16))).await.unwrap_err();
    assert_eq!(refused.reason().as_deref(), Some("TOKEN_MISSING"));

    let admin = token(&database, "first", &["--role", "admin"]);
    let channel = connect(&open).await;
    let locks = || async { empty_call(&channel, "", "/linkis.rm.v1.UsageService/ListEms", true).await.is_err() };
    eventually("the first token locks the door", KNOWN_WITHIN, locks).await;
    usage_of(&channel, &admin).list_ems(proto::ListEmsRequest::default()).await.unwrap();
    let info = usage_of(&channel, &admin).get_server_info(proto::GetServerInfoRequest {}).await.unwrap();
    assert!(info.into_inner().authentication);

    // A door that was locked stays so, whatever becomes of the keys.
    tokens(&database, &["revoke", "--name", "first"]);
    let another = Instance::start(&database).await;
    let refused = another.client.ems().await.unwrap_err();
    assert_eq!(refused.reason().as_deref(), Some("TOKEN_MISSING"));
}

/// An instance that lets nobody in who is not known.
async fn closed(database: &Database) -> Instance {
    let mut options: Options = options();
    options.security.is_open = false;
    Instance::start_with(database, options).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_that_is_no_good_is_refused_with_its_reason_and_does_nothing() {
    let database = Database::fresh().await;
    let good = token(&database, "good", &["--role", "admin"]);
    let expired = token(&database, "expired", &["--role", "admin", "--lifetime", "1s"]);
    let revoked = token(&database, "revoked", &["--role", "admin"]);
    let id = tokens(&database, &["list"]).lines().find(|line| line.contains("  revoked  ")).unwrap()[..36].to_owned();
    assert_eq!(tokens(&database, &["revoke", "--id", &id]), format!("revoked {id}\n"));
    let listed = tokens(&database, &["list"]);
    for token in [&good, &expired, &revoked] {
        assert!(!listed.contains(&token[4..47]), "{listed}");
    }
    let unknown = token(&Database::fresh().await, "elsewhere", &["--role", "admin"]);
    let rm = Instance::start(&database).await;
    let channel = connect(&rm).await;
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

/// However many come with whatever they hold for tokens, the database is not asked: it cannot even answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_tokens_cost_the_database_nothing() {
    let database = Database::fresh().await;
    let good = token(&database, "good", &["--role", "viewer"]);
    let unknown = token(&Database::fresh().await, "elsewhere", &["--role", "admin"]);
    let (proxy, behind) = database.behind_proxy("tokens");
    let rm = Instance::start(&behind).await;
    let channel = connect(&rm).await;
    proxy.close();
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
async fn a_revocation_ends_streams_and_waiting_calls_on_every_instance() {
    use tonic_reflection::pb::v1::{ServerReflectionRequest, server_reflection_client::ServerReflectionClient};

    let database = Database::fresh().await;
    let (gone, stays) =
        (token(&database, "gone", &["--role", "admin"]), token(&database, "stays", &["--role", "admin"]));
    let instances = [Instance::start(&database).await, Instance::start(&database).await];
    let mut streams = Vec::new();
    for rm in &instances {
        for token in [&gone, &stays] {
            let (asking, questions) = tokio::sync::mpsc::channel::<ServerReflectionRequest>(1);
            let mut client = ServerReflectionClient::new(with(&connect(rm).await, token));
            let questions = tokio_stream::wrappers::ReceiverStream::new(questions);
            streams.push((asking, client.server_reflection_info(questions).await.unwrap().into_inner()));
        }
    }
    let channel = connect(&instances[0]).await;
    rm_of(&channel, &stays).register(register("host1")).await.unwrap();
    rm_of(&channel, &stays).request_resource(ask("host1", "alice", 16)).await.unwrap();
    let wait = proto::RequestResourceRequest {
        wait_timeout: Some(prost_types::Duration { seconds: 60, nanos: 0 }),
        ..ask("host1", "alice", 1)
    };
    let mut waiter = rm_of(&channel, &gone);
    let waiting = tokio::spawn(async move { waiter.request_resource(wait).await });
    let stands = || async { database.count("SELECT count(*) FROM linkis_resource_waiting").await == 1 };
    eventually("it stands in line", Duration::from_secs(5), stands).await;

    tokens(&database, &["revoke", "--name", "gone"]);
    let start = std::time::Instant::now();
    for stream in [0, 2] {
        let ended = tokio::time::timeout(KNOWN_WITHIN, streams[stream].1.message()).await.expect("it ends in time");
        let status = ended.unwrap_err();
        assert_eq!((status.code(), reason(&status).as_str()), (Code::Unauthenticated, "TOKEN_REVOKED"));
    }
    let status = tokio::time::timeout(KNOWN_WITHIN, waiting).await.expect("it ends in time").unwrap().unwrap_err();
    assert_eq!(reason(&status), "TOKEN_REVOKED");
    assert!(start.elapsed() < KNOWN_WITHIN);
    for stream in [1, 3] {
        let quiet = tokio::time::timeout(Duration::from_millis(50), streams[stream].1.message()).await;
        assert!(quiet.is_err(), "another's token goes on: {quiet:?}");
    }
    let left = || async { database.count("SELECT count(*) FROM linkis_resource_waiting").await == 0 };
    eventually("it has left the line", Duration::from_secs(5), left).await;
    drop(streams);
}

/// Whoever reads the tokens notices that nothing will ever be answered on its connection, and opens another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_revocation_is_heard_of_although_a_connection_was_lost_without_a_word() {
    let database = Database::fresh().await;
    let gone = token(&database, "gone", &["--role", "viewer"]);
    let (proxy, behind) = database.behind_proxy("forgotten");
    let rm = Instance::start(&behind).await;
    let channel = connect(&rm).await;
    let ask = || usage_of(&channel, &gone);
    ask().get_server_info(proto::GetServerInfoRequest {}).await.unwrap();
    // It has read them, on the connection that is lost now.
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ecm_speaks_for_its_own_host_alone() {
    let database = Database::fresh().await;
    let [token_a, token_b] = ["host1", "host2"].map(|host| token(&database, host, &["--role", "ecm", "--em", host]));
    let admin = token(&database, "admin", &["--role", "admin"]);
    let rm = Instance::start(&database).await;
    let channel = connect(&rm).await;
    let (mut a, mut b) = (rm_of(&channel, &token_a), rm_of(&channel, &token_b));
    let mut usage_a = usage_of(&channel, &token_a);
    a.register(register("host1")).await.unwrap();
    b.register(register("host2")).await.unwrap();
    let on_a = granted(a.request_resource(ask("host1", "alice", 1)).await.unwrap().into_inner());
    let on_b = granted(b.request_resource(ask("host2", "alice", 1)).await.unwrap().into_inner());

    let inited = |ticket: &str, host: &str| proto::ResourceInitedRequest {
        ticket_id: ticket.into(),
        user: "alice".into(),
        em: em_message(host),
        engine: Some(proto::EngineInstance { application_name: "e".into(), instance: format!("{host}:1") }),
        ..Default::default()
    };
    let released =
        |ticket: &str, em| proto::ResourceReleasedRequest { ticket_id: ticket.into(), user: "alice".into(), em };
    let beat =
        |host: &str| proto::HeartbeatRequest { em: em_message(host), epoch: 1, sequence: 1, ..Default::default() };
    let anywhere = proto::RequestResourceRequest { em: None, ..ask("host1", "alice", 1) };
    let denied = [
        a.register(register("host2")).await.unwrap_err(),
        a.unregister(proto::UnregisterRequest { em: em_message("host2"), ..Default::default() }).await.unwrap_err(),
        a.heartbeat(beat("host2")).await.unwrap_err(),
        a.request_resource(ask("host2", "alice", 1)).await.unwrap_err(),
        a.request_resource(anywhere).await.unwrap_err(),
        a.resource_inited(inited(&on_b, "host2")).await.unwrap_err(),
        a.resource_released(released(&on_b, em_message("host2"))).await.unwrap_err(),
        a.resource_released(released(&on_b, None)).await.unwrap_err(),
        usage_a.get_em(proto::GetEmRequest { em: em_message("host2") }).await.unwrap_err(),
        usage_a
            .batch_get_ems(proto::BatchGetEmsRequest {
                ems: ["host1", "host2"].into_iter().filter_map(em_message).collect(),
            })
            .await
            .unwrap_err(),
    ];
    for (n, status) in denied.iter().enumerate() {
        assert_eq!(
            (status.code(), reason(status).as_str()),
            (Code::PermissionDenied, "ROLE_DENIED"),
            "{n}: {status:?}"
        );
        assert_eq!(fact(status, "role"), "ecm");
    }
    // Not even where the ticket is.
    let status =
        a.resource_released(proto::ResourceReleasedRequest { ticket_id: on_b.clone(), ..Default::default() }).await;
    let told = format!("{:?}", status.unwrap_err());
    assert!(told.contains("ROLE_DENIED") && !told.contains("host2") && !told.contains("alice"), "{told}");
    // One that lies about where the ticket is gets no further.
    let status = a.resource_released(released(&on_b, em_message("host1"))).await.unwrap_err();
    assert_eq!(reason(&status), "TICKET_NOT_OWNED");

    usage_a.get_em(proto::GetEmRequest { em: em_message("host1") }).await.unwrap();
    a.resource_inited(inited(&on_a, "host1")).await.unwrap();
    a.resource_released(released(&on_a, None)).await.unwrap();
    b.unregister(proto::UnregisterRequest { em: em_message("host2"), ..Default::default() }).await.unwrap();

    // The history says who it was.
    let mut usage = usage_of(&channel, &admin);
    let lines = usage.list_actions(proto::ListActionsRequest::default()).await.unwrap().into_inner().actions;
    let by = lines.iter().map(|line| (line.action.as_str(), line.actor.as_str()));
    let by: Vec<_> = by.filter(|(action, _)| !action.starts_with("token_")).collect();
    assert_eq!(by[..2], [("registered", "host1"), ("registered", "host2")]);
    assert!(by.contains(&("released", "host1")) && by.contains(&("unregistered", "host2")), "{by:?}");
}

/// Everything that a caller is told, as text.
async fn everything(channel: &Channel, token: &str, tickets: &[String; 2], engine: proto::EngineInstance) -> String {
    let (mut usage, mut limits) = (usage_of(channel, token), LimitServiceClient::new(with(channel, token)));
    let mut told = String::new();
    let mut tell = |what: &dyn std::fmt::Debug| told.push_str(&format!("{what:?}\n"));
    let (mut next, mut pages) = (String::new(), 0);
    loop {
        let call = proto::ListTicketsRequest { page_size: 2, page_token: next, ..Default::default() };
        let page = usage.list_tickets(call).await.unwrap().into_inner();
        tell(&page);
        (next, pages) = (page.next_page_token, pages + 1);
        if next.is_empty() {
            break;
        }
    }
    tell(&pages);
    for (em, user, engine) in [
        (em_message("host1"), "", None),
        (None, "bob", None),
        (em_message("host1"), "bob", None),
        (None, "", Some(engine.clone())),
    ] {
        let call = proto::ListTicketsRequest { em, user: user.into(), engine, ..Default::default() };
        tell(&usage.list_tickets(call).await.unwrap().into_inner());
    }
    for ticket_id in tickets {
        let call = proto::GetTicketRequest { ticket_id: ticket_id.clone(), engine: None };
        tell(&usage.get_ticket(call).await.map_err(|status| (reason(&status), status.get_details_error_info())));
        let call = proto::ListActionsRequest { ticket_id: ticket_id.clone(), ..Default::default() };
        tell(&usage.list_actions(call).await.unwrap().into_inner().actions);
    }
    let call = proto::GetTicketRequest { ticket_id: String::new(), engine: Some(engine) };
    tell(&usage.get_ticket(call).await.map_err(|status| reason(&status)));
    let call = proto::BatchGetTicketsRequest { ticket_ids: tickets.to_vec() };
    tell(&usage.batch_get_tickets(call).await.unwrap().into_inner().tickets);
    let (mut next, mut lines) = (String::new(), 0);
    loop {
        let call = proto::ListScopesRequest { page_size: 1, page_token: next, ..Default::default() };
        let page = usage.list_scopes(call).await.unwrap().into_inner();
        (next, lines) = (page.next_page_token, lines + page.scopes.len());
        tell(&page.scopes);
        if next.is_empty() {
            break;
        }
    }
    tell(&lines);
    tell(&usage.list_waiting(proto::ListWaitingRequest::default()).await.unwrap().into_inner());
    tell(&usage.list_actions(proto::ListActionsRequest::default()).await.unwrap().into_inner().actions);
    for user in ["", "bob"] {
        let labels: BTreeMap<String, String> =
            (!user.is_empty()).then(|| ("user".to_owned(), user.to_owned())).into_iter().collect();
        let (user, em) = (user.to_owned(), em_message("host1"));
        let call = proto::ListActionsRequest { newest_first: true, user: user.clone(), em, ..Default::default() };
        tell(&usage.list_actions(call).await.unwrap().into_inner().actions);
        let call = proto::ListActionsRequest { user: user.clone(), ..Default::default() };
        tell(&usage.list_actions(call).await.unwrap().into_inner().actions);
        let call = proto::ListWaitingRequest { user, em: em_message("host1"), ..Default::default() };
        tell(&usage.list_waiting(call).await.unwrap().into_inner().waiting);
        for fullest_first in [false, true] {
            let call = proto::ListScopesRequest { labels: labels.clone(), fullest_first, ..Default::default() };
            tell(&usage.list_scopes(call).await.unwrap().into_inner().scopes);
        }
    }
    tell(&usage.get_overview(proto::GetOverviewRequest {}).await.unwrap().into_inner());
    let mut watching = usage.watch(proto::WatchRequest {}).await.unwrap().into_inner();
    tell(&watching.message().await.unwrap());
    tell(&usage.list_instances(proto::ListInstancesRequest {}).await.unwrap().into_inner());
    tell(&usage.list_tasks(proto::ListTasksRequest {}).await.unwrap().into_inner());
    tell(&usage.list_ems(proto::ListEmsRequest::default()).await.unwrap().into_inner());
    let call = proto::ListLimitsRequest { page_size: 1, ..Default::default() };
    let page = limits.list_limits(call).await.unwrap().into_inner();
    let call = proto::ListLimitsRequest { page_token: page.next_page_token.clone(), ..Default::default() };
    tell(&page);
    tell(&limits.list_limits(call).await);
    told
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_bound_to_users_asks_for_these_and_sees_nothing_of_others() {
    let database = Database::fresh().await;
    let admin = token(&database, "the boss", &["--role", "admin"]);
    let rights = |role| ["--role", role, "--user", "alice", "--user", "carol"];
    let [manager, viewer] = ["manager", "viewer"].map(|role| token(&database, role, &rights(role)));
    let one = token(&database, "one", &["--role", "viewer", "--user", "alice"]);
    let all = token(&database, "all", &["--role", "viewer"]);
    let rm = Instance::start(&database).await;
    let channel = connect(&rm).await;
    let (mut boss, mut limits) = (rm_of(&channel, &admin), LimitServiceClient::new(with(&channel, &admin)));
    boss.register(register("host1")).await.unwrap();
    for (labels, each) in [(None, Some("user")), (Some("bob"), None), (Some("alice"), None)] {
        let limit = proto::Limit {
            labels: labels.into_iter().map(|user: &str| ("user".to_owned(), user.to_owned())).collect(),
            each: each.into_iter().map(str::to_owned).collect(),
            max: [("instances".to_owned(), 9)].into(),
            ..Default::default()
        };
        limits.set_limit(proto::SetLimitRequest { limit: Some(limit), ..Default::default() }).await.unwrap();
    }
    let mut manager = rm_of(&channel, &manager);
    let of_alice = granted(manager.request_resource(ask("host1", "alice", 1)).await.unwrap().into_inner());
    let mut of_bob = Vec::new();
    for _ in 0..3 {
        of_bob.push(granted(boss.request_resource(ask("host1", "bob", 2)).await.unwrap().into_inner()));
    }
    let engine = proto::EngineInstance { application_name: "e".into(), instance: "bob-engine:1".into() };
    let inited = proto::ResourceInitedRequest {
        ticket_id: of_bob[0].clone(),
        user: "bob".into(),
        em: em_message("host1"),
        engine: Some(engine.clone()),
        ..Default::default()
    };
    boss.resource_inited(inited).await.unwrap();
    let mut waiter = rm_of(&channel, &admin);
    let waiting = tokio::spawn(async move {
        let wait_timeout = Some(prost_types::Duration { seconds: 60, nanos: 0 });
        waiter.request_resource(proto::RequestResourceRequest { wait_timeout, ..ask("host1", "bob", 4) }).await
    });
    let stands = || async { database.count("SELECT count(*) FROM linkis_resource_waiting").await == 1 };
    eventually("bob stands in line", Duration::from_secs(5), stands).await;

    // Each of them sees what is alice's, and not a word of bob.
    let tickets = [of_alice.clone(), of_bob[1].clone()];
    for token in [&viewer, &one] {
        let told = everything(&channel, token, &tickets, engine.clone()).await;
        for other in [&of_bob[0], &of_bob[2], "\"bob\"", "bob-engine:1"] {
            let lines: Vec<_> = told.lines().filter(|line| line.contains(other)).collect();
            assert!(lines.is_empty(), "{other}: {lines:#?}");
        }
        assert!(told.contains(&of_alice) && told.contains("\"alice\""), "{told}");
    }
    let told = everything(&channel, &all, &tickets, engine).await;
    assert!(told.contains("\"bob\"") && told.contains("bob-engine:1"), "who is bound to nobody sees all: {told}");

    // A manager asks for its users, and for no others.
    let released = |ticket: &str, user: &str| proto::ResourceReleasedRequest {
        ticket_id: ticket.into(),
        user: user.into(),
        em: em_message("host1"),
    };
    let dry = proto::RequestResourceRequest { dry_run: true, ..ask("host1", "bob", 1) };
    for status in [
        manager.request_resource(ask("host1", "bob", 1)).await.unwrap_err(),
        manager.request_resource(dry).await.unwrap_err(),
        manager.resource_released(released(&of_bob[0], "bob")).await.unwrap_err(),
    ] {
        assert_eq!((status.code(), reason(&status).as_str()), (Code::PermissionDenied, "ROLE_DENIED"), "{status:?}");
    }
    let status = manager.resource_released(released(&of_bob[0], "alice")).await.unwrap_err();
    assert_eq!(reason(&status), "TICKET_NOT_OWNED");
    manager.resource_released(released(&of_alice, "alice")).await.unwrap();
    waiting.abort();
}

#[test]
fn tokens_are_made_for_somebody_and_never_for_ever() {
    for (words, told) in [
        (&["create", "--name", "a", "--owner", "o", "--role", "boss"][..], "\"boss\" is none of ecm, manager"),
        (&["create", "--name", "a", "--owner", "o", "--role", "ecm"], "needs the hosts"),
        (&["create", "--name", "a", "--owner", "o", "--role", "ecm", "--em", "*"], "all hosts there are"),
        (&["create", "--name", "a", "--owner", "o", "--role", "admin", "--em", "h"], "nobody else has any"),
        (&["create", "--name", "a", "--owner", "o", "--role", "admin", "--user", "u"], "managers and viewers"),
        (&["create", "--name", "linkis-rm", "--owner", "o", "--role", "admin"], "the service uses it itself"),
        (&["create", "--name", "anonymous", "--owner", "o", "--role", "admin"], "the service uses it itself"),
        (&["create", "--name", "a", "--owner", "o", "--role", "admin", "--lifetime", "10y"], "366d"),
        (&["revoke", "--name", ""], "--name"),
    ] {
        let done = Command::new(PROGRAM)
            .arg("tokens")
            .args(words)
            .env("DATABASE_URL", "postgres://nowhere.invalid/x")
            .output()
            .unwrap();
        let error = String::from_utf8(done.stderr).unwrap();
        assert!(done.status.code() == Some(64) && error.contains(told), "{words:?}: {error}");
    }
    let done = Command::new(PROGRAM)
        .args(["tokens", "list"])
        .env("DATABASE_URL", "postgres://x:hunter2@127.0.0.1:1/x")
        .output()
        .unwrap();
    let error = String::from_utf8(done.stderr).unwrap();
    assert!(done.status.code() == Some(2) && !error.contains("hunter2"), "{error}");
}
