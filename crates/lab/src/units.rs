//! Sizes, times and fractions as people type them, counts and waits as people read them.
//!
//! Every quantity on the command line or in a configuration file is parsed here, so a suffix means
//! the same everywhere: `MiB` is 2^20 bytes, `MB` is 10^6, `us` is microseconds, `1%` is 10,000
//! parts per million. All arithmetic is on integers: `1.5KiB` is exactly 1536, and a value that is
//! not a whole number of the unit is refused, not rounded. A bare `M` is refused too, because it is
//! ambiguous.

use std::fmt;

use roce::Duration;
use thiserror::Error;

/// Why a quantity cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum UnitError {
    /// There is no number in front of the suffix.
    #[error("'{text}' does not begin with a number; write it like {example}")]
    NoNumber {
        /// What was typed.
        text: String,
        /// A valid quantity of this kind.
        example: &'static str,
    },
    /// The suffix is not a unit of this kind of quantity.
    #[error("'{suffix}' is no unit here; there are {known}")]
    Suffix {
        /// The text behind the number.
        suffix: String,
        /// The valid suffixes.
        known: String,
    },
    /// There is no suffix, and this kind of quantity needs one.
    #[error("'{text}' has no unit; there are {known}")]
    NoUnit {
        /// What was typed.
        text: String,
        /// The valid suffixes.
        known: String,
    },
    /// The value is 0, and may not be.
    #[error("'{text}' is 0; it has to be more")]
    Zero {
        /// What was typed.
        text: String,
    },
    /// The value is finer than the smallest unit.
    #[error("'{text}' is not a whole number of {unit}")]
    TooFine {
        /// What was typed.
        text: String,
        /// The smallest unit.
        unit: &'static str,
    },
    /// The value is larger than the quantity may be.
    #[error("'{text}' is too large; the most is {most}")]
    TooLarge {
        /// What was typed.
        text: String,
        /// The largest value, as it would be typed.
        most: &'static str,
    },
}

/// One kind of quantity.
struct Scale {
    /// The smallest unit, in words.
    unit: &'static str,
    example: &'static str,
    most: u64,
    /// That value, as it would be typed.
    most_text: &'static str,
    /// Suffix in lower case and how many of the smallest unit it stands for.
    suffixes: &'static [(&'static str, u64)],
}

const SIZE: Scale = Scale {
    unit: "bytes",
    example: "1MiB",
    most: u64::MAX,
    most_text: "16777215TiB",
    suffixes: &[
        ("", 1),
        ("b", 1),
        ("kib", 1 << 10),
        ("mib", 1 << 20),
        ("gib", 1 << 30),
        ("tib", 1 << 40),
        ("kb", 1_000),
        ("mb", 1_000_000),
        ("gb", 1_000_000_000),
        ("tb", 1_000_000_000_000),
    ],
};

const TIME: Scale = Scale {
    unit: "nanoseconds",
    example: "50us",
    most: u64::MAX,
    most_text: "5000000h",
    suffixes: &[
        ("ns", 1),
        ("us", 1_000),
        ("µs", 1_000),
        ("ms", 1_000_000),
        ("s", 1_000_000_000),
        ("min", 60_000_000_000),
        ("h", 3_600_000_000_000),
    ],
};

const FRACTION: Scale = Scale {
    unit: "parts per million",
    example: "1%",
    most: 1_000_000,
    most_text: "100%",
    suffixes: &[("", 1_000_000), ("%", 10_000), ("ppm", 1)],
};

const RATE: Scale = Scale {
    unit: "bits per second",
    example: "10Gbit/s",
    most: 1_600_000_000_000,
    most_text: "1600Gbit/s",
    suffixes: &[
        ("kbit/s", 1_000),
        ("mbit/s", 1_000_000),
        ("gbit/s", 1_000_000_000),
        ("kbit", 1_000),
        ("mbit", 1_000_000),
        ("gbit", 1_000_000_000),
    ],
};

/// Reads a rate in bits per second, at least 1 kbit/s: `200Mbit/s`, `10gbit`. A number without a
/// unit is refused.
///
/// # Errors
/// Says which part of the text cannot be read.
pub fn rate_bps(text: &str) -> Result<u64, UnitError> {
    match RATE.parse(text)? {
        0 => Err(UnitError::Zero { text: text.to_owned() }),
        1..1000 => Err(UnitError::TooFine { text: text.to_owned(), unit: "kbit/s" }),
        rate => Ok(rate),
    }
}

/// Reads a size in bytes: `4096`, `64KiB`, `1.5GB`.
///
/// # Errors
/// Says which part of the text cannot be read.
pub fn size_bytes(text: &str) -> Result<u64, UnitError> {
    SIZE.parse(text)
}

/// Reads a span of time: `250ns`, `50us`, `1.5s`, `2min`. A number without a unit is refused.
///
/// # Errors
/// Says which part of the text cannot be read.
pub fn duration(text: &str) -> Result<Duration, UnitError> {
    TIME.parse(text).map(Duration::from_nanos)
}

/// Reads a fraction from 0 to 1 in parts per million: `1%`, `0.01`, `250ppm`.
///
/// # Errors
/// Names the part of the text that cannot be read, and refuses more than the whole.
pub fn fraction_ppm(text: &str) -> Result<u32, UnitError> {
    // At most one million, so the conversion loses nothing.
    FRACTION.parse(text).map(|ppm| ppm as u32)
}

impl Scale {
    fn parse(&self, text: &str) -> Result<u64, UnitError> {
        let trimmed = text.trim();
        let end = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, suffix) = trimmed.split_at(end);
        let (digits, decimals) = self.digits(number, text)?;
        let factor = self.factor(suffix.trim(), text)?;
        let too_large = || UnitError::TooLarge { text: text.to_owned(), most: self.most_text };
        let scaled = digits.checked_mul(u128::from(factor)).ok_or_else(too_large)?;
        let divisor = 10_u128.pow(decimals);
        if !scaled.is_multiple_of(divisor) {
            return Err(UnitError::TooFine { text: text.to_owned(), unit: self.unit });
        }
        let value = u64::try_from(scaled / divisor).map_err(|_| too_large())?;
        if value > self.most { Err(too_large()) } else { Ok(value) }
    }

    /// The digits as one integer, and how many of them are behind the point.
    fn digits(&self, number: &str, text: &str) -> Result<(u128, u32), UnitError> {
        let no_number = || UnitError::NoNumber { text: text.to_owned(), example: self.example };
        let (whole, decimals) = number.split_once('.').unwrap_or((number, ""));
        let points = number.matches('.').count();
        // Eighteen digits of each keep every product below 2^128.
        if whole.is_empty() || points > 1 || (points == 1 && decimals.is_empty()) {
            return Err(no_number());
        }
        if whole.len() > 20 {
            return Err(UnitError::TooLarge { text: text.to_owned(), most: self.most_text });
        }
        if decimals.len() > 15 {
            return Err(UnitError::TooFine { text: text.to_owned(), unit: self.unit });
        }
        let digits = format!("{whole}{decimals}").parse().map_err(|_| no_number())?;
        Ok((digits, decimals.len() as u32))
    }

    fn factor(&self, suffix: &str, text: &str) -> Result<u64, UnitError> {
        let wanted = suffix.to_lowercase();
        let found = self.suffixes.iter().find(|(name, _)| *name == wanted);
        found.map(|(_, factor)| *factor).ok_or_else(|| match suffix.is_empty() {
            true => UnitError::NoUnit { text: text.to_owned(), known: self.names() },
            false => UnitError::Suffix { suffix: suffix.to_owned(), known: self.names() },
        })
    }

    fn names(&self) -> String {
        let names: Vec<&str> =
            self.suffixes.iter().map(|(name, _)| *name).filter(|name| !name.is_empty()).collect();
        names.join(", ")
    }
}

/// A count for people, with separators: `1,234,567`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count(pub u64);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = self.0.to_string();
        let mut text = String::with_capacity(digits.len() * 4 / 3 + 1);
        for (at, digit) in digits.chars().enumerate() {
            if at > 0 && (digits.len() - at).is_multiple_of(3) {
                text.push(',');
            }
            text.push(digit);
        }
        f.pad(&text)
    }
}

/// A time that people wait, as `1 h 05 min`, `3 min 20 s` or `12 s`.
#[derive(Clone, Copy, Debug)]
pub struct Wait(pub std::time::Duration);

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
        match (hours, minutes) {
            (0, 0) => write!(f, "{seconds} s"),
            (0, _) => write!(f, "{minutes} min {:02} s", seconds % 60),
            _ => write!(f, "{hours} h {minutes:02} min"),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_exact() {
        let cases = [
            ("0", 0),
            ("4096", 4096),
            ("1MiB", 1 << 20),
            ("1 MiB", 1 << 20),
            ("1.5KiB", 1536),
            ("1.5GB", 1_500_000_000),
            ("64kb", 64_000),
            ("18446744073709551615", u64::MAX),
        ];
        for (text, bytes) in cases {
            assert_eq!(size_bytes(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn times_need_a_unit() {
        assert_eq!(duration("50us").unwrap(), Duration::from_nanos(50_000));
        assert_eq!(duration("50µs").unwrap(), Duration::from_nanos(50_000));
        assert_eq!(duration("1.5s").unwrap(), Duration::from_nanos(1_500_000_000));
        let no_unit = duration("50").expect_err("ambiguous").to_string();
        assert!(no_unit.starts_with("'50' has no unit; there are "), "{no_unit}");
    }

    #[test]
    fn fractions_come_in_three_spellings() {
        assert_eq!(fraction_ppm("1%"), fraction_ppm("0.01"));
        assert_eq!(fraction_ppm("1%"), Ok(10_000));
        assert_eq!(fraction_ppm("250ppm"), Ok(250));
        assert_eq!(fraction_ppm("100%"), Ok(1_000_000));
        let error = fraction_ppm("101%").unwrap_err().to_string();
        assert_eq!(error, "'101%' is too large; the most is 100%");
    }

    #[test]
    fn rates_need_a_unit_and_are_not_zero() {
        assert_eq!(rate_bps("10Gbit/s"), Ok(10_000_000_000));
        assert_eq!(rate_bps("2.5gbit"), Ok(2_500_000_000));
        assert_eq!(rate_bps("1kbit/s"), Ok(1000));
        for bad in ["10G", "5", "0Gbit/s", "0.5kbit", "2000Gbit/s", "fast"] {
            assert!(rate_bps(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_cannot_be_read_exactly_is_refused() {
        assert!(matches!(size_bytes("1M"), Err(UnitError::Suffix { .. })));
        assert!(matches!(size_bytes("-1"), Err(UnitError::NoNumber { .. })));
        assert!(matches!(size_bytes("1.2.3MB"), Err(UnitError::NoNumber { .. })));
        assert!(matches!(size_bytes("1.MB"), Err(UnitError::NoNumber { .. })));
        assert!(matches!(size_bytes(""), Err(UnitError::NoNumber { .. })));
        assert!(matches!(size_bytes("0.5"), Err(UnitError::TooFine { .. })));
        assert!(matches!(size_bytes("18446744073709551616"), Err(UnitError::TooLarge { .. })));
        assert!(matches!(size_bytes("99999999999999999999TiB"), Err(UnitError::TooLarge { .. })));
        assert!(matches!(size_bytes(&"9".repeat(400)), Err(UnitError::TooLarge { .. })));
    }

    #[test]
    fn counts_read_well() {
        assert_eq!(Count(7).to_string(), "7");
        assert_eq!(Count(1_234_567).to_string(), "1,234,567");
    }

    #[test]
    fn waits_have_two_units_at_most() {
        let shown = |seconds| Wait(std::time::Duration::from_secs(seconds)).to_string();
        assert_eq!(shown(12), "12 s");
        assert_eq!(shown(200), "3 min 20 s");
        assert_eq!(shown(3_900), "1 h 05 min");
    }
}
