//! Crowd `rules`: very many limits, one for each user by name, compared with a single limit for each user.

use std::{
    fmt::Write as _,
    fs,
    time::{Duration, Instant},
};

use rm_client::RmClient;
use rm_model::{
    limit::{LabelPattern, Rule},
    name::Name,
    resource::Dimension,
};

use crate::{Failure, process::TemporaryDir, random::Random, sample::median};

use super::{
    callers::{ask_for, em},
    closed::{self, WINDOW},
    findings::{Findings, millis},
    stage::Stage,
};

/// Numbers of limits, one after the other. The wanted rate of grants is a fraction of the rate with a single limit.
const SIZES: [(u64, f64); 2] = [(10_000, 0.9), (100_000, 0.8)];

const EMS: u64 = 100;
const MANY: u64 = 256;
const ROOM: u64 = 1_000_000_000;

/// Number of limits that are changed one after another, beside others.
const CHANGES: u64 = 50;
const LIMIT: Duration = Duration::from_secs(120);

pub(crate) async fn pass(stage: &mut Stage, findings: &mut Findings) -> Result<Option<i64>, Failure> {
    stage.callers.register(EMS).await?;
    let dir = TemporaryDir::create()?;
    let mut granted = 0;
    for (full, wanted) in SIZES {
        let users = stage.scaled(full);
        let file = dir.path().join("limits.toml");
        let each = format!("[[limit]]\neach = [\"user\"]\nmax = {{ instances = {ROOM} }}\n");
        let mut of_each = String::new();
        for number in 0..users {
            writeln!(
                of_each,
                "[[limit]]\nlabels = {{ user = \"{}\" }}\nmax = {{ instances = {ROOM} }}",
                user(number)?
            )?;
        }
        for _ in 0..stage.options.rounds {
            let mut rates = Vec::new();
            for limits in [&each, &of_each] {
                fs::write(&file, limits)?;
                let begun = Instant::now();
                stage.restart(&["--limits", file.to_str().unwrap_or_default()]).await?;
                if rates.len() == 1 {
                    findings.measured(
                        format!("{full} rules: a server starts with them"),
                        "s",
                        begun.elapsed().as_secs_f64(),
                    );
                }
                let request =
                    move |random: &mut Random| ask_for(em(random.up_to(EMS) - 1)?, user(random.up_to(users) - 1)?);
                let seen = closed::ask(&stage.callers, MANY, WINDOW, false, request).await?;
                rates.push(seen.rate);
                granted += seen.granted();
            }
            findings.measured(format!("{full} users, one rule for each of them"), "/s", rates[0]);
            findings.at_least(
                format!("{full} users, a rule of their own: beside that"),
                "",
                rates[1] / rates[0],
                wanted,
            );
            let client = stage.callers.client(0);
            let name = format!("{CHANGES} of {full} rules are changed");
            let Some(times) = stage.pair(findings, &name, LIMIT, change(client, users)).await? else {
                findings.unfinished.push(format!("{name}: not done at the time limit"));
                return Ok(None);
            };
            findings.measured(format!("{name}: each"), "ms", median(times));
        }
    }
    Ok(Some(granted))
}

fn user(number: u64) -> Result<Name, Failure> {
    Ok(Name::parse("user", &format!("ruled{number}"))?)
}

async fn change(client: RmClient, users: u64) -> Result<Vec<f64>, Failure> {
    let mut times = Vec::new();
    for number in 0..CHANGES {
        let pattern = LabelPattern::new([("user".to_owned(), Some(user(number % users)?.to_string()))].into());
        let most = i64::try_from(ROOM + number)?;
        let begun = Instant::now();
        client
            .set_limit(&Rule {
                pattern,
                mode: Default::default(),
                max: [(Dimension::Instances, most)].into(),
                guarantee: Default::default(),
            })
            .await?;
        times.push(millis(begun.elapsed()));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(times)
}
