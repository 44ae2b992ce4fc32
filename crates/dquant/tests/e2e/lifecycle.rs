//! Several clients, status, and the end of daemons.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::net::UnixDatagram;

use rustix::process::Signal;
use xio::dataset::Dtype;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::harness::{Cat, Daemon, PATIENCE, World, eventually, fresh_ip, path};

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
    // Two on one target, one on another, and one that stalls meanwhile.
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
    cat.finish().failed(3, &["the DPU daemon was stopped"], "start it again");
    assert_said(&dpu.stderr(), &["stopping on SIGTERM"]);
    assert_said(&dpu.stderr(), &["stream 1 ends, the DPU stops", "batches"]);

    let mut alone =
        Cat::alone(&world, &target.url("web"), &[ENDLESS, &["--reconnect", "1s"]].concat());
    alone.read(100_000);
    assert_eq!(target.terminate().code(), Some(0), "{}", target.stderr());
    alone.finish().failed(3, &["target", target.control()], "--reconnect");
    assert_said(&target.stderr(), &["stopping on SIGTERM"]);
    assert_said(&target.stderr(), &["session", "ends: the target stops", "blocks"]);
    for daemon in [&target, &dpu] {
        assert!(!daemon.left_children());
        let lines = daemon.stderr();
        assert!(lines.lines().all(|line| line.starts_with("dquant: s")), "{lines}");
    }

    // Without connections, and then on the same addresses.
    for daemon in [&mut target, &mut dpu] {
        daemon.restart(&world);
        assert_eq!(daemon.terminate().code(), Some(0), "{}", daemon.stderr());
    }
}

/// Lines of a daemon, once it has written one that contains all of `last`.
fn lines_until(daemon: &Daemon, last: &[&str]) -> String {
    eventually(&format!("a line that says {last:?}"), || {
        let lines = daemon.stderr();
        let said = |line: &str| last.iter().all(|part| line.contains(part));
        lines.lines().any(said).then_some(lines)
    })
}

#[track_caller]
fn assert_said(lines: &str, parts: &[&str]) {
    let said = |line: &str| parts.iter().all(|part| line.contains(part));
    assert!(lines.lines().any(said), "no line says {parts:?}: {lines}");
}

#[test]
fn daemons_tell_a_service_manager_that_they_serve() {
    let Some(world) = World::new("daemons_tell_a_service_manager") else {
        return;
    };
    let name = world.socket("notify");
    let manager = UnixDatagram::bind(&name).expect("the folder is writable");
    manager.set_read_timeout(Some(PATIENCE)).expect("a socket");
    let root = world.root();
    let at = format!("{}:0", fresh_ip());
    let serve = ["serve", "--root", path(&root), "--control", &at, "--roce", &at];
    let socket = world.socket("told.sock");
    let dpu = ["dpu", "--socket", path(&socket), "--control", &at, "--roce", &at];
    for args in [&serve[..], &dpu] {
        let mut command = world.program(args);
        command.env("NOTIFY_SOCKET", &name);
        let daemon = Cat::start(&world, command);
        let mut told = [0; 64];
        let bytes = loop {
            match manager.recv(&mut told) {
                // A child of another test has ended.
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                told => break told.expect("it says so"),
            }
        };
        assert_eq!(&told[..bytes], b"READY=1\n");
        daemon.kill();
    }
    // Nobody listens any more: the daemon serves, and says what is wrong.
    drop(manager);
    let mut command = world.program(&serve);
    command.env("NOTIFY_SOCKET", &name);
    let mut daemon = Cat::start(&world, command);
    daemon.read(1);
    let ran = daemon.terminate();
    assert_eq!(ran.exit, Some(0), "{}", ran.stderr);
    assert_said(&ran.stderr, &["warning: NOTIFY_SOCKET", "refused"]);
}

#[test]
fn a_client_may_come_before_its_daemons() {
    let Some(world) = World::new("a_client_may_come_before") else {
        return;
    };
    let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(100_000, 1));
    // Addresses and socket of daemons that are not running yet.
    let (mut target, mut dpu) = (world.target(&[]), world.dpu(&[]));
    let (url, plan) = (target.url("web"), "window(1000) | narrow(u16)");
    target.terminate();
    dpu.terminate();
    let early = Cat::through(&world, &dpu, &url, &["--plan", plan, "--batches", "3"]).finish();
    early.failed(3, &["no DPU daemon"], "dquant dpu");
    let args = ["--plan", plan, "--batches", "3", "--wait", "30s"];
    let cat = Cat::through(&world, &dpu, &url, &args);
    dpu.restart(&world);
    target.restart(&world);
    assert_same(&cat.finish().good().stdout, &expected(plan, &[&corpus], 0..3));
}

#[test]
fn daemons_tell_of_every_stream_and_session() {
    let Some(world) = World::new("daemons_tell_of_every_stream") else {
        return;
    };
    Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(786_432, 1));
    let (mut target, dpu) = (world.target(&[]), world.dpu(&["--reconnect", "1s"]));
    let (url, roce) = (target.url("web"), dpu.roce().to_string());
    let args = ["--plan", PLAN, "--batches", "3"];
    Cat::through(&world, &dpu, &url, &args).finish().good();
    let done = ["stream 1 ends", "closed by the client", "3 batches, 98304 bytes"];
    assert_said(&lines_until(&dpu, &done), &["stream 1 for process", "begins", target.control()]);
    let done = ["session", &roce, "ends: closed by the reader", "bytes"];
    assert_said(&lines_until(&target, &done), &["session", &roce, "begins: web.bin"]);

    // A trainer that leaves early: whole batches are counted, and their bytes.
    let mut early = Cat::through(&world, &dpu, &url, ENDLESS);
    early.read(1000);
    early.hang_up().good();
    let lines = lines_until(&dpu, &["stream 2 ends", "closed by the client"]);
    let line = lines.lines().find(|line| line.contains("stream 2 ends")).expect("just seen");
    let mut numbers = line.split([' ', ',']).filter_map(|word| word.parse::<u64>().ok()).skip(1);
    let (batches, bytes) = (numbers.next().expect("batches"), numbers.next().expect("bytes"));
    assert_eq!(bytes, batches * 32_768, "{line}");

    let unknown = Cat::through(&world, &dpu, &target.url("none"), &args).finish();
    assert_eq!(unknown.exit, Some(2), "{}", unknown.stderr);
    lines_until(&dpu, &["stream refused for process", "no such dataset"]);
    lines_until(&target, &["datasets refused for 127.", "no such dataset"]);
    assert_eq!(dpu.status(&world).counter("dpu.refused.streams"), 1);
    let mut call = world.program(&["status", "--control", target.control()]);
    call.env("DQUANT_TOKEN", "wrong-token");
    assert_eq!(Cat::start(&world, call).finish().exit, Some(2));
    lines_until(&target, &["call from 127.", "refused", "token"]);

    let mut cat = Cat::through(&world, &dpu, &url, ENDLESS);
    cat.read(100_000);
    target.kill();
    cat.finish().failed(3, &["could not be restored"], "--reconnect");
    let lines = lines_until(&dpu, &["stream 3 ends, after its failure"]);
    let lost = ["stream 3 has lost target", target.control(), "(its control connection "];
    assert_said(&lines, &[&lost[..], &["), reconnecting"]].concat());
    assert_said(&lines, &["stream 3 fails", "could not be restored"]);
}

#[test]
fn a_lost_target_is_reported_with_the_reason() {
    let Some(world) = World::new("a_lost_target_is_reported_with_the_reason") else {
        return;
    };
    Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(786_432, 1));
    let (mut target, dpu) = (world.target(&[]), world.dpu(&[]));
    let url = target.url("web");
    let mut cat = Cat::through(&world, &dpu, &url, ENDLESS);
    cat.read(100_000);
    target.terminate();
    lines_until(&dpu, &["stream 1 has lost target", "(it ended the session), reconnecting"]);
    target.restart(&world);
    lines_until(&dpu, &["stream 1 is reconnected to"]);
    // A stopped process holds its connections and sends no replies.
    target.signal(Signal::STOP);
    lines_until(&dpu, &["stream 1 has lost target", "no response"]);
    // The DPU knows which target does not reply; its client waits for that report.
    let late = Cat::through(&world, &dpu, &url, ENDLESS).finish();
    assert_eq!(late.exit, Some(3), "{}", late.stderr);
    let named = format!("target {} did not reply", target.control());
    assert!(late.stderr.contains(&named), "{}", late.stderr);
}

#[test]
fn quiet_daemons_tell_nothing_and_all_counters_are_shown() {
    let Some(world) = World::new("quiet_daemons_tell_nothing") else {
        return;
    };
    Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(100_000, 1));
    let (target, dpu) = (world.target(&["--quiet"]), world.dpu(&["--quiet"]));
    let args = ["--plan", "window(1000) | narrow(u16)", "--batches", "9"];
    Cat::through(&world, &dpu, &target.url("web"), &args).finish().good();
    let (sent, fed) = (target.status(&world), dpu.status(&world));
    assert!(sent.counter("disk.reads") > 0 && sent.counter("disk.bytes") >= 400_000);
    assert!(fed.counter("ring.slots") > 0 && fed.counter("ring.bytes") > 0);
    for name in ["ring.bad_release_words", "ring.bad_sleep_words", "log.suppressed_lines"] {
        assert_eq!(fed.counter(name), 0);
    }
    assert_eq!((target.stderr(), dpu.stderr()), (String::new(), String::new()));
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
        assert!(!text.contains("injected_drops"), "zeros are left out: {text}");
    }
    // Nothing arrives that was not sent, and nothing is delivered that did not arrive. Data
    // requested ahead when the stream ended counts only as sent.
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
    // A stream that fails before its first batch leaves an earlier output unchanged.
    let nothing = ["--plan", plan, "--batches", "20", "-o", "out.u16"];
    let ran = Cat::through(&world, &dpu, &target.url("none"), &nothing).finish();
    assert_eq!(ran.exit, Some(2), "{}", ran.stderr);
    let wide = [vec![70_000_i128], corpus.tokens[1..].to_vec()].concat();
    Corpus::flat(&world.data("wide.bin"), Dtype::U32, wide);
    let ran = Cat::through(&world, &dpu, &target.url("wide"), &nothing).finish();
    assert_eq!(ran.exit, Some(1), "{}", ran.stderr);
    assert_same(&fs::read(world.path("out.u16")).expect("it is still there"), &want);
    // A reader that closes the pipe is no failure of the stream.
    let mut cat = Cat::through(&world, &dpu, &target.url("web"), ENDLESS);
    cat.read(1000);
    cat.hang_up().good();
    let nowhere = ["--plan", plan, "-o", "/nonexistent/out"];
    let ran = Cat::through(&world, &dpu, &target.url("web"), &nowhere).finish();
    assert_eq!(ran.exit, Some(2), "{}", ran.stderr);
    assert!(ran.stderr.contains("/nonexistent/out"), "{}", ran.stderr);
}
