//! `dquant perf --wire xdp`: between two network namespaces, and where AF_XDP is not possible.
//!
//! Namespaces need root and `ip`; without them, or without AF_XDP, the test that uses them reports
//! that and passes.

use std::process::Command;

use super::Folder;
use super::perf::{Server, results};

/// Two namespaces with a link: 10.83.0.1 and .2. Neighbours are known, so no packet waits for one.
pub(super) struct Lab(pub(super) [String; 2]);

fn ip(arguments: &str) -> bool {
    let run = Command::new("ip").args(arguments.split_whitespace()).output();
    run.is_ok_and(|output| output.status.success())
}

impl Lab {
    pub(super) fn new(name: &str) -> Option<Lab> {
        let lab = Lab(["a", "b"].map(|side| format!("{name}{}{side}", std::process::id())));
        let [a, b] = &lab.0;
        let link = format!("link add v0 netns {a} type veth peer name v0 netns {b}");
        let made = ip(&format!("netns add {a}")) && ip(&format!("netns add {b}")) && ip(&link);
        let up = made
            && lab.0.iter().zip([1, 2]).all(|(name, host)| {
                ip(&format!("-n {name} link set v0 address 02:00:00:00:83:0{host}"))
                    && ip(&format!("-n {name} addr add 10.83.0.{host}/24 dev v0"))
                    && ip(&format!("-n {name} link set v0 up"))
            });
        let known = up
            && lab.0.iter().zip([2, 1]).all(|(name, peer)| {
                let entry = format!("lladdr 02:00:00:00:83:0{peer} dev v0 nud permanent");
                ip(&format!("-n {name} neigh replace 10.83.0.{peer} {entry}"))
            });
        known.then_some(lab)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.0.iter().for_each(|name| {
            ip(&format!("netns del {name}"));
        });
    }
}

#[test]
fn both_sides_use_af_xdp_between_namespaces() {
    const TEST: &str = "perf_xdp::both_sides_use_af_xdp_between_namespaces";
    let Some(lab) = Lab::new("dqx") else {
        super::skip::note(TEST, "network namespaces need root and iproute2");
        return;
    };
    let folder = Folder::new("perf-xdp");
    let server = Server::within(&folder, &lab.0[1], "10.83.0.2:4792");
    let runs: [&[&str]; 3] = [
        &["send", "read", "--size", "64,1000", "--wait", "spin"],
        &["write", "--size", "64", "--wait", "sleep"],
        &["send", "--transport", "ud", "--size", "64", "--mode", "latency"],
    ];
    for options in runs {
        let client = [options, &["--wire", "xdp", "--mtu", "1024"]].concat();
        for one in results(server.run_within(&lab.0[0], &client)) {
            let fallbacks = one["fallbacks"].as_array().expect("a list");
            if let Some(why) = fallbacks.first() {
                super::skip::note(TEST, &format!("no AF_XDP here: {why}"));
                return;
            }
            assert_eq!(one["path"], "xdp", "{one}");
        }
    }
    let by_default = results(server.run_within(&lab.0[0], &["send", "--size", "64"]));
    assert!(by_default.iter().all(|one| one["path"] == "udp"), "{by_default:?}");
}

#[test]
fn a_side_that_cannot_takes_udp_and_says_why() {
    let folder = Folder::new("perf-xdp-not");
    let server = Server::start(&folder);
    let ran = server.run(&["write", "--size", "64,4096", "--mode", "latency", "--wire", "xdp"]);
    // Once for each side, not for each test.
    for side in ["this side", "the server"] {
        assert_eq!(ran.stderr.matches(side).count(), 1, "{}", ran.stderr);
    }
    for one in results(ran) {
        assert_eq!(one["path"], "udp", "{one}");
        assert_eq!(one["fallbacks"].as_array().map(Vec::len), Some(2), "{one}");
        let why = one["fallbacks"].to_string();
        let reason = if cfg!(feature = "xdp") { "127.0.0.1" } else { "feature `xdp`" };
        assert!(why.contains(reason), "{why}");
    }
    server.says("no AF_XDP: ");
    folder.run(&["perf", "127.0.0.1", "--wire", "xdp", "--device", "x"]).failed_usage();
    folder.run(&["perf", "127.0.0.1", "--wire", "dpdk"]).failed_usage();
}
