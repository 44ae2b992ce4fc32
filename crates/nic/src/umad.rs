//! Management datagrams of InfiniBand through a `libibumad.so.3` that is found at run time.
//!
//! The library is loaded and not linked: most machines have none, and whoever simulates a fabric
//! (ibsim) puts another layer between it and the kernel, which sees the calls of the C library
//! alone. A library stays loaded until the process ends.
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

/// Management class "subnet management, directed route".
const DIRECTED_ROUTE: u8 = 0x81;

/// Bits of the methods that a subnet manager takes as requests: Get and Set; Trap and TrapRepress.
const GET_SET: u64 = 1 << 0x01 | 1 << 0x02;
const TRAPS: u64 = 1 << 0x05 | 1 << 0x07;

/// Those of a subnet administrator: also GetTable (0x12) and Delete (0x15).
const ADMINISTRATION: u64 = GET_SET | 1 << 0x12 | 1 << 0x15;

/// Classes of a subnet manager, their versions, and the requests that it takes: subnet management
/// by directed routes and by LIDs, and subnet administration.
const MANAGER_CLASSES: [(u8, c_int, u64); 3] =
    [(DIRECTED_ROUTE, 1, GET_SET), (0x01, 1, GET_SET | TRAPS), (0x03, 2, ADMINISTRATION)];

/// The LID of datagrams whose way is in themselves.
const PERMISSIVE_LID: u16 = 0xffff;

/// How long the kernel waits for the answer to a datagram before it forgets that there may be one.
/// Whoever sends repeats by a clock of their own, which is shorter.
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
    /// A datagram is of a class that was not registered.
    #[error("no agent for management class {0:#04x}")]
    Class(u8),
}

impl UmadError {
    /// Whether the device does not work any more, so that nothing can be sent or received. Other
    /// failed calls concern one datagram: the kernel refuses, for one, a response while an earlier
    /// one with its transaction ID is being sent.
    pub fn is_device_gone(&self) -> bool {
        let UmadError::Call { source, .. } = self else {
            return true;
        };
        matches!(source.raw_os_error(), Some(libc::ENODEV | libc::EIO | libc::EBADF))
    }
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
                        // SAFETY: this symbol of libibumad.so.3 is a function of this type, whose
                        // ABI is stable.
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
    issm_path "umad_get_issm_path" fn(*const c_char, c_int, *mut c_char, c_int) -> c_int;
    register "umad_register" fn(c_int, c_int, c_int, u8, *mut c_long) -> c_int;
    send "umad_send" fn(c_int, c_int, *mut c_void, c_int, c_int, c_int) -> c_int;
    recv "umad_recv" fn(c_int, *mut c_void, *mut c_int, c_int) -> c_int;
}

/// A port through which management datagrams are sent and received.
#[derive(Debug)]
pub struct Umad {
    functions: Functions,
    port: c_int,
    /// By management class.
    agents: Vec<(u8, c_int)>,
    /// As long as this file is open, the port says that a subnet manager runs here (IsSM).
    is_manager: Option<c_int>,
    /// Header and datagram. Words, since the structure is aligned.
    buffer: Box<[u64; (HEADER_BYTES + MAD_BYTES) / 8]>,
}

/// Where a datagram goes to, or came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// The LID; 0xffff where a directed route leads.
    pub lid: u16,
    /// The number of the queue pair.
    pub queue_pair: u32,
    /// Its key.
    pub key: u32,
    /// The service level.
    pub service_level: u8,
}

impl Address {
    /// By the route in the datagram.
    pub const DIRECTED: Address =
        Address { lid: PERMISSIVE_LID, queue_pair: 0, key: 0, service_level: 0 };
}

/// What was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// From whom.
    pub from: Address,
    /// Its bytes.
    pub mad: [u8; MAD_BYTES],
    /// It is one of this side, and came back since no response did.
    pub is_returned: bool,
}

impl Umad {
    /// Opens a port of a device for directed-route requests; `None` and 0 leave the choice to the
    /// library.
    ///
    /// # Errors
    /// When the library or the port cannot be used.
    pub fn open(library: &Path, device: Option<&str>, port: u8) -> Result<Umad, UmadError> {
        let (mut umad, _) = Umad::without_agents(library, device, port)?;
        umad.register(DIRECTED_ROUTE, 1, 0)?;
        Ok(umad)
    }

    /// Opens one for a subnet manager: it also gets the requests of others, and the port says that
    /// it is there.
    ///
    /// # Errors
    /// When the library or the port cannot be used, or another manager uses it.
    pub fn open_manager(library: &Path, device: Option<&str>, port: u8) -> Result<Umad, UmadError> {
        let (mut umad, name) = Umad::without_agents(library, device, port)?;
        for (class, version, methods) in MANAGER_CLASSES {
            umad.register(class, version, methods)?;
        }
        let pointer = name.as_ref().map_or(std::ptr::null(), |name| name.as_ptr());
        let mut path = [0; 256];
        let length = path.len() as c_int;
        // SAFETY: the name is null or ends with zero, and the path has room for as many bytes as
        // are said.
        let found =
            unsafe { (umad.functions.issm_path)(pointer, port.into(), path.as_mut_ptr(), length) };
        checked("umad_get_issm_path", found)?;
        // SAFETY: the library has written a text that ends with zero.
        let file = unsafe { libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
        if file < 0 {
            return Err(UmadError::Call { call: "open issm", source: io::Error::last_os_error() });
        }
        umad.is_manager = Some(file);
        Ok(umad)
    }

    fn without_agents(
        library: &Path,
        device: Option<&str>,
        port: u8,
    ) -> Result<(Umad, Option<CString>), UmadError> {
        let functions = Functions::load(library)?;
        let name = device.map(CString::new).transpose();
        let name = name.map_err(|_| UmadError::Library("a zero in the name of a device".into()))?;
        // SAFETY: no arguments, no conditions.
        checked("umad_init", unsafe { (functions.init)() })?;
        let pointer = name.as_ref().map_or(std::ptr::null(), |name| name.as_ptr());
        // SAFETY: the name is null, which means any device, or ends with zero and outlives the
        // call.
        let port = unsafe { (functions.open_port)(pointer, port.into()) };
        let port = checked("umad_open_port", port)?;
        let buffer = Box::new([0; (HEADER_BYTES + MAD_BYTES) / 8]);
        let umad = Umad { functions, port, agents: Vec::new(), is_manager: None, buffer };
        // Known once a port is open.
        // SAFETY: no arguments, no conditions.
        let before = unsafe { (functions.size)() };
        if before != HEADER_BYTES {
            return Err(UmadError::Layout(before));
        }
        Ok((umad, name))
    }

    /// Registers for the responses of a class, and for requests of these methods.
    fn register(&mut self, class: u8, version: c_int, methods: u64) -> Result<(), UmadError> {
        // 128 bits, in longs.
        let mut mask = [0_u64; 2];
        mask[0] = methods;
        let pointer = match methods {
            0 => std::ptr::null_mut(),
            _ => mask.as_mut_ptr().cast::<c_long>(),
        };
        // SAFETY: without a mask the agent gets responses alone; with one, it has 16 bytes, as the
        // library reads.
        let agent =
            unsafe { (self.functions.register)(self.port, class.into(), version, 0, pointer) };
        self.agents.push((class, checked("umad_register", agent)?));
        Ok(())
    }

    /// Sends a datagram by its directed route.
    ///
    /// # Errors
    /// When the kernel does not take it.
    pub fn send(&mut self, mad: &[u8; MAD_BYTES]) -> Result<(), UmadError> {
        self.send_to(&Address::DIRECTED, mad, MAD_BYTES)
    }

    /// Sends the first `len` bytes of a datagram.
    ///
    /// # Errors
    /// When the kernel does not take it, or its class was not registered.
    pub fn send_to(
        &mut self,
        to: &Address,
        mad: &[u8; MAD_BYTES],
        len: usize,
    ) -> Result<(), UmadError> {
        let [_, class, _, method, ..] = *mad;
        let agent = self.agents.iter().find(|(registered, _)| *registered == class);
        let (_, agent) = *agent.ok_or(UmadError::Class(class))?;
        self.buffer.fill(0);
        let words = mad.as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word));
        for (place, word) in self.buffer[HEADER_BYTES / 8..].iter_mut().zip(words) {
            *place = word;
        }
        let buffer = self.buffer.as_mut_ptr().cast();
        // No response comes to a response, nor to TrapRepress.
        let is_answered = method & 0x80 == 0 && method != 0x07;
        let patience = if is_answered { KERNEL_PATIENCE.as_millis() as c_int } else { 0 };
        // SAFETY: the buffer holds a header of the library's size, as was checked, and a datagram
        // behind it.
        let sent = unsafe {
            let (lid, pair) = (to.lid.into(), to.queue_pair as c_int);
            let (level, key) = (to.service_level.into(), to.key as c_int);
            (self.functions.set_addr)(buffer, lid, pair, level, key);
            let length = len.min(MAD_BYTES) as c_int;
            (self.functions.send)(self.port, agent, buffer, length, patience, 0)
        };
        checked("umad_send", sent).map(drop)
    }

    /// The next datagram, if one comes in this time. The kernel also gives back those whose answer
    /// did not come.
    ///
    /// # Errors
    /// When the device is gone.
    pub fn receive(&mut self, timeout: Duration) -> Result<Option<[u8; MAD_BYTES]>, UmadError> {
        Ok(self.receive_from(timeout)?.map(|received| received.mad))
    }

    /// The same, and from whom.
    ///
    /// # Errors
    /// When the device is gone.
    pub fn receive_from(&mut self, timeout: Duration) -> Result<Option<Received>, UmadError> {
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
        let mut bytes = [0; HEADER_BYTES + MAD_BYTES];
        for (place, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(self.buffer.iter()) {
            *place = word.to_ne_bytes();
        }
        let mut mad = [0; MAD_BYTES];
        mad.copy_from_slice(&bytes[HEADER_BYTES..]);
        let word = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        // `struct ib_user_mad_hdr`: status at 4; queue pair, key, LID and level at 20, 24, 28, 30
        // in network order.
        let from = Address {
            lid: u16::from_be_bytes([bytes[28], bytes[29]]),
            queue_pair: u32::from_be_bytes(word(20)),
            key: u32::from_be_bytes(word(24)),
            service_level: bytes[30],
        };
        Ok(Some(Received { from, mad, is_returned: u32::from_ne_bytes(word(4)) != 0 }))
    }
}

impl Drop for Umad {
    fn drop(&mut self) {
        if let Some(file) = self.is_manager {
            // SAFETY: a file that was opened here and is closed once.
            unsafe { libc::close(file) };
        }
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
        // SAFETY: the name ends with zero. Loading runs the initialisers of a library that the user
        // has chosen to run.
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
    fn a_datagram_that_is_refused_does_not_end_the_device() {
        let call = |number| UmadError::Call {
            call: "umad_send",
            source: io::Error::from_raw_os_error(number),
        };
        assert!(!call(libc::EINVAL).is_device_gone() && !call(libc::ENOMEM).is_device_gone());
        assert!(call(libc::ENODEV).is_device_gone() && call(libc::EIO).is_device_gone());
    }

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
