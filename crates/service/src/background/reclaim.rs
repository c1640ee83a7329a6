//! Reclaim: chooses tickets of engines that are to end because requests wait, and recalls them: idle engines, and busy ones for entitled
//! requests.
//!
//! A step reads a page of the waiting requests, in the order of their positions, plans the tickets for all of them together
//! ([`rm_engine::reclaim_plan`]), and writes the changes. When the grace period of all tickets of a request has ended, one
//! transaction recalls them. It checks that engines that were chosen as idle are still idle, and that the request still waits.
//!
//! Never: ends a ticket. Its EM does, and confirms it, or the ticket is lost; until then it counts.
//! Caller: the task driver (`background`).

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use arc_swap::ArcSwap;
use sqlx::PgConnection;
use time::OffsetDateTime;
use tokio::time::Instant;
use uuid::Uuid;

use crate::admission::read_check_state;
use rm_engine::{
    observed_state::CheckState,
    reclaim_choice::{ReclaimChoice, TriedRequest, short_keys},
    reclaim_plan::{ReclaimPlan, ReclaimView},
};
use rm_model::{
    em::EmInstance,
    ledger,
    limit::{LabelPattern, LimitedScope, Limits},
    name::Name,
    operation::{LockKey, PlacedRequest},
    reclaim::{Reclaim, ReclaimMode, ReclaimPolicy, ReclaimProgress},
    report::{EmStatus, Health},
    scope::{ScopeCounter, USER},
    selector::EmSelector,
    ticket::Ticket,
    wait_queue::{QueuePosition, WaitKey},
};
use rm_store::{
    StoreError, em_report, em_resource, label_resource, limit,
    reclaim::{self, EngineStop, RECLAIMS_MAX},
    resource_hold,
    session::{self, Session, clock, within_short_timeout, within_timeout},
    user_resource::{self, ReclaimOrder, ReclaimPlace},
    waiting::{self, PresentRequest},
};
use rm_telemetry::metrics::Metrics;

use super::{
    Step, Task,
    lease::LeaseFlag,
    reclaim_places::{accepts, busy_ems, earlier_ems, idle_ems, placed, tried},
    reclaim_sweeps::Sweeps,
};

/// Maximum number of waiting requests per step: of the first ones, of later ones, and of those with due tickets.
const FIRST_REQUESTS: i64 = 50;
const LATER_REQUESTS: i64 = 50;
const DUE_REQUESTS: usize = 50;

/// Maximum age of a state from which tickets are chosen and recalled. A recall checks its tickets and its request again, but no guarantee.
const VIEW_AGE_MAX: Duration = Duration::from_secs(10);

/// Period in which a policy allows its `per_minute` ends.
const MINUTE: Duration = Duration::from_secs(60);

/// Maximum age of the read by which replies to heartbeats name tickets. Until then, a withdrawal may have no effect. A read follows each
/// second; only a slow database makes them older.
const STOPS_AGE_MAX: Duration = Duration::from_secs(5);

/// Tickets of engines that are to end, by EM, as each instance last read them. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct EngineStops(Arc<ArcSwap<ReadStops>>);

#[derive(Debug, Default)]
struct ReadStops {
    by_em: HashMap<EmInstance, Vec<EngineStop>>,
    /// Time before the read; `None` before the first one.
    read_at: Option<Instant>,
}

impl EngineStops {
    /// Returns the tickets on an EM; none by a read that is too old.
    pub fn on(&self, em: &EmInstance) -> Vec<EngineStop> {
        let stops = self.0.load();
        let is_new = stops.read_at.is_some_and(|read_at| read_at.elapsed() <= STOPS_AGE_MAX);
        stops.by_em.get(em).filter(|_| is_new).cloned().unwrap_or_default()
    }

    fn store(&self, stops: &[(EmInstance, EngineStop)], read_at: Instant) {
        let mut by_em = HashMap::<_, Vec<EngineStop>>::new();
        for (em, stop) in stops.iter().cloned() {
            by_em.entry(em).or_default().push(stop);
        }
        self.0.store(Arc::new(ReadStops { by_em, read_at: Some(read_at) }));
    }
}

/// Background task that reads the tickets of engines that are to end, for the replies to heartbeats.
#[derive(Debug)]
pub struct RefreshEngineStops(EngineStops);

impl RefreshEngineStops {
    /// Creates the task, which updates `stops`.
    pub fn new(stops: EngineStops) -> Self {
        Self(stops)
    }
}

impl Task for RefreshEngineStops {
    const NAME: &'static str = "engine_stops";
    const PERIOD: Duration = Duration::from_secs(1);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        let read_at = Instant::now();
        let read = match session.get().await {
            Ok(connection) => within_short_timeout(reclaim::to_stop(connection)).await,
            Err(error) => Err(error),
        };
        // After a failure, no engine is stopped by an earlier state.
        self.0.store(read.as_deref().unwrap_or_default(), read_at);
        read.map(|_| Step::Done)
    }
}

/// Background task that chooses engines to end. Only the owner of the lease runs.
#[derive(Debug)]
pub struct ReclaimIdle {
    holder: LeaseFlag,
    metrics: Metrics,
    limits: Arc<Limits>,
    /// This run as the writer of the rows; `None` before its first step.
    writer: Option<Uuid>,
    /// Position after which the later requests of the next step begin; `None` for those after the first ones.
    after: Option<QueuePosition>,
    /// Reads of the longest idle tickets, and of the newest used ones.
    idle: Sweeps,
    used: Sweeps,
    /// Number of the step, which selects the EMs for requests without one.
    step: u64,
    /// Time without a report after which an EM is silent.
    silent_after: Duration,
    recalls: RecallTimes,
}

/// Times of the recalls in the last minute, by policy. An instance that takes the lease over begins without times.
#[derive(Debug, Default)]
struct RecallTimes(HashMap<LabelPattern, VecDeque<Instant>>);

impl RecallTimes {
    /// Returns whether each of `policies` allows its recalls now. More than it ever allows within a minute may follow a minute without any.
    fn allow(&mut self, policies: &[ReclaimPolicy]) -> bool {
        self.0.values_mut().for_each(|times| times.retain(|at| at.elapsed() < MINUTE));
        self.0.retain(|_, times| !times.is_empty());
        policies.iter().all(|policy| {
            let wanted = policies.iter().filter(|other| other.pattern == policy.pattern).count();
            let recalled = self.0.get(&policy.pattern).map_or(0, VecDeque::len);
            recalled == 0 || u32::try_from(recalled + wanted).is_ok_and(|recalls| recalls <= policy.per_minute)
        })
    }

    /// Notes a recall for each of `policies`.
    fn note(&mut self, policies: &[ReclaimPolicy]) {
        for policy in policies {
            self.0.entry(policy.pattern.clone()).or_default().push_back(Instant::now());
        }
    }
}

impl ReclaimIdle {
    /// Creates the task. EMs without a report for `silent_after` are silent.
    pub fn new(holder: LeaseFlag, silent_after: Duration, metrics: Metrics) -> Self {
        let (limits, writer, after, recalls) = (Arc::default(), None, None, RecallTimes::default());
        let (idle, used) = (Sweeps::default(), Sweeps::default());
        Self { holder, metrics, limits, writer, after, idle, used, step: 0, silent_after, recalls }
    }

    async fn run(&mut self, session: &mut Session) -> Result<(), StoreError> {
        let connection = session.get().await?;
        self.limits = within_timeout(limit::current(&mut *connection, &self.limits)).await?;
        let writer = match self.writer {
            Some(writer) => writer,
            // Rows are read after the earlier writer has ended.
            None => {
                let writer = Uuid::new_v4();
                within_timeout(reclaim::begin(&mut *connection, writer)).await?;
                *self.writer.insert(writer)
            }
        };
        let read_at = Instant::now();
        let view = within_timeout(async {
            // All reads have one snapshot: a ticket that ends between two of them would count twice, or not at all.
            let connection = session.begin().await?;
            session::snapshot(&mut *connection).await?;
            self.view(connection).await
        });
        let view = view.await?;
        // The computation takes up to some hundred milliseconds.
        session.give_back().await;
        let Some(view) = view else { return Ok(()) };
        let Ok(plan) = tokio::task::spawn_blocking(move || view.plan()).await else { return Ok(()) };
        if read_at.elapsed() > VIEW_AGE_MAX || !self.write(session, writer, &plan).await? {
            return Ok(());
        }
        let mut exhausted = BTreeSet::new();
        for due in &plan.due {
            // A smaller set does not pass a larger one of the same policy.
            let patterns = || due.policies.iter().map(|policy| &policy.pattern);
            if patterns().any(|pattern| exhausted.contains(pattern)) || !self.recalls.allow(&due.policies) {
                exhausted.extend(patterns());
            } else if read_at.elapsed() <= VIEW_AGE_MAX && self.recall(session, writer, &due.choice).await? {
                self.recalls.note(&due.policies);
            }
        }
        Ok(())
    }

    /// Reads the state of a step; `None` if it has nothing to do.
    async fn view(&mut self, connection: &mut PgConnection) -> Result<Option<ReclaimView>, StoreError> {
        let is_active = self.limits.queue_rules().reclaim.is_active();
        let rows = reclaim::all(&mut *connection).await?;
        self.metrics.reclaim.note(&rows);
        if !is_active && rows.is_empty() {
            return Ok(None);
        }
        let page = match is_active {
            true => self.page(connection, &rows).await?,
            false => Vec::new(),
        };
        if page.is_empty() && rows.is_empty() {
            return Ok(None);
        }
        self.step = self.step.wrapping_add(1);
        self.idle.begin(self.step);
        self.used.begin(self.step);
        self.read(connection, page, rows).await.map(Some)
    }

    /// Returns waiting requests in the order of their positions: the first ones, those of a page that moves on with each step, and those
    /// with tickets that are due.
    async fn page(
        &mut self,
        connection: &mut PgConnection,
        rows: &[Reclaim],
    ) -> Result<Vec<PresentRequest>, StoreError> {
        let is_due = |row: &&Reclaim| {
            row.mode != ReclaimMode::Observe && row.progress == ReclaimProgress::Chosen { is_due: true }
        };
        let due: BTreeSet<Uuid> = rows.iter().filter(is_due).map(|row| row.for_ticket_id).collect();
        // Others in each step, because a policy may recall no more of the first ones now.
        let turn = usize::try_from(self.step).unwrap_or_default().wrapping_mul(DUE_REQUESTS) % due.len().max(1);
        let due: Vec<Uuid> = due.iter().cycle().skip(turn).take(due.len().min(DUE_REQUESTS)).copied().collect();
        let first = waiting::present(&mut *connection, None, FIRST_REQUESTS, &[]).await?;
        let of_due = waiting::present(&mut *connection, None, 0, &due).await?;
        let later = waiting::present(connection, self.after.max(first.last), LATER_REQUESTS, &[]).await?;
        self.after = later.last;
        let mut page: Vec<_> = [first, of_due, later].into_iter().flat_map(|page| page.requests).collect();
        page.sort_by_key(|present| present.position);
        page.dedup_by_key(|present| present.position);
        Ok(page)
    }

    /// Writes the new and the withdrawn rows of a plan. Returns false, without a change, if another run has begun.
    async fn write(&mut self, session: &mut Session, writer: Uuid, plan: &ReclaimPlan) -> Result<bool, StoreError> {
        if plan.new.is_empty() && plan.withdrawn.is_empty() {
            return Ok(true);
        }
        let transaction = within_timeout(session.begin()).await?;
        if !self.is_writer(&mut *transaction, writer).await? {
            return within_timeout(session.roll_back()).await.map(|()| false);
        }
        let withdrawn: Vec<Uuid> = plan.withdrawn.iter().map(|row| row.ticket_id).collect();
        within_timeout(reclaim::delete(&mut *transaction, &withdrawn)).await?;
        within_timeout(reclaim::choose(&mut *transaction, &plan.new)).await?;
        within_timeout(session.commit()).await?;
        self.metrics.reclaim.changed(plan.added, &plan.withdrawn);
        Ok(true)
    }

    /// Recalls all tickets that are chosen for a request, or none. Returns whether they were recalled.
    async fn recall(
        &mut self,
        session: &mut Session,
        writer: Uuid,
        choice: &ReclaimChoice,
    ) -> Result<bool, StoreError> {
        let tickets: Vec<Uuid> = choice.tickets.iter().map(|ticket| ticket.id).collect();
        let transaction = within_timeout(session.begin()).await?;
        if !self.is_writer(&mut *transaction, writer).await? {
            return within_timeout(session.roll_back()).await.map(|()| false);
        }
        let recalled = within_timeout(reclaim::recall(transaction, &tickets, choice.request)).await?;
        if recalled != choice.tickets.len() {
            within_timeout(session.roll_back()).await?;
            return Ok(false);
        }
        within_timeout(session.commit()).await?;
        self.metrics.reclaim.recalled.inc_by(recalled as u64);
        let busy = choice.tickets.iter().filter(|ticket| ticket.busy).count();
        self.metrics.reclaim.recalled_busy.inc_by(busy as u64);
        tracing::info!(request = %choice.request, ?tickets, busy, "tickets were recalled, because a request waits");
        Ok(true)
    }

    /// Locks the row of the writer in a transaction. Returns false if another run has begun since; the next step begins anew.
    async fn is_writer(&mut self, transaction: &mut PgConnection, writer: Uuid) -> Result<bool, StoreError> {
        let is_writer = within_timeout(reclaim::lock(transaction, writer)).await?;
        self.writer = self.writer.filter(|_| is_writer);
        Ok(is_writer)
    }

    /// Reads the state of the requests of a page, and the tickets that may end at the keys where they are short.
    async fn read(
        &mut self,
        connection: &mut PgConnection,
        page: Vec<PresentRequest>,
        rows: Vec<Reclaim>,
    ) -> Result<ReclaimView, StoreError> {
        let of_rows: Vec<Uuid> = rows.iter().map(|row| row.ticket_id).collect();
        let mut tickets = user_resource::read(&mut *connection, &of_rows).await?;
        let now = clock(&mut *connection).await?;
        // Tickets that were requested later are too young for the end of a busy engine.
        let busy_until = self.limits.queue_rules().reclaim.min_life().map(|min_life| now - min_life);
        let anywhere = BTreeSet::from([ReclaimPlace::Cell]);
        let names_no_em = |present: &PresentRequest| present.selector.is_some();
        if page.iter().any(names_no_em) {
            tickets
                .extend(self.idle.read(connection, ReclaimOrder::LongestIdle, anywhere.clone(), &self.limits).await?);
        }
        let idle_ems = idle_ems(&self.limits, &tickets);
        let can_be_entitled = |present: &PresentRequest| {
            let placed = placed(present.position, present.request.clone(), EmSelector::default());
            busy_until.is_some() && has_guarantee(&placed, &self.limits)
        };
        let busy_ems =
            match busy_until.filter(|_| page.iter().any(|present| names_no_em(present) && can_be_entitled(present))) {
                Some(until) => {
                    let order = ReclaimOrder::NewestUsed { until };
                    let used = self.used.read(connection, order, anywhere, &self.limits).await?;
                    let ems = busy_ems(&self.limits, &used);
                    tickets.extend(used);
                    ems
                }
                None => Vec::new(),
            };
        let earlier = earlier_ems(&rows);
        let ems = earlier.values().flat_map(|earlier| &earlier.ems).chain(&idle_ems).chain(&busy_ems);
        let ems = em_resource::read(&mut *connection, ems.collect::<BTreeSet<_>>()).await?;
        let tried = page.into_iter().map(|present| {
            let earlier = earlier.get(&present.request.ticket_id);
            let busy_ems = if can_be_entitled(&present) { &busy_ems[..] } else { &[] };
            tried(present, earlier, [&idle_ems, busy_ems], self.step, |em, spec| {
                ems.get(em).is_some_and(|em| accepts(em, &self.limits, spec))
            })
        });
        let mut requests: Vec<TriedRequest> = tried.collect();
        let any_em = requests.iter().flat_map(|request| &request.places).filter(|place| place.any_em);
        let of_tickets = tickets.values().map(|ticket| &ticket.em);
        let ems: BTreeSet<EmInstance> = any_em.map(|place| &place.em).chain(of_tickets).cloned().collect();
        let mut unavailable = unavailable(&mut *connection, &ems, self.silent_after).await?;
        for place in requests.iter_mut().flat_map(|request| &mut request.places) {
            place.is_em_unavailable = place.any_em && unavailable.contains(&place.em);
        }
        let places: Vec<&PlacedRequest> = requests.iter().flat_map(|request| &request.places).collect();
        let mut state = unfenced_check_state(connection, &places, &self.limits).await?;
        let short = all_short_keys(&state, &places);
        let at_short = short_places(&short);
        tickets.extend(self.idle.read(connection, ReclaimOrder::LongestIdle, at_short, &self.limits).await?);
        if let Some(until) = busy_until {
            let guaranteed: Vec<_> = places.into_iter().filter(|place| has_guarantee(place, &self.limits)).collect();
            let at_short = short_places(&all_short_keys(&state, &guaranteed));
            let order = ReclaimOrder::NewestUsed { until };
            tickets.extend(self.used.read(connection, order, at_short, &self.limits).await?);
        }
        let tickets: BTreeMap<Uuid, Ticket> = tickets.into_iter().collect();
        let others = tickets.values().map(|ticket| &ticket.em).filter(|em| !ems.contains(em)).cloned().collect();
        unavailable.extend(self::unavailable(&mut *connection, &others, self.silent_after).await?);
        read_counters(&mut *connection, &mut state, &tickets).await?;
        let is_needed = |ticket_id: &Uuid| {
            let mut scopes = tickets.get(ticket_id).into_iter().flat_map(|ticket| counters(&state, ticket));
            scopes.any(|at| short.contains(&WaitKey::Scope(at.scope().clone())))
        };
        self.idle.keep(is_needed);
        self.used.keep(is_needed);
        let held = held(connection, &tickets, now).await?;
        Ok(ReclaimView { state, requests, tickets, unavailable, rows, rows_max: RECLAIMS_MAX, held, now })
    }
}

/// Reads a check state within a transaction. The version of the limits is not locked afterwards: the next change of them, and every batch
/// behind that, would wait for the transaction.
async fn unfenced_check_state(
    connection: &mut PgConnection,
    places: &[&PlacedRequest],
    limits: &Arc<Limits>,
) -> Result<CheckState, StoreError> {
    session::savepoint(connection).await?;
    let state = read_check_state(connection, places, limits).await?;
    session::roll_back_to_savepoint(connection).await?;
    Ok(state)
}

/// Returns the tickets whose EM or user is held.
async fn held(
    connection: &mut PgConnection,
    tickets: &BTreeMap<Uuid, Ticket>,
    now: OffsetDateTime,
) -> Result<BTreeSet<Uuid>, StoreError> {
    let keys = |ticket: &Ticket| [LockKey::Em(ticket.em.clone()), LockKey::User(ticket.user.clone())];
    let holds = resource_hold::in_effect(connection, &tickets.values().flat_map(keys).collect(), Some(now)).await?;
    let is_held = |ticket: &&Ticket| keys(ticket).iter().any(|key| holds.contains(key));
    Ok(tickets.values().filter(is_held).map(|ticket| ticket.id).collect())
}

/// Reads the EMs and counters of tickets that are not in the state.
async fn read_counters(
    connection: &mut PgConnection,
    state: &mut CheckState,
    tickets: &BTreeMap<Uuid, Ticket>,
) -> Result<(), StoreError> {
    let ems = tickets.values().map(|ticket| &ticket.em);
    let ems: BTreeSet<EmInstance> = ems.filter(|em| !state.ems.contains_key(em)).cloned().collect();
    state.ems.extend(em_resource::read(&mut *connection, &ems).await?);
    let of_tickets = tickets.values().flat_map(|ticket| counters(state, ticket)).map(|limited| limited.counter);
    let counters: BTreeSet<ScopeCounter> = of_tickets.filter(|counter| !state.scopes.contains_key(counter)).collect();
    let counters = label_resource::read(connection, &counters).await?;
    state.scopes.extend(counters);
    Ok(())
}

/// Returns the counters that contain a ticket; none if the state does not contain its EM.
fn counters(state: &CheckState, ticket: &Ticket) -> Vec<LimitedScope> {
    match state.ems.get(&ticket.em) {
        Some(em) => ledger::counters(&state.limits, em.counted, ticket.id, &ticket.ticket_labels()),
        None => Vec::new(),
    }
}

/// Returns whether a request can be entitled.
fn has_guarantee(request: &PlacedRequest, limits: &Limits) -> bool {
    !request.guaranteed_scopes(limits).is_empty()
}

/// Returns those of `ems` that are silent or unhealthy.
async fn unavailable(
    connection: &mut PgConnection,
    ems: &BTreeSet<EmInstance>,
    silent_after: Duration,
) -> Result<BTreeSet<EmInstance>, StoreError> {
    let statuses = em_report::read(connection, ems, silent_after).await?;
    let is_unavailable = |status: &EmStatus| status.silent || status.health == Some(Health::Unhealthy);
    Ok(ems.iter().filter(|em| statuses.get(*em).is_some_and(is_unavailable)).cloned().collect())
}

/// Returns the keys at which requests are short.
fn all_short_keys(state: &CheckState, requests: &[&PlacedRequest]) -> BTreeSet<WaitKey> {
    requests.iter().flat_map(|request| short_keys(state, request)).collect()
}

/// Returns the places of the keys at which requests are short.
fn short_places(short: &BTreeSet<WaitKey>) -> BTreeSet<ReclaimPlace> {
    let place = |wait_key: &WaitKey| match wait_key {
        WaitKey::Em(em) => Some(ReclaimPlace::Em(em.clone())),
        WaitKey::Scope(scope) => Some(match scope.labels().get(USER) {
            Some(user) => ReclaimPlace::User(Name::parse(USER, user).ok()?),
            None => ReclaimPlace::Cell,
        }),
        WaitKey::Queue { .. } => None,
    };
    short.iter().filter_map(place).collect()
}

impl Task for ReclaimIdle {
    const NAME: &'static str = "reclaim";
    const PERIOD: Duration = Duration::from_secs(1);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        if !self.holder.holds() {
            self.writer = None;
            self.metrics.reclaim.note(&[]);
            return Ok(Step::Done);
        }
        let begun = Instant::now();
        let done = self.run(session).await;
        self.metrics.reclaim.step.observe(begun.elapsed().as_secs_f64());
        done.map(|()| Step::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tickets_of_late_read_are_not_named() {
        let (stops, em) = (EngineStops::default(), EmInstance::parse("em", "linkis", "host1:1").unwrap());
        for (age, named) in [(Duration::ZERO, 1), (STOPS_AGE_MAX * 2, 0)] {
            let stop = EngineStop { ticket_id: Uuid::nil(), busy: false };
            stops.store(&[(em.clone(), stop)], Instant::now() - age);
            assert_eq!(stops.on(&em).len(), named, "{age:?}");
        }
    }
}
