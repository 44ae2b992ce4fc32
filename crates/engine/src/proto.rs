//! Messages and services of the control plane and of the local socket, generated from
//! `proto/dquant/v1/control.proto`.

#![allow(missing_docs, clippy::all, clippy::too_many_lines, unreachable_pub, unused_qualifications)]

use xio::dataset::Identity;

tonic::include_proto!("dquant.v1");

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
