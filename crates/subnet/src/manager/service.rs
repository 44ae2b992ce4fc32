//! Subnet administration as a service: who asks gets an answer, a table, or later a report. What is
//! answered is a matter of [`administration`].

use core::time::Duration;

use super::fabric::Fabric;
use super::outbox::{Datagram, Outbox, Peer};
use crate::administration::groups::Groups;
use crate::administration::inform::{Happening, Subscriptions};
use crate::administration::rmpp::{Client, Sender};
use crate::administration::{self, Gid, Reply, Status, Subnet};
use crate::mad::MAD_BYTES;
use crate::sm_info::SmInfo;

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Service {
    /// Tables that are under way.
    pub(super) sender: Sender,
    pub(super) subscriptions: Subscriptions,
}

impl Service {
    /// The manager is no master any more.
    pub(super) fn clear(&mut self) {
        self.sender.clear();
        self.subscriptions.clear();
    }

    /// The next segment of a table, or report to a subscriber. `own` is the manager's port.
    pub(super) fn poll_transmit(&mut self, now: Duration, own: (u16, Gid)) -> Option<Datagram> {
        if let Some((client, mad, len)) = self.sender.poll_transmit(now) {
            return Some(Datagram { peer: Peer::from(client), mad, len });
        }
        let has_work = self.subscriptions.has_work();
        let (client, mad) = has_work.then(|| self.subscriptions.poll_transmit(now, own))??;
        Some(Datagram { peer: Peer::from(client), mad, len: MAD_BYTES })
    }

    pub(super) fn poll_timeout(&self) -> Option<Duration> {
        let both = [self.sender.poll_timeout(), self.subscriptions.poll_timeout()];
        both.into_iter().flatten().min()
    }

    pub(super) fn handle_timeout(&mut self, now: Duration) {
        self.sender.handle_timeout(now);
        self.subscriptions.handle_timeout(now);
    }

    /// A datagram of a client, about the fabric that this manager has set up.
    pub(super) fn handle(
        &mut self,
        now: Duration,
        client: Client,
        mad: &[u8; MAD_BYTES],
        (fabric, manager): (&Fabric, SmInfo),
        groups: &mut Groups,
        outbox: &mut Outbox,
    ) {
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
        let lids = fabric.directory.lids_beside(client.lid);
        let room = self.sender.room(lids.clone());
        let subnet = Subnet {
            discovery: &fabric.discovery,
            lids: &fabric.lids,
            directory: &fabric.directory,
            tables: &fabric.tables,
            numbers: &fabric.numbers,
            levels: &fabric.routed.levels,
            memberships: fabric.memberships.as_ref(),
            manager,
            room,
        };
        let subscribed = self.subscriptions.answer(client, lids, fabric.own_lid, mad);
        let answer =
            subscribed.or_else(|| administration::answer(&subnet, groups, client.lid, mad));
        self.happen(groups);
        match answer {
            Some(Reply::Datagram(response, len)) => {
                outbox.counters.answered += 1;
                let is_without_room = response[4..6] == Status::NoResources.code().to_be_bytes();
                outbox.counters.without_room += u64::from(is_without_room);
                outbox.reply(Peer::from(client), response, len);
            }
            Some(Reply::Table(table)) => {
                outbox.counters.answered += 1;
                self.sender.send(now, client, table);
            }
            None => outbox.counters.malformed += 1,
        }
    }

    /// Tells subscribers which groups came and went.
    fn happen(&mut self, groups: &mut Groups) {
        for what in groups.take_happened() {
            self.subscriptions.happen(what);
        }
    }

    /// The fabric is another: tells subscribers that are still there which ports and groups came
    /// and went since the one before.
    pub(super) fn adopt(&mut self, before: Option<&Fabric>, fabric: &Fabric, groups: &mut Groups) {
        self.subscriptions.keep(|lid| fabric.directory.at(lid).is_some());
        if let Some(before) = before {
            let gone = ports_beside(before, fabric).map(Happening::OutOfService);
            for what in gone.chain(ports_beside(fabric, before).map(Happening::InService)) {
                self.subscriptions.happen(what);
            }
        }
        self.happen(groups);
    }
}

/// Ports of one fabric that another has not.
fn ports_beside<'a>(one: &'a Fabric, other: &'a Fabric) -> impl Iterator<Item = Gid> + 'a {
    let places = one.lids.iter().filter(|(place, _)| other.lids.of(*place).is_none());
    places.filter_map(|(place, _)| one.discovery.port_guid(place).map(Gid::of))
}
