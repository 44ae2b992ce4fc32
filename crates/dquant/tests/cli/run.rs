//! `dquant run`: unmodified verbs programs, what is refused before they start, captures that other
//! programs can read, and users without any privilege.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use cluster::local::{Asker, Membership, Refusal, Server};

use super::verbs_kit::{Meeting, Running, has_verbs};
use super::{Folder, Ran, skip};

/// An account that owns nothing.
const NOBODY: u32 = 65_534;

#[test]
fn what_cannot_work_is_refused_before_the_program_starts() {
    let folder = Folder::new("run-refused");
    if !has_verbs(&folder, "what_cannot_work_is_refused_before_the_program_starts") {
        return;
    }
    folder.write("file", "");
    for (args, error, hint) in [
        (&["--devices", "nowhere"][..], "interface \"nowhere\" does not exist", "lo"),
        (&["--devices", ","], "names no interface", "lo"),
        (&["--capture", "no/folder.pcap"], "cannot write no/folder.pcap", "writable"),
        (&["--capture", "file/x.pcap"], "cannot write file/x.pcap", "writable"),
        (&["--dscp", "64"], "64 is not in 0..=63", ""),
        (&["--capture", "."], "cannot write .: Is a directory", "writable"),
    ] {
        folder.run(&[&["run"], args, &["--", "true"]].concat()).failed(2, error, hint);
    }
    folder.run(&["run", "--", "no-such-program"]).failed(2, "cannot run no-such-program", "PATH");
    let class = folder.run(&["run", "--dscp", "26", "--", "sh", "-c", "echo $DQUANT_DSCP"]);
    assert_eq!(class.good().stdout, "26\n");
    // The device's name is accepted for the interface's, and the exit code is the program's.
    folder.run(&["run", "--devices", "dq_lo", "--", "true"]).good();
    assert_eq!(folder.run(&["run", "--", "false"]).exit, Some(1));
}

#[test]
fn a_library_that_is_none_is_refused_before_the_program_starts() {
    let folder = Folder::new("run-library");
    folder.write("text.so", "GROUP ( /usr/lib/libibverbs.so.1 )\n");
    folder.write("empty.so", "");
    let run = |library: &str| {
        let mut command = folder.command(&["run", "--", "echo", "started"]);
        command.env("DQUANT_VERBS_LIBRARY", library);
        Ran::new(&command.output().expect("the program starts"))
    };
    for (library, why) in [
        (".", "is no file"),
        ("/dev/null", "is no file"),
        ("text.so", "is no shared library"),
        ("empty.so", "is no shared library"),
        ("missing.so", "No such file"),
        ("", "No such file"),
    ] {
        let ran = run(library);
        assert_eq!(ran.stdout, "", "{library}");
        ran.failed(2, why, "cargo build -p ibverbs");
    }
}

#[test]
fn a_program_without_permission_gets_a_hint() {
    let folder = Folder::new("run-permission");
    if !has_verbs(&folder, "a_program_without_permission_gets_a_hint") {
        return;
    }
    folder.write("program", "");
    folder.run(&["run", "--", "./program"]).failed(2, "cannot run ./program", "chmod +x");
}

#[test]
fn a_runtime_directory_that_cannot_be_used_is_done_without() {
    let folder = Folder::new("run-runtime-directory");
    if !has_verbs(&folder, "a_runtime_directory_that_cannot_be_used_is_done_without") {
        return;
    }
    fs::create_dir(folder.0.join("tmp")).expect("writable");
    let run = |runtime: &str, tmp: &str| {
        let mut command = folder.command(&["run", "--", "sh", "-c", "echo $DQUANT_SYSFS"]);
        command.env("XDG_RUNTIME_DIR", folder.0.join(runtime)).env_remove("DQUANT_SYSFS");
        command.env("TMPDIR", folder.0.join(tmp));
        Ran::new(&command.output().expect("the program starts"))
    };
    let chosen = run("missing", "tmp").good().stdout;
    assert_eq!(Path::new(chosen.trim()), folder.0.join("tmp"));
    // Another user might have put a library there: another one is made.
    let entries = || fs::read_dir(folder.0.join("tmp")).expect("a folder").flatten();
    let own = entries().next().expect("one entry").path();
    fs::set_permissions(&own, fs::Permissions::from_mode(0o777)).expect("it is ours");
    let chosen = run("missing", "tmp").good().stdout;
    assert_eq!(Path::new(chosen.trim()), folder.0.join("tmp"));
    let other = entries().map(|entry| entry.path()).find(|path| *path != own);
    assert_eq!(
        fs::metadata(other.expect("two")).expect("ours").permissions().mode() & 0o777,
        0o700
    );
    assert_eq!(fs::read_dir(&own).expect("ours").count(), 1, "nothing is added to the open one");
}

/// Root of a user namespace is another user outside, whose directory in the shared temporary
/// directory has the name that this root would take. And a container may have no other place than
/// `/dev/shm`.
#[test]
fn containers_of_all_kinds_can_run_programs() {
    let folder = Folder::new("run-containers");
    let test = "containers_of_all_kinds_can_run_programs";
    if !has_verbs(&folder, test) {
        return;
    }
    let tmp = folder.0.join("tmp");
    fs::create_dir(&tmp).expect("writable");
    fs::set_permissions(&tmp, fs::Permissions::from_mode(0o1777)).expect("it is ours");
    let run = |wrap: &[&str], script: &str| {
        let plain = folder.command(&["run", "--", "ibv_devices"]);
        let mut command = Command::new(wrap[0]);
        command.args(&wrap[1..]).args([
            "sh",
            "-c",
            script,
            plain.get_program().to_str().expect("text"),
        ]);
        command.current_dir(&folder.0).env("TMPDIR", &tmp).env_remove("XDG_RUNTIME_DIR");
        command.env_remove("DQUANT_SYSFS").output()
    };
    let list = "ip link set lo up; exec \"$0\" run -- ibv_devices";
    let as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    let mapped = [&as_nobody[..], &["unshare", "-Urn"]].concat();
    let read_only = ["unshare", "-nm"];
    let ro = |shm: &str| {
        format!(
            "mount --make-rprivate / && mount -t tmpfs -o {shm} none /dev/shm && mount -o remount,ro,bind / && {list}"
        )
    };
    let (with_shm, without) = (ro("rw,noexec"), ro("ro"));
    for (name, wrap, script) in [
        ("outside", &["unshare", "-n"][..], list),
        ("mapped", &mapped, list),
        ("read-only", &read_only, &with_shm),
    ] {
        match run(wrap, script) {
            Ok(output) if output.status.success() => {
                let text = String::from_utf8_lossy(&output.stdout).into_owned();
                assert!(text.contains("dq_lo"), "{name}: {text}");
            }
            Ok(output) => {
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                assert!(!said.contains("private directory"), "{name}: {said}");
                skip::note(test, &format!("{name}: {said}"));
            }
            Err(error) => skip::note(test, &format!("{name}: {error}")),
        }
    }
    if let Ok(output) = run(&read_only, &without) {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let is_refused = said.contains("no private directory")
            && said.contains("/dev/shm: Read-only file system");
        // Who may not mount is told so by `mount`.
        assert!(is_refused || said.contains("mount") || said.contains("unshare"), "{said}");
    }
}

/// NCCL and many plug-ins open the name without a version first.
#[test]
fn every_name_of_the_library_leads_to_this_one() {
    let folder = Folder::new("run-names");
    let test = "every_name_of_the_library_leads_to_this_one";
    if !has_verbs(&folder, test) {
        return;
    }
    let source =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bindings/ibverbs/tests/c/by_name.c");
    let made =
        Command::new("cc").arg("-o").arg(folder.0.join("by_name")).arg(source).arg("-ldl").status();
    if !made.is_ok_and(|status| status.success()) {
        return skip::note(test, "no C compiler");
    }
    let names = ["libibverbs.so", "libibverbs.so.1"];
    let args = ["run", "--devices", "lo", "--", "./by_name"];
    assert_eq!(folder.run(&[&args[..], &names].concat()).good().stdout, "1\n1\n");
}

/// Whether tshark can be run.
fn has_tshark(test: &str) -> bool {
    let has = Command::new("tshark").arg("--version").output().is_ok();
    if !has {
        skip::note(test, "tshark is not installed");
    }
    has
}

/// Frames of a capture that tshark shows with these options.
fn tshark(folder: &Folder, file: &str, options: &[&str]) -> usize {
    let mut command = Command::new("tshark");
    // Programs of another user, of this test run too, may hold port 4791.
    command.args(["-n", "-d", "udp.port==29185-29438,infiniband"]);
    command.args(["--disable-protocol", "rpcordma", "-r", file]).args(options);
    // Tshark as root warns on stderr.
    let output = command.current_dir(&folder.0).output().expect("it is installed");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).lines().count()
}

#[test]
fn a_capture_of_a_program_is_good_for_tshark() {
    let folder = Folder::new("run-capture");
    let test = "a_capture_of_a_program_is_good_for_tshark";
    if !has_verbs(&folder, test) || !has_tshark(test) {
        return;
    }
    // Messages of 4 packets each way with their acknowledgements, and messages so short that tshark
    // would by default parse them as something else.
    for (size, least) in [("4096", 402), ("8", 102)] {
        let meeting = Meeting::new();
        let play = |name, server| {
            let mut player = meeting.player(&folder, &["--capture", name], "50", server);
            player.args(["-s", size]);
            Running::start(player)
        };
        let server = play("%d-server.pcap", None);
        server.explained(&folder, "INIT");
        assert!(play("%d-client.pcap", Some("127.0.0.1")).finish().success());
        assert!(server.finish().success());
        for file in ["lo-server.pcap", "lo-client.pcap"] {
            let report = folder.run(&["capture", "check", file, "--json"]).good().json();
            assert!(report["packets"].as_u64() >= Some(least), "{report}");
            assert_eq!(report["roce"], report["packets"]);
            let all = tshark(&folder, file, &[]);
            assert_eq!(Some(all as u64), report["packets"].as_u64());
            assert_eq!(tshark(&folder, file, &["-Y", "infiniband.bth"]), all);
            assert_eq!(tshark(&folder, file, &["-Y", "_ws.malformed"]), 0);
        }
    }
}

#[test]
fn two_programs_do_not_write_over_each_others_capture() {
    let folder = Folder::new("run-one-capture");
    if !has_verbs(&folder, "two_programs_do_not_write_over_each_others_capture") {
        return;
    }
    let meeting = Meeting::new();
    let options = ["--capture", "both.pcap"];
    let server = Running::start(meeting.player(&folder, &options, "50", None));
    server.explained(&folder, "INIT");
    let mut client = meeting.player(&folder, &options, "50", Some("127.0.0.1"));
    client.stderr(std::process::Stdio::piped());
    let client = client.output().expect("the program starts");
    assert!(client.status.success() && server.finish().success());
    let said = String::from_utf8_lossy(&client.stderr);
    assert!(said.contains("another capture is being written") && said.contains("%p"), "{said}");
    let report = folder.run(&["capture", "check", "both.pcap", "--json"]).good().json();
    assert!(report["packets"].as_u64() >= Some(402), "{report}");
}

/// The command, as a user without privilege who has only `home`.
fn as_nobody(mut command: Command, home: &Path) -> Command {
    command.uid(NOBODY).gid(NOBODY).current_dir(home);
    command.env("HOME", home).env("TMPDIR", home).env("XDG_RUNTIME_DIR", home);
    command
}

/// A home for the user nobody, if this user can become it and it can execute the program.
fn home_of_nobody(folder: &Folder, test: &str) -> Option<std::path::PathBuf> {
    if rustix::process::geteuid().as_raw() == NOBODY {
        skip::note(test, "the tests run as nobody, so that there is no other user");
        return None;
    }
    let home = folder.0.join("home");
    fs::create_dir(&home).expect("writable");
    let probe = || {
        chown(&home, Some(NOBODY), Some(NOBODY))?;
        as_nobody(folder.command(&["run", "--", "true"]), &home).output()
    };
    match probe() {
        Ok(output) if output.status.success() => Some(home),
        Ok(output) => {
            skip::note(test, &format!("as nobody: {}", String::from_utf8_lossy(&output.stderr)));
            None
        }
        Err(error) => {
            skip::note(test, &format!("cannot become nobody: {error}"));
            None
        }
    }
}

#[test]
fn nobody_can_run_programs_and_is_explained_to_root_and_itself_only() {
    let folder = Folder::new("run-nobody");
    let test = "nobody_can_run_programs_and_is_explained_to_root_and_itself_only";
    if !has_verbs(&folder, test) {
        return;
    }
    let Some(home) = home_of_nobody(&folder, test) else {
        return;
    };
    let meeting = Meeting::new();
    let player = |server| as_nobody(meeting.player(&folder, &[], "1000", server), &home);
    let server = Running::start(player(None));
    server.explained(&folder, "INIT");
    let ask = |pid: &str| {
        let mut command = as_nobody(folder.command(&["explain", pid]), &home);
        Ran::new(&command.output().expect("the program starts"))
    };
    ask(&server.pid()).good();
    assert!(Running::start(player(Some("127.0.0.1"))).finish().success());
    assert!(server.finish().success());

    let roots = Running::player(&folder, &Meeting::new(), None);
    roots.explained(&folder, "INIT");
    ask(&roots.pid()).failed(3, "only to its own user", "root");
}

#[test]
fn a_program_of_a_job_gets_the_dscp_that_the_agent_names() {
    let folder = Folder::new("run-job");
    if !has_verbs(&folder, "a_program_of_a_job_gets_the_dscp_that_the_agent_names") {
        return;
    }
    let socket = folder.0.join("agent.sock");
    let run = |job: &str| {
        let mut command =
            folder.command(&["run", "--job", job, "--", "sh", "-c", "echo $DQUANT_DSCP"]);
        command.env("DQUANT_AGENT", &socket);
        Ran::new(&command.output().expect("the program starts"))
    };
    run("llm").failed(3, "job 'llm': no agent answers at", "dquant agent");
    let answer = |_: &Asker, name: &str| match name {
        "llm" => Ok(Membership { job: 7, name: name.to_owned(), dscp: 33, pace_bps: None }),
        _ => Err(Refusal { error: format!("no job '{name}'"), hint: "list them".to_owned() }),
    };
    let _agent = Server::start(&socket, Arc::new(answer)).expect("the folder is ours");
    let ran = run("llm").good();
    assert_eq!(ran.stdout, "33\n");
    assert!(ran.stderr.contains("job 7, 'llm': packets have DSCP 33"), "{ran:?}");
    run("lmm").failed(2, "no job 'lmm'", "list them");
    folder.run(&["run", "--job", "llm", "--dscp", "1", "--", "true"]).failed(
        2,
        "cannot be used",
        "",
    );
}
