//! Capsules: the requests of a reader to a storage target, and the responses.
//!
//! Both are 64 bytes, little-endian, sent as RC SENDs on the queue pair of the data transfer. A
//! capsule carries its version and its own CRC-32C, so a damaged or foreign one is refused before
//! any field is used (C7). Unused bytes are zero, and checked, so that one meaning has one
//! encoding. Requests are numbered without gaps per connection: a duplicate or one out of sequence
//! is refused ([`Refusal::Replayed`]). The data itself is sent by RDMA WRITE before the response;
//! the response carries the CRC-32C of the tokens, computed by the target before it packs or
//! compresses them and checked by the reader after it has undone both, so everything between the
//! two (codecs, target memory, wire, reader memory) is covered.

use thiserror::Error;

use crate::dataset::Dtype;
use crate::disk::Change;
use crate::kernel::{Codec, Crc32c, MapFault};

/// Size of every capsule.
pub const CAPSULE_BYTES: usize = 64;

/// Version of the layout, the first field checked.
pub const VERSION: u8 = 2;

const MAGIC: u32 = u32::from_le_bytes(*b"DQcp");
const CRC_AT: usize = CAPSULE_BYTES - 4;
const KIND_READ: u8 = 1;
const KIND_DONE: u8 = 2;

/// Read a run of tokens, run the session's stages over it, write the result into the reader's
/// memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    /// Number of the request on this connection, from 1 without gaps.
    pub seq: u64,
    /// Tag chosen by the reader, echoed in the response.
    pub tag: u32,
    /// Index of the dataset in the session.
    pub source: u32,
    /// First token.
    pub first_token: u64,
    /// Tokens to read.
    pub tokens: u32,
    /// Token type of the result: the output of the session's stages for this dataset.
    pub deliver: Dtype,
    /// Destination address in the reader's memory.
    pub remote_addr: u64,
    /// Key of that memory.
    pub rkey: u32,
}

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The tokens are in the reader's memory.
    Done {
        /// Bytes written there.
        bytes: u32,
        /// CRC-32C of the tokens.
        crc32c: u32,
        /// Bytes read from storage for them (alignment included).
        source_bytes: u32,
        /// Bits of a packed token; 0 if the tokens are not packed.
        bits: u8,
        /// What the bytes are compressed with.
        codec: Option<Codec>,
        /// Tokens that did not fit and were replaced.
        replaced: u32,
    },
    /// A token that the plan cannot deliver (C5).
    Overflow {
        /// Index of the token in the dataset.
        token: u64,
        /// Its value, as it came to the stage.
        value: i128,
        /// The stage of the target that refuses it, from 0 for the first after the read.
        stage: u8,
    },
    /// The file ended before the requested tokens: it was truncated after the session began.
    Truncated {
        /// First byte of the file that was missing.
        at_byte: u64,
    },
    /// Storage failed with this error number.
    Storage {
        /// The operating system's error number.
        errno: i32,
    },
    /// The request itself was refused.
    Refused(Refusal),
    /// The file is not what it was when the session began.
    Changed(Change),
    /// The user action failed on the block that begins with this token of the dataset.
    Action {
        /// Index of the token.
        token: u64,
        /// How it failed.
        fault: MapFault,
    },
}

/// Why a target refuses a request that it could decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Error)]
#[repr(u16)]
pub enum Refusal {
    /// The session has no such dataset.
    #[error("the session has no such dataset")]
    UnknownSource = 1,
    /// The range of tokens is not inside the dataset.
    #[error("the range of tokens is not inside the dataset")]
    OutOfRange = 2,
    /// The range is empty or does not fit a staging buffer.
    #[error("the range of tokens is empty or does not fit a staging buffer")]
    BadLength = 3,
    /// The session's stages output a token type other than the requested one.
    #[error("the session's stages give another token type than requested")]
    BadType = 4,
    /// The reader has more requests outstanding than it was given credits for.
    #[error("more requests outstanding than credits given")]
    NoCredit = 5,
    /// The capsule was damaged, of another version, or not a request.
    #[error("the capsule was corrupt, of another version, or not a request")]
    BadCapsule = 6,
    /// The number of the request was used before, or one was skipped.
    #[error("the request's number was used before or skipped one")]
    Replayed = 7,
}

impl Refusal {
    /// Every reason, in the order of their codes.
    pub const ALL: [Refusal; 7] = [
        Refusal::UnknownSource,
        Refusal::OutOfRange,
        Refusal::BadLength,
        Refusal::BadType,
        Refusal::NoCredit,
        Refusal::BadCapsule,
        Refusal::Replayed,
    ];

    /// A short name, for counters.
    pub const fn name(self) -> &'static str {
        match self {
            Refusal::UnknownSource => "unknown_source",
            Refusal::OutOfRange => "out_of_range",
            Refusal::BadLength => "bad_length",
            Refusal::BadType => "bad_type",
            Refusal::NoCredit => "no_credit",
            Refusal::BadCapsule => "bad_capsule",
            Refusal::Replayed => "replayed",
        }
    }

    fn from_code(code: u64) -> Option<Refusal> {
        Refusal::ALL.into_iter().find(|reason| *reason as u64 == code)
    }
}

/// The response to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadResponse {
    /// Number of the request.
    pub seq: u64,
    /// Tag of the request.
    pub tag: u32,
    /// Its outcome.
    pub outcome: Outcome,
}

/// Why bytes are not a capsule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CapsuleError {
    /// Not 64 bytes.
    #[error("capsule of {0} bytes, {CAPSULE_BYTES} expected")]
    Length(usize),
    /// Not one of ours.
    #[error("capsule magic {0:#010x} is unknown")]
    Magic(u32),
    /// Another version.
    #[error("capsule version {0}, {VERSION} expected")]
    Version(u8),
    /// CRC-32C does not match.
    #[error("capsule CRC-32C {found:#010x}, {expected:#010x} computed")]
    Crc {
        /// CRC in the capsule.
        found: u32,
        /// CRC of its bytes.
        expected: u32,
    },
    /// A field holds an undefined value.
    #[error("capsule field {0} holds an invalid value")]
    Field(&'static str),
}

/// Writes fields of a capsule by offset.
struct Layout([u8; CAPSULE_BYTES]);

impl Layout {
    fn new(kind: u8) -> Layout {
        let mut layout = Layout([0; CAPSULE_BYTES]);
        layout.u32(0, MAGIC);
        layout.0[4] = VERSION;
        layout.0[5] = kind;
        layout
    }

    fn u32(&mut self, at: usize, value: u32) {
        self.0[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    fn u64(&mut self, at: usize, value: u64) {
        self.0[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }

    fn u128(&mut self, at: usize, value: u128) {
        self.0[at..at + 16].copy_from_slice(&value.to_le_bytes());
    }

    fn seal(mut self, crc: Crc32c) -> [u8; CAPSULE_BYTES] {
        let sum = crc(0, &self.0[..CRC_AT]);
        self.u32(CRC_AT, sum);
        self.0
    }
}

/// Reads fields of a capsule whose frame has been checked.
struct View<'a>(&'a [u8; CAPSULE_BYTES]);

impl<'a> View<'a> {
    fn checked(bytes: &'a [u8], kind: u8, crc: Crc32c) -> Result<View<'a>, CapsuleError> {
        let exact = bytes.try_into().map_err(|_| CapsuleError::Length(bytes.len()))?;
        let view = View(exact);
        match (view.u32(0), view.0[4]) {
            (MAGIC, VERSION) => {}
            (MAGIC, version) => return Err(CapsuleError::Version(version)),
            (magic, _) => return Err(CapsuleError::Magic(magic)),
        }
        let (found, expected) = (view.u32(CRC_AT), crc(0, &view.0[..CRC_AT]));
        if found != expected {
            return Err(CapsuleError::Crc { found, expected });
        }
        if view.0[5] != kind {
            return Err(CapsuleError::Field("kind"));
        }
        Ok(view)
    }

    /// Refuses non-zero bytes outside the decoded fields.
    fn is(&self, encoded: &[u8; CAPSULE_BYTES]) -> Result<(), CapsuleError> {
        match self.0 == encoded {
            true => Ok(()),
            false => Err(CapsuleError::Field("reserved")),
        }
    }

    fn u32(&self, at: usize) -> u32 {
        let mut raw = [0; 4];
        raw.copy_from_slice(&self.0[at..at + 4]);
        u32::from_le_bytes(raw)
    }

    fn u64(&self, at: usize) -> u64 {
        let mut raw = [0; 8];
        raw.copy_from_slice(&self.0[at..at + 8]);
        u64::from_le_bytes(raw)
    }

    fn u128(&self, at: usize) -> u128 {
        let mut raw = [0; 16];
        raw.copy_from_slice(&self.0[at..at + 16]);
        u128::from_le_bytes(raw)
    }
}

/// Codes of token types in capsules: the index in [`Dtype::ALL`], which never changes.
fn dtype_code(dtype: Dtype) -> u8 {
    Dtype::ALL.iter().position(|known| *known == dtype).map_or(u8::MAX, |code| code as u8)
}

fn dtype_of(code: u8) -> Option<Dtype> {
    Dtype::ALL.get(usize::from(code)).copied()
}

/// Codes of codecs in capsules: 0 is none, others the index in [`Codec::ALL`] from 1.
fn codec_code(codec: Option<Codec>) -> u8 {
    let index = codec.and_then(|codec| Codec::ALL.iter().position(|known| *known == codec));
    index.map_or(0, |index| index as u8 + 1)
}

fn codec_of(code: u8) -> Result<Option<Codec>, CapsuleError> {
    match code.checked_sub(1) {
        None => Ok(None),
        Some(index) => match Codec::ALL.get(usize::from(index)) {
            Some(codec) => Ok(Some(*codec)),
            None => Err(CapsuleError::Field("codec")),
        },
    }
}

impl ReadRequest {
    /// The 64 bytes to send.
    pub fn encode(&self, crc: Crc32c) -> [u8; CAPSULE_BYTES] {
        let mut layout = Layout::new(KIND_READ);
        layout.0[6] = dtype_code(self.deliver);
        layout.u64(8, self.seq);
        layout.u32(16, self.tag);
        layout.u32(20, self.source);
        layout.u64(24, self.first_token);
        layout.u32(32, self.tokens);
        layout.u32(36, self.rkey);
        layout.u64(40, self.remote_addr);
        layout.seal(crc)
    }

    /// Checks and decodes.
    pub fn decode(bytes: &[u8], crc: Crc32c) -> Result<ReadRequest, CapsuleError> {
        let view = View::checked(bytes, KIND_READ, crc)?;
        let request = ReadRequest {
            seq: view.u64(8),
            tag: view.u32(16),
            source: view.u32(20),
            first_token: view.u64(24),
            tokens: view.u32(32),
            deliver: dtype_of(view.0[6]).ok_or(CapsuleError::Field("deliver"))?,
            rkey: view.u32(36),
            remote_addr: view.u64(40),
        };
        view.is(&request.encode(crc)).map(|()| request)
    }
}

impl ReadResponse {
    /// The 64 bytes to send.
    pub fn encode(&self, crc: Crc32c) -> [u8; CAPSULE_BYTES] {
        let mut layout = Layout::new(KIND_DONE);
        layout.u64(8, self.seq);
        layout.u32(16, self.tag);
        let (status, small, large): (u8, u64, u128) = match self.outcome {
            Outcome::Done { bytes, crc32c, source_bytes, bits, codec, replaced } => {
                layout.u32(20, source_bytes);
                (layout.0[48], layout.0[49]) = (bits, codec_code(codec));
                layout.u32(52, replaced);
                (0, u64::from(bytes), u128::from(crc32c))
            }
            Outcome::Overflow { token, value, stage } => {
                layout.0[48] = stage;
                (1, token, value as u128)
            }
            Outcome::Truncated { at_byte } => (2, at_byte, 0),
            Outcome::Storage { errno } => (3, u64::from(errno as u32), 0),
            Outcome::Refused(reason) => (4, reason as u64, 0),
            Outcome::Changed(Change::Block { at_byte }) => (5, at_byte, 0),
            Outcome::Changed(Change::Written { len }) => (6, len, 0),
            Outcome::Changed(Change::Removed) => (7, 0, 0),
            Outcome::Action { token, fault } => {
                let (code, detail) = fault.code();
                layout.0[48] = code;
                (8, token, u128::from(detail))
            }
        };
        layout.0[6] = status;
        layout.u64(24, small);
        layout.u128(32, large);
        layout.seal(crc)
    }

    /// Checks and decodes.
    pub fn decode(bytes: &[u8], crc: Crc32c) -> Result<ReadResponse, CapsuleError> {
        let view = View::checked(bytes, KIND_DONE, crc)?;
        let (small, large) = (view.u64(24), view.u128(32));
        let bad = |_| CapsuleError::Field("outcome");
        let outcome = match view.0[6] {
            0 => Outcome::Done {
                bytes: u32::try_from(small).map_err(bad)?,
                crc32c: u32::try_from(large).map_err(bad)?,
                source_bytes: view.u32(20),
                bits: view.0[48],
                codec: codec_of(view.0[49])?,
                replaced: view.u32(52),
            },
            1 => Outcome::Overflow { token: small, value: large as i128, stage: view.0[48] },
            2 => Outcome::Truncated { at_byte: small },
            3 => Outcome::Storage { errno: u32::try_from(small).map_err(bad)? as i32 },
            4 => Outcome::Refused(Refusal::from_code(small).ok_or(CapsuleError::Field("refusal"))?),
            5 => Outcome::Changed(Change::Block { at_byte: small }),
            6 => Outcome::Changed(Change::Written { len: small }),
            7 => Outcome::Changed(Change::Removed),
            8 => {
                let detail = u32::try_from(large).map_err(bad)?;
                let fault = MapFault::from_code(view.0[48], detail);
                Outcome::Action { token: small, fault: fault.ok_or(CapsuleError::Field("fault"))? }
            }
            _ => return Err(CapsuleError::Field("status")),
        };
        let response = ReadResponse { seq: view.u64(8), tag: view.u32(16), outcome };
        view.is(&response.encode(crc)).map(|()| response)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
