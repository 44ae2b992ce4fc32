//! Watches what a reader posts, and checks its bounds: never more requests outstanding than
//! credits, never two of them into the same memory, never a capsule changed while it may be sent.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::ops::Range;

use arrayvec::ArrayVec;
use roce::Time;
use roce::device::{Device, PostError};
use roce::endpoint::{AsyncEvent, Endpoint, QpAttr, QpConfig, SrqConfig};
use roce::verbs::{
    Access, AddressHandle, Completion, CqId, MemoryRegion, PdId, Qpn, RecvWr, SendWr, SrqId,
    Transport, VerbsError, WcOpcode, WcStatus, WindowId,
};
use roce::world::{Path, Staging};
use xio::capsule::{CAPSULE_BYTES, ReadRequest, ReadResponse};
use xio::kernel::crc32c;

use super::net::Arena;

/// Requests of one reader in flight, by queue pair and number.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    receives: BTreeMap<(Qpn, u64), u64>,
    answers: Vec<(Qpn, u64)>,
    posted: Vec<(Qpn, u64)>,
    /// Requests whose SEND has not completed.
    sending: BTreeSet<(Qpn, u64)>,
    in_flight: BTreeMap<(Qpn, u64), Range<u64>>,
    /// Requests posted.
    pub(crate) requests: u64,
    /// Bytes requested.
    pub(crate) asked_bytes: u64,
    /// Most requests that were outstanding on one queue pair.
    pub(crate) most: usize,
}

/// Changes the completions that a node's device has just reported, or the result of the call.
pub(crate) type Lie = Box<dyn FnMut(&mut [Completion]) -> Result<(), VerbsError>>;

/// An endpoint that may lie, and whose work requests may be recorded.
pub(crate) struct Watched<'a> {
    pub(crate) endpoint: &'a mut Endpoint,
    pub(crate) ledger: Option<&'a mut Ledger>,
    pub(crate) lie: Option<&'a mut Lie>,
}

/// Passes calls of the device on to the endpoint.
macro_rules! pass_on {
    ($( fn $name:ident($($arg:ident: $ty:ty),*) -> $out:ty; )+) => { $(
        fn $name(&mut self, $($arg: $ty),*) -> $out {
            Device::$name(self.endpoint, $($arg),*)
        }
    )+ };
}

impl Device for Watched<'_> {
    fn post_send(&mut self, now: Time, qpn: Qpn, wrs: &[SendWr]) -> Result<(), PostError> {
        Device::post_send(self.endpoint, now, qpn, wrs)?;
        let Some(ledger) = &mut self.ledger else { return Ok(()) };
        for wr in wrs {
            let fresh = ledger.sending.insert((qpn, wr.wr_id));
            assert!(fresh, "slot {} is used again before its SEND has completed", wr.wr_id);
            ledger.posted.push((qpn, wr.sges[0].addr));
        }
        Ok(())
    }

    fn post_recv(&mut self, now: Time, qpn: Qpn, wrs: &[RecvWr]) -> Result<(), PostError> {
        let places = wrs.iter().map(|wr| ((qpn, wr.wr_id), wr.sges[0].addr));
        if let Some(ledger) = &mut self.ledger {
            ledger.receives.extend(places);
        }
        Device::post_recv(self.endpoint, now, qpn, wrs)
    }

    fn poll_cq<const N: usize>(
        &mut self,
        cq: CqId,
        into: &mut ArrayVec<Completion, N>,
    ) -> Result<(), VerbsError> {
        let before = into.len();
        Device::poll_cq(self.endpoint, cq, into)?;
        for done in &into[before..] {
            let Some(ledger) = &mut self.ledger else { break };
            match (done.status, done.opcode) {
                (WcStatus::Success, WcOpcode::Recv) => {
                    ledger.answers.push((done.qpn, done.wr_id));
                }
                (WcStatus::Success, WcOpcode::Send) => {
                    ledger.sending.remove(&(done.qpn, done.wr_id));
                }
                _ => {}
            }
        }
        self.lie.as_mut().map_or(Ok(()), |lie| lie(&mut into[before..]))
    }

    fn transport(&self, qpn: Qpn) -> Result<Transport, VerbsError> {
        self.endpoint.transport(qpn)
    }

    pass_on! {
        fn alloc_pd() -> Result<PdId, VerbsError>;
        fn dealloc_pd(pd: PdId) -> Result<(), VerbsError>;
        fn create_cq(depth: u32) -> Result<CqId, VerbsError>;
        fn resize_cq(cq: CqId, depth: u32) -> Result<(), VerbsError>;
        fn destroy_cq(cq: CqId) -> Result<(), VerbsError>;
        fn req_notify(cq: CqId, solicited_only: bool) -> Result<(), VerbsError>;
        fn poll_notified() -> Option<CqId>;
        fn create_qp(config: QpConfig) -> Result<Qpn, VerbsError>;
        fn modify_qp(now: Time, qpn: Qpn, attr: &QpAttr) -> Result<(), VerbsError>;
        fn query_qp(qpn: Qpn) -> Result<QpAttr, VerbsError>;
        fn destroy_qp(now: Time, qpn: Qpn) -> Result<(), VerbsError>;
        fn register(pd: PdId, addr: u64, len: u64, access: Access) -> Result<MemoryRegion, VerbsError>;
        fn change_region(region: &MemoryRegion, pd: PdId, access: Access) -> Result<MemoryRegion, VerbsError>;
        fn deregister(lkey: u32) -> Result<(), VerbsError>;
        fn alloc_window(pd: PdId, type_2: bool) -> Result<(WindowId, u32), VerbsError>;
        fn dealloc_window(window: WindowId) -> Result<(), VerbsError>;
        fn create_srq(config: SrqConfig) -> Result<SrqId, VerbsError>;
        fn set_srq_limit(srq: SrqId, limit: u32) -> Result<(), VerbsError>;
        fn query_srq(srq: SrqId) -> Result<SrqConfig, VerbsError>;
        fn destroy_srq(srq: SrqId) -> Result<(), VerbsError>;
        fn create_ah(pd: PdId, path: &Path) -> Result<AddressHandle, VerbsError>;
        fn destroy_ah(handle: AddressHandle) -> Result<(), VerbsError>;
        fn attach_multicast(qpn: Qpn, group: IpAddr) -> Result<(), VerbsError>;
        fn detach_multicast(qpn: Qpn, group: IpAddr) -> Result<(), VerbsError>;
        fn post_srq_recv(srq: SrqId, wrs: &[RecvWr]) -> Result<(), PostError>;
        fn poll_event() -> Option<AsyncEvent>;
    }
}

impl Ledger {
    /// Updates the ledger after a poll: capsules must be unchanged.
    pub(crate) fn settle(&mut self, arena: &Arena, credits: u32) {
        for (qpn, wr_id) in std::mem::take(&mut self.answers) {
            // An abandoned queue pair keeps completions, but its memory is gone.
            let Some(addr) = self.receives.get(&(qpn, wr_id)) else {
                continue;
            };
            let bytes = arena.bytes(*addr, CAPSULE_BYTES);
            if let Ok(answer) = ReadResponse::decode(bytes, crc32c) {
                self.in_flight.remove(&(qpn, answer.seq));
            }
        }
        for (qpn, addr) in std::mem::take(&mut self.posted) {
            let bytes = arena.bytes(addr, CAPSULE_BYTES);
            let request = ReadRequest::decode(bytes, crc32c).expect("a reader sends requests");
            self.ask(qpn, &request);
        }
        let queue_pairs = self.in_flight.keys().map(|(qpn, _)| *qpn);
        for qpn in queue_pairs.collect::<BTreeSet<_>>() {
            let count = self.in_flight.keys().filter(|(of, _)| *of == qpn).count();
            assert!(count <= credits as usize, "{count} requests on {credits} credits");
            self.most = self.most.max(count);
        }
    }

    fn ask(&mut self, qpn: Qpn, request: &ReadRequest) {
        let len = u64::from(request.tokens) * u64::from(request.deliver.bytes());
        let range = request.remote_addr..request.remote_addr + len;
        for other in self.in_flight.values() {
            let apart = range.end <= other.start || other.end <= range.start;
            assert!(apart, "two requests into {range:?} and {other:?}");
        }
        let double = self.in_flight.insert((qpn, request.seq), range);
        assert_eq!(double, None, "number {} twice", request.seq);
        self.requests += 1;
        self.asked_bytes += len;
    }

    /// A queue pair is gone, with all its requests.
    pub(crate) fn forget(&mut self, qpn: Qpn) {
        self.in_flight.retain(|(of, _), _| *of != qpn);
        self.receives.retain(|(of, _), _| *of != qpn);
        self.sending.retain(|(of, _)| *of != qpn);
    }

    pub(crate) fn outstanding(&self) -> usize {
        self.in_flight.len()
    }
}
