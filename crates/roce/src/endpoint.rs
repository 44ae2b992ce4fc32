//! One RoCE endpoint: everything that a software RDMA device is, without the packets' payload.
//!
//! [`Endpoint`] owns protection domains, memory regions, completion queues and queue pairs. It is a
//! state machine without input or output of its own: calls tell it what happened, `poll_*` says
//! what is to be done. It holds no lock, starts no thread and never waits.
//!
//! Per packet the work is bounded and independent of the number of queue pairs: a packet finds its
//! queue pair by index, queue pairs with something to send stand in a queue, and deadlines in a
//! heap. Nothing is allocated after a queue pair has been created and connected.

use alloc::collections::VecDeque;
use core::net::SocketAddr;

use crate::cq::CqTable;
use crate::qp::{Context, Qp};
use crate::region::RegionTable;
use crate::rng::SplitMix64;
use crate::slab::{Layout, Slab};
use crate::time::Time;
use crate::verbs::{
    Access, Completion, CqId, MemoryRegion, PdId, Qpn, RecvWr, SendWr, Verbs, VerbsError,
};
use crate::wire::{Headers, Psn};
use crate::world::{Ecn, Path};

pub use crate::counters::{Counters, QpCounters};
use crate::deadlines::Deadlines;
pub use crate::qp::link::{Connect, Mtu, Transmit};
pub use crate::qp::{QpConfig, QpState, TimeoutReason};
pub use crate::sg::{Placement, Placements};

/// Bits of a queue pair number.
const QPN_BITS: u32 = 24;

/// Sizes and limits of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndpointConfig {
    /// Most queue pairs, up to 2^20.
    pub max_qps: u32,
    /// Most completion queues, up to 2^28.
    pub max_cqs: u32,
    /// Most memory regions, up to 2^28; the more, the shorter the unpredictable part of keys.
    pub max_regions: u32,
    /// Most entries of one completion queue.
    pub max_cqe: u32,
    /// Most work requests of one send or receive queue.
    pub max_qp_wr: u32,
    /// Most packets of one queue pair in a row while others wait, at least 1.
    pub burst_packets: u32,
    /// Source of keys, queue pair numbers and initial PSNs.
    pub seed: u64,
}

impl Default for EndpointConfig {
    fn default() -> EndpointConfig {
        EndpointConfig {
            max_qps: 1 << 12,
            max_cqs: 1 << 12,
            max_regions: 1 << 14,
            max_cqe: 1 << 20,
            max_qp_wr: 1 << 15,
            burst_packets: 32,
            seed: 0,
        }
    }
}

#[derive(Debug)]
struct QpEntry {
    qp: Qp,
    counters: Counters,
    /// Stands in the ready queue.
    is_ready: bool,
}

/// A software RDMA device with reliable-connection queue pairs.
///
/// # Order of calls
///
/// In: [`handle_packet`](Endpoint::handle_packet) for each packet that arrived,
/// [`handle_timeout`](Endpoint::handle_timeout) when [`poll_timeout`](Endpoint::poll_timeout) says
/// so, and the verbs ([`Verbs`]) whenever the program likes. Time never goes backwards from call to
/// call.
///
/// Out: after any of these, [`poll_transmit`](Endpoint::poll_transmit) until it returns `None`; then
/// `poll_timeout` for the next deadline, and [`poll_cq`](Verbs::poll_cq) for completions.
///
/// Two rules concern memory, as this type only handles addresses:
/// - the placements that `handle_packet` returns are filled before the next call, so that no
///   completion is seen before its data;
/// - a [`Transmit`] is turned into bytes, or at least its memory is borrowed, before the next call
///   that changes the endpoint other than `poll_transmit`: such a call may take the region away.
///
/// [`world::drain`](crate::world::drain) keeps this order.
#[derive(Debug)]
pub struct Endpoint {
    config: EndpointConfig,
    rng: SplitMix64,
    pds: u32,
    regions: RegionTable,
    cqs: CqTable,
    qps: Slab<QpEntry>,
    /// Slots of queue pairs that may have something to send.
    ready: VecDeque<u32>,
    /// What is left of the burst of the queue pair at the front of `ready`.
    burst_left: u32,
    deadlines: Deadlines,
    counters: Counters,
}

impl Endpoint {
    /// An endpoint without any objects.
    pub fn new(config: EndpointConfig) -> Endpoint {
        let config = EndpointConfig { burst_packets: config.burst_packets.max(1), ..config };
        let mut rng = SplitMix64::new(config.seed);
        let qps = Slab::new(Layout::new(config.max_qps, QPN_BITS), rng.next_u32());
        Endpoint {
            config,
            pds: 0,
            regions: RegionTable::new(config.max_regions, &mut rng),
            cqs: CqTable::new(config.max_cqs, &mut rng),
            qps,
            ready: VecDeque::new(),
            burst_left: config.burst_packets,
            deadlines: Deadlines::default(),
            counters: Counters::default(),
            rng,
        }
    }

    // ---- objects -------------------------------------------------------------------------------

    /// A new protection domain.
    pub fn alloc_pd(&mut self) -> PdId {
        let pd = PdId(self.pds);
        self.pds += 1;
        pd
    }

    fn check_pd(&self, pd: PdId) -> Result<(), VerbsError> {
        if pd.0 < self.pds { Ok(()) } else { Err(VerbsError::NoPd(pd.0)) }
    }

    /// A new completion queue for `depth` completions.
    pub fn create_cq(&mut self, depth: u32) -> Result<CqId, VerbsError> {
        within(depth, self.config.max_cqe, "completion queue entries")?;
        self.cqs.create(depth)
    }

    /// Removes a completion queue that no queue pair uses, with what is in it.
    pub fn destroy_cq(&mut self, cq: CqId) -> Result<(), VerbsError> {
        self.cqs.destroy(cq)
    }

    /// Whether completions were lost because the queue was full: it takes no more, and must be
    /// destroyed with its queue pairs. `None` if it does not exist.
    pub fn cq_overrun(&self, cq: CqId) -> Option<bool> {
        self.cqs.overrun(cq)
    }

    /// A new queue pair, in state RESET: receives may be posted, and it can be connected.
    pub fn create_qp(&mut self, config: QpConfig) -> Result<Qpn, VerbsError> {
        self.check_pd(config.pd)?;
        self.cqs.exists(config.send_cq)?;
        self.cqs.exists(config.recv_cq)?;
        within(config.max_send_wr, self.config.max_qp_wr, "send work requests")?;
        within(config.max_recv_wr, self.config.max_qp_wr, "receive work requests")?;
        let first_psn = Psn::new(self.rng.next_u32());
        let limit = self.qps.layout().limit;
        let made = self.qps.insert_with(|id, _| QpEntry {
            qp: Qp::new(Qpn::new(id), &config, first_psn, nowhere()),
            counters: Counters::default(),
            is_ready: false,
        });
        let id = made.ok_or(VerbsError::TableFull { what: "queue pairs", limit })?;
        self.cqs.attach(config.send_cq);
        self.cqs.attach(config.recv_cq);
        Ok(Qpn::new(id))
    }

    /// Removes a queue pair. Its outstanding work requests vanish without completions; completions
    /// already made can still be polled.
    pub fn destroy_qp(&mut self, qpn: Qpn) -> Result<(), VerbsError> {
        let slot = self.slot(qpn)?;
        let Some(entry) = self.qps.remove(qpn.get()) else {
            return Err(no_qp(qpn));
        };
        for cq in entry.qp.cqs() {
            self.cqs.detach(cq);
        }
        self.deadlines.set(slot, None);
        if entry.is_ready {
            self.ready.retain(|&ready| ready != slot);
            self.burst_left = self.config.burst_packets;
        }
        Ok(())
    }

    /// PSN of the first request that the queue pair will send: the peer's `remote_psn`.
    pub fn initial_psn(&self, qpn: Qpn) -> Result<Psn, VerbsError> {
        self.entry(qpn).map(|entry| entry.qp.first_psn())
    }

    /// Replaces the initial PSN that was drawn at creation. Only before the queue pair is connected.
    pub fn set_initial_psn(&mut self, qpn: Qpn, psn: Psn) -> Result<(), VerbsError> {
        let slot = self.slot(qpn)?;
        self.qps.at_mut(slot).ok_or(no_qp(qpn))?.qp.set_first_psn(psn)
    }

    /// Connects a queue pair: RESET to INIT, RTR and RTS in one step.
    pub fn connect(&mut self, qpn: Qpn, peer: &Connect) -> Result<(), VerbsError> {
        let slot = self.slot(qpn)?;
        self.qps.at_mut(slot).ok_or(no_qp(qpn))?.qp.connect(peer)
    }

    /// Moves a queue pair to the error state: its work requests complete as flushed.
    pub fn modify_to_error(&mut self, qpn: Qpn) -> Result<(), VerbsError> {
        self.on_qp(qpn, |qp, cx| {
            qp.fail(cx);
            Ok(())
        })
    }

    /// The state of a queue pair, if it exists.
    pub fn qp_state(&self, qpn: Qpn) -> Option<QpState> {
        self.entry(qpn).ok().map(|entry| entry.qp.state())
    }

    /// What happened on this endpoint, destroyed queue pairs included.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// What happened on one queue pair.
    pub fn qp_counters(&self, qpn: Qpn) -> Option<&QpCounters> {
        self.entry(qpn).ok().map(|entry| &entry.counters)
    }

    // ---- events --------------------------------------------------------------------------------

    /// A packet arrived, its ICRC is right. Returns where its payload goes, in order; nothing if it
    /// is not to be placed.
    #[must_use]
    pub fn handle_packet(
        &mut self,
        now: Time,
        source: SocketAddr,
        headers: &Headers,
        payload_len: usize,
    ) -> Placements {
        self.counters.packets_received += 1;
        let Some(slot) = self.qps.find(headers.bth().dest_qp.get()) else {
            self.counters.unknown_qp += 1;
            return Placements::new();
        };
        let mut pieces = Placements::new();
        self.with_qp(slot, now, &mut pieces, |qp, cx| {
            cx.own.packets_received += 1;
            qp.handle_packet(cx, source, headers, payload_len);
        });
        pieces
    }

    /// Carries out what is due at `now`.
    pub fn handle_timeout(&mut self, now: Time) {
        while let Some((at, slot)) = self.deadlines.earliest()
            && at <= now
        {
            let unused = &mut Placements::new();
            let handled = self.with_qp(slot, now, unused, |qp, cx| qp.handle_timeout(cx));
            if handled.is_none() {
                self.deadlines.set(slot, None);
            }
        }
    }

    /// When [`handle_timeout`](Endpoint::handle_timeout) has to be called next, and why.
    pub fn poll_timeout(&self) -> Option<(Time, TimeoutReason)> {
        let (_, slot) = self.deadlines.earliest()?;
        self.qps.at(slot)?.qp.deadline()
    }

    /// The next packet to send. Packets of a queue pair come in bursts, queue pairs take turns.
    pub fn poll_transmit(&mut self, now: Time) -> Option<Transmit> {
        let mut payload = Placements::new();
        while let Some(&slot) = self.ready.front() {
            let polled = self.poll_qp(slot, now, &mut payload, |qp, cx| qp.poll_transmit(cx));
            if let Some((path, headers)) = polled.flatten() {
                self.end_turn_if_due(slot);
                return Some(Transmit { path, headers, payload, pad: headers.bth().pad });
            }
            self.ready.pop_front();
            self.burst_left = self.config.burst_packets;
            if let Some(entry) = self.qps.at_mut(slot) {
                entry.is_ready = false;
            }
        }
        None
    }

    fn end_turn_if_due(&mut self, slot: u32) {
        self.burst_left -= 1;
        if self.burst_left > 0 {
            return;
        }
        self.burst_left = self.config.burst_packets;
        self.ready.rotate_left(1);
        if let Some(entry) = self.qps.at_mut(slot) {
            entry.qp.end_burst();
        }
    }

    // ---- plumbing ------------------------------------------------------------------------------

    fn slot(&self, qpn: Qpn) -> Result<u32, VerbsError> {
        self.qps.find(qpn.get()).ok_or(no_qp(qpn))
    }

    fn entry(&self, qpn: Qpn) -> Result<&QpEntry, VerbsError> {
        self.qps.get(qpn.get()).ok_or(no_qp(qpn))
    }

    /// A verb on a queue pair. Verbs carry no time: whatever they start is timed when it is sent.
    fn on_qp<T>(
        &mut self,
        qpn: Qpn,
        verb: impl FnOnce(&mut Qp, &mut Context<'_>) -> Result<T, VerbsError>,
    ) -> Result<T, VerbsError> {
        let slot = self.slot(qpn)?;
        let unused = &mut Placements::new();
        let done = self.with_qp(slot, Time::ZERO, unused, verb);
        done.unwrap_or(Err(no_qp(qpn)))
    }

    /// Lets a queue pair handle an event that may give it something to send.
    fn with_qp<T>(
        &mut self,
        slot: u32,
        now: Time,
        pieces: &mut Placements,
        event: impl FnOnce(&mut Qp, &mut Context<'_>) -> T,
    ) -> Option<T> {
        let done = self.poll_qp(slot, now, pieces, event)?;
        let entry = self.qps.at_mut(slot)?;
        if !entry.is_ready && entry.qp.wants_to_send() {
            entry.is_ready = true;
            self.ready.push_back(slot);
        }
        Some(done)
    }

    /// Runs `event`, then does what every event may call for: a full completion queue breaks the
    /// queue pair, and the deadline may have moved.
    fn poll_qp<T>(
        &mut self,
        slot: u32,
        now: Time,
        pieces: &mut Placements,
        event: impl FnOnce(&mut Qp, &mut Context<'_>) -> T,
    ) -> Option<T> {
        let entry = self.qps.at_mut(slot)?;
        let mut cx = Context {
            now,
            regions: &self.regions,
            cqs: &mut self.cqs,
            own: &mut entry.counters,
            all: &mut self.counters,
            pieces,
            cq_overflowed: false,
        };
        let done = event(&mut entry.qp, &mut cx);
        if cx.cq_overflowed {
            entry.qp.fail(&mut cx);
        }
        self.deadlines.set(slot, entry.qp.deadline().map(|(at, _)| at));
        Some(done)
    }
}

impl Verbs for Endpoint {
    fn register(
        &mut self,
        pd: PdId,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        self.check_pd(pd)?;
        self.regions.register(pd, addr, len, access)
    }

    fn deregister(&mut self, lkey: u32) -> Result<(), VerbsError> {
        self.regions.deregister(lkey)
    }

    fn post_send(&mut self, qpn: Qpn, wr: SendWr) -> Result<(), VerbsError> {
        self.on_qp(qpn, |qp, cx| qp.post_send(cx, wr))
    }

    fn post_recv(&mut self, qpn: Qpn, wr: RecvWr) -> Result<(), VerbsError> {
        self.on_qp(qpn, |qp, cx| qp.post_recv(cx, wr))
    }

    fn poll_cq(&mut self, cq: CqId) -> Option<Completion> {
        self.cqs.poll(cq)
    }
}

fn no_qp(qpn: Qpn) -> VerbsError {
    VerbsError::NoQp(qpn.get())
}

fn within(wanted: u32, limit: u32, what: &'static str) -> Result<(), VerbsError> {
    if wanted <= limit { Ok(()) } else { Err(VerbsError::TableFull { what, limit }) }
}

/// Where a queue pair that is not connected would send to.
fn nowhere() -> Connect {
    let remote = SocketAddr::from(([0, 0, 0, 0], 0));
    let path = Path { remote, dscp: 0, ecn: Ecn::NotEct };
    Connect::new(path, Qpn::new(0), Psn::default())
}
