//! Probes of database hosts: one task per host, and checks of pooled connections.
//!
//! A probe reads whether the host accepts writes, its timeline, and its backend process. No probe delays the probe of
//! another host. Caller: the parent module.

use std::{
    sync::{Arc, Weak, atomic::Ordering},
    time::Duration,
};

use sqlx::{ConnectOptions as _, PgConnection, Row as _};
use tokio::{task::JoinSet, time::timeout};

use super::{
    super::{
        StoreError,
        citus::{self, TableSet},
        endpoint::{self, DatabaseEndpoint},
        session::{self, ALIVE_TIMEOUT, LATE_AFTER},
    },
    PrimaryInner,
    host_states::{HostObservation, HostState},
};

/// Intervals between probes of a host while there is a primary, and while there is none.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_secs(1);
pub(super) const SEARCH_INTERVAL: Duration = Duration::from_millis(100);

/// Minimum delay between two probes of a host, however many are requested.
pub(super) const LOOK_PAUSE: Duration = Duration::from_millis(20);

/// Probes every host in its own task. Starts new tasks when the hosts are replaced.
pub(super) async fn probe_all(shared: Arc<PrimaryInner>) {
    let mut known = shared.known.subscribe();
    loop {
        let (round, hosts) = {
            let known = known.borrow_and_update();
            (known.round, known.hosts.len())
        };
        let mut looking = JoinSet::new();
        (0..hosts).for_each(|index| drop(looking.spawn(probe(shared.clone(), index))));
        if known.wait_for(|known| known.round != round).await.is_err() {
            return;
        }
    }
}

async fn probe(shared: Arc<PrimaryInner>, index: usize) {
    let (mut asked, mut connection, mut last) = (shared.asked.subscribe(), None, HostState::Unseen);
    loop {
        let question = *asked.borrow_and_update();
        let hosts = shared.hosts.load_full();
        let Some(endpoint) = hosts.each.get(index) else { return };
        let looking = look(&mut connection, endpoint, hosts.timeout, &shared.tables);
        tokio::pin!(looking);
        let state = match timeout(LATE_AFTER, &mut looking).await {
            Ok(state) => state,
            Err(_) => {
                shared.mark_slow(index);
                looking.await
            }
        };
        // A host without free connection slots keeps its state: the existing connections still work.
        if !state.is_full()
            || matches!(last, HostState::Unseen | HostState::NotYet(_) | HostState::Unfit(_) | HostState::Away { .. })
        {
            last = state;
        }
        shared.note(index, HostObservation { state: last.clone(), question });
        tokio::time::sleep(LOOK_PAUSE).await;
        // The sender lives as long as `shared`.
        let _ = timeout(shared.rest(), asked.changed()).await;
    }
}

/// Connection on which a host is probed, and the process id of its backend when it was opened.
struct ProbeConnection {
    connection: PgConnection,
    pid: i32,
}

/// Probes a host on the connection of the last probe, or on a new one if that no longer responds.
async fn look(
    kept: &mut Option<ProbeConnection>,
    endpoint: &DatabaseEndpoint,
    longest: Duration,
    tables: &TableSet,
) -> HostState {
    if let Some(mut last) = kept.take() {
        match timeout(ALIVE_TIMEOUT, ask(&mut last, tables)).await {
            Ok(Ok(state)) => {
                *kept = Some(last);
                return state;
            }
            Ok(Err(error @ StoreError::Unfit { .. })) => return HostState::Unfit(Arc::new(error)),
            Ok(Err(_)) | Err(_) => {}
        }
    }
    let opened = async {
        let mut connection = endpoint.options.connect().await?;
        let pid = endpoint.prepare(&mut connection).await?;
        endpoint.probe(&mut connection, pid).await?;
        let mut opened = ProbeConnection { connection, pid };
        let state = ask(&mut opened, tables).await?;
        Ok::<_, StoreError>((opened, state))
    };
    match timeout(longest, opened).await {
        Ok(Ok((opened, state))) => {
            *kept = Some(opened);
            state
        }
        Ok(Err(error @ (StoreError::Unfit { .. } | StoreError::Encoding { .. }))) => HostState::Unfit(Arc::new(error)),
        Ok(Err(error)) => {
            let (is_between, error) = (error.is_starting(), Arc::new(error));
            if is_between { HostState::NotYet(error) } else { HostState::Away { error, is_silent: false } }
        }
        Err(_) => HostState::Away { error: Arc::new(sqlx::Error::PoolTimedOut.into()), is_silent: true },
    }
}

/// Reads the state of a host.
async fn ask(kept: &mut ProbeConnection, tables: &TableSet) -> Result<HostState, StoreError> {
    let ProbeConnection { connection, pid } = kept;
    // Plain text, not prepared: behind a transaction pooler, a prepared statement may belong to another session.
    let row = sqlx::raw_sql(
        "-- primary::ask
        SELECT pg_is_in_recovery(), current_setting('transaction_read_only') = 'on',
            CASE WHEN pg_is_in_recovery() THEN 0
                ELSE ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::bigint END, pg_backend_pid()",
    )
    .fetch_one(&mut *connection)
    .await?;
    if row.try_get::<i32, _>(3)? != *pid {
        return Err(endpoint::shared());
    }
    Ok(match (row.try_get(0)?, row.try_get(1)?) {
        (true, _) => HostState::InRecovery,
        (false, true) => HostState::ReadOnly,
        (false, false) => match tables {
            TableSet::Local(cell) if !citus::is_here(connection, cell).await? => HostState::Elsewhere,
            _ => HostState::Writable(row.try_get(2)?),
        },
    })
}

/// Returns whether the host of a connection accepts writes.
pub(super) async fn takes_writes(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    let takes_none = "SELECT pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on'";
    sqlx::query_scalar(takes_none).fetch_one(connection).await.map(|takes_none: bool| !takes_none)
}

/// Pings a pooled connection. A failure is counted and requests a probe of all hosts.
pub(super) async fn check(shared: Weak<PrimaryInner>, connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    let checked = session::check(connection).await;
    if let (Err(_), Some(shared)) = (&checked, shared.upgrade()) {
        shared.losses.fetch_add(1, Ordering::AcqRel);
        shared.ask();
    }
    checked.map(|()| true)
}

/// Prepares a new pooled connection. Never returns if the connection is unusable or its host accepts no writes. An
/// error would make the pool retry the same host in a loop, with a log line each time.
pub(super) async fn check_new(
    shared: Weak<PrimaryInner>,
    endpoint: DatabaseEndpoint,
    connection: &mut PgConnection,
) -> Result<(), sqlx::Error> {
    match endpoint.prepare(connection).await {
        Ok(_) if takes_writes(connection).await? => return Ok(()),
        Ok(_) => {}
        Err(StoreError::Database(error)) => return Err(error),
        Err(error) => {
            tracing::warn!(error = &error as &dyn std::error::Error, "a new database connection is unusable");
        }
    }
    if let Some(shared) = shared.upgrade() {
        shared.doubt(shared.generation());
    }
    std::future::pending().await
}
