//! Parses tokens into a [`Plan`]: first the form `name(arguments) | …`, then each action.

mod megatron;

use alloc::collections::BTreeSet;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::ops::Range;

use super::error::{PlanError, Problem, WeightProblem};
use super::lexer::{self, Kind, Token};
use super::megatron::{Decimal, Megatron};
use super::weights::{Phase, Weight};
use super::{
    DEFAULT_BATCH, Deliver, Groups, Labels, LossWeights, MAX_BATCH, MAX_BATCH_TOKENS,
    MAX_PHASE_START, MAX_PLAN_BYTES, MAX_WINDOW, MIN_BLOCK_BYTES, Narrow, Overflow, Pack, Part,
    Plan, Quantize, Shape, Shuffle, UserModule,
};
use crate::dataset::Dtype;
use crate::documents::{Dedup, Filter, Selection};
use crate::kernel::pack::PACKED_BITS;
use crate::kernel::{Codec, Compression, Quant, ZSTD_LEVELS};
use crate::order::{
    BLOCK_BYTES, Fit, MAX_DATASETS, MAX_GROUP_BLOCKS, MAX_PHASES, MAX_TOTAL_WEIGHT, Split,
    SplitPart,
};

pub(super) const ACTIONS: [&str; 21] = [
    "window",
    "pack",
    "shuffle",
    "order",
    "blend",
    "phases",
    "tokenizers",
    "filter",
    "dedup",
    "split",
    "remap",
    "wasm",
    "narrow",
    "bitpack",
    "compress",
    "quantize",
    "widen",
    "pairs",
    "positions",
    "loss_weights",
    "batch",
];

pub(super) fn parse(text: &str, seed: Option<u64>) -> Result<Plan, PlanError> {
    if text.len() > MAX_PLAN_BYTES {
        return Err(PlanError::new(Problem::TooLong { bytes: text.len() }, 0..0));
    }
    let tokens = lexer::tokens(text)?;
    if tokens.len() == 1 {
        return Err(PlanError::new(Problem::Empty, 0..0));
    }
    let mut draft = Draft::default();
    for action in (Syntax { tokens: &tokens, at: 0 }).actions()? {
        draft.add(&action, seed)?;
    }
    draft.finish(text)
}

/// A name or value and its position.
#[derive(Clone)]
struct Piece {
    text: String,
    quoted: bool,
    span: Range<usize>,
}

impl Piece {
    fn describe(&self) -> String {
        match self.quoted {
            true => alloc::format!("\"{}\"", self.text),
            false => alloc::format!("`{}`", self.text),
        }
    }

    fn refuse<T>(&self, problem: Problem) -> Result<T, PlanError> {
        Err(PlanError::new(problem, self.span.clone()))
    }

    /// A whole number between `min` and `max`. Underscores between digits are allowed.
    fn number(&self, argument: &'static str, min: u64, max: u64) -> Result<u64, PlanError> {
        let not_a_number = Problem::NotANumber { argument, found: self.describe() };
        let digits = self.text.replace('_', "");
        let plain = !self.quoted && digits.starts_with(|c: char| c.is_ascii_digit());
        match digits.parse() {
            Ok(value) if plain && (min..=max).contains(&value) => Ok(value),
            Ok(value) if plain => self.refuse(Problem::OutOfRange { argument, value, min, max }),
            _ => self.refuse(not_a_number),
        }
    }
}

/// `name = value`, or a value alone. Only a policy of `narrow` may have an argument of its own.
struct Argument {
    key: Option<Piece>,
    value: Piece,
    inner: Option<Piece>,
}

impl Argument {
    fn span(&self) -> Range<usize> {
        self.key.as_ref().map_or(self.value.span.start, |key| key.span.start)..self.value.span.end
    }
}

/// `name(arguments)`.
struct Action {
    name: Piece,
    arguments: Vec<Argument>,
    span: Range<usize>,
}

impl Action {
    /// The only argument of an action, with or without its name.
    fn only(
        &self,
        action: &'static str,
        argument: &'static str,
        usage: &'static str,
    ) -> Result<&Piece, PlanError> {
        match self.arguments.as_slice() {
            [] => Err(PlanError::new(
                Problem::MissingArgument { action, argument, usage },
                self.span.clone(),
            )),
            [only] => match &only.key {
                Some(key) if key.text != argument => {
                    let name = key.text.clone();
                    key.refuse(Problem::UnknownArgument { action, name, known: usage })
                }
                _ => Ok(&only.value),
            },
            [_, extra, ..] => {
                Err(PlanError::new(Problem::ExtraArgument { action, usage }, extra.span()))
            }
        }
    }
}

impl Action {
    /// The values of arguments by their names; the first argument needs no name.
    fn named<const N: usize>(
        &self,
        action: &'static str,
        names: [&'static str; N],
        usage: &'static str,
    ) -> Result<[Option<&Piece>; N], PlanError> {
        let mut values = [None; N];
        for (position, argument) in self.arguments.iter().enumerate() {
            let (name, at) = match &argument.key {
                Some(key) => (key.text.as_str(), key),
                None if position == 0 => (names[0], &argument.value),
                None => return argument.value.refuse(Problem::ExtraArgument { action, usage }),
            };
            let name = name.to_string();
            let Some(index) = names.iter().position(|known| *known == name) else {
                return at.refuse(Problem::UnknownArgument { action, name, known: usage });
            };
            if values[index].replace(&argument.value).is_some() {
                return at.refuse(Problem::RepeatedArgument { name });
            }
        }
        Ok(values)
    }
}

/// Parses the form of a plan.
struct Syntax<'a> {
    /// Ends in [`Kind::End`], which is never passed.
    tokens: &'a [Token],
    at: usize,
}

impl<'a> Syntax<'a> {
    fn peek(&self) -> &'a Token {
        // `at` stops at the last token, which exists: the lexer always adds the end.
        &self.tokens[self.at.min(self.tokens.len() - 1)]
    }

    fn accept(&mut self, mark: char) -> bool {
        let hit = self.peek().kind == Kind::Mark(mark);
        self.at += usize::from(hit);
        hit
    }

    fn expected<T>(&self, expected: &'static str) -> Result<T, PlanError> {
        let token = self.peek();
        let found = token.kind.describe();
        Err(PlanError::new(Problem::Expected { expected, found }, token.span.clone()))
    }

    fn piece(&mut self, expected: &'static str) -> Result<Piece, PlanError> {
        let token = self.peek();
        let (text, quoted) = match &token.kind {
            Kind::Word(text) => (text.clone(), false),
            Kind::Quoted(text) => (text.clone(), true),
            _ => return self.expected(expected),
        };
        self.at += 1;
        Ok(Piece { text, quoted, span: token.span.clone() })
    }

    fn actions(mut self) -> Result<Vec<Action>, PlanError> {
        let mut actions = Vec::new();
        loop {
            actions.push(self.action()?);
            if self.peek().kind == Kind::End {
                return Ok(actions);
            }
            if !self.accept('|') {
                return self.expected("`|` or the end of the plan");
            }
        }
    }

    fn action(&mut self) -> Result<Action, PlanError> {
        let name = self.piece("an action")?;
        let policies = name.text == "narrow";
        let arguments = if self.accept('(') { self.arguments(policies)? } else { Vec::new() };
        // At least the name was consumed.
        let end = self.tokens[self.at - 1].span.end;
        Ok(Action { span: name.span.start..end, name, arguments })
    }

    fn arguments(&mut self, policies: bool) -> Result<Vec<Argument>, PlanError> {
        let mut arguments = Vec::new();
        while !self.accept(')') {
            arguments.push(self.argument(policies)?);
            if !self.accept(',') && self.peek().kind != Kind::Mark(')') {
                return self.expected("`,` or `)`");
            }
        }
        Ok(arguments)
    }

    fn argument(&mut self, policies: bool) -> Result<Argument, PlanError> {
        let first = self.piece("an argument")?;
        if !self.accept('=') {
            return Ok(Argument { key: None, value: first, inner: None });
        }
        let value = self.piece("a value")?;
        let inner = match policies && self.accept('(') {
            true => Some(self.piece("an id")?),
            false => None,
        };
        if inner.is_some() && !self.accept(')') {
            return self.expected("`)`");
        }
        Ok(Argument { key: Some(first), value, inner })
    }
}

/// The `pairs` action.
#[derive(Clone, Copy)]
struct Pairs {
    /// The label to ignore.
    ignore: Option<i64>,
    labels: Option<Labels>,
}

/// The actions parsed so far.
#[derive(Default)]
struct Draft {
    window: Option<(u32, u32)>,
    pack: Option<(Pack, Range<usize>)>,
    shuffle: Option<Shuffle>,
    order: Option<(Megatron, Range<usize>)>,
    blend: Option<(Vec<Share>, Range<usize>)>,
    phases: Option<(Vec<u64>, Range<usize>)>,
    mixes_tokenizers: bool,
    selection: Selection,
    split: Option<(Split, Range<usize>)>,
    remap: Option<String>,
    wasm: Option<UserModule>,
    narrow: Option<(Narrow, Range<usize>)>,
    bitpack: Option<(u8, Range<usize>)>,
    compress: Option<(Compression, Range<usize>)>,
    quantize: Option<(Quantize, Range<usize>)>,
    widen: Option<Dtype>,
    pairs: Option<(Pairs, Range<usize>)>,
    positions: bool,
    loss_weights: Option<(LossWeights, Range<usize>)>,
    batch: Option<(u32, Range<usize>)>,
}

impl Draft {
    fn hides_others(&self) -> bool {
        let labels = self.pairs.as_ref().and_then(|(pairs, _)| pairs.labels);
        labels == Some(Labels::Targets)
    }

    fn add(&mut self, action: &Action, seed: Option<u64>) -> Result<(), PlanError> {
        let once = |fresh: bool, name: &'static str| match fresh {
            true => Ok(()),
            false => action.name.refuse(Problem::RepeatedAction { action: name }),
        };
        match action.name.text.as_str() {
            "window" => once(self.window.replace(window(action)?).is_none(), "window"),
            "pack" => {
                let pack = (pack(action)?, action.span.clone());
                once(self.pack.replace(pack).is_none(), "pack")
            }
            "positions" => {
                let first = !core::mem::replace(&mut self.positions, positions(action)?);
                once(first, "positions")
            }
            "shuffle" => once(self.shuffle.replace(shuffle(action, seed)?).is_none(), "shuffle"),
            "order" => {
                let order = (megatron::order(action, seed)?, action.span.clone());
                once(self.order.replace(order).is_none(), "order")
            }
            "blend" => {
                let blend = (blend(action)?, action.span.clone());
                once(self.blend.replace(blend).is_none(), "blend")
            }
            "phases" => {
                let phases = (phases(action)?, action.span.clone());
                once(self.phases.replace(phases).is_none(), "phases")
            }
            "tokenizers" => {
                let first = !core::mem::replace(&mut self.mixes_tokenizers, tokenizers(action)?);
                once(first, "tokenizers")
            }
            "filter" => once(self.selection.filter.replace(filter(action)?).is_none(), "filter"),
            "dedup" => once(self.selection.dedup.replace(dedup(action)?).is_none(), "dedup"),
            "split" => {
                let split = (split(action, seed)?, action.span.clone());
                once(self.split.replace(split).is_none(), "split")
            }
            "remap" => once(self.remap.replace(remap(action)?).is_none(), "remap"),
            "wasm" => once(self.wasm.replace(wasm(action)?).is_none(), "wasm"),
            "narrow" => {
                let narrow = (narrow(action)?, action.span.clone());
                once(self.narrow.replace(narrow).is_none(), "narrow")
            }
            "bitpack" => {
                let bits = (bitpack(action)?, action.span.clone());
                once(self.bitpack.replace(bits).is_none(), "bitpack")
            }
            "compress" => {
                let compression = (compress(action)?, action.span.clone());
                once(self.compress.replace(compression).is_none(), "compress")
            }
            "quantize" => {
                let quantize = (quantize(action)?, action.span.clone());
                once(self.quantize.replace(quantize).is_none(), "quantize")
            }
            "widen" => once(self.widen.replace(widen(action)?).is_none(), "widen"),
            "pairs" => once(self.pairs.replace(pairs(action)?).is_none(), "pairs"),
            "loss_weights" => {
                let weights = (loss_weights(action)?, action.span.clone());
                once(self.loss_weights.replace(weights).is_none(), "loss_weights")
            }
            "batch" => {
                let batch = (batch(action)?, action.span.clone());
                once(self.batch.replace(batch).is_none(), "batch")
            }
            other => {
                let similar = similar(other);
                action.name.refuse(Problem::UnknownAction { name: other.to_string(), similar })
            }
        }
    }

    fn finish(mut self, text: &str) -> Result<Plan, PlanError> {
        let end = text.trim_end().len();
        let (window, overlap) = self.window.ok_or(PlanError::new(Problem::NoWindow, end..end))?;
        if let Some((_, span)) = self.pairs.clone().filter(|_| window < 2) {
            return Err(PlanError::new(Problem::Pairs, span));
        }
        self.check_forms()?;
        self.check_quantize(overlap)?;
        if let Some((_, span)) = self.pack.as_ref().filter(|_| overlap > 0) {
            return Err(PlanError::new(Problem::PackOverlap, span.clone()));
        }
        self.check_order(overlap)?;
        let (batch, span) = self.batch.unwrap_or((DEFAULT_BATCH, end..end));
        if u64::from(batch) * u64::from(window) > MAX_BATCH_TOKENS {
            return Err(PlanError::new(Problem::BatchTooLarge { batch, window }, span));
        }
        let phases = match (&self.blend, self.phases) {
            (None, Some((_, span))) => {
                return Err(PlanError::new(Problem::PhasesWithoutBlend, span));
            }
            (_, phases) => phases.map_or(Vec::new(), |(phases, _)| phases),
        };
        let blend = match (self.blend, &mut self.order) {
            (Some((shares, _)), Some(order)) => megatron::blend(&shares, order)?,
            (Some((shares, span)), None) => reduce(&shares, phases.len() + 1, span)?,
            (None, _) => Vec::new(),
        };
        Ok(Plan {
            window,
            overlap,
            pack: self.pack.map(|(pack, _)| pack),
            shuffle: self.shuffle,
            megatron: self.order.map(|(megatron, _)| megatron),
            shape: Shape::of(&blend),
            blend,
            mixes_tokenizers: self.mixes_tokenizers,
            phases,
            selection: self.selection,
            split: self.split.map(|(split, _)| split),
            remap: self.remap,
            wasm: self.wasm,
            narrow: self.narrow.map(|(narrow, _)| narrow),
            bitpack: self.bitpack.map(|(bits, _)| bits),
            compress: self.compress.map(|(compression, _)| compression),
            quantize: self.quantize.map(|(quantize, _)| quantize),
            widen: self.widen,
            ignore: self.pairs.as_ref().and_then(|(pairs, _)| pairs.ignore),
            labels: self.pairs.as_ref().and_then(|(pairs, _)| pairs.labels),
            pairs: self.pairs.is_some(),
            positions: self.positions,
            loss_weights: self.loss_weights.map(|(weights, _)| weights),
            batch,
        })
    }
}

impl Draft {
    /// Whether the forms of blocks on the wire go together.
    fn check_forms(&self) -> Result<(), PlanError> {
        let refuse = |problem, span: &Range<usize>| Err(PlanError::new(problem, span.clone()));
        if let Some((Narrow { overflow: Overflow::Escape, .. }, span)) = &self.narrow {
            if !matches!(self.widen, Some(Dtype::U32 | Dtype::I64)) {
                return refuse(Problem::Escape16, span);
            }
            if let Some((_, span)) = &self.bitpack {
                return refuse(
                    Problem::Exclusive { one: "bitpack", other: "overflow=escape" },
                    span,
                );
            }
        }
        let Some((bits, span)) = &self.bitpack else {
            return Ok(());
        };
        if self.compress.is_some() {
            return refuse(Problem::Exclusive { one: "bitpack", other: "compress" }, span);
        }
        match self.narrow {
            Some((Narrow { to, .. }, _)) if u32::from(*bits) >= 8 * to.bytes() => {
                refuse(Problem::NothingToPack { bits: *bits, dtype: to }, span)
            }
            Some((Narrow { overflow: Overflow::Saturate(id), .. }, _)) if id >> bits != 0 => {
                refuse(Problem::SaturateId { id, limit: alloc::format!("{bits} bits") }, span)
            }
            _ => Ok(()),
        }
    }
}

impl Draft {
    /// Whether there is nothing else that values cannot have: actions over tokens, and samples that
    /// share values, whose blocks would have different scales in each.
    fn check_quantize(&self, overlap: u32) -> Result<(), PlanError> {
        let Some((quantize, span)) = &self.quantize else {
            return Ok(());
        };
        let others = [
            ("overlap", overlap > 0),
            ("pack", self.pack.is_some()),
            ("order(megatron)", self.order.is_some()),
            ("positions", self.positions),
            ("ignore", self.pairs.as_ref().is_some_and(|(pairs, _)| pairs.ignore.is_some())),
            ("labels", self.pairs.as_ref().is_some_and(|(pairs, _)| pairs.labels.is_some())),
            ("remap", self.remap.is_some()),
            ("wasm", self.wasm.is_some()),
            ("narrow", self.narrow.is_some()),
            ("bitpack", self.bitpack.is_some()),
            ("widen", self.widen.is_some()),
            ("loss_weights", self.loss_weights.is_some()),
            ("pairs", self.pairs.is_some() && quantize.deliver == Deliver::Quantized),
        ];
        match others.into_iter().find(|(_, is_there)| *is_there) {
            Some((other, _)) => {
                let problem = Problem::Exclusive { one: "quantize", other };
                Err(PlanError::new(problem, span.clone()))
            }
            None => Ok(()),
        }
    }
}

/// Tokens of a sample, and how many it shares with the one before it.
fn window(action: &Action) -> Result<(u32, u32), PlanError> {
    const USAGE: &str = "window(2048) or window(2049, overlap=1): tokens of a sample";
    let [tokens, overlap] = action.named("window", ["tokens", "overlap"], USAGE)?;
    let missing = Problem::MissingArgument { action: "window", argument: "tokens", usage: USAGE };
    let tokens = tokens.ok_or(PlanError::new(missing, action.span.clone()))?;
    let tokens = tokens.number("tokens", 1, MAX_WINDOW.into())? as u32;
    let overlap = match overlap {
        Some(overlap) => overlap.number("overlap", 0, u64::from(tokens) - 1)? as u32,
        None => 0,
    };
    Ok((tokens, overlap))
}

fn widen(action: &Action) -> Result<Dtype, PlanError> {
    let to = action.only("widen", "to", "widen(i64): the larger type to deliver")?;
    match Dtype::from_name(&to.text) {
        Some(dtype @ (Dtype::U32 | Dtype::I32 | Dtype::I64)) => Ok(dtype),
        _ => to.refuse(Problem::WidenType { found: to.describe() }),
    }
}

fn pairs(action: &Action) -> Result<(Pairs, Range<usize>), PlanError> {
    let (mut ignore, mut labels) = (None, None);
    for argument in &action.arguments {
        let Argument { key: Some(key), value, .. } = argument else {
            return Err(PlanError::new(Problem::Pairs, argument.span()));
        };
        match key.text.as_str() {
            "ignore" if ignore.is_none() => {
                let not_a_number = Problem::Ignore { found: value.describe() };
                let id = value.text.replace('_', "").parse::<i64>();
                ignore = Some(id.map_err(|_| PlanError::new(not_a_number, value.span.clone()))?);
            }
            "labels" if labels.is_none() => {
                let unknown = Problem::Labels { found: value.describe() };
                let found = Labels::from_name(&value.text);
                labels = Some(found.ok_or(PlanError::new(unknown, value.span.clone()))?);
            }
            _ => return Err(PlanError::new(Problem::Pairs, argument.span())),
        }
    }
    if labels == Some(Labels::Targets) && ignore.is_none() {
        return Err(PlanError::new(Problem::NothingForOthers, action.span.clone()));
    }
    Ok((Pairs { ignore, labels }, action.span.clone()))
}

fn pack(action: &Action) -> Result<Pack, PlanError> {
    const USAGE: &str = "pack(best), pack(first, pad=0) or pack(single, pad=0)";
    let [fit, pad] = action.named("pack", ["fit", "pad"], USAGE)?;
    let missing = Problem::MissingArgument { action: "pack", argument: "fit", usage: USAGE };
    let fit = fit.ok_or(PlanError::new(missing, action.span.clone()))?;
    let Some(known) = Fit::from_name(&fit.text) else {
        return fit.refuse(Problem::PackFit { found: fit.describe() });
    };
    let pad = pad.map_or(Ok(0), |pad| pad.number("pad", 0, u32::MAX.into()))?;
    Ok(Pack { fit: known, pad: pad as u32 })
}

fn positions(action: &Action) -> Result<bool, PlanError> {
    match action.arguments.first() {
        Some(extra) => {
            let usage = "write positions alone: it adds two rows to every sample";
            Err(PlanError::new(Problem::ExtraArgument { action: "positions", usage }, extra.span()))
        }
        None => Ok(true),
    }
}

fn loss_weights(action: &Action) -> Result<LossWeights, PlanError> {
    const USAGE: &str = "loss_weights, or loss_weights(missing=1) for datasets that have none";
    let [missing] = action.named("loss_weights", ["missing"], USAGE)?;
    let weight = |piece: &Piece| {
        let weight =
            Decimal::parse(&piece.text).filter(|weight| (weight.value() as f32).is_finite());
        match weight.filter(|_| !piece.quoted) {
            Some(weight) => Ok(weight),
            None => piece.refuse(Problem::LossWeight { found: piece.describe() }),
        }
    };
    Ok(LossWeights { missing: missing.map(weight).transpose()? })
}

fn batch(action: &Action) -> Result<u32, PlanError> {
    let samples = action.only("batch", "samples", "batch(32): samples of a batch")?;
    Ok(samples.number("samples", 1, MAX_BATCH.into())? as u32)
}

fn narrow(action: &Action) -> Result<Narrow, PlanError> {
    const USAGE: &str =
        "narrow(u16), narrow(u16, overflow=saturate(0)) or narrow(u16, overflow=escape)";
    let [to, overflow] = action.named("narrow", ["to", "overflow"], USAGE)?;
    let missing = Problem::MissingArgument { action: "narrow", argument: "to", usage: USAGE };
    let to = to.ok_or(PlanError::new(missing, action.span.clone()))?;
    let dtype = match Dtype::from_name(&to.text) {
        Some(dtype @ (Dtype::U16 | Dtype::U32)) => dtype,
        _ => return to.refuse(Problem::NarrowType { found: to.describe() }),
    };
    let Some(policy) = overflow else {
        return Ok(Narrow { to: dtype, overflow: Overflow::Refuse });
    };
    let id = action.arguments.iter().find_map(|argument| argument.inner.as_ref());
    let overflow = match (policy.text.as_str(), id) {
        ("error", None) => Overflow::Refuse,
        ("escape", None) if dtype == Dtype::U16 => Overflow::Escape,
        ("escape", None) => return policy.refuse(Problem::Escape16),
        ("saturate", Some(id)) => {
            let value = id.number("saturate", 0, u32::MAX.into())? as u32;
            if i128::from(value) > dtype.range().1 {
                let limit = dtype.to_string();
                return id.refuse(Problem::SaturateId { id: value, limit });
            }
            Overflow::Saturate(value)
        }
        _ => return policy.refuse(Problem::OverflowPolicy { found: policy.describe() }),
    };
    Ok(Narrow { to: dtype, overflow })
}

/// Whether datasets of different tokenizers may be blended, which is the only thing to say about
/// them.
fn tokenizers(action: &Action) -> Result<bool, PlanError> {
    const USAGE: &str = "tokenizers(any) allows a blend of ids of different tokenizers";
    let which = action.only("tokenizers", "any", USAGE)?;
    match which.text.as_str() {
        "any" => Ok(true),
        _ => which.refuse(Problem::ExtraArgument { action: "tokenizers", usage: USAGE }),
    }
}

/// The list of a filter.
fn filter(action: &Action) -> Result<Filter, PlanError> {
    const USAGE: &str = "filter(\"LIST\") drops the documents whose hash is in the list, filter(keep=\"LIST\") keeps them";
    let missing = Problem::MissingArgument { action: "filter", argument: "drop", usage: USAGE };
    let [drop, keep] = action.named("filter", ["drop", "keep"], USAGE)?;
    let (list, is_keep) = match (drop, keep) {
        (Some(list), None) => (list, false),
        (None, Some(list)) => (list, true),
        (None, None) => return Err(PlanError::new(missing, action.span.clone())),
        (Some(_), Some(list)) => {
            return list.refuse(Problem::ExtraArgument { action: "filter", usage: USAGE });
        }
    };
    match list.text.is_empty() {
        true => list.refuse(missing),
        false => Ok(Filter { list: list.text.clone(), keep: is_keep }),
    }
}

fn dedup(action: &Action) -> Result<Dedup, PlanError> {
    const USAGE: &str = "dedup, or dedup(across) for documents of different datasets";
    match action.arguments.as_slice() {
        [] => Ok(Dedup::Within),
        [Argument { key: None, value, .. }] if value.text == "across" => Ok(Dedup::Across),
        [first, ..] => {
            let problem = Problem::ExtraArgument { action: "dedup", usage: USAGE };
            Err(PlanError::new(problem, first.span()))
        }
    }
}

fn split(action: &Action, default_seed: Option<u64>) -> Result<Split, PlanError> {
    const USAGE: &str = "split(\"98,1,1\", part=valid) or split(\"99,1\", part=train, seed=7): shares of training, validation and test";
    let [shares, part, seed] = action.named("split", ["shares", "part", "seed"], USAGE)?;
    let missing = |argument| {
        let problem = Problem::MissingArgument { action: "split", argument, usage: USAGE };
        PlanError::new(problem, action.span.clone())
    };
    let shares = shares.ok_or_else(|| missing("shares"))?;
    let numbers = shares.text.split(',').map(|share| Weight::parse(share.trim()).ok());
    let mut numbers: Vec<Weight> = numbers
        .collect::<Option<Vec<Weight>>>()
        .filter(|numbers| (2..=3).contains(&numbers.len()))
        .ok_or_else(|| {
            PlanError::new(Problem::SplitShares { found: shares.describe() }, shares.span.clone())
        })?;
    numbers.resize(3, Weight::ZERO);
    let Some(phase) = Phase::new(&numbers).filter(|phase| phase.sum() > 0) else {
        return shares.refuse(Problem::SplitShares { found: shares.describe() });
    };
    let part = part.ok_or_else(|| missing("part"))?;
    let Some(known) = SplitPart::from_name(&part.text) else {
        return part.refuse(Problem::SplitPart { found: part.describe() });
    };
    let seed = seed.map_or(Ok(0), |seed| seed_value(seed, default_seed))?;
    let parts = phase.within(MAX_TOTAL_WEIGHT as u32);
    let [train, valid, test] = [parts[0], parts[1], parts[2]];
    let shares = [train, valid, test];
    match shares[known as usize] {
        0 => part.refuse(Problem::SplitPart { found: part.describe() }),
        _ => Ok(Split { shares, part: known, seed }),
    }
}

/// The name of a table.
fn remap(action: &Action) -> Result<String, PlanError> {
    let table = action.only("remap", "table", "remap(\"TABLE\"): a file of u32 ids")?;
    match table.text.is_empty() {
        true => table.refuse(Problem::NoTable),
        false => Ok(table.text.clone()),
    }
}

/// A module and its hash.
fn wasm(action: &Action) -> Result<UserModule, PlanError> {
    const USAGE: &str =
        "wasm(\"actions/mask.wasm\", sha256=HEX): a module and its hash, as sha256sum prints it";
    let [module, sha256] = action.named("wasm", ["module", "sha256"], USAGE)?;
    let missing = |argument| {
        let missing = Problem::MissingArgument { action: "wasm", argument, usage: USAGE };
        PlanError::new(missing, action.span.clone())
    };
    let module = module.ok_or_else(|| missing("module"))?;
    if module.text.is_empty() {
        return module.refuse(Problem::NoModule);
    }
    let digits = sha256.ok_or_else(|| missing("sha256"))?;
    match sha256_of(&digits.text) {
        Some(sha256) => Ok(UserModule { name: module.text.clone(), sha256 }),
        None => digits.refuse(Problem::Sha256 { found: digits.describe() }),
    }
}

/// A hash of 64 hexadecimal digits.
fn sha256_of(digits: &str) -> Option<[u8; 32]> {
    let pairs = digits.as_bytes().as_chunks::<2>();
    let digit = |c: u8| char::from(c).to_digit(16).map(|digit| digit as u8);
    let mut hash = [0; 32];
    if !pairs.1.is_empty() || pairs.0.len() != hash.len() {
        return None;
    }
    for (byte, [high, low]) in hash.iter_mut().zip(pairs.0) {
        *byte = digit(*high)? << 4 | digit(*low)?;
    }
    Some(hash)
}

/// Bits of a token.
fn bitpack(action: &Action) -> Result<u8, PlanError> {
    let bits = action.only("bitpack", "bits", "bitpack(17): bits of a token on the wire")?;
    let (min, max) = (*PACKED_BITS.start(), *PACKED_BITS.end());
    Ok(bits.number("bits", min.into(), max.into())? as u8)
}

fn compress(action: &Action) -> Result<Compression, PlanError> {
    const USAGE: &str = "compress(lz4), compress(zstd, level=1) or compress(zstd, when=always)";
    let [name, level, when] = action.named("compress", ["codec", "level", "when"], USAGE)?;
    let missing = Problem::MissingArgument { action: "compress", argument: "codec", usage: USAGE };
    let name = name.ok_or(PlanError::new(missing, action.span.clone()))?;
    let Some(codec) = Codec::from_name(&name.text) else {
        return name.refuse(Problem::UnknownCodec { found: name.describe() });
    };
    let always = match when {
        None => false,
        Some(when) => match when.text.as_str() {
            "faster" => false,
            "always" => true,
            _ => return when.refuse(Problem::CompressWhen { found: when.describe() }),
        },
    };
    let default = if codec == Codec::Zstd { 1 } else { 0 };
    let given = level.map_or(Some(default), |level| level.text.parse().ok());
    match (given.and_then(|given| Compression::new(codec, given, always)), level) {
        (Some(compression), _) => Ok(compression),
        (None, Some(level)) => {
            let (min, max) = (*ZSTD_LEVELS.start(), *ZSTD_LEVELS.end());
            level.refuse(Problem::CompressLevel { found: level.describe(), codec, min, max })
        }
        // The default levels are legal.
        (None, None) => name.refuse(Problem::UnknownCodec { found: name.describe() }),
    }
}

fn quantize(action: &Action) -> Result<Quantize, PlanError> {
    const USAGE: &str =
        "quantize(int8), quantize(e4m3, deliver=f16) or quantize(int8, deliver=quantized)";
    let [to, deliver] = action.named("quantize", ["to", "deliver"], USAGE)?;
    let missing = Problem::MissingArgument { action: "quantize", argument: "to", usage: USAGE };
    let to = to.ok_or(PlanError::new(missing, action.span.clone()))?;
    let Some(quant) = Quant::from_name(&to.text) else {
        return to.refuse(Problem::QuantizeType { found: to.describe() });
    };
    let deliver = match deliver {
        None => Deliver::Source,
        Some(piece) => match (piece.text.as_str(), Dtype::from_name(&piece.text)) {
            ("quantized", _) => Deliver::Quantized,
            (_, Some(dtype)) if dtype.is_float() => Deliver::As(dtype),
            _ => return piece.refuse(Problem::QuantizeDeliver { found: piece.describe() }),
        },
    };
    Ok(Quantize { to: quant, deliver })
}

fn shuffle(action: &Action, default_seed: Option<u64>) -> Result<Shuffle, PlanError> {
    const USAGE: &str = "shuffle(SEED) or shuffle(SEED, blocks=64, block=256KiB)";
    let [seed, blocks, block] = action.named("shuffle", ["seed", "blocks", "block"], USAGE)?;
    let missing = |argument| {
        let problem = Problem::MissingArgument { action: "shuffle", argument, usage: USAGE };
        PlanError::new(problem, action.span.clone())
    };
    let seed = seed_value(seed.ok_or_else(|| missing("seed"))?, default_seed)?;
    let blocks = blocks.map(|blocks| blocks.number("blocks", 1, MAX_GROUP_BLOCKS.into()));
    let block_bytes = block.map(block_bytes).transpose()?;
    let groups = match (blocks.transpose()?, block_bytes) {
        (None, None) => None,
        (None, Some(_)) => return Err(missing("blocks")),
        (Some(blocks), bytes) => {
            Some(Groups { blocks: blocks as u32, block_bytes: bytes.unwrap_or(BLOCK_BYTES) })
        }
    };
    Ok(Shuffle { seed, groups })
}

/// A size in whole KiB, with its unit.
fn block_bytes(value: &Piece) -> Result<u32, PlanError> {
    let kib = value.text.strip_suffix("KiB").map(|count| (count, 1));
    let mib = value.text.strip_suffix("MiB").map(|count| (count, 1_024));
    let Some((count, unit)) = kib.or(mib).filter(|_| !value.quoted) else {
        return value.refuse(Problem::NotASize { argument: "block", found: value.describe() });
    };
    let digits = count.chars().all(|c| c.is_ascii_digit());
    let Some(count) = count.parse::<u64>().ok().filter(|_| digits) else {
        return value.refuse(Problem::NotASize { argument: "block", found: value.describe() });
    };
    let bytes = count.saturating_mul(unit).saturating_mul(1_024);
    let (min, max) = (u64::from(MIN_BLOCK_BYTES), u64::from(BLOCK_BYTES));
    match (min..=max).contains(&bytes) {
        true => Ok(bytes as u32),
        false => value.refuse(Problem::BlockBytes { bytes }),
    }
}

fn seed_value(value: &Piece, default_seed: Option<u64>) -> Result<u64, PlanError> {
    match value.text.as_str() {
        "seed" => default_seed.ok_or(PlanError::new(Problem::NoSeed, value.span.clone())),
        _ => value.number("seed", 0, u64::MAX),
    }
}

/// First samples of the phases after the first one.
fn phases(action: &Action) -> Result<Vec<u64>, PlanError> {
    if action.arguments.is_empty() {
        let usage =
            "phases(1_000_000): global samples at which the next weights of the blend apply";
        let missing = Problem::MissingArgument { action: "phases", argument: "N", usage };
        return Err(PlanError::new(missing, action.span.clone()));
    }
    let mut starts: Vec<u64> = Vec::new();
    for argument in &action.arguments {
        if let Some(key) = &argument.key {
            let (name, known) = (key.text.clone(), "phases(1_000_000, 5_000_000)");
            return key.refuse(Problem::UnknownArgument { action: "phases", name, known });
        }
        // The first phase begins at 0.
        if starts.len() + 1 == MAX_PHASES {
            return argument.value.refuse(Problem::TooManyPhases);
        }
        let start = argument.value.number("N", 1, MAX_PHASE_START)?;
        if starts.last().is_some_and(|last| start <= *last) {
            return argument.value.refuse(Problem::PhaseOrder { start });
        }
        starts.push(start);
    }
    Ok(starts)
}

/// A dataset of a blend, with its weights as they are written: one, or one for each phase. Only the
/// order of another loader does without.
struct Share {
    name: Piece,
    value: Option<Piece>,
}

fn blend(action: &Action) -> Result<Vec<Share>, PlanError> {
    if action.arguments.is_empty() {
        let usage = "blend(web=0.7, code=0.3): datasets and their share";
        let missing = Problem::MissingArgument { action: "blend", argument: "NAME=WEIGHT", usage };
        return Err(PlanError::new(missing, action.span.clone()));
    }
    let mut shares: Vec<Share> = Vec::new();
    for Argument { key, value, .. } in &action.arguments {
        let (name, value) = key.as_ref().map_or((value, None), |key| (key, Some(value)));
        if shares.len() == MAX_DATASETS {
            return name.refuse(Problem::TooManyDatasets);
        }
        shares.push(Share { name: name.clone(), value: value.cloned() });
    }
    Ok(shares)
}

/// The weight that `text`, a part of `value`, says.
fn weight(name: &Piece, value: &Piece, text: &str) -> Result<Weight, PlanError> {
    let weight = if value.quoted { Err(WeightProblem::NotANumber) } else { Weight::parse(text) };
    weight.map_err(|why| {
        let (name, found) = (name.text.clone(), value.describe());
        PlanError::new(Problem::Weight { name, found, why }, value.span.clone())
    })
}

/// The first dataset that was named before.
fn repeated(shares: &[Share]) -> Option<usize> {
    let mut named = BTreeSet::new();
    shares.iter().position(|share| !named.insert(share.name.text.as_str()))
}

/// Weights in each phase, as whole numbers. A dataset with one weight has it in every phase.
fn reduce(shares: &[Share], phases: usize, span: Range<usize>) -> Result<Vec<Part>, PlanError> {
    let repeated = repeated(shares);
    let weights = |(at, Share { name, value }): (usize, &Share)| {
        if repeated == Some(at) {
            return name.refuse(Problem::RepeatedArgument { name: name.text.clone() });
        }
        let Some(value) = value else {
            return name.refuse(Problem::NoWeight { found: name.describe() });
        };
        let weights = value.text.split(':').map(|text| weight(name, value, text));
        match weights.collect::<Result<Vec<Weight>, PlanError>>()?.as_slice() {
            [only] => Ok(alloc::vec![*only; phases]),
            many if many.len() == phases => Ok(Vec::from(many)),
            many => {
                let name = name.text.clone();
                value.refuse(Problem::PhaseCount { name, weights: many.len(), phases })
            }
        }
    };
    let weights = shares.iter().enumerate().map(weights).collect::<Result<Vec<_>, PlanError>>()?;
    let phase = |phase: usize| {
        let weights: Vec<Weight> = weights.iter().map(|weights| weights[phase]).collect();
        match Phase::new(&weights) {
            Some(phase) if phase.sum() > 0 => Ok(phase),
            Some(_) => Err(PlanError::new(Problem::AllZero, span.clone())),
            None => Err(PlanError::new(Problem::WeightsApart, span.clone())),
        }
    };
    let exact = (0..phases).map(phase).collect::<Result<Vec<Phase>, PlanError>>()?;
    // All phases together bound the time of a seek.
    let fits = exact.iter().map(Phase::sum).sum::<u128>() <= u128::from(MAX_TOTAL_WEIGHT);
    let limit = if fits { MAX_TOTAL_WEIGHT } else { MAX_TOTAL_WEIGHT / phases as u64 };
    let parts: Vec<Vec<u32>> = exact.into_iter().map(|phase| phase.within(limit as u32)).collect();
    let part = |(dataset, Share { name, .. }): (usize, &Share)| Part {
        name: name.text.clone(),
        weights: parts.iter().map(|phase| phase[dataset]).collect(),
    };
    Ok(shares.iter().enumerate().map(part).collect())
}

/// The action closest to a misspelt name, if one is close.
fn similar(name: &str) -> Option<&'static str> {
    let distance = |action: &&str| edit_distance(action, &name.to_lowercase());
    // Longer names than this are no misspelling, and the distance is quadratic.
    let best = (name.len() <= 32).then(|| ACTIONS.into_iter().min_by_key(distance))??;
    (distance(&best) <= best.len() / 2).then_some(best)
}

/// Insertions, deletions and replacements from one word to the other (Levenshtein).
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replace = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replace.min(row[j] + 1).min(row[j + 1] + 1);
        }
    }
    row[b.len()]
}
