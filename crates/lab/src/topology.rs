//! Topologies as commands and scenarios name them: a rule, or a file.
//!
//! The formats of others are in the crate `topology`; [`own`] is that of this project. [`written`]
//! is the way back.

pub mod own;
pub mod written;

use std::path::Path;

use ::topology::graph::{Capacity, Topology};
use ::topology::lingjun;
use ::topology::shape::{Shape, ShapeError};
use ::topology::text;

use crate::input;
use service::Error;

/// Largest file that is read: a net file of 48,000 hosts has 4 MB.
const MAX_FILE: u64 = 256 << 20;

/// The file of that name, or else the rule; links have this capacity.
///
/// # Errors
/// When it is neither.
pub fn named(name: &str, capacity: Capacity) -> Result<Topology, Error> {
    let path = Path::new(name);
    if path.exists() {
        return read(path, capacity);
    }
    let is_rule = name.parse::<Shape>().is_ok();
    by_rule(name, capacity).map_err(|error| match is_rule {
        true => error,
        false => error
            .hint("there is no file of that name, either; dquant subnet plan --help has all rules"),
    })
}

/// A topology by rule.
///
/// # Errors
/// When it is no rule, or cannot be built.
pub fn by_rule(rule: &str, capacity: Capacity) -> Result<Topology, Error> {
    let shape: Shape = rule.parse().map_err(|error: ShapeError| Error::from_cause(error))?;
    shape.build(capacity).map_err(Error::from_cause)
}

/// A topology from a file: TOML by its name, a net file, or `topo.csv` of the Lingjun data set.
///
/// # Errors
/// When it cannot be read, with the line.
pub fn read(path: &Path, capacity: Capacity) -> Result<Topology, Error> {
    let name = path.display();
    let text = input::read(path, MAX_FILE)?;
    if path.extension().is_some_and(|extension| extension == "toml") {
        return own::read(&text, capacity)
            .map_err(|error| Error::because(format_args!("{name} is not a topology"), &error));
    }
    if text.lines().next().map(str::trim_end) == Some(lingjun::HEADER) {
        return lingjun::read(&text, capacity).map_err(|error| {
            let what = format_args!("{name} is not a topology of the Lingjun data set");
            Error::because(what, &error)
        });
    }
    text::read_net(&text, capacity)
        .map_err(|error| Error::because(format_args!("{name} is not a net file"), &error))
}
