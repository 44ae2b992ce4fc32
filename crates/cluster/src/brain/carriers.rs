//! Links without a carrier, as agents report them: what becomes an outage, and when.
//!
//! A link that an agent said is down, or none says any more, is an outage or the end of one after a
//! while. A link that no agent said is down is left to people.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use topology::graph::{LinkId, NodeId};

/// A carrier that changed is believed after so long.
const HOLD_DOWN: Duration = Duration::from_secs(2);

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Carriers {
    /// Links that agents said are down, and those who still say so.
    reported: BTreeMap<LinkId, BTreeSet<NodeId>>,
    /// Since when links differ from what is known.
    changed: BTreeMap<LinkId, Instant>,
}

impl Carriers {
    /// Carriers that agents saw go under another leader are back when agents no longer say that
    /// they are gone.
    pub(super) fn begin(&mut self, lost: impl Iterator<Item = LinkId>) {
        self.reported = lost.map(|link| (link, BTreeSet::new())).collect();
    }

    pub(super) fn clear(&mut self) {
        self.reported.clear();
        self.changed.clear();
    }

    /// An agent is gone, and its word with it.
    pub(super) fn forget(&mut self, node: NodeId) {
        for by in self.reported.values_mut() {
            by.remove(&node);
        }
    }

    /// A node's agent says which of its ports have no carrier. Returns the links that are not as
    /// they are known to be, and have been so for long enough; and whether they are down.
    pub(super) fn hear(
        &mut self,
        (node, ports): (NodeId, impl Iterator<Item = (u8, LinkId)>),
        down: &BTreeSet<u8>,
        known_down: &BTreeSet<LinkId>,
        now: Instant,
    ) -> Vec<(LinkId, bool)> {
        let mut over = Vec::new();
        for (port, link) in ports {
            if down.contains(&port) {
                self.reported.entry(link).or_default().insert(node);
            }
            let Some(by) = self.reported.get_mut(&link) else { continue };
            if !down.contains(&port) {
                by.remove(&node);
            }
            let is_down = !by.is_empty();
            if is_down == known_down.contains(&link) {
                self.changed.remove(&link);
                if !is_down {
                    self.reported.remove(&link);
                }
            } else if now - *self.changed.entry(link).or_insert(now) >= HOLD_DOWN {
                self.changed.remove(&link);
                over.push((link, is_down));
            }
        }
        over
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use topology::graph::{Capacity, End, Kind, Topology};

    /// A link between two nodes, and reports of both ends about it.
    struct World {
        carriers: Carriers,
        topology: Topology,
        link: LinkId,
        known: BTreeSet<LinkId>,
        begun: Instant,
    }

    impl World {
        fn new() -> World {
            let mut topology = Topology::new();
            let ends = ["a", "b"].map(|name| {
                let node = topology.add(Kind::Host, name, 1).expect("a node");
                End { node, port: 1 }
            });
            let link = topology.connect(ends[0], ends[1], Capacity::default()).expect("a link");
            let known = BTreeSet::new();
            World { carriers: Carriers::default(), topology, link, known, begun: Instant::now() }
        }

        /// What follows when an end reports at this time.
        fn hear(&mut self, end: usize, is_down: bool, ms: u64) -> Option<bool> {
            let node = self.topology.link(self.link).expect("it is there").ends[end];
            let down = is_down.then_some(node.port).into_iter().collect();
            let own = (node.node, [(node.port, self.link)].into_iter());
            let now = self.begun + Duration::from_millis(ms);
            let over = self.carriers.hear(own, &down, &self.known, now);
            over.first().map(|(_, is_down)| *is_down)
        }
    }

    #[test]
    fn a_link_is_down_after_the_hold_down_and_up_when_neither_end_says_otherwise() {
        let mut world = World::new();
        assert_eq!([0, 1_999].map(|ms| world.hear(0, true, ms)), [None, None]);
        assert_eq!(world.hear(0, true, 2_000), Some(true));
        world.known.insert(world.link);
        assert_eq!(world.hear(1, true, 2_100), None);
        assert_eq!([3_000, 6_000].map(|ms| world.hear(0, false, ms)), [None, None]);
        assert_eq!([7_000, 9_000].map(|ms| world.hear(1, false, ms)), [None, Some(false)]);
    }

    #[test]
    fn a_carrier_that_flaps_is_held_down_anew_and_what_people_took_down_stays() {
        let mut world = World::new();
        let reports = [(true, 0), (false, 1_000), (true, 1_500), (true, 3_000)];
        for (is_down, ms) in reports {
            assert_eq!(world.hear(0, is_down, ms), None);
        }
        assert_eq!(world.hear(0, true, 3_500), Some(true));
        let mut world = World::new();
        world.known.insert(world.link);
        assert_eq!([0, 9_000].map(|ms| world.hear(0, false, ms)), [None, None]);
    }

    #[test]
    fn the_word_of_an_agent_that_is_gone_counts_no_more() {
        let mut world = World::new();
        world.hear(0, true, 0);
        assert_eq!(world.hear(0, true, 2_000), Some(true));
        world.known.insert(world.link);
        let node = world.topology.link(world.link).expect("it is there").ends[0].node;
        world.carriers.forget(node);
        assert_eq!([3_000, 5_000].map(|ms| world.hear(1, false, ms)), [None, Some(false)]);
    }
}
