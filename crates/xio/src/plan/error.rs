//! Errors in a plan: what, where, and a hint.
//!
//! A [`PlanError`] has the byte range of the mistake in the plan. [`PlanError::render`] shows it:
//!
//! ```text
//! unknown action `windw`
//!     windw(2048) | narrow(u16)
//!     ^^^^^
//! hint: did you mean `window`?
//! ```

use alloc::string::{String, ToString};
use core::fmt::{self, Write};
use core::ops::Range;

use thiserror::Error;

use super::{MAX_BATCH_TOKENS, MAX_PLAN_BYTES, MIN_BLOCK_BYTES};
use crate::dataset::Dtype;
use crate::kernel::Codec;
use crate::order::{BLOCK_BYTES, MAX_DATASETS, MAX_PHASES};

/// Characters of the plan shown on each side of a mistake.
const CONTEXT_CHARS: usize = 48;

/// A mistake in a plan and its position.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{problem}")]
pub struct PlanError {
    /// The mistake.
    pub problem: Problem,
    /// The byte range of the plan; empty at the end of the plan.
    pub span: Range<usize>,
}

/// What is wrong with a plan.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum Problem {
    #[error("the plan has {bytes} bytes, at most {MAX_PLAN_BYTES} are read")]
    TooLong { bytes: usize },
    #[error("the plan is empty")]
    Empty,
    #[error("unexpected character `{}`", c.escape_debug())]
    Character { c: char },
    #[error("quoted name without an end")]
    OpenQuote,
    #[error("control character or unknown escape in a quoted name")]
    Escape,
    #[error("expected {expected}, found {found}")]
    Expected { expected: &'static str, found: String },
    #[error("unknown action `{name}`")]
    UnknownAction { name: String, similar: Option<&'static str> },
    #[error("`{action}` appears a second time")]
    RepeatedAction { action: &'static str },
    #[error("{action} has no argument `{name}`")]
    UnknownArgument { action: &'static str, name: String, known: &'static str },
    #[error("argument `{name}` appears a second time")]
    RepeatedArgument { name: String },
    #[error("{action} takes no further argument")]
    ExtraArgument { action: &'static str, usage: &'static str },
    #[error("{action} needs its argument `{argument}`")]
    MissingArgument { action: &'static str, argument: &'static str, usage: &'static str },
    #[error("`{argument}` must be a whole number, found {found}")]
    NotANumber { argument: &'static str, found: String },
    #[error("`{argument}` is {value}, outside {min} to {max}")]
    OutOfRange { argument: &'static str, value: u64, min: u64, max: u64 },
    #[error("`{argument}` must be a size such as 256KiB, found {found}")]
    NotASize { argument: &'static str, found: String },
    #[error("a block of {bytes} bytes is outside {} KiB to {} KiB", MIN_BLOCK_BYTES >> 10, BLOCK_BYTES >> 10)]
    BlockBytes { bytes: u64 },
    #[error("the plan uses the seed given beside it, but none is given")]
    NoSeed,
    #[error("narrow cannot deliver {found}")]
    NarrowType { found: String },
    #[error("narrow has no policy {found} for tokens that do not fit")]
    OverflowPolicy { found: String },
    #[error("the id {id} that others become does not fit {limit}")]
    SaturateId { id: u32, limit: String },
    #[error("escape needs narrow(u16) and a larger type to deliver, which holds what escapes")]
    Escape16,
    #[error("{one} and {other} exclude each other")]
    Exclusive { one: &'static str, other: &'static str },
    #[error("{bits} bits are not fewer than {dtype} has")]
    NothingToPack { bits: u8, dtype: Dtype },
    #[error("remap needs the name of a table")]
    NoTable,
    #[error("wasm needs the name of a module")]
    NoModule,
    #[error("{found} is no SHA-256")]
    Sha256 { found: String },
    #[error("there is no codec {found}")]
    UnknownCodec { found: String },
    #[error("compress has no level {found} of {codec}")]
    CompressLevel { found: String, codec: Codec, min: i32, max: i32 },
    #[error("compress does not know when {found} is")]
    CompressWhen { found: String },
    #[error("there is no quantized type {found}")]
    QuantizeType { found: String },
    #[error("quantize cannot deliver {found}")]
    QuantizeDeliver { found: String },
    #[error("widen cannot deliver {found}")]
    WidenType { found: String },
    #[error(
        "pairs takes no arguments but ignore=ID and labels=targets or all, and needs windows of two tokens"
    )]
    Pairs,
    #[error("the label to ignore is {found}, which is no whole number")]
    Ignore { found: String },
    #[error("pairs knows no labels {found}")]
    Labels { found: String },
    #[error("the plan does not say what labels become that are no targets")]
    NothingForOthers,
    #[error("the weight of tokens that have none is {found}, which is no number from 0 on")]
    LossWeight { found: String },
    #[error("pack does not know how to fit documents {found}")]
    PackFit { found: String },
    #[error("packed samples hold whole documents, so they cannot overlap")]
    PackOverlap,
    #[error("blend needs NAME=WEIGHT, found {found} alone")]
    NoWeight { found: String },
    #[error("the weight of `{name}` is {found}: {why}")]
    Weight { name: String, found: String, why: WeightProblem },
    #[error("all weights are zero")]
    AllZero,
    #[error("the weights lie too far apart for one blend")]
    WeightsApart,
    #[error("the blend names more than {MAX_DATASETS} datasets")]
    TooManyDatasets,
    #[error("`{name}` has weights for {weights} phases, the plan has {phases}")]
    PhaseCount { name: String, weights: usize, phases: usize },
    #[error(
        "a phase cannot begin at sample {start}, because the one before it does not begin earlier"
    )]
    PhaseOrder { start: u64 },
    #[error("the plan has more than {MAX_PHASES} phases")]
    TooManyPhases,
    #[error("phases of a blend are given, but no blend")]
    PhasesWithoutBlend,
    #[error("there is no order {found}")]
    UnknownOrder { found: String },
    #[error("order(megatron) cannot divide documents by the split {found}")]
    Split { found: String },
    #[error("split cannot divide datasets by the shares {found}")]
    SplitShares { found: String },
    #[error("the split has no part {found}, or its share is 0")]
    SplitPart { found: String },
    #[error("windows of order(megatron) cannot share {overlap} tokens")]
    MegatronOverlap { overlap: u32 },
    #[error("the plan does not say how long a sample is")]
    NoWindow,
    #[error("a batch of {batch} windows of {window} tokens exceeds {MAX_BATCH_TOKENS} tokens")]
    BatchTooLarge { batch: u32, window: u32 },
}

/// What is wrong with a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum WeightProblem {
    /// Not of the form `12.5`, `1e-3` or `1/3`.
    #[error("not a number")]
    NotANumber,
    /// Below zero.
    #[error("a share cannot be negative")]
    Negative,
    /// Zero where every dataset needs a weight.
    #[error("order(megatron) needs weights above zero")]
    Zero,
    /// More digits than a float has, or a large exponent.
    #[error("more than 18 digits, or an exponent outside -24 to 12 behind them")]
    Digits,
}

impl PlanError {
    pub(super) fn new(problem: Problem, span: Range<usize>) -> PlanError {
        PlanError { problem, span }
    }

    /// What to try next, if there is a suggestion.
    pub fn hint(&self) -> Option<String> {
        self.problem.hint()
    }

    /// The message, the affected line of `plan` with the position marked, and the hint. `plan` is
    /// the text that was parsed.
    pub fn render(&self, plan: &str) -> String {
        let mut out = self.to_string();
        let (excerpt, marks) = excerpt(plan, &self.span);
        // Writing to a string cannot fail.
        let _ = write!(out, "\n    {excerpt}\n    {marks}");
        if let Some(hint) = self.hint() {
            let _ = write!(out, "\nhint: {hint}");
        }
        out
    }
}

/// The part of the plan around `span` on one line, and a line of carets below it.
fn excerpt(plan: &str, span: &Range<usize>) -> (String, String) {
    let clamp =
        |at: usize| (0..=at.min(plan.len())).rev().find(|i| plan.is_char_boundary(*i)).unwrap_or(0);
    let (start, end) = (clamp(span.start), clamp(span.end.max(span.start)));
    let line_start = plan[..start].rfind('\n').map_or(0, |i| i + 1);
    let line_end = plan[start..].find('\n').map_or(plan.len(), |i| start + i);
    let (before, at, after) = (
        &plan[line_start..start],
        &plan[start..end.min(line_end)],
        &plan[end.min(line_end)..line_end],
    );

    let skipped = before.chars().count().saturating_sub(CONTEXT_CHARS);
    let dots = |cut: bool| if cut { "…" } else { "" };
    let mut line = String::from(dots(skipped > 0));
    line.extend(before.chars().skip(skipped));
    let indent = line.chars().count();
    line.extend(at.chars().take(CONTEXT_CHARS));
    let width = line.chars().count() - indent;
    line.push_str(dots(at.chars().count() > CONTEXT_CHARS));
    line.extend(after.chars().take(CONTEXT_CHARS));
    line.push_str(dots(after.chars().count() > CONTEXT_CHARS));
    let line = line.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    (line, alloc::format!("{:indent$}{:^>width$}", "", "", width = width.max(1)))
}

impl Problem {
    #[expect(clippy::too_many_lines, reason = "a table: one entry for each mistake")]
    fn hint(&self) -> Option<String> {
        let hint: &dyn fmt::Display = match self {
            Problem::Empty | Problem::NoWindow => &"begin with window(2048)",
            Problem::TooLong { .. } | Problem::Expected { .. } => return None,
            Problem::Character { .. } => {
                &"names with other characters go in quotes: blend(\"my file\"=1)"
            }
            Problem::OpenQuote => &"close it with the quote it began with",
            Problem::Escape => &r#"inside quotes only \\, \" and \' are escapes"#,
            Problem::UnknownAction { similar: Some(name), .. } => {
                return Some(alloc::format!("did you mean `{name}`?"));
            }
            Problem::UnknownAction { .. } => {
                &"actions are window, pack, shuffle, order, blend, phases, tokenizers, filter, dedup, split, remap, wasm, narrow, bitpack, compress, quantize, widen, pairs, positions, loss_weights, batch"
            }
            Problem::RepeatedAction { .. } => &"keep one of them",
            Problem::UnknownArgument { known, .. } => known,
            Problem::RepeatedArgument { .. } => &"keep one of them",
            Problem::ExtraArgument { usage, .. } | Problem::MissingArgument { usage, .. } => usage,
            Problem::NotANumber { .. } => &"write digits only, such as 2048",
            Problem::OutOfRange { min, max, value, .. } => {
                let nearest = value.clamp(min, max);
                return Some(alloc::format!("the nearest allowed value is {nearest}"));
            }
            Problem::NotASize { .. } => &"write a number with KiB or MiB: block=256KiB",
            Problem::BlockBytes { .. } => &"256KiB reads well from most disks",
            Problem::NoSeed => &"give a seed beside the plan, or write a number: shuffle(42)",
            Problem::NarrowType { .. } => {
                &"narrow(u16) holds ids below 65536, narrow(u32) the rest"
            }
            Problem::OverflowPolicy { .. } => {
                &"policies are error, saturate(ID) and escape: narrow(u16, overflow=saturate(0))"
            }
            Problem::SaturateId { .. } => &"choose an id of the vocabulary, such as that of <unk>",
            Problem::Escape16 => &"narrow(u16, overflow=escape) | widen(u32), or widen(i64)",
            Problem::Exclusive { .. } => &"keep one of them",
            Problem::NothingToPack { .. } => {
                &"leave bitpack out, or narrow(u32) | bitpack(17) for vocabularies above 65536"
            }
            Problem::NoTable => &"remap(\"tables/new-ids.npy\"): ids as u32, one for each old id",
            Problem::NoModule => &"wasm(\"actions/mask.wasm\", sha256=HEX)",
            Problem::Sha256 { .. } => &"64 hexadecimal digits, as sha256sum prints them",
            Problem::UnknownCodec { .. } => &"codecs are lz4 and zstd",
            Problem::CompressLevel { codec: Codec::Lz4, .. } => &"lz4 has no levels",
            Problem::CompressLevel { min, max, .. } => {
                return Some(alloc::format!("levels of zstd are {min} to {max}; 1 is the default"));
            }
            Problem::CompressWhen { .. } => {
                &"when=faster skips blocks where the link is faster than the codec, when=always does not"
            }
            Problem::QuantizeType { .. } => &"quantized types are int8, e4m3 and e5m2",
            Problem::QuantizeDeliver { .. } => {
                &"deliver=f32, deliver=f16, deliver=bf16, or deliver=quantized for codes and scales"
            }
            Problem::WidenType { .. } => &"types to widen to are u32, i32 and i64",
            Problem::Ignore { .. } => {
                &"-100 is what cross_entropy of PyTorch ignores: pairs(ignore=-100)"
            }
            Problem::Labels { .. } => {
                &"labels=targets delivers those that the dataset says are targets, labels=all every one"
            }
            Problem::NothingForOthers => {
                &"-100 is what cross_entropy of PyTorch ignores: pairs(ignore=-100, labels=targets)"
            }
            Problem::LossWeight { .. } => &"loss_weights(missing=1), or 0.25 for what counts less",
            Problem::PackFit { .. } => {
                &"best and first fill samples with several documents, single gives each its own"
            }
            Problem::PackOverlap => {
                &"leave overlap out: with pairs, documents keep their last token"
            }
            Problem::Pairs => &"write window(2049, overlap=1) | pairs: 2048 inputs and 2048 labels",
            Problem::UnknownOrder { .. } => {
                &"order(megatron, seed=1234, samples=1_000_000); without it samples are in the own order"
            }
            Problem::Split { .. } => {
                &"as in Megatron, the shares of training, validation and test: split=\"969,30,1\""
            }
            Problem::SplitShares { .. } => {
                &"two or three numbers, for training, validation and test: split(\"98,1,1\", part=train)"
            }
            Problem::SplitPart { .. } => &"parts are train, valid and test",
            Problem::MegatronOverlap { .. } => {
                &"for seq_length 2048 write window(2049, overlap=1), or window(2048) without the extra token"
            }
            Problem::NoWeight { .. } => &"blend(web=0.7, code=0.3)",
            Problem::Weight { why: WeightProblem::Negative, .. } => &"use 0 to leave a dataset out",
            Problem::Weight { why: WeightProblem::Zero, .. } => {
                &"leave the dataset out of the blend; Megatron-core has no datasets of weight 0"
            }
            Problem::Weight { .. } => &"weights look like 3, 0.5, 6972290 or 1/3",
            Problem::AllZero => &"give at least one dataset a weight above zero",
            Problem::WeightsApart => {
                &"weights a million times smaller than another are never drawn: use 0"
            }
            Problem::PhaseCount { phases: 1, .. } => {
                &"say where the next weights apply: phases(1_000_000)"
            }
            Problem::PhaseCount { .. } => {
                &"give one weight for all phases, or one for each: blend(web=0.9:0.5, code=1) | phases(1_000_000)"
            }
            Problem::PhaseOrder { .. } => {
                &"write phases in rising order: phases(1_000_000, 5_000_000)"
            }
            Problem::TooManyPhases => &"join phases whose weights differ little",
            Problem::PhasesWithoutBlend => &"blend(web=0.9:0.5, code=0.1:0.5) | phases(1_000_000)",
            Problem::TooManyDatasets => &"join small files into one dataset",
            Problem::BatchTooLarge { .. } => &"lower batch(…) or window(…)",
        };
        Some(hint.to_string())
    }
}
