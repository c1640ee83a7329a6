//! Counters after a batch, from the state that the batch has in memory.
//!
//! A caller that requests counters gets its EM and the scopes of its ticket as of the commit, without a further read.
//!
//! Caller: `batch`.

use std::collections::{HashMap, HashSet};

use uuid::Uuid;

use rm_model::{
    counters::Counters,
    ledger::{Deltas, PostCommitState},
    limit::{LimitedScope, ScopeUsage},
    operation::{Operation, Outcome, Rejection},
    scope::{ScopeCounter, ScopeHoldings, StoredScopeHoldings},
    ticket::Ticket,
};

use super::batch::BatchItem;

/// Versions of scope rows as read. Empty if no caller requested counters.
pub(super) type ScopeVersions = HashMap<ScopeCounter, i64>;

/// State after a batch, indexed.
struct CounterSnapshot<'a> {
    standing: &'a PostCommitState,
    usages: HashMap<&'a ScopeCounter, &'a ScopeHoldings>,
    /// Scopes with a written row; the write increments their version.
    changed: HashSet<&'a ScopeCounter>,
    versions: &'a ScopeVersions,
    ended: HashMap<Uuid, &'a Ticket>,
}

/// Returns the counters per operation, in the order of `wanted`; empty if no operation requested them.
pub(super) fn requested_counters(
    wanted: &[BatchItem<'_>],
    answers: &[Result<Outcome, Rejection>],
    deltas: &Deltas,
    standing: &PostCommitState,
    versions: &ScopeVersions,
) -> Vec<Option<Box<Counters>>> {
    if wanted.iter().all(|wanted| !wanted.counters) {
        return vec![];
    }
    let after = CounterSnapshot {
        standing,
        usages: standing.scopes.iter().map(|(counter, usage)| (counter, usage)).collect(),
        changed: deltas.scopes.iter().map(|(counter, _)| counter).collect(),
        versions,
        ended: deltas.ended.iter().map(|ended| (ended.ticket.id, &ended.ticket)).collect(),
    };
    let of = |(wanted, answer): (&BatchItem<'_>, &Result<Outcome, Rejection>)| match answer {
        Ok(outcome) if wanted.counters => after.counters(wanted.operation, outcome),
        _ => None,
    };
    wanted.iter().zip(answers).map(of).collect()
}

impl CounterSnapshot<'_> {
    /// Returns `None` for outcomes without counters: refusals, and repeated grants, which may belong to another EM.
    fn counters(&self, operation: &Operation, outcome: &Outcome) -> Option<Box<Counters>> {
        let of_ended = || self.ended.get(&operation.ticket_id()?).map(|ticket| self.scopes(ticket));
        let scopes = match (outcome, operation.request()) {
            (Outcome::Granted(grant), Some(request)) if grant.ticket_id == request.ask.ticket_id => {
                self.usages_of(self.standing.limits.deciding(&request.ask.ticket_labels(&request.em)))
            }
            (Outcome::Adopted(ticket) | Outcome::Inited(ticket) | Outcome::Reported(ticket), _) => self.scopes(ticket),
            (Outcome::Released | Outcome::Forced(_), _) => of_ended().unwrap_or_default(),
            (Outcome::Registered(_), _) => vec![],
            _ => return None,
        };
        let em = self.standing.ems.iter().find(|em| em.instance == *operation.em()).cloned();
        Some(Box::new(Counters { em, scopes }))
    }

    fn scopes(&self, ticket: &Ticket) -> Vec<ScopeUsage> {
        self.usages_of(self.standing.limits.deciding(&ticket.ticket_labels()))
    }

    fn usages_of(&self, scopes: Vec<LimitedScope>) -> Vec<ScopeUsage> {
        let usage = |limited: LimitedScope| {
            let counter = &limited.counter;
            let usage = self.usages.get(counter).copied().cloned().unwrap_or_default();
            let read = self.versions.get(counter).copied().unwrap_or_default();
            let version = read + i64::from(self.changed.contains(counter));
            ScopeUsage::new(limited, StoredScopeHoldings { usage, version })
        };
        scopes.into_iter().map(usage).collect()
    }
}
