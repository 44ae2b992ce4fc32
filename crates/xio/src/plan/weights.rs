//! Weights of a blend: numbers as people write them, and the whole numbers that an order is made
//! of.
//!
//! A weight is `3`, `0.5`, `6972290`, `1.5e-3` or `1/3`, all of them exact. The weights of a phase
//! become whole numbers without a common divisor by the first of these rules that keeps their sum
//! within a limit:
//!
//! 1. exactly, as they are written;
//! 2. as the fractions that they are but for rounding: `0.16666666666666666` of a sum of one is
//!    `1/6`, because floats have 53 bits and this is closer than 40;
//! 3. in parts of the limit, rounded down and at least one.

use alloc::vec::Vec;

use super::error::WeightProblem;

/// Most digits of a number that do not begin or end it with zeros: those of a 64-bit float, and one
/// more.
const MAX_DIGITS: usize = 18;

/// Powers of ten that may follow such digits.
const EXPONENTS: core::ops::RangeInclusive<i64> = -24..=12;

/// Sum of the weights of a phase in parts of their common denominator: a limit times this is still
/// a number.
const MAX_SUM: u128 = 1 << 107;

/// A float of 53 bits is the closest to a fraction that differs from it by less than this relative
/// share.
const ROUNDING_BITS: u32 = 40;

/// A weight, as it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Weight {
    numerator: u128,
    /// Not 0.
    denominator: u128,
}

impl Weight {
    pub(super) const ZERO: Weight = Weight { numerator: 0, denominator: 1 };

    /// Parses a decimal number, with or without an exponent, or a fraction of two whole numbers.
    pub(super) fn parse(text: &str) -> Result<Weight, WeightProblem> {
        if let Some(positive) = text.strip_prefix('-')
            && positive.starts_with(|c: char| c.is_ascii_digit() || c == '.')
        {
            return Err(WeightProblem::Negative);
        }
        let Some((above, below)) = text.split_once('/') else {
            return Weight::decimal(text);
        };
        let (above, below) = (whole(above)?, whole(below)?);
        match below {
            0 => Err(WeightProblem::NotANumber),
            _ => Ok(Weight { numerator: above, denominator: below }),
        }
    }

    fn decimal(text: &str) -> Result<Weight, WeightProblem> {
        let (number, exponent) = match text.split_once(['e', 'E']) {
            Some((number, exponent)) => {
                let exponent = exponent.parse::<i16>().map_err(|_| WeightProblem::NotANumber)?;
                (number, i64::from(exponent))
            }
            None => (text, 0),
        };
        let (before, after) = number.split_once('.').unwrap_or((number, ""));
        let is_digits = |text: &str| text.bytes().all(|c| c.is_ascii_digit());
        if before.len() + after.len() == 0 || !is_digits(before) || !is_digits(after) {
            return Err(WeightProblem::NotANumber);
        }
        let digits = || before.bytes().chain(after.bytes());
        let trailing = digits().rev().take_while(|c| *c == b'0').count();
        let kept = before.len() + after.len() - trailing;
        let leading = digits().take(kept).take_while(|c| *c == b'0').count();
        if kept == leading {
            return Ok(Weight::ZERO);
        }
        // Of a plan, whose length is limited.
        let exponent = exponent + trailing as i64 - after.len() as i64;
        if kept - leading > MAX_DIGITS || !EXPONENTS.contains(&exponent) {
            return Err(WeightProblem::Digits);
        }
        let digits = digits().take(kept).fold(0, |value, c| value * 10 + u128::from(c - b'0'));
        let power = 10_u128.pow(exponent.unsigned_abs() as u32);
        Ok(match exponent >= 0 {
            true => Weight { numerator: digits * power, denominator: 1 },
            false => Weight { numerator: digits, denominator: power },
        })
    }
}

fn whole(digits: &str) -> Result<u128, WeightProblem> {
    let number = digits.parse().ok().filter(|_| digits.bytes().all(|c| c.is_ascii_digit()));
    let number: u128 = number.ok_or(WeightProblem::NotANumber)?;
    if number >= 10_u128.pow(MAX_DIGITS as u32) { Err(WeightProblem::Digits) } else { Ok(number) }
}

/// The weights of one phase as whole numbers without a common divisor.
#[derive(Debug)]
pub(super) struct Phase {
    parts: Vec<u128>,
    sum: u128,
}

impl Phase {
    /// Exactly; `None` if they lie too far apart to be kept.
    pub(super) fn new(weights: &[Weight]) -> Option<Phase> {
        let common = weights.iter().try_fold(1_u128, |all, weight| {
            let Weight { numerator, denominator } = *weight;
            let least = denominator / gcd(numerator, denominator);
            all.checked_mul(least / gcd(all, least))
        })?;
        let part = |weight: &Weight| {
            let divisor = gcd(weight.numerator, weight.denominator);
            let (numerator, denominator) =
                (weight.numerator / divisor, weight.denominator / divisor);
            numerator.checked_mul(common / denominator)
        };
        let parts: Vec<u128> = weights.iter().map(part).collect::<Option<_>>()?;
        let sum = parts.iter().try_fold(0_u128, |sum, part| sum.checked_add(*part))?;
        (sum < MAX_SUM).then(|| Phase { parts, sum }.reduced())
    }

    fn reduced(self) -> Phase {
        let divisor = self.parts.iter().copied().fold(0, gcd).max(1);
        let parts = self.parts.iter().map(|part| part / divisor).collect();
        Phase { parts, sum: self.sum / divisor }
    }

    /// Sum of the parts; 0 if all weights are.
    pub(super) fn sum(&self) -> u128 {
        self.sum
    }

    /// The parts, whose sum is at most `limit`, by the rules of the [module](self). `limit` is at
    /// least the number of weights and at most 2^20.
    pub(super) fn within(self, limit: u32) -> Vec<u32> {
        let exact = if self.sum <= u128::from(limit) { Some(self.parts.clone()) } else { None };
        let parts = exact.or_else(|| self.fractions(limit)).unwrap_or_else(|| self.rounded(limit));
        // At most the limit.
        parts.into_iter().map(|part| part as u32).collect()
    }

    /// Fractions of the sum with small denominators, if that is what the weights are but for
    /// rounding.
    fn fractions(&self, limit: u32) -> Option<Vec<u128>> {
        let shift = (u128::BITS - self.sum.leading_zeros()).saturating_sub(u64::BITS);
        let limit = u128::from(limit);
        let fraction = |part: &u128| match (part, part >> shift) {
            (0, _) => Some((0, 1)),
            // Far below a part of the limit.
            (_, 0) => None,
            (_, part) => simplest(part, self.sum >> shift, limit),
        };
        let fractions: Vec<_> = self.parts.iter().map(fraction).collect::<Option<_>>()?;
        let common = fractions.iter().try_fold(1, |all, (_, below)| {
            Some(all / gcd(all, *below) * below).filter(|all| *all <= limit)
        })?;
        let parts: Vec<u128> =
            fractions.iter().map(|(above, below)| above * (common / below)).collect();
        (parts.iter().sum::<u128>() == common).then_some(parts)
    }

    /// In parts of the limit.
    fn rounded(&self, limit: u32) -> Vec<u128> {
        let drawn = self.parts.iter().filter(|part| **part > 0).count();
        // Rounding up to one adds at most a part for each weight.
        let most = u128::from(limit).saturating_sub(drawn as u128).max(1);
        let part = |part: &u128| match part {
            0 => 0,
            part => (part * most / self.sum).max(1),
        };
        let parts: Vec<u128> = self.parts.iter().map(part).collect();
        let sum = parts.iter().sum();
        Phase { parts, sum }.reduced().parts
    }
}

/// The first convergent of the continued fraction of `n / d` that is as close to it as a rounded
/// float, if its denominator is at most `limit`. `d` has at most 64 bits, and `n` is not 0.
fn simplest(n: u128, d: u128, limit: u128) -> Option<(u128, u128)> {
    let (mut before, mut last) = ((0, 1), (1, 0));
    let (mut a, mut b) = (n, d);
    while b > 0 {
        let next = (a / b * last.0 + before.0, a / b * last.1 + before.1);
        if next.1 > limit {
            return None;
        }
        (before, last) = (last, next);
        (a, b) = (b, a % b);
        // |last - n/d| <= n/d * 2^-40. A share is at most 1, so neither product exceeds 64 + 20 +
        // 40 bits.
        let (above, below) = last;
        if (above * d).abs_diff(n * below) << ROUNDING_BITS <= n * below {
            return Some(last);
        }
    }
    None
}

const fn gcd(a: u128, b: u128) -> u128 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMIT: u32 = 1_000_000;

    fn parts(texts: &[&str]) -> Vec<u32> {
        let weights: Vec<Weight> = texts.iter().map(|text| Weight::parse(text).unwrap()).collect();
        Phase::new(&weights).unwrap().within(LIMIT)
    }

    #[test]
    fn numbers_are_taken_as_they_are_written() {
        for (texts, expected) in [
            (&["0.5", "0.3", "0.2"][..], &[5, 3, 2][..]),
            (&["1/3", "2/3"], &[1, 2]),
            (&["1/6", "1/3", "0.5"], &[1, 2, 3]),
            (&["1E-3", ".5", "7."], &[1, 500, 7_000]),
            (&["1e-3", "2e-3"], &[1, 2]),
            (&["0", "0.000", "8"], &[0, 0, 1]),
            (&["300", "200"], &[3, 2]),
            (&["0.333333", "0.666667"], &[333_333, 666_667]),
            // What Python prints for 1/3 and 2/3, and for 1/6, 1/3 and 1/2.
            (&["0.3333333333333333", "0.6666666666666666"], &[1, 2]),
            (&["0.16666666666666666", "0.3333333333333333", "0.5"], &[1, 2, 3]),
            (&["0.14285714285714285", "0.8571428571428571"], &[1, 6]),
            // Numbers of tokens: two are as close to a fraction as a float is, three are kept in
            // parts of a million.
            (&["6972290", "3291033"], &[282_573, 133_379]),
            (&["6972290", "3291033", "77"], &[679_333, 320_656, 7]),
            (&["1000000000000", "1"], &[999_997, 1]),
            (&["1e12", "1e-12"], &[999_997, 1]),
        ] {
            assert_eq!(parts(texts), expected, "{texts:?}");
        }
    }

    #[test]
    fn what_is_no_weight_is_refused() {
        for text in ["", ".", "x", "1/0", "1/x", "1//2", "1e", "1e1.5", "+1", "1_000", "0x1", "NaN"]
        {
            assert_eq!(Weight::parse(text), Err(WeightProblem::NotANumber), "{text}");
        }
        for text in ["-1", "-0.5", "-.5"] {
            assert_eq!(Weight::parse(text), Err(WeightProblem::Negative), "{text}");
        }
        for text in ["1e13", "1e-25", "1234567890123456789", "1/1234567890123456789"] {
            assert_eq!(Weight::parse(text), Err(WeightProblem::Digits), "{text}");
        }
        let apart = ["999999999999999999e12", "1e-24"].map(|text| Weight::parse(text).unwrap());
        assert!(Phase::new(&apart).is_none());
    }

    proptest! {
        /// Whatever is written, the parts keep the ratio to a part of the limit, and floats of
        /// fractions are fractions.
        #[test]
        fn ratios_are_kept(weights in prop::collection::vec(0_u64..1 << 40, 1..40), scale in -6_i32..6) {
            let written = weights.iter().map(|w| std::format!("{w}e{scale}"));
            let parsed: Vec<Weight> = written.map(|text| Weight::parse(&text).unwrap()).collect();
            let sum: u64 = weights.iter().sum();
            prop_assume!(sum > 0);
            let parts = Phase::new(&parsed).unwrap().within(LIMIT);
            let all: u64 = parts.iter().map(|part| u64::from(*part)).sum();
            prop_assert!(all <= LIMIT.into());
            for (weight, part) in weights.iter().zip(&parts) {
                let (asked, got) = (*weight as f64 / sum as f64, f64::from(*part) / all as f64);
                prop_assert_eq!(*weight == 0, *part == 0);
                prop_assert!((asked - got).abs() <= 41.0 / f64::from(LIMIT), "{} {}", asked, got);
            }
        }

        #[test]
        fn floats_are_the_fractions_that_they_round(shares in prop::collection::vec(1_u32..500, 1..12)) {
            let sum: u32 = shares.iter().sum();
            let text = |share: &u32| std::format!("{}", f64::from(*share) / f64::from(sum));
            let parsed: Vec<Weight> =
                shares.iter().map(|share| Weight::parse(&text(share)).unwrap()).collect();
            let exact: Vec<Weight> = shares
                .iter()
                .map(|share| Weight { numerator: (*share).into(), denominator: 1 })
                .collect();
            let exact = Phase::new(&exact).unwrap().within(LIMIT);
            prop_assert_eq!(Phase::new(&parsed).unwrap().within(LIMIT), exact);
        }
    }
}
