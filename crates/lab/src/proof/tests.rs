//! Small sets on small networks.

use ::topology::graph::{Capacity, Topology};
use ::topology::shape::Shape;
use parfait::demand::Order;
use parfait::job::Job;
use parfait::loads::Piece;
use parfait::outage::Outage;
use parfait::queues::Scheme;
use parfait::runs::Run;
use parfait::shifts::{self, Burst, Limits, Shared, Use};
use parfait::site::Site;
use parfait::spread::Ecmp;
use roce::Duration;

use super::admit::{self, Way};
use super::interleave::{self, Staggered};
use super::set::{Member, Set, SetError};
use super::violations::{self, Effort, Mix, SMALL};
use super::{Options, Proof, picture, prove};

const GBIT: u64 = 1_000_000_000;

fn topology() -> Topology {
    let capacity = Capacity { rate_bps: 10 * GBIT, delay_ns: 1_000 };
    let rule: Shape = "leaf-spine:2x2x2".parse().expect("a rule");
    rule.build(capacity).expect("a topology")
}

fn jobs(texts: &[&str]) -> Vec<Job> {
    texts.iter().map(|text| text.parse().expect("a job")).collect()
}

fn options() -> Options {
    let ms = Duration::from_millis;
    Options { warm_up: ms(5), windows: 2, iterate: ms(40), ..Options::new() }
}

fn proved(way: Way, texts: &[&str], options: &Options) -> Proof {
    let topology = topology();
    let network = admit::network(&topology, 2, 900_000).expect("a network");
    let admitted = admit::admit(&topology, &network, &jobs(texts), way, 1).expect("admitted");
    assert!(admitted.refused.is_empty(), "{:?}", admitted.refused);
    prove(&topology, &Outage::none(), &network, &admitted.members, options).expect("a proof")
}

#[test]
fn every_pair_has_its_guarantee_while_all_send() {
    let options = options();
    let proof = proved(Way::Search, &["ring:3@4G", "mesh:3@1G", "ps:1+1@500M"], &options);
    assert_eq!((proof.jobs.len(), proof.dropped, proof.overbooked_ports), (3, 0, 0));
    let (_, worst) = proof.worst().expect("pairs on different hosts");
    assert!(worst.ratio() > 1.0, "{worst:?}");
    assert!(proof.jobs.iter().all(|job| job.below() == 0.0), "{proof:?}");
    for job in proof.jobs.iter().filter(|job| !job.pairs.is_empty()) {
        let p99 = job.percentile(99).expect("iterations");
        assert!(p99 <= job.promised + Duration::from_millis(1), "{job:?}");
    }
    let svg = picture::svg(&topology(), &proof);
    assert_eq!((svg.matches("<svg").count(), svg.matches("</svg>").count()), (3, 3));
}

/// One of the two spines is down.
fn broken(topology: &Topology) -> Outage {
    let mut outage = Outage::none();
    let node = |name: &str| topology.named(name).expect("it is there");
    outage.set_node(node("spine0"), true);
    outage
}

#[test]
fn what_is_down_carries_nothing_and_the_rest_holds_what_the_ledger_says() {
    let options = Options { iterate: Duration::ZERO, ..options() };
    let topology = topology();
    let outage = broken(&topology);
    let site =
        Site { topology: topology.clone(), slots: 2, ecmp: Ecmp::Even, reservable_ppm: 900_000 };
    let network = site.network(&outage).expect("one spine is left");
    let piece = |(at, host)| Piece { host, run: Run::new(at, at + 1) };
    let member = |id, bps: u64, hosts: [u32; 2]| {
        let job: Job = format!("ring:2@{bps}M").parse().expect("a job");
        let pieces = (0..).zip(hosts).map(piece).collect();
        Member { id, job, order: Order::Ranks, pieces, dscp: None }
    };
    // Both cross the spines: together they fit one uplink of 10 Gbit/s, or with both spines twice
    // as much.
    let set = [member(1, 4_000, [0, 2]), member(2, 4_000, [1, 3])];
    let proof = prove(&topology, &outage, &network, &set, &options).expect("a proof");
    assert!(proof.worst().expect("pairs").1.ratio() > 1.0, "{proof:?}");
    let spine = topology.named("spine0").expect("it is there");
    let dead: Vec<usize> = topology.node(spine).links().map(|(_, link)| link.index()).collect();
    assert!(proof.links.iter().all(|link| !dead.contains(&(link.link as usize / 2))), "{proof:?}");
    let too_much = [member(1, 8_000, [0, 2]), member(2, 8_000, [1, 3])];
    let proof = prove(&topology, &outage, &network, &too_much, &options).expect("a proof");
    assert!(proof.worst().expect("pairs").1.ratio() < 0.8, "{proof:?}");
    assert!(proof.overbooked_ports > 0);
    let (nothing, network) = (Outage::none(), site.network(&Outage::none()).expect("whole"));
    let proof = prove(&topology, &nothing, &network, &too_much, &options).expect("a proof");
    assert!(proof.worst().expect("pairs").1.ratio() > 1.0, "two spines carry it: {proof:?}");
}

#[test]
fn what_is_promised_twice_is_not_held_and_that_is_seen() {
    // Workers are spread by slots alone: 9 Gbit/s of each ring between the same two hosts.
    let texts = ["ring:4@9G slots=1", "ring:4@9G slots=1"];
    let options = Options { iterate: Duration::ZERO, ..options() };
    let topology = topology();
    let network = admit::network(&topology, 2, 900_000).expect("a network");
    let mut admitted =
        admit::admit(&topology, &network, &jobs(&texts), Way::Locality, 1).expect("admitted");
    for member in &mut admitted.members {
        member.pieces = (0..4).map(|at| Piece { host: at, run: Run::new(at, at + 1) }).collect();
    }
    let proof =
        prove(&topology, &Outage::none(), &network, &admitted.members, &options).expect("a proof");
    assert!(proof.overbooked_ports > 0, "{proof:?}");
    let (_, worst) = proof.worst().expect("pairs");
    assert!(worst.ratio() < 0.7 && worst.below == worst.windows, "{worst:?}");
}

#[test]
fn a_set_that_cannot_be_is_refused_with_the_reason() {
    let topology = topology();
    let network = admit::network(&topology, 2, 900_000).expect("a network");
    let admitted = admit::admit(&topology, &network, &jobs(&["ring:3@1G"]), Way::Search, 1);
    let mut members = admitted.expect("admitted").members;
    members[0].pieces.pop();
    let refused = Set::new(&network, &members).expect_err("a worker is on no host");
    assert!(matches!(refused, SetError::Worker { job: 1, .. }), "{refused}");
}

#[test]
fn with_seven_queues_no_guarantee_is_violated_and_a_hash_violates_some() {
    let effort = Effort { seeds: 1, windows: 3, transport: SMALL };
    let mix = Mix { backlogged: 12, flows: 1 };
    let measure = |scheme, queues| violations::measure(scheme, queues, mix, &effort).expect("runs");
    let (hash, ours) = (measure(Scheme::Hash, 7), measure(Scheme::Matched, 7));
    assert_eq!((hash.sending, ours.sending), (36, 36));
    assert!(ours.below == 0 && hash.below > 3, "{ours:?} {hash:?}");
}

#[test]
fn jobs_that_take_turns_are_as_fast_as_alone() {
    let ms = 1_000_000;
    let burst = Burst { start_ns: 17 * ms, length_ns: 7 * ms, bps: 10 * GBIT };
    let uses = (0..2).map(|job| Use { job, bursts: vec![burst] }).collect();
    let link = Shared { capacity_bps: 10 * GBIT, uses };
    let found = shifts::plan(&[24 * ms; 2], &[link], &Limits::AMPLE).expect("shifts");
    let staggered = [0, 1].map(|job| Staggered { job, period_ns: 24 * ms, burst });
    for spans in interleave::measure(10 * GBIT, &staggered, &found, 12).expect("runs") {
        let median = |spans: &[Duration]| spans[spans.len() / 2].as_nanos();
        let alone = median(&spans.alone);
        assert!(median(&spans.shifted) * 100 <= alone * 105, "{spans:?}");
        assert!(median(&spans.together) * 100 >= alone * 120, "{spans:?}");
    }
}
