//! Plans kept by a NIC with data centre bridging (DCB): its traffic classes are the queues of the
//! plan, by IEEE 802.1Qaz bandwidths (ETS), and its table of priorities by DSCP brings jobs into
//! them. Priority flow control stays as it is.
//!
//! A [`Dcb`] governs the bandwidths, the classes of priorities, and the priorities of the code
//! points that jobs and congestion notifications may have. Those of other code points stay. On a
//! change, bandwidths come first, then new priorities, then those that go; no packet is lost, and a
//! job that changes its class may have a few packets reordered. Agents keep jobs in their classes
//! as far as they can (`parfait::queues::rebinding::renamed`). What is as it should be is not sent.
//!
//! The state is the NIC's and outlives this process. When a port is not named any more, it gets
//! back what it had when this [`Dcb`] first saw it. Counters of traffic classes are not part of
//! DCB: nothing is known of what jobs have sent.

#[cfg(test)]
mod fake;
mod messages;
#[cfg(test)]
mod oracle;
mod table;

use std::collections::BTreeMap;
use std::io;

use nic::netlink::{Failure, Request, Socket};
use rustix::io::Errno;

use super::{EnforceError, Enforcer, PortPlan, Sent};
use messages::{Ets, State};
use table::{Mapping, Table};

/// See the module's text.
#[derive(Debug)]
pub struct Dcb {
    socket: Socket,
    /// What interfaces with plans had before, by their names.
    before: BTreeMap<String, State>,
}

/// An interface on its way to another state.
#[derive(Debug)]
struct Change {
    interface: String,
    from: State,
    to: State,
}

impl Dcb {
    /// For the interfaces of this thread's network namespace.
    ///
    /// # Errors
    /// [`EnforceError::Unreachable`] without a netlink socket.
    pub fn open() -> Result<Dcb, EnforceError> {
        let socket = Socket::open().map_err(|failure| EnforceError::Unreachable(failure.into()))?;
        Ok(Dcb { socket, before: BTreeMap::new() })
    }

    fn change_for(&mut self, port: &PortPlan) -> Result<Change, EnforceError> {
        let interface = port.interface.clone();
        let from = self.state(&interface)?;
        let unsupported = |interface: &str, what, cause| EnforceError::Unsupported {
            interface: interface.to_owned(),
            what,
            cause,
        };
        let Some(ets) = from.ets else {
            let cause = io::Error::other("the driver reports no bandwidths");
            return Err(unsupported(&interface, "ETS", cause));
        };
        let table = Table::of(&port.plan, ets.classes())
            .map_err(|refusal| unsupported(&interface, "the plan", io::Error::other(refusal)))?;
        let to = target(&from, &ets, table);
        Ok(Change { interface, from, to })
    }

    fn state(&mut self, interface: &str) -> Result<State, EnforceError> {
        let replies = self.ask(interface, "DCB", messages::get(interface))?;
        replies.first().and_then(|reply| messages::state(reply)).ok_or_else(|| {
            let failure = Failure::Reply("it has no IEEE attributes");
            refused(interface, "DCB", failure)
        })
    }

    /// Leads an interface from one state to another.
    fn change(&mut self, interface: &str, from: &State, to: &State) -> Result<(), EnforceError> {
        if let Some(ets) = to.ets.filter(|ets| from.ets != Some(*ets)) {
            self.set(interface, "ETS", messages::set_ets(interface, &ets))?;
        }
        let missing = |from: &State, to: &State| -> Vec<Mapping> {
            to.mappings.iter().filter(|own| !from.mappings.contains(own)).copied().collect()
        };
        let (new, gone) = (missing(from, to), missing(to, from));
        if !new.is_empty() {
            self.set(interface, "priorities by DSCP", messages::add(interface, &new))?;
        }
        if !gone.is_empty() {
            self.set(interface, "priorities by DSCP", messages::delete(interface, &gone))?;
        }
        Ok(())
    }

    /// Leads an interface to its new state and looks whether it is there: the kernel does not say
    /// what a driver lacks.
    fn verified(&mut self, change: &Change) -> Result<(), EnforceError> {
        self.change(&change.interface, &change.from, &change.to)?;
        let now = self.state(&change.interface)?;
        let bandwidth = |state: &State| state.ets.map(|ets| ets.bandwidth());
        let lacking = match () {
            () if bandwidth(&now) != bandwidth(&change.to) => "ETS",
            () if now.mappings != change.to.mappings => "priorities by DSCP",
            () => return Ok(()),
        };
        let cause = io::Error::other("the driver took it and does something else");
        let interface = change.interface.clone();
        Err(EnforceError::Unsupported { interface, what: lacking, cause })
    }

    /// Puts an interface back as it was, as far as its driver lets it: the error that led here is
    /// what counts.
    fn put_back(&mut self, change: &Change) {
        if let Ok(now) = self.state(&change.interface) {
            let _ = self.change(&change.interface, &now, &change.from);
        }
    }

    fn ask(
        &mut self,
        interface: &str,
        what: &'static str,
        request: Request,
    ) -> Result<Vec<Vec<u8>>, EnforceError> {
        self.socket.request(request).map_err(|failure| refused(interface, what, failure))
    }

    /// Asks for a change, and looks at what the driver says of it.
    fn set(
        &mut self,
        interface: &str,
        what: &'static str,
        request: Request,
    ) -> Result<(), EnforceError> {
        for reply in self.ask(interface, what, request)? {
            messages::verdict(&reply)
                .map_err(|errno| refused(interface, what, Failure::Kernel(errno, None)))?;
        }
        Ok(())
    }
}

/// The state with the plan's table in place of what is governed.
fn target(from: &State, ets: &Ets, table: Table) -> State {
    let kept = from.mappings.iter().filter(|own| !own.is_governed()).copied();
    let mut mappings: Vec<Mapping> = kept.chain(table.mappings).collect();
    mappings.sort_unstable();
    State { ets: Some(ets.with(&table.bandwidth)), mappings }
}

fn refused(interface: &str, what: &'static str, failure: Failure) -> EnforceError {
    let interface = interface.to_owned();
    match failure.errno() {
        Some(Errno::NODEV) => EnforceError::NoInterface(interface),
        Some(Errno::OPNOTSUPP) => {
            EnforceError::Unsupported { interface, what, cause: failure.into() }
        }
        _ => EnforceError::Refused { interface, what, cause: failure.into() },
    }
}

impl Enforcer for Dcb {
    fn apply(&mut self, ports: &[PortPlan]) -> Result<(), EnforceError> {
        let mut changes: Vec<Change> = Vec::new();
        for port in ports {
            if changes.iter().any(|other| other.interface == port.interface) {
                return Err(EnforceError::two_plans(&port.interface));
            }
            changes.push(self.change_for(port)?);
        }
        for (interface, before) in &self.before.clone() {
            if changes.iter().any(|change| change.interface == *interface) {
                continue;
            }
            // An interface that has gone has taken its state with it.
            if let Ok(from) = self.state(interface) {
                let (interface, to) = (interface.clone(), before.clone());
                changes.push(Change { interface, from, to });
            }
        }
        for (number, change) in changes.iter().enumerate() {
            if let Err(error) = self.verified(change) {
                changes[..=number].iter().rev().for_each(|change| self.put_back(change));
                return Err(error);
            }
        }
        let named = |interface: &String| ports.iter().any(|port| port.interface == *interface);
        self.before.retain(|interface, _| named(interface));
        for change in changes.into_iter().filter(|change| named(&change.interface)) {
            self.before.entry(change.interface).or_insert(change.from);
        }
        Ok(())
    }

    fn sent(&mut self) -> Result<Vec<Sent>, EnforceError> {
        Ok(Vec::new())
    }
}
