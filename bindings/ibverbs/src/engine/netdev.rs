//! Network interfaces that become devices, with their addresses, MTU and speed.

use std::net::IpAddr;
use std::sync::Once;

use rustix::io::Errno;

use crate::process::errors::{Failure, Outcome, errno_of_io, say};
use crate::process::settings;

/// An interface that is up and has an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Interface {
    /// Its name: `eth0`.
    pub(crate) name: String,
    /// Its number in the kernel.
    pub(crate) index: u32,
    /// Largest IP packet in bytes.
    pub(crate) mtu: u32,
    /// Hardware address; zero for loopback and tunnels.
    pub(crate) mac: [u8; 6],
    /// Speed in Mbit/s, where the driver reports it.
    pub(crate) speed_mbps: Option<u32>,
    /// Its addresses in the order of the GID table: IPv4, IPv6, link-local IPv6.
    pub(crate) addresses: Vec<IpAddr>,
    loopback: bool,
}

impl Interface {
    /// The name of its device: `dq_eth0`.
    pub(crate) fn device_name(&self) -> String {
        device_name(&self.name)
    }

    /// EUI-64 of the hardware address, in host byte order; without one, a locally administered
    /// number from the index.
    pub(crate) fn guid(&self) -> u64 {
        let [a, b, c, d, e, f] = self.mac;
        if self.mac == [0; 6] {
            return 0x0200_00ff_fe00_0000 | u64::from(self.index);
        }
        u64::from_be_bytes([a ^ 2, b, c, 0xff, 0xfe, d, e, f])
    }
}

/// The name of the device of an interface.
pub(crate) fn device_name(interface: &str) -> String {
    format!("dq_{interface}")
}

/// Interfaces that become devices, in the order of the device list: those requested, or all,
/// loopback last.
pub(crate) fn interfaces() -> Vec<Interface> {
    let mut found = match scan() {
        Ok(found) => found,
        Err(error) => {
            say_no_list(error);
            return Vec::new();
        }
    };
    match settings::devices() {
        Some(names) => {
            say_missing(&names, &found);
            let place =
                |interface: &Interface| names.iter().position(|name| *name == interface.name);
            found.retain(|interface| place(interface).is_some());
            found.sort_by_key(place);
        }
        None => found.sort_by_key(|interface| (interface.loopback, interface.index)),
    }
    found
}

/// The current state of the interface with this name.
///
/// # Errors
/// When the kernel lists none.
pub(crate) fn interface(name: &str) -> Outcome<Option<Interface>> {
    Ok(scan()?.into_iter().find(|interface| interface.name == name))
}

/// Without a list there is no device, and programs report that; reports the reason once per
/// process.
fn say_no_list(error: Errno) {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        Failure::new(error, format_args!("no list of network interfaces: {error}")).report();
    });
}

/// Reports once per process which requested interfaces do not exist.
fn say_missing(names: &[String], found: &[Interface]) {
    let has = |name: &&String| found.iter().any(|interface| interface.name == **name);
    let missing: Vec<String> =
        names.iter().filter(|name| !has(name)).map(|name| format!("{name:?}")).collect();
    let why = match missing.as_slice() {
        [] if !names.is_empty() => return,
        [] => "names no interface, so that there is no device".to_owned(),
        some => format!("{}: no such interface that is up and has an address", some.join(", ")),
    };
    let usable: Vec<&str> = found.iter().map(|interface| interface.name.as_str()).collect();
    let usable = usable.join(",");
    static SAID: Once = Once::new();
    let variable = settings::DEVICES;
    let hint = format!("one or more of {usable}");
    SAID.call_once(|| say(format_args!("{variable}: {why}"), Some(&hint)));
}

fn scan() -> Outcome<Vec<Interface>> {
    let all = nic::interfaces::interfaces().map_err(|error| errno_of_io(&error))?;
    let usable = all.into_iter().filter(|found| found.up && !found.addresses.is_empty());
    Ok(usable.map(describe).collect())
}

/// Position in the GID table; addresses of one rank keep the kernel's order. IPv6 link-local ones
/// are last: the kernel adds them up to two seconds after the link is up, and the others must not
/// move then.
fn gid_rank(address: &IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => 0,
        IpAddr::V6(v6) if v6.is_unicast_link_local() => 2,
        IpAddr::V6(_) => 1,
    }
}

fn describe(found: nic::interfaces::Interface) -> Interface {
    let nic::interfaces::Interface { name, index, mtu, loopback, mut addresses, .. } = found;
    addresses.sort_by_key(gid_rank);
    // A GID index has 8 bits in address handles.
    addresses.truncate(128);
    Interface {
        mac: attribute(&name, "address").and_then(|text| parse_mac(&text)).unwrap_or_default(),
        speed_mbps: attribute(&name, "speed").and_then(|text| text.parse().ok()),
        name,
        index,
        mtu,
        addresses,
        loopback,
    }
}

fn attribute(interface: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(format!("/sys/class/net/{interface}/{name}")).ok()?;
    Some(text.trim().to_owned())
}

fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        *byte = u8::from_str_radix(parts.next()?, 16).ok()?;
    }
    parts.next().is_none().then_some(mac)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_found_with_its_address() {
        let lo = interface("lo").unwrap().expect("every machine has a loopback interface");
        assert!(lo.addresses.contains(&IpAddr::from([127, 0, 0, 1])));
        assert!(lo.mtu >= 1500);
    }

    #[test]
    fn the_gid_table_has_ipv4_then_ipv6_then_link_local() {
        let parse = |text: &str| text.parse::<IpAddr>().unwrap();
        let mut addresses = ["fd00::1", "fe80::1", "10.0.0.1"].map(parse);
        addresses.sort_by_key(gid_rank);
        assert_eq!(addresses, ["10.0.0.1", "fd00::1", "fe80::1"].map(parse));
    }

    #[test]
    fn hardware_addresses() {
        assert_eq!(parse_mac("02:00:5e:10:00:ff"), Some([2, 0, 0x5e, 0x10, 0, 0xff]));
        assert_eq!(parse_mac("02:00"), None);
        assert_eq!(parse_mac("00:00:00:00:00:00:00"), None);
    }
}
