//! The table of a pipeline: where each action of the plan runs, and the bytes that go in and out.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use super::{BlockOp, Branch, Pipeline, Place, SampleOp, Type};
use crate::dataset::Dtype;

/// One action. Bytes are those of [`Table::samples`] samples of the whole stream, including datasets
/// that skip the action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The action as printed in a plan.
    pub action: String,
    /// Where it runs.
    pub place: Place,
    /// The reason for the place.
    pub why: &'static str,
    /// Bytes that go in.
    pub bytes_in: u64,
    /// Bytes that come out.
    pub bytes_out: u64,
}

/// The stages that are actions of the plan, in the order of the data flow. An action that compiles to
/// no stage, such as `narrow(u16)` over files of `u16`, has no row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Type of the delivered tokens.
    pub dtype: Dtype,
    /// The actions.
    pub rows: Vec<Row>,
    /// The number of samples for all byte counts: one period of the blend, in which the ratio is exact; of
    /// the first phase, where there are several.
    pub samples: u64,
    /// Bytes read from disks.
    pub disk_bytes: u64,
    /// Bytes that leave the targets.
    pub wire_bytes: u64,
    /// Bytes delivered to the trainer.
    pub delivered_bytes: u64,
}

impl Pipeline {
    /// Where each action runs.
    pub fn table(&self) -> Table {
        let bytes = |dtypes: &[Dtype]| -> u64 {
            let branches = self.branches().iter().zip(dtypes);
            let stride = u64::from(self.window_tokens() - self.overlap_tokens());
            let tokens = |weight: u32| u64::from(weight) * stride;
            branches.map(|(branch, dtype)| tokens(branch.weight()) * u64::from(dtype.bytes())).sum()
        };
        let on_wire: Vec<Dtype> =
            self.branches().iter().map(|branch| branch.blocks().target().on_wire()).collect();
        let mut dtypes: Vec<Dtype> =
            self.branches().iter().map(|branch| branch.blocks().target().stored()).collect();
        let disk_bytes = bytes(&dtypes);

        let mut rows = Vec::new();
        for place in [Place::Target, Place::Dpu, Place::Host] {
            let (bytes_in, mut found) = (bytes(&dtypes), None);
            for (branch, dtype) in self.branches().iter().zip(&mut dtypes) {
                for stage in branch.blocks().over_blocks().filter(|stage| stage.place == place) {
                    if let BlockOp::Narrow { to } = stage.op {
                        (*dtype, found) = (to, Some(to));
                    }
                }
            }
            if let Some(to) = found {
                let (bytes_out, action) = (bytes(&dtypes), format!("narrow({to})"));
                let why = why_narrow(place, bytes_in, bytes_out);
                rows.push(Row { action, place, why, bytes_in, bytes_out });
            }
        }
        // The branches differ only in their conversions.
        let block_bytes = bytes(&dtypes);
        let samples = self.branches().iter().map(|branch| u64::from(branch.weight())).sum();
        let of = |data: Type| data.sample_bytes().map_or(block_bytes, |bytes| bytes * samples);
        let over_samples = self.branches().iter().take(1).flat_map(Branch::sample_stages);
        rows.extend(over_samples.chain(self.joint()).map(|stage| Row {
            action: stage.op.to_string(),
            place: stage.place,
            why: why(&stage.op, stage.place),
            bytes_in: of(stage.input),
            bytes_out: of(stage.output),
        }));
        let delivered_bytes = of(self.output());
        Table {
            dtype: self.dtype(),
            rows,
            samples,
            disk_bytes,
            wire_bytes: bytes(&on_wire),
            delivered_bytes,
        }
    }
}

/// The reason for the place of a conversion.
fn why_narrow(place: Place, bytes_in: u64, bytes_out: u64) -> &'static str {
    match place {
        Place::Host => OFFLOAD_IS_OFF,
        Place::Target if bytes_out < bytes_in => "shrinks bytes: done before they cross the wire",
        Place::Target => "saves no bytes: checks the range before the wire",
        Place::Dpu => "adds bytes: done behind the wire",
    }
}

/// The reason for the place of a stage over samples.
fn why(op: &SampleOp, place: Place) -> &'static str {
    match op {
        _ if place == Place::Host => OFFLOAD_IS_OFF,
        SampleOp::Window { .. } => "cuts blocks into samples",
        SampleOp::Shuffle(_) => "needs several blocks at once",
        SampleOp::Blend(_) => "needs several files at once",
        SampleOp::Widen { .. } => "adds bytes: done where samples are copied",
        SampleOp::Pairs => "adds bytes: done where samples are copied",
        SampleOp::Batch { .. } => "fills one slot of the host's ring",
    }
}

const OFFLOAD_IS_OFF: &str = "offload is off";

/// Longest action text in the table; a longer one is cut.
const ACTION_WIDTH: usize = 40;

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cut = |text: &str| match text.chars().count() > ACTION_WIDTH {
            true => text.chars().take(ACTION_WIDTH - 1).chain(['…']).collect(),
            false => String::from(text),
        };
        let actions: Vec<String> = self.rows.iter().map(|row| cut(&row.action)).collect();
        let width = actions.iter().map(|text| text.chars().count()).max().unwrap_or(0).max(6);
        writeln!(f, "{:width$}  {:6}  {:>10}  {:>10}  why", "action", "site", "B/sample", "out")?;
        for (action, row) in actions.iter().zip(&self.rows) {
            let (bytes_in, bytes_out) =
                (self.per_sample(row.bytes_in), self.per_sample(row.bytes_out));
            let (place, why) = (row.place, row.why);
            writeln!(f, "{action:width$}  {place:6}  {bytes_in:>10}  {bytes_out:>10}  {why}")?;
        }
        let (disk, wire) = (self.per_sample(self.disk_bytes), self.per_sample(self.wire_bytes));
        let saved = 100 - self.wire_bytes * 100 / self.disk_bytes.max(1);
        write!(
            f,
            "disk {disk} B/sample, wire {wire} B/sample ({saved} % saved), {} delivered",
            self.dtype
        )
    }
}

impl Table {
    /// Mean bytes of a sample, with a tenth if it is not whole.
    fn per_sample(&self, bytes: u64) -> String {
        let samples = self.samples.max(1);
        match bytes % samples {
            0 => format!("{}", bytes / samples),
            rest => format!("{}.{}", bytes / samples, rest * 10 / samples),
        }
    }
}
