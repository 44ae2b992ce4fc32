//! Brains as the daemon runs them, over a store, without a network and without agents. A brain is
//! killed by dropping it with all it waits for, at any instant.

use std::sync::Arc;
use std::time::Duration;

use cluster::brain::{Cluster, Core, Parts};
use cluster::store::{Candidate, Store};
use parfait::brain::{Config, Denial, Request};
use parfait::demand::Abstraction;
use parfait::log::Outcome;
use tokio::task::AbortHandle;

use crate::scratch::keys;

/// An answer to a client.
pub(crate) type Answer = Result<Outcome, Denial>;

/// A brain that runs.
#[derive(Clone)]
pub(crate) struct Running {
    core: Core,
    task: AbortHandle,
}

impl Running {
    /// Starts a brain with that number.
    pub(crate) fn start<S: Store>(store: S, cluster: Cluster, number: u64) -> Running {
        let machine = Config {
            holder: number,
            lease_ns: 1_000_000_000,
            claim_every_ns: 250_000_000,
            // Nobody answers commands.
            resend_ns: u64::MAX / 4,
            storage_timeout_ns: 4_000_000_000,
            snapshot_bytes: 64 << 10,
            abstraction: Abstraction::Parfait,
            iterations: 4,
        };
        let (core, actor) = Core::new(Parts {
            machine,
            ground: cluster.ground().expect("connected"),
            cluster,
            switches: Vec::new(),
            store: Arc::new(store),
            candidate: Candidate { number, address: format!("[::1]:{number}") },
            store_name: "a test".to_owned(),
            plan_key: keys().plan,
        });
        Running { core, task: tokio::spawn(actor).abort_handle() }
    }

    /// As `kill -9`.
    pub(crate) fn kill(&self) {
        self.task.abort();
    }

    pub(crate) fn is_leading(&self) -> bool {
        self.core.is_leading()
    }

    /// Asks and waits; `None` when no answer comes in time.
    pub(crate) async fn ask(&self, request: Request, wait: Duration) -> Option<Answer> {
        tokio::time::timeout(wait, self.core.ask(request)).await.ok()?
    }
}
