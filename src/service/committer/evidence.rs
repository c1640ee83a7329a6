//! What a batch leaves behind, by which its commit can be told when the connection broke meanwhile.

use std::sync::Arc;

use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{
    domain::{
        drain::Drain,
        em::{Em, EmInstance},
        end::End,
        ledger::Deltas,
        line::Spots,
    },
    store::{StoreError, action_record, em_drain, em_resource, user_resource, waiting},
};

/// Something that a committed batch has left, and that nobody else writes: as it was committed all or nothing, one will do.
#[derive(Debug)]
pub(super) enum Evidence {
    /// A ticket was granted or adopted: it lives, or it is remembered.
    Granted(Uuid),
    /// A ticket ended: it is remembered.
    Ended(Uuid),
    /// A ticket's engine reported in: it is used, or it ended later, but did not expire.
    Inited(Uuid),
    /// An engine reported what it uses, in the batch of this moment: so it is remembered.
    Reported(Uuid, OffsetDateTime),
    /// An EM registered: it has this epoch, or a later one.
    Registered(EmInstance, i64),
    /// An EM's row says how far a step through its tickets came, which only the next one changes; or it is not there.
    Stepped(Box<Em>),
    /// An EM's row went: it is not there.
    Gone(EmInstance),
    /// An EM is drained like this, or not at all. If somebody has changed it since, it is done again: so it came later.
    Drained(EmInstance, Option<Arc<Drain>>),
    /// A request stands in line there: only its own instance moves it.
    Waits(Uuid, Spots),
    /// A request left the line: it is not there.
    LeftLine(Uuid),
    /// Nothing but lines of the history, about EMs that registered and went in the same batch. Where nobody knows whether it was
    /// committed, it may as well be done again.
    HistoryAlone,
}

impl Evidence {
    /// What the batch of the moment `now` leaves.
    pub fn of(deltas: &Deltas, now: OffsetDateTime) -> Self {
        let registered = || deltas.ems_updated.iter().chain(&deltas.ems_resized).chain(&deltas.ems_inserted).next();
        None.or_else(|| deltas.granted.first().map(|ticket| Self::Granted(ticket.id)))
            .or_else(|| deltas.adopted.first().map(|(ticket, _)| Self::Granted(ticket.id)))
            .or_else(|| deltas.ended.first().map(|ended| Self::Ended(ended.ticket.id)))
            .or_else(|| deltas.inited.first().map(|(ticket, _)| Self::Inited(ticket.id)))
            .or_else(|| deltas.reported.first().map(|(ticket, _)| Self::Reported(ticket.id, now)))
            .or_else(|| registered().map(|em| Self::Registered(em.instance.clone(), em.epoch)))
            .or_else(|| deltas.ems_stepped.first().map(|em| Self::Stepped(Box::new(em.clone()))))
            .or_else(|| deltas.ems_deleted.first().map(|em| Self::Gone(em.instance.clone())))
            .or_else(|| deltas.drains.first().map(|(em, drain)| Self::Drained(em.clone(), drain.clone())))
            .or_else(|| deltas.waiting.first().map(|new| Self::Waits(new.position.ticket_id(), new.spots.clone())))
            .or_else(|| deltas.moved.first().map(|moved| Self::Waits(moved.position.ticket_id(), moved.spots.clone())))
            .or_else(|| deltas.left_line.first().map(|ticket_id| Self::LeftLine(*ticket_id)))
            .unwrap_or(Self::HistoryAlone)
    }

    /// Whether it is there.
    pub async fn holds(&self, connection: &mut PgConnection) -> Result<bool, StoreError> {
        Ok(match self {
            Self::Granted(id) => {
                user_resource::read(&mut *connection, &[*id]).await?.contains_key(id)
                    || action_record::read(&mut *connection, &[*id]).await?.contains_key(id)
            }
            Self::Ended(id) => action_record::read(&mut *connection, &[*id]).await?.contains_key(id),
            Self::Inited(id) => {
                let ticket = user_resource::read(&mut *connection, &[*id]).await?.remove(id);
                let ended = action_record::read(&mut *connection, &[*id]).await?.remove(id);
                ticket.is_some_and(|ticket| !ticket.is_locked()) || ended.is_some_and(|ended| ended.end != End::Expired)
            }
            Self::Reported(id, at) => action_record::was_reported(&mut *connection, *id, *at).await?,
            Self::Registered(em, epoch) => {
                em_resource::read(&mut *connection, [em]).await?.get(em).is_some_and(|em| em.epoch >= *epoch)
            }
            Self::Stepped(after) => {
                let now = em_resource::read(&mut *connection, [&after.instance]).await?.remove(&after.instance);
                now.is_none_or(|now| now.has_stepped_to(after))
            }
            Self::Gone(em) => em_resource::read(&mut *connection, [em]).await?.is_empty(),
            Self::Drained(em, drain) => em_drain::read(&mut *connection, [em]).await?.get(em) == drain.as_ref(),
            Self::Waits(ticket_id, spots) => waiting::spots_of(&mut *connection, *ticket_id).await? == *spots,
            Self::LeftLine(ticket_id) => waiting::spots_of(&mut *connection, *ticket_id).await?.is_empty(),
            Self::HistoryAlone => false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An EM that registers and goes in the same batch leaves no row: that must not fail the batch.
    #[test]
    fn a_batch_that_leaves_nothing_but_history_has_evidence_too() {
        assert!(matches!(Evidence::of(&Deltas::default(), OffsetDateTime::UNIX_EPOCH), Evidence::HistoryAlone));
    }
}
