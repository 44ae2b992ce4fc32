//! A light sweep: which ports have changed since the last heavy one.
//!
//! Switches are asked whether a port has changed; those that say so, or that a trap came from, are
//! asked for all of their ports. PortStateChange is cleared first, and the ports are read once the
//! switch has confirmed that: requests may overtake each other, and a change after the clearing
//! sets it again.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use thiserror::Error;

use crate::discovery::{Discovery, FoundNode, Place};
use crate::exchange::{Fate, Request};
use crate::mad::{
    Attribute, Method, PortInfo, PortState, has_port_change, linear_top, port_change_clearing,
};

/// What a switch is asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    guid: u64,
    /// It is asked for its ports even if it says that none has changed.
    in_any_case: bool,
}

/// Requests of a look.
pub(super) type Requests = Vec<(Request, Asked)>;

/// See the module's text.
#[derive(Clone, Debug, Default)]
pub(super) struct Look {
    /// Ends of links that are down.
    pub(super) down: Vec<Place>,
    /// Why that is not all.
    pub(super) more: Option<Change>,
    /// Only those that traps came from.
    pub(super) is_partial: bool,
}

/// A change that takes a heavy sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Change {
    /// A port is up that was down, or was down for a moment.
    #[error("port {} of {:#018x} came up", .0.1, .0.0)]
    Up(Place),
    /// A switch does not respond any more.
    #[error("switch {0:#018x} does not respond")]
    Silent(u64),
    /// A switch has not the tables that it got.
    #[error("switch {0:#018x} has lost its tables")]
    Restarted(u64),
}

impl Look {
    /// At the switches that traps came from; at all of them if there are none.
    pub(super) fn at(discovery: &Discovery, suspects: &BTreeSet<u64>) -> (Look, Requests) {
        let is_partial = !suspects.is_empty();
        let is_asked = |guid| !is_partial || suspects.contains(guid);
        let nodes = discovery.nodes().iter();
        let asked = nodes.filter(|(guid, node)| node.switch_info.is_some() && is_asked(guid));
        let request = |(guid, node): (&u64, &FoundNode)| {
            let asked = Asked { guid: *guid, in_any_case: is_partial };
            (Request::get(node.route, Attribute::SwitchInfo, 0), asked)
        };
        (Look { is_partial, ..Look::default() }, asked.map(request).collect())
    }

    /// A request is over. `top` is the last LID of the tables that switches got. Returns what is
    /// asked next.
    pub(super) fn handle(
        &mut self,
        request: &Request,
        asked: Asked,
        fate: &Fate,
        (discovery, top): (&Discovery, u16),
    ) -> Requests {
        let Fate::Response(data) = fate else {
            self.more.get_or_insert(Change::Silent(asked.guid));
            return Requests::new();
        };
        match request.attribute {
            Attribute::SwitchInfo => {
                return self.handle_switch(request, asked, data, (discovery, top));
            }
            Attribute::PortInfo => {
                let place = (asked.guid, request.modifier as u8);
                self.handle_port(place, &PortInfo::parse(data), discovery);
            }
            _ => {}
        }
        Requests::new()
    }

    fn handle_switch(
        &mut self,
        request: &Request,
        asked: Asked,
        info: &[u8; 64],
        (discovery, top): (&Discovery, u16),
    ) -> Requests {
        if linear_top(info) != top {
            self.more.get_or_insert(Change::Restarted(asked.guid));
            return Requests::new();
        }
        let route = request.route;
        let is_cleared = request.method == Method::Set;
        if !is_cleared && has_port_change(info) {
            let setting = port_change_clearing(info);
            return alloc::vec![(Request::set(route, Attribute::SwitchInfo, 0, setting), asked)];
        }
        let node = discovery.nodes().get(&asked.guid);
        let ports =
            node.filter(|_| is_cleared || asked.in_any_case).map_or(0, |node| node.info.ports);
        let request = |port: u8| (Request::get(route, Attribute::PortInfo, port.into()), asked);
        (1..=ports).map(request).collect()
    }

    fn handle_port(&mut self, place: Place, now: &PortInfo, discovery: &Discovery) {
        let is_linked = discovery.links().contains_key(&place);
        let is_up = now.state > Some(PortState::Down);
        match (is_linked, is_up) {
            (true, false) => self.down.push(place),
            // It was in use, or is not yet.
            (true, true) if now.state == Some(PortState::Initialize) => {
                self.more.get_or_insert(Change::Up(place));
            }
            (false, true) => {
                self.more.get_or_insert(Change::Up(place));
            }
            _ => {}
        }
    }
}
