//! Figures of a cluster with a hundred cells and a million EMs, from the cost in one cell. A simulation of shares
//! estimates the load of the home database when a hundred thousand users have a limit over all cells.

use std::fmt::Write as _;

use crate::{random::Random, report::thousands};

use super::{BATCH_MAX, COSTS};

const CELLS: u64 = 100;
const EMS: f64 = 1_000_000.0;
const USERS: u64 = 100_000;
const MAXIMUM: u8 = 10;

/// Rate of started engines: each EM starts one per minute.
const ENGINES_PER_SECOND: f64 = EMS / 60.0;
/// Rate of reports: each EM sends one every ten seconds.
const REPORTS_PER_SECOND: f64 = EMS / 10.0;

/// Processor time of service and PostgreSQL for a single operation, in microseconds (`benches/results`).
const LONE_OPERATION: f64 = 1188.0;
/// Processor time of service and PostgreSQL for one of 256 operations in three limited scopes, in microseconds.
const OPERATION_AT_FULL_LOAD: f64 = 113.0;
/// Processor time of a report with a hundred tickets, in microseconds (`--crowds heartbeats`).
const REPORT: f64 = 259.0;
/// Maximum rate of such grants.
const GRANTS_PER_SECOND: f64 = 9652.0;
/// Rate of registrations (`--crowds heartbeats`).
const REGISTERED_PER_SECOND: f64 = 6482.0;
/// Number of connections of an instance to a database in this estimate.
const CONNECTIONS: f64 = 40.0;

/// Returns a table of the figures of a hundred cells.
pub(super) fn text() -> String {
    let cells = CELLS as f64;
    let cores = |per_second: f64, each: f64| per_second * each / 1e6;
    let (operations, full) = (ENGINES_PER_SECOND * 3.0, GRANTS_PER_SECOND * cells);
    let rows = [
        ("engines that start, report in and end", operations, Some(cores(operations, LONE_OPERATION))),
        ("reports of EMs", REPORTS_PER_SECOND, Some(cores(REPORTS_PER_SECOND, REPORT))),
        ("all that cells can grant, two cores each", full, Some(cores(full, OPERATION_AT_FULL_LOAD))),
        ("connections to a cell, if ten instances serve all", 10.0 * CONNECTIONS, None),
        ("connections of such an instance", cells * CONNECTIONS, None),
        ("seconds in which home hears where each EM is", EMS / REGISTERED_PER_SECOND, None),
    ];
    let mut text = format!("{} EMs in {CELLS} cells\n{:>50} {:>12} {:>12}", thousands(EMS), "", "number, /s", "cores");
    for (what, number, cores) in rows {
        // Writing to a string does not fail.
        let _ = write!(text, "\n{what:>50} {:>12}", thousands(number));
        if let Some(cores) = cores {
            let _ = write!(text, " {cores:>12.1}");
        }
    }
    let _ = write!(
        text,
        "\n\nlimits of {MAXIMUM} for each of {} users, by shares; of all requests\n{:>24} {:>8} {:>8} {:>8} {:>8} {:>8} {:>14} {:>22}",
        thousands(USERS as f64),
        "cells of a user",
        "wanted",
        "alone",
        "home",
        "cell",
        "refused",
        "home µs/grant",
        "grants/s, home full"
    );
    for (name, placement) in [
        ("1", Placement::Of(1)),
        ("3", Placement::Of(3)),
        ("10", Placement::Of(10)),
        ("100", Placement::Of(CELLS)),
        ("100, idle share first", Placement::IdleFirst),
    ] {
        for wanted in [MAXIMUM / 2, MAXIMUM] {
            let found = Shares::new(placement).run(u64::from(wanted));
            let _ = write!(text, "\n{name:>24} {wanted:>8} {}", found.text());
        }
    }
    text
}

/// Cells that get the requests of a user.
#[derive(Clone, Copy)]
enum Placement {
    /// Any of this number of cells.
    Of(u64),
    /// Any cell; cells with a free share of the limit come first.
    IdleFirst,
}

/// Share of a user's limit in one cell.
struct Share {
    cell: u64,
    amount: u8,
    held: u8,
}

/// Numbers of requests by result.
#[derive(Default)]
struct CellResult {
    /// Granted by the cell alone.
    alone: f64,
    /// Granted after the home database assigned a free share.
    home: f64,
    /// Granted after another cell returned an idle share.
    another: f64,
    refused: f64,
}

impl CellResult {
    fn text(&self) -> String {
        let granted = self.alone + self.home + self.another;
        let part = |number: f64| format!("{:.1} %", 100.0 * number / (granted + self.refused));
        // A change takes two commits at home; a returned share precedes an assigned one.
        let steps = 2.0 * (self.home + 2.0 * self.another) / granted;
        let step = COSTS.read.1 + COSTS.scopes.1 + COSTS.write_scopes;
        let refusals = self.refused / granted * (COSTS.read.1 + COSTS.scopes.1);
        let batch = COSTS.read.0 + COSTS.scopes.0 + COSTS.write.0;
        let taken = steps * (step + batch / BATCH_MAX as f64) + refusals;
        let waits = (5.0 * COSTS.round_trip + COSTS.flush) / BATCH_MAX as f64;
        // One committer at home, with full batches.
        let full = 1e6 / (taken + steps * waits);
        let full = if steps < 1e-3 { "-".to_owned() } else { thousands(full) };
        format!(
            "{:>8} {:>8} {:>8} {:>8} {taken:>14.2} {full:>22}",
            part(self.alone),
            part(self.home),
            part(self.another),
            part(self.refused)
        )
    }
}

struct Shares {
    placement: Placement,
    random: Random,
    users: Vec<Vec<Share>>,
    /// User and cell of each ticket.
    tickets: Vec<(usize, u64)>,
}

impl Shares {
    fn new(placement: Placement) -> Self {
        let users = (0..USERS).map(|_| vec![]).collect();
        Self { placement, random: Random::new(11), users, tickets: vec![] }
    }

    /// Runs until every user's tickets have changed often, and then as long again for the result. A user wants `wanted`
    /// tickets on average.
    fn run(mut self, wanted: u64) -> CellResult {
        let requests = 40 * USERS * wanted / 10;
        for _ in 0..requests {
            self.next(wanted, &mut CellResult::default());
        }
        let mut found = CellResult::default();
        for _ in 0..requests {
            self.next(wanted, &mut found);
        }
        found
    }

    /// Makes one request, after the ends of tickets until then. Each ticket is equally likely to end.
    fn next(&mut self, wanted: u64, found: &mut CellResult) {
        let arriving = USERS * wanted;
        while self.random.up_to(arriving + self.tickets.len() as u64) > arriving {
            let number = self.random.up_to(self.tickets.len() as u64) as usize - 1;
            let (user, cell) = self.tickets.swap_remove(number);
            if let Some(share) = self.users[user].iter_mut().find(|share| share.cell == cell) {
                share.held -= 1;
            }
        }
        let user = self.random.up_to(USERS) as usize - 1;
        let cell = self.cell(user);
        if self.request(user, cell, found) {
            self.tickets.push((user, cell));
        }
    }

    fn cell(&mut self, user: usize) -> u64 {
        let idle = self.users[user].iter().find(|share| share.held < share.amount);
        match (self.placement, idle) {
            (Placement::Of(cells), _) => (user as u64 + self.random.up_to(cells)) % CELLS,
            (Placement::IdleFirst, Some(share)) => share.cell,
            (Placement::IdleFirst, None) => self.random.up_to(CELLS) - 1,
        }
    }

    fn request(&mut self, user: usize, cell: u64, found: &mut CellResult) -> bool {
        let shares = &mut self.users[user];
        let given: u8 = shares.iter().map(|share| share.amount).sum();
        let idle = shares.iter().position(|share| share.held < share.amount);
        if !shares.iter().any(|share| share.cell == cell) {
            shares.push(Share { cell, amount: 0, held: 0 });
        }
        let here = shares.iter().position(|share| share.cell == cell).unwrap_or_default();
        if shares[here].held < shares[here].amount {
            found.alone += 1.0;
        } else if given < MAXIMUM {
            found.home += 1.0;
            shares[here].amount += 1;
        } else if let Some(idle) = idle {
            found.another += 1.0;
            shares[idle].amount -= 1;
            shares[here].amount += 1;
        } else {
            found.refused += 1.0;
            return false;
        }
        shares[here].held += 1;
        shares.retain(|share| share.amount > 0);
        true
    }
}
