//! A cluster with a queue that is never full.

use std::time::{Duration, Instant};

use linkis_rm::transport::proto::{self, external_resource_service_client::ExternalResourceServiceClient};
use sqlx::{ConnectOptions as _, postgres::PgConnectOptions};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

use crate::{Failure, calls::QUEUE};

/// How long the service may take to know what the cluster has.
const KNOWN_TIMEOUT: Duration = Duration::from_secs(20);
const KNOWN_POLL: Duration = Duration::from_millis(50);

/// Starts it, and tells the service at `url` of it, which judges by it from then on.
pub(crate) async fn put(url: &str, database: &PgConnectOptions) -> Result<(), Failure> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            // One that breaks off is asked again.
            tokio::spawn(async move { drop(answer(stream).await) });
        }
    });
    let provider = proto::Provider {
        resource_type: "Yarn".to_owned(),
        name: "default".to_owned(),
        config: format!(r#"{{"rmWebAddress": "http://{address}", "refreshInterval": "1s"}}"#),
        ..Default::default()
    };
    let call = proto::PutProviderRequest { provider: Some(provider), expected_etag: None };
    ExternalResourceServiceClient::connect(url.to_owned()).await?.put_provider(call).await?;
    let (mut connection, begun) = (database.connect().await?, Instant::now());
    while begun.elapsed() < KNOWN_TIMEOUT {
        let known = sqlx::query_scalar("SELECT count(*) FROM linkis_external_cluster WHERE generation IS NOT NULL");
        if known.fetch_one(&mut connection).await.is_ok_and(|known: i64| known > 0) {
            return Ok(());
        }
        tokio::time::sleep(KNOWN_POLL).await;
    }
    Err("the service does not know the cluster".into())
}

async fn answer(mut stream: TcpStream) -> std::io::Result<()> {
    let mut question = Vec::new();
    while !question.ends_with(b"\r\n\r\n") && stream.read_buf(&mut question).await? > 0 {}
    let is_scheduler = question.starts_with(b"GET /ws/v1/cluster/scheduler");
    let body = if is_scheduler { scheduler() } else { r#"{"apps": null}"#.to_owned() };
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await
}

/// The queue, and those that it is in, each with more than is ever asked for.
fn scheduler() -> String {
    let queue = |path: &str, children: &str| {
        format!(
            r#"{{"queueName": "{path}", "maxResources": {{"memory": 1000000000000, "vCores": 1000000000000}},
                "usedResources": {{"memory": 0, "vCores": 0}}, "childQueues": {{"queue": [{children}]}}}}"#
        )
    };
    let mut paths: Vec<&str> = QUEUE.match_indices('.').map(|(end, _)| &QUEUE[..end]).chain([QUEUE]).collect();
    paths.reverse();
    let root = paths.into_iter().fold(String::new(), |children, path| queue(path, &children));
    format!(r#"{{"scheduler": {{"schedulerInfo": {{"type": "fairScheduler", "rootQueue": {root}}}}}}}"#)
}
