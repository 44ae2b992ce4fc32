//! How a stream is opened: its options, and who does the work, the DPU daemon or an engine in this
//! process.

use std::net::SocketAddr;
use std::ops::Range;
#[cfg(feature = "in-process")]
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use host::accounts;
use host::attach::{AttachError, Connection};
use rustix::io::Errno;
#[cfg(feature = "in-process")]
use xio::plan::Plan;

use crate::error::Error;
use crate::proto::{BatchRange, DatasetRef, OpenRequest};
#[cfg(feature = "in-process")]
use crate::rank::Numbering;
use crate::rank::Rank;
#[cfg(feature = "in-process")]
use crate::stream::FileStream;
use crate::stream::{LocalDpu, Stream};
use crate::url::Location;
#[cfg(feature = "in-process")]
use crate::url::parse_plan;

/// How a stream is opened. [`Options::from_env`] is what most programs want.
#[derive(Clone, Debug)]
pub struct Options {
    /// Socket of the DPU daemon (`DQUANT_DPU`).
    pub dpu: PathBuf,
    /// A user, by name or number, whose daemon gets the token, besides this user and root
    /// (`DQUANT_DPU_USER`).
    pub dpu_user: Option<String>,
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
    /// Batches to deliver to each rank, those left out included; without it the stream has no end.
    pub batches: Option<u64>,
    /// Samples by which all batches begin later than at a multiple of their size, below that size:
    /// not 0 where a stream goes on from one with batches of another size.
    pub shift: u32,
    /// Batches that are not delivered, as after a loss spike: whole steps of the job. Batches keep
    /// the numbers of the plan: the one after `999` is `1200` where `1000..1200` is left out.
    pub leave_out: Vec<Range<u64>>,
    /// Which of the batches are for this trainer.
    pub rank: Rank,
    /// Slots of the ring.
    pub slots: u32,
    /// Bytes of a slot; 0 for 1 MiB, or for a batch where that is larger.
    pub slot_bytes: u32,
    /// Without offload: address of this process's own RoCE endpoint (else one is chosen).
    pub roce: Option<SocketAddr>,
    /// Without offload, and over local files: most bytes of staging buffers.
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
    /// Defaults, with `DQUANT_DPU`, `DQUANT_DPU_USER` and `DQUANT_TOKEN` where they are set.
    pub fn from_env() -> Options {
        Options {
            dpu: std::env::var_os("DQUANT_DPU").map_or_else(default_socket, PathBuf::from),
            dpu_user: std::env::var("DQUANT_DPU_USER").ok().filter(|user| !user.is_empty()),
            token: std::env::var("DQUANT_TOKEN").unwrap_or_default(),
            dtype: String::new(),
            vocabulary: None,
            seed: 0,
            first_batch: 0,
            batches: None,
            shift: 0,
            leave_out: Vec::new(),
            rank: Rank::default(),
            slots: 16,
            slot_bytes: 0,
            roce: None,
            memory: DEFAULT_MEMORY,
            loss_ppm: 0,
            reconnect: Duration::from_secs(30),
        }
    }
}

/// Opens `url` with an action, as a plan in its own language.
///
/// `dq://HOST[:PORT]/NAME` is a dataset at a target. Anything without a scheme is a path on this
/// machine: of a file, with or without its ending; of several, as a pattern such as
/// `corpora/*.bin`; or of the folder with the datasets that the plan's blend names. Local files are
/// read by an engine in this process whatever `offload` is: there is no DPU, no target and no
/// socket.
///
/// # Errors
/// When the plan, the URL or a dataset is refused, and when the DPU or the target cannot be
/// reached.
pub fn open(url: &str, action: &str, offload: bool, options: &Options) -> Result<Stream, Error> {
    let Rank { rank, ranks, .. } = options.rank;
    if rank >= ranks {
        return Err(Error::NoRank { rank, ranks });
    }
    let url = match url.parse()? {
        Location::Target(url) => url,
        Location::Files(path) => return open_files(&path, action, options),
    };
    let (plan, names) = url.datasets(action, options.seed)?;
    let vocabulary = options.vocabulary.unwrap_or(0);
    let range = |batches: &Range<u64>| BatchRange { first: batches.start, end: batches.end };
    let dataset = |name| DatasetRef {
        name,
        dtype: options.dtype.clone(),
        vocabulary,
        ..DatasetRef::default()
    };
    let request = OpenRequest {
        target: url.target(),
        token: options.token.clone(),
        datasets: names.into_iter().map(dataset).collect(),
        plan,
        first_batch: options.first_batch,
        batches: options.batches.unwrap_or(0),
        slots: options.slots,
        slot_bytes: options.slot_bytes,
        ranks: options.rank.to_request(offload),
        shift: options.shift,
        leave_out: options.leave_out.iter().map(range).collect(),
    };
    let (connection, local) = if offload {
        (to_daemon(options)?, None)
    } else {
        let (connection, local) = to_own_engine(&request, options)?;
        (connection, Some(local))
    };
    Stream::begin(connection, local, &request, &options.rank)
}

fn to_daemon(options: &Options) -> Result<Connection, Error> {
    let socket = || options.dpu.clone();
    let trusted = options.dpu_user.as_deref().map(trusted_user).transpose()?;
    let connection = Connection::connect(&options.dpu).map_err(|error| match error {
        AttachError::NoDaemon { .. } => Error::NoDaemon { socket: socket() },
        AttachError::Path { errno: Errno::ACCESS, .. } => Error::Denied { socket: socket() },
        error => Error::Connect(error),
    })?;
    // The request carries the target's token: it goes only to a daemon of this user, of root or of
    // the user that was named, never to another program listening at that path.
    let owner = connection.peer()?.uid;
    let own = rustix::process::geteuid().as_raw();
    let is_trusted = owner == 0 || owner == own || Some(owner) == trusted;
    if !is_trusted || !accounts::is_one_user(owner) {
        return Err(Error::ForeignDaemon { socket: socket(), owner });
    }
    Ok(connection)
}

/// The number of a user who is named as trusted.
fn trusted_user(name: &str) -> Result<u32, Error> {
    let refused = |why: String| Error::DpuUser { user: name.to_owned(), why };
    let user = accounts::user(name).map_err(|error| refused(error.to_string()))?;
    if !accounts::is_one_user(user) {
        return Err(refused("in this user namespace that number stands for many users".to_owned()));
    }
    Ok(user)
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
        ring: match options.slot_bytes {
            // As large as the batches need: nobody else uses it.
            0 => u64::MAX,
            bytes => u64::from(options.slots) * u64::from(bytes),
        },
        loss_ppm: options.loss_ppm,
        reconnect: options.reconnect,
    };
    Ok(LocalDpu::start(&config)?)
}

/// Opens files of this machine, each a path or a pattern, as one pattern that matches all of them:
/// blended in proportion to their samples, in the order of their names.
///
/// # Errors
/// As [`open`], and when the plan has a blend, which would name them.
pub fn open_all(paths: &[String], action: &str, options: &Options) -> Result<Stream, Error> {
    let Rank { rank, ranks, .. } = options.rank;
    if rank >= ranks {
        return Err(Error::NoRank { rank, ranks });
    }
    open_paths(paths, action, options)
}

#[cfg(feature = "in-process")]
fn open_paths(paths: &[String], action: &str, options: &Options) -> Result<Stream, Error> {
    let plan = parse_plan(action, options.seed)?;
    if !plan.blend().is_empty() {
        return Err(Error::BlendOfFiles);
    }
    let files = paths.iter().map(|path| matching(path)).collect::<Result<Vec<_>, _>>()?;
    let mut files: Vec<PathBuf> = files.into_iter().flatten().collect();
    files.sort_unstable();
    if let Some([file, _]) = files.array_windows().find(|[one, next]| one == next) {
        let (pattern, why) = (file.display().to_string(), "is given twice".to_owned());
        return Err(Error::Pattern { pattern, why });
    }
    open_found(files, &plan, options)
}

#[cfg(feature = "in-process")]
fn open_files(path: &str, action: &str, options: &Options) -> Result<Stream, Error> {
    let plan = parse_plan(action, options.seed)?;
    let files = match plan.blend() {
        [] => matching(path)?,
        parts => parts.iter().map(|part| Path::new(path).join(&part.name)).collect(),
    };
    open_found(files, &plan, options)
}

#[cfg(feature = "in-process")]
fn open_found(files: Vec<PathBuf>, plan: &Plan, options: &Options) -> Result<Stream, Error> {
    let config = engine::files::FilesConfig {
        files,
        dtype: options.dtype.clone(),
        vocabulary: options.vocabulary,
        plan: plan.to_string(),
        first_batch: options.first_batch,
        batches: options.batches,
        shift: options.shift,
        leave_out: options.leave_out.clone(),
        rank: (options.rank.rank, options.rank.ranks),
        slots: options.slots,
        slot_bytes: options.slot_bytes,
        memory: options.memory,
    };
    Stream::over_files(
        FileStream::open(config)?,
        Numbering::new(options.first_batch, &options.rank),
    )
}

/// The files that a path or a pattern stands for, by name. A file whose name looks like a pattern
/// is a file.
#[cfg(feature = "in-process")]
fn matching(path: &str) -> Result<Vec<PathBuf>, Error> {
    if Path::new(path).exists() || !path.contains(['*', '?', '[']) {
        return Ok(vec![path.into()]);
    }
    let bad = |why: String| Error::Pattern { pattern: path.to_owned(), why };
    let found = glob::glob(path).map_err(|error| bad(error.to_string()))?;
    let found =
        found.collect::<Result<Vec<PathBuf>, _>>().map_err(|error| bad(error.to_string()))?;
    // What lies beside a file of tokens and describes it is not a dataset.
    let is_data = |path: &PathBuf| {
        !engine::catalog::is_beside(&path.file_name().unwrap_or_default().to_string_lossy())
    };
    let files: Vec<PathBuf> =
        found.into_iter().filter(is_data).filter(|path| path.is_file()).collect();
    if files.is_empty() { Err(bad("no file matches".to_owned())) } else { Ok(files) }
}

#[cfg(not(feature = "in-process"))]
fn open_paths(_paths: &[String], _action: &str, _options: &Options) -> Result<Stream, Error> {
    Err(Error::NotBuiltIn)
}

#[cfg(not(feature = "in-process"))]
fn open_files(_path: &str, _action: &str, _options: &Options) -> Result<Stream, Error> {
    Err(Error::NotBuiltIn)
}

#[cfg(not(feature = "in-process"))]
fn to_own_engine(
    _request: &OpenRequest,
    _options: &Options,
) -> Result<(Connection, LocalDpu), Error> {
    Err(Error::NotBuiltIn)
}
