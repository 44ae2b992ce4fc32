//! Packet sequence numbers: 24 bits, compared around the circle (IBA 9.7.2).

/// A packet sequence number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Psn(u32);

impl Psn {
    /// Number of distinct values.
    pub const MODULUS: u32 = 1 << 24;

    /// The low 24 bits of `value`.
    pub const fn new(value: u32) -> Psn {
        Psn(value & (Psn::MODULUS - 1))
    }

    /// The number as in the packet.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// `n` packets later.
    #[must_use]
    pub const fn plus(self, n: u32) -> Psn {
        Psn::new(self.0.wrapping_add(n))
    }

    /// `n` packets earlier.
    #[must_use]
    pub const fn minus(self, n: u32) -> Psn {
        Psn::new(self.0.wrapping_sub(n))
    }

    /// The next packet.
    #[must_use]
    pub const fn next(self) -> Psn {
        self.plus(1)
    }

    /// How far `self` is after `other`: -2^23 ..= 2^23 - 1, the shorter way round.
    pub const fn distance_from(self, other: Psn) -> i32 {
        let raw = self.0.wrapping_sub(other.0) & (Psn::MODULUS - 1);
        if raw < Psn::MODULUS / 2 { raw as i32 } else { raw as i32 - Psn::MODULUS as i32 }
    }

    /// Whether `self` comes before `other` on the shorter way round.
    pub const fn is_before(self, other: Psn) -> bool {
        self.distance_from(other) < 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wraps_at_24_bits() {
        let last = Psn::new(0x00ff_ffff);
        assert_eq!(last.next(), Psn::new(0));
        assert_eq!(Psn::new(0).minus(1), last);
        assert_eq!(Psn::new(5).distance_from(last), 6);
        assert!(last.is_before(Psn::new(0)));
        assert!(!Psn::new(0).is_before(last));
    }

    #[test]
    fn half_way_round_is_behind() {
        assert_eq!(Psn::new(0x80_0000).distance_from(Psn::new(0)), -0x80_0000);
        assert_eq!(Psn::new(0x7f_ffff).distance_from(Psn::new(0)), 0x7f_ffff);
    }
}
