//! Descriptors that a program may close behind the library's back.

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use rustix::fs::fstat;
use rustix::io::Errno;

/// A descriptor's number, and the file it referred to.
#[derive(Clone, Copy, Debug)]
pub struct Watched {
    /// Its number.
    pub fd: RawFd,
    file: (u64, u64),
}

impl Watched {
    /// Remembers the file that a number refers to.
    ///
    /// # Errors
    /// When the descriptor is closed.
    pub fn new(fd: BorrowedFd<'_>) -> Result<Watched, Errno> {
        Ok(Watched { fd: fd.as_raw_fd(), file: file_of(fd)? })
    }

    /// Whether the program has left it open, as far as can be determined: all event descriptors
    /// look the same.
    pub fn is_there(&self) -> bool {
        // SAFETY: the number is only asked about; one that is closed is an error.
        file_of(unsafe { BorrowedFd::borrow_raw(self.fd) }) == Ok(self.file)
    }
}

fn file_of(fd: BorrowedFd<'_>) -> Result<(u64, u64), Errno> {
    let found = fstat(fd)?;
    Ok((found.st_dev, found.st_ino))
}
