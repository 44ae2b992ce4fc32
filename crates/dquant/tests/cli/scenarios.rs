//! `dquant sim run` and `sweep`: scenarios from files, what they say, and what is refused with its place.

use std::path::Path;

use super::Folder;

/// A network small enough for a test.
const SMALL: &str = "\
[topology]
rule = 'leaf-spine:2x2x4'

[workload]
kind = 'all-to-all'
bytes = '20KB'
";

fn text(folder: &Folder, name: &str) -> String {
    String::from_utf8(folder.read(name)).expect("text")
}

/// Where the scenarios that are shipped lie.
fn shipped() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios")
}

#[test]
fn a_scenario_runs_and_repeats_itself() {
    let folder = Folder::new("sim-run");
    folder.write("small.toml", SMALL);
    let run = || {
        let mut report = folder.run(&["sim", "run", "small.toml", "--json"]).good().json();
        report["cpu_ns"] = 0.into();
        report
    };
    let report = run();
    assert_eq!(report["schema"], "dquant.sim.run/1");
    assert_eq!((&report["flows"], &report["unfinished"]), (&56.into(), &0.into()));
    assert_eq!(report["slowdowns"][0]["flows"], 56);
    assert_eq!(run(), report);
    let other = ["sim", "run", "small.toml", "--set", "run.seed=2", "--json"];
    assert_ne!(folder.run(&other).good().json()["events"], report["events"]);
}

#[test]
fn pictures_are_written() {
    let folder = Folder::new("sim-run-plot");
    folder.write("small.toml", SMALL);
    folder.run(&["sim", "run", "small.toml", "--plot", "pictures"]).good();
    for name in ["queues.svg", "slowdowns.svg", "links.svg"] {
        let picture = text(&folder, &format!("pictures/{name}"));
        assert!(picture.starts_with("<svg") && picture.ends_with("</svg>\n"), "{name}");
        assert!(!picture.contains("NaN") && !picture.contains("inf"), "{name}");
        // Curves have points, a size alone a marker, and links a colour.
        let shown = match name {
            "queues.svg" => picture.matches("<polyline points=\"64.0,").count(),
            "slowdowns.svg" => picture.matches("<circle").count(),
            _ => picture.matches("<path stroke=").count(),
        };
        assert_eq!(shown, if name == "links.svg" { 8 + 4 } else { 2 }, "{name}: {picture}");
    }
}

#[test]
fn samples_of_two_runs_are_compared() {
    let folder = Folder::new("sim-run-samples");
    folder.write("small.toml", SMALL);
    let one = ["workload.kind=incast", "workload.senders=1", "workload.bytes=1MB"];
    let one = one.map(|setting| ["--set", setting]).concat();
    let run = |more: &[&str]| {
        folder.run(&[&["sim", "run", "small.toml"], &one[..], more].concat()).good();
    };
    run(&["--samples", "a.csv"]);
    let control = ["--set", "transport.control=swift", "--samples", "b.csv"];
    run(&control);
    let compare = ["sim", "compare", "--simulated", "a.csv", "--measured", "b.csv"];
    let report = folder.run(&[&compare[..], &["--plot", "both.svg", "--json"]].concat());
    let report = report.good().json();
    let row = &report["rows"][0];
    assert_eq!((&row["phase"], &row["flow"]), (&1.into(), &1.into()));
    assert!(row["simulated"]["mbps"].as_f64() > Some(1_000.0), "{row}");
    assert!(text(&folder, "both.svg").contains("measured"));

    folder.write("c.csv", "time,flow\n");
    let wrong = folder.run(&["sim", "compare", "--simulated", "a.csv", "--measured", "c.csv"]);
    wrong.failed(2, "c.csv has no samples", "");
    let many = ["sim", "run", "small.toml", "--set", "topology.rule=leaf-spine:2x2x8"];
    let many = folder.run(&[&many[..], &["--samples", "d.csv"]].concat());
    many.failed(2, "at most 64 flows", "");
}

#[test]
fn a_sweep_runs_every_combination() {
    let folder = Folder::new("sim-sweep");
    folder.write("small.toml", SMALL);
    let args = [
        "sim",
        "sweep",
        "small.toml",
        "--set",
        "transport.control=hpcc,advertised",
        "--set",
        "workload.bytes=2KB,20KB",
        "--seeds",
        "1..3",
        "--plot",
        "all.svg",
    ];
    let table = folder.run(&args).good().stdout;
    assert_eq!(table.lines().count(), 2 + 4, "{table}");
    assert!(table.contains("advertised") && table.contains("transport.control"), "{table}");
    let report = folder.run(&[&args[..], &["--json"]].concat()).good().json();
    let rows = report["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 4);
    assert!(rows.iter().all(|row| row["runs"].as_array().is_some_and(|runs| runs.len() == 2)));
    assert_eq!(rows[1]["values"], serde_json::json!(["hpcc", "20KB"]));
    assert!(text(&folder, "all.svg").contains("advertised 2KB p99"));
}

#[test]
fn a_late_trace_begins_with_its_first_flow() {
    let folder = Folder::new("sim-trace-late");
    let scenario = SMALL.replace("'all-to-all'\nbytes = '20KB'", "'trace'\nfile = 'flows.txt'");
    folder.write("trace.toml", scenario);
    let events = |gap: &str| {
        folder.write("flows.txt", format!("2\n0 5 3 100 5000 2\n3 1 3 100 700 2.{gap}\n"));
        let report = folder.run(&["sim", "run", "trace.toml", "--json"]).good().json();
        report["events"].as_u64().expect("a number")
    };
    // Waiting costs no events; timers may.
    let (soon, late) = (events("001"), events("9"));
    assert!(soon.abs_diff(late) < 5, "{soon} {late}");
}

#[test]
fn a_trace_is_read_beside_its_scenario() {
    let folder = Folder::new("sim-trace");
    let scenario = SMALL.replace("'all-to-all'\nbytes = '20KB'", "'trace'\nfile = 'flows.txt'");
    folder.write("trace.toml", scenario);
    folder.write("flows.txt", "2\n0 5 3 100 5000 0\n3 1 3 100 700 0.000002\n");
    let report = folder.run(&["sim", "run", "trace.toml", "--json"]).good().json();
    assert_eq!((&report["flows"], &report["failed"]), (&2.into(), &0.into()));
    folder.write("flows.txt", "2\n0 5 3 100 5000 0\n3 1 3 100 700\n");
    folder.run(&["sim", "run", "trace.toml"]).failed(2, "flows.txt is no trace: line 3", "");
    folder.write("flows.txt", "1\n0 99 3 100 5000 0\n");
    folder.run(&["sim", "run", "trace.toml"]).failed(2, "needs 100 hosts", "");
}

#[test]
fn a_collector_tells_hosts_of_watermarks() {
    let folder = Folder::new("sim-run-watermarks");
    folder.write("small.toml", SMALL.replace("20KB", "500KB"));
    let slowdown = |settings: &[&str]| {
        let args = ["sim", "run", "small.toml", "--json", "--set", "switches.ecn=none"];
        let report = folder.run(&[&args[..], settings].concat()).good().json();
        assert_eq!(report["unfinished"], 0);
        report["slowdowns"].clone()
    };
    let told = ["--set", "switches.watermarks=20us", "--set", "switches.watermarks_delay=5us"];
    assert_ne!(slowdown(&[]), slowdown(&told), "nobody was told");
}

#[test]
fn what_is_no_scenario_is_refused_with_its_place() {
    let folder = Folder::new("sim-run-refused");
    let refused = |from: &str, to: &str, error: &str| {
        folder.write("bad.toml", SMALL.replace(from, to));
        let ran = folder.run(&["sim", "run", "bad.toml"]);
        ran.failed(2, error, "");
    };
    refused("bytes", "octets", "unknown field `octets`");
    let switches = |line: &str| format!("[switches]\n{line}\n[workload]");
    let often = switches("watermarks = '1us'");
    refused(
        "[workload]",
        &often,
        "switches.watermarks is 1000ns, 500ns late; it can be 10us to 100ms",
    );
    let alone = switches("watermarks_delay = '1ms'");
    refused("[workload]", &alone, "switches.watermarks_delay needs switches.watermarks");
    refused("'20KB'", "true", "line 4: a text with a unit is expected, not boolean");
    refused("leaf-spine:2x2x4", "bcube:2x1", "has several links");
    refused("[workload]", "fabric = '0Gbit'\n[workload]", "whole number of kbit/s");
    refused("'20KB'", "'20 apples'", "'apples' is no unit");
    refused("'20KB'", "'0'", "has 0 bytes");
    refused("all-to-all", "some-to-all", "unknown variant `some-to-all`");
    refused("leaf-spine:2x2x4", "leaf-spine:2x2", "is not a topology rule");
    refused("rule", "file", "cannot read");
    refused("[workload]", "host = '0Gbit'\n[workload]", "whole number of kbit/s");
    refused("[workload]", "[transport]\nmtu = 1500\n[workload]", "transport.mtu is 1500");
    refused(
        "[workload]",
        "[transport]\ncontrol = 'cubic'\n[workload]",
        "no congestion control 'cubic'",
    );
    refused(
        "[workload]",
        "[switches]\nport_buffer = '1MB'\n[workload]",
        "switches.port_buffer drops",
    );
    refused("[workload]", "[switches]\nclasses = 9\n[workload]", "switches.classes is 9");
    refused("'all-to-all'", "'incast'\nsenders = 8", "needs 9 hosts");
    folder.write("small.toml", SMALL);
    let set = |setting: &str| folder.run(&["sim", "run", "small.toml", "--set", setting]);
    set("transport.control=nothing").failed(2, "no congestion control 'nothing'", "");
    set("workload.kind.name=1").failed(2, "kind is a value and no table", "");
    set("transport.control").failed_usage();
    folder.run(&["sim", "run", "."]).failed(2, ". is not a file", "");
    folder.run(&["sim", "run", "nowhere.toml"]).failed(2, "cannot read nowhere.toml", "");
    // It ends at its deadline, and says what is missing.
    let ran = folder.run(&["sim", "run", "small.toml", "--set", "run.deadline=2us"]);
    assert_eq!(ran.exit, Some(1), "{ran:?}");
    assert!(ran.stdout.contains("56 flows unfinished"), "{}", ran.stdout);
}

#[test]
fn what_is_shipped_can_be_run() {
    let folder = Folder::new("sim-shipped");
    // One of them to its end.
    let ring = shipped().join("ring-allreduce.toml");
    let ring = ring.to_str().expect("a name");
    let args = ["sim", "run", ring, "--set", "workload.bytes=160KB", "--json"];
    assert_eq!(folder.run(&args).good().json()["flows"], 480);
    let mut count = 0;
    for entry in std::fs::read_dir(shipped()).expect("scenarios") {
        let path = entry.expect("a scenario").path();
        if path.is_dir() {
            continue;
        }
        let name = path.to_str().expect("a name");
        // The network and the flows of each are made, and the first microsecond is run.
        let ran = folder.run(&["sim", "run", name, "--set", "run.deadline=1us"]);
        assert!(ran.exit == Some(1) && ran.stdout.contains("unfinished"), "{name}: {ran:?}");
        count += 1;
    }
    assert!(count >= 5, "{count}");
}
