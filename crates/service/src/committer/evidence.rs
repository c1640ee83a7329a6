//! Evidence of a commit: the rows that show whether a batch was committed although its connection broke.
//!
//! A batch commits as a whole, so one row is enough if no other transaction can have written it. The state of a ticket or EM is
//! no evidence: other instances serve the same callers and deadlines and can cause the same state.
//!
//! Never: decides a retry.
//! Caller: `worker`.

use sqlx::PgConnection;
use time::OffsetDateTime;

use rm_model::{
    ledger::Deltas,
    order::RankedRequest,
    wait_queue::{OwnedPosition, WaitKeys},
};
use rm_store::{StoreError, action_record, waiting};

/// Rows that only this batch can have written or deleted.
#[derive(Debug)]
pub(super) enum Evidence {
    /// History line, by number and time. Each batch that grants, ends or changes a ticket, or changes an EM, writes one, and no
    /// other transaction writes that number.
    Told(i64, OffsetDateTime),
    /// Queue entries that the batch inserted or updated, with their wait keys. If none matches, the batch was rolled back or
    /// the entries were deleted since; in both cases, the requests enter the queue again.
    Stands(Vec<(OwnedPosition, WaitKeys)>),
    /// Positions that the batch deleted without a history line. If their calls own none of them, they are deleted, regardless of
    /// the transaction that did it.
    Left(Vec<OwnedPosition>),
    /// A step through the tickets of an EM without other writes. Repeating the batch is safe: the step continues from the EM's
    /// row.
    Step,
}

impl Evidence {
    /// Returns the evidence of the batch with `deltas` at time `now`. `first_line` is the number of its first history line, if
    /// any.
    pub fn of(deltas: &Deltas, first_line: Option<i64>, now: OffsetDateTime) -> Self {
        if let Some(number) = first_line {
            return Self::Told(number, now);
        }
        let owned = |rank: &RankedRequest, claim| OwnedPosition { ticket_id: rank.ticket_id, claim };
        let entered = deltas.waiting.iter();
        let entered = entered.map(|new| (owned(&new.rank, new.request.claim()), new.wait_keys.clone()));
        let moved = deltas.moved.iter().map(|moved| (owned(&moved.rank, moved.claim), moved.wait_keys.clone()));
        let stands: Vec<_> = entered.chain(moved).collect();
        match (stands.is_empty(), deltas.left_line.is_empty()) {
            (false, _) => Self::Stands(stands),
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
            Self::Told(number, at) => action_record::is_there(&mut *connection, *number, *at).await?,
            Self::Stands(stands) => {
                let positions: Vec<OwnedPosition> = stands.iter().map(|(position, _)| *position).collect();
                let found = waiting::wait_keys_of(&mut *connection, &positions).await?;
                stands.iter().any(|(position, wait_keys)| found.get(&position.ticket_id) == Some(wait_keys))
            }
            Self::Left(positions) => waiting::wait_keys_of(&mut *connection, positions).await?.is_empty(),
            Self::Step => false,
        })
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    const NOW: OffsetDateTime = OffsetDateTime::UNIX_EPOCH;
    const POSITION: OwnedPosition = OwnedPosition { ticket_id: Uuid::nil(), claim: None };

    /// An EM that is registered and unregistered in one batch leaves no row, but it has history lines.
    #[test]
    fn commit_evidence_is_history_line_of_batch() {
        let left = Deltas { left_line: vec![POSITION], ..Deltas::default() };
        for deltas in [left, Deltas::default()] {
            assert!(matches!(Evidence::of(&deltas, Some(7), NOW), Evidence::Told(7, at) if at == NOW));
        }
    }

    #[test]
    fn commit_evidence_without_history_is_queue_entry_or_retry() {
        let deltas = Deltas { left_line: vec![POSITION], ..Deltas::default() };
        assert!(matches!(Evidence::of(&deltas, None, NOW), Evidence::Left(_)));
        assert!(matches!(Evidence::of(&Deltas::default(), None, NOW), Evidence::Step));
    }
}
