//! The trainer's side: attach, wait, read batches in place, return slots.
//!
//! [`Consumer::next`] spins for a few microseconds, then sleeps on a futex in slices of
//! `LIVENESS_SLICE_MS`; after each slice without a slot it checks whether the Unix socket was
//! closed, so a producer killed with -9 is noticed within one slice. Slots published before its
//! death, or before `fail`, are delivered first.
//!
//! Views are reference-counted: the slot is returned when the last [`SlotView`] or [`BatchView`] of
//! it is dropped, on any thread, in any order. Views keep the mapping alive, even after the
//! [`Consumer`] is dropped.
//!
//! Why a view may be a `&[u8]` although another process maps the same memory: the producer writes a
//! slot only between taking it as free and publishing it; it can be free only after this side
//! stored the release word, which happens when no view exists any more (`held` also refuses a
//! descriptor that names a slot with a living view). Nobody else can write the file: it is sealed,
//! which `attach` checks. A producer that breaks the first rule on purpose could change bytes under
//! a view; but it chooses those bytes anyway, and every length, count and index used here was
//! copied and checked before.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::thread::futex;

use super::layout::{self, DESCRIPTOR_WORDS, Descriptor, HEADER_BYTES, Header, RingFile};
use super::map::{self, Access, Region, os};
use super::wake::{self, SlotWords};
use super::{AttachRefusal, DescriptorFault, Geometry, RingError, RingFds, SlotMeta};
use crate::process;

/// Longest sleep before the producer's socket is checked.
const LIVENESS_SLICE_MS: u64 = 100;
/// Polls of the counter before sleeping: about 3 µs, less than a sleep and a wake-up cost.
const SPIN_ROUNDS: u32 = 60;

/// Everything that views need; lives as long as the last of them.
#[derive(Debug)]
struct Attached {
    geometry: Geometry,
    data: Region,
    credit: Region,
    doorbell: OwnedFd,
    /// Slots with a living view.
    held: Box<[AtomicBool]>,
    /// Number of the producer's wait that was last signalled.
    signalled: AtomicU64,
    /// eventfd writes made.
    credit_signals: AtomicU64,
    /// Process that attached; a forked child must not return its parent's slots.
    owner: u32,
}

/// Counters of a consumer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConsumerCounters {
    /// Slots taken.
    pub slots: u64,
    /// Payload bytes taken.
    pub bytes: u64,
    /// Futex waits entered.
    pub sleeps: u64,
    /// Slots found while spinning.
    pub spin_hits: u64,
    /// Sleeps that timed out although a slot had come: the producer signals late on purpose, or was
    /// interrupted before it could signal.
    pub missed_doorbells: u64,
    /// Checks of the producer's socket.
    pub liveness_checks: u64,
    /// Signals sent to a producer that waited for a slot.
    pub credit_signals: u64,
    /// Payloads whose CRC32C was compared.
    pub checksums: u64,
}

/// The trainer's end of a ring.
#[derive(Debug)]
pub struct Consumer {
    ring: Arc<Attached>,
    liveness: OwnedFd,
    taken: u64,
    verify: bool,
    /// The error that ended the stream for good.
    fault: Option<RingError>,
    counters: ConsumerCounters,
}

enum Look {
    Slot(SlotView),
    Empty,
    Finished,
}

impl Consumer {
    /// Maps the ring after checking it. `liveness` is this side's Unix socket to the producer: a
    /// hang-up on it means that the producer has died.
    pub fn attach(fds: RingFds, liveness: OwnedFd) -> Result<Consumer, RingError> {
        let data = read_header(&fds.data, RingFile::Data)?;
        let credit = read_header(&fds.credit, RingFile::Credit)?;
        if data != credit {
            return Err(AttachRefusal::Mixed.into());
        }
        let geometry = data.geometry;
        let ring = Attached {
            geometry,
            // Slots whose memory is not there yet would get it now.
            data: Region::map_only(fds.data.as_fd(), geometry.data_bytes(), Access::ReadOnly)?,
            credit: Region::map(fds.credit.as_fd(), geometry.credit_bytes(), Access::ReadWrite)?,
            doorbell: fds.doorbell,
            held: (0..geometry.slots()).map(|_| AtomicBool::new(false)).collect(),
            signalled: AtomicU64::new(0),
            credit_signals: AtomicU64::new(0),
            owner: process::id(),
        };
        Ok(Consumer {
            ring: Arc::new(ring),
            liveness,
            taken: 0,
            verify: false,
            fault: None,
            counters: ConsumerCounters::default(),
        })
    }

    /// Whether to compare the CRC32C of slots that carry one. Costs one pass over the payload.
    pub fn set_verify(&mut self, verify: bool) {
        self.verify = verify;
    }

    /// Size of the ring.
    pub fn geometry(&self) -> Geometry {
        self.ring.geometry
    }

    /// Slots with a living view. While all are held the producer has none to fill, so nothing
    /// arrives until a view is dropped.
    pub fn held_slots(&self) -> u32 {
        let held = self.ring.held.iter().filter(|held| held.load(Ordering::Relaxed));
        held.count() as u32
    }

    /// The counters of the consumer.
    pub fn counters(&self) -> ConsumerCounters {
        let credit_signals = self.ring.credit_signals.load(Ordering::Relaxed);
        ConsumerCounters { credit_signals, ..self.counters }
    }

    /// The next slot, in the order of publication. `None`: the stream has ended and was delivered
    /// completely. [`RingError::TimedOut`]: nothing came within `timeout`, call again. Any other
    /// error is final and returned by later calls, too.
    pub fn next(&mut self, timeout: Duration) -> Result<Option<SlotView>, RingError> {
        if let Some(fault) = &self.fault {
            return Err(fault.clone());
        }
        let outcome = self.wait_for_slot(timeout);
        if let Err(fault) = &outcome
            && !fault.is_timeout()
        {
            self.fault = Some(fault.clone());
        }
        outcome
    }

    fn wait_for_slot(&mut self, timeout: Duration) -> Result<Option<SlotView>, RingError> {
        let user = process::id();
        if user != self.ring.owner {
            return Err(RingError::Forked { owner: self.ring.owner, user });
        }
        if let Some(answer) = self.look()?.answer() {
            return Ok(answer);
        }
        if !timeout.is_zero() && self.spin() {
            self.counters.spin_hits += 1;
            if let Some(answer) = self.look()?.answer() {
                return Ok(answer);
            }
        }
        self.sleep_for_slot(timeout)
    }

    fn sleep_for_slot(&mut self, timeout: Duration) -> Result<Option<SlotView>, RingError> {
        let start = Instant::now();
        let slice = Duration::from_millis(LIVENESS_SLICE_MS);
        loop {
            let left = timeout.saturating_sub(start.elapsed());
            let woken = !left.is_zero() && self.sleep(left.min(slice))?;
            if let Some(answer) = self.look()?.answer() {
                self.counters.missed_doorbells += u64::from(!woken);
                return Ok(answer);
            }
            if !woken && self.producer_is_gone()? {
                return self.last_words();
            }
            if left.is_zero() {
                let waited_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
                return Err(RingError::TimedOut { waited_ms });
            }
        }
    }

    /// A dead producer writes no more, so one more check finds everything that it published.
    fn last_words(&mut self) -> Result<Option<SlotView>, RingError> {
        let died = RingError::ProducerDied { taken: self.taken };
        self.look()?.answer().ok_or(died)
    }

    fn spin(&self) -> bool {
        let words = self.ring.words();
        (0..SPIN_ROUNDS).any(|_| {
            std::hint::spin_loop();
            words.produced.load(Ordering::Relaxed) != self.taken
        })
    }

    /// Sleeps at most `slice`; `false` when no signal came.
    fn sleep(&mut self, slice: Duration) -> Result<bool, RingError> {
        let words = self.ring.words();
        let Some(bell) = words.fall_asleep(self.taken) else {
            return Ok(true);
        };
        self.counters.sleeps += 1;
        let slice = Timespec { tv_sec: 0, tv_nsec: i64::from(slice.subsec_nanos()) };
        let outcome = futex::wait(words.bell, futex::Flags::empty(), bell, Some(&slice));
        words.awake();
        match outcome {
            Ok(()) | Err(Errno::AGAIN | Errno::INTR) => Ok(true),
            Err(Errno::TIMEDOUT) => Ok(false),
            Err(errno) => Err(os("futex wait", errno)),
        }
    }

    fn producer_is_gone(&mut self) -> Result<bool, RingError> {
        self.counters.liveness_checks += 1;
        let mut poll = [PollFd::new(&self.liveness, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        match rustix::event::poll(&mut poll, Some(&now)) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(false),
            Err(errno) => return Err(os("poll", errno)),
        }
        let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
        Ok(poll[0].revents().intersects(gone))
    }

    /// Takes the next slot if there is one. `end` is read before `produced`, so that everything
    /// published before the end is seen first.
    fn look(&mut self) -> Result<Look, RingError> {
        let words = self.ring.words();
        let end = wake::load_acquire(words.end);
        let produced = wake::load_acquire(words.produced);
        let slots = self.ring.geometry.slots();
        match produced.wrapping_sub(self.taken) {
            0 => self.ring.ended(end),
            ready if ready <= u64::from(slots) => self.take().map(Look::Slot),
            _ => Err(RingError::BadCounter { produced, taken: self.taken, slots }),
        }
    }

    fn take(&mut self) -> Result<SlotView, RingError> {
        let sequence = self.taken;
        let hold = self.ring.hold(sequence).and_then(|hold| self.check(hold));
        let hold = hold.map_err(|fault| RingError::BadDescriptor { sequence, fault })?;
        self.taken += 1;
        self.counters.slots += 1;
        self.counters.bytes += hold.meta.bytes;
        Ok(SlotView { hold: Arc::new(hold) })
    }

    fn check(&mut self, hold: Hold) -> Result<Hold, DescriptorFault> {
        let Some(expected) = hold.meta.crc32c.filter(|_| self.verify) else {
            return Ok(hold);
        };
        self.counters.checksums += 1;
        match super::checksum(hold.payload()) {
            found if found == expected => Ok(hold),
            found => Err(DescriptorFault::Checksum { found, expected }),
        }
    }
}

impl Look {
    /// What `next` returns, unless there is nothing yet.
    fn answer(self) -> Option<Option<SlotView>> {
        match self {
            Look::Slot(view) => Some(Some(view)),
            Look::Finished => Some(None),
            Look::Empty => None,
        }
    }
}

/// Reads and checks the header through the file, before anything is mapped.
fn read_header(file: &OwnedFd, which: RingFile) -> Result<Header, RingError> {
    let needed = map::required_seals(which == RingFile::Data);
    let found = rustix::fs::fcntl_get_seals(file).map_err(|errno| os("F_GET_SEALS", errno))?;
    if !found.contains(needed) {
        let (found, needed) = (found.bits(), needed.bits());
        return Err(AttachRefusal::Seals { file: which, found, needed }.into());
    }
    let mut bytes = [0; HEADER_BYTES];
    let len = rustix::io::pread(file, &mut bytes[..], 0).map_err(|errno| os("pread", errno))?;
    let size = rustix::fs::fstat(file).map_err(|errno| os("fstat", errno))?.st_size as u64;
    if len < HEADER_BYTES {
        let expected = HEADER_BYTES as u64;
        return Err(AttachRefusal::Size { file: which, found: size, expected }.into());
    }
    let header = Header::decode(&bytes, which)?;
    let expected = match which {
        RingFile::Data => header.geometry.data_bytes(),
        RingFile::Credit => header.geometry.credit_bytes(),
    };
    if size != expected {
        return Err(AttachRefusal::Size { file: which, found: size, expected }.into());
    }
    Ok(header)
}

impl Attached {
    fn words(&self) -> SlotWords<'_, AtomicU32, AtomicU64> {
        SlotWords {
            produced: self.data.u64_at(layout::PRODUCED_AT),
            bell: self.data.u32_at(layout::DOORBELL_AT),
            end: self.data.u32_at(layout::END_AT),
            sleep: self.credit.u64_at(layout::SLEEP_AT),
        }
    }

    fn ended(&self, end: u32) -> Result<Look, RingError> {
        match end {
            layout::END_OPEN => Ok(Look::Empty),
            layout::END_FINISHED => Ok(Look::Finished),
            layout::END_FAILED => Err(self.failure()),
            found => Err(RingError::BadEnd { found }),
        }
    }

    fn failure(&self) -> RingError {
        let code = self.data.u32_at(layout::END_CODE_AT).load(Ordering::Relaxed);
        let len = self.data.u32_at(layout::END_TEXT_LEN_AT).load(Ordering::Relaxed) as usize;
        // SAFETY: the producer writes the text once, before the END_FAILED that we have read.
        let text =
            unsafe { self.data.bytes(layout::END_TEXT_AT, len.min(layout::MAX_END_TEXT_BYTES)) };
        RingError::StreamFailed { code, message: String::from_utf8_lossy(text).into_owned() }
    }

    /// Takes the slot that publication `sequence` is in.
    fn hold(self: &Arc<Attached>, sequence: u64) -> Result<Hold, DescriptorFault> {
        let at = self.geometry.descriptor_at(sequence);
        let words: [u64; DESCRIPTOR_WORDS] =
            std::array::from_fn(|i| self.data.u64_at(at + 8 * i).load(Ordering::Relaxed));
        let Descriptor { slot, meta, .. } = Descriptor::decode(words, sequence, &self.geometry)?;
        if self.held[slot as usize].swap(true, Ordering::Relaxed) {
            return Err(DescriptorFault::Held { slot });
        }
        Ok(Hold { ring: Arc::clone(self), sequence, slot, meta })
    }

    fn release(&self, slot: u32, sequence: u64) {
        if process::id() != self.owner {
            return;
        }
        self.held[slot as usize].store(false, Ordering::Relaxed);
        let released = self.credit.u64_at(self.geometry.released_at(slot));
        let credit_wait = self.data.u64_at(layout::CREDIT_WAIT_AT);
        let wait = wake::release(released, sequence.wrapping_add(1), credit_wait);
        if wait != 0 && self.signalled.swap(wait, Ordering::Relaxed) != wait {
            self.signal();
        }
    }

    fn signal(&self) {
        self.credit_signals.fetch_add(1, Ordering::Relaxed);
        // A full counter (EAGAIN) is a signal already; on a closed one nobody listens.
        let _ = rustix::io::write(&self.doorbell, &1u64.to_ne_bytes());
    }
}

/// One taken slot; dropping it returns the slot.
#[derive(Debug)]
struct Hold {
    ring: Arc<Attached>,
    sequence: u64,
    slot: u32,
    meta: SlotMeta,
}

impl Hold {
    fn payload(&self) -> &[u8] {
        let at = self.ring.geometry.slot_at(self.slot);
        // SAFETY: the slot is HELD until `self` is dropped, so the producer leaves it alone, and no
        // one else can write the file (module header). The length was checked with the descriptor.
        unsafe { self.ring.data.bytes(at, self.meta.bytes as usize) }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.ring.release(self.slot, self.sequence);
    }
}

/// A published slot, read in place.
#[derive(Clone, Debug)]
pub struct SlotView {
    hold: Arc<Hold>,
}

impl SlotView {
    /// Position in the order of publication.
    pub fn sequence(&self) -> u64 {
        self.hold.sequence
    }

    /// The producer's description of the slot.
    pub fn meta(&self) -> SlotMeta {
        self.hold.meta
    }

    /// The batches in the slot, in order. Each is a view of its own and may outlive this one.
    pub fn batches(&self) -> Batches {
        Batches { hold: Arc::clone(&self.hold), next: 0 }
    }
}

impl Deref for SlotView {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.hold.payload()
    }
}

impl AsRef<[u8]> for SlotView {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

/// Iterates over the batches of a slot.
#[derive(Clone, Debug)]
pub struct Batches {
    hold: Arc<Hold>,
    next: u32,
}

impl Iterator for Batches {
    type Item = BatchView;

    fn next(&mut self) -> Option<BatchView> {
        let index = self.next;
        if index >= self.hold.meta.batch_count {
            return None;
        }
        self.next += 1;
        Some(BatchView { hold: Arc::clone(&self.hold), index })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = (self.hold.meta.batch_count - self.next) as usize;
        (left, Some(left))
    }
}

impl ExactSizeIterator for Batches {}

/// One batch, read in place. Cheap to clone and to send to another thread.
#[derive(Clone, Debug)]
pub struct BatchView {
    hold: Arc<Hold>,
    index: u32,
}

impl BatchView {
    /// Number of the batch in the stream.
    pub fn number(&self) -> u64 {
        self.hold.meta.first_batch + u64::from(self.index)
    }
}

impl Deref for BatchView {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // In range: `SlotMeta::check` made sure that all batches but the last are whole.
        let meta = &self.hold.meta;
        let start = u64::from(self.index) * meta.batch_bytes;
        let end = meta.bytes.min(start.saturating_add(meta.batch_bytes));
        &self.hold.payload()[start as usize..end as usize]
    }
}

impl AsRef<[u8]> for BatchView {
    fn as_ref(&self) -> &[u8] {
        self
    }
}
