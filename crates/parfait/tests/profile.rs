//! What is derived from traffic: each pattern is recovered from packets with jitter, noise, losses
//! and retransmissions.

use std::collections::BTreeMap;

use parfait::demand::Demand;
use parfait::job::Job;
use parfait::pattern::Pattern;
use parfait::profile::sequence::{Packet, Sequencer};
use parfait::profile::{Options, ProfileError, Sample, profile};
use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;

const MS: u64 = 1_000_000;
const PACKET_BYTES: u64 = 4096;

/// A job that runs: rates say how many bytes an edge has in an iteration, a million for each bit
/// per second.
struct Run {
    pattern: Pattern,
    /// By rank.
    workers: Vec<u32>,
    iterations: u64,
    compute_ns: u64,
    phase_ns: u64,
}

impl Run {
    fn new(text: &str, random: &mut Pcg32) -> Run {
        let pattern: Pattern = text.parse().expect(text);
        let count = pattern.workers().expect(text);
        let mut workers: Vec<u32> = (0..count).collect();
        for at in (1..workers.len()).rev() {
            workers.swap(at, random.next_u32() as usize % (at + 1));
        }
        let compute_ns = (20 + u64::from(random.next_u32() % 60)) * MS;
        let phase_ns = (10 + u64::from(random.next_u32() % 30)) * MS;
        Run { pattern, workers, iterations: 12, compute_ns, phase_ns }
    }

    fn demand(&self) -> Demand {
        Demand::of(&self.pattern).expect("a pattern")
    }

    /// Bytes of each edge in an iteration.
    fn edges(&self) -> BTreeMap<(u32, u32), u64> {
        let demand = self.demand();
        let mut edges = BTreeMap::new();
        for (from, to, rate) in (0..demand.phases()).flat_map(|phase| demand.graph(phase)) {
            let ends = (self.workers[from as usize], self.workers[to as usize]);
            *edges.entry(ends).or_insert(0) += rate * PACKET_BYTES;
        }
        edges
    }

    /// All packets, in order of time: those of each edge evenly over its phase, with jitter.
    fn packets(&self, random: &mut Pcg32) -> Vec<Packet> {
        let demand = self.demand();
        let mut below = |below: u64| u64::from(random.next_u32()) % below.max(1);
        let mut numbers: BTreeMap<(u32, u32), u32> = BTreeMap::new();
        let mut packets = Vec::new();
        let mut now = 1_000 * MS;
        for _ in 0..self.iterations {
            now += self.compute_ns * (95 + below(11)) / 100;
            for phase in 0..demand.phases() {
                let length = self.phase_ns * (95 + below(11)) / 100;
                for (from, to, rate) in demand.graph(phase) {
                    let ends = (self.workers[from as usize], self.workers[to as usize]);
                    let count = rate * (97 + below(7)) / 100;
                    for number in 0..count {
                        let psn = numbers.entry(ends).or_insert(0x00ff_ff00);
                        let at_ns = now + length * number / count + below(length / count);
                        packets.push(packet(at_ns, ends, *psn, PACKET_BYTES as u32));
                        *psn = (*psn + 1) & 0x00ff_ffff;
                    }
                }
                now += length;
            }
        }
        packets.sort_by_key(|packet| packet.at_ns);
        packets
    }
}

fn packet(at_ns: u64, (from, to): (u32, u32), psn: u32, bytes: u32) -> Packet {
    let queue_pair = 100 + from;
    Packet {
        at_ns,
        from,
        to,
        queue_pair,
        psn,
        bytes,
        begins: psn.is_multiple_of(8),
        is_read: false,
    }
}

/// Of a hundred packets one is missing, one is sent twice and one comes late; others than the job's
/// edges carry little.
fn disturbed(packets: &[Packet], workers: u32, random: &mut Pcg32) -> Vec<Packet> {
    let mut seen = Vec::new();
    let mut numbers: BTreeMap<(u32, u32), u32> = BTreeMap::new();
    for packet in packets {
        match random.next_u32() % 100 {
            0 => {}
            1 => seen.extend([*packet, Packet { at_ns: packet.at_ns + MS, ..*packet }]),
            2 => seen.push(Packet { at_ns: packet.at_ns + MS / 4, ..*packet }),
            _ => seen.push(*packet),
        }
        if random.next_u32().is_multiple_of(100) && workers > 2 {
            let from = random.next_u32() % workers;
            let to = (from + 1 + random.next_u32() % (workers - 1)) % workers;
            let number = numbers.entry((from, to)).or_insert(0);
            let control = crate::packet(packet.at_ns, (from, to), *number, 64);
            let control = Packet { queue_pair: 1, ..control };
            *number += 1;
            seen.push(control);
        }
    }
    seen.sort_by_key(|packet| packet.at_ns);
    seen
}

fn samples(packets: &[Packet]) -> (Vec<Sample>, Sequencer) {
    let mut sequencer = Sequencer::new();
    let samples = packets.iter().filter_map(|packet| sequencer.add(packet)).collect();
    (samples, sequencer)
}

const PATTERNS: &[&str] = &[
    "ring:3@60",
    "ring:16@40",
    "tree:7@40",
    "tree:16@25",
    "torus:4x3@50,20",
    "torus:3x3@40,40",
    "torus:2x5@30,30",
    "hierarchical:4x4@20,70",
    "hierarchical:2x3@60,30",
    "hierarchical:3x5@50,50",
    "ps:6+2@30",
    "ps:5+3@40",
    "async-ps:6+2@30",
    "async-ps:7+3@25",
    "mesh:4@60",
    "mesh:9@20",
    "pipeline:4@50",
    "pipeline:9@35",
    "parallel:4x3x2@60,30,15",
    "parallel:2x3x3@60,40,20",
    "parallel:4x1x3@60,30,20",
    "parallel:1x3x4@60,30,20",
];

fn sizes(pattern: &Pattern) -> String {
    let text = pattern.to_string();
    text.split_once('@').map_or(text.clone(), |(sizes, _)| sizes.to_string())
}

/// Rows and columns of a torus of one rate can change places, and so can parts of equal rank.
fn is_same(found: &Pattern, run: &Run) -> bool {
    sizes(found) == sizes(&run.pattern)
}

#[test]
fn every_pattern_is_recovered_with_its_edges_within_a_tenth() {
    let mut random = Pcg32::new(51, 1);
    let (mut worst, mut edges) = (0.0_f64, 0);
    for text in PATTERNS {
        for seed in 0..4 {
            let run = Run::new(text, &mut random);
            let workers = run.workers.len() as u32;
            let packets = disturbed(&run.packets(&mut random), workers, &mut random);
            let (samples, sequencer) = samples(&packets);
            assert!(sequencer.counts().repeated > 0 && sequencer.counts().filled > 0);
            let found = profile(workers as usize, &samples, Options::default())
                .unwrap_or_else(|error| panic!("{text} {seed}: {error}"));
            assert!(is_same(&found.pattern, &run), "{text} {seed}: {} {found:?}", found.job);
            assert!(!found.is_custom() && found.iterations >= 10, "{text} {seed}: {found:?}");
            let truth = run.edges();
            for (ends, bytes) in &truth {
                let own = found.edges.iter().find(|edge| (edge.from, edge.to) == *ends);
                let own = own.unwrap_or_else(|| panic!("{text} {seed}: no edge {ends:?}"));
                let off = (own.bytes as f64 / *bytes as f64 - 1.0).abs();
                assert!(off <= 0.1, "{text} {seed}: {} for {bytes}", own.bytes);
                (worst, edges) = (worst.max(off), edges + 1);
            }
            // The ranks are such that the pattern has exactly the edges that there are.
            let demand = Demand::of(&found.pattern).expect("a pattern");
            for phase in 0..demand.phases() {
                for (from, to, _) in demand.graph(phase) {
                    let ends = (found.ranks[from as usize], found.ranks[to as usize]);
                    assert!(truth.contains_key(&ends), "{text} {seed}: {ends:?}");
                }
            }
            let job: Job = found.job.to_string().parse().expect("it can be submitted");
            assert_eq!(job, found.job);
            let cycle = job.cycle.expect("it computes, too");
            let [late_ns, longer_ns] =
                [cycle.period_ns - found.period_ns, cycle.exchange_ns - found.communication_ns];
            assert!(late_ns < 1_000 && longer_ns < 1_000, "{text} {seed}: {job} {found:?}");
        }
    }
    println!("{edges} edges, {:.1} % off at worst", worst * 100.0);
}

#[test]
fn rates_are_those_that_carry_the_bytes_in_the_time_that_is_wanted() {
    let mut random = Pcg32::new(52, 1);
    for text in ["ring:8@100", "torus:4x3@80,20", "hierarchical:4x4@20,60"] {
        let run = Run::new(text, &mut random);
        let (samples, _) = samples(&run.packets(&mut random));
        let options = Options { communication_ns: Some(50 * MS), ..Options::default() };
        let found = profile(run.workers.len(), &samples, options).expect(text);
        // Phases one after the other, each with the bytes of its largest edge at the rate of that
        // edge.
        let demand = Demand::of(&found.pattern).expect(text);
        let truth = Demand::of(&run.pattern).expect(text);
        let mut needed = 0.0;
        for phase in 0..demand.phases() {
            let times = demand.graph(phase).into_iter().zip(truth.graph(phase)).map(
                |((.., rate), (.., packets))| (packets * PACKET_BYTES * 8) as f64 / rate as f64,
            );
            needed += times.fold(0.0, f64::max);
        }
        assert!((0.045..=0.0515).contains(&needed), "{text}: {needed} s at {}", found.job);
        // Half the time of an iteration that is not compute takes twice the rate.
        let compute = found.period_ns - found.communication_ns;
        let iteration_ns = Some(compute + found.communication_ns / 2);
        let plain = profile(run.workers.len(), &samples, Options::default()).expect(text);
        let faster =
            profile(run.workers.len(), &samples, Options { iteration_ns, ..Options::default() });
        let [slow, fast] = [plain, faster.expect(text)]
            .map(|found| Demand::of(&found.pattern).expect(text).graph(0)[0].2 as f64);
        assert!((1.95..=2.05).contains(&(fast / slow)), "{text}: {slow} {fast}");
        let headers = Options { overhead_ppm: 100_000, ..Options::default() };
        let wire = profile(run.workers.len(), &samples, headers).expect(text);
        let wire = Demand::of(&wire.pattern).expect(text).graph(0)[0].2 as f64;
        assert!((1.08..=1.12).contains(&(wire / slow)), "{text}: {slow} {wire}");
        let impossible = Options { iteration_ns: Some(compute / 2), ..Options::default() };
        let refusal =
            profile(run.workers.len(), &samples, impossible).expect_err("no time is left");
        assert!(matches!(refusal, ProfileError::NoTime { .. }), "{refusal}");
    }
}

#[test]
fn what_no_pattern_explains_is_a_mesh_that_covers_it() {
    let mut random = Pcg32::new(53, 1);
    // Edges at random, of very different sizes.
    let mut edges = BTreeMap::new();
    for _ in 0..20 {
        let ends = (random.next_u32() % 9, random.next_u32() % 9);
        edges.insert(ends, 1 << (random.next_u32() % 8));
    }
    edges.retain(|(from, to), _| from != to);
    let mut samples = Vec::new();
    for iteration in 0..10 {
        for ((from, to), count) in &edges {
            for number in 0..*count {
                let at_ns = iteration * 100 * MS + 40 * MS * number / count;
                samples.push(Sample { at_ns, from: *from, to: *to, bytes: 100_000 });
            }
        }
    }
    let found = profile(9, &samples, Options::default()).expect("it repeats");
    assert!(found.is_custom() && found.residual_ppm > 200_000, "{found:?}");
    let Pattern::Mesh { rate_bps, .. } = found.job.pattern else { panic!("{}", found.job) };
    let largest = edges.values().max().expect("some") * 800_000 * 1_000 * MS;
    assert!(rate_bps >= largest / found.communication_ns, "{rate_bps}");
    assert!((90 * MS..110 * MS).contains(&found.period_ns));
}

#[test]
fn what_says_nothing_is_refused_with_the_reason() {
    let sample = |at_ns, from, to| Sample { at_ns, from, to, bytes: 1000 };
    assert_eq!(profile(4, &[], Options::default()), Err(ProfileError::Nothing));
    assert_eq!(profile(4, &[sample(1, 2, 2)], Options::default()), Err(ProfileError::Nothing));
    let wrong = profile(4, &[sample(1, 2, 4)], Options::default());
    assert_eq!(wrong, Err(ProfileError::NoWorker { worker: 4, workers: 4 }));
    assert_eq!(profile(2000, &[], Options::default()), Err(ProfileError::TooMany(2000)));
    let once = profile(4, &[sample(1, 0, 1), sample(9, 1, 0)], Options::default());
    assert!(matches!(once, Err(ProfileError::NoPeriod(_))), "{once:?}");
    let mut random = Pcg32::new(54, 1);
    let run = Run { iterations: 1, ..Run::new("ring:4@50", &mut random) };
    let (samples, _) = samples(&run.packets(&mut random));
    let known = Options { period_ns: Some(100 * MS), ..Options::default() };
    let short = profile(4, &samples, known);
    assert!(matches!(short, Err(ProfileError::TooShort { .. })), "{short:?}");
    // Nothing that anyone feeds it makes it panic.
    for _ in 0..60 {
        let count = random.next_u32() % 60;
        let odd: Vec<Sample> = (0..count)
            .map(|_| {
                let at_ns = u64::from(random.next_u32()) << (random.next_u32() % 32);
                let bytes = u64::from(random.next_u32()) << (random.next_u32() % 33);
                Sample { at_ns, from: random.next_u32() % 4, to: random.next_u32() % 4, bytes }
            })
            .collect();
        let period_ns = random.next_u32().is_multiple_of(2).then_some(u64::from(random.next_u32()));
        let iteration_ns =
            random.next_u32().is_multiple_of(2).then_some(u64::from(random.next_u32()));
        let _ = profile(4, &odd, Options { period_ns, iteration_ns, ..Options::default() });
    }
}
