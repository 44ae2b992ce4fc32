//! A file that is only appended to, and cut back when a run goes on.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::error::Error;

/// Bytes that are written at once.
const BUFFER_BYTES: usize = 1 << 20;

/// The file.
pub(crate) struct Append {
    path: PathBuf,
    file: BufWriter<File>,
    len: u64,
}

impl Append {
    /// Creates the file, or cuts it back to `saved` bytes.
    pub(crate) fn open(path: &Path, saved: Option<u64>) -> Result<Append, Error> {
        let failed = Error::write(path);
        let len = saved.unwrap_or(0);
        let mut file = OpenOptions::new()
            .create(true)
            .write(true)
            .truncate(saved.is_none())
            .open(path)
            .map_err(failed)?;
        if file.metadata().map_err(failed)?.len() < len {
            return Err(Error::corrupt(path, "is shorter than when it was saved"));
        }
        file.set_len(len).and_then(|()| file.seek(SeekFrom::Start(len))).map_err(failed)?;
        let file = BufWriter::with_capacity(BUFFER_BYTES, file);
        Ok(Append { path: path.to_owned(), file, len })
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.len += bytes.len() as u64;
        self.file.write_all(bytes).map_err(Error::write(&self.path))
    }

    /// Puts everything on the disk; returns the length.
    pub(crate) fn save(&mut self) -> Result<u64, Error> {
        let saved = self.file.flush().and_then(|()| self.file.get_ref().sync_data());
        saved.map_err(Error::write(&self.path)).map(|()| self.len)
    }

    /// Writes over the first bytes, and ends the file.
    pub(crate) fn finish(mut self, head: &[u8]) -> Result<(), Error> {
        let failed = Error::write(&self.path);
        self.file.flush().map_err(failed)?;
        let file = self.file.get_mut();
        file.seek(SeekFrom::Start(0)).and_then(|_| file.write_all(head)).map_err(failed)?;
        file.sync_all().map_err(failed)
    }
}
