//! Several clients, status, and the end of daemons.

use std::fs;

use xio::dataset::Dtype;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::harness::{Cat, World};

const PLAN: &str = "window(1024) | shuffle(1, blocks=2) | narrow(u16) | batch(16)";
const ENDLESS: &[&str] = &["--plan", PLAN, "--slots", "2", "--slot-size", "64KiB"];

#[test]
fn several_clients_of_one_dpu_get_their_own_bytes() {
    let Some(world) = World::new("several_clients_of_one_dpu") else {
        return;
    };
    let web = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(600_000, 1));
    let code = Corpus::flat(&world.data("code.bin"), Dtype::U32, tokens(500_000, 2));
    let (target, other) = (world.target(&[]), world.target(&[]));
    let dpu = world.dpu(&[]);
    let blended = "window(512) | shuffle(6) | blend(web=1, code=2) | batch(9) | narrow(u16)";
    let plain = "window(333) | batch(11)";
    let args = |plan| ["--plan", plan, "--batches", "250", "--slot-size", "64KiB"];
    // Two on one target, one on another, one that stands still in the middle of it all.
    let mut still = Cat::through(&world, &dpu, &target.url("web"), ENDLESS);
    let head = still.read(300_000);
    let mut first = Cat::through(&world, &dpu, &target.url("web"), &args(PLAN));
    let mut second = Cat::through(&world, &dpu, &other.url("code"), &args(plain));
    let mut got = [Vec::new(), Vec::new()];
    for _ in 0..10 {
        got[0].extend(first.read(100_000));
        got[1].extend(second.read(100_000));
    }
    got[0].extend(first.finish().good().stdout);
    got[1].extend(second.finish().good().stdout);
    assert_same(&got[0], &expected(PLAN, &[&web], 0..250));
    assert_same(&got[1], &expected(plain, &[&code], 0..250));
    let ran = Cat::through(&world, &dpu, &other.url(""), &args(blended)).finish().good();
    assert_same(&ran.stdout, &expected(blended, &[&web, &code], 0..250));
    let want = expected(PLAN, &[&web], 0..10);
    assert_same(&head, &want[..300_000]);
}

#[test]
fn daemons_end_when_asked_and_leave_nothing() {
    let Some(world) = World::new("daemons_end_when_asked") else {
        return;
    };
    Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(786_432, 1));
    let (mut target, mut dpu) = (world.target(&[]), world.dpu(&[]));
    let mut cat = Cat::through(&world, &dpu, &target.url("web"), ENDLESS);
    cat.read(100_000);
    assert!(dpu.socket().exists());
    assert_eq!(dpu.terminate().code(), Some(0), "{}", dpu.stderr());
    assert!(!dpu.socket().exists());
    cat.finish().failed(3, &["DPU daemon"], "start it again");

    let mut alone =
        Cat::alone(&world, &target.url("web"), &[ENDLESS, &["--reconnect", "1s"]].concat());
    alone.read(100_000);
    assert_eq!(target.terminate().code(), Some(0), "{}", target.stderr());
    alone.finish().failed(3, &["target", target.control()], "--reconnect");
    for daemon in [&target, &dpu] {
        assert!(!daemon.left_children());
        assert_eq!(daemon.stderr(), "");
    }

    // With nobody connected, and again on the same addresses.
    for daemon in [&mut target, &mut dpu] {
        daemon.restart(&world);
        assert_eq!(daemon.terminate().code(), Some(0), "{}", daemon.stderr());
    }
}

#[test]
fn a_status_tells_role_addresses_and_counters() {
    let Some(world) = World::new("a_status_tells_role_addresses_and_counters") else {
        return;
    };
    Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(100_000, 1));
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let args = ["--plan", "window(1000) | narrow(u16)", "--batches", "100"];
    Cat::through(&world, &dpu, &target.url("web"), &args).finish().good();
    for (daemon, role, counter) in
        [(&target, "target", "target.written_bytes"), (&dpu, "dpu", "stream.delivered_bytes")]
    {
        let status = daemon.status(&world);
        assert_eq!(status.0["schema"], "dquant.status/1");
        assert_eq!(status.0["role"], role);
        assert_eq!(status.0["control"], daemon.control());
        assert_eq!(status.0["roce"], daemon.roce().to_string());
        let cpu = |kind: &str| status.0[kind].as_u64().expect("a number");
        assert!(cpu("cpu_user_ns") + cpu("cpu_system_ns") > 0);
        assert!(status.0["resident_bytes"].as_u64() > Some(1 << 20));
        assert!(status.counter(counter) >= 200_000, "{status:?}");
        let text = world.run(&["status", "--control", daemon.control()]).good().stdout;
        let text = String::from_utf8(text).expect("text");
        assert!(text.starts_with(role) && text.contains(counter), "{text}");
        assert!(!text.contains("dropped_on_purpose"), "zeros are left out: {text}");
    }
    // Nothing arrives that was not sent, and nothing is delivered that did not arrive. What was
    // asked for ahead when the stream ended is in the first only.
    let (sent, fed) = (target.status(&world), dpu.status(&world));
    let arrived = fed.counter("stream.wire_bytes");
    assert!(sent.counter("target.written_bytes") >= arrived);
    assert!(arrived >= fed.counter("stream.delivered_bytes"));
}

#[test]
fn output_goes_where_it_is_asked_for() {
    let Some(world) = World::new("output_goes_where_it_is_asked_for") else {
        return;
    };
    let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(100_000, 1));
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let plan = "window(1000) | narrow(u16)";
    let args = ["--plan", plan, "--batches", "20", "-o", "out.u16", "--json"];
    let ran = Cat::through(&world, &dpu, &target.url("web"), &args).finish().good();
    let report: serde_json::Value = serde_json::from_slice(&ran.stdout).expect("one JSON object");
    let want = expected(plan, &[&corpus], 0..20);
    assert_eq!(report["schema"], "dquant.cat/1");
    assert_eq!(report["batches"], 20);
    assert_eq!(report["bytes"], want.len());
    assert_same(&fs::read(world.path("out.u16")).expect("it was written"), &want);
    // A reader that goes away is no failure of the stream.
    let mut cat = Cat::through(&world, &dpu, &target.url("web"), ENDLESS);
    cat.read(1000);
    cat.hang_up().good();
    let nowhere = ["--plan", plan, "-o", "/nonexistent/out"];
    let ran = Cat::through(&world, &dpu, &target.url("web"), &nowhere).finish();
    assert_eq!(ran.exit, Some(2), "{}", ran.stderr);
    assert!(ran.stderr.contains("/nonexistent/out"), "{}", ran.stderr);
}
