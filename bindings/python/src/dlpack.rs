//! A batch as a DLPack tensor: how frameworks take each other's arrays without a copy.
//!
//! Layouts are those of `dlpack.h`. A tensor owns what keeps its memory until its consumer has
//! called the deleter, from any thread. Consumers of version 1 are told that the memory is
//! read-only; older ones cannot be told.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

/// `kDLCPU`, and its number.
pub(crate) const CPU: (i32, i32) = (1, 0);

/// `DLPACK_FLAG_BITMASK_READ_ONLY`.
const READ_ONLY: u64 = 1;

/// Versions of the structures, major and minor.
const VERSION: (u32, u32) = (1, 0);

const TENSOR: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";

#[repr(C)]
struct Device {
    kind: i32,
    id: i32,
}

#[repr(C)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct ManagedVersioned {
    version: (u32, u32),
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    tensor: Tensor,
}

/// Most dimensions of an array.
pub(crate) const MAX_DIMENSIONS: usize = 4;

/// An array in host memory.
#[derive(Debug)]
pub(crate) struct Array<'a> {
    /// Its first element. A consumer may write there if the keeper of the capsule allows it.
    pub(crate) data: *mut u8,
    /// Lengths, at most [`MAX_DIMENSIONS`].
    pub(crate) shape: &'a [isize],
    /// In bytes, one for each length.
    pub(crate) strides: &'a [isize],
    /// Bytes of an element.
    pub(crate) width: usize,
    pub(crate) kind: Kind,
}

/// Kinds of elements, by their code.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
pub(crate) enum Kind {
    /// `kDLInt`.
    Signed = 0,
    /// `kDLUInt`.
    Unsigned = 1,
    /// `kDLFloat`.
    Float = 2,
    /// `kDLBfloat`.
    Brain = 4,
}

/// One of the two structures with what it points to. The structure comes first, at the address of
/// the whole.
#[repr(C)]
struct Owner<T> {
    managed: T,
    shape: [i64; MAX_DIMENSIONS],
    strides: [i64; MAX_DIMENSIONS],
    /// Keeps the memory.
    _keeper: Box<dyn Send>,
}

/// The capsule of a tensor over an array that stays in place while `keeper` lives. `max_version` is
/// the newest one that the consumer knows; it is told that the memory is read-only.
pub(crate) fn capsule<'py>(
    py: Python<'py>,
    array: &Array<'_>,
    keeper: Box<dyn Send>,
    max_version: Option<(u32, u32)>,
) -> PyResult<Bound<'py, PyAny>> {
    match max_version {
        Some((major, _)) if major >= VERSION.0 => {
            let managed = |tensor| ManagedVersioned {
                version: VERSION,
                context: ptr::null_mut(),
                deleter: Some(delete_versioned),
                flags: READ_ONLY,
                tensor,
            };
            let owner = own(array, keeper, managed, |managed| &mut managed.tensor);
            // SAFETY: `owner` is a fresh structure, which the capsule or its consumer deletes once.
            unsafe { into_capsule(py, owner, VERSIONED, drop_versioned) }
        }
        _ => {
            let managed =
                |tensor| Managed { tensor, context: ptr::null_mut(), deleter: Some(delete) };
            let owner = own(array, keeper, managed, |managed| &mut managed.tensor);
            // SAFETY: as above.
            unsafe { into_capsule(py, owner, TENSOR, drop_unversioned) }
        }
    }
}

/// A structure that owns `keeper`, at a fixed address.
fn own<T>(
    array: &Array<'_>,
    keeper: Box<dyn Send>,
    managed: impl FnOnce(Tensor) -> T,
    tensor_of: impl FnOnce(&mut T) -> &mut Tensor,
) -> *mut Owner<T> {
    let Array { data, width, kind, .. } = *array;
    let (mut shape, mut strides) = ([0; MAX_DIMENSIONS], [0; MAX_DIMENSIONS]);
    shape.iter_mut().zip(array.shape).for_each(|(to, from)| *to = *from as i64);
    strides.iter_mut().zip(array.strides).for_each(|(to, from)| *to = *from as i64 / width as i64);
    let tensor = Tensor {
        data: data.cast(),
        device: Device { kind: CPU.0, id: CPU.1 },
        ndim: array.shape.len() as i32,
        dtype: DataType { code: kind as u8, bits: 8 * width as u8, lanes: 1 },
        shape: ptr::null_mut(),
        strides: ptr::null_mut(),
        byte_offset: 0,
    };
    let owner = Owner { managed: managed(tensor), shape, strides, _keeper: keeper };
    let owner = Box::leak(Box::new(owner));
    let (shape, strides) = (owner.shape.as_mut_ptr(), owner.strides.as_mut_ptr());
    let tensor = tensor_of(&mut owner.managed);
    (tensor.shape, tensor.strides) = (shape, strides);
    owner
}

/// # Safety
/// `owner` comes from [`own`], and `destructor` deletes a structure of its kind that is still in
/// the capsule.
unsafe fn into_capsule<'py, T>(
    py: Python<'py>,
    owner: *mut Owner<T>,
    name: &'static CStr,
    destructor: unsafe extern "C" fn(*mut ffi::PyObject),
) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: the name is static; `managed` is the first field, so a consumer finds it at this
    // address.
    let made = unsafe { ffi::PyCapsule_New(owner.cast(), name.as_ptr(), Some(destructor)) };
    if made.is_null() {
        // SAFETY: no capsule took it.
        drop(unsafe { Box::from_raw(owner) });
        return Err(
            PyErr::take(py).unwrap_or_else(|| PyBufferError::new_err("no memory for a capsule"))
        );
    }
    // SAFETY: a new reference to a capsule.
    Ok(unsafe { Bound::from_owned_ptr(py, made) })
}

// SAFETY: a consumer calls it once with the structure that it took from a capsule.
unsafe extern "C" fn delete(managed: *mut Managed) {
    // SAFETY: as the comment above says.
    drop(unsafe { owner_of(managed) });
}

// SAFETY: as `delete`.
unsafe extern "C" fn delete_versioned(managed: *mut ManagedVersioned) {
    // SAFETY: as in `delete`.
    drop(unsafe { owner_of(managed) });
}

/// # Safety
/// `managed` was made by [`own`] and is not used after this.
unsafe fn owner_of<T>(managed: *mut T) -> Box<Owner<T>> {
    // SAFETY: by the caller, this is the first field of a boxed owner, at its address.
    unsafe { Box::from_raw(managed.cast::<Owner<T>>()) }
}

/// Deletes what nobody has taken: a consumer renames the capsule when it takes the tensor.
///
/// # Safety
/// Python passes a capsule of [`into_capsule`].
unsafe fn drop_capsule<T>(capsule: *mut ffi::PyObject, name: *const c_char) {
    // SAFETY: a capsule, and a static name.
    if unsafe { ffi::PyCapsule_IsValid(capsule, name) } == 1 {
        // SAFETY: as above; the pointer is that of `own`.
        drop(unsafe { owner_of(ffi::PyCapsule_GetPointer(capsule, name).cast::<T>()) });
    }
}

// SAFETY: Python calls it with the capsule that it was given for.
unsafe extern "C" fn drop_unversioned(capsule: *mut ffi::PyObject) {
    // SAFETY: as the comment above says.
    unsafe { drop_capsule::<Managed>(capsule, TENSOR.as_ptr()) }
}

// SAFETY: as `drop_unversioned`.
unsafe extern "C" fn drop_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: as above.
    unsafe { drop_capsule::<ManagedVersioned>(capsule, VERSIONED.as_ptr()) }
}
