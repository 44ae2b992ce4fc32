//! `dquant sim run` and `sweep`: scenarios from files, what they say, and what is refused with its
//! place.

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
            "queues.svg" => {
                picture.matches("<polyline").count() - picture.matches("points=\"\"").count()
            }
            "slowdowns.svg" => picture.matches("<circle").count(),
            _ => picture.matches("<path stroke=").count(),
        };
        let expected = match name {
            "links.svg" => 8 + 4,
            "queues.svg" => 3,
            _ => 2,
        };
        assert_eq!(shown, expected, "{name}: {picture}");
    }
}

/// [`SMALL`], longer, with a fault of these lines.
fn failing(fault: &str) -> String {
    let longer = SMALL.replace("20KB", "400KB");
    let fast = "[transport]\ntimeout = '1ms'\nretries = 3\n[switches]\ndetection = '50us'\n";
    format!("{fast}{longer}\n[[faults]]\n{fault}\n")
}

#[test]
fn faults_are_reported_and_drawn() {
    let folder = Folder::new("sim-run-faults");
    let fault = "kind = 'link-down'\nlink = 'leaf0 -> spine1'\nat = '20us'\nfor = '100us'\nevery = '300us'\ntimes = 2";
    folder.write("failing.toml", failing(fault));
    let args = ["sim", "run", "failing.toml", "--plot", "pictures"];
    let report = folder.run(&[&args[..], &["--json"]].concat()).good().json();
    let faults = &report["faults"];
    assert_eq!((&faults["begun"], &report["unfinished"]), (&2.into(), &0.into()), "{faults}");
    assert_eq!(faults["planned"][1]["from_ns"], 320_000);
    assert_eq!(faults["planned"][1]["until_ns"], 420_000);
    assert_eq!(faults["planned"][1]["place"], "leaf0 -> spine1");
    assert!(faults["lost"]["link down"].as_u64() > Some(0), "{faults}");
    assert!(faults["reroutes"].as_u64() >= Some(2), "{faults}");
    assert_eq!(faults["recovery"]["count"], faults["hits"], "{faults}");
    let text_report = folder.run(&args).good().stdout;
    assert!(
        text_report.contains("link-down leaf0 -> spine1 from 0.320 to 0.420 ms"),
        "{text_report}"
    );
    let picture = text(&folder, "pictures/queues.svg");
    assert_eq!(
        picture.matches("fill-opacity=\"0.15\"><title>link-down").count(),
        3 * 2,
        "{picture}"
    );
    // Without the fault, its seed sends the same flows.
    folder.write("small.toml", failing(fault).split("[[faults]]").next().expect("text"));
    let whole = folder.run(&["sim", "run", "small.toml", "--json"]).good().json();
    assert_eq!((&whole["faults"], &whole["flows"]), (&serde_json::Value::Null, &report["flows"]));
    // Later ones are set by their place in the list.
    let later = ["sim", "run", "failing.toml", "--set", "faults.0.at=40us", "--json"];
    assert_eq!(folder.run(&later).good().json()["faults"]["planned"][0]["from_ns"], 40_000);
    let beyond = ["sim", "run", "failing.toml", "--set", "faults.1.at=40us"];
    folder.run(&beyond).failed(2, "faults is a list of 1", "");
}

#[test]
fn flows_that_a_fault_cuts_off_are_named_and_the_run_ends() {
    let folder = Folder::new("sim-run-cut");
    folder.write("cut.toml", failing("kind = 'port-down'\nport = 'host3:1'\nat = '30us'"));
    let ran = folder.run(&["sim", "run", "cut.toml"]);
    assert_eq!(ran.exit, Some(1), "{ran:?}");
    let text = &ran.stdout;
    assert!(
        text.contains("-> host3, 400.0 kB: retries exceeded, and no way led to its receiver"),
        "{text}"
    );
    let report = folder.run(&["sim", "run", "cut.toml", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&report.stdout).expect("JSON");
    // 7 to it and 7 from it, of 56.
    assert_eq!((&report["failed"], &report["unfinished"]), (&14.into(), &0.into()), "{report}");
    assert_eq!(report["missing"].as_array().map(Vec::len), Some(14));
    let ended = report["simulated_ns"].as_u64().expect("a number");
    assert!(ended < 200_000_000, "long before the deadline: {ended}");
}

#[test]
fn random_faults_are_drawn_from_the_seed() {
    let folder = Folder::new("sim-run-random");
    folder.write(
        "random.toml",
        failing("kind = 'link-down'\nlink = 'random'\ncount = 3\nat = '20us'"),
    );
    let places = |seed: &str| {
        let args = ["sim", "run", "random.toml", "--json", "--set", seed];
        let report: serde_json::Value =
            serde_json::from_str(&folder.run(&args).stdout).expect("JSON");
        let planned = report["faults"]["planned"].as_array().expect("faults").clone();
        planned.iter().map(|one| one["place"].to_string()).collect::<Vec<_>>()
    };
    let first = places("run.seed=1");
    assert_eq!(first, places("run.seed=1"));
    assert!(first.iter().all(|place| place.contains("spine")), "{first:?}");
    assert!(first[0] != first[1] && first[1] != first[2] && first[0] != first[2], "{first:?}");
    assert!((2..8).any(|seed| places(&format!("run.seed={seed}")) != first));
}

#[test]
fn faults_that_cannot_be_are_refused() {
    let folder = Folder::new("sim-run-bad-faults");
    let refused = |fault: &str, error: &str| {
        folder.write("bad.toml", failing(fault));
        folder.run(&["sim", "run", "bad.toml"]).failed(2, error, "");
    };
    let link = "kind = 'link-down'\nlink = 'leaf0 -> spine0'\n";
    refused("kind = 'flood'\nat = '1us'", "unknown variant `flood`");
    refused("kind = 'link-down'\nat = '1us'", "fault 1 (link-down): 'link' is missing");
    refused("kind = 'link-down'\nlink = 'leaf0'\nat = '1us'", "'leaf0' is no link");
    refused("kind = 'link-down'\nlink = 'leaf0 -> leaf9'\nat = '1us'", "no host or switch 'leaf9'");
    refused("kind = 'link-down'\nlink = 'leaf0 -> leaf1'\nat = '1us'", "no link joins");
    refused(
        "kind = 'link-down'\nlink = 'leaf0:9 -> spine0'\nat = '1us'",
        "has ports 1 to 6, not 9",
    );
    refused(
        "kind = 'link-down'\nswitch = 'leaf0'\nat = '1us'",
        "it strikes a link, and has no 'switch'",
    );
    refused(
        "kind = 'link-down'\nlink = 'random'\ncount = 9\nat = '1us'",
        "there are 4 links between",
    );
    refused("kind = 'switch-down'\nswitch = 'host0'\nat = '1us'", "'host0' is a host");
    refused("kind = 'port-down'\nport = 'leaf0'\nat = '1us'", "'leaf0' is no port");
    refused(&format!("{link}at = '5us'\nuntil = '5us'"), "it ends before it begins");
    refused(&format!("{link}at = '5us'\nfor = '0us'"), "it ends when it begins");
    refused(&format!("{link}at = '5us'\nfor = '1us'\nuntil = '9us'"), "both 'for' and 'until'");
    refused(
        &format!("{link}at = '5us'\nfor = '9us'\nevery = '9us'\ntimes = 2"),
        "'for' is not below 'every'",
    );
    refused(&format!("{link}at = '5us'\ntimes = 2"), "'times' needs 'every'");
    refused(&format!("{link}at = '5us'\nfor = '1us'\nevery = '9us'"), "'every' needs 'times'");
    refused(
        &format!("{link}at = '5us'\nfor = '1ns'\nevery = '2ns'\ntimes = 5000"),
        "more than 4096 faults",
    );
    refused(&format!("{link}at = '5us'\ncount = 2"), "'count' is for random places");
    refused(&format!("{link}at = '5us'\nby = 2"), "belongs to slow-link");
    let slow = link.replace("link-down", "slow-link");
    refused(
        &format!("{slow}at = '5us'"),
        "'by', what the rate of the link is divided by, is missing",
    );
    refused(&format!("{slow}at = '5us'\nby = 1"), "'by' is 1");
    let errors = link.replace("link-down", "bit-errors");
    refused(&format!("{errors}at = '5us'\nrate = 0.1"), "'rate' is 0.1");
    refused(&format!("{link}at = '5 apples'"), "'apples' is no unit");
}

#[test]
fn hosts_with_several_ports_use_their_rails() {
    let folder = Folder::new("sim-run-rails");
    let rail = SMALL.replace("leaf-spine:2x2x4", "rail:2x2x4x4");
    folder.write("rail.toml", rail.replace("20KB", "400KB"));
    let run = |setting: &str| {
        let args = ["sim", "run", "rail.toml", "--json", "--set", setting];
        folder.run(&args).good().json()
    };
    let (one, all) = (run("transport.rails=hash"), run("transport.rails=all"));
    assert_eq!(
        (&one["hosts"], &one["ports"], &one["switches"]),
        (&4.into(), &4.into(), &12.into())
    );
    assert_eq!((&one["flows"], &all["flows"]), (&12.into(), &48.into()));
    assert!(all["simulated_ns"].as_u64() < one["simulated_ns"].as_u64(), "{one} {all}");
    // A port that goes down cuts off what is bound to it.
    let down = "[transport]\ntimeout = '1ms'\nretries = 2\nrails = 'all'\n[[faults]]\nkind = 'port-down'\nport = 'host2:3'\nat = '0us'\n";
    folder.write("down.toml", format!("{}\n{down}", rail.replace("20KB", "400KB")));
    let ran = folder.run(&["sim", "run", "down.toml"]);
    assert_eq!(ran.exit, Some(1), "{ran:?}");
    assert!(
        ran.stdout.contains("-> host2:3, 100.0 kB: retries exceeded, and no way led"),
        "{ran:?}"
    );
    assert!(ran.stdout.contains("0 flows unfinished, 6 failed"), "{ran:?}");
}

#[test]
fn servers_of_a_bcube_forward_where_the_scenario_says_so() {
    let folder = Folder::new("sim-run-bcube");
    let bcube = SMALL.replace("'leaf-spine:2x2x4'", "'bcube:2x1'\nrelay = true");
    folder.write("bcube.toml", &bcube);
    let report = folder.run(&["sim", "run", "bcube.toml", "--json"]).good().json();
    assert_eq!(
        (&report["flows"], &report["hosts"], &report["switches"]),
        (&12.into(), &4.into(), &4.into())
    );
    let balanced = ["sim", "run", "bcube.toml", "--set", "switches.routing=balanced"];
    folder.run(&balanced).failed(2, "hosts do not forward", "");
    folder.write("direct.toml", bcube.replace("relay = true", ""));
    let direct = ["sim", "run", "direct.toml"];
    folder.run(&direct).failed(2, "are not joined by switches", "topology.relay = true");
    // Between servers at one switch, no other is needed.
    folder.write("flows.txt", "2\n0 1 3 100 5000 0\n0 2 3 100 700 0\n");
    let trace = bcube
        .replace("relay = true", "")
        .replace("'all-to-all'\nbytes = '20KB'", "'trace'\nfile = 'flows.txt'");
    folder.write("trace.toml", trace);
    folder.run(&["sim", "run", "trace.toml"]).good();
}

#[test]
fn every_kind_of_topology_runs() {
    let folder = Folder::new("sim-run-shapes");
    let shapes = [
        "vl2:4x4x2",
        "torus:3x3:1",
        "dragonfly:2x1x1",
        "random:6x3x1",
        "rail:2x2x2x2",
        "fat-tree:2",
    ];
    for shape in shapes {
        for routing in ["ecmp", "balanced"] {
            let scenario = SMALL.replace("leaf-spine:2x2x4", shape);
            folder.write("shape.toml", format!("[switches]\nrouting = '{routing}'\n{scenario}"));
            let report = folder.run(&["sim", "run", "shape.toml", "--json"]).good().json();
            assert_eq!(report["unfinished"], 0, "{shape} {routing}");
        }
    }
}

#[test]
fn roce_v1_has_longer_frames() {
    let folder = Folder::new("sim-run-v1");
    folder.write("small.toml", SMALL.replace("'all-to-all'", "'incast'\nsenders = 1"));
    let time = |frames: &str| {
        let setting = format!("transport.frames={frames}");
        let args =
            ["sim", "run", "small.toml", "--set", &setting, "--set", "transport.control=off"];
        let report = folder.run(&[&args[..], &["--json"]].concat()).good().json();
        report["simulated_ns"].as_u64()
    };
    assert!(time("ipv4") < time("roce-v1"));
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
    let seeds = ["--set", "run.seed=4"];
    folder.run(&[&args[..], &seeds].concat()).failed(2, "run.seed is given twice", "one option");
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
    let both = switches("buffer = '1MB'\nport_buffer = '1MB'\npfc = false");
    refused("[workload]", &both, "either a buffer or a port_buffer");
    let fixed = switches("routing = 'balanced'\nrerouting = true");
    refused("[workload]", &fixed, "tables of switches.routing balanced stay as they are");
    refused("'20KB'", "true", "line 4: a text with a unit is expected, not boolean");
    refused("leaf-spine:2x2x4", "bcube:2x1", "are not joined by switches");
    refused("[workload]", "relay = true\n[workload]", "no host has several ports");
    let v1 = "[transport]\nframes = 'roce-v1'\n[workload]";
    refused("[workload]", v1, "is dcqcn-mlnx, and transport.frames roce-v1: switches mark none");
    refused("[workload]", &v1.replace("frames", "control = 'hpcc'\nframes"), "stamp none");
    refused(
        "[workload]",
        "[transport]\ntimeout = '3h'\n[workload]",
        "transport.timeout is 8.192us to",
    );
    refused("[workload]", "[transport]\nretries = 8\n[workload]", "transport.retries is 8");
    refused("[workload]", "fabric = '0Gbit'\n[workload]", "'0Gbit' is 0");
    refused("'20KB'", "'20 apples'", "'apples' is no unit");
    refused("'20KB'", "'0'", "has 0 bytes");
    refused("all-to-all", "some-to-all", "unknown variant `some-to-all`");
    refused("leaf-spine:2x2x4", "leaf-spine:2x2", "is not a topology rule");
    refused("rule", "file", "cannot read");
    refused("[workload]", "host = '0Gbit'\n[workload]", "'0Gbit' is 0");
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
