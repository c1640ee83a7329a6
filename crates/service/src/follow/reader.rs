//! Reader of new history lines, shared by all followers of this instance.
//!
//! Caller: the server, which spawns [`FollowService::read_on`].

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::{error::Error, lock::lock};
use rm_store::{
    history_tail,
    session::{Session, within_timeout},
};
use rm_telemetry::cause;

use super::{FollowService, HistoryPage, PAGE_LINES, ReaderProgress};

/// Interval between reads of new lines.
const PERIOD: Duration = Duration::from_millis(200);

/// Pause after a database error.
const FAILED_PAUSE: Duration = Duration::from_secs(1);

/// Maximum interruption after which reading continues at the last number. The history reaches much further back.
const AWAY_MAX: Duration = Duration::from_secs(60);

impl FollowService {
    /// Reads new lines while there is a follower, until shutdown.
    pub async fn read_on(self, stopping: CancellationToken) {
        let reading = async {
            let mut session = self.store.lent_session();
            loop {
                self.wanted.notified().await;
                self.read_for_all(&mut session).await;
                self.progress.send_modify(|progress| progress.read_to = None);
                self.recent.clear();
                session.give_back().await;
            }
        };
        stopping.run_until_cancelled(reading).await;
    }

    /// Reads new lines until the last follower is gone.
    async fn read_for_all(&self, session: &mut Session) {
        let (mut at, mut is_sure, mut last_read) = (None, true, Instant::now());
        while self.places.count() > 0 {
            if last_read.elapsed() > AWAY_MAX {
                at = None;
                self.recent.clear();
            }
            match self.read_new(session, at, is_sure).await {
                Ok((now, is_full)) => {
                    (at, is_sure, last_read) = (now, true, Instant::now());
                    if !is_full {
                        session.give_back().await;
                        sleep(PERIOD).await;
                    }
                }
                Err(error) => {
                    session.reset();
                    if is_sure {
                        let error = cause(&error);
                        tracing::warn!(error, "the history cannot be read for its followers; retrying");
                    }
                    is_sure = false;
                    sleep(FAILED_PAUSE).await;
                }
            }
        }
    }

    /// Reads the lines after `at`. Returns the number up to which all lines were read, if known, and whether more lines may
    /// follow.
    async fn read_new(
        &self,
        session: &mut Session,
        at: Option<i64>,
        is_sure: bool,
    ) -> Result<(Option<i64>, bool), Error> {
        let connection = session.get_durable().await?;
        let Some(at) = at else {
            let settled = self.settled(connection).await?;
            self.has_read(settled);
            return Ok((settled, false));
        };
        if !is_sure && within_timeout(history_tail::last_number(&mut *connection)).await? < at {
            // The new primary has lost the last commits of the old one.
            self.recent.clear();
            *lock(&self.origin) = None;
            self.progress
                .send_modify(|ReaderProgress { read_to, put_back }| (*read_to, *put_back) = (None, *put_back + 1));
            tracing::warn!(at, "the history was restored to an earlier state; its followers start again");
            return Ok((None, false));
        }
        let limit = i64::try_from(PAGE_LINES).unwrap_or(i64::MAX);
        let lines = self.history.read(connection, None, at, limit).await?;
        let (count, last) = (lines.len(), lines.last().map_or(at, |line| line.number));
        self.metrics.follow.read.inc_by(u64::try_from(count).unwrap_or_default());
        self.recent.keep(HistoryPage::of(at, lines));
        self.has_read(Some(last));
        Ok((Some(last), count == PAGE_LINES))
    }

    fn has_read(&self, number: Option<i64>) {
        self.progress.send_if_modified(|progress| {
            let before = std::mem::replace(&mut progress.read_to, number);
            before != number
        });
    }
}
