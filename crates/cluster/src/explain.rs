//! What a job gets of its links and who has the rest, out of a view of the cluster.
//!
//! Nothing is measured or asked here, and nothing decided: it is for people and programs that look.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::view::{CycleView, JobView, LinkJob, LinkView, View};
use crate::words::{counted, rate};

/// A job that sends this share of its guarantee has it: rates are measured over a second, and
/// frames are whole.
const HAS_IT_PERCENT: u64 = 97;

/// Jobs that take turns with one, as text.
const SHOWN_JOBS: usize = 4;

/// A job that wants more keeps at least so many bytes waiting: a handful of frames.
const WAITS_BYTES: u64 = 16_384;

/// What is said of a job.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// Its number.
    pub job: u64,
    /// Its name.
    pub name: String,
    /// Who submitted it.
    pub owner: String,
    /// What was asked for.
    pub request: String,
    /// "running" or "degraded".
    pub state: String,
    /// The answer, in a sentence or two.
    pub verdict: Vec<String>,
    /// When it exchanges, if it says so.
    pub cycle: Option<CycleView>,
    /// What its cycle leads to, in a sentence.
    pub turns: Option<String>,
    /// The links that it sends over, those where something is wrong first.
    pub links: Vec<Link>,
}

/// A link that a job sends over.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Link {
    /// The sending node.
    pub from: String,
    /// The receiving node.
    pub to: String,
    /// What it carries.
    pub capacity_bps: u64,
    /// What the job has reserved.
    pub reserved_bps: u64,
    /// What the job sends; `None` where nobody measures.
    pub used_bps: Option<u64>,
    /// Bytes of the job that wait.
    pub backlog_bytes: u64,
    /// Packets of the job that were dropped.
    pub dropped_packets: u64,
    /// What the job gets.
    pub is: Standing,
    /// The other jobs there, those that send most first.
    pub others: Vec<Other>,
}

/// Another job on a link.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Other {
    /// Its number.
    pub job: u64,
    /// Its name.
    pub name: String,
    /// What it has reserved.
    pub reserved_bps: u64,
    /// What it sends; `None` where nobody measures.
    pub used_bps: Option<u64>,
}

/// What a job gets of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standing {
    /// Less than it is guaranteed, and more waits.
    Below,
    /// Nobody measures there.
    Unknown,
    /// Less than it is guaranteed, and nothing waits: it sends no more.
    Idle,
    /// What it is guaranteed.
    Holds,
    /// More, which others left.
    Above,
}

fn standing(own: &LinkJob) -> Standing {
    let Some(used) = own.used_bps else { return Standing::Unknown };
    let (used, reserved) = (u128::from(used), u128::from(own.reserved_bps));
    match (used * 100, own.backlog_bytes) {
        (sent, waits) if sent < reserved * u128::from(HAS_IT_PERCENT) => match waits {
            WAITS_BYTES.. => Standing::Below,
            _ => Standing::Idle,
        },
        (sent, _) if sent > reserved * 103 => Standing::Above,
        _ => Standing::Holds,
    }
}

/// Explains a job of the view.
pub fn explain(view: &View, job: &JobView) -> Explanation {
    let node = |at: u32| view.nodes.get(at as usize).map_or("?", |node| node.name.as_str());
    let name = |id: u64| {
        let found = view.jobs.iter().find(|job| job.id == id);
        found.map_or("", |job| job.name.as_str()).to_owned()
    };
    let link = |link: &LinkView| {
        let own = link.jobs.iter().find(|one| one.job == job.id)?;
        let others = link.jobs.iter().filter(|other| other.job != job.id);
        let mut others: Vec<Other> = others
            .map(|other| Other {
                job: other.job,
                name: name(other.job),
                reserved_bps: other.reserved_bps,
                used_bps: other.used_bps,
            })
            .collect();
        others.sort_by_key(|other| std::cmp::Reverse(other.used_bps));
        Some(Link {
            from: node(link.from).to_owned(),
            to: node(link.to).to_owned(),
            capacity_bps: link.capacity_bps,
            reserved_bps: own.reserved_bps,
            used_bps: own.used_bps,
            backlog_bytes: own.backlog_bytes,
            dropped_packets: own.dropped_packets,
            is: standing(own),
            others,
        })
    };
    let mut links: Vec<Link> = view.links.iter().filter_map(link).collect();
    links.sort_by(|a, b| a.is.cmp(&b.is).then_with(|| (&a.from, &a.to).cmp(&(&b.from, &b.to))));
    Explanation {
        job: job.id,
        name: job.name.clone(),
        owner: job.owner.clone(),
        request: job.request.clone(),
        state: job.state.clone(),
        verdict: verdict(view, job, &links),
        cycle: job.cycle.clone(),
        turns: job.cycle.as_ref().map(|cycle| turns(view, job, cycle)),
        links,
    }
}

/// When a job's exchanges may begin, and whom that helps.
fn turns(view: &View, job: &JobView, cycle: &CycleView) -> String {
    let CycleView { period_ns, exchange_ns, turn, why, with } = cycle;
    let ms = |ns: u64| format!("{} ms", ns as f64 / 1e6);
    let own = format!("it exchanges for {} of each {}", ms(*exchange_ns), ms(*period_ns));
    let named = with.iter().take(SHOWN_JOBS).map(|id| {
        let found = view.jobs.iter().find(|job| job.id == *id);
        format!("job {id} '{}'", found.map_or("", |job| &job.name))
    });
    let mut others = named.collect::<Vec<String>>().join(", ");
    if let more @ 1.. = with.len().saturating_sub(SHOWN_JOBS) {
        others += &format!(" and {more} more");
    }
    match (turn, why) {
        (Some(turn), _) => format!(
            "{own}, in turn with {others}: exchanges begin {} after each multiple of {} of Unix time{}",
            ms(turn.shift_ns),
            ms(turn.period_ns),
            not_kept(view, job)
        ),
        (None, Some(why)) => format!("{own}, whenever it likes: {why}"),
        (None, None) => format!("{own}; its time is not decided yet"),
    }
}

/// The hosts of a job's workers, by number.
fn hosts(job: &JobView) -> BTreeSet<u32> {
    job.workers.iter().map(|one| one.host).collect()
}

/// On which of a job's hosts its times are not kept, as far as that is known.
fn not_kept(view: &View, job: &JobView) -> String {
    let hosts = hosts(job);
    let nodes = hosts.iter().filter_map(|host| view.nodes.get(*host as usize));
    let doubts = nodes.filter_map(|node| match (&node.note, node.agent.as_str()) {
        (Some(note), _) => Some(format!("{}: {note}", node.name)),
        (None, "enforcing") => None,
        (None, agent) => Some(format!("{}: its agent is {agent}", node.name)),
    });
    let doubts: Vec<String> = doubts.collect();
    let Some((last, first)) = doubts.split_last() else { return String::new() };
    let shown = first.iter().take(SHOWN_JOBS - 1).chain([last]).cloned().collect::<Vec<_>>();
    let more = doubts.len() - shown.len();
    let more = if more == 0 { String::new() } else { format!("; and {more} hosts more") };
    format!("\n  not everywhere: {}{more}", shown.join("; "))
}

/// The answer to "which job took my bandwidth?".
fn verdict(view: &View, job: &JobView, links: &[Link]) -> Vec<String> {
    if job.state == "degraded" {
        return vec![
            "no job: a failure left too little room, so nothing is reserved for it until what is down is back \
             (`dquant job up`)"
                .to_owned(),
        ];
    }
    let hosts = hosts(job);
    if links.is_empty() {
        let host = hosts.first().and_then(|host| view.nodes.get(*host as usize));
        return vec![format!(
            "all its workers are on {}: it needs no link",
            host.map_or("one host", |host| &host.name)
        )];
    }
    let mut said: Vec<String> = Vec::new();
    for link in links.iter().filter(|link| link.is == Standing::Below).take(3) {
        let used = rate(link.used_bps.unwrap_or(0));
        let way = format!("{} -> {}", link.from, link.to);
        let lacks = format!(
            "{way}: it gets {used} of the {} that it is guaranteed",
            rate(link.reserved_bps)
        );
        let excess =
            |other: &&Other| other.used_bps.unwrap_or(0).saturating_sub(other.reserved_bps);
        let taker = link.others.iter().max_by_key(excess).filter(|other| excess(other) > 0);
        said.push(match taker {
            Some(other) => format!(
                "{lacks}; job {} '{}' took it: it sends {} and has reserved {}",
                other.job,
                other.name,
                rate(other.used_bps.unwrap_or(0)),
                rate(other.reserved_bps)
            ),
            None => format!(
                "{lacks}, and no job has more than its share: it pauses within the second, or traffic without a \
                 job's DSCP, or a slower link behind, takes the rest"
            ),
        });
    }
    let count = |is: Standing| links.iter().filter(|link| link.is == is).count();
    let (unknown, idle) = (count(Standing::Unknown), count(Standing::Idle));
    if said.is_empty() && unknown < links.len() {
        said.push(match idle {
            0 => "nobody: it has what it is guaranteed on every link that is measured".to_owned(),
            _ if idle + unknown == links.len() => {
                "nobody: it sends less than it is guaranteed, and nothing of it waits".to_owned()
            }
            _ => format!(
                "nobody: it has what it is guaranteed, and on {idle} links it sends less, with nothing waiting"
            ),
        });
    }
    if unknown > 0 {
        said.push(format!(
            "not measured on {unknown} of {}, whose senders have no agent that enforces",
            counted(links.len(), "link")
        ));
    }
    said
}

#[cfg(test)]
mod tests {
    use crate::view::{NodeView, Placed, TurnView};

    use super::*;

    fn on_link(job: u64, reserved: u64, used: Option<u64>, backlog_bytes: u64) -> LinkJob {
        let (reserved_bps, used_bps) = (reserved * 1_000_000, used.map(|used| used * 1_000_000));
        LinkJob { job, reserved_bps, used_bps, backlog_bytes, ..LinkJob::default() }
    }

    /// Jobs 1 and 2 on one link of 1 Gbit/s.
    fn view(jobs: Vec<LinkJob>) -> View {
        let node = |name: &str| NodeView { name: name.to_owned(), ..NodeView::default() };
        let job = |id: u64, name: &str| JobView {
            id,
            name: name.to_owned(),
            owner: "ada".to_owned(),
            request: "ring:2@500M".to_owned(),
            state: "running".to_owned(),
            workers: vec![
                Placed { host: 0, first: 0, count: 1 },
                Placed { host: 1, first: 1, count: 1 },
            ],
            ..JobView::default()
        };
        View {
            nodes: vec![node("host0"), node("host1")],
            links: vec![LinkView {
                from: 0,
                to: 1,
                capacity_bps: 1_000_000_000,
                jobs,
                ..LinkView::default()
            }],
            jobs: vec![job(1, "llm"), job(2, "bulk")],
            ..View::default()
        }
    }

    fn said(jobs: Vec<LinkJob>) -> String {
        let view = view(jobs);
        explain(&view, &view.jobs[0]).verdict.join("; ")
    }

    #[test]
    fn the_job_that_took_the_bandwidth_is_named_and_nobody_where_nobody_did() {
        let took =
            said(vec![on_link(1, 500, Some(300), 90_000), on_link(2, 100, Some(650), 9_000)]);
        assert!(took.contains("it gets 300.0 Mbit/s of the 500.0 Mbit/s"), "{took}");
        assert!(
            took.contains("job 2 'bulk' took it: it sends 650.0 Mbit/s and has reserved 100.0"),
            "{took}"
        );
        let other = said(vec![on_link(1, 500, Some(300), 90_000), on_link(2, 100, Some(90), 0)]);
        assert!(
            other.contains("it pauses within the second, or traffic without a job's DSCP"),
            "{other}"
        );
        let idle = said(vec![on_link(1, 500, Some(300), 0), on_link(2, 100, Some(650), 9_000)]);
        assert_eq!(idle, "nobody: it sends less than it is guaranteed, and nothing of it waits");
        let holds =
            said(vec![on_link(1, 500, Some(497), 90_000), on_link(2, 100, Some(480), 9_000)]);
        assert!(holds.starts_with("nobody: it has what it is guaranteed"), "{holds}");
        let unknown = said(vec![on_link(1, 500, None, 0)]);
        assert!(unknown.contains("not measured on 1 of 1 link, whose senders"), "{unknown}");
        assert!(said(Vec::new()).contains("all its workers are on host0"));
    }

    #[test]
    fn a_job_with_a_cycle_says_its_time_or_why_it_has_none() {
        let mut view = view(Vec::new());
        assert_eq!(explain(&view, &view.jobs[0]).turns, None);
        let mut cycle =
            CycleView { period_ns: 24_000_000, exchange_ns: 7_500_000, ..CycleView::default() };
        view.nodes.iter_mut().for_each(|node| "silent".clone_into(&mut node.agent));
        let said = |view: &View, cycle: &CycleView| {
            let mut view = view.clone();
            view.jobs[0].cycle = Some(cycle.clone());
            explain(&view, &view.jobs[0]).turns.expect("it has a cycle")
        };
        let begun = said(&view, &cycle);
        assert!(
            begun.starts_with("it exchanges for 7.5 ms of each 24 ms; its time is not"),
            "{begun}"
        );
        cycle.why = Some("no times leave less".to_owned());
        let none = said(&view, &cycle);
        assert!(none.contains("each 24 ms, whenever it likes: no times leave less"), "{none}");
        cycle.turn = Some(TurnView { period_ns: 24_100_000, shift_ns: 11_000_000 });
        (cycle.why, cycle.with) = (None, vec![2, 3, 4, 5, 6, 7]);
        let turn = said(&view, &cycle);
        assert!(
            turn.contains(
                "in turn with job 2 'bulk', job 3 '', job 4 '', job 5 '' and 2 more: exchanges begin 11 ms after each \
                 multiple of 24.1 ms of Unix time\n  not everywhere: host0: its agent is silent; host1: its agent is silent"
            ),
            "{turn}"
        );
        view.nodes.iter_mut().for_each(|node| "enforcing".clone_into(&mut node.agent));
        assert!(!said(&view, &cycle).contains("not everywhere"));
        view.nodes[1].note = Some("job 'llm' does not keep its period".to_owned());
        let doubted = said(&view, &cycle);
        assert!(
            doubted.contains("not everywhere: host1: job 'llm' does not keep its period"),
            "{doubted}"
        );
    }

    #[test]
    fn a_degraded_job_has_nothing_reserved_because_of_a_failure() {
        let mut view = view(Vec::new());
        "degraded".clone_into(&mut view.jobs[0].state);
        let said = explain(&view, &view.jobs[0]).verdict.join("; ");
        assert!(said.contains("nothing is reserved for it"), "{said}");
    }
}
