//! `dquant perf`: real tests over loopback, bad input, servers and clients that go away.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use super::verbs_kit::eventually;
use super::{Folder, Ran};

/// A server that ends with the test. What it says on stderr is in a file.
pub(super) struct Server<'a> {
    child: Child,
    control: String,
    folder: &'a Folder,
}

impl Server<'_> {
    pub(super) fn start(folder: &Folder) -> Server<'_> {
        Server::with(folder, &[])
    }

    fn with<'a>(folder: &'a Folder, options: &[&str]) -> Server<'a> {
        let args = [&["perf", "serve", "127.0.0.1:0", "--json"], options].concat();
        Server::spawned(folder, folder.command(&args))
    }

    /// In a network namespace, at this address.
    pub(super) fn within<'a>(folder: &'a Folder, namespace: &str, listen: &str) -> Server<'a> {
        let serve = folder.command(&["perf", "serve", listen, "--json"]);
        Server::spawned(folder, enter(namespace, &serve))
    }

    fn spawned(folder: &Folder, mut command: Command) -> Server<'_> {
        let said = File::create(folder.0.join("server")).expect("writable");
        let spawned = command.stdout(Stdio::piped()).stderr(said).spawn();
        let mut child = spawned.expect("the program starts");
        let mut line = String::new();
        let out = child.stdout.take().expect("piped");
        BufReader::new(out).read_line(&mut line).expect("it reports");
        let ready: Value = serde_json::from_str(&line).expect("JSON");
        assert_eq!(ready["schema"], "dquant.perf.ready/1");
        let control = ready["control"].as_str().expect("an address").to_owned();
        Server { child, control, folder }
    }

    /// A client of this server, which runs short tests.
    fn client(&self, options: &[&str]) -> Command {
        let mut args = [&["perf", &self.control, "--json"], options].concat();
        if !options.contains(&"--seconds") {
            args.extend(["--seconds", "40ms"]);
        }
        self.folder.command(&args)
    }

    /// A client in a network namespace.
    pub(super) fn run_within(&self, namespace: &str, options: &[&str]) -> Ran {
        let mut client = enter(namespace, &self.client(options));
        Ran::new(&client.output().expect("the program starts"))
    }

    pub(super) fn run(&self, options: &[&str]) -> Ran {
        Ran::new(&self.client(options).output().expect("the program starts"))
    }

    fn said(&self) -> String {
        String::from_utf8(self.folder.read("server")).expect("UTF-8")
    }

    /// Waits until the server has said this.
    pub(super) fn says(&self, text: &str) {
        eventually(text, || self.said().contains(text).then_some(()));
    }
}

impl Drop for Server<'_> {
    fn drop(&mut self) {
        // Fails when it was killed already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The same command in a network namespace.
fn enter(namespace: &str, command: &Command) -> Command {
    let mut within = Command::new("ip");
    within.args(["netns", "exec", namespace]).arg(command.get_program()).args(command.get_args());
    within.current_dir(command.get_current_dir().expect("a folder"));
    within
}

/// The results of a run, each of which moved and verified something.
#[track_caller]
pub(super) fn results(ran: Ran) -> Vec<Value> {
    let ran = ran.good();
    let lines = ran.stdout.lines();
    let all: Vec<Value> = lines.map(|line| serde_json::from_str(line).expect("JSON")).collect();
    for one in &all {
        assert_eq!(one["schema"], "dquant.perf/1", "{one}");
        assert_eq!(one["mismatches"], 0, "{one}");
        assert!(one["messages"].as_u64() > Some(0), "{one}");
        assert!(
            one["verified_bytes"].as_u64() > Some(0) || one["lost"].as_u64() > Some(0),
            "{one}"
        );
        assert!(one["gbps"].as_f64() > Some(0.0), "{one}");
        assert!(one["client_cpu_s_per_gb"].is_number(), "{one}");
        assert!(one["server_cpu_s_per_gb"].is_number(), "{one}");
        let latency = &one["latency_us"];
        assert_eq!(latency.is_null(), one["mode"] == "bandwidth", "{one}");
        if !latency.is_null() {
            let times = ["min", "p50", "p99", "p999", "max"].map(|name| latency[name].as_f64());
            assert!(times[0] > Some(0.0) && times.is_sorted(), "{one}");
        }
    }
    all
}

#[test]
fn every_operation_runs_over_every_service_that_has_it() {
    let folder = Folder::new("perf-all");
    let server = Server::start(&folder);
    // All of them, latency and bandwidth: three of two sizes, and atomics of their only one.
    let sizes = ["--size", "8,5000"];
    let rc = results(server.run(&[&["send", "write", "read"], &sizes[..]].concat()));
    assert_eq!(rc.len(), 3 * 2 * 2);
    assert!(rc.iter().all(|one| one["lost"] == 0 && one["retransmitted"].is_number()));
    assert_eq!(results(server.run(&["atomic"])).len(), 2);
    let uc = results(server.run(&[&["--transport", "uc"], &sizes[..]].concat()));
    assert_eq!(uc.len(), 2 * 2 * 2);
    let ud = results(server.run(&["--transport", "ud", "--size", "8..1024"]));
    assert!(ud.iter().all(|one| one["operation"] == "send"));
    server.says("has left after");
}

/// Within one machine: without packets where that is possible, otherwise packets in shared memory.
#[test]
fn messages_take_the_path_that_the_client_wants() {
    let folder = Folder::new("perf-path");
    let server = Server::start(&folder);
    let paths = |options: &[&str], path: Option<&str>| {
        let mut client = server.client(options);
        client.env_remove("DQUANT_PATH").envs(path.map(|path| ("DQUANT_PATH", path)));
        let all = results(Ran::new(&client.output().expect("the program starts")));
        assert!(all.iter().all(|one| one["fallbacks"] == Value::Array(vec![])), "{all:?}");
        let path = |one: &Value| one["path"].as_str().expect("a name").to_owned();
        all.iter().map(path).collect::<std::collections::BTreeSet<String>>()
    };
    let sizes = ["--size", "8,5000,8MiB"];
    let one_sided = [&["write", "read"], &sizes[..]].concat();
    assert_eq!(paths(&one_sided, None), ["direct".to_owned()].into());
    assert_eq!(paths(&["atomic"], None), ["direct".to_owned()].into());
    let send = [&["send"], &sizes[..]].concat();
    assert_eq!(paths(&["send", "--size", "8,4096"], None), ["direct".to_owned()].into());
    assert_eq!(paths(&["send", "--size", "5000,8MiB"], None), ["fifo".to_owned()].into());
    assert_eq!(paths(&["--transport", "uc", "--size", "64"], None), ["fifo".to_owned()].into());
    assert_eq!(paths(&["--transport", "ud", "--size", "64"], None), ["udp".to_owned()].into());
    assert_eq!(paths(&["write", "--size", "64", "--cc", "delay"], None), ["udp".to_owned()].into());
    for options in [&one_sided[..], &send, &["atomic"]] {
        assert_eq!(paths(options, Some("udp")), ["udp".to_owned()].into(), "{options:?}");
    }
}

#[test]
fn sizes_below_a_stamp_and_many_queue_pairs_are_verified() {
    let folder = Folder::new("perf-odd");
    let server = Server::start(&folder);
    let options = ["send", "write", "read", "--size", "1,7,9", "--qps", "5", "--depth", "3"];
    let all = results(server.run(&options));
    assert_eq!(all.len(), 3 * 3 * 2);
    let one = all.iter().find(|one| one["mode"] == "bandwidth" && one["bytes"] == 9);
    let one = one.expect("it was asked for");
    assert_eq!((&one["qps"], &one["depth"]), (&5.into(), &3.into()));
    let standard =
        results(server.run(&["write", "--size", "64KiB", "--go-back-n", "--mtu", "1024"]));
    assert!(standard.iter().all(|one| one["selective"] == false && one["mtu"] == 1024));
    results(server.run(&["write", "--size", "64", "--mode", "latency", "--wait", "sleep"]));
    results(server.run(&["write", "--size", "1MiB", "--mode", "bandwidth", "--wait", "spin"]));
}

#[test]
fn bytes_are_right_under_congestion_control() {
    let folder = Folder::new("perf-congestion");
    let server = Server::start(&folder);
    for control in ["delay", "auto", "off", "dcqcn-mlnx:25"] {
        let options = ["write", "send", "--size", "64,64KiB", "--qps", "2", "--cc", control];
        assert_eq!(results(server.run(&options)).len(), 2 * 2 * 2, "{control}");
    }
}

#[test]
fn a_rate_holds_for_both_sides_and_every_service() {
    let folder = Folder::new("perf-rate");
    let server = Server::start(&folder);
    for options in [
        &["write", "read", "send"][..],
        &["send", "--transport", "uc"],
        &["send", "--transport", "ud"],
    ] {
        let with =
            ["--size", "1KiB", "--mode", "bandwidth", "--rate", "80Mbit/s", "--seconds", "300ms"];
        for one in results(server.run(&[options, &with].concat())) {
            let gbps = one["gbps"].as_f64().expect("a number");
            assert!(gbps <= 0.085 && one["path"] == "udp", "{one}");
        }
    }
    server.run(&["write", "--rate", "80"]).failed(2, "--rate", "");
}

#[test]
fn a_picture_has_a_curve_for_each_series() {
    let folder = Folder::new("perf-plot");
    let server = Server::start(&folder);
    results(server.run(&["write", "read", "--size", "8,64,512", "--plot", "picture.svg"]));
    let text = String::from_utf8(folder.read("picture.svg")).expect("UTF-8");
    assert!(text.starts_with("<svg ") && text.ends_with("</svg>\n"), "{text}");
    // p50, p99 and bandwidth of both operations.
    assert_eq!(text.matches("<polyline ").count(), 6, "{text}");
    let points = text.matches("points=\"").count();
    assert_eq!(points, 6);
    assert!(!text.contains("NaN"), "{text}");
    let ran = server.run(&["write", "--size", "8", "--plot", "no/such/folder/x.svg"]);
    assert_eq!(ran.exit, Some(2), "{ran:?}");
}

#[test]
fn samples_tell_how_far_every_queue_pair_came() {
    let folder = Folder::new("perf-samples");
    let server = Server::start(&folder);
    let test = ["write", "--size", "64KiB", "--mode", "bandwidth", "--qps", "2", "--cc", "delay"];
    server.run(&[&test[..], &["--samples", "samples.csv"]].concat()).good();
    let text = String::from_utf8(folder.read("samples.csv")).expect("text");
    let lines: Vec<Vec<&str>> =
        text.lines().skip(1).map(|line| line.split(',').collect()).collect();
    for flow in ["0", "1"] {
        let own: Vec<u64> = lines
            .iter()
            .filter(|line| line[1] == flow)
            .map(|line| line[2].parse().expect("bytes"))
            .collect();
        assert!(own.is_sorted() && own.last() > Some(&65_536), "{own:?}");
    }
    assert!(lines.iter().any(|line| !line[6].is_empty()), "a round-trip time: {text}");
    let two = ["write", "--size", "8,64", "--mode", "bandwidth", "--samples", "two.csv"];
    server.run(&two).failed(2, "one test", "name one");
}

#[test]
fn bad_input_is_refused_before_anything_runs() {
    let folder = Folder::new("perf-bad");
    let server = Server::start(&folder);
    for (options, why) in [
        (&["read", "--transport", "uc"][..], "UC has no read"),
        (&["write", "--transport", "ud"], "UD has no write"),
        (&["send", "--transport", "ud", "--size", "8KiB"], "one packet"),
        (&["atomic", "--size", "16"], "8 bytes"),
        (&["write", "--qps", "0"], "queue pairs is 0"),
        (&["write", "--qps", "5000"], "queue pairs is 5000"),
        (&["write", "--depth", "9999"], "depth is 9999"),
        (&["write", "--qps", "100", "--size", "64MiB"], "1 GiB"),
    ] {
        server.run(options).failed(2, why, "");
    }
    for wrong in [
        &["wriet"][..],
        &["write", "--size", "0"],
        &["write", "--size", "64..8"],
        &["write", "--transport", "rd"],
        &["write", "--mtu", "1500"],
        &["write", "--seconds", "5"],
    ] {
        let ran = server.run(wrong);
        assert_eq!((ran.exit, ran.stdout.as_str()), (Some(2), ""), "{ran:?}");
    }
    folder.run(&["perf"]).failed_usage();
    folder.run(&["perf", "serve", "203.0.113.9"]).failed(2, "203.0.113.9", "");
    // Nobody listens on port 1.
    folder.run(&["perf", "127.0.0.1:1", "write"]).failed(3, "127.0.0.1:1", "dquant perf serve");
    let device = ["write", "--device", "none", "--verbs-library", "none.so"];
    server.run(&device).failed(2, "none.so", "--verbs-library");
}

impl Ran {
    #[track_caller]
    pub(super) fn failed_usage(&self) {
        assert_eq!((self.exit, self.stdout.as_str()), (Some(2), ""), "{self:?}");
    }
}

/// Sends a line and returns the reply.
fn reply(stream: &TcpStream, line: &str) -> String {
    let mut sending = stream;
    writeln!(sending, "{line}").expect("it listens");
    let mut reply = String::new();
    BufReader::new(stream).read_line(&mut reply).expect("a line");
    reply
}

#[test]
fn a_server_survives_strangers_and_refuses_too_much() {
    let folder = Folder::new("perf-strangers");
    let server = Server::start(&folder);
    let connect = || TcpStream::connect(&server.control).expect("it listens");
    for junk in ["GET / HTTP/1.1\r\n\r\n", "\"mark\"\n", "{\"finish\":[1]}\n", "\u{0}\n"] {
        let mut stream = connect();
        stream.write_all(junk.as_bytes()).expect("sent");
        // It closes the connection, with or without the rest of what was sent unread.
        let _ = stream.read(&mut [0; 64]);
    }
    drop(connect());
    // Silent connections beyond all bounds are closed; those that came before keep their places for
    // seconds.
    let silent: Vec<TcpStream> = (0..40).map(|_| connect()).collect();
    server.says("connections are open");
    drop(silent);
    eventually("room for a client", || {
        (server.run(&["write", "--size", "8"]).exit == Some(0)).then_some(())
    });
    let stream = connect();
    let welcome = reply(&stream, "{\"hello\":{\"version\":999}}");
    assert_eq!(welcome.trim(), "{\"welcome\":{\"version\":2}}");
    let test = |qps: u64, bytes: u64| {
        format!(
            "{{\"begin\":{{\"operation\":\"write\",\"service\":\"rc\",\"mode\":\"bandwidth\",\"bytes\":{bytes},\
             \"qps\":{qps},\"depth\":1,\"mtu\":4096,\"go_back_n\":false,\"by_sockets\":false,\"spin\":false,\"millis\":50}}}}"
        )
    };
    assert!(reply(&stream, &test(1024, 64 << 20)).contains("more than 1 GiB"));
    let stream = connect();
    reply(&stream, "{\"hello\":{\"version\":2}}");
    assert!(reply(&stream, &test(1, 64)).starts_with("{\"ready\":"));
    // An end that is elsewhere: the server must not send there.
    let elsewhere = "{\"connect\":{\"address\":\"192.0.2.1:4791\",\"memory\":0,\"rkey\":1,\"mtu\":4096,\
                     \"selective\":true,\"qps\":[[1,1]]}}";
    assert!(reply(&stream, elsewhere).contains("192.0.2.1"));
    results(server.run(&["write", "--size", "64"]));
}

#[test]
fn several_clients_are_served_at_once() {
    let folder = Folder::new("perf-several");
    let server = Server::start(&folder);
    let clients: Vec<Child> = (0..3)
        .map(|_| {
            let mut client = server.client(&["write", "--size", "4KiB", "--mode", "bandwidth"]);
            client.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts")
        })
        .collect();
    for client in clients {
        let output = client.wait_with_output().expect("it ends");
        assert_eq!(results(Ran::new(&output)).len(), 1);
    }
}

#[test]
fn a_killed_server_ends_its_client_and_a_killed_client_only_its_test() {
    let folder = Folder::new("perf-killed");
    let mut server = Server::start(&folder);
    let endless = |mode| {
        let mut client =
            server.client(&["write", "--size", "64KiB", "--mode", mode, "--seconds", "1h"]);
        client.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts")
    };
    let mut client = endless("latency");
    server.says("write latency");
    client.kill().and_then(|()| client.wait()).expect("it runs");
    server.says("has closed the connection");
    let client = endless("bandwidth");
    server.says("write bandwidth");
    server.child.kill().and_then(|()| server.child.wait().map(drop)).expect("it runs");
    let ran = Ran::new(&client.wait_with_output().expect("it ends"));
    ran.failed(3, "127.0.0.1", "");
}

/// An idle server waits in the kernel.
#[test]
fn an_idle_server_costs_no_processor_time() {
    let folder = Folder::new("perf-idle");
    let server = Server::start(&folder);
    results(server.run(&["write", "--size", "8", "--mode", "latency"]));
    server.says("has left after 1 test");
    let state = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", server.child.id()));
        let stat = stat.expect("it runs");
        let fields: Vec<&str> =
            stat.rsplit_once(')').expect("a name").1.split_whitespace().collect();
        // State; user and system time in ticks.
        (fields[0].to_owned(), fields[11].to_owned(), fields[12].to_owned())
    };
    eventually("a server that sleeps", || (state().0 == "S").then_some(()));
    let before = state();
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert_eq!(state(), before);
}

/// The same on both kinds of device: the library is ours.
#[test]
fn a_loaded_device_is_measured_like_our_own() {
    let folder = Folder::new("perf-loaded");
    let library =
        std::env::current_exe().expect("a test knows its path").with_file_name("libibverbs.so");
    let library = library.to_str().expect("UTF-8");
    let options = ["--device", "dq_lo", "--verbs-library", library];
    let server = Server::with(&folder, &options);
    let operations = ["send", "write", "read", "--size", "8,5000"];
    let all = results(server.run(&[&operations[..], &options[..]].concat()));
    assert_eq!(all.len(), 3 * 2 * 2);
    assert!(all.iter().all(|one| one["retransmitted"].is_null() && one["selective"] == false));
    // Nothing tells a side that sleeps of a WRITE: it looks by itself.
    let asleep =
        ["write", "--size", "64", "--mode", "latency", "--wait", "sleep", "--seconds", "1s"];
    let all = results(server.run(&[&asleep[..], &options[..]].concat()));
    assert!(all[0]["messages"].as_u64() > Some(100), "{all:?}");
    let unknown = ["write", "--device", "no_such", "--verbs-library", library];
    server.run(&unknown).failed(2, "no_such", "");
    let ud = results(server.run(&[&["--transport", "ud", "--size", "64"], &options[..]].concat()));
    assert_eq!(ud.len(), 2);
}
