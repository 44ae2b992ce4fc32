//! The responder's side of go-back-N. A request packet is classified by its PSN alone:
//!
//! | PSN | what happens |
//! |---|---|
//! | expected | checked and executed; the expected PSN moves on |
//! | earlier | a duplicate: SEND and WRITE are acknowledged again; READ is executed again and the saved response of an atomic is returned, if they match what was executed |
//! | later | a packet was lost: one NAK, then silence until the expected packet arrives |

use super::super::ReceiveRecovery;
use crate::memory::region::AccessKind;
use crate::qp::context::{PacketHeaders, QpContext};
use crate::qp::delivery::{AtomicJob, Insert};
use crate::qp::executor::{Executed, Executor, Fatal, Turn, job_limit, operation, word_of};
use crate::qp::inbound::{check_remote, put_piece, range_of};
use crate::qp::resources::{Job, ReadWork, Work};
use crate::qp::{RxPacket, Scope};
use crate::seeded::Bug;
use crate::verbs::{Completion, MAX_MESSAGE_BYTES, WcOpcode, WcStatus};
use crate::wire::{Aeth, Bth, Ext, Headers, Opcode, Psn, Reth, Syndrome};

/// See the module's text.
#[derive(Debug, Default)]
pub(in crate::qp) struct GoBackN {
    /// The expected packet was requested; another NAK would make the peer retransmit everything
    /// twice.
    nak_sent: bool,
}

impl ReceiveRecovery for GoBackN {
    fn handle_request(
        &mut self,
        executor: &mut Executor,
        cx: &mut Scope<'_, '_>,
        packet: RxPacket<'_>,
    ) -> Result<(), Fatal> {
        match cx.seeded.distance(packet.headers.bth().psn, executor.expected) {
            0 => return self.handle_expected(executor, cx, packet),
            1.. => {
                cx.count(|c| &mut c.out_of_sequence);
                if !core::mem::replace(&mut self.nak_sent, true) {
                    executor.refuse_expected(Syndrome::SequenceError);
                }
            }
            _ => handle_earlier(executor, cx, packet.headers),
        }
        Ok(())
    }

    fn note_nak(&mut self) {
        self.nak_sent = true;
    }

    fn misses_packets(&self) -> bool {
        self.nak_sent
    }

    fn owes_read(&self, executor: &Executor) -> bool {
        executor.resources.owes_read()
    }

    fn owed_packets(&self, executor: &Executor, _: &QpContext) -> u32 {
        executor.resources.owed_packets()
    }

    fn has_response(&self, executor: &Executor) -> bool {
        !executor.resources.is_empty()
    }

    fn poll_reply(&mut self, executor: &mut Executor, cx: &mut Scope<'_, '_>) {
        let Some(reply) = executor.reply else {
            return;
        };
        if executor.resources.front().is_some_and(|job| !reply.psn().is_before(job.psn)) {
            return;
        }
        executor.reply = None;
        let aeth = executor.reply_aeth(cx, reply);
        let aeth = Aeth { syndrome: cx.seeded.promise(aeth.syndrome), ..aeth };
        cx.emit(PacketHeaders::new(Opcode::RcAcknowledge, reply.psn(), Ext::Aeth(aeth)), 0);
    }

    fn poll_response(
        &mut self,
        executor: &mut Executor,
        cx: &mut Scope<'_, '_>,
    ) -> Result<(), Fatal> {
        while let Some(&Job { psn, end, msn, is_retransmission, work }) = executor.resources.front()
        {
            let read = match work {
                Work::Read(read) => read,
                Work::Atomic(Some(original)) => {
                    executor.emit_atomic_response(cx, psn, msn, original);
                    return Ok(());
                }
                // The original value is not known yet.
                Work::Atomic(None) => return Ok(()),
            };
            match check_remote(cx, AccessKind::RemoteRead, read.remaining()) {
                Ok(addr) => {
                    let len = read.left.min(cx.qpc.mtu);
                    let is_last = psn.next() == end;
                    let opcode = read_opcode(read, is_last);
                    let ext = match opcode {
                        Opcode::RcReadResponseMiddle => Ext::None,
                        _ => Ext::Aeth(Aeth { syndrome: executor.positive(), msn }),
                    };
                    put_piece(cx, addr, len);
                    if is_last {
                        executor.resources.pop_front();
                    } else {
                        executor.resources.advance_read(len);
                    }
                    cx.emit(PacketHeaders::new(opcode, psn, ext), len);
                    return Ok(());
                }
                Err(_) if is_retransmission => executor.resources.pop_front(),
                Err(_) => return Err(executor.fail_read(psn)),
            }
        }
        Ok(())
    }

    fn clear_answers(&mut self) {}
}

impl GoBackN {
    fn handle_expected(
        &mut self,
        executor: &mut Executor,
        cx: &mut Scope<'_, '_>,
        packet: RxPacket<'_>,
    ) -> Result<(), Fatal> {
        let psn = packet.headers.bth().psn;
        let turn = Turn { written: Some(0), kept_reads: 0 };
        let executed = match executor.execute(cx, packet, turn) {
            Ok(executed) => executed,
            Err(refused) => {
                self.nak_sent = true;
                return executor.refuse(cx.qpc, refused);
            }
        };
        self.nak_sent = false;
        if matches!(executed, Executed::Message { ends: false, .. }) {
            return Ok(());
        }
        executor.msn = executor.msn.next();
        let msn = executor.msn.get();
        match executed {
            Executed::Message { .. } => return Ok(()),
            Executed::Read(reth) => {
                executor.resources.begin_read(Job::read(psn, &reth, cx.qpc, msn));
            }
            Executed::Atomic => executor.resources.begin_atomic(psn, msn),
        }
        // The response acknowledges everything before it.
        executor.reply = None;
        Ok(())
    }
}

fn handle_earlier(executor: &mut Executor, cx: &mut Scope<'_, '_>, headers: &Headers) {
    match headers.ext() {
        Ext::AtomicEth(atomic) => {
            if cx.seeded.is(Bug::AtomicRepeated) {
                repeat_atomic(cx, headers);
            }
            executor.resend_atomic_response(cx, headers, atomic);
        }
        Ext::Reth(reth) if headers.bth().opcode.is_read_request() => {
            read_again(executor, cx, headers.bth().psn, reth);
        }
        _ => {
            cx.count(|c| &mut c.duplicates);
            if cx.seeded.is(Bug::DuplicateSendReceived) {
                receive_again(executor, cx, headers);
            }
            executor.acknowledge();
        }
    }
}

/// A duplicate READ: its responses, or some of them, are requested again.
fn read_again(executor: &mut Executor, cx: &mut Scope<'_, '_>, psn: Psn, reth: &Reth) {
    let behind = psn.distance_from(executor.expected).unsigned_abs();
    if u64::from(reth.len) > MAX_MESSAGE_BYTES || cx.qpc.packets(reth.len) > behind {
        cx.count(|c| &mut c.bad_psn);
        return;
    }
    let part = range_of(reth);
    let offset = |packets| u64::from(packets) * u64::from(cx.qpc.mtu);
    let is_known = executor.is_part_of_read(psn, part, offset);
    if executor.may_read_again(cx, part, is_known) {
        let job = Job::read(psn, reth, cx.qpc, executor.msn.get());
        executor.resources.retransmit(job, job_limit(cx.qpc));
    }
}

fn read_opcode(read: ReadWork, is_last: bool) -> Opcode {
    match (read.fresh, is_last) {
        (true, true) => Opcode::RcReadResponseOnly,
        (true, false) => Opcode::RcReadResponseFirst,
        (false, true) => Opcode::RcReadResponseLast,
        (false, false) => Opcode::RcReadResponseMiddle,
    }
}

// ---- seeded mistakes --------------------------------------------------------------------------

/// See [`Bug::AtomicRepeated`].
fn repeat_atomic(cx: &mut Scope<'_, '_>, headers: &Headers) {
    let Bth { psn, opcode, .. } = *headers.bth();
    if let Ext::AtomicEth(atomic) = headers.ext()
        && let Ok(addr) = check_remote(cx, AccessKind::RemoteAtomic, word_of(atomic))
    {
        let op = operation(opcode, atomic);
        *cx.insert = Insert::Atomic(AtomicJob { addr, op, qpn: cx.qpc.qpn, psn });
    }
}

/// See [`Bug::DuplicateSendReceived`].
fn receive_again(executor: &mut Executor, cx: &mut Scope<'_, '_>, headers: &Headers) {
    let receives = &mut executor.inbound.receives;
    if headers.bth().opcode == Opcode::RcSendOnly && receives.current(cx).is_some() {
        let ipv4 = cx.qpc.peer.path.remote.ip().to_canonical().is_ipv4();
        let bare = Completion::new(0, WcStatus::Success, WcOpcode::Recv, cx.qpc.qpn);
        receives.complete(cx, headers, Completion { ipv4, ..bare });
    }
}
