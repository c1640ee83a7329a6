//! Wake reasons: why a parked request checks again, and which later waiters it may wake.
//!
//! Callers: `waiter_index`, which assigns the reasons, and queued requests, which decide by them whether a check is needed.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use rm_model::{name::Labels, resource::Resource, selector::EmSelector};

/// Number of later waiters that a freed event may reach by forwarding.
const PASSES_AFTER_NEWS: u8 = 15;

/// Number of different needs that one chain of forwarded wake-ups remembers.
const TRIED_MAX: usize = 4;

/// What a request needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Needs {
    /// The dimensions, as a set of bits. All custom dimensions count as one.
    dimensions: u16,
    /// Hash of the amounts, the labels, and the conditions on the EM.
    amounts: u64,
}

impl Needs {
    const NONE: Self = Self { dimensions: 0, amounts: 0 };

    /// Returns the dimensions of which a resource has a part, with their amounts and the conditions on the EM.
    pub fn of(resource: &Resource, labels: &Labels, selector: &EmSelector) -> Self {
        let (mut needs, mut hasher) = (Self::NONE, DefaultHasher::new());
        (labels.as_map(), &selector.application_name, selector.required.as_map()).hash(&mut hasher);
        for (dimension, amount) in resource.amounts().filter(|(_, amount)| *amount > 0) {
            needs.dimensions |= 1 << dimension.precedence();
            (dimension, amount).hash(&mut hasher);
        }
        Self { amounts: hasher.finish(), ..needs }
    }
}

/// Reason of a wake-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WakeReason {
    /// Whether the event may be newer than the cached state of this instance.
    pub is_news: bool,
    /// Whether the wake-up is a poll without a known change.
    pub is_poll: bool,
    /// Whether the index counted free capacity for this waiter; the next freed capacity then wakes other waiters.
    pub(crate) is_room: bool,
    /// Whether an operation that frees capacity is in the commit queue. The waiter is submitted right behind it, without a
    /// check.
    pub is_coming: bool,
    passes: u8,
    /// Needs of the earlier waiters that found too little. The default fills the rest.
    tried: [Needs; TRIED_MAX],
}

impl WakeReason {
    /// Capacity may have been freed that this instance has not observed.
    pub const NEWS: Self = Self {
        is_news: true,
        is_poll: false,
        is_room: true,
        is_coming: false,
        passes: PASSES_AFTER_NEWS,
        tried: [Needs::NONE; TRIED_MAX],
    };

    /// Poll of a queue head without a known change.
    pub const POLL: Self = Self { is_poll: true, is_room: false, ..Self::NEWS };

    /// Poll of another waiter, in rotation.
    pub(crate) const TURN: Self = Self { passes: 0, ..Self::POLL };

    /// An earlier waiter was granted: capacity may remain for the next one.
    pub(crate) const GRANT: Self = Self { is_news: false, is_room: false, ..Self::NEWS };

    /// The waiter has just entered the queue, and an EM other than that of its entry may have capacity.
    pub(crate) const ENTRY: Self = Self { passes: 0, ..Self::GRANT };

    /// An operation that frees capacity is in the commit queue.
    pub(crate) const COMING: Self = Self { is_coming: true, ..Self::GRANT };

    /// Capacity was freed, and this instance has observed it.
    pub(crate) const SEEN: Self = Self { is_news: false, ..Self::NEWS };

    /// Merges two reasons: the merged one requires every check that either of them requires.
    pub(crate) fn and(self, other: Option<Self>) -> Self {
        let other = other.unwrap_or(self);
        Self {
            is_news: self.is_news || other.is_news,
            is_poll: self.is_poll && other.is_poll,
            is_room: self.is_room || other.is_room,
            is_coming: self.is_coming || other.is_coming,
            passes: self.passes.max(other.passes),
            tried: if self.tried == other.tried { self.tried } else { Self::NEWS.tried },
        }
    }

    /// Returns the reason for the next waiter after an unsuccessful check by one with these needs; `None` if the chain ends.
    pub(crate) fn passed(self, needs: Needs) -> Option<Self> {
        let mut tried = self.tried;
        if !self.has_tried(needs) {
            tried.rotate_right(1);
            tried[0] = needs;
        }
        Some(Self { passes: self.passes.checked_sub(1)?, is_news: false, is_room: false, tried, ..self.handed_on() })
    }

    /// Returns the reason for the next waiter at a key that this one leaves: its check says nothing about the capacity there.
    pub(crate) fn unused(self) -> Self {
        Self { is_news: false, is_room: false, ..self.handed_on() }
    }

    /// Whether an earlier waiter of the chain with these amounts found too little. A later one finds as little at any EM, unless its
    /// user or creator has more there.
    pub(crate) fn has_tried(self, needs: Needs) -> bool {
        self.tried.contains(&needs)
    }

    /// Whether an earlier waiter that needs these dimensions found too little. A later one at the same key would find less there
    /// with any amounts, because the earlier one keeps what it waits for.
    pub(crate) fn has_tried_dimensions(self, needs: Needs) -> bool {
        self.tried.iter().any(|tried| tried.dimensions == needs.dimensions)
    }

    /// Returns the reason for the next waiter if this one was granted before it checked.
    pub(crate) fn handed_on(self) -> Self {
        Self { is_coming: false, ..self }
    }
}
