//! Scatter/gather lists: the byte range of a message carried by one packet, as checked addresses.
//!
//! Gathering and placing are the same walk over the list; only the kind of the check differs.

use crate::memory::region::{AccessKind, ProtectionError, Range, RegionTable};
use crate::verbs::{PdId, Sge, ShortList};

/// Bytes of registered memory, the source or destination of a packet's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// First byte.
    pub addr: u64,
    /// Length in bytes, never 0.
    pub len: u32,
}

impl Placement {
    /// Bytes of a payload that are not placed. No region contains the last byte of the address
    /// space.
    pub const fn skipped(len: u32) -> Placement {
        Placement { addr: u64::MAX, len }
    }

    /// Whether these bytes of the payload are not placed.
    pub const fn is_skipped(&self) -> bool {
        self.addr == u64::MAX
    }

    /// The address behind the last byte.
    pub(crate) const fn end(&self) -> u64 {
        self.addr.saturating_add(self.len as u64)
    }
}

/// Where one packet's payload is, in order.
pub type Placements = ShortList<Placement>;

/// Length of the whole list in bytes.
pub(crate) fn total_bytes(sges: &[Sge]) -> u64 {
    match sges {
        // Nearly all; the loop is made for long lists.
        [sge] => sge.len.into(),
        _ => sges.iter().map(|sge| u64::from(sge.len)).sum(),
    }
}

/// Length of all pieces in bytes.
pub(crate) fn placed_bytes(pieces: &[Placement]) -> u64 {
    pieces.iter().map(|piece| u64::from(piece.len)).sum()
}

/// Skips the bytes of `pieces` within `low..high`. Returns false, and changes nothing, if that
/// takes more pieces than there is room for.
#[must_use]
pub(crate) fn skip(pieces: &mut Placements, low: u64, high: u64) -> bool {
    let mut cut = Placements::new();
    for piece in pieces.iter() {
        let (from, to) = (low.clamp(piece.addr, piece.end()), high.clamp(piece.addr, piece.end()));
        // Bytes before, within and behind the range; a piece skipped before is never within.
        let lens = [from - piece.addr, to - from, piece.end() - to].map(|len| len as u32);
        let parts = match piece.is_skipped() || lens[1] == 0 {
            true => [*piece, Placement::skipped(0), Placement::skipped(0)],
            false => [
                Placement { addr: piece.addr, len: lens[0] },
                Placement::skipped(lens[1]),
                Placement { addr: to, len: lens[2] },
            ],
        };
        for part in parts.into_iter().filter(|part| part.len > 0) {
            let joins = |last: &&mut Placement| last.is_skipped() && part.is_skipped();
            if let Some(last) = cut.last_mut().filter(joins) {
                last.len += part.len;
            } else if cut.try_push(part).is_err() {
                return false;
            }
        }
    }
    *pieces = cut;
    true
}

/// Checks that every element may be accessed for `kind`.
pub(crate) fn check_all(
    regions: &RegionTable,
    pd: PdId,
    kind: AccessKind,
    sges: &[Sge],
) -> Result<(), ProtectionError> {
    sges.iter().try_for_each(|sge| {
        regions.check(pd, kind, Range { key: sge.lkey, addr: sge.addr, len: sge.len }).map(|_| ())
    })
}

/// Resolves `len` bytes from `offset` of the message described by `sges`. Each piece is checked and
/// its backing address added to `pieces`; none is added if one is refused.
///
/// The caller has checked that the list is long enough.
pub(crate) fn resolve(
    regions: &RegionTable,
    pd: PdId,
    kind: AccessKind,
    sges: &[Sge],
    extent: Extent,
    pieces: &mut Placements,
) -> Result<(), ProtectionError> {
    pieces.clear();
    let Extent { offset: mut skip, len: mut left } = extent;
    for sge in sges {
        if left == 0 {
            break;
        }
        if skip >= sge.len {
            skip -= sge.len;
            continue;
        }
        let len = left.min(sge.len - skip);
        let checked = sge
            .addr
            .checked_add(u64::from(skip))
            .ok_or(ProtectionError::Bounds)
            .and_then(|addr| regions.check(pd, kind, Range { key: sge.lkey, addr, len }));
        let addr = checked.inspect_err(|_| pieces.clear())?;
        pieces.push(Placement { addr, len });
        skip = 0;
        left -= len;
    }
    Ok(())
}

/// Part of a message.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Bytes of the message before it.
    pub offset: u32,
    /// Length in bytes.
    pub len: u32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::region::Registration;
    use crate::rng::Rng;
    use crate::verbs::Access;

    fn register(regions: &mut RegionTable, len: u64) -> u32 {
        let (pd, access) = (PdId(0), Access::LOCAL);
        regions.register(Registration { pd, addr: 0, len, backing: 0, access }).unwrap().lkey
    }

    #[test]
    fn ranges_cross_elements_and_skip_empty_ones() {
        let mut regions = RegionTable::new(4, &mut Rng::new(1));
        let lkey = register(&mut regions, 1000);
        let sge = |addr, len| Sge { addr, len, lkey };
        let sges = [sge(0, 10), sge(500, 0), sge(100, 5), sge(200, 20)];
        let cut = |offset, len| {
            let mut pieces = Placements::new();
            let extent = Extent { offset, len };
            let kind = AccessKind::LocalRead;
            resolve(&regions, PdId(0), kind, &sges, extent, &mut pieces).unwrap();
            pieces
        };
        let at = |addr, len| Placement { addr, len };
        assert_eq!(cut(8, 10)[..], [at(8, 2), at(100, 5), at(200, 3)]);
        assert_eq!(cut(10, 5)[..], [at(100, 5)]);
        assert_eq!(cut(34, 1)[..], [at(219, 1)]);
        assert!(cut(3, 0).is_empty());
    }

    /// Against one address per byte of payload.
    #[test]
    fn skipping_leaves_out_exactly_the_range() {
        let addresses = |pieces: &Placements| {
            let bytes = pieces.iter().flat_map(|piece| {
                (0..u64::from(piece.len))
                    .map(|byte| (!piece.is_skipped()).then(|| piece.addr + byte))
            });
            bytes.collect::<alloc::vec::Vec<_>>()
        };
        let (mut cut, mut full) = (0, 0);
        for seed in 0..2_000 {
            let mut rng = Rng::new(seed);
            let mut pieces: Placements = (0..1 + rng.next_u32() % 30)
                .map(|_| Placement { addr: rng.next_u64() % 60, len: 1 + rng.next_u32() % 20 })
                .collect();
            let mut model = addresses(&pieces);
            for _ in 0..6 {
                let low = rng.next_u64() % 80;
                let high = low + rng.next_u64() % 12;
                let before = pieces.clone();
                if skip(&mut pieces, low, high) {
                    let within = |addr: &u64| (low..high).contains(addr);
                    model.iter_mut().for_each(|byte| *byte = byte.filter(|addr| !within(addr)));
                    cut += 1;
                } else {
                    assert_eq!(pieces, before);
                    full += 1;
                }
                assert_eq!(addresses(&pieces), model, "seed {seed}");
                assert!(pieces.iter().all(|piece| piece.len > 0), "seed {seed}");
            }
        }
        assert!(cut > 1_000 && full > 100, "{cut} {full}");
    }

    #[test]
    fn a_bad_element_is_refused_only_where_it_is_used() {
        let mut regions = RegionTable::new(4, &mut Rng::new(1));
        let lkey = register(&mut regions, 100);
        let sges = [Sge { addr: 0, len: 50, lkey }, Sge { addr: 90, len: 20, lkey }];
        let cut = |offset, len| {
            let mut pieces = Placements::new();
            let extent = Extent { offset, len };
            let done =
                resolve(&regions, PdId(0), AccessKind::LocalWrite, &sges, extent, &mut pieces);
            assert!(done.is_ok() || pieces.is_empty());
            done
        };
        assert!(cut(0, 60).is_ok());
        assert_eq!(cut(0, 61), Err(ProtectionError::Bounds));
        assert_eq!(
            check_all(&regions, PdId(0), AccessKind::LocalRead, &sges),
            Err(ProtectionError::Bounds)
        );
    }
}
