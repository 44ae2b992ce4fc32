//! Which tokens of a row are targets: values beside the tokens, one for each.
//!
//! A mask holds 1 or `true` for each target, and 0 or `false` for every other token. Labels, as
//! collators of Hugging Face make them, hold the token itself, and -100 in place of a token that is
//! no target. Integers are labels when the first row that tells them apart holds anything but 0 and
//! 1; each row is then checked against that. Nothing is guessed of one row. How a format stores the
//! values is not known here.

use std::fmt::Display;
use std::ops::Range;
use std::path::Path;

use super::Sink;
use crate::error::Error;
use crate::manifest::MAX_TURNS;

/// The label of a token that is no target.
const IGNORED: i128 = -100;

/// Longest run of tokens of one kind: a sequence of a Megatron index.
const MAX_RUN: usize = i32::MAX as usize;

pub(super) const HINT: &str = "a mask holds 1 for a target and 0 for other tokens, or booleans; labels hold -100 or the token itself, not the one behind it";

/// What values beside tokens are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Mask,
    Labels,
}

impl Form {
    /// Whether the token is a target; none when the value says nothing about it.
    fn is_target(self, value: i128, token: i128) -> Option<bool> {
        match (self, value) {
            (Form::Mask, 0 | 1) => Some(value == 1),
            (Form::Labels, IGNORED) => Some(false),
            (Form::Labels, label) if label == token => Some(true),
            _ => None,
        }
    }
}

/// What a row tells of the values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    Form(Form),
    /// They may be either.
    Both,
    /// It has no tokens, or not a value for each.
    Nothing,
}

/// The error of a dataset of which no row tells a mask from labels.
pub(super) fn is_unclear(path: &Path, name: &str) -> Error {
    let why = format!("`{name}` may be a mask or labels: all ids are 0 and 1");
    Error::refused(path, why, "save a mask as booleans, which Parquet has")
}

/// Passes tokens of a row on, by their places.
type Put<'a> = &'a dyn Fn(&mut dyn Sink, Range<usize>) -> Result<(), Error>;

/// One row.
pub(super) struct Row<'a> {
    /// What holds the values, for messages.
    pub(super) name: &'a str,
    /// Number of tokens, and of values.
    pub(super) tokens: usize,
    pub(super) values: usize,
    /// The token and the value at a place.
    pub(super) token: &'a dyn Fn(usize) -> i128,
    pub(super) value: &'a dyn Fn(usize) -> i128,
}

impl Row<'_> {
    /// Whether there is a value for each token.
    ///
    /// # Errors
    /// What `refused` makes of the reason.
    pub(super) fn check(&self, refused: &dyn Fn(&dyn Display) -> Error) -> Result<(), Error> {
        let Row { name, tokens, values, .. } = self;
        if tokens != values {
            return Err(refused(&format_args!(
                "`{name}` holds {values} values for {tokens} tokens"
            )));
        }
        if *tokens > MAX_RUN {
            return Err(refused(&format_args!("has more than {MAX_RUN} tokens")));
        }
        Ok(())
    }

    /// What the values are, as far as this row tells. One that is invalid is refused when it is
    /// read.
    pub(super) fn told(&self) -> Told {
        if self.tokens != self.values || self.tokens == 0 {
            return Told::Nothing;
        }
        let mut told = Told::Both;
        for at in 0..self.tokens {
            match (self.value)(at) {
                0 | 1 if (self.value)(at) == (self.token)(at) => {}
                0 | 1 => told = Told::Form(Form::Mask),
                _ => return Told::Form(Form::Labels),
            }
        }
        told
    }

    /// Passes the row on, a document whose sequences take turns: tokens that are no targets, there
    /// may be none, then tokens that are, and so on. `put` passes tokens on.
    ///
    /// # Errors
    /// Those of the sink, and what `refused` makes of a value that is not of this form.
    pub(super) fn pass(
        &self,
        form: Form,
        sink: &mut dyn Sink,
        put: Put<'_>,
        refused: &dyn Fn(&dyn Display) -> Error,
    ) -> Result<(), Error> {
        self.check(refused)?;
        let (mut begun, mut is_target, mut turns) = (0, false, 1_u64);
        for at in 0..self.tokens {
            let (token, value, name) = ((self.token)(at), (self.value)(at), self.name);
            let found = form.is_target(value, token).ok_or_else(|| {
                refused(&format_args!("token {at} is {token}, and `{name}` holds {value} for it"))
            })?;
            if found != is_target {
                put(sink, begun..at)?;
                sink.end_sequence()?;
                (begun, is_target, turns) = (at, found, turns + 1);
                if turns > MAX_TURNS {
                    let why = format_args!("targets begin or end more than {MAX_TURNS} times");
                    return Err(refused(&why));
                }
            }
        }
        put(sink, begun..self.tokens)?;
        sink.end_document()
    }
}
