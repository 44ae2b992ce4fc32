//! `dquant job replay`: every pattern over loopback, ranks as processes in any order, and how a job
//! ends when a rank does.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nic::rates::{RateLimit, RateTable};
use serde_json::Value;

use super::{Folder, Ran};

fn objects(stdout: &str) -> Vec<Value> {
    stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// A port that nobody listens on.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has free ports");
    listener.local_addr().expect("it is bound").port()
}

fn start(mut command: Command) -> Child {
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("the program starts")
}

fn ended(child: Child) -> Ran {
    let output: Output = child.wait_with_output().expect("it ends");
    Ran::new(&output)
}

#[test]
fn every_pattern_is_exchanged_and_every_byte_compared() {
    let folder = Folder::new("replay-patterns");
    // Ranks, and bytes that all receive in an iteration with 10,000 on an edge of the highest rate.
    for (pattern, ranks, bytes) in [
        ("ring:3@100M", 3, 30_000),
        ("tree:5@1G", 5, 80_000),
        ("torus:3x2@4G,2G", 6, 90_000),
        ("hierarchical:2x3@5G,10G", 6, 60_000),
        ("ps:2+2@500M", 4, 80_000),
        ("async-ps:2+1@500M", 3, 40_000),
        ("mesh:4@1G", 4, 120_000),
        ("pipeline:3@2G", 3, 40_000),
        ("parallel:2x2x2@20G,10G,5G", 8, 80_000 + 40_000 + 20_000),
    ] {
        let ran = folder.run(&[
            "job",
            "replay",
            pattern,
            "--all",
            "--json",
            "--iterations",
            "3",
            "--warm-up",
            "1",
            "--compute",
            "2ms",
            "--bytes-per-edge",
            "10000",
        ]);
        let found = objects(&ran.good().stdout);
        let of = |schema: &str| found.iter().filter(|o| o["schema"] == schema).collect::<Vec<_>>();
        let (each, all) = (of("dquant.job.replay.iteration.v1"), of("dquant.job.replay.v1"));
        assert_eq!((each.len(), all.len()), (3 * ranks, ranks), "{pattern}");
        let sum = |name: &str| all.iter().map(|o| o[name].as_u64().expect("a number")).sum::<u64>();
        assert_eq!(sum("verified_bytes"), 4 * bytes, "{pattern}");
        assert_eq!(sum("wrong_messages"), 0, "{pattern}");
        for one in each {
            let [total, exchange] =
                ["seconds", "exchange_seconds"].map(|name| one[name].as_f64().expect("a number"));
            assert!(total >= 0.002 + exchange * 0.999, "{pattern}: {one}");
            let edges = one["edges"].as_array().expect("edges");
            let is_used = |edge: &Value| edge["gbps"].as_f64().is_some_and(|gbps| gbps > 0.0);
            assert!(edges.iter().all(is_used), "{pattern}: {one}");
        }
    }
}

#[test]
fn a_phase_in_steps_carries_the_same() {
    let folder = Folder::new("replay-steps");
    let ran = folder.run(&[
        "job",
        "replay",
        "ring:3@1G",
        "--all",
        "--iterations",
        "5",
        "--warm-up",
        "0",
        "--compute",
        "1us",
        "--bytes-per-edge",
        "1MiB",
        "--steps",
        "4",
    ]);
    let text = ran.good().stdout;
    assert_eq!(text.matches(" 1048576 bytes to rank ").count(), 3, "{text}");
    assert_eq!(text.matches("5242880 bytes compared, 0 messages wrong").count(), 3, "{text}");
}

/// Both ranks are processes, and share one pace: what they send together takes the time that it
/// takes at the pace.
#[test]
fn processes_of_a_paced_job_keep_its_pace_together() {
    let folder = Folder::new("replay-paced");
    let paces = folder.0.join("paces");
    let table = RateTable::open(&paces).expect("the folder is ours");
    table.set([(26, RateLimit::of(100_000_000))]);
    let peers = format!("127.78.5.1:{},127.78.5.2", free_port());
    let rank = |rank: &str| {
        let mut command = folder.command(&[
            "job",
            "replay",
            "ring:2@1G",
            "--rank",
            rank,
            "--peers",
            &peers,
            "--json",
            "--dscp",
            "26",
            "--iterations",
            "3",
            "--warm-up",
            "1",
            "--compute",
            "1us",
            "--bytes-per-edge",
            "1MiB",
        ]);
        command.env("DQUANT_PACES", &paces);
        start(command)
    };
    for child in [rank("0"), rank("1")] {
        let found = objects(&ended(child).good().stdout);
        let ms = found.last().and_then(|whole| whole["exchange_ms"]["p50"].as_f64());
        // Two messages of 1 MiB at 100 Mbit/s, less what is in the bucket.
        assert!(ms.is_some_and(|ms| ms >= 155.0), "{ms:?} ms");
    }
    assert!(table.sent_bytes(26) > 8 << 20, "{}", table.sent_bytes(26));
}

#[test]
fn ranks_come_in_any_order_and_begin_at_a_time() {
    let folder = Folder::new("replay-order");
    let peers = format!("127.78.1.1:{},127.78.1.2,127.78.1.3", free_port());
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("later");
    let at = (now + Duration::from_secs(3)).as_secs_f64();
    let start_at = format!("{at:.3}");
    let rank = |rank: &str| {
        start(folder.command(&[
            "job",
            "replay",
            "ring:3@100M",
            "--rank",
            rank,
            "--peers",
            &peers,
            "--json",
            "--iterations",
            "4",
            "--warm-up",
            "0",
            "--compute",
            "20ms",
            "--start-at",
            &start_at,
            "--shift",
            "10ms",
            "--bytes-per-edge",
            "64KiB",
            "--dscp",
            "26",
        ]))
    };
    let mut ranks = vec![rank("2"), rank("1")];
    std::thread::sleep(Duration::from_millis(300));
    ranks.push(rank("0"));
    for child in ranks {
        let found = objects(&ended(child).good().stdout);
        let whole = found.last().expect("a result");
        assert_eq!((&whole["iterations"], &whole["dscp"]), (&4.into(), &26.into()));
        assert!(whole["iteration_ms"]["p50"].as_f64().is_some_and(|ms| ms >= 20.0), "{whole}");
    }
    let after = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("later");
    assert!(after.as_secs_f64() > at + 0.01 + 4.0 * 0.02, "it began too early");
}

#[test]
fn strangers_that_say_nothing_do_not_keep_ranks_from_beginning() {
    let folder = Folder::new("replay-strangers");
    let host = format!("127.78.6.1:{}", free_port());
    let peers = format!("{host},127.78.6.2");
    let rank = |rank: &str| {
        let args = ["job", "replay", "ring:2@100M", "--rank", rank, "--peers", &peers];
        let more = ["--iterations", "2", "--compute", "1ms", "--bytes-per-edge", "4KiB"];
        start(folder.command(&[&args[..], &more, &["--wait", "20s"]].concat()))
    };
    let first = rank("0");
    let begun = Instant::now();
    // One after another, each with its time to introduce itself, they would take longer than ranks
    // wait.
    let mut strangers = Vec::new();
    while strangers.len() < 40 {
        assert!(begun.elapsed() < Duration::from_secs(20), "rank 0 does not listen");
        match TcpStream::connect(&host) {
            Ok(stranger) => strangers.push(stranger),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
    for child in [rank("1"), first] {
        ended(child).good();
    }
    drop(strangers);
}

#[test]
fn a_rank_that_never_stops_talking_ends_the_job_at_once() {
    let folder = Folder::new("replay-talker");
    let host = format!("127.0.0.1:{}", free_port());
    let peers = format!("{host},127.0.0.1,127.0.0.1");
    let args = ["job", "replay", "ring:3@1G", "--rank", "0", "--peers", &peers, "--wait", "20s"];
    let more = ["--iterations", "3", "--warm-up", "0", "--bytes-per-edge", "64KiB"];
    let first = start(folder.command(&[&args[..], &more].concat()));
    let begun = Instant::now();
    let reach = || loop {
        match TcpStream::connect(&host) {
            Ok(stream) => break stream,
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "rank 0 does not listen");
    };
    let mut other = reach();
    other.write_all(b"{\"hello\":1}\n").expect("sent");
    let mut reply = String::new();
    other.read_to_string(&mut reply).expect("an answer");
    assert!(reply.contains("refused") && reply.contains("same version"), "{reply}");
    let mut talker = reach();
    let join = r#"{"join":{"version":1,"rank":1,"terms":{"pattern":"ring:3@1G","bytes":65536,"steps":1,"iterations":3},"seat":{"port":4791,"mtu":1024,"qps":[[0,1,1],[2,1,1]]}}}"#;
    talker.write_all(format!("{join}\n").as_bytes()).expect("joined");
    let talking = std::thread::spawn(move || {
        let words = "\"go\"\n".repeat(1000);
        while talker.write_all(words.as_bytes()).is_ok() {}
    });
    ended(first).failed(3, "rank 1 (127.0.0.1) said", "same version");
    assert!(begun.elapsed() < Duration::from_secs(15), "it waited for an end of the talk");
    talking.join().expect("rank 0 has closed the connection");
}

#[test]
fn who_does_not_come_is_named_to_all() {
    let folder = Folder::new("replay-missing");
    let peers = format!("127.78.2.1:{},127.78.2.2,127.78.2.3", free_port());
    let rank = |rank: &str| {
        let wait = if rank == "0" { "500ms" } else { "20s" };
        start(folder.command(&[
            "job",
            "replay",
            "ring:3@1G",
            "--rank",
            rank,
            "--peers",
            &peers,
            "--wait",
            wait,
        ]))
    };
    let (first, second) = (rank("1"), rank("0"));
    for child in [first, second] {
        ended(child).failed(3, "rank 2 (127.78.2.3) did not come within", "--wait");
    }
    let alone = folder.run(&[
        "job",
        "replay",
        "ring:3@1G",
        "--rank",
        "2",
        "--peers",
        &peers,
        "--wait",
        "200ms",
    ]);
    alone.failed(3, "rank 0 (127.78.2.1:", "start it");
}

#[test]
fn a_rank_that_is_killed_ends_the_others_with_the_reason() {
    let folder = Folder::new("replay-killed");
    for (victim, witness) in [(1, 2), (0, 1)] {
        let peers = format!("127.78.3.1:{},127.78.3.2,127.78.3.3", free_port());
        let mut ranks: Vec<Option<Child>> = (0..3)
            .map(|rank| {
                let rank = rank.to_string();
                Some(start(folder.command(&[
                    "job",
                    "replay",
                    "ring:3@1G",
                    "--rank",
                    &rank,
                    "--peers",
                    &peers,
                    "--iterations",
                    "100000",
                    "--compute",
                    "1ms",
                    "--bytes-per-edge",
                    "64KiB",
                ])))
            })
            .collect();
        std::thread::sleep(Duration::from_millis(700));
        let mut dead = ranks[victim].take().expect("not taken yet");
        assert_eq!(dead.try_wait().expect("it is ours"), None, "it ended by itself");
        dead.kill().expect("it runs");
        dead.wait().expect("it ends");
        let began = Instant::now();
        let why = format!("rank {victim} (127.78.3.{}) has ended", victim + 1);
        for (rank, child) in ranks.into_iter().enumerate() {
            if let Some(child) = child {
                ended(child).failed(3, &why, "its output says why");
                assert!(began.elapsed() < Duration::from_secs(10), "rank {rank} of {witness}");
            }
        }
    }
}

#[test]
fn what_does_not_fit_together_is_refused() {
    let folder = Folder::new("replay-refused");
    for (args, error, hint) in [
        (&["star:3@1G", "--all"][..], "unknown pattern 'star'", "docs/parfait.md"),
        (&["ring:1@1G", "--all"], "has 1 ranks; 2 to 256", "sizes"),
        (&["ring:3@1G"], "required arguments were not provided", ""),
        (&["ring:3@1G", "--rank", "0"], "required arguments were not provided", ""),
        (
            &["ring:3@1G", "--rank", "0", "--peers", "127.0.0.1"],
            "--peers names 1",
            "in their order",
        ),
        (&["ring:2@1G", "--rank", "2", "--peers", "127.0.0.1,127.0.0.2"], "no rank 2", "from 0"),
        (
            &["ring:2@1G", "--rank", "0", "--peers", "192.0.2.1,127.0.0.2"],
            "cannot listen at",
            "free",
        ),
        (
            &["ring:2@1G", "--all", "--bytes-per-edge", "1GiB"],
            "1073741824 bytes",
            "--bytes-per-edge",
        ),
        (&["ring:2@1G", "--all", "--dscp", "64"], "64 is not in 0..=63", ""),
        (&["ring:2@1G", "--all", "--start-at", "noon"], "seconds since 1970", ""),
    ] {
        folder.run(&[&["job", "replay"], args].concat()).failed(2, error, hint);
    }
    // Another pattern, and a rank that is there already.
    let peers = format!("127.78.4.1:{},127.78.4.2,127.78.4.3", free_port());
    let rank = |pattern: &str, rank: &str, wait: &str| {
        start(folder.command(&[
            "job", "replay", pattern, "--rank", rank, "--peers", &peers, "--wait", wait,
        ]))
    };
    let host = rank("ring:3@1G", "0", "4s");
    let first = rank("ring:3@1G", "1", "10s");
    ended(rank("mesh:3@1G", "2", "10s")).failed(2, "rank 0 replays", "same options");
    std::thread::sleep(Duration::from_millis(500));
    ended(rank("ring:3@1G", "1", "10s")).failed(2, "rank 1 is there already", "--rank");
    for child in [host, first] {
        ended(child).failed(3, "rank 2 (127.78.4.3) did not come within 4s", "--wait");
    }
}

#[test]
fn a_rank_without_the_port_of_rocev2_says_that_it_has_no_guarantee() {
    let folder = Folder::new("replay-port");
    // Classes of HTB take packets to UDP port 4791 only, and another program has that of rank 1.
    let _held = std::net::UdpSocket::bind("127.79.0.2:4791").expect("nothing else uses it");
    let peers = "127.79.0.1:0,127.79.0.2";
    let common = ["job", "replay", "ring:2@100M", "--all", "--peers", peers];
    let short = ["--iterations", "1", "--compute", "1ms", "--bytes-per-edge", "10000"];
    let run = |more: &[&str]| folder.run(&[&common[..], &short[..], more].concat()).good().stderr;
    let warned = run(&["--dscp", "26"]);
    let warnings: Vec<&str> = warned.lines().collect();
    assert_eq!(warnings.len(), 1, "{warned}");
    for part in ["dquant: rank 1 has UDP port ", "4791 at 127.79.0.2: no guarantee", "--device"] {
        assert!(warned.contains(part), "{part}: {warned}");
    }
    assert_eq!(run(&[]), "", "nothing was to be governed");
}
