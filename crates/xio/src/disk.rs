//! The seam below the data plane: reads from files into registered memory.
//!
//! A [`Disk`] is asked for ranges of files and answers later, in any order, naming the request by its
//! tag. The real one is an io_uring, the simulated one lives in virtual time; state machines in this
//! crate see only the trait.
//!
//! Rules that both sides keep:
//! - Every read that was taken is answered exactly once.
//! - From [`Disk::submit`] until the answer the destination belongs to the disk: nobody reads,
//!   writes or frees it.
//! - A disk takes a bounded number of reads. A full one gives the read back, so that the caller keeps
//!   it and nothing queues without bound (C6).
//! - Fewer bytes than asked for mean the end of the file and nothing else: a disk that was stopped
//!   half-way carries on by itself.
//! - Files opened for direct I/O want offset, length and address in multiples of [`DIRECT_ALIGN`].

/// Alignment in bytes of file offset, length and address of reads that bypass the page cache.
pub const DIRECT_ALIGN: u64 = 4096;

/// A file that the disk has been given. Numbers are not used again for another file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId(pub u32);

/// A read to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskRead {
    /// Which file.
    pub file: FileId,
    /// First byte in the file.
    pub offset: u64,
    /// How many bytes.
    pub len: u32,
    /// Where to put them: an address of registered memory.
    pub addr: u64,
    /// Returned with the answer.
    pub tag: u64,
}

/// A read that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskDone {
    /// As submitted.
    pub tag: u64,
    /// Bytes read: fewer than asked for only where the file ends.
    pub result: Result<u32, DiskFault>,
}

/// Why a read failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, thiserror::Error)]
pub enum DiskFault {
    /// The system's error number (`EIO`: the medium; `EINVAL`: misaligned; `EFAULT`: the destination
    /// is not registered memory; `EBADF`: no such file).
    #[error("read failed with errno {0}")]
    Io(i32),
}

/// Reads ranges of files into registered memory.
pub trait Disk {
    /// Takes a read, or gives it back when as many are under way as the disk can hold. A read that
    /// can never work is taken too: [`poll`](Disk::poll) reports its fault.
    fn submit(&mut self, read: DiskRead) -> Result<(), DiskRead>;

    /// A read that has ended, if there is one. A call that returns `None` has started everything that
    /// was submitted before it, so callers poll until they hear that.
    fn poll(&mut self) -> Option<DiskDone>;

    /// How long a file is now, where the disk can tell. Asked only after a read came back short.
    fn len_now(&self, file: FileId) -> Option<u64> {
        let _ = file;
        None
    }
}
