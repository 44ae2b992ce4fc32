//! The manifest of a dataset: a small file beside it that says what its bytes are.
//!
//! A flat file does not record its token type, and no token file records checksums. The manifest of
//! `web.bin` is `web.bin.dquant.json`, that of a folder is `dquant.json` in it; `docs/formats.md`
//! describes every field. A manifest is input from outside: its size, names and numbers are checked
//! before use, and one that contradicts its dataset is an error, never ignored.

use std::fs::{self, File};
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde::{Deserialize, Serialize};
use xio::dataset::Dtype;

use crate::cores;
use crate::error::Error;
use crate::read_at::ReadAt;

/// Bytes per checksum.
pub const BLOCK_BYTES: u64 = 1 << 20;

/// Largest manifest that is read, in bytes: checksums of 7 TiB.
pub const MAX_BYTES: u64 = 64 << 20;

/// Most sequences of a document whose sequences take turns: a table is sent in pieces of whole
/// documents.
pub const MAX_TURNS: u64 = 1 << 14;

/// What is appended to the name of a file.
pub const ENDING: &str = ".dquant.json";

/// The name in a folder.
pub const IN_FOLDER: &str = "dquant.json";

const SCHEMA: &str = "dquant.manifest/1";

/// What a dataset holds, and the checksums of its files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    schema: String,
    /// Name of the format, such as `flat`.
    pub format: String,
    dtype: String,
    /// Number of tokens.
    pub tokens: u64,
    /// Smallest id; none when it is not known, or without tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_id: Option<i128>,
    /// Largest id; none when it is not known, or without tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_id: Option<i128>,
    /// Name of the encoding that made the tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
    /// Number of documents, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub documents: Option<u64>,
    /// The id that ends every document and occurs nowhere else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eos: Option<u64>,
    /// Whether the sequences of each document take turns: tokens that a model is not trained to
    /// say, then tokens that it is, and so on.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub targets: bool,
    /// The other part, where the documents were split into two datasets. Not part of the
    /// fingerprint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<Split>,
    block_bytes: u64,
    /// The files, in the order of their tokens.
    pub files: Vec<FileSums>,
    fingerprint: String,
}

/// One of the two parts into which documents were split.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// What a model is trained on.
    #[default]
    Train,
    /// What is held out.
    Validation,
}

impl Part {
    /// Its name in manifests.
    pub const fn name(self) -> &'static str {
        match self {
            Part::Train => "train",
            Part::Validation => "validation",
        }
    }

    /// The part that holds all other documents.
    pub const fn other(self) -> Part {
        match self {
            Part::Train => Part::Validation,
            Part::Validation => Part::Train,
        }
    }
}

/// How the documents of two datasets were split, as the manifest of either says it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Split {
    /// Which part this dataset is.
    pub part: Part,
    /// The seed of the split.
    pub seed: u64,
    /// The share of documents that is held out, such as `1%`.
    pub share: String,
    /// The dataset with the other part, relative to the folder of the manifest.
    pub other: String,
    /// Its fingerprint, 16 hexadecimal digits.
    pub other_fingerprint: String,
}

/// One file and the CRC-32C of each of its blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSums {
    /// Relative to the folder of the manifest.
    pub name: String,
    /// Length.
    pub bytes: u64,
    /// Eight hexadecimal digits per block.
    crc32c: String,
}

impl FileSums {
    /// The checksum of every block of [`BLOCK_BYTES`], the last of which may be shorter.
    pub fn blocks(&self) -> impl Iterator<Item = u32> + '_ {
        let digits = self.crc32c.as_bytes().chunks_exact(8);
        // Checked by `Manifest::parse`.
        digits.map(|block| {
            str::from_utf8(block)
                .ok()
                .and_then(|text| u32::from_str_radix(text, 16).ok())
                .unwrap_or(0)
        })
    }
}

/// What a manifest says beside the checksums.
#[derive(Clone, Debug, Default)]
pub struct Contents {
    /// Number of tokens.
    pub tokens: u64,
    /// Smallest id, where it is known.
    pub min_id: Option<i128>,
    /// Largest id, where it is known.
    pub max_id: Option<i128>,
    /// The encoding, where it is known.
    pub tokenizer: Option<String>,
    /// Number of documents, where it is known.
    pub documents: Option<u64>,
    /// The id that ends every document, where there is one.
    pub eos: Option<u64>,
    /// Whether every second sequence of a document is a target.
    pub targets: bool,
}

/// The name of `to` for whoever is in the folder of `from`, which need not exist yet.
pub fn relative(from: &Path, to: &Path) -> String {
    let folder = |path: &Path| real(path.parent().unwrap_or(Path::new("")));
    let (here, there) = (folder(from), folder(to));
    let common = here.components().zip(there.components()).take_while(|(a, b)| a == b).count();
    let up = here.components().skip(common).map(|_| Component::ParentDir);
    let mut path: PathBuf = up.chain(there.components().skip(common)).collect();
    path.push(to.file_name().unwrap_or_default());
    path.display().to_string()
}

/// The path without links, as far as it exists.
fn real(path: &Path) -> PathBuf {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    fs::canonicalize(path).unwrap_or_else(|_| match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => real(parent).join(name),
        _ => path.to_owned(),
    })
}

/// The manifest of the dataset at `path`, a file or a folder.
pub fn path_of(path: &Path) -> PathBuf {
    if path.is_dir() {
        return path.join(IN_FOLDER);
    }
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(ENDING);
    path.with_file_name(name)
}

impl Manifest {
    /// Describes a dataset: reads every byte of `files`, which are named relative to `folder`.
    ///
    /// # Errors
    /// When a file cannot be read, or has a name that a manifest cannot hold.
    pub fn create(
        (format, dtype): (&str, Dtype),
        contents: Contents,
        folder: &Path,
        files: &[PathBuf],
        watch: &(dyn Fn(u64) + Sync),
    ) -> Result<Manifest, Error> {
        let sums = checksums(folder, files, watch)?;
        let mut manifest = Manifest {
            schema: SCHEMA.into(),
            format: format.into(),
            dtype: dtype.name().into(),
            tokens: contents.tokens,
            min_id: contents.min_id,
            max_id: contents.max_id,
            tokenizer: contents.tokenizer,
            documents: contents.documents,
            eos: contents.eos,
            targets: contents.targets,
            split: None,
            block_bytes: BLOCK_BYTES,
            files: sums,
            fingerprint: String::new(),
        };
        manifest.fingerprint = format!("{:016x}", manifest.computed_fingerprint());
        Ok(manifest)
    }

    /// Reads the manifest of the dataset at `path`, if it has one.
    ///
    /// # Errors
    /// When there is one that cannot be read or is invalid.
    pub fn load(path: &Path) -> Result<Option<Manifest>, Error> {
        let path = path_of(path);
        let bytes = match fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::read(&path)(error)),
            Ok(found) if found.len() > MAX_BYTES || !found.is_file() => {
                return Err(Error::corrupt(&path, "is no manifest: too large, or not a file"));
            }
            Ok(_) => fs::read(&path).map_err(Error::read(&path))?,
        };
        Manifest::parse(&bytes).map(Some).map_err(|why| Error::refused(&path, why, REWRITE_HINT))
    }

    /// Reads the text of a manifest.
    ///
    /// # Errors
    /// Says what is invalid in it.
    pub fn parse(text: &[u8]) -> Result<Manifest, String> {
        if text.len() as u64 > MAX_BYTES {
            return Err(format!(
                "the manifest has {} bytes, at most {MAX_BYTES} are read",
                text.len()
            ));
        }
        let manifest: Manifest = serde_json::from_slice(text)
            .map_err(|error| format!("the manifest is invalid: {error}"))?;
        manifest.check().map(|()| manifest)
    }

    fn check(&self) -> Result<(), String> {
        let Manifest { schema, dtype, block_bytes, .. } = self;
        if schema != SCHEMA {
            return Err(format!(
                "the manifest is of version {schema:?}; this program reads {SCHEMA}"
            ));
        }
        if Dtype::from_name(dtype).is_none() {
            return Err(format!("the manifest names the type {dtype:?}, which is unknown"));
        }
        if *block_bytes != BLOCK_BYTES {
            return Err(format!(
                "the manifest has blocks of {block_bytes} bytes, not {BLOCK_BYTES}"
            ));
        }
        for file in &self.files {
            let FileSums { name, bytes, crc32c } = file;
            if !is_plain(name) {
                return Err(format!(
                    "the manifest names the file {name:?}, which is outside its folder"
                ));
            }
            let digits = bytes.div_ceil(BLOCK_BYTES).checked_mul(8);
            let all_hex = crc32c.bytes().all(|digit| digit.is_ascii_hexdigit());
            if !all_hex || digits != Some(crc32c.len() as u64) {
                return Err(format!(
                    "the manifest's checksums do not cover the {bytes} bytes of {name}"
                ));
            }
        }
        if let Some(Split { other_fingerprint, .. }) = &self.split
            && u64::from_str_radix(other_fingerprint, 16).is_err()
        {
            return Err(format!(
                "the manifest names {other_fingerprint:?} as the fingerprint of the other part"
            ));
        }
        match u64::from_str_radix(&self.fingerprint, 16) == Ok(self.computed_fingerprint()) {
            true => Ok(()),
            false => {
                Err("the manifest's fingerprint does not match its fields: it was edited".into())
            }
        }
    }

    /// The fingerprint of the manifest of the other part, where documents were held out.
    pub fn other_part(&self) -> Option<u64> {
        // Checked by `Manifest::parse`.
        self.split.as_ref().and_then(|split| u64::from_str_radix(&split.other_fingerprint, 16).ok())
    }

    /// Type of the tokens.
    pub fn dtype(&self) -> Dtype {
        // Checked by `Manifest::parse`.
        Dtype::from_name(&self.dtype).unwrap_or(Dtype::U32)
    }

    /// A number that differs when the type, the number of tokens, or any byte of any file differs.
    pub fn fingerprint(&self) -> u64 {
        self.computed_fingerprint()
    }

    /// FNV-1a over the fields that decide what is read.
    fn computed_fingerprint(&self) -> u64 {
        let numbers = [self.tokens, self.files.len() as u64];
        let mut hash = Fnv::default();
        hash.bytes(self.format.as_bytes());
        hash.bytes(self.dtype.as_bytes());
        numbers.iter().for_each(|number| hash.bytes(&number.to_le_bytes()));
        for file in &self.files {
            hash.bytes(&file.bytes.to_le_bytes());
            hash.bytes(file.crc32c.to_ascii_lowercase().as_bytes());
        }
        if self.targets {
            hash.bytes(b"targets");
        }
        hash.0
    }

    /// Writes the manifest of the dataset at `path`; it appears when it is complete.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn store(&self, path: &Path) -> Result<PathBuf, Error> {
        let path = path_of(path);
        self.store_as(&path).map(|()| path)
    }

    /// As [`Manifest::store`], under a given name.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn store_as(&self, path: &Path) -> Result<(), Error> {
        let text =
            serde_json::to_string_pretty(self).map_err(|error| Error::write(path)(error.into()))?;
        crate::whole::write(path, text.as_bytes())
    }

    /// Compares every block of one of the files with its checksum; `file` is that of this name. A
    /// file that the manifest does not name is not compared.
    ///
    /// # Errors
    /// Says how it differs, or why it cannot be read.
    pub fn check_file(&self, name: &str, file: &dyn ReadAt) -> Result<(), String> {
        let Some(expected) = self.files.iter().find(|one| one.name == name) else {
            return Ok(());
        };
        let bytes = file.total_bytes().map_err(|error| error.to_string())?;
        if bytes != expected.bytes {
            return Err(format!("has {bytes} bytes, the manifest describes {}", expected.bytes));
        }
        let found = file_checksums(file, bytes, &|_| ()).map_err(|error| error.to_string())?;
        let differs = expected.blocks().zip(found).position(|(expected, found)| expected != found);
        match differs {
            None => Ok(()),
            Some(block) => Err(format!("block {block} differs from the manifest's checksum")),
        }
    }

    /// Compares every block of the files with its checksum.
    ///
    /// # Errors
    /// Names the first file and block that differ, or a file that cannot be read.
    pub fn verify(&self, folder: &Path, watch: &(dyn Fn(u64) + Sync)) -> Result<(), Error> {
        for file in &self.files {
            let path = folder.join(&file.name);
            let found = fs::metadata(&path).map_err(Error::read(&path))?.len();
            if found != file.bytes {
                let why = format!("has {found} bytes, the manifest describes {}", file.bytes);
                return Err(Error::Differs { path, why });
            }
        }
        let names: Vec<PathBuf> = self.files.iter().map(|file| PathBuf::from(&file.name)).collect();
        let found = checksums(folder, &names, watch)?;
        for (expected, found) in self.files.iter().zip(&found) {
            let mut blocks = expected.blocks().zip(found.blocks());
            if let Some(block) = blocks.position(|(expected, found)| expected != found) {
                let path = folder.join(&expected.name);
                let byte = block as u64 * BLOCK_BYTES;
                let why = format!(
                    "block {block} (from byte {byte}) differs from the manifest's checksum"
                );
                return Err(Error::Differs { path, why });
            }
        }
        Ok(())
    }
}

/// What to do about a manifest that is not of its dataset.
pub const REWRITE_HINT: &str = "if the dataset is as it should be, write the manifest anew: dquant inspect FILE --write-manifest";

/// FNV-1a, 64 bits: it has to detect changes, not resist an attacker.
struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Fnv {
        Fnv(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    fn bytes(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}

/// Whether a name stays below the folder it is relative to.
pub(crate) fn is_plain(name: &str) -> bool {
    let path = Path::new(name);
    !name.is_empty()
        && !name.contains('\0')
        && path.components().all(|part| matches!(part, Component::Normal(_)))
}

/// The checksums of all blocks of the files, on all cores.
fn checksums(
    folder: &Path,
    files: &[PathBuf],
    watch: &(dyn Fn(u64) + Sync),
) -> Result<Vec<FileSums>, Error> {
    let mut sums = Vec::with_capacity(files.len());
    for name in files {
        let path = folder.join(name);
        let name = name.to_str().filter(|name| is_plain(name)).ok_or_else(|| {
            Error::refused(&path, "has a name that a manifest cannot hold", "rename the file")
        })?;
        let file = File::open(&path).map_err(Error::read(&path))?;
        let bytes = file.metadata().map_err(Error::read(&path))?.len();
        let crcs = file_checksums(&file, bytes, watch).map_err(Error::read(&path))?;
        let crc32c = crcs.iter().map(|crc| format!("{crc:08x}")).collect();
        sums.push(FileSums { name: name.to_owned(), bytes, crc32c });
    }
    Ok(sums)
}

fn file_checksums(
    file: &dyn ReadAt,
    len: u64,
    watch: &(dyn Fn(u64) + Sync),
) -> io::Result<Vec<u32>> {
    let blocks = usize::try_from(len.div_ceil(BLOCK_BYTES)).map_err(io::Error::other)?;
    let next = AtomicUsize::new(0);
    let sums = Mutex::new(vec![0; blocks]);
    let work = || {
        let mut buffer = vec![0; BLOCK_BYTES.min(len) as usize];
        loop {
            let block = next.fetch_add(1, Ordering::Relaxed);
            if block >= blocks {
                return Ok(());
            }
            let at = block as u64 * BLOCK_BYTES;
            let bytes = &mut buffer[..BLOCK_BYTES.min(len - at) as usize];
            file.read_exact_at(bytes, at)?;
            let crc = crc32c::crc32c(bytes);
            sums.lock().unwrap_or_else(PoisonError::into_inner)[block] = crc;
            watch(bytes.len() as u64);
        }
    };
    cores::on_all(blocks, work)?;
    Ok(sums.into_inner().unwrap_or_else(PoisonError::into_inner))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
