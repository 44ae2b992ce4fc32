//! One long stream: the DPU's memory is bounded by its configuration, so it must not grow while it
//! works.

use std::path::Path;
use std::time::Duration;

use serde_json::json;

use super::Options;
use super::figures::{Figures, Resident};
use super::machine::Machine;
use super::process::Demo;
use crate::shell::Failure;

/// Smallest growth from the first to the last quarter that counts: the error of the kernel's figure
/// is smaller.
const MAX_GROWTH_MIB: f64 = 8.0;

/// Runs one stream of that length and checks its memory.
///
/// # Errors
/// When it fails, delivers wrong bytes, or grows.
pub(super) fn run(program: &Path, options: &Options, length: Duration) -> Result<(), Failure> {
    let demo = Demo { program, seconds: length, io: &options.io, options: &[] };
    let ran = demo.run()?;
    let figures = Figures::of(&ran)?;
    if figures.mismatches > 0 || figures.verified == 0 {
        let (verified, wrong) = (figures.verified, figures.mismatches);
        return Err(Failure::check(format!("{verified} batches verified, {wrong} wrong")));
    }
    let memory = Memory::of(&ran.dpu_resident_kib)
        .ok_or_else(|| Failure::check("the DPU's memory was not seen: too short a stream"))?;
    let machine = Machine::look(options.binary.as_deref());
    let Memory { lowest, resident, growth } = memory;
    let Resident { start, end, highest, .. } = resident;
    if options.json {
        let object = json!({
            "schema": "dquant.bench.soak/1", "machine": machine.to_json(),
            "seconds": length.as_secs_f64(), "samples_kib": ran.dpu_resident_kib,
            "lowest_mib": lowest, "highest_mib": highest, "growth_mib": growth, "report": ran.report,
        });
        println!("{object}");
    } else {
        println!("{machine}");
        println!(
            "{} s at {:.0} Mtokens/s, {} samples of the DPU's resident memory:",
            length.as_secs_f64(),
            figures.mtokens_per_s,
            ran.dpu_resident_kib.len()
        );
        println!(
            "  lowest {lowest:.1} MiB, highest {highest:.1} MiB, first {start:.1}, last {end:.1}"
        );
        println!("  first to last quarter: {growth:+.1} MiB (up to {MAX_GROWTH_MIB:+.1} is flat)");
    }
    match growth > MAX_GROWTH_MIB {
        true => Err(Failure::check(format!("the DPU's memory grew by {growth:.1} MiB"))),
        false => Ok(()),
    }
}

/// Summary of the samples, in MiB.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Memory {
    lowest: f64,
    resident: Resident,
    growth: f64,
}

impl Memory {
    fn of(samples_kib: &[u64]) -> Option<Memory> {
        let resident = Resident::of(samples_kib)?;
        let lowest = *samples_kib.iter().min()? as f64 / 1024.0;
        let quarter = (samples_kib.len() / 4).max(1);
        let first = median(&samples_kib[..quarter]);
        let last = median(&samples_kib[samples_kib.len() - quarter..]);
        Some(Memory { lowest, resident, growth: (last - first) / 1024.0 })
    }
}

/// Needs at least one value: samples from before the stream is set up do not count.
fn median(values: &[u64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    sorted[sorted.len() / 2] as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_from_quarter_to_quarter_and_one_early_sample_is_not_growth() {
        let mib = |values: &[u64]| values.iter().map(|mib| mib * 1024).collect::<Vec<u64>>();
        let flat = mib(&[1, 136, 136, 136, 136, 136, 136, 136, 136, 136, 136, 137]);
        let memory = Memory::of(&flat).expect("samples");
        assert_eq!((memory.lowest, memory.growth), (1.0, 0.0));
        let leak: Vec<u64> = (0..100).map(|i| (100 + i) * 1024).collect();
        assert!(Memory::of(&leak).expect("samples").growth > MAX_GROWTH_MIB);
        assert_eq!(Memory::of(&[]), None);
    }
}
