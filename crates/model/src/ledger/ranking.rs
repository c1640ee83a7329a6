//! Ranks in the ledger: the position at which a request is decided, and the own requests that a decision promotes or moves behind.
//!
//! A request whose position changes is woken: its next check may grant it, and its call learns the position. Where it moves behind,
//! its old entries count as freed. A batch changes only requests that it has read; every check computes the class of its request
//! again, so that a missed promotion costs time.

use std::collections::BTreeSet;

use uuid::Uuid;

use super::{
    super::{
        assessment::all_wait_keys,
        guarantee::GuaranteeCheck,
        operation::PlacedRequest,
        order::{Class, DecidedRank, QueueRanks, RankedRequest},
        scope::ScopeCounter,
        wait_queue::{WaitKey, WaitKeys},
    },
    Ledger, RerankedDelta, WaitQueueView,
    queueing::StoredEntry,
};

impl Ledger {
    /// Returns the rank of a request, and the position at which it is assessed; `None` for a newcomer if no request waits at its keys.
    pub(super) fn decided(&self, op: &PlacedRequest, entry: Option<StoredEntry>) -> Option<DecidedRank> {
        let WaitQueueView { line, ranks, .. } = &self.line;
        let is_alone = entry.is_none() && line.is_empty() && ranks.own.is_empty();
        (!is_alone).then(|| self.decide(op, entry))
    }

    fn decide(&self, op: &PlacedRequest, entry: Option<StoredEntry>) -> DecidedRank {
        let wait_keys = all_wait_keys(op, &self.limits, &self.clusters, &self.holds);
        let usage = |counter: &ScopeCounter| self.scopes.get(counter).map(|slot| &slot.usage);
        let stored = entry.map(|_| op.ask.ticket_id);
        self.line.ranks.decide(op, stored, wait_keys, (&self.limits, self.now), usage)
    }

    /// Returns the rank of a newcomer.
    pub(super) fn newcomer(&self, op: &PlacedRequest) -> RankedRequest {
        self.decide(op, None).rank
    }

    /// Lets a request be entitled only if the own requests that have fallen behind it leave enough: those with other keys have not.
    pub(super) fn confirm_entitlement(&mut self, op: &PlacedRequest, rank: RankedRequest) -> RankedRequest {
        let usage = |counter: &ScopeCounter| self.scopes.get(counter).map(|slot| &slot.usage);
        let check = GuaranteeCheck { request: op, displaced: &BTreeSet::new(), limits: &self.limits };
        if rank.class != Class::Entitled || self.line.ranks.promises.is_entitled(check, usage) {
            return rank;
        }
        let rank = RankedRequest { class: Class::First, ..rank };
        self.line.ranks.own.replace(rank.clone());
        rank
    }

    /// Sets the scopes in which a waiting request is entitled. Returns whether they have changed.
    pub(super) fn promise(&mut self, op: &PlacedRequest, class: Class) -> bool {
        let scopes = if class == Class::Entitled { op.guaranteed_scopes(&self.limits) } else { Vec::new() };
        self.line.ranks.promises.set(op.ask.ticket_id, scopes, op.resource())
    }

    /// Sets the keys where a request is short, and returns its rank with them.
    pub(super) fn requeue(&mut self, rank: RankedRequest, wait_keys: &WaitKeys) -> RankedRequest {
        let ticket_id = rank.ticket_id;
        let short = wait_keys.iter().filter(|(_, is_short)| **is_short);
        let short_at = short.map(|(wait_key, _)| wait_key.clone()).collect();
        let now = self.line.ranks.rank_time(self.now);
        let QueueRanks { own, latest, .. } = &mut self.line.ranks;
        // The keys of an absent request are not stored.
        let known = own.get(ticket_id).filter(|stored| !stored.is_absent).map(|stored| stored.short_at.clone());
        let was_behind = own.get(ticket_id).is_some_and(|stored| stored.is_absent && stored.class == Class::Behind);
        own.replace(RankedRequest { short_at: known.unwrap_or_default(), ..rank.clone() });
        own.requeue(ticket_id, short_at, now);
        if was_behind {
            own.begin_turn(ticket_id, now);
        }
        let after = own.get(ticket_id).cloned().unwrap_or(rank);
        *latest = (*latest).max(Some(after.rank_time));
        self.rerank(Some(ticket_id));
        after
    }

    /// Ends the promise to a request that leaves the queue. Another request may be entitled, except where the ticket now counts.
    pub(super) fn end_promise(&mut self, ticket_id: Uuid, stays_at: &WaitKeys) {
        let left = self.line.ranks.promises.remove(ticket_id).into_iter().map(WaitKey::Scope);
        let freed = left.filter(|wait_key| !stays_at.contains_key(wait_key));
        freed.for_each(|wait_key| self.deltas.freed.add(wait_key, 1));
    }

    /// Uses the turn of a granted request up, if it was queued.
    pub(super) fn use_turn(&mut self, rank: &RankedRequest) {
        let now = self.line.ranks.rank_time(self.now);
        let QueueRanks { own, latest, absent_turns, .. } = &mut self.line.ranks;
        if own.get(rank.ticket_id).is_none() {
            return;
        }
        *latest = Some(now);
        own.replace(rank.clone());
        own.granted(rank.ticket_id, now);
        if rank.class != Class::Behind
            && let Some(turn) = rank.turn.as_ref().and_then(|turn| absent_turns.take(turn))
        {
            own.use_absent(&turn);
            self.deltas.turns_used.insert(turn, now);
        }
        self.rerank(None);
    }

    /// Hands the turn of a request on that leaves the queue without a grant.
    pub(super) fn leave_turn(&mut self, ticket_id: Uuid) {
        self.line.ranks.own.left(ticket_id);
        self.rerank(None);
    }

    /// Moves the entries of the requests whose ranks have changed, except those of the request that is being decided.
    fn rerank(&mut self, decided: Option<Uuid>) {
        let own = &mut self.line.ranks.own;
        for (ticket_id, before) in own.take_reranked() {
            let Some(position) = own.get(ticket_id).map(RankedRequest::position) else { continue };
            if decided == Some(ticket_id) {
                continue;
            }
            if position > before {
                let left = self.line.line.keys_of(ticket_id).into_keys();
                left.for_each(|wait_key| self.deltas.freed.add_reservation(wait_key));
            }
            if position != before {
                self.line.line.set_position(position);
                self.deltas.woken.insert(ticket_id, position);
            }
            if own.get(ticket_id).is_some_and(|rank| rank.class == Class::Behind) {
                self.line.ranks.promises.remove(ticket_id);
            }
            self.reranked.entry(ticket_id).or_insert(before);
        }
    }

    /// Completes the deltas with the ranks at the end of the batch.
    pub(super) fn rank_deltas(&mut self) {
        let own = &self.line.ranks.own;
        let waiting = self.deltas.waiting.iter_mut().map(|delta| &mut delta.rank);
        for rank in waiting.chain(self.deltas.moved.iter_mut().map(|delta| &mut delta.rank)) {
            if let Some(last) = own.get(rank.ticket_id) {
                rank.clone_from(last);
            }
            self.reranked.remove(&rank.ticket_id);
        }
        let reranked = std::mem::take(&mut self.reranked).into_iter();
        self.deltas.reranked.extend(
            reranked
                .filter_map(|(ticket_id, before)| Some(RerankedDelta { before, rank: own.get(ticket_id)?.clone() })),
        );
        let line = &self.line.line;
        self.deltas.woken.retain(|ticket_id, position| match own.get(*ticket_id) {
            Some(rank) => {
                *position = rank.position();
                true
            }
            None => line.position_of(*ticket_id) == Some(*position),
        });
    }
}
