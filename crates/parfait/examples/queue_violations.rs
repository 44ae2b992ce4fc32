//! How often a guarantee is violated, by scheme and number of queues: the table of
//! docs/parfait-queues.md. What a run did besides goes to stderr.
//!
//! `cargo run --release -p parfait --example queue_violations [SEEDS [WINDOWS [UNITS]]]`

#[path = "../tests/port/mod.rs"]
#[expect(dead_code, reason = "tests use all of it")]
mod port;
#[path = "../tests/port/scenario.rs"]
mod scenario;

use parfait::queues::Scheme;
use scenario::Outcome;

fn main() {
    let mut numbers = std::env::args().skip(1).map(|text| text.parse().expect("a number"));
    let seeds: u64 = numbers.next().unwrap_or(20);
    let windows: u64 = numbers.next().unwrap_or(100);
    let units = numbers.next().unwrap_or(100) as u32;
    println!("| tenants | scheme | Q = 2 | 4 | 7 | 8 | moves per second | reordered packets |");
    println!("|---|---|---|---|---|---|---|---|");
    for (name, backlogged, flows) in [
        ("12 backlogged, 1 flow each", 12, 1),
        ("6 backlogged, 6 bursty, 1 flow each", 6, 1),
        ("2 backlogged, 10 bursty, 1 flow each", 2, 1),
        ("6 backlogged, 6 bursty, 1 to 4 flows", 6, 4),
    ] {
        for scheme in
            [Scheme::Hash, Scheme::Contended, Scheme::Levels, Scheme::Matched, Scheme::Paced]
        {
            let mut row = format!("| {name} | {scheme:?} |");
            let (mut moves, mut reordered) = (Vec::new(), 0);
            for queues in [2, 4, 7, 8] {
                let port = scenario::port(queues, units);
                let outcomes: Vec<Outcome> = (0..seeds)
                    .map(|seed| {
                        let guarantees = scenario::guarantees(&port, flows, seed);
                        let model = scenario::model(port, &guarantees, backlogged, seed);
                        scenario::run(scheme, &guarantees, model, port, windows)
                    })
                    .collect();
                let sum = |of: fn(&Outcome) -> u64| outcomes.iter().map(of).sum::<u64>();
                let share = sum(|o| o.below) as f64 / sum(|o| o.sending) as f64;
                row += &format!(" {:.2} % |", 100.0 * share);
                let run_s = (seeds * windows) as f64 * port::WINDOW_NS as f64 / 1e9;
                moves.push(format!("{:.1}", sum(|o| o.moves) as f64 / run_s));
                reordered += sum(|o| o.reordered);
                let drain = outcomes.iter().map(|o| o.longest_drain).fold(0.0, f64::max);
                let idle = sum(|o| o.idle_ps) as f64 / (run_s * 1e12);
                let refused = sum(|o| o.refused);
                eprintln!(
                    "{name}, {scheme:?}, {queues} queues: {refused} plans refused, drains up to {drain:.2} of their bound, \
                     idle {:.2} %",
                    100.0 * idle
                );
            }
            println!("{row} {} | {reordered} |", moves.join(", "));
        }
    }
}
