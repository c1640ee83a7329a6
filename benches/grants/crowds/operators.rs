//! Crowd `operators`: operators that repeatedly list the few locked tickets among very many live ones.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use rm_proto::v1::{ListTicketsRequest, usage_service_client::UsageServiceClient};
use tokio::task::JoinSet;
use tonic::transport::Channel;

use crate::{Failure, random::Random, sample::median};

use super::{
    findings::{Findings, millis},
    fleet::{Fleet, PER_EM},
    open,
    stage::{CALM, OtherCall, Stage},
};

const OPERATORS: usize = 12;
/// Number of locked tickets beside the engines of the fleet.
const LOCKED: u64 = 10_000;
const PAGE: i32 = 1000;

/// Rate of other callers, each of which reads an EM.
const LOOKS_PER_SECOND: f64 = 200.0;
/// Maximum increase of their median duration, in milliseconds.
const MORE_MAX: f64 = 25.0;

const WINDOW: Duration = Duration::from_secs(10);
const LIMIT: Duration = Duration::from_secs(120);

#[derive(Default)]
struct OperatorResult {
    pages: Mutex<Vec<f64>>,
    failed: AtomicU64,
}

pub(crate) async fn pass(stage: &mut Stage, findings: &mut Findings) -> Result<Option<i64>, Failure> {
    let fleet = Fleet::start(stage).await?;
    let locked = stage.scaled(LOCKED);
    stage.callers.grant(0, locked, PER_EM).await?;
    stage.tables.settle().await?;
    for _ in 0..stage.options.rounds {
        let (_, calm) = looks(stage, &fleet).during(CALM, std::future::pending::<()>()).await?;
        let seen = Arc::new(OperatorResult::default());
        let work = async {
            let mut operators = JoinSet::new();
            for _ in 0..OPERATORS {
                let client = UsageServiceClient::connect(stage.url()).await?;
                operators.spawn(list(client, seen.clone()));
            }
            // The operators end with the future.
            looks(stage, &fleet).during(WINDOW, operators.join_all()).await
        };
        let name = format!("{OPERATORS} operators list {locked} locked of {} tickets", fleet.tickets());
        let Some((_, beside)) = stage.pair(findings, &name, LIMIT, work).await? else {
            findings.unfinished.push(format!("{name}: not answered at the time limit"));
            return Ok(None);
        };
        let (calm, beside) = (calm.times(), beside.times());
        findings.measured("GetEm p50, calm", "ms", millis(calm.p50));
        findings.measured("GetEm p50, beside operators", "ms", millis(beside.p50));
        findings.at_most("GetEm p50, more than calm", "ms", millis(beside.p50) - millis(calm.p50), MORE_MAX);
        findings.measured("GetEm p99, beside operators", "ms", millis(beside.p99));
        let pages = seen.pages.lock().map(|pages| pages.clone()).unwrap_or_default();
        findings.measured("pages listed", "/s", pages.len() as f64 / WINDOW.as_secs_f64());
        findings.measured("a page: p50", "ms", median(pages));
        findings.measured("pages that failed", "", seen.failed.load(Relaxed) as f64);
    }
    Ok(Some(fleet.tickets() + i64::try_from(locked)?))
}

async fn list(mut client: UsageServiceClient<Channel>, seen: Arc<OperatorResult>) {
    loop {
        let (begun, message) = (Instant::now(), request());
        match client.list_tickets(message).await {
            Ok(_) => {
                if let Ok(mut pages) = seen.pages.lock() {
                    pages.push(millis(begun.elapsed()));
                }
            }
            Err(_) => {
                seen.failed.fetch_add(1, Relaxed);
            }
        }
    }
}

fn request() -> ListTicketsRequest {
    ListTicketsRequest { state: "locked".to_owned(), page_size: PAGE, ..Default::default() }
}

/// Returns the calls of other callers, each of which reads a random EM.
fn looks(stage: &Stage, fleet: &Fleet) -> open::OpenLoopLoad<impl FnMut(u64, Random) -> OtherCall + Send + 'static> {
    let (callers, fleet) = (stage.callers.clone(), fleet.clone());
    let call = move |number: u64, mut random: Random| -> OtherCall {
        let (client, em) = (callers.client(number), fleet.em(random.up_to(fleet.len())).clone());
        Box::pin(async move {
            client.em(&em).await?;
            Ok(Instant::now())
        })
    };
    open::OpenLoopLoad { per_second: LOOKS_PER_SECOND, call }
}
