//! The fullest: the scopes that hold the largest share of a maximum, and those that hold more than they may. An index by that would have to
//! be written by every grant; so all scopes are looked through instead, again and again, and never for more than a small part of the time.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwapOption;
use time::OffsetDateTime;
use tokio::time::Instant;

use crate::{
    domain::limit::{Limits, ScopeUsage, sort_fullest},
    store::{
        StoreError, label_resource, limit,
        session::{self, Session, answered},
    },
};

use super::{PAUSE_TIMES, Step, Task};

/// How many are listed.
pub const LISTED_MAX: usize = 1000;

/// How many scopes one step looks at.
const PAGE: i64 = 1000;

/// The fullest scopes, as they were seen lately.
#[derive(Debug)]
pub struct FullestList {
    /// When the look began, by the database's clock.
    pub at: OffsetDateTime,
    /// How many scopes there are.
    pub scopes: i64,
    /// How many of them hold more than their limits allow.
    pub over_limit: i64,
    /// Those that hold the largest share of a maximum, the largest first.
    pub fullest: Vec<ScopeUsage>,
    /// Whether no other scope holds a share of a maximum.
    pub is_whole: bool,
}

/// Where the list is; clones share it.
#[derive(Clone, Debug, Default)]
pub struct FullestScopes(Arc<ArcSwapOption<FullestList>>);

impl FullestScopes {
    /// The list, once there is one.
    pub fn list(&self) -> Option<Arc<FullestList>> {
        self.0.load_full()
    }
}

/// A look through all scopes.
#[derive(Debug)]
struct Look {
    began: Instant,
    after: Vec<u8>,
    list: FullestList,
}

impl Look {
    /// A scope that holds nothing is on its way out, and none of them.
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

/// Keeps the list up to date.
#[derive(Debug)]
pub struct ListFullest {
    scopes: FullestScopes,
    known: Arc<Limits>,
    look: Option<Look>,
}

impl ListFullest {
    /// Which has not looked yet.
    pub fn new(scopes: FullestScopes) -> Self {
        Self { scopes, known: Arc::default(), look: None }
    }

    async fn begin(session: &mut Session) -> Result<Look, StoreError> {
        let at = answered(session::clock(session.get().await?)).await?;
        let list = FullestList { at, scopes: 0, over_limit: 0, fullest: Vec::new(), is_whole: true };
        Ok(Look { began: Instant::now(), after: Vec::new(), list })
    }
}

impl Task for ListFullest {
    const NAME: &'static str = "fullest";
    const PERIOD: Duration = Duration::from_secs(3);

    async fn step(&mut self, session: &mut Session) -> Result<Step, StoreError> {
        let mut look = match self.look.take() {
            Some(look) => look,
            None => Self::begin(session).await?,
        };
        self.known = answered(limit::current(session.get().await?, &self.known)).await?;
        let page = answered(label_resource::walk(session.get().await?, &look.after, PAGE)).await?;
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
