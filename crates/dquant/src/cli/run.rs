//! `dquant run`: starts a verbs program on the software RDMA device.
//!
//! Nothing but the environment is changed: the drop-in `libibverbs.so.1` comes first where the
//! dynamic linker looks, and the program takes the place of this process. Cargo builds the library
//! as `libibverbs.so`; the name that programs ask for is a link in a directory of the user's own,
//! whose name is made from the library it leads to, so that it never changes once it is there.

use std::ffi::{OsStr, OsString};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

use clap::Args;

use super::Console;
use crate::exit::{CliError, Exit};

/// Where the library is, if not beside this program.
const LIBRARY: &str = "DQUANT_VERBS_LIBRARY";

/// The name that programs ask for.
const SONAME: &str = "libibverbs.so.1";

/// Run an RDMA program on this machine's network interfaces, without RDMA hardware or kernel module
///
/// Every interface that is up and has an address is a RoCEv2 device, named dq_INTERFACE. The program
/// is any that uses libibverbs.so.1; it needs no change, no root and no device node. Settings come
/// from the environment: see docs/verbs.md.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant run -- ibv_devinfo -v
  dquant run -- ibv_rc_pingpong -d dq_eth0 -g 0
  dquant run --devices eth0 -- ib_write_bw -x 0 192.0.2.7
  dquant run --capture run-%p.pcap -- ibv_ud_pingpong -g 0 192.0.2.7
  dquant run -- mpirun -np 2 --mca pml ucx ./program"
)]
pub(super) struct Run {
    /// Interfaces that become devices, in this order; all without it
    #[arg(long, value_name = "NAME,...")]
    devices: Option<String>,

    /// Record every packet; %d in the name stands for the interface, %p for the process
    #[arg(long, value_name = "FILE")]
    capture: Option<PathBuf>,

    /// The program and its arguments
    #[arg(
        value_name = "PROGRAM",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    program: Vec<OsString>,
}

impl Run {
    pub(super) fn run(self, _console: &mut Console) -> Result<Exit, CliError> {
        let library = library()?;
        let dir = private_dir(&library).map_err(|error| {
            CliError::usage(format_args!("cannot prepare {}: {error}", library.display()))
                .hint("set XDG_RUNTIME_DIR or TMPDIR to a directory that you own")
        })?;
        let [name, arguments @ ..] = self.program.as_slice() else {
            return Err(CliError::usage("no program to run"));
        };
        let mut command = Command::new(name);
        command.args(arguments);
        command.env("LD_LIBRARY_PATH", first(dir.as_os_str(), "LD_LIBRARY_PATH"));
        command.env("LD_PRELOAD", first(dir.join(SONAME).as_os_str(), "LD_PRELOAD"));
        if let Some(devices) = self.devices {
            command.env("DQUANT_DEVICES", devices);
        }
        if let Some(file) = self.capture {
            command.env("DQUANT_CAPTURE", file);
        }
        // Only comes back when it fails.
        let error = command.exec();
        Err(CliError::usage(format_args!("cannot run {}: {error}", name.display())))
    }
}

/// `value`, before what the variable holds already.
fn first(value: &OsStr, variable: &str) -> OsString {
    let mut list = value.to_owned();
    if let Some(rest) = env::var_os(variable).filter(|rest| !rest.is_empty()) {
        list.push(":");
        list.push(rest);
    }
    list
}

/// The library: named by the environment, or beside this program as cargo or a package leaves it.
fn library() -> Result<PathBuf, CliError> {
    if let Some(path) = env::var_os(LIBRARY) {
        let path = PathBuf::from(path);
        return path.canonicalize().map_err(|error| {
            CliError::usage(format_args!("{LIBRARY}: {}: {error}", path.display()))
        });
    }
    let own = env::current_exe()
        .map_err(|error| CliError::usage(format_args!("cannot find this program: {error}")))?;
    let dir = own.parent().unwrap_or(Path::new("."));
    let places = [
        "libibverbs.so",
        "deps/libibverbs.so",
        "../libibverbs.so",
        "../lib/dquant/libibverbs.so.1",
    ];
    let found =
        places.iter().map(|place| dir.join(place)).find_map(|path| path.canonicalize().ok());
    found.ok_or_else(|| {
        CliError::usage(format_args!("no libibverbs.so beside {}", own.display()))
            .hint(format_args!("build it with `cargo build -p ibverbs`, or name it in {LIBRARY}"))
    })
}

/// A directory with the library under the name that programs ask for.
fn private_dir(library: &Path) -> io::Result<PathBuf> {
    let own = own_directory()?;
    let metadata = fs::metadata(library)?;
    let mut hasher = DefaultHasher::new();
    (library, metadata.len(), metadata.mtime(), metadata.mtime_nsec()).hash(&mut hasher);
    let name = format!("lib-{:016x}", hasher.finish());
    let dir = own.join(&name);
    if dir.join(SONAME).exists() {
        return Ok(dir);
    }
    let draft = own.join(format!("draft-{}-{name}", std::process::id()));
    fs::create_dir_all(&draft)?;
    symlink(library, draft.join(SONAME))?;
    if let Err(error) = fs::rename(&draft, &dir) {
        let _ = fs::remove_dir_all(&draft);
        // Another process may have been faster.
        return if dir.join(SONAME).exists() { Ok(dir) } else { Err(error) };
    }
    Ok(dir)
}

/// A directory that nobody else can have put anything into: what is loaded from it runs as the user.
fn own_directory() -> io::Result<PathBuf> {
    let base = env::var_os("XDG_RUNTIME_DIR").map_or_else(env::temp_dir, PathBuf::from);
    let uid = rustix::process::getuid().as_raw();
    let own = base.join(format!("dquant-verbs-{uid}"));
    match fs::DirBuilder::new().mode(0o700).create(&own) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let found = fs::symlink_metadata(&own)?;
    let private = found.is_dir() && found.uid() == uid && found.mode() & 0o022 == 0;
    if private { Ok(own) } else { Err(io::ErrorKind::PermissionDenied.into()) }
}
