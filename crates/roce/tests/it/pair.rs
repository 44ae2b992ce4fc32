//! Two connected queue pairs controlled by a test, and one whose peer is the test itself.
//!
//! [`Pair`] runs over the network: real packets, virtual time, the faults that the test sets, and a
//! trace of all sent packets. [`Lone`] passes single packets to its queue pair and checks each
//! response. Both are small on purpose: the subject of a test is in the test.

use roce::Time;
use roce::endpoint::{Connect, Counters, Delivery, Insert, Mtu, Placements, QpState};
use roce::verbs::{
    Access, Completion, MemoryRegion, Qpn, RecvWr, SendOp, SendWr, SgList, Sge, WcStatus,
};
use roce::wire::{Aeth, Bth, DEFAULT_PKEY, Ext, Headers, Opcode, Psn, Reth, Syndrome};
use roce::world::{Memory, Origin};

use crate::harness::{BASE, End, Network, NetworkConfig};

/// Completions, shortened: `wr_id` and status.
pub(crate) type Endings = Vec<(u64, WcStatus)>;

/// Two connected queue pairs, each with the first half of its node's memory registered.
pub(crate) struct Pair {
    pub(crate) network: Network,
    pub(crate) a: End,
    pub(crate) b: End,
    /// Regions of node 0 and node 1.
    pub(crate) regions: [MemoryRegion; 2],
}

pub(crate) const REGION_BYTES: u64 = 1 << 19;
/// An address in the other, unregistered half.
pub(crate) const WILD: u64 = BASE + REGION_BYTES + 4096;

impl Pair {
    pub(crate) fn new() -> Pair {
        Pair::with(|_| {})
    }

    pub(crate) fn with(adjust: impl Fn(&mut Connect)) -> Pair {
        Pair::build(&NetworkConfig::default(), adjust)
    }

    pub(crate) fn build(config: &NetworkConfig, adjust: impl Fn(&mut Connect)) -> Pair {
        let mut network = Network::new(config);
        network.record();
        let regions = [0, 1].map(|node: usize| {
            network.nodes[node].register(BASE, REGION_BYTES, Access::ALL).unwrap()
        });
        let (a, b) = network.pair(adjust);
        Pair { network, a, b, regions }
    }

    pub(crate) fn sge(&self, node: usize, offset: u64, len: u32) -> SgList {
        let lkey = self.regions[node].lkey;
        [Sge { addr: BASE + offset, len, lkey }].into_iter().collect()
    }

    /// A work request of node 0 on `len` bytes from `offset` of its region.
    pub(crate) fn wr(&self, wr_id: u64, op: SendOp, offset: u64, len: u32) -> SendWr {
        SendWr {
            wr_id,
            op,
            sges: self.sge(0, offset, len),
            signaled: true,
            solicited: false,
            ..SendWr::default()
        }
    }

    pub(crate) fn post(&mut self, wr: SendWr) {
        self.network.nodes[0].endpoint.post_send(Time::ZERO, self.a.qpn, wr).unwrap();
    }

    pub(crate) fn send(&mut self, wr_id: u64, len: u32) {
        let wr = self.wr(wr_id, SendOp::Send, 0, len);
        self.post(wr);
    }

    pub(crate) fn write(&mut self, wr_id: u64, offset: u64, len: u32) {
        let wr = self.wr(wr_id, self.write_op(offset), 0, len);
        self.post(wr);
    }

    pub(crate) fn read(&mut self, wr_id: u64, len: u32) {
        let wr = self.wr(wr_id, self.read_op(), 100_000, len);
        self.post(wr);
    }

    pub(crate) fn write_op(&self, offset: u64) -> SendOp {
        SendOp::Write { remote_addr: BASE + offset, rkey: self.regions[1].rkey }
    }

    pub(crate) fn read_op(&self) -> SendOp {
        SendOp::Read { remote_addr: BASE, rkey: self.regions[1].rkey }
    }

    pub(crate) fn receive(&mut self, wr_id: u64, len: u32) {
        let wr = RecvWr { wr_id, sges: self.sge(1, 200_000, len) };
        self.network.nodes[1].endpoint.post_recv(Time::ZERO, self.b.qpn, wr).unwrap();
    }

    /// Runs to the end and returns the completions of sender and receiver.
    pub(crate) fn run(&mut self) -> (Endings, Endings) {
        self.network.run(1_000_000);
        let brief = |all: Vec<Completion>| all.iter().map(|wc| (wc.wr_id, wc.status)).collect();
        (brief(self.network.sent_by(self.a)), brief(self.network.received_by(self.b)))
    }

    pub(crate) fn counters(&self, node: usize) -> &Counters {
        self.network.nodes[node].endpoint.counters()
    }

    pub(crate) fn state(&self, node: usize) -> QpState {
        let qpn = if node == 0 { self.a.qpn } else { self.b.qpn };
        self.network.nodes[node].endpoint.qp_state(qpn).unwrap()
    }

    pub(crate) fn trace(&self) -> &[Headers] {
        self.network.trace.as_deref().unwrap()
    }

    pub(crate) fn opcodes(&self) -> Vec<Opcode> {
        self.trace().iter().map(|headers| headers.bth().opcode).collect()
    }

    pub(crate) fn first_psn(&self) -> Psn {
        self.network.nodes[0].endpoint.query_qp(self.a.qpn).unwrap().sq_psn
    }

    /// Drops the packets selected by `lose`, which also gets the number of its call.
    pub(crate) fn lose(&mut self, mut lose: impl FnMut(u64, &Headers) -> bool + 'static) {
        let mut asked = 0;
        self.network.keep_if(move |headers| {
            asked += 1;
            !lose(asked, headers)
        });
    }

    /// Passes node 0 a response from node 1, `ahead` PSNs after its first request.
    pub(crate) fn respond(
        &mut self,
        opcode: Opcode,
        ext: Ext,
        payload: usize,
        ahead: u32,
    ) -> Delivery {
        let bth = Bth { opcode, psn: self.first_psn().plus(ahead), ..bth_to(self.a.qpn) };
        let source = self.network.nodes[1].path().remote;
        let headers = Headers::new(bth, ext).unwrap();
        let now = self.network.now();
        let endpoint = &mut self.network.nodes[0].endpoint;
        endpoint.handle_packet(now, &Origin::new(source, source.ip()), &headers, payload)
    }

    /// Whether the peer's memory at `offset` equals the start of this side's.
    pub(crate) fn arrived(&self, offset: u64, len: usize) -> bool {
        let [from, to] = [&self.network.nodes[0].memory, &self.network.nodes[1].memory];
        from.peek(BASE, len) == to.peek(BASE + offset, len)
    }
}

/// A queue pair whose peer is the test, packet by packet.
pub(crate) struct Lone {
    pub(crate) pair: Pair,
    pub(crate) psn: Psn,
}

impl Lone {
    pub(crate) fn new() -> Lone {
        Lone::with(|_| {})
    }

    pub(crate) fn with(adjust: impl Fn(&mut Connect)) -> Lone {
        let mut pair = Pair::with(|connect| {
            connect.mtu = Mtu::M256;
            connect.max_dest_rd_atomic = 2;
            adjust(connect);
        });
        pair.receive(7, 1000);
        let psn = pair.first_psn();
        Lone { pair, psn }
    }

    /// Passes node 1 a packet with the next PSN.
    pub(crate) fn next(&mut self, opcode: Opcode, ext: Ext, payload: usize) -> Placements {
        let psn = self.psn;
        self.psn = psn.next();
        self.packet(opcode, ext, payload, psn)
    }

    pub(crate) fn packet(
        &mut self,
        opcode: Opcode,
        ext: Ext,
        payload: usize,
        psn: Psn,
    ) -> Placements {
        self.custom(opcode, ext, payload, |bth| bth.psn = psn)
    }

    pub(crate) fn custom(
        &mut self,
        opcode: Opcode,
        ext: Ext,
        payload: usize,
        adjust: impl FnOnce(&mut Bth),
    ) -> Placements {
        let mut bth = Bth { opcode, psn: self.psn, ack_req: true, ..bth_to(self.pair.b.qpn) };
        adjust(&mut bth);
        self.deliver(&Headers::new(bth, ext).unwrap(), payload).pieces
    }

    /// Passes node 1 a packet, and executes its atomic.
    pub(crate) fn deliver(&mut self, headers: &Headers, payload: usize) -> Delivery {
        let source = self.pair.network.nodes[0].path().remote;
        let node = &mut self.pair.network.nodes[1];
        let origin = Origin::new(source, source.ip());
        let mut delivery = node.endpoint.handle_packet(Time::ZERO, &origin, headers, payload);
        if delivery.owed_packets > 0 {
            let qpn = headers.bth().dest_qp;
            delivery = node.endpoint.handle_held(qpn, Time::ZERO, headers, payload);
        }
        if let Insert::Atomic(job) = delivery.insert {
            let original = node.memory.atomic(job.addr, job.op);
            node.endpoint.complete_atomic(Time::ZERO, &job, original);
        }
        delivery
    }

    /// The acknowledgement that node 1 has to send, if any.
    pub(crate) fn answer(&mut self) -> Option<(Psn, Syndrome)> {
        let headers = self.answer_packet()?;
        let aeth = headers.ext().aeth().copied()?;
        Some((headers.bth().psn, aeth.syndrome))
    }

    /// The next packet that node 1 has to send, if any.
    pub(crate) fn answer_packet(&mut self) -> Option<Headers> {
        Some(self.pair.network.nodes[1].endpoint.poll_transmit(Time::ZERO)?.headers)
    }

    pub(crate) fn reth(&self, len: u32) -> Ext {
        Ext::Reth(self.range(len))
    }

    pub(crate) fn range(&self, len: u32) -> Reth {
        Reth { addr: BASE, rkey: self.pair.regions[1].rkey, len }
    }

    pub(crate) fn counters(&self) -> &Counters {
        self.pair.counters(1)
    }
}

pub(crate) fn positive() -> Ext {
    Ext::Aeth(Aeth { syndrome: Syndrome::Ack { credits: 31 }, msn: 0 })
}

/// The usual base header of a packet to a queue pair.
pub(crate) fn bth_to(dest_qp: Qpn) -> Bth {
    Bth {
        opcode: Opcode::RcSendOnly,
        solicited: false,
        mig_req: true,
        pad: 0,
        pkey: DEFAULT_PKEY,
        fecn: false,
        becn: false,
        dest_qp,
        ack_req: false,
        psn: Psn::new(0),
    }
}
