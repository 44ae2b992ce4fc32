//! A view as text of at most 80 columns and a given number of rows.
//!
//! Alarms come first, then jobs, links and nodes, each with what needs attention at its top. What
//! does not fit is counted.

use std::cmp::Reverse;
use std::fmt::Write;

use cluster::view::{Alarm, JobView, LinkJob, LinkView, NodeView, View};
use lab::units::Count;
use service::text::one_line;

/// Columns of a line.
const COLUMNS: usize = 80;

/// Columns of the bar of a link.
const BAR: usize = 16;

/// The whole picture, without a final line end.
pub(super) fn of(view: &View, rows: usize) -> String {
    let mut lines = head(view);
    let left = rows.saturating_sub(lines.len() + 1);
    let alarms = alarms(view);
    let jobs = jobs(view);
    let links = links(view);
    let nodes = nodes(view);
    // Each section has a title and a blank line; those that need little leave the rest to the
    // others.
    let sections =
        [("ALARMS", alarms), (JOBS_TITLE, jobs), (LINKS_TITLE, links), (NODES_TITLE, nodes)];
    let mut sections: Vec<_> = sections.into_iter().filter(|(_, all)| !all.is_empty()).collect();
    let shares = shares(&sections.iter().map(|(_, all)| all.len()).collect::<Vec<_>>(), left);
    for ((title, all), share) in sections.iter_mut().zip(shares) {
        lines.push(String::new());
        lines.push((*title).into());
        let more = all.len().saturating_sub(share);
        let shown = if more > 0 { share.saturating_sub(1) } else { share };
        let hidden = all.len() - shown.min(all.len());
        lines.extend(all.drain(..shown.min(all.len())));
        if hidden > 0 {
            lines.push(format!("… and {hidden} more lines"));
        }
    }
    lines.truncate(rows.max(1));
    let fitted = |line: &String| fit(line, COLUMNS).trim_end().to_owned();
    lines.iter().map(fitted).collect::<Vec<_>>().join("\n")
}

/// How many lines each section gets of all that there are; two more of each are its title and the blank line before.
fn shares(wanted: &[usize], rows: usize) -> Vec<usize> {
    let mut left = rows.saturating_sub(2 * wanted.len());
    let mut shares = vec![0; wanted.len()];
    while left > 0 {
        let open: Vec<usize> = (0..wanted.len()).filter(|at| shares[*at] < wanted[*at]).collect();
        if open.is_empty() {
            break;
        }
        for at in open {
            if left > 0 {
                shares[at] += 1;
                left -= 1;
            }
        }
    }
    shares
}

fn head(view: &View) -> Vec<String> {
    let brain = &view.brain;
    let state = match (brain.state.as_str(), &brain.leader) {
        ("leading", _) => format!("leading, term {}", brain.term),
        ("standby", Some(leader)) => format!("standby; the leader is at {leader}"),
        ("standby", None) => "standby; no leader is known".into(),
        ("", _) => "no data yet".into(),
        (other, _) => format!("not ready: {other}"),
    };
    let mut lines = vec![format!("brain {}: {state}", brain.address)];
    if !brain.store.is_empty() {
        let entries = if brain.log_index == 1 { "entry" } else { "entries" };
        lines.push(format!("log in {}, {} {entries}", brain.store, Count(brain.log_index)));
    }
    if view.nodes.is_empty() {
        lines.push("this brain has no topology".into());
        return lines;
    }
    let hosts: Vec<&NodeView> = view.nodes.iter().filter(|node| node.kind == "host").collect();
    let slots = hosts.iter().fold(0, |sum, host| sum + u64::from(host.slots));
    let free = hosts.iter().fold(0, |sum, host| sum + u64::from(host.free_slots));
    lines.push(format!(
        "{}, {}, {}; {} of {} slots free; {}, {}",
        plural(hosts.len(), "host", "hosts"),
        plural(view.nodes.len() - hosts.len(), "switch", "switches"),
        plural(view.links.len(), "link", "links"),
        Count(free),
        Count(slots),
        plural(view.jobs.len(), "job", "jobs"),
        plural(view.alarms.len(), "alarm", "alarms"),
    ));
    lines
}

fn plural(count: usize, one: &str, many: &str) -> String {
    format!("{} {}", Count(count as u64), if count == 1 { one } else { many })
}

fn alarms(view: &View) -> Vec<String> {
    let lines = |alarm: &Alarm| {
        let mut lines = wrapped(&format!("{}: {}", alarm.level, alarm.text), COLUMNS);
        lines.extend(
            wrapped(&format!("hint: {}", alarm.hint), COLUMNS - 2)
                .iter()
                .map(|line| format!("  {line}")),
        );
        lines
    };
    view.alarms.iter().flat_map(lines).collect()
}

const JOBS_TITLE: &str =
    "JOB                   OWNER         STATE     WORKERS     RESERVED         USED";

/// A job's line: its reservation and its use where it has reserved the most.
fn jobs(view: &View) -> Vec<String> {
    let mut jobs: Vec<&JobView> = view.jobs.iter().collect();
    jobs.sort_by_key(|job| job.state == "running");
    let mut worst: std::collections::BTreeMap<u64, &LinkJob> = Default::default();
    for on in view.links.iter().flat_map(|link| &link.jobs) {
        let known = worst.entry(on.job).or_insert(on);
        if on.reserved_bps > known.reserved_bps {
            *known = on;
        }
    }
    let line = |job: &&JobView| {
        let workers: u64 = job.workers.iter().map(|placed| u64::from(placed.count)).sum();
        let on = worst.get(&job.id);
        format!(
            "{}  {}  {} {:>7}  {:>11}  {:>11}",
            fit(&name_of(job), 20),
            fit(&job.owner, 12),
            fit(&job.state, 9),
            workers,
            on.map_or("none".into(), |on| rate(on.reserved_bps)),
            on.map_or("-".into(), |on| measured(on.used_bps)),
        )
    };
    jobs.iter().map(line).collect()
}

fn name_of(job: &JobView) -> String {
    if job.name.is_empty() { format!("job {}", job.id) } else { job.name.clone() }
}

const LINKS_TITLE: &str =
    "BUSIEST LINK             PORT  USE                       USED    RESERVED     OF";

/// The links that carry something or have something reserved, the busiest first.
fn links(view: &View) -> Vec<String> {
    let is_of_interest =
        |link: &&LinkView| link.reserved_bps > 0 || link.used_bps > Some(0) || link.is_down;
    let mut links: Vec<&LinkView> = view.links.iter().filter(is_of_interest).collect();
    let share = |bps: u64, link: &LinkView| {
        u128::from(bps) * 1_000_000 / u128::from(link.capacity_bps.max(1))
    };
    links.sort_by_key(|link| {
        let used = share(link.used_bps.unwrap_or(0), link);
        (Reverse(link.is_down), Reverse(used), Reverse(share(link.reserved_bps, link)))
    });
    let line = |link: &&LinkView| {
        let ends = format!("{} -> {}", node(view, link.from), node(view, link.to));
        let bar = if link.is_down { fit("down", BAR + 2) } else { bar(link) };
        format!(
            "{} {:>4}  {} {:>11} {:>11} {:>6}",
            fit(&ends, 24),
            link.port,
            bar,
            measured(link.used_bps),
            rate(link.reserved_bps),
            short(link.capacity_bps),
        )
    };
    links.iter().map(line).collect()
}

fn node(view: &View, at: u32) -> &str {
    view.nodes.get(at as usize).map_or("?", |node| node.name.as_str())
}

/// As long as what is used; `|` stands where the reservation ends.
fn bar(link: &LinkView) -> String {
    let at = |bps: u64| {
        let cells = u128::from(bps) * BAR as u128 / u128::from(link.capacity_bps.max(1));
        cells.min(BAR as u128) as usize
    };
    let (used, reserved) = (at(link.used_bps.unwrap_or(0)), at(link.reserved_bps));
    let cell = |cell: usize| match cell {
        _ if link.reserved_bps > 0 && cell == reserved.min(BAR - 1) => '|',
        _ if cell < used => '#',
        _ => '.',
    };
    format!("[{}]", (0..BAR).map(cell).collect::<String>())
}

const NODES_TITLE: &str = "NODE               AGENT      HEARD       SLOTS FREE  NOTE";

/// Nodes whose agents do not enforce come first, then those with a note; switches without an agent are left out.
fn nodes(view: &View) -> Vec<String> {
    let mut nodes: Vec<&NodeView> = view.nodes.iter().filter(|node| node.agent != "none").collect();
    let rank = |node: &&NodeView| match node.agent.as_str() {
        "silent" => 0,
        "refusing" => 1,
        "behind" => 2,
        _ if node.note.is_some() => 3,
        _ => 4,
    };
    nodes.sort_by_key(rank);
    let line = |node: &&NodeView| {
        let heard = node.heard_ms.map_or("never".into(), |ms| match ms {
            0..10_000 => format!("{}.{} s ago", ms / 1000, ms % 1000 / 100),
            10_000..600_000 => format!("{} s ago", ms / 1000),
            _ => format!("{} min ago", ms / 60_000),
        });
        let slots = if node.slots > 0 {
            format!("{} of {}", node.free_slots, node.slots)
        } else {
            "-".into()
        };
        let note = node.note.as_deref().unwrap_or("");
        format!(
            "{}  {} {}  {slots:>10}  {note}",
            fit(&node.name, 17),
            fit(&node.agent, 10),
            fit(&heard, 10)
        )
    };
    nodes.iter().map(line).collect()
}

fn measured(bps: Option<u64>) -> String {
    bps.map_or("-".into(), rate)
}

/// A rate with three digits, in at most eleven columns.
fn rate(bps: u64) -> String {
    format!("{}bit/s", short(bps))
}

/// A rate with three digits and the prefix of its unit: `12.3 G`.
fn short(bps: u64) -> String {
    let units = ["", "k", "M", "G", "T", "P"];
    let (mut value, mut unit) = (bps as f64, 0);
    // What would be rounded to 1000 has the next unit.
    while value >= 999.5 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    let digits = if unit == 0 || value >= 99.95 {
        0
    } else if value >= 9.995 {
        1
    } else {
        2
    };
    format!("{value:.digits$} {}", units[unit])
}

/// Columns that a character takes: letters of East Asia and pictures take two.
fn width(letter: char) -> usize {
    if letter >= '\u{1100}' && letter != '…' && !('\u{2000}'..'\u{2e80}').contains(&letter) {
        2
    } else {
        1
    }
}

/// Text in exactly so many columns.
fn fit(text: &str, columns: usize) -> String {
    // What a terminal obeys takes no column.
    let text = one_line(text);
    let mut out = String::new();
    let (mut used, whole) = (0, text.chars().map(width).sum::<usize>() <= columns);
    let room = if whole { columns } else { columns.saturating_sub(1) };
    for letter in text.chars() {
        if used + width(letter) > room {
            break;
        }
        out.push(letter);
        used += width(letter);
    }
    if !whole && columns > 0 {
        out.push('…');
        used += 1;
    }
    let _ = write!(out, "{:1$}", "", columns.saturating_sub(used));
    out
}

/// Text in lines of at most so many columns, broken at spaces.
fn wrapped(text: &str, columns: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last().map_or(0, |line| line.chars().map(width).sum());
        let fits = line + 1 + word.chars().map(width).sum::<usize>() <= columns;
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if fits => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.into()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use cluster::view::{BrainView, Placed};

    use super::*;

    fn view(links: u32) -> View {
        let node = |at: u32| NodeView {
            name: format!("host-{at}"),
            kind: "host".into(),
            slots: 8,
            free_slots: 3,
            agent: if at == 1 { "silent" } else { "enforcing" }.into(),
            heard_ms: Some(61_000),
            note: (at == 1).then(|| "its last plan stays in force".into()),
        };
        let link = |at: u32| LinkView {
            from: at,
            to: at + 1,
            capacity_bps: 100_000_000_000,
            reserved_bps: 50_000_000_000,
            used_bps: Some(u64::from(at) * 1_000_000_000),
            jobs: vec![LinkJob { job: 1, reserved_bps: 7_000_000, ..LinkJob::default() }],
            ..LinkView::default()
        };
        let workers = vec![Placed { host: 0, first: 0, count: 4 }];
        let job = |id, name: &str| JobView {
            id,
            name: name.into(),
            state: "running".into(),
            workers: workers.clone(),
            ..JobView::default()
        };
        let alarm =
            Alarm { level: "error".into(), text: "something ".repeat(20), hint: "do".into() };
        View {
            brain: BrainView {
                address: "10.0.0.5:4795".into(),
                state: "leading".into(),
                term: 3,
                store: "etcd".into(),
                ..BrainView::default()
            },
            nodes: (0..=links).map(node).collect(),
            links: (0..links).map(link).collect(),
            jobs: vec![
                job(1, "plain"),
                job(2, "a\u{1b}[2Jb\u{202e}c"),
                job(3, &"\u{8a9e}".repeat(40)),
            ],
            alarms: vec![alarm],
            ..View::default()
        }
    }

    #[test]
    fn every_line_fits_and_there_are_no_more_than_asked_for() {
        for (links, rows) in [(3, 24), (90, 24), (90, 60), (90, 500), (1, 1), (0, 24)] {
            let text = of(&view(links), rows);
            for line in text.lines() {
                let columns: usize = line.chars().map(width).sum();
                assert!(columns <= COLUMNS, "{line:?}");
                assert!(!line.contains(char::is_control) && !line.contains('\u{202e}'));
            }
            assert!(text.lines().count() <= rows, "{rows} rows: {text}");
        }
    }

    #[test]
    fn what_needs_attention_is_there_with_few_rows() {
        let text = of(&view(90), 24);
        for part in ["error: something", "host-1 ", "silent", "host-89 -> host-90", "… and "] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let at = |part: &str| text.find(part).unwrap_or(usize::MAX);
        assert!(at("host-89 -> host-90") < at("host-88 -> host-89"), "{text}");
    }

    #[test]
    fn bars_show_use_and_reservation() {
        let link = |used, reserved| {
            let (used_bps, reserved_bps) = (Some(used), reserved);
            bar(&LinkView { capacity_bps: 16, used_bps, reserved_bps, ..LinkView::default() })
        };
        assert_eq!(link(4, 8), "[####....|.......]");
        assert_eq!(link(12, 8), "[########|###....]");
        assert_eq!(link(99, 16), "[###############|]");
        assert_eq!(link(0, 0), "[................]");
        assert_eq!(
            bar(&LinkView { used_bps: Some(u64::MAX), ..LinkView::default() }),
            "[################]"
        );
    }

    #[test]
    fn rates_have_three_digits() {
        for (bps, text) in [
            (0, "0 bit/s"),
            (999, "999 bit/s"),
            (1_000, "1.00 kbit/s"),
            (99_960_000, "100 Mbit/s"),
            (12_345_678_901, "12.3 Gbit/s"),
            (999_999_999_999, "1.00 Tbit/s"),
            (u64::MAX, "18447 Pbit/s"),
        ] {
            assert_eq!(rate(bps), text);
        }
    }

    #[test]
    fn a_brain_without_a_topology_says_so() {
        let brain = BrainView {
            state: "standby".into(),
            leader: Some("10.0.0.7:4795".into()),
            ..BrainView::default()
        };
        let text = of(&View { brain, ..View::default() }, 24);
        assert!(
            text.contains("standby; the leader is at 10.0.0.7:4795")
                && text.contains("no topology"),
            "{text}"
        );
    }
}
