//! The class `File` and `open`: a stream behind the interface of a file, whole batches copied into
//! the caller's memory.

use client::Opened;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::batch::Form;
use crate::errors::{invalid, raised};
use crate::options::Request;
use crate::ranks::Slice;
use crate::records;
use crate::source::Source;

/// Opens a stream with the interface of a file: `read` and `readinto` copy whole batches.
///
/// `action` is a plan; options and exceptions are those of `Stream`.
#[pyfunction]
#[pyo3(signature = (name, action, offload=true, **options))]
pub(crate) fn open(
    py: Python<'_>,
    name: &Bound<'_, PyAny>,
    action: String,
    offload: bool,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<File> {
    let request = Request::new(name, Some(action), offload, options)?;
    let (source, opened) = Source::open(py, &request)?;
    let form = Form::new(&opened, Slice::WHOLE)?;
    Ok(File { source, request, opened, form })
}

/// A stream that is read like a file, in whole batches. Made by `dquant.open`.
#[pyclass(frozen, module = "dquant")]
pub(crate) struct File {
    source: Source,
    request: Request,
    opened: Opened,
    form: Form,
}

#[pymethods]
impl File {
    /// Copies as many whole batches as fit into `buffer`, and returns the bytes written; 0 at the
    /// end.
    ///
    /// A failure after the first batch is raised by the next call. Raises `InvalidError` when
    /// `buffer` holds no whole batch, else as `Stream`.
    fn readinto(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<usize> {
        let buffer = PyUntypedBuffer::get(buffer)?;
        if buffer.readonly() || !buffer.is_c_contiguous() {
            return Err(PyBufferError::new_err("readinto needs a writable, contiguous buffer"));
        }
        let at = buffer.buf_ptr().cast::<u8>();
        self.read_batches(py, self.batches_in(buffer.len_bytes())?, |offset, bytes| {
            // SAFETY: the buffer is writable, contiguous and at least `offset + bytes.len()` bytes
            // long, because at most the batches that fit are read; it stays in place while `buffer`
            // lives. A batch is in memory that this process maps read-only, so the two do not
            // overlap.
            unsafe { at.add(offset).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        })
    }

    /// Returns as many whole batches as fit into `size` bytes, one after the other; all that are
    /// left if `size` is negative. Empty at the end.
    #[pyo3(signature = (size=-1))]
    fn read<'py>(&self, py: Python<'py>, size: isize) -> PyResult<Bound<'py, PyBytes>> {
        let batches = match usize::try_from(size) {
            Ok(size) => self.batches_in(size)?,
            Err(_) if self.request.options.batches.is_some() => usize::MAX,
            Err(_) => {
                return Err(invalid("the stream has no end", "read(size), or open with batches=N"));
            }
        };
        let mut read = Vec::new();
        self.read_batches(py, batches, |_, bytes| read.extend_from_slice(bytes))?;
        Ok(PyBytes::new(py, &read))
    }

    /// Always true: for `io.BufferedReader` and its like.
    fn readable(&self) -> bool {
        true
    }

    /// Bytes of one batch.
    #[getter]
    fn batch_bytes(&self) -> usize {
        self.form.batch_bytes()
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

    /// Whether the file is closed.
    #[getter]
    fn closed(&self, py: Python<'_>) -> PyResult<bool> {
        self.source.is_closed(py)
    }

    /// Counters of the stream since it was opened: a dictionary.
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        records::status(py, &self.source.status(py)?)
    }

    /// Closes the stream.
    fn close(&self, py: Python<'_>) {
        self.source.close(py);
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) {
        self.source.close(py);
    }

    fn __repr__(&self) -> String {
        format!("<dquant.File {}: {}>", self.request.url, self.opened.plan)
    }
}

impl File {
    /// Whole batches in `size` bytes; at least one.
    fn batches_in(&self, size: usize) -> PyResult<usize> {
        match size / self.form.batch_bytes() {
            0 => Err(raised(&client::Error::SmallBuffer {
                have: size,
                need: self.form.batch_bytes(),
            })),
            batches => Ok(batches),
        }
    }

    /// Passes up to `batches` batches to `write`, each with its offset, and returns their bytes.
    fn read_batches(
        &self,
        py: Python<'_>,
        batches: usize,
        mut write: impl FnMut(usize, &[u8]),
    ) -> PyResult<usize> {
        let mut filled = 0;
        for _ in 0..batches {
            match self.source.next(py) {
                Ok(Some(batch)) => {
                    write(filled, batch.bytes());
                    filled += batch.bytes().len();
                }
                Ok(None) => break,
                // The error of a stream lasts: it is raised when no batch comes before it. A signal
                // does not.
                Err(error) if filled == 0 || !is_own(py, &error) => return Err(error),
                Err(_) => break,
            }
        }
        Ok(filled)
    }
}

/// Whether it is an exception of this package.
fn is_own(py: Python<'_>, error: &PyErr) -> bool {
    let own = py.import("dquant._errors").and_then(|module| module.getattr("Error"));
    own.is_ok_and(|class| error.matches(py, class).unwrap_or(false))
}
