//! Management datagrams of InfiniBand through a `libibumad.so.3` that is found at run time.
//!
//! The library is loaded and not linked: most machines have none, and whoever simulates a fabric (ibsim) puts another
//! layer between it and the kernel, which sees the calls of the C library alone. A library stays loaded until the
//! process ends.
//!
//! What the datagrams say belongs to the crate `fabric`.

use std::ffi::{CString, c_char, c_int, c_long, c_void};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use thiserror::Error;

/// The name under which the dynamic linker finds the system's library.
pub const DEFAULT_LIBRARY: &str = "libibumad.so.3";

/// Bytes of a datagram.
pub const MAD_BYTES: usize = 256;

/// Bytes of the structure before it: `struct ib_user_mad` of the kernel's `ib_user_mad.h`.
const HEADER_BYTES: usize = 64;

/// Management class "subnet management, directed route", and its version.
const DIRECTED_ROUTE: (c_int, c_int) = (0x81, 1);

/// The LID of datagrams whose way is in themselves.
const PERMISSIVE_LID: c_int = 0xffff;

/// How long the kernel waits for the answer to a datagram before it forgets that there may be one. Whoever sends
/// repeats by a clock of their own, which is shorter.
const KERNEL_PATIENCE: Duration = Duration::from_secs(1);

/// Why datagrams cannot be sent or received.
#[derive(Debug, Error)]
pub enum UmadError {
    /// The dynamic linker did not load the library.
    #[error("{0}")]
    Library(String),
    /// It lacks a function.
    #[error("the library does not export {0}")]
    Symbol(&'static str),
    /// A function failed.
    #[error("{call}: {source}")]
    Call {
        /// The function.
        call: &'static str,
        /// Its error.
        source: io::Error,
    },
    /// The library's structure is not the kernel's.
    #[error("the library puts {0} bytes before a datagram, not {HEADER_BYTES}")]
    Layout(usize),
}

/// Declares the functions that are used, by their symbols and their types in `umad.h`.
macro_rules! functions {
    ($( $name:ident $symbol:literal fn($($arg:ty),*) -> $out:ty; )+) => {
        #[derive(Clone, Copy, Debug)]
        struct Functions {
            $( $name: unsafe extern "C" fn($($arg),*) -> $out, )+
        }

        impl Functions {
            fn resolve(handle: *mut c_void) -> Result<Functions, UmadError> {
                Ok(Functions { $(
                    $name: {
                        let symbol = symbol(handle, $symbol)?;
                        // SAFETY: this symbol of libibumad.so.3 is a function of this type, whose ABI is stable.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> $out>(symbol)
                        }
                    },
                )+ })
            }
        }
    };
}

functions! {
    init "umad_init" fn() -> c_int;
    open_port "umad_open_port" fn(*const c_char, c_int) -> c_int;
    close_port "umad_close_port" fn(c_int) -> c_int;
    size "umad_size" fn() -> usize;
    set_addr "umad_set_addr" fn(*mut c_void, c_int, c_int, c_int, c_int) -> c_int;
    register "umad_register" fn(c_int, c_int, c_int, u8, *mut c_long) -> c_int;
    send "umad_send" fn(c_int, c_int, *mut c_void, c_int, c_int, c_int) -> c_int;
    recv "umad_recv" fn(c_int, *mut c_void, *mut c_int, c_int) -> c_int;
}

/// A port through which directed-route datagrams of subnet management are sent and answered.
#[derive(Debug)]
pub struct Umad {
    functions: Functions,
    port: c_int,
    agent: c_int,
    /// Header and datagram. Words, since the structure is aligned.
    buffer: Box<[u64; (HEADER_BYTES + MAD_BYTES) / 8]>,
}

impl Umad {
    /// Opens a port of a device; `None` and 0 leave the choice to the library.
    ///
    /// # Errors
    /// When the library or the port cannot be used.
    pub fn open(library: &Path, device: Option<&str>, port: u8) -> Result<Umad, UmadError> {
        let functions = Functions::load(library)?;
        let name = device.map(CString::new).transpose();
        let name = name.map_err(|_| UmadError::Library("a zero in the name of a device".into()))?;
        // SAFETY: no arguments, no conditions.
        checked("umad_init", unsafe { (functions.init)() })?;
        let pointer = name.as_ref().map_or(std::ptr::null(), |name| name.as_ptr());
        // SAFETY: the name is null, which means any device, or ends with zero and outlives the call.
        let port = unsafe { (functions.open_port)(pointer, port.into()) };
        let port = checked("umad_open_port", port)?;
        let buffer = Box::new([0; (HEADER_BYTES + MAD_BYTES) / 8]);
        let mut umad = Umad { functions, port, agent: -1, buffer };
        // Known once a port is open.
        // SAFETY: no arguments, no conditions.
        let before = unsafe { (functions.size)() };
        if before != HEADER_BYTES {
            return Err(UmadError::Layout(before));
        }
        let (class, version) = DIRECTED_ROUTE;
        // SAFETY: without a mask the agent gets answers alone.
        let agent =
            unsafe { (functions.register)(umad.port, class, version, 0, std::ptr::null_mut()) };
        umad.agent = checked("umad_register", agent)?;
        Ok(umad)
    }

    /// Sends a datagram.
    ///
    /// # Errors
    /// When the kernel does not take it.
    pub fn send(&mut self, mad: &[u8; MAD_BYTES]) -> Result<(), UmadError> {
        self.buffer.fill(0);
        let words = mad.as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word));
        for (place, word) in self.buffer[HEADER_BYTES / 8..].iter_mut().zip(words) {
            *place = word;
        }
        let buffer = self.buffer.as_mut_ptr().cast();
        let patience = KERNEL_PATIENCE.as_millis() as c_int;
        // SAFETY: the buffer holds a header of the library's size, as was checked, and a datagram behind it.
        let sent = unsafe {
            (self.functions.set_addr)(buffer, PERMISSIVE_LID, 0, 0, 0);
            let length = MAD_BYTES as c_int;
            (self.functions.send)(self.port, self.agent, buffer, length, patience, 0)
        };
        checked("umad_send", sent).map(drop)
    }

    /// The next datagram, if one comes in this time. The kernel also gives back those whose answer did not come.
    ///
    /// # Errors
    /// When the device is gone.
    pub fn receive(&mut self, timeout: Duration) -> Result<Option<[u8; MAD_BYTES]>, UmadError> {
        self.buffer.fill(0);
        let mut length = MAD_BYTES as c_int;
        // 0 would wait for ever.
        let timeout = timeout.as_millis().clamp(1, 60_000) as c_int;
        let buffer = self.buffer.as_mut_ptr().cast();
        // SAFETY: the buffer has room for a header and as many bytes as `length` says.
        let received =
            unsafe { (self.functions.recv)(self.port, buffer, &raw mut length, timeout) };
        match checked("umad_recv", received) {
            Ok(_) => {}
            Err(UmadError::Call { source, .. })
                if matches!(
                    source.raw_os_error(),
                    Some(libc::ETIMEDOUT | libc::EINTR | libc::EAGAIN)
                ) =>
            {
                return Ok(None);
            }
            Err(error) => return Err(error),
        }
        let mut mad = [0; MAD_BYTES];
        let words = &self.buffer[HEADER_BYTES / 8..];
        for (place, word) in mad.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *place = word.to_ne_bytes();
        }
        Ok(Some(mad))
    }
}

impl Drop for Umad {
    fn drop(&mut self) {
        // SAFETY: a port that was opened and is closed once. Its agents end with it.
        unsafe { (self.functions.close_port)(self.port) };
    }
}

/// The library's functions return a negative number of an error.
fn checked(call: &'static str, returned: c_int) -> Result<c_int, UmadError> {
    match returned {
        0.. => Ok(returned),
        error => {
            // What the library calls EIO is an error of the system, whose number says more.
            let source = match error.wrapping_neg() {
                libc::EIO => io::Error::last_os_error(),
                number => io::Error::from_raw_os_error(number),
            };
            Err(UmadError::Call { call, source })
        }
    }
}

impl Functions {
    fn load(library: &Path) -> Result<Functions, UmadError> {
        let name = CString::new(library.as_os_str().as_bytes());
        let name = name.map_err(|_| UmadError::Library("a zero in a path".into()))?;
        // SAFETY: the name ends with zero. Loading runs the initialisers of a library that the user has chosen to run.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            let why = format!("{} cannot be loaded", library.display());
            return Err(UmadError::Library(why));
        }
        Functions::resolve(handle)
    }
}

fn symbol(handle: *mut c_void, name: &'static str) -> Result<*mut c_void, UmadError> {
    let text = CString::new(name).map_err(|_| UmadError::Symbol(name))?;
    // SAFETY: a handle of a loaded library, and a name that ends with zero.
    let found = unsafe { libc::dlsym(handle, text.as_ptr()) };
    if found.is_null() { Err(UmadError::Symbol(name)) } else { Ok(found) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_none_is_refused() {
        let missing = Umad::open(Path::new("/no/such/libibumad.so"), None, 0);
        assert!(matches!(missing, Err(UmadError::Library(_))), "{missing:?}");
        let other = Umad::open(Path::new("libc.so.6"), None, 0);
        assert!(matches!(other, Err(UmadError::Symbol("umad_init"))), "{other:?}");
    }

    #[test]
    fn errors_are_negative_numbers() {
        assert!(matches!(checked("f", 0), Ok(0)));
        let error = checked("f", -libc::ENODEV).expect_err("negative").to_string();
        assert_eq!(error, "f: No such device (os error 19)");
        assert!(checked("f", c_int::MIN).is_err());
    }
}
