//! A reader whose blocks come from files of this machine.
//!
//! The same order, stages and batches as over the wire (C4), without a network: the disk reads a block
//! straight into its staging buffer. No checksum is added, because nothing lies between disk and buffer.

use alloc::vec::Vec;

use roce::world::Staging;

use crate::disk::{Disk, DiskDone, DiskFault, DiskRead, FileId};
use crate::kernel::Kernels;

use super::assembler::{Assembler, BlockRef, Supply};
use super::lane::Want;
use super::{
    BLOCK_BYTES_PER_POLL, BLOCKS_PER_POLL, ReaderCounters, ReaderSetup, ReaderSource, Sink,
    StreamError,
};

/// A read that the disk has accepted.
#[derive(Clone, Copy, Debug)]
struct Pending {
    block_ref: BlockRef,
    file: FileId,
    offset: u64,
    len: u32,
}

/// One stream over local files. `source` of each [`ReaderSource`] is an index into its files.
#[derive(Debug)]
pub struct LocalReader {
    assembler: Assembler,
    reads: Reads,
}

/// The reads under way.
#[derive(Debug)]
struct Reads {
    files: Vec<FileId>,
    /// By tag.
    pending: Vec<Option<Pending>>,
    free: Vec<u32>,
}

/// Reads through a disk.
struct Requests<'a, K> {
    reads: &'a mut Reads,
    disk: &'a mut K,
}

impl<K: Disk> Supply for Requests<'_, K> {
    fn has_room(&self, _: &ReaderSource) -> bool {
        !self.reads.free.is_empty()
    }

    fn request(&mut self, source: &ReaderSource, block_ref: BlockRef, want: &Want) -> bool {
        let (Some(&file), Some(tag)) =
            (self.reads.files.get(source.source as usize), self.reads.free.pop())
        else {
            return false;
        };
        let (offset, len) = want.range_in(&source.layout.file);
        let read = DiskRead { file, offset, len, addr: want.addr, tag: tag.into() };
        if self.disk.submit(read).is_err() {
            self.reads.free.push(tag);
            return false;
        }
        self.reads.pending[tag as usize] = Some(Pending { block_ref, file, offset, len });
        true
    }
}

impl LocalReader {
    /// A reader with up to `depth` reads under way, whose staging buffers
    /// ([`ReaderSetup::memory_bytes`]) start at `memory_addr`.
    pub fn new(
        setup: ReaderSetup,
        files: Vec<FileId>,
        depth: u32,
        memory_addr: u64,
        kernels: Kernels,
    ) -> LocalReader {
        let pending = (0..depth).map(|_| None).collect();
        let reads = Reads { files, pending, free: (0..depth).rev().collect() };
        LocalReader { assembler: Assembler::new(setup, memory_addr, kernels), reads }
    }

    /// Counters since the start.
    pub fn counters(&self) -> &ReaderCounters {
        &self.assembler.counters
    }

    /// Whether the stream has ended, with or without an error.
    pub fn has_ended(&self) -> bool {
        self.assembler.has_ended()
    }

    /// Does a bounded amount of work. Returns whether there was any.
    pub fn poll<K: Disk, M: Staging, S: Sink>(
        &mut self,
        disk: &mut K,
        memory: &mut M,
        sink: &mut S,
    ) -> bool {
        if self.has_ended() {
            return false;
        }
        // A read may bring a block for our stages.
        let (arrived, mut busy) = (self.assembler.counters.source_bytes, false);
        for _ in 0..BLOCKS_PER_POLL {
            let Some(done) = disk.poll() else { break };
            busy = true;
            self.settle(disk, memory, &done);
            if self.assembler.counters.source_bytes - arrived >= BLOCK_BYTES_PER_POLL {
                break;
            }
        }
        busy |= self.request_blocks(disk);
        busy |= self.assembler.copy(memory, sink);
        // Copying frees buffers, and reaches samples that have to be read one by one.
        busy |= !self.has_ended() && self.request_blocks(disk);
        busy
    }

    fn request_blocks<K: Disk>(&mut self, disk: &mut K) -> bool {
        let reads = &mut self.reads;
        self.assembler.request_blocks(&mut Requests { reads, disk })
    }

    fn settle<K: Disk, M: Staging>(&mut self, disk: &K, memory: &mut M, done: &DiskDone) {
        let tag = usize::try_from(done.tag).ok();
        let pending = tag.and_then(|tag| self.reads.pending.get_mut(tag)).and_then(Option::take);
        let Some(Pending { block_ref, file, offset, len }) = pending else {
            return;
        };
        self.reads.free.push(done.tag as u32);
        let dataset = block_ref.lane;
        match done.result {
            Ok(bytes) if bytes == len => {
                self.assembler.counters.source_bytes += u64::from(bytes);
                self.assembler.arrived(memory, &block_ref, bytes, 0);
            }
            Ok(bytes) => {
                let read = offset + u64::from(bytes);
                // Less may be left than was read before.
                let at_byte = disk.len_now(file).map_or(read, |len| len.min(read));
                self.assembler.fail(&block_ref, StreamError::Truncated { dataset, at_byte });
            }
            Err(DiskFault::Io(errno)) => {
                self.assembler.fail(&block_ref, StreamError::Storage { dataset, errno });
            }
        }
    }
}
