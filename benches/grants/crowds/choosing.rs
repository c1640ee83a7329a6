//! Requests that name no EM, among very many; beside such as name one of the same.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use linkis_rm::{
    client::{ResourceRequest, ResultResource},
    domain::{em::EmInstance, name::Name, resource::Resource, selector::Selector},
};
use tokio::task::JoinSet;

use crate::{Failure, load::WARM_UP, random::Random, sample::median};

use super::{
    callers::{KIND, ask, em, registration},
    findings::Findings,
    stage::Stage,
};

/// How many EMs there are, one size after the other, and what is wanted of many callers then, as a part of those who name one.
const SIZES: [(u64, f64); 2] = [(10_000, 0.85), (50_000, 0.8)];

/// Of one caller alone.
const ONE_CALLER_MIN: f64 = 0.95;
/// Of refusals.
const REFUSED_MIN: f64 = 0.85;
/// Of the fullest EM, as a multiple of the mean, after [`EVEN`].
const FULLEST_MAX: f64 = 1.2;

const MANY: u64 = 256;
const ROOM: i64 = 1_000_000;
const WINDOW: Duration = Duration::from_secs(5);
const EVEN: Duration = Duration::from_secs(60);

pub(crate) async fn pass(stage: &mut Stage, findings: &mut Findings) -> Result<Option<i64>, Failure> {
    let mut granted = 0;
    let mut registered = 0;
    for (number, (full, wanted)) in (0..).zip(SIZES) {
        let ems = stage.scaled(full);
        let first = registered;
        let register = move |client: linkis_rm::client::RmClient, number: u64| async move {
            Ok(client.register(registration(em(first + number)?, ROOM)?).await?)
        };
        stage.callers.each("EMs register", ems.saturating_sub(first), register).await?;
        registered = ems;
        for _ in 0..stage.options.rounds {
            let of = |what: &str| format!("{full} EMs, {what}: not named, beside named");
            for (callers, what, wanted) in [(MANY, "many callers", wanted), (1, "one caller", ONE_CALLER_MIN)] {
                let (named, chosen) = pair(stage, ems, callers, false).await?;
                findings.told(format!("{full} EMs, {what}: named"), "/s", named.rate);
                findings.at_least(of(what), "", chosen.rate / named.rate, wanted);
                if callers == 1 {
                    findings.told(format!("{full} EMs, {what}: named, p50"), "ms", named.p50);
                    findings.told(format!("{full} EMs, {what}: not named, p50"), "ms", chosen.p50);
                }
                granted += named.granted() + chosen.granted();
            }
            let (named, anywhere) = pair(stage, ems, MANY, true).await?;
            findings.told(format!("{full} EMs, refused: named"), "/s", named.rate);
            findings.at_least(of("refused"), "", anywhere.rate / named.rate, REFUSED_MIN);
            if number == 0 {
                let seen = callers(stage, ems, MANY, EVEN, Kind::Anywhere { refused: false }).await?;
                let mean = seen.granted() as f64 / ems as f64;
                let fullest = seen.on.values().max().copied().unwrap_or(0) as f64;
                findings.at_most(format!("{full} EMs: the fullest, beside the mean"), "", fullest / mean, FULLEST_MAX);
                granted += seen.granted();
            }
        }
    }
    Ok(Some(granted))
}

#[derive(Clone, Copy)]
enum Kind {
    Named { refused: bool },
    Anywhere { refused: bool },
}

#[derive(Default)]
struct Seen {
    /// Answers in the window, per second.
    rate: f64,
    /// In milliseconds.
    p50: f64,
    /// Of all grants, with those of the warm-up.
    on: HashMap<EmInstance, i64>,
}

impl Seen {
    fn granted(&self) -> i64 {
        self.on.values().sum()
    }
}

async fn pair(stage: &Stage, ems: u64, count: u64, refused: bool) -> Result<(Seen, Seen), Failure> {
    Ok((
        callers(stage, ems, count, WINDOW, Kind::Named { refused }).await?,
        callers(stage, ems, count, WINDOW, Kind::Anywhere { refused }).await?,
    ))
}

/// Callers who ask again as soon as they are answered.
async fn callers(stage: &Stage, ems: u64, count: u64, window: Duration, kind: Kind) -> Result<Seen, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    let counted_from = Instant::now() + WARM_UP;
    let mut all = JoinSet::new();
    for number in 0..count {
        let (client, stop) = (stage.callers.client(number), stop.clone());
        all.spawn(async move {
            let (mut random, mut times, mut on) = (Random::new(number + 1), Vec::new(), HashMap::new());
            while !stop.load(Relaxed) {
                let request = request(kind, em(random.up_to(ems) - 1)?, random.up_to(super::callers::USERS))?;
                let begun = Instant::now();
                let answer = client.request_resource(&request).await?;
                if begun >= counted_from {
                    times.push(begun.elapsed());
                }
                match (answer, kind) {
                    (
                        ResultResource::Available(grant),
                        Kind::Named { refused: false } | Kind::Anywhere { refused: false },
                    ) => {
                        *on.entry(grant.em).or_default() += 1;
                    }
                    (
                        ResultResource::NotEnough(_),
                        Kind::Named { refused: true } | Kind::Anywhere { refused: true },
                    ) => {}
                    (answer, _) => return Err(format!("not as it should be: {answer:?}").into()),
                }
            }
            Ok::<_, Failure>((times, on))
        });
    }
    tokio::time::sleep(WARM_UP + window).await;
    stop.store(true, Relaxed);
    let (mut seen, mut times) = (Seen::default(), Vec::new());
    while let Some(done) = all.join_next().await {
        let (some, on): (Vec<Duration>, HashMap<EmInstance, i64>) = done??;
        times.extend(some);
        for (em, count) in on {
            *seen.on.entry(em).or_default() += count;
        }
    }
    seen.rate = times.len() as f64 / window.as_secs_f64();
    seen.p50 = median(times.iter().map(|time| super::findings::millis(*time)));
    Ok(seen)
}

fn request(kind: Kind, em: EmInstance, user: u64) -> Result<ResourceRequest, Failure> {
    let (Kind::Named { refused } | Kind::Anywhere { refused }) = kind;
    let mut request = ask(em, user)?;
    if refused {
        request.resource = Resource::load_instance(1, ROOM + 1, 1)?;
    }
    if matches!(kind, Kind::Anywhere { .. }) {
        request.em = None;
        request.selector = Selector { application_name: Some(Name::parse("em", KIND)?), ..Selector::default() };
    }
    Ok(request)
}
