//! One batch: the buffer protocol over a slot of the ring, read-only and without a copy.
//!
//! A `Batch` owns a view of the ring, and a buffer owns its `Batch`. So the slot is held until the
//! last memoryview and the last array made of one, however derived, is gone.

use std::ffi::{CStr, c_int};
use std::ptr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use client::Opened;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;

use crate::dlpack::{self, Array, Kind, MAX_DIMENSIONS};
use crate::errors::invalid;
use crate::fault::Known;
use crate::ranks::Slice;
use crate::source::Held;

/// A token type: its name in a plan, its name in numpy, its notation in `struct`, its bytes.
type Token = (&'static str, &'static str, &'static CStr, usize);

const TOKENS: [Token; 9] = [
    ("u8", "uint8", c"B", 1),
    ("f32", "float32", c"f", 4),
    ("f16", "float16", c"e", 2),
    // Neither `struct` nor numpy has it: a buffer shows its bits.
    ("bf16", "bfloat16", c"H", 2),
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
    /// Rows of a sample, if there are several: inputs and labels, positions; then samples; then
    /// pieces of a sample, if a trainer sees two; then tokens. What is not there has no dimension.
    shape: [isize; MAX_DIMENSIONS],
    /// In bytes.
    strides: [isize; MAX_DIMENSIONS],
    dimensions: usize,
    /// Bytes of the batch and of its rows, and where the first token that is seen lies in them.
    bytes: usize,
    rows_bytes: usize,
    offset: usize,
    pairs: bool,
    positions: bool,
    weights: Option<Weights>,
}

/// Where the loss weights of a batch are: an array of `f32` as long as a row, without its first
/// dimension.
#[derive(Clone, Copy, Debug)]
struct Weights {
    /// Where the first one that is seen lies in the batch.
    offset: usize,
    /// In bytes.
    strides: [isize; MAX_DIMENSIONS],
}

/// What is taken of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// All rows.
    Rows,
    /// One row of its samples.
    Row(usize),
    /// The loss weights of one row.
    Weights,
}

impl Form {
    /// Refuses tokens of a type that this version does not know, and samples that cannot be cut
    /// into equal slices.
    pub(crate) fn new(opened: &Opened, slice: Slice) -> PyResult<Form> {
        let token = TOKENS.into_iter().find(|token| token.0 == opened.dtype).ok_or_else(|| {
            let message =
                format!("batches hold {}, a type of tokens unknown to this version", opened.dtype);
            invalid(message, "install the version of the daemon")
        })?;
        // In range: a slot is smaller than 4 GiB.
        let (samples, tokens) = (opened.batch_samples as isize, opened.window_tokens as isize);
        let (pairs, width) = (opened.pairs, token.3 as isize);
        let pieces = if slice.zigzag { 2 } else { 1 };
        let cuts = slice.parts as isize * pieces;
        if token.0 == "u8" && cuts > 1 {
            let message = "samples of bytes are delivered whole, not cut into slices";
            return Err(invalid(
                message,
                "leave cp out: only sequences of tokens or values are cut",
            ));
        }
        if tokens % cuts != 0 {
            let message =
                format!("samples of {tokens} tokens cannot be cut into {cuts} equal pieces");
            return Err(invalid(message, "choose a seq_len that cp (twice cp for zigzag) divides"));
        }
        let piece = tokens / cuts;
        // A zigzag part has piece `part` from the front and the same from the back.
        let apart = (cuts - 1 - 2 * slice.part as isize) * piece * width;
        let rows = opened.rows() as isize;
        let all = [
            (rows > 1, rows, samples * tokens * width),
            (true, samples, tokens * width),
            (slice.zigzag, pieces, apart),
            (true, piece, width),
        ];
        let mut form = Form {
            token,
            shape: [0; MAX_DIMENSIONS],
            strides: [0; MAX_DIMENSIONS],
            dimensions: 0,
            bytes: opened.batch_bytes(),
            rows_bytes: (rows * samples * tokens * width) as usize,
            offset: (slice.part as isize * piece * width) as usize,
            pairs,
            positions: opened.positions,
            weights: None,
        };
        for (_, length, stride) in all.into_iter().filter(|dimension| dimension.0) {
            form.shape[form.dimensions] = length;
            form.strides[form.dimensions] = stride;
            form.dimensions += 1;
        }
        form.weights = opened.loss_weights_at().map(|at| form.weights(at, slice, piece));
        Ok(form)
    }

    /// The loss weights that begin at this byte of a batch, cut as its samples are, in pieces of so
    /// many tokens.
    fn weights(&self, at: usize, slice: Slice, piece: isize) -> Weights {
        let (width, of_weight) = (self.token.3 as isize, size_of::<f32>() as isize);
        let offset = at + (slice.part as isize * piece * of_weight) as usize;
        let mut strides = [0; MAX_DIMENSIONS];
        for (stride, of_row) in strides.iter_mut().zip(&self.strides()[self.first_of_row()..]) {
            *stride = of_row / width * of_weight;
        }
        Weights { offset, strides }
    }

    /// The dimension of samples: the first but for that of rows.
    fn first_of_row(&self) -> usize {
        usize::from(self.rows() > 1)
    }

    /// Bytes of a whole batch.
    pub(crate) fn batch_bytes(self) -> usize {
        self.bytes
    }

    /// Bytes that a trainer sees of it.
    fn seen_bytes(&self) -> usize {
        self.shape().iter().product::<isize>() as usize * self.token.3
    }

    /// Whether a trainer sees all of it.
    fn is_whole(&self) -> bool {
        self.seen_bytes() == self.rows_bytes
    }

    /// Rows of a sample.
    fn rows(&self) -> usize {
        1 + usize::from(self.pairs) + 2 * usize::from(self.positions)
    }

    /// The error of a torch without the token type; none if it has it.
    fn unknown_to_torch(&self, py: Python<'_>) -> PyResult<Option<PyErr>> {
        let dtype = self.dtype();
        if py.import("torch")?.hasattr(dtype)? {
            return Ok(None);
        }
        let message = format!("this version of torch has no {dtype}");
        let hint = "widen to a type that it has, such as widen(i64), or install torch 2.3 or later";
        Ok(Some(invalid(message, hint)))
    }

    /// Name of the token type in numpy.
    pub(crate) fn dtype(self) -> &'static str {
        self.token.1
    }

    /// Lengths: `[samples, tokens]`, or `[rows, samples, tokens]` of pairs and with positions; with
    /// 2 before the tokens where a trainer sees two pieces of each sample.
    pub(crate) fn shape(&self) -> &[isize] {
        &self.shape[..self.dimensions]
    }

    /// In bytes, as many as lengths.
    fn strides(&self) -> &[isize] {
        &self.strides[..self.dimensions]
    }
}

/// One batch, in the memory that the DPU wrote it to: an array of tokens, read-only.
///
/// It has the buffer protocol: `memoryview(batch)` and `numpy.asarray(batch)` are views of shape
/// `[samples, tokens]`, or `[2, samples, tokens]` if the plan has `pairs`, without a copy;
/// `positions` adds two rows. The memory goes back to the DPU when the batch and the last view of
/// it are gone, views of views included.
#[pyclass(frozen, module = "dquant")]
pub(crate) struct Batch {
    view: client::Batch,
    form: Form,
    held: Arc<Held>,
    _known: Known,
}

/// A batch that a tensor of another library uses; it counts as a buffer.
struct Export(Option<Py<Batch>>);

impl Drop for Export {
    fn drop(&mut self) {
        let Some(batch) = &self.0 else { return };
        batch.get().held.buffers.fetch_sub(1, Ordering::Relaxed);
        // A tensor may outlive the interpreter: then the batch stays.
        let dropped = Python::try_attach(|_| drop(self.0.take()));
        if dropped.is_none() {
            std::mem::forget(self.0.take());
        }
    }
}

impl Batch {
    pub(crate) fn new(view: client::Batch, form: Form, held: &Arc<Held>) -> Batch {
        held.batches.fetch_add(1, Ordering::Relaxed);
        let known = Known::new(view.bytes(), view.number());
        Batch { view, form, held: Arc::clone(held), _known: known }
    }
}

impl Batch {
    fn row<'py>(&self, slf: &Bound<'py, Self>, index: usize) -> PyResult<Bound<'py, PyAny>> {
        let all = Batch::numpy(slf, false)?;
        if self.form.pairs || self.form.positions { all.get_item(index) } else { Ok(all) }
    }

    /// The bytes from the first element on that a trainer sees of this part.
    fn seen(&self, part: Part) -> &[u8] {
        let Batch { view, form, .. } = self;
        let at = match (part, &form.weights) {
            (Part::Row(row), _) if form.first_of_row() == 1 => {
                form.offset + row * form.strides()[0] as usize
            }
            (Part::Weights, Some(weights)) => weights.offset,
            _ => form.offset,
        };
        &view.bytes()[at..]
    }

    /// A part of the batch as an array.
    fn array(&self, part: Part) -> Array<'_> {
        let form = &self.form;
        let (shape, strides) = (form.shape(), form.strides());
        let dimensions = if part == Part::Rows { 0 } else { form.first_of_row() };
        let data = self.seen(part).as_ptr().cast_mut();
        let shape = &shape[dimensions..];
        if let (Part::Weights, Some(weights)) = (part, &form.weights) {
            let (strides, width) = (&weights.strides[..shape.len()], size_of::<f32>());
            return Array { data, shape, strides, width, kind: Kind::Float };
        }
        Array {
            data,
            shape,
            strides: &strides[dimensions..],
            width: form.token.3,
            kind: match form.token.0 {
                "bf16" => Kind::Brain,
                name if name.starts_with('f') => Kind::Float,
                name if name.starts_with('i') => Kind::Signed,
                _ => Kind::Unsigned,
            },
        }
    }

    /// A DLPack capsule of a part of the batch.
    fn capsule<'py>(
        slf: &Bound<'py, Self>,
        part: Part,
        max_version: Option<(u32, u32)>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let batch = slf.get();
        batch.held.buffers.fetch_add(1, Ordering::Relaxed);
        let keeper = Export(Some(slf.clone().unbind()));
        dlpack::capsule(slf.py(), &batch.array(part), Box::new(keeper), max_version)
    }

    /// A DLPack capsule of a copy of a part of the batch, which may be written.
    fn copied<'py>(slf: &Bound<'py, Self>, part: Part) -> PyResult<Bound<'py, PyAny>> {
        let batch = slf.get();
        let array = batch.array(part);
        let (copy, strides) = Copied::of(batch.seen(part), &array, &batch.held);
        let strides = &strides[..array.shape.len()];
        let array = Array { data: copy.words.cast(), strides, ..array };
        dlpack::capsule(slf.py(), &array, Box::new(copy), None)
    }

    fn row_of_positions<'py>(
        &self,
        slf: &Bound<'py, Self>,
        index: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        if !self.form.positions {
            let hint = "add `positions` to the plan, and documents to the dataset";
            return Err(invalid("the batches hold no positions", hint));
        }
        self.row(slf, 1 + usize::from(self.form.pairs) + index)
    }
}

/// A copy of an array, one element after the other. It is held by its address, as its consumer
/// writes there.
struct Copied {
    /// In words, so that elements of every type are aligned.
    words: *mut u64,
    count: usize,
    /// Where its memory goes: one tensor that is kept must not keep the memory of others.
    held: Weak<Held>,
}

// SAFETY: the memory is its own, and nothing of it is of a thread.
unsafe impl Send for Copied {}

impl Drop for Copied {
    fn drop(&mut self) {
        let words = ptr::slice_from_raw_parts_mut(self.words, self.count);
        // SAFETY: they came from a box, and whoever used them has let go of them.
        let words = unsafe { Box::from_raw(words) };
        if let Some(held) = self.held.upgrade() {
            held.spares.give(words);
        }
    }
}

impl Copied {
    /// Copies an array that begins with these bytes. Also returns the strides of the copy, in
    /// bytes.
    fn of(bytes: &[u8], array: &Array<'_>, held: &Arc<Held>) -> (Copied, [isize; MAX_DIMENSIONS]) {
        let mut strides = [0; MAX_DIMENSIONS];
        let mut len = array.width;
        for (stride, length) in strides[..array.shape.len()].iter_mut().zip(array.shape).rev() {
            *stride = len as isize;
            len *= *length as usize;
        }
        let mut words = held.spares.take(len.div_ceil(size_of::<u64>()));
        let (from, to) = ((bytes, 0), &mut bytes_of(&mut words)[..len]);
        copy_elements(from, array.width, (array.shape, array.strides), to);
        let count = words.len();
        let words = Box::into_raw(words).cast();
        (Copied { words, count, held: Arc::downgrade(held) }, strides)
    }
}

/// The bytes of words.
fn bytes_of(words: &mut [u64]) -> &mut [u8] {
    // SAFETY: words have no padding, and every byte is legal.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), size_of_val(words)) }
}

/// Copies elements of `width` bytes from byte `at` on, dimension by dimension; the last lies in one
/// piece.
fn copy_elements(
    (bytes, at): (&[u8], isize),
    width: usize,
    (shape, strides): (&[isize], &[isize]),
    to: &mut [u8],
) {
    let is_dense = strides
        .iter()
        .rev()
        .zip(shape.iter().rev())
        .try_fold(width as isize, |size, (stride, length)| {
            (*stride == size).then_some(size * length)
        });
    if is_dense.is_some() {
        let at = at as usize;
        to.copy_from_slice(&bytes[at..at + to.len()]);
        return;
    }
    let piece = to.len() / shape[0] as usize;
    for (index, to) in (0..).zip(to.chunks_exact_mut(piece.max(1))) {
        copy_elements((bytes, at + index * strides[0]), width, (&shape[1..], &strides[1..]), to);
    }
}

/// A numpy array of a type of `ml_dtypes`.
fn brain_floats<'py>(batch: &Bound<'py, Batch>) -> PyResult<Bound<'py, PyAny>> {
    let py = batch.py();
    let dtype = py.import("ml_dtypes").and_then(|module| module.getattr("bfloat16"));
    let dtype = dtype.map_err(|_| {
        invalid(
            "numpy has no bfloat16",
            "take batch.torch(), install ml_dtypes, or deliver another type: quantize(e4m3, deliver=f32)",
        )
    })?;
    py.import("numpy")?.call_method1("asarray", (batch,))?.call_method1("view", (dtype,))
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

    /// Number of the first batch of the job's next step: where a stream resumes that has delivered
    /// this one.
    #[getter]
    fn next_batch(&self) -> u64 {
        self.view.next_batch()
    }

    /// Samples, and tokens of a sample; of pairs 2, samples, and tokens; with positions 2 more
    /// rows.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.form.shape())
    }

    /// Whether it holds inputs and then labels.
    #[getter]
    fn pairs(&self) -> bool {
        self.form.pairs
    }

    /// Token type by its name in numpy, such as `uint16`.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.form.dtype()
    }

    /// Size in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.form.seen_bytes()
    }

    /// A numpy array of this batch: a read-only view, or with `copy=True` memory of its own, which
    /// may be written and kept. numpy is imported here for the first time. For `bfloat16`, which
    /// numpy does not have, the package `ml_dtypes` is needed.
    #[pyo3(signature = (*, copy=false))]
    fn numpy<'py>(slf: &Bound<'py, Self>, copy: bool) -> PyResult<Bound<'py, PyAny>> {
        static ASARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let view = match slf.get().form.token.0 {
            "bf16" => brain_floats(slf)?,
            _ => ASARRAY.import(slf.py(), "numpy", "asarray")?.call1((slf,))?,
        };
        if copy { view.call_method0("copy") } else { Ok(view) }
    }

    /// A tensor of PyTorch, or a tuple of them, one for each row of a sample: inputs and labels of
    /// pairs, positions and documents; then the loss weights, if the plan has them; torch is
    /// imported here for the first time. Without `copy` labels and weights are copies, because
    /// training loops mask some, and everything else is a view of the ring: writing to it ends the
    /// process, as the memory is mapped read-only. `copy=True` copies all, `copy=False` nothing.
    /// Before version 2.3 torch has no `uint16`: end the plan in `widen(i64)`.
    #[pyo3(signature = (*, copy=None))]
    fn torch<'py>(slf: &Bound<'py, Self>, copy: Option<bool>) -> PyResult<Bound<'py, PyAny>> {
        static FROM_DLPACK: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let from_dlpack = FROM_DLPACK.import(slf.py(), "torch", "from_dlpack")?;
        let labels = slf.get().form.pairs.then_some(Part::Row(1));
        // A capsule saves torch its questions about the device.
        let tensor = |part: Part| {
            let copies = copy.unwrap_or(Some(part) == labels || part == Part::Weights);
            let capsule =
                if copies { Batch::copied(slf, part)? } else { Batch::capsule(slf, part, None)? };
            let tensor = from_dlpack.call1((capsule,));
            tensor.or_else(|error| Err(slf.get().form.unknown_to_torch(slf.py())?.unwrap_or(error)))
        };
        let weights = slf.get().form.weights.map(|_| Part::Weights);
        match (slf.get().form.rows(), weights) {
            (1, None) => tensor(Part::Rows),
            (2, None) => {
                let rows = (tensor(Part::Row(0))?, tensor(Part::Row(1))?);
                Ok(rows.into_pyobject(slf.py())?.into_any())
            }
            (rows, weights) => {
                let parts = (0..rows).map(Part::Row).chain(weights);
                let tensors = parts.map(tensor).collect::<PyResult<Vec<_>>>()?;
                Ok(PyTuple::new(slf.py(), tensors)?.into_any())
            }
        }
    }

    /// Inputs, or without pairs the tokens: a numpy array `[samples, tokens]` without a copy.
    #[getter]
    fn x<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.get().row(slf, 0)
    }

    /// Labels of a batch of pairs: the inputs one token later.
    #[getter]
    fn y<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        if !slf.get().form.pairs {
            return Err(invalid("the batches hold no pairs", "end the plan in `pairs`"));
        }
        slf.get().row(slf, 1)
    }

    /// With `positions`, how many tokens of the same document lie before each input token in its
    /// sample: a numpy array `[samples, tokens]` without a copy.
    #[getter]
    fn positions<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.get().row_of_positions(slf, 0)
    }

    /// With `positions`, the number of each input token's document in its sample, from 1; 0 is
    /// padding. Tokens attend to tokens of the same number.
    #[getter]
    fn documents<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.get().row_of_positions(slf, 1)
    }

    /// With `loss_weights`, the weight of each token in the loss, or of each label of pairs: a
    /// numpy array `[samples, tokens]` of `float32`, without a copy. Labels that are ignored and
    /// padding weigh 0.
    #[getter]
    fn loss_weights<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        static ASARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        if slf.get().form.weights.is_none() {
            let hint = "add `loss_weights` to the plan, and a file of them beside the dataset";
            return Err(invalid("the batches hold no loss weights", hint));
        }
        let weights = WeightsOf(slf.clone().unbind());
        ASARRAY.import(slf.py(), "numpy", "asarray")?.call1((weights,))
    }

    /// DLPack: a capsule of a read-only tensor in host memory, without a copy.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        slf: &Bound<'py, Self>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if stream.is_some() || dl_device.is_some_and(|device| device != dlpack::CPU) {
            return Err(PyBufferError::new_err(
                "a batch is in host memory: move it after taking it",
            ));
        }
        if copy == Some(true) {
            return Err(PyBufferError::new_err("a batch is not copied here: copy what takes it"));
        }
        Batch::capsule(slf, Part::Rows, max_version)
    }

    /// DLPack: the host.
    #[expect(clippy::unused_self, reason = "a method of the protocol")]
    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::CPU
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
        let batch = slf.get();
        let whole = batch.form.is_whole();
        let array = batch.array(Part::Rows);
        // SAFETY: `buffer` is valid (above); the pointers stay valid while the buffer lives,
        // because `obj` keeps the batch, a frozen object that does not move and owns shape, strides
        // and the view of the ring.
        unsafe { fill(&array, batch.form.token.2, whole, buffer, flags)? };
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

/// Fills a buffer with a read-only array, all but its owner. `is_whole` says whether its elements
/// lie one after the other.
///
/// # Safety
/// `buffer` is valid for writes. Its owner keeps the memory, the lengths and the strides of the
/// array in their places.
unsafe fn fill(
    array: &Array<'_>,
    format: &'static CStr,
    is_whole: bool,
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
    let in_rows = asked(ffi::PyBUF_STRIDES)
        && !asked(ffi::PyBUF_C_CONTIGUOUS)
        && !asked(ffi::PyBUF_ANY_CONTIGUOUS);
    if !in_rows && !is_whole {
        return Err(PyBufferError::new_err(
            "this trainer sees slices of samples, which do not lie one after the other: copy them",
        ));
    }
    let shaped = asked(ffi::PyBUF_ND);
    let when = |flag: c_int, pointer: *const isize| {
        if asked(flag) { pointer.cast_mut() } else { ptr::null_mut() }
    };
    let format = if asked(ffi::PyBUF_FORMAT) { format.as_ptr() } else { ptr::null() };
    let elements = array.shape.iter().product::<isize>();
    // SAFETY: the caller's. The format is static. Python writes through none of the pointers,
    // because the buffer is read-only.
    unsafe {
        (*buffer).buf = array.data.cast();
        (*buffer).len = elements * array.width as isize;
        (*buffer).itemsize = array.width as isize;
        (*buffer).readonly = 1;
        (*buffer).ndim = if shaped { array.shape.len() as c_int } else { 1 };
        (*buffer).format = format.cast_mut();
        (*buffer).shape = when(ffi::PyBUF_ND, array.shape.as_ptr());
        (*buffer).strides = when(ffi::PyBUF_STRIDES, array.strides.as_ptr());
        (*buffer).suboffsets = ptr::null_mut();
        (*buffer).internal = ptr::null_mut();
    }
    Ok(())
}

/// The loss weights of a batch, as an object with the buffer protocol.
#[pyclass(frozen, module = "dquant", name = "LossWeights")]
struct WeightsOf(Py<Batch>);

#[pymethods]
impl WeightsOf {
    // SAFETY: Python passes a `Py_buffer` that is valid for writes.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        buffer: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let batch = slf.get().0.get();
        let (whole, array) = (batch.form.is_whole(), batch.array(Part::Weights));
        // SAFETY: `buffer` is valid (above); the pointers stay valid while the buffer lives,
        // because `obj` keeps this object and thus the batch, a frozen object that does not move
        // and owns shape, strides and the view of the ring.
        unsafe { fill(&array, c"f", whole, buffer, flags)? };
        batch.held.buffers.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above; the reference that the buffer owns.
        unsafe { (*buffer).obj = slf.into_ptr() };
        Ok(())
    }

    // SAFETY: the buffer is not touched.
    unsafe fn __releasebuffer__(&self, _buffer: *mut ffi::Py_buffer) {
        self.0.get().held.buffers.fetch_sub(1, Ordering::Relaxed);
    }
}
