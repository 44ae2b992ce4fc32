//! The seam above the disk: from names to open files.
//!
//! An [`Opener`] is a place that holds datasets: a folder, an object store, memory. It turns a name
//! into a [`Stored`] file, which knows its length and its identity, and which a [`Disk`] of that
//! place then reads. Everything here happens while a stream opens, so it is called through trait
//! objects and may block; the reads of the stream itself go through [`Disk`] and do neither.
//!
//! Rules for implementations:
//! - An open file never changes its meaning. Where the contents under its name may change, the
//!   file remembers what they were when it was opened, and [`Stored::change`] compares.
//! - Names come from the network (C7). What an opener does not hold, it does not open, whatever the
//!   name contains: no `..`, no link out of a folder, no other bucket.
//! - A listing is bounded, and says when it was cut.
//!
//! What a name means beyond that, and whether the file is a dataset, is decided by the callers.
//!
//! [`Disk`]: crate::disk::Disk

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;
use core::any::Any;
use core::error::Error;
use core::fmt;

use crate::disk::Change;

/// Which reads a file is opened for, where its place offers a choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoChoice {
    /// Direct where the place supports it, buffered otherwise.
    #[default]
    Auto,
    /// Direct or not at all.
    Direct,
    /// Buffered.
    Buffered,
}

/// Tells a file and its contents from others. Two that are equal are the same file with the same
/// contents, as far as its place can tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity {
    /// The place: a device, a store. It has a meaning on this machine only.
    pub place: u64,
    /// The file there, and its version: made of an inode and its time of change, of an ETag, of a
    /// generation. Peers see it.
    pub version: u64,
}

/// Why a read of an open file failed.
pub type ReadError = Box<dyn Error + Send + Sync>;

/// An open file.
pub trait Stored: Any + Send + Sync + fmt::Debug {
    /// Its length in bytes when it was opened.
    fn bytes(&self) -> u64;

    /// What it was when it was opened.
    fn identity(&self) -> Identity;

    /// How it has changed since then, as far as its place can tell.
    fn change(&self) -> Option<Change>;

    /// Reads bytes from `offset` on, and returns how many: 0 at the end of the file only. It may
    /// block, and it is for descriptions of datasets; their blocks are read by a disk.
    ///
    /// # Errors
    /// Those of the place, with its own words.
    fn read_at(&self, into: &mut [u8], offset: u64) -> Result<usize, ReadError>;
}

/// The kind of reason why a name was not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Nothing has this name here.
    NotFound,
    /// The name leads out of what is exported.
    Outside,
    /// No name of a file can be like this.
    BadName,
    /// It is a folder, a device, or something else that is no file.
    NotFile,
    /// Whoever runs this program may not read it.
    Denied,
    /// Anything else: the place cannot do it, or not now.
    Failed,
}

/// Why a name was not opened, or a place not listed.
#[derive(Debug, thiserror::Error)]
#[error("{source}")]
pub struct OpenError {
    /// Decides what the caller does.
    pub reason: Reason,
    /// What people read.
    pub source: Box<dyn Error + Send + Sync>,
}

/// A file in a listing.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// Its name, as [`Opener::open`] takes it, with `/` between directories.
    pub name: String,
    /// Its length in bytes.
    pub size: u64,
}

/// What a place holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// Files, by name.
    pub entries: Vec<Entry>,
    /// There is more than the limits of the caller or of the place allow.
    pub truncated: bool,
    /// Entries that cannot be served: not a regular file, unreadable, or a name that is not UTF-8.
    pub skipped: usize,
}

/// A place that holds datasets.
pub trait Opener: Send + Sync + fmt::Debug {
    /// Opens the file of this name, for reads by [`Stored::read_at`] and by a disk of this place.
    ///
    /// # Errors
    /// The reason, with the name in its text.
    fn open(&self, name: &str, io: IoChoice) -> Result<Box<dyn Stored>, OpenError>;

    /// At most `limit` of the files that it holds.
    ///
    /// # Errors
    /// When the place itself cannot be read.
    fn list(&self, limit: usize) -> Result<Listing, OpenError>;
}
