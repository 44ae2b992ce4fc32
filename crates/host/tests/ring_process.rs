//! The ring between two processes, either of which may be killed or hostile.
//!
//! The other process is this test program, started with a role in `ROLE`; the test named
//! `other_process` is its entry and does nothing otherwise.

#![allow(clippy::unwrap_used)]

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use host::attach::{Connection, Listener};
use host::ring::{Consumer, Producer, RingConfig, RingError, RingFds, SlotIndex, SlotMeta};
use rand_pcg::Pcg64;
use rand_pcg::rand_core::{Rng as _, SeedableRng};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap};

const ROLE: &str = "DQUANT_TEST_ROLE";
const SOCKET: &str = "DQUANT_TEST_SOCKET";
const LONG: Duration = Duration::from_secs(20);

struct Rng(Pcg64);

impl Rng {
    fn new(seed: u64) -> Rng {
        Rng(Pcg64::seed_from_u64(seed))
    }

    fn next(&mut self) -> u64 {
        self.0.next_u64()
    }
}

/// The other process, killed when the test ends in any way.
struct Other(Child);

impl Other {
    fn start(role: &str, socket: &PathBuf) -> Other {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "other_process", "--nocapture"])
            .env(ROLE, role)
            .env(SOCKET, socket)
            .stdout(Stdio::null())
            .spawn();
        Other(child.unwrap())
    }

    /// kill -9.
    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn socket_path() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("dquant-ring-{}-{number}.sock", std::process::id()))
}

/// A listener whose files are removed with it.
struct Daemon {
    listener: Listener,
    path: PathBuf,
}

impl Daemon {
    fn new() -> Daemon {
        let path = socket_path();
        Daemon { listener: Listener::bind(&path).unwrap(), path }
    }

    /// Accepts the next client and passes it a ring.
    fn serve(&self, config: RingConfig) -> (Producer, Connection) {
        let client = self.listener.accept(LONG).unwrap().expect("no client came");
        assert_eq!(client.recv(64).unwrap().bytes, b"open");
        let (producer, fds) = Producer::create(config).unwrap();
        client.send(b"ring", &fds.to_pass()).unwrap();
        (producer, client)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.path.with_extension("sock.lock"));
    }
}

const CONFIG: RingConfig = RingConfig { slots: 4, slot_bytes: 8192 };

fn open(path: &PathBuf) -> (Connection, RingFds) {
    let start = Instant::now();
    let connection = loop {
        match Connection::connect(path) {
            Ok(connection) => break connection,
            // The other process may not be listening yet.
            Err(error) if start.elapsed() > LONG => panic!("{error}"),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    connection.send(b"open", &[]).unwrap();
    let (bytes, fds) = connection.recv(64).unwrap().with_fds().unwrap();
    assert_eq!(bytes, b"ring");
    (connection, RingFds::from(fds))
}

fn attach(path: &PathBuf) -> (Connection, Consumer) {
    let (connection, fds) = open(path);
    let consumer = Consumer::attach(fds, connection.liveness().unwrap()).unwrap();
    (connection, consumer)
}

fn fill(producer: &mut Producer, slot: SlotIndex, value: u64) {
    let bytes = producer.geometry().slot_bytes();
    let payload: Vec<u8> = value.to_le_bytes().into_iter().cycle().take(bytes).collect();
    producer.write(slot, 0, &payload).unwrap();
    let meta = SlotMeta {
        bytes: bytes as u64,
        first_batch: value,
        batch_count: 1,
        batch_bytes: bytes as u64,
        crc32c: None,
    };
    producer.publish(slot, meta).unwrap();
}

fn is_filled(payload: &[u8], value: u64) -> bool {
    payload.chunks(8).all(|chunk| chunk == value.to_le_bytes())
}

/// Publishes until `count` are out or the consumer is gone; `true` when all are.
fn feed(producer: &mut Producer, client: &Connection, count: u64) -> bool {
    for value in 0..count {
        let slot = loop {
            if let Some(slot) = producer.free_slot() {
                break slot;
            }
            if client.hung_up() {
                return false;
            }
            if producer.arm_credit_wakeup() {
                wait_for_credit(producer, client);
            }
        };
        fill(producer, slot, value);
        producer.doorbell_if_needed(2);
    }
    producer.finish();
    true
}

/// An engine's sleep: until a credit comes or the client ends.
fn wait_for_credit(producer: &mut Producer, client: &Connection) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
    let ready = poll(
        &mut [
            PollFd::from_borrowed_fd(producer.credit_fd(), PollFlags::IN),
            PollFd::new(client, PollFlags::RDHUP),
        ],
        Some(&limit),
    );
    producer.disarm_credit_wakeup();
    assert_ne!(ready, Ok(0), "neither credit nor hang-up");
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LONG, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Entry of the other process.
#[test]
fn other_process() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let path = PathBuf::from(std::env::var(SOCKET).unwrap());
    match role.as_str() {
        "hold" => hold(&path),
        "read" => read_all(&path),
        "produce and stall" => produce_and_stall(&path),
        "scribble" => scribble(&path),
        other => panic!("role {other}"),
    }
}

fn hold(path: &PathBuf) {
    let (connection, mut consumer) = attach(path);
    let _views = [(); 3].map(|()| consumer.next(LONG).unwrap().unwrap());
    connection.send(b"holding", &[]).unwrap();
    std::thread::sleep(Duration::from_secs(60));
}

fn read_all(path: &PathBuf) {
    let (connection, mut consumer) = attach(path);
    let mut expected = 0;
    while let Some(view) = consumer.next(LONG).unwrap() {
        let batch = view.batches().next().unwrap();
        assert_eq!(batch.number(), expected);
        assert!(is_filled(&batch, expected));
        expected += 1;
    }
    connection.send(&expected.to_le_bytes(), &[]).unwrap();
}

fn produce_and_stall(path: &PathBuf) {
    let listener = Listener::bind(path).unwrap();
    let client = listener.accept(LONG).unwrap().unwrap();
    client.recv(64).unwrap();
    let (mut producer, fds) = Producer::create(CONFIG).unwrap();
    client.send(b"ring", &fds.to_pass()).unwrap();
    for value in 0..3 {
        let slot = producer.free_slot().unwrap();
        fill(&mut producer, slot, value);
    }
    producer.doorbell_now();
    client.send(b"stalled", &[]).unwrap();
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
fn a_killed_consumer_is_noticed_and_the_next_one_served() {
    let daemon = Daemon::new();
    let mut holder = Other::start("hold", &daemon.path);
    let (mut producer, client) = daemon.serve(CONFIG);
    for value in 0..4 {
        let slot = producer.free_slot().unwrap();
        fill(&mut producer, slot, value);
    }
    producer.doorbell_now();
    assert_eq!(client.recv(64).unwrap().bytes, b"holding");
    assert_eq!(client.peer().unwrap().pid, holder.0.id() as i32);
    assert!(!client.hung_up());
    holder.kill();
    wait_until("hang-up", || client.hung_up());
    assert!(producer.free_slot().is_none(), "slots of the dead are not handed out");
    drop(producer);

    let _reader = Other::start("read", &daemon.path);
    let (mut producer, client) = daemon.serve(CONFIG);
    assert!(feed(&mut producer, &client, 500));
    assert_eq!(client.recv(64).unwrap().bytes, 500u64.to_le_bytes());
}

#[test]
fn a_consumer_may_be_killed_at_any_instant() {
    let daemon = Daemon::new();
    for seed in 0..8 {
        let mut rng = Rng::new(seed);
        let mut reader = Other::start("read", &daemon.path);
        let (mut producer, client) = daemon.serve(CONFIG);
        let delay = Duration::from_micros(rng.next() % 30_000);
        let killer = std::thread::spawn(move || {
            std::thread::sleep(delay);
            reader.kill();
        });
        let complete = feed(&mut producer, &client, u64::MAX);
        assert!(!complete, "seed {seed}");
        killer.join().unwrap();
        let counters = producer.counters();
        assert_eq!((counters.bad_release_words, counters.bad_sleep_words), (0, 0));
    }
}

#[test]
fn a_killed_producer_is_told_with_what_it_published() {
    let path = socket_path();
    let mut other = Other::start("produce and stall", &path);
    let (connection, mut consumer) = attach(&path);
    assert!(is_filled(&consumer.next(LONG).unwrap().unwrap(), 0));
    assert_eq!(connection.recv(64).unwrap().bytes, b"stalled");
    other.kill();
    for value in 1..3 {
        assert!(is_filled(&consumer.next(LONG).unwrap().unwrap(), value));
    }
    assert_eq!(consumer.next(LONG).unwrap_err(), RingError::ProducerDied { taken: 3 });

    // The leftovers of a dead daemon do not stop its successor.
    let successor = Listener::bind(&path).unwrap();
    drop(successor);
    assert!(!path.exists() && !path.with_extension("sock.lock").exists());
}

#[test]
fn a_consumer_that_waits_learns_of_the_death() {
    let path = socket_path();
    let mut other = Other::start("produce and stall", &path);
    let (connection, mut consumer) = attach(&path);
    for _ in 0..3 {
        consumer.next(LONG).unwrap().unwrap();
    }
    assert_eq!(connection.recv(64).unwrap().bytes, b"stalled");
    let waiter = std::thread::spawn(move || consumer.next(LONG).map(|view| view.is_some()));
    other.kill();
    assert_eq!(waiter.join().unwrap(), Err(RingError::ProducerDied { taken: 3 }));
    let _ = std::fs::remove_file(&path);
    std::fs::remove_file(path.with_extension("sock.lock")).unwrap();
}

// Places of the layout that an attacker would know, in 8-byte words.
const PRODUCED_WORD: usize = 128 / 8;
const SLEEP_WORD: usize = 128 / 8;
const RELEASE_WORDS: usize = 256 / 8;

/// One of the two files as an attacker sees it.
struct Words {
    base: *mut AtomicU64,
    count: usize,
}

impl Words {
    fn map(file: &OwnedFd, prot: ProtFlags) -> Words {
        let len = rustix::fs::fstat(file).unwrap().st_size as usize;
        // SAFETY: a fresh mapping of the whole file, never unmapped.
        let base = unsafe { mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, file, 0) };
        Words { base: base.unwrap().cast(), count: len / 8 }
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.count);
        // SAFETY: inside the mapping, which stays, and aligned as pages are.
        unsafe { &*self.base.add(index) }
    }
}

/// Does everything to the ring that the descriptors allow, until killed.
fn scribble(path: &PathBuf) {
    let (connection, fds) = open(path);
    try_forbidden(&fds);
    // Shared with the producer: without care its next read of the eventfd would block for ever.
    rustix::fs::fcntl_setfl(&fds.doorbell, rustix::fs::OFlags::empty()).unwrap();
    connection.send(b"scribbling", &[]).unwrap();
    let produced = Words::map(&fds.data, ProtFlags::READ);
    let words = Words::map(&fds.credit, ProtFlags::READ | ProtFlags::WRITE);
    let mut rng = Rng::new(std::process::id().into());
    loop {
        let pick = rng.next();
        let index = match pick % 4 {
            0 => rng.next() as usize % words.count,
            1 => SLEEP_WORD,
            _ => RELEASE_WORDS + rng.next() as usize % 4,
        };
        // Mostly plausible values, so that slots really are returned too early.
        let value = match pick % 7 {
            0 => rng.next(),
            1 => u64::MAX,
            2 => 0,
            _ => produced.word(PRODUCED_WORD).load(Ordering::Relaxed).wrapping_sub(rng.next() % 5),
        };
        words.word(index).store(value, Ordering::Relaxed);
        if pick.is_multiple_of(64) {
            let _ = rustix::io::write(&fds.doorbell, &1u64.to_ne_bytes());
        }
        if pick.is_multiple_of(65) {
            drain(&fds.doorbell);
        }
    }
}

fn drain(doorbell: &OwnedFd) {
    let mut count = [0; 8];
    let mut into = [std::io::IoSliceMut::new(&mut count)];
    let flags = rustix::io::ReadWriteFlags::NOWAIT;
    let _ = rustix::io::preadv2(doorbell, &mut into, u64::MAX, flags);
}

/// Operations that the seals must forbid.
fn try_forbidden(fds: &RingFds) {
    use rustix::fs::{FallocateFlags, SealFlags};
    for file in [&fds.data, &fds.credit] {
        assert_eq!(rustix::fs::ftruncate(file, 0), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(file, 1 << 40), Err(Errno::PERM));
        assert_eq!(rustix::fs::fcntl_add_seals(file, SealFlags::WRITE), Err(Errno::PERM));
    }
    assert_eq!(rustix::io::pwrite(&fds.data, b"x", 0), Err(Errno::PERM));
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    assert_eq!(rustix::fs::fallocate(&fds.data, punch, 0, 4096), Err(Errno::PERM));
    rustix::fs::fallocate(&fds.credit, punch, 0, 4096).unwrap();
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // Through /proc the file is opened anew, but the seals belong to the file.
    let again = format!("/proc/self/fd/{}", fds.data.as_raw_fd());
    let again = rustix::fs::open(again, rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty());
    for file in [fds.data.as_fd(), again.unwrap().as_fd()] {
        // SAFETY: a fresh mapping, refused anyway.
        let map = unsafe { mmap(std::ptr::null_mut(), 4096, prot, MapFlags::SHARED, file, 0) };
        assert_eq!(map.err(), Some(Errno::PERM));
    }
}

#[test]
fn a_hostile_consumer_hurts_only_its_own_stream() {
    let daemon = Daemon::new();
    let attacker = Other::start("scribble", &daemon.path);
    let (mut victim, client) = daemon.serve(CONFIG);
    assert_eq!(client.recv(64).unwrap().bytes, b"scribbling");
    let _reader = Other::start("read", &daemon.path);
    let (mut honest, reader) = daemon.serve(CONFIG);
    let bystander = std::thread::spawn(move || {
        assert!(feed(&mut honest, &reader, 2_000));
        assert_eq!(reader.recv(64).unwrap().bytes, 2_000u64.to_le_bytes());
        honest.counters()
    });

    let mut model = Model::default();
    for value in 0..2_000_000 {
        model.step(&mut victim, value);
        if victim.produced() == 20_000 {
            break;
        }
    }
    model.compare(&mut victim);
    let counters = victim.counters();
    println!("{counters:?}");
    assert!(counters.bad_release_words > 0, "the attacker did nothing");
    let counters = bystander.join().unwrap();
    assert_eq!((counters.bad_release_words, counters.bad_sleep_words), (0, 0));
    drop(attacker);
}

/// What every slot must hold: only the producer writes, and only where it was told to.
#[derive(Default)]
struct Model {
    slots: [Option<u64>; 4],
}

impl Model {
    fn step(&mut self, producer: &mut Producer, value: u64) {
        let Some(slot) = producer.free_slot() else {
            if producer.arm_credit_wakeup() {
                producer.disarm_credit_wakeup();
            }
            return;
        };
        let expected = self.slots[slot.get() as usize];
        let payload = producer.slot_mut(slot).unwrap();
        assert!(expected.is_none_or(|value| is_filled(payload, value)));
        fill(producer, slot, value);
        self.slots[slot.get() as usize] = Some(value);
        producer.doorbell_if_needed((value % 5) as u32);
    }

    fn compare(&self, producer: &mut Producer) {
        while let Some(slot) = producer.free_slot() {
            let expected = self.slots[slot.get() as usize];
            let payload = producer.slot_mut(slot).unwrap();
            assert!(expected.is_none_or(|value| is_filled(payload, value)));
        }
    }
}

#[test]
fn a_forked_child_neither_reads_nor_gives_back() {
    let (mut producer, fds) = Producer::create(RingConfig { slots: 1, ..CONFIG }).unwrap();
    let (_ours, theirs) = Connection::pair().unwrap();
    let mut consumer = Consumer::attach(fds, theirs.liveness().unwrap()).unwrap();
    let slot = producer.free_slot().unwrap();
    fill(&mut producer, slot, 9);
    let view = consumer.next(LONG).unwrap().unwrap();
    // SAFETY: the child calls nothing that another thread's lock could block, and ends by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = matches!(consumer.next(Duration::ZERO), Err(RingError::Forked { .. }));
        let readable = is_filled(&view, 9);
        drop(view);
        // SAFETY: ends this process and nothing else.
        unsafe { libc::_exit(i32::from(!(refused && readable))) };
    }
    let mut status = -1;
    // SAFETY: `status` is live; the child is ours.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!(producer.free_slot(), None, "the child gave back its parent's slot");
    drop(view);
    assert!(producer.free_slot().is_some());
}
