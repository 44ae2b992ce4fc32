//! What is behind the lock of a shared device: its turns, and whom they notify.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

use nic::clock;
use nic::device::DeviceWire;
use nic::local_peers::{FifoCounters, LocalPeers};
use roce::Time;
use roce::device::Device;
use roce::direct::{Posted, RegionDescriptor};
use roce::endpoint::{AsyncEvent, Endpoint, QpAttr};
use roce::verbs::{CqId, Qpn, SendWr, SrqId, Transport, VerbsError, WindowBinding};
use roce::world;
use rustix::io::Errno;

use super::gather::Gather;
use super::memory::ProcessMemory;
use super::polling::Polling;
use super::{Listener, Notice};
use crate::software::{LocalPath, LocalPeer, SoftwareDevice};

/// Polls in a row without a turn while nothing is there: such a poll is a look at the FIFOs, a
/// small part of what a turn and its look at the clock cost.
const SKIPPED_POLLS: u32 = 7;

/// The process exits: acknowledgements no longer wait.
pub(super) static EXITING: AtomicBool = AtomicBool::new(false);

/// The state behind the lock of a [`SharedDevice`](super::SharedDevice).
pub struct Core<L: Listener> {
    device: SoftwareDevice,
    /// `None` once the device is closed.
    wire: Option<DeviceWire>,
    memory: ProcessMemory,
    /// A request posted since the last look has to be sent.
    queued: bool,
    /// One of the requests posted since the last look must not wait for others.
    urgent: bool,
    /// A request posted since the last look waits for a turn.
    pub(super) held: bool,
    /// A turn took a local peer's ring from the sockets since the last look.
    pub(super) rung: bool,
    /// Wake-ups of threads that wait for completions, while the progress thread collects them: it
    /// wakes them when it has given the lock back, because they take it first.
    pub(super) signals: Option<Vec<L::Signal>>,
    /// Sleeps of the progress thread that ended by time with work that nobody had announced.
    rescued_wakeups: u64,
    on_rescue: fn(),
    pub(super) gather: Gather,
    /// No turn has come since a request began to wait.
    is_unseen: bool,
    /// Polls without a turn since the last one.
    skipped: u32,
    polling: Polling,
    /// The time of the last turn. Posts use it: they are timed when they are sent, and reading the
    /// clock would take a tenth of a post's time.
    pub(super) now: Time,
    qps: HashMap<u32, L>,
    cqs: HashMap<CqId, L>,
    srqs: HashMap<SrqId, L>,
}

/// What becomes of acknowledgements in a turn, if nothing else is to be sent.
#[derive(Clone, Copy, Debug)]
pub(super) enum Acks {
    /// They leave.
    Leave,
    /// They wait for a program that takes completions from this queue next.
    WaitForCompletions(CqId),
    /// Those for what arrives in this turn wait for the program's next call. It may be a reply: the
    /// program may poll memory.
    WaitForProgram,
}

impl<L: Listener> Core<L> {
    pub(super) fn new(device: SoftwareDevice, wire: DeviceWire, on_rescue: fn()) -> Core<L> {
        Core {
            device,
            wire: Some(wire),
            memory: ProcessMemory,
            queued: false,
            urgent: false,
            held: false,
            rung: false,
            signals: None,
            rescued_wakeups: 0,
            on_rescue,
            gather: Gather::new(),
            is_unseen: false,
            skipped: 0,
            polling: Polling::default(),
            now: clock::now(),
            qps: HashMap::new(),
            cqs: HashMap::new(),
            srqs: HashMap::new(),
        }
    }

    /// The endpoint, for verbs that change neither queue pairs nor regions.
    #[inline]
    pub fn endpoint(&self) -> &Endpoint {
        self.device.endpoint()
    }

    /// As [`endpoint`](Core::endpoint), for calls that change it.
    #[inline]
    pub fn endpoint_mut(&mut self) -> &mut Endpoint {
        self.device.endpoint_mut()
    }

    /// The device, for verbs that local peers notice.
    #[inline]
    pub fn device(&self) -> &SoftwareDevice {
        &self.device
    }

    /// The wire, while the device is open.
    ///
    /// # Errors
    /// `ENODEV` when it is closed.
    pub fn wire(&mut self) -> Result<&mut DeviceWire, Errno> {
        self.wire.as_mut().ok_or(Errno::NODEV)
    }

    /// The time of the last turn.
    #[inline]
    pub fn now(&self) -> Time {
        self.now
    }

    pub(super) fn close_wire(&mut self) -> Option<DeviceWire> {
        self.wire.take()
    }

    pub(super) fn close_local(&mut self) -> LocalPath {
        std::mem::replace(self.device.local_mut(), Err("the device is closed".to_owned()))
    }

    // ---- listeners -----------------------------------------------------------------------------

    /// Who is notified of a queue pair from now on.
    pub fn listen_qp(&mut self, qpn: Qpn, listener: L) {
        self.qps.insert(qpn.get(), listener);
    }

    /// Who is notified of a completion queue from now on.
    pub fn listen_cq(&mut self, cq: CqId, listener: L) {
        self.cqs.insert(cq, listener);
    }

    /// Who is notified of a shared receive queue from now on.
    pub fn listen_srq(&mut self, srq: SrqId, listener: L) {
        self.srqs.insert(srq, listener);
    }

    /// Nobody is notified of a queue pair any more.
    pub fn leave_qp(&mut self, qpn: Qpn) {
        self.qps.remove(&qpn.get());
    }

    /// Nobody is notified of a completion queue any more.
    pub fn leave_cq(&mut self, cq: CqId) {
        self.cqs.remove(&cq);
    }

    /// Nobody is notified of a shared receive queue any more.
    pub fn leave_srq(&mut self, srq: SrqId) {
        self.srqs.remove(&srq);
    }

    /// The completion queues and shared receive queues that have listeners.
    pub fn queues(&self) -> (usize, usize) {
        (self.cqs.len(), self.srqs.len())
    }

    pub(super) fn drop_signals(&mut self) {
        drop(self.signals.take());
    }

    // ---- turns ---------------------------------------------------------------------------------

    /// A turn at `now`, or at the time of the last one if that was later: a thread may have waited
    /// for the lock since it read the clock, and an endpoint's time never goes backwards.
    pub(super) fn turn(&mut self, now: Time, acks: Acks) -> world::Progress {
        self.now = self.now.max(now);
        let worked = match acks {
            Acks::WaitForCompletions(_) => self.exchange_at_interval(),
            Acks::Leave | Acks::WaitForProgram => self.exchange_messages(),
        };
        let mut progress = world::Progress { received: self.receive(), sent: 0, worked };
        if self.may_wait(acks, progress.received) && self.gather.acknowledge(self.now) {
            self.settle();
            return progress;
        }
        progress.sent = self.send();
        if self.device.has_holding() && self.carry_out_held() {
            progress.received += self.receive();
            progress.sent += self.send();
        }
        self.settle();
        progress
    }

    /// Whether acknowledgements are all that is to be sent, and may wait.
    fn may_wait(&self, acks: Acks, received: usize) -> bool {
        let endpoint = self.device.endpoint();
        let has_reason = match acks {
            Acks::Leave => false,
            Acks::WaitForCompletions(cq) => endpoint.has_completion(cq),
            Acks::WaitForProgram => received > 0 && !EXITING.load(Ordering::Relaxed),
        };
        has_reason
            && !endpoint.is_quiet()
            && endpoint.owes_only_acks()
            && !self.device.has_holding()
    }

    /// Whether messages may be there that the last poll has not looked for.
    pub fn rests(&self) -> bool {
        self.polling.rests()
    }

    /// A part of a turn without a look at the clock, at timers and at sockets: takes messages of
    /// local peers, and their acknowledgements. Returns false where a whole turn is due, or there
    /// are none.
    #[inline]
    pub fn turn_messages(&mut self) -> bool {
        let may = self.skipped < SKIPPED_POLLS && !self.device.has_holding();
        let done = may && self.device.endpoint().is_quiet() && self.exchange_at_interval();
        if done {
            self.skipped += 1;
            self.settle();
        }
        done
    }

    /// Whether a turn would find nothing, as far as one can see without reading the clock: packets
    /// of local peers would be there, and timers and sockets can wait for a few more polls.
    #[inline]
    pub fn may_skip_turn(&mut self) -> bool {
        let Ok(local) = self.device.local() else {
            return false;
        };
        let is_idle = self.skipped < SKIPPED_POLLS
            && local.reads_fifos()
            && !local.holds_packets()
            && self.device.endpoint().is_quiet()
            && !self.device.has_holding();
        self.skipped = if is_idle { self.skipped + 1 } else { 0 };
        is_idle
    }

    fn receive(&mut self) -> usize {
        let Core { device, wire: Some(wire), memory, now, rung, .. } = self else {
            return 0;
        };
        let rings = wire.counters().sharing.probes;
        let received = device.receive(wire, memory, *now);
        *rung |= wire.counters().sharing.probes != rings;
        received
    }

    pub(super) fn send(&mut self) -> usize {
        let Core { device, wire: Some(wire), memory, now, .. } = self else {
            return 0;
        };
        device.send(wire, memory, *now)
    }

    /// Takes messages of local peers and their acknowledgements of ours; returns whether there were
    /// any.
    fn exchange_messages(&mut self) -> bool {
        let Core { device, wire: Some(wire), memory, now, .. } = self else {
            return false;
        };
        device.exchange_messages(wire, memory, *now) > 0
    }

    /// The same for a poll: looks for messages at its interval.
    fn exchange_at_interval(&mut self) -> bool {
        let Core { device, wire: Some(wire), memory, now, polling, .. } = self else {
            return false;
        };
        let [acknowledged, messages] =
            device.exchange_some(wire, memory, *now, || polling.looks(*now));
        if messages > 0 {
            polling.took(*now);
        }
        acknowledged + messages > 0
    }

    /// Wakes local peers for messages that were handed over.
    #[inline]
    pub(super) fn wake_for_messages(&mut self) {
        if let Core { device, wire: Some(wire), .. } = self {
            device.wake_for_messages(wire);
        }
    }

    /// Carries out requests that have waited for packets. Returns whether some of them became
    /// packets, or may have.
    fn carry_out_held(&mut self) -> bool {
        self.is_unseen = false;
        let done = self.device.carry_out_held(self.now);
        // Also where others still wait: for room that the reader, which may sleep, has to make.
        self.wake_for_messages();
        done.has_packets
    }

    /// Delivers completion events and asynchronous events.
    pub fn settle(&mut self) {
        self.device.withdraw_failed();
        while let Some(id) = self.device.poll_notified() {
            if let Some(cq) = self.cqs.get(&id) {
                // Dropped at once where nobody collects them.
                let signal = cq.notify(Notice::Completed);
                if let Some(signals) = &mut self.signals {
                    signals.extend(signal);
                }
            }
        }
        while let Some(event) = self.device.poll_event() {
            if let Some(listener) = self.listener(event) {
                drop(listener.notify(Notice::Event(event)));
            }
        }
    }

    fn listener(&self, event: AsyncEvent) -> Option<L> {
        use AsyncEvent::*;
        let found = match event {
            QpFatal(qpn)
            | QpRequestError(qpn)
            | QpAccessError(qpn)
            | CommunicationEstablished(qpn)
            | SendQueueDrained(qpn)
            | LastWqeReached(qpn) => self.qps.get(&qpn.get()),
            SrqLimitReached(srq) => self.srqs.get(&srq),
            CqError(cq) => self.cqs.get(&cq),
        };
        found.copied()
    }

    pub(super) fn deadline(&self) -> Option<Time> {
        let behind = self.device.is_behind().then_some(self.now);
        behind.or_else(|| world::next_wakeup(self.device.endpoint()))
    }

    // ---- posts and verbs -----------------------------------------------------------------------

    /// A thread begins to post; where the progress thread sleeps, nobody else sends for it.
    pub(super) fn begin_post(&mut self, is_urgent: bool) {
        (self.queued, self.urgent) = (false, is_urgent);
    }

    /// Whether what was posted is to be sent now.
    pub(super) fn must_flush(&self) -> bool {
        self.queued && self.urgent
    }

    /// Posts one work request, which may be done when this returns.
    ///
    /// # Errors
    /// Those of [`Endpoint::post_send`].
    #[inline]
    pub fn post_send(&mut self, qpn: Qpn, wr: SendWr) -> Result<(), VerbsError> {
        let bytes: u64 = wr.sges.iter().map(|sge| u64::from(sge.len)).sum();
        let posted = self.device.post_send_direct(self.now, qpn, wr)?;
        if posted == Posted::Held {
            self.note_held();
        }
        if matches!(posted, Posted::Queued | Posted::Held) {
            self.gather_posted(qpn, bytes);
        }
        Ok(())
    }

    /// A request of so many bytes was posted that needs packets. It is sent at once unless it may
    /// wait for others. Kept out of the path of those that need none.
    #[inline(never)]
    fn gather_posted(&mut self, qpn: Qpn, bytes: u64) {
        let under_way = self.device.endpoint().sends_under_way(qpn);
        let waits = if self.device.is_local(qpn) {
            self.gather.post_near(self.now, under_way, bytes)
        } else {
            self.gather.post(self.now, under_way, bytes)
        };
        self.queued = true;
        self.urgent |= !waits;
    }

    /// Binds a window of type 1 behind the sends before it, which may wait, and returns its new
    /// key.
    ///
    /// # Errors
    /// Those of [`Endpoint::bind_window`].
    pub fn bind_window(
        &mut self,
        qpn: Qpn,
        wr_id: u64,
        binding: WindowBinding,
        signaled: bool,
    ) -> Result<u32, VerbsError> {
        let bound = self.device.bind_window(self.now, qpn, wr_id, binding, signaled);
        if self.device.endpoint().has_held(qpn) {
            self.note_held();
        }
        bound
    }

    /// Requests wait to be carried out by turns.
    fn note_held(&mut self) {
        self.held = true;
        self.is_unseen = true;
    }

    /// Modifies a queue pair; `peer` is what became of its peer, if it is connected by this.
    ///
    /// # Errors
    /// Those of [`Device::modify_qp`].
    pub fn modify_qp(
        &mut self,
        qpn: Qpn,
        attr: &QpAttr,
        peer: Option<LocalPeer>,
    ) -> Result<(), VerbsError> {
        let now = clock::now();
        self.device.modify_qp(now, qpn, attr)?;
        if let Some(peer) = peer {
            self.device.route(now, qpn, peer);
        }
        if self.device.endpoint().has_held(qpn) {
            self.note_held();
        }
        Ok(())
    }

    /// Removes a queue pair and its listener.
    pub fn destroy_qp(&mut self, qpn: Qpn) {
        // One that is gone needs no more.
        let _ = self.device.destroy_qp(clock::now(), qpn);
        self.leave_qp(qpn);
    }

    /// Local peers with a right may use this region.
    pub fn publish_region(&mut self, lkey: u32, descriptor: &RegionDescriptor) {
        self.device.publish_region(lkey, descriptor);
    }

    /// Local peers may no longer begin to use this region.
    pub fn withdraw_region(&mut self, lkey: u32) {
        self.device.withdraw_region(lkey);
    }

    /// The path of a queue pair, in words.
    pub fn path_of(&self, qpn: Qpn, service: Transport) -> String {
        self.device.path_of(qpn, service)
    }

    /// The counters of packets to and from local peers.
    pub fn fifo_counters(&self) -> Option<&FifoCounters> {
        self.device.fifo_counters()
    }

    // ---- the progress thread -------------------------------------------------------------------

    /// The progress thread is going to sleep; returns false if local peers have sent packets
    /// already.
    pub(super) fn fall_asleep(&mut self) -> bool {
        self.device.local_mut().as_mut().map_or(true, LocalPeers::fall_asleep)
    }

    /// Whether local peers send to this process through FIFOs.
    pub(super) fn reads_fifos(&self) -> bool {
        self.device.local().as_ref().is_ok_and(LocalPeers::reads_fifos)
    }

    /// Whether local peers have to wake the progress thread for what they leave.
    pub(super) fn is_asleep(&self) -> bool {
        self.device.local().as_ref().is_ok_and(LocalPeers::is_asleep)
    }

    /// Whether local peers have left something unannounced, or requests wait that could be carried
    /// out, or that no turn has looked at.
    pub(super) fn has_work(&mut self) -> bool {
        self.is_unseen
            || self.device.is_behind()
            || self.device.local_mut().as_mut().is_ok_and(LocalPeers::has_unannounced)
    }

    /// Work has waited for the end of a sleep of the progress thread. The first time it is
    /// reported.
    pub(super) fn note_rescue(&mut self) {
        if self.rescued_wakeups == 0 {
            (self.on_rescue)();
        }
        self.rescued_wakeups += 1;
    }

    /// Sleeps of the progress thread that ended by time with work that nobody had announced.
    pub fn rescued_wakeups(&self) -> u64 {
        self.rescued_wakeups
    }
}
