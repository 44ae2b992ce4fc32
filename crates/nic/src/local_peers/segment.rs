//! Boards: what a process publishes about its queue pairs and regions, in memory that others map
//! read-only.
//!
//! A segment is a memfd that cannot be resized, or mapped for writing by anyone after its owner has
//! done so. Its entries are changed under a sequence number (odd while a change is under way), so a
//! reader gets whole entries. Readers belong to other processes: they take nothing on a segment for
//! more than a number.
//!
//! Words beside the entries:
//! - `owner` is the number of a thread of the owner for as long as that process exists and has not
//!   executed another program: the kernel marks it then, before the memory goes away (it is a
//!   robust futex, see `guard`). It costs a reader one load, and needs no process id that may be
//!   reused;
//! - `sleeps` counts how often the owner fell asleep and woke up, so it is odd while somebody has
//!   to wake it for packets in a FIFO;
//! - `pool` names the file of the owner's registered memory, if it has one that others may map
//!   (`mapped`);
//! - `at` is the owner's port and slot, at which it is woken;
//! - `addresses` has the owner's addresses in the order of their indexes, which packets in a FIFO
//!   name;
//! - `busy` announces that the owner accesses the memory of another process. Who withdraws an entry
//!   waits until no announcement names it ([`ControlSegment::busy_with`]).

use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use roce::direct::{QpDescriptor, RegionDescriptor};
use roce::verbs::{Access, PdId, Qpn};
use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use super::words;

/// Format and version; both sides run the same layout or none.
pub(super) const FORMAT: [u8; 8] = *b"dqboard6";
const MAGIC: u64 = u64::from_le_bytes(FORMAT);

/// Queue pairs and regions that fit. What does not fit is not published, and reached by packets.
const QPS: usize = 1 << 12;
const REGIONS: usize = 1 << 14;

/// Places where the entry of a key may be.
const PROBES: usize = 8;

/// Addresses that fit. Packets from and to others do not use FIFOs.
pub(super) const ADDRESSES: usize = 64;

/// `FUTEX_OWNER_DIED` of linux/futex.h.
const OWNER_DIED: u32 = 0x4000_0000;

/// `FUTEX_TID_MASK` of linux/futex.h.
const TID_MASK: u32 = 0x3fff_ffff;

const SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE).union(SealFlags::SEAL);

/// The file of the pool is not one range of the owner's addresses.
const NO_BASE: u64 = u64::MAX;

const WORDS: usize = 7;
type Words = [u64; WORDS];
type Entry = words::Entry<AtomicU64, WORDS>;

/// On a cache line of its own.
#[repr(C, align(64))]
struct Alone<T>(T);

#[repr(C, align(64))]
struct Page {
    magic: AtomicU64,
    owner: AtomicU32,
    /// Changes with each request of the owner: readers of the other words would wait for its cache
    /// line.
    busy: Alone<AtomicU64>,
    sleeps: Alone<AtomicU64>,
    /// Descriptor, device, inode, first byte and length of the owner's pool; the length is 0
    /// without one, and stored last. The first byte is [`NO_BASE`] where regions say where they are
    /// in the file.
    pool: [AtomicU64; 5],
    /// The owner's slot above the 16 bits of its port.
    at: AtomicU64,
    /// How many addresses follow.
    known: AtomicU64,
    addresses: [[AtomicU64; 2]; ADDRESSES],
    qps: [Entry; QPS],
    regions: [Entry; REGIONS],
}

const BYTES: usize = size_of::<Page>();

/// The low half of an entry's first word; 0 in an empty one.
fn key_of(first: u64) -> u32 {
    first as u32
}

/// Places of a key in a table, in the order of preference.
fn places(table: &[Entry], key: u32) -> impl Iterator<Item = &Entry> {
    let start = (key.wrapping_mul(0x9e37_79b1) >> 8) as usize;
    (0..PROBES).filter_map(move |step| table.get((start + step) % table.len()))
}

/// The places that have this key, which is not 0.
fn holders(table: &[Entry], key: u32) -> impl Iterator<Item = &Entry> {
    places(table, key).filter(move |entry| key_of(entry.first()) == key)
}

fn put(table: &[Entry], words: &Words) -> bool {
    let key = key_of(words[0]);
    let free = || places(table, key).find(|entry| key_of(entry.first()) == 0);
    let place = holders(table, key).next().or_else(free);
    place.map(|entry| entry.write(words)).is_some()
}

/// Whether `/proc/PID/stat` is of a process that was stopped. Its name may have anything in it; the
/// state follows.
fn is_stopped(stat: &[u8]) -> bool {
    let name_end = stat.iter().rposition(|byte| *byte == b')');
    name_end.and_then(|end| stat.get(end + 2)).is_some_and(|state| matches!(state, b'T' | b't'))
}

fn remove(table: &[Entry], key: u32) {
    if key != 0 {
        holders(table, key).for_each(|entry| entry.write(&[0; WORDS]));
    }
}

fn get(table: &[Entry], key: u32) -> Option<Words> {
    let mut candidates = holders(table, key).filter(|_| key != 0);
    // Its owner may have given the place to another key since the look.
    candidates.find_map(|entry| entry.read().filter(|words| key_of(words[0]) == key))
}

/// Bits 2 and 3 belong to queue pairs.
fn bits(access: Access) -> u64 {
    let rights = [access.remote_write, access.remote_read, false, false, access.remote_atomic];
    rights.iter().zip(0..).map(|(right, at)| u64::from(*right) << at).sum()
}

fn access(bits: u64) -> Access {
    Access {
        remote_write: bits & 1 != 0,
        remote_read: bits & 2 != 0,
        remote_atomic: bits & 16 != 0,
        ..Access::default()
    }
}

fn halves(ip: IpAddr) -> [u64; 2] {
    let bits = match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().to_bits(),
        IpAddr::V6(ip) => ip.to_bits(),
    };
    [(bits >> 64) as u64, bits as u64]
}

fn ip([high, low]: [u64; 2]) -> IpAddr {
    let bits = u128::from(high) << 64 | u128::from(low);
    IpAddr::V6(Ipv6Addr::from_bits(bits)).to_canonical()
}

/// The file of a process's registered memory, as others find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PoolCard {
    /// A descriptor of the process.
    pub(super) fd: i32,
    /// Device and inode.
    pub(super) file: (u64, u64),
    /// Where the process has mapped its first byte, and all others behind it; `None` where regions
    /// say it.
    pub(super) base: Option<u64>,
    /// Length in bytes.
    pub(super) len: u64,
}

/// A segment in this process's memory. Its owner's is writable, all others are not: the methods
/// that write are on [`OwnBoard`].
pub(super) struct ControlSegment(NonNull<Page>);

// SAFETY: everything behind the pointer is atomic, and it is mapped for as long as the segment
// lives.
unsafe impl Send for ControlSegment {}
// SAFETY: as above.
unsafe impl Sync for ControlSegment {}

impl ControlSegment {
    /// Maps a segment that another process has sent.
    ///
    /// # Errors
    /// When it is not one, or its owner could still resize it, which would end this process on
    /// access.
    pub(super) fn of_other(file: &OwnedFd) -> io::Result<ControlSegment> {
        let wrong = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        if !fcntl_get_seals(file)?.contains(SEALS) {
            return Err(wrong("the segment can be resized"));
        }
        if fstat(file)?.st_size != BYTES as i64 {
            return Err(wrong("the segment has another size"));
        }
        let segment = ControlSegment::map(file.as_fd(), ProtFlags::READ)?;
        match segment.page().magic.load(Ordering::Acquire) {
            MAGIC => Ok(segment),
            _ => Err(wrong("the segment has another format")),
        }
    }

    fn map(file: BorrowedFd<'_>, access: ProtFlags) -> io::Result<ControlSegment> {
        // SAFETY: a new mapping of a file whose size cannot change; only atomics are reached
        // through it.
        let at = unsafe { mmap(std::ptr::null_mut(), BYTES, access, MapFlags::SHARED, file, 0)? };
        let segment = ControlSegment(NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?);
        // SAFETY: the mapping just made. A forked child has no use for it: its calls with the
        // parent's objects fail before they get here.
        unsafe { madvise(at, BYTES, Advice::LinuxDontFork)? };
        Ok(segment)
    }

    fn page(&self) -> &Page {
        // SAFETY: `BYTES` are mapped at the pointer, page-aligned, until the segment is dropped;
        // any bytes are valid atomics. Other processes change them only as atomics or make them
        // wrong numbers.
        unsafe { self.0.as_ref() }
    }

    /// Whether its owner still runs the program that made it.
    pub(super) fn is_owned(&self) -> bool {
        let owner = self.page().owner.load(Ordering::Acquire);
        owner != 0 && owner & OWNER_DIED == 0
    }

    /// Whether its owner lives and is not stopped, by a signal or a debugger: only then may one
    /// count on what it does.
    pub(super) fn is_running(&self) -> bool {
        let owner = self.page().owner.load(Ordering::Acquire) & TID_MASK;
        self.is_owned()
            && !std::fs::read(format!("/proc/{owner}/stat")).is_ok_and(|stat| is_stopped(&stat))
    }

    /// Whether its owner accesses the memory of the process with this slot, and since which
    /// announcement.
    pub(super) fn busy_with(&self, slot: u8) -> Option<u64> {
        words::busy_with(&self.page().busy.0, slot)
    }

    /// The owner's addresses, in the order of their indexes.
    pub(super) fn addresses(&self) -> Vec<IpAddr> {
        let page = self.page();
        let known = page.known.load(Ordering::Acquire) as usize;
        let all = page.addresses.iter().take(known);
        all.map(|halves| ip(halves.each_ref().map(|half| half.load(Ordering::Relaxed)))).collect()
    }

    /// The owner's port and slot.
    pub(super) fn at(&self) -> (u16, u8) {
        let at = self.page().at.load(Ordering::Acquire);
        (at as u16, (at >> 16) as u8)
    }

    /// The sleep of the owner, if it sleeps and may not have seen what was left for it before.
    pub(super) fn sleep(&self) -> Option<u64> {
        words::sleep(&self.page().sleeps.0)
    }

    /// The owner's pool.
    pub(super) fn pool(&self) -> Option<PoolCard> {
        let [fd, device, inode, base, len] = &self.page().pool;
        let len = len.load(Ordering::Acquire);
        let [fd, device, inode, base] =
            [fd, device, inode, base].map(|word| word.load(Ordering::Relaxed));
        let fd = i32::try_from(fd).ok().filter(|_| len > 0)?;
        let base = (base != NO_BASE).then_some(base);
        Some(PoolCard { fd, file: (device, inode), base, len })
    }

    pub(super) fn qp(&self, qpn: Qpn) -> Option<QpDescriptor> {
        let [first, second, own_high, own_low, peer_high, peer_low, _] =
            get(&self.page().qps, qpn.get())?;
        let flags = first >> 32;
        Some(QpDescriptor {
            qpn,
            dest_qp: Qpn::new(second as u32),
            pd: PdId((second >> 32) as u32),
            own: ip([own_high, own_low]),
            peer: ip([peer_high, peer_low]),
            access: access(flags),
            serves: flags & 4 != 0,
            serves_reads: flags & 8 != 0,
        })
    }

    pub(super) fn region(&self, rkey: u32) -> Option<RegionDescriptor> {
        let [first, pd, addr, len, backing, in_file, _] = get(&self.page().regions, rkey)?;
        Some(RegionDescriptor {
            rkey,
            pd: PdId(pd as u32),
            addr,
            len,
            backing,
            in_file: in_file.checked_sub(1),
            access: access(first >> 32),
        })
    }
}

impl Drop for ControlSegment {
    fn drop(&mut self) {
        // SAFETY: the mapping is this segment's own, and nothing refers to it any more.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), BYTES) };
    }
}

/// The segment of this process.
pub(super) struct OwnBoard(ControlSegment);

impl OwnBoard {
    /// A new, empty segment of the process with this port and slot, and the file to send to others.
    pub(super) fn create(at: (u16, u8), addresses: &[IpAddr]) -> io::Result<(OwnBoard, OwnedFd)> {
        let file = memfd_create("dquant-board", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, BYTES as u64)?;
        let segment = ControlSegment::map(file.as_fd(), ProtFlags::READ | ProtFlags::WRITE)?;
        fcntl_add_seals(&file, SEALS)?;
        let page = segment.page();
        for (place, address) in page.addresses.iter().zip(addresses) {
            let [high, low] = halves(*address);
            place[0].store(high, Ordering::Relaxed);
            place[1].store(low, Ordering::Relaxed);
        }
        page.at.store(u64::from(at.0) | u64::from(at.1) << 16, Ordering::Relaxed);
        page.known.store(addresses.len().min(ADDRESSES) as u64, Ordering::Release);
        page.magic.store(MAGIC, Ordering::Release);
        Ok((OwnBoard(segment), file))
    }

    /// Names the pool, once and for all.
    pub(super) fn offer_pool(&self, descriptor: &PoolCard) {
        let [fd, device, inode, base, len] = &self.0.page().pool;
        let PoolCard { fd: number, file, base: first, len: bytes } = *descriptor;
        fd.store(number as u64, Ordering::Relaxed);
        device.store(file.0, Ordering::Relaxed);
        inode.store(file.1, Ordering::Relaxed);
        base.store(first.unwrap_or(NO_BASE), Ordering::Relaxed);
        len.store(bytes, Ordering::Release);
    }

    /// Tells others to wake this process for packets. Whoever does not see it has stored its packet
    /// before, where the caller now finds it.
    pub(super) fn fall_asleep(&self) {
        words::fall_asleep(&self.0.page().sleeps.0);
    }

    /// Undoes [`fall_asleep`](OwnBoard::fall_asleep), if need be.
    pub(super) fn wake_up(&self) {
        words::wake_up(&self.0.page().sleeps.0);
    }

    /// Whether others wake this process for packets.
    pub(super) fn is_asleep(&self) -> bool {
        self.0.sleep().is_some()
    }

    /// The word that the kernel marks when the thread that holds it ends.
    pub(super) fn owner(&self) -> &AtomicU32 {
        &self.0.page().owner
    }

    /// Announces an access to the process with this slot. What is read from its segment afterwards
    /// is either still valid, or its owner waits for the end of the access.
    pub(super) fn announce(&self, slot: u8, count: u64) {
        words::announce(&self.0.page().busy.0, slot, count);
    }

    /// The access is over.
    pub(super) fn retire(&self) {
        words::retire(&self.0.page().busy.0);
    }

    /// Publishes a queue pair, or withdraws it if it serves nothing. Returns false if there is no
    /// room.
    pub(super) fn put_qp(&self, descriptor: &QpDescriptor) -> bool {
        let qpn = descriptor.qpn.get();
        if !descriptor.serves {
            self.remove_qp(descriptor.qpn);
            return true;
        }
        let flags = bits(descriptor.access) | 4 | u64::from(descriptor.serves_reads) << 3;
        let [own_high, own_low] = halves(descriptor.own);
        let [peer_high, peer_low] = halves(descriptor.peer);
        let first = u64::from(qpn) | flags << 32;
        let second = u64::from(descriptor.dest_qp.get()) | u64::from(descriptor.pd.0) << 32;
        put(&self.0.page().qps, &[first, second, own_high, own_low, peer_high, peer_low, 0])
    }

    pub(super) fn remove_qp(&self, qpn: Qpn) {
        remove(&self.0.page().qps, qpn.get());
    }

    /// Publishes a region. Returns false if there is no room.
    pub(super) fn put_region(&self, descriptor: &RegionDescriptor) -> bool {
        let first = u64::from(descriptor.rkey) | bits(descriptor.access) << 32;
        // An offset in a file is not the greatest number.
        let in_file = descriptor.in_file.map_or(0, |offset| offset.wrapping_add(1));
        let words = [
            first,
            descriptor.pd.0.into(),
            descriptor.addr,
            descriptor.len,
            descriptor.backing,
            in_file,
            0,
        ];
        put(&self.0.page().regions, &words)
    }

    pub(super) fn remove_region(&self, rkey: u32) {
        remove(&self.0.page().regions, rkey);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: (u16, u8) = (4791, 7);

    fn region(rkey: u32) -> RegionDescriptor {
        let access = Access { remote_read: true, ..Access::default() };
        let in_file = (rkey & 1 == 1).then_some(0x5000);
        RegionDescriptor {
            rkey,
            pd: PdId(3),
            addr: 0x1000,
            len: 64,
            backing: 0x2000,
            in_file,
            access,
        }
    }

    #[test]
    fn a_reader_sees_what_the_owner_publishes_until_it_is_withdrawn() {
        let (own, file) = OwnBoard::create(AT, &[]).expect("memfd");
        let other = ControlSegment::of_other(&file).expect("a segment");
        assert!(!other.is_owned());
        assert_eq!(other.at(), AT);
        assert!(own.put_region(&region(7)) && own.put_region(&region(8)));
        assert_eq!(other.region(7), Some(region(7)));
        own.remove_region(7);
        assert_eq!((other.region(7), other.region(8)), (None, Some(region(8))));
        assert_eq!(other.region(0), None);
        let [own_ip, peer_ip] = ["127.0.0.1", "fe80::1"].map(|ip| ip.parse().expect("good"));
        let descriptor = QpDescriptor {
            qpn: Qpn::new(0x10005),
            dest_qp: Qpn::new(0x20006),
            pd: PdId(9),
            own: own_ip,
            peer: peer_ip,
            access: Access { remote_write: true, ..Access::default() },
            serves: true,
            serves_reads: false,
        };
        assert!(own.put_qp(&descriptor));
        assert_eq!(other.qp(descriptor.qpn), Some(descriptor));
        assert!(own.put_qp(&QpDescriptor { serves: false, ..descriptor }));
        assert_eq!(other.qp(descriptor.qpn), None);
    }

    #[test]
    fn a_full_board_refuses_and_a_freed_place_is_used_again() {
        let (own, file) = OwnBoard::create(AT, &[]).expect("memfd");
        let other = ControlSegment::of_other(&file).expect("a segment");
        let published: Vec<u32> =
            (1..40_000).filter(|&rkey| own.put_region(&region(rkey))).collect();
        assert!(published.len() > REGIONS / 2 && published.len() <= REGIONS);
        assert!(published.iter().all(|&rkey| other.region(rkey) == Some(region(rkey))));
        published.iter().for_each(|&rkey| own.remove_region(rkey));
        assert!(published.iter().all(|&rkey| other.region(rkey).is_none()));
        assert!(published.iter().all(|&rkey| own.put_region(&region(rkey))));
    }

    #[test]
    fn files_that_are_no_boards_are_refused() {
        let file = memfd_create("other", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        let file = file.expect("memfd");
        assert!(ControlSegment::of_other(&file).is_err(), "not sealed");
        fcntl_add_seals(&file, SEALS).expect("sealing is allowed");
        assert!(ControlSegment::of_other(&file).is_err(), "empty");
        let file = memfd_create("other", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        let file = file.expect("memfd");
        ftruncate(&file, BYTES as u64).expect("its own file");
        fcntl_add_seals(&file, SEALS).expect("sealing is allowed");
        assert!(ControlSegment::of_other(&file).is_err(), "without a format");
    }

    #[test]
    fn nobody_else_can_write_a_board() {
        let (_own, file) = OwnBoard::create(AT, &[]).expect("memfd");
        assert!(ControlSegment::map(file.as_fd(), ProtFlags::READ | ProtFlags::WRITE).is_err());
        assert!(rustix::io::pwrite(&file, &[1], 0).is_err());
    }

    #[test]
    fn a_stopped_process_is_told_from_one_that_runs() {
        for (stat, stopped) in [
            (&b"7 (a b) T 1"[..], true),
            (b"7 (a) t 1", true),
            (b"7 (a) S 1", false),
            (b"7 (a) T) R 1", false),
            (b"7 (a)", false),
            (b"", false),
        ] {
            assert_eq!(is_stopped(stat), stopped, "{stat:?}");
        }
    }

    #[test]
    fn addresses_keep_their_indexes_and_each_sleep_has_a_number() {
        let addresses: Vec<IpAddr> = (0..=255).map(|last| IpAddr::from([10, 0, 0, last])).collect();
        for count in [0, 1, ADDRESSES, ADDRESSES + 1, 256] {
            let (_own, file) = OwnBoard::create(AT, &addresses[..count]).expect("memfd");
            let other = ControlSegment::of_other(&file).expect("a segment");
            assert_eq!(other.addresses(), addresses[..count.min(ADDRESSES)]);
        }
        let (own, file) = OwnBoard::create(AT, &["fe80::1".parse().expect("good")]).expect("memfd");
        let other = ControlSegment::of_other(&file).expect("a segment");
        assert_eq!(other.addresses(), own.0.addresses());
        assert_eq!(other.sleep(), None);
        own.fall_asleep();
        let first = other.sleep().expect("asleep");
        own.wake_up();
        own.wake_up();
        assert_eq!(other.sleep(), None);
        own.fall_asleep();
        assert_ne!(other.sleep(), Some(first));
    }

    #[test]
    fn announcements_name_one_process() {
        let (own, file) = OwnBoard::create(AT, &[]).expect("memfd");
        let other = ControlSegment::of_other(&file).expect("a segment");
        assert_eq!(other.busy_with(4), None);
        own.announce(4, 7);
        assert!(other.busy_with(4).is_some() && other.busy_with(5).is_none());
        own.retire();
        assert_eq!((other.busy_with(4), other.busy_with(0)), (None, None));
        own.announce(0, 8);
        assert!(other.busy_with(0).is_some() && other.busy_with(4).is_none());
    }
}
