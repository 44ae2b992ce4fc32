//! The owned face: an opened device that one thread drives, with its memory.
//!
//! [`Software`] is our own endpoint on sockets of its own ([`SocketWire`](nic::udp::SocketWire)):
//! it moves packets itself in each turn. [`Loaded`] is a device behind a verbs library, which moves
//! them by itself. Engines are written against [`Adapter`] and are the same for both.
//!
//! Sessions, streams and what their memory is for do not belong here.

mod loaded;
mod software;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use controls::CongestionControl;
use nic::loaded::LoadError;
pub use nic::loaded::Trouble;
use nic::local_peers::{Shared, Unfinished};
use nic::pool::{Pool, PoolError, PoolRange};
use nic::ready::ReadySet;
use nic::udp::UdpError;
use roce::Time;
use roce::device::Device;
use roce::endpoint::Reliability;
use roce::report::QpProgress;
use roce::verbs::Qpn;
use roce::world::Progress;

use crate::congestion::Choice;
use crate::software::LocalPeer;
pub use loaded::Loaded;
pub use software::{PATH, Software, refused_by_environment};

/// A device behind a library of the verbs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceChoice {
    /// The library: a path, or a name that is looked up as programs find their libraries.
    pub library: PathBuf,
    /// The device.
    pub name: String,
}

/// Why a device cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Registered memory.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The socket.
    #[error(transparent)]
    Udp(#[from] UdpError),
    /// The library of a device.
    #[error("{library}: {source}")]
    Load {
        /// The library, as it was named.
        library: String,
        /// What is wrong.
        source: LoadError,
    },
}

/// A device with its memory.
pub trait Adapter {
    /// The device.
    type Device: Device;

    /// The device, for verb calls between two turns.
    fn device(&mut self) -> &mut Self::Device;

    /// The memory that is registered with the device.
    fn memory(&self) -> &Pool;

    /// The registered memory, to allocate ranges from it.
    fn memory_mut(&mut self) -> &mut Pool;

    /// Receives packets, runs the engine's `work`, and sends. `work` returns whether it did
    /// anything.
    fn turn(
        &mut self,
        now: Time,
        work: impl FnOnce(&mut Self::Device, &mut Pool) -> bool,
    ) -> Progress;

    /// Frees a range of the memory, as soon as no local peer can be writing it.
    fn release(&mut self, range: PoolRange);

    /// A queue pair is connected: its WRITEs and READs go to this local peer, or as packets for
    /// this reason.
    fn route(&mut self, now: Time, qpn: Qpn, peer: LocalPeer);

    /// Accesses of local peers that may have begun before something was withdrawn.
    fn unfinished(&self) -> Unfinished;

    /// What another thread finds local peers with.
    ///
    /// # Errors
    /// Why this device has no path to them.
    fn discovery(&self) -> Result<Arc<Shared>, String>;

    /// When the next turn is due if no descriptor becomes readable before.
    fn next_wakeup(&self) -> Option<Time>;

    /// Adds the descriptors that are readable when there is something to do.
    ///
    /// # Errors
    /// When the kernel refuses to watch one.
    fn watch(&self, watched: &ReadySet) -> io::Result<()>;

    /// Called before a sleep. `false`: something may have arrived meanwhile, take another turn
    /// first.
    fn prepare_sleep(&mut self) -> bool;

    /// Called when a prepared sleep is over or did not begin.
    fn woken(&mut self);

    /// Whether there is work that a local peer should have announced ([`Application::has_work`]).
    ///
    /// [`Application::has_work`]: nic::driver::Application::has_work
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
    fn progress(&self, qpn: Qpn) -> Option<QpProgress>;

    /// Passes every counter and its name to `tell`.
    fn counters(&self, tell: &mut dyn FnMut(&str, u64));

    /// The paths chosen and why, for people to read.
    fn notes(&self) -> Vec<String>;
}
