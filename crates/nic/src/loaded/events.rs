//! What a library's device reports by itself, and what sleeps on it need: notifications, events,
//! counters. The library moves the packets.

use roce::device::Device;
use roce::verbs::CqId;
use roce::{Duration, Time};

use super::LoadedDevice;
use super::reports::{Trouble, Unknown};
use crate::clock;

/// Notifications and events taken in one turn, which the engine's commands wait for.
const EVENTS_PER_TURN: usize = 256;

/// Sleep while completions are not announced, because a queue cannot be armed.
const UNARMED_SLEEP: Duration = Duration::from_millis(1);

impl LoadedDevice {
    /// Takes what the library reports, up to a bound; returns the number of notifications.
    pub fn collect(&mut self) -> usize {
        let mut received = 0;
        for _ in 0..EVENTS_PER_TURN {
            let Some(cq) = self.poll_notified() else { break };
            self.wakeups.armed.remove(&cq);
            received += 1;
        }
        self.wakeups.count += received as u64;
        // A queue pair that failed also flushes its work requests, and engines act on those
        // completions.
        for _ in 0..EVENTS_PER_TURN {
            if self.poll_event().is_none() {
                break;
            }
        }
        received
    }

    /// Arms the completion queues that are not armed. Earlier completions are not announced, so a
    /// turn follows (`false`), as it does when arming begins to fail: the sleep after it is short.
    pub fn prepare_sleep(&mut self) -> bool {
        let not_armed = |cq: &CqId| !self.wakeups.armed.contains(cq);
        let queues: Vec<_> = self.objects.queues().filter(not_armed).collect();
        let was_unarmed = std::mem::take(&mut self.wakeups.is_unarmed);
        let mut has_armed = false;
        for &cq in &queues {
            match self.req_notify(cq, false) {
                Ok(()) => has_armed |= self.wakeups.armed.insert(cq),
                Err(error) => {
                    self.wakeups.is_unarmed = true;
                    self.reports.degraded(&self.context.name, "ibv_req_notify_cq", error);
                }
            }
        }
        !has_armed && (was_unarmed || !self.wakeups.is_unarmed)
    }

    /// When to look again if no descriptor becomes readable before.
    pub fn next_wakeup(&self) -> Option<Time> {
        self.wakeups.is_unarmed.then(|| clock::now() + UNARMED_SLEEP)
    }

    /// The next trouble since the last call.
    pub fn poll_trouble(&mut self) -> Option<Trouble> {
        self.reports.troubles.pop_front()
    }

    /// The largest path MTU of the port, in payload bytes.
    pub fn largest_mtu(&self) -> u32 {
        self.port.largest_mtu
    }

    /// Its name in the library.
    pub fn name(&self) -> &str {
        &self.context.name
    }

    /// Passes every counter and its name to `tell`.
    pub fn counters(&self, tell: &mut dyn FnMut(&str, u64)) {
        let Unknown { late_completions, completions, notifications, events } = self.reports.unknown;
        tell("device.notifications", self.wakeups.count);
        tell("device.late_completions", late_completions);
        tell("device.unknown.completions", completions);
        tell("device.unknown.notifications", notifications);
        tell("device.unknown.events", events);
    }
}
