//! Stage of a crowd: the service in its own process, and the calls of others meanwhile.
//!
//! Others request grants at half load. The stage compares their durations in a calm phase with those during an event,
//! and checks the stored counters at the end. Callers: the crowd modules.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use sqlx::postgres::PgConnectOptions;

use crate::{
    Failure, Workload,
    calls::TargetEm,
    load::{Job, Load, Tally, WARM_UP, Work},
    plan::ENOUGH,
    process::Server,
    random::Random,
    service::start_server,
};

use super::{
    Options,
    callers::{Callers, KIND},
    findings::{Findings, Pair},
    memory::Memory,
    open::{self, OpenLoopResult},
    tables::Tables,
};

/// Rate of the grants that others request: half load on a small machine.
const OTHERS_PER_SECOND: f64 = 2000.0;

/// Duration of the calm phase.
pub(crate) const CALM: Duration = Duration::from_secs(5);
/// Minimum duration of an event.
const PASS_MIN: Duration = Duration::from_secs(1);

/// Duration of a full load, until the batches have reached their size.
const RATE_WINDOW: Duration = Duration::from_secs(3);

/// Timeout of the audit, which reads all stored data.
const AUDIT_TIMEOUT: Duration = Duration::from_secs(180);

/// Server options: a server whose callers stay connected stops soon.
const SERVER: [&str; 2] = ["--drain-timeout", "1s"];

pub(crate) struct Stage {
    pub options: Options,
    pub callers: Callers,
    pub tables: Tables,
    database: PgConnectOptions,
    server: Server,
    load: Arc<Load>,
    /// Tickets granted to others by earlier servers.
    granted_before: u64,
    /// Failed calls of others, of which each may have been granted.
    failed: AtomicU64,
}

impl Stage {
    /// Starts the service with `arguments` on an empty database.
    pub async fn start(options: Options, database: PgConnectOptions, arguments: &[&str]) -> Result<Self, Failure> {
        let server = start_server(&database, &[arguments, &SERVER].concat()).await?;
        let mut load = Load::connect(&[server.url()], None).await?;
        load.register(Workload::Spread).await?;
        let callers = Callers::connect(&server.url())?;
        let tables = Tables::of(database.clone());
        let failed = AtomicU64::new(0);
        Ok(Self { options, callers, tables, database, server, load: Arc::new(load), granted_before: 0, failed })
    }

    /// Starts another instance with other options. The earlier one stops in order once the new one serves.
    pub async fn restart(&mut self, arguments: &[&str]) -> Result<(), Failure> {
        let server = start_server(&self.database, &[arguments, &SERVER].concat()).await?;
        let load = Load::connect(&[server.url()], None).await?;
        self.granted_before += self.load.live();
        self.callers = Callers::connect(&server.url())?;
        self.load = Arc::new(load);
        self.server = server;
        Ok(())
    }

    /// Scales a number of the full size to this run.
    pub fn scaled(&self, full: u64) -> u64 {
        ((full as f64 * self.options.scale) as u64).max(1)
    }

    pub fn url(&self) -> String {
        self.server.url()
    }

    pub fn process_id(&self) -> u32 {
        self.server.process_id()
    }

    pub fn database(&self) -> &PgConnectOptions {
        &self.database
    }

    /// Records the current memory of the service as idle.
    pub fn memory(&self) -> Result<Memory, Failure> {
        Memory::of(self.server.process_id())
    }

    /// Returns the calls of others, at half load.
    pub fn others(&self) -> open::OpenLoopLoad<impl FnMut(u64, Random) -> OtherCall + Send + 'static> {
        let load = self.load.clone();
        let call = move |number: u64, mut random: Random| -> OtherCall {
            let (_, mut client) = load.client(number as usize, 1);
            let (place, tally) = (TargetEm::choose(Workload::Spread, &mut random), load.tally().clone());
            Box::pin(async move {
                client.grant(place).await?;
                tally.granted.fetch_add(1, Relaxed);
                Ok(Instant::now())
            })
        };
        open::OpenLoopLoad { per_second: OTHERS_PER_SECOND, call }
    }

    /// Measures others in a calm phase and then during `work`. Returns `None` if the work was not done within `limit`.
    pub async fn pair<T>(
        &self,
        findings: &mut Findings,
        name: &str,
        limit: Duration,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<Option<T>, Failure> {
        let calm = self.calm().await?;
        self.beside(calm, findings, name, limit, work).await
    }

    /// Measures others in a calm phase.
    pub async fn calm(&self) -> Result<OpenLoopResult, Failure> {
        let (_, calm) = self.others().during(CALM, std::future::pending::<()>()).await?;
        Ok(calm)
    }

    /// Measures others during `work`, after they were `calm`. Returns `None` if the work was not done within `limit`.
    pub async fn beside<T>(
        &self,
        calm: OpenLoopResult,
        findings: &mut Findings,
        name: &str,
        limit: Duration,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<Option<T>, Failure> {
        let memory = self.memory()?;
        eprintln!("  others are calm (p99 {:.1} ms); now: {name}", super::findings::millis(calm.times().p99));
        let work = async {
            let begun = Instant::now();
            let done = work.await;
            tokio::time::sleep(PASS_MIN.saturating_sub(begun.elapsed())).await;
            done
        };
        let (done, during) = self.others().during(limit, work).await?;
        self.count(findings, name, &calm, &during);
        findings.pass(
            name,
            Pair {
                calm: calm.times(),
                during: during.times(),
                gap: during.gap(),
                failed: calm.failed + during.failed,
                idle: memory.idle,
                peak: memory.peak(),
            },
        );
        done.transpose()
    }

    fn count(&self, findings: &mut Findings, name: &str, calm: &OpenLoopResult, during: &OpenLoopResult) {
        self.failed.fetch_add(calm.failed + during.failed, Relaxed);
        findings.note_failed("in the calm", calm);
        findings.note_failed(&format!("while: {name}"), during);
    }

    /// Starts as many grants as the service can make.
    pub fn full_load(&self) -> crate::callers::CallHandles {
        let job = Job { work: Work::Grants, workload: Workload::Spread, callers: ENOUGH, instances: 1 };
        self.load.start(job)
    }

    /// Returns the grants per second of an otherwise idle service.
    pub async fn rate_of_grants(&self) -> Result<f64, Failure> {
        let calls = self.full_load();
        tokio::time::sleep(WARM_UP).await;
        let (begun, before) = (Instant::now(), calls.done());
        tokio::time::sleep(RATE_WINDOW).await;
        let rate = (calls.done() - before) as f64 / begun.elapsed().as_secs_f64();
        self.finish(calls).await?;
        Ok(rate)
    }

    /// Stops a full load. Returns the number of its failed calls.
    pub async fn finish(&self, calls: crate::callers::CallHandles) -> Result<u64, Failure> {
        let ended = calls.finish().await?;
        self.failed.fetch_add(ended.errors, Relaxed);
        Ok(ended.errors)
    }

    /// Records calls on others' EMs whose results are unknown.
    pub fn unknown(&self, calls: u64) {
        self.failed.fetch_add(calls, Relaxed);
    }

    /// Returns the number of tickets that others were granted and did not release.
    fn others_live(&self) -> u64 {
        let Tally { granted, released } = &**self.load.tally();
        self.granted_before + granted.load(Relaxed) - released.load(Relaxed)
    }

    /// Checks the stored counters. `own` is the expected number of the crowd's tickets, if it is known.
    pub async fn check(&self, findings: &mut Findings, own: Option<i64>) {
        if let Err(error) = self.look(findings, own).await {
            findings.wrong.push(format!("the books could not be looked at: {error}"));
        }
    }

    async fn look(&self, findings: &mut Findings, own: Option<i64>) -> Result<(), Failure> {
        let client = rm_client::RmClient::new(&self.url(), AUDIT_TIMEOUT)?;
        let audit = client.audit().await?;
        if let Some(first) = audit.differences.first.first() {
            let (count, what, counter) = (audit.differences.count, &first.what, &first.counter);
            let (stored, true_sums) = (&first.stored, &first.from_tickets);
            findings.wrong.push(format!(
                "the audit finds {count} differences; the first: {what}, {counter}: {stored:?}, by its tickets {true_sums:?}"
            ));
        }
        let (least, stored) = (i64::try_from(self.others_live())?, self.tables.stored("ecm").await?);
        let most = least + i64::try_from(self.failed.load(Relaxed))?;
        if !(least..=most).contains(&stored) {
            findings.wrong.push(format!("others were granted {least} to {most} tickets, but {stored} are stored"));
        }
        let stored = self.tables.stored(KIND).await?;
        if let Some(own) = own.filter(|own| *own != stored) {
            findings.wrong.push(format!("the crowd has {own} tickets, but {stored} are stored"));
        }
        let locks = self.tables.locks().await?;
        if locks > 0 {
            findings.wrong.push(format!("{locks} resource locks were left behind"));
        }
        findings.notes.push(format!(
            "audit: {} EMs, {} scopes, {} tickets, {} differences",
            audit.ems, audit.scopes, audit.tickets, audit.differences.count
        ));
        Ok(())
    }

    pub async fn stop(self) {
        self.tables.close().await;
    }
}

/// Future of one call of others.
pub(crate) type OtherCall = std::pin::Pin<Box<dyn Future<Output = Result<Instant, Failure>> + Send>>;
