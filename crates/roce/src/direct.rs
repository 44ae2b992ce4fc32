//! Requests between processes of one machine that are carried out without packets.
//!
//! Where the initiator can reach the peer's memory itself, an RDMA WRITE, READ or atomic needs no
//! packet. The rule that keeps the semantics in one place: a request is carried out directly only
//! if it can succeed completely now. Anything else (a doubt, a check that fails, a request before
//! it that is not done) goes as packets, so that every error, NAK and retry comes from the one
//! protocol machine. A refusal is therefore never an error, only a reason.
//!
//! What a local peer publishes about its queue pairs and regions are *descriptors*. [`admit`]
//! decides from them as the peer's responder would: the two ends name each other, the peer serves
//! requests, the key is that of a region of the queue pair's domain, with the right and the bytes.
//! Descriptors come from another process: they are compared, and nothing in this process is
//! addressed by them.
//!
//! Requests on one queue pair stay in order because one is direct only when its send queue is
//! empty: all before it are acknowledged, or were direct. Where a program keeps the queue full,
//! requests wait behind the packets before them, and are carried out when those are acknowledged.
//!
//! A small SEND is *handed over*: its bytes go into memory that both processes share, and the local
//! peer takes them into a receive
//! ([`Endpoint::handle_message`](crate::endpoint::Endpoint::handle_message)) or refuses them. Its
//! completion waits for this [`MessageAck`]. A refused message, and those behind it, which the
//! local peer refuses too, are sent again as packets: a missing receive, one that is too small and
//! a connection that has failed are the protocol machine's.
//!
//! A long request is carried out in parts, so that other threads get the endpoint in between. Each
//! part is admitted anew, and for the whole request: the peer's program may take its memory back at
//! any time, and no byte of a request that reaches beyond its region lands.

use core::net::IpAddr;

use arrayvec::ArrayVec;

use crate::io::AtomicOp;
use crate::memory::sg::{Extent, Placement};
use crate::verbs::{Access, Path, PdId, Qpn, SendOp};
use crate::wire::Psn;

/// Most bytes that are copied at a time, with the endpoint locked: about half a millisecond. The
/// post of a longer request copies nothing; it is carried out in parts of a budget,
/// [`Endpoint::carry_out_held`](crate::endpoint::Endpoint::carry_out_held).
pub const MAX_DIRECT_BYTES: u32 = 4 << 20;

/// Longest SEND that is handed over; longer ones are packets.
pub const MAX_HANDED_BYTES: u32 = 4096;

/// What a direct request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectKind {
    /// Copies local bytes to the peer.
    Write,
    /// Copies the peer's bytes here.
    Read,
    /// Changes a word of the peer's, and brings its original value here.
    Atomic(AtomicOp),
}

impl DirectKind {
    /// What a request does, and to which remote address with which key; `None` if it is never
    /// direct.
    pub(crate) fn of(op: &SendOp) -> Option<(DirectKind, u64, u32)> {
        Some(match *op {
            SendOp::Write { remote_addr, rkey } => (DirectKind::Write, remote_addr, rkey),
            SendOp::Read { remote_addr, rkey } => (DirectKind::Read, remote_addr, rkey),
            SendOp::CompareSwap { remote_addr, rkey, compare, swap } => {
                let op = AtomicOp::CompareSwap { compare, swap };
                (DirectKind::Atomic(op), remote_addr, rkey)
            }
            SendOp::FetchAdd { remote_addr, rkey, add } => {
                (DirectKind::Atomic(AtomicOp::FetchAdd(add)), remote_addr, rkey)
            }
            _ => return None,
        })
    }

    /// Whether a queue pair and a region with these rights permit it.
    fn is_permitted(self, access: Access) -> bool {
        match self {
            DirectKind::Write => access.remote_write,
            DirectKind::Read => access.remote_read,
            DirectKind::Atomic(_) => access.remote_atomic,
        }
    }
}

/// A request that could be carried out now, as far as its own side can tell.
#[derive(Clone, Copy, Debug)]
pub struct DirectRequest<'a> {
    /// What it does.
    pub kind: DirectKind,
    /// The path of its queue pair.
    pub path: Path,
    /// Its queue pair.
    pub qpn: Qpn,
    /// The queue pair at the other end.
    pub dest_qp: Qpn,
    /// The peer's key.
    pub rkey: u32,
    /// First byte, as the peer's region addresses it.
    pub remote_addr: u64,
    /// Length in bytes, never 0.
    pub len: u32,
    /// The bytes of it to carry out now, at least one. Earlier ones are done; an atomic has one
    /// part.
    pub part: Extent,
    /// Where the bytes of the part are, or go, on this side: checked.
    pub local: &'a [Placement],
}

/// What a local peer publishes about a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpDescriptor {
    /// Its number.
    pub qpn: Qpn,
    /// The queue pair it is connected to.
    pub dest_qp: Qpn,
    /// Its protection domain.
    pub pd: PdId,
    /// Its own address.
    pub own: IpAddr,
    /// Its peer's address.
    pub peer: IpAddr,
    /// What its peer may do.
    pub access: Access,
    /// Whether it serves requests: reliable, connected, and not failed. A queue pair in RTR has an
    /// event to raise for its first packet, so it serves none before that.
    pub serves: bool,
    /// Whether it serves READs and atomics.
    pub serves_reads: bool,
}

/// What a local peer publishes about a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionDescriptor {
    /// Its remote key.
    pub rkey: u32,
    /// Its protection domain.
    pub pd: PdId,
    /// First byte, as peers address it.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// Where the first byte is in the local peer's memory.
    pub backing: u64,
    /// Where it is in the local peer's file, if the region lies in one that others may map.
    pub in_file: Option<u64>,
    /// What peers may do.
    pub access: Access,
}

/// Why a request goes as packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectRefusal {
    /// The queue pair has no local peer, or the operation is never direct. Not counted.
    NotDirect,
    /// Requests before it are not done, or the queue pair does not send.
    Outstanding,
    /// The queue pair's rate is limited.
    Paced,
    /// A local buffer may not be used, or the completion queue is full.
    Local,
    /// The queue pair at the other end is not connected to this one, or does not serve it.
    Peer,
    /// No region with the key, the domain, the right and the bytes.
    Region,
    /// The operating system did not copy all of it: the peer is gone, for example.
    System,
    /// No room for a message.
    Full,
    /// The local peer has refused messages before. Not counted.
    Resting,
}

/// What became of a posted send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Posted {
    /// It is done, and its completion is in the queue.
    Done,
    /// It is queued as packets.
    Queued,
    /// It waits for the packets before it:
    /// [`Endpoint::carry_out_held`](crate::endpoint::Endpoint::carry_out_held).
    Held,
    /// It is handed over:
    /// [`Endpoint::handle_message_ack`](crate::endpoint::Endpoint::handle_message_ack).
    HandedOver,
}

/// What a SEND is, besides its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageHeader {
    /// The queue pair that sends it.
    pub source: Qpn,
    /// The queue pair that it is for.
    pub dest: Qpn,
    /// First PSN of the sender's connection: tells connections of the same two queue pairs apart.
    pub first_psn: Psn,
    /// Number of the sender's round. A round ends when a message of it is refused; the receiver
    /// refuses all others of it.
    pub round: u32,
    /// Immediate data.
    pub imm: Option<u32>,
    /// Whether the receive completes with a solicited event.
    pub solicited: bool,
    /// Length in bytes.
    pub len: u32,
}

/// A SEND to hand over.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    /// What it is.
    pub header: MessageHeader,
    /// The path of its queue pair.
    pub path: Path,
    /// Where its bytes are: checked.
    pub local: &'a [Placement],
}

/// A message that was handed over, as its sender knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handed {
    /// The queue pair that sends.
    pub source: Qpn,
    /// Its round.
    pub round: u32,
}

/// What became of a message that was handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageAck {
    /// It is in the receiver's memory, and completes a receive.
    Taken,
    /// It is not, and never will be.
    Refused,
    /// The local peer has ended, or reads nothing any more: the connection fails.
    Lost,
}

/// Which sends of a queue pair wait from their post on, until
/// [`Endpoint::carry_out_held`](crate::endpoint::Endpoint::carry_out_held): for a program whose
/// driver carries them out in bounded pieces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Holding {
    /// None, except behind a run of requests that only the packets before them kept from being
    /// direct.
    #[default]
    Runs,
    /// All.
    All,
    /// All, with relaxed order: a WRITE without a completion waits for its turn, but not for the
    /// acknowledgements of the SENDs before it. For programs whose WRITEs never touch what an
    /// earlier SEND announces. Otherwise each SEND between two WRITEs costs a round trip.
    Relaxed,
}

/// Requests of a queue pair that wait for the packets before them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backlog {
    /// There are none, or no longer.
    Empty,
    /// Packets before them are not acknowledged, or the queue pair does not send.
    Waiting,
    /// More can be carried out now.
    Ready,
}

/// Reaches the memory of local peers.
pub trait Direct {
    /// Whether the queue pair is connected to a local peer whose memory can be used in this way.
    fn reaches(&self, qpn: Qpn, kind: DirectKind) -> bool;

    /// Carries out the part of the request now, the last bytes of a WRITE last, or refuses the
    /// request. A refused one may have copied some bytes, and is then executed again as packets,
    /// all of it. An atomic that is refused has changed nothing.
    ///
    /// # Errors
    /// Why it goes as packets.
    fn carry_out(&mut self, request: &DirectRequest<'_>) -> Result<(), DirectRefusal>;

    /// Whether the queue pair is connected to a local peer that takes messages.
    fn takes_messages(&self, qpn: Qpn) -> bool;

    /// Hands a message over. The acknowledgements on the messages of a queue pair come in their
    /// order.
    ///
    /// # Errors
    /// Why it goes as packets; [`DirectRefusal::Full`] where there will be room.
    fn hand_over(&mut self, message: &Message<'_>) -> Result<(), DirectRefusal>;
}

/// Bytes of a cache line: the end of a WRITE that a program may poll.
const LINE: u64 = 64;

/// The parts of a WRITE of `len` bytes from `first` on, each as its first byte and its length, in
/// the order in which they have to land: the last cache line last, so that a program that polls the
/// last byte then sees all others.
pub fn landing_order(first: u64, len: u64) -> ArrayVec<(u64, u64), 2> {
    let Some(last) = len.checked_sub(1).map(|before| first + before) else {
        return ArrayVec::new();
    };
    let tail = (last / LINE * LINE).max(first);
    let parts = [(first, tail - first), (tail, last + 1 - tail)];
    parts.into_iter().filter(|(_, len)| *len > 0).collect()
}

/// Whether the peer would execute the request, judged by its descriptors. Returns the first byte of
/// the part in the peer's memory.
///
/// # Errors
/// Why it goes as packets.
pub fn admit(
    request: &DirectRequest<'_>,
    own: IpAddr,
    qp: &QpDescriptor,
    region: &RegionDescriptor,
) -> Result<u64, DirectRefusal> {
    let connected = qp.qpn == request.dest_qp
        && qp.dest_qp == request.qpn
        && qp.own == request.path.remote.ip()
        && qp.peer == own;
    let allows = |access| request.kind.is_permitted(access);
    let serves = qp.serves && (request.kind == DirectKind::Write || qp.serves_reads);
    if !connected || !serves || !allows(qp.access) {
        return Err(DirectRefusal::Peer);
    }
    if region.rkey != request.rkey || region.pd != qp.pd || !allows(region.access) {
        return Err(DirectRefusal::Region);
    }
    let len = u64::from(request.len);
    let offset = request.remote_addr.checked_sub(region.addr).ok_or(DirectRefusal::Region)?;
    let first = region.backing.checked_add(offset).ok_or(DirectRefusal::Region)?;
    let holds = len > 0 && offset <= region.len && len <= region.len - offset;
    let exists = first.checked_add(len).is_some();
    // The rule applies to the address that was sent (IBA 9.4.5); the processor's atomics need the
    // other aligned.
    let is_atomic = matches!(request.kind, DirectKind::Atomic(_));
    let is_aligned = !is_atomic || (request.remote_addr | first).is_multiple_of(8);
    if !holds || !exists || !is_aligned {
        return Err(DirectRefusal::Region);
    }
    Ok(first + u64::from(request.part.offset))
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::net::SocketAddr;

    const OWN: IpAddr = IpAddr::V4(core::net::Ipv4Addr::new(127, 0, 0, 1));

    fn request(kind: DirectKind) -> DirectRequest<'static> {
        DirectRequest {
            kind,
            path: Path::new(SocketAddr::new(OWN, 4791)),
            qpn: Qpn::new(0x1_0001),
            dest_qp: Qpn::new(0x2_0001),
            rkey: 77,
            remote_addr: 0x1000,
            len: 0x100,
            part: Extent { offset: 0, len: 0x100 },
            local: &[],
        }
    }

    fn descriptors() -> (QpDescriptor, RegionDescriptor) {
        let (qpn, dest_qp, pd) = (Qpn::new(0x2_0001), Qpn::new(0x1_0001), PdId(5));
        let access = Access::ALL;
        let (serves, serves_reads) = (true, true);
        let qp =
            QpDescriptor { qpn, dest_qp, pd, own: OWN, peer: OWN, access, serves, serves_reads };
        let (addr, len, backing) = (0x1000, 0x100, 0x70_0000);
        (qp, RegionDescriptor { rkey: 77, pd, addr, len, backing, in_file: None, access })
    }

    #[test]
    fn what_the_responder_would_execute_is_admitted() {
        let (qp, region) = descriptors();
        for kind in [DirectKind::Write, DirectKind::Read] {
            assert_eq!(admit(&request(kind), OWN, &qp, &region), Ok(0x70_0000));
        }
        let last = DirectRequest { remote_addr: 0x10ff, len: 1, ..request(DirectKind::Read) };
        assert_eq!(admit(&last, OWN, &qp, &region), Ok(0x70_00ff));
    }

    #[test]
    fn parts_have_their_own_address_and_are_admitted_for_the_whole_request() {
        let (qp, region) = descriptors();
        let part = Extent { offset: 0xf0, len: 0x10 };
        let write = DirectRequest { part, ..request(DirectKind::Write) };
        assert_eq!(admit(&write, OWN, &qp, &region), Ok(0x70_00f0));
        let first = DirectRequest { len: 0x101, part: Extent { offset: 0, len: 1 }, ..write };
        assert_eq!(admit(&first, OWN, &qp, &region), Err(DirectRefusal::Region));
    }

    #[test]
    fn atomics_need_their_right_and_an_aligned_word() {
        let (qp, region) = descriptors();
        let part = Extent { offset: 0, len: 8 };
        let kind = DirectKind::Atomic(AtomicOp::FetchAdd(1));
        let add = DirectRequest { len: 8, part, ..request(kind) };
        assert_eq!(admit(&add, OWN, &qp, &region), Ok(0x70_0000));
        let bad = [
            DirectRequest { remote_addr: 0x1004, ..add },
            DirectRequest { remote_addr: 0x10fc, ..add },
        ];
        for add in bad {
            assert_eq!(admit(&add, OWN, &qp, &region), Err(DirectRefusal::Region));
        }
        let moved = RegionDescriptor { backing: region.backing + 4, ..region };
        assert_eq!(admit(&add, OWN, &qp, &moved), Err(DirectRefusal::Region));
        let access = Access { remote_atomic: false, ..Access::ALL };
        let region_without = RegionDescriptor { access, ..region };
        assert_eq!(admit(&add, OWN, &qp, &region_without), Err(DirectRefusal::Region));
        let qp_without = QpDescriptor { access, ..qp };
        assert_eq!(admit(&add, OWN, &qp_without, &region), Err(DirectRefusal::Peer));
        let no_reads = QpDescriptor { serves_reads: false, ..qp };
        assert_eq!(admit(&add, OWN, &no_reads, &region), Err(DirectRefusal::Peer));
    }

    #[test]
    fn bounds_are_exact_and_hostile_numbers_do_not_wrap() {
        let (qp, region) = descriptors();
        let base = request(DirectKind::Write);
        let refused = |request: DirectRequest<'_>, region: &RegionDescriptor| {
            assert_eq!(admit(&request, OWN, &qp, region), Err(DirectRefusal::Region));
        };
        refused(DirectRequest { len: 0x101, ..base }, &region);
        refused(DirectRequest { len: 0, ..base }, &region);
        refused(DirectRequest { remote_addr: 0xfff, ..base }, &region);
        refused(DirectRequest { remote_addr: 0x1001, ..base }, &region);
        refused(DirectRequest { remote_addr: u64::MAX, len: u32::MAX, ..base }, &region);
        refused(base, &RegionDescriptor { len: u64::MAX, backing: u64::MAX, ..region });
        refused(base, &RegionDescriptor { backing: u64::MAX - 0x10, ..region });
        refused(base, &RegionDescriptor { addr: u64::MAX, len: u64::MAX, ..region });
    }

    #[test]
    fn a_write_lands_whole_and_its_last_line_last() {
        assert!(landing_order(0x1000, 0).is_empty());
        for first in 0x1000..0x1080 {
            for len in 1..300 {
                let parts = landing_order(first, len);
                let mut at = first;
                for &(from, len) in &parts {
                    assert_eq!(from, at);
                    at += len;
                }
                let (tail, bytes) = *parts.last().expect("some");
                assert_eq!(at, first + len);
                assert!(bytes > 0 && bytes <= LINE && tail / LINE == (at - 1) / LINE);
                assert!(tail == first || tail % LINE == 0);
            }
        }
    }

    #[test]
    fn each_condition_of_the_peer_counts() {
        let (qp, region) = descriptors();
        let other = IpAddr::from([127, 0, 0, 2]);
        let none = Access::LOCAL_READ;
        let peers = [
            QpDescriptor { qpn: Qpn::new(9), ..qp },
            QpDescriptor { dest_qp: Qpn::new(9), ..qp },
            QpDescriptor { own: other, ..qp },
            QpDescriptor { peer: other, ..qp },
            QpDescriptor { serves: false, ..qp },
            QpDescriptor { serves_reads: false, ..qp },
            QpDescriptor { access: none, ..qp },
        ];
        for bad in peers {
            let read = request(DirectKind::Read);
            assert_eq!(admit(&read, OWN, &bad, &region), Err(DirectRefusal::Peer), "{bad:?}");
        }
        let regions = [
            RegionDescriptor { rkey: 78, ..region },
            RegionDescriptor { pd: PdId(6), ..region },
            RegionDescriptor { access: none, ..region },
            RegionDescriptor { access: Access { remote_write: false, ..Access::ALL }, ..region },
        ];
        for bad in regions {
            let write = request(DirectKind::Write);
            assert_eq!(admit(&write, OWN, &qp, &bad), Err(DirectRefusal::Region), "{bad:?}");
        }
        let writes_only = QpDescriptor { serves_reads: false, ..qp };
        assert!(admit(&request(DirectKind::Write), OWN, &writes_only, &region).is_ok());
    }
}
