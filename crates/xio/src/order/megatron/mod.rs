//! The order of samples of Megatron-core's `GPTDataset` and `BlendedDataset`, bit for bit.
//!
//! ```text
//! n --Picks--> (dataset, k)      k-th sample of that dataset                 `BlendedDataset`
//! k --Sequences--> pieces        ranges of tokens of the file                `GPTDataset`
//! ```
//!
//! Unlike the [order](super) of Dquant, this one is defined by sequential shuffles of whole arrays,
//! so it needs tables: [`Settings::max_table_bytes`] bounds them, and
//! [`MegatronOrder::table_bytes`] returns what they take. They are made once, from the lengths of
//! the documents and the settings, and are the same on every machine.
//!
//! The order is described in `docs/megatron.md`, from which a second implementation was written.
//! Goldens made by megatron-core itself are in `tests/data/megatron.txt`. No file is read here.

mod blend;
mod random;
mod sequences;
mod weights;

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use thiserror::Error;

use super::MAX_DATASETS;
use crate::documents::Documents;

use blend::Picks;
pub use sequences::Pieces;
use sequences::Sequences;
pub use weights::split;

/// Most samples of a dataset or a blend. With more, megatron-core draws 64-bit numbers.
pub const MAX_SAMPLES: u64 = u32::MAX as u64 - 2;

/// Most tokens of a sample.
pub const MAX_SEQUENCE_TOKENS: u32 = 1 << 24;

/// Bytes of tables that a caller without its own bound may use.
pub const DEFAULT_MAX_TABLE_BYTES: u64 = 4 << 30;

/// The documents of a dataset that are in use.
#[derive(Clone, Debug)]
pub struct Source {
    /// The *sequences* of the Megatron index, which are what megatron-core shuffles. An index may
    /// have documents of several sequences.
    pub documents: Documents,
    /// Those in use: all, or a part by [`split`].
    pub part: Range<usize>,
}

/// What the order depends on besides the datasets.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Megatron's `seed`.
    pub seed: u32,
    /// Megatron's `seq_length`: tokens from the start of a sample to the start of the next.
    pub sequence_tokens: u32,
    /// Whether a sample has one more token, for its labels, as `add_extra_token_to_sequence` says.
    pub extra_token: bool,
    /// Samples of the training run: its iterations times the samples of a global batch. Without it,
    /// every dataset is used once.
    pub samples: Option<u64>,
    /// Most bytes of tables.
    pub max_table_bytes: u64,
}

impl Settings {
    fn extra(&self) -> u64 {
        self.extra_token.into()
    }

    /// Tokens of a sample.
    pub fn window_tokens(&self) -> u64 {
        u64::from(self.sequence_tokens) + self.extra()
    }
}

/// Why there is no such order.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MegatronError {
    /// There are no datasets.
    #[error("no dataset is given")]
    NoDataset,
    /// More datasets than [`MAX_DATASETS`].
    #[error("{datasets} datasets are blended, at most {MAX_DATASETS} can be")]
    TooManyDatasets {
        /// How many were given.
        datasets: usize,
    },
    /// The number of weights must equal the number of datasets.
    #[error("{weights} weights for {datasets} datasets")]
    Count {
        /// Weights given.
        weights: usize,
        /// Datasets given.
        datasets: usize,
    },
    /// A weight is not above zero.
    #[error("the weight of dataset {dataset} is not above zero, as megatron-core requires")]
    Weight {
        /// Which one, from 0.
        dataset: usize,
    },
    /// Weights need a number of samples.
    #[error("a blend with weights needs the number of samples of the training run")]
    NeedsSamples,
    /// A number of samples that is zero or above [`MAX_SAMPLES`].
    #[error("{samples} samples are outside 1 to {MAX_SAMPLES}")]
    Samples {
        /// How many.
        samples: u64,
    },
    /// Samples of no tokens, or of more than [`MAX_SEQUENCE_TOKENS`].
    #[error("samples of {tokens} tokens are outside 1 to {MAX_SEQUENCE_TOKENS}")]
    Sequence {
        /// How many.
        tokens: u32,
    },
    /// The part of a dataset is not within its documents.
    #[error("documents {start} to {end} of dataset {dataset} are not within its {documents}")]
    Part {
        /// Which one, from 0.
        dataset: usize,
        /// First document.
        start: usize,
        /// The document after the last one.
        end: usize,
        /// Documents of the dataset.
        documents: usize,
    },
    /// A ratio that does not divide documents.
    #[error("a split has one to three numbers, none below zero and not all zero")]
    Split,
    /// The documents in use have no tokens.
    #[error("the documents of dataset {dataset} in use have no tokens")]
    NoTokens {
        /// Which one, from 0.
        dataset: usize,
    },
    /// One epoch of a dataset has no sample.
    #[error("the {tokens} tokens of dataset {dataset} do not fill one sample of {window}")]
    NoSample {
        /// Which one, from 0.
        dataset: usize,
        /// Tokens in use.
        tokens: u64,
        /// Tokens of a sample.
        window: u64,
    },
    /// Without weights datasets are used once, and have too few samples.
    #[error(
        "the datasets have {available} samples, {samples} are asked for; with weights they are repeated"
    )]
    TooFew {
        /// Samples of all datasets.
        available: u64,
        /// Samples asked for.
        samples: u64,
    },
    /// The blend draws more samples from a dataset than it was built for, which megatron-core
    /// refuses too.
    #[error("the blend draws {drawn} samples from dataset {dataset}, which has {samples}")]
    Oversampled {
        /// Which one, from 0.
        dataset: usize,
        /// Samples drawn from it.
        drawn: u64,
        /// Samples that it has.
        samples: u64,
    },
    /// The tables need more memory than is allowed, or than there is.
    #[error("the tables of {samples} samples need more than {limit} bytes")]
    Memory {
        /// Samples of the dataset or blend whose table does not fit.
        samples: u64,
        /// Bytes allowed.
        limit: u64,
    },
}

impl MegatronError {
    /// The dataset that is the cause, from 0; none if it is not one of them.
    pub const fn dataset(&self) -> Option<usize> {
        match self {
            MegatronError::Weight { dataset }
            | MegatronError::Part { dataset, .. }
            | MegatronError::NoTokens { dataset }
            | MegatronError::NoSample { dataset, .. }
            | MegatronError::Oversampled { dataset, .. } => Some(*dataset),
            _ => None,
        }
    }
}

/// The order of the samples of a training run. Cheap to clone.
#[derive(Clone, Debug)]
pub struct MegatronOrder {
    tables: Arc<Tables>,
}

#[derive(Debug)]
struct Tables {
    datasets: Vec<Sequences>,
    /// Absent for one dataset without a weight, whose samples come as they are.
    picks: Option<Picks>,
    samples: u64,
    bytes: u64,
}

impl MegatronOrder {
    /// The order of one dataset, or of several by `weights`; without weights several are blended in
    /// proportion to their samples. One dataset with a weight is a blend of one, as in
    /// megatron-core. Takes seconds for 10^8 samples.
    ///
    /// # Errors
    /// When megatron-core refuses such datasets or never returns from them, and when there is not
    /// enough memory.
    pub fn new(
        sources: Vec<Source>,
        weights: Option<&[f64]>,
        settings: &Settings,
    ) -> Result<MegatronOrder, MegatronError> {
        check(&sources, weights, settings)?;
        let normalized = weights.map(weights::normalize);
        let wanted = |dataset: usize| match &normalized {
            // Megatron-core does not build a dataset for no samples.
            Some(weights) => {
                settings.samples.map(|all| weights::samples_with_margin(all, weights[dataset]))
            }
            None => settings.samples.filter(|_| sources.len() == 1),
        };
        let mut memory =
            Memory { dataset: 0, samples: 0, used: 0, limit: settings.max_table_bytes };
        let mut datasets = Vec::with_capacity(sources.len());
        for (dataset, Source { documents, part }) in sources.iter().enumerate() {
            memory.dataset = dataset;
            let (documents, part) = (documents.clone(), part.clone());
            datasets.push(Sequences::new(documents, part, wanted(dataset), settings, &mut memory)?);
        }
        let (picks, samples) = match (&normalized, datasets.as_slice()) {
            (None, [only]) => (None, settings.samples.unwrap_or(only.samples())),
            (weights, datasets) => blend(weights.as_deref(), datasets, settings, &mut memory)?,
        };
        let tables = Tables { datasets, picks, samples, bytes: memory.used };
        Ok(MegatronOrder { tables: Arc::new(tables) })
    }

    /// Datasets of the blend.
    pub fn datasets(&self) -> usize {
        self.tables.datasets.len()
    }

    /// Most pieces of a sample of a dataset.
    pub fn most_pieces(&self, dataset: usize) -> u32 {
        self.tables.datasets.get(dataset).map_or(0, Sequences::most_pieces)
    }

    /// Samples of the training run. There is none after the last: megatron-core raises `IndexError`
    /// there.
    pub fn samples(&self) -> u64 {
        self.tables.samples
    }

    /// Bytes of the tables, without the tables of documents.
    pub fn table_bytes(&self) -> u64 {
        self.tables.bytes
    }

    /// How often the documents of a dataset are used, the last time in part.
    pub fn epochs(&self, dataset: usize) -> Option<u64> {
        self.tables.datasets.get(dataset).map(Sequences::epochs)
    }

    /// Samples that a dataset has, which may be more than are drawn from it.
    pub fn dataset_samples(&self, dataset: usize) -> Option<u64> {
        self.tables.datasets.get(dataset).map(Sequences::samples)
    }

    /// Dataset of global sample `n`, and the number of that sample in it. Costs a seek: use a
    /// cursor for a run.
    pub fn at(&self, n: u64) -> Option<(usize, u64)> {
        self.cursor_at(n).next()
    }

    /// Iterates from global sample `n` on, to the last one.
    pub fn cursor_at(&self, n: u64) -> MegatronCursor {
        let drawn = match &self.tables.picks {
            Some(picks) => picks.drawn(n),
            None => Vec::from([n.min(self.tables.samples) as u32]),
        };
        MegatronCursor { order: self.clone(), position: n, drawn }
    }

    /// The tokens of the `k`-th sample of a dataset, in the order of the blend; none if it has
    /// fewer.
    pub fn pieces(&self, dataset: usize, k: u64) -> impl Iterator<Item = Range<u64>> + '_ {
        self.tables.datasets.get(dataset).into_iter().flat_map(move |samples| samples.pieces(k))
    }
}

/// What of the arguments of [`MegatronOrder::new`] is wrong by itself.
fn check(
    sources: &[Source],
    weights: Option<&[f64]>,
    settings: &Settings,
) -> Result<(), MegatronError> {
    let datasets = sources.len();
    match datasets {
        0 => return Err(MegatronError::NoDataset),
        1..=MAX_DATASETS => {}
        _ => return Err(MegatronError::TooManyDatasets { datasets }),
    }
    if let Some(weights) = weights {
        if weights.len() != datasets {
            return Err(MegatronError::Count { weights: weights.len(), datasets });
        }
        let legal = |weight: &f64| weight.is_finite() && *weight > 0.0;
        if let Some(dataset) = weights.iter().position(|weight| !legal(weight)) {
            return Err(MegatronError::Weight { dataset });
        }
        if settings.samples.is_none() {
            return Err(MegatronError::NeedsSamples);
        }
    }
    if let Some(samples) = settings.samples.filter(|samples| !(1..=MAX_SAMPLES).contains(samples)) {
        return Err(MegatronError::Samples { samples });
    }
    let tokens = settings.sequence_tokens;
    if !(1..=MAX_SEQUENCE_TOKENS).contains(&tokens) {
        return Err(MegatronError::Sequence { tokens });
    }
    let bad = |source: &Source| source.documents.lengths().get(source.part.clone()).is_none();
    match sources.iter().position(bad) {
        Some(dataset) => {
            let Source { documents, part } = &sources[dataset];
            let (start, end, documents) = (part.start, part.end, documents.len());
            Err(MegatronError::Part { dataset, start, end, documents })
        }
        None => Ok(()),
    }
}

/// Blends datasets by weights or, without, by their samples. Returns how many samples there are,
/// too.
fn blend(
    normalized: Option<&[f64]>,
    datasets: &[Sequences],
    settings: &Settings,
    memory: &mut Memory,
) -> Result<(Option<Picks>, u64), MegatronError> {
    let sizes: Vec<u64> = datasets.iter().map(Sequences::samples).collect();
    let available = sizes.iter().sum();
    let samples = settings.samples.unwrap_or(available);
    if normalized.is_none() && samples > available {
        return Err(MegatronError::TooFew { available, samples });
    }
    memory.check_samples(samples)?;
    // Megatron-core normalizes given weights twice, which may change their last digit.
    let weights = match normalized {
        Some(weights) => weights::normalize(weights),
        None => weights::normalize(&sizes.iter().map(|size| *size as f64).collect::<Vec<_>>()),
    };
    let all = settings.samples.is_none().then_some(sizes.as_slice());
    let picks = Picks::new(&weights, all, samples, memory)?;
    let drawn = picks.drawn(samples).into_iter().map(u64::from).zip(sizes).enumerate();
    for (dataset, (drawn, samples)) in drawn {
        if drawn > samples {
            return Err(MegatronError::Oversampled { dataset, drawn, samples });
        }
    }
    Ok((Some(picks), samples))
}

/// The memory that tables take, and the dataset that they are made for.
struct Memory {
    dataset: usize,
    samples: u64,
    used: u64,
    limit: u64,
}

impl Memory {
    /// Notes how many samples the next tables are for.
    fn check_samples(&mut self, samples: u64) -> Result<(), MegatronError> {
        self.samples = samples;
        if samples > MAX_SAMPLES {
            return Err(MegatronError::Samples { samples });
        }
        Ok(())
    }

    /// Entries of a table of all epochs of some documents, which are numbered by 32 bits.
    fn entries(&self, epochs: u64, documents: usize) -> Result<usize, MegatronError> {
        let entries = epochs.checked_mul(documents as u64);
        let entries = entries.and_then(|entries| u32::try_from(entries).ok());
        entries.map(|entries| entries as usize).ok_or(self.refuse())
    }

    /// An empty table with room for so many entries.
    fn table<T>(&mut self, entries: usize) -> Result<Vec<T>, MegatronError> {
        let bytes = (entries as u64).saturating_mul(size_of::<T>() as u64);
        self.used = self.used.saturating_add(bytes);
        let mut table = Vec::new();
        if self.used > self.limit || table.try_reserve_exact(entries).is_err() {
            return Err(self.refuse());
        }
        Ok(table)
    }

    fn refuse(&self) -> MegatronError {
        MegatronError::Memory { samples: self.samples, limit: self.limit }
    }
}

/// Yields the dataset of each sample and its number there, in order. A step costs the same wherever
/// it is.
#[derive(Clone, Debug)]
pub struct MegatronCursor {
    order: MegatronOrder,
    position: u64,
    drawn: Vec<u32>,
}

impl MegatronCursor {
    /// The global index of the sample that comes next.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// The state before global sample `n`. Costs a seek.
    pub(crate) fn forward_to(&self, n: u64) -> MegatronCursor {
        self.order.cursor_at(n)
    }

    /// The order whose state this is.
    pub(crate) fn order(&self) -> &MegatronOrder {
        &self.order
    }

    /// Samples drawn from a dataset before the next one.
    pub fn drawn(&self, dataset: usize) -> u64 {
        self.drawn.get(dataset).map_or(0, |drawn| u64::from(*drawn))
    }
}

impl Iterator for MegatronCursor {
    type Item = (usize, u64);

    fn next(&mut self) -> Option<(usize, u64)> {
        let tables = &self.order.tables;
        let dataset = match &tables.picks {
            Some(picks) => picks.dataset(self.position)?,
            None => (self.position < tables.samples).then_some(0)?,
        };
        let drawn = &mut self.drawn[dataset];
        let k = u64::from(*drawn);
        *drawn += 1;
        self.position += 1;
        Some((dataset, k))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
