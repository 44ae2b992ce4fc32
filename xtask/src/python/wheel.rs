//! `cargo xtask python --wheel`: one file that `pip install` takes on every Linux with glibc 2.28.
//!
//! zig links against the symbols of that glibc whatever the machine has. maturin makes the wheel of
//! the extension module; the command line and the libibverbs.so.1 of `dquant run` are added as its
//! data files, which pip puts into `bin` and `lib/dquant`, where `dquant` looks for the library.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{build, environment, install, only_wheel, search_path, test};
use crate::shell::{self, Failure};
use crate::workspace::{self, root, rustc_field};

const TOOLS: &[&str] =
    &["maturin>=1.9,<2", "ziglang", "cargo-zigbuild>=0.20,<1", "auditwheel>=6,<7", "wheel"];

/// The oldest glibc that the wheel runs on: that of RHEL 8, Debian 10 and Ubuntu 18.10.
const GLIBC_MINOR: u32 = 28;

/// Builds, checks and tests the wheel.
pub(super) fn run() -> Result<(), Failure> {
    let target = workspace::target_directory()?;
    let folder = target.join("python");
    let python = environment(&folder.join("wheel-venv"), TOOLS).map_err(Failure::usage)?;
    let triple = rustc_field("host")?;
    if !triple.ends_with("linux-gnu") {
        return Err(Failure::usage(format!("a wheel for manylinux needs glibc, not {triple}")));
    }
    command_line(&python, &triple)?;
    let platform = format!("manylinux_2_{GLIBC_MINOR}");
    let profile = ["--release", "--features", "full", "--zig"];
    let platform = ["--target", &triple, "--compatibility", &platform];
    let options = [profile.as_slice(), &platform].concat();
    let bare = build(&python, &folder.join("bare"), &options)?;
    let wheel = add_programs(&python, &bare, &target.join(&triple).join("release"), &folder)?;
    audit(&python, &wheel)?;
    try_out(&wheel, &folder.join("clean-venv"))?;
    let mib = fs::metadata(&wheel).map_or(0.0, |data| data.len() as f64 / f64::from(1 << 20));
    println!("{mib:.1} MiB\n{}", wheel.display());
    Ok(())
}

/// Builds `dquant` and libibverbs with everything that a package turns on.
fn command_line(python: &Path, triple: &str) -> Result<(), Failure> {
    let tools = python.parent().unwrap_or(python);
    let mut zigbuild = Command::new(tools.join("cargo-zigbuild"));
    zigbuild.args(["zigbuild", "--release", "--locked", "--package", "dquant", "--bin", "dquant"]);
    zigbuild.args(["--features", "full", "--target", &format!("{triple}.2.{GLIBC_MINOR}")]);
    shell::run(zigbuild.current_dir(root()).env("PATH", search_path(python)))
}

/// The wheel with the programs of the folder `built`.
fn add_programs(
    python: &Path,
    bare: &Path,
    built: &Path,
    folder: &Path,
) -> Result<PathBuf, Failure> {
    let (unpacked, wheels) = (folder.join("unpacked"), folder.join("manylinux"));
    for old in [&unpacked, &wheels] {
        let _ = fs::remove_dir_all(old);
    }
    let mut unpack = Command::new(python);
    shell::run(unpack.args(["-m", "wheel", "unpack", "--dest"]).arg(&unpacked).arg(bare))?;
    let failed = |error: std::io::Error| Failure::check(format!("adding to the wheel: {error}"));
    let mut found = fs::read_dir(&unpacked).map_err(failed)?;
    let content = found.next().ok_or_else(|| Failure::check("the wheel is empty"))?;
    let content = content.map_err(failed)?.path();
    // Named by project and version, as the folder is.
    let name = content.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let data = content.join(format!("{name}.data"));
    for (from, to) in
        [("dquant", "scripts/dquant"), ("deps/libibverbs.so", "data/lib/dquant/libibverbs.so.1")]
    {
        let to = data.join(to);
        fs::create_dir_all(to.parent().unwrap_or(&data)).map_err(failed)?;
        fs::copy(built.join(from), &to).map_err(failed)?;
        // Line tables are two thirds of the size.
        if shell::answers("strip", &["--version"]) {
            shell::run(Command::new("strip").arg("--strip-debug").arg(&to))?;
        }
    }
    fs::create_dir_all(&wheels).map_err(failed)?;
    let mut pack = Command::new(python);
    shell::run(pack.args(["-m", "wheel", "pack", "--dest-dir"]).arg(&wheels).arg(&content))?;
    only_wheel(&wheels)
}

/// Whether every binary inside runs on the platform that the wheel's name promises.
fn audit(python: &Path, wheel: &Path) -> Result<(), Failure> {
    let mut auditwheel = Command::new(python);
    let report = shell::output(auditwheel.args(["-m", "auditwheel", "show"]).arg(wheel))?;
    eprintln!("{}", report.trim());
    match oldest_glibc(&report) {
        Some(minor) if minor <= GLIBC_MINOR => Ok(()),
        Some(minor) => Err(Failure::check(format!("the wheel needs glibc 2.{minor}"))),
        None => Err(Failure::check("auditwheel names no platform")),
    }
}

/// The minor version of the glibc that the report constrains the wheel to.
fn oldest_glibc(report: &str) -> Option<u32> {
    let words = report.split(|c: char| !(c.is_alphanumeric() || c == '_'));
    let tags =
        words.filter_map(|word| word.strip_prefix("manylinux_2_")?.split('_').next()?.parse().ok());
    tags.max()
}

/// Installs the wheel where nothing else is and runs the tests with what it brought.
fn try_out(wheel: &Path, venv: &Path) -> Result<(), Failure> {
    let _ = fs::remove_dir_all(venv);
    let python = environment(venv, &["numpy"]).map_err(Failure::usage)?;
    install(&python, wheel)?;
    let binary = venv.join("bin/dquant");
    shell::run(Command::new(&binary).arg("--version"))?;
    test(&python, &binary, &[])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_platform_of_a_report_counts() {
        let report = "is consistent with\nthe following platform tag: \"manylinux_2_17_x86_64\".\n\
                      This constrains the platform tag to \"manylinux_2_28_x86_64\".";
        assert_eq!(oldest_glibc(report), Some(28));
        assert_eq!(oldest_glibc("\"linux_x86_64\""), None);
    }
}
