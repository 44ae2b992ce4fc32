//! The formats by name.

use std::fmt;

use serde::{Deserialize, Serialize};
use xio::dataset::Dtype;

/// A format of token datasets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Nothing but tokens.
    Flat,
    /// NumPy `.npy`.
    Npy,
    /// Megatron `.bin` with `.idx`.
    Megatron,
    /// MosaicML Streaming.
    Mds,
    /// LitData.
    LitData,
    /// Tar archives of WebDataset.
    WebDataset,
    /// Parquet with a column of lists.
    Parquet,
    /// Arrow IPC with a column of lists, file or stream.
    Arrow,
}

impl Kind {
    /// Every format.
    pub const ALL: [Kind; 8] = [
        Kind::Flat,
        Kind::Npy,
        Kind::Megatron,
        Kind::Mds,
        Kind::LitData,
        Kind::WebDataset,
        Kind::Parquet,
        Kind::Arrow,
    ];

    /// The name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Flat => "flat",
            Kind::Npy => "npy",
            Kind::Megatron => "megatron",
            Kind::Mds => "mds",
            Kind::LitData => "litdata",
            Kind::WebDataset => "webdataset",
            Kind::Parquet => "parquet",
            Kind::Arrow => "arrow",
        }
    }

    /// The format with this name.
    pub fn from_name(name: &str) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Whether it keeps documents apart.
    pub const fn has_documents(self) -> bool {
        !matches!(self, Kind::Flat | Kind::Npy)
    }

    /// Whether a dataset is a folder.
    pub const fn is_folder(self) -> bool {
        matches!(self, Kind::Mds | Kind::LitData)
    }

    /// The type in which tokens of this type are stored unless the user chooses another: the same,
    /// or the signed one of the same width where the format has no other.
    pub const fn stored(self, dtype: Dtype) -> Dtype {
        match (self, dtype) {
            (Kind::Megatron, Dtype::U32) => Dtype::I32,
            (Kind::Megatron, Dtype::U64) => Dtype::I64,
            _ => dtype,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
