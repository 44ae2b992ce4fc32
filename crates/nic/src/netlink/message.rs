//! Messages of netlink as bytes: requests as they are built, replies as they are read.
//!
//! A message is a header of 16 bytes, a fixed header of its kind, and attributes:
//! type-length-value, aligned to 4 bytes, in the byte order of the machine (RFC 3549, section 2.3;
//! the constants are those of `linux/netlink.h`). Replies come from outside: every length is
//! checked, and what follows a malformed attribute is left out. Nothing here has a socket or knows
//! what a message is about.

use std::net::IpAddr;

use super::Failure;

/// Bytes of the header of a message.
pub(super) const HEADER_BYTES: usize = 16;

/// Bytes of the header of an attribute.
const ATTRIBUTE_BYTES: usize = 4;

/// Set on the kind of attributes that contain others.
const NLA_F_NESTED: u16 = 1 << 15;
/// The bits of an attribute's kind without its flags.
const NLA_TYPE_MASK: u16 = 0x3fff;

/// Flags of messages.
pub mod flag {
    pub(crate) const REQUEST: u16 = 0x1;
    pub(crate) const ACK: u16 = 0x4;
    pub(crate) const DUMP_INTERRUPTED: u16 = 0x10;
    pub(crate) const CAPPED: u16 = 0x100;
    pub(crate) const ACK_ATTRIBUTES: u16 = 0x200;
    /// Of requests to change something: there must be none yet.
    pub const EXCLUSIVE: u16 = 0x200;
    /// Of requests to change something: one is created if there is none.
    pub const CREATE: u16 = 0x400;
    /// Of requests to change something: what is there is replaced.
    pub const REPLACE: u16 = 0x100;
    /// Of requests to read: all there are.
    pub const DUMP: u16 = 0x300;
}

/// A message to the kernel, as it is built.
#[derive(Clone, Debug)]
pub struct Request {
    flags: u16,
    bytes: Vec<u8>,
}

impl Request {
    /// One of a kind, with flags beside those that every request has, and the fixed header of its
    /// kind.
    pub fn new(kind: u16, flags: u16, header: &[u8]) -> Request {
        let mut bytes = vec![0; HEADER_BYTES];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(header);
        let mut request = Request { flags: flags | flag::REQUEST, bytes };
        request.align();
        request
    }

    /// Adds an attribute.
    #[must_use]
    pub fn attribute(mut self, kind: u16, value: &[u8]) -> Request {
        let start = self.begin(kind);
        self.bytes.extend_from_slice(value);
        self.end(start);
        self
    }

    /// Adds an attribute that is an address.
    #[must_use]
    pub fn address(self, kind: u16, value: IpAddr) -> Request {
        match value {
            IpAddr::V4(ip) => self.attribute(kind, &ip.octets()),
            IpAddr::V6(ip) => self.attribute(kind, &ip.octets()),
        }
    }

    /// Adds an attribute that is a text; the kernel wants a zero behind it.
    #[must_use]
    pub fn text(mut self, kind: u16, value: &str) -> Request {
        let start = self.begin(kind);
        self.bytes.extend_from_slice(value.as_bytes());
        self.bytes.push(0);
        self.end(start);
        self
    }

    /// Adds an attribute that contains those that `inner` adds.
    #[must_use]
    pub fn nest(self, kind: u16, inner: impl FnOnce(Request) -> Request) -> Request {
        let mut outer = self;
        let start = outer.begin(kind | NLA_F_NESTED);
        let mut outer = inner(outer);
        outer.end(start);
        outer
    }

    /// What follows the header of netlink: the fixed header and the attributes.
    pub fn body(&self) -> &[u8] {
        &self.bytes[HEADER_BYTES..]
    }

    /// The same, to be changed: for a request that is sent often.
    pub fn body_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[HEADER_BYTES..]
    }

    fn begin(&mut self, kind: u16) -> usize {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 2]);
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        start
    }

    /// Everything that is built here is far below 64 KiB, which is what a length can say.
    fn end(&mut self, start: usize) {
        let len = (self.bytes.len() - start) as u16;
        self.bytes[start..start + 2].copy_from_slice(&len.to_ne_bytes());
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    /// The message with its length and number, acknowledged by the kernel if it `wants_ack`.
    pub fn finish(&mut self, sequence: u32, wants_ack: bool) -> &[u8] {
        let len = self.bytes.len() as u32;
        self.bytes[..4].copy_from_slice(&len.to_ne_bytes());
        let flags = self.flags | if wants_ack { flag::ACK } else { 0 };
        self.bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
        self.bytes[8..12].copy_from_slice(&sequence.to_ne_bytes());
        &self.bytes
    }
}

/// A message of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// Its kind.
    pub kind: u16,
    /// What follows the header of netlink.
    pub body: &'a [u8],
    pub(super) flags: u16,
    pub(super) sequence: u32,
}

impl<'a> Message<'a> {
    /// A message of a kind, as the kernel sends it: for tests of those who read them.
    pub fn new(kind: u16, body: &'a [u8]) -> Message<'a> {
        Message { kind, body, flags: 0, sequence: 0 }
    }
}

/// The messages of a datagram, up to the first that is malformed.
pub(super) fn messages(datagram: &[u8]) -> impl Iterator<Item = Result<Message<'_>, Failure>> {
    let mut rest = datagram;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let cut = cut(rest);
        rest = cut.as_ref().map(|(_, rest)| *rest).unwrap_or_default();
        Some(cut.map(|(message, _)| message))
    })
}

/// The first message, and what follows it.
fn cut(rest: &[u8]) -> Result<(Message<'_>, &[u8]), Failure> {
    let header = rest.first_chunk().ok_or(Failure::Reply("it ends within a header"))?;
    let header: &[u8; HEADER_BYTES] = header;
    let len = u32_at(header, 0).unwrap_or(0) as usize;
    let body = rest.get(HEADER_BYTES..len).ok_or(Failure::Reply("it ends within a message"))?;
    let message = Message {
        kind: u16_at(header, 4).unwrap_or(0),
        body,
        flags: u16_at(header, 6).unwrap_or(0),
        sequence: u32_at(header, 8).unwrap_or(0),
    };
    Ok((message, rest.get(len.next_multiple_of(4)..).unwrap_or_default()))
}

/// A text without the zero behind it.
pub fn text_of(value: &[u8]) -> String {
    let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
    String::from_utf8_lossy(&value[..end]).into_owned()
}

/// The attributes of a message behind its fixed header, or within another attribute, by kind
/// without flags. What follows a malformed one is left out.
pub fn attributes(mut rest: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let len = usize::from(u16_at(rest, 0)?);
        let kind = u16_at(rest, 2)? & NLA_TYPE_MASK;
        let value = rest.get(ATTRIBUTE_BYTES..len)?;
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// The first attribute of a kind.
pub fn attribute(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(found, _)| *found == kind).map(|(_, value)| value)
}

/// The number at that byte, in the machine's order; none if it is too short.
pub fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// The number at that byte, in the machine's order; none if it is too short.
pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// The number at that byte, in the machine's order; none if it is too short.
pub fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(bytes: &[u8]) -> Result<Vec<Message<'_>>, Failure> {
        messages(bytes).collect()
    }

    #[test]
    fn attributes_come_back_as_they_were_added() {
        let mut request = Request::new(1, 0, &[9; 4]).attribute(7, &[1, 2, 3]).nest(8, |inner| {
            inner.text(1, "abc").attribute(2, &5u32.to_ne_bytes()).attribute(3, &[])
        });
        let bytes = request.finish(77, true);
        assert_eq!(bytes.len() % 4, 0);
        let found = whole(bytes).expect("one message");
        assert_eq!((found.len(), found[0].kind, found[0].sequence), (1, 1, 77));
        assert_eq!(found[0].flags, flag::REQUEST | flag::ACK);
        let body = &found[0].body[4..];
        assert_eq!(attribute(body, 7), Some(&[1, 2, 3][..]));
        let inner = attribute(body, 8).expect("nested");
        assert_eq!(attribute(inner, 1).map(text_of).as_deref(), Some("abc"));
        assert_eq!(attribute(inner, 2).and_then(|value| u32_at(value, 0)), Some(5));
        assert_eq!(attribute(inner, 3), Some(&[][..]));
        assert_eq!(attribute(inner, 4), None);
    }

    #[test]
    fn a_request_can_be_changed_and_sent_again() {
        let mut request = Request::new(1, flag::DUMP, &[0; 4]);
        let acknowledged = request.finish(1, true).to_vec();
        request.body_mut()[0] = 7;
        let bytes = request.finish(2, false);
        assert_eq!(u16_at(&acknowledged, 6), Some(flag::DUMP | flag::REQUEST | flag::ACK));
        assert_eq!(u16_at(bytes, 6), Some(flag::DUMP | flag::REQUEST));
        assert_eq!((u32_at(bytes, 8), bytes[HEADER_BYTES]), (Some(2), 7));
    }

    #[test]
    fn malformed_messages_are_refused_at_every_length() {
        let bytes = Request::new(18, 0, &[0; 16]).text(3, "lo").finish(1, true).to_vec();
        for len in 1..bytes.len() {
            assert!(whole(&bytes[..len]).is_err(), "{len} bytes");
            // Behind a whole one, too.
            assert!(whole(&[&bytes, &bytes[..len]].concat()).is_err(), "{len} bytes");
        }
        for claimed in [0, 3, 15, u32::MAX] {
            let mut hostile = bytes.clone();
            hostile[..4].copy_from_slice(&claimed.to_ne_bytes());
            assert!(whole(&hostile).is_err(), "a length of {claimed}");
        }
    }

    #[test]
    fn attributes_with_impossible_lengths_end_the_search() {
        let body = Request::new(1, 0, &[]).attribute(9, &[1]).attribute(4, &[7, 0, 0, 0]);
        let body = body.body();
        assert_eq!(
            (attribute(body, 9), attribute(body, 4)),
            (Some(&[1][..]), Some(&[7, 0, 0, 0][..]))
        );
        assert_eq!(attribute(body, 5), None);
        for claimed in [0_u16, 3, 200, u16::MAX] {
            let mut hostile = body.to_vec();
            hostile[..2].copy_from_slice(&claimed.to_ne_bytes());
            assert_eq!(attribute(&hostile, 4), None, "{claimed}");
        }
        assert!((0..body.len()).all(|len| attribute(&body[..len], 4).is_none()));
        assert_eq!(attributes(&[0; 64]).count(), 0, "a length below that of its own header");
    }
}
