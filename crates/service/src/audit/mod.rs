//! Audit: recomputes each counter from the tickets in one snapshot, while batches run. Repair: writes the sums of the tickets
//! where an audit finds a difference.
//!
//! Audits are serialized per instance, because each reads all tickets.
//! Never: an audit blocks a batch; a repair changes a ticket of an existing EM.
//! Callers: `rm_edge::admin` and `background::self_audit`.
//!
//! - `collect`: one audit, in one snapshot;
//! - `repair`: EMs one by one under their locks; scopes, and tickets without an EM, behind the limits fence; external clusters
//!   under their locks.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use async_recursion::async_recursion as boxed;
use sqlx::PgConnection;
use tokio::sync::{Mutex, MutexGuard, OwnedSemaphorePermit};

use crate::error::Error;
use rm_model::{
    audit::{AuditReport, Difference, RepairReport, RepairTarget, Subject},
    em::EmInstance,
    operation::Rejection,
    principal::Actor,
    scope::Scope,
};
use rm_store::{
    Store, StoreError,
    cluster_figure::{self, AUDIT, ClusterFigure},
    em_resource, limit,
    session::{Session, answered_within, within_short_timeout},
};
use rm_telemetry::cause;
use rm_telemetry::metrics::cluster::{AuditFigures, json, seconds};

mod collect;
mod repair;

use repair::RepairStep;

/// Timeout of an audit or repair. Each statement is much shorter, so it passes only if the database does not reply or very much
/// must be repaired.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Maximum wait of an audit for another one.
const TURN_WAIT: Duration = Duration::from_secs(10);

/// Service for audits and repairs. Clones share it.
#[derive(Clone, Debug)]
pub struct AuditService {
    store: Store,
    /// Serializes audits: each reads all tickets.
    turn: Arc<Mutex<()>>,
}

impl AuditService {
    /// Creates the service.
    pub fn new(store: Store) -> Self {
        Self { store, turn: Arc::default() }
    }

    /// Compares all stored counters with the tickets in one snapshot. Memory grows with the number of scopes, not of EMs or
    /// tickets.
    ///
    /// # Errors
    /// [`Error::Overloaded`] if another audit does not end in time; database errors.
    #[boxed]
    pub async fn audit(&self) -> Result<AuditReport, Error> {
        let _turns = self.turn().await?;
        // A session of its own: if the caller is gone, the connection is closed, and the database cancels the statement.
        let mut session = self.store.operator_session();
        let report = answered_within(TIMEOUT, collect::snapshot(session.get().await?)).await?.report;
        self.note(&mut session, &report).await;
        Ok(report)
    }

    /// Stores the result for the metrics of all instances.
    async fn note(&self, session: &mut Session, report: &AuditReport) {
        let differences = u32::try_from(report.differences.count).unwrap_or(u32::MAX).into();
        let figures = AuditFigures { differences, at: seconds(report.at) };
        let noted = async {
            let figure = ClusterFigure { json: json(&figures), at: report.at };
            cluster_figure::write(session.get().await?, AUDIT, &figure).await
        };
        if let Err(error) = within_short_timeout(noted).await {
            tracing::warn!(error = cause(&error), "the result of an audit could not be published as metrics");
        }
    }

    /// Waits up to [`TURN_WAIT`] for the permit to audit. The number of waiting calls is bounded.
    async fn turn(&self) -> Result<(OwnedSemaphorePermit, MutexGuard<'_, ()>), Error> {
        let admitted = self.store.operators().admit()?;
        let turn = tokio::time::timeout(TURN_WAIT, self.turn.lock()).await.map_err(|_| Error::Overloaded)?;
        Ok((admitted, turn))
    }

    /// Audits, and writes the sums of the tickets where they differ, for all subjects or `only` one. A cancelled repair is
    /// continued by the next one.
    ///
    /// # Errors
    /// [`Rejection::EmNotRegistered`] or [`Rejection::ScopeNotCounted`] for a single subject; otherwise as of
    /// [`AuditService::audit`].
    #[boxed]
    pub async fn repair(&self, by: &Actor, only: Option<&RepairTarget>) -> Result<RepairReport, Error> {
        let mut session = self.store.operator_session();
        let repaired = match only {
            // Reads only the tickets of that EM, so several such repairs may run at once.
            Some(RepairTarget::Em(em)) => {
                let _admitted = self.store.operators().admit()?;
                answered_within(TIMEOUT, repair_em(session.get().await?, em, by)).await?
            }
            Some(RepairTarget::Scope(scope)) => {
                let _turns = self.turn().await?;
                answered_within(TIMEOUT, repair_scope(session.get().await?, scope, by)).await?
            }
            None => {
                let _turns = self.turn().await?;
                answered_within(TIMEOUT, repair_all(session.get().await?, by)).await?
            }
        };
        // The next scheduled audit is due immediately, so that the metrics show the effect.
        if let Err(error) = within_short_timeout(cluster_figure::is_outdated(session.get().await?, AUDIT)).await {
            tracing::warn!(error = cause(&error), "the metrics show a repair after an hour");
        }
        Ok(repaired)
    }
}

async fn repair_em(connection: &mut PgConnection, em: &EmInstance, by: &Actor) -> Result<RepairReport, Error> {
    if em_resource::read(&mut *connection, [em]).await?.is_empty() {
        return Err(Rejection::EmNotRegistered(em.clone()).into());
    }
    let mut repaired = RepairReport::default();
    let done = repair::em(connection, em, by).await;
    absorb(&mut repaired, &Subject::Em(em.clone()).to_string(), done)?;
    Ok(repaired)
}

async fn repair_scope(connection: &mut PgConnection, scope: &Scope, by: &Actor) -> Result<RepairReport, Error> {
    if limit::current(&mut *connection, &Arc::default()).await?.deciding_at(scope).is_none() {
        return Err(Rejection::ScopeNotCounted { keys: scope.keys() }.into());
    }
    let mut repaired = RepairReport::default();
    let subject = Subject::Scope(scope.clone()).to_string();
    match collect::differs(connection, scope).await {
        Ok(false) => {}
        Ok(true) => {
            let done = repair::scopes(connection, &BTreeSet::new(), Some(scope), by).await;
            absorb(&mut repaired, &subject, done)?;
        }
        Err(error) => absorb(&mut repaired, &subject, Err(error))?,
    }
    Ok(repaired)
}

async fn repair_all(connection: &mut PgConnection, by: &Actor) -> Result<RepairReport, Error> {
    let found = collect::snapshot(connection).await?;
    let mut repaired = RepairReport::default();
    repaired.remaining.extend(found.unreadable);
    for em in &found.ems {
        let done = repair::em(connection, em, by).await;
        absorb(&mut repaired, &Subject::Em(em.clone()).to_string(), done)?;
    }
    if found.scopes || !found.strays.is_empty() {
        let done = repair::scopes(connection, &found.strays, None, by).await;
        absorb(&mut repaired, "scopes", done)?;
    }
    for (cluster_id, provider) in &found.clusters {
        let done = repair::cluster(connection, *cluster_id, by).await;
        absorb(&mut repaired, &format!("queues of the provider {provider}"), done)?;
    }
    Ok(repaired)
}

/// Adds the result of one repair transaction. A failure of one subject does not stop the others.
fn absorb(repaired: &mut RepairReport, what: &str, done: Result<RepairStep, StoreError>) -> Result<(), Error> {
    match done {
        Ok(done) => {
            for Difference { what, counter, stored, from_tickets, problem } in &done.repaired {
                tracing::warn!(what, counter, ?stored, ?from_tickets, problem, "repaired");
            }
            repaired.repaired.extend(done.repaired);
            repaired.remaining.extend(done.remaining);
        }
        Err(error @ StoreError::Inconsistent { .. }) => {
            repaired.remaining.extend([Difference::unreadable(what, "tickets", error)]);
        }
        Err(error) if error.is_lock_timeout() || error.is_race() => {
            repaired.remaining.extend([Difference::in_words(
                what,
                "row",
                "another transaction locks or writes it; end that transaction, and repair again",
            )]);
        }
        Err(error) => return Err(error.into()),
    }
    Ok(())
}
