//! What `top` knows of the cluster, and how somebody looks at it. No terminal, no clock, no calls.

use crate::{
    domain::resource::Dimension,
    transport::proto::{EmResource, Overview, WaitingRequest},
};

use super::super::{
    ems::{self, Share},
    output::text,
};

/// What was heard of the cluster.
#[derive(Debug, Clone, Default)]
pub struct Cluster {
    /// Where it is heard from.
    pub address: String,
    /// As the service told it last.
    pub overview: Overview,
    /// Hosts, as they were told last.
    pub hosts: Vec<EmResource>,
    /// Whether there are more hosts than are shown.
    pub has_more_hosts: bool,
    /// The head of the line.
    pub line: Vec<WaitingRequest>,
    /// Why nothing newer is known.
    pub problem: Option<String>,
}

/// By what hosts are sorted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sort {
    /// The fullest first.
    #[default]
    Full,
    /// By name.
    Name,
    /// Those that hold most memory first.
    Memory,
    /// Those that hold most cores first.
    Cores,
    /// Those that are not well first.
    State,
}

impl Sort {
    const ALL: [Self; 5] = [Self::Full, Self::Name, Self::Memory, Self::Cores, Self::State];

    /// Its name.
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

/// A key that somebody pressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key {
    /// One that stands for a character.
    Char(char),
    /// The last character goes.
    Backspace,
    /// What was typed is done.
    Enter,
    /// What was typed does not count.
    Escape,
    /// Lines up (below zero) or down.
    Move(i32),
    /// Pages up (below zero) or down.
    Page(i32),
    /// To the first line.
    Home,
    /// Ctrl-C.
    Interrupt,
}

/// How somebody looks at it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Look {
    /// By what hosts are sorted.
    pub sort: Sort,
    /// Whether they stand the other way round.
    pub is_reversed: bool,
    /// What hosts have to have in their name, state or labels.
    pub filter: String,
    /// Whether that is being typed.
    pub is_typing: bool,
    /// How many hosts have passed the upper end.
    pub offset: usize,
}

/// The longest filter.
const FILTER_CHARS_MAX: usize = 64;

impl Look {
    /// What a key does; `page` is how many hosts are seen. Whether to go on.
    pub fn press(&mut self, key: Key, page: usize) -> bool {
        match key {
            Key::Interrupt => return false,
            Key::Char('q') if !self.is_typing => return false,
            Key::Char(c) if self.is_typing => {
                if self.filter.chars().count() < FILTER_CHARS_MAX {
                    self.filter.push(c);
                    self.offset = 0;
                }
            }
            Key::Backspace if self.is_typing => drop(self.filter.pop()),
            Key::Enter => self.is_typing = false,
            Key::Escape => {
                self.filter.clear();
                self.is_typing = false;
            }
            Key::Char('/') => self.is_typing = true,
            Key::Char('s') => self.sort = self.sort.next(),
            Key::Char('r') => self.is_reversed = !self.is_reversed,
            Key::Char('j') => self.scroll(1),
            Key::Char('k') => self.scroll(-1),
            Key::Char(' ') => self.scroll(isize::try_from(page).unwrap_or(isize::MAX)),
            Key::Move(lines) => self.scroll(isize::try_from(lines).unwrap_or(0)),
            Key::Page(pages) => {
                let pages = isize::try_from(pages).unwrap_or(0);
                self.scroll(pages.saturating_mul(isize::try_from(page).unwrap_or(isize::MAX)));
            }
            Key::Home => self.offset = 0,
            Key::Char(_) | Key::Backspace => {}
        }
        true
    }

    fn scroll(&mut self, lines: isize) {
        self.offset = self.offset.saturating_add_signed(lines);
    }
}

/// A host as it is shown.
#[derive(Debug, Clone)]
pub struct Host<'c> {
    /// As it was told.
    pub em: &'c EmResource,
    /// Its name.
    pub name: String,
    /// How it is.
    pub state: String,
    /// What it has.
    pub shares: Vec<Share>,
}

impl Host<'_> {
    /// How much is taken of what it has least left of, in hundredths.
    pub fn fullness(&self) -> i64 {
        self.shares.iter().filter_map(Share::percent).max().unwrap_or(0)
    }

    fn held(&self, wanted: &Dimension) -> i64 {
        self.shares.iter().find(|share| share.dimension == *wanted).map_or(0, Share::held)
    }

    fn has(&self, filter: &str) -> bool {
        let labels = || text::labels(&self.em.labels).to_lowercase().contains(filter);
        filter.is_empty() || self.name.to_lowercase().contains(filter) || self.state.contains(filter) || labels()
    }
}

/// The hosts that somebody looks at, in order.
pub fn hosts<'c>(cluster: &'c Cluster, look: &Look) -> Vec<Host<'c>> {
    let host = |em: &'c EmResource| Host {
        em,
        name: text::em(em.em.as_ref()),
        state: ems::state(em),
        shares: ems::shares(em),
    };
    let filter = look.filter.to_lowercase();
    let mut hosts: Vec<Host<'c>> = cluster.hosts.iter().map(host).filter(|host| host.has(&filter)).collect();
    match look.sort {
        Sort::Name => hosts.sort_by(|a, b| a.name.cmp(&b.name)),
        Sort::Full => hosts.sort_by_cached_key(|host| (-host.fullness(), host.name.clone())),
        Sort::Memory => hosts.sort_by_cached_key(|host| (-host.held(&Dimension::Memory), host.name.clone())),
        Sort::Cores => hosts.sort_by_cached_key(|host| (-host.held(&Dimension::Cores), host.name.clone())),
        Sort::State => {
            hosts.sort_by_cached_key(|host| (host.state == "healthy", host.state.clone(), host.name.clone()))
        }
    }
    if look.is_reversed {
        hosts.reverse();
    }
    hosts
}
