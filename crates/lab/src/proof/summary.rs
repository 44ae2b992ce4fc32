//! What a proof says, by job and link, with names instead of numbers.

use ::topology::graph::Topology;
use roce::Duration;
use serde::Serialize;

use super::admit::Admitted;
use super::{JobProof, Proof};

/// What the simulator says of a set of jobs.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// What put the jobs at their places.
    pub placement: &'static str,
    /// The network.
    pub topology: String,
    /// Congestion control.
    pub control: String,
    /// Queues of each port.
    pub queues: u8,
    /// By job.
    pub jobs: Vec<JobRow>,
    /// Jobs without a place.
    pub refused: Vec<Refused>,
    /// The pair that got least of its guarantee.
    pub worst: Option<Worst>,
    /// Whether every pair had its guarantee on average.
    pub is_kept: bool,
    /// Share of windows of pairs that were below, in all.
    pub below_percent: f64,
    /// Ports whose jobs are promised more than may be promised there.
    pub overbooked_ports: usize,
    /// Jobs that their ports' plans do not assure, by job and port.
    pub not_assured: usize,
    /// Packets that were dropped.
    pub dropped: u64,
    /// Events of the simulation.
    pub events: u64,
    /// By direction of a link.
    pub links: Vec<LinkRow>,
}

/// What came out for a job.
#[derive(Clone, Debug, Serialize)]
pub struct JobRow {
    /// Its number.
    pub job: u64,
    /// What was asked for.
    pub request: String,
    /// The code point of its packets.
    pub dscp: u8,
    /// Pairs of workers on different hosts.
    pub pairs: usize,
    /// Pairs that share a host.
    pub local_pairs: usize,
    /// The guarantee of the pair that got least of it.
    pub worst_guaranteed_bps: Option<u64>,
    /// What that pair got on average.
    pub worst_measured_bps: Option<u64>,
    /// The least that any pair got in a window.
    pub worst_window_bps: Option<u64>,
    /// Share of windows of its pairs that were below.
    pub below_percent: f64,
    /// How many iterations it went through.
    pub iterations: usize,
    /// Their median.
    pub iteration_p50_ns: Option<u64>,
    /// Their 99th percentile.
    pub iteration_p99_ns: Option<u64>,
    /// How long one takes with the guarantees and no more.
    pub iteration_promised_ns: u64,
}

/// A job without a place.
#[derive(Clone, Debug, Serialize)]
pub struct Refused {
    /// What was asked for.
    pub request: String,
    /// Why it has none.
    pub reason: String,
}

/// A pair of workers.
#[derive(Clone, Debug, Serialize)]
pub struct Worst {
    /// Its job.
    pub job: u64,
    /// The sending host.
    pub from: String,
    /// The receiving host.
    pub to: String,
    /// What it is to have.
    pub guaranteed_bps: u64,
    /// What it got on average.
    pub measured_bps: u64,
    /// The same as a share.
    pub percent: f64,
}

/// A direction of a link.
#[derive(Clone, Debug, Serialize)]
pub struct LinkRow {
    /// Where it begins.
    pub from: String,
    /// Where it ends.
    pub to: String,
    /// What it can carry.
    pub capacity_bps: u64,
    /// What is promised on it.
    pub promised_bps: u64,
    /// The most that it carried.
    pub used_bps: u64,
}

/// A pair that lacks less than this part of its guarantee on average has it: what was on its way at
/// both ends of the time.
const SLACK: f64 = 0.001;

impl Summary {
    /// Of jobs that have their places, by what put them there, congestion control and queues.
    pub fn of(
        placement: &'static str,
        (control, queues): (&str, u8),
        topology: &Topology,
        proof: &Proof,
    ) -> Summary {
        let hosts: Vec<_> = topology.hosts().collect();
        let name = |host: u32| topology.node(hosts[host as usize]).name().to_owned();
        let worst = proof.worst().map(|(job, pair)| Worst {
            job: job.id,
            from: name(pair.hosts.0),
            to: name(pair.hosts.1),
            guaranteed_bps: pair.guaranteed_bps,
            measured_bps: pair.measured_bps,
            percent: 100.0 * pair.ratio(),
        });
        let pairs = || proof.jobs.iter().flat_map(|job| &job.pairs);
        let windows: u64 = pairs().map(|pair| u64::from(pair.windows)).sum();
        let below: u64 = pairs().map(|pair| u64::from(pair.below)).sum();
        Summary {
            placement,
            topology: topology.to_string(),
            control: control.to_owned(),
            queues,
            jobs: proof.jobs.iter().map(JobRow::new).collect(),
            refused: Vec::new(),
            worst,
            is_kept: pairs().all(|pair| pair.ratio() >= 1.0 - SLACK),
            below_percent: 100.0 * below as f64 / windows.max(1) as f64,
            overbooked_ports: proof.overbooked_ports,
            not_assured: proof.not_assured,
            dropped: proof.dropped,
            events: proof.events,
            links: links(topology, proof),
        }
    }

    /// The same with the jobs that have no place.
    #[must_use]
    pub fn with_refused(self, admitted: &Admitted) -> Summary {
        let refused = admitted.refused.iter();
        let refused = refused
            .map(|(job, reason)| Refused { request: job.to_string(), reason: reason.clone() });
        Summary { refused: refused.collect(), ..self }
    }
}

fn links(topology: &Topology, proof: &Proof) -> Vec<LinkRow> {
    let rows = topology.links().flat_map(|(id, link)| {
        let of = move |side: usize| 2 * id.index() + side;
        (0..2).filter_map(move |side| {
            let own = proof.links.iter().find(|own| own.link as usize == of(side))?;
            let name = |end: usize| topology.node(link.ends[end].node).name().to_owned();
            Some(LinkRow {
                from: name(side),
                to: name(1 - side),
                capacity_bps: own.capacity_bps,
                promised_bps: own.promised_bps,
                used_bps: own.used_bps,
            })
        })
    });
    rows.collect()
}

impl JobRow {
    fn new(job: &JobProof) -> JobRow {
        let worst = job.worst();
        JobRow {
            job: job.id,
            request: job.request.clone(),
            dscp: job.dscp,
            pairs: job.pairs.len(),
            local_pairs: job.local_pairs,
            worst_guaranteed_bps: worst.map(|pair| pair.guaranteed_bps),
            worst_measured_bps: worst.map(|pair| pair.measured_bps),
            worst_window_bps: job.pairs.iter().map(|pair| pair.least_bps).min(),
            below_percent: 100.0 * job.below(),
            iterations: job.iterations.len(),
            iteration_p50_ns: job.percentile(50).map(Duration::as_nanos),
            iteration_p99_ns: job.percentile(99).map(Duration::as_nanos),
            iteration_promised_ns: job.promised.as_nanos(),
        }
    }
}
