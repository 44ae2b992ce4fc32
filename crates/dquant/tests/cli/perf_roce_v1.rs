//! `dquant perf --wire roce-v1`: between two network namespaces, and where RoCEv1 is not possible.
//!
//! Namespaces need root and `ip`; without them the test that uses them reports that and passes.

use super::Folder;
use super::perf::{Server, results};
use super::perf_xdp::Lab;

#[test]
fn both_sides_use_roce_v1_between_namespaces() {
    let Some(lab) = Lab::new("dqv") else {
        let test = "perf_roce_v1::both_sides_use_roce_v1_between_namespaces";
        return super::skip::note(test, "network namespaces need root and iproute2");
    };
    let folder = Folder::new("perf-roce-v1");
    let server = Server::within(&folder, &lab.0[1], "10.83.0.2:4792");
    let runs: [&[&str]; 4] = [
        &["send", "write", "read", "atomic", "--size", "8"],
        &["send", "write", "read", "--size", "100000", "--mode", "bandwidth", "--qps", "4"],
        &["send", "write", "--transport", "uc", "--size", "64,5000"],
        &["send", "--transport", "ud", "--size", "64,1000"],
    ];
    for options in runs {
        let client = [options, &["--wire", "roce-v1"]].concat();
        for one in results(server.run_within(&lab.0[0], &client)) {
            assert_eq!(one["path"], "roce-v1", "{one}");
            assert!(one["mtu"].as_u64() <= Some(1500 - 84), "{one}");
            assert_eq!(one["fallbacks"].as_array().map(Vec::len), Some(0), "{one}");
        }
    }
    // The next client chooses for itself.
    let by_default = results(server.run_within(&lab.0[0], &["send", "--size", "64"]));
    assert!(by_default.iter().all(|one| one["path"] == "udp"), "{by_default:?}");
}

/// UDP does not take its place: the other side would not understand it.
#[test]
fn where_it_is_not_possible_the_reason_and_what_to_do_are_said() {
    let folder = Folder::new("perf-roce-v1-not");
    let server = Server::start(&folder);
    let ran = server.run(&["write", "--size", "64", "--wire", "roce-v1"]);
    ran.failed_usage();
    let why = "no RoCEv1: no Ethernet interface has the address 127.0.0.1";
    assert!(ran.stderr.contains(why) && ran.stderr.contains("ip address"), "{}", ran.stderr);
    folder.run(&["perf", "127.0.0.1", "--wire", "roce-v1", "--device", "x"]).failed_usage();
}
