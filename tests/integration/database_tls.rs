//! A PostgreSQL of another operator, with TLS only: verification of its certificate, authentication of the service, and the
//! rights of its role.

use std::{
    fs::{self, Permissions},
    io::{BufRead as _, BufReader},
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown},
    path::PathBuf,
    process::{Command, Output, Stdio},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use rcgen::{CertificateParams, DnType, KeyPair};
use rm_client::RmClient;
use rm_devpg::EmbeddedPostgres;
use rm_store::{Store, StoreError, connect_target::ConnectTarget, history_partition, primary::Primary};
use sqlx::{AssertSqlSafe, ConnectOptions as _, PgConnection, postgres::PgConnectOptions};

use crate::{
    certificates::{Authority, FAR, Folder, authority, certify},
    harness::*,
};

/// The PostgreSQL of these tests; it ends with this process.
pub struct Far {
    folder: PathBuf,
    port: u16,
    /// As its superuser, by its socket.
    admin: PgConnectOptions,
    ca: Authority,
}

/// Access rules: TLS only, except for the socket.
const ACCESS: &str = "local all postgres peer map=owner
hostssl all by_certificate 127.0.0.1/32 cert
hostssl all all 127.0.0.1/32 scram-sha-256
";

fn far() -> &'static Far {
    static SHARED: OnceLock<Far> = OnceLock::new();
    SHARED.get_or_init(|| {
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        // A thread for the whole run: a test's own runtime ends with the test.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
            runtime.block_on(async {
                let (postgres, far) = Far::start().await;
                sender.send(far).unwrap();
                panic!("PostgreSQL ended by itself: {}", postgres.died().await);
            })
        });
        receiver.recv().expect("a PostgreSQL with TLS")
    })
}

impl Far {
    async fn start() -> (EmbeddedPostgres, Self) {
        let folder = Folder::new("far");
        let (ca, path) = (authority("database"), folder.0.clone());
        folder.write_all(&certify(&ca, &["localhost"], &[], FAR), &ca);
        folder.write("hba", ACCESS);
        let (postgres, port) = start_postgres_on_port(&path.join("postgres"), &path.join("hba"), &[]).await;
        let admin = postgres.connect_options().port(port);
        // The account of PostgreSQL must own the key; the account is known only now.
        let (key, data) = (path.join("key"), fs::metadata(path.join("postgres/data")).unwrap());
        fs::set_permissions(&key, Permissions::from_mode(0o600)).unwrap();
        chown(&key, Some(data.uid()), Some(data.gid())).unwrap();
        let mut connection = admin.connect().await.unwrap();
        for (name, file) in [("ssl_cert_file", "cert"), ("ssl_key_file", "key"), ("ssl_ca_file", "ca")] {
            let sql = format!("ALTER SYSTEM SET {name} = '{}'", path.join(file).display());
            execute(&mut connection, sql).await;
        }
        execute(&mut connection, "ALTER SYSTEM SET ssl = on").await;
        execute(&mut connection, "SELECT pg_reload_conf()").await;
        let far = Self { folder: path, port, admin, ca };
        let speaks = || async { far.run("SELECT 1 / (current_setting('ssl') = 'on')::int").await.is_ok() };
        eventually("it speaks TLS", Duration::from_secs(20), speaks).await;
        (postgres, far)
    }

    /// As its superuser.
    async fn run(&self, sql: &str) -> Result<(), sqlx::Error> {
        let mut connection = self.admin.connect().await?;
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut connection).await.map(drop)
    }

    /// In a database, as its superuser.
    async fn connect(&self, database: &str) -> PgConnection {
        self.admin.clone().database(database).connect().await.unwrap()
    }

    /// A file of its folder.
    fn file(&self, name: &str) -> String {
        self.folder.join(name).to_str().unwrap().to_owned()
    }

    /// A file that appears at once and whole; each name is one test's.
    fn write(&self, name: &str, text: &str) -> String {
        let next = self.file(&format!("{name}.next"));
        fs::write(&next, text).unwrap();
        fs::rename(next, self.file(name)).unwrap();
        self.file(name)
    }

    /// Returns the URL of a database for a role, with verification of the server.
    fn url(&self, role: &str, database: &str) -> String {
        let (port, ca) = (self.port, self.file("ca"));
        format!("postgres://{role}@localhost:{port}/{database}?sslmode=verify-full&sslrootcert={ca}")
    }

    /// A certificate that shows its holder to be `role`, and its key.
    fn identity(&self, role: &str) -> [String; 2] {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.distinguished_name.push(DnType::CommonName, role);
        let key = KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &self.ca).unwrap();
        [self.write(&format!("{role}.cert"), &cert.pem()), self.write(&format!("{role}.key"), &key.serialize_pem())]
    }
}

/// Returns an error with its causes.
fn details(error: &StoreError) -> String {
    // The text of an error of the store has that of its cause.
    error.to_string()
}

async fn open(url: &str) -> Result<Store, StoreError> {
    Store::open(ConnectTarget::parse(url).unwrap(), HISTORY).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_certificates_are_verified_both_ways() {
    let far = far();
    far.run("CREATE ROLE by_password LOGIN PASSWORD 'hunter2'").await.unwrap();
    far.run("CREATE ROLE by_certificate LOGIN").await.unwrap();
    far.run("CREATE DATABASE believed OWNER by_password").await.unwrap();
    let url = far.url("by_password:hunter2", "believed");
    let store = open(&url).await.unwrap();
    let is_encrypted = "SELECT ssl AND current_user = 'by_password' FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
    assert!(sqlx::query_scalar::<_, bool>(is_encrypted).fetch_one(&store.pool().await.unwrap()).await.unwrap());
    assert!(!format!("{store:?}").contains("hunter2"), "nothing shows a password");
    store.close().await;

    let other_ca = far.write("other-ca", &authority("other").as_ref().pem());
    let [cert, key] = far.identity("by_certificate");
    let [wrong_cert, wrong_key] = far.identity("somebody");
    let certified =
        |cert: &str, key: &str| format!("{}&sslcert={cert}&sslkey={key}", far.url("by_certificate", "believed"));
    for (url, why) in [
        (url.replace(&far.file("ca"), &other_ca), Some("invalid peer certificate")),
        (url.replace("localhost", "127.0.0.1"), Some("invalid peer certificate")),
        (url.replace("verify-full", "verify-ca").replace("localhost", "127.0.0.1"), None),
        (url.replace("hunter2", "wrong"), Some("password authentication failed")),
        (url.replace("verify-full", "disable"), Some("no pg_hba.conf entry")),
        (certified(&cert, &key), None),
        (certified(&wrong_cert, &wrong_key), Some("certificate authentication failed")),
        (far.url("by_certificate", "believed"), Some("client certificate")),
    ] {
        let connected = Primary::watch(ConnectTarget::parse(&url).unwrap()).connect_with(&[]).await;
        match (connected, why) {
            (Ok(_), None) => {}
            (Err(error), Some(why)) => assert!(details(&error).contains(why), "{url}: {}", details(&error)),
            (connected, why) => panic!("{url}: {connected:?}, and not {why:?}"),
        }
    }
}

/// `linkis-rm` with these words, on this database.
fn program(words: &[&str], url: &str) -> Output {
    let mut command = Command::new(*PROGRAM);
    command.args(words).env("DATABASE_URL", url).env_remove("LINKIS_RM_DATA_DIR").output().unwrap()
}

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unverified_remote_database_logs_one_warning() {
    for (mode, warnings) in [("prefer", 1), ("require", 1), ("verify-ca", 1), ("verify-full", 0)] {
        let url = format!("postgres://x:hunter2@db.invalid/x?sslmode={mode}");
        let mut command = Command::new(*PROGRAM);
        command.args(["--listen", "127.0.0.1:0"]).env("DATABASE_URL", &url).env_remove("LINKIS_RM_DATA_DIR");
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        // It waits for a database that does not answer.
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let mut log = String::new();
        while !log.contains("retrying") {
            log += &lines.next().unwrap_or_else(|| panic!("it ended:\n{log}"));
            log.push('\n');
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let got: Vec<_> = log.lines().filter(|line| line.contains("WARN") && line.contains("verify-full")).collect();
        assert_eq!(got.len(), warnings, "{mode}: {log}");
        assert!(log.contains("db.invalid") && !log.contains("hunter2"), "{log}");
    }
}

/// The blocks of SQL in docs/SECURITY.md.
fn documented() -> Vec<&'static str> {
    let text = include_str!("../../docs/SECURITY.md");
    text.split("```sql\n").skip(1).filter_map(|rest| rest.split_once("```")).map(|(block, _)| block).collect()
}

/// Every kind of call of a service and its operators, once each.
async fn everything(client: &RmClient) {
    client.register(registration(em("host1"), load(10, 10, 10))).await.unwrap();
    client.set_limit(&each_user(5)).await.unwrap();
    let grant = client.request_resource(&request(&em("host1"), "bob", load(1, 1, 1))).await.granted();
    client.resource_inited(&inited(&grant, "bob", None)).await.unwrap();
    client.drain(&em("host1"), "a new disk").await.unwrap();
    client.resume(&em("host1"), "it is in").await.unwrap();
    client.set_policy(&name("linkis-cg-engineconnmanager"), &Default::default()).await.unwrap();
    client.repair().await.unwrap();
    assert!(client.audit().await.unwrap().differences.is_empty());
    client.resource_released(&release(&grant, "bob")).await.unwrap();
    client.delete_limit(&each_user(5).pattern).await.unwrap();
    client.unregister(&em("host1")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_role_without_schema_rights_serves() {
    let far = far();
    let [roles, grants] = documented()[..] else { panic!("two blocks of SQL in docs/SECURITY.md") };
    for statement in roles.split_inclusive(';').filter(|statement| !statement.trim().is_empty()) {
        far.run(statement).await.unwrap();
    }
    let (owner, service) = (far.url("linkis_rm_owner:one", "linkis_rm"), far.url("linkis_rm:another", "linkis_rm"));
    let mut as_owner = ConnectTarget::parse(&owner).unwrap().hosts().options[0].connect().await.unwrap();
    execute(&mut as_owner, grants).await;

    // Before the first migration: the error names the command.
    let early = program(&["--listen", "127.0.0.1:0", "--no-migrate"], &service);
    let (_, log) = texts(&early);
    assert!(early.status.code() == Some(1) && log.contains("linkis-rm migrate"), "{log}");
    // Without --no-migrate, the error is equal, and nothing has changed.
    let denied = program(&["migrate"], &service);
    let (_, log) = texts(&denied);
    assert!(denied.status.code() == Some(2) && log.contains("docs/SECURITY.md") && !log.contains("another@"), "{log}");
    let migrated = program(&["migrate"], &owner);
    assert!(migrated.status.success() && texts(&migrated).0.contains("migrations were applied"), "{migrated:?}");
    for who in [&owner, &service] {
        let again = program(&["migrate"], who);
        assert!(again.status.success() && texts(&again).0 == "the schema is up to date\n", "{again:?}");
    }

    let arguments = ["--no-migrate", "--history", "1h", "--database-url", &service];
    let process = Process::start(&arguments);
    everything(&process.client).await;
    let made = program(&["token", "create", "--name", "a", "--owner", "o", "--role", "admin"], &service);
    assert!(made.status.success(), "{made:?}");
    assert_eq!(process.terminate(), Some(0));
    let got: i64 = sqlx::query_scalar("SELECT count(*) FROM linkis_resource_action_record")
        .fetch_one(&mut as_owner)
        .await
        .unwrap();
    assert!(got > 10, "{got}");

    // History partitions are created and deleted without further rights.
    let mut connection = ConnectTarget::parse(&service).unwrap().hosts().options[0].connect().await.unwrap();
    let parts = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'linkis_resource_action_record'::regclass";
    let count =
        async |connection: &mut PgConnection| sqlx::query_scalar::<_, i64>(parts).fetch_one(connection).await.unwrap();
    let before = count(&mut connection).await;
    history_partition::make(&mut connection, Duration::from_secs(300 * 24 * 3600)).await.unwrap();
    assert!(count(&mut connection).await > before);
    execute(&mut connection, "SELECT linkis_rm_make_history_part(1577836800, 1577840400)").await;
    for _ in 0..3 {
        assert!(history_partition::index_oldest(&mut connection).await.unwrap());
    }
    assert!(!history_partition::index_oldest(&mut connection).await.unwrap());
    assert!(history_partition::drop_oldest(&mut connection, Duration::from_secs(3600)).await.unwrap());
    assert!(!history_partition::drop_oldest(&mut connection, Duration::from_secs(3600)).await.unwrap());
    for (sql, why) in [
        ("CREATE TABLE mine ()", "permission denied for schema public"),
        ("ALTER TABLE linkis_em_drain ADD COLUMN mine text", "must be owner"),
        ("DROP TABLE linkis_em_drain", "must be owner"),
        ("SELECT linkis_rm_drop_history_part('linkis_em_drain')", "is not a closed history partition"),
        (
            "SELECT linkis_rm_drop_history_part('linkis_resource_action_record_rest')",
            "is not a closed history partition",
        ),
        ("SELECT linkis_rm_make_history_part(1, 2)", "no history partition can be"),
        ("SELECT linkis_rm_index_history_part('linkis_em_drain', 'em')", "is not a closed history partition"),
    ] {
        let error = sqlx::raw_sql(sql).execute(&mut connection).await.unwrap_err().to_string();
        assert!(error.contains(why), "{sql}: {error}");
    }
    let present =
        "SELECT linkis_rm_drop_history_part(relname::text) FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid
        WHERE inhparent = 'linkis_resource_action_record'::regclass AND relname NOT LIKE '%rest'";
    let error = sqlx::raw_sql(present).execute(&mut connection).await.unwrap_err().to_string();
    assert!(error.contains("is not a closed history partition"), "{error}");

    // A release with missing migrations.
    execute(&mut as_owner, "DELETE FROM linkis_rm_migration_cell WHERE version = 1").await;
    let older = program(&["--listen", "127.0.0.1:0", "--no-migrate"], &service);
    let (_, log) = texts(&older);
    assert!(older.status.code() == Some(1) && log.contains("1 migrations are missing"), "{log}");
}

/// Connections that are made from then on show the new password; callers notice nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_password_rotation_fails_no_call() {
    let far = far();
    far.run("CREATE ROLE rotated LOGIN PASSWORD 'first'").await.unwrap();
    far.run("CREATE DATABASE rotated OWNER rotated").await.unwrap();
    let path = far.write("url", &far.url("rotated:first", "rotated"));
    let mut command = Command::new(*PROGRAM);
    let process = Process::start_command(command.env("DATABASE_URL_FILE", &path), |line| println!("{line}"));
    let client = insistent(&process.address);
    client.register(registration(em("host1"), load(1000, 1000, 1000))).await.unwrap();
    let (stop, calls) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
    let callers: Vec<_> = (0..4)
        .map(|_| {
            let (client, stop, calls) = (client.clone(), stop.clone(), calls.clone());
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let grant = client.request_resource(&request(&em("host1"), "bob", load(1, 1, 1))).await.granted();
                    client.resource_released(&release(&grant, "bob")).await.unwrap();
                    calls.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    let more = async |what: &str, more: u64| {
        let enough = calls.load(Ordering::Relaxed) + more;
        eventually(what, Duration::from_secs(60), || async { calls.load(Ordering::Relaxed) >= enough }).await;
    };
    more("they call", 10).await;
    for password in ["second", "third"] {
        far.run(&format!("ALTER ROLE rotated PASSWORD '{password}'")).await.unwrap();
        more("open connections continue", 10).await;
        // All connections end, and the old password is refused.
        let cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'rotated'";
        execute(&mut far.connect("rotated").await, cut).await;
        far.write("url", &far.url(&format!("rotated:{password}"), "rotated"));
        more("it gets in with the new one", 20).await;
    }
    stop.store(true, Ordering::Relaxed);
    for caller in callers {
        caller.await.unwrap();
    }
    assert_eq!(process.terminate(), Some(0));
}
