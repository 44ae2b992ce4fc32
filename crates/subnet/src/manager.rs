//! A long-running subnet manager: it discovers a fabric, sets it up, watches it, and gives way to
//! better managers.
//!
//! A state machine without a clock or a socket; [`Manager`] has the order of calls.
//!
//! | task | begins | ends with |
//! |---|---|---|
//! | discover (heavy sweep) | at first, by a change, when the last one failed | nodes, links, ports |
//! | ask | ports that say a manager runs there | the election |
//! | read | tables of switches that another manager wrote | what they hold |
//! | route | [`Work`], which the caller does | LIDs, tables, steps |
//! | write | [`Setup`] | a fabric that is set up |
//! | groups | members of multicast groups that came or went, another fabric | multicast tables |
//! | look (light sweep) | by a trap, and at an interval | links that are gone, or a heavy sweep |
//!
//! Links that are gone are rerouted at once; a heavy sweep follows only where that is not all.
//! Whatever fails leaves the last good tables as they are, and a node that stays silent behind a
//! link that is up keeps its place in them.
//!
//! # Election
//!
//! The master is the manager with the highest priority, among equals that with the lowest GUID (IBA
//! 14.4.1). A standby polls the master and takes its place when it stays silent. A master that
//! finds a standby of higher priority, or a master that goes before it, hands over.
//!
//! # What others can do to it
//!
//! Whoever may send to QP 0 (root of any node) can send traps and `SMInfo`. A trap makes it look at
//! one switch, and after traps that were wrong ever less often. A control message is taken from
//! nodes alone that were found to be managers, with the same SM_Key. What it has to send is
//! bounded, and so is what it reports.

pub mod event;
mod look;
pub mod work;

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::time::Duration;

use crate::administration::groups::{self, Groups, MulticastTables};
use crate::administration::inform::{Happening, InformCounters, Subscriptions};
use crate::administration::rmpp::{Client, RmppCounters, Sender};
use crate::administration::{self, Directory, Gid, Reply, Status, Subnet};
use crate::discovery::{Discovery, Place};
use crate::exchange::{Done as Finished, Exchange, Fate, Numbering, Request, Requester};
use crate::levels::Levels;
use crate::lids::{LAST_LID, Lids};
use crate::mad::{
    Attribute, DIRECTED_ROUTE, DirectedRoute, KeyGuard, LFT_BLOCK, MAD_BYTES, NodeType, PortInfo,
    PortState, linear_top, multicast_capacity,
};
use crate::partitions::{Memberships, Partitions};
use crate::setup::{Failure, Ports, Setup, SetupComplaint, Target};
use crate::sm_info::{
    ADMINISTRATION, CAPABILITY_CHANGED, Control, Header, LID_ROUTED, NOTICE, Notice, PORT_CHANGED,
    SmInfo, Standing, WRONG_KEY, method, respond, smp_data,
};
use event::{Event, Refusal, Summary, Trouble, Why};
pub use look::Change;
use look::Look;
use topology::routes::Engine;
use work::{Done, How, Routed, Work};

/// Most datagrams that wait to be sent beside the requests of a task.
const MAX_REPLIES: usize = 256;

/// Most events that wait to be reported.
const MAX_EVENTS: usize = 256;

/// Rest after a trap that was wrong; it doubles up to [`MAX_TRAP_REST`].
const TRAP_REST: Duration = Duration::from_millis(50);

/// The longest rest between looks for traps.
const MAX_TRAP_REST: Duration = Duration::from_secs(5);

/// Rest after multicast tables were written: however fast members come and go, the fabric is looked
/// at in between.
const GROUPS_REST: Duration = Duration::from_millis(50);

/// Most managers with another SM_Key that are reported.
const MAX_FOREIGN: usize = 64;

/// Rest after a report of a control message that was refused.
const REFUSAL_REST: Duration = Duration::from_secs(1);

/// Sweeps in turn at which a node is silent when it is told how to map service levels, and taken
/// not to do that then. One that is silent at all else, too, is not in the way: it is left out of
/// the fabric.
const MAX_SILENCES: u32 = 3;

/// Most ports that are away and whose LIDs are remembered: as many as there are LIDs.
const MAX_ABSENT: usize = LAST_LID as usize;

/// Before a heavy sweep that failed is repeated; it doubles up to the interval of light sweeps.
const RETRY: Duration = Duration::from_millis(500);

/// Intervals of light sweeps in which another master may give way before its part of the fabric is
/// taken: it finds this one at its next light sweep.
const RIVAL_INTERVALS: u32 = 3;

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

/// Where a datagram goes to, or came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// By the route in itself.
    Directed,
    /// A queue pair at a LID.
    Lid {
        /// The LID.
        lid: u16,
        /// The number of the queue pair.
        queue_pair: u32,
        /// The service level.
        service_level: u8,
    },
}

impl From<Client> for Peer {
    fn from(client: Client) -> Peer {
        let Client { lid, queue_pair, service_level } = client;
        Peer::Lid { lid, queue_pair, service_level }
    }
}

/// A datagram and its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// To whom, or from whom.
    pub peer: Peer,
    /// Its bytes.
    pub mad: [u8; MAD_BYTES],
    /// How many of them are sent: a table of subnet administration ends with its last record.
    pub len: usize,
}

/// What has happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Requests sent, repeated ones too.
    pub sent: u64,
    /// Heavy sweeps that were begun.
    pub heavy_sweeps: u64,
    /// Light sweeps, of all switches.
    pub light_sweeps: u64,
    /// Looks at switches that traps came from.
    pub trap_looks: u64,
    /// Sweeps after which the fabric kept its last tables.
    pub failed_sweeps: u64,
    /// Traps of switches and ports that are known.
    pub traps: u64,
    /// Traps that were not heeded: of nobody that is known, or of another kind.
    pub ignored_traps: u64,
    /// Control messages of other managers that were refused.
    pub refused_controls: u64,
    /// Traps of ports that refused an SMP with a wrong M_Key.
    pub wrong_keys: u64,
    /// Datagrams that are none, or of no kind that is handled.
    pub malformed: u64,
    /// Responses that nobody waited for.
    pub unasked: u64,
    /// Responses for another attribute, port or route than their requests.
    pub mismatched: u64,
    /// Replies that were not sent, since too many waited.
    pub dropped_replies: u64,
    /// Events that were not reported, for the same reason.
    pub dropped_events: u64,
    /// Requests of subnet administration that were answered, refusals too.
    pub answered: u64,
    /// Those that were not, since this manager is not master, or has not set up a fabric.
    pub unanswered: u64,
    /// Those that were refused since there was no room for them, or for their response.
    pub without_room: u64,
    /// Blocks of multicast tables that were not written.
    pub failed_groups: u64,
    /// Times that it became master.
    pub terms: u64,
}

/// A fabric that is set up.
#[derive(Debug)]
pub struct Fabric {
    discovery: Discovery,
    routed: Routed,
    lids: Lids,
    directory: Directory,
    /// The tables that it was set up to, by the GUID of the switch, also while the next are
    /// computed and written.
    tables: BTreeMap<u64, Arc<Vec<u8>>>,
    /// Of switches, by GUID.
    numbers: BTreeMap<u64, u32>,
    memberships: Option<Memberships>,
    /// Of the manager's port.
    own_lid: u16,
}

impl Fabric {
    /// The lower of the two ends of a link.
    fn first_end(&self, end: Place) -> Place {
        self.discovery.links().get(&end).map_or(end, |far| end.min(*far))
    }

    /// Who has which LID.
    pub fn lids(&self) -> &Lids {
        &self.lids
    }

    /// The service levels of paths.
    pub fn levels(&self) -> &Levels {
        &self.routed.levels
    }
}

/// What is under way.
#[derive(Debug)]
enum Task {
    Nothing,
    Discover(Discovery),
    Ask(Discovery, Exchange<Place>),
    Read(Discovery, Exchange<u64>),
    /// The caller has the work, or gets it next.
    Route(Option<Box<Work>>),
    Write(Box<Writing>),
    Look(Look),
    /// `SMInfo` of the master.
    Poll(Exchange<()>),
    HandOver(Exchange<Other>),
    /// Multicast forwarding tables: those of the stage that is written, and the next stages.
    Groups(Exchange<()>, VecDeque<MulticastTables>),
}

/// A fabric that is being set up.
#[derive(Debug)]
struct Writing {
    setup: Setup,
    discovery: Discovery,
    routed: Routed,
    how: How,
}

/// Another manager.
#[derive(Clone, Copy, Debug)]
struct Other {
    info: SmInfo,
    route: DirectedRoute,
}

/// The master that a standby watches.
#[derive(Clone, Copy, Debug)]
struct Master {
    other: Other,
    /// Polls without a response.
    misses: u32,
}

/// A manager of higher priority that has not taken over.
#[derive(Clone, Copy, Debug)]
struct Unwilling {
    guid: u64,
    /// It is not asked again before this time,
    until: Duration,
    /// nor before a fabric was set up.
    has_set_up: bool,
}

/// See the module's text.
///
/// # Order of calls
///
/// `poll_event` and `poll_transmit` until they return `None`; the work of `poll_work`, if there is
/// some, whose outcome goes to `handle_work`; then `handle_datagram` for what arrived, and
/// `handle_timeout` once the time has come that `poll_timeout` returned; again from the beginning.
/// Time never goes back.
#[derive(Debug)]
pub struct Manager {
    config: Config,
    standing: Standing,
    task: Task,
    numbering: Numbering,
    /// The GUID of its port, once that has responded.
    guid: Option<u64>,
    /// Other managers that the last heavy sweep found.
    others: BTreeMap<Place, Other>,
    master: Option<Master>,
    /// The master has handed over.
    is_promoted: bool,
    /// It is master, and has not set the fabric up yet.
    is_new: bool,
    /// Why it looks for the master.
    why: Option<Why>,
    /// Who has not taken over.
    unwilling: Option<Unwilling>,
    /// Another master, which goes after it, by its GUID, and until when it may give way.
    rival: Option<(u64, Duration)>,
    /// GUIDs of managers with another SM_Key that were reported.
    foreign: BTreeSet<u64>,
    /// No refusal is reported before this time, and so many were not.
    refusal_at: Duration,
    unreported: u64,
    /// No sweep for managers that are not known before this time.
    stranger_at: Duration,
    fabric: Option<Fabric>,
    /// Tables that switches hold, by GUID.
    held: BTreeMap<u64, Arc<Vec<u8>>>,
    /// What ports have got beside their LIDs.
    ports: Ports,
    partitions: Option<Partitions>,
    /// GUIDs of nodes that did not take them, and of those that were silent, at how many sweeps in
    /// turn.
    without_levels: BTreeSet<u64>,
    silent_levels: BTreeMap<u64, u32>,
    /// GUIDs of switches of whose tables a block could not be read.
    unreadable: BTreeSet<u64>,
    roots: Vec<u64>,
    lids: BTreeMap<Place, u16>,
    /// Whether `lids` has changed since it was last taken.
    lids_changed: bool,
    groups: Groups,
    /// Tables of subnet administration that are under way.
    sender: Sender,
    subscriptions: Subscriptions,
    /// Multicast forwarding tables that switches hold, and GUIDs of switches of which that is not
    /// known.
    trees: MulticastTables,
    unknown_trees: BTreeSet<u64>,
    /// Multicast tables are not written before this time, and so long after blocks of them that
    /// were not written.
    groups_at: Duration,
    groups_retry: Duration,
    /// Of the tables that are being written: the first block that was not, and how many.
    failed_blocks: Option<(String, usize)>,
    /// Switches that traps came from.
    suspects: BTreeSet<u64>,
    /// A heavy sweep is due at this time.
    heavy_at: Option<Duration>,
    /// A light sweep, or a poll of the master, is due at this time.
    next_at: Duration,
    /// No look for a trap before this time.
    trap_at: Duration,
    trap_rest: Duration,
    retry: Duration,
    began: Duration,
    count: u32,
    replies: VecDeque<Datagram>,
    events: VecDeque<Event>,
    counters: Counters,
}

impl Manager {
    /// One that has not begun. `lids` are those that ports had before, `transaction` the first
    /// number of its requests: a responder may still have responses to those of a process before
    /// it.
    pub fn new(config: Config, lids: BTreeMap<Place, u16>, transaction: u32) -> Manager {
        Manager {
            config,
            standing: Standing::Discovering,
            task: Task::Nothing,
            numbering: Numbering { next: transaction.max(1), m_key: config.m_key },
            guid: None,
            others: BTreeMap::new(),
            master: None,
            is_promoted: false,
            is_new: true,
            why: None,
            unwilling: None,
            rival: None,
            foreign: BTreeSet::new(),
            refusal_at: Duration::ZERO,
            unreported: 0,
            stranger_at: Duration::ZERO,
            fabric: None,
            held: BTreeMap::new(),
            ports: Ports {
                guard: config.guard.map(|(protection, lease_s)| KeyGuard {
                    key: config.m_key,
                    protection,
                    lease_s,
                }),
                ..Ports::default()
            },
            partitions: None,
            without_levels: BTreeSet::new(),
            silent_levels: BTreeMap::new(),
            unreadable: BTreeSet::new(),
            roots: Vec::new(),
            lids,
            lids_changed: false,
            groups: Groups::default(),
            sender: Sender::default(),
            subscriptions: Subscriptions::default(),
            trees: MulticastTables::new(),
            unknown_trees: BTreeSet::new(),
            groups_at: Duration::ZERO,
            groups_retry: RETRY,
            failed_blocks: None,
            suspects: BTreeSet::new(),
            heavy_at: Some(Duration::ZERO),
            next_at: Duration::ZERO,
            trap_at: Duration::ZERO,
            trap_rest: TRAP_REST,
            retry: RETRY,
            began: Duration::ZERO,
            count: 0,
            replies: VecDeque::new(),
            events: VecDeque::new(),
            counters: Counters::default(),
        }
    }

    /// With roots for Up*/Down*, by their GUIDs, in place of those that it finds.
    pub fn with_roots(mut self, roots: Vec<u64>) -> Manager {
        self.roots = roots;
        self
    }

    /// With partitions; switches discard packets of others if they are to enforce that.
    pub fn with_partitions(mut self, partitions: Partitions, enforces: bool) -> Manager {
        self.groups = Groups::with_broadcasts(partitions.broadcasts());
        self.ports.enforces = enforces;
        self.partitions = Some(partitions);
        self
    }

    // ---- outputs --------------------------------------------------------------------------------

    /// The next datagram to send.
    pub fn poll_transmit(&mut self, now: Duration) -> Option<Datagram> {
        if let Some(reply) = self.replies.pop_front() {
            return Some(reply);
        }
        if let Some((client, mad, len)) = self.sender.poll_transmit(now) {
            return Some(Datagram { peer: Peer::from(client), mad, len });
        }
        if let Some(report) = self.poll_report(now) {
            return Some(report);
        }
        self.begin(now);
        // What has nothing to ask is over at once.
        self.advance(now);
        let mad = match &mut self.task {
            Task::Nothing | Task::Route(_) => None,
            Task::Discover(discovery) => discovery.poll_transmit(now),
            Task::Ask(_, exchange) => exchange.poll_transmit(now),
            Task::HandOver(exchange) => exchange.poll_transmit(now),
            Task::Groups(exchange, _) => exchange.poll_transmit(now),
            Task::Read(_, exchange) => exchange.poll_transmit(now),
            Task::Write(writing) => writing.setup.poll_transmit(now),
            Task::Look(look) => look.exchange.poll_transmit(now),
            Task::Poll(exchange) => exchange.poll_transmit(now),
        };
        self.counters.sent += u64::from(mad.is_some());
        self.count = self.count.wrapping_add(u32::from(mad.is_some()));
        Some(Datagram { peer: Peer::Directed, mad: mad?, len: MAD_BYTES })
    }

    /// The next report to a subscriber.
    fn poll_report(&mut self, now: Duration) -> Option<Datagram> {
        if !self.subscriptions.has_work() {
            return None;
        }
        let own = (self.own_lid(), Gid::of(self.guid.unwrap_or(0)));
        let (client, mad) = self.subscriptions.poll_transmit(now, own)?;
        Some(Datagram { peer: Peer::from(client), mad, len: MAD_BYTES })
    }

    /// The fabric to be routed, if that is due.
    pub fn poll_work(&mut self) -> Option<Work> {
        match &mut self.task {
            Task::Route(work) => work.take().map(|work| *work),
            _ => None,
        }
    }

    /// What has happened.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// When [`handle_timeout`](Manager::handle_timeout) is wanted next; `None` while only the
    /// outcome of work is awaited.
    pub fn poll_timeout(&self) -> Option<Duration> {
        let tables = [self.sender.poll_timeout(), self.subscriptions.poll_timeout()];
        tables.into_iter().chain([self.task_timeout()]).flatten().min()
    }

    fn task_timeout(&self) -> Option<Duration> {
        match &self.task {
            Task::Nothing => self.due(),
            Task::Route(_) => None,
            Task::Discover(discovery) => discovery.poll_timeout(),
            Task::Ask(_, exchange) => exchange.poll_timeout(),
            Task::HandOver(exchange) => exchange.poll_timeout(),
            Task::Groups(exchange, _) => exchange.poll_timeout(),
            Task::Read(_, exchange) => exchange.poll_timeout(),
            Task::Write(writing) => writing.setup.poll_timeout(),
            Task::Look(look) => look.exchange.poll_timeout(),
            Task::Poll(exchange) => exchange.poll_timeout(),
        }
    }

    /// When a task begins, if none is under way.
    fn due(&self) -> Option<Duration> {
        if self.standing == Standing::NotActive {
            return None;
        }
        let for_trap = (!self.suspects.is_empty()).then_some(self.trap_at);
        let for_groups = self.has_group_changes().then_some(self.groups_at);
        // Where there is no fabric to look at, the next heavy sweep keeps its backoff.
        let has_regular = self.fabric.is_some() || self.standing == Standing::Standby;
        let regular = (has_regular || self.heavy_at.is_none()).then_some(self.next_at);
        let dues = [self.heavy_at, regular, for_trap, for_groups];
        dues.into_iter().flatten().min()
    }

    /// LIDs by port, to be remembered, if they have changed since the last call.
    pub fn take_lids(&mut self) -> Option<&BTreeMap<Place, u16>> {
        core::mem::take(&mut self.lids_changed).then_some(&self.lids)
    }

    /// Its state.
    pub fn standing(&self) -> Standing {
        self.standing
    }

    /// What has happened so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// What happened to tables of subnet administration.
    pub fn tables(&self) -> RmppCounters {
        self.sender.counters()
    }

    /// How many subscribers there are to what happens, and what became of reports to them.
    pub fn subscriptions(&self) -> (usize, InformCounters) {
        (self.subscriptions.count(), self.subscriptions.counters())
    }

    /// The GUID of its port, once that is known.
    pub fn guid(&self) -> Option<u64> {
        self.guid
    }

    /// The fabric that it has set up.
    pub fn fabric(&self) -> Option<&Fabric> {
        self.fabric.as_ref()
    }

    /// Whether it waits for the time to pass, or for others.
    pub fn is_idle(&self) -> bool {
        matches!(self.task, Task::Nothing) && self.replies.is_empty()
    }

    // ---- inputs ---------------------------------------------------------------------------------

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Duration) {
        self.sender.handle_timeout(now);
        self.subscriptions.handle_timeout(now);
        match &mut self.task {
            Task::Nothing | Task::Route(_) => {}
            Task::Discover(discovery) => discovery.handle_timeout(now),
            Task::Write(writing) => writing.setup.handle_timeout(now),
            Task::Ask(_, exchange) => {
                for done in exchange.handle_timeout(now) {
                    self.handle_manager(&done);
                }
            }
            Task::Read(_, exchange) => {
                for done in exchange.handle_timeout(now) {
                    self.handle_block(&done);
                }
            }
            Task::Look(look) => {
                for done in look.exchange.handle_timeout(now) {
                    self.handle_look(&done);
                }
            }
            Task::Poll(exchange) => {
                for done in exchange.handle_timeout(now) {
                    self.handle_poll(&done, now);
                }
            }
            Task::HandOver(exchange) => {
                for done in exchange.handle_timeout(now) {
                    self.handle_handover(&done, now);
                }
            }
            Task::Groups(exchange, _) => {
                for done in exchange.handle_timeout(now) {
                    self.handle_group_block(&done);
                }
            }
        }
        self.advance(now);
    }

    /// A datagram has arrived.
    pub fn handle_datagram(&mut self, now: Duration, peer: Peer, bytes: &[u8]) {
        let Ok(mad) = <&[u8; MAD_BYTES]>::try_from(bytes) else {
            self.counters.malformed += 1;
            return;
        };
        let Some(header) = Header::parse(mad) else {
            self.counters.malformed += 1;
            return;
        };
        if header.class == ADMINISTRATION {
            return self.administer(now, peer, mad);
        }
        if !header.is_subnet_management() {
            self.counters.malformed += 1;
            return;
        }
        let is_sm_info = header.attribute == Attribute::SmInfo.id();
        match header.method {
            code if code & method::RESPONSE != 0 => self.handle_response(now, bytes),
            method::GET | method::SET if is_sm_info => self.handle_sm_info(now, peer, &header, mad),
            method::TRAP if header.class == LID_ROUTED && header.attribute == NOTICE => {
                self.handle_trap(now, peer, mad);
            }
            method::TRAP_REPRESS => {}
            _ => self.counters.malformed += 1,
        }
        self.advance(now);
    }

    /// The work is done.
    pub fn handle_work(&mut self, now: Duration, done: Done) {
        if !matches!(self.task, Task::Route(None)) {
            return;
        }
        self.task = Task::Nothing;
        if self.standing != Standing::Master {
            return;
        }
        self.held = done.held;
        match done.result {
            Ok((routed, target, how)) => {
                let discovery = done.discovery;
                // A new manager knows no members of groups; neither does it know those that were
                // cut off.
                let known = self.fabric.as_ref().filter(|_| !self.is_new);
                let is_new = |place| known.is_none_or(|fabric| fabric.lids.of(place).is_none());
                let (channels, numbering) = (&routed.channels, self.numbering);
                let partitions = self.partitions.as_ref();
                self.ports.memberships =
                    partitions.map(|partitions| partitions.members(&discovery, &target.lids));
                let setup = Setup::to(&discovery, channels, target, &self.ports, numbering, is_new);
                let writing = Writing { setup, discovery, routed, how };
                self.task = Task::Write(Box::new(writing));
            }
            Err(why) => self.fail(now, Trouble::Unroutable(why)),
        }
        self.advance(now);
    }

    fn handle_response(&mut self, now: Duration, bytes: &[u8]) {
        match &mut self.task {
            Task::Nothing | Task::Route(_) => self.counters.unasked += 1,
            Task::Discover(discovery) => discovery.handle_response(bytes),
            Task::Write(writing) => writing.setup.handle_response(bytes),
            Task::Ask(_, exchange) => {
                if let Some(done) = exchange.handle_response(bytes) {
                    self.handle_manager(&done);
                }
            }
            Task::Read(_, exchange) => {
                if let Some(done) = exchange.handle_response(bytes) {
                    self.handle_block(&done);
                }
            }
            Task::Look(look) => {
                if let Some(done) = look.exchange.handle_response(bytes) {
                    self.handle_look(&done);
                }
            }
            Task::Poll(exchange) => {
                if let Some(done) = exchange.handle_response(bytes) {
                    self.handle_poll(&done, now);
                }
            }
            Task::HandOver(exchange) => {
                if let Some(done) = exchange.handle_response(bytes) {
                    self.handle_handover(&done, now);
                }
            }
            Task::Groups(exchange, _) => {
                if let Some(done) = exchange.handle_response(bytes) {
                    self.handle_group_block(&done);
                }
            }
        }
    }

    // ---- the course of a sweep ------------------------------------------------------------------

    /// Begins what is due, if nothing is under way.
    fn begin(&mut self, now: Duration) {
        let is_due = self.due().is_some_and(|due| due <= now);
        if !matches!(self.task, Task::Nothing) || !is_due {
            return;
        }
        if self.heavy_at.is_some_and(|at| at <= now) {
            return self.begin_heavy(now);
        }
        match (self.standing, self.master) {
            (Standing::Standby, Some(master)) => self.begin_poll(now, master),
            (Standing::Master, _) if self.is_look_due(now) => self.begin_look(now),
            (Standing::Master, _) => self.begin_groups(),
            // Whoever has neither a master nor a term looks for both.
            _ => self.begin_heavy(now),
        }
    }

    /// For a trap, or since the interval is over.
    fn is_look_due(&self, now: Duration) -> bool {
        self.next_at <= now || !self.suspects.is_empty() && self.trap_at <= now
    }

    fn begin_heavy(&mut self, now: Duration) {
        self.heavy_at = None;
        self.began = now;
        self.counters.heavy_sweeps += 1;
        self.task = Task::Discover(Discovery::beginning(self.numbering));
    }

    fn begin_poll(&mut self, now: Duration, master: Master) {
        self.next_at = now + self.config.poll;
        let mut exchange = Exchange::beginning(self.numbering);
        exchange.request(Request::get(master.other.route, Attribute::SmInfo, 0), ());
        self.task = Task::Poll(exchange);
    }

    fn begin_look(&mut self, now: Duration) {
        let Some(fabric) = &self.fabric else {
            return self.begin_heavy(now);
        };
        let is_for_trap = !self.suspects.is_empty() && self.trap_at <= now;
        let suspects =
            if is_for_trap { core::mem::take(&mut self.suspects) } else { BTreeSet::new() };
        self.began = now;
        if is_for_trap {
            self.counters.trap_looks += 1;
        } else {
            self.counters.light_sweeps += 1;
            self.next_at = now + self.config.interval;
        }
        self.task = Task::Look(Look::at(&fabric.discovery, &suspects, self.numbering));
    }

    /// Goes on with the next task when one is over.
    fn advance(&mut self, now: Duration) {
        loop {
            let is_over = match &self.task {
                Task::Nothing | Task::Route(_) => false,
                Task::Discover(discovery) => discovery.is_done(),
                Task::Ask(_, exchange) => exchange.is_idle(),
                Task::HandOver(exchange) => exchange.is_idle(),
                Task::Groups(exchange, _) => exchange.is_idle(),
                Task::Read(_, exchange) => exchange.is_idle(),
                Task::Write(writing) => writing.setup.is_done(),
                Task::Look(look) => look.exchange.is_idle(),
                Task::Poll(exchange) => exchange.is_idle(),
            };
            if !is_over {
                return;
            }
            let task = core::mem::replace(&mut self.task, Task::Nothing);
            self.note_numbers(&task);
            match task {
                Task::Discover(discovery) => self.finish_discovery(now, discovery),
                Task::Ask(discovery, _) => self.elect(now, discovery),
                Task::Read(discovery, _) => self.route(discovery),
                Task::Write(writing) => self.finish_setup(now, *writing),
                Task::Look(look) => self.finish_look(now, look),
                Task::Groups(_, stages) if stages.is_empty() => self.finish_groups(now),
                Task::Groups(_, stages) => self.write_groups(stages),
                Task::Nothing | Task::Route(_) | Task::Poll(_) | Task::HandOver(_) => {}
            }
        }
    }

    fn note_numbers(&mut self, task: &Task) {
        let (numbering, discarded) = match task {
            Task::Nothing | Task::Route(_) => return,
            Task::Discover(discovery) => (discovery.numbering(), discovery.discarded()),
            Task::Ask(_, exchange) => (exchange.numbering(), exchange.discarded()),
            Task::HandOver(exchange) => (exchange.numbering(), exchange.discarded()),
            Task::Groups(exchange, _) => (exchange.numbering(), exchange.discarded()),
            Task::Read(_, exchange) => (exchange.numbering(), exchange.discarded()),
            Task::Write(writing) => (writing.setup.numbering(), writing.setup.discarded()),
            Task::Look(look) => (look.exchange.numbering(), look.exchange.discarded()),
            Task::Poll(exchange) => (exchange.numbering(), exchange.discarded()),
        };
        self.numbering = numbering;
        self.counters.unasked += discarded.unasked;
        self.counters.mismatched += discarded.mismatched;
        self.counters.malformed += discarded.malformed;
    }

    fn finish_discovery(&mut self, now: Duration, mut discovery: Discovery) {
        let Some((guid, port)) = discovery.start() else {
            return self.fail(now, Trouble::NoPort);
        };
        let own = discovery.nodes().get(&guid).map(|node| node.info.port_guid);
        self.guid = own.or(self.guid);
        if let Some(trouble) = own_trouble(&discovery, (guid, port)) {
            return self.fail(now, trouble);
        }
        discovery.cut_contradictory();
        let (complaints, left_out) = discovery.complaints();
        if let Some(first) = complaints.first() {
            let count = complaints.len() + left_out as usize;
            self.report(Event::Incomplete(first.to_string(), count));
            self.heavy_at = Some(now + self.backoff());
        }
        if let Some(fabric) = &self.fabric {
            discovery.keep_silent(&fabric.discovery);
        }
        discovery.cut_unreadable();
        let mut exchange = Exchange::beginning(self.numbering);
        for place in discovery.managers().into_iter().filter(|place| *place != (guid, port)) {
            if let Some(route) = discovery.route(place) {
                exchange.request(Request::get(route, Attribute::SmInfo, 0), place);
            }
        }
        self.others.clear();
        self.task = Task::Ask(discovery, exchange);
    }

    /// The time until a sweep is repeated that has failed.
    fn backoff(&mut self) -> Duration {
        let rest = self.retry;
        self.retry = (rest * 2).min(self.config.interval.max(RETRY));
        rest
    }

    fn fail(&mut self, now: Duration, trouble: Trouble) {
        self.counters.failed_sweeps += 1;
        self.heavy_at = Some(now + self.backoff());
        self.report(Event::Kept(trouble));
    }

    /// Reads the tables that another manager wrote, and forgets those of switches that lost them.
    fn read(&mut self, discovery: Discovery) {
        let mut exchange = Exchange::beginning(self.numbering);
        let written = self.fabric.as_ref().map(|fabric| fabric.lids.top());
        for (guid, node) in discovery.nodes() {
            let Some(info) = node.switch_info else {
                continue;
            };
            let top = linear_top(&info);
            if self.held.contains_key(guid) && written.is_some_and(|written| written == top) {
                continue;
            }
            self.held.remove(guid);
            self.unknown_trees.insert(*guid);
            self.ports.levels.retain(|place, _| place.0 != *guid);
            // A switch holds P_Keys of the end ports next to it.
            let links = discovery.links();
            let is_next = |place: &Place| links.get(place).is_some_and(|far| far.0 == *guid);
            self.ports.keys.retain(|place, _| place.0 != *guid && !is_next(place));
            // Nothing was written where there is no last LID.
            let blocks = if top == 0 { 0 } else { u32::from(top) / LFT_BLOCK as u32 + 1 };
            for block in 0..blocks {
                let attribute = Attribute::LinearForwardingTable;
                exchange.request(Request::get(node.route, attribute, block), *guid);
            }
        }
        self.task = Task::Read(discovery, exchange);
    }

    /// A table of which a block is missing is unknown as a whole.
    fn handle_block(&mut self, done: &Finished<u64>) {
        let Fate::Response(data) = done.fate else {
            self.unreadable.insert(done.context);
            return;
        };
        let at = done.request.modifier as usize * LFT_BLOCK;
        let table = Arc::make_mut(self.held.entry(done.context).or_default());
        if table.len() < at + LFT_BLOCK {
            table.resize(at + LFT_BLOCK, topology::routes::NO_ROUTE);
        }
        table[at..at + LFT_BLOCK].copy_from_slice(&data);
    }

    fn route(&mut self, discovery: Discovery) {
        for guid in core::mem::take(&mut self.unreadable) {
            self.held.remove(&guid);
        }
        let previous = self.fabric.as_ref().map(|fabric| fabric.routed.clone());
        self.task = Task::Route(Some(Box::new(Work {
            discovery,
            engine: self.config.engine,
            lmc: self.config.lmc,
            remembered: self.lids.clone(),
            prefers_present: self.is_new,
            held: core::mem::take(&mut self.held),
            previous,
            roots: self.roots.clone(),
            without_levels: self.without_levels.clone(),
        })));
    }

    fn finish_setup(&mut self, now: Duration, writing: Writing) {
        let Writing { setup, mut discovery, routed, how } = writing;
        self.note_ports(&setup, &discovery);
        if !setup.failed_levels().is_empty() {
            // No table was written: the fabric is what it was before.
            self.counters.failed_sweeps += 1;
            return self.complain(now, &setup);
        }
        let target = setup.target();
        let mut tables = BTreeMap::new();
        let mut numbers = BTreeMap::new();
        for (number, switch) in (0..).zip(routed.channels.switches()) {
            let guid = routed.guids.get(switch.index()).copied().unwrap_or(0);
            let table = Arc::new(target.transition.target.table(number).to_vec());
            if setup.has_table(guid) {
                self.held.insert(guid, Arc::clone(&table));
            } else {
                self.held.remove(&guid);
            }
            tables.insert(guid, table);
            numbers.insert(guid, number);
        }
        setup.ports().for_each(|(place, info)| discovery.set_port(place, info));
        setup.switches().for_each(|(guid, info)| discovery.set_switch_info(guid, info));
        let nanoseconds = now.saturating_sub(self.began).as_nanos() as u64;
        let summary = summary(&discovery, target, routed.engine, how, nanoseconds);
        self.report(Event::SetUp(summary));
        for (place, lid) in target.lids.iter() {
            self.lids_changed |= self.lids.insert(place, lid) != Some(lid);
        }
        self.complain(now, &setup);
        self.is_new = false;
        if let Some(other) = &mut self.unwilling {
            other.has_set_up = true;
        }
        let directory = Directory::new(&discovery, &target.lids);
        let switches = discovery.nodes().values().filter_map(|node| node.switch_info);
        let capacity = switches.map(|info| multicast_capacity(&info)).min().unwrap_or(0);
        self.forget_lids(&directory, &target.lids);
        self.groups.keep(capacity, |place| target.lids.of(place).is_some());
        self.subscriptions.keep(|lid| directory.at(lid).is_some());
        if let Some(before) = self.fabric.take() {
            self.compare(&before, &discovery, &target.lids);
        }
        for what in self.groups.take_happened() {
            self.subscriptions.happen(what);
        }
        // The tree may be another.
        self.groups.is_changed |= self.groups.has_members();
        let lids = target.lids.clone();
        let memberships = self.ports.memberships.clone();
        let of = |place: Place| lids.of(place).or(lids.of((place.0, 0)));
        let own_lid = discovery.start().and_then(of).unwrap_or(0);
        self.fabric = Some(Fabric {
            discovery,
            routed,
            lids,
            directory,
            tables,
            numbers,
            memberships,
            own_lid,
        });
        self.next_at = now + self.config.interval;
    }

    /// Reports what went wrong, and repeats the sweep then.
    fn complain(&mut self, now: Duration, setup: &Setup) {
        match setup.complaints().first() {
            None => self.retry = RETRY,
            Some(first) => {
                let count = setup.complaints().len() + setup.complaints_left_out() as usize;
                self.report(Event::Incomplete(first.to_string(), count));
                self.heavy_at = Some(now + self.backoff());
            }
        }
    }

    /// Notes which ports have P_Keys, and which map service levels to lanes. A node that does not
    /// take that leaves one lane for all paths: at once if it refuses, after some sweeps in turn if
    /// it is silent.
    fn note_ports(&mut self, setup: &Setup, discovery: &Discovery) {
        self.ports.keys.extend(setup.keys().map(|(place, keys)| (place, keys.clone())));
        self.ports.levels.extend(setup.levels());
        let mut silent = BTreeSet::new();
        for (place, why) in setup.failed_levels() {
            self.ports.levels.remove(place);
            match why {
                Failure::Refused => drop(self.without_levels.insert(place.0)),
                Failure::Silent => drop(silent.insert(place.0)),
            }
        }
        self.silent_levels.retain(|guid, _| silent.contains(guid));
        for guid in silent {
            let silences = self.silent_levels.entry(guid).or_default();
            *silences += 1;
            if *silences >= MAX_SILENCES {
                self.without_levels.insert(guid);
            }
        }
        let is_there = |guid: &u64| discovery.nodes().contains_key(guid);
        self.ports.levels.retain(|(guid, _), _| is_there(guid));
        self.ports.keys.retain(|(guid, _), _| is_there(guid));
        self.without_levels.retain(is_there);
    }

    /// Forgets LIDs of ports that are away and that others have now; of all ports that are away, if
    /// there are too many.
    fn forget_lids(&mut self, directory: &Directory, lids: &Lids) {
        let before = self.lids.len();
        let is_crowded = before - lids.count() > MAX_ABSENT;
        self.lids.retain(|place, lid| {
            lids.of(*place).is_some() || !is_crowded && directory.at(*lid).is_none()
        });
        self.lids_changed |= self.lids.len() != before;
    }

    // ---- light sweeps ---------------------------------------------------------------------------

    fn handle_look(&mut self, done: &Finished<look::Asked>) {
        if let (Task::Look(look), Some(fabric)) = (&mut self.task, &self.fabric) {
            look.handle(done, &fabric.discovery, fabric.lids.top());
        }
    }

    fn finish_look(&mut self, now: Duration, look: Look) {
        let found = !look.down.is_empty() || look.more.is_some();
        if look.is_partial {
            self.trap_rest =
                if found { TRAP_REST } else { (self.trap_rest * 2).min(MAX_TRAP_REST) };
            self.trap_at = if found { now } else { now + self.trap_rest };
        }
        if let Some(change) = look.more {
            self.report(Event::Noticed(change));
            return self.begin_heavy(now);
        }
        let (Some(first), Some(fabric)) = (look.down.first(), &self.fabric) else {
            return;
        };
        // Both ends may say so.
        let links: BTreeSet<Place> = look.down.iter().map(|end| fabric.first_end(*end)).collect();
        let event = Event::LinksDown(*first, links.len());
        let mut discovery = fabric.discovery.clone();
        discovery.cut(&look.down);
        self.report(event);
        self.route(discovery);
    }

    /// A trap: its sender hears that it has arrived, and the switch is looked at.
    fn handle_trap(&mut self, now: Duration, peer: Peer, mad: &[u8; MAD_BYTES]) {
        let notice = Notice::parse(&smp_data(mad));
        let is_heeded = notice.is_generic
            && matches!(notice.trap, PORT_CHANGED | CAPABILITY_CHANGED | WRONG_KEY)
            && self.standing == Standing::Master;
        if !is_heeded {
            self.counters.ignored_traps += 1;
            return;
        }
        let fabric = self.fabric.as_ref();
        let known = fabric.and_then(|fabric| fabric.directory.at(notice.issuer_lid));
        let Some((guid, _)) = known else {
            self.counters.ignored_traps += 1;
            return;
        };
        self.counters.traps += 1;
        let mut repress = *mad;
        repress[3] = method::TRAP_REPRESS;
        self.reply(peer, repress);
        match notice.trap {
            PORT_CHANGED => drop(self.suspects.insert(guid)),
            WRONG_KEY => {
                self.counters.wrong_keys += 1;
                self.report_refusal(now, Refusal::WrongManagementKey(guid, notice.violator_lid));
            }
            // A manager may have begun or ended there.
            _ => self.suspect_stranger(now),
        }
    }

    // ---- subnet administration ------------------------------------------------------------------

    fn administer(&mut self, now: Duration, peer: Peer, mad: &[u8; MAD_BYTES]) {
        let (Some(fabric), Peer::Lid { lid, queue_pair, service_level }) = (&self.fabric, peer)
        else {
            self.counters.unanswered += 1;
            return;
        };
        let client = Client { lid, queue_pair, service_level };
        if Sender::is_meant(mad) {
            return self.sender.handle(now, client, mad);
        }
        if Subscriptions::is_response(mad) {
            return self.subscriptions.handle_response(client, mad);
        }
        // The client was impatient.
        if self.sender.is_under_way(client, mad) {
            return;
        }
        let lids = fabric.directory.lids_beside(lid);
        let room = self.sender.room(lids.clone());
        let subnet = Subnet {
            discovery: &fabric.discovery,
            lids: &fabric.lids,
            directory: &fabric.directory,
            tables: &fabric.tables,
            numbers: &fabric.numbers,
            levels: &fabric.routed.levels,
            memberships: fabric.memberships.as_ref(),
            manager: self.sm_info(),
            room,
        };
        let own_lid = fabric.own_lid;
        let subscribed = self.subscriptions.answer(client, lids, own_lid, mad);
        let answer =
            subscribed.or_else(|| administration::answer(&subnet, &mut self.groups, lid, mad));
        for what in self.groups.take_happened() {
            self.subscriptions.happen(what);
        }
        match answer {
            Some(Reply::Datagram(response, len)) => {
                self.counters.answered += 1;
                let is_without_room = response[4..6] == Status::NoResources.code().to_be_bytes();
                self.counters.without_room += u64::from(is_without_room);
                self.reply_with(peer, response, len);
            }
            Some(Reply::Table(table)) => {
                self.counters.answered += 1;
                self.sender.send(now, client, table);
            }
            None => self.counters.malformed += 1,
        }
    }

    /// The LID of its port; 0 before there is one.
    fn own_lid(&self) -> u16 {
        self.fabric.as_ref().map_or(0, |fabric| fabric.own_lid)
    }

    /// Tells subscribers which ports came and went since the fabric of before.
    fn compare(&mut self, before: &Fabric, discovery: &Discovery, lids: &Lids) {
        let gid = |discovery: &Discovery, place| discovery.port_guid(place).map(Gid::of);
        let new = lids.iter().filter(|(place, _)| before.lids.of(*place).is_none());
        let new = new.filter_map(|(place, _)| gid(discovery, place)).map(Happening::InService);
        let gone = before.lids.iter().filter(|(place, _)| lids.of(*place).is_none());
        let gone = gone.filter_map(|(place, _)| gid(&before.discovery, place));
        for what in gone.map(Happening::OutOfService).chain(new) {
            self.subscriptions.happen(what);
        }
    }

    fn has_group_changes(&self) -> bool {
        self.groups.is_changed && self.fabric.is_some() && self.standing == Standing::Master
    }

    /// Writes what old and new trees have in common, and then the new trees.
    fn begin_groups(&mut self) {
        self.groups.is_changed = false;
        let Some(fabric) = &self.fabric else {
            return;
        };
        let routed = &fabric.routed;
        let order: Vec<u64> =
            routed.ranks.order().iter().map(|switch| routed.guid(*switch)).collect();
        let target = self.groups.tables(&fabric.discovery, &order);
        // A switch may be new, may have lost its tables, or have those of another manager: as if
        // all ports were in all trees.
        let blocks = self.groups.blocks();
        for guid in core::mem::take(&mut self.unknown_trees) {
            let node = fabric.discovery.nodes().get(&guid);
            let positions = node.map_or(0, |node| node.info.ports / 16 + 1);
            let keys = (0..positions).flat_map(|at| (0..blocks).map(move |block| (at, block)));
            self.trees.extend(keys.map(|(at, block)| ((guid, at, block), [0xff; 64])));
        }
        self.trees.retain(|(guid, ..), _| fabric.discovery.nodes().contains_key(guid));
        let common = groups::common(&self.trees, &target);
        self.write_groups(VecDeque::from([common, target]));
    }

    fn write_groups(&mut self, mut stages: VecDeque<MulticastTables>) {
        let (Some(stage), Some(fabric)) = (stages.pop_front(), &self.fabric) else {
            return;
        };
        let mut exchange = Exchange::beginning(self.numbering);
        for (key, data) in stage {
            let (guid, position, block) = key;
            let node = fabric.discovery.nodes().get(&guid);
            let known = self.trees.get(&key).unwrap_or(&[0; 64]);
            if let Some(node) = node.filter(|_| *known != data) {
                let modifier = u32::from(position) << 28 | u32::from(block);
                let attribute = Attribute::MulticastForwardingTable;
                exchange.request(Request::set(node.route, attribute, modifier, data), ());
                self.trees.insert(key, data);
            }
        }
        self.task = Task::Groups(exchange, stages);
    }

    /// A block that was not written is unknown: the next time it is written as if all ports were in
    /// it.
    fn handle_group_block(&mut self, done: &Finished<()>) {
        if matches!(done.fate, Fate::Response(_)) {
            return;
        }
        let route = done.request.route;
        let nodes = self.fabric.iter().flat_map(|fabric| fabric.discovery.nodes());
        let guid = nodes.filter(|(_, node)| node.route == route).map(|(guid, _)| *guid).next();
        let (position, block) = (done.request.modifier >> 28, done.request.modifier & 0xffff);
        if let Some(guid) = guid {
            self.trees.insert((guid, position as u8, block as u16), [0xff; 64]);
        }
        self.counters.failed_groups += 1;
        let Request { attribute, modifier, .. } = done.request;
        let complaint = match done.fate {
            Fate::Refused(status) => SetupComplaint::Refused(route, attribute, modifier, status),
            _ => SetupComplaint::Silent(route, attribute, modifier),
        };
        self.failed_blocks.get_or_insert_with(|| (complaint.to_string(), 0)).1 += 1;
    }

    /// What was not written is written again later.
    fn finish_groups(&mut self, now: Duration) {
        let Some((complaint, count)) = self.failed_blocks.take() else {
            self.groups_at = now + GROUPS_REST;
            self.groups_retry = RETRY;
            return;
        };
        self.report(Event::Incomplete(complaint, count));
        self.groups.is_changed = true;
        self.groups_at = now + self.groups_retry;
        self.groups_retry = (self.groups_retry * 2).min(self.config.interval.max(RETRY));
    }

    // ---- the election ---------------------------------------------------------------------------

    /// What it tells others about itself.
    fn sm_info(&self) -> SmInfo {
        SmInfo {
            guid: self.guid.unwrap_or(0),
            key: self.config.sm_key,
            count: self.count,
            priority: self.config.priority,
            standing: self.standing,
        }
    }

    fn handle_manager(&mut self, done: &Finished<Place>) {
        let Fate::Response(data) = done.fate else {
            return;
        };
        let Some(info) = SmInfo::parse(&data) else {
            return;
        };
        if is_of_subnet(&info, self.config.sm_key) {
            self.others.insert(done.context, Other { info, route: done.request.route });
        } else if self.foreign.len() < MAX_FOREIGN && self.foreign.insert(info.guid) {
            self.report(Event::Foreign(info.guid));
        }
    }

    /// The first of the other managers in a state.
    fn first_of(&self, is_meant: impl Fn(&SmInfo) -> bool) -> Option<Other> {
        let meant = self.others.values().filter(|other| is_meant(&other.info));
        meant
            .copied()
            .reduce(|best, other| if other.info.is_before(&best.info) { other } else { best })
    }

    /// All nodes and managers are known: who is master?
    fn elect(&mut self, now: Duration, discovery: Discovery) {
        let own = self.sm_info();
        if self.standing == Standing::Master {
            return self.defend(now, discovery, &own);
        }
        let master = self.first_of(|other| other.standing == Standing::Master);
        let is_candidate = |other: &SmInfo| {
            matches!(other.standing, Standing::Standby | Standing::Discovering)
                && other.is_before(&own)
        };
        let ahead = master.or_else(|| self.first_of(is_candidate));
        match ahead.filter(|_| !self.is_promoted) {
            Some(other) => self.stand_by(now, other),
            None => {
                let why = self.why.take().unwrap_or(Why::First);
                (self.is_promoted, self.is_new) = (false, true);
                self.counters.terms += 1;
                self.change(Standing::Master, why);
                self.read(discovery);
            }
        }
    }

    /// A master hands over to whoever goes before it, and lets others hand over to it before it
    /// goes on.
    fn defend(&mut self, now: Duration, discovery: Discovery, own: &SmInfo) {
        let rests = |other: &Unwilling| now < other.until || !other.has_set_up;
        let unwilling = self.unwilling.filter(rests).map(|other| other.guid);
        let is_ahead = |other: &SmInfo| {
            Some(other.guid) != unwilling
                && match other.standing {
                    Standing::Master => other.is_before(own),
                    Standing::Standby => other.priority > own.priority,
                    _ => false,
                }
        };
        if let Some(other) = self.first_of(is_ahead) {
            let mut exchange = Exchange::beginning(self.numbering);
            let (attribute, modifier) = (Attribute::SmInfo, Control::Handover.modifier());
            exchange.request(Request::set(other.route, attribute, modifier, own.emit()), other);
            self.task = Task::HandOver(exchange);
            return;
        }
        let rival = self.first_of(|other| other.standing == Standing::Master);
        let patience = self.config.interval * RIVAL_INTERVALS;
        // Whoever has not given way in that time is not waited for again as long as it is there.
        let known = |rival: Other| {
            let before = self.rival.filter(|(guid, _)| *guid == rival.info.guid);
            before.unwrap_or((rival.info.guid, now + patience))
        };
        self.rival = rival.map(known);
        if let Some((rival, _)) = rival.zip(self.rival).filter(|(_, (_, until))| now < *until) {
            self.report(Event::Rival(rival.info));
            self.heavy_at = Some(now + self.backoff());
        } else {
            self.read(discovery);
        }
    }

    fn handle_handover(&mut self, done: &Finished<Other>, now: Duration) {
        match done.fate {
            Fate::Response(_) => self.stand_by(now, done.context),
            // It has not taken over, so this one goes on.
            Fate::Refused(_) | Fate::Silent => {
                let rest = self.backoff();
                let (guid, until) = (done.context.info.guid, now + rest);
                self.unwilling = Some(Unwilling { guid, until, has_set_up: false });
                self.heavy_at = Some(now);
            }
        }
    }

    fn stand_by(&mut self, now: Duration, other: Other) {
        self.master = Some(Master { other, misses: 0 });
        self.next_at = now + self.config.poll;
        self.give_up();
        self.change(Standing::Standby, Why::Other(other.info));
    }

    /// Forgets what holds for a master alone. LIDs stay: they are what ports without one get later.
    fn give_up(&mut self) {
        self.fabric = None;
        self.held.clear();
        self.ports.levels.clear();
        self.ports.keys.clear();
        self.without_levels.clear();
        self.silent_levels.clear();
        self.unreadable.clear();
        let partitions = self.partitions.iter();
        self.groups = Groups::with_broadcasts(partitions.flat_map(Partitions::broadcasts));
        self.sender.clear();
        self.subscriptions.clear();
        self.trees.clear();
        self.unknown_trees.clear();
        self.failed_blocks = None;
        self.suspects.clear();
        self.heavy_at = None;
        self.unwilling = None;
        self.rival = None;
    }

    fn handle_poll(&mut self, done: &Finished<()>, now: Duration) {
        let key = self.config.sm_key;
        let Some(master) = &mut self.master else {
            return;
        };
        let info = match done.fate {
            Fate::Response(data) => SmInfo::parse(&data).filter(|info| is_of_subnet(info, key)),
            Fate::Refused(_) | Fate::Silent => None,
        };
        let guid = master.other.info.guid;
        let why = match info.map(|info| info.standing) {
            Some(Standing::Master | Standing::Discovering) => {
                master.misses = 0;
                return;
            }
            Some(Standing::Standby | Standing::NotActive) => Why::MasterGone(guid),
            None => {
                master.misses += 1;
                if master.misses < self.config.misses {
                    return;
                }
                Why::MasterSilent(guid, master.misses)
            }
        };
        self.seek(now, why);
    }

    /// Looks for the master again, and becomes it if there is none.
    fn seek(&mut self, now: Duration, why: Why) {
        self.master = None;
        self.heavy_at = Some(now);
        self.why = Some(why);
        self.change(Standing::Discovering, why);
    }

    fn handle_sm_info(
        &mut self,
        now: Duration,
        peer: Peer,
        header: &Header,
        mad: &[u8; MAD_BYTES],
    ) {
        // Before the own port has responded there is nothing to tell.
        if self.guid.is_none() {
            return;
        }
        let mut status = 0;
        if header.method == method::SET {
            if let Err(refusal) = self.obey(now, header.modifier, &smp_data(mad)) {
                status = INVALID;
                self.counters.refused_controls += 1;
                self.report_refusal(now, refusal);
            }
        } else if self.standing == Standing::Master
            && self.others.is_empty()
            && self.stranger_at <= now
        {
            // Somebody asks who was not there at the last heavy sweep.
            self.stranger_at = now + self.config.interval;
            self.heavy_at.get_or_insert(now);
        }
        let response = respond(mad, status, &self.sm_info().emit());
        let peer = if header.class == DIRECTED_ROUTE { Peer::Directed } else { peer };
        self.reply(peer, response);
    }

    /// There may be a manager that the last heavy sweep has not found: a reason for one, but not at
    /// every datagram.
    fn suspect_stranger(&mut self, now: Duration) {
        if self.stranger_at <= now {
            self.stranger_at = now + self.config.interval;
            self.heavy_at.get_or_insert(now);
        }
    }

    /// Does what another manager wants, if that makes sense.
    fn obey(&mut self, now: Duration, modifier: u32, data: &[u8; 64]) -> Result<(), Refusal> {
        let other = SmInfo::parse(data).ok_or(Refusal::Malformed)?;
        let control = Control::of(modifier).ok_or(Refusal::Malformed)?;
        if other.key != self.config.sm_key {
            return Err(Refusal::WrongKey(other.guid));
        }
        let is_known = self.others.values().any(|known| known.info.guid == other.guid);
        if !is_known && self.standing != Standing::NotActive {
            // It may be new; the next sweep tells.
            self.suspect_stranger(now);
        }
        match (control, self.standing) {
            // Another master gives way.
            (Control::Handover, Standing::Master) => self.suspect_stranger(now),
            _ if !is_known => return Err(Refusal::Unknown(other.guid)),
            (Control::Handover, Standing::Standby | Standing::Discovering) => {
                self.is_promoted = true;
                self.seek(now, Why::HandedOver(other.guid));
            }
            (Control::Acknowledge, _) => {}
            (Control::Disable, Standing::Standby | Standing::Discovering) => {
                let task = core::mem::replace(&mut self.task, Task::Nothing);
                // Responses may still be under way to numbers that must not be used again.
                self.note_numbers(&task);
                self.give_up();
                self.change(Standing::NotActive, Why::Told);
            }
            (Control::Standby, Standing::NotActive) | (Control::Discover, Standing::Standby) => {
                self.seek(now, Why::Told);
            }
            (_, standing) => return Err(Refusal::Standing(standing)),
        }
        Ok(())
    }

    fn report_refusal(&mut self, now: Duration, refusal: Refusal) {
        if now < self.refusal_at {
            self.unreported += 1;
            return;
        }
        self.refusal_at = now + REFUSAL_REST;
        let before = core::mem::take(&mut self.unreported);
        self.report(Event::Refused(refusal, before));
    }

    fn change(&mut self, standing: Standing, why: Why) {
        if self.standing != standing {
            self.standing = standing;
            self.report(Event::Became(standing, why));
        }
    }

    // ---- queues ---------------------------------------------------------------------------------

    fn reply(&mut self, peer: Peer, mad: [u8; MAD_BYTES]) {
        self.reply_with(peer, mad, MAD_BYTES);
    }

    fn reply_with(&mut self, peer: Peer, mad: [u8; MAD_BYTES], len: usize) {
        if self.replies.len() < MAX_REPLIES {
            self.replies.push_back(Datagram { peer, mad, len });
        } else {
            self.counters.dropped_replies += 1;
        }
    }

    fn report(&mut self, event: Event) {
        if self.events.len() < MAX_EVENTS {
            self.events.push_back(event);
        } else {
            self.counters.dropped_events += 1;
        }
    }
}

/// What was set up.
fn summary(
    discovery: &Discovery,
    target: &Target,
    engine: Engine,
    how: How,
    nanoseconds: u64,
) -> Summary {
    let nodes = discovery.nodes().values();
    let switches = nodes.filter(|node| node.info.node_type == NodeType::Switch).count();
    Summary {
        hosts: discovery.nodes().len() - switches,
        switches,
        links: discovery.links().len() / 2,
        lids: target.lids.count(),
        engine,
        how,
        changed: target.transition.changed,
        ordered: target.transition.ordered,
        drained: target.transition.drained,
        blocks: target.transition.blocks(),
        lanes: target.levels.lanes.count(),
        nanoseconds,
    }
}

/// Whether another manager has this SM_Key. It tells 0 to those whom it does not take for the
/// master, as opensm does.
fn is_of_subnet(other: &SmInfo, key: u64) -> bool {
    other.key == 0 || other.key == key
}

/// Why nothing beyond the own port was found. Port 0 of a switch has no link.
fn own_trouble(discovery: &Discovery, (guid, port): Place) -> Option<Trouble> {
    let node = discovery.nodes().get(&guid)?;
    if node.info.node_type == NodeType::Switch {
        return None;
    }
    match node.ports.get(&port).map(|info| PortInfo::parse(info).state) {
        None => Some(Trouble::NoPort),
        Some(state) => (state <= Some(PortState::Down)).then_some(Trouble::PortDown),
    }
}

/// The status of a response: a field has a value that is not valid (IBA 13.4.7).
const INVALID: u16 = 0x1c;
