//! Crowd `choosing`: requests without an EM among very many EMs, compared with requests that name one of these EMs.

use std::time::Duration;

use rm_client::{ResourceRequest, RmClient};
use rm_model::{
    em::Em,
    name::Name,
    resource::{Dimension, Resource},
    selector::EmSelector,
};

use crate::{Failure, random::Random};

use super::{
    callers::{KIND, USERS, ask, em, registration},
    closed::{self, ClosedLoopResult, WINDOW},
    findings::Findings,
    stage::Stage,
};

/// Numbers of EMs, one after the other. The wanted rate of many callers is a fraction of the rate with named EMs.
const SIZES: [(u64, f64); 2] = [(10_000, 0.85), (50_000, 0.8)];

/// Wanted rate of a single caller, as the same fraction.
const ONE_CALLER_MIN: f64 = 0.95;
/// Wanted rate of refusals, as the same fraction.
const REFUSED_MIN: f64 = 0.85;
/// Maximum use of the fullest EM, as a multiple of the mean, after [`EVEN`].
const FULLEST_MAX: f64 = 1.2;

const MANY: u64 = 256;
const ROOM: i64 = 1_000_000;
const EVEN: Duration = Duration::from_secs(60);

pub(crate) async fn pass(stage: &mut Stage, findings: &mut Findings) -> Result<Option<i64>, Failure> {
    let mut granted = 0;
    let mut registered = 0;
    for (number, (full, wanted)) in (0..).zip(SIZES) {
        let ems = stage.scaled(full);
        let first = registered;
        let register = move |client: RmClient, number: u64| async move {
            Ok(client.register(registration(em(first + number)?, ROOM)?).await?)
        };
        stage.callers.each("EMs register", ems.saturating_sub(first), register).await?;
        registered = ems;
        for _ in 0..stage.options.rounds {
            let of = |what: &str| format!("{full} EMs, {what}: not named, beside named");
            for (callers, what, wanted) in [(MANY, "many callers", wanted), (1, "one caller", ONE_CALLER_MIN)] {
                let (named, chosen) = pair(stage, ems, callers, false).await?;
                findings.measured(format!("{full} EMs, {what}: named"), "/s", named.rate);
                findings.at_least(of(what), "", chosen.rate / named.rate, wanted);
                if callers == 1 {
                    findings.measured(format!("{full} EMs, {what}: named, p50"), "ms", named.p50);
                    findings.measured(format!("{full} EMs, {what}: not named, p50"), "ms", chosen.p50);
                }
                granted += named.granted() + chosen.granted();
            }
            let (named, anywhere) = pair(stage, ems, MANY, true).await?;
            findings.measured(format!("{full} EMs, refused: named"), "/s", named.rate);
            findings.at_least(of("refused"), "", anywhere.rate / named.rate, REFUSED_MIN);
            if number == 0 {
                granted += closed::ask(&stage.callers, MANY, EVEN, false, of_any_size(ems)).await?.granted();
                let held = held(&stage.callers.client(0)).await?;
                let mean = held.iter().sum::<i64>() as f64 / held.len() as f64;
                let fullest = held.into_iter().max().unwrap_or(0) as f64;
                let what = format!("{full} EMs: what the fullest holds, beside the mean");
                findings.at_most(what, "", fullest / mean, FULLEST_MAX);
            }
        }
    }
    Ok(Some(granted))
}

async fn pair(
    stage: &Stage,
    ems: u64,
    count: u64,
    refused: bool,
) -> Result<(ClosedLoopResult, ClosedLoopResult), Failure> {
    Ok((
        closed::ask(&stage.callers, count, WINDOW, refused, request(ems, true, refused)).await?,
        closed::ask(&stage.callers, count, WINDOW, refused, request(ems, false, refused)).await?,
    ))
}

/// Returns the used and locked cores of each EM.
async fn held(client: &RmClient) -> Result<Vec<i64>, Failure> {
    let cores = |em: &Em| em.used.get(&Dimension::Cores) + em.locked.get(&Dimension::Cores);
    Ok(client.ems().await?.iter().map(cores).collect())
}

/// Returns requests for any EM. One in ten needs sixteen times as many cores as the others.
fn of_any_size(ems: u64) -> impl Fn(&mut Random) -> Result<ResourceRequest, Failure> + Clone + Send + 'static {
    let anywhere = request(ems, false, false);
    move |random| {
        let mut request = anywhere(random)?;
        if random.up_to(10) == 1 {
            request.resource = Resource::load_instance(1, 16, 1)?;
        }
        Ok(request)
    }
}

/// Returns requests for a random EM, named or not. A request to be refused needs more than any EM has.
fn request(
    ems: u64,
    named: bool,
    refused: bool,
) -> impl Fn(&mut Random) -> Result<ResourceRequest, Failure> + Clone + Send + 'static {
    move |random| {
        let mut request = ask(em(random.up_to(ems) - 1)?, random.up_to(USERS))?;
        if refused {
            request.resource = Resource::load_instance(1, ROOM + 1, 1)?;
        }
        if !named {
            request.em = None;
            request.selector = EmSelector { application_name: Some(Name::parse("em", KIND)?), ..EmSelector::default() };
        }
        Ok(request)
    }
}
