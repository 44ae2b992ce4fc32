//! The numbers that are asked for: one row each, with its peers and its bound.

use std::fmt;

use super::figures::{BOTTLENECKS, LOSSES_PPM, LOSSY_OPERATIONS};
use super::shared_link::{Flows, Part, With};

/// What a row asks of our figure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Asked {
    /// At most this many times the best peer, plus some.
    AtMost {
        times: f64,
        plus: f64,
    },
    /// At most the sum of the peers.
    AtMostSum,
    /// At least this many times the best peer, and at least `floor` in any case.
    AtLeast {
        times: f64,
        floor: f64,
    },
    /// At least 2.2 times TCP where TCP is slow, 1.3 times where it is fast: see [`FAST_TCP_GBPS`].
    TimesTcp,
    /// A bound that needs no peer.
    Floor(f64),
    Ceiling(f64),
    /// Differs from the other by at most this share of the larger one.
    Within(f64),
    /// A figure without a bound.
    Reported,
}

/// TCP over veth is about 20 Gbit/s on processors of one kind and 36 or more on another, where the
/// same factor would ask for more than the memory carries.
const FAST_TCP_GBPS: f64 = 30.0;

impl Asked {
    /// Whether our figure meets it; `None` without a bound or a peer.
    pub(super) fn is_met(self, ours: f64, peer: Option<f64>) -> Option<bool> {
        match self {
            Asked::AtMost { times, plus } => Some(ours <= times * peer? + plus),
            Asked::AtMostSum => Some(ours <= peer?),
            Asked::AtLeast { times, floor } => Some(ours >= (times * peer?).max(floor)),
            Asked::TimesTcp => Some(ours >= times_tcp(peer?) * peer?),
            Asked::Floor(floor) => Some(ours >= floor),
            Asked::Ceiling(ceiling) => Some(ours <= ceiling),
            Asked::Within(share) => Some(ours.min(peer?) >= (1.0 - share) * ours.max(peer?)),
            Asked::Reported => None,
        }
    }

    /// Of several peers the best is the one that asks most. `None` stands for a peer without a
    /// figure.
    pub(super) fn best(self, peers: impl Iterator<Item = Option<f64>>) -> Option<f64> {
        if self == Asked::AtMostSum {
            return peers.sum();
        }
        let peers = peers.flatten();
        match self {
            // Figures that are only reported beside several peers are latencies.
            Asked::AtMost { .. } | Asked::Ceiling(_) | Asked::Reported => peers.reduce(f64::min),
            _ => peers.reduce(f64::max),
        }
    }
}

fn times_tcp(tcp_gbps: f64) -> f64 {
    if tcp_gbps < FAST_TCP_GBPS { 2.2 } else { 1.3 }
}

impl fmt::Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Asked::AtMost { times, plus: 0.0 } => write!(f, "≤ {times} x"),
            Asked::AtMost { times: 1.0, plus } => write!(f, "≤ peer + {plus}"),
            Asked::AtMost { times, plus } => write!(f, "≤ {times} x + {plus}"),
            Asked::AtMostSum => write!(f, "≤ sum of peers"),
            Asked::AtLeast { times, floor: 0.0 } => write!(f, "≥ {times:.2} x"),
            Asked::AtLeast { times, floor } => write!(f, "≥ {times} x and ≥ {floor}"),
            Asked::TimesTcp => write!(f, "≥ 2.2 x; ≥ 1.3 x where TCP ≥ {FAST_TCP_GBPS}"),
            Asked::Floor(floor) => write!(f, "≥ {floor}"),
            Asked::Ceiling(ceiling) => write!(f, "≤ {ceiling}"),
            Asked::Within(share) => write!(f, "within {} %", share * 100.0),
            Asked::Reported => Ok(()),
        }
    }
}

/// A part of the product that may not be built yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Feature {
    /// Always there.
    Packets,
    /// Processes of one machine move data without packets.
    SameHost,
}

/// One row of the table.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) ours: String,
    pub(super) peers: Vec<String>,
    pub(super) asked: Asked,
    pub(super) needs: Feature,
}

fn row(name: impl Into<String>, ours: impl Into<String>, peers: &[&str], asked: Asked) -> Row {
    let peers = peers.iter().map(|key| key.to_string()).collect();
    Row { name: name.into(), ours: ours.into(), peers, asked, needs: Feature::Packets }
}

fn needs(feature: Feature, row: Row) -> Row {
    Row { needs: feature, ..row }
}

const fn at_least(times: f64) -> Asked {
    Asked::AtLeast { times, floor: 0.0 }
}

const fn at_most(times: f64) -> Asked {
    Asked::AtMost { times, plus: 0.0 }
}

/// Every row.
pub(super) fn all() -> Vec<Row> {
    let mut rows = same_host();
    rows.extend(packets());
    rows.extend(many());
    rows.extend(shared_links());
    rows.extend(losses());
    // Of this machine, before the path between processes of one machine: see
    // docs/fabric-benchmarks.md.
    let job =
        row("main job, DPU and target CPU s/10^9 tokens", "main-job", &[], Asked::Ceiling(0.7));
    rows.push(needs(Feature::SameHost, job));
    rows
}

fn same_host() -> Vec<Row> {
    let latency = ["ucx-sysv-8", "ucx-cma-8", "vader-8"];
    let plus = Asked::AtMost { times: 1.0, plus: 0.3 };
    let copies = ["ucx-cma-1m", "vader-1m"];
    let rate = Asked::AtLeast { times: 1.0, floor: 3.0 };
    let rows = [
        row("8 B SEND, same host, pool memory, us", "pool-send-8", &latency, at_most(1.0)),
        row("8 B WRITE, same host, pool memory, us", "pool-write-8", &latency, at_most(1.0)),
        row("1 MiB WRITE, same host, pool memory, GB/s", "pool-write-1m", &copies, at_least(1.4)),
        row("8 B WRITE, same host, shared memory, us", "shared-write-8", &latency, at_most(1.0)),
        row(
            "1 MiB WRITE, same host, shared memory, GB/s",
            "shared-write-1m",
            &copies,
            at_least(1.4),
        ),
        row("8 B SEND, same host, ordinary memory, us", "send-8", &latency, plus),
        row("8 B WRITE, same host, ordinary memory, us", "write-8", &latency, plus),
        row("1 MiB WRITE, same host, ordinary memory, GB/s", "write-1m", &copies, at_least(1.0)),
        row(
            "64 MiB one way, shared memory, GB/s",
            "shared-write-64m",
            &["ucx-sysv-64m"],
            at_least(1.1),
        ),
        row("the same, ordinary memory, GB/s", "write-64m", &["ucx-sysv-64m"], at_least(1.1)),
        row("64 B messages, same host, M/s", "rate-64", &["ucx-sysv-rate-64"], rate),
    ];
    rows.into_iter().map(|row| needs(Feature::SameHost, row)).collect()
}

fn packets() -> Vec<Row> {
    let rate = Asked::AtLeast { times: 2.0, floor: 1.5 };
    vec![
        row("64 B messages, UDP loopback, M/s", "udp-rate-64", &["ucx-tcp-rate-64"], rate),
        row("64 B SEND, UDP loopback, us", "udp-send-64", &["sockperf-64"], at_most(0.85)),
        row(
            "the same beside UCX and libfabric, us",
            "udp-send-64",
            &["ucx-tcp-64", "rxd-64"],
            Asked::Reported,
        ),
        row(
            "64 B WRITE beside SEND, UDP loopback, us",
            "udp-write-64",
            &["udp-send-64"],
            at_most(1.3),
        ),
        row("1 MiB WRITE, veth 1500, Gbit/s", "stream-1500", &["tcp-1500"], Asked::TimesTcp),
        row("the same, bytes verified, Gbit/s", "perf-1500", &["tcp-1500"], Asked::TimesTcp),
        row("1 MiB WRITE, veth 1500, of raw UDP", "stream-1500", &["raw-1500"], at_least(0.7)),
        row("1 MiB WRITE, veth 9000, Gbit/s", "stream-9000", &["tcp-9000"], Asked::TimesTcp),
        row("the same, bytes verified, Gbit/s", "perf-9000", &["tcp-9000"], Asked::TimesTcp),
        row("1 MiB WRITE, veth 9000, of raw UDP", "stream-9000", &["raw-9000"], at_least(0.7)),
        row("1 MiB WRITE, loopback, Gbit/s", "stream-lo", &["tcp-lo"], at_least(1.2)),
        row("1 MiB WRITE, loopback, of raw UDP", "stream-lo", &["raw-lo"], Asked::Reported),
        row("8 B SEND with events, us", "event-8", &["two-wakes"], at_most(1.2)),
        row("the same beside qperf tcp_lat, us", "event-8", &["qperf-8"], Asked::Reported),
        sleeping(
            "64 KiB SEND, same host, events, us",
            "event-lat-64k",
            &["polled-lat-64k", "two-wakes"],
            Asked::AtMostSum,
        ),
        sleeping(
            "1 MiB SEND, same host, events, us",
            "event-lat-1m",
            &["polled-lat-1m", "two-wakes"],
            Asked::AtMostSum,
        ),
        sleeping(
            "64 KiB SENDs, same host, events, of polling, GB/s",
            "event-bw-64k",
            &["polled-bw-64k"],
            at_least(0.8),
        ),
        sleeping(
            "1 MiB SENDs, same host, events, of polling, GB/s",
            "event-bw-1m",
            &["polled-bw-1m"],
            at_least(0.8),
        ),
        row("64 B SEND, veth, AF_XDP, us", "af-xdp-64", &["af-xdp-raw-64"], at_most(1.5)),
    ]
}

/// Both sides sleep on completion channels; the path without packets.
fn sleeping(name: &str, ours: &str, peers: &[&str], asked: Asked) -> Row {
    needs(Feature::SameHost, row(name, ours, peers, asked))
}

fn many() -> Vec<Row> {
    vec![
        row("64 B WRITE, 1,000 queue pairs, of one, M/s", "qps-1000", &["qps-1"], at_least(0.7)),
        row(
            "8 pairs on 2 cores, of one, round trips/s",
            "pairs-8",
            &["pairs-1"],
            at_least(1.0 / 3.0),
        ),
    ]
}

fn shared_links() -> Vec<Row> {
    let mut rows = Vec::new();
    for (mbit, latency_ms) in BOTTLENECKS {
        let of = |with, part| {
            let flows = Flows { mbit, latency_ms, with };
            (flows.name(part), flows.key(part))
        };
        let mut add = |(name, key): (String, String), asked| {
            rows.push(row(format!("{name}, %"), key, &[], asked));
        };
        add(of(With::Nobody, Part::Used), Asked::Floor(95.0));
        add(of(With::Nobody, Part::Dropped), Asked::Ceiling(1.0));
        add(of(With::Tcp, Part::Ours), Asked::Floor(35.0));
        add(of(With::Tcp, Part::Others), Asked::Floor(35.0));
        let (_, twin) = of(With::Twin, Part::Others);
        let (name, first) = of(With::Twin, Part::Ours);
        rows.push(row(
            format!("{name}, beside the second, %"),
            first,
            &[&twin],
            Asked::Within(0.15),
        ));
    }
    rows
}

fn losses() -> Vec<Row> {
    let kept = [0.9, 0.8, 0.6];
    let mut rows = Vec::new();
    for (operation, _) in LOSSY_OPERATIONS {
        for (ppm, times) in LOSSES_PPM[1..].iter().zip(kept) {
            let percent = f64::from(*ppm) / 10_000.0;
            let ours = format!("{operation}-{ppm}-selective");
            let baseline = format!("{operation}-0-selective");
            let name = format!("{operation}, {percent} % loss, of none, GB/s");
            rows.push(row(name, &ours, &[&baseline], at_least(times)));
            let name = format!("{operation}, {percent} % loss, of go-back-N, GB/s");
            let go_back_n = format!("{operation}-{ppm}-go-back-n");
            rows.push(row(name, &ours, &[&go_back_n], at_least(1.0)));
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::bench::fabric::figures;

    #[test]
    fn every_row_finds_its_figures() {
        let keys: BTreeSet<String> = figures::all().into_iter().map(|figure| figure.key).collect();
        for row in all() {
            let named = [&row.ours].into_iter().chain(&row.peers);
            let lacks: Vec<&String> = named.filter(|key| !keys.contains(*key)).collect();
            assert!(lacks.is_empty(), "{}: {lacks:?}", row.name);
        }
    }

    #[test]
    fn bounds_are_judged_by_the_best_peer() {
        let latency = Asked::AtMost { times: 1.0, plus: 0.3 };
        let best = |asked: Asked, peers: &[f64]| asked.best(peers.iter().copied().map(Some));
        assert_eq!(best(latency, &[0.46, 0.25]), Some(0.25));
        assert_eq!(best(Asked::AtMostSum, &[0.5, 0.25]), Some(0.75));
        assert_eq!(Asked::AtMostSum.best([Some(0.5), None].into_iter()), None, "one is lacking");
        assert_eq!(Asked::AtMostSum.is_met(0.8, Some(0.75)), Some(false));
        assert_eq!(latency.is_met(0.54, Some(0.25)), Some(true));
        assert_eq!(latency.is_met(0.56, Some(0.25)), Some(false));
        assert_eq!(latency.is_met(0.1, None), None, "no peer, no verdict");
        let rate = Asked::AtLeast { times: 2.0, floor: 1.5 };
        assert_eq!(best(rate, &[0.5, 0.7]), Some(0.7));
        assert_eq!(rate.is_met(1.45, Some(0.7)), Some(false), "the floor");
        assert_eq!(Asked::TimesTcp.is_met(45.0, Some(20.0)), Some(true));
        assert_eq!(Asked::TimesTcp.is_met(47.0, Some(36.0)), Some(true));
        assert_eq!(Asked::TimesTcp.is_met(46.0, Some(36.0)), Some(false));
        assert_eq!(Asked::Ceiling(1.0).is_met(1.1, None), Some(false));
        assert_eq!(Asked::Within(0.15).is_met(40.0, Some(47.0)), Some(true));
        assert_eq!(Asked::Within(0.15).is_met(50.0, Some(40.0)), Some(false));
    }
}
