//! Two targets, one that reads through the page cache and one past it, and a DPU, on loopback
//! addresses of this process.

use std::io::{BufRead, BufReader};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::shell::Failure;

/// The daemons of a run; they end with it.
#[derive(Debug)]
pub(super) struct Daemons {
    targets: Vec<(&'static str, Daemon)>,
    dpu: Daemon,
    socket: PathBuf,
}

/// Shared by the daemons and their trainers, all of this run.
pub(super) const TOKEN: &str = "peers-of-one-run";

impl Daemons {
    /// Starts them over the folder of the corpora.
    ///
    /// # Errors
    /// When one does not start.
    pub(super) fn start(program: &Path, root: &Path) -> Result<Daemons, Failure> {
        // Short, because the path of a socket may have 107 bytes.
        let socket = std::env::temp_dir().join(format!("dquant-peers-{}.sock", std::process::id()));
        let target = |io: &'static str, number: u8| {
            let mut serve = Command::new(program);
            serve.args(["serve", "--io", io, "--root"]).arg(root);
            Ok::<_, Failure>((io, Daemon::start(serve, number)?))
        };
        let targets = vec![target("buffered", 1)?, target("direct", 2)?];
        let mut dpu = Command::new(program);
        dpu.args(["dpu", "--socket"]).arg(&socket);
        Ok(Daemons { targets, dpu: Daemon::start(dpu, 3)?, socket })
    }

    /// The arguments of a case that uses the target that reads like this.
    pub(super) fn arguments(&self, io: &str) -> Option<[String; 4]> {
        let (_, target) = self.targets.iter().find(|(name, _)| *name == io)?;
        let control = target.ready["control"].as_str()?.to_owned();
        let pids = format!("{},{}", target.child.id(), self.dpu.child.id());
        Some([control, self.socket.display().to_string(), address(4), pids])
    }
}

#[derive(Debug)]
struct Daemon {
    child: Child,
    ready: Value,
    // Kept open: a daemon that reports to a closed pipe would end.
    _out: BufReader<std::process::ChildStdout>,
}

impl Daemon {
    fn start(mut command: Command, number: u8) -> Result<Daemon, Failure> {
        command.args(["--json", "--quiet", "--die-with-parent", "--roce", &address(number)]);
        command.args(["--control", "127.0.0.1:0"]).env("DQUANT_TOKEN", TOKEN);
        let failed = |why: &str| Failure::usage(format!("a daemon did not start: {why}"));
        let spawned = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut child = spawned.map_err(|error| failed(&error.to_string()))?;
        let mut out = BufReader::new(child.stdout.take().ok_or_else(|| failed("no output"))?);
        let mut line = String::new();
        let read = out.read_line(&mut line).ok();
        match read.and_then(|_| serde_json::from_str(&line).ok()) {
            Some(ready) => Ok(Daemon { child, ready, _out: out }),
            None => {
                let _ = child.kill();
                let _ = child.wait();
                Err(failed("see its output above"))
            }
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Daemons {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// A loopback address that no other process uses.
fn address(number: u8) -> String {
    let [_, _, high, low] = std::process::id().to_be_bytes();
    format!("{}:4791", Ipv4Addr::new(127, 100 + high % 100, low, number))
}
