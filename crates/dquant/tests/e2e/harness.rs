//! Processes of a test: started on addresses of their own, awaited patiently but not for ever,
//! killed with the test.
//!
//! A [`World`] is a folder, a source of loopback addresses and the token. Its daemons are children
//! of the test, each in a process group of its own, and die with their [`Daemon`]; so does a
//! [`Cat`]. Nothing is found by name and nothing survives a test that fails.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use nic::driver::RESCUED;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit, test_kill_process_group,
};
use serde_json::Value;

/// No wait of any test is longer. Far above what a loaded machine needs, so that a test that runs
/// into it has found something that hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// How often a condition is checked.
const LOOK: Duration = Duration::from_millis(10);

/// The token of all daemons and clients.
pub(crate) const TOKEN: &str = "correct-horse-battery";

/// A loopback address that no other test and no other run of the tests uses.
pub(crate) fn fresh_ip() -> Ipv4Addr {
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    assert!(count < 1000, "the last bytes of an address count the addresses of a run");
    // 127.0 and 127.1 are what people and other programs use.
    let second = 2 + (high ^ middle) % 250;
    let third = low.wrapping_add(64 * (count / 250) as u8);
    Ipv4Addr::new(127, second, third, 1 + (count % 250) as u8)
}

/// Waits until `look` returns something.
#[track_caller]
pub(crate) fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(started.elapsed() < PATIENCE, "in vain: {what}");
        std::thread::sleep(LOOK);
    }
}

/// Why these tests cannot run here, if so.
fn obstacle() -> Option<&'static str> {
    static OBSTACLE: OnceLock<Option<String>> = OnceLock::new();
    let look = || {
        let ip = fresh_ip();
        let bound = std::net::UdpSocket::bind((ip, 0));
        let loopback = bound.err().map(|error| format!("cannot bind {ip}: {error}"));
        loopback.or_else(|| {
            let pool = nic::pool::Pool::new(1 << 20).err().map(|error| error.to_string());
            pool.or_else(|| host::disk::probe().err().map(|error| format!("no io_uring: {error}")))
        })
    };
    OBSTACLE.get_or_init(look).as_deref()
}

/// Folder and names of one test.
pub(crate) struct World {
    dir: PathBuf,
    sockets: PathBuf,
    /// The network namespace in which programs start, if not in that of the test.
    namespace: Mutex<Option<String>>,
    /// `DQUANT_PATH` of programs, if not that of the test.
    path: Mutex<Option<&'static str>>,
}

impl World {
    /// `None`, and a line in the log of skips, where the tests cannot run.
    pub(crate) fn new(test: &str) -> Option<World> {
        if let Some(reason) = obstacle() {
            crate::skip::note(&format!("e2e::{test}"), reason);
            return None;
        }
        let unique = format!("e2e-{}-{test}", std::process::id());
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(&unique);
        // Paths of sockets are at most 107 bytes long, and target folders may be deep.
        let sockets = std::env::temp_dir().join(format!("dquant-{unique}"));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(dir.join("root")).expect("the folder for tests is writable");
        fs::create_dir_all(&sockets).expect("the temporary folder is writable");
        Some(World { dir, sockets, namespace: Mutex::default(), path: Mutex::default() })
    }

    /// The exported folder.
    pub(crate) fn root(&self) -> PathBuf {
        self.dir.join("root")
    }

    /// A path in the exported folder.
    pub(crate) fn data(&self, name: &str) -> PathBuf {
        self.root().join(name)
    }

    /// A path beside the exported folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// A path in the folder of sockets.
    pub(crate) fn socket(&self, name: &str) -> PathBuf {
        self.sockets.join(name)
    }

    fn fresh_file(&self, name: &str) -> PathBuf {
        static FILES: AtomicU32 = AtomicU32::new(0);
        self.path(&format!("{}-{name}", FILES.fetch_add(1, Ordering::Relaxed)))
    }

    /// The program with these arguments and the token, without the user's own settings.
    pub(crate) fn program(&self, args: &[&str]) -> Command {
        let program = env!("CARGO_BIN_EXE_dquant");
        let mut command = match self.namespace.lock().expect("no panic").as_deref() {
            None => Command::new(program),
            Some(namespace) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace, program]);
                command
            }
        };
        command.args(args).current_dir(&self.dir).stdin(Stdio::null());
        command.env("DQUANT_TOKEN", TOKEN).env_remove("DQUANT_DPU");
        command.env("XDG_RUNTIME_DIR", &self.sockets);
        if let Some(path) = *self.path.lock().expect("no panic") {
            command.env("DQUANT_PATH", path);
        }
        command.env_remove("NO_COLOR").env_remove("CLICOLOR_FORCE");
        command
    }

    /// Programs that `work` starts run in this network namespace.
    pub(crate) fn within<R>(&self, namespace: &str, work: impl FnOnce() -> R) -> R {
        *self.namespace.lock().expect("no panic") = Some(namespace.to_owned());
        let done = work();
        *self.namespace.lock().expect("no panic") = None;
        done
    }

    /// Programs that start from now on use this path between processes of one machine.
    pub(crate) fn use_path(&self, path: &'static str) {
        *self.path.lock().expect("no panic") = Some(path);
    }

    /// [`World::program`], with a limit on its descriptors.
    pub(crate) fn limited(&self, args: &[&str], descriptors: u32) -> Command {
        let plain = self.program(args);
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -n {descriptors} && exec \"$0\" \"$@\"")]);
        command.arg(plain.get_program()).args(plain.get_args());
        command.current_dir(&self.dir).stdin(Stdio::null());
        for (name, value) in plain.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
    }

    /// [`World::program`] as another user with one group, in the folder of sockets: the tests run
    /// as root.
    pub(crate) fn program_of(&self, user: User, args: &[&str]) -> Command {
        let mut command = self.program(args);
        command.uid(user.uid).gid(user.gid).current_dir(&self.sockets);
        command
    }

    /// Gives the folder of sockets to a user. `false`, and a line in the log of skips, where this
    /// process cannot run the program as that user.
    pub(crate) fn is_home_of(&self, user: User, test: &str) -> bool {
        let probe = || {
            chown(&self.sockets, Some(user.uid), Some(user.gid))?;
            self.program_of(user, &["--version"]).output()
        };
        let why = match probe() {
            Ok(output) if output.status.success() => return true,
            Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
            Err(error) => error.to_string(),
        };
        crate::skip::note(&format!("e2e::{test}"), &format!("cannot run as another user: {why}"));
        false
    }

    /// Runs the program to its end.
    pub(crate) fn run(&self, args: &[&str]) -> Ran {
        Cat::start(self, self.program(args)).finish()
    }

    /// A storage target on an address of its own, unless `more` names a device.
    pub(crate) fn target(&self, more: &[&str]) -> Daemon {
        let (root, ip) = (self.root(), fresh_ip());
        let (roce, control) = (format!("{ip}:4791"), format!("{ip}:0"));
        let args = ["serve", "--json", "--root", path(&root), "--staging-buffers", "8"];
        Daemon::start(self, [&args[..], &addresses(&roce, &control, more), more].concat(), None)
    }

    /// A storage target with this limit of descriptors.
    pub(crate) fn target_with_descriptors(&self, limit: u32) -> Daemon {
        let mut target = self.target(&[]);
        target.limit = Some(limit);
        target.terminate();
        target.restart(self);
        target
    }

    /// A DPU on an address of its own, unless `more` names a device.
    pub(crate) fn dpu(&self, more: &[&str]) -> Daemon {
        self.start_dpu(None, more)
    }

    /// The same, as another user.
    pub(crate) fn dpu_of(&self, user: User, more: &[&str]) -> Daemon {
        self.start_dpu(Some(user), more)
    }

    fn start_dpu(&self, user: Option<User>, more: &[&str]) -> Daemon {
        let ip = fresh_ip();
        let socket = self.sockets.join(format!("{}.sock", ip.octets()[3]));
        let (roce, control) = (format!("{ip}:4791"), format!("{ip}:0"));
        let args = ["dpu", "--json", "--socket", path(&socket)];
        let args = [&args[..], &addresses(&roce, &control, more), more].concat();
        match user {
            Some(user) => Daemon::launch(self, self.program_of(user, &args), args, None),
            None => Daemon::start(self, args, None),
        }
    }
}

/// A user with one group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct User {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
        let _ = fs::remove_dir_all(&self.sockets);
    }
}

/// The addresses of a daemon, unless `more` says where it is reached.
fn addresses<'a>(roce: &'a str, control: &'a str, more: &[&str]) -> Vec<&'a str> {
    let mut args = Vec::new();
    if !more.contains(&"--control") {
        args.extend(["--control", control]);
    }
    if !more.contains(&"--device") && !more.contains(&"--roce") {
        args.extend(["--roce", roce]);
    }
    args
}

/// A path as an argument.
pub(crate) fn path(path: &Path) -> &str {
    path.to_str().expect("paths of tests are text")
}

/// A daemon that has reported that it is ready.
pub(crate) struct Daemon {
    child: Child,
    ready: Value,
    args: Vec<String>,
    /// Its limit of descriptors.
    limit: Option<u32>,
    err: PathBuf,
}

impl Daemon {
    fn start(world: &World, args: Vec<&str>, limit: Option<u32>) -> Daemon {
        let command = match limit {
            Some(limit) => world.limited(&args, limit),
            None => world.program(&args),
        };
        Daemon::launch(world, command, args, limit)
    }

    fn launch(world: &World, mut command: Command, args: Vec<&str>, limit: Option<u32>) -> Daemon {
        let err = world.fresh_file("daemon.err");
        // A group of its own shows whether it leaves a child behind.
        command.stdout(Stdio::piped()).process_group(0);
        command.stderr(File::create(&err).expect("the folder is writable"));
        let mut child = command.spawn().expect("the program starts");
        let stdout = child.stdout.take().expect("it is piped");
        let args = args.into_iter().map(str::to_owned).collect();
        let mut daemon = Daemon { child, ready: Value::Null, args, limit, err };
        daemon.ready = daemon.wait_until_ready(stdout);
        daemon
    }

    fn wait_until_ready(&self, stdout: ChildStdout) -> Value {
        let (send, receive) = mpsc::channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            let read = BufReader::new(stdout).read_line(&mut line);
            // The test may have given up.
            let _ = send.send(read.map(|_| line));
        });
        let line = receive.recv_timeout(PATIENCE).expect("a daemon says that it is ready");
        let line = line.expect("its output can be read");
        let ready: Value = serde_json::from_str(&line).unwrap_or_else(|error| {
            panic!("{:?}: {line:?}: {error}: {}", self.args, self.stderr())
        });
        assert_eq!(ready["event"], "ready");
        ready
    }

    /// Its standard error so far.
    pub(crate) fn stderr(&self) -> String {
        fs::read_to_string(&self.err).unwrap_or_default()
    }

    /// Its control address.
    pub(crate) fn control(&self) -> &str {
        self.ready["control"].as_str().expect("the line says where it serves")
    }

    /// Its RoCE address.
    pub(crate) fn roce(&self) -> SocketAddr {
        let roce = self.ready["roce"].as_str().expect("the line says where it serves");
        roce.parse().expect("an address")
    }

    /// The local socket of a DPU.
    pub(crate) fn socket(&self) -> &Path {
        Path::new(self.ready["socket"].as_str().expect("a DPU says where it listens"))
    }

    /// `dq://` and its control address, for a dataset.
    pub(crate) fn url(&self, name: &str) -> String {
        format!("dq://{}/{name}", self.control())
    }

    /// All its counters.
    pub(crate) fn status(&self, world: &World) -> Status {
        let ran = world.run(&["status", "--json", "--control", self.control()]).good();
        let report: Value = serde_json::from_slice(&ran.stdout).expect("one JSON object");
        for name in report["counters"].as_object().expect("counters by name").keys() {
            assert!(is_documented(name), "docs/status.md does not explain {name}");
        }
        assert_eq!(report["counters"]["engine.rescued_wakeups"], 0, "{report}");
        Status(report)
    }

    /// `kill -9`, at once.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("it runs");
        let _ = self.child.wait();
    }

    /// Sends it a signal.
    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(pid_of(&self.child), signal).expect("it runs");
    }

    /// How many mappings of pools it has, its own and those of others.
    pub(crate) fn mapped_pools(&self) -> usize {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.child.id()));
        maps.expect("it runs").lines().filter(|line| line.contains("memfd:dquant-pool")).count()
    }

    /// Asks it to end, and waits.
    pub(crate) fn terminate(&mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        wait(&mut self.child)
    }

    /// Whether a process of its group is left.
    pub(crate) fn left_children(&self) -> bool {
        test_kill_process_group(pid_of(&self.child)).is_ok()
    }

    /// Starts it once more, on the same addresses.
    pub(crate) fn restart(&mut self, world: &World) {
        let control = self.control().to_owned();
        let mut args: Vec<&str> = self.args.iter().map(String::as_str).collect();
        if let Some(at) = args.iter().position(|arg| *arg == "--control") {
            args[at + 1] = &control;
        }
        *self = Daemon::start(world, args, self.limit);
    }

    /// From now on it may open `more` further descriptors; without a number, as many as this
    /// process.
    pub(crate) fn limit_descriptors(&self, more: Option<u64>) {
        let limit = match more {
            Some(more) => {
                let open = |number: &u64| {
                    fs::exists(format!("/proc/{}/fd/{number}", self.child.id())).expect("it runs")
                };
                (0..).filter(|number| !open(number)).nth(more as usize)
            }
            None => getrlimit(Resource::Nofile).current,
        };
        let maximum = getrlimit(Resource::Nofile).maximum;
        let set = prlimit(
            Some(pid_of(&self.child)),
            Resource::Nofile,
            Rlimit { current: limit, maximum },
        );
        set.expect("it is our child");
    }

    /// Open descriptors: the first resource that a process leaks.
    pub(crate) fn descriptors(&self) -> usize {
        let entries = fs::read_dir(format!("/proc/{}/fd", self.child.id()));
        entries.expect("it runs").count()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Fails when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let said = self.stderr();
        if std::thread::panicking() {
            eprintln!("{:?} said:\n{said}", self.args);
        } else {
            assert!(!said.contains(RESCUED), "{:?}: {said}", self.args);
        }
    }
}

fn pid_of(child: &Child) -> Pid {
    Pid::from_child(child)
}

fn wait(child: &mut Child) -> ExitStatus {
    eventually("the end of a process", || child.try_wait().expect("it is our child"))
}

/// Output of `dquant status --json`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Status(pub(crate) Value);

impl Status {
    /// A counter by its name.
    #[track_caller]
    pub(crate) fn counter(&self, name: &str) -> u64 {
        let value = &self.0["counters"][name];
        value.as_u64().unwrap_or_else(|| panic!("no counter {name} in {}", self.0))
    }
}

/// A running command whose output the test reads at its own pace.
pub(crate) struct Cat {
    child: Child,
    stdout: Option<ChildStdout>,
    err: PathBuf,
}

impl Cat {
    /// Starts a command.
    pub(crate) fn start(world: &World, mut command: Command) -> Cat {
        let err = world.fresh_file("command.err");
        command.stdout(Stdio::piped());
        command.stderr(File::create(&err).expect("the folder is writable"));
        let mut child = command.spawn().expect("the program starts");
        let stdout = child.stdout.take();
        Cat { child, stdout, err }
    }

    /// Starts `dquant cat` through a DPU.
    pub(crate) fn through(world: &World, dpu: &Daemon, url: &str, args: &[&str]) -> Cat {
        let cat = ["cat", url, "--dpu", path(dpu.socket())];
        Cat::start(world, world.program(&[&cat, args].concat()))
    }

    /// Starts `dquant cat` without offload.
    pub(crate) fn alone(world: &World, url: &str, args: &[&str]) -> Cat {
        let roce = format!("{}:4791", fresh_ip());
        let cat = ["cat", url, "--offload", "false", "--roce", &roce];
        Cat::start(world, world.program(&[&cat, args].concat()))
    }

    /// Starts `dquant cat` on files of the exported folder, without daemons.
    pub(crate) fn local(world: &World, name: &str, args: &[&str]) -> Cat {
        let data = world.data(name);
        Cat::start(world, world.program(&[&["cat", path(&data)], args].concat()))
    }

    /// Reads exactly this many bytes: then the stream stalls as soon as the pipe is full.
    pub(crate) fn read(&mut self, bytes: usize) -> Vec<u8> {
        let mut data = vec![0; bytes];
        let mut filled = 0;
        while filled < bytes {
            match self.read_some(&mut data[filled..]) {
                0 => panic!("ended after {filled} of {bytes} bytes: {}", self.stderr()),
                more => filled += more,
            }
        }
        data
    }

    /// The available bytes, 0 at the end.
    pub(crate) fn read_some(&mut self, into: &mut [u8]) -> usize {
        let mut stdout = self.stdout.take().expect("open until it hangs up");
        let mut fds = [PollFd::from_borrowed_fd(stdout.as_fd(), PollFlags::IN)];
        let timeout = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
        let ready = poll(&mut fds, Some(&timeout)).expect("poll");
        assert!(ready > 0, "no byte for {PATIENCE:?}: {}", self.stderr());
        let read = stdout.read(into);
        self.stdout = Some(stdout);
        read.expect("a pipe can be read")
    }

    fn stderr(&self) -> String {
        fs::read_to_string(&self.err).unwrap_or_default()
    }

    /// `kill -9`, at once.
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("it runs");
        let _ = self.child.wait();
    }

    /// Asks it to end, and waits.
    pub(crate) fn terminate(self) -> Ran {
        kill_process(pid_of(&self.child), Signal::TERM).expect("it runs");
        self.finish()
    }

    /// Reads what is left and waits for the end.
    pub(crate) fn finish(mut self) -> Ran {
        let mut stdout = Vec::new();
        let mut chunk = vec![0; 64 << 10];
        loop {
            match self.read_some(&mut chunk) {
                0 => break,
                more => stdout.extend_from_slice(&chunk[..more]),
            }
        }
        self.end(stdout)
    }

    /// Closes the pipe, as `head` does, and waits for the end.
    pub(crate) fn hang_up(mut self) -> Ran {
        self.stdout = None;
        self.end(Vec::new())
    }

    fn end(&mut self, stdout: Vec<u8>) -> Ran {
        let exit = wait(&mut self.child).code();
        let stderr = self.stderr();
        assert!(!stderr.contains(RESCUED), "{stderr}");
        Ran { exit, stdout, stderr }
    }
}

impl Drop for Cat {
    fn drop(&mut self) {
        // Fails when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How a command ended.
pub(crate) struct Ran {
    pub(crate) exit: Option<i32>,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

impl Ran {
    #[track_caller]
    pub(crate) fn good(self) -> Ran {
        assert_eq!(self.exit, Some(0), "{}", self.stderr);
        self
    }

    /// Checks that it ended with this code, an error that contains all of `parts`, and a hint that
    /// contains `hint`. Notes that a type is a guess may come first.
    #[track_caller]
    pub(crate) fn failed(&self, exit: i32, parts: &[&str], hint: &str) {
        assert_eq!(self.exit, Some(exit), "{}", self.stderr);
        let lines = self.stderr.lines().skip_while(|line| line.contains(" is a guess: "));
        let said = lines.collect::<Vec<_>>().join("\n");
        let (error, hints) = said.split_once("\nhint: ").unwrap_or((&said, ""));
        assert!(error.starts_with("error: "), "{}", self.stderr);
        for part in parts {
            assert!(error.contains(part), "{part:?} is not in {}", self.stderr);
        }
        assert!(hints.contains(hint) && !hints.is_empty(), "no hint {hint:?} in {}", self.stderr);
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
    }
}

/// Whether docs/status.md has the counter in a row of a table: as `a.b.c`, or as `.c`, `.b.c` or
/// `c` where the row or the section's title begins the name.
fn is_documented(counter: &str) -> bool {
    // The document explains `longest_us` and says that `recent_us` is the same.
    let counter = &counter.replace("recent_us", "longest_us");
    let mut title = "";
    include_str!("../../../../docs/status.md").lines().any(|line| {
        if line.starts_with('#') {
            title = line;
        }
        let splits = || counter.match_indices('.').map(|(at, _)| counter.split_at(at));
        let is_short = |(stem, rest): (&str, &str)| {
            let begins = |text: &str| text.contains(&format!("`{stem}."));
            let ends =
                line.contains(&format!("`{rest}`")) || line.contains(&format!("`{}`", &rest[1..]));
            ends && (begins(line) || begins(title))
        };
        line.starts_with('|') && (line.contains(&format!("`{counter}`")) || splits().any(is_short))
    })
}
