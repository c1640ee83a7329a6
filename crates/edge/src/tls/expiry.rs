//! Expiry of certificates. The parser reads the DER of a certificate up to its validity and never verifies it. Callers:
//! `Tls` and the edge.

use std::time::Duration;

use rustls::pki_types::CertificateDer;
use time::{Date, Month, OffsetDateTime, Time};

/// DER tag of a sequence.
const SEQUENCE: u8 = 0x30;
/// DER tag of an integer.
const INTEGER: u8 = 0x02;
/// DER tag of the version of a certificate.
const VERSION: u8 = 0xa0;
/// DER tag of a time with a two-digit year.
const UTC_TIME: u8 = 0x17;
/// DER tag of a time with a four-digit year.
const GENERALIZED_TIME: u8 = 0x18;

/// Returns the remaining validity of a certificate; `None` if it has expired or cannot be read.
#[expect(
    clippy::disallowed_methods,
    reason = "the handshake, too, compares certificates with the clock of this machine"
)]
pub fn left(certificate: &CertificateDer<'_>) -> Option<Duration> {
    Duration::try_from(not_after(certificate)? - OffsetDateTime::now_utc()).ok()
}

/// Returns the earliest end of validity; `None` if no certificate can be read.
pub fn earliest<'a>(certificates: impl IntoIterator<Item = &'a CertificateDer<'a>>) -> Option<OffsetDateTime> {
    certificates.into_iter().filter_map(|certificate| not_after(certificate)).min()
}

/// Returns the end of a certificate's validity.
fn not_after(certificate: &[u8]) -> Option<OffsetDateTime> {
    let (certificate, _) = element(SEQUENCE, certificate)?;
    let (to_be_signed, _) = element(SEQUENCE, certificate)?;
    // Certificates before version 3 omit the version.
    let rest = element(VERSION, to_be_signed).map_or(to_be_signed, |(_, rest)| rest);
    let (_serial_number, rest) = element(INTEGER, rest)?;
    let (_signature, rest) = element(SEQUENCE, rest)?;
    let (_issuer, rest) = element(SEQUENCE, rest)?;
    let (validity, _) = element(SEQUENCE, rest)?;
    let (_, _not_before, rest) = any_element(validity)?;
    let (tag, not_after, _) = any_element(rest)?;
    time_of(tag, not_after)
}

/// Returns the content of an element with the tag `wanted`, and the bytes after it.
fn element(wanted: u8, bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (tag, content, rest) = any_element(bytes)?;
    (tag == wanted).then_some((content, rest))
}

/// Returns the tag and the content of an element, and the bytes after it.
fn any_element(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&tag, rest) = bytes.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (length, rest) = match first {
        0..=0x7f => (usize::from(first), rest),
        // No certificate needs a longer length.
        0x81..=0x84 => {
            let (digits, rest) = rest.split_at_checked(usize::from(first - 0x80))?;
            (digits.iter().fold(0, |length: usize, digit| (length << 8) | usize::from(*digit)), rest)
        }
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(length)?;
    Some((tag, content, rest))
}

/// Parses `YYMMDDHHMMSSZ` of the years 1950 to 2049, or `YYYYMMDDHHMMSSZ`.
fn time_of(tag: u8, text: &[u8]) -> Option<OffsetDateTime> {
    let text = std::str::from_utf8(text).ok()?.strip_suffix('Z')?;
    let (year, rest) = match tag {
        UTC_TIME => {
            let (year, rest) = text.split_at_checked(2)?;
            let year: i32 = number(year)?;
            (if year < 50 { 2000 + year } else { 1900 + year }, rest)
        }
        GENERALIZED_TIME => {
            let (year, rest) = text.split_at_checked(4)?;
            (number(year)?, rest)
        }
        _ => return None,
    };
    let mut rest = rest;
    let mut pair = || -> Option<u8> {
        let (digits, behind) = rest.split_at_checked(2)?;
        rest = behind;
        number(digits)
    };
    let (month, day, hour, minute, second) = (pair()?, pair()?, pair()?, pair()?, pair()?);
    let date = Date::from_calendar_date(year, Month::try_from(month).ok()?, day).ok()?;
    Some(date.with_time(Time::from_hms(hour, minute, second).ok()?).assume_utc())
}

fn number<N: std::str::FromStr>(digits: &str) -> Option<N> {
    let are_digits = digits.bytes().all(|byte| byte.is_ascii_digit());
    if are_digits { digits.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};
    use time::macros::datetime;

    use super::*;

    fn certificate(not_after: OffsetDateTime) -> CertificateDer<'static> {
        let mut params = CertificateParams::new(vec!["host1".to_owned()]).unwrap();
        params.not_after = not_after;
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
    }

    #[test]
    fn certificate_expiry_is_read_in_both_time_formats() {
        // The short form until 2049, and the long form from then on.
        let ends =
            [datetime!(2049-12-31 23:59:59 UTC), datetime!(2050-01-01 0:00 UTC), datetime!(2031-02-28 1:02:03 UTC)];
        let certificates = ends.map(certificate);
        for (certificate, end) in certificates.iter().zip(ends) {
            assert_eq!(earliest([certificate]), Some(end));
        }
        assert_eq!(earliest(&certificates), Some(ends[2]));
        assert_eq!(earliest([]), None);
    }

    #[test]
    fn certificate_expiry_of_invalid_input_is_absent() {
        let certificate = certificate(datetime!(2049-12-31 23:59:59 UTC));
        for length in 0..certificate.len() {
            assert_eq!(not_after(&certificate[..length]), None, "{length}");
        }
        for at in 0..certificate.len() {
            let mut spoilt = certificate.to_vec();
            for byte in [0, 0x7f, 0x80, 0x84, 0x85, 0xff] {
                spoilt[at] = byte;
                let _ = not_after(&spoilt);
            }
        }
        for (tag, text) in [
            (UTC_TIME, "2601010000Z"),
            (UTC_TIME, "261301000000Z"),
            (UTC_TIME, "260101000000"),
            (UTC_TIME, "26010100000+Z"),
            (GENERALIZED_TIME, "2026010100000ü"),
            (SEQUENCE, "20260101000000Z"),
        ] {
            assert_eq!(time_of(tag, text.as_bytes()), None, "{text}");
        }
    }
}
