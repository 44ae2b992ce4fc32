//! Where two programs meet: one machine, or two network namespaces on a virtual cable.
//!
//! A namespace has no name. A process holds it open and waits for the end of its input, which is a
//! pipe from here: when this program ends, in whatever way, the namespaces and their cable
//! disappear.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use super::obstacle::Obstacle;

/// Addresses of the two ends of a cable.
const ADDRESSES: [&str; 2] = ["10.78.0.1", "10.78.0.2"];

/// Addresses of the ends of two cables, and of the router between them.
const FAR_ADDRESSES: [&str; 2] = ["10.78.1.1", "10.78.2.2"];
const GATEWAYS: [&str; 2] = ["10.78.1.254", "10.78.2.254"];

/// Names of the interfaces at the ends.
const INTERFACES: [&str; 2] = ["left", "right"];

/// What limits or damages packets between the ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Impairment {
    None,
    /// Of a million packets that arrive at either end, after segmentation.
    LossPpm(u32),
    /// A token bucket in a router between two cables, from the first side to the second. In front
    /// of the sender's own cable it would be a queue of the sender's machine, of which its TCP
    /// takes a millisecond's worth and no more ("small queues"), whoever is beside it.
    Bottleneck {
        mbit: u32,
        latency_ms: u32,
    },
}

/// One kind of place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Where {
    /// One namespace, over its loopback interface.
    SameHost,
    /// Two namespaces.
    Cable { mtu: u32, impairment: Impairment },
}

/// A place that exists.
#[derive(Debug)]
pub(super) struct Place {
    /// Where the client runs, and where the server runs.
    pub(super) sides: [Side; 2],
    /// Where the token bucket is, if there is one.
    pub(super) router: Option<Side>,
    _holders: Vec<Holder>,
}

/// Where a program runs.
#[derive(Clone, Debug)]
pub(super) struct Side {
    /// The process that holds the namespace; this one's own without.
    holder: Option<u32>,
    pub(super) address: String,
    /// The interface with the address.
    pub(super) interface: &'static str,
}

impl Side {
    /// This program's own namespace.
    pub(super) fn here() -> Side {
        Side { holder: None, address: "127.0.0.1".to_owned(), interface: "lo" }
    }

    /// What starts a program there.
    pub(super) fn prefix(&self) -> Vec<String> {
        let enter = |pid| {
            ["nsenter".to_owned(), format!("--target={pid}"), "--net".into(), "--mount".into()]
                .to_vec()
        };
        self.holder.map(enter).unwrap_or_default()
    }

    /// Whether somebody listens on the TCP port there.
    pub(super) fn listens(&self, port: u16) -> bool {
        let pid = self.holder.map_or("self".to_owned(), |pid| pid.to_string());
        let tables =
            ["tcp", "tcp6"].map(|name| fs::read_to_string(format!("/proc/{pid}/net/{name}")));
        tables.iter().flatten().any(|table| has_listener(table, port))
    }

    /// Runs a command of the system there.
    ///
    /// # Errors
    /// With the last line that it wrote.
    pub(super) fn system(&self, line: &str) -> Result<String, Obstacle> {
        let words: Vec<String> =
            self.prefix().into_iter().chain(line.split_whitespace().map(str::to_owned)).collect();
        let output = Command::new(&words[0]).args(&words[1..]).stdin(Stdio::null()).output();
        let output = output.map_err(|error| Obstacle(format!("{line}: {error}")))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() {
            return Ok(text(&output.stdout));
        }
        let error = text(&output.stderr);
        Err(Obstacle(format!("{line}: {}", error.trim().lines().last().unwrap_or("it failed"))))
    }
}

fn has_listener(table: &str, port: u16) -> bool {
    let end = format!(":{port:04X}");
    table.lines().skip(1).any(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let (local, state) = (fields.next(), fields.nth(1));
        local.is_some_and(|local| local.ends_with(&end)) && state == Some("0A")
    })
}

/// A process that holds a namespace.
#[derive(Debug)]
struct Holder(Child);

impl Holder {
    fn start() -> Result<Holder, Obstacle> {
        let script = "mount -t sysfs sysfs /sys 2>/dev/null; echo ready; read end";
        let mut command = Command::new("unshare");
        command.args(["--net", "--mount", "sh", "-c", script]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let failed = |error| Obstacle(format!("unshare: {error}"));
        let mut child = command.spawn().map_err(failed)?;
        let mut line = String::new();
        if let Some(out) = child.stdout.take() {
            let _ = BufReader::new(out).read_line(&mut line);
        }
        let holder = Holder(child);
        match line.trim() {
            "ready" => Ok(holder),
            _ => Err(Obstacle::new("no network namespaces here: they need root")),
        }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Place {
    /// Makes the place.
    ///
    /// # Errors
    /// When the machine does not permit it or lacks a program.
    pub(super) fn make(what: Where) -> Result<Place, Obstacle> {
        match what {
            Where::SameHost => Place::same_host(),
            Where::Cable { mtu, impairment: Impairment::Bottleneck { mbit, latency_ms } } => {
                Place::routed(mtu, mbit, latency_ms)
            }
            Where::Cable { mtu, impairment } => Place::cable(mtu, impairment),
        }
    }

    fn same_host() -> Result<Place, Obstacle> {
        let holder = Holder::start()?;
        let side = Side { holder: Some(holder.0.id()), ..Side::here() };
        side.system("ip link set lo up")?;
        Ok(Place { sides: [side.clone(), side], router: None, _holders: vec![holder] })
    }

    /// Two cables with a router between them, whose token bucket limits the way to the second side.
    fn routed(mtu: u32, mbit: u32, latency_ms: u32) -> Result<Place, Obstacle> {
        let holders = [Holder::start()?, Holder::start()?, Holder::start()?];
        let [first, second, router] = [0, 1, 2].map(|at: usize| holders[at].0.id());
        let side = |pid, at: usize| Side {
            holder: Some(pid),
            address: FAR_ADDRESSES[at].to_owned(),
            interface: INTERFACES[at],
        };
        let (sides, router) = ([side(first, 0), side(second, 1)], side(router, 1));
        router.system("sysctl -qw net.ipv4.ip_forward=1")?;
        for (side, gateway) in sides.iter().zip(GATEWAYS) {
            let Side { holder, address, interface } = side;
            let (here, there) = (holder.unwrap_or(0), router.holder.unwrap_or(0));
            Side::here().system(&format!(
                "ip link add {interface} netns {here} mtu {mtu} type veth peer name {interface} netns {there} mtu {mtu}"
            ))?;
            side.system("ip link set lo up")?;
            side.system(&format!("ip addr add {address}/24 dev {interface}"))?;
            router.system(&format!("ip addr add {gateway}/24 dev {interface}"))?;
            side.system(&format!("ip link set {interface} up"))?;
            router.system(&format!("ip link set {interface} up"))?;
            wait_for_carrier(side)?;
            side.system(&format!("ip route add default via {gateway}"))?;
        }
        // A bucket of 64 KiB holds the largest segmented send.
        router.system(&format!(
            "tc qdisc add dev {} root tbf rate {mbit}mbit burst 64kb latency {latency_ms}ms",
            router.interface
        ))?;
        Ok(Place { sides, router: Some(router), _holders: holders.into() })
    }

    fn cable(mtu: u32, impairment: Impairment) -> Result<Place, Obstacle> {
        let holders = [Holder::start()?, Holder::start()?];
        let pids = [0, 1].map(|side: usize| holders[side].0.id());
        let sides = [0, 1].map(|side: usize| Side {
            holder: Some(pids[side]),
            address: ADDRESSES[side].to_owned(),
            interface: INTERFACES[side],
        });
        let [left, right] = INTERFACES;
        Side::here().system(&format!(
            "ip link add {left} netns {} mtu {mtu} type veth peer name {right} netns {} mtu {mtu}",
            pids[0], pids[1]
        ))?;
        for side in &sides {
            let Side { address, interface, .. } = side;
            side.system("ip link set lo up")?;
            side.system(&format!("ip addr add {address}/24 dev {interface}"))?;
            side.system(&format!("ip link set {interface} up"))?;
            impair(side, impairment)?;
        }
        sides.iter().try_for_each(wait_for_carrier)?;
        Ok(Place { sides, router: None, _holders: holders.into() })
    }
}

/// The kernel reports a carrier up to a second after both ends are up.
fn wait_for_carrier(side: &Side) -> Result<(), Obstacle> {
    for _ in 0..100 {
        if side.system(&format!("ip link show dev {} up", side.interface))?.contains("state UP") {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(20));
    }
    Err(Obstacle(format!("{} has no carrier", side.interface)))
}

fn impair(side: &Side, impairment: Impairment) -> Result<(), Obstacle> {
    let Impairment::LossPpm(ppm) = impairment else {
        return Ok(());
    };
    let interface = side.interface;
    // Otherwise a whole segmented send is one packet to the filter.
    side.system(&format!(
        "ethtool -K {interface} tso off gso off gro off tx-udp-segmentation off"
    ))?;
    side.system("nft add table inet lossy")?;
    side.system("nft add chain inet lossy in { type filter hook prerouting priority -300 ; }")?;
    side.system(&format!(
        "nft add rule inet lossy in udp dport 4791 numgen random mod 1000000 < {ppm} counter drop"
    ))?;
    Ok(())
}

/// Packets and bytes that a token bucket has sent, and packets that it dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sent {
    pub(super) bytes: u64,
    pub(super) packets: u64,
    pub(super) dropped: u64,
}

impl Sent {
    /// The counters of the bucket of a bottleneck.
    ///
    /// # Errors
    /// When they cannot be read.
    pub(super) fn of(side: &Side) -> Result<Sent, Obstacle> {
        let text = side.system(&format!("tc -s qdisc show dev {}", side.interface))?;
        Sent::parse(&text).ok_or_else(|| Obstacle(format!("tc printed '{}'", text.trim())))
    }

    fn parse(text: &str) -> Option<Sent> {
        // Sent 1234 bytes 5 pkt (dropped 6, overlimits 7 requeues 0)
        let line = text.lines().map(str::trim).find(|line| line.starts_with("Sent "))?;
        let words: Vec<&str> = line.split([' ', ',']).collect();
        Some(Sent {
            bytes: words.get(1)?.parse().ok()?,
            packets: words.get(3)?.parse().ok()?,
            dropped: words.get(6)?.parse().ok()?,
        })
    }

    pub(super) fn since(self, earlier: Sent) -> Sent {
        Sent {
            bytes: self.bytes - earlier.bytes,
            packets: self.packets - earlier.packets,
            dropped: self.dropped - earlier.dropped,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_the_kernel_are_read() {
        let table = "  sl  local_address rem_address   st\n\
                     0: 0100007F:4E20 00000000:0000 0A 0\n1: 0100007F:4E21 00000000:0000 01 0\n";
        assert!(has_listener(table, 20_000));
        assert!(!has_listener(table, 20_001), "connected, not listening");
        let text = "qdisc tbf 8001: root refcnt 2 rate 200Mbit\n Sent 1250 bytes 5 pkt (dropped 6, overlimits 7 requeues 0)\n";
        assert_eq!(Sent::parse(text), Some(Sent { bytes: 1250, packets: 5, dropped: 6 }));
        assert_eq!(Sent::parse("nothing"), None);
    }

    #[test]
    fn a_bottleneck_is_in_a_router_between_the_sides() {
        let impairment = Impairment::Bottleneck { mbit: 200, latency_ms: 5 };
        let Ok(place) = Place::make(Where::Cable { mtu: 1500, impairment }) else {
            return;
        };
        let router = place.router.as_ref().expect("one");
        assert!(Sent::of(router).is_ok(), "its counters are read");
        let has_bucket = |side: &Side| {
            side.system(&format!("tc qdisc show dev {}", side.interface))
                .expect("tc")
                .contains("tbf")
        };
        assert!(has_bucket(router) && !has_bucket(&place.sides[0]));
        let route = place.sides[0].system("ip route get 10.78.2.2").expect("a route");
        assert!(route.contains("via 10.78.1.254"), "{route}");
    }

    #[test]
    fn a_cable_is_there_and_gone_with_its_place() {
        let Ok(place) = Place::make(Where::Cable { mtu: 9000, impairment: Impairment::None })
        else {
            return;
        };
        let shown = place.sides[1].system("ip addr show dev right").expect("it is there");
        assert!(shown.contains("mtu 9000") && shown.contains("10.78.0.2/24"), "{shown}");
        let pid = place.sides[1].holder.expect("held");
        drop(place);
        assert!(!std::path::Path::new(&format!("/proc/{pid}/ns/net")).exists());
    }
}
