//! What subnet managers tell each other and are told: the attribute `SMInfo` (IBA 14.2.5.13),
//! notices (IBA 13.4.8.2), and the headers of the datagrams that carry both.

use crate::mad::{DIRECTED_ROUTE, MAD_BYTES, u16_at, u64_at};

/// Management class "subnet management, routed by LIDs".
pub const LID_ROUTED: u8 = 0x01;

/// Management class "subnet administration".
pub const ADMINISTRATION: u8 = 0x03;

/// The state of a subnet manager (IBA table 179).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// It was disabled.
    NotActive,
    /// It looks for others.
    Discovering,
    /// It watches the master.
    Standby,
    /// It manages the subnet.
    Master,
}

impl Standing {
    /// All, by their codes.
    const ALL: [Standing; 4] =
        [Standing::NotActive, Standing::Discovering, Standing::Standby, Standing::Master];
}

impl core::fmt::Display for Standing {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Standing::NotActive => "not active",
            Standing::Discovering => "discovering",
            Standing::Standby => "standby",
            Standing::Master => "master",
        })
    }
}

/// Attribute `SMInfo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmInfo {
    /// The GUID of its port.
    pub guid: u64,
    /// What managers of one subnet have in common; 0 if nothing.
    pub key: u64,
    /// Counts what it does.
    pub count: u32,
    /// 0 to 15; the highest is the master.
    pub priority: u8,
    /// Its state.
    pub standing: Standing,
}

impl SmInfo {
    /// `None` where the state is none.
    pub fn parse(data: &[u8; 64]) -> Option<SmInfo> {
        let standing = *Standing::ALL.get(usize::from(data[20] & 0xf))?;
        Some(SmInfo {
            guid: u64_at(data, 0),
            key: u64_at(data, 8),
            count: u32::from_be_bytes([data[16], data[17], data[18], data[19]]),
            priority: data[20] >> 4,
            standing,
        })
    }

    /// As it is sent.
    pub fn emit(&self) -> [u8; 64] {
        let mut data = [0; 64];
        data[..8].copy_from_slice(&self.guid.to_be_bytes());
        data[8..16].copy_from_slice(&self.key.to_be_bytes());
        data[16..20].copy_from_slice(&self.count.to_be_bytes());
        data[20] = self.priority.min(15) << 4 | self.standing as u8;
        data
    }

    /// Whether it goes before another: by priority, then by the lower GUID (IBA 14.4.1).
    pub fn is_before(&self, other: &SmInfo) -> bool {
        (core::cmp::Reverse(self.priority), self.guid)
            < (core::cmp::Reverse(other.priority), other.guid)
    }
}

/// What one manager tells another by the modifier of `Set(SMInfo)` (IBA table 181).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// Be the master from now on.
    Handover,
    /// You are the master from now on.
    Acknowledge,
    /// Do nothing any more.
    Disable,
    /// Do something again.
    Standby,
    /// Look for others.
    Discover,
}

impl Control {
    /// All, by their modifiers, from 1.
    const ALL: [Control; 5] = [
        Control::Handover,
        Control::Acknowledge,
        Control::Disable,
        Control::Standby,
        Control::Discover,
    ];

    /// By its modifier.
    pub fn of(modifier: u32) -> Option<Control> {
        Control::ALL.get((modifier as usize).checked_sub(1)?).copied()
    }

    /// Its modifier.
    pub fn modifier(self) -> u32 {
        self as u32 + 1
    }
}

/// What a manager reads of a notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notice {
    /// It is one of the specification, not of a vendor.
    pub is_generic: bool,
    /// The number of the trap.
    pub trap: u16,
    /// The LID of who reports.
    pub issuer_lid: u16,
    /// Of [`WRONG_KEY`]: the LID that the SMP came from; 0xffff if it came by a directed route.
    pub violator_lid: u16,
}

/// The state of a port of the switch has changed.
pub const PORT_CHANGED: u16 = 128;

/// What a port can do has changed, or what a node calls itself.
pub const CAPABILITY_CHANGED: u16 = 144;

/// A port got an SMP with an M_Key that is not its own.
pub const WRONG_KEY: u16 = 256;

impl Notice {
    /// From the attribute.
    pub fn parse(data: &[u8; 64]) -> Notice {
        Notice {
            is_generic: data[0] & 0x80 != 0,
            trap: u16_at(data, 4),
            issuer_lid: u16_at(data, 6),
            violator_lid: u16_at(data, 12),
        }
    }
}

/// The common header of management datagrams (IBA 13.4.3), as far as it says who a datagram is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The management class.
    pub class: u8,
    /// Its version.
    pub version: u8,
    /// The method; the highest bit is that of responses.
    pub method: u8,
    /// The attribute.
    pub attribute: u16,
    /// Its modifier.
    pub modifier: u32,
}

/// Methods (IBA table 115).
pub mod method {
    /// Reads.
    pub const GET: u8 = 0x01;
    /// Writes.
    pub const SET: u8 = 0x02;
    /// Reports.
    pub const TRAP: u8 = 0x05;
    /// Says that a report has arrived.
    pub const TRAP_REPRESS: u8 = 0x07;
    /// Set in responses.
    pub const RESPONSE: u8 = 0x80;
}

/// The attribute `Notice`.
pub const NOTICE: u16 = 0x02;

impl Header {
    /// `None` where the base version is another.
    pub fn parse(mad: &[u8; MAD_BYTES]) -> Option<Header> {
        let [base, class, version, method, ..] = *mad;
        let modifier = u32::from_be_bytes([mad[20], mad[21], mad[22], mad[23]]);
        let attribute = u16_at(mad, 16);
        (base == 1).then_some(Header { class, version, method, attribute, modifier })
    }

    /// Whether it is of subnet management, by either kind of route.
    pub fn is_subnet_management(&self) -> bool {
        self.version == 1 && matches!(self.class, DIRECTED_ROUTE | LID_ROUTED)
    }
}

/// The attribute of a datagram of subnet management.
pub fn smp_data(mad: &[u8; MAD_BYTES]) -> [u8; 64] {
    let mut data = [0; 64];
    data.copy_from_slice(&mad[64..128]);
    data
}

/// The response to a request of subnet management: the same header, the way back.
pub fn respond(request: &[u8; MAD_BYTES], status: u16, data: &[u8; 64]) -> [u8; MAD_BYTES] {
    let mut mad = *request;
    mad[3] = method::GET | method::RESPONSE;
    // The direction bit of directed routes.
    let direction = if request[1] == DIRECTED_ROUTE { 1 << 15 } else { 0 };
    mad[4..6].copy_from_slice(&(direction | status & 0x7fff).to_be_bytes());
    mad[64..128].copy_from_slice(data);
    mad
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn managers_are_read_as_they_were_written_and_have_an_order() {
        let low = SmInfo { guid: 7, key: 1, count: 9, priority: 3, standing: Standing::Master };
        assert_eq!(SmInfo::parse(&low.emit()), Some(low));
        let other = SmInfo { guid: 6, ..low };
        assert!(other.is_before(&low) && !low.is_before(&other) && !low.is_before(&low));
        let urgent = SmInfo { guid: 8, priority: 4, ..low };
        assert!(urgent.is_before(&other));
        let mut data = low.emit();
        data[20] = 0x3f;
        assert_eq!(SmInfo::parse(&data), None);
    }
}
