//! `dquant run`: starts a verbs program on the software RDMA device.
//!
//! Only the environment is changed: the drop-in `libibverbs.so.1` comes first on the search path of
//! the dynamic linker, and the program replaces this process. The names that programs load are
//! links in a private directory of the user: `libibverbs.so.1`, and `libibverbs.so`, which NCCL,
//! UCX's plug-ins and others open first. The directory's name is derived from the linked library,
//! so that the links never change.
//!
//! Interfaces that do not exist and captures that cannot be written, of which the library would
//! only warn, are refused before the program starts.

mod leftovers;

use std::ffi::{OsStr, OsString};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

use clap::Args;
use cluster::local::{self, AskError, Membership};
use nic::interfaces::interfaces;
use nic::private;
use rustix::fs::{Access, access};

use super::Console;
use crate::exit::{CliError, Exit, OUTPUT_HINT};

/// Path of the library, if not beside this program.
const LIBRARY: &str = "DQUANT_VERBS_LIBRARY";

/// Path of the library's view of `/sys/class/infiniband`, if not the default.
const SYSFS: &str = "DQUANT_SYSFS";

/// What the library marks packets with.
const DSCP: &str = "DQUANT_DSCP";

/// First bytes of a 64-bit library.
const ELF_START: [u8; 5] = *b"\x7fELF\x02";

/// The name that programs are linked to.
const SONAME: &str = "libibverbs.so.1";

/// All names by which programs load the library.
const NAMES: [&str; 2] = [SONAME, "libibverbs.so"];

/// Run an RDMA program on this machine's network interfaces, without RDMA hardware or kernel module
///
/// Every interface that is up and has an address is a RoCEv2 device, named dq_INTERFACE. The program
/// is any that uses libibverbs.so.1; it needs no change, no root and no device node. Settings come
/// from the environment: see docs/verbs.md.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
`dquant explain` asks programs that run; `dquant capture live --help` has the tshark command that
shows a capture.

Examples:
  dquant run -- ibv_devinfo -v
  dquant run -- ibv_rc_pingpong -d dq_eth0 -g 0
  dquant run --devices eth0 -- ib_write_bw -x 0 192.0.2.7
  dquant run --dscp 26 -- ib_write_bw -x 0 192.0.2.7
  dquant run --job llm -- python train.py
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

    /// DSCP of every packet, 0-63, whatever the program asks for
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(..=63))]
    dscp: Option<u8>,

    /// Take part in this job: the machine's agent says which DSCP its packets have
    #[arg(long, value_name = "NAME", conflicts_with = "dscp")]
    job: Option<String>,

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
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let library = library()?;
        let (base, own) = in_a_private_directory(private::directory)?;
        leftovers::remove(&own);
        let dir = library_dir(&own, &library).map_err(|error| {
            CliError::because(format_args!("cannot prepare {}", own.display()), &error)
                .hint("is there space left, and may this user write there?")
        })?;
        let [name, arguments @ ..] = self.program.as_slice() else {
            return Err(CliError::usage("no program to run"));
        };
        let mut command = Command::new(name);
        command.args(arguments);
        command.env("LD_LIBRARY_PATH", first(dir.as_os_str(), "LD_LIBRARY_PATH"));
        command.env("LD_PRELOAD", first(dir.join(SONAME).as_os_str(), "LD_PRELOAD"));
        if env::var_os(SYSFS).is_none() {
            command.env(SYSFS, base);
        }
        if let Some(list) = self.devices {
            command.env("DQUANT_DEVICES", devices(&list)?);
        }
        if let Some(file) = self.capture {
            command.env("DQUANT_CAPTURE", capture(&file)?);
        }
        let dscp = match &self.job {
            Some(name) => Some(membership(name, console)?.dscp),
            None => self.dscp,
        };
        if let Some(dscp) = dscp {
            command.env(DSCP, dscp.to_string());
        }
        // Returns only on failure.
        let error = command.exec();
        let failed = CliError::because(format_args!("cannot run {}", name.display()), &error);
        Err(match error.kind() {
            io::ErrorKind::NotFound => failed.hint("is it installed, and its folder in PATH?"),
            io::ErrorKind::PermissionDenied => failed.hint(
                "a program is a file with the permission to execute (chmod +x), on a file system without noexec",
            ),
            _ => failed,
        })
    }
}

/// What the agent of this machine knows of a job; its DSCP is told the user.
pub(super) fn membership(name: &str, console: &mut Console) -> Result<Membership, CliError> {
    let found = local::ask(&local::socket_path(), name).map_err(|error| {
        let failed = match error {
            AskError::Refused(_) => CliError::usage(&error),
            _ => CliError::peer_unreachable(format_args!("job '{name}': {error}")),
        };
        failed.hint(error.hint())
    })?;
    let Membership { job, dscp, .. } = &found;
    console.note(format_args!("job {job}, '{name}': packets have DSCP {dscp}"));
    Ok(found)
}

/// The interfaces; each exists and can be a device. `dq_eth0` stands for `eth0`.
fn devices(list: &str) -> Result<String, CliError> {
    let all = interfaces().map_err(CliError::from_cause)?;
    let usable: Vec<&str> = all
        .iter()
        .filter(|interface| interface.running && !interface.addresses.is_empty())
        .map(|interface| interface.name.as_str())
        .collect();
    let find = |name: &str| {
        let is = |wanted: &str| usable.iter().find(|usable| **usable == wanted).copied();
        let found = is(name).or_else(|| is(name.strip_prefix("dq_")?));
        found.ok_or_else(|| {
            let exists = all.iter().any(|interface| interface.name == name);
            let why = if exists { "is down or has no address" } else { "does not exist" };
            CliError::usage(format_args!("interface {name:?} {why}"))
                .hint(format_args!("one or more of {}", usable.join(",")))
        })
    };
    let names = list.split(',').map(str::trim).filter(|name| !name.is_empty());
    let found = names.map(find).collect::<Result<Vec<&str>, CliError>>()?;
    if found.is_empty() {
        return Err(CliError::usage("--devices names no interface")
            .hint(format_args!("one or more of {}", usable.join(","))));
    }
    Ok(found.join(","))
}

/// The file as an absolute path, in a folder that can be written.
fn capture(file: &Path) -> Result<PathBuf, CliError> {
    let unwritable = |error: io::Error| {
        CliError::because(format_args!("cannot write {}", file.display()), &error).hint(OUTPUT_HINT)
    };
    let path = std::path::absolute(file).map_err(unwritable)?;
    let folder = path.parent().unwrap_or(Path::new("/"));
    // Only the library knows folders named for the process or the interface.
    if !folder.to_string_lossy().contains('%') {
        let writable = match fs::metadata(&path) {
            Ok(found) if found.is_dir() => Err(rustix::io::Errno::ISDIR),
            Ok(_) => access(&path, Access::WRITE_OK),
            Err(_) => access(folder, Access::WRITE_OK | Access::EXEC_OK),
        };
        writable.map_err(|error| unwritable(error.into()))?;
    }
    Ok(path)
}

/// `value`, followed by what the variable holds already.
fn first(value: &OsStr, variable: &str) -> OsString {
    let mut list = value.to_owned();
    if let Some(rest) = env::var_os(variable).filter(|rest| !rest.is_empty()) {
        list.push(":");
        list.push(rest);
    }
    list
}

/// What `dquant run` would give to programs, if it can. Changes nothing.
pub(super) fn prospect() -> Result<PathBuf, CliError> {
    let library = library()?;
    in_a_private_directory(private::prospect)?;
    Ok(library)
}

/// The library: named by the environment, or beside this program as cargo or a package leaves it.
fn library() -> Result<PathBuf, CliError> {
    if let Some(path) = env::var_os(LIBRARY) {
        let path = PathBuf::from(path);
        return named_library(&path).map_err(|error| {
            CliError::because(format_args!("{LIBRARY}: {}", path.display()), &error)
                .hint("name libibverbs.so as `cargo build -p ibverbs` makes it, or unset it")
        });
    }
    let own = env::current_exe().map_err(|error| {
        CliError::because("cannot find this program", &error)
            .hint(format_args!("mount /proc, or name the library in {LIBRARY}"))
    })?;
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

/// A file that the dynamic linker will load. Of another one it would only warn, and start the program
/// with the system's library.
fn named_library(path: &Path) -> io::Result<PathBuf> {
    let path = path.canonicalize()?;
    if !fs::metadata(&path)?.is_file() {
        return Err(io::Error::other("is no file"));
    }
    let mut start = [0; ELF_START.len()];
    match fs::File::open(&path)?.read_exact(&mut start) {
        Ok(()) if start == ELF_START => Ok(path),
        Ok(()) => Err(io::Error::other("is no shared library (ELF, 64 bits)")),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            Err(io::Error::other("is no shared library: it is too short"))
        }
        Err(error) => Err(error),
    }
}

/// A directory with the library under the names that programs load.
fn library_dir(own: &Path, library: &Path) -> io::Result<PathBuf> {
    let metadata = fs::metadata(library)?;
    let mut hasher = DefaultHasher::new();
    (NAMES, library, metadata.len(), metadata.mtime(), metadata.mtime_nsec()).hash(&mut hasher);
    let name = format!("lib-{:016x}", hasher.finish());
    let dir = own.join(&name);
    let is_complete = || NAMES.iter().all(|name| dir.join(name).exists());
    if is_complete() {
        return Ok(dir);
    }
    let draft = own.join(format!("draft-{}-{name}", std::process::id()));
    fs::create_dir_all(&draft)?;
    for name in NAMES {
        symlink(library, draft.join(name))?;
    }
    if let Err(error) = fs::rename(&draft, &dir) {
        let _ = fs::remove_dir_all(&draft);
        // Another process may have been faster.
        return if is_complete() { Ok(dir) } else { Err(error) };
    }
    Ok(dir)
}

/// What `take` makes of the first parent that it accepts, and the parent.
fn in_a_private_directory<T>(
    take: impl Fn(&Path) -> io::Result<T>,
) -> Result<(PathBuf, T), CliError> {
    let mut refusals = Vec::new();
    for base in private::bases() {
        match take(&base) {
            Ok(taken) => return Ok((base, taken)),
            Err(why) => refusals.push(format!("{}: {why}", base.display())),
        }
    }
    let why = refusals.join("; ");
    Err(CliError::usage(format_args!("no private directory for the verbs library: {why}"))
        .hint("set XDG_RUNTIME_DIR or TMPDIR to a directory that you own"))
}
