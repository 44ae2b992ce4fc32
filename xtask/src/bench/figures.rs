//! The figures of one run: the demo's JSON and what was measured from outside.

use serde_json::Value;

use super::process::Ran;
use crate::shell::Failure;

/// The figures of one run that are compared.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Figures {
    pub(super) mtokens_per_s: f64,
    pub(super) disk_bytes_per_token: f64,
    pub(super) wire_bytes_per_token: f64,
    pub(super) host_bytes_per_token: f64,
    pub(super) host_cpu_s: f64,
    pub(super) dpu_cpu_s: Option<f64>,
    pub(super) target_cpu_s: f64,
    pub(super) retransmitted: f64,
    pub(super) dropped: f64,
    /// Resident memory of the DPU in MiB, measured from outside.
    pub(super) dpu_resident: Option<Resident>,
    pub(super) load_before: f64,
    pub(super) verified: u64,
    pub(super) mismatches: u64,
    /// Hash of the first batches and how many it covers.
    pub(super) stream: (String, u64),
}

/// Resident memory over the time that a stream ran, in MiB.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Resident {
    pub(super) start: f64,
    pub(super) middle: f64,
    pub(super) end: f64,
    pub(super) highest: f64,
}

impl Resident {
    /// From samples in KiB in the order they were taken; `None` without samples.
    pub(super) fn of(samples_kib: &[u64]) -> Option<Resident> {
        let mib = |kib: &u64| *kib as f64 / 1024.0;
        Some(Resident {
            start: mib(samples_kib.first()?),
            middle: mib(samples_kib.get(samples_kib.len() / 2)?),
            end: mib(samples_kib.last()?),
            highest: mib(samples_kib.iter().max()?),
        })
    }
}

impl Figures {
    /// Reads the demo's report.
    ///
    /// # Errors
    /// Names the field that is missing, and why a stream ended early.
    pub(super) fn of(ran: &Ran) -> Result<Figures, Failure> {
        let report = &ran.report;
        if let Some(why) = report["failure"].as_str() {
            return Err(Failure::check(format!("the stream ended early: {why}")));
        }
        let tokens = number(report, "/tokens")?;
        if tokens == 0.0 {
            return Err(Failure::check("no token was delivered; allow more --seconds"));
        }
        let offload = report["offload"].as_bool().unwrap_or(false);
        let dpu_cpu_s = number(report, "/cpu_s_per_gtok/dpu")?;
        Ok(Figures {
            mtokens_per_s: number(report, "/mtokens_per_s")?,
            disk_bytes_per_token: number(report, "/source_bytes")? / tokens,
            wire_bytes_per_token: number(report, "/wire_bytes")? / tokens,
            host_bytes_per_token: number(report, "/delivered_bytes")? / tokens,
            host_cpu_s: number(report, "/cpu_s_per_gtok/host")?,
            dpu_cpu_s: offload.then_some(dpu_cpu_s),
            target_cpu_s: number(report, "/cpu_s_per_gtok/target")?,
            retransmitted: number(report, "/retransmitted_packets")?,
            dropped: number(report, "/dropped_packets")?,
            dpu_resident: Resident::of(&ran.dpu_resident_kib),
            load_before: ran.load_before,
            verified: number(report, "/verified_batches")? as u64,
            mismatches: number(report, "/mismatches")? as u64,
            stream: (
                report["stream_hash"].as_str().unwrap_or_default().to_owned(),
                number(report, "/stream_hash_batches")? as u64,
            ),
        })
    }
}

fn number(report: &Value, pointer: &str) -> Result<f64, Failure> {
    let value = report.pointer(pointer).and_then(Value::as_f64);
    value.ok_or_else(|| Failure::check(format!("the demo's report has no number at {pointer}")))
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::*;

    /// A run as the demo would report it.
    pub(in crate::bench) fn ran(mtokens_per_s: f64, offload: bool) -> Ran {
        let report = json!({
            "tokens": 1_000_000, "mtokens_per_s": mtokens_per_s, "offload": offload,
            "source_bytes": 4_000_000, "wire_bytes": 2_050_000, "delivered_bytes": 2_000_000,
            "cpu_s_per_gtok": {"host": 0.02, "dpu": 0.8, "target": 0.9},
            "retransmitted_packets": 3, "dropped_packets": 0, "verified_batches": 256,
            "mismatches": 0, "stream_hash": "ab", "stream_hash_batches": 256,
        });
        let dpu_resident_kib = if offload { vec![1024, 2048, 2048] } else { vec![] };
        Ran { report, load_before: 0.5, dpu_resident_kib }
    }

    #[test]
    fn bytes_are_divided_by_tokens() {
        let figures = Figures::of(&ran(450.0, true)).expect("complete");
        assert_eq!(figures.wire_bytes_per_token, 2.05);
        assert_eq!(figures.dpu_cpu_s, Some(0.8));
        let resident = figures.dpu_resident.expect("sampled");
        assert_eq!((resident.start, resident.middle, resident.end), (1.0, 2.0, 2.0));
    }

    #[test]
    fn a_missing_field_and_an_early_end_are_told() {
        let mut incomplete = ran(1.0, true);
        incomplete.report["cpu_s_per_gtok"] = json!({});
        let failure = Figures::of(&incomplete).expect_err("no CPU time");
        assert!(failure.to_string().contains("/cpu_s_per_gtok/dpu"), "{failure}");
        let mut broken = ran(1.0, false);
        broken.report["failure"] = json!("the disk died");
        let failure = Figures::of(&broken).expect_err("ended early");
        assert!(failure.to_string().contains("the disk died"));
    }
}
