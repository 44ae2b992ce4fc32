//! The mechanical proof that the pure crates need no operating system.
//!
//! Builds `xtask/no-os-proof`, which brings its own panic handler and allocator and so cannot be
//! compiled together with `std`, from whichever crate that would come. The versions are those of
//! the workspace: its lock file is copied beside the proof first. Where `nm` is installed, the
//! undefined symbols of the archive are read as well: only the memory primitives and the integer
//! helpers of the compiler may be among them.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::shell::{self, Failure, Outcome};
use crate::workspace::{self, cargo, root};

/// The proof's manifest, relative to the root.
pub(crate) const MANIFEST: &str = "xtask/no-os-proof/Cargo.toml";

/// Called implicitly by compiled code: `memcpy` and related functions.
const MEMORY_PRIMITIVES: &[&str] = &["memcpy", "memmove", "memset", "memcmp", "bcmp", "strlen"];

pub(crate) fn check() -> Result<Outcome, Failure> {
    copy_lock_file()?;
    let target = workspace::target_directory()?.join("no-os-proof");
    let mut build = cargo(&["build", "--manifest-path", MANIFEST, "--target-dir"]);
    shell::run(build.arg(&target)).map_err(explain)?;
    let archive = target.join("debug/libno_os_proof.a");
    if !shell::answers("nm", &["--version"]) {
        eprintln!("    skipped: reading the archive's imports (nm is not installed)");
        return Ok(Outcome::Passed);
    }
    let foreign = foreign_imports(&archive)?;
    if foreign.is_empty() {
        return Ok(Outcome::Passed);
    }
    Err(Failure::check(format!("the pure crates call outside themselves: {}", foreign.join(", "))))
}

fn copy_lock_file() -> Result<(), Failure> {
    let lock = root().join("Cargo.lock");
    let beside_the_proof = root().join(MANIFEST).with_file_name("Cargo.lock");
    fs::copy(&lock, &beside_the_proof)
        .map(drop)
        .map_err(|error| Failure::usage(format!("cannot copy {}: {error}", lock.display())))
}

fn explain(failure: Failure) -> Failure {
    Failure::check(format!(
        "{failure}; a duplicate `panic_impl` above names the crate that links `std`"
    ))
}

fn foreign_imports(archive: &Path) -> Result<Vec<String>, Failure> {
    let undefined = symbols(archive, "--undefined-only")?;
    let defined = symbols(archive, "--defined-only")?;
    Ok(undefined.difference(&defined).filter(|name| !is_harmless(name)).cloned().collect())
}

fn symbols(archive: &Path, which: &str) -> Result<BTreeSet<String>, Failure> {
    let mut nm = Command::new("nm");
    nm.args(["--format=just-symbols", which]).arg(archive);
    // Members without symbols make nm write to stderr, which is ignored.
    let output = nm.stderr(Stdio::null()).output();
    let output = output.map_err(|error| Failure::usage(format!("cannot start nm: {error}")))?;
    let names = String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
    Ok(names)
}

/// Mangled names are Rust's own and were checked by the compiler; the rest must be on the short
/// list.
fn is_harmless(name: &str) -> bool {
    let rust = name.starts_with("_R") || name.starts_with("_ZN");
    let wide_integer = name.starts_with("__") && (name.ends_with("ti3") || name.ends_with("ti4"));
    // Between such integers and floating point: libm has them, the compiler's own library provides
    // them.
    let conversion = name.starts_with("__fix") && name.ends_with("ti")
        || name.starts_with("__floatti")
        || name.starts_with("__floatunti");
    let archive_heading = name.is_empty() || name.ends_with(':');
    rust || wide_integer || conversion || archive_heading || MEMORY_PRIMITIVES.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_into_the_c_library_are_foreign() {
        assert!(["clock_gettime", "socket", "getrandom", "malloc"].iter().all(|s| !is_harmless(s)));
        assert!(
            [
                "memcpy",
                "__udivti3",
                "__fixunsdfti",
                "__floattidf",
                "_RNvNtCs_4core9panicking5panic"
            ]
            .map(is_harmless)
            .iter()
            .all(|ok| *ok)
        );
    }
}
