//! The whole cluster at one moment, as its leading brain knows it: what `dquant job list`,
//! `dquant top --cluster`, the web page and its JSON show. Plain data; whoever makes or shows it
//! decides nothing by it.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use service::text::one_line;

/// See the module's text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct View {
    /// Milliseconds since 1970, by the clock of the brain's machine.
    pub unix_ms: u64,
    /// The brain that made it.
    pub brain: BrainView,
    /// Hosts and switches, in the topology's order.
    pub nodes: Vec<NodeView>,
    /// Directed links, in the topology's order, first one way, then the other.
    pub links: Vec<LinkView>,
    /// Jobs, by number.
    pub jobs: Vec<JobView>,
    /// What is wrong now, worst first.
    pub alarms: Vec<Alarm>,
    /// What the brain has counted, by name.
    pub counters: std::collections::BTreeMap<String, u64>,
}

impl View {
    /// The same with all texts as single lines that a terminal shows and does not obey: for a view
    /// that another process made.
    #[must_use]
    pub fn cleaned(mut self) -> View {
        let BrainView { address, state, leader, store, .. } = &mut self.brain;
        [address, state, store].into_iter().chain(leader).for_each(clean);
        for NodeView { name, kind, agent, note, .. } in &mut self.nodes {
            [name, kind, agent].into_iter().chain(note).for_each(clean);
        }
        for JobView { name, owner, request, state, cycle, .. } in &mut self.jobs {
            let why = cycle.as_mut().and_then(|cycle| cycle.why.as_mut());
            [name, owner, request, state].into_iter().chain(why).for_each(clean);
        }
        for Alarm { level, text, hint } in &mut self.alarms {
            [level, text, hint].into_iter().for_each(clean);
        }
        self
    }
}

fn clean(text: &mut String) {
    if let Cow::Owned(line) = one_line(text) {
        *text = line;
    }
}

/// A brain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrainView {
    /// Where it is reached.
    pub address: String,
    /// "leading", "beginning", "opening" or "standby".
    pub state: String,
    /// The term in which it leads.
    pub term: u64,
    /// Where the leader is reached, if one is known.
    pub leader: Option<String>,
    /// Entries in the log since the beginning.
    pub log_index: u64,
    /// Where the log is: "etcd" or "file", and its place.
    pub store: String,
}

/// A host or a switch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeView {
    /// Its name in the topology.
    pub name: String,
    /// "host" or "switch".
    pub kind: String,
    /// Slots of a host; 0 for a switch.
    pub slots: u32,
    /// Slots that no job has.
    pub free_slots: u32,
    /// Its agent: "enforcing", "behind" (has an older plan), "refusing", "silent", or "none" for a
    /// switch without one.
    pub agent: String,
    /// Milliseconds since its agent was heard; `None` if it never was.
    pub heard_ms: Option<u64>,
    /// Why its agent refuses, or what it warns of.
    pub note: Option<String>,
}

/// A directed link.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkView {
    /// The sending node, as an index in [`View::nodes`].
    pub from: u32,
    /// The receiving node.
    pub to: u32,
    /// Port of the sending node.
    pub port: u32,
    /// What it carries, in bit/s.
    pub capacity_bps: u64,
    /// What jobs have reserved, in bit/s.
    pub reserved_bps: u64,
    /// What was measured last, in bit/s; `None` where nobody measures.
    pub used_bps: Option<u64>,
    /// Whether it is known to be dead.
    pub is_down: bool,
    /// Who has reserved on it and uses it.
    pub jobs: Vec<LinkJob>,
}

/// A job on a link.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkJob {
    /// Its number.
    pub job: u64,
    /// Reserved, in bit/s.
    pub reserved_bps: u64,
    /// Measured last, in bit/s.
    pub used_bps: Option<u64>,
    /// Queue of the port; `None` where no agent governs it.
    pub queue: Option<u32>,
    /// Its pace there, in bit/s, if it is paced.
    pub pace_bps: Option<u64>,
    /// Bytes that wait there.
    pub backlog_bytes: u64,
    /// Packets dropped since the plan began.
    pub dropped_packets: u64,
}

/// A job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobView {
    /// Its number.
    pub id: u64,
    /// Its name.
    pub name: String,
    /// Who submitted it.
    pub owner: String,
    /// What was asked for, as it is written.
    pub request: String,
    /// Its DSCP.
    pub dscp: u8,
    /// Where its workers are, by rank in the order in which they were placed.
    pub workers: Vec<Placed>,
    /// "running", or "degraded" where a failure took its guarantee.
    pub state: String,
    /// When it exchanges, if it says so.
    pub cycle: Option<CycleView>,
}

/// The cycle of a job that computes and exchanges in turn, and the time that it has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CycleView {
    /// From one exchange to the next, as the job says, in nanoseconds.
    pub period_ns: u64,
    /// How long an exchange lasts, as the job says.
    pub exchange_ns: u64,
    /// When its exchanges may begin; `None` for whenever it likes.
    pub turn: Option<TurnView>,
    /// Why it may exchange whenever it likes; `None` if it has a time, or while that is not
    /// decided.
    pub why: Option<String>,
    /// The jobs with which it fills a link, by number; empty where these were left alone.
    pub with: Vec<u64>,
}

/// When exchanges may begin: at `shift_ns + n * period_ns` of Unix time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnView {
    /// From one time to the next: the job's period, rounded up.
    pub period_ns: u64,
    /// Below the period.
    pub shift_ns: u64,
}

/// Consecutive workers on a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placed {
    /// The host, as an index in [`View::nodes`].
    pub host: u32,
    /// The first rank.
    pub first: u32,
    /// How many.
    pub count: u32,
}

/// Something that is wrong.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Alarm {
    /// "error" or "warning".
    pub level: String,
    /// What it is, in a sentence.
    pub text: String,
    /// The next thing to try.
    pub hint: String,
}

/// Something that happened, for those who subscribe.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterEvent {
    /// Its number, from 1, without gaps while one brain leads.
    pub number: u64,
    /// Milliseconds since 1970.
    pub unix_ms: u64,
    /// "admitted", "released", "refused", "moved", "leading", "agent", "link" or "alarm".
    pub kind: String,
    /// The job, if it is about one.
    pub job: Option<u64>,
    /// What happened, in a sentence.
    pub text: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_of_a_view_moves_a_cursor_or_begins_a_line() {
        let bad = || "a\u{1b}[2J\nerror: b".to_owned();
        let view = View {
            brain: BrainView {
                address: bad(),
                state: bad(),
                leader: Some(bad()),
                store: bad(),
                ..BrainView::default()
            },
            nodes: vec![NodeView {
                name: bad(),
                kind: bad(),
                agent: bad(),
                note: Some(bad()),
                ..NodeView::default()
            }],
            jobs: vec![JobView {
                name: bad(),
                owner: bad(),
                request: bad(),
                state: bad(),
                cycle: Some(CycleView { why: Some(bad()), ..CycleView::default() }),
                ..JobView::default()
            }],
            alarms: vec![Alarm { level: bad(), text: bad(), hint: bad() }],
            ..View::default()
        };
        let count = |view: &View| {
            let json = serde_json::to_string(view).expect("plain data");
            (json.matches("\\u001b").count(), json.matches("\\n").count())
        };
        assert_eq!(count(&view), (16, 16), "every text of a view is here");
        assert_eq!(count(&view.cleaned()), (0, 0));
    }
}
