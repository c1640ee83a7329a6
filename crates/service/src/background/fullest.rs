//! Fullest scopes: the list of scopes with the largest share of a maximum, and the number of scopes above their limits.
//!
//! An index by share would have to be written by each grant. Instead, a scan of all scopes repeats with pauses, so that it uses
//! only a small part of the time.
//!
//! Callers: the task driver (`background`); `overview`, `cluster_figures` and `rm_edge::usage` read the list.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwapOption;
use time::OffsetDateTime;
use tokio::time::Instant;

use rm_model::limit::{Limits, ScopeUsage, sort_fullest};
use rm_store::{
    StoreError, label_resource, limit,
    session::{self, Session, within_timeout},
};

use super::{PAUSE_TIMES, Step, Task};

/// Maximum number of scopes in the list.
pub const LISTED_MAX: usize = 1000;

/// Maximum number of scopes per step.
const PAGE: i64 = 1000;

/// The fullest scopes by the last scan.
#[derive(Debug)]
pub struct FullestList {
    /// Start of the scan, by the database's clock.
    pub at: OffsetDateTime,
    /// Number of scopes.
    pub scopes: i64,
    /// Number of scopes with more use than their limits allow.
    pub over_limit: i64,
    /// Scopes with the largest share of a maximum, the largest first.
    pub fullest: Vec<ScopeUsage>,
    /// Whether the list contains all scopes that use a share of a maximum.
    pub is_whole: bool,
}

/// The current list. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct FullestScopes(Arc<ArcSwapOption<FullestList>>);

impl FullestScopes {
    /// Returns the list; `None` before the first scan has ended.
    pub fn list(&self) -> Option<Arc<FullestList>> {
        self.0.load_full()
    }
}

/// Scan of all scopes.
#[derive(Debug)]
struct FullestScan {
    began: Instant,
    after: Vec<u8>,
    list: FullestList,
}

impl FullestScan {
    /// Adds a scope. Scopes without use are about to be deleted and are not counted.
    fn note(&mut self, scope: ScopeUsage) {
        if scope.usage.is_nothing() {
            return;
        }
        self.list.scopes += 1;
        self.list.over_limit += i64::from(scope.is_over());
        if scope.fullness() > 0.0 {
            self.list.fullest.push(scope);
        }
        if self.list.fullest.len() >= 2 * LISTED_MAX {
            self.cut();
        }
    }

    fn cut(&mut self) {
        sort_fullest(&mut self.list.fullest);
        self.list.is_whole &= self.list.fullest.len() <= LISTED_MAX;
        self.list.fullest.truncate(LISTED_MAX);
    }
}

/// Background task that updates the list.
#[derive(Debug)]
pub struct RefreshFullest {
    scopes: FullestScopes,
    known: Arc<Limits>,
    look: Option<FullestScan>,
}

impl RefreshFullest {
    /// Creates the task without a list.
    pub fn new(scopes: FullestScopes) -> Self {
        Self { scopes, known: Arc::default(), look: None }
    }

    async fn begin(session: &mut Session) -> Result<FullestScan, StoreError> {
        let at = within_timeout(session::clock(session.get().await?)).await?;
        let list = FullestList { at, scopes: 0, over_limit: 0, fullest: Vec::new(), is_whole: true };
        Ok(FullestScan { began: Instant::now(), after: Vec::new(), list })
    }
}

impl Task for RefreshFullest {
    const NAME: &'static str = "fullest";
    const PERIOD: Duration = Duration::from_secs(3);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        let mut look = match self.look.take() {
            Some(look) => look,
            None => Self::begin(session).await?,
        };
        self.known = within_timeout(limit::current(session.get().await?, &self.known)).await?;
        let page = within_timeout(label_resource::walk(session.get().await?, &look.after, PAGE)).await?;
        for (_, counter, usage) in page.scopes {
            look.note(ScopeUsage::new(self.known.of_counter(counter), usage));
        }
        if let Some(last) = page.last {
            look.after = last;
            self.look = Some(look);
            return Ok(Step::More);
        }
        look.cut();
        let pause = look.began.elapsed() * PAUSE_TIMES;
        self.scopes.0.store(Some(Arc::new(look.list)));
        Ok(Step::Later(pause))
    }
}
