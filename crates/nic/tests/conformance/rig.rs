//! What a conformance cell runs on: two connected devices and the memory of both.

use arrayvec::ArrayVec;
use roce::device::{self, Device, PostError};
use roce::endpoint::{Connect, Mtu, QpConfig};
use roce::verbs::{
    Access, Completion, CqId, Datagram, MemoryRegion, PdId, Qpn, RecvWr, SendOp, SendWr, SgList,
    Sge, SrqId, Transport, VerbsError, WcStatus,
};
use roce::wire::Psn;
use roce::world::Path;
use roce::{Duration, Time};

/// Two devices and what moves their packets.
pub(crate) trait Rig {
    type Device: Device;

    /// The current time, by the clock of the devices.
    fn now(&self) -> Time;

    fn device(&mut self, side: usize) -> &mut Self::Device;

    /// The path to a side.
    fn path(&self, side: usize) -> Path;

    /// Memory that was never used.
    fn alloc(&mut self, side: usize, bytes: u64) -> u64;

    fn write(&mut self, side: usize, addr: u64, bytes: &[u8]);

    fn read(&mut self, side: usize, addr: u64, bytes: usize) -> Vec<u8>;

    /// Lets packets move for a moment.
    fn step(&mut self);
}

/// How a cell ended that did not pass.
#[derive(Debug)]
pub(crate) enum Miss {
    /// The device lacks the feature that the cell tests.
    Lacks(String),
    Wrong(String),
}

pub(crate) type Cell = Result<(), Miss>;

impl From<VerbsError> for Miss {
    fn from(error: VerbsError) -> Miss {
        match error {
            VerbsError::Unsupported(what) => Miss::Lacks(what.into()),
            error => Miss::Wrong(error.to_string()),
        }
    }
}

impl From<PostError> for Miss {
    fn from(error: PostError) -> Miss {
        error.error.into()
    }
}

/// Fails the cell unless both are equal.
macro_rules! ensure_eq {
    ($left:expr, $right:expr, $what:expr) => {{
        let (left, right) = (&$left, &$right);
        if left != right {
            return Err(Miss::Wrong(format!("{}: {left:?} and not {right:?}", $what)));
        }
    }};
}
pub(crate) use ensure_eq;

/// Fails the cell unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($what:tt)+) => {
        if !$condition {
            return Err(Miss::Wrong(format!($($what)+)));
        }
    };
}
pub(crate) use ensure;

/// How long an expected event may take.
const PATIENCE: Duration = Duration::from_millis(10_000);

/// How long to wait for an event that must not happen.
pub(crate) const QUIET: Duration = Duration::from_millis(20);

/// Bytes of the buffer of each side.
pub(crate) const BUFFER: u64 = 64 << 10;

const SEND_DEPTH: u32 = 32;

pub(crate) const QKEY: u32 = 0x1111_2222;

/// How a pair is made.
#[derive(Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) transport: Transport,
    /// Rights on the buffer of side 1.
    pub(crate) access: Access,
    /// Side 1 takes its receives from a shared queue of this size and limit.
    pub(crate) srq: Option<(u32, u32)>,
    /// Changes the attributes before the queue pairs are connected.
    pub(crate) tune: fn(&mut Connect),
}

impl Setup {
    pub(crate) fn of(transport: Transport) -> Setup {
        Setup { transport, access: Access::ALL, srq: None, tune: |_| () }
    }
}

/// Two connected queue pairs, with everything that they need.
pub(crate) struct Pair<'r, R: Rig> {
    pub(crate) rig: &'r mut R,
    pub(crate) pds: [PdId; 2],
    pub(crate) send_cqs: [CqId; 2],
    pub(crate) recv_cqs: [CqId; 2],
    pub(crate) qpns: [Qpn; 2],
    pub(crate) regions: [MemoryRegion; 2],
    pub(crate) srq: Option<SrqId>,
    pub(crate) transport: Transport,
}

impl<'r, R: Rig> Pair<'r, R> {
    pub(crate) fn new(rig: &'r mut R, setup: Setup) -> Result<Pair<'r, R>, Miss> {
        let transport = setup.transport;
        let (mut made, mut srq) = (ArrayVec::<_, 2>::new(), None);
        for side in 0..2 {
            let addr = rig.alloc(side, BUFFER);
            let device = rig.device(side);
            let pd = device.alloc_pd()?;
            let (send_cq, recv_cq) = (device.create_cq(64)?, device.create_cq(64)?);
            if let (1, Some((max_wr, limit))) = (side, setup.srq) {
                srq = Some(device.create_srq(roce::endpoint::SrqConfig { pd, max_wr, limit })?);
            }
            let shared = srq.filter(|_| side == 1);
            let config = QpConfig {
                transport,
                recv_cq,
                srq: shared,
                ..QpConfig::rc(pd, send_cq, SEND_DEPTH, SEND_DEPTH)
            };
            let qpn = device.create_qp(config)?;
            let access = if side == 0 { Access::ALL } else { setup.access };
            let region = device.register(pd, addr, BUFFER, access)?;
            made.push((pd, send_cq, recv_cq, qpn, region));
        }
        let [a, b] = [made[0], made[1]];
        let pair = Pair {
            rig,
            pds: [a.0, b.0],
            send_cqs: [a.1, b.1],
            recv_cqs: [a.2, b.2],
            qpns: [a.3, b.3],
            regions: [a.4, b.4],
            srq,
            transport,
        };
        pair.connected(setup.tune)
    }

    fn connected(self, tune: fn(&mut Connect)) -> Result<Pair<'r, R>, Miss> {
        const PSNS: [u32; 2] = [0x00ff_fffe, 7];
        let now = self.rig.now();
        for side in 0..2 {
            let (qpn, psn) = (self.qpns[side], Psn::new(PSNS[side]));
            if self.transport == Transport::Ud {
                device::start_datagrams(self.rig.device(side), now, qpn, QKEY, psn)?;
                continue;
            }
            let path = self.rig.path(1 - side);
            let mut connect = Connect {
                mtu: Mtu::M1024,
                local_psn: psn,
                ..Connect::new(path, self.qpns[1 - side], Psn::new(PSNS[1 - side]))
            };
            tune(&mut connect);
            device::connect(self.rig.device(side), now, qpn, &connect)?;
        }
        Ok(self)
    }

    pub(crate) fn device(&mut self, side: usize) -> &mut R::Device {
        self.rig.device(side)
    }

    /// A piece of the buffer of a side.
    pub(crate) fn sges(&self, side: usize, offset: u64, len: u32) -> SgList {
        let region = &self.regions[side];
        SgList::from_iter([Sge { addr: region.addr + offset, len, lkey: region.lkey }])
    }

    pub(crate) fn wr(&self, op: SendOp, offset: u64, len: u32) -> SendWr {
        let (wr_id, sges) = (u64::from(len), self.sges(0, offset, len));
        SendWr { wr_id, op, sges, signaled: true, ..SendWr::default() }
    }

    /// Posts on side 0.
    pub(crate) fn send(&mut self, op: SendOp, offset: u64, len: u32) -> Cell {
        let wr = self.wr(op, offset, len);
        self.post(&[wr])
    }

    pub(crate) fn post(&mut self, wrs: &[SendWr]) -> Cell {
        let (now, qpn) = (self.rig.now(), self.qpns[0]);
        Ok(self.device(0).post_send(now, qpn, wrs)?)
    }

    /// Posts a receive on a side, or on the shared queue of side 1.
    pub(crate) fn receive(&mut self, side: usize, wr_id: u64, offset: u64, len: u32) -> Cell {
        let wr = RecvWr { wr_id, sges: self.sges(side, offset, len) };
        let (now, qpn) = (self.rig.now(), self.qpns[side]);
        match self.srq.filter(|_| side == 1) {
            Some(srq) => self.device(side).post_srq_recv(srq, &[wr])?,
            None => self.device(side).post_recv(now, qpn, &[wr])?,
        }
        Ok(())
    }

    /// The destination of side 0's datagrams.
    pub(crate) fn datagram(&mut self) -> Result<Datagram, Miss> {
        let (path, pd) = (self.rig.path(1), self.pds[0]);
        let ah = self.device(0).create_ah(pd, &path)?;
        Ok(Datagram { ah, dest_qp: self.qpns[1], qkey: QKEY })
    }

    pub(crate) fn fill(&mut self, side: usize, offset: u64, bytes: &[u8]) {
        let addr = self.regions[side].addr + offset;
        self.rig.write(side, addr, bytes);
    }

    pub(crate) fn bytes(&mut self, side: usize, offset: u64, len: usize) -> Vec<u8> {
        let addr = self.regions[side].addr + offset;
        self.rig.read(side, addr, len)
    }

    pub(crate) fn remote(&self, offset: u64) -> (u64, u32) {
        (self.regions[1].addr + offset, self.regions[1].rkey)
    }

    /// Waits until `look` returns something.
    pub(crate) fn wait<T>(
        &mut self,
        what: &str,
        mut look: impl FnMut(&mut R) -> Result<Option<T>, Miss>,
    ) -> Result<T, Miss> {
        let until = self.rig.now() + PATIENCE;
        loop {
            if let Some(found) = look(self.rig)? {
                return Ok(found);
            }
            ensure!(self.rig.now() < until, "waited in vain for {what}");
            self.rig.step();
        }
    }

    /// Lets time pass.
    pub(crate) fn rest(&mut self) {
        let until = self.rig.now() + QUIET;
        while self.rig.now() < until {
            self.rig.step();
        }
    }

    fn next(&mut self, side: usize, cq: CqId, what: &str) -> Result<Completion, Miss> {
        self.wait(what, |rig| {
            let mut one = ArrayVec::<Completion, 1>::new();
            rig.device(side).poll_cq(cq, &mut one)?;
            Ok(one.pop())
        })
    }

    /// The next completion of a send of side 0.
    pub(crate) fn sent(&mut self) -> Result<Completion, Miss> {
        self.next(0, self.send_cqs[0], "the completion of a send")
    }

    /// The next completion of a receive.
    pub(crate) fn received(&mut self, side: usize) -> Result<Completion, Miss> {
        self.next(side, self.recv_cqs[side], "the completion of a receive")
    }

    /// Checks that the next send of side 0 ends with this status.
    pub(crate) fn expect_sent(&mut self, status: WcStatus) -> Result<Completion, Miss> {
        let done = self.sent()?;
        ensure_eq!(done.status, status, "how the send ended");
        ensure_eq!(done.qpn, self.qpns[0], "its queue pair");
        Ok(done)
    }

    pub(crate) fn expect_received(
        &mut self,
        side: usize,
        status: WcStatus,
    ) -> Result<Completion, Miss> {
        let done = self.received(side)?;
        ensure_eq!(done.status, status, "how the receive ended");
        ensure_eq!(done.qpn, self.qpns[side], "its queue pair");
        Ok(done)
    }

    /// Destroys everything, in order: nothing is left in use.
    pub(crate) fn close(mut self) -> Cell {
        let now = self.rig.now();
        for side in 0..2 {
            let (pd, cqs) = (self.pds[side], [self.send_cqs[side], self.recv_cqs[side]]);
            let (qpn, lkey) = (self.qpns[side], self.regions[side].lkey);
            let srq = self.srq.filter(|_| side == 1);
            let device = self.device(side);
            device.destroy_qp(now, qpn)?;
            srq.map_or(Ok(()), |srq| device.destroy_srq(srq))?;
            device.deregister(lkey)?;
            cqs.into_iter().try_for_each(|cq| device.destroy_cq(cq))?;
            device.dealloc_pd(pd)?;
        }
        Ok(())
    }
}
