//! The largest fabric that LIDs can address: 500 leaves with 96 hosts and 32 links up, 125 spines;
//! 48,625 LIDs.
//!
//! ```console
//! $ cargo nextest run --release -p subnet --test scale --run-ignored all --no-capture
//! ```

#![expect(clippy::disallowed_types, reason = "it measures")]

mod agents;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use agents::Agents;
use subnet::mad::PortState;
use subnet::manager::event::{Event, Summary};
use subnet::manager::{Config, Datagram, Manager, Peer};
use topology::graph::{Capacity, Kind, Topology};
use topology::routes::Engine;

const LEAVES: usize = 500;
const SPINES: usize = 125;
const HOSTS: usize = 96;
const UP: usize = 32;

fn topology() -> Topology {
    let mut topology = Topology::new();
    let mut add = |kind, name: String, ports| topology.add(kind, &name, ports).expect("new");
    let spines: Vec<_> =
        (0..SPINES).map(|at| add(Kind::Switch, format!("spine{at}"), 128)).collect();
    let leaves: Vec<_> =
        (0..LEAVES).map(|at| add(Kind::Switch, format!("leaf{at}"), 128)).collect();
    let hosts: Vec<_> =
        (0..LEAVES * HOSTS).map(|at| add(Kind::Host, format!("host{at}"), 1)).collect();
    for (at, host) in hosts.into_iter().enumerate() {
        topology.join(host, leaves[at / HOSTS], Capacity::default()).expect("free");
    }
    for at in 0..LEAVES * UP {
        topology.join(leaves[at / UP], spines[at % SPINES], Capacity::default()).expect("free");
    }
    topology
}

struct Run {
    agents: Agents,
    manager: Manager,
    now: Duration,
    /// In the manager, without the agents.
    own: Duration,
    requests: u64,
}

impl Run {
    #[expect(clippy::disallowed_methods, reason = "it measures")]
    fn call<T>(&mut self, with: impl FnOnce(&mut Manager, Duration) -> T) -> T {
        let began = Instant::now();
        let result = with(&mut self.manager, self.now);
        self.own += began.elapsed();
        result
    }

    /// Until a fabric is set up.
    fn until_set_up(&mut self) -> Summary {
        loop {
            while let Some(event) = self.manager.poll_event() {
                match event {
                    Event::SetUp(summary) => return summary,
                    Event::Kept(trouble) => panic!("{trouble:?}"),
                    other => println!("{other}"),
                }
            }
            let batch: Vec<Datagram> = self
                .call(|manager, now| std::iter::from_fn(|| manager.poll_transmit(now)).collect());
            let work = self.call(|manager, _| manager.poll_work());
            if let Some(work) = work {
                self.call(|manager, now| manager.handle_work(now, work.run()));
            } else if batch.is_empty() {
                self.now =
                    self.manager.poll_timeout().expect("something to wait for").max(self.now);
                self.call(Manager::handle_timeout);
            }
            self.requests += batch.len() as u64;
            let responses: Vec<_> =
                batch.iter().filter_map(|datagram| self.agents.response(&datagram.mad)).collect();
            self.call(|manager, now| {
                responses.iter().for_each(|mad| manager.handle_datagram(now, Peer::Directed, mad));
            });
        }
    }
}

/// Most memory of the process so far, in MiB.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    kib.unwrap_or(0_u64) / 1_024
}

fn set_up(engine: Engine) {
    let agents = Agents::of_topology(topology());
    println!("{} MiB before the manager", peak());
    let manager = Manager::new(Config { engine, ..Config::default() }, BTreeMap::new(), 1);
    let (now, own, requests) = (Duration::ZERO, Duration::ZERO, 0);
    let mut run = Run { agents, manager, now, own, requests };
    let first = run.until_set_up();
    println!("{engine}: {first}");
    println!(
        "{} datagrams, {:.1} s in the manager, {} MiB at most with the agents",
        run.requests,
        run.own.as_secs_f64(),
        peak()
    );
    assert_eq!((first.lids, first.switches), (48_625, 625));
    assert!(run.own < Duration::from_secs(60), "{:?}", run.own);
    // A dead link.
    let link = run.agents.topology.links().map(|(id, _)| id).last().expect("links");
    let link = run.agents.topology.remove(link).expect("it is there");
    run.agents.set_ports(link.ends, PortState::Down);
    (run.own, run.requests) = (Duration::ZERO, 0);
    let mended = run.until_set_up();
    println!("{engine}: {mended}; {} datagrams, {:.2} s", run.requests, run.own.as_secs_f64());
}

#[test]
#[ignore = "it takes a minute and a gigabyte or two"]
fn the_largest_fabric_by_balanced() {
    set_up(Engine::Balanced);
}

#[test]
#[ignore = "it takes a minute and a gigabyte or two"]
fn the_largest_fabric_by_up_down() {
    set_up(Engine::UpDown);
}
