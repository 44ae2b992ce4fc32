//! Stores of the brains: the same rules over each of them, and what only one of them can suffer.

mod conformance;
mod etcd;
mod file;
mod members;
mod scratch;
