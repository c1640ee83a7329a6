//! Slots: the state of an EM, a scope and a ticket within a batch, and the lookups that operations use.
//!
//! A slot records how its row must be written at the end of the batch. The lookups reject operations on missing objects,
//! earlier epochs and tickets of other owners.

use std::collections::HashMap;

use uuid::Uuid;

use super::super::{
    em::{Em, EmInstance},
    name::Name,
    operation::Rejection,
    scope::ScopeHoldings,
    ticket::{EndedTicket, Ticket},
};

#[derive(Debug, Default)]
pub(super) struct EmSlot {
    pub(super) stored_version: Option<i64>,
    /// State before the row was deleted.
    pub(super) before: Option<Em>,
    pub(super) current: Option<Em>,
    /// Whether the EM was unregistered or lost in this batch, even if it registered again.
    pub(super) went: bool,
    pub(super) registered: bool,
    pub(super) resized: bool,
    pub(super) stepped: bool,
    /// Whether an adoption over-committed the EM.
    pub(super) exceeded: bool,
    pub(super) counted: bool,
}

impl EmSlot {
    /// Returns whether the row is updated or inserted.
    pub(super) fn is_written(&self) -> bool {
        self.registered || self.resized || self.stepped || self.counted || self.stored_version.is_none()
    }
}

#[derive(Debug, Default)]
pub(super) struct ScopeSlot {
    pub(super) usage: ScopeHoldings,
    pub(super) changed: bool,
}

#[derive(Debug)]
pub(super) struct TicketSlot {
    pub(super) ticket: Ticket,
    pub(super) stored: bool,
    /// Index of its [`HistoryLine::Granted`](super::HistoryLine::Granted) while it is locked; `None` if this batch did not
    /// grant it.
    pub(super) granted_line: Option<usize>,
    /// Whether the row needs an update of the use.
    pub(super) in_use: bool,
}

/// An EM with a row, and the mark that its counters must be written.
pub(super) struct StoredEm<'a> {
    pub(super) current: &'a mut Em,
    pub(super) counted: &'a mut bool,
}

pub(super) fn stored_em<'a>(
    ems: &'a mut HashMap<EmInstance, EmSlot>,
    instance: &EmInstance,
) -> Result<StoredEm<'a>, Rejection> {
    match ems.get_mut(instance) {
        Some(EmSlot { current: Some(current), counted, .. }) => Ok(StoredEm { current, counted }),
        _ => Err(Rejection::EmNotRegistered(instance.clone())),
    }
}

/// Returns a registered EM.
///
/// # Errors
/// [`Rejection::EmNotRegistered`].
pub(super) fn registered_em<'a>(
    ems: &'a mut HashMap<EmInstance, EmSlot>,
    instance: &EmInstance,
) -> Result<StoredEm<'a>, Rejection> {
    let em = stored_em(ems, instance)?;
    if em.current.is_registered() { Ok(em) } else { Err(Rejection::EmNotRegistered(instance.clone())) }
}

/// Rejects a call with the epoch of an earlier registration or of a future one.
pub(super) fn check_epoch(em: &Em, epoch: Option<i64>) -> Result<(), Rejection> {
    let registered = em.epoch;
    match epoch {
        Some(epoch) if epoch < registered => Err(Rejection::StaleEpoch { em: em.instance.clone(), epoch, registered }),
        Some(epoch) if epoch > registered => Err(Rejection::EpochAhead { registered }),
        _ => Ok(()),
    }
}

/// Returns a live ticket of `user` on `em`. A ticket of another owner is reported as not found.
pub(super) fn owned<'a>(
    tickets: &'a mut HashMap<Uuid, TicketSlot>,
    ended: &HashMap<Uuid, EndedTicket>,
    ticket_id: Uuid,
    user: &Name,
    em: &EmInstance,
) -> Result<&'a mut TicketSlot, Rejection> {
    let is_owned = |slot: &&mut TicketSlot| slot.ticket.user == *user && slot.ticket.em == *em;
    let ended = || ended.get(&ticket_id).filter(|ended| ended.is_of(user, em)).cloned().map(Box::new);
    tickets.get_mut(&ticket_id).filter(is_owned).ok_or_else(|| Rejection::TicketNotFound { ticket_id, ended: ended() })
}
