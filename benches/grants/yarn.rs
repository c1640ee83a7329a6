//! YARN cluster for the benchmark: a queue that is never full, and further queues on demand. It can become unavailable.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use rm_proto::v1::{self as proto, external_resource_service_client::ExternalResourceServiceClient};
use rustix::process::setpriority_process;
use sqlx::{ConnectOptions as _, postgres::PgConnectOptions};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

use crate::{Failure, calls::QUEUE};

/// Timeout until the service has the cluster's first snapshot.
const KNOWN_TIMEOUT: Duration = Duration::from_secs(20);
const KNOWN_POLL: Duration = Duration::from_millis(50);

/// Priority of the cluster's thread, below all others.
const NICE: i32 = 19;

/// Behaviour of the cluster; clones share it.
#[derive(Clone)]
pub(crate) struct Cluster {
    scheduler: Arc<Mutex<Arc<str>>>,
    is_away: Arc<AtomicBool>,
}

impl Cluster {
    /// Adds `queues` further queues with `bytes` bytes each.
    pub fn grow(&self, queues: usize, bytes: usize) {
        *self.scheduler.lock().unwrap_or_else(PoisonError::into_inner) = scheduler(queues, bytes).into();
    }

    /// Sets whether the cluster breaks off every request.
    pub fn be_away(&self, is_away: bool) {
        self.is_away.store(is_away, Relaxed);
    }

    async fn answer(self, mut stream: TcpStream) -> std::io::Result<()> {
        let mut question = Vec::new();
        while !question.ends_with(b"\r\n\r\n") && stream.read_buf(&mut question).await? > 0 {}
        if self.is_away.load(Relaxed) {
            return Ok(());
        }
        let body = match question.starts_with(b"GET /ws/v1/cluster/scheduler") {
            true => self.scheduler.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            false => r#"{"apps": null}"#.into(),
        };
        let head = format!(
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(body.as_bytes()).await
    }
}

/// Starts the cluster and configures it at the service at `url`. `more` has further keys of the configuration. Returns
/// after the first snapshot.
pub(crate) async fn put(url: &str, database: &PgConnectOptions, more: &str) -> Result<Cluster, Failure> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    let cluster = Cluster { scheduler: Arc::new(Mutex::new(scheduler(0, 0).into())), is_away: Arc::default() };
    let serving = cluster.clone();
    // Low priority, because on another machine it would not share the processor.
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
        setpriority_process(None, NICE)?;
        runtime.block_on(async move {
            let listener = TcpListener::from_std(listener)?;
            while let Ok((stream, _)) = listener.accept().await {
                // The service repeats a request that breaks off.
                let serving = serving.clone();
                tokio::spawn(async move { drop(serving.answer(stream).await) });
            }
            Ok::<_, std::io::Error>(())
        })
    });
    let provider = proto::Provider {
        resource_type: "Yarn".to_owned(),
        name: "default".to_owned(),
        config: format!(r#"{{"rmWebAddress": "http://{address}", "refreshInterval": "1s"{more}}}"#),
        ..Default::default()
    };
    let call = proto::PutProviderRequest { provider: Some(provider), expected_etag: None };
    ExternalResourceServiceClient::connect(url.to_owned()).await?.put_provider(call).await?;
    let (mut connection, begun) = (database.connect().await?, Instant::now());
    while begun.elapsed() < KNOWN_TIMEOUT {
        let known = sqlx::query_scalar("SELECT count(*) FROM linkis_external_cluster WHERE generation IS NOT NULL");
        if known.fetch_one(&mut connection).await.is_ok_and(|known: i64| known > 0) {
            return Ok(cluster);
        }
        tokio::time::sleep(KNOWN_POLL).await;
    }
    Err("the service does not know the cluster".into())
}

/// Returns the scheduler's reply: the queue and its parents with more capacity than any demand, and further queues
/// beside it.
fn scheduler(others: usize, bytes: usize) -> String {
    let remark = "x".repeat(bytes);
    let queue = |path: &str, children: &str| {
        format!(
            r#"{{"queueName": "{path}", "maxResources": {{"memory": 1000000000000, "vCores": 1000000000000}},
                "usedResources": {{"memory": 0, "vCores": 0}}, "remark": "{remark}", "childQueues": {{"queue": [{children}]}}}}"#
        )
    };
    let mut paths: Vec<&str> = QUEUE.match_indices('.').map(|(end, _)| &QUEUE[..end]).chain([QUEUE]).collect();
    paths.reverse();
    let others = (0..others).map(|number| queue(&format!("{QUEUE}.q{number}"), ""));
    let innermost = others.collect::<Vec<_>>().join(",");
    let root = paths.into_iter().fold(innermost, |children, path| queue(path, &children));
    format!(r#"{{"scheduler": {{"schedulerInfo": {{"type": "fairScheduler", "rootQueue": {root}}}}}}}"#)
}
