//! The same-host path of an engine: which queue pairs use it, and what this process publishes for it.
//!
//! [`nic::neighbours`] does the work. Here the state of queue pairs and regions is copied to the board whenever it
//! changes, under the engine's lock. Who withdraws something then calls [`Engine::quiesce`] without the lock, before
//! the verb returns: from then on no neighbour touches it.

use std::sync::Arc;

use nic::device::DeviceWire;
use nic::driver::RESCUED;
use nic::neighbours::{FifoCounters, Neighbours, Target};
use roce::direct::{Backlog, MAX_DIRECT_BYTES, Posted, RegionCard};
use roce::endpoint::QpState;
use roce::verbs::{Qpn, SendWr, Transport, VerbsError, WindowBinding};
use roce::wire::ROCE_PORT;
use roce::world::Path;

use super::{Core, Engine};
use crate::process::errors::say;
use crate::process::settings::{PATH, PathChoice, Settings};
use crate::process::signals::SignalsBlocked;

/// What an engine has of the same-host path: neighbours, or the reason for none.
pub(super) type Possible = Result<Neighbours, String>;

/// The number of bits below the slot in a queue pair number.
const SLOT_SHIFT: u32 = 16;

pub(super) fn open(wire: &DeviceWire, settings: &Settings) -> Possible {
    if settings.path == PathChoice::Udp {
        return Err(format!("{PATH}=udp"));
    }
    if wire.capture().is_some() {
        return Err("packets are recorded".to_owned());
    }
    let _blocked = SignalsBlocked::all();
    let opened = Neighbours::open(ROCE_PORT, wire.slot(), wire.addresses());
    opened.map_err(|error| format!("no board for neighbours: {error}"))
}

impl Engine {
    /// Finds out whether a queue pair's peer is a neighbour, before it is connected.
    pub(crate) fn meet(&self, path: &Path, dest: Qpn) -> Result<Arc<Target>, String> {
        let shared = self.boards.as_ref().map_err(Clone::clone)?;
        shared.meet(path.remote, (dest.get() >> SLOT_SHIFT) as u8)
    }

    /// Waits until no neighbour uses what was withdrawn before. Must be called without the engine's lock. Returns false
    /// if one was stopped in the middle of an access.
    #[must_use]
    pub(crate) fn quiesce(&self) -> bool {
        self.boards.as_ref().ok().is_none_or(|shared| shared.quiesce())
    }

    /// The progress thread is awake: neighbours need not wake it for packets.
    pub(super) fn wake_up(&self) {
        if let Ok(shared) = &self.boards {
            shared.wake_up();
        }
    }

    /// Posts sends, and sends what has to go as packets, unless it may wait for more ([`gather`](super::gather)).
    pub(crate) fn post<T>(&self, post: impl FnOnce(&mut Core) -> T) -> T {
        let mut core = self.lock();
        (core.queued, core.urgent) = (false, !self.progress.is_napping());
        let done = post(&mut core);
        core.wake_for_messages();
        if core.queued && core.urgent {
            self.flush(&mut core);
        } else {
            core.settle();
            if core.gather.waits() {
                // Another thread that yields counts as present for long; the one that posts may not poll.
                self.progress.note_program_turn(core.now, true);
            }
            if core.endpoint.awaits_verdicts() && !self.progress.is_napping() {
                self.progress.note_deadline(core.deadline());
            }
            self.pass_on(&mut core);
        }
        done
    }
}

impl Core {
    /// Posts one work request, which may be done when this returns.
    #[inline]
    pub(crate) fn post_send(&mut self, qpn: Qpn, wr: SendWr) -> Result<(), VerbsError> {
        let bytes: u64 = wr.sges.iter().map(|sge| u64::from(sge.len)).sum();
        let posted = match &mut self.neighbours {
            Ok(neighbours) => self.endpoint.post_send_direct(self.now, qpn, wr, neighbours)?,
            Err(_) => {
                self.endpoint.post_send(self.now, qpn, wr)?;
                Posted::Queued
            }
        };
        if posted == Posted::Held {
            self.hold(qpn);
        }
        if matches!(posted, Posted::Queued | Posted::Held) {
            self.gather_posted(qpn, bytes);
        }
        Ok(())
    }

    /// A request of so many bytes was posted that needs packets. It is sent at once unless it may wait for others.
    /// Kept out of the path of those that need none.
    #[inline(never)]
    fn gather_posted(&mut self, qpn: Qpn, bytes: u64) {
        let under_way = self.endpoint.sends_under_way(qpn);
        let neighbours = self.neighbours.as_ref();
        let is_near = neighbours.is_ok_and(|neighbours| neighbours.route_of(qpn).is_some());
        let waits = if is_near {
            self.gather.post_near(self.now, under_way, bytes)
        } else {
            self.gather.post(self.now, under_way, bytes)
        };
        self.queued = true;
        self.urgent |= !waits;
    }

    /// Binds a window of type 1 behind the sends before it, which may wait, and returns its new key.
    pub(crate) fn bind_window(
        &mut self,
        qpn: Qpn,
        wr_id: u64,
        binding: WindowBinding,
        signaled: bool,
    ) -> Result<u32, VerbsError> {
        let bound = self.endpoint.bind_window(self.now, qpn, wr_id, binding, signaled);
        if self.endpoint.has_held(qpn) {
            self.hold(qpn);
        }
        bound
    }

    /// Requests of a queue pair wait to be carried out by turns.
    fn hold(&mut self, qpn: Qpn) {
        self.holding.insert(qpn.get());
        self.held = true;
        self.is_unseen = true;
    }

    /// Wakes neighbours for messages that were handed over.
    pub(super) fn wake_for_messages(&mut self) {
        if let (Ok(neighbours), Some(wire)) = (&mut self.neighbours, &mut self.wire) {
            neighbours.wake_for_messages(&self.endpoint, wire);
        }
    }

    /// Takes messages of neighbours and their verdicts; returns whether there were any.
    pub(super) fn exchange_messages(&mut self) -> bool {
        let Core { endpoint, memory, wire: Some(wire), neighbours: Ok(neighbours), now, .. } = self
        else {
            return false;
        };
        neighbours.exchange_messages(endpoint, memory, wire, *now) > 0
    }

    /// The same for a poll: looks for messages at its pace.
    pub(super) fn exchange_at_pace(&mut self) -> bool {
        let Core {
            endpoint, memory, wire: Some(wire), neighbours: Ok(neighbours), now, pace, ..
        } = self
        else {
            return false;
        };
        let verdicts = neighbours.exchange_verdicts(endpoint, *now);
        if !pace.looks(*now) {
            return verdicts > 0;
        }
        let messages = neighbours.exchange_incoming(endpoint, memory, wire, *now);
        if messages > 0 {
            pace.took(*now);
        }
        verdicts + messages > 0
    }

    /// Carries out requests that have waited for packets: bytes of one long request in all, because the engine is
    /// locked meanwhile. Returns whether some of them became packets, or may have.
    pub(super) fn carry_out_held(&mut self) -> bool {
        self.is_unseen = false;
        let first = self.behind.take().map_or(0, |last| last + 1);
        let Core { endpoint, neighbours: Ok(neighbours), holding, behind, now, .. } = self else {
            return false;
        };
        let (before, mut budget) = (holding.len(), MAX_DIRECT_BYTES);
        // Those behind the one that was cut short the last time come first.
        for is_second_round in [false, true] {
            holding.retain(|&qpn| {
                if (qpn < first) != is_second_round {
                    return true;
                }
                let qp = Qpn::new(qpn);
                let backlog = endpoint.carry_out_held(*now, qp, neighbours, &mut budget);
                if backlog == Backlog::Ready {
                    behind.get_or_insert(qpn);
                }
                backlog != Backlog::Empty
            });
        }
        let is_less = holding.len() < before;
        // Also where others still wait: for room that the reader, which may sleep, has to make.
        self.wake_for_messages();
        is_less
    }

    /// A queue pair was modified; `met` is what became of its peer, if it was just connected.
    pub(crate) fn follow_qp(&mut self, qpn: Qpn, met: Option<Result<Arc<Target>, String>>) {
        if self.endpoint.qp_state(qpn) == Some(QpState::Reset) {
            return self.forget_qp(qpn);
        }
        let Ok(neighbours) = &mut self.neighbours else {
            return;
        };
        match met {
            Some(Ok(target)) => {
                self.by_packets.remove(&qpn.get());
                neighbours.route(qpn, Some(target));
            }
            Some(Err(why)) => {
                self.by_packets.insert(qpn.get(), why);
                neighbours.route(qpn, None);
            }
            None => {}
        }
        self.publish_qp(qpn);
        // A queue pair that was drained goes on with what waits.
        if self.endpoint.has_held(qpn) {
            self.hold(qpn);
        }
    }

    /// A queue pair is gone, or not connected any more.
    pub(crate) fn forget_qp(&mut self, qpn: Qpn) {
        self.by_packets.remove(&qpn.get());
        if let Ok(neighbours) = &mut self.neighbours {
            neighbours.route(qpn, None);
            neighbours.withdraw_qp(qpn);
        }
    }

    /// Publishes what a queue pair serves now, which changes with its state and, in RTR, with its first packet.
    pub(super) fn publish_qp(&self, qpn: Qpn) {
        let Core { endpoint, wire: Some(wire), neighbours: Ok(neighbours), .. } = self else {
            return;
        };
        let address = |index: u8| wire.addresses().get(usize::from(index)).copied();
        match endpoint.qp_card(qpn, address) {
            Some(card) => neighbours.publish_qp(&card),
            None => neighbours.withdraw_qp(qpn),
        }
    }

    /// Withdraws queue pairs that have failed since the last call.
    pub(super) fn withdraw_failed(&mut self) {
        let failed = self.endpoint.counters().qp_errors;
        if failed == std::mem::replace(&mut self.failed_before, failed) {
            return;
        }
        for &qpn in self.qps.keys() {
            self.publish_qp(Qpn::new(qpn));
        }
    }

    /// The progress thread is going to sleep; returns false if neighbours have sent packets already.
    pub(super) fn fall_asleep(&mut self) -> bool {
        self.neighbours.as_mut().map_or(true, Neighbours::fall_asleep)
    }

    /// Whether neighbours send to this process through FIFOs.
    pub(super) fn reads_fifos(&self) -> bool {
        self.neighbours.as_ref().is_ok_and(Neighbours::reads_fifos)
    }

    /// Whether neighbours have to wake the progress thread for what they leave.
    pub(super) fn is_asleep(&self) -> bool {
        self.neighbours.as_ref().is_ok_and(Neighbours::is_asleep)
    }

    /// Whether neighbours have left something unannounced, or requests wait that could be carried out, or that no turn has looked at.
    pub(super) fn has_work(&mut self) -> bool {
        self.is_unseen
            || self.behind.is_some()
            || self.neighbours.as_mut().is_ok_and(Neighbours::has_unannounced)
    }

    /// Work has waited for the end of a sleep of the progress thread. The first time it is reported.
    pub(super) fn note_rescue(&mut self) {
        if self.rescued_wakeups == 0 {
            say(format_args!("{RESCUED}"), None);
        }
        self.rescued_wakeups += 1;
    }

    /// The counters of packets to and from neighbours.
    pub(crate) fn fifo_counters(&self) -> Option<&FifoCounters> {
        self.neighbours.as_ref().ok().map(Neighbours::counters)
    }

    /// A region is registered: neighbours with a right may use it.
    pub(crate) fn publish_region(&self, card: &RegionCard) {
        if let Ok(neighbours) = &self.neighbours
            && card.access.is_remote()
        {
            neighbours.publish_region(card);
        }
    }

    pub(crate) fn withdraw_region(&self, rkey: u32) {
        if let Ok(neighbours) = &self.neighbours {
            neighbours.withdraw_region(rkey);
        }
    }

    /// The path of a queue pair, in words.
    pub(crate) fn path_of(&self, qpn: Qpn, service: Transport) -> String {
        let by_packets = |why: &str| format!("packets: {why}");
        let neighbours = match &self.neighbours {
            Ok(neighbours) => neighbours,
            Err(why) => return by_packets(why),
        };
        let Some(target) = neighbours.route_of(qpn) else {
            let why = self.by_packets.get(&qpn.get());
            return by_packets(why.map_or("not connected", String::as_str));
        };
        let why_not = target.why_not().or((service != Transport::Rc).then_some("unreliable"));
        match why_not {
            None => "direct".to_owned(),
            Some(why) if target.has_fifo() => format!("packets in shared memory: {why}"),
            Some(why) => by_packets(why),
        }
    }
}
