//! Crowd `many-queues`: waiting requests with different wait keys, either an EM or the limit of a user for each.

use std::{collections::BTreeMap, time::Duration};

use rm_client::{ResourceRequest, RmClient};
use rm_model::{
    limit::{LabelPattern, Rule},
    name::Name,
    operation::Grant,
    resource::Dimension,
};
use tokio::task::JoinSet;

use crate::Failure;

use super::{
    callers::{PLENTY, ask_for, em, granted, registration},
    findings::Findings,
    spent::CostMeasurement,
    stage::Stage,
};

/// Numbers of waiting requests. The cost per request must not grow with the number.
const SIZES: [u64; 2] = [350, 3500];

/// Maximum cost of a request among many, as a multiple of its cost among few.
const GROWTH_MAX: f64 = 1.3;

/// Creator whose users have a limit each.
const LIMITED: &str = "crowd";

const WAIT: Duration = Duration::from_secs(600);
const QUEUED_TIMEOUT: Duration = Duration::from_secs(120);
const SERVED_TIMEOUT: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(200);

/// Duration of a measurement in which requests only wait.
const IDLE: Duration = Duration::from_secs(10);

/// Wait keys of the requests.
#[derive(Debug, Clone, Copy)]
enum Keys {
    /// A different EM for each request.
    Ems,
    /// A different user with a limit for each request.
    UserLimits,
}

impl Keys {
    fn name(self) -> &'static str {
        match self {
            Self::Ems => "EMs",
            Self::UserLimits => "users' limits",
        }
    }

    /// Returns a request that a ticket of the same number blocks.
    fn request(self, number: u64) -> Result<ResourceRequest, Failure> {
        let user = Name::parse("user", &format!("crowd-queued{number}"))?;
        match self {
            Self::Ems => ask_for(em(1 + number)?, user),
            Self::UserLimits => {
                Ok(ResourceRequest { creator: Name::parse("creator", LIMITED)?, ..ask_for(em(0)?, user)? })
            }
        }
    }
}

pub(crate) async fn pass(stage: &mut Stage, findings: &mut Findings) -> Result<Option<i64>, Failure> {
    let client = stage.callers.client(0);
    client.register(registration(em(0)?, PLENTY)?).await?;
    let labels = BTreeMap::from([("user".to_owned(), None), ("creator".to_owned(), Some(LIMITED.to_owned()))]);
    let max = BTreeMap::from([(Dimension::Instances, 1)]);
    client
        .set_limit(&Rule {
            pattern: LabelPattern::new(labels),
            mode: Default::default(),
            max,
            guarantee: Default::default(),
        })
        .await?;
    let register = |client: RmClient, number: u64| async move {
        client.register(registration(em(1 + number)?, 1)?).await?;
        Ok(())
    };
    stage.callers.each("EMs register", stage.scaled(SIZES[1]), register).await?;
    for _ in 0..stage.options.rounds {
        for keys in [Keys::Ems, Keys::UserLimits] {
            let mut served = Vec::new();
            for size in SIZES {
                match one(stage, findings, keys, stage.scaled(size)).await? {
                    Some(micros) => served.push(micros),
                    None => return Ok(None),
                }
            }
            let name = format!("{} {}: served, beside {}", SIZES[1], keys.name(), SIZES[0]);
            findings.at_most(name, "", served[1] / served[0], GROWTH_MAX);
        }
    }
    Ok(Some(0))
}

/// Returns the processor time of the service for each served request; `None` if not all were served in time.
async fn one(stage: &Stage, findings: &mut Findings, keys: Keys, waiting: u64) -> Result<Option<f64>, Failure> {
    let name = format!("{waiting} wait at {waiting} {}", keys.name());
    let fill = move |client: RmClient, number: u64| async move {
        granted(client.request_resource(&keys.request(number)?).await?)
    };
    let held = stage.callers.each("tickets are granted", waiting, fill).await?;
    let calm = stage.calm().await?;
    let enter = async {
        let mut queued = JoinSet::new();
        for number in 0..waiting {
            let client = stage.callers.client(number);
            queued.spawn(async move {
                let request = ResourceRequest { wait_timeout: WAIT, ..keys.request(number)? };
                let grant = granted(client.request_resource(&request).await?)?;
                Ok::<(), Failure>(client.resource_released(&grant.released(request.user)).await?)
            });
        }
        while (stage.callers.client(0).waiting().await?.len() as u64) < waiting {
            tokio::time::sleep(POLL).await;
        }
        Ok::<_, Failure>(queued)
    };
    let Ok(queued) = tokio::time::timeout(QUEUED_TIMEOUT, enter).await else {
        findings.unfinished.push(format!("{name}: not all were queued within {QUEUED_TIMEOUT:?}"));
        return Ok(None);
    };
    let queued = queued?;
    let waits = async {
        tokio::time::sleep(IDLE).await;
        Ok(())
    };
    stage.beside(calm, findings, &name, 2 * IDLE, waits).await?;
    let idle = CostMeasurement::begin(stage).await?;
    tokio::time::sleep(IDLE).await;
    let [server, postgresql] = idle.percent().await?;
    findings.measured(format!("{name}: service, idle"), "% of core", server);
    findings.measured(format!("{name}: PostgreSQL, idle"), "% of core", postgresql);
    let spent = CostMeasurement::begin(stage).await?;
    let serve = tokio::time::timeout(SERVED_TIMEOUT, serve(stage, keys, held, queued));
    let Ok(served) = serve.await else {
        findings.unfinished.push(format!("{name}: not all were served within {SERVED_TIMEOUT:?}"));
        return Ok(None);
    };
    served?;
    let (cost, elapsed) = spent.each(waiting).await?;
    findings.measured(format!("{name}: served"), "/s", waiting as f64 / elapsed.as_secs_f64());
    findings.measured(format!("{name}: service for each served"), "µs", cost.server);
    findings.measured(format!("{name}: PostgreSQL for each served"), "µs", cost.postgresql);
    Ok(Some(cost.server))
}

/// Releases all tickets, and waits for the requests that they blocked.
async fn serve(
    stage: &Stage,
    keys: Keys,
    held: Vec<Grant>,
    mut queued: JoinSet<Result<(), Failure>>,
) -> Result<(), Failure> {
    let held: std::sync::Arc<[Grant]> = held.into();
    let count = held.len() as u64;
    let release = move |client: RmClient, number: u64| {
        let grant = held[number as usize].clone();
        async move { Ok(client.resource_released(&grant.released(keys.request(number)?.user)).await?) }
    };
    stage.callers.each("tickets are released", count, release).await?;
    while let Some(served) = queued.join_next().await {
        served??;
    }
    Ok(())
}
