//! The engine of one stream over files of this machine: disk, reader and ring on one thread.
//!
//! There is no target, no DPU and no network: nothing here opens a socket. The engine ends when its
//! handle is dropped; its trainer sees the end of an engine that ended by itself as the end of a
//! pipe.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::thread::JoinHandle;

use host::disk::{DiskMemory, FileDisk, UringDisk};
use host::ring::Producer;
use nic::driver::{Application, Driver, RESCUED, Turn};
use nic::pool::Pool;
use roce::{Duration, Time};
use service::log;
use xio::opener::Stored;
use xio::reader::{LocalFile, LocalReader, PROOF_BUFFERS, ReaderSetup};
use xio::sums::FileSums;

use super::{Commands, EngineError, Inbox, SPIN};
use crate::action::Action;
use crate::data::dpu::StreamReport;
use crate::data::sink::RingSink;

/// Reads under way: 8 MiB of the blocks of a shuffle. Larger ones are bounded by the buffers of
/// their group.
const DEPTH: u32 = 64;

/// A stream over local files to begin.
#[derive(Debug)]
pub(crate) struct FileStreamSpec {
    /// The order of samples, computed up to where the stream begins, and what to deliver.
    pub(crate) setup: ReaderSetup,
    /// The files, opened for buffered reads, in the order of the sources, and what their manifests
    /// say.
    pub(crate) files: Vec<(Box<dyn Stored>, Option<FileSums>)>,
    /// Their names, for messages.
    pub(crate) names: Vec<String>,
    /// The table of `remap`; empty without one.
    pub(crate) table: Arc<[u32]>,
    /// The module of `wasm` and its name, for messages; none without one.
    pub(crate) action: Option<(Action, String)>,
    /// The ring to fill.
    pub(crate) producer: Producer,
}

/// A running engine. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct FileEngine {
    commands: Commands<SyncSender<StreamReport>>,
    thread: Option<JoinHandle<()>>,
}

impl FileEngine {
    /// Starts the stream. The descriptor hangs up when the engine ends.
    pub(crate) fn start(spec: FileStreamSpec) -> Result<(FileEngine, OwnedFd), EngineError> {
        let os = |what| move |source| EngineError::Os { what, source };
        let has_manifest = spec.files.iter().any(|(_, sums)| sums.is_some());
        // Of thousands of datasets few are read before the first batch; buffered reads need no
        // registration.
        let pool = Pool::on_demand(LocalReader::memory_bytes(&spec.setup, has_manifest).max(1))?;
        // SAFETY: the region stays mapped for as long as its handle lives. Only the reader reads
        // into it, and nobody accesses a destination before the read completes (`xio::disk`).
        let memory = unsafe { DiskMemory::new(pool.base(), pool.len(), pool.region()) }.on_demand();
        let mut disk = UringDisk::new(memory, DEPTH + PROOF_BUFFERS)?;
        let add = |(file, sums)| disk.add_stored(file).map(|file| LocalFile { file, sums });
        let files = spec.files.into_iter().map(add).collect::<Result<Vec<_>, _>>()?;
        let kernels = host::kernels::best().0;
        let mut reader = LocalReader::new(spec.setup, files, DEPTH, pool.base(), kernels);
        reader.set_table(spec.table);
        let (action, module) = spec.action.unzip();
        reader.set_action(action);
        let driver = Driver::new().map_err(os("descriptors to wait with"))?;
        let watched = driver.watched();
        watched.add(disk.fd(), 1).map_err(os("completions of the disk"))?;
        watched.add_edges(spec.producer.credit_fd(), 2).map_err(os("credits of the ring"))?;
        let mut sink = RingSink::new(vec![spec.producer], spec.names, Vec::new());
        sink.set_module(module);
        let (alive, liveness) = std::io::pipe().map_err(os("pipe"))?;
        let (commands, inbox) = Commands::new(driver.waker());
        let mut engine = Engine { disk, pool, reader, sink, commands: inbox };
        let thread = std::thread::Builder::new().name("dquant-files".into()).spawn(move || {
            driver.run(&mut engine);
            drop(liveness);
        });
        let thread = Some(thread.map_err(os("thread"))?);
        Ok((FileEngine { commands, thread }, alive.into()))
    }

    /// What the stream did so far.
    pub(crate) fn report(&self) -> Result<StreamReport, EngineError> {
        self.commands.call(|reply| reply)
    }
}

impl Drop for FileEngine {
    fn drop(&mut self) {
        self.commands.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Engine {
    // Dropped before the memory that it reads into.
    disk: UringDisk,
    pool: Pool,
    reader: LocalReader,
    sink: RingSink,
    commands: Inbox<SyncSender<StreamReport>>,
}

impl Application for Engine {
    const SPIN: Duration = SPIN;

    fn turn(&mut self, now: Time) -> Turn {
        self.sink.begin_turn(now);
        if self.commands.is_stopped() {
            self.sink.stop("the stream was closed");
            return Turn::Stop;
        }
        if let Some(reply) = self.commands.take() {
            // A caller that gave up waiting needs no report.
            let _ = reply.send(self.report());
        }
        let Engine { disk, pool, reader, sink, .. } = self;
        match reader.poll(disk, pool, sink) {
            true => Turn::Busy,
            false => Turn::Idle(None),
        }
    }

    fn prepare_sleep(&mut self) -> bool {
        self.sink.prepare_sleep()
    }

    fn woken(&mut self) {
        self.sink.after_sleep();
    }

    fn has_work(&mut self) -> bool {
        self.sink.has_credit()
    }

    fn note_rescue(&mut self) {
        log::defect(RESCUED);
    }
}

impl Engine {
    fn report(&self) -> StreamReport {
        StreamReport {
            counters: *self.reader.counters(),
            published_bytes: self.sink.counters().bytes,
            failure: self.sink.failure().map(str::to_owned),
        }
    }
}
