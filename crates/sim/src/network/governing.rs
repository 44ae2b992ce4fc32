//! What an agent enforces: queues of ports by DSCP, rate limits and transmission
//! gates of hosts.

use roce::shaping::{Exchanges, Limiter, TransmissionGate};

use super::Network;
use crate::link::{Link, Vertex};
use crate::memory::NodeMemory;
use crate::queues::Queues;
use crate::rates::CellTable;

impl<M: NodeMemory> Network<M> {
    /// Gives the ports by which packets leave `from` for `to` queues by DSCP, from now on; what
    /// waits stays where it is. Marking is by the bytes of a queue. A pause from the other end
    /// concerns a queue, by the number that it has at this end; the reserves of the other end's
    /// shared buffer are those for the classes that links were configured with. Returns how many
    /// ports there are: none where `from` and `to` have no cable, or one with credits.
    pub fn set_queues(&mut self, from: Vertex, to: Vertex, queues: &Queues) -> usize {
        let is_it = |link: &&mut Link| (link.start, link.end) == (from, to);
        let links = self.links.iter_mut().filter(is_it);
        links.filter_map(|link| link.set_queues(*queues).then_some(())).count()
    }

    /// Limits what a node sends with this DSCP, or no longer.
    pub fn set_rate_limit(&mut self, node: u32, dscp: u8, limiter: Option<Limiter>) {
        self.set_limits(node, |table| table.set_limiter(dscp, limiter));
    }

    /// Gives what a node sends with this DSCP a gate, or takes it away.
    pub fn set_gate(&mut self, node: u32, dscp: u8, gate: Option<TransmissionGate>) {
        self.set_limits(node, |table| table.set_gate(dscp, gate));
    }

    /// How exchanges of a node with this DSCP have begun since it has had a gate.
    pub fn exchanges(&self, node: u32, dscp: u8) -> Exchanges {
        let brakes = self.nodes[node as usize].port.brakes.as_ref();
        let limits = brakes.and_then(|brakes| brakes.limits.as_ref());
        limits.map_or_else(Exchanges::default, |limits| limits.table.counted(dscp))
    }

    fn set_limits(&mut self, node: u32, set: impl FnOnce(&mut CellTable)) {
        let now = self.now;
        let entry = self.node_mut(node);
        let brakes = entry.port.brakes.get_or_insert_default();
        set(&mut brakes.limits.get_or_insert_default().table);
        // Whoever waits for what was set before queries what is set now.
        entry.endpoint.readmit(now);
    }
}
