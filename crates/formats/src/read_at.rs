//! Reads of descriptions of datasets: from files of this machine, and from other places.
//!
//! What describes a dataset (its header, manifest, index, hashes) is read by position, so the same
//! code reads a file of this machine and an open file of any place behind
//! [`Opener`](xio::opener::Opener). What is read is decided by the other modules.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

use xio::opener::{ReadError, Stored};

/// Bytes that are read by their position.
pub trait ReadAt: Send + Sync + fmt::Debug {
    /// How many there are.
    ///
    /// # Errors
    /// When the system does not tell.
    fn total_bytes(&self) -> io::Result<u64>;

    /// Reads bytes from `offset` on, and returns how many: 0 only at the end.
    ///
    /// # Errors
    /// Those of the place where they are.
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Reads so many bytes as there is room for.
    ///
    /// # Errors
    /// As [`read_at`](ReadAt::read_at), and when there are fewer.
    fn read_exact_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let mut have = 0;
        while have < into.len() {
            match self.read_at(&mut into[have..], offset + have as u64) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => have += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads from the start on, at most `most` bytes.
    ///
    /// # Errors
    /// As [`read_at`](ReadAt::read_at).
    fn head(&self, most: u64) -> io::Result<Vec<u8>> {
        let mut head =
            vec![0; usize::try_from(self.total_bytes()?.min(most)).map_err(io::Error::other)?];
        self.read_exact_at(&mut head, 0)?;
        Ok(head)
    }
}

impl ReadAt for File {
    fn total_bytes(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, into, offset)
    }
}

impl ReadAt for &dyn Stored {
    fn total_bytes(&self) -> io::Result<u64> {
        Ok(self.bytes())
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        Stored::read_at(*self, into, offset).map_err(system_error)
    }
}

impl ReadAt for Box<dyn Stored> {
    fn total_bytes(&self) -> io::Result<u64> {
        (&**self).total_bytes()
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        ReadAt::read_at(&&**self, into, offset)
    }
}

/// The error of a place; that of the system keeps its number.
fn system_error(error: ReadError) -> io::Error {
    error.downcast::<io::Error>().map_or_else(io::Error::other, |error| *error)
}

/// Reads from the start to the end.
#[derive(Debug)]
pub(crate) struct Sequential {
    pub(crate) file: Box<dyn ReadAt>,
    pub(crate) at: u64,
}

impl Read for Sequential {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(into, self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}
