//! A light sweep: which ports have changed since the last heavy one.
//!
//! Switches are asked whether a port has changed; those that say so, or that a trap came from, are
//! asked for all of their ports. PortStateChange is cleared first, and the ports are read once the
//! switch has confirmed that: requests may overtake each other, and a change after the clearing
//! sets it again.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use crate::discovery::{Discovery, Place};
use crate::exchange::{Done, Exchange, Fate, Numbering, Request};
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

/// See the module's text.
#[derive(Clone, Debug)]
pub(super) struct Look {
    pub(super) exchange: Exchange<Asked>,
    /// Ends of links that are down.
    pub(super) down: Vec<Place>,
    /// Why that is not all.
    pub(super) more: Option<Change>,
    /// Only those that traps came from.
    pub(super) is_partial: bool,
}

/// A change that takes a heavy sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// A port is up that was down, or was down for a moment.
    Up(Place),
    /// A switch does not respond any more.
    Silent(u64),
    /// A switch has not the tables that it got.
    Restarted(u64),
}

impl Look {
    /// At the switches that traps came from; at all of them if there are none.
    pub(super) fn at(
        discovery: &Discovery,
        suspects: &BTreeSet<u64>,
        numbering: Numbering,
    ) -> Look {
        let mut exchange = Exchange::beginning(numbering);
        let is_partial = !suspects.is_empty();
        for (guid, node) in discovery.nodes() {
            let is_asked = node.switch_info.is_some() && (!is_partial || suspects.contains(guid));
            if is_asked {
                let request = Request::get(node.route, Attribute::SwitchInfo, 0);
                exchange.request(request, Asked { guid: *guid, in_any_case: is_partial });
            }
        }
        Look { exchange, down: Vec::new(), more: None, is_partial }
    }

    /// A request is over. `top` is the last LID of the tables that switches got.
    pub(super) fn handle(&mut self, done: &Done<Asked>, discovery: &Discovery, top: u16) {
        let Asked { guid, .. } = done.context;
        let Fate::Response(data) = done.fate else {
            self.more.get_or_insert(Change::Silent(guid));
            return;
        };
        match done.request.attribute {
            Attribute::SwitchInfo => self.handle_switch(done, &data, discovery, top),
            Attribute::PortInfo => {
                let place = (guid, done.request.modifier as u8);
                self.handle_port(place, &PortInfo::parse(&data), discovery);
            }
            _ => {}
        }
    }

    fn handle_switch(
        &mut self,
        done: &Done<Asked>,
        info: &[u8; 64],
        discovery: &Discovery,
        top: u16,
    ) {
        let Asked { guid, in_any_case } = done.context;
        if linear_top(info) != top {
            self.more.get_or_insert(Change::Restarted(guid));
            return;
        }
        let route = done.request.route;
        let is_cleared = done.request.method == Method::Set;
        if !is_cleared && has_port_change(info) {
            let setting = port_change_clearing(info);
            let request = Request::set(route, Attribute::SwitchInfo, 0, setting);
            self.exchange.request(request, done.context);
            return;
        }
        let node = discovery.nodes().get(&guid).filter(|_| is_cleared || in_any_case);
        let Some(node) = node else {
            return;
        };
        for port in 1..=node.info.ports {
            let request = Request::get(route, Attribute::PortInfo, port.into());
            self.exchange.request(request, done.context);
        }
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
