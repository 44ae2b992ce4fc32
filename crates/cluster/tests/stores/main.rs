//! Stores of the brains: the same rules over each of them, and what only one of them can suffer.

mod conformance;
mod file;
mod scratch;
