//! How many tokens a model is trained to say, in the results of commands that write or read them.

use std::fmt;

use super::console;
use crate::units::Count;

/// Targets of so many tokens, as `1,234 tokens, 31.4 %`.
pub(super) struct Targets(pub(super) u64, pub(super) u64);

impl fmt::Display for Targets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = 100.0 * self.0 as f64 / self.1.max(1) as f64;
        write!(f, "{} tokens, {percent:.1} %", Count(self.0))
    }
}

impl Targets {
    /// Warns where a model would be trained on nothing, or on everything. The hint says what decides it.
    pub(super) fn check(&self, hint: &str) {
        match self {
            Targets(_, 0) => {}
            Targets(0, _) => {
                console::warn("none of the tokens is a target: training learns nothing", hint);
            }
            Targets(targets, tokens) if targets == tokens => {
                console::warn("all tokens are targets, as without --targets", hint);
            }
            _ => {}
        }
    }
}
