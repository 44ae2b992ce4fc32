//! A forked child has a copy of the memory, but no progress thread, and must not send for the
//! parent's queue pairs. Calls with the parent's objects fail; the parent is not affected. A child
//! that opens a device gets its own engine: sockets, slot, thread, everything.
//!
//! Every process has a number, its generation, and objects are marked with it ([`generation`]). A
//! lock may have been held by a thread that the child does not have: [`ForkLock`]s are recreated
//! there. The parent's engines are never dropped in a child, as that would close descriptor numbers
//! that may have been reused by then.
//!
//! The child closes its copies of the sockets: otherwise they would keep receiving packets of the
//! shared port after the parent has ended. It leaves a number alone that refers to another file by
//! then.

use std::cell::UnsafeCell;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::fstat;

/// Descriptors that a child closes; more than this many stay open in children. A device has two
/// sockets for each of its addresses, at most 128, and one for each group.
const MAX_FDS: usize = 1024;

/// Never 0, which marks objects that do not exist.
static GENERATION: AtomicU32 = AtomicU32::new(1);
static SOCKETS: [Inherited; MAX_FDS] = [const { Inherited::new() }; MAX_FDS];

/// Room for a descriptor and the inode that it refers to.
struct Inherited {
    fd: AtomicI32,
    inode: AtomicU64,
}

/// No descriptor, and one that is being written.
const FREE: i32 = -1;
const CLAIMED: i32 = -2;

impl Inherited {
    const fn new() -> Inherited {
        Inherited { fd: AtomicI32::new(FREE), inode: AtomicU64::new(0) }
    }

    /// Takes a descriptor, if this is free.
    fn take(&self, fd: RawFd, inode: u64) -> bool {
        let claimed = self.fd.compare_exchange(FREE, CLAIMED, Ordering::Relaxed, Ordering::Relaxed);
        if claimed.is_ok() {
            self.inode.store(inode, Ordering::Relaxed);
            self.fd.store(fd, Ordering::Release);
        }
        claimed.is_ok()
    }

    /// In a child: closes its copy.
    fn close(&self) {
        let fd = self.fd.swap(FREE, Ordering::Acquire);
        if fd >= 0 && inode_of(fd) == Some(self.inode.load(Ordering::Relaxed)) {
            // SAFETY: the descriptor is the child's copy of a socket that it never uses.
            unsafe { libc::close(fd) };
        }
    }
}

/// What a descriptor refers to. Only a system call: a child of a program with threads may do
/// nothing else.
fn inode_of(fd: RawFd) -> Option<u64> {
    // SAFETY: the number is only asked about; one that is closed is an error.
    fstat(unsafe { BorrowedFd::borrow_raw(fd) }).ok().map(|found| found.st_ino)
}

/// The number of this process among its ancestors that had devices open.
#[inline]
pub(crate) fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// A lock that a child can take, even if it was held when the parent forked.
pub(crate) struct ForkLock<T>(UnsafeCell<Mutex<T>>);

// SAFETY: it is a mutex; it is replaced only in a child that has a single thread.
unsafe impl<T: Send> Sync for ForkLock<T> {}

impl<T> ForkLock<T> {
    pub(crate) const fn new(value: T) -> ForkLock<T> {
        ForkLock(UnsafeCell::new(Mutex::new(value)))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        // SAFETY: the mutex is replaced only while no other thread exists and nothing is locked.
        let mutex = unsafe { &*self.0.get() };
        mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// In a child: `adopt` changes the inherited value, unless a thread of the parent was changing
    /// it. Then it may be inconsistent, and `fresh` replaces it.
    ///
    /// # Safety
    /// No thread but the caller exists, and it holds no guard of this lock.
    pub(crate) unsafe fn renew(&self, fresh: T, adopt: impl FnOnce(&mut T)) {
        // SAFETY: as the caller promises.
        let mutex = unsafe { &mut *self.0.get() };
        let idle = mutex.try_lock().is_ok();
        if idle {
            adopt(mutex.get_mut().unwrap_or_else(PoisonError::into_inner));
        } else {
            std::mem::forget(std::mem::replace(mutex, Mutex::new(fresh)));
        }
    }
}

/// Children close these descriptors.
pub(crate) fn close_in_children(sockets: &[RawFd]) {
    for &socket in sockets {
        let Some(inode) = inode_of(socket) else { continue };
        if !SOCKETS.iter().any(|one| one.take(socket, inode)) {
            return;
        }
    }
}

/// A device was closed.
pub(crate) fn closed(sockets: &[RawFd]) {
    let known = |one: &&Inherited| sockets.contains(&one.fd.load(Ordering::Relaxed));
    SOCKETS.iter().filter(known).for_each(|one| one.fd.store(FREE, Ordering::Relaxed));
}

/// In a child, before anything else: starts a new generation, and closes its copies of the sockets.
pub(crate) fn begin_child() {
    // The number wraps after four thousand million forks in a row; 0 is skipped even then.
    let next = generation().checked_add(1).unwrap_or(1);
    GENERATION.store(next, Ordering::Relaxed);
    SOCKETS.iter().for_each(Inherited::close);
}
