//! The XDP program, and its attachment to an interface.
//!
//! The program is a short list of instructions that is built here, so no compiler is needed. It
//! redirects the UDP datagrams for one address and port to the socket of the queue that they
//! arrived on, and passes everything else to the kernel: other addresses and ports, VLAN tags, IPv4
//! options, fragments, IPv6 extension headers, packets that do not fit a frame of the socket, and
//! packets of queues without a socket.
//!
//! It is attached by a BPF link. The link lives as long as its descriptor, so nothing stays
//! attached when the process ends, even by `kill -9`. A program of somebody else is never replaced.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::{Mode, XdpError};

/// linux/bpf.h: commands.
const MAP_CREATE: libc::c_long = 0;
const MAP_UPDATE_ELEM: libc::c_long = 2;
const PROG_LOAD: libc::c_long = 5;
const LINK_CREATE: libc::c_long = 28;

/// linux/bpf.h: `BPF_MAP_TYPE_XSKMAP`, `BPF_PROG_TYPE_XDP`, `BPF_XDP`, `BPF_F_XDP_HAS_FRAGS`.
const XSKMAP: u32 = 17;
const TYPE_XDP: u32 = 6;
const ATTACH_XDP: u32 = 37;
const HAS_FRAGS: u32 = 1 << 5;

/// linux/if_link.h.
const FLAGS_GENERIC: u32 = 1 << 1;
const FLAGS_NATIVE: u32 = 1 << 2;

/// Verdict of a program: the kernel goes on with the packet. Also the fallback of a redirect
/// without a socket.
const XDP_PASS: i32 = 2;

/// `bpf_redirect_map`.
const REDIRECT_MAP: i32 = 51;

/// Place of the jump target in an instruction before it is known.
const TO_PASS: i16 = i16::MAX;

/// Length of an Ethernet header without a tag.
const ETHERNET_BYTES: i32 = 14;

/// `struct bpf_insn`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Insn {
    code: u8,
    /// Destination register in the low half, source register in the high half.
    registers: u8,
    offset: i16,
    immediate: i32,
}

const fn insn(code: u8, dst: u8, src: u8, offset: i16, immediate: i32) -> Insn {
    Insn { code, registers: src << 4 | dst, offset, immediate }
}

/// Operation codes (linux/bpf_common.h): class, size or operation, source.
mod op {
    pub(super) const LOAD_1: u8 = 0x71;
    pub(super) const LOAD_2: u8 = 0x69;
    pub(super) const LOAD_4: u8 = 0x61;
    pub(super) const LOAD_MAP: u8 = 0x18;
    pub(super) const MOVE: u8 = 0xbf;
    pub(super) const SET: u8 = 0xb7;
    pub(super) const ADD: u8 = 0x07;
    pub(super) const AND: u8 = 0x57;
    pub(super) const FROM_BE: u8 = 0xdc;
    pub(super) const IF_GREATER: u8 = 0x2d;
    pub(super) const IF_GREATER_THAN: u8 = 0x25;
    pub(super) const IF_NOT_32: u8 = 0x56;
    pub(super) const CALL: u8 = 0x85;
    pub(super) const EXIT: u8 = 0x95;
}

/// Instructions with tests that lead to "pass". Register 2 is the start of the frame, 5 is scratch.
struct Builder(Vec<Insn>);

impl Builder {
    fn load(&mut self, code: u8, at: i16) {
        self.0.push(insn(code, 5, 2, at, 0));
    }

    /// Passes the packet unless the field, as it is in memory, has this value.
    fn require(&mut self, code: u8, at: i16, value: u32) {
        self.load(code, at);
        self.0.push(insn(op::IF_NOT_32, 5, 0, TO_PASS, value.cast_signed()));
    }

    /// Passes the packet if the big-endian 16-bit field exceeds this value.
    fn require_at_most(&mut self, at: i16, value: i32) {
        self.load(op::LOAD_2, at);
        self.0.push(insn(op::FROM_BE, 5, 0, 0, 16));
        self.0.push(insn(op::IF_GREATER_THAN, 5, 0, TO_PASS, value));
    }

    /// Ends with "pass" and fills in the jumps that lead there.
    fn finish(mut self) -> Vec<Insn> {
        let pass = self.0.len();
        self.0.push(insn(op::SET, 0, 0, 0, XDP_PASS));
        self.0.push(insn(op::EXIT, 0, 0, 0, 0));
        for (at, one) in self.0.iter_mut().enumerate() {
            if one.offset == TO_PASS {
                one.offset = (pass - at - 1) as i16;
            }
        }
        self.0
    }
}

/// A 16-bit field of a packet as a load on this machine returns it.
fn be16(value: u16) -> u32 {
    u32::from(value.to_be())
}

/// The program for datagrams to `local` in frames of at most `frame` bytes.
pub(super) fn instructions(local: SocketAddr, frame: u32, map: i32) -> Vec<Insn> {
    let ip_bytes = if local.is_ipv4() { 20 } else { 40 };
    let mut program = Builder(vec![
        insn(op::MOVE, 6, 1, 0, 0),
        insn(op::LOAD_4, 2, 1, 0, 0),
        insn(op::LOAD_4, 3, 1, 4, 0),
        insn(op::MOVE, 4, 2, 0, 0),
        insn(op::ADD, 4, 0, 0, ETHERNET_BYTES + ip_bytes + 8),
        insn(op::IF_GREATER, 4, 3, TO_PASS, 0),
    ]);
    let longest = frame as i32 - ETHERNET_BYTES;
    match local.ip() {
        IpAddr::V4(address) => {
            program.require(op::LOAD_2, 12, be16(0x0800));
            program.require(op::LOAD_1, 14, 0x45);
            program.require_at_most(16, longest);
            // Neither "more fragments" nor an offset.
            program.load(op::LOAD_2, 20);
            program.0.push(insn(op::AND, 5, 0, 0, be16(0x3fff).cast_signed()));
            program.0.push(insn(op::IF_NOT_32, 5, 0, TO_PASS, 0));
            program.require(op::LOAD_1, 23, 17);
            program.require(op::LOAD_4, 30, u32::from_ne_bytes(address.octets()));
            program.require(op::LOAD_2, 36, be16(local.port()));
        }
        IpAddr::V6(address) => {
            program.require(op::LOAD_2, 12, be16(0x86dd));
            program.require_at_most(18, longest - ip_bytes);
            program.require(op::LOAD_1, 20, 17);
            for (at, word) in (38..).step_by(4).zip(address.octets().as_chunks().0) {
                program.require(op::LOAD_4, at, u32::from_ne_bytes(*word));
            }
            program.require(op::LOAD_2, 56, be16(local.port()));
        }
    }
    program.0.extend([
        insn(op::LOAD_MAP, 1, 1, 0, map),
        insn(0, 0, 0, 0, 0),
        insn(op::LOAD_4, 2, 6, 16, 0),
        insn(op::SET, 3, 0, 0, XDP_PASS),
        insn(op::CALL, 0, 0, 0, REDIRECT_MAP),
        insn(op::EXIT, 0, 0, 0, 0),
    ]);
    program.finish()
}

/// Whether each jump leads to the last two instructions, which pass the packet.
#[cfg(test)]
pub(super) fn jumps_lead_to_the_end(program: &[Insn]) -> bool {
    let jumps = (0..).zip(program).filter(|(_, one)| {
        matches!(one.code, op::IF_GREATER | op::IF_GREATER_THAN | op::IF_NOT_32)
    });
    jumps.clone().count() > 6
        && jumps
            .into_iter()
            .all(|(at, one): (i64, _)| at + 1 + i64::from(one.offset) == program.len() as i64 - 2)
}

/// Makes a call of bpf(2). `attributes` are the members of `union bpf_attr` as 32-bit words.
///
/// # Safety
/// Pointers in the attributes must lead to memory that the command may access.
unsafe fn bpf(command: libc::c_long, attributes: &[u32]) -> io::Result<i32> {
    let bytes = size_of_val(attributes);
    // SAFETY: the attributes are readable for `bytes`; the caller vouches for the pointers in them.
    let rc = unsafe { libc::syscall(libc::SYS_bpf, command, attributes.as_ptr(), bytes) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(rc as i32) }
}

/// As [`bpf`], for commands that return a descriptor.
///
/// # Safety
/// As [`bpf`].
unsafe fn bpf_fd(command: libc::c_long, attributes: &[u32]) -> io::Result<OwnedFd> {
    // SAFETY: by the caller's promise; a new descriptor belongs to nobody else.
    unsafe { Ok(OwnedFd::from_raw_fd(bpf(command, attributes)?)) }
}

/// A 64-bit member as two words in memory order.
fn wide(value: u64) -> [u32; 2] {
    let bytes = value.to_ne_bytes();
    let [a, b, c, d, e, f, g, h] = bytes;
    [u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h])]
}

/// The map of sockets, by queue.
#[derive(Debug)]
pub(super) struct Sockets(OwnedFd);

impl Sockets {
    pub(super) fn new(queues: u32) -> Result<Sockets, XdpError> {
        // SAFETY: no pointers.
        let map = unsafe { bpf_fd(MAP_CREATE, &[XSKMAP, 4, 4, queues, 0]) };
        map.map(Sockets).map_err(XdpError::of("bpf map of sockets"))
    }

    /// Packets of `queue` go to this socket, which is bound.
    pub(super) fn insert(&self, queue: u32, socket: &OwnedFd) -> Result<(), XdpError> {
        let value = socket.as_raw_fd();
        let [k0, k1] = wide((&raw const queue).expose_provenance() as u64);
        let [v0, v1] = wide((&raw const value).expose_provenance() as u64);
        let attributes = [self.0.as_raw_fd().cast_unsigned(), 0, k0, k1, v0, v1, 0, 0];
        // SAFETY: key and value are four readable bytes each, as the map was created.
        let done = unsafe { bpf(MAP_UPDATE_ELEM, &attributes) };
        done.map(drop).map_err(XdpError::of("bpf map of sockets"))
    }
}

/// An attached program. Dropping it detaches.
#[derive(Debug)]
pub(super) struct Attached {
    _link: OwnedFd,
    /// How it is attached.
    pub(super) mode: Mode,
}

/// Attaches the program for `local` to the interface: natively if its driver can, else in the
/// generic way.
pub(super) fn attach(
    ifindex: u32,
    local: SocketAddr,
    frame: u32,
    sockets: &Sockets,
    allowed: &[Mode],
) -> Result<Attached, XdpError> {
    let program = load(&instructions(local, frame, sockets.0.as_raw_fd()))?;
    let mut last = io::Error::from_raw_os_error(libc::EOPNOTSUPP);
    for &mode in allowed {
        let flags = match mode {
            Mode::Native => FLAGS_NATIVE,
            Mode::Generic => FLAGS_GENERIC,
        };
        let attributes = [program.as_raw_fd().cast_unsigned(), ifindex, ATTACH_XDP, flags];
        // SAFETY: no pointers.
        match unsafe { bpf_fd(LINK_CREATE, &attributes) } {
            Ok(link) => return Ok(Attached { _link: link, mode }),
            // EBUSY: in this mode, EEXIST: in the other one.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EEXIST)) => {
                return Err(XdpError::Occupied);
            }
            Err(error) => last = error,
        }
    }
    Err(XdpError::of("attaching the XDP program")(last))
}

fn load(program: &[Insn]) -> Result<OwnedFd, XdpError> {
    const LICENSE: &[u8; 4] = b"MIT\0";
    let [i0, i1] = wide(program.as_ptr().expose_provenance() as u64);
    let [l0, l1] = wide(LICENSE.as_ptr().expose_provenance() as u64);
    let count = program.len() as u32;
    let name = [b"dquant_r", b"oce\0\0\0\0\0"].map(|half| wide(u64::from_ne_bytes(*half)));
    let [[n0, n1], [n2, n3]] = name;
    // type, count, instructions, license, log (level, size, buffer), kernel version, flags, name,
    // ifindex, attach type.
    let mut attributes =
        [TYPE_XDP, count, i0, i1, l0, l1, 0, 0, 0, 0, 0, HAS_FRAGS, n0, n1, n2, n3, 0, ATTACH_XDP];
    // SAFETY: the instructions are readable for their count, and the license ends with a zero byte.
    let loaded = unsafe { bpf_fd(PROG_LOAD, &attributes) }.or_else(|_| {
        // Before Linux 5.18 the flag is unknown, and long packets come whole.
        attributes[11] = 0;
        // SAFETY: as above.
        unsafe { bpf_fd(PROG_LOAD, &attributes) }
    });
    loaded.map_err(XdpError::of("loading the XDP program"))
}
