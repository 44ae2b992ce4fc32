//! The class `Stream`: batches in order, a position that can be saved.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use client::{LeaveOut, Opened};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::batch::{Batch, Form};
use crate::errors::Class;
use crate::options::{Request, left_out, ranges};
use crate::records;
use crate::source::Source;

/// Version of the dictionary that `state_dict` returns.
const STATE_VERSION: u32 = 1;

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
/// `source` is `dq://HOST[:PORT]/NAME`, or a path of this machine, or a pattern such as `corpora/*.bin`, or a
/// dictionary of such names (of one target, or all local) and their weights. Local files are read by threads
/// of this process: no daemon is needed, and `offload` does not matter.
///
/// In place of a plan: `seq_len` (tokens of a sample), `batch_size` (32), `shuffle` (True, with `seed`), `narrow`
/// (`"u16"`), `widen` (`"i64"`), `pairs` (inputs and labels of `seq_len` tokens each).
///
/// Options: `seed` (for the word `seed` in the plan), `first_batch`, `batches` (without it the stream has no
/// end), `token` (default `DQUANT_TOKEN`), `dpu` (socket of the DPU daemon, default `DQUANT_DPU`), `dtype` of
/// flat files (default: from their manifests, else a guess with a warning), `vocab` (files with larger ids are
/// refused), `leave_out` (batches not to deliver, as `[(1000, 1200)]` for 1000 to 1199: the others keep their
/// numbers, `batches` counts them all), `slots` of the ring (16), `slot_size` in bytes (1 MiB); without offload also `roce`
/// (`"IP[:PORT]"`), `memory` in bytes (128 MiB), `reconnect` in seconds (30).
///
/// Raises `InvalidError` when plan, URL, dataset or token is refused, `UnreachableError` when the DPU or the
/// target does not reply.
#[pyclass(frozen, module = "dquant")]
pub(crate) struct Stream {
    source: Source,
    request: Request,
    opened: Opened,
    form: Form,
    /// The last batch was delivered before the position was loaded.
    finished: AtomicBool,
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
        let request = Request::new(source, plan, offload, options)?;
        let (source, opened) = Source::open(py, &request)?;
        let form = Form::new(&opened)?;
        let finished = AtomicBool::new(false);
        let left_out = Mutex::new(left_out(request.options.leave_out.iter().cloned())?);
        Ok(Stream { source, request, opened, form, finished, left_out })
    }

    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    /// The next batch. Waits without the GIL.
    ///
    /// Raises `StreamError` when the stream failed or its DPU died, `SlotsHeldError` when the batches in use
    /// leave no slot, `KeyboardInterrupt` on Ctrl-C; the next call goes on with the same batch.
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

    /// Number of the next batch.
    #[getter]
    fn next_batch(&self) -> u64 {
        self.source.next_batch()
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

    /// Closes the stream. Raises `BufferError` if views of its batches are in use; it is closed all the same,
    /// and they stay readable.
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
        state.set_item("next_batch", self.source.next_batch())?;
        let left_out = self.left_out().ranges().to_vec();
        let left_out = left_out.iter().map(|range| PyList::new(py, [range.start, range.end]));
        state.set_item("leave_out", PyList::new(py, left_out.collect::<PyResult<Vec<_>>>()?)?)?;
        Ok(state)
    }

    /// Goes on at a saved position. Batches that the stream of that position left out stay left out, beside those of
    /// this one's `leave_out`.
    ///
    /// Raises `StateError` when the position belongs to another plan, seed or dataset, and says what differs;
    /// the stream is then as before. Otherwise raises what opening a stream raises; it is then closed.
    fn load_state_dict(&self, py: Python<'_>, state: &Bound<'_, PyDict>) -> PyResult<()> {
        self.source.check_owner()?;
        let next_batch = self.check_state(py, state)?;
        let before = self.left_out();
        let saved = state.get_item("leave_out")?.map(|saved| ranges(&saved)).transpose()?;
        let ours = before.ranges().iter().cloned();
        let left_out = left_out(ours.chain(saved.unwrap_or_default()))?;
        let finished_before = self.finished.load(Ordering::Relaxed);
        let here = next_batch == self.source.next_batch() && !finished_before && left_out == before;
        if here && !self.source.is_closed(py)? {
            return Ok(());
        }
        let end = self.request.end();
        let finished = end.is_some_and(|end| next_batch >= end);
        if finished {
            self.source.move_to(next_batch);
        } else {
            let mut request = self.request.clone();
            request.options.first_batch = next_batch;
            request.options.batches = end.map(|end| end - next_batch);
            request.options.leave_out = left_out.ranges().to_vec();
            let opened = self.source.reopen(py, &request)?;
            if opened != self.opened {
                self.source.close(py);
                return Err(refuse(&[
                    "a dataset was replaced after the stream was opened".to_owned()
                ]));
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
    fn left_out(&self) -> LeaveOut {
        self.left_out.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The number of the next batch in `state`, if it is a position of this stream.
    fn check_state(&self, py: Python<'_>, state: &Bound<'_, PyDict>) -> PyResult<u64> {
        let ours = self.state_dict(py)?;
        let mut differences = Vec::new();
        for name in ["version", "plan", "seed"] {
            differences.extend(difference(name, state, &ours)?);
        }
        let theirs = match state.get_item("datasets")? {
            Some(datasets) => datasets.extract::<Vec<Bound<'_, PyDict>>>()?,
            None => Vec::new(),
        };
        if theirs.len() != self.opened.datasets.len() {
            let (theirs, ours) = (theirs.len(), self.opened.datasets.len());
            differences.push(format!("{theirs} datasets in the state, {ours} here"));
        }
        for (info, theirs) in self.opened.datasets.iter().zip(&theirs) {
            let ours = records::dataset_fields(py, info)?;
            for name in ours.keys() {
                let differs = difference(&name.extract::<String>()?, theirs, &ours)?;
                differences.extend(differs.map(|text| format!("dataset {}: {text}", info.name)));
            }
        }
        match state.get_item("next_batch")? {
            Some(next_batch) if differences.is_empty() => next_batch.extract(),
            Some(_) => Err(refuse(&differences)),
            None => Err(refuse(&["no next_batch in the state".to_owned()])),
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
    let hint = "open the stream with the plan, seed and files that the state was saved with";
    Class::State.error(message, Some(hint))
}
