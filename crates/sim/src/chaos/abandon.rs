//! Queue pairs that are reset or destroyed with completions unpolled.
//!
//! The completions are discarded with the queue pair: a program may free the buffers of their work
//! requests, so none of them may be polled afterwards. The effects of the work requests are left
//! open, byte by byte; receives taken from a shared queue are available to others.

use alloc::format;
use core::mem;

use roce::endpoint::{QpAttr, QpState};

use super::side::{At, Nap};
use super::{Checked, Phase, Run, ensure};

impl Run {
    /// Whether programs end a working connection to start another one. Those of an unreliable one
    /// have to: unacknowledged WRITEs hold their targets until then.
    pub(super) fn may_retire(&self, at: At) -> bool {
        let is_faulty = matches!(self.phase, Phase::Faulty);
        let is_reliable = self.pairs[at.pair].params.is_reliable();
        !is_reliable || (is_faulty && self.scenario.habits.abandons > 0)
    }

    /// A program abandons its side, which is in the error state, with all unpolled completions.
    pub(super) fn abandon(&mut self, at: At) -> Checked<()> {
        let side = self.side_mut(at)?;
        side.is_abandoned = true;
        side.nap = Nap::Never;
        side.announced.clear();
        let (sends, receives) = (mem::take(&mut side.sends), mem::take(&mut side.receives));
        let (node, qpn, shares) = (side.node, side.qpn, side.shares);
        let cqs = [side.send_cq, side.recv_cq];
        sends.into_iter().try_for_each(|send| self.failed(at, send))?;
        receives.iter().for_each(|receive| self.leave_any(at, node, &receive.sges));
        if shares {
            self.adopt_pool(node);
        }
        if self.whims.per_mille(500) {
            let now = self.network.now();
            let endpoint = &mut self.network.node_mut(node).endpoint;
            let reset = endpoint.modify_qp(now, qpn, &QpAttr::to(QpState::Reset));
            reset.map_err(|error| format!("reset: {error}"))?;
            for cq in cqs {
                let left = endpoint.poll_cq(cq);
                ensure!(left.is_none(), "C2: a completion of a queue pair in RESET: {left:?}");
            }
        }
        Ok(())
    }

    /// Shared receives may hold parts of messages without a completion: packets out of order, or
    /// with a completion that was not polled before the receive was returned.
    pub(super) fn adopt_pool(&mut self, node: u32) {
        let receives = self.pools[node as usize].iter().flat_map(|pool| &pool.receives);
        let memory = &self.network.node(node).memory;
        for sge in receives.flat_map(|receive| &receive.sges) {
            self.spaces[node as usize].adopt(memory, sge.addr, sge.len as usize);
        }
    }
}
