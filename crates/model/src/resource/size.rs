//! Sizes as text: parsed by Linkis's rules (`20g`), and formatted for display (`20.0 GB`). All units are binary: 1k is 1024
//! bytes.
//!
//! Callers: settings, the limits file and the output of commands.

use super::ResourceError;
use super::error::shown;

const KB: i64 = 1 << 10;
const MB: i64 = 1 << 20;
const GB: i64 = 1 << 30;
const TB: i64 = 1 << 40;
const PB: i64 = 1 << 50;

/// Parses a size in bytes: an integer or a decimal fraction, optionally one blank, optionally a unit.
///
/// The units are b, k, kb, m, mb, g, gb, t, tb, p and pb in either case; the default is bytes. Two decimals count, and the
/// result is truncated, as in Linkis: `1.259g` is 1.25 GB. Surrounding blanks are ignored.
///
/// # Errors
/// [`ResourceError::InvalidSize`] for any other text, including signs and exponents; [`ResourceError::SizeOverflow`] if the
/// size exceeds the largest amount.
pub fn parse_size(text: &str) -> Result<i64, ResourceError> {
    let invalid = || ResourceError::InvalidSize { text: shown(text) };
    let overflow = || ResourceError::SizeOverflow { text: shown(text) };

    let trimmed = text.trim_matches(|c| c <= ' ');
    let (whole, rest) = split_digits(trimmed);
    if whole.is_empty() {
        return Err(invalid());
    }
    let (decimals, rest) = match rest.strip_prefix('.') {
        Some(rest) => match split_digits(rest) {
            ("", _) => return Err(invalid()),
            split => split,
        },
        None => ("", rest),
    };
    let unit = unit(rest.strip_prefix([' ', '\t', '\n', '\x0b', '\x0c', '\r']).unwrap_or(rest)).ok_or_else(invalid)?;

    let whole: i64 = whole.parse().map_err(|_| overflow())?; // only digits, so the only error is an overflow
    let mut digits = decimals.bytes().map(|digit| i128::from(digit - b'0'));
    let hundredths = digits.next().unwrap_or(0) * 10 + digits.next().unwrap_or(0);
    // Below 2^63 * 100 * 2^50, so the product does not overflow.
    let bytes = (i128::from(whole) * 100 + hundredths) * i128::from(unit) / 100;
    i64::try_from(bytes).map_err(|_| overflow())
}

/// Formats a size for display: in the largest unit of which there is at least one, with one decimal; below 1 KB in bytes.
/// The result can be parsed. Negative sizes keep their sign.
#[must_use]
pub fn format_size(bytes: i64) -> String {
    let size = u128::from(bytes.unsigned_abs());
    let sign = if bytes < 0 { "-" } else { "" };
    // Halves round away from zero. A value that rounds to 1024 of a unit is written as one of the next unit.
    let tenths = |unit: i64| (size * 20 + u128::from(unit.unsigned_abs())) / (2 * u128::from(unit.unsigned_abs()));
    for (unit, smaller, name) in [(TB, GB, "TB"), (GB, MB, "GB"), (MB, KB, "MB")] {
        if tenths(smaller) >= 10 * 1024 {
            return format!("{sign}{}.{} {name}", tenths(unit) / 10, tenths(unit) % 10);
        }
    }
    match size {
        0..1024 => format!("{sign}{size} B"),
        _ => format!("{sign}{}.{} KB", tenths(KB) / 10, tenths(KB) % 10),
    }
}

/// Returns whole gigabytes (2^30 bytes), truncated toward zero, as Linkis's shortage messages show them.
#[must_use]
pub const fn whole_gb(bytes: i64) -> i64 {
    bytes / GB
}

fn split_digits(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text.split_at(end)
}

fn unit(name: &str) -> Option<i64> {
    match name.to_ascii_lowercase().as_str() {
        "" | "b" => Some(1),
        "k" | "kb" => Some(KB),
        "m" | "mb" => Some(MB),
        "g" | "gb" => Some(GB),
        "t" | "tb" => Some(TB),
        "p" | "pb" => Some(PB),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse() {
        for (text, bytes) in [
            (" 20g\n", 20 * GB),
            ("7", 7),
            ("7B", 7),
            ("007kb", 7 * KB),
            ("3 Mb", 3 * MB),
            ("3\tmB", 3 * MB),
            ("1P", PB),
            ("1.5", 1),
            ("0.999k", 1013),
            ("1.259g", 5 * GB / 4),
            ("9223372036854775807", i64::MAX),
            ("8191.99p", 9_223_360_777_855_707_381),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text:?}");
        }
    }

    #[test]
    fn malformed_size_is_refused() {
        for text in [
            "",
            " ",
            "g",
            "-1g",
            "+1g",
            "1e9",
            "1  g",
            "1.g",
            ".5g",
            "1.5.g",
            "1 gib",
            "20Gi",
            "1_0",
            "1 g b",
            "１g",
            "1\u{212a}",
        ] {
            assert!(matches!(parse_size(text), Err(ResourceError::InvalidSize { .. })), "{text:?}");
        }
        for text in ["9223372036854775808", "8192p", "8192.0pb", "99999999999999999999999g"] {
            assert!(matches!(parse_size(text), Err(ResourceError::SizeOverflow { .. })), "{text:?}");
        }
    }

    #[test]
    fn sizes_format() {
        for (bytes, text) in [
            (0, "0 B"),
            (-1, "-1 B"),
            (KB - 1, "1023 B"),
            (KB, "1.0 KB"),
            (9 * KB / 4, "2.3 KB"),
            (-9 * KB / 4, "-2.3 KB"),
            (MB - 1, "1.0 MB"),
            (GB - MB, "1023.0 MB"),
            (GB, "1.0 GB"),
            (3 * GB / 2, "1.5 GB"),
            (20 * GB, "20.0 GB"),
            (TB, "1.0 TB"),
            (i64::MIN, "-8388608.0 TB"),
        ] {
            assert_eq!(format_size(bytes), text);
        }
    }
}
