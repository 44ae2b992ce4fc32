//! Stores of the brains: the same rules over each of them, and what only one of them can suffer.

mod brains;
mod conformance;
mod etcd;
mod file;
mod history;
mod ledger;
mod members;
mod scratch;
mod signatures;
#[path = "../../../../testing/skip.rs"]
mod skip;

/// Reports why the test of this thread cannot run on this machine.
fn skip_because(reason: &str) {
    skip::note(std::thread::current().name().unwrap_or("stores"), reason);
}
