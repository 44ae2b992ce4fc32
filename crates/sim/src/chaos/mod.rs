//! Random programs under random faults, then healing; every completion and every byte checked.
//!
//! A seed draws a [`scenario`]: two or three machines, one to four connections, links, timers, a
//! mix of faults. Programs then post SENDs, WRITEs, READs and atomics of 0 bytes to many packets;
//! some of them misbehave on purpose. When enough work was posted the faults stop, and everything
//! outstanding has to finish within a bound computed from timers, retries and bytes
//! ([`side::Healing`]). At the end the queue pairs are closed and all memory is compared.
//!
//! Checked throughout, by contract:
//! - C2: each work request completes exactly once, in order, with the right status and bytes; sends
//!   in posting order, receives in the order of the peer's messages; after an error everything is
//!   flushed and nothing succeeds; atomics have a serial order;
//! - C3: the transport accesses registered memory only, as its flags allow; gaps and other memory
//!   keep their bytes; illegal requests are refused;
//! - C7: damaged and stray packets change nothing;
//! - on the wire: RNR delays, windows, credits ([`monitor`]).
//!
//! UC and UD promise less, and that is checked: a message is received whole or not at all, with its
//! own bytes ([`unreliable`]).
//!
//! Programs have habits, drawn by seed ([`scenario::Habits`]): they restrict access ([`rights`]),
//! go to SQD and back ([`drain`]), sleep until they are notified ([`sleep`]), leave completions
//! unpolled ([`abandon`]), change what they have just read ([`overtake`]), and reach each other's
//! memory without packets where that is possible ([`Flaw`]). And there may be hostile peers that
//! forge packets ([`intruder`]).
//!
//! A connection may fail when retries run out under harsh faults, when a program misbehaves, or
//! when a machine restarts. Then both sides flush, outstanding data may have arrived or not (byte
//! by byte the old or the new), and the programs connect again.

mod abandon;
mod atomics;
mod check;
mod conditions;
mod draft;
mod drain;
mod failures;
mod intruder;
mod life;
mod monitor;
mod overtake;
mod pool;
mod post;
mod rights;
mod scenario;
mod side;
mod sleep;
mod space;
mod summary;
mod trespass;
mod unreliable;
mod windows;

use alloc::collections::VecDeque;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use ::topology::graph::Topology;
use roce::direct::{Backlog, MAX_DIRECT_BYTES};
use roce::{Duration, Time};

#[cfg(feature = "seeded-bugs")]
use roce::seeded::Bug;
pub use summary::Summary;

use crate::chance::Chance;
use crate::faults::{Fault, FaultMix};
use crate::link::LinkConfig;
use crate::memory::Arena;
use crate::network::{Defect, Flaw, LinkFaults, MAX_DELAY_NS, Network, Sighting};
use intruder::Intruder;
use monitor::{Monitor, Requests};
use scenario::{Scenario, Strike};
use side::{At, Healing, Pair, PairState, Pool, Turn};
use space::Space;

/// Events after which a run counts as endless: a constant, and this many for each posted send.
const MAX_EVENTS: u64 = 4_000_000;
const MAX_EVENTS_PER_SEND: u64 = 1_000;

/// Longest pause of a program that has nothing to do, in nanoseconds.
const MAX_BACKOFF_NS: u64 = 400_000;

type Checked<T> = Result<T, String>;

/// Fails the check with a message unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(alloc::format!($($message)+));
        }
    };
}
use ensure;

/// Options of a run besides its seed.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Sends to post instead of the seed's number.
    pub sends: Option<u64>,
    /// The network of every seed, instead of the seed's: at least two of its hosts must be joined
    /// by switches ([`separate_hosts`](crate::topology::separate_hosts)).
    pub topology: Option<Topology>,
    /// Damage done on purpose.
    pub sabotage: Sabotage,
    /// A bug seeded in every endpoint.
    #[cfg(feature = "seeded-bugs")]
    pub bug: Option<Bug>,
}

/// Damage done to the run itself, to test that the checks notice it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sabotage {
    /// None.
    #[default]
    None,
    /// A payload bit flips after the ICRC was checked.
    Body,
    /// Completions are lost before the program polls them.
    Completion,
    /// Completions are reordered.
    Order,
    /// A byte between two regions changes.
    Guard,
    /// Atomics are executed twice.
    Atomic,
    /// The network loses packets although the seed has no faults.
    Loss,
    /// The network reorders packets although the seed has no faults.
    Reorder,
    /// Every cable is unplugged before the last messages.
    Silence,
}

/// A check that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The seed that reproduces it.
    pub seed: u64,
    /// When it was noticed.
    pub at: Time,
    /// What is wrong.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}, {}: {}", self.seed, self.at, self.what)
    }
}

/// Runs one seed from beginning to end.
///
/// # Errors
/// The first check that failed.
pub fn run(seed: u64, options: &Options) -> Result<Summary, Violation> {
    let mut chance = Chance::new(seed);
    let scenario = Scenario::draw(seed, options, &mut chance);
    let violation = |at, what| Violation { seed, at, what };
    let mut run =
        Run::new(scenario, options, chance).map_err(|what| violation(Time::ZERO, what))?;
    match run.go() {
        Ok(()) => Ok(run.summary),
        Err(what) => Err(violation(run.network.now(), what)),
    }
}

/// The phase of a run.
#[derive(Clone, Copy, Debug)]
enum Phase {
    /// Faults are injected and programs post.
    Faulty,
    /// Faults have stopped; outstanding work finishes.
    Healing(Healing),
    /// Queue pairs are closed.
    Closing,
}

/// One seed's world.
struct Run {
    network: Network<Arena>,
    scenario: Scenario,
    options: Options,
    chance: Chance,
    /// Randomness of the habits, separate so that a run without habits stays the same.
    whims: Chance,
    spaces: Vec<Space>,
    pairs: Vec<Pair>,
    /// Shared receive queues, by node.
    pools: Vec<Option<Pool>>,
    /// Histories of the words that atomics work on, by node, in the order of
    /// [`Use::Words`](space::Use).
    words: Vec<Vec<atomics::WordHistory>>,
    /// Last values seen in the words, to try compare-and-swap with.
    last_values: Vec<Vec<u64>>,
    intruders: Vec<Intruder>,
    strikes: VecDeque<(u64, Strike)>,
    turns: Vec<Turn>,
    monitor: Monitor,
    sightings: Vec<Sighting>,
    phase: Phase,
    next_id: u64,
    summary: Summary,
}

impl Run {
    fn new(mut scenario: Scenario, options: &Options, mut chance: Chance) -> Checked<Run> {
        let (max_len, sides) = (scenario.max_len, scenario.sides());
        let arena = |chance: &mut Chance| Arena::new(Space::arena_bytes(max_len, sides), chance);
        let mut network = Network::new(&scenario.network, arena);
        network.record();
        network.mix = scenario.mix;
        network.set_pressure(scenario.pressure);
        if let Some(conditions) = &scenario.conditions {
            network.set_link_faults(conditions.faults);
        }
        let secret = match options.sabotage {
            Sabotage::Loss => Some(Fault::Loss),
            Sabotage::Reorder => Some(Fault::Reorder),
            _ => None,
        };
        if let Some(fault) = secret {
            network.mix = FaultMix::NONE.with(fault, 40_000);
            (scenario.mix, scenario.strikes) = (FaultMix::NONE, Vec::new());
            network.set_pressure(None);
            network.set_link_faults(LinkFaults::default());
        }
        let pairs = scenario.pairs.iter().map(|plan| Pair::new(plan.nodes, plan.params.clone()));
        let pairs = pairs.collect();
        let strikes = scenario.strikes.iter().copied().collect();
        let mut run = Run {
            spaces: Vec::new(),
            pools: Vec::new(),
            words: Vec::new(),
            last_values: Vec::new(),
            pairs,
            intruders: Vec::new(),
            strikes,
            turns: Vec::new(),
            monitor: Monitor::default(),
            sightings: Vec::new(),
            phase: Phase::Faulty,
            next_id: 0,
            summary: Summary { seeds: 1, ..Summary::default() },
            options: options.clone(),
            chance: chance.fork(),
            whims: Chance::new(!scenario.network.seed).fork(),
            network,
            scenario,
        };
        run.set_up()?;
        Ok(run)
    }

    fn set_up(&mut self) -> Checked<()> {
        self.network.plant_flaw(self.flaw());
        self.network.plant_defect(self.defect());
        for node in 0..self.network.len() {
            let space = self.new_space(node)?;
            self.spaces.push(space);
            let pool = self.new_pool(node)?;
            self.pools.push(pool);
            self.words.push(Vec::new());
            self.last_values.push(Vec::new());
            self.start_words(node);
            self.plant(node);
            if self.options.sabotage == Sabotage::Body {
                self.network.node_mut(node).corrupt_every(5);
            }
        }
        (0..self.pairs.len()).try_for_each(|pair| self.connect(pair))?;
        (0..self.scenario.habits.intruders).try_for_each(|_| self.intrude())
    }

    /// Plants the bug of the run in a new node.
    fn plant(&mut self, node: u32) {
        let doubles_atomics = self.options.sabotage == Sabotage::Atomic;
        self.network.node_quietly(node).memory.doubles_atomics = doubles_atomics;
        #[cfg(feature = "seeded-bugs")]
        self.network.node_quietly(node).endpoint.plant(self.options.bug);
    }

    /// The flaw of neighbours, of which endpoints know nothing.
    fn flaw(&self) -> Flaw {
        #[cfg(feature = "seeded-bugs")]
        return match self.options.bug {
            Some(Bug::DirectBounds) => Flaw::Bounds,
            Some(Bug::DirectStaleKey) => Flaw::StaleKeys,
            Some(Bug::DirectCompletedEarly) => Flaw::CompletedEarly,
            Some(Bug::DirectTailFirst) => Flaw::TailFirst,
            Some(Bug::DirectAtomicTorn) => Flaw::AtomicTorn,
            Some(Bug::DirectRefusalLost) => Flaw::RefusalLost,
            _ => Flaw::None,
        };
        #[cfg(not(feature = "seeded-bugs"))]
        Flaw::None
    }

    /// What switches and links do wrong.
    fn defect(&self) -> Defect {
        #[cfg(feature = "seeded-bugs")]
        return match self.options.bug {
            Some(Bug::PauseForgotten) => Defect::PauseForgotten,
            Some(Bug::PauseIgnored) => Defect::PauseIgnored,
            Some(Bug::ResumeLost) => Defect::ResumeLost,
            Some(Bug::CreditLeaked) => Defect::CreditLeaked,
            Some(Bug::LoopOnReroute) => Defect::LoopOnReroute,
            _ => Defect::None,
        };
        #[cfg(not(feature = "seeded-bugs"))]
        Defect::None
    }

    fn go(&mut self) -> Checked<()> {
        while !self.is_over() {
            ensure!(self.network.advance(), "stuck: nothing will ever happen. {}", self.describe());
            self.check_health()?;
            self.watch()?;
            self.watch_intruders()?;
            self.collect()?;
            self.take_turns()?;
            self.move_on()?;
            self.carry_on();
        }
        self.finish()
    }

    /// What each node does after its turns: requests that waited for packets are carried out.
    fn carry_on(&mut self) {
        let now = self.network.now();
        let Run { network, pairs, whims, .. } = self;
        let sides = pairs.iter_mut().flat_map(|pair| pair.sides.iter_mut().flatten());
        for side in sides.filter(|side| side.is_held) {
            let mut budget = whims.pick(&[1, 3_000, MAX_DIRECT_BYTES]);
            let backlog = network.with_neighbours(side.node, |endpoint, direct| {
                endpoint.carry_out_held(now, side.qpn, direct, &mut budget)
            });
            side.is_held = backlog != Some(Backlog::Empty);
        }
    }

    fn is_over(&self) -> bool {
        // Unreliable pairs are still to say farewell.
        let is_over = |pair: &Pair| match pair.state {
            PairState::Up => !pair.params.is_reliable(),
            state => state == PairState::Down,
        };
        matches!(self.phase, Phase::Closing) && self.pairs.iter().all(is_over)
    }

    fn check_health(&self) -> Checked<()> {
        let events = self.network.events_handled();
        // Packets cross six links instead of two at most.
        let links = if self.scenario.conditions.is_some() { 3 } else { 1 };
        let most = links * (MAX_EVENTS + MAX_EVENTS_PER_SEND * self.summary.sends);
        ensure!(events < most, "still busy after {events} events. {}", self.describe());
        ensure!(self.network.spinning().is_none(), "a node never comes to rest at one instant");
        self.check_conduct()?;
        ensure!(
            self.network.torn_writes() == 0,
            "the last byte of a WRITE was seen before the others"
        );
        for &node in self.network.touched() {
            let node = self.network.node(node);
            if let Some(trespass) = node.memory.trespass() {
                return Err(format!("{trespass}"));
            }
            ensure!(node.refused_intact() == 0, "an intact packet was refused");
            ensure!(
                node.unadmitted() == 0,
                "a packet was sent that its destination had not admitted"
            );
            ensure!(node.neglected() == 0, "packets wait for a destination that refuses nothing");
        }
        Ok(())
    }

    /// Checks the packets on the wires.
    fn watch(&mut self) -> Checked<()> {
        self.network.take_sightings(&mut self.sightings);
        let pairs = &self.pairs;
        self.sightings.iter().try_for_each(|sighting| self.monitor.see(sighting, pairs))
    }

    // ---- programs ------------------------------------------------------------------------------

    fn schedule(&mut self, after_ns: u64, turn: Turn) {
        let at = self.network.now() + Duration::from_nanos(after_ns);
        self.network.wake_at(at, self.turns.len() as u32);
        self.turns.push(turn);
    }

    fn take_turns(&mut self) -> Checked<()> {
        for index in 0..self.network.wakes().len() {
            let token = self.network.wakes()[index];
            match self.turns[token as usize] {
                Turn::Act { at, epoch } => self.act(at, epoch)?,
                Turn::GiveUp { at, epoch, patient } => self.give_up(at, epoch, patient)?,
                Turn::Connect { pair } => self.connect(pair)?,
                Turn::Arm { at, epoch } => self.arm(at, epoch)?,
                Turn::Resume { at, epoch, patience } => self.resume(at, epoch, patience)?,
                Turn::Attack { intruder } => self.attack(intruder)?,
                Turn::PlugIn { node } => self.network.set_cable(node, true),
                Turn::Mend(mend) => self.mend(mend),
            }
        }
        Ok(())
    }

    /// From faults to healing to closing.
    fn move_on(&mut self) -> Checked<()> {
        self.strike()?;
        match self.phase {
            Phase::Faulty if self.summary.sends >= self.scenario.budget => self.heal()?,
            Phase::Healing(healing) => {
                let took = self.network.now().since(healing.since).as_nanos();
                let late = took > healing.bound_ns;
                let bound = Duration::from_nanos(healing.bound_ns);
                ensure!(!late, "not recovered {bound} after the last fault. {}", self.describe());
                if self.pairs.iter().all(Pair::is_quiet) {
                    self.summary.recoveries.push((took, healing.bound_ns));
                    self.close()?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn strike(&mut self) -> Checked<()> {
        while let Some(&(at, strike)) = self.strikes.front()
            && at <= self.summary.sends
            && matches!(self.phase, Phase::Faulty)
        {
            self.strikes.pop_front();
            match strike {
                Strike::Flap { node, span } => {
                    self.network.set_cable(node, false);
                    self.schedule(span.as_nanos(), Turn::PlugIn { node });
                    self.excuse_node(node);
                }
                Strike::Restart { node } => self.restart(node)?,
                Strike::Fail(failure) => self.fail(failure),
            }
        }
        Ok(())
    }

    /// All faults stop. Outstanding work has to finish within a bound.
    fn heal(&mut self) -> Checked<()> {
        self.resume_all()?;
        self.ask_for_the_last()?;
        self.network.mix = FaultMix::NONE;
        self.network.set_pressure(None);
        self.network.set_queue_bytes(1 << 40);
        for node in 0..self.network.len() {
            self.network.set_cable(node, true);
        }
        self.network.repair();
        let bound_ns = self.recovery_bound_ns();
        self.phase = Phase::Healing(Healing { since: self.network.now(), bound_ns });
        Ok(())
    }

    /// The bound, in nanoseconds:
    ///
    /// ```text
    ///   D + N + S + 2 ms + max over connections of
    ///       4 T + M (R + S)                      connections that may not break
    ///       4 T + M (R + S) + D + R + (r + 2) T  connections that may, or are about to
    /// ```
    ///
    /// D is the longest delay of a packet in flight, N the time until a network whose switches and
    /// links failed has its routes and obeys its pauses again: detection and change of routes, the
    /// longest pause, and a watchdog's detection and restoration. T is the ACK timeout, r the retry
    /// count, R the RNR delay, M the number of messages that wait for a receive. S is the time that
    /// all outstanding bytes take on one link, or at the lowest rate of a congestion control, three
    /// times over, with eight propagation delays. One timeout detects a loss, one more a lost
    /// acknowledgement of the retransmission; two are margin. 2 ms is what programs may take to
    /// post receives.
    fn recovery_bound_ns(&self) -> u64 {
        let span = self.transfer_ns();
        let worst = self.pairs.iter().map(|pair| self.pair_bound_ns(pair, span)).max();
        let conditions = self.scenario.conditions.as_ref();
        let settles = conditions.map_or(0, |conditions| conditions.settles_in.as_nanos());
        MAX_DELAY_NS + settles + span + 2_000_000 + worst.unwrap_or(0)
    }

    fn pair_bound_ns(&self, pair: &Pair, span: u64) -> u64 {
        let timeout = pair.params.ack_timeout().as_nanos();
        let rnr = pair.params.rnr_delay().as_nanos();
        let sides = pair.sides.iter().flatten();
        let messages: usize = sides.map(|side| side.announced.len()).sum();
        let repair = 4 * timeout + messages as u64 * (rnr + span);
        let may_break = pair.is_excused || self.scenario.is_harsh;
        if may_break { repair + self.patience_ns(pair) } else { repair }
    }

    /// How long a side may need to detect that its peer is gone.
    fn patience_ns(&self, pair: &Pair) -> u64 {
        let retries = u64::from(pair.params.retry_count) + 2;
        let timeouts = retries * pair.params.ack_timeout().as_nanos();
        MAX_DELAY_NS + pair.params.rnr_delay().as_nanos() + timeouts
    }

    fn transfer_ns(&self) -> u64 {
        let sides = self.pairs.iter().flat_map(|pair| pair.sides.iter().flatten());
        let requests: usize = sides.map(|side| side.sends.len()).sum();
        // Packets of 256 bytes carry about as much again in headers and framing.
        let bytes = 2 * requests as u64 * (self.scenario.max_len + 256);
        let link = self.scenario.link;
        let limits = self.pairs.iter().filter_map(|pair| pair.params.least_bps());
        let rate_bps = limits.chain([link.rate_bps]).min().unwrap_or(link.rate_bps);
        let link = LinkConfig { rate_bps, ..link };
        3 * link.serialization(bytes).as_nanos() + 8 * link.delay.as_nanos()
    }

    fn describe(&self) -> String {
        let sides = self.pairs.iter().flat_map(|pair| {
            pair.sides.iter().flatten().map(|side| {
                let state = self.network.node(side.node).endpoint.qp_state(side.qpn);
                let (sends, receives) = (side.sends.len(), side.receives.len());
                let (node, due) = (side.node, side.announced.len());
                let (transport, shares) = (pair.params.transport, side.shares);
                format!(
                    "[{node}: {transport:?} {state:?}, {sends} sends, {receives} receives (shared: \
                     {shares}), {due} due] "
                )
            })
        });
        let pools = self.pools.iter().flatten().map(|pool| {
            let (posted, depth, len) = (pool.receives.len(), pool.depth, pool.len);
            format!("[shared: {posted} of {depth} receives of {len} bytes] ")
        });
        sides.chain(pools).collect()
    }

    // ---- the end -------------------------------------------------------------------------------

    fn finish(&mut self) -> Checked<()> {
        self.run_dry()?;
        self.say_farewell()?;
        self.close_pairs(|_| true)?;
        self.run_dry()?;
        if let Some(unrest) = self.network.unrest() {
            return Err(format!("at rest, {unrest}"));
        }
        if self.options.sabotage == Sabotage::Guard {
            let first = self.network.node(0).memory.peek(Arena::BASE, 1)[0];
            self.network.node_mut(0).memory.poke(Arena::BASE, &[!first]);
        }
        for node in 0..self.network.len() {
            self.check_words(node, true)?;
            self.spaces[node as usize]
                .compare(&self.network.node(node).memory)
                .map_err(|what| format!("node {node}: {what}"))?;
            self.count_node(node);
        }
        let Requests { checked, skipped } = self.monitor.requests;
        (self.summary.requests_checked, self.summary.requests_skipped) = (checked, skipped);
        self.summary.faults = self.network.fault_counts();
        self.summary.events = self.network.events_handled();
        self.summary.simulated_ns = self.network.now().as_nanos();
        self.summary.queue_drops = self.network.queue_drops();
        self.summary.pauses = self.network.pauses();
        self.summary.conduct = self.network.conduct();
        Ok(())
    }

    /// Packets in flight must not change anything any more, except for unreliable pairs.
    fn run_dry(&mut self) -> Checked<()> {
        while self.network.advance() {
            self.check_health()?;
            self.watch()?;
        }
        Ok(())
    }

    fn count_node(&mut self, node: u32) {
        let node = self.network.node(node);
        let [sent, _, again] = node.packets();
        self.summary.packets += sent;
        self.summary.retransmitted += again;
        self.summary.harmless += node.harmless_damage();
        self.summary.add_endpoint(node.endpoint.counters());
    }
}

impl Run {
    fn pair_mut(&mut self, at: At) -> &mut Pair {
        &mut self.pairs[at.pair]
    }

    fn side(&self, at: At) -> Checked<&side::Side> {
        let sides = self.pairs[at.pair].sides.as_ref();
        sides.map(|sides| &sides[at.side]).ok_or_else(|| String::from("a side that is no more"))
    }

    fn side_mut(&mut self, at: At) -> Checked<&mut side::Side> {
        let sides = self.pairs[at.pair].sides.as_mut();
        sides.map(|sides| &mut sides[at.side]).ok_or_else(|| String::from("a side that is no more"))
    }
}
