//! The message arriving on a connection: the packet checks of RC and UC, and the effects of
//! executing them (IBA 9.7.4, 9.8.2; the checks are in the order of table 49).
//!
//! A message is a SEND into the current receive or a WRITE, in packets of one kind: first, middle,
//! last, or only. Each packet is checked as a whole before any of it is placed, and keys are
//! checked anew for every packet (C3). Violations are counted here; the service decides what they
//! mean for the queue pair: RC sends a NAK, UC drops the message.

use super::context::QpContext;
use super::recv_queue::RecvQueue;
use super::{Context, RxPacket, Scope};
use crate::counters::Counters;
use crate::direct::MessageHeader;
use crate::memory::region::{AccessKind, Range};
use crate::memory::sg::{self, Extent, Placement};
use crate::seeded::Bug;
use crate::srq::SrqTable;
use crate::verbs::{Access, Completion, MAX_MESSAGE_BYTES, WcOpcode, WcStatus};
use crate::wire::{Ext, Headers, Opcode, Reth};

/// The message whose packets are arriving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// Between messages, or after one that was abandoned.
    None,
    /// A SEND into the current receive, `offset` bytes of which are filled.
    Send { offset: u32 },
    /// A WRITE, of which `left` bytes from `addr` are still to come.
    Write { addr: u64, rkey: u32, left: u32, len: u32 },
}

/// Why a request packet cannot be executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Violation {
    /// Opcode, order, length or the queue pair's rights are wrong.
    Invalid,
    /// No receive is posted. Not counted.
    NoReceive,
    /// The receive is too small for the message.
    TooLong,
    /// The receive is not writable.
    BadReceive,
    /// The peer has no right to access its target.
    Protection,
    /// The key to be invalidated is wrong.
    BadInvalidate,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Inbound {
    pub(super) receives: RecvQueue,
    pub(super) message: Message,
}

/// The effects of a packet once all its checks have passed.
struct Outcome {
    /// The message in progress afterwards.
    message: Message,
    /// The current receive completes: opcode and length.
    completes: Option<(WcOpcode, u32)>,
    /// A key of ours is invalidated.
    invalidates: Option<u32>,
}

impl Inbound {
    pub(super) fn new(receives: RecvQueue) -> Inbound {
        Inbound { receives, message: Message::None }
    }

    /// Clears everything without completions; shared receives return to their queue.
    pub(super) fn reset(&mut self, srqs: &mut SrqTable) {
        self.receives.reset(srqs);
        self.message = Message::None;
    }

    /// Checks and executes a packet whose turn it is. Puts the placement of its payload into
    /// `cx.pieces`, and returns whether it completed a receive. `written` is how much of its WRITE
    /// earlier packets have written, for packets that stand alone; `None` makes it a wrong length.
    pub(super) fn execute(
        &mut self,
        cx: &mut Scope<'_, '_>,
        packet: RxPacket<'_>,
        written: Option<u32>,
    ) -> Result<bool, Violation> {
        let opcode = packet.headers.bth().opcode;
        if !self.is_in_order(opcode) {
            return Err(bad_opcode(cx));
        }
        let len =
            legal_length(opcode, packet.payload_len, cx.qpc.mtu).ok_or_else(|| bad_length(cx))?;
        let Outcome { message, completes, invalidates } = match opcode.is_send() {
            true => self.check_send(cx, packet.headers, len)?,
            false => self.check_write(cx, packet.headers, len, written)?,
        };
        self.message = message;
        if let Some(rkey) = invalidates
            && !cx.seeded.is(Bug::InvalidateForgotten)
        {
            // Checked together with this packet.
            let qpc = cx.qpc;
            let _ = cx.regions.invalidate(qpc.pd, qpc.qpn, rkey);
            if cx.seeded.is(Bug::InvalidateTooMuch) {
                cx.regions.forget_qp(qpc.qpn);
            }
        }
        if let Some((opcode, byte_len)) = completes {
            let ipv4 = cx.qpc.peer.path.remote.ip().to_canonical().is_ipv4();
            let bare = Completion::new(0, WcStatus::Success, opcode, cx.qpc.qpn);
            let completion = Completion { byte_len, invalidated: invalidates, ipv4, ..bare };
            self.receives.complete(cx, packet.headers, completion);
        }
        Ok(completes.is_some())
    }

    /// Checks a whole SEND that came without packets, puts its placement into `cx.pieces`, and
    /// completes its receive. `None` where it does not fit: nothing has changed then, and the
    /// packets that follow say what is wrong.
    pub(super) fn take_message(
        &mut self,
        cx: &mut Scope<'_, '_>,
        header: &MessageHeader,
    ) -> Option<()> {
        let MessageHeader { len, imm, solicited, .. } = *header;
        if self.message != Message::None {
            return None;
        }
        let receive = self.receives.current(cx).filter(|receive| u64::from(len) <= receive.len)?;
        let (pd, extent) = (cx.qpc.pd, Extent { offset: 0, len });
        let Context { regions, pieces, .. } = &mut *cx.cx;
        let sges = &receive.wr.sges;
        sg::resolve(regions, pd, AccessKind::LocalWrite, sges, extent, pieces).ok()?;
        let ipv4 = cx.qpc.peer.path.remote.ip().to_canonical().is_ipv4();
        let bare = Completion::new(0, WcStatus::Success, WcOpcode::Recv, cx.qpc.qpn);
        let completion = Completion { byte_len: len, imm, solicited, ipv4, ..bare };
        self.receives.complete_with(cx, completion);
        Some(())
    }

    /// First and only start a message, middle and last continue one of their own kind.
    fn is_in_order(&self, opcode: Opcode) -> bool {
        match self.message {
            // The last packet of a WRITE stands alone in selective repeat.
            Message::None if opcode == Opcode::SrWriteLastImm => true,
            Message::None => opcode.starts_message() && (opcode.is_send() || opcode.is_write()),
            Message::Send { .. } => opcode.is_send() && !opcode.starts_message(),
            Message::Write { .. } => opcode.is_write() && !opcode.starts_message(),
        }
    }

    /// Bytes of the SEND in progress that have arrived.
    pub(super) fn filled(&self) -> u32 {
        match self.message {
            Message::Send { offset } => offset,
            _ => 0,
        }
    }

    fn check_send(
        &mut self,
        cx: &mut Scope<'_, '_>,
        headers: &Headers,
        len: u32,
    ) -> Result<Outcome, Violation> {
        let offset = self.filled();
        let receive = self.receives.current(cx).ok_or(Violation::NoReceive)?;
        if u64::from(offset) + u64::from(len) > receive.len.min(MAX_MESSAGE_BYTES) {
            cx.count(|c| &mut c.receive_too_small);
            return Err(Violation::TooLong);
        }
        let invalidates = match *headers.ext() {
            Ext::Ieth(rkey) | Ext::SrethIeth(_, rkey) => Some(rkey),
            _ => None,
        };
        if let Some(rkey) = invalidates {
            cx.regions.check_invalidate(cx.qpc.pd, cx.qpc.qpn, rkey).map_err(|error| {
                cx.count_protection_error(error);
                Violation::BadInvalidate
            })?;
        }
        cx.resolve(AccessKind::LocalWrite, &receive.wr.sges, Extent { offset, len })
            .map_err(|_| Violation::BadReceive)?;
        let filled = offset + len;
        let ends = headers.bth().opcode.ends_message();
        Ok(Outcome {
            message: if ends { Message::None } else { Message::Send { offset: filled } },
            completes: ends.then_some((WcOpcode::Recv, filled)),
            invalidates,
        })
    }

    fn check_write(
        &mut self,
        cx: &mut Scope<'_, '_>,
        headers: &Headers,
        len: u32,
        written: Option<u32>,
    ) -> Result<Outcome, Violation> {
        let opcode = headers.bth().opcode;
        check_enabled(cx, |access| access.remote_write)?;
        let counts_all = !cx.seeded.is(Bug::LengthOfLastPacket);
        let written = written.map(|bytes| if counts_all { bytes } else { 0 });
        let target = self.write_target(cx.qpc, headers, written);
        let (target, total) = target.ok_or_else(|| bad_length(cx))?;
        let fits = if opcode.ends_message() { len == target.len } else { len < target.len };
        if !fits {
            return Err(bad_length(cx));
        }
        let addr = check_remote(cx, AccessKind::RemoteWrite, target)?;
        let takes_receive = opcode.carries_imm();
        if takes_receive && self.receives.current(cx).is_none() {
            return Err(Violation::NoReceive);
        }
        let next = Message::Write {
            addr: target.addr.wrapping_add(u64::from(len)),
            rkey: target.key,
            left: target.len - len,
            len: total,
        };
        put_piece(cx, addr, len);
        Ok(Outcome {
            message: if opcode.ends_message() { Message::None } else { next },
            completes: takes_receive.then_some((WcOpcode::RecvWriteImm, total)),
            invalidates: None,
        })
    }

    /// The part of the WRITE not yet filled, and its whole length, if the packet is legal here.
    fn write_target(
        &self,
        qpc: &QpContext,
        headers: &Headers,
        written: Option<u32>,
    ) -> Option<(Range, u32)> {
        if let Message::Write { addr, rkey, left, len } = self.message {
            return Some((Range { key: rkey, addr, len: left }, len));
        }
        // The length in the first packet agrees with whether more packets follow.
        let is_legal = |reth: &&Reth| {
            let fits_one = reth.len <= qpc.mtu;
            fits_one == headers.bth().opcode.ends_message()
                && u64::from(reth.len) <= MAX_MESSAGE_BYTES
        };
        let reth = headers.ext().reth().filter(is_legal)?;
        Some((range_of(reth), reth.len + written?))
    }
}

pub(super) fn range_of(reth: &Reth) -> Range {
    Range { key: reth.rkey, addr: reth.addr, len: reth.len }
}

pub(super) fn put_piece(cx: &mut Scope<'_, '_>, addr: u64, len: u32) {
    if len > 0 {
        cx.pieces.push(Placement { addr, len });
    }
}

/// The payload's length, if the opcode allows it: first and middle packets are full, last ones are
/// not empty.
pub(super) fn legal_length(opcode: Opcode, payload_len: usize, mtu: u32) -> Option<u32> {
    let legal = match (opcode.starts_message(), opcode.ends_message()) {
        (_, false) => mtu..=mtu,
        (false, true) => 1..=mtu,
        (true, true) => 0..=mtu,
    };
    u32::try_from(payload_len).ok().filter(|len| legal.contains(len))
}

/// Counts an invalid request.
pub(super) fn invalid(
    cx: &mut Scope<'_, '_>,
    which: impl Fn(&mut Counters) -> &mut u64,
) -> Violation {
    cx.count(which);
    Violation::Invalid
}

pub(super) fn bad_opcode(cx: &mut Scope<'_, '_>) -> Violation {
    invalid(cx, |c| &mut c.bad_opcode)
}

pub(super) fn bad_length(cx: &mut Scope<'_, '_>) -> Violation {
    invalid(cx, |c| &mut c.bad_length)
}

/// An operation that the queue pair does not offer its peer is an invalid request, whatever its
/// address and key (IBA 9.7.4.1.4).
pub(super) fn check_enabled(
    cx: &mut Scope<'_, '_>,
    is_enabled: impl FnOnce(&Access) -> bool,
) -> Result<(), Violation> {
    if is_enabled(&cx.qpc.access) { Ok(()) } else { Err(invalid(cx, |c| &mut c.bad_access)) }
}

/// Resolves the bytes that the peer addresses.
pub(super) fn check_remote(
    cx: &mut Scope<'_, '_>,
    kind: AccessKind,
    range: Range,
) -> Result<u64, Violation> {
    cx.regions.check_remote(cx.qpc.pd, cx.qpc.qpn, kind, range).map_err(|error| {
        cx.count_protection_error(error);
        Violation::Protection
    })
}
