//! A reader whose blocks come from files of this machine.
//!
//! The same order, stages and batches as over the wire (C4), without a network: the disk reads a
//! block straight into its staging buffer. No checksum is added, because nothing lies between disk
//! and buffer.
//!
//! Of a file with a manifest whole pages are read and compared with it ([`crate::sums`]); blocks of
//! the manifest that have to be read whole go into [`PROOF_BUFFERS`] of their own. Of any other
//! file the disk is asked after each read whether it has changed since it was opened.

use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use roce::world::Staging;

use crate::disk::{Change, Disk, DiskDone, DiskFault, DiskRead, FileId};
use crate::kernel::{Kernels, TokenMap};
use crate::stage::Received;
use crate::sums::{self, Differs, FileSums, Proven, SUM_BYTES};

use super::assembler::{Assembler, Supply};
use super::lane::Want;
use super::{
    BLOCK_BYTES_PER_POLL, BLOCKS_PER_POLL, BlockRef, ReaderCounters, ReaderSetup, ReaderSource,
    Sink, StreamError,
};

/// Blocks of manifests that are read whole at a time.
pub const PROOF_BUFFERS: u32 = 2;

/// Tags of the reads of whole blocks follow this one.
const FIRST_PROOF: u64 = 1 << 32;

/// A file of a [`LocalReader`].
#[derive(Clone, Debug)]
pub struct LocalFile {
    /// The open file.
    pub file: FileId,
    /// What its manifest says of its bytes, if it has one. Its source then reads whole pages.
    pub sums: Option<FileSums>,
}

/// A block that was asked for.
#[derive(Clone, Debug)]
struct Pending {
    block_ref: BlockRef,
    /// Index in the files.
    source: usize,
    /// Where its tokens are in the file.
    bytes: Range<u64>,
    /// Where they go.
    addr: u64,
}

/// One stream over local files. `source` of each [`ReaderSource`] is an index into its files.
#[derive(Debug)]
pub struct LocalReader {
    assembler: Assembler,
    reads: Reads,
    /// The table of `remap`; empty without one.
    table: Arc<[u32]>,
    /// The user action of `wasm`; none without one.
    action: Option<Arc<dyn TokenMap>>,
    proven: Proven,
}

/// The reads under way.
#[derive(Debug)]
struct Reads {
    files: Vec<LocalFile>,
    /// By tag.
    pending: Vec<Option<Pending>>,
    free: Vec<u32>,
    /// Tags of blocks whose read is not under way.
    waiting: VecDeque<u32>,
    /// For each of the buffers from `proof_addr` on the source and the block read into it.
    proofs: [Option<(usize, u64)>; PROOF_BUFFERS as usize],
    proof_addr: u64,
}

/// Takes what the reader asks for; reads start in [`Reads::start`].
struct Requests<'a> {
    reads: &'a mut Reads,
}

impl Supply for Requests<'_> {
    fn has_room(&self, _: &ReaderSource) -> bool {
        !self.reads.free.is_empty()
    }

    fn request(&mut self, source: &ReaderSource, block_ref: BlockRef, want: &Want) -> bool {
        let (offset, len) = want.range_in(&source.layout.file);
        let bytes = offset..offset + u64::from(len);
        let (source, addr) = (source.source as usize, want.addr);
        if source >= self.reads.files.len() {
            return false;
        }
        let Some(tag) = self.reads.free.pop() else {
            return false;
        };
        self.reads.pending[tag as usize] = Some(Pending { block_ref, source, bytes, addr });
        self.reads.waiting.push_back(tag);
        true
    }
}

impl Reads {
    /// Starts the reads of waiting blocks, and of the blocks of manifests that they need first.
    fn start<K: Disk>(&mut self, disk: &mut K, proven: &Proven) {
        for _ in 0..self.waiting.len() {
            let Some(tag) = self.waiting.pop_front() else { return };
            if !self.start_one(disk, proven, tag) {
                self.waiting.push_back(tag);
            }
        }
    }

    /// Whether the block's own read has started.
    fn start_one<K: Disk>(&mut self, disk: &mut K, proven: &Proven, tag: u32) -> bool {
        let Some(Pending { source, bytes, addr, .. }) = &self.pending[tag as usize] else {
            return true;
        };
        let LocalFile { file, sums } = &self.files[*source];
        let (file, tag) = (*file, u64::from(tag));
        let Some(sums) = sums else {
            let len = (bytes.end - bytes.start) as u32;
            return disk
                .submit(DiskRead { file, offset: bytes.start, len, addr: *addr, tag })
                .is_ok();
        };
        let Some(block) = proven.missing(sums, bytes) else {
            let pages = sums::pages_of(bytes);
            let (len, head) = ((pages.end - pages.start) as u32, bytes.start - pages.start);
            let read = DiskRead { file, offset: pages.start, len, addr: addr - head, tag };
            return disk.submit(read).is_ok();
        };
        let proof = Some((*source, block));
        if self.proofs.contains(&proof) {
            return false;
        }
        let Some(buffer) = self.proofs.iter().position(Option::is_none) else {
            return false;
        };
        let (offset, len) = (block * SUM_BYTES, SUM_BYTES as u32);
        let (addr, tag) = (self.proof_buffer(buffer), FIRST_PROOF + buffer as u64);
        if disk.submit(DiskRead { file, offset, len, addr, tag }).is_ok() {
            self.proofs[buffer] = proof;
        }
        false
    }

    fn proof_buffer(&self, buffer: usize) -> u64 {
        self.proof_addr + buffer as u64 * SUM_BYTES
    }
}

impl LocalReader {
    /// Bytes of memory for a stream over these files.
    pub fn memory_bytes(setup: &ReaderSetup, has_manifest: bool) -> u64 {
        let proofs = if has_manifest { u64::from(PROOF_BUFFERS) * SUM_BYTES } else { 0 };
        setup.memory_bytes() + proofs
    }

    /// A reader with up to `depth` blocks asked for, whose memory ([`LocalReader::memory_bytes`])
    /// starts at `memory_addr`. The disk takes [`PROOF_BUFFERS`] reads more.
    pub fn new(
        setup: ReaderSetup,
        files: Vec<LocalFile>,
        depth: u32,
        memory_addr: u64,
        kernels: Kernels,
    ) -> LocalReader {
        let reads = Reads {
            files,
            pending: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            waiting: VecDeque::with_capacity(depth as usize),
            proofs: [None; PROOF_BUFFERS as usize],
            proof_addr: memory_addr + setup.memory_bytes(),
        };
        let assembler = Assembler::new(setup, memory_addr, kernels);
        let (table, proven) = (Arc::default(), Proven::default());
        LocalReader { assembler, reads, table, action: None, proven }
    }

    /// Sets the table of `remap`, whose entries fit the types of the files.
    pub fn set_table(&mut self, table: Arc<[u32]>) {
        self.table = table;
    }

    /// Sets the user action of `wasm`.
    pub fn set_action(&mut self, action: Option<Arc<dyn TokenMap>>) {
        self.action = action;
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
        busy |= !self.assembler.has_ended() && self.request_blocks(disk);
        busy
    }

    fn request_blocks<K: Disk>(&mut self, disk: &mut K) -> bool {
        let asked = self.assembler.request_blocks(&mut Requests { reads: &mut self.reads });
        if !self.reads.waiting.is_empty() {
            self.reads.start(disk, &self.proven);
        }
        asked
    }

    fn settle<K: Disk, M: Staging>(&mut self, disk: &K, memory: &mut M, done: &DiskDone) {
        if let Some(buffer) = done.tag.checked_sub(FIRST_PROOF) {
            return self.settle_proof(disk, memory, buffer as usize, done.result);
        }
        let tag = done.tag as u32;
        let place = self.reads.pending.get_mut(tag as usize);
        let Some(pending) = place.and_then(Option::take) else {
            return;
        };
        match self.check(disk, memory, &pending, done.result) {
            Ok(true) => {
                let len = (pending.bytes.end - pending.bytes.start) as usize;
                let lane = pending.block_ref.lane as usize;
                let stored = self.assembler.sources[lane].layout.file.dtype;
                let received = Received::stored(len, stored);
                let action = self.action.as_deref();
                let block_ref = &pending.block_ref;
                self.assembler.arrived(memory, block_ref, received, &self.table, action);
            }
            Ok(false) => {
                self.reads.pending[tag as usize] = Some(pending);
                return self.reads.waiting.push_back(tag);
            }
            Err(error) => self.assembler.fail(&pending.block_ref, error),
        }
        self.reads.free.push(tag);
    }

    /// Checks that every byte of a block was read, and that the file is what it was. False: a block
    /// of the manifest has to be proven again.
    fn check<K: Disk, M: Staging>(
        &mut self,
        disk: &K,
        memory: &M,
        pending: &Pending,
        result: Result<u32, DiskFault>,
    ) -> Result<bool, StreamError> {
        let Pending { block_ref, source, bytes, addr } = pending;
        let (dataset, LocalFile { file, sums }) = (block_ref.lane, &self.reads.files[*source]);
        let got = result.map_err(|DiskFault::Io(errno)| StreamError::Storage { dataset, errno })?;
        self.assembler.counters.source_bytes += u64::from(got);
        if sums.is_none()
            && let Some(change) = disk.change(*file)
            && let Some(error) = self.assembler.change(dataset, bytes.clone(), change)
        {
            return Err(error);
        }
        let first = sums.as_ref().map_or(bytes.start, |_| sums::pages_of(bytes).start);
        let read = first + u64::from(got);
        if read < bytes.end {
            // Less may be left than was read before.
            let at_byte = disk.len_now(*file).map_or(read, |len| len.min(read));
            return Err(StreamError::Truncated { dataset, at_byte });
        }
        let Some(sums) = sums else {
            return Ok(true);
        };
        let pages = memory.bytes(addr - (bytes.start - first), got as usize);
        let checked = self.proven.check(sums, bytes, pages, self.assembler.kernels.crc32c);
        checked.map_err(|error| self.differs(disk, pending, error))
    }

    /// Compares a block that was read whole with its manifest. If it differs, the blocks that wait
    /// for it fail.
    fn settle_proof<K: Disk, M: Staging>(
        &mut self,
        disk: &K,
        memory: &M,
        buffer: usize,
        result: Result<u32, DiskFault>,
    ) {
        let place = self.reads.proofs.get_mut(buffer);
        let Some((source, block)) = place.and_then(Option::take) else {
            return;
        };
        let Some(sums) = &self.reads.files[source].sums else {
            return;
        };
        let proof = result.map_err(|DiskFault::Io(errno)| Err(errno)).and_then(|got| {
            self.assembler.counters.source_bytes += u64::from(got);
            let bytes = memory.bytes(self.reads.proof_buffer(buffer), got as usize);
            let crc = self.assembler.kernels.crc32c;
            self.proven.prove(sums, block, bytes, crc).map_err(Ok)
        });
        let Err(error) = proof else { return };
        for _ in 0..self.reads.waiting.len() {
            let Some(tag) = self.reads.waiting.pop_front() else { return };
            let touches = |pending: &mut Pending| {
                pending.source == source && sums::touches(&pending.bytes, block)
            };
            let Some(pending) = self.reads.pending[tag as usize].take_if(touches) else {
                self.reads.waiting.push_back(tag);
                continue;
            };
            let dataset = pending.block_ref.lane;
            let error = match error {
                Ok(differs) => self.differs(disk, &pending, differs),
                Err(errno) => StreamError::Storage { dataset, errno },
            };
            self.assembler.fail(&pending.block_ref, error);
            self.reads.free.push(tag);
        }
    }

    /// The error of a block whose file differs from its manifest.
    fn differs<K: Disk>(
        &self,
        disk: &K,
        pending: &Pending,
        Differs { at_byte }: Differs,
    ) -> StreamError {
        let (dataset, LocalFile { file, sums }) =
            (pending.block_ref.lane, &self.reads.files[pending.source]);
        let recorded = sums.as_ref().map_or(0, FileSums::bytes);
        let block = Change::Block { at_byte };
        let len = disk.len_now(*file).filter(|len| *len < recorded);
        let change = len.map_or(block, |len| Change::Written { len });
        let error = self.assembler.change(dataset, pending.bytes.clone(), change);
        error.unwrap_or(StreamError::Changed { dataset, change: block })
    }
}
