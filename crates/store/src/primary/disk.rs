//! Full disk of the database: detected by a failed write, and ended by a successful write of more than one page.
//!
//! The state affects readiness only. Calls are still executed, because reads and small writes may succeed.

use std::time::Duration;

use async_recursion::async_recursion as boxed;
use sqlx::{Connection as _, PgConnection};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    super::{StoreError, session::within_timeout},
    Lender, NoPrimaryReason, Primary,
};

/// Interval between trial writes while the disk is full.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// Interval between warnings about a full disk.
const WARN_INTERVAL: Duration = Duration::from_secs(10);

impl Primary {
    /// Makes the instance not ready if `error` reports a full disk.
    pub(in super::super) fn note_failure(&self, error: &StoreError) {
        if !error.is_disk_full() {
            return;
        }
        self.shared.known.send_if_modified(|known| {
            let is_news = known.full_disk.is_none();
            known.full_disk.get_or_insert_with(|| error.missing());
            is_news
        });
    }

    /// Tries a write every second while the disk is full, until `stopping`. The first successful write makes the
    /// instance ready.
    #[boxed]
    pub async fn watch_disk(self, stopping: CancellationToken) {
        let mut known = self.shared.known.subscribe();
        loop {
            let full = stopping.run_until_cancelled(known.wait_for(|known| known.full_disk.is_some())).await;
            let Some(Ok(full)) = full.map(|full| full.map(|known| known.full_disk.clone())) else { return };
            if stopping.run_until_cancelled(self.await_space(full)).await.is_none() {
                return;
            }
            self.shared.known.send_modify(|known| known.full_disk = None);
            tracing::info!("the database has space on its disk again");
        }
    }

    /// Waits until a trial write succeeds.
    async fn await_space(&self, full: Option<NoPrimaryReason>) {
        let mut warned = None::<Instant>;
        loop {
            if let Some(why) = &full
                && warned.is_none_or(|warned| warned.elapsed() >= WARN_INTERVAL)
            {
                tracing::warn!("not ready: {why}");
                warned = Some(Instant::now());
            }
            tokio::time::sleep(PROBE_INTERVAL).await;
            if self.write_probe().await.is_ok() {
                return;
            }
        }
    }

    async fn write_probe(&self) -> Result<(), StoreError> {
        let (mut connection, _) = self.lend(Lender::Pool).await?;
        let written = within_timeout(write(&mut connection)).await;
        if written.is_err() {
            // The state of the connection is in doubt.
            connection.close_on_drop();
        }
        written
    }
}

/// Writes a row of several pages to a table of the ledger and rolls back. The next vacuum frees the pages.
async fn write(connection: &mut PgConnection) -> Result<(), StoreError> {
    let mut transaction = connection.begin().await?;
    sqlx::query(
        r#"-- disk::write
        INSERT INTO linkis_user_request_id ("user", request_id, body_hash, ticket_id, em_application_name, em_instance, expires_at,
            create_time)
        SELECT '', gen_random_uuid()::text, sha256(''), gen_random_uuid(), '', string_agg(gen_random_uuid()::text, ''), now(), now()
        FROM generate_series(1, 2048)"#,
    )
    .execute(&mut *transaction)
    .await?;
    transaction.rollback().await?;
    Ok(())
}
