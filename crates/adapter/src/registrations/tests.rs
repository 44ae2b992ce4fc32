//! The cache against a model of the address space, its races, and the other ways. The device is the
//! software endpoint: it registers any addresses, and the model knows which pages a key was made
//! for.

use std::collections::HashMap;

use libc::c_void;
use rand_pcg::Pcg64;
use rand_pcg::rand_core::{Rng, SeedableRng};
use roce::endpoint::{Endpoint, EndpointConfig};

use super::cache::Regions;
use super::*;
use crate::skip;

const PAGE: u64 = 4096;

/// An endpoint, its pool and a registrar.
struct Rig {
    device: Endpoint,
    pool: Pool,
    registrar: Registrar,
}

impl Rig {
    fn new(reach: Reach, limits: Limits) -> Rig {
        let mut device = Endpoint::new(EndpointConfig::default());
        let mut pool = Pool::on_demand(2 << 20).expect("a small pool");
        let pd = device.alloc_pd();
        let registrar = Registrar::open(&mut device, &mut pool, pd, reach, limits);
        Rig { device, pool, registrar: registrar.expect("room for the blocks") }
    }

    /// One that watches the memory of this process; none where the kernel refuses.
    fn watching(test: &str, limits: Limits) -> Option<(Rig, Arc<Watch>)> {
        match Watch::open() {
            Ok(watch) => {
                let watch = Arc::new(watch);
                Some((Rig::new(Reach::Process(Ok(Arc::clone(&watch))), limits), watch))
            }
            Err(error) => {
                skip::note(test, &error.to_string());
                None
            }
        }
    }

    fn acquire(&mut self, addr: u64, len: u64, purpose: Use) -> Result<Lease, RegistrationError> {
        // SAFETY: tests keep what they lend mapped and alone.
        unsafe { self.registrar.acquire(&mut self.device, &mut self.pool, (addr, len), purpose) }
    }

    fn release(&mut self, lease: Lease, written: u64) {
        // SAFETY: as above; nothing is posted.
        unsafe { self.registrar.release(&mut self.device, &mut self.pool, lease, written) };
    }

    /// The key of a cached buffer, or the way that was taken instead.
    fn key_of(&mut self, addr: u64, len: u64) -> Result<u32, Way> {
        let lease = self.acquire(addr, len, Use::Source).expect("it is mapped");
        let (way, lkey) = (lease.way(), lease.lkey);
        self.release(lease, 0);
        if way == Way::Cached { Ok(lkey) } else { Err(way) }
    }
}

/// Only the cache.
const NO_BLOCKS: Limits = Limits { entries: 8, bytes: 1 << 24, blocks: 0, block_bytes: 0 };

/// Addresses that belong to a test, pages of which come and go.
struct Space {
    first: u64,
    pages: u64,
}

impl Space {
    fn new(pages: u64) -> Space {
        let first = map(0, pages * PAGE, libc::PROT_NONE, 0).expect("address space");
        Space { first, pages }
    }

    fn addr(&self, page: u64) -> u64 {
        self.first + page * PAGE
    }

    /// Puts fresh pages there, or takes those there away.
    fn renew(&self, page: u64, count: u64, is_mapped: bool) {
        let access = if is_mapped { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_NONE };
        map(self.addr(page), count * PAGE, access, libc::MAP_FIXED).expect("its own addresses");
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        unmap(self.first, self.pages * PAGE);
    }
}

fn at(addr: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(addr as usize)
}

fn map(addr: u64, len: u64, access: i32, flags: i32) -> Option<u64> {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: an address of the kernel's choice, or one that belongs to the test.
    let found = unsafe { libc::mmap(at(addr), len as usize, access, flags, -1, 0) };
    (found != libc::MAP_FAILED).then(|| found.expose_provenance() as u64)
}

fn unmap(addr: u64, len: u64) {
    // SAFETY: pages of the test.
    assert_eq!(unsafe { libc::munmap(at(addr), len as usize) }, 0);
}

/// Pages of a test, which come and go, and what a cache knows about them.
struct Model {
    rig: Rig,
    space: Space,
    /// What each page holds, as a number that is new whenever the page is; `None` where nothing is
    /// mapped.
    pages: [Option<u32>; PAGES as usize],
    generation: u32,
    /// The pages at the time when a key was first seen.
    made_for: HashMap<u32, Vec<Option<u32>>>,
    lent: Vec<(Lease, u64, u64)>,
}

const PAGES: u64 = 12;

impl Model {
    fn new(rig: Rig) -> Model {
        let (space, pages) = (Space::new(PAGES), [None; PAGES as usize]);
        Model { rig, space, pages, generation: 0, made_for: HashMap::new(), lent: Vec::new() }
    }

    fn is_lent(&self, first: u64, count: u64) -> bool {
        self.lent.iter().any(|(_, from, end)| *from < first + count && first < *end)
    }

    fn is_mapped(&self, first: u64, count: u64) -> bool {
        self.pages[span(first, count)].iter().all(Option::is_some)
    }

    fn renew(&mut self, first: u64, count: u64, is_mapped: bool) {
        self.generation += 1;
        self.space.renew(first, count, is_mapped);
        self.pages[span(first, count)].fill(is_mapped.then_some(self.generation));
    }

    fn discard(&mut self, first: u64, count: u64) {
        self.generation += 1;
        let (start, len) = (at(self.space.addr(first)), (count * PAGE) as usize);
        // SAFETY: pages of the test that nobody uses.
        assert_eq!(unsafe { libc::madvise(start, len, libc::MADV_DONTNEED) }, 0);
        self.pages[span(first, count)].fill(Some(self.generation));
    }

    fn move_to(&mut self, first: u64, to: u64, count: u64) {
        self.generation += 1;
        move_pages(&self.space, first, to, count);
        self.pages[span(to, count)].fill(Some(self.generation));
        self.renew(first, count, false);
    }

    fn lend(&mut self, first: u64, count: u64, skipped: u64, purpose: Use) {
        let (addr, len) = (self.space.addr(first) + skipped, count * PAGE - 2 * skipped);
        let lease = self.rig.acquire(addr, len, purpose).expect("it is mapped");
        if lease.way() == Way::Cached {
            let pages = self.pages;
            let made_for = self.made_for.entry(lease.lkey).or_insert_with(|| pages.to_vec());
            assert_eq!(made_for[span(first, count)], pages[span(first, count)], "old pages");
        }
        self.lent.push((lease, first, first + count));
    }

    fn step(&mut self, draw: &mut Pcg64) {
        let mut below = |bound: u64| u64::from(draw.next_u32()) % bound;
        let first = below(PAGES);
        let count = 1 + below(4.min(PAGES - first));
        let (is_free, is_mapped) = (!self.is_lent(first, count), self.is_mapped(first, count));
        match below(10) {
            0 if is_free => self.renew(first, count, true),
            1 if is_free => self.renew(first, count, false),
            2 if is_free && is_mapped => self.discard(first, count),
            3 if is_free && is_mapped => {
                let to = below(PAGES - count + 1);
                let overlaps = to < first + count && first < to + count;
                if !overlaps && !self.is_lent(to, count) {
                    self.move_to(first, to, count);
                }
            }
            4 if !self.lent.is_empty() => {
                let one = below(self.lent.len() as u64) as usize;
                let (lease, ..) = self.lent.swap_remove(one);
                self.rig.release(lease, 0);
            }
            _ if is_mapped && self.lent.len() < 6 => {
                let purpose = if below(2) == 0 { Use::Source } else { Use::Sink };
                self.lend(first, count, below(100), purpose);
            }
            _ => {}
        }
    }
}

fn span(first: u64, count: u64) -> std::ops::Range<usize> {
    first as usize..(first + count) as usize
}

/// Random changes of mappings and random uses: a key is found again only while its pages are those
/// that it was made for. `DQUANT_SEED=n` replays one of them.
#[test]
fn a_key_is_found_only_for_its_own_pages() {
    let (mut hits, mut invalidated) = (0, 0);
    for seed in crate::seeds::seeds(0..25) {
        let _replay = crate::seeds::Replay { test: "registrations", seed };
        let Some((rig, _watch)) = Rig::watching("registrations model", NO_BLOCKS) else { return };
        let (mut model, mut draw) = (Model::new(rig), Pcg64::seed_from_u64(seed));
        (0..300).for_each(|_| model.step(&mut draw));
        for (lease, ..) in std::mem::take(&mut model.lent) {
            model.rig.release(lease, 0);
        }
        let counters = model.rig.registrar.counters();
        assert_eq!(counters.not_deregistered, 0);
        (hits, invalidated) = (hits + counters.hits, invalidated + counters.invalidated);
    }
    assert!(hits > 0 && invalidated > 0, "{hits} hits, {invalidated} invalidated");
}

fn move_pages(space: &Space, from: u64, to: u64, count: u64) {
    let len = (count * PAGE) as usize;
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // The kernel moves one mapping at a time: pages with different histories may be several.
    for page in 0..count {
        let (from, to) = (space.addr(from + page), space.addr(to + page));
        // SAFETY: pages of the test that nobody uses, and addresses of the test.
        let moved =
            unsafe { libc::mremap(at(from), len / count as usize, PAGE as usize, flags, at(to)) };
        assert_ne!(moved, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
    }
}

/// The case that the kernel makes hard: the address is mapped again before the event of its
/// unmapping has been read.
#[test]
fn an_address_that_is_mapped_again_at_once_is_registered_anew() {
    const ROUNDS: u32 = 400;
    let Some((mut rig, _watch)) = Rig::watching("registrations race", NO_BLOCKS) else { return };
    let len = 4 * PAGE;
    let space = Space::new(4);
    space.renew(0, 4, true);
    let addr = space.first;
    let (mut at_once, mut certain) = (0, 0);
    // More where the machine is so busy that no round was certain.
    for round in 0..ROUNDS * 20 {
        if round >= ROUNDS && certain > 0 {
            break;
        }
        let Ok(old) = rig.key_of(addr, len) else { continue };
        let unmapping = std::thread::spawn(move || unmap(addr, len));
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let mut tries = 0_u32;
        // The other thread waits in `munmap` until its event is read, and the address is free
        // before.
        while map(addr, len, access, libc::MAP_FIXED_NOREPLACE) != Some(addr) {
            tries += 1;
            assert!(tries < 100_000_000, "round {round}: never unmapped");
        }
        at_once += u32::from(!unmapping.is_finished());
        if let Ok(new) = rig.key_of(addr, len) {
            assert_ne!(new, old, "round {round}: the key of pages that are gone");
            certain += 1;
        }
        unmapping.join().expect("no panic");
    }
    assert!(certain > 0, "{at_once} of {ROUNDS}, {:?}", rig.registrar.counters());
}

/// A device during whose next registrations the pages change.
struct Renewing<'a> {
    device: Endpoint,
    space: &'a Space,
    changes: u32,
}

impl Regions for Renewing<'_> {
    fn register(
        &mut self,
        pd: PdId,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        if self.changes > 0 {
            self.changes -= 1;
            self.space.renew(0, 1, true);
        }
        Device::register(&mut self.device, pd, addr, len, access)
    }

    fn deregister(&mut self, lkey: u32) -> Result<(), VerbsError> {
        Device::deregister(&mut self.device, lkey)
    }
}

#[test]
fn pages_that_change_while_they_are_registered_are_not_cached() {
    let Some((rig, watch)) = Rig::watching("registrations renewed", NO_BLOCKS) else { return };
    let space = Space::new(1);
    space.renew(0, 1, true);
    let pd = rig.registrar.pd;
    let mut device = Renewing { device: rig.device, space: &space, changes: 2 };
    let (mut cache, mut counters) = (Cache::new(watch, &NO_BLOCKS), Counters::default());
    for _ in 0..2 {
        let made = cache.acquire(&mut device, pd, (space.first, PAGE), false, &mut counters);
        assert!(matches!(made, Err(Uncached::Uncertain)), "{made:?}");
        assert_eq!((cache.regions(), cache.bytes()), (0, 0));
    }
    let made = cache.acquire(&mut device, pd, (space.first, PAGE), false, &mut counters);
    let (place, region) = made.expect("nothing changes");
    cache.release(&mut device, place, &mut counters);
    assert_eq!((region.len, counters.misses, counters.hits), (PAGE, 3, 0));
}

#[test]
fn a_buffer_that_is_freed_and_allocated_again_is_registered_anew() {
    let Some((mut rig, _watch)) = Rig::watching("registrations malloc", NO_BLOCKS) else { return };
    // Large enough that libc maps it, and unmaps it within `free`.
    let len = 8 << 20;
    // SAFETY: freed below, and not used after that.
    let buffer = unsafe { libc::malloc(len) };
    let addr = buffer.expose_provenance() as u64;
    // SAFETY: the buffer just allocated.
    unsafe { buffer.write_bytes(1, len) };
    let old = rig.key_of(addr, len as u64).expect("malloc'ed memory can be watched");
    assert_eq!(rig.key_of(addr, len as u64), Ok(old));
    // SAFETY: allocated above, and no lease is left.
    unsafe { libc::free(buffer) };
    let first = addr / PAGE * PAGE;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    if map(first, len as u64 + PAGE, access, libc::MAP_FIXED_NOREPLACE) == Some(first) {
        assert_ne!(rig.key_of(addr, len as u64).expect("a miss"), old);
        unmap(first, len as u64 + PAGE);
    }
    let Counters { hits, invalidated, .. } = *rig.registrar.counters();
    assert_eq!((hits, invalidated), (1, 1));
}

/// libc gives the end of its heap back with a smaller break, and pages within it with
/// `MADV_DONTNEED`.
#[test]
fn a_heap_that_shrinks_takes_its_keys_along() {
    let Some((mut rig, _watch)) = Rig::watching("registrations heap", NO_BLOCKS) else { return };
    let len = 100 << 10;
    // SAFETY: freed below.
    let buffers: Vec<_> = (0..20).map(|_| unsafe { libc::malloc(len) }).collect();
    let last = buffers.iter().max().expect("some").expose_provenance() as u64;
    let old = rig.key_of(last, len as u64);
    // SAFETY: allocated above, and no lease is left.
    buffers.into_iter().for_each(|buffer| unsafe { libc::free(buffer) });
    // SAFETY: no memory is involved that anybody uses.
    unsafe { libc::malloc_trim(0) };
    rig.registrar.sweep(&mut rig.device);
    let counters = rig.registrar.counters();
    assert!(old.is_err() || counters.invalidated == 1, "{counters:?}");
}

#[test]
fn entries_are_bounded_and_those_in_use_stay() {
    let limits = Limits { entries: 3, bytes: 5 * PAGE, ..NO_BLOCKS };
    let Some((mut rig, _watch)) = Rig::watching("registrations bounds", limits) else { return };
    let space = Space::new(16);
    space.renew(0, 16, true);
    // Apart from each other, so that none contains another.
    let addr = |number: u64| space.addr(2 * number);
    let held = rig.acquire(addr(0), PAGE, Use::Sink).expect("room");
    let first = rig.key_of(addr(1), PAGE).expect("room");
    rig.key_of(addr(2), PAGE).expect("room");
    assert_eq!(rig.key_of(addr(1), PAGE), Ok(first));
    rig.key_of(addr(3), PAGE).expect("in place of the third");
    assert_eq!(rig.registrar.counters().evicted, 1);
    assert_eq!(rig.key_of(addr(1), PAGE), Ok(first), "used later than the one that went");
    // The bytes do not fit beside what is in use.
    assert_eq!(rig.key_of(addr(4), 5 * PAGE), Err(Way::Once));
    assert_eq!(rig.key_of(addr(4), 6 * PAGE), Err(Way::Once));
    let again = rig.acquire(addr(0), PAGE, Use::Sink).expect("it is in use");
    assert_eq!((again.way(), again.lkey), (Way::Cached, held.lkey));
    rig.release(again, 0);
    rig.release(held, 0);
    let Counters { uncached_full, uncached_large, once, .. } = *rig.registrar.counters();
    assert_eq!((uncached_full, uncached_large, once), (1, 1, 2));
    assert!(rig.registrar.cached().0 <= 3 && rig.registrar.cached().1 <= 5 * PAGE);
}

/// A region whose memory goes away during its use, against the contract, is deregistered when the
/// use ends.
#[test]
fn a_stale_region_in_use_is_deregistered_after_its_last_use() {
    let Some((mut rig, _watch)) = Rig::watching("registrations use", NO_BLOCKS) else { return };
    let space = Space::new(2);
    space.renew(0, 2, true);
    let lease = rig.acquire(space.first, PAGE, Use::Source).expect("room");
    space.renew(0, 2, true);
    let other = rig.key_of(space.first, PAGE).expect("room");
    assert_ne!(other, lease.lkey);
    assert_eq!(rig.registrar.cached().0, 2);
    rig.release(lease, 0);
    assert_eq!(rig.registrar.cached().0, 1);
}

#[test]
fn files_and_shared_memory_are_registered_for_each_use() {
    let Some((mut rig, watch)) = Rig::watching("registrations kinds", NO_BLOCKS) else { return };
    let pool = Pool::on_demand(1 << 16).expect("a small pool");
    assert_eq!(rig.key_of(pool.base(), PAGE), Err(Way::Once));
    assert_eq!(rig.registrar.counters().uncached_unwatched, 1);
    assert_eq!(watch.begin(pool.base(), PAGE), Err(Unwatched::Kind));
    let space = Space::new(1);
    unmap(space.first, PAGE);
    assert_eq!(watch.begin(space.first, PAGE), Err(Unwatched::NotMapped));
    space.renew(0, 1, true);
    assert_eq!(watch.begin(u64::MAX - 10, 100), Err(Unwatched::NotMapped));
    // A second watch of the same pages.
    let watched = watch.begin(space.first, PAGE).expect("private memory");
    let second = Watch::open().expect("a second one");
    assert_eq!(second.begin(space.first, PAGE), Err(Unwatched::Busy));
    assert!(watch.holds(&watched));
    watch.end(watched);
}

/// The child has other pages and no monitor: it never relies on what its parent knew, and does the
/// parent no harm.
#[test]
fn a_forked_child_finds_nothing() {
    let Some((mut rig, watch)) = Rig::watching("registrations fork", NO_BLOCKS) else { return };
    let space = Space::new(1);
    space.renew(0, 1, true);
    let old = rig.key_of(space.first, PAGE).expect("private memory");
    let watched = watch.begin(space.first, PAGE).expect("private memory");
    // SAFETY: the child calls nothing that takes a lock or allocates.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let holds = watch.holds(&watched);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(holds)) };
    }
    let mut status = 0;
    // SAFETY: a child of this process, and a number of this stack.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child relied on its parent's watch");
    assert!(watch.holds(&watched));
    watch.end(watched);
    assert_eq!(rig.key_of(space.first, PAGE), Ok(old));
}

/// Other threads allocate and free all the time.
#[test]
fn hits_go_on_while_other_threads_change_their_mappings() {
    let Some((mut rig, watch)) = Rig::watching("registrations threads", NO_BLOCKS) else { return };
    let space = Space::new(4);
    space.renew(0, 4, true);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let other = Space::new(2);
                    other.renew(0, 2, true);
                    let watched = watch.begin(other.first, PAGE).expect("private memory");
                    other.renew(0, 2, true);
                    assert!(!watch.holds(&watched), "its pages are gone");
                    watch.end(watched);
                }
            });
        }
        let mut keys = std::collections::BTreeSet::new();
        let mut found = 0;
        while found < 500 {
            if let Ok(key) = rig.key_of(space.first, 4 * PAGE) {
                keys.insert(key);
                found += 1;
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(keys.len(), 1, "nobody changed these pages");
    });
}

#[test]
fn blocks_are_copied_in_and_out_and_run_out() {
    let limits = Limits { blocks: 2, block_bytes: 8192, ..Limits::default() };
    let mut rig = Rig::new(Reach::Pool, limits);
    let mut buffer = vec![5_u8; 6000];
    let addr = buffer.as_mut_ptr().expose_provenance() as u64;
    let source = rig.acquire(addr, 6000, Use::Source).expect("a block");
    assert_eq!((source.way(), source.rkey), (Way::Bounced, 0));
    assert_eq!(rig.pool.bytes(source.addr, 6000), [5; 6000]);
    let sink = rig.acquire(addr, 6000, Use::Sink).expect("a block");
    let none = rig.acquire(addr, 10, Use::Source);
    assert!(matches!(none, Err(RegistrationError::NoBlock { blocks: 2, .. })), "{none:?}");
    rig.pool.bytes_mut(sink.addr, 6000).fill(8);
    rig.release(sink, 100);
    assert!(buffer[..100] == [8; 100] && buffer[100..] == [5; 5900], "only what was written");
    rig.release(source, 0);
    assert!(buffer[..100] == [8; 100], "a source is never written");
    let long = rig.acquire(addr, 8193, Use::Source);
    assert!(matches!(long, Err(RegistrationError::TooLong { .. })), "{long:?}");
    for bad in [(addr, 0), (u64::MAX - 3, 8)] {
        let refused = rig.acquire(bad.0, bad.1, Use::Source);
        assert!(matches!(refused, Err(RegistrationError::BadBuffer { .. })), "{refused:?}");
    }
    let shared = rig.acquire(addr, 64, Use::Remote(Access::REMOTE_READ)).expect("a block");
    assert_ne!((shared.way(), shared.rkey), (Way::Bounced, 0));
    rig.release(shared, 0);
    let Counters { bounced, bytes_in, bytes_out, refused, uncached_unreachable, .. } =
        *rig.registrar.counters();
    assert_eq!((bounced, bytes_in, bytes_out, refused), (3, 6064, 100, 4));
    assert_eq!(uncached_unreachable, 5);
    let free = rig.pool.free_bytes();
    let Rig { mut device, mut pool, registrar } = rig;
    registrar.close(&mut device, &mut pool).expect("nothing is in use");
    assert_eq!(pool.free_bytes(), free + 2 * 8192);
}

#[test]
fn a_buffer_in_a_region_that_is_registered_anyway_uses_its_keys() {
    let mut rig = Rig::new(Reach::Pool, Limits::default());
    let range = rig.pool.alloc(8192, 4096).expect("room");
    let pd = rig.registrar.pd;
    let region = rig.device.register(pd, range.addr, range.len, Access::LOCAL_READ);
    rig.registrar.add_region(region.expect("its own pool"), Access::LOCAL_READ);
    let inside = rig.acquire(range.addr + 100, 200, Use::Source).expect("no cost");
    assert_eq!((inside.way(), inside.addr), (Way::Pool, range.addr + 100));
    rig.release(inside, 0);
    for (addr, len, purpose) in [
        (range.addr, 8193, Use::Source),
        (range.addr - 1, 10, Use::Source),
        (range.addr, 10, Use::Sink),
    ] {
        let lease = rig.acquire(addr, len, purpose).expect("a block");
        assert_eq!(lease.way(), Way::Bounced, "{addr:#x} {len}");
        rig.release(lease, 0);
    }
    assert_eq!(rig.registrar.counters().pool, 1);
}

/// Without a watch the cache is not used at all: each use is registered, with the reason counted.
#[test]
fn without_a_watch_each_use_is_registered() {
    let refused = || WatchError::System {
        call: "userfaultfd",
        source: std::io::ErrorKind::Unsupported.into(),
    };
    let mut rig = Rig::new(Reach::Process(Err(refused())), NO_BLOCKS);
    let space = Space::new(1);
    space.renew(0, 1, true);
    for uses in 1..4 {
        assert_eq!(rig.key_of(space.first, PAGE), Err(Way::Once));
        let Counters { once, uncached_no_watch, .. } = *rig.registrar.counters();
        assert_eq!((once, uncached_no_watch), (uses, uses));
    }
    assert!(rig.registrar.why_no_cache().is_some());
    let blocks = Limits { blocks: 1, block_bytes: PAGE, ..NO_BLOCKS };
    let mut rig = Rig::new(Reach::Process(Err(refused())), blocks);
    assert_eq!(rig.key_of(space.first, PAGE), Err(Way::Bounced));
    let keys = Use::Remote(Access::REMOTE_WRITE);
    let lease = rig.acquire(space.first, PAGE, keys).expect("a block");
    assert!(lease.way() == Way::Bounced && lease.rkey != 0);
    rig.release(lease, 0);
}

#[test]
fn a_block_that_a_peer_still_reaches_goes_to_nobody_else() {
    let limits = Limits { entries: 0, bytes: 0, blocks: 1, block_bytes: 8192 };
    let mut rig = Rig::new(Reach::Pool, limits);
    let buffer = [5_u8; 64];
    let addr = buffer.as_ptr().expose_provenance() as u64;
    let keys = Use::Remote(Access::REMOTE_READ);
    let lease = rig.acquire(addr, 64, keys).expect("a block");
    let rkey = lease.rkey;
    // A device that does not know the key refuses to end it, as one with a window bound to the
    // region does.
    let known = std::mem::replace(&mut rig.device, Endpoint::new(EndpointConfig::default()));
    rig.release(lease, 0);
    assert_eq!(rig.registrar.counters().not_deregistered, 1);
    for purpose in [Use::Source, keys] {
        let refused = rig.acquire(addr, 64, purpose);
        assert!(matches!(refused, Err(RegistrationError::NoBlock { .. })), "{refused:?}");
    }
    rig.device = known;
    let next = rig.acquire(addr, 64, keys).expect("the key has ended, and the block is free");
    assert_ne!(next.rkey, rkey);
    rig.release(next, 0);
    let Rig { mut device, mut pool, registrar } = rig;
    registrar.close(&mut device, &mut pool).expect("nothing is in use");
}
