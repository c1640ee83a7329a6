//! Why somebody who waits in line looks again, and what he makes of it.

/// To how many behind him a waiter for whom there is no room passes the news.
const PASSES_AFTER_NEWS: u8 = 15;

/// Why somebody is awake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wake {
    /// Whether what this instance has last seen may be older than what he was woken by.
    pub is_news: bool,
    /// Whether it was only his turn, and nothing is known to have changed.
    pub is_poll: bool,
    /// Whether free capacity was counted for it: then other waiters are woken by the capacity that is freed next.
    pub(super) is_room: bool,
    /// Whether what makes room has just gone to the committer: who follows it at once meets it there, and need not look before.
    pub is_coming: bool,
    passes: u8,
}

impl Wake {
    /// There may be more room than anybody has seen.
    pub const NEWS: Self =
        Self { is_news: true, is_poll: false, is_room: true, is_coming: false, passes: PASSES_AFTER_NEWS };

    /// It is the turn of the first in line, and nothing is known to have changed.
    pub const POLL: Self = Self { is_poll: true, is_room: false, ..Self::NEWS };

    /// It is the turn of somebody else.
    pub(super) const TURN: Self = Self { passes: 0, ..Self::POLL };

    /// An earlier waiter was granted: there may be capacity for the next one, too.
    pub(super) const GRANT: Self = Self { is_news: false, is_room: false, ..Self::NEWS };

    /// An operation that frees capacity is in the commit queue.
    pub(super) const COMING: Self = Self { is_coming: true, ..Self::GRANT };

    /// There may be more room, and this instance has seen it.
    pub(super) const SEEN: Self = Self { is_news: false, ..Self::NEWS };

    pub(super) fn and(self, other: Option<Self>) -> Self {
        let other = other.unwrap_or(self);
        Self {
            is_news: self.is_news || other.is_news,
            is_poll: self.is_poll && other.is_poll,
            is_room: self.is_room || other.is_room,
            is_coming: self.is_coming || other.is_coming,
            passes: self.passes.max(other.passes),
        }
    }

    /// What the next one behind is woken by; `None` if it ends here.
    pub(super) fn passed(self) -> Option<Self> {
        Some(Self { passes: self.passes.checked_sub(1)?, is_news: false, is_room: false, ..self.handed_on() })
    }

    /// The reason for the next waiter if this one was granted before it checked.
    pub(super) fn handed_on(self) -> Self {
        Self { is_coming: false, ..self }
    }
}
