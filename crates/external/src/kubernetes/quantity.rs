//! Kubernetes quantities, such as `500m`, `1.5`, `2Gi` and `1e3`. Caller: `objects`.

/// Maximum length of a quantity, in bytes: Kubernetes writes about a dozen characters.
const BYTES_MAX: usize = 64;

/// Number of smallest units in one: Kubernetes counts in billionths.
const NANO: i128 = 1_000_000_000;

/// A quantity in billionths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Quantity(i128);

impl Quantity {
    /// Parses a quantity; `None` if it is invalid or too large.
    pub fn parse(text: &str) -> Option<Self> {
        if text.len() > BYTES_MAX {
            return None;
        }
        let (number, suffix) = text.split_at(text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len()));
        let scale = scale(suffix)?;
        let (is_negative, number) = match number.strip_prefix('-') {
            Some(number) => (true, number),
            None => (false, number.strip_prefix('+').unwrap_or(number)),
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let is_number = !(whole.is_empty() && fraction.is_empty());
        if !is_number || !whole.bytes().chain(fraction.bytes()).all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        // Digits below a billionth are dropped. Kubernetes rounds them up, by at most one billionth.
        let fraction = fraction.get(..9).unwrap_or(fraction);
        let mut nanos = if whole.is_empty() { 0 } else { whole.parse::<i128>().ok()?.checked_mul(NANO)? };
        if !fraction.is_empty() {
            let places = u32::try_from(fraction.len()).ok()?;
            nanos = nanos.checked_add(fraction.parse::<i128>().ok()?.checked_mul(NANO / 10_i128.pow(places))?)?;
        }
        let nanos = match scale {
            Scale::Times(factor) => nanos.checked_mul(factor)?,
            Scale::Parts(divisor) => nanos / divisor,
        };
        Some(Self(if is_negative { -nanos } else { nanos }))
    }

    /// Returns the quantity in units of 1/`of_whole`, saturating and never negative. Rounds down for a capacity, up for
    /// a use.
    pub fn parts(self, of_whole: i128, rounds: RoundingMode) -> i64 {
        let unit = NANO / of_whole;
        let parts = match rounds {
            RoundingMode::Down => self.0.div_euclid(unit),
            RoundingMode::Up => -(-self.0).div_euclid(unit),
        };
        i64::try_from(parts.max(0)).unwrap_or(i64::MAX - 1)
    }
}

/// Direction of rounding.
#[derive(Debug, Clone, Copy)]
pub(super) enum RoundingMode {
    /// Down, for a capacity.
    Down,
    /// Up, for a use.
    Up,
}

enum Scale {
    Times(i128),
    Parts(i128),
}

fn scale(suffix: &str) -> Option<Scale> {
    let binary = |exponent: u32| Some(Scale::Times(1024_i128.pow(exponent)));
    let decimal = |exponent: u32| Some(Scale::Times(10_i128.pow(exponent)));
    match suffix {
        "" => decimal(0),
        "n" => Some(Scale::Parts(1_000_000_000)),
        "u" => Some(Scale::Parts(1_000_000)),
        "m" => Some(Scale::Parts(1000)),
        "k" => decimal(3),
        "M" => decimal(6),
        "G" => decimal(9),
        "T" => decimal(12),
        "P" => decimal(15),
        "E" => decimal(18),
        "Ki" => binary(1),
        "Mi" => binary(2),
        "Gi" => binary(3),
        "Ti" => binary(4),
        "Pi" => binary(5),
        "Ei" => binary(6),
        exponent => {
            let exponent: i32 = exponent.strip_prefix(['e', 'E'])?.parse().ok()?;
            match exponent {
                0..=18 => decimal(exponent.unsigned_abs()),
                -18..=-1 => Some(Scale::Parts(10_i128.pow(exponent.unsigned_abs()))),
                _ => None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(text: &str, of_whole: i128) -> Option<[i64; 2]> {
        let quantity = Quantity::parse(text)?;
        Some([RoundingMode::Down, RoundingMode::Up].map(|rounds| quantity.parts(of_whole, rounds)))
    }

    #[test]
    fn quantity_in_every_kubernetes_form_is_parsed() {
        for (text, millis) in [
            ("2", [2000, 2000]),
            ("500m", [500, 500]),
            ("1.5", [1500, 1500]),
            (".5", [500, 500]),
            ("0.0001", [0, 1]),
            ("1500001u", [1500, 1501]),
            ("1n", [0, 1]),
            ("1e3", [1_000_000, 1_000_000]),
            ("12E-1", [1200, 1200]),
            ("+1", [1000, 1000]),
            ("-1", [0, 0]),
        ] {
            assert_eq!(parts(text, 1000), Some(millis), "{text}");
        }
        for (text, bytes) in [
            ("128974848", 128_974_848),
            ("129e6", 129_000_000),
            ("129M", 129_000_000),
            ("123Mi", 128_974_848),
            ("1.5Gi", 1_610_612_736),
            ("128974848000m", 128_974_848),
            ("1E3", 1000),
            ("660k", 660_000),
            ("430Gi", 461_708_984_320),
            ("1E", 1_000_000_000_000_000_000),
            ("7Ei", 7 << 60),
            ("8Ei", i64::MAX - 1),
            ("999999999999999999999999", i64::MAX - 1),
        ] {
            assert_eq!(parts(text, 1), Some([bytes, bytes]), "{text}");
        }
    }

    #[test]
    fn quantity_fraction_of_byte_is_rounded() {
        assert_eq!(parts("4.1Gi", 1), Some([4_402_341_478, 4_402_341_479]));
        assert_eq!(parts("940k", 1000), Some([940_000_000, 940_000_000]));
    }

    #[test]
    fn quantity_malformed_is_none() {
        for text in
            ["", "m", "Gi", "1 Gi", "1gi", "1K", "0x10", "1.2.3", "--1", "1e", "1e99", "1E3E", "ü", "1ü", "∞", "."]
        {
            assert_eq!(Quantity::parse(text), None, "{text}");
        }
        assert_eq!(Quantity::parse(&"9".repeat(64)), None, "above the largest number");
        assert_eq!(Quantity::parse(&"0".repeat(65)), None);
    }
}
