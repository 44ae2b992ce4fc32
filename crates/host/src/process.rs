//! The number of this process without a system call.
//!
//! `getpid` enters the kernel each time, and a trainer asks several times for each batch whether it
//! is still the process that opened its stream. The number is kept on a page that the kernel clears
//! in a forked child.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

const PAGE_BYTES: usize = 4096;

/// The page; null until the first call. There is no lock, because a process may be forked while
/// another thread holds it.
static PAGE: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());

/// The word that the kernel clears on a fork; none where it has no such pages.
fn kept() -> Option<&'static AtomicU32> {
    let mut page = PAGE.load(Ordering::Acquire);
    if page.is_null() {
        page = make_page().ok()?;
        // Of two threads that make one at the same time, the second leaves its page unused.
        let first =
            PAGE.compare_exchange(ptr::null_mut(), page, Ordering::AcqRel, Ordering::Acquire);
        page = first.map_or_else(|first| first, |_| page);
    }
    // SAFETY: the page is mapped, zeroed, aligned and never unmapped; only this word of it is used.
    Some(unsafe { &*page })
}

fn make_page() -> Result<*mut AtomicU32, Errno> {
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
    let page = unsafe { mmap_anonymous(ptr::null_mut(), PAGE_BYTES, rights, MapFlags::PRIVATE) }?;
    // SAFETY: the page was just mapped, and nothing uses it yet.
    match unsafe { madvise(page, PAGE_BYTES, Advice::LinuxWipeOnFork) } {
        Ok(()) => Ok(page.cast()),
        Err(errno) => {
            // SAFETY: as above. An error would leave the page mapped, which harms nobody.
            let _ = unsafe { munmap(page, PAGE_BYTES) };
            Err(errno)
        }
    }
}

/// The number of this process: its own in a forked child, too.
pub fn id() -> u32 {
    let Some(kept) = kept() else {
        return std::process::id();
    };
    match kept.load(Ordering::Relaxed) {
        0 => {
            let id = std::process::id();
            kept.store(id, Ordering::Relaxed);
            id
        }
        id => id,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_has_its_own_number() {
        let before = id();
        assert_eq!(before, std::process::id());
        // SAFETY: the child calls only `id`, which takes no lock any more, `getpid` and `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(id() == before || id() != libc::getpid() as u32)) };
        }
        let mut status = -1;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!((status, id()), (0, before), "the child saw its parent's number");
    }
}
