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

use crate::source::Held;

/// Shape and token type of the batches of a stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form {
    /// Tokens of a sample.
    tokens: usize,
    /// Bytes of a token: 2 or 4.
    width: usize,
}

impl Form {
    pub(crate) fn new(opened: &Opened) -> Form {
        let width = if opened.dtype == "u16" { 2 } else { 4 };
        Form { tokens: opened.window_tokens as usize, width }
    }

    /// Bytes of a whole batch; a slot is smaller than 4 GiB.
    pub(crate) fn batch_bytes(self, opened: &Opened) -> usize {
        opened.batch_samples as usize * self.tokens * self.width
    }

    /// Name of the token type in numpy.
    pub(crate) fn dtype(self) -> &'static str {
        if self.width == 2 { "uint16" } else { "uint32" }
    }

    /// Token type in the notation of `struct`.
    fn format(self) -> &'static CStr {
        if self.width == 2 { c"H" } else { c"I" }
    }
}

/// One batch, in the memory that the DPU wrote it to: an array of tokens, read-only.
///
/// It has the buffer protocol: `memoryview(batch)` and `numpy.asarray(batch)` are views of shape
/// `[samples, tokens]` and type `uint16` or `uint32`, without a copy. The memory goes back to the DPU when
/// the batch and the last view of it are gone, views of views included.
#[pyclass(frozen, module = "dquant")]
pub(crate) struct Batch {
    view: client::Batch,
    form: Form,
    shape: [isize; 2],
    strides: [isize; 2],
    held: Arc<Held>,
}

impl Batch {
    pub(crate) fn new(view: client::Batch, form: Form, held: &Arc<Held>) -> Batch {
        held.batches.fetch_add(1, Ordering::Relaxed);
        let row = form.tokens * form.width;
        let samples = view.bytes().len() / row.max(1);
        Batch {
            view,
            form,
            // In range: a slot is smaller than 4 GiB.
            shape: [samples as isize, form.tokens as isize],
            strides: [row as isize, form.width as isize],
            held: Arc::clone(held),
        }
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

    /// Samples, and tokens of a sample.
    #[getter]
    fn shape(&self) -> (isize, isize) {
        self.shape.into()
    }

    /// Token type by its name in numpy: `uint16` or `uint32`.
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

    /// Samples of the batch.
    fn __len__(&self) -> usize {
        self.shape[0] as usize
    }

    fn __repr__(&self) -> String {
        let [samples, tokens] = self.shape;
        format!("<dquant.Batch {}: {} [{samples}, {tokens}]>", self.number(), self.form.dtype())
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
            if asked(ffi::PyBUF_FORMAT) { batch.form.format().as_ptr() } else { ptr::null() };
        // SAFETY: `buffer` is valid (above). All pointers stay valid while the buffer lives: `obj` keeps the batch, a
        // frozen object that does not move and owns shape, strides and the view of the ring; the format is static.
        // Python writes through none of them, because the buffer is read-only.
        unsafe {
            (*buffer).buf = bytes.as_ptr().cast_mut().cast();
            (*buffer).len = bytes.len() as isize;
            (*buffer).itemsize = batch.strides[1];
            (*buffer).readonly = 1;
            (*buffer).ndim = if shaped { 2 } else { 1 };
            (*buffer).format = format.cast_mut();
            (*buffer).shape = when(ffi::PyBUF_ND, batch.shape.as_ptr());
            (*buffer).strides = when(ffi::PyBUF_STRIDES, batch.strides.as_ptr());
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
