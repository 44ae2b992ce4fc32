//! Where each action of a plan runs, and what that saves.
//!
//! The rule is to move the fewest bytes over the slowest link: what shrinks data runs where the
//! data lies, what needs several files or blocks runs on the DPU where they meet, and without
//! offload all of it runs on the host. The batches are the same bytes in every case (C4); only who
//! works for them differs.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use thiserror::Error;

use super::{BlendText, Plan, Shuffle};
use crate::dataset::Dtype;
use crate::kernel::can_narrow;

/// A machine on the way of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Site {
    /// The storage target, beside the disk.
    Target,
    /// The DPU, beside the host.
    Dpu,
    /// The host that trains.
    Host,
}

impl Site {
    /// The name used in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Site::Target => "target",
            Site::Dpu => "dpu",
            Site::Host => "host",
        }
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One action of a placement. Bytes are those of [`Placement::samples`] samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The action as the plan prints it.
    pub action: String,
    /// Where it runs.
    pub site: Site,
    /// Why there.
    pub why: &'static str,
    /// Bytes that go in.
    pub bytes_in: u64,
    /// Bytes that come out.
    pub bytes_out: u64,
}

/// Where every action runs, in the order in which data passes them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Whether the DPU does the work.
    pub offload: bool,
    /// Type of the delivered tokens.
    pub dtype: Dtype,
    /// The actions.
    pub rows: Vec<Row>,
    /// How many samples all byte counts are for: one period of the blend, in which the ratio is
    /// exact.
    pub samples: u64,
    /// Bytes read from disks.
    pub disk_bytes: u64,
    /// Bytes that leave the targets.
    pub wire_bytes: u64,
    /// Bytes delivered to the trainer.
    pub delivered_bytes: u64,
}

/// Why a plan does not go with the types of its files.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PlacementError {
    /// As many types as datasets in the blend are needed.
    #[error("{sources} source types for {datasets} datasets")]
    Count {
        /// Types given.
        sources: usize,
        /// Datasets of the plan.
        datasets: usize,
    },
    /// `narrow` cannot widen, and knows integers only.
    #[error(
        "dataset {dataset} holds {from}, which narrow({to}) cannot deliver; leave narrow out, or narrow further"
    )]
    Narrow {
        /// Position in the blend.
        dataset: usize,
        /// Type of the file.
        from: Dtype,
        /// Type asked for.
        to: Dtype,
    },
    /// Without `narrow`, a batch would mix types.
    #[error(
        "dataset 0 holds {first} but dataset {dataset} holds {other}; add narrow(u16) or narrow(u32)"
    )]
    MixedTypes {
        /// Type of the first file.
        first: Dtype,
        /// Position in the blend of a file of another type.
        dataset: usize,
        /// Its type.
        other: Dtype,
    },
}

impl Plan {
    /// The type a trainer gets, given the types of the files in the order of the blend.
    pub fn delivered_dtype(&self, sources: &[Dtype]) -> Result<Dtype, PlacementError> {
        let datasets = self.blend.len().max(1);
        let Some(&first) = sources.first().filter(|_| sources.len() == datasets) else {
            return Err(PlacementError::Count { sources: sources.len(), datasets });
        };
        let mut numbered = sources.iter().copied().enumerate();
        match self.narrow {
            Some(to) => match numbered.find(|(_, from)| !can_narrow(*from, to)) {
                Some((dataset, from)) => Err(PlacementError::Narrow { dataset, from, to }),
                None => Ok(to),
            },
            None => match numbered.find(|(_, other)| *other != first) {
                Some((dataset, other)) => Err(PlacementError::MixedTypes { first, dataset, other }),
                None => Ok(first),
            },
        }
    }

    /// Places the actions, given the types of the files in the order of the blend.
    pub fn place(&self, sources: &[Dtype], offload: bool) -> Result<Placement, PlacementError> {
        let dtype = self.delivered_dtype(sources)?;
        let weights: Vec<u64> = match self.blend.as_slice() {
            [] => Vec::from([1]),
            parts => parts.iter().map(|part| part.weight.into()).collect(),
        };
        let samples: u64 = weights.iter().sum();
        let window = u64::from(self.window);
        let tokens_bytes =
            |(weight, from): (&u64, &Dtype)| weight * window * u64::from(from.bytes());
        let disk_bytes = weights.iter().zip(sources).map(tokens_bytes).sum();
        let delivered_bytes = samples * window * u64::from(dtype.bytes());
        let rows = self.rows(offload, disk_bytes, delivered_bytes);
        let last_at_target = rows.iter().rfind(|row| row.site == Site::Target);
        let wire_bytes = last_at_target.map_or(disk_bytes, |row| row.bytes_out);
        Ok(Placement { offload, dtype, rows, samples, disk_bytes, wire_bytes, delivered_bytes })
    }

    fn rows(&self, offload: bool, disk_bytes: u64, delivered_bytes: u64) -> Vec<Row> {
        let placed = |site, why| match offload {
            true => (site, why),
            false => (Site::Host, "offload is off"),
        };
        let dpu = |action: String, why| {
            let (site, why) = placed(Site::Dpu, why);
            Row { action, site, why, bytes_in: delivered_bytes, bytes_out: delivered_bytes }
        };
        let narrow = self.narrow.map(|to| {
            let (site, why) = match delivered_bytes < disk_bytes {
                true => placed(Site::Target, "shrinks bytes: done before they cross the wire"),
                false => placed(Site::Dpu, "saves no bytes: checks the range on the way"),
            };
            let action = format!("narrow({to})");
            Row { action, site, why, bytes_in: disk_bytes, bytes_out: delivered_bytes }
        });
        let shuffle = self.shuffle.map(|Shuffle { seed, blocks }| {
            dpu(format!("shuffle({seed}, blocks={blocks})"), "needs several blocks at once")
        });
        let blend = (!self.blend.is_empty())
            .then(|| dpu(BlendText(&self.blend).to_string(), "needs several files at once"));
        let window = dpu(format!("window({})", self.window), "cuts blocks into samples");
        let batch = dpu(format!("batch({})", self.batch), "fills one slot of the host's ring");
        narrow.into_iter().chain([window]).chain(shuffle).chain(blend).chain([batch]).collect()
    }
}

/// Longest action text in the table; a longer one is cut.
const ACTION_WIDTH: usize = 40;

impl fmt::Display for Placement {
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
            let (site, why) = (row.site, row.why);
            writeln!(f, "{action:width$}  {site:6}  {bytes_in:>10}  {bytes_out:>10}  {why}")?;
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

impl Placement {
    /// Mean bytes of a sample, with a tenth if it is not whole.
    fn per_sample(&self, bytes: u64) -> String {
        let samples = self.samples.max(1);
        match bytes % samples {
            0 => format!("{}", bytes / samples),
            rest => format!("{}.{}", bytes / samples, rest * 10 / samples),
        }
    }
}
