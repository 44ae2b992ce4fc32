//! Stores of the brains: the same rules over each of them, and what only one of them can suffer.

mod brains;
mod conformance;
mod etcd;
mod file;
mod history;
mod ledger;
mod members;
mod scratch;
