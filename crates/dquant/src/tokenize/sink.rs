//! The output: a flat little-endian file of ids that appears complete or not at all.
//!
//! Tokens go to a file of another name in the same folder. [`Sink::commit`] flushes it to the disk and renames it; a
//! sink that is dropped before that removes it, and the command does so on Ctrl-C. So the output under its name is
//! always complete, and an interrupted run leaves the previous output unchanged.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::{fmt, process};

use clap::ValueEnum;

use super::TokenizeError;

/// How an id is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TokenType {
    /// 32 bits per token, any encoding
    U32,
    /// 16 bits per token, for vocabularies below 65,536
    U16,
}

impl fmt::Display for TokenType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            TokenType::U32 => "u32",
            TokenType::U16 => "u16",
        })
    }
}

/// Why tokens cannot be written.
#[derive(Debug)]
pub enum SinkError {
    /// An id is too large for the type.
    DoesNotFit {
        /// Index among the tokens of the call, counted from 0.
        index: usize,
        /// The id.
        id: u32,
    },
    /// An error of the operating system.
    Io(io::Error),
}

/// The name of the output `path` until it is complete.
pub fn unfinished_path(path: &Path) -> Option<PathBuf> {
    path.file_name().map(|name| unfinished(path, name))
}

fn unfinished(path: &Path, name: &OsStr) -> PathBuf {
    let mut unfinished = OsString::from(".");
    unfinished.push(name);
    unfinished.push(format!(".{}.part", process::id()));
    path.with_file_name(unfinished)
}

/// A token file that is being written.
#[derive(Debug)]
pub struct Sink {
    file: BufWriter<File>,
    dtype: TokenType,
    unfinished: PathBuf,
    finished: PathBuf,
    committed: bool,
}

impl Sink {
    /// Starts an output that will be called `path`.
    ///
    /// # Errors
    /// When the folder of `path` does not exist or cannot be written.
    pub fn create(path: &Path, dtype: TokenType) -> Result<Sink, TokenizeError> {
        let name =
            path.file_name().ok_or_else(|| TokenizeError::NotAFile { path: path.to_owned() })?;
        // Renaming over a device or a link would replace it: such an output is a mistake.
        if fs::symlink_metadata(path).is_ok_and(|found| !found.is_file()) {
            return Err(TokenizeError::OutputNotAFile { path: path.to_owned() });
        }
        let unfinished = unfinished(path, name);
        let file = File::create(&unfinished).map_err(TokenizeError::io("create", &unfinished))?;
        let file = BufWriter::with_capacity(1 << 20, file);
        Ok(Sink { file, dtype, unfinished, finished: path.to_owned(), committed: false })
    }

    /// Appends tokens.
    ///
    /// # Errors
    /// Names the first id that does not fit; what came before it may have been written.
    pub fn push(&mut self, tokens: &[u32]) -> Result<(), SinkError> {
        match self.dtype {
            TokenType::U32 => self.push_wide(tokens),
            TokenType::U16 => self.push_narrow(tokens),
        }
    }

    fn push_wide(&mut self, tokens: &[u32]) -> Result<(), SinkError> {
        for id in tokens {
            self.file.write_all(&id.to_le_bytes()).map_err(SinkError::Io)?;
        }
        Ok(())
    }

    fn push_narrow(&mut self, tokens: &[u32]) -> Result<(), SinkError> {
        for (index, &id) in tokens.iter().enumerate() {
            let narrow = u16::try_from(id).map_err(|_| SinkError::DoesNotFit { index, id })?;
            self.file.write_all(&narrow.to_le_bytes()).map_err(SinkError::Io)?;
        }
        Ok(())
    }

    /// Makes the output appear under its name, on the disk and not only in memory.
    ///
    /// # Errors
    /// When the disk is full or fails; then there is no output.
    pub fn commit(mut self) -> Result<(), TokenizeError> {
        let path = self.unfinished.clone();
        self.file.flush().map_err(TokenizeError::io("write", &path))?;
        self.file.get_ref().sync_all().map_err(TokenizeError::io("write", &path))?;
        fs::rename(&path, &self.finished).map_err(TokenizeError::io("rename", &path))?;
        self.committed = true;
        sync_folder(&self.finished)
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        if !self.committed {
            // A failure here cannot be handled, and a file with this name is known to be unfinished.
            let _ = fs::remove_file(&self.unfinished);
        }
    }
}

/// A rename survives a power cut only once the folder is on the disk too.
fn sync_folder(path: &Path) -> Result<(), TokenizeError> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    File::open(folder)
        .and_then(|folder| folder.sync_all())
        .map_err(TokenizeError::io("write", folder))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("dquant-sink-{name}-{}", process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn an_output_replaces_nothing_but_a_file() {
        let link = std::env::temp_dir().join(format!("dquant-sink-link-{}", process::id()));
        std::os::unix::fs::symlink("/dev/null", &link).expect("a link");
        for path in [Path::new("/dev/null"), &link, Path::new("/tmp")] {
            let refused = Sink::create(path, TokenType::U32);
            assert!(matches!(refused, Err(TokenizeError::OutputNotAFile { .. })), "{path:?}");
        }
        fs::remove_file(&link).expect("the link is still one");
    }

    #[test]
    fn an_output_appears_only_when_committed() {
        let folder = folder("commit");
        let path = folder.join("a.bin");
        let mut sink = Sink::create(&path, TokenType::U32).unwrap();
        sink.push(&[1, 0x0102_0304]).unwrap();
        assert!(!path.exists());
        sink.commit().unwrap();
        assert_eq!(fs::read(&path).unwrap(), [1, 0, 0, 0, 4, 3, 2, 1]);
        drop(Sink::create(&path, TokenType::U16).unwrap());
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        assert_eq!(fs::read(&path).unwrap().len(), 8);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn an_id_beyond_16_bits_is_named_and_not_wrapped() {
        let folder = folder("narrow");
        let mut sink = Sink::create(&folder.join("a.bin"), TokenType::U16).unwrap();
        sink.push(&[0, 65_535]).unwrap();
        let error = sink.push(&[7, 65_536]).unwrap_err();
        assert!(matches!(error, SinkError::DoesNotFit { index: 1, id: 65_536 }));
        drop(sink);
        fs::remove_dir_all(folder).unwrap();
    }
}
