//! Counters by name: one flat list per process, the same in the status call, the tests and `--json`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use nic::udp::UdpCounters;
use xio::reader::ReaderCounters;

use crate::engine::Host;

/// Something that the threads of this process count together, and that has no engine to count it.
#[derive(Debug)]
pub(crate) struct Event {
    name: &'static str,
    count: AtomicU64,
}

impl Event {
    pub(crate) const fn new(name: &'static str) -> Event {
        Event { name, count: AtomicU64::new(0) }
    }

    /// It happened once more.
    pub(crate) fn count(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// How often so far.
    pub(crate) fn get(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}

/// Everything a process counts, by name.
#[derive(Clone, Debug, Default)]
pub struct Counters(pub BTreeMap<String, u64>);

impl Counters {
    /// Sets one counter.
    pub fn set(&mut self, name: &str, value: u64) {
        self.0.insert(name.to_owned(), value);
    }

    /// Sets the counters of events.
    pub(crate) fn set_events<'e>(&mut self, events: impl IntoIterator<Item = &'e Event>) {
        for event in events {
            self.set(event.name, event.get());
        }
    }

    /// A counter, 0 if it was never set.
    pub fn get(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }

    /// The counters of endpoint and wire.
    pub(crate) fn of_host(host: &Host) -> Counters {
        let mut counters = Counters::default();
        for (name, value) in host.endpoint.counters().named() {
            counters.set(&format!("roce.{name}"), value);
        }
        let wire = host.wire.inner();
        for (name, value) in udp_counters(wire.counters()) {
            counters.set(name, value);
        }
        counters.set("udp.ip_udp_header_bytes", wire.ip_udp_header_bytes());
        counters.set("udp.dropped_on_purpose", host.wire.dropped());
        counters
    }
}

/// A reader's counters with their names.
pub fn reader_counters(counters: &ReaderCounters) -> [(&'static str, u64); 10] {
    [
        ("stream.batches", counters.batches),
        ("stream.source_bytes", counters.source_bytes),
        ("stream.wire_bytes", counters.wire_bytes),
        ("stream.delivered_bytes", counters.delivered_bytes),
        ("stream.damaged_blocks", counters.damaged_blocks),
        ("stream.bad_answers", counters.bad_answers),
        ("stream.repeated_requests", counters.repeated_requests),
        ("stream.lost_connections", counters.lost_connections),
        ("stream.waits_for_data", counters.waits_for_data),
        ("stream.waits_for_host", counters.waits_for_host),
    ]
}

fn udp_counters(counters: &UdpCounters) -> [(&'static str, u64); 26] {
    let (tx, rx) = (&counters.tx, &counters.rx);
    let (lost, bad) = (&tx.dropped, &rx.unparsable);
    [
        ("udp.tx.packets", tx.packets),
        ("udp.tx.bytes", tx.bytes),
        ("udp.tx.gso_batches", tx.gso_batches),
        ("udp.tx.syscalls", tx.syscalls),
        ("udp.tx.waits", tx.waits),
        ("udp.tx.dropped.full", lost.full),
        ("udp.tx.dropped.too_long", lost.too_long),
        ("udp.tx.dropped.family", lost.family),
        ("udp.tx.dropped.refused", lost.refused),
        ("udp.rx.packets", rx.packets),
        ("udp.rx.bytes", rx.bytes),
        ("udp.rx.gro_batches", rx.gro_batches),
        ("udp.rx.syscalls", rx.syscalls),
        ("udp.rx.accepted", rx.accepted),
        ("udp.rx.id_solved", rx.id_solved),
        ("udp.rx.bad_icrc", rx.bad_icrc),
        ("udp.rx.truncated", rx.truncated),
        ("udp.rx.errors", rx.errors),
        ("udp.rx.bad.too_short", bad.too_short),
        ("udp.rx.bad.opcode", bad.opcode),
        ("udp.rx.bad.version", bad.version),
        ("udp.rx.bad.syndrome", bad.syndrome),
        ("udp.rx.bad.pad", bad.pad),
        ("udp.rx.bad.reserved", bad.reserved),
        ("udp.rx.bad.extension", bad.extension),
        ("udp.rx.bad.range", bad.range),
    ]
}
