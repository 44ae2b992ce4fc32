//! Programs that sleep: they poll until the queue is empty, do something else, arm their completion
//! queues and poll again only after a notification.
//!
//! Completions may arrive between the last poll and the arming. Then the arming itself has to
//! notify, if they have no notification yet, or the program sleeps for ever.

use alloc::format;
use alloc::vec::Vec;

use roce::verbs::{CqId, WcStatus};

use super::side::{At, Nap, Turn};
use super::{Checked, Run, ensure};

/// Longest time between the last poll and the arming.
const DAWDLE_NS: u64 = 20_000;

impl Run {
    pub(super) fn draw_nap(&mut self) -> Nap {
        let sleeps = self.scenario.habits.sleeps;
        if self.whims.per_mille(sleeps) { Nap::Awake { notified: false } } else { Nap::Never }
    }

    /// A program that has polled its queues is going to arm them.
    pub(super) fn lull(&mut self, at: At, epoch: u32) -> Checked<()> {
        if matches!(self.side(at)?.nap, Nap::Awake { .. }) {
            let after_ns = 1 + self.whims.below(DAWDLE_NS);
            self.schedule(after_ns, Turn::Arm { at, epoch });
        }
        Ok(())
    }

    /// Delivers a node's notifications to sleeping programs.
    pub(super) fn wake(&mut self, node: u32) {
        while let Some(cq) = self.network.node_quietly(node).endpoint.poll_notified() {
            let sides = self.pairs.iter_mut().flat_map(|pair| pair.sides.iter_mut().flatten());
            let mut its = sides.filter(|side| side.node == node && !side.is_dead);
            let found = its.find(|side| side.send_cq == cq || side.recv_cq == cq);
            let nap = found.map(|side| &mut side.nap);
            if let Some(Nap::Awake { notified } | Nap::Asleep { notified }) = nap {
                *notified = true;
            }
        }
    }

    /// Takes completions, unless the program sleeps or is about to.
    pub(super) fn collect_if_awake(&mut self, at: At) -> Checked<()> {
        match self.side(at).map(|side| side.nap) {
            Ok(Nap::Never) => self.collect_side(at),
            Ok(Nap::Asleep { notified: true }) => {
                self.side_mut(at)?.nap = Nap::Awake { notified: false };
                self.collect_side(at)?;
                self.lull(at, self.pairs[at.pair].epoch)
            }
            _ => Ok(()),
        }
    }

    /// Arms a side's queues. If that does not notify, nothing may be waiting in them.
    pub(super) fn arm(&mut self, at: At, epoch: u32) -> Checked<()> {
        let Ok(side) = self.side(at) else {
            return Ok(());
        };
        let is_gone = side.is_dead || side.is_abandoned || self.pairs[at.pair].epoch != epoch;
        if is_gone || !matches!(side.nap, Nap::Awake { .. }) {
            return Ok(());
        }
        for solicited_only in [true, false] {
            if solicited_only && !self.whims.per_mille(200) {
                continue;
            }
            let qpn = self.side(at)?.qpn;
            if self.request_notification(at, solicited_only)? {
                return self.collect_if_awake(at);
            }
            let mut found = Vec::new();
            for cq in self.queues(at)? {
                let endpoint = &mut self.network.node_quietly(self.side(at)?.node).endpoint;
                found.extend(core::iter::from_fn(|| endpoint.poll_cq(cq)));
            }
            let urgent = found
                .iter()
                .find(|done| !solicited_only || done.solicited || done.status != WcStatus::Success);
            ensure!(urgent.is_none(), "armed with this waiting, and not notified: {urgent:?}");
            self.check_completions(at, qpn, found)?;
        }
        Ok(())
    }

    /// Whether the request notifies at once.
    fn request_notification(&mut self, at: At, solicited_only: bool) -> Checked<bool> {
        let side = self.side_mut(at)?;
        let notified = matches!(side.nap, Nap::Awake { notified: true });
        side.nap = Nap::Asleep { notified };
        let node = self.side(at)?.node;
        for cq in self.queues(at)? {
            let armed = self.network.node_mut(node).endpoint.req_notify(cq, solicited_only);
            armed.map_err(|error| format!("req_notify: {error}"))?;
        }
        self.wake(node);
        Ok(self.side(at)?.nap == Nap::Asleep { notified: true })
    }

    fn queues(&self, at: At) -> Checked<Vec<CqId>> {
        let side = self.side(at)?;
        let both = side.send_cq != side.recv_cq;
        Ok([side.send_cq].into_iter().chain(both.then_some(side.recv_cq)).collect())
    }
}
