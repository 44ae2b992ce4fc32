//! User actions: code of users that maps tokens, behind a trait that the world implements in a
//! sandbox.
//!
//! An action maps each token by itself: its result depends on the token and on its number in the
//! file, and on nothing else. Blocks are cut differently by every plan, so anything more would make
//! a batch depend on how its file was read (C4). What runs the action checks that.

use core::fmt;

use thiserror::Error;

use crate::dataset::Dtype;

/// A user action.
pub trait TokenMap: fmt::Debug + Send + Sync {
    /// Maps little-endian tokens in place. `first_token` is the number of the first one in its
    /// file. After an error the contents of `tokens` are unspecified.
    ///
    /// # Errors
    /// See [`MapFault`].
    fn map(&self, tokens: &mut [u8], dtype: Dtype, first_token: u64) -> Result<(), MapFault>;
}

/// Why a user action failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum MapFault {
    /// It executed something that traps.
    #[error("it trapped: {0}")]
    Trap(Trap),
    /// It ran longer than it may.
    #[error("it exceeded its time")]
    Time,
    /// It asked for more memory than it may have.
    #[error("it exceeded its memory")]
    Memory,
    /// It returned an error code of its own.
    #[error("it returned the error code {0}")]
    Code(i32),
    /// Its buffer for the tokens is not inside its memory, or not aligned.
    #[error("its buffer for the block is missing, misaligned or outside its memory")]
    Buffer,
    /// The result of a token depends on where the block was cut.
    #[error("its result depends on other tokens than the one it maps")]
    NotByItself,
}

/// What trapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Trap {
    /// An instruction that is never to be reached, such as a panic.
    #[error("`unreachable` was executed, as by a panic")]
    Unreachable,
    /// An address outside the memory, or an index outside a table.
    #[error("an address outside its memory")]
    OutOfBounds,
    /// A division by zero, or one whose result does not fit.
    #[error("a division by zero, or a result that does not fit")]
    Arithmetic,
    /// More nested calls than the stack has room for.
    #[error("its stack overflowed")]
    StackOverflow,
    /// Anything else.
    #[error("an invalid operation")]
    Other,
}

/// Every trap; the position is its code on the wire.
const TRAPS: [Trap; 5] =
    [Trap::Unreachable, Trap::OutOfBounds, Trap::Arithmetic, Trap::StackOverflow, Trap::Other];

impl MapFault {
    /// Whether one token causes it, so that the tokens before it can be mapped without it.
    pub const fn is_of_a_token(self) -> bool {
        matches!(self, MapFault::Trap(_) | MapFault::Code(_))
    }

    /// Its number in capsules, and a detail.
    pub(crate) fn code(self) -> (u8, u32) {
        match self {
            MapFault::Trap(trap) => {
                let position = TRAPS.iter().position(|known| *known == trap);
                (1, position.map_or(u32::MAX, |position| position as u32))
            }
            MapFault::Time => (2, 0),
            MapFault::Memory => (3, 0),
            MapFault::Code(code) => (4, code as u32),
            MapFault::Buffer => (5, 0),
            MapFault::NotByItself => (6, 0),
        }
    }

    /// The fault of a number and a detail; none if no fault has them.
    pub(crate) fn from_code(code: u8, detail: u32) -> Option<MapFault> {
        match (code, detail) {
            (1, trap) => TRAPS.get(trap as usize).copied().map(MapFault::Trap),
            (2, 0) => Some(MapFault::Time),
            (3, 0) => Some(MapFault::Memory),
            (4, code) => Some(MapFault::Code(code as i32)),
            (5, 0) => Some(MapFault::Buffer),
            (6, 0) => Some(MapFault::NotByItself),
            _ => None,
        }
    }
}
