//! Repair: writes the sums of the tickets to counters that differ, one subject per transaction.
//!
//! Never: repairs while a batch can change the tickets that it counts.
//! Caller: `audit`.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use sqlx::{Connection as _, PgConnection};
use time::OffsetDateTime;

use rm_model::{
    audit::{Difference, EmTicketSums, OrphanTickets, ScopeRepair, Subject, queue_subject},
    em::EmInstance,
    ledger::{Deltas, EndedDelta},
    operation::LockKey,
    principal::Actor,
    queue::QueueAmounts,
    resource::{Resource, ResourceType},
    scope::{Scope, ScopeHoldings},
    ticket_end::TicketEnd,
};
use rm_store::{
    StoreError,
    action_record::{self, RepairAct},
    batch_write, em_resource, external_queue, external_refresh, external_snapshot, external_ticket, label_resource,
    limit, resource_hold, resource_lock, session, user_resource,
    waiting::{self, FreedNotification},
};

use super::collect::{compare_cluster, compare_scopes};

/// Maximum number of scopes that one statement writes.
const SCOPES_PER_STATEMENT: usize = 1000;

/// Result of one repair transaction.
#[derive(Debug, Default)]
pub(super) struct RepairStep {
    /// Differences that were repaired.
    pub repaired: Vec<Difference>,
    /// Differences that remain, with the reason.
    pub remaining: Vec<Difference>,
}

/// Repairs one EM under its lock, which blocks all changes of its tickets. Does nothing if the EM was removed.
///
/// # Errors
/// Database errors; [`StoreError::is_lock_timeout`] if the lock is contended.
pub(super) async fn em(connection: &mut PgConnection, em: &EmInstance, by: &Actor) -> Result<RepairStep, StoreError> {
    let mut transaction = connection.begin().await?;
    session::patient(&mut transaction).await?;
    let keys = BTreeSet::from([LockKey::Em(em.clone())]);
    let locks = resource_lock::lock(&mut transaction, &keys).await?;
    let is_held = !resource_hold::in_effect(&mut *transaction, &keys, None).await?.is_empty();
    let Some(locks) = locks.filter(|_| !is_held) else {
        transaction.rollback().await?;
        let problem =
            "an operator holds it, or a row in linkis_resource_lock locks it; release that hold, and repair again";
        let held = Difference::in_words(Subject::Em(em.clone()), "row", problem);
        return Ok(RepairStep { remaining: vec![held], ..RepairStep::default() });
    };
    // Locks the limits as each batch does, so that no rule changes and no scope is repaired meanwhile.
    limit::current(&mut transaction, &Arc::default()).await?;
    let now = locks.now;
    let done = em_under_lock(&mut transaction, em, now, by).await?;
    if done.repaired.is_empty() {
        transaction.rollback().await?;
        return Ok(done);
    }
    batch_write::write(&mut transaction, &Deltas::default(), now, Some(locks), None).await?;
    // The new sums may free capacity.
    waiting::notify(&mut *transaction, &[FreedNotification::anywhere()]).await?;
    transaction.commit().await?;
    Ok(done)
}

async fn em_under_lock(
    connection: &mut PgConnection,
    em: &EmInstance,
    now: OffsetDateTime,
    by: &Actor,
) -> Result<RepairStep, StoreError> {
    let Some(books) = em_resource::books(connection, em).await? else { return Ok(RepairStep::default()) };
    let mut sums = EmTicketSums::new(&books.total);
    let mut counted = Ok(());
    user_resource::for_each_em_group(connection, em, |group| match group {
        Ok(group) => {
            sums.count(group.held.as_ref().map_err(String::as_str), group.is_locked, group.count);
            sums.note_used(&group.used_tickets);
        }
        Err(error) => counted = Err(error),
    })
    .await?;
    counted?;
    let counters = match books.true_counters(&sums) {
        Ok(counters) => counters,
        Err(problem) => {
            let remaining = vec![Difference::unreadable(Subject::Em(em.clone()), "tickets", problem)];
            return Ok(RepairStep { remaining, ..RepairStep::default() });
        }
    };
    let differences = books.differences(&sums);
    if !differences.is_empty() {
        em_resource::repair(connection, &books, &counters).await?;
        let (subject, held) = (Subject::Em(em.clone()), counters.held());
        let repair = RepairAct { subject, held, differences: differences.clone() };
        action_record::insert_repairs(connection, &[repair], now, by).await?;
    }
    Ok(RepairStep { repaired: differences, ..RepairStep::default() })
}

/// Repairs the counters of an external cluster under its lock, which blocks its tickets and its snapshots. Does nothing if the
/// cluster was deleted.
///
/// # Errors
/// Database errors.
pub(super) async fn cluster(
    connection: &mut PgConnection,
    cluster_id: i64,
    by: &Actor,
) -> Result<RepairStep, StoreError> {
    let mut transaction = connection.begin().await?;
    session::thorough(&mut transaction).await?;
    let rows = external_queue::clusters(&mut *transaction, &[cluster_id].into(), true).await?;
    let Some(row) = rows.first() else { return Ok(RepairStep::default()) };
    let now = session::clock(&mut transaction).await?;
    let differences = compare_cluster(&mut transaction, row).await?;
    if differences.is_empty() {
        return Ok(RepairStep::default());
    }
    let strays: Vec<_> = external_ticket::strays(&mut *transaction, cluster_id).await?.into_keys().collect();
    external_ticket::delete(&mut *transaction, &strays).await?;
    let provider = row.provider.name.clone();
    let stored = external_snapshot::stored(&mut transaction, cluster_id).await?;
    let from_tickets = external_snapshot::from_tickets(&mut transaction, row).await?;
    let unseen = from_tickets.differing(&stored);
    external_snapshot::write_unseen(&mut transaction, cluster_id, &unseen).await?;
    // A snapshot that was prepared with the old counters becomes invalid.
    external_refresh::take_back(&mut *transaction, cluster_id).await?;
    let mut found: HashMap<&str, Vec<Difference>> = HashMap::new();
    for difference in &differences {
        found.entry(&difference.what).or_default().push(difference.clone());
    }
    for repairs in unseen.chunks(SCOPES_PER_STATEMENT) {
        let repair = |(path, amounts): &(String, QueueAmounts)| {
            let sums = [("queue_memory".to_owned(), amounts.memory), ("queue_cores".to_owned(), amounts.cores)];
            let held = Resource::special(sums.into()).unwrap_or_else(|_| Resource::zero(ResourceType::Special));
            let subject = queue_subject(&provider, path);
            let differences = found.get(subject.to_string().as_str()).cloned().unwrap_or_default();
            RepairAct { subject, held, differences }
        };
        let repairs: Vec<_> = repairs.iter().map(repair).collect();
        action_record::insert_repairs(&mut transaction, &repairs, now, by).await?;
    }
    waiting::notify(&mut *transaction, &[FreedNotification::anywhere()]).await?;
    transaction.commit().await?;
    Ok(RepairStep { repaired: differences, ..RepairStep::default() })
}

/// Ends the tickets on `strays`, which are EMs that do not exist, and repairs all scopes, or `only` one. Returns the
/// differences.
///
/// Runs behind the limits fence, so that no batch changes a ticket or counter between the reads and the writes.
///
/// # Errors
/// [`StoreError::Inconsistent`] if some ticket or row cannot be read.
pub(super) async fn scopes(
    connection: &mut PgConnection,
    strays: &BTreeSet<EmInstance>,
    only: Option<&Scope>,
    by: &Actor,
) -> Result<RepairStep, StoreError> {
    let mut transaction = connection.begin().await?;
    session::thorough(&mut transaction).await?;
    limit::begin_change(&mut transaction).await?;
    limit::close_fence(&mut transaction).await?;
    let limits = limit::read_unfenced(&mut transaction).await?;
    let now = session::clock(&mut transaction).await?;
    let mut differences = remove_strays(&mut transaction, strays, now, by).await?;
    let mut fixes = Vec::new();
    compare_scopes(
        &mut transaction,
        &limits,
        |_| {},
        |found, fix| {
            if only.is_none_or(|only| fix.scope() == only) {
                differences.extend(found.iter().cloned());
                fixes.push((found, fix));
            }
        },
    )
    .await?;
    if differences.is_empty() {
        transaction.rollback().await?;
        return Ok(RepairStep::default());
    }
    write_scopes(&mut transaction, fixes, now, by).await?;
    waiting::notify(&mut *transaction, &[FreedNotification::anywhere()]).await?;
    transaction.commit().await?;
    Ok(RepairStep { repaired: differences, ..RepairStep::default() })
}

/// Ends the tickets on EMs that still do not exist, as if the EM had been unregistered: they could not be released or expire.
async fn remove_strays(
    connection: &mut PgConnection,
    strays: &BTreeSet<EmInstance>,
    now: OffsetDateTime,
    by: &Actor,
) -> Result<Vec<Difference>, StoreError> {
    if strays.is_empty() {
        return Ok(vec![]);
    }
    let registered = em_resource::read(&mut *connection, strays).await?;
    let gone = strays.iter().filter(|em| !registered.contains_key(em));
    let tickets = user_resource::read_on(&mut *connection, gone).await?;
    let mut removed: HashMap<EmInstance, OrphanTickets> = HashMap::new();
    for ticket in tickets.values() {
        removed.entry(ticket.em.clone()).or_default().count(Ok(ticket.resource()), ticket.is_locked(), 1);
    }
    let ended = |ticket| EndedDelta {
        ticket,
        end: TicketEnd::Unregistered,
        stored: true,
        by: by.clone(),
        reason: by.reason.clone(),
    };
    let mut deltas = Deltas::default();
    tickets.into_values().map(ended).for_each(|ended| deltas.end(ended));
    if !deltas.ended.is_empty() {
        batch_write::write(connection, &deltas, now, None, None).await?;
    }
    Ok(removed.iter().flat_map(|(em, stray)| stray.differences(em)).collect())
}

async fn write_scopes(
    connection: &mut PgConnection,
    fixes: Vec<(Vec<Difference>, ScopeRepair)>,
    now: OffsetDateTime,
    by: &Actor,
) -> Result<(), StoreError> {
    let (mut update, mut insert, mut delete, mut repairs) = (vec![], vec![], vec![], vec![]);
    for (differences, fix) in fixes {
        let (counter, usage) = match &fix {
            ScopeRepair::Update(counter, usage) | ScopeRepair::Insert(counter, usage) => (counter, usage.clone()),
            ScopeRepair::Delete(counter, _) => (counter, ScopeHoldings::default()),
        };
        let subject = Subject::Scope(counter.scope.clone());
        repairs.push(RepairAct { subject, held: together(&usage), differences });
        match fix {
            ScopeRepair::Update(counter, usage) => update.push((counter, usage)),
            ScopeRepair::Insert(counter, usage) => insert.push((counter, usage)),
            ScopeRepair::Delete(_, hash) => delete.push(hash),
        }
    }
    // Deletions come first, because a wrong row may block the insertion of a missing one.
    for hashes in delete.chunks(SCOPES_PER_STATEMENT) {
        label_resource::delete(connection, hashes).await?;
    }
    for scopes in update.chunks(SCOPES_PER_STATEMENT) {
        batch_write::write(&mut *connection, &Deltas { scopes: scopes.to_vec(), ..Deltas::default() }, now, None, None)
            .await?;
    }
    for scopes in insert.chunks(SCOPES_PER_STATEMENT) {
        label_resource::insert(connection, scopes.to_vec()).await?;
    }
    for repairs in repairs.chunks(SCOPES_PER_STATEMENT) {
        action_record::insert_repairs(connection, repairs, now, by).await?;
    }
    Ok(())
}

/// Returns the sum of used and locked amounts of a scope, by dimension. Returns zero if a resource cannot represent it: the
/// repair matters more than its history line.
fn together(usage: &ScopeHoldings) -> Resource {
    let mut sums = BTreeMap::<String, i64>::new();
    for (dimension, amount) in usage.used.amounts().chain(usage.locked.amounts()) {
        let sum = sums.entry(dimension.key()).or_default();
        *sum = sum.saturating_add(amount);
    }
    Resource::special(sums).unwrap_or_else(|_| Resource::zero(ResourceType::Special))
}
