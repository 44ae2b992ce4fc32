//! What all parts of a soak share: its folder and programs, its processes, and the first failure.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use super::locks::lock;
use super::prepare::Programs;
use super::process::{End, Process};
use super::pulse::Pulse;
use super::tally::Tally;

/// Shared by the daemons and readers of a soak.
const TOKEN: &str = "the-token-of-a-soak";

/// How long a question to a daemon or a program may take.
const ANSWER: Duration = Duration::from_secs(5);

/// Shared by all threads.
#[derive(Debug)]
pub(super) struct Ground {
    pub(super) folder: PathBuf,
    pub(super) programs: Programs,
    pub(super) tally: Mutex<Tally>,
    pub(super) pulses: Mutex<Vec<Arc<Pulse>>>,
    processes: Mutex<Vec<Weak<Process>>>,
    failures: Mutex<Vec<String>>,
    is_over: AtomicBool,
    was_interrupted: AtomicBool,
    count: AtomicU32,
    /// Of the round.
    seed: AtomicU64,
}

impl Ground {
    pub(super) fn new(folder: &Path, programs: Programs) -> Ground {
        Ground {
            folder: folder.to_owned(),
            programs,
            tally: Mutex::default(),
            pulses: Mutex::default(),
            processes: Mutex::default(),
            failures: Mutex::default(),
            is_over: AtomicBool::new(false),
            was_interrupted: AtomicBool::new(false),
            count: AtomicU32::new(0),
            seed: AtomicU64::new(0),
        }
    }

    pub(super) fn begin_round(&self, seed: u64) {
        self.seed.store(seed, Ordering::Relaxed);
    }

    /// The seed of the last round that has begun.
    pub(super) fn seed(&self) -> u64 {
        self.seed.load(Ordering::Relaxed)
    }

    /// The exported folder.
    pub(super) fn root(&self) -> PathBuf {
        self.folder.join("root")
    }

    /// A path that nobody has had.
    pub(super) fn fresh(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{}-{name}", self.count.fetch_add(1, Ordering::Relaxed)))
    }

    /// A loopback address that no other process of this machine uses, and no other of this soak in
    /// the last 60,000.
    pub(super) fn fresh_address(&self) -> Ipv4Addr {
        let count = self.count.fetch_add(1, Ordering::Relaxed);
        let [high, low] = ((count % 60_000) as u16 + 1_000).to_be_bytes();
        // 127.0 and 127.1 are what people and other programs use.
        Ipv4Addr::new(127, 2 + (std::process::id() % 250) as u8, high, low)
    }

    /// `dquant` with these arguments and the soak's settings, and without the user's.
    pub(super) fn dquant(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.programs.dquant);
        command.args(args).current_dir(&self.folder).env("DQUANT_TOKEN", TOKEN);
        command.env("XDG_RUNTIME_DIR", self.folder.join("run")).env("TMPDIR", &self.folder);
        for name in ["DQUANT_DPU", "DQUANT_DEVICES", "DQUANT_SYSFS", "DQUANT_CAPTURE"] {
            command.env_remove(name);
        }
        command
    }

    /// Starts a process, which ends with the soak.
    ///
    /// # Errors
    /// When it cannot be started, or the soak is over.
    pub(super) fn spawn(&self, name: &str, command: Command) -> Result<Arc<Process>, String> {
        let process = Arc::new(Process::start(name, command, &self.fresh("err"))?);
        {
            let mut processes = lock(&self.processes);
            processes.retain(|process| process.strong_count() > 0);
            processes.push(Arc::downgrade(&process));
        }
        // Whoever ends all processes may have done so already.
        match self.is_over() {
            true => Err("the soak is over".to_owned()),
            false => Ok(process),
        }
    }

    /// Runs `dquant` to its end, for its answer. Works also when the soak is over, to learn why.
    pub(super) fn ask(&self, args: &[&str]) -> Result<String, String> {
        let out = self.fresh("answer");
        let mut command = self.dquant(args);
        command.stdout(fs::File::create(&out).map_err(|error| error.to_string())?);
        let name = args.join(" ");
        let process = Process::start(&name, command, &self.fresh("err"))?;
        let end = process.wait(ANSWER);
        let text = fs::read_to_string(&out).unwrap_or_default();
        let said = process.last_lines(2);
        let _ = fs::remove_file(&out);
        match end {
            Some(End::Code(0)) => Ok(text),
            Some(end) => Err(format!("dquant {name}: {end}: {said}")),
            None => Err(format!("dquant {name}: no answer for {} s", ANSWER.as_secs())),
        }
    }

    /// Reports a failure and ends the soak. What fails afterwards may be a consequence, so only the
    /// first is kept.
    pub(super) fn fail(&self, what: impl Into<String>) {
        let mut failures = lock(&self.failures);
        if !self.is_over() {
            failures.push(what.into());
        }
        self.is_over.store(true, Ordering::SeqCst);
    }

    pub(super) fn failures(&self) -> Vec<String> {
        lock(&self.failures).clone()
    }

    /// The outer process has ended.
    pub(super) fn interrupt(&self) {
        self.was_interrupted.store(!self.is_over.swap(true, Ordering::SeqCst), Ordering::SeqCst);
    }

    pub(super) fn was_interrupted(&self) -> bool {
        self.was_interrupted.load(Ordering::SeqCst)
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    /// The processes that have not been dropped.
    pub(super) fn running(&self) -> Vec<Arc<Process>> {
        lock(&self.processes).iter().filter_map(Weak::upgrade).collect()
    }

    /// Ends every process that is left.
    pub(super) fn kill_all(&self) {
        self.running().iter().for_each(|process| process.kill());
    }

    /// Something whose progress is watched from now on.
    pub(super) fn watch(&self, pulse: Pulse) -> Arc<Pulse> {
        let pulse = Arc::new(pulse);
        lock(&self.pulses).push(Arc::clone(&pulse));
        pulse
    }
}
