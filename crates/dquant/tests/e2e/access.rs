//! Who may call, and what callers see when a daemon is not running.

use xio::dataset::Dtype;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::harness::{Cat, Daemon, Ran, World, path};

const ARGS: &[&str] = &["--plan", "window(100) | narrow(u16)", "--batches", "3"];

/// A stream with another token, or with none.
fn with_token(world: &World, dpu: &Daemon, url: &str, token: Option<&str>) -> Ran {
    let args = [&["cat", url, "--dpu", path(dpu.socket())], ARGS].concat();
    let mut command = world.program(&args);
    match token {
        Some(token) => command.env("DQUANT_TOKEN", token),
        None => command.env_remove("DQUANT_TOKEN"),
    };
    Cat::start(world, command).finish()
}

#[test]
fn only_who_has_the_token_is_served() {
    let Some(world) = World::new("only_who_has_the_token_is_served") else {
        return;
    };
    let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(10_000, 1));
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let url = target.url("web");
    let before = target.status(&world).counter("control.auth_failures");
    let wrong = with_token(&world, &dpu, &url, Some("wrong-token"));
    wrong.failed(2, &[target.control(), "token is not the one"], "DQUANT_TOKEN");
    let none = with_token(&world, &dpu, &url, None);
    none.failed(2, &[target.control(), "no token"], "DQUANT_TOKEN");
    let strange = with_token(&world, &dpu, &url, Some("tok\u{e9}n\twith\u{1}oddities"));
    strange.failed(2, &[target.control(), "token"], "DQUANT_TOKEN");
    let after = target.status(&world).counter("control.auth_failures");
    assert!(after >= before + 3, "{before} {after}");

    for daemon in [&target, &dpu] {
        let before = daemon.status(&world).counter("control.auth_failures");
        let mut command = world.program(&["status", "--control", daemon.control()]);
        command.env("DQUANT_TOKEN", "wrong-token");
        let refused = Cat::start(&world, command).finish();
        refused.failed(2, &[daemon.control(), "token is not the one"], "DQUANT_TOKEN");
        assert_eq!(daemon.status(&world).counter("control.auth_failures"), before + 1);
    }
    let right = with_token(&world, &dpu, &url, Some(super::harness::TOKEN)).good();
    assert_same(&right.stdout, &expected(ARGS[1], &[&corpus], 0..3));
    // A token is a secret: no daemon and no error prints it.
    for text in [target.stderr(), dpu.stderr(), wrong.stderr] {
        assert!(!text.contains(super::harness::TOKEN) && !text.contains("wrong-token"), "{text}");
    }
}

#[test]
fn daemons_do_not_start_without_a_good_token() {
    let Some(world) = World::new("daemons_do_not_start_without_a_good_token") else {
        return;
    };
    let root = world.root();
    for args in [&["serve", "--root", path(&root)][..], &["dpu"]] {
        for (token, part) in [(None, "no token"), (Some("short"), "8 characters")] {
            let mut command = world.program(args);
            match token {
                Some(token) => command.env("DQUANT_TOKEN", token),
                None => command.env_remove("DQUANT_TOKEN"),
            };
            Cat::start(&world, command).finish().failed(2, &[part], "");
        }
        let ran = world.run(&[args, &["--token-file", "none"]].concat());
        assert_eq!(ran.exit, Some(2), "{}", ran.stderr);
    }
}

#[test]
fn daemons_say_why_they_cannot_start() {
    let Some(world) = World::new("daemons_say_why_they_cannot_start") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let root = world.root();
    let roce = target.roce().to_string();
    let serve = ["serve", "--root", path(&root)];
    type Case<'a> = (&'a [&'a str], &'a [&'a str], &'a str);
    let cases: [Case<'_>; 6] = [
        (&["serve", "--root", "/nonexistent"], &["/nonexistent"], "--root"),
        (&[&serve[..], &["--roce", "0.0.0.0:4791"]].concat(), &["0.0.0.0:4791"], "--roce"),
        (
            &[&serve[..], &["--roce", &roce, "--control", "127.0.0.1:0"]].concat(),
            &[&roce],
            "another address",
        ),
        (
            &[&serve[..], &["--roce", "127.0.0.1:0", "--control", target.control()]].concat(),
            &[target.control()],
            "--control",
        ),
        (&["dpu", "--socket", path(dpu.socket())], &[path(dpu.socket())], "--socket"),
        (&["dpu", "--socket", path(&root)], &[path(&root)], "--socket"),
    ];
    for (args, parts, hint) in cases {
        world.run(args).failed(2, parts, hint);
    }
    let nowhere = world.run(&["dpu", "--socket", "/nonexistent/dpu.sock"]);
    nowhere.failed(2, &["/nonexistent/dpu.sock"], "must exist and be writable");
    let ran = world.run(&["dpu", "--socket", path(dpu.socket())]);
    ran.failed(2, &[], "another DPU serves");
    assert_eq!(ran.stderr.matches(path(dpu.socket())).count(), 1, "{}", ran.stderr);
    // The daemon that could not start has not disturbed the one that serves.
    target.status(&world);
    dpu.status(&world);
    assert!(dpu.socket().exists());
}

#[test]
fn who_may_connect_is_said_in_a_mode_and_a_group_that_exist() {
    let Some(world) = World::new("who_may_connect_is_said") else {
        return;
    };
    for mode in ["0777", "0640", "rw-rw----", "432"] {
        let ran = world.run(&["dpu", "--socket-mode", mode]);
        assert_eq!(ran.exit, Some(2), "{}", ran.stderr);
        assert!(ran.stderr.contains(mode) && ran.stderr.contains("0660"), "{}", ran.stderr);
    }
    let unknown = world.run(&["dpu", "--socket-group", "no-such-group"]);
    unknown.failed(2, &["/etc/group has no group 'no-such-group'"], "getent group");
    let contradiction = world.run(&["dpu", "--socket-mode", "600", "--socket-group", "0"]);
    contradiction.failed(2, &["keeps out --socket-group 0"], "0660");
}

#[test]
fn a_control_address_may_be_a_name() {
    let Some(world) = World::new("a_control_address_may_be_a_name") else {
        return;
    };
    let at_name = ["--control", "localhost:0"];
    for daemon in [world.target(&at_name), world.dpu(&at_name)] {
        let at: std::net::SocketAddr = daemon.control().parse().expect("an address");
        assert!(at.ip().is_loopback() && at.port() != 0, "{at}");
        let by_name = format!("localhost:{}", at.port());
        let ran = world.run(&["status", "--control", &by_name]).good();
        // The address on which the daemon listens, not what the caller typed.
        let text = String::from_utf8(ran.stdout).expect("text");
        assert!(text.contains(&format!("control {}", daemon.control())), "{text}");
    }
    let root = world.root();
    let nonsense = world.run(&["serve", "--root", path(&root), "--control", "localhost:99999"]);
    nonsense.failed(2, &["localhost:99999", "99999 is no port"], "65535");
    let unknown = world.run(&["status", "--control", "no-such-host.invalid"]);
    unknown.failed(2, &["daemon no-such-host.invalid:4790"], "can resolve");
}

#[test]
fn a_missing_dpu_is_named() {
    let Some(world) = World::new("a_missing_dpu_is_named") else {
        return;
    };
    let socket = world.path("none.sock");
    let ran = world.run(&["cat", "dq://127.0.0.1:1/web", "--dpu", path(&socket)]);
    ran.failed(3, &["no DPU daemon", path(&socket)], "dquant dpu");
    assert_eq!(ran.stderr.matches(path(&socket)).count(), 1, "{}", ran.stderr);
    let plain = world.path("plain");
    std::fs::write(&plain, "not a socket").expect("writable");
    let ran = world.run(&["cat", "dq://127.0.0.1:1/web", "--dpu", path(&plain)]);
    ran.failed(3, &[path(&plain)], "dquant dpu");
}
