//! One body of tests for every kind of device: what a program sees is the same on each.
//!
//! The cells are in `cells.rs`, written once over [`roce::device::Device`]. They run on the
//! simulated wire, on UDP, on RoCEv1 between two network namespaces, on the wire that processes of
//! a machine share, through shared memory, and on the device behind a `libibverbs.so.1`.
//!
//! For the last one, `DQUANT_CONFORMANCE_LIBRARY` names the library and `DQUANT_CONFORMANCE_DEVICE`
//! the device, if not its first. Without them the library of this workspace is used, if it was
//! built. So the test program can be copied to a machine with a device of its own:
//!
//! ```text
//! DQUANT_CONFORMANCE_LIBRARY=libibverbs.so.1 ./conformance --exact loaded_device --nocapture
//! ```
//!
//! There, cells that the device does not support are listed and do not fail.
//! `interop/conformance.py` does this in a guest, on the kernel's soft-RoCE.

mod cells;
mod rig;
mod rigs;
#[path = "../../../../testing/skip.rs"]
mod skip;
#[path = "../veth/mod.rs"]
mod veth;

use std::path::{Path, PathBuf};
use std::process::Command;

use nic::loaded::Library;

use rig::{Miss, Rig};

const LIBRARY: &str = "DQUANT_CONFORMANCE_LIBRARY";
const DEVICE: &str = "DQUANT_CONFORMANCE_DEVICE";

/// Runs every cell on a rig of its own, and prints how each ended, in the lines that
/// `interop/conformance.py` reads: `STATE NAME (REASON)`.
fn run_all<R: Rig>(may_lack: bool, mut rig: impl FnMut() -> R) {
    let (all, mut passed, mut bad) = (cells::all::<R>(), 0, Vec::new());
    for (name, cell) in &all {
        match cell(&mut rig()) {
            Ok(()) => {
                passed += 1;
                println!("pass   {name}");
            }
            Err(Miss::Lacks(what)) if may_lack => println!("lacks  {name} ({what})"),
            Err(Miss::Lacks(why) | Miss::Wrong(why)) => {
                println!("wrong  {name} ({why})");
                bad.push(format!("{name}: {why}"));
            }
        }
    }
    println!("passed {passed} of {} cells", all.len());
    assert!(bad.is_empty(), "{} cells fail:\n{}", bad.len(), bad.join("\n"));
}

#[test]
fn simulated_wire() {
    run_all(false, rigs::Simulated::new);
}

#[test]
fn udp_wire() {
    run_all(false, rigs::udp);
}

#[test]
fn roce_v1_wire() {
    let Some(lab) = veth::Lab::unresolved(9000) else { return };
    run_all(false, || rigs::roce_v1(&lab));
}

#[test]
fn device_wire() {
    run_all(false, rigs::shared_device);
}

#[test]
fn shared_memory() {
    run_all(false, rigs::peers);
}

/// Cargo puts the library beside the tests, or in the folder above, when it was built.
fn built_library() -> Option<PathBuf> {
    let test = std::env::current_exe().expect("a test knows its own path");
    let places =
        [test.with_file_name("libibverbs.so"), test.parent()?.with_file_name("libibverbs.so")];
    places.into_iter().find(|path| path.exists())
}

#[test]
fn loaded_device() {
    const TEST: &str = "conformance::loaded_device";
    if let Some(path) = std::env::var_os(LIBRARY) {
        return run_loaded(Path::new(&path));
    }
    let Some(library) = built_library() else {
        return skip::note(TEST, "no libibverbs.so beside the tests: cargo build -p ibverbs");
    };
    // The library reads its settings from the environment, which only a new process can have.
    let test = std::env::current_exe().expect("a test knows its own path");
    let mut child = Command::new(test);
    child.args(["--exact", "loaded_device", "--nocapture"]);
    child.env(LIBRARY, library).env("DQUANT_DEVICES", "lo");
    child.env("DQUANT_SYSFS", env!("CARGO_TARGET_TMPDIR"));
    let output = child.output().expect("a test runs");
    let said = String::from_utf8_lossy(&output.stdout);
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{complaints}");
}

fn run_loaded(path: &Path) {
    let library = Library::load(path).expect("a library of the verbs");
    let devices = library.devices().expect("a list");
    println!("devices {devices:?}");
    let wanted = std::env::var(DEVICE).ok().or_else(|| devices.first().cloned());
    let wanted = wanted.expect("the library has a device");
    // Ours supports everything; what others lack is listed.
    let may_lack = !wanted.starts_with("dq_");
    run_all(may_lack, || rigs::loaded(&library, &wanted));
}
