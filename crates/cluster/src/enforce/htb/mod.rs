//! Plans kept by Linux' hierarchical token bucket (HTB): for software RoCE over UDP port 4791, at
//! the interface of a sender or at the ports of a switch that runs Linux.
//!
//! The state is the kernel's: queues stay in force when this process ends, however it ends, and the
//! next one recognises them by the number of the root and takes them over. Ports are changed in
//! place, in the order that [`tree`] proves; nothing is sent to the kernel for what is as it should
//! be. Of all ports that a call of [`apply`](Enforcer::apply) names, either all follow the new
//! plans, or all are put back as they were.
//!
//! Packets are lost in two places only: those that wait at an interface when the first plan
//! replaces its queueing discipline, or when the last one goes; and those that still wait for a job
//! that is gone after [`DRAIN`].
//!
//! Bytes are counted as the kernel counts them: whole Ethernet frames without preamble, checksum
//! and gap. There is one [`Htb`] for each network namespace: it removes our queues from interfaces
//! that are not named to it any more.

mod classifier;
mod messages;
mod tree;

use std::collections::BTreeMap;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

use nic::netlink::{Failure, Request, Socket};
use parfait::ledger::JobId;
use rustix::io::Errno;

use super::{EnforceError, Enforcer, PortPlan, Sent};
use messages::{Counts, Link, Qdisc, Root};
use tree::{Step, Tree};

/// How long the packets of jobs that are gone may take to leave, all ports together.
pub const DRAIN: Duration = Duration::from_millis(200);

/// How often their queues are looked at meanwhile.
const DRAIN_STEP: Duration = Duration::from_millis(2);

/// Kinds of addresses of interfaces whose packets begin with an Ethernet header.
const ETHERNET: [u16; 2] = [1, 772];

/// The longest name of an interface.
const NAME_BYTES: usize = 15;

/// What the kernel may not have at all.
const ROOT: &str = "HTB";
/// See [`ROOT`].
const QUEUE: &str = "the queue of a class";
/// See [`ROOT`].
const CLASSIFIER: &str = "classification by BPF";

/// See the module's text.
#[derive(Debug)]
pub struct Htb {
    socket: Socket,
    /// Whether queues that somebody else configured may be replaced.
    replaces: bool,
    /// The plans in force, by interface as it is named in them.
    ports: BTreeMap<String, Port>,
}

/// An interface whose plan is in force.
#[derive(Debug)]
struct Port {
    index: i32,
    accounts: BTreeMap<JobId, Account>,
}

/// What a job has sent: what its class has counted since it is the job's, and what others have
/// before.
#[derive(Clone, Copy, Debug)]
struct Account {
    class: u16,
    base: Counts,
    earlier: Counts,
}

impl Account {
    /// What was counted, when its class has counted `now`.
    fn total(&self, now: Counts) -> Counts {
        let since = |now: u64, base: u64| now.checked_sub(base).unwrap_or(now);
        let dropped = since(now.dropped_packets, self.base.dropped_packets);
        Counts {
            bytes: self.earlier.bytes + since(now.bytes, self.base.bytes),
            dropped_packets: self.earlier.dropped_packets + dropped,
            backlog_bytes: now.backlog_bytes,
        }
    }
}

/// What is at an interface.
#[derive(Debug)]
struct Found {
    is_foreign: bool,
    tree: Tree,
    counts: BTreeMap<u16, Counts>,
}

/// A port on its way from one tree to another.
#[derive(Debug)]
struct Change<'a> {
    plan: &'a PortPlan,
    link: Link,
    before: Found,
    after: Tree,
}

impl Htb {
    /// For the interfaces of this thread's network namespace.
    ///
    /// # Errors
    /// [`EnforceError::Unreachable`] without a netlink socket.
    pub fn open() -> Result<Htb, EnforceError> {
        let socket = Socket::open().map_err(|failure| EnforceError::Unreachable(failure.into()))?;
        Ok(Htb { socket, replaces: false, ports: BTreeMap::new() })
    }

    /// The same, which replaces queues that somebody else configured. They are not put back later.
    #[must_use]
    pub fn replacing(self) -> Htb {
        Htb { replaces: true, ..self }
    }

    /// What there is to change, if all of it can be tried.
    fn changes<'a>(
        &mut self,
        plans: &'a [PortPlan],
        qdiscs: &[Qdisc],
    ) -> Result<Vec<Change<'a>>, EnforceError> {
        let mut changes: Vec<Change> = Vec::new();
        for plan in plans {
            let link = self.link(&plan.interface)?;
            if changes.iter().any(|other| other.link.index == link.index) {
                return Err(EnforceError::two_plans(&plan.interface));
            }
            let root = messages::root(qdiscs, link.index);
            let is_foreign = match root {
                Root::Foreign(found) if !self.replaces => {
                    return Err(EnforceError::Occupied {
                        interface: plan.interface.clone(),
                        found,
                    });
                }
                Root::Foreign(_) => true,
                Root::Default | Root::Ours => false,
            };
            let found = match root {
                Root::Ours => self.found(&plan.interface, link.index, qdiscs)?,
                _ => Found { is_foreign, tree: Tree::default(), counts: BTreeMap::new() },
            };
            changes.push(Change { plan, link, before: found, after: Tree::of(&plan.plan) });
        }
        Ok(changes)
    }

    fn link(&mut self, name: &str) -> Result<Link, EnforceError> {
        let missing = || EnforceError::NoInterface(name.to_owned());
        if name.is_empty() || name.len() > NAME_BYTES || name.contains('\0') {
            return Err(missing());
        }
        let replies = self.ask(name, "to look it up", messages::get_link(name))?;
        let link = replies.first().and_then(|reply| messages::link(reply)).ok_or_else(missing)?;
        if !ETHERNET.contains(&link.kind) {
            let cause = io::Error::other("its packets have no Ethernet header");
            let interface = name.to_owned();
            return Err(EnforceError::Unsupported { interface, what: "classification", cause });
        }
        Ok(link)
    }

    fn qdiscs(&mut self) -> Result<Vec<Qdisc>, EnforceError> {
        let all = self.list("", "to list queueing disciplines", &messages::get_qdiscs())?;
        Ok(all.iter().filter_map(|message| messages::qdisc(message)).collect())
    }

    fn found(
        &mut self,
        interface: &str,
        index: i32,
        qdiscs: &[Qdisc],
    ) -> Result<Found, EnforceError> {
        let classes = self.list(interface, "to list classes", &messages::get_classes(index))?;
        let filters = self.list(interface, "to list filters", &messages::get_filters(index))?;
        let counts = classes.iter().filter_map(|message| messages::counts(message)).collect();
        let tree = messages::tree(qdiscs, index, &classes, &filters);
        Ok(Found { is_foreign: false, tree, counts })
    }

    fn counts(
        &mut self,
        interface: &str,
        index: i32,
    ) -> Result<BTreeMap<u16, Counts>, EnforceError> {
        let classes = self.list(interface, "to read counters", &messages::get_classes(index))?;
        Ok(classes.iter().filter_map(|message| messages::counts(message)).collect())
    }

    /// Leads a port from one tree to another, until `deadline` for what has to drain.
    fn change(&mut self, change: &Change, deadline: Instant) -> Result<(), EnforceError> {
        for step in tree::steps(&change.before.tree, &change.after) {
            self.step(change, step, deadline)?;
        }
        Ok(())
    }

    fn step(&mut self, change: &Change, step: Step, deadline: Instant) -> Result<(), EnforceError> {
        let (name, index) = (&change.link.name, change.link.index);
        let (what, request) = match step {
            Step::Root => (ROOT, messages::new_root(index, change.before.is_foreign)),
            Step::Port(class) => {
                ("the class of the port", messages::put_class(index, tree::PORT, &class))
            }
            Step::Add(number, class) => ("a new class", messages::put_class(index, number, &class)),
            Step::Change(number, class) => {
                ("the change of a class", messages::put_class(index, number, &class))
            }
            Step::Limit(number, bytes) => (QUEUE, messages::put_queue(index, number, bytes)),
            Step::Filter => (CLASSIFIER, messages::classify(index)),
            Step::Remove(number) => {
                self.drain(name, index, number, deadline)?;
                ("the removal of a class", messages::delete_class(index, number))
            }
        };
        self.ask(name, what, request).map(drop)
    }

    /// Waits until a class is empty.
    fn drain(
        &mut self,
        interface: &str,
        index: i32,
        class: u16,
        deadline: Instant,
    ) -> Result<(), EnforceError> {
        loop {
            let counts = self.counts(interface, index)?;
            let backlog_bytes = counts.get(&class).map_or(0, |counts| counts.backlog_bytes);
            if backlog_bytes == 0 || Instant::now() >= deadline {
                return Ok(());
            }
            thread::sleep(DRAIN_STEP);
        }
    }

    /// Puts a port back as it was, as far as the kernel lets it: the error that led here is what
    /// counts.
    fn put_back(&mut self, change: &Change) {
        let index = change.link.index;
        if !change.before.tree.has_root {
            let _ = self.socket.request(messages::delete_root(index));
            return;
        }
        let Ok(qdiscs) = self.qdiscs() else { return };
        let Ok(now) = self.found(&change.link.name, index, &qdiscs) else { return };
        let now_on = Instant::now();
        for step in tree::steps(&now.tree, &change.before.tree) {
            let _ = self.step(change, step, now_on);
        }
    }

    /// Removes our root from the interfaces that no plan names.
    fn remove_others(&mut self, changes: &[Change], qdiscs: &[Qdisc]) -> Result<(), EnforceError> {
        let is_named = |index: &i32| changes.iter().any(|change| change.link.index == *index);
        let gone: Vec<i32> =
            messages::ours(qdiscs).into_iter().filter(|index| !is_named(index)).collect();
        if gone.is_empty() {
            return Ok(());
        }
        let links = self.list("", "to list interfaces", &messages::get_links())?;
        for link in links.iter().filter_map(|message| messages::link(message)) {
            if gone.contains(&link.index) {
                let request = messages::delete_root(link.index);
                self.ask(&link.name, "the removal of our queues", request)?;
            }
        }
        Ok(())
    }

    /// The accounts of a port that has just got its plan.
    fn accounts(&self, change: &Change) -> BTreeMap<JobId, Account> {
        let before = &change.before.counts;
        let counted = |class: u16| before.get(&class).copied().unwrap_or_default();
        let old =
            self.ports.get(&change.plan.interface).filter(|port| port.index == change.link.index);
        let account = |job: JobId, class: u16| {
            let fresh = Account { class, base: counted(class), earlier: Counts::default() };
            match old.and_then(|port| port.accounts.get(&job)) {
                Some(account) if account.class == class && before.contains_key(&class) => *account,
                Some(account) => {
                    Account { earlier: account.total(counted(account.class)), ..fresh }
                }
                None => fresh,
            }
        };
        let bindings = change.plan.plan.bindings().iter().map(|own| own.guarantee);
        let class = |dscp: u8| tree::JOBS | u16::from(dscp);
        bindings.map(|own| (own.job, account(own.job, class(own.dscp.value())))).collect()
    }

    fn ask(
        &mut self,
        interface: &str,
        what: &'static str,
        request: Request,
    ) -> Result<Vec<Vec<u8>>, EnforceError> {
        self.socket.request(request).map_err(|failure| refused(interface, what, failure))
    }

    fn list(
        &mut self,
        interface: &str,
        what: &'static str,
        request: &Request,
    ) -> Result<Vec<Vec<u8>>, EnforceError> {
        self.socket.dump(request).map_err(|failure| refused(interface, what, failure))
    }
}

fn refused(interface: &str, what: &'static str, failure: Failure) -> EnforceError {
    let interface = interface.to_owned();
    match failure.errno() {
        Some(Errno::NODEV) => EnforceError::NoInterface(interface),
        Some(Errno::OPNOTSUPP) => {
            EnforceError::Unsupported { interface, what, cause: failure.into() }
        }
        // A kind of queue or filter that the kernel does not have "does not exist".
        Some(Errno::NOENT) if [ROOT, QUEUE, CLASSIFIER].contains(&what) => {
            EnforceError::Unsupported { interface, what, cause: failure.into() }
        }
        _ => EnforceError::Refused { interface, what, cause: failure.into() },
    }
}

impl Enforcer for Htb {
    fn apply(&mut self, ports: &[PortPlan]) -> Result<(), EnforceError> {
        let qdiscs = self.qdiscs()?;
        let changes = self.changes(ports, &qdiscs)?;
        let deadline = Instant::now() + DRAIN;
        for (number, change) in changes.iter().enumerate() {
            if let Err(error) = self.change(change, deadline) {
                changes[..=number].iter().rev().for_each(|change| self.put_back(change));
                return Err(error);
            }
        }
        if let Err(error) = self.remove_others(&changes, &qdiscs) {
            changes.iter().rev().for_each(|change| self.put_back(change));
            return Err(error);
        }
        let port = |change: &Change| {
            let port = Port { index: change.link.index, accounts: self.accounts(change) };
            (change.plan.interface.clone(), port)
        };
        self.ports = changes.iter().map(port).collect();
        Ok(())
    }

    fn sent(&mut self) -> Result<Vec<Sent>, EnforceError> {
        let ports: Vec<(String, i32)> =
            self.ports.iter().map(|(name, port)| (name.clone(), port.index)).collect();
        let mut sent = Vec::new();
        for (interface, index) in ports {
            let counts = self.counts(&interface, index)?;
            for (job, account) in &self.ports[&interface].accounts {
                let Some(now) = counts.get(&account.class) else {
                    let cause =
                        io::Error::other(format!("somebody removed the class of job {job}"));
                    return Err(EnforceError::Refused {
                        interface,
                        what: "to read counters",
                        cause,
                    });
                };
                let Counts { bytes, dropped_packets, backlog_bytes } = account.total(*now);
                let interface = interface.clone();
                sent.push(Sent { interface, job: *job, bytes, dropped_packets, backlog_bytes });
            }
        }
        Ok(sent)
    }
}
