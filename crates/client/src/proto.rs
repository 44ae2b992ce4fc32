//! Messages, generated from `proto/dquant/v1/control.proto`; those of the local socket are used.

#![allow(missing_docs, clippy::all, unreachable_pub, unused_qualifications, dead_code)]

use xio::dataset::{Dtype, Identity};

include!(concat!(env!("OUT_DIR"), "/dquant.v1.rs"));

impl Opened {
    /// Bytes of a token; 0 if the server names a type that this version does not know.
    pub fn token_bytes(&self) -> usize {
        Dtype::from_name(&self.dtype).map_or(0, |dtype| dtype.bytes() as usize)
    }

    /// Rows of a sample: its tokens, or inputs and labels; then positions and numbers of documents, if the plan asks
    /// for them.
    pub fn rows(&self) -> usize {
        1 + usize::from(self.pairs) + 2 * usize::from(self.positions)
    }

    /// Bytes of a batch.
    pub fn batch_bytes(&self) -> usize {
        self.rows() * self.batch_samples as usize * self.window_tokens as usize * self.token_bytes()
    }
}

impl DatasetInfo {
    /// What decides which bytes it gives.
    pub fn identity(&self) -> Identity<'_> {
        let DatasetInfo { name, dtype, tokens, data_offset, fingerprint, .. } = self;
        Identity {
            name,
            dtype,
            tokens: *tokens,
            data_offset: *data_offset,
            fingerprint: *fingerprint,
            content: self.content,
            documents: self.documents,
        }
    }
}
