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
//! With `offload` the DPU daemon of this machine does the work and this process only waits, reads
//! and returns slots. Without it the same engine runs in a thread of this process; that needs the
//! feature `in-process`, which links the whole data path and control plane. The batches are
//! identical to the byte (C4).
//!
//! A stream's position is a batch number, so a stream is resumed with [`Options::first_batch`], and
//! [`read`] with another action continues with that action at the next batch.

mod error;
mod file;
mod opening;
mod proto;
mod rank;
mod stream;
mod url;

pub use error::{Error, Fault, Reason, Server};
pub use file::{File, read};
pub use host::process::id as process_id;
pub use opening::{DEFAULT_MEMORY, Options, default_socket, open, open_all};
pub use proto::{DatasetInfo, Drawn, Opened, StreamStatus};
pub use rank::{Group, Layout, LayoutError, Machine, Rank};
pub use stream::{Batch, Batches, Next, Stream};
pub use xio::dataset::Identity;
pub use xio::reader::{LeaveOut, LeaveOutError};
