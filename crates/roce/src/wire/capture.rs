//! Classic pcap files, read from a byte slice and written to a vector.
//!
//! The reader accepts both byte orders, microseconds and nanoseconds, and the link types that a
//! capture of RoCE traffic has on Linux; it borrows the packets and allocates nothing. A truncated
//! file yields the packets before the damage, then one error, then nothing. The writer produces
//! little-endian files with nanoseconds, which tcpdump and Wireshark read.
//!
//! [`check()`] runs every RoCE packet of a file through the codec of [`wire`](super).

mod check;

use alloc::vec::Vec;
use core::fmt;

use thiserror::Error;

pub use check::{CaptureReport, Difference, MAX_DIFFERENCES, Reason, check};

/// Length of the file header.
pub const FILE_HEADER_BYTES: usize = 24;

/// Length of the header of every packet.
pub const RECORD_HEADER_BYTES: usize = 16;

/// Longest packet that [`Writer`] keeps; longer ones are cut, and marked so.
pub const SNAP_BYTES: u32 = 262_144;

/// Magic number of files with microseconds.
const MAGIC_US: u32 = 0xa1b2_c3d4;
/// Magic number of files with nanoseconds.
const MAGIC_NS: u32 = 0xa1b2_3c4d;
/// First word of a pcapng file, the same in both byte orders.
const MAGIC_PCAPNG: u32 = 0x0a0d_0d0a;

/// The first header of every packet in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Link {
    /// An Ethernet header (link type 1).
    Ethernet,
    /// An IPv4 or IPv6 header (101).
    RawIp,
    /// Linux "cooked" header of the `any` device (113).
    Sll,
    /// Its second version (276).
    Sll2,
}

impl Link {
    /// The link type with this number, if it is one of these.
    pub const fn from_code(code: u16) -> Option<Link> {
        match code {
            1 => Some(Link::Ethernet),
            101 => Some(Link::RawIp),
            113 => Some(Link::Sll),
            276 => Some(Link::Sll2),
            _ => None,
        }
    }

    /// Its number.
    pub const fn code(self) -> u16 {
        match self {
            Link::Ethernet => 1,
            Link::RawIp => 101,
            Link::Sll => 113,
            Link::Sll2 => 276,
        }
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Link::Ethernet => "Ethernet",
            Link::RawIp => "raw IP",
            Link::Sll => "Linux cooked",
            Link::Sll2 => "Linux cooked v2",
        })
    }
}

/// Why bytes are not a capture file, or where the file is damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CaptureError {
    /// No room for the file header.
    #[error("{0} bytes are too few for a capture file (24 needed)")]
    TooShort(usize),
    /// The newer file format.
    #[error("this is a pcapng file; convert it with `editcap -F pcap IN OUT`")]
    PcapNg,
    /// Not a capture file.
    #[error("magic number {0:#010x} is not that of a pcap file")]
    Magic(u32),
    /// A version other than 2.
    #[error("pcap version {0} is not 2")]
    Version(u16),
    /// A link type that cannot hold RoCEv2, or is not known here.
    #[error("link type {0} is not supported; capture on an Ethernet interface or on `any`")]
    LinkType(u16),
    /// The file ends inside a packet's header.
    #[error("packet {packet}: the file ends after {have} of 16 header bytes")]
    RecordHeader {
        /// Number of the packet, from 1.
        packet: u64,
        /// Bytes left in the file.
        have: usize,
    },
    /// The file ends inside a packet.
    #[error("packet {packet}: the file ends after {have} of {need} bytes")]
    RecordBytes {
        /// Number of the packet, from 1.
        packet: u64,
        /// Bytes left in the file.
        have: usize,
        /// Bytes announced by the packet's header.
        need: u32,
    },
}

/// How numbers are encoded in a file.
#[derive(Clone, Copy, Debug)]
struct Format {
    big_endian: bool,
    fraction_ns: u64,
}

impl Format {
    /// Reads the magic number.
    fn detect(magic: [u8; 4]) -> Result<Format, CaptureError> {
        match (u32::from_le_bytes(magic), u32::from_be_bytes(magic)) {
            (MAGIC_US, _) => Ok(Format { big_endian: false, fraction_ns: 1000 }),
            (MAGIC_NS, _) => Ok(Format { big_endian: false, fraction_ns: 1 }),
            (_, MAGIC_US) => Ok(Format { big_endian: true, fraction_ns: 1000 }),
            (_, MAGIC_NS) => Ok(Format { big_endian: true, fraction_ns: 1 }),
            (MAGIC_PCAPNG, _) => Err(CaptureError::PcapNg),
            (magic, _) => Err(CaptureError::Magic(magic)),
        }
    }

    fn word(self, bytes: [u8; 4]) -> u32 {
        if self.big_endian { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) }
    }

    fn half(self, bytes: [u8; 2]) -> u16 {
        if self.big_endian { u16::from_be_bytes(bytes) } else { u16::from_le_bytes(bytes) }
    }
}

/// A capture file whose header has been checked.
#[derive(Clone, Copy, Debug)]
pub struct Capture<'a> {
    format: Format,
    link: Link,
    records: &'a [u8],
}

impl<'a> Capture<'a> {
    /// Reads the file header.
    pub fn parse(bytes: &'a [u8]) -> Result<Capture<'a>, CaptureError> {
        let short = CaptureError::TooShort(bytes.len());
        let (header, records) = bytes.split_first_chunk::<FILE_HEADER_BYTES>().ok_or(short)?;
        let [m0, m1, m2, m3, v0, v1, ..] = *header;
        let format = Format::detect([m0, m1, m2, m3])?;
        let version = format.half([v0, v1]);
        if version != 2 {
            return Err(CaptureError::Version(version));
        }
        let [.., l0, l1, l2, l3] = *header;
        // The upper half tells whether frames end with a check sequence; the codec keeps it anyway.
        let code = format.word([l0, l1, l2, l3]) as u16;
        let link = Link::from_code(code).ok_or(CaptureError::LinkType(code))?;
        Ok(Capture { format, link, records })
    }

    /// The first header of every packet.
    pub fn link(&self) -> Link {
        self.link
    }

    /// The packets, in the order of the file.
    pub fn records(&self) -> Records<'a> {
        Records { format: self.format, rest: self.records, number: 0 }
    }
}

/// A captured packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// Number in the file, from 1.
    pub number: u64,
    /// When it was captured, in nanoseconds since 1970.
    pub time_ns: u64,
    /// Its length on the link; more than `bytes` has if it was cut short.
    pub original_len: u32,
    /// The captured bytes.
    pub bytes: &'a [u8],
}

impl Record<'_> {
    /// Whether the capture kept only the start of the packet.
    pub fn is_cut_short(&self) -> bool {
        self.bytes.len() < self.original_len as usize
    }
}

/// The packets of a file; ends after the first error.
#[derive(Clone, Debug)]
pub struct Records<'a> {
    format: Format,
    rest: &'a [u8],
    number: u64,
}

impl<'a> Records<'a> {
    fn read(&mut self) -> Result<Record<'a>, CaptureError> {
        let (number, have) = (self.number, self.rest.len());
        let (header, rest) = self
            .rest
            .split_first_chunk::<RECORD_HEADER_BYTES>()
            .ok_or(CaptureError::RecordHeader { packet: number, have })?;
        let (words, _) = header.as_chunks::<4>();
        let [seconds, fraction, need, original_len] =
            [0, 1, 2, 3].map(|i| self.format.word(words[i]));
        let (bytes, rest) = rest
            .split_at_checked(need as usize)
            .ok_or(CaptureError::RecordBytes { packet: number, have: rest.len(), need })?;
        self.rest = rest;
        let time_ns =
            u64::from(seconds) * 1_000_000_000 + u64::from(fraction) * self.format.fraction_ns;
        Ok(Record { number, time_ns, original_len, bytes })
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = Result<Record<'a>, CaptureError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        self.number += 1;
        let record = self.read();
        if record.is_err() {
            self.rest = &[];
        }
        Some(record)
    }
}

/// The header of a file with nanoseconds.
pub fn file_header(link: Link) -> [u8; FILE_HEADER_BYTES] {
    let mut out = [0; FILE_HEADER_BYTES];
    out[..4].copy_from_slice(&MAGIC_NS.to_le_bytes());
    out[4..6].copy_from_slice(&2u16.to_le_bytes());
    out[6..8].copy_from_slice(&4u16.to_le_bytes());
    out[16..20].copy_from_slice(&SNAP_BYTES.to_le_bytes());
    out[20..].copy_from_slice(&u32::from(link.code()).to_le_bytes());
    out
}

/// The header of a packet followed by `captured` of its `original` bytes. Time is in nanoseconds
/// since 1970 and wraps, as the format requires, after 2^32 seconds.
pub fn record_header(time_ns: u64, captured: u32, original: u32) -> [u8; RECORD_HEADER_BYTES] {
    let words =
        [(time_ns / 1_000_000_000) as u32, (time_ns % 1_000_000_000) as u32, captured, original];
    let mut out = [0; RECORD_HEADER_BYTES];
    for (bytes, word) in out.as_chunks_mut::<4>().0.iter_mut().zip(words) {
        *bytes = word.to_le_bytes();
    }
    out
}

/// Builds a capture file in memory. It grows with every packet: for long recordings, write
/// [`file_header`] and [`record_header`] to a file instead.
#[derive(Clone, Debug)]
pub struct Writer {
    out: Vec<u8>,
}

impl Writer {
    /// An empty file.
    pub fn new(link: Link) -> Writer {
        Writer { out: file_header(link).to_vec() }
    }

    /// Adds a packet, cut to [`SNAP_BYTES`].
    pub fn record(&mut self, time_ns: u64, packet: &[u8]) {
        let original = u32::try_from(packet.len()).unwrap_or(u32::MAX);
        let captured = original.min(SNAP_BYTES);
        self.out.extend(record_header(time_ns, captured, original));
        self.out.extend(&packet[..captured as usize]);
    }

    /// The file.
    pub fn into_bytes(self) -> Vec<u8> {
        self.out
    }
}
