//! Plan of the chosen tickets: which are new, which are withdrawn, and which are recalled.
//!
//! A plan is made for some of the waiting requests. Rows for other requests stay: neither these requests nor their tickets count. A recalled
//! ticket counts as ended. So repeated plans of an unchanged state are equal, and no capacity is chosen twice. Tickets that are only observed
//! are chosen last, because they do not come back.
//!
//! Never: writes a row. Caller: the task `reclaim`.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use time::OffsetDateTime;
use uuid::Uuid;

use rm_model::{
    em::EmInstance,
    limit::Limits,
    reclaim::{NewReclaim, Reclaim, ReclaimFor, ReclaimMode, ReclaimPolicy, ReclaimProgress},
    ticket::{Ticket, TicketState},
};

use super::{
    observed_state::CheckState,
    reclaim_choice::{EarlierChoice, EngineActivity, ReclaimChoice, ReclaimTrial, ReclaimableTicket, TriedRequest},
};

/// State from which a plan is made.
#[derive(Debug)]
pub struct ReclaimView {
    /// State of the requests, with the EMs and counters of all tickets.
    pub state: CheckState,
    /// Waiting requests, in the order of their positions.
    pub requests: Vec<TriedRequest>,
    /// Live tickets of the rows, and, where the requests are short, the longest idle and the newest used ones.
    pub tickets: BTreeMap<Uuid, Ticket>,
    /// EMs that are silent or unhealthy. They stop no engine.
    pub unavailable: BTreeSet<EmInstance>,
    /// Tickets whose EM or user an operator holds: their ends would wait.
    pub held: BTreeSet<Uuid>,
    /// All rows, the earliest choice first.
    pub rows: Vec<Reclaim>,
    /// Maximum number of rows whose tickets may come back, and a quarter of that of all rows.
    pub rows_max: usize,
    /// Database time.
    pub now: OffsetDateTime,
}

/// Changes of the rows.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ReclaimPlan {
    /// Rows to insert or replace.
    pub new: Vec<NewReclaim>,
    /// Number of rows to insert.
    pub added: usize,
    /// Rows to delete.
    pub withdrawn: Vec<Reclaim>,
    /// Requests whose tickets are all to be recalled.
    pub due: Vec<DueChoice>,
}

/// A choice whose grace periods have ended.
#[derive(Debug, PartialEq, Eq)]
pub struct DueChoice {
    /// The choice.
    pub choice: ReclaimChoice,
    /// Policy of each ticket.
    pub policies: Vec<ReclaimPolicy>,
}

/// Part of a row in the next choice.
enum RowPart {
    /// The choice decides anew. A row that it does not take is deleted.
    Open,
    /// It is recalled, and counts as ended.
    Coming,
    /// It stays, and serves a request that is not tried now.
    Kept,
    /// Its ticket stays, and is not chosen.
    Staying {
        /// Whether it was recalled, so that its engine may end late.
        may_end: bool,
    },
    /// The row is deleted.
    Withdrawn,
}

/// Rows by their parts.
#[derive(Default)]
struct RowParts<'a> {
    open: BTreeMap<Uuid, (usize, &'a Reclaim)>,
    coming: Vec<&'a Reclaim>,
    /// Rows whose tickets stay, and whose engines may end late.
    may_end: Vec<&'a Reclaim>,
    kept: Vec<&'a Reclaim>,
    /// Tickets that are not chosen.
    others: BTreeSet<Uuid>,
    withdrawn: Vec<Reclaim>,
    /// Number of rows whose tickets come back, without those that are only observed.
    count: usize,
}

impl ReclaimView {
    /// Makes the plan.
    pub fn plan(self) -> ReclaimPlan {
        let mut parts = self.parts();
        let is_observed = |reclaimable: &ReclaimableTicket| {
            self.policy(&reclaimable.ticket).is_some_and(|policy| policy.mode == ReclaimMode::Observe)
        };
        let (observed, recalled): (Vec<ReclaimableTicket>, Vec<ReclaimableTicket>) =
            self.tickets.values().filter_map(|ticket| self.reclaimable(ticket, &parts)).partition(is_observed);
        let entitled = self.entitled();
        let Self { state, requests, tickets, rows_max, .. } = &self;
        let (limits, mut plan) = (state.limits.clone(), ReclaimPlan::default());
        let mut trial = ReclaimTrial::new(self.state.clone());
        let coming = parts.coming.iter().filter_map(|row| tickets.get(&row.ticket_id));
        coming.for_each(|ticket| trial.end(ticket));
        let late = parts.may_end.iter().filter_map(|row| tickets.get(&row.ticket_id));
        late.for_each(|ticket| trial.may_end(ticket));
        let (kept_observed, kept): (Vec<&Reclaim>, Vec<&Reclaim>) =
            parts.kept.iter().partition(|row| row.mode == ReclaimMode::Observe);
        kept.into_iter().for_each(|row| trial.leave(row.for_ticket_id));
        let mut reserves = BTreeSet::new();
        let mut choices = trial.choose(requests, &recalled);
        kept_observed.into_iter().for_each(|row| trial.leave(row.for_ticket_id));
        choices.extend(trial.choose(requests, &observed));
        for choice in choices {
            let (mut new, mut added, mut is_due, mut policies) = (Vec::new(), 0, true, Vec::new());
            for ticket in &choice.tickets {
                // An own request that is behind has its turn first, and the guarantee then: until then, others would get the capacity.
                is_due &= !ticket.busy || entitled.contains(&(choice.request, &choice.em));
                let Some(policy) = tickets.get(&ticket.id).and_then(|ticket| policy_of(&limits, ticket)) else {
                    continue;
                };
                let row = parts.open.remove(&ticket.id).map(|(_, row)| row);
                // The grace period continues if another request needs the ticket.
                let stored = row.filter(|row| has_grace(row, policy, ticket.busy));
                is_due &= policy.mode != ReclaimMode::Observe && stored.is_some_and(is_row_due);
                added += usize::from(row.is_none());
                let is_stored = |row: &Reclaim| {
                    row.for_ticket_id == choice.request && row.for_em == choice.em && row.busy == ticket.busy
                };
                if !stored.is_some_and(is_stored) {
                    new.push(NewReclaim {
                        ticket_id: ticket.id,
                        for_ticket_id: choice.request,
                        for_em: choice.em.clone(),
                        mode: policy.mode,
                        busy: ticket.busy,
                        grace: policy.grace,
                    });
                }
                policies.push(policy.clone());
            }
            let is_observed = policies.iter().any(|policy| policy.mode == ReclaimMode::Observe);
            let of_kind = if is_observed { self.rows.len() } else { parts.count };
            let has_room = |count: usize, max: usize| added == 0 || count + plan.added + added <= max;
            if has_room(of_kind, *rows_max) && has_room(self.rows.len(), 4 * rows_max) {
                plan.added += added;
                plan.new.extend(new);
                if is_due {
                    plan.due.push(DueChoice { choice, policies });
                } else if !is_observed {
                    // The grace period of a busy engine continues, in case that the idle ones get tasks.
                    let is_reserve = |row: &&Reclaim| row.busy && row.for_ticket_id == choice.request;
                    let reserve = parts.open.values().map(|(_, row)| *row).filter(is_reserve);
                    reserves.extend(reserve.map(|row| row.ticket_id));
                }
            }
        }
        plan.withdrawn = parts.withdrawn;
        parts.open.retain(|ticket_id, _| !reserves.contains(ticket_id));
        plan.withdrawn.extend(parts.open.into_values().map(|(_, row)| row.clone()));
        plan
    }

    fn parts(&self) -> RowParts<'_> {
        let tried: BTreeSet<Uuid> = self.requests.iter().map(|request| request.ticket_id).collect();
        let mut parts = RowParts::default();
        for (number, row) in self.rows.iter().enumerate() {
            let policy = self.tickets.get(&row.ticket_id).and_then(|ticket| self.policy(ticket));
            match part_of(row, policy, &tried) {
                RowPart::Open => drop(parts.open.insert(row.ticket_id, (number, row))),
                RowPart::Coming => {
                    parts.others.insert(row.ticket_id);
                    parts.coming.push(row);
                }
                RowPart::Kept => {
                    parts.others.insert(row.ticket_id);
                    parts.kept.push(row);
                }
                RowPart::Staying { may_end } => {
                    parts.others.insert(row.ticket_id);
                    parts.may_end.extend(may_end.then_some(row));
                }
                RowPart::Withdrawn => parts.withdrawn.push(row.clone()),
            }
        }
        let rows = parts.open.values().map(|(_, row)| *row).chain(parts.coming.iter().chain(&parts.kept).copied());
        parts.count = rows.filter(|row| row.mode != ReclaimMode::Observe).count();
        parts
    }

    /// Returns the requests that are entitled, each with the EM, if busy engines can end for them.
    fn entitled(&self) -> BTreeSet<(Uuid, &EmInstance)> {
        let places = self.requests.iter().flat_map(|request| &request.places);
        let entitled = places.filter(|place| self.state.is_entitled(place));
        match self.state.limits.queue_rules().reclaim.min_life() {
            Some(_) => entitled.map(|place| (place.ask.ticket_id, &place.em)).collect(),
            None => BTreeSet::new(),
        }
    }

    fn policy(&self, ticket: &Ticket) -> Option<&ReclaimPolicy> {
        policy_of(&self.state.limits, ticket)
    }

    /// Returns a ticket as a candidate; `None` if its policy or its EM does not let its engine end now.
    fn reclaimable(&self, ticket: &Ticket, parts: &RowParts<'_>) -> Option<ReclaimableTicket> {
        let policy = self.policy(ticket)?;
        let activity = self.activity(ticket, policy)?;
        let em = self.state.ems.get(&ticket.em)?;
        let can_stop = em.is_registered() && !self.held.contains(&ticket.id) && !self.unavailable.contains(&ticket.em);
        let row = parts.open.get(&ticket.id);
        let busy = matches!(activity, EngineActivity::Busy { .. });
        let stored = row.filter(|(_, row)| has_grace(row, policy, busy));
        let reclaimable = ReclaimableTicket {
            ticket: ticket.clone(),
            activity,
            ready_at: stored.map_or(self.now + policy.grace, |(_, row)| row.due_time),
            chosen: row.map(|(number, row)| EarlierChoice { number: *number, request: row.for_ticket_id }),
        };
        (can_stop && !parts.others.contains(&ticket.id)).then_some(reclaimable)
    }

    /// Returns the activity of an engine; `None` if its policy does not let it end yet.
    fn activity(&self, ticket: &Ticket, policy: &ReclaimPolicy) -> Option<EngineActivity> {
        let TicketState::Used { idle_since, .. } = ticket.state else { return None };
        if let Some(since) = idle_since.filter(|since| *since + policy.idle_after <= self.now) {
            return Some(EngineActivity::Idle { since });
        }
        if !policy.busy || ticket.locked_time + policy.min_life > self.now {
            return None;
        }
        let rule = self.state.limits.queue_rules().priorities.deciding(&ticket.ticket_labels());
        let (is_working, priority) = (idle_since.is_none(), rule.map_or(0, |rule| rule.default));
        Some(EngineActivity::Busy { is_working, priority, granted: Reverse(ticket.locked_time) })
    }
}

/// Returns the policy of a ticket; `None` if none lets its engine end.
pub fn policy_of<'a>(limits: &'a Limits, ticket: &Ticket) -> Option<&'a ReclaimPolicy> {
    limits.queue_rules().reclaim.deciding(&ticket.ticket_labels()).filter(|policy| policy.mode != ReclaimMode::Off)
}

/// Returns whether the grace period of a row continues for a choice by this policy. A row of an idle engine has none for a busy one.
fn has_grace(row: &Reclaim, policy: &ReclaimPolicy, busy: bool) -> bool {
    row.mode == policy.mode && (row.busy || !busy)
}

/// Returns whether the policy of a row does not let its engine end as it was chosen.
fn has_changed(row: &Reclaim, policy: &ReclaimPolicy) -> bool {
    row.mode != policy.mode || row.busy && !policy.busy
}

fn is_row_due(row: &Reclaim) -> bool {
    row.progress == ReclaimProgress::Chosen { is_due: true }
}

fn part_of(row: &Reclaim, policy: Option<&ReclaimPolicy>, tried: &BTreeSet<Uuid>) -> RowPart {
    match (row.progress, row.request) {
        (ReclaimProgress::Ended { .. } | ReclaimProgress::Continued, _) => RowPart::Withdrawn,
        (ReclaimProgress::Withdrawn { is_over: true, .. }, _) => RowPart::Withdrawn,
        // Also without a policy, because a later one must not choose it at once.
        (ReclaimProgress::Withdrawn { is_over: false, was_recalled }, _) => RowPart::Staying { may_end: was_recalled },
        _ if policy.is_none_or(|policy| row.is_recalled() && has_changed(row, policy)) => RowPart::Withdrawn,
        (ReclaimProgress::Recalled, _) => RowPart::Coming,
        (ReclaimProgress::Unanswered { is_over }, _) => {
            if is_over {
                RowPart::Withdrawn
            } else {
                RowPart::Staying { may_end: true }
            }
        }
        (ReclaimProgress::Chosen { .. }, ReclaimFor::Gone) => RowPart::Open,
        (ReclaimProgress::Chosen { is_due: true }, ReclaimFor::Absent) => RowPart::Open,
        (ReclaimProgress::Chosen { .. }, ReclaimFor::Present) if tried.contains(&row.for_ticket_id) => RowPart::Open,
        (ReclaimProgress::Chosen { .. }, _) => RowPart::Kept,
    }
}

#[cfg(test)]
#[path = "reclaim_tests.rs"]
mod tests;
