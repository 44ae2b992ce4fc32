//! Failures of links and switches: which one a seed strikes, and what may go wrong because of it.

use super::conditions::{Failure, Target};
use super::side::{Mend, Turn};
use super::{Checked, Run, ensure};
use crate::link::Vertex;
use crate::network::Conduct;

impl Run {
    /// Something on the way from one node to another fails, for a while.
    pub(super) fn fail(&mut self, failure: Failure) {
        let Failure { target, nodes: [from, to], pick, span } = failure;
        let way = self.network.way(from, to, pick);
        // Without the cables of the nodes, which have failures of their own.
        let inner = way.get(1..way.len().saturating_sub(1)).unwrap_or(&[]);
        let place = (pick >> 32) as usize;
        let link = inner.get(place % inner.len().max(1)).copied();
        let mend = match (target, link) {
            (Target::Storm, _) => {
                self.network.set_storm(to, true);
                Mend::Storm(to)
            }
            (Target::Link, Some(link)) => {
                self.network.set_link(link, false);
                Mend::Link(link)
            }
            (Target::Rate(by), Some(link)) => {
                self.network.slow_down(link, by);
                Mend::Rate(link)
            }
            (Target::Switch, _) => {
                let switches = way.iter().filter_map(|&link| match self.network.ends(link) {
                    [Vertex::Switch(switch), _] => Some(switch),
                    _ => None,
                });
                let Some(switch) = switches.clone().nth(place % switches.count().max(1)) else {
                    return;
                };
                self.network.set_switch(switch, false);
                Mend::Switch(switch)
            }
            _ => return,
        };
        self.schedule(span.as_nanos(), Turn::Mend(mend));
        self.excuse_separated();
    }

    pub(super) fn mend(&mut self, mend: Mend) {
        match mend {
            Mend::Link(link) => self.network.set_link(link, true),
            Mend::Switch(switch) => self.network.set_switch(switch, true),
            Mend::Rate(link) => self.network.slow_down(link, 1),
            Mend::Storm(node) => self.network.set_storm(node, false),
        }
    }

    /// Connections whose nodes no way joins may fail. All others have another way, and have to find
    /// it in time.
    fn excuse_separated(&mut self) {
        for pair in 0..self.pairs.len() {
            let [a, b] = self.pairs[pair].nodes;
            if !self.network.is_connected(a, b) || !self.network.is_connected(b, a) {
                self.pairs[pair].is_excused = true;
            }
        }
    }

    /// What switches and senders on links must never do.
    pub(super) fn check_conduct(&self) -> Checked<()> {
        let Conduct { unexplained_drops, unexplained_loops, overruns, .. } = self.network.conduct();
        ensure!(unexplained_drops == 0, "a lossless switch dropped a packet though nothing failed");
        ensure!(unexplained_loops == 0, "a packet came to a switch twice though no route changed");
        ensure!(overruns == 0, "a packet was sent on a link without credit for it");
        Ok(())
    }
}
