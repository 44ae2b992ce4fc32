//! Queue pairs to peers on a device, their memory, and numbered messages through them.
//!
//! A [`Link`] is one queue pair. It has a ring of buffers to send from and one to receive into;
//! message `n` uses buffer `n` modulo their number, so messages under way never share one. As many
//! receives are posted as a link has buffers to receive into: a peer may be that far ahead, and one
//! that is further ahead waits, since its queue pair is told that no receive is ready. The number
//! of a work request names its link and its buffer.
//!
//! Memory is not touched in here, and a mesh ends with its device. Where the peers are comes from
//! the [`bootstrap`](crate::bootstrap) or another exchange; connections are made by `adapter`,
//! which knows about congestion control and local peers. What messages hold and when they are due
//! belongs to the users.

use alloc::vec::Vec;

use arrayvec::ArrayVec;
use roce::Time;
use roce::device::{self, Device, InitialPsns, PostError};
use roce::endpoint::QpConfig;
use roce::verbs::{
    Access, Completion, CqId, MemoryRegion, PdId, Qpn, RecvWr, SendOp, SendWr, SgList, Sge,
    Transport, VerbsError, WcStatus,
};
use roce::wire::Psn;
use thiserror::Error;

/// Completions taken at once.
pub const BATCH: usize = 16;

/// Completions of one look.
pub type Completions = ArrayVec<Completion, BATCH>;

/// Bytes in front of a received datagram: its route header.
pub const ROUTE_HEADER: u32 = 40;

/// Buffers of one direction of a link, one behind the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ring {
    /// First byte of the first buffer, counted from the beginning of the mesh's memory.
    pub offset: u64,
    /// Bytes from one buffer to the next.
    pub stride: u64,
    /// How many there are.
    pub slots: u32,
    /// Longest message.
    pub bytes: u32,
}

impl Ring {
    /// The buffer of message `number`.
    pub fn slot(&self, number: u64) -> u32 {
        (number % u64::from(self.slots.max(1))) as u32
    }

    /// First byte of a buffer in memory that begins at `base`: ours, or that of a peer with the
    /// same layout. A peer may say any number, so this wraps.
    pub fn place(&self, base: u64, slot: u32) -> u64 {
        base.wrapping_add(self.offset + u64::from(slot) * self.stride)
    }
}

/// A queue pair that is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// The rank that it leads to.
    pub peer: u32,
    /// Transport service.
    pub transport: Transport,
    /// Most sends under way.
    pub sends: u32,
    /// Most receives posted.
    pub receives: u32,
    /// Buffers to send from.
    pub outbox: Ring,
    /// Buffers to receive into; in front of each is room for a route header if it receives
    /// datagrams.
    pub inbox: Ring,
}

/// A queue pair and its buffers.
#[derive(Clone, Copy, Debug)]
pub struct Link {
    /// As it was wanted.
    pub wanted: Wanted,
    /// The queue pair.
    pub qpn: Qpn,
    /// First packet sequence number that it sends.
    pub psn: Psn,
    /// Work requests posted to send, READ or change something.
    pub posted: u64,
    /// How many of these have completed.
    pub completed: u64,
    /// Messages that have arrived in receives.
    pub arrived: u64,
}

impl Link {
    /// Posted and not completed.
    pub fn under_way(&self) -> u64 {
        self.posted - self.completed
    }
}

/// What is wrong with a mesh. The texts are about the connection; callers name the rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum MeshError {
    /// A peer does not acknowledge: retries are exceeded.
    #[error("it does not acknowledge")]
    Silent {
        /// Its rank.
        peer: u32,
    },
    /// A message to or from a peer has failed.
    #[error("a message ended with {status:?}")]
    Failed {
        /// Its rank.
        peer: u32,
        /// How.
        status: WcStatus,
    },
    /// The device refuses a work request.
    #[error("cannot post a message: {source}")]
    NotPosted {
        /// The rank that it is for.
        peer: u32,
        /// Why.
        source: PostError,
    },
    /// The device refuses a receive.
    #[error("cannot post a receive: {source}")]
    NoReceive {
        /// The rank that it is for.
        peer: u32,
        /// Why.
        source: PostError,
    },
    /// The device does not tell what has completed.
    #[error(transparent)]
    NoCompletions(#[from] VerbsError),
    /// A completion of nothing that was posted.
    #[error("a completion of no request")]
    Unasked,
}

impl MeshError {
    /// The rank whose connection it is about, if it is about one.
    pub fn peer(&self) -> Option<u32> {
        match self {
            MeshError::Silent { peer }
            | MeshError::Failed { peer, .. }
            | MeshError::NotPosted { peer, .. }
            | MeshError::NoReceive { peer, .. } => Some(*peer),
            MeshError::NoCompletions(_) | MeshError::Unasked => None,
        }
    }
}

/// Which link, and which of its buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Index of the link.
    pub link: usize,
    /// The buffer.
    pub slot: u32,
}

impl Place {
    fn wr_id(self) -> u64 {
        (self.link as u64) << 32 | u64::from(self.slot)
    }

    fn of(done: &Completion) -> Place {
        Place { link: (done.wr_id >> 32) as usize, slot: done.wr_id as u32 }
    }
}

/// The links of a rank: their queue pairs complete into two queues, their buffers are in one
/// region.
#[derive(Debug)]
pub struct Mesh {
    /// Its protection domain.
    pub pd: PdId,
    /// The memory of all buffers.
    pub region: MemoryRegion,
    links: Vec<Link>,
    send_cq: CqId,
    recv_cq: CqId,
}

impl Mesh {
    /// Registers `(addr, len)` and creates the wanted queue pairs. Those of connections are in INIT
    /// afterwards, where receives can be posted; those of datagrams are in RESET.
    ///
    /// # Errors
    /// When the device refuses.
    pub fn open<D: Device>(
        device: &mut D,
        now: Time,
        (addr, len): (u64, u64),
        wanted: &[Wanted],
        seed: u64,
    ) -> Result<Mesh, VerbsError> {
        let pd = device.alloc_pd()?;
        let depth = wanted.iter().map(|one| one.sends + one.receives).sum::<u32>().max(1);
        let send_cq = device.create_cq(depth)?;
        let recv_cq = device.create_cq(depth)?;
        let region = device.register(pd, addr, len, Access::ALL)?;
        let mut psns = InitialPsns::new(seed);
        let mut links = Vec::with_capacity(wanted.len());
        for &wanted in wanted {
            let config = QpConfig {
                transport: wanted.transport,
                recv_cq,
                ..QpConfig::rc(pd, send_cq, wanted.sends, wanted.receives)
            };
            let qpn = device.create_qp(config)?;
            if wanted.transport != Transport::Ud {
                device::initialize(device, now, qpn)?;
            }
            let psn = psns.draw();
            links.push(Link { wanted, qpn, psn, posted: 0, completed: 0, arrived: 0 });
        }
        Ok(Mesh { pd, region, links, send_cq, recv_cq })
    }

    /// The links, in the order in which they were wanted.
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// First byte of a buffer to send from, or to receive into.
    pub fn buffer(&self, place: Place, is_in: bool) -> u64 {
        let wanted = &self.links[place.link].wanted;
        let ring = if is_in { &wanted.inbox } else { &wanted.outbox };
        ring.place(self.region.addr, place.slot)
    }

    /// The piece of memory at `addr` for a work request.
    pub fn piece(&self, addr: u64, len: u32) -> SgList {
        SgList::from_iter([Sge { addr, len, lkey: self.region.lkey }])
    }

    /// A work request that sends `bytes` of a buffer.
    pub fn send(&self, place: Place, bytes: u32) -> SendWr {
        self.request(place, SendOp::Send, self.piece(self.buffer(place, false), bytes))
    }

    /// Another work request of a buffer.
    pub fn request(&self, place: Place, op: SendOp, sges: SgList) -> SendWr {
        SendWr { wr_id: place.wr_id(), op, sges, signaled: true, ..SendWr::default() }
    }

    /// Posts work requests of one link, which must be made for it.
    ///
    /// # Errors
    /// When the device refuses.
    pub fn post<D: Device>(
        &mut self,
        device: &mut D,
        now: Time,
        link: usize,
        wrs: &[SendWr],
    ) -> Result<(), MeshError> {
        let link = &mut self.links[link];
        let posted = device.post_send(now, link.qpn, wrs);
        posted.map_err(|source| MeshError::NotPosted { peer: link.wanted.peer, source })?;
        link.posted += wrs.len() as u64;
        Ok(())
    }

    /// Posts the receive of a buffer: before the first message, and when its message was taken.
    ///
    /// # Errors
    /// When the device refuses.
    pub fn post_receive<D: Device>(
        &self,
        device: &mut D,
        now: Time,
        place: Place,
    ) -> Result<(), MeshError> {
        self.post_received(device, now, place.link, &[self.receive(place)])
    }

    /// Posts the receives of all buffers of a link.
    ///
    /// # Errors
    /// When the device refuses.
    pub fn post_receives<D: Device>(
        &self,
        device: &mut D,
        now: Time,
        link: usize,
    ) -> Result<(), MeshError> {
        let slots = 0..self.links[link].wanted.inbox.slots;
        let wrs: Vec<RecvWr> = slots.map(|slot| self.receive(Place { link, slot })).collect();
        self.post_received(device, now, link, &wrs)
    }

    fn post_received<D: Device>(
        &self,
        device: &mut D,
        now: Time,
        link: usize,
        wrs: &[RecvWr],
    ) -> Result<(), MeshError> {
        let Link { wanted: Wanted { peer, .. }, qpn, .. } = self.links[link];
        let posted = device.post_recv(now, qpn, wrs);
        posted.map_err(|source| MeshError::NoReceive { peer, source })
    }

    fn receive(&self, place: Place) -> RecvWr {
        let wanted = &self.links[place.link].wanted;
        let header = if wanted.transport == Transport::Ud { ROUTE_HEADER } else { 0 };
        let addr = self.buffer(place, true) - u64::from(header);
        RecvWr { wr_id: place.wr_id(), sges: self.piece(addr, wanted.inbox.bytes + header) }
    }

    /// Completions of what was posted, at most [`BATCH`]; each is for
    /// [`take_send`](Mesh::take_send).
    ///
    /// # Errors
    /// When the device does not tell.
    pub fn poll_sends<D: Device>(&self, device: &mut D) -> Result<Completions, MeshError> {
        poll(device, self.send_cq)
    }

    /// Messages that have arrived in receives, at most `N`; each is for
    /// [`take_message`](Mesh::take_message).
    ///
    /// # Errors
    /// When the device does not tell.
    pub fn poll_messages<const N: usize, D: Device>(
        &self,
        device: &mut D,
    ) -> Result<ArrayVec<Completion, N>, MeshError> {
        poll(device, self.recv_cq)
    }

    /// Counts what has completed, and says where.
    ///
    /// # Errors
    /// When it has failed.
    pub fn take_send(&mut self, done: &Completion) -> Result<Place, MeshError> {
        let (place, link) = self.checked(done)?;
        link.completed += 1;
        Ok(place)
    }

    /// Counts a message that has arrived, and says where it is.
    ///
    /// # Errors
    /// When its receive has failed.
    pub fn take_message(&mut self, done: &Completion) -> Result<Place, MeshError> {
        let (place, link) = self.checked(done)?;
        link.arrived += 1;
        Ok(place)
    }

    fn checked(&mut self, done: &Completion) -> Result<(Place, &mut Link), MeshError> {
        let place = Place::of(done);
        let link = self.links.get_mut(place.link).ok_or(MeshError::Unasked)?;
        let peer = link.wanted.peer;
        match done.status {
            WcStatus::Success => Ok((place, link)),
            WcStatus::RetryExceeded => Err(MeshError::Silent { peer }),
            status => Err(MeshError::Failed { peer, status }),
        }
    }
}

fn poll<const N: usize, D: Device>(
    device: &mut D,
    cq: CqId,
) -> Result<ArrayVec<Completion, N>, MeshError> {
    let mut done = ArrayVec::new();
    device.poll_cq(cq, &mut done)?;
    Ok(done)
}

#[cfg(test)]
mod tests {
    use core::net::SocketAddr;

    use roce::endpoint::{Endpoint, EndpointConfig, Placement, QpState};
    use roce::verbs::{Datagram, WcOpcode};
    use roce::world::{Origin, Path};

    use super::*;

    /// Two links, to the ranks 4 and 9.
    fn mesh() -> (Endpoint, Mesh) {
        mesh_of(Transport::Rc, 2)
    }

    fn mesh_of(transport: Transport, sends: u32) -> (Endpoint, Mesh) {
        let mut device = Endpoint::new(EndpointConfig { seed: 3, ..EndpointConfig::default() });
        let wanted = [4, 9].map(|peer| {
            let ring = |at: u64, slots| Ring { offset: at * 64, stride: 64, slots, bytes: 24 };
            let (outbox, inbox) = (ring(u64::from(peer), 1), ring(u64::from(peer) + 1, 2));
            Wanted { peer, transport, sends, receives: 2, outbox, inbox }
        });
        let mesh = Mesh::open(&mut device, Time::ZERO, (8192, 8192), &wanted, 7).unwrap();
        (device, mesh)
    }

    fn completion(place: Place, status: WcStatus) -> Completion {
        Completion {
            wr_id: place.wr_id(),
            status,
            opcode: WcOpcode::Recv,
            byte_len: 0,
            imm: None,
            invalidated: None,
            qpn: Qpn::new(0),
            src_qp: None,
            ipv4: false,
            solicited: false,
        }
    }

    #[test]
    fn messages_take_turns_in_the_buffers_of_a_ring() {
        let (_, mesh) = mesh();
        let inbox = mesh.links()[1].wanted.inbox;
        assert_eq!([0, 1, 2, 7].map(|number| inbox.slot(number)), [0, 1, 0, 1]);
        let at = |link, slot, is_in| mesh.buffer(Place { link, slot }, is_in) - 8192;
        assert_eq!([at(0, 0, false), at(0, 0, true), at(0, 1, true)], [256, 320, 384]);
        assert_eq!(inbox.place(u64::MAX, 0), 639, "a peer may say any address");
    }

    #[test]
    fn what_the_device_refuses_names_the_peer_and_counts_nothing() {
        let (mut device, mut mesh) = mesh();
        mesh.post_receives(&mut device, Time::ZERO, 1).unwrap();
        let place = Place { link: 1, slot: 0 };
        let full = mesh.post_receive(&mut device, Time::ZERO, place).unwrap_err();
        assert!(matches!(full, MeshError::NoReceive { peer: 9, .. }), "{full:?}");
        let wr = mesh.send(place, 24);
        let early = mesh.post(&mut device, Time::ZERO, 1, &[wr]).unwrap_err();
        assert!(matches!(early, MeshError::NotPosted { .. }) && early.peer() == Some(9));
        assert_eq!(mesh.links()[1].posted, 0);
    }

    #[test]
    fn completions_name_their_link_and_buffer_and_failures_the_peer() {
        let (_, mut mesh) = mesh();
        let place = Place { link: 1, slot: 1 };
        let good = completion(place, WcStatus::Success);
        assert_eq!(mesh.take_message(&good), Ok(place));
        assert_eq!(mesh.links().iter().map(|link| link.arrived).collect::<Vec<_>>(), [0, 1]);
        let silent = completion(place, WcStatus::RetryExceeded);
        assert_eq!(mesh.take_send(&silent), Err(MeshError::Silent { peer: 9 }));
        let flushed = mesh.take_message(&completion(place, WcStatus::WrFlushError));
        assert_eq!(flushed.unwrap_err().peer(), Some(9));
        let unasked = completion(Place { link: 2, slot: 0 }, WcStatus::Success);
        assert_eq!(mesh.take_send(&unasked), Err(MeshError::Unasked));
        assert_eq!((mesh.links()[1].completed, mesh.links()[1].arrived), (0, 1));
    }

    /// A mesh whose queue pairs are ready for datagrams, with all receives posted.
    fn datagrams(sends: u32) -> (Endpoint, Mesh) {
        let (mut device, mesh) = mesh_of(Transport::Ud, sends);
        for (link, &Link { qpn, psn, .. }) in mesh.links().iter().enumerate() {
            device::start_datagrams(&mut device, Time::ZERO, qpn, 5, psn).unwrap();
            mesh.post_receives(&mut device, Time::ZERO, link).unwrap();
        }
        (device, mesh)
    }

    /// Sends a datagram to the link's own queue pair, and returns where it is placed, if it is.
    fn send_to_itself(device: &mut Endpoint, mesh: &mut Mesh, link: usize) -> Option<Placement> {
        let own = SocketAddr::from(([10, 0, 0, 1], 4791));
        let to = Datagram { ah: Path::new(own).into(), dest_qp: mesh.links()[link].qpn, qkey: 5 };
        let wr = mesh.send(Place { link, slot: 0 }, 24);
        mesh.post(device, Time::ZERO, link, &[SendWr { to: Some(to), ..wr }]).unwrap();
        let packet = device.poll_transmit(Time::ZERO).unwrap();
        let (origin, bytes) = (Origin::new(own, own.ip()), packet.payload_len());
        let delivery = device.handle_packet(Time::ZERO, &origin, &packet.headers, bytes);
        assert!(delivery.pieces.len() <= 1, "{delivery:?}");
        delivery.pieces.first().copied()
    }

    #[test]
    fn only_the_queue_pairs_of_connections_are_initialized() {
        for (transport, state) in [(Transport::Rc, QpState::Init), (Transport::Ud, QpState::Reset)]
        {
            let (device, mesh) = mesh_of(transport, 2);
            let states = mesh.links().iter().map(|link| device.qp_state(link.qpn));
            assert_eq!(states.collect::<Vec<_>>(), [Some(state); 2]);
        }
    }

    #[test]
    fn datagrams_wait_behind_their_route_headers_in_all_receives_at_once() {
        let (mut device, mut mesh) = datagrams(1);
        let places = [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(link, slot)| Place { link, slot });
        for place in places {
            let addr = mesh.buffer(place, true) - u64::from(ROUTE_HEADER);
            let placed = send_to_itself(&mut device, &mut mesh, place.link);
            assert_eq!(placed, Some(Placement { addr, len: 24 + ROUTE_HEADER }));
            let done = mesh.poll_sends(&mut device).unwrap();
            assert_eq!(done.len(), 1, "the next send needs its place");
        }
        let done: Completions = mesh.poll_messages(&mut device).unwrap();
        let arrived: Vec<_> = done.iter().map(|one| mesh.take_message(one)).collect();
        assert_eq!(arrived, places.map(Ok));
    }

    #[test]
    fn all_sends_of_all_links_may_complete_before_a_look() {
        let (mut device, mut mesh) = datagrams(3);
        for link in [0, 0, 0, 1, 1, 1] {
            send_to_itself(&mut device, &mut mesh, link);
        }
        for done in &mesh.poll_sends(&mut device).unwrap() {
            mesh.take_send(done).unwrap();
        }
        let links = mesh.links().iter().map(|link| (link.completed, link.under_way()));
        assert_eq!(links.collect::<Vec<_>>(), [(3, 0); 2]);
    }
}
