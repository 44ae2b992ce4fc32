//! Processor time that a brain takes to decide on a large job, and effort of the search, which is
//! what bounds it.
//!
//! ```console
//! $ cargo run --release -p parfait --example large_jobs
//! $ cargo run --release -p parfait --example large_jobs -- fat-tree:40 hierarchical:8x8000@1M,1M ring:100000@1M
//! ```

use parfait::brain::place_job;
use parfait::demand::Abstraction;
use parfait::job::Job;
use parfait::log::{Book, Change, Entry, Label};
use parfait::placement::search::Memory;
use parfait::site::{Ground, Site};
use parfait::spread::Ecmp;
use topology::graph::Capacity;
use topology::shape::Shape;

const ITERATIONS: u32 = 600;

const JOBS: &[(&str, &[&str])] = &[
    (
        "fat-tree:40",
        &[
            "ring:1000@1M",
            "ring:16000@1M",
            "ring:64000@1M",
            "ring:120000@1M",
            "hierarchical:8x8000@1M,1M",
            "torus:200x320@1M,1M",
            "mesh:16000@1k",
            "parallel:8x400x20@1M,1M,1M",
            "ring:64000@1T",
        ],
    ),
    (
        "torus:16x16:4",
        &["ring:500@1M", "ring:4000@1M", "mesh:2000@1k", "torus:40x100@1M,1M", "mesh:8000@1k"],
    ),
    ("torus:20x20:10", &["ring:16000@1M", "ring:24000@1M"]),
];

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    println!("| topology | job | empty ms | beside others ms | effort | refused |");
    println!("|---|---|---|---|---|---|");
    match words.split_first() {
        Some((topology, jobs)) => {
            measure(topology, &jobs.iter().map(String::as_str).collect::<Vec<_>>());
        }
        None => JOBS.iter().for_each(|(topology, jobs)| measure(topology, jobs)),
    }
}

fn measure(topology: &str, jobs: &[&str]) {
    let shape: Shape = topology.parse().expect("a shape");
    let built = shape.build(Capacity::default()).expect("a topology");
    let site = Site { topology: built, slots: 8, ecmp: Ecmp::Even, reservable_ppm: 950_000 };
    let ground = Ground::new(site).expect("connected");
    let mut memory = Memory::new();
    for text in jobs {
        let job: Job = text.parse().expect("a job");
        let mut book = Book::new(ground.clone());
        let before = memory.effort();
        let (first_ms, refused) = decide(&mut book, &mut memory, &job, "first");
        let effort = memory.effort() - before;
        // Free slots and links differ from group to group.
        let small: Job = "ring:13@1G".parse().expect("a job");
        for number in 0..50 {
            let _ = decide(&mut book, &mut memory, &small, &format!("small{number}"));
            if book.ledger().free_slots(book.ledger().network().groups().root()) < 64 {
                break;
            }
        }
        let (second_ms, _) = decide(&mut book, &mut memory, &job, "second");
        println!(
            "| {topology} | `{text}` | {first_ms:.1} | {second_ms:.1} | {effort} | {} |",
            refused.unwrap_or_default()
        );
    }
}

/// Places a job and admits it, as a brain does; how long that took, and why it was refused.
fn decide(book: &mut Book, memory: &mut Memory, job: &Job, name: &str) -> (f64, Option<String>) {
    let begun_ms = processor_ms();
    let label = Label { name: name.to_string(), owner: String::new() };
    let placed = place_job(book, Abstraction::Parfait, ITERATIONS, memory, label, job.clone());
    let refused = match placed {
        Ok(held) => {
            let entry = Entry { client: 0, sequence: 0, change: Change::Admit(held) };
            let applied = book.apply(book.term(), &entry);
            let took_ms = processor_ms() - begun_ms;
            if let (Ok(parfait::log::Outcome::Admitted(number)), "first") = (&applied, name) {
                let change = Change::Release { job: *number, restored: Vec::new() };
                let entry = Entry { client: 0, sequence: 0, change };
                book.apply(book.term(), &entry).expect("it is there");
            }
            return (took_ms, applied.err().map(|error| error.to_string()));
        }
        Err(reason) => reason,
    };
    (processor_ms() - begun_ms, Some(refused.to_string()))
}

/// Processor time of this thread: on a busy machine the clock measures who else ran.
fn processor_ms() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanos = text.split(' ').next().and_then(|nanos| nanos.parse::<u64>().ok());
    nanos.unwrap_or(0) as f64 / 1e6
}
