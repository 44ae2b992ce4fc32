//! The storage target's engine: sessions, disk and wire around [`xio::target::Target`].

use std::sync::mpsc::{Receiver, SendError, SyncSender};
use std::thread::JoinHandle;

use nic::clock;
use nic::disk::{DiskError, IoMode, UringDisk};
use nic::pool::PoolRange;
use nic::root::OpenFile;
use nic::waiter::Waiter;
use roce::endpoint::Mtu;
use roce::verbs::{Access, CqId, MemoryRegion, Qpn};
use tokio::sync::oneshot;
use xio::disk::FileId;
use xio::target::{
    CREDIT_BYTES, IO_ALIGN, REGISTER_BYTES, Served, SessionMemory, Source, Target, WORK_PER_CREDIT,
};

use super::{Commands, EngineError, Host, HostConfig, Idle, QpAddress, sleep};
use crate::status::{self, Counters};

/// Disk reads in flight.
const DISK_QUEUE: u32 = 64;

/// Sessions at once.
pub const MAX_SESSIONS: usize = 64;

/// Requests one session may have outstanding.
pub const MAX_CREDITS: u32 = 64;

/// A dataset to serve: its file, and what the catalogue found in it.
#[derive(Debug)]
pub struct SessionSource {
    /// The open file.
    pub file: OpenFile,
    /// What is in it.
    pub layout: xio::dataset::TokenFile,
}

/// A session to begin.
#[derive(Debug)]
pub struct SessionSpec {
    /// Its datasets.
    pub sources: Vec<SessionSource>,
    /// The reader's queue pair.
    pub reader: QpAddress,
    /// Path MTU.
    pub mtu: Mtu,
    /// Requests the reader may have outstanding.
    pub credits: u32,
    /// Told when the session ends, also by itself: when its queue pair failed.
    pub ended: oneshot::Sender<Served>,
}

/// What the control plane may ask.
#[derive(Debug)]
pub enum Command {
    /// Begin a session; the answer is our end of the queue pair.
    Open(SessionSpec, SyncSender<Result<QpAddress, EngineError>>),
    /// End a session.
    Close(Qpn),
    /// Report counters.
    Status(SyncSender<Counters>),
    /// End the engine.
    Stop,
}

/// A running target engine.
#[derive(Debug)]
pub struct TargetEngine {
    /// Where commands go.
    pub commands: Commands<Command>,
    /// Address of the RoCE endpoint.
    pub roce: std::net::SocketAddr,
    /// Paths chosen, and why.
    pub notes: Vec<String>,
    /// The thread.
    pub thread: JoinHandle<()>,
}

#[derive(Debug)]
struct Session {
    qpn: Qpn,
    capsules: (PoolRange, MemoryRegion),
    files: Vec<FileId>,
    ended: oneshot::Sender<Served>,
}

struct Engine {
    host: Host,
    disk: UringDisk,
    target: Target,
    sessions: Vec<Session>,
    /// Files of ended sessions that the disk still reads; bounded by the disk's queue.
    leaving: Vec<FileId>,
    cqs: (CqId, CqId),
    commands: Receiver<Command>,
    direct_files: u64,
    buffered_files: u64,
}

impl TargetEngine {
    /// Starts the engine with `registers` registers.
    pub fn start(config: HostConfig, registers: u32) -> Result<TargetEngine, EngineError> {
        let bytes = u64::from(registers.max(2)) * u64::from(REGISTER_BYTES);
        let capsules = MAX_SESSIONS as u64 * u64::from(MAX_CREDITS) * CREDIT_BYTES;
        let memory = config.memory.max(bytes + capsules.next_multiple_of(4096) + (1 << 20));
        let mut host = Host::new(&HostConfig { memory, ..config })?;
        let (_, base) = host.register(bytes, Access::LOCAL)?;
        let depth = MAX_SESSIONS as u32 * MAX_CREDITS * WORK_PER_CREDIT;
        let cqs = (host.endpoint.create_cq(depth)?, host.endpoint.create_cq(depth)?);
        let target = Target::new(base, cqs.0, cqs.1, nic::kernels::best().0);
        let disk = UringDisk::new(&host.pool, DISK_QUEUE)?;
        let mut notes = host.notes();
        notes.extend(
            disk.why_unregistered().map(|why| format!("disk: unregistered buffers ({why})")),
        );
        let roce = host.local;
        let waiter = Waiter::new().map_err(|source| EngineError::Os { what: "eventfd", source })?;
        let (commands, receiver) = Commands::new(&waiter);
        let engine = Engine {
            host,
            disk,
            target,
            sessions: Vec::new(),
            leaving: Vec::new(),
            cqs,
            commands: receiver,
            direct_files: 0,
            buffered_files: 0,
        };
        let thread = std::thread::Builder::new()
            .name("dquant-target".into())
            .spawn(move || engine.run(&waiter))
            .map_err(|source| EngineError::Os { what: "target thread", source })?;
        Ok(TargetEngine { commands, roce, notes, thread })
    }
}

impl Engine {
    fn run(mut self, waiter: &Waiter) {
        let mut idle = Idle::default();
        loop {
            let mut busy = self.host.drain();
            busy |= self.target.poll(&mut self.host.endpoint, &mut self.host.pool, &mut self.disk);
            busy |= self.disk.flush();
            while let Some(qpn) = self.target.failed_session() {
                self.close(qpn);
            }
            // Also when there is plenty to do: sessions must open and close under full load.
            match self.take_commands() {
                Some(taken) => busy |= taken,
                None => return,
            }
            if busy {
                self.close_files();
                idle.busy();
                continue;
            }
            if idle.is_over(clock::now()) {
                let fds = [self.host.wire.inner().fd(), self.disk.fd()];
                sleep(&self.host, waiter, &fds);
                idle.busy();
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// Whether there was a command; `None` when the engine is to end.
    fn take_commands(&mut self) -> Option<bool> {
        let Ok(command) = self.commands.try_recv() else {
            return Some(false);
        };
        match command {
            Command::Open(spec, reply) => {
                let opened = self.open(spec);
                // Whoever receives the answer closes the session; if nobody does, we do.
                if let Err(SendError(Ok(address))) = reply.send(opened) {
                    self.close(address.qpn);
                }
            }
            Command::Close(qpn) => self.close(qpn),
            Command::Status(reply) => {
                let _ = reply.send(self.status());
            }
            Command::Stop => return None,
        }
        Some(true)
    }

    fn open(&mut self, spec: SessionSpec) -> Result<QpAddress, EngineError> {
        let (need, have) = (self.sessions.len() as u64 + 1, MAX_SESSIONS as u64);
        if need > have {
            return Err(EngineError::Limit { what: "sessions", need, have });
        }
        let bytes = u64::from(spec.credits) * CREDIT_BYTES;
        let capsules = self.host.register(bytes, Access::LOCAL)?;
        let address = match self.host.create_qp(self.cqs, spec.credits * WORK_PER_CREDIT) {
            Ok(address) => address,
            Err(error) => {
                self.host.deregister(capsules.0, &capsules.1);
                return Err(error);
            }
        };
        let SessionSpec { sources, reader, mtu, credits, ended } = spec;
        let (qpn, files) = (address.qpn, Vec::new());
        let address = QpAddress { reliability: reader.reliability, ..address };
        let mut session = Session { qpn, capsules, files, ended };
        let begun = self.begin(&mut session, sources, credits);
        let begun = begun.and_then(|()| self.host.connect(qpn, &reader, mtu));
        self.sessions.push(session);
        if let Err(error) = begun {
            self.close(address.qpn);
            return Err(error);
        }
        Ok(address)
    }

    fn begin(
        &mut self,
        session: &mut Session,
        files: Vec<SessionSource>,
        credits: u32,
    ) -> Result<(), EngineError> {
        let mut sources = Vec::with_capacity(files.len());
        for SessionSource { file, layout } in files {
            match file.mode {
                IoMode::Direct => self.direct_files += 1,
                IoMode::Buffered => self.buffered_files += 1,
            }
            let file = self.disk.add_file(file.fd, file.mode)?;
            session.files.push(file);
            let (dtype, data_offset, tokens) = (layout.dtype, layout.data_offset, layout.tokens);
            sources.push(Source { file, dtype, data_offset, tokens });
        }
        let memory = SessionMemory { capsules: session.capsules.1, credits };
        Ok(self.target.open(&mut self.host.endpoint, session.qpn, sources, memory)?)
    }

    fn close(&mut self, qpn: Qpn) {
        let Some(index) = self.sessions.iter().position(|session| session.qpn == qpn) else {
            return;
        };
        let session = self.sessions.swap_remove(index);
        let served = self.target.served(qpn).unwrap_or_default();
        self.target.close(qpn);
        // Nobody listens where the control call has gone.
        let _ = session.ended.send(served);
        let gone = self.host.endpoint.destroy_qp(qpn);
        debug_assert!(gone.is_ok(), "{gone:?}");
        self.host.deregister(session.capsules.0, &session.capsules.1);
        self.leaving.extend(session.files);
        self.close_files();
    }

    /// Closes the files of ended sessions, except where a read is under way: its end wakes us, and
    /// the file is tried again.
    fn close_files(&mut self) {
        let disk = &mut self.disk;
        self.leaving.retain(|file| matches!(disk.remove_file(*file), Err(DiskError::Busy { .. })));
    }

    fn status(&self) -> Counters {
        let mut counters = Counters::of_host(&self.host);
        let target = self.target.counters();
        counters.set("target.sessions", self.sessions.len() as u64);
        let disk = status::disk_counters(self.disk.counters());
        for (name, value) in status::target_counters(target).into_iter().chain(disk) {
            counters.set(name, value);
        }
        counters.set("target.free_registers", self.target.free_registers() as u64);
        counters.set("target.registers", self.target.register_count() as u64);
        counters.set("target.files_direct", self.direct_files);
        counters.set("target.files_buffered", self.buffered_files);
        for (reason, count) in xio::capsule::Refusal::ALL.iter().zip(target.refused) {
            counters.set(&format!("target.refused.{}", reason.name()), count);
        }
        counters
    }
}

const _: () = assert!(IO_ALIGN == 4096, "registers are cut from the pool at this alignment");
