//! Two runs of one case: where the same flows were under way, what each got, and how long its
//! packets took.

use std::collections::BTreeMap;

use serde::Serialize;
use thiserror::Error;

use super::Sample;
use crate::chart::{self, Curve, Diagram, Scale};

/// The flows of one run, in the order in which they began. Time begins with the first one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Run {
    flows: Vec<Vec<Sample>>,
}

/// Why two runs cannot be compared.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CompareError {
    /// One of them has no samples.
    #[error("the {0} run has no samples")]
    Empty(&'static str),
    /// Flows overlap in another way.
    #[error(
        "the runs differ: the simulated one has {simulated} phases, the measured one {measured}"
    )]
    Phases {
        /// Spans with other flows under way, simulated.
        simulated: usize,
        /// The same, measured.
        measured: usize,
    },
    /// In one phase, other flows are under way.
    #[error("the runs differ in phase {phase}: other flows are under way")]
    Flows {
        /// Which one, from 1.
        phase: usize,
    },
}

/// What one flow got in the second half of a phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Payload that was acknowledged, in Mbit/s.
    pub mbps: f64,
    /// Median of the smoothed round-trip time in milliseconds.
    pub rtt_ms: f64,
    /// Median of the window in packets.
    pub window_packets: f64,
}

/// One flow in one phase: a span in which the same flows are under way.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Which phase, from 1.
    pub phase: usize,
    /// How long it is in each run, in seconds.
    pub seconds: [f64; 2],
    /// Which flow, in the order of their beginning, from 1.
    pub flow: usize,
    /// What it got in the simulation.
    pub simulated: Figures,
    /// What it got on the wire.
    pub measured: Figures,
}

/// Spans with the same flows that are shorter than this part of a run are its edges.
const SHORTEST_PHASE: u64 = 50;

/// Steps of a picture in which throughput is a mean.
const STEPS: u64 = 200;

#[derive(Clone, Debug)]
struct Phase {
    from_ns: u64,
    to_ns: u64,
    flows: Vec<usize>,
}

impl Run {
    /// Puts the samples of files together that have the same clock.
    pub fn of(files: &[Vec<Sample>]) -> Run {
        let mut flows: BTreeMap<(usize, u32), Vec<Sample>> = BTreeMap::new();
        for (file, samples) in files.iter().enumerate() {
            for sample in samples {
                flows.entry((file, sample.flow)).or_default().push(*sample);
            }
        }
        let mut flows: Vec<Vec<Sample>> = flows.into_values().collect();
        flows.sort_by_key(|flow| flow[0].at_ns);
        let zero = flows.first().map_or(0, |flow| flow[0].at_ns);
        for sample in flows.iter_mut().flatten() {
            sample.at_ns -= zero;
        }
        Run { flows }
    }

    fn end_ns(&self) -> u64 {
        self.flows.iter().filter_map(|flow| flow.last()).map(|last| last.at_ns).max().unwrap_or(0)
    }

    fn phases(&self) -> Vec<Phase> {
        let span = |flow: &Vec<Sample>| Some((flow.first()?.at_ns, flow.last()?.at_ns));
        let spans: Vec<(u64, u64)> = self.flows.iter().filter_map(span).collect();
        let mut edges: Vec<u64> = spans.iter().flat_map(|&(from, to)| [from, to]).collect();
        edges.sort_unstable();
        let shortest = self.end_ns() / SHORTEST_PHASE;
        let between = edges.windows(2).filter(|edge| edge[1] - edge[0] > shortest);
        let phase = |edge: &[u64]| {
            let is_under_way = |&at: &usize| spans[at].0 <= edge[0] && edge[1] <= spans[at].1;
            let flows = (0..spans.len()).filter(is_under_way).collect();
            Phase { from_ns: edge[0], to_ns: edge[1], flows }
        };
        between.map(phase).filter(|phase| !phase.flows.is_empty()).collect()
    }

    /// The second half: what came before needs time to settle.
    fn figures(&self, flow: usize, phase: &Phase) -> Figures {
        let from = phase.from_ns.midpoint(phase.to_ns);
        let samples: Vec<&Sample> = self.flows[flow]
            .iter()
            .filter(|sample| (from..=phase.to_ns).contains(&sample.at_ns))
            .collect();
        let (Some(first), Some(last)) = (samples.first(), samples.last()) else {
            return Figures::default();
        };
        let rtts = samples.iter().filter_map(|sample| sample.rtt_ns).collect();
        let windows = samples.iter().map(|sample| sample.window_packets.into()).collect();
        Figures {
            mbps: megabits(first, last),
            rtt_ms: median(rtts) / 1e6,
            window_packets: median(windows),
        }
    }

    /// Values of each flow over seconds.
    fn curves(&self, value: impl Fn(&[Sample], usize) -> Option<f64>) -> Vec<Curve> {
        let step = (self.end_ns() / STEPS).max(1);
        let curve = |(number, flow): (usize, &Vec<Sample>)| {
            let places = (0..flow.len())
                .filter(|&at| at == 0 || flow[at].at_ns / step != flow[at - 1].at_ns / step);
            let places: Vec<usize> = places.collect();
            let points = places
                .iter()
                .filter_map(|&at| Some((flow[at].at_ns as f64 / 1e9, value(flow, at)?)));
            Curve {
                name: format!("flow {}", number + 1),
                colour: number,
                dashed: false,
                points: points.collect(),
            }
        };
        self.flows.iter().enumerate().map(curve).collect()
    }
}

/// Compares the runs phase by phase.
///
/// # Errors
/// When their flows do not begin and end in the same order.
pub fn rows(simulated: &Run, measured: &Run) -> Result<Vec<Row>, CompareError> {
    let phases = [simulated.phases(), measured.phases()];
    for (phases, name) in phases.iter().zip(["simulated", "measured"]) {
        if phases.is_empty() {
            return Err(CompareError::Empty(name));
        }
    }
    let [of_simulated, of_measured] = &phases;
    if of_simulated.len() != of_measured.len() {
        let (simulated, measured) = (of_simulated.len(), of_measured.len());
        return Err(CompareError::Phases { simulated, measured });
    }
    let mut rows = Vec::new();
    for (number, (here, there)) in (1..).zip(of_simulated.iter().zip(of_measured)) {
        if here.flows != there.flows {
            return Err(CompareError::Flows { phase: number });
        }
        let seconds = [here, there].map(|phase| (phase.to_ns - phase.from_ns) as f64 / 1e9);
        rows.extend(here.flows.iter().map(|&flow| Row {
            phase: number,
            seconds,
            flow: flow + 1,
            simulated: simulated.figures(flow, here),
            measured: measured.figures(flow, there),
        }));
    }
    Ok(rows)
}

/// Both runs side by side: throughput, windows and round-trip times over seconds.
pub fn picture(title: &str, simulated: &Run, measured: &Run) -> String {
    let throughput = |flow: &[Sample], at: usize| {
        let step = flow.last()?.at_ns.max(STEPS) / STEPS;
        let earlier = flow[..at].iter().rev().find(|one| one.at_ns + step <= flow[at].at_ns)?;
        Some(megabits(earlier, &flow[at]))
    };
    let window = |flow: &[Sample], at: usize| Some(f64::from(flow[at].window_packets));
    let rtt = |flow: &[Sample], at: usize| Some(flow[at].rtt_ns? as f64 / 1e6);
    let row = |what: &str, curves: [Vec<Curve>; 2]| {
        let mut wires = ["simulated", "measured"].into_iter();
        curves.map(|curves| Diagram {
            title: format!("{what}, {}", wires.next().unwrap_or_default()),
            scales: [Scale::Linear; 2],
            curves,
            marks: Vec::new(),
        })
    };
    let both = [simulated, measured];
    let rows = [
        row("Acknowledged payload, Mbit/s, over seconds", both.map(|run| run.curves(throughput))),
        row("Window, packets", both.map(|run| run.curves(window))),
        row("Smoothed round-trip time, ms", both.map(|run| run.curves(rtt))),
    ];
    chart::grid(title, &rows.each_ref().map(<[Diagram; 2]>::as_slice))
}

fn megabits(first: &Sample, last: &Sample) -> f64 {
    let bytes = last.acknowledged_bytes.saturating_sub(first.acknowledged_bytes);
    let span = last.at_ns.saturating_sub(first.at_ns).max(1);
    bytes as f64 * 8e3 / span as f64
}

fn median(mut values: Vec<u64>) -> f64 {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A flow that gets `mbps` from one time to another, in milliseconds.
    fn flow(number: u32, from_ms: u64, to_ms: u64, mbps: u64) -> Vec<Sample> {
        let sample = |at_ms: u64| Sample {
            at_ns: at_ms * 1_000_000,
            flow: number,
            acknowledged_bytes: (at_ms - from_ms) * mbps * 125,
            in_flight_packets: 4,
            window_packets: number + 5,
            rate_bps: None,
            rtt_ns: Some(2_000_000),
        };
        (from_ms..=to_ms).map(sample).collect()
    }

    #[test]
    fn phases_are_compared_in_their_second_halves() {
        let simulated = Run::of(&[[flow(0, 0, 1_000, 80), flow(1, 400, 600, 40)].concat()]);
        // Another clock, other numbers, two files.
        let measured = Run::of(&[flow(9, 5_410, 5_611, 30), flow(9, 5_000, 6_010, 100)]);
        let rows = rows(&simulated, &measured).expect("the same flows");
        let flows: Vec<(usize, usize)> = rows.iter().map(|row| (row.phase, row.flow)).collect();
        assert_eq!(flows, [(1, 1), (2, 1), (2, 2), (3, 1)]);
        let second = rows[2];
        assert!((second.simulated.mbps - 40.0).abs() < 1e-6, "{second:?}");
        assert!((second.measured.mbps - 30.0).abs() < 1e-6, "{second:?}");
        assert!((second.simulated.rtt_ms - 2.0).abs() < 1e-9, "{second:?}");
        assert!((second.simulated.window_packets - 6.0).abs() < 1e-9, "{second:?}");
        let picture = picture("a case", &simulated, &measured);
        assert_eq!(picture.matches("<polyline").count(), 12, "three rows, two runs, two flows");
        assert!(picture.contains("measured") && !picture.contains("NaN"));
    }

    #[test]
    fn runs_with_other_flows_are_refused() {
        let one = Run::of(&[flow(0, 0, 1_000, 80)]);
        let two = Run::of(&[flow(0, 0, 1_000, 80), flow(0, 400, 1_500, 80)]);
        assert_eq!(rows(&one, &Run::of(&[])), Err(CompareError::Empty("measured")));
        assert_eq!(rows(&Run::default(), &one), Err(CompareError::Empty("simulated")));
        let error = CompareError::Phases { simulated: 1, measured: 3 };
        assert_eq!(rows(&one, &two), Err(error));
        let other = Run::of(&[flow(0, 0, 1_500, 80), flow(0, 400, 1_000, 80)]);
        assert_eq!(rows(&two, &other), Err(CompareError::Flows { phase: 3 }));
    }
}
