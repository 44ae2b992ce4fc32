//! The same-host path of a software device that one thread drives: which of its queue pairs reach a neighbour, what it
//! publishes for those that reach it, and the wire that its packets to and from them take.
//!
//! [`neighbours`](crate::neighbours) does the work. Sends of a queue pair with a neighbour wait in the endpoint until
//! the driver's turn ([`SameHost::carry_out`]), which copies a bounded number of bytes: other clients of the thread
//! wait meanwhile. Nothing here blocks. Memory that neighbours may still write is given back when they have finished
//! ([`SameHost::reclaim`]); getting to know a neighbour does block and is done on other threads, with
//! [`Shared::meet`].

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use roce::Time;
use roce::direct::{Backlog, Direct, DirectKind, Holding, MAX_DIRECT_BYTES, RegionCard};
use roce::endpoint::Endpoint;
use roce::verbs::{Access, MemoryRegion, Path, PdId, Qpn};
use roce::world;

use crate::fault::LossyWire;
use crate::neighbours::{Doorbell, FifoCounters, Neighbours, OWN_PORT, Shared, Target, Unfinished};
use crate::pool::{Pool, PoolRange};
use crate::udp::SocketWire;

/// Environment variable that chooses the path: `udp` for packets, `auto`, the default, for the same-host path where it
/// is possible.
pub const PATH: &str = "DQUANT_PATH";

/// Why this process uses packets, as its environment tells; `None` if it does not.
pub fn refused_by_environment() -> Option<String> {
    match std::env::var(PATH).ok().as_deref() {
        Some("auto") | None => None,
        Some("udp") => Some(format!("{PATH}=udp")),
        Some(other) => Some(format!("{PATH}={other} is neither auto nor udp")),
    }
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct SameHost {
    neighbours: Result<Neighbours, String>,
    own: IpAddr,
    /// Queue pairs that are connected, and published while they serve.
    connected: Vec<Qpn>,
    /// Those with a neighbour, the next one to have its turn first.
    routed: VecDeque<Qpn>,
    /// The endpoint's count of failed queue pairs at the last look.
    failed_before: u64,
    /// Memory that is free when these accesses are over. Each range is one of the pool's.
    leaving: Vec<(Unfinished, PoolRange)>,
}

impl SameHost {
    /// For a device at this address, unless there is a reason against it.
    pub(crate) fn open(own: SocketAddr, refused: Option<String>, memory: &Pool) -> SameHost {
        let opened = || {
            let opened = Neighbours::open(own.port(), OWN_PORT, &[own.ip()]);
            let opened = opened.map_err(|error| format!("no board for neighbours: {error}"))?;
            opened.offer_pool(memory);
            Ok(opened)
        };
        SameHost {
            neighbours: refused.map_or_else(opened, Err),
            own: own.ip(),
            connected: Vec::new(),
            routed: VecDeque::new(),
            failed_before: 0,
            leaving: Vec::new(),
        }
    }

    /// Receives packets and messages, as the first part of a turn.
    pub(crate) fn receive<W: SocketWire>(
        &mut self,
        endpoint: &mut Endpoint,
        wire: &mut LossyWire<W>,
        memory: &mut Pool,
        now: Time,
    ) -> usize {
        match &mut self.neighbours {
            Ok(own) => {
                let messages = own.exchange_messages(endpoint, memory, wire, now);
                messages + world::receive(endpoint, &mut own.wire(wire), memory, now)
            }
            Err(_) => world::receive(endpoint, wire, memory, now),
        }
    }

    /// Sends, as the last part of a turn.
    pub(crate) fn send<W: SocketWire>(
        &mut self,
        endpoint: &mut Endpoint,
        wire: &mut LossyWire<W>,
        memory: &Pool,
        now: Time,
    ) -> usize {
        match &mut self.neighbours {
            Ok(own) => {
                own.wake_for_messages(endpoint, wire);
                world::send(endpoint, &mut own.wire(wire), memory, now)
            }
            Err(_) => world::send(endpoint, wire, memory, now),
        }
    }

    /// The thread is going to sleep on the socket. `false`: packets have arrived already.
    pub(crate) fn fall_asleep(&mut self) -> bool {
        self.neighbours.as_mut().map_or(true, Neighbours::fall_asleep)
    }

    /// The sleep is over, or did not begin.
    pub(crate) fn wake_up(&self) {
        if let Ok(own) = &self.neighbours {
            own.shared().wake_up();
        }
    }

    /// Whether neighbours have left something for this process.
    pub(crate) fn has_work(&mut self) -> bool {
        self.neighbours.as_mut().is_ok_and(|own| own.has_unannounced())
    }

    /// What other threads meet neighbours with.
    ///
    /// # Errors
    /// Why there is no same-host path.
    pub(crate) fn boards(&self) -> Result<Arc<Shared>, String> {
        self.neighbours.as_ref().map(|own| Arc::clone(own.shared())).map_err(Clone::clone)
    }

    /// A queue pair is connected: it is published, and its WRITEs and READs go to this neighbour.
    pub(crate) fn connect(
        &mut self,
        endpoint: &mut Endpoint,
        now: Time,
        qpn: Qpn,
        neighbour: Option<Arc<Target>>,
    ) {
        let Ok(own) = &mut self.neighbours else { return };
        if let Some(neighbour) = neighbour
            && endpoint.hold_sends(now, qpn, Holding::Relaxed).is_ok()
        {
            own.route(qpn, Some(neighbour));
            self.routed.push_back(qpn);
        }
        self.connected.push(qpn);
        publish(own, endpoint, self.own, qpn);
    }

    /// A queue pair is about to be destroyed.
    pub(crate) fn disconnect(&mut self, qpn: Qpn) {
        if let Ok(own) = &mut self.neighbours {
            own.withdraw_qp(qpn);
            own.route(qpn, None);
        }
        self.connected.retain(|one| *one != qpn);
        self.routed.retain(|one| *one != qpn);
    }

    /// Withdraws queue pairs that have failed since the last call, before the program learns of it.
    pub(crate) fn withdraw_failed(&mut self, endpoint: &Endpoint) {
        let failed = endpoint.counters().qp_errors;
        if let Ok(own) = &self.neighbours
            && failed != std::mem::replace(&mut self.failed_before, failed)
        {
            self.connected.iter().for_each(|qpn| publish(own, endpoint, self.own, *qpn));
        }
    }

    /// A region is registered: neighbours with a right may use it.
    pub(crate) fn publish(&self, pd: PdId, region: &MemoryRegion, access: Access) {
        if let Ok(own) = &self.neighbours
            && access.is_remote()
        {
            let MemoryRegion { addr, len, rkey, .. } = *region;
            let in_file = None;
            own.publish_region(&RegionCard { rkey, pd, addr, len, backing: addr, in_file, access });
        }
    }

    /// A region is about to be deregistered.
    pub(crate) fn withdraw(&self, rkey: u32) {
        if let Ok(own) = &self.neighbours {
            own.withdraw_region(rkey);
        }
    }

    /// Accesses of neighbours that may have begun before something was withdrawn.
    pub(crate) fn unfinished(&self) -> Unfinished {
        let own = self.neighbours.as_ref();
        own.map_or_else(|_| Unfinished::default(), |own| own.shared().unfinished())
    }

    /// Gives memory whose regions are withdrawn back to the pool, now or when no neighbour uses it any more.
    pub(crate) fn release(&mut self, pool: &mut Pool, range: PoolRange) {
        let mut unfinished = self.unfinished();
        if unfinished.is_over() {
            free(pool, range);
        } else {
            self.leaving.push((unfinished, range));
        }
    }

    /// Gives memory back that neighbours have finished with.
    pub(crate) fn reclaim(&mut self, pool: &mut Pool) {
        self.leaving.retain_mut(|(unfinished, range)| {
            let is_over = unfinished.is_over();
            if is_over {
                free(pool, *range);
            }
            !is_over
        });
    }

    /// Carries out requests that wait, up to the bytes of one long request in all. Returns whether it did
    /// anything.
    pub(crate) fn carry_out(&mut self, endpoint: &mut Endpoint, now: Time) -> bool {
        let Ok(own) = &mut self.neighbours else { return false };
        let mut budget = MAX_DIRECT_BYTES;
        for _ in 0..self.routed.len() {
            let Some(qpn) = self.routed.pop_front() else { break };
            if !endpoint.has_held(qpn) {
                self.routed.push_back(qpn);
                continue;
            }
            let backlog = endpoint.carry_out_held(now, qpn, own, &mut budget);
            if !own.reaches(qpn, DirectKind::Write) {
                // Everything goes as packets from now on. A queue pair that is gone has none.
                let _ = endpoint.hold_sends(now, qpn, Holding::Runs);
                if endpoint.has_held(qpn) {
                    self.routed.push_back(qpn);
                }
                continue;
            }
            if backlog == Backlog::Ready {
                // It was cut short, so it is first the next time.
                self.routed.push_front(qpn);
                break;
            }
            self.routed.push_back(qpn);
        }
        budget < MAX_DIRECT_BYTES
    }

    /// Queue pairs with a neighbour, ranges of memory that wait for one, and packets through shared memory.
    pub(crate) fn counts(&self, tell: &mut dyn FnMut(&str, u64)) {
        tell("neighbours.queue_pairs", self.routed.len() as u64);
        tell("neighbours.awaited_ranges", self.leaving.len() as u64);
        let fifos = self
            .neighbours
            .as_ref()
            .map_or_else(|_| FifoCounters::default(), |own| *own.counters());
        fifos
            .named()
            .into_iter()
            .for_each(|(name, value)| tell(&format!("neighbours.{name}"), value));
    }

    /// The path, for people to read.
    pub(crate) fn note(&self) -> String {
        match &self.neighbours {
            Ok(_) => "same host: direct where both ends allow it".to_owned(),
            Err(why) => format!("same host: packets ({why})"),
        }
    }
}

/// The port of such a device belongs to one process.
impl<W: SocketWire> Doorbell for LossyWire<W> {
    fn wake(&mut self, path: &Path, _dest: Qpn) {
        self.inner().wake(path.remote);
    }
}

fn free(pool: &mut Pool, range: PoolRange) {
    // The range came from this pool and is freed once, so this cannot be refused.
    let freed = pool.free(range);
    debug_assert!(freed.is_ok(), "{freed:?}");
}

/// Publishes what a queue pair serves now.
fn publish(neighbours: &Neighbours, endpoint: &Endpoint, own: IpAddr, qpn: Qpn) {
    match endpoint.qp_card(qpn, |_| Some(own)) {
        Some(card) => neighbours.publish_qp(&card),
        None => neighbours.withdraw_qp(qpn),
    }
}
