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

use alloc::boxed::Box;
use alloc::collections::VecDeque;

use super::super::selective::arrivals::{Arrivals, Room, Unreported};
use super::{Context, Headers, Refused, check_enabled, check_length, put_piece};
use super::{Fatal, Job, Link, Message, Reply, Responder, Work, answer, check_remote, range_of};
use crate::planted::Bug;
use crate::region::{Purpose, Range};
use crate::sg::{Extent, Placement, Placements};
use crate::verbs::MAX_MESSAGE_BYTES;
use crate::wire::{Aeth, Ext, Opcode, Psn, Reth, Sack, Sreth};

/// Early packets that go unreported while nothing is missing between them.
const REPORT_INTERVAL: u32 = 16;

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
pub(super) struct Selective {
    arrivals: Arrivals<Early>,
    /// Number of the latest report.
    serial: u32,
    unreported: Unreported,
    /// Packets that came since the last report.
    since_report: u32,
    /// Packets were forgotten that may have been reported: from now on every report is a full one.
    has_forgotten: bool,
    /// The out-of-order packet that ended the connection.
    refused: Option<Psn>,
    written: Written,
    reads: VecDeque<ReadAnswer>,
    again: VecDeque<ReadAnswer>,
}

impl Selective {
    fn new(link: &Link) -> Selective {
        let expected = link.peer.remote_psn;
        Selective {
            arrivals: Arrivals::new(expected, link.peer.window_packets),
            serial: 0,
            unreported: Unreported::default(),
            since_report: 0,
            has_forgotten: false,
            refused: None,
            written: Written::default(),
            reads: VecDeque::with_capacity(link.peer.max_dest_rd_atomic.into()),
            again: VecDeque::with_capacity(MAX_AGAIN),
        }
    }

    pub(super) fn has_answer(&self) -> bool {
        !self.reads.is_empty() || !self.again.is_empty()
    }

    /// READ responses that are still to be sent.
    pub(super) fn owed_packets(&self, link: &Link) -> u32 {
        let reads = self.reads.iter().chain(&self.again);
        reads.map(|read| link.packets(read.left)).fold(0, u32::saturating_add)
    }

    /// READs that were not answered to the end.
    pub(super) fn reads(&self) -> usize {
        self.reads.len()
    }

    pub(super) fn begin_read(&mut self, psn: Psn, reth: &Reth) {
        self.reads.push_back(ReadAnswer::new(psn, reth, 0));
    }

    /// A packet of a message was executed.
    pub(super) fn note_executed(&mut self, headers: &Headers, mtu: u32) {
        self.written = self.written.then(headers, mtu);
    }

    /// A READ or an atomic was: no message goes on behind it.
    pub(super) fn note_between(&mut self) {
        self.written = Written::default();
    }

    /// Whether `offset` bytes of the message that ends with `last` were written.
    pub(super) fn has_written(&self, offset: u32, last: &Reth, mtu: u32) -> bool {
        let Written { rkey, end, bytes } = self.written;
        (rkey, end) == (last.rkey, last.addr) && offset <= bytes && offset.is_multiple_of(mtu)
    }

    pub(super) fn clear_answers(&mut self) {
        self.reads.clear();
        self.again.clear();
    }

    /// Forgets packets after `psn` whose bytes `span` is about to overwrite.
    fn forget_overlapping(&mut self, expected: Psn, psn: Psn, span: Span) -> u32 {
        if self.arrivals.is_empty() || span.low == span.high {
            return 0;
        }
        let conflicts = |early: &Early| early.span.overlaps(span);
        let forgotten = self.arrivals.forget_after(expected, psn, conflicts);
        self.has_forgotten |= forgotten > 0;
        forgotten
    }

    /// Answers a range again, unless it is going to be sent anyway.
    fn add_again(&mut self, mut wanted: ReadAnswer) {
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

impl Responder {
    /// Begins to accept packets before their turn if both ends have agreed on it.
    pub(super) fn start_selective(&mut self, link: &Link) {
        self.selective = link.is_selective().then(|| Box::new(Selective::new(link)));
    }

    /// A request packet.
    pub(super) fn handle_selective(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        payload_len: usize,
    ) -> Result<(), Fatal> {
        match headers.bth().psn.distance_from(self.expected) {
            0 => self.handle_next(cx, link, headers, payload_len),
            1.. => self.handle_early(cx, link, headers, payload_len),
            _ => {
                self.handle_executed(cx, link, headers);
                Ok(())
            }
        }
    }

    fn handle_next(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        payload_len: usize,
    ) -> Result<(), Fatal> {
        let psn = self.expected;
        if let Some(selective) = &mut self.selective {
            selective.arrivals.take(psn);
        }
        self.handle_expected(cx, link, headers, payload_len)?;
        let Some(selective) = self.selective.as_mut().filter(|_| self.expected != psn) else {
            return Ok(());
        };
        if selective.arrivals.is_empty() {
            return Ok(());
        }
        let forgotten = selective.forget_overlapping(psn, psn, Span::of(cx.pieces));
        cx.add(forgotten.into(), |c| &mut c.early_packets_forgotten);
        self.execute_early(cx, link)
    }

    /// Executes packets that came early, up to the next one missing.
    fn execute_early(&mut self, cx: &mut Context<'_>, link: &Link) -> Result<(), Fatal> {
        // Their payload is where it belongs; only this packet's is still to be placed.
        let pieces = core::mem::take(cx.pieces);
        let executed = self.execute_run(cx, link);
        *cx.pieces = pieces;
        self.reply.get_or_insert(Reply::Ack { psn: self.expected.minus(1) });
        executed
    }

    fn execute_run(&mut self, cx: &mut Context<'_>, link: &Link) -> Result<(), Fatal> {
        let mut psn = self.expected;
        while let Some(early) = self.selective.as_mut().and_then(|s| s.arrivals.take(psn)) {
            self.handle_expected(cx, link, &early.headers, early.payload_len)?;
            cx.pieces.clear();
            if self.expected == psn {
                // Not ready for it: it has to come again.
                self.note_forgotten();
                break;
            }
            psn = self.expected;
        }
        Ok(())
    }

    fn note_forgotten(&mut self) {
        if let Some(selective) = &mut self.selective {
            selective.has_forgotten = true;
        }
    }

    fn handle_early(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        payload_len: usize,
    ) -> Result<(), Fatal> {
        let (psn, expected) = (headers.bth().psn, self.expected);
        match self.selective.as_ref().map(|s| s.arrivals.room(expected, psn)) {
            None | Some(Room::Beyond) => {
                cx.count(|c| &mut c.out_of_sequence);
                self.report(expected);
                return Ok(());
            }
            Some(Room::Taken) => {
                cx.count(|c| &mut c.duplicates);
                self.report(psn);
                return Ok(());
            }
            Some(Room::Free) => {}
        }
        match self.place_early(cx, link, headers, payload_len) {
            Ok(()) => self.keep_early(cx, headers, payload_len),
            Err(Refused::Fatal(fatal)) if !cx.planted.is(Bug::EarlyKeyFree) => {
                self.reply = Some(Reply::Nak { psn: expected, syndrome: fatal.nak });
                if let Some(selective) = &mut self.selective {
                    selective.refused = Some(psn);
                }
                return Err(fatal);
            }
            Err(_) => {
                cx.pieces.clear();
                cx.count(|c| &mut c.out_of_sequence);
                self.report(psn);
            }
        }
        Ok(())
    }

    /// Keeps the headers of a packet whose payload is being placed before its turn.
    fn keep_early(&mut self, cx: &mut Context<'_>, headers: &Headers, payload_len: usize) {
        cx.count(|c| &mut c.early_packets);
        let (psn, expected, span) = (headers.bth().psn, self.expected, Span::of(cx.pieces));
        let Some(selective) = &mut self.selective else {
            return;
        };
        let forgotten = selective.forget_overlapping(expected, psn, span);
        cx.add(forgotten.into(), |c| &mut c.early_packets_forgotten);
        let is_next = psn == selective.arrivals.furthest(expected);
        let early = Early { headers: *headers, payload_len, span };
        selective.arrivals.keep(expected, psn, early);
        selective.unreported.note(psn);
        selective.since_report += 1;
        if !is_next || headers.bth().ack_req || selective.since_report >= REPORT_INTERVAL {
            self.report(psn);
        }
    }

    fn report(&mut self, about: Psn) {
        if let Some(selective) = &mut self.selective {
            selective.unreported.note(about);
        }
        self.reply.get_or_insert(Reply::Ack { psn: self.expected.minus(1) });
    }

    /// Finds where the payload of a packet goes that came before its turn. If that cannot be said
    /// yet, the packet has to come again; that the peer may not write there ends the connection.
    fn place_early(
        &mut self,
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
        let is_ordered = !headers.bth().mig_req || self.owes_read();
        if is_ordered && !cx.planted.is(Bug::ReadOvertaken) {
            return Err(Refused::NotReady);
        }
        let len = check_length(opcode, payload_len, link.mtu).map_err(|_| Refused::NotReady)?;
        if opcode.is_send() {
            let placed = self.place_early_send(cx, link, headers, len);
            return placed.ok_or(Refused::NotReady);
        }
        let is_write = |reth: &&Reth| opcode.is_write() && reth.len == len;
        let reth = headers.ext().reth().filter(is_write).ok_or(Refused::NotReady)?;
        check_enabled(cx, link.access.remote_write)?;
        let addr = check_remote(cx, link, Purpose::RemoteWrite, range_of(reth))?;
        put_piece(cx, addr, len);
        Ok(())
    }

    fn place_early_send(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        len: u32,
    ) -> Option<()> {
        let sreth = headers.ext().sreth()?;
        let index = Psn::new(sreth.sequence).distance_from(self.msn);
        // Every message that takes a receive has a packet at least.
        let packets_between = headers.bth().psn.distance_from(self.expected);
        let index = usize::try_from(index).ok().filter(|_| index <= packets_between)?;
        let receive = self.receives.ahead(cx, index)?;
        let end = u64::from(sreth.offset) + u64::from(len);
        if end > receive.len.min(MAX_MESSAGE_BYTES) {
            return None;
        }
        let extent = Extent { offset: sreth.offset, len };
        cx.stretch(link, Purpose::LocalWrite, &receive.wr.sges, extent).ok()
    }

    fn handle_executed(&mut self, cx: &mut Context<'_>, link: &Link, headers: &Headers) {
        let psn = headers.bth().psn;
        match *headers.ext() {
            Ext::AtomicEth(_) => {
                self.atomic_again(cx, link, headers);
                self.report(psn);
            }
            Ext::RethSreth(reth, sreth) => self.read_range_again(cx, link, psn, &reth, sreth),
            _ => {
                cx.count(|c| &mut c.duplicates);
                self.report(psn);
            }
        }
    }

    fn read_range_again(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        psn: Psn,
        reth: &Reth,
        sreth: Sreth,
    ) {
        if u64::from(sreth.offset) + u64::from(reth.len) > MAX_MESSAGE_BYTES {
            return cx.count(|c| &mut c.bad_length);
        }
        let offset = |_| u64::from(sreth.offset);
        let is_allowed = self.may_read_again(cx, link, psn, range_of(reth), offset);
        if let Some(selective) = self.selective.as_mut().filter(|_| is_allowed) {
            selective.add_again(ReadAnswer::new(psn, reth, sreth.offset));
        }
    }

    // ---- checks of the packet whose turn it is ---------------------------------------------------

    /// Whether a packet is one that this mode has, and says of itself what its turn says.
    pub(super) fn check_self_description(&self, headers: &Headers) -> bool {
        let opcode = headers.bth().opcode;
        let offset = match self.message {
            Message::Send { offset } => offset,
            _ => 0,
        };
        match *headers.ext() {
            _ if self.selective.is_none() => opcode.service() == crate::wire::Service::Rc,
            Ext::RethSreth(..) => false,
            Ext::RethSrethImm(..) => true,
            _ if opcode.is_send() => headers
                .ext()
                .sreth()
                .is_some_and(|sreth| sreth.sequence == self.msn.get() && sreth.offset == offset),
            _ => opcode.is_only(),
        }
    }

    // ---- answers -------------------------------------------------------------------------------

    /// Leaves in `cx.packet` the report that is due, if one is.
    pub(super) fn poll_report(&mut self, cx: &mut Context<'_>, link: &Link) {
        if self.owes_read() && self.reply.is_some_and(Reply::is_sequence_nak) {
            return;
        }
        let Some(reply) = self.reply.take() else {
            return;
        };
        let syndrome = match reply {
            Reply::Ack { .. } => self.positive(),
            Reply::Nak { syndrome, .. } => syndrome,
        };
        let aeth = Aeth { syndrome, msn: self.msn.get() };
        super::count_reply(cx, syndrome);
        let expected = self.expected;
        let full = self.selective.as_mut().filter(|selective| {
            let is_ack = matches!(reply, Reply::Ack { .. });
            is_ack && (selective.has_forgotten || !selective.arrivals.is_empty())
        });
        let Some(selective) = full else {
            return self.emit_plain(cx, link, reply, aeth);
        };
        selective.serial = selective.serial.wrapping_add(1);
        selective.since_report = 0;
        let furthest = selective.arrivals.furthest(expected);
        let start = selective.unreported.next(expected, furthest).unwrap_or(expected);
        let more = !selective.unreported.is_empty();
        if more {
            self.reply = Some(reply);
        }
        let bits = selective.arrivals.bits(expected, start);
        let sack = Sack::new(selective.serial, start, bits).followed(more);
        cx.count(|c| &mut c.selective_acks_sent);
        let ext = Ext::AethSack(aeth, sack);
        let missing = u32::from(!cx.planted.is(Bug::ReportShifted));
        cx.emit(link, answer(Opcode::SrAcknowledge, expected.minus(missing), ext), 0);
    }

    /// An acknowledgement without holes, or a NAK; it names the out-of-order packet that was refused, if
    /// one was.
    fn emit_plain(&mut self, cx: &mut Context<'_>, link: &Link, reply: Reply, aeth: Aeth) {
        let refused = self.selective.as_ref().and_then(|selective| selective.refused);
        let draft = match (reply, refused) {
            (Reply::Ack { .. }, _) => {
                answer(Opcode::RcAcknowledge, self.expected.minus(1), Ext::Aeth(aeth))
            }
            (Reply::Nak { psn, .. }, None) => answer(Opcode::RcAcknowledge, psn, Ext::Aeth(aeth)),
            (Reply::Nak { psn, .. }, Some(early)) => {
                answer(Opcode::SrAcknowledge, psn, Ext::AethSack(aeth, Sack::new(0, early, 0)))
            }
        };
        cx.emit(link, draft, 0);
    }

    /// Leaves in `cx.packet` the next response: what was lost first.
    pub(super) fn poll_selective_answer(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
    ) -> Result<(), Fatal> {
        if let Some(&Job { psn, msn, work: Work::Atomic(Some(value)), .. }) = self.resources.front()
        {
            self.answer_atomic(cx, link, psn, msn, value);
            return Ok(());
        }
        while let Some(read) = self.selective.as_ref().and_then(|s| s.again.front().copied()) {
            match check_remote(cx, link, Purpose::RemoteRead, read.remaining()) {
                Ok(addr) => {
                    self.read_answer(cx, link, read, addr, true);
                    return Ok(());
                }
                Err(_) => drop(self.selective.as_mut().and_then(|s| s.again.pop_front())),
            }
        }
        let Some(read) = self.selective.as_ref().and_then(|s| s.reads.front().copied()) else {
            return Ok(());
        };
        match check_remote(cx, link, Purpose::RemoteRead, read.remaining()) {
            Ok(addr) => {
                self.read_answer(cx, link, read, addr, false);
                Ok(())
            }
            Err(_) => Err(self.fail_read(read.psn)),
        }
    }

    /// One response of the READ at the front of its queue.
    fn read_answer(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        read: ReadAnswer,
        addr: u64,
        is_again: bool,
    ) {
        let len = read.left.min(link.mtu);
        put_piece(cx, addr, len);
        let aeth = Aeth { syndrome: self.positive(), msn: self.msn.get() };
        let sreth = Sreth { sequence: 0, offset: read.offset };
        if let Some(selective) = &mut self.selective {
            let queue = if is_again { &mut selective.again } else { &mut selective.reads };
            match queue.front_mut().filter(|front| front.left > len) {
                Some(front) => {
                    front.addr = front.addr.wrapping_add(len.into());
                    (front.offset, front.left) = (front.offset + len, front.left - len);
                }
                None => drop(queue.pop_front()),
            }
        }
        let ext = Ext::AethSreth(aeth, sreth);
        cx.emit(link, answer(Opcode::SrReadResponse, read.psn, ext), len);
    }
}

/// `Placements` are moved aside by value while early packets are executed.
const _: () = assert!(size_of::<Placements>() <= 256);
