//! PgBouncer between the service and its database: session pooling serves, and every other mode is refused with the reason.

use std::{
    cell::RefCell,
    fs,
    net::TcpListener,
    os::unix::{fs::MetadataExt as _, process::CommandExt as _},
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::{harness::*, metrics::get};

/// How a pooler is set up.
#[derive(Clone, Copy)]
struct Mode {
    pool_mode: &'static str,
    /// Further lines of its settings.
    more: &'static str,
}

const SESSION: Mode = Mode { pool_mode: "session", more: "" };

/// A running PgBouncer in front of a database of the tests.
struct Bouncer {
    child: Child,
    folder: PathBuf,
    database: Database,
    port: u16,
}

impl Bouncer {
    /// Starts it; `None` if it is not installed.
    async fn start(name: &str, mode: Mode) -> Option<Self> {
        let program = ["/usr/sbin/pgbouncer", "/usr/bin/pgbouncer", "/usr/local/bin/pgbouncer"];
        let Some(program) = program.iter().find(|path| fs::exists(path).unwrap()) else {
            skip_without("pgbouncer", "Debian has it in the package pgbouncer");
            return None;
        };
        let database = Database::fresh().await;
        // PgBouncer refuses to run as root, and PostgreSQL authenticates its account: both use the account of PostgreSQL.
        let owner = fs::metadata(database.options.get_socket().unwrap()).unwrap();
        let folder = scratch(&format!("pooler-{name}"));
        fs::create_dir_all(&folder).unwrap();
        for _ in 0..5 {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            write_settings(&folder, &database, port, mode);
            let mut command = Command::new(program);
            command.arg("-q").arg(folder.join("ini")).stdout(Stdio::null()).stderr(Stdio::null());
            if rustix::process::geteuid().is_root() {
                command.uid(owner.uid()).gid(owner.gid());
            }
            let child = RefCell::new(command.spawn().unwrap());
            let serves = || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok();
            let has_ended = || child.borrow_mut().try_wait().unwrap().is_some();
            eventually("PgBouncer serves, or ends without a free port", LONG, async || serves() || has_ended()).await;
            if serves() {
                return Some(Self { child: child.into_inner(), folder, database, port });
            }
        }
        panic!("PgBouncer does not start");
    }

    fn url(&self) -> String {
        let database = self.database.options.get_database().unwrap();
        format!("postgres://anybody@127.0.0.1:{}/{database}", self.port)
    }

    /// Changes its settings while it runs.
    fn turn_to(&self, mode: Mode) {
        write_settings(&self.folder, &self.database, self.port, mode);
        kill_process(Pid::from_child(&self.child), Signal::HUP).unwrap();
    }

    /// Why no instance opens behind it.
    async fn refusal(&self) -> String {
        refusal(&self.url(), settings()).await
    }
}

impl Drop for Bouncer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn write_settings(folder: &std::path::Path, database: &Database, port: u16, mode: Mode) {
    let socket = database.options.get_socket().unwrap().display();
    let Mode { pool_mode, more } = mode;
    let text = format!(
        "[databases]\n* = host={socket} port=5432 user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
         unix_socket_dir =\nauth_type = any\npool_mode = {pool_mode}\ndefault_pool_size = 40\nmax_client_conn = 500\n{more}\n"
    );
    fs::write(folder.join("ini"), text).unwrap();
}

/// The start-up parameters are dropped, or refused, and sessions that end are reset.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pooler_with_session_pooling_keeps_lock_timeouts() {
    for (name, more) in [
        ("plain", ""),
        ("drops", "ignore_startup_parameters = extra_float_digits, options, application_name"),
        ("resets", "server_reset_query = DISCARD ALL\nserver_reset_query_always = 1\nserver_lifetime = 1"),
    ] {
        let Some(pooler) = Bouncer::start(name, Mode { more, ..SESSION }).await else { return };
        let rm = Instance::start_on(&pooler.url(), settings(), ANY_PORT).await;
        register_all(&rm.client, ["host1", "host2"], load(100, 100, 100)).await;
        let grant = rm.client.request_resource(&request(&em("host1"), "bob", load(1, 1, 1))).await.granted();
        rm.client.resource_inited(&inited(&grant, "bob", None)).await.unwrap();
        // While another transaction owns the key of one EM, the batch leaves it after lock_timeout.
        let holder = pooler.database.transaction_that_holds(&em("host1")).await;
        let held = request_in_task(&rm.client, request(&em("host1"), "bob", load(1, 1, 1)));
        eventually("it waits", LONG, || is_waiting(&pooler.database)).await;
        for _ in 0..3 {
            rm.client.request_resource(&request(&em("host2"), "bob", load(1, 1, 1))).await.granted();
        }
        drop(holder);
        held.await.unwrap().granted();
        rm.client.resource_released(&release(&grant, "bob")).await.unwrap();
        assert_eq!(assert_invariants(&pooler.database, &rm.client).await, 4, "{name}");
        rm.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pooler_with_other_pooling_is_refused_at_start() {
    for (name, pool_mode, more) in [
        ("transaction", "transaction", ""),
        ("transaction-drops", "transaction", "ignore_startup_parameters = extra_float_digits, options"),
        ("robin", "transaction", "server_round_robin = 1\nmin_pool_size = 5"),
        ("one", "transaction", "default_pool_size = 1"),
        ("resets-always", "transaction", "server_reset_query_always = 1"),
        ("statement", "statement", ""),
    ] {
        let Some(pooler) = Bouncer::start(name, Mode { pool_mode, more }).await else { return };
        let why = pooler.refusal().await;
        assert!(why.contains("does not have its own session") && why.contains("pool_mode = session"), "{name}: {why}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pooler_turned_to_transactions_makes_instance_unready() {
    let Some(pooler) = Bouncer::start("turned", SESSION).await else { return };
    let rm = Instance::start_on(&pooler.url(), settings(), ANY_PORT).await;
    rm.client.register(registration(em("host1"), load(100, 100, 100))).await.unwrap();
    pooler.turn_to(Mode { pool_mode: "transaction", more: "" });
    let is_logged = || async {
        let (code, text) = get(rm.http, "/readyz").await;
        code == 503 && text.contains("does not have its own session")
    };
    eventually("the missing session is logged", LONG, is_logged).await;
    let error = rm.client.em(&em("host1")).await.unwrap_err().to_string();
    assert!(error.contains("does not have its own session"), "{error}");
    pooler.turn_to(SESSION);
    eventually("it serves", LONG, || async { rm.client.em(&em("host1")).await.is_ok() }).await;
    rm.stop().await;
}
