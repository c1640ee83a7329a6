//! A connection that breaks while it commits: what holds is found out, never guessed.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        UnixListener, UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    task::JoinHandle,
};

use crate::harness::*;

/// When the proxy cuts a connection.
#[derive(Clone, Copy, Debug)]
enum Cut {
    /// The COMMIT never reaches the database.
    BeforeCommit,
    /// The database commits, and nobody hears of it.
    AfterCommit,
}

/// Stands between the service and PostgreSQL, and cuts the next `cuts` connections that commit.
async fn proxy(database: &Database, cut: Cut, cuts: Arc<AtomicU32>) -> PathBuf {
    let folder = scratch(&format!("proxy-{cut:?}"));
    std::fs::create_dir_all(&folder).unwrap();
    let socket = ".s.PGSQL.5432";
    let listener = UnixListener::bind(folder.join(socket)).unwrap();
    let target = database.options.get_socket().unwrap().join(socket);
    tokio::spawn(async move {
        loop {
            let (client, _) = listener.accept().await.unwrap();
            let server = UnixStream::connect(&target).await.unwrap();
            let cuts = cuts.clone();
            tokio::spawn(async move {
                let ((mut from_client, to_client), (from_server, to_server)) =
                    (client.into_split(), server.into_split());
                let answers = tokio::spawn(copy(from_server, to_client));
                // Either side may go at any time.
                let _ = forward(&mut from_client, to_server, &answers, cut, &cuts).await;
                answers.abort();
            });
        }
    });
    folder
}

async fn copy(mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
    // Ends when either side is gone.
    let _ = tokio::io::copy(&mut from, &mut to).await;
}

/// Forwards what the client says until one of its commits is to be cut.
async fn forward(
    from: &mut OwnedReadHalf,
    mut to: OwnedWriteHalf,
    answers: &JoinHandle<()>,
    cut: Cut,
    cuts: &AtomicU32,
) -> std::io::Result<()> {
    let mut buffer = vec![0; 1 << 16];
    loop {
        let read = from.read(&mut buffer).await?;
        let said = &buffer[..read];
        let commits = said.windows(7).any(|window| window == b"COMMIT\0");
        let cut_now = commits && cuts.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| n.checked_sub(1)).is_ok();
        if read == 0 || cut_now && matches!(cut, Cut::BeforeCommit) {
            return Ok(());
        }
        if cut_now {
            answers.abort();
            to.write_all(said).await?;
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            return Ok(());
        }
        to.write_all(said).await?;
    }
}

async fn commits_are_found_out(cut: Cut) {
    let (database, direct) = start().await;
    let host = em("host1");
    direct.client.register(registration(host.clone(), load(1000, 1000, 1000))).await.unwrap();
    let cuts = Arc::new(AtomicU32::new(0));
    let folder = proxy(&database, cut, cuts.clone()).await;
    let proxied = Database { options: database.options.clone().socket(&folder), pool: database.pool.clone() };
    let rm = Instance::start(&proxied).await;

    for round in 1..=5 {
        cuts.store(1, Ordering::Release);
        let grant = rm.client.request_resource(&request(&host, "hadoop", load(1, 1, 1))).await.granted();
        assert_eq!(cuts.load(Ordering::Acquire), 0, "it was cut");
        assert!(lives(&direct.client, grant.ticket_id).await, "what was told holds");
        assert_eq!(assert_invariants(&database, &direct.client).await, round, "granted once");
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answer_is_lost_was_done() {
    commits_are_found_out(Cut::AfterCommit).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_never_arrived_is_done_again() {
    commits_are_found_out(Cut::BeforeCommit).await;
}
