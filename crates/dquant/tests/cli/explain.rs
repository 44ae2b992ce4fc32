//! `dquant explain`: unmodified verbs programs on loopback, queried while they run.

use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Write};
use std::process::Command;
use std::time::Duration;

use rustix::io::ioctl_fionbio;
use rustix::process::Signal;
use serde_json::Value;

use super::verbs_kit::{Meeting, PINGPONG, Running, eventually, has_verbs, listed};
use super::{Folder, Ran, skip};

/// A full pipe; keep its reader open.
fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, mut writer) = io::pipe().expect("a pipe");
    ioctl_fionbio(&writer, true).expect("pipes can do that");
    for chunk in [4096, 1] {
        while writer.write_all(&vec![0; chunk]).is_ok() {}
    }
    ioctl_fionbio(&writer, false).expect("pipes can do that");
    (reader, writer)
}

/// Checks every figure that is always present, whether its event happened or not.
fn has_every_figure(qp: &Value) {
    for name in [
        "retransmitted_packets",
        "timeouts",
        "rnr_naks_sent",
        "rnr_naks_received",
        "seq_naks_sent",
        "seq_naks_received",
        "invalid_request_naks_sent",
        "remote_access_naks_sent",
        "remote_operation_naks_sent",
        "fatal_naks_received",
        "cnps_sent",
        "cnps_received",
    ] {
        assert!(qp["counters"][name].is_u64(), "{name}: {qp}");
    }
    let samples = qp["rtt"]["histogram"].as_array().expect("a histogram");
    let total: u64 = samples.iter().map(|count| count.as_u64().expect("a count")).sum();
    assert!(total > 0, "{qp}");
}

/// Runs a script in a network namespace, with the program as `$0`; nothing where that is not
/// allowed.
fn in_a_pod(folder: &Folder, test: &str, script: &str) -> Option<Ran> {
    if !has_verbs(folder, test) {
        return None;
    }
    let (dquant, mut command) = (folder.command(&[]), Command::new("unshare"));
    command.args(["-n", "sh", "-c", script]).arg(dquant.get_program()).current_dir(&folder.0);
    let ran = Ran::new(&command.output().expect("util-linux is installed"));
    if ran.stderr.contains("Operation not permitted") {
        skip::note(test, ran.stderr.trim());
        return None;
    }
    Some(ran)
}

/// Containers of one pod: one network namespace, and a PID namespace for each, where the kernel has
/// no number for a process of another.
#[test]
fn a_program_of_another_pid_namespace_is_explained() {
    let folder = Folder::new("explain-container");
    let test = "a_program_of_another_pid_namespace_is_explained";
    let script = "ip link set lo up
        container='unshare -pf --mount-proc --kill-child'
        $container \"$0\" run --devices lo -- ibv_rc_pingpong -d dq_lo -g 0 > program 2>&1 & program=$!
        for try in $(seq 600); do
            $container \"$0\" explain > list 2> notes && [ -s list ] && break
            kill -0 $program || break
            sleep 0.1
        done
        kill -9 $program
        cat list; cat program notes >&2";
    let Some(Ran { stdout: list, stderr: said, .. }) = in_a_pod(&folder, test, script) else {
        return;
    };
    assert!(list.contains("process       1  dq_lo"), "{list}{said}");
    assert!(said.contains("process 1 is not visible in this PID namespace"), "{said}");
}

/// Neither sees the process of the other, so neither touches its memory.
#[test]
fn programs_of_two_pid_namespaces_connect_by_packets() {
    let folder = Folder::new("explain-two-containers");
    let test = "programs_of_two_pid_namespaces_connect_by_packets";
    let script = "ip link set lo up
        container='unshare -pf --mount-proc --kill-child'
        pingpong='ibv_rc_pingpong -d dq_lo -g 0 -n 100'
        $container \"$0\" run --devices lo -- $pingpong & server=$!
        for try in $(seq 300); do
            kill -0 $server || break
            $container \"$0\" run --devices lo -- $pingpong 127.0.0.1 && wait $server && exit
            sleep 0.1
        done
        kill -9 $server
        exit 1";
    let Some(ran) = in_a_pod(&folder, test, script) else { return };
    assert_eq!(ran.good().stdout.matches("100 iters in").count(), 2);
}

#[test]
fn a_running_pair_is_explained_from_both_ends() {
    let folder = Folder::new("explain-pair");
    if !has_verbs(&folder, "a_running_pair_is_explained_from_both_ends") {
        return;
    }
    let meeting = Meeting::new();
    let server = Running::player(&folder, &meeting, None);
    let alone = server.explained(&folder, "INIT");
    assert_eq!(alone["schema"], "dquant.explain/1");
    assert_eq!((&alone["program"], &alone["device"]), (&PINGPONG.into(), &"dq_lo".into()));
    assert!(alone["queue_pairs"][0]["peer"].is_null(), "{alone}");
    assert!(alone["queue_pairs"][0]["receives"].as_u64() > Some(0), "{alone}");

    meeting.wait_for_server();
    let client = Running::player(&folder, &meeting, Some("127.0.0.1"));
    let theirs = client.explained(&folder, "RTS")["queue_pairs"][0].clone();
    let ours = eventually("a round trip", || {
        let all = server.explained(&folder, "RTS");
        let first = all["queue_pairs"][0].clone();
        (!first["rtt"].is_null()).then_some(first)
    });
    assert_eq!((&ours["peer"]["qpn"], &theirs["peer"]["qpn"]), (&theirs["qpn"], &ours["qpn"]));
    assert_eq!(ours["peer"]["ip"], "127.0.0.1");
    assert_eq!(ours["transport"], "RC");
    assert!(ours["last_error"].is_null(), "{ours}");
    has_every_figure(&ours);

    let number = ours["qpn"].to_string();
    let Ran { stdout: text, .. } = folder.run(&["explain", &server.pid(), "--qp", &number]).good();
    for words in [
        "path: UDP sockets\n  why: ",
        " RC: RTS (ready to send and receive), peer 127.0.0.1 qp 0x",
        "\n  PSN  ",
        "\n  settings     timeout",
        "\n  payload  ",
        "\n  troubles  ",
        "\n  round trips  ",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let other = folder.run(&["explain", &server.pid(), "--qp", "0x1"]);
    other.failed(2, "has no queue pair 0x1", "");
}

#[test]
fn a_peer_that_was_killed_is_named_with_packet_and_cause() {
    let folder = Folder::new("explain-killed");
    if !has_verbs(&folder, "a_peer_that_was_killed_is_named_with_packet_and_cause") {
        return;
    }
    let meeting = Meeting::new();
    // It would report that its work request failed, and end; blocked on the pipe it can still be
    // queried.
    let (_reader, full) = full_pipe();
    let server = Running::silenced(&folder, &meeting, &full);
    meeting.wait_for_server();
    let client = Running::player(&folder, &meeting, Some("127.0.0.1"));
    let peer = client.explained(&folder, "RTS")["queue_pairs"][0]["qpn"].clone();
    // Only the side that waits for a reply notices that the other has ended: it must be the
    // server's turn.
    eventually("a message on its way", || {
        client.signal(Signal::STOP);
        std::thread::sleep(Duration::from_millis(30));
        let ran = folder.run(&["explain", &server.pid(), "--json"]).good();
        let waits = ran.json()["queue_pairs"][0]["flow"]["in_flight_packets"] != 0;
        if !waits {
            client.signal(Signal::CONT);
            std::thread::sleep(Duration::from_millis(3));
        }
        waits.then_some(())
    });
    client.kill();

    let failed = server.explained(&folder, "ERROR")["queue_pairs"][0].clone();
    let error = &failed["last_error"];
    assert_eq!(error["cause"], "no_response", "{failed}");
    assert_eq!((&error["peer"]["ip"], &error["peer"]["qpn"]), (&"127.0.0.1".into(), &peer));
    assert_eq!(error["psn"], failed["flow"]["unacknowledged_psn"], "{failed}");
    let counters = &failed["counters"];
    assert_eq!((&counters["timeouts"], &counters["retries_exceeded"]), (&7.into(), &1.into()));
    assert!(counters["retransmitted_packets"].as_u64() >= Some(7), "{failed}");

    let Ran { stdout: text, .. } = folder.run(&["explain", &server.pid()]).good();
    let psn = format!("{:#08x}", error["psn"].as_u64().expect("a number"));
    let qpn = format!("{:#x}", peer.as_u64().expect("a number"));
    let line = format!("no response to PSN {psn} from 127.0.0.1 qp {qpn}; last acknowledged 0x");
    assert!(text.contains(&line), "{line}: {text}");
    // Who exchanged packets in shared memory knows that the peer's process is gone.
    let is_known = text.contains("packets: the peer's process has ended");
    let hint = if is_known { "the peer's process has ended" } else { "the peer responded before" };
    assert!(text.contains(&format!("\n  hint         {hint}")), "{text}");
    let list = folder.run(&["explain"]).good().stdout;
    let own = list.lines().find(|line| line.contains(&server.pid())).expect("it is listed");
    assert!(own.ends_with("1 queue pair, 1 failed"), "{list}");
}

#[test]
fn the_list_has_the_living_and_not_the_dead() {
    let folder = Folder::new("explain-list");
    if !has_verbs(&folder, "the_list_has_the_living_and_not_the_dead") {
        return;
    }
    let [one, other] = [(); 2].map(|()| Running::player(&folder, &Meeting::new(), None));
    let pids: [u64; 2] = [&one, &other].map(|player| {
        player.explained(&folder, "INIT");
        player.pid().parse().expect("a number")
    });
    let list = || listed(&folder.run(&["explain", "--json"]).good());
    assert!(pids.iter().all(|pid| list().contains(pid)), "{:?}", list());
    let watch = ["explain", &one.pid(), "--watch", "10ms", "--json"];
    let mut watching = folder.command(&watch);
    watching.stdout(File::create(folder.0.join("watched")).expect("writable"));
    watching.stderr(File::create(folder.0.join("noted")).expect("writable"));
    let watching = Running::start(watching);
    eventually("an answer", || (!folder.read("watched").is_empty()).then_some(()));
    let pid = one.pid();
    one.kill();
    assert!(watching.finish().success(), "what is watched may end");
    let noted = String::from_utf8(folder.read("noted")).expect("text");
    assert!(noted.contains(&format!("process {pid} has ended")), "{noted}");
    assert!(!list().contains(&pids[0]) && list().contains(&pids[1]), "{:?}", list());
    let ran = folder.run(&["explain", &pid]);
    ran.failed(2, &format!("there is no process {pid}"), "has ended");
}

#[test]
fn whoever_is_no_verbs_program_is_not_explained() {
    let folder = Folder::new("explain-nobody");
    let own = std::process::id().to_string();
    let ran = folder.run(&["explain", &own]);
    ran.failed(2, "has no device open", "dquant explain");
    // No process has this number: it exceeds the kernel's maximum.
    let none = folder.run(&["explain", "4194305"]);
    none.failed(2, "there is no process 4194305", "has ended");
}
