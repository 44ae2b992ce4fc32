//! A `libibverbs.so.1` that is found at run time, and the functions it exports.
//!
//! A library stays loaded until the process ends: its threads and registered handlers would not
//! survive unloading.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use thiserror::Error;

use crate::abi::*;

/// The name under which the dynamic linker finds the system's library.
pub const DEFAULT_LIBRARY: &str = "libibverbs.so.1";

/// Why there is no device. The caller names the library.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The dynamic linker did not load it.
    #[error("{0}")]
    Library(String),
    /// It is not a verbs library, or too old.
    #[error("the library does not export {0}")]
    Symbol(&'static str),
    /// The opened device lacks an operation that is called through its context.
    #[error("device {device} has no operation {operation}")]
    Operation {
        /// The device.
        device: String,
        /// The entry of `context->ops`.
        operation: &'static str,
    },
    /// It has no device of this name.
    #[error("there is no device {wanted}; the library has {found}")]
    NoDevice {
        /// The requested name.
        wanted: String,
        /// The available names, separated by blanks, or "none".
        found: String,
    },
    /// A call that opens the device failed.
    #[error("{call}: {source}")]
    Call {
        /// The function.
        call: &'static str,
        /// Its error.
        source: std::io::Error,
    },
    /// The port has no address that RoCEv2 packets can use.
    #[error("device {0} has no RoCEv2 address")]
    NoAddress(String),
}

impl LoadError {
    /// `errno` as the error of `call`.
    pub(super) fn last(call: &'static str) -> LoadError {
        LoadError::Call { call, source: std::io::Error::last_os_error() }
    }
}

/// Declares the exported functions that are used, by their symbols.
macro_rules! functions {
    ($( $name:ident $symbol:literal fn($($arg:ty),*) $(-> $out:ty)?; )+) => {
        /// The functions of one library.
        #[derive(Clone, Copy, Debug)]
        pub(super) struct Functions {
            $( pub(super) $name: unsafe extern "C" fn($($arg),*) $(-> $out)?, )+
        }

        impl Functions {
            fn resolve(handle: *mut c_void) -> Result<Functions, LoadError> {
                Ok(Functions { $(
                    $name: {
                        let symbol = symbol(handle, $symbol, concat!($symbol, "\0"))?;
                        // SAFETY: the symbol is that function of the verbs, whose type is part of
                        // the stable ABI of libibverbs.so.1 and written down in verbs.h.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($arg),*) $(-> $out)?,
                            >(symbol)
                        }
                    },
                )+ })
            }

            /// Functions of which none can be called, for a fake to replace those that it has.
            #[cfg(test)]
            pub(super) fn absent() -> Functions {
                extern "C" fn absent() {
                    std::process::abort();
                }
                Functions { $(
                    // SAFETY: whatever arguments it is called with, it does not return.
                    $name: unsafe {
                        std::mem::transmute::<
                            extern "C" fn(),
                            unsafe extern "C" fn($($arg),*) $(-> $out)?,
                        >(absent)
                    },
                )+ }
            }
        }
    };
}

functions! {
    get_device_list "ibv_get_device_list" fn(*mut c_int) -> *mut *mut ibv_device;
    free_device_list "ibv_free_device_list" fn(*mut *mut ibv_device);
    get_device_name "ibv_get_device_name" fn(*mut ibv_device) -> *const c_char;
    open_device "ibv_open_device" fn(*mut ibv_device) -> *mut ibv_context;
    close_device "ibv_close_device" fn(*mut ibv_context) -> c_int;
    query_device "ibv_query_device" fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    query_port "ibv_query_port" fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
    query_gid_ex "_ibv_query_gid_ex"
        fn(*mut ibv_context, u32, u32, *mut ibv_gid_entry, u32, usize) -> c_int;
    alloc_pd "ibv_alloc_pd" fn(*mut ibv_context) -> *mut ibv_pd;
    dealloc_pd "ibv_dealloc_pd" fn(*mut ibv_pd) -> c_int;
    reg_mr "ibv_reg_mr" fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    rereg_mr "ibv_rereg_mr"
        fn(*mut ibv_mr, c_int, *mut ibv_pd, *mut c_void, usize, c_int) -> c_int;
    dereg_mr "ibv_dereg_mr" fn(*mut ibv_mr) -> c_int;
    create_comp_channel "ibv_create_comp_channel" fn(*mut ibv_context) -> *mut ibv_comp_channel;
    destroy_comp_channel "ibv_destroy_comp_channel" fn(*mut ibv_comp_channel) -> c_int;
    create_cq "ibv_create_cq"
        fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    resize_cq "ibv_resize_cq" fn(*mut ibv_cq, c_int) -> c_int;
    destroy_cq "ibv_destroy_cq" fn(*mut ibv_cq) -> c_int;
    get_cq_event "ibv_get_cq_event"
        fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    ack_cq_events "ibv_ack_cq_events" fn(*mut ibv_cq, u32);
    create_srq "ibv_create_srq" fn(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq;
    modify_srq "ibv_modify_srq" fn(*mut ibv_srq, *mut ibv_srq_attr, c_int) -> c_int;
    query_srq "ibv_query_srq" fn(*mut ibv_srq, *mut ibv_srq_attr) -> c_int;
    destroy_srq "ibv_destroy_srq" fn(*mut ibv_srq) -> c_int;
    create_qp "ibv_create_qp" fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    modify_qp "ibv_modify_qp" fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    query_qp "ibv_query_qp"
        fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
    destroy_qp "ibv_destroy_qp" fn(*mut ibv_qp) -> c_int;
    create_ah "ibv_create_ah" fn(*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah;
    destroy_ah "ibv_destroy_ah" fn(*mut ibv_ah) -> c_int;
    attach_mcast "ibv_attach_mcast" fn(*mut ibv_qp, *const ibv_gid, u16) -> c_int;
    detach_mcast "ibv_detach_mcast" fn(*mut ibv_qp, *const ibv_gid, u16) -> c_int;
    get_async_event "ibv_get_async_event" fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
    ack_async_event "ibv_ack_async_event" fn(*mut ibv_async_event);
}

/// A verbs library.
#[derive(Clone, Copy, Debug)]
pub struct Library {
    pub(super) functions: Functions,
}

impl Library {
    /// Loads the library at `path`; a bare name is searched for like any shared library.
    ///
    /// # Errors
    /// When it cannot be loaded, or lacks a function.
    pub fn load(path: &Path) -> Result<Library, LoadError> {
        let bytes = path.as_os_str().as_bytes();
        let name =
            CString::new(bytes).map_err(|_| LoadError::Library("a zero in a path".into()))?;
        // SAFETY: the name ends with zero. Loading runs the initialisers of a library that the user
        // has chosen to run.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(LoadError::Library(last_linker_error(path)));
        }
        Ok(Library { functions: Functions::resolve(handle)? })
    }

    /// The names of its devices.
    ///
    /// # Errors
    /// When the library cannot list them.
    pub fn devices(&self) -> Result<Vec<String>, LoadError> {
        self.with_devices(|list| list.iter().map(|&device| self.name_of(device)).collect())
    }

    /// Opens the device of this name.
    pub(super) fn open(&self, wanted: &str) -> Result<*mut ibv_context, LoadError> {
        self.with_devices(|list| {
            let Some(&device) = list.iter().find(|&&device| self.name_of(device) == wanted) else {
                let names: Vec<_> = list.iter().map(|&device| self.name_of(device)).collect();
                let found = if names.is_empty() { "none".into() } else { names.join(" ") };
                return Err(LoadError::NoDevice { wanted: wanted.into(), found });
            };
            // SAFETY: a device of a list that was not freed yet.
            let context = unsafe { (self.functions.open_device)(device) };
            let is_open = !context.is_null();
            is_open.then_some(context).ok_or_else(|| LoadError::last("ibv_open_device"))
        })?
    }

    fn with_devices<T>(&self, look: impl FnOnce(&[*mut ibv_device]) -> T) -> Result<T, LoadError> {
        let mut count = 0;
        // SAFETY: the function writes the number of devices to the given place.
        let list = unsafe { (self.functions.get_device_list)(&raw mut count) };
        if list.is_null() {
            return Err(LoadError::last("ibv_get_device_list"));
        }
        let len = usize::try_from(count).unwrap_or(0);
        // SAFETY: the list has that many devices, and a null pointer behind them.
        let found = look(unsafe { std::slice::from_raw_parts(list, len) });
        // SAFETY: the list came from `get_device_list`, and nobody keeps its devices.
        unsafe { (self.functions.free_device_list)(list) };
        Ok(found)
    }

    fn name_of(&self, device: *mut ibv_device) -> String {
        // SAFETY: a device of a list that was not freed yet; its name ends with zero.
        let name = unsafe { CStr::from_ptr((self.functions.get_device_name)(device)) };
        name.to_string_lossy().into_owned()
    }
}

fn symbol(
    handle: *mut c_void,
    name: &'static str,
    with_zero: &'static str,
) -> Result<*mut c_void, LoadError> {
    // SAFETY: the name ends with zero, and the library is loaded for ever.
    let symbol = unsafe { libc::dlsym(handle, with_zero.as_ptr().cast()) };
    if symbol.is_null() { Err(LoadError::Symbol(name)) } else { Ok(symbol) }
}

/// The dynamic linker's message, without the path at its beginning.
fn last_linker_error(path: &Path) -> String {
    // SAFETY: takes nothing; what it returns holds until this thread's next call.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "it cannot be loaded".into();
    }
    // SAFETY: not null, so a text that ends with zero.
    let text = unsafe { CStr::from_ptr(text) };
    let text = OsStr::from_bytes(text.to_bytes()).to_string_lossy();
    let prefix = format!("{}: ", path.display());
    text.strip_prefix(&prefix).unwrap_or(&text).to_owned()
}
