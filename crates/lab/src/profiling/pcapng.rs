//! Packets of a pcapng file: sections of blocks, of which those that describe interfaces and those
//! with packets matter.

use roce::wire::capture::Link;

use super::TrafficError;

const SECTION: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const SIMPLE_PACKET: u32 = 3;
const ENHANCED_PACKET: u32 = 6;
const BYTE_ORDER: u32 = 0x1a2b_3c4d;

/// The option of an interface that says what its times count.
const RESOLUTION: u16 = 9;

/// Whether a file begins as pcapng does.
pub(super) fn is_pcapng(bytes: &[u8]) -> bool {
    bytes.first_chunk::<4>().is_some_and(|magic| u32::from_le_bytes(*magic) == SECTION)
}

/// A source of packets.
#[derive(Clone, Copy, Debug)]
struct Interface {
    link: Option<Link>,
    ticks_per_second: u64,
}

/// Numbers in the byte order of a section.
#[derive(Clone, Copy, Debug)]
struct Order {
    is_big: bool,
}

impl Order {
    fn word(self, bytes: &[u8], at: usize) -> Option<u32> {
        let word = *bytes.get(at..)?.first_chunk::<4>()?;
        Some(if self.is_big { u32::from_be_bytes(word) } else { u32::from_le_bytes(word) })
    }

    fn half(self, bytes: &[u8], at: usize) -> Option<u16> {
        let half = *bytes.get(at..)?.first_chunk::<2>()?;
        Some(if self.is_big { u16::from_be_bytes(half) } else { u16::from_le_bytes(half) })
    }
}

/// Hands each packet over, with its first header, its time in nanoseconds and its bytes. Interfaces
/// of other kinds, and packets without a time, are left out.
///
/// # Errors
/// Says which block is damaged; what came before was handed over.
pub(super) fn each(
    bytes: &[u8],
    mut visit: impl FnMut(Link, u64, &[u8]) -> Result<(), TrafficError>,
) -> Result<(), TrafficError> {
    let mut order = Order { is_big: false };
    let mut interfaces: Vec<Interface> = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let damaged = |what| TrafficError::Block { at, what };
        let kind = order.word(bytes, at).ok_or_else(|| damaged("it has no type"))?;
        if kind == SECTION {
            let magic = *bytes[at..]
                .get(8..12)
                .and_then(<[u8]>::first_chunk::<4>)
                .ok_or_else(|| damaged("it is cut short"))?;
            order.is_big = match (u32::from_le_bytes(magic), u32::from_be_bytes(magic)) {
                (BYTE_ORDER, _) => false,
                (_, BYTE_ORDER) => true,
                _ => return Err(damaged("its byte order is unknown")),
            };
            interfaces.clear();
        }
        let length = order.word(bytes, at + 4).ok_or_else(|| damaged("it has no length"))?;
        let block = usize::try_from(length).ok().and_then(|length| bytes[at..].get(..length));
        let block =
            block.filter(|block| block.len() >= 12).ok_or_else(|| damaged("it is cut short"))?;
        let body = &block[8..block.len() - 4];
        match kind {
            INTERFACE => {
                interfaces.push(interface(order, body).ok_or_else(|| damaged("no interface"))?);
            }
            ENHANCED_PACKET => {
                let packet = || {
                    let own = interfaces.get(usize::try_from(order.word(body, 0)?).ok()?)?;
                    let time =
                        u64::from(order.word(body, 4)?) << 32 | u64::from(order.word(body, 8)?);
                    let captured = usize::try_from(order.word(body, 12)?).ok()?;
                    Some((own, time, body.get(20..)?.get(..captured)?))
                };
                let (own, time, packet) = packet().ok_or_else(|| damaged("no packet"))?;
                let ns = u128::from(time) * 1_000_000_000 / u128::from(own.ticks_per_second);
                if let Some(link) = own.link {
                    visit(link, u64::try_from(ns).unwrap_or(u64::MAX), packet)?;
                }
            }
            // Without a time there is nothing to say about iterations.
            SIMPLE_PACKET => {}
            _ => {}
        }
        at += block.len().next_multiple_of(4);
    }
    Ok(())
}

fn interface(order: Order, body: &[u8]) -> Option<Interface> {
    let link = Link::from_code(order.half(body, 0)?);
    let mut ticks_per_second = 1_000_000;
    let mut options = body.get(8..)?;
    while let (Some(code), Some(length)) = (order.half(options, 0), order.half(options, 2)) {
        let value = options.get(4..)?.get(..usize::from(length))?;
        if code == RESOLUTION {
            let exponent = *value.first()?;
            let base: u64 = if exponent & 0x80 == 0 { 10 } else { 2 };
            ticks_per_second = base.checked_pow(u32::from(exponent & 0x7f))?;
        }
        if code == 0 {
            break;
        }
        options = options.get(4 + usize::from(length).next_multiple_of(4)..)?;
    }
    Some(Interface { link, ticks_per_second })
}
