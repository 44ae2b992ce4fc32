//! The location of the workspace, and its data from cargo and git.

use std::path::{Path, PathBuf};
use std::process::Command;

use cargo_metadata::{Metadata, MetadataCommand};

use crate::shell::{self, Failure};

/// The folder of the workspace's `Cargo.toml`.
pub(crate) fn root() -> &'static Path {
    let manifest_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest_dir.parent().unwrap_or(manifest_dir)
}

/// A cargo invocation in the workspace, with the same cargo that runs this program. What that cargo
/// has told this program about its package is taken away: `ring` depends on those variables, and
/// all above it would be built again whenever someone calls cargo by hand in between.
pub(crate) fn cargo(args: &[&str]) -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(args).current_dir(root());
    for (name, _) in std::env::vars_os() {
        if describes_package(&name.to_string_lossy()) {
            command.env_remove(name);
        }
    }
    command
}

/// Whether `cargo run` sets this variable to something about the package that it runs.
fn describes_package(name: &str) -> bool {
    name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
}

/// The resolved dependency graph from `cargo metadata`.
///
/// # Errors
/// Whatever cargo reports.
pub(crate) fn metadata() -> Result<Metadata, Failure> {
    let metadata = MetadataCommand::new().current_dir(root()).exec();
    metadata.map_err(|error| Failure::check(format!("cargo metadata: {error}")))
}

/// The folder for build outputs: cargo's own, wherever the user has configured it.
///
/// # Errors
/// As [`metadata`].
pub(crate) fn target_directory() -> Result<PathBuf, Failure> {
    Ok(metadata()?.target_directory.into_std_path_buf())
}

/// One field of what `rustc -vV` prints, such as `host` or `release`.
///
/// # Errors
/// When rustc does not run or does not print the field.
pub(crate) fn rustc_field(name: &str) -> Result<String, Failure> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let version = shell::output(Command::new(rustc).arg("-vV"))?;
    let value = version.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
    value
        .map(str::to_owned)
        .ok_or_else(|| Failure::usage(format!("rustc does not print its {name}")))
}

/// Installs a subcommand of cargo unless some version of it is there.
///
/// # Errors
/// When it cannot be fetched or built.
pub(crate) fn install(subcommand: &str, version: &str) -> Result<(), Failure> {
    if shell::answers("cargo", &[subcommand, "--version"]) {
        return Ok(());
    }
    let package = format!("cargo-{subcommand}");
    eprintln!("    {package} is not installed; building it takes some minutes, once");
    shell::run(&mut cargo(&["install", "--locked", &package, "--version", version]))
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
