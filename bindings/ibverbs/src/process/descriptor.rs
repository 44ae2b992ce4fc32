//! Descriptors that a program may close behind the library's back.
//!
//! Daemons close all descriptors they do not recognize, ours among them, and open others in their
//! places. Then there is nothing left to close: closing the number again would hit a file of the
//! program, or abort a debug build, whose standard library reports it as a bug.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};

use rustix::event::{EventfdFlags, eventfd};

use adapter::shared::Watched;

use super::errors::Outcome;

/// An owned descriptor, closed on drop unless the program has closed it.
pub(crate) struct Descriptor(Watched);

impl Descriptor {
    pub(crate) fn new(fd: OwnedFd) -> Outcome<Descriptor> {
        let watched = Watched::new(fd.as_fd())?;
        let _ = fd.into_raw_fd();
        Ok(Descriptor(watched))
    }

    /// An event descriptor that counts from zero.
    pub(crate) fn event(flags: EventfdFlags) -> Outcome<Descriptor> {
        Descriptor::new(eventfd(0, EventfdFlags::CLOEXEC | flags)?)
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open until this is dropped; a program that closes it makes calls fail, no more.
        unsafe { BorrowedFd::borrow_raw(self.0.fd) }
    }
}

impl AsRawFd for Descriptor {
    fn as_raw_fd(&self) -> RawFd {
        self.0.fd
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        if self.0.is_there() {
            // SAFETY: the number still refers to the file that this owns.
            unsafe { libc::close(self.0.fd) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The test's own duplicate shows whether a number was closed: other tests reuse numbers at
    /// once.
    #[test]
    fn only_what_is_still_ours_is_closed() {
        let (own, other) = std::os::unix::net::UnixStream::pair().unwrap();
        let (own, other) = (Descriptor::new(own.into()).unwrap(), OwnedFd::from(other));
        assert!(own.0.is_there());
        // What a program does that closes everything and opens a file of its own.
        // SAFETY: both numbers are open; the first gets another file.
        assert!(unsafe { libc::dup2(other.as_raw_fd(), own.as_raw_fd()) } >= 0);
        let number = own.as_raw_fd();
        assert!(!own.0.is_there());
        drop(own);
        // SAFETY: the number refers to the duplicate, which has no other owner.
        assert_eq!(unsafe { libc::close(number) }, 0, "it was left alone");
    }
}
