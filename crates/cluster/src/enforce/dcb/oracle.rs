//! Our messages beside those of iproute2's `dcb`, byte by byte, as strace sees them. Numbers of
//! requests are left out.
//!
//! `dcb ets set` first reads what there is, and virtual Ethernet has nothing. For that command a
//! preloaded function puts what a driver would answer into the place of the refusal.
//!
//! Needs root, iproute2, strace and a C compiler; without them the tests report that and pass.

#[path = "../../../../../testing/skip.rs"]
mod skip;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use nic::netlink::Request;

use super::messages::{self, Ets};
use super::table::{Bandwidth, ETS, Mapping, STRICT};
use super::{Dcb, fake};
use crate::enforce::{EnforceError, Enforcer, PortPlan};

/// Answers the first question as a driver does whose tables are all 0.
const DRIVER: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <sys/socket.h>

ssize_t recvmsg(int fd, struct msghdr *message, int flags)
{
    static int answered;
    ssize_t (*real)(int, struct msghdr *, int) = dlsym(RTLD_NEXT, "recvmsg");
    ssize_t got = real(fd, message, flags);
    if (got < 36 || answered++)
        return got;
    unsigned char *at = message->msg_iov->iov_base, id[8];
    memcpy(id, at + 8, 8); /* number and port of the request */
    static const unsigned char state[96] = {
        96, 0, 0, 0, 78, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 21, 0, 0,
        7, 0, 1, 0, 'v', '0', 0, 0, 67, 0, 13, 0x80, 63, 0, 1, 0, 0, 8,
    };
    static const unsigned char done[36] = { 36, 0, 0, 0, 2, 0, 0, 1 };
    memcpy(at, state, 96);
    memcpy(at + 8, id, 8);
    memcpy(at + 96, done, 36);
    memcpy(at + 104, id, 8);
    return 132;
}
"#;

/// A namespace with a virtual Ethernet interface `v0`, and a folder.
struct Lab {
    name: String,
    folder: PathBuf,
}

fn run(program: &str, arguments: &str) -> bool {
    let run = Command::new(program).args(arguments.split_whitespace()).output();
    run.is_ok_and(|output| output.status.success())
}

impl Lab {
    /// `None`, with the reason reported, where this cannot be tested.
    fn new(programs: &[&str]) -> Option<Lab> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("dcb{}-{number}", std::process::id());
        let lab = Lab { folder: std::env::temp_dir().join(&name), name };
        fs::create_dir(&lab.folder).expect("a temporary folder");
        let missing = programs.iter().find(|program| !run("which", program));
        let reason = match missing {
            Some(program) => format!("{program} is not installed"),
            None if lab.build() => return Some(lab),
            None => "network namespaces need root and iproute2".to_owned(),
        };
        skip::note(std::thread::current().name().unwrap_or("dcb"), &reason);
        None
    }

    fn build(&self) -> bool {
        let name = &self.name;
        run("ip", &format!("netns add {name}"))
            && run("ip", &format!("-n {name} link add v0 type veth peer name v1"))
    }

    fn driver(&self) -> PathBuf {
        let (source, library) = (self.folder.join("driver.c"), self.folder.join("driver.so"));
        fs::write(&source, DRIVER).expect("space");
        let arguments = format!("-shared -fPIC -o {} {}", library.display(), source.display());
        assert!(run("cc", &arguments), "the driver compiles");
        library
    }

    /// What `dcb` sends, message by message, with a preloaded library.
    fn dcb(&self, preload: Option<&Path>, arguments: &str) -> Vec<Vec<u8>> {
        let trace = self.folder.join("trace");
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name, "strace", "-o"]).arg(&trace);
        command.args(["-e", "trace=sendto,sendmsg", "-e", "write=all"]);
        if let Some(library) = preload {
            command.args(["-E", &format!("LD_PRELOAD={}", library.display())]);
        }
        command.arg("dcb").args(arguments.split_whitespace());
        let _ = command.output().expect("ip runs");
        sent(&fs::read_to_string(&trace).expect("a trace"))
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let _ = run("ip", &format!("netns del {}", self.name));
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// The bytes in strace's dumps, which have 16 on a line behind their number.
fn sent(trace: &str) -> Vec<Vec<u8>> {
    let mut messages: Vec<Vec<u8>> = Vec::new();
    for line in trace.lines() {
        let Some((number, rest)) = line.strip_prefix(" | ").and_then(|rest| rest.split_once("  "))
        else {
            continue;
        };
        if number == "00000" {
            messages.push(Vec::new());
        }
        let hex = rest.get(..49).unwrap_or(rest).split_whitespace();
        let bytes = hex.map(|byte| u8::from_str_radix(byte, 16).expect("two digits"));
        messages.last_mut().expect("the first line has number 0").extend(bytes);
    }
    messages
}

/// Without the number of the request, and that of the sender.
fn masked(mut message: Vec<u8>) -> Vec<u8> {
    message[8..16].fill(0);
    message
}

fn ours(mut request: Request) -> Vec<u8> {
    masked(request.finish(1, true).to_vec())
}

#[test]
fn questions_and_priorities_are_those_of_dcb() {
    let Some(lab) = Lab::new(&["dcb", "strace"]) else { return };
    let mapping = |dscp, priority| Mapping { dscp, priority };
    let some = [mapping(10, 1), mapping(26, 3), mapping(48, 4)];
    for (arguments, own) in [
        ("ets show dev v0", messages::get("v0")),
        ("app add dev v0 dscp-prio 10:1 26:3 48:4", messages::add("v0", &some)),
        ("app del dev v0 dscp-prio 10:1 26:3 48:4", messages::delete("v0", &some)),
        ("app add dev v0 dscp-prio 63:7", messages::add("v0", &[mapping(63, 7)])),
    ] {
        let sent = lab.dcb(None, arguments);
        let first = sent.into_iter().next().expect("dcb asks");
        assert_eq!(masked(first), ours(own), "dcb {arguments}");
    }
}

#[test]
fn bandwidths_are_those_of_dcb() {
    let Some(lab) = Lab::new(&["dcb", "strace", "cc"]) else { return };
    let bandwidth = Bandwidth {
        percent: [20, 50, 30, 0, 0, 0, 0, 0],
        selection: [ETS, ETS, ETS, STRICT, STRICT, STRICT, STRICT, STRICT],
        class_of: [0, 1, 2, 3, 0, 0, 0, 0],
    };
    let arguments = "ets set dev v0 willing off \
        tc-tsa 0:ets 1:ets 2:ets 3:strict 4:strict 5:strict 6:strict 7:strict \
        tc-bw 0:20 1:50 2:30 3:0 4:0 5:0 6:0 7:0 prio-tc 0:0 1:1 2:2 3:3 4:0 5:0 6:0 7:0";
    let sent = lab.dcb(Some(&lab.driver()), arguments);
    assert_eq!(sent.len(), 2, "it asks, then it sets");
    let own = messages::set_ets("v0", &Ets::of_classes(8).with(&bandwidth));
    assert_eq!(masked(sent[1].clone()), ours(own));
}

#[test]
fn virtual_ethernet_has_no_dcb_and_that_is_said() {
    let Some(lab) = Lab::new(&[]) else { return };
    let path = format!("/run/netns/{}", lab.name);
    let refused = |interface: &'static str| {
        let path = path.clone();
        let enter = move || {
            use std::os::fd::AsFd;
            let namespace = fs::File::open(path).expect("just made");
            let kind = Some(rustix::thread::LinkNameSpaceType::Network);
            rustix::thread::move_into_link_name_space(namespace.as_fd(), kind).expect("root");
            let mut dcb = Dcb::open().expect("netlink");
            let plan = fake::plan(&[(1, 10, 50), (2, 18, 30)]);
            dcb.apply(&[PortPlan { interface: interface.to_owned(), plan }]).expect_err("no NIC")
        };
        std::thread::spawn(enter).join().expect("no panic")
    };
    let error = refused("v0");
    assert!(matches!(&error, EnforceError::Unsupported { what: "DCB", .. }), "{error}");
    assert!(error.to_string().contains("Operation not supported"), "{error}");
    assert!(error.hint().contains("DCB"));
    assert!(matches!(refused("none-such"), EnforceError::NoInterface(_)));
}
