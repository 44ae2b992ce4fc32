//! What the figures were taken on: processor, kernel, memory, load, commit.
//!
//! Everything is read from the system; what it does not report is "unknown", never a failure.

use std::fmt;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::workspace::root;

/// The machine and the source.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    cores: usize,
    model: String,
    kernel: String,
    memory_mib: u64,
    /// The commit that was built, or the program that was given.
    source: String,
}

impl Machine {
    /// Queries the system; `binary` is a program that was not built here.
    pub(super) fn look(binary: Option<&Path>) -> Machine {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let model = field(&read("/proc/cpuinfo"), "model name");
        let memory = field(&read("/proc/meminfo"), "MemTotal");
        let kib = memory.and_then(|text| text.split(' ').next()?.parse::<u64>().ok());
        Machine {
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            model: model.unwrap_or_else(|| "unknown processor".to_owned()),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            memory_mib: kib.unwrap_or(0) >> 10,
            source: match binary {
                Some(path) => format!("binary {}", path.display()),
                None => format!("commit {}", commit()),
            },
        }
    }

    pub(super) fn to_json(&self) -> Value {
        json!({
            "cores": self.cores, "model": self.model, "kernel": self.kernel,
            "memory_mib": self.memory_mib, "source": self.source,
        })
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { cores, model, kernel, memory_mib, source } = self;
        write!(f, "{cores} cores of {model}, {memory_mib} MiB memory, Linux {kernel}, {source}")
    }
}

/// The one-minute load average.
pub(super) fn load() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(f64::NAN)
}

/// The first value of `name: value` lines.
fn field(text: &str, name: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_owned())
    })
}

/// The commit of the work tree, and whether it was changed since.
fn commit() -> String {
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).current_dir(root()).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_owned())
    };
    match git(&["rev-parse", "--short=12", "HEAD"]) {
        None => "unknown".to_owned(),
        Some(commit) => match git(&["status", "--porcelain"]) {
            Some(changes) if changes.is_empty() => commit,
            _ => format!("{commit} with changes"),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "model\t\t: 1\nmodel name\t: A CPU\nmodel name\t: A CPU\n";
        assert_eq!(field(text, "model name").as_deref(), Some("A CPU"));
        assert_eq!(field("MemTotal:  5 kB\n", "MemTotal").as_deref(), Some("5 kB"));
        assert_eq!(field(text, "stepping"), None);
    }
}
