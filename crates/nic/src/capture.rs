//! What a wire sends and accepts, as a pcap file with nanoseconds: raw IP packets, or the Ethernet
//! frames of RoCEv1.
//!
//! Every packet is written as it is on the wire: addresses, ports, traffic class, hop limit, the
//! IPv4 identification that the kernel writes, the ICRC. What a socket cannot see is filled in: the
//! UDP checksum is correct (some senders leave it zero), the IPv6 flow label is 0. Packets that a
//! wire refused are not in the file; its counters count them.
//!
//! - Records are gathered in a bounded buffer and written whole, when it is full, [`FLUSH_AFTER`]
//!   after the first of them, and at the end. A killed process leaves a valid file without the last
//!   few.
//! - A file ends at its limit or at the first disk error, and [`Capture::ended`] reports why. The
//!   wire continues either way: a capture never delays or changes traffic.
//! - The payload is the sending program's data, so only the owner may read the file (mode 0600).

use std::fmt;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use roce::wire::capture::{Link, RECORD_HEADER_BYTES, file_header, record_header};
use roce::wire::frame::{self, Ip, Ipv4, Ipv6};
use roce::{Duration, Time};

use crate::clock;

/// Longest that a record stays in memory while the wire is in use.
pub const FLUSH_AFTER: Duration = Duration::from_millis(100);

/// Bytes gathered before they are written.
const BUFFER_BYTES: usize = 256 << 10;

/// Longest record: headers and the largest IP packet.
const MAX_RECORD_BYTES: usize = RECORD_HEADER_BYTES + (64 << 10);

/// The parts of IP and UDP headers that are not implied by the rest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) from: SocketAddr,
    pub(crate) to: SocketAddr,
    /// DSCP and ECN.
    pub(crate) tos: u8,
    pub(crate) hop_limit: u8,
    /// IPv4 identification.
    pub(crate) id: u16,
}

impl Seen {
    /// The IP header; `None` between IP versions.
    fn ip(&self) -> Option<Ip> {
        let Seen { tos, hop_limit, id, .. } = *self;
        match (self.from.ip(), self.to.ip()) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                Some(Ip::V4(Ipv4 { tos, id, dont_fragment: true, ttl: hop_limit, src, dst }))
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                Some(Ip::V6(Ipv6 { traffic_class: tos, flow_label: 0, hop_limit, src, dst }))
            }
            _ => None,
        }
    }
}

/// A capture file being written.
#[derive(Debug)]
pub struct Capture {
    file: File,
    link: Link,
    buffer: Vec<u8>,
    /// Bytes of the file so far, all of them whole records.
    written: u64,
    limit: u64,
    /// When the oldest record in the buffer was added; none when it is empty.
    waiting_since: Option<Time>,
    records: u64,
    left_out: u64,
    ended: Option<String>,
}

/// Two captures in one file would write over each other.
fn busy(error: TryLockError) -> io::Error {
    match error {
        TryLockError::Error(error) => error,
        TryLockError::WouldBlock => {
            io::Error::new(io::ErrorKind::ResourceBusy, "another capture is being written to it")
        }
    }
}

impl Capture {
    /// Creates or truncates a file for IP packets and writes the file header. The capture ends at
    /// `limit` bytes.
    ///
    /// # Errors
    /// When the file cannot be created or written; `ResourceBusy` while another capture, of any
    /// process, is written to it.
    pub fn create(path: &Path, limit: u64) -> io::Result<Capture> {
        Capture::create_for(Link::RawIp, path, limit)
    }

    /// The same for the packets of a wire of this kind: RoCEv1 has Ethernet frames, all others have
    /// IP packets.
    ///
    /// # Errors
    /// As [`Capture::create`].
    pub fn create_for(link: Link, path: &Path, limit: u64) -> io::Result<Capture> {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(path)?;
        // Pipes and devices are shared by nature and cannot be truncated.
        if file.metadata()?.is_file() {
            // Held as long as the file is open.
            file.try_lock().map_err(busy)?;
            file.set_len(0)?;
        }
        Capture::start(link, file, limit)
    }

    /// Starts a capture of IP packets in an open, empty file.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn to_file(file: File, limit: u64) -> io::Result<Capture> {
        Capture::start(Link::RawIp, file, limit)
    }

    fn start(link: Link, mut file: File, limit: u64) -> io::Result<Capture> {
        let header = file_header(link);
        file.write_all(&header)?;
        Ok(Capture {
            file,
            link,
            buffer: Vec::with_capacity(BUFFER_BYTES),
            written: header.len() as u64,
            limit,
            waiting_since: None,
            records: 0,
            left_out: 0,
            ended: None,
        })
    }

    /// Packets recorded.
    pub fn records(&self) -> u64 {
        self.records
    }

    /// Packets left out because the file had ended, or is for another kind of link.
    pub fn left_out(&self) -> u64 {
        self.left_out
    }

    /// Why recording has ended, if it has.
    pub fn ended(&self) -> Option<&str> {
        self.ended.as_deref()
    }

    /// Writes what is buffered.
    pub fn flush(&mut self) {
        self.waiting_since = None;
        if self.buffer.is_empty() {
            return;
        }
        match self.file.write_all(&self.buffer) {
            Ok(()) => self.written += self.buffer.len() as u64,
            Err(error) => {
                self.ended = Some(format!("cannot write the capture: {error}"));
                // Some programs cannot read a file with a partial record. If it cannot be cut off,
                // readers that stop at the damage still get everything before it.
                let _ = self.file.set_len(self.written);
            }
        }
        self.buffer.clear();
    }

    /// Writes records that have waited long enough. Wires call it; other callers that add packets
    /// must do so themselves.
    pub fn flush_if_due(&mut self) {
        let due = self.waiting_since.is_some_and(|since| clock::now().since(since) >= FLUSH_AFTER);
        if due {
            self.flush();
        }
    }

    /// Adds a packet whose UDP payload consists of `pieces`.
    pub(crate) fn record<'p>(
        &mut self,
        seen: &Seen,
        pieces: impl IntoIterator<Item = &'p [u8], IntoIter: Clone>,
    ) {
        let Some(ip) = seen.ip().filter(|_| self.link == Link::RawIp) else {
            self.left_out += 1;
            return;
        };
        let (from, to) = (seen.from.port(), seen.to.port());
        self.append(wall_time(), |buffer| frame::datagram(&ip, from, to, pieces, buffer).is_ok());
    }

    /// Adds an Ethernet frame that is sent or received now.
    pub(crate) fn frame(&mut self, frame: &[u8]) {
        match self.link {
            Link::Ethernet => self.packet(wall_time(), frame),
            _ => self.left_out += 1,
        }
    }

    /// Adds a packet, from the first header of the file's link on, that was seen at `time`
    /// since 1970. A packet longer than the largest IP packet is left out.
    pub fn packet(&mut self, time: Time, packet: &[u8]) {
        self.append(time, |buffer| {
            let fits = packet.len() + RECORD_HEADER_BYTES <= MAX_RECORD_BYTES;
            buffer.extend_from_slice(if fits { packet } else { &[] });
            fits
        });
    }

    /// Appends what `write` adds to the buffer, at most one IP packet, unless it reports failure.
    fn append(&mut self, time: Time, write: impl FnOnce(&mut Vec<u8>) -> bool) {
        if !self.has_room() {
            self.left_out += 1;
            return;
        }
        let start = self.buffer.len();
        self.buffer.resize(start + RECORD_HEADER_BYTES, 0);
        if !write(&mut self.buffer) {
            self.buffer.truncate(start);
            self.left_out += 1;
            return;
        }
        let len = (self.buffer.len() - start - RECORD_HEADER_BYTES) as u32;
        let header = record_header(time.as_nanos(), len, len);
        self.buffer[start..start + RECORD_HEADER_BYTES].copy_from_slice(&header);
        self.records += 1;
        self.waiting_since.get_or_insert_with(clock::now);
    }

    /// Makes room in the buffer for one more record; whether the file still has room for it.
    fn has_room(&mut self) -> bool {
        let bytes = self.written + self.buffer.len() as u64 + MAX_RECORD_BYTES as u64;
        if self.ended.is_none() && bytes > self.limit {
            self.flush();
            self.ended = Some(format!("the capture has reached its limit of {} bytes", self.limit));
        }
        if self.ended.is_none() && self.buffer.len() + MAX_RECORD_BYTES > BUFFER_BYTES {
            self.flush();
        }
        self.ended.is_none()
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.flush();
    }
}

impl fmt::Display for Capture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "capture of {} packets", self.records)?;
        match &self.ended {
            Some(why) => write!(f, ", ended ({why}), {} packets left out", self.left_out),
            None => Ok(()),
        }
    }
}

/// Time since 1970.
fn wall_time() -> Time {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Time::from_nanos(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}
