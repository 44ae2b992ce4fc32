//! Time of a placement in fat trees of 1,024 to 101,306 hosts, filled to 80 % of their slots; the
//! shortest of three runs of each.
//!
//! ```console
//! $ cargo run --release -p parfait --example placement_bench
//! $ cargo run --release -p parfait --example placement_bench -- 16 40 --iterations 300
//! ```

use std::time::Duration;

use parfait::demand::Abstraction;
use parfait::job::Job;
use parfait::ledger::Ledger;
use parfait::network::{Network, Routing};
use parfait::pattern::Pattern;
use parfait::placement::search::{Memory, place};
use parfait::placement::{Request, greedy};
use parfait::spread::Ecmp;
use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;
use topology::graph::Capacity;
use topology::shape::Shape;

const SLOTS: u32 = 8;
const MEASURED: u64 = 400;

fn main() {
    let (mut sizes, mut iterations) = (Vec::new(), 600);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let number = if word == "--iterations" { words.next() } else { Some(word.clone()) };
        let number = number.and_then(|number| number.parse().ok());
        match number {
            Some(number) if word == "--iterations" => iterations = number,
            Some(ports) => sizes.push(ports),
            None => panic!("usage: placement_bench [PORTS OF A SWITCH]… [--iterations N]"),
        }
    }
    if sizes.is_empty() {
        sizes = vec![16, 40, 74];
    }
    println!("| hosts | search p50 | p99 | max | Oktopus p50 | p99 | max | memory |");
    println!("|---|---|---|---|---|---|---|---|");
    for ports in sizes {
        measure(ports, iterations);
    }
}

/// A tree whose links between switches have a quarter of the rate of those to hosts.
fn network(ports: u32) -> Network {
    let topology = Shape::FatTree { ports }.build(Capacity::default()).expect("an even number");
    let reservable = |_, link: &topology::graph::Link| {
        let [a, b] = link.ends.map(|end| topology.node(end.node).kind());
        if a == b { link.capacity.rate_bps / 4 } else { link.capacity.rate_bps }
    };
    let network = Network::new(&topology, SLOTS, Routing::Ecmp(Ecmp::Even), reservable);
    network.expect("a tree")
}

/// Rings, meshes and tori of geometric sizes with mean 12.
fn pattern(random: &mut Pcg32) -> Pattern {
    let mut workers = 2;
    while !random.next_u32().is_multiple_of(11) {
        workers += 1;
    }
    let rate_bps = u64::from(1 + random.next_u32() % 20) * 1_000_000_000;
    match random.next_u32() % 4 {
        0 => Pattern::Mesh { workers, rate_bps: rate_bps / u64::from(workers - 1) },
        1 => {
            let columns = (workers / 4).max(2);
            let rows = workers.div_ceil(columns);
            Pattern::Torus { columns, rows, row_bps: rate_bps, column_bps: rate_bps }
        }
        _ => Pattern::Ring { workers, rate_bps },
    }
}

fn measure(ports: u32, iterations: u32) {
    let mut ledger = Ledger::new(network(ports));
    let hosts = ledger.network().hosts();
    let all_slots = u64::from(hosts) * u64::from(SLOTS);
    let mut random = Pcg32::new(7, u64::from(ports));
    let mut memory = Memory::new();
    let mut id = 0;
    // Oversized, then thinned out, so that free slots are scattered.
    let root = ledger.network().groups().root();
    while ledger.free_slots(root) > all_slots / 20 {
        let request = request(&pattern(&mut random), Abstraction::Parfait);
        if let Ok(placement) = greedy::first_fit(&mut ledger, &request) {
            let demand = request.demand(placement.order);
            let admitted = ledger.admit(id, demand, 1, request.abstraction(), &placement.pieces);
            admitted.expect("it was found");
        }
        id += 1;
    }
    while ledger.free_slots(root) < all_slots / 5 {
        let _ = ledger.release(u64::from(random.next_u32()) % id);
    }
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for number in 0..MEASURED {
        let pattern = pattern(&mut random);
        let parfait = request(&pattern, Abstraction::Parfait);
        let hose = request(&pattern, Abstraction::Hose);
        let found = timed(&mut ours, || place(&ledger, &parfait, &mut memory, number, iterations));
        let _ = timed(&mut theirs, || greedy::oktopus(&mut ledger, &hose));
        // Keeps the load where it is.
        if let Ok(placement) = found {
            let demand = parfait.demand(placement.order);
            let admitted = ledger.admit(id, demand, 1, Abstraction::Parfait, &placement.pieces);
            admitted.expect("it was found");
            id += 1;
        }
        while ledger.free_slots(root) < all_slots / 5 {
            let _ = ledger.release(u64::from(random.next_u32()) % id);
        }
    }
    let columns = [&mut ours, &mut theirs].map(|times| {
        times.sort_unstable();
        let at = |part: usize| times[times.len() * part / 100].as_secs_f64() * 1e3;
        let max = times.last().expect("some").as_secs_f64() * 1e3;
        format!("{:.2} ms | {:.2} ms | {max:.2} ms", at(50), at(99))
    });
    println!("| {hosts} | {} | {} |", columns.join(" | "), peak_memory());
}

fn request(pattern: &Pattern, abstraction: Abstraction) -> Request {
    Request::new(&Job::new(*pattern), abstraction).expect("small")
}

/// Adds the shortest of three times: on a busy machine the others measure who else ran.
#[expect(clippy::disallowed_methods, clippy::disallowed_types, reason = "measures time")]
fn timed<T>(times: &mut Vec<Duration>, mut work: impl FnMut() -> T) -> T {
    let mut once = || {
        let start = std::time::Instant::now();
        let result = work();
        (start.elapsed(), result)
    };
    let (first, result) = once();
    times.push(first.min(once().0).min(once().0));
    result
}

/// The most memory that the process had so far, topology included.
fn peak_memory() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.map_or_else(|| "unknown".to_string(), |kib| format!("{} MiB", kib / 1024))
}
