//! What a wire asks before it sends: finds the folder, follows it, and runs the rules over it.

use std::path::PathBuf;

use roce::Time;
use roce::shaping::{Arrivals, Shaper, Table, Word};
use roce::world::{Path, RxFrame, TxFrame};

use super::files::{Identity, identity, of_sender};
use super::layout::SharedTable;
use super::{FOLDER, LOOK_EVERY, VARIABLE};
use crate::clock;

/// Ethernet, IP and UDP headers of a packet: what a queue of the port counts.
const HEADER_BYTES_V4: u64 = 14 + 20 + 8;
const HEADER_BYTES_V6: u64 = 14 + 40 + 8;

/// The rate limits and gates that a wire keeps.
#[derive(Debug)]
pub(crate) struct RateLimits {
    folder: Option<PathBuf>,
    look_at: Time,
    table: Option<SharedTable>,
    /// The files of `table`.
    identity: Identity,
    shaper: Shaper,
}

impl RateLimits {
    /// Those of the folder that the environment names.
    pub(crate) fn from_environment() -> RateLimits {
        let folder = match std::env::var_os(VARIABLE) {
            Some(named) if named.is_empty() => None,
            Some(named) => Some(PathBuf::from(named)),
            None => Some(PathBuf::from(FOLDER)),
        };
        RateLimits::of(folder)
    }

    pub(crate) fn of(folder: Option<PathBuf>) -> RateLimits {
        let look_at = if folder.is_some() { Time::ZERO } else { Time::from_nanos(u64::MAX) };
        let (table, identity, shaper) = (None, [None; 2], Shaper::default());
        RateLimits { folder, look_at, table, identity, shaper }
    }

    /// How often queue pairs were held back, and how many peers are remembered.
    pub(crate) fn shaper(&self) -> &Shaper {
        &self.shaper
    }

    /// How many of `packets` packets on this path may be sent now.
    #[inline]
    pub(crate) fn admits(&mut self, now: Time, path: &Path, packets: usize) -> usize {
        if now >= self.look_at {
            self.look(now);
        }
        match &self.table {
            None => packets,
            Some(table) => self.shaper.admits(table, now, (path.dscp, path.remote.ip()), packets),
        }
    }

    /// These are sent.
    #[inline]
    pub(crate) fn sent(&mut self, now: Time, frames: &[TxFrame<'_>]) {
        if self.table.is_some() {
            self.count(now, frames);
        }
    }

    fn count(&mut self, now: Time, frames: &[TxFrame<'_>]) {
        let Some(table) = &self.table else { return };
        let runs = frames.chunk_by(|a, b| a.path.dscp == b.path.dscp);
        let runs = runs.map(|run| (run[0].path.dscp, run.iter().map(wire_bytes).sum()));
        let counted = runs.inspect(|(dscp, bytes)| {
            table.bucket(usize::from(*dscp) % roce::shaping::CODE_POINTS).bytes.add(*bytes);
        });
        self.shaper.sent(table, now, counted);
    }

    /// Whether there are gates, so that [`RateLimits::received`] has to be told what arrives. Looks
    /// for the folder, too: a gate that is found only when the acknowledgement is due would hold it
    /// back.
    #[inline]
    pub(crate) fn watches(&mut self, now: Time) -> bool {
        if now >= self.look_at {
            self.look(now);
        }
        self.table.as_ref().is_some_and(|table| table.gated() != 0)
    }

    /// These packets have arrived.
    pub(crate) fn received(&mut self, now: Time, arrivals: &Arrivals) {
        if let Some(table) = &self.table {
            self.shaper.received(table, now, arrivals);
        }
    }

    /// What was admitted and not sent is not any more. Whoever waited until now asks again, or is
    /// gone.
    #[inline]
    pub(crate) fn lapse(&mut self, now: Time) {
        self.shaper.lapse(now);
    }

    /// Whether packets on this path wait for their gate: a timer of their connection says nothing
    /// about the peer.
    pub(crate) fn holds_back(&self, path: &Path) -> bool {
        let flow = (path.dscp, path.remote.ip());
        self.table.as_ref().is_some_and(|table| self.shaper.holds_back(table, clock::now(), flow))
    }

    /// When packets that were not admitted may be.
    pub(crate) fn next_wakeup(&self) -> Option<Time> {
        self.shaper.next_wakeup()
    }

    #[cold]
    fn look(&mut self, now: Time) {
        self.look_at = now + LOOK_EVERY;
        let Some(folder) = &self.folder else { return };
        // Before they are opened: what is replaced meanwhile is noticed by the next look.
        let found = identity(folder);
        let known = if self.table.is_some() { self.identity } else { [None; 2] };
        if found != known {
            self.table = of_sender(folder).ok();
            self.identity = found;
            self.shaper.replaced();
        }
    }
}

/// Has a wire receive, and tells its rate limits what arrives if they have to know.
pub(crate) fn receive_watched<W>(
    wire: &mut W,
    now: Time,
    sink: &mut dyn FnMut(&RxFrame<'_>),
    limits: fn(&mut W) -> &mut RateLimits,
    receive: impl FnOnce(&mut W, &mut dyn FnMut(&RxFrame<'_>)) -> usize,
) -> usize {
    limits(wire).lapse(now);
    if !limits(wire).watches(now) {
        return receive(wire, sink);
    }
    let mut arrivals = Arrivals::default();
    let accepted = receive(wire, &mut |frame| {
        arrivals.note(frame.origin.dscp, frame.origin.source.ip());
        sink(frame);
    });
    limits(wire).received(now, &arrivals);
    accepted
}

fn wire_bytes(frame: &TxFrame<'_>) -> u64 {
    let headers = if frame.path.remote.is_ipv4() { HEADER_BYTES_V4 } else { HEADER_BYTES_V6 };
    headers + frame.udp_payload_len() as u64
}
