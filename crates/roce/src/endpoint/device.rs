//! The endpoint as a [`Device`].

use core::net::IpAddr;

use arrayvec::ArrayVec;

use super::Endpoint;
use crate::time::Time;
use crate::verbs::device::{Device, PostError};
use crate::verbs::{
    Access, AddressHandle, AsyncEvent, Completion, CqId, MemoryRegion, Path, PdId, QpAttr,
    QpConfig, Qpn, RecvWr, SendWr, SrqConfig, SrqId, Transport, VerbsError, WindowId,
};

/// Posts one after the other until one is refused.
fn post_each<W: Clone>(
    wrs: &[W],
    mut post: impl FnMut(W) -> Result<(), VerbsError>,
) -> Result<(), PostError> {
    wrs.iter()
        .cloned()
        .enumerate()
        .try_for_each(|(accepted, wr)| post(wr).map_err(|error| PostError { accepted, error }))
}

impl Device for Endpoint {
    fn alloc_pd(&mut self) -> Result<PdId, VerbsError> {
        Ok(Endpoint::alloc_pd(self))
    }

    fn dealloc_pd(&mut self, pd: PdId) -> Result<(), VerbsError> {
        Endpoint::dealloc_pd(self, pd)
    }

    fn create_cq(&mut self, depth: u32) -> Result<CqId, VerbsError> {
        Endpoint::create_cq(self, depth)
    }

    fn resize_cq(&mut self, cq: CqId, depth: u32) -> Result<(), VerbsError> {
        Endpoint::resize_cq(self, cq, depth)
    }

    fn destroy_cq(&mut self, cq: CqId) -> Result<(), VerbsError> {
        Endpoint::destroy_cq(self, cq)
    }

    fn poll_cq<const N: usize>(
        &mut self,
        cq: CqId,
        into: &mut ArrayVec<Completion, N>,
    ) -> Result<(), VerbsError> {
        while !into.is_full() {
            let Some(completion) = Endpoint::poll_cq(self, cq) else {
                return self.cq_overrun(cq).map(drop).ok_or(VerbsError::NoCq(cq.0));
            };
            into.push(completion);
        }
        Ok(())
    }

    fn req_notify(&mut self, cq: CqId, solicited_only: bool) -> Result<(), VerbsError> {
        Endpoint::req_notify(self, cq, solicited_only)
    }

    fn poll_notified(&mut self) -> Option<CqId> {
        Endpoint::poll_notified(self)
    }

    fn create_qp(&mut self, config: QpConfig) -> Result<Qpn, VerbsError> {
        Endpoint::create_qp(self, config)
    }

    fn modify_qp(&mut self, now: Time, qpn: Qpn, attr: &QpAttr) -> Result<(), VerbsError> {
        Endpoint::modify_qp(self, now, qpn, attr)
    }

    fn query_qp(&mut self, qpn: Qpn) -> Result<QpAttr, VerbsError> {
        Endpoint::query_qp(self, qpn)
    }

    fn transport(&self, qpn: Qpn) -> Result<Transport, VerbsError> {
        Endpoint::transport(self, qpn)
    }

    fn destroy_qp(&mut self, now: Time, qpn: Qpn) -> Result<(), VerbsError> {
        Endpoint::destroy_qp(self, now, qpn)
    }

    fn register(
        &mut self,
        pd: PdId,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        Endpoint::register(self, pd, addr, len, access)
    }

    fn change_region(
        &mut self,
        region: &MemoryRegion,
        pd: PdId,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        Endpoint::change_region(self, region.lkey, pd, access)?;
        Ok(*region)
    }

    fn deregister(&mut self, lkey: u32) -> Result<(), VerbsError> {
        Endpoint::deregister(self, lkey)
    }

    fn alloc_window(&mut self, pd: PdId, type_2: bool) -> Result<(WindowId, u32), VerbsError> {
        Endpoint::alloc_window(self, pd, type_2)
    }

    fn dealloc_window(&mut self, window: WindowId) -> Result<(), VerbsError> {
        Endpoint::dealloc_window(self, window)
    }

    fn create_srq(&mut self, config: SrqConfig) -> Result<SrqId, VerbsError> {
        Endpoint::create_srq(self, config)
    }

    fn set_srq_limit(&mut self, srq: SrqId, limit: u32) -> Result<(), VerbsError> {
        Endpoint::set_srq_limit(self, srq, limit)
    }

    fn query_srq(&mut self, srq: SrqId) -> Result<SrqConfig, VerbsError> {
        Endpoint::query_srq(self, srq)
    }

    fn destroy_srq(&mut self, srq: SrqId) -> Result<(), VerbsError> {
        Endpoint::destroy_srq(self, srq)
    }

    /// The handle is the path itself: it takes no slot in the endpoint.
    fn create_ah(&mut self, pd: PdId, path: &Path) -> Result<AddressHandle, VerbsError> {
        self.check_pd(pd)?;
        Ok(AddressHandle::from(*path))
    }

    fn destroy_ah(&mut self, _handle: AddressHandle) -> Result<(), VerbsError> {
        Ok(())
    }

    fn attach_multicast(&mut self, qpn: Qpn, group: IpAddr) -> Result<(), VerbsError> {
        Endpoint::attach_multicast(self, qpn, group)
    }

    fn detach_multicast(&mut self, qpn: Qpn, group: IpAddr) -> Result<(), VerbsError> {
        Endpoint::detach_multicast(self, qpn, group)
    }

    fn post_send(&mut self, now: Time, qpn: Qpn, wrs: &[SendWr]) -> Result<(), PostError> {
        post_each(wrs, |wr| Endpoint::post_send(self, now, qpn, wr))
    }

    fn post_recv(&mut self, now: Time, qpn: Qpn, wrs: &[RecvWr]) -> Result<(), PostError> {
        post_each(wrs, |wr| Endpoint::post_recv(self, now, qpn, wr))
    }

    fn post_srq_recv(&mut self, srq: SrqId, wrs: &[RecvWr]) -> Result<(), PostError> {
        post_each(wrs, |wr| Endpoint::post_srq_recv(self, srq, wr))
    }

    fn poll_event(&mut self) -> Option<AsyncEvent> {
        Endpoint::poll_event(self)
    }
}
