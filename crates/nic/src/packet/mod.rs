//! RoCE packets captured on the interfaces of this machine, whoever sends or receives them.
//!
//! A packet socket sees packets as the kernel handles them, which is not always as they are on the
//! wire: a segmented send passes loopback, veth and bridges as one packet of up to 64 KiB whose UDP
//! checksum is not filled in yet, and what receive offload has joined arrives as one. The kernel
//! describes this in a header of its own (PACKET_VNET_HDR), and [`split`] splits such packets into
//! those on the wire. Needs CAP_NET_RAW.
//!
//! A filter in the kernel passes only UDP to port 4791 and to the ports of single processes.
//! Packets on the loopback interface are captured once, not both when sent and when received.

mod filter;
mod split;

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use roce::Time;

use crate::udp::message::Control;
use crate::udp::socket::set;

/// Packets that one call of [`PacketTap::receive`] takes at most.
const BURST: usize = 64;

/// What the kernel writes before each packet: `struct virtio_net_hdr`.
const OFFLOAD_BYTES: usize = 10;

/// Longest Ethernet header, with one VLAN tag, and the longest IP packet.
const BUFFER_BYTES: usize = OFFLOAD_BYTES + 18 + (64 << 10);

/// Receive buffer to request, in bytes.
const SOCKET_BYTES: libc::c_int = 64 << 20;

/// linux/if_packet.h.
const PACKET_IGNORE_OUTGOING: libc::c_int = 23;

/// Hardware types of interfaces whose frames start with an Ethernet header, and of those without
/// any header (linux/if_arp.h: ETHER, LOOPBACK; RAWIP, NONE).
const ETHERNET_LIKE: [u16; 2] = [1, 772];
const HEADERLESS: [u16; 2] = [519, 65534];

/// Counters of a tap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TapCounters {
    /// Packets as they are on the wire.
    pub packets: u64,
    /// Buffers in which the kernel had coalesced several packets.
    pub coalesced: u64,
    /// Packets that could not be split: unknown links, offloads or headers.
    pub unknown: u64,
    /// Packets lost because the buffer was full.
    pub overrun: u64,
}

/// A packet socket for RoCE packets.
#[derive(Debug)]
pub struct PacketTap {
    fd: OwnedFd,
    buffer: Vec<u8>,
    packet: Vec<u8>,
    counters: TapCounters,
    /// Only packets for this machine.
    incoming: bool,
}

impl PacketTap {
    /// Captures on the interface with this number, or on all.
    ///
    /// # Errors
    /// When the process lacks CAP_NET_RAW, or there is no such interface.
    pub fn open(ifindex: Option<u32>) -> io::Result<PacketTap> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // With protocol 0 nothing arrives before the filter is attached. SAFETY: no pointers are
        // passed.
        let raw = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `raw` was just opened and belongs to nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        set(&fd, libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1)?;
        set(&fd, libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 1)?;
        // Usually allowed by privilege; otherwise the default has to do.
        let _ = set(&fd, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, SOCKET_BYTES);
        filter::attach(&fd, &filter::roce())?;
        bind(&fd, ifindex.unwrap_or(0))?;
        let buffer = vec![0; BUFFER_BYTES];
        let counters = TapCounters::default();
        Ok(PacketTap { fd, buffer, packet: Vec::new(), counters, incoming: false })
    }

    /// Captures only packets received by this machine, without those that it sends or that pass.
    ///
    /// # Errors
    /// As [`PacketTap::open`].
    pub(crate) fn incoming(ifindex: Option<u32>) -> io::Result<PacketTap> {
        let tap = PacketTap::open(ifindex)?;
        // Since Linux 4.20; before, they are sorted out below.
        let _ = set(&tap.fd, libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, 1);
        Ok(PacketTap { incoming: true, ..tap })
    }

    /// Readable when packets wait.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// What was counted so far.
    pub fn counters(&mut self) -> TapCounters {
        self.counters.overrun += dropped(&self.fd);
        self.counters
    }

    /// Passes a bounded number of waiting packets to `sink`: the time since 1970 when each was
    /// seen, and its bytes from the IP header on. Returns how many packets the kernel delivered.
    ///
    /// # Errors
    /// When the interface disappeared.
    pub fn receive(&mut self, sink: &mut dyn FnMut(Time, &[u8])) -> io::Result<usize> {
        for taken in 0..BURST {
            let Some(arrival) = arrival(&self.fd, &mut self.buffer)? else {
                return Ok(taken);
            };
            let PacketTap { buffer, packet, counters, incoming, .. } = self;
            if *incoming && arrival.link.sll_pkttype != libc::PACKET_HOST {
                continue;
            }
            let before = counters.packets;
            let mut count = |packet: &[u8]| {
                counters.packets += 1;
                sink(arrival.time, packet);
            };
            let whole = arrival.ip_packet(buffer);
            let good = whole.is_some_and(|(how, ip)| split::split(how, ip, packet, &mut count));
            counters.unknown += u64::from(!good && !arrival.seen_twice());
            counters.coalesced += u64::from(counters.packets > before + 1);
        }
        Ok(BURST)
    }
}

/// One packet of the kernel, in the buffer.
struct Arrival {
    len: usize,
    time: Time,
    link: libc::sockaddr_ll,
}

impl Arrival {
    /// On loopback a packet is seen when sent and when received.
    fn seen_twice(&self) -> bool {
        let loopback = self.link.sll_hatype == ETHERNET_LIKE[1];
        loopback && self.link.sll_pkttype == libc::PACKET_OUTGOING
    }

    /// The kernel's offload header, and the packet from the IP header on.
    fn ip_packet<'b>(&self, buffer: &'b [u8]) -> Option<(&'b [u8; OFFLOAD_BYTES], &'b [u8])> {
        if self.seen_twice() {
            return None;
        }
        let (how, frame) = buffer.get(..self.len)?.split_first_chunk::<OFFLOAD_BYTES>()?;
        let hardware = self.link.sll_hatype;
        let header = match frame.get(12..14) {
            _ if HEADERLESS.contains(&hardware) => 0,
            Some([0x81, 0x00]) if ETHERNET_LIKE.contains(&hardware) => 18,
            Some(_) if ETHERNET_LIKE.contains(&hardware) => 14,
            _ => return None,
        };
        Some((how, frame.get(header..)?))
    }
}

/// The next packet, if one waits.
fn arrival(fd: &OwnedFd, buffer: &mut [u8]) -> io::Result<Option<Arrival>> {
    // SAFETY: all zeroes is a valid value of both structures.
    let (mut link, mut header): (libc::sockaddr_ll, libc::msghdr) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    let mut control = Control::EMPTY;
    let mut piece = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    header.msg_name = (&raw mut link).cast();
    header.msg_namelen = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    header.msg_iov = &raw mut piece;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr();
    header.msg_controllen = Control::BYTES as _;
    // SAFETY: every pointer in `header` leads to memory of the stated length that outlives the
    // call.
    let rc = unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut header, libc::MSG_DONTWAIT) };
    let Ok(len) = usize::try_from(rc) else {
        let error = io::Error::last_os_error();
        let nothing = matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR));
        return if nothing { Ok(None) } else { Err(error) };
    };
    // SAFETY: the control bytes are as the call left them.
    let time = unsafe { split::timestamp(&header) };
    Ok(Some(Arrival { len, time, link }))
}

fn bind(fd: &OwnedFd, ifindex: u32) -> io::Result<()> {
    // SAFETY: all zeroes is a valid address.
    let mut link: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    link.sll_family = libc::AF_PACKET as u16;
    link.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
    link.sll_ifindex = i32::try_from(ifindex).map_err(|_| io::ErrorKind::InvalidInput)?;
    let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: `link` is readable for `len` bytes.
    let rc = unsafe { libc::bind(fd.as_raw_fd(), (&raw const link).cast(), len) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Packets lost since the last call: the kernel resets the count.
fn dropped(fd: &OwnedFd) -> u64 {
    let mut stats = libc::tpacket_stats { tp_packets: 0, tp_drops: 0 };
    let mut len = size_of::<libc::tpacket_stats>() as libc::socklen_t;
    // SAFETY: `stats` is writable for `len` bytes.
    let rc = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_STATISTICS,
            (&raw mut stats).cast(),
            &raw mut len,
        )
    };
    if rc == 0 { u64::from(stats.tp_drops) } else { 0 }
}
