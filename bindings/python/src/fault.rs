//! What a process says that ends because it wrote to a batch.
//!
//! Batches are mapped read-only, and tensors of older consumers cannot be told. A write to one is a
//! fault that ends the process; here it first prints one line that names the batch and what to do.
//! A private mapping in its place would be no remedy: a page that was written would show the
//! trainer the same tokens for ever. Everything else is left to the handler that was there before.

use std::fmt::{self, Write as _};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Batches of this process that are known, by where they lie. Of more the oldest are forgotten.
const KNOWN: usize = 1_024;

/// Where a batch lies, and its number. Empty where there is none.
struct Entry {
    address: AtomicUsize,
    bytes: AtomicUsize,
    number: AtomicU64,
}

static BATCHES: [Entry; KNOWN] = [const {
    Entry { address: AtomicUsize::new(0), bytes: AtomicUsize::new(0), number: AtomicU64::new(0) }
}; KNOWN];

/// Entries used so far.
static USED: AtomicUsize = AtomicUsize::new(0);

/// A batch that is known while this lives.
#[derive(Debug)]
pub(crate) struct Known {
    index: usize,
    address: usize,
}

impl Known {
    /// Notes where a batch lies.
    pub(crate) fn new(bytes: &[u8], number: u64) -> Known {
        let index = USED.fetch_add(1, Ordering::Relaxed) % KNOWN;
        let (entry, address) = (&BATCHES[index], bytes.as_ptr() as usize);
        // Nothing lies at length 0 while the entry changes.
        entry.bytes.store(0, Ordering::Relaxed);
        entry.number.store(number, Ordering::Relaxed);
        entry.address.store(address, Ordering::Relaxed);
        entry.bytes.store(bytes.len(), Ordering::Release);
        Known { index, address }
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        let entry = &BATCHES[self.index];
        // Not what a later batch has noted there.
        if entry.address.load(Ordering::Relaxed) == self.address {
            entry.bytes.store(0, Ordering::Relaxed);
        }
    }
}

/// The number of the batch at an address.
fn batch_at(address: usize) -> Option<u64> {
    let found = BATCHES.iter().find(|entry| {
        let bytes = entry.bytes.load(Ordering::Acquire);
        address.wrapping_sub(entry.address.load(Ordering::Relaxed)) < bytes
    });
    found.map(|entry| entry.number.load(Ordering::Relaxed))
}

/// The handler that was there before, as it was returned to `install`.
static mut BEFORE: MaybeUninit<libc::sigaction> = MaybeUninit::uninit();

/// Watches for writes to batches from now on.
pub(crate) fn watch() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // SAFETY: a structure of numbers and pointers, for which zeros are legal.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = on_fault as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: both structures are valid. `BEFORE` is written here alone, once, and the handler
        // that reads it does not run before this call has filled it, except for a fault of this
        // very call.
        unsafe { libc::sigaction(libc::SIGSEGV, &raw const action, (&raw mut BEFORE).cast()) };
    });
}

/// Prints a line if the fault is a write to a batch, and lets the fault happen again under the
/// handler that was there.
extern "C" fn on_fault(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the system passes a valid structure, whose address is set for this signal.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    if code == SEGV_ACCERR
        && let Some(number) = batch_at(address)
    {
        let mut line = Line { bytes: [0; 256], len: 0 };
        // A line has room for it, and what has not is cut off.
        let _ = writeln!(
            line,
            "dquant: batch {number} was written to, which is read-only memory of the ring: this process ends. \
             batch.torch(copy=True), batch.numpy(copy=True) return memory that may be written"
        );
        // SAFETY: the bytes are valid; `write` may be called in a handler.
        unsafe { libc::write(libc::STDERR_FILENO, line.bytes.as_ptr().cast(), line.len) };
    }
    // SAFETY: `watch` has filled it. The instruction runs again after this, and faults under the
    // earlier handler, which is the default one, or Python's `faulthandler`. That ends the
    // watching: a process that goes on has a handler of its own.
    unsafe { libc::sigaction(libc::SIGSEGV, (&raw const BEFORE).cast(), ptr::null_mut()) };
    if code <= 0 {
        // Nothing faults again: somebody sent the signal, and has to send it to the earlier
        // handler. SAFETY: `raise` may be called in a handler; the signal is blocked until this one
        // returns.
        unsafe { libc::raise(libc::SIGSEGV) };
    }
}

/// An access that the rights of the page do not allow.
const SEGV_ACCERR: libc::c_int = 2;

/// Text in a buffer of its own: a handler must not allocate.
struct Line {
    bytes: [u8; 256],
    len: usize,
}

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = &mut self.bytes[self.len..];
        let kept = text.len().min(room.len());
        room[..kept].copy_from_slice(&text.as_bytes()[..kept]);
        self.len += kept;
        Ok(())
    }
}
