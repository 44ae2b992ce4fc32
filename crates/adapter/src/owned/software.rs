//! Our own endpoint on sockets of its own, moved by its owner's turns.
//!
//! Nothing here blocks; discovering a local peer does, and is done on other threads
//! ([`Adapter::discovery`]). Memory that local peers may still write is given back to the pool when
//! they have finished.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use nic::fault::LossyWire;
use nic::local_peers::{LocalPeers, OWN_PORT, Shared, Unfinished};
use nic::pool::{Pool, PoolError, PoolRange};
use nic::ready::ReadySet;
use nic::udp::{SocketWire, UdpConfig, UdpWire};
use roce::congestion::Follows;
use roce::direct::Holding;
use roce::endpoint::{Endpoint, EndpointConfig, Reliability};
use roce::report::QpProgress;
use roce::verbs::Qpn;
use roce::world::{self, Progress, Wire};
use roce::{Duration, Time};

use super::{Adapter, OpenError, Trouble};
use crate::software::{LocalPath, LocalPeer, SoftwareDevice};

/// Environment variable that chooses the path: `udp` for packets, `auto`, the default, for shared
/// memory where it is possible.
pub const PATH: &str = "DQUANT_PATH";

/// Why this process uses packets, as its environment tells; `None` if it does not.
pub fn refused_by_environment() -> Option<String> {
    match std::env::var(PATH).ok().as_deref() {
        Some("auto") | None => None,
        Some("udp") => Some(format!("{PATH}=udp")),
        Some(other) => Some(format!("{PATH}={other} is neither auto nor udp")),
    }
}

/// Our own endpoint on sockets of its own.
#[derive(Debug)]
pub struct Software<W = UdpWire> {
    // Fields are dropped in this order: local peers stop before the memory goes, and whoever binds
    // the wire's port next finds the name of its control segment free.
    device: SoftwareDevice,
    memory: Pool,
    /// Memory that is free when these accesses are over. Each range is one of the pool's.
    leaving: Vec<(Unfinished, PoolRange)>,
    wire: LossyWire<W>,
    /// Whether it was reported that the wire carries nothing any more.
    is_gone: bool,
}

impl Software {
    /// A device at this address, with `memory` bytes to register. It drops `loss_ppm` of a million
    /// packets that it receives; keys, queue pair numbers and losses come from the seed.
    ///
    /// # Errors
    /// When the address cannot be bound, or the memory cannot be allocated.
    pub fn bind(
        local: SocketAddr,
        memory: u64,
        loss_ppm: u32,
        seed: u64,
    ) -> Result<Software, OpenError> {
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
        let own = vec![wire.local().ip()];
        let no_local = Err("not wanted".to_owned());
        let device = SoftwareDevice::new(endpoint, own, no_local, Holding::Relaxed);
        let wire = LossyWire::new(wire, loss_ppm, seed);
        Ok(Software { device, memory, leaving: Vec::new(), wire, is_gone: false })
    }

    /// Reaches local peers through shared memory from now on, unless there is a reason against it.
    /// Call it before anything is registered.
    pub fn open_same_host(&mut self, refused: Option<String>) {
        let opened = refused.map_or_else(|| open_local(self.local(), &self.memory), Err);
        *self.device.local_mut() = opened;
    }

    /// Gives memory back that local peers have finished with.
    fn reclaim(&mut self) {
        self.leaving.retain_mut(|(unfinished, range)| {
            let is_over = unfinished.is_over();
            if is_over {
                free(&mut self.memory, *range);
            }
            !is_over
        });
    }
}

/// The path to local peers of a device at this address, who may map its memory.
fn open_local(own: SocketAddr, memory: &Pool) -> LocalPath {
    let opened = LocalPeers::open(own.port(), OWN_PORT, &[own.ip()]);
    let opened = opened.map_err(|error| format!("no control segment for local peers: {error}"))?;
    opened.offer_pool(memory);
    Ok(opened)
}

fn free(pool: &mut Pool, range: PoolRange) {
    // The range came from this pool and is freed once, so this cannot be refused.
    let freed = pool.free(range);
    debug_assert!(freed.is_ok(), "{freed:?}");
}

impl<W: SocketWire> Adapter for Software<W> {
    type Device = SoftwareDevice;

    fn device(&mut self) -> &mut SoftwareDevice {
        &mut self.device
    }

    fn memory(&self) -> &Pool {
        &self.memory
    }

    fn memory_mut(&mut self) -> &mut Pool {
        &mut self.memory
    }

    fn turn(
        &mut self,
        now: Time,
        work: impl FnOnce(&mut SoftwareDevice, &mut Pool) -> bool,
    ) -> Progress {
        self.reclaim();
        let Software { device, wire, memory, .. } = self;
        let messages = device.exchange_messages(wire, memory, now);
        let received = messages + device.receive(wire, memory, now);
        device.withdraw_failed();
        let worked = work(device, memory) | device.carry_out_held(now).worked;
        device.wake_for_messages(wire);
        let sent = device.send(wire, memory, now);
        Progress { received, sent, worked }
    }

    fn release(&mut self, range: PoolRange) {
        let mut unfinished = self.unfinished();
        if unfinished.is_over() {
            free(&mut self.memory, range);
        } else {
            self.leaving.push((unfinished, range));
        }
    }

    fn route(&mut self, now: Time, qpn: Qpn, peer: LocalPeer) {
        self.device.route(now, qpn, peer);
    }

    fn unfinished(&self) -> Unfinished {
        self.device.unfinished()
    }

    fn discovery(&self) -> Result<Arc<Shared>, String> {
        self.device.discovery()
    }

    fn next_wakeup(&self) -> Option<Time> {
        world::next_wakeup(self.device.endpoint()).into_iter().chain(self.wire.next_wakeup()).min()
    }

    fn watch(&self, watched: &ReadySet) -> io::Result<()> {
        let sockets = self.wire.inner().sockets();
        sockets.into_iter().flatten().try_for_each(|fd| watched.add(fd, 0))
    }

    fn prepare_sleep(&mut self) -> bool {
        self.device.local_mut().as_mut().map_or(true, LocalPeers::fall_asleep)
    }

    fn woken(&mut self) {
        if let Ok(local) = self.device.local() {
            local.shared().wake_up();
        }
    }

    fn has_work(&mut self) -> bool {
        self.device.local_mut().as_mut().is_ok_and(LocalPeers::has_unannounced)
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

    fn progress(&self, qpn: Qpn) -> Option<QpProgress> {
        self.device.endpoint().progress(qpn)
    }

    fn counters(&self, tell: &mut dyn FnMut(&str, u64)) {
        for (name, value) in self.device.endpoint().counters().named() {
            tell(&format!("roce.{name}"), value);
        }
        window_sums(self.device.endpoint()).into_iter().for_each(|(name, value)| tell(name, value));
        self.wire.inner().counts(tell);
        tell("udp.injected_drops", self.wire.dropped());
        tell("neighbours.queue_pairs", self.device.local_queue_pairs() as u64);
        tell("neighbours.awaited_ranges", self.leaving.len() as u64);
        let fifos = self.device.fifo_counters().copied();
        for (name, value) in fifos.unwrap_or_default().named() {
            tell(&format!("neighbours.{name}"), value);
        }
    }

    fn notes(&self) -> Vec<String> {
        vec![self.wire.inner().to_string(), note(self.device.local())]
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

/// The path to local peers, for people to read.
fn note(local: &LocalPath) -> String {
    match local {
        Ok(_) => "same host: direct where both ends allow it".to_owned(),
        Err(why) => format!("same host: packets ({why})"),
    }
}
