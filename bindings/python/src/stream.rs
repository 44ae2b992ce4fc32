//! The class `Stream`: batches in order, a position that can be saved.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use client::{DatasetInfo, Identity, LeaveOut, Opened};
use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::batch::{Batch, Form};
use crate::errors::Class;
use crate::options::{Request, left_out};
use crate::records;
use crate::source::Source;

/// Version of the dictionary that `state_dict` returns.
const STATE_VERSION: u32 = 2;

/// Raises `BufferError` where `close` is called while buffers of batches live.
pub(crate) fn refuse_views(buffers: usize) -> PyResult<()> {
    match buffers {
        0 => Ok(()),
        buffers => Err(PyBufferError::new_err(format!(
            "the stream was closed while {buffers} views of its batches are in use: they stay readable, and the \
             ring's memory is freed when the last is gone. Drop arrays before the end of the `with` block, or copy them"
        ))),
    }
}

/// A stream of batches: iterate over it.
///
/// `dquant.Stream(source, plan=None, offload=True, **options)`
///
/// `source` is `dq://HOST[:PORT]/NAME`, or a path of this machine, or a pattern such as
/// `corpora/*.bin`, or a dictionary of such names (of one target, or all local) and their weights.
/// Local files are read by threads of this process: no daemon is needed, and `offload` does not
/// matter.
///
/// In place of a plan: `seq_len` (tokens of a sample), `batch_size` (32), `shuffle` (True, with
/// `seed`), `pack` (`"best"`: whole documents in place of windows), `filter` and `keep` (lists of
/// hashes of documents to drop, or to keep alone), `dedup` (True, or `"across"` datasets), `narrow`
/// (`"u16"`) with `overflow` (`"error"`, `"escape"`, or the id that tokens become which do not
/// fit), `remap` (a table), `wasm` (a module that maps tokens and the SHA-256 of its file, as a
/// tuple), `bitpack` (bits), `compress` (`"lz4"`, `"zstd"`) with `compress_level` and
/// `compress_when` (`"faster"`, `"always"`), `quantize` (`"int8"`, `"e4m3"`, `"e5m2"`) with
/// `deliver` (`"f32"`, `"f16"`, `"bf16"`, `"quantized"`), `widen` (`"i64"`), `pairs` (inputs and
/// labels of `seq_len` tokens each), `loss_weights` (True, with `missing_weight` of datasets that
/// have none).
///
/// Ranks: of `world_size` trainers this is number `rank`, both by default from `torch.distributed`
/// where it is initialised, else from the variables `RANK` and `WORLD_SIZE` of `torchrun`. `tp`,
/// `cp` and `pp` are the sizes of tensor-, context- and pipeline-parallel groups (1 each), in
/// Megatron's order of ranks; what is left is data-parallel. A step of the job consumes one batch
/// for each data-parallel rank. With `cp`, each trainer sees a slice of every sample: two pieces
/// (`cp_split="zigzag"`) or one (`"contiguous"`). Trainers of this machine with the same `group`
/// share a stream of the DPU (default: from `torchrun`'s variables); `local_rank` and
/// `local_world_size` say which they are.
///
/// Options: `seed` (for the word `seed` in the plan), `first_batch`, `batches` for each rank
/// (without it the stream has no end), `token` (default `DQUANT_TOKEN`), `dpu` (socket of the DPU
/// daemon, default `DQUANT_DPU`), `dpu_user` (its user, if that is neither this one nor root,
/// default `DQUANT_DPU_USER`), `dtype` of flat files (default: from their manifests, else a guess
/// with a warning; `"bytes"`: records that are no tokens, of `seq_len` bytes), `vocab` (files with
/// larger ids are refused), `leave_out` (batches not to deliver, as `[(1000, 1200)]` for 1000 to
/// 1199: the others keep their numbers, `batches` counts them all), `slots` of the ring (16),
/// `slot_size` in bytes (1 MiB, or a batch where that is larger); without offload also `roce`
/// (`"IP[:PORT]"`), `memory` in bytes (128 MiB), `reconnect` in seconds (30).
///
/// Raises `InvalidError` when plan, URL, dataset or token is refused, `UnreachableError` when the
/// DPU or the target does not reply.
#[pyclass(frozen, module = "dquant")]
pub(crate) struct Stream {
    source: Source,
    request: Request,
    opened: Opened,
    form: Form,
    /// Samples by which batches begin later than at a multiple of their size.
    shift: AtomicU32,
    /// The last batch was delivered before the position was loaded.
    finished: AtomicBool,
    /// A position was loaded, and nothing was iterated over since.
    loaded: AtomicBool,
    /// Batches that are not delivered: those that were given, and those of a loaded position.
    left_out: Mutex<LeaveOut>,
}

#[pymethods]
impl Stream {
    #[new]
    #[pyo3(signature = (source, plan=None, offload=true, **options))]
    fn new(
        py: Python<'_>,
        source: &Bound<'_, PyAny>,
        plan: Option<String>,
        offload: bool,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Stream> {
        let mut request = Request::new(source, plan, offload, options)?;
        let (source, mut opened) = Source::open(py, &request.to_look())?;
        if let Some(resolved) = request.resolved(&opened)? {
            opened = source.reopen(py, &resolved)?;
            request = resolved;
        }
        let form = Form::new(&opened, request.slice)?;
        let (shift, finished) = (AtomicU32::new(0), AtomicBool::new(false));
        let loaded = AtomicBool::new(false);
        let samples = u64::from(opened.batch_samples);
        let given = request.options.leave_out.iter();
        let given = given
            .map(|range| range.start.saturating_mul(samples)..range.end.saturating_mul(samples));
        let left_out = Mutex::new(left_out(given)?);
        Ok(Stream { source, request, opened, form, shift, finished, loaded, left_out })
    }

    /// The stream itself, which goes on where it is; one that evaluates begins again.
    fn __iter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        let stream = slf.get();
        let first = stream.request.options.first_batch;
        let goes_on = stream.loaded.swap(false, Ordering::Relaxed);
        let is_begun =
            stream.source.next_batch() != first || stream.shift.load(Ordering::Relaxed) != 0;
        if stream.request.passes.evaluate && is_begun && !goes_on {
            let mut request = stream.request.clone();
            let begin = first.saturating_mul(u64::from(stream.opened.batch_samples));
            request.options.leave_out = stream.in_batches(&stream.left_out(), begin, 0)?;
            stream.source.reopen(slf.py(), &request)?;
            stream.shift.store(0, Ordering::Relaxed);
            stream.finished.store(false, Ordering::Relaxed);
        }
        Ok(slf)
    }

    /// Batches of the stream for this trainer, from its beginning to its end, those left out
    /// included.
    ///
    /// Raises `TypeError` for a stream without end.
    fn __len__(&self) -> PyResult<usize> {
        let batches = self.request.batches().ok_or_else(|| {
            PyTypeError::new_err("a stream without end has no length: give batches or epochs")
        })?;
        Ok(usize::try_from(batches).unwrap_or(usize::MAX))
    }

    /// A stream is something, however long it is.
    #[expect(clippy::unused_self, reason = "a method of the protocol")]
    fn __bool__(&self) -> bool {
        true
    }

    /// The next batch. Waits without the GIL.
    ///
    /// Raises `StreamError` when the stream failed or its DPU died, `SlotsHeldError` when the
    /// batches in use leave no slot, `KeyboardInterrupt` on Ctrl-C; the next call goes on with the
    /// same batch.
    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Batch>> {
        if self.finished.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let batch = self.source.next(py)?;
        Ok(batch.map(|view| Batch::new(view, self.form, &self.source.held)))
    }

    /// What was opened: a `dquant.Opened`.
    #[getter]
    fn opened<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        records::opened(py, &self.opened, self.form)
    }

    /// Samples of a batch.
    #[getter]
    fn batch_samples(&self) -> u32 {
        self.opened.batch_samples
    }

    /// This trainer's data-parallel rank, and how many there are: `(0, 1)` for a single trainer.
    #[getter]
    fn data_parallel(&self) -> (u32, u32) {
        (self.request.options.rank.rank, self.request.options.rank.ranks)
    }

    /// Number of the next batch of the job, whatever rank it is for.
    #[getter]
    fn next_batch(&self) -> u64 {
        self.source.next_batch()
    }

    /// Epochs that lie behind the next batch: how often as many samples were drawn, by all ranks,
    /// as all datasets have that are drawn from. None with an order of Megatron-core.
    #[getter]
    fn epoch(&self) -> Option<u64> {
        Some(self.next_sample() / self.opened.epoch_samples()?.max(1))
    }

    /// Batches of an epoch for this trainer; None with an order of Megatron-core.
    #[getter]
    fn batches_per_epoch(&self) -> Option<u64> {
        let step = u64::from(self.opened.batch_samples.max(1));
        Some(self.opened.epoch_samples()? / step / u64::from(self.request.options.rank.ranks))
    }

    /// What all ranks have drawn before the next batch, from the first of the plan on: a tuple of
    /// `dquant.Drawn`, one for each dataset. Batches that were left out count. None with an order
    /// of Megatron-core.
    #[getter]
    fn drawn<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let drawn = self.opened.drawn(self.next_sample());
        drawn.map(|drawn| records::drawn(py, &self.opened, &drawn)).transpose()
    }

    /// Whether the stream is closed.
    #[getter]
    fn closed(&self, py: Python<'_>) -> PyResult<bool> {
        self.source.is_closed(py)
    }

    /// Counters of the stream since it was opened: a dictionary.
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        records::status(py, &self.source.status(py)?)
    }

    /// Closes the stream. Raises `BufferError` if views of its batches are in use; it is closed all
    /// the same, and they stay readable.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let was_open = self.source.close(py);
        let buffers = self.source.held.buffers.load(Ordering::Relaxed);
        if was_open { refuse_views(buffers) } else { Ok(()) }
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    /// Closes the stream; an exception of the block takes precedence over `BufferError`.
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        if kind.is_none() {
            return self.close(py);
        }
        self.source.close(py);
        Ok(())
    }

    /// The position, to be saved with a checkpoint: a dictionary of numbers, strings and lists.
    fn state_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let state = PyDict::new(py);
        state.set_item("version", STATE_VERSION)?;
        state.set_item("plan", &self.opened.plan)?;
        state.set_item("seed", self.request.options.seed)?;
        let datasets = self.opened.datasets.iter().map(|info| records::dataset_fields(py, info));
        state.set_item("datasets", PyList::new(py, datasets.collect::<PyResult<Vec<_>>>()?)?)?;
        let table = self.opened.table.as_ref();
        let table = table.map(|info| records::dataset_fields(py, info)).transpose()?;
        state.set_item("table", table)?;
        state.set_item("next_batch", self.source.next_batch())?;
        state.set_item("next_sample", self.next_sample())?;
        let left_out = self.left_out().ranges().to_vec();
        let left_out = left_out.iter().map(|range| PyList::new(py, [range.start, range.end]));
        state.set_item("leave_out", PyList::new(py, left_out.collect::<PyResult<Vec<_>>>()?)?)?;
        Ok(state)
    }

    /// Goes on at a saved position, also with batches of another size or on another number of
    /// ranks. What the stream of that position left out stays left out, beside this one's
    /// `leave_out`. Datasets with equal manifests are the same wherever they are, and so is one
    /// file under several names; `rename={old: new}` says it of copies without a manifest.
    ///
    /// Raises `StateError` when the position belongs to another plan, seed or dataset, and says
    /// what differs; the stream is then as before. Otherwise raises what opening a stream raises;
    /// it is then closed.
    #[pyo3(signature = (state, *, rename=None))]
    fn load_state_dict(
        &self,
        py: Python<'_>,
        state: &Bound<'_, PyDict>,
        rename: Option<HashMap<PathBuf, PathBuf>>,
    ) -> PyResult<()> {
        self.source.check_owner()?;
        let next_sample = self.check_state(py, state, &rename.unwrap_or_default())?;
        let before = self.left_out();
        let theirs = match state.get_item("leave_out")? {
            Some(theirs) => {
                let theirs = saved::<Vec<[u64; 2]>>("leave_out", &theirs)?;
                theirs.into_iter().map(|[first, end]| first..end).collect()
            }
            None => Vec::new(),
        };
        let left_out = left_out(before.ranges().iter().cloned().chain(theirs))
            .map_err(|error| refuse(&[error.to_string()]))?;
        let finished_before = self.finished.load(Ordering::Relaxed);
        self.loaded.store(true, Ordering::Relaxed);
        let here = next_sample == self.next_sample() && !finished_before && left_out == before;
        if here && !self.source.is_closed(py)? {
            return Ok(());
        }
        let mut request = self.request.clone();
        let finished = !request.move_to(next_sample, self.opened.batch_samples);
        let shift = request.options.shift;
        if finished {
            self.source.move_to(request.options.first_batch);
            self.shift.store(shift, Ordering::Relaxed);
        } else {
            request.options.leave_out = self.in_batches(&left_out, next_sample, shift)?;
            let opened = self.source.reopen(py, &request)?;
            // Not before: a position that could not be loaded is not that of the stream.
            self.shift.store(shift, Ordering::Relaxed);
            let tables = self.opened.table.iter().zip(&opened.table);
            let pairs = self.opened.datasets.iter().zip(&opened.datasets).chain(tables);
            let differences = pairs.filter_map(|(then, now)| {
                let how = then.identity().difference(&now.identity())?;
                Some(format!("dataset {}: {how}", then.name))
            });
            let mut differences: Vec<String> = differences.collect();
            if !opened.orders_as(&self.opened.plan) {
                differences.push(format!("the plan is {} now", opened.plan));
            }
            if !differences.is_empty() {
                self.source.close(py);
                return Err(refuse(&differences));
            }
        }
        self.finished.store(finished, Ordering::Relaxed);
        *self.left_out.lock().unwrap_or_else(PoisonError::into_inner) = left_out;
        Ok(())
    }

    fn __repr__(&self) -> String {
        format!(
            "<dquant.Stream {}: {}, batch {} next>",
            self.request.url,
            self.opened.plan,
            self.next_batch()
        )
    }
}

impl Stream {
    /// What is left out, in global samples: they mean the same whatever the size of a batch.
    fn left_out(&self) -> LeaveOut {
        self.left_out.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What is left out from sample `next` on, in batches that begin `shift` samples after a
    /// multiple of their size.
    fn in_batches(&self, left_out: &LeaveOut, next: u64, shift: u32) -> PyResult<Vec<Range<u64>>> {
        let (size, shift) = (u64::from(self.opened.batch_samples), u64::from(shift));
        let ahead = left_out.ranges().iter().filter(|range| range.end > next);
        let batch = |sample: u64| {
            (sample >= shift && (sample - shift).is_multiple_of(size))
                .then(|| (sample - shift) / size)
        };
        ahead
            .map(|range| {
                let batches = batch(range.start.max(next)).zip(batch(range.end));
                batches.map(|(first, end)| first..end).ok_or_else(|| {
                    refuse(&[format!(
                        "samples {} to {} are left out, which are no whole batches of {size}",
                        range.start,
                        range.end - 1
                    )])
                })
            })
            .collect()
    }

    /// Samples before the next batch of the job, in the order of the plan.
    fn next_sample(&self) -> u64 {
        let whole = self.source.next_batch() * u64::from(self.opened.batch_samples);
        whole + u64::from(self.shift.load(Ordering::Relaxed))
    }

    /// The next sample of `state`, if it is a position of this stream.
    fn check_state(
        &self,
        py: Python<'_>,
        state: &Bound<'_, PyDict>,
        rename: &HashMap<PathBuf, PathBuf>,
    ) -> PyResult<u64> {
        let ours = self.state_dict(py)?;
        let mut differences = Vec::new();
        // Another size of batches is no other order of samples, and neither are other names of the
        // same datasets.
        let theirs = state.get_item("plan")?.and_then(|plan| plan.extract::<String>().ok());
        if !theirs.is_some_and(|plan| self.opened.orders_as(&plan)) {
            differences.extend(difference("plan", state, &ours)?);
        }
        for name in ["version", "seed"] {
            differences.extend(difference(name, state, &ours)?);
        }
        let theirs = match state.get_item("datasets")? {
            Some(datasets) => saved::<Vec<Bound<'_, PyDict>>>("datasets", &datasets)?,
            None => Vec::new(),
        };
        if theirs.len() != self.opened.datasets.len() {
            let (theirs, ours) = (theirs.len(), self.opened.datasets.len());
            differences.push(format!("{theirs} datasets in the state, {ours} here"));
        }
        for (info, theirs) in self.opened.datasets.iter().zip(&theirs) {
            let how = dataset_difference(theirs, info, rename)?;
            differences.extend(how.map(|how| format!("dataset {}: {how}", info.name)));
        }
        check_renames(rename, &theirs, &self.opened.datasets)?;
        let table = state.get_item("table")?.filter(|table| !table.is_none());
        match (&self.opened.table, table) {
            (None, None) => {}
            (None, Some(_)) => differences.push("a table in the state, none here".to_owned()),
            (Some(info), theirs) => {
                let how = match theirs.and_then(|table| table.cast_into::<PyDict>().ok()) {
                    Some(theirs) => dataset_difference(&theirs, info, rename)?,
                    None => Some("it is not in the state".to_owned()),
                };
                differences.extend(how.map(|how| format!("table {}: {how}", info.name)));
            }
        }
        let next_sample = match state.get_item("next_sample")? {
            Some(next_sample) if differences.is_empty() => saved("next_sample", &next_sample)?,
            Some(_) => return Err(refuse(&differences)),
            None => return Err(refuse(&["no next_sample in the state".to_owned()])),
        };
        check_batch(state, theirs_size(state)?, next_sample)?;
        Ok(next_sample)
    }
}

/// Samples of a batch in the plan of a state.
fn theirs_size(state: &Bound<'_, PyDict>) -> PyResult<Option<u64>> {
    let plan = state.get_item("plan")?.and_then(|plan| plan.extract::<String>().ok());
    let size = plan.as_deref().and_then(|plan| plan.rsplit_once(" | batch(")).map(|(_, size)| size);
    Ok(size.and_then(|size| size.strip_suffix(')')?.parse().ok()).filter(|size| *size > 0))
}

/// The position is that of `next_sample`; a `next_batch` that says another one was changed by hand,
/// and would be ignored.
fn check_batch(state: &Bound<'_, PyDict>, size: Option<u64>, next_sample: u64) -> PyResult<()> {
    let (Some(next_batch), Some(size)) = (state.get_item("next_batch")?, size) else {
        return Ok(());
    };
    let next_batch: u64 = saved("next_batch", &next_batch)?;
    if next_batch == next_sample / size {
        return Ok(());
    }
    let message = format!(
        "next_batch {next_batch} of {size} samples is not where next_sample {next_sample} of the state is"
    );
    Err(Class::State
        .error(message, Some("change both, or leave next_batch out: next_sample is the position")))
}

/// A value of a state, which may come from a damaged checkpoint.
fn saved<'py, T: FromPyObjectOwned<'py>>(name: &str, value: &Bound<'py, PyAny>) -> PyResult<T> {
    value.extract::<T>().map_err(|_| {
        let shown = value.repr().map_or_else(|_| "a value".into(), |text| text.to_string());
        refuse(&[format!("{name} is {shown} in the state")])
    })
}

/// How a dataset of this stream differs from the one that a state describes, if it does.
fn dataset_difference(
    state: &Bound<'_, PyDict>,
    ours: &DatasetInfo,
    rename: &HashMap<PathBuf, PathBuf>,
) -> PyResult<Option<String>> {
    let missing = ["name", "dtype", "tokens", "data_offset", "fingerprint"]
        .into_iter()
        .find(|name| !state.contains(name).unwrap_or(false));
    if let Some(name) = missing {
        return Ok(Some(format!("no {name} in the state")));
    }
    let text = |name: &str| saved::<String>(name, &state.as_any().get_item(name)?);
    // States of earlier versions lack some.
    let number = |name: &str| state.get_item(name)?.map_or(Ok(0), |value| saved(name, &value));
    let (name, dtype) = (text("name")?, text("dtype")?);
    let fingerprint = match is_renamed(rename, &name, &ours.name) {
        // The caller says that the bytes are the same.
        true => ours.fingerprint,
        false => number("fingerprint")?,
    };
    let ours_format = ours.format.as_str();
    if let Some(format) = state.get_item("format")?
        && saved::<String>("format", &format)? != ours_format
    {
        return Ok(Some(format!(
            "its format is {} in the state, {ours_format} here",
            format.repr()?
        )));
    }
    let then = Identity {
        dtype: &dtype,
        tokens: number("tokens")?,
        data_offset: number("data_offset")?,
        fingerprint,
        content: number("content")?,
        documents: number("documents")?,
        targets: number("targets")?,
        loss_weights: match is_renamed(rename, &name, &ours.name) {
            // The caller says that the bytes are the same.
            true => ours.identity().loss_weights,
            false => [number("loss_weights")?, number("loss_weights_content")?],
        },
    };
    let how = then.difference(&ours.identity());
    Ok(how.map(|how| if name == ours.name { how } else { format!("{how} (it was {name})") }))
}

/// Whether the caller says that a dataset of the state has another name now.
fn is_renamed(rename: &HashMap<PathBuf, PathBuf>, then: &str, now: &str) -> bool {
    rename.iter().any(|(old, new)| is_same(old, then) && is_same(new, now))
}

/// Whether a path is a name, but for `./`, which stands before the names of a blend of local files.
fn is_same(path: &Path, name: &str) -> bool {
    let plain = |path: &Path| -> PathBuf {
        path.components().filter(|part| *part != Component::CurDir).collect()
    };
    plain(path) == plain(Path::new(name))
}

/// Refuses a renaming of what is not there.
fn check_renames(
    rename: &HashMap<PathBuf, PathBuf>,
    theirs: &[Bound<'_, PyDict>],
    ours: &[DatasetInfo],
) -> PyResult<()> {
    if rename.is_empty() {
        return Ok(());
    }
    let name =
        |state: &Bound<'_, PyDict>| saved::<String>("name", &state.as_any().get_item("name")?);
    let theirs = theirs.iter().map(name).collect::<PyResult<Vec<String>>>()?;
    let is_used = |old: &Path, new: &Path| {
        let pairs = || theirs.iter().zip(ours);
        pairs().any(|(then, now)| is_same(old, then) && is_same(new, &now.name))
    };
    match rename.iter().find(|(old, new)| !is_used(old, new)) {
        None => Ok(()),
        Some((old, new)) => {
            let names: Vec<&str> = ours.iter().map(|info| info.name.as_str()).collect();
            let message = format!(
                "rename says that {} is {} now, but the state has {} where the stream has {}",
                old.display(),
                new.display(),
                theirs.join(", "),
                names.join(", ")
            );
            Err(Class::State.error(message, Some("write both names as they are printed here")))
        }
    }
}

/// How `name` differs between a state and this stream, if it does.
fn difference(
    name: &str,
    state: &Bound<'_, PyDict>,
    ours: &Bound<'_, PyDict>,
) -> PyResult<Option<String>> {
    let (theirs, ours) = (state.get_item(name)?, ours.get_item(name)?);
    match (theirs, ours) {
        (Some(theirs), Some(ours)) if theirs.eq(&ours)? => Ok(None),
        (Some(theirs), Some(ours)) => {
            Ok(Some(format!("{name} is {} in the state, {} here", theirs.repr()?, ours.repr()?)))
        }
        _ => Ok(Some(format!("no {name} in the state"))),
    }
}

fn refuse(differences: &[String]) -> PyErr {
    let message = format!("the state belongs to another stream: {}", differences.join("; "));
    let hint = "open the stream with the plan, seed and files that the state was saved with; of a copy without a manifest say \
                rename={\"OLD NAME\": \"NEW NAME\"}";
    Class::State.error(message, Some(hint))
}
