//! The view and the counters as Prometheus reads them: text format 0.0.4.

use std::collections::BTreeMap;
use std::fmt::{self, Write};

use crate::view::View;

/// Most lines about jobs on links; further ones are counted.
const MAX_JOB_LINES: usize = 20_000;

/// Writes everything that is known at one moment.
pub(super) fn text(view: &View, counters: &BTreeMap<String, u64>, history_bytes: usize) -> String {
    let mut out = String::with_capacity(4096 + 300 * view.links.len());
    brain(&mut out, view);
    nodes(&mut out, view);
    links(&mut out, view);
    jobs(&mut out, view);
    family(&mut out, "dquant_web_history_bytes", "gauge", "Memory of the history of links.");
    line(&mut out, "dquant_web_history_bytes", &[], history_bytes);
    // The server's own counters may be in the view as well, as they were a moment ago.
    let counted = view.counters.iter().chain(counters);
    let counted: BTreeMap<String, &u64> =
        counted.map(|(name, value)| (metric(name), value)).collect();
    for (name, value) in counted {
        family(&mut out, &name, "untyped", "Counted by the brain.");
        line(&mut out, &name, &[], value);
    }
    out
}

fn brain(out: &mut String, view: &View) {
    let brain = &view.brain;
    family(out, "dquant_brain_info", "gauge", "The brain that answers.");
    line(out, "dquant_brain_info", &[("address", &brain.address), ("state", &brain.state)], 1);
    family(out, "dquant_brain_term", "gauge", "The term in which it leads.");
    line(out, "dquant_brain_term", &[], brain.term);
    family(out, "dquant_brain_log_entries", "gauge", "Entries in the log since the beginning.");
    line(out, "dquant_brain_log_entries", &[], brain.log_index);
    family(out, "dquant_alarms", "gauge", "Things that are wrong now.");
    for level in ["error", "warning"] {
        let count = view.alarms.iter().filter(|alarm| alarm.level == level).count();
        line(out, "dquant_alarms", &[("level", level)], count);
    }
}

fn nodes(out: &mut String, view: &View) {
    family(out, "dquant_node_agent", "gauge", "The state of a node's agent: the label that has 1.");
    for node in &view.nodes {
        let labels = [("node", node.name.as_str()), ("kind", &node.kind), ("state", &node.agent)];
        line(out, "dquant_node_agent", &labels, 1);
    }
    family(out, "dquant_node_free_slots", "gauge", "Slots of a host that no job has.");
    for node in view.nodes.iter().filter(|node| node.slots > 0) {
        line(out, "dquant_node_free_slots", &[("node", &node.name)], node.free_slots);
    }
}

/// A figure of a link: its metric, what it is, and how it is read.
type Figure = (&'static str, &'static str, fn(&crate::view::LinkView) -> Option<u64>);

const LINK_FIGURES: [Figure; 4] = [
    ("dquant_link_capacity_bits_per_second", "What a directed link carries.", |link| {
        Some(link.capacity_bps)
    }),
    ("dquant_link_reserved_bits_per_second", "What jobs have reserved on it.", |link| {
        Some(link.reserved_bps)
    }),
    (
        "dquant_link_used_bits_per_second",
        "What was measured last, where somebody measures.",
        |link| link.used_bps,
    ),
    ("dquant_link_up", "0 for a link that is known to be dead.", |link| {
        Some((!link.is_down).into())
    }),
];

fn links(out: &mut String, view: &View) {
    for (name, help, read) in LINK_FIGURES {
        family(out, name, "gauge", help);
        for link in &view.links {
            let Some(value) = read(link) else { continue };
            let port = link.port.to_string();
            let labels = [
                ("from", name_of(view, link.from)),
                ("to", name_of(view, link.to)),
                ("port", &port),
            ];
            line(out, name, &labels, value);
        }
    }
}

fn jobs(out: &mut String, view: &View) {
    family(out, "dquant_job_info", "gauge", "A job.");
    for job in &view.jobs {
        let (id, dscp) = (job.id.to_string(), job.dscp.to_string());
        let labels = [
            ("job", id.as_str()),
            ("name", &job.name),
            ("owner", &job.owner),
            ("state", &job.state),
            ("dscp", &dscp),
        ];
        line(out, "dquant_job_info", &labels, 1);
    }
    let on_links =
        || view.links.iter().flat_map(|link| link.jobs.iter().map(move |job| (link, job)));
    let name = "dquant_job_link_used_bits_per_second";
    family(out, name, "gauge", "What a job was measured to use of a link.");
    let measured = || on_links().filter_map(|(link, job)| Some((link, job, job.used_bps?)));
    for (link, job, used) in measured().take(MAX_JOB_LINES) {
        let (id, port) = (job.job.to_string(), link.port.to_string());
        let ends = (name_of(view, link.from), name_of(view, link.to));
        line(out, name, &[("job", &id), ("from", ends.0), ("to", ends.1), ("port", &port)], used);
    }
    let name = "dquant_job_link_omitted";
    family(
        out,
        name,
        "gauge",
        "Measurements of jobs on links that are not here because there are too many.",
    );
    line(out, name, &[], measured().count().saturating_sub(MAX_JOB_LINES));
}

fn name_of(view: &View, node: u32) -> &str {
    view.nodes.get(node as usize).map_or("", |node| node.name.as_str())
}

/// A name that Prometheus accepts.
fn metric(name: &str) -> String {
    let valid = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '_' };
    "dquant_".chars().chain(name.chars().map(valid)).collect()
}

fn family(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = write!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
}

fn line(out: &mut String, name: &str, labels: &[(&str, &str)], value: impl fmt::Display) {
    out.push_str(name);
    for (at, (label, text)) in labels.iter().enumerate() {
        out.push(if at == 0 { '{' } else { ',' });
        let _ = write!(out, "{label}=\"");
        escaped(out, text);
        out.push('"');
    }
    out.push_str(if labels.is_empty() { " " } else { "} " });
    let _ = writeln!(out, "{value}");
}

/// The value of a label, as the format wants it.
fn escaped(out: &mut String, text: &str) {
    for letter in text.chars() {
        match letter {
            '\\' => out.push_str("\\\\"),
            '"' => out.push_str("\\\""),
            '\n' => out.push_str("\\n"),
            other => out.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::{JobView, LinkJob, LinkView, NodeView};

    fn view() -> View {
        let node = |name: &str| NodeView { name: name.into(), slots: 8, ..NodeView::default() };
        let on_link = LinkJob { job: 1, used_bps: Some(7), ..LinkJob::default() };
        let link = LinkView { to: 1, used_bps: None, jobs: vec![on_link], ..LinkView::default() };
        let job = JobView { id: 1, name: "a\"b\\c\nd".into(), ..JobView::default() };
        let counters = BTreeMap::from([("brain.lies-told".to_owned(), 3)]);
        let (nodes, links) = (vec![node("h0"), node("s0")], vec![link]);
        View { nodes, links, jobs: vec![job], counters, ..View::default() }
    }

    #[test]
    fn values_are_there_and_what_nobody_measures_is_not() {
        let text = text(&view(), &BTreeMap::new(), 0);
        assert!(text.contains("dquant_link_up{from=\"h0\",to=\"s0\",port=\"0\"} 1\n"), "{text}");
        assert!(text.contains("dquant_brain_lies_told 3\n"), "{text}");
        assert!(!text.contains("dquant_link_used_bits_per_second{"), "{text}");
        let on_link =
            "dquant_job_link_used_bits_per_second{job=\"1\",from=\"h0\",to=\"s0\",port=\"0\"} 7\n";
        assert!(text.contains(on_link), "{text}");
    }

    #[test]
    fn names_of_users_stay_within_their_label() {
        let text = text(&view(), &BTreeMap::new(), 0);
        assert!(text.contains("name=\"a\\\"b\\\\c\\nd\","), "{text}");
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (_, value) = line.rsplit_once(' ').expect("a value");
            assert!(value.parse::<u64>().is_ok(), "{line}");
        }
    }

    #[test]
    fn each_family_is_introduced_once() {
        let text = text(&view(), &BTreeMap::from([("web.requests".into(), 1)]), 0);
        let mut introduced: Vec<&str> =
            text.lines().filter(|line| line.starts_with("# TYPE")).collect();
        let all = introduced.len();
        introduced.sort_unstable();
        introduced.dedup();
        assert_eq!(introduced.len(), all);
    }
}
