//! C programs, compiled by the system's compiler with the headers of rdma-core, run on this
//! library.
//!
//! They are in `tests/c`, one process each: two queue pairs connected over loopback. They cover
//! what no other program here does: windows, groups, shared receive queues, threads, children, bad
//! input. One by hand:
//! `cc -o windows tests/c/windows.c -libverbs -lpthread && dquant run -- ./windows`.

#[path = "../../../testing/skip.rs"]
mod skip;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use nic::driver::RESCUED;
use roce::wire::capture;

/// Exit status of a program that cannot run here, and reports why.
const SKIPPED: i32 = 77;

/// What every program needs.
const LIBRARIES: [&str; 3] = ["-libverbs", "-lpthread", "-ldl"];

/// Where this test's files go.
fn dir() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("verbs-programs");
        fs::create_dir_all(&dir).expect("the folder for tests is writable");
        dir
    })
}

fn compile(source: &Path, program: &Path) -> Result<(), String> {
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-o"]).arg(program).arg(source);
    let output = cc.args(LIBRARIES).output().map_err(|error| format!("no cc: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(()) } else { Err(said) }
}

/// Why programs cannot be built, if so.
fn obstacle() -> Option<&'static str> {
    static OBSTACLE: OnceLock<Option<String>> = OnceLock::new();
    let look = || {
        let source = dir().join("empty.c");
        let text = "#include <infiniband/verbs.h>\nint main(void) { return !ibv_fork_init; }\n";
        fs::write(&source, text).expect("the folder is writable");
        let made = compile(&source, &dir().join("empty"));
        made.err().map(|error| format!("no compiler or no libibverbs-dev: {}", error.trim()))
    };
    OBSTACLE.get_or_init(look).as_deref()
}

/// A folder in which the library has the name that programs link to. Cargo puts it beside the tests
/// that it builds with it.
fn library_dir() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let test = std::env::current_exe().expect("a test knows its own path");
        let lib = dir().join("lib");
        fs::create_dir_all(&lib).expect("the folder is writable");
        // Tests run as processes beside each other: the link is there at every moment.
        let own = lib.join(std::process::id().to_string());
        let _ = fs::remove_file(&own);
        std::os::unix::fs::symlink(test.with_file_name("libibverbs.so"), &own)
            .expect("the folder is writable");
        fs::rename(own, lib.join("libibverbs.so.1")).expect("the folder is writable");
        lib
    })
}

/// Makes the program of `name.c`, under the name of the test.
fn make(test: &str, name: &str) -> PathBuf {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c");
    let program = dir().join(test);
    compile(&sources.join(name).with_extension("c"), &program).unwrap_or_else(|said| {
        panic!("{name}.c does not compile:\n{said}");
    });
    program
}

/// Runs a program on this library, and on loopback unless it is to see all `devices`.
fn finish(test: &str, command: &mut Command, devices: Option<&str>) {
    command.env("LD_LIBRARY_PATH", library_dir()).env("DQUANT_SYSFS", dir());
    match devices {
        Some(devices) => command.env("DQUANT_DEVICES", devices),
        None => command.env_remove("DQUANT_DEVICES"),
    };
    let output = command.output().expect("a program that was just made runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    if output.status.code() == Some(SKIPPED) {
        return skip::note(test, out.lines().last().unwrap_or_default());
    }
    assert!(output.status.success(), "{test}: {}\n{out}{err}", output.status);
    assert!(!err.contains(RESCUED), "{test}: {err}");
}

fn run(name: &str, devices: Option<&str>) {
    let test = format!("programs::{name}");
    match obstacle() {
        Some(reason) => skip::note(&test, reason),
        None => finish(&test, &mut Command::new(make(name, name)), devices),
    }
}

/// Programs are debugged with valgrind, which has no vDSO for them and reports uninitialised
/// memory.
#[test]
fn valgrind() {
    let test = "programs::valgrind";
    if let Some(reason) = obstacle() {
        return skip::note(test, reason);
    }
    let mut valgrind = Command::new("valgrind");
    if valgrind.arg("--version").output().is_err() {
        return skip::note(test, "no valgrind");
    }
    let mut valgrind = Command::new("valgrind");
    let known = concat!("--suppressions=", env!("CARGO_MANIFEST_DIR"), "/tests/c/valgrind.supp");
    valgrind.args(["-q", "--error-exitcode=1", known]).arg(make("under_valgrind", "regions"));
    finish(test, &mut valgrind, Some("lo"));
}

/// A program on loopback with these settings.
fn with(test: &str, name: &str, settings: &[(&str, &str)]) {
    let path = format!("programs::{test}");
    match obstacle() {
        Some(reason) => skip::note(&path, reason),
        None => {
            let mut command = Command::new(make(test, name));
            finish(&path, command.envs(settings.iter().copied()), Some("lo"));
        }
    }
}

const PACKETS: (&str, &str) = ("DQUANT_PATH", "udp");

#[test]
fn stopped_in_selective_repeat() {
    let settings = [("DQUANT_RELIABILITY", "selective"), PACKETS];
    with("stopped_in_selective_repeat", "stopped", &settings);
}

/// Without packets a stopped peer is no obstacle, which `same_host` covers.
#[test]
fn stopped() {
    with("stopped", "stopped", &[PACKETS]);
}

#[test]
fn same_host_without_packets() {
    with("same_host_without_packets", "same_host", &[("DQUANT_PATH", "auto")]);
}

#[test]
fn same_host_in_shared_memory() {
    with("same_host_in_shared_memory", "same_host", &[("DQUANT_MEMORY", "shared")]);
}

#[test]
fn same_host_by_packets() {
    with("same_host_by_packets", "same_host", &[PACKETS]);
}

#[test]
fn sleepers_without_packets() {
    with("sleepers_without_packets", "sleepers", &[("DQUANT_PATH", "auto")]);
}

#[test]
fn sleepers_by_packets() {
    with("sleepers_by_packets", "sleepers", &[PACKETS]);
}

/// What a program that opens a device reports on stderr with this in its environment.
fn said_with(program: &Path, name: &str, value: &OsStr) -> String {
    let mut command = Command::new(program);
    command.arg("a_device_is_opened_twice");
    command.env("LD_LIBRARY_PATH", library_dir()).env("DQUANT_SYSFS", dir());
    command.env("DQUANT_DEVICES", "lo").env(name, value);
    let output = command.output().expect("a program that was just made runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{name}={value:?}: {said}");
    said
}

#[test]
fn settings_that_are_no_good_are_complained_about() {
    let test = "programs::settings_that_are_no_good_are_complained_about";
    if let Some(reason) = obstacle() {
        return skip::note(test, reason);
    }
    let program = make("opening_with_settings", "opening");
    let text = OsStr::new;
    for (name, good) in [("DQUANT_DEVICES", "lo"), ("DQUANT_WINDOW", "7"), ("DQUANT_DSCP", "63")] {
        assert_eq!(said_with(&program, name, text(good)), "");
    }
    let not_utf8 = OsStr::from_bytes(b"/tmp/\xff.pcap");
    for (name, bad, complaints) in [
        ("DQUANT_WINDOW", text("0"), 2),
        ("DQUANT_PATH", text("shm"), 2),
        ("DQUANT_MEMORY", text("pool"), 2),
        ("DQUANT_CONGESTION", text("dcqcn-mlnx:"), 2),
        ("DQUANT_DSCP", text("64"), 2),
        ("DQUANT_DSCP", text("-1"), 2),
        ("DQUANT_DSCP", text(""), 2),
        ("DQUANT_CAPTURE", not_utf8, 2),
        ("DQUANT_DEVICES", text(""), 1),
        ("DQUANT_DEVICES", text(",,,"), 1),
        ("DQUANT_DEVICES", text("nope"), 1),
        ("DQUANT_DEVICES", text("lo,nope"), 1),
        ("DQUANT_SYSFS", text("/dev/null"), 1),
    ] {
        let said = said_with(&program, name, bad);
        let about = |line: &&str| line.contains(name) && line.contains("; hint: ");
        assert_eq!(said.lines().filter(about).count(), complaints, "{name}={bad:?}: {said}");
        assert_eq!(said.lines().count(), complaints, "{name}={bad:?}: {said}");
        let lists = said.contains("hint: one or more of ") && said.contains("lo");
        assert!(lists || name != "DQUANT_DEVICES", "{said}");
    }
}

#[test]
fn a_stderr_that_takes_nothing_is_no_reason_to_stop() {
    let test = "programs::a_stderr_that_takes_nothing_is_no_reason_to_stop";
    if let Some(reason) = obstacle() {
        return skip::note(test, reason);
    }
    let full = fs::File::options().write(true).open("/dev/full").expect("it is on every Linux");
    let mut command = Command::new(make("opening_in_silence", "opening"));
    command.arg("a_device_is_opened_twice").stderr(full).env("DQUANT_WINDOW", "nonsense");
    command.env("LD_LIBRARY_PATH", library_dir()).env("DQUANT_SYSFS", dir());
    assert!(command.status().expect("a program that was just made runs").success());
}

/// DSCPs of a capture, and how many packets have each.
fn dscps(file: &Path) -> BTreeMap<u8, usize> {
    let bytes = fs::read(file).expect("a capture");
    let capture = capture::Capture::parse(&bytes).expect("a capture");
    let mut found = BTreeMap::new();
    for record in capture.records() {
        let bytes = record.expect("whole").bytes;
        let first = u16::from_be_bytes([bytes[0], bytes[1]]);
        let traffic_class = if first >> 12 == 4 { first } else { first >> 4 };
        *found.entry((traffic_class as u8) >> 2).or_insert(0) += 1;
    }
    found
}

/// Runs the program on traffic classes by packets, and returns the DSCPs of what it sent and
/// received, and what it reported.
fn marks(test: &str, imposed: Option<&str>) -> Option<(BTreeMap<u8, usize>, String)> {
    if let Some(reason) = obstacle() {
        skip::note(&format!("programs::{test}"), reason);
        return None;
    }
    let file = dir().join(format!("{test}.pcap"));
    let program = make(test, "marks");
    // Each case opens the device anew, and so begins the capture anew.
    let mut found = BTreeMap::new();
    let mut said = String::new();
    for case in [
        "connections_of_ipv4",
        "connections_of_ipv6",
        "a_class_that_changes",
        "datagrams",
        "classes_from_the_connection_manager",
    ] {
        let _ = fs::remove_file(&file);
        let mut command = Command::new(&program);
        command.env("LD_LIBRARY_PATH", library_dir()).env("DQUANT_SYSFS", dir());
        command.env("DQUANT_DEVICES", "lo").env("DQUANT_CAPTURE", &file).env("DQUANT_PATH", "udp");
        command.env_remove("DQUANT_DSCP").env_remove("MARKS_EXPECTED");
        if let Some(dscp) = imposed {
            command.env("DQUANT_DSCP", dscp).env("MARKS_EXPECTED", dscp);
        }
        let output = command.arg(case).output().expect("a program that was just made runs");
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{test}: {case}: {}\n{err}", output.status);
        said.push_str(&err);
        for (dscp, packets) in dscps(&file) {
            *found.entry(dscp).or_insert(0) += packets;
        }
    }
    Some((found, said))
}

#[test]
fn packets_have_the_traffic_class_of_their_queue_pair() {
    let test = "packets_have_the_traffic_class_of_their_queue_pair";
    if let Some((found, said)) = marks(test, None) {
        // Each packet is in the file twice, sent and received. How many acknowledgements there are
        // depends on the load.
        assert!(found[&26] > 200 && found[&41] >= 10, "{found:?}");
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!(said, "");
    }
}

#[test]
fn a_program_does_not_leave_the_class_of_its_job() {
    if let Some((found, said)) = marks("a_program_does_not_leave_the_class_of_its_job", Some("33"))
    {
        assert!(found[&33] > 200, "{found:?}");
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(said.contains("DSCP 26 of the program is replaced by 33; hint: "), "{said}");
    }
}

/// Tools of the system, preloaded as by `dquant run`, find the device by file names alone.
#[test]
fn tools_list_the_view() {
    let test = "programs::tools_list_the_view";
    // `ls` uses statx and reads attributes; `find` uses descriptors; ibstatus changes the
    // directory.
    let script = "set -e; class=/sys/class/infiniband
        ls -l $class | grep -q dq_lo; ls -ld $class/dq_lo/ports/1/gids >&2
        find $class -name node_type | grep -qx $class/dq_lo/node_type
        stat $class/dq_lo/fw_ver >&2; cd $class
        for device in *; do for port in $class/$device/ports/*; do
            [ -r $port/state ]; echo $device: $(cat $port/state); done; done";
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", script]).env("DQUANT_SYSFS", dir()).env("DQUANT_DEVICES", "lo");
    let output = shell.env("LD_PRELOAD", library_dir().join("libibverbs.so.1")).output();
    let output = output.expect("there is a shell");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{test}: {}\n{out}{err}", output.status);
    assert_eq!(out, "dq_lo: 4: ACTIVE\n", "{err}");
}

/// A program that has the system's library, too, by a path of its own: its devices are none, and it
/// does not crash.
#[test]
fn the_systems_library_beside_this_one_lists_nothing() {
    let test = "programs::the_systems_library_beside_this_one_lists_nothing";
    if let Some(reason) = obstacle() {
        return skip::note(test, reason);
    }
    let found = Command::new("cc").arg("-print-file-name=libibverbs.so").output();
    let found = String::from_utf8(found.expect("it has compiled before").stdout);
    let Ok(systems) = fs::canonicalize(found.expect("a path").trim()) else {
        return skip::note(test, "the compiler does not say where the system's library is");
    };
    let mut command = Command::new(make("by_path", "by_name"));
    command.args(["libibverbs.so.1".as_ref(), systems.as_os_str(), "libibverbs.so.1".as_ref()]);
    command.env("LD_LIBRARY_PATH", library_dir()).env("DQUANT_SYSFS", dir());
    command.env("LD_PRELOAD", library_dir().join("libibverbs.so.1")).env("DQUANT_DEVICES", "lo");
    let output = command.output().expect("a program that was just made runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{}\n{out}{err}", output.status);
    assert_eq!(out, "1\n0\n1\n", "{err}");
    let line = format!("libibverbs (dquant): {} is loaded, too", systems.display());
    assert!(err.starts_with(&line), "{err}");
}

macro_rules! programs {
    ($($name:ident on $devices:expr;)+) => { $(
        #[test]
        fn $name() {
            run(stringify!($name), $devices);
        }
    )+ };
}

programs! {
    windows on Some("lo");
    regions on Some("lo");
    datagrams on Some("lo");
    shared_receives on Some("lo");
    states on Some("lo");
    notify on Some("lo");
    extended on Some("lo");
    queries on Some("lo");
    forking on Some("lo");
    loading on Some("lo");
    closing on Some("lo");
    opening on Some("lo");
    threads on Some("lo");
    view on Some("lo");
    again on Some("lo");
    buffers on Some("lo");
    bad_input on None;
}
