//! Token datasets in the formats of other libraries: read, written, described and converted.
//!
//! One model covers all formats: a dataset is a sequence of documents, each a run of integers of
//! one type. A format without documents holds one.
//!
//! | module | what it holds |
//! |---|---|
//! | [`source`], [`reading`] | detection, a stream of tokens for each format, and all cores reading one |
//! | [`convert`] | from one format into another, verified, and resumed after a crash |
//! | [`manifest`] | the sidecar file with type, counts and checksums |
//! | [`dochash`] | hashes of documents in a sidecar, and lists of them |
//! | [`ReadAt`] | reads by position, of files of this machine and of other places |
//! | [`documents`] | the lengths of documents, from the index beside a file |
//! | [`settle`] | which type the tokens of a flat file have, and who says so |
//!
//! Files are hostile: every length and offset is checked before it is used, memory is bounded
//! whatever they say, and every refusal names the file. Networking and commands do not belong here;
//! headers of flat, NumPy and Megatron files are described by [`xio::dataset`], which reads nothing
//! itself.

pub mod convert;
mod cores;
mod digest;
pub mod dochash;
pub mod documents;
mod error;
mod kind;
pub mod manifest;
mod read_at;
pub mod reading;
pub mod settle;
pub mod source;
mod value;
mod whole;
mod writer;

pub use error::{BELOW_ZERO_HINT, DOCUMENTLESS_HINT, Error, VOCABULARY_HINT};
pub use kind::Kind;
pub use manifest::Manifest;
pub use read_at::ReadAt;
pub use source::weights::Weights;
pub use source::{Layout, ReadOptions, Source, open};
pub use writer::WriteOptions;
pub use writer::contiguous::npy_header;
