//! Two machines on one Ethernet link: network namespaces with a veth pair.
#![allow(dead_code, reason = "each test program that includes it uses a part")]

use std::fs::File;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::skip;

/// Two namespaces with a link: 10.79.0.1 and .2, fd79::1 and ::2.
pub(crate) struct Lab {
    pub(crate) names: [String; 2],
}

pub(crate) fn ip(arguments: &str) -> bool {
    let run = Command::new("ip").args(arguments.split_whitespace()).output();
    run.is_ok_and(|output| output.status.success())
}

impl Lab {
    /// `None`, with the reason reported, where it cannot be built.
    pub(crate) fn new(mtu: u32) -> Option<Lab> {
        let lab = Lab::unresolved(mtu)?;
        // From here on no packet waits for a neighbour.
        for side in 0..2 {
            let (name, host) = (&lab.names[side], 2 - side);
            for peer in [format!("10.79.0.{host}"), format!("fd79::{host}")] {
                let entry = format!("{peer} lladdr 02:00:00:00:79:0{host} dev v0 nud permanent");
                assert!(ip(&format!("-n {name} neigh replace {entry}")));
            }
        }
        Some(lab)
    }

    /// The same with empty tables of neighbours.
    pub(crate) fn unresolved(mtu: u32) -> Option<Lab> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = |side| format!("veth{}-{number}{side}", std::process::id());
        let lab = Lab { names: [name('a'), name('b')] };
        let [a, b] = &lab.names;
        let link =
            format!("link add v0 netns {a} mtu {mtu} type veth peer name v0 mtu {mtu} netns {b}");
        let made = ip(&format!("netns add {a}")) && ip(&format!("netns add {b}")) && ip(&link);
        let up = made
            && lab.names.iter().zip(1..).all(|(name, host)| {
                ip(&format!("-n {name} link set v0 address 02:00:00:00:79:0{host}"))
                    && ip(&format!("-n {name} addr add 10.79.0.{host}/24 dev v0"))
                    && ip(&format!("-n {name} addr add fd79::{host}/64 dev v0 nodad"))
                    && ip(&format!("-n {name} link set v0 up"))
            });
        let test = thread::current().name().unwrap_or("veth").to_owned();
        if !up {
            skip::note(&test, "network namespaces need root and iproute2");
            return None;
        }
        Some(lab)
    }

    /// Runs something on machine 0 or 1.
    pub(crate) fn on<R: Send>(&self, side: usize, work: impl FnOnce() -> R + Send) -> R {
        let enter = move || {
            enter(&self.names[side]);
            work()
        };
        thread::scope(|scope| scope.spawn(enter).join().expect("the work does not panic"))
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.names.iter().for_each(|name| {
            ip(&format!("netns del {name}"));
        });
    }
}

pub(crate) fn enter(name: &str) {
    let namespace = File::open(format!("/run/netns/{name}")).expect("just made");
    let kind = Some(LinkNameSpaceType::Network);
    move_into_link_name_space(namespace.as_fd(), kind).expect("root");
}

/// The address of machine 0 or 1.
pub(crate) fn address(side: usize, v6: bool) -> std::net::IpAddr {
    let text = if v6 { format!("fd79::{}", side + 1) } else { format!("10.79.0.{}", side + 1) };
    text.parse().expect("an address")
}
