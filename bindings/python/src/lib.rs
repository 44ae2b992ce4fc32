//! The Python package `dquant`: streams of batches as buffers, without a copy.
//!
//! This crate turns the library of trainers (`client`) into Python objects and adds nothing to the
//! data path.
//!
//! | module | what it holds |
//! |---|---|
//! | [`source`] | an open stream as all classes share it: waiting without the GIL, signals, forks, closing |
//! | [`stream`], [`mod@file`] | the classes `Stream` and `File`, and `open` |
//! | [`batch`] | the class `Batch`: the buffer protocol over a slot of the ring |
//! | [`dlpack`] | the same memory as a tensor of DLPack |
//! | [`fault`] | what a process says that ends because it wrote to a batch |
//! | [`options`] | keyword arguments |
//! | [`spares`] | memory of copies, for the next ones |
//! | [`errors`] | errors of `client` as exceptions |
//! | [`records`] | what a stream reports about itself as Python objects |
//!
//! Exceptions and records are written in Python (`python/dquant/`); types and signatures for
//! checkers are in `python/dquant/_native.pyi`. Unsafe code is allowed for the buffer protocol,
//! DLPack and a signal only: in [`batch`], in [`dlpack`], in [`fault`], and in [`mod@file`] where a
//! batch is copied into a caller's buffer.

use pyo3::prelude::*;

mod batch;
mod dlpack;
mod errors;
mod fault;
mod file;
mod options;
mod ranks;
mod records;
mod source;
mod spares;
mod stream;

#[pymodule]
mod _native {
    #[pymodule_export]
    use super::batch::Batch;
    #[pymodule_export]
    use super::file::{File, open};
    #[pymodule_export]
    use super::stream::Stream;
}
