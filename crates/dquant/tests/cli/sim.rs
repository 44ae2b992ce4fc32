//! `dquant sim`: a few seeds, the same twice, and what is refused.

use super::Folder;

#[test]
fn a_few_seeds_hold_and_repeat_themselves() {
    let folder = Folder::new("sim-chaos");
    let run = || {
        let mut report = folder.run(&["sim", "chaos", "--seeds", "0..6", "--json"]).good().json();
        for timed in ["wall_ns", "events_per_second"] {
            report[timed] = 0.into();
        }
        report
    };
    let report = run();
    assert_eq!(report["schema"], "dquant.sim.chaos/1");
    assert_eq!((&report["seeds"], &report["failed"]), (&6.into(), &0.into()));
    assert!(report["sends"].as_u64() >= Some(1_200), "{report}");
    assert_eq!(report["faults"].as_array().map(Vec::len), Some(16));
    assert_eq!(run(), report);
}

#[test]
fn goodput_falls_with_loss() {
    let folder = Folder::new("sim-goodput");
    let args = ["sim", "goodput", "--loss", "1%", "--duration", "2ms", "--json"];
    let report = folder.run(&args).good().json();
    for mode in report["modes"].as_array().expect("two modes") {
        let at = |point: usize| mode["points"][point]["goodput_bps"].as_u64();
        assert!(at(0) > at(1), "{mode}");
    }
}

#[test]
fn a_torus_in_one_lane_comes_to_a_deadlock_and_in_lanes_does_not() {
    let folder = Folder::new("sim-deadlock");
    let stuck = folder.run(&["sim", "deadlock", "--topology", "torus:4x4:2"]);
    assert_eq!(stuck.exit, Some(1), "{stuck:?}");
    let (before, circle) = stuck.stdout.split_once("  deadlock    after ").expect("a deadlock");
    assert!(before.contains("torus:4x4:2, routed by dor, 1 lane"), "{before}");
    let names: Vec<&str> =
        circle.split(": ").nth(1).expect("a circle").trim().split(" -> ").collect();
    assert!(names.len() >= 4 && names.first() == names.last(), "{circle}");
    let args = ["sim", "deadlock", "--topology", "torus:4x4:2", "--lanes", "4", "--json"];
    let report = folder.run(&args).good().json();
    assert_eq!((&report["deadlock"], &report["dropped"]), (&serde_json::Value::Null, &0.into()));
}

#[test]
fn the_reference_case_stands_beside_ns_3() {
    let folder = Folder::new("sim-reference");
    let report = folder.run(&["sim", "incast", "--reference", "--json"]).good().json();
    assert_eq!(report["rows"].as_array().map(Vec::len), Some(6));
    let pfc = [
        "sim",
        "incast",
        "--senders",
        "7",
        "--pfc",
        "--cc",
        "hpcc",
        "--topology",
        "fat-tree:4",
        "--json",
    ];
    let report = folder.run(&pfc).good().json();
    assert_eq!(report["dropped"], 0);
    let many = ["sim", "incast", "--senders", "16", "--topology", "fat-tree:4"];
    folder.run(&many).failed(2, "16 hosts", "");
}

#[test]
fn watermarks_are_heard_where_switches_do_not_mark() {
    let folder = Folder::new("sim-watermarks");
    let paused = |options: &[&str]| {
        let args = ["sim", "incast", "--senders", "7", "--pfc", "--no-ecn", "--json"];
        let report = folder.run(&[&args[..], options].concat()).good().json();
        assert_eq!((&report["marked"], &report["dropped"]), (&0.into(), &0.into()));
        report["paused_ns"].as_u64().expect("a number")
    };
    let (without, with) = (paused(&[]), paused(&["--watermarks", "1ms"]));
    assert!(with * 10 < without, "{with} {without}");
    let never = ["sim", "incast", "--watermarks", "1us"];
    folder.run(&never).failed(2, "it can be 10us to 100ms", "");
}

#[test]
fn what_cannot_be_run_is_said() {
    let folder = Folder::new("sim-refused");
    let nothing = folder.run(&["sim", "chaos", "--seeds", "5..5"]);
    nothing.failed(2, "there is no seed in 5..5", "");
    folder.run(&["sim", "incast", "--cc", "reno"]).failed(2, "reno", "");
    let timer = ["sim", "incast", "--increase-timer", "5us", "--cc", "hpcc"];
    folder.run(&timer).failed(2, "--increase-timer is DCQCN's", "");
    folder.run(&["sim", "incast", "--increase-timer", "0us"]).failed(2, "more than 0", "");
}
