//! Sockets, interfaces, ports.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;

use roce::wire::ROCE_PORT;

use super::Finding;
use crate::device::{DeviceConfig, DeviceWire};
use crate::interfaces::{self as list, Interface};
use crate::local_peers;
use crate::packet::PacketTap;
use crate::udp::socket::{Plan, Socket, set};

/// Buffer that a wire requests in each direction.
const WANTED_BUFFER: u32 = 16 << 20;

/// What a window of 512 packets of 4 KiB takes as the kernel accounts it, with a margin.
const ENOUGH_BUFFER: u64 = 4 << 20;

/// Whether a UDP socket accepts an option.
fn try_option(name: i32, value: i32) -> Result<(), String> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|error| error.to_string())?;
    let fd = OwnedFd::from(socket);
    set(&fd, libc::IPPROTO_UDP, name, value).map_err(|error| error.to_string())
}

pub(super) fn segmented_sends() -> Finding {
    match try_option(libc::UDP_SEGMENT, 4096) {
        Ok(()) => Finding::ok("segmented sends", "UDP_SEGMENT: one system call for many packets"),
        Err(why) => Finding::warn(
            "segmented sends",
            format!("no UDP_SEGMENT ({why}): about a quarter of the throughput"),
            "use Linux 4.18 or newer",
        ),
    }
}

pub(super) fn coalesced_receives() -> Finding {
    match try_option(libc::UDP_GRO, 1) {
        Ok(()) => Finding::ok("coalesced receives", "UDP_GRO: one system call for many packets"),
        Err(why) => Finding::warn(
            "coalesced receives",
            format!("no UDP_GRO ({why}): about half of the throughput"),
            "use Linux 5.0 or newer",
        ),
    }
}

pub(super) fn socket_buffers() -> Finding {
    let local = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let plan = Plan { local, buffer_bytes: WANTED_BUFFER, gro: false, shared: false };
    let socket = match Socket::open(&plan) {
        Ok(socket) => socket,
        Err(error) => {
            return Finding::fail("socket buffers", error.to_string(), "allow UDP sockets");
        }
    };
    let (send, receive) = (socket.send_buffer_bytes, socket.receive_buffer_bytes);
    let text = format!("{} KiB out, {} KiB in", send >> 10, receive >> 10);
    if send.min(receive) >= ENOUGH_BUFFER {
        return Finding::ok("socket buffers", text);
    }
    let fix = "sysctl -w net.core.rmem_max=16777216 net.core.wmem_max=16777216";
    Finding::warn(
        "socket buffers",
        format!("{text}: bursts overflow them and are retransmitted"),
        fix,
    )
}

/// Whether verbs programs of one user reach each other without sockets.
pub(super) fn same_host() -> Finding {
    let topic = "processes of one machine";
    match local_peers::probe() {
        Ok(()) => Finding::ok(topic, "WRITEs and READs without packets, the rest in shared memory"),
        Err(why) => Finding::warn(
            topic,
            format!("not without packets: {why}"),
            "see docs/same-host.md, \"When it is used\"; packets through sockets work as well, and slower",
        ),
    }
}

pub(super) fn interfaces() -> Vec<Finding> {
    match list::interfaces() {
        Ok(all) => all.iter().filter(|one| !one.addresses.is_empty()).map(interface).collect(),
        Err(error) => {
            let text = format!("cannot be listed: {error}");
            vec![Finding::fail("interfaces", text, "allow netlink sockets (AF_NETLINK)")]
        }
    }
}

fn interface(interface: &Interface) -> Finding {
    let topic = format!("interface {}", interface.name);
    let Interface { name, mtu, running, addresses, index, .. } = interface;
    if !running {
        return Finding::warn(topic, "is down", format!("ip link set {name} up"));
    }
    let roce = crate::device::payload_limit(&DeviceConfig::new(addresses.clone(), *index));
    let text = format!("{} addresses, MTU {mtu}: RoCE path MTU up to {roce}", addresses.len());
    if roce >= 1024 {
        let more = if roce < 4096 { "; 4180 or more would allow 4096" } else { "" };
        return Finding::ok(topic, text + more);
    }
    Finding::warn(topic, text, format!("ip link set {name} mtu 1500, or 4200 and more"))
}

/// Whether packets of a flow stay in their order on their way into this machine.
pub(super) fn order() -> Vec<Finding> {
    let all = list::interfaces().unwrap_or_default();
    // Ports of a bridge have no addresses.
    let is_veth = |one: &Interface| {
        list::kind_of(one.index).is_ok_and(|kind| kind.as_deref() == Some("veth"))
    };
    let all = all.into_iter().filter(|one| one.running && is_veth(one));
    all.filter_map(|one| steering(&one)).collect()
}

/// Whether an end of a veth pair keeps packets of a flow in order: it receives each packet on the
/// processor that sent it, and any processor may dequeue the sender's queueing discipline. `None`
/// if `/sys` does not show this interface.
fn steering(interface: &Interface) -> Option<Finding> {
    let name = &interface.name;
    let folder = format!("/sys/class/net/{name}");
    // `/sys` may be that of another network namespace.
    let index = fs::read_to_string(format!("{folder}/ifindex")).ok()?;
    if index.trim_end() != interface.index.to_string() {
        return None;
    }
    let masks = fs::read_dir(format!("{folder}/queues")).ok()?.filter_map(|queue| {
        let queue =
            queue.ok().filter(|queue| queue.file_name().as_encoded_bytes().starts_with(b"rx-"));
        fs::read_to_string(queue?.path().join("rps_cpus")).ok()
    });
    // Those of the sender count, which may have more of them than this process.
    let processors = fs::read_to_string("/sys/devices/system/cpu/online").ok()?;
    order_of(name, processors.trim_end(), &masks.collect::<Vec<_>>())
}

/// `None` where the kernel has no such steering.
fn order_of(name: &str, processors: &str, masks: &[String]) -> Option<Finding> {
    let topic = format!("packet order on {name}");
    let steers = |mask: &String| mask.bytes().any(|digit| (b'1'..=b'f').contains(&digit));
    if masks.is_empty() {
        return None;
    }
    if processors == "0" || masks.iter().all(steers) {
        return Some(Finding::ok(topic, "packets of a flow arrive as they were sent"));
    }
    let mask = mask_of(processors)?;
    Some(Finding::warn(
        topic,
        "a virtual Ethernet pair without receive packet steering: behind a queueing discipline of the sender, packets of a \
         flow overtake each other, and go-back-N retransmits everything from there",
        format!(
            "for queue in /sys/class/net/{name}/queues/rx-*/rps_cpus; do echo {mask} > $queue; done"
        ),
    ))
}

/// A mask of the first processors up to the last of a list as `0-3,5`: 32 of them at most, as one
/// word of `rps_cpus` has.
fn mask_of(processors: &str) -> Option<String> {
    let last: u32 = processors.rsplit([',', '-']).next()?.parse().ok()?;
    Some(format!("{:x}", (1_u64 << last.saturating_add(1).min(32)) - 1))
}

/// Whether every address can be shared on the RoCE port.
pub(super) fn ports() -> Vec<Finding> {
    let all = list::interfaces().unwrap_or_default();
    let all = all.into_iter().filter(|one| one.running && !one.addresses.is_empty());
    all.map(|one| port(&one)).collect()
}

fn port(interface: &Interface) -> Finding {
    let topic = format!("port {ROCE_PORT} on {}", interface.name);
    let config = DeviceConfig::new(interface.addresses.clone(), interface.index);
    let wire = match DeviceWire::open(&config) {
        Ok(wire) => wire,
        Err(error) => {
            return Finding::fail(
                topic,
                error.to_string(),
                error.hint().unwrap_or("see the reason"),
            );
        }
    };
    let taken: Vec<IpAddr> = wire.why_not_shared().map(|(ip, _)| ip).collect();
    let Some(first) = taken.first() else {
        return Finding::ok(topic, "free, or shared by processes of this user");
    };
    let holder = holder_of(*first).unwrap_or_else(|| String::from("someone else"));
    Finding::warn(
        topic,
        format!("{first} is held by {holder}: only this machine reaches programs there"),
        "stop it, run it as the same user, or use another address",
    )
}

/// Which process holds the RoCE port of an address, as far as `/proc` shows.
fn holder_of(ip: IpAddr) -> Option<String> {
    let table =
        if ip.is_ipv4() { "/proc/thread-self/net/udp" } else { "/proc/thread-self/net/udp6" };
    let table = fs::read_to_string(table).ok()?;
    let held = table.lines().filter_map(Held::parse).filter(|held| held.port == ROCE_PORT);
    let mut held = held.filter(|held| held.ip == ip || held.ip.is_unspecified());
    let owner = held.next()?;
    if owner.inode == 0 {
        return Some(String::from("the kernel (soft-RoCE: rdma link show)"));
    }
    let user = owner.uid;
    Some(match process_with(owner.inode) {
        Some((pid, name)) => format!("{name}, process {pid} of user {user}"),
        None => format!("a process of user {user}"),
    })
}

/// A line of `/proc/net/udp`.
#[derive(Debug, PartialEq, Eq)]
struct Held {
    ip: IpAddr,
    port: u16,
    uid: u32,
    inode: u64,
}

impl Held {
    /// Fields: slot, local, remote, state, queues, timer, retransmits, uid, timeout, inode …
    fn parse(line: &str) -> Option<Held> {
        let mut fields = line.split_ascii_whitespace();
        let (ip, port) = fields.nth(1)?.rsplit_once(':')?;
        let port = u16::from_str_radix(port, 16).ok()?;
        let uid = fields.nth(5)?.parse().ok()?;
        let inode = fields.nth(1)?.parse().ok()?;
        Some(Held { ip: proc_address(ip)?, port, uid, inode })
    }
}

/// An address as `/proc/net` writes it: words of 32 bits, each as a number of this machine.
fn proc_address(hex: &str) -> Option<IpAddr> {
    let (words, _) = hex.as_bytes().as_chunks::<8>();
    let octets = words.iter().map(|word| {
        let word = std::str::from_utf8(word).ok()?;
        u32::from_str_radix(word, 16).ok().map(u32::to_ne_bytes)
    });
    let octets: Vec<u8> = octets.collect::<Option<Vec<_>>>()?.concat();
    let v4 = <[u8; 4]>::try_from(&octets[..]).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(&octets[..]).map(IpAddr::from)).ok()
}

/// The process that has a socket with this inode open, among those that we may inspect.
fn process_with(inode: u64) -> Option<(u32, String)> {
    let wanted = format!("socket:[{inode}]");
    let processes = fs::read_dir("/proc").ok()?.filter_map(Result::ok);
    let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let pid = pids.find(|pid| {
        let Ok(fds) = fs::read_dir(format!("/proc/{pid}/fd")) else {
            return false;
        };
        let mut targets = fds.filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
        targets.any(|target| target.as_os_str() == wanted.as_str())
    })?;
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some((pid, name.trim_end().to_owned()))
}

/// Queueing disciplines that mark packets rather than drop them.
const MARKING: [&str; 5] = ["fq_codel", "codel", "fq_pie", "cake", "red"];

pub(super) fn congestion_marks() -> Finding {
    let qdisc = fs::read_to_string("/proc/sys/net/core/default_qdisc").unwrap_or_default();
    queueing(qdisc.trim_end())
}

/// Only the first network namespace has this file: elsewhere the discipline is unknown.
fn queueing(qdisc: &str) -> Finding {
    if MARKING.contains(&qdisc) {
        let text = format!("packets are marked ECN-capable, and {qdisc} marks congestion on them");
        return Finding::ok("ECN", text);
    }
    if qdisc.is_empty() {
        return Finding::warn(
            "ECN",
            "the default queueing discipline is unknown here: congestion may drop packets instead of marking them",
            "tc qdisc replace dev INTERFACE root fq_codel, where tc qdisc show names another",
        );
    }
    Finding::warn(
        "ECN",
        format!("the default queueing discipline ({qdisc}) drops packets instead of marking them"),
        "sysctl -w net.core.default_qdisc=fq_codel, for interfaces that come up later",
    )
}

/// Which ICRC check is possible here, and whether a stricter one could be.
pub(super) fn icrc() -> Finding {
    let usual =
        "over IPv6 all 32 bits; over IPv4 32 where the identification is as expected, else 16";
    let strict = match PacketTap::open(None) {
        Ok(_) => "the strict check (32 always, slower) is allowed",
        Err(_) => "the strict check (32 always, slower) needs CAP_NET_RAW",
    };
    Finding::ok("ICRC", format!("{usual}; {strict}"))
}

pub(super) fn captures() -> Finding {
    match PacketTap::open(None) {
        Ok(_) => Finding::ok("capture live", "packet sockets are allowed"),
        Err(error) => Finding::warn(
            "capture live",
            format!("no packet sockets ({error}): only a program's own traffic can be captured"),
            "run it as root, or: sudo setcap cap_net_raw+ep \"$(command -v dquant)\"",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn udp_tables_are_read() {
        let line = "  123: 0100007F:12B7 00000000:0000 07 00000000:00000000 00:00000000 00000000  1000        0 4242 2 0000000000000000 0";
        assert_eq!(
            Held::parse(line),
            Some(Held { ip: IpAddr::from([127, 0, 0, 1]), port: 4791, uid: 1000, inode: 4242 })
        );
        let v6 = " 9: 00000000000000000000000001000000:12B7 00000000000000000000000000000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 0 2 0 0";
        assert_eq!(
            Held::parse(v6),
            Some(Held { ip: "::1".parse().expect("good"), port: 4791, uid: 0, inode: 0 })
        );
        assert_eq!(proc_address("0100007"), None);
        assert_eq!(Held::parse("  sl  local_address rem_address   st tx_queue"), None);
    }

    #[test]
    fn a_discipline_that_is_not_known_is_not_accused() {
        assert_eq!(queueing("fq_codel").fix, None);
        assert!(queueing("pfifo_fast").text.contains("(pfifo_fast) drops"));
        let unknown = queueing("");
        assert!(unknown.text.contains("unknown") && unknown.fix.is_some(), "{unknown:?}");
    }

    #[test]
    fn packets_of_a_veth_pair_need_steering_where_there_are_several_processors() {
        let masks = |all: &[&str]| all.iter().map(|mask| format!("{mask}\n")).collect::<Vec<_>>();
        let fix = |processors, all: &[&str]| {
            order_of("v0", processors, &masks(all)).expect("it is known").fix
        };
        let said = fix("0-1", &["0"]).expect("a complaint");
        assert!(said.contains("/v0/") && said.ends_with("do echo 3 > $queue; done"), "{said}");
        assert!(fix("0-63", &["00000000,00000003", "00000000,00000000"]).is_some());
        assert_eq!(fix("0-1", &["3"]), None);
        assert_eq!(fix("0-1", &["00000000,0000000f"]), None);
        assert_eq!(fix("0", &["0"]), None);
        assert_eq!(order_of("v0", "0-1", &[]), None, "a kernel without it");
        let masks = ["0-3,5", "0-63", "0,2", ""].map(mask_of);
        assert_eq!(masks.map(Option::unwrap_or_default), ["3f", "ffffffff", "7", ""]);
    }

    #[test]
    fn a_holder_is_found_by_its_socket() {
        let socket = UdpSocket::bind("127.6.200.1:0").expect("loopback");
        let port = socket.local_addr().expect("bound").port();
        let table = fs::read_to_string("/proc/thread-self/net/udp").expect("a table");
        let held = table.lines().filter_map(Held::parse).find(|held| held.port == port);
        let (pid, _) = process_with(held.expect("bound").inode).expect("it is we");
        assert_eq!(pid, std::process::id());
    }
}
