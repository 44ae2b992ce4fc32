//! One batch: the buffer protocol over a slot of the ring, read-only and without a copy.
//!
//! A `Batch` owns a view of the ring, and a buffer owns its `Batch`. So the slot is held until the last memoryview
//! and the last array made of one, however derived, is gone.

use std::ffi::{CStr, c_int};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use client::Opened;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;

use crate::errors::invalid;
use crate::source::Held;

/// A token type: its name in a plan, its name in numpy, its notation in `struct`, its bytes.
type Token = (&'static str, &'static str, &'static CStr, usize);

const TOKENS: [Token; 5] = [
    ("u16", "uint16", c"H", 2),
    ("u32", "uint32", c"I", 4),
    ("i32", "int32", c"i", 4),
    ("u64", "uint64", c"Q", 8),
    ("i64", "int64", c"q", 8),
];

/// Shape and token type of the batches of a stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form {
    token: Token,
    /// Inputs and labels, if samples are delivered as pairs; then samples; then tokens.
    shape: [isize; 3],
    /// In bytes.
    strides: [isize; 3],
    pairs: bool,
}

impl Form {
    /// Refuses tokens of a type that this version does not know.
    pub(crate) fn new(opened: &Opened) -> PyResult<Form> {
        let token = TOKENS.into_iter().find(|token| token.0 == opened.dtype).ok_or_else(|| {
            let message =
                format!("batches hold {}, a type of tokens unknown to this version", opened.dtype);
            invalid(message, "install the version of the daemon")
        })?;
        // In range: a slot is smaller than 4 GiB.
        let (samples, tokens) = (opened.batch_samples as isize, opened.window_tokens as isize);
        let pairs = opened.pairs;
        let shape = [if pairs { 2 } else { 1 }, samples, tokens];
        let width = token.3 as isize;
        Ok(Form { token, shape, strides: [samples * tokens * width, tokens * width, width], pairs })
    }

    /// Bytes of a whole batch.
    pub(crate) fn batch_bytes(self) -> usize {
        self.shape.iter().product::<isize>() as usize * self.token.3
    }

    /// Name of the token type in numpy.
    pub(crate) fn dtype(self) -> &'static str {
        self.token.1
    }

    /// Lengths: `[samples, tokens]`, or `[2, samples, tokens]` of pairs.
    pub(crate) fn shape(&self) -> &[isize] {
        &self.shape[usize::from(!self.pairs)..]
    }

    fn strides(&self) -> &[isize] {
        &self.strides[usize::from(!self.pairs)..]
    }
}

/// One batch, in the memory that the DPU wrote it to: an array of tokens, read-only.
///
/// It has the buffer protocol: `memoryview(batch)` and `numpy.asarray(batch)` are views of shape
/// `[samples, tokens]`, or `[2, samples, tokens]` if the plan ends in `pairs`, without a copy. The memory goes back to the DPU when
/// the batch and the last view of it are gone, views of views included.
#[pyclass(frozen, module = "dquant")]
pub(crate) struct Batch {
    view: client::Batch,
    form: Form,
    held: Arc<Held>,
}

impl Batch {
    pub(crate) fn new(view: client::Batch, form: Form, held: &Arc<Held>) -> Batch {
        held.batches.fetch_add(1, Ordering::Relaxed);
        Batch { view, form, held: Arc::clone(held) }
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        self.held.batches.fetch_sub(1, Ordering::Relaxed);
    }
}

#[pymethods]
impl Batch {
    /// Its number in the stream; the first is 0.
    #[getter]
    fn number(&self) -> u64 {
        self.view.number()
    }

    /// Samples, and tokens of a sample; of pairs 2, samples, and tokens.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.form.shape())
    }

    /// Token type by its name in numpy, such as `uint16`.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.form.dtype()
    }

    /// Size in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.view.bytes().len()
    }

    /// A numpy array of this batch without a copy; numpy is imported here for the first time.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        static ASARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        ASARRAY.import(slf.py(), "numpy", "asarray")?.call1((slf,))
    }

    /// The first length of its shape.
    fn __len__(&self) -> usize {
        self.form.shape()[0] as usize
    }

    fn __repr__(&self) -> String {
        let (number, dtype, shape) = (self.number(), self.form.dtype(), self.form.shape());
        format!("<dquant.Batch {number}: {dtype} {shape:?}>")
    }

    // SAFETY: Python passes a `Py_buffer` that is valid for writes.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        buffer: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let asked = |flag: c_int| flags & flag == flag;
        if asked(ffi::PyBUF_WRITABLE) {
            return Err(PyBufferError::new_err("a batch is read-only: copy it to change it"));
        }
        if asked(ffi::PyBUF_F_CONTIGUOUS) {
            return Err(PyBufferError::new_err("the samples of a batch lie one after the other"));
        }
        let batch = slf.get();
        let bytes = batch.view.bytes();
        let shaped = asked(ffi::PyBUF_ND);
        let when = |flag: c_int, pointer: *const isize| {
            if asked(flag) { pointer.cast_mut() } else { ptr::null_mut() }
        };
        let format =
            if asked(ffi::PyBUF_FORMAT) { batch.form.token.2.as_ptr() } else { ptr::null() };
        // SAFETY: `buffer` is valid (above). All pointers stay valid while the buffer lives: `obj` keeps the batch, a
        // frozen object that does not move and owns shape, strides and the view of the ring; the format is static.
        // Python writes through none of them, because the buffer is read-only.
        unsafe {
            (*buffer).buf = bytes.as_ptr().cast_mut().cast();
            (*buffer).len = bytes.len() as isize;
            (*buffer).itemsize = batch.form.token.3 as isize;
            (*buffer).readonly = 1;
            (*buffer).ndim = if shaped { batch.form.shape().len() as c_int } else { 1 };
            (*buffer).format = format.cast_mut();
            (*buffer).shape = when(ffi::PyBUF_ND, batch.form.shape().as_ptr());
            (*buffer).strides = when(ffi::PyBUF_STRIDES, batch.form.strides().as_ptr());
            (*buffer).suboffsets = ptr::null_mut();
            (*buffer).internal = ptr::null_mut();
        }
        batch.held.buffers.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above; the reference that the buffer owns.
        unsafe { (*buffer).obj = slf.into_ptr() };
        Ok(())
    }

    // SAFETY: the buffer is not touched.
    unsafe fn __releasebuffer__(&self, _buffer: *mut ffi::Py_buffer) {
        self.held.buffers.fetch_sub(1, Ordering::Relaxed);
    }
}
