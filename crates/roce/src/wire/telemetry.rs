//! In-band network telemetry (INT): what the switches on a packet's way write into it.
//!
//! A [`Report`] is a header in front of the BTH. The sender of a data packet leaves it empty, every
//! switch that knows it stamps the link on which the packet leaves, and the receiver returns it in
//! front of its acknowledgement. Only endpoints send it whose connections are both set to
//! (`CongestionControl::Hpcc`). The ICRC does not cover it, since switches change it.
//!
//! | bytes | contents |
//! |---|---|
//! | 0 | opcode 0xfe, of the range that InfiniBand leaves to manufacturers |
//! | 1 | version in the high four bits; bit 0: returned by the receiver; bit 1: a link had no room |
//!
//! Version 0 has 64 bytes and reports every link ([`Form::Links`]):
//!
//! | bytes | contents |
//! |---|---|
//! | 2 | links stamped, 0–5 |
//! | 3 | 0 |
//! | 4 + 12 n | link n: rate in Mbit/s, bytes queued behind the packet, time in nanoseconds, bytes sent |
//!
//! The four fields of a link are 24 bits each, in network byte order; bytes are in units of 64.
//! Time and bytes sent wrap around (after 16.8 ms and 1 GiB), so only differences mean something,
//! and only between reports that are close to each other ([`Report::MAX_AGE_NS`]).
//!
//! Version 1 has 4 bytes and reports the busiest link ([`Form::Digest`]), of which switches measure
//! the utilization themselves:
//!
//! | bytes | contents |
//! |---|---|
//! | 2 | [`digest`] of the highest utilization; 0 before the first switch |
//! | 3 | 0 |

use super::WireError;
use super::digest;

/// First byte of the header.
pub const TELEMETRY_OPCODE: u8 = 0xfe;

const ECHO: u8 = 1;
const CUT: u8 = 2;
/// The version of digests.
const DIGEST: u8 = 0x10;

const LINK_BYTES: usize = 12;
const FIRST_LINK: usize = 4;

/// Bytes per unit of the byte counts.
const UNIT: u64 = 64;

const MASK: u64 = 0x00ff_ffff;

/// What one link reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hop {
    rate_mbps: u32,
    queue: u32,
    time: u32,
    sent: u32,
}

impl Hop {
    /// A link of `rate_bps` at `now_ns`, that has sent so many bytes in all and holds
    /// `queue_bytes`. Rates and queues are cut to what their fields hold.
    pub const fn new(rate_bps: u64, now_ns: u64, sent_bytes: u64, queue_bytes: u64) -> Hop {
        Hop {
            rate_mbps: cut(rate_bps / 1_000_000),
            queue: cut(queue_bytes / UNIT),
            time: (now_ns & MASK) as u32,
            sent: ((sent_bytes / UNIT) & MASK) as u32,
        }
    }

    /// The rate of the link in bits per second.
    pub const fn rate_bps(&self) -> u64 {
        self.rate_mbps as u64 * 1_000_000
    }

    /// Bytes that were queued behind the packet.
    pub const fn queue_bytes(&self) -> u64 {
        self.queue as u64 * UNIT
    }

    /// Time since an earlier report of the same link, in nanoseconds.
    pub const fn nanos_since(&self, before: &Hop) -> u64 {
        (self.time.wrapping_sub(before.time) as u64) & MASK
    }

    /// Bytes that the link has sent since an earlier report.
    pub const fn bytes_since(&self, before: &Hop) -> u64 {
        ((self.sent.wrapping_sub(before.sent) as u64) & MASK) * UNIT
    }

    fn parse(bytes: &[u8; LINK_BYTES]) -> Hop {
        let field = |at: usize| u32::from_be_bytes([0, bytes[at], bytes[at + 1], bytes[at + 2]]);
        Hop { rate_mbps: field(0), queue: field(3), time: field(6), sent: field(9) }
    }

    fn emit(&self) -> [u8; LINK_BYTES] {
        let mut bytes = [0; LINK_BYTES];
        let fields = [self.rate_mbps, self.queue, self.time, self.sent];
        for (place, field) in bytes.chunks_exact_mut(3).zip(fields) {
            place.copy_from_slice(&field.to_be_bytes()[1..]);
        }
        bytes
    }
}

/// A value that has to fit 24 bits.
const fn cut(value: u64) -> u32 {
    if value < MASK { value as u32 } else { MASK as u32 }
}

/// What switches report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Every link, in 64 bytes.
    Links,
    /// The utilization of the busiest link, in 4 bytes.
    Digest,
}

impl Form {
    /// Length of the header in bytes.
    pub const fn encoded_len(self) -> usize {
        match self {
            Form::Links => Report::MAX_LEN,
            Form::Digest => FIRST_LINK,
        }
    }
}

/// The header, byte for byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// Zeros behind the header.
    bytes: [u8; Report::MAX_LEN],
}

impl Default for Report {
    /// For links, without any.
    fn default() -> Report {
        Report::empty(Form::Links)
    }
}

impl Report {
    /// Length of the longest header in bytes.
    pub const MAX_LEN: usize = 64;

    /// Most links that it has room for.
    pub const MAX_HOPS: usize = 5;

    /// Two reports that are further apart cannot be compared, in nanoseconds: their times may have
    /// wrapped.
    pub const MAX_AGE_NS: u64 = 1 << 23;

    /// As senders send it.
    pub const fn empty(form: Form) -> Report {
        let mut bytes = [0; Report::MAX_LEN];
        bytes[0] = TELEMETRY_OPCODE;
        bytes[1] = match form {
            Form::Links => 0,
            Form::Digest => DIGEST,
        };
        Report { bytes }
    }

    /// Takes the header from the start of a packet.
    pub fn parse(packet: &[u8]) -> Result<Report, WireError> {
        let truncated = |need| WireError::Truncated { have: packet.len(), need };
        let need = Form::Digest.encoded_len();
        let form = match packet.first_chunk().ok_or(truncated(need))? {
            [TELEMETRY_OPCODE, flags, links, 0]
                if flags & !(ECHO | CUT) == 0 && usize::from(*links) <= Report::MAX_HOPS =>
            {
                Form::Links
            }
            [TELEMETRY_OPCODE, flags, _, 0] if flags & !ECHO == DIGEST => Form::Digest,
            [TELEMETRY_OPCODE, ..] => return Err(WireError::Reserved("the telemetry header")),
            [other, ..] => return Err(WireError::UnknownOpcode(*other)),
        };
        let need = form.encoded_len();
        let header = packet.get(..need).ok_or(truncated(need))?;
        let mut bytes = [0; Report::MAX_LEN];
        bytes[..need].copy_from_slice(header);
        Ok(Report { bytes })
    }

    /// What it reports.
    pub const fn form(&self) -> Form {
        if self.bytes[1] & DIGEST == 0 { Form::Links } else { Form::Digest }
    }

    /// The header's bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.form().encoded_len()]
    }

    /// Adds a link. Without room it notes that one is missing. A digest, and what a receiver
    /// returned, stay as they are.
    pub fn stamp(&mut self, hop: Hop) {
        if self.is_echo() || self.form() != Form::Links {
            return;
        }
        let count = usize::from(self.bytes[2]);
        let place = FIRST_LINK + count * LINK_BYTES;
        match self.bytes.get_mut(place..place + LINK_BYTES) {
            Some(link) => {
                link.copy_from_slice(&hop.emit());
                self.bytes[2] += 1;
            }
            None => self.bytes[1] |= CUT,
        }
    }

    /// A link has this utilization, in units of 1 / [`digest::ONE`]: a digest that is lower becomes
    /// that of this link, rounded as `random` says. Others, and what a receiver returned, stay as
    /// they are.
    pub fn raise(&mut self, utilization: u64, random: u16) {
        if !self.is_echo() && self.form() == Form::Digest {
            self.bytes[2] = self.bytes[2].max(digest::encode(utilization, random));
        }
    }

    /// The utilization of the busiest link in units of 1 / [`digest::ONE`], if it is a digest that
    /// a switch has stamped.
    pub fn utilization(&self) -> Option<u64> {
        let code = Some(self.bytes[2]).filter(|_| self.form() == Form::Digest);
        code.and_then(digest::decode)
    }

    /// Whether a switch has written something.
    pub const fn is_stamped(&self) -> bool {
        self.bytes[2] != 0
    }

    /// The same, returned by the receiver.
    #[must_use]
    pub const fn echoed(mut self) -> Report {
        self.bytes[1] |= ECHO;
        self
    }

    /// Whether the receiver of a packet returned it.
    pub const fn is_echo(&self) -> bool {
        self.bytes[1] & ECHO != 0
    }

    /// The links in the order of the packet's way.
    pub fn hops(&self) -> impl Iterator<Item = Hop> + '_ {
        let links = self.bytes[FIRST_LINK..].as_chunks::<LINK_BYTES>().0;
        let count = if self.form() == Form::Links { self.bytes[2] } else { 0 };
        links.iter().take(count.into()).map(Hop::parse)
    }

    /// Whether another report has the same number of links with the same rates. Links for which
    /// there was no room do not count.
    pub fn is_same_path(&self, other: &Report) -> bool {
        let is_cut = |report: &Report| report.bytes[1] & CUT;
        let rates = self.hops().map(|hop| hop.rate_mbps);
        is_cut(self) == is_cut(other) && rates.eq(other.hops().map(|hop| hop.rate_mbps))
    }

    /// Whether it was stamped before another one of the same path, which it must not be further
    /// from than [`MAX_AGE_NS`](Report::MAX_AGE_NS).
    pub fn is_older_than(&self, other: &Report) -> bool {
        self.hops()
            .zip(other.hops())
            .any(|(hop, before)| hop.nanos_since(&before) >= Report::MAX_AGE_NS)
    }
}

const _: () = assert!(FIRST_LINK + Report::MAX_HOPS * LINK_BYTES == Report::MAX_LEN);

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    const LINE: u64 = 100_000_000_000;

    #[test]
    fn links_are_read_as_they_were_stamped() {
        let mut report = Report::default();
        for link in 0..Report::MAX_HOPS as u64 {
            report.stamp(Hop::new(LINE * (link + 1), 1_000 * link, 6_400 * link, 640 * link));
        }
        let hops: Vec<Hop> = report.hops().collect();
        assert_eq!(hops.len(), Report::MAX_HOPS);
        for (link, hop) in (0..).zip(&hops) {
            assert_eq!(hop.rate_bps(), LINE * (link + 1));
            assert_eq!(hop.queue_bytes(), 640 * link);
            assert_eq!(hop.nanos_since(&hops[0]), 1_000 * link);
            assert_eq!(hop.bytes_since(&hops[0]), 6_400 * link);
        }
        assert_eq!(Report::parse(report.as_bytes()), Ok(report));
        assert!(report.is_same_path(&report));
        report.stamp(Hop::new(LINE, 0, 0, 0));
        assert_eq!(report.hops().count(), Report::MAX_HOPS);
        assert!(report.is_same_path(&report));
        assert!(!report.is_same_path(&Report::default()));
    }

    #[test]
    fn differences_survive_the_wrap() {
        let (time, sent) = ((1 << 24) - 10, (1 << 30) - 64);
        let before = Hop::new(LINE, time, sent, 0);
        let now = Hop::new(LINE, time + 30, sent + 192, 0);
        assert_eq!((now.nanos_since(&before), now.bytes_since(&before)), (30, 192));
        let at = |time| {
            let mut report = Report::default();
            report.stamp(Hop::new(LINE, time, 0, 0));
            report
        };
        assert!(at(time).is_older_than(&at(time + 30)) && !at(time + 30).is_older_than(&at(time)));
        let most = Hop::new(u64::MAX, 0, 0, u64::MAX);
        assert_eq!(most.queue_bytes(), MASK * UNIT);
    }

    #[test]
    fn returned_reports_are_not_stamped() {
        let mut report = Report::default().echoed();
        report.stamp(Hop::new(LINE, 0, 0, 0));
        assert_eq!(report, Report::default().echoed());
        assert!(report.is_echo() && Report::parse(report.as_bytes()).is_ok());
    }

    #[test]
    fn what_no_sender_writes_is_refused() {
        let right: [u8; Report::MAX_LEN] = Report::default().as_bytes().try_into().unwrap();
        for (at, value) in [(1, 0x12), (1, 0x20), (1, 4), (2, 6), (3, 1)] {
            let mut bytes = right;
            bytes[at] = value;
            assert_eq!(Report::parse(&bytes), Err(WireError::Reserved("the telemetry header")));
        }
        let mut other = right;
        other[0] = 0x11;
        assert_eq!(Report::parse(&other), Err(WireError::UnknownOpcode(0x11)));
        let truncated = WireError::Truncated { have: 63, need: 64 };
        assert_eq!(Report::parse(&right[..63]), Err(truncated));
        let truncated = WireError::Truncated { have: 3, need: 4 };
        assert_eq!(Report::parse(&right[..3]), Err(truncated));
    }

    #[test]
    fn a_digest_is_of_the_busiest_link() {
        let mut report = Report::empty(Form::Digest);
        assert_eq!((report.as_bytes().len(), report.utilization()), (4, None));
        assert!(!report.is_stamped());
        report.raise(digest::ONE / 2, 0);
        report.raise(digest::ONE / 8, 0);
        report.stamp(Hop::new(LINE, 0, 0, 0));
        let utilization = report.utilization().unwrap();
        assert!(utilization.abs_diff(digest::ONE / 2) < digest::ONE / 40, "{utilization}");
        assert!(report.is_stamped() && report.hops().count() == 0);
        let mut returned = report.echoed();
        returned.raise(digest::MOST, 0);
        assert_eq!((returned.utilization(), returned.is_echo()), (Some(utilization), true));
        // Nothing behind it belongs to it.
        let mut packet = returned.as_bytes().to_vec();
        packet.extend([0x04; 40]);
        assert_eq!(Report::parse(&packet), Ok(returned));
        let mut links = Report::default();
        links.raise(digest::MOST, 0);
        assert_eq!((links, links.utilization()), (Report::default(), None));
    }
}
