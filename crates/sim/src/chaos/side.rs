//! The state of a connection: for each side the posted requests, the expected messages, and the
//! progress. Plain records; the rules are in [`check`](super::check).

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use roce::Time;
use roce::endpoint::QpState;
use roce::verbs::{Access, CqId, Qpn, SgList, Sge, SrqId, WcOpcode, WcStatus, WindowId};
use roce::wire::Psn;
use roce::world::AtomicOp;

use super::scenario::Params;

/// A send that was posted and has not completed.
#[derive(Debug)]
pub(super) struct PostedSend {
    pub(super) wr_id: u64,
    pub(super) signaled: bool,
    pub(super) opcode: WcOpcode,
    /// Its expected status, if the connection does not fail.
    pub(super) must: WcStatus,
    /// Its number among the messages that take a receive.
    pub(super) message: Option<u64>,
    /// Sources that change as soon as it completes.
    pub(super) volatile: SgList,
    pub(super) effect: Effect,
}

/// The expected effects of a send besides its message.
#[derive(Debug)]
pub(super) enum Effect {
    None,
    /// Bytes appear at `target` in the peer's window.
    Write {
        target: u64,
        bytes: Vec<u8>,
        held_by: Holder,
    },
    /// Bytes appear here.
    Read {
        landing: SgList,
        bytes: Vec<u8>,
        source: Option<(u64, u32)>,
        /// A SEND behind it uses these bytes as its source.
        lends_landing: bool,
    },
    /// The original value appears here.
    Atomic {
        landing: Sge,
        word: usize,
        op: AtomicOp,
    },
    /// Bytes appear in this memory window of the peer.
    Granted {
        window: usize,
        target: u64,
        bytes: Vec<u8>,
    },
    /// Bytes appear here, as they were before the request behind it changed them.
    Former {
        landing: SgList,
        bytes: Vec<u8>,
        /// READs that the peer had executed again by then.
        repeated: Option<u64>,
    },
    /// The same, for a word used by atomics.
    FormerWord {
        landing: Sge,
        word: usize,
        repeated: Option<u64>,
    },
    /// Binds an own window.
    Bind(usize),
    /// Unbinds an own window.
    Invalidate(usize),
}

/// The request that frees the target of a WRITE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holder {
    /// The WRITE itself.
    Own,
    /// A READ behind it, of the same bytes.
    Read,
    /// A WRITE behind it, to the same bytes: until that has completed, they may be of either.
    Write,
}

/// A receive that was posted and has not completed.
#[derive(Debug)]
pub(super) struct PostedReceive {
    pub(super) wr_id: u64,
    pub(super) sges: SgList,
    pub(super) capacity: u32,
}

/// A message in flight that this side is to receive.
#[derive(Debug)]
pub(super) struct Announced {
    pub(super) number: u64,
    pub(super) opcode: WcOpcode,
    pub(super) imm: Option<u32>,
    pub(super) solicited: bool,
    pub(super) bytes: Vec<u8>,
    /// How often it was received; more than once only where the transport allows duplicates.
    pub(super) heard: u32,
    /// The key that it invalidates.
    pub(super) invalidates: Option<u32>,
    /// Must not be received: it was sent with a wrong key.
    pub(super) is_secret: bool,
    /// For WRITE: where the bytes are. Otherwise they are in the receive.
    pub(super) target: Option<u64>,
}

/// A side, by pair and number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct At {
    pub(super) pair: usize,
    pub(super) side: usize,
}

impl At {
    /// The other side of the connection.
    pub(super) fn peer(self) -> At {
        At { side: 1 - self.side, ..self }
    }
}

/// The state of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Grant {
    /// Bound to nothing.
    Free,
    /// A binding is outstanding: address and length of the slot.
    Binding { addr: u64, len: u32 },
    /// The peer may write there; this many WRITEs are outstanding.
    Bound { addr: u64, len: u32, busy: u32 },
    /// Being invalidated.
    Closing { addr: u64, len: u32, busy: u32 },
}

/// A side's memory window.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    pub(super) id: WindowId,
    /// The key it has, had last, or is about to have.
    pub(super) rkey: u32,
    pub(super) grant: Grant,
    /// The peer's addresses start at the slot's first byte.
    pub(super) zero_based: bool,
    /// A key that was invalidated.
    pub(super) dead_rkey: Option<u32>,
    /// Bytes of the slot taken by WRITEs in flight, from its front.
    pub(super) taken: u32,
    /// The key was invalidated, and WRITEs through it are still to complete.
    pub(super) is_dead: bool,
}

/// Windows of a side.
pub(super) const WINDOWS: usize = 2;

impl Window {
    pub(super) fn new((id, rkey): (WindowId, u32)) -> Window {
        let (grant, zero_based, dead_rkey) = (Grant::Free, false, None);
        Window { id, rkey, grant, zero_based, dead_rkey, taken: 0, is_dead: false }
    }

    /// The slot it is bound to.
    pub(super) fn slot(&self) -> Option<(u64, u32)> {
        match self.grant {
            Grant::Free => None,
            Grant::Binding { addr, len }
            | Grant::Bound { addr, len, .. }
            | Grant::Closing { addr, len, .. } => Some((addr, len)),
        }
    }
}

/// One side of a connection: its queue pair and its program.
#[derive(Debug)]
pub(super) struct Side {
    pub(super) node: u32,
    pub(super) qpn: Qpn,
    pub(super) send_cq: CqId,
    pub(super) recv_cq: CqId,
    /// PSN of its first request.
    pub(super) first_psn: Psn,
    /// Receives come from the node's shared queue.
    pub(super) shares: bool,
    /// The peer's rights on the queue pair.
    pub(super) access: Access,
    /// READs and atomics that may be in flight.
    pub(super) max_rd_atomic: u8,
    /// Whether its program sleeps until it is notified, and is asleep now.
    pub(super) nap: Nap,
    /// In SQD.
    pub(super) drain: Option<Drain>,
    /// Reset, or about to be destroyed, with completions unpolled.
    pub(super) is_abandoned: bool,
    /// Requests wait for packets before them, and are then carried out without packets.
    pub(super) is_held: bool,
    /// Queue key, of datagrams.
    pub(super) qkey: u32,
    /// Sends posted since the connection was made.
    pub(super) posted: u64,
    pub(super) windows: [Window; WINDOWS],
    /// The transport reported that it takes no more shared receives.
    pub(super) last_wqe: bool,
    pub(super) sends: VecDeque<PostedSend>,
    pub(super) receives: VecDeque<PostedReceive>,
    /// Own receives posted since the connection was made.
    pub(super) receives_posted: u64,
    /// For each request posted for the peer: the receives of the peer that it and those before it
    /// take.
    pub(super) taken_after: Vec<u64>,
    pub(super) announced: VecDeque<Announced>,
    /// Messages expected by this side.
    pub(super) messages: u64,
    /// A message that is longer than its receive, by number.
    pub(super) fails_at: Option<u64>,
    /// Messages of this side that the peer must have received.
    pub(super) delivered: u64,
    /// Messages that this side has received.
    pub(super) received: u64,
    /// One more than the number of the message received last, of an unreliable transport.
    pub(super) heard_until: u64,
    pub(super) send_errors: u64,
    /// A send has failed with a status other than flushed.
    pub(super) send_ended: bool,
    pub(super) receive_errors: u64,
    /// The node restarted: the queue pair no longer exists.
    pub(super) is_dead: bool,
    /// Pause after a turn without work.
    pub(super) backoff_ns: u64,
}

impl Side {
    pub(super) fn new(
        node: u32,
        qpn: Qpn,
        [send_cq, recv_cq]: [CqId; 2],
        windows: [Window; WINDOWS],
    ) -> Side {
        Side {
            first_psn: Psn::new(0),
            shares: false,
            access: Access::ALL,
            max_rd_atomic: 0,
            nap: Nap::Never,
            drain: None,
            is_abandoned: false,
            is_held: false,
            qkey: 0,
            posted: 0,
            windows,
            last_wqe: false,
            node,
            qpn,
            send_cq,
            recv_cq,
            sends: VecDeque::new(),
            receives: VecDeque::new(),
            receives_posted: 0,
            taken_after: Vec::new(),
            announced: VecDeque::new(),
            messages: 0,
            fails_at: None,
            delivered: 0,
            received: 0,
            heard_until: 0,
            send_errors: 0,
            send_ended: false,
            receive_errors: 0,
            is_dead: false,
            backoff_ns: 0,
        }
    }
}

/// How a program waits for completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Nap {
    /// It polls continuously.
    Never,
    /// It has polled, and is about to arm its queues. A notification since then is read when it
    /// sleeps, like an event of a completion channel.
    Awake { notified: bool },
    /// It polls when it is notified.
    Asleep { notified: bool },
}

/// A stay in SQD.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Drain {
    /// The event has come.
    pub(super) is_drained: bool,
}

/// Whether a connection is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PairState {
    /// Both sides post work.
    Up,
    /// One side is in the error state, or gone; the other is to follow.
    Breaking,
    /// No queue pairs.
    Down,
}

/// Bytes that may or may not have arrived when the connection failed.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) node: u32,
    pub(super) addr: u64,
    pub(super) bytes: Vec<u8>,
    /// Any bytes are right: the result of an atomic, or the rest of messages that were never
    /// completed.
    pub(super) any: bool,
}

/// Two sides.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) params: Params,
    pub(super) nodes: [u32; 2],
    pub(super) sides: Option<[Side; 2]>,
    pub(super) state: PairState,
    /// Connections made before this one.
    pub(super) epoch: u32,
    /// Something happened for which the connection may fail.
    pub(super) is_excused: bool,
    /// Its programs are ending it.
    pub(super) is_retired: bool,
    pub(super) open: Vec<Open>,
    /// Slots to be freed when it is settled: node, address, length.
    pub(super) held: Vec<(u32, u64, u32)>,
}

impl Pair {
    pub(super) fn new(nodes: [u32; 2], params: Params) -> Pair {
        Pair {
            params,
            nodes,
            sides: None,
            state: PairState::Down,
            epoch: 0,
            is_excused: false,
            is_retired: false,
            open: Vec::new(),
            held: Vec::new(),
        }
    }

    pub(super) fn is_quiet(&self) -> bool {
        let is_reliable = self.params.is_reliable();
        let nothing =
            |side: &Side| side.sends.is_empty() && (side.announced.is_empty() || !is_reliable);
        match (self.state, &self.sides) {
            (PairState::Down, _) => true,
            (PairState::Up, Some(sides)) => sides.iter().all(nothing),
            _ => false,
        }
    }
}

/// The end of a failure.
#[derive(Clone, Copy, Debug)]
pub(super) enum Mend {
    /// A link goes up.
    Link(u32),
    /// A switch goes up.
    Switch(u32),
    /// A link has its rate again.
    Rate(u32),
    /// A node pauses its switch no longer.
    Storm(u32),
}

/// A scheduled action of a program.
#[derive(Clone, Copy, Debug)]
pub(super) enum Turn {
    /// Post some work.
    Act { at: At, epoch: u32 },
    /// Stop waiting for the transport to detect that the peer is gone.
    GiveUp { at: At, epoch: u32, patient: bool },
    /// Connect again.
    Connect { pair: usize },
    /// Arm the completion queues and sleep.
    Arm { at: At, epoch: u32 },
    /// Leave SQD once it has drained, or after this many more attempts.
    Resume { at: At, epoch: u32, patience: u32 },
    /// The next packet of a hostile peer.
    Attack { intruder: usize },
    /// Plug a cable in.
    PlugIn { node: u32 },
    /// End a failure of the network.
    Mend(Mend),
}

/// Receives that the queue pairs of a node share.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) srq: SrqId,
    /// Most receives posted.
    pub(super) depth: u32,
    /// Length of each.
    pub(super) len: u32,
    pub(super) receives: Vec<PostedReceive>,
}

/// Whether a queue pair has flushed its work requests in this state.
pub(super) fn has_failed(state: Option<QpState>) -> bool {
    matches!(state, Some(QpState::Error) | None)
}

/// When everything that was outstanding when the faults stopped has to be finished.
#[derive(Clone, Copy, Debug)]
pub(super) struct Healing {
    pub(super) since: Time,
    pub(super) bound_ns: u64,
}
