//! The seam below the data plane: reads from files into registered memory.
//!
//! A [`Disk`] reads ranges of files and completes in any order, identifying each read by its tag.
//! The real one is an io_uring, the simulated one runs in virtual time; state machines in this
//! crate see only the trait.
//!
//! Rules for both sides:
//! - Every accepted read completes exactly once.
//! - From [`Disk::submit`] until the completion the destination belongs to the disk: nothing else
//!   reads, writes or frees it.
//! - A disk accepts a bounded number of reads. A full one returns the read to the caller, so that
//!   nothing queues without bound (C6).
//! - Fewer bytes than requested always mean the end of the file: a disk continues short reads
//!   itself.
//! - Files opened for direct I/O need offset, length and address in multiples of [`DIRECT_ALIGN`].

/// Alignment in bytes of file offset, length and address of reads that bypass the page cache.
pub const DIRECT_ALIGN: u64 = 4096;

/// A file known to the disk. Numbers are never reused for another file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId(pub u32);

/// A read request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskRead {
    /// The file.
    pub file: FileId,
    /// First byte in the file.
    pub offset: u64,
    /// Number of bytes.
    pub len: u32,
    /// Destination: an address of registered memory.
    pub addr: u64,
    /// Returned in the completion.
    pub tag: u64,
}

/// A completed read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskDone {
    /// As submitted.
    pub tag: u64,
    /// Bytes read: fewer than requested only at the end of the file.
    pub result: Result<u32, DiskFault>,
}

/// Why a read failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, thiserror::Error)]
pub enum DiskFault {
    /// The system's error number (`EIO`: the medium; `EINVAL`: misaligned; `EFAULT`: the
    /// destination is not registered memory; `EBADF`: no such file).
    #[error("read failed with errno {0}")]
    Io(i32),
}

/// How a file differs from what it was when it was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Change {
    /// A block does not have the checksum of the manifest.
    Block {
        /// First byte of the block.
        at_byte: u64,
    },
    /// The file was written, or its attributes were changed.
    Written {
        /// Its length now, in bytes.
        len: u64,
    },
    /// The file has no name any more: it was removed, or another took its place.
    Removed,
}

/// Reads ranges of files into registered memory.
pub trait Disk {
    /// Accepts a read, or returns it when the disk is full. A read that can never succeed is
    /// accepted too: [`poll`](Disk::poll) reports its fault.
    fn submit(&mut self, read: DiskRead) -> Result<(), DiskRead>;

    /// A completed read, if there is one. A call that returns `None` has started all reads
    /// submitted before it, so callers poll until they get `None`.
    fn poll(&mut self) -> Option<DiskDone>;

    /// Current length of a file, if the disk knows it. Called only after a short read.
    fn len_now(&self, file: FileId) -> Option<u64> {
        let _ = file;
        None
    }

    /// How a file has changed since it was opened, as far as the system's records tell. Called
    /// after reads.
    fn change(&self, file: FileId) -> Option<Change> {
        let _ = file;
        None
    }
}
