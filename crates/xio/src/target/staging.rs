//! The staging buffers of a target, in units: a request for a small block takes a part of a buffer.
//!
//! A buffer holds [`UNITS`] units. A request takes 1, 2, 4 or all of them, aligned to their number,
//! and prefers buffers that are in use already, so that whole buffers stay free for large blocks.
//! Nothing is known here of sessions or of what a buffer holds.

use alloc::vec::Vec;

use super::{BLOCK_BYTES, IO_ALIGN};

/// Units of a buffer.
pub(super) const UNITS: u32 = 8;

/// Bytes of a unit: its part of a block, and the slack of an aligned read, which begins and ends
/// inside a page.
pub(super) const UNIT_BYTES: u32 = BLOCK_BYTES / UNITS + IO_ALIGN;

/// No unit of a buffer is in use.
const ALL_FREE: u8 = u8::MAX;

/// Which units are free.
#[derive(Debug)]
pub(super) struct Buffers {
    /// Of each buffer, a bit for each free unit.
    free: Vec<u8>,
    /// Units taken together, by the first of them.
    taken: Vec<u8>,
    /// Buffers of which every unit is free.
    whole: usize,
}

/// Units that hold `bytes`.
pub(super) fn units_of(bytes: u32) -> u32 {
    bytes.div_ceil(UNIT_BYTES).next_power_of_two().min(UNITS)
}

/// The bits of `units` units from `first` on.
const fn bits(first: u32, units: u32) -> u8 {
    (((1u16 << units) - 1) << first) as u8
}

impl Buffers {
    pub(super) fn new(buffers: u32) -> Buffers {
        let whole = buffers as usize;
        let taken = alloc::vec![0; whole * UNITS as usize];
        Buffers { free: alloc::vec![ALL_FREE; whole], taken, whole }
    }

    /// Buffers in all.
    pub(super) fn buffers(&self) -> usize {
        self.free.len()
    }

    /// Buffers of which nothing is in use.
    pub(super) fn whole(&self) -> usize {
        self.whole
    }

    /// The first of `units` free units: in a buffer that is partly in use, or, if `whole` allows
    /// it, in one that is not.
    pub(super) fn find(&self, units: u32, whole: bool) -> Option<u32> {
        let fit = |free: u8| {
            let mut places = (0..UNITS).step_by(units as usize);
            places.find(|first| free & bits(*first, units) == bits(*first, units))
        };
        let buffers = || (0..).zip(self.free.iter().copied());
        let mut partly = buffers().filter(|(_, free)| *free != 0 && *free != ALL_FREE);
        let found = partly.find_map(|(buffer, free)| Some(buffer * UNITS + fit(free)?));
        let mut unused = buffers().filter(|(_, free)| whole && *free == ALL_FREE);
        found.or_else(|| unused.next().map(|(buffer, _)| buffer * UNITS))
    }

    /// Takes `units` units from `first` on, which are free.
    pub(super) fn take(&mut self, first: u32, units: u32) {
        let free = &mut self.free[(first / UNITS) as usize];
        self.whole -= usize::from(*free == ALL_FREE);
        *free &= !bits(first % UNITS, units);
        self.taken[first as usize] = units as u8;
    }

    /// Frees the units that were taken with `first`, and returns their number.
    pub(super) fn give_back(&mut self, first: u32) -> u32 {
        let units = u32::from(self.taken[first as usize]);
        let free = &mut self.free[(first / UNITS) as usize];
        *free |= bits(first % UNITS, units);
        self.whole += usize::from(*free == ALL_FREE);
        units
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_requests_share_a_buffer() {
        let mut staging = Buffers::new(2);
        let mut take = |units| {
            let first = staging.find(units, true);
            first.into_iter().for_each(|first| staging.take(first, units));
            first
        };
        let taken = [1, 2, 1, 4, 8, 1].map(&mut take);
        assert_eq!(taken, [Some(0), Some(2), Some(1), Some(4), Some(8), None]);
        assert_eq!(staging.whole(), 0);
        staging.give_back(2);
        assert_eq!((staging.find(2, false), staging.find(4, true)), (Some(2), None));
        assert_eq!([0, 1, 4, 8].map(|first| staging.give_back(first)), [1, 1, 4, 8]);
        assert_eq!((staging.whole(), staging.find(1, false)), (2, None));
    }

    #[test]
    fn every_request_fits_its_units() {
        for block in [1, 4_096, 100_000, 128 << 10, 256 << 10, 600_000, BLOCK_BYTES] {
            for head in [0, 1, IO_ALIGN - 1] {
                let read = (head + block).next_multiple_of(IO_ALIGN);
                assert!(read <= units_of(read) * UNIT_BYTES, "{block} bytes from {head}");
            }
        }
        assert_eq!([1, 128 << 10, 256 << 10, BLOCK_BYTES].map(units_of), [1, 1, 2, 8]);
    }
}
