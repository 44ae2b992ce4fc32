//! What a ledger stands on: a network, and where it can be made anew, what it is made from.
//!
//! A [`Site`] is a topology with its slots, its routing and the share of links that may be
//! reserved. It gives the network of any [`Outage`] with the same numbers of hosts and links.

use alloc::sync::Arc;

use topology::graph::Topology;

use crate::network::{Network, NetworkError, Routing};
use crate::outage::Outage;
use crate::spread::Ecmp;

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Site {
    /// Hosts, switches and links.
    pub topology: Topology,
    /// Slots of each host.
    pub slots: u32,
    /// How equal paths count.
    pub ecmp: Ecmp,
    /// Of each link's rate, in millionths, what may be reserved.
    pub reservable_ppm: u32,
}

impl Site {
    /// The network with something down.
    ///
    /// # Errors
    /// As of [`Network::with_outage`].
    pub fn network(&self, outage: &Outage) -> Result<Network, NetworkError> {
        let share = u128::from(self.reservable_ppm);
        let routing = Routing::Ecmp(self.ecmp);
        Network::with_outage(
            &self.topology,
            self.slots,
            routing,
            |_, link| (u128::from(link.capacity.rate_bps) * share / 1_000_000) as u64,
            outage,
        )
    }
}

/// A network, and its site if there is one: without it, what is down is not known.
#[derive(Clone, Debug)]
pub struct Ground {
    /// With nothing down.
    pub network: Network,
    /// What it is made from.
    pub site: Option<Arc<Site>>,
}

impl Ground {
    /// That of a site.
    ///
    /// # Errors
    /// As of [`Network::new`].
    pub fn new(site: Site) -> Result<Ground, NetworkError> {
        Ok(Ground { network: site.network(&Outage::none())?, site: Some(Arc::new(site)) })
    }
}

impl From<Network> for Ground {
    fn from(network: Network) -> Ground {
        Ground { network, site: None }
    }
}
