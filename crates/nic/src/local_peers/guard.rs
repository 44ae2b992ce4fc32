//! A word that the kernel marks when this process ends, or executes another program.
//!
//! It is a robust futex: the thread that holds it registers it with the kernel, which sets
//! `FUTEX_OWNER_DIED` in it when the thread ends, before the process's memory is gone. A thread
//! ends when its process is killed, and also when another thread executes a program. The thread has
//! no other robust futex: it is a thread of this library, so the list that libc keeps for it is
//! empty, and is replaced.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

#[repr(C)]
struct Node {
    next: *mut Node,
}

/// `struct robust_list_head` of linux/futex.h.
#[repr(C)]
struct Head {
    list: Node,
    futex_offset: libc::c_long,
    pending: *mut Node,
}

/// The list of the calling thread, with one futex. It is never freed: the kernel has its address.
pub(super) struct Guard(*mut Head);

impl Guard {
    /// Makes the calling thread, which must not use robust mutexes, the holder of `word`. The word
    /// must stay mapped until the guard is released or the thread ends.
    pub(super) fn hold(word: &AtomicU32) -> io::Result<Guard> {
        let node = Box::into_raw(Box::new(Node { next: std::ptr::null_mut() }));
        let distance = word.as_ptr() as i64 - node as i64;
        let list = Node { next: node };
        let pending = std::ptr::null_mut();
        let head =
            Box::into_raw(Box::new(Head { list, futex_offset: distance as libc::c_long, pending }));
        // SAFETY: both were just made, and are never freed. The list is circular: it ends at its
        // head.
        unsafe { (*node).next = head.cast() };
        let bytes = size_of::<Head>();
        // SAFETY: the head is valid for as long as the thread runs.
        let refused = unsafe { libc::syscall(libc::SYS_set_robust_list, head, bytes) } != 0;
        if refused {
            return Err(io::Error::last_os_error());
        }
        let tid = rustix::thread::gettid().as_raw_pid() as u32;
        word.store(tid, Ordering::Release);
        Ok(Guard(head))
    }

    /// Gives the word up, on the thread that holds it.
    pub(super) fn release(self, word: &AtomicU32) {
        word.store(0, Ordering::Release);
        // SAFETY: the head is never freed, and only this thread and, at its end, the kernel use it.
        unsafe { (*self.0).list.next = self.0.cast() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn the_kernel_marks_the_word_of_a_thread_that_ends_and_no_other() {
        for released in [false, true] {
            let word = Arc::new(AtomicU32::new(0));
            let held = Arc::clone(&word);
            let holder = std::thread::spawn(move || {
                let guard = Guard::hold(&held).expect("robust futexes");
                assert_ne!(held.load(Ordering::Acquire), 0);
                if released {
                    guard.release(&held);
                }
            });
            holder.join().expect("no panic");
            // The kernel wakes the joining thread by the same exit, after the list.
            let left = word.load(Ordering::Acquire);
            assert_eq!(left & 0x4000_0000 != 0, !released, "{left:#x}");
        }
    }
}
