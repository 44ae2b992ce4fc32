//! The `order(megatron)` action: what of a plan the order of Megatron-core depends on.

use alloc::vec::Vec;
use core::fmt;
use core::ops::Range;

use super::{Part, Plan, Quoted, lexer};
use crate::documents::Documents;
use crate::order::SplitPart;
use crate::order::megatron::{MegatronError, MegatronOrder, Settings, Source, split};

/// A decimal number of a plan as a 64-bit float, at least zero and finite. Prints in the fewest
/// digits that parse back to it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decimal(f64);

/// It is a number.
impl Eq for Decimal {}

impl Decimal {
    /// Digits with at most one point among them and perhaps an exponent, or a fraction of two such
    /// numbers, which is rounded.
    pub(super) fn parse(text: &str) -> Option<Decimal> {
        let value = match text.split_once('/') {
            Some((above, below)) => number(above)? / number(below)?,
            None => number(text)?,
        };
        Some(value).filter(|value| value.is_finite()).map(Decimal)
    }

    /// The number.
    pub fn value(self) -> f64 {
        self.0
    }
}

/// One number, without a sign.
fn number(text: &str) -> Option<f64> {
    let is_legal = text.starts_with(|c: char| c.is_ascii_digit() || c == '.');
    text.parse().ok().filter(|value: &f64| is_legal && value.is_finite())
}

impl fmt::Display for Decimal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// The order of Megatron-core in place of the own one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Megatron {
    /// Megatron's `seed`.
    pub seed: u32,
    /// Samples of the training run.
    pub samples: Option<u64>,
    /// The ratio of training, validation and test. All documents without it.
    pub split: Vec<Decimal>,
    /// What of it is delivered.
    pub part: SplitPart,
    /// Weights of the datasets of the blend, exactly as megatron-core would be given them; none if
    /// datasets are blended by their samples, or there is one alone.
    pub weights: Vec<Decimal>,
}

/// As printed in a plan.
impl fmt::Display for Megatron {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "order(megatron, seed={}", self.seed)?;
        if let Some(samples) = self.samples {
            write!(f, ", samples={samples}")?;
        }
        if let Some((first, others)) = self.split.split_first() {
            write!(f, ", split=\"{first}")?;
            others.iter().try_for_each(|share| write!(f, ",{share}"))?;
            f.write_str("\"")?;
        }
        if self.part != SplitPart::Train {
            write!(f, ", part={}", self.part)?;
        }
        f.write_str(")")
    }
}

impl Megatron {
    /// Prints `blend(…)` with the weights of this order.
    pub(super) fn write_blend(&self, f: &mut fmt::Formatter<'_>, blend: &[Part]) -> fmt::Result {
        f.write_str("blend(")?;
        for (i, part) in blend.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            match lexer::is_bare(&part.name) {
                true => write!(f, "{comma}{}", part.name)?,
                false => write!(f, "{comma}{}", Quoted(&part.name))?,
            }
            if let Some(weight) = self.weights.get(i) {
                write!(f, "={weight}")?;
            }
        }
        f.write_str(")")
    }
}

impl Plan {
    /// The order of Megatron-core, if the plan asks for it.
    pub fn megatron(&self) -> Option<&Megatron> {
        self.megatron.as_ref()
    }

    /// The order of the samples of datasets with these documents, in the order of the blend, if the
    /// plan asks for the order of Megatron-core. Its tables take at most `max_table_bytes`.
    ///
    /// # Errors
    /// As [`MegatronOrder::new`].
    pub fn megatron_order(
        &self,
        documents: Vec<Documents>,
        max_table_bytes: u64,
    ) -> Option<Result<MegatronOrder, MegatronError>> {
        let megatron = self.megatron.as_ref()?;
        let ratio: Vec<f64> = megatron.split.iter().map(|share| share.value()).collect();
        let own = megatron.part as usize;
        let of_part = |documents: &Documents| match ratio.as_slice() {
            [] => Ok(0..documents.len()),
            ratio => {
                split(ratio, documents.len()).map(|mut parts| parts[own].take().unwrap_or(0..0))
            }
        };
        let source = |documents: Documents| {
            let part: Range<usize> = of_part(&documents)?;
            Ok(Source { documents, part })
        };
        let weights: Vec<f64> = megatron.weights.iter().map(|weight| weight.value()).collect();
        let settings = Settings {
            seed: megatron.seed,
            sequence_tokens: self.window - self.overlap,
            extra_token: self.overlap == 1,
            samples: megatron.samples,
            max_table_bytes,
        };
        let sources = documents.into_iter().map(source).collect::<Result<_, MegatronError>>();
        let weights = Some(weights.as_slice()).filter(|weights| !weights.is_empty());
        Some(sources.and_then(|sources| MegatronOrder::new(sources, weights, &settings)))
    }
}
