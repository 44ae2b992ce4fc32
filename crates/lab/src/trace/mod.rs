//! Traces of congestion control: how far each connection has come and what it may send, over time.
//!
//! | module | what it holds |
//! |---|---|
//! | [`mod@file`] | samples as CSV, written and read |
//! | [`compare`] | two runs of one case beside each other, in numbers and as a picture |
//!
//! The samples are the same of a simulated and of a real wire ([`roce::report::QpProgress`]), since
//! the endpoint is. Nothing in here prints.

pub mod compare;
pub mod file;

use std::collections::BTreeMap;

use roce::Time;
use roce::report::QpProgress;
use roce::wire::Psn;

/// One flow at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// When, in nanoseconds of the clock of its run.
    pub at_ns: u64,
    /// Which flow of the run.
    pub flow: u32,
    /// Payload that the peer has acknowledged since the first sample, in full packets.
    pub acknowledged_bytes: u64,
    /// Request packets in flight.
    pub in_flight_packets: u32,
    /// Most of them now.
    pub window_packets: u32,
    /// The rate that congestion control or a limit allows, if there is one, in bits per second.
    pub rate_bps: Option<u64>,
    /// Smoothed round-trip time, once one was measured, in nanoseconds.
    pub rtt_ns: Option<u64>,
}

/// Most samples that are kept, and read.
pub const MOST_SAMPLES: usize = 1 << 20;

/// Collects samples. PSNs wrap, so a flow has to be sampled at least once in 2²³ packets.
#[derive(Clone, Debug)]
pub struct Recorder {
    packet_bytes: u64,
    /// By flow: its PSN at the last sample, and packets acknowledged until then.
    flows: BTreeMap<u32, (Psn, u64)>,
    samples: Vec<Sample>,
}

impl Recorder {
    /// Of flows whose full packets carry so much.
    pub fn new(packet_bytes: u32) -> Recorder {
        Recorder { packet_bytes: packet_bytes.into(), flows: BTreeMap::new(), samples: Vec::new() }
    }

    /// Takes a sample, unless there are too many already.
    pub fn take(&mut self, now: Time, flow: u32, progress: &QpProgress) {
        if self.samples.len() == MOST_SAMPLES {
            return;
        }
        let (psn, packets) = self.flows.entry(flow).or_insert((progress.unacknowledged, 0));
        let forward = progress.unacknowledged.distance_from(*psn);
        *packets += u64::try_from(forward).unwrap_or(0);
        *psn = progress.unacknowledged;
        self.samples.push(Sample {
            at_ns: now.as_nanos(),
            flow,
            acknowledged_bytes: *packets * self.packet_bytes,
            in_flight_packets: progress.in_flight_packets,
            window_packets: progress.window_packets,
            rate_bps: progress.rate_bps,
            rtt_ns: progress.rtt.map(|rtt| rtt.as_nanos()),
        });
    }

    /// What was taken, in the order of time.
    pub fn into_samples(self) -> Vec<Sample> {
        self.samples
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acknowledged_payload_survives_the_wrap_of_psns() {
        let mut recorder = Recorder::new(1_024);
        let progress = |psn| QpProgress {
            unacknowledged: Psn::new(psn),
            in_flight_packets: 3,
            window_packets: 8,
            rate_bps: None,
            rtt: None,
        };
        for (at, psn) in [(1, 0xff_fffe), (2, 0xff_ffff), (3, 4)] {
            recorder.take(Time::from_nanos(at), 7, &progress(psn));
        }
        recorder.take(Time::from_nanos(4), 8, &progress(9));
        let bytes: Vec<u64> =
            recorder.into_samples().iter().map(|sample| sample.acknowledged_bytes).collect();
        assert_eq!(bytes, [0, 1_024, 6 * 1_024, 0]);
    }
}
