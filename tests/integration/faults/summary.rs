//! The summary of a run: faults, replies and results.

use std::{collections::BTreeMap, time::Duration};

use super::{
    checks::Findings,
    injector::{Fault, Toll},
    journal::Book,
};

pub fn print(book: &Book, tolls: &BTreeMap<Fault, Toll>, findings: &Findings) {
    println!("\n{:<26}{:>9}{:>18}{:>18}", "fault", "injected", "longest outage", "after its end");
    for (fault, toll) in tolls {
        let (outage, recovery) = (seconds(toll.outage), seconds(toll.recovery));
        println!("{:<26}{:>9}{outage:>18}{recovery:>18}", fault.name(), toll.injected);
    }
    println!("\n{:<26}slowest answer that the database is away", "broken");
    for (broken, slowest) in &book.slowest {
        println!("{broken:<26}{:>18}", seconds(*slowest));
    }
    println!("\n{:<26}answers", "call");
    for (kind, answers) in &book.calls {
        let answers = answers.iter().map(|(answer, count)| format!("{answer} {count}")).collect::<Vec<_>>();
        println!("{kind:<26}{}", answers.join(", "));
    }
    let Findings { granted, ended, unacknowledged, latest_expiry, most_due, em_lines, goings, judged } = findings;
    let ended = ended.iter().map(|(end, count)| format!("{end} {count}")).collect::<Vec<_>>().join(", ");
    println!("\n{granted} tickets ({unacknowledged} of them not acknowledged): {ended}");
    let (late, calm) = latest_expiry;
    println!("the latest expiry was {} late; nothing was broken for {} of it", seconds(*late), seconds(*calm));
    println!("the most deadlines in one second were {most_due}");
    let (count, largest, (longest, calm)) = (goings.count, goings.largest, goings.longest);
    println!(
        "{count} times an EM went, with up to {largest} tickets, the last of which ended {} later at most; nothing was broken for {} of it",
        seconds(longest),
        seconds(calm)
    );
    println!("{} lines granted something on an EM, {} filled it", em_lines.grew, em_lines.full);
    println!(
        "limits came into force {} times, {} changes left something over them; {} commits and {} lines granted something under one, {} commits filled it",
        judged.in_force, judged.lowered, judged.commits, judged.lines, judged.full
    );
    println!("{} violations\n", book.violations.len());
}

fn seconds(time: Duration) -> String {
    format!("{:.2} s", time.as_secs_f64())
}
