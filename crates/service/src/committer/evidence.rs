//! Evidence of a commit: the rows that show whether a batch was committed although its connection broke.
//!
//! A batch commits as a whole, so one row is enough if no other transaction can have written it. The state of a ticket or EM is
//! no evidence: other instances serve the same callers and deadlines and can cause the same state.
//!
//! Never: decides a retry.
//! Caller: `worker`.

use sqlx::PgConnection;
use time::OffsetDateTime;

use rm_model::{ledger::Deltas, order::RankedRequest, wait_queue::OwnedPosition};
use rm_store::{
    StoreError, action_record,
    waiting::{self, StoredPlace},
};

/// Rows by which the commit of a batch is recognized.
#[derive(Debug)]
pub(super) enum Evidence {
    /// History line, by number and time. Each batch that grants, ends or changes a ticket, or changes an EM, writes one, and no
    /// other transaction writes that number.
    Line(i64, OffsetDateTime),
    /// Places in the queue that the batch wrote. If none matches, the batch was rolled back, or others have changed the places since,
    /// and the batch can be repeated.
    Places(Vec<WrittenPlace>),
    /// Positions that the batch deleted without a history line. If their calls own none of them, they are deleted, regardless of
    /// the transaction that did it.
    Left(Vec<OwnedPosition>),
    /// A step through the tickets of an EM without other writes. Repeating the batch is safe: the step continues from the EM's
    /// row.
    Step,
}

/// Place in the queue that a batch wrote.
#[derive(Debug)]
pub(super) struct WrittenPlace {
    owned: OwnedPosition,
    /// New place of a request that waited before. `None` for a new row: no other transaction inserts one of its call.
    moved_to: Option<StoredPlace>,
}

impl WrittenPlace {
    /// Whether the stored place of the call shows that the batch was committed.
    fn is_at(&self, stored: &StoredPlace) -> bool {
        self.moved_to.as_ref().is_none_or(|place| place == stored)
    }
}

impl Evidence {
    /// Returns the evidence of the batch with `deltas` at time `now`. `first_line` is the number of its first history line, if
    /// any.
    pub fn of(deltas: &Deltas, first_line: Option<i64>, now: OffsetDateTime) -> Self {
        if let Some(number) = first_line {
            return Self::Line(number, now);
        }
        let owned = |rank: &RankedRequest, claim| OwnedPosition { ticket_id: rank.ticket_id, claim };
        let entered = deltas.waiting.iter();
        let entered = entered.map(|new| WrittenPlace { owned: owned(&new.rank, new.request.claim()), moved_to: None });
        let moved = deltas.moved.iter().map(|moved| {
            let place = StoredPlace { position: moved.rank.position(), wait_keys: moved.wait_keys.clone() };
            WrittenPlace { owned: owned(&moved.rank, moved.claim), moved_to: Some(place) }
        });
        let places: Vec<_> = entered.chain(moved).collect();
        match (places.is_empty(), deltas.left_line.is_empty()) {
            (false, _) => Self::Places(places),
            (true, false) => Self::Left(deltas.left_line.clone()),
            (true, true) => Self::Step,
        }
    }

    /// Whether the evidence is present. If it is absent, the batch can be repeated.
    ///
    /// # Errors
    /// [`StoreError`] if the rows cannot be read.
    pub async fn holds(&self, connection: &mut PgConnection) -> Result<bool, StoreError> {
        Ok(match self {
            Self::Line(number, at) => action_record::is_there(&mut *connection, *number, *at).await?,
            Self::Places(places) => {
                let positions: Vec<OwnedPosition> = places.iter().map(|place| place.owned).collect();
                let found = waiting::places_of(&mut *connection, &positions).await?;
                places.iter().any(|place| found.get(&place.owned.ticket_id).is_some_and(|stored| place.is_at(stored)))
            }
            Self::Left(positions) => waiting::places_of(&mut *connection, positions).await?.is_empty(),
            Self::Step => false,
        })
    }
}

#[cfg(test)]
mod tests {
    use rm_model::{em::EmInstance, ledger::RequeuedDelta, wait_queue::WaitKeys};
    use uuid::Uuid;

    use super::*;

    const NOW: OffsetDateTime = OffsetDateTime::UNIX_EPOCH;
    const POSITION: OwnedPosition = OwnedPosition { ticket_id: Uuid::nil(), claim: None };

    /// An EM that is registered and unregistered in one batch leaves no row, but it has history lines.
    #[test]
    fn commit_evidence_is_history_line_of_batch() {
        let left = Deltas { left_line: vec![POSITION], ..Deltas::default() };
        for deltas in [left, Deltas::default()] {
            assert!(matches!(Evidence::of(&deltas, Some(7), NOW), Evidence::Line(7, at) if at == NOW));
        }
    }

    #[test]
    fn commit_evidence_without_history_is_queue_entry_or_retry() {
        let deltas = Deltas { left_line: vec![POSITION], ..Deltas::default() };
        assert!(matches!(Evidence::of(&deltas, None, NOW), Evidence::Left(_)));
        assert!(matches!(Evidence::of(&Deltas::default(), None, NOW), Evidence::Step));
    }

    /// A request that moves without another key has another position.
    #[test]
    fn commit_evidence_of_moved_request_includes_position() {
        let position = |priority| {
            let rank = RankedRequest::new(Uuid::nil(), None, NOW, priority);
            let em = EmInstance::parse("em", "ecm", "host1").unwrap();
            let moved = RequeuedDelta { rank, claim: None, em, wait_keys: WaitKeys::new(), guaranteed_scopes: vec![] };
            let Evidence::Places(places) = Evidence::of(&Deltas { moved: vec![moved], ..Deltas::default() }, None, NOW)
            else {
                panic!("no place")
            };
            places[0].moved_to.as_ref().unwrap().position
        };
        assert_ne!(position(0), position(1));
    }
}
