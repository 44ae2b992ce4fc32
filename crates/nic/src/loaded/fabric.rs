//! The fabric of an engine whose packets a verbs library moves.

use std::io;
use std::net::SocketAddr;

use roce::Time;
use roce::device::Device;
use roce::endpoint::Reliability;
use roce::verbs::CqId;
use roce::world::Progress;

use super::LoadedDevice;
use crate::fabric::Fabric;
use crate::pool::Pool;
use crate::ready::ReadySet;

/// A device behind a verbs library, with its memory.
#[derive(Debug)]
pub struct Loaded {
    device: LoadedDevice,
    memory: Pool,
    notifications: u64,
}

impl Loaded {
    /// A device and the memory that is registered with it.
    pub fn new(device: LoadedDevice, memory: Pool) -> Loaded {
        Loaded { device, memory, notifications: 0 }
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

    /// The library moves packets by itself: the turn only collects its notifications and runs the engine.
    fn turn(
        &mut self,
        _now: Time,
        work: impl FnOnce(&mut LoadedDevice, &mut Pool) -> bool,
    ) -> Progress {
        let mut received = 0;
        while let Some(cq) = self.device.poll_notified() {
            self.device.armed.remove(&cq);
            received += 1;
        }
        self.notifications += received as u64;
        // A queue pair that failed also flushes its work requests, and engines act on those completions.
        while self.device.poll_event().is_some() {}
        let worked = work(&mut self.device, &mut self.memory);
        Progress { received, sent: 0, worked }
    }

    fn next_wakeup(&self) -> Option<Time> {
        None
    }

    fn watch(&self, watched: &ReadySet) -> io::Result<()> {
        self.device.fds().into_iter().try_for_each(|fd| watched.add(fd, 0))
    }

    /// Arms the completion queues that are not armed. Earlier completions are not announced, so a turn
    /// follows.
    fn prepare_sleep(&mut self) -> bool {
        let not_armed = |cq: &CqId| !self.device.armed.contains(cq);
        let queues: Vec<_> = self.device.queues().filter(not_armed).collect();
        for &cq in &queues {
            if self.device.req_notify(cq, false).is_ok() {
                self.device.armed.insert(cq);
            }
        }
        queues.is_empty()
    }

    fn local(&self) -> SocketAddr {
        self.device.local()
    }

    fn reliability(&self) -> Reliability {
        Reliability::GoBackN
    }

    fn counters(&self, tell: &mut dyn FnMut(&str, u64)) {
        tell("device.notifications", self.notifications);
    }

    fn notes(&self) -> Vec<String> {
        let addresses: Vec<_> = self.device.addresses().map(|ip| ip.to_string()).collect();
        vec![format!("device: {} at {}", self.device.name, addresses.join(", "))]
    }
}
