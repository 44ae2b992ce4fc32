//! Queue pair numbers.

/// A queue pair number, 24 bits. 0 and 1 are reserved for management and never assigned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Qpn(u32);

impl Qpn {
    /// The low 24 bits of `value`.
    pub const fn new(value: u32) -> Qpn {
        Qpn(value & 0x00ff_ffff)
    }

    /// The number as in the packet.
    pub const fn get(self) -> u32 {
        self.0
    }
}
