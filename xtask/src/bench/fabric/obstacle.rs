//! What stands in the way of a figure, for the report: a measurement that cannot be made is no
//! failure of the bench.

use std::io;

/// Why there is no figure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Obstacle(pub(super) String);

impl Obstacle {
    pub(super) fn new(why: impl Into<String>) -> Obstacle {
        Obstacle(why.into())
    }
}

impl From<io::Error> for Obstacle {
    fn from(error: io::Error) -> Obstacle {
        Obstacle(error.to_string())
    }
}
