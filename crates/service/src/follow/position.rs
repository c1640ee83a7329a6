//! Position of a follower in the history: the number of a line, with the id of its history.
//!
//! The text is opaque to callers. A position of another or a reset history is rejected instead of skipping lines.
//!
//! Caller: `follow`.

use std::fmt;

use crate::error::Error;
use rm_model::name::FieldError;
use rm_store::history_horizon::HistoryHorizon;

/// Separator between history id and number.
const SEPARATOR: char = '-';

/// Position after a line of the history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// First 32 bits of the history id.
    history: u32,
    /// Number of the line.
    pub number: i64,
}

impl Position {
    /// Creates the position of line `number` in the history with this horizon.
    pub fn new(horizon: HistoryHorizon, number: i64) -> Self {
        let (history, ..) = horizon.history_id.as_fields();
        Self { history, number }
    }

    /// Returns the position of line `number` in the same history.
    pub fn at(self, number: i64) -> Self {
        Self { number, ..self }
    }

    /// Parses the text of a position.
    ///
    /// # Errors
    /// [`FieldError`] if this service did not write the text.
    pub fn parse(text: &str) -> Result<Self, FieldError> {
        let wrong = || FieldError::new("position", "is not a position of FollowActions; give one unchanged, or none");
        let (history, number) = text.split_once(SEPARATOR).ok_or_else(wrong)?;
        let history = u32::from_str_radix(history, 16).map_err(|_| wrong())?;
        let position = Self { history, number: number.parse().map_err(|_| wrong())? };
        // Each position has exactly one text.
        if position.number < 0 || position.to_string() != text { Err(wrong()) } else { Ok(position) }
    }

    /// Checks that all lines after the position exist. `last` is the last assigned number.
    ///
    /// # Errors
    /// [`Error::PositionUnknown`] if the position is of another history; [`Error::PositionTooOld`] if later lines have been
    /// deleted.
    pub fn check(self, horizon: HistoryHorizon, last: i64) -> Result<(), Error> {
        let here = Self::new(horizon, self.number);
        if here != self || self.number > last {
            return Err(Error::PositionUnknown);
        }
        match self.number < horizon.forgotten {
            true => Err(Error::PositionTooOld { oldest: self.at(horizon.forgotten).to_string() }),
            false => Ok(()),
        }
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}{SEPARATOR}{}", self.history, self.number)
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn horizon(forgotten: i64) -> HistoryHorizon {
        HistoryHorizon { history_id: Uuid::from_u128(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef), forgotten }
    }

    #[test]
    fn history_position_round_trips_and_rejects_other_text() {
        for number in [0, 1, i64::MAX] {
            let position = Position::new(horizon(0), number);
            assert_eq!(Position::parse(&position.to_string()), Ok(position), "{position}");
        }
        let wrong =
            ["", "-", "1", "01234567-", "01234567--1", "01234567-01", "1234567-1", "01234567-+1", "0123456789-1"];
        for text in wrong.into_iter().chain(["01234567-9223372036854775808", "ABCDEF01-1"]) {
            assert_eq!(Position::parse(text).unwrap_err().field, "position", "{text}");
        }
    }

    #[test]
    fn history_position_is_valid_while_later_lines_exist() {
        let at = |number| Position::new(horizon(0), number);
        let old = |number| match at(number).check(horizon(10), 20) {
            Err(Error::PositionTooOld { oldest }) => Position::parse(&oldest).map(|oldest| oldest.number).ok(),
            checked => checked.map(|()| None).unwrap(),
        };
        assert_eq!([0, 9, 10, 20].map(old), [Some(10), Some(10), None, None]);
        assert!(matches!(at(21).check(horizon(10), 20), Err(Error::PositionUnknown)), "put back to an earlier state");
        let other = HistoryHorizon { history_id: Uuid::from_u128(7), forgotten: 0 };
        assert!(matches!(at(5).check(other, 20), Err(Error::PositionUnknown)), "another database");
    }
}
