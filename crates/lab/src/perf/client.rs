//! A test from the client's side: sets it up with the server, runs it, measures, and compares
//! bytes.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration as StdDuration;

use crate::trace::{Recorder, Sample};
use adapter::congestion::Choice;
use adapter::drive::{self, Owner};
use adapter::owned::Adapter;
use adapter::owned::DeviceChoice;
use nic::clock;
use nic::driver::{Driver, Turn};
use roce::world::Progress;
use roce::{Duration, Time};
use service::address::{check_port, with_port};

use super::ends::{Ends, check_address};
use super::histogram::Histogram;
use super::messages::{Control, Message, PERF_PORT, Snapshot, VERSION, Verdict, lost};
use super::requester::Requester;
use super::test::{LOOK_AT_MEMORY, Mode, Service, Test};
use crate::devices::{self, MessagePath};
use service::Error;

/// How long a connection may take.
const CONNECT_LIMIT: StdDuration = StdDuration::from_secs(5);

/// How long messages under way may take to complete at the end.
const DRAIN_LIMIT: Duration = Duration::from_millis(20_000);

/// How often the control connection is looked at while packets move, and how far queue pairs have
/// come.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// What one test measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Length of the measured part in seconds.
    pub seconds: f64,
    /// Messages of that part: in latency tests round trips, over unreliable services those that
    /// arrived.
    pub messages: u64,
    /// Latencies in microseconds: one way for SEND and WRITE, to the completion for READ and
    /// atomics.
    pub latency: Option<Latency>,
    /// CPU time of the client and of the server in seconds, user and system.
    pub cpu_s: [f64; 2],
    /// Packets that either side sent again; none where a device does not tell.
    pub retransmitted: Option<u64>,
    /// Messages that were sent and did not arrive, over unreliable services.
    pub lost: u64,
    /// Both sides together.
    pub verified_bytes: u64,
    /// Buffers with a wrong byte, messages out of order: both sides together.
    pub mismatches: u64,
    /// Payload bytes of the packets.
    pub mtu: u32,
    /// Whether losses are recovered selectively.
    pub selective: bool,
    /// How the client's messages travelled.
    pub path: MessagePath,
    /// How far the client's queue pairs came over time, where that was asked for and the device
    /// tells.
    pub progress: Vec<Sample>,
    /// Why packets of a side did not take the AF_XDP socket that the test wants, or why there is no
    /// same-host path within one machine.
    pub fallbacks: Vec<String>,
}

/// Latencies in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latency {
    /// The lowest.
    pub min: f64,
    /// Half of the messages were not slower.
    pub p50: f64,
    /// 99 of 100.
    pub p99: f64,
    /// 999 of 1000.
    pub p999: f64,
    /// The highest.
    pub max: f64,
}

impl Latency {
    fn of(times: &Histogram) -> Option<Latency> {
        let (min, max) = times.range()?;
        let us = |ns: u64| ns as f64 / 1e3;
        let at = |share| times.percentile(share).map(us);
        Some(Latency {
            min: us(min),
            p50: at(0.5)?,
            p99: at(0.99)?,
            p999: at(0.999)?,
            max: us(max),
        })
    }
}

/// A connection to a server.
#[derive(Debug)]
pub struct Client {
    control: Control,
    peer: SocketAddr,
    local: SocketAddr,
    device: Option<DeviceChoice>,
    congestion: Choice,
    seed: u64,
    samples_progress: bool,
}

impl Client {
    /// Connects to `host[:port]`.
    ///
    /// # Errors
    /// When nobody answers there, or somebody else.
    pub fn connect(
        host: &str,
        device: Option<DeviceChoice>,
        congestion: Choice,
        seed: u64,
    ) -> Result<Client, Error> {
        check_port(host)?;
        let name = with_port(host, PERF_PORT);
        let found = name.to_socket_addrs().map_err(|error| {
            Error::unreachable(format_args!("{host}: {error}")).hint("give a name or an address")
        })?;
        let mut failure = io::Error::other("the name has no address");
        for address in found {
            match TcpStream::connect_timeout(&address, CONNECT_LIMIT) {
                Ok(stream) => return Client::greet(stream, address, device, congestion, seed),
                Err(error) => failure = error,
            }
        }
        Err(Error::unreachable(format_args!("{name}: {failure}")).hint(
            "start `dquant perf serve` there; for other machines it needs an address to listen on",
        ))
    }

    fn greet(
        stream: TcpStream,
        peer: SocketAddr,
        device: Option<DeviceChoice>,
        congestion: Choice,
        seed: u64,
    ) -> Result<Client, Error> {
        let gone = |error: io::Error| lost(peer, &error);
        let mut control = Control::new(stream).map_err(gone)?;
        let local = control.local().map_err(gone)?;
        control.send(&Message::Hello { version: VERSION }).map_err(gone)?;
        match control.receive().map_err(gone)? {
            Message::Welcome { version: VERSION } => Ok(Client {
                control,
                peer,
                local,
                device,
                congestion,
                seed,
                samples_progress: false,
            }),
            Message::Welcome { version } => Err(Error::invalid(format_args!(
                "{peer} speaks version {version} of dquant perf, this is {VERSION}"
            ))
            .hint("use the same version of dquant on both sides")),
            other => Err(unexpected(peer, other)),
        }
    }

    /// From now on, tests of reliable connections also say how far their queue pairs came over
    /// time.
    pub fn sample_progress(&mut self) {
        self.samples_progress = true;
    }

    /// Runs one test.
    ///
    /// # Errors
    /// When the server refuses it or is lost, or a device fails.
    pub fn run(&mut self, test: Test) -> Result<Outcome, Error> {
        if let Some(choice) = &self.device {
            return self.run_on(devices::loaded(choice, test.memory())?, test, true);
        }
        let (ip, memory) = (self.local.ip(), test.memory());
        if test.by_roce_v1 {
            let adapter = devices::roce_v1(ip, self.peer.ip(), memory, self.seed)?;
            return self.run_on(adapter, test, false);
        }
        let mut fallback = None;
        if test.by_xdp {
            match devices::xdp(ip, memory, self.seed) {
                Ok(adapter) => return self.run_on(adapter, test, false),
                Err(why) => fallback = Some(format!("no AF_XDP on this side: {why}")),
            }
        }
        let adapter = devices::software(ip, memory, self.seed, test.refused())?;
        let mut outcome = self.run_on(adapter, test, false)?;
        outcome.fallbacks.extend(fallback);
        Ok(outcome)
    }

    fn run_on<F: Adapter>(
        &mut self,
        mut adapter: F,
        test: Test,
        is_loaded: bool,
    ) -> Result<Outcome, Error> {
        let peer = self.peer;
        let gone = |error: io::Error| lost(peer, &error);
        self.control.send(&Message::Begin(test)).map_err(gone)?;
        let theirs = match self.control.receive().map_err(gone)? {
            Message::Ready(end) => end,
            other => return Err(unexpected(peer, other)),
        };
        check_address(&theirs, peer)?;
        let mut ends = Ends::open(&mut adapter, test, self.seed)?;
        let ours = ends.describe(&adapter, devices::mtu(&adapter, peer));
        let no_path = ends.connect(&mut adapter, &ours, &theirs, self.congestion)?;
        if test.has_pong() && test.has_receives() {
            ends.post_receives(adapter.device())?;
        }
        self.control.send(&Message::Connect(ours.clone())).map_err(gone)?;
        match self.control.receive().map_err(gone)? {
            Message::Connected => {}
            other => return Err(unexpected(peer, other)),
        }
        let driver = driver(&adapter, &self.control)?;
        let recorder = self.samples_progress.then(|| Recorder::new(ends.mtu));
        let mut work =
            Work::new(&mut adapter, &mut self.control, Requester::new(ends), test, is_loaded);
        work.recorder = recorder;
        drive::run(&driver, &mut work);
        let Work { failure, start, end, requester, recorder, .. } = work;
        if let Some(failure) = failure {
            return Err(failure.into_error(peer));
        }
        self.control.send(&Message::Finish(requester.sent())).map_err(gone)?;
        let theirs_found = match self.control.receive().map_err(gone)? {
            Message::Finished(verdict) => verdict,
            other => return Err(unexpected(peer, other)),
        };
        let found = requester.verify(adapter.memory());
        let mut outcome = measured(&test, &start, &end, &requester);
        outcome.mtu = requester.ends.mtu;
        outcome.progress = recorder.map(Recorder::into_samples).unwrap_or_default();
        outcome.path = devices::path(&adapter, is_loaded);
        let there = |why| format!("no AF_XDP at the server: {why}");
        outcome.fallbacks.extend(theirs.no_xdp.map(there));
        let without = |why| format!("no same-host path: {why}");
        outcome.fallbacks.extend(no_path.filter(|_| !is_loaded).map(without));
        outcome.selective = ours.selective && theirs.selective;
        for Verdict { verified_bytes, wrong_buffers, out_of_order } in [found, theirs_found] {
            outcome.verified_bytes += verified_bytes;
            outcome.mismatches += wrong_buffers;
            if test.service == Service::Rc {
                outcome.mismatches += out_of_order;
            }
        }
        Ok(outcome)
    }
}

/// The difference of two points in time.
fn measured(test: &Test, start: &Point, end: &Point, requester: &Requester) -> Outcome {
    let seconds = |ns: u64| ns as f64 / 1e9;
    // Over unreliable services only the server knows what arrived.
    let by_server = test.mode == Mode::Bandwidth && test.service != Service::Rc;
    let theirs = (&start.server, &end.server);
    let server_ns = theirs.1.at_ns.saturating_sub(theirs.0.at_ns);
    let (ns, messages) = match by_server {
        true => (server_ns, theirs.1.received - theirs.0.received.min(theirs.1.received)),
        false => (end.at.since(start.at).as_nanos(), end.completed - start.completed),
    };
    let lost_there = theirs.1.lost.saturating_sub(theirs.0.lost);
    let resent = |early: Option<u64>, late: Option<u64>| Some(late?.saturating_sub(early?));
    let ours = resent(start.retransmitted, end.retransmitted);
    let others = resent(theirs.0.retransmitted, theirs.1.retransmitted);
    Outcome {
        seconds: seconds(ns),
        messages,
        latency: Latency::of(&requester.latencies),
        cpu_s: [
            seconds(end.cpu_ns.saturating_sub(start.cpu_ns)),
            seconds(theirs.1.cpu_ns.saturating_sub(theirs.0.cpu_ns)),
        ],
        retransmitted: ours.zip(others).map(|(ours, others)| ours + others),
        lost: if test.mode == Mode::Latency { end.lost - start.lost } else { lost_there },
        ..Outcome::default()
    }
}

fn unexpected(peer: SocketAddr, message: Message) -> Error {
    match message {
        Message::Refused { why, hint } => {
            Error::invalid(format_args!("{peer} refuses: {why}")).hint(hint)
        }
        other => Error::invalid(format_args!("{peer} said {other:?} out of turn")),
    }
}

/// A driver that wakes for packets and for control messages.
pub(super) fn driver<F: Adapter>(adapter: &F, control: &Control) -> Result<Driver, Error> {
    let no_driver = |error| Error::because("cannot wait for packets", &error);
    let driver = drive::driver(adapter).map_err(no_driver)?;
    driver.watched().add(control.fd(), 1).map_err(no_driver)?;
    Ok(driver)
}

/// How long a spinning side has nothing to do before it yields: more than a round trip takes, and a
/// yield takes as long as several turns.
const SPIN_ALONE: Duration = Duration::from_micros(10);

/// Notes whether a turn did something. The other side may be waiting for the same core: after a
/// while without work this thread yields.
pub(super) fn yield_if_idle(progress: &Progress, now: Time, idle_since: &mut Option<Time>) {
    if !progress.is_idle() {
        *idle_since = None;
    } else if now.since(*idle_since.get_or_insert(now)) >= SPIN_ALONE {
        std::thread::yield_now();
    }
}

/// Why the turns of a test ended early.
#[derive(Debug)]
pub(super) enum Failure {
    /// The control connection.
    Control(io::Error),
    /// The device, or a work request.
    Device(String),
}

impl Failure {
    pub(super) fn into_error(self, peer: SocketAddr) -> Error {
        match self {
            Failure::Control(error) => lost(peer, &error),
            Failure::Device(why) => Error::unreachable(format_args!("{peer}: {why}"))
                .hint("do packets of UDP port 4791 (RoCEv1: of EtherType 0x8915) pass in both directions? `dquant doctor` examines a machine"),
        }
    }
}

/// The next trouble that ends a test; others are for people to read.
pub(super) fn take_trouble<F: Adapter>(adapter: &mut F) -> Option<Failure> {
    drive::take_trouble(adapter, service::log::line).map(Failure::Device)
}

/// The parts of a test.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    WarmUp {
        until: Time,
    },
    /// The server's first snapshot is on its way.
    Starting,
    Measuring {
        until: Time,
    },
    /// The second one is.
    Stopping,
    Draining {
        until: Time,
    },
}

/// One point in time on both sides.
#[derive(Clone, Copy, Debug, Default)]
struct Point {
    at: Time,
    completed: u64,
    lost: u64,
    cpu_ns: u64,
    retransmitted: Option<u64>,
    server: Snapshot,
}

struct Work<'a, F> {
    adapter: &'a mut F,
    control: &'a mut Control,
    requester: Requester,
    test: Test,
    is_loaded: bool,
    phase: Phase,
    looked: Time,
    recorder: Option<Recorder>,
    start: Point,
    end: Point,
    idle_since: Option<Time>,
    failure: Option<Failure>,
}

impl<'a, F: Adapter> Work<'a, F> {
    fn new(
        adapter: &'a mut F,
        control: &'a mut Control,
        requester: Requester,
        test: Test,
        is_loaded: bool,
    ) -> Work<'a, F> {
        let now = clock::now();
        // Windows, round-trip times and caches settle; a tenth of the test.
        let warm_up = Duration::from_micros(u64::from(test.millis) * 100 + 10_000);
        Work {
            adapter,
            control,
            requester,
            test,
            is_loaded,
            phase: Phase::WarmUp { until: now + warm_up },
            looked: now,
            recorder: None,
            start: Point::default(),
            end: Point::default(),
            idle_since: None,
            failure: None,
        }
    }

    fn point(&self, now: Time) -> Point {
        Point {
            at: now,
            completed: self.requester.completed,
            lost: self.requester.lost,
            cpu_ns: devices::cpu_ns(self.is_loaded),
            retransmitted: devices::retransmitted(self.adapter),
            server: Snapshot::default(),
        }
    }

    /// Goes on to the next part when its time has come. `true`: the test is over.
    fn advance(&mut self, now: Time) -> Result<bool, Failure> {
        let heard = self.look(now)?;
        match (self.phase, heard) {
            (Phase::WarmUp { until }, _) if now >= until => {
                self.control.send(&Message::Mark).map_err(Failure::Control)?;
                self.phase = Phase::Starting;
            }
            (Phase::Starting, Some(server)) => {
                self.start = Point { server, ..self.point(now) };
                self.requester.is_measuring = true;
                let length = Duration::from_micros(u64::from(self.test.millis) * 1000);
                self.phase = Phase::Measuring { until: now + length };
            }
            (Phase::Measuring { until }, _) if now >= until && self.has_result(now, until) => {
                self.requester.is_measuring = false;
                self.end = self.point(now);
                self.control.send(&Message::Mark).map_err(Failure::Control)?;
                self.phase = Phase::Stopping;
            }
            (Phase::Stopping, Some(server)) => {
                self.end.server = server;
                self.requester.is_ending = true;
                self.phase = Phase::Draining { until: now + DRAIN_LIMIT };
            }
            (Phase::Draining { .. }, _) if self.requester.is_drained() => return Ok(true),
            (Phase::Draining { until }, _) if now >= until => {
                return Err(Failure::Device("messages under way never complete".to_owned()));
            }
            _ => {}
        }
        Ok(false)
    }

    /// Whether anything was measured: on a loaded machine, or with long messages, that may take
    /// longer than asked.
    fn has_result(&self, now: Time, until: Time) -> bool {
        self.requester.completed > self.start.completed || now >= until + DRAIN_LIMIT
    }

    /// A snapshot, if one has come. Also notices a server that has gone.
    fn look(&mut self, now: Time) -> Result<Option<Snapshot>, Failure> {
        if now.since(self.looked) < LOOK_EVERY {
            return Ok(None);
        }
        self.looked = now;
        self.record(now);
        match self.control.poll().map_err(Failure::Control)? {
            None => Ok(None),
            Some(Message::Marked(snapshot)) => Ok(Some(snapshot)),
            Some(Message::Refused { why, .. }) => Err(Failure::Device(why)),
            Some(other) => Err(Failure::Device(format!("it said {other:?} out of turn"))),
        }
    }

    /// Takes a sample of every queue pair.
    fn record(&mut self, now: Time) {
        let Work { recorder: Some(recorder), adapter, requester, .. } = self else {
            return;
        };
        for (flow, link) in (0..).zip(requester.ends.mesh.links()) {
            if let Some(progress) = adapter.progress(link.qpn) {
                recorder.take(now, flow, &progress);
            }
        }
    }

    /// When something is due without any packet.
    fn due(&self, now: Time) -> Option<Time> {
        let phase = match self.phase {
            Phase::WarmUp { until } | Phase::Measuring { until } => until.max(now + LOOK_EVERY),
            Phase::Starting | Phase::Stopping | Phase::Draining { .. } => now + LOOK_EVERY,
        };
        let look = self.test.is_silent(self.is_loaded).then(|| now + LOOK_AT_MEMORY);
        let sample = self.recorder.is_some().then(|| now + LOOK_EVERY);
        self.adapter.next_wakeup().into_iter().chain([phase]).chain(look).chain(sample).min()
    }
}

impl<F: Adapter> Owner for Work<'_, F> {
    type Adapter = F;

    fn adapter(&mut self) -> &mut F {
        self.adapter
    }

    fn turn(&mut self, now: Time) -> Turn {
        let requester = &mut self.requester;
        let progress = self.adapter.turn(now, |device, pool| requester.step(now, device, pool));
        let failed = self.requester.failure.take().map(Failure::Device);
        let failed = failed.or_else(|| take_trouble(self.adapter));
        let ended = failed.map_or_else(|| self.advance(now), Err);
        match ended {
            Ok(false) if self.test.spin => {
                yield_if_idle(&progress, now, &mut self.idle_since);
                Turn::Busy
            }
            Ok(false) if !progress.is_idle() => Turn::Busy,
            Ok(false) => Turn::Idle(self.due(now)),
            Ok(true) => Turn::Stop,
            Err(failure) => {
                self.failure = Some(failure);
                Turn::Stop
            }
        }
    }
}
