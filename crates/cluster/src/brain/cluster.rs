//! What the brain is told about the cluster when it starts.

use parfait::site::{Ground, Site};
use parfait::spread::Ecmp;
use service::error::Error;
use topology::graph::Topology;

/// What the cluster consists of.
#[derive(Clone, Debug)]
pub struct Cluster {
    /// Hosts, switches and links.
    pub topology: Topology,
    /// The same as text, for clients.
    pub text: String,
    /// Slots of each host.
    pub slots: u32,
    /// Of each link's rate, in millionths, what may be reserved.
    pub reservable_ppm: u32,
    /// How equal paths count.
    pub ecmp: Ecmp,
}

impl Cluster {
    /// What the ledger stands on.
    ///
    /// # Errors
    /// When it has no hosts, no slots or no paths, or is too large.
    pub fn ground(&self) -> Result<Ground, Error> {
        let (topology, slots) = (self.topology.clone(), self.slots);
        let (ecmp, reservable_ppm) = (self.ecmp, self.reservable_ppm);
        let ground = Ground::new(Site { topology, slots, ecmp, reservable_ppm });
        ground.map_err(|error| Error::invalid(format!("the topology: {error}")))
    }
}
