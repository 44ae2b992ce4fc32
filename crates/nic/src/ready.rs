//! Which of many descriptors are readable: an epoll instance with a name for each descriptor.
//!
//! A descriptor is reported until it was read empty, or, if it was added for its edges, once for each
//! time that something came.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};

/// Most descriptors that one look reports; the rest come with the next.
pub const MAX_READY: usize = 8;

/// See the module's text. Clones are handles to the same set.
#[derive(Clone, Debug)]
pub struct ReadySet {
    epoll: Arc<OwnedFd>,
}

impl ReadySet {
    /// An empty set.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn new() -> io::Result<ReadySet> {
        Ok(ReadySet { epoll: Arc::new(epoll::create(CreateFlags::CLOEXEC)?) })
    }

    /// Adds a descriptor under a name.
    ///
    /// # Errors
    /// When it is in the set already, cannot be waited for, or the user watches too many.
    pub fn add(&self, fd: BorrowedFd<'_>, name: u64) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(name), EventFlags::IN)?)
    }

    /// The same for a descriptor that nobody may read empty before the next look, or that others may
    /// write to for no reason.
    ///
    /// # Errors
    /// As [`add`](ReadySet::add).
    pub fn add_edges(&self, fd: BorrowedFd<'_>, name: u64) -> io::Result<()> {
        let flags = EventFlags::IN | EventFlags::ET;
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(name), flags)?)
    }

    /// Gives a descriptor of the set another name.
    ///
    /// # Errors
    /// When it is not in the set.
    pub fn rename(&self, fd: BorrowedFd<'_>, name: u64) -> io::Result<()> {
        Ok(epoll::modify(&self.epoll, fd, EventData::new_u64(name), EventFlags::IN)?)
    }

    /// Takes a descriptor out of the set. One that is closed, with all its duplicates, leaves by itself.
    ///
    /// # Errors
    /// When it is not in the set.
    pub fn remove(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, fd)?)
    }

    /// The names of descriptors to report, at most [`MAX_READY`] at a time; it does not wait.
    pub fn take(&self) -> impl Iterator<Item = u64> + use<> {
        const NONE: Event = Event { flags: EventFlags::empty(), data: EventData::new_u64(0) };
        let mut events = [NONE; MAX_READY];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        // An interrupted call is as good as one that found nothing.
        let found = epoll::wait(&self.epoll, &mut events[..], Some(&now)).unwrap_or(0);
        // Copied out of the structure, which is packed.
        events.into_iter().take(found).map(|event| { event.data }.u64())
    }
}

/// Readable while a descriptor of the set is.
impl AsFd for ReadySet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
