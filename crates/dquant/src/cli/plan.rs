//! `dquant plan explain`: where the stages of a plan run and what they cost, without any daemon.

use std::fmt;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use engine::budget::Bytes;
use engine::catalog::{Found, find_file};
use engine::files::DividedFiles;
use engine::proto::{DatasetInfo, DatasetRef};
use formats::ReadAt;
use lab::planning::costs::Costs;
use lab::planning::{
    Dataset, Drawn, PackedSamples, Placed, Placement, PlanError, Row, notes, place,
};
use serde::Serialize;
use xio::dataset::{BYTES, Dtype};
use xio::opener::Stored;
use xio::order::{Cut, SampleLayout};
use xio::plan::Plan;
use xio::reference::quantized::write;

use super::datasets::note_guess;
use super::{Console, Report};
use crate::exit::CliError;
use crate::exit::Exit;

/// Look at plans before they run
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dquant plan explain 'window(2048) | shuffle(7) | narrow(u16)' --dtype u32
  dquant plan explain --help")]
pub(super) struct PlanCommand {
    #[command(subcommand)]
    action: PlanAction,
}

#[derive(Debug, Subcommand)]
enum PlanAction {
    Explain(Explain),
}

/// Show where each stage of a plan runs, and what it costs
///
/// For each placement: the stages in the order of the data, on which machine each runs, the bytes of
/// a token after it, and an estimate of the CPU time for 10^9 tokens. Then the bytes on the wire and
/// the memory that the stream needs. Nothing is started and no daemon is asked.
///
/// Figures are per token of the files. Estimates are measured figures of the documentation; with
/// --measure the stages over blocks run here, on the first block of each file.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Words:
  target, DPU, host   the machine with the files, the one that makes batches, the one that trains
  offload             the DPU makes batches; no offload: the host does, from the target's blocks
  local files         the files lie on the host: no network and no other machine
  block               up to 1 MiB of a file, the unit of reading

Examples:
  dquant plan explain 'window(2048) | narrow(u16)' --dtype u32
  dquant plan explain 'window(2048) | shuffle(7) | narrow(u16) | compress(zstd)' web.bin --measure
  dquant plan explain 'window(2048) | blend(web=7, code=3) | bitpack(17)' corpora/ --placement offload
  dquant plan explain 'window(2048) | blend(web=7, code=3) | narrow(u16)' --dtype u32 --dtype u16 --json"
)]
struct Explain {
    /// The plan, as for `dquant cat --plan`
    plan: String,

    /// Token files in the order of the blend, or the folder of the blend's datasets
    files: Vec<PathBuf>,

    /// Type of flat files; without files, of the datasets: once for all, or once for each
    #[arg(long, value_name = "TYPE", value_parser = streamed_type)]
    dtype: Vec<Dtype>,

    /// Only this placement; may be repeated
    #[arg(long, value_name = "WHERE", value_enum)]
    placement: Vec<Where>,

    /// Measure the stages over blocks here, with the files' first blocks or made-up tokens
    #[arg(long)]
    measure: bool,

    /// Seed that the word `seed` in the plan stands for
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

fn streamed_type(name: &str) -> Result<Dtype, String> {
    let dtype = if name == BYTES { Some(Dtype::U8) } else { Dtype::from_name(name) };
    let unknown = || "types are u16, i16, u32, i32, u64, i64, f32, f16, bf16 and bytes".to_owned();
    dtype.filter(|dtype| dtype.is_streamed()).ok_or_else(unknown)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Where {
    Offload,
    NoOffload,
    Local,
}

impl Where {
    fn placement(self) -> Placement {
        match self {
            Where::Offload => Placement::Offload,
            Where::NoOffload => Placement::NoOffload,
            Where::Local => Placement::Local,
        }
    }
}

/// What is shown.
#[derive(Debug, Serialize)]
struct Explained {
    plan: String,
    datasets: Vec<Dataset>,
    /// An epoch of them, where they are known.
    epoch: Option<Epoch>,
    /// Whether the stages over blocks were measured here.
    measured: bool,
    placements: Vec<Placed>,
    /// What the figures leave out.
    notes: Vec<String>,
}

/// As many samples as all datasets have that are drawn from.
#[derive(Debug, Serialize)]
struct Epoch {
    samples: u64,
    /// For all ranks together.
    batches: u64,
    /// Samples that are drawn from each dataset in it.
    drawn: Vec<u64>,
}

impl Epoch {
    fn of(plan: &Plan, datasets: &[Dataset]) -> Option<Epoch> {
        let each = datasets.iter().enumerate().filter(|(dataset, _)| plan.draws(*dataset));
        let samples = each.map(|(_, dataset)| dataset.epoch_samples).sum::<Option<u64>>()?;
        let drawn = plan.drawn(samples)?;
        Some(Epoch { samples, batches: samples / u64::from(plan.batch()), drawn })
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Epoch { samples, batches, drawn } = self;
        write!(f, "  an epoch: {samples} samples, {batches} batches for all ranks together")?;
        if let [_, _, ..] = drawn.as_slice() {
            let drawn: Vec<String> = drawn.iter().map(u64::to_string).collect();
            write!(f, "; drawn of each: {}", drawn.join(", "))?;
        }
        Ok(())
    }
}

impl Report for Explained {
    const SCHEMA: &'static str = "dquant.plan/1";
}

impl PlanCommand {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let PlanAction::Explain(explain) = self.action;
        explain.run(console)
    }
}

impl Explain {
    fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let plan = Plan::parse(&self.plan, Some(self.seed)).map_err(|error| {
            let rendered = error.render(&self.plan);
            let text = rendered.split("\nhint: ").next().unwrap_or(&rendered).to_owned();
            let hint = error.hint().unwrap_or_else(|| "`dquant cat --help` shows plans".into());
            CliError::usage(format_args!("invalid plan\n{text}")).hint(hint)
        })?;
        let Asked { plan, sources, unknown } =
            if self.files.is_empty() { self.types(plan)? } else { self.found(plan, console)? };
        let costs = self.costs(&plan, &sources)?;
        let datasets: Vec<Dataset> = sources.into_iter().map(|source| source.dataset).collect();
        let asked: Vec<Placement> = self.placement.iter().map(|one| one.placement()).collect();
        let wanted = |one: &Placement| asked.is_empty() || asked.contains(one);
        let placements = Placement::ALL.into_iter().filter(wanted);
        let placements = placements
            .map(|placement| place(&plan, &datasets, placement, &costs))
            .collect::<Result<Vec<_>, PlanError>>()
            .map_err(unplaced)?;
        let measured = self.measure;
        let notes = notes(&plan, &datasets).into_iter().map(str::to_owned).chain(unknown).collect();
        let epoch = Epoch::of(&plan, &datasets);
        let plan = plan.to_string();
        console.report(&Explained { plan, datasets, epoch, measured, placements, notes })?;
        Ok(Exit::Good)
    }

    /// Datasets of which only the types are known.
    fn types(&self, plan: Plan) -> Result<Asked, CliError> {
        let names: Vec<String> = match plan.blend() {
            [] => vec!["any file".to_owned()],
            parts => parts.iter().map(|part| part.name.clone()).collect(),
        };
        let dtypes = match self.dtype.as_slice() {
            [] => {
                return Err(CliError::usage("neither files nor a token type are given")
                    .hint("name the files behind the plan, or give --dtype u32"));
            }
            [one] => vec![*one; names.len()],
            each if each.len() == names.len() => each.to_vec(),
            each => {
                let text = format!("{} token types for {} datasets", each.len(), names.len());
                let hint = "give --dtype once for all, or once for each in the order of the blend";
                return Err(CliError::usage(text).hint(hint));
            }
        };
        let source = |(name, dtype)| {
            let (origin, tokens, drawn, samples) = ("given".to_owned(), None, None, None);
            let epoch_samples = None;
            let dataset = Dataset { name, dtype, origin, tokens, epoch_samples, drawn, samples };
            Source { dataset, file: None }
        };
        let sources = names.into_iter().zip(dtypes).map(source).collect();
        Ok(Asked { plan, sources, unknown: None })
    }

    /// Datasets in files.
    fn found(&self, plan: Plan, console: &mut Console) -> Result<Asked, CliError> {
        let files: Vec<PathBuf> = match (plan.blend(), self.files.as_slice()) {
            (parts @ [_, ..], [folder]) if folder.is_dir() => {
                parts.iter().map(|part| folder.join(&part.name)).collect()
            }
            ([], files) => files.to_vec(),
            (parts, files) if parts.len() == files.len() => files.to_vec(),
            (parts, files) => {
                let text = format!("{} files for a blend of {}", files.len(), parts.len());
                return Err(CliError::usage(text)
                    .hint("name one file for each dataset of the blend, or their folder"));
            }
        };
        let [.., _] = files.as_slice() else {
            return Err(CliError::usage("no file is given"));
        };
        if self.dtype.len() > 1 {
            return Err(CliError::usage("several token types for files")
                .hint("give --dtype once, for flat files without a manifest"));
        }
        let given = match self.dtype.first() {
            Some(Dtype::U8) => BYTES.to_owned(),
            dtype => dtype.map_or(String::new(), Dtype::to_string),
        };
        let refused = |error: &service::Error| {
            let (message, hint) = error.parts();
            CliError::usage(message).hint(hint.unwrap_or_default())
        };
        let asked = match DividedFiles::open(&plan, &files, &given, 0) {
            Ok(divided) => {
                divided.check_ids().map_err(|error| refused(&error))?;
                Asked::of(divided)
            }
            // The index, the hashes or the list may be where the plan is to run.
            Err(error) if plan.needs_documents() => {
                let request = DatasetRef { dtype: given, ..DatasetRef::default() };
                let found = files.iter().map(|path| find_file(path, &request));
                let found = found.collect::<Result<Vec<Found>, _>>();
                Asked::without_documents(plan, found.map_err(|error| refused(&error))?, &error)
            }
            Err(error) => return Err(refused(&error)),
        };
        for Source { dataset, .. } in &asked.sources {
            note_guess(console, &dataset.name, dataset.dtype.name(), &dataset.origin);
        }
        Ok(asked)
    }

    fn costs(&self, plan: &Plan, sources: &[Source]) -> Result<Costs, CliError> {
        if !self.measure {
            return Ok(Costs::Documented);
        }
        let block = |source: &Source| source.block(plan);
        let blocks = sources.iter().map(block).collect::<Result<Vec<_>, CliError>>()?;
        let dtypes = sources.iter().map(|source| source.dataset.dtype);
        let module = plan.wasm().map(|module| engine::action::read_local(module, dtypes));
        let action = module.transpose().map_err(|error| {
            let (message, hint) = error.parts();
            CliError::usage(message).hint(hint.unwrap_or_default())
        })?;
        // What a token becomes does not change the time it takes.
        let table = (0..if plan.remap().is_some() { 1 << 20 } else { 0 }).collect();
        Ok(Costs::Measured { blocks, table, action })
    }
}

fn unplaced(error: PlanError) -> CliError {
    match error {
        PlanError::Invalid(error) => error.into(),
        PlanError::Token { .. } => CliError::check_failed(error).hint(
            "a stream with this plan would end at this token; without --measure nothing is run",
        ),
    }
}

/// What a plan is explained with.
struct Asked {
    /// The plan, with a blend if several files came without one.
    plan: Plan,
    sources: Vec<Source>,
    /// Why documents are not known, where they matter.
    unknown: Option<String>,
}

impl Asked {
    fn of(DividedFiles { plan, found, infos, divided }: DividedFiles) -> Asked {
        let samples = divided.layouts.into_iter().zip(divided.cuts);
        let sources = found.into_iter().zip(infos).zip(samples).map(|((found, info), samples)| {
            let epoch_samples = plan.megatron().is_none().then_some(samples.0.samples);
            let drawn = plan.needs_documents().then(|| drawn(&info, &samples));
            let samples = drawn.map(|_| samples);
            Source::new(found, epoch_samples, drawn, samples)
        });
        Asked { sources: sources.collect(), plan, unknown: None }
    }

    fn without_documents(plan: Plan, found: Vec<Found>, error: &service::Error) -> Asked {
        let plan = match (plan.blend(), found.as_slice()) {
            ([], [_, _, ..]) => plan.blended(found.iter().map(|one| (one.info.name.clone(), 1))),
            _ => plan,
        };
        let sources = found.into_iter().map(|found| Source::new(found, None, None, None)).collect();
        let unknown = Some(format!("documents are not known: {}", error.parts().0));
        Asked { plan, sources, unknown }
    }
}

/// What a plan draws from a dataset.
fn drawn(info: &DatasetInfo, (layout, cut): &(SampleLayout, Cut)) -> Drawn {
    let dropped = info.filtered_tokens.saturating_add(info.duplicate_tokens);
    let tokens = match cut {
        // Those of the part, where the documents are split.
        Cut::Packed(packing) => packing.documents().tokens(),
        _ => info.tokens.saturating_sub(dropped),
    };
    Drawn {
        documents: info.document_count,
        tokens,
        filtered_documents: info.filtered_documents,
        filtered_tokens: info.filtered_tokens,
        duplicate_documents: info.duplicate_documents,
        duplicate_tokens: info.duplicate_tokens,
        packed: PackedSamples::of(layout, cut),
    }
}

/// A dataset and where its tokens are.
struct Source {
    dataset: Dataset,
    /// The open file, and the offset of the first token.
    file: Option<(Box<dyn Stored>, u64)>,
}

/// Most bytes of a block to measure with.
const BLOCK_BYTES: u64 = 1 << 20;

impl Source {
    fn new(
        found: Found,
        epoch_samples: Option<u64>,
        drawn: Option<Drawn>,
        samples: Option<(SampleLayout, Cut)>,
    ) -> Source {
        let dataset = Dataset {
            name: found.info.name,
            dtype: found.layout.dtype,
            origin: found.info.dtype_origin,
            tokens: Some(found.layout.tokens),
            epoch_samples,
            drawn,
            samples,
        };
        Source { dataset, file: Some((found.file, found.layout.data_offset)) }
    }

    /// A block of its tokens, or one that is made up.
    fn block(&self, plan: &Plan) -> Result<Vec<u8>, CliError> {
        let (dtype, width) = (self.dataset.dtype, u64::from(self.dataset.dtype.bytes()));
        let most = BLOCK_BYTES / width;
        // Samples are quantized whole.
        let sample = plan.quantize().map_or(1, |_| u64::from(plan.window().max(1)));
        let whole = |tokens: u64| tokens - tokens % sample;
        let Some((file, offset)) = &self.file else {
            return Ok(made_up(dtype, plan, whole(most.max(sample))));
        };
        let tokens = whole(self.dataset.tokens.unwrap_or(0).min(most.max(sample)));
        let mut block = vec![0; (tokens * width) as usize];
        let read = file.read_exact_at(&mut block, *offset);
        read.map_err(|error| CliError::because(&self.dataset.name, &error))?;
        Ok(block)
    }
}

/// Tokens of which small ids are frequent, as in text, and that the plan can deliver.
fn made_up(dtype: Dtype, plan: &Plan, tokens: u64) -> Vec<u8> {
    let bits = plan.bitpack().map_or(64, u32::from);
    let most = 50_257_u64.min(1 << bits.min(32)).min(dtype.range().1 as u64 + 1);
    let mut state = 1_u64;
    let mut id = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        let share = (state >> 11) as f64 / (1_u64 << 53) as f64;
        ((most as f64).powf(share) as u64 - 1).min(most - 1)
    };
    let mut stored = || match dtype {
        // Around zero.
        Dtype::F32 | Dtype::F16 | Dtype::Bf16 => {
            write((id() as f64 - 25_000.0) / 10_000.0, dtype).unwrap_or(0)
        }
        _ => id(),
    };
    let width = dtype.bytes() as usize;
    (0..tokens).flat_map(|_| stored().to_le_bytes().into_iter().take(width)).collect()
}

/// A machine as people read it.
fn machine(place: &str) -> &str {
    if place == "dpu" { "DPU" } else { place }
}

/// Longest stage text; a longer one is cut.
const STAGE_WIDTH: usize = 38;

fn cut(text: &str) -> String {
    match text.chars().count() > STAGE_WIDTH {
        true => text.chars().take(STAGE_WIDTH - 1).chain(['…']).collect(),
        false => text.to_owned(),
    }
}

fn seconds(cpu_s: Option<f64>) -> String {
    match cpu_s {
        None => "?".to_owned(),
        Some(0.0) => "-".to_owned(),
        Some(seconds) => format!("{seconds:.2}"),
    }
}

impl fmt::Display for Explained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.plan)?;
        for Dataset { name, dtype, origin, tokens, epoch_samples, drawn, .. } in &self.datasets {
            let tokens = tokens.map_or(String::new(), |tokens| format!("{tokens} tokens of "));
            let says = match origin.as_str() {
                "given" => "as given",
                origin if origin.starts_with("file") => "as its header says",
                "manifest" => "as its manifest says",
                _ => "a guess",
            };
            write!(f, "  {name}: {tokens}{dtype}, {says}")?;
            match epoch_samples {
                Some(0) => writeln!(f, "; it has no sample and is never drawn")?,
                Some(samples) => writeln!(f, "; {samples} samples")?,
                None => writeln!(f)?,
            }
            if let Some(drawn) = drawn {
                drawn_lines(f, drawn)?;
            }
        }
        if let Some(epoch) = &self.epoch {
            writeln!(f, "{epoch}")?;
        }
        for placed in &self.placements {
            writeln!(f)?;
            placed_lines(f, placed)?;
        }
        if self.placements.len() > 1 {
            writeln!(f)?;
            compared(f, &self.placements)?;
        }
        let origin = match self.measured {
            true => "measured here: stages over blocks, and widen; the rest as documented",
            false => "as documented; --measure runs them here",
        };
        write!(f, "\nCPU seconds of one core for 10^9 tokens, {origin} (docs/plan.md)")?;
        let unknown = |placed: &Placed| placed.rows.iter().any(|row| row.cpu_s.is_none());
        if self.placements.iter().any(unknown) {
            write!(f, "\n?: depends on the module and is in no sum; --measure tells")?;
        }
        if self.measured && cfg!(debug_assertions) {
            write!(f, "\nthis is a debug build: what was measured is several times too high")?;
        }
        let guessed = self.plan.contains("compress(") && !self.measured;
        if guessed {
            write!(f, "\nwhat compression saves depends on the data: shown is English text")?;
        }
        for note in &self.notes {
            write!(f, "\n{note}")?;
        }
        Ok(())
    }
}

fn drawn_lines(f: &mut fmt::Formatter<'_>, drawn: &Drawn) -> fmt::Result {
    for (action, documents, tokens) in [
        ("filter", drawn.filtered_documents, drawn.filtered_tokens),
        ("dedup", drawn.duplicate_documents, drawn.duplicate_tokens),
    ] {
        if documents > 0 {
            writeln!(f, "    {action} drops {documents} documents, {tokens} tokens")?;
        }
    }
    write!(f, "    {} documents, {} tokens", drawn.documents, drawn.tokens)?;
    match &drawn.packed {
        None => writeln!(f),
        Some(PackedSamples { samples, padding, .. }) => {
            writeln!(f, " in {samples} samples, {:.1} % padding", 100.0 * padding)
        }
    }
}

fn placed_lines(f: &mut fmt::Formatter<'_>, placed: &Placed) -> fmt::Result {
    let (name, who) = placed.placement.describe();
    writeln!(f, "{}: {who}", name.to_uppercase())?;
    writeln!(f, "  {:<7} {:STAGE_WIDTH$} {:>14}  {:>6}", "", "stage", "bytes/token", "CPU s")?;
    let mut last = "";
    for row in &placed.rows {
        let Row { place, stage, bytes_in, bytes_out, cpu_s, why } = row;
        if last == "target" && *place != last {
            let wire = format!("wire: {:.2} bytes/token", placed.wire_bytes);
            writeln!(f, "  ======= {wire:=<STAGE_WIDTH$}=======================")?;
        }
        let shown = if *place == last { "" } else { machine(place) };
        let bytes = match (bytes_in - bytes_out).abs() < 0.005 {
            true => format!("{bytes_out:.2}"),
            false => format!("{bytes_in:.2} -> {bytes_out:.2}"),
        };
        let (stage, cpu_s) = (cut(stage), seconds(*cpu_s));
        let line = format!("  {shown:<7} {stage:STAGE_WIDTH$} {bytes:>14}  {cpu_s:>6}  {why}");
        writeln!(f, "{}", line.trim_end())?;
        last = place;
    }
    let (cpu, memory) = (&placed.cpu_s, &placed.memory_bytes);
    let parts = [
        ("target", cpu.target, memory.target),
        ("DPU", cpu.dpu, memory.dpu),
        ("host", cpu.host, memory.host),
    ];
    let there = parts.into_iter().filter(|(_, cpu, memory)| *cpu > 0.0 || *memory > 0);
    let there: Vec<_> = there.collect();
    let list = |one: &dyn Fn(f64, u64) -> String| {
        let each = there.iter().map(|(name, cpu, memory)| format!("{name} {}", one(*cpu, *memory)));
        each.collect::<Vec<_>>().join(", ")
    };
    writeln!(f, "  CPU:    {}", list(&|cpu, _| format!("{cpu:.2} s")))?;
    writeln!(f, "  memory: {}", list(&|_, memory| Bytes(memory).to_string()))
}

fn compared(f: &mut fmt::Formatter<'_>, placements: &[Placed]) -> fmt::Result {
    writeln!(
        f,
        "{:<12} {:>16} {:>12} {:>9} {:>10} {:>9}",
        "", "wire bytes/token", "target CPU s", "DPU CPU s", "host CPU s", "all CPU s"
    )?;
    for Placed { placement, wire_bytes, cpu_s, .. } in placements {
        let wire = match placement {
            Placement::Local => "-".to_owned(),
            _ => format!("{wire_bytes:.2}"),
        };
        let all = seconds(Some(cpu_s.target + cpu_s.dpu + cpu_s.host));
        let [target, dpu, host] = [cpu_s.target, cpu_s.dpu, cpu_s.host].map(|s| seconds(Some(s)));
        writeln!(
            f,
            "{:<12} {wire:>16} {target:>12} {dpu:>9} {host:>10} {all:>9}",
            placement.describe().0
        )?;
    }
    Ok(())
}
