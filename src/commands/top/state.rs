//! State of `top`: the data of the cluster, and the view settings. Pure, without terminal, clock or calls.
//!
//! Callers: the main loop of `top`, which updates both, and `draw`.

use rm_model::resource::Dimension;
use rm_proto::v1::{EmResource, Overview, WaitingRequest};

use super::super::{
    ems::{self, DimensionUse},
    output::text,
};

/// Data of the cluster from the service.
#[derive(Debug, Clone, Default)]
pub struct ClusterFeed {
    /// Address of the service.
    pub address: String,
    /// Latest overview.
    pub overview: Overview,
    /// Latest list of EMs.
    pub ems: Vec<EmResource>,
    /// Whether the list of EMs is incomplete.
    pub has_more_ems: bool,
    /// Head of the wait queues.
    pub line: Vec<WaitingRequest>,
    /// Failure since the latest data.
    pub problem: Option<String>,
}

/// Sort order of the EMs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EmOrder {
    /// By use in percent, descending.
    #[default]
    Full,
    /// By name.
    Name,
    /// By used + locked memory, descending.
    Memory,
    /// By used + locked cores, descending.
    Cores,
    /// By state, healthy ones last.
    State,
}

impl EmOrder {
    const ALL: [Self; 5] = [Self::Full, Self::Name, Self::Memory, Self::Cores, Self::State];

    /// Returns the name of the order.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Full => "fullness",
            Self::Name => "name",
            Self::Memory => "memory",
            Self::Cores => "cores",
            Self::State => "state",
        }
    }

    fn next(self) -> Self {
        let at = Self::ALL.iter().position(|sort| *sort == self).map_or(0, |at| at + 1);
        Self::ALL.get(at).copied().unwrap_or_default()
    }
}

/// A pressed key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyPress {
    /// A character.
    Char(char),
    /// Deletes the last character.
    Backspace,
    /// Finishes the input.
    Enter,
    /// Discards the input.
    Escape,
    /// Moves by lines; negative is up.
    Move(i32),
    /// Moves by pages; negative is up.
    Page(i32),
    /// Moves to the first line.
    Home,
    /// Ctrl-C.
    Interrupt,
}

/// View settings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ViewState {
    /// Sort order of the EMs.
    pub sort: EmOrder,
    /// Whether the order is reversed.
    pub is_reversed: bool,
    /// Text that the name, state or labels of EMs must contain.
    pub filter: String,
    /// Whether the filter is being typed.
    pub is_typing: bool,
    /// Number of EMs above the visible ones.
    pub offset: usize,
}

/// Maximum length of the filter, in characters.
const FILTER_CHARS_MAX: usize = 64;

impl ViewState {
    /// Handles a key; `page` is the number of visible EMs. Returns false to quit.
    pub fn press(&mut self, key: KeyPress, page: usize) -> bool {
        match key {
            KeyPress::Interrupt => return false,
            KeyPress::Char('q') if !self.is_typing => return false,
            KeyPress::Char(c) if self.is_typing => {
                if self.filter.chars().count() < FILTER_CHARS_MAX {
                    self.filter.push(c);
                    self.offset = 0;
                }
            }
            KeyPress::Backspace if self.is_typing => drop(self.filter.pop()),
            KeyPress::Enter => self.is_typing = false,
            KeyPress::Escape => {
                self.filter.clear();
                self.is_typing = false;
            }
            KeyPress::Char('/') => self.is_typing = true,
            KeyPress::Char('s') => self.sort = self.sort.next(),
            KeyPress::Char('r') => self.is_reversed = !self.is_reversed,
            KeyPress::Char('j') => self.scroll(1),
            KeyPress::Char('k') => self.scroll(-1),
            KeyPress::Char(' ') => self.scroll(isize::try_from(page).unwrap_or(isize::MAX)),
            KeyPress::Move(lines) => self.scroll(isize::try_from(lines).unwrap_or(0)),
            KeyPress::Page(pages) => {
                let pages = isize::try_from(pages).unwrap_or(0);
                self.scroll(pages.saturating_mul(isize::try_from(page).unwrap_or(isize::MAX)));
            }
            KeyPress::Home => self.offset = 0,
            KeyPress::Char(_) | KeyPress::Backspace => {}
        }
        true
    }

    fn scroll(&mut self, lines: isize) {
        self.offset = self.offset.saturating_add_signed(lines);
    }
}

/// An EM as displayed.
#[derive(Debug, Clone)]
pub struct TopEm<'c> {
    /// Data of the EM.
    pub em: &'c EmResource,
    /// Name of the EM.
    pub name: String,
    /// State of the EM, for display.
    pub state: String,
    /// Use per dimension.
    pub shares: Vec<DimensionUse>,
}

impl TopEm<'_> {
    /// Returns the use in percent in the fullest dimension.
    pub fn fullness(&self) -> i64 {
        self.shares.iter().filter_map(DimensionUse::percent).max().unwrap_or(0)
    }

    fn held(&self, wanted: &Dimension) -> i64 {
        self.shares.iter().find(|share| share.dimension == *wanted).map_or(0, DimensionUse::held)
    }

    fn has(&self, filter: &str) -> bool {
        let labels = || text::labels(&self.em.labels).to_lowercase().contains(filter);
        filter.is_empty() || self.name.to_lowercase().contains(filter) || self.state.contains(filter) || labels()
    }
}

/// Returns the EMs that match the filter, in the sort order.
pub fn ems<'c>(cluster: &'c ClusterFeed, look: &ViewState) -> Vec<TopEm<'c>> {
    let em = |em: &'c EmResource| TopEm {
        em,
        name: text::em(em.em.as_ref()),
        state: ems::state(em),
        shares: ems::shares(em),
    };
    let filter = look.filter.to_lowercase();
    let mut ems: Vec<TopEm<'c>> = cluster.ems.iter().map(em).filter(|em| em.has(&filter)).collect();
    match look.sort {
        EmOrder::Name => ems.sort_by(|a, b| a.name.cmp(&b.name)),
        EmOrder::Full => ems.sort_by_cached_key(|em| (-em.fullness(), em.name.clone())),
        EmOrder::Memory => ems.sort_by_cached_key(|em| (-em.held(&Dimension::Memory), em.name.clone())),
        EmOrder::Cores => ems.sort_by_cached_key(|em| (-em.held(&Dimension::Cores), em.name.clone())),
        EmOrder::State => ems.sort_by_cached_key(|em| (em.state == "healthy", em.state.clone(), em.name.clone())),
    }
    if look.is_reversed {
        ems.reverse();
    }
    ems
}
