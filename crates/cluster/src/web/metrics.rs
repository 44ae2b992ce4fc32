//! The view and the counters as metrics: which there are, and what their values are.

use std::collections::BTreeMap;

use service::metrics::{Format, Kind, Text, Unit, name_of as metric};

use crate::view::View;

/// Most lines about jobs on links; further ones are counted.
const MAX_JOB_LINES: usize = 20_000;

/// Writes everything that is known at one moment.
pub(super) fn text(
    format: Format,
    view: &View,
    counters: &BTreeMap<String, u64>,
    history_bytes: usize,
) -> String {
    let mut out = Text::new(format, 4096 + 300 * view.links.len());
    brain(&mut out, view);
    nodes(&mut out, view);
    links(&mut out, view);
    jobs(&mut out, view);
    let help = "Memory of the history of links.";
    out.family("dquant_web_history_bytes", Kind::Gauge, Unit::Bytes, help);
    out.sample(&[], history_bytes);
    // The server's own counters may be in the view as well, as they were a moment ago.
    let counted = view.counters.iter().chain(counters);
    let counted: BTreeMap<String, &u64> =
        counted.map(|(name, value)| (metric(name), value)).collect();
    for (name, value) in counted {
        out.family(&name, Kind::Unknown, Unit::None, "Counted by the brain.");
        out.sample(&[], value);
    }
    out.finish()
}

/// Begins a gauge that is a plain number.
fn gauge(out: &mut Text, name: &str, help: &str) {
    out.family(name, Kind::Gauge, Unit::None, help);
}

fn brain(out: &mut Text, view: &View) {
    let brain = &view.brain;
    gauge(out, "dquant_brain_info", "The brain that answers.");
    out.sample(&[("address", &brain.address), ("state", &brain.state)], 1);
    gauge(out, "dquant_brain_term", "The term in which it leads.");
    out.sample(&[], brain.term);
    gauge(out, "dquant_brain_log_entries", "Entries in the log since the beginning.");
    out.sample(&[], brain.log_index);
    gauge(out, "dquant_alarms", "Things that are wrong now.");
    for level in ["error", "warning"] {
        let count = view.alarms.iter().filter(|alarm| alarm.level == level).count();
        out.sample(&[("level", level)], count);
    }
}

fn nodes(out: &mut Text, view: &View) {
    gauge(out, "dquant_node_agent", "The state of a node's agent: the label that has 1.");
    for node in &view.nodes {
        let labels = [("node", node.name.as_str()), ("kind", &node.kind), ("state", &node.agent)];
        out.sample(&labels, 1);
    }
    gauge(out, "dquant_node_free_slots", "Slots of a host that no job has.");
    for node in view.nodes.iter().filter(|node| node.slots > 0) {
        out.sample(&[("node", &node.name)], node.free_slots);
    }
}

/// A figure of a link: its metric with its unit, what it is, and how it is read.
type Figure = (&'static str, Unit, &'static str, fn(&crate::view::LinkView) -> Option<u64>);

const LINK_FIGURES: [Figure; 4] = [
    (
        "dquant_link_capacity_bits_per_second",
        Unit::BitsPerSecond,
        "What a directed link carries.",
        |link| Some(link.capacity_bps),
    ),
    (
        "dquant_link_reserved_bits_per_second",
        Unit::BitsPerSecond,
        "What jobs have reserved on it.",
        |link| Some(link.reserved_bps),
    ),
    (
        "dquant_link_used_bits_per_second",
        Unit::BitsPerSecond,
        "What was measured last, where somebody measures.",
        |link| link.used_bps,
    ),
    ("dquant_link_up", Unit::None, "0 for a link that is known to be dead.", |link| {
        Some((!link.is_down).into())
    }),
];

fn links(out: &mut Text, view: &View) {
    for (name, unit, help, read) in LINK_FIGURES {
        out.family(name, Kind::Gauge, unit, help);
        for link in &view.links {
            let Some(value) = read(link) else { continue };
            let port = link.port.to_string();
            let labels = [
                ("from", name_of(view, link.from)),
                ("to", name_of(view, link.to)),
                ("port", &port),
            ];
            out.sample(&labels, value);
        }
    }
}

fn jobs(out: &mut Text, view: &View) {
    gauge(out, "dquant_job_info", "A job.");
    for job in &view.jobs {
        let (id, dscp) = (job.id.to_string(), job.dscp.to_string());
        let labels = [
            ("job", id.as_str()),
            ("name", &job.name),
            ("owner", &job.owner),
            ("state", &job.state),
            ("dscp", &dscp),
        ];
        out.sample(&labels, 1);
    }
    let on_links =
        || view.links.iter().flat_map(|link| link.jobs.iter().map(move |job| (link, job)));
    let name = "dquant_job_link_used_bits_per_second";
    let help = "What a job was measured to use of a link.";
    out.family(name, Kind::Gauge, Unit::BitsPerSecond, help);
    let measured = || on_links().filter_map(|(link, job)| Some((link, job, job.used_bps?)));
    for (link, job, used) in measured().take(MAX_JOB_LINES) {
        let (id, port) = (job.job.to_string(), link.port.to_string());
        let ends = (name_of(view, link.from), name_of(view, link.to));
        out.sample(&[("job", &id), ("from", ends.0), ("to", ends.1), ("port", &port)], used);
    }
    let name = "dquant_job_link_omitted";
    let help = "Measurements of jobs on links that are not here because there are too many.";
    gauge(out, name, help);
    out.sample(&[], measured().count().saturating_sub(MAX_JOB_LINES));
}

fn name_of(view: &View, node: u32) -> &str {
    view.nodes.get(node as usize).map_or("", |node| node.name.as_str())
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
        let text = text(Format::Prometheus, &view(), &BTreeMap::new(), 0);
        assert!(text.contains("dquant_link_up{from=\"h0\",to=\"s0\",port=\"0\"} 1\n"), "{text}");
        assert!(text.contains("dquant_brain_lies_told 3\n"), "{text}");
        assert!(!text.contains("dquant_link_used_bits_per_second{"), "{text}");
        let on_link =
            "dquant_job_link_used_bits_per_second{job=\"1\",from=\"h0\",to=\"s0\",port=\"0\"} 7\n";
        assert!(text.contains(on_link), "{text}");
    }

    #[test]
    fn names_of_users_stay_within_their_label() {
        let text = text(Format::Prometheus, &view(), &BTreeMap::new(), 0);
        assert!(text.contains("name=\"a\\\"b\\\\c\\nd\","), "{text}");
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (_, value) = line.rsplit_once(' ').expect("a value");
            assert!(value.parse::<u64>().is_ok(), "{line}");
        }
    }

    #[test]
    fn each_family_is_introduced_once() {
        let counters = BTreeMap::from([("web.requests".into(), 1)]);
        let text = text(Format::OpenMetrics, &view(), &counters, 0);
        let mut introduced: Vec<&str> =
            text.lines().filter(|line| line.starts_with("# TYPE")).collect();
        let all = introduced.len();
        introduced.sort_unstable();
        introduced.dedup();
        assert_eq!(introduced.len(), all);
    }
}
