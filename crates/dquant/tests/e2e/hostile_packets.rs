//! Unsolicited packets sent to a target and a DPU while a stream runs between them: the stream is
//! unharmed, and every packet is counted by the reason for which it was dropped (C3, C7).

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use engine::control::target::{Session, TargetControl};
use engine::proto::{DatasetRef, QueuePair, SessionRequest};
use roce::verbs::{Qpn, SendOp, WcStatus};
use roce::wire::{Aeth, Deth, Ext, Opcode, Reth, Syndrome};
use tokio::runtime::Runtime;
use xio::capsule::{Outcome, ReadRequest, ReadResponse, Refusal};
use xio::dataset::Dtype;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::harness::{Cat, Daemon, Status, TOKEN, World, eventually, fresh_ip};
use super::relay::{Overheard, Relay};
use super::stages::u32_to_u16;
use super::wire_kit::{Attacker, Noise, Rogue, request};

const PLAN: &str = "window(1024) | narrow(u16) | batch(16)";
const ARGS: &[&str] = &["--plan", PLAN, "--batches", "400", "--slots", "2", "--slot-size", "64KiB"];

pub(crate) fn runtime() -> Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(1).enable_all().build().expect("a runtime")
}

fn session(runtime: &Runtime, target: &Daemon, reader: QueuePair, credits: u32) -> Session {
    let dataset = DatasetRef {
        name: "web".into(),
        dtype: "u32".into(),
        vocabulary: 0,
        ..DatasetRef::default()
    };
    let (datasets, reader, stages) = (vec![dataset], Some(reader), vec![u32_to_u16()]);
    let request = SessionRequest { datasets, reader, credits, stages };
    runtime.block_on(async {
        let control = TargetControl::connect(target.control(), TOKEN).await.expect("reachable");
        control.session(request).await.expect("a session")
    })
}

/// Bytes of every length around the limits, with a wrong ICRC or without room for one.
fn garbage(attacker: &Attacker) {
    let mut noise = Noise(1);
    for len in [0, 1, 3, 4, 11, 12, 15, 16, 17, 28, 60, 64, 1024, 1500, 4096, 4140, 9000, 65_000] {
        let bytes = noise.bytes(len);
        attacker.raw(&bytes);
    }
    for _ in 0..200 {
        let len = noise.next() as usize % 200;
        let bytes = noise.bytes(len);
        attacker.raw(&bytes);
    }
}

/// Headers without meaning, under a correct ICRC.
fn nonsense(attacker: &Attacker) {
    let mut noise = Noise(2);
    for _ in 0..300 {
        let len = 12 + noise.next() as usize % 80;
        let bytes = noise.bytes(len);
        attacker.sealed(&bytes);
    }
    // No such opcode; no such version of the transport; a pad longer than the payload.
    for (at, value) in [(0, 0x1f), (1, 0x4f), (1, 0x70)] {
        let mut bytes = [0; 12];
        bytes[0] = 0x04;
        bytes[at] = value;
        attacker.sealed(&bytes);
    }
}

/// Well-formed packets for `victim`, with every kind of wrong number in them.
fn forged(attacker: &Attacker, victim: Qpn) {
    for turn in 0..16 {
        let psn = turn << 20 | 0x5_a5a5;
        let send = request(Opcode::RcSendOnly, victim, psn);
        attacker.packet(send, Ext::None, &[0xee; 64]);
        let reth = Reth { addr: 0x1000, rkey: 0xdead_beef, len: 64 };
        let write = request(Opcode::RcWriteOnly, victim, psn);
        attacker.packet(write, Ext::Reth(reth), &[0xee; 64]);
        let read = request(Opcode::RcReadRequest, victim, psn);
        attacker.packet(read, Ext::Reth(Reth { len: 4096, ..reth }), &[]);
        let aeth = Aeth { syndrome: Syndrome::RemoteAccess, msn: 1 };
        let nak = request(Opcode::RcAcknowledge, victim, psn);
        attacker.packet(nak, Ext::Aeth(aeth), &[]);
    }
    let send = request(Opcode::RcSendOnly, victim, 1);
    attacker.packet(roce::wire::Bth { pkey: 0x1234, ..send }, Ext::None, &[0; 8]);
    let deth = Deth { qkey: 1, src_qp: Qpn::new(5) };
    attacker.packet(request(Opcode::UdSendOnly, victim, 1), Ext::Deth(deth), &[0; 8]);
}

/// A counter of refused packets, or how much it has risen.
type Rise = (&'static str, u64);

/// Well-formed packets of one call of [`forged`].
const FORGED: u64 = 16 * 4 + 2;

/// After this time some packets of an attack were lost in the buffer, which the stream fills too
/// when the machine is busy.
const AGAIN: Duration = Duration::from_secs(5);

/// Runs `attack` until its packets are counted: each of `rising` by at least so much, none of
/// `still` at all.
fn counted(
    world: &World,
    daemon: &Daemon,
    attack: impl Fn(),
    rising: &[Rise],
    still: &[&'static str],
) {
    let before = daemon.status(world);
    let rise = |status: &Status, name| status.counter(name) - before.counter(name);
    attack();
    let mut attacked = Instant::now();
    eventually(&format!("{rising:?}"), || {
        if attacked.elapsed() > AGAIN {
            attack();
            attacked = Instant::now();
        }
        let now = daemon.status(world);
        rising.iter().all(|&(name, least)| rise(&now, name) >= least).then_some(())
    });
    let after = daemon.status(world);
    for name in still.iter().chain(&["roce.qp_errors"]) {
        assert_eq!(rise(&after, name), 0, "{name} while {rising:?}");
    }
}

/// Sends everything to `victim`, the one live queue pair of `daemon`, from a stranger's address and
/// from the peer's own. The datagrams fit an empty receive buffer.
fn attack(world: &World, daemon: &Daemon, peer: SocketAddr, victim: Qpn, inside: &[Rise]) {
    let SocketAddr::V4(peer) = peer else { panic!("{peer} is not of this test") };
    let stranger = Attacker::new(fresh_ip(), daemon.roce());
    let masked = Attacker::new(*peer.ip(), daemon.roce());
    let (source, number) = ("roce.wrong_source", "roce.unknown_qp");

    // The right number from the wrong address, and the other way round.
    let alien = || forged(&stranger, victim);
    counted(world, daemon, alien, &[(source, FORGED)], &[number]);
    let past = Qpn::new(victim.get() ^ 0x80_0000);
    let stale = || forged(&masked, past);
    counted(world, daemon, stale, &[(number, FORGED)], &[source]);
    let reserved = request(Opcode::RcSendOnly, Qpn::new(1), 0);
    let reserved = || masked.packet(reserved, Ext::None, &[0; 8]);
    counted(world, daemon, reserved, &[(number, 1)], &[source]);

    // Packets with both right are checked by the queue pair itself.
    counted(world, daemon, || forged(&masked, victim), inside, &[source, number]);

    let wire = [
        ("udp.rx.bad.too_short", 1),
        ("udp.rx.bad_icrc", 1),
        ("udp.rx.bad.opcode", 1),
        ("udp.rx.bad.version", 1),
        ("udp.rx.bad.pad", 1),
    ];
    for attacker in [&stranger, &masked] {
        let noise = || {
            garbage(attacker);
            nonsense(attacker);
        };
        counted(world, daemon, noise, &wire, &[]);
    }
}

/// Reads the stream piece by piece, so that it moves until `over`, and leaves the end of it.
fn read_slowly(cat: &mut Cat, got: &mut Vec<u8>, most: usize, over: &AtomicBool) {
    while !over.load(Ordering::Relaxed) {
        if got.len() < most {
            got.extend(cat.read(16 << 10));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn packets_thrown_at_both_ends_of_a_stream_change_nothing() {
    // A duplicate READ has to be one that was executed.
    let inside = [&SEEN[..], &[("roce.unmatched_duplicates", 1)]].concat();
    packets_thrown_at_both_ends("packets_thrown_at_both_ends", false, &inside);
}

#[test]
fn packets_thrown_at_both_ends_that_repeat_selectively_change_nothing() {
    packets_thrown_at_both_ends("packets_thrown_at_selective_ends", true, &SEEN);
}

/// Counters of a queue pair for the packets of [`forged`] with the right number and address.
const SEEN: [Rise; 5] = [
    ("roce.bad_pkey", 1),
    ("roce.bad_opcode", 1),
    ("roce.out_of_sequence", 1),
    ("roce.duplicates", 1),
    ("roce.bad_psn", 1),
];

fn packets_thrown_at_both_ends(test: &str, selective: bool, inside: &[Rise]) {
    let Some(world) = World::new(test) else {
        return;
    };
    let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(786_432, 1));
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let runtime = runtime();
    let relay = Relay::start(&runtime, &target, selective);
    let mut cat = Cat::through(&world, &dpu, &relay.url("web"), ARGS);
    let mut got = cat.read(1 << 20);

    let sessions = relay.sessions();
    let [Overheard { reader, target: served }] = &sessions[..] else {
        panic!("{} sessions", sessions.len())
    };
    assert_eq!([reader.selective_repeat, served.selective_repeat], [selective; 2]);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // A failed assertion ends the reader, too.
        let _over = Raise(&over);
        scope.spawn(|| read_slowly(&mut cat, &mut got, 12 << 20, &over));
        attack(&world, &target, dpu.roce(), Qpn::new(served.qpn), inside);
        attack(&world, &dpu, target.roce(), Qpn::new(reader.qpn), inside);
    });

    got.extend(cat.finish().good().stdout);
    assert_same(&got, &expected(PLAN, &[&corpus], 0..400));
    let status = dpu.status(&world);
    assert_eq!(status.counter("stream.lost_connections"), 0);
    assert_eq!(status.counter("stream.corrupt_blocks"), 0);
    assert_eq!(relay.sessions().len(), 1, "the connection was never made again");
}

/// Raises a flag when dropped.
struct Raise<'a>(&'a AtomicBool);

impl Drop for Raise<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A request that the target would carry out.
fn good_request(rogue: &Rogue, seq: u64) -> ReadRequest {
    let (remote_addr, rkey) = rogue.memory();
    ReadRequest {
        seq,
        tag: 7,
        source: 0,
        first_token: 0,
        tokens: 1024,
        deliver: Dtype::U16,
        remote_addr,
        rkey,
    }
}

fn ask(rogue: &mut Rogue, request: &ReadRequest) -> Outcome {
    let crc = host::kernels::best().0.crc32c;
    let sent = rogue.post(SendOp::Send, &request.encode(crc));
    assert_eq!(sent.status, WcStatus::Success);
    let answer = rogue.receive();
    ReadResponse::decode(&answer, crc).expect("the target's answers are well formed").outcome
}

#[test]
fn capsules_that_ask_for_too_much_are_refused_one_by_one() {
    let Some(world) = World::new("capsules_that_ask_for_too_much") else {
        return;
    };
    let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(100_000, 1));
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let runtime = runtime();
    let mut rogue = Rogue::new(fresh_ip());
    let session = session(&runtime, &target, rogue.queue_pair(), 4);
    rogue.connect(session.reply.target.as_ref().expect("named"));

    let good = good_request(&rogue, 0);
    let done = ask(&mut rogue, &ReadRequest { seq: 1, ..good });
    assert!(matches!(done, Outcome::Done { bytes: 2048, .. }), "{done:?}");
    let hostile = [
        (ReadRequest { seq: 1, ..good }, Refusal::Replayed),
        (ReadRequest { seq: u64::MAX, ..good }, Refusal::Replayed),
        (ReadRequest { seq: 2, source: 1, ..good }, Refusal::UnknownSource),
        (ReadRequest { seq: 3, first_token: 99_999, ..good }, Refusal::OutOfRange),
        (ReadRequest { seq: 4, first_token: u64::MAX, ..good }, Refusal::OutOfRange),
        (ReadRequest { seq: 5, tokens: 0, ..good }, Refusal::BadLength),
        (ReadRequest { seq: 6, tokens: u32::MAX, ..good }, Refusal::OutOfRange),
        (ReadRequest { seq: 7, deliver: Dtype::U64, ..good }, Refusal::BadType),
        // The session agreed on `u16`, whatever the file could be delivered as.
        (ReadRequest { seq: 8, deliver: Dtype::U32, ..good }, Refusal::BadType),
    ];
    for (request, reason) in hostile {
        assert_eq!(ask(&mut rogue, &request), Outcome::Refused(reason), "{request:?}");
    }
    for bytes in [&[0; 64][..], &[0xff; 64], b"x", &[]] {
        assert_eq!(rogue.post(SendOp::Send, bytes).status, WcStatus::Success);
        let crc = host::kernels::best().0.crc32c;
        let answer = ReadResponse::decode(&rogue.receive(), crc).expect("well formed");
        assert_eq!(answer.outcome, Outcome::Refused(Refusal::BadCapsule));
    }
    // After all that the session still serves valid requests.
    let done = ask(&mut rogue, &ReadRequest { seq: 9, ..good });
    assert!(matches!(done, Outcome::Done { bytes: 2048, .. }), "{done:?}");
    let status = target.status(&world);
    for (reason, count) in [
        ("replayed", 2),
        ("unknown_source", 1),
        ("out_of_range", 3),
        ("bad_length", 1),
        ("bad_type", 2),
        ("bad_capsule", 4),
    ] {
        assert_eq!(status.counter(&format!("target.refused.{reason}")), count, "{reason}");
    }

    // A place where it may not write: our own endpoint reports the error, and the staging buffer is
    // freed.
    let crc = host::kernels::best().0.crc32c;
    let astray = ReadRequest { seq: 10, rkey: good.rkey ^ 0x100, ..good };
    rogue.post(SendOp::Send, &astray.encode(crc));
    eventually("the failed write", || {
        rogue.move_packets();
        let status = target.status(&world);
        let free = status.counter("target.free_staging_buffers");
        let idle = free == status.counter("target.staging_buffers");
        (idle && status.counter("target.failed_work_requests") > 0).then_some(())
    });
    drop(session);
    served_as_ever(&world, &target, &dpu, &corpus);
}

#[test]
fn nothing_of_a_target_can_be_read_or_written_from_outside() {
    let Some(world) = World::new("nothing_of_a_target_can_be_read_or_written") else {
        return;
    };
    let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(100_000, 1));
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let runtime = runtime();
    let write = SendOp::Write { remote_addr: 0x1000, rkey: 0x1234_5678 };
    let read = SendOp::Read { remote_addr: 0x1000, rkey: 0x1234_5678 };
    for (count, op) in [write, read].into_iter().enumerate() {
        let mut rogue = Rogue::new(fresh_ip());
        let session = session(&runtime, &target, rogue.queue_pair(), 4);
        rogue.connect(session.reply.target.as_ref().expect("named"));
        assert_eq!(rogue.post(op, &[1; 64]).status, WcStatus::RemoteAccessError);
        let status = target.status(&world);
        assert_eq!(status.counter("roce.bad_key"), count as u64 + 1);
    }
    served_as_ever(&world, &target, &dpu, &corpus);
}

/// A message longer than any receive, and a flood: only the session that sends it ends.
#[test]
fn a_message_too_long_ends_its_own_session_only() {
    let Some(world) = World::new("a_message_too_long_ends_its_own_session_only") else {
        return;
    };
    let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(100_000, 1));
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let runtime = runtime();
    let mut rogue = Rogue::new(fresh_ip());
    let session = session(&runtime, &target, rogue.queue_pair(), 4);
    rogue.connect(session.reply.target.as_ref().expect("named"));
    let sent = rogue.post(SendOp::Send, &[1; 4000]);
    assert_eq!(sent.status, WcStatus::RemoteInvalidRequest);
    assert!(target.status(&world).counter("roce.receive_too_small") > 0);
    served_as_ever(&world, &target, &dpu, &corpus);
    drop(session);
}

fn served_as_ever(world: &World, target: &Daemon, dpu: &Daemon, corpus: &Corpus) {
    let args = ["--plan", PLAN, "--batches", "5"];
    let ran = Cat::through(world, dpu, &target.url("web"), &args).finish().good();
    assert_same(&ran.stdout, &expected(PLAN, &[corpus], 0..5));
}
