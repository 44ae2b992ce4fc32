//! A FIFO of packets and messages in shared memory, from one process to another.
//!
//! It is a ring of 64-byte lines. A packet starts on a line, so that the reader gets a small one
//! with a single transfer between caches. The first word of a packet is its *stamp*, which the
//! writer stores last. Stale bytes never look like a stamp: before it stamps a packet, the writer
//! has cleared the word at which the next one will begin, and that word is the only one that the
//! reader waits for. It clears many lines together, since the reader looks at the next one all the
//! time: a store there for each packet would move that line between the caches twice more.
//!
//! The two processes do not trust each other. The writer makes the file, which cannot be resized.
//! Both calculate places from their own counts, and the reader copies a packet out before anyone
//! looks at it. A process that writes nonsense breaks this FIFO and nothing else ([`Broken`]).
//!
//! A message is a whole SEND; the reader takes or refuses it. It writes the places of those that it
//! refuses into a list of its own, before it gives their lines back.
//!
//! Both ends are generic over the memory ([`Ring`]) because the model checker brings its own.
//!
//! What the packets mean, and who may send them, does not belong here.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use super::words::Word;

/// Format and version; both sides run the same layout or none.
const MAGIC: u64 = u64::from_le_bytes(*b"dqfifo02");

/// Bytes of a cache line.
const LINE: usize = 64;

/// Lines of the ring, 256 KiB: 62 packets of the largest MTU, and both ends fit a second-level
/// cache.
const LINES: usize = 4096;

/// Bytes before a packet: stamp, length, tag.
const PREFIX: usize = 12;

/// Most lines that are fetched for the next packet: as many as a small message has.
const MAX_FETCHED: u64 = 4;

/// Longest packet: MTU 4096 and its headers.
pub(super) const MAX_PACKET: usize = 4096 + 128;

/// Lines that the longest packet takes.
const MAX_LINES: u64 = lines_of(MAX_PACKET);

/// In place of a length: the next packet begins on the first line.
const TO_START: u32 = u32::MAX;

/// Beside the length of a message.
const MESSAGE: u32 = 1 << 30;

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

const BYTES: usize = size_of::<Layout>();

/// The memory that both ends share, real or modelled.
pub(super) trait Ring {
    type U32: Word<u32>;
    type U64: Word<u64>;

    /// Lines of the ring.
    const LINES: u64;
    /// Lines whose stamps are cleared together.
    const CLEARED_TOGETHER: u64;

    /// The line that is this one, counted from the beginning.
    fn line(&self, at: u64) -> &Line<Self::U32>;
    fn back(&self) -> &Back<Self::U64>;
    /// The place of a refusal, counted from the beginning.
    fn refused(&self, at: u64) -> &Self::U64;
    /// Has the cache fetch a line that will be written, and goes on: locks wait for stores to lines
    /// of others.
    fn fetch_to_write(&self, at: u64);
}

#[repr(C, align(64))]
struct Padded<T>(T);

#[repr(C, align(4096))]
struct Layout {
    magic: Padded<AtomicU64>,
    back: Padded<Back<AtomicU64>>,
    lines: [Line<AtomicU32>; LINES],
    /// The lines at which messages began that the reader has refused: a ring. Those that the writer
    /// has not looked at fit, because their lines are not written again before.
    refused: [AtomicU64; LINES],
}

/// What the reader writes: one cache line.
#[repr(C)]
pub(super) struct Back<W> {
    /// Lines that it has finished with, since the beginning.
    tail: W,
    /// Messages that it has refused, since the beginning.
    refusals: W,
}

/// What begins on a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Packet,
    Message,
}

#[repr(C, align(64))]
pub(super) struct Line<W> {
    stamp: W,
    len: W,
    tag: W,
    rest: [W; (LINE - PREFIX) / 4],
}

const fn lines_of(packet: usize) -> u64 {
    (PREFIX + packet).div_ceil(LINE) as u64
}

/// The stamp of a packet that begins at this line, counted from the beginning. Never 0.
const fn stamp(line: u64) -> u32 {
    line as u32 | 1 << 31
}

/// What a packet would say in its IP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tag {
    /// Index of its source in the sender's list of addresses.
    pub(super) source: u8,
    /// Index of its destination in the receiver's list of addresses.
    pub(super) dest: u8,
    /// Traffic class: DSCP and ECN.
    pub(super) tos: u8,
    /// Time to live, or hop limit.
    pub(super) hop_limit: u8,
}

/// The other side wrote something that no correct one writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Broken;

/// The memory of a FIFO, mapped for reading and writing.
pub(super) struct Map(NonNull<Layout>);

// SAFETY: what is behind the pointer is atomic, or bytes that one end copies in and the other out
// without references; it is mapped for as long as the value lives.
unsafe impl Send for Map {}

impl Map {
    fn new(file: BorrowedFd<'_>) -> io::Result<Map> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping of a file whose size cannot change.
        let at = unsafe { mmap(std::ptr::null_mut(), BYTES, access, MapFlags::SHARED, file, 0)? };
        let map = Map(NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?);
        // SAFETY: the mapping just made. A forked child has no use for it.
        unsafe { madvise(at, BYTES, Advice::LinuxDontFork)? };
        Ok(map)
    }

    fn layout(&self) -> &Layout {
        // SAFETY: `BYTES` are mapped at the pointer, page-aligned, until the map is dropped; every
        // field is atomic, and any bytes are valid ones.
        unsafe { self.0.as_ref() }
    }

    /// First byte of a packet that begins at this line.
    fn body(&self, at: u64) -> *mut u8 {
        let line: *const Line<AtomicU32> = self.line(at);
        let base = self.0.as_ptr().cast::<u8>();
        // The address of the line with the provenance of the whole mapping: packets are longer than
        // lines.
        base.with_addr(line.addr() + PREFIX)
    }
}

impl Ring for Map {
    type U32 = AtomicU32;
    type U64 = AtomicU64;

    const LINES: u64 = LINES as u64;
    const CLEARED_TOGETHER: u64 = 64;

    #[inline]
    fn line(&self, at: u64) -> &Line<AtomicU32> {
        &self.layout().lines[(at % Self::LINES) as usize]
    }

    #[inline]
    fn back(&self) -> &Back<AtomicU64> {
        &self.layout().back.0
    }

    #[inline]
    fn refused(&self, at: u64) -> &AtomicU64 {
        &self.layout().refused[(at % Self::LINES) as usize]
    }

    #[inline]
    fn fetch_to_write(&self, at: u64) {
        let line: *const Line<AtomicU32> = self.line(at);
        #[cfg(all(target_arch = "x86_64", not(any(miri, portable))))]
        // SAFETY: a hint about an address, which changes neither memory nor registers nor flags.
        unsafe {
            std::arch::asm!("prefetchw [{}]", in(reg) line, options(nostack, readonly, preserves_flags));
        }
        #[cfg(all(target_arch = "aarch64", not(any(miri, portable))))]
        // SAFETY: as above.
        unsafe {
            std::arch::asm!("prfm pstl1keep, [{}]", in(reg) line, options(nostack, readonly, preserves_flags));
        }
        #[cfg(any(miri, portable, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
        let _ = line;
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and nothing refers to it any more.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), BYTES) };
    }
}

/// The end that packets enter.
pub(super) struct Writer<R = Map> {
    ring: R,
    /// Lines written since the beginning.
    head: u64,
    /// The reader's tail when last looked at: never more than `head`.
    tail: u64,
    /// Refusals looked at.
    refusals: u64,
    /// No line from `head` to here has a stamp.
    cleared: u64,
}

impl Writer {
    /// An empty FIFO, and the file to send to its reader.
    pub(super) fn create() -> io::Result<(Writer, OwnedFd)> {
        let file = memfd_create("dquant-fifo", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, BYTES as u64)?;
        fcntl_add_seals(&file, SEALS)?;
        let map = Map::new(file.as_fd())?;
        map.layout().magic.0.store(MAGIC, Ordering::Release);
        Ok((Writer::on(map), file))
    }

    /// Appends a packet; returns false if it does not fit now.
    pub(super) fn push(&mut self, tag: Tag, packet: &[u8]) -> bool {
        // SAFETY: a slice of that many bytes.
        let put = |to: *mut u8| unsafe {
            std::ptr::copy_nonoverlapping(packet.as_ptr(), to, packet.len());
        };
        self.append(tag, packet.len(), 0, |map, begin| put(map.body(begin))).is_some()
    }

    /// Appends a message; returns the line at which it begins, or `None` if it does not fit now.
    /// `put` fills `len` bytes from its argument on.
    pub(super) fn push_message(
        &mut self,
        tag: Tag,
        len: usize,
        put: impl FnOnce(*mut u8),
    ) -> Option<u64> {
        self.append(tag, len, MESSAGE, |map, begin| put(map.body(begin)))
    }
}

impl<R: Ring> Writer<R> {
    /// The end of an empty FIFO.
    fn on(ring: R) -> Writer<R> {
        Writer { ring, head: 0, tail: 0, refusals: 0, cleared: 0 }
    }

    /// How many lines the reader has finished with. A number that is impossible counts as no
    /// progress.
    pub(super) fn progress(&mut self) -> u64 {
        let tail = self.ring.back().tail.load(Ordering::Acquire);
        if (self.tail..=self.head).contains(&tail) {
            self.tail = tail;
        }
        self.tail
    }

    /// Changes a word of a message that begins at this line and was not read, as far as this side
    /// knows. The reader gets the old word or the new one.
    pub(super) fn overwrite(&mut self, begin: u64, word: usize, value: u32) {
        if (self.progress()..self.head).contains(&begin) {
            self.ring.line(begin).rest[word].store(value, Ordering::Relaxed);
        }
    }

    /// Passes the lines of messages on that were refused, oldest first. After
    /// [`progress`](Writer::progress) these are all that it has passed.
    pub(super) fn take_refusals(&mut self, mut refused: impl FnMut(u64)) {
        let count = self.ring.back().refusals.load(Ordering::Acquire);
        // More than there are lines is a lie.
        let new = count.wrapping_sub(self.refusals).min(R::LINES);
        for at in 0..new {
            let place = self.ring.refused(self.refusals.wrapping_add(at));
            refused(place.load(Ordering::Relaxed));
        }
        self.refusals = count;
    }

    /// Whether something in it has not been read.
    pub(super) fn holds_packets(&mut self) -> bool {
        self.progress() < self.head
    }

    /// How many of `packets` packets of any length fit.
    pub(super) fn room(&mut self, packets: usize) -> usize {
        let fit = |writer: &Writer<R>| {
            // One packet may have to leave lines at the end unused.
            let used = writer.head - writer.tail + MAX_LINES;
            (R::LINES.saturating_sub(used + 1) / MAX_LINES) as usize
        };
        if fit(self) < packets {
            self.progress();
        }
        fit(self).min(packets)
    }

    /// `put` writes the bytes of what begins at a line.
    #[inline]
    fn append(
        &mut self,
        tag: Tag,
        len: usize,
        flag: u32,
        put: impl FnOnce(&R, u64),
    ) -> Option<u64> {
        debug_assert!(len <= MAX_PACKET);
        let lines = lines_of(len);
        let to_end = R::LINES - self.head % R::LINES;
        let skipped = if lines > to_end { to_end } else { 0 };
        let begin = self.head + skipped;
        // The line behind it has to be free, too: its stamp is cleared.
        let fits = |tail: u64| begin + lines < tail + R::LINES;
        if !fits(self.tail) && !fits(self.progress()) {
            return None;
        }
        self.clear_stamps(begin + lines);
        let line = self.ring.line(begin);
        let Tag { source, dest, tos, hop_limit } = tag;
        line.len.store(len as u32 | flag, Ordering::Relaxed);
        line.tag.store(u32::from_ne_bytes([source, dest, tos, hop_limit]), Ordering::Relaxed);
        // The lines from `begin` on hold the packet before the end of the ring, and the reader has
        // finished with them. A reader that lies may read them, and gets wrong bytes.
        put(&self.ring, begin);
        line.stamp.store(stamp(begin), Ordering::Release);
        if skipped > 0 {
            let marker = self.ring.line(self.head);
            marker.len.store(TO_START, Ordering::Relaxed);
            marker.stamp.store(stamp(self.head), Ordering::Release);
        }
        self.head = begin + lines;
        if lines > 1 {
            self.fetch_next(lines);
        }
        Some(begin)
    }

    /// Fetches the first lines of the next packet, which is probably as long, as far as they are
    /// free. For a single line it does not pay: the reader, which waits for that one, takes it back
    /// at once.
    fn fetch_next(&self, lines: u64) {
        let end = (self.head + lines.min(MAX_FETCHED)).min(self.tail + R::LINES);
        (self.head..end).for_each(|at| self.ring.fetch_to_write(at));
    }

    /// Sees to it that `next`, which the reader has finished with, has no stamp.
    fn clear_stamps(&mut self, next: u64) {
        if next < self.cleared {
            return;
        }
        let end = (next + R::CLEARED_TOGETHER).min(self.tail + R::LINES);
        (next..end).for_each(|at| self.ring.line(at).stamp.store(0, Ordering::Relaxed));
        self.cleared = end;
    }
}

/// The end that packets leave.
pub(super) struct Reader<R = Map> {
    ring: R,
    /// Lines read since the beginning.
    at: u64,
    /// What the writer was told of it.
    told: u64,
    /// Messages refused.
    refusals: u64,
}

impl Reader {
    /// Maps a FIFO that another process has sent.
    ///
    /// # Errors
    /// When it is not one, or its maker could still resize it, which would end this process on
    /// access.
    pub(super) fn of_other(file: &OwnedFd) -> io::Result<Reader> {
        let wrong = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        if !fcntl_get_seals(file)?.contains(SEALS) {
            return Err(wrong("the FIFO can be resized"));
        }
        if fstat(file)?.st_size != BYTES as i64 {
            return Err(wrong("the FIFO has another size"));
        }
        let map = Map::new(file.as_fd())?;
        match map.layout().magic.0.load(Ordering::Acquire) {
            MAGIC => Ok(Reader::on(map)),
            _ => Err(wrong("the FIFO has another format")),
        }
    }

    /// Takes the oldest of this kind out, if it is in front: its bytes are in `into` then. Returns
    /// its tag and the line at which it began.
    ///
    /// # Errors
    /// As [`front`](Reader::front).
    pub(super) fn pop(
        &mut self,
        kind: Kind,
        into: &mut Vec<u8>,
    ) -> Result<Option<(Tag, u64)>, Broken> {
        self.take(kind, |map, begin, len| {
            into.clear();
            into.reserve(len);
            // SAFETY: the packet ends before the end of the ring, and the buffer has room for it. A
            // writer that lies may change the bytes meanwhile: what was copied is what is looked
            // at.
            unsafe {
                std::ptr::copy_nonoverlapping(map.body(begin), into.as_mut_ptr(), len);
                into.set_len(len);
            };
        })
    }
}

impl<R: Ring> Reader<R> {
    /// The end of an empty FIFO.
    fn on(ring: R) -> Reader<R> {
        Reader { ring, at: 0, told: 0, refusals: 0 }
    }

    /// Whether [`pop`](Reader::pop) would return something.
    pub(super) fn holds_packets(&self) -> bool {
        self.ring.line(self.at).stamp.load(Ordering::Acquire) != 0
    }

    /// What is oldest in it.
    ///
    /// # Errors
    /// When there is something else in its place. The FIFO is of no use after that.
    pub(super) fn front(&mut self) -> Result<Option<Kind>, Broken> {
        let Some(mut len) = self.len_at(self.at)? else {
            return Ok(None);
        };
        if len == TO_START {
            // A marker on the first line would send the reader round for ever.
            let to_end = R::LINES - self.at % R::LINES;
            self.at += if to_end == R::LINES { return Err(Broken) } else { to_end };
            len = self.len_at(self.at)?.ok_or(Broken)?;
        }
        Ok(Some(if len & MESSAGE == 0 { Kind::Packet } else { Kind::Message }))
    }

    /// Takes the oldest of this kind out, if it is in front. `copy` gets the line at which it
    /// begins, and its length, which ends before the end of the ring.
    #[inline]
    fn take(
        &mut self,
        kind: Kind,
        copy: impl FnOnce(&R, u64, usize),
    ) -> Result<Option<(Tag, u64)>, Broken> {
        if self.front()? != Some(kind) {
            return Ok(None);
        }
        let begin = self.at;
        let len = (self.ring.line(begin).len.load(Ordering::Relaxed) & !MESSAGE) as usize;
        let lines = lines_of(len.min(MAX_PACKET));
        if len > MAX_PACKET || begin % R::LINES + lines > R::LINES {
            return Err(Broken);
        }
        let tag = self.ring.line(begin).tag.load(Ordering::Relaxed).to_ne_bytes();
        copy(&self.ring, begin, len);
        self.at += lines;
        let [source, dest, tos, hop_limit] = tag;
        Ok(Some((Tag { source, dest, tos, hop_limit }, begin)))
    }

    /// The message that began at this line is refused. To be said before its lines are released.
    pub(super) fn refuse(&mut self, begin: u64) {
        self.ring.refused(self.refusals).store(begin, Ordering::Relaxed);
        self.refusals = self.refusals.wrapping_add(1);
        self.ring.back().refusals.store(self.refusals, Ordering::Release);
    }

    /// Length of the packet at a line, if there is one.
    fn len_at(&self, at: u64) -> Result<Option<u32>, Broken> {
        let line = self.ring.line(at);
        match line.stamp.load(Ordering::Acquire) {
            0 => Ok(None),
            found if found == stamp(at) => Ok(Some(line.len.load(Ordering::Relaxed))),
            _ => Err(Broken),
        }
    }

    /// Gives the lines of the packets taken out back to the writer.
    pub(super) fn release(&mut self) {
        if self.told != self.at {
            self.ring.back().tail.store(self.at, Ordering::Release);
            self.told = self.at;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    fn pair() -> (Writer, Reader) {
        let (writer, file) = Writer::create().expect("memfd");
        (writer, Reader::of_other(&file).expect("a FIFO"))
    }

    fn tag(number: u64) -> Tag {
        let [source, dest, tos, hop_limit, ..] = number.to_le_bytes();
        Tag { source, dest, tos, hop_limit }
    }

    fn pop(reader: &mut Reader, into: &mut Vec<u8>) -> Result<Option<Tag>, Broken> {
        let kind = reader.front()?.unwrap_or(Kind::Packet);
        Ok(reader.pop(kind, into)?.map(|(tag, _)| tag))
    }

    /// Bytes that look like stamps of any line.
    fn packet(number: u64, len: usize) -> Vec<u8> {
        let words = (0..).flat_map(|word: u64| stamp(number + word).to_ne_bytes());
        words.take(len).collect()
    }

    /// A generator of numbers; the seed is printed when a test fails.
    fn next(state: &mut u64) -> u64 {
        *state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        *state >> 33
    }

    #[test]
    fn it_is_a_queue_over_seeds() {
        for seed in 0..200 {
            println!("seed {seed}");
            let (mut writer, mut reader) = pair();
            let (mut model, mut state, mut into) = (VecDeque::new(), seed, Vec::new());
            for number in 0..2_000 {
                let len = match next(&mut state) % 4 {
                    0 => next(&mut state) as usize % 100,
                    1 => next(&mut state) as usize % (MAX_PACKET + 1),
                    2 => MAX_PACKET,
                    _ => 32,
                };
                if next(&mut state) % 5 < 3 {
                    let must_fit = writer.room(1) == 1;
                    let pushed = writer.push(tag(number), &packet(number, len));
                    assert!(pushed || !must_fit);
                    if pushed {
                        model.push_back((number, len));
                    }
                }
                assert_eq!(writer.holds_packets() || reader.holds_packets(), !model.is_empty());
                for _ in 0..next(&mut state) % 4 {
                    let expected = model.pop_front();
                    let got = pop(&mut reader, &mut into).expect("whole");
                    assert_eq!(got, expected.map(|(number, _)| tag(number)));
                    if let Some((number, len)) = expected {
                        assert_eq!(into, packet(number, len));
                    }
                }
                if next(&mut state).is_multiple_of(3) || model.is_empty() {
                    reader.release();
                }
            }
        }
    }

    #[test]
    fn as_many_fit_as_it_promises() {
        let (mut writer, mut reader) = pair();
        let mut into = Vec::new();
        for round in 0..300 {
            let room = writer.room(1_000);
            assert!(room >= 60, "{room} in round {round}");
            for _ in 0..room {
                assert!(writer.push(tag(0), &packet(0, MAX_PACKET)));
            }
            let mut left = 0;
            while pop(&mut reader, &mut into).expect("whole").is_some() {
                left += 1;
            }
            assert_eq!(left, room);
            reader.release();
            // Elsewhere in the ring next time.
            assert!(writer.push(tag(0), &packet(0, 64 * (round % 7))));
            assert!(pop(&mut reader, &mut into).expect("whole").is_some());
            reader.release();
        }
        while writer.push(tag(0), &[]) {}
        assert_eq!(writer.room(1), 0);
        assert!(writer.holds_packets());
    }

    #[test]
    fn two_threads_pass_packets_in_order() {
        const COUNT: u64 = 200_000;
        let (mut writer, mut reader) = pair();
        let sender = std::thread::spawn(move || {
            for number in 0..COUNT {
                let bytes = packet(number, number as usize % 300);
                while !writer.push(tag(number), &bytes) {
                    std::thread::yield_now();
                }
            }
        });
        let (mut number, mut into) = (0, Vec::new());
        while number < COUNT {
            match pop(&mut reader, &mut into).expect("whole") {
                Some(got) => {
                    assert_eq!(got, tag(number));
                    assert_eq!(into, packet(number, number as usize % 300));
                    number += 1;
                    reader.release();
                }
                None => std::thread::yield_now(),
            }
        }
        sender.join().expect("no panic");
    }

    #[test]
    fn a_writer_that_lies_breaks_its_own_fifo() {
        let mut into = Vec::new();
        let (mut writer, mut reader) = pair();
        assert!(writer.push(tag(1), b"packet"));
        for len in [MAX_PACKET as u32 + 1, u32::MAX - 1, TO_START] {
            writer.ring.line(0).len.store(len, Ordering::Relaxed);
            assert_eq!(pop(&mut reader, &mut into), Err(Broken), "{len}");
        }
        let (writer, mut reader) = pair();
        writer.ring.line(0).stamp.store(stamp(1), Ordering::Relaxed);
        assert_eq!(pop(&mut reader, &mut into), Err(Broken), "the stamp of another line");
        // A packet that would go on behind the end of the ring.
        let (mut writer, mut reader) = pair();
        while writer.head < LINES as u64 - 1 {
            assert!(writer.push(tag(1), &[7; 20]));
            assert!(pop(&mut reader, &mut into).expect("whole").is_some());
            reader.release();
        }
        assert!(writer.push(tag(1), &[7; 20]));
        writer.ring.line(LINES as u64 - 1).len.store(64, Ordering::Relaxed);
        assert_eq!(pop(&mut reader, &mut into), Err(Broken));
    }

    #[test]
    fn a_reader_that_lies_frees_nothing() {
        let (mut writer, reader) = pair();
        while writer.push(tag(1), &[1; 4000]) {}
        let (head, tail) = (writer.head, &reader.ring.layout().back.0.tail);
        for lie in [head + 1, u64::MAX, 1 << 63] {
            tail.store(lie, Ordering::Relaxed);
            assert!(!writer.push(tag(1), &[1; 4000]), "{lie}");
            assert_eq!((writer.room(1), writer.progress()), (0, 0));
        }
        tail.store(head, Ordering::Relaxed);
        assert_eq!(writer.progress(), head);
        // Back again: no progress.
        tail.store(1, Ordering::Relaxed);
        assert_eq!(writer.progress(), head);
    }

    #[test]
    fn messages_and_packets_keep_their_order_and_refusals_name_their_lines() {
        for seed in 0..100 {
            println!("seed {seed}");
            let (mut writer, mut reader) = pair();
            let (mut state, mut into) = (seed, Vec::new());
            let (mut model, mut refused, mut told) = (VecDeque::new(), VecDeque::new(), 0);
            for number in 0..3_000 {
                let len = next(&mut state) as usize % 300;
                let bytes = packet(number, len);
                if next(&mut state).is_multiple_of(2) {
                    // SAFETY: as many bytes as there is room for.
                    let put = |to: *mut u8| unsafe { to.copy_from(bytes.as_ptr(), len) };
                    let begin = writer.push_message(tag(number), len, put);
                    model.extend(begin.map(|begin| (number, len, Some(begin))));
                } else if writer.push(tag(number), &bytes) {
                    model.push_back((number, len, None));
                }
                for _ in 0..next(&mut state) % 3 {
                    let Some((number, len, begin)) = model.pop_front() else { break };
                    let (kind, other) = match begin {
                        Some(_) => (Kind::Message, Kind::Packet),
                        None => (Kind::Packet, Kind::Message),
                    };
                    assert_eq!(reader.pop(other, &mut into), Ok(None));
                    let got = reader.pop(kind, &mut into).expect("whole").expect("in front");
                    assert_eq!((got.0, &into), (tag(number), &packet(number, len)));
                    if let Some(begin) = begin {
                        assert_eq!(got.1, begin);
                        if next(&mut state).is_multiple_of(3) {
                            reader.refuse(begin);
                            refused.push_back(begin);
                        }
                    }
                    reader.release();
                }
                if next(&mut state).is_multiple_of(4) {
                    writer.progress();
                    writer.take_refusals(|begin| {
                        assert_eq!(refused.pop_front(), Some(begin));
                        told += 1;
                    });
                    assert!(refused.is_empty());
                }
            }
            assert!(told > 100, "{told}");
        }
    }

    #[test]
    fn a_reader_that_lies_about_refusals_names_at_most_as_many_as_there_are_lines() {
        let (mut writer, reader) = pair();
        for lie in [u64::MAX, 1 << 63, 5] {
            reader.ring.layout().back.0.refusals.store(lie, Ordering::Relaxed);
            let mut named = 0;
            writer.take_refusals(|_| named += 1);
            assert!(named <= LINES as u64, "{named}");
        }
    }

    #[test]
    fn files_that_are_no_fifos_are_refused() {
        let make = || {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            memfd_create("other", flags).expect("memfd")
        };
        let refused = |file: &OwnedFd| Reader::of_other(file).is_err();
        let file = make();
        ftruncate(&file, BYTES as u64).expect("its own file");
        assert!(refused(&file), "not sealed");
        fcntl_add_seals(&file, SEALS).expect("sealing is allowed");
        assert!(refused(&file), "without a format");
        let file = make();
        fcntl_add_seals(&file, SEALS).expect("sealing is allowed");
        assert!(refused(&file), "empty");
    }
}

/// Interleavings with up to three preemptions and the reorderings that loom models, on a ring of
/// four lines; and faults that it has to find.
#[cfg(test)]
mod model {
    use std::sync::Arc;

    use loom::thread;

    use super::super::words::model::{
        Exact, Fault, LoadsRelaxed, Modelled32, Modelled64, StoresRelaxed, check,
    };
    use super::*;

    const TAG: Tag = Tag { source: 1, dest: 2, tos: 3, hop_limit: 4 };

    impl<F> Default for Line<Modelled32<F>> {
        fn default() -> Self {
            Line {
                stamp: Default::default(),
                len: Default::default(),
                tag: Default::default(),
                rest: Default::default(),
            }
        }
    }

    struct Memory<F> {
        lines: [Line<Modelled32<F>>; 4],
        back: Back<Modelled64<F>>,
        refused: [Modelled64<F>; 4],
    }

    impl<F: Fault> Ring for Arc<Memory<F>> {
        type U32 = Modelled32<F>;
        type U64 = Modelled64<F>;

        const LINES: u64 = 4;
        const CLEARED_TOGETHER: u64 = 2;

        fn line(&self, at: u64) -> &Line<Modelled32<F>> {
            &self.lines[(at % 4) as usize]
        }

        fn back(&self) -> &Back<Modelled64<F>> {
            &self.back
        }

        fn refused(&self, at: u64) -> &Modelled64<F> {
            &self.refused[(at % 4) as usize]
        }

        fn fetch_to_write(&self, _: u64) {}
    }

    type Ends<F> = (Writer<Arc<Memory<F>>>, Reader<Arc<Memory<F>>>);

    fn pair<F: Fault>() -> Ends<F> {
        let back = Back { tail: Modelled64::default(), refusals: Modelled64::default() };
        let (lines, refused) = Default::default();
        let memory = Arc::new(Memory { lines, back, refused });
        (Writer::on(Arc::clone(&memory)), Reader::on(memory))
    }

    /// Where a seeded fault is.
    #[derive(Clone, Copy, PartialEq)]
    enum Seeded {
        Nothing,
        StampBeforeBody,
        ReleaseBeforeCopy,
        OldStamps,
    }

    /// The last word of a packet of so many lines.
    fn last_word<F: Fault>(ring: &Arc<Memory<F>>, begin: u64, lines: u64) -> &Modelled32<F> {
        &ring.line(begin + lines - 1).rest[0]
    }

    /// Packets of these numbers of lines pass, whole and in order.
    fn packets_pass<F: Fault>(lines: &'static [u64], seeded: Seeded) {
        let len = |lines: u64| lines as usize * LINE - PREFIX;
        check(move || {
            let (mut writer, mut reader) = pair::<F>();
            let sender = thread::spawn(move || {
                for (number, &lines) in (1..).zip(lines) {
                    if seeded == Seeded::OldStamps {
                        writer.cleared = u64::MAX;
                    }
                    let put = |ring: &Arc<Memory<F>>, begin| {
                        if seeded != Seeded::StampBeforeBody {
                            last_word(ring, begin, lines).store(number, Ordering::Relaxed);
                        }
                    };
                    let begin = loop {
                        match writer.append(TAG, len(lines), 0, put) {
                            Some(begin) => break begin,
                            None => thread::yield_now(),
                        }
                    };
                    if seeded == Seeded::StampBeforeBody {
                        last_word(&writer.ring, begin, lines).store(number, Ordering::Relaxed);
                    }
                }
            });
            for (number, &lines) in (1..).zip(lines) {
                while reader.front().expect("whole").is_none() {
                    thread::yield_now();
                }
                if seeded == Seeded::ReleaseBeforeCopy {
                    reader.ring.back().tail.store(reader.at + lines, Ordering::Release);
                }
                let taken = reader.take(Kind::Packet, |ring, begin, found| {
                    assert_eq!(found, len(lines), "another packet");
                    let word = last_word(ring, begin, lines).load(Ordering::Relaxed);
                    assert_eq!(word, number, "bytes of another packet");
                });
                assert_eq!(taken.expect("whole").map(|(tag, _)| tag), Some(TAG), "no packet");
                reader.release();
            }
            sender.join().expect("no panic");
            assert_eq!(reader.front(), Ok(None));
        });
    }

    /// More than the ring holds.
    const SHORT: &[u64] = &[1, 1, 1, 1, 1];
    /// The last one does not fit before the end of the ring.
    const LONG: &[u64] = &[1, 2, 2];

    #[test]
    fn packets_arrive_whole_and_in_order() {
        packets_pass::<Exact>(SHORT, Seeded::Nothing);
    }

    #[test]
    fn packets_go_on_at_the_beginning_of_the_ring() {
        packets_pass::<Exact>(LONG, Seeded::Nothing);
    }

    #[test]
    #[should_panic(expected = "bytes of another packet")]
    fn seeded_the_stamp_is_stored_before_the_body() {
        packets_pass::<Exact>(SHORT, Seeded::StampBeforeBody);
    }

    #[test]
    #[should_panic(expected = "no packet")]
    fn seeded_lines_are_given_back_before_they_are_copied() {
        packets_pass::<Exact>(SHORT, Seeded::ReleaseBeforeCopy);
    }

    #[test]
    #[should_panic(expected = "whole: Broken")]
    fn seeded_old_stamps_are_not_cleared() {
        packets_pass::<Exact>(SHORT, Seeded::OldStamps);
    }

    #[test]
    #[should_panic(expected = "whole: Broken")]
    fn seeded_the_stamp_is_not_released() {
        packets_pass::<StoresRelaxed>(SHORT, Seeded::Nothing);
    }

    #[test]
    #[should_panic(expected = "whole: Broken")]
    fn seeded_the_stamp_is_not_acquired() {
        packets_pass::<LoadsRelaxed>(SHORT, Seeded::Nothing);
    }

    /// A message is refused: who sees that its lines were given back sees the refusal.
    fn refusals_are_seen<F: Fault>(refuses_first: bool) {
        check(move || {
            let (mut writer, mut reader) = pair::<F>();
            let begin = writer.append(TAG, 0, MESSAGE, |_, _| ()).expect("room");
            let judge = thread::spawn(move || {
                let (_, begin) =
                    reader.take(Kind::Message, |_, _, _| ()).expect("whole").expect("there");
                if refuses_first {
                    reader.refuse(begin);
                }
                reader.release();
                if !refuses_first {
                    reader.refuse(begin);
                }
            });
            if writer.progress() > begin {
                let mut refused = None;
                writer.take_refusals(|begin| refused = Some(begin));
                assert_eq!(refused, Some(begin), "a refused message counts as taken");
            }
            judge.join().expect("no panic");
        });
    }

    #[test]
    fn a_ack_is_known_when_the_lines_are_back() {
        refusals_are_seen::<Exact>(true);
    }

    #[test]
    #[should_panic(expected = "counts as taken")]
    fn seeded_the_refusal_comes_after_the_lines() {
        refusals_are_seen::<Exact>(false);
    }

    #[test]
    #[should_panic(expected = "counts as taken")]
    fn seeded_the_ack_is_not_released() {
        refusals_are_seen::<StoresRelaxed>(true);
    }

    #[test]
    #[should_panic(expected = "counts as taken")]
    fn seeded_the_ack_is_not_acquired() {
        refusals_are_seen::<LoadsRelaxed>(true);
    }
}
