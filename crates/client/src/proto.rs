//! Messages, generated from `proto/dquant/v1/control.proto`; those of the local socket are used.

#![allow(missing_docs, clippy::all, unreachable_pub, unused_qualifications, dead_code)]

use xio::dataset::{Dtype, Identity};
use xio::plan::Plan;

include!(concat!(env!("OUT_DIR"), "/dquant.v1.rs"));

impl Opened {
    /// Bytes of a token; 0 if the server names a type that this version does not know.
    pub fn token_bytes(&self) -> usize {
        Dtype::from_name(&self.dtype).map_or(0, |dtype| dtype.bytes() as usize)
    }

    /// Rows of a sample: its tokens, or inputs and labels; then positions and numbers of documents,
    /// if the plan asks for them.
    pub fn rows(&self) -> usize {
        1 + usize::from(self.pairs) + 2 * usize::from(self.positions)
    }

    /// Tokens of a row of all samples.
    fn row_tokens(&self) -> usize {
        self.batch_samples as usize * self.window_tokens as usize
    }

    /// Bytes of a batch.
    pub fn batch_bytes(&self) -> usize {
        match self.loss_weights_at() {
            None => self.rows() * self.row_tokens() * self.token_bytes(),
            Some(at) => (at + self.row_tokens() * size_of::<f32>()).next_multiple_of(8),
        }
    }

    /// Where the loss weights of a batch begin, if it has some: a `f32` for each token of a row of
    /// all samples.
    pub fn loss_weights_at(&self) -> Option<usize> {
        let rows = self.rows() * self.row_tokens() * self.token_bytes();
        self.loss_weights.then_some(rows.next_multiple_of(size_of::<f32>()))
    }

    /// The plan that was printed back; `None` if it is of a version that this one does not know.
    fn parsed(&self) -> Option<Plan> {
        Plan::parse(&self.plan, None).ok()
    }

    /// Whether another plan, as it was printed back, makes the same samples in the same order of
    /// the same files, in batches of whatever size and whatever the files are called there.
    pub fn orders_as(&self, plan: &str) -> bool {
        let theirs = Plan::parse(plan, None).ok();
        self.parsed().zip(theirs).is_some_and(|(ours, theirs)| ours.orders_as(&theirs))
    }

    /// Samples after which as many were drawn as all datasets have that are drawn from: an epoch.
    /// Of a blend with weights some were then drawn more than once, and others not all. `None`
    /// where another loader's order lists its samples.
    pub fn epoch_samples(&self) -> Option<u64> {
        let plan = self.parsed()?;
        let drawn = self.datasets.iter().enumerate().filter(|(dataset, _)| plan.draws(*dataset));
        drawn.map(|(_, info)| Some(info.samples).filter(|samples| *samples > 0)).sum()
    }

    /// The datasets that are too short for a sample, and are never drawn from.
    pub fn without_samples(&self) -> impl Iterator<Item = &DatasetInfo> {
        // Another loader's order has none to count.
        let is_own = self.parsed().is_some_and(|plan| plan.megatron().is_none());
        self.datasets.iter().filter(move |info| is_own && info.samples == 0)
    }

    /// What the first `samples` samples of the job are drawn from, in the order of the datasets.
    /// `None` where another loader's order lists its samples.
    pub fn drawn(&self, samples: u64) -> Option<Vec<Drawn>> {
        let drawn = self.parsed()?.drawn(samples)?;
        let window = u64::from(self.window_tokens) + u64::from(self.pairs);
        let datasets = self.datasets.iter().zip(drawn);
        Some(datasets.map(|(info, samples)| Drawn::of(info, samples, window)).collect())
    }
}

/// What was drawn from a dataset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drawn {
    /// Samples.
    pub samples: u64,
    /// Their tokens of the file, with those that windows share; of packed documents without
    /// padding. Within an epoch of packed documents this is the share of the epoch.
    pub tokens: u64,
    /// Tokens of padding.
    pub padding: u64,
}

impl Drawn {
    fn of(info: &DatasetInfo, samples: u64, window: u64) -> Drawn {
        let all = u128::from(samples) * u128::from(window);
        let tokens = match info.packed_samples {
            0 => all,
            of => u128::from(samples) * u128::from(info.packed_tokens) / u128::from(of),
        };
        let number = |tokens: u128| u64::try_from(tokens).unwrap_or(u64::MAX);
        Drawn { samples, tokens: number(tokens), padding: number(all - tokens.min(all)) }
    }
}

impl DatasetInfo {
    /// What decides which bytes it gives.
    pub fn identity(&self) -> Identity<'_> {
        let DatasetInfo { dtype, tokens, data_offset, fingerprint, .. } = self;
        Identity {
            dtype,
            tokens: *tokens,
            data_offset: *data_offset,
            fingerprint: *fingerprint,
            content: self.content,
            documents: self.documents,
            targets: self.targets,
            loss_weights: self
                .loss_weights
                .as_deref()
                .map_or([0, 0], |weights| [weights.fingerprint, weights.content]),
        }
    }
}
