//! The audit: recomputes every counter from the tickets, at one moment, while others go on granting. The repair writes what the
//! tickets say where an audit finds that something differs.
//!
//! - `look`: one audit, in one snapshot;
//! - `repair`: EMs one by one under their locks; scopes, and tickets on no EM, while nobody counts; external clusters under theirs.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use sqlx::PgConnection;
use tokio::sync::{Mutex, MutexGuard, OwnedSemaphorePermit};

use crate::{
    domain::{
        audit::{AuditReport, Difference, RepairTarget, Repaired, Subject},
        em::EmInstance,
        operation::Rejection,
        principal::Actor,
        scope::Scope,
    },
    error::Error,
    metrics::cluster::{AuditFigures, json, seconds},
    store::{
        Store, StoreError,
        cluster_figure::{self, AUDIT, Figure},
        em_resource, limit,
        session::{Session, answered_soon, answered_within},
    },
};

use super::standby::{Reading, Standby};

mod look;
mod repair;

use repair::Done;

/// How long an audit or a repair may take: no single statement takes so long, so it is passed only if the database is silent, or if
/// there is very much to repair.
const TIMEOUT: Duration = Duration::from_secs(600);

/// How long an audit waits for another to end.
const TURN_WAIT: Duration = Duration::from_secs(10);

/// Audits and repairs.
#[derive(Clone, Debug)]
pub struct AuditService {
    store: Store,
    standby: Standby,
    /// One at a time: each reads everything.
    turn: Arc<Mutex<()>>,
}

impl AuditService {
    /// On top of the store, and of its standby for what nobody asked for.
    pub fn new(store: Store, standby: Standby) -> Self {
        Self { store, standby, turn: Arc::default() }
    }

    /// Compares everything that is stored with what the tickets say at one moment. Its memory grows with the scopes, not
    /// with the EMs or the tickets.
    pub async fn audit(&self) -> Result<AuditReport, Error> {
        let _turns = self.turn().await?;
        // Of its own: if the caller goes, it is closed, and the database stops.
        let mut session = self.store.operator_session();
        let report = answered_within(TIMEOUT, look::snapshot(session.get().await?)).await?.report;
        self.note(&mut session, &report).await;
        Ok(report)
    }

    /// The same, of a standby if there is one: everything is read, and nobody waits for what it says of the last moments.
    ///
    /// # Errors
    /// As of [`AuditService::audit`].
    pub async fn audit_of_standby(&self) -> Result<AuditReport, Error> {
        let turns = self.turn().await?;
        if let Some(Reading { mut connection, guard }) = self.standby.acquire().await? {
            let read = Box::pin(async { Ok(answered_within(TIMEOUT, look::snapshot(&mut connection)).await?.report) });
            if let Some(mut report) = guard.answered(read).await? {
                report.at = guard.mark.at;
                self.note(&mut self.store.operator_session(), &report).await;
                return Ok(report);
            }
        }
        drop(turns);
        Box::pin(self.audit()).await
    }

    /// Has the metrics of all instances tell what was found.
    async fn note(&self, session: &mut Session, report: &AuditReport) {
        let differences = u32::try_from(report.differences.count).unwrap_or(u32::MAX).into();
        let figures = AuditFigures { differences, at: seconds(report.at) };
        let noted = async {
            let figure = Figure { json: json(&figures), at: report.at };
            cluster_figure::write(session.get().await?, AUDIT, &figure).await
        };
        if let Err(error) = answered_soon(noted).await {
            tracing::warn!(error = &error as &dyn std::error::Error, "what an audit found is not in the metrics");
        }
    }

    /// Waits until nobody else audits: not for long, and not too many at once.
    async fn turn(&self) -> Result<(OwnedSemaphorePermit, MutexGuard<'_, ()>), Error> {
        let admitted = self.store.operators().admit()?;
        let turn = tokio::time::timeout(TURN_WAIT, self.turn.lock()).await.map_err(|_| Error::Overloaded)?;
        Ok((admitted, turn))
    }

    /// Audits, and writes what the tickets say where something differs. What a caller that goes leaves undone, the next one does.
    ///
    /// # Errors
    /// [`Rejection::EmNotRegistered`], [`Rejection::ScopeNotCounted`], if it is for one alone.
    pub async fn repair(&self, by: &Actor, only: Option<&RepairTarget>) -> Result<Repaired, Error> {
        let mut session = self.store.operator_session();
        let repaired = match only {
            // It reads no more than that EM's tickets: many may do that at once.
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
        // Whoever looks at the metrics wants to know whether it helped.
        if let Err(error) = answered_soon(cluster_figure::is_outdated(session.get().await?, AUDIT)).await {
            tracing::warn!(error = &error as &dyn std::error::Error, "the metrics tell of a repair after an hour");
        }
        Ok(repaired)
    }
}

async fn repair_em(connection: &mut PgConnection, em: &EmInstance, by: &Actor) -> Result<Repaired, Error> {
    if em_resource::read(&mut *connection, [em]).await?.is_empty() {
        return Err(Rejection::EmNotRegistered(em.clone()).into());
    }
    let mut repaired = Repaired::default();
    let done = repair::em(connection, em, by).await;
    absorb(&mut repaired, &Subject::Em(em.clone()).to_string(), done)?;
    Ok(repaired)
}

async fn repair_scope(connection: &mut PgConnection, scope: &Scope, by: &Actor) -> Result<Repaired, Error> {
    if limit::current(&mut *connection, &Arc::default()).await?.deciding_at(scope).is_none() {
        return Err(Rejection::ScopeNotCounted { keys: scope.keys() }.into());
    }
    let mut repaired = Repaired::default();
    let subject = Subject::Scope(scope.clone()).to_string();
    match look::differs(connection, scope).await {
        Ok(false) => {}
        Ok(true) => {
            let done = repair::scopes(connection, &BTreeSet::new(), Some(scope), by).await;
            absorb(&mut repaired, &subject, done)?;
        }
        Err(error) => absorb(&mut repaired, &subject, Err(error))?,
    }
    Ok(repaired)
}

async fn repair_all(connection: &mut PgConnection, by: &Actor) -> Result<Repaired, Error> {
    let found = look::snapshot(connection).await?;
    let mut repaired = Repaired::default();
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

/// Takes in what one transaction repaired. What one cannot do must not keep the next from being done.
fn absorb(repaired: &mut Repaired, what: &str, done: Result<Done, StoreError>) -> Result<(), Error> {
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
