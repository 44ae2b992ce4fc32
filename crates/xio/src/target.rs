//! The storage target as a state machine: requests in; disk reads, stages and RDMA WRITEs out.
//!
//! One [`Target`] serves many sessions, each on its own queue pair, from one set of staging
//! buffers. A request holds a buffer from the disk read until its response is acknowledged:
//!
//! ```text
//! capsule -> pending -> Reading (the disk owns the buffer) -> stages -> WRITE + SEND -> free
//!               ^  |
//!               |  v
//!            Proving: a block of the file is read whole and compared with its manifest
//! ```
//!
//! Bytes of a file with a manifest are sent only if they match it ([`crate::sums`]). Of any other
//! file the disk is asked after each read whether it has changed since the session began.
//!
//! The stages of a session are agreed on when it opens ([`Source::stages`]); a request only
//! specifies tokens.
//!
//! Memory is bounded by the staging buffers and by the credits of each session (C6). Sessions take
//! turns. Some buffers are reserved for sessions that hold none, and one for a session that opens
//! later, so that a reader that does not receive its responses cannot starve the others. While a
//! session lacks a buffer that is within its equal share, those above theirs take none. Every
//! refusal is sent to the reader and counted by reason (C7).
//!
//! Order of calls: [`Target::open`] after the queue pair exists and before it is connected, then
//! [`Target::poll`] as long as it returns `true`, then [`Target::failed_session`] until it returns
//! nothing. [`Target::close`] comes before the queue pair is destroyed, and nothing is sent between
//! the two: work requests of the queue pair may still refer to the buffers that it frees. No
//! socket, file or clock may enter: they are behind `Device`, `Staging` and `Disk`.

mod gauge;

use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use arrayvec::ArrayVec;
use roce::Time;
use roce::device::{Device, PostError};
use roce::verbs::{
    Completion, CqId, MemoryRegion, Qpn, RecvWr, SendOp, SendWr, SgList, Sge, VerbsError, WcOpcode,
    WcStatus,
};
use roce::world::Staging;
use thiserror::Error;

use crate::capsule::{CAPSULE_BYTES, Outcome, ReadRequest, ReadResponse, Refusal};
use crate::disk::{Change, Disk, DiskDone, DiskFault, DiskRead, FileId};
use crate::kernel::{Kernels, TokenMap};
use crate::stage::{self, BlockError, Ran, Received, SCRATCH_BYTES, TargetStages, Tools};
use crate::sums::{Differs, FileSums, Proven, SUM_BYTES};
use gauge::Gauge;

use staging::{UNIT_BYTES, UNITS};

mod staging;

/// Alignment of direct I/O in bytes.
pub const IO_ALIGN: u32 = 4096;

/// Most bytes of a file in one request.
pub const BLOCK_BYTES: u32 = 1 << 20;

/// Bytes of a target's staging buffer: a block of this size or several smaller ones, and the slack
/// of aligned reads.
pub const STAGING_BYTES: u32 = UNITS * UNIT_BYTES;

/// Most disk reads into one staging buffer.
pub const READS_PER_BUFFER: u32 = UNITS;

const _: () = assert!(SUM_BYTES <= STAGING_BYTES as u64, "a buffer holds a block of a manifest");

/// Slots for a request and its response per credit. A reader sends its next request as soon as it
/// gets a response, and the request may arrive before the acknowledgement of the response: with one
/// slot per credit it would find no receive posted and wait for the RNR timer.
const SLOTS_PER_CREDIT: u32 = 2;

/// Bytes of reads started per [`Target::poll`], and most reads: the kernel may copy from its page
/// cache during submission.
const READ_BYTES_PER_POLL: u32 = 2 * BLOCK_BYTES;
const READS_PER_POLL: u32 = 16;

/// Blocks that one [`Target::poll`] takes through their stages: as many as have these bytes of a
/// file, and no more than this.
const STAGED_BYTES_PER_POLL: u64 = BLOCK_BYTES as u64;
const BLOCKS_PER_POLL: u32 = 8;

/// Completions taken from a queue at once, and how often of each kind per [`Target::poll`].
const COMPLETIONS_PER_BATCH: usize = 32;
const BATCHES_PER_POLL: u32 = 8;

/// A capsule in and a capsule out.
const SLOT_BYTES: u64 = 2 * CAPSULE_BYTES as u64;

/// Registered memory of a session for each of its credits.
pub const CREDIT_BYTES: u64 = SLOTS_PER_CREDIT as u64 * SLOT_BYTES;

/// Requests one session may have outstanding.
pub const MAX_CREDITS: u32 = 64;

/// Work requests of a session's queue pair, in each direction, for each of its credits: every slot
/// may hold a WRITE and a SEND.
pub const WORK_PER_CREDIT: u32 = 2 * SLOTS_PER_CREDIT;

/// A dataset of a session.
#[derive(Clone, Debug)]
pub struct Source {
    /// The open file.
    pub file: FileId,
    /// The stages for its blocks, as agreed on by the session.
    pub stages: TargetStages,
    /// The table of `remap`; empty without one. Its entries fit the type of the file.
    pub table: Arc<[u32]>,
    /// The user action of `wasm`; none without one.
    pub action: Option<Arc<dyn TokenMap>>,
    /// Offset of the first token in bytes.
    pub data_offset: u64,
    /// Tokens in the file when the session began.
    pub tokens: u64,
    /// What the file's manifest says of its bytes, if it has one.
    pub sums: Option<FileSums>,
}

/// Counters of a target.
#[derive(Clone, Copy, Debug, Default)]
pub struct TargetCounters {
    /// Requests completed with data.
    pub done: u64,
    /// Bytes read from storage.
    pub source_bytes: u64,
    /// Bytes sent by RDMA WRITE.
    pub written_bytes: u64,
    /// Conversions of blocks.
    pub narrowed_blocks: u64,
    /// Tokens that did not fit and were replaced.
    pub replaced_tokens: u64,
    /// Blocks that were sent packed.
    pub packed_blocks: u64,
    /// Blocks that were sent compressed.
    pub compressed_blocks: u64,
    /// Blocks that were compressed and did not become smaller, so they were sent as they were.
    pub plain_blocks_no_gain: u64,
    /// Blocks that were not compressed because the link outruns the codec.
    pub plain_blocks_fast_link: u64,
    /// Bytes that went into compressors.
    pub codec_in_bytes: u64,
    /// Bytes of those blocks as they were sent.
    pub codec_out_bytes: u64,
    /// Nanoseconds spent in compressors.
    pub codec_ns: u64,
    /// Requests that ended with a token that does not fit.
    pub overflow: u64,
    /// Blocks that were given to a user action.
    pub action_blocks: u64,
    /// Requests that ended because a user action failed.
    pub action_faults: u64,
    /// Requests beyond the end of a truncated file.
    pub truncated: u64,
    /// Requests that failed with a storage error.
    pub storage_errors: u64,
    /// Requests for a file that has changed since the session began, or that differs from its
    /// manifest.
    pub changed_files: u64,
    /// Blocks read whole and found to match their manifest.
    pub proven_blocks: u64,
    /// Requests refused, by [`Refusal`] code minus one.
    pub refused: [u64; Refusal::ALL.len()],
    /// Work requests that ended in error (the session's queue pair failed).
    pub failed_work_requests: u64,
    /// Completions that no outstanding work request of the session can have.
    pub bad_completions: u64,
}

impl TargetCounters {
    /// Counts a block that has gone through its stages; `may_compress` if there is a stage that
    /// does.
    fn count(&mut self, ran: &Ran, may_compress: bool) {
        self.narrowed_blocks += u64::from(ran.narrowed);
        self.replaced_tokens += u64::from(ran.block.replaced);
        self.packed_blocks += u64::from(ran.block.bits > 0);
        match (ran.encoding, ran.block.codec) {
            (Some(encoding), codec) => {
                self.codec_in_bytes += encoding.bytes_in as u64;
                self.codec_out_bytes += encoding.bytes_out as u64;
                self.codec_ns += encoding.nanos;
                match codec {
                    Some(_) => self.compressed_blocks += 1,
                    None => self.plain_blocks_no_gain += 1,
                }
            }
            (None, _) if may_compress => self.plain_blocks_fast_link += 1,
            (None, _) => {}
        }
    }
}

/// Why a session failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SessionFailure {
    /// A work request was refused or ended in error.
    #[error("its queue pair failed")]
    QueuePair,
    /// A WRITE of so many bytes was sent again and again, and nothing acknowledged it.
    #[error("the reader's end did not acknowledge {bytes} bytes of data")]
    Unacknowledged {
        /// Its length.
        bytes: u32,
    },
    /// The device cannot be trusted with this session's memory any more.
    #[error("the device completed a work request that is not outstanding")]
    BadCompletion,
    /// The completion queue of all sessions cannot be read.
    #[error("the device cannot read its completions: {0}")]
    Completions(VerbsError),
}

/// Totals of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// Requests completed with data.
    pub requests: u64,
    /// Bytes sent by RDMA WRITE.
    pub bytes: u64,
}

/// State of a staging buffer, or of the part of it that a request took, at its first unit.
#[derive(Clone, Copy, Debug)]
enum State {
    Free,
    /// Reading this block of the job's file whole.
    Proving(Job, u64),
    Reading(Job),
    /// Reading for a session that was closed: freed when the read completes.
    Orphan,
    /// So many bytes for this session.
    Sending(Qpn, u32),
}

/// State of a slot: who may touch its two capsules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    /// Its receive is posted.
    Receiving,
    /// A request is in it, and no response was sent.
    Serving,
    /// Its response is sent, together with the data in this buffer or [`NO_BUFFER`].
    Sending(u32),
}

/// An admitted request.
#[derive(Clone, Copy, Debug)]
struct Job {
    qpn: Qpn,
    slot: u32,
    request: ReadRequest,
    file: FileId,
    /// Offset of the first token in the file.
    first_byte: u64,
    /// Bytes of the tokens in the file.
    len: u32,
    /// Offset of the tokens in the buffer.
    at: u32,
    /// Bytes read from storage for it so far.
    read_bytes: u32,
}

impl Job {
    /// Where its tokens are in the file.
    fn range(&self) -> Range<u64> {
        self.first_byte..self.first_byte + u64::from(self.len)
    }

    /// Slack between the aligned start of the read and the first token.
    fn head(&self) -> u32 {
        (self.first_byte % u64::from(IO_ALIGN)) as u32
    }

    /// Units of a staging buffer for the aligned read.
    fn units(&self) -> u32 {
        staging::units_of((self.head() + self.len).next_multiple_of(IO_ALIGN))
    }

    fn read(&self, addr: u64, tag: u64) -> DiskRead {
        let len = (self.head() + self.len).next_multiple_of(IO_ALIGN);
        let offset = self.first_byte - u64::from(self.head());
        DiskRead { file: self.file, offset, len, addr, tag }
    }
}

/// The outcome of a session's turn to start a read.
enum Turn {
    /// A read of so many bytes.
    Taken(u32),
    /// Nothing to read, or no buffer is available.
    Passed,
    DiskFull,
}

#[derive(Debug)]
struct Session {
    sources: Vec<Source>,
    memory: SessionMemory,
    slots: Vec<Slot>,
    next_seq: u64,
    /// Requests without a buffer.
    pending: VecDeque<Job>,
    /// Buffers held, and units of them.
    buffers: u32,
    units: u32,
    /// Requests received and not responded to.
    outstanding: u32,
    failed: Option<SessionFailure>,
    served: Served,
    gauge: Gauge,
}

impl Session {
    fn sums(&self, job: &Job) -> Option<&FileSums> {
        self.sources.get(job.request.source as usize)?.sums.as_ref()
    }

    /// The first request whose next read is not under way, and the block to be read whole for it,
    /// if one is to be proven first. `proving` are the blocks that are.
    fn next_job(&self, proven: &Proven, proving: &[(FileId, u64)]) -> Option<(usize, Option<u64>)> {
        let next = |(index, job): (usize, &Job)| {
            let missing = self.sums(job).and_then(|sums| proven.missing(sums, &job.range()));
            let waits = missing.is_some_and(|block| proving.contains(&(job.file, block)));
            (!waits).then_some((index, missing))
        };
        self.pending.iter().enumerate().find_map(next)
    }

    fn request_addr(&self, slot: u32) -> u64 {
        self.memory.capsules.addr + u64::from(slot) * SLOT_BYTES
    }

    fn response_addr(&self, slot: u32) -> u64 {
        self.request_addr(slot) + CAPSULE_BYTES as u64
    }

    fn receive(&self, slot: u32) -> RecvWr {
        let len = CAPSULE_BYTES as u32;
        let sge = Sge { addr: self.request_addr(slot), len, lkey: self.memory.capsules.lkey };
        RecvWr { wr_id: u64::from(slot), sges: SgList::from_iter([sge]) }
    }

    /// Checks a request against the session.
    fn admit(&mut self, qpn: Qpn, slot: u32, request: ReadRequest) -> Result<Job, Refusal> {
        if request.seq != self.next_seq {
            return Err(Refusal::Replayed);
        }
        self.next_seq += 1;
        let source = self.sources.get(request.source as usize).ok_or(Refusal::UnknownSource)?;
        let end = request.first_token.checked_add(u64::from(request.tokens));
        if end.is_none_or(|end| end > source.tokens) {
            return Err(Refusal::OutOfRange);
        }
        let width = u64::from(source.stages.stored().bytes());
        let bytes = u64::from(request.tokens) * width;
        if bytes == 0 || bytes > u64::from(BLOCK_BYTES) {
            return Err(Refusal::BadLength);
        }
        if request.deliver != source.stages.on_wire() {
            return Err(Refusal::BadType);
        }
        let first_byte = source.data_offset + request.first_token * width;
        let (file, len) = (source.file, bytes as u32);
        let mut job = Job { qpn, slot, request, file, first_byte, len, at: 0, read_bytes: 0 };
        job.at = job.head();
        Ok(job)
    }
}

/// The resources for executing a request.
struct Io<'a, D, M> {
    now: Time,
    device: &'a mut D,
    memory: &'a mut M,
}

/// Memory of a session, registered in the protection domain of its queue pair.
#[derive(Clone, Copy, Debug)]
pub struct SessionMemory {
    /// Key of the target's staging buffers, with local access only.
    pub staging_lkey: u32,
    /// One region of `credits *` [`CREDIT_BYTES`], local write.
    pub capsules: MemoryRegion,
    /// Requests the reader may have outstanding.
    pub credits: u32,
}

/// The storage target.
#[derive(Debug)]
pub struct Target {
    /// By unit: a buffer, or the part of one that a request took, is known by its first.
    buffers: Vec<State>,
    base_addr: u64,
    staging: staging::Buffers,
    sessions: BTreeMap<Qpn, Session>,
    turns: VecDeque<Qpn>,
    /// Open sessions that hold no buffer.
    without_buffers: usize,
    /// A session with less than its share that lacks a buffer: the last that was found to.
    in_need: Option<Qpn>,
    /// Sessions that failed and were not reported yet.
    failed: VecDeque<(Qpn, SessionFailure)>,
    send_cq: CqId,
    recv_cq: CqId,
    kernels: Kernels,
    /// What a compressor writes into: a block, once a session compresses.
    scratch: Vec<u8>,
    proven: Proven,
    /// Blocks that are being read whole: at most one for each buffer.
    proving: Vec<(FileId, u64)>,
    counters: TargetCounters,
}

const NO_BUFFER: u32 = u32::MAX;

/// Number of a WRITE's work request, to which its length is added. Those of SENDs, a slot and a
/// buffer, are smaller.
const DATA_WRITE: u64 = (u32::MAX as u64) << 32;
const MOST_DATA: u64 = STAGING_BYTES as u64;

impl Target {
    /// A target with `count` buffers ([`STAGING_BYTES`] each) from `base_addr` on, 4096-aligned,
    /// and the two completion queues of its sessions' queue pairs.
    pub fn new(
        base_addr: u64,
        count: u32,
        send_cq: CqId,
        recv_cq: CqId,
        kernels: Kernels,
    ) -> Target {
        Target {
            buffers: (0..count * UNITS).map(|_| State::Free).collect(),
            base_addr,
            staging: staging::Buffers::new(count),
            sessions: BTreeMap::new(),
            turns: VecDeque::new(),
            without_buffers: 0,
            in_need: None,
            failed: VecDeque::new(),
            send_cq,
            recv_cq,
            kernels,
            scratch: Vec::new(),
            proven: Proven::default(),
            proving: Vec::new(),
            counters: TargetCounters::default(),
        }
    }

    /// Counters since the start.
    pub fn counters(&self) -> &TargetCounters {
        &self.counters
    }

    /// Sessions open.
    pub fn sessions(&self) -> usize {
        self.sessions.len()
    }

    /// Staging buffers of which nothing is in use; all of them when no session is open and the disk
    /// is idle.
    pub fn free_buffers(&self) -> usize {
        self.staging.whole()
    }

    /// Staging buffers in all.
    pub fn buffer_count(&self) -> usize {
        self.staging.buffers()
    }

    /// Opens a session on `qpn`, which has room for [`WORK_PER_CREDIT`] work requests for each
    /// credit: posts its receives.
    pub fn open<D: Device>(
        &mut self,
        now: Time,
        device: &mut D,
        qpn: Qpn,
        sources: Vec<Source>,
        memory: SessionMemory,
    ) -> Result<(), VerbsError> {
        let credits = memory.credits;
        let pending = VecDeque::with_capacity(credits as usize);
        let compresses = sources.iter().any(|source| source.stages.compression().is_some());
        if compresses && self.scratch.is_empty() {
            self.scratch = vec![0; SCRATCH_BYTES];
        }
        let session = Session {
            sources,
            memory,
            slots: (0..credits * SLOTS_PER_CREDIT).map(|_| Slot::Receiving).collect(),
            next_seq: 1,
            pending,
            buffers: 0,
            units: 0,
            outstanding: 0,
            failed: None,
            served: Served::default(),
            gauge: Gauge::default(),
        };
        for slot in 0..credits * SLOTS_PER_CREDIT {
            device.post_recv(now, qpn, &[session.receive(slot)])?;
        }
        self.sessions.insert(qpn, session);
        self.turns.push_back(qpn);
        self.without_buffers += 1;
        Ok(())
    }

    /// Totals of the session on `qpn` so far.
    pub fn served(&self, qpn: Qpn) -> Option<Served> {
        self.sessions.get(&qpn).map(|session| session.served)
    }

    /// Closes the session on `qpn`. Its buffers are freed: at once, or when the read into them
    /// completes. Returns its datasets, for the caller to free: their actions and checksums may
    /// take a while.
    pub fn close(&mut self, qpn: Qpn) -> Vec<Source> {
        let Some(session) = self.sessions.remove(&qpn) else {
            return Vec::new();
        };
        self.without_buffers -= usize::from(session.buffers == 0);
        self.in_need = self.in_need.filter(|other| *other != qpn);
        self.turns.retain(|turn| *turn != qpn);
        self.failed.retain(|(failed, _)| *failed != qpn);
        for index in 0..self.buffers.len() {
            match self.buffers[index] {
                State::Proving(job, block) if job.qpn == qpn => {
                    self.no_longer_proving(&job, block);
                    self.buffers[index] = State::Orphan;
                }
                State::Reading(job) if job.qpn == qpn => self.buffers[index] = State::Orphan,
                State::Sending(owner, _) if owner == qpn => self.release(index as u32, None),
                _ => {}
            }
        }
        session.sources
    }

    /// A session that failed since the last call, and why. The caller closes it and notifies the
    /// reader: a reader that only waits for responses sends nothing, so its transport does not
    /// notice.
    pub fn failed_session(&mut self) -> Option<(Qpn, SessionFailure)> {
        self.failed.pop_front()
    }

    /// Does the work possible now: at most `BLOCKS_PER_POLL` blocks through their stages, or one
    /// with a user action, which may take long, and `READS_PER_POLL` reads started. Returns whether
    /// there was any.
    pub fn poll<D: Device, M: Staging, K: Disk>(
        &mut self,
        now: Time,
        device: &mut D,
        memory: &mut M,
        disk: &mut K,
    ) -> bool {
        let io = &mut Io { now, device, memory };
        let mut busy = self.take_completions(io, self.send_cq, Target::handle_sent);
        busy |= self.take_completions(io, self.recv_cq, Target::handle_capsule);
        busy |= self.start_reads(disk);
        let before = self.counters;
        for _ in 0..BLOCKS_PER_POLL {
            let Some(done) = disk.poll() else { break };
            busy = true;
            self.handle_read(io, disk, done);
            let is_enough =
                self.counters.source_bytes - before.source_bytes >= STAGED_BYTES_PER_POLL;
            if is_enough || self.counters.action_blocks > before.action_blocks {
                break;
            }
        }
        busy
    }

    /// Handles the completions of a queue, a bounded number of them; returns whether there were
    /// any. All sessions share the queue, so one that cannot be read ends them.
    fn take_completions<D: Device, M: Staging>(
        &mut self,
        io: &mut Io<'_, D, M>,
        cq: CqId,
        handle: impl Fn(&mut Target, &mut Io<'_, D, M>, &Completion),
    ) -> bool {
        let mut busy = false;
        for _ in 0..BATCHES_PER_POLL {
            let mut batch = ArrayVec::<Completion, COMPLETIONS_PER_BATCH>::new();
            let polled = io.device.poll_cq(cq, &mut batch);
            busy |= !batch.is_empty();
            batch.iter().for_each(|done| handle(self, io, done));
            if let Err(error) = polled {
                let open =
                    |(qpn, session): (&Qpn, &Session)| session.failed.is_none().then_some(*qpn);
                let open: Vec<_> = self.sessions.iter().filter_map(open).collect();
                busy |= !open.is_empty();
                open.into_iter().for_each(|qpn| self.fail(qpn, SessionFailure::Completions(error)));
            }
            if !batch.is_full() {
                break;
            }
        }
        busy
    }

    fn handle_sent<D: Device, M>(&mut self, io: &mut Io<'_, D, M>, done: &Completion) {
        let data_bytes = done.wr_id.checked_sub(DATA_WRITE).filter(|bytes| *bytes <= MOST_DATA);
        match (done.status, data_bytes) {
            (WcStatus::Success, _) => {}
            (WcStatus::RetryExceeded, Some(bytes)) => {
                self.fail(done.qpn, SessionFailure::Unacknowledged { bytes: bytes as u32 });
            }
            _ => self.fail(done.qpn, SessionFailure::QueuePair),
        }
        let Some(session) = self.sessions.get_mut(&done.qpn) else {
            return;
        };
        if data_bytes.is_some() {
            return;
        }
        let (slot, buffer) = ((done.wr_id >> 32) as u32, done.wr_id as u32);
        let Some(state) = session.slots.get_mut(slot as usize) else {
            return self.fail(done.qpn, SessionFailure::BadCompletion);
        };
        if *state != Slot::Sending(buffer) {
            return self.fail(done.qpn, SessionFailure::BadCompletion);
        }
        *state = Slot::Receiving;
        let receive = session.receive(slot);
        if buffer != NO_BUFFER {
            if let Some(State::Sending(_, bytes)) = self.buffers.get(buffer as usize) {
                session.gauge.delivered(io.now, *bytes);
            }
            self.release(buffer, Some(done.qpn));
        }
        if done.status == WcStatus::Success {
            let posted = io.device.post_recv(io.now, done.qpn, &[receive]);
            self.check(done.qpn, posted);
        }
    }

    fn handle_capsule<D: Device, M: Staging>(&mut self, io: &mut Io<'_, D, M>, done: &Completion) {
        let Some(session) = self.sessions.get_mut(&done.qpn) else {
            return;
        };
        if done.status != WcStatus::Success {
            return self.fail(done.qpn, SessionFailure::QueuePair);
        }
        if session.failed.is_some() {
            return;
        }
        let place = usize::try_from(done.wr_id).ok();
        match place.and_then(|place| session.slots.get_mut(place)) {
            Some(state @ Slot::Receiving) => *state = Slot::Serving,
            _ => return self.fail(done.qpn, SessionFailure::BadCompletion),
        }
        let slot = done.wr_id as u32;
        session.outstanding += 1;
        let Some(request) = received(io.memory, session.request_addr(slot), done)
            .and_then(|bytes| ReadRequest::decode(bytes, self.kernels.crc32c).ok())
        else {
            return self.refuse(io, done.qpn, slot, Refusal::BadCapsule);
        };
        if session.outstanding > session.memory.credits {
            return self.refuse_request(io, done.qpn, slot, &request, Refusal::NoCredit);
        }
        match session.admit(done.qpn, slot, request) {
            Ok(job) => session.pending.push_back(job),
            Err(reason) => self.refuse_request(io, done.qpn, slot, &request, reason),
        }
    }

    /// Gives free buffers to sessions in turn. A session that finds the disk full keeps its turn.
    fn start_reads<K: Disk>(&mut self, disk: &mut K) -> bool {
        let (mut started, mut bytes, mut passed) = (0, 0, 0);
        let share = self.share_units();
        while passed < self.turns.len() && started < READS_PER_POLL && bytes < READ_BYTES_PER_POLL {
            match self.turns.front().copied().map(|qpn| self.start_read(qpn, share, disk)) {
                Some(Turn::Taken(len)) => {
                    (started, bytes, passed) = (started + 1, bytes + len, 0);
                }
                Some(Turn::Passed) => passed += 1,
                Some(Turn::DiskFull) | None => break,
            }
            self.turns.rotate_left(1);
        }
        started > 0
    }

    /// Whole buffers that stay for sessions that hold none: those that are open, and one that opens
    /// later.
    fn reserved(&self) -> usize {
        (self.without_buffers + 1).min(self.staging.buffers() / 2)
    }

    /// The units of each session if those that use any or wait for some had equal parts of what a
    /// lone one may take.
    fn share_units(&self) -> u32 {
        let is_active = |session: &&Session| session.buffers > 0 || !session.pending.is_empty();
        let active = self.sessions.values().filter(is_active).count().max(1);
        let buffers = self.staging.buffers() - 1.min(self.staging.buffers() / 2);
        buffers as u32 * UNITS / active as u32
    }

    fn start_read<K: Disk>(&mut self, qpn: Qpn, share: u32, disk: &mut K) -> Turn {
        let kept = self.reserved();
        self.in_need = self.in_need.filter(|other| *other != qpn);
        let Some(session) = self.sessions.get_mut(&qpn) else {
            return Turn::Passed;
        };
        // What is reserved is whole buffers: parts of them would never become room for a large
        // block.
        let (first, whole) = (session.buffers == 0, self.staging.whole());
        let Some((index, missing)) = session.next_job(&self.proven, &self.proving) else {
            return Turn::Passed;
        };
        let job = session.pending[index];
        let units = if missing.is_some() { UNITS } else { job.units() };
        let is_below_share = session.units < share;
        let may_take = first || whole >= kept && (is_below_share || self.in_need.is_none());
        let found = may_take.then(|| self.staging.find(units, first || whole > kept));
        let Some(buffer) = found.flatten() else {
            if is_below_share {
                self.in_need = Some(qpn);
            }
            return Turn::Passed;
        };
        let addr = self.base_addr + offset_of(buffer);
        let read = match missing {
            Some(block) => whole_block(job.file, block, addr, u64::from(buffer)),
            None => job.read(addr, u64::from(buffer)),
        };
        if disk.submit(read).is_err() {
            return Turn::DiskFull;
        }
        session.pending.remove(index);
        self.without_buffers -= usize::from(session.buffers == 0);
        session.buffers += 1;
        session.units += units;
        self.staging.take(buffer, units);
        self.buffers[buffer as usize] = match missing {
            Some(block) => {
                self.proving.push((job.file, block));
                State::Proving(job, block)
            }
            None => State::Reading(job),
        };
        Turn::Taken(if missing.is_some() { SUM_BYTES as u32 } else { job.len })
    }

    fn handle_read<D: Device, M: Staging, K: Disk>(
        &mut self,
        io: &mut Io<'_, D, M>,
        disk: &K,
        done: DiskDone,
    ) {
        let buffer = done.tag as u32;
        let (mut job, block) = match self.buffers.get(buffer as usize) {
            Some(State::Reading(job)) => (*job, None),
            Some(State::Proving(job, block)) => {
                let (job, block) = (*job, *block);
                self.no_longer_proving(&job, block);
                (job, Some(block))
            }
            Some(State::Orphan) => return self.release(buffer, None),
            _ => return,
        };
        if self.sessions.get(&job.qpn).is_none_or(|session| session.failed.is_some()) {
            return self.release(buffer, Some(job.qpn));
        }
        let got = match done.result {
            Ok(got) => got,
            Err(DiskFault::Io(errno)) => {
                return self.respond(io, buffer, &job, Outcome::Storage { errno });
            }
        };
        self.counters.source_bytes += u64::from(got);
        job.read_bytes = job.read_bytes.saturating_add(got);
        let checked = match block {
            Some(block) => self.prove(io.memory, disk, buffer, &mut job, block, got),
            None => self.check_read(io.memory, disk, buffer, &job, got),
        };
        let outcome = match checked {
            Ok(true) => self.run_stages(io, buffer, &job),
            Ok(false) => {
                if let Some(session) = self.sessions.get_mut(&job.qpn) {
                    session.pending.push_front(job);
                }
                return self.release(buffer, Some(job.qpn));
            }
            Err(outcome) => outcome,
        };
        self.respond(io, buffer, &job, outcome);
    }

    fn no_longer_proving(&mut self, job: &Job, block: u64) {
        let read = |proving: &(FileId, u64)| *proving == (job.file, block);
        if let Some(index) = self.proving.iter().position(read) {
            self.proving.swap_remove(index);
        }
    }

    /// Compares a block that was read whole with its manifest. False: there is more to read for the
    /// job.
    fn prove<M: Staging, K: Disk>(
        &mut self,
        memory: &M,
        disk: &K,
        buffer: u32,
        job: &mut Job,
        block: u64,
        got: u32,
    ) -> Result<bool, Outcome> {
        let bytes = memory.bytes(self.buffer_addr(buffer), got as usize);
        let session = self.sessions.get(&job.qpn);
        let Some(sums) = session.and_then(|session| session.sums(job)) else {
            return Err(Outcome::Refused(Refusal::UnknownSource));
        };
        let proof = self.proven.prove(sums, block, bytes, self.kernels.crc32c);
        proof.map_err(|error| differs(disk, job, sums, error))?;
        self.counters.proven_blocks += 1;
        let (range, whole) = (job.range(), sums.range(block));
        let all_here = whole.start <= range.start && range.end <= whole.end;
        if all_here {
            job.at = (range.start - whole.start) as u32;
        }
        Ok(all_here)
    }

    /// Checks that every byte was read, and that the file is what it was. False: a block of it has
    /// to be proven again.
    fn check_read<M: Staging, K: Disk>(
        &self,
        memory: &M,
        disk: &K,
        buffer: u32,
        job: &Job,
        got: u32,
    ) -> Result<bool, Outcome> {
        let sums = self.sessions.get(&job.qpn).and_then(|session| session.sums(job));
        if sums.is_none()
            && let Some(change) = disk.change(job.file)
        {
            return Err(Outcome::Changed(change));
        }
        if got < job.head() + job.len {
            let read = job.first_byte - u64::from(job.head()) + u64::from(got);
            // A read beyond the new end of the file only shows that the end is before it.
            let at_byte = disk.len_now(job.file).map_or(read, |end| end.min(read));
            return Err(Outcome::Truncated { at_byte });
        }
        let Some(sums) = sums else {
            return Ok(true);
        };
        let bytes = memory.bytes(self.buffer_addr(buffer), got as usize);
        let checked = self.proven.check(sums, &job.range(), bytes, self.kernels.crc32c);
        checked.map_err(|error| differs(disk, job, sums, error))
    }

    /// Runs the stages of the session over a block whose bytes were checked.
    fn run_stages<D, M: Staging>(
        &mut self,
        io: &mut Io<'_, D, M>,
        buffer: u32,
        job: &Job,
    ) -> Outcome {
        let addr = self.buffer_addr(buffer) + u64::from(job.at);
        let session = self.sessions.get_mut(&job.qpn);
        let Some(Session { sources, gauge, .. }) = session else {
            return Outcome::Refused(Refusal::UnknownSource);
        };
        let Some(source) = sources.get(job.request.source as usize) else {
            return Outcome::Refused(Refusal::UnknownSource);
        };
        let compression = source.stages.compression();
        let compresses = compression.is_some_and(|how| how.always || gauge.pays());
        let (now, block) = (io.now, io.memory.bytes_mut(addr, job.len as usize));
        let received = Received::stored(job.len as usize, source.stages.stored());
        let (kernels, scratch, table) = (&self.kernels, &mut self.scratch, &source.table);
        let (action, first_token) = (source.action.as_deref(), job.request.first_token);
        self.counters.action_blocks += u64::from(action.is_some());
        let mut tools = Tools { kernels, scratch, table, action, first_token, compresses };
        match stage::run(source.stages.over_blocks(), block, received, &mut tools) {
            Ok(ran) => {
                if let Some(encoding) = &ran.encoding {
                    gauge.compressed(now, encoding);
                }
                self.counters.count(&ran, compression.is_some());
                let Received { bytes, crc32c, bits, codec, replaced, .. } = ran.block;
                let (bytes, source_bytes) = (bytes as u32, job.read_bytes);
                Outcome::Done { bytes, crc32c, source_bytes, bits, codec, replaced }
            }
            Err(BlockError::Overflow { index, value, stage }) => {
                Outcome::Overflow { token: job.request.first_token + index as u64, value, stage }
            }
            Err(BlockError::Action(fault)) => Outcome::Action { token: first_token, fault },
            Err(BlockError::Damaged | BlockError::Unsupported) => {
                Outcome::Refused(Refusal::BadType)
            }
        }
    }

    fn respond<D: Device, M: Staging>(
        &mut self,
        io: &mut Io<'_, D, M>,
        buffer: u32,
        job: &Job,
        outcome: Outcome,
    ) {
        let mut held = NO_BUFFER;
        match outcome {
            Outcome::Done { bytes, .. } => {
                let Some(write) = self.data_write(buffer, job, bytes) else {
                    return self.release(buffer, Some(job.qpn));
                };
                let posted = io.device.post_send(io.now, job.qpn, &[write]);
                if !self.check(job.qpn, posted) {
                    return self.release(buffer, Some(job.qpn));
                }
                self.counters.done += 1;
                self.counters.written_bytes += u64::from(bytes);
                if let Some(session) = self.sessions.get_mut(&job.qpn) {
                    session.served.requests += 1;
                    session.served.bytes += u64::from(bytes);
                    session.gauge.sent(io.now);
                }
                self.buffers[buffer as usize] = State::Sending(job.qpn, bytes);
                held = buffer;
            }
            Outcome::Overflow { .. } => self.counters.overflow += 1,
            Outcome::Truncated { .. } => self.counters.truncated += 1,
            Outcome::Storage { .. } => self.counters.storage_errors += 1,
            Outcome::Changed(_) => self.counters.changed_files += 1,
            Outcome::Action { .. } => self.counters.action_faults += 1,
            Outcome::Refused(_) => {}
        }
        if held == NO_BUFFER {
            self.release(buffer, Some(job.qpn));
        }
        let ReadRequest { seq, tag, .. } = job.request;
        let response = ReadResponse { seq, tag, outcome };
        // If this fails the WRITE may still be sent, so the buffer is freed when the session
        // closes.
        self.send(io, job.qpn, job.slot, held, &response);
    }

    /// The WRITE of a buffer into the reader's memory, if the session is open.
    fn data_write(&self, buffer: u32, job: &Job, bytes: u32) -> Option<SendWr> {
        let lkey = self.sessions.get(&job.qpn)?.memory.staging_lkey;
        let addr = self.buffer_addr(buffer) + u64::from(job.at);
        let ReadRequest { remote_addr, rkey, .. } = job.request;
        Some(SendWr {
            wr_id: DATA_WRITE + u64::from(bytes),
            op: SendOp::Write { remote_addr, rkey },
            sges: SgList::from_iter([Sge { addr, len: bytes, lkey }]),
            signaled: false,
            solicited: false,
            ..SendWr::default()
        })
    }

    fn refuse_request<D: Device, M: Staging>(
        &mut self,
        io: &mut Io<'_, D, M>,
        qpn: Qpn,
        slot: u32,
        request: &ReadRequest,
        reason: Refusal,
    ) {
        self.counters.refused[reason as usize - 1] += 1;
        let outcome = Outcome::Refused(reason);
        let response = ReadResponse { seq: request.seq, tag: request.tag, outcome };
        self.send(io, qpn, slot, NO_BUFFER, &response);
    }

    fn refuse<D: Device, M: Staging>(
        &mut self,
        io: &mut Io<'_, D, M>,
        qpn: Qpn,
        slot: u32,
        reason: Refusal,
    ) {
        self.counters.refused[reason as usize - 1] += 1;
        let response = ReadResponse { seq: 0, tag: u32::MAX, outcome: Outcome::Refused(reason) };
        self.send(io, qpn, slot, NO_BUFFER, &response);
    }

    fn send<D: Device, M: Staging>(
        &mut self,
        io: &mut Io<'_, D, M>,
        qpn: Qpn,
        slot: u32,
        buffer: u32,
        response: &ReadResponse,
    ) {
        let Some(session) = self.sessions.get_mut(&qpn) else {
            return;
        };
        session.outstanding = session.outstanding.saturating_sub(1);
        let addr = session.response_addr(slot);
        io.memory
            .bytes_mut(addr, CAPSULE_BYTES)
            .copy_from_slice(&response.encode(self.kernels.crc32c));
        let wr = SendWr {
            wr_id: (u64::from(slot) << 32) | u64::from(buffer),
            op: SendOp::Send,
            sges: SgList::from_iter([Sge {
                addr,
                len: CAPSULE_BYTES as u32,
                lkey: session.memory.capsules.lkey,
            }]),
            signaled: true,
            solicited: true,
            ..SendWr::default()
        };
        if let Some(state) = session.slots.get_mut(slot as usize) {
            *state = Slot::Sending(buffer);
        }
        let posted = io.device.post_send(io.now, qpn, &[wr]);
        self.check(qpn, posted);
    }

    /// Whether a work request was accepted. A session that cannot post has failed.
    fn check(&mut self, qpn: Qpn, posted: Result<(), PostError>) -> bool {
        if posted.is_err() {
            self.fail(qpn, SessionFailure::QueuePair);
        }
        posted.is_ok()
    }

    /// Counts the failure and drops the pending requests of the session.
    fn fail(&mut self, qpn: Qpn, why: SessionFailure) {
        match why {
            SessionFailure::QueuePair | SessionFailure::Unacknowledged { .. } => {
                self.counters.failed_work_requests += 1;
            }
            SessionFailure::BadCompletion => self.counters.bad_completions += 1,
            SessionFailure::Completions(_) => {}
        }
        if let Some(session) = self.sessions.get_mut(&qpn)
            && session.failed.is_none()
        {
            session.failed = Some(why);
            session.pending.clear();
            self.failed.push_back((qpn, why));
        }
    }

    fn buffer_addr(&self, buffer: u32) -> u64 {
        self.base_addr + offset_of(buffer)
    }

    /// Frees a buffer held by the session `owner`, if that is still open.
    fn release(&mut self, buffer: u32, owner: Option<Qpn>) {
        self.buffers[buffer as usize] = State::Free;
        let units = self.staging.give_back(buffer);
        if let Some(session) = owner.and_then(|qpn| self.sessions.get_mut(&qpn)) {
            session.buffers -= 1;
            session.units -= units;
            self.without_buffers += usize::from(session.buffers == 0);
        }
    }
}

/// The message of a peer's SEND in the receive at `addr`. A WRITE with immediate data completes a
/// receive as well, but places nothing there, and its length is that of the WRITE.
pub(crate) fn received<'m, M: Staging>(
    memory: &'m M,
    addr: u64,
    done: &Completion,
) -> Option<&'m [u8]> {
    let sent = done.opcode == WcOpcode::Recv && done.byte_len as usize <= CAPSULE_BYTES;
    sent.then(|| memory.bytes(addr, done.byte_len as usize))
}

/// The read of a whole block of a manifest.
fn whole_block(file: FileId, block: u64, addr: u64, tag: u64) -> DiskRead {
    DiskRead { file, offset: block * SUM_BYTES, len: SUM_BYTES as u32, addr, tag }
}

/// The outcome of a request for bytes that differ from the manifest.
fn differs<K: Disk>(disk: &K, job: &Job, sums: &FileSums, Differs { at_byte }: Differs) -> Outcome {
    let len = disk.len_now(job.file).filter(|len| *len < sums.bytes());
    Outcome::Changed(len.map_or(Change::Block { at_byte }, |len| Change::Written { len }))
}

fn offset_of(buffer: u32) -> u64 {
    u64::from(buffer) * u64::from(UNIT_BYTES)
}
