//! Two software devices that are local peers: packets go through FIFOs in shared memory, and this
//! thread takes the turns of both.
//!
//! A turn copies payload and calls no kernel. There are no sockets behind the FIFOs: what would go
//! there is a fault of the benchmark. The phase `idle` is a turn of a device with nothing to do,
//! which is what a program that polls does most.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use nic::local_peers::{Doorbell, LocalPeers};
use nic::pool::Pool;
use roce::device::Device;
use roce::direct::{Posted, RegionDescriptor};
use roce::endpoint::{Endpoint, EndpointConfig};
use roce::verbs::{Access, MemoryRegion, PdId, Qpn, SendWr, Transport};
use roce::world::{self, Memory, Path, RxFrame, TxFrame, Wire};
use roce::{Duration, Time};

use crate::load::{Pair, REGION_BYTES};
use crate::phases::{Phase, Tally};

/// Time between two turns: no timer of the protocol expires.
const STEP: Duration = Duration::from_micros(2);

/// The devices' slots, which are the high bits of their queue pair numbers.
const SLOTS: [u8; 2] = [7, 9];

/// In place of sockets.
struct NoSockets;

impl Doorbell for NoSockets {
    fn wake(&mut self, _path: &Path, _dest: Qpn) {}
}

impl Wire for NoSockets {
    fn send(&mut self, _now: Time, frames: &[TxFrame<'_>], _memory: &dyn Memory) {
        panic!("{} packets have no FIFO", frames.len());
    }

    fn receive(&mut self, _now: Time, _sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
        0
    }

    fn admits(&mut self, _: Time, _: &Path, _: Qpn, _: Transport, packets: usize) -> usize {
        packets
    }

    fn next_wakeup(&self) -> Option<Time> {
        None
    }

    fn is_stalled(&mut self, _path: &Path, _dest: Qpn) -> bool {
        false
    }
}

struct Side {
    endpoint: Endpoint,
    peers: LocalPeers,
    memory: Pool,
    base: u64,
}

impl Side {
    fn new(side: usize) -> Side {
        let (qpn_prefix, seed) = (SLOTS[side], side as u64 + 1);
        let endpoint =
            Endpoint::new(EndpointConfig { qpn_prefix, seed, ..EndpointConfig::default() });
        let addresses = [IpAddr::from(address(side))];
        let peers = LocalPeers::open(roce::wire::ROCE_PORT, SLOTS[side], &addresses).unwrap();
        let mut memory = Pool::new(REGION_BYTES).unwrap();
        let base = memory.alloc(REGION_BYTES, 4096).unwrap().addr;
        Side { endpoint, peers, memory, base }
    }

    fn exchange(&mut self, now: Time) -> usize {
        let Side { endpoint, peers, memory, .. } = self;
        peers.exchange_messages(endpoint, memory, &mut NoSockets, now)
    }

    fn turn(&mut self, now: Time) -> world::Progress {
        let Side { endpoint, peers, memory, .. } = self;
        world::turn(endpoint, &mut peers.wire(&mut NoSockets), memory, now, |_, _| false)
    }
}

/// Addresses of the process's own: their names in the kernel belong to the whole machine.
fn address(side: usize) -> Ipv4Addr {
    let [_, _, high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 78 + side as u8, high, low)
}

/// See the module's text.
pub(crate) struct Shared {
    sides: [Side; 2],
    now: Time,
    /// Requests go without packets where they can.
    is_direct: bool,
}

impl Shared {
    pub(crate) fn new(is_direct: bool) -> Shared {
        let mut sides = [0, 1].map(Side::new);
        for side in [0, 1] {
            let remote = SocketAddr::from((address(1 - side), roce::wire::ROCE_PORT));
            let target = sides[side].peers.shared().discover(remote, SLOTS[1 - side]).unwrap();
            assert!(target.has_fifo());
            sides[side].peers.route(Qpn::new(1), Some(target));
        }
        Shared { sides, now: Time::from_nanos(1_000_000_000), is_direct }
    }

    fn turn(&mut self, side: usize, phase: Phase, tally: &mut Tally) {
        self.now += STEP;
        let (side, now) = (&mut self.sides[side], self.now);
        // A program that polls takes messages first, and a whole turn where there are none.
        tally.run(phase, || side.exchange(now) > 0 || side.turn(now).is_idle());
    }
}

impl Pair for Shared {
    type Device = Endpoint;

    const COUNTS_PACKETS: bool = false;

    fn device(&mut self, side: usize) -> &mut Endpoint {
        &mut self.sides[side].endpoint
    }

    fn path(&self, side: usize) -> Path {
        Path::new(SocketAddr::from((address(side), roce::wire::ROCE_PORT)))
    }

    fn memory(&self, side: usize) -> u64 {
        self.sides[side].base
    }

    fn now(&self) -> Time {
        self.now
    }

    fn requester(&mut self, tally: &mut Tally) {
        self.turn(0, Phase::Requester, tally);
    }

    fn responder(&mut self, tally: &mut Tally) {
        self.turn(1, Phase::Responder, tally);
    }

    fn idle(&mut self, tally: &mut Tally) {
        self.turn(0, Phase::Idle, tally);
        tally.add(Phase::Idle, 1, "turn");
    }

    fn connected(&mut self, side: usize, qpn: Qpn, pd: PdId, region: &MemoryRegion) {
        if !self.is_direct {
            return;
        }
        let remote = SocketAddr::from((address(1 - side), roce::wire::ROCE_PORT));
        let own = &mut self.sides[side];
        let target = own.peers.shared().discover(remote, SLOTS[1 - side]).unwrap();
        own.peers.route(qpn, Some(target));
        let descriptor = own.endpoint.qp_descriptor(qpn, |_| Some(address(side).into())).unwrap();
        own.peers.publish_qp(&descriptor);
        let MemoryRegion { addr, len, rkey, .. } = *region;
        let access = Access::ALL;
        let descriptor =
            RegionDescriptor { rkey, pd, addr, len, backing: addr, in_file: None, access };
        own.peers.publish_region(&descriptor);
        own.peers.offer_pool(&own.memory);
    }

    fn post(&mut self, qpn: Qpn, wrs: &[SendWr]) {
        let (is_direct, now) = (self.is_direct, self.now);
        let Side { endpoint, peers, .. } = &mut self.sides[0];
        if !is_direct {
            return Device::post_send(endpoint, now, qpn, wrs).unwrap();
        }
        for wr in wrs {
            let posted = endpoint.post_send_direct(now, qpn, wr.clone(), peers).unwrap();
            assert!(matches!(posted, Posted::Done | Posted::HandedOver), "{posted:?}");
        }
        peers.wake_for_messages(endpoint, &mut NoSockets);
    }

    fn calls(&mut self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}
