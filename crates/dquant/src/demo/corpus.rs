//! Token files for the demo: generated here, or the user's own.
//!
//! To a storage system the generated ones look like language: ids drawn by a power law over a
//! vocabulary of 50,257, in documents that end with an end-of-text token. They are read twice
//! before the run, because on many virtual machines the first touch of unused memory is slow, and
//! the run is to measure Dquant, not the hypervisor.

use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use formats::ReadOptions;
use rand_pcg::Pcg64;
use rand_pcg::rand_core::{Rng, SeedableRng};
use xio::dataset::{Dtype, TokenFile};

use super::{Config, Watch};
use crate::exit::CliError;

/// Names and weights of the generated corpora.
const MADE: [(&str, &str); 3] = [("web", "0.5"), ("code", "0.3"), ("books", "0.2")];

/// Tokens of a generated corpus: 96 MiB of u32, so that three of them do not fit a processor's
/// cache.
const MADE_TOKENS: u64 = 24 << 20;

/// Vocabulary of the generated corpora, as r50k_base.
const VOCABULARY: u32 = 50_257;

/// A token file of the blend.
#[derive(Clone, Debug)]
pub struct Corpus {
    /// Its name below the target's root.
    pub name: String,
    /// Its weight, as written.
    pub weight: String,
    /// Where it is.
    pub path: PathBuf,
    /// Its content.
    pub file: TokenFile,
}

/// Generates the corpora below `folder`, or finds them.
pub fn prepare(
    config: &Config,
    folder: &Path,
    watch: &mut dyn Watch,
) -> Result<Vec<Corpus>, CliError> {
    let corpora = match config.data.is_empty() {
        true => make_all(config, folder, watch)?,
        false => config.data.iter().map(|given| take(config, given)).collect::<Result<_, _>>()?,
    };
    for corpus in &corpora {
        heat(&corpus.path)?;
    }
    Ok(corpora)
}

fn make_all(
    config: &Config,
    folder: &Path,
    watch: &mut dyn Watch,
) -> Result<Vec<Corpus>, CliError> {
    let count = config.corpora.clamp(1, MADE.len());
    watch.note(&format!("making {count} corpora of {} million tokens", MADE_TOKENS / 1_000_000));
    let mut corpora = Vec::with_capacity(count);
    for (index, (name, weight)) in (0..).zip(&MADE[..count]) {
        let path = folder.join(format!("{name}.bin"));
        make(&path, config.seed ^ (index << 32))
            .map_err(|error| CliError::because(path.display(), &error))?;
        corpora.push(describe(config, &path, (*name).to_owned(), (*weight).to_owned())?);
    }
    Ok(corpora)
}

fn take(config: &Config, (path, weight): &(PathBuf, String)) -> Result<Corpus, CliError> {
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| CliError::usage(format!("{}: no file name", path.display())))?;
    describe(config, path, name.to_owned(), weight.clone())
}

fn describe(
    config: &Config,
    path: &Path,
    name: String,
    weight: String,
) -> Result<Corpus, CliError> {
    let dtype = flat_type(&config.dtype)?;
    let path = path.canonicalize().map_err(|error| CliError::because(path.display(), &error))?;
    let file = layout_of(&path, dtype)?;
    Ok(Corpus { name, weight, file, path })
}

/// The type of flat files that the user gave; an empty name is none.
pub(crate) fn flat_type(name: &str) -> Result<Option<Dtype>, CliError> {
    let unknown = || CliError::usage(format!("token type {name:?} is unknown")).hint("try u32");
    (!name.is_empty()).then(|| Dtype::integer_from_name(name).ok_or_else(unknown)).transpose()
}

/// Content of a token file; `flat` is the type of flat files that the user gave.
pub(super) fn layout_of(path: &Path, flat: Option<Dtype>) -> Result<TokenFile, CliError> {
    let says_itself = path.extension().is_some_and(|ending| ending == "npy")
        || path.with_extension("idx").exists();
    let dtype = flat.filter(|_| !says_itself);
    let source = formats::open(path, &ReadOptions { dtype, ..ReadOptions::default() })?;
    let not_run = || {
        CliError::usage(format_args!("{} is not one run of tokens", path.display()))
            .hint("convert it first: dquant convert")
    };
    source.layout().run.ok_or_else(not_run)
}

/// Writes a corpus.
fn make(path: &Path, seed: u64) -> std::io::Result<()> {
    let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
    let mut random = Pcg64::seed_from_u64(seed);
    let mut left_in_document = 0u32;
    for _ in 0..MADE_TOKENS {
        let token = if left_in_document == 0 {
            left_in_document = 64 + (random.next_u64() % 2_000) as u32;
            VOCABULARY - 1
        } else {
            left_in_document -= 1;
            power_law(random.next_u64())
        };
        out.write_all(&token.to_le_bytes())?;
    }
    out.into_inner()?.sync_data()
}

/// Small ids often, large ids rarely: the fourth power of a uniform number.
fn power_law(draw: u64) -> u32 {
    let uniform = draw >> 32;
    let square = (uniform * uniform) >> 32;
    let fourth = (square * square) >> 32;
    ((fourth * u64::from(VOCABULARY - 1)) >> 32) as u32
}

/// Reads the file twice.
fn heat(path: &Path) -> Result<(), CliError> {
    let failed = |error: std::io::Error| CliError::because(path.display(), &error);
    let mut buffer = vec![0; 1 << 20];
    for _ in 0..2 {
        let mut file = File::open(path).map_err(failed)?;
        while file.read(&mut buffer).map_err(failed)? > 0 {}
    }
    Ok(())
}
