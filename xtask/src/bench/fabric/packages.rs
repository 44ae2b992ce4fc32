//! Programs of other projects, and the Debian packages that have them.
//!
//! What is missing is installed where this user may do that; otherwise it is named, and its figures
//! are skipped.

use std::collections::BTreeMap;
use std::env;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Programs and their packages.
const PACKAGES: &[(&str, &str)] = &[
    ("ib_write_bw", "perftest"),
    ("ucx_perftest", "ucx-utils"),
    ("mpirun", "openmpi-bin"),
    ("mpicc", "libopenmpi-dev"),
    ("fi_pingpong", "libfabric-bin"),
    ("iperf3", "iperf3"),
    ("sockperf", "sockperf"),
    ("qperf", "qperf"),
    ("ip", "iproute2"),
    ("tc", "iproute2"),
    ("nft", "nftables"),
    ("ethtool", "ethtool"),
    ("taskset", "util-linux"),
    ("nsenter", "util-linux"),
];

/// What the machine lacks: programs, and why.
#[derive(Clone, Debug, Default)]
pub(super) struct Missing(BTreeMap<&'static str, String>);

impl Missing {
    /// Looks for every program and installs what is missing, unless that is not wanted.
    pub(super) fn after_installing(may_install: bool) -> Missing {
        let mut missing = BTreeMap::new();
        let mut tried: BTreeMap<&str, Result<(), String>> = BTreeMap::new();
        for &(program, package) in PACKAGES {
            if is_here(program) {
                continue;
            }
            let attempt = tried.entry(package).or_insert_with(|| match may_install {
                true => install(package),
                false => Err("--no-install".to_owned()),
            });
            if !is_here(program) {
                let why =
                    attempt.clone().err().unwrap_or_else(|| "it is not in the package".into());
                missing.insert(
                    program,
                    format!("{program} is not installed (Debian: {package}): {why}"),
                );
            }
        }
        Missing(missing)
    }

    /// Why a program cannot be used, if so.
    pub(super) fn of(&self, program: &str) -> Option<&str> {
        self.0.get(program).map(String::as_str)
    }

    /// One line for each program.
    pub(super) fn reasons(&self) -> impl Iterator<Item = &str> {
        self.0.values().map(String::as_str)
    }
}

/// Whether a program is on the path, or where administrators' programs are.
fn is_here(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    let more = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    env::split_paths(&path).chain(more).any(|folder| folder.join(program).is_file())
}

fn install(package: &str) -> Result<(), String> {
    eprintln!("    apt-get install {package}");
    let mut apt = Command::new("apt-get");
    apt.args([
        "install",
        "--yes",
        "--no-install-recommends",
        "-o",
        "DPkg::Lock::Timeout=300",
        package,
    ]);
    apt.env("DEBIAN_FRONTEND", "noninteractive").stdin(Stdio::null());
    let output = apt.output().map_err(|error| format!("apt-get: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(text.trim().lines().last().unwrap_or("apt-get failed").to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_with_its_package() {
        let missing = Missing::after_installing(false);
        for (program, package) in PACKAGES {
            match missing.of(program) {
                Some(why) => assert!(why.contains(package) && !is_here(program), "{why}"),
                None => assert!(is_here(program), "{program}"),
            }
        }
        assert!(is_here("sh") && !is_here("no-such-program"));
    }
}
