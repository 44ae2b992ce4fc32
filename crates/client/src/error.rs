//! Why a stream could not be opened, or ended early.

use std::fmt;
use std::path::PathBuf;

use host::attach::AttachError;
use host::ring::{RingError, codes};
use service::descriptors::{DESCRIPTORS_HINT, lacks_descriptors};
use service::text::{lines, one_line};
use thiserror::Error;

use crate::proto::Failure;

/// Why a stream could not be opened, or ended early.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The URL is not `dq://HOST[:PORT]/NAME`.
    #[error("{url:?}: {why}")]
    Url {
        /// The text that was given.
        url: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The plan has a mistake.
    #[error("invalid plan\n{marked}")]
    Plan {
        /// What is wrong, and the line of the plan with the place marked.
        marked: String,
        /// What to write instead, where that is known.
        hint: Option<String>,
    },
    /// A pattern of local files that is invalid or that no file matches.
    #[error("{pattern:?}: {why}")]
    Pattern {
        /// The text that was given.
        pattern: String,
        /// What is wrong with it.
        why: String,
    },
    /// Files are given, and a plan whose blend names datasets.
    #[error("files are listed, and the plan has a blend")]
    BlendOfFiles,
    /// There is no such data-parallel rank.
    #[error("rank {rank} of {ranks}")]
    NoRank {
        /// The rank.
        rank: u32,
        /// How many there are.
        ranks: u32,
    },
    /// Neither URL nor plan names a dataset.
    #[error("the URL names no dataset, and the plan has no blend")]
    NoDataset,
    /// No daemon listens on the DPU's socket.
    #[error("no DPU daemon at {}", socket.display())]
    NoDaemon {
        /// The socket file.
        socket: PathBuf,
    },
    /// The DPU's socket belongs to another user.
    #[error("permission denied on the DPU socket {}", socket.display())]
    Denied {
        /// The socket file.
        socket: PathBuf,
    },
    /// The DPU's socket cannot be connected to.
    #[error("cannot connect to a DPU daemon: {0}")]
    Connect(#[source] AttachError),
    /// The process that listens on the DPU's socket is neither root, nor this user, nor the one
    /// that was named as the DPU's. Nothing was sent to it.
    #[error("the DPU at {} belongs to user {owner}", socket.display())]
    ForeignDaemon {
        /// The socket file.
        socket: PathBuf,
        /// The user that it runs as.
        owner: u32,
    },
    /// The user that was named as the DPU's cannot be trusted with the token.
    #[error("DPU of user {user:?}: {why}")]
    DpuUser {
        /// The name or number that was given.
        user: String,
        /// What is wrong with it.
        why: String,
    },
    /// A stream without offload or over local files, in a program that was built without the
    /// feature `in-process`.
    #[error("without a DPU: this program was built without the feature `in-process`")]
    NotBuiltIn,
    /// The DPU or the target refused the request, or failed to serve it.
    #[error("{message}")]
    Refused {
        /// What kind of failure it is.
        reason: Reason,
        /// What failed, as reported by the refusing side.
        message: String,
        /// The next thing to try, as suggested by the refusing side.
        hint: Option<String>,
    },
    /// The server closed the connection.
    #[error("{server} closed the connection")]
    Closed {
        /// The server of the stream.
        server: Server,
    },
    /// The server sent no reply in time.
    #[error("{server} did not reply within {} s", waited_ms / 1000)]
    NoResponse {
        /// The server of the stream.
        server: Server,
        /// How long was allowed, in milliseconds.
        waited_ms: u64,
    },
    /// The server's reply cannot be read.
    #[error("cannot decode the reply of {server}: {source}")]
    Reply {
        /// The server of the stream.
        server: Server,
        /// What is wrong.
        source: AttachError,
    },
    /// The server's reply is empty.
    #[error("{server} sent an empty reply")]
    EmptyReply {
        /// The server of the stream.
        server: Server,
    },
    /// The server's reply is not a message of the protocol.
    #[error(transparent)]
    Decode(#[from] prost::DecodeError),
    /// The local socket failed.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The stream ended early; every batch before the fault was delivered.
    #[error("{message}")]
    Stream {
        /// What kind of fault.
        fault: Fault,
        /// What failed, where, and why.
        message: String,
        /// The next thing to try, where the engine knows one.
        hint: Option<String>,
    },
    /// The DPU died. Open the stream again at [`Stream::next_batch`](crate::Stream::next_batch).
    #[error("the DPU daemon died")]
    DaemonDied,
    /// The ring cannot be used.
    #[error(transparent)]
    Ring(RingError),
    /// A buffer is smaller than a batch.
    #[error("a buffer of {have} bytes is too small for a batch of {need}")]
    SmallBuffer {
        /// Bytes of the buffer.
        have: usize,
        /// Bytes of a batch.
        need: usize,
    },
}

/// The server of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Server {
    /// The DPU daemon of this machine.
    Daemon,
    /// The engine in this process.
    OwnEngine,
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Server::Daemon => "the DPU daemon",
            Server::OwnEngine => "the engine of this process",
        })
    }
}

/// What kind of failure an error is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The request ran and a check failed.
    CheckFailed,
    /// The request is invalid, or a machine or its files are not as needed.
    Invalid,
    /// The target cannot be reached.
    Unreachable,
}

/// Why a stream ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A token that the plan cannot deliver.
    Data,
    /// The target can no longer deliver the file.
    Storage,
    /// A target became unreachable.
    Target,
    /// The DPU was asked to stop.
    Stopped,
    /// Another rank that reads the stream left it, or never came.
    Rank,
}

const START_AGAIN: &str = "start it again and open the stream at the batch you need";

impl Error {
    /// What kind of failure it is.
    pub fn reason(&self) -> Reason {
        match self {
            Error::Refused { reason, .. } => *reason,
            Error::Stream { fault: Fault::Data | Fault::Storage, .. } => Reason::CheckFailed,
            Error::NoDaemon { .. }
            | Error::Closed { .. }
            | Error::NoResponse { .. }
            | Error::DaemonDied
            | Error::Stream { fault: Fault::Target | Fault::Stopped | Fault::Rank, .. } => {
                Reason::Unreachable
            }
            _ => Reason::Invalid,
        }
    }

    /// The next thing to try, in terms of the command line, where that is known.
    pub fn hint(&self) -> Option<String> {
        if lacks_descriptors(self) {
            return Some(DESCRIPTORS_HINT.to_owned());
        }
        let hint = match self {
            Error::Url { .. } => {
                "write it as dq://HOST[:PORT]/NAME, for example dq://127.0.0.1/corpora/web, or give the path of a local file"
            }
            Error::Plan { hint, .. } => {
                hint.as_deref().unwrap_or("`dquant cat --help` shows plans")
            }
            Error::Pattern { .. } => "a pattern names local files, for example corpora/*.bin",
            Error::BlendOfFiles => "give each its weight, or leave the blend out of the plan",
            Error::NoRank { .. } => "ranks count from 0",
            Error::NoDataset => "write dq://HOST/NAME, or blend(a=0.5,b=0.5)",
            Error::NoDaemon { .. } => {
                "start one with `dquant dpu`, name its socket with --dpu or DQUANT_DPU, or use --offload false"
            }
            Error::Denied { .. } => {
                "its owner chooses who may use it (--socket-mode, --socket-group), and the folders above it must let this user in; else \
                 start a DPU of your own"
            }
            Error::Connect(_) => {
                "name the socket of `dquant dpu` with --dpu or DQUANT_DPU, or use --offload false"
            }
            Error::ForeignDaemon { .. } => {
                "if this user may have your token, name it with --dpu-user or DQUANT_DPU_USER; else name the socket of a DPU of your \
                 own or of root with --dpu or DQUANT_DPU"
            }
            Error::DpuUser { .. } => {
                "name the user that the DPU runs as; `id -u NAME` prints the number, also of a directory service"
            }
            Error::Refused { hint, .. } => return hint.clone(),
            Error::Stream { hint: Some(hint), .. } => hint,
            Error::Stream { fault: Fault::Data, .. } => {
                "see what is in the file with `dquant inspect`; large ids need narrow(u32) or more bits, and \
                 narrow(u16, overflow=saturate(ID)) replaces them"
            }
            Error::Stream { fault: Fault::Storage, .. } => {
                "check the file on the machine that stores it"
            }
            Error::Stream { fault: Fault::Target, .. } => {
                "start the target again; a longer wait is --reconnect"
            }
            Error::Stream { fault: Fault::Rank, .. } => {
                "look for that rank's own error, and restart the job at its last checkpoint"
            }
            Error::Stream { fault: Fault::Stopped, .. } | Error::DaemonDied => START_AGAIN,
            Error::SmallBuffer { .. } => "read at least one batch at a time",
            _ => return None,
        };
        Some(hint.to_owned())
    }

    /// No reply came over the local socket.
    pub(crate) fn lost(server: Server, source: AttachError) -> Error {
        match source {
            AttachError::Closed => Error::Closed { server },
            AttachError::TimedOut { waited_ms } => Error::NoResponse { server, waited_ms },
            source => Error::Reply { server, source },
        }
    }
}

impl From<Failure> for Error {
    fn from(Failure { message, hint, code }: Failure) -> Error {
        let reason = match code {
            1 => Reason::CheckFailed,
            3 => Reason::Unreachable,
            _ => Reason::Invalid,
        };
        // Exceptions and errors end on terminals. Mistakes in plans are shown below the plan's
        // line.
        let (message, hint) = (lines(&message).into_owned(), one_line(&hint).into_owned());
        Error::Refused { reason, message, hint: Some(hint).filter(|hint| !hint.is_empty()) }
    }
}

#[cfg(feature = "in-process")]
impl From<service::Error> for Error {
    fn from(error: service::Error) -> Error {
        use service::error::Kind;
        let reason = match error.kind() {
            Kind::Invalid => Reason::Invalid,
            Kind::Unreachable => Reason::Unreachable,
        };
        let (message, hint) = error.parts();
        Error::Refused { reason, message, hint }
    }
}

impl From<RingError> for Error {
    fn from(error: RingError) -> Error {
        match error {
            RingError::StreamFailed { code, message } => {
                let fault = match code {
                    codes::DATA => Fault::Data,
                    codes::STORAGE => Fault::Storage,
                    codes::STOPPED => Fault::Stopped,
                    codes::RANK => Fault::Rank,
                    _ => Fault::Target,
                };
                // Text of another process. It ends with a hint where the engine knows one.
                let message = lines(&message).into_owned();
                let (message, hint) = match message.rsplit_once("; hint: ") {
                    Some((message, hint)) => (message.to_owned(), Some(hint.to_owned())),
                    None => (message, None),
                };
                Error::Stream { fault, message, hint }
            }
            RingError::ProducerDied { .. } => Error::DaemonDied,
            other => Error::Ring(other),
        }
    }
}
