//! Crowd `frozen`: requests without an EM while the processes of the database are stopped.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use prost::Message as _;
use rm_proto::v1 as proto;
use rustix::process::{Pid, Signal, kill_process};
use tokio::task::JoinSet;

use crate::{Failure, meter::Meter};

use super::{
    callers::{ask, em, granted, release},
    findings::Findings,
    raw::{Connection, describe},
    stage::Stage,
};

/// Server options: timeout of a call.
pub(crate) const SERVER: [&str; 2] = ["--request-timeout", "2s"];

const CALLERS: u64 = 20;

/// Deadline of callers that set one, shortly below the timeout of the service.
const OWN_DEADLINE: Duration = Duration::from_millis(1900);
const LIMIT: Duration = Duration::from_secs(90);

/// Maximum time until the last reply: the callers' deadline and a margin.
const LAST_SECONDS_MAX: f64 = 2.5;

/// Timeout of the first grant after the database continues.
const SERVED_LIMIT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);

pub(crate) async fn pass(stage: &mut Stage, findings: &mut Findings) -> Result<Option<i64>, Failure> {
    stage.callers.register(1).await?;
    let meter = Meter::new(stage.database(), vec![stage.process_id()]).await?;
    for timeout in (0..stage.options.rounds).flat_map(|_| [None, Some(OWN_DEADLINE)]) {
        let whose = if timeout.is_some() { "deadlines of their own" } else { "the service's deadline" };
        serve(stage).await?;
        let connection = Arc::new(Connection::open(&stage.url()).await?);
        // The results of these calls are unknown once the database continues.
        stage.unknown(CALLERS);
        let frozen = Frozen::stop(meter.postgresql())?;
        let last = tokio::time::timeout(LIMIT, ask_all(connection, timeout)).await;
        drop(frozen);
        match last {
            Ok(answers) => {
                let (codes, last) = answers?;
                let name = format!("the last of {CALLERS} callers is answered after, with {whose} of 2 s");
                findings.at_most(name, "s", last, LAST_SECONDS_MAX);
                findings.notes.push(format!("with {whose}: {codes}"));
            }
            Err(_) => {
                findings.unfinished.push(format!("{CALLERS} callers with {whose}: not all answered at the time limit"))
            }
        }
        let begun = Instant::now();
        while let Err(error) = serve(stage).await {
            if begun.elapsed() > SERVED_LIMIT {
                findings.unfinished.push(format!("no call succeeds after the database resumes: {error}"));
                return Ok(None);
            }
            tokio::time::sleep(POLL).await;
        }
        findings.measured("first successful call after the database resumes", "s", begun.elapsed().as_secs_f64());
    }
    Ok(None)
}

/// Requests a ticket and releases it.
async fn serve(stage: &Stage) -> Result<(), Failure> {
    let client = stage.callers.client(0);
    let grant = granted(client.request_resource(&ask(em(0)?, 0)?).await?)?;
    Ok(client.resource_released(&release(grant.ticket_id, em(0)?, 0)?).await?)
}

/// Makes the calls. Returns the codes of their replies and the seconds until the last one.
async fn ask_all(connection: Arc<Connection>, timeout: Option<Duration>) -> Result<(String, f64), Failure> {
    let resource = proto::InstanceResource { instances: 1 };
    let resource = proto::Resource { kind: Some(proto::resource::Kind::Instance(resource)) };
    let message = proto::RequestResourceRequest {
        user: "crowd-user0".to_owned(),
        creator: "IDE".to_owned(),
        resource: Some(resource),
        ..Default::default()
    };
    let message = Arc::new(message.encode_to_vec());
    let begun = Instant::now();
    let mut calls = JoinSet::new();
    for _ in 0..CALLERS {
        let (connection, message) = (connection.clone(), message.clone());
        calls.spawn(async move { connection.call("RequestResource", &message, timeout).await });
    }
    let mut codes = BTreeMap::<String, u64>::new();
    while let Some(answer) = calls.join_next().await {
        let answer = answer?.map_or_else(|error| format!("no answer: {error}"), |status| describe(&status));
        *codes.entry(answer).or_default() += 1;
    }
    let codes: Vec<_> = codes.iter().map(|(code, count)| format!("{count} {code}")).collect();
    Ok((codes.join(", "), begun.elapsed().as_secs_f64()))
}

/// Stopped processes; they continue when the value is dropped.
struct Frozen(Vec<Pid>);

impl Frozen {
    fn stop(processes: Vec<u32>) -> Result<Self, Failure> {
        let processes = processes.into_iter().filter_map(|process| Pid::from_raw(i32::try_from(process).ok()?));
        let frozen = Self(processes.collect());
        for process in &frozen.0 {
            // A process may have ended in the meantime.
            let _ = kill_process(*process, Signal::STOP);
        }
        if frozen.0.is_empty() { Err("PostgreSQL's processes cannot be seen in /proc".into()) } else { Ok(frozen) }
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        for process in &self.0 {
            let _ = kill_process(*process, Signal::CONT);
        }
    }
}
