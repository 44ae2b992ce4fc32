//! The iterations of one rank: what it posts and awaits, step by step, and what it measures.
//!
//! There is one link for each peer ([`comm::mesh`]), for all phases and both directions, with two
//! buffers to receive into: the message that is due, and the next one, since a peer may be a phase
//! ahead.
//!
//! Devices, connections and the other ranks' ends belong to [`rank`](super::rank).

use std::collections::{BTreeMap, BTreeSet};

use comm::mesh::{Completions, Mesh, MeshError, Place, Ring, Wanted};
use roce::device::Device;
use roce::world::Staging;
use roce::{Duration, Time};

use super::content::Content;
use super::schedule::Step;

/// Receives posted for each peer.
const AHEAD: u32 = 2;

/// Where buffers begin: at multiples of this.
pub(super) const ALIGN: u64 = 4096;

/// An edge from this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Edge {
    /// The phase of the pattern, from 0.
    pub phase: usize,
    /// The receiver.
    pub to: u32,
    /// Bytes in an iteration.
    pub bytes: u64,
}

/// One iteration of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Iteration {
    /// The pause and all phases.
    pub total_ns: u64,
    /// All phases.
    pub exchange_ns: u64,
    /// From posting to acknowledgement, by edge.
    pub edges_ns: Vec<u64>,
}

/// What one rank measured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The rank.
    pub rank: u32,
    /// Its edges.
    pub edges: Vec<Edge>,
    /// Iterations behind those that warm up.
    pub iterations: Vec<Iteration>,
    /// Received bytes that were compared, of all iterations.
    pub verified_bytes: u64,
    /// Messages with a wrong byte, or of a wrong length.
    pub wrong_messages: u64,
    /// Packets that this rank retransmitted; `None` if the device does not count them.
    pub retransmitted: Option<u64>,
}

/// Longest messages to and from each peer.
#[derive(Debug, Default)]
pub(super) struct Sizes {
    sends: BTreeMap<u32, u64>,
    receives: BTreeMap<u32, u64>,
    /// Messages of an iteration from each peer, in their order.
    cycles: BTreeMap<u32, Vec<u64>>,
}

impl Sizes {
    pub(super) fn of(steps: &[Step]) -> Sizes {
        let mut sizes = Sizes::default();
        for step in steps {
            for &(to, bytes) in &step.sends {
                let most = sizes.sends.entry(to).or_insert(0);
                *most = bytes.max(*most);
            }
            for &(from, bytes) in &step.receives {
                let most = sizes.receives.entry(from).or_insert(0);
                *most = bytes.max(*most);
                sizes.cycles.entry(from).or_default().push(bytes);
            }
        }
        sizes
    }

    /// Bytes of all buffers. A rank that exchanges nothing has none, and still takes part.
    pub(super) fn memory(&self) -> Option<u64> {
        let stride = |bytes: &u64| bytes.checked_next_multiple_of(ALIGN);
        let sends: u64 = self.sends.values().map(stride).sum::<Option<u64>>()?;
        let receives: u64 = self.receives.values().map(stride).sum::<Option<u64>>()?;
        Some(receives.checked_mul(u64::from(AHEAD))?.checked_add(sends)?.max(ALIGN))
    }

    /// One link to each peer, their buffers one behind the other.
    pub(super) fn links(&self) -> Vec<Wanted> {
        let ranks: BTreeSet<u32> = self.sends.keys().chain(self.receives.keys()).copied().collect();
        let mut next = 0;
        let mut ring = |bytes: Option<&u64>, slots: u32| {
            // Messages are shorter than 2^32 bytes: `MAX_MESSAGE_BYTES`.
            let bytes = bytes.copied().unwrap_or(0);
            let (offset, stride) = (next, bytes.next_multiple_of(ALIGN));
            next += stride * u64::from(slots);
            Ring { offset, stride, slots, bytes: bytes as u32 }
        };
        let link = |peer| Wanted {
            peer,
            sends: 2,
            receives: AHEAD,
            outbox: ring(self.sends.get(&peer), 1),
            inbox: ring(self.receives.get(&peer), AHEAD),
            ..Wanted::default()
        };
        ranks.into_iter().map(link).collect()
    }
}

/// What goes through a link.
#[derive(Debug)]
struct Peer {
    rank: u32,
    outgoing: Content,
    incoming: Content,
    /// Messages of an iteration from it; none if it sends nothing.
    cycle: Vec<u64>,
    /// Messages that are to be there before the step ends.
    due: u64,
}

#[derive(Clone, Debug)]
enum Stage {
    /// The pause, and before the first one the time until the start.
    Computing { until: Time },
    /// A step is under way: messages that are not acknowledged, by edge.
    Exchanging { step: usize, began: Time, unacknowledged: BTreeSet<u32> },
    /// All iterations are over; others may still need this rank's queue pairs.
    Finished,
}

/// How often and how a rank repeats its steps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    /// Iterations, those that are not measured among them.
    pub(super) iterations: u32,
    /// Of these, how many are not.
    pub(super) warm_up: u32,
    /// The pause of each iteration.
    pub(super) compute: Duration,
}

/// A rank's iterations.
#[derive(Debug)]
pub(super) struct Progress {
    mesh: Mesh,
    peers: Vec<Peer>,
    steps: Vec<Step>,
    outcome: Outcome,
    left: u32,
    warm_up: u32,
    compute: Duration,
    iteration_began: Time,
    iteration: Iteration,
    stage: Stage,
}

impl Progress {
    /// A rank's iterations over a mesh. Fills the buffers to send from.
    pub(super) fn new<S: Staging>(
        (rank, mesh): (u32, Mesh),
        steps: Vec<Step>,
        sizes: &Sizes,
        plan: Plan,
        pool: &mut S,
    ) -> Progress {
        let mut peers = Vec::new();
        for (at, link) in mesh.links().iter().enumerate() {
            let peer = link.wanted.peer;
            let outgoing = Content::new(rank, peer);
            let source = mesh.buffer(Place { link: at, slot: 0 }, false);
            outgoing.fill(pool.bytes_mut(source, link.wanted.outbox.bytes as usize));
            peers.push(Peer {
                rank: peer,
                outgoing,
                incoming: Content::new(peer, rank),
                cycle: sizes.cycles.get(&peer).cloned().unwrap_or_default(),
                due: 0,
            });
        }
        let Plan { iterations, warm_up, compute } = plan;
        let edges = edges_of(&steps);
        Progress {
            mesh,
            peers,
            steps,
            outcome: Outcome { rank, edges, ..Outcome::default() },
            left: iterations,
            warm_up,
            compute,
            iteration_began: Time::ZERO,
            iteration: Iteration::default(),
            stage: Stage::Finished,
        }
    }

    /// Begins the first iteration at this time.
    pub(super) fn begin_at(&mut self, begins: Time) {
        self.iteration_began = begins;
        self.stage = Stage::Computing { until: begins + self.compute };
    }

    /// The links.
    pub(super) fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Which rank this is.
    pub(super) fn rank(&self) -> u32 {
        self.outcome.rank
    }

    /// Whether all iterations are over.
    pub(super) fn is_finished(&self) -> bool {
        matches!(self.stage, Stage::Finished)
    }

    /// When something is due without any packet.
    pub(super) fn due(&self) -> Option<Time> {
        match self.stage {
            Stage::Computing { until } => Some(until),
            Stage::Exchanging { .. } | Stage::Finished => None,
        }
    }

    /// What was measured.
    pub(super) fn into_outcome(self) -> Outcome {
        self.outcome
    }

    /// One turn; whether there was anything to do.
    pub(super) fn step<D: Device, S: Staging>(
        &mut self,
        now: Time,
        device: &mut D,
        pool: &mut S,
    ) -> Result<bool, MeshError> {
        let mut worked = self.take_sends(now, device)?;
        worked |= self.take_messages(now, device, pool)?;
        while self.advance(now, device, pool)? {
            worked = true;
        }
        Ok(worked)
    }

    /// Goes on to the next stage if this one is over.
    fn advance<D: Device, S: Staging>(
        &mut self,
        now: Time,
        device: &mut D,
        pool: &mut S,
    ) -> Result<bool, MeshError> {
        match &self.stage {
            Stage::Computing { until } if now >= *until => {
                self.iteration = Iteration {
                    edges_ns: vec![0; self.outcome.edges.len()],
                    ..Iteration::default()
                };
                match self.steps.is_empty() {
                    true => self.end_iteration(now),
                    false => self.begin_step(now, 0, device, pool)?,
                }
            }
            Stage::Exchanging { step, began, unacknowledged }
                if unacknowledged.is_empty() && self.is_received() =>
            {
                let next = *step + 1;
                self.iteration.exchange_ns += now.since(*began).as_nanos();
                match next < self.steps.len() {
                    true => self.begin_step(now, next, device, pool)?,
                    false => self.end_iteration(now),
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn begin_step<D: Device, S: Staging>(
        &mut self,
        now: Time,
        step: usize,
        device: &mut D,
        pool: &mut S,
    ) -> Result<(), MeshError> {
        let Progress { mesh, peers, steps, .. } = self;
        let what = &steps[step];
        for peer in peers.iter_mut() {
            peer.due += what.receives.iter().filter(|(from, _)| *from == peer.rank).count() as u64;
        }
        for &(to, bytes) in &what.sends {
            let Some(link) = peers.iter().position(|peer| peer.rank == to) else { continue };
            let place = Place { link, slot: 0 };
            let buffer = pool.bytes_mut(mesh.buffer(place, false), bytes as usize);
            peers[link].outgoing.number(buffer, mesh.links()[link].posted);
            mesh.post(device, now, link, &[mesh.send(place, bytes as u32)])?;
        }
        let unacknowledged = what.sends.iter().map(|(to, _)| *to).collect();
        self.stage = Stage::Exchanging { step, began: now, unacknowledged };
        Ok(())
    }

    fn end_iteration(&mut self, now: Time) {
        self.iteration.total_ns = now.since(self.iteration_began).as_nanos();
        match self.warm_up.checked_sub(1) {
            Some(left) => self.warm_up = left,
            None => self.outcome.iterations.push(std::mem::take(&mut self.iteration)),
        }
        self.left = self.left.saturating_sub(1);
        self.iteration_began = now;
        self.stage = match self.left {
            0 => Stage::Finished,
            _ => Stage::Computing { until: now + self.compute },
        };
    }

    /// Whether all that is due is there.
    fn is_received(&self) -> bool {
        let links = self.mesh.links().iter();
        links.zip(&self.peers).all(|(link, peer)| link.arrived >= peer.due)
    }

    fn take_sends<D: Device>(&mut self, now: Time, device: &mut D) -> Result<bool, MeshError> {
        let done: Completions = self.mesh.poll_sends(device)?;
        for completion in &done {
            let to = self.peers[self.mesh.take_send(completion)?.link].rank;
            let Stage::Exchanging { step, began, unacknowledged } = &mut self.stage else {
                continue;
            };
            unacknowledged.remove(&to);
            let phase = self.steps[*step].phase;
            let edge =
                self.outcome.edges.iter().position(|edge| (edge.phase, edge.to) == (phase, to));
            if let Some(ns) = edge.and_then(|edge| self.iteration.edges_ns.get_mut(edge)) {
                *ns += now.since(*began).as_nanos();
            }
        }
        Ok(!done.is_empty())
    }

    fn take_messages<D: Device, S: Staging>(
        &mut self,
        now: Time,
        device: &mut D,
        pool: &S,
    ) -> Result<bool, MeshError> {
        let done: Completions = self.mesh.poll_messages(device)?;
        for completion in &done {
            let place = self.mesh.take_message(completion)?;
            let peer = &self.peers[place.link];
            let number = self.mesh.links()[place.link].arrived - 1;
            let due = number as usize % peer.cycle.len().max(1);
            let bytes = peer.cycle.get(due).copied().unwrap_or(0);
            let buffer = pool.bytes(self.mesh.buffer(place, true), bytes as usize);
            let is_right =
                u64::from(completion.byte_len) == bytes && peer.incoming.is_in(buffer, number);
            self.outcome.verified_bytes += bytes;
            self.outcome.wrong_messages += u64::from(!is_right);
            self.mesh.post_receive(device, now, place)?;
        }
        Ok(!done.is_empty())
    }
}

fn edges_of(steps: &[Step]) -> Vec<Edge> {
    let mut edges = BTreeMap::new();
    for step in steps {
        for (to, bytes) in &step.sends {
            *edges.entry((step.phase, *to)).or_insert(0) += bytes;
        }
    }
    edges.into_iter().map(|((phase, to), bytes)| Edge { phase, to, bytes }).collect()
}
