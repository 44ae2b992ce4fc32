//! A mapped file whose content is atomics: the unsafe code of this folder.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// A mapped file of one page whose content is atomics.
#[derive(Debug)]
pub(super) struct Mapped<T>(NonNull<T>);

// SAFETY: what is behind the pointer is atomic, and mapped for as long as the value lives.
unsafe impl<T: Sync> Send for Mapped<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Mapped<T> {}

impl<T> Mapped<T> {
    /// Maps a file, which has to have the size of `T`: `Rates` or `Buckets`.
    pub(super) fn new(file: &File, access: ProtFlags) -> io::Result<Mapped<T>> {
        if file.metadata()?.len() != size_of::<T>() as u64 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a file of another size"));
        }
        let (at, flags) = (std::ptr::null_mut(), MapFlags::SHARED);
        // SAFETY: a new mapping. Those who may write the file are trusted not to cut it, as the
        // text of the module above says.
        let at = unsafe { mmap(at, size_of::<T>(), access, flags, file.as_fd(), 0)? };
        let mapped = Mapped(NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?);
        // SAFETY: the mapping just made. A forked child has no use for it.
        unsafe { madvise(at, size_of::<T>(), Advice::LinuxDontFork)? };
        Ok(mapped)
    }

    pub(super) fn get(&self) -> &T {
        // SAFETY: a page is mapped at the pointer until this is dropped, and is as large and
        // aligned as `T`, of which any bytes are a valid value: it has atomics only.
        unsafe { self.0.as_ref() }
    }
}

impl<T> Drop for Mapped<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping is its own, and nothing refers to it any more.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), size_of::<T>()) };
    }
}
