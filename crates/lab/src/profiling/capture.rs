//! Samples from a capture of RoCEv2: the payload of each packet of a reliable connection, each
//! once.
//!
//! Captures often keep the first bytes of packets only, so nothing behind the base header (BTH) is
//! read: the length of the payload follows from that of the UDP datagram.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use parfait::profile::sequence::{Packet, Sequencer};
use roce::wire::ROCE_PORT;
use roce::wire::capture::{Capture, Link};
use roce::wire::{Opcode, Operation, Service};

use super::{Names, Numbers, Traffic, TrafficError, pcapng};

const UDP: u8 = 17;
const BTH_BYTES: usize = 12;
const ICRC_BYTES: u64 = 4;

/// Ethernet header and frame check sequence.
const FRAME_BYTES: u64 = 18;

/// What the headers of a packet say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Headers {
    from: IpAddr,
    to: IpAddr,
    opcode: Opcode,
    queue_pair: u32,
    psn: u32,
    payload: u32,
    /// Bytes of the Ethernet frame.
    frame: u64,
}

/// Whether a file begins as a capture does.
pub fn is_capture(bytes: &[u8]) -> bool {
    pcapng::is_pcapng(bytes) || Capture::parse(bytes).is_ok()
}

/// Samples of all packets between workers.
///
/// # Errors
/// When it is no capture, is damaged, or has too many workers.
pub fn read(bytes: &[u8], names: &Names) -> Result<Traffic, TrafficError> {
    let mut reader = Reader {
        numbers: Numbers::new(names),
        sequencer: Sequencer::new(),
        traffic: Traffic::default(),
        payload: 0,
        frames: 0,
    };
    if pcapng::is_pcapng(bytes) {
        pcapng::each(bytes, |link, at_ns, packet| reader.add(link, at_ns, packet))?;
    } else {
        let capture = Capture::parse(bytes)?;
        for record in capture.records() {
            let record = record?;
            reader.add(capture.link(), record.time_ns, record.bytes)?;
        }
    }
    Ok(reader.finish())
}

struct Reader<'a> {
    numbers: Numbers<'a>,
    sequencer: Sequencer,
    traffic: Traffic,
    payload: u64,
    frames: u64,
}

impl Reader<'_> {
    fn add(&mut self, link: Link, at_ns: u64, bytes: &[u8]) -> Result<(), TrafficError> {
        let of_job = match headers(link, bytes).filter(counts) {
            None => None,
            Some(own) => {
                let (from, to) =
                    (self.numbers.of_address(own.from)?, self.numbers.of_address(own.to)?);
                from.zip(to).map(|ends| (own, ends))
            }
        };
        let Some((own, (from, to))) = of_job else {
            self.traffic.others += 1;
            return Ok(());
        };
        self.payload += u64::from(own.payload);
        self.frames += if own.payload > 0 { own.frame } else { 0 };
        let operation = own.opcode.operation();
        let packet = Packet {
            at_ns,
            from,
            to,
            queue_pair: own.queue_pair,
            psn: own.psn,
            bytes: own.payload,
            begins: own.opcode.starts_message(),
            is_read: matches!(operation, Operation::ReadRequest | Operation::ReadResponse),
        };
        self.traffic.samples.extend(self.sequencer.add(&packet));
        Ok(())
    }

    fn finish(self) -> Traffic {
        let headers = u128::from(self.frames.saturating_sub(self.payload)) * 1_000_000;
        let overhead = headers / u128::from(self.payload.max(1));
        Traffic {
            workers: self.numbers.into_workers(),
            counts: self.sequencer.counts(),
            overhead_ppm: u64::try_from(overhead).unwrap_or(0).min(1_000_000),
            ..self.traffic
        }
    }
}

/// Whether packets of this kind have numbers of their connection: requests, and answers to reads.
fn counts(own: &Headers) -> bool {
    let is_reliable = matches!(own.opcode.service(), Service::Rc | Service::Selective);
    is_reliable && (own.opcode.is_request() || own.opcode.is_read_response())
}

/// The headers of a RoCEv2 packet; `None` of anything else.
fn headers(link: Link, bytes: &[u8]) -> Option<Headers> {
    let half = |at: usize| Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]));
    let (at, kind) = match link {
        Link::RawIp => (0, if bytes.first()? >> 4 == 4 { 0x0800 } else { 0x86dd }),
        Link::Ethernet => {
            // Tags of virtual networks.
            let mut at = 12;
            while matches!(half(at)?, 0x8100 | 0x88a8) {
                at += 4;
            }
            (at + 2, half(at)?)
        }
        Link::Sll => (16, half(14)?),
        Link::Sll2 => (20, half(0)?),
    };
    ip(bytes.get(at..)?, kind)
}

fn ip(bytes: &[u8], kind: u16) -> Option<Headers> {
    match kind {
        0x0800 => {
            let length = usize::from(bytes.first()? & 15) * 4;
            let address = |at: usize| Some(Ipv4Addr::from(*bytes.get(at..)?.first_chunk::<4>()?));
            let is_fragment = u16::from_be_bytes([*bytes.get(6)?, *bytes.get(7)?]) & 0x1fff != 0;
            if *bytes.get(9)? != UDP || is_fragment || length < 20 {
                return None;
            }
            udp(bytes.get(length..)?, address(12)?.into(), address(16)?.into(), length as u64)
        }
        0x86dd => {
            let address = |at: usize| Some(Ipv6Addr::from(*bytes.get(at..)?.first_chunk::<16>()?));
            if *bytes.get(6)? != UDP {
                return None;
            }
            udp(bytes.get(40..)?, address(8)?.into(), address(24)?.into(), 40)
        }
        _ => None,
    }
}

fn udp(bytes: &[u8], from: IpAddr, to: IpAddr, ip_bytes: u64) -> Option<Headers> {
    let half = |at: usize| Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]));
    if half(2)? != ROCE_PORT {
        return None;
    }
    let datagram = u64::from(half(4)?);
    let bth = bytes.get(8..8 + BTH_BYTES)?;
    let opcode = Opcode::from_u8(bth[0])?;
    let pad = u64::from(bth[1] >> 4 & 3);
    let around = 8 + (BTH_BYTES + opcode.ext_kind().len()) as u64 + pad + ICRC_BYTES;
    let word = |at: usize| u32::from_be_bytes([0, bth[at], bth[at + 1], bth[at + 2]]);
    Some(Headers {
        from,
        to,
        opcode,
        queue_pair: word(5),
        psn: word(9),
        payload: u32::try_from(datagram.checked_sub(around)?).ok()?,
        frame: datagram + ip_bytes + FRAME_BYTES,
    })
}

#[cfg(test)]
mod tests {
    use parfait::profile::{Options, profile};
    use roce::wire::capture::Writer;

    use super::*;

    const MS: u64 = 1_000_000;
    const PAYLOAD: u64 = 1024;

    /// An IPv4 packet of a WRITE from one of 10.0.0.0/24 to another, with zeros as payload.
    fn write(from: u8, to: u8, psn: u32) -> Vec<u8> {
        // WRITE Middle has no header of its own.
        let datagram = 8 + BTH_BYTES as u64 + PAYLOAD + ICRC_BYTES;
        let length = u16::try_from(20 + datagram).expect("a small packet").to_be_bytes();
        let mut packet = vec![0x45, 0, length[0], length[1], 0, 0, 0x40, 0, 64, UDP, 0, 0];
        packet.extend([10, 0, 0, from, 10, 0, 0, to]);
        let datagram = u16::try_from(datagram).expect("a small packet");
        for half in [50_000, ROCE_PORT, datagram, 0] {
            packet.extend(half.to_be_bytes());
        }
        packet.extend([Opcode::RcWriteMiddle.as_u8(), 0, 0xff, 0xff, 0, 0, 1, from]);
        packet.extend(psn.to_be_bytes());
        packet.resize(packet.len() + PAYLOAD as usize + 4, 0);
        packet
    }

    /// A ring of four through 10.0.0.3, .1, .4 and .2, in ten iterations of 50 ms, with 32 packets
    /// of each edge.
    fn ring() -> Vec<(u64, Vec<u8>)> {
        let mut packets = Vec::new();
        for iteration in 0..10 {
            for number in 0..32_u32 {
                for (from, to) in [(3, 1), (1, 4), (4, 2), (2, 3)] {
                    let at = iteration * 50 * MS + u64::from(number) * MS / 2 + u64::from(from);
                    packets.push((at, write(from, to, iteration as u32 * 32 + number)));
                }
            }
        }
        packets
    }

    fn pcap(link: Link, packets: &[(u64, Vec<u8>)], snap: usize) -> Vec<u8> {
        let mut file = Writer::new(link);
        for (at, packet) in packets {
            file.record(*at, &packet[..snap.min(packet.len())]);
        }
        file.into_bytes()
    }

    /// A section of one Ethernet interface with nanoseconds, in the byte order of choice.
    fn pcapng(packets: &[(u64, Vec<u8>)], is_big: bool) -> Vec<u8> {
        let word = |word: u32| if is_big { word.to_be_bytes() } else { word.to_le_bytes() };
        let half = |half: u16| if is_big { half.to_be_bytes() } else { half.to_le_bytes() };
        let mut file = Vec::new();
        let mut block = |kind: u32, body: &[u8]| {
            let padded = body.len().next_multiple_of(4);
            let length = word(padded as u32 + 12);
            file.extend([&word(kind), &length].into_iter().flatten());
            file.extend(body);
            file.resize(file.len() + padded - body.len(), 0);
            file.extend(length);
        };
        let mut header = word(0x1a2b_3c4d).to_vec();
        header.extend([half(1), half(0)].concat());
        header.extend([0xff; 8]);
        block(0x0a0d_0d0a, &header);
        let mut interface = [half(1), half(0)].concat();
        interface.extend(word(0));
        interface.extend([half(9), half(1)].concat());
        interface.extend([9, 0, 0, 0]);
        interface.extend([half(0), half(0)].concat());
        block(1, &interface);
        // Name resolution, which is skipped.
        block(4, &[0; 8]);
        for (at, packet) in packets {
            let mut body = [word(0), word((at >> 32) as u32), word(*at as u32)].concat();
            body.extend([word(packet.len() as u32), word(packet.len() as u32)].concat());
            body.extend(packet);
            block(6, &body);
        }
        file
    }

    fn framed(packets: &[(u64, Vec<u8>)], tag: &[u8]) -> Vec<(u64, Vec<u8>)> {
        let frame = |packet: &Vec<u8>| {
            let mut frame = vec![0x02; 12];
            frame.extend(tag);
            frame.extend([0x08, 0x00]);
            frame.extend(packet);
            frame
        };
        packets.iter().map(|(at, packet)| (*at, frame(packet))).collect()
    }

    #[test]
    fn every_kind_of_capture_of_a_ring_says_the_same() {
        let packets = ring();
        let tagged = framed(&packets, &[0x81, 0, 0, 7]);
        let files = [
            pcap(Link::RawIp, &packets, usize::MAX),
            pcap(Link::RawIp, &packets, 40),
            pcap(Link::Ethernet, &tagged, 64),
            pcapng(&framed(&packets, &[]), false),
            pcapng(&tagged, true),
        ];
        for (number, file) in files.iter().enumerate() {
            let traffic = read(file, &Names::default()).expect("a capture");
            assert_eq!(traffic.counts.counted, 1280, "file {number}");
            assert_eq!(traffic.others, 0, "file {number}");
            // 20 bytes of IP, 8 of UDP, 12 of BTH, 4 of ICRC and 18 of Ethernet to 1024 of payload.
            assert_eq!(traffic.overhead_ppm, 62 * 1_000_000 / 1024, "file {number}");
            let found = profile(4, &traffic.samples, Options::default()).expect("a ring");
            let ranks: Vec<&str> =
                found.ranks.iter().map(|at| traffic.workers[*at as usize].as_str()).collect();
            let from = ranks.iter().position(|rank| *rank == "10.0.0.3").expect("it is there");
            let in_order: Vec<&str> = (0..4).map(|at| ranks[(from + at) % 4]).collect();
            assert_eq!(in_order, ["10.0.0.3", "10.0.0.1", "10.0.0.4", "10.0.0.2"]);
            assert!(found.job.to_string().starts_with("ring:4@"), "{}", found.job);
            assert!(found.edges.iter().all(|edge| edge.bytes == 32 * PAYLOAD), "{found:?}");
        }
    }

    #[test]
    fn a_map_names_workers_and_leaves_others_out() {
        let map = "10.0.0.1 a # left\n10.0.0.2\tb\n\n10.0.0.3 a\n";
        let names = Names::parse(map).expect("a map");
        let traffic = read(&pcap(Link::RawIp, &ring(), 64), &names).expect("a capture");
        assert_eq!(traffic.workers.len(), 2);
        // Of .3 to .1 (both are a), .1 to .4, .4 to .2 and .2 to .3 only the first and last are
        // between names.
        assert_eq!((traffic.counts.counted, traffic.others), (640, 640));
        for (map, reason) in [
            ("10.0.0.1\n", "line 1: '10.0.0.1' is not ADDRESS NAME"),
            ("\nhost a\n", "line 2: 'host' is not an IP address"),
            ("10.0.0.1 a\n10.0.0.1 b\n", "line 2: 10.0.0.1 is there twice"),
        ] {
            assert_eq!(Names::parse(map).expect_err(reason).to_string(), reason);
        }
    }

    #[test]
    fn damaged_files_are_refused_and_nothing_panics() {
        let whole = pcapng(&framed(&ring()[..8], &[]), false);
        for end in 0..whole.len() {
            let _ = read(&whole[..end], &Names::default());
        }
        for at in 0..200 {
            for value in [0, 0x7f, 0xff] {
                let mut damaged = whole.clone();
                damaged[at] = value;
                let _ = read(&damaged, &Names::default());
            }
        }
        let error = read(&whole[..whole.len() - 1], &Names::default()).expect_err("cut short");
        assert!(error.to_string().ends_with("is damaged: it is cut short"), "{error}");
        for end in 0..90 {
            assert_eq!(headers(Link::RawIp, &write(1, 2, 3)[..end]).is_some(), end >= 40, "{end}");
        }
    }
}
