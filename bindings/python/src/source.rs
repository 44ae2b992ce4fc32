//! An open stream as all classes share it: waiting without the GIL, signals, forks, closing.
//!
//! Python calls from any thread. One thread at a time uses the stream; a wait is cut into pieces of
//! [`PIECE`], after each of which signals are handled and other threads get their turn. A stream
//! belongs to the process that opened it: a forked child gets an error from every call, and drops
//! nothing that only the parent's threads could finish.

use std::ffi::{CStr, CString};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use client::{Next, Opened, StreamStatus};
use pyo3::exceptions::PyUserWarning;
use pyo3::prelude::*;

use crate::errors::{Class, invalid, raised};
use crate::fault;
use crate::options::Request;
use crate::spares::Spares;

/// Longest time without a look at signals.
const PIECE: Duration = Duration::from_millis(25);

/// A wait for a batch that is longer is reported, once.
const NOTICE: Duration = Duration::from_secs(10);

/// Batches and buffers that Python holds.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// Living `Batch` objects; each keeps its slot.
    pub(crate) batches: AtomicUsize,
    /// Living buffers of them: memoryviews, and arrays made from them.
    pub(crate) buffers: AtomicUsize,
    /// Memory of copies that nobody has any more.
    pub(crate) spares: Spares,
}

/// A stream, dropped only by the process that opened it.
struct Handle {
    /// `None` only while it is dropped.
    stream: Option<client::Stream>,
    owner: u32,
}

impl Drop for Handle {
    fn drop(&mut self) {
        let mut stream = self.stream.take();
        if client::process_id() != self.owner {
            // The threads of a stream without offload do not exist in a forked child: joining them
            // would hang.
            std::mem::forget(stream);
            return;
        }
        // Its threads are joined: other Python threads may run meanwhile.
        Python::try_attach(|py| py.detach(|| drop(stream.take())));
    }
}

/// A stream that may be closed.
pub(crate) struct Source {
    stream: Mutex<Option<Handle>>,
    /// Taken before `stream`, so that a thread that waits in pieces does not starve the others.
    turn: Mutex<()>,
    next_batch: AtomicU64,
    owner: u32,
    /// Whether a long wait was reported.
    noticed: AtomicBool,
    pub(crate) held: Arc<Held>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn closed() -> PyErr {
    invalid("the stream is closed", "open it again with first_batch=next_batch")
}

/// Opens a stream on a thread of its own, so that signals are handled meanwhile.
fn connect(py: Python<'_>, request: &Request) -> PyResult<client::Stream> {
    let Request { url, files, plan, offload, options, .. } = request.clone();
    let (sender, mut receiver) = mpsc::sync_channel(1);
    let opener = std::thread::Builder::new().name("dquant-open".into());
    // After a signal nobody receives: the stream is dropped there as soon as it is open.
    let open = move || match files.as_slice() {
        [] => client::open(&url, &plan, offload, &options),
        files => client::open_all(files, &plan, &options),
    };
    opener.spawn(move || drop(sender.send(open())))?;
    loop {
        let receiver = &mut receiver;
        match py.detach(move || receiver.recv_timeout(PIECE)) {
            Ok(opened) => return opened.map_err(|error| raised(&error)),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Class::Stream.error("opening the stream panicked", None));
            }
        }
    }
}

/// Issues a `UserWarning`.
fn warn(py: Python<'_>, text: &CStr) -> PyResult<()> {
    PyErr::warn(py, &py.get_type::<PyUserWarning>(), text, 1)
}

/// Warns of token types that nobody gave, because the bytes of a flat file look like them, and of
/// files too short for a sample.
fn warn_of_guesses(py: Python<'_>, opened: &Opened) -> PyResult<()> {
    for dataset in &opened.datasets {
        let Some(why) = dataset.dtype_origin.strip_prefix("guess: ") else {
            continue;
        };
        let (name, dtype) = (&dataset.name, &dataset.dtype);
        let text = format!(
            "{name}: {dtype} is a guess: {why}; dtype=\"{dtype}\" or a manifest settles it"
        );
        // A name holds no zero byte: it is that of a file.
        warn(py, &CString::new(text).unwrap_or_default())?;
    }
    for dataset in opened.without_samples() {
        let text = format!("{}: it has no sample and is never drawn", dataset.name);
        warn(py, &CString::new(text).unwrap_or_default())?;
    }
    Ok(())
}

impl Source {
    /// Opens a stream, and says what was opened.
    pub(crate) fn open(py: Python<'_>, request: &Request) -> PyResult<(Source, Opened)> {
        let stream = connect(py, request)?;
        fault::watch();
        let opened = stream.opened().clone();
        warn_of_guesses(py, &opened)?;
        let source = Source {
            next_batch: AtomicU64::new(stream.next_batch()),
            stream: Mutex::new(None),
            turn: Mutex::new(()),
            owner: client::process_id(),
            noticed: AtomicBool::new(false),
            held: Arc::default(),
        };
        source.put(py, stream);
        Ok((source, opened))
    }

    /// Replaces the stream by one that is opened with `request`; closed if that fails.
    pub(crate) fn reopen(&self, py: Python<'_>, request: &Request) -> PyResult<Opened> {
        self.close(py);
        let stream = connect(py, request)?;
        let opened = stream.opened().clone();
        self.put(py, stream);
        Ok(opened)
    }

    fn put(&self, py: Python<'_>, stream: client::Stream) {
        self.move_to(stream.next_batch());
        let handle = Handle { stream: Some(stream), owner: self.owner };
        py.detach(|| *lock(&self.stream) = Some(handle));
    }

    /// Sets the number of the next batch.
    pub(crate) fn move_to(&self, next_batch: u64) {
        self.next_batch.store(next_batch, Ordering::Relaxed);
    }

    /// Refuses to work in a forked child, before a lock is touched that the parent may have held.
    pub(crate) fn check_owner(&self) -> PyResult<()> {
        let (owner, user) = (self.owner, client::process_id());
        if owner == user {
            return Ok(());
        }
        let message =
            format!("the stream was opened by process {owner} and is used by its child {user}");
        Err(Class::Fork.error(message, Some("open a stream in each process")))
    }

    /// Number of the next batch.
    pub(crate) fn next_batch(&self) -> u64 {
        self.next_batch.load(Ordering::Relaxed)
    }

    /// The next batch; `None` at the end.
    pub(crate) fn next(&self, py: Python<'_>) -> PyResult<Option<client::Batch>> {
        self.check_owner()?;
        // A batch that is there costs neither a system call nor a change of threads.
        if let Ok(mut stream) = self.stream.try_lock() {
            match found(step(stream.as_mut(), Duration::ZERO))? {
                Next::Batch(batch) => return Ok(Some(self.count(batch))),
                Next::End => return Ok(None),
                Next::Pending | Next::SlotsHeld { .. } => {}
            }
        }
        let begun = Instant::now();
        loop {
            py.check_signals()?;
            if begun.elapsed() >= NOTICE && !self.noticed.swap(true, Ordering::Relaxed) {
                warn(py, c"no batch for 10 s: the log of `dquant dpu` names ranks of this job that are missing, or a target that is away; the wait goes on")?;
            }
            let stepped = py.detach(|| {
                let turn = lock(&self.turn);
                let mut stream = lock(&self.stream);
                drop(turn);
                step(stream.as_mut(), PIECE)
            });
            match found(stepped)? {
                Next::Batch(batch) => return Ok(Some(self.count(batch))),
                Next::End => return Ok(None),
                Next::Pending => {}
                Next::SlotsHeld { slots } => return Err(self.slots_held(slots)),
            }
        }
    }

    fn count(&self, batch: client::Batch) -> client::Batch {
        self.move_to(batch.next_batch());
        batch
    }

    fn slots_held(&self, slots: u32) -> PyErr {
        let batches = self.held.batches.load(Ordering::Relaxed);
        let message = format!(
            "all {slots} slots of the ring are held by {batches} batches that are still in use, so no batch can arrive"
        );
        let hint = "drop batches and every array made of them, copy what must stay, or open with more slots";
        Class::SlotsHeld.error(message, Some(hint))
    }

    /// Counters of the stream.
    pub(crate) fn status(&self, py: Python<'_>) -> PyResult<StreamStatus> {
        self.check_owner()?;
        let status = py.detach(|| {
            let _turn = lock(&self.turn);
            lock(&self.stream).as_ref().and_then(|handle| Some(handle.stream.as_ref()?.status()))
        });
        found(status)
    }

    /// Closes the stream, and returns whether it was open. Views stay readable. In a forked child
    /// nothing happens: the stream is the parent's.
    pub(crate) fn close(&self, py: Python<'_>) -> bool {
        if self.check_owner().is_err() {
            return false;
        }
        let handle = py.detach(|| {
            let _turn = lock(&self.turn);
            lock(&self.stream).take()
        });
        self.held.spares.close();
        handle.is_some()
    }

    /// Whether the stream is closed.
    pub(crate) fn is_closed(&self, py: Python<'_>) -> PyResult<bool> {
        self.check_owner()?;
        Ok(py.detach(|| {
            let _turn = lock(&self.turn);
            lock(&self.stream).is_none()
        }))
    }
}

/// Waits once; `None` if the stream is closed. Makes no exception, because a thread that holds the
/// lock must not wait for the GIL: its holder may wait for the lock.
fn step(handle: Option<&mut Handle>, limit: Duration) -> Option<Result<Next, client::Error>> {
    Some(handle?.stream.as_mut()?.next_view_within(limit))
}

fn found<T>(result: Option<Result<T, client::Error>>) -> PyResult<T> {
    result.ok_or_else(closed)?.map_err(|error| raised(&error))
}
