//! Crowd `held-em`: very many calls on an EM that an operator holds.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use prost::Message as _;
use rm_proto::v1 as proto;
use tokio::task::JoinSet;
use tonic::Code;

use crate::Failure;

use super::{
    callers::{ask, em, granted, release},
    findings::Findings,
    raw::{Connection, describe},
    stage::Stage,
};

/// Server options: timeout of a call.
pub(crate) const SERVER: [&str; 2] = ["--request-timeout", "8s"];

const CALLS: u64 = 30_000;
const CONNECTIONS: usize = 8;
const LIMIT: Duration = Duration::from_secs(90);

/// Deadline of callers that set one.
const OWN_DEADLINE: Duration = Duration::from_secs(4);

/// Maximum time until a call is served after the end of the hold.
const SERVED_SECONDS_MAX: f64 = 2.0;

pub(crate) async fn pass(stage: &mut Stage, findings: &mut Findings) -> Result<Option<i64>, Failure> {
    stage.callers.register(1).await?;
    let calls = stage.scaled(CALLS);
    for _ in 0..stage.options.rounds {
        for (timeout, whose) in [(None, "the service's deadline"), (Some(OWN_DEADLINE), "deadlines of their own")] {
            stage.tables.hold(&em(0)?).await?;
            let name = format!("{calls} calls on a held EM, with {whose}");
            let answers = stage.pair(findings, &name, LIMIT, ask_all(stage.url(), calls, timeout)).await;
            stage.tables.let_go(&em(0)?).await?;
            let Some(answers) = answers? else {
                findings.unfinished.push(format!("{name}: not all answered at the time limit"));
                return Ok(None);
            };
            note(findings, &name, &answers);
            let begun = Instant::now();
            let client = stage.callers.client(0);
            let grant = granted(client.request_resource(&ask(em(0)?, 0)?).await?)?;
            let seconds = begun.elapsed().as_secs_f64();
            findings.at_most(format!("{name}: served when let go"), "s", seconds, SERVED_SECONDS_MAX);
            client.resource_released(&release(grant.ticket_id, em(0)?, 0)?).await?;
        }
    }
    Ok(Some(0))
}

/// Number of calls by reply, and the time until the last one.
type ReplyCounts = (BTreeMap<String, u64>, Duration);

async fn ask_all(url: String, calls: u64, timeout: Option<Duration>) -> Result<ReplyCounts, Failure> {
    let message = proto::RequestResourceRequest {
        em: Some(proto::EmInstance {
            application_name: super::callers::KIND.to_owned(),
            instance: em(0)?.instance.to_string(),
        }),
        user: "crowd-user0".to_owned(),
        creator: "IDE".to_owned(),
        resource: Some(proto::Resource {
            kind: Some(proto::resource::Kind::LoadInstance(proto::LoadInstanceResource {
                memory: 1 << 30,
                cores: 1,
                instances: 1,
            })),
        }),
        ..Default::default()
    };
    let message = Arc::new(message.encode_to_vec());
    let mut connections = Vec::new();
    for _ in 0..CONNECTIONS {
        connections.push(Arc::new(Connection::open(&url).await?));
    }
    let begun = Instant::now();
    let mut under_way = JoinSet::new();
    for (_, connection) in (0..calls).zip(connections.iter().cycle()) {
        let (connection, message) = (connection.clone(), message.clone());
        under_way.spawn(async move {
            match connection.call("RequestResource", &message, timeout).await {
                Ok(status) => describe(&status),
                Err(error) => format!("no answer: {error}"),
            }
        });
    }
    let mut answers = BTreeMap::new();
    while let Some(answer) = under_way.join_next().await {
        *answers.entry(answer?).or_default() += 1;
    }
    Ok((answers, begun.elapsed()))
}

fn note(findings: &mut Findings, name: &str, (answers, last): &ReplyCounts) {
    let fine = |answer: &str| {
        answer == "Aborted/LOCK_TIMEOUT" || answer.starts_with(&format!("{:?}", Code::ResourceExhausted))
    };
    let odd: u64 = answers.iter().filter(|(answer, _)| !fine(answer)).map(|(_, count)| count).sum();
    findings.measured(format!("{name}: the last answered after"), "s", last.as_secs_f64());
    findings.at_most(format!("{name}: neither LOCK_TIMEOUT nor RESOURCE_EXHAUSTED"), "", odd as f64, 0.0);
    let counts: Vec<_> = answers.iter().map(|(answer, count)| format!("{count} {answer}")).collect();
    findings.notes.push(format!("{name}: {}", counts.join(", ")));
}
