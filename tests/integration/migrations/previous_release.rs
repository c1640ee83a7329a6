//! Upgrade from the release before: its dump is restored, migrated and served.
//!
//! `tests/fixtures/previous_release.sql` is a database of that release. With each release, `previous_release_is_dumped` writes it again.

use std::collections::BTreeSet;

use rm_client::{ClientSettings, RmClient};
use rm_proto::v1::{self as proto, external_resource_service_client::ExternalResourceServiceClient};

use super::*;
use crate::{external, identity};

const DUMP: &str = include_str!("../../fixtures/previous_release.sql");

/// Number of tickets of `hadoop` on `host1`, which is the limit of each user.
const TICKETS: usize = 3;

/// The history of the dump stays.
fn long() -> Settings {
    settings().with("--history", "3650d")
}

/// Writes the dump of this release: `cargo test --test integration -- --ignored previous_release`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "writes a file of the repository"]
async fn previous_release_is_dumped() {
    let database = Database::empty().await;
    let rm = Instance::start_with(&database, long()).await;
    register_all(&rm.client, ["host1", "host2"], load(10, 10, 10)).await;
    let ask = |user| request(&em("host1"), user, load(1, 1, 1));
    let ended = rm.client.request_resource(&ask("alice")).await.granted();
    rm.client.resource_released(&release(&ended, "alice")).await.unwrap();
    rm.client.set_limit(&each_user(TICKETS.try_into().unwrap())).await.unwrap();
    for used in [true, true, false] {
        let grant = rm.client.request_resource(&ask("hadoop")).await.granted();
        if used {
            rm.client.resource_inited(&inited(&grant, "hadoop", None)).await.unwrap();
        }
    }
    // The locked ticket never expires.
    database
        .execute("UPDATE linkis_user_resource_meta_data SET expires_at = '2100-01-01' WHERE expires_at IS NOT NULL")
        .await;
    let provider = external::provider("hadoop", &external::config("http://127.0.0.1:9"));
    external::put(&external::client_of(&rm).await, provider).await.unwrap();
    rm.client.drain(&em("host2"), "new disk").await.unwrap();
    let waiting = enqueue(&rm.client, patient(&em("host1"), "hadoop", load(1, 1, 1))).await;
    identity::token(&database, "vera", &["--role", "viewer", "--lifetime", "1d"]);
    let mut dump = Command::new("pg_dump");
    dump.args(["--inserts", "--no-owner", "--no-privileges"]).arg(database.url());
    let text = String::from_utf8(dump.output().unwrap().stdout).unwrap();
    // Without comments, and without the commands of psql, which are no SQL.
    let sql = text.lines().filter(|line| !line.is_empty() && !line.starts_with("--") && !line.starts_with('\\'));
    let sql: String = sql.map(|line| format!("{line}\n")).collect();
    std::fs::write(repo_root().join("tests/fixtures/previous_release.sql"), sql).unwrap();
    waiting.abort();
}

/// All objects of the schema, without parentheses: a restored constraint has fewer of them.
async fn objects(database: &Database) -> BTreeSet<String> {
    schema(database).await.iter().map(|object| object.replace(['(', ')'], "")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn previous_release_is_migrated_and_served() {
    let (database, fresh) = (Database::empty().await, Database::fresh().await);
    if database.options.get_socket().is_none() {
        println!("skipped: the dump is no cell");
        return;
    }
    execute(&mut database.connect().await, DUMP).await;
    assert!(identity::tokens(&database, &["list"]).contains("vera"));
    let token = identity::token(&database, "bob", &["--role", "admin,manager", "--lifetime", "1d"]);
    let rm = Instance::start_with(&database, long()).await;
    let (migrated, new) = (objects(&database).await, objects(&fresh).await);
    assert_eq!(migrated.symmetric_difference(&new).collect::<Vec<_>>(), [""; 0]);
    let settings = ClientSettings { token: Some(token.clone()), ..ClientSettings::new(LONG) };
    let client = RmClient::with(&rm.address, &settings).unwrap();

    assert_eq!(client.ems().await.unwrap().len(), 2);
    let tickets = client.tickets(Some(&em("host1"))).await.unwrap();
    assert_eq!(tickets.iter().filter(|ticket| ticket.is_locked()).count(), 1);
    assert_eq!(tickets.len(), TICKETS);
    assert_eq!(client.limits().await.unwrap(), [each_user(TICKETS.try_into().unwrap())]);
    let of_alice = proto::ListActionsRequest { user: "alice".into(), ..Default::default() };
    assert_eq!(client.actions(&of_alice).await.unwrap().actions.len(), 2);
    let channel = channel_to(&rm.address).await;
    let mut external = ExternalResourceServiceClient::new(identity::with(&channel, &token));
    let providers = external.list_providers(proto::ListProvidersRequest::default()).await.unwrap().into_inner();
    assert_eq!(providers.providers.len(), 1);

    let ask = |host, user| request(&em(host), user, load(1, 1, 1));
    assert_eq!(client.request_resource(&ask("host1", "hadoop")).await.refused().shortfalls[0].scope, "user=hadoop");
    let error = client.request_resource(&ask("host2", "alice")).await.unwrap_err();
    assert_eq!(error.reason().as_deref(), Some("EM_DRAINING"), "{error}");
    client.request_resource(&ask("host1", "alice")).await.granted();
    assert_wait_queues_empty(&client).await;
    assert_eq!(assert_invariants(&database, &client).await, TICKETS + 1);
    rm.stop().await;
}
