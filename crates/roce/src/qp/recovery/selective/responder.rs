//! The responder's side of selective repeat: packets that arrive out of order are placed at once
//! and executed in their turn.
//!
//! | PSN | what happens |
//! |---|---|
//! | expected | executed as in go-back-N, then all packets after it that arrived out of order |
//! | later | checked; the payload is placed, the headers are kept; a SACK reports the packets received |
//! | earlier | a duplicate: acknowledged again; responses of READ ranges and atomics are sent again |
//!
//! Execution follows the PSNs: so do completions, receives, message numbers and READs (C2). A
//! packet is checked when it is placed *and* when it is executed (C3): if the second check fails,
//! the connection ends as if the packet had arrived only then. If the first one finds that the peer
//! may not write there, the connection ends at once: no correct peer uses a key before it is valid,
//! and dropping such packets silently would let a hostile one probe keys at no cost.
//!
//! Bytes are placed in the order of arrival, and a retransmitted packet must not overwrite a later
//! one that arrived before it. So bytes on which a later packet was already placed are skipped:
//! executed in order, that packet would overwrite them.
//!
//! Atomics are not accepted out of order: an earlier packet may still have to write the word.

use alloc::collections::VecDeque;

use super::super::ReceiveRecovery;
use super::arrivals::{Arrivals, Room, Unreported};
use crate::memory::region::{AccessKind, Range};
use crate::memory::sg::{self, Extent, Placement, Placements};
use crate::qp::context::{PacketHeaders, QpContext};
use crate::qp::executor::{Executed, Executor, Fatal, Refused, Reply, Turn};
use crate::qp::inbound::{
    bad_opcode, check_enabled, check_remote, legal_length, put_piece, range_of,
};
use crate::qp::resources::{Job, Work};
use crate::qp::{RxPacket, Scope};
use crate::seeded::Bug;
use crate::verbs::MAX_MESSAGE_BYTES;
use crate::wire::{Aeth, Ext, Headers, Opcode, Psn, Reth, Sack, Sreth};

/// Out-of-order packets that may arrive between two SACKs while no gap opens.
const SACK_INTERVAL: u32 = 16;

/// READ ranges waiting for retransmission; more are dropped, and requested again.
const MAX_RETRANSMISSIONS: usize = 64;

/// Registered memory that a packet's payload belongs in: up to two ranges exactly, or else one
/// range around all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Footprint {
    ranges: [(u64, u64); 2],
    is_exact: bool,
}

impl Footprint {
    fn of(pieces: &[Placement]) -> Footprint {
        let range = |index: usize| pieces.get(index).map_or((0, 0), |at| (at.addr, at.end()));
        if pieces.len() <= 2 {
            return Footprint { ranges: [range(0), range(1)], is_exact: true };
        }
        let low = pieces.iter().map(|piece| piece.addr).min().unwrap_or(0);
        let high = pieces.iter().map(Placement::end).max().unwrap_or(0);
        Footprint { ranges: [(low, high), (0, 0)], is_exact: false }
    }

    fn overlaps(&self, pieces: &[Placement]) -> bool {
        let meets = |&(low, high): &(u64, u64)| {
            pieces.iter().any(|piece| piece.addr < high && low < piece.end())
        };
        self.ranges.iter().any(meets)
    }

    /// Skips the bytes of `pieces` that are in here; false if that is not possible.
    fn skip(&self, pieces: &mut Placements) -> bool {
        let mut cut = pieces.clone();
        let is_done =
            self.is_exact && self.ranges.iter().all(|&(low, high)| sg::skip(&mut cut, low, high));
        if is_done {
            *pieces = cut;
        }
        is_done
    }
}

/// A packet that arrived out of order.
#[derive(Debug)]
struct OutOfOrder {
    headers: Headers,
    payload_len: usize,
    footprint: Footprint,
}

/// A READ, or part of one, that responses are being sent for.
#[derive(Clone, Copy, Debug)]
struct ReadAnswer {
    psn: Psn,
    rkey: u32,
    addr: u64,
    /// Offset of `addr` in the READ's message.
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

    /// Puts the next response, with its bytes at `addr`, into `cx.packet`. Returns whether it is
    /// the last one.
    fn emit_response(
        &mut self,
        executor: &mut Executor,
        cx: &mut Scope<'_, '_>,
        addr: u64,
    ) -> bool {
        let len = self.left.min(cx.qpc.mtu);
        put_piece(cx, addr, len);
        let aeth = Aeth { syndrome: executor.positive(), msn: executor.msn.get() };
        let ext = Ext::AethSreth(aeth, Sreth { sequence: 0, offset: self.offset });
        cx.emit(PacketHeaders::new(Opcode::SrReadResponse, self.psn, ext), len);
        self.addr = self.addr.wrapping_add(len.into());
        (self.offset, self.left) = (self.offset + len, self.left - len);
        self.left == 0
    }
}

/// Full packets of WRITEs executed last, consecutive in PSNs and in memory. The last packet of a
/// WRITE with immediate states the length of its message, and is not trusted beyond this.
#[derive(Clone, Copy, Debug, Default)]
struct Written {
    rkey: u32,
    /// Address behind the last byte.
    end: u64,
    bytes: u32,
}

impl Written {
    /// The state after another packet was executed.
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
    arrivals: Arrivals<OutOfOrder>,
    /// Number of the latest SACK.
    serial: u32,
    unreported: Unreported,
    /// Packets that arrived since the last SACK.
    since_sack: u32,
    /// Packets were discarded that a SACK may have reported: from now on each acknowledgement has
    /// one.
    has_forgotten: bool,
    /// The out-of-order packet that ended the connection.
    refused: Option<Psn>,
    written: Written,
    reads: VecDeque<ReadAnswer>,
    retransmissions: VecDeque<ReadAnswer>,
}

impl ReceiveRecovery for Selective {
    fn handle_request(
        &mut self,
        executor: &mut Executor,
        cx: &mut Scope<'_, '_>,
        packet: RxPacket<'_>,
    ) -> Result<(), Fatal> {
        match packet.headers.bth().psn.distance_from(executor.expected) {
            0 => self.handle_next(executor, cx, packet),
            1.. => self.handle_out_of_order(executor, cx, packet),
            _ => {
                self.handle_executed(executor, cx, packet.headers);
                Ok(())
            }
        }
    }

    fn note_nak(&mut self) {}

    fn misses_packets(&self) -> bool {
        self.has_forgotten || !self.arrivals.is_empty()
    }

    fn owes_read(&self, _: &Executor) -> bool {
        !self.reads.is_empty() || !self.retransmissions.is_empty()
    }

    fn owed_packets(&self, executor: &Executor, qpc: &QpContext) -> u32 {
        let reads =
            self.reads.iter().chain(&self.retransmissions).map(|read| qpc.packets(read.left));
        reads.fold(executor.resources.owed_packets(), u32::saturating_add)
    }

    fn has_response(&self, executor: &Executor) -> bool {
        !executor.resources.is_empty() || self.owes_read(executor)
    }

    /// Lost responses go first.
    fn poll_response(
        &mut self,
        executor: &mut Executor,
        cx: &mut Scope<'_, '_>,
    ) -> Result<(), Fatal> {
        if let Some(&Job { psn, msn, work: Work::Atomic(Some(value)), .. }) =
            executor.resources.front()
        {
            executor.emit_atomic_response(cx, psn, msn, value);
            return Ok(());
        }
        while let Some(read) = self.retransmissions.front_mut() {
            match check_remote(cx, AccessKind::RemoteRead, read.remaining()) {
                Ok(addr) => {
                    if read.emit_response(executor, cx, addr) {
                        self.retransmissions.pop_front();
                    }
                    return Ok(());
                }
                Err(_) => drop(self.retransmissions.pop_front()),
            }
        }
        let Some(read) = self.reads.front_mut() else {
            return Ok(());
        };
        let Ok(addr) = check_remote(cx, AccessKind::RemoteRead, read.remaining()) else {
            let psn = read.psn;
            self.clear_answers();
            return Err(executor.fail_read(psn));
        };
        if read.emit_response(executor, cx, addr) {
            self.reads.pop_front();
        }
        Ok(())
    }

    /// Acknowledges without gaps, or with a SACK of up to [`Sack::BITS`] packets.
    fn poll_reply(&mut self, executor: &mut Executor, cx: &mut Scope<'_, '_>) {
        if self.owes_read(executor) && executor.reply.is_some_and(Reply::is_sequence_nak) {
            return;
        }
        let Some(reply) = executor.reply.take() else {
            return;
        };
        let aeth = executor.reply_aeth(cx, reply);
        let has_holes = self.misses_packets();
        let header = match reply {
            Reply::Ack { .. } if has_holes => {
                let (sack, psn) = (self.next_sack(executor.expected), executor.expected);
                if sack.more {
                    executor.reply = Some(reply);
                }
                cx.count(|c| &mut c.selective_acks_sent);
                let missing = u32::from(!cx.seeded.is(Bug::ReportShifted));
                let ext = Ext::AethSack(aeth, sack);
                PacketHeaders::new(Opcode::SrAcknowledge, psn.minus(missing), ext)
            }
            Reply::Ack { .. } => PacketHeaders::new(
                Opcode::RcAcknowledge,
                executor.expected.minus(1),
                Ext::Aeth(aeth),
            ),
            // The out-of-order packet that was refused, if one was.
            Reply::Nak { psn, .. } => match self.refused {
                None => PacketHeaders::new(Opcode::RcAcknowledge, psn, Ext::Aeth(aeth)),
                Some(kept) => {
                    let ext = Ext::AethSack(aeth, Sack::new(0, kept, 0));
                    PacketHeaders::new(Opcode::SrAcknowledge, psn, ext)
                }
            },
        };
        cx.emit(header, 0);
    }

    fn clear_answers(&mut self) {
        self.reads.clear();
        self.retransmissions.clear();
    }
}

impl Selective {
    pub(in crate::qp) fn new(qpc: &QpContext) -> Selective {
        Selective {
            arrivals: Arrivals::new(qpc.peer.remote_psn, qpc.peer.window_packets),
            serial: 0,
            unreported: Unreported::default(),
            since_sack: 0,
            has_forgotten: false,
            refused: None,
            written: Written::default(),
            reads: VecDeque::new(),
            retransmissions: VecDeque::new(),
        }
    }

    /// The next SACK; another follows it at once if there is more to report.
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
        cx: &mut Scope<'_, '_>,
        packet: RxPacket<'_>,
    ) -> Result<(), Fatal> {
        let psn = executor.expected;
        self.arrivals.take(psn);
        self.execute(executor, cx, packet)?;
        if executor.expected == psn || self.arrivals.is_empty() {
            return Ok(());
        }
        self.skip_overlapped(cx, psn, psn);
        // The payload of out-of-order packets has been placed; only this packet's is still to be
        // placed.
        let pieces = core::mem::take(cx.pieces);
        let executed = self.execute_run(executor, cx);
        *cx.pieces = pieces;
        executor.acknowledge();
        executed
    }

    /// Executes packets that arrived out of order, up to the next missing one.
    fn execute_run(
        &mut self,
        executor: &mut Executor,
        cx: &mut Scope<'_, '_>,
    ) -> Result<(), Fatal> {
        while let Some(kept) = self.arrivals.take(executor.expected) {
            let psn = executor.expected;
            let OutOfOrder { headers, payload_len, .. } = kept;
            self.execute(executor, cx, RxPacket { headers: &headers, payload_len })?;
            cx.pieces.clear();
            if executor.expected == psn {
                // It cannot be executed yet: it has to be retransmitted.
                self.has_forgotten = true;
                break;
            }
        }
        Ok(())
    }

    fn execute(
        &mut self,
        executor: &mut Executor,
        cx: &mut Scope<'_, '_>,
        packet: RxPacket<'_>,
    ) -> Result<(), Fatal> {
        let psn = packet.headers.bth().psn;
        let turn = Turn {
            written: self.written_before(packet.headers, cx.qpc.mtu),
            kept_reads: self.reads.len(),
        };
        let executed = match describes_itself(executor, packet.headers) {
            true => executor.execute(cx, packet, turn),
            false => Err(bad_opcode(cx).into()),
        };
        match executed {
            Ok(Executed::Message { takes_receive, .. }) => {
                self.written = self.written.then(packet.headers, cx.qpc.mtu);
                if takes_receive {
                    executor.msn = executor.msn.next();
                }
                return Ok(());
            }
            Ok(Executed::Read(reth)) => self.reads.push_back(ReadAnswer::new(psn, &reth, 0)),
            Ok(Executed::Atomic) => executor.resources.begin_atomic(psn, executor.msn.get()),
            Err(refused) => return executor.refuse(cx.qpc, refused),
        }
        // No message continues behind a READ or an atomic, and their responses acknowledge nothing
        // here.
        self.written = Written::default();
        executor.reply = Some(Reply::Ack { psn });
        Ok(())
    }

    /// Bytes of this WRITE written by packets before it; `None` if the packet contradicts them.
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

    fn handle_out_of_order(
        &mut self,
        executor: &mut Executor,
        cx: &mut Scope<'_, '_>,
        packet: RxPacket<'_>,
    ) -> Result<(), Fatal> {
        let (psn, expected) = (packet.headers.bth().psn, executor.expected);
        match self.arrivals.room(expected, psn) {
            Room::Beyond => {
                cx.count(|c| &mut c.out_of_sequence);
                self.request_sack(executor, expected);
                return Ok(());
            }
            Room::Taken => {
                cx.count(|c| &mut c.duplicates);
                self.request_sack(executor, psn);
                return Ok(());
            }
            Room::Free => {}
        }
        match self.place_out_of_order(executor, cx, packet) {
            Ok(()) => self.keep_out_of_order(executor, cx, packet),
            Err(Refused::Fatal(fatal)) if !cx.seeded.is(Bug::OutOfOrderKeyFree) => {
                executor.refuse_expected(fatal.nak);
                self.refused = Some(psn);
                return Err(fatal);
            }
            Err(_) => {
                cx.pieces.clear();
                cx.count(|c| &mut c.out_of_sequence);
                self.request_sack(executor, psn);
            }
        }
        Ok(())
    }

    /// Keeps the headers of a packet whose payload is being placed out of order.
    fn keep_out_of_order(
        &mut self,
        executor: &mut Executor,
        cx: &mut Scope<'_, '_>,
        packet: RxPacket<'_>,
    ) {
        cx.count(|c| &mut c.out_of_order_packets);
        let (psn, expected, footprint) =
            (packet.headers.bth().psn, executor.expected, Footprint::of(cx.pieces));
        self.skip_overlapped(cx, expected, psn);
        let is_next = psn == self.arrivals.furthest(expected);
        let RxPacket { headers, payload_len } = packet;
        let kept = OutOfOrder { headers: *headers, payload_len, footprint };
        self.arrivals.keep(expected, psn, kept);
        self.unreported.note(psn);
        self.since_sack += 1;
        if !is_next || packet.headers.bth().ack_req || self.since_sack >= SACK_INTERVAL {
            self.request_sack(executor, psn);
        }
    }

    /// Skips the bytes of the packet `psn`, placed by `cx.pieces`, on which later packets were
    /// placed. A later packet for which that is not possible is discarded, and has to be
    /// retransmitted.
    fn skip_overlapped(&mut self, cx: &mut Scope<'_, '_>, expected: Psn, psn: Psn) {
        let is_last = !psn.next().is_before(self.arrivals.furthest(expected));
        if is_last || cx.pieces.is_empty() || cx.seeded.is(Bug::OverlapIgnored) {
            return;
        }
        let (seeded, pieces) = (cx.seeded, &mut *cx.pieces);
        let (whole, mut is_cut) = (pieces.clone(), false);
        let conflicts = |kept: &OutOfOrder| {
            let overlaps = kept.footprint.overlaps(&whole);
            is_cut |= overlaps;
            overlaps && !kept.footprint.skip(pieces)
        };
        let discarded = self.arrivals.forget_after(expected, psn, conflicts);
        if is_cut && seeded.is(Bug::OverlapSkipsAll) {
            cx.pieces.clear();
        }
        self.has_forgotten |= discarded > 0;
        cx.add(discarded.into(), |c| &mut c.out_of_order_packets_discarded);
        cx.add(is_cut.into(), |c| &mut c.overlapped_packets);
    }

    /// Makes the next acknowledgement report the packet `about`.
    fn request_sack(&mut self, executor: &mut Executor, about: Psn) {
        self.unreported.note(about);
        executor.acknowledge();
    }

    /// Resolves the placement of a packet that arrived out of order. If it is not known yet, the
    /// packet has to be retransmitted; if the peer may not write there, the connection ends.
    fn place_out_of_order(
        &mut self,
        executor: &mut Executor,
        cx: &mut Scope<'_, '_>,
        packet: RxPacket<'_>,
    ) -> Result<(), Refused> {
        let opcode = packet.headers.bth().opcode;
        if opcode == Opcode::RcReadRequest {
            return if packet.payload_len == 0 { Ok(()) } else { Err(Refused::NotReady) };
        }
        let len = legal_length(opcode, packet.payload_len, cx.qpc.mtu).ok_or(Refused::NotReady)?;
        // Packets that have to wait are checked, too: a wrong key ends the connection at any time.
        let target = match opcode.is_send() {
            true => None,
            false => Some(check_write(cx, packet.headers, len)?),
        };
        // A READ or atomic may be among the missing packets, or is still being responded to.
        let is_ordered = !packet.headers.bth().mig_req || self.owes_read(executor);
        if is_ordered && !cx.seeded.is(Bug::ReadOvertaken) {
            return Err(Refused::NotReady);
        }
        match target {
            Some(addr) => put_piece(cx, addr, len),
            None => place_out_of_order_send(executor, cx, packet.headers, len)
                .ok_or(Refused::NotReady)?,
        }
        Ok(())
    }

    // ---- packets after their turn --------------------------------------------------------------

    fn handle_executed(
        &mut self,
        executor: &mut Executor,
        cx: &mut Scope<'_, '_>,
        headers: &Headers,
    ) {
        let psn = headers.bth().psn;
        match *headers.ext() {
            Ext::AtomicEth(atomic) => {
                executor.resend_atomic_response(cx, headers, &atomic);
                self.request_sack(executor, psn);
            }
            Ext::RethSreth(reth, Sreth { offset, .. }) => {
                if u64::from(offset) + u64::from(reth.len) > MAX_MESSAGE_BYTES {
                    return cx.count(|c| &mut c.bad_length);
                }
                let part = range_of(&reth);
                let is_known = executor.is_part_of_read(psn, part, |_| offset.into());
                if executor.may_read_again(cx, part, is_known) {
                    self.retransmit(ReadAnswer::new(psn, &reth, offset));
                }
            }
            _ => {
                cx.count(|c| &mut c.duplicates);
                self.request_sack(executor, psn);
            }
        }
    }

    /// Retransmits a range of a READ, unless it is going to be sent anyway.
    fn retransmit(&mut self, mut wanted: ReadAnswer) {
        if let Some(running) = self.reads.iter_mut().find(|read| read.psn == wanted.psn) {
            if wanted.offset >= running.offset {
                return;
            }
            if wanted.end() == running.end() {
                // What was sent since then was too far ahead of a loss.
                *running = wanted;
                return;
            }
            wanted.left = wanted.left.min(running.offset - wanted.offset);
        }
        let covers = |read: &ReadAnswer| {
            read.psn == wanted.psn && read.offset <= wanted.offset && wanted.end() <= read.end()
        };
        if self.retransmissions.len() < MAX_RETRANSMISSIONS
            && !self.retransmissions.iter().any(covers)
        {
            self.retransmissions.push_back(wanted);
        }
    }
}

/// Where a WRITE of one packet puts its payload, if the peer may write there.
fn check_write(cx: &mut Scope<'_, '_>, headers: &Headers, len: u32) -> Result<u64, Refused> {
    let is_write = |reth: &&Reth| headers.bth().opcode.is_write() && reth.len == len;
    let reth = headers.ext().reth().filter(is_write).ok_or(Refused::NotReady)?;
    check_enabled(cx, |access| access.remote_write)?;
    Ok(check_remote(cx, AccessKind::RemoteWrite, range_of(reth))?)
}

fn place_out_of_order_send(
    executor: &mut Executor,
    cx: &mut Scope<'_, '_>,
    headers: &Headers,
    len: u32,
) -> Option<()> {
    let sreth = headers.ext().sreth()?;
    let index = Psn::new(sreth.sequence).distance_from(executor.msn);
    // Every message that takes a receive has at least one packet.
    let packets_between = headers.bth().psn.distance_from(executor.expected);
    let index = usize::try_from(index).ok().filter(|_| index <= packets_between)?;
    let receive = executor.inbound.receives.ahead(cx, index)?;
    let end = u64::from(sreth.offset) + u64::from(len);
    if end > receive.len.min(MAX_MESSAGE_BYTES) {
        return None;
    }
    let extent = Extent { offset: sreth.offset, len };
    cx.resolve(AccessKind::LocalWrite, &receive.wr.sges, extent).ok()
}

/// Whether a packet whose turn it is has a form that this mode uses, and states the position that
/// it has.
fn describes_itself(executor: &Executor, headers: &Headers) -> bool {
    match *headers.ext() {
        Ext::RethSreth(..) => false,
        Ext::RethSrethImm(..) => true,
        _ if headers.bth().opcode.is_send() => headers.ext().sreth().is_some_and(|sreth| {
            sreth.sequence == executor.msn.get() && sreth.offset == executor.inbound.filled()
        }),
        _ => headers.bth().opcode.is_only(),
    }
}

/// `Placements` are moved aside by value while out-of-order packets are executed.
const _: () = assert!(size_of::<Placements>() <= 256);
