//! What a job does on the network, as those who submit it say it: a pattern, its sizes, and the
//! rate of each edge.
//!
//! A [`Pattern`] is written as its name, its sizes and the rates of its edges, `ring:16@5G` or
//! `torus:4x8@5G,2G`.
//!
//! | written | workers | edges, by phases that do not overlap |
//! |---|---|---|
//! | `ring:N@R` | N | each worker to the next, as in ring allreduce |
//! | `tree:N@R` | N | to parents in a binary tree; then from parents |
//! | `torus:XxY@R,S` | X·Y | rings through each row of X workers at `R`; then through each column of Y at `S` |
//! | `hierarchical:GxM@R,S` | G·M | members of each of G groups of M to their leader at `R`; a ring of the leaders at `S`; leaders to members at `R` |
//! | `ps:W+P@R` | W+P | workers to all parameter servers; then servers to all workers |
//! | `async-ps:W+P@R` | W+P | the same, both at once |
//! | `mesh:N@R` | N | each worker to every other, as in all-to-all |
//! | `pipeline:N@R` | N | each stage to the next and to the one before, at once |
//! | `parallel:TxDxP@R,S,U` | T·D·P | rings of T tensor-parallel workers at `R` while stages of the pipeline exchange at `U`; then rings of D data-parallel workers at `S` |
//!
//! Ranks of products have the fastest digit first: tensor, then data, then pipeline.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;
use core::str::FromStr;

use thiserror::Error;

/// Most workers of a job, parameter servers among them.
pub const MAX_WORKERS: u32 = 1 << 20;

/// A pattern with its sizes, and rates of one edge in bits per second; see the module's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// `ring:N@R`
    Ring {
        /// Workers.
        workers: u32,
        /// From each to the next.
        rate_bps: u64,
    },
    /// `tree:N@R`
    Tree {
        /// Workers.
        workers: u32,
        /// Of an edge, in either phase.
        rate_bps: u64,
    },
    /// `torus:XxY@R,S`
    Torus {
        /// Workers of a row.
        columns: u32,
        /// Workers of a column.
        rows: u32,
        /// From each worker to the next of its row.
        row_bps: u64,
        /// From each worker to the next of its column.
        column_bps: u64,
    },
    /// `hierarchical:GxM@R,S`
    Hierarchical {
        /// Groups.
        groups: u32,
        /// Workers of a group, its leader among them.
        group: u32,
        /// Between a member and its leader.
        local_bps: u64,
        /// From each leader to the next.
        leader_bps: u64,
    },
    /// `ps:W+P@R` and `async-ps:W+P@R`
    ParameterServer {
        /// Workers.
        workers: u32,
        /// Servers; their ranks come after those of the workers.
        servers: u32,
        /// Of a worker and a server, in each direction.
        rate_bps: u64,
        /// Whether workers push and pull at once.
        is_async: bool,
    },
    /// `mesh:N@R`
    Mesh {
        /// Workers.
        workers: u32,
        /// From each to each other.
        rate_bps: u64,
    },
    /// `pipeline:N@R`
    Pipeline {
        /// Stages, of one worker each.
        stages: u32,
        /// From each to the next, and back.
        rate_bps: u64,
    },
    /// `parallel:TxDxP@R,S,U`
    Parallel {
        /// Tensor-parallel workers.
        tensor: u32,
        /// Data-parallel replicas.
        data: u32,
        /// Stages of the pipeline.
        pipeline: u32,
        /// From each tensor-parallel worker to the next of its ring.
        tensor_bps: u64,
        /// From each replica to the next of its ring.
        data_bps: u64,
        /// From each stage to the next, and back.
        pipeline_bps: u64,
    },
}

/// Why a text is no pattern, or a pattern cannot be a job's.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PatternError {
    /// There is no such pattern.
    #[error(
        "unknown pattern '{0}'; there are ring, tree, torus, hierarchical, ps, async-ps, mesh, pipeline and parallel"
    )]
    Unknown(String),
    /// The name is known, but not what follows it.
    #[error("'{text}' cannot be read; write {form}")]
    Unreadable {
        /// The text.
        text: String,
        /// What was expected.
        form: &'static str,
    },
    /// A size or a rate is 0.
    #[error("{0}: no size and no rate is 0")]
    Zero(String),
    /// There are more workers than the limit.
    #[error("{pattern}: {workers} workers; there can be {MAX_WORKERS}")]
    TooLarge {
        /// The pattern.
        pattern: String,
        /// How many it has; the largest number where they cannot be counted.
        workers: u64,
    },
    /// All its edges together exceed what a counter of bits per second holds.
    #[error("{0}: the rates of its edges add up to more than 2^64 bit/s")]
    Overflow(String),
}

impl Pattern {
    /// Its sizes, none of which may be 0.
    fn sizes(&self) -> Vec<u32> {
        match *self {
            Pattern::Ring { workers, .. }
            | Pattern::Tree { workers, .. }
            | Pattern::Mesh { workers, .. }
            | Pattern::Pipeline { stages: workers, .. } => alloc::vec![workers],
            Pattern::Torus { columns, rows, .. } => alloc::vec![columns, rows],
            Pattern::Hierarchical { groups, group, .. } => alloc::vec![groups, group],
            Pattern::ParameterServer { workers, servers, .. } => alloc::vec![workers, servers],
            Pattern::Parallel { tensor, data, pipeline, .. } => {
                alloc::vec![tensor, data, pipeline]
            }
        }
    }

    /// Its rates, none of which may be 0.
    pub(crate) fn rates(&self) -> Vec<u64> {
        match *self {
            Pattern::Ring { rate_bps, .. }
            | Pattern::Tree { rate_bps, .. }
            | Pattern::Mesh { rate_bps, .. }
            | Pattern::Pipeline { rate_bps, .. }
            | Pattern::ParameterServer { rate_bps, .. } => alloc::vec![rate_bps],
            Pattern::Torus { row_bps, column_bps, .. } => alloc::vec![row_bps, column_bps],
            Pattern::Hierarchical { local_bps, leader_bps, .. } => {
                alloc::vec![local_bps, leader_bps]
            }
            Pattern::Parallel { tensor_bps, data_bps, pipeline_bps, .. } => {
                alloc::vec![tensor_bps, data_bps, pipeline_bps]
            }
        }
    }

    /// Its workers, parameter servers among them; `None` if they cannot be counted.
    fn count(&self) -> Option<u64> {
        let sizes = self.sizes();
        let mut sizes = sizes.iter().map(|size| u64::from(*size));
        match self {
            Pattern::ParameterServer { .. } => Some(sizes.sum()),
            _ => sizes.try_fold(1, u64::checked_mul),
        }
    }

    /// How many workers it has, parameter servers among them.
    ///
    /// # Errors
    /// When a size or a rate is 0, or there are too many workers.
    pub fn workers(&self) -> Result<u32, PatternError> {
        if self.sizes().contains(&0) || self.rates().contains(&0) {
            return Err(PatternError::Zero(self.to_string()));
        }
        let workers = self.count().unwrap_or(u64::MAX);
        let too_large = || PatternError::TooLarge { pattern: self.to_string(), workers };
        u32::try_from(workers).ok().filter(|count| *count <= MAX_WORKERS).ok_or_else(too_large)
    }

    /// The same pattern with its rates multiplied by `numerator / denominator`, rounded up; `None`
    /// where a rate exceeds 64 bits or the denominator is 0.
    pub fn scaled(mut self, numerator: u64, denominator: u64) -> Option<Pattern> {
        let scale = |rate: &mut u64| {
            let product = u128::from(*rate) * u128::from(numerator);
            let scaled = product.checked_add(u128::from(denominator).checked_sub(1)?)?;
            *rate = u64::try_from(scaled / u128::from(denominator)).ok()?;
            Some(())
        };
        match &mut self {
            Pattern::Ring { rate_bps, .. }
            | Pattern::Tree { rate_bps, .. }
            | Pattern::Mesh { rate_bps, .. }
            | Pattern::Pipeline { rate_bps, .. }
            | Pattern::ParameterServer { rate_bps, .. } => scale(rate_bps)?,
            Pattern::Torus { row_bps: a, column_bps: b, .. }
            | Pattern::Hierarchical { local_bps: a, leader_bps: b, .. } => {
                scale(a)?;
                scale(b)?;
            }
            Pattern::Parallel { tensor_bps, data_bps, pipeline_bps, .. } => {
                scale(tensor_bps)?;
                scale(data_bps)?;
                scale(pipeline_bps)?;
            }
        }
        Some(self)
    }
}

/// A rate with the largest decimal suffix that leaves a whole number.
fn rate(bps: u64) -> String {
    let units = [(1_000_000_000_000, "T"), (1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")];
    let fits = units.iter().find(|(unit, _)| bps > 0 && bps.is_multiple_of(*unit));
    fits.map_or_else(|| bps.to_string(), |(unit, suffix)| format!("{}{suffix}", bps / unit))
}

/// A whole number and a decimal suffix, k, M, G or T.
pub(crate) fn quantity(text: &str) -> Option<u64> {
    let unit = match text.chars().next_back()? {
        'k' => 1_000,
        'M' => 1_000_000,
        'G' => 1_000_000_000,
        'T' => 1_000_000_000_000,
        _ => return digits(text),
    };
    digits::<u64>(&text[..text.len() - 1])?.checked_mul(unit)
}

/// A number without a sign.
pub(crate) fn digits<T: FromStr>(text: &str) -> Option<T> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Pattern::Ring { .. } => "ring",
            Pattern::Tree { .. } => "tree",
            Pattern::Torus { .. } => "torus",
            Pattern::Hierarchical { .. } => "hierarchical",
            Pattern::ParameterServer { is_async: false, .. } => "ps",
            Pattern::ParameterServer { is_async: true, .. } => "async-ps",
            Pattern::Mesh { .. } => "mesh",
            Pattern::Pipeline { .. } => "pipeline",
            Pattern::Parallel { .. } => "parallel",
        };
        let separator = if matches!(self, Pattern::ParameterServer { .. }) { "+" } else { "x" };
        let sizes: Vec<String> = self.sizes().iter().map(u32::to_string).collect();
        let rates: Vec<String> = self.rates().into_iter().map(rate).collect();
        write!(f, "{name}:{}@{}", sizes.join(separator), rates.join(","))
    }
}

impl FromStr for Pattern {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Pattern, PatternError> {
        let (name, rest) = text.split_once(':').unwrap_or((text, ""));
        let form = form_of(name).ok_or_else(|| PatternError::Unknown(name.to_string()))?;
        let unreadable = || PatternError::Unreadable { text: text.to_string(), form };
        let (sizes, rates) = rest.split_once('@').ok_or_else(unreadable)?;
        let separator = if name.ends_with("ps") { '+' } else { 'x' };
        let sizes: Option<Vec<u32>> = sizes.split(separator).map(digits).collect();
        let rates: Option<Vec<u64>> = rates.split(',').map(quantity).collect();
        let (sizes, rates) = sizes.zip(rates).ok_or_else(unreadable)?;
        let pattern = made(name, &sizes, &rates).ok_or_else(unreadable)?;
        pattern.workers()?;
        Ok(pattern)
    }
}

/// How a pattern is written.
fn form_of(name: &str) -> Option<&'static str> {
    Some(match name {
        "ring" => "ring:WORKERS@RATE, as in ring:16@5G",
        "tree" => "tree:WORKERS@RATE, as in tree:16@5G",
        "torus" => "torus:COLUMNSxROWS@RATE,RATE, as in torus:4x8@5G,2G",
        "hierarchical" => "hierarchical:GROUPSxWORKERS@RATE,RATE, as in hierarchical:4x8@2G,10G",
        "ps" => "ps:WORKERS+SERVERS@RATE, as in ps:12+4@500M",
        "async-ps" => "async-ps:WORKERS+SERVERS@RATE, as in async-ps:12+4@500M",
        "mesh" => "mesh:WORKERS@RATE, as in mesh:8@300M",
        "pipeline" => "pipeline:STAGES@RATE, as in pipeline:8@2G",
        "parallel" => {
            "parallel:TENSORxDATAxPIPELINE@RATE,RATE,RATE, as in parallel:4x8x2@20G,5G,1G"
        }
        _ => return None,
    })
}

/// The pattern of a name, if it has so many sizes and rates.
fn made(name: &str, sizes: &[u32], rates: &[u64]) -> Option<Pattern> {
    Some(match (name, sizes, rates) {
        ("ring", &[workers], &[rate_bps]) => Pattern::Ring { workers, rate_bps },
        ("tree", &[workers], &[rate_bps]) => Pattern::Tree { workers, rate_bps },
        ("torus", &[columns, rows], &[row_bps, column_bps]) => {
            Pattern::Torus { columns, rows, row_bps, column_bps }
        }
        ("hierarchical", &[groups, group], &[local_bps, leader_bps]) => {
            Pattern::Hierarchical { groups, group, local_bps, leader_bps }
        }
        ("ps" | "async-ps", &[workers, servers], &[rate_bps]) => {
            Pattern::ParameterServer { workers, servers, rate_bps, is_async: name != "ps" }
        }
        ("mesh", &[workers], &[rate_bps]) => Pattern::Mesh { workers, rate_bps },
        ("pipeline", &[stages], &[rate_bps]) => Pattern::Pipeline { stages, rate_bps },
        ("parallel", &[tensor, data, pipeline], &[tensor_bps, data_bps, pipeline_bps]) => {
            Pattern::Parallel { tensor, data, pipeline, tensor_bps, data_bps, pipeline_bps }
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_written_as_they_are_read() {
        let texts = [
            "ring:16@5G",
            "tree:7@1500M",
            "torus:4x8@5G,2G",
            "hierarchical:4x8@2G,10G",
            "ps:12+4@500M",
            "async-ps:12+4@7",
            "mesh:8@300k",
            "pipeline:8@2T",
            "parallel:4x8x2@20G,5G,1G",
        ];
        for text in texts {
            let pattern: Pattern = text.parse().expect(text);
            assert_eq!(pattern.to_string(), text);
        }
    }

    #[test]
    fn what_is_no_pattern_is_refused_with_the_reason() {
        let refused = [
            ("star:4@1G", "unknown pattern 'star'; there are ring, tree"),
            ("", "unknown pattern ''"),
            ("ring", "'ring' cannot be read; write ring:WORKERS@RATE"),
            ("ring:4x4@1G", "'ring:4x4@1G' cannot be read"),
            ("ring:4@1G,1G", "'ring:4@1G,1G' cannot be read"),
            ("ring:-4@1G", "'ring:-4@1G' cannot be read"),
            ("ring:4@+1G", "'ring:4@+1G' cannot be read"),
            ("ring:4@99999999T", "'ring:4@99999999T' cannot be read"),
            ("ring:4@1€", "'ring:4@1€' cannot be read"),
            ("ps:4x4@1G", "'ps:4x4@1G' cannot be read; write ps:WORKERS+SERVERS"),
            ("ring:0@1G", "ring:0@1G: no size and no rate is 0"),
            ("torus:4x4@1G,0", "torus:4x4@1G,0: no size and no rate is 0"),
            ("mesh:1048577@1", "mesh:1048577@1: 1048577 workers; there can be 1048576"),
            ("ps:4294967295+4294967295@1", "ps:4294967295+4294967295@1: 8589934590 workers"),
            (
                "parallel:4294967295x4294967295x4294967295@1,1,1",
                "parallel:4294967295x4294967295x4294967295@1,1,1: 18446744073709551615 workers",
            ),
        ];
        for (text, reason) in refused {
            let error = text.parse::<Pattern>().expect_err(text).to_string();
            assert!(error.starts_with(reason), "{text}: {error}");
        }
    }

    #[test]
    fn rates_are_scaled_and_rounded_up() {
        let torus: Pattern = "torus:2x2@10,3".parse().expect("a pattern");
        assert_eq!(torus.scaled(1, 3).expect("small").to_string(), "torus:2x2@4,1");
        assert_eq!(torus.scaled(u64::MAX, 1), None);
        assert_eq!(torus.scaled(1, 0), None);
    }
}
