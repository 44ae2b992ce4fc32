//! Many or silent connections and calls, and daemons that run out of descriptors.

use std::io::{ErrorKind, Read};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use engine::proto::dpu_client::DpuClient;
use engine::proto::target_client::TargetClient;
use engine::proto::{SessionRequest, StatusRequest};
use host::attach::Connection;
use service::auth::AddToken;
use tokio::runtime::Runtime;
use tonic::transport::{Channel, Endpoint};
use xio::dataset::Dtype;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::h2;
use super::harness::{Cat, Daemon, PATIENCE, TOKEN, World, eventually, fresh_ip};

const PLAN: &str = "window(100) | narrow(u16)";

/// Connections that are open and silent.
fn silent(daemon: &Daemon, count: usize) -> Vec<TcpStream> {
    let address: SocketAddr = daemon.control().parse().expect("an address");
    let connect = |_| TcpStream::connect_timeout(&address, PATIENCE).expect("it listens");
    (0..count).map(connect).collect()
}

#[test]
fn a_flood_of_silent_connections_does_not_keep_clients_out() {
    let Some(world) = World::new("a_flood_of_silent_connections") else {
        return;
    };
    let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(10_000, 1));
    let (target, dpu) = (world.target_with_descriptors(96), world.dpu(&[]));
    let floods = [silent(&target, 200), silent(&dpu, 600)];
    let args = ["--plan", PLAN, "--batches", "3"];
    let ran = Cat::through(&world, &dpu, &target.url("web"), &args).finish().good();
    assert_same(&ran.stdout, &expected(PLAN, &[&corpus], 0..3));
    // Half of the descriptors are for connections, and half of those for one address.
    for (daemon, most) in [(&target, 24), (&dpu, 256)] {
        let status = daemon.status(&world);
        assert!(status.counter("control.connections") <= most, "{status:?}");
        assert!(status.counter("control.connections.closed.evicted") > 0, "{status:?}");
    }
    drop(floods);
}

#[test]
fn a_silent_connection_is_closed_after_a_while() {
    let Some(world) = World::new("a_silent_connection_is_closed") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    for daemon in [&target, &dpu] {
        let mut connection = silent(daemon, 1).remove(0);
        connection.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        // Its settings come first, then the end; a timeout of that length is neither.
        let end = loop {
            match connection.read(&mut [0; 64]) {
                Ok(0) => break None,
                Ok(_) => {}
                Err(error) => break Some(error.kind()),
            }
        };
        assert!(matches!(end, None | Some(ErrorKind::ConnectionReset)), "still open: {end:?}");
        let status = daemon.status(&world);
        assert_eq!(status.counter("control.connections.closed.handshake"), 1, "{status:?}");
    }
}

#[test]
fn a_daemon_without_descriptors_waits_and_goes_on() {
    let Some(world) = World::new("a_daemon_without_descriptors") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    for daemon in [&target, &dpu] {
        daemon.limit_descriptors(Some(0));
        let started = Instant::now();
        let waiting = silent(daemon, 1);
        std::thread::sleep(Duration::from_secs(1));
        daemon.limit_descriptors(None);
        let status = eventually("an accepted connection", || {
            let status = daemon.status(&world);
            (status.counter("control.connections") >= 2).then_some(status)
        });
        // One refusal of the kernel for each pause of 100 ms, not one for each turn of a busy loop.
        let turns = status.counter("control.accept_errors");
        let most = started.elapsed().as_millis() as u64 / 100 + 1;
        assert!(turns >= 1 && turns <= most, "{turns} of {most}");
        drop(waiting);
        // One line when it begins, with the remedy, and one when it is over.
        let lines = daemon.stderr();
        let count = |part: &str| lines.lines().filter(|line| line.contains(part)).count();
        assert_eq!(count("cannot accept connections"), 1, "{lines}");
        assert_eq!(count("`ulimit -n`"), 1, "{lines}");
        assert_eq!(count("accepting connections again after "), 1, "{lines}");
    }
}

fn runtime() -> Runtime {
    Runtime::new().expect("threads")
}

/// A connection of a caller with the token.
async fn caller(control: &str, from: IpAddr) -> Channel {
    let endpoint = Endpoint::from_shared(format!("http://{control}")).expect("an address");
    endpoint.local_address(Some(from)).connect().await.expect("it listens")
}

/// Calls that a connection may have under way.
const CALLS: usize = 64;

#[test]
fn a_flood_of_status_calls_ends_no_stream() {
    let Some(world) = World::new("a_flood_of_status_calls_ends_no_stream") else {
        return;
    };
    let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(786_432, 6));
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let plan = "window(1024) | narrow(u16) | batch(16)";
    let args = ["--plan", plan, "--batches", "200", "--slots", "4", "--slot-size", "64KiB"];
    let streams = (0..6).map(|_| {
        let mut cat = Cat::through(&world, &dpu, &target.url("web"), &args);
        let head = cat.read(1 << 18);
        (cat, head)
    });
    // They are stalled now, as a trainer's are during a long step.
    let streams: Vec<_> = streams.collect();
    let (runtime, from) = (runtime(), [fresh_ip(), fresh_ip()]);
    // Each stream queries its engine once a second.
    let until = Instant::now() + Duration::from_secs(4);
    for index in 0..4 {
        let (control, from) = (dpu.control().to_owned(), from[index % 2].into());
        let channel = runtime.block_on(async move { caller(&control, from).await });
        for _ in 0..CALLS {
            let mut client = DpuClient::with_interceptor(channel.clone(), AddToken::new(TOKEN));
            runtime.spawn(async move {
                while Instant::now() < until {
                    let _ = client.status(StatusRequest {}).await;
                }
            });
        }
    }
    std::thread::sleep(until - Instant::now());
    drop(runtime);
    let want = expected(plan, &[&corpus], 0..200);
    for (cat, head) in streams {
        assert_same(&[head, cat.finish().good().stdout].concat(), &want);
    }
}

#[test]
fn a_connection_that_calls_without_the_token_is_bounded_and_closed() {
    let Some(world) = World::new("a_connection_that_calls_without_the_token") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    for (daemon, path) in [(&target, "/dquant.v1.Target/Status"), (&dpu, "/dquant.v1.Dpu/Status")] {
        let said = h2::calls_without_a_token(daemon.control(), path, 20_000);
        // The numbers of HTTP/2: streams at once, and bytes of headers.
        assert!(said.settings.contains(&(3, CALLS as u32)), "{said:?}");
        assert!(
            said.settings.iter().any(|(number, value)| *number == 6 && *value <= 8192),
            "{said:?}"
        );
        assert!(said.answers < 2_000, "{} answers to 20,000 calls", said.answers);
        let status = daemon.status(&world);
        assert_eq!(status.counter("control.connections.closed.refused"), 1, "{status:?}");
    }
}

#[test]
fn calls_without_a_request_keep_nobody_out() {
    let Some(world) = World::new("calls_without_a_request_keep_nobody_out") else {
        return;
    };
    let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(10_000, 1));
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let (runtime, from) = (runtime(), fresh_ip());
    let mut calls = Vec::new();
    for _ in 0..4 {
        let channel = runtime.block_on(caller(target.control(), from.into()));
        for _ in 0..CALLS {
            let mut client = TargetClient::with_interceptor(channel.clone(), AddToken::new(TOKEN));
            let silence = tokio_stream::pending::<SessionRequest>();
            let ended = async move { client.session(silence).await.err().map(|why| why.code()) };
            calls.push(runtime.spawn(ended));
        }
    }
    // More than half of all calls from one address are refused.
    eventually("refusals", || {
        (target.status(&world).counter("control.refused_calls") >= 100).then_some(())
    });
    let args = ["--plan", PLAN, "--batches", "3"];
    let ran = Cat::through(&world, &dpu, &target.url("web"), &args).finish().good();
    assert_same(&ran.stdout, &expected(PLAN, &[&corpus], 0..3));
    for call in calls {
        let ended = async { tokio::time::timeout(PATIENCE, call).await };
        let ended = runtime.block_on(ended).expect("no call waits for ever").expect("no panic");
        assert!(ended.is_some(), "a session without a request");
    }
    let status = target.status(&world);
    assert!(status.counter("control.closed_calls") >= 64, "{status:?}");
    assert!(target.stderr().contains("it sent no request"), "{}", target.stderr());
}

#[test]
fn silent_local_clients_keep_nobody_out() {
    let Some(world) = World::new("silent_local_clients_keep_nobody_out") else {
        return;
    };
    let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(10_000, 1));
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let connect = |_| Connection::connect(dpu.socket()).expect("it listens");
    let silent: Vec<_> = (0..64).map(connect).collect();
    let args = ["--plan", PLAN, "--batches", "3"];
    let ran = Cat::through(&world, &dpu, &target.url("web"), &args).finish().good();
    assert_same(&ran.stdout, &expected(PLAN, &[&corpus], 0..3));
    assert!(dpu.status(&world).counter("dpu.evicted_clients") >= 1);
    drop(silent);
}

#[test]
fn a_flood_of_wrong_tokens_does_not_silence_sessions() {
    let Some(world) = World::new("a_flood_of_wrong_tokens") else {
        return;
    };
    Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(10_000, 1));
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let (runtime, from) = (runtime(), fresh_ip());
    let channel = runtime.block_on(caller(target.control(), from.into()));
    // No two of these lines are the same, as under a flood of connections.
    for number in 0..400 {
        let wrong = AddToken::new(&format!("wrong-{number}"));
        let mut client = TargetClient::with_interceptor(channel.clone(), wrong);
        let missing = AddToken::new("");
        let mut other = TargetClient::with_interceptor(channel.clone(), missing);
        runtime.block_on(client.status(StatusRequest {})).expect_err("a wrong token");
        runtime.block_on(other.status(StatusRequest {})).expect_err("no token");
    }
    let args = ["--plan", PLAN, "--batches", "3"];
    Cat::through(&world, &dpu, &target.url("web"), &args).finish().good();
    for part in ["begins: web.bin", "ends:"] {
        eventually(part, || target.stderr().contains(part).then_some(()));
    }
    let refused = target.stderr().matches("call from").count();
    assert!((1..100).contains(&refused), "{refused} lines of 800 refusals");
}
