//! What the operator decides about a manager.

use core::time::Duration;

use topology::routes::Engine;

/// The SM_Key of managers that were given none: that of opensm, which talks to no manager with
/// another.
pub const DEFAULT_SM_KEY: u64 = 1;

/// How it behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// The routing engine.
    pub engine: Engine,
    /// 0 to 15; the highest is the master.
    pub priority: u8,
    /// Between light sweeps.
    pub interval: Duration,
    /// Between polls of the master.
    pub poll: Duration,
    /// Polls without a response after which the master is taken for dead.
    pub misses: u32,
    /// Low bits of LIDs that end ports ignore.
    pub lmc: u8,
    /// The M_Key that requests carry.
    pub m_key: u64,
    /// Sets it on all ports, with M_KeyProtectBits and the seconds of the lease.
    pub guard: Option<(u8, u16)>,
    /// Of all managers of the subnet.
    pub sm_key: u64,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            engine: Engine::Balanced,
            priority: 0,
            interval: Duration::from_secs(10),
            poll: Duration::from_secs(1),
            misses: 3,
            lmc: 0,
            m_key: 0,
            guard: None,
            sm_key: DEFAULT_SM_KEY,
        }
    }
}
