//! Unsolicited bytes on the local socket of a DPU and on the control ports.
//!
//! A stream runs meanwhile and is unharmed; afterwards everything is as it was before.

use std::fs::File;
use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use engine::control::target::TargetControl;
use engine::proto::{
    BatchRange, DatasetRef, OpenReply, OpenRequest, QueuePair, SessionRequest, StreamStatus,
    open_reply,
};
use host::attach::Connection;
use prost::Message;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketType,
};
use service::error::{Error, Kind};
use xio::dataset::Dtype;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::harness::{Cat, Daemon, TOKEN, World, eventually, fresh_ip};
use super::hostile_packets::runtime;
use super::wire_kit::Noise;

const PLAN: &str = "window(1024) | narrow(u16) | batch(16)";
const ARGS: &[&str] = &["--plan", PLAN, "--batches", "300", "--slots", "2", "--slot-size", "64KiB"];

/// A socket without the checks of our own library.
fn raw_socket(path: &Path) -> OwnedFd {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None);
    let socket = socket.expect("a socket");
    let address = SocketAddrUnix::new(path).expect("short enough");
    rustix::net::connect(&socket, &address).expect("a DPU listens");
    socket
}

/// A request as our client sends it.
fn good_request(target: &Daemon) -> OpenRequest {
    OpenRequest {
        target: target.control().into(),
        token: TOKEN.into(),
        datasets: vec![dataset("web")],
        plan: PLAN.into(),
        first_batch: 0,
        batches: 1,
        slots: 2,
        slot_bytes: 64 << 10,
        ranks: None,
        shift: 0,
        leave_out: Vec::new(),
    }
}

fn dataset(name: &str) -> DatasetRef {
    DatasetRef { name: name.into(), dtype: "u32".into(), vocabulary: 0, ..DatasetRef::default() }
}

/// Sends one message; the text of the daemon's refusal.
fn refusal(dpu: &Daemon, message: &[u8]) -> String {
    let connection = Connection::connect(dpu.socket()).expect("a DPU listens");
    connection.send(message, &[]).expect("it takes a message");
    refusal_on(&connection)
}

fn refusal_on(connection: &Connection) -> String {
    let reply = connection.recv(64 << 10).expect("it answers");
    assert!(reply.fds.is_empty());
    match OpenReply::decode(reply.bytes.as_slice()).expect("well formed").result {
        Some(open_reply::Result::Failure(failure)) => failure.message,
        other => panic!("{other:?}"),
    }
}

/// Messages that are no requests, of every length and with unwanted descriptors.
fn throw_bytes(dpu: &Daemon) {
    drop(raw_socket(dpu.socket()));
    let mut noise = Noise(3);
    for len in [1, 2, 7, 100, 4096, 60_000, 65_536] {
        let bytes = noise.bytes(len);
        let text = refusal(dpu, &bytes);
        assert!(text.contains("request"), "{len}: {text}");
    }
    for (len, flags) in
        [(0, SendFlags::empty()), (65_537, SendFlags::NOSIGNAL), (150_000, SendFlags::NOSIGNAL)]
    {
        let socket = raw_socket(dpu.socket());
        // The daemon may have closed the connection on the first of them.
        let _ = rustix::net::send(&socket, &noise.bytes(len), flags);
    }
    let file = File::open("/proc/self/status").expect("it exists");
    let fds = [file.as_fd(); 20];
    let socket = raw_socket(dpu.socket());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(20))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let text = [std::io::IoSlice::new(b"take these")];
    rustix::net::sendmsg(&socket, &text, &mut control, SendFlags::empty()).expect("sent");
}

/// Well-formed requests that must not be granted.
fn ask_for_too_much(dpu: &Daemon, target: &Daemon) {
    let good = good_request(target);
    let request = |change: fn(&mut OpenRequest)| {
        let mut request = good.clone();
        change(&mut request);
        request.encode_to_vec()
    };
    let half = request(|_| {});
    let cases: [(Vec<u8>, &str); 15] = [
        (half[..half.len() / 2].to_vec(), "request"),
        (request(|r| r.slots = u32::MAX), "a ring of"),
        (request(|r| r.slots = 0), "slots"),
        (request(|r| r.slot_bytes = u32::MAX), "a ring of"),
        (request(|r| r.slot_bytes = 1), "does not fit a slot"),
        (request(|r| r.plan = "x".repeat(50_000)), "plan"),
        (request(|r| r.plan = "window(1024) | batch(64)".into()), "slot"),
        (request(|r| r.datasets = vec![]), "0 datasets"),
        (request(|r| r.datasets = vec![dataset("web"); 4_098]), "4098 datasets"),
        (request(|r| r.datasets = vec![dataset("web"); 2]), "2 datasets"),
        (request(|r| r.target = "\0 nowhere".into()), "nowhere"),
        (request(|r| r.target = "http://127.0.0.1:1/x".into()), "http"),
        (request(|r| r.first_batch = u64::MAX), "beyond"),
        (request(|r| r.leave_out = vec![BatchRange { first: 5, end: 5 }]), "is empty"),
        (
            request(|r| {
                r.leave_out =
                    (0..65).map(|i| BatchRange { first: 2 * i, end: 2 * i + 1 }).collect();
            }),
            "at most 64",
        ),
    ];
    for (message, part) in cases {
        let text = refusal(dpu, &message);
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

/// A client with a stream that then sends invalid messages.
fn misbehave_with_a_stream(dpu: &Daemon, target: &Daemon) {
    let endless = OpenRequest { batches: 0, ..good_request(target) };
    let mut noise = Noise(4);
    let open = || {
        let connection = Connection::connect(dpu.socket()).expect("a DPU listens");
        connection.send(&endless.encode_to_vec(), &[]).expect("it takes a message");
        let reply = connection.recv(64 << 10).expect("it answers");
        assert!(!reply.fds.is_empty(), "the ring");
        connection
    };
    // Counters are all that a client with a stream can request, whatever it sends.
    let connection = open();
    for len in [1, 1000, 65_536] {
        connection.send(&noise.bytes(len), &[]).expect("it takes a message");
        let reply = connection.recv(64 << 10).expect("it answers");
        StreamStatus::decode(reply.bytes.as_slice()).expect("well formed");
    }
    // Endless requests from a client that never reads the replies.
    let deaf = open();
    for _ in 0..2_000 {
        if deaf.send(b"?", &[]).is_err() {
            break;
        }
    }
}

/// More silent clients than the daemon accepts: the oldest are evicted.
fn hold_connections(dpu: &Daemon) {
    let connect = |_| Connection::connect(dpu.socket()).expect("a DPU listens");
    let silent: Vec<Connection> = (0..80).map(connect).collect();
    eventually("the end of the first", || silent[0].hung_up().then_some(()));
    assert!(!silent[79].hung_up(), "the last has its five seconds");
}

#[test]
fn bytes_on_the_local_socket_harm_nobody_else() {
    let Some(world) = World::new("bytes_on_the_local_socket") else {
        return;
    };
    let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(786_432, 1));
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let mut cat = Cat::through(&world, &dpu, &target.url("web"), ARGS);
    let mut got = cat.read(1 << 20);
    let before = dpu.status(&world);
    let descriptors = dpu.descriptors();

    throw_bytes(&dpu);
    ask_for_too_much(&dpu, &target);
    misbehave_with_a_stream(&dpu, &target);
    hold_connections(&dpu);

    eventually("everything given back", || {
        let now = dpu.status(&world);
        let same = |name| now.counter(name) == before.counter(name);
        let free = same("dpu.streams") && same("dpu.memory_free_bytes");
        (free && dpu.descriptors() <= descriptors).then_some(())
    });
    let next = Cat::through(&world, &dpu, &target.url("web"), &["--plan", PLAN, "--batches", "3"]);
    assert_same(&next.finish().good().stdout, &expected(PLAN, &[&corpus], 0..3));
    got.extend(cat.finish().good().stdout);
    assert_same(&got, &expected(PLAN, &[&corpus], 0..300));
    assert!(!dpu.stderr().contains("panicked"), "{}", dpu.stderr());
}

/// Beginnings of HTTP/2 that go wrong later and later.
fn openings() -> Vec<Vec<u8>> {
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    let frame = |length: u32, kind: u8, body: &[u8]| {
        let length = &length.to_be_bytes()[1..];
        [&preface, &settings[..], length, &[kind, 0, 0, 0, 0, 1], body].concat()
    };
    let mut noise = Noise(5);
    vec![
        vec![],
        noise.bytes(3),
        noise.bytes(10_000),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        preface[..10].to_vec(),
        [&preface[..], &noise.bytes(500)].concat(),
        frame(0x00ff_ffff, 0, &[0; 100]),
        frame(8, 1, &[0xff; 8]),
        frame(4, 3, &[0; 4]),
        frame(5, 8, &[0; 5]),
        [&preface[..], &settings.repeat(2_000)].concat(),
    ]
}

fn throw_at(address: SocketAddr) {
    for bytes in openings() {
        let mut stream = TcpStream::connect(address).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_millis(20))).expect("a timeout");
        // It may close the connection at any byte.
        let _ = stream.write_all(&bytes);
        let _ = stream.read(&mut [0; 4096]);
    }
    let idle: Vec<TcpStream> =
        (0..100).map(|_| TcpStream::connect(address).expect("it listens")).collect();
    drop(idle);
}

/// Calls with the right token and senseless content.
async fn senseless_calls(target: &str) {
    let control = TargetControl::connect(target, TOKEN).await.expect("reachable");
    let many = vec![dataset("web"); 5_000];
    let long = vec![dataset(&"x".repeat(5 << 20))];
    for (datasets, part) in [(vec![], "0 datasets"), (many, "5000 datasets"), (long, "")] {
        refused(control.describe(datasets).await, part);
    }
    let address = format!("{}:4791", fresh_ip());
    let pair = QueuePair { address, qpn: 5, psn: 0, mtu: 4096, selective_repeat: false };
    for (reader, part) in [
        (None, "queue pair"),
        (Some(QueuePair { qpn: 1, ..pair.clone() }), "out of range"),
        (Some(QueuePair { qpn: u32::MAX, ..pair.clone() }), "out of range"),
        (Some(QueuePair { psn: 1 << 24, ..pair.clone() }), "out of range"),
        (Some(QueuePair { mtu: 255, ..pair.clone() }), "MTU"),
        (Some(QueuePair { address: "localhost".into(), ..pair.clone() }), "localhost"),
        (Some(QueuePair { address: "[::1]:4791".into(), ..pair.clone() }), "no route"),
        (Some(QueuePair { address: "0.0.0.0:4791".into(), ..pair }), "no route"),
    ] {
        let datasets = vec![dataset("web")];
        let request = SessionRequest { datasets, reader, credits: u32::MAX, stages: vec![] };
        refused(control.session(request).await, part);
    }
}

#[track_caller]
fn refused<R>(answer: Result<R, Error>, part: &str) {
    let error = answer.map(drop).expect_err("it makes no sense");
    let (message, _) = error.parts();
    assert!(message.contains(part), "{part:?} is not in {message:?}");
    assert_eq!(error.kind(), Kind::Invalid, "{message}");
}

#[test]
fn bytes_on_the_control_ports_harm_nobody_else() {
    let Some(world) = World::new("bytes_on_the_control_ports") else {
        return;
    };
    let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(786_432, 1));
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let mut cat = Cat::through(&world, &dpu, &target.url("web"), ARGS);
    let mut got = cat.read(1 << 20);
    for daemon in [&target, &dpu] {
        throw_at(daemon.control().parse().expect("an address"));
    }
    runtime().block_on(senseless_calls(target.control()));
    eventually("the end of senseless sessions", || {
        (target.status(&world).counter("target.sessions") == 1).then_some(())
    });
    got.extend(cat.finish().good().stdout);
    assert_same(&got, &expected(PLAN, &[&corpus], 0..300));
    for daemon in [&target, &dpu] {
        daemon.status(&world);
        assert!(!daemon.stderr().contains("panicked"), "{}", daemon.stderr());
    }
}
