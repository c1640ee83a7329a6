//! The invariants, seen from outside: what every EM counts is what its live tickets hold, and never more than there is.

use std::collections::HashMap;

use indicatif::HumanCount;
use linkis_rm::{client::RmClient, domain::ticket::TicketState};

use super::{
    calls::{APPLICATION, CallError, em_instance, repeated},
    trace::{Amounts, Node},
};

/// What a check has found.
#[derive(Debug)]
pub struct Checked {
    pub tickets: usize,
    /// What all nodes hold together.
    pub held: Amounts,
    pub violations: Vec<String>,
}

/// Compares the counters of every node with its tickets, with its total, and with what the replay knows it holds. Nothing may be
/// under way.
pub async fn counters_against_tickets(
    client: &RmClient,
    nodes: &[Node],
    expected: &[Amounts],
) -> Result<Checked, CallError> {
    let (ems, ..) = repeated(|| "listing the EMs".into(), || client.ems()).await?;
    let (tickets, ..) = repeated(|| "listing the tickets".into(), || client.tickets(None)).await?;
    let mut ems: HashMap<_, _> = ems.into_iter().map(|em| (em.instance.clone(), em)).collect();
    let mut sums: HashMap<_, (Amounts, Amounts)> = HashMap::new();
    let mut checked = Checked { tickets: 0, held: Amounts::default(), violations: vec![] };
    for ticket in tickets.into_iter().filter(|ticket| ticket.em.application_name.as_str() == APPLICATION) {
        checked.tickets += 1;
        let holds = Amounts::of_resource(ticket.resource());
        let (used, locked) = sums.entry(ticket.em).or_default();
        match ticket.state {
            TicketState::Locked { .. } => *locked = *locked + holds,
            TicketState::Used { .. } => *used = *used + holds,
        }
    }
    for (node, expected) in nodes.iter().zip(expected) {
        let instance = em_instance(node)?;
        let Some(em) = ems.remove(&instance) else {
            checked.violations.push(format!("{instance} is not registered any more"));
            continue;
        };
        let (used, locked) = (Amounts::of_resource(&em.used), Amounts::of_resource(&em.locked));
        let held = used + locked;
        checked.held = checked.held + held;
        let mut claim = |holds: bool, what: &str| {
            if !holds {
                checked.violations.push(format!("{instance}: {what}; it counts {used} used; {locked} locked"));
            }
        };
        claim((used, locked) == sums.remove(&instance).unwrap_or_default(), "counters differ from tickets");
        claim(held.fits_in(node.total()), "more is held than there is");
        claim(held == *expected, "holds something else than was granted");
    }
    checked.violations.extend(sums.into_keys().map(|em| format!("{em} has tickets but is no node of the trace")));
    Ok(checked)
}

impl Checked {
    /// One line for people.
    pub fn summary(&self, when: &str, peaks: &[&str]) -> String {
        let peaks = if peaks.is_empty() { String::new() } else { format!(" (peak of {})", peaks.join(", ")) };
        let tickets = HumanCount(self.tickets as u64);
        match self.violations.len() {
            0 => format!("checked at {when}{peaks}: {tickets} tickets live, every counter is their sum"),
            wrong => format!("checked at {when}{peaks}: {tickets} tickets live, {wrong} VIOLATIONS"),
        }
    }
}
