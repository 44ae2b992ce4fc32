//! `dquant subnet plan`: rules and files, what is refused, and the same tables every time.

use super::Folder;

#[test]
fn a_torus_needs_lanes_and_the_report_names_a_credit_loop() {
    let folder = Folder::new("subnet-torus");
    let run = || {
        let mut report = folder.run(&["subnet", "plan", "torus:6x6:4", "--json"]).good().json();
        for engine in report["engines"].as_array_mut().expect("engines") {
            engine["wall_ns"] = 0.into();
        }
        report
    };
    let report = run();
    assert_eq!(report["schema"], "dquant.subnet.plan/1");
    assert_eq!((&report["end_ports"], &report["channels"]), (&144.into(), &144.into()));
    let engines = report["engines"].as_array().expect("engines");
    let names: Vec<&str> = engines.iter().filter_map(|one| one["engine"].as_str()).collect();
    assert_eq!(names, ["min-hop", "up-down", "dor", "balanced"]);
    let dor = &engines[2];
    assert_eq!((&dor["most_load"], &dor["longer"]), (&576.into(), &0.into()));
    assert!(dor["credit_loop"].as_array().is_some_and(|switches| switches.len() > 2), "{dor}");
    assert!(engines[1]["credit_loop"].is_null() && engines[1]["vls"] == 1);
    let unsuitable = report["unsuitable"][0].as_str().expect("fat-tree");
    assert!(unsuitable.starts_with("engine fat-tree: "), "{unsuitable}");
    assert_eq!(run(), report);
}

#[test]
fn a_topology_goes_through_a_file_unchanged() {
    let folder = Folder::new("subnet-file");
    let plan = |topology: &str, options: &[&str]| {
        let args =
            [&["subnet", "plan", topology, "--engine", "balanced", "--json"], options].concat();
        folder.run(&args).good().json()
    };
    let made = plan("fat-tree:4", &["--write", "tree.net"]);
    let read = plan("tree.net", &[]);
    for field in ["most_load", "mean_hops", "vls", "links_used"] {
        assert_eq!(made["engines"][0][field], read["engines"][0][field], "{field}");
    }
    let text = folder.run(&["subnet", "plan", "tree.net"]).good().stdout;
    assert!(text.contains("16 hosts, 20 switches, 48 links"), "{text}");
}

#[test]
fn a_published_cluster_is_read_and_a_topology_is_drawn() {
    let folder = Folder::new("subnet-formats");
    folder.write("topo.csv", "ip,DSW,PSW,ASW\na,G,P1,S1\nb,G,P1,S1\nc,G,P1,S2\nd,G,P2,S1\n");
    let args = ["subnet", "plan", "topo.csv", "--engine", "fat-tree", "--write", "cluster.svg"];
    let text = folder.run(&args).good().stdout;
    assert!(text.contains("4 hosts, 9 switches, 16 links"), "{text}");
    let svg = String::from_utf8(folder.read("cluster.svg")).expect("text");
    assert!(svg.starts_with("<svg ") && svg.contains("<title>ASW-P1-S1</title>"), "{svg}");
    folder.write("torn.csv", "ip,DSW,PSW,ASW\na,G,P1,S1\nb,H,P1,S1\n");
    let torn = folder.run(&["subnet", "plan", "torn.csv"]);
    torn.failed(2, "line 3: P1 is below H, and was below G", "");
}

#[test]
fn what_cannot_be_routed_is_said() {
    let folder = Folder::new("subnet-refused");
    let plan = |topology: &str| folder.run(&["subnet", "plan", topology]);
    plan("fat-tree:7").failed(2, "the number of ports is even", "");
    plan("mobius:7").failed(
        2,
        "'mobius:7' is not a topology rule",
        "there is no file of that name",
    );
    let bcube = plan("bcube:4x1");
    assert!(bcube.exit == Some(1) && bcube.stdout.contains("hosts do not forward"), "{bcube:?}");
    folder.run(&["subnet", "plan", "bcube:4x1", "--engine", "minhop"]).failed(
        2,
        "do not forward",
        "",
    );
    folder.run(&["subnet", "plan", "torus:3x3:1", "--engine", "fat-tree"]).failed(2, "level 0", "");
    folder.run(&["subnet", "plan", "fat-tree:4", "--write", "x.png"]).failed(
        2,
        ".net, .toml, .dot",
        "",
    );
    folder.write("bad.net", "Switch 2 \"s\"\n[1] \"x\"[1]\n");
    plan("bad.net").failed(2, "line 2: there is no node 'x'", "");
}

#[test]
fn fat_trees_are_written_for_htsim_and_others_are_refused() {
    let folder = Folder::new("subnet-htsim");
    let write = |topology: &str| {
        folder.run(&["subnet", "plan", topology, "--engine", "min-hop", "--write", "x.topo"])
    };
    write("fat-tree:8").good();
    let text = String::from_utf8(folder.read("x.topo")).expect("text");
    assert!(text.contains("Nodes 128\nTiers 3\nPodsize 16\n"), "{text}");
    write("rail:2x4x4x2").failed(2, "host 'host0' has 4 links", ".ns3 and .net take any");
    write("torus:3x3:1").failed(2, "csg-htsim cannot build this topology", "two or three tiers");
    // What was there before is kept.
    assert_eq!(String::from_utf8(folder.read("x.topo")).expect("text"), text);
}

#[test]
fn tables_are_written_as_opensm_does() {
    let folder = Folder::new("subnet-tables");
    let args = ["subnet", "plan", "leaf-spine:2x1x2", "--tables", "lfts"];
    folder.run(&args).failed(2, "--tables takes one engine", "name it with --engine");
    let two = folder.run(&[&args[..], &["--engine", "min-hop,dor"]].concat());
    two.failed(2, "--tables takes one engine", "name it with --engine");
    folder.run(&[&args[..], &["--engine", "min-hop"]].concat()).good();
    let text = String::from_utf8(folder.read("lfts")).expect("text");
    assert_eq!(text.matches("7 valid lids dumped").count(), 3, "{text}");
    let own = "0x0001 002 : (Channel Adapter portguid 0x0000000000100001: 'host0')";
    assert!(
        text.contains(own) && text.contains("of switch guid 0x0000000000200001 (leaf0):"),
        "{text}"
    );
}

#[test]
fn a_machine_without_infiniband_is_told_so() {
    let folder = Folder::new("subnet-nothing");
    for verb in ["discover", "sweep", "manage"] {
        let args = ["subnet", verb, "--library", "/no/such/libibumad.so"];
        folder.run(&args).failed(2, "no InfiniBand port", "install libibumad3");
    }
    for endless in [["--partitions", "/dev/zero"], ["--lids", "/dev/zero"]] {
        let args = [&["subnet", "manage"], &endless[..]].concat();
        folder.run(&args).failed(2, "/dev/zero is not a file", "");
    }
    let open = ["subnet", "manage", "--m-key", "0", "--m-key-protection", "2"];
    folder.run(&open).failed(2, "protects nothing", "not 0");
}
