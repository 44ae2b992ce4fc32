//! Queue pairs without a state machine, for tests that act as one side: a peer that sends arbitrary
//! messages, and a target that is correct unless configured otherwise.

use std::collections::VecDeque;

use roce::verbs::{Access, MemoryRegion, Qpn, RecvWr, SendOp, SendWr, SgList, Sge, WcStatus};
use xio::capsule::{CAPSULE_BYTES, Outcome, ReadRequest, ReadResponse};
use xio::kernel::{crc32c, narrow_in_place};

use super::corpus::Corpus;
use super::net::{CQ_DEPTH, Cqs, Net, create_cqs, create_qp, register};

/// Work requests that may be posted.
const WORK: u32 = 64;

/// Bytes of one send buffer; messages beyond a capsule go there too.
const BUFFER: u64 = 4_096;

/// Bytes of one receive buffer: anything longer than a capsule was sent by mistake.
const INBOX: u64 = 128;

/// Bytes for data.
const DATA: u64 = 64 << 10;

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct Raw {
    node: usize,
    pub(crate) qpn: Qpn,
    pub(crate) data: MemoryRegion,
    cqs: Cqs,
    inbox: MemoryRegion,
    outbox: MemoryRegion,
    next_out: u64,
    /// Messages that arrived, oldest first.
    pub(crate) received: VecDeque<Vec<u8>>,
    /// Status of failed work requests.
    pub(crate) failures: Vec<WcStatus>,
    /// Whether a receive is posted anew for every message.
    pub(crate) reposts: bool,
}

impl Raw {
    /// With `receives` posted receives.
    pub(crate) fn new(net: &mut Net, node: usize, receives: u64) -> Raw {
        let host = &mut net.nodes[node];
        let cqs = create_cqs(host, CQ_DEPTH);
        let mut raw = Raw {
            node,
            qpn: create_qp(host, cqs, WORK),
            data: register(host, DATA, Access::REMOTE_WRITE),
            cqs,
            inbox: register(host, u64::from(WORK) * INBOX, Access::LOCAL),
            outbox: register(host, u64::from(WORK) * BUFFER, Access::LOCAL),
            next_out: 0,
            received: VecDeque::new(),
            failures: Vec::new(),
            reposts: receives > 0,
        };
        (0..receives).for_each(|slot| raw.post_recv(net, slot));
        raw
    }

    fn post_recv(&mut self, net: &mut Net, slot: u64) {
        let sge =
            Sge { addr: self.inbox.addr + slot * INBOX, len: INBOX as u32, lkey: self.inbox.lkey };
        let sges = SgList::from_iter([sge]);
        let now = net.now();
        let endpoint = &mut net.nodes[self.node].endpoint;
        let posted = endpoint.post_recv(now, self.qpn, RecvWr { wr_id: slot, sges });
        posted.expect("there is room");
    }

    fn post(&mut self, net: &mut Net, op: SendOp, bytes: &[u8]) {
        let addr = self.outbox.addr + self.next_out % u64::from(WORK) * BUFFER;
        self.next_out += 1;
        let now = net.now();
        let node = &mut net.nodes[self.node];
        node.memory.poke(addr, bytes);
        let sge = Sge { addr, len: bytes.len() as u32, lkey: self.outbox.lkey };
        let wr = SendWr {
            wr_id: 0,
            op,
            sges: SgList::from_iter([sge]),
            signaled: true,
            solicited: false,
            ..SendWr::default()
        };
        node.endpoint.post_send(now, self.qpn, wr).expect("there is room");
    }

    pub(crate) fn send(&mut self, net: &mut Net, bytes: &[u8]) {
        self.post(net, SendOp::Send, bytes);
    }

    pub(crate) fn write(&mut self, net: &mut Net, remote_addr: u64, rkey: u32, bytes: &[u8]) {
        for (piece, at) in bytes.chunks(BUFFER as usize).zip((0..).step_by(BUFFER as usize)) {
            let remote_addr = remote_addr + at;
            self.post(net, SendOp::Write { remote_addr, rkey }, piece);
        }
    }

    /// A WRITE with immediate data: it completes a receive of the peer, with its own length.
    pub(crate) fn write_imm(&mut self, net: &mut Net, remote_addr: u64, rkey: u32, bytes: &[u8]) {
        let op = SendOp::WriteImm { remote_addr, rkey, imm: 1 };
        self.post(net, op, bytes);
    }

    /// Polls completions; returns whether there were any.
    pub(crate) fn poll(&mut self, net: &mut Net) -> bool {
        let mut busy = false;
        while let Some(done) = net.nodes[self.node].endpoint.poll_cq(self.cqs.send) {
            busy = true;
            if done.status != WcStatus::Success {
                self.failures.push(done.status);
            }
        }
        while let Some(done) = net.nodes[self.node].endpoint.poll_cq(self.cqs.recv) {
            busy = true;
            if done.status != WcStatus::Success {
                self.failures.push(done.status);
                continue;
            }
            let addr = self.inbox.addr + done.wr_id * INBOX;
            let arena = &mut net.nodes[self.node].memory;
            let bytes = arena.peek(addr, done.byte_len as usize).to_vec();
            self.received.push_back(bytes);
            if self.reposts {
                self.post_recv(net, done.wr_id);
            }
        }
        busy
    }

    /// Every response received, decoded.
    pub(crate) fn answers(&mut self) -> Vec<ReadResponse> {
        let decode = |bytes: Vec<u8>| ReadResponse::decode(&bytes, crc32c).expect("an answer");
        self.received.drain(..).map(decode).collect()
    }
}

/// A fake target's reaction to one request.
#[derive(Clone, Debug)]
pub(crate) struct Reply {
    /// Written to the requested address.
    pub(crate) data: Vec<u8>,
    pub(crate) response: ReadResponse,
    /// Sent instead of the response.
    pub(crate) capsule: Option<Vec<u8>>,
    /// How often the response is sent.
    pub(crate) times: u32,
    /// Sends a WRITE with immediate data of the whole block instead.
    pub(crate) as_write_imm: bool,
}

/// The outcome of a request whose block was sent as it is.
pub(crate) fn done(bytes: u32, crc32c: u32, source_bytes: u32) -> Outcome {
    Outcome::Done { bytes, crc32c, source_bytes, bits: 0, codec: None, replaced: 0 }
}

type Policy = Box<dyn FnMut(&ReadRequest, &mut Reply)>;

/// A target that responds correctly, except for what `policy` changes.
pub(crate) struct Fake {
    corpus: Corpus,
    policy: Policy,
    lines: Vec<Raw>,
    /// Requests served.
    pub(crate) served: u64,
}

impl Fake {
    pub(crate) fn new(
        corpus: &Corpus,
        policy: impl FnMut(&ReadRequest, &mut Reply) + 'static,
    ) -> Fake {
        Fake { corpus: corpus.clone(), policy: Box::new(policy), lines: Vec::new(), served: 0 }
    }

    /// A new end for a connection. There is one reader with one connection.
    pub(crate) fn accept(&mut self, net: &mut Net, node: usize) -> Qpn {
        let raw = Raw::new(net, node, 64);
        let qpn = raw.qpn;
        self.lines.push(raw);
        qpn
    }

    /// Serves received requests; returns whether there were any.
    pub(crate) fn poll(&mut self, net: &mut Net) -> bool {
        let mut busy = false;
        for index in 0..self.lines.len() {
            busy |= self.lines[index].poll(net);
            while let Some(bytes) = self.lines[index].received.pop_front() {
                let request = ReadRequest::decode(&bytes, crc32c).expect("readers are honest");
                self.serve(net, index, &request);
            }
        }
        busy
    }

    fn serve(&mut self, net: &mut Net, index: usize, request: &ReadRequest) {
        let data = self.block(request);
        let bytes = data.len() as u32;
        let outcome = done(bytes, crc32c(0, &data), bytes);
        let (seq, tag) = (request.seq, request.tag);
        let mut reply = Reply {
            data,
            response: ReadResponse { seq, tag, outcome },
            capsule: None,
            times: 1,
            as_write_imm: false,
        };
        (self.policy)(request, &mut reply);
        self.served += 1;
        let line = &mut self.lines[index];
        if reply.as_write_imm {
            return line.write_imm(net, request.remote_addr, request.rkey, &reply.data);
        }
        line.write(net, request.remote_addr, request.rkey, &reply.data);
        let honest = reply.response.encode(crc32c);
        let capsule = reply.capsule.unwrap_or_else(|| honest.to_vec());
        (0..reply.times).for_each(|_| line.send(net, &capsule));
    }

    fn block(&self, request: &ReadRequest) -> Vec<u8> {
        let dataset = &self.corpus.datasets[request.source as usize];
        let from = dataset.layout.file.dtype;
        let at = dataset.byte_of(request.first_token) as usize;
        let len = (request.tokens * from.bytes()) as usize;
        let mut block = dataset.bytes[at..at + len].to_vec();
        if from != request.deliver {
            let kept = narrow_in_place(&mut block, from, request.deliver);
            block.truncate(kept.expect("the corpus fits"));
        }
        block
    }
}

/// A well-formed request for the first tokens of a dataset.
pub(crate) fn request(raw: &Raw, seq: u64, corpus: &Corpus) -> ReadRequest {
    ReadRequest {
        seq,
        tag: seq as u32 + 100,
        source: 0,
        first_token: 0,
        tokens: corpus.window,
        deliver: corpus.deliver,
        remote_addr: raw.data.addr,
        rkey: raw.data.rkey,
    }
}

/// The data that the target must have written for [`request`].
pub(crate) fn first_sample(corpus: &Corpus) -> Vec<u8> {
    let dataset = &corpus.datasets[0];
    let width = dataset.layout.file.dtype.bytes() as usize;
    let start = dataset.byte_of(0) as usize;
    let tokens = dataset.bytes[start..].chunks(width).take(corpus.window as usize);
    tokens.flat_map(|token| token[..corpus.deliver.bytes() as usize].to_vec()).collect()
}

const _: () = assert!(CAPSULE_BYTES as u64 <= INBOX);
