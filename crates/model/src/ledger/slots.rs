//! What a batch knows of an EM, a scope and a ticket, and how operations find it.

use std::collections::HashMap;

use uuid::Uuid;

use super::super::{
    em::{Em, EmInstance},
    name::Name,
    operation::Rejection,
    scope::Usage,
    ticket::{EndedTicket, Ticket},
};

#[derive(Debug, Default)]
pub(super) struct EmSlot {
    pub(super) stored_version: Option<i64>,
    /// As it was before its row went.
    pub(super) before: Option<Em>,
    pub(super) current: Option<Em>,
    /// Whether it went, if only for a moment.
    pub(super) went: bool,
    pub(super) registered: bool,
    pub(super) resized: bool,
    pub(super) stepped: bool,
    /// Whether engines were adopted that it has no room for.
    pub(super) exceeded: bool,
    pub(super) counted: bool,
}

impl EmSlot {
    /// Whether its row is written, or made.
    pub(super) fn is_written(&self) -> bool {
        self.registered || self.resized || self.stepped || self.counted || self.stored_version.is_none()
    }
}

#[derive(Debug, Default)]
pub(super) struct ScopeSlot {
    pub(super) usage: Usage,
    pub(super) changed: bool,
}

#[derive(Debug)]
pub(super) struct TicketSlot {
    pub(super) ticket: Ticket,
    pub(super) stored: bool,
    /// The index of its [`HistoryLine::Granted`](super::HistoryLine::Granted), as long as it is locked; `None` if this batch did not grant it.
    pub(super) granted_line: Option<usize>,
    /// Whether its row has yet to say what it uses.
    pub(super) in_use: bool,
}

/// An EM that has a row, and the mark that its counters have to be written.
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

/// An EM that can be used.
pub(super) fn registered_em<'a>(
    ems: &'a mut HashMap<EmInstance, EmSlot>,
    instance: &EmInstance,
) -> Result<StoredEm<'a>, Rejection> {
    let em = stored_em(ems, instance)?;
    if em.current.is_registered() { Ok(em) } else { Err(Rejection::EmNotRegistered(instance.clone())) }
}

/// Refuses the word of an older incarnation of an EM, and of one that is yet to come.
pub(super) fn check_epoch(em: &Em, told: Option<i64>) -> Result<(), Rejection> {
    let registered = em.epoch;
    match told {
        Some(told) if told < registered => Err(Rejection::StaleEpoch { em: em.instance.clone(), told, registered }),
        Some(told) if told > registered => Err(Rejection::EpochAhead { registered }),
        _ => Ok(()),
    }
}

/// A live ticket that `user` holds on `em`. Another's ticket is not found, like one that never was.
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
