//! The client library: open a dataset with an action, read batches.
//!
//! ```no_run
//! use client::{Options, open};
//!
//! let plan = "window(2048) | shuffle(7) | blend(web=0.5,code=0.3,books=0.2) | narrow(u16)";
//! let mut stream = open("dq://10.0.0.5/corpora", plan, true, &Options::from_env())?;
//! for batch in stream.batches().take(1000) {
//!     let batch = batch?;
//!     let tokens: &[u16] = batch.tokens().expect("narrowed to u16");
//!     // ... one training step; dropping `batch` gives its memory back
//! }
//! # Ok::<(), client::Error>(())
//! ```
//!
//! With `offload` the DPU daemon of this machine does the work and this process only waits, reads and
//! returns slots. Without it the same engine runs in a thread of this process; that needs the feature
//! `in-process`, which links the whole data path and control plane. The batches are identical to the byte
//! (C4).
//!
//! A stream's position is a batch number, so a stream is resumed with [`Options::first_batch`], and [`read`]
//! with another action continues with that action at the next batch.

mod error;
mod file;
mod stream;
mod url;

/// Messages, generated from `proto/dquant/v1/control.proto`; those of the local socket are used.
#[allow(missing_docs, clippy::all, unreachable_pub, unused_qualifications, dead_code)]
mod proto {
    include!(concat!(env!("OUT_DIR"), "/dquant.v1.rs"));
}

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use host::attach::{AttachError, Connection};
use rustix::io::Errno;

pub use error::{Error, Fault, Reason, Server};
pub use file::{File, read};
pub use proto::{DatasetInfo, Opened, StreamStatus};
use proto::{DatasetRef, OpenRequest};
pub use stream::{Batch, Batches, Next, Stream};
use url::Url;

#[cfg(feature = "in-process")]
use engine::local::LocalDpu;

/// Never constructed: streams without offload are not built in.
#[cfg(not(feature = "in-process"))]
type LocalDpu = std::convert::Infallible;

/// How long the opening of a stream may take: longer than all calls that the DPU makes for it, so that the
/// DPU, which knows the cause, reports a target that sends no reply.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);

#[cfg(feature = "in-process")]
const _: () = {
    assert!(OPEN_TIMEOUT.as_secs() >= 6 * engine::control::CALL_TIMEOUT.as_secs());
    assert!(url::CONTROL_PORT == engine::control::CONTROL_PORT);
};

/// How a stream is opened. [`Options::from_env`] is what most programs want.
#[derive(Clone, Debug)]
pub struct Options {
    /// Socket of the DPU daemon (`DQUANT_DPU`).
    pub dpu: PathBuf,
    /// The target's token (`DQUANT_TOKEN`).
    pub token: String,
    /// Token type of flat files; when empty, their manifests or their bytes tell it.
    pub dtype: String,
    /// Ids are below this number: files with larger ones are refused as far as that is known.
    pub vocabulary: Option<u64>,
    /// Seed that the word `seed` in a plan stands for.
    pub seed: u64,
    /// First batch to deliver.
    pub first_batch: u64,
    /// Batches to deliver; without it the stream has no end.
    pub batches: Option<u64>,
    /// Slots of the ring.
    pub slots: u32,
    /// Bytes of a slot.
    pub slot_bytes: u32,
    /// Without offload: address of this process's own RoCE endpoint (else one is chosen).
    pub roce: Option<SocketAddr>,
    /// Without offload: bytes of staging buffers.
    pub memory: u64,
    /// Without offload: received packets to drop, in parts per million.
    pub loss_ppm: u32,
    /// How long a target may stay lost.
    pub reconnect: Duration,
}

/// Default socket of the DPU daemon.
pub fn default_socket() -> PathBuf {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map_or_else(std::env::temp_dir, Into::into);
    runtime.join("dquant-dpu.sock")
}

/// Default bytes of staging buffers.
pub const DEFAULT_MEMORY: u64 = 128 << 20;

impl Options {
    /// Defaults, with `DQUANT_DPU` and `DQUANT_TOKEN` where they are set.
    pub fn from_env() -> Options {
        Options {
            dpu: std::env::var_os("DQUANT_DPU").map_or_else(default_socket, PathBuf::from),
            token: std::env::var("DQUANT_TOKEN").unwrap_or_default(),
            dtype: String::new(),
            vocabulary: None,
            seed: 0,
            first_batch: 0,
            batches: None,
            slots: 16,
            slot_bytes: 1 << 20,
            roce: None,
            memory: DEFAULT_MEMORY,
            loss_ppm: 0,
            reconnect: Duration::from_secs(30),
        }
    }
}

/// Opens `url` (`dq://HOST[:PORT]/NAME`) with an action, as a plan in its own language.
///
/// # Errors
/// When the plan, the URL or a dataset is refused, and when the DPU or the target cannot be reached.
pub fn open(url: &str, action: &str, offload: bool, options: &Options) -> Result<Stream, Error> {
    let url: Url = url.parse()?;
    let (plan, names) = url.datasets(action, options.seed)?;
    let vocabulary = options.vocabulary.unwrap_or(0);
    let dataset = |name| DatasetRef { name, dtype: options.dtype.clone(), vocabulary };
    let request = OpenRequest {
        target: url.target(),
        token: options.token.clone(),
        datasets: names.into_iter().map(dataset).collect(),
        plan,
        first_batch: options.first_batch,
        batches: options.batches.unwrap_or(0),
        slots: options.slots,
        slot_bytes: options.slot_bytes,
    };
    let (connection, local) = if offload {
        (to_daemon(options)?, None)
    } else {
        let (connection, local) = to_own_engine(&request, options)?;
        (connection, Some(local))
    };
    Stream::begin(connection, local, &request)
}

fn to_daemon(options: &Options) -> Result<Connection, Error> {
    let socket = || options.dpu.clone();
    let connection = Connection::connect(&options.dpu).map_err(|error| match error {
        AttachError::NoDaemon { .. } => Error::NoDaemon { socket: socket() },
        AttachError::Path { errno: Errno::ACCESS, .. } => Error::Denied { socket: socket() },
        error => Error::Connect(error),
    })?;
    // The request carries the target's token: it goes only to a daemon of this user or of root, never to
    // another program listening at that path.
    let owner = connection.peer()?.uid;
    if owner != 0 && owner != rustix::process::geteuid().as_raw() {
        return Err(Error::ForeignDaemon { socket: socket(), owner });
    }
    Ok(connection)
}

#[cfg(feature = "in-process")]
fn to_own_engine(
    request: &OpenRequest,
    options: &Options,
) -> Result<(Connection, LocalDpu), Error> {
    let config = engine::local::LocalConfig {
        target: request.target.clone(),
        roce: options.roce,
        memory: options.memory,
        ring: u64::from(options.slots) * u64::from(options.slot_bytes),
        loss_ppm: options.loss_ppm,
        reconnect: options.reconnect,
    };
    Ok(LocalDpu::start(&config)?)
}

#[cfg(not(feature = "in-process"))]
fn to_own_engine(
    _request: &OpenRequest,
    _options: &Options,
) -> Result<(Connection, LocalDpu), Error> {
    Err(Error::NotBuiltIn)
}
