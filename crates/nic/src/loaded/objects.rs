//! The objects that a device has made and not destroyed: the library's pointers by our numbers.
//! Nothing else has these pointers, so what is found here is alive.

use std::collections::{HashMap, VecDeque};
use std::ptr;

use roce::endpoint::AsyncEvent;
use roce::verbs::{
    CqId, MemoryRegion, PdId, Qpn, SendOp, SendWr, SrqId, Transport, VerbsError, WindowId,
};

use super::context::Context;
use super::translate;
use crate::abi::*;

/// Destroyed queue pairs remembered. Some drivers leave their completions in the queue.
const MAX_DESTROYED: usize = 1024;

/// Objects by their numbers.
#[derive(Debug)]
pub(super) struct Table<T> {
    pub(super) objects: HashMap<u32, T>,
    pub(super) next: u32,
}

impl<T> Default for Table<T> {
    fn default() -> Table<T> {
        Table { objects: HashMap::new(), next: 1 }
    }
}

impl<T> Table<T> {
    /// The number of the next object. Numbers are never reused: 2^32 objects are more than a
    /// process makes.
    pub(super) fn add(&mut self, object: T) -> u32 {
        let id = self.next;
        self.next = self.next.wrapping_add(1).max(1);
        self.objects.insert(id, object);
        id
    }

    pub(super) fn get(&self, id: u32) -> Option<&T> {
        self.objects.get(&id)
    }
}

#[derive(Debug)]
pub(super) struct QueuePair {
    pub(super) c: *mut ibv_qp,
    pub(super) transport: Transport,
    pub(super) limits: [u32; 2],
}

#[derive(Debug)]
pub(super) struct Region {
    pub(super) c: *mut ibv_mr,
    pub(super) region: MemoryRegion,
}

/// An event is about no object of the device.
pub(super) struct UnknownObject;

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Objects {
    pub(super) pds: Table<*mut ibv_pd>,
    pub(super) cqs: Table<*mut ibv_cq>,
    pub(super) srqs: Table<(*mut ibv_srq, PdId)>,
    pub(super) windows: Table<*mut ibv_mw>,
    pub(super) handles: Table<*mut ibv_ah>,
    pub(super) qps: HashMap<u32, QueuePair>,
    /// By local key.
    pub(super) regions: HashMap<u32, Region>,
    /// The numbers of queue pairs destroyed last.
    destroyed: VecDeque<u32>,
}

impl Objects {
    pub(super) fn pd(&self, pd: PdId) -> Result<*mut ibv_pd, VerbsError> {
        self.pds.get(pd.0).copied().ok_or(VerbsError::NoPd(pd.0))
    }

    pub(super) fn cq(&self, cq: CqId) -> Result<*mut ibv_cq, VerbsError> {
        self.cqs.get(cq.0).copied().ok_or(VerbsError::NoCq(cq.0))
    }

    pub(super) fn srq(&self, srq: SrqId) -> Result<(*mut ibv_srq, PdId), VerbsError> {
        self.srqs.get(srq.0).copied().ok_or(VerbsError::NoSrq(srq.0))
    }

    pub(super) fn qp(&self, qpn: Qpn) -> Result<&QueuePair, VerbsError> {
        self.qps.get(&qpn.get()).ok_or(VerbsError::NoQp(qpn.get()))
    }

    pub(super) fn queues(&self) -> impl Iterator<Item = CqId> {
        self.cqs.objects.keys().map(|&id| CqId(id))
    }

    pub(super) fn window(&self, window: WindowId) -> Result<*mut ibv_mw, VerbsError> {
        self.windows.get(window.0).copied().ok_or(VerbsError::NoWindow(window.0))
    }

    pub(super) fn handle(&self, id: u32) -> Result<*mut ibv_ah, VerbsError> {
        self.handles.get(id).copied().ok_or(VerbsError::NoAddressHandle(id))
    }

    pub(super) fn region(&self, lkey: u32) -> Result<&Region, VerbsError> {
        self.regions.get(&lkey).ok_or(VerbsError::NoRegion(lkey))
    }

    /// A queue pair was made. Its number may be that of one that was destroyed.
    pub(super) fn add_qp(&mut self, number: u32, qp: QueuePair) {
        self.qps.insert(number, qp);
        self.destroyed.retain(|&destroyed| destroyed != number);
    }

    /// A queue pair was destroyed.
    pub(super) fn remove_qp(&mut self, number: u32) {
        self.qps.remove(&number);
        if self.destroyed.len() == MAX_DESTROYED {
            self.destroyed.pop_front();
        }
        self.destroyed.push_back(number);
    }

    /// Whether there was a queue pair of this number.
    pub(super) fn was_destroyed(&self, number: u32) -> bool {
        self.destroyed.contains(&number)
    }

    /// An event as the device trait reports it, if it is about an object. The event's pointers are
    /// compared with ours, not followed.
    pub(super) fn describe(
        &self,
        event: &ibv_async_event,
    ) -> Result<Option<AsyncEvent>, UnknownObject> {
        // SAFETY: whatever the event is about, the union holds the bytes of a pointer.
        let (qp, cq, srq) = unsafe { (event.element.qp, event.element.cq, event.element.srq) };
        let about_qp = |make: fn(Qpn) -> AsyncEvent| {
            let found = self.qps.iter().find(|(_, known)| known.c == qp);
            found.map(|(number, _)| make(Qpn::new(*number)))
        };
        let told = match event.event_type {
            IBV_EVENT_QP_FATAL => about_qp(AsyncEvent::QpFatal),
            IBV_EVENT_QP_REQ_ERR => about_qp(AsyncEvent::QpRequestError),
            IBV_EVENT_QP_ACCESS_ERR => about_qp(AsyncEvent::QpAccessError),
            IBV_EVENT_COMM_EST => about_qp(AsyncEvent::CommunicationEstablished),
            IBV_EVENT_SQ_DRAINED => about_qp(AsyncEvent::SendQueueDrained),
            IBV_EVENT_QP_LAST_WQE_REACHED => about_qp(AsyncEvent::LastWqeReached),
            IBV_EVENT_SRQ_LIMIT_REACHED => {
                let found = self.srqs.objects.iter().find(|(_, (known, _))| *known == srq);
                found.map(|(id, _)| AsyncEvent::SrqLimitReached(SrqId(*id)))
            }
            IBV_EVENT_CQ_ERR => {
                let found = self.cqs.objects.iter().find(|(_, known)| **known == cq);
                found.map(|(id, _)| AsyncEvent::CqError(CqId(*id)))
            }
            // Those of ports and of the device have no counterpart here.
            _ => return Ok(None),
        };
        told.map(Some).ok_or(UnknownObject)
    }

    /// A send work request in C's terms, but for its list of memory and its successor.
    pub(super) fn send_wr(
        &self,
        wr: &SendWr,
        transport: Transport,
    ) -> Result<ibv_send_wr, VerbsError> {
        // SAFETY: numbers and pointers, for which zero is a value.
        let mut out: ibv_send_wr = unsafe { std::mem::zeroed() };
        let (opcode, imm_data, args) = translate::operation(wr.op);
        (out.wr_id, out.opcode, out.imm_data) = (wr.wr_id, opcode, imm_data);
        out.send_flags = translate::send_flags(wr);
        if let Some(args) = args {
            out.wr = args;
        }
        if let Some(to) = wr.to.filter(|_| transport == Transport::Ud) {
            let ah = self.handle(to.ah.id)?;
            let (remote_qpn, remote_qkey) = (to.dest_qp.get(), to.qkey);
            out.wr = ibv_send_wr_args { ud: wr_ud { ah, remote_qpn, remote_qkey } };
        }
        if let SendOp::BindWindow(binding) = wr.op {
            let mw = self.window(binding.window)?;
            // An unbind has no region.
            let mr = self.regions.get(&binding.lkey).map_or(ptr::null_mut(), |region| region.c);
            let zero_based = if binding.zero_based { IBV_ACCESS_ZERO_BASED } else { 0 };
            let mw_access_flags = translate::access_flags(binding.access) | zero_based;
            let (addr, length) = (binding.addr, binding.len);
            let bind_info = ibv_mw_bind_info { mr, addr, length, mw_access_flags };
            out.bind_mw = ibv_send_wr_bind { mw, rkey: binding.rkey, bind_info };
        }
        Ok(out)
    }

    /// Destroys what is left, in the order of the objects' dependencies. What the library refuses
    /// to destroy stays until the process ends.
    pub(super) fn destroy_all(&mut self, context: &Context) {
        let (functions, ops) = (&context.functions, context.ops());
        // SAFETY: living objects, none of which is used again: nothing is left here.
        unsafe {
            for (_, qp) in self.qps.drain() {
                (functions.destroy_qp)(qp.c);
            }
            for (_, (srq, _)) in self.srqs.objects.drain() {
                (functions.destroy_srq)(srq);
            }
            for (_, ah) in self.handles.objects.drain() {
                (functions.destroy_ah)(ah);
            }
            for (_, mw) in self.windows.objects.drain() {
                ops.dealloc_mw.map(|dealloc| dealloc(mw));
            }
            for (_, region) in self.regions.drain() {
                (functions.dereg_mr)(region.c);
            }
            for (_, cq) in self.cqs.objects.drain() {
                (functions.destroy_cq)(cq);
            }
            for (_, pd) in self.pds.objects.drain() {
                (functions.dealloc_pd)(pd);
            }
        }
    }
}
