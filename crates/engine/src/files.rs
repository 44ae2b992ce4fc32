//! Streams over files of this machine, without target, DPU or socket.
//!
//! The batches are those of the same plan over the same files behind a target (C4). Where a name
//! stands for several files, they are blended in proportion to the samples that the plan makes of
//! them.

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use host::ring::{Producer, RingConfig, RingFds};
use service::error::Error;
use xio::dataset::Dtype;
use xio::documents::Documents;
use xio::order::{MAX_DATASETS, MAX_TOTAL_WEIGHT};
use xio::plan::Plan;

use crate::action;
use crate::catalog::{Found, Table, find_files, read_list};
use crate::control::documents::Received;
use crate::data::EngineError;
use crate::data::dpu::StreamReport;
use crate::data::files::{FileEngine, FileStreamSpec};
use crate::layout::{self, Divided, MAX_ORDER_TABLES};
use crate::proto::{BatchRange, DatasetInfo, DatasetRef, OpenRequest, Opened, Ranks, StreamStatus};
use crate::selection;
use crate::stream::stream_status;

/// Which stream to open.
#[derive(Clone, Debug)]
pub struct FilesConfig {
    /// The files, in the order of the plan's blend; several files without a blend are blended in
    /// proportion to their samples.
    pub files: Vec<PathBuf>,
    /// Token type of flat files; when empty, their manifests or their bytes tell it.
    pub dtype: String,
    /// Ids are below this number, where it is known.
    pub vocabulary: Option<u64>,
    /// The plan.
    pub plan: String,
    /// First batch to deliver.
    pub first_batch: u64,
    /// Batches to deliver, those left out included; without it the stream has no end.
    pub batches: Option<u64>,
    /// Samples by which all batches begin later than at a multiple of their size.
    pub shift: u32,
    /// The data-parallel rank that the batches are for, and how many there are.
    pub rank: (u32, u32),
    /// Batches that are not delivered, by the plan's numbers.
    pub leave_out: Vec<Range<u64>>,
    /// Slots of the ring.
    pub slots: u32,
    /// Bytes of a slot; 0 for a size that the batches need.
    pub slot_bytes: u32,
    /// Most bytes of staging buffers.
    pub memory: u64,
}

/// Files of this machine, as a plan divides them into samples.
#[derive(Debug)]
pub struct DividedFiles {
    /// The plan, with a blend if several files came without one.
    pub plan: Plan,
    /// The open files, in the order of the blend. Their documents are in `divided`.
    pub found: Vec<Found>,
    /// Their descriptions, which tell what the plan drops.
    pub infos: Vec<DatasetInfo>,
    /// Their samples.
    pub divided: Divided,
}

impl DividedFiles {
    /// Opens files and divides them. `dtype` is the type of flat files, empty if they tell it; ids
    /// are below `vocabulary`, if that is not 0.
    ///
    /// # Errors
    /// When a file is refused, or the plan makes no sample of it.
    pub fn open(
        plan: &Plan,
        files: &[PathBuf],
        dtype: &str,
        vocabulary: u64,
    ) -> Result<DividedFiles, Error> {
        let asked = DatasetRef {
            name: String::new(),
            dtype: dtype.to_owned(),
            vocabulary,
            documents: plan.needs_documents(),
            document_hashes: !plan.selection().is_empty(),
            sequences: plan.hides_others(),
            loss_weights: plan.loss_weights().is_some(),
        };
        if files.len() > MAX_DATASETS {
            let text =
                format!("{} files are given, a stream blends at most {MAX_DATASETS}", files.len());
            return Err(Error::invalid(text).hint("join small files into one dataset"));
        }
        let mut found = find_files(files, &asked)?;
        if plan.blend().is_empty() {
            check_distinct(&found)?;
        }
        let mut infos: Vec<DatasetInfo> = found.iter().map(|found| found.info.clone()).collect();
        let documents = documents_of(plan, &mut found, &mut infos)?;
        let mut divided = layout::divide(plan, &infos, &vec![asked; infos.len()], documents)?;
        let plan = match plan.blend() {
            [] if infos.len() > 1 => plan.blended(proportions(plan, &infos, &divided)?),
            _ => plan.clone(),
        };
        divided.in_blocks_of(&plan).map_err(Error::invalid)?;
        Ok(DividedFiles { plan, found, infos, divided })
    }

    /// Checks that the plan delivers every id that the manifests say there is.
    ///
    /// # Errors
    /// Names the dataset and its largest id.
    pub fn check_ids(&self) -> Result<(), Error> {
        layout::check_ids(&self.plan, &self.infos)
    }
}

/// Without weights each file is drawn in proportion to its samples, so under two names it would be
/// drawn twice as often.
fn check_distinct(found: &[Found]) -> Result<(), Error> {
    let mut seen = HashMap::with_capacity(found.len());
    for Found { info, file, .. } in found {
        let name = &info.name;
        if let Some(other) = seen.insert(file.identity(), name) {
            let text = format!("{other} and {name} are the same file, which would be drawn twice");
            return Err(Error::invalid(text)
                .hint("name it once; a blend gives weights: blend(web.bin=2, code.bin=1)"));
        }
    }
    Ok(())
}

/// A stream whose engine is a thread of this process. Dropping it ends it.
#[derive(Debug)]
pub struct FileStream(FileEngine);

/// A stream that was opened.
#[derive(Debug)]
pub struct OpenedFiles {
    /// The stream.
    pub stream: FileStream,
    /// What was opened.
    pub opened: Opened,
    /// The ring.
    pub ring: RingFds,
    /// Hangs up when the stream's engine ends.
    pub liveness: OwnedFd,
}

impl FileStream {
    /// Opens a stream.
    ///
    /// # Errors
    /// When the plan or a file is refused, and when the machine lacks a resource.
    pub fn open(config: FilesConfig) -> Result<OpenedFiles, Error> {
        let plan = layout::parse(&config.plan)?;
        let vocabulary = config.vocabulary.unwrap_or(0);
        let divided = DividedFiles::open(&plan, &config.files, &config.dtype, vocabulary)?;
        let DividedFiles { plan, found, infos, divided } = divided;
        let request = request(&config, &plan, &infos);
        let table = plan.remap().map(Table::read_local).transpose()?;
        let module = plan.wasm().cloned();
        let action = module.map(|module| {
            let dtypes = found.iter().map(|found| found.layout.dtype);
            action::read_local(&module, dtypes).map(|action| (action, module.name))
        });
        let action = action.transpose()?;
        let table_ids = table.as_ref().map(|table| Table::ids_of(&table.info)).transpose()?;
        let compile = |plan: &Plan, dtypes: &[Dtype]| plan.compile_local(dtypes, table_ids);
        let mut layout = layout::plan(&request, &infos, divided, MAX_ORDER_TABLES, compile)?;
        let table_info = table.as_ref().map(|table| table.info.clone());
        let table = table.map_or_else(Arc::default, |table| table.ids);
        check_table(&table, &found)?;
        let (mut found, mut weights) = (found, Vec::new());
        weights.extend(found.iter_mut().filter_map(|found| found.loss_weights.take()));
        found.extend(weights.into_iter().map(|weights| *weights));
        for (source, found) in layout.sources.iter_mut().zip(&found) {
            source.whole_pages = found.sums.is_some();
        }
        EngineError::check_staging(layout.memory_needed(), config.memory)?;
        let slot_bytes = layout.delivery.slot_bytes.into();
        let ring = RingConfig { slots: config.slots, slot_bytes };
        let (producer, ring) = Producer::create(ring).map_err(|error| {
            Error::from_cause(error).hint("choose other --slots or --slot-size")
        })?;
        let opened = layout.opened(infos, table_info);
        let spec = FileStreamSpec {
            names: layout.names.clone(),
            setup: layout.setup(),
            files: found.into_iter().map(|found| (found.file, found.sums)).collect(),
            table,
            action,
            producer,
        };
        let (engine, liveness) = FileEngine::start(spec)?;
        Ok(OpenedFiles { stream: FileStream(engine), opened, ring, liveness })
    }

    /// What the stream did so far.
    ///
    /// # Errors
    /// When its engine has ended.
    pub fn status(&self) -> Result<StreamStatus, Error> {
        Ok(stream_status(&self.0.report()?))
    }

    /// Its counters and its failure, if it failed.
    ///
    /// # Errors
    /// When its engine has ended.
    pub fn report(&self) -> Result<StreamReport, Error> {
        Ok(self.0.report()?)
    }
}

/// The documents that a plan draws from. `infos` get to tell what it drops.
fn documents_of(
    plan: &Plan,
    found: &mut [Found],
    infos: &mut [DatasetInfo],
) -> Result<Vec<Documents>, Error> {
    let selection = plan.selection();
    let list = selection.filter.as_ref().map(|filter| read_list(&filter.list)).transpose()?;
    let received = Received {
        tables: found.iter_mut().filter_map(|found| found.documents.take()).collect(),
        hashes: found.iter_mut().filter_map(|found| found.hashes.take()).collect(),
        list: list.unwrap_or_default(),
        ..Received::default()
    };
    let draws = |dataset| plan.draws(dataset);
    let is_one_of_many = plan.blend().is_empty() && infos.len() > 1;
    selection::apply(selection, plan.document_split(), draws, is_one_of_many, infos, received)
}

/// Whether the files can hold the ids of a table.
fn check_table(table: &[u32], found: &[Found]) -> Result<(), Error> {
    match found.iter().find(|found| !Table::fits(table, found.layout.dtype)) {
        None => Ok(()),
        Some(Found { info, layout, .. }) => {
            let (name, dtype) = (&info.name, layout.dtype);
            let text = format!("{name}: the table of remap has ids that do not fit {dtype}");
            Err(Error::invalid(text)
                .hint("remap keeps the type of the files: convert them to u32 first"))
        }
    }
}

/// The request as a DPU would get it.
fn request(config: &FilesConfig, plan: &Plan, infos: &[DatasetInfo]) -> OpenRequest {
    let range = |batches: &Range<u64>| BatchRange { first: batches.start, end: batches.end };
    let dataset = |info: &DatasetInfo| {
        let (name, dtype) = (info.name.clone(), config.dtype.clone());
        DatasetRef { name, dtype, ..DatasetRef::default() }
    };
    OpenRequest {
        datasets: infos.iter().map(dataset).collect(),
        plan: plan.to_string(),
        first_batch: config.first_batch,
        batches: config.batches.unwrap_or(0),
        slots: config.slots,
        slot_bytes: config.slot_bytes,
        leave_out: config.leave_out.iter().map(range).collect(),
        shift: config.shift,
        ranks: Some(Ranks {
            ranks: config.rank.1,
            first: config.rank.0,
            rank: config.rank.0,
            count: 1,
            readers: 1,
            ..Ranks::default()
        }),
        ..OpenRequest::default()
    }
}

/// Names and weights in proportion to the samples of the files: exact where a blend has weights
/// that large, else to a part in [`MAX_TOTAL_WEIGHT`]. A file without a sample has weight 0.
///
/// # Errors
/// When no file has a sample.
fn proportions(
    plan: &Plan,
    infos: &[DatasetInfo],
    divided: &Divided,
) -> Result<Vec<(String, u32)>, Error> {
    // An order that lists samples needs no weights.
    let least = u64::from(plan.megatron().is_some());
    let counts: Vec<u64> = divided.layouts.iter().map(|layout| layout.samples.max(least)).collect();
    if counts.iter().all(|count| *count == 0) {
        let text =
            format!("none of {} files has a sample of {} tokens", infos.len(), plan.window());
        return Err(Error::invalid(text).hint("choose a smaller window(N), or other files"));
    }
    let divisor = counts.iter().copied().fold(0, gcd).max(1);
    let total: u128 = counts.iter().map(|count| u128::from(count / divisor)).sum();
    // Rounding adds at most one part for each file.
    let most = u128::from(MAX_TOTAL_WEIGHT).saturating_sub(infos.len() as u128).max(1);
    let weight = |count: u64| match total <= most {
        true => u128::from(count / divisor),
        false if count == 0 => 0,
        false => (u128::from(count / divisor) * most / total).max(1),
    };
    let named = infos.iter().zip(counts).map(|(info, count)| {
        let weight = u32::try_from(weight(count)).unwrap_or(u32::MAX);
        (info.name.clone(), weight)
    });
    Ok(named.collect())
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
