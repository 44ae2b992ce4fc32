//! The packets of a message in the selective-repeat mode: each one carries the placement of its
//! payload.
//!
//! A WRITE is cut into WRITE_ONLY packets with an address each. A SEND packet carries the number of
//! the peer's receive, and the offset of its payload in it.

use super::Request;
use crate::memory::sg::Extent;
use crate::verbs::SendOp;
use crate::wire::{Ext, Opcode, Reth, Sreth};

/// Opcode and extension headers of packet `index`, which carries `extent` of the message.
pub(super) fn form(request: &Request, index: u32, extent: Extent) -> (Opcode, Ext) {
    let is_last = index + 1 == request.packets;
    // Receives are counted from 0, and the request's own number includes itself.
    let sreth = Sreth { sequence: request.ssn.minus(1).get(), offset: extent.offset };
    match request.wr.op {
        SendOp::Write { remote_addr, rkey } => {
            (Opcode::RcWriteOnly, Ext::Reth(part(remote_addr, rkey, extent)))
        }
        SendOp::WriteImm { remote_addr, rkey, .. } if !is_last => {
            (Opcode::RcWriteOnly, Ext::Reth(part(remote_addr, rkey, extent)))
        }
        SendOp::WriteImm { remote_addr, rkey, imm } if index == 0 => {
            (Opcode::RcWriteOnlyImm, Ext::RethImm(part(remote_addr, rkey, extent), imm))
        }
        // From the offset the receiver learns the length of the whole message.
        SendOp::WriteImm { remote_addr, rkey, imm } => {
            let reth = part(remote_addr, rkey, extent);
            (Opcode::SrWriteLastImm, Ext::RethSrethImm(reth, sreth, imm))
        }
        op => send_form(op, sreth, index == 0, is_last),
    }
}

fn part(remote_addr: u64, rkey: u32, extent: Extent) -> Reth {
    let addr = remote_addr.wrapping_add(u64::from(extent.offset));
    Reth { addr, rkey, len: extent.len }
}

fn send_form(op: SendOp, sreth: Sreth, is_first: bool, is_last: bool) -> (Opcode, Ext) {
    match (op, is_first, is_last) {
        (_, true, false) => (Opcode::SrSendFirst, Ext::Sreth(sreth)),
        (_, false, false) => (Opcode::SrSendMiddle, Ext::Sreth(sreth)),
        (SendOp::SendImm(imm), false, true) => (Opcode::SrSendLastImm, Ext::SrethImm(sreth, imm)),
        (SendOp::SendImm(imm), true, true) => (Opcode::SrSendOnlyImm, Ext::SrethImm(sreth, imm)),
        (SendOp::SendInvalidate(rkey), false, true) => {
            (Opcode::SrSendLastInvalidate, Ext::SrethIeth(sreth, rkey))
        }
        (SendOp::SendInvalidate(rkey), true, true) => {
            (Opcode::SrSendOnlyInvalidate, Ext::SrethIeth(sreth, rkey))
        }
        (_, false, true) => (Opcode::SrSendLast, Ext::Sreth(sreth)),
        (_, true, true) => (Opcode::SrSendOnly, Ext::Sreth(sreth)),
    }
}
