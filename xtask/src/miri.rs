//! `cargo xtask miri`: undefined behaviour in what an interpreter can run.
//!
//! Miri runs no system call of ours: no sockets, io_uring or shared mappings. What is left is the
//! unsafe code that works on memory alone, and the protocol above it. [`PARTS`] lists both.

use std::process::Command as Process;
use std::time::Instant;

use crate::Command;
use crate::shell::{self, Failure};
use crate::workspace::{self, root};

pub(crate) const COMMAND: Command = Command {
    name: "miri",
    summary: "Runs tests under Miri",
    help: "\
Usage: cargo xtask miri [PART…]

Runs tests under Miri, part by part; all parts without arguments. It takes some minutes.

Parts:
  memory  ibverbs: registered memory by address: gathered, scattered, atomics
  ring    host: the wake-up protocols and the layout of the ring
  codec   roce: PSNs, slabs, scatter/gather lists

Needs the component miri of a nightly toolchain. Without one it is installed; where that fails, nothing runs, and the
reason is printed.

Exit code: 0 good or skipped, 1 undefined behaviour or a failed test, 2 usage.

Examples:
  cargo xtask miri           everything
  cargo xtask miri memory    one part",
    run,
};

/// Arguments of rustup: it finds cargo of another toolchain than the one that runs this.
const MIRI: &[&str] = &["run", "nightly", "cargo", "miri"];

/// A name, the package, and which of its tests.
const PARTS: &[(&str, &str, &[&str])] = &[
    ("memory", "adapter", &["shared::memory::tests::atomics", "shared::memory::tests::bytes"]),
    ("ring", "host", &["ring::wake", "ring::layout"]),
    ("codec", "roce", &["wire::psn", "memory::sg", "slab::tests::full"]),
];

fn run(args: &[String]) -> Result<(), Failure> {
    if let Some(unknown) = args.iter().find(|arg| !PARTS.iter().any(|(name, ..)| name == arg)) {
        return Err(Failure::usage(format!("there is no part {unknown}; see --help")));
    }
    if let Err(why) = install() {
        eprintln!("skipped: {why}");
        return Ok(());
    }
    let target = workspace::target_directory()?.join("miri");
    let wanted = |name: &str| args.is_empty() || args.iter().any(|arg| arg == name);
    for (name, package, tests) in PARTS.iter().filter(|(name, ..)| wanted(name)) {
        let began = Instant::now();
        let mut miri = Process::new("rustup");
        miri.args(MIRI).args(["test", "--lib", "--package", package]).current_dir(root());
        // Set by the cargo that runs this command, for its own toolchain.
        for own in ["CARGO", "RUSTC", "RUSTDOC"] {
            miri.env_remove(own);
        }
        // Registered memory is an address from outside, as programs give it. Properties keep no
        // file of failures.
        miri.env("MIRIFLAGS", "-Zmiri-permissive-provenance -Zmiri-disable-isolation");
        miri.env("PROPTEST_CASES", "8");
        shell::run(miri.arg("--target-dir").arg(&target).arg("--").args(*tests))?;
        eprintln!("==> {name}: no undefined behaviour, {:.0} s", began.elapsed().as_secs_f64());
    }
    Ok(())
}

/// Makes sure that there is Miri; the error says why there is none.
fn install() -> Result<(), String> {
    if shell::answers("rustup", &[MIRI, &["--version"]].concat()) {
        return Ok(());
    }
    eprintln!("==> installing Miri");
    let toolchain = ["toolchain", "install", "nightly", "--profile=minimal", "--component=miri"];
    if shell::answers("rustup", &toolchain) {
        return Ok(());
    }
    Err(String::from("no nightly toolchain with the component miri, and rustup cannot install one"))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A filter that names no test would pass, and check nothing.
    #[test]
    fn every_part_names_tests_that_exist() {
        for (_, package, filters) in PARTS {
            for filter in *filters {
                let (module, test) = filter.split_once("::tests::").unwrap_or((filter, ""));
                let file = format!("crates/{package}/src/{}.rs", module.replace("::", "/"));
                let text = fs::read_to_string(root().join(&file)).expect(&file);
                assert!(text.contains(&format!("fn {test}")), "{file}: no test {test}");
            }
        }
    }
}
