//! What an engine runs on: a device, its registered memory, and whatever moves its packets.
//!
//! [`Software`] is our own endpoint on sockets of its own ([`SocketWire`]): it moves packets itself in each turn.
//! [`Loaded`](crate::loaded) is a device behind a verbs library, which moves them by itself. Engines are
//! written against [`Fabric`] and are the same for both.
//!
//! Sessions, streams and their memory do not belong here.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use roce::congestion::{CongestionControl, Follows};
use roce::device::Device;
use roce::endpoint::{Endpoint, EndpointConfig, Reliability};
use roce::report::Pace;
use roce::verbs::{Access, MemoryRegion, PdId, Qpn};
use roce::world::{self, Progress, Wire};
use roce::{Duration, Time};

use crate::congestion::Choice;
use crate::fault::LossyWire;
use crate::neighbours::{Shared, Target, Unfinished};
use crate::pool::{Pool, PoolError, PoolRange};
use crate::ready::ReadySet;
use crate::same_host::SameHost;
use crate::udp::{SocketWire, UdpConfig, UdpError, UdpWire};

/// What an operator should know about a device; each is reported once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// It serves less well than it should.
    Degraded(String),
    /// It can no longer be used: nothing posted to it completes.
    Gone(String),
}

/// A device with its memory.
pub trait Fabric {
    /// The device.
    type Device: Device;

    /// The device, for verb calls between two turns.
    fn device(&mut self) -> &mut Self::Device;

    /// The memory that is registered with the device.
    fn memory(&self) -> &Pool;

    /// The registered memory, to allocate ranges from it.
    fn memory_mut(&mut self) -> &mut Pool;

    /// Receives packets, runs the engine's `work`, and sends. `work` returns whether it did anything.
    fn turn(
        &mut self,
        now: Time,
        work: impl FnOnce(&mut Self::Device, &mut Pool) -> bool,
    ) -> Progress;

    /// Called when a region is registered, so that neighbours can use it.
    fn registered(&mut self, pd: PdId, region: &MemoryRegion, access: Access);

    /// Called before a region is deregistered. Its memory goes to [`release`](Fabric::release) afterwards.
    fn withdraw_region(&mut self, rkey: u32);

    /// Frees a range of the memory, as soon as no neighbour can be writing it.
    fn release(&mut self, range: PoolRange);

    /// Called when a queue pair is connected, with the neighbour at its other end if there is one.
    fn connected(&mut self, now: Time, qpn: Qpn, neighbour: Option<Arc<Target>>);

    /// Called before a queue pair is destroyed.
    fn withdraw_qp(&mut self, qpn: Qpn);

    /// Accesses of neighbours that may have begun before something was withdrawn.
    fn unfinished(&self) -> Unfinished;

    /// What another thread meets neighbours with.
    ///
    /// # Errors
    /// Why this device has no same-host path.
    fn boards(&self) -> Result<Arc<Shared>, String>;

    /// When the next turn is due if no descriptor becomes readable before.
    fn next_wakeup(&self) -> Option<Time>;

    /// Adds the descriptors that are readable when there is something to do.
    ///
    /// # Errors
    /// When the kernel refuses to watch one.
    fn watch(&self, watched: &ReadySet) -> io::Result<()>;

    /// Called before a sleep. `false`: something may have arrived meanwhile, take another turn first.
    fn prepare_sleep(&mut self) -> bool;

    /// Called when a prepared sleep is over or did not begin.
    fn woken(&mut self);

    /// Whether there is work that a neighbour should have announced ([`Application::has_work`]).
    ///
    /// [`Application::has_work`]: crate::driver::Application::has_work
    fn has_work(&mut self) -> bool;

    /// The next trouble of the device since the last call.
    fn poll_trouble(&mut self) -> Option<Trouble>;

    /// The address at which peers reach this device.
    fn local(&self) -> SocketAddr;

    /// The largest path MTU of its port, in payload bytes.
    fn largest_mtu(&self) -> u32;

    /// The best loss recovery that this device supports.
    fn reliability(&self) -> Reliability;

    /// What a choice of congestion control means on this device, towards this peer.
    fn congestion(&self, choice: Choice, peer: IpAddr, is_ours: bool) -> CongestionControl {
        choice.toward(peer, is_ours)
    }

    /// How far a reliable connection has come and what it may send now, where the device tells.
    fn pace(&self, qpn: Qpn) -> Option<Pace>;

    /// Passes every counter and its name to `tell`.
    fn counters(&self, tell: &mut dyn FnMut(&str, u64));

    /// The paths chosen and why, for people to read.
    fn notes(&self) -> Vec<String>;
}

/// Our own endpoint on sockets of its own.
#[derive(Debug)]
pub struct Software<W = UdpWire> {
    // Fields are dropped in this order: neighbours stop before the memory goes, and whoever binds the wire's port
    // next finds the name of its board free.
    same_host: SameHost,
    endpoint: Endpoint,
    memory: Pool,
    wire: LossyWire<W>,
    /// Whether it was reported that the wire carries nothing any more.
    is_gone: bool,
}

/// Why there is no software device.
#[derive(Debug, thiserror::Error)]
pub enum SoftwareError {
    /// Registered memory.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The socket.
    #[error(transparent)]
    Udp(#[from] UdpError),
}

impl Software {
    /// A device at this address, with `memory` bytes to register. It drops `loss_ppm` of a million packets
    /// that it receives; keys, queue pair numbers and losses come from the seed.
    ///
    /// # Errors
    /// When the address cannot be bound, or the memory cannot be allocated.
    pub fn bind(
        local: SocketAddr,
        memory: u64,
        loss_ppm: u32,
        seed: u64,
    ) -> Result<Software, SoftwareError> {
        let wire = UdpWire::bind(&UdpConfig::at(local))?;
        Ok(Software::on(wire, memory, loss_ppm, seed)?)
    }
}

impl<W: SocketWire> Software<W> {
    /// A device on this wire; the rest as for [`Software::bind`].
    ///
    /// # Errors
    /// When the memory cannot be allocated.
    pub fn on(wire: W, memory: u64, loss_ppm: u32, seed: u64) -> Result<Software<W>, PoolError> {
        let memory = Pool::new(memory)?;
        let endpoint = Endpoint::new(EndpointConfig { seed, ..EndpointConfig::default() });
        let local = wire.local();
        let same_host = SameHost::open(local, Some("not wanted".to_owned()), &memory);
        let wire = LossyWire::new(wire, loss_ppm, seed);
        Ok(Software { endpoint, wire, memory, same_host, is_gone: false })
    }

    /// Reaches neighbours without packets from now on, unless there is a reason against it. Call it before anything is
    /// registered.
    pub fn open_same_host(&mut self, refused: Option<String>) {
        self.same_host = SameHost::open(self.local(), refused, &self.memory);
    }
}

impl<W: SocketWire> Fabric for Software<W> {
    type Device = Endpoint;

    fn device(&mut self) -> &mut Endpoint {
        &mut self.endpoint
    }

    fn memory(&self) -> &Pool {
        &self.memory
    }

    fn memory_mut(&mut self) -> &mut Pool {
        &mut self.memory
    }

    fn turn(&mut self, now: Time, work: impl FnOnce(&mut Endpoint, &mut Pool) -> bool) -> Progress {
        let Software { endpoint, wire, memory, same_host, .. } = self;
        same_host.reclaim(memory);
        let received = same_host.receive(endpoint, wire, memory, now);
        same_host.withdraw_failed(endpoint);
        let worked = work(endpoint, memory) | same_host.carry_out(endpoint, now);
        let sent = same_host.send(endpoint, wire, memory, now);
        Progress { received, sent, worked }
    }

    fn registered(&mut self, pd: PdId, region: &MemoryRegion, access: Access) {
        self.same_host.publish(pd, region, access);
    }

    fn withdraw_region(&mut self, rkey: u32) {
        self.same_host.withdraw(rkey);
    }

    fn release(&mut self, range: PoolRange) {
        self.same_host.release(&mut self.memory, range);
    }

    fn connected(&mut self, now: Time, qpn: Qpn, neighbour: Option<Arc<Target>>) {
        self.same_host.connect(&mut self.endpoint, now, qpn, neighbour);
    }

    fn withdraw_qp(&mut self, qpn: Qpn) {
        self.same_host.disconnect(qpn);
    }

    fn unfinished(&self) -> Unfinished {
        self.same_host.unfinished()
    }

    fn boards(&self) -> Result<Arc<Shared>, String> {
        self.same_host.boards()
    }

    fn next_wakeup(&self) -> Option<Time> {
        world::next_wakeup(&self.endpoint).into_iter().chain(self.wire.next_wakeup()).min()
    }

    fn watch(&self, watched: &ReadySet) -> io::Result<()> {
        let sockets = self.wire.inner().sockets();
        sockets.into_iter().flatten().try_for_each(|fd| watched.add(fd, 0))
    }

    fn prepare_sleep(&mut self) -> bool {
        self.same_host.fall_asleep()
    }

    fn woken(&mut self) {
        self.same_host.wake_up();
    }

    fn has_work(&mut self) -> bool {
        self.same_host.has_work()
    }

    fn poll_trouble(&mut self) -> Option<Trouble> {
        let why = self.wire.inner().gone().filter(|_| !self.is_gone)?;
        self.is_gone = true;
        Some(Trouble::Gone(why.to_owned()))
    }

    fn largest_mtu(&self) -> u32 {
        self.wire.inner().payload_limit()
    }

    fn local(&self) -> SocketAddr {
        self.wire.inner().local()
    }

    fn reliability(&self) -> Reliability {
        Reliability::Selective
    }

    fn pace(&self, qpn: Qpn) -> Option<Pace> {
        self.endpoint.pace(qpn)
    }

    fn counters(&self, tell: &mut dyn FnMut(&str, u64)) {
        for (name, value) in self.endpoint.counters().named() {
            tell(&format!("roce.{name}"), value);
        }
        window_sums(&self.endpoint).into_iter().for_each(|(name, value)| tell(name, value));
        self.wire.inner().counts(tell);
        tell("udp.injected_drops", self.wire.dropped());
        self.same_host.counts(tell);
    }

    fn notes(&self) -> Vec<String> {
        vec![self.wire.inner().to_string(), self.same_host.note()]
    }
}

/// What congestion control by delay allows now, over all queue pairs.
fn window_sums(endpoint: &Endpoint) -> [(&'static str, u64); 4] {
    let (mut count, mut competing, mut window, mut longest) = (0, 0, 0, Duration::ZERO);
    for report in endpoint.windows() {
        count += 1;
        competing += u64::from(report.follows == Follows::Losses);
        window += report.window_millipackets / 1_000;
        longest = longest.max(report.queue());
    }
    [
        ("congestion.queue_pairs", count),
        ("congestion.competing", competing),
        ("congestion.window_packets", window),
        ("congestion.longest_queue_us", longest.as_nanos() / 1_000),
    ]
}
