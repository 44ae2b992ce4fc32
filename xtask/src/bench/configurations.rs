//! The configurations of the main job: what is run, and what of it must be equal. Neither runs nor
//! tables belong here.

use super::figures::Figures;

/// A way to run the demo.
#[derive(Debug)]
pub(super) struct Configuration {
    pub(super) name: &'static str,
    pub(super) options: &'static [&'static str],
    /// Runs over the same number of corpora deliver the same stream.
    pub(super) corpora: u8,
    /// Whether the targets apply to it.
    pub(super) has_targets: bool,
}

pub(super) const CONFIGURATIONS: &[Configuration] = &[
    Configuration { name: "offload", options: &[], corpora: 3, has_targets: true },
    Configuration {
        name: "no offload",
        options: &["--offload", "false"],
        corpora: 3,
        has_targets: false,
    },
    Configuration {
        name: "offload, 1 % loss",
        options: &["--loss", "1%"],
        corpora: 3,
        has_targets: false,
    },
    Configuration {
        name: "offload, 1 corpus",
        options: &["--corpora", "1"],
        corpora: 1,
        has_targets: false,
    },
];

/// Every run of one configuration.
pub(super) type Series = Vec<Figures>;
