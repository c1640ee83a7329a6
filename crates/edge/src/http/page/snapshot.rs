//! Content of the event streams: a snapshot of the cluster each second, and its changes for one stream.
//!
//! A snapshot is made once for all streams. Each stream stores what it has sent and gets only the changes. Caller:
//! `events`.

use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;
use serde_json::{Map, Value};

use crate::{convert, json::ReadCalls};
use rm_model::{em::EmInstance, overview::EmState};
use rm_service::{error::Error, overview::OverviewSnapshot};

/// Maximum number of EMs whose changes one event has; the next events have the rest. Each change takes up to ten bytes.
const CHANGES_MAX: usize = 5000;

/// Factor of the state in the code of an EM. The code adds the used percentage of the fullest dimension.
const STATE: u16 = 128;

fn code(state: EmState, held_percent: u8) -> u16 {
    let state = match state {
        EmState::Healthy => 1,
        EmState::Unreported => 2,
        EmState::Warn => 3,
        EmState::Unhealthy => 4,
        EmState::Draining => 5,
        EmState::Silent => 6,
        EmState::Unregistering => 7,
    };
    state * STATE + u16::from(held_percent).min(STATE - 1)
}

/// The cluster at one time.
#[derive(Debug)]
pub struct PageSnapshot {
    /// Fields of the overview for callers with access to the whole cluster.
    whole: Map<String, Value>,
    /// Fields of the overview for callers that are bound to users.
    bound: Map<String, Value>,
    /// EMs in order. An unchanged list is shared with the snapshot before.
    names: Arc<[EmInstance]>,
    /// Code of each EM.
    codes: Vec<u16>,
}

/// Creates snapshots, each once.
#[derive(Debug)]
pub struct PageSnapshots {
    schema: Arc<ReadCalls>,
    last: Mutex<Option<(Arc<OverviewSnapshot>, Arc<PageSnapshot>)>>,
}

impl PageSnapshots {
    /// Creates an empty cache.
    pub fn new(schema: Arc<ReadCalls>) -> Self {
        Self { schema, last: Mutex::default() }
    }

    /// Returns the page snapshot of a cluster snapshot.
    ///
    /// # Errors
    /// [`Error::Internal`] if the schema does not have the message.
    pub fn of(&self, snapshot: &Arc<OverviewSnapshot>) -> Result<Arc<PageSnapshot>, Error> {
        // The guarded state stays consistent if a holder panics.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let before = match &*last {
            Some((seen, picture)) if Arc::ptr_eq(seen, snapshot) => return Ok(picture.clone()),
            Some((_, picture)) => picture.names.clone(),
            None => Arc::default(),
        };
        let overview = &snapshot.overview;
        let fields = |is_bound| self.schema.fields("Overview", &convert::overview::overview(overview, is_bound));
        let is_like = before.iter().eq(overview.states.iter().map(|(em, _)| em));
        let names = || overview.states.iter().map(|(em, _)| em.clone()).collect();
        let picture = Arc::new(PageSnapshot {
            whole: fields(false)?,
            bound: fields(true)?,
            names: if is_like { before } else { names() },
            codes: (overview.states.iter().zip(&overview.held_percent))
                .map(|((_, state), held)| code(*state, *held))
                .collect(),
        });
        *last = Some((snapshot.clone(), picture.clone()));
        Ok(picture)
    }
}

/// Consecutive new EMs of one application: index of the first, application, and name and code of each.
type EmRun<'a> = (usize, &'a str, Vec<(&'a str, u16)>);

/// Changes since the last event of a stream.
#[derive(Debug, Default, Serialize)]
pub struct SnapshotChanges<'a> {
    /// Changed fields of the overview.
    overview: Map<String, Value>,
    /// Indexes of removed EMs, in the list before.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    gone: Vec<usize>,
    /// New EMs, by their indexes in the new list.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    came: Vec<EmRun<'a>>,
    /// Index and code of each changed EM.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    codes: Vec<usize>,
}

/// State that a stream has sent.
#[derive(Debug, Default)]
pub struct SentState {
    overview: Map<String, Value>,
    names: Arc<[EmInstance]>,
    codes: Vec<u16>,
    /// Index at which the next search for changes starts.
    place: usize,
}

impl SentState {
    /// Returns the changes since the last event, and records them as sent.
    pub fn news<'a>(&mut self, picture: &'a PageSnapshot, is_bound: bool) -> SnapshotChanges<'a> {
        let now = if is_bound { &picture.bound } else { &picture.whole };
        let is_new = |(key, value): &(&String, &Value)| self.overview.get(*key) != Some(*value);
        let overview: Map<_, _> = now.iter().filter(is_new).map(|(key, value)| (key.clone(), value.clone())).collect();
        self.overview.clone_from(now);
        let (gone, came) = self.steps(picture);
        SnapshotChanges { overview, gone, came, codes: self.changes(picture) }
    }

    /// Returns the EMs that were removed and added since the last event.
    fn steps<'a>(&mut self, picture: &'a PageSnapshot) -> (Vec<usize>, Vec<EmRun<'a>>) {
        let (mut gone, mut came) = (Vec::new(), Vec::<EmRun<'a>>::new());
        if Arc::ptr_eq(&self.names, &picture.names) {
            return (gone, came);
        }
        let mut before = self.names.iter().zip(&self.codes).enumerate().peekable();
        let mut codes = Vec::with_capacity(picture.codes.len());
        for (place, (name, code)) in picture.names.iter().zip(&picture.codes).enumerate() {
            while let Some((went, _)) = before.next_if(|(_, (known, _))| *known < name) {
                gone.push(went);
            }
            if let Some((_, (_, sent))) = before.next_if(|(_, (known, _))| *known == name) {
                codes.push(*sent);
                continue;
            }
            codes.push(*code);
            let (application, em) = (name.application_name.as_str(), (name.instance.as_str(), *code));
            match came.last_mut() {
                Some((first, of, run)) if *first + run.len() == place && *of == application => run.push(em),
                _ => came.push((place, application, vec![em])),
            }
        }
        gone.extend(before.map(|(went, _)| went));
        (self.names, self.codes) = (picture.names.clone(), codes);
        (gone, came)
    }

    /// Returns the changed codes of EMs. The search starts where the last one ended, so that every EM is reached.
    fn changes(&mut self, picture: &PageSnapshot) -> Vec<usize> {
        let (len, mut changes) = (self.codes.len(), Vec::new());
        let start = self.place.min(len);
        for place in (start..len).chain(0..start) {
            let (Some(sent), Some(code)) = (self.codes.get_mut(place), picture.codes.get(place)) else { break };
            if sent != code {
                *sent = *code;
                changes.extend([place, usize::from(*code)]);
                if changes.len() >= 2 * CHANGES_MAX {
                    self.place = place + 1;
                    break;
                }
            }
        }
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a snapshot of EMs by name and code, such as "a:128 b:200".
    fn picture(ems: &str, before: Option<&PageSnapshot>) -> PageSnapshot {
        let em = |text: &str| {
            let (name, code) = text.split_once(':').unwrap();
            let (application, instance) = name.split_once('/').unwrap_or(("ecm", name));
            (EmInstance::parse("em", application, instance).unwrap(), code.parse::<u16>().unwrap())
        };
        let (names, codes): (Vec<_>, Vec<_>) = ems.split_whitespace().map(em).unzip();
        let names =
            before.map(|before| before.names.clone()).filter(|before| **before == *names).unwrap_or(names.into());
        let field = |text: &str| [("ems".to_owned(), Value::from(text)), ("same".to_owned(), 1.into())];
        PageSnapshot { whole: field(ems).into_iter().collect(), bound: field("").into_iter().collect(), names, codes }
    }

    /// A page that applies the changes in order.
    #[derive(Default)]
    struct Page(Vec<(String, u16)>);

    impl Page {
        fn take(&mut self, news: &SnapshotChanges<'_>) -> String {
            news.gone.iter().rev().for_each(|place| drop(self.0.remove(*place)));
            for (place, _, run) in &news.came {
                let run = run.iter().map(|(name, code)| ((*name).to_owned(), *code));
                drop(self.0.splice(*place..*place, run));
            }
            for change in news.codes.chunks(2) {
                self.0[change[0]].1 = u16::try_from(change[1]).unwrap();
            }
            self.0.iter().map(|(name, code)| format!("{name}:{code}")).collect::<Vec<_>>().join(" ")
        }
    }

    #[test]
    fn page_updates_reproduce_the_snapshot() {
        let (mut sent, mut page) = (SentState::default(), Page::default());
        let mut last = None;
        for ems in ["", "b:1 d:2", "b:1 d:3", "a:1 b:1 c:5 d:3 e:9", "c:6", "", "x:1 y:2", "a:1 z:2"] {
            let now = picture(ems, last.as_ref());
            assert_eq!(page.take(&sent.news(&now, false)), ems);
            let again = sent.news(&now, false);
            assert!(
                again.overview.is_empty() && again.gone.is_empty() && again.came.is_empty() && again.codes.is_empty()
            );
            last = Some(now);
        }
    }

    #[test]
    fn adjacent_ems_are_sent_as_one_range() {
        let now = picture("a/h1:1 a/h2:2 b/h1:3", None);
        let mut sent = SentState::default();
        let news = sent.news(&now, true);
        assert_eq!(news.came, [(0, "a", vec![("h1", 1), ("h2", 2)]), (2, "b", vec![("h1", 3)])]);
        assert_eq!(news.overview["ems"], "", "the overview of a bound caller");
    }

    #[test]
    fn page_update_is_bounded_and_complete() {
        let ems = |code: u16| {
            let names: Arc<[_]> =
                (0..12_000).map(|n| EmInstance::parse("em", "ecm", &format!("h{n:05}")).unwrap()).collect();
            PageSnapshot { whole: Map::new(), bound: Map::new(), codes: vec![code; names.len()], names }
        };
        let (first, mut sent) = (ems(1), SentState::default());
        drop(sent.news(&first, false));
        let second = PageSnapshot { names: first.names.clone(), ..ems(2) };
        let third = PageSnapshot { names: first.names.clone(), ..ems(300) };
        let sizes: Vec<_> =
            [&second, &third, &third, &third, &third].map(|now| sent.news(now, false).codes.len() / 2).into();
        assert_eq!(sizes, [5000, 5000, 5000, 2000, 0]);
        assert!(sent.codes.iter().all(|code| *code == 300));
    }
}
