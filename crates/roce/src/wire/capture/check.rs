//! The check of a capture: decode, verify, encode again, compare.
//!
//! Every packet to RoCE's UDP port or of RoCEv1's EtherType must decode, carry the right ICRC (over
//! the real header fields, identification included) and be reproduced by the encoder. Every
//! deviation is a difference, listed with the packet's number as in Wireshark. Other traffic is
//! counted and skipped. Memory is bounded: the first [`MAX_DIFFERENCES`] are listed, all are
//! counted.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::fmt;

use thiserror::Error;

use super::super::Opcode;
use super::super::frame::{Ethernet, Frame, FrameError, NetworkType, NotRoce, Packet, UdpChecksum};
use super::{Capture, CaptureError, Link, Record};

/// Most differences that a report lists.
pub const MAX_DIFFERENCES: usize = 32;

/// What is wrong with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Reason {
    /// The capture kept too little of it to check.
    #[error("only {captured} of {original} bytes were captured; use a larger snap length")]
    CutShort {
        /// Bytes captured.
        captured: usize,
        /// Bytes on the link.
        original: u32,
    },
    /// It does not decode.
    #[error("does not decode: {0}")]
    Undecodable(FrameError),
    /// The ICRC is wrong.
    #[error("ICRC {carried:#010x} is wrong, {computed:#010x} expected")]
    Icrc {
        /// ICRC in the packet, its first byte highest.
        carried: u32,
        /// The right one.
        computed: u32,
    },
    /// The encoder produces other bytes.
    #[error("encoded again it differs from byte {at} on")]
    Encoding {
        /// Offset of the first difference, or the shorter length.
        at: usize,
    },
}

/// A packet that failed the check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Number in the file, from 1.
    pub packet: u64,
    /// What is wrong with it.
    pub reason: Reason,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "packet {}: {}", self.packet, self.reason)
    }
}

/// The result of [`check`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CaptureReport {
    /// Link type, if the file header could be read.
    pub link: Option<Link>,
    /// Packets in the file.
    pub packets: u64,
    /// Packets to UDP port 4791, and those of RoCEv1.
    pub roce: u64,
    /// Those that decoded.
    pub decoded: u64,
    /// Those whose ICRC is right.
    pub icrc_right: u64,
    /// Those that the encoder reproduces byte for byte.
    pub reproduced: u64,
    /// Decoded packets by network header and opcode.
    pub by_opcode: BTreeMap<(NetworkType, Opcode), u64>,
    /// Decoded packets with bits set that senders must clear and receivers ignore.
    pub ignored_bits: u64,
    /// Decoded packets without UDP checksum.
    pub udp_checksum_unused: u64,
    /// Decoded packets with the right UDP checksum.
    pub udp_checksum_right: u64,
    /// Decoded packets with a wrong UDP checksum, or one to be filled in by the NIC. Not a
    /// difference: captures on the sending host look like that.
    pub udp_checksum_wrong: u64,
    /// Packets that are not RoCE, by kind.
    pub skipped: BTreeMap<NotRoce, u64>,
    /// The first [`MAX_DIFFERENCES`] packets that failed.
    pub differences: Vec<Difference>,
    /// All differences; a packet may have two.
    pub difference_count: u64,
    /// Why the file could not be read, or not to its end.
    pub damage: Option<CaptureError>,
}

/// Decodes every RoCE packet of a pcap file, verifies its ICRC, encodes it again and compares.
pub fn check(bytes: &[u8]) -> CaptureReport {
    let mut report = CaptureReport::default();
    match Capture::parse(bytes) {
        Ok(capture) => report.run(&capture),
        Err(error) => report.damage = Some(error),
    }
    report
}

/// A packet and the bytes before and after it that are not part of RoCE.
struct Framed<'a> {
    lead: Lead<'a>,
    packet: Packet<'a>,
    trailer: &'a [u8],
}

enum Lead<'a> {
    Ethernet(Ethernet),
    /// A cooked header, or nothing.
    Verbatim(&'a [u8]),
}

impl<'a> Framed<'a> {
    fn parse(link: Link, bytes: &'a [u8]) -> Result<Framed<'a>, FrameError> {
        match link {
            Link::Ethernet => {
                let Frame { ethernet, packet, trailer } = Frame::parse(bytes)?;
                Ok(Framed { lead: Lead::Ethernet(ethernet), packet, trailer })
            }
            Link::RawIp => {
                let (packet, trailer) = Packet::parse(bytes)?;
                Ok(Framed { lead: Lead::Verbatim(&[]), packet, trailer })
            }
            Link::Sll => Framed::parse_cooked(bytes, 16, 14),
            Link::Sll2 => Framed::parse_cooked(bytes, 20, 0),
        }
    }

    /// A cooked header of `len` bytes has the EtherType at `at`.
    fn parse_cooked(bytes: &'a [u8], len: usize, at: usize) -> Result<Framed<'a>, FrameError> {
        let (lead, rest) = bytes.split_at_checked(len).ok_or(NotRoce::TooShort)?;
        let ethertype = u16::from_be_bytes([lead[at], lead[at + 1]]);
        let (packet, trailer) = Packet::parse_as(ethertype, rest)?;
        Ok(Framed { lead: Lead::Verbatim(lead), packet, trailer })
    }

    fn emit(&self) -> Result<Vec<u8>, FrameError> {
        let Framed { lead, packet, trailer } = self;
        let mut out = Vec::new();
        match *lead {
            Lead::Ethernet(ethernet) => {
                Frame { ethernet, packet: *packet, trailer }.emit(&mut out)?;
            }
            Lead::Verbatim(lead) => {
                out.extend(lead);
                packet.emit(&mut out)?;
                out.extend(*trailer);
            }
        }
        Ok(out)
    }
}

impl CaptureReport {
    /// Whether the whole file was read and every RoCE packet in it passed.
    pub fn is_clean(&self) -> bool {
        self.damage.is_none() && self.difference_count == 0
    }

    /// Packets that are not RoCE.
    pub fn skipped_count(&self) -> u64 {
        self.skipped.values().sum()
    }

    fn run(&mut self, capture: &Capture<'_>) {
        self.link = Some(capture.link());
        for record in capture.records() {
            match record {
                Ok(record) => self.packet(capture.link(), &record),
                Err(error) => self.damage = Some(error),
            }
        }
    }

    fn packet(&mut self, link: Link, record: &Record<'_>) {
        self.packets += 1;
        match Framed::parse(link, record.bytes) {
            Err(FrameError::NotRoce(kind)) => *self.skipped.entry(kind).or_default() += 1,
            Err(error) => {
                self.roce += 1;
                self.differ(record.number, why_undecodable(record, error));
            }
            Ok(framed) => {
                self.roce += 1;
                self.count(&framed.packet);
                self.verify(record.number, &framed.packet);
                self.compare(record, &framed);
            }
        }
    }

    fn count(&mut self, packet: &Packet<'_>) {
        self.decoded += 1;
        let key = (packet.network.kind(), packet.headers.bth().opcode);
        *self.by_opcode.entry(key).or_default() += 1;
        self.ignored_bits += u64::from(packet.headers.has_ignored_bits());
        match packet.udp_checksum() {
            Ok(UdpChecksum::NoUdp) => {}
            Ok(UdpChecksum::Unused) => self.udp_checksum_unused += 1,
            Ok(UdpChecksum::Right) => self.udp_checksum_right += 1,
            Ok(UdpChecksum::Wrong) | Err(_) => self.udp_checksum_wrong += 1,
        }
    }

    fn verify(&mut self, number: u64, packet: &Packet<'_>) {
        let [carried, computed] = [packet.icrc, packet.computed_icrc()].map(u32::from_be_bytes);
        if carried == computed {
            self.icrc_right += 1;
        } else {
            self.differ(number, Reason::Icrc { carried, computed });
        }
    }

    fn compare(&mut self, record: &Record<'_>, framed: &Framed<'_>) {
        match framed.emit() {
            Ok(encoded) if encoded == record.bytes => self.reproduced += 1,
            Ok(encoded) => {
                let at = first_difference(&encoded, record.bytes);
                self.differ(record.number, Reason::Encoding { at });
            }
            Err(error) => self.differ(record.number, Reason::Undecodable(error)),
        }
    }

    fn differ(&mut self, packet: u64, reason: Reason) {
        self.difference_count += 1;
        if self.differences.len() < MAX_DIFFERENCES {
            self.differences.push(Difference { packet, reason });
        }
    }
}

fn why_undecodable(record: &Record<'_>, error: FrameError) -> Reason {
    if record.is_cut_short() {
        Reason::CutShort { captured: record.bytes.len(), original: record.original_len }
    } else {
        Reason::Undecodable(error)
    }
}

fn first_difference(a: &[u8], b: &[u8]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

impl fmt::Display for CaptureReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(link) = self.link {
            writeln!(f, "link type    {link}")?;
        }
        writeln!(f, "packets      {} ({} skipped)", self.packets, self.skipped_count())?;
        for (kind, count) in &self.skipped {
            writeln!(f, "  {count:>8}  {kind}")?;
        }
        writeln!(
            f,
            "RoCE         {}: {} decoded, {} with right ICRC, {} reproduced",
            self.roce, self.decoded, self.icrc_right, self.reproduced
        )?;
        for ((network, opcode), count) in &self.by_opcode {
            writeln!(f, "  {count:>8}  {network} {opcode}")?;
        }
        writeln!(
            f,
            "UDP checksum {} unused, {} right, {} wrong or not filled in",
            self.udp_checksum_unused, self.udp_checksum_right, self.udp_checksum_wrong
        )?;
        if self.ignored_bits != 0 {
            writeln!(f, "reserved     {} packets have reserved bits set", self.ignored_bits)?;
        }
        self.fmt_differences(f)
    }
}

impl CaptureReport {
    fn fmt_differences(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "differences  {}", self.difference_count)?;
        for difference in &self.differences {
            write!(f, "\n  {difference}")?;
        }
        if self.difference_count > self.differences.len() as u64 {
            write!(
                f,
                "\n  ... and {} more",
                self.difference_count - self.differences.len() as u64
            )?;
        }
        if let Some(damage) = self.damage {
            write!(f, "\nfile         {damage}")?;
        }
        Ok(())
    }
}
