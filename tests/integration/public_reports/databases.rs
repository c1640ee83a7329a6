//! PostgreSQL as others set it up: passwords, schemas, time zones, encodings, parameters in the URL.

use std::time::{Duration, SystemTime};

use rm_client::{ResourceRequest, RmClient};
use sqlx::{ConnectOptions as _, postgres::PgConnectOptions};
use tokio::task::JoinSet;

use super::{Case, case};
use crate::{certificates::Folder, harness::*};

/// Connections by password over TCP without TLS; by socket for the tests themselves.
const ACCESS: &str = "local all postgres peer map=owner\nhost all all 127.0.0.1/32 scram-sha-256\n";

/// A database with an owner `ROLE`, whose password is `secret`.
#[derive(Debug)]
struct Setup {
    /// Options of CREATE DATABASE.
    database: &'static str,
    /// Statements of the superuser in the database; ROLE is the name of the role.
    sql: &'static [&'static str],
    password: &'static str,
    /// Parameters of the URL.
    parameters: &'static str,
}

const PLAIN: Setup = Setup { database: "", sql: &[], password: "secret", parameters: "" };

const fn with_sql(sql: &'static [&'static str]) -> Setup {
    Setup { sql, ..PLAIN }
}

const fn with_parameters(parameters: &'static str) -> Setup {
    Setup { parameters, ..PLAIN }
}

const fn made(database: &'static str) -> Setup {
    Setup { database, ..PLAIN }
}

const PATH: &str = "the schema of the role is not found";
const SESSION: &str = "texts and times are misread under other session settings";

/// A setup, and the text of the log if the service cannot serve.
const SETUPS: &[Case<Setup, Option<&str>>] = &[
    case(
        "transact-rs/sqlx#3323, #597; jackc/pgx#2487",
        "a password with reserved letters is not read",
        Setup { sql: &["ALTER ROLE ROLE PASSWORD '/?#%@:ü'"], password: "%2F%3F%23%25%40%3A%C3%BC", ..PLAIN },
        None,
    ),
    case(
        "transact-rs/sqlx#3439, #3523",
        PATH,
        with_sql(&["CREATE SCHEMA rm AUTHORIZATION ROLE", "ALTER ROLE ROLE SET search_path = rm"]),
        None,
    ),
    case("transact-rs/sqlx#3439, #3523", PATH, with_sql(&["CREATE SCHEMA AUTHORIZATION ROLE"]), None),
    case(
        "transact-rs/sqlx#3439, #3523",
        PATH,
        Setup { sql: &["CREATE SCHEMA rm AUTHORIZATION ROLE"], parameters: "?options=-c%20search_path%3Drm", ..PLAIN },
        None,
    ),
    case(
        "transact-rs/sqlx#3439, #3523",
        PATH,
        with_sql(&[
            r#"CREATE SCHEMA "My Schema" AUTHORIZATION ROLE"#,
            r#"ALTER ROLE ROLE SET search_path = "My Schema""#,
        ]),
        None,
    ),
    case(
        "transact-rs/sqlx#3439, #3523",
        PATH,
        with_sql(&["ALTER ROLE ROLE SET search_path = ''"]),
        Some("no schema has been selected to create in"),
    ),
    case("PostgreSQL TimeZone", SESSION, with_sql(&["ALTER ROLE ROLE SET TimeZone = 'Asia/Kathmandu'"]), None),
    case("PostgreSQL DateStyle", SESSION, with_sql(&["ALTER ROLE ROLE SET DateStyle = 'German, DMY'"]), None),
    case("PostgreSQL bytea_output", SESSION, with_sql(&["ALTER ROLE ROLE SET bytea_output = 'escape'"]), None),
    case("PostgreSQL client_encoding", SESSION, with_sql(&["ALTER ROLE ROLE SET client_encoding = 'LATIN1'"]), None),
    case(
        "PostgreSQL ICU",
        "letter case is that of another language",
        made("TEMPLATE template0 LOCALE_PROVIDER icu ICU_LOCALE 'tr-TR'"),
        None,
    ),
    case(
        "libpq sslmode",
        "a required TLS is left out",
        with_parameters("?sslmode=require"),
        Some("server does not support TLS"),
    ),
    case(
        "libpq parameters",
        "an unknown parameter is an error",
        with_parameters("?schema=public&pgbouncer=true&useSSL=false"),
        None,
    ),
];

/// Runs a ticket from request to release, with user names that other encodings and locales misread. Deadlines are exact to the second.
async fn life(client: &RmClient) {
    client.register(registration(em("host1"), load(10, 10, 10))).await.unwrap();
    client.set_limit(&each_user(5)).await.unwrap();
    for user in ["用户", "Işık İĞ", "müller"] {
        let request = request(&em("host1"), user, load(1, 1, 1));
        let request = ResourceRequest { lock_ttl: Some(Duration::from_secs(100)), ..request };
        let grant = client.request_resource(&request).await.granted();
        let ticket = client.ticket(grant.ticket_id).await.unwrap();
        assert_eq!((ticket.user.as_str(), ticket.is_locked()), (user, true));
        assert_eq!(grant.expires_at - ticket.locked_time, time::Duration::seconds(100));
        let before = (SystemTime::UNIX_EPOCH.elapsed().unwrap() + Duration::from_secs(300)).as_secs();
        let locked = u64::try_from(ticket.locked_time.unix_timestamp()).unwrap();
        assert!((locked..locked + 600).contains(&before), "locked at {locked}");
        client.resource_inited(&inited(&grant, user, None)).await.unwrap();
        client.resource_released(&release(&grant, user)).await.unwrap();
    }
    assert!(client.audit().await.unwrap().differences.is_empty());
    client.unregister(&em("host1")).await.unwrap();
}

async fn run(options: &PgConnectOptions, sql: &str) {
    let mut connection = options.connect().await.unwrap();
    execute(&mut connection, sql.to_owned()).await;
}

/// Creates the role and the database of a setup. Returns the URL.
async fn make(admin: &PgConnectOptions, port: u16, number: usize, setup: &Setup) -> String {
    let role = format!("role{number}");
    run(admin, &format!("CREATE ROLE {role} LOGIN PASSWORD 'secret'")).await;
    run(admin, &format!("CREATE DATABASE {role} OWNER {role} {}", setup.database)).await;
    let inside = admin.clone().database(&role);
    for sql in setup.sql {
        run(
            &inside,
            &sql.replace("ROLE ROLE", &format!("ROLE {role}"))
                .replace("AUTHORIZATION ROLE", &format!("AUTHORIZATION {role}")),
        )
        .await;
    }
    format!("postgres://{role}:{}@127.0.0.1:{port}/{role}{}", setup.password, setup.parameters)
}

/// Serves on a setup, or names the reason.
async fn check(admin: PgConnectOptions, port: u16, number: usize) {
    let case = &SETUPS[number];
    println!("{}: {}: {:?}", case.source, case.fault, case.input);
    let url = make(&admin, port, number, &case.input).await;
    let Some(reason) = case.right else {
        let rm = Instance::start_on(&url, settings(), ANY_PORT).await;
        life(&rm.client).await;
        rm.stop().await;
        return;
    };
    let got = refusal(&url, settings()).await;
    assert!(got.contains(reason), "{got}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_with_odd_settings_serves_or_names_reason() {
    let folder = Folder::new("public-reports");
    folder.write("hba", ACCESS);
    let (postgres, port) = start_postgres_on_port(&folder.0.join("postgres"), &folder.0.join("hba"), &[]).await;
    let admin = postgres.connect_options().port(port);
    // A few at once. After a failure, the others still need PostgreSQL.
    let mut ended = Vec::new();
    for numbers in (0..SETUPS.len()).collect::<Vec<_>>().chunks(4) {
        let mut checks: JoinSet<_> = numbers.iter().map(|number| check(admin.clone(), port, *number)).collect();
        while let Some(end) = checks.join_next().await {
            ended.push(end);
        }
    }
    postgres.stop().await;
    ended.into_iter().for_each(|end| end.unwrap());
}

/// terraform-provider-postgresql PR 663.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_with_transaction_timeout_serves() {
    let database = Database::fresh().await;
    if database.count("SELECT current_setting('server_version_num')::bigint").await < 170_000 {
        return skip_without("postgresql-17", "a transaction_timeout is set in no older release");
    }
    let name = database.options.get_database().unwrap();
    run(&database.options, &format!("ALTER DATABASE {name} SET transaction_timeout = '1s'")).await;
    let rm = Instance::start(&database).await;
    life(&rm.client).await;
    rm.client.register(registration(em("host1"), load(1, 1, 1))).await.unwrap();
    let held = rm.client.request_resource(&request(&em("host1"), "alice", load(1, 1, 1))).await.granted();
    let call = enqueue(&rm.client, patient(&em("host1"), "bob", load(1, 1, 1))).await;
    // A poll each second: several timeouts.
    eventually("several timeouts pass", LONG, async || rm.metric("linkis_rm_waiting_polls_total") >= 4.0).await;
    rm.client.resource_released(&release(&held, "alice")).await.unwrap();
    call.await.unwrap().granted();
    assert_invariants(&database, &rm.client).await;
}
