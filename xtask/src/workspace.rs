//! Where the workspace lies and what cargo and git say about it.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::shell::{self, Failure};

/// The folder of the workspace's `Cargo.toml`.
pub(crate) fn root() -> &'static Path {
    let manifest_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest_dir.parent().unwrap_or(manifest_dir)
}

/// A cargo invocation in the workspace, with the same cargo that runs this program.
pub(crate) fn cargo(args: &[&str]) -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(args).current_dir(root());
    command
}

/// The resolved dependency graph as `cargo metadata` tells it.
///
/// # Errors
/// Whatever cargo reports, or an answer that is not the expected JSON.
pub(crate) fn metadata() -> Result<Value, Failure> {
    let json = shell::output(&mut cargo(&["metadata", "--format-version", "1"]))?;
    serde_json::from_str(&json)
        .map_err(|error| Failure::check(format!("cargo metadata did not answer JSON: {error}")))
}

/// The folder for build outputs: cargo's own, wherever the user has put it.
///
/// # Errors
/// As [`metadata`].
pub(crate) fn target_directory() -> Result<PathBuf, Failure> {
    let metadata = metadata()?;
    metadata["target_directory"]
        .as_str()
        .map(PathBuf::from)
        .ok_or_else(|| Failure::check("cargo metadata names no target directory"))
}

/// Every file of the work tree that git tracks or would track, relative to the root and sorted.
///
/// # Errors
/// When git is missing or the folder is no repository.
pub(crate) fn files() -> Result<Vec<PathBuf>, Failure> {
    let mut git = Command::new("git");
    git.args(["ls-files", "--cached", "--others", "--exclude-standard", "-z"]).current_dir(root());
    let listing = shell::output(&mut git)?;
    let mut files: Vec<PathBuf> =
        listing.split('\0').filter(|name| !name.is_empty()).map(PathBuf::from).collect();
    files.sort();
    files.dedup();
    Ok(files)
}
