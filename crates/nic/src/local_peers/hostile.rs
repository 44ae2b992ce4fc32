//! LocalPeers that lie: processes of the same user that send anything, and publish anything.
//!
//! Whatever they do, the process here neither crashes nor hangs, touches no memory of its own on
//! their word, and goes on with others. The list of SECURITY.md ("Local peers") is this file, and
//! the tests of [`fifo`](super::fifo) and [`packets`](super::packets).

use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixStream};

use roce::direct::{DirectKind, DirectRequest};
use roce::endpoint::{Extent, Placement};
use roce::verbs::{Access, PdId};
use roce::wire::ROCE_PORT;
use roce::world::{AtomicOp, Path};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketType, connect, sendmsg, socket_with, socketpair,
};

use super::*;

const VICTIM: u8 = 41;
const LIAR: u8 = 42;

/// Each test of each process has its own address: names in the exchange are those of the whole
/// machine.
pub(super) fn ip(test: u8) -> IpAddr {
    let [.., high, low] = std::process::id().to_be_bytes();
    IpAddr::from([127, 64 + test, high, low])
}

fn open(slot: u8, test: u8) -> LocalPeers {
    LocalPeers::open(ROCE_PORT, slot, &[ip(test)]).expect("shared memory")
}

fn discover(from: &LocalPeers, slot: u8, test: u8) -> Result<Arc<Target>, String> {
    from.shared().discover(SocketAddr::new(ip(test), ROCE_PORT), slot)
}

/// A connection to the exchange of the victim.
fn call(test: u8) -> OwnedFd {
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let socket = socket.expect("a socket");
    let name = format!("dquant-board/{VICTIM}/{}", ip(test));
    let name = SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("short");
    connect(&socket, &name).expect("it listens");
    socket
}

/// Says something, with files.
fn say(to: &OwnedFd, bytes: &[u8], files: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(files)));
    }
    sendmsg(to, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
        .expect("it is connected");
}

/// What the protocol says with a segment.
const HELLO: &[u8] = b"dqboard6\0";

/// Sealed shared memory of any length and contents.
fn file(bytes: u64, seals: SealFlags, contents: &[u8]) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("lie", flags).expect("memfd");
    ftruncate(&file, bytes).expect("its own file");
    rustix::io::pwrite(&file, contents, 0).expect("its own file");
    fcntl_add_seals(&file, seals).expect("sealing is allowed");
    file
}

fn is_well(test: u8, slot: u8) {
    let honest = open(slot, test);
    let target = discover(&honest, VICTIM, test).expect("the victim answers others");
    assert!(target.has_fifo());
}

#[test]
fn nonsense_in_the_exchange_is_dropped() {
    let victim = open(VICTIM, 1);
    let (own, segment) = OwnBoard::create((ROCE_PORT, 50), &[]).expect("memfd");
    let (_writer, fifo) = Writer::create().expect("memfd");
    let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let size = fstat(&segment).expect("a file").st_size as u64;
    let (pipe, _end) = io::pipe().expect("a pipe");
    let null = std::fs::File::open("/dev/null").expect("it exists");
    let lies = [
        file(0, all, b""),
        file(size, SealFlags::empty(), b""),
        file(size, all, b"dqboard6"),
        file(size - 4096, all | SealFlags::FUTURE_WRITE, b"dqboard6"),
        file(size, all | SealFlags::FUTURE_WRITE, b"dqboard1"),
        pipe.into(),
        null.into(),
    ];
    let segment = segment.as_fd();
    let short = [&b""[..], b"d", b"dqboard6", b"dqboard9\0", b"dqboard6\0and more", &[0; 4000]];
    for words in short.into_iter().filter(|words| !words.is_empty()) {
        say(&call(1), words, &[segment, fifo.as_fd()]);
    }
    say(&call(1), HELLO, &[]);
    for lie in &lies {
        say(&call(1), HELLO, &[lie.as_fd()]);
        say(&call(1), HELLO, &[lie.as_fd(), fifo.as_fd()]);
        say(&call(1), HELLO, &[segment, lie.as_fd()]);
    }
    // More files than the protocol has.
    say(&call(1), HELLO, &[segment; 8]);
    is_well(1, 50);
    let accepted = victim.shared.initiators.lock().expect("no panic").len();
    // Those with a real segment are taken for processes: the two with wrong FIFOs are not.
    assert!(accepted <= 2, "{accepted} of the lies were accepted");
    drop(own);
}

#[test]
fn silent_callers_keep_nobody_waiting() {
    let _victim = open(VICTIM, 2);
    let silent: Vec<_> = (0..3 * MAX_CALLERS).map(|_| call(2)).collect();
    let begun = Instant::now();
    is_well(2, 50);
    // Each of them would have taken the whole of the exchange's patience.
    assert!(begun.elapsed() < Duration::from_secs(60));
    drop(silent);
    is_well(2, 51);
}

#[test]
fn threads_that_meet_a_process_at_once_get_one_target() {
    let _victim = open(VICTIM, 7);
    for slot in 50..70 {
        let own = open(slot, 7);
        let shared = Arc::clone(own.shared());
        let begin = std::sync::Barrier::new(4);
        let found = || {
            begin.wait();
            shared.discover(SocketAddr::new(ip(7), ROCE_PORT), VICTIM).expect("it answers")
        };
        let targets = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(found)).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Vec<_>>()
        });
        assert!(targets.iter().all(|target| Arc::ptr_eq(target, &targets[0])), "slot {slot}");
        assert_eq!(locked(&shared.exchanging).len(), 0);
    }
}

#[test]
fn a_process_that_does_not_answer_keeps_nobody_from_others() {
    let (_victim, own) = (open(VICTIM, 8), open(50, 8));
    // It listens and takes nobody in, as one that is stopped.
    let silent = exchange::listener(SocketAddr::new(ip(8), ROCE_PORT), 51).expect("a free name");
    let shared = Arc::clone(own.shared());
    let at = SocketAddr::new(ip(8), ROCE_PORT);
    std::thread::scope(|scope| {
        let waiting: Vec<_> = (0..3).map(|_| scope.spawn(|| shared.discover(at, 51))).collect();
        while locked(&shared.exchanging).is_empty() {
            std::thread::yield_now();
        }
        discover(&own, VICTIM, 8).expect("it answers");
        assert!(waiting.iter().all(|thread| !thread.is_finished()));
        // The first has waited for all of them.
        for thread in waiting {
            let why = thread.join().expect("no panic").expect_err("it does not answer");
            assert!(why.contains("no exchange"), "{why}");
        }
    });
    assert_eq!(locked(&shared.absent).len(), 1);
    drop(silent);
}

#[test]
fn callers_that_have_gone_before_the_answer_keep_no_place() {
    let mut victim = open(VICTIM, 9);
    let (own, segment) = OwnBoard::create((ROCE_PORT, 50), &[ip(9)]).expect("memfd");
    // Their process lives on.
    own.owner().store(1, Ordering::Release);
    for _ in 0..packets::MAX_INCOMING {
        let (_writer, fifo) = Writer::create().expect("memfd");
        let kind = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let ends = socketpair(kind.0, kind.1, SocketFlags::CLOEXEC, None);
        let (near, far) = ends.expect("sockets");
        say(&far, HELLO, &[segment.as_fd(), fifo.as_fd()]);
        drop(far);
        let caller = Other::arrived(near).expect("of the same user");
        assert!(victim.shared.answer(&caller, false).is_err());
    }
    assert_eq!(victim.shared.places.load(Ordering::Relaxed), packets::MAX_INCOMING);
    victim.adopt();
    assert_eq!(victim.shared.places.load(Ordering::Relaxed), 0);
    is_well(9, 52);
}

#[test]
fn a_stranger_on_the_socket_is_not_spoken_to() {
    // Another type of socket cannot even connect.
    let _victim = open(VICTIM, 3);
    let name = format!("dquant-board/{VICTIM}/{}", ip(3));
    let address = UnixAddr::from_abstract_name(name.as_bytes()).expect("short");
    let stream = UnixStream::connect_addr(&address);
    assert!(stream.and_then(|mut stream| stream.write_all(b"hello")).is_err());
    is_well(3, 50);
}

/// What a liar publishes, and requests that believe it.
#[test]
fn a_board_full_of_lies_misdirects_nobody() {
    let (mut victim, liar) = (open(VICTIM, 4), open(LIAR, 4));
    let target = discover(&victim, LIAR, 4).expect("an exchange");
    let qpn = Qpn::new(u32::from(VICTIM) << 16 | 1);
    let dest_qp = Qpn::new(u32::from(LIAR) << 16 | 1);
    victim.route(qpn, Some(target));
    let access = Access::ALL;
    let (own, peer, pd) = (ip(4), ip(4), PdId(1));
    let (serves, serves_reads) = (true, true);
    liar.publish_qp(&QpDescriptor {
        qpn: dest_qp,
        dest_qp: qpn,
        pd,
        own,
        peer,
        access,
        serves,
        serves_reads,
    });
    let bytes = [7_u8; 64];
    let local = [Placement { addr: bytes.as_ptr().expose_provenance() as u64, len: 64 }];
    let mut request = DirectRequest {
        kind: DirectKind::Write,
        path: Path::new(SocketAddr::new(ip(4), ROCE_PORT)),
        qpn,
        dest_qp,
        rkey: 9,
        remote_addr: 0x1000,
        len: 64,
        part: Extent { offset: 0, len: 64 },
        local: &local,
    };
    let (addr, backing, in_file) = (0x1000, 0x1000, None);
    let honest = RegionDescriptor { rkey: 9, pd, addr, len: 64, backing, in_file, access };
    let lies = [
        honest,
        RegionDescriptor { backing: 0, ..honest },
        RegionDescriptor { backing: u64::MAX - 63, ..honest },
        RegionDescriptor { backing: 0xffff_8000_0000_0000, ..honest },
        RegionDescriptor { len: u64::MAX, backing: u64::MAX - 4, ..honest },
        RegionDescriptor { addr: 0, len: u64::MAX, backing: 1, ..honest },
        RegionDescriptor { in_file: Some(0), ..honest },
        RegionDescriptor { in_file: Some(u64::MAX - 1), ..honest },
        RegionDescriptor { in_file: Some(1 << 61), len: 1 << 61, ..honest },
    ];
    for lie in lies {
        liar.publish_region(&lie);
        for kind in [DirectKind::Write, DirectKind::Read] {
            request.kind = kind;
            assert!(victim.carry_out(&request).is_err(), "{lie:?}");
        }
    }
    request.kind = DirectKind::Atomic(AtomicOp::FetchAdd(1));
    assert!(victim.carry_out(&request).is_err(), "there is no pool");
    assert_eq!(bytes, [7; 64]);
    // The victim has not lost its way to the others.
    is_well(4, 50);
}

#[test]
fn a_local_peer_that_claims_an_access_for_ever_is_waited_for_with_a_bound() {
    let (victim, liar) = (open(VICTIM, 5), open(LIAR, 5));
    discover(&liar, VICTIM, 5).expect("an exchange");
    assert!(victim.shared().quiesce());
    liar.shared.own.announce(VICTIM, 1);
    let begun = Instant::now();
    assert!(!victim.shared().quiesce());
    assert!(begun.elapsed() >= QUIESCE);
    liar.shared.own.retire();
    assert!(victim.shared().quiesce());
}

#[test]
fn more_boards_than_places_are_refused() {
    let victim = open(VICTIM, 6);
    let segments: Vec<_> = (0..MAX_INITIATORS + 10)
        .map(|_| OwnBoard::create((ROCE_PORT, 50), &[ip(6)]).expect("memfd"))
        .collect();
    let mut calls = Vec::new();
    for (own, segment) in &segments {
        // Its owner lives.
        own.owner().store(1, Ordering::Release);
        let caller = call(6);
        say(&caller, HELLO, &[segment.as_fd()]);
        calls.push(caller);
        if calls.len() == MAX_CALLERS / 2 {
            // Those that were spoken to have hung up, or answered.
            let mut answer = [0; 64];
            calls.drain(..).for_each(|caller| {
                let _ = rustix::io::read(&caller, &mut answer);
            });
        }
    }
    assert!(victim.shared.initiators.lock().expect("no panic").len() <= MAX_INITIATORS);
    let late = open(50, 6);
    assert!(discover(&late, VICTIM, 6).is_err());
    segments.iter().for_each(|(own, _)| own.owner().store(0, Ordering::Release));
    drop(victim);
}
