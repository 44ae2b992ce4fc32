//! What a manager reports, in the words of its log.

use alloc::string::String;
use core::fmt;

use super::look::Change;
use super::work::{Fallback, How};
use crate::discovery::Place;
use crate::sm_info::{SmInfo, Standing};
use topology::routes::Engine;

/// Something that the operator may want to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// It is in another state.
    Became(Standing, Why),
    /// Why the fabric is discovered anew.
    Noticed(Change),
    /// Links went down: one of them, and how many.
    LinksDown(Place, usize),
    /// The fabric is set up.
    SetUp(Summary),
    /// Nothing was changed.
    Kept(Trouble),
    /// A part of the fabric did not do what it was asked for: one complaint, and how many there
    /// are.
    Incomplete(String, usize),
    /// Another manager is master, too; it has to give way.
    Rival(SmInfo),
    /// A manager, by its GUID, has another SM_Key and is ignored.
    Foreign(u64),
    /// A request of another manager, or an SMP with a wrong M_Key, was refused; at most one such
    /// event a second, with the number of those in between.
    Refused(Refusal, u64),
}

/// Why a manager is in another state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// No other goes before it.
    First,
    /// This one is master, or goes before it.
    Other(SmInfo),
    /// The master, by its GUID, has not responded for so many polls.
    MasterSilent(u64, u32),
    /// The master is none any more.
    MasterGone(u64),
    /// The master has handed over.
    HandedOver(u64),
    /// Another manager wants it so.
    Told,
}

/// Why nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The fabric cannot be routed, or addressed.
    Unroutable(String),
    /// This node's own port does not respond.
    NoPort,
    /// The link of this node's port is down.
    PortDown,
}

/// Why a request of another manager was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Nobody with this GUID was found to be a manager.
    Unknown(u64),
    /// The SM_Key is another.
    WrongKey(u64),
    /// A node, by its GUID, refused an SMP from this LID with a wrong M_Key.
    WrongManagementKey(u64, u16),
    /// Not in this state.
    Standing(Standing),
    /// It is nothing that can be asked for.
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

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Became(standing, why) => write!(f, "{standing}: {why}"),
            Event::Noticed(Change::Up((guid, port))) => {
                write!(f, "port {port} of {guid:#018x} came up")
            }
            Event::Noticed(Change::Silent(guid)) => {
                write!(f, "switch {guid:#018x} does not respond")
            }
            Event::Noticed(Change::Restarted(guid)) => {
                write!(f, "switch {guid:#018x} has lost its tables")
            }
            Event::LinksDown((guid, port), 1) => {
                write!(f, "the link at port {port} of {guid:#018x} is down")
            }
            Event::LinksDown((guid, port), count) => {
                write!(f, "{count} links are down, one at port {port} of {guid:#018x}")
            }
            Event::SetUp(summary) => summary.fmt(f),
            Event::Kept(Trouble::Unroutable(why)) => {
                write!(f, "the fabric keeps its last tables: {why}")
            }
            Event::Kept(Trouble::NoPort) => f.write_str(
                "the fabric keeps its last tables: this node's own port does not respond",
            ),
            Event::Kept(Trouble::PortDown) => f.write_str(
                "the fabric keeps its last tables: the link of this node's port is down",
            ),
            Event::Incomplete(complaint, 1) => f.write_str(complaint),
            Event::Incomplete(complaint, count) => {
                write!(f, "{complaint}; and {} more complaints", count - 1)
            }
            Event::Rival(other) => {
                write!(f, "{:#018x} is master, too, with priority {}", other.guid, other.priority)
            }
            Event::Foreign(guid) => {
                write!(f, "the manager {guid:#018x} has another SM_Key and is ignored")
            }
            Event::Refused(refusal, 0) => refusal.fmt(f),
            Event::Refused(refusal, more) => write!(f, "{refusal}; and {more} before"),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Unknown(guid) => {
                write!(f, "refused a control message of {guid:#018x}, which is no known manager")
            }
            Refusal::WrongKey(guid) => {
                write!(f, "refused a control message of {guid:#018x} with another SM_Key")
            }
            Refusal::WrongManagementKey(guid, 0xffff) => {
                write!(f, "{guid:#018x} refused an SMP with a wrong M_Key, by a directed route")
            }
            Refusal::WrongManagementKey(guid, lid) => {
                write!(f, "{guid:#018x} refused an SMP with a wrong M_Key from LID {lid}")
            }
            Refusal::Standing(standing) => {
                write!(
                    f,
                    "refused a control message that makes no sense for a manager that is {standing}"
                )
            }
            Refusal::Malformed => f.write_str("refused a malformed SMInfo"),
        }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::First => f.write_str("no other manager goes before this one"),
            Why::Other(other) => write!(
                f,
                "{:#018x} is {}, with priority {}",
                other.guid, other.standing, other.priority
            ),
            Why::MasterSilent(guid, polls) => {
                write!(f, "the master {guid:#018x} has not responded to {polls} polls")
            }
            Why::MasterGone(guid) => write!(f, "{guid:#018x} is master no more"),
            Why::HandedOver(guid) => write!(f, "handed over by {guid:#018x}"),
            Why::Told => f.write_str("another manager wants it so"),
        }
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
