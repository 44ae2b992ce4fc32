//! Loss weights beside the tokens: a `f32` for each of them.
//!
//! They come from a second column of the same rows, or from the file that lies beside a dataset in one run. A weight is any
//! finite number. What a weight does to a token is a plan's matter.

use std::fmt::Display;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use xio::dataset::{Dtype, npy};

use super::{MAX_PIECE, Sink};
use crate::error::Error;
use crate::manifest::Manifest;
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
        if !path.is_file() {
            return Ok(None);
        }
        let file = File::open(&path).map_err(Error::read(&path))?;
        let len = file.metadata().map_err(Error::read(&path))?.len();
        let mut head = Vec::new();
        (&file).take(HEAD_BYTES).read_to_end(&mut head).map_err(Error::read(&path))?;
        let found = npy::parse(&head, len).map_err(Error::dataset(&path))?;
        if found.dtype != Dtype::F32 || found.tokens != tokens {
            let why = format!(
                "holds {} values of {}, not {tokens} of f32 for the tokens of {}",
                found.tokens,
                found.dtype,
                tokens_path.display()
            );
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
        sink.weights(&weights)
    }
}
