//! Pictures of a run, as SVG: queues and throughput over time with the faults of that time,
//! slowdown by size, use of links.

use std::collections::BTreeMap;

use ::topology::drawing;
use roce::Time;
use sim::network::{LinkReport, QueueSample};
use sim::traffic::{Outcome, Slowdowns};

use super::Prepared;
use crate::chart::{self, Curve, Diagram, Mark, Scale};

/// Groups of flows by size.
const GROUPS: usize = 20;

/// Points of the curve of throughput: each is a mean over so much of the run.
const RATES: usize = 250;

/// The longest queue of a switch, the sum of all, and what goes into hosts, over time.
pub fn queues(title: &str, prepared: &Prepared, outcome: &Outcome) -> String {
    let ms = |at: Time| at.as_nanos() as f64 / 1e6;
    let marks: Vec<Mark> =
        (prepared.faults.iter().filter(|fault| fault.timed.from < outcome.ended))
            .map(|fault| Mark {
                from: ms(fault.timed.from),
                until: fault.timed.until.map(ms),
                name: format!("{} {}", fault.kind, fault.place),
            })
            .collect();
    let curve = |name: &str, colour: usize, bytes: &dyn Fn(usize) -> u64| {
        let place =
            |(number, sample): (usize, &QueueSample)| (ms(sample.at), bytes(number) as f64 / 1e3);
        let points = outcome.samples.iter().enumerate().map(place).collect();
        Curve { name: name.to_owned(), colour, dashed: false, points }
    };
    let diagram = |title: &str, curves| Diagram {
        title: title.to_owned(),
        scales: [Scale::Linear, Scale::Linear],
        curves,
        marks: marks.clone(),
    };
    let longest = curve("longest queue", 0, &|number| outcome.samples[number].longest_bytes);
    let total = curve("all queues", 1, &|number| outcome.samples[number].total_bytes);
    let every = (outcome.samples.len() / RATES).max(1);
    let spaced: Vec<&QueueSample> = outcome.samples.iter().step_by(every).collect();
    let rate = |pair: &[&QueueSample]| {
        let bits = 8 * (pair[1].into_hosts_bytes - pair[0].into_hosts_bytes);
        let span = pair[1].at.since(pair[0].at).as_nanos().max(1);
        (ms(pair[1].at), bits as f64 / span as f64)
    };
    let rates = Curve {
        name: "into all hosts".to_owned(),
        colour: 2,
        dashed: false,
        points: spaced.windows(2).map(rate).collect(),
    };
    let diagrams = [
        diagram("Longest queue of a switch, kB, over ms", vec![longest]),
        diagram("All queues of switches, kB, over ms", vec![total]),
        diagram("Frames into hosts, Gbit/s, over ms", vec![rates]),
    ];
    chart::svg(title, &diagrams)
}

/// Slowdown over flow size, a median and a 99th percentile for each run, which has a name.
pub fn slowdowns(title: &str, runs: &[(String, &Outcome)]) -> String {
    let mut curves = Vec::new();
    for (colour, (name, outcome)) in runs.iter().enumerate() {
        let groups = outcome.slowdowns_by_size(GROUPS);
        let curve = |what: &str, dashed, value: &dyn Fn(&Slowdowns) -> u64| Curve {
            name: format!("{name} {what}"),
            colour,
            dashed,
            points: groups
                .iter()
                .map(|(size, group)| (*size as f64, value(group) as f64 / 1e3))
                .collect(),
        };
        curves.push(curve("p50", false, &|group| group.p50));
        curves.push(curve("p99", true, &|group| group.p99));
    }
    let title_text = "Slowdown beside an empty network, over flow size".to_owned();
    let scales = [Scale::Sizes, Scale::Powers];
    chart::svg(title, &[Diagram { title: title_text, scales, curves, marks: Vec::new() }])
}

/// The topology, its links coloured by the use of the busier direction over the whole run.
pub fn links(prepared: &Prepared, outcome: &Outcome) -> String {
    // The graph has the cables in the order of the topology's links, two directions each.
    let used: Vec<f64> = outcome
        .links
        .chunks(2)
        .map(|both| {
            let share =
                |link: &LinkReport| link.stats.rate_bps() as f64 / link.rate_bps.max(1) as f64;
            both.iter().map(share).fold(0.0, f64::max)
        })
        .collect();
    let places: BTreeMap<_, usize> = prepared.topology.links().map(|(id, _)| id).zip(0..).collect();
    drawing::write_heat(&prepared.topology, |link| {
        places.get(&link).and_then(|&place| used.get(place)).copied().unwrap_or(0.0)
    })
}
