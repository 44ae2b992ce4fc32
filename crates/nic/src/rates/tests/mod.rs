//! Tests of rate limits and gates over the shared files, with several processes in one.

mod agreement;
mod files;
mod gates;
mod limits;

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use roce::shaping::Arrivals;
use roce::world::{Path, Payload, Telemetry, TxFrame};
use roce::{Duration, Time};

use super::files::{BOTH, opened};
use super::layout::Buckets;
use super::mapping::Mapped;
use super::*;

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("nic-rates-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Folder(path)
    }

    fn table(&self) -> RateTable {
        RateTable::open(&self.0).expect("a temporary folder")
    }

    fn limits(&self) -> RateLimits {
        RateLimits::of(Some(self.0.clone()))
    }

    /// As a process that sends has them.
    fn buckets(&self) -> Mapped<Buckets> {
        let file = opened(&self.0.join("buckets")).expect("the table made it");
        Mapped::new(&file, BOTH).expect("a mapping")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn rated<const N: usize>(bps: [(u8, u64); N]) -> [(u8, RateLimit); N] {
    bps.map(|(dscp, bps)| (dscp, RateLimit::of(bps)))
}

const START: Time = Time::from_nanos(1_000_000_000);
const PAYLOAD: [u8; 1000] = [0; 1000];
/// On the wire over IPv4, without transport headers.
const BYTES: u64 = 14 + 20 + 8 + 1000 + 4;

fn path(dscp: u8) -> Path {
    Path { dscp, ..Path::new(SocketAddr::from(([10, 0, 0, 1], 4791))) }
}

fn frame(dscp: u8) -> TxFrame<'static> {
    TxFrame {
        path: path(dscp),
        header: Default::default(),
        payload: Payload::Bytes(&PAYLOAD),
        pad: 0,
        telemetry: Telemetry::None,
    }
}

/// Sends what is admitted, as a backlogged queue pair that sleeps until it is told to wake; returns
/// packets.
fn send(limits: &mut RateLimits, now: Time, dscp: u8) -> u64 {
    let mut sent = 0;
    loop {
        let admitted = limits.admits(now, &path(dscp), 64);
        let frames: Vec<_> = (0..admitted).map(|_| frame(dscp)).collect();
        limits.sent(now, &frames);
        sent += admitted as u64;
        if admitted == 0 || sent > 100_000 {
            return sent;
        }
    }
}

/// What backlogged processes send together in a time, in bits per second, and each of them.
fn rates(all: &mut [RateLimits], from: Time, time: Duration, dscp: u8) -> Vec<u64> {
    let mut wake = vec![from; all.len()];
    let mut bits = vec![0; all.len()];
    let end = from + time;
    while let Some((who, at)) = wake.iter().copied().enumerate().min_by_key(|(_, at)| *at)
        && at < end
    {
        bits[who] += send(&mut all[who], at, dscp) * BYTES * 8;
        // The thread wakes a little late.
        wake[who] = all[who].next_wakeup().expect("it waits") + Duration::from_micros(60);
    }
    let per_s = |bits: u64| u128::from(bits) * 1_000_000_000 / u128::from(time.as_nanos());
    bits.into_iter().map(|bits| per_s(bits) as u64).collect()
}

fn assert_near(bps: u64, wanted: u64, per_mille: u64) {
    let off = bps.abs_diff(wanted);
    assert!(off * 1000 <= wanted * per_mille, "{bps} bit/s, not {wanted}");
}

/// Times are 30, 130, 230 ms and so on of Unix time.
const GATE: TransmissionGate = TransmissionGate {
    period_ns: 100_000_000,
    shift_ns: 30_000_000,
    tolerance_ns: 5_000_000,
    quiet_ns: 20_000_000,
};

/// A folder whose DSCP 26 has the gate. Unix time is the monotonic clock's and this.
fn gated(name: &str, unix_offset_ns: u64) -> (Folder, RateTable) {
    let folder = Folder::new(name);
    let table = folder.table();
    table.set_unix_offset(unix_offset_ns);
    table.set_gates([(26, GATE)]);
    (folder, table)
}

fn ms(ms: u64) -> Time {
    START + Duration::from_millis(ms)
}

/// Sends a packet if that is admitted.
fn tries(limits: &mut RateLimits, now: Time, dscp: u8) -> bool {
    let is_admitted = limits.admits(now, &path(dscp), 1) == 1;
    if is_admitted {
        limits.sent(now, &[frame(dscp)]);
    }
    is_admitted
}

/// When a queue pair sends that wants to from `now` on and asks again when it is told to; and how
/// often it asked.
fn begins(limits: &mut RateLimits, mut now: Time) -> (Time, u32) {
    for asked in 1..100 {
        if tries(limits, now, 26) {
            return (now, asked);
        }
        let next = limits.next_wakeup().expect("it waits");
        assert!(next > now, "it spins");
        now = next;
    }
    panic!("it never begins");
}

/// Packets with these DSCPs, by bit, and of these peers.
fn arrive(limits: &mut RateLimits, now: Time, dscps: u64, peers: &[IpAddr]) {
    limits.received(now, &Arrivals { dscps, peers: peers.iter().copied().collect() });
}
