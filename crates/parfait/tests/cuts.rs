//! Cut demands in closed form against the demand graph: every cut of small jobs, and maximum flow.

use parfait::demand::{Abstraction, Cut, Demand, Order};
use parfait::pattern::Pattern;
use parfait::runs::Run;

/// Patterns of at most 12 workers, at sizes where their corners lie, with rates that cannot be
/// mistaken for each other.
fn small() -> Vec<Pattern> {
    let mut texts: Vec<String> = Vec::new();
    for n in 1..=12 {
        let chains = ["ring", "tree", "mesh", "pipeline"];
        texts.extend(chains.map(|name| format!("{name}:{n}@7")));
        texts.extend((1..n).flat_map(|servers| {
            ["ps", "async-ps"].map(|name| format!("{name}:{}+{servers}@3", n - servers))
        }));
    }
    for (x, y) in (1..=12_u32).flat_map(|x| (1..=12 / x).map(move |y| (x, y))) {
        texts.push(format!("torus:{x}x{y}@5,11"));
        texts.push(format!("hierarchical:{x}x{y}@3,13"));
        texts.push(format!("hierarchical:{x}x{y}@13,3"));
        texts.extend((1..=12 / (x * y)).map(|z| format!("parallel:{x}x{y}x{z}@17,29,5")));
    }
    texts.iter().map(|text| text.parse().expect(text)).collect()
}

/// The pattern's demand in each of its orders.
fn demands(pattern: &Pattern) -> Vec<Demand> {
    let orders = Order::of(pattern).iter();
    orders.map(|order| Demand::in_order(pattern, *order).expect("small")).collect()
}

/// The ranks of a set of bits, as runs.
fn runs_of(bits: u32) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for rank in (0..32).filter(|rank| bits >> rank & 1 == 1) {
        match runs.last_mut() {
            Some(run) if run.end == rank => run.end += 1,
            _ => runs.push(Run::new(rank, rank + 1)),
        }
    }
    runs
}

/// By the edges, one by one.
fn by_sum(graphs: &[Vec<(u32, u32, u64)>], bits: u32) -> Cut {
    let is_in = |rank: &u32| bits >> rank & 1 == 1;
    let sum = |edges: &[(u32, u32, u64)], from_inside: bool| -> u64 {
        let across =
            edges.iter().filter(|(a, b, _)| is_in(a) == from_inside && is_in(b) != from_inside);
        across.map(|(.., rate)| rate).sum()
    };
    graphs.iter().fold(Cut::default(), |most, edges| {
        most.max(Cut { out_bps: sum(edges, true), in_bps: sum(edges, false) })
    })
}

#[test]
fn every_cut_is_that_of_the_demand_graph() {
    let mut cuts = 0_u64;
    for pattern in small() {
        for demand in demands(&pattern) {
            let graphs: Vec<_> = (0..demand.phases()).map(|phase| demand.graph(phase)).collect();
            for bits in 0..1 << demand.workers() {
                assert_eq!(demand.cut(&runs_of(bits)), by_sum(&graphs, bits), "{pattern} {bits:b}");
                cuts += 1;
            }
        }
    }
    assert!(cuts > 300_000, "{cuts} cuts");
}

#[test]
fn on_every_cut_parfait_needs_at_most_what_tag_needs_and_tag_what_a_hose_needs() {
    for pattern in small() {
        for demand in demands(&pattern) {
            for bits in 0..1 << demand.workers() {
                let runs = runs_of(bits);
                let [parfait, tag, hose] =
                    Abstraction::ALL.map(|abstraction| demand.reservation(abstraction, &runs));
                assert_eq!(parfait.max(tag), tag, "{pattern} {bits:b}");
                assert_eq!(tag.max(hose), hose, "{pattern} {bits:b}");
            }
        }
    }
}

/// A placement names places of an order; whoever starts the workers needs their ranks.
#[test]
fn the_demand_in_another_order_is_that_of_the_ranks_at_its_places() {
    for pattern in small() {
        let by_rank = Demand::of(&pattern).expect("small");
        for order in Order::of(&pattern) {
            let demand = Demand::in_order(&pattern, *order).expect("small");
            for phase in 0..demand.phases() {
                let rank = |place| order.rank(&pattern, place);
                let moved =
                    demand.graph(phase).into_iter().map(|(a, b, bps)| (rank(a), rank(b), bps));
                let mut moved: Vec<_> = moved.collect();
                let mut edges = by_rank.graph(phase);
                moved.sort_unstable();
                edges.sort_unstable();
                assert_eq!(moved, edges, "{pattern} {order:?}");
            }
        }
    }
}

/// A hose that is wider than any worker's own traffic would make the comparison too easy.
#[test]
fn some_worker_of_every_component_fills_its_hose() {
    for pattern in small() {
        let demand = Demand::of(&pattern).expect("small");
        let needs = (0..demand.workers()).map(|rank| {
            let alone = demand.reservation(Abstraction::Hose, &[Run::new(rank, rank + 1)]);
            (alone.out_bps, demand.cut(&[Run::new(rank, rank + 1)]))
        });
        let needs: Vec<(u64, Cut)> = needs.collect();
        let most = needs.iter().map(|(_, cut)| cut.out_bps.max(cut.in_bps)).max().expect("workers");
        let widest = needs.iter().map(|(hose, _)| *hose).max().expect("workers");
        assert_eq!(most, widest, "{pattern}");
    }
}

/// The most that can flow from the workers of one side to those of the other, by shortest
/// augmenting paths.
fn max_flow(edges: &[(u32, u32, u64)], bits: u32, workers: u32) -> u64 {
    let size = workers as usize + 2;
    let (source, sink) = (size - 2, size - 1);
    let mut room = vec![vec![0_u64; size]; size];
    for (from, to, rate) in edges {
        room[*from as usize][*to as usize] += rate;
    }
    for rank in 0..workers as usize {
        let (from, to) = if bits >> rank & 1 == 1 { (source, rank) } else { (rank, sink) };
        room[from][to] = u64::MAX / 4;
    }
    let mut flow = 0;
    loop {
        let mut before = vec![None; size];
        let mut queue = std::collections::VecDeque::from([source]);
        while let Some(at) = queue.pop_front() {
            for next in (0..size).filter(|next| *next != source && room[at][*next] > 0) {
                if before[next].is_none() {
                    before[next] = Some(at);
                    queue.push_back(next);
                }
            }
        }
        let path: Vec<(usize, usize)> =
            std::iter::successors(before[sink].map(|at| (at, sink)), |(at, _)| {
                before[*at].map(|earlier| (earlier, *at))
            })
            .collect();
        let Some(least) = path.iter().map(|(a, b)| room[*a][*b]).min() else {
            return flow;
        };
        for (a, b) in path {
            room[a][b] -= least;
            room[b][a] += least;
        }
        flow += least;
    }
}

#[test]
fn every_cut_is_the_maximum_flow_between_its_sides() {
    for pattern in small().into_iter().filter(|pattern| pattern.workers().is_ok_and(|n| n <= 8)) {
        let demand = Demand::of(&pattern).expect("small");
        let graphs: Vec<_> = (0..demand.phases()).map(|phase| demand.graph(phase)).collect();
        // The empty side and the whole one have nothing to send.
        for bits in 1..(1_u32 << demand.workers()) - 1 {
            let most = |bits: u32| {
                let flows = graphs.iter().map(|edges| max_flow(edges, bits, demand.workers()));
                flows.max().expect("phases")
            };
            let others = !bits & ((1 << demand.workers()) - 1);
            let cut = Cut { out_bps: most(bits), in_bps: most(others) };
            assert_eq!(demand.cut(&runs_of(bits)), cut, "{pattern} {bits:b}");
        }
    }
}

#[test]
fn sums_that_exceed_64_bits_are_refused() {
    let overflow = |text: &str| {
        let pattern: Pattern = text.parse().expect(text);
        Demand::of(&pattern).expect_err(text).to_string()
    };
    let texts = [
        "mesh:1048576@1T",
        "ring:1048576@18000000000000000000",
        "tree:4@10000000000000000000",
        "ps:1000000+48576@18G",
        "hierarchical:1x1048576@18000000000000,1",
        "parallel:2x2x2@10000000T,1,10000000T",
    ];
    for text in texts {
        let error = overflow(text);
        assert!(error.ends_with("add up to more than 2^64 bit/s"), "{text}: {error}");
    }
    assert!(Demand::of(&"ring:1048576@1T".parse().expect("a pattern")).is_ok());
}
