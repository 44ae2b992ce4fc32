//! The client library: open a dataset with an action, read batches.
//!
//! ```no_run
//! use dquant::client::{Options, open};
//!
//! let plan = "window(2048) | shuffle(7) | blend(web=0.5,code=0.3,books=0.2) | narrow(u16)";
//! let mut stream = open("dq://10.0.0.5/corpora", plan, true, &Options::from_env())?;
//! for batch in stream.batches().take(1000) {
//!     let batch = batch?;
//!     let tokens: &[u16] = batch.tokens().expect("narrowed to u16");
//!     // ... one training step; dropping `batch` gives its memory back
//! }
//! # Ok::<(), dquant::exit::CliError>(())
//! ```
//!
//! With `offload` the DPU daemon of this machine does the work and this process only waits, reads and
//! gives slots back. Without it the same engine runs in a thread of this process. The batches are the
//! same to the byte (C4).
//!
//! A stream's position is a batch number, so resuming is opening with [`Options::first_batch`], and
//! [`read`] with another action goes on with that action at the next batch.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::Duration;

use bytemuck::AnyBitPattern;
use host::attach::{AttachError, Connection, DEFAULT_TIMEOUT};
use host::ring::{BatchView, Batches as SlotBatches, Consumer, RingError, RingFds};
use prost::Message;
use roce::wire::ROCE_PORT;
use tokio::runtime::Runtime;

use crate::budget::RingBudget;
use crate::control::peer::with_port;
use crate::control::proto::{
    OpenReply, OpenRequest, Opened, StreamStatus, StreamStatusRequest, open_reply,
};
use crate::control::{CALL_TIMEOUT, CONTROL_PORT};
use crate::engine::dpu::DpuEngine;
use crate::engine::sink::codes;
use crate::engine::{EngineError, HostConfig};
use crate::exit::CliError;
use crate::layout;
use crate::seed::fresh_seed;
use crate::stream::{DpuContext, MAX_MESSAGE, engine_error, serve_client};
use crate::url::Url;

/// How long the opening of a stream may take: longer than all calls that the DPU makes for it, so that
/// a target which gives no answer is reported by the DPU, which knows that.
const OPEN_TIMEOUT: Duration = CALL_TIMEOUT.saturating_mul(6);

/// How long to wait for the next slot before looking whether all is well.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How a stream is opened. [`Options::from_env`] is what most programs want.
#[derive(Clone, Debug)]
pub struct Options {
    /// Socket of the DPU daemon (`DQUANT_DPU`).
    pub dpu: PathBuf,
    /// The target's token (`DQUANT_TOKEN`).
    pub token: String,
    /// Token type of flat files.
    pub dtype: String,
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
    /// Without offload: bytes of registers.
    pub memory: u64,
    /// Without offload: received packets to drop, in parts per million.
    pub loss_ppm: u32,
    /// How long a lost target may stay away.
    pub reconnect: Duration,
}

/// Default socket of the DPU daemon.
pub fn default_socket() -> PathBuf {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map_or_else(std::env::temp_dir, Into::into);
    runtime.join("dquant-dpu.sock")
}

/// Default bytes of registers.
pub const DEFAULT_MEMORY: u64 = 128 << 20;

impl Options {
    /// Defaults, with `DQUANT_DPU` and `DQUANT_TOKEN` where they are set.
    pub fn from_env() -> Options {
        Options {
            dpu: std::env::var_os("DQUANT_DPU").map_or_else(default_socket, PathBuf::from),
            token: std::env::var("DQUANT_TOKEN").unwrap_or_default(),
            dtype: "u32".into(),
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

/// An open stream of batches.
#[derive(Debug)]
pub struct Stream {
    consumer: Consumer,
    slot: Option<SlotBatches>,
    opened: Opened,
    next_batch: u64,
    connection: Connection,
    // After the connection: the engine's thread ends when its client has hung up.
    local: Option<LocalDpu>,
}

/// A DPU engine inside this process, for streams without offload.
#[derive(Debug)]
struct LocalDpu {
    client: Option<JoinHandle<()>>,
    // Dropped in this order: streams first, then the engine, then what their control calls run on.
    engine: Option<DpuEngine>,
    _runtime: Runtime,
}

impl Drop for LocalDpu {
    fn drop(&mut self) {
        drop(self.engine.take());
        if let Some(client) = self.client.take() {
            let _ = client.join();
        }
    }
}

/// Opens `url` (`dq://HOST[:PORT]/NAME`) with an action, as a plan in its own language.
///
/// # Errors
/// When the plan, the URL or a dataset is refused, and when the DPU or the target cannot be reached.
pub fn open(url: &str, action: &str, offload: bool, options: &Options) -> Result<Stream, CliError> {
    let url: Url = url.parse()?;
    let (plan, names) = layout::names(&url, action, options.seed)?;
    let request = OpenRequest {
        target: with_port(&url.host, CONTROL_PORT),
        token: options.token.clone(),
        datasets: crate::stream::dataset_refs(names, &options.dtype),
        plan,
        first_batch: options.first_batch,
        batches: options.batches.unwrap_or(0),
        slots: options.slots,
        slot_bytes: options.slot_bytes,
    };
    let (connection, local) =
        if offload { (to_daemon(options)?, None) } else { to_own_engine(&request, options)? };
    Stream::begin(connection, local, &request)
}

fn to_daemon(options: &Options) -> Result<Connection, CliError> {
    let socket = options.dpu.display();
    let connection = Connection::connect(&options.dpu).map_err(|error| match error {
        AttachError::NoDaemon { .. } => CliError::peer_unreachable(format!(
            "no DPU daemon at {socket}"
        ))
        .hint("start one with `dquant dpu`, name its socket with --dpu or DQUANT_DPU, or use --offload false"),
        AttachError::Path { errno: rustix::io::Errno::ACCESS, .. } => {
            CliError::usage(format!("no right to use the DPU socket {socket}"))
                .hint("it is its owner's: run as that user or as root, or start a DPU of your own")
        }
        error => CliError::usage(format!("cannot connect to a DPU daemon: {error}"))
            .hint("name the socket of `dquant dpu` with --dpu or DQUANT_DPU, or use --offload false"),
    })?;
    // The request carries the target's token: it goes to our own daemon or the system's, to nobody
    // else who managed to listen at that path.
    let owner = connection.peer().map_err(CliError::usage)?.uid;
    if owner != 0 && owner != rustix::process::geteuid().as_raw() {
        return Err(CliError::usage(format!("the DPU at {socket} belongs to user {owner}"))
            .hint("name the socket of a DPU of your own or of root with --dpu or DQUANT_DPU"));
    }
    Ok(connection)
}

fn to_own_engine(
    request: &OpenRequest,
    options: &Options,
) -> Result<(Connection, Option<LocalDpu>), CliError> {
    let runtime = crate::runtime::multi_thread()?;
    let engine = start_engine(request, options)?;
    let context = DpuContext {
        commands: engine.commands.clone(),
        roce: engine.roce,
        runtime: runtime.handle().clone(),
        reconnect: options.reconnect,
        offload: false,
        memory: options.memory,
        rings: RingBudget::new(u64::from(options.slots) * u64::from(options.slot_bytes)),
    };
    let (ours, theirs) = Connection::pair().map_err(CliError::usage)?;
    let client = std::thread::Builder::new()
        .name("dquant-stream".into())
        .spawn(move || serve_client(&context, theirs, || ()))
        .map_err(CliError::usage)?;
    let local = LocalDpu { client: Some(client), engine: Some(engine), _runtime: runtime };
    Ok((ours, Some(local)))
}

/// What the engine of this process is made of, but for its address.
fn own_host(options: &Options, roce: SocketAddr) -> Result<HostConfig, CliError> {
    let Options { memory, loss_ppm, .. } = *options;
    Ok(HostConfig { roce, memory, loss_ppm, seed: fresh_seed()? })
}

/// Starts an engine at the address asked for, or at one from which the target can be reached: on the
/// RoCE port if it is free, else on any.
fn start_engine(request: &OpenRequest, options: &Options) -> Result<DpuEngine, CliError> {
    if let Some(roce) = options.roce {
        return DpuEngine::start(own_host(options, roce)?).map_err(engine_error);
    }
    let ip = local_ip_towards(&request.target)?;
    let host = own_host(options, SocketAddr::new(ip, ROCE_PORT))?;
    match DpuEngine::start(host) {
        Err(EngineError::Udp(_)) => {
            let any_port = HostConfig { roce: SocketAddr::new(ip, 0), ..host };
            DpuEngine::start(any_port).map_err(engine_error)
        }
        started => started.map_err(engine_error),
    }
}

/// The address this machine would use to talk to `host:port`. No packet is sent.
fn local_ip_towards(target: &str) -> Result<IpAddr, CliError> {
    let ip = (|| {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        if socket.connect(target).is_err() {
            let socket = UdpSocket::bind("[::]:0")?;
            socket.connect(target)?;
            return socket.local_addr();
        }
        socket.local_addr()
    })();
    ip.map(|address| address.ip()).map_err(|error| {
        CliError::peer_unreachable(format!("no way to {target}: {error}"))
            .hint("name the address of this process's endpoint with --roce")
    })
}

impl Stream {
    fn begin(
        mut connection: Connection,
        local: Option<LocalDpu>,
        request: &OpenRequest,
    ) -> Result<Stream, CliError> {
        let who = server(local.is_some());
        let lost = |error| lost(who, error);
        let sent = connection.send(&request.encode_to_vec(), &[]);
        connection.set_timeout(OPEN_TIMEOUT);
        let answer = sent.and_then(|()| connection.recv(MAX_MESSAGE));
        // A DPU that turns us away says why and hangs up without having read: what it said comes after the
        // error.
        let answer = answer.or_else(|error| match error {
            AttachError::Closed => connection.recv(MAX_MESSAGE).map_err(|_| error),
            error => Err(error),
        });
        let message = answer.map_err(lost)?;
        connection.set_timeout(DEFAULT_TIMEOUT);
        let reply = OpenReply::decode(message.bytes.as_slice()).map_err(CliError::usage)?;
        let opened = match reply.result {
            Some(open_reply::Result::Opened(opened)) => opened,
            Some(open_reply::Result::Failure(failure)) => return Err(refused(&failure)),
            None => return Err(CliError::usage(format!("{who} gave an empty answer"))),
        };
        let (_, fds) = message.with_fds::<{ RingFds::COUNT }>().map_err(CliError::usage)?;
        let liveness = connection.liveness().map_err(CliError::usage)?;
        let consumer = Consumer::attach(fds.into(), liveness).map_err(CliError::usage)?;
        let next_batch = request.first_batch;
        Ok(Stream { consumer, slot: None, opened, next_batch, connection, local })
    }

    /// What was opened: datasets, the plan printed back, shape and type of the batches.
    pub fn opened(&self) -> &Opened {
        &self.opened
    }

    /// Bytes of one batch.
    pub fn batch_bytes(&self) -> usize {
        let width = if self.opened.dtype == "u16" { 2 } else { 4 };
        self.opened.batch_samples as usize * self.opened.window_tokens as usize * width
    }

    /// Number of the next batch.
    pub fn next_batch(&self) -> u64 {
        self.next_batch
    }

    /// Whether the work is done by an engine in this process.
    pub fn is_local(&self) -> bool {
        self.local.is_some()
    }

    /// The batches, in order. Each is a view of the ring; dropping it gives its memory back, so holding
    /// more than the ring has stops the stream.
    pub fn batches(&mut self) -> Batches<'_> {
        Batches { stream: self, failed: false }
    }

    /// The next batch; `None` at the end of the stream.
    ///
    /// # Errors
    /// When the stream failed, and when its DPU died.
    pub fn next_view(&mut self) -> Result<Option<Batch>, CliError> {
        loop {
            if let Some(view) = self.slot.as_mut().and_then(Iterator::next) {
                self.next_batch = view.number() + 1;
                return Ok(Some(Batch(view)));
            }
            self.slot = None;
            match self.consumer.next(LOOK_EVERY) {
                Ok(Some(slot)) => self.slot = Some(slot.batches()),
                Ok(None) => return Ok(None),
                Err(RingError::TimedOut { .. }) => {}
                Err(error) => return Err(ring_error(error)),
            }
        }
    }

    /// What the stream did so far.
    ///
    /// # Errors
    /// When the DPU does not answer.
    pub fn status(&self) -> Result<StreamStatus, CliError> {
        let lost = |error| lost(server(self.is_local()), error);
        let request = StreamStatusRequest { version: 1 }.encode_to_vec();
        self.connection.send(&request, &[]).map_err(lost)?;
        let message = self.connection.recv(MAX_MESSAGE).map_err(lost)?;
        StreamStatus::decode(message.bytes.as_slice()).map_err(CliError::usage)
    }
}

/// Who serves the stream, in messages.
fn server(is_local: bool) -> &'static str {
    if is_local { "the engine of this process" } else { "the DPU daemon" }
}

/// No answer came over the local socket.
fn lost(who: &str, error: AttachError) -> CliError {
    match error {
        AttachError::Closed => CliError::peer_unreachable(format!("{who} closed the connection")),
        AttachError::TimedOut { waited_ms } => {
            CliError::peer_unreachable(format!("{who} gave no answer in {} s", waited_ms / 1000))
        }
        error => CliError::usage(format!("cannot read the answer of {who}: {error}")),
    }
}

fn refused(failure: &crate::control::proto::Failure) -> CliError {
    let error = match failure.code {
        3 => CliError::peer_unreachable(&failure.message),
        1 => CliError::check_failed(&failure.message),
        _ => CliError::usage(&failure.message),
    };
    if failure.hint.is_empty() { error } else { error.hint(&failure.hint) }
}

const START_AGAIN: &str = "start it again and open the stream at the batch you need";

fn ring_error(error: RingError) -> CliError {
    match error {
        RingError::StreamFailed { code: codes::DATA, message } => CliError::check_failed(message)
            .hint("see what is in the file with `dquant inspect`; narrow(u32) keeps large ids"),
        RingError::StreamFailed { code: codes::STORAGE, message } => {
            CliError::check_failed(message).hint("look after the file on the target's machine")
        }
        RingError::StreamFailed { code: codes::STOPPED, message } => {
            CliError::peer_unreachable(message).hint(START_AGAIN)
        }
        RingError::StreamFailed { message, .. } => CliError::peer_unreachable(message)
            .hint("start the target again; a longer wait is --reconnect"),
        RingError::ProducerDied { .. } => {
            CliError::peer_unreachable("the DPU daemon died").hint(START_AGAIN)
        }
        other => CliError::usage(other),
    }
}

/// Iterator over the batches of a stream; ends after an error.
#[derive(Debug)]
pub struct Batches<'a> {
    stream: &'a mut Stream,
    failed: bool,
}

impl Iterator for Batches<'_> {
    type Item = Result<Batch, CliError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let next = self.stream.next_view().transpose();
        self.failed = matches!(next, Some(Err(_)));
        next
    }
}

/// A batch, where the DPU put it. Its memory goes back when this is dropped.
#[derive(Clone, Debug)]
pub struct Batch(BatchView);

impl Batch {
    /// Its number in the stream.
    pub fn number(&self) -> u64 {
        self.0.number()
    }

    /// Samples one after the other, tokens little-endian.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The tokens as numbers; `None` when `T` is not as wide as the stream's token type divides into.
    pub fn tokens<T: AnyBitPattern>(&self) -> Option<&[T]> {
        bytemuck::try_cast_slice(&self.0).ok()
    }
}

/// Reads whole batches into `buf`, as many as fit, and returns the bytes read; 0 at the end. An
/// `action` or `offload` other than the stream was opened with takes effect at the next batch.
///
/// # Errors
/// As [`Stream::next_view`] and [`open`]; and when `buf` holds no whole batch.
pub fn read(
    file: &mut File,
    buf: &mut [u8],
    action: &str,
    offload: bool,
) -> Result<usize, CliError> {
    file.ensure(action, offload)?;
    let size = file.stream.batch_bytes();
    if buf.len() < size {
        let have = buf.len();
        return Err(CliError::usage(format!("a buffer of {have} bytes holds no batch of {size}"))
            .hint("read at least one batch at a time"));
    }
    let mut filled = 0;
    while filled + size <= buf.len() {
        let Some(batch) = file.stream.next_view()? else {
            break;
        };
        buf[filled..filled + size].copy_from_slice(batch.bytes());
        filled += size;
    }
    Ok(filled)
}

/// A stream with the file interface of [`read`].
#[derive(Debug)]
pub struct File {
    url: String,
    action: String,
    offload: bool,
    options: Options,
    stream: Stream,
}

impl File {
    /// Opens `url` with an action.
    ///
    /// # Errors
    /// As [`open`].
    pub fn open(
        url: &str,
        action: &str,
        offload: bool,
        options: &Options,
    ) -> Result<File, CliError> {
        let stream = open(url, action, offload, options)?;
        let (url, action) = (url.to_owned(), action.to_owned());
        Ok(File { url, action, offload, options: options.clone(), stream })
    }

    fn ensure(&mut self, action: &str, offload: bool) -> Result<(), CliError> {
        if self.action == action && self.offload == offload {
            return Ok(());
        }
        let first_batch = self.stream.next_batch();
        let end = self.options.batches.map(|count| self.options.first_batch + count);
        let options = Options {
            first_batch,
            batches: end.map(|end| end.saturating_sub(first_batch)),
            ..self.options.clone()
        };
        *self = File::open(&self.url, action, offload, &options)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two processes may have the same number, each in its container, and so may two starts.
    #[test]
    fn engines_of_one_process_number_have_seeds_of_their_own() {
        let options = Options::from_env();
        let at = SocketAddr::from(([127, 0, 0, 1], 0));
        let seed = || own_host(&options, at).expect("the system has random numbers").seed;
        assert_ne!(seed(), seed());
        assert_ne!(seed(), u64::from(std::process::id()));
    }

    /// The sentence of a DPU that is full reaches whoever it turns away, whether the request was under way
    /// or not.
    #[test]
    fn a_client_that_is_turned_away_hears_why() {
        let request = OpenRequest { slots: 1, ..OpenRequest::default() };
        for request_comes_first in [false, true] {
            let (ours, theirs) = Connection::pair().expect("a pair of sockets");
            let full = CliError::usage("no room today").hint("try again later");
            if request_comes_first {
                ours.send(b"more", &[]).expect("there is room");
            }
            crate::stream::refuse_client(theirs, &full);
            let refused = Stream::begin(ours, None, &request).expect_err("no ring came");
            assert_eq!(refused.parts().0, "no room today");
        }
    }
}
