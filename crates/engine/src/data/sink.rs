//! The ring as the reader's sink: copies into slots, doorbells, and the text of errors.

use std::os::fd::BorrowedFd;

use host::ring::{MAX_SLOTS, Producer, ProducerCounters, SlotIndex, SlotMeta as RingMeta, codes};
use roce::{Duration, Time};
use xio::disk::Change;
use xio::kernel::MapFault;
use xio::reader::{Sink, SlotMeta, StreamError};
use xio::stage::Limit;
use xio::sums::SUM_BYTES;

/// What to do about a file that differs from its manifest.
const RESTORE_HINT: &str = "restore the file and open the stream again; if it is as it should be, write its manifest \
                            anew: dquant inspect FILE --write-manifest";

/// What to do about a file that changed while it was read.
const REPLACE_HINT: &str = "open the stream again to read the file as it is now; a stream over a file with a manifest \
                            compares contents and is not ended by new attributes: dquant inspect FILE --write-manifest";

/// What to do about a user action that failed.
const fn fault_hint(fault: MapFault) -> &'static str {
    match fault {
        MapFault::Time => {
            "a module has 50 ms of CPU time for a block of 1 MiB, 10 ms for a small one, and exceeded it twice; it is not \
             run again in this stream"
        }
        MapFault::Memory => "a module has 32 MiB of memory, and 65,536 entries in its tables",
        MapFault::Code(_) => "what the code means is the module's own: ask whoever wrote it",
        MapFault::Trap(_) => {
            "run the module on the tokens of this sample, which is the first that fails"
        }
        MapFault::Buffer => {
            "dquant_buffer(bytes) returns an address that is a multiple of 16, with so many bytes behind it"
        }
        MapFault::NotByItself => {
            "a result may depend on the token and its number in the file alone: blocks are cut differently by each plan"
        }
    }
}

/// How long a sleeping host may wait for a slot that is ready: an engine that is busy with other
/// streams has no sleep before which it would signal.
const LONGEST_DEFERRAL: Duration = Duration::from_millis(1);

/// A stream's ring for the ranks that read the same batches.
#[derive(Debug)]
struct Ring {
    producer: Producer,
    /// The slot being filled.
    taken: Option<SlotIndex>,
    /// Slots that must be ready before a sleeping host is signalled: half of the ring. A wake-up
    /// costs the host more than it spends on a slot.
    doorbell_slots: u32,
    /// Since when a slot may wait for a host that sleeps.
    deferred_since: Option<Time>,
}

impl Ring {
    fn new(producer: Producer) -> Ring {
        let doorbell_slots = (producer.geometry().slots() / 2).max(1);
        Ring { producer, taken: None, doorbell_slots, deferred_since: None }
    }

    fn signal_now(&mut self) {
        self.producer.doorbell_now();
        self.deferred_since = None;
    }
}

/// The rings of a stream.
#[derive(Debug)]
pub(crate) struct RingSink {
    /// At least one.
    rings: Vec<Ring>,
    names: Vec<String>,
    targets: Vec<String>,
    /// The module of `wasm`.
    module: Option<String>,
    /// Why a target could not be reconnected.
    loss: String,
    /// Why the stream ended early.
    failure: Option<String>,
    /// When the engine's turn began.
    now: Time,
    /// The ring without a free slot for the next batch.
    waits_for: Option<usize>,
    armed: bool,
}

impl RingSink {
    pub(crate) fn new(
        producers: Vec<Producer>,
        names: Vec<String>,
        targets: Vec<String>,
    ) -> RingSink {
        RingSink {
            rings: producers.into_iter().map(Ring::new).collect(),
            names,
            targets,
            module: None,
            loss: String::new(),
            failure: None,
            now: Time::ZERO,
            waits_for: None,
            armed: false,
        }
    }

    /// Begins a turn of the engine: signals hosts for which a slot has been ready for long.
    pub(crate) fn begin_turn(&mut self, now: Time) {
        self.now = now;
        for ring in &mut self.rings {
            if ring.deferred_since.is_some_and(|since| now.since(since) >= LONGEST_DEFERRAL) {
                ring.signal_now();
            }
        }
    }

    /// Prepares the rings for our sleep; `false` if a credit came meanwhile and there is work to
    /// do.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        self.rings.iter_mut().for_each(Ring::signal_now);
        let Some(full) = self.waits_for else {
            return true;
        };
        self.armed = self.rings[full].producer.arm_credit_wakeup();
        self.armed
    }

    /// Whether the credit is there that this waits for while the engine sleeps.
    pub(crate) fn has_credit(&mut self) -> bool {
        self.armed && self.waits_for.is_some_and(|full| self.rings[full].producer.has_free_slot())
    }

    /// The descriptors on which hosts signal credits. Others may write to them at any time.
    pub(crate) fn credit_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.rings.iter().map(|ring| ring.producer.credit_fd())
    }

    pub(crate) fn after_sleep(&mut self) {
        if let (true, Some(full)) = (std::mem::take(&mut self.armed), self.waits_for) {
            self.rings[full].producer.disarm_credit_wakeup();
        }
    }

    /// Sets the name of the module of `wasm`, for messages.
    pub(crate) fn set_module(&mut self, name: Option<String>) {
        self.module = name;
    }

    /// Notes why a target is abandoned, for the error that follows.
    pub(crate) fn set_loss(&mut self, why: String) {
        self.loss = why;
    }

    /// Stops the stream because the engine stops. A stream that has ended keeps its end.
    pub(crate) fn stop(&mut self, why: &str) {
        self.end_rings(codes::STOPPED, why);
    }

    /// Ends the stream because one of its ranks has left. A stream that has ended keeps its end.
    pub(crate) fn end_for_rank(&mut self, why: String) {
        self.end_rings(codes::RANK, &why);
        self.failure.get_or_insert(why);
        self.waits_for = None;
    }

    fn end_rings(&mut self, code: u32, why: &str) {
        self.rings.iter_mut().for_each(|ring| ring.producer.fail(code, why));
    }

    /// Why the stream ended early, if it did.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// What the producers of the rings did.
    pub(crate) fn counters(&self) -> ProducerCounters {
        let mut sum = ProducerCounters::default();
        self.rings.iter().for_each(|ring| sum.add(&ring.producer.counters()));
        sum
    }

    /// The ring of a slot number, and the number of the slot in it.
    fn filling(&mut self, slot: u32) -> Option<(&mut Ring, SlotIndex)> {
        let ring = self.rings.get_mut((slot / MAX_SLOTS) as usize)?;
        let taken = ring.taken?;
        Some((ring, taken))
    }

    fn name(&self, dataset: u32) -> &str {
        self.names.get(dataset as usize).map_or("?", String::as_str)
    }

    /// The error in words that name the file.
    fn describe(&self, error: &StreamError) -> String {
        match *error {
            StreamError::Overflow { dataset, token, byte, value, limit } => {
                let name = self.name(dataset);
                let hint = match limit {
                    Limit::Quantized(_) => {
                        "; hint: quantize(e5m2) passes NaN and infinities, quantize(e4m3) NaN"
                    }
                    Limit::Type(dtype) if dtype.is_float() => {
                        "; hint: quantize(…, deliver=bf16) and deliver=f32 have room for it"
                    }
                    _ => "",
                };
                let value = limit.shown(value);
                format!("{name}: token {token} (byte {byte}) is {value}: {limit}{hint}")
            }
            StreamError::Truncated { dataset, at_byte } => {
                let name = self.name(dataset);
                if at_byte == 0 {
                    return format!(
                        "{name}: the file is empty now: it was truncated while it was read"
                    );
                }
                format!(
                    "{name}: the file now ends at byte {at_byte}: it was truncated while it was read"
                )
            }
            StreamError::Storage { dataset, errno } => {
                let error = std::io::Error::from_raw_os_error(errno);
                let place = if self.targets.is_empty() { "" } else { " at the target" };
                format!("{}: storage error{place}: {error}", self.name(dataset))
            }
            StreamError::Changed { dataset, change } => {
                let name = self.name(dataset);
                match change {
                    Change::Block { at_byte } => format!(
                        "{name}: block {} (from byte {at_byte}) differs from the manifest's checksum: \
                         the file was changed after its manifest was written; hint: {RESTORE_HINT}",
                        at_byte / SUM_BYTES
                    ),
                    Change::Written { .. } => format!(
                        "{name}: the file was changed while it was read; hint: {REPLACE_HINT}"
                    ),
                    Change::Removed => format!(
                        "{name}: the file was removed or replaced while it was read; hint: {REPLACE_HINT}"
                    ),
                }
            }
            StreamError::Action { dataset, first_token, fault } => {
                self.describe_fault(dataset, first_token, fault)
            }
            StreamError::Refused { dataset, reason } => {
                format!("{}: the target refused a request: {reason}", self.name(dataset))
            }
            StreamError::Damaged { dataset, first_token } => {
                let name = self.name(dataset);
                format!(
                    "{name}: the block at token {first_token} arrived damaged each time: it failed its CRC-32C check \
                     or could not be decoded"
                )
            }
            StreamError::Lost { connection } => {
                let target = self.targets.get(connection as usize).map_or("?", String::as_str);
                format!(
                    "the connection to target {target} was lost and could not be restored: {}",
                    self.loss
                )
            }
            StreamError::Device(_) => error.to_string(),
        }
    }

    fn describe_fault(&self, dataset: u32, first_token: u64, fault: MapFault) -> String {
        let (name, module) = (self.name(dataset), self.module.as_deref().unwrap_or("?"));
        let what = if fault.is_of_a_token() { "sample" } else { "block" };
        format!(
            "{name}: the module {module} failed on the {what} from token {first_token} on: {fault}; hint: {}",
            fault_hint(fault)
        )
    }
}

impl Sink for RingSink {
    fn acquire(&mut self, ring: u32) -> Option<u32> {
        let index = ring as usize;
        let taken = self.rings.get_mut(index).map(|ring| {
            ring.taken = ring.producer.free_slot();
            ring.taken
        })?;
        self.waits_for = taken.is_none().then_some(index);
        taken.map(|slot| ring * MAX_SLOTS + slot.get())
    }

    fn write(&mut self, slot: u32, offset: u32, bytes: &[u8]) {
        let Some((ring, slot)) = self.filling(slot) else { return };
        let written = ring.producer.write(slot, offset as usize, bytes);
        debug_assert!(written.is_ok(), "{written:?}");
    }

    fn publish(&mut self, slot: u32, meta: SlotMeta) {
        let now = self.now;
        let Some((ring, slot)) = self.filling(slot) else {
            return;
        };
        ring.taken = None;
        let meta = RingMeta {
            bytes: u64::from(meta.batches) * u64::from(meta.batch_bytes),
            first_batch: meta.first_batch,
            batch_count: meta.batches,
            batch_bytes: u64::from(meta.batch_bytes),
            crc32c: None,
        };
        let published = ring.producer.publish(slot, meta);
        debug_assert!(published.is_ok(), "{published:?}");
        // A trainer waits for the first batch; later ones come several at a time.
        let is_first = ring.producer.produced() == 1;
        match ring.producer.doorbell_if_needed(if is_first { 1 } else { ring.doorbell_slots }) {
            true => ring.deferred_since = None,
            false => drop(ring.deferred_since.get_or_insert(now)),
        }
    }

    fn fail(&mut self, error: &StreamError) {
        let code = match error {
            StreamError::Lost { .. } => codes::PEER,
            StreamError::Device(_) => codes::STOPPED,
            StreamError::Overflow { .. } | StreamError::Action { .. } => codes::DATA,
            _ => codes::STORAGE,
        };
        let text = self.describe(error);
        self.end_rings(code, &text);
        self.failure = Some(text);
        // Returned slots are of no more use: waiting for them would keep the engine awake.
        self.waits_for = None;
    }

    fn finish(&mut self) {
        self.rings.iter_mut().for_each(|ring| ring.producer.finish());
        self.waits_for = None;
    }
}

#[cfg(test)]
mod tests {
    use host::ring::{Consumer, RingConfig};

    use super::*;

    /// A ring filled by its stream; the host takes a slot and returns it after the end.
    fn sleeps_after(end: impl FnOnce(&mut RingSink)) -> bool {
        let config = RingConfig { slots: 2, slot_bytes: 4096 };
        let (producer, fds) = Producer::create(config).expect("a small ring");
        let (alive, _peer) = std::os::unix::net::UnixStream::pair().expect("a pair of sockets");
        let mut consumer = Consumer::attach(fds, alive.into()).expect("an honest ring");
        let mut sink = RingSink::new(vec![producer], Vec::new(), Vec::new());
        while let Some(slot) = sink.acquire(0) {
            sink.publish(slot, SlotMeta { first_batch: 0, batches: 1, batch_bytes: 8 });
        }
        assert!(sink.prepare_sleep(), "no slot is free");
        sink.after_sleep();
        end(&mut sink);
        drop(consumer.next(std::time::Duration::ZERO).expect("a slot was published"));
        sink.prepare_sleep()
    }

    #[test]
    fn a_stream_that_has_ended_waits_for_no_credit() {
        assert!(!sleeps_after(|_| {}), "a stream that goes on has a slot to fill");
        assert!(sleeps_after(|sink| sink.fail(&StreamError::Lost { connection: 0 })));
        assert!(sleeps_after(Sink::finish));
    }

    /// An engine with work for others never sleeps, so it signals a host that waits for the first
    /// slot of many.
    #[test]
    fn a_sleeping_host_is_signalled_for_one_slot_after_a_while() {
        let config = RingConfig { slots: 16, slot_bytes: 4096 };
        let (producer, fds) = Producer::create(config).expect("a small ring");
        let (alive, _peer) = std::os::unix::net::UnixStream::pair().expect("a pair of sockets");
        let mut consumer = Consumer::attach(fds, alive.into()).expect("an honest ring");
        let mut sink = RingSink::new(vec![producer], Vec::new(), Vec::new());
        let (mut now, mut woken) = (Time::ZERO, 0);
        for number in 0..10 {
            let before = consumer.counters();
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| consumer.next(std::time::Duration::from_secs(60)));
                std::thread::sleep(std::time::Duration::from_millis(10));
                sink.begin_turn(now);
                let slot = sink.acquire(0).expect("the host keeps none");
                sink.publish(slot, SlotMeta { first_batch: number, batches: 1, batch_bytes: 8 });
                now += LONGEST_DEFERRAL;
                sink.begin_turn(now);
                let slot = waiting.join().expect("no panic").expect("no failure");
                assert!(slot.is_some(), "the stream goes on");
            });
            let after = consumer.counters();
            // On a busy machine it may not have slept yet, or we came after its own look.
            let was_signalled = after.missed_doorbells == before.missed_doorbells;
            woken += u32::from(after.sleeps > before.sleeps && was_signalled);
        }
        assert!(woken > 0, "it always found the slot by itself");
    }
}
