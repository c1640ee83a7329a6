//! One audit in one snapshot: compares EMs, scopes and external queues with their tickets.
//!
//! Never: locks a row. All reads are in one read-only transaction.
//! Callers: `audit` and `repair`.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use sqlx::{Connection as _, PgConnection};

use rm_model::{
    audit::{
        AuditReport, Difference, EmTicketSums, OrphanTickets, ScopeRepair, ScopeTicketSums, StoredEmCounters,
        StoredScopeCounters, queue_differences, queue_subject,
    },
    em::EmInstance,
    hold::ExistingHold,
    limit::{Limits, ScopeUsage},
    limit_mode::LimitMode,
    name::Name,
    resource::ResourceError,
    scope::{Scope, ScopeCounter, ScopeHoldings, StoredScopeHoldings},
};
use rm_store::{
    StoreError,
    audit_reader::{self, AuditRow},
    external_queue::{self, ClusterRow},
    external_snapshot, external_ticket, label_resource, label_set, limit, resource_hold, session,
    user_resource::{self, EmTicketGroup, TicketGroup},
};

/// Result of an audit, with the subjects to repair.
pub(super) struct AuditFindings {
    pub report: AuditReport,
    /// EMs with a difference.
    pub ems: BTreeSet<EmInstance>,
    /// EMs that do not exist but have tickets.
    pub strays: BTreeSet<EmInstance>,
    /// Whether some scope differs.
    pub scopes: bool,
    /// Clusters with a difference in an external queue, with the names of their providers.
    pub clusters: BTreeMap<i64, Name>,
    /// Rows that cannot be read, and so cannot be repaired.
    pub unreadable: Vec<Difference>,
}

impl AuditFindings {
    fn unreadable(&mut self, what: &str, error: StoreError) {
        let difference = Difference::unreadable(what, "row", error);
        self.unreadable.push(difference.clone());
        self.report.differences.extend([difference]);
    }

    fn compare(&mut self, books: &StoredEmCounters, sums: &EmTicketSums) {
        self.report.ems += 1;
        let em = &books.instance;
        let differences = books.differences(sums);
        if !differences.is_empty() {
            self.ems.insert(em.clone());
            self.report.differences.extend(differences);
        } else if books.over_committed {
            self.report.note(|| {
                format!("em={em} has more in use than it provides; no dimension that is short is granted there")
            });
        }
    }
}

/// Audits all counters in one snapshot, without a lock that blocks a batch.
///
/// # Errors
/// Database errors.
pub(super) async fn snapshot(connection: &mut PgConnection) -> Result<AuditFindings, StoreError> {
    let mut transaction = connection.begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
    let at = session::thorough(&mut transaction).await?;
    let mut findings = AuditFindings {
        report: AuditReport::new(at),
        ems: BTreeSet::new(),
        strays: BTreeSet::new(),
        scopes: false,
        clusters: BTreeMap::new(),
        unreadable: Vec::new(),
    };
    ems(&mut transaction, &mut findings).await?;
    scopes(&mut transaction, &mut findings).await?;
    clusters(&mut transaction, &mut findings).await?;
    let room = i64::try_from(AuditReport::NOTES_MAX.saturating_sub(findings.report.notes.len())).unwrap_or(0);
    for hold in resource_hold::list(&mut *transaction, room).await? {
        findings.report.note(|| match &hold.taken {
            None => format!("{} is locked by a row in linkis_resource_lock; calls on it wait", hold.key),
            Some(ExistingHold { reason, by, until, .. }) => {
                format!("{} has a hold of {by} until {until} ({reason}); calls on it wait", hold.key)
            }
        });
    }
    transaction.rollback().await?;
    Ok(findings)
}

/// Whether one scope differs, without a lock that blocks a batch.
///
/// # Errors
/// As of [`compare_scopes`].
pub(super) async fn differs(connection: &mut PgConnection, scope: &Scope) -> Result<bool, StoreError> {
    let mut transaction = connection.begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
    session::thorough(&mut transaction).await?;
    let limits = limit::read_unfenced(&mut transaction).await?;
    let mut differs = false;
    let compared = compare_scopes(&mut transaction, &limits, |_| {}, |_, fix| differs |= fix.scope() == scope).await;
    transaction.rollback().await?;
    compared.map(|()| differs)
}

async fn ems(connection: &mut PgConnection, findings: &mut AuditFindings) -> Result<(), StoreError> {
    let mut current: Option<(Box<StoredEmCounters>, EmTicketSums)> = None;
    let mut strays: BTreeMap<EmInstance, OrphanTickets> = BTreeMap::new();
    audit_reader::for_each_em(connection, |told| match told {
        AuditRow::Em(books) => {
            if let Some((books, sums)) = current.take() {
                findings.compare(&books, &sums);
            }
            let sums = EmTicketSums::new(&books.total);
            current = Some((books, sums));
        }
        AuditRow::Tickets(EmTicketGroup { em, held, is_locked, count, used_tickets }) => {
            findings.report.tickets += u64::from(count);
            let held = held.as_ref().map_err(String::as_str);
            match &mut current {
                Some((books, sums)) if books.instance == em => {
                    sums.count(held, is_locked, count);
                    sums.note_used(&used_tickets);
                }
                _ => strays.entry(em).or_default().count(held, is_locked, count),
            }
        }
        AuditRow::Unreadable { em, error } => findings.unreadable(&em, error),
    })
    .await?;
    if let Some((books, sums)) = current {
        findings.compare(&books, &sums);
    }
    for (em, stray) in &strays {
        findings.report.differences.extend(stray.differences(em));
    }
    findings.strays = strays.into_keys().collect();
    Ok(())
}

async fn scopes(connection: &mut PgConnection, findings: &mut AuditFindings) -> Result<(), StoreError> {
    let limits = limit::read_unfenced(connection).await?;
    let (mut count, mut over) = (0, Vec::new());
    let compared = compare_scopes(
        connection,
        &limits,
        |row| {
            count += 1;
            if let Ok(usage) = &row.usage
                && over.len() < AuditReport::NOTES_MAX
            {
                let stored = StoredScopeHoldings { usage: usage.clone(), version: 0 };
                let scope = ScopeUsage::new(limits.of_counter(row.counter.clone()), stored);
                let is_short = scope.is_over_in(LimitMode::Enforced);
                over.extend(scope.is_over().then_some((scope.scope, is_short)));
            }
        },
        |found, _| {
            findings.scopes = true;
            findings.report.differences.extend(found);
        },
    )
    .await;
    findings.report.scopes = count;
    for set in limits.label_sets().filter(|set| !set.is_counted) {
        let labels = set.counting.keys.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        findings
            .report
            .note(|| format!("the scopes of the labels {labels} are still being counted, and are not compared"));
    }
    for (rule, uncounted) in limits.rules().filter_map(|(rule, _)| Some((rule, rule.check_labels().err()?))) {
        findings.report.note(|| format!("limit {}, of an earlier release, {uncounted}", rule.pattern));
    }
    for (scope, is_short) in over {
        findings.report.note(|| match is_short {
            true => {
                format!("scope {scope} has more in use than its limit; no dimension that is short is granted there")
            }
            false => format!("scope {scope} has more in use than its advisory limit"),
        });
    }
    match compared {
        Err(error @ StoreError::Inconsistent { .. }) => findings.unreadable("scopes", error),
        compared => return compared,
    }
    Ok(())
}

async fn clusters(connection: &mut PgConnection, findings: &mut AuditFindings) -> Result<(), StoreError> {
    let ids: BTreeSet<i64> = external_queue::providers(&mut *connection).await?.into_iter().map(|(id, _)| id).collect();
    for row in external_queue::clusters(&mut *connection, &ids, false).await? {
        let differences = compare_cluster(connection, &row).await?;
        if !differences.is_empty() {
            findings.clusters.insert(row.id, row.provider.name.clone());
            findings.report.differences.extend(differences);
        }
    }
    Ok(())
}

/// Returns all differences between a cluster's external queues and the tickets.
pub(super) async fn compare_cluster(
    connection: &mut PgConnection,
    row: &ClusterRow,
) -> Result<Vec<Difference>, StoreError> {
    let provider = row.provider.name.clone();
    let stored = external_snapshot::stored(connection, row.id).await?;
    let from_tickets = external_snapshot::from_tickets(connection, row).await?;
    let mut differences = queue_differences(&provider, &stored, from_tickets.rooms().all_unseen());
    for (ticket_id, path) in external_ticket::strays(&mut *connection, row.id).await? {
        let problem = format!("the ticket {ticket_id} is counted there, but has ended");
        differences.push(Difference::in_words(queue_subject(&provider, &path), "ticket", problem));
    }
    Ok(differences)
}

/// Compares all scopes with the tickets. Calls `see` for each row, and `found` for each scope with a difference, with its
/// repair.
///
/// # Errors
/// [`StoreError::Inconsistent`] if some ticket or row cannot be read: no sum can then be trusted.
pub(super) async fn compare_scopes(
    connection: &mut PgConnection,
    limits: &Limits,
    mut see: impl FnMut(&StoredScopeCounters),
    mut found: impl FnMut(Vec<Difference>, ScopeRepair),
) -> Result<(), StoreError> {
    let known = label_set::ids(&mut *connection).await?;
    let any_counted = limits.label_sets().any(|set| set.is_counted);
    let sums = if any_counted { true_sums(connection, limits).await? } else { HashMap::new() };
    let mut sums = ScopeTicketSums::new(limits, known, sums);
    let mut unreadable = Ok(());
    label_resource::for_each_scope(connection, |row| match row {
        Ok(row) => {
            see(&row);
            if let Some((differences, fix)) = sums.compare(&row) {
                found(differences, fix);
            }
        }
        Err(error) => unreadable = Err(error),
    })
    .await?;
    sums.missing().for_each(|(differences, fix)| found(differences, fix));
    unreadable
}

/// Returns the use of the live tickets in each scope of the label sets that are counted.
///
/// # Errors
/// [`StoreError::Inconsistent`] for a ticket that cannot be counted.
async fn true_sums(
    connection: &mut PgConnection,
    limits: &Limits,
) -> Result<HashMap<ScopeCounter, ScopeHoldings>, StoreError> {
    let mut sums: HashMap<ScopeCounter, ScopeHoldings> = HashMap::new();
    let mut counted = Ok(());
    user_resource::for_each_group(connection, |group| {
        let count = group.and_then(|group| count(&mut sums, limits, &group));
        if counted.is_ok() {
            counted = count;
        }
    })
    .await?;
    counted.map(|()| sums)
}

fn count(
    sums: &mut HashMap<ScopeCounter, ScopeHoldings>,
    limits: &Limits,
    group: &TicketGroup,
) -> Result<(), StoreError> {
    let being_counted: BTreeSet<i64> = limits.label_sets().filter(|set| !set.is_counted).map(|set| set.id).collect();
    for limited in limits.scopes(&group.ticket.ticket_labels()) {
        if being_counted.contains(&limited.counter.label_set_id) {
            continue;
        }
        let usage = sums.entry(limited.counter.clone()).or_default();
        let held = if group.ticket.is_locked() { &mut usage.locked } else { &mut usage.used };
        let overflow = |error: ResourceError| StoreError::inconsistent("linkis_user_resource_meta_data", error);
        held.add(limited.share(group.ticket.resource()), group.count).map_err(overflow)?;
    }
    Ok(())
}
