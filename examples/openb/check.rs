//! Check of the invariants over the API. The counters of every EM and user equal the sums of their live tickets, and
//! stay within the capacity and the limit.

use std::collections::{BTreeSet, HashMap};

use rm_client::RmClient;
use rm_model::{
    scope::{CREATOR, Tally, USER},
    ticket::{Ticket, TicketState},
};

use super::{
    calls::{APPLICATION, CallError, em_instance, repeated},
    model::Model,
    report::Thousands,
    trace::{Amounts, Node},
};

/// Used and locked amounts.
type Counters = (Amounts, Amounts);

/// Result of a check.
#[derive(Debug)]
pub struct CheckResult {
    pub tickets: usize,
    /// Amounts of all nodes together.
    pub held: Amounts,
    pub violations: Vec<String>,
}

/// Compares the counters of every node with its tickets, its total, and the model of the replay; with a limit, also
/// those of every user. No call may be in progress.
pub async fn counters_against_tickets(
    client: &RmClient,
    nodes: &[Node],
    model: &Model<'_>,
) -> Result<CheckResult, CallError> {
    let (ems, ..) = repeated(|| "listing the EMs".into(), || client.ems()).await?;
    let (tickets, ..) = repeated(|| "listing the tickets".into(), || client.tickets(None)).await?;
    let mut ems: HashMap<_, _> = ems.into_iter().map(|em| (em.instance.clone(), em)).collect();
    let (mut sums, mut of_users): (HashMap<_, Counters>, HashMap<_, Counters>) = Default::default();
    let mut checked = CheckResult { tickets: 0, held: Amounts::default(), violations: vec![] };
    for ticket in tickets.into_iter().filter(|ticket| ticket.em.application_name.as_str() == APPLICATION) {
        checked.tickets += 1;
        count(of_users.entry(ticket.user.to_string()).or_default(), &ticket);
        count(sums.entry(ticket.em.clone()).or_default(), &ticket);
    }
    for (node, expected) in nodes.iter().zip(model.nodes()) {
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
    if let Some(limit) = model.limit() {
        checked.violations.extend(users_against_tickets(client, limit, of_users, model).await?);
    }
    Ok(checked)
}

/// Compares the counters of every user with its tickets, the limit, and the model of the replay.
async fn users_against_tickets(
    client: &RmClient,
    limit: Amounts,
    of_tickets: HashMap<String, Counters>,
    model: &Model<'_>,
) -> Result<Vec<String>, CallError> {
    let (scopes, ..) = repeated(|| "listing the scopes".into(), || client.scopes()).await?;
    let mut counted = HashMap::new();
    for scope in scopes {
        let labels = scope.scope.labels();
        if let (2, Some(APPLICATION), Some(user)) =
            (labels.len(), labels.get(CREATOR).map(String::as_str), labels.get(USER))
        {
            counted.insert(user.clone(), (of_tally(&scope.usage.used), of_tally(&scope.usage.locked)));
        }
    }
    let users: BTreeSet<_> = counted.keys().chain(of_tickets.keys()).chain(model.users().keys()).collect();
    let mut violations = Vec::new();
    for user in users {
        let of = |counters: &HashMap<String, Counters>| counters.get(user).copied().unwrap_or_default();
        let (used, locked) = of(&counted);
        let held = used + locked;
        let mut claim = |holds: bool, what: &str| {
            if !holds {
                violations.push(format!("user {user}: {what}; it counts {used} used; {locked} locked"));
            }
        };
        claim((used, locked) == of(&of_tickets), "counters differ from tickets");
        claim(held.fits_in(limit), "more is held than the limit allows");
        claim(held == model.users().get(user).copied().unwrap_or_default(), "holds something else than was granted");
    }
    Ok(violations)
}

fn count((used, locked): &mut Counters, ticket: &Ticket) {
    let holds = Amounts::of_resource(ticket.resource());
    match ticket.state {
        TicketState::Locked { .. } => *locked = *locked + holds,
        TicketState::Used { .. } => *used = *used + holds,
    }
}

fn of_tally(tally: &Tally) -> Amounts {
    Amounts::by_dimension(|dimension| tally.get(dimension))
}

impl CheckResult {
    /// Returns one line, for display.
    pub fn summary(&self, when: &str, peaks: &[&str]) -> String {
        let peaks = if peaks.is_empty() { String::new() } else { format!(" (peak of {})", peaks.join(", ")) };
        let tickets = Thousands(self.tickets as u64);
        match self.violations.len() {
            0 => format!("checked at {when}{peaks}: {tickets} tickets live, every counter is their sum"),
            wrong => format!("checked at {when}{peaks}: {tickets} tickets live, {wrong} VIOLATIONS"),
        }
    }
}
