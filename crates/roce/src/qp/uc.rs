//! The unreliable connection service: messages of any length, never acknowledged, never repeated
//! (IBA 9.8.2).
//!
//! A message arrives whole or not at all, as far as the program can see. The responder follows the
//! sequence numbers only to notice that something is missing:
//!
//! | packet | what happens |
//! |---|---|
//! | next in sequence, fits the message | placed |
//! | first or only | starts a message; an unfinished one is given up |
//! | anything else | dropped, and the message in progress given up |
//!
//! A message that is given up leaves its receive for the next one. What a WRITE has placed until then
//! stays placed. Requests that are refused (key, bound, length, no receive) are dropped in silence,
//! with a counter; only a receive that cannot be written ends the queue pair.

use super::link::{Draft, Link};
use super::receives::Receives;
use super::sends::{Posted, Sends};
use super::{Arrival, Context, request};
use crate::planted::Bug;
use crate::region::{Purpose, Range};
use crate::sg::{self, Extent, Placement};
use crate::verbs::{MAX_MESSAGE_BYTES, SendOp, SendWr, WcOpcode, WcStatus};
use crate::wire::{Ext, Headers, Opcode, Psn, Reth};

/// The message whose packets are arriving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Message {
    /// Between messages, or after one that was given up.
    None,
    /// A SEND into the current receive, `offset` bytes of which are filled.
    Send { offset: u32 },
    /// A WRITE, of which `left` bytes from `addr` are still to come.
    Write { addr: u64, rkey: u32, left: u32, len: u32 },
}

/// Why a packet is not executed.
enum Refused {
    /// It is dropped with the rest of its message; the reason has been counted.
    Dropped,
    /// The receive may not be written.
    Receive,
}

/// What executing a packet does once all its checks have passed.
struct Effect {
    message: Message,
    /// A receive to complete: opcode and length.
    completes: Option<(WcOpcode, u32)>,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Uc {
    pub(super) sends: Sends,
    pub(super) receives: Receives,
    expected: Psn,
    message: Message,
}

impl Uc {
    pub(super) fn new(sends: Sends, receives: Receives) -> Uc {
        Uc { sends, receives, expected: Psn::default(), message: Message::None }
    }

    /// Ready to receive, from this PSN on.
    pub(super) fn start(&mut self, expected: Psn) {
        self.expected = expected;
        self.message = Message::None;
    }

    // ---- sending -------------------------------------------------------------------------------

    /// Leaves in `cx.packet` the next packet, and in `cx.pieces` where its payload lies.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>, link: &Link) -> Result<(), WcStatus> {
        self.execute_local(cx, link)?;
        let Some((posted, index)) = self.sends.next() else {
            return Ok(());
        };
        let is_last = index + 1 == link.packets(posted.len);
        let extent = packet_extent(posted, index, link);
        check_buffers(cx, link, posted, index)?;
        cx.stretch(link, Purpose::LocalRead, &posted.wr.sges, extent)
            .map_err(|_| WcStatus::LocalProtectionError)?;
        let (opcode, ext) = form(posted.wr.op, posted.len, index == 0, is_last);
        let solicited = posted.wr.solicited && is_last;
        let draft = Draft { opcode, psn: self.sends.psn(), ext, ack_req: false, solicited };
        self.sends.advance(cx, link, is_last);
        cx.emit(link, draft, extent.len);
        Ok(())
    }

    /// Carries out the bindings and invalidations that are next.
    fn execute_local(&mut self, cx: &mut Context<'_>, link: &Link) -> Result<(), WcStatus> {
        while let Some((posted, _)) = self.sends.next().filter(|(posted, _)| posted.is_local()) {
            request::execute_local(cx, link, posted.wr.op)?;
            self.sends.finish(cx, link);
        }
        Ok(())
    }

    // ---- receiving -----------------------------------------------------------------------------

    /// A request packet. An error is how the current receive ends, and the queue pair with it.
    pub(super) fn handle_request(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        payload_len: usize,
    ) -> Result<(), WcStatus> {
        self.follow_sequence(cx, headers);
        if self.message == Message::None && !headers.bth().opcode.starts_message() {
            cx.count(|c| &mut c.orphan_packets);
            return Ok(());
        }
        match self.check(cx, link, headers, payload_len) {
            Ok(effect) => self.execute(cx, link, headers, effect),
            Err(Refused::Dropped) => {
                cx.count(|c| &mut c.broken_messages);
                self.message = Message::None;
            }
            Err(Refused::Receive) => {
                self.message = Message::None;
                return Err(WcStatus::LocalProtectionError);
            }
        }
        Ok(())
    }

    /// Gives up the message in progress if this packet is not the next, or starts another.
    fn follow_sequence(&mut self, cx: &mut Context<'_>, headers: &Headers) {
        let bth = headers.bth();
        let in_sequence = bth.psn == self.expected || cx.planted.is(Bug::GapIgnored);
        self.expected = bth.psn.next();
        if !in_sequence {
            cx.count(|c| &mut c.out_of_sequence);
        }
        let goes_on = in_sequence && !bth.opcode.starts_message();
        if self.message != Message::None && !goes_on {
            cx.count(|c| &mut c.broken_messages);
            self.message = Message::None;
        }
    }

    fn check(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        payload_len: usize,
    ) -> Result<Effect, Refused> {
        let opcode = headers.bth().opcode;
        let fits = match self.message {
            Message::None => true,
            Message::Send { .. } => opcode.is_send(),
            Message::Write { .. } => opcode.is_write(),
        };
        if !fits {
            cx.count(|c| &mut c.bad_opcode);
            return Err(Refused::Dropped);
        }
        let Some(len) = legal_length(opcode, payload_len, link.mtu) else {
            return Err(bad_length(cx));
        };
        if opcode.is_send() {
            self.check_send(cx, link, opcode, len)
        } else {
            self.check_write(cx, link, headers, len)
        }
    }

    fn check_send(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        opcode: Opcode,
        len: u32,
    ) -> Result<Effect, Refused> {
        let offset = match self.message {
            Message::Send { offset } => offset,
            _ => 0,
        };
        let Some(receive) = self.receives.current(cx) else {
            cx.count(|c| &mut c.no_receive);
            return Err(Refused::Dropped);
        };
        if u64::from(offset) + u64::from(len) > receive.len.min(MAX_MESSAGE_BYTES) {
            cx.count(|c| &mut c.receive_too_small);
            return Err(Refused::Dropped);
        }
        let extent = Extent { offset, len };
        cx.stretch(link, Purpose::LocalWrite, &receive.wr.sges, extent)
            .map_err(|_| Refused::Receive)?;
        let filled = offset + len;
        Ok(match opcode.ends_message() {
            true => Effect { message: Message::None, completes: Some((WcOpcode::Recv, filled)) },
            false => Effect { message: Message::Send { offset: filled }, completes: None },
        })
    }

    fn check_write(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        len: u32,
    ) -> Result<Effect, Refused> {
        let opcode = headers.bth().opcode;
        let (target, total) = self.write_target(cx, link, headers)?;
        let fits = if opcode.ends_message() { len == target.len } else { len < target.len };
        if !fits {
            return Err(bad_length(cx));
        }
        let addr = check_remote_write(cx, link, target)?;
        let takes_receive = opcode.carries_imm();
        if takes_receive && self.receives.current(cx).is_none() {
            cx.count(|c| &mut c.no_receive);
            return Err(Refused::Dropped);
        }
        cx.pieces.extend((len > 0).then_some(Placement { addr, len }));
        let next = Message::Write {
            addr: target.addr.wrapping_add(u64::from(len)),
            rkey: target.key,
            left: target.len - len,
            len: total,
        };
        Ok(Effect {
            message: if opcode.ends_message() { Message::None } else { next },
            completes: takes_receive.then_some((WcOpcode::RecvWriteImm, total)),
        })
    }

    /// What the WRITE still has to fill, and its whole length.
    fn write_target(
        &self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
    ) -> Result<(Range, u32), Refused> {
        if let Message::Write { addr, rkey, left, len } = self.message {
            return Ok((Range { key: rkey, addr, len: left }, len));
        }
        let is_legal = |reth: &&Reth| {
            let fits_one = reth.len <= link.mtu;
            let is_only = headers.bth().opcode.ends_message();
            fits_one == is_only && u64::from(reth.len) <= MAX_MESSAGE_BYTES
        };
        let reth = headers.ext().reth().filter(is_legal).ok_or_else(|| bad_length(cx))?;
        Ok((Range { key: reth.rkey, addr: reth.addr, len: reth.len }, reth.len))
    }

    fn execute(&mut self, cx: &mut Context<'_>, link: &Link, headers: &Headers, effect: Effect) {
        self.message = effect.message;
        if let Some((opcode, byte_len)) = effect.completes
            && let Some(receive) = self.receives.finish()
        {
            let arrival = Arrival {
                opcode,
                byte_len,
                imm: headers.ext().imm(),
                invalidated: None,
                src_qp: None,
                ipv4: link.peer.path.remote.ip().to_canonical().is_ipv4(),
                solicited: headers.bth().solicited,
            };
            cx.complete_recv(link, &receive, arrival);
        }
    }

    /// Forgets everything without completions.
    pub(super) fn reset(&mut self) {
        self.sends.reset();
        self.receives.reset();
        self.message = Message::None;
    }
}

/// The part of its message that packet `index` carries.
fn packet_extent(posted: &Posted, index: u32, link: &Link) -> Extent {
    let offset = index * link.mtu;
    Extent { offset, len: (posted.len - offset).min(link.mtu) }
}

/// All local buffers are checked before the first packet leaves, so that a message that cannot be
/// sent as a whole is not begun.
fn check_buffers(
    cx: &mut Context<'_>,
    link: &Link,
    posted: &Posted,
    index: u32,
) -> Result<(), WcStatus> {
    if index > 0 {
        return Ok(());
    }
    sg::check_all(cx.regions, link.pd, Purpose::LocalRead, &posted.wr.sges).map_err(|refusal| {
        cx.count_refusal(refusal);
        WcStatus::LocalProtectionError
    })
}

/// First and middle packets are full, last ones are not empty.
fn legal_length(opcode: Opcode, payload_len: usize, mtu: u32) -> Option<u32> {
    let legal = match (opcode.starts_message(), opcode.ends_message()) {
        (_, false) => mtu..=mtu,
        (false, true) => 1..=mtu,
        (true, true) => 0..=mtu,
    };
    u32::try_from(payload_len).ok().filter(|len| legal.contains(len))
}

fn bad_length(cx: &mut Context<'_>) -> Refused {
    cx.count(|c| &mut c.bad_length);
    Refused::Dropped
}

/// Where the bytes that the peer names lie, if it may write them.
fn check_remote_write(cx: &mut Context<'_>, link: &Link, target: Range) -> Result<u64, Refused> {
    if !link.access.remote_write {
        cx.count(|c| &mut c.bad_access);
        return Err(Refused::Dropped);
    }
    let checked = cx.regions.check_remote(link.pd, link.qpn, Purpose::RemoteWrite, target);
    checked.map_err(|refusal| {
        cx.count_refusal(refusal);
        Refused::Dropped
    })
}

/// Why the service cannot carry out the work request, whose message has `bytes` bytes.
pub(super) fn refusal(wr: &SendWr, bytes: u64) -> Option<&'static str> {
    use SendOp::{BindWindow, LocalInvalidate, Send, SendImm, Write, WriteImm};
    match wr.op {
        Send | SendImm(_) | Write { .. } | WriteImm { .. } => None,
        LocalInvalidate(_) | BindWindow(_) => request::refusal(wr, bytes),
        _ => Some("unreliable connections only send and write"),
    }
}

/// Opcode and extension headers of a packet by its place in the message (IBA table 35).
fn form(op: SendOp, len: u32, is_first: bool, is_last: bool) -> (Opcode, Ext) {
    match op {
        SendOp::Write { remote_addr: addr, rkey } => {
            write_form(Reth { addr, rkey, len }, None, is_first, is_last)
        }
        SendOp::WriteImm { remote_addr: addr, rkey, imm } => {
            write_form(Reth { addr, rkey, len }, Some(imm), is_first, is_last)
        }
        SendOp::SendImm(imm) => send_form(Some(imm), is_first, is_last),
        _ => send_form(None, is_first, is_last),
    }
}

fn send_form(imm: Option<u32>, is_first: bool, is_last: bool) -> (Opcode, Ext) {
    match (is_first, is_last, imm) {
        (true, false, _) => (Opcode::UcSendFirst, Ext::None),
        (false, false, _) => (Opcode::UcSendMiddle, Ext::None),
        (false, true, None) => (Opcode::UcSendLast, Ext::None),
        (false, true, Some(imm)) => (Opcode::UcSendLastImm, Ext::Imm(imm)),
        (true, true, None) => (Opcode::UcSendOnly, Ext::None),
        (true, true, Some(imm)) => (Opcode::UcSendOnlyImm, Ext::Imm(imm)),
    }
}

fn write_form(reth: Reth, imm: Option<u32>, is_first: bool, is_last: bool) -> (Opcode, Ext) {
    match (is_first, is_last, imm) {
        (true, false, _) => (Opcode::UcWriteFirst, Ext::Reth(reth)),
        (false, false, _) => (Opcode::UcWriteMiddle, Ext::None),
        (false, true, None) => (Opcode::UcWriteLast, Ext::None),
        (false, true, Some(imm)) => (Opcode::UcWriteLastImm, Ext::Imm(imm)),
        (true, true, None) => (Opcode::UcWriteOnly, Ext::Reth(reth)),
        (true, true, Some(imm)) => (Opcode::UcWriteOnlyImm, Ext::RethImm(reth, imm)),
    }
}
