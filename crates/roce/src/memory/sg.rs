//! Scatter/gather lists: the byte range of a message carried by one packet, as checked addresses.
//!
//! Gathering and placing are the same walk over the list; only the kind of the check differs.

use arrayvec::ArrayVec;

use crate::memory::region::{AccessKind, ProtectionError, Range, RegionTable};
use crate::verbs::{MAX_SGE, PdId, Sge};

/// Bytes of registered memory, the source or destination of a packet's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// First byte.
    pub addr: u64,
    /// Length in bytes, never 0.
    pub len: u32,
}

/// Where one packet's payload is, in order.
pub type Placements = ArrayVec<Placement, MAX_SGE>;

/// Length of the whole list in bytes.
pub(crate) fn total_bytes(sges: &[Sge]) -> u64 {
    sges.iter().map(|sge| u64::from(sge.len)).sum()
}

/// Length of all pieces in bytes.
pub(crate) fn placed_bytes(pieces: &[Placement]) -> u64 {
    pieces.iter().map(|piece| u64::from(piece.len)).sum()
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

/// Resolves `len` bytes from `offset` of the message described by `sges`. Each piece is checked and its
/// backing address added to `pieces`; none is added if one is refused.
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
pub(crate) struct Extent {
    pub(crate) offset: u32,
    pub(crate) len: u32,
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
