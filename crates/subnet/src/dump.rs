//! Forwarding tables as text, as opensm (`opensm-lfts.dump`) and `dump_fts` of infiniband-diags
//! write them.
//!
//! A topology has neither GUIDs nor LIDs, so they get those that ibsim and then
//! `dquant subnet manage` give: hosts from 0x100000 on, one for the node and one for each of its
//! ports; switches from 0x200000 on; LIDs from 1 in the order of GUIDs.

use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt::Write;

use topology::channels::Channels;
use topology::graph::Topology;
use topology::routes::{NO_ROUTE, Tables, up_down::Ranks};

use crate::forwarding::{Detour, Forwarding};
use crate::lids::Owner;

/// Who has a LID: what a line says of it.
struct Ends {
    /// By LID.
    owners: Vec<Owner>,
    /// By LID, behind the port.
    texts: Vec<String>,
    /// GUIDs of switches, by number.
    guids: Vec<u64>,
}

/// The tables of all switches; LIDs without a route are left out.
pub fn tables(topology: &Topology, channels: &Channels, tables: &Tables) -> String {
    let ends = Ends::new(topology, channels);
    let ranks = Ranks::of(channels);
    let forwarding = Forwarding::new(channels, tables, &ranks, &ends.owners, Detour::Allowed);
    let top = ends.owners.len() - 1;
    let mut text = String::new();
    for (number, switch) in (0_u32..).zip(channels.switches()) {
        let (guid, name) = (ends.guids[number as usize], topology.node(*switch).name());
        // Writing to a string does not fail.
        let _ = writeln!(text, "Unicast lids [0x0-{top:#x}] of switch guid {guid:#018x} ({name}):");
        text.push_str("  Lid  Out   Destination\n       Port     Info \n");
        let mut valid = 0;
        for (lid, owner) in (1..=top).zip(&ends.texts[1..]) {
            let port = forwarding.port(number, lid as u16);
            if port != NO_ROUTE {
                valid += 1;
                let _ = writeln!(text, "{lid:#06x} {port:03} : ({owner})");
            }
        }
        let _ = writeln!(text, "{valid} valid lids dumped ");
    }
    text
}

impl Ends {
    fn new(topology: &Topology, channels: &Channels) -> Ends {
        let mut owners = vec![Owner::Nobody];
        let mut texts = vec![String::new()];
        let mut guid = 0x10_0000_u64;
        // They are in the order of hosts and ports.
        let mut end_ports = (0..).zip(channels.end_ports()).peekable();
        for host in topology.hosts() {
            let node = topology.node(host);
            while let Some((at, end_port)) = end_ports.next_if(|(_, one)| one.end.node == host) {
                let port_guid = guid + u64::from(end_port.end.port);
                owners.push(Owner::EndPort(at));
                texts
                    .push(format!("Channel Adapter portguid {port_guid:#018x}: '{}'", node.name()));
            }
            guid += u64::from(node.ports()) + 1;
        }
        let mut guids = Vec::new();
        for (at, switch) in (0..).zip(channels.switches()) {
            let guid = 0x20_0000 + u64::from(at);
            owners.push(Owner::Switch(at));
            texts
                .push(format!("Switch portguid {guid:#018x}: '{}'", topology.node(*switch).name()));
            guids.push(guid);
        }
        Ends { owners, texts, guids }
    }
}
