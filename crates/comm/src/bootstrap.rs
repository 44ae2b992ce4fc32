//! How the ranks of a job find each other, begin together, and learn of each other's end.
//!
//! All connect to rank 0, in any order. When all have come and want the same, rank 0 tells each
//! what all have said of themselves, such as their queue pairs; each connects its own, says so, and
//! all are told to go. The connections stay: when a rank ends early, rank 0 notices and tells the
//! others who and why. At the end rank 0 waits until all are done, so that nobody takes away queue
//! pairs that others still need.
//!
//! Whoever reaches rank 0 can say that he is a rank, so he must come from that rank's address;
//! nobody can make the others send to a third.
//!
//! [`Bootstrap`] is one rank of it. Inputs are its `handle_*`, in any order; after each, take the
//! messages to send ([`poll_transmit`](Bootstrap::poll_transmit)) and what follows for the rank
//! ([`poll_event`](Bootstrap::poll_event)) until there are none. `T` are the terms, which have to
//! be the same at all ranks; `I` is what a rank tells of itself, which nothing in here looks into.
//!
//! Connections to those who have not said who they are, how messages are written, and what a reader
//! may try against a failure belong to the users.

use alloc::collections::VecDeque;
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;
use core::net::IpAddr;

use roce::{Duration, Time};

/// How long others may take to connect their queue pairs once all are there.
const PREPARE_LIMIT: Duration = Duration::from_millis(30_000);

/// What ranks tell each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message<T, I> {
    /// A rank introduces itself to rank 0.
    Join(Join<T, I>),
    /// Rank 0 does not take it.
    Refused(Reason),
    /// What all ranks said of themselves, by rank.
    Ranks(Vec<I>),
    /// This rank has connected its queue pairs.
    Connected,
    /// All have.
    Go,
    /// This rank needs the others no more.
    Done,
    /// No rank does.
    Bye,
    /// The job ends early.
    Failed(Failure),
}

/// A rank introduces itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Join<T, I> {
    /// Of the messages.
    pub version: u32,
    /// Which rank it is.
    pub rank: u32,
    /// What it takes the job for.
    pub terms: T,
    /// What the others need to know of it.
    pub info: I,
}

/// Why a rank was refused or has ended, in words of its own or of another rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason {
    /// What happened, to whom.
    pub why: String,
    /// The next thing to try.
    pub hint: String,
}

/// A rank and its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The rank.
    pub rank: u32,
    /// Where it is.
    pub ip: IpAddr,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} ({})", self.rank, self.ip)
    }
}

/// How a connection was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Loss {
    /// The other side has closed it.
    Ended,
    /// What it says is no message.
    Garbled(String),
    /// Something else.
    Broken(String),
}

/// Why rank 0 does not take a newcomer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal<T> {
    /// Its messages are others.
    Version,
    /// There is no such rank, or it is rank 0 itself.
    NoRank(u32),
    /// The rank has another address.
    Elsewhere(Peer),
    /// Another one is that rank.
    Taken(u32),
    /// It takes the job for this.
    OtherTerms(T),
    /// The job has ended already.
    Over,
}

/// Why a rank ends early.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// These ranks did not come to rank 0 in time.
    Missing(Vec<Peer>),
    /// A rank does not say in time what it is to say next.
    Late(Peer),
    /// The connection to a rank.
    Lost(Peer, Loss),
    /// A rank said something that does not come now.
    OutOfTurn(Peer, String),
    /// Rank 0 does not take this one.
    Refused(Reason),
    /// This rank or another one, for a reason of its own.
    Told(Reason),
}

/// What follows for the rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event<I> {
    /// All have come: what each said of itself, by rank. Connect queue pairs, then call
    /// [`handle_connected`](Bootstrap::handle_connected).
    Ranks(Vec<I>),
    /// All have connected: messages may be sent.
    Go,
    /// No rank needs another any more.
    Over,
    /// The job ends early. Nothing follows.
    Failed(Failure),
}

/// What a rank needs to take part.
#[derive(Clone, Debug)]
pub struct Config<T> {
    /// Which one this is.
    pub rank: u32,
    /// Addresses by rank.
    pub peers: Vec<IpAddr>,
    /// Version of the messages, the same at all ranks.
    pub version: u32,
    /// What has to be the same at all ranks.
    pub terms: T,
    /// How long ranks wait for each other at the beginning.
    pub wait: Duration,
}

/// How far a rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Absent,
    Joined,
    Connected,
    Done,
}

/// How far the job is, as this rank knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Gathering,
    Preparing,
    Running,
    /// At its end, or failed.
    Over,
}

/// One rank of a bootstrap; see the module's text.
#[derive(Debug)]
pub struct Bootstrap<T, I> {
    config: Config<T>,
    stage: Stage,
    /// By rank at rank 0; elsewhere only its own is known.
    steps: Vec<Step>,
    /// At rank 0, by rank: what has come.
    infos: Vec<Option<I>>,
    until: Option<Time>,
    transmits: VecDeque<(u32, Message<T, I>)>,
    events: VecDeque<Event<I>>,
}

impl<T, I> Bootstrap<T, I>
where
    T: Clone + fmt::Debug + PartialEq,
    I: Clone + fmt::Debug,
{
    /// A rank that begins to wait for the others, and tells them this of itself. Its rank is one of
    /// those in the configuration.
    pub fn new(config: Config<T>, info: I, now: Time) -> Bootstrap<T, I> {
        let (own, count) = (config.rank as usize, config.peers.len());
        let (mut steps, mut infos) = (vec![Step::Absent; count], vec![None; count]);
        steps[own] = Step::Joined;
        let (mut transmits, mut until) = (VecDeque::new(), now + config.wait);
        match own {
            0 => infos[0] = Some(info),
            // Rank 0 gives up by itself, and may have begun to wait later.
            _ => {
                until += PREPARE_LIMIT;
                let Config { rank, version, ref terms, .. } = config;
                let join = Join { version, rank, terms: terms.clone(), info };
                transmits.push_back((0, Message::Join(join)));
            }
        }
        let (stage, events, until) = (Stage::Gathering, VecDeque::new(), Some(until));
        let mut own = Bootstrap { config, stage, steps, infos, until, transmits, events };
        own.gather();
        own
    }

    /// A newcomer introduces itself to rank 0. Returns whose connection this is from now on; one
    /// that is refused is told why by the caller.
    ///
    /// # Errors
    /// Why it is not taken. Nothing has changed then.
    pub fn handle_join(&mut self, from: IpAddr, join: Join<T, I>) -> Result<u32, Refusal<T>> {
        let Join { version, rank, terms, info } = join;
        if version != self.config.version {
            return Err(Refusal::Version);
        }
        let is_known = self.is_first() && rank > 0;
        let Some(&ip) = self.config.peers.get(rank as usize).filter(|_| is_known) else {
            return Err(Refusal::NoRank(rank));
        };
        if ip.to_canonical() != from.to_canonical() {
            return Err(Refusal::Elsewhere(Peer { rank, ip }));
        }
        if self.steps[rank as usize] != Step::Absent {
            return Err(Refusal::Taken(rank));
        }
        if terms != self.config.terms {
            return Err(Refusal::OtherTerms(terms));
        }
        if self.stage == Stage::Over {
            return Err(Refusal::Over);
        }
        self.steps[rank as usize] = Step::Joined;
        self.infos[rank as usize] = Some(info);
        self.gather();
        Ok(rank)
    }

    /// A rank says something: at rank 0 one that has joined, elsewhere rank 0.
    pub fn handle_message(&mut self, from: u32, message: Message<T, I>) {
        if self.stage == Stage::Over {
            return;
        }
        let (own, at) = (self.config.rank as usize, from as usize);
        match (self.is_first(), self.stage, message) {
            (_, _, Message::Failed(failure)) => self.end(failure, self.is_first()),
            (true, Stage::Preparing, Message::Connected) if self.steps[at] == Step::Joined => {
                self.steps[at] = Step::Connected;
                self.go();
            }
            (true, Stage::Running, Message::Done) if self.steps[at] == Step::Connected => {
                self.steps[at] = Step::Done;
                self.conclude();
            }
            (false, Stage::Gathering, Message::Ranks(infos))
                if infos.len() == self.config.peers.len() =>
            {
                (self.stage, self.until) = (Stage::Preparing, None);
                self.events.push_back(Event::Ranks(infos));
            }
            (false, Stage::Gathering, Message::Refused(reason)) => {
                self.end(Failure::Refused(reason), false);
            }
            (false, Stage::Preparing, Message::Go) if self.steps[own] == Step::Connected => {
                (self.stage, self.until) = (Stage::Running, None);
                self.events.push_back(Event::Go);
            }
            (false, Stage::Running, Message::Bye) if self.steps[own] == Step::Done => {
                self.stage = Stage::Over;
                self.events.push_back(Event::Over);
            }
            (_, _, other) => {
                self.end(Failure::OutOfTurn(self.peer(from), format!("{other:?}")), true);
            }
        }
    }

    /// The connection to a rank is lost.
    pub fn handle_lost(&mut self, from: u32, loss: Loss) {
        self.end(Failure::Lost(self.peer(from), loss), self.is_first());
    }

    /// The time of [`poll_timeout`](Bootstrap::poll_timeout) has passed.
    pub fn handle_timeout(&mut self, now: Time) {
        if self.until.is_none_or(|until| now < until) {
            return;
        }
        let behind = |step| {
            let ranks = (0..).zip(&self.steps).filter(move |(_, at)| **at < step);
            ranks.map(|(rank, _)| self.peer(rank))
        };
        let failure = match (self.is_first(), self.stage) {
            (true, Stage::Gathering) => Failure::Missing(behind(Step::Joined).collect()),
            (true, _) => Failure::Late(behind(Step::Connected).next().unwrap_or(self.peer(0))),
            (false, _) => Failure::Late(self.peer(0)),
        };
        self.end(failure, true);
    }

    /// This rank has connected its queue pairs, and is ready for messages.
    pub fn handle_connected(&mut self, now: Time) {
        let own = self.config.rank as usize;
        if self.stage != Stage::Preparing || self.steps[own] != Step::Joined {
            return;
        }
        self.steps[own] = Step::Connected;
        match self.is_first() {
            true => {
                self.until = Some(now + PREPARE_LIMIT);
                self.go();
            }
            // Rank 0 waits for the slowest, and may have begun later.
            false => {
                self.until = Some(now + PREPARE_LIMIT + PREPARE_LIMIT);
                self.transmits.push_back((0, Message::Connected));
            }
        }
    }

    /// This rank needs the others no more; they may still need it.
    pub fn handle_finished(&mut self) {
        let own = self.config.rank as usize;
        if self.stage != Stage::Running || self.steps[own] != Step::Connected {
            return;
        }
        self.steps[own] = Step::Done;
        match self.is_first() {
            true => self.conclude(),
            false => self.transmits.push_back((0, Message::Done)),
        }
    }

    /// This rank ends early, for a reason of its own.
    pub fn handle_failure(&mut self, reason: Reason) {
        self.end(Failure::Told(reason), true);
    }

    /// The next message to send, and to which rank.
    pub fn poll_transmit(&mut self) -> Option<(u32, Message<T, I>)> {
        self.transmits.pop_front()
    }

    /// The next thing that follows for this rank.
    pub fn poll_event(&mut self) -> Option<Event<I>> {
        self.events.pop_front()
    }

    /// When this rank has waited for too long.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.until
    }

    /// A rank, as failures name it.
    pub fn peer(&self, rank: u32) -> Peer {
        Peer { rank, ip: self.config.peers[rank as usize] }
    }

    fn is_first(&self) -> bool {
        self.config.rank == 0
    }

    fn have_all(&self, step: Step) -> bool {
        self.steps.iter().all(|at| *at >= step)
    }

    /// Tells everybody who is there, once all are.
    fn gather(&mut self) {
        if !self.is_first() || !self.have_all(Step::Joined) {
            return;
        }
        let infos: Vec<I> = self.infos.iter().flatten().cloned().collect();
        (self.stage, self.until) = (Stage::Preparing, None);
        self.tell_all(&Message::Ranks(infos.clone()));
        self.events.push_back(Event::Ranks(infos));
    }

    fn go(&mut self) {
        if self.have_all(Step::Connected) {
            (self.stage, self.until) = (Stage::Running, None);
            self.tell_all(&Message::Go);
            self.events.push_back(Event::Go);
        }
    }

    fn conclude(&mut self) {
        if self.have_all(Step::Done) {
            self.stage = Stage::Over;
            self.tell_all(&Message::Bye);
            self.events.push_back(Event::Over);
        }
    }

    /// Ends early, and tells those who are connected why if they cannot know.
    fn end(&mut self, failure: Failure, is_news: bool) {
        if self.stage == Stage::Over {
            return;
        }
        (self.stage, self.until) = (Stage::Over, None);
        match self.is_first() {
            true => self.tell_all(&Message::Failed(failure.clone())),
            false if is_news => {
                self.transmits.push_back((0, Message::Failed(failure.clone())));
            }
            false => {}
        }
        self.events.push_back(Event::Failed(failure));
    }

    /// At rank 0: to all others that have joined.
    fn tell_all(&mut self, message: &Message<T, I>) {
        let joined = (0..).zip(&self.steps).skip(1).filter(|(_, step)| **step > Step::Absent);
        self.transmits.extend(joined.map(|(rank, _)| (rank, message.clone())));
    }
}
