//! A reader whose blocks come from storage targets, over queue pairs.
//!
//! A lost connection is not an error of the stream: it is reported through
//! [`Reader::lost_connection`], blocks that have arrived are kept, and the missing ones are
//! requested once [`Reader::connect`] supplies a new queue pair.

use alloc::vec::Vec;

use arrayvec::ArrayVec;
use roce::Time;
use roce::device::Device;
use roce::verbs::{Completion, CqId, MemoryRegion, Qpn, VerbsError, WcStatus};
use roce::world::Staging;

use crate::capsule::{Outcome, Refusal};
use crate::kernel::{Crc32c, Kernels};
use crate::order::StreamOrder;
use crate::stage::Received;

use super::assembler::{Assembler, Supply};
use super::connection::{Connection, ConnectionMemory, Io, Response};
use super::lane::{Lane, Want};
use super::{
    BLOCK_BYTES_PER_POLL, BLOCKS_PER_POLL, BlockRef, ReaderCounters, ReaderSetup, ReaderSource,
    Sink, StreamError,
};

/// Request completions taken from their queue at once, and how often in one [`Reader::poll`].
const SENT_PER_BATCH: usize = 32;
const BATCHES_PER_POLL: u32 = 8;

/// Registered memory and queues of a reader.
#[derive(Clone, Copy, Debug)]
pub struct ReaderResources {
    /// Staging buffers of all lanes: [`ReaderSetup::memory_bytes`], remote write.
    pub data: MemoryRegion,
    /// Completion queue of sends, this reader's alone.
    pub send_cq: CqId,
    /// Completion queue of receives, this reader's alone.
    pub recv_cq: CqId,
}

/// One stream.
#[derive(Debug)]
pub struct Reader {
    assembler: Assembler,
    connections: Vec<Connection>,
    data: MemoryRegion,
    send_cq: CqId,
    recv_cq: CqId,
}

/// Requests over the connections.
struct Requests<'a, 'i, D, M> {
    connections: &'a mut [Connection],
    io: &'a mut Io<'i, D, M>,
    /// Key of the staging buffers.
    rkey: u32,
    crc: Crc32c,
}

impl<D: Device, M: Staging> Supply for Requests<'_, '_, D, M> {
    fn has_room(&self, source: &ReaderSource) -> bool {
        self.connections[source.connection as usize].can_send()
    }

    fn request(&mut self, source: &ReaderSource, block_ref: BlockRef, want: &Want) -> bool {
        let connection = &mut self.connections[source.connection as usize];
        connection.send_request(self.io, block_ref, want.request(source, self.rkey), self.crc)
    }
}

impl Reader {
    /// Bytes of staging buffers for a stream over these sources.
    pub fn memory_needed(order: &StreamOrder, sources: &[ReaderSource]) -> u64 {
        let lanes = sources.iter().enumerate();
        lanes.map(|(lane, source)| Lane::bytes_needed(order, source.dataset(lane), source)).sum()
    }

    /// A reader with room for `connections` connections.
    pub fn new(
        setup: ReaderSetup,
        connections: u32,
        resources: ReaderResources,
        kernels: Kernels,
    ) -> Reader {
        let ReaderResources { data, send_cq, recv_cq } = resources;
        let assembler = Assembler::new(setup, data.addr, kernels);
        let connections = (0..connections).map(|_| Connection::default()).collect();
        Reader { assembler, connections, data, send_cq, recv_cq }
    }

    /// Counters since the start.
    pub fn counters(&self) -> &ReaderCounters {
        &self.assembler.counters
    }

    /// Staging buffers without a block; all of them once the last batch is written.
    pub fn free_buffers(&self) -> usize {
        self.assembler.free_buffers()
    }

    /// Staging buffers in all.
    pub fn buffer_count(&self) -> usize {
        self.assembler.buffer_count()
    }

    /// Number of the next batch to be written.
    pub fn next_batch(&self) -> u64 {
        self.assembler.next_batch()
    }

    /// Whether the stream has ended, with or without an error.
    pub fn has_ended(&self) -> bool {
        self.assembler.has_ended()
    }

    /// Assigns a queue pair to connection `index`: the first one, or a replacement for a lost one.
    /// The caller has destroyed the lost one, so that none of its packets reaches our memory.
    pub fn connect<D: Device>(
        &mut self,
        now: Time,
        device: &mut D,
        index: u32,
        qpn: Qpn,
        memory: ConnectionMemory,
    ) -> Result<(), VerbsError> {
        if index as usize >= self.connections.len() {
            return Ok(());
        }
        self.requeue_requests(index as usize);
        self.connections[index as usize].open(now, device, qpn, memory)
    }

    /// Schedules the outstanding requests of a connection again, and closes it.
    fn requeue_requests(&mut self, index: usize) {
        for block_ref in self.connections[index].forget_requests() {
            self.assembler.request_again(&block_ref);
        }
    }

    /// A connection whose queue pair failed since the last call; the caller destroys that queue
    /// pair.
    pub fn lost_connection(&mut self) -> Option<(u32, Qpn, WcStatus)> {
        let index = self.connections.iter().position(Connection::is_lost)?;
        let (qpn, why) = self.connections[index].take_lost()?;
        self.requeue_requests(index);
        self.assembler.counters.lost_connections += 1;
        Some((index as u32, qpn, why))
    }

    /// Marks the connection as lost, as when its control channel closed.
    pub fn drop_connection(&mut self, index: u32) {
        if let Some(connection) = self.connections.get_mut(index as usize) {
            connection.lose(WcStatus::RemoteOperationError);
        }
    }

    /// Abandons a connection that could not be restored: the stream ends with an error, unless it
    /// has ended before.
    pub fn abandon<S: Sink>(&mut self, sink: &mut S, connection: u32) {
        self.assembler.end_with(sink, &StreamError::Lost { connection });
    }

    /// Ends the stream after the batches that are whole. The caller ends its rings.
    pub fn stop<S: Sink>(&mut self, sink: &mut S) {
        self.assembler.stop(sink);
    }

    /// Does all work possible now. Returns whether there was any.
    pub fn poll<D: Device, M: Staging, S: Sink>(
        &mut self,
        now: Time,
        device: &mut D,
        memory: &mut M,
        sink: &mut S,
    ) -> bool {
        if self.assembler.has_ended() {
            return false;
        }
        let io = &mut Io { now, device, memory };
        let mut busy = match self.take_completions(io) {
            Ok(busy) => busy,
            Err(error) => {
                self.assembler.end_with(sink, &StreamError::Device(error));
                return true;
            }
        };
        busy |= self.send_requests(io);
        busy |= self.assembler.copy(io.memory, sink);
        // Copying frees buffers, and reaches samples that have to be requested one by one.
        busy |= !self.assembler.has_ended() && self.send_requests(io);
        busy
    }

    /// Whether there were any.
    fn take_completions<D: Device, M: Staging>(
        &mut self,
        io: &mut Io<'_, D, M>,
    ) -> Result<bool, VerbsError> {
        let mut busy = false;
        for _ in 0..BATCHES_PER_POLL {
            let mut sent = ArrayVec::<_, SENT_PER_BATCH>::new();
            io.device.poll_cq(self.send_cq, &mut sent)?;
            busy |= !sent.is_empty();
            for done in &sent {
                let Some(index) = self.connection_of(done.qpn) else {
                    continue;
                };
                let is_possible = self.connections[index].handle_sent(done);
                let counters = &mut self.assembler.counters;
                counters.bad_completions += u64::from(!is_possible);
                counters.acknowledged_requests += u64::from(done.status == WcStatus::Success);
            }
            if !sent.is_full() {
                break;
            }
        }
        // A response may bring a block for our stages.
        let arrived = self.assembler.counters.wire_bytes;
        for _ in 0..BLOCKS_PER_POLL {
            let mut response = ArrayVec::<_, 1>::new();
            io.device.poll_cq(self.recv_cq, &mut response)?;
            busy |= !response.is_empty();
            response.iter().for_each(|done| self.take_response(io, done));
            let bytes = self.assembler.counters.wire_bytes - arrived;
            if response.is_empty() || bytes >= BLOCK_BYTES_PER_POLL {
                break;
            }
        }
        Ok(busy)
    }

    fn take_response<D: Device, M: Staging>(&mut self, io: &mut Io<'_, D, M>, done: &Completion) {
        let Some(index) = self.connection_of(done.qpn) else {
            return;
        };
        match self.connections[index].handle_response(io, done, self.assembler.kernels.crc32c) {
            Response::To(block_ref, outcome) => self.settle(io.memory, index, &block_ref, outcome),
            Response::Bad => self.assembler.counters.bad_responses += 1,
            Response::Impossible => self.assembler.counters.bad_completions += 1,
            Response::Lost => {}
        }
    }

    fn connection_of(&self, qpn: Qpn) -> Option<usize> {
        self.connections.iter().position(|connection| connection.qpn() == Some(qpn))
    }

    /// Applies the outcome of a request to its block.
    fn settle<M: Staging>(
        &mut self,
        memory: &mut M,
        index: usize,
        block_ref: &BlockRef,
        outcome: Outcome,
    ) {
        match outcome {
            Outcome::Done { bytes, crc32c, source_bytes, bits, codec, replaced } => {
                let counters = &mut self.assembler.counters;
                counters.source_bytes += u64::from(source_bytes);
                counters.wire_bytes += u64::from(bytes);
                let (bytes, tokens) = (bytes as usize, 0);
                let received = Received { bytes, tokens, crc32c, bits, codec, replaced };
                // The files of `remap` and `wasm` lie at the target.
                self.assembler.arrived(memory, block_ref, received, &[], None);
            }
            // The target and we disagree on the state of the connection.
            Outcome::Refused(Refusal::BadCapsule | Refusal::Replayed | Refusal::NoCredit) => {
                self.lose_connection(index, block_ref, WcStatus::RemoteInvalidRequest);
            }
            reported => match self.error_of(block_ref, reported) {
                Some(error) => self.assembler.fail(block_ref, error),
                None => {
                    self.assembler.counters.bad_responses += 1;
                    self.lose_connection(index, block_ref, WcStatus::BadResponse);
                }
            },
        }
    }

    fn lose_connection(&mut self, index: usize, block_ref: &BlockRef, why: WcStatus) {
        self.assembler.request_again(block_ref);
        self.connections[index].lose(why);
    }

    /// The error reported by a response; none if it cannot be true of the requested block.
    fn error_of(&mut self, block_ref: &BlockRef, reported: Outcome) -> Option<StreamError> {
        let dataset = block_ref.lane;
        let tokens = self.assembler.tokens(block_ref)?;
        let source = &self.assembler.sources[dataset as usize];
        match reported {
            Outcome::Overflow { token, value, stage } => {
                let stage = source.stages.target().over_blocks().get(usize::from(stage));
                let limit = stage.and_then(|stage| stage.limit(value))?;
                let possible = tokens.contains(&token);
                possible.then(|| self.assembler.overflow(dataset, token, value, limit))
            }
            Outcome::Truncated { at_byte } => (at_byte
                < self.assembler.byte_of(dataset, tokens.end))
            .then_some(StreamError::Truncated { dataset, at_byte }),
            Outcome::Changed(change) => {
                let wanted = self.assembler.byte_of(dataset, tokens.start)
                    ..self.assembler.byte_of(dataset, tokens.end);
                self.assembler.change(dataset, wanted, change)
            }
            Outcome::Action { token, fault } => {
                let possible = source.stages.target().has_user_action() && token == tokens.start;
                let first_token = tokens.start;
                possible.then_some(StreamError::Action { dataset, first_token, fault })
            }
            Outcome::Storage { errno } => Some(StreamError::Storage { dataset, errno }),
            Outcome::Refused(reason) => Some(StreamError::Refused { dataset, reason }),
            Outcome::Done { .. } => None,
        }
    }

    fn send_requests<D: Device, M: Staging>(&mut self, io: &mut Io<'_, D, M>) -> bool {
        let (rkey, crc) = (self.data.rkey, self.assembler.kernels.crc32c);
        let connections = &mut self.connections;
        self.assembler.request_blocks(&mut Requests { connections, io, rkey, crc })
    }
}
