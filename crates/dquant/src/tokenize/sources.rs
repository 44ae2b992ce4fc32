//! Which files a run reads, in which order, and what they hold.
//!
//! A folder stands for every file below it, sorted by path bytes, so the same tree gives the same dataset on any
//! machine. Below a folder, names that begin with a dot, manifests and symbolic links are left out: the first
//! two are rarely intended as input, the last can form loops. Paths named on the command line are always read; `-` is standard
//! input. What a file holds follows from its name, without `.gz`, `.zst` or `.zstd`, unless the user says otherwise.

use std::fs::{self, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fmt, io};

use clap::ValueEnum;
use formats::manifest::ENDING;
use twox_hash::XxHash3_128;

use super::TokenizeError;

/// What an input holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// One document of plain text per file
    Text,
    /// One document per line, in a field of a JSON object
    Jsonl,
    /// One document per row, in a column
    Parquet,
}

impl Format {
    /// What the name of a file says; plain text when it says nothing.
    fn of(path: &Path) -> Format {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        let compressed = [".gz", ".zst", ".zstd"].iter().find_map(|end| name.strip_suffix(end));
        let name = compressed.unwrap_or(&name);
        match name.rsplit_once('.') {
            Some((_, "jsonl" | "ndjson")) => Format::Jsonl,
            Some((_, "parquet")) => Format::Parquet,
            _ => Format::Text,
        }
    }
}

/// An input to read.
#[derive(Clone, Debug)]
pub struct Source {
    /// Its path; `-` for standard input.
    pub path: PathBuf,
    /// What it holds.
    pub format: Format,
    /// Its size on the disk; `None` for standard input.
    pub bytes: Option<u64>,
    /// Distinguishes a file from another of the same name.
    modified_ns: i128,
}

impl Source {
    fn file(path: PathBuf, format: Option<Format>, metadata: &Metadata) -> Source {
        let format = format.unwrap_or_else(|| Format::of(&path));
        let modified_ns =
            i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec());
        Source { path, format, bytes: Some(metadata.len()), modified_ns }
    }

    /// Whether this is standard input.
    pub fn is_stdin(&self) -> bool {
        self.bytes.is_none()
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_stdin() { f.write_str("standard input") } else { self.path.display().fmt(f) }
    }
}

/// Distinguishes lists of inputs, by their names, formats, sizes and times of change.
pub fn fingerprint(sources: &[Source]) -> String {
    let mut hash = XxHash3_128::new();
    for Source { path, format, bytes, modified_ns } in sources {
        hash.write(path.as_os_str().as_bytes());
        hash.write(format!("\0{format:?} {bytes:?} {modified_ns}\0").as_bytes());
    }
    format!("{} files, xxh3 {:032x}", sources.len(), hash.finish_128())
}

/// Lists the sources of all inputs, in the order of the inputs. Files in `outputs` are not inputs.
///
/// # Errors
/// When a folder cannot be read, an input is neither file nor folder, nothing is found, standard input is named
/// twice, or an output is named as an input.
pub fn list(
    inputs: &[PathBuf],
    format: Option<Format>,
    outputs: &[PathBuf],
) -> Result<Vec<Source>, TokenizeError> {
    let outputs: Vec<PathBuf> = outputs.iter().flat_map(fs::canonicalize).collect();
    let is_output = |path: &Path| fs::canonicalize(path).is_ok_and(|path| outputs.contains(&path));
    let mut sources = Vec::new();
    for input in inputs {
        if input.as_os_str() == "-" {
            if sources.iter().any(Source::is_stdin) {
                return Err(TokenizeError::StdinTwice);
            }
            let format = format.unwrap_or(Format::Text);
            sources.push(Source { path: input.clone(), format, bytes: None, modified_ns: 0 });
            continue;
        }
        let metadata = fs::metadata(input).map_err(TokenizeError::io("open", input))?;
        if metadata.is_dir() {
            walk(input, &mut |path, metadata| {
                if !is_output(&path) {
                    sources.push(Source::file(path, format, metadata));
                }
            })?;
        } else if !metadata.is_file() {
            return Err(TokenizeError::NotAFile { path: input.clone() });
        } else if is_output(input) {
            return Err(TokenizeError::OutputIsInput { path: input.clone() });
        } else {
            sources.push(Source::file(input.clone(), format, &metadata));
        }
    }
    if sources.is_empty() {
        let inputs: Vec<String> = inputs.iter().map(|path| path.display().to_string()).collect();
        return Err(TokenizeError::NoFiles { inputs: inputs.join(", ") });
    }
    Ok(sources)
}

/// Visits the files below `folder`, depth first in sorted order.
fn walk(folder: &Path, visit: &mut dyn FnMut(PathBuf, &Metadata)) -> Result<(), TokenizeError> {
    let mut unread = vec![folder.to_owned()];
    while let Some(path) = unread.pop() {
        let metadata = fs::symlink_metadata(&path).map_err(TokenizeError::io("open", &path))?;
        // The folder itself was named by the user and may be a link.
        if metadata.is_dir() || path == folder {
            let mut entries = entries(&path).map_err(TokenizeError::io("read", &path))?;
            // Popped from the end, so the largest name goes in first.
            entries.sort_by(|a, b| b.as_os_str().as_bytes().cmp(a.as_os_str().as_bytes()));
            unread.extend(entries);
        } else if metadata.is_file() {
            visit(path, &metadata);
        }
    }
    Ok(())
}

fn entries(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut entries = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        // The manifests of outputs are no text to tokenise.
        if !name.as_bytes().starts_with(b".") && !name.as_bytes().ends_with(ENDING.as_bytes()) {
            entries.push(entry.path());
        }
    }
    Ok(entries)
}
