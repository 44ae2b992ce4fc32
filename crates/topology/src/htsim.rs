//! Topologies as files of csg-htsim: `.topo`, which its programs take with `-topo`.
//!
//! Such a file has no links. It says how many ports, at which rate, the switches of each of two or
//! three tiers have, and htsim builds the one network that follows. So [`write()`] first finds the
//! tiers of a topology, and then whether htsim would build just it:
//!
//! - hosts have one link, and all switches with hosts, tier 0, have as many;
//! - a tier-0 switch has the same number of links, its *bundle*, to each switch of tier 1 in its
//!   pod, and no others upwards;
//! - with two tiers everything is one pod; with three, the tier-1 switches of a pod have a place
//!   each, and a switch of tier 2 has a bundle of links to one place, the same in every pod;
//! - links of a tier are alike, their rates whole Gbit/s and their delays not 0;
//! - oversubscription is a whole number, and the one of a tier-0 switch's ports, rounded down, is
//!   that of its rates.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;

use thiserror::Error;

use crate::graph::{Capacity, NodeId, Topology};

/// Why htsim could not build a topology from a file.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum HtsimError {
    /// A host has several links, or none.
    #[error("host '{host}' has {links} links; csg-htsim's have one")]
    HostLinks {
        /// The host.
        host: String,
        /// How many.
        links: usize,
    },
    /// A link joins what is not in neighbouring tiers.
    #[error(
        "'{a}' and '{b}' are joined: csg-htsim joins hosts, and two or three tiers of switches above them, each with the next"
    )]
    Tiers {
        /// One end.
        a: String,
        /// The other.
        b: String,
    },
    /// Switches are in one tier only, or in more than three.
    #[error("the switches are in {0} tiers; csg-htsim has two or three")]
    TierCount(usize),
    /// Switches of one tier differ.
    #[error("'{a}' and '{b}' are in one tier and differ in their {what}; csg-htsim's do not")]
    Differ {
        /// One.
        a: String,
        /// The other.
        b: String,
        /// In what.
        what: &'static str,
    },
    /// A switch is joined with some of those that it should be joined with, or more often with
    /// some.
    #[error(
        "'{switch}' is joined unevenly with the tier {side}; csg-htsim joins it with each switch there alike"
    )]
    Uneven {
        /// Which one.
        switch: String,
        /// "above" or "below".
        side: &'static str,
    },
    /// Links of one tier differ.
    #[error("links above tier {tier} differ in rate or delay; csg-htsim has one value for a tier")]
    Links {
        /// The tier below them; hosts are below tier 0.
        tier: &'static str,
    },
    /// A rate or a delay has no place in the file.
    #[error(
        "a link has {rate_bps} bit/s and {delay_ns} ns; csg-htsim takes whole Gbit/s, and no delay of 0"
    )]
    Capacity {
        /// Bits per second.
        rate_bps: u64,
        /// Nanoseconds.
        delay_ns: u64,
    },
    /// The capacities down and up are in no whole proportion, or in another one than the ports.
    #[error(
        "switches of tier {tier} have {down} links down and {up} up: csg-htsim takes only a whole number of times as much down as up, in ports as in rates"
    )]
    Oversubscription {
        /// The tier.
        tier: usize,
        /// Links down.
        down: usize,
        /// Links up.
        up: usize,
    },
    /// A switch has more ports than htsim's.
    #[error("'{switch}' has {ports} links; csg-htsim's switches have up to {most} in tier {tier}")]
    Ports {
        /// Which one.
        switch: String,
        /// How many.
        ports: usize,
        /// At most.
        most: usize,
        /// Its tier.
        tier: usize,
    },
}

/// Ports of htsim's switches, by tier.
const MOST_PORTS: [usize; 3] = [96, 64, 64];

/// The file, and the hosts in the order in which htsim numbers them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Htsim {
    /// What a `.topo` file holds.
    pub text: String,
    /// Host `n` of htsim.
    pub hosts: Vec<NodeId>,
}

/// A tier as the file has it.
#[derive(Clone, Copy, Debug)]
struct Tier {
    down: usize,
    up: usize,
    /// Links to each switch below.
    bundle: usize,
    /// Of the links down.
    capacity: Capacity,
    oversubscribed: u64,
}

/// Writes a topology for htsim.
///
/// # Errors
/// With what the format has no words for.
pub fn write(topology: &Topology) -> Result<Htsim, HtsimError> {
    let levels = Levels::of(topology)?;
    let pods = levels.pods()?;
    let tiers = levels.tiers(&pods)?;
    let hosts: Vec<NodeId> = pods.iter().flat_map(|pod| levels.hosts_of(pod)).collect();
    let per_pod = hosts.len() / pods.len();
    let mut text =
        format!("# {topology}\nNodes {}\nTiers {}\nPodsize {per_pod}\n", hosts.len(), tiers.len());
    for (number, tier) in tiers.iter().enumerate() {
        let Tier { down, up, bundle, capacity, oversubscribed } = tier;
        text += &format!("\nTier {number}\n");
        text += &format!("Downlink_speed_Gbps {}\n", capacity.rate_bps / GBIT);
        text += &format!("Radix_Down {down}\n");
        if number + 1 < tiers.len() {
            text += &format!("Radix_Up {up}\nOversubscribed {oversubscribed}\n");
        }
        text += &format!("Downlink_Latency_ns {}\nSwitch_Latency_ns 0\n", capacity.delay_ns);
        if number > 0 {
            text += &format!("Bundle {bundle}\n");
        }
    }
    Ok(Htsim { text, hosts })
}

const GBIT: u64 = 1_000_000_000;

/// The switches by their distance from hosts.
struct Levels<'a> {
    topology: &'a Topology,
    /// By node: its level, hosts 0, tier 0 1.
    level: Vec<usize>,
    switches: Vec<Vec<NodeId>>,
}

/// Tier-0 and tier-1 switches that belong together.
struct Pod {
    lower: Vec<NodeId>,
    upper: Vec<NodeId>,
}

impl<'a> Levels<'a> {
    fn of(topology: &'a Topology) -> Result<Levels<'a>, HtsimError> {
        let mut level = vec![usize::MAX; topology.nodes().len()];
        let mut next: Vec<NodeId> = topology.hosts().collect();
        for &host in &next {
            level[host.index()] = 0;
            let links = topology.node(host).links().count();
            if links != 1 {
                return Err(HtsimError::HostLinks { host: name(topology, host), links });
            }
        }
        let mut switches = Vec::new();
        while !next.is_empty() {
            let above =
                next.iter().flat_map(|&id| topology.neighbours(id)).map(|(_, end)| end.node);
            let mut above: Vec<NodeId> =
                above.filter(|id| level[id.index()] == usize::MAX).collect();
            above.sort_unstable();
            above.dedup();
            above.iter().for_each(|id| level[id.index()] = switches.len() + 1);
            next.clone_from(&above);
            switches.extend((!above.is_empty()).then_some(above));
        }
        for (_, link) in topology.links() {
            let [a, b] = link.ends.map(|end| end.node);
            let is_step = level[a.index()].abs_diff(level[b.index()]) == 1;
            if !is_step {
                let [a, b] = [a, b].map(|id| name(topology, id));
                return Err(HtsimError::Tiers { a, b });
            }
        }
        match switches.len() {
            2 | 3 => Ok(Levels { topology, level, switches }),
            count => Err(HtsimError::TierCount(count)),
        }
    }

    /// The neighbours of a node one level up (or down), and the number of links to each.
    fn beside(&self, id: NodeId, is_up: bool) -> BTreeMap<NodeId, usize> {
        let mut beside = BTreeMap::new();
        for (_, end) in self.topology.neighbours(id) {
            if (self.level[end.node.index()] > self.level[id.index()]) == is_up {
                *beside.entry(end.node).or_default() += 1;
            }
        }
        beside
    }

    fn hosts_of(&self, pod: &Pod) -> Vec<NodeId> {
        pod.lower.iter().flat_map(|&switch| self.beside(switch, false).into_keys()).collect()
    }

    /// The pods, and whether htsim would join their switches as they are joined.
    fn pods(&self) -> Result<Vec<Pod>, HtsimError> {
        let mut is_taken = vec![false; self.topology.nodes().len()];
        let mut pods = Vec::new();
        for &first in &self.switches[0] {
            if is_taken[first.index()] {
                continue;
            }
            let upper: Vec<NodeId> = self.beside(first, true).into_keys().collect();
            let lower = upper.first().map_or(Vec::new(), |&upper| {
                self.beside(upper, false).into_keys().collect::<Vec<NodeId>>()
            });
            self.check_joined(&lower, &upper)?;
            lower.iter().for_each(|id| is_taken[id.index()] = true);
            pods.push(Pod { lower, upper });
        }
        if self.switches.len() == 2 && pods.len() > 1 {
            return Err(self.uneven(self.switches[0][0], "above"));
        }
        if self.switches.len() == 3 {
            self.check_places(&pods)?;
        }
        Ok(pods)
    }

    /// Each lower switch has the same number of links to each upper one, and neither has others.
    fn check_joined(&self, lower: &[NodeId], upper: &[NodeId]) -> Result<(), HtsimError> {
        for (from, to, is_up, side) in
            [(lower, upper, true, "above"), (upper, lower, false, "below")]
        {
            let mut bundle = None;
            for &switch in from {
                let beside = self.beside(switch, is_up);
                let same = |count: &usize| *bundle.get_or_insert(*count) == *count;
                if !beside.keys().eq(to) || !beside.values().all(same) {
                    return Err(self.uneven(switch, side));
                }
            }
        }
        Ok(())
    }

    /// The upper switches of pods can be put into places, so that a switch above has links to one
    /// place only, in every pod.
    fn check_places(&self, pods: &[Pod]) -> Result<(), HtsimError> {
        let pod_of: BTreeMap<NodeId, usize> = (pods.iter().enumerate())
            .flat_map(|(number, pod)| pod.upper.iter().map(move |&id| (id, number)))
            .collect();
        // The switches above a place are those above any of its switches.
        let mut places: BTreeMap<Vec<NodeId>, usize> = BTreeMap::new();
        for pod in pods {
            for &switch in &pod.upper {
                let above: Vec<NodeId> = self.beside(switch, true).into_keys().collect();
                *places.entry(above).or_default() += 1;
            }
        }
        let mut bundle = None;
        for &core in &self.switches[2] {
            let below = self.beside(core, false);
            let mut in_pods: Vec<usize> = below.keys().map(|id| pod_of[id]).collect();
            in_pods.sort_unstable();
            let same = |count: &usize| *bundle.get_or_insert(*count) == *count;
            if !in_pods.into_iter().eq(0..pods.len()) || !below.values().all(same) {
                return Err(self.uneven(core, "below"));
            }
        }
        let is_place = |&count: &usize| count == pods.len();
        match places.values().all(is_place) {
            true => Ok(()),
            false => Err(self.uneven(pods[0].upper[0], "above")),
        }
    }

    fn uneven(&self, switch: NodeId, side: &'static str) -> HtsimError {
        HtsimError::Uneven { switch: name(self.topology, switch), side }
    }

    /// What the file says of each tier.
    fn tiers(&self, pods: &[Pod]) -> Result<Vec<Tier>, HtsimError> {
        let mut tiers = Vec::new();
        for number in 0..self.switches.len() {
            let (down, up) = self.radix(number)?;
            let first = self.beside(self.switches[number][0], false);
            let bundle = first.values().next().copied().unwrap_or(1);
            let capacity = self.capacity(number)?;
            tiers.push(Tier { down, up, bundle, capacity, oversubscribed: 1 });
        }
        for number in 1..tiers.len() {
            let above = tiers[number].capacity.rate_bps;
            let Tier { down, up, capacity, .. } = tiers[number - 1];
            let (into, out) = (down as u64 * capacity.rate_bps, up as u64 * above);
            let whole = if into % out == 0 { into / out } else { 0 };
            let by_ports = number > 1 || (down / up) as u64 == whole;
            if whole == 0 || !by_ports {
                return Err(HtsimError::Oversubscription { tier: number - 1, down, up });
            }
            tiers[number - 1].oversubscribed = whole;
        }
        // Pods of different sizes have switches of different radix, unless there are more of them.
        let size = |pod: &Pod| (pod.lower.len(), pod.upper.len());
        match pods.iter().find(|pod| size(pod) != size(&pods[0])) {
            None => Ok(tiers),
            Some(other) => Err(HtsimError::Differ {
                a: name(self.topology, pods[0].lower[0]),
                b: name(self.topology, other.lower[0]),
                what: "pods",
            }),
        }
    }

    /// Links down and up of every switch of a tier.
    fn radix(&self, tier: usize) -> Result<(usize, usize), HtsimError> {
        let of = |switch: NodeId| {
            let links = |is_up| self.beside(switch, is_up).values().sum::<usize>();
            (links(false), links(true))
        };
        let first = self.switches[tier][0];
        let (down, up) = of(first);
        let named = |id| name(self.topology, id);
        for &switch in &self.switches[tier] {
            let what = match of(switch) {
                (other, _) if other != down => "links downwards",
                (_, other) if other != up => "links upwards",
                _ => continue,
            };
            return Err(HtsimError::Differ { a: named(first), b: named(switch), what });
        }
        let (ports, most) = (down + up, MOST_PORTS[tier]);
        if ports > most {
            return Err(HtsimError::Ports { switch: named(first), ports, most, tier });
        }
        Ok((down, up))
    }

    /// The capacity of all links below a tier.
    fn capacity(&self, tier: usize) -> Result<Capacity, HtsimError> {
        let is_below = |id: NodeId| self.level[id.index()] == tier;
        let links = self.topology.links().map(|(_, link)| link);
        let is_down = |id: NodeId| self.level[id.index()] == tier + 1;
        let mut below = links.filter(|link| {
            let [a, b] = link.ends.map(|end| end.node);
            is_below(a) && is_down(b) || is_below(b) && is_down(a)
        });
        let first = below.next().map_or(Capacity::default(), |link| link.capacity);
        if below.any(|link| link.capacity != first) {
            return Err(HtsimError::Links { tier: ["of the hosts", "0", "1"][tier] });
        }
        let Capacity { rate_bps, delay_ns } = first;
        match rate_bps % GBIT == 0 && delay_ns > 0 {
            true => Ok(first),
            false => Err(HtsimError::Capacity { rate_bps, delay_ns }),
        }
    }
}

fn name(topology: &Topology, id: NodeId) -> String {
    topology.node(id).name().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Kind;
    use crate::shape::Shape;

    fn built(rule: &str) -> Topology {
        let shape: Shape = rule.parse().expect(rule);
        shape.build(Capacity::default()).expect(rule)
    }

    #[test]
    fn leaves_and_spines_are_two_tiers() {
        let text = "# 32 hosts, 6 switches, 40 links\nNodes 32\nTiers 2\nPodsize 32\n\n\
            Tier 0\nDownlink_speed_Gbps 100\nRadix_Down 8\nRadix_Up 2\nOversubscribed 4\n\
            Downlink_Latency_ns 1000\nSwitch_Latency_ns 0\n\n\
            Tier 1\nDownlink_speed_Gbps 100\nRadix_Down 4\n\
            Downlink_Latency_ns 1000\nSwitch_Latency_ns 0\nBundle 1\n";
        assert_eq!(write(&built("leaf-spine:4x2x8")).expect("two tiers").text, text);
    }

    /// The values of a file by their tier, -1 for its head.
    fn values(text: &str) -> BTreeMap<(i32, String), u64> {
        let (mut tier, mut all) = (-1, BTreeMap::new());
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let (key, value) = line.split_once(' ').expect("a key and a value");
            let value: u64 = value.parse().expect("a number");
            match key {
                "Tier" => tier = value as i32,
                _ => assert_eq!(all.insert((tier, key.to_string()), value), None, "{key} twice"),
            }
        }
        all
    }

    /// Hosts, switches by tier and links of the network that htsim builds from a file, with the
    /// arithmetic that it does.
    fn rebuilt(text: &str) -> (u64, Vec<u64>, u64) {
        let values = values(text);
        let get = |tier, key: &str| values.get(&(tier, key.to_string())).copied();
        let [nodes, tiers, pod] =
            ["Nodes", "Tiers", "Podsize"].map(|key| get(-1, key).expect("a head"));
        let tier = |tier, key| get(tier, key).unwrap_or(1);
        assert!(nodes % pod == 0 && pod % tier(0, "Radix_Down") == 0);
        let pods = nodes / pod;
        let tors = pod / tier(0, "Radix_Down");
        let [speed0, speed1] = [0, 1].map(|number| tier(number, "Downlink_speed_Gbps"));
        assert_eq!(nodes * speed0 % (speed1 * tier(0, "Oversubscribed")), 0);
        let uplinks = nodes * speed0 / (speed1 * tier(0, "Oversubscribed"));
        assert_eq!(tier(0, "Radix_Down") / tier(0, "Radix_Up"), tier(0, "Oversubscribed"));
        assert_eq!(uplinks % (pods * tier(1, "Radix_Down")), 0);
        let aggs = uplinks / (pods * tier(1, "Radix_Down"));
        assert_eq!(aggs * tier(1, "Bundle"), tier(0, "Radix_Up"));
        if tiers == 2 {
            return (nodes, vec![tors, aggs], nodes + tors * aggs * tier(1, "Bundle"));
        }
        let speed2 = tier(2, "Downlink_speed_Gbps");
        assert_eq!(uplinks * speed1 % (speed2 * tier(1, "Oversubscribed")), 0);
        let agg_uplinks = uplinks * speed1 / (speed2 * tier(1, "Oversubscribed"));
        assert_eq!(agg_uplinks % tier(2, "Radix_Down"), 0);
        let cores = agg_uplinks / tier(2, "Radix_Down");
        assert!(cores % aggs == 0 && cores * tier(2, "Bundle") / aggs == tier(1, "Radix_Up"));
        let within = pods * tors * aggs * tier(1, "Bundle");
        let above = pods * aggs * tier(1, "Radix_Up");
        (nodes, vec![pods * tors, pods * aggs, cores], nodes + within + above)
    }

    #[test]
    fn htsim_builds_the_same_network() {
        for rule in ["fat-tree:4", "fat-tree:16", "leaf-spine:8x4x16", "leaf-spine:18x18x18"] {
            let topology = built(rule);
            let Htsim { text, hosts } = write(&topology).expect(rule);
            let (nodes, switches, links) = rebuilt(&text);
            let there =
                format!("{nodes} hosts, {} switches, {links} links", switches.iter().sum::<u64>());
            assert_eq!(topology.to_string(), there, "{rule}");
            // Shapes have their hosts in this order already.
            assert!(hosts.into_iter().eq(topology.hosts()), "{rule}");
        }
        let values = values(&write(&built("fat-tree:16")).expect("three tiers").text);
        // As in the file for 1,024 hosts that htsim ships.
        let of = |tier, key: &str| values[&(tier, key.to_string())];
        assert_eq!((of(-1, "Podsize"), of(0, "Radix_Down"), of(0, "Radix_Up")), (64, 8, 8));
        assert_eq!((of(1, "Radix_Down"), of(1, "Radix_Up"), of(2, "Radix_Down")), (8, 8, 16));
    }

    #[test]
    fn bundles_and_hosts_out_of_order_are_found() {
        let mut topology = Topology::new();
        let mut add = |kind, name: &str, ports| topology.add(kind, name, ports).expect("new");
        let spine = add(Kind::Switch, "spine", 4);
        let leaves = [add(Kind::Switch, "a", 4), add(Kind::Switch, "b", 4)];
        let hosts: Vec<NodeId> = (0..4).map(|n| add(Kind::Host, &format!("h{n}"), 1)).collect();
        let usual = Capacity::default();
        for (host, leaf) in hosts.iter().zip([1, 0, 1, 0]) {
            topology.join(*host, leaves[leaf], usual).expect("free");
        }
        for leaf in [0, 1, 0, 1] {
            topology.join(leaves[leaf], spine, usual).expect("free");
        }
        let Htsim { text, hosts: order } = write(&topology).expect("two tiers");
        assert_eq!(order, [1, 3, 0, 2].map(|at| hosts[at]));
        assert_eq!(rebuilt(&text), (4, vec![2, 1], 8));
        assert!(text.ends_with("Bundle 2\n"), "{text}");
    }

    #[test]
    fn what_the_format_has_no_words_for_is_refused() {
        let refused = |rule: &str, why: &str| {
            let error = write(&built(rule)).expect_err(rule).to_string();
            assert!(error.contains(why), "{rule}: {error}");
        };
        refused("rail:2x4x2x2", "host 'host0' has 2 links");
        refused("bcube:2x1", "host 'host0' has 2 links");
        refused("torus:3x3:2", "are joined: csg-htsim joins hosts");
        refused("dragonfly:4x2x2", "are joined");
        refused("random:8x4x2:1", "are joined");
        refused("vl2:4x4x4", "'int0' is joined unevenly with the tier below");
        refused("leaf-spine:4x4x2", "2 links down and 4 up");
        refused("leaf-spine:4x2x5", "5 links down and 2 up");
        refused("leaf-spine:4x1x100", "'leaf0' has 101 links");
        let star = built("leaf-spine:1x1x4");
        assert!(write(&star).is_ok(), "a leaf below a spine");
        let mut uneven = built("leaf-spine:4x2x2");
        let [first, last] = [uneven.links().next(), uneven.links().last()];
        let [first, last] = [first, last].map(|link| link.expect("a link").0);
        let mut no_host = uneven.clone();
        uneven.remove(first);
        assert!(matches!(write(&uneven), Err(HtsimError::Uneven { .. })), "{:?}", write(&uneven));
        no_host.remove(last);
        assert!(matches!(write(&no_host), Err(HtsimError::HostLinks { links: 0, .. })));
        let shape: Shape = "leaf-spine:2x2x2".parse().expect("a rule");
        let slow = shape.build(Capacity { rate_bps: 2_500_000_000, delay_ns: 10 }).expect("small");
        assert!(matches!(write(&slow), Err(HtsimError::Capacity { .. })));
        let short = shape.build(Capacity { rate_bps: GBIT, delay_ns: 0 }).expect("small");
        assert!(matches!(write(&short), Err(HtsimError::Capacity { .. })));
    }
}
