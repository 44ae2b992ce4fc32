//! Bootstraps of all ranks of a job, with everything that may happen to them in any order, seed by
//! seed.
//!
//! | | invariant |
//! |---|---|
//! | B1 | no rank is told to go before all have connected |
//! | B2 | no rank is at its end before all have finished |
//! | B3 | every rank is told the same of all ranks, in their order |
//! | B4 | every rank that lives ends once, and nothing follows |
//! | B5 | all end well unless a rank dies, never comes or hangs; failures name only such ranks |
//! | B6 | whoever is no rank is refused, and changes nothing |

use std::collections::{BTreeSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr};

use comm::bootstrap::{
    Bootstrap, Config, Event, Failure, Join, Loss, Message, Peer, Reason, Refusal,
};
use rand_pcg::Pcg64;
use rand_pcg::rand_core::{Rng, SeedableRng};
use roce::{Duration, Time};

#[path = "../../../testing/seeds.rs"]
mod seeds;

type Rank = Bootstrap<&'static str, u32>;
type Said = Message<&'static str, u32>;

const VERSION: u32 = 1;
const TERMS: &str = "ring:3@1G";

/// As a socket for both families shows it.
fn mapped(ip: Ipv4Addr) -> IpAddr {
    ip.to_ipv6_mapped().into()
}

/// Where the configuration says that a rank is.
fn address(rank: u32) -> IpAddr {
    let ip = Ipv4Addr::new(10, 0, 0, rank as u8 + 1);
    if rank % 3 == 2 { mapped(ip) } else { ip.into() }
}

/// Where it comes from; whether either of the two is mapped differs from rank to rank.
fn source(rank: u32) -> IpAddr {
    let ip = Ipv4Addr::new(10, 0, 0, rank as u8 + 1);
    if rank % 2 == 1 { mapped(ip) } else { ip.into() }
}

/// What a rank says of itself.
fn info(rank: u32) -> u32 {
    100 + rank
}

fn rank(rank: u32, count: u32, now: Time) -> Rank {
    let peers = (0..count).map(address).collect();
    let wait = Duration::from_millis(60_000);
    Bootstrap::new(Config { rank, peers, version: VERSION, terms: TERMS, wait }, info(rank), now)
}

/// A rank as its machine sees it.
#[derive(Default)]
struct Node {
    machine: Option<Rank>,
    is_dead: bool,
    /// Whether rank 0 knows whose this connection is.
    has_joined: bool,
    /// On the way to rank 0, and from there.
    up: VecDeque<Said>,
    down: VecDeque<Said>,
    /// Whether the end of this connection has been noticed.
    is_lost: bool,
    may_connect: bool,
    has_connected: bool,
    may_finish: bool,
    has_finished: bool,
    end: Option<Result<(), Failure>>,
}

struct World {
    random: Pcg64,
    now: Time,
    nodes: Vec<Node>,
    /// Ranks that never come.
    absent: BTreeSet<u32>,
    /// The rank that does not finish connecting its queue pairs. Others have to be waiting for it:
    /// nobody else limits its time.
    hanging: Option<u32>,
    deaths_left: u32,
}

impl World {
    fn new(seed: u64) -> World {
        let mut random = Pcg64::seed_from_u64(seed);
        let count = 1 + random.next_u32() % 6;
        let deaths_left = [0, 0, 1, 2][random.next_u32() as usize % 4];
        let absent = match random.next_u32() % 5 {
            0 => BTreeSet::from([random.next_u32() % count, random.next_u32() % count]),
            _ => BTreeSet::new(),
        };
        let hanging = match random.next_u32() % 5 {
            0 if count > 1 => Some(random.next_u32() % count),
            _ => None,
        };
        let nodes = (0..count).map(|_| Node::default()).collect();
        World { random, now: Time::ZERO, nodes, absent, hanging, deaths_left }
    }

    fn below(&mut self, end: usize) -> usize {
        self.random.next_u32() as usize % end.max(1)
    }

    fn count(&self) -> u32 {
        self.nodes.len() as u32
    }

    /// Takes what a machine has to say and what follows from it.
    fn drain(&mut self, at: u32) {
        let count = self.nodes.len();
        let Some(mut machine) = self.nodes[at as usize].machine.take() else { return };
        while let Some((to, message)) = machine.poll_transmit() {
            match at {
                0 => self.nodes[to as usize].down.push_back(message),
                _ => self.nodes[at as usize].up.push_back(message),
            }
        }
        while let Some(event) = machine.poll_event() {
            assert_eq!(self.nodes[at as usize].end, None, "B4: {event:?} follows the end of {at}");
            match event {
                Event::Ranks(infos) => {
                    let all: Vec<u32> = (0..count as u32).map(info).collect();
                    assert_eq!(infos, all, "B3");
                    self.nodes[at as usize].may_connect = true;
                }
                Event::Go => {
                    assert!(self.nodes.iter().all(|node| node.has_connected), "B1");
                    self.nodes[at as usize].may_finish = true;
                }
                Event::Over => {
                    assert!(self.nodes.iter().all(|node| node.has_finished), "B2");
                    self.nodes[at as usize].end = Some(Ok(()));
                }
                Event::Failed(failure) => self.nodes[at as usize].end = Some(Err(failure)),
            }
        }
        self.nodes[at as usize].machine = Some(machine);
    }

    fn with(&mut self, at: u32, act: impl FnOnce(&mut Rank, Time)) {
        let now = self.now;
        if let Some(machine) = &mut self.nodes[at as usize].machine {
            act(machine, now);
        }
        self.drain(at);
    }

    /// Whoever is no rank that is awaited; rank 0 is as before.
    fn stranger(&mut self) {
        let count = self.count();
        let at = self.below(count as usize) as u32;
        let good = Join { version: VERSION, rank: at, terms: TERMS, info: 7 };
        let (from, join) = match self.below(5) {
            0 => (source(at), Join { version: VERSION + 1, ..good }),
            1 => (IpAddr::from([10, 9, 9, 9]), Join { rank: at.max(1), ..good }),
            2 => (source(at), Join { rank: count + at, ..good }),
            3 => (source(0), Join { rank: 0, ..good }),
            _ => (source(at), Join { terms: "ring:4@1G", ..good }),
        };
        let has_joined = self.nodes[at as usize].has_joined;
        let Some(machine) = &mut self.nodes[0].machine else { return };
        let refusal = machine.handle_join(from, join.clone()).expect_err("B6");
        let is_right = match &refusal {
            Refusal::Version => join.version != VERSION,
            Refusal::NoRank(rank) => *rank == 0 || *rank >= count,
            Refusal::Elsewhere(Peer { rank, ip }) => *rank == join.rank && *ip != from,
            Refusal::Taken(rank) => *rank == at && has_joined,
            Refusal::OtherTerms(terms) => *terms == join.terms && *terms != TERMS,
            Refusal::Over => false,
        };
        assert!(is_right, "B6: {refusal:?}");
        assert!(machine.poll_transmit().is_none() && machine.poll_event().is_none(), "B6");
    }

    /// Delivers the next message of a connection, or its end.
    fn deliver(&mut self, at: u32, is_up: bool) -> bool {
        let node = &mut self.nodes[at as usize];
        let queue = if is_up { &mut node.up } else { &mut node.down };
        let message = queue.pop_front();
        let (to, sender) = if is_up { (0, at) } else { (at, 0) };
        let sender_is_dead = self.nodes[sender as usize].is_dead;
        match message {
            Some(Message::Join(join)) => {
                let mut joined = None;
                self.with(0, |machine, _| joined = Some(machine.handle_join(source(at), join)));
                let node = &mut self.nodes[at as usize];
                node.has_joined = joined == Some(Ok(at));
                if let Some(Err(refusal)) = joined {
                    let reason = Reason { why: format!("{refusal:?}"), hint: String::new() };
                    node.down.push_back(Message::Refused(reason));
                }
            }
            Some(message) => self.with(to, |machine, _| machine.handle_message(sender, message)),
            None if sender_is_dead
                && !self.nodes[at as usize].is_lost
                && (to != 0 || self.nodes[at as usize].has_joined) =>
            {
                self.nodes[at as usize].is_lost = true;
                self.with(to, |machine, _| machine.handle_lost(sender, Loss::Ended));
            }
            None => return false,
        }
        true
    }

    /// Something happens; `false` if nothing could.
    fn step(&mut self) -> bool {
        let at = self.below(self.nodes.len()) as u32;
        let choice = self.below(12);
        let now = self.now;
        let count = self.count();
        let hangs = self.hanging == Some(at);
        let node = &mut self.nodes[at as usize];
        match choice {
            // Nobody reaches rank 0 before it listens; connecting again is for the users.
            0 | 1 if node.machine.is_none() && !node.is_dead && !self.absent.contains(&at) => {
                if at > 0 && self.nodes[0].machine.is_none() {
                    return false;
                }
                self.nodes[at as usize].machine = Some(rank(at, count, now));
                self.drain(at);
                true
            }
            2..=4 => self.deliver(at, true),
            5..=7 => at > 0 && self.deliver(at, false),
            8 if node.may_connect && !node.has_connected && !node.is_dead && !hangs => {
                node.has_connected = true;
                self.with(at, Bootstrap::handle_connected);
                true
            }
            9 if node.may_finish && !node.has_finished && !node.is_dead => {
                node.has_finished = true;
                self.with(at, |machine, _| machine.handle_finished());
                true
            }
            10 if self.below(8) == 0 => {
                self.stranger();
                false
            }
            11 if self.deaths_left > 0 && self.below(40) == 0 => {
                let node = &mut self.nodes[at as usize];
                if node.machine.take().is_none() {
                    return false;
                }
                node.is_dead = true;
                self.deaths_left -= 1;
                true
            }
            _ => false,
        }
    }

    /// Time passes until a rank has waited for too long.
    fn let_time_pass(&mut self) -> bool {
        let due = |node: &Node| node.machine.as_ref().and_then(Rank::poll_timeout);
        let Some(until) = self.nodes.iter().filter_map(due).min() else { return false };
        self.now = until;
        for at in 0..self.count() {
            self.with(at, Bootstrap::handle_timeout);
        }
        true
    }

    fn run(mut self) {
        let mut quiet = 0;
        loop {
            quiet = if self.step() { 0 } else { quiet + 1 };
            if quiet > 2_000 {
                if !self.let_time_pass() {
                    break;
                }
                quiet = 0;
            }
        }
        let blamed = |rank: u32| {
            let is_late = self.hanging == Some(rank);
            is_late || self.nodes[rank as usize].is_dead || self.absent.contains(&rank)
        };
        let is_well = (0..self.count()).all(|rank| !blamed(rank));
        for (at, node) in (0..).zip(&self.nodes) {
            if node.machine.is_none() {
                continue;
            }
            match node.end.as_ref().unwrap_or_else(|| panic!("B4: rank {at} never ends")) {
                Ok(()) => {}
                Err(failure) => {
                    assert!(!is_well, "B5: rank {at}: {failure:?}");
                    let named: Vec<u32> = match failure {
                        Failure::Missing(peers) => peers.iter().map(|peer| peer.rank).collect(),
                        Failure::Late(peer) | Failure::Lost(peer, Loss::Ended) => vec![peer.rank],
                        // It came when the others had given up.
                        Failure::Refused(reason) if reason.why == "Over" => continue,
                        other => panic!("B5: rank {at}: {other:?}"),
                    };
                    let is_right = named.iter().all(|rank| blamed(*rank));
                    assert!(is_right && !named.is_empty(), "B5: rank {at}: {failure:?}");
                    if matches!(failure, Failure::Missing(_)) {
                        let are_named = self.absent.iter().all(|rank| named.contains(rank));
                        assert!(are_named, "B5: rank {at}: {failure:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn ranks_find_each_other_or_learn_why_not() {
    for seed in seeds::seeds(0..3_000) {
        let test = "ranks_find_each_other_or_learn_why_not";
        let _replay = seeds::Replay { test, seed };
        World::new(seed).run();
    }
}

/// Two ranks that have met.
fn pair() -> (Rank, Rank) {
    let (mut first, mut other) = (rank(0, 2, Time::ZERO), rank(1, 2, Time::ZERO));
    let Some((0, Message::Join(join))) = other.poll_transmit() else { panic!("it joins") };
    assert_eq!(first.handle_join(source(1), join), Ok(1));
    let Some((1, ranks)) = first.poll_transmit() else { panic!("all are there") };
    other.handle_message(0, ranks);
    assert_eq!(other.poll_event(), Some(Event::Ranks(vec![info(0), info(1)])));
    assert_eq!(first.poll_event(), Some(Event::Ranks(vec![info(0), info(1)])));
    assert_eq!((first.poll_timeout(), other.poll_timeout()), (None, None), "it is their own turn");
    (first, other)
}

#[test]
fn what_does_not_come_now_ends_the_job() {
    for wrong in [Message::Go, Message::Done, Message::Bye, Message::Ranks(Vec::new())] {
        let (mut first, _) = pair();
        first.handle_message(1, wrong.clone());
        let failure = Failure::OutOfTurn(first.peer(1), format!("{wrong:?}"));
        assert_eq!(first.poll_transmit(), Some((1, Message::Failed(failure.clone()))));
        assert_eq!(first.poll_event(), Some(Event::Failed(failure)));
    }
    for wrong in [Message::Go, Message::Done, Message::Bye, Message::Connected] {
        let (_, mut other) = pair();
        other.handle_message(0, wrong.clone());
        let failure = Failure::OutOfTurn(other.peer(0), format!("{wrong:?}"));
        assert_eq!(other.poll_transmit(), Some((0, Message::Failed(failure.clone()))));
        assert_eq!(other.poll_event(), Some(Event::Failed(failure)));
    }
}

#[test]
fn a_list_of_more_or_fewer_ranks_ends_the_job() {
    for count in [0, 1, 3] {
        let mut other = rank(1, 2, Time::ZERO);
        let Some((0, Message::Join(_))) = other.poll_transmit() else { panic!("it joins") };
        let wrong = Message::Ranks((0..count).map(info).collect());
        other.handle_message(0, wrong.clone());
        let failure = Failure::OutOfTurn(other.peer(0), format!("{wrong:?}"));
        assert_eq!(other.poll_event(), Some(Event::Failed(failure)));
        assert_eq!(other.poll_event(), None);
    }
}

#[test]
fn the_first_reason_is_the_one_that_counts() {
    let (mut first, mut other) = pair();
    first.handle_lost(1, Loss::Broken("reset".to_owned()));
    first.handle_lost(1, Loss::Ended);
    let failure = Failure::Lost(first.peer(1), Loss::Broken("reset".to_owned()));
    assert_eq!(first.poll_event(), Some(Event::Failed(failure.clone())));
    assert_eq!(first.poll_event(), None);
    other.handle_message(0, Message::Failed(failure.clone()));
    assert_eq!(other.poll_transmit(), None, "rank 0 knows");
    assert_eq!(other.poll_event(), Some(Event::Failed(failure)));
}
