//! The responder's side of selective repeat: packets that come before their turn are placed at once
//! and executed when their turn comes.
//!
//! | PSN | what happens |
//! |---|---|
//! | expected | executed as in go-back-N, then everything behind it that came early |
//! | later | checked; payload is placed, the headers are kept; a report says which packets are there |
//! | earlier | executed before: reported again; READ ranges and atomics are answered again |
//!
//! Executing means: the order of completions, receives, message numbers and READs is that of the
//! PSNs (C2). A packet is checked when it is placed *and* when it is executed (C3): if the second
//! check fails, the connection ends as if the packet had come only then. If the first one finds that
//! the peer may not write there, the connection ends at once: no honest peer names a key before it is
//! valid, and dropping such packets in silence would let a hostile one try keys for nothing.
//!
//! Bytes land in the order of arrival, and a WRITE that was repeated must not overwrite a later one
//! that came before it. So when a packet is placed over bytes of a later one, the later one is
//! forgotten: the reports say so, and it is sent once more.
//!
//! Atomics are not accepted early: the word may still have to be written.

use alloc::collections::VecDeque;

use super::super::ReceiveRecovery;
use super::arrivals::{Arrivals, Room, Unreported};
use crate::planted::Bug;
use crate::qp::Context;
use crate::qp::executor::{
    Executed, Executor, Fatal, Message, Refused, Reply, Turn, bad_opcode, check_enabled,
    check_remote, legal_length, put_piece, range_of,
};
use crate::qp::link::{Draft, Link};
use crate::qp::resources::{Job, Work};
use crate::region::{Purpose, Range};
use crate::sg::{Extent, Placement, Placements};
use crate::verbs::MAX_MESSAGE_BYTES;
use crate::wire::{Aeth, Ext, Headers, Opcode, Psn, Reth, Sack, Sreth};

/// Early packets that go unreported while nothing is missing between them.
const SACK_INTERVAL: u32 = 16;

/// READ ranges that are answered again and wait for it; more are dropped, and asked for again.
const MAX_AGAIN: usize = 64;

/// Registered memory that a packet's payload was placed into, as one stretch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    low: u64,
    high: u64,
}

impl Span {
    fn of(pieces: &[Placement]) -> Span {
        let low = pieces.iter().map(|piece| piece.addr).min();
        let high = pieces.iter().map(|piece| piece.addr + u64::from(piece.len)).max();
        Span { low: low.unwrap_or(0), high: high.unwrap_or(0) }
    }

    fn overlaps(self, other: Span) -> bool {
        self.low < other.high && other.low < self.high
    }
}

/// A packet that came before its turn.
#[derive(Debug)]
struct Early {
    headers: Headers,
    payload_len: usize,
    span: Span,
}

/// A READ, or part of one, that is being answered.
#[derive(Clone, Copy, Debug)]
struct ReadAnswer {
    psn: Psn,
    rkey: u32,
    addr: u64,
    /// Where in the READ's message `addr` is.
    offset: u32,
    /// Bytes still to be sent.
    left: u32,
}

impl ReadAnswer {
    fn new(psn: Psn, reth: &Reth, offset: u32) -> ReadAnswer {
        ReadAnswer { psn, rkey: reth.rkey, addr: reth.addr, offset, left: reth.len }
    }

    fn remaining(&self) -> Range {
        Range { key: self.rkey, addr: self.addr, len: self.left }
    }

    fn end(&self) -> u32 {
        self.offset + self.left
    }

    /// Leaves in `cx.packet` the next response, whose bytes lie at `addr`. Returns whether it is the
    /// last one.
    fn emit_response(
        &mut self,
        executor: &mut Executor,
        cx: &mut Context<'_>,
        link: &Link,
        addr: u64,
    ) -> bool {
        let len = self.left.min(link.mtu);
        put_piece(cx, addr, len);
        let aeth = Aeth { syndrome: executor.positive(), msn: executor.msn.get() };
        let ext = Ext::AethSreth(aeth, Sreth { sequence: 0, offset: self.offset });
        cx.emit(link, Draft::new(Opcode::SrReadResponse, self.psn, ext), len);
        self.addr = self.addr.wrapping_add(len.into());
        (self.offset, self.left) = (self.offset + len, self.left - len);
        self.left == 0
    }
}

/// Full packets of WRITEs that were executed last, one behind the other in PSNs and in memory. The
/// last packet of a WRITE with immediate tells how much of it is its message, and is not believed
/// beyond this.
#[derive(Clone, Copy, Debug, Default)]
struct Written {
    rkey: u32,
    /// Address behind the last byte.
    end: u64,
    bytes: u32,
}

impl Written {
    /// What there is after another packet, which was executed.
    fn then(self, headers: &Headers, mtu: u32) -> Written {
        let is_write = headers.bth().opcode == Opcode::RcWriteOnly;
        match *headers.ext() {
            Ext::Reth(Reth { addr, rkey, len }) if is_write && len == mtu => {
                let goes_on = (self.rkey, self.end) == (rkey, addr);
                let before = if goes_on { self.bytes } else { 0 };
                let end = addr.wrapping_add(u64::from(len));
                Written { rkey, end, bytes: before.saturating_add(len) }
            }
            _ => Written::default(),
        }
    }
}

/// See the module's text.
#[derive(Debug)]
pub(in crate::qp) struct Selective {
    arrivals: Arrivals<Early>,
    /// Number of the latest SACK.
    serial: u32,
    unreported: Unreported,
    /// Packets that came since the last SACK.
    since_sack: u32,
    /// Packets were forgotten that may have been reported: from now on there is a SACK every time.
    has_forgotten: bool,
    /// The out-of-order packet that ended the connection.
    refused: Option<Psn>,
    written: Written,
    reads: VecDeque<ReadAnswer>,
    again: VecDeque<ReadAnswer>,
}

impl ReceiveRecovery for Selective {
    fn handle_request(
        &mut self,
        executor: &mut Executor,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        payload_len: usize,
    ) -> Result<(), Fatal> {
        match headers.bth().psn.distance_from(executor.expected) {
            0 => self.handle_next(executor, cx, link, headers, payload_len),
            1.. => self.handle_early(executor, cx, link, headers, payload_len),
            _ => {
                self.handle_executed(executor, cx, link, headers);
                Ok(())
            }
        }
    }

    fn note_nak(&mut self) {}

    fn owes_read(&self, _: &Executor) -> bool {
        !self.reads.is_empty() || !self.again.is_empty()
    }

    fn owed_packets(&self, executor: &Executor, link: &Link) -> u32 {
        let reads = self.reads.iter().chain(&self.again).map(|read| link.packets(read.left));
        reads.fold(executor.resources.owed_packets(), u32::saturating_add)
    }

    fn has_answer(&self, executor: &Executor) -> bool {
        !executor.resources.is_empty() || self.owes_read(executor)
    }

    /// What was lost goes first.
    fn poll_answer(
        &mut self,
        executor: &mut Executor,
        cx: &mut Context<'_>,
        link: &Link,
    ) -> Result<(), Fatal> {
        if let Some(&Job { psn, msn, work: Work::Atomic(Some(value)), .. }) =
            executor.resources.front()
        {
            executor.emit_atomic_answer(cx, link, psn, msn, value);
            return Ok(());
        }
        while let Some(read) = self.again.front_mut() {
            match check_remote(cx, link, Purpose::RemoteRead, read.remaining()) {
                Ok(addr) => {
                    if read.emit_response(executor, cx, link, addr) {
                        self.again.pop_front();
                    }
                    return Ok(());
                }
                Err(_) => drop(self.again.pop_front()),
            }
        }
        let Some(read) = self.reads.front_mut() else {
            return Ok(());
        };
        let Ok(addr) = check_remote(cx, link, Purpose::RemoteRead, read.remaining()) else {
            let psn = read.psn;
            self.clear_answers();
            return Err(executor.fail_read(psn));
        };
        if read.emit_response(executor, cx, link, addr) {
            self.reads.pop_front();
        }
        Ok(())
    }

    /// Acknowledges without holes, or with a SACK of up to [`Sack::BITS`] packets.
    fn poll_reply(&mut self, executor: &mut Executor, cx: &mut Context<'_>, link: &Link) {
        if self.owes_read(executor) && executor.reply.is_some_and(Reply::is_sequence_nak) {
            return;
        }
        let Some(reply) = executor.reply.take() else {
            return;
        };
        let aeth = executor.reply_aeth(cx, reply);
        let has_holes = self.has_forgotten || !self.arrivals.is_empty();
        let draft = match reply {
            Reply::Ack { .. } if has_holes => {
                let (sack, psn) = (self.next_sack(executor.expected), executor.expected);
                if sack.more {
                    executor.reply = Some(reply);
                }
                cx.count(|c| &mut c.selective_acks_sent);
                let missing = u32::from(!cx.planted.is(Bug::ReportShifted));
                let ext = Ext::AethSack(aeth, sack);
                Draft::new(Opcode::SrAcknowledge, psn.minus(missing), ext)
            }
            Reply::Ack { .. } => {
                Draft::new(Opcode::RcAcknowledge, executor.expected.minus(1), Ext::Aeth(aeth))
            }
            // It names the out-of-order packet that was refused, if one was.
            Reply::Nak { psn, .. } => match self.refused {
                None => Draft::new(Opcode::RcAcknowledge, psn, Ext::Aeth(aeth)),
                Some(early) => {
                    let ext = Ext::AethSack(aeth, Sack::new(0, early, 0));
                    Draft::new(Opcode::SrAcknowledge, psn, ext)
                }
            },
        };
        cx.emit(link, draft, 0);
    }

    fn clear_answers(&mut self) {
        self.reads.clear();
        self.again.clear();
    }
}

impl Selective {
    pub(in crate::qp) fn new(link: &Link) -> Selective {
        Selective {
            arrivals: Arrivals::new(link.peer.remote_psn, link.peer.window_packets),
            serial: 0,
            unreported: Unreported::default(),
            since_sack: 0,
            has_forgotten: false,
            refused: None,
            written: Written::default(),
            reads: VecDeque::with_capacity(link.peer.max_dest_rd_atomic.into()),
            again: VecDeque::with_capacity(MAX_AGAIN),
        }
    }

    /// The next SACK; another follows it at once if there is more to tell.
    fn next_sack(&mut self, expected: Psn) -> Sack {
        self.serial = self.serial.wrapping_add(1);
        self.since_sack = 0;
        let furthest = self.arrivals.furthest(expected);
        let start = self.unreported.next(expected, furthest).unwrap_or(expected);
        let bits = self.arrivals.bits(expected, start);
        Sack::new(self.serial, start, bits).followed(!self.unreported.is_empty())
    }

    // ---- packets in their turn -----------------------------------------------------------------

    fn handle_next(
        &mut self,
        executor: &mut Executor,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        payload_len: usize,
    ) -> Result<(), Fatal> {
        let psn = executor.expected;
        self.arrivals.take(psn);
        self.execute(executor, cx, link, headers, payload_len)?;
        if executor.expected == psn || self.arrivals.is_empty() {
            return Ok(());
        }
        self.forget_overlapping(cx, psn, psn, Span::of(cx.pieces));
        // The payload of packets that came early is where it belongs; only this packet's is still to
        // be placed.
        let pieces = core::mem::take(cx.pieces);
        let executed = self.execute_run(executor, cx, link);
        *cx.pieces = pieces;
        executor.acknowledge();
        executed
    }

    /// Executes packets that came early, up to the next one missing.
    fn execute_run(
        &mut self,
        executor: &mut Executor,
        cx: &mut Context<'_>,
        link: &Link,
    ) -> Result<(), Fatal> {
        while let Some(early) = self.arrivals.take(executor.expected) {
            let psn = executor.expected;
            self.execute(executor, cx, link, &early.headers, early.payload_len)?;
            cx.pieces.clear();
            if executor.expected == psn {
                // Not ready for it: it has to come again.
                self.has_forgotten = true;
                break;
            }
        }
        Ok(())
    }

    fn execute(
        &mut self,
        executor: &mut Executor,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        payload_len: usize,
    ) -> Result<(), Fatal> {
        let psn = headers.bth().psn;
        let turn =
            Turn { written: self.written_before(headers, link.mtu), kept_reads: self.reads.len() };
        let executed = match describes_itself(executor, headers) {
            true => executor.execute(cx, link, headers, payload_len, turn),
            false => Err(bad_opcode(cx)),
        };
        match executed {
            Ok(Executed::Message { takes_receive, .. }) => {
                self.written = self.written.then(headers, link.mtu);
                if takes_receive {
                    executor.msn = executor.msn.next();
                }
                return Ok(());
            }
            Ok(Executed::Read(reth)) => self.reads.push_back(ReadAnswer::new(psn, &reth, 0)),
            Ok(Executed::Atomic) => executor.resources.begin_atomic(psn, executor.msn.get()),
            Err(refused) => return executor.refuse(link, refused),
        }
        // No message goes on behind a READ or an atomic, and their answers acknowledge nothing here.
        self.written = Written::default();
        executor.reply = Some(Reply::Ack { psn });
        Ok(())
    }

    /// Bytes of the WRITE that packets before this one have written; `None` if it says otherwise.
    fn written_before(&self, headers: &Headers, mtu: u32) -> Option<u32> {
        let (Some(last), Some(&Sreth { offset, .. })) =
            (headers.ext().reth(), headers.ext().sreth())
        else {
            return Some(0);
        };
        let Written { rkey, end, bytes } = self.written;
        let is_true = (rkey, end) == (last.rkey, last.addr)
            && offset <= bytes
            && offset.is_multiple_of(mtu)
            && u64::from(offset) + u64::from(last.len) <= MAX_MESSAGE_BYTES;
        is_true.then_some(offset)
    }

    // ---- packets before their turn -------------------------------------------------------------

    fn handle_early(
        &mut self,
        executor: &mut Executor,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        payload_len: usize,
    ) -> Result<(), Fatal> {
        let (psn, expected) = (headers.bth().psn, executor.expected);
        match self.arrivals.room(expected, psn) {
            Room::Beyond => {
                cx.count(|c| &mut c.out_of_sequence);
                self.report(executor, expected);
                return Ok(());
            }
            Room::Taken => {
                cx.count(|c| &mut c.duplicates);
                self.report(executor, psn);
                return Ok(());
            }
            Room::Free => {}
        }
        match self.place_early(executor, cx, link, headers, payload_len) {
            Ok(()) => self.keep_early(executor, cx, headers, payload_len),
            Err(Refused::Fatal(fatal)) if !cx.planted.is(Bug::EarlyKeyFree) => {
                executor.refuse_expected(fatal.nak);
                self.refused = Some(psn);
                return Err(fatal);
            }
            Err(_) => {
                cx.pieces.clear();
                cx.count(|c| &mut c.out_of_sequence);
                self.report(executor, psn);
            }
        }
        Ok(())
    }

    /// Keeps the headers of a packet whose payload is being placed before its turn.
    fn keep_early(
        &mut self,
        executor: &mut Executor,
        cx: &mut Context<'_>,
        headers: &Headers,
        payload_len: usize,
    ) {
        cx.count(|c| &mut c.early_packets);
        let (psn, expected, span) = (headers.bth().psn, executor.expected, Span::of(cx.pieces));
        self.forget_overlapping(cx, expected, psn, span);
        let is_next = psn == self.arrivals.furthest(expected);
        let early = Early { headers: *headers, payload_len, span };
        self.arrivals.keep(expected, psn, early);
        self.unreported.note(psn);
        self.since_sack += 1;
        if !is_next || headers.bth().ack_req || self.since_sack >= SACK_INTERVAL {
            self.report(executor, psn);
        }
    }

    /// Forgets packets after `psn` whose bytes `span` is about to overwrite.
    fn forget_overlapping(&mut self, cx: &mut Context<'_>, expected: Psn, psn: Psn, span: Span) {
        if self.arrivals.is_empty() || span.low == span.high {
            return;
        }
        let conflicts = |early: &Early| early.span.overlaps(span);
        let forgotten = self.arrivals.forget_after(expected, psn, conflicts);
        self.has_forgotten |= forgotten > 0;
        cx.add(forgotten.into(), |c| &mut c.early_packets_forgotten);
    }

    /// The next acknowledgement tells of the packet `about`.
    fn report(&mut self, executor: &mut Executor, about: Psn) {
        self.unreported.note(about);
        executor.acknowledge();
    }

    /// Resolves where the payload of a packet goes that came before its turn. If that cannot be said
    /// yet, the packet has to come again; that the peer may not write there ends the connection.
    fn place_early(
        &mut self,
        executor: &mut Executor,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        payload_len: usize,
    ) -> Result<(), Refused> {
        let opcode = headers.bth().opcode;
        if opcode == Opcode::RcReadRequest {
            return if payload_len == 0 { Ok(()) } else { Err(Refused::NotReady) };
        }
        // A READ or atomic may be among the packets that are missing, or is not answered yet.
        let is_ordered = !headers.bth().mig_req || self.owes_read(executor);
        if is_ordered && !cx.planted.is(Bug::ReadOvertaken) {
            return Err(Refused::NotReady);
        }
        let len = legal_length(opcode, payload_len, link.mtu).ok_or(Refused::NotReady)?;
        if opcode.is_send() {
            return place_early_send(executor, cx, link, headers, len).ok_or(Refused::NotReady);
        }
        let is_write = |reth: &&Reth| opcode.is_write() && reth.len == len;
        let reth = headers.ext().reth().filter(is_write).ok_or(Refused::NotReady)?;
        check_enabled(cx, link.access.remote_write)?;
        let addr = check_remote(cx, link, Purpose::RemoteWrite, range_of(reth))?;
        put_piece(cx, addr, len);
        Ok(())
    }

    // ---- packets after their turn --------------------------------------------------------------

    fn handle_executed(
        &mut self,
        executor: &mut Executor,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
    ) {
        let psn = headers.bth().psn;
        match *headers.ext() {
            Ext::AtomicEth(atomic) => {
                executor.answer_atomic_again(cx, link, headers, &atomic);
                self.report(executor, psn);
            }
            Ext::RethSreth(reth, Sreth { offset, .. }) => {
                if u64::from(offset) + u64::from(reth.len) > MAX_MESSAGE_BYTES {
                    return cx.count(|c| &mut c.bad_length);
                }
                let part = range_of(&reth);
                let is_known = executor.is_part_of_read(psn, part, |_| offset.into());
                if executor.may_read_again(cx, link, part, is_known) {
                    self.answer_again(ReadAnswer::new(psn, &reth, offset));
                }
            }
            _ => {
                cx.count(|c| &mut c.duplicates);
                self.report(executor, psn);
            }
        }
    }

    /// Answers a range again, unless it is going to be sent anyway.
    fn answer_again(&mut self, mut wanted: ReadAnswer) {
        if let Some(running) = self.reads.iter_mut().find(|read| read.psn == wanted.psn) {
            if wanted.offset >= running.offset {
                return;
            }
            if wanted.end() == running.end() {
                // What was sent since then ran too far ahead of a loss.
                *running = wanted;
                return;
            }
            wanted.left = wanted.left.min(running.offset - wanted.offset);
        }
        let covers = |read: &ReadAnswer| {
            read.psn == wanted.psn && read.offset <= wanted.offset && wanted.end() <= read.end()
        };
        if self.again.len() < MAX_AGAIN && !self.again.iter().any(covers) {
            self.again.push_back(wanted);
        }
    }
}

fn place_early_send(
    executor: &mut Executor,
    cx: &mut Context<'_>,
    link: &Link,
    headers: &Headers,
    len: u32,
) -> Option<()> {
    let sreth = headers.ext().sreth()?;
    let index = Psn::new(sreth.sequence).distance_from(executor.msn);
    // Every message that takes a receive has a packet at least.
    let packets_between = headers.bth().psn.distance_from(executor.expected);
    let index = usize::try_from(index).ok().filter(|_| index <= packets_between)?;
    let receive = executor.receives.ahead(cx, index)?;
    let end = u64::from(sreth.offset) + u64::from(len);
    if end > receive.len.min(MAX_MESSAGE_BYTES) {
        return None;
    }
    let extent = Extent { offset: sreth.offset, len };
    cx.stretch(link, Purpose::LocalWrite, &receive.wr.sges, extent).ok()
}

/// Whether a packet whose turn it is has a form that this mode uses, and says of itself what its turn
/// says.
fn describes_itself(executor: &Executor, headers: &Headers) -> bool {
    let offset = match executor.message {
        Message::Send { offset } => offset,
        _ => 0,
    };
    match *headers.ext() {
        Ext::RethSreth(..) => false,
        Ext::RethSrethImm(..) => true,
        _ if headers.bth().opcode.is_send() => headers
            .ext()
            .sreth()
            .is_some_and(|sreth| sreth.sequence == executor.msn.get() && sreth.offset == offset),
        _ => headers.bth().opcode.is_only(),
    }
}

/// `Placements` are moved aside by value while early packets are executed.
const _: () = assert!(size_of::<Placements>() <= 256);
