//! Reads of real files, direct and buffered, compared with what was written.

use std::os::fd::AsFd;
use std::path::PathBuf;

use nic::pool::{Pool, PoolRange};
use nic::waiter::Waiter;
use roce::Duration;
use roce::world::Staging;
use rustix::fs::OFlags;

use super::*;
use crate::root::{IoChoice, Root};
use crate::scratch::Scratch;

const FILE_BYTES: usize = 1_000_003;

fn pattern(offset: usize) -> u8 {
    (offset ^ (offset >> 8).wrapping_mul(31) ^ (offset >> 16)) as u8
}

fn pattern_file(scratch: &Scratch) -> PathBuf {
    let bytes: Vec<u8> = (0..FILE_BYTES).map(pattern).collect();
    std::fs::write(scratch.path().join("data"), bytes).expect("write");
    scratch.path().to_owned()
}

fn memory_of(pool: &Pool) -> DiskMemory {
    // SAFETY: the region is mapped for as long as it lives; the tests look at a destination only
    // after its read completes.
    unsafe { DiskMemory::new(pool.base(), pool.len(), pool.region()) }
}

/// A pool, a ring on it, and the pattern file open in it.
struct Bench {
    pool: Pool,
    disk: UringDisk,
    file: FileId,
    mode: IoMode,
    _scratch: Scratch,
}

fn bench(choice: IoChoice, depth: u32) -> Bench {
    let scratch = Scratch::new("disk");
    let root = Root::new(pattern_file(&scratch)).expect("root");
    let opened = root.open("data", choice).expect("open");
    let pool = Pool::new(8 << 20).expect("pool");
    let mut disk = UringDisk::new(memory_of(&pool), depth).expect("ring");
    let mode = opened.mode;
    let file = disk.add_file(opened.fd, mode).expect("add");
    Bench { pool, disk, file, mode, _scratch: scratch }
}

fn read(bench: &Bench, offset: u64, range: PoolRange, tag: u64) -> DiskRead {
    DiskRead { file: bench.file, offset, len: range.len as u32, addr: range.addr, tag }
}

/// Polls, sleeping on the ring's descriptor between.
fn wait_for(disk: &mut UringDisk, count: usize) -> Vec<DiskDone> {
    let waiter = Waiter::new().expect("eventfd");
    let mut done = Vec::new();
    while done.len() < count {
        match disk.poll() {
            Some(one) => done.push(one),
            None => {
                let woken = waiter.wait(&[disk.fd()], Some(Duration::from_millis(10_000)));
                assert_eq!(woken.expect("poll").ready, 1, "{} of {count} reads", done.len());
            }
        }
    }
    done
}

fn one(bench: &mut Bench, offset: u64, range: PoolRange) -> Result<u32, DiskFault> {
    let request = read(bench, offset, range, 1);
    bench.disk.submit(request).expect("room");
    wait_for(&mut bench.disk, 1)[0].result
}

fn assert_pattern(bench: &Bench, offset: u64, range: PoolRange, bytes: u32) {
    let got = bench.pool.bytes(range.addr, bytes as usize);
    let wrong = (0..bytes as usize).find(|i| got[*i] != pattern(offset as usize + i));
    assert_eq!(wrong, None, "first wrong byte of the read at {offset}");
}

#[test]
fn many_reads_in_any_order_bring_the_right_bytes() {
    for choice in [IoChoice::Auto, IoChoice::Buffered] {
        let mut bench = bench(choice, 16);
        let len = 64 << 10;
        let blocks = FILE_BYTES.div_ceil(len);
        let ranges: Vec<PoolRange> =
            (0..blocks).map(|_| bench.pool.alloc(len as u64, 4096).expect("room")).collect();
        for (i, range) in ranges.iter().enumerate() {
            let request = read(&bench, (i * len) as u64, *range, i as u64);
            bench.disk.submit(request).expect("room for all blocks");
        }
        for DiskDone { tag, result } in wait_for(&mut bench.disk, blocks) {
            let offset = tag as usize * len;
            let expected = len.min(FILE_BYTES - offset) as u32;
            assert_eq!(result, Ok(expected), "{choice:?}, block {tag}");
            assert_pattern(&bench, offset as u64, ranges[tag as usize], expected);
        }
        let counters = *bench.disk.counters();
        assert_eq!((counters.reads, counters.bytes), (blocks as u64, FILE_BYTES as u64));
        let calls = (FILE_BYTES as u64).div_ceil(FLUSH_BYTES);
        assert_eq!((counters.syscalls, bench.disk.in_flight()), (calls, 0), "four reads in a call");
    }
}

#[test]
fn reads_at_and_beyond_the_end_are_short() {
    for choice in [IoChoice::Auto, IoChoice::Buffered] {
        let mut bench = bench(choice, 4);
        let range = bench.pool.alloc(8192, 4096).expect("room");
        let last = FILE_BYTES as u64 / 4096 * 4096;
        let tail = FILE_BYTES as u64 - last;
        assert_eq!(one(&mut bench, last, range), Ok(tail as u32));
        assert_pattern(&bench, last, range, tail as u32);
        assert_eq!(one(&mut bench, last + 4096, range), Ok(0));
        assert_eq!(one(&mut bench, 1 << 40, range), Ok(0));
    }
}

#[test]
fn buffered_reads_need_no_alignment() {
    let mut bench = bench(IoChoice::Buffered, 4);
    let range = bench.pool.alloc(777, 1).expect("room");
    assert_eq!(one(&mut bench, 12_345, range), Ok(777));
    assert_pattern(&bench, 12_345, range, 777);
}

#[test]
fn impossible_reads_are_answered_with_a_fault() {
    let mut bench = bench(IoChoice::Auto, 4);
    let range = bench.pool.alloc(8192, 4096).expect("room");
    let good = read(&bench, 0, range, 9);
    let beyond = bench.pool.base() + bench.pool.len() - 4096;
    let mut bad = vec![
        (DiskRead { file: FileId(99), ..good }, libc::EBADF),
        (DiskRead { addr: 0, ..good }, libc::EFAULT),
        (DiskRead { addr: beyond, ..good }, libc::EFAULT),
        (DiskRead { addr: u64::MAX - 4095, ..good }, libc::EFAULT),
        (DiskRead { offset: u64::MAX - 4095, ..good }, libc::EINVAL),
        (DiskRead { offset: 1 << 63, ..good }, libc::EINVAL),
    ];
    if bench.mode == IoMode::Direct {
        bad.push((DiskRead { offset: 512, ..good }, libc::EINVAL));
        bad.push((DiskRead { len: 100, ..good }, libc::EINVAL));
        bad.push((DiskRead { addr: good.addr + 8, len: 4096, ..good }, libc::EINVAL));
    }
    for (request, errno) in &bad {
        bench.disk.submit(*request).expect("room");
        let done = bench.disk.poll().expect("answered at once");
        assert_eq!(done, DiskDone { tag: 9, result: Err(DiskFault::Io(*errno)) }, "{request:?}");
    }
    assert_eq!(bench.disk.counters().refused, bad.len() as u64);
    assert_eq!(one(&mut bench, 0, range), Ok(8192), "the disk still works");
}

#[test]
fn a_full_disk_gives_the_read_back() {
    let mut bench = bench(IoChoice::Buffered, 2);
    let range = bench.pool.alloc(4096, 4096).expect("room");
    let refused = DiskRead { file: FileId(7), ..read(&bench, 0, range, 0) };
    let good = read(&bench, 0, range, 1);
    bench.disk.submit(good).expect("first");
    bench.disk.submit(refused).expect("second");
    assert_eq!(bench.disk.submit(good), Err(good), "faults waiting to be seen count too");
    assert_eq!(wait_for(&mut bench.disk, 2).len(), 2);
    assert_eq!(bench.disk.submit(good), Ok(()));
    wait_for(&mut bench.disk, 1);
}

#[test]
fn a_file_with_reads_under_way_stays_open() {
    let mut bench = bench(IoChoice::Auto, 2);
    let range = bench.pool.alloc(4096, 4096).expect("room");
    let request = read(&bench, 0, range, 1);
    bench.disk.submit(request).expect("room");
    let busy = bench.disk.remove_file(bench.file);
    assert!(matches!(busy, Err(DiskError::Busy { reads: 1, .. })));
    wait_for(&mut bench.disk, 1);
    bench.disk.remove_file(bench.file).expect("idle");
    assert!(matches!(bench.disk.remove_file(bench.file), Err(DiskError::NoFile(_))));
    assert_eq!(one(&mut bench, 0, range), Err(DiskFault::Io(libc::EBADF)));
}

#[test]
fn a_pipe_is_read_until_it_ends() {
    let mut bench = bench(IoChoice::Buffered, 2);
    let (reader, writer) = rustix::pipe::pipe().expect("pipe");
    bench.file = bench.disk.add_file(reader, IoMode::Buffered).expect("add");
    let range = bench.pool.alloc(100, 1).expect("room");
    rustix::io::write(&writer, b"half").expect("write");
    let request = DiskRead { offset: 0, ..read(&bench, 0, range, 5) };
    bench.disk.submit(request).expect("room");
    assert_eq!(bench.disk.poll(), None);
    while bench.disk.counters().short_reads == 0 {
        assert_eq!(bench.disk.poll(), None, "four of a hundred bytes are no answer");
    }
    rustix::io::write(&writer, b" and half").expect("write");
    drop(writer);
    assert_eq!(wait_for(&mut bench.disk, 1), [DiskDone { tag: 5, result: Ok(13) }]);
    assert_eq!(bench.pool.bytes(range.addr, 13), b"half and half");
}

#[test]
fn the_pool_may_be_dropped_before_the_disk() {
    let mut bench = bench(IoChoice::Auto, 8);
    for tag in 0..8 {
        let range = bench.pool.alloc(64 << 10, 4096).expect("room");
        let request = read(&bench, tag * (64 << 10), range, tag);
        bench.disk.submit(request).expect("room");
    }
    bench.disk.flush();
    let Bench { pool, mut disk, .. } = bench;
    drop(pool);
    assert!(wait_for(&mut disk, 8).iter().all(|done| done.result == Ok(64 << 10)));
}

#[test]
fn dropping_a_disk_waits_for_its_reads() {
    let mut bench = bench(IoChoice::Auto, 8);
    let range = bench.pool.alloc(512 << 10, 4096).expect("room");
    let request = read(&bench, 0, range, 1);
    bench.disk.submit(request).expect("room");
    bench.disk.flush();
    let Bench { pool, disk, .. } = bench;
    drop(disk);
    let got = pool.bytes(range.addr, 512 << 10);
    assert!(got.iter().enumerate().all(|(i, byte)| *byte == pattern(i)));
}

#[test]
fn rings_of_impossible_depth_are_refused() {
    let pool = Pool::new(4096).expect("pool");
    assert!(matches!(UringDisk::new(memory_of(&pool), 0), Err(DiskError::BadDepth(0))));
    assert!(matches!(UringDisk::new(memory_of(&pool), 4097), Err(DiskError::BadDepth(4097))));
}

#[test]
fn an_idle_ring_is_not_readable() {
    let bench = bench(IoChoice::Auto, 4);
    let waiter = Waiter::new().expect("eventfd");
    let woken = waiter.wait(&[bench.disk.fd().as_fd()], Some(Duration::ZERO));
    assert_eq!(woken.expect("poll").ready, 0);
}

fn file_of(mode: IoMode, size: u64) -> File {
    let fd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).expect("fd");
    File { fd, mode, size, stamp: None, reads: 1 }
}

fn active(len: u32) -> Active {
    let read = DiskRead { file: FileId(0), offset: 4096, len, addr: 0, tag: 0 };
    Active { read, done: 0, retries: 0 }
}

#[test]
fn short_answers_are_continued_until_the_file_ends() {
    let file = file_of(IoMode::Direct, 1 << 20);
    let mut read = active(65_536);
    assert_eq!(step(&mut read, Some(&file), 8192), Step::Continue);
    assert_eq!(step(&mut read, Some(&file), 4096), Step::Continue);
    assert_eq!(read.done, 12_288);
    assert_eq!(step(&mut read, Some(&file), 53_248), Step::Over(Ok(65_536)));
    let file = file_of(IoMode::Direct, 4096 + 10_000);
    assert_eq!(step(&mut active(65_536), Some(&file), 10_000), Step::Over(Ok(10_000)));
    let cut = file_of(IoMode::Direct, 1 << 20);
    assert_eq!(step(&mut active(65_536), Some(&cut), 10_000), Step::Over(Ok(10_000)));
    assert_eq!(step(&mut active(65_536), Some(&cut), 0), Step::Over(Ok(0)));
}

#[test]
fn interruptions_are_repeated_but_not_for_ever() {
    let file = file_of(IoMode::Buffered, 1 << 20);
    let mut read = active(4096);
    for _ in 0..MAX_RETRIES {
        assert_eq!(step(&mut read, Some(&file), -libc::EINTR), Step::Again);
    }
    let over = Step::Over(Err(DiskFault::Io(libc::EINTR)));
    assert_eq!(step(&mut read, Some(&file), -libc::EINTR), over);
    let over = Step::Over(Err(DiskFault::Io(libc::EIO)));
    assert_eq!(step(&mut active(4096), Some(&file), -libc::EIO), over);
}

/// What describes a dataset comes from the page cache, not from the device each time.
#[test]
fn only_a_disk_reads_past_the_page_cache() {
    let scratch = Scratch::new("past-cache");
    let root = Root::new(pattern_file(&scratch)).expect("root");
    let pool = Pool::new(1 << 20).expect("pool");
    let mut disk = UringDisk::new(memory_of(&pool), 1).expect("ring");
    let is_direct =
        |fd: &OwnedFd| rustix::fs::fcntl_getfl(fd).expect("flags").contains(OFlags::DIRECT);
    let opened = root.open("data", IoChoice::Auto).expect("open");
    let mode = opened.mode;
    assert!(!is_direct(&opened.fd));
    let file = disk.add_open(opened).expect("add");
    let fd = disk.remove_file(file).expect("idle");
    assert_eq!(is_direct(&fd), mode == IoMode::Direct);
}

#[test]
fn changes_of_an_open_file_are_noticed() {
    let scratch = Scratch::new("changes");
    let folder = pattern_file(&scratch);
    let data = folder.join("data");
    let root = Root::new(&folder).expect("root");
    let pool = Pool::new(1 << 20).expect("pool");
    let mut disk = UringDisk::new(memory_of(&pool), 1).expect("ring");
    let tick = || std::thread::sleep(std::time::Duration::from_millis(20));
    let mut after = |change: &dyn Fn()| {
        // The resolution of times of files, at worst.
        tick();
        let opened = root.open("data", IoChoice::Auto).expect("open");
        let file = disk.add_open(opened).expect("add");
        assert_eq!(disk.change(file), None);
        change();
        disk.change(file)
    };
    let len = FILE_BYTES as u64;
    let open = || std::fs::File::options().write(true).open(&data).expect("open");
    let read = || drop(std::fs::read(&data).expect("read"));
    assert_eq!(after(&read), None);
    let overwrite = || {
        let file = open();
        let modified = file.metadata().and_then(|found| found.modified()).expect("a time");
        std::os::unix::fs::FileExt::write_all_at(&file, b"x", 0).expect("write");
        file.set_modified(modified).expect("ours");
    };
    assert_eq!(after(&overwrite), Some(Change::Written { len }));
    assert_eq!(after(&|| open().set_len(9).expect("cut")), Some(Change::Written { len: 9 }));
    let replace = || {
        std::fs::write(folder.join("new"), "other").expect("write");
        std::fs::rename(folder.join("new"), &data).expect("rename");
    };
    assert_eq!(after(&replace), Some(Change::Removed));
    assert_eq!(after(&|| std::fs::remove_file(&data).expect("remove")), Some(Change::Removed));
}

/// Reads of a file system that hangs each keep a thread of the kernel: others need some, too.
#[test]
fn every_read_may_wait_on_a_thread_of_its_own() {
    let bench = bench(IoChoice::Buffered, 100);
    let mut limits = [0, 0];
    match bench.disk.ring.submitter().register_iowq_max_workers(&mut limits) {
        Ok(()) => assert_eq!(limits[0], 100, "of processes with {limits:?}"),
        Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{error}"),
    }
}
