//! What `cargo xtask counts` runs under callgrind: work requests in a loop, one thread, no sleep.
//!
//! `counts --list` prints the cases, `counts CASE` runs one and prints, for each phase, how often
//! it did its work: `send 12800 packet`. The instructions are in callgrind's profile, under the
//! names of [`phases`]. Keys, numbers and time come from constants, so two runs execute the same
//! instructions.
//!
//! | layer | what it holds |
//! |---|---|
//! | [`endpoint`] | the state machine alone: two endpoints exchange headers |
//! | [`fifo`] | two local peers: packets through shared memory, payload included; as `direct` requests and messages without packets |
//! | [`udp`] | two devices on UDP sockets of loopback, payload and checksums included |
#![expect(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

mod endpoint;
mod fifo;
mod load;
mod phases;
mod udp;

use std::process::ExitCode;

use controls::{CongestionControl, DelayParams};
use roce::endpoint::Reliability;

use load::{Load, Operation};
use phases::Tally;

/// One series of counts.
struct Case {
    layer: &'static str,
    load: Load,
}

impl Case {
    fn name(&self) -> String {
        format!("{}/{}", self.layer, self.load.name())
    }

    fn run(&self, tally: &mut Tally) {
        match self.layer {
            "endpoint" => load::run(&mut endpoint::Headers::new(), &self.load, tally),
            "fifo" => load::run(&mut fifo::Shared::new(false), &self.load, tally),
            "direct" => load::run(&mut fifo::Shared::new(true), &self.load, tally),
            _ => load::run(&mut udp::Sockets::new(), &self.load, tally),
        }
    }
}

/// Nothing controls congestion but the window.
const OFF: CongestionControl = CongestionControl::Off;

/// With go-back-N.
fn plain(operation: Operation, bytes: u32, burst: u32) -> Load {
    Load { operation, bytes, burst, reliability: Reliability::GoBackN, control: OFF }
}

/// Messages posted together, and then completed together.
const BURST: u32 = 16;

fn cases() -> Vec<Case> {
    use Operation::{Atomic, Read, Send, Write};
    let mut cases = Vec::new();
    for layer in ["endpoint", "udp"] {
        for reliability in [Reliability::GoBackN, Reliability::Selective] {
            for operation in [Send, Write, Read] {
                let load = Load { operation, bytes: 1 << 20, burst: 1, reliability, control: OFF };
                cases.push(Case { layer, load });
            }
        }
        for (operation, bytes) in [(Send, 8), (Send, 64), (Write, 8), (Write, 64), (Read, 64)] {
            for burst in [1, BURST] {
                cases.push(Case { layer, load: plain(operation, bytes, burst) });
            }
        }
    }
    // What acknowledgements cost under the control between our own endpoints.
    for (operation, bytes) in [(Write, 1 << 20), (Send, 64)] {
        let control = CongestionControl::Delay(DelayParams::DEFAULT);
        let load =
            Load { operation, bytes, burst: 1, reliability: Reliability::Selective, control };
        cases.push(Case { layer: "endpoint", load });
    }
    for (operation, burst) in [(Send, 1), (Send, BURST), (Atomic, 1)] {
        cases.push(Case { layer: "fifo", load: plain(operation, 8, burst) });
    }
    // Valgrind has no pidfd_open, so nothing is mapped here: the kernel copies, and atomics would
    // be packets.
    for (operation, burst) in [(Send, 1), (Send, BURST), (Write, 1), (Read, 1)] {
        cases.push(Case { layer: "direct", load: plain(operation, 8, burst) });
    }
    cases.push(Case { layer: "udp", load: plain(Atomic, 8, 1) });
    cases
}

fn main() -> ExitCode {
    // `cargo bench` adds a flag of its own.
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let cases = cases();
    match wanted.first().map(String::as_str) {
        Some("--list") | None => cases.iter().for_each(|case| println!("{}", case.name())),
        Some(name) => {
            let Some(case) = cases.iter().find(|case| case.name() == name) else {
                eprintln!("no case '{name}'; --list prints them");
                return ExitCode::from(2);
            };
            let mut tally = Tally::default();
            case.run(&mut tally);
            print!("{tally}");
        }
    }
    ExitCode::SUCCESS
}
