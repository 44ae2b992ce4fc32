//! A process that may open fewer descriptors than it has callers. The limit is that of a whole
//! process, so this test has one to itself.

use std::net::SocketAddr;

use adapter::owned::{Adapter, Software};
use nic::local_peers::OWN_PORT;
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, send, socket_with,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

fn open(at: SocketAddr) -> Software {
    let mut adapter = Software::bind(at, 1 << 20, 0, 1).expect("loopback");
    adapter.open_same_host(None);
    adapter
}

#[test]
fn a_limit_on_descriptors_ends_no_process_for_its_neighbours() {
    let [first, second] = ["127.77.1.1:4791", "127.77.1.2:4791"].map(|at| at.parse().expect("one"));
    let (limited, other) = (open(first), open(second));
    let name = format!("dquant-board/{OWN_PORT}/{}", first.ip());
    let name = SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("short");
    let callers: Vec<_> = (0..40)
        .map(|_| {
            let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
            let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None).expect("a socket");
            connect(&socket, &name).expect("it listens");
            socket
        })
        .collect();
    let usual = getrlimit(Resource::Nofile);
    let few = Rlimit { current: Some(20), maximum: usual.maximum };
    setrlimit(Resource::Nofile, few).expect("fewer are allowed");
    // It drops this one, and waits for the others again: more than the kernel now polls for it.
    send(&callers[0], b"nonsense", SendFlags::NOSIGNAL).expect("it is connected");
    std::thread::sleep(std::time::Duration::from_millis(300));
    setrlimit(Resource::Nofile, usual).expect("as before");
    let found = other.discovery().expect("a segment").discover(limited.local(), OWN_PORT);
    assert!(found.is_ok(), "{:?}", found.err());
}
