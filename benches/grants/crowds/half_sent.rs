//! Crowd `half-sent`: heartbeats of the maximum size that are never completed, because the last byte is not sent.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use rm_edge::message_size::HEARTBEAT_BYTES_MAX;
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::{task::JoinSet, time::Instant};

use crate::Failure;

use super::{
    findings::Findings,
    memory::Memory,
    raw::{Connection, HalfSent},
    stage::Stage,
};

/// Numbers of calls and connections.
const SHAPES: [(u64, u64); 3] = [(400, 1), (4096, 1), (1000, 1000)];

/// Maximum memory above idle, in megabytes.
const MEMORY_MAX: f64 = 64.0;

/// Memory of the server above which sending stops, to protect the machine, in megabytes.
const ENOUGH_MEGABYTES: f64 = 4096.0;
const LOOK: Duration = Duration::from_millis(20);

/// Time for which the senders continue, whether or not the server reads.
const SENDING: Duration = Duration::from_secs(15);
/// Time for which the senders then keep their calls open.
const HOLDING: Duration = Duration::from_secs(3);
const LIMIT: Duration = Duration::from_secs(60);

/// Time for the server to free its memory.
const AFTER: Duration = Duration::from_secs(2);

#[derive(Default)]
struct UploadProgress {
    bytes: AtomicU64,
    all_sent: AtomicU64,
    refused: AtomicU64,
    ended: AtomicU64,
    enough: AtomicBool,
}

pub(crate) async fn pass(stage: &mut Stage, findings: &mut Findings) -> Result<Option<i64>, Failure> {
    allow_files()?;
    for _ in 0..stage.options.rounds {
        for (calls, connections) in SHAPES {
            let (calls, connections) = (stage.scaled(calls), connections.min(stage.scaled(connections)));
            one(stage, findings, calls, connections).await?;
        }
    }
    Ok(Some(0))
}

/// Raises the limit of open files, also for the server: each connection needs one.
fn allow_files() -> Result<(), Failure> {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    Ok(setrlimit(Resource::Nofile, limit)?)
}

async fn one(stage: &mut Stage, findings: &mut Findings, calls: u64, connections: u64) -> Result<(), Failure> {
    let name = format!("{calls} half-sent heartbeats on {connections} connections");
    // Each run starts with a new server.
    stage.restart(false, &[]).await?;
    let (memory, progress) = (stage.memory()?, Arc::new(UploadProgress::default()));
    let looks = tokio::spawn(look(memory, progress.clone()));
    let done = stage.pair(findings, &name, LIMIT, send(stage.url(), calls, connections, progress.clone())).await;
    looks.abort();
    if done?.is_none() {
        findings.unfinished.push(format!("{name}: still sending at the time limit"));
    }
    let peak = findings.passes.iter().find(|passes| passes.name == name).and_then(|passes| passes.pairs.last());
    if let Some(peak) = peak.and_then(|pair| pair.peak) {
        findings.at_most(format!("{name}: memory above idle"), "MB", peak, MEMORY_MAX);
    }
    let megabytes = progress.bytes.load(Relaxed) as f64 / f64::from(1 << 20);
    findings.measured(format!("{name}: taken by the server"), "MB", megabytes);
    findings.measured(format!("{name}: calls refused while they were sent"), "", progress.refused.load(Relaxed) as f64);
    findings.measured(format!("{name}: calls sent but for the last byte"), "", progress.all_sent.load(Relaxed) as f64);
    findings.measured(format!("{name}: of these, ended by the server"), "", progress.ended.load(Relaxed) as f64);
    if progress.enough.load(Relaxed) {
        findings.notes.push(format!("{name}: no more was sent when the server had taken {ENOUGH_MEGABYTES:.0} MB"));
    }
    tokio::time::sleep(AFTER).await;
    if let Some(kept) = memory.above() {
        findings.measured(format!("{name}: memory kept afterwards"), "MB", kept);
    }
    Ok(())
}

async fn send(url: String, calls: u64, connections: u64, progress: Arc<UploadProgress>) -> Result<(), Failure> {
    let mut opened = Vec::new();
    for _ in 0..connections {
        match Connection::open(&url).await {
            Ok(connection) => opened.push(Arc::new(connection)),
            Err(_) => {
                progress.refused.fetch_add(1, Relaxed);
            }
        }
    }
    let until = Instant::now() + SENDING;
    let mut senders = JoinSet::new();
    for (number, connection) in (0..calls).zip(opened.iter().cycle()) {
        let (connection, progress) = (connection.clone(), progress.clone());
        senders.spawn(async move {
            let sending = half_send(&connection, &progress);
            let sent = tokio::time::timeout_at(until, sending).await;
            (number, sent.ok().flatten())
        });
    }
    let mut held = JoinSet::new();
    while let Some(sent) = senders.join_next().await {
        if let (_, Some(sent)) = sent? {
            let progress = progress.clone();
            held.spawn(async move {
                sent.ended().await;
                progress.ended.fetch_add(1, Relaxed);
            });
        }
    }
    tokio::time::sleep(HOLDING).await;
    Ok(())
}

/// Sends all but the last byte of a message. Returns `None` if the server rejects the call or enough was sent.
async fn half_send(connection: &Connection, progress: &UploadProgress) -> Option<HalfSent> {
    let sent = |bytes: usize| {
        progress.bytes.fetch_add(bytes as u64, Relaxed);
    };
    let enough = async {
        while !progress.enough.load(Relaxed) {
            tokio::time::sleep(LOOK).await;
        }
    };
    tokio::select! {
        sent = connection.half_send("Heartbeat", HEARTBEAT_BYTES_MAX, sent) => {
            let counter = if sent.is_ok() { &progress.all_sent } else { &progress.refused };
            counter.fetch_add(1, Relaxed);
            sent.ok()
        }
        () = enough => None,
    }
}

/// Stops the senders when the server has taken enough memory.
async fn look(memory: Memory, progress: Arc<UploadProgress>) {
    while memory.above().is_some_and(|megabytes| megabytes < ENOUGH_MEGABYTES) {
        tokio::time::sleep(LOOK).await;
    }
    progress.enough.store(true, Relaxed);
}
