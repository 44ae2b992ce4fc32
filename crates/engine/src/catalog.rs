//! The catalogue of a storage target: names to files below the roots, and what is in them.
//!
//! A name is a path below a root, with or without its ending. `name.npy` holds its token type; so does
//! `name.idx` beside a `name.bin` (Megatron); a `.bin` alone is flat, and its type is part of the
//! request. Nothing outside the roots is opened, whatever the name contains.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use host::root::{IoChoice, OpenError, OpenFile, Root};
use tonic::Status;
use xio::dataset::{Dtype, TokenFile, flat, megatron, npy};

use crate::error::{Error, with_limit_hint};
use crate::proto::{DatasetInfo, DatasetRef};

/// Datasets one request may name.
const MAX_DATASETS: usize = 1024;

/// Bytes of a file that hold its header: enough for every `.npy` header in use.
const HEAD_BYTES: u64 = 64 << 10;

/// Largest Megatron index that is read, 4 GiB: about 200 million sequences.
const MAX_INDEX_BYTES: u64 = 4 << 30;

const NAMES_HINT: &str = "names are paths below a --root, with or without .bin or .npy";

const DENIED_HINT: &str = "the user that runs `dquant serve` needs read permission";

/// The roots a target exports.
#[derive(Debug)]
pub struct Catalog {
    roots: Vec<Root>,
    io: IoChoice,
}

/// A dataset that was found and opened.
#[derive(Debug)]
pub struct Found {
    /// For the peer.
    pub info: DatasetInfo,
    /// The open file with the tokens.
    pub file: OpenFile,
    /// Where they are in it.
    pub layout: TokenFile,
}

fn refuse(name: &str, why: impl std::fmt::Display, hint: &str) -> Status {
    Status::invalid_argument(format!("{name}: {why}\n{hint}"))
}

impl Catalog {
    /// A catalogue of what lies below `roots`.
    pub fn new(roots: Vec<Root>, io: IoChoice) -> Catalog {
        Catalog { roots, io }
    }

    /// Finds and opens every dataset, or returns which one cannot be opened.
    pub fn find_all(&self, refs: &[DatasetRef]) -> Result<Vec<Found>, Status> {
        if refs.is_empty() || refs.len() > MAX_DATASETS {
            let count = refs.len();
            let why = format!("{count} datasets named, 1 to {MAX_DATASETS} allowed");
            return Err(Status::invalid_argument(why));
        }
        refs.iter().map(|dataset| self.find(dataset)).collect()
    }

    fn find(&self, dataset: &DatasetRef) -> Result<Found, Status> {
        let name = &dataset.name;
        // A folder `web` does not hide `web.bin`, but is reported if there is nothing else.
        let mut irregular = None;
        for root in &self.roots {
            for ending in ["", ".bin", ".npy"] {
                let full = format!("{name}{ending}");
                match root.open(&full, self.io) {
                    Ok(file) => return describe(root, full, file, &dataset.dtype),
                    Err(OpenError::NotFound { .. }) => {}
                    Err(error @ OpenError::NotRegular { .. }) => {
                        irregular.get_or_insert(error);
                    }
                    Err(error) => return Err(refused_open(&error)),
                }
            }
        }
        match irregular {
            Some(error) => Err(refused_open(&error)),
            None => Err(Status::not_found(format!(
                "{name}: no such dataset below the exported roots\n{NAMES_HINT}"
            ))),
        }
    }
}

/// Finds and opens a file of this machine by its path, with or without its ending, for buffered reads. The
/// dataset is named as the path was given.
pub fn find_file(path: &Path, dtype: &str) -> Result<Found, Error> {
    let given = path.display().to_string();
    let with = |ending: &str| PathBuf::from(format!("{given}{ending}"));
    let full = ["", ".bin", ".npy"].iter().map(|ending| with(ending)).find(|path| path.is_file());
    let Some(full) = full else {
        let error = if path.is_dir() {
            Error::invalid(format!("{given} is a folder"))
                .hint("name a file in it, or all of them: FOLDER/*.bin")
        } else {
            Error::invalid(format!("{given}: no such file"))
                .hint("a path names a local file, with or without .bin or .npy; dq://HOST/NAME one at a target")
        };
        return Err(error);
    };
    let refused = |error: &dyn std::fmt::Display| Error::invalid(format!("{given}: {error}"));
    // A link is followed: what is served to others has to stay below a root, one's own files need not.
    let real = full.canonicalize().map_err(|error| refused(&error))?;
    let (Some(folder), Some(name)) =
        (real.parent(), real.file_name().and_then(|name| name.to_str()))
    else {
        return Err(refused(&"its name is not UTF-8"));
    };
    let root = Root::new(folder).map_err(|error| refused(&error))?;
    let open = || {
        let file = root.open(name, IoChoice::Buffered).map_err(|error| refused_open(&error))?;
        describe(&root, name.to_owned(), file, dtype)
    };
    let found = open().map_err(|status| match status.message().split_once('\n') {
        Some((message, hint)) => Error::invalid(message).hint(hint),
        None => Error::invalid(status.message()),
    })?;
    let info = DatasetInfo { name: full.display().to_string(), ..found.info };
    Ok(Found { info, ..found })
}

/// The error names the file itself, with the ending that was tried.
fn refused_open(error: &OpenError) -> Status {
    match error {
        OpenError::Outside { .. } => Status::permission_denied(format!("{error}\n{NAMES_HINT}")),
        OpenError::BadName { .. } | OpenError::NotRegular { .. } => {
            Status::invalid_argument(format!("{error}\n{NAMES_HINT}"))
        }
        OpenError::Denied { .. } => Status::invalid_argument(format!("{error}\n{DENIED_HINT}")),
        // The message has a hint of its own.
        _ => Status::invalid_argument(with_limit_hint(error, "\n")),
    }
}

fn describe(root: &Root, name: String, file: OpenFile, dtype: &str) -> Result<Found, Status> {
    if name.ends_with(".idx") {
        let why = "an index holds no tokens";
        return Err(refuse(&name, why, "name the .bin beside it, with or without its ending"));
    }
    let layout = if name.ends_with(".npy") {
        let head = read_head(root, &name, HEAD_BYTES)?;
        npy::parse(&head, file.size)
    } else if let Some(index) = index_of(root, &name)? {
        megatron::parse(&index, file.size)
    } else {
        let hint = "give the type of flat files with --dtype, for example --dtype u32";
        let dtype: Dtype = match dtype {
            "" => {
                return Err(refuse(&name, "a flat file does not record its token type", hint));
            }
            given => Dtype::from_name(given)
                .ok_or_else(|| refuse(&name, format!("token type {given:?} is unknown"), hint))?,
        };
        flat(dtype, file.size)
    };
    let hint = "`dquant inspect FILE` shows what is in it";
    let layout = layout.map_err(|error| refuse(&name, error, hint))?;
    let info = DatasetInfo {
        name,
        format: layout.format.name().to_owned(),
        dtype: layout.dtype.to_string(),
        tokens: layout.tokens,
        data_offset: layout.data_offset,
        fingerprint: fingerprint(&file)?,
    };
    Ok(Found { info, file, layout })
}

/// Distinguishes a file from another one of the same name and length.
fn fingerprint(file: &OpenFile) -> Result<u64, Status> {
    let failed = |error: std::io::Error| Status::internal(with_limit_hint(&error, "\n"));
    let data = std::fs::File::from(file.fd.try_clone().map_err(failed)?);
    let found = data.metadata().map_err(failed)?;
    let parts = [found.ino(), found.mtime() as u64, found.mtime_nsec() as u64, found.len()];
    // FNV-1a over words: it has to detect changes, not resist an attacker.
    let mix = |hash: u64, part: &u64| (hash ^ part).wrapping_mul(0x0000_0100_0000_01b3);
    Ok(parts.iter().fold(0xcbf2_9ce4_8422_2325, mix))
}

/// The Megatron index beside a `.bin`, if there is one.
fn index_of(root: &Root, name: &str) -> Result<Option<Vec<u8>>, Status> {
    let Some(stem) = name.strip_suffix(".bin") else {
        return Ok(None);
    };
    let index = format!("{stem}.idx");
    match root.open(&index, IoChoice::Buffered) {
        Ok(file) if file.size > MAX_INDEX_BYTES => {
            let why = format!("index of {} bytes is larger than {MAX_INDEX_BYTES}", file.size);
            Err(refuse(&index, why, "split the dataset"))
        }
        Ok(file) => read(&index, file.fd, file.size).map(Some),
        Err(OpenError::NotFound { .. }) => Ok(None),
        Err(error) => Err(refused_open(&error)),
    }
}

/// The start of a file, opened once more because the data is opened for direct I/O.
fn read_head(root: &Root, name: &str, bytes: u64) -> Result<Vec<u8>, Status> {
    let file = root.open(name, IoChoice::Buffered).map_err(|error| refused_open(&error))?;
    read(name, file.fd, bytes)
}

fn read(name: &str, fd: OwnedFd, bytes: u64) -> Result<Vec<u8>, Status> {
    let mut data = Vec::new();
    let done = std::fs::File::from(fd).take(bytes).read_to_end(&mut data);
    done.map_err(|error| Status::internal(format!("{name}: {error}")))?;
    Ok(data)
}
