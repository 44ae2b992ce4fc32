//! What a manager does at a time: the requests that are under way, and what follows once they are
//! over. What answers mean is not here.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::time::Duration;

use super::election::Other;
use super::event::Summary;
use super::look::{Asked, Look};
use super::work::{How, Routed, Work};
use crate::administration::groups::MulticastTables;
use crate::discovery::{Discovery, Place};
use crate::exchange::{Discarded, Done, Exchange, Numbering, Request, Requester};
use crate::mad::{MAD_BYTES, NodeType};
use crate::setup::Setup;

/// What is under way.
#[derive(Debug, Default)]
pub(super) enum Task {
    #[default]
    Nothing,
    Discover(Discovery),
    /// The caller has the work, or gets it next.
    Route(Option<Box<Work>>),
    Write(Box<Writing>),
    Ask(Questions, Then),
}

/// A fabric that is being set up.
#[derive(Debug)]
pub(super) struct Writing {
    pub(super) setup: Setup,
    pub(super) discovery: Discovery,
    pub(super) routed: Routed,
    pub(super) how: How,
}

impl Writing {
    /// What is being set up, after a sweep that has taken so long.
    pub(super) fn summary(&self, took: Duration) -> Summary {
        let Writing { setup, discovery, routed, how } = self;
        let target = setup.target();
        let nodes = discovery.nodes().values();
        let switches = nodes.filter(|node| node.info.node_type == NodeType::Switch).count();
        Summary {
            hosts: discovery.nodes().len() - switches,
            switches,
            links: discovery.links().len() / 2,
            lids: target.lids.count(),
            engine: routed.engine,
            how: *how,
            changed: target.transition.changed,
            ordered: target.transition.ordered,
            drained: target.transition.drained,
            blocks: target.transition.blocks(),
            lanes: target.levels.lanes.count(),
            nanoseconds: took.as_nanos() as u64,
        }
    }
}

/// What follows once all questions were answered, or given up.
#[derive(Debug)]
pub(super) enum Then {
    Elect(Discovery),
    Route(Discovery),
    FinishLook(Look),
    /// The next stages of multicast tables.
    WriteGroups(VecDeque<MulticastTables>),
    /// Nothing; `SMInfo` of the master was asked for.
    Watch,
    /// Nothing; this manager takes over, or not.
    HandOver(Other),
}

/// What an answer is for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Question {
    /// A manager may run at this port.
    Manager(Place),
    /// A block of the table of the switch with this GUID.
    Block(u64),
    /// A switch may have changed.
    Look(Asked),
    /// The master may be gone.
    Master,
    /// Another manager may take over.
    HandOver,
    /// A block of multicast tables of the switch with this GUID.
    Group(u64),
}

/// Questions under way, and the answers that were not handled yet.
#[derive(Debug)]
pub(super) struct Questions {
    exchange: Exchange<Question>,
    answers: VecDeque<Done<Question>>,
}

impl Questions {
    pub(super) fn new(numbering: Numbering, requests: Vec<(Request, Question)>) -> Questions {
        let exchange = Exchange::beginning(numbering);
        let mut questions = Questions { exchange, answers: VecDeque::new() };
        questions.extend(requests);
        questions
    }

    pub(super) fn extend(&mut self, requests: Vec<(Request, Question)>) {
        for (request, question) in requests {
            self.exchange.request(request, question);
        }
    }
}

impl Requester for Questions {
    fn poll_transmit(&mut self, now: Duration) -> Option<[u8; MAD_BYTES]> {
        self.exchange.poll_transmit(now)
    }

    fn poll_timeout(&self) -> Option<Duration> {
        self.exchange.poll_timeout()
    }

    fn handle_timeout(&mut self, now: Duration) {
        self.answers.extend(self.exchange.handle_timeout(now));
    }

    fn handle_response(&mut self, bytes: &[u8]) {
        self.answers.extend(self.exchange.handle_response(bytes));
    }

    fn is_done(&self) -> bool {
        self.exchange.is_idle() && self.answers.is_empty()
    }

    fn numbering(&self) -> Numbering {
        self.exchange.numbering()
    }

    fn sent(&self) -> u64 {
        self.exchange.sent()
    }

    fn discarded(&self) -> Discarded {
        self.exchange.discarded()
    }
}

impl Task {
    /// Who asks and writes, if anybody does.
    pub(super) fn requester(&self) -> Option<&dyn Requester> {
        match self {
            Task::Nothing | Task::Route(_) => None,
            Task::Discover(discovery) => Some(discovery),
            Task::Write(writing) => Some(&writing.setup),
            Task::Ask(questions, _) => Some(questions),
        }
    }

    pub(super) fn requester_mut(&mut self) -> Option<&mut dyn Requester> {
        match self {
            Task::Nothing | Task::Route(_) => None,
            Task::Discover(discovery) => Some(discovery),
            Task::Write(writing) => Some(&mut writing.setup),
            Task::Ask(questions, _) => Some(questions),
        }
    }

    /// The next answer to be handled.
    pub(super) fn poll_answer(&mut self) -> Option<Done<Question>> {
        match self {
            Task::Ask(questions, _) => questions.answers.pop_front(),
            _ => None,
        }
    }
}
