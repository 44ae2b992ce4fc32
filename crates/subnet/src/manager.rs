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

mod config;
mod election;
pub mod event;
mod fabric;
mod installed;
mod look;
mod multicast;
mod outbox;
mod remembered;
mod schedule;
mod service;
mod task;
pub mod work;

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::string::ToString;
use alloc::vec::Vec;
use core::time::Duration;

use crate::administration::Gid;
use crate::administration::groups::{Groups, MulticastTables};
use crate::administration::inform::InformCounters;
use crate::administration::rmpp::{Client, RmppCounters};
use crate::discovery::{Discovery, Place};
use crate::exchange::{Done as Answer, Fate, Numbering, Request, Requester};
use crate::mad::{
    Attribute, DIRECTED_ROUTE, KeyGuard, MAD_BYTES, NodeType, PortInfo, PortState, linear_top,
};
use crate::partitions::Partitions;
use crate::setup::Setup;
use crate::sm_info::{
    ADMINISTRATION, CAPABILITY_CHANGED, Control, Header, LID_ROUTED, NOTICE, Notice, PORT_CHANGED,
    Standing, WRONG_KEY, method, respond, smp_data,
};
pub use config::{Config, DEFAULT_SM_KEY};
use election::{Command, Decision, Election, Other};
use event::{Event, Refusal, Trouble, Why};
pub use fabric::Fabric;
use installed::Installed;
pub use look::Change;
use look::Look;
use multicast::Multicast;
use outbox::Outbox;
pub use outbox::{Counters, Datagram, Peer};
use remembered::Remembered;
use schedule::{Schedule, Suspects};
use service::Service;
use task::{Question, Questions, Task, Then, Writing};
use work::{Done, Work};

/// Intervals of light sweeps in which another master may give way before its part of the fabric is
/// taken: it finds this one at its next light sweep.
const RIVAL_INTERVALS: u32 = 3;

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
    /// GUIDs of the roots of Up*/Down*; none if they are to be found.
    roots: Vec<u64>,
    partitions: Option<Partitions>,
    /// Who is master.
    election: Election,
    /// When it sweeps next.
    schedule: Schedule,
    /// Whom it looks at for traps.
    suspects: Suspects,
    /// What it does now.
    task: Task,
    numbering: Numbering,
    /// What nodes hold.
    installed: Installed,
    /// The fabric that it has set up; none before, and none while it is not master.
    fabric: Option<Fabric>,
    /// LIDs that ports had.
    remembered: Remembered,
    /// Multicast groups and their tables.
    multicast: Multicast,
    /// Subnet administration for programs.
    service: Service,
    /// What it says.
    outbox: Outbox,
}

impl Manager {
    /// One that has not begun. `lids` are those that ports had before, `transaction` the first
    /// number of its requests: a responder may still have responses to those of a process before
    /// it.
    pub fn new(config: Config, lids: BTreeMap<Place, u16>, transaction: u32) -> Manager {
        let mut installed = Installed::default();
        installed.ports.guard = config.guard.map(|(protection, lease_s)| KeyGuard {
            key: config.m_key,
            protection,
            lease_s,
        });
        Manager {
            config,
            roots: Vec::new(),
            partitions: None,
            election: Election::new(config.priority, config.sm_key),
            schedule: Schedule::new(config.interval),
            suspects: Suspects::default(),
            task: Task::Nothing,
            numbering: Numbering { next: transaction.max(1), m_key: config.m_key },
            installed,
            fabric: None,
            remembered: Remembered::new(lids),
            multicast: Multicast::new(Groups::default(), config.interval),
            service: Service::default(),
            outbox: Outbox::default(),
        }
    }

    /// With roots for Up*/Down*, by their GUIDs, in place of those that it finds.
    pub fn with_roots(mut self, roots: Vec<u64>) -> Manager {
        self.roots = roots;
        self
    }

    /// With partitions; switches discard packets of others if they are to enforce that.
    pub fn with_partitions(mut self, partitions: Partitions, enforces: bool) -> Manager {
        self.multicast.groups = Groups::with_broadcasts(partitions.broadcasts());
        self.installed.ports.enforces = enforces;
        self.partitions = Some(partitions);
        self
    }

    // ---- outputs --------------------------------------------------------------------------------

    /// The next datagram to send.
    pub fn poll_transmit(&mut self, now: Duration) -> Option<Datagram> {
        if let Some(reply) = self.outbox.replies.pop_front() {
            return Some(reply);
        }
        let own_lid = self.fabric.as_ref().map_or(0, |fabric| fabric.own_lid);
        let own = (own_lid, Gid::of(self.election.own.guid));
        if let Some(datagram) = self.service.poll_transmit(now, own) {
            return Some(datagram);
        }
        self.begin(now);
        // What has nothing to ask is over at once.
        self.advance(now);
        let mad = self.task.requester_mut()?.poll_transmit(now)?;
        self.outbox.counters.sent += 1;
        self.election.own.count = self.election.own.count.wrapping_add(1);
        Some(Datagram { peer: Peer::Directed, mad, len: MAD_BYTES })
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
        self.outbox.events.pop_front()
    }

    /// When [`handle_timeout`](Manager::handle_timeout) is wanted next; `None` while only the
    /// outcome of work is awaited.
    pub fn poll_timeout(&self) -> Option<Duration> {
        let task = match self.task {
            Task::Nothing => self.due(),
            _ => self.task.requester().and_then(Requester::poll_timeout),
        };
        [self.service.poll_timeout(), task].into_iter().flatten().min()
    }

    /// When a task begins, if none is under way.
    fn due(&self) -> Option<Duration> {
        let Schedule { heavy_at, next_at, .. } = self.schedule;
        let standing = self.standing();
        if standing == Standing::NotActive {
            return None;
        }
        // Where there is no fabric to look at, the next heavy sweep keeps its backoff.
        let has_regular = self.fabric.is_some() || standing == Standing::Standby;
        let regular = (has_regular || heavy_at.is_none()).then_some(next_at);
        let groups = self.multicast.due().filter(|_| self.fabric.is_some());
        [heavy_at, regular, self.suspects.due(), groups].into_iter().flatten().min()
    }

    /// LIDs by port, to be remembered, if they have changed since the last call.
    pub fn take_lids(&mut self) -> Option<&BTreeMap<Place, u16>> {
        self.remembered.take()
    }

    /// Its state.
    pub fn standing(&self) -> Standing {
        self.election.own.standing
    }

    /// What has happened so far.
    pub fn counters(&self) -> Counters {
        self.outbox.counters
    }

    /// What happened to tables of subnet administration.
    pub fn tables(&self) -> RmppCounters {
        self.service.sender.counters()
    }

    /// How many subscribers there are to what happens, and what became of reports to them.
    pub fn subscriptions(&self) -> (usize, InformCounters) {
        let subscriptions = &self.service.subscriptions;
        (subscriptions.count(), subscriptions.counters())
    }

    /// The GUID of its port, once that is known.
    pub fn guid(&self) -> Option<u64> {
        self.election.guid()
    }

    /// The fabric that it has set up.
    pub fn fabric(&self) -> Option<&Fabric> {
        self.fabric.as_ref()
    }

    /// Whether it waits for the time to pass, or for others.
    pub fn is_idle(&self) -> bool {
        matches!(self.task, Task::Nothing) && self.outbox.replies.is_empty()
    }

    // ---- inputs ---------------------------------------------------------------------------------

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Duration) {
        self.service.handle_timeout(now);
        if let Some(requester) = self.task.requester_mut() {
            requester.handle_timeout(now);
        }
        self.advance(now);
    }

    /// A datagram has arrived.
    pub fn handle_datagram(&mut self, now: Duration, peer: Peer, bytes: &[u8]) {
        let mad = <&[u8; MAD_BYTES]>::try_from(bytes).ok();
        let Some((mad, header)) = mad.and_then(|mad| Some((mad, Header::parse(mad)?))) else {
            self.outbox.counters.malformed += 1;
            return;
        };
        if header.class == ADMINISTRATION {
            return self.administer(now, peer, mad);
        }
        if !header.is_subnet_management() {
            self.outbox.counters.malformed += 1;
            return;
        }
        let is_sm_info = header.attribute == Attribute::SmInfo.id();
        match header.method {
            code if code & method::RESPONSE != 0 => match self.task.requester_mut() {
                Some(requester) => requester.handle_response(bytes),
                None => self.outbox.counters.unasked += 1,
            },
            method::GET | method::SET if is_sm_info => self.handle_sm_info(now, peer, &header, mad),
            method::TRAP if header.class == LID_ROUTED && header.attribute == NOTICE => {
                self.handle_trap(now, peer, mad);
            }
            method::TRAP_REPRESS => {}
            _ => self.outbox.counters.malformed += 1,
        }
        self.advance(now);
    }

    /// The work is done.
    pub fn handle_work(&mut self, now: Duration, done: Done) {
        if !matches!(self.task, Task::Route(None)) {
            return;
        }
        self.task = Task::Nothing;
        if !self.election.is_master() {
            return;
        }
        self.installed.tables = done.held;
        match done.result {
            Ok((routed, target, how)) => {
                let discovery = done.discovery;
                // A new manager knows no members of groups; neither does it know those that were
                // cut off.
                let known = self.fabric.as_ref();
                let is_new = |place| known.is_none_or(|fabric| fabric.lids.of(place).is_none());
                let (ports, numbering) = (&mut self.installed.ports, self.numbering);
                let partitions = self.partitions.as_ref();
                ports.memberships =
                    partitions.map(|partitions| partitions.members(&discovery, &target.lids));
                let channels = &routed.channels;
                let setup = Setup::to(&discovery, channels, target, ports, numbering, is_new);
                let writing = Writing { setup, discovery, routed, how };
                self.task = Task::Write(Box::new(writing));
            }
            Err(why) => self.fail(now, Trouble::Unroutable(why)),
        }
        self.advance(now);
    }

    // ---- the course of a task -------------------------------------------------------------------

    /// Begins what is due, if nothing is under way.
    fn begin(&mut self, now: Duration) {
        let is_due = |at: Option<Duration>| at.is_some_and(|at| at <= now);
        if !matches!(self.task, Task::Nothing) || !is_due(self.due()) {
            return;
        }
        let looks = self.schedule.next_at <= now || is_due(self.suspects.due());
        if is_due(self.schedule.heavy_at) {
            self.begin_heavy(now);
        } else if let Some(master) = self.election.master() {
            let request = Request::get(master.route, Attribute::SmInfo, 0);
            self.schedule.next_at = now + self.config.poll;
            self.ask(alloc::vec![(request, Question::Master)], Then::Watch);
        } else if self.election.is_master() && looks {
            self.begin_look(now);
        } else if let Some(fabric) = self.fabric.as_ref() {
            let stages = self.multicast.stages(fabric);
            self.write_groups(stages);
        } else {
            // Whoever has neither a master nor a term looks for both.
            self.begin_heavy(now);
        }
    }

    fn begin_heavy(&mut self, now: Duration) {
        self.schedule.heavy_at = None;
        self.schedule.began = now;
        self.outbox.counters.heavy_sweeps += 1;
        self.task = Task::Discover(Discovery::beginning(self.numbering));
    }

    /// For a trap, or since the interval is over.
    fn begin_look(&mut self, now: Duration) {
        let Some(fabric) = &self.fabric else {
            return self.begin_heavy(now);
        };
        let suspects = self.suspects.take(now);
        let (look, requests) = Look::at(&fabric.discovery, &suspects);
        self.schedule.began = now;
        if look.is_partial {
            self.outbox.counters.trap_looks += 1;
        } else {
            self.outbox.counters.light_sweeps += 1;
            self.schedule.rest(now);
        }
        self.ask(look_questions(requests), Then::FinishLook(look));
    }

    fn ask(&mut self, requests: Vec<(Request, Question)>, then: Then) {
        self.task = Task::Ask(Questions::new(self.numbering, requests), then);
    }

    /// Handles answers, and goes on with the next task when one is over.
    fn advance(&mut self, now: Duration) {
        loop {
            while let Some(answer) = self.task.poll_answer() {
                self.handle_answer(now, &answer);
            }
            if !self.task.requester().is_some_and(Requester::is_done) {
                return;
            }
            match self.end_task() {
                Task::Nothing | Task::Route(_) => {}
                Task::Discover(discovery) => self.finish_discovery(now, discovery),
                Task::Write(writing) => self.finish_setup(now, *writing),
                Task::Ask(_, Then::Elect(discovery)) => self.elect(now, discovery),
                Task::Ask(_, Then::Route(discovery)) => self.route(discovery),
                Task::Ask(_, Then::FinishLook(look)) => self.finish_look(now, look),
                Task::Ask(_, Then::WriteGroups(stages)) if stages.is_empty() => {
                    if let Some((complaint, count)) = self.multicast.finish(now) {
                        self.outbox.report(Event::Incomplete(complaint, count));
                    }
                }
                Task::Ask(_, Then::WriteGroups(stages)) => self.write_groups(stages),
                Task::Ask(_, Then::Watch | Then::HandOver(_)) => {}
            }
        }
    }

    /// Responses to a task's requests may still be under way: their numbers must not be used again.
    fn end_task(&mut self) -> Task {
        let task = core::mem::take(&mut self.task);
        if let Some(requester) = task.requester() {
            let (discarded, counters) = (requester.discarded(), &mut self.outbox.counters);
            self.numbering = requester.numbering();
            counters.unasked += discarded.unasked;
            counters.mismatched += discarded.mismatched;
            counters.malformed += discarded.malformed;
        }
        task
    }

    fn handle_answer(&mut self, now: Duration, answer: &Answer<Question>) {
        let Answer { request, context, fate } = answer;
        match *context {
            Question::Manager(place) => {
                let foreign = self.election.handle_manager(place, request.route, fate);
                foreign.into_iter().for_each(|guid| self.outbox.report(Event::Foreign(guid)));
            }
            Question::Block(guid) => self.installed.handle_block(guid, request.modifier, fate),
            Question::Look(asked) => {
                if let (Task::Ask(questions, Then::FinishLook(look)), Some(fabric)) =
                    (&mut self.task, &self.fabric)
                {
                    let known = (&fabric.discovery, fabric.lids.top());
                    questions.extend(look_questions(look.handle(request, asked, fate, known)));
                }
            }
            Question::Master => {
                if let Some(why) = self.election.handle_poll(fate, self.config.misses) {
                    self.seek(now, why);
                }
            }
            Question::HandOver => self.handle_handover(now, fate),
            Question::Group(guid) => {
                let is_written = self.multicast.handle_block(guid, answer);
                self.outbox.counters.failed_groups += u64::from(!is_written);
            }
        }
    }

    // ---- heavy sweeps ---------------------------------------------------------------------------

    fn finish_discovery(&mut self, now: Duration, mut discovery: Discovery) {
        let Some((guid, port)) = discovery.start() else {
            return self.fail(now, Trouble::NoPort);
        };
        if let Some(node) = discovery.nodes().get(&guid) {
            self.election.own.guid = node.info.port_guid;
        }
        if let Some(trouble) = own_trouble(&discovery, (guid, port)) {
            return self.fail(now, trouble);
        }
        discovery.cut_contradictory();
        let (complaints, left_out) = discovery.complaints();
        if let Some(first) = complaints.first() {
            let count = complaints.len() + left_out as usize;
            self.outbox.report(Event::Incomplete(first.to_string(), count));
            self.schedule.retry(now);
        }
        if let Some(fabric) = &self.fabric {
            discovery.keep_silent(&fabric.discovery);
        }
        discovery.cut_unreadable();
        let others = discovery.managers().into_iter().filter(|place| *place != (guid, port));
        let request = |place| {
            let request = Request::get(discovery.route(place)?, Attribute::SmInfo, 0);
            Some((request, Question::Manager(place)))
        };
        let requests = others.filter_map(request).collect();
        self.election.forget_others();
        self.ask(requests, Then::Elect(discovery));
    }

    fn fail(&mut self, now: Duration, trouble: Trouble) {
        self.outbox.counters.failed_sweeps += 1;
        self.schedule.retry(now);
        self.outbox.report(Event::Kept(trouble));
    }

    /// Reads the tables that another manager wrote, and forgets those of switches that lost them.
    fn read(&mut self, discovery: Discovery) {
        let written = self.fabric.as_ref().map(|fabric| fabric.lids.top());
        let mut requests = Vec::new();
        for (guid, node) in discovery.nodes() {
            let Some(info) = node.switch_info else {
                continue;
            };
            let is_known = self.installed.tables.contains_key(guid);
            if !is_known || written != Some(linear_top(&info)) {
                self.multicast.forget_switch(*guid);
                requests.extend(self.installed.read_anew(*guid, &discovery));
            }
        }
        self.ask(requests, Then::Route(discovery));
    }

    fn route(&mut self, discovery: Discovery) {
        self.installed.forget_unreadable();
        let previous = self.fabric.as_ref().map(|fabric| fabric.routed.clone());
        self.task = Task::Route(Some(Box::new(Work {
            discovery,
            engine: self.config.engine,
            lmc: self.config.lmc,
            remembered: self.remembered.lids.clone(),
            prefers_present: self.fabric.is_none(),
            held: core::mem::take(&mut self.installed.tables),
            previous,
            roots: self.roots.clone(),
            without_levels: self.installed.without_levels.clone(),
        })));
    }

    fn finish_setup(&mut self, now: Duration, writing: Writing) {
        let summary = writing.summary(now.saturating_sub(self.schedule.began));
        let Writing { setup, mut discovery, routed, .. } = writing;
        self.installed.note_ports(&setup, &discovery);
        if !setup.failed_levels().is_empty() {
            // No table was written: the fabric is what it was before.
            self.outbox.counters.failed_sweeps += 1;
            return self.complain(now, &setup);
        }
        setup.ports().for_each(|(place, info)| discovery.set_port(place, info));
        setup.switches().for_each(|(guid, info)| discovery.set_switch_info(guid, info));
        self.outbox.report(Event::SetUp(summary));
        self.complain(now, &setup);
        let memberships = self.installed.ports.memberships.clone();
        let before = self.fabric.take();
        let fabric =
            self.fabric.insert(Fabric::new(discovery, routed, setup.target(), memberships));
        self.installed.note_tables(&setup, fabric);
        self.election.note_setup();
        self.remembered.update(fabric);
        self.multicast.adopt(fabric);
        self.service.adopt(before.as_ref(), fabric, &mut self.multicast.groups);
        self.schedule.rest(now);
    }

    /// Reports what went wrong, and repeats the sweep then.
    fn complain(&mut self, now: Duration, setup: &Setup) {
        match setup.complaints().first() {
            None => self.schedule.succeeded(),
            Some(first) => {
                let count = setup.complaints().len() + setup.complaints_left_out() as usize;
                self.outbox.report(Event::Incomplete(first.to_string(), count));
                self.schedule.retry(now);
            }
        }
    }

    // ---- light sweeps ---------------------------------------------------------------------------

    fn finish_look(&mut self, now: Duration, look: Look) {
        if look.is_partial {
            self.suspects.looked(now, !look.down.is_empty() || look.more.is_some());
        }
        if let Some(change) = look.more {
            self.outbox.report(Event::Noticed(change));
            return self.begin_heavy(now);
        }
        let (Some(first), Some(fabric)) = (look.down.first(), &self.fabric) else {
            return;
        };
        // Both ends may say so.
        let links: BTreeSet<Place> = look.down.iter().map(|end| fabric.first_end(*end)).collect();
        self.outbox.report(Event::LinksDown(*first, links.len()));
        let mut discovery = fabric.discovery.clone();
        discovery.cut(&look.down);
        self.route(discovery);
    }

    /// A trap: its sender hears that it has arrived, and the switch is looked at.
    fn handle_trap(&mut self, now: Duration, peer: Peer, mad: &[u8; MAD_BYTES]) {
        let notice = Notice::parse(&smp_data(mad));
        let is_heeded = notice.is_generic
            && matches!(notice.trap, PORT_CHANGED | CAPABILITY_CHANGED | WRONG_KEY)
            && self.election.is_master();
        let fabric = self.fabric.as_ref().filter(|_| is_heeded);
        let known = fabric.and_then(|fabric| fabric.directory.at(notice.issuer_lid));
        let Some((guid, _)) = known else {
            self.outbox.counters.ignored_traps += 1;
            return;
        };
        self.outbox.counters.traps += 1;
        let mut repress = *mad;
        repress[3] = method::TRAP_REPRESS;
        self.outbox.reply(peer, repress, MAD_BYTES);
        match notice.trap {
            PORT_CHANGED => self.suspects.add(guid),
            WRONG_KEY => {
                self.outbox.counters.wrong_keys += 1;
                let refusal = Refusal::WrongManagementKey(guid, notice.violator_lid);
                self.outbox.report_refusal(now, refusal);
            }
            // A manager may have begun or ended there.
            _ => self.schedule.suspect_stranger(now),
        }
    }

    // ---- multicast and subnet administration ----------------------------------------------------

    fn write_groups(&mut self, mut stages: VecDeque<MulticastTables>) {
        if let (Some(stage), Some(fabric)) = (stages.pop_front(), &self.fabric) {
            let requests = self.multicast.write(stage, fabric);
            self.ask(requests, Then::WriteGroups(stages));
        }
    }

    fn administer(&mut self, now: Duration, peer: Peer, mad: &[u8; MAD_BYTES]) {
        let (Some(fabric), Peer::Lid { lid, queue_pair, service_level }) = (&self.fabric, peer)
        else {
            self.outbox.counters.unanswered += 1;
            return;
        };
        let client = Client { lid, queue_pair, service_level };
        let (groups, outbox) = (&mut self.multicast.groups, &mut self.outbox);
        self.service.handle(now, client, mad, (fabric, self.election.own), groups, outbox);
    }

    // ---- the election ---------------------------------------------------------------------------

    /// All nodes and managers are known.
    fn elect(&mut self, now: Duration, discovery: Discovery) {
        match self.election.decide(now, self.config.interval * RIVAL_INTERVALS) {
            Decision::StandBy(other) => self.stand_by(now, other),
            Decision::Lead(why) => {
                self.outbox.counters.terms += 1;
                self.change(Standing::Master, why);
                self.read(discovery);
            }
            Decision::HandOver(other) => {
                let (attribute, modifier) = (Attribute::SmInfo, Control::Handover.modifier());
                let own = self.election.own.emit();
                let request = Request::set(other.route, attribute, modifier, own);
                self.ask(alloc::vec![(request, Question::HandOver)], Then::HandOver(other));
            }
            Decision::Wait(rival) => {
                self.outbox.report(Event::Rival(rival));
                self.schedule.retry(now);
            }
            Decision::Continue => self.read(discovery),
        }
    }

    fn handle_handover(&mut self, now: Duration, fate: &Fate) {
        let Task::Ask(_, Then::HandOver(other)) = self.task else {
            return;
        };
        match fate {
            Fate::Response(_) => self.stand_by(now, other),
            // It has not taken over, so this one goes on.
            Fate::Refused(_) | Fate::Silent => {
                let until = now + self.schedule.retry(now);
                self.election.keep_mastership(other.info.guid, until);
                self.schedule.heavy_at = Some(now);
            }
        }
    }

    fn stand_by(&mut self, now: Duration, other: Other) {
        self.election.watch(other);
        self.schedule.next_at = now + self.config.poll;
        self.give_up();
        self.change(Standing::Standby, Why::Other(other.info));
    }

    /// Forgets what holds for a master alone. LIDs stay: they are what ports without one get later.
    fn give_up(&mut self) {
        self.fabric = None;
        self.installed.clear();
        let partitions = self.partitions.iter();
        let broadcasts = partitions.flat_map(Partitions::broadcasts);
        self.multicast.clear(Groups::with_broadcasts(broadcasts));
        self.service.clear();
        self.suspects.clear();
        self.schedule.heavy_at = None;
        self.election.give_up();
    }

    /// Looks for the master again, and becomes it if there is none.
    fn seek(&mut self, now: Duration, why: Why) {
        self.election.seek(why);
        self.schedule.heavy_at = Some(now);
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
        if self.guid().is_none() {
            return;
        }
        let mut status = 0;
        if header.method == method::SET {
            if let Err(refusal) = self.obey(now, header.modifier, &smp_data(mad)) {
                status = INVALID;
                self.outbox.counters.refused_controls += 1;
                self.outbox.report_refusal(now, refusal);
            }
        } else if self.election.is_master() && self.election.is_alone() {
            // Somebody asks who was not there at the last heavy sweep.
            self.schedule.suspect_stranger(now);
        }
        let response = respond(mad, status, &self.election.own.emit());
        let peer = if header.class == DIRECTED_ROUTE { Peer::Directed } else { peer };
        self.outbox.reply(peer, response, MAD_BYTES);
    }

    /// Does what another manager wants, if that makes sense.
    fn obey(&mut self, now: Duration, modifier: u32, data: &[u8; 64]) -> Result<(), Refusal> {
        match self.election.obey(modifier, data) {
            Ok(Command::Nothing) => {}
            Ok(Command::Sweep) => self.schedule.suspect_stranger(now),
            Ok(Command::Seek(why)) => self.seek(now, why),
            Ok(Command::Stop) => {
                self.end_task();
                self.give_up();
                self.change(Standing::NotActive, Why::Told);
            }
            Err(refusal) => {
                if matches!(refusal, Refusal::Unknown(_)) && self.standing() != Standing::NotActive
                {
                    // It may be new; the next sweep tells.
                    self.schedule.suspect_stranger(now);
                }
                return Err(refusal);
            }
        }
        Ok(())
    }

    fn change(&mut self, standing: Standing, why: Why) {
        if self.standing() != standing {
            self.election.own.standing = standing;
            self.outbox.report(Event::Became(standing, why));
        }
    }
}

fn look_questions(requests: look::Requests) -> Vec<(Request, Question)> {
    let question = |(request, asked)| (request, Question::Look(asked));
    requests.into_iter().map(question).collect()
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
