//! Abandoned streams and sessions are released, however full the queue of an engine is.

use adapter::congestion::Choice;
use adapter::owned::Trouble;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use host::disk::UringDisk;
use host::ring::{Consumer, Producer, RingConfig};
use nic::local_peers::{Shared, Unfinished};
use roce::endpoint::Reliability;
use roce::report::QpProgress;
use roce::wire::Psn;
use xio::dataset::{Dtype, Format, TokenFile};
use xio::order::Cut;
use xio::plan::Plan;
use xio::reader::{Delivery, ReaderSetup, ReaderSource, Share};
use xio::stage::Rows;

use super::dpu::{DpuEngine, StreamId, StreamSpec};
use super::target::{SessionSpec, TargetEngine};
use super::*;
use crate::budget::Budget;
use crate::status::Counters;

const RING_BYTES: u64 = 16 << 10;

fn config() -> HostConfig {
    let roce = SocketAddr::from(([127, 0, 0, 1], 0));
    let congestion = Choice::default();
    let (memory, mtu) = (32 << 20, Mtu::M4096);
    let (rate_limit_bps, loss_ppm, seed) = (0, 0, 7);
    HostConfig { roce, device: None, memory, congestion, rate_limit_bps, mtu, loss_ppm, seed }
}

/// Waits until `look` returns true.
fn eventually(what: &str, look: impl Fn() -> bool) {
    let began = Instant::now();
    while !look() {
        assert!(began.elapsed() < Duration::from_secs(30), "in vain: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Keeps an engine waiting in the middle of a command, and fills its queue behind that one.
fn stall<C>(
    commands: &Commands<C>,
    status: impl Fn(SyncSender<Counters>) -> C,
) -> Receiver<Counters> {
    let (reply, stalled) = sync_channel(0);
    commands.send(status(reply)).expect("room");
    let (unread, _) = sync_channel(1);
    while commands.send(status(unread.clone())).is_ok() {}
    // The engine may have taken the first one only now, which made room for another.
    std::thread::sleep(Duration::from_millis(20));
    while commands.send(status(unread.clone())).is_ok() {}
    stalled
}

struct Opened {
    id: StreamId,
    signals: Signals,
    consumer: Consumer,
    _alive: UnixStream,
    _events: tokio::sync::mpsc::Receiver<dpu::Event>,
}

fn open(engine: &DpuEngine, rings: &Budget) -> Opened {
    try_open(engine, rings).expect("there is room")
}

fn try_open(engine: &DpuEngine, rings: &Budget) -> Result<Opened, EngineError> {
    let plan = Plan::parse("window(64)", None).expect("a plan");
    let file = TokenFile { dtype: Dtype::U16, data_offset: 0, tokens: 6_400, format: Format::Flat };
    let layout = plan.layout(0, file).expect("it fits");
    let pipeline = plan.compile(&[Dtype::U16], true).expect("it fits");
    let order = pipeline.order(&[layout]).expect("it fits");
    let stages = pipeline.branches()[0].blocks().clone();
    let (cut, whole_pages) = (Cut::Windows, false);
    let source =
        ReaderSource { connection: 0, source: 0, layout, cut, stages, whole_pages, weighs: None };
    let delivery = Delivery {
        window_tokens: plan.window(),
        batch_samples: 1,
        sample_dtype: Dtype::U16,
        dtype: Dtype::U16,
        rows: Rows::default(),
        first_batch: 0,
        batches: None,
        shift: 0,
        share: Share::WHOLE,
        slot_bytes: 4096,
    };
    let ring = RingConfig { slots: 4, slot_bytes: 4096 };
    let (producer, fds) = Producer::create(ring).expect("a small ring");
    let (alive, peer) = UnixStream::pair().expect("a pair of sockets");
    let consumer = Consumer::attach(fds, peer.into()).expect("an honest ring");
    let (events, lost) = tokio::sync::mpsc::channel(16);
    let signals = engine.commands.signals();
    let spec = StreamSpec {
        setup: ReaderSetup::new(order, vec![source], delivery),
        module: None,
        names: vec!["a".into()],
        targets: vec!["nowhere".into()],
        producers: vec![producer],
        events,
        signals: signals.clone(),
        leases: vec![rings.take(RING_BYTES).expect("room")],
    };
    let id = engine.commands.call(|reply| dpu::Command::Open(Box::new(spec), reply));
    let id = id.expect("it runs").map_err(|refused| refused.error)?;
    Ok(Opened { id, signals, consumer, _alive: alive, _events: lost })
}

/// A stream that has lost its target must not find that another one has taken the memory for its
/// new connection.
#[test]
fn every_stream_that_fits_can_be_connected_again() {
    let rings = Budget::rings(8 * RING_BYTES);
    let engine = DpuEngine::start(config()).expect("loopback");
    let free = || {
        let status = engine.commands.call(dpu::Command::Status).expect("it runs");
        status.get("dpu.memory_free_bytes")
    };
    let before = free();
    let _stream = open(&engine, &rings);
    let memory = 3 * (before - free()) / 4096 * 4096 + 4096;
    let engine = DpuEngine::start(HostConfig { memory, ..config() }).expect("loopback");
    let streams: Vec<Opened> = std::iter::from_fn(|| try_open(&engine, &rings).ok()).collect();
    assert!(streams.len() >= 2, "{}", streams.len());
    for stream in streams.iter().cycle().take(3 * streams.len()) {
        let made = engine.commands.call(|reply| dpu::Command::NewQp(stream.id, 0, reply));
        let ours = made.expect("it runs").expect("a queue pair").qpn;
        let theirs = QpAddress {
            address: SocketAddr::from(([127, 0, 0, 1], 9)),
            qpn: Qpn::new(77),
            psn: Psn::new(1),
            reliability: Reliability::Selective,
            mtu: 1024,
        };
        let (mtu, credits, local) = (Mtu::M1024, u32::MAX, Err("not asked for".to_owned()));
        let peer = dpu::Peer { connection: 0, ours, theirs, mtu, credits, local };
        let made = engine.commands.call(|reply| dpu::Command::Connect(stream.id, peer, reply));
        made.expect("it runs").expect("memory for its capsules");
    }
}

#[test]
fn a_full_queue_loses_no_end_of_a_stream() {
    let engine = DpuEngine::start(config()).expect("loopback");
    let rings = Budget::rings(2 * RING_BYTES);
    let (closed, mut abandoned) = (open(&engine, &rings), open(&engine, &rings));
    let status = || engine.commands.call(dpu::Command::Status).expect("it runs");
    let before = status().get("dpu.memory_free_bytes");
    let stalled = stall(&engine.commands, dpu::Command::Status);
    closed.signals.close();
    abandoned.signals.abandon(0, "it burnt down".into());
    drop(stalled);

    let end = abandoned.consumer.next(Duration::from_secs(30));
    let end = end.expect_err("nothing was ever delivered");
    assert!(end.to_string().contains("it burnt down"), "{end}");
    eventually("one stream", || {
        let waits = || engine.commands.call(dpu::Command::Status);
        waits().is_ok_and(|status| status.get("dpu.streams") == 1)
    });
    assert!(status().get("dpu.memory_free_bytes") > before);
    eventually("the ring's share", || rings.take(RING_BYTES).is_ok());
    // An engine that sleeps takes only as many turns as it is woken.
    let awake = status();
    std::thread::sleep(Duration::from_millis(300));
    let turns = status().get("engine.turns") - awake.get("engine.turns");
    let sleeps = status().get("engine.sleeps") - awake.get("engine.sleeps");
    assert!(sleeps > 0 && turns < 10_000, "{turns} turns and {sleeps} sleeps without work");
}

#[test]
fn streams_are_not_bounded_by_what_one_sleep_watches() {
    const STREAMS: usize = 40;
    let engine = DpuEngine::start(config()).expect("loopback");
    let rings = Budget::rings(STREAMS as u64 * RING_BYTES);
    let status = || engine.commands.call(dpu::Command::Status).expect("it runs");
    let free_bytes = status().get("dpu.memory_free_bytes");
    let mut streams: Vec<_> = (0..STREAMS).map(|_| open(&engine, &rings)).collect();
    assert_eq!(status().get("dpu.streams"), STREAMS as u64);
    let last = streams.last_mut().expect("there are some");
    last.signals.abandon(0, "it burnt down".into());
    let end = last.consumer.next(Duration::from_secs(30)).expect_err("nothing was delivered");
    assert!(end.to_string().contains("it burnt down"), "{end}");
    streams.iter().for_each(|stream| stream.signals.close());
    eventually("no stream", || status().get("dpu.streams") == 0);
    eventually("every share", || rings.take(STREAMS as u64 * RING_BYTES).is_ok());
    assert_eq!(status().get("dpu.memory_free_bytes"), free_bytes);
}

/// Opens a session without datasets. Returns the target's end, what is told when it ends, and what
/// ends it.
fn open_session(
    engine: &TargetEngine,
    mtu: Mtu,
) -> (QpAddress, tokio::sync::oneshot::Receiver<target::Ended>, Signals) {
    let reader = QpAddress {
        address: SocketAddr::from(([127, 0, 0, 1], 9)),
        qpn: Qpn::new(77),
        psn: Psn::new(1),
        reliability: Reliability::Selective,
        mtu: mtu.bytes(),
    };
    let (ended, over) = tokio::sync::oneshot::channel();
    let signals = engine.commands.signals();
    let held = signals.clone();
    let (sources, local) = (Vec::new(), Err("not asked for".to_owned()));
    let spec = SessionSpec { sources, reader, local, mtu, credits: 4, ended, signals };
    let opened = engine.commands.call(|reply| target::Command::Open(spec, reply));
    (opened.expect("it runs").expect("there is room"), over, held)
}

#[test]
fn a_session_has_no_larger_mtu_than_the_port_of_its_device() {
    let (host, _) = failing();
    let engine = TargetEngine::start_on(host, 2, UringDisk::new).expect("it works so far");
    let mtus = [Mtu::M4096, Mtu::M512].map(|mtu| open_session(&engine, mtu).0.mtu);
    assert_eq!(mtus, [1024, 512]);
}

#[test]
fn a_full_queue_loses_no_end_of_a_session() {
    let engine = TargetEngine::start(config(), 2).expect("loopback");
    let (_, mut over, signals) = open_session(&engine, Mtu::M1024);
    let stalled = stall(&engine.commands, target::Command::Status);
    signals.close();
    assert!(over.try_recv().is_err());
    drop(stalled);
    eventually("no session", || {
        let status = engine.commands.call(target::Command::Status);
        status.is_ok_and(|status| status.get("target.sessions") == 0)
    });
    assert!(over.try_recv().is_ok(), "it was told what the session did");

    // Nor the end of the engine itself.
    let stalled = stall(&engine.commands, target::Command::Status);
    engine.commands.stop();
    drop(stalled);
    engine.thread.join().expect("it ends");
}

#[test]
fn a_caller_waits_for_room_in_a_full_queue() {
    let engine = DpuEngine::start(config()).expect("loopback");
    let stream = open(&engine, &Budget::rings(RING_BYTES));
    let stalled = stall(&engine.commands, dpu::Command::Status);
    let (commands, id) = (engine.commands.clone(), stream.id);
    let call = std::thread::spawn(move || commands.call(|reply| dpu::Command::Stream(id, reply)));
    std::thread::sleep(Duration::from_millis(20));
    drop(stalled);
    let report = call.join().expect("no panic");
    assert!(matches!(report, Ok(Some(_))), "the stream runs: {report:?}");
    // A waiting caller learns of the engine's end.
    let stalled = stall(&engine.commands, dpu::Command::Status);
    let commands = engine.commands.clone();
    let call = std::thread::spawn(move || commands.call(|reply| dpu::Command::Stream(id, reply)));
    std::thread::sleep(Duration::from_millis(20));
    engine.commands.stop();
    drop(stalled);
    let ended = call.join().expect("no panic");
    assert!(matches!(ended, Err(EngineError::Unavailable("has stopped"))), "{ended:?}");
}

/// A device that fails as soon as it is told to.
struct Failing {
    device: Software,
    has_failed: Arc<AtomicBool>,
}

const GONE: &str = "device fake0 has failed";

impl Adapter for Failing {
    type Device = <Software as Adapter>::Device;

    fn device(&mut self) -> &mut Self::Device {
        self.device.device()
    }

    fn memory(&self) -> &Pool {
        self.device.memory()
    }

    fn memory_mut(&mut self) -> &mut Pool {
        self.device.memory_mut()
    }

    fn turn(
        &mut self,
        now: Time,
        work: impl FnOnce(&mut Self::Device, &mut Pool) -> bool,
    ) -> Progress {
        self.device.turn(now, work)
    }

    fn release(&mut self, range: PoolRange) {
        self.device.release(range);
    }

    fn route(&mut self, now: Time, qpn: Qpn, peer: LocalPeer) {
        self.device.route(now, qpn, peer);
    }

    fn unfinished(&self) -> Unfinished {
        self.device.unfinished()
    }

    fn discovery(&self) -> Result<Arc<Shared>, String> {
        self.device.discovery()
    }

    fn next_wakeup(&self) -> Option<Time> {
        self.device.next_wakeup()
    }

    fn watch(&self, watched: &nic::ready::ReadySet) -> std::io::Result<()> {
        self.device.watch(watched)
    }

    fn prepare_sleep(&mut self) -> bool {
        self.device.prepare_sleep()
    }

    fn woken(&mut self) {
        self.device.woken();
    }

    fn has_work(&mut self) -> bool {
        self.device.has_work()
    }

    fn poll_trouble(&mut self) -> Option<Trouble> {
        let has_failed = self.has_failed.load(Ordering::Relaxed);
        has_failed.then(|| Trouble::Gone(GONE.into()))
    }

    fn largest_mtu(&self) -> u32 {
        1024
    }

    fn local(&self) -> SocketAddr {
        self.device.local()
    }

    fn reliability(&self) -> Reliability {
        self.device.reliability()
    }

    fn progress(&self, qpn: Qpn) -> Option<QpProgress> {
        self.device.progress(qpn)
    }

    fn counters(&self, tell: &mut dyn FnMut(&str, u64)) {
        self.device.counters(tell);
    }

    fn notes(&self) -> Vec<String> {
        self.device.notes()
    }
}

fn failing() -> (Host<Failing>, Arc<AtomicBool>) {
    let Host { adapter: device, congestion, rate_limit_bps, mtu, psns, now } =
        Host::software(&config()).expect("loopback");
    let has_failed = Arc::new(AtomicBool::new(false));
    let adapter = Failing { device, has_failed: Arc::clone(&has_failed) };
    (Host { adapter, congestion, rate_limit_bps, mtu, psns, now }, has_failed)
}

#[test]
fn a_device_that_is_gone_ends_streams_and_engines_with_that_reason() {
    let (host, has_failed) = failing();
    let engine = DpuEngine::start_on(host).expect("it works so far");
    let rings = Budget::rings(RING_BYTES);
    let mut stream = open(&engine, &rings);
    assert_eq!(engine.commands.failure(), None);
    has_failed.store(true, Ordering::Relaxed);
    let end = stream.consumer.next(Duration::from_secs(30)).expect_err("nothing was delivered");
    assert!(end.to_string().contains(GONE), "{end}");
    eventually("the end of the engine", || engine.has_stopped());
    assert_eq!(engine.commands.failure(), Some(GONE));

    let (host, has_failed) = failing();
    let engine = TargetEngine::start_on(host, 2, UringDisk::new).expect("it works so far");
    has_failed.store(true, Ordering::Relaxed);
    eventually("the end of the engine", || engine.thread.is_finished());
    assert_eq!(engine.commands.failure(), Some(GONE));
}
