//! The storage target's engine: sessions, disk and wire around [`xio::target::Target`].

use std::sync::Arc;
use std::sync::mpsc::{SendError, SyncSender};
use std::thread::JoinHandle;

use adapter::connect::{QpAddress, path_mtu};
use adapter::drive::{self, Owner};
use adapter::owned::Adapter;
use adapter::software::LocalPeer;
use host::disk::{DiskError, DiskMemory, FileDisk, MAX_DEPTH, UringDisk};
use nic::clock;
use nic::driver::Turn;
use nic::local_peers::Shared;
use nic::pool::PoolRange;
use roce::Time;
use roce::device::Device;
use roce::endpoint::Mtu;
use roce::verbs::{Access, CqId, MemoryRegion, PdId, Qpn};
use service::log;
use tokio::sync::oneshot;
use xio::disk::FileId;
use xio::opener::Stored;
use xio::stage::TargetStages;
use xio::target::{
    CREDIT_BYTES, IO_ALIGN, MAX_CREDITS, READS_PER_BUFFER, STAGING_BYTES, Served, SessionFailure,
    SessionMemory, Source, Target, WORK_PER_CREDIT,
};

use super::{
    Commands, Disposer, EngineError, Host, HostConfig, Inbox, Refused, Signals, Turns, Work,
};
use crate::action::Action;
use crate::status::{self, Counters};

/// Disk reads in flight: all that the staging buffers have room for. With less, one session whose
/// storage hangs could take the whole queue.
fn disk_queue(staging_buffers: u32) -> u32 {
    staging_buffers.saturating_mul(READS_PER_BUFFER).clamp(1, MAX_DEPTH)
}

/// Sessions at once.
pub const MAX_SESSIONS: usize = 64;

/// A dataset to serve: its file, and what the catalogue found in it.
#[derive(Debug)]
pub struct SessionSource {
    /// The open file.
    pub file: Box<dyn Stored>,
    /// Its contents.
    pub layout: xio::dataset::TokenFile,
    /// Stages applied to its blocks.
    pub stages: TargetStages,
    /// The table of `remap`; empty without one.
    pub table: Arc<[u32]>,
    /// The module of `wasm`; none without one.
    pub action: Option<Action>,
    /// What its manifest says of its bytes, if it has one.
    pub sums: Option<xio::sums::FileSums>,
}

/// A session to begin.
#[derive(Debug)]
pub struct SessionSpec {
    /// Its datasets.
    pub sources: Vec<SessionSource>,
    /// The reader's queue pair.
    pub reader: QpAddress,
    /// Its process, if its memory is reached through shared memory, or why not.
    pub local: LocalPeer,
    /// Path MTU.
    pub mtu: Mtu,
    /// Requests the reader may have outstanding.
    pub credits: u32,
    /// Notified when the session ends.
    pub ended: oneshot::Sender<Ended>,
    /// Flags that the engine checks for the session's end.
    pub signals: Signals,
}

/// The end of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Why it failed, if it did.
    pub failure: Option<SessionFailure>,
    /// Its totals.
    pub served: Served,
}

/// Commands of the control plane.
#[derive(Debug)]
pub enum Command {
    /// Begin a session; the reply is our end of the queue pair.
    Open(SessionSpec, SyncSender<Result<QpAddress, Refused>>),
    /// Report counters.
    Status(SyncSender<Counters>),
}

/// A running target engine.
#[derive(Debug)]
pub struct TargetEngine {
    /// Where commands go.
    pub commands: Commands<Command>,
    /// Address of the RoCE endpoint.
    pub roce: std::net::SocketAddr,
    /// What finds out which readers are processes of this machine, or why none are.
    pub discovery: Result<Arc<Shared>, String>,
    /// Paths chosen, and why.
    pub notes: Vec<String>,
    /// The thread.
    pub thread: JoinHandle<()>,
}

/// Memory of a session, in a protection domain of its own: its reader cannot access memory of
/// another session, and staging buffers only through our own work requests.
#[derive(Clone, Copy, Debug)]
struct Domain {
    pd: PdId,
    capsules: (PoolRange, MemoryRegion),
    /// All staging buffers.
    staging: MemoryRegion,
}

impl Domain {
    fn open<F: Adapter>(
        host: &mut Host<F>,
        credits: u32,
        staging: PoolRange,
    ) -> Result<Domain, EngineError> {
        let pd = host.device().alloc_pd()?;
        let capsules = host.register(pd, u64::from(credits) * CREDIT_BYTES, Access::LOCAL);
        let made = capsules.and_then(|capsules| {
            let PoolRange { addr, len } = staging;
            match host.device().register(pd, addr, len, Access::LOCAL) {
                Ok(staging) => Ok(Domain { pd, capsules, staging }),
                Err(error) => {
                    host.deregister(capsules.0, &capsules.1);
                    Err(error.into())
                }
            }
        });
        if made.is_err() {
            host.dealloc_pd(pd);
        }
        made
    }

    /// Called after its queue pair is destroyed.
    fn close<F: Adapter>(self, host: &mut Host<F>) {
        let gone = host.device().deregister(self.staging.lkey);
        debug_assert!(gone.is_ok(), "{gone:?}");
        host.deregister(self.capsules.0, &self.capsules.1);
        host.dealloc_pd(self.pd);
    }
}

#[derive(Debug)]
struct Session {
    qpn: Qpn,
    domain: Domain,
    files: Vec<FileId>,
    signals: Signals,
    ended: oneshot::Sender<Ended>,
}

struct Engine<F, K> {
    host: Host<F>,
    disk: K,
    target: Target,
    /// Where the target's staging buffers are.
    staging: PoolRange,
    sessions: Vec<Session>,
    /// Files of ended sessions that the disk still reads; bounded by the disk's queue.
    leaving: Vec<FileId>,
    cqs: (CqId, CqId),
    commands: Inbox<Command>,
    turns: Turns,
    disposer: Disposer,
}

impl TargetEngine {
    /// Starts the engine with `count` staging buffers for a session that is alone, and one that is
    /// reserved for a session that opens later.
    pub fn start(config: HostConfig, count: u32) -> Result<TargetEngine, EngineError> {
        TargetEngine::start_with(config, count, UringDisk::new)
    }

    /// The same, with a disk for files of other places than folders. It gets the memory into which
    /// it reads, and how many reads are under way at most.
    pub fn start_with<K: FileDisk>(
        config: HostConfig,
        count: u32,
        open_disk: impl FnOnce(DiskMemory, u32) -> Result<K, DiskError>,
    ) -> Result<TargetEngine, EngineError> {
        let count = count.max(2) + 1;
        let bytes = u64::from(count) * u64::from(STAGING_BYTES);
        let capsules = MAX_SESSIONS as u64 * u64::from(MAX_CREDITS) * CREDIT_BYTES;
        let memory = config.memory.max(bytes + capsules.next_multiple_of(4096) + (1 << 20));
        let config = HostConfig { memory, ..config };
        match &config.device {
            None => TargetEngine::start_on(Host::software(&config)?, count, open_disk),
            Some(choice) => {
                TargetEngine::start_on(Host::loaded(&config, choice)?, count, open_disk)
            }
        }
    }

    pub(super) fn start_on<F: Adapter + Send + 'static, K: FileDisk>(
        mut host: Host<F>,
        count: u32,
        open_disk: impl FnOnce(DiskMemory, u32) -> Result<K, DiskError>,
    ) -> Result<TargetEngine, EngineError> {
        let bytes = u64::from(count) * u64::from(STAGING_BYTES);
        let staging = host.adapter.memory_mut().alloc(bytes, u64::from(IO_ALIGN))?;
        let cqs = host.create_cqs(MAX_SESSIONS as u32 * MAX_CREDITS * WORK_PER_CREDIT)?;
        let kernels = host::kernels::best().0;
        let target = Target::new(staging.addr, count, cqs.0, cqs.1, kernels);
        let pool = host.adapter.memory();
        // SAFETY: the region stays mapped for as long as its handle lives. Only the target reads
        // into it, and nobody accesses a destination before the read completes (`xio::disk`).
        let memory = unsafe { DiskMemory::new(pool.base(), pool.len(), pool.region()) };
        let disk = open_disk(memory, disk_queue(count))?;
        let mut notes = host.notes();
        notes.extend(disk.note().map(|note| format!("disk: {note}")));
        let (roce, discovery) = (host.adapter.local(), host.adapter.discovery());
        let driver = host.driver()?;
        let watched = driver.watched().add(disk.fd(), 1);
        watched.map_err(|source| EngineError::Os { what: "disk completions", source })?;
        let disposer = Disposer::start();
        let disposer = disposer.map_err(|source| EngineError::Os { what: "thread", source })?;
        let (commands, inbox) = Commands::new(driver.waker());
        let mut engine = Engine {
            host,
            disk,
            target,
            staging,
            sessions: Vec::new(),
            leaving: Vec::new(),
            cqs,
            commands: inbox,
            turns: Turns::new(clock::now()),
            disposer,
        };
        let thread = std::thread::Builder::new()
            .name("dquant-target".into())
            .spawn(move || drive::run(&driver, &mut engine))
            .map_err(|source| EngineError::Os { what: "target thread", source })?;
        Ok(TargetEngine { commands, roce, discovery, notes, thread })
    }
}

impl<F: Adapter, K: FileDisk> Owner for Engine<F, K> {
    type Adapter = F;

    fn adapter(&mut self) -> &mut F {
        &mut self.host.adapter
    }

    fn turn(&mut self, now: Time) -> Turn {
        self.turns.begin(now);
        let Engine { host, target, disk, turns, .. } = self;
        let progress = host.turn(now, |device, pool| {
            turns.spent(Work::Packets);
            let worked = target.poll(now, device, pool, disk) | disk.flush();
            turns.spent(Work::Sessions);
            worked
        });
        self.turns.spent(Work::Packets);
        let gone = self.host.take_trouble();
        if gone.is_some() || self.commands.is_stopped() {
            self.stop(gone.as_deref().unwrap_or("the target stops"));
            self.commands.set_failure(gone);
            return Turn::Stop;
        }
        // Also under full load: sessions must open and close then, too.
        let busy = self.close_one() || self.take_command() || !progress.is_idle();
        if busy && !self.leaving.is_empty() {
            self.close_files();
            self.turns.spent(Work::Files);
        }
        self.disposer.hand_over();
        self.host.next_turn(busy)
    }

    fn prepare_sleep(&mut self) -> bool {
        self.turns.slept();
        true
    }

    fn note_rescue(&mut self) {
        self.turns.rescued();
    }
}

impl<F: Adapter, K: FileDisk> Engine<F, K> {
    fn stop(&self, why: &str) {
        for Session { qpn, .. } in &self.sessions {
            let Served { requests, bytes } = self.target.served(*qpn).unwrap_or_default();
            log::line(format_args!(
                "session {:#x} ends: {why}; {requests} blocks, {bytes} bytes",
                qpn.get()
            ));
        }
    }

    /// Ends a session that failed or that its reader abandoned; whether there was one.
    fn close_one(&mut self) -> bool {
        let given_up = |session: &&Session| session.signals.is_raised();
        let given_up = || self.sessions.iter().find(given_up).map(|session| (session.qpn, None));
        let failed = self.target.failed_session().map(|(qpn, why)| (qpn, Some(why)));
        let Some((qpn, failure)) = failed.or_else(given_up) else {
            return false;
        };
        self.close(qpn, failure);
        self.turns.spent(Work::Close);
        true
    }

    /// Whether there was a command.
    fn take_command(&mut self) -> bool {
        let Some(command) = self.commands.take() else {
            return false;
        };
        let work = match command {
            Command::Open(spec, reply) => {
                let opened = self.open(spec);
                // The receiver of the reply closes the session; if there is none, we do.
                if let Err(SendError(Ok(address))) = reply.send(opened) {
                    self.close(address.qpn, None);
                }
                Work::Open
            }
            Command::Status(reply) => {
                drop(reply.send(self.status()));
                Work::Status
            }
        };
        self.turns.spent(work);
        true
    }

    /// Returns our end, with the path MTU in use. On refusal the request is returned, so that its
    /// creator frees it.
    fn open(&mut self, spec: SessionSpec) -> Result<QpAddress, Refused> {
        let (domain, address) = match self.queue_pair_for(&spec) {
            Ok(made) => made,
            Err(error) => return Err(Refused::new(error, spec)),
        };
        let SessionSpec { sources, reader, local, mtu, credits, ended, signals } = spec;
        let (qpn, files) = (address.qpn, Vec::new());
        let reliability = address.agreed(&reader);
        let mtu = path_mtu(address.mtu, mtu.bytes()).unwrap_or(Mtu::M256);
        let address = QpAddress { reliability, mtu: mtu.bytes(), ..address };
        let mut session = Session { qpn, domain, files, signals, ended };
        let begun = self.begin(&mut session, sources, credits);
        let begun = begun.and_then(|()| self.host.connect(&address, &reader, mtu, local));
        self.sessions.push(session);
        if let Err(error) = begun {
            self.close(address.qpn, None);
            return Err(Refused::new(error, ()));
        }
        Ok(address)
    }

    fn queue_pair_for(&mut self, spec: &SessionSpec) -> Result<(Domain, QpAddress), EngineError> {
        if self.disposer.waiting() > 0 {
            return Err(EngineError::Unavailable(
                "is overloaded: it is still freeing ended sessions",
            ));
        }
        let (need, have) = (self.sessions.len() as u64 + 1, MAX_SESSIONS as u64);
        if need > have {
            return Err(EngineError::Limit { what: "sessions", need, have });
        }
        let domain = Domain::open(&mut self.host, spec.credits, self.staging)?;
        let work = spec.credits * WORK_PER_CREDIT;
        match self.host.create_qp(domain.pd, self.cqs, work) {
            Ok(address) => Ok((domain, address)),
            Err(error) => {
                domain.close(&mut self.host);
                Err(error)
            }
        }
    }

    fn begin(
        &mut self,
        session: &mut Session,
        files: Vec<SessionSource>,
        credits: u32,
    ) -> Result<(), EngineError> {
        let mut sources = Vec::with_capacity(files.len());
        for SessionSource { file, layout, stages, table, action, sums } in files {
            let file = self.disk.add_stored(file)?;
            session.files.push(file);
            let (data_offset, tokens) = (layout.data_offset, layout.tokens);
            sources.push(Source { file, stages, table, action, data_offset, tokens, sums });
        }
        let Domain { capsules, staging, .. } = session.domain;
        let staging_lkey = staging.lkey;
        let memory = SessionMemory { staging_lkey, capsules: capsules.1, credits };
        let Host { adapter, now, .. } = &mut self.host;
        Ok(self.target.open(*now, adapter.device(), session.qpn, sources, memory)?)
    }

    fn close(&mut self, qpn: Qpn, failure: Option<SessionFailure>) {
        let Some(index) = self.sessions.iter().position(|session| session.qpn == qpn) else {
            return;
        };
        let session = self.sessions.swap_remove(index);
        let served = self.target.served(qpn).unwrap_or_default();
        let sources = self.target.close(qpn);
        // Nobody listens if the control call has ended.
        let _ = session.ended.send(Ended { failure, served });
        self.host.destroy_qp(qpn);
        session.domain.close(&mut self.host);
        self.leaving.extend(session.files);
        // The thread of a user action is joined, its memory unmapped.
        self.disposer.dispose(sources);
    }

    /// Removes the files of ended sessions from the disk, except where a read is under way: its end
    /// wakes us, and the file is retried. Closing them may wait for a file system, so that is not
    /// done here.
    fn close_files(&mut self) {
        let (disk, mut closing) = (&mut self.disk, Vec::new());
        self.leaving.retain(|file| match disk.remove_stored(*file) {
            Ok(file) => {
                closing.push(file);
                false
            }
            Err(error) => matches!(error, DiskError::Busy { .. }),
        });
        if !closing.is_empty() {
            self.disposer.dispose(closing);
        }
    }

    fn status(&self) -> Counters {
        let mut counters = Counters::of_fabric(&self.host.adapter);
        let target = self.target.counters();
        counters.set("target.sessions", self.sessions.len() as u64);
        let disk = status::disk_counters(self.disk.counters());
        for (name, value) in status::target_counters(target).into_iter().chain(disk) {
            counters.set(name, value);
        }
        counters.set("target.free_staging_buffers", self.target.free_buffers() as u64);
        counters.set("target.staging_buffers", self.target.buffer_count() as u64);
        for (reason, count) in xio::capsule::Refusal::ALL.iter().zip(target.refused) {
            counters.set(&format!("target.refused.{}", reason.name()), count);
        }
        self.turns.report(&mut counters);
        counters
    }
}
