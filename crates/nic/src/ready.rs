//! Which of many descriptors are readable: an epoll instance with a name for each descriptor.
//!
//! A descriptor is reported until it has been read empty (level-triggered), or, if added
//! edge-triggered, once for each time that input arrives.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};

/// Most descriptors reported by one call; the rest come with the next.
pub const MAX_READY: usize = 8;

/// See the module's text. Clones are handles to the same set.
#[derive(Clone, Debug)]
pub struct ReadySet {
    epoll: Arc<OwnedFd>,
    /// Whether an edge-triggered descriptor was ever added.
    has_edges: Arc<AtomicBool>,
}

impl ReadySet {
    /// An empty set.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn new() -> io::Result<ReadySet> {
        let epoll = Arc::new(epoll::create(CreateFlags::CLOEXEC)?);
        Ok(ReadySet { epoll, has_edges: Arc::default() })
    }

    /// Adds a descriptor under a name.
    ///
    /// # Errors
    /// When it is in the set already, cannot be waited for, or the user's limit of watches is
    /// reached.
    pub fn add(&self, fd: BorrowedFd<'_>, name: u64) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(name), EventFlags::IN)?)
    }

    /// Adds a descriptor edge-triggered: for one that may not be read empty before the next call,
    /// or that others may write to without need.
    ///
    /// # Errors
    /// As [`add`](ReadySet::add).
    pub fn add_edges(&self, fd: BorrowedFd<'_>, name: u64) -> io::Result<()> {
        self.has_edges.store(true, Ordering::Relaxed);
        let flags = EventFlags::IN | EventFlags::ET;
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(name), flags)?)
    }

    /// Whether the set stays readable until [`take`](ReadySet::take) is called: an edge does not
    /// end by itself.
    pub fn has_edges(&self) -> bool {
        self.has_edges.load(Ordering::Relaxed)
    }

    /// Renames a descriptor of the set.
    ///
    /// # Errors
    /// When it is not in the set.
    pub fn rename(&self, fd: BorrowedFd<'_>, name: u64) -> io::Result<()> {
        Ok(epoll::modify(&self.epoll, fd, EventData::new_u64(name), EventFlags::IN)?)
    }

    /// Removes a descriptor from the set. One that is closed, with all its duplicates, is removed
    /// automatically.
    ///
    /// # Errors
    /// When it is not in the set.
    pub fn remove(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, fd)?)
    }

    /// The names of readable descriptors, at most [`MAX_READY`] at a time; it does not wait.
    pub fn take(&self) -> impl Iterator<Item = u64> + use<> {
        const NONE: Event = Event { flags: EventFlags::empty(), data: EventData::new_u64(0) };
        let mut events = [NONE; MAX_READY];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        // An interrupted call counts as one that found nothing.
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
