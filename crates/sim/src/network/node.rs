//! One machine: an endpoint, its memory, and its end of the network.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::net::IpAddr;

use roce::Time;
use roce::direct::RegionDescriptor;
use roce::endpoint::{Endpoint, EndpointConfig};
use roce::verbs::{Access, Completion, CqId, MemoryRegion, PdId, VerbsError};
use roce::wire::ROCE_PORT;
use roce::world::Path;

use super::segment::{ControlSegment, Mailbox};
use crate::memory::NodeMemory;
use crate::packet::Packet;
use crate::port::Port;
use crate::pressure::BackPressure;

/// One machine.
#[derive(Debug)]
pub struct Node<M> {
    /// The transport.
    pub endpoint: Endpoint,
    /// Its memory.
    pub memory: M,
    /// The protection domain that its programs use.
    pub pd: PdId,
    pub(super) port: Port,
    /// When its endpoint runs next.
    pub(super) timer: Option<Time>,
    pub(super) is_dirty: bool,
    /// Its processor is stopped.
    pub(super) is_stopped: bool,
    /// Packets queued in front of it, where packets are handed over one by one.
    pub(super) held: VecDeque<Packet>,
    pub(super) is_touched: bool,
    /// Counters of its previous endpoints.
    pub(super) past: Tally,
    /// What its local peers see.
    pub(super) segment: ControlSegment,
    /// Messages and acknowledgements of its local peers.
    pub(super) mail: Mailbox,
}

/// Totals over all endpoints of a node.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    pub(super) sent: u64,
    pub(super) received: u64,
    pub(super) retransmitted: u64,
}

impl Tally {
    pub(super) fn of(endpoint: &Endpoint) -> Tally {
        let counters = endpoint.counters();
        Tally {
            sent: counters.packets_sent,
            received: counters.packets_received,
            retransmitted: counters.retransmitted_packets,
        }
    }
}

impl<M: NodeMemory> Node<M> {
    /// Registers memory with the endpoint, and with the memory's guard.
    ///
    /// # Errors
    /// As [`Endpoint::register_at`].
    pub fn register(
        &mut self,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        self.register_at(self.pd, addr, len, addr, access)
    }

    /// The same in any protection domain, for memory at `backing` that work requests and peers
    /// address from `addr` on.
    ///
    /// # Errors
    /// As [`Endpoint::register_at`].
    pub fn register_at(
        &mut self,
        pd: PdId,
        addr: u64,
        len: u64,
        backing: u64,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        let region = self.endpoint.register_at(pd, addr, len, backing, access)?;
        self.memory.registered(&MemoryRegion { addr: backing, ..region }, access);
        let descriptor =
            RegionDescriptor { rkey: region.rkey, pd, addr, len, backing, in_file: None, access };
        self.segment.publish(region.lkey, descriptor);
        Ok(region)
    }

    /// Deregisters a region.
    ///
    /// # Errors
    /// As [`Endpoint::deregister`].
    pub fn deregister(&mut self, lkey: u32) -> Result<(), VerbsError> {
        self.endpoint.deregister(lkey)?;
        self.segment.withdraw(lkey);
        self.memory.deregistered(lkey);
        Ok(())
    }

    /// Takes every completion from a queue.
    pub fn completions(&mut self, cq: CqId) -> Vec<Completion> {
        core::iter::from_fn(|| self.endpoint.poll_cq(cq)).collect()
    }

    /// Its address.
    pub fn ip(&self) -> IpAddr {
        self.port.addressing.ip(self.port.node)
    }

    /// The path to this node.
    pub fn path(&self) -> Path {
        Path::new((self.ip(), ROCE_PORT).into())
    }

    /// Packets sent, received, and retransmitted, by this and earlier endpoints of the node.
    pub fn packets(&self) -> [u64; 3] {
        let now = Tally::of(&self.endpoint);
        let Tally { sent, received, retransmitted } = self.past;
        [now.sent + sent, now.received + received, now.retransmitted + retransmitted]
    }

    /// Packets refused although no fault or forger had touched them: always a bug.
    pub fn refused_intact(&self) -> u64 {
        self.port.refused_intact
    }

    fn pressure(&self) -> Option<&BackPressure> {
        self.port.brakes.as_ref()?.pressure.as_ref()
    }

    /// Packets sent although their destination had not admitted them: always a bug.
    pub fn unadmitted(&self) -> u64 {
        self.pressure().map_or(0, |pressure| pressure.unadmitted)
    }

    /// How often it came to rest with packets for a destination that did not refuse them: always a
    /// bug.
    pub fn neglected(&self) -> u64 {
        self.pressure().map_or(0, |pressure| pressure.neglected)
    }

    /// Damaged packets accepted because the ICRC does not cover the damage.
    pub fn harmless_damage(&self) -> u64 {
        self.port.harmless
    }

    /// Flips a bit in every n-th payload after the ICRC was checked, to test that it is noticed.
    pub fn corrupt_every(&mut self, n: u64) {
        self.port.corrupt_every = n;
    }
}

pub(super) fn new_node<M>(config: EndpointConfig, memory: M, port: Port, seed: u64) -> Node<M> {
    let mut endpoint = Endpoint::new(EndpointConfig { seed, ..config });
    let pd = endpoint.alloc_pd();
    Node {
        endpoint,
        memory,
        pd,
        port,
        timer: None,
        is_dirty: false,
        is_stopped: false,
        held: VecDeque::new(),
        is_touched: false,
        past: Tally::default(),
        segment: ControlSegment::default(),
        mail: Mailbox::default(),
    }
}
