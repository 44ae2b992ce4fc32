//! How many tokens a model is trained to say, in the results of commands that write or read them.

use std::fmt;

use lab::units::Count;

use super::console;

/// Targets of so many tokens, as `1,234 tokens, 31.4 %`.
pub(super) struct Targets(pub(super) u64, pub(super) u64);

impl fmt::Display for Targets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Rounded down: 100 % are all of them.
        let thousandths = 1_000 * u128::from(self.0) / u128::from(self.1.max(1));
        write!(f, "{} tokens, {}.{} %", Count(self.0), thousandths / 10, thousandths % 10)
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
