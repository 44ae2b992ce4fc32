//! A range of a file, read in blocks and handed out in pieces of whole tokens.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::BLOCK_BYTES;
use crate::error::Error;

/// A cursor over `at .. end` of a file.
pub(crate) struct Blocks<'a> {
    file: &'a File,
    path: &'a Path,
    at: u64,
    end: u64,
    buffer: Vec<u8>,
    used: usize,
}

impl<'a> Blocks<'a> {
    pub(crate) fn new(file: &'a File, path: &'a Path, at: u64, end: u64) -> Blocks<'a> {
        Blocks { file, path, at, end, buffer: Vec::new(), used: 0 }
    }

    /// The next bytes, at most `most` of them and at least one unless the range has ended. Where
    /// range and `most` are whole numbers of tokens, so is the piece.
    pub(crate) fn next(&mut self, most: u64) -> Result<&[u8], Error> {
        if self.used == self.buffer.len() {
            let len = BLOCK_BYTES.min(self.end - self.at);
            self.buffer.resize(len as usize, 0);
            let read = self.file.read_exact_at(&mut self.buffer, self.at);
            read.map_err(Error::read(self.path))?;
            self.at += len;
            self.used = 0;
        }
        let left = (self.buffer.len() - self.used) as u64;
        let piece = self.used..self.used + left.min(most) as usize;
        self.used = piece.end;
        Ok(&self.buffer[piece])
    }
}
