//! An endpoint on a wire of a [`Lab`](crate::veth::Lab), and a transfer that compares every byte.

use nic::clock;
use nic::fault::LossyWire;
use nic::pool::Pool;
use roce::Duration;
use roce::device;
use roce::endpoint::{Connect, Endpoint, EndpointConfig, Mtu, QpConfig};
use roce::verbs::{Access, CqId, MemoryRegion, Qpn, SendOp, SendWr, Sge, WcStatus};
use roce::world::{self, Path, Staging, Wire};

use crate::veth::address;

pub(crate) const MIB: usize = 1 << 20;

/// How long a transfer may take before it counts as stuck.
pub(crate) const LIMIT: Duration = Duration::from_millis(60_000);

/// An endpoint with one queue pair, its wire and its memory.
pub(crate) struct Host<W> {
    pub(crate) endpoint: Endpoint,
    pub(crate) wire: LossyWire<W>,
    pub(crate) pool: Pool,
    pub(crate) region: MemoryRegion,
    pub(crate) cq: CqId,
    pub(crate) qpn: Qpn,
    pub(crate) side: usize,
    pub(crate) completed: u64,
}

impl<W: Wire> Host<W> {
    pub(crate) fn new(wire: W, side: usize, loss_ppm: u32) -> Host<W> {
        let seed = side as u64 + 1;
        let pool = Pool::new(4 * MIB as u64).expect("pool");
        let mut endpoint = Endpoint::new(EndpointConfig { seed, ..EndpointConfig::default() });
        let pd = endpoint.alloc_pd();
        let cq = endpoint.create_cq(64).expect("cq");
        let region = endpoint.register(pd, pool.base(), pool.len(), Access::ALL).expect("region");
        let qpn = endpoint.create_qp(QpConfig::rc(pd, cq, 32, 32)).expect("qp");
        let wire = LossyWire::new(wire, loss_ppm, seed);
        Host { endpoint, wire, pool, region, cq, qpn, side, completed: 0 }
    }

    pub(crate) fn connect<P: Wire>(&mut self, peer: &Host<P>, v6: bool, mtu: Mtu) {
        let remote = (address(peer.side, v6), 4791).into();
        let psn = peer.endpoint.query_qp(peer.qpn).expect("qp").sq_psn;
        let local_psn = self.endpoint.query_qp(self.qpn).expect("qp").sq_psn;
        let connect = Connect::new(Path::new(remote), peer.qpn, psn);
        let connect = Connect { mtu, local_psn, ..connect };
        device::connect(&mut self.endpoint, clock::now(), self.qpn, &connect).expect("connect");
    }

    pub(crate) fn post(&mut self, op: SendOp, from: usize, len: usize) {
        let sge =
            Sge { addr: self.pool.base() + from as u64, len: len as u32, lkey: self.region.lkey };
        let wr = SendWr {
            wr_id: 1,
            op,
            sges: [sge].into_iter().collect(),
            signaled: true,
            ..SendWr::default()
        };
        self.endpoint.post_send(clock::now(), self.qpn, wr).expect("post");
    }

    pub(crate) fn bytes(&mut self, from: usize, len: usize) -> &mut [u8] {
        let base = self.pool.base();
        self.pool.bytes_mut(base + from as u64, len)
    }

    pub(crate) fn step(&mut self) {
        let Host { endpoint, wire, pool, .. } = self;
        world::turn(endpoint, wire, pool, clock::now(), |_, _| false);
        while let Some(completion) = self.endpoint.poll_cq(self.cq) {
            assert_eq!(completion.status, WcStatus::Success, "{completion:?}");
            self.completed += 1;
        }
    }
}

pub(crate) fn content(at: usize, seed: usize) -> u8 {
    ((at + 1).wrapping_mul(seed * 2 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// WRITEs in both directions and a READ at once; every byte is compared.
pub(crate) fn transfer<A: Wire, B: Wire>(a: &mut Host<A>, b: &mut Host<B>, v6: bool, mtu: Mtu) {
    const LEN: usize = MIB / 2 + 13;
    a.connect(b, v6, mtu);
    b.connect(a, v6, mtu);
    a.bytes(0, LEN).iter_mut().enumerate().for_each(|(at, byte)| *byte = content(at, 1));
    b.bytes(0, LEN).iter_mut().enumerate().for_each(|(at, byte)| *byte = content(at, 2));
    let (to_a, to_b) = (a.pool.base(), b.pool.base());
    let (a_key, b_key) = (a.region.rkey, b.region.rkey);
    a.post(SendOp::Write { remote_addr: to_b + MIB as u64, rkey: b_key }, 0, LEN);
    b.post(SendOp::Write { remote_addr: to_a + MIB as u64, rkey: a_key }, 0, LEN);
    a.post(SendOp::Read { remote_addr: to_b, rkey: b_key }, 2 * MIB, LEN);
    let deadline = clock::now() + LIMIT;
    while a.completed + b.completed < 3 {
        assert!(clock::now() < deadline, "stuck after {} and {}", a.completed, b.completed);
        a.step();
        b.step();
    }
    let differs = |bytes: &[u8], seed| (0..LEN).find(|&at| bytes[at] != content(at, seed));
    assert_eq!(differs(b.bytes(MIB, LEN), 1), None);
    assert_eq!(differs(a.bytes(MIB, LEN), 2), None);
    assert_eq!(differs(a.bytes(2 * MIB, LEN), 2), None);
}
