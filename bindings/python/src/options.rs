//! Keyword arguments of a stream as a request to `client`.

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use client::{LeaveOut, Opened, Options};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyInt, PyList, PyMapping, PyTuple};

use crate::errors::{U32, invalid, value_of};
use crate::ranks::{self, Slice};

/// Port of a RoCE endpoint whose address names none.
const ROCE_PORT: u16 = 4791;

/// Longest wait for a lost target, in seconds: a year.
const MAX_RECONNECT_S: f64 = 365.0 * 86_400.0;

/// Everything that opens a stream.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// Where the datasets are; where files are listed, the first of them.
    pub(crate) url: String,
    /// Files of this machine, where they are listed.
    pub(crate) files: Vec<String>,
    pub(crate) plan: String,
    pub(crate) offload: bool,
    pub(crate) options: Options,
    pub(crate) slice: Slice,
    pub(crate) passes: Passes,
}

/// How often a stream goes over its data.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Passes {
    /// Epochs of a pass, where `batches` does not say how long one is.
    epochs: Option<u64>,
    /// Passes before this one.
    epoch: u64,
    /// Iterating begins at the beginning each time.
    pub(crate) evaluate: bool,
}

impl Passes {
    /// Whether there is an option of this name.
    fn set(&mut self, name: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        match name {
            "epochs" => self.epochs = Some(value_of(name, value, U64)?),
            "epoch" => self.epoch = value_of(name, value, U64)?,
            "evaluate" => self.evaluate = value_of(name, value, "True or False")?,
            _ => return Ok(false),
        }
        Ok(true)
    }
}

impl Request {
    /// Checks the keyword arguments. What only the DPU or the target can judge is left to them.
    pub(crate) fn new(
        source: &Bound<'_, PyAny>,
        plan: Option<String>,
        offload: bool,
        given: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Request> {
        let (mut options, mut actions) = (Options::from_env(), Actions::default());
        let (mut ranks, mut passes) = (ranks::Given::default(), Passes::default());
        for (name, value) in given.into_iter().flatten() {
            let name = name.extract::<String>()?;
            let is_set = value.is_none()
                || actions.set(&name, &value)?
                || ranks.set(&name, &value)?
                || passes.set(&name, &value)?;
            if !is_set {
                set(&mut options, &name, &value)?;
            }
        }
        if passes.epochs.is_some() && options.batches.is_some() {
            let message = "both epochs and batches are given";
            return Err(invalid(message, "give one of them: how long a pass is"));
        }
        if passes.evaluate {
            actions.shuffle.get_or_insert(false);
            passes.epochs = passes.epochs.or(options.batches.is_none().then_some(1));
        }
        let files = listed(source)?;
        let (url, blend) = match files.first() {
            Some(first) => (first.clone(), None),
            None => datasets(source)?,
        };
        let plan = actions.plan(plan, blend)?;
        let (rank, slice) = ranks.place(source.py())?;
        let all = options.batches.unwrap_or(0).checked_mul(rank.ranks.into());
        options.rank = rank;
        if all.and_then(|all| options.first_batch.checked_add(all)).is_none() {
            return Err(invalid(
                "first_batch and batches together exceed 64 bits",
                "leave batches out",
            ));
        }
        Ok(Request { url, files, plan, offload, options, slice, passes })
    }

    /// What to open first: a stream of its own where only the datasets tell how long the real one
    /// is. One that ranks share would end for all with the first of them that has looked.
    pub(crate) fn to_look(&self) -> Request {
        let mut request = self.clone();
        if self.passes.epochs.is_some() || self.passes.epoch > 0 {
            request.options.rank.group = None;
            // As little memory as there is: nothing is read from it.
            (request.options.slots, request.options.slot_bytes) = (2, 0);
        }
        request
    }

    /// The same with the length of a pass in batches, and from the beginning of the pass that is
    /// asked for on, now that the datasets are known. `None` where it is this.
    pub(crate) fn resolved(&self, opened: &Opened) -> PyResult<Option<Request>> {
        let Passes { epochs, epoch, .. } = self.passes;
        let mut request = self.clone();
        let ranks = u64::from(self.options.rank.ranks);
        if let Some(epochs) = epochs {
            let Some(samples) = opened.epoch_samples() else {
                let message = "epochs are not known of this order";
                return Err(invalid(message, "give batches, or samples= in the plan's order"));
            };
            let step = u64::from(opened.batch_samples.max(1)) * ranks;
            let batches = samples.saturating_mul(epochs) / step;
            if batches == 0 {
                let message = format!(
                    "{epochs} epochs have {} samples, less than a batch of {} for each of {ranks} ranks",
                    samples.saturating_mul(epochs),
                    opened.batch_samples
                );
                return Err(invalid(message, "give a smaller batch_size or more epochs"));
            }
            request.options.batches = Some(batches);
        }
        if epoch > 0 {
            let Some(batches) = request.options.batches else {
                let message = format!("epoch is {epoch}, but how long a pass is was not given");
                return Err(invalid(message, "give epochs=1, or batches"));
            };
            let before = batches.checked_mul(ranks).and_then(|step| step.checked_mul(epoch));
            let first = before.and_then(|before| before.checked_add(self.options.first_batch));
            request.options.first_batch = first.ok_or_else(|| {
                invalid("epoch and batches together exceed 64 bits", "leave epoch out")
            })?;
        }
        Ok((epochs.is_some() || epoch > 0).then_some(request))
    }

    /// Batches of a pass for this trainer.
    pub(crate) fn batches(&self) -> Option<u64> {
        self.options.batches
    }

    /// Number of the first batch that is not delivered; `None` for a stream without end.
    pub(crate) fn end(&self) -> Option<u64> {
        // No overflow: checked when the request was made, and later requests begin before this end.
        let count = self.options.batches? * u64::from(self.options.rank.ranks);
        Some(self.options.first_batch + count)
    }

    /// Goes on at a sample, in batches of `batch_samples`; `false` if less than a batch for each
    /// rank is left.
    pub(crate) fn move_to(&mut self, sample: u64, batch_samples: u32) -> bool {
        let size = u64::from(batch_samples.max(1));
        // The end is a sample, too: whole batches for every rank fit before it.
        let end = self.end().map(|end| end.saturating_mul(size));
        let ranks = u64::from(self.options.rank.ranks);
        self.options.first_batch = sample / size;
        self.options.shift = (sample % size) as u32;
        let left = end.map(|end| end.saturating_sub(sample) / size / ranks);
        self.options.batches = left;
        left != Some(0)
    }
}

/// What long numbers are.
const U64: &str = "a whole number from 0 to 2**64 - 1";

/// The names of all keyword arguments: those that stand for a plan, those of ranks, and the others.
const OPTIONS: [&str; 55] = [
    "seq_len",
    "batch_size",
    "shuffle",
    "pack",
    "filter",
    "keep",
    "dedup",
    "remap",
    "wasm",
    "narrow",
    "overflow",
    "bitpack",
    "compress",
    "compress_level",
    "compress_when",
    "quantize",
    "deliver",
    "widen",
    "pairs",
    "ignore",
    "labels",
    "positions",
    "loss_weights",
    "missing_weight",
    "pad",
    "split",
    "part",
    "split_seed",
    "tokenizers",
    "rank",
    "world_size",
    "local_rank",
    "local_world_size",
    "tp",
    "cp",
    "pp",
    "cp_split",
    "group",
    "token",
    "dpu",
    "dpu_user",
    "dtype",
    "vocab",
    "seed",
    "first_batch",
    "batches",
    "epochs",
    "epoch",
    "evaluate",
    "leave_out",
    "slots",
    "slot_size",
    "roce",
    "memory",
    "reconnect",
];

/// The options whose names are most like this one.
fn close_matches(py: Python<'_>, name: &str) -> PyResult<Vec<String>> {
    let difflib = py.import("difflib")?;
    difflib.call_method1("get_close_matches", (name, OPTIONS.as_slice(), 2))?.extract()
}

fn set(options: &mut Options, name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
    let text = || value_of::<String>(name, value, "text");
    let small = || value_of::<u32>(name, value, U32);
    let large = || value_of::<u64>(name, value, U64);
    match name {
        // Not shown: it is a secret.
        "token" => {
            let wrong = |_| invalid("token is not text", "give text");
            options.token = value.extract().map_err(wrong)?;
        }
        "dpu" => options.dpu = value_of(name, value, "the path of a socket")?,
        "dpu_user" => options.dpu_user = Some(user(value)?),
        "dtype" => options.dtype = value_of(name, value, "a type such as \"u16\"")?,
        "vocab" => options.vocabulary = Some(large()?),
        "seed" => options.seed = large()?,
        "first_batch" => options.first_batch = large()?,
        "batches" => options.batches = Some(batches(large()?)?),
        "leave_out" => options.leave_out = ranges(value)?,
        "slots" => options.slots = small()?,
        "slot_size" => {
            options.slot_bytes = small()?;
            if options.slot_bytes == 0 {
                return Err(invalid("slot_size is 0", "leave it out, or give bytes for a batch"));
            }
        }
        "roce" => options.roce = Some(roce_address(&text()?)?),
        "memory" => options.memory = large()?,
        "reconnect" => options.reconnect = seconds(value_of(name, value, "seconds")?)?,
        _ => {
            let close = close_matches(value.py(), name).unwrap_or_default();
            return Err(PyTypeError::new_err(match close.is_empty() {
                true => format!("no option '{name}'; there are {}", OPTIONS.join(", ")),
                false => format!("no option '{name}'; did you mean {}?", close.join(" or ")),
            }));
        }
    }
    Ok(())
}

/// The actions of a plan as keyword arguments.
#[derive(Debug, Default)]
struct Actions {
    seq_len: Option<u32>,
    batch_size: Option<u32>,
    shuffle: Option<bool>,
    /// `pack`, `filter`, `keep` and `dedup`, as actions.
    documents: [Option<String>; 4],
    remap: Option<PathBuf>,
    /// A module and its SHA-256.
    wasm: Option<(String, String)>,
    narrow: Option<String>,
    overflow: Option<String>,
    bitpack: Option<u32>,
    compress: Option<String>,
    compress_level: Option<i32>,
    compress_when: Option<String>,
    quantize: Option<String>,
    deliver: Option<String>,
    widen: Option<String>,
    pairs: bool,
    ignore: Option<i64>,
    labels: Option<String>,
    positions: bool,
    loss_weights: bool,
    missing_weight: Option<String>,
    pad: Option<u32>,
    split: Option<String>,
    part: Option<String>,
    split_seed: Option<u64>,
    tokenizers: Option<String>,
    /// Those that were given and are not False.
    given: Vec<String>,
}

/// Keywords that exclude others, with the reason.
const EXCLUSIVE: [(&str, &[&str], &str); 3] = [
    (
        "quantize",
        &[
            "pack",
            "pairs",
            "positions",
            "ignore",
            "labels",
            "loss_weights",
            "remap",
            "wasm",
            "narrow",
            "bitpack",
            "widen",
        ],
        "the one is for values, the other for tokens",
    ),
    ("bitpack", &["compress"], "packed tokens do not compress"),
    ("filter", &["keep"], "a list says which documents are dropped, or which are kept"),
];

/// Keywords that need another.
const NEEDS: [(&str, &str); 14] = [
    ("overflow", "narrow"),
    ("compress_level", "compress"),
    ("compress_when", "compress"),
    ("deliver", "quantize"),
    // Windows are cut from whole files.
    ("filter", "pack"),
    ("keep", "pack"),
    ("dedup", "pack"),
    ("pad", "pack"),
    ("ignore", "pairs"),
    ("labels", "pairs"),
    ("missing_weight", "loss_weights"),
    ("part", "split"),
    // Else a stream for evaluation would have the data of training.
    ("split", "part"),
    ("split_seed", "split"),
];

impl Actions {
    /// Whether there is an action of this name.
    fn set(&mut self, name: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        match name {
            "seq_len" => self.seq_len = Some(value_of(name, value, U32)?),
            "batch_size" => self.batch_size = Some(value_of(name, value, U32)?),
            "shuffle" => self.shuffle = Some(value_of(name, value, "True or False")?),
            "pack" => {
                let fit = value_of::<String>(name, value, "best, first or single")?;
                self.documents[0] = Some(fit);
            }
            "filter" => {
                self.documents[1] = Some(format!("filter({})", quoted(&list(name, value)?)));
            }
            "keep" => {
                self.documents[2] = Some(format!("filter(keep={})", quoted(&list(name, value)?)));
            }
            "dedup" => self.documents[3] = dedup(value)?.map(str::to_owned),
            "remap" => self.remap = Some(value_of(name, value, "the name or path of a table")?),
            "wasm" => {
                let takes = "a module and the SHA-256 of its file: (\"mask.wasm\", \"9f86...\")";
                self.wasm = Some(value_of(name, value, takes)?);
            }
            "narrow" => self.narrow = Some(value_of(name, value, "a type such as \"u16\"")?),
            "overflow" => self.overflow = Some(overflow(value)?),
            "bitpack" => self.bitpack = Some(value_of(name, value, U32)?),
            "compress" => self.compress = Some(value_of(name, value, "\"lz4\" or \"zstd\"")?),
            "compress_level" => {
                self.compress_level = Some(value_of(name, value, "a whole number")?);
            }
            "compress_when" => {
                self.compress_when = Some(value_of(name, value, "\"faster\" or \"always\"")?);
            }
            "quantize" => {
                self.quantize = Some(value_of(name, value, "\"int8\", \"e4m3\" or \"e5m2\"")?);
            }
            "deliver" => {
                self.deliver =
                    Some(value_of(name, value, "\"f32\", \"f16\", \"bf16\" or \"quantized\"")?);
            }
            "widen" => self.widen = Some(value_of(name, value, "a type such as \"i64\"")?),
            "pairs" => self.pairs = value_of(name, value, "True or False")?,
            "ignore" => {
                self.ignore =
                    Some(value_of(name, value, "the id of labels to ignore, such as -100")?);
            }
            "labels" => {
                self.labels = Some(value_of(name, value, "\"targets\" or \"all\"")?);
            }
            "positions" => self.positions = value_of(name, value, "True or False")?,
            "loss_weights" => self.loss_weights = value_of(name, value, "True or False")?,
            "missing_weight" => {
                if value.is_instance_of::<PyBool>() {
                    let hint = "give the weight of tokens of datasets that have none, such as 1";
                    return Err(invalid("missing_weight is no number", hint));
                }
                self.missing_weight = Some(weight_of("tokens that have none", value)?);
            }
            "pad" => self.pad = Some(value_of(name, value, U32)?),
            "split" => self.split = Some(shares(value)?),
            "part" => self.part = Some(value_of(name, value, "\"train\", \"valid\" or \"test\"")?),
            "split_seed" => self.split_seed = Some(value_of(name, value, U64)?),
            "tokenizers" => self.tokenizers = Some(value_of(name, value, "\"any\"")?),
            _ => return Ok(false),
        }
        // What is switched off is as if it were not there.
        if !matches!(value.extract::<bool>(), Ok(false)) {
            self.given.push(name.to_owned());
        }
        Ok(true)
    }

    /// Refuses combinations that no plan has, in the words of the caller.
    fn check(&self) -> PyResult<()> {
        let is_given = |name: &str| self.given.iter().any(|given| given == name);
        for (one, others, why) in EXCLUSIVE {
            if let Some(other) = others.iter().find(|other| is_given(one) && is_given(other)) {
                let message = format!("{one} and {other} exclude each other: {why}");
                return Err(invalid(message, &format!("leave {one} or {other} out")));
            }
        }
        for (one, needed) in NEEDS {
            if is_given(one) && !is_given(needed) {
                let message = format!("{one} is given, but {needed} is not");
                return Err(invalid(message, &format!("give {needed}, or leave {one} out")));
            }
        }
        if let (Some("u16"), Some(bits @ 16..)) = (self.narrow.as_deref(), self.bitpack) {
            let message =
                format!("narrow=\"u16\" and bitpack={bits} exclude each other: 16 bits are fewer");
            return Err(invalid(message, "leave bitpack out, or give narrow=\"u32\""));
        }
        let escapes = self.overflow.as_deref() == Some("escape");
        if escapes && !matches!(self.widen.as_deref(), Some("u32" | "i64")) {
            let message =
                "overflow=\"escape\" needs widen: what escapes is delivered in a larger type";
            return Err(invalid(message, "give widen=\"u32\" or widen=\"i64\""));
        }
        if escapes && self.bitpack.is_some() {
            let message =
                "overflow=\"escape\" and bitpack exclude each other: what escapes has more bits";
            return Err(invalid(
                message,
                "leave bitpack out: blocks are packed as far as they allow",
            ));
        }
        Ok(())
    }

    /// The plan as text: the given one, or the one that the keyword arguments describe.
    fn plan(mut self, plan: Option<String>, blend: Option<String>) -> PyResult<String> {
        let mut text = match (plan, self.given.first()) {
            (Some(_), Some(name)) => {
                let message = format!("both a plan and {name} are given");
                return Err(invalid(message, "write everything into the plan, or leave it out"));
            }
            (Some(plan), None) => plan,
            (None, _) => {
                self.check()?;
                self.actions()?.join(" | ")
            }
        };
        if let Some(blend) = blend {
            text = format!("{text} | {blend}");
        }
        Ok(text)
    }

    /// The actions that they describe.
    fn actions(&mut self) -> PyResult<Vec<String>> {
        let Some(seq_len) = self.seq_len else {
            let hint = "give seq_len=2048, or a plan: \"window(2048) | shuffle(7)\"";
            return Err(invalid("no plan and no seq_len is given", hint));
        };
        // A sample of pairs has a token more than its inputs, which windows share and whole
        // documents do not.
        let window = match (self.pairs, &self.documents[0]) {
            (false, _) => format!("window({seq_len})"),
            (true, None) => format!("window({}, overlap=1)", u64::from(seq_len) + 1),
            (true, Some(_)) => format!("window({})", u64::from(seq_len) + 1),
        };
        let shuffle = self.shuffle.unwrap_or(true).then(|| "shuffle(seed)".to_owned());
        let pad = ("pad", self.pad.map(|id| id.to_string()));
        let [fit, documents @ ..] = std::mem::take(&mut self.documents);
        let pack = call("pack", fit, [pad])?;
        let part = self.part.clone().unwrap_or_else(|| "train".to_owned());
        let seed = self.split_seed.unwrap_or(0);
        let split = self.split.as_ref().map(|shares| {
            format!("split({}, part={}, seed={seed})", quoted(shares), quoted(&part))
        });
        let tokenizers = self.tokenizers.as_ref().map(|any| format!("tokenizers({})", quoted(any)));
        let remap =
            self.remap.as_ref().map(|table| format!("remap({})", quoted(&table.to_string_lossy())));
        let wasm = self
            .wasm
            .as_ref()
            .map(|(module, sha256)| format!("wasm({}, sha256={})", quoted(module), quoted(sha256)));
        let narrow = call("narrow", self.narrow.take(), [("overflow", self.overflow.take())])?;
        let bitpack = self.bitpack.map(|bits| format!("bitpack({bits})"));
        let level = ("level", self.compress_level.map(|level| level.to_string()));
        let when = ("when", self.compress_when.take());
        let compress = call("compress", self.compress.take(), [level, when])?;
        let deliver = ("deliver", self.deliver.take());
        let quantize = call("quantize", self.quantize.take(), [deliver])?;
        let widen = self.widen.as_ref().map(|to| format!("widen({to})"));
        // What PyTorch's loss leaves out.
        let ignores = self.labels.as_deref().is_some_and(|of| of == "targets" || pack.is_some());
        let default = ignores.then_some(-100);
        let ignore = self.ignore.or(default).map(|id| format!("ignore={id}"));
        let labels = self.labels.as_ref().map(|labels| format!("labels={}", quoted(labels)));
        let pairs = self.pairs.then(|| match (ignore, labels) {
            (None, None) => "pairs".to_owned(),
            (Some(one), None) | (None, Some(one)) => format!("pairs({one})"),
            (Some(ignore), Some(labels)) => format!("pairs({ignore}, {labels})"),
        });
        let positions = self.positions.then(|| "positions".to_owned());
        let batch = self.batch_size.map(|samples| format!("batch({samples})"));
        let samples = [Some(window), pack, shuffle, tokenizers, split];
        let forms = [remap, wasm, narrow, bitpack, compress, quantize];
        let weights = match &self.missing_weight {
            Some(weight) => format!("loss_weights(missing={weight})"),
            None => "loss_weights".to_owned(),
        };
        let weights = self.loss_weights.then_some(weights);
        let rows = [widen, pairs, positions, weights, batch];
        let actions = samples.into_iter().chain(documents).chain(forms).chain(rows);
        Ok(actions.flatten().collect())
    }
}

/// An action of a plan, if its first argument is given; the others need that one.
fn call<const N: usize>(
    action: &str,
    first: Option<String>,
    others: [(&str, Option<String>); N],
) -> PyResult<Option<String>> {
    let others = others.into_iter().filter_map(|(name, value)| Some((name, value?)));
    let others: Vec<(&str, String)> = others.collect();
    match (first, others.first()) {
        (Some(first), _) => {
            let others = others.iter().map(|(name, value)| format!(", {name}={value}"));
            Ok(Some(format!("{action}({first}{})", others.collect::<String>())))
        }
        (None, Some((name, value))) => Err(invalid(
            format!("{name} of {action} is {value}, but {action} is not given"),
            &format!("give {action}, or leave it out"),
        )),
        (None, None) => Ok(None),
    }
}

/// What happens to tokens that do not fit: a policy of a plan, or the id that they become.
fn overflow(value: &Bound<'_, PyAny>) -> PyResult<String> {
    match value.cast::<PyInt>() {
        Ok(id) => {
            let id = value_of::<u32>("overflow", id, "\"error\", \"escape\" or an id")?;
            Ok(format!("saturate({id})"))
        }
        Err(_) => value_of("overflow", value, "\"error\", \"escape\" or an id"),
    }
}

/// The name of a list of hashes.
fn list(name: &str, value: &Bound<'_, PyAny>) -> PyResult<String> {
    let path = value_of::<PathBuf>(name, value, "the name or path of a list of hashes")?;
    Ok(path.to_string_lossy().into_owned())
}

/// The action of `dedup=True` and `dedup="across"`.
fn dedup(value: &Bound<'_, PyAny>) -> PyResult<Option<&'static str>> {
    if let Ok(on) = value.extract::<bool>() {
        return Ok(on.then_some("dedup"));
    }
    match value_of::<String>("dedup", value, "True, False or \"across\"")?.as_str() {
        "across" => Ok(Some("dedup(across)")),
        other => Err(invalid(format!("dedup is {other:?}"), "give True, False or \"across\"")),
    }
}

/// A name in quotes, as a plan has it.
fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('\\', "\\\\").replace('"', "\\\""))
}

/// Files that are listed; none where the source is something else.
fn listed(source: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    let is_list = source.is_instance_of::<PyList>() || source.is_instance_of::<PyTuple>();
    if !is_list {
        return Ok(Vec::new());
    }
    let paths = value_of::<Vec<PathBuf>>("source", source, "a list of paths")?;
    let paths: Vec<String> =
        paths.into_iter().map(|path| path.to_string_lossy().into_owned()).collect();
    if paths.is_empty() {
        return Err(invalid("source is an empty list", "name at least one file"));
    }
    if let Some(remote) = paths.iter().find(|path| path.contains("://")) {
        let message = format!("{remote} is in a list of files of this machine");
        let hint =
            "datasets at a target are blended by weights: {\"dq://HOST/a\": 2, \"dq://HOST/b\": 1}";
        return Err(invalid(message, hint));
    }
    Ok(paths)
}

/// The URL of a stream, and the blend of datasets that are given with their weights.
fn datasets(source: &Bound<'_, PyAny>) -> PyResult<(String, Option<String>)> {
    let Ok(weights) = source.cast::<PyMapping>() else {
        let takes = "a name or path, a pattern such as \"corpora/*.bin\", a list of paths, or a dictionary of names and weights";
        let path = value_of::<PathBuf>("source", source, takes)?;
        return Ok((path.to_string_lossy().into_owned(), None));
    };
    let (mut target, mut parts) = (None, Vec::new());
    for item in weights.items()?.iter() {
        let (name, weight) = (item.get_item(0)?, item.get_item(1)?);
        let name = value_of::<PathBuf>("a dataset", &name, "the name or path of a dataset")?;
        let name = name.to_string_lossy().into_owned();
        let weight = weight_of(&name, &weight)?;
        let (at, name) = match name.strip_prefix("dq://").and_then(|rest| rest.split_once('/')) {
            Some((host, name)) => (format!("dq://{host}"), name.to_owned()),
            None => (".".to_owned(), name),
        };
        if target.get_or_insert_with(|| at.clone()) != &at {
            let message =
                format!("datasets of {} and of {at} in one stream", target.unwrap_or_default());
            return Err(invalid(
                message,
                "all datasets of a stream are at one target, or all are local",
            ));
        }
        parts.push(format!("{}={weight}", quoted(&name)));
    }
    let target =
        target.ok_or_else(|| invalid("no dataset is given", "{\"web\": 0.7, \"code\": 0.3}"))?;
    Ok((target, Some(format!("blend({})", parts.join(", ")))))
}

/// A number that is given as text, such as `1/3` or `0.5`, as a `fractions.Fraction`.
fn fraction<'py>(name: &str, text: &str, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
    let number = py.import("fractions")?.call_method1("Fraction", (text,));
    number.map_err(|_| {
        let message = format!("the weight of {name} is {text:?}");
        invalid(message, "give a number, or a fraction such as \"1/3\"")
    })
}

/// A weight as a plan has it, exactly: a whole number, a fraction (`fractions.Fraction`), either as
/// text, or what Python prints for a float.
fn weight_of(name: &str, value: &Bound<'_, PyAny>) -> PyResult<String> {
    if let Ok(text) = value.extract::<String>() {
        return weight_of(name, &fraction(name, &text, value.py())?);
    }
    let part = |of: &str| value.getattr(of).and_then(|part| part.extract::<i128>());
    if let (Ok(above), Ok(below)) = (part("numerator"), part("denominator"))
        && above >= 0
        && below > 0
    {
        return Ok(if below == 1 { above.to_string() } else { format!("{above}/{below}") });
    }
    let weight = value_of::<f64>(&format!("the weight of {name}"), value, "a number")?;
    match weight.is_finite() && weight >= 0.0 {
        // In the fewest digits that mean this float.
        true => Ok(format!("{weight:e}")),
        false => Err(invalid(
            format!("the weight of {name} is {weight}"),
            "give a number that is not negative",
        )),
    }
}

/// Shares of training, validation and test as a plan has them.
fn shares(value: &Bound<'_, PyAny>) -> PyResult<String> {
    if let Ok(text) = value.extract::<String>() {
        return Ok(text);
    }
    let shares = value_of::<Vec<Bound<'_, PyAny>>>("split", value, "shares such as \"98,1,1\"")?;
    let shares = shares.iter().map(|share| weight_of("the split", share));
    Ok(shares.collect::<PyResult<Vec<_>>>()?.join(","))
}

fn batches(count: u64) -> PyResult<u64> {
    match count {
        0 => Err(invalid(
            "batches is 0",
            "give at least 1, or leave it out for a stream without end",
        )),
        count => Ok(count),
    }
}

/// Pairs of a first batch and the batch after the last.
fn ranges(value: &Bound<'_, PyAny>) -> PyResult<Vec<Range<u64>>> {
    let hint = "give pairs of a first batch and the batch after the last: [(1000, 1200)]";
    // A saved state has lists where users write tuples.
    let pairs = value.extract::<Vec<[u64; 2]>>();
    let pairs = pairs.map_err(|_| match value.repr() {
        Ok(given) => invalid(format!("leave_out is {given}"), hint),
        Err(error) => error,
    })?;
    let ranges = pairs.into_iter().map(|[first, end]| first..end);
    Ok(left_out(ranges)?.ranges().to_vec())
}

/// Ranges of batches in rising order, joined where they touch.
pub(crate) fn left_out(ranges: impl IntoIterator<Item = Range<u64>>) -> PyResult<LeaveOut> {
    let hint = "a range is (first, end), its last batch is end - 1";
    LeaveOut::new(ranges).map_err(|error| invalid(error.to_string(), hint))
}

/// A user by name or number.
fn user(value: &Bound<'_, PyAny>) -> PyResult<String> {
    match value.cast::<PyInt>() {
        Ok(number) => {
            Ok(value_of::<u32>("dpu_user", number, "the name or number of a user")?.to_string())
        }
        Err(_) => value_of("dpu_user", value, "the name or number of a user"),
    }
}

fn seconds(value: f64) -> PyResult<Duration> {
    if (0.0..=MAX_RECONNECT_S).contains(&value) {
        return Ok(Duration::from_secs_f64(value));
    }
    Err(invalid(format!("reconnect is {value}"), "give seconds from 0 to a year"))
}

fn roce_address(text: &str) -> PyResult<SocketAddr> {
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let without_port = bare.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, ROCE_PORT));
    without_port
        .or_else(|_| text.parse())
        .map_err(|_| invalid(format!("roce is {text:?}"), "write it as IP[:PORT]"))
}
