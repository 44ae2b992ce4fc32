//! The cheapest of all placements, for small cases: the truth that a search is measured against.

use alloc::vec::Vec;

use super::{Placement, Request, cost};
use crate::demand::Order;
use crate::ledger::Ledger;
use crate::loads::{Loader, Piece};
use crate::runs::Run;

/// Most assignments of workers to hosts that are tried.
pub const MOST_ASSIGNMENTS: u64 = 1 << 22;

/// Tries every assignment of each worker to each host, in any order of ranks.
///
/// The outer `None` means that there are too many; the inner that none fits.
pub fn cheapest(ledger: &Ledger, request: &Request) -> Option<Option<Placement>> {
    let hosts = u64::from(ledger.network().hosts());
    let count = hosts.checked_pow(request.workers())?;
    if count > MOST_ASSIGNMENTS {
        return None;
    }
    let demand = request.demand(Order::Ranks);
    let (mut loader, mut loads, mut pieces) = (Loader::new(), Vec::new(), Vec::new());
    let mut best: Option<Placement> = None;
    for number in 0..count {
        if !assigned(ledger, request, number, &mut pieces) {
            continue;
        }
        loader.loads(ledger.network(), demand, request.abstraction, &pieces, &mut loads);
        let Some(cost) = cost(ledger, request.slots_per_worker, &pieces, &loads) else {
            continue;
        };
        if best.as_ref().is_none_or(|best| cost < best.cost) {
            best = Some(Placement { order: Order::Ranks, pieces: pieces.clone(), cost });
        }
    }
    Some(best)
}

/// The assignment whose digits are the hosts of the workers; whether their slots hold it.
fn assigned(ledger: &Ledger, request: &Request, number: u64, pieces: &mut Vec<Piece>) -> bool {
    let hosts = u64::from(ledger.network().hosts());
    pieces.clear();
    let mut rest = number;
    for rank in 0..request.workers() {
        let host = (rest % hosts) as u32;
        rest /= hosts;
        match pieces.last_mut() {
            Some(last) if last.host == host => last.run.end += 1,
            _ => pieces.push(Piece { host, run: Run::new(rank, rank + 1) }),
        }
        let on_host = pieces.iter().filter(|piece| piece.host == host);
        if on_host.map(|piece| piece.run.len()).sum::<u32>() > request.room(ledger, host) {
            return false;
        }
    }
    request.fits_slots(ledger, pieces)
}
