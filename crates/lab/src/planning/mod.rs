//! What a plan costs, before it runs: which stage runs where, bytes and CPU time per token, memory.
//!
//! The stages are those of the compiled pipeline, for each of the three [`Placement`]s, so what is
//! shown is what runs. Their costs come from [`costs`]: a table of measured figures, or a
//! measurement on this machine. Nothing here opens a socket or talks to a daemon. Printing belongs
//! to the command.
//!
//! All figures are per token of the files that is read: with overlapping windows a token is
//! delivered more than once, and packed samples hold padding, which shows as more bytes after
//! `window`. What is not in the figures, [`notes`] says.

pub mod costs;

use serde::Serialize;
use service::Error;
use xio::dataset::{Dtype, Format, TokenFile};
use xio::order::{Cut, SampleLayout};
use xio::plan::{Megatron, Pack, Plan};
use xio::reader::{Reader, ReaderSource};
use xio::stage::{Branch, Pipeline, Place, SCRATCH_BYTES, SampleOp, Stage};

use costs::Costs;

/// Tokens of a dataset of which only the type is known.
const TOKENS_UNKNOWN: u64 = 1_000_000_000;

/// Slots of the ring, and bytes of each, that streams have by default.
const RING_BYTES: u64 = 16 << 20;

/// Bytes of a target's memory for one of the 64 requests of a session.
const TARGET_REQUEST_BYTES: u64 = 256;

/// Entries of a table of `remap` that is not at hand, to compile the plan with.
const TABLE_UNKNOWN: u32 = 1 << 20;

/// Why a plan has no place or no costs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// It does not go with the datasets.
    #[error(transparent)]
    Invalid(#[from] Error),
    /// A measurement met a token that cannot be delivered.
    #[error("{stage} cannot run on the data: {why}")]
    Token {
        /// The stage, as [`costs::name_of`] calls it.
        stage: String,
        /// What is wrong with the token.
        why: String,
    },
}

/// A dataset of the plan.
#[derive(Clone, Debug, Serialize)]
pub struct Dataset {
    /// Its name, or its number where only its type is known.
    pub name: String,
    /// Token type as stored.
    #[serde(serialize_with = "as_text")]
    pub dtype: Dtype,
    /// Who says so.
    pub origin: String,
    /// Its tokens; none if only its type is known.
    pub tokens: Option<u64>,
    /// Samples of an epoch, where the file is known and no other loader's order lists them.
    pub epoch_samples: Option<u64>,
    /// What the plan draws from it, where documents decide that and are known.
    pub drawn: Option<Drawn>,
    /// Its samples, in the same case.
    #[serde(skip)]
    pub samples: Option<(SampleLayout, Cut)>,
}

/// The documents that a plan draws from.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Drawn {
    /// How many are left.
    pub documents: u64,
    /// Tokens in them.
    pub tokens: u64,
    /// Documents that the filter drops.
    pub filtered_documents: u64,
    /// Tokens in them.
    pub filtered_tokens: u64,
    /// Documents that are dropped because there are others with their hash.
    pub duplicate_documents: u64,
    /// Tokens in them.
    pub duplicate_tokens: u64,
    /// What they are packed into.
    pub packed: Option<PackedSamples>,
}

/// Packed samples of a dataset, in an epoch.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PackedSamples {
    /// How many.
    pub samples: u64,
    /// Share of their tokens that is padding.
    pub padding: f64,
    /// Tokens of the file that are read for them.
    pub read_tokens: u64,
}

impl PackedSamples {
    /// The packed samples of a dataset, if they are packed.
    pub fn of(layout: &SampleLayout, cut: &Cut) -> Option<PackedSamples> {
        let Cut::Packed(packing) = cut else { return None };
        let (samples, padding) = (packing.samples(), packing.waste());
        let blocks = (0..layout.blocks()).map(|block| packing.block(block));
        let read_tokens = blocks.map(|tokens| tokens.end - tokens.start).sum();
        Some(PackedSamples { samples, padding, read_tokens })
    }
}

fn as_text<S: serde::Serializer>(dtype: &Dtype, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(dtype)
}

impl Dataset {
    fn file(&self) -> TokenFile {
        let tokens = self.tokens.unwrap_or(TOKENS_UNKNOWN);
        TokenFile { dtype: self.dtype, data_offset: 0, tokens, format: Format::Flat }
    }

    /// Tokens of the file that are read for a sample.
    fn tokens_per_sample(&self, pipeline: &Pipeline) -> f64 {
        match self.drawn.and_then(|drawn| drawn.packed) {
            Some(packed) => packed.read_tokens as f64 / packed.samples.max(1) as f64,
            None => f64::from(pipeline.window_tokens() - pipeline.overlap_tokens()),
        }
    }
}

/// Which machines take part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// Target, DPU and host.
    Offload,
    /// Target and host.
    NoOffload,
    /// The host alone, over its own files.
    Local,
}

impl Placement {
    /// All of them.
    pub const ALL: [Placement; 3] = [Placement::Offload, Placement::NoOffload, Placement::Local];

    /// The name, and who does the work.
    pub const fn describe(self) -> (&'static str, &'static str) {
        match self {
            Placement::Offload => (
                "offload",
                "the target shrinks the data, the DPU makes batches, the host reads them",
            ),
            Placement::NoOffload => {
                ("no offload", "the target reads and sends, the host does the rest")
            }
            Placement::Local => ("local files", "the host does everything; there is no network"),
        }
    }

    fn compile(self, plan: &Plan, dtypes: &[Dtype]) -> Result<Pipeline, Error> {
        let ids = Some(TABLE_UNKNOWN);
        let compiled = match self {
            Placement::Offload => plan.compile_with(dtypes, ids, true),
            Placement::NoOffload => plan.compile_with(dtypes, ids, false),
            Placement::Local => plan.compile_local(dtypes, ids),
        };
        compiled.map_err(|error| {
            Error::invalid(error).hint("the plan does not go with the types of the datasets")
        })
    }
}

/// A stage, or what moves data between stages.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// "target", "dpu" or "host".
    pub place: &'static str,
    /// What it does.
    pub stage: String,
    /// Bytes of a token that go in and come out, as a mean over the datasets.
    pub bytes_in: f64,
    /// See `bytes_in`.
    pub bytes_out: f64,
    /// Seconds of a processor for 10^9 tokens; none where only a measurement can tell.
    pub cpu_s: Option<f64>,
    /// Why it runs there, for actions of the plan.
    pub why: &'static str,
}

/// A figure for each machine.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct PerPlace<T> {
    /// The storage target.
    pub target: T,
    /// The DPU.
    pub dpu: T,
    /// The host that trains.
    pub host: T,
}

/// A plan in one placement.
#[derive(Clone, Debug, Serialize)]
pub struct Placed {
    /// Who takes part.
    pub placement: Placement,
    /// What happens, in the order of the data flow.
    pub rows: Vec<Row>,
    /// Bytes of a token on the wire, without headers.
    pub wire_bytes: f64,
    /// Bytes of a token as delivered.
    pub delivered_bytes: f64,
    /// CPU seconds for 10^9 tokens. Of rows that only a measurement can tell nothing is added.
    pub cpu_s: PerPlace<f64>,
    /// Bytes of memory that the stream needs.
    pub memory_bytes: PerPlace<u64>,
}

/// Compiles the plan for a placement and adds up what it costs.
///
/// # Errors
/// When the plan does not go with the datasets, and when a measurement meets a token that cannot be
/// delivered.
pub fn place(
    plan: &Plan,
    datasets: &[Dataset],
    placement: Placement,
    costs: &Costs,
) -> Result<Placed, PlanError> {
    let dtypes: Vec<Dtype> = datasets.iter().map(|dataset| dataset.dtype).collect();
    let pipeline = placement.compile(plan, &dtypes)?;
    let branches = pipeline.branches().iter().enumerate();
    let branches = branches
        .map(|(index, branch)| block_rows(branch, costs, index, placement))
        .collect::<Result<Vec<_>, PlanError>>()?;
    let weights = weights(plan, &pipeline, datasets);
    let mut rows = merged(&branches, &weights);
    let wire_bytes = rows.iter().rfind(|row| row.place == "target").map_or(0.0, |r| r.bytes_out);
    let wire_bytes = wire_bytes + add_loss_weights(&mut rows, &pipeline, placement);
    if placement != Placement::Local {
        add_network(&mut rows, wire_bytes, placement);
    }
    let of_sample = datasets.iter().map(|dataset| dataset.tokens_per_sample(&pipeline));
    let stride = mean(&of_sample.collect::<Vec<_>>(), &weights);
    let delivered_bytes = add_samples(&mut rows, &pipeline, costs, placement, stride);
    explain(&mut rows, &pipeline);
    let cpu = |place: &str| {
        let there = rows.iter().filter(|row| row.place == place);
        there.filter_map(|row| row.cpu_s).sum()
    };
    let cpu_s = PerPlace { target: cpu("target"), dpu: cpu("dpu"), host: cpu("host") };
    let memory_bytes = memory(plan, &pipeline, datasets, placement)?;
    Ok(Placed { placement, rows, wire_bytes, delivered_bytes, cpu_s, memory_bytes })
}

fn mean(values: &[f64], weights: &[f64]) -> f64 {
    let total: f64 = weights.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    values.iter().zip(weights).map(|(value, weight)| value * weight).sum::<f64>() / total
}

/// What the figures of a plan leave out, because it depends on the documents or changes during the
/// stream.
pub fn notes(plan: &Plan, datasets: &[Dataset]) -> Vec<&'static str> {
    let by_size = |order: &Megatron| order.weights.is_empty() && plan.blend().len() > 1;
    let unknown = datasets.iter().any(|dataset| dataset.drawn.is_none());
    let notes = [
        (plan.pack().is_some() && unknown, "packed samples count as full"),
        (!plan.selection().is_empty() && unknown, "what filter and dedup drop is not subtracted"),
        (plan.needs_documents(), "memory is without the tables of documents"),
        (
            plan.megatron().is_some(),
            "order(megatron): memory is without its tables and buffers, which depend on the documents",
        ),
        (
            plan.megatron().is_some_and(by_size),
            "datasets count by their tokens, where these are known, or else alike",
        ),
        (!plan.phases().is_empty(), "datasets have the weights of the first phase"),
    ];
    notes.into_iter().filter_map(|(applies, note)| applies.then_some(note)).collect()
}

/// How much each dataset counts in means.
fn weights(plan: &Plan, pipeline: &Pipeline, datasets: &[Dataset]) -> Vec<f64> {
    match plan.megatron() {
        Some(order) if order.weights.len() == datasets.len() => {
            order.weights.iter().map(|weight| weight.value()).collect()
        }
        Some(_) => datasets.iter().map(|dataset| dataset.file().tokens as f64).collect(),
        None => pipeline.branches().iter().map(|branch| f64::from(branch.weight())).collect(),
    }
}

/// The rows of a dataset up to its samples.
fn block_rows(
    branch: &Branch,
    costs: &Costs,
    index: usize,
    placement: Placement,
) -> Result<Vec<Row>, PlanError> {
    let blocks = branch.blocks();
    let stored = f64::from(blocks.target().stored().bytes());
    let reads = if placement == Placement::Local { Place::Host } else { Place::Target };
    let (bytes_in, bytes_out, cpu_s) = (stored, stored, Some(stored * costs::READ_S_PER_BYTE));
    let read = "read (from the page cache)".to_owned();
    let read = Row { place: reads.name(), stage: read, bytes_in, bytes_out, cpu_s, why: "" };
    let measured = costs.of(index, blocks)?;
    let mut bytes = stored;
    let stage = |(stage, cost): (&Stage<_>, costs::Cost)| {
        let bytes_in = std::mem::replace(&mut bytes, cost.bytes_out);
        Row {
            place: stage.place.name(),
            stage: costs::name_of(&stage.op),
            bytes_in,
            bytes_out: cost.bytes_out,
            cpu_s: cost.cpu_s,
            why: "",
        }
    };
    let rows = blocks.over_blocks().zip(measured).map(stage);
    Ok([read].into_iter().chain(rows).collect())
}

/// The rows of several datasets as one list of means; a dataset that skips a stage keeps its bytes
/// there.
fn merged(branches: &[Vec<Row>], weights: &[f64]) -> Vec<Row> {
    let mut order: Vec<(&'static str, String)> = Vec::new();
    for rows in branches {
        let mut at = 0;
        for row in rows {
            let key = (row.place, row.stage.clone());
            match order.iter().skip(at).position(|known| *known == key) {
                Some(found) => at += found + 1,
                None => {
                    order.insert(at, key);
                    at += 1;
                }
            }
        }
    }
    let total: f64 = weights.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    let stored = |rows: &Vec<Row>| rows.first().map_or(0.0, |row| row.bytes_in);
    let mut bytes: Vec<f64> = branches.iter().map(stored).collect();
    let mut rows = Vec::with_capacity(order.len());
    for (place, stage) in order {
        let (bytes_in, mut cpu_s) = (mean(&bytes, weights), Some(0.0));
        for ((branch, bytes), weight) in branches.iter().zip(&mut bytes).zip(weights) {
            let row = branch.iter().find(|row| row.place == place && row.stage == stage);
            if let Some(row) = row {
                *bytes = row.bytes_out;
                cpu_s = cpu_s.zip(row.cpu_s).map(|(sum, cost)| sum + cost * weight / total);
            }
        }
        rows.push(Row { place, stage, bytes_in, bytes_out: mean(&bytes, weights), cpu_s, why: "" });
    }
    rows
}

/// Adds that loss weights are read and checked, if they are; returns their bytes of a token.
/// Where tokens are measured, these costs are those of the documents: no block of weights is read.
fn add_loss_weights(rows: &mut Vec<Row>, pipeline: &Pipeline, placement: Placement) -> f64 {
    let Some(stages) = pipeline.loss_weights() else {
        return 0.0;
    };
    let reads = if placement == Placement::Local { Place::Host } else { Place::Target };
    let bytes = f64::from(stages.target().stored().bytes());
    let row = Row {
        place: reads.name(),
        stage: "read loss weights".to_owned(),
        bytes_in: bytes,
        bytes_out: bytes,
        cpu_s: Some(bytes * costs::READ_S_PER_BYTE),
        why: "of each token, beside it and as they are",
    };
    let mut at = 1.min(rows.len());
    rows.insert(at, row);
    for (stage, cost) in stages.over_blocks().zip(costs::documented(stages)) {
        let row = Row {
            place: stage.place.name(),
            stage: format!("{} loss weights", costs::name_of(&stage.op)),
            bytes_in: bytes,
            bytes_out: cost.bytes_out,
            cpu_s: cost.cpu_s,
            why: "",
        };
        // What the target does stays in front of what is sent.
        at = if stage.place == reads { at + 1 } else { rows.len() };
        rows.insert(at, row);
    }
    if placement == Placement::Local { 0.0 } else { bytes }
}

/// Adds what both ends of the network do.
fn add_network(rows: &mut Vec<Row>, wire_bytes: f64, placement: Placement) {
    let reader = Place::of_reader(placement == Placement::Offload).name();
    let at = rows.iter().rposition(|row| row.place == "target").map_or(0, |at| at + 1);
    let row = |place, stage: &str| Row {
        place,
        stage: stage.to_owned(),
        bytes_in: wire_bytes,
        bytes_out: wire_bytes,
        cpu_s: Some(wire_bytes * costs::NETWORK_S_PER_BYTE),
        why: "RoCE in software; a device does it without the processor",
    };
    rows.splice(at..at, [row("target", "send"), row(reader, "receive")]);
}

/// Adds what happens to samples: one copy into the ring, in which all actions over samples are
/// done. Each is made of `stride` tokens of a file. Returns the bytes of a token then.
fn add_samples(
    rows: &mut Vec<Row>,
    pipeline: &Pipeline,
    costs: &Costs,
    placement: Placement,
    stride: f64,
) -> f64 {
    let reader = Place::of_reader(placement == Placement::Offload).name();
    let repeated = f64::from(pipeline.window_tokens()) / stride;
    let (from, to) = (pipeline.sample_dtype(), pipeline.dtype());
    let mut bytes = rows.last().map_or(0.0, |row| row.bytes_out);
    let over_samples = pipeline.branches().iter().take(1).flat_map(Branch::sample_stages);
    for stage in over_samples.chain(pipeline.joint()) {
        let (bytes_in, mut cpu_s) = (bytes, Some(0.0));
        let samples = f64::from(pipeline.window_tokens());
        if let Some(of_sample) = stage.output.sample_bytes() {
            bytes = of_sample as f64 / stride;
        }
        match stage.op {
            SampleOp::Widen { .. } => cpu_s = Some(costs.widen(from, to) * repeated),
            SampleOp::Pack(Pack { fit, .. }) => cpu_s = Some(costs::pack(fit) * repeated),
            SampleOp::Positions => cpu_s = Some(costs::POSITIONS_S * repeated),
            SampleOp::Batch { .. } => {
                cpu_s = Some(costs.copy(bytes) + costs::ORDER_S_PER_SAMPLE * repeated / samples);
            }
            _ => {}
        }
        let stage = stage.op.to_string();
        rows.push(Row { place: reader, stage, bytes_in, bytes_out: bytes, cpu_s, why: "" });
    }
    if placement == Placement::Offload {
        let stage = "read batches from the ring".to_owned();
        let cpu_s = Some(costs::RING_S);
        let (bytes_in, bytes_out, why) = (bytes, bytes, "in place, without a copy");
        rows.push(Row { place: "host", stage, bytes_in, bytes_out, cpu_s, why });
    }
    bytes
}

/// Takes over the reasons from the pipeline's own table.
fn explain(rows: &mut [Row], pipeline: &Pipeline) {
    let table = pipeline.table();
    let is_local = rows.first().is_some_and(|row| row.place == Place::Host.name());
    for row in rows.iter_mut().filter(|row| row.why.is_empty()) {
        let same = |known: &&xio::stage::Row| {
            known.place.name() == row.place && row.stage.ends_with(known.action.as_str())
        };
        row.why = match table.rows.iter().find(same) {
            _ if row.stage.starts_with("batch(") => {
                "one copy into the ring, which does what the stages over samples say"
            }
            // Nothing could be offloaded.
            Some(_) if is_local => "",
            Some(known) => known.why,
            None => "",
        };
    }
}

/// Memory of the stream at each machine.
fn memory(
    plan: &Plan,
    pipeline: &Pipeline,
    datasets: &[Dataset],
    placement: Placement,
) -> Result<PerPlace<u64>, Error> {
    let refused = |dataset: &Dataset, error: &dyn std::fmt::Display| {
        Error::invalid(format_args!("{}: {error}", dataset.name))
            .hint("choose a smaller window(N); `dquant inspect FILE` shows how long a file is")
    };
    // A packing reads the documents of the files, and only then is known how many samples there
    // are.
    let samples = |(index, dataset): (usize, &Dataset)| match &dataset.samples {
        Some(samples) => Ok(samples.clone()),
        None => match pipeline.layout(index, dataset.file()) {
            Ok(layout) => Ok((layout, Cut::default())),
            Err(error) => Err(refused(dataset, &error)),
        },
    };
    let samples = datasets.iter().enumerate().map(samples);
    let samples = samples.collect::<Result<Vec<_>, Error>>()?;
    let layouts: Vec<SampleLayout> = samples.iter().map(|(layout, _)| *layout).collect();
    let source = |(source, ((layout, cut), branch)): (u32, (_, &Branch))| ReaderSource {
        connection: 0,
        source,
        layout,
        stages: branch.blocks().clone(),
        cut,
        whole_pages: false,
        weighs: None,
    };
    let mut sources: Vec<ReaderSource> =
        (0..).zip(samples.into_iter().zip(pipeline.branches())).map(source).collect();
    if let Some(stages) = pipeline.loss_weights() {
        // As if every dataset had some.
        let weights = sources.iter().map(|of| of.loss_weights(0, stages.clone()));
        sources.extend(weights.collect::<Vec<_>>());
    }
    let buffers = match plan.megatron() {
        // Its order is made of the documents.
        Some(_) => 0,
        None => {
            let order = pipeline.order(&layouts).map_err(Error::invalid)?;
            Reader::memory_needed(&order.into(), &sources)
        }
    };
    let table = if plan.remap().is_some() { u64::from(TABLE_UNKNOWN) * 4 } else { 0 };
    let module = if plan.wasm().is_some() { MODULE_BYTES } else { 0 };
    let scratch = if plan.compress().is_some() { SCRATCH_BYTES as u64 } else { 0 };
    let requests = u64::from(xio::target::MAX_CREDITS) * TARGET_REQUEST_BYTES;
    let target = requests + table + module + scratch;
    Ok(match placement {
        Placement::Offload => PerPlace { target, dpu: buffers, host: RING_BYTES },
        Placement::NoOffload => PerPlace { target, dpu: 0, host: buffers + RING_BYTES },
        Placement::Local => {
            PerPlace { target: 0, dpu: 0, host: buffers + RING_BYTES + table + module }
        }
    })
}

/// Most memory of a user action.
const MODULE_BYTES: u64 = 32 << 20;
