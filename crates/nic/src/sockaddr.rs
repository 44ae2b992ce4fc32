//! Socket addresses as the kernel lays them out, for calls that `std` and `rustix` do not cover.

use std::ffi::c_int;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// Room for one IPv4 or IPv6 socket address.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) union Name {
    v4: libc::sockaddr_in,
    v6: libc::sockaddr_in6,
}

impl Name {
    pub(crate) const BYTES: libc::socklen_t = size_of::<Name>() as libc::socklen_t;

    pub(crate) fn empty() -> Name {
        // SAFETY: both variants are plain integers, for which zero is a value.
        unsafe { std::mem::zeroed() }
    }

    /// A copy of the first `len` bytes at `from`, the rest zero.
    ///
    /// # Safety
    /// `from` must be readable for `len` bytes.
    pub(crate) unsafe fn copied(from: *const u8, len: usize) -> Name {
        let mut name = Name::empty();
        // SAFETY: by the contract `from` is readable, and the copy ends at the end of `name`.
        unsafe {
            let to = (&raw mut name).cast::<u8>();
            to.copy_from_nonoverlapping(from, len.min(size_of::<Name>()));
        }
        name
    }

    /// The address in C form, and how many bytes of it count.
    pub(crate) fn encode(addr: SocketAddr) -> (Name, libc::socklen_t) {
        let mut name = Name::empty();
        match addr {
            SocketAddr::V4(addr) => {
                name.v4.sin_family = libc::AF_INET as libc::sa_family_t;
                name.v4.sin_port = addr.port().to_be();
                name.v4.sin_addr.s_addr = u32::from_ne_bytes(addr.ip().octets());
                (name, size_of::<libc::sockaddr_in>() as libc::socklen_t)
            }
            SocketAddr::V6(addr) => {
                name.v6 = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: addr.port().to_be(),
                    sin6_flowinfo: addr.flowinfo(),
                    sin6_addr: libc::in6_addr { s6_addr: addr.ip().octets() },
                    sin6_scope_id: addr.scope_id(),
                };
                (name, size_of::<libc::sockaddr_in6>() as libc::socklen_t)
            }
        }
    }

    /// What the kernel wrote, if it is an Internet address. `len` bytes of it are valid.
    pub(crate) fn decode(&self, len: libc::socklen_t) -> Option<SocketAddr> {
        let len = len as usize;
        // SAFETY: the union holds plain integers and was zeroed before the kernel wrote to it, so
        // every variant is initialised whatever was written; the family selects the variant.
        let (v4, v6) = unsafe { (self.v4, self.v6) };
        match c_int::from(v4.sin_family) {
            libc::AF_INET if len >= size_of::<libc::sockaddr_in>() => {
                let ip = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
                Some(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
            }
            libc::AF_INET6 if len >= size_of::<libc::sockaddr_in6>() => {
                let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
                let port = u16::from_be(v6.sin6_port);
                Some(SocketAddrV6::new(ip, port, v6.sin6_flowinfo, v6.sin6_scope_id).into())
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_the_round_trip() {
        for text in ["127.3.2.1:4791", "[::1]:4791", "[fe80::1%7]:65535"] {
            let addr: SocketAddr = text.parse().expect("literal");
            let (name, len) = Name::encode(addr);
            assert_eq!(name.decode(len), Some(addr));
            assert_eq!(name.decode(len - 1), None);
        }
        assert_eq!(Name::empty().decode(Name::BYTES), None);
    }
}
