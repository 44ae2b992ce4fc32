//! Parses `order(megatron)`, and the blend of a plan with it: its weights are kept as they are
//! written.

use alloc::vec::Vec;
use core::ops::Range;

use super::{
    Action, Draft, MAX_TOTAL_WEIGHT, PlanError, Problem, Share, WeightProblem, repeated, seed_value,
};
use crate::order::SplitPart;
use crate::order::megatron::MAX_SAMPLES;
use crate::plan::megatron::{Decimal, Megatron};
use crate::plan::{Part, gcd};

const USAGE: &str = "order(megatron, seed=1234, samples=1_000_000) or order(megatron, seed=1234, split=\"969,30,1\", part=train)";

/// Without the weights, which belong to another action.
pub(super) fn order(action: &Action, default_seed: Option<u64>) -> Result<Megatron, PlanError> {
    let names = ["name", "seed", "samples", "split", "part"];
    let [name, seed, samples, split, part] = action.named("order", names, USAGE)?;
    let missing = |argument| {
        let problem = Problem::MissingArgument { action: "order", argument, usage: USAGE };
        PlanError::new(problem, action.span.clone())
    };
    let name = name.ok_or_else(|| missing("name"))?;
    if name.text != "megatron" {
        return name.refuse(Problem::UnknownOrder { found: name.describe() });
    }
    let seed_piece = seed.ok_or_else(|| missing("seed"))?;
    let value = seed_value(seed_piece, default_seed)?;
    let Ok(seed) = u32::try_from(value) else {
        let (argument, min, max) = ("seed", 0, u32::MAX.into());
        return seed_piece.refuse(Problem::OutOfRange { argument, value, min, max });
    };
    let samples = samples.map(|samples| samples.number("samples", 1, MAX_SAMPLES)).transpose()?;
    let split = match split {
        None => Vec::new(),
        Some(split) => {
            let ratio = split.text.split(',').map(|share| Decimal::parse(share.trim()));
            let ratio: Option<Vec<Decimal>> = ratio.collect();
            let ratio = ratio.filter(|ratio| ratio.len() <= 3 && ratio[0].value() > 0.0);
            let refused = || Problem::Split { found: split.describe() };
            ratio.ok_or_else(|| PlanError::new(refused(), split.span.clone()))?
        }
    };
    let part = match part {
        None => SplitPart::Train,
        Some(part) => SplitPart::from_name(&part.text)
            .filter(|known| split.get(*known as usize).is_some_and(|share| share.value() > 0.0))
            .ok_or_else(|| {
                PlanError::new(Problem::SplitPart { found: part.describe() }, part.span.clone())
            })?,
    };
    Ok(Megatron { seed, samples, split, part, weights: Vec::new() })
}

impl Draft {
    /// Whether the order goes together with the other actions.
    pub(super) fn check_order(&self, overlap: u32) -> Result<(), PlanError> {
        let Some((_, span)) = &self.order else {
            return Ok(());
        };
        let refuse = |problem| Err(PlanError::new(problem, span.clone()));
        let one = "order(megatron)";
        match () {
            () if self.shuffle.is_some() => refuse(Problem::Exclusive { one, other: "shuffle" }),
            () if self.pack.is_some() => refuse(Problem::Exclusive { one, other: "pack" }),
            () if self.split.is_some() => refuse(Problem::Exclusive { one, other: "split" }),
            () if self.hides_others() => {
                refuse(Problem::Exclusive { one, other: "labels=targets" })
            }
            () if self.loss_weights.is_some() => {
                refuse(Problem::Exclusive { one, other: "loss_weights" })
            }
            () if self.phases.is_some() => refuse(Problem::Exclusive { one, other: "phases" }),
            () if overlap > 1 => refuse(Problem::MegatronOverlap { overlap }),
            () => Ok(()),
        }
    }
}

/// The blend of a plan with this order, and its weights, which are all given or all left out. In
/// parts of a million they only describe the blend.
pub(super) fn blend(
    shares: &[Share],
    order: &mut (Megatron, Range<usize>),
) -> Result<Vec<Part>, PlanError> {
    let (megatron, span) = order;
    let given = shares.iter().any(|share| share.value.is_some());
    let repeated = repeated(shares);
    for (at, Share { name, value }) in shares.iter().enumerate() {
        if repeated == Some(at) {
            return name.refuse(Problem::RepeatedArgument { name: name.text.clone() });
        }
        let Some(value) = value.as_ref().filter(|_| given) else {
            if given {
                return name.refuse(Problem::NoWeight { found: name.describe() });
            }
            continue;
        };
        let refuse = |why| {
            let (name, found) = (name.text.clone(), value.describe());
            value.refuse(Problem::Weight { name, found, why })
        };
        match Decimal::parse(&value.text).filter(|_| !value.quoted) {
            Some(weight) if weight.value() > 0.0 => megatron.weights.push(weight),
            Some(_) => return refuse(WeightProblem::Zero),
            None => return refuse(WeightProblem::NotANumber),
        }
    }
    if given && megatron.samples.is_none() {
        let (action, argument) = ("order", "samples");
        let problem = Problem::MissingArgument { action, argument, usage: USAGE };
        return Err(PlanError::new(problem, span.clone()));
    }
    let total: f64 = megatron.weights.iter().map(|weight| weight.value()).sum();
    let millionth = |at| {
        let weight = megatron.weights.get(at).map_or(1.0, |weight: &Decimal| weight.value());
        // Rounded; at least one.
        (weight / total * MAX_TOTAL_WEIGHT as f64 + 0.5).max(1.0) as u32
    };
    let parts: Vec<u32> =
        (0..shares.len()).map(|at| if given { millionth(at) } else { 1 }).collect();
    let divisor = parts.iter().fold(0, |a, part| gcd(a, *part)).max(1);
    let named = shares.iter().zip(parts).map(|(Share { name, .. }, part)| Part {
        name: name.text.clone(),
        weights: Vec::from([part / divisor]),
    });
    Ok(named.collect())
}
