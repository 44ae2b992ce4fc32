//! A storage target and a DPU, which live for one round or for the whole soak.
//!
//! They follow the thread that starts them: it is the main one, so the kernel ends them with the
//! soak whatever happens to it.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{ChildStdout, Stdio};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::draw::{Disturbance, Path};
use super::ground::Ground;
use super::locks::lock;
use super::process::{End, Process};
use super::pulse::Daemons;

/// A daemon reports that it is ready, or ends when it is asked to, within this time.
const PATIENCE: Duration = Duration::from_secs(30);

/// Without streams, daemons have given everything back after this time.
const SETTLES: Duration = Duration::from_secs(10);

/// How often somebody who waits looks again.
const LOOK: Duration = Duration::from_millis(20);

/// Counters that are zero when nobody uses a daemon.
const ZERO: [&str; 4] =
    ["target.sessions", "dpu.streams", "neighbours.queue_pairs", "neighbours.awaited_ranges"];

/// One daemon.
#[derive(Debug)]
pub(super) struct Daemon {
    pub(super) name: String,
    args: Vec<String>,
    path: Path,
    pub(super) control: String,
    running: Mutex<Option<Running>>,
    kills: AtomicU64,
}

#[derive(Debug)]
struct Running {
    process: Arc<Process>,
    // A daemon that reports to a closed pipe would end.
    _out: BufReader<ChildStdout>,
}

impl Daemon {
    fn start(&self, ground: &Ground) -> Result<(), String> {
        let args: Vec<&str> = self.args.iter().map(String::as_str).collect();
        let mut command = ground.dquant(&args);
        command.env("DQUANT_PATH", self.path.setting());
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let process = ground.spawn(&self.name, command)?;
        let out = process.stdout().ok_or("it has no standard output")?;
        let (send, receive) = mpsc::channel();
        thread::spawn(move || {
            let (mut out, mut line) = (BufReader::new(out), String::new());
            let _ = out.read_line(&mut line);
            // Whoever waits may have given up.
            let _ = send.send((out, line));
        });
        let ready = receive.recv_timeout(PATIENCE);
        match ready {
            Ok((out, line)) if line.contains("\"ready\"") => {
                *lock(&self.running) = Some(Running { process, _out: out });
                Ok(())
            }
            _ => Err(format!("{} did not start: {}", self.name, process.last_lines(5))),
        }
    }

    pub(super) fn process(&self) -> Option<Arc<Process>> {
        lock(&self.running).as_ref().map(|running| Arc::clone(&running.process))
    }

    /// How often it was killed.
    pub(super) fn kills(&self) -> u64 {
        self.kills.load(Ordering::SeqCst)
    }

    /// # Errors
    /// When it has ended by itself.
    fn check(&self) -> Result<(), String> {
        let process = self.process().ok_or_else(|| format!("{} does not run", self.name))?;
        match process.end() {
            None => Ok(()),
            Some(end) => Err(format!("{} has ended: {end}: {}", self.name, process.last_lines(8))),
        }
    }

    pub(super) fn counters(&self, ground: &Ground) -> Result<BTreeMap<String, u64>, String> {
        let text = ground.ask(&["status", "--json", "--control", &self.control])?;
        let report: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        let counters = report["counters"].as_object().ok_or("a status without counters")?;
        let number = |(name, value): (&String, &Value)| Some((name.clone(), value.as_u64()?));
        Ok(counters.iter().filter_map(number).collect())
    }

    /// Asks it to end.
    fn terminate(&self) -> Result<(), String> {
        self.check()?;
        let Some(process) = self.process() else { return Ok(()) };
        process.signal("TERM")?;
        match process.wait(PATIENCE) {
            Some(End::Code(0)) => Ok(()),
            Some(end) => Err(format!("{} ended with {end} when it was asked to end", self.name)),
            None => Err(format!("{} does not end when it is asked to", self.name)),
        }
    }
}

/// Both, and how they are reached.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) path: Path,
    pub(super) target: Daemon,
    pub(super) dpu: Daemon,
    pub(super) socket: PathBuf,
    /// How many of them are killed or stopped at this moment.
    away: AtomicU32,
}

impl Place {
    /// Starts both.
    ///
    /// # Errors
    /// When one does not start.
    pub(super) fn start(ground: &Ground, path: Path) -> Result<Arc<Place>, String> {
        let (target_ip, dpu_ip) = (ground.fresh_address(), ground.fresh_address());
        let socket = ground.fresh("dpu.sock");
        let daemon = |name: &str, ip, port: u16, args: &[&str]| {
            let control = format!("{ip}:{port}");
            let roce = format!("{ip}:4791");
            let common = ["--json", "--die-with-parent", "--roce", &roce, "--control", &control];
            let args = args.iter().chain(&common).map(|arg| (*arg).to_owned()).collect();
            let name = format!("{name} ({})", path.name());
            let (running, kills) = (Mutex::default(), AtomicU64::new(0));
            Daemon { name, args, path, control, running, kills }
        };
        let (root, listens_at) = (ground.root(), socket.clone());
        let (root, listens_at) = (root.to_string_lossy(), listens_at.to_string_lossy());
        let target = daemon("the target", target_ip, 4790, &["serve", "--root", &root]);
        let dpu = ["dpu", "--memory", "512MiB", "--socket", &listens_at];
        let dpu = daemon("the DPU", dpu_ip, 4792, &dpu);
        let place = Place { path, target, dpu, socket, away: AtomicU32::new(0) };
        place.target.start(ground)?;
        place.dpu.start(ground)?;
        Ok(Arc::new(place))
    }

    pub(super) fn daemons(&self) -> [&Daemon; 2] {
        [&self.target, &self.dpu]
    }

    /// # Errors
    /// When one has ended by itself.
    pub(super) fn check(&self) -> Result<(), String> {
        self.daemons().into_iter().try_for_each(Daemon::check)
    }

    /// Takes one of them away for a while.
    ///
    /// # Errors
    /// When it has ended by itself, or does not start again.
    pub(super) fn disturb(&self, ground: &Ground, what: &Disturbance) -> Result<(), String> {
        self.check()?;
        let daemon = if what.is_dpu { &self.dpu } else { &self.target };
        let Some(process) = daemon.process() else { return Ok(()) };
        self.away.fetch_add(1, Ordering::SeqCst);
        if what.is_stop {
            process.signal("STOP")?;
            pause(ground, what.away);
            process.signal("CONT")?;
        } else {
            daemon.kills.fetch_add(1, Ordering::SeqCst);
            process.kill();
            process.wait(PATIENCE);
            pause(ground, what.away);
            daemon.start(ground)?;
        }
        self.away.fetch_sub(1, Ordering::SeqCst);
        lock(&ground.tally).disturbed(what);
        Ok(())
    }

    /// Waits until both have given back what streams have used.
    ///
    /// # Errors
    /// Names what they hold after [`SETTLES`].
    pub(super) fn settle(&self, ground: &Ground) -> Result<(), String> {
        let begun = Instant::now();
        loop {
            self.check()?;
            let held = self.held(ground)?;
            if held.is_empty() {
                return Ok(());
            }
            if begun.elapsed() > SETTLES {
                return Err(format!("not given back after all streams: {}", held.join(", ")));
            }
            thread::sleep(10 * LOOK);
        }
    }

    fn held(&self, ground: &Ground) -> Result<Vec<String>, String> {
        let mut held = Vec::new();
        for daemon in self.daemons() {
            let counters = daemon.counters(ground)?;
            let get = |name: &str| counters.get(name).copied();
            for name in ZERO {
                if let Some(count @ 1..) = get(name) {
                    held.push(format!("{}: {name} {count}", daemon.name));
                }
            }
            let buffers = (get("target.free_staging_buffers"), get("target.staging_buffers"));
            if let (Some(free), Some(all)) = buffers
                && free != all
            {
                held.push(format!("{}: {free} of {all} staging buffers free", daemon.name));
            }
            lock(&ground.tally).rescued(&daemon.name, &counters);
        }
        Ok(held)
    }

    /// Asks both to end.
    ///
    /// # Errors
    /// When one does not, or not well, or leaves its socket.
    pub(super) fn terminate(&self) -> Result<(), String> {
        self.dpu.terminate()?;
        self.target.terminate()?;
        match self.socket.exists() {
            true => Err(format!("the DPU has left {}", self.socket.display())),
            false => Ok(()),
        }
    }
}

impl Daemons for Place {
    fn is_away(&self) -> bool {
        self.away.load(Ordering::SeqCst) > 0
    }

    fn pids(&self) -> Vec<u32> {
        let processes = self.daemons().into_iter().filter_map(Daemon::process);
        processes.map(|process| process.pid).collect()
    }
}

/// Sleeps, but not longer than the soak.
pub(super) fn pause(ground: &Ground, time: Duration) {
    let begun = Instant::now();
    while begun.elapsed() < time && !ground.is_over() {
        thread::sleep(LOOK.min(time));
    }
}
