//! What an agent enforces: queues of ports by DSCP, and paces of hosts.

use super::Fabric;
use crate::link::{Link, Vertex};
use crate::memory::NodeMemory;
use crate::queues::Queues;

impl<M: NodeMemory> Fabric<M> {
    /// Gives the ports by which packets leave `from` for `to` queues by DSCP, from now on; what waits stays where it is. Marking
    /// is by the bytes of a queue. A pause from the other end concerns a queue, by the number that it has at this end; the
    /// reserves of the other end's shared buffer are those for the classes that links were configured with. Returns how many ports there
    /// are: none where `from` and `to` have no cable, or one with credits.
    pub fn set_queues(&mut self, from: Vertex, to: Vertex, queues: &Queues) -> usize {
        let is_it = |link: &&mut Link| (link.start, link.end) == (from, to);
        let links = self.links.iter_mut().filter(is_it);
        links.filter_map(|link| link.set_queues(*queues).then_some(())).count()
    }

    /// Paces what a node sends with this DSCP to so many bits per second on the wire, with so many bytes at once; `None` for no
    /// pace any more.
    pub fn set_pace(&mut self, node: u32, dscp: u8, pace: Option<(u64, u64)>) {
        let now = self.now;
        let entry = self.node_mut(node);
        entry.port.brakes.get_or_insert_default().paces.set(now, dscp, pace);
        // Whoever waits for the old pace queries the new one.
        entry.endpoint.readmit(now);
    }
}
