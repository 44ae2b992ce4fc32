//! Loss weights beside the tokens: a `f32` for each of them.
//!
//! They come from a second column of the same rows, or from the file that lies beside a dataset in
//! one run. A weight is any finite number. What a weight does to a token is a plan's matter.

use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use xio::dataset::{Dtype, TokenFile, npy};

use super::blocks::Blocks;
use super::{MAX_PIECE, Sink, folder_of};
use crate::error::Error;
use crate::kind::Kind;
use crate::manifest::{Contents, Manifest};
use crate::settle;

/// Bytes of a weight.
pub(crate) const WEIGHT_BYTES: usize = Dtype::F32.bytes() as usize;

/// What to do about a weight that is none.
pub(super) const HINT: &str = "a column of loss weights has a finite number for each token";

/// Most bytes of the header of the file beside a dataset.
const HEAD_BYTES: u64 = 64 << 10;

/// Appends the weights of a row of so many tokens; `value` gives the weight at a place.
///
/// # Errors
/// What `refused` makes of the reason.
pub(super) fn append(
    (name, tokens, values): (&str, usize, usize),
    value: impl Fn(usize) -> f64,
    refused: &dyn Fn(&dyn Display) -> Error,
) -> Result<Vec<u8>, Error> {
    if tokens != values {
        return Err(refused(&format_args!("`{name}` holds {values} values for {tokens} tokens")));
    }
    let mut weights = Vec::with_capacity(tokens * WEIGHT_BYTES);
    for at in 0..tokens {
        let weight = value(at) as f32;
        if !weight.is_finite() {
            return Err(refused(&format_args!("`{name}` holds {} for token {at}", value(at))));
        }
        weights.extend(weight.to_le_bytes());
    }
    Ok(weights)
}

/// Passes tokens on in pieces, with their weights where there are any.
///
/// # Errors
/// Those of the sink.
pub(super) fn pass(
    sink: &mut dyn Sink,
    tokens: &[u8],
    width: usize,
    weights: Option<&[u8]>,
) -> Result<(), Error> {
    let mut weights = weights.map(|weights| weights.chunks(MAX_PIECE / width * WEIGHT_BYTES));
    for piece in tokens.chunks(MAX_PIECE) {
        if let Some(weights) = weights.as_mut().and_then(Iterator::next) {
            sink.weights(weights)?;
        }
        sink.tokens(piece)?;
    }
    Ok(())
}

/// Whether there is a file of this name; anything else of this name is an error, a link to nothing
/// too.
fn is_there(path: &Path) -> Result<bool, Error> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(Error::read(path)(error)),
        Ok(_) if fs::metadata(path).is_ok_and(|found| found.is_file()) => Ok(true),
        Ok(_) => {
            let why = "is no file, and would hold the loss weights of the tokens beside it";
            Err(Error::refused(path, why, "remove or rename it"))
        }
    }
}

/// Opens an array of `float32`; also returns its length, and where the values are.
fn open_array(path: &Path) -> Result<(File, u64, TokenFile), Error> {
    let file = File::open(path).map_err(Error::read(path))?;
    let len = file.metadata().map_err(Error::read(path))?.len();
    let mut head = Vec::new();
    (&file).take(HEAD_BYTES).read_to_end(&mut head).map_err(Error::read(path))?;
    let refused = |what: &dyn Display| {
        let why = format!("holds no loss weights, which are an array of float32: {what}");
        let hint = "save them with numpy: numpy.save(NAME, weights.astype(\"float32\"))";
        Error::refused(path, why, hint)
    };
    match npy::parse(&head, len) {
        Ok(found) if found.dtype == Dtype::F32 => Ok((file, len, found)),
        Ok(found) => Err(refused(&found.dtype)),
        Err(error) => Err(refused(&error)),
    }
}

/// What a file of loss weights holds.
#[derive(Clone, Debug, Serialize)]
pub struct Weights {
    /// The file.
    pub file: PathBuf,
    /// How many.
    pub values: u64,
    /// The smallest, the largest, and their mean, of those that are finite.
    pub min: f32,
    /// See [`min`](Weights::min).
    pub max: f32,
    /// See [`min`](Weights::min).
    pub mean: f64,
    /// How many are 0.
    pub zeros: u64,
    /// How many are NaN or infinite: a stream ends there.
    pub not_finite: u64,
}

impl Weights {
    /// Reads all of a file of loss weights.
    ///
    /// # Errors
    /// When it cannot be read, or holds anything else.
    pub fn read(path: &Path) -> Result<Weights, Error> {
        let (file, _, found) = open_array(path)?;
        let end = found.data_offset + found.data_bytes();
        let mut blocks = Blocks::new(&file, path, found.data_offset, end);
        let (mut min, mut max, mut sum) = (f32::INFINITY, f32::NEG_INFINITY, 0.0);
        let (mut zeros, mut not_finite, mut left) = (0, 0, found.data_bytes());
        while left > 0 {
            let block = blocks.next(left)?;
            left -= block.len() as u64;
            for raw in block.as_chunks().0 {
                let weight = f32::from_le_bytes(*raw);
                if !weight.is_finite() {
                    not_finite += 1;
                    continue;
                }
                (min, max, sum) = (min.min(weight), max.max(weight), sum + f64::from(weight));
                zeros += u64::from(weight == 0.0);
            }
        }
        let finite = found.tokens - not_finite;
        if finite == 0 {
            (min, max) = (0.0, 0.0);
        }
        let (mean, file) = (sum / finite.max(1) as f64, path.to_owned());
        Ok(Weights { file, values: found.tokens, min, max, mean, zeros, not_finite })
    }

    /// Those beside a file of tokens, if there are any.
    ///
    /// # Errors
    /// As [`read`](Weights::read).
    pub fn beside(tokens: &Path) -> Result<Option<Weights>, Error> {
        let path = settle::loss_weights_of(tokens);
        if is_there(&path)? { Weights::read(&path).map(Some) } else { Ok(None) }
    }

    /// Writes a manifest of the file and returns its path.
    ///
    /// # Errors
    /// When it cannot be read or its folder cannot be written.
    pub fn write_manifest(&self) -> Result<PathBuf, Error> {
        let files = [PathBuf::from(self.file.file_name().unwrap_or_default())];
        let contents = Contents { tokens: self.values, ..Contents::default() };
        let described = (Kind::Npy.name(), Dtype::F32);
        let folder = folder_of(&self.file);
        Manifest::create(described, contents, &folder, &files, &|_| ())?.store(&self.file)
    }

    /// Compares every block with the manifest beside the file; whether there is one.
    ///
    /// # Errors
    /// When it differs.
    pub fn verify(&self) -> Result<bool, Error> {
        let Some(manifest) = Manifest::load(&self.file)? else { return Ok(false) };
        manifest.verify(&folder_of(&self.file), &|_| ())?;
        Ok(true)
    }
}

/// The file beside a dataset in one run.
pub(crate) struct Beside {
    path: PathBuf,
    file: File,
    data_offset: u64,
}

impl Beside {
    /// Opens the weights of the tokens of this file, if there are any: as many as there are tokens.
    ///
    /// # Errors
    /// When there is such a file that does not hold them.
    pub(crate) fn open(tokens_path: &Path, tokens: u64) -> Result<Option<Beside>, Error> {
        let path = settle::loss_weights_of(tokens_path);
        if !is_there(&path)? {
            return Ok(None);
        }
        let (file, len, found) = open_array(&path)?;
        if found.tokens != tokens {
            let (count, of) = (found.tokens, tokens_path.display());
            let why = format!("holds {count} loss weights for the {tokens} tokens of {of}");
            let hint = "write a float32 for each token, or remove the file";
            return Err(Error::refused(&path, why, hint));
        }
        if let Some(manifest) = Manifest::load(&path)? {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let agrees = settle::agrees(&manifest, (&name, len), (Dtype::F32, tokens));
            agrees.map_err(|refusal| Error::refused(&path, refusal.why, refusal.hint))?;
        }
        Ok(Some(Beside { path, file, data_offset: found.data_offset }))
    }

    /// Its file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Passes the weights of so many tokens from one on to a sink.
    pub(super) fn pass(&self, first: u64, tokens: usize, sink: &mut dyn Sink) -> Result<(), Error> {
        let mut weights = vec![0; tokens * WEIGHT_BYTES];
        let at = self.data_offset + first * WEIGHT_BYTES as u64;
        self.file.read_exact_at(&mut weights, at).map_err(Error::read(&self.path))?;
        let mut values =
            (first..).zip(weights.as_chunks().0.iter().copied().map(f32::from_le_bytes));
        if let Some((token, weight)) = values.find(|(_, weight)| !weight.is_finite()) {
            let why = format!("holds {weight} for token {token}");
            return Err(Error::refused(&self.path, why, "a loss weight is a finite number"));
        }
        sink.weights(&weights)
    }
}
