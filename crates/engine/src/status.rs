//! Counters by name: one flat list per process, the same in the status call, the tests and
//! `--json`.

use std::collections::BTreeMap;

use adapter::owned::Adapter;
use host::disk::DiskCounters;
use host::ring::ProducerCounters;
use service::event::Event;
use xio::reader::ReaderCounters;
use xio::target::TargetCounters;

/// All counters of a process, by name.
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
            self.set(event.name(), event.get());
        }
    }

    /// A counter, 0 if it was never set.
    pub fn get(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }

    /// Adds each counter of `other` to the one of the same name.
    pub(crate) fn add(&mut self, other: &Counters) {
        for (name, value) in &other.0 {
            *self.0.entry(name.clone()).or_default() += value;
        }
    }

    /// The counters of a stream and its ring.
    pub(crate) fn of_stream(reader: &ReaderCounters, ring: &ProducerCounters) -> Counters {
        let named = reader_counters(reader).into_iter().chain(ring_counters(ring));
        Counters(named.map(|(name, value)| (name.to_owned(), value)).collect())
    }

    /// The counters of a device and its wire.
    pub(crate) fn of_fabric<F: Adapter>(adapter: &F) -> Counters {
        let mut counters = Counters::default();
        adapter.counters(&mut |name, value| counters.set(name, value));
        counters
    }
}

/// A reader's counters with their names.
pub fn reader_counters(counters: &ReaderCounters) -> [(&'static str, u64); 17] {
    // Without `..`, here and below: a new counter must be given a name.
    let ReaderCounters {
        batches,
        source_bytes,
        wire_bytes,
        acknowledged_requests,
        delivered_bytes,
        narrowed_blocks,
        replaced_tokens,
        compressed_blocks,
        plain_blocks,
        escaped_blocks,
        corrupt_blocks,
        bad_responses,
        bad_completions,
        retried_requests,
        lost_connections,
        waits_for_data,
        waits_for_host,
    } = *counters;
    [
        ("stream.batches", batches),
        ("stream.source_bytes", source_bytes),
        ("stream.wire_bytes", wire_bytes),
        ("stream.acknowledged_requests", acknowledged_requests),
        ("stream.delivered_bytes", delivered_bytes),
        ("stream.narrowed_blocks", narrowed_blocks),
        ("stream.replaced_tokens", replaced_tokens),
        ("stream.compressed_blocks", compressed_blocks),
        ("stream.plain_blocks", plain_blocks),
        ("stream.escaped_blocks", escaped_blocks),
        ("stream.corrupt_blocks", corrupt_blocks),
        ("stream.bad_responses", bad_responses),
        ("stream.bad_completions", bad_completions),
        ("stream.retried_requests", retried_requests),
        ("stream.lost_connections", lost_connections),
        ("stream.waits_for_data", waits_for_data),
        ("stream.waits_for_host", waits_for_host),
    ]
}

/// The counters of rings with their names.
fn ring_counters(counters: &ProducerCounters) -> [(&'static str, u64); 8] {
    let ProducerCounters {
        slots,
        bytes,
        doorbells,
        doorbells_deferred,
        credit_waits,
        spurious_credit_wakeups,
        bad_release_words,
        bad_sleep_words,
    } = *counters;
    [
        ("ring.slots", slots),
        ("ring.bytes", bytes),
        ("ring.doorbells", doorbells),
        ("ring.doorbells_deferred", doorbells_deferred),
        ("ring.credit_waits", credit_waits),
        ("ring.spurious_credit_wakeups", spurious_credit_wakeups),
        ("ring.bad_release_words", bad_release_words),
        ("ring.bad_sleep_words", bad_sleep_words),
    ]
}

/// A disk's counters with their names.
pub(crate) fn disk_counters(counters: &DiskCounters) -> [(&'static str, u64); 10] {
    let DiskCounters {
        reads,
        bytes,
        faults,
        refused,
        short_reads,
        retried,
        syscalls,
        submit_errors,
        files_direct,
        files_buffered,
    } = *counters;
    [
        ("disk.reads", reads),
        ("disk.bytes", bytes),
        ("disk.faults", faults),
        ("disk.refused", refused),
        ("disk.short_reads", short_reads),
        ("disk.retried", retried),
        ("disk.syscalls", syscalls),
        ("disk.submit_errors", submit_errors),
        ("target.files_direct", files_direct),
        ("target.files_buffered", files_buffered),
    ]
}

/// A target's counters with their names, without the refusals, which have names of their own.
pub(crate) fn target_counters(counters: &TargetCounters) -> [(&'static str, u64); 21] {
    let TargetCounters {
        done,
        source_bytes,
        written_bytes,
        narrowed_blocks,
        replaced_tokens,
        packed_blocks,
        compressed_blocks,
        plain_blocks_no_gain,
        plain_blocks_fast_link,
        codec_in_bytes,
        codec_out_bytes,
        codec_ns,
        overflow,
        action_blocks,
        action_faults,
        truncated,
        storage_errors,
        changed_files,
        proven_blocks,
        refused: _,
        failed_work_requests,
        bad_completions,
    } = *counters;
    [
        ("target.requests_done", done),
        ("target.source_bytes", source_bytes),
        ("target.written_bytes", written_bytes),
        ("target.narrowed_blocks", narrowed_blocks),
        ("target.replaced_tokens", replaced_tokens),
        ("target.packed_blocks", packed_blocks),
        ("target.compressed_blocks", compressed_blocks),
        ("target.plain_blocks_no_gain", plain_blocks_no_gain),
        ("target.plain_blocks_fast_link", plain_blocks_fast_link),
        ("target.codec_in_bytes", codec_in_bytes),
        ("target.codec_out_bytes", codec_out_bytes),
        ("target.codec_ns", codec_ns),
        ("target.overflow", overflow),
        ("target.action_blocks", action_blocks),
        ("target.action_faults", action_faults),
        ("target.truncated", truncated),
        ("target.storage_errors", storage_errors),
        ("target.changed_files", changed_files),
        ("target.proven_blocks", proven_blocks),
        ("target.failed_work_requests", failed_work_requests),
        ("target.bad_completions", bad_completions),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fields of a counter structure, from what `Debug` prints: `name: 0`.
    fn fields(counters: &impl std::fmt::Debug) -> Vec<String> {
        let text = format!("{counters:?}");
        let leaf = |part: &str| {
            let (name, value) = part.rsplit_once(": ")?;
            let name = name.rsplit([' ', '{']).next()?;
            value.starts_with(|c: char| c.is_ascii_digit()).then(|| name.to_owned())
        };
        text.split([',', '}']).filter_map(leaf).collect()
    }

    #[track_caller]
    fn assert_all_named(
        counters: &impl std::fmt::Debug,
        names: impl IntoIterator<Item = (&'static str, u64)>,
    ) {
        let mut named: Vec<_> = names.into_iter().map(|(name, _)| last(name)).collect();
        let mut counted = fields(counters);
        assert!(counted.len() >= 7, "{counted:?}");
        named.sort_unstable();
        counted.sort_unstable();
        assert_eq!(named, counted);
    }

    fn last(name: &str) -> String {
        name.rsplit('.').next().unwrap_or(name).replace("requests_done", "done")
    }

    #[test]
    fn counters_of_streams_add_up_by_name() {
        let reader = ReaderCounters { batches: 2, ..Default::default() };
        let ring = ProducerCounters { slots: 3, ..Default::default() };
        let mut sum = Counters::of_stream(&Default::default(), &Default::default());
        assert_eq!(sum.0.len(), 25);
        (0..2).for_each(|_| sum.add(&Counters::of_stream(&reader, &ring)));
        assert_eq!((sum.get("stream.batches"), sum.get("ring.slots")), (4, 6));
        assert_eq!(sum.0.len(), 25);
    }

    /// A counter that is never shown is useless. `nic`'s consumer and its shared ports are not
    /// here: they belong to processes without a status call.
    #[test]
    fn every_counter_has_a_name() {
        assert_all_named(&ReaderCounters::default(), reader_counters(&Default::default()));
        assert_all_named(&ProducerCounters::default(), ring_counters(&Default::default()));
        assert_all_named(&DiskCounters::default(), disk_counters(&Default::default()));
        let target = TargetCounters::default();
        assert_all_named(&target, target_counters(&target));
        let udp = nic::udp::UdpCounters::default();
        assert_all_named(&(udp.tx, udp.rx), udp.named());
        let roce = roce::endpoint::Counters::default();
        assert_all_named(&roce, roce.named());
    }
}
