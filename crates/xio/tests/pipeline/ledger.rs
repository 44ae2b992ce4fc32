//! Watches what a reader posts, and holds it to its bounds: never more requests outstanding than
//! credits, never two of them into the same memory, never a capsule changed while it may be sent.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use roce::endpoint::Endpoint;
use roce::verbs::{
    Access, Completion, CqId, MemoryRegion, PdId, Qpn, RecvWr, SendWr, Verbs, VerbsError, WcOpcode,
    WcStatus,
};
use roce::world::Staging;
use xio::capsule::{CAPSULE_BYTES, ReadRequest, ReadResponse};
use xio::kernel::crc32c;

use super::net::Arena;

/// Requests of one reader on their way, by queue pair and number.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    receives: BTreeMap<(Qpn, u64), u64>,
    answers: Vec<(Qpn, u64)>,
    posted: Vec<(Qpn, u64)>,
    /// Requests whose SEND has not completed.
    sending: BTreeSet<(Qpn, u64)>,
    in_flight: BTreeMap<(Qpn, u64), Range<u64>>,
    /// Requests posted.
    pub(crate) requests: u64,
    /// Bytes asked for.
    pub(crate) asked_bytes: u64,
    /// Most requests that were outstanding on one queue pair.
    pub(crate) most: usize,
}

/// An endpoint whose work requests are written down.
pub(crate) struct Watched<'a> {
    pub(crate) endpoint: &'a mut Endpoint,
    pub(crate) ledger: &'a mut Ledger,
}

impl Verbs for Watched<'_> {
    fn register(
        &mut self,
        pd: PdId,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        self.endpoint.register(pd, addr, len, access)
    }

    fn deregister(&mut self, lkey: u32) -> Result<(), VerbsError> {
        self.endpoint.deregister(lkey)
    }

    fn post_send(&mut self, qpn: Qpn, wr: SendWr) -> Result<(), VerbsError> {
        let (addr, wr_id) = (wr.sges[0].addr, wr.wr_id);
        self.endpoint.post_send(qpn, wr)?;
        let fresh = self.ledger.sending.insert((qpn, wr_id));
        assert!(fresh, "slot {wr_id} is used again before its SEND has completed");
        self.ledger.posted.push((qpn, addr));
        Ok(())
    }

    fn post_recv(&mut self, qpn: Qpn, wr: RecvWr) -> Result<(), VerbsError> {
        self.ledger.receives.insert((qpn, wr.wr_id), wr.sges[0].addr);
        self.endpoint.post_recv(qpn, wr)
    }

    fn poll_cq(&mut self, cq: CqId) -> Option<Completion> {
        let done = self.endpoint.poll_cq(cq)?;
        match (done.status, done.opcode) {
            (WcStatus::Success, WcOpcode::Recv) => {
                self.ledger.answers.push((done.qpn, done.wr_id));
            }
            (WcStatus::Success, WcOpcode::Send) => {
                self.ledger.sending.remove(&(done.qpn, done.wr_id));
            }
            _ => {}
        }
        Some(done)
    }
}

impl Ledger {
    /// Settles the books after a poll: capsules still lie where they were written.
    pub(crate) fn settle(&mut self, arena: &Arena, credits: u32) {
        for (qpn, wr_id) in std::mem::take(&mut self.answers) {
            // A queue pair that was given up keeps completions, but its memory is gone.
            let Some(addr) = self.receives.get(&(qpn, wr_id)) else {
                continue;
            };
            let bytes = arena.bytes(*addr, CAPSULE_BYTES);
            if let Ok(answer) = ReadResponse::decode(bytes, crc32c) {
                self.in_flight.remove(&(qpn, answer.seq));
            }
        }
        for (qpn, addr) in std::mem::take(&mut self.posted) {
            let bytes = arena.bytes(addr, CAPSULE_BYTES);
            let request = ReadRequest::decode(bytes, crc32c).expect("a reader sends requests");
            self.ask(qpn, &request);
        }
        let queue_pairs = self.in_flight.keys().map(|(qpn, _)| *qpn);
        for qpn in queue_pairs.collect::<BTreeSet<_>>() {
            let count = self.in_flight.keys().filter(|(of, _)| *of == qpn).count();
            assert!(count <= credits as usize, "{count} requests on {credits} credits");
            self.most = self.most.max(count);
        }
    }

    fn ask(&mut self, qpn: Qpn, request: &ReadRequest) {
        let len = u64::from(request.tokens) * u64::from(request.deliver.bytes());
        let range = request.remote_addr..request.remote_addr + len;
        for other in self.in_flight.values() {
            let apart = range.end <= other.start || other.end <= range.start;
            assert!(apart, "two requests into {range:?} and {other:?}");
        }
        let double = self.in_flight.insert((qpn, request.seq), range);
        assert_eq!(double, None, "number {} twice", request.seq);
        self.requests += 1;
        self.asked_bytes += len;
    }

    /// A queue pair is gone, and with it everything asked on it.
    pub(crate) fn forget(&mut self, qpn: Qpn) {
        self.in_flight.retain(|(of, _), _| *of != qpn);
        self.receives.retain(|(of, _), _| *of != qpn);
        self.sending.retain(|(of, _)| *of != qpn);
    }

    pub(crate) fn outstanding(&self) -> usize {
        self.in_flight.len()
    }
}
