//! What is printed about a failure, while the processes are still there to be asked: the failure,
//! the states of target and DPU, the last lines of all logs, and what the verbs programs' libraries
//! explain.

use std::fmt::Display;

use super::ground::Ground;
use super::place::{Daemon, Place};

/// Lines of a log.
const LINES: usize = 12;

/// Lines of what a library explains.
const EXPLAINED: usize = 40;

/// Prints the first failure, unless the soak was only interrupted.
pub(super) fn print(ground: &Ground, place: Option<&Place>) {
    let failures = ground.failures();
    let Some(failure) = failures.first() else { return };
    println!("\nerror: {failure}");
    let daemons = place.iter().flat_map(|place| place.daemons());
    daemons.for_each(|daemon| print_daemon(ground, daemon));
    for process in ground.running() {
        let said = process.last_lines(LINES);
        if !said.is_empty() {
            println!("\n== {}, process {}: last lines", process.name, process.pid);
            indent(&said, LINES);
        }
        if process.name.starts_with("verbs")
            && let Ok(explained) = ground.ask(&["explain", &process.pid.to_string()])
        {
            println!("\n== {}, process {}, as its library explains", process.name, process.pid);
            indent(&explained, EXPLAINED);
        }
    }
}

/// The counters that are not zero.
fn print_daemon(ground: &Ground, daemon: &Daemon) {
    println!("\n== {}: status", daemon.name);
    match daemon.counters(ground) {
        Ok(counters) => {
            for (name, value) in counters.into_iter().filter(|(_, value)| *value > 0) {
                println!("    {name:<44}{value:>16}");
            }
        }
        Err(why) => println!("    {why}"),
    }
}

fn indent(text: impl Display, most: usize) {
    for line in text.to_string().lines().take(most) {
        println!("    {line}");
    }
}
