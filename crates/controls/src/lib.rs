//! The published congestion controls, and what chooses among them by name.
//!
//! | module | what it holds |
//! |---|---|
//! | [`advertised`] | a window that the receiver sets: receiver-driven |
//! | [`dcqcn`] | a rate from notifications: DCQCN |
//! | [`dctcp`] | a rate from the share of marked packets: DCTCP |
//! | [`timely`] | a rate from the gradient of round-trip times: TIMELY |
//! | [`hpcc`] | a rate and a window from what switches report: HPCC, and HPCC-PINT |
//! | [`swift`] | a window from measured delay: Swift |
//! | [`delay`] | the same in the manner of Swift, for shared links: it also competes |
//! | [`cap`] | a cap on the rate of those that lack other signals, from the buffers of switches |
//! | [`fixed`] | a rate that does not adapt |
//!
//! Each is a [`Controller`], a state machine that [`roce::congestion`] drives.
//! [`CongestionControl`] names a control with its parameters and is the factory of its controllers;
//! where sources differ, the name says whose they are. No clock, no packet and no queue pair
//! belongs here.
#![no_std]
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test fails by panicking"))]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod advertised;
mod cap;
pub mod dcqcn;
pub mod dctcp;
pub mod delay;
pub mod fixed;
pub mod hpcc;
mod rounds;
pub mod swift;
pub mod timely;

use alloc::boxed::Box;

use roce::Duration;
use roce::congestion::{AdvertisedParams, Control, Controller, ControllerFactory, Needs};

pub use advertised::Advertised;
pub use dcqcn::{Dcqcn, DcqcnParams};
pub use dctcp::{Dctcp, DctcpParams};
pub use delay::{Delay, DelayParams};
use fixed::FixedRate;
pub use hpcc::{Hpcc, HpccParams};
pub use swift::{Swift, SwiftParams};
pub use timely::{Timely, TimelyParams};

/// The congestion control of a queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CongestionControl {
    /// None: it sends as fast as its window allows.
    #[default]
    Off,
    /// It sends at this many bits per second, whatever the network says.
    Fixed(u64),
    /// DCQCN.
    Dcqcn(DcqcnParams),
    /// DCTCP as a rate.
    Dctcp(DctcpParams),
    /// TIMELY.
    Timely(TimelyParams),
    /// HPCC, or HPCC-PINT. Both ends must have it: the receiver returns what the switches report.
    Hpcc(HpccParams),
    /// Swift.
    Swift(SwiftParams),
    /// Windows that the receiver advertises. Both ends must have it. It limits the requests of
    /// reliable connections.
    Advertised(AdvertisedParams),
    /// A window from measured delay. It limits the requests of reliable connections; READ responses
    /// are not acknowledged, so their delay is not known.
    Delay(DelayParams),
}

impl CongestionControl {
    /// The names of [`named`](CongestionControl::named).
    pub const NAMES: [&str; 12] = [
        "off",
        "dcqcn-mlnx",
        "dcqcn-paper",
        "dcqcn-uet",
        "dctcp",
        "timely",
        "timely-patched",
        "hpcc",
        "hpcc-pint",
        "swift",
        "advertised",
        "delay",
    ];

    /// The control with this name and its usual parameters, on a link of `line_bps` and paths with
    /// a round-trip time of `base_rtt` without queues.
    pub fn named(name: &str, line_bps: u64, base_rtt: Duration) -> Option<CongestionControl> {
        let dcqcn = DcqcnParams::named(name, line_bps).map(CongestionControl::Dcqcn);
        let timely = TimelyParams::named(name, line_bps).map(CongestionControl::Timely);
        dcqcn.or(timely).or_else(|| match name {
            "off" => Some(CongestionControl::Off),
            "dctcp" => Some(CongestionControl::Dctcp(DctcpParams::new(line_bps, Some(base_rtt)))),
            "hpcc" => Some(CongestionControl::Hpcc(HpccParams::new(line_bps, base_rtt))),
            "hpcc-pint" => Some(CongestionControl::Hpcc(HpccParams::pint(line_bps, base_rtt))),
            "swift" => Some(CongestionControl::Swift(SwiftParams::new(base_rtt))),
            "advertised" => {
                Some(CongestionControl::Advertised(AdvertisedParams::new(line_bps, base_rtt)))
            }
            "delay" => Some(CongestionControl::Delay(DelayParams::DEFAULT)),
            _ => None,
        })
    }
}

impl ControllerFactory for CongestionControl {
    fn needs(&self) -> Needs {
        use CongestionControl::{Advertised, Dcqcn, Dctcp, Hpcc, Swift, Timely};
        let every_ack = matches!(self, Dctcp(_) | Hpcc(_) | Swift(_) | Timely(_));
        let least = Needs { every_ack, ..Needs::LEAST };
        match *self {
            Dcqcn(params) => Needs { cnp_interval: params.cnp_interval, ..least },
            Dctcp(_) => {
                Needs { cnp_interval: DctcpParams::CNP_INTERVAL, counts_marks: true, ..least }
            }
            Hpcc(params) => {
                Needs { telemetry: Some((params.telemetry, params.sample_one_in)), ..least }
            }
            Advertised(params) => Needs { advertised: Some(params), ..least },
            _ => least,
        }
    }

    fn controller(&self, packet_bytes: u32, window_packets: u32) -> Box<dyn Controller> {
        match *self {
            CongestionControl::Off => Box::new(FixedRate { rate_bps: None }),
            CongestionControl::Fixed(bps) => Box::new(FixedRate { rate_bps: Some(bps) }),
            CongestionControl::Dcqcn(params) => Box::new(Dcqcn::new(params, packet_bytes)),
            CongestionControl::Dctcp(params) => Box::new(Dctcp::new(params, packet_bytes)),
            CongestionControl::Timely(params) => Box::new(Timely::new(params, packet_bytes)),
            CongestionControl::Hpcc(params) => Box::new(Hpcc::new(params, packet_bytes)),
            CongestionControl::Swift(params) => {
                Box::new(Swift::new(params, packet_bytes, window_packets))
            }
            CongestionControl::Advertised(params) => {
                Box::new(Advertised::new(params, packet_bytes))
            }
            CongestionControl::Delay(params) => {
                Box::new(Delay::new(params, packet_bytes, window_packets))
            }
        }
    }
}

impl From<CongestionControl> for Control {
    fn from(control: CongestionControl) -> Control {
        match control {
            CongestionControl::Off => Control::OFF,
            control => Control::new(control),
        }
    }
}

/// The first window of a sender that knows nothing of its path: about that of TCP (RFC 6928), and
/// two packets at least. When many senders start together, nothing tells any of them before all of
/// their first windows are in one buffer.
const FIRST_BYTES: u32 = 16 << 10;
const FIRST_PACKETS: u32 = 2;

/// Packets of the first window: a tenth of their bytes may be headers.
fn first_packets(packet_bytes: u32) -> u32 {
    (FIRST_BYTES / 10 * 11 / packet_bytes.max(1)).max(FIRST_PACKETS)
}

/// Rates are given for a link of 25 Gbit/s and grow with the link. None is 0: from there no sender
/// would come back.
const fn scaled(bps_at_25g: u64, line_bps: u64) -> u64 {
    let bps = (bps_at_25g as u128 * line_bps as u128 / 25_000_000_000) as u64;
    if bps > 0 { bps } else { 1 }
}
