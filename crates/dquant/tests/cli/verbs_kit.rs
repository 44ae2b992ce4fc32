//! Unmodified verbs programs of the distribution, on loopback, as processes of a test.

use std::io::PipeWriter;
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::{Folder, Ran, skip};

/// Plays ping-pong over a reliable connection.
pub(super) const PINGPONG: &str = "ibv_rc_pingpong";

/// How long a program on a loaded machine may take until it is where a test needs it.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// How often a condition is checked.
const LOOK: Duration = Duration::from_millis(20);

/// Whether verbs programs can be run at all; if not, adds a line to the log of skips.
pub(super) fn has_verbs(folder: &Folder, test: &str) -> bool {
    let ran = folder.run(&["run", "--", PINGPONG, "-h"]);
    let has = ran.exit != Some(2);
    if !has {
        let why = ran.stderr.lines().next().unwrap_or("it says nothing");
        skip::note(test, &format!("{PINGPONG} (Debian: ibverbs-utils) on libibverbs.so: {why}"));
    }
    has
}

/// More messages than any test waits for.
pub(super) const FOR_EVER: &str = "100000000";

/// A port of the programs' own, to exchange numbers.
pub(super) struct Meeting(String);

impl Meeting {
    pub(super) fn new() -> Meeting {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has free ports");
        Meeting(listener.local_addr().expect("it is bound").port().to_string())
    }

    /// Waits until the server listens: a client that comes before ends at once.
    pub(super) fn wait_for_server(&self) {
        let port: u16 = self.0.parse().expect("made from a port");
        let listener = format!(":{port:04X}");
        let listens = |line: &str| {
            let mut fields = line.split_whitespace().skip(1);
            let (local, state) = (fields.next(), fields.nth(1));
            local.is_some_and(|local| local.ends_with(&listener)) && state == Some("0A")
        };
        eventually("a server that listens", || {
            let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(std::fs::read_to_string);
            let has_it = tables.iter().flatten().any(|table| table.lines().any(listens));
            has_it.then_some(())
        });
    }

    /// The command of one player; without `server` it is the server.
    pub(super) fn player(
        &self,
        folder: &Folder,
        options: &[&str],
        count: &str,
        server: Option<&str>,
    ) -> Command {
        let run = [&["run", "--devices", "lo"], options, &["--", PINGPONG]].concat();
        let mut command = folder.command(&run);
        command.args(["-d", "dq_lo", "-g", "0", "-n", count, "-p", &self.0]).args(server);
        // As packets, which have round trips and can be lost.
        command.env("DQUANT_PATH", "udp").stdout(Stdio::null()).stderr(Stdio::null());
        command
    }
}

/// A program that ends with the test.
pub(super) struct Running(Child);

impl Running {
    pub(super) fn start(mut command: Command) -> Running {
        Running(command.spawn().expect("the program starts"))
    }

    /// Plays for ever.
    pub(super) fn player(folder: &Folder, at: &Meeting, server: Option<&str>) -> Running {
        Running::start(at.player(folder, &[], FOR_EVER, server))
    }

    /// Plays for ever, and stays alive after a failure: it blocks on its error message.
    pub(super) fn silenced(folder: &Folder, at: &Meeting, full: &PipeWriter) -> Running {
        let mut command = at.player(folder, &[], FOR_EVER, None);
        command.stderr(full.try_clone().expect("a descriptor is free"));
        Running::start(command)
    }

    pub(super) fn pid(&self) -> String {
        self.0.id().to_string()
    }

    pub(super) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).expect("it runs");
    }

    /// `kill -9`, at once.
    pub(super) fn kill(mut self) {
        self.0.kill().expect("it runs");
        self.0.wait().expect("it ends");
    }

    /// Whether it has ended; nobody has waited for it yet.
    fn has_ended(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid()));
        stat.is_ok_and(|stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z')))
    }

    /// Waits for the end.
    pub(super) fn finish(mut self) -> ExitStatus {
        eventually("the end of a program", || self.0.try_wait().expect("it is our child"))
    }

    /// Queries it until its first queue pair is in `state`.
    pub(super) fn explained(&self, folder: &Folder, state: &str) -> Value {
        eventually(state, || {
            // Another process may have taken its port meanwhile.
            assert!(!self.has_ended(), "the program has ended before it was in {state}");
            let ran = folder.run(&["explain", &self.pid(), "--json"]);
            let is_there = ran.exit == Some(0) && ran.json()["queue_pairs"][0]["state"] == state;
            is_there.then(|| ran.json())
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Fails when it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until `look` returns something.
#[track_caller]
pub(super) fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begun.elapsed() < PATIENCE, "in vain: {what}");
        std::thread::sleep(LOOK);
    }
}

/// One line of the list for each program that can be queried.
pub(super) fn listed(ran: &Ran) -> Vec<u64> {
    let objects = ran.stdout.lines().map(|line| serde_json::from_str(line).expect("JSON"));
    objects.map(|object: Value| object["pid"].as_u64().expect("a number")).collect()
}
