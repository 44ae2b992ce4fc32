//! Tools of an attacker on the network: handmade packets, and a RoCE endpoint that sends anything.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};

use engine::proto::QueuePair;
use nic::clock;
use nic::pool::{Pool, PoolRange};
use nic::udp::{UdpConfig, UdpWire};
use roce::device;
use roce::endpoint::{Connect, Endpoint, EndpointConfig, Mtu, QpConfig};
use roce::verbs::{
    Access, Completion, CqId, MemoryRegion, Qpn, RecvWr, SendOp, SendWr, SgList, Sge, WcStatus,
};
use roce::wire::icrc::{self, Pseudo};
use roce::wire::{Bth, DEFAULT_PKEY, Ext, Headers, ICRC_BYTES, Opcode, Psn, ROCE_PORT};
use roce::world::{self, Path, Staging};

use super::harness::eventually;

/// Requests that the endpoint has room for.
const WORK: u32 = 16;

/// Bytes of a message.
const MESSAGE_BYTES: usize = 64;

/// Sends datagrams from one address to one RoCE port.
pub(crate) struct Attacker {
    socket: UdpSocket,
    from: SocketAddrV4,
    to: SocketAddrV4,
}

/// A request packet that a queue pair would accept as its peer's.
pub(crate) fn request(opcode: Opcode, to: Qpn, psn: u32) -> Bth {
    Bth {
        opcode,
        solicited: false,
        mig_req: true,
        pad: 0,
        pkey: DEFAULT_PKEY,
        fecn: false,
        becn: false,
        dest_qp: to,
        ack_req: true,
        psn: Psn::new(psn),
    }
}

fn v4(address: SocketAddr) -> SocketAddrV4 {
    match address {
        SocketAddr::V4(address) => address,
        SocketAddr::V6(address) => panic!("{address} is not of this test"),
    }
}

impl Attacker {
    /// At `ip`, on a port of its own.
    pub(crate) fn new(ip: Ipv4Addr, to: SocketAddr) -> Attacker {
        let socket = UdpSocket::bind((ip, 0)).expect("loopback addresses can be used");
        let from = v4(socket.local_addr().expect("it is bound"));
        Attacker { socket, from, to: v4(to) }
    }

    /// Any bytes.
    pub(crate) fn raw(&self, bytes: &[u8]) {
        self.socket.send_to(bytes, self.to).expect("loopback takes it");
    }

    /// Bytes followed by their correct ICRC.
    pub(crate) fn sealed(&self, bytes: &[u8]) {
        let mut packet = [bytes, &[0; ICRC_BYTES]].concat();
        let pseudo = Pseudo::V4 {
            src: *self.from.ip(),
            dst: *self.to.ip(),
            id: 0,
            dont_fragment: true,
            src_port: self.from.port(),
            dst_port: self.to.port(),
        };
        let sum = icrc::compute(&pseudo, &packet).expect("long enough for a BTH");
        packet[bytes.len()..].copy_from_slice(&sum);
        self.raw(&packet);
    }

    /// A well-formed packet.
    pub(crate) fn packet(&self, bth: Bth, ext: Ext, payload: &[u8]) {
        let headers = Headers::new(bth, ext).expect("headers that belong together");
        self.sealed(&[headers.emit().as_slice(), payload].concat());
    }
}

/// Random bytes that are the same in every run.
pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        self.0 >> 20
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
}

/// An endpoint with one queue pair, driven by the test.
pub(crate) struct Rogue {
    endpoint: Endpoint,
    wire: UdpWire,
    pool: Pool,
    range: PoolRange,
    region: MemoryRegion,
    send_cq: CqId,
    recv_cq: CqId,
    qpn: Qpn,
}

impl Rogue {
    /// On the RoCE port of `ip`.
    pub(crate) fn new(ip: Ipv4Addr) -> Rogue {
        let address = SocketAddr::from((ip, ROCE_PORT));
        let wire = UdpWire::bind(&UdpConfig::at(address)).expect("the address is free");
        let mut pool = Pool::new(4 << 20).expect("memory");
        let range = pool.alloc(2 << 20, 4096).expect("memory");
        let mut endpoint = Endpoint::new(EndpointConfig { seed: 99, ..EndpointConfig::default() });
        let pd = endpoint.alloc_pd();
        let region = endpoint.register(pd, range.addr, range.len, Access::REMOTE_WRITE);
        let cq = |endpoint: &mut Endpoint| endpoint.create_cq(4 * WORK).expect("room");
        let (send_cq, recv_cq) = (cq(&mut endpoint), cq(&mut endpoint));
        let work = QpConfig { recv_cq, ..QpConfig::rc(pd, send_cq, WORK, WORK) };
        let qpn = endpoint.create_qp(work).expect("room");
        let region = region.expect("room");
        Rogue { endpoint, wire, pool, range, region, send_cq, recv_cq, qpn }
    }

    /// Its queue pair as a message of the control plane.
    pub(crate) fn queue_pair(&self) -> QueuePair {
        QueuePair {
            address: self.wire.local().to_string(),
            qpn: self.qpn.get(),
            psn: self.endpoint.query_qp(self.qpn).expect("it exists").sq_psn.get(),
            mtu: 4096,
            selective_repeat: false,
        }
    }

    /// Where its peer may write, and with which key.
    pub(crate) fn memory(&self) -> (u64, u32) {
        (self.range.addr + (1 << 20), self.region.rkey)
    }

    pub(crate) fn connect(&mut self, peer: &QueuePair) {
        for slot in 0..WORK / 2 {
            self.post_receive(slot);
        }
        let remote = peer.address.parse().expect("an address");
        let path = Path::new(remote);
        let to = Connect::new(path, Qpn::new(peer.qpn), Psn::new(peer.psn));
        let local_psn = self.endpoint.query_qp(self.qpn).expect("it exists").sq_psn;
        let to = Connect { mtu: Mtu::M4096, timeout: 13, local_psn, ..to };
        device::connect(&mut self.endpoint, clock::now(), self.qpn, &to).expect("it is new");
    }

    fn sge(&self, place: u64, len: u32) -> SgList {
        SgList::from_iter([Sge { addr: self.range.addr + place, len, lkey: self.region.lkey }])
    }

    fn post_receive(&mut self, slot: u32) {
        let place = 4096 + u64::from(slot) * MESSAGE_BYTES as u64;
        let receive = RecvWr { wr_id: place, sges: self.sge(place, MESSAGE_BYTES as u32) };
        self.endpoint.post_recv(clock::now(), self.qpn, receive).expect("room");
    }

    /// Sends a message, or writes it to an address, and waits for its completion.
    pub(crate) fn post(&mut self, op: SendOp, bytes: &[u8]) -> Completion {
        self.pool.bytes_mut(self.range.addr, bytes.len()).copy_from_slice(bytes);
        let sges = self.sge(0, bytes.len() as u32);
        let wr =
            SendWr { wr_id: 1, op, sges, signaled: true, solicited: false, ..SendWr::default() };
        self.endpoint.post_send(clock::now(), self.qpn, wr).expect("room");
        eventually("the end of a work request", || {
            self.move_packets();
            self.endpoint.poll_cq(self.send_cq)
        })
    }

    /// Waits for a message of the peer.
    pub(crate) fn receive(&mut self) -> Vec<u8> {
        let done = eventually("a message", || {
            self.move_packets();
            self.endpoint.poll_cq(self.recv_cq)
        });
        assert_eq!(done.status, WcStatus::Success);
        let addr = self.range.addr + done.wr_id;
        let bytes = self.pool.bytes(addr, done.byte_len as usize).to_vec();
        self.post_receive(((done.wr_id - 4096) / MESSAGE_BYTES as u64) as u32);
        bytes
    }

    /// Sends and receives what is pending.
    pub(crate) fn move_packets(&mut self) {
        let now = clock::now();
        while {
            let (endpoint, wire, pool) = (&mut self.endpoint, &mut self.wire, &mut self.pool);
            let done = world::turn(endpoint, wire, pool, now, |_, _| false);
            done.received + done.sent > 0
        } {}
    }
}
