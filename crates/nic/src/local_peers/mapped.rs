//! The pool of another process, mapped here: requests on it are plain copies, without system calls
//! and without looking up pages, and atomics. A process whose registered memory is not in one piece
//! has a file with many pieces, of which [`Windows`] maps those that are used.
//!
//! A process names the file of its pool on its segment. Who wants to map it takes a copy of the
//! descriptor from that process (`pidfd_getfd`), which the kernel permits to those whom it permits
//! to access the process's memory, and to nobody else. So a mapping gives no right that
//! [`copy`](super::copy) by the kernel would not have. It is made for reading, and a second one for
//! writing when the peer's descriptors permit the first WRITE or atomic.
//!
//! The file and its name come from another process, which may lie. What holds nevertheless: every
//! access lies within the mapping; and the file is a memfd that cannot shrink, so no access raises
//! a signal. Files of reserved huge pages are not mapped: their owner could give their pages away.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering, fence};

use roce::direct::{RegionDescriptor, landing_order};
use roce::endpoint::Placement;
use roce::world::AtomicOp;
use rustix::fs::{SealFlags, fcntl_get_seals, fstat, fstatfs};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::segment::PoolCard;
use crate::clock::page_bytes;

/// `HUGETLBFS_MAGIC` of linux/magic.h.
const HUGETLBFS: i64 = 0x9584_58f6;

/// See the module's text.
pub(super) struct Mapping {
    start: NonNull<u8>,
    len: usize,
    /// Where the first byte is in the other process.
    base: u64,
}

// SAFETY: the mapping lives as long as this, on any thread; its bytes are only copied, or changed
// as atomics.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// A piece of a file, and where its owner has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// The first byte of the owner's memory.
    base: u64,
    /// Where that is in the file.
    offset: u64,
    len: u64,
}

impl Piece {
    /// The whole pool.
    pub(super) fn whole(descriptor: &PoolCard) -> Option<Piece> {
        Some(Piece { base: descriptor.base?, offset: 0, len: descriptor.len })
    }

    /// The pages of a region whose first byte is at `offset` in the file.
    pub(super) fn of_region(region: &RegionDescriptor, offset: u64) -> Option<Piece> {
        let before = region.backing % page_bytes();
        let len = region.len.checked_add(before)?.checked_next_multiple_of(page_bytes())?;
        Some(Piece { base: region.backing - before, offset: offset.checked_sub(before)?, len })
    }
}

impl Mapping {
    /// Maps a piece of the file of a process.
    ///
    /// # Errors
    /// When the kernel refuses, or the file is not what it has to be. `EPERM`: this process may not
    /// access the other's memory.
    pub(super) fn open(
        pid: i32,
        descriptor: &PoolCard,
        piece: Piece,
        access: ProtFlags,
    ) -> io::Result<Mapping> {
        let pid =
            Pid::from_raw(pid).filter(|_| descriptor.fd >= 0).ok_or(io::ErrorKind::NotFound)?;
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        let file = pidfd_getfd(&process, descriptor.fd, PidfdGetfdFlags::empty())?;
        Mapping::of_file(&file, descriptor, piece, access)
    }

    fn of_file(
        file: &OwnedFd,
        descriptor: &PoolCard,
        piece: Piece,
        access: ProtFlags,
    ) -> io::Result<Mapping> {
        let wrong = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        let found = fstat(file)?;
        if (found.st_dev, found.st_ino) != descriptor.file {
            return Err(wrong("the pool's descriptor is another file's"));
        }
        if !fcntl_get_seals(file)?.contains(SealFlags::SHRINK) {
            return Err(wrong("the pool can shrink"));
        }
        if fstatfs(file)?.f_type == HUGETLBFS {
            return Err(wrong("the pool has reserved huge pages"));
        }
        let Piece { base, offset, len } = piece;
        let size = u64::try_from(found.st_size).unwrap_or(0).min(descriptor.len);
        let fits = offset.checked_add(len).is_some_and(|end| end <= size);
        let ends = base.checked_add(len).is_some();
        let len = usize::try_from(len).ok().filter(|&len| len > 0 && fits && ends);
        let len = len.ok_or_else(|| wrong("the pool has another size"))?;
        if !(base | offset).is_multiple_of(page_bytes()) {
            return Err(wrong("the pool does not begin with a page"));
        }
        // SAFETY: a new mapping, of a file that cannot shrink.
        let start = unsafe {
            mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, file.as_fd(), offset)?
        };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let mapping = Mapping { start, len, base };
        // SAFETY: the mapping just made. A forked child has no use for it, as for a segment.
        unsafe { madvise(start.as_ptr().cast(), len, Advice::LinuxDontFork)? };
        Ok(mapping)
    }

    /// Where `len` bytes at `first` of the other process are here.
    fn place(&self, first: u64, len: u64) -> Option<NonNull<u8>> {
        let offset = first.checked_sub(self.base)?;
        let size = self.len as u64;
        let is_inside = offset <= size && len <= size - offset;
        // SAFETY: the offset is at most the length of the mapping.
        is_inside.then(|| unsafe { self.start.add(offset as usize) })
    }

    /// Copies the bytes of `pieces`, which are `len` together, to `first` of the other process: in
    /// ascending order, the last cache line after all others and in it the last word, or byte,
    /// after all others. Returns false, and copies nothing, if they do not belong to its pool. The
    /// mapping must be for writing.
    pub(super) fn write(&self, first: u64, len: u32, pieces: &[Placement]) -> bool {
        let Some(to) = self.place(first, len.into()) else { return false };
        let mut from = Cursor { pieces, skipped: 0 };
        let mut to = to.as_ptr();
        for (_, bytes) in landing_order(to as u64, len.into()) {
            fence(Ordering::Release);
            let bytes = bytes as usize;
            // SAFETY: the parts are `len` bytes together, which `place` has found inside the
            // mapping.
            to = unsafe {
                let end = to.add(bytes);
                match is_word(end, bytes) {
                    true => from.copy_with_last_word(to, bytes),
                    false => from.copy_with_last_byte(to, bytes),
                }
                end
            };
        }
        true
    }

    /// Copies `len` bytes at `first` of the other process to `pieces`. Returns false, and copies
    /// nothing, if they do not belong to its pool.
    pub(super) fn read(&self, first: u64, len: u32, pieces: &[Placement]) -> bool {
        let Some(from) = self.place(first, len.into()) else { return false };
        spread(from.as_ptr(), pieces);
        true
    }

    /// Executes an atomic on the aligned word at `first` of the other process, and places its
    /// original value in `pieces`. Returns false, and does nothing, if the word does not belong to
    /// its pool. The mapping must be for writing.
    pub(super) fn atomic(&self, first: u64, op: AtomicOp, pieces: &[Placement]) -> bool {
        let Some(at) = self.place(first, 8).filter(|at| at.cast::<u64>().is_aligned()) else {
            return false;
        };
        // SAFETY: eight aligned bytes of the mapping. Others change them as atomics; if they do
        // not, any value is still valid.
        let original = op.execute(unsafe { AtomicU64::from_ptr(at.cast().as_ptr()) });
        spread(original.to_ne_bytes().as_ptr(), pieces);
        true
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is its own, and nothing refers to it any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Most pieces of one process that are mapped at a time.
const MAX_WINDOWS: usize = 256;

/// Most bytes of them together: a part of the address space, whatever a local peer publishes.
const MAX_WINDOW_BYTES: u64 = 1 << 42;

/// Requests on pieces that are not mapped until one of these takes the place of another, in a full
/// table. To map and unmap for each request is slower than to let the kernel copy.
const MISSES: u32 = 64;

/// A piece that a request needed.
struct Window {
    piece: Piece,
    access: ProtFlags,
    /// `None` where it cannot be mapped: that is not tried again.
    mapping: Option<Mapping>,
}

/// The mapped pieces of one process's file, the latest used first.
#[derive(Default)]
pub(super) struct Windows {
    windows: Vec<Window>,
    bytes: u64,
    misses: u32,
}

impl Windows {
    /// The mapping of a piece, which `open` makes if there is none with this access.
    pub(super) fn get(
        &mut self,
        piece: Piece,
        access: ProtFlags,
        open: impl FnOnce() -> Option<Mapping>,
    ) -> Option<&Mapping> {
        let wanted = |window: &Window| window.piece == piece && window.access.contains(access);
        match self.windows.iter().position(wanted) {
            Some(0) => {}
            Some(at) => self.windows[..=at].rotate_right(1),
            None if self.makes_room(piece.len) => {
                self.bytes += piece.len;
                self.windows.insert(0, Window { piece, access, mapping: open() });
            }
            None => return None,
        }
        self.windows.first()?.mapping.as_ref()
    }

    /// Whether there is room for one more piece, or is now.
    fn makes_room(&mut self, len: u64) -> bool {
        if len > MAX_WINDOW_BYTES {
            return false;
        }
        let has_room = |windows: &Windows| {
            windows.windows.len() < MAX_WINDOWS && windows.bytes <= MAX_WINDOW_BYTES - len
        };
        if has_room(self) {
            return true;
        }
        self.misses += 1;
        if !self.misses.is_multiple_of(MISSES) {
            return false;
        }
        while !has_room(self)
            && let Some(last) = self.windows.pop()
        {
            self.bytes -= last.piece.len;
        }
        true
    }
}

/// Whether the last eight of `bytes` bytes before `end` are an aligned word.
fn is_word(end: *mut u8, bytes: usize) -> bool {
    bytes >= 8 && (end as usize).is_multiple_of(8)
}

/// Copies bytes to pieces, as many as these have.
fn spread(from: *const u8, pieces: &[Placement]) {
    let mut done = 0;
    for piece in pieces {
        let len = piece.len as usize;
        // SAFETY: the pieces lie in registered memory of this process, which is writable: the
        // endpoint has checked its rights. The caller has as many bytes.
        unsafe { std::ptr::copy(from.add(done), piece.addr as *mut u8, len) };
        done += len;
    }
}

/// The bytes of some pieces, one after the other.
struct Cursor<'a> {
    pieces: &'a [Placement],
    /// Bytes of the first that are used.
    skipped: u32,
}

impl Cursor<'_> {
    /// Copies the next bytes, as far as there are any.
    ///
    /// # Safety
    /// `bytes` bytes at `to` must be valid for writes.
    unsafe fn copy(&mut self, mut to: *mut u8, mut bytes: usize) {
        while bytes > 0
            && let Some((piece, rest)) = self.pieces.split_first()
        {
            let left = (piece.len - self.skipped) as usize;
            let len = left.min(bytes);
            let from = (piece.addr + u64::from(self.skipped)) as *const u8;
            // SAFETY: the piece lies in registered memory of this process, which is readable; the
            // endpoint has checked its rights. The caller has as many bytes at `to`.
            unsafe { std::ptr::copy(from, to, len) };
            // SAFETY: at most one past the bytes at `to`.
            to = unsafe { to.add(len) };
            bytes -= len;
            self.skipped += len as u32;
            if len == left {
                (self.pieces, self.skipped) = (rest, 0);
            }
        }
    }

    /// The same; the last eight bytes land together, after all others.
    ///
    /// # Safety
    /// As [`copy`](Cursor::copy), with an aligned word at the end.
    unsafe fn copy_with_last_word(&mut self, to: *mut u8, bytes: usize) {
        let mut word = [0; 8];
        // SAFETY: as the caller promises.
        unsafe {
            self.copy(to, bytes - 8);
            self.copy(word.as_mut_ptr(), 8);
            let place = AtomicU64::from_ptr(to.add(bytes - 8).cast());
            place.store(u64::from_ne_bytes(word), Ordering::Release);
        }
    }

    /// The same; the last byte lands after all others.
    ///
    /// # Safety
    /// As [`copy`](Cursor::copy), with at least one byte.
    unsafe fn copy_with_last_byte(&mut self, to: *mut u8, bytes: usize) {
        let mut byte = 0;
        // SAFETY: as the caller promises.
        unsafe {
            self.copy(to, bytes - 1);
            self.copy(&mut byte, 1);
            AtomicU8::from_ptr(to.add(bytes - 1)).store(byte, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use rand_pcg::Pcg64;
    use rand_pcg::rand_core::{Rng, SeedableRng};
    use roce::verbs::{Access, PdId};
    use roce::world::{Memory, Staging};
    use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};

    use super::*;
    use crate::pool::Pool;

    const BYTES: u64 = 1 << 16;

    fn descriptor_of(file: &impl AsFd, base: u64, len: u64) -> PoolCard {
        use std::os::fd::AsRawFd;
        let found = fstat(file).expect("a file");
        let fd = file.as_fd().as_raw_fd();
        PoolCard { fd, file: (found.st_dev, found.st_ino), base: Some(base), len }
    }

    /// A pool of base pages, and its descriptor. Reserved huge pages are never mapped.
    fn pool() -> (Pool, PoolCard) {
        let pool = Pool::on_demand(BYTES).expect("a small pool");
        let descriptor = descriptor_of(&pool.fd(), pool.base(), pool.len());
        (pool, descriptor)
    }

    fn map(descriptor: &PoolCard, access: ProtFlags) -> io::Result<Mapping> {
        let piece = Piece::whole(descriptor).expect("one piece");
        Mapping::open(std::process::id() as i32, descriptor, piece, access)
    }

    const BOTH: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

    #[test]
    fn pools_that_lie_are_not_mapped() {
        let (pool, descriptor) = pool();
        assert!(map(&descriptor, BOTH).is_ok());
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let shrinks = memfd_create("lie", flags).expect("memfd");
        ftruncate(&shrinks, BYTES).expect("its own file");
        fcntl_add_seals(&shrinks, SealFlags::GROW).expect("sealing is allowed");
        let null = std::fs::File::open("/dev/null").expect("it exists");
        let pipe = io::pipe().expect("a pipe").0;
        let (device, inode) = descriptor.file;
        let lies = [
            PoolCard { fd: -1, ..descriptor },
            PoolCard { fd: 1_000_000, ..descriptor },
            PoolCard { file: (device, inode + 1), ..descriptor },
            PoolCard { file: (device + 1, inode), ..descriptor },
            PoolCard { len: descriptor.len + 1, ..descriptor },
            PoolCard { len: u64::MAX, ..descriptor },
            PoolCard { len: 0, ..descriptor },
            PoolCard { base: descriptor.base.map(|base| base + 1), ..descriptor },
            PoolCard { base: Some(u64::MAX - 4095), ..descriptor },
            descriptor_of(&shrinks, 0, BYTES),
            descriptor_of(&null, 0, BYTES),
            descriptor_of(&pipe, 0, BYTES),
        ];
        for lie in lies {
            assert!(map(&lie, BOTH).is_err(), "{lie:?}");
        }
        assert!(
            Mapping::open(0, &descriptor, Piece::whole(&descriptor).expect("one piece"), BOTH)
                .is_err()
        );
        drop(pool);
    }

    /// A region of a file that lies about its place reaches no byte but those of the file.
    #[test]
    fn pieces_that_lie_are_not_mapped_and_honest_ones_once() {
        let (pool, descriptor) = pool();
        let descriptor = PoolCard { base: None, ..descriptor };
        let access = Access { remote_write: true, local_write: true, ..Access::default() };
        let region = |backing, len| RegionDescriptor {
            rkey: 7,
            pd: PdId(1),
            addr: backing,
            len,
            backing,
            in_file: None,
            access,
        };
        let pid = std::process::id() as i32;
        let open = |piece| Mapping::open(pid, &descriptor, piece, BOTH);
        let lies = [
            (0x7000_0010, 100, 0x20),
            (0x7000_0010, 100, 0x0f),
            (0x7000_0000, BYTES + 1, 0),
            (0x7000_0000, 1, BYTES),
            (0x7000_0000, 1, u64::MAX - 4095),
            (u64::MAX - 4095, 4095, 0),
            (0x7000_0000, u64::MAX - 100, 0),
        ];
        for (backing, len, offset) in lies {
            let piece = Piece::of_region(&region(backing, len), offset);
            assert!(piece.is_none_or(|piece| open(piece).is_err()), "{backing:#x} {len} {offset}");
        }
        assert_eq!(Piece::whole(&descriptor), None);

        let mut windows = Windows::default();
        let mut opened = 0;
        let mut map = |page: u64, access| {
            let piece = Piece::of_region(&region(0x7000_0010, 100), page * 4096 + 0x10);
            let piece = piece.expect("an honest region");
            let mapping = windows.get(piece, access, || {
                opened += 1;
                Mapping::open(pid, &descriptor, piece, access).ok()
            });
            mapping.is_some_and(|mapping| mapping.read(0x7000_0010, 100, &[]))
        };
        assert!(map(1, ProtFlags::READ) && map(2, BOTH) && map(1, ProtFlags::READ));
        assert!(map(2, ProtFlags::READ), "what can be written can be read");
        assert!(!map(BYTES / 4096, BOTH) && !map(BYTES / 4096, BOTH), "it is tried once");
        assert_eq!(opened, 3);

        // Far more pieces than places, in turn: a part of them is mapped, and the others are left
        // to the kernel.
        let (mut windows, mut opened) = (Windows::default(), 0);
        for round in 0..10 * MAX_WINDOWS as u64 {
            let at = round % (2 * MAX_WINDOWS as u64);
            let piece = Piece { base: at << 12, offset: 0, len: 4096 };
            let _ = windows.get(piece, BOTH, || {
                opened += 1;
                open(piece).ok()
            });
            assert!(windows.windows.len() <= MAX_WINDOWS);
            assert_eq!(windows.bytes, 4096 * windows.windows.len() as u64);
        }
        assert!((MAX_WINDOWS..2 * MAX_WINDOWS).contains(&opened), "{opened}");
        for len in [MAX_WINDOW_BYTES, MAX_WINDOW_BYTES + 4096, 1 << 62] {
            let piece = Piece { base: 0, offset: 0, len };
            for _ in 0..2 * MISSES {
                let _ = windows.get(piece, BOTH, || None);
            }
            assert!(windows.bytes <= MAX_WINDOW_BYTES, "{len}");
        }
        drop(pool);
    }

    /// Random requests on random pieces: those inside do what they should, those that are not
    /// change nothing.
    #[test]
    fn requests_stay_inside_and_bytes_arrive() {
        for seed in 0..20 {
            let mut draw = Pcg64::seed_from_u64(seed);
            let (pool, descriptor) = pool();
            let [readable, writable] = [ProtFlags::READ, BOTH]
                .map(|access| map(&descriptor, access).expect("an honest pool"));
            let mut model = vec![0_u8; BYTES as usize];
            for round in 0..200 {
                let len = 1 + draw.next_u32() % if round % 10 == 0 { 60_000 } else { 200 };
                let at = u64::from(draw.next_u32()) % (BYTES + 300);
                let mut local = vec![0_u8; len as usize];
                local.fill_with(|| draw.next_u32() as u8);
                let cut = draw.next_u32() % len;
                let base = local.as_mut_ptr().expose_provenance() as u64;
                let halves = [(base, cut), (base + u64::from(cut), len - cut)];
                let pieces = halves.map(|(addr, len)| Placement { addr, len });
                let first = pool.base().wrapping_sub(150).wrapping_add(at);
                let is_inside =
                    first >= pool.base() && first - pool.base() + u64::from(len) <= BYTES;
                if draw.next_u32().is_multiple_of(2) {
                    assert_eq!(writable.write(first, len, &pieces), is_inside, "seed {seed}");
                    if is_inside {
                        let from = (first - pool.base()) as usize;
                        model[from..from + len as usize].copy_from_slice(&local);
                    }
                } else {
                    let before = local.clone();
                    assert_eq!(readable.read(first, len, &pieces), is_inside, "seed {seed}");
                    let from = first.wrapping_sub(pool.base()) as usize;
                    let expected =
                        if is_inside { &model[from..from + len as usize] } else { &before[..] };
                    assert!(local == expected, "seed {seed}");
                }
            }
            assert!(pool.bytes(pool.base(), BYTES as usize) == model, "seed {seed}");
        }
    }

    /// Those by packet are executed by the pool's owner, those of local peers through a mapping.
    #[test]
    fn atomics_of_both_paths_are_atomic_together() {
        const ADDS: u64 = 200_000;
        let (mut pool, descriptor) = pool();
        let mapping = map(&descriptor, BOTH).expect("an honest pool");
        let word = pool.base() + 64;
        let mut original = 0_u64;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let addr = (&raw mut original).expose_provenance() as u64;
                let place = [Placement { addr, len: 8 }];
                let add = AtomicOp::FetchAdd(1);
                assert!((0..ADDS).all(|_| mapping.atomic(word, add, &place)));
            });
            (0..ADDS).for_each(|_| {
                pool.atomic(word, AtomicOp::FetchAdd(1 << 32));
            });
        });
        assert_eq!(pool.bytes(word, 8), (ADDS << 32 | ADDS).to_ne_bytes());
        assert_eq!(original & 0xffff_ffff, ADDS - 1);
        let place = [Placement { addr: (&raw mut original).expose_provenance() as u64, len: 8 }];
        let add = AtomicOp::FetchAdd(1);
        for outside in
            [word + 4, pool.base() - 8, pool.base() + BYTES, pool.base() + BYTES - 4, u64::MAX]
        {
            assert!(!mapping.atomic(outside, add, &place), "{outside:#x}");
        }
    }

    /// A program that polls the last word, or byte, sees all others then.
    #[test]
    fn the_end_of_a_write_lands_last() {
        let (pool, descriptor) = pool();
        let mapping = map(&descriptor, BOTH).expect("an honest pool");
        let seen = map(&descriptor, ProtFlags::READ).expect("an honest pool");
        for len in [8_u32, 9, 64, 100, 128, 1000, 4096] {
            for round in 1..=100_u8 {
                let bytes = vec![round; len as usize];
                let addr = bytes.as_ptr().expose_provenance() as u64;
                std::thread::scope(|scope| {
                    let reader = scope.spawn(|| {
                        let last = seen.place(pool.base() + u64::from(len) - 1, 1).expect("inside");
                        // SAFETY: inside the mapping.
                        let last = unsafe { AtomicU8::from_ptr(last.as_ptr()) };
                        while last.load(Ordering::Acquire) != round {
                            std::thread::yield_now();
                        }
                        pool.bytes(pool.base(), len as usize).iter().all(|byte| *byte == round)
                    });
                    assert!(mapping.write(pool.base(), len, &[Placement { addr, len }]));
                    assert!(reader.join().expect("no panic"), "{len} bytes, round {round}");
                });
            }
        }
    }
}
