//! The document with which a verbs program replies, as `docs/verbs.md` describes it.
//!
//! Programs may be linked with another version of the library: members that are missing take their
//! defaults, unknown ones are ignored.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Format of the documents of this library version.
const FORMAT: &str = "dquant-verbs/1";

/// Names of counters with their values; programs leave out those at zero.
pub(super) type Counters = BTreeMap<String, u64>;

/// The reply of one process.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Answer {
    format: String,
    pid: u32,
    program: Option<String>,
    devices: Vec<Document>,
}

impl Answer {
    /// A document for each device, with what is reported once per process.
    pub(super) fn documents(self) -> Vec<Document> {
        let Answer { format, pid, program, devices } = self;
        let complete =
            |device| Document { format: format.clone(), pid, program: program.clone(), ..device };
        devices.into_iter().map(complete).collect()
    }
}

/// One open device of one process.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct Document {
    pub(super) format: String,
    pub(super) pid: u32,
    pub(super) program: Option<String>,
    pub(super) device: String,
    pub(super) interface: String,
    pub(super) addresses: Vec<String>,
    /// Largest path MTU in bytes.
    pub(super) mtu: u32,
    pub(super) completion_queues: u64,
    pub(super) shared_receive_queues: u64,
    pub(super) path: Option<PathTaken>,
    /// With `DQUANT_MEMORY=shared`.
    pub(super) memory: Option<SharedMemory>,
    pub(super) counters: Counters,
    pub(super) wire_counters: Counters,
    /// Errors of queue pairs that have been destroyed.
    pub(super) past_errors: Vec<Failure>,
    pub(super) queue_pairs: Vec<QueuePair>,
}

/// Registered memory that moved to where local peers can map it.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct SharedMemory {
    pub(super) ranges: u64,
    pub(super) bytes: u64,
    /// Why none moves.
    pub(super) why_not: Option<String>,
    pub(super) stayed: Vec<Stayed>,
}

/// Registrations whose memory did not move.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct Stayed {
    pub(super) why: String,
    pub(super) registrations: u64,
}

impl Document {
    /// Adds the counters that the program left out because they are zero, so that programs find a number under each
    /// name. An unknown format may have others.
    pub(super) fn fill_in_zeros<I: Iterator<Item = &'static str>>(&mut self, known: fn() -> I) {
        if self.format != FORMAT {
            return;
        }
        for qp in &mut self.queue_pairs {
            for name in known() {
                qp.counters.entry(name.to_owned()).or_insert(0);
            }
        }
    }
}

/// How packets leave and arrive.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct PathTaken {
    pub(super) kind: String,
    pub(super) why: String,
    /// A line for each choice made when the device was opened.
    pub(super) choices: Vec<String>,
}

/// The other end of a queue pair.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct Peer {
    pub(super) ip: String,
    pub(super) qpn: u32,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct QueuePair {
    pub(super) qpn: u32,
    pub(super) transport: String,
    pub(super) state: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) peer: Option<Peer>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) mtu: Option<u32>,
    /// How WRITEs and READs go: "direct", or "packets" with the reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) path: Option<String>,
    /// Work requests posted and not completed.
    pub(super) sends: u32,
    /// Receives posted and not completed; none if they are shared.
    pub(super) receives: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) timeout_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) retry_count: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) rnr_retry: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) flow: Option<Flow>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) waits: Option<Waits>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) rate_bps: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) congestion: Option<Congestion>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) rtt: Option<Rtt>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) last_error: Option<Failure>,
    pub(super) counters: Counters,
}

/// State of a reliable connection.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct Flow {
    pub(super) unacknowledged_psn: u32,
    pub(super) next_psn: u32,
    pub(super) expected_psn: u32,
    pub(super) in_flight_packets: u32,
    pub(super) window_packets: u32,
    /// A number of messages, "unknown" or "unlimited".
    pub(super) credits: serde_json::Value,
    pub(super) retries_left: u8,
    pub(super) rnr_retries_left: u8,
}

/// A window that follows the measured delay.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct Congestion {
    /// "nothing yet", "delay" or "losses".
    pub(super) follows: String,
    /// Since when.
    pub(super) age_ns: Option<u64>,
    /// It is measuring the path without its own queue.
    pub(super) draining: bool,
    pub(super) window_millipackets: u64,
    /// Delay of the path without a queue.
    pub(super) base_ns: Option<u64>,
    /// Delay now, smoothed.
    pub(super) delay_ns: Option<u64>,
}

/// A running timer.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct Waits {
    #[serde(rename = "for")]
    pub(super) what: String,
    pub(super) ns: u64,
}

/// Round-trip times.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct Rtt {
    pub(super) min_ns: Option<u64>,
    pub(super) smoothed_ns: Option<u64>,
    /// Samples below 1 us, below 2 us, below 4 us and so on.
    pub(super) histogram: Vec<u64>,
}

/// Why a queue pair failed.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct Failure {
    pub(super) qpn: u32,
    pub(super) cause: String,
    /// One line for people to read.
    pub(super) text: String,
    pub(super) peer: Option<Peer>,
    pub(super) psn: Option<u32>,
    pub(super) acknowledged_psn: Option<u32>,
    pub(super) wr_id: Option<u64>,
    pub(super) retries: u8,
    pub(super) age_ns: Option<u64>,
}
