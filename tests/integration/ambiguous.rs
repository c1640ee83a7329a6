//! A connection that breaks while it commits: what holds is found out, never guessed.

use crate::{
    harness::*,
    proxy::{Cut, Proxy},
};

async fn commits_are_found_out(cut: Cut) {
    let (database, direct) = start().await;
    let host = em("host1");
    direct.client.register(registration(host.clone(), load(1000, 1000, 1000))).await.unwrap();
    let proxy = Proxy::start(&format!("{cut:?}"), database.options.get_socket().unwrap());
    let proxied = Database { options: database.options.clone().socket(proxy.folder()), pool: database.pool.clone() };
    let rm = Instance::start(&proxied).await;

    for round in 1..=5 {
        proxy.cut_commits(cut, 1);
        let grant = rm.client.request_resource(&request(&host, "hadoop", load(1, 1, 1))).await.granted();
        assert_eq!(proxy.cuts_left(), 0, "it was cut");
        assert!(lives(&direct.client, grant.ticket_id).await, "what was told holds");
        assert_eq!(assert_invariants(&database, &direct.client).await, round, "granted once");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answer_is_lost_was_done() {
    commits_are_found_out(Cut::AfterCommit).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_never_arrived_is_done_again() {
    commits_are_found_out(Cut::BeforeCommit).await;
}
