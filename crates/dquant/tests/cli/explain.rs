//! `dquant explain`: unmodified verbs programs on loopback, asked while they run.

use std::net::TcpListener;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{Folder, Ran};

/// An unmodified program of the distribution's.
const PROGRAM: &str = "ibv_rc_pingpong";

/// How long a program on a loaded machine may take until it is where a test wants it.
const PATIENCE: Duration = Duration::from_secs(60);

/// A program that ends with the test.
struct Running(Child);

impl Running {
    /// Plays ping-pong for ever, with whoever connects or with the server at `server`.
    fn pingpong(folder: &Folder, port: u16, server: &[&str]) -> Running {
        let port = port.to_string();
        let mut args = vec!["run", "--devices", "lo", "--", PROGRAM, "-d", "dq_lo", "-g", "0"];
        args.extend(["-n", "100000000", "-p", &port]);
        args.extend(server);
        let mut command = folder.command(&args);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        Running(command.spawn().expect("the program starts"))
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn is_installed(folder: &Folder) -> bool {
    let mut command = folder.command(&["run", "--", PROGRAM, "-h"]);
    let found = command.output().is_ok_and(|output| output.status.code() != Some(2));
    if !found {
        eprintln!("skipped: {PROGRAM} (Debian: ibverbs-utils) cannot be run here");
    }
    found
}

/// Asks until the first queue pair of the program is in `state`.
fn explained(folder: &Folder, program: &Running, state: &str) -> Value {
    let begun = Instant::now();
    loop {
        let ran = folder.run(&["explain", &program.pid(), "--json"]);
        if ran.exit == Some(0) && ran.json()["queue_pairs"][0]["state"] == state {
            return ran.json();
        }
        assert!(begun.elapsed() < PATIENCE, "not {state} yet: {ran:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has free ports");
    listener.local_addr().expect("it is bound").port()
}

#[test]
fn a_running_pair_is_explained_from_both_ends() {
    let folder = Folder::new("explain-pair");
    if !is_installed(&folder) {
        return;
    }
    let port = free_port();
    let server = Running::pingpong(&folder, port, &[]);
    let alone = explained(&folder, &server, "INIT");
    assert_eq!(alone["schema"], "dquant.explain/1");
    assert_eq!((&alone["program"], &alone["device"]), (&PROGRAM.into(), &"dq_lo".into()));
    assert!(alone["queue_pairs"][0]["peer"].is_null(), "{alone}");
    assert!(alone["queue_pairs"][0]["receives"].as_u64() > Some(0), "{alone}");

    let client = Running::pingpong(&folder, port, &["127.0.0.1"]);
    let theirs = explained(&folder, &client, "RTS")["queue_pairs"][0].clone();
    let ours = explained(&folder, &server, "RTS")["queue_pairs"][0].clone();
    assert_eq!((&ours["peer"]["qpn"], &theirs["peer"]["qpn"]), (&theirs["qpn"], &ours["qpn"]));
    assert_eq!(ours["peer"]["ip"], "127.0.0.1");
    assert_eq!(ours["transport"], "RC");
    assert!(ours["last_error"].is_null(), "{ours}");

    let listed = folder.run(&["explain", "--json"]).good().stdout;
    assert!(listed.lines().any(|line| line.contains(&format!("\"pid\":{}", server.pid()))));
    let number = ours["qpn"].to_string();
    let Ran { stdout: text, .. } = folder.run(&["explain", &server.pid(), "--qp", &number]).good();
    for words in ["path: UDP sockets", " RC: RTS, peer 127.0.0.1 qp 0x", "timers", "payload"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let other = folder.run(&["explain", &server.pid(), "--qp", "0x1"]);
    other.failed(2, "has no queue pair 0x1", "");
}

#[test]
fn whoever_is_no_verbs_program_is_not_explained() {
    let folder = Folder::new("explain-nobody");
    let own = std::process::id().to_string();
    let ran = folder.run(&["explain", &own]);
    ran.failed(2, "has no device open", "dquant explain");
}
