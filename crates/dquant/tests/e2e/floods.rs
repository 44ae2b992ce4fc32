//! Connections to a control port that say nothing, and daemons that run out of descriptors.

use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use xio::dataset::Dtype;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::harness::{Cat, Daemon, PATIENCE, World, eventually};

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
        assert!(status.counter("control.connections.closed.displaced") > 0, "{status:?}");
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
        // Its settings come first, then the end; a silence of that length is neither.
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
        assert_eq!(count("accepts connections again, after "), 1, "{lines}");
    }
}
