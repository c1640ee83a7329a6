//! Found by what the caller has: a ticket without its user and EM.

use std::time::Duration;

use linkis_rm::{
    client::ResourceRequest,
    transport::proto::{self, resource_manager_service_client::ResourceManagerServiceClient},
};
use tokio::task::JoinSet;
use tonic::{Code, Status, transport::Channel};
use tonic_types::StatusExt as _;
use uuid::Uuid;

use crate::{crowds::crowd, harness::*, proxy::Weather};

type Manager = ResourceManagerServiceClient<Channel>;

fn told(status: &Status) -> (Code, String) {
    (status.code(), status.get_details_error_info().map(|info| info.reason).unwrap_or_default())
}

/// Gives a ticket back by its id alone.
async fn release_alone(manager: &Manager, ticket_id: Uuid) -> Result<(), Status> {
    let call = proto::ResourceReleasedRequest { ticket_id: ticket_id.to_string(), ..Default::default() };
    manager.clone().resource_released(call).await.map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ticket_is_given_back_by_its_id_alone() {
    let (database, rm) = start().await;
    let (host, going) = (em("host1"), em("host2"));
    for host in [&host, &going] {
        rm.client.register(registration(host.clone(), load(64, 16, 10))).await.unwrap();
    }
    let manager = Manager::connect(rm.address.clone()).await.unwrap();
    let ask = async |ask: ResourceRequest| rm.client.request_resource(&ask).await.granted();
    let locked = ask(request(&host, "hadoop", load(2, 2, 1))).await;
    let used = ask(request(&host, "alice", load(2, 2, 1))).await;
    rm.client.resource_inited(&inited(&used, "alice", None)).await.unwrap();
    // Again is success, as for those who say everything.
    for grant in [&locked, &used, &used] {
        release_alone(&manager, grant.ticket_id).await.unwrap();
        assert!(!lives(&rm.client, grant.ticket_id).await);
    }
    assert!(rm.client.em(&host).await.unwrap().is_idle());
    // However it ended.
    let short =
        ResourceRequest { lock_ttl: Some(Duration::from_millis(20)), ..request(&host, "hadoop", load(1, 1, 1)) };
    let expired = ask(short).await;
    eventually("it expires", Duration::from_secs(10), async || !lives(&rm.client, expired.ticket_id).await).await;
    let gone = ask(request(&going, "hadoop", load(1, 1, 1))).await;
    rm.client.unregister(&going).await.unwrap();
    for grant in [&expired, &gone] {
        release_alone(&manager, grant.ticket_id).await.unwrap();
    }
    let nothing = release_alone(&manager, Uuid::now_v7()).await.unwrap_err();
    assert_eq!(told(&nothing), (Code::NotFound, "TICKET_NOT_FOUND".to_owned()));
    // What is said all the same has to be right, also of one that is over.
    let living = ask(request(&host, "hadoop", load(1, 1, 1))).await;
    let other = Some(proto::EmInstance { application_name: "ecm".into(), instance: "elsewhere".into() });
    for grant in [&living, &used] {
        let named = proto::ResourceReleasedRequest { ticket_id: grant.ticket_id.to_string(), ..Default::default() };
        let of_eve = proto::ResourceReleasedRequest { user: "eve".into(), ..named.clone() };
        for call in [of_eve, proto::ResourceReleasedRequest { em: other.clone(), ..named }] {
            let refused = manager.clone().resource_released(call).await.unwrap_err();
            assert_eq!(told(&refused), (Code::PermissionDenied, "TICKET_NOT_OWNED".to_owned()));
        }
    }
    assert_eq!(assert_invariants(&database, &rm.client).await, 1);
}

/// As many reads as callers there are not, when all of them name a ticket alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_releases_by_id_alone_share_their_reads() {
    const CONNECTIONS: usize = 10;
    const EACH: usize = 300;
    let database = Database::fresh().await;
    let (proxy, proxied) = database.behind_proxy("lookups");
    let rm = Instance::start(&proxied).await;
    let host = em("crowded");
    let many = CONNECTIONS * EACH;
    crowd(&database, &rm.client, &host, i64::try_from(many).unwrap() + 1, "1 hour").await;
    let mut ids: Vec<Uuid> = sqlx::query_scalar("SELECT ticket_id FROM linkis_user_resource_meta_data")
        .fetch_all(&database.pool)
        .await
        .unwrap();
    let mut managers = Vec::new();
    for _ in 0..CONNECTIONS {
        managers.push(Manager::connect(rm.address.clone()).await.unwrap());
    }
    // The database has been asked before, and says nothing until all of them are there.
    release_alone(&managers[0], ids.pop().unwrap()).await.unwrap();
    proxy.set_weather(Weather::Hole);
    let mut calls = JoinSet::new();
    for (number, ticket_id) in ids.into_iter().enumerate() {
        let manager = managers[number % CONNECTIONS].clone();
        calls.spawn(async move { release_alone(&manager, ticket_id).await.unwrap() });
    }
    let arrived = format!("grpc_method=\"ResourceReleased\"}} {}\n", many + 1);
    eventually("all have come", Duration::from_secs(12), async || {
        rm.metrics
            .text()
            .unwrap()
            .lines()
            .any(|line| line.starts_with("grpc_server_started_total") && format!("{line}\n").ends_with(&arrived))
    })
    .await;
    proxy.set_weather(Weather::Fair);
    calls.join_all().await;
    assert_eq!(assert_invariants(&database, &rm.client).await, 0);
    rm.stop().await;
    database.pool.close().await;
    // A read outside a transaction counts as one. The statistics of a connection are there once it is closed.
    let mut connection = database.connect().await;
    let transactions: i64 =
        sqlx::query_scalar("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")
            .fetch_one(&mut connection)
            .await
            .unwrap();
    assert!(transactions < 1000, "{transactions} transactions");
}
