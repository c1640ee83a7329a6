//! Retries: what follows when the transaction of a batch fails.
//!
//! A failure of one operation must not fail its neighbours. A batch whose commit may have taken effect is tried again only if the
//! evidence shows that it did not, or if its repetition is safe. PostgreSQL does not name the operation that waited for a row or failed, so such a batch is split.
//!
//! Never: decides whether a commit took effect, which the evidence of the batch does.
//! Caller: `rm_service::committer::worker`.

/// Maximum number of attempts after a write conflict.
const RETRIES_MAX: u32 = 5;

/// Maximum number of attempts after a lock timeout on rows, before the part is split in halves.
const WAITS_MAX: u32 = 2;

/// Maximum number of lock timeouts of one batch, of 0.1 s each, before all operations of a part whose rows are locked wait in the queues of
/// their keys. The locked row may be that of a scope, which operations at many EMs use.
const LOCK_WAITS_MAX: u32 = 20;

/// Operations that share one attempt. `T` is an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchPart<T> {
    /// The operations, in the order in which they are applied.
    pub operations: Vec<T>,
    /// Number of counted attempts so far.
    tries: u32,
    /// Whether the part is half of a batch that failed.
    is_half: bool,
}

/// Failure of an attempt without effect, but for steps through tickets that are safe to repeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchFailure {
    /// A limit change is in progress. It waits only for earlier batches and ends soon.
    LimitsLocked,
    /// The limits changed since the last batch.
    LimitsChanged,
    /// Other operations of the batch have a contended lock key and were removed from the part.
    KeysRemoved,
    /// Another transaction locks rows without their resource lock.
    RowsLocked,
    /// A statement took too long.
    TooLong,
    /// Another program wrote the same rows.
    Race,
    /// The connection broke in the commit, and the commit did not take effect.
    NotCommitted,
    /// The connection had been used before, and broke. A new connection may work.
    ConnectionLost,
    /// The database is unavailable, or this release must not write.
    Unavailable,
    /// An operation cannot be applied.
    Defect,
}

impl BatchFailure {
    /// Whether another transaction locks the limits or rows of the operations.
    pub fn is_contention(self) -> bool {
        matches!(self, Self::LimitsLocked | Self::RowsLocked)
    }
}

/// Decision after a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// Try the same part once more.
    Again,
    /// Try each half alone.
    Halves,
    /// Try each operation alone.
    Singles,
    /// The operations wait in the queues of their lock keys.
    WaitForKeys,
    /// All operations fail.
    Fail,
}

impl<T> BatchPart<T> {
    /// Creates the first part, with all operations of a batch.
    pub fn new(operations: Vec<T>) -> Self {
        Self { operations, tries: 0, is_half: false }
    }

    /// Decides what follows from `failure`, and counts the attempt. `lock_waits` is the number of lock timeouts of the whole batch so far.
    pub fn after(&mut self, failure: BatchFailure, lock_waits: u32) -> Retry {
        let is_one = self.operations.len() <= 1;
        match failure {
            BatchFailure::LimitsLocked
            | BatchFailure::LimitsChanged
            | BatchFailure::KeysRemoved
            | BatchFailure::ConnectionLost => Retry::Again,
            BatchFailure::RowsLocked if lock_waits >= LOCK_WAITS_MAX => Retry::WaitForKeys,
            BatchFailure::RowsLocked if self.tries < WAITS_MAX => self.again(),
            BatchFailure::RowsLocked if is_one => Retry::WaitForKeys,
            BatchFailure::RowsLocked => Retry::Halves,
            // Half of the operations may fit. A half that also fails shows that the database is too slow.
            BatchFailure::TooLong if is_one || self.is_half => Retry::Fail,
            BatchFailure::TooLong => Retry::Halves,
            BatchFailure::Race | BatchFailure::NotCommitted if self.tries < RETRIES_MAX => self.again(),
            // Single attempts identify the operation that fails.
            BatchFailure::Race | BatchFailure::Defect if !is_one => Retry::Singles,
            BatchFailure::Race | BatchFailure::NotCommitted | BatchFailure::Unavailable | BatchFailure::Defect => {
                Retry::Fail
            }
        }
    }

    fn again(&mut self) -> Retry {
        self.tries += 1;
        Retry::Again
    }

    /// Splits the part in two halves. A single operation stays one part.
    pub fn halves(mut self) -> Vec<Self> {
        let rest = self.operations.split_off(self.operations.len() / 2);
        let of = |operations| Self { operations, tries: WAITS_MAX, is_half: true };
        [self.operations, rest].into_iter().filter(|operations| !operations.is_empty()).map(of).collect()
    }

    /// Splits the part into parts of one operation.
    pub fn singles(self) -> Vec<Self> {
        let Self { operations, tries, is_half } = self;
        let single = |operation| Self { operations: vec![operation], tries, is_half };
        operations.into_iter().map(single).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Applies a batch whose failure depends on the operations of a part. Returns the operations that failed, those that wait
    /// for their keys, and the number of attempts.
    fn run(operations: u32, fails: impl Fn(&[u32]) -> Option<BatchFailure>) -> (Vec<u32>, Vec<u32>, u32) {
        let mut parts = vec![BatchPart::new((0..operations).collect())];
        let (mut failed, mut waiting, mut attempts, mut lock_waits) = (vec![], vec![], 0, 0);
        while let Some(mut part) = parts.pop() {
            attempts += 1;
            assert!(attempts < 10_000, "attempts end");
            let Some(failure) = fails(&part.operations) else { continue };
            lock_waits += u32::from(failure == BatchFailure::RowsLocked);
            match part.after(failure, lock_waits) {
                Retry::Again => parts.push(part),
                Retry::Halves => parts.extend(part.halves()),
                Retry::Singles => parts.extend(part.singles()),
                Retry::WaitForKeys => waiting.extend(part.operations),
                Retry::Fail => failed.extend(part.operations),
            }
        }
        (failed, waiting, attempts)
    }

    #[test]
    fn failed_operation_fails_no_other() {
        let (failed, waiting, attempts) = run(512, |part| part.contains(&7).then_some(BatchFailure::Defect));
        assert_eq!((failed, waiting, attempts), (vec![7], vec![], 1 + 512));
    }

    #[test]
    fn write_conflict_is_tried_again_then_alone() {
        let (failed, _, attempts) = run(4, |part| part.contains(&2).then_some(BatchFailure::Race));
        assert_eq!((failed, attempts), (vec![2], RETRIES_MAX + 1 + 4));
        let (failed, _, attempts) = run(4, |_| Some(BatchFailure::NotCommitted));
        assert_eq!((failed.len(), attempts), (4, RETRIES_MAX + 1), "alone it would fail likewise");
    }

    #[test]
    fn locked_row_moves_one_operation_to_its_key() {
        let (failed, waiting, attempts) = run(512, |part| part.contains(&500).then_some(BatchFailure::RowsLocked));
        assert_eq!((failed, waiting), (vec![], vec![500]));
        assert!(attempts <= WAITS_MAX + 1 + 2 * 9, "{attempts}");
    }

    #[test]
    fn locked_rows_of_many_operations_delay_others_by_bounded_number_of_attempts() {
        let is_locked = |operation: &u32| operation.count_ones() != 2;
        let (failed, waiting, attempts) =
            run(512, |part| part.iter().any(is_locked).then_some(BatchFailure::RowsLocked));
        assert!(failed.is_empty());
        assert!((0..512).filter(is_locked).all(|operation| waiting.contains(&operation)));
        assert!(attempts < 2 * LOCK_WAITS_MAX, "{attempts}");
    }

    #[test]
    fn slow_batch_is_halved_once() {
        let (failed, _, attempts) = run(8, |part| (part.len() > 4).then_some(BatchFailure::TooLong));
        assert_eq!((failed.len(), attempts), (0, 3));
        let (failed, _, attempts) = run(8, |part| part.contains(&0).then_some(BatchFailure::TooLong));
        assert_eq!((failed, attempts), (vec![0, 1, 2, 3], 3));
    }

    #[test]
    fn unavailable_database_fails_all_at_once() {
        assert_eq!(run(512, |_| Some(BatchFailure::Unavailable)).2, 1);
    }

    #[test]
    fn only_locked_limits_and_rows_count_as_contention() {
        for (failure, is_contention) in
            [(BatchFailure::LimitsLocked, true), (BatchFailure::Race, false), (BatchFailure::RowsLocked, true)]
        {
            assert_eq!(failure.is_contention(), is_contention, "{failure:?}");
        }
    }
}
