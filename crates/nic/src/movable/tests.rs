//! Memory as the program and its local peers see it, through `malloc`, `fork`, `madvise` and other
//! threads. The file is mapped here a second time in place of a local peer.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::*;
use crate::skip;

const PAGE: usize = 4096;

/// The file, or nothing where the kernel or a sandbox has no userfaultfd.
fn opened(test: &str) -> Option<Movable> {
    match Movable::new() {
        Ok(movable) => Some(movable),
        Err(NotMoved::System {
            call: call @ ("userfaultfd" | "UFFDIO_API" | "UFFDIO_REGISTER"),
            source,
        }) => {
            skip::note(test, &format!("{call}: {source}"));
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Anonymous memory whose pages differ.
fn filled(len: usize) -> Mapping {
    let mapping = Mapping::anonymous(len).expect("memory");
    bytes(&mapping).iter_mut().enumerate().for_each(|(at, byte)| *byte = pattern(at));
    mapping
}

fn pattern(at: usize) -> u8 {
    (at / PAGE * 31 + at) as u8
}

#[expect(clippy::mut_from_ref, reason = "each test uses its mappings from one thread at a time")]
fn bytes(mapping: &Mapping) -> &mut [u8] {
    // SAFETY: the mapping lives as long as the slice.
    unsafe { std::slice::from_raw_parts_mut(mapping.at.cast(), mapping.len) }
}

fn addr(mapping: &Mapping) -> u64 {
    mapping.pages().first
}

/// What a local peer sees.
fn seen(movable: &Movable, offset: u64, len: usize) -> Mapping {
    Mapping::of_file(&movable.file, offset, len).expect("the file")
}

/// Pages that the file has.
fn pages_of(movable: &Movable) -> u64 {
    fstat(&*movable.file).expect("its own file").st_blocks as u64 * 512 / PAGE as u64
}

#[test]
fn memory_in_the_file_is_the_programs_and_its_neighbours() {
    let Some(mut movable) = opened("memory_in_the_file_is_the_programs_and_its_neighbours") else {
        return;
    };
    let memory = filled(10 * PAGE);
    let offset = movable.enter(addr(&memory) + 100, 9 * PAGE as u64).expect("it moves");
    assert_eq!((offset % PAGE as u64, pages_of(&movable)), (100, 10));
    let neighbour = seen(&movable, offset - 100, 10 * PAGE);
    assert!((0..10 * PAGE).all(|at| bytes(&memory)[at] == pattern(at)));
    assert_eq!(bytes(&memory), bytes(&neighbour));
    bytes(&neighbour)[5 * PAGE] = 1;
    bytes(&memory)[6 * PAGE] = 2;
    assert_eq!((bytes(&memory)[5 * PAGE], bytes(&neighbour)[6 * PAGE]), (1, 2));

    movable.leave(addr(&memory) + 100, 9 * PAGE as u64, true);
    assert_eq!((pages_of(&movable), movable.ranges()), (0, (0, 0)));
    assert_eq!((bytes(&memory)[5 * PAGE], bytes(&memory)[6 * PAGE]), (1, 2));
    bytes(&neighbour)[5 * PAGE] = 3;
    assert_eq!(bytes(&memory)[5 * PAGE], 1, "the memory is the program's alone again");
}

#[test]
fn threads_that_write_meanwhile_lose_nothing() {
    let Some(mut movable) = opened("threads_that_write_meanwhile_lose_nothing") else { return };
    let memory = filled(64 * PAGE);
    bytes(&memory).fill(0);
    let stops = AtomicBool::new(false);
    let word = |page: usize| {
        // SAFETY: an aligned word of the mapping, used as an atomic only until the threads have
        // ended.
        unsafe { AtomicU64::from_ptr(memory.at.cast::<u8>().add(page * PAGE).cast()) }
    };
    let words: Vec<&AtomicU64> = (0..64).map(word).collect();
    let added: Vec<u64> = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..2)
            .map(|writer| {
                let (words, stops) = (&words, &stops);
                scope.spawn(move || {
                    let mut added = 0;
                    while !stops.load(Ordering::Relaxed) {
                        // Without a locked instruction, as programs write: each word has one
                        // writer.
                        for word in words.iter().skip(writer).step_by(2) {
                            word.store(word.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                        }
                        added += 1;
                    }
                    added
                })
            })
            .collect();
        let moved = (0..200).try_for_each(|_| {
            movable.enter(memory.pages().first, memory.len as u64)?;
            std::thread::yield_now();
            movable.leave(memory.pages().first, memory.len as u64, true);
            Ok::<(), NotMoved>(())
        });
        stops.store(true, Ordering::Relaxed);
        moved.expect("it moves");
        writers.into_iter().map(|writer| writer.join().expect("no panic")).collect()
    });
    assert!(added.iter().all(|added| *added > 100), "{added:?}");
    for (page, word) in words.iter().enumerate() {
        assert_eq!(word.load(Ordering::Relaxed), added[page % 2], "page {page}");
    }
    assert_eq!(pages_of(&movable), 0);
}

#[test]
fn pages_stay_until_their_last_use_ends() {
    let Some(mut movable) = opened("pages_stay_until_their_last_use_ends") else { return };
    let memory = filled(8 * PAGE);
    let at = addr(&memory);
    let offset = movable.enter(at, 4 * PAGE as u64).expect("it moves");
    assert_eq!(movable.enter(at + 5000, 10).expect("it is there"), offset + 5000);
    assert!(matches!(movable.enter(at + 3 * PAGE as u64, 5000), Err(NotMoved::Overlap)));
    movable.leave(at + 3 * PAGE as u64, 5000, false);
    let other = movable.enter(at + 4 * PAGE as u64, 10).expect("pages of its own");
    assert!(other.abs_diff(offset) >= SPACING);
    movable.leave(at, 4 * PAGE as u64, true);
    assert_eq!(movable.ranges(), (2, 5 * PAGE as u64));
    movable.leave(at + 5000, 10, true);
    movable.leave(at + 4 * PAGE as u64, 10, true);
    assert_eq!(movable.ranges(), (0, 0));
    assert!((0..8 * PAGE).all(|at| bytes(&memory)[at] == pattern(at)));
}

#[test]
fn other_memory_stays_where_it_is() {
    let Some(mut movable) = opened("other_memory_stays_where_it_is") else { return };
    let mut refuse = |addr: u64, len: usize| {
        let why = movable.enter(addr, len as u64).expect_err("it must not move");
        movable.leave(addr, len as u64, false);
        why
    };
    let memory = filled(8 * PAGE);
    let at = addr(&memory);
    let protect = |page: usize, access| {
        // SAFETY: a page of the mapping, which nobody touches meanwhile.
        unsafe { libc::mprotect(memory.at.byte_add(page * PAGE), PAGE, access) }
    };
    assert_eq!(protect(4, libc::PROT_READ), 0);
    let middle = at + 4 * PAGE as u64;
    assert!(matches!(refuse(middle, 10), NotMoved::Kind), "read-only");
    assert!(matches!(refuse(middle - 1, 2), NotMoved::Kind), "two mappings");
    let empty = memfd_create("empty", MemfdFlags::CLOEXEC).expect("memfd");
    ftruncate(&empty, PAGE as u64).expect("its own file");
    let file = Mapping::of_file(&empty, 0, PAGE).expect("the file");
    assert!(matches!(refuse(addr(&file), 10), NotMoved::Kind), "a file");
    for (addr, len) in [(0, 10), (4096, 10), (at, 0), (u64::MAX - 10, 100), (1 << 63, 8)] {
        assert!(matches!(refuse(addr, len), NotMoved::Kind), "{addr:#x}, {len} bytes");
    }
    static CLEAR: AtomicU64 = AtomicU64::new(0);
    let clear = CLEAR.as_ptr().expose_provenance() as u64;
    assert!(matches!(refuse(clear, 8), NotMoved::Kind), "a static variable");
    let local = [0_u8; 100];
    let on_stack = |local: &[u8; 100]| local.as_ptr().expose_provenance() as u64;
    // A test runs on a thread of its own.
    assert!(matches!(refuse(on_stack(&local), 100), NotMoved::Heap), "a stack");
    // SAFETY: at the end of the heap of the first thread.
    let heap = unsafe { libc::sbrk(0) } as u64 - 100;
    assert!(matches!(refuse(heap, 10), NotMoved::Heap), "the heap");
    // Small blocks of a thread that is not the first are on a heap of its own.
    let block = Box::new([0_u8; 100]);
    assert!(matches!(refuse(block.as_ptr().expose_provenance() as u64, 10), NotMoved::Heap));
}

/// Memory that is freed while a region still needs it: the program errs, and gets what it asked
/// for.
#[test]
fn mappings_that_took_the_place_are_left_alone() {
    let Some(mut movable) = opened("mappings_that_took_the_place_are_left_alone") else { return };
    let memory = filled(8 * PAGE);
    let at = addr(&memory);
    let map = |page: usize, pages: usize| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: over pages of the mapping.
        unsafe { libc::mmap(memory.at.byte_add(page * PAGE), pages * PAGE, access, flags, -1, 0) }
    };
    movable.enter(at, memory.len as u64).expect("it moves");
    assert_ne!(map(0, 8), libc::MAP_FAILED);
    bytes(&memory).fill(9);
    movable.leave(at, memory.len as u64, true);
    assert!(bytes(&memory).iter().all(|byte| *byte == 9));
    assert_eq!(pages_of(&movable), 0);

    movable.enter(at, memory.len as u64).expect("it moves");
    assert_ne!(map(2, 1), libc::MAP_FAILED);
    movable.leave(at, memory.len as u64, true);
    for (page, byte) in (0..8).map(|page| (page, bytes(&memory)[page * PAGE])) {
        assert_eq!(byte, if page == 2 { 0 } else { 9 }, "page {page}");
    }
}

/// What `malloc` makes of its memory meanwhile and afterwards.
#[test]
fn blocks_of_malloc_are_freed_grown_and_cleared_as_ever() {
    const BYTES: usize = 1 << 20;
    let Some(mut movable) = opened("blocks_of_malloc_are_freed_grown_and_cleared_as_ever") else {
        return;
    };
    // SAFETY: each block is used within its length until it is freed.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10);
        for frees_first in [false, true] {
            let block = libc::malloc(BYTES).cast::<u8>();
            block.write_bytes(0xee, BYTES);
            let at = block.expose_provenance() as u64;
            movable.enter(at, BYTES as u64).expect("it moves");
            if frees_first {
                libc::free(block.cast());
            }
            movable.leave(at, BYTES as u64, true);
            if !frees_first {
                libc::free(block.cast());
            }
            let cleared = libc::calloc(1, BYTES).cast::<u8>();
            assert!((0..BYTES).all(|at| cleared.add(at).read() == 0), "{frees_first}");
            libc::free(cleared.cast());
        }
        let block = libc::malloc(BYTES).cast::<u8>();
        block.write_bytes(0xee, BYTES);
        let at = block.expose_provenance() as u64;
        movable.enter(at, BYTES as u64).expect("it moves");
        let longer = libc::realloc(block.cast(), 8 * BYTES).cast::<u8>();
        assert!((0..BYTES).all(|at| longer.add(at).read() == 0xee));
        longer.add(BYTES).write_bytes(0xdd, 7 * BYTES);
        movable.leave(at, BYTES as u64, true);
        assert!(
            (0..8 * BYTES).all(|at| longer.add(at).read() == [0xee, 0xdd][at.min(BYTES) / BYTES])
        );
        libc::free(longer.cast());
    }
}

#[test]
fn advice_clears_no_pages_in_the_file() {
    let Some(mut movable) = opened("advice_clears_no_pages_in_the_file") else { return };
    let memory = filled(2 * PAGE);
    let advise = || {
        // SAFETY: pages of the mapping.
        unsafe { libc::madvise(memory.at, memory.len, libc::MADV_DONTNEED) }
    };
    movable.enter(addr(&memory), memory.len as u64).expect("it moves");
    assert_eq!(advise(), 0);
    assert_eq!(bytes(&memory)[PAGE], pattern(PAGE));
    movable.leave(addr(&memory), memory.len as u64, true);
    assert_eq!((advise(), bytes(&memory)[PAGE]), (0, 0));
}

/// Whether a forked child can read the first byte.
fn child_reads(memory: &Mapping) -> bool {
    // SAFETY: the child reads a byte, and ends without anything else.
    unsafe {
        let child = libc::fork();
        assert!(child >= 0);
        if child == 0 {
            libc::signal(libc::SIGSEGV, libc::SIG_DFL);
            let byte = memory.at.cast::<u8>().read_volatile();
            memory.at.cast::<u8>().write_volatile(byte.wrapping_add(1));
            libc::_exit(0);
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        libc::WIFEXITED(status)
    }
}

#[test]
fn a_child_has_no_pages_in_the_file_and_all_others() {
    let Some(mut movable) = opened("a_child_has_no_pages_in_the_file_and_all_others") else {
        return;
    };
    let memory = filled(PAGE);
    let before = bytes(&memory)[0];
    movable.enter(addr(&memory), PAGE as u64).expect("it moves");
    assert!(!child_reads(&memory));
    movable.leave(addr(&memory), PAGE as u64, true);
    assert!(child_reads(&memory));
    assert_eq!(bytes(&memory)[0], before);
}

/// Memory that was freed too early is something else when it is registered again, though it has the
/// same address.
#[test]
fn new_memory_at_an_old_address_is_not_taken_for_the_old() {
    let Some(mut movable) = opened("new_memory_at_an_old_address_is_not_taken_for_the_old") else {
        return;
    };
    let memory = filled(4 * PAGE);
    let (at, len) = (addr(&memory), memory.len as u64);
    movable.enter(at, len).expect("it moves");
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: in place of the mapping.
    let again = unsafe { libc::mmap(memory.at, memory.len, access, flags, -1, 0) };
    assert_eq!(again, memory.at);
    assert!(matches!(movable.enter(at, len), Err(NotMoved::Overlap)));
    movable.leave(at, len, true);
    assert!(matches!(movable.enter(at, len), Err(NotMoved::Overlap)), "one that stayed is there");
    movable.leave(at, len, false);
    movable.leave(at, len, false);
    movable.enter(at, len).expect("it moves");
    bytes(&memory)[0] = 7;
    movable.leave(at, len, true);
    assert_eq!((bytes(&memory)[0], pages_of(&movable), movable.ranges()), (7, 0, (0, 0)));
}

/// The kernel may be copying to and from memory that local peers know by its address.
#[test]
fn pages_below_a_region_that_stayed_do_not_move() {
    let Some(mut movable) = opened("pages_below_a_region_that_stayed_do_not_move") else { return };
    let memory = filled(8 * PAGE);
    let (at, page) = (addr(&memory), PAGE as u64);
    movable.enter(at, page).expect("it moves");
    assert!(matches!(movable.enter(at, 4 * page), Err(NotMoved::Overlap)));
    movable.leave(at, page, true);
    assert_eq!(movable.ranges(), (1, page), "the longer region needs it where it is");
    movable.leave(at, 4 * page, false);
    assert_eq!(movable.ranges(), (0, 0));
    movable.stay(at, 2 * page);
    assert!(matches!(movable.enter(at + page, 4 * page), Err(NotMoved::Overlap)));
    movable.leave(at + page, 4 * page, false);
    movable.leave(at, 2 * page, false);
    movable.enter(at + page, 4 * page).expect("it moves");
    movable.leave(at + page, 4 * page, true);
    assert!((0..8 * PAGE).all(|at| bytes(&memory)[at] == pattern(at)));
}

/// Locked pages, and a descriptor that the program has closed.
#[test]
fn pages_go_back_whatever_the_program_did_to_them() {
    let Some(mut movable) = opened("pages_go_back_whatever_the_program_did_to_them") else {
        return;
    };
    let memory = filled(4 * PAGE);
    let (at, len) = (addr(&memory), memory.len as u64);
    movable.enter(at, len).expect("it moves");
    // SAFETY: pages of the mapping.
    let locked = unsafe { libc::mlock(memory.at, memory.len) };
    assert_eq!(locked, 0, "{}", io::Error::last_os_error());
    // SAFETY: the number of the file, which its owner finds closed.
    assert_eq!(unsafe { libc::close(movable.file.as_raw_fd()) }, 0);
    movable.leave(at, len, true);
    assert_eq!(movable.ranges(), (0, 0));
    assert!((0..4 * PAGE).all(|at| bytes(&memory)[at] == pattern(at)));
    let mappings = mappings().expect("/proc");
    let mut here = mappings.iter().filter(|mapping| Pages::of(mapping).meets(memory.pages()));
    assert!(here.all(|mapping| mapping.inode == 0));
    assert!(matches!(movable.enter(at, len), Err(NotMoved::Closed)));
}
