//! The life of the demo cluster: engines, reports of EMs, drains and a status line, until the demo ends.
//!
//! A failed call ends its engine; the service then ends the ticket. Never: repeats a call. Caller: `demo`.

use std::{
    collections::HashSet,
    future::Future,
    io,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use prost::Message;
use tokio::{
    signal::unix::{SignalKind, signal},
    task::JoinSet,
    time::{Interval, MissedTickBehavior, interval_at, sleep},
};
use uuid::Uuid;

use crate::commands::{error::CommandFailure, output::Printer};
use rm_client::{ApiCall, calls};
use rm_edge::convert::request;
use rm_proto::v1::{
    AvailableResource, DrainRequest, EmInstance, HeartbeatRequest, ResourceInitedRequest, ResourceReleasedRequest,
    ResumeRequest, request_resource_response::Result as Outcome,
};

use super::{
    cluster::{self, DemoEngine},
    objects::RegisteredEm,
    pace::PacedClient,
};

/// Maximum number of engines at one time, each with at most one ticket.
pub const ENGINES_MAX: usize = 500;

/// Time between the starts of two engines: with their run times, somewhat more than the EMs can hold.
const ENGINE_INTERVAL: Duration = Duration::from_millis(400);

/// Time between two reports of an EM; the service expects one within 10 s by default.
const REPORT_INTERVAL: Duration = Duration::from_secs(6);

/// Time between the starts of two drains.
const DRAIN_INTERVAL: Duration = Duration::from_secs(60);

const DRAIN_TIME: Duration = Duration::from_secs(25);

/// Time between two status lines.
const STATUS_INTERVAL: Duration = Duration::from_secs(10);

/// Returns a future that completes after `duration` or with a signal to end.
///
/// # Errors
/// If the process cannot handle signals.
pub fn end(duration: Duration) -> io::Result<impl Future<Output = ()>> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    Ok(async move {
        tokio::select! {
            () = sleep(duration) => {}
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

/// Runs the cluster until `end` completes. Open requests are then cancelled, and their positions with them.
pub async fn run(
    client: &Arc<PacedClient>,
    ems: Vec<RegisteredEm>,
    end: impl Future<Output = ()>,
    printer: &mut Printer,
) {
    let cluster = Arc::new(DemoCluster {
        client: Arc::clone(client),
        tickets: ems.iter().map(|_| Mutex::default()).collect(),
        ems,
        idle: Mutex::default(),
        counts: DemoCounts::default(),
    });
    tokio::select! {
        () = end => {}
        () = start_engines(&cluster) => {}
        () = send_reports(&cluster) => {}
        () = drain_ems(&cluster) => {}
        () = print_status(&cluster, printer) => {}
    }
}

/// The running demo.
#[derive(Debug)]
struct DemoCluster {
    client: Arc<PacedClient>,
    ems: Vec<RegisteredEm>,
    /// Used tickets of each EM, in the order of `ems`; the EM reports them.
    tickets: Vec<Mutex<Vec<Uuid>>>,
    /// Those of them whose engines run no task.
    idle: Mutex<HashSet<Uuid>>,
    counts: DemoCounts,
}

/// Numbers of the status line.
#[derive(Debug, Default)]
struct DemoCounts {
    granted: AtomicU64,
    refused: AtomicU64,
    ended: AtomicU64,
    failed: AtomicU64,
    last_failure: Mutex<Option<String>>,
}

async fn start_engines(cluster: &Arc<DemoCluster>) {
    let mut engines = JoinSet::new();
    let mut ticks = ticks(ENGINE_INTERVAL);
    for number in 1.. {
        ticks.tick().await;
        while engines.try_join_next().is_some() {}
        if engines.len() < ENGINES_MAX {
            engines.spawn(run_engine(Arc::clone(cluster), DemoEngine::new(number)));
        }
    }
}

/// Runs one engine, from its request to its release. A failed call ends it; the service then ends the ticket by its
/// deadline or as lost.
async fn run_engine(cluster: Arc<DemoCluster>, engine: DemoEngine) {
    let Some(grant) = cluster.request(engine).await else { return };
    let Some(em) = grant.em.clone() else { return };
    sleep(engine.start_time()).await;
    if !engine.reports_in() {
        // The ticket counts until its deadline.
        sleep(cluster::LOCK_TTL).await;
        return;
    }
    let inited = ResourceInitedRequest {
        ticket_id: grant.ticket_id.clone(),
        user: engine.user().to_owned(),
        em: Some(em.clone()),
        engine: Some(engine.instance()),
        ..Default::default()
    };
    if cluster.call(&calls::RESOURCE_INITED, &inited).await.is_none() {
        return;
    }
    let listed = cluster.list_ticket(&em, &grant.ticket_id);
    sleep(engine.work_time()).await;
    if let Some(listed) = &listed {
        lock(&cluster.idle).insert(listed.ticket);
    }
    sleep(engine.idle_time()).await;
    drop(listed);
    let released = ResourceReleasedRequest {
        ticket_id: grant.ticket_id,
        user: engine.user().to_owned(),
        em: Some(em),
        ..Default::default()
    };
    if cluster.call(&calls::RESOURCE_RELEASED, &released).await.is_some() {
        cluster.counts.ended.fetch_add(1, Ordering::Relaxed);
    }
}

/// Sends the reports of the EMs in turn, each EM once per [`REPORT_INTERVAL`].
async fn send_reports(cluster: &DemoCluster) {
    let mut ticks = ticks(REPORT_INTERVAL / u32::try_from(cluster.ems.len().max(1)).unwrap_or(1));
    for sequence in 1.. {
        for (number, em) in cluster.ems.iter().enumerate() {
            ticks.tick().await;
            let tickets = lock(&cluster.tickets[number]).clone();
            let idle: Vec<Uuid> = {
                let idle = lock(&cluster.idle);
                tickets.iter().filter(|ticket| idle.contains(*ticket)).copied().collect()
            };
            let report = HeartbeatRequest {
                em: Some(em.instance.clone()),
                epoch: em.epoch,
                sequence,
                health: cluster::health(number, sequence).into(),
                load: Some(cluster::load(tickets.len(), sequence)),
                ticket_ids: tickets.iter().flat_map(|ticket| ticket.into_bytes()).collect(),
                observed: Vec::new(),
                idle: request::marks(&tickets, &idle),
            };
            cluster.call(&calls::HEARTBEAT, &report).await;
        }
    }
}

/// Drains one EM after another, each for [`DRAIN_TIME`].
async fn drain_ems(cluster: &DemoCluster) {
    let mut ticks = ticks(DRAIN_INTERVAL);
    loop {
        for em in &cluster.ems {
            ticks.tick().await;
            let drain = DrainRequest { em: Some(em.instance.clone()), reason: "demo: a new disk".to_owned() };
            cluster.call(&calls::DRAIN, &drain).await;
            sleep(DRAIN_TIME).await;
            let resume = ResumeRequest { em: Some(em.instance.clone()), reason: "demo: the disk is in".to_owned() };
            cluster.call(&calls::RESUME, &resume).await;
        }
    }
}

async fn print_status(cluster: &DemoCluster, printer: &mut Printer) {
    let start = Instant::now();
    let mut ticks = ticks(STATUS_INTERVAL);
    loop {
        ticks.tick().await;
        let counts = &cluster.counts;
        let [granted, refused, ended, failed] = [&counts.granted, &counts.refused, &counts.ended, &counts.failed]
            .map(|count| count.load(Ordering::Relaxed));
        let elapsed = humantime::format_duration(Duration::from_secs(start.elapsed().as_secs()));
        let failure =
            lock(&counts.last_failure).take().map(|failure| format!("; {failed} calls failed, the last: {failure}"));
        let line = format!(
            "{elapsed}: {granted} granted, {refused} refused, {ended} released{}\n",
            failure.unwrap_or_default()
        );
        if printer.print(&line).is_err() {
            return;
        }
    }
}

impl DemoCluster {
    /// Requests resources for `engine`. Returns `None` if the request was refused or failed.
    async fn request(&self, engine: DemoEngine) -> Option<AvailableResource> {
        let reply = self.call(&calls::REQUEST_RESOURCE, &engine.request()).await?;
        match reply.result? {
            Outcome::Available(grant) => {
                self.counts.granted.fetch_add(1, Ordering::Relaxed);
                Some(grant)
            }
            Outcome::NotEnough(_) => {
                self.counts.refused.fetch_add(1, Ordering::Relaxed);
                None
            }
        }
    }

    /// Makes a call. Counts a failure and returns `None` then.
    async fn call<Q: Message, A: Message + Default + 'static>(&self, call: &ApiCall<Q, A>, message: &Q) -> Option<A> {
        match self.client.make(call, message).await {
            Ok(reply) => Some(reply),
            Err(failure) => {
                self.counts.failed.fetch_add(1, Ordering::Relaxed);
                *lock(&self.counts.last_failure) = Some(first_line(&failure));
                None
            }
        }
    }

    /// Adds a ticket to the reports of `em`. The guard removes it.
    fn list_ticket(self: &Arc<Self>, em: &EmInstance, ticket_id: &str) -> Option<ListedTicketGuard> {
        let number = self.ems.iter().position(|registered| registered.instance == *em)?;
        let ticket = Uuid::parse_str(ticket_id).ok()?;
        lock(&self.tickets[number]).push(ticket);
        Some(ListedTicketGuard { cluster: Arc::clone(self), number, ticket })
    }
}

/// A ticket in the reports of its EM.
#[derive(Debug)]
struct ListedTicketGuard {
    cluster: Arc<DemoCluster>,
    number: usize,
    ticket: Uuid,
}

impl Drop for ListedTicketGuard {
    fn drop(&mut self) {
        lock(&self.cluster.tickets[self.number]).retain(|ticket| *ticket != self.ticket);
        lock(&self.cluster.idle).remove(&self.ticket);
    }
}

/// Ticks with `period` between them, the first after one period. A late tick delays the next.
fn ticks(period: Duration) -> Interval {
    let mut ticks = interval_at(tokio::time::Instant::now() + period, period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

fn first_line(failure: &CommandFailure) -> String {
    failure.to_string().lines().next().unwrap_or_default().to_owned()
}

/// Locks a mutex. The guarded state stays consistent if a holder panics.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
