//! Chosen tickets: engines that are to end because a request waits.

use std::time::Duration;

use time::OffsetDateTime;
use uuid::Uuid;

use super::ReclaimMode;
use crate::em::EmInstance;

/// Progress of a chosen ticket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReclaimProgress {
    /// It is not recalled yet.
    Chosen {
        /// Whether the grace period has ended.
        is_due: bool,
    },
    /// It is recalled: its engine is to end.
    Recalled,
    /// The engine has not ended two minutes after the recall. Its EM is not reminded of it.
    Unanswered {
        /// Whether the ticket may be chosen again.
        is_over: bool,
    },
    /// An operator has withdrawn the choice: the engine stays.
    Withdrawn {
        /// Whether it was recalled before, so that its engine may end in spite of the withdrawal.
        was_recalled: bool,
        /// Whether the ticket may be chosen again.
        is_over: bool,
    },
    /// Its engine has run a task since the choice, and was chosen because it was idle.
    Continued,
    /// It has ended.
    Ended {
        /// Whether it was recalled.
        was_recalled: bool,
    },
}

/// State of the request of a chosen ticket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReclaimFor {
    /// It waits.
    Present,
    /// It has a position, but no caller.
    Absent,
    /// It does not wait any more.
    Gone,
}

/// A chosen ticket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reclaim {
    /// The ticket.
    pub ticket_id: Uuid,
    /// Ticket id of the waiting request.
    pub for_ticket_id: Uuid,
    /// EM at which the request fits after the end.
    pub for_em: EmInstance,
    /// Mode of the policy at the choice.
    pub mode: ReclaimMode,
    /// Whether its engine ends also while it runs tasks.
    pub busy: bool,
    /// End of the grace period.
    pub due_time: OffsetDateTime,
    /// State of the ticket.
    pub progress: ReclaimProgress,
    /// State of the request.
    pub request: ReclaimFor,
}

/// A ticket that is to be chosen, or chosen for another request or in another mode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewReclaim {
    /// The ticket.
    pub ticket_id: Uuid,
    /// Ticket id of the waiting request.
    pub for_ticket_id: Uuid,
    /// EM at which the request fits after the end.
    pub for_em: EmInstance,
    /// Mode of the policy.
    pub mode: ReclaimMode,
    /// Whether its engine ends also while it runs tasks.
    pub busy: bool,
    /// Grace period.
    pub grace: Duration,
}

text_enum! {
    /// Why the row of a chosen ticket was deleted.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum ReclaimResult {
        /// Its request does not wait any more or needs it no longer, its policy has changed, or an operator has withdrawn it.
        Withdrawn = "withdrawn",
        /// Its engine runs a task again.
        Continued = "busy",
        /// It ended before its recall.
        EndedBefore = "ended_before",
        /// It ended after its recall.
        TakenBack = "taken_back",
    }
}

impl Reclaim {
    /// Returns whether the ticket is recalled, and its engine has not continued.
    pub fn is_recalled(&self) -> bool {
        matches!(self.progress, ReclaimProgress::Recalled | ReclaimProgress::Unanswered { .. })
    }

    /// Returns why the row is deleted.
    pub fn result(&self) -> ReclaimResult {
        match self.progress {
            ReclaimProgress::Continued => ReclaimResult::Continued,
            ReclaimProgress::Ended { was_recalled: false } => ReclaimResult::EndedBefore,
            ReclaimProgress::Ended { was_recalled: true } => ReclaimResult::TakenBack,
            ReclaimProgress::Chosen { .. }
            | ReclaimProgress::Recalled
            | ReclaimProgress::Unanswered { .. }
            | ReclaimProgress::Withdrawn { .. } => ReclaimResult::Withdrawn,
        }
    }
}
