//! Whether the service stays as fast: minutes on end, while its tables grow and fill with dead rows.

use std::time::{Duration, Instant};

use linkis_rm::store::embedded::Embedded;

use crate::{Arguments, Failure, Workload, load::WARM_UP, service::Service, table::thousands};

const CALLERS: u64 = 256;
const INTERVAL: Duration = Duration::from_secs(10);
const INTERVALS_PER_MINUTE: u64 = 6;

/// Runs each workload for so many minutes.
pub(crate) async fn run(
    arguments: &Arguments,
    minutes: u64,
    database: &Embedded,
    machine: &str,
) -> Result<(), Failure> {
    let workloads = arguments.workloads();
    let mut service = Service::start(database, &workloads).await?;
    let mut lines = Vec::new();
    for workload in workloads {
        lines.push(watch(&mut service, workload, minutes).await?);
    }
    eprintln!("comparing the service's tables with its answers");
    let checked = service.check().await?;
    println!("\nsteady, {CALLERS} callers:\n{}\n{checked}\n\n{machine}", lines.join("\n"));
    Ok(())
}

/// Runs one workload, and answers a line about it.
async fn watch(service: &mut Service, workload: Workload, minutes: u64) -> Result<String, Failure> {
    let intervals = minutes * INTERVALS_PER_MINUTE;
    let calls = service.start_calls(workload, CALLERS);
    tokio::time::sleep(WARM_UP).await;
    let mut rates = Vec::new();
    for interval in 1..=intervals {
        let (begun, before) = (Instant::now(), calls.granted());
        tokio::time::sleep(INTERVAL).await;
        if calls.failed() {
            break;
        }
        let rate = (calls.granted() - before) as f64 / begun.elapsed().as_secs_f64();
        rates.push(rate);
        let left = (intervals - interval) * INTERVAL.as_secs();
        println!("{}: {:>8}/s, {left} s left", workload.name(), thousands(rate));
    }
    service.finish(calls).await?;
    let minute = rates.len().min(usize::try_from(INTERVALS_PER_MINUTE)?);
    let mean = |rates: &[f64]| rates.iter().sum::<f64>() / rates.len() as f64;
    let (first, last) = (mean(&rates[..minute]), mean(&rates[rates.len() - minute..]));
    let (table, index) = service.lock_table_bytes().await?;
    Ok(format!(
        "  {}: first minute {}/s, last minute {}/s: {:.2} of the first; lock table {} kB, its index {} kB",
        workload.name(),
        thousands(first),
        thousands(last),
        last / first,
        table / 1024,
        index / 1024,
    ))
}
