//! Receives of a queue pair's own queue, or of one that a node's queue pairs share.
//!
//! A shared receive is completed by the queue pair that took it; until then it is unknown which
//! that will be, so shared ones are found by their number and not by their position. A queue pair
//! that ends leaves the receives it has not taken, and raises one event that it takes no more.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use roce::endpoint::{AsyncEvent, SrqConfig};
use roce::verbs::{Qpn, RecvWr};

use super::side::{At, Pool, PostedReceive};
use super::space::SINKS;
use super::{Checked, Phase, Run, ensure};

impl Run {
    /// The node's shared receive queue, if the seed gives it one.
    pub(super) fn new_pool(&mut self, node: u32) -> Checked<Option<Pool>> {
        let Some((depth, len)) = self.scenario.pools[node as usize] else {
            return Ok(None);
        };
        let limit = self.chance.below(u64::from(depth) + 1) as u32;
        let entry = self.network.node_mut(node);
        let config = SrqConfig { pd: entry.pd, max_wr: depth, limit };
        let srq = entry.endpoint.create_srq(config).map_err(|e| format!("create_srq: {e}"))?;
        Ok(Some(Pool { srq, depth, len, receives: Vec::new() }))
    }

    /// Posts shared receives: as many as fit while faults heal, else a random number.
    pub(super) fn refill(&mut self, node: u32, eagerness: u32) -> Checked<bool> {
        let is_healing = matches!(self.phase, Phase::Healing(_));
        let mut posted = false;
        while let Some(pool) = &self.pools[node as usize]
            && pool.receives.len() < pool.depth as usize
            && (is_healing || self.chance.per_mille(eagerness))
        {
            let (srq, len) = (pool.srq, pool.len);
            let space = &mut self.spaces[node as usize];
            let Some(sges) = space.take_list(SINKS, len, &mut self.chance) else {
                break;
            };
            let wr_id = self.fresh_id(true);
            let wr = RecvWr { wr_id, sges: sges.clone() };
            let endpoint = &mut self.network.node_mut(node).endpoint;
            endpoint.post_srq_recv(srq, wr).map_err(|error| format!("post_srq_recv: {error}"))?;
            if let Some(pool) = &mut self.pools[node as usize] {
                pool.receives.push(PostedReceive { wr_id, sges, capacity: len });
            }
            self.summary.receives += 1;
            posted = true;
        }
        Ok(posted)
    }

    /// The completed receive: the oldest of the side's own, or this shared one.
    pub(super) fn take_receive(&mut self, at: At, wr_id: u64) -> Checked<PostedReceive> {
        let side = self.side_mut(at)?;
        let none = || String::from("no receive was posted for it");
        if !side.shares {
            let receive = side.receives.pop_front().ok_or_else(none)?;
            let first = receive.wr_id;
            ensure!(first == wr_id, "{first:#x} should have completed first");
            return Ok(receive);
        }
        let node = side.node as usize;
        let pool = self.pools[node].as_mut().ok_or_else(none)?;
        let place = pool.receives.iter().position(|receive| receive.wr_id == wr_id);
        place.map(|place| pool.receives.swap_remove(place)).ok_or_else(none)
    }

    // ---- events --------------------------------------------------------------------------------

    /// Takes a node's asynchronous events.
    pub(super) fn collect_events(&mut self, node: u32) -> Checked<()> {
        while let Some(event) = self.network.node_quietly(node).endpoint.poll_event() {
            match event {
                AsyncEvent::LastWqeReached(qpn) => self.note_last_wqe(node, qpn)?,
                AsyncEvent::SendQueueDrained(qpn) => self.note_drained(node, qpn),
                AsyncEvent::QpFatal(_) | AsyncEvent::CqError(_) => {
                    return Err(format!("node {node}: {event:?}"));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn note_last_wqe(&mut self, node: u32, qpn: Qpn) -> Checked<()> {
        let sides = self.pairs.iter_mut().flat_map(|pair| pair.sides.iter_mut().flatten());
        let mut of_node = sides.filter(|side| side.node == node && !side.is_dead);
        let Some(side) = of_node.find(|side| side.qpn == qpn) else {
            return Ok(());
        };
        ensure!(side.shares, "{qpn:?} shares no receives, and said that it takes no more");
        ensure!(!side.last_wqe, "{qpn:?} said twice that it takes no more receives");
        side.last_wqe = true;
        Ok(())
    }
}
