//! Reads that a check and a batch share, so that both decide on the same rows.
//!
//! Never: writes. Locks rows only in [`clusters`], on request.
//! Callers: `admission::check` and `committer::batch`.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::Arc,
};

use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use rm_model::{
    assessment,
    em::{Em, EmInstance},
    external::{Clusters, TicketPhase, place_of},
    hold::Holds,
    ledger::WaitQueueView,
    limit::Limits,
    name::{Labels, Name},
    operation::{LockKey, PlacedRequest, RequestId},
    order::{Class, QueueRanks, RankedRequest, TurnKey},
    resource::Resource,
    scope::Scope,
    ticket::EndedTicket,
    wait_queue::{ViewExtent, ViewedKeys, WaitKey, WaitQueues, viewed_keys},
};
use rm_store::{
    StoreError, action_record,
    external_queue::{self, QueueLookup},
    external_ticket,
    request_id::{self, UsedIds},
    resource_hold,
    waiting::{self, RanksQuery},
};

/// Returns the holds in effect at the time `now`, or at present, on the EMs and users of operations, and notes them in `ems`.
/// Reads nothing if nothing is held.
pub(super) async fn holds(
    connection: &mut PgConnection,
    (any_held, now): (bool, Option<OffsetDateTime>),
    keys: impl IntoIterator<Item = LockKey>,
    ems: &mut HashMap<EmInstance, Em>,
) -> Result<Holds, StoreError> {
    if !any_held {
        return Ok(Holds::default());
    }
    let holds = resource_hold::in_effect(connection, &keys.into_iter().collect(), now).await?;
    ems.values_mut().for_each(|em| em.is_held = holds.contains(&LockKey::Em(em.instance.clone())));
    Ok(holds)
}

/// Returns the used request ids among those of `requests`, and the ended tickets that were granted under them.
pub(super) async fn request_ids(
    connection: &mut PgConnection,
    requests: &[&PlacedRequest],
) -> Result<(UsedIds, HashMap<Uuid, EndedTicket>), StoreError> {
    let asked: HashSet<(&Name, &RequestId)> =
        requests.iter().filter_map(|request| Some((&request.ask.user, request.ask.request_id.as_ref()?))).collect();
    if asked.is_empty() {
        return Ok((UsedIds::default(), HashMap::new()));
    }
    let used = request_id::read(&mut *connection, &asked).await?;
    if used.granted.is_empty() {
        return Ok((used, HashMap::new()));
    }
    let granted: Vec<Uuid> = used.granted.values().map(|record| record.grant.ticket_id).collect();
    let ended = action_record::read(&mut *connection, &granted).await?;
    Ok((used, ended))
}

/// Use of external queues by a set of operations.
#[derive(Debug, Default)]
pub(super) struct QueueUse<'a> {
    /// Requested resources, with the labels that select the cluster.
    pub asked: Vec<(&'a Resource, &'a Labels)>,
    /// Tickets, with the application id that an operation reports for them.
    pub tickets: Vec<(Uuid, Option<&'a str>)>,
}

/// Reads the clusters whose external queues are used; locks their rows if `locks`. Reads nothing if there are none.
pub(super) async fn clusters(
    connection: &mut PgConnection,
    queue_use: &QueueUse<'_>,
    locks: bool,
) -> Result<Clusters, StoreError> {
    let QueueUse { asked, tickets } = queue_use;
    if asked.is_empty() && tickets.is_empty() {
        return Ok(Clusters::default());
    }
    let providers = match asked.is_empty() {
        true => Vec::new(),
        false => external_queue::providers(&mut *connection).await?,
    };
    let ids: Vec<Uuid> = tickets.iter().map(|(id, _)| *id).collect();
    let held = match ids.is_empty() {
        true => HashMap::new(),
        false => external_ticket::read(&mut *connection, &ids).await?,
    };
    let mut wanted: BTreeMap<i64, QueueLookup> = BTreeMap::new();
    for (resource, labels) in asked {
        let Some((resource_type, name)) = place_of(resource) else { continue };
        if let Some(id) = Clusters::chosen(&providers, resource_type, labels) {
            let wanted = wanted.entry(id).or_default();
            wanted.names.insert(name.to_owned());
            wanted.application_ids.extend(resource.application_id().filter(|id| !id.is_empty()).map(str::to_owned));
        }
    }
    for (ticket_id, application_id) in tickets {
        if let Some(ticket) = held.get(ticket_id) {
            let wanted = wanted.entry(ticket.cluster_id).or_default();
            wanted.paths.insert(ticket.path.clone());
            wanted.application_ids.extend(application_id.map(str::to_owned));
            if let TicketPhase::Used { application_id: Some(known), .. } = &ticket.held.phase {
                wanted.application_ids.insert(known.clone());
            }
        }
    }
    if wanted.is_empty() {
        return Ok(Clusters::default());
    }
    let rows = external_queue::clusters(&mut *connection, &wanted.keys().copied().collect(), locks).await?;
    let clusters = external_queue::read(connection, &rows, &wanted).await?;
    Ok(Clusters::new(providers, clusters, held))
}

/// Reads the queue entries at the wait keys of `requests`, and the entries and ranks of the waiting requests `queued` and of the own
/// requests that count for them. In a batch, the decisions of the requests affect each other.
pub(super) async fn line(
    connection: &mut PgConnection,
    (requests, queued, used): (&[&PlacedRequest], &[Uuid], &UsedIds),
    is_batch: bool,
    limits: &Limits,
    clusters: &Clusters,
    holds: &Holds,
) -> Result<WaitQueueView, StoreError> {
    let keys_of = |request: &&PlacedRequest| assessment::all_wait_keys(request, limits, clusters, holds).collect();
    let keys_of: Vec<(&PlacedRequest, Vec<WaitKey>)> =
        requests.iter().map(|request| (*request, keys_of(request))).collect();
    if keys_of.is_empty() && queued.is_empty() {
        return Ok(WaitQueueView { wait_keys: Some(ViewedKeys::new()), ..WaitQueueView::default() });
    }
    let stored = |request: &PlacedRequest| used.kept_ticket(request).or(request.queued_ticket());
    let newcomer =
        |request: &PlacedRequest| RankedRequest::entering(request, limits.queue_rules(), OffsetDateTime::UNIX_EPOCH);
    let mut turns = RequestedTurns::of(&keys_of, newcomer);
    let mut ranks = waiting::ranks(&mut *connection, turns.query(queued, is_batch)).await?;
    // After a change of the order, a stored turn can differ from that of a newcomer.
    let stored_turns = RequestedTurns::of(&keys_of, |request| {
        let stored = stored(request).and_then(|ticket_id| ranks.own.get(ticket_id)).cloned();
        stored.unwrap_or_else(|| newcomer(request))
    });
    if !stored_turns.keys.is_subset(&turns.keys) {
        turns = turns.and(stored_turns);
        ranks = waiting::ranks(&mut *connection, turns.query(queued, is_batch)).await?;
    }
    let together = turns.together(is_batch);
    let wait_keys = viewed_keys(keys_of.into_iter().flat_map(|(request, wait_keys)| {
        let extent = extent(request, &ranks, together);
        wait_keys.into_iter().map(move |wait_key| (wait_key, extent))
    }));
    let guaranteed: BTreeSet<Scope> = requests.iter().flat_map(|request| request.guaranteed_scopes(limits)).collect();
    let ticket_ids: Vec<Uuid> = queued.iter().copied().chain(ranks.own.ticket_ids()).collect();
    if !guaranteed.is_empty() {
        ranks.promises = waiting::promises(&mut *connection, guaranteed, &ticket_ids).await?;
    }
    let line = waiting::line(connection, &wait_keys, &ticket_ids).await?;
    Ok(WaitQueueView { line, wait_keys: Some(wait_keys), ranks })
}

/// Turns of the requests of a decision.
struct RequestedTurns {
    /// Keys at which the requests take turns, with the turns.
    keys: BTreeSet<(Arc<str>, TurnKey)>,
    /// Largest number of requests with one turn.
    together: usize,
}

impl RequestedTurns {
    fn of(keys_of: &[(&PlacedRequest, Vec<WaitKey>)], rank: impl Fn(&PlacedRequest) -> RankedRequest) -> Self {
        let (mut keys, mut of_turn) = (BTreeSet::new(), HashMap::<_, usize>::new());
        for (request, wait_keys) in keys_of {
            let rank = rank(request);
            keys.extend(rank.turn_keys_at(wait_keys.iter().cloned()));
            *of_turn.entry(rank.turn).or_default() += 1;
        }
        Self { keys, together: of_turn.into_values().max().unwrap_or(0) }
    }

    /// Returns the turns of both: a position may be removed by an earlier decision of the batch.
    fn and(mut self, others: Self) -> Self {
        self.keys.extend(others.keys);
        Self { together: self.together.max(others.together), ..self }
    }

    /// Returns the number of requests that are decided together. Each decision of a turn may use up the first present request at a key.
    fn together(&self, is_batch: bool) -> usize {
        if is_batch { self.together } else { 1 }
    }

    fn query<'a>(&'a self, ticket_ids: &'a [Uuid], is_batch: bool) -> RanksQuery<'a> {
        RanksQuery { turn_keys: &self.keys, ticket_ids, depth: self.together(is_batch) + 2 }
    }
}

/// Returns the extent to which a decision needs the queues: up to the position of a waiting request, or all for a newcomer. Another of
/// the requests that are decided together may move it behind.
fn extent(request: &PlacedRequest, ranks: &QueueRanks, together: usize) -> ViewExtent {
    let stored = request.queued_ticket().and_then(|ticket_id| ranks.own.get(ticket_id));
    match stored.filter(|stored| stored.was_shared) {
        Some(stored) => {
            // An entitled request may lose its entitlement.
            let class = if together > 1 { Class::Behind } else { ranks.own.class_of(stored).max(Class::First) };
            ViewExtent::UpTo(stored.position().max(RankedRequest { class, ..stored.clone() }.position()))
        }
        None => ViewExtent::All,
    }
}

/// Returns the reasons of the removals of those requests that have no queue entry any more. It reads nothing in the usual case.
pub(super) async fn removed(
    connection: &mut PgConnection,
    ticket_ids: impl Iterator<Item = Uuid>,
    queues: &WaitQueues,
) -> Result<HashMap<Uuid, Name>, StoreError> {
    let missing: Vec<Uuid> = ticket_ids.filter(|ticket_id| queues.position_of(*ticket_id).is_none()).collect();
    match missing.is_empty() {
        true => Ok(HashMap::new()),
        false => action_record::removed_from_queue(connection, &missing).await,
    }
}
