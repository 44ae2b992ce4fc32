//! The fabric of an engine whose packets a verbs library moves.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use roce::congestion::CongestionControl;
use roce::device::Device;
use roce::endpoint::Reliability;
use roce::report::Pace;
use roce::verbs::{Access, CqId, MemoryRegion, PdId, Qpn};
use roce::world::Progress;
use roce::{Duration, Time};

use super::{LoadedDevice, Strays};
use crate::clock;
use crate::congestion::Choice;
use crate::fabric::{Fabric, Trouble};
use crate::neighbours::{Shared, Target, Unfinished};
use crate::pool::{Pool, PoolRange};
use crate::ready::ReadySet;

/// Notifications and events taken in one turn, which the engine's commands wait for.
const EVENTS_PER_TURN: usize = 256;

/// Sleep while completions are not announced, because a queue cannot be armed.
const UNARMED_SLEEP: Duration = Duration::from_millis(1);

/// A device behind a verbs library, with its memory.
#[derive(Debug)]
pub struct Loaded {
    device: LoadedDevice,
    memory: Pool,
    notifications: u64,
    /// Whether some completion queue could not be armed at the last try.
    is_unarmed: bool,
}

impl Loaded {
    /// A device and the memory that is registered with it.
    pub fn new(device: LoadedDevice, memory: Pool) -> Loaded {
        Loaded { device, memory, notifications: 0, is_unarmed: false }
    }
}

impl Fabric for Loaded {
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

    /// The library moves packets by itself: the turn only collects its notifications and runs the engine.
    fn turn(
        &mut self,
        _now: Time,
        work: impl FnOnce(&mut LoadedDevice, &mut Pool) -> bool,
    ) -> Progress {
        let mut received = 0;
        for _ in 0..EVENTS_PER_TURN {
            let Some(cq) = self.device.poll_notified() else { break };
            self.device.armed.remove(&cq);
            received += 1;
        }
        self.notifications += received as u64;
        // A queue pair that failed also flushes its work requests, and engines act on those completions.
        for _ in 0..EVENTS_PER_TURN {
            if self.device.poll_event().is_none() {
                break;
            }
        }
        let worked = work(&mut self.device, &mut self.memory);
        Progress { received, sent: 0, worked }
    }

    /// A device reaches neighbours as it does others.
    fn registered(&mut self, _pd: PdId, _region: &MemoryRegion, _access: Access) {}

    fn withdraw_region(&mut self, _rkey: u32) {}

    fn release(&mut self, range: PoolRange) {
        // The range came from this pool and is freed once, so this cannot be refused.
        let freed = self.memory.free(range);
        debug_assert!(freed.is_ok(), "{freed:?}");
    }

    fn connected(&mut self, _now: Time, _qpn: Qpn, _neighbour: Option<Arc<Target>>) {}

    fn withdraw_qp(&mut self, _qpn: Qpn) {}

    fn unfinished(&self) -> Unfinished {
        Unfinished::default()
    }

    fn boards(&self) -> Result<Arc<Shared>, String> {
        Err("a device of a library moves the data".to_owned())
    }

    fn next_wakeup(&self) -> Option<Time> {
        self.is_unarmed.then(|| clock::now() + UNARMED_SLEEP)
    }

    fn watch(&self, watched: &ReadySet) -> io::Result<()> {
        self.device.fds().into_iter().try_for_each(|fd| watched.add(fd, 0))
    }

    /// Arms the completion queues that are not armed. Earlier completions are not announced, so a turn
    /// follows, as it does when arming begins to fail: the sleep after it is short.
    fn prepare_sleep(&mut self) -> bool {
        let not_armed = |cq: &CqId| !self.device.armed.contains(cq);
        let queues: Vec<_> = self.device.queues().filter(not_armed).collect();
        let was_unarmed = std::mem::take(&mut self.is_unarmed);
        let mut has_armed = false;
        for &cq in &queues {
            match self.device.req_notify(cq, false) {
                Ok(()) => has_armed |= self.device.armed.insert(cq),
                Err(error) => {
                    self.is_unarmed = true;
                    self.device.note_degraded("ibv_req_notify_cq", error);
                }
            }
        }
        !has_armed && (was_unarmed || !self.is_unarmed)
    }

    fn woken(&mut self) {}

    /// The device announces everything by its completion channel.
    fn has_work(&mut self) -> bool {
        false
    }

    fn poll_trouble(&mut self) -> Option<Trouble> {
        self.device.troubles.pop_front()
    }

    fn largest_mtu(&self) -> u32 {
        self.device.largest_mtu
    }

    fn local(&self) -> SocketAddr {
        self.device.local()
    }

    fn reliability(&self) -> Reliability {
        Reliability::GoBackN
    }

    /// The library does not tell.
    fn pace(&self, _qpn: Qpn) -> Option<Pace> {
        None
    }

    fn counters(&self, tell: &mut dyn FnMut(&str, u64)) {
        let Strays { late_completions, completions, notifications, events } = self.device.strays;
        tell("device.notifications", self.notifications);
        tell("device.late_completions", late_completions);
        tell("device.unknown.completions", completions);
        tell("device.unknown.notifications", notifications);
        tell("device.unknown.events", events);
    }

    fn notes(&self) -> Vec<String> {
        let addresses: Vec<_> = self.device.addresses().map(|ip| ip.to_string()).collect();
        vec![format!("device: {} at {}", self.device.name, addresses.join(", "))]
    }
}
