//! A user action for tests.

use xio::dataset::Dtype;
use xio::kernel::{MapFault, TokenMap};

/// A user action that flips the lowest bit of every token with an odd number.
#[derive(Debug)]
pub(crate) struct Flip;

impl TokenMap for Flip {
    fn map(&self, tokens: &mut [u8], dtype: Dtype, first_token: u64) -> Result<(), MapFault> {
        for (number, token) in (first_token..).zip(tokens.chunks_mut(dtype.bytes() as usize)) {
            token[0] ^= (number & 1) as u8;
        }
        Ok(())
    }
}

impl Flip {
    /// The same for one token.
    pub(crate) fn one(number: u64, value: i128) -> i128 {
        value ^ i128::from(number & 1)
    }

    /// The action in a plan.
    pub(crate) fn text() -> String {
        format!(" | wasm(flip, sha256={})", "5a".repeat(32))
    }
}
