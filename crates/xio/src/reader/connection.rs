//! One connection of a reader to a storage target: request slots, credits, responses.
//!
//! Every credit is a slot with a request capsule, a response capsule and a posted receive. A slot
//! is busy until its response has arrived *and* its own SEND has completed, because until then the
//! transport may still gather the request from it.

use alloc::vec::Vec;

use roce::Time;
use roce::device::Device;
use roce::verbs::{
    Completion, MemoryRegion, Qpn, RecvWr, SendOp, SendWr, SgList, Sge, VerbsError, WcStatus,
};
use roce::world::Staging;

use crate::capsule::{CAPSULE_BYTES, Outcome, ReadRequest, ReadResponse};
use crate::kernel::Crc32c;
use crate::target::received;

use super::BlockRef;

/// Registered memory of a connection for each of its credits: a capsule out and a capsule in.
pub const CREDIT_BYTES: u64 = 2 * CAPSULE_BYTES as u64;

/// Memory of a connection: one region of `credits *` [`CREDIT_BYTES`], local write.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionMemory {
    /// Region for capsules.
    pub capsules: MemoryRegion,
    /// Most outstanding requests allowed by the target.
    pub credits: u32,
}

/// The resources for sending requests.
pub(super) struct Io<'a, D, M> {
    pub(super) now: Time,
    pub(super) device: &'a mut D,
    pub(super) memory: &'a mut M,
}

/// The result of a response capsule.
#[derive(Debug)]
pub(super) enum Response {
    To(BlockRef, Outcome),
    Bad,
    /// The device completed a receive that is not posted.
    Impossible,
    Lost,
}

#[derive(Clone, Copy, Debug)]
enum Slot {
    Free,
    Waiting {
        block_ref: BlockRef,
        seq: u64,
        sent: bool,
    },
    /// The response has arrived, but the SEND of the request has not completed.
    Responded,
}

#[derive(Debug)]
struct Open {
    qpn: Qpn,
    memory: ConnectionMemory,
    slots: Vec<Slot>,
    free: Vec<u32>,
    next_seq: u64,
    lost: Option<WcStatus>,
}

/// A connection, open or not.
#[derive(Debug, Default)]
pub(super) struct Connection(Option<Open>);

impl Open {
    fn request_addr(&self, slot: u32) -> u64 {
        self.memory.capsules.addr + u64::from(slot) * CREDIT_BYTES
    }

    fn sge(&self, addr: u64) -> SgList {
        let len = CAPSULE_BYTES as u32;
        SgList::from_iter([Sge { addr, len, lkey: self.memory.capsules.lkey }])
    }

    fn receive(&self, slot: u32) -> RecvWr {
        let addr = self.request_addr(slot) + CAPSULE_BYTES as u64;
        RecvWr { wr_id: u64::from(slot), sges: self.sge(addr) }
    }

    fn release(&mut self, slot: u32) {
        self.slots[slot as usize] = Slot::Free;
        self.free.push(slot);
    }

    /// Matches a response to its request by tag and number.
    fn match_response(&mut self, response: &ReadResponse) -> Option<BlockRef> {
        let slot = self.slots.get(response.tag as usize).copied()?;
        let Slot::Waiting { block_ref, seq, sent } = slot else {
            return None;
        };
        if seq != response.seq {
            return None;
        }
        self.slots[response.tag as usize] = Slot::Responded;
        if sent {
            self.release(response.tag);
        }
        Some(block_ref)
    }
}

impl Connection {
    pub(super) fn open<D: Device>(
        &mut self,
        now: Time,
        device: &mut D,
        qpn: Qpn,
        memory: ConnectionMemory,
    ) -> Result<(), VerbsError> {
        let slots = (0..memory.credits).map(|_| Slot::Free).collect();
        let free = (0..memory.credits).rev().collect();
        let open = Open { qpn, memory, slots, free, next_seq: 1, lost: None };
        for slot in 0..memory.credits {
            device.post_recv(now, qpn, &[open.receive(slot)])?;
        }
        self.0 = Some(open);
        Ok(())
    }

    pub(super) fn qpn(&self) -> Option<Qpn> {
        self.0.as_ref().map(|open| open.qpn)
    }

    pub(super) fn can_send(&self) -> bool {
        self.0.as_ref().is_some_and(|open| open.lost.is_none() && !open.free.is_empty())
    }

    pub(super) fn is_lost(&self) -> bool {
        self.0.as_ref().is_some_and(|open| open.lost.is_some())
    }

    pub(super) fn lose(&mut self, why: WcStatus) {
        if let Some(open) = &mut self.0 {
            open.lost.get_or_insert(why);
        }
    }

    pub(super) fn take_lost(&mut self) -> Option<(Qpn, WcStatus)> {
        let open = self.0.as_ref()?;
        Some((open.qpn, open.lost?))
    }

    /// Closes the connection and returns the requests outstanding.
    pub(super) fn forget_requests(&mut self) -> Vec<BlockRef> {
        let Some(open) = self.0.take() else {
            return Vec::new();
        };
        let waiting = open.slots.iter().filter_map(|slot| match slot {
            Slot::Waiting { block_ref, .. } => Some(*block_ref),
            _ => None,
        });
        waiting.collect()
    }

    /// Sends a request; `false` if the transport refused it.
    pub(super) fn send_request<D: Device, M: Staging>(
        &mut self,
        io: &mut Io<'_, D, M>,
        block_ref: BlockRef,
        mut request: ReadRequest,
        crc: Crc32c,
    ) -> bool {
        let Some(open) = &mut self.0 else {
            return false;
        };
        let Some(slot) = open.free.pop() else {
            return false;
        };
        (request.seq, request.tag) = (open.next_seq, slot);
        let addr = open.request_addr(slot);
        io.memory.bytes_mut(addr, CAPSULE_BYTES).copy_from_slice(&request.encode(crc));
        let sges = open.sge(addr);
        let wr_id = u64::from(slot);
        let wr = SendWr {
            wr_id,
            op: SendOp::Send,
            sges,
            signaled: true,
            solicited: true,
            ..SendWr::default()
        };
        if io.device.post_send(io.now, open.qpn, &[wr]).is_err() {
            open.free.push(slot);
            open.lost.get_or_insert(WcStatus::LocalQpError);
            return false;
        }
        open.slots[slot as usize] = Slot::Waiting { block_ref, seq: request.seq, sent: false };
        open.next_seq += 1;
        true
    }

    /// Whether the completion can be one of a request: of any other, the connection is lost.
    pub(super) fn handle_sent(&mut self, done: &Completion) -> bool {
        let Some(open) = &mut self.0 else { return true };
        if done.status != WcStatus::Success {
            open.lost.get_or_insert(done.status);
            return true;
        }
        let place = usize::try_from(done.wr_id).ok();
        match place.and_then(|place| open.slots.get_mut(place)) {
            Some(Slot::Waiting { sent: sent @ false, .. }) => *sent = true,
            Some(Slot::Responded) => open.release(done.wr_id as u32),
            _ => {
                open.lost.get_or_insert(WcStatus::LocalQpError);
                return false;
            }
        }
        true
    }

    pub(super) fn handle_response<D: Device, M: Staging>(
        &mut self,
        io: &mut Io<'_, D, M>,
        done: &Completion,
        crc: Crc32c,
    ) -> Response {
        let Some(open) = &mut self.0 else {
            return Response::Lost;
        };
        if done.status != WcStatus::Success {
            open.lost.get_or_insert(done.status);
            return Response::Lost;
        }
        // Every receive is posted again at once, so each of them may complete.
        if done.wr_id >= u64::from(open.memory.credits) {
            open.lost.get_or_insert(WcStatus::LocalQpError);
            return Response::Impossible;
        }
        let buffer = done.wr_id as u32;
        let addr = open.request_addr(buffer) + CAPSULE_BYTES as u64;
        let decoded =
            received(io.memory, addr, done).and_then(|b| ReadResponse::decode(b, crc).ok());
        if io.device.post_recv(io.now, open.qpn, &[open.receive(buffer)]).is_err() {
            open.lost.get_or_insert(WcStatus::LocalQpError);
        }
        let response =
            decoded.and_then(|r| Some(Response::To(open.match_response(&r)?, r.outcome)));
        response.unwrap_or_else(|| {
            // The target cannot be trusted any more: reconnect.
            open.lost.get_or_insert(WcStatus::BadResponse);
            Response::Bad
        })
    }
}
