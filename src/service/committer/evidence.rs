//! What a batch leaves behind, by which its commit can be told when the connection broke meanwhile.

use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{
    domain::{ledger::Deltas, line::Spots},
    store::{StoreError, action_record, waiting},
};

/// Something that a committed batch has left. As it was committed all or nothing, one thing will do, if nobody else can have left it: that
/// a ticket has ended, or that an EM is registered, proves nothing, because other instances serve the same callers and the same deadlines.
#[derive(Debug)]
pub(super) enum Evidence {
    /// A line of the history, by its number and time: it stays, and it is nobody else's. Whatever grants, ends or changes a ticket, or
    /// changes an EM, has one.
    Told(i64, OffsetDateTime),
    /// Requests that entered the line, or moved in it: nothing but this batch has them stand like that. If none does, it was undone, or they
    /// were removed since; either way they enter the line again.
    Stands(Vec<(Uuid, Spots)>),
    /// Requests that left the line, and nothing else: if none is there, they have, whoever removed them.
    Left(Vec<Uuid>),
    /// Nothing but a step through the tickets of an EM, which goes on from where the EM's row says: done again, it is the next one.
    Step,
}

impl Evidence {
    /// What the batch of the moment `now` leaves, whose lines in the history begin at `first_line`, if it has any.
    pub fn of(deltas: &Deltas, first_line: Option<i64>, now: OffsetDateTime) -> Self {
        if let Some(number) = first_line {
            return Self::Told(number, now);
        }
        let entered = deltas.waiting.iter().map(|new| (new.position.ticket_id(), new.spots.clone()));
        let moved = deltas.moved.iter().map(|moved| (moved.position.ticket_id(), moved.spots.clone()));
        let stands: Vec<_> = entered.chain(moved).collect();
        match (stands.is_empty(), deltas.left_line.is_empty()) {
            (false, _) => Self::Stands(stands),
            (true, false) => Self::Left(deltas.left_line.clone()),
            (true, true) => Self::Step,
        }
    }

    /// Whether it is there. If it is not, the batch may be done again.
    pub async fn holds(&self, connection: &mut PgConnection) -> Result<bool, StoreError> {
        Ok(match self {
            Self::Told(number, at) => action_record::is_there(&mut *connection, *number, *at).await?,
            Self::Stands(stands) => {
                let ticket_ids: Vec<Uuid> = stands.iter().map(|(ticket_id, _)| *ticket_id).collect();
                let found = waiting::spots_of(&mut *connection, &ticket_ids).await?;
                stands.iter().any(|(ticket_id, spots)| found.get(ticket_id) == Some(spots))
            }
            Self::Left(ticket_ids) => waiting::spots_of(&mut *connection, ticket_ids).await?.is_empty(),
            Self::Step => false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: OffsetDateTime = OffsetDateTime::UNIX_EPOCH;

    /// An EM that registers and goes in the same batch leaves no row: its lines tell of it.
    #[test]
    fn a_batch_with_lines_in_the_history_is_told_by_them() {
        let left = Deltas { left_line: vec![Uuid::nil()], ..Deltas::default() };
        for deltas in [left, Deltas::default()] {
            assert!(matches!(Evidence::of(&deltas, Some(7), NOW), Evidence::Told(7, at) if at == NOW));
        }
    }

    #[test]
    fn a_batch_that_tells_nothing_is_told_by_the_line_or_done_again() {
        let deltas = Deltas { left_line: vec![Uuid::nil()], ..Deltas::default() };
        assert!(matches!(Evidence::of(&deltas, None, NOW), Evidence::Left(_)));
        assert!(matches!(Evidence::of(&Deltas::default(), None, NOW), Evidence::Step));
    }
}
