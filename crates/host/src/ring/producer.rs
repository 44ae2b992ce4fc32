//! The writing side: fill free slots, publish them in order, signal late, never trust a credit.
//!
//! Order of calls: [`free_slot`](Producer::free_slot), [`write`](Producer::write) or
//! [`slot_mut`](Producer::slot_mut), [`publish`](Producer::publish), and after each round of work
//! [`doorbell_if_needed`](Producer::doorbell_if_needed). With nothing to do, call
//! [`doorbell_now`](Producer::doorbell_now) for waiting slots; with no free slot, call
//! [`arm_credit_wakeup`](Producer::arm_credit_wakeup) (which signals too) and poll
//! [`credit_fd`](Producer::credit_fd).
//!
//! Several processes may read one ring, each with a credit file of its own.
//!
//! Invariants:
//! - A slot is written only while FILLING in `states`, which no other process can see or change.
//! - Words written by the consumer are only ever *compared*: with 1 + the sequence that a slot was
//!   published under, and with the range of possible sleeps. They never become an index or a
//!   length.
//! - No call blocks, whatever the consumer does with the words or with the eventfd.

use std::io::IoSliceMut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::event::EventfdFlags;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::ReadWriteFlags;
use rustix::thread::futex;

use super::growth::Growth;
use super::layout::{self, Descriptor, Header, MAX_READERS, RingFile};
use super::map::{self, Access, Region, os};
use super::wake::{self, Doorbell, DoorbellAction, SlotWords};
use super::{Geometry, RingConfig, RingError, RingFds, SlotMeta, copy};

/// A slot obtained from [`Producer::free_slot`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotIndex(u32);

impl SlotIndex {
    /// Position in the ring.
    pub const fn get(self) -> u32 {
        self.0
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Filling,
    /// Published under this sequence and not yet returned by every reader.
    Published(u64),
}

/// A process that reads the ring.
#[derive(Debug)]
struct Reader {
    credit: Region,
    bell: Doorbell,
    /// Sleep word last counted as bad.
    bad_sleep: u64,
    /// Release word of each slot last seen, so that each wrong value is counted once.
    seen: Box<[u64]>,
}

impl Reader {
    fn over(geometry: Geometry, credit: BorrowedFd<'_>) -> Result<Reader, RingError> {
        Ok(Reader {
            credit: Region::map(credit, geometry.credit_bytes(), Access::ReadWrite)?,
            bell: Doorbell::default(),
            bad_sleep: 0,
            seen: vec![0; geometry.slots() as usize].into(),
        })
    }

    /// Whether publication `sequence` in `slot` was returned. Acquire: its reads come before our
    /// next writes.
    fn has_returned(
        &mut self,
        geometry: &Geometry,
        slot: u32,
        sequence: u64,
        counters: &mut ProducerCounters,
    ) -> bool {
        let word = self.credit.u64_at(geometry.released_at(slot)).load(Ordering::Acquire);
        let released = word == sequence.wrapping_add(1);
        let seen = &mut self.seen[slot as usize];
        counters.bad_release_words += u64::from(!released && word != *seen);
        *seen = word;
        released
    }
}

/// The words of the ring as `reader` and the producer share them.
fn words<'a>(data: &'a Region, reader: &'a Reader) -> SlotWords<'a, AtomicU32, AtomicU64> {
    SlotWords {
        produced: data.u64_at(layout::PRODUCED_AT),
        bell: data.u32_at(layout::DOORBELL_AT),
        end: data.u32_at(layout::END_AT),
        sleep: reader.credit.u64_at(layout::SLEEP_AT),
    }
}

/// Counters of a producer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProducerCounters {
    /// Slots published.
    pub slots: u64,
    /// Payload bytes published.
    pub bytes: u64,
    /// Futex calls made to wake the consumer.
    pub doorbells: u64,
    /// Times a sleeping consumer was left asleep because too few slots were ready.
    pub doorbells_deferred: u64,
    /// Waits for credits announced.
    pub credit_waits: u64,
    /// Waits for credits that ended although no slot had been returned.
    pub spurious_credit_wakeups: u64,
    /// Release words that no correct consumer writes.
    pub bad_release_words: u64,
    /// Sleep words that no correct consumer writes.
    pub bad_sleep_words: u64,
}

impl ProducerCounters {
    /// Adds those of another producer.
    pub fn add(&mut self, other: &ProducerCounters) {
        let ProducerCounters {
            slots,
            bytes,
            doorbells,
            doorbells_deferred,
            credit_waits,
            spurious_credit_wakeups,
            bad_release_words,
            bad_sleep_words,
        } = *other;
        self.slots += slots;
        self.bytes += bytes;
        self.doorbells += doorbells;
        self.doorbells_deferred += doorbells_deferred;
        self.credit_waits += credit_waits;
        self.spurious_credit_wakeups += spurious_credit_wakeups;
        self.bad_release_words += bad_release_words;
        self.bad_sleep_words += bad_sleep_words;
    }
}

/// The producer's end of a ring.
#[derive(Debug)]
pub struct Producer {
    geometry: Geometry,
    data: Arc<Region>,
    growth: Growth,
    /// At least one.
    readers: Box<[Reader]>,
    credit_fd: OwnedFd,
    slots: Box<[State]>,
    produced: u64,
    armed: bool,
    ended: bool,
    counters: ProducerCounters,
}

impl Producer {
    /// Creates a ring whose first slot has its memory; the others get theirs shortly before they
    /// are needed. Send the [`RingFds`] to the consumer; they may be dropped afterwards.
    pub fn create(config: RingConfig) -> Result<(Producer, RingFds), RingError> {
        let (producer, mut readers) = Producer::create_shared(config, 1)?;
        // One was asked for.
        let fds = readers.pop().ok_or(os("memfd_create", rustix::io::Errno::NOMEM))?;
        Ok((producer, fds))
    }

    /// Creates a ring that `readers` processes (at least one) read: each gets every slot, and a
    /// slot is free when all have returned it. They must trust each other to return slots; the
    /// payload is safe from all.
    pub fn create_shared(
        config: RingConfig,
        readers: u32,
    ) -> Result<(Producer, Vec<RingFds>), RingError> {
        let geometry = Geometry::new(config.slots, config.slot_bytes)?;
        if !(1..=MAX_READERS).contains(&readers) {
            let (value, max) = (readers.into(), MAX_READERS.into());
            return Err(RingError::Limit { field: "readers", value, min: 1, max });
        }
        let data = map::create_sparse("dquant-ring-data", geometry.data_bytes())?;
        let credit = |_| map::create_file("dquant-ring-credit", geometry.credit_bytes());
        let credits = (0..readers).map(credit).collect::<Result<Vec<OwnedFd>, RingError>>()?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let doorbell = rustix::event::eventfd(0, flags).map_err(|e| os("eventfd", e))?;
        let producer = Producer::over(geometry, &data, &credits, &doorbell)?;
        map::seal(&data, true)?;
        credits.iter().try_for_each(|credit| map::seal(credit, false))?;
        let fds = |credit| Ok(RingFds { data: dup(&data)?, credit, doorbell: dup(&doorbell)? });
        Ok((producer, credits.into_iter().map(fds).collect::<Result<_, RingError>>()?))
    }

    fn over(
        geometry: Geometry,
        data: &OwnedFd,
        credits: &[OwnedFd],
        doorbell: &OwnedFd,
    ) -> Result<Producer, RingError> {
        let region = Region::map_only(data.as_fd(), geometry.data_bytes(), Access::ReadWrite)?;
        let region = Arc::new(region);
        let readers = credits.iter().map(|credit| Reader::over(geometry, credit.as_fd()));
        let producer = Producer {
            geometry,
            growth: Growth::begin(geometry, dup(data)?, &region)?,
            data: region,
            readers: readers.collect::<Result<_, RingError>>()?,
            credit_fd: dup(doorbell)?,
            slots: vec![State::Free; geometry.slots() as usize].into(),
            produced: 0,
            armed: false,
            ended: false,
            counters: ProducerCounters::default(),
        };
        producer.write_headers()?;
        Ok(producer)
    }

    fn write_headers(&self) -> Result<(), RingError> {
        let mut nonce = [0; 8];
        rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty())
            .map_err(|e| os("getrandom", e))?;
        let header = Header { geometry: self.geometry, nonce: u64::from_ne_bytes(nonce) };
        // SAFETY: the files have not been shared yet, so nobody else touches them.
        unsafe {
            self.data.copy_in(0, &header.encode(RingFile::Data));
        }
        for reader in &self.readers {
            // SAFETY: as above.
            unsafe { reader.credit.copy_in(0, &header.encode(RingFile::Credit)) };
        }
        copy::fence();
        Ok(())
    }

    /// Size of the ring.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The counters of the producer.
    pub fn counters(&self) -> ProducerCounters {
        self.counters
    }

    /// Slots published so far.
    pub fn produced(&self) -> u64 {
        self.produced
    }

    /// Takes a free slot for filling, `None` when all others are unread or held by the consumer.
    pub fn free_slot(&mut self) -> Option<SlotIndex> {
        // The lowest: with a fast consumer a few slots alternate and stay in the processor's cache.
        let mut present = self.growth.present();
        let slot = loop {
            if let Some(slot) = (0..present).find(|&slot| self.is_free(slot)) {
                break slot;
            }
            if !self.growth.wait_for_more(present) {
                return None;
            }
            present = self.growth.present();
        };
        if slot + 1 == present {
            self.growth.work_ahead();
        }
        self.slots[slot as usize] = State::Filling;
        Some(SlotIndex(slot))
    }

    /// Whether a slot could be taken now.
    pub fn has_free_slot(&mut self) -> bool {
        let present = self.growth.present();
        (0..present).any(|slot| self.is_free(slot)) || self.growth.wait_for_more(present)
    }

    fn is_free(&mut self, slot: u32) -> bool {
        match self.slots[slot as usize] {
            State::Free => true,
            State::Filling => false,
            State::Published(sequence) => self.reclaim(slot, sequence),
        }
    }

    /// Frees a published slot that every reader has returned.
    fn reclaim(&mut self, slot: u32, sequence: u64) -> bool {
        let Producer { geometry, counters, .. } = self;
        let mut readers = self.readers.iter_mut();
        let released =
            readers.all(|reader| reader.has_returned(geometry, slot, sequence, counters));
        if released {
            self.slots[slot as usize] = State::Free;
        }
        released
    }

    /// Copies `bytes` into a slot that is being filled, `offset` bytes from its start.
    pub fn write(&mut self, slot: SlotIndex, offset: usize, bytes: &[u8]) -> Result<(), RingError> {
        let at = self.filling(slot)?;
        let slot_bytes = self.geometry.slot_bytes();
        if offset > slot_bytes || bytes.len() > slot_bytes - offset {
            let len = bytes.len();
            return Err(RingError::OutOfSlot { slot: slot.0, offset, len, slot_bytes });
        }
        // SAFETY: the slot is FILLING, so the consumer does not read it by the rules; the file is
        // sealed, so nobody else can write it; `&mut self` keeps our own references out.
        unsafe { self.data.copy_in(at + offset, bytes) };
        Ok(())
    }

    /// The bytes of a slot that is being filled, for actions that write their result in place.
    pub fn slot_mut(&mut self, slot: SlotIndex) -> Result<&mut [u8], RingError> {
        let at = self.filling(slot)?;
        // SAFETY: this process is the only one that can write the file: it was sealed against new
        // writable mappings, and against write(2), after ours was made. `&mut self` makes the
        // reference exclusive here. A consumer that reads a slot it does not hold gets torn bytes,
        // in its own process.
        Ok(unsafe { self.data.bytes_mut(at, self.geometry.slot_bytes()) })
    }

    /// Offset in the data file of a slot that is being filled.
    fn filling(&self, slot: SlotIndex) -> Result<usize, RingError> {
        match self.slots.get(slot.0 as usize) {
            Some(State::Filling) => Ok(self.geometry.slot_at(slot.0)),
            _ => Err(RingError::NotFilling { slot: slot.0 }),
        }
    }

    /// Releases a slot that was taken and will not be published.
    pub fn abandon(&mut self, slot: SlotIndex) -> Result<(), RingError> {
        self.filling(slot)?;
        self.slots[slot.0 as usize] = State::Free;
        Ok(())
    }

    /// Publishes a filled slot and returns its sequence. Does not wake the consumer: call
    /// [`doorbell_if_needed`](Self::doorbell_if_needed).
    pub fn publish(&mut self, slot: SlotIndex, meta: SlotMeta) -> Result<u64, RingError> {
        self.filling(slot)?;
        if self.ended {
            return Err(RingError::Ended);
        }
        meta.check(self.geometry.slot_bytes() as u64)
            .map_err(|fault| RingError::BadMeta { slot: slot.0, fault })?;
        let sequence = self.produced;
        self.write_descriptor(&Descriptor { sequence, slot: slot.0, meta });
        self.slots[slot.0 as usize] = State::Published(sequence);
        self.produced += 1;
        copy::fence();
        self.words().publish(self.produced);
        self.counters.slots += 1;
        self.counters.bytes += meta.bytes;
        Ok(sequence)
    }

    /// The entry at `sequence mod slots` is unused: every unread publication occupies a slot of its
    /// own, and the slot of this one was free.
    fn write_descriptor(&self, descriptor: &Descriptor) {
        let at = self.geometry.descriptor_at(descriptor.sequence);
        for (i, word) in descriptor.encode().into_iter().enumerate() {
            self.data.u64_at(at + 8 * i).store(word, Ordering::Relaxed);
        }
    }

    /// Ends the stream after what is published: the consumer's `next` returns `None`.
    pub fn finish(&mut self) {
        self.end(layout::END_FINISHED);
    }

    /// Ends the stream with an error that the consumer sees after what is published. `message` is
    /// cut to [`MAX_END_TEXT_BYTES`](super::MAX_END_TEXT_BYTES). The first ending counts.
    pub fn fail(&mut self, code: u32, message: &str) {
        if self.ended {
            return;
        }
        let text = &message[..message.floor_char_boundary(layout::MAX_END_TEXT_BYTES)];
        self.data.u32_at(layout::END_CODE_AT).store(code, Ordering::Relaxed);
        self.data.u32_at(layout::END_TEXT_LEN_AT).store(text.len() as u32, Ordering::Relaxed);
        // SAFETY: the text area is ours alone to write, and is read only after `end` below.
        unsafe { self.data.copy_in(layout::END_TEXT_AT, text.as_bytes()) };
        self.end(layout::END_FAILED);
    }

    fn end(&mut self, how: u32) {
        if self.ended {
            return;
        }
        self.ended = true;
        self.data.u32_at(layout::END_AT).store(how, Ordering::Release);
        self.ring();
    }

    /// Wakes the consumer if it sleeps and at least `min_ready` slots (0 counts as 1) wait for it.
    /// Returns whether it was woken. A larger `min_ready` saves wake-ups; the consumer then sees
    /// the first slot later, at the latest when the producer goes idle and calls
    /// [`doorbell_now`](Self::doorbell_now).
    pub fn doorbell_if_needed(&mut self, min_ready: u32) -> bool {
        let Producer { data, produced, geometry, counters, .. } = self;
        let mut rings = false;
        for reader in &mut self.readers {
            let sleep = words(data, reader).sleep_word();
            match reader.bell.judge(sleep, *produced, geometry.slots(), min_ready) {
                DoorbellAction::Ring => rings = true,
                DoorbellAction::Defer => counters.doorbells_deferred += 1,
                DoorbellAction::Bad => {
                    counters.bad_sleep_words += u64::from(sleep != reader.bad_sleep);
                    reader.bad_sleep = sleep;
                }
                DoorbellAction::Quiet => {}
            }
        }
        if rings {
            self.ring();
        }
        rings
    }

    /// Wakes the consumer if it sleeps and anything is ready. Call before going idle.
    pub fn doorbell_now(&mut self) -> bool {
        self.doorbell_if_needed(1)
    }

    fn ring(&mut self) {
        self.words().ring();
        self.counters.doorbells += 1;
        // An error is impossible for a mapped word, and could not be handled: the consumer checks
        // by itself in any case. Readers share the word; one that was woken for another sleeps
        // again.
        let bell = self.data.u32_at(layout::DOORBELL_AT);
        let _ = futex::wake(bell, futex::Flags::empty(), i32::MAX as u32);
    }

    /// The words of the first reader; `produced`, `bell` and `end` are those of all.
    pub(super) fn words(&self) -> SlotWords<'_, AtomicU32, AtomicU64> {
        words(&self.data, &self.readers[0])
    }

    /// Announces that the producer is about to sleep until a slot is returned, and signals the
    /// consumer if anything is ready. `true`: poll [`credit_fd`](Self::credit_fd) for input, then
    /// [`disarm_credit_wakeup`](Self::disarm_credit_wakeup). `false`: a slot is free already,
    /// continue.
    pub fn arm_credit_wakeup(&mut self) -> bool {
        self.doorbell_now();
        self.counters.credit_waits += 1;
        let wait = self.counters.credit_waits;
        wake::announce_credit_wait(self.data.u64_at(layout::CREDIT_WAIT_AT), wait);
        self.armed = !self.has_free_slot();
        if !self.armed {
            wake::end_credit_wait(self.data.u64_at(layout::CREDIT_WAIT_AT));
        }
        self.armed
    }

    /// Ends the wait for credits and drains the eventfd. Call after each wait, whatever ended it.
    pub fn disarm_credit_wakeup(&mut self) {
        if !self.armed {
            return;
        }
        self.armed = false;
        wake::end_credit_wait(self.data.u64_at(layout::CREDIT_WAIT_AT));
        self.drain_credit_fd();
        self.counters.spurious_credit_wakeups += u64::from(!self.has_free_slot());
    }

    /// `RWF_NOWAIT` and not just the eventfd's own flag: the consumer shares the open file and
    /// could clear `O_NONBLOCK` on it.
    fn drain_credit_fd(&self) {
        let mut count = [0; 8];
        let mut into = [IoSliceMut::new(&mut count)];
        let _ = rustix::io::preadv2(&self.credit_fd, &mut into, u64::MAX, ReadWriteFlags::NOWAIT);
    }

    /// Readable when a slot was returned while a wait for credits was announced. Poll it only then:
    /// at other times it may be readable without need.
    pub fn credit_fd(&self) -> BorrowedFd<'_> {
        self.credit_fd.as_fd()
    }
}

fn dup(fd: &OwnedFd) -> Result<OwnedFd, RingError> {
    fd.try_clone().map_err(|_| os("dup", rustix::io::Errno::MFILE))
}
