//! Address handles, and the conversion of a verbs address to a path.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, Once};

use roce::world::{Ecn, Path};
use rustix::io::Errno;

use super::gid;
use super::{Mark, Object, Pd, object};
use crate::abi::*;
use crate::engine::Engine;
use crate::engine::netdev::Interface;
use crate::process::errors::{Outcome, say};

/// Hop limit when the program sets 0.
const DEFAULT_HOP_LIMIT: u8 = 64;

/// An address handle.
#[repr(C)]
pub(crate) struct Ah {
    c: ibv_ah,
    mark: Mark,
    owner: *mut ibv_context,
    pub(super) engine: Arc<Engine>,
    pub(super) path: Path,
}

object!(Ah, ibv_ah);

impl Ah {
    pub(crate) fn create(domain: &'static Pd, attr: &ibv_ah_attr) -> Outcome<&'static Ah> {
        let path = path_of(&domain.engine, attr)?;
        let (owner, pd) = (domain.owner(), domain.handle());
        let c = ibv_ah { context: owner, pd, handle: 0 };
        let engine = Arc::clone(&domain.engine);
        Ok(Ah::arena().insert(Ah { c, mark: Mark::default(), owner, engine, path }))
    }

    pub(crate) fn destroy(&'static self) {
        Ah::arena().retire(self);
    }

    /// Whether a live address handle belongs to this domain.
    pub(super) fn any_of(pd: &Pd) -> bool {
        let handle = pd.handle();
        Ah::arena().of_context(pd.owner()).iter().any(|ah| ah.c.pd == handle)
    }
}

/// The path of an address.
///
/// # Errors
/// `EINVAL` without a global route (every RoCE address has one), for another port, for a source GID
/// that does not exist, and for a destination of the other IP version.
pub(super) fn path_of(engine: &Engine, attr: &ibv_ah_attr) -> Outcome<Path> {
    let interface = &engine.interface;
    let route = &attr.grh;
    let dest = gid::to_ip(&route.dgid);
    let source = source_for(interface, route.sgid_index, dest)?;
    if attr.is_global == 0 || attr.port_num != 1 || dest.is_unspecified() {
        return Err(Errno::INVAL);
    }
    Ok(Path {
        dscp: dscp_of(engine, route.traffic_class),
        ecn: Ecn::Ect0,
        source,
        hop_limit: if route.hop_limit == 0 { DEFAULT_HOP_LIMIT } else { route.hop_limit },
        ..Path::new(gid::socket_address(dest, interface.index))
    })
}

/// The DSCP of a traffic class, unless the environment has one: a program must not leave the share
/// of its job. The first time that makes a difference it is reported.
fn dscp_of(engine: &Engine, traffic_class: u8) -> u8 {
    static REPORTED: Once = Once::new();
    let asked = traffic_class >> 2;
    let dscp = engine.settings.dscp.unwrap_or(asked);
    if dscp != asked && asked != 0 {
        REPORTED.call_once(|| {
            let hint = Some("it is that of DQUANT_DSCP; without the variable the program chooses");
            say(format_args!("DSCP {asked} of the program is replaced by {dscp}"), hint);
        });
    }
    dscp
}

/// The source's index: the requested one, or for an IPv6 group the first of its IP version
/// (programs join IPv6 groups while they use an IPv4 GID).
fn source_for(interface: &Interface, index: u8, dest: IpAddr) -> Outcome<u8> {
    let addresses = &interface.addresses;
    let own = addresses.get(usize::from(index)).ok_or(Errno::INVAL)?;
    if own.is_ipv4() == dest.is_ipv4() {
        return Ok(index);
    }
    let other = addresses.iter().position(|address| address.is_ipv4() == dest.is_ipv4());
    let other = other.filter(|_| dest.is_multicast()).ok_or(Errno::INVAL)?;
    u8::try_from(other).map_err(|_| Errno::INVAL)
}

/// The address from which `path_of` made a path, as far as it can be reconstructed.
pub(super) fn attr_of(path: &Path) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: gid::of_ip(path.remote.ip()),
            flow_label: 0,
            sgid_index: path.source,
            hop_limit: path.hop_limit,
            traffic_class: path.dscp << 2,
        },
        dlid: 0,
        sl: 0,
        src_path_bits: 0,
        static_rate: 0,
        is_global: 1,
        port_num: 1,
    }
}

/// Source and destination of a datagram, from the 40 bytes in front of it (annex A17: an IPv4
/// header is in their second half).
fn addresses_of(grh: &ibv_grh) -> Outcome<(IpAddr, IpAddr, u8)> {
    let mut bytes = [0; 40];
    // SAFETY: a route header is 40 bytes without padding.
    bytes.copy_from_slice(unsafe {
        std::slice::from_raw_parts(std::ptr::from_ref(grh).cast::<u8>(), 40)
    });
    if bytes[0] >> 4 == 6 {
        let class = u16::from_be_bytes([bytes[0], bytes[1]]) >> 4 & 0xff;
        let v6 = |at: usize| {
            let mut octets = [0; 16];
            octets.copy_from_slice(&bytes[at..at + 16]);
            IpAddr::V6(Ipv6Addr::from(octets))
        };
        return Ok((v6(8), v6(24), class as u8));
    }
    if bytes[20] == 0x45 {
        let v4 = |at: usize| {
            IpAddr::V4(Ipv4Addr::new(bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]))
        };
        return Ok((v4(32), v4(36), bytes[21]));
    }
    Err(Errno::PROTONOSUPPORT)
}

/// The address for a reply to a datagram, from its completion and the route header in front of it.
///
/// # Errors
/// `EINVAL` for another port and a completion without a route header, `EPROTONOSUPPORT` for a
/// header that is neither IPv4 nor IPv6.
pub(crate) fn from_wc(
    interface: &Interface,
    port: u8,
    wc: &ibv_wc,
    grh: Option<&ibv_grh>,
) -> Outcome<ibv_ah_attr> {
    if port != 1 || wc.wc_flags & IBV_WC_GRH == 0 {
        return Err(Errno::INVAL);
    }
    let (from, to, traffic_class) = addresses_of(grh.ok_or(Errno::INVAL)?)?;
    let addresses = &interface.addresses;
    let own = addresses.iter().position(|address| *address == to);
    // A datagram to a group is replied to from the first address of that IP version.
    let same_kind = || addresses.iter().position(|address| address.is_ipv4() == to.is_ipv4());
    let sgid_index = own.or_else(same_kind).ok_or(Errno::INVAL)? as u8;
    let grh = ibv_global_route {
        dgid: gid::of_ip(from),
        flow_label: 0,
        sgid_index,
        hop_limit: 0xff,
        traffic_class,
    };
    Ok(ibv_ah_attr {
        grh,
        dlid: wc.slid,
        sl: wc.sl,
        src_path_bits: wc.dlid_path_bits,
        static_rate: 0,
        is_global: 1,
        port_num: port,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(bytes: [u8; 40]) -> ibv_grh {
        // SAFETY: a route header is 40 bytes, and any values are valid.
        unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) }
    }

    #[test]
    fn route_headers_of_both_versions_are_read() {
        let mut v4 = [0; 40];
        v4[20] = 0x45;
        v4[21] = 0x68;
        v4[32..36].copy_from_slice(&[10, 0, 0, 1]);
        v4[36..40].copy_from_slice(&[10, 0, 0, 2]);
        let (from, to, class) = addresses_of(&header(v4)).unwrap();
        assert_eq!(
            (from.to_string(), to.to_string(), class),
            ("10.0.0.1".into(), "10.0.0.2".into(), 0x68)
        );

        let mut v6 = [0; 40];
        (v6[0], v6[1], v6[8], v6[24]) = (0x61, 0x20, 0xfd, 0xfe);
        let (from, to, class) = addresses_of(&header(v6)).unwrap();
        assert_eq!(
            (from.to_string(), to.to_string(), class),
            ("fd00::".into(), "fe00::".into(), 0x12)
        );

        assert!(addresses_of(&header([0; 40])).is_err());
    }
}
