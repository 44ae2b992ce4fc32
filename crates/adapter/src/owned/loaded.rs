//! A device behind a verbs library, which moves the packets.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use controls::CongestionControl;
use nic::loaded::{Library, LoadedDevice};
use nic::local_peers::{Shared, Unfinished};
use nic::pool::{Pool, PoolRange};
use nic::ready::ReadySet;
use roce::Time;
use roce::endpoint::Reliability;
use roce::report::QpProgress;
use roce::verbs::Qpn;
use roce::world::Progress;

use super::{Adapter, DeviceChoice, OpenError, Trouble};
use crate::congestion::Choice;
use crate::software::LocalPeer;

/// A device behind a verbs library, with its memory.
#[derive(Debug)]
pub struct Loaded {
    device: LoadedDevice,
    memory: Pool,
}

impl Loaded {
    /// The device of a library, with so many bytes to register.
    ///
    /// # Errors
    /// When there is none, or the memory cannot be allocated.
    pub fn open(choice: &DeviceChoice, memory: u64) -> Result<Loaded, OpenError> {
        let DeviceChoice { library, name } = choice;
        let device = Library::load(library).and_then(|found| LoadedDevice::open(&found, name));
        let refused = |source| OpenError::Load { library: library.display().to_string(), source };
        Ok(Loaded::new(device.map_err(refused)?, Pool::new(memory)?))
    }

    /// A device and the memory that is registered with it.
    pub fn new(device: LoadedDevice, memory: Pool) -> Loaded {
        Loaded { device, memory }
    }
}

impl Adapter for Loaded {
    type Device = LoadedDevice;

    fn device(&mut self) -> &mut LoadedDevice {
        &mut self.device
    }

    fn memory(&self) -> &Pool {
        &self.memory
    }

    fn memory_mut(&mut self) -> &mut Pool {
        &mut self.memory
    }

    /// The device controls congestion in its own way, and can be asked for no other.
    fn congestion(&self, choice: Choice, _peer: IpAddr, _is_ours: bool) -> CongestionControl {
        match choice {
            Choice::Auto => CongestionControl::Off,
            Choice::Always(control) => control,
        }
    }

    /// The turn only collects what the library reports, and runs the engine.
    fn turn(
        &mut self,
        _now: Time,
        work: impl FnOnce(&mut LoadedDevice, &mut Pool) -> bool,
    ) -> Progress {
        let received = self.device.collect();
        let worked = work(&mut self.device, &mut self.memory);
        Progress { received, sent: 0, worked }
    }

    fn release(&mut self, range: PoolRange) {
        // The range came from this pool and is freed once, so this cannot be refused.
        let freed = self.memory.free(range);
        debug_assert!(freed.is_ok(), "{freed:?}");
    }

    /// A device reaches local peers as it does others.
    fn route(&mut self, _now: Time, _qpn: Qpn, _peer: LocalPeer) {}

    fn unfinished(&self) -> Unfinished {
        Unfinished::default()
    }

    fn discovery(&self) -> Result<Arc<Shared>, String> {
        Err("a device of a library moves the data".to_owned())
    }

    fn next_wakeup(&self) -> Option<Time> {
        self.device.next_wakeup()
    }

    fn watch(&self, watched: &ReadySet) -> io::Result<()> {
        self.device.fds().into_iter().try_for_each(|fd| watched.add(fd, 0))
    }

    fn prepare_sleep(&mut self) -> bool {
        self.device.prepare_sleep()
    }

    fn woken(&mut self) {}

    /// The device announces everything by its completion channel.
    fn has_work(&mut self) -> bool {
        false
    }

    fn poll_trouble(&mut self) -> Option<Trouble> {
        self.device.poll_trouble()
    }

    fn largest_mtu(&self) -> u32 {
        self.device.largest_mtu()
    }

    fn local(&self) -> SocketAddr {
        self.device.local()
    }

    fn reliability(&self) -> Reliability {
        Reliability::GoBackN
    }

    /// The library does not tell.
    fn progress(&self, _qpn: Qpn) -> Option<QpProgress> {
        None
    }

    fn counters(&self, tell: &mut dyn FnMut(&str, u64)) {
        self.device.counters(tell);
    }

    fn notes(&self) -> Vec<String> {
        let addresses: Vec<_> = self.device.addresses().map(|ip| ip.to_string()).collect();
        vec![format!("device: {} at {}", self.device.name(), addresses.join(", "))]
    }
}
