//! The devices that the cells run on.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use nic::clock;
use nic::device::{DeviceConfig, DeviceWire};
use nic::loaded::{Library, LoadedDevice};
use nic::local_peers::LocalPeers;
use nic::pool::Pool;
use nic::roce_v1::{RESOLVE_LIMIT, RoceV1Wire};
use nic::udp::{UdpConfig, UdpWire};
use roce::endpoint::{Endpoint, EndpointConfig};
use roce::verbs::{MemoryRegion, Qpn, Transport};
use roce::wire::ROCE_PORT;
use roce::world::{self, Memory, Path, RxFrame, Staging, TxFrame, Wire};
use roce::{Duration, Time};
use sim::graph::Graph;
use sim::link::LinkConfig;
use sim::memory::{Arena, Guard, Touch};
use sim::network::{Network, NetworkConfig};

use super::rig::{BUFFER, Rig};
use super::veth::{Lab, address};

/// Memory of each side.
const MEMORY: u64 = 4 * BUFFER;

/// Allows every access: the cells test access checks of the device.
#[derive(Debug)]
pub(crate) struct AnyAccess;

impl Guard for AnyAccess {
    fn registered(&mut self, _region: &MemoryRegion, _access: roce::verbs::Access) {}

    fn deregistered(&mut self, _lkey: u32) {}

    fn check(&self, _addr: u64, _len: usize, _touch: Touch) {}
}

/// Two nodes on a simulated cable.
pub(crate) struct Simulated(Network<Arena<AnyAccess>>);

impl Simulated {
    pub(crate) fn new() -> Simulated {
        let link = LinkConfig::unlimited(Duration::from_micros(2));
        let config = NetworkConfig::new(Graph::cable(link), 8);
        Simulated(Network::new(&config, |_| Arena::with(vec![0; MEMORY as usize], AnyAccess)))
    }
}

impl Rig for Simulated {
    type Device = Endpoint;

    fn now(&self) -> Time {
        self.0.now()
    }

    fn device(&mut self, side: usize) -> &mut Endpoint {
        &mut self.0.node_mut(side as u32).endpoint
    }

    fn path(&self, side: usize) -> Path {
        self.0.path_to(side as u32)
    }

    fn alloc(&mut self, side: usize, bytes: u64) -> u64 {
        self.0.node_quietly(side as u32).memory.take(bytes).expect("room")
    }

    fn write(&mut self, side: usize, addr: u64, bytes: &[u8]) {
        self.0.node_quietly(side as u32).memory.poke(addr, bytes);
    }

    fn read(&mut self, side: usize, addr: u64, bytes: usize) -> Vec<u8> {
        self.0.node(side as u32).memory.peek(addr, bytes).to_vec()
    }

    fn step(&mut self) {
        let until = self.0.now() + Duration::from_micros(20);
        self.0.settle();
        self.0.run_until(until);
    }
}

struct Side<W> {
    endpoint: Endpoint,
    wire: W,
    pool: Pool,
    path: Path,
}

/// Two endpoints on real wires, both moved by this thread.
pub(crate) struct Wired<W>([Side<W>; 2]);

fn pool() -> Pool {
    Pool::new(MEMORY).expect("a small pool")
}

pub(crate) fn udp() -> Wired<UdpWire> {
    Wired([1, 2].map(|seed| {
        let local = SocketAddr::from(([127, 0, 0, 1], 0));
        let wire = UdpWire::bind(&UdpConfig::at(local)).expect("loopback");
        let path = Path::new(wire.local());
        let endpoint = Endpoint::new(EndpointConfig { seed, ..EndpointConfig::default() });
        Side { endpoint, wire, pool: pool(), path }
    }))
}

/// Two ends of one device, as of two processes: they share an address.
pub(crate) fn shared_device() -> Wired<DeviceWire> {
    let ip = IpAddr::V4(Ipv4Addr::new(127, 8, 30, 1));
    Wired([1, 2].map(|seed| {
        let lo = loopback();
        let wire = DeviceWire::open(&DeviceConfig::new(vec![ip], lo)).expect("loopback");
        let qpn_prefix = wire.slot();
        let config = EndpointConfig { qpn_prefix, seed, ..EndpointConfig::default() };
        let path = Path::new(SocketAddr::new(ip, ROCE_PORT));
        Side { endpoint: Endpoint::new(config), wire, pool: pool(), path }
    }))
}

/// The wire of one of two processes that exchange packets through shared memory.
pub(crate) struct Local {
    peers: LocalPeers,
    wire: DeviceWire,
}

/// Two processes of this machine, in one.
pub(crate) fn peers() -> Wired<Local> {
    let Wired(sides) = shared_device();
    let mut sides = sides.map(|Side { endpoint, wire, pool, path }| {
        let peers =
            LocalPeers::open(ROCE_PORT, wire.slot(), wire.addresses()).expect("shared memory");
        Side { endpoint, wire: Local { peers, wire }, pool, path }
    });
    for (own, other) in [(0, 1), (1, 0)] {
        let (remote, slot) = (sides[other].path.remote, sides[other].wire.wire.slot());
        let local = &mut sides[own].wire.peers;
        let target = local.shared().discover(remote, slot).expect("an exchange");
        assert!(target.has_fifo());
        // Any queue pair: packets go by address and slot.
        local.route(Qpn::new(1), Some(target));
    }
    Wired(sides)
}

impl Wire for Local {
    fn send(&mut self, now: Time, frames: &[TxFrame<'_>], memory: &dyn Memory) {
        self.peers.wire(&mut self.wire).send(now, frames, memory);
    }

    fn receive(&mut self, now: Time, sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
        self.peers.wire(&mut self.wire).receive(now, sink)
    }

    fn admits(
        &mut self,
        now: Time,
        path: &Path,
        dest: Qpn,
        service: Transport,
        packets: usize,
    ) -> usize {
        self.peers.wire(&mut self.wire).admits(now, path, dest, service, packets)
    }

    fn next_wakeup(&self) -> Option<Time> {
        // It looks at each full FIFO in each step.
        None
    }

    fn is_stalled(&mut self, path: &Path, dest: Qpn) -> bool {
        self.peers.wire(&mut self.wire).is_stalled(path, dest)
    }
}

impl<W: Wire> Rig for Wired<W> {
    type Device = Endpoint;

    fn now(&self) -> Time {
        clock::now()
    }

    fn device(&mut self, side: usize) -> &mut Endpoint {
        &mut self.0[side].endpoint
    }

    fn path(&self, side: usize) -> Path {
        self.0[side].path
    }

    fn alloc(&mut self, side: usize, bytes: u64) -> u64 {
        self.0[side].pool.alloc(bytes, 4096).expect("room").addr
    }

    fn write(&mut self, side: usize, addr: u64, bytes: &[u8]) {
        self.0[side].pool.bytes_mut(addr, bytes.len()).copy_from_slice(bytes);
    }

    fn read(&mut self, side: usize, addr: u64, bytes: usize) -> Vec<u8> {
        self.0[side].pool.bytes(addr, bytes).to_vec()
    }

    fn step(&mut self) {
        for side in &mut self.0 {
            world::turn(
                &mut side.endpoint,
                &mut side.wire,
                &mut side.pool,
                clock::now(),
                |_, _| false,
            );
        }
    }
}

/// Two machines on an Ethernet link.
pub(crate) fn roce_v1(lab: &Lab) -> Wired<RoceV1Wire> {
    Wired([0, 1].map(|side| {
        let wire = lab.on(side, || {
            let mut wire = RoceV1Wire::open(address(side, false)).expect("root");
            wire.resolve(address(1 - side, false), RESOLVE_LIMIT).expect("the peer answers");
            wire
        });
        let path = Path::new(wire.local());
        let endpoint = EndpointConfig { seed: side as u64 + 1, ..EndpointConfig::default() };
        Side { endpoint: Endpoint::new(endpoint), wire, pool: pool(), path }
    }))
}

/// Two instances of a library's device, which moves the packets itself.
pub(crate) struct Opened([(LoadedDevice, Pool); 2]);

pub(crate) fn loaded(library: &Library, name: &str) -> Opened {
    Opened([(); 2].map(|()| (LoadedDevice::open(library, name).expect("it opens"), pool())))
}

impl Rig for Opened {
    type Device = LoadedDevice;

    fn now(&self) -> Time {
        clock::now()
    }

    fn device(&mut self, side: usize) -> &mut LoadedDevice {
        &mut self.0[side].0
    }

    fn path(&self, side: usize) -> Path {
        Path::new(self.0[side].0.local())
    }

    fn alloc(&mut self, side: usize, bytes: u64) -> u64 {
        self.0[side].1.alloc(bytes, 4096).expect("room").addr
    }

    fn write(&mut self, side: usize, addr: u64, bytes: &[u8]) {
        self.0[side].1.bytes_mut(addr, bytes.len()).copy_from_slice(bytes);
    }

    fn read(&mut self, side: usize, addr: u64, bytes: usize) -> Vec<u8> {
        self.0[side].1.bytes(addr, bytes).to_vec()
    }

    /// Sleeps: the library's thread is to run.
    fn step(&mut self) {
        std::thread::sleep(std::time::Duration::from_micros(50));
    }
}

fn loopback() -> u32 {
    let all = nic::interfaces::interfaces().expect("a list");
    all.iter().find(|interface| interface.loopback).expect("loopback").index
}
