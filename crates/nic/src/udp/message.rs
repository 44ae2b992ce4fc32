//! The C side of a datagram: control messages as the kernel lays them out.
//!
//! Nothing here does I/O. Code that reads memory filled by the kernel checks the lengths that the
//! kernel reported.

use std::ffi::c_int;

/// Bytes of control messages: three integers, each behind a header of 16 bytes and padded to 8.
const CONTROL_BYTES: usize = 3 * 24;

/// Level, type and value of a control message that carries an integer.
pub(crate) type Integer = (c_int, c_int, c_int);

/// Control messages that travel with a datagram.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(crate) struct Control {
    bytes: [u8; CONTROL_BYTES],
}

impl Control {
    pub(crate) const EMPTY: Control = Control { bytes: [0; CONTROL_BYTES] };
    pub(crate) const BYTES: usize = CONTROL_BYTES;

    pub(crate) fn as_mut_ptr(&mut self) -> *mut libc::c_void {
        self.bytes.as_mut_ptr().cast()
    }

    /// Writes `mark` and `hop_limit` (level, type, value) and the segment size, and returns their
    /// length.
    pub(crate) fn encode(
        &mut self,
        mark: Integer,
        hop_limit: Option<Integer>,
        segment: Option<u16>,
    ) -> usize {
        let mut used = self.put_integer(0, mark);
        if let Some(hop_limit) = hop_limit {
            used = self.put_integer(used, hop_limit);
        }
        if let Some(bytes) = segment {
            used = self.put(used, libc::IPPROTO_UDP, libc::UDP_SEGMENT, &bytes.to_ne_bytes());
        }
        used
    }

    fn put_integer(&mut self, at: usize, (level, kind, value): Integer) -> usize {
        self.put(at, level, kind, &value.to_ne_bytes())
    }

    fn put(&mut self, at: usize, level: c_int, kind: c_int, data: &[u8]) -> usize {
        // SAFETY: CMSG_SPACE and CMSG_LEN are arithmetic.
        let (space, len) = unsafe {
            let len = data.len() as u32;
            (libc::CMSG_SPACE(len) as usize, libc::CMSG_LEN(len) as usize)
        };
        let place = &mut self.bytes[at..at + space];
        place.fill(0);
        let header = place.as_mut_ptr().cast::<libc::cmsghdr>();
        // SAFETY: `place` holds a header and the data (CMSG_SPACE), and is aligned for a header:
        // the buffer is 8-aligned and every message before took a multiple of that (CMSG_SPACE).
        unsafe {
            (*header).cmsg_len = len as _;
            (*header).cmsg_level = level;
            (*header).cmsg_type = kind;
            libc::CMSG_DATA(header).copy_from_nonoverlapping(data.as_ptr(), data.len());
        }
        at + space
    }
}

/// What the kernel reports about a received datagram.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Arrival {
    /// Traffic class byte: DSCP and ECN.
    pub(crate) tos: u8,
    /// Time to live or hop limit; 0 where the socket does not request it.
    pub(crate) hop_limit: u8,
    /// Length of each datagram but the last, when several were joined.
    pub(crate) segment: Option<usize>,
}

impl Arrival {
    /// Reads the control messages of `header`.
    ///
    /// # Safety
    /// `msg_control` must point to `msg_controllen` bytes as a receive call left them.
    pub(crate) unsafe fn decode(header: &libc::msghdr) -> Arrival {
        let mut arrival = Arrival::default();
        // SAFETY: by this function's contract the buffer is readable for `msg_controllen` bytes,
        // which bounds every header that the two macros return.
        unsafe {
            let mut next = libc::CMSG_FIRSTHDR(header);
            while let Some(message) = next.as_ref() {
                arrival.note(message.cmsg_level, message.cmsg_type, data_of(message));
                next = libc::CMSG_NXTHDR(header, message);
            }
        }
        arrival
    }

    fn note(&mut self, level: c_int, kind: c_int, data: &[u8]) {
        let int = || data.try_into().map(c_int::from_ne_bytes);
        match (level, kind) {
            (libc::IPPROTO_IP, libc::IP_TOS) => self.tos = data.first().copied().unwrap_or(0),
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => self.tos = int().unwrap_or(0) as u8,
            (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => {
                self.hop_limit = int().unwrap_or(0) as u8;
            }
            (libc::IPPROTO_UDP, libc::UDP_GRO) => {
                self.segment = int().ok().and_then(|bytes| usize::try_from(bytes).ok());
            }
            _ => {}
        }
    }
}

/// The bytes of a control message.
///
/// # Safety
/// `message` must be followed by as many bytes as its length says.
#[allow(clippy::unnecessary_cast, reason = "the length's type differs between C libraries")]
unsafe fn data_of(message: &libc::cmsghdr) -> &[u8] {
    // SAFETY: CMSG_LEN is arithmetic; the data starts behind the header and, by the contract, has
    // the length that the header states.
    unsafe {
        let len = (message.cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize);
        std::slice::from_raw_parts(libc::CMSG_DATA(message), len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_messages_survive_the_round_trip() {
        let mut control = Control::EMPTY;
        let tclass = (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, 0xb9);
        let hops = (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT, 7);
        let len = control.encode(tclass, Some(hops), Some(4112));
        assert!(len <= Control::BYTES);
        // SAFETY: all zeroes is a valid msghdr.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_control = control.as_mut_ptr();
        header.msg_controllen = len as _;
        // SAFETY: the header points to `len` bytes just written.
        let arrival = unsafe { Arrival::decode(&header) };
        assert_eq!(arrival, Arrival { tos: 0xb9, hop_limit: 7, segment: None });
        let mut received = Arrival::default();
        received.note(libc::IPPROTO_UDP, libc::UDP_GRO, &4112i32.to_ne_bytes());
        received.note(libc::IPPROTO_UDP, libc::UDP_GRO + 1, &[]);
        received.note(libc::IPPROTO_IP, libc::IP_TOS, &[3]);
        received.note(libc::IPPROTO_IP, libc::IP_TTL, &64i32.to_ne_bytes());
        assert_eq!(received, Arrival { tos: 3, hop_limit: 64, segment: Some(4112) });
    }
}
