//! What a manager reports, in the words of its log.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::{String, ToString};
use core::fmt;

use thiserror::Error;

use super::look::Change;
use super::work::{Fallback, How};
use crate::discovery::Place;
use crate::sm_info::{SmInfo, Standing};
use topology::routes::Engine;

/// Something that the operator may want to know.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Event {
    /// It is in another state.
    #[error("{0}: {1}")]
    Became(Standing, Why),
    /// Why the fabric is discovered anew.
    #[error("{0}")]
    Noticed(Change),
    /// Links went down: one of them, and how many.
    #[error("{}", links_down(.0, *.1))]
    LinksDown(Place, usize),
    /// The fabric is set up.
    #[error("{0}")]
    SetUp(Summary),
    /// Nothing was changed.
    #[error("the fabric keeps its last tables: {0}")]
    Kept(Trouble),
    /// A part of the fabric did not do what it was asked for: one complaint, and how many there
    /// are.
    #[error("{}", incomplete(.0, *.1))]
    Incomplete(String, usize),
    /// Another manager is master, too; it has to give way.
    #[error("{:#018x} is master, too, with priority {}", .0.guid, .0.priority)]
    Rival(SmInfo),
    /// A manager, by its GUID, has another SM_Key and is ignored.
    #[error("the manager {0:#018x} has another SM_Key and is ignored")]
    Foreign(u64),
    /// A request of another manager, or an SMP with a wrong M_Key, was refused; at most one such
    /// event a second, with the number of those in between.
    #[error("{}", refused(.0, *.1))]
    Refused(Refusal, u64),
}

/// Why a manager is in another state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Why {
    /// No other goes before it.
    #[error("no other manager goes before this one")]
    First,
    /// This one is master, or goes before it.
    #[error("{:#018x} is {}, with priority {}", .0.guid, .0.standing, .0.priority)]
    Other(SmInfo),
    /// The master, by its GUID, has not responded for so many polls.
    #[error("the master {0:#018x} has not responded to {1} polls")]
    MasterSilent(u64, u32),
    /// The master is none any more.
    #[error("{0:#018x} is master no more")]
    MasterGone(u64),
    /// The master has handed over.
    #[error("handed over by {0:#018x}")]
    HandedOver(u64),
    /// Another manager wants it so.
    #[error("another manager wants it so")]
    Told,
}

/// Why nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Trouble {
    /// The fabric cannot be routed, or addressed.
    #[error("{0}")]
    Unroutable(String),
    /// This node's own port does not respond.
    #[error("this node's own port does not respond")]
    NoPort,
    /// The link of this node's port is down.
    #[error("the link of this node's port is down")]
    PortDown,
}

/// Why a request of another manager was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    /// Nobody with this GUID was found to be a manager.
    #[error("refused a control message of {0:#018x}, which is no known manager")]
    Unknown(u64),
    /// The SM_Key is another.
    #[error("refused a control message of {0:#018x} with another SM_Key")]
    WrongKey(u64),
    /// A node, by its GUID, refused an SMP from this LID with a wrong M_Key.
    #[error("{:#018x} refused an SMP with a wrong M_Key{}", .0, wrong_key_from(*.1))]
    WrongManagementKey(u64, u16),
    /// Not in this state.
    #[error("refused a control message that makes no sense for a manager that is {0}")]
    Standing(Standing),
    /// It is nothing that can be asked for.
    #[error("refused a malformed SMInfo")]
    Malformed,
}

/// What was set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Adapters and routers.
    pub hosts: usize,
    /// Switches.
    pub switches: usize,
    /// Links.
    pub links: usize,
    /// Ports with LIDs.
    pub lids: usize,
    /// The engine of the tables.
    pub engine: Engine,
    /// Where they came from.
    pub how: How,
    /// LIDs whose entries changed.
    pub changed: usize,
    /// Of these, LIDs that changed switch by switch, so that no loop came to be.
    pub ordered: usize,
    /// And LIDs that had no route for a moment, so that no cycle came to be.
    pub drained: usize,
    /// Blocks that were written.
    pub blocks: usize,
    /// Virtual lanes of paths.
    pub lanes: u8,
    /// Since the sweep began.
    pub nanoseconds: u64,
}

impl Event {
    /// A name that programs know it by.
    pub fn name(&self) -> &'static str {
        match self {
            Event::Became(..) => "became",
            Event::Noticed(_) => "noticed",
            Event::LinksDown(..) => "links-down",
            Event::SetUp(_) => "set-up",
            Event::Kept(_) => "kept",
            Event::Incomplete(..) => "incomplete",
            Event::Rival(_) => "rival",
            Event::Foreign(_) => "foreign",
            Event::Refused(..) => "refused",
        }
    }

    /// What the operator can do about it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Event::Kept(Trouble::Unroutable(_)) => {
                Some("try --engine up-down; the next sweep tries again")
            }
            Event::Kept(Trouble::NoPort) => Some("is the driver of this node's device loaded?"),
            Event::Kept(Trouble::PortDown) => {
                Some("check the cable of this node's port; the next sweep tries again")
            }
            Event::Incomplete(..) => Some(
                "the next sweep tries again; a port that stays silent is broken, or has an M_Key: see --m-key",
            ),
            Event::Rival(_) => {
                Some("it gives way at its next sweep; if not, give it a lower priority")
            }
            Event::SetUp(Summary { how: How::Fallback(Fallback::Levels), .. }) => {
                Some("start the manager anew when connections may end: they get other SLs then")
            }
            Event::Foreign(_) | Event::Refused(Refusal::WrongKey(_), _) => {
                Some("managers of one subnet need the same --sm-key")
            }
            Event::Refused(Refusal::WrongManagementKey(..), _) => Some(
                "another manager, or a tool without the key: smpquery and others take it with -y",
            ),
            Event::Refused(Refusal::Unknown(_), _) => {
                Some("a node that is no subnet manager asks; find it, only root there can do that")
            }
            _ => None,
        }
    }

    /// Whether something is wrong.
    pub fn is_warning(&self) -> bool {
        matches!(
            self,
            Event::Kept(_)
                | Event::Incomplete(..)
                | Event::Rival(_)
                | Event::Foreign(_)
                | Event::Refused(..)
        )
    }
}

fn links_down((guid, port): &Place, count: usize) -> String {
    match count {
        1 => format!("the link at port {port} of {guid:#018x} is down"),
        _ => format!("{count} links are down, one at port {port} of {guid:#018x}"),
    }
}

fn incomplete(complaint: &str, count: usize) -> String {
    match count {
        1 => complaint.to_owned(),
        _ => format!("{complaint}; and {} more complaints", count - 1),
    }
}

fn refused(refusal: &Refusal, more: u64) -> String {
    match more {
        0 => refusal.to_string(),
        _ => format!("{refusal}; and {more} before"),
    }
}

fn wrong_key_from(lid: u16) -> String {
    match lid {
        0xffff => ", by a directed route".to_owned(),
        _ => format!(" from LID {lid}"),
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Summary { hosts, switches, links, lids, engine, changed, blocks, .. } = self;
        write!(f, "{hosts} hosts, {switches} switches, {links} links, {lids} LIDs: ")?;
        match self.how {
            How::Kept => write!(f, "tables of {engine} kept")?,
            How::Mended => write!(f, "tables of {engine} mended")?,
            How::Computed => write!(f, "tables by {engine}")?,
            How::Fallback(Fallback::Lanes(lanes)) => write!(
                f,
                "tables by {engine}, since the paths of the engine that was asked for need more VLs than {lanes}"
            )?,
            How::Fallback(Fallback::Levels) => write!(
                f,
                "tables by {engine}, since the paths of the engine that was asked for need other SLs than connections have"
            )?,
            How::Fallback(Fallback::Unsuitable) => write!(
                f,
                "tables by {engine}, since the engine that was asked for cannot route this fabric"
            )?,
        }
        if self.lanes > 1 {
            write!(f, " on {} VLs", self.lanes)?;
        }
        write!(f, "; {changed} LIDs rerouted, {blocks} blocks written")?;
        if self.drained > 0 {
            write!(f, ", {} LIDs without a route for a moment", self.drained)?;
        }
        write!(f, "; {:.1} ms", self.nanoseconds as f64 / 1e6)
    }
}
