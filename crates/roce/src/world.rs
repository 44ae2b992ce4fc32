//! The one loop that joins an endpoint to its [`Wire`] and its [`Memory`].
//!
//! [`turn`] is the only code that uses both (C1): real drivers and simulated ones call it, so even
//! the order of calls is shared.

use core::net::IpAddr;

use arrayvec::ArrayVec;

use crate::direct::MessageHeader;
use crate::endpoint::{Delivery, Endpoint, Insert, Output, Placement};
use crate::time::{Time, earlier};
use crate::verbs::{MULTICAST_QPN, Qpn, Transport};

pub use crate::io::{
    AtomicOp, BURST_PACKETS, Memory, MemoryKind, NoMemory, Origin, Payload, RxFrame, Staging,
    Telemetry, TxFrame, Wire,
};
pub use crate::verbs::{Ecn, Path};
pub use crate::wire::MAX_HEADER_BYTES;

/// What one [`turn`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Packets received.
    pub received: usize,
    /// Packets sent.
    pub sent: usize,
    /// The program reports that it did something.
    pub worked: bool,
}

impl Progress {
    /// Whether there was nothing to do.
    pub const fn is_idle(self) -> bool {
        self.received == 0 && self.sent == 0 && !self.worked
    }
}

/// Most packets that one [`turn`] sends: a long message must not starve receiving.
const MAX_SENT: usize = 2 * BURST_PACKETS;

/// Receives once, handles expired timers, lets the program `work`, and sends what is pending, up to
/// a bound. `work` returns whether it did anything.
///
/// Call it again at once while it reports progress; otherwise when the wire has packets, when
/// [`next_wakeup`] is due, or when work was posted.
pub fn turn<W: Wire, M: Memory>(
    endpoint: &mut Endpoint,
    wire: &mut W,
    memory: &mut M,
    now: Time,
    work: impl FnOnce(&mut Endpoint, &mut M) -> bool,
) -> Progress {
    let received = receive(endpoint, wire, memory, now);
    let worked = work(endpoint, memory);
    let sent = send(endpoint, wire, memory, now);
    Progress { received, sent, worked }
}

/// The first part of a [`turn`]: receives once and handles expired timers, and returns how many
/// packets. For an application that needs the wire itself between this and [`send`].
pub fn receive<W: Wire, M: Memory>(
    endpoint: &mut Endpoint,
    wire: &mut W,
    memory: &mut M,
    now: Time,
) -> usize {
    let received = wire.receive(now, &mut |frame| accept(endpoint, memory, now, frame));
    endpoint.handle_timeout_unless(now, &mut |path, dest| wire.is_stalled(path, dest));
    received
}

/// The last part of a [`turn`]: sends what is pending, up to a bound, and returns how many packets.
/// For a thread that has just posted something and does not want to wait for anything.
pub fn send<W: Wire, M: Memory>(
    endpoint: &mut Endpoint,
    wire: &mut W,
    memory: &M,
    now: Time,
) -> usize {
    // What arrived may have made room sooner than the wire said.
    if endpoint.parked_until().is_some() && wire.next_wakeup().is_some_and(|at| at <= now) {
        endpoint.readmit(now);
    }
    endpoint.unpark(now);
    if endpoint.is_quiet() {
        return 0;
    }
    let has_gathered = endpoint.outbox.len() > 0;
    let mut sent = if has_gathered { send_gathered(endpoint, wire, memory, now) } else { 0 };
    while sent < MAX_SENT {
        let burst = send_burst(endpoint, wire, memory, now);
        sent += burst;
        if burst < BURST_PACKETS {
            break;
        }
    }
    endpoint.park_until(now, wire.next_wakeup());
    sent
}

/// When to call [`turn`] next if nothing else happens.
pub fn next_wakeup(endpoint: &Endpoint) -> Option<Time> {
    let others = [endpoint.parked_until(), endpoint.message_acks_due()];
    others.into_iter().fold(endpoint.next_deadline(), earlier)
}

/// A message that a local peer hands over, from the process with this address. Returns whether it
/// was taken.
pub fn take_message<M: Memory>(
    endpoint: &mut Endpoint,
    memory: &mut M,
    now: Time,
    from: IpAddr,
    (header, payload): (&MessageHeader, &[u8]),
) -> bool {
    let mut delivery = Delivery::default();
    let is_taken = header.len as usize == payload.len()
        && endpoint.handle_message(&mut delivery, now, from, header);
    if is_taken {
        place(memory, &delivery.pieces, &[], payload);
    }
    is_taken
}

fn accept<M: Memory>(endpoint: &mut Endpoint, memory: &mut M, now: Time, frame: &RxFrame<'_>) {
    let dest_qp = frame.headers.bth().dest_qp;
    let group = frame.origin.dest;
    if dest_qp != MULTICAST_QPN {
        return accept_for(dest_qp, endpoint, memory, now, frame);
    }
    let mut next = endpoint.next_of_group(group, None);
    if next.is_none() {
        // The endpoint counts it as a packet for an unknown queue pair.
        accept_for(dest_qp, endpoint, memory, now, frame);
    }
    while let Some(qpn) = next {
        accept_for(qpn, endpoint, memory, now, frame);
        next = endpoint.next_of_group(group, next);
    }
}

fn accept_for<M: Memory>(
    qpn: Qpn,
    endpoint: &mut Endpoint,
    memory: &mut M,
    now: Time,
    frame: &RxFrame<'_>,
) {
    let len = frame.payload.len();
    let mut delivery = Delivery::default();
    if let Some(report) = frame.telemetry {
        let operation = frame.headers.bth().opcode.operation();
        endpoint.handle_telemetry(qpn, now, &frame.origin, operation, report);
    }
    endpoint.handle_packet_into(&mut delivery, qpn, now, &frame.origin, &frame.headers, len);
    if delivery.owed_packets > 0 {
        gather_answers(endpoint, memory, now, qpn, delivery.owed_packets as usize);
        delivery = endpoint.handle_held(qpn, now, &frame.headers, len);
    }
    match delivery.insert {
        Insert::None => place(memory, &delivery.pieces, &[], frame.payload),
        Insert::Value(value) => {
            place(memory, &delivery.pieces, &value.to_ne_bytes(), frame.payload);
        }
        Insert::RouteHeader(grh) => place(memory, &delivery.pieces, &grh, frame.payload),
        Insert::Atomic(job) => {
            let original = memory.atomic(job.addr, job.op);
            endpoint.complete_atomic(now, &job, original);
        }
    }
}

/// Reads the bytes for the peer's READs, before a request behind them changes these.
fn gather_answers<M: Memory>(
    endpoint: &mut Endpoint,
    memory: &M,
    now: Time,
    qpn: Qpn,
    owed: usize,
) {
    let mut outbox = core::mem::take(&mut endpoint.outbox);
    if outbox.has_room(qpn, owed) {
        let answers = core::iter::from_fn(|| endpoint.poll_response(qpn, now));
        answers.take(owed).for_each(|answer| outbox.push(qpn, answer, memory));
    }
    endpoint.outbox = outbox;
}

/// Fills `pieces` with the bytes of `first`, then those of `then`, until they are full or the bytes
/// run out.
fn place<M: Memory>(memory: &mut M, pieces: &[Placement], first: &[u8], then: &[u8]) {
    let mut sources = [first, then];
    for piece in pieces {
        let (mut addr, mut left) = (piece.addr, piece.len as usize);
        for source in &mut sources {
            let (bytes, later) = source.split_at(left.min(source.len()));
            if !bytes.is_empty() && !piece.is_skipped() {
                memory.scatter(addr, bytes);
            }
            (addr, left) = (addr.wrapping_add(bytes.len() as u64), left - bytes.len());
            *source = later;
        }
    }
}

/// Sends gathered READ responses, as far as their destinations admit them. Their frames are not on
/// the stack of other turns.
#[inline(never)]
fn send_gathered<W: Wire, M: Memory>(
    endpoint: &mut Endpoint,
    wire: &mut W,
    memory: &M,
    now: Time,
) -> usize {
    let mut sent = 0;
    while sent < MAX_SENT && endpoint.outbox.len() > 0 {
        let chosen = endpoint
            .outbox
            .choose(&mut |path, dest| wire.admits(now, path, dest, Transport::Rc, 1) > 0);
        if chosen == 0 {
            break;
        }
        wire.send(now, &endpoint.outbox.frames(), memory);
        endpoint.outbox.remove_chosen();
        sent += chosen;
    }
    sent
}

/// Sends up to [`BURST_PACKETS`] packets and returns how many. Their frames are not on the stack of
/// turns that send none.
#[inline(never)]
fn send_burst<W: Wire, M: Memory>(
    endpoint: &mut Endpoint,
    wire: &mut W,
    memory: &M,
    now: Time,
) -> usize {
    let mut frames = ArrayVec::<TxFrame<'_>, BURST_PACKETS>::new();
    let mut admits =
        |path: &Path, dest, service, packets| wire.admits(now, path, dest, service, packets);
    let mut output = Output::default();
    while !frames.is_full() && endpoint.poll_admitted(now, &mut admits, &mut output) {
        frames.extend(output.frame());
    }
    let sent = frames.len();
    if sent > 0 {
        wire.send(now, &frames, memory);
    }
    endpoint.end_grant();
    sent
}
