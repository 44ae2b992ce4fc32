//! The DPU's engine: streams between storage targets and the rings of host processes.
//!
//! Each stream is an [`xio::reader::Reader`] with a ring. The same engine runs in the DPU daemon and,
//! without offload, inside the host process: only who pays for its CPU differs.

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::mpsc::{Receiver, SyncSender};
use std::thread::JoinHandle;

use nic::clock;
use nic::pool::PoolRange;
use nic::ring::{Producer, ProducerCounters};
use nic::waiter::Waiter;
use roce::endpoint::Mtu;
use roce::verbs::{Access, CqId, MemoryRegion, Qpn, WcStatus};
use xio::order::Order;
use xio::reader::{
    CREDIT_BYTES, ConnectionMemory, Delivery, Reader, ReaderCounters, ReaderResources, ReaderSource,
};

use super::{Commands, EngineError, Host, HostConfig, Idle, QpAddress, sleep};
use crate::engine::sink::RingSink;
use crate::status::{self, Counters};

/// Streams at once: one sleep watches the credits of all of them.
pub const MAX_STREAMS: usize = 12;

/// Slots that must be ready before a sleeping host is woken. A wake-up costs the host more than it
/// spends on a slot, so it is worth waiting for a few; the engine rings before it sleeps in any case.
const DOORBELL_SLOTS: u32 = 4;

/// Names a stream of one engine; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(u64);

/// A stream to begin.
#[derive(Debug)]
pub struct StreamSpec {
    /// The order of samples.
    pub order: Order,
    /// Datasets, in the plan's order.
    pub sources: Vec<ReaderSource>,
    /// Names of the datasets, for messages.
    pub names: Vec<String>,
    /// Names of the targets, one connection each, for messages.
    pub targets: Vec<String>,
    /// What to deliver.
    pub delivery: Delivery,
    /// The ring to fill.
    pub producer: Producer,
    /// Where lost connections are reported.
    pub events: tokio::sync::mpsc::Sender<Event>,
}

/// What an engine reports about a stream.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// The queue pair of this connection failed; it needs a new one.
    Lost {
        /// Which connection of the stream.
        connection: u32,
        /// How its work request ended.
        why: WcStatus,
    },
}

impl fmt::Display for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What a stream did so far.
#[derive(Clone, Debug)]
pub struct StreamReport {
    /// Batches, bytes, mishaps.
    pub counters: ReaderCounters,
    /// Why it ended early, if it did.
    pub failure: Option<String>,
}

/// What the control plane may ask.
#[derive(Debug)]
pub enum Command {
    /// Begin a stream.
    Open(Box<StreamSpec>, SyncSender<Result<StreamId, EngineError>>),
    /// Make a queue pair for a connection of the stream.
    NewQp(StreamId, u32, SyncSender<Result<QpAddress, EngineError>>),
    /// Connect that queue pair to the target's, with so many credits.
    Connect(StreamId, Peer, SyncSender<Result<(), EngineError>>),
    /// The control channel of a connection closed: treat it as lost.
    Drop(StreamId, u32),
    /// The connection cannot be restored, for this reason: end the stream with an error.
    Abandon(StreamId, u32, String),
    /// Report what the stream did.
    Stream(StreamId, SyncSender<Option<StreamReport>>),
    /// End a stream.
    Close(StreamId),
    /// Report counters.
    Status(SyncSender<Counters>),
    /// End the engine.
    Stop,
}

/// The target's end of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// Which connection of the stream.
    pub connection: u32,
    /// Our queue pair, made by [`Command::NewQp`].
    pub ours: Qpn,
    /// The target's queue pair.
    pub theirs: QpAddress,
    /// Path MTU.
    pub mtu: Mtu,
    /// Requests that the target lets us have outstanding.
    pub credits: u32,
}

/// A running DPU engine.
#[derive(Debug)]
pub struct DpuEngine {
    /// Where commands go.
    pub commands: Commands<Command>,
    /// Address of the RoCE endpoint.
    pub roce: SocketAddr,
    /// Paths chosen, and why.
    pub notes: Vec<String>,
    /// The thread.
    pub thread: Option<JoinHandle<()>>,
}

/// A queue pair of a stream and the memory of its capsules.
struct Line {
    connection: u32,
    qpn: Qpn,
    capsules: Option<(PoolRange, MemoryRegion)>,
}

struct Stream {
    id: StreamId,
    reader: Reader,
    sink: RingSink,
    data: (PoolRange, MemoryRegion),
    cqs: (CqId, CqId),
    lines: Vec<Line>,
    events: tokio::sync::mpsc::Sender<Event>,
}

struct Engine {
    host: Host,
    streams: Vec<Stream>,
    commands: Receiver<Command>,
    next_id: u64,
    ended: ReaderCounters,
    ended_rings: ProducerCounters,
}

impl DpuEngine {
    /// Starts the engine.
    pub fn start(config: HostConfig) -> Result<DpuEngine, EngineError> {
        let host = Host::new(&config)?;
        let notes = host.notes();
        let roce = host.local;
        let waiter = Waiter::new().map_err(|source| EngineError::Os { what: "eventfd", source })?;
        let (commands, receiver) = Commands::new(&waiter);
        let engine = Engine {
            host,
            streams: Vec::new(),
            commands: receiver,
            next_id: 1,
            ended: ReaderCounters::default(),
            ended_rings: ProducerCounters::default(),
        };
        let thread = std::thread::Builder::new()
            .name("dquant-dpu".into())
            .spawn(move || engine.run(&waiter))
            .map_err(|source| EngineError::Os { what: "DPU thread", source })?;
        Ok(DpuEngine { commands, roce, notes, thread: Some(thread) })
    }

    /// Whether its thread is gone.
    pub fn has_stopped(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for DpuEngine {
    fn drop(&mut self) {
        // A stopped engine refuses the command, and joining it then returns at once.
        let _ = self.commands.send(Command::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Engine {
    fn run(mut self, waiter: &Waiter) {
        let mut idle = Idle::default();
        loop {
            let mut busy = self.host.drain();
            for stream in &mut self.streams {
                busy |= stream.poll(&mut self.host);
            }
            // Also when there is plenty to do: streams must open and close under full load.
            match self.take_commands() {
                Some(taken) => busy |= taken,
                None => return,
            }
            if busy {
                idle.busy();
                continue;
            }
            if idle.is_over(clock::now()) {
                self.sleep(waiter);
                idle.busy();
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// Rings every host that waits, announces which credits we wait for, and sleeps.
    fn sleep(&mut self, waiter: &Waiter) {
        let mut blocked = true;
        for stream in &mut self.streams {
            blocked &= stream.sink.prepare_sleep();
        }
        if blocked {
            let mut fds: Vec<BorrowedFd<'_>> = vec![self.host.wire.inner().fd()];
            fds.extend(self.streams.iter().filter_map(|stream| stream.sink.credit_fd()));
            sleep(&self.host, waiter, &fds);
        }
        for stream in &mut self.streams {
            stream.sink.after_sleep();
        }
    }

    /// Whether there was a command; `None` when the engine is to end.
    fn take_commands(&mut self) -> Option<bool> {
        let Ok(command) = self.commands.try_recv() else {
            return Some(false);
        };
        // Whoever gave up waiting for a reply closes the stream by another command: nothing is lost
        // with a reply that finds no receiver.
        match command {
            Command::Open(spec, reply) => drop(reply.send(self.open(*spec))),
            Command::NewQp(id, connection, reply) => drop(reply.send(self.new_qp(id, connection))),
            Command::Connect(id, peer, reply) => drop(reply.send(self.connect(id, &peer))),
            Command::Drop(id, connection) => {
                if let Some(stream) = self.stream(id) {
                    stream.reader.drop_connection(connection);
                }
            }
            Command::Abandon(id, connection, why) => {
                if let Some(stream) = self.stream(id) {
                    stream.sink.set_loss(why);
                    stream.reader.abandon(&mut stream.sink, connection);
                }
            }
            Command::Stream(id, reply) => {
                let report = self.stream(id).map(|stream| StreamReport {
                    counters: *stream.reader.counters(),
                    failure: stream.sink.failure().map(str::to_owned),
                });
                let _ = reply.send(report);
            }
            Command::Close(id) => self.close(id),
            Command::Status(reply) => drop(reply.send(self.status())),
            Command::Stop => return None,
        }
        Some(true)
    }

    fn stream(&mut self, id: StreamId) -> Option<&mut Stream> {
        self.streams.iter_mut().find(|stream| stream.id == id)
    }

    fn open(&mut self, spec: StreamSpec) -> Result<StreamId, EngineError> {
        let (need, have) = (self.streams.len() as u64 + 1, MAX_STREAMS as u64);
        if need > have {
            return Err(EngineError::Limit { what: "streams", need, have });
        }
        let need = Reader::memory_needed(&spec.order, &spec.sources);
        let have = self.host.pool.free_bytes();
        if need > have {
            return Err(EngineError::Limit { what: "bytes of registers", need, have });
        }
        let data = self.host.register(need, Access::REMOTE_WRITE)?;
        let depth = 4096;
        let cqs = (self.host.endpoint.create_cq(depth)?, self.host.endpoint.create_cq(depth)?);
        let resources = ReaderResources { data: data.1, send_cq: cqs.0, recv_cq: cqs.1 };
        let StreamSpec { order, sources, names, targets, delivery, producer, events } = spec;
        let connections = targets.len() as u32;
        let kernels = nic::kernels::best().0;
        let reader = Reader::new(order, sources, connections, delivery, resources, kernels);
        let sink = RingSink::new(producer, names, targets, DOORBELL_SLOTS);
        let id = StreamId(self.next_id);
        self.next_id += 1;
        self.streams.push(Stream { id, reader, sink, data, cqs, lines: Vec::new(), events });
        Ok(id)
    }

    fn new_qp(&mut self, id: StreamId, connection: u32) -> Result<QpAddress, EngineError> {
        let stream = self.streams.iter_mut().find(|stream| stream.id == id);
        let stream = stream.ok_or(EngineError::Unavailable("has closed the stream"))?;
        stream.drop_line(&mut self.host, connection);
        let address = self.host.create_qp(stream.cqs, 2 * super::target::MAX_CREDITS)?;
        stream.lines.push(Line { connection, qpn: address.qpn, capsules: None });
        Ok(address)
    }

    fn connect(&mut self, id: StreamId, peer: &Peer) -> Result<(), EngineError> {
        let stream = self.streams.iter_mut().find(|stream| stream.id == id);
        let stream = stream.ok_or(EngineError::Unavailable("has closed the stream"))?;
        let credits = peer.credits.clamp(1, super::target::MAX_CREDITS);
        let capsules = self.host.register(u64::from(credits) * CREDIT_BYTES, Access::LOCAL)?;
        let line = stream.lines.iter_mut().find(|line| line.qpn == peer.ours);
        let line = line.ok_or(EngineError::Unavailable("has dropped that queue pair"))?;
        line.capsules = Some(capsules);
        self.host.connect(peer.ours, &peer.theirs, peer.mtu)?;
        let memory = ConnectionMemory { capsules: capsules.1, credits };
        let endpoint = &mut self.host.endpoint;
        Ok(stream.reader.connect(endpoint, peer.connection, peer.ours, memory)?)
    }

    fn close(&mut self, id: StreamId) {
        let Some(index) = self.streams.iter().position(|stream| stream.id == id) else {
            return;
        };
        let mut stream = self.streams.swap_remove(index);
        while let Some(line) = stream.lines.first() {
            let connection = line.connection;
            stream.drop_line(&mut self.host, connection);
        }
        for cq in [stream.cqs.0, stream.cqs.1] {
            let gone = self.host.endpoint.destroy_cq(cq);
            debug_assert!(gone.is_ok(), "{gone:?}");
        }
        self.host.deregister(stream.data.0, &stream.data.1);
        add(&mut self.ended, stream.reader.counters());
        add_ring(&mut self.ended_rings, &stream.sink.counters());
    }

    fn status(&self) -> Counters {
        let mut counters = Counters::of_host(&self.host);
        let (mut sum, mut rings) = (self.ended, self.ended_rings);
        for stream in &self.streams {
            add(&mut sum, stream.reader.counters());
            add_ring(&mut rings, &stream.sink.counters());
        }
        counters.set("dpu.streams", self.streams.len() as u64);
        counters.set("dpu.memory_free_bytes", self.host.pool.free_bytes());
        for (name, value) in status::reader_counters(&sum) {
            counters.set(name, value);
        }
        for (name, value) in status::ring_counters(&rings) {
            counters.set(name, value);
        }
        counters
    }
}

impl Stream {
    fn poll(&mut self, host: &mut Host) -> bool {
        let busy = self.reader.poll(&mut host.endpoint, &mut host.pool, &mut self.sink);
        while let Some((connection, _, why)) = self.reader.lost_connection() {
            self.drop_line(host, connection);
            // Without a listener the stream is about to be closed.
            let _ = self.events.try_send(Event::Lost { connection, why });
        }
        busy
    }

    /// Destroys the queue pair of a connection, so that nothing more can arrive on it.
    fn drop_line(&mut self, host: &mut Host, connection: u32) {
        let found = self.lines.iter().position(|line| line.connection == connection);
        let Some(index) = found else { return };
        let line = self.lines.swap_remove(index);
        let gone = host.endpoint.destroy_qp(line.qpn);
        debug_assert!(gone.is_ok(), "{gone:?}");
        if let Some((range, region)) = line.capsules {
            host.deregister(range, &region);
        }
    }
}

fn add(sum: &mut ReaderCounters, part: &ReaderCounters) {
    sum.batches += part.batches;
    sum.source_bytes += part.source_bytes;
    sum.wire_bytes += part.wire_bytes;
    sum.delivered_bytes += part.delivered_bytes;
    sum.damaged_blocks += part.damaged_blocks;
    sum.bad_answers += part.bad_answers;
    sum.repeated_requests += part.repeated_requests;
    sum.lost_connections += part.lost_connections;
    sum.waits_for_data += part.waits_for_data;
    sum.waits_for_host += part.waits_for_host;
}

fn add_ring(sum: &mut ProducerCounters, part: &ProducerCounters) {
    sum.slots += part.slots;
    sum.bytes += part.bytes;
    sum.doorbells += part.doorbells;
    sum.doorbells_held += part.doorbells_held;
    sum.credit_waits += part.credit_waits;
    sum.credit_wakeups_empty += part.credit_wakeups_empty;
    sum.bad_release_words += part.bad_release_words;
    sum.bad_sleep_words += part.bad_sleep_words;
}
