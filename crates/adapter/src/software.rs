//! The software device: an endpoint, and the path through shared memory to processes of this
//! machine.
//!
//! Local peers find in this process's control segment which queue pairs serve them, and which
//! memory they may use. The verbs of [`SoftwareDevice`] keep it true: registering publishes a
//! region, a transition publishes or withdraws its queue pair. So its users need not pair calls.
//! Who withdraws something waits for the accesses that may have begun before
//! ([`SoftwareDevice::unfinished`]) until the memory is used for something else.
//!
//! Requests that wait for the packets before them, or for their driver, are carried out in turns, a
//! bounded number of bytes at a time and each queue pair in its turn
//! ([`SoftwareDevice::carry_out_held`]).
//!
//! Wires, threads, locks and memory management do not belong here.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use arrayvec::ArrayVec;
use nic::local_peers::{Doorbell, FifoCounters, LocalPeers, Shared, Target, Unfinished};
use roce::Time;
use roce::device::{Device, PostError};
use roce::direct::{
    Backlog, Direct, DirectKind, Holding, MAX_DIRECT_BYTES, Posted, RegionDescriptor,
};
use roce::endpoint::{AsyncEvent, Endpoint, QpAttr, QpConfig, QpState, SrqConfig};
use roce::verbs::{
    Access, AddressHandle, Completion, CqId, MemoryRegion, PdId, Qpn, RecvWr, SendWr, SrqId,
    Transport, VerbsError, WindowBinding, WindowId,
};
use roce::world::{self, Memory, Path, Wire};

/// What a device has of the path to local peers: its processes, or the reason for none.
pub type LocalPath = Result<LocalPeers, String>;

/// The process of this machine at the other end of a connection, or why it is reached by packets.
pub type LocalPeer = Result<Arc<Target>, String>;

/// What became of requests that waited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CarriedOut {
    /// Bytes were copied.
    pub worked: bool,
    /// Requests have become packets, or may have.
    pub has_packets: bool,
}

/// See the module's text.
#[derive(Debug)]
pub struct SoftwareDevice {
    // Local peers stop before the endpoint goes.
    local: LocalPath,
    endpoint: Endpoint,
    /// In the order in which paths count them.
    addresses: Vec<IpAddr>,
    /// Which sends to local peers wait for [`SoftwareDevice::carry_out_held`].
    waiting: Holding,
    /// Queue pairs that are connected: published while they serve.
    connected: BTreeSet<u32>,
    /// Queue pairs with requests to be carried out; where all wait, those with a local peer.
    holding: BTreeSet<u32>,
    /// The first of them at which the last turn ended although more could be carried out.
    behind: Option<u32>,
    /// Why queue pairs have no local peer, by number.
    by_packets: HashMap<u32, String>,
    /// Published regions by local key.
    regions: HashMap<u32, RegionDescriptor>,
    /// The endpoint's count of failed queue pairs at the last look.
    failed_before: u64,
}

impl SoftwareDevice {
    /// A device at these addresses. Sends to local peers wait for
    /// [`carry_out_held`](SoftwareDevice::carry_out_held) as `waiting` says: all where one thread
    /// drives the device for many clients.
    pub fn new(
        endpoint: Endpoint,
        addresses: Vec<IpAddr>,
        local: LocalPath,
        waiting: Holding,
    ) -> SoftwareDevice {
        SoftwareDevice {
            local,
            endpoint,
            addresses,
            waiting,
            connected: BTreeSet::new(),
            holding: BTreeSet::new(),
            behind: None,
            by_packets: HashMap::new(),
            regions: HashMap::new(),
            failed_before: 0,
        }
    }

    /// The endpoint, for what changes neither queue pairs nor regions.
    #[inline]
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// As [`endpoint`](SoftwareDevice::endpoint), for calls that change it.
    #[inline]
    pub fn endpoint_mut(&mut self) -> &mut Endpoint {
        &mut self.endpoint
    }

    /// The path to local peers, or why there is none.
    #[inline]
    pub fn local(&self) -> &LocalPath {
        &self.local
    }

    /// As [`local`](SoftwareDevice::local), for calls that change it.
    #[inline]
    pub fn local_mut(&mut self) -> &mut LocalPath {
        &mut self.local
    }

    /// What other threads find local peers with.
    ///
    /// # Errors
    /// Why there are none.
    pub fn discovery(&self) -> Result<Arc<Shared>, String> {
        self.local.as_ref().map(|local| Arc::clone(local.shared())).map_err(Clone::clone)
    }

    /// The counters of packets to and from local peers.
    pub fn fifo_counters(&self) -> Option<&FifoCounters> {
        self.local.as_ref().ok().map(LocalPeers::counters)
    }

    /// Accesses of local peers that may have begun before something was withdrawn.
    pub fn unfinished(&self) -> Unfinished {
        let local = self.local.as_ref();
        local.map_or_else(|_| Unfinished::default(), |local| local.shared().unfinished())
    }

    /// Queue pairs with a local peer, where their sends wait for turns.
    pub fn local_queue_pairs(&self) -> usize {
        self.holding.len()
    }

    // ---- turns ---------------------------------------------------------------------------------

    /// Receives packets and handles timers; returns how many packets.
    #[inline]
    pub fn receive<W: Wire + Doorbell, M: Memory>(
        &mut self,
        wire: &mut W,
        memory: &mut M,
        now: Time,
    ) -> usize {
        let endpoint = &mut self.endpoint;
        match &mut self.local {
            Ok(local) => world::receive(endpoint, &mut local.wire(wire), memory, now),
            Err(_) => world::receive(endpoint, wire, memory, now),
        }
    }

    /// Sends what is pending, up to a bound; returns how many packets.
    #[inline]
    pub fn send<W: Wire + Doorbell, M: Memory>(
        &mut self,
        wire: &mut W,
        memory: &M,
        now: Time,
    ) -> usize {
        let endpoint = &mut self.endpoint;
        match &mut self.local {
            Ok(local) => world::send(endpoint, &mut local.wire(wire), memory, now),
            Err(_) => world::send(endpoint, wire, memory, now),
        }
    }

    /// Takes messages of local peers, a bounded number, and their acknowledgements of ours. Returns
    /// how many of both.
    #[inline]
    pub fn exchange_messages<M: Memory>(
        &mut self,
        wire: &mut impl Doorbell,
        memory: &mut M,
        now: Time,
    ) -> usize {
        let Ok(local) = &mut self.local else { return 0 };
        local.exchange_messages(&mut self.endpoint, memory, wire, now)
    }

    /// Takes acknowledgements of messages, and messages where `looks` says so. Returns how many of
    /// each.
    #[inline]
    pub fn exchange_some<M: Memory>(
        &mut self,
        wire: &mut impl Doorbell,
        memory: &mut M,
        now: Time,
        looks: impl FnOnce() -> bool,
    ) -> [usize; 2] {
        let Ok(local) = &mut self.local else { return [0; 2] };
        let acknowledged = local.exchange_acks(&mut self.endpoint, now);
        if !looks() {
            return [acknowledged, 0];
        }
        [acknowledged, local.exchange_incoming(&mut self.endpoint, memory, wire, now)]
    }

    /// Wakes local peers for messages that were handed over.
    #[inline]
    pub fn wake_for_messages(&mut self, wire: &mut impl Doorbell) {
        if let Ok(local) = &mut self.local {
            local.wake_for_messages(&self.endpoint, wire);
        }
    }

    /// Whether requests wait to be carried out.
    #[inline]
    pub fn has_holding(&self) -> bool {
        !self.holding.is_empty()
    }

    /// Whether more could have been carried out when the last turn ended.
    #[inline]
    pub fn is_behind(&self) -> bool {
        self.behind.is_some()
    }

    /// Carries out requests that wait: bytes of one long request in all, because other clients of
    /// the thread or of the lock wait meanwhile.
    pub fn carry_out_held(&mut self, now: Time) -> CarriedOut {
        let first = self.behind.take().map_or(0, |last| last + 1);
        let SoftwareDevice { endpoint, local: Ok(local), holding, behind, waiting, .. } = self
        else {
            return CarriedOut::default();
        };
        let (before, mut budget) = (holding.len(), MAX_DIRECT_BYTES);
        // Those behind the one that was cut short the last time come first.
        for is_second_round in [false, true] {
            holding.retain(|&number| {
                let qpn = Qpn::new(number);
                if (number < first) != is_second_round {
                    return true;
                }
                let backlog = endpoint.carry_out_held(now, qpn, local, &mut budget);
                if backlog == Backlog::Ready {
                    behind.get_or_insert(number);
                }
                match waiting {
                    Holding::Runs => backlog != Backlog::Empty,
                    Holding::All | Holding::Relaxed => may_wait(endpoint, local, now, qpn),
                }
            });
        }
        CarriedOut { worked: budget < MAX_DIRECT_BYTES, has_packets: holding.len() < before }
    }

    /// Withdraws queue pairs that have failed since the last call, before the program learns of it.
    #[inline]
    pub fn withdraw_failed(&mut self) {
        let failed = self.endpoint.counters().qp_errors;
        if failed != std::mem::replace(&mut self.failed_before, failed) {
            self.connected.iter().for_each(|&qpn| self.publish_qp(Qpn::new(qpn)));
        }
    }

    // ---- queue pairs ---------------------------------------------------------------------------

    /// Posts one send, which may be done when this returns.
    #[inline]
    pub fn post_send_direct(
        &mut self,
        now: Time,
        qpn: Qpn,
        wr: SendWr,
    ) -> Result<Posted, VerbsError> {
        let posted = match &mut self.local {
            Ok(local) => self.endpoint.post_send_direct(now, qpn, wr, local)?,
            Err(_) => {
                self.endpoint.post_send(now, qpn, wr)?;
                Posted::Queued
            }
        };
        if posted == Posted::Held {
            self.holding.insert(qpn.get());
        }
        Ok(posted)
    }

    /// Binds a window of type 1 behind the sends before it, which may wait, and returns its new
    /// key.
    ///
    /// # Errors
    /// Those of [`Endpoint::bind_window`].
    pub fn bind_window(
        &mut self,
        now: Time,
        qpn: Qpn,
        wr_id: u64,
        binding: WindowBinding,
        signaled: bool,
    ) -> Result<u32, VerbsError> {
        let bound = self.endpoint.bind_window(now, qpn, wr_id, binding, signaled);
        self.note_held(qpn);
        bound
    }

    /// Requests of this queue pair may wait to be carried out; returns whether they do.
    pub fn note_held(&mut self, qpn: Qpn) -> bool {
        let holds = self.endpoint.has_held(qpn);
        if holds {
            self.holding.insert(qpn.get());
        }
        holds
    }

    /// Whether a queue pair has a local peer.
    #[inline]
    pub fn is_local(&self, qpn: Qpn) -> bool {
        self.local.as_ref().is_ok_and(|local| local.route_of(qpn).is_some())
    }

    /// A queue pair is connected: to this local peer, or by packets for this reason.
    pub fn route(&mut self, now: Time, qpn: Qpn, peer: LocalPeer) {
        let Ok(local) = &mut self.local else { return };
        let number = qpn.get();
        self.holding.remove(&number);
        let waits = self.waiting != Holding::Runs;
        match peer {
            // One that is gone has no sends.
            Ok(_) if waits && self.endpoint.hold_sends(now, qpn, self.waiting).is_err() => {}
            Ok(peer) => {
                self.by_packets.remove(&number);
                local.route(qpn, Some(peer));
                if waits {
                    self.holding.insert(number);
                }
            }
            Err(why) => {
                self.by_packets.insert(number, why);
                local.route(qpn, None);
            }
        }
        self.note_held(qpn);
    }

    /// A queue pair has changed its state.
    fn follow_qp(&mut self, qpn: Qpn) {
        if matches!(self.endpoint.qp_state(qpn), None | Some(QpState::Reset)) {
            return self.forget_qp(qpn);
        }
        if self.local.is_err() {
            return;
        }
        self.connected.insert(qpn.get());
        self.publish_qp(qpn);
        // A queue pair that was drained goes on with what waits.
        self.note_held(qpn);
    }

    /// A queue pair is gone, or not connected any more.
    fn forget_qp(&mut self, qpn: Qpn) {
        self.by_packets.remove(&qpn.get());
        self.connected.remove(&qpn.get());
        self.holding.remove(&qpn.get());
        if let Ok(local) = &mut self.local {
            local.route(qpn, None);
            local.withdraw_qp(qpn);
        }
    }

    /// Publishes what a queue pair serves now, which changes with its state and, in RTR, with its
    /// first packet.
    fn publish_qp(&self, qpn: Qpn) {
        let Ok(local) = &self.local else { return };
        let address = |index: u8| self.addresses.get(usize::from(index)).copied();
        match self.endpoint.qp_descriptor(qpn, address) {
            Some(descriptor) => local.publish_qp(&descriptor),
            None => local.withdraw_qp(qpn),
        }
    }

    /// The path of a queue pair, in words.
    pub fn path_of(&self, qpn: Qpn, service: Transport) -> String {
        let by_packets = |why: &str| format!("packets: {why}");
        let local = match &self.local {
            Ok(local) => local,
            Err(why) => return by_packets(why),
        };
        let Some(target) = local.route_of(qpn) else {
            let why = self.by_packets.get(&qpn.get());
            return by_packets(why.map_or("not connected", String::as_str));
        };
        let why_not = target.why_not().or((service != Transport::Rc).then_some("unreliable"));
        match why_not {
            None => "direct".to_owned(),
            Some(why) if target.has_fifo() => format!("packets in shared memory: {why}"),
            Some(why) => by_packets(why),
        }
    }

    // ---- regions -------------------------------------------------------------------------------

    /// Local peers with a right may use this region, whose memory is where the descriptor says.
    pub fn publish_region(&mut self, lkey: u32, descriptor: &RegionDescriptor) {
        if let Ok(local) = &self.local
            && descriptor.access.is_remote()
        {
            local.publish_region(descriptor);
            self.regions.insert(lkey, *descriptor);
        }
    }

    /// Local peers may no longer begin to use this region.
    pub fn withdraw_region(&mut self, lkey: u32) {
        if let (Ok(local), Some(descriptor)) = (&self.local, self.regions.remove(&lkey)) {
            local.withdraw_region(descriptor.rkey);
        }
    }
}

/// Whether sends of a queue pair go on waiting for turns. Those to a peer that has ended are
/// packets from now on.
fn may_wait(endpoint: &mut Endpoint, local: &LocalPeers, now: Time, qpn: Qpn) -> bool {
    if !endpoint.has_held(qpn) || local.reaches(qpn, DirectKind::Write) {
        return true;
    }
    // A queue pair that is gone has none.
    let _ = endpoint.hold_sends(now, qpn, Holding::Runs);
    endpoint.has_held(qpn)
}

impl Device for SoftwareDevice {
    fn alloc_pd(&mut self) -> Result<PdId, VerbsError> {
        Ok(self.endpoint.alloc_pd())
    }

    fn dealloc_pd(&mut self, pd: PdId) -> Result<(), VerbsError> {
        self.endpoint.dealloc_pd(pd)
    }

    fn create_cq(&mut self, depth: u32) -> Result<CqId, VerbsError> {
        self.endpoint.create_cq(depth)
    }

    fn resize_cq(&mut self, cq: CqId, depth: u32) -> Result<(), VerbsError> {
        self.endpoint.resize_cq(cq, depth)
    }

    fn destroy_cq(&mut self, cq: CqId) -> Result<(), VerbsError> {
        self.endpoint.destroy_cq(cq)
    }

    #[inline]
    fn poll_cq<const N: usize>(
        &mut self,
        cq: CqId,
        into: &mut ArrayVec<Completion, N>,
    ) -> Result<(), VerbsError> {
        Device::poll_cq(&mut self.endpoint, cq, into)
    }

    fn req_notify(&mut self, cq: CqId, solicited_only: bool) -> Result<(), VerbsError> {
        self.endpoint.req_notify(cq, solicited_only)
    }

    #[inline]
    fn poll_notified(&mut self) -> Option<CqId> {
        self.endpoint.poll_notified()
    }

    fn create_qp(&mut self, config: QpConfig) -> Result<Qpn, VerbsError> {
        self.endpoint.create_qp(config)
    }

    fn modify_qp(&mut self, now: Time, qpn: Qpn, attr: &QpAttr) -> Result<(), VerbsError> {
        self.endpoint.modify_qp(now, qpn, attr)?;
        self.follow_qp(qpn);
        Ok(())
    }

    fn query_qp(&mut self, qpn: Qpn) -> Result<QpAttr, VerbsError> {
        self.endpoint.query_qp(qpn)
    }

    fn transport(&self, qpn: Qpn) -> Result<Transport, VerbsError> {
        self.endpoint.transport(qpn)
    }

    /// Local peers are kept from it before it goes.
    fn destroy_qp(&mut self, now: Time, qpn: Qpn) -> Result<(), VerbsError> {
        self.endpoint.destroy_qp(now, qpn)?;
        self.forget_qp(qpn);
        Ok(())
    }

    fn register(
        &mut self,
        pd: PdId,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        let region = self.endpoint.register(pd, addr, len, access)?;
        let MemoryRegion { lkey, rkey, .. } = region;
        let descriptor =
            RegionDescriptor { rkey, pd, addr, len, backing: addr, in_file: None, access };
        self.publish_region(lkey, &descriptor);
        Ok(region)
    }

    fn change_region(
        &mut self,
        region: &MemoryRegion,
        pd: PdId,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        let changed = Device::change_region(&mut self.endpoint, region, pd, access)?;
        let before = self.regions.get(&region.lkey).copied();
        self.withdraw_region(region.lkey);
        let MemoryRegion { addr, len, lkey, rkey } = changed;
        let (backing, in_file) =
            before.map_or((addr, None), |descriptor| (descriptor.backing, descriptor.in_file));
        let descriptor = RegionDescriptor { rkey, pd, addr, len, backing, in_file, access };
        self.publish_region(lkey, &descriptor);
        Ok(changed)
    }

    fn deregister(&mut self, lkey: u32) -> Result<(), VerbsError> {
        self.endpoint.deregister(lkey)?;
        self.withdraw_region(lkey);
        Ok(())
    }

    fn alloc_window(&mut self, pd: PdId, type_2: bool) -> Result<(WindowId, u32), VerbsError> {
        self.endpoint.alloc_window(pd, type_2)
    }

    fn dealloc_window(&mut self, window: WindowId) -> Result<(), VerbsError> {
        self.endpoint.dealloc_window(window)
    }

    fn create_srq(&mut self, config: SrqConfig) -> Result<SrqId, VerbsError> {
        self.endpoint.create_srq(config)
    }

    fn set_srq_limit(&mut self, srq: SrqId, limit: u32) -> Result<(), VerbsError> {
        self.endpoint.set_srq_limit(srq, limit)
    }

    fn query_srq(&mut self, srq: SrqId) -> Result<SrqConfig, VerbsError> {
        self.endpoint.query_srq(srq)
    }

    fn destroy_srq(&mut self, srq: SrqId) -> Result<(), VerbsError> {
        self.endpoint.destroy_srq(srq)
    }

    fn create_ah(&mut self, pd: PdId, path: &Path) -> Result<AddressHandle, VerbsError> {
        Device::create_ah(&mut self.endpoint, pd, path)
    }

    fn destroy_ah(&mut self, handle: AddressHandle) -> Result<(), VerbsError> {
        Device::destroy_ah(&mut self.endpoint, handle)
    }

    fn attach_multicast(&mut self, qpn: Qpn, group: IpAddr) -> Result<(), VerbsError> {
        self.endpoint.attach_multicast(qpn, group)
    }

    fn detach_multicast(&mut self, qpn: Qpn, group: IpAddr) -> Result<(), VerbsError> {
        self.endpoint.detach_multicast(qpn, group)
    }

    #[inline]
    fn post_send(&mut self, now: Time, qpn: Qpn, wrs: &[SendWr]) -> Result<(), PostError> {
        Device::post_send(&mut self.endpoint, now, qpn, wrs)
    }

    #[inline]
    fn post_recv(&mut self, now: Time, qpn: Qpn, wrs: &[RecvWr]) -> Result<(), PostError> {
        Device::post_recv(&mut self.endpoint, now, qpn, wrs)
    }

    fn post_srq_recv(&mut self, srq: SrqId, wrs: &[RecvWr]) -> Result<(), PostError> {
        Device::post_srq_recv(&mut self.endpoint, srq, wrs)
    }

    /// Establishing communication makes a queue pair serve local peers.
    #[inline]
    fn poll_event(&mut self) -> Option<AsyncEvent> {
        let event = self.endpoint.poll_event()?;
        if let AsyncEvent::CommunicationEstablished(qpn) = event {
            self.publish_qp(qpn);
        }
        Some(event)
    }
}
