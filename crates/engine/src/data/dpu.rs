//! The DPU's engine: streams between storage targets and the rings of host processes.
//!
//! Each stream is an [`xio::reader::Reader`] with a ring. The same engine runs in the DPU daemon
//! and, without offload, inside the host process: only the process that pays for its CPU time
//! differs.

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::thread::JoinHandle;

use adapter::connect::QpAddress;
use adapter::drive::{self, Owner};
use adapter::owned::Adapter;
use adapter::software::LocalPeer;
use host::ring::{Producer, ProducerCounters};
use nic::clock;
use nic::driver::Turn;
use nic::local_peers::{Shared, Unfinished};
use nic::pool::PoolRange;
use nic::ready::ReadySet;
use roce::Time;
use roce::device::Device;
use roce::endpoint::Mtu;
use roce::verbs::{Access, CqId, MemoryRegion, PdId, Qpn, WcStatus};
use service::log;
use xio::reader::{
    CREDIT_BYTES, ConnectionMemory, Reader, ReaderCounters, ReaderResources, ReaderSetup,
};
use xio::target::MAX_CREDITS;

use super::{
    Commands, Disposer, EngineError, Host, HostConfig, Inbox, Refused, Signals, Turns, Work,
};
use crate::budget::Lease;
use crate::data::sink::RingSink;
use crate::status::Counters;

/// Streams at once. A stream's resources are bounded by memory; this bounds the work of an engine
/// in each turn.
pub const MAX_STREAMS: usize = 256;

/// Completions of a stream that may be waiting to be polled, in each direction.
const COMPLETIONS: u32 = 4096;

/// Memory for the capsules of a connection, whatever credits its target gives.
pub(crate) const CAPSULES_BYTES: u64 = MAX_CREDITS as u64 * CREDIT_BYTES;

/// Names a stream of one engine; never used twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(u64);

/// A stream to begin.
#[derive(Debug)]
pub struct StreamSpec {
    /// The order of samples, computed up to where the stream begins, and what to deliver.
    pub setup: ReaderSetup,
    /// Names of the datasets, in the plan's order, for messages.
    pub names: Vec<String>,
    /// The module of `wasm`, for messages.
    pub module: Option<String>,
    /// Names of the targets, one connection each, for messages.
    pub targets: Vec<String>,
    /// The rings to fill, one for each rank of the delivery's share.
    pub producers: Vec<Producer>,
    /// Where lost connections are reported.
    pub events: tokio::sync::mpsc::Sender<Event>,
    /// Flags that the engine checks for the stream's end.
    pub signals: Signals,
    /// Their share of the memory for rings and tables of documents, returned when they are freed.
    pub leases: Vec<Lease>,
}

/// What an engine reports about a stream.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// The queue pair of this connection failed; it needs a new one.
    Lost {
        /// Which connection of the stream.
        connection: u32,
        /// Status of its failed work request.
        why: WcStatus,
    },
}

impl fmt::Display for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// State and counters of a stream.
#[derive(Clone, Debug)]
pub struct StreamReport {
    /// Batches, bytes, errors.
    pub counters: ReaderCounters,
    /// Bytes of finished batches; the counters include a batch in progress, too.
    pub published_bytes: u64,
    /// Why it ended early, if it did.
    pub failure: Option<String>,
}

/// Commands of the control plane.
#[derive(Debug)]
pub enum Command {
    /// Begin a stream.
    Open(Box<StreamSpec>, SyncSender<Result<StreamId, Refused>>),
    /// Make a queue pair for a connection of the stream.
    NewQp(StreamId, u32, SyncSender<Result<QpAddress, EngineError>>),
    /// Connect that queue pair to the target's, with its number of credits.
    Connect(StreamId, Peer, SyncSender<Result<(), EngineError>>),
    /// Report on the stream.
    Stream(StreamId, SyncSender<Option<StreamReport>>),
    /// Report counters.
    Status(SyncSender<Counters>),
}

/// The target's end of a connection.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Which connection of the stream.
    pub connection: u32,
    /// Our queue pair, made by [`Command::NewQp`].
    pub ours: Qpn,
    /// The target's queue pair.
    pub theirs: QpAddress,
    /// Path MTU.
    pub mtu: Mtu,
    /// Outstanding requests that the target allows us.
    pub credits: u32,
    /// The target's process, if packets to it need no socket, or why they do.
    pub local: LocalPeer,
}

/// A running DPU engine.
#[derive(Debug)]
pub struct DpuEngine {
    /// Where commands go.
    pub commands: Commands<Command>,
    /// Address of the RoCE endpoint.
    pub roce: SocketAddr,
    /// What finds out which targets are processes of this machine, or why none are.
    pub discovery: Result<Arc<Shared>, String>,
    /// Paths chosen, and why.
    pub notes: Vec<String>,
    /// The thread.
    pub thread: Option<JoinHandle<()>>,
}

/// A queue pair of a stream.
struct Line {
    connection: u32,
    ours: QpAddress,
}

/// What a stream's queue pairs work with. The protection domain is its own: a target that serves
/// one stream cannot access the memory of another, whatever keys it knows.
#[derive(Clone, Copy)]
struct Domain {
    pd: PdId,
    data: (PoolRange, MemoryRegion),
    /// Those of every connection, one after the other. They last as long as the stream: another one
    /// must not take their memory while this one has lost its target.
    capsules: (PoolRange, MemoryRegion),
    cqs: (CqId, CqId),
}

impl Domain {
    fn open<F: Adapter>(
        host: &mut Host<F>,
        bytes: u64,
        connections: u32,
    ) -> Result<Domain, EngineError> {
        let pd = host.device().alloc_pd()?;
        let made = Domain::open_in(host, pd, bytes, connections);
        if made.is_err() {
            host.dealloc_pd(pd);
        }
        made
    }

    fn open_in<F: Adapter>(
        host: &mut Host<F>,
        pd: PdId,
        bytes: u64,
        connections: u32,
    ) -> Result<Domain, EngineError> {
        let data = host.register(pd, bytes, Access::REMOTE_WRITE)?;
        let capsules = host.register(pd, u64::from(connections) * CAPSULES_BYTES, Access::LOCAL);
        let made = capsules.and_then(|capsules| match host.create_cqs(COMPLETIONS) {
            Ok(cqs) => Ok(Domain { pd, data, capsules, cqs }),
            Err(error) => {
                host.deregister(capsules.0, &capsules.1);
                Err(error)
            }
        });
        if made.is_err() {
            host.deregister(data.0, &data.1);
        }
        made
    }

    /// The capsules of a connection, which is one of the stream's.
    fn capsules_of(&self, connection: u32) -> MemoryRegion {
        let before = u64::from(connection) * CAPSULES_BYTES;
        MemoryRegion { addr: self.capsules.1.addr + before, ..self.capsules.1 }
    }

    /// Called after its queue pairs are destroyed.
    fn close<F: Adapter>(self, host: &mut Host<F>) {
        host.destroy_cq(self.cqs.0);
        host.destroy_cq(self.cqs.1);
        host.deregister(self.capsules.0, &self.capsules.1);
        host.deregister(self.data.0, &self.data.1);
        host.dealloc_pd(self.pd);
    }
}

struct Stream {
    id: StreamId,
    reader: Reader,
    sink: RingSink,
    domain: Domain,
    lines: Vec<Line>,
    /// What local peers had begun to write when a queue pair was dropped.
    unfinished: Unfinished,
    events: tokio::sync::mpsc::Sender<Event>,
    signals: Signals,
    leases: Vec<Lease>,
}

struct Engine<F> {
    host: Host<F>,
    /// Where the credits of streams are awaited.
    watched: ReadySet,
    streams: Vec<Stream>,
    commands: Inbox<Command>,
    next_id: u64,
    /// Counters of streams that have ended.
    ended: Counters,
    turns: Turns,
    disposer: Disposer,
}

impl DpuEngine {
    /// Starts the engine.
    pub fn start(config: HostConfig) -> Result<DpuEngine, EngineError> {
        match &config.device {
            None => DpuEngine::start_on(Host::software(&config)?),
            Some(choice) => DpuEngine::start_on(Host::loaded(&config, choice)?),
        }
    }

    pub(super) fn start_on<F: Adapter + Send + 'static>(
        host: Host<F>,
    ) -> Result<DpuEngine, EngineError> {
        let notes = host.notes();
        let (roce, discovery) = (host.adapter.local(), host.adapter.discovery());
        let driver = host.driver()?;
        let disposer = Disposer::start();
        let disposer = disposer.map_err(|source| EngineError::Os { what: "thread", source })?;
        let (commands, inbox) = Commands::new(driver.waker());
        let mut engine = Engine {
            host,
            watched: driver.watched().clone(),
            streams: Vec::new(),
            commands: inbox,
            next_id: 1,
            ended: Counters::of_stream(&ReaderCounters::default(), &ProducerCounters::default()),
            turns: Turns::new(clock::now()),
            disposer,
        };
        let thread = std::thread::Builder::new()
            .name("dquant-dpu".into())
            .spawn(move || drive::run(&driver, &mut engine))
            .map_err(|source| EngineError::Os { what: "DPU thread", source })?;
        Ok(DpuEngine { commands, roce, discovery, notes, thread: Some(thread) })
    }

    /// Whether its thread has ended.
    pub fn has_stopped(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for DpuEngine {
    fn drop(&mut self) {
        self.commands.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl<F: Adapter> Owner for Engine<F> {
    type Adapter = F;

    fn adapter(&mut self) -> &mut F {
        &mut self.host.adapter
    }

    fn turn(&mut self, now: Time) -> Turn {
        self.turns.begin(now);
        let Engine { host, streams, turns, .. } = self;
        let progress = host.turn(now, |device, pool| {
            turns.spent(Work::Packets);
            let mut worked = false;
            for Stream { reader, sink, .. } in streams {
                sink.begin_turn(now);
                worked |= reader.poll(now, device, pool, sink);
                turns.spent(Work::Stream);
            }
            worked
        });
        self.turns.spent(Work::Packets);
        if progress.worked {
            let Engine { host, streams, .. } = self;
            streams.iter_mut().for_each(|stream| stream.drop_failed(host));
        }
        let gone = self.host.take_trouble();
        if gone.is_some() || self.commands.is_stopped() {
            self.stop(gone.as_deref());
            self.commands.set_failure(gone);
            return Turn::Stop;
        }
        // Also under full load: streams must open and close then, too.
        let busy = self.take_signal() || self.take_command() || !progress.is_idle();
        self.disposer.hand_over();
        self.host.next_turn(busy)
    }

    /// Signals every host that waits, and announces which credits we wait for.
    fn prepare_sleep(&mut self) -> bool {
        self.turns.slept();
        let mut is_idle = true;
        for stream in &mut self.streams {
            // For every one, even after one that has work: `woken` undoes it.
            is_idle &= stream.sink.prepare_sleep();
        }
        is_idle
    }

    fn woken(&mut self) {
        self.streams.iter_mut().for_each(|stream| stream.sink.after_sleep());
    }

    fn has_work(&mut self) -> bool {
        self.streams.iter_mut().any(|stream| stream.sink.has_credit())
    }

    fn note_rescue(&mut self) {
        self.turns.rescued();
    }
}

impl<F: Adapter> Engine<F> {
    /// Ends every stream with a reason that its client finds in the ring.
    fn stop(&mut self, gone: Option<&str>) {
        let why = gone.unwrap_or("the DPU stops");
        for stream in &mut self.streams {
            stream.sink.stop(gone.unwrap_or("the DPU daemon was stopped"));
            let (id, counters) = (stream.id, stream.reader.counters());
            let (batches, bytes) = (counters.batches, stream.sink.counters().bytes);
            log::line(format_args!("stream {id} ends, {why}: {batches} batches, {bytes} bytes"));
        }
    }

    /// Handles one stream with raised signals; whether there was one.
    fn take_signal(&mut self) -> bool {
        let raised = self.streams.iter().position(|stream| stream.signals.is_raised());
        raised.map(|index| self.heed(index)).is_some()
    }

    fn heed(&mut self, index: usize) {
        let Some(stream) = self.streams.get_mut(index) else { return };
        let Some(raised) = stream.signals.take() else { return };
        if raised.close {
            self.close(index);
            self.turns.spent(Work::Close);
            return;
        }
        for connection in raised.dropped {
            stream.reader.drop_connection(connection);
        }
        // An idle stream has no turn with work that would do it.
        stream.drop_failed(&mut self.host);
        if let Some((connection, why)) = raised.abandoned {
            stream.sink.set_loss(why);
            stream.reader.abandon(&mut stream.sink, connection);
        }
        if let Some(why) = raised.rank_left.filter(|_| !stream.reader.has_ended()) {
            stream.reader.stop(&mut stream.sink);
            stream.sink.end_for_rank(why);
        }
        self.turns.spent(Work::Drop);
    }

    /// Whether there was a command.
    fn take_command(&mut self) -> bool {
        let Some(command) = self.commands.take() else {
            return false;
        };
        // A caller that gave up waiting for a reply closes the stream, so a reply without a
        // receiver loses nothing.
        let work = match command {
            Command::Open(spec, reply) => {
                drop(reply.send(self.open(spec)));
                Work::Open
            }
            Command::NewQp(id, connection, reply) => {
                // Earlier signals about the queue pair that this one replaces come first.
                let said = self.streams.iter().position(|s| s.id == id && s.signals.is_raised());
                if let Some(index) = said {
                    self.heed(index);
                }
                drop(reply.send(self.new_qp(id, connection)));
                Work::NewQp
            }
            Command::Connect(id, peer, reply) => {
                drop(reply.send(self.connect(id, &peer)));
                Work::Connect
            }
            Command::Stream(id, reply) => {
                let report = self.stream(id).map(|stream| StreamReport {
                    counters: *stream.reader.counters(),
                    published_bytes: stream.sink.counters().bytes,
                    failure: stream.sink.failure().map(str::to_owned),
                });
                let _ = reply.send(report);
                Work::Status
            }
            Command::Status(reply) => {
                drop(reply.send(self.status()));
                Work::Status
            }
        };
        self.turns.spent(work);
        true
    }

    fn stream(&mut self, id: StreamId) -> Option<&mut Stream> {
        self.streams.iter_mut().find(|stream| stream.id == id)
    }

    /// On refusal the request is returned, so that its creator frees it.
    fn open(&mut self, spec: Box<StreamSpec>) -> Result<StreamId, Refused> {
        let domain = match self.domain_for(&spec) {
            Ok(domain) => domain,
            Err(error) => return Err(Refused::new(error, spec)),
        };
        let (data, (send_cq, recv_cq)) = (domain.data.1, domain.cqs);
        let resources = ReaderResources { data, send_cq, recv_cq };
        let StreamSpec { setup, names, module, targets, producers, events, signals, leases } =
            *spec;
        let connections = targets.len() as u32;
        let reader = Reader::new(setup, connections, resources, host::kernels::best().0);
        let mut sink = RingSink::new(producers, names, targets);
        sink.set_module(module);
        if let Err(source) = self.watch_credits(&sink) {
            domain.close(&mut self.host);
            let error = EngineError::Os { what: "credits of the ring", source };
            return Err(Refused::new(error, (sink, leases)));
        }
        let id = StreamId(self.next_id);
        self.next_id += 1;
        let (lines, unfinished) = (Vec::new(), Unfinished::default());
        let stream =
            Stream { id, reader, sink, domain, lines, unfinished, events, signals, leases };
        self.streams.push(stream);
        Ok(id)
    }

    /// Watches the credits of every ring, or of none.
    fn watch_credits(&self, sink: &RingSink) -> std::io::Result<()> {
        for (watched, credit) in sink.credit_fds().enumerate() {
            if let Err(error) = self.watched.add_edges(credit, 2) {
                sink.credit_fds().take(watched).for_each(|credit| self.unwatch(credit));
                return Err(error);
            }
        }
        Ok(())
    }

    fn unwatch(&self, credit: BorrowedFd<'_>) {
        let gone = self.watched.remove(credit);
        debug_assert!(gone.is_ok(), "{gone:?}");
    }

    fn domain_for(&mut self, spec: &StreamSpec) -> Result<Domain, EngineError> {
        if self.disposer.waiting() > 0 {
            return Err(EngineError::Unavailable(
                "is overloaded: it is still freeing ended streams",
            ));
        }
        let (need, have) = (self.streams.len() as u64 + 1, MAX_STREAMS as u64);
        if need > have {
            return Err(EngineError::Limit { what: "streams", need, have });
        }
        let (data, connections) = (spec.setup.memory_bytes(), spec.targets.len() as u32);
        let have = self.host.adapter.memory().free_bytes();
        EngineError::check_staging(data + u64::from(connections) * CAPSULES_BYTES, have)?;
        Domain::open(&mut self.host, data, connections)
    }

    fn new_qp(&mut self, id: StreamId, connection: u32) -> Result<QpAddress, EngineError> {
        let stream = self.streams.iter_mut().find(|stream| stream.id == id);
        let stream = stream.ok_or(EngineError::Unavailable("has closed the stream"))?;
        stream.drop_line(&mut self.host, connection);
        let Domain { pd, cqs, .. } = stream.domain;
        let address = self.host.create_qp(pd, cqs, 2 * MAX_CREDITS)?;
        stream.lines.push(Line { connection, ours: address });
        Ok(address)
    }

    fn connect(&mut self, id: StreamId, peer: &Peer) -> Result<(), EngineError> {
        let stream = self.streams.iter_mut().find(|stream| stream.id == id);
        let stream = stream.ok_or(EngineError::Unavailable("has closed the stream"))?;
        if !stream.unfinished.is_over() {
            // Its old bytes must not arrive on top of what is requested again.
            return Err(EngineError::Unavailable("waits for a target that was stopped in a copy"));
        }
        let credits = peer.credits.clamp(1, MAX_CREDITS);
        let line = stream.lines.iter_mut().find(|line| line.ours.qpn == peer.ours);
        let line = line.ok_or(EngineError::Unavailable("has dropped that queue pair"))?;
        let capsules = stream.domain.capsules_of(line.connection);
        self.host.connect(&line.ours, &peer.theirs, peer.mtu, peer.local.clone())?;
        let memory = ConnectionMemory { capsules, credits };
        let Host { adapter, now, .. } = &mut self.host;
        Ok(stream.reader.connect(*now, adapter.device(), peer.connection, peer.ours, memory)?)
    }

    fn close(&mut self, index: usize) {
        let mut stream = self.streams.swap_remove(index);
        stream.sink.credit_fds().for_each(|credit| self.unwatch(credit));
        while let Some(line) = stream.lines.first() {
            let connection = line.connection;
            stream.drop_line(&mut self.host, connection);
        }
        stream.domain.close(&mut self.host);
        self.ended.add(&stream.counters());
        let Stream { reader, sink, leases, events, .. } = stream;
        // In this order: the memory is free when its share is given back.
        self.disposer.dispose((reader, sink, leases, events));
    }

    fn status(&self) -> Counters {
        let mut counters = Counters::of_fabric(&self.host.adapter);
        counters.set("dpu.streams", self.streams.len() as u64);
        counters.set("dpu.memory_free_bytes", self.host.adapter.memory().free_bytes());
        counters.add(&self.ended);
        self.streams.iter().for_each(|stream| counters.add(&stream.counters()));
        self.turns.report(&mut counters);
        counters
    }
}

impl Stream {
    fn counters(&self) -> Counters {
        Counters::of_stream(self.reader.counters(), &self.sink.counters())
    }

    /// Drops queue pairs that have failed, and reports them.
    fn drop_failed<F: Adapter>(&mut self, host: &mut Host<F>) {
        while let Some((connection, _, why)) = self.reader.lost_connection() {
            self.drop_line(host, connection);
            // Without a receiver the stream is about to be closed.
            let _ = self.events.try_send(Event::Lost { connection, why });
        }
    }

    /// Destroys the queue pair of a connection, so that nothing more can arrive on it.
    fn drop_line<F: Adapter>(&mut self, host: &mut Host<F>, connection: u32) {
        let found = self.lines.iter().position(|line| line.connection == connection);
        let Some(index) = found else { return };
        let line = self.lines.swap_remove(index);
        host.destroy_qp(line.ours.qpn);
        self.unfinished.and(host.adapter.unfinished());
    }
}
