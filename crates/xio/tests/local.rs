//! The reader over local files against the reference, byte for byte: random plans, files and starts, a disk
//! that completes in any order, and a host of any pace.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use proptest::prelude::*;
use sim::chance::Chance;
use sim::memory::Arena;
use xio::dataset::{Dtype, TokenFile, flat};
use xio::disk::{Change, Disk, DiskDone, DiskFault, DiskRead, FileId};
use xio::order::SampleLayout;
use xio::plan::Plan;
use xio::reader::{
    Delivery, LocalFile, LocalReader, ReaderSetup, ReaderSource, Share, Sink, SlotMeta, StreamError,
};
use xio::reference::{Reference, ReferenceError};
use xio::sums::{FileSums, SUM_BYTES};

mod toy;

/// Slots of the ring, and bytes of each.
const SLOTS: usize = 3;
const SLOT_BYTES: u32 = 6_000;

struct File {
    described: TokenFile,
    bytes: Vec<u8>,
}

/// A file whose tokens encode their position.
fn file(dtype: Dtype, tokens: u64, salt: u64) -> File {
    let value = |i: u64| (i.wrapping_mul(2_654_435_761) >> 7).wrapping_add(salt) & 0x7fff;
    let width = dtype.bytes() as usize;
    let bytes: Vec<u8> =
        (0..tokens).flat_map(|i| value(i).to_le_bytes()[..width].to_vec()).collect();
    File { described: flat(dtype, bytes.len() as u64).unwrap(), bytes }
}

/// The table of `remap`: some tokens of the files have no entry.
fn table() -> Arc<[u32]> {
    (0..0x7f00).map(|id| id * 40_503 % 0x7f00).collect()
}

fn token_of(file: &File, index: u64) -> Option<i128> {
    let (dtype, width) = (file.described.dtype, file.described.dtype.bytes() as usize);
    let raw = file.bytes.get(index as usize * width..(index as usize + 1) * width)?;
    let negative = dtype.is_signed() && raw[width - 1] >= 0x80;
    let mut wide = [if negative { 0xff } else { 0 }; 16];
    wide[..width].copy_from_slice(raw);
    Some(i128::from_le_bytes(wide))
}

/// Reads land when the test says so, in any order; until then their destination holds anything.
struct TestDisk {
    files: Vec<Vec<u8>>,
    depth: usize,
    under_way: Vec<DiskRead>,
    landed: VecDeque<DiskDone>,
    /// Every read so far.
    reads: u64,
    trouble: Trouble,
    /// Whether the files were overwritten.
    changed: bool,
}

/// What is not as it should be.
#[derive(Clone, Debug, Default)]
struct Trouble {
    /// Every read fails.
    fault: Option<i32>,
    /// The files have manifests.
    manifests: bool,
    /// After this many reads these are the bytes of the files.
    overwritten: Option<(u64, Vec<Vec<u8>>)>,
}

impl TestDisk {
    fn land_some(&mut self, memory: &mut Arena, draw: &mut Chance) {
        for read in &self.under_way {
            let garbage: Vec<u8> = (0..read.len.min(64)).map(|_| draw.word() as u8).collect();
            memory.poke(read.addr, &garbage);
        }
        if let Some((reads, files)) = &self.trouble.overwritten
            && self.reads >= *reads
            && !self.changed
        {
            (self.files, self.changed) = (files.clone(), true);
        }
        for _ in 0..draw.below(4) {
            if self.under_way.is_empty() {
                return;
            }
            let index = draw.below(self.under_way.len() as u64) as usize;
            let DiskRead { file, offset, len, addr, tag } = self.under_way.swap_remove(index);
            let bytes = &self.files[file.0 as usize];
            let end = bytes.len().min(offset as usize + len as usize);
            let found = bytes.get(offset as usize..end).unwrap_or_default();
            memory.poke(addr, found);
            let result = match self.trouble.fault {
                Some(errno) => Err(DiskFault::Io(errno)),
                None => Ok(found.len() as u32),
            };
            self.landed.push_back(DiskDone { tag, result });
        }
    }
}

impl Disk for TestDisk {
    fn submit(&mut self, read: DiskRead) -> Result<(), DiskRead> {
        if self.under_way.len() + self.landed.len() >= self.depth {
            return Err(read);
        }
        self.reads += 1;
        self.under_way.push(read);
        Ok(())
    }

    fn poll(&mut self) -> Option<DiskDone> {
        self.landed.pop_front()
    }

    fn len_now(&self, file: FileId) -> Option<u64> {
        Some(self.files[file.0 as usize].len() as u64)
    }

    fn change(&self, file: FileId) -> Option<Change> {
        let len = self.files[file.0 as usize].len() as u64;
        self.changed.then_some(Change::Written { len })
    }
}

/// The host's side: slots are taken in order and returned at any pace.
#[derive(Default)]
struct Host {
    slots: Vec<Vec<u8>>,
    free: VecDeque<u32>,
    held: Vec<u32>,
    /// The ring of each slot.
    rings: BTreeMap<u32, u32>,
    batches: Vec<Vec<u8>>,
    /// By ring: the number of its first batch, and all of them.
    by_ring: BTreeMap<u32, (u64, Vec<Vec<u8>>)>,
    end: Option<Result<(), StreamError>>,
}

impl Host {
    /// Slots for several rings: one that is being filled in each, and a few to hold.
    fn new(rings: u32) -> Host {
        let count = SLOTS + rings as usize - 1;
        let slots = vec![vec![0xee; SLOT_BYTES as usize]; count];
        Host { slots, free: (0..count as u32).collect(), ..Host::default() }
    }

    fn return_some(&mut self, draw: &mut Chance) {
        for _ in 0..draw.below(3).min(self.held.len() as u64) {
            let index = draw.below(self.held.len() as u64) as usize;
            let slot = self.held.swap_remove(index);
            self.slots[slot as usize].fill(0xee);
            self.free.push_back(slot);
        }
    }
}

impl Sink for Host {
    fn acquire(&mut self, ring: u32) -> Option<u32> {
        let slot = self.free.pop_front()?;
        self.rings.insert(slot, ring);
        Some(slot)
    }

    fn write(&mut self, slot: u32, offset: u32, bytes: &[u8]) {
        let at = offset as usize;
        self.slots[slot as usize][at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn publish(&mut self, slot: u32, meta: SlotMeta) {
        assert!(self.end.is_none(), "published after the end");
        let SlotMeta { batches, batch_bytes, .. } = meta;
        let bytes = &self.slots[slot as usize][..(batches * batch_bytes) as usize];
        let batches: Vec<Vec<u8>> =
            bytes.chunks(batch_bytes as usize).map(<[u8]>::to_vec).collect();
        let (first, ring) =
            self.by_ring.entry(self.rings[&slot]).or_insert((meta.first_batch, Vec::new()));
        assert_eq!(
            meta.first_batch,
            *first + ring.len() as u64,
            "the ring's own batches are counted"
        );
        ring.extend(batches.iter().cloned());
        self.batches.extend(batches);
        self.held.push(slot);
    }

    fn fail(&mut self, error: &StreamError) {
        assert!(self.end.replace(Err(*error)).is_none());
    }

    fn finish(&mut self) {
        assert!(self.end.replace(Ok(())).is_none());
    }
}

/// What the manifest of a file says of its bytes.
fn sums(id: u64, bytes: &[u8]) -> FileSums {
    let blocks = bytes.chunks(SUM_BYTES as usize).map(|block| (toy::KERNELS.crc32c)(0, block));
    FileSums::new(id, bytes.len() as u64, blocks.collect()).unwrap()
}

/// A stream over files, run to its end.
struct Run {
    host: Host,
    disk: TestDisk,
}

fn run(
    plan: &Plan,
    files: &[File],
    on_disk: Vec<Vec<u8>>,
    range: (u64, u64),
    seed: u64,
    trouble: Trouble,
) -> Run {
    run_for(plan, files, on_disk, range, (0, Share::WHOLE), seed, trouble)
}

fn run_for(
    plan: &Plan,
    files: &[File],
    on_disk: Vec<Vec<u8>>,
    (first_batch, batches): (u64, u64),
    (shift, share): (u32, Share),
    seed: u64,
    trouble: Trouble,
) -> Run {
    let mut draw = Chance::new(seed);
    let dtypes: Vec<Dtype> = files.iter().map(|file| file.described.dtype).collect();
    let pipeline = plan.compile_local(&dtypes, Some(table().len() as u32)).unwrap();
    let (window, overlap) = (pipeline.window_tokens(), pipeline.overlap_tokens());
    let layouts = files.iter().map(|file| SampleLayout::new(file.described, window, overlap));
    let layouts: Vec<SampleLayout> = layouts.collect::<Result<_, _>>().unwrap();
    let branches = pipeline.branches().iter().zip(&layouts);
    let sources: Vec<ReaderSource> = (0..)
        .zip(branches)
        .map(|(source, (branch, layout))| {
            let stages = branch.blocks().clone();
            let whole_pages = trouble.manifests;
            ReaderSource { connection: 0, source, layout: *layout, stages, whole_pages }
        })
        .collect();
    let order = pipeline.order(&layouts).unwrap();
    let delivery = Delivery {
        window_tokens: pipeline.sample_tokens(),
        batch_samples: pipeline.batch_samples(),
        sample_dtype: pipeline.sample_dtype(),
        dtype: pipeline.dtype(),
        pairs: pipeline.pairs(),
        first_batch,
        batches: Some(batches),
        shift,
        share,
        slot_bytes: SLOT_BYTES,
    };
    let setup = ReaderSetup::new(order, sources, delivery);
    let memory_bytes = LocalReader::memory_bytes(&setup, trouble.manifests);
    let mut memory = Arena::new(memory_bytes as usize, &mut draw);
    let depth = 1 + draw.below(16) as u32;
    let described = |(id, file): (u32, &File)| {
        let sums = trouble.manifests.then(|| sums(id.into(), &file.bytes));
        LocalFile { file: FileId(id), sums }
    };
    let described = (0..).zip(files).map(described).collect();
    let mut reader = LocalReader::new(setup, described, depth, Arena::BASE, toy::KERNELS);
    reader.set_table(table());
    let mut disk = TestDisk {
        files: on_disk,
        // At times fewer reads than the reader would have under way.
        depth: 1 + draw.below(16) as usize,
        under_way: Vec::new(),
        landed: VecDeque::new(),
        reads: 0,
        trouble,
        changed: false,
    };
    let mut host = Host::new(share.count);
    for turn in 0.. {
        assert!(turn < 1_000_000, "the stream does not end");
        let busy = reader.poll(&mut disk, &mut memory, &mut host);
        if reader.has_ended() {
            assert!(host.end.is_some());
            break;
        }
        let waits = !disk.under_way.is_empty() || !disk.landed.is_empty() || !host.held.is_empty();
        assert!(busy || waits, "nothing will ever happen");
        disk.land_some(&mut memory, &mut draw);
        host.return_some(&mut draw);
    }
    Run { host, disk }
}

/// A plan with its files, one of which may hold a token that does not fit.
#[derive(Clone, Debug)]
struct Case {
    text: String,
    files: Vec<(Dtype, u64)>,
    /// A file, a token of it, and the bit that is set there.
    wide: Option<(usize, u64, u32)>,
    first_batch: u64,
    batches: u64,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let types = prop::sample::select(vec![Dtype::U16, Dtype::U32, Dtype::I32, Dtype::I64]);
    let files = prop::collection::vec((types, 60..900u64, 1..5u32), 1..4);
    let shuffle = prop::option::of((any::<u64>(), 1..4u32));
    let form = (prop::sample::select(vec!["u16", "u32"]), 0..4u32, any::<bool>(), 0..40u32);
    let wide = prop::option::of((any::<prop::sample::Index>(), any::<u64>(), 16..64u32));
    let range = (0..200u64, 1..30u64, any::<u64>());
    (files, shuffle, form, wide, range, (2..40u32, 1..9u32, 0..4u32, 0..8u32)).prop_map(
        |(
            files,
            shuffle,
            (narrow, widen, pairs, overlap),
            wide,
            range,
            (window, batch, policy, form),
        )| {
            let narrow = if files.iter().any(|file| file.0 == Dtype::U16) { "u16" } else { narrow };
            let overlap = overlap % window;
            let policy = match (policy, widen, narrow) {
                (0, _, _) => ", overflow=saturate(321)",
                (1, 0, "u16") | (1, 2, "u16") => ", overflow=escape",
                _ => "",
            };
            let mut text = format!(
                "window({window}, overlap={overlap}) | narrow({narrow}{policy}) | batch({batch})"
            );
            text += match form {
                0 if !policy.contains("escape") => " | bitpack(15)",
                1 => " | compress(lz4)",
                2 => " | remap(t)",
                _ => "",
            };
            if files.len() > 1 {
                let parts = files.iter().enumerate().map(|(i, file)| format!("d{i}={}", file.2));
                text += &format!(" | blend({})", parts.collect::<Vec<_>>().join(", "));
            }
            text += &shuffle.map_or(String::new(), |(seed, blocks)| {
                format!(" | shuffle({seed}, blocks={blocks})")
            });
            text += match (widen, narrow) {
                (0, "u16") => " | widen(u32)",
                (1, "u16") => " | widen(i32)",
                (2, _) => " | widen(i64)",
                _ => "",
            };
            text += if pairs { " | pairs" } else { "" };
            let wide = wide.map(|(at, token, bit)| {
                let file = at.index(files.len());
                (file, token % files[file].1, bit % (8 * files[file].0.bytes()))
            });
            let files = files.into_iter().map(|(dtype, tokens, _)| (dtype, tokens)).collect();
            let (first_batch, batches, seed) = range;
            Case { text, files, wide, first_batch, batches, seed }
        },
    )
}

fn made(case: &Case) -> Vec<File> {
    let files = (0..).zip(&case.files);
    let mut files: Vec<File> =
        files.map(|(salt, (dtype, tokens))| file(*dtype, *tokens, salt)).collect();
    if let Some((at, token, bit)) = case.wide {
        let byte = token * u64::from(case.files[at].0.bytes()) + u64::from(bit / 8);
        files[at].bytes[byte as usize] ^= 1 << (bit % 8);
    }
    files
}

fn contents(files: &[File]) -> Vec<Vec<u8>> {
    files.iter().map(|file| file.bytes.clone()).collect()
}

proptest! {
    /// Every batch is the reference's, up to the one that holds a token that does not fit.
    #[test]
    fn local_streams_deliver_what_the_reference_says(case in case(), manifests in any::<bool>()) {
        let plan = Plan::parse(&case.text, None).unwrap();
        let files = made(&case);
        let described = files.iter().map(|file| (file.described, |index| token_of(file, index)));
        let reference = Reference::new(&plan, described.collect()).unwrap();
        let mut reference = reference.with_table(table().to_vec());
        let Case { first_batch, batches, seed, .. } = case;
        let trouble = Trouble { manifests, ..Trouble::default() };
        let ran = run(&plan, &files, contents(&files), (first_batch, batches), seed, trouble);
        for (number, batch) in (first_batch..).zip(&ran.host.batches) {
            let want = reference.batch(number);
            prop_assert_eq!(want.as_ref(), Ok(batch), "batch {}", number);
        }
        let delivered = ran.host.batches.len() as u64;
        match ran.host.end {
            Some(Ok(())) => prop_assert_eq!(delivered, batches),
            Some(Err(StreamError::Overflow { dataset, token, value, limit, .. })) => {
                let refused = reference.batch(first_batch + delivered);
                let dataset = dataset as usize;
                let expected = ReferenceError::Overflow { dataset, token, value, limit };
                prop_assert_eq!(refused, Err(expected));
            }
            other => prop_assert!(false, "{other:?}"),
        }
    }

    /// The rings of all ranks together hold the order, whatever the number of ranks, the share of a stream and
    /// the sample that it begins with.
    #[test]
    fn ranks_share_the_order(
        case in case(),
        (ranks, first, count) in (1..9u32, any::<u32>(), any::<u32>()),
        shift in any::<u32>(),
    ) {
        let case = Case { wide: None, text: case.text.replace(" | remap(t)", ""), ..case };
        let plan = Plan::parse(&case.text, None).unwrap();
        let first = first % ranks;
        let share = Share { ranks, first, count: 1 + count % (ranks - first) };
        let shift = shift % plan.batch();
        let files = made(&case);
        let Case { first_batch, batches, seed, .. } = case;
        let placed = (shift, share);
        let ran = run_for(&plan, &files, contents(&files), (first_batch, batches), placed, seed, Trouble::default());
        prop_assert_eq!(ran.host.end, Some(Ok(())));
        prop_assert_eq!(ran.host.by_ring.len(), share.count as usize);
        let one_by_one = case.text.replace(&format!("batch({})", plan.batch()), "batch(1)");
        let single = Plan::parse(&one_by_one, None).unwrap();
        let described = files.iter().map(|file| (file.described, |index| token_of(file, index)));
        let mut reference = Reference::new(&single, described.collect()).unwrap();
        let size = u64::from(plan.batch());
        for step in 0..batches {
            for (ring, (numbered, ring_batches)) in &ran.host.by_ring {
                prop_assert_eq!(*numbered, first_batch);
                let number = first_batch + step * u64::from(ranks) + u64::from(first + ring);
                let begin = number * size + u64::from(shift);
                let samples: Vec<Vec<u8>> =
                    (begin..begin + size).map(|sample| reference.batch(sample).unwrap()).collect();
                let rows = |second: bool| {
                    let half = |sample: &Vec<u8>| match (plan.pairs(), second) {
                        (false, false) => sample.clone(),
                        (false, true) => Vec::new(),
                        (true, false) => sample[..sample.len() / 2].to_vec(),
                        (true, true) => sample[sample.len() / 2..].to_vec(),
                    };
                    samples.iter().map(half).collect::<Vec<_>>().concat()
                };
                let want = [rows(false), rows(true)].concat();
                prop_assert_eq!(&ring_batches[step as usize], &want, "batch {}", number);
            }
        }
    }

    /// A file that became shorter ends the stream after every batch before the cut.
    #[test]
    fn a_file_cut_short_ends_a_local_stream(case in case(), cut in any::<prop::sample::Index>()) {
        let case = Case { wide: None, text: case.text.replace(" | remap(t)", ""), ..case };
        let plan = Plan::parse(&case.text, None).unwrap();
        let files = made(&case);
        let mut on_disk = contents(&files);
        let left = cut.index(on_disk[0].len());
        on_disk[0].truncate(left);
        let described = files.iter().map(|file| (file.described, |index| token_of(file, index)));
        let reference = Reference::new(&plan, described.collect()).unwrap();
        let mut reference = reference.with_table(table().to_vec());
        let Case { first_batch, batches, seed, .. } = case;
        let ran = run(&plan, &files, on_disk, (first_batch, batches), seed, Trouble::default());
        for (number, batch) in (first_batch..).zip(&ran.host.batches) {
            let want = reference.batch(number);
            prop_assert_eq!(want.as_ref(), Ok(batch), "batch {}", number);
        }
        match ran.host.end {
            Some(Ok(())) => prop_assert_eq!(ran.host.batches.len() as u64, batches),
            Some(Err(StreamError::Truncated { dataset: 0, at_byte })) => {
                prop_assert_eq!(at_byte, left as u64);
            }
            other => prop_assert!(false, "{other:?}"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Files overwritten in place end the stream, or nothing of their new bytes is delivered. With a manifest one
    /// changed bit in a block that is read afterwards suffices, and the error names the block.
    #[test]
    fn a_file_overwritten_in_place_is_never_mixed(
        manifests in any::<bool>(), after in 0..12u64, bit in 0..8 * 9_000_000_u64, seed in any::<u64>(),
    ) {
        // Three blocks of a manifest, the last of which is short.
        let files = [file(Dtype::U32, 600_000, 3)];
        let plan = Plan::parse("window(700) | shuffle(5, blocks=2) | batch(2)", None).unwrap();
        let mut other = contents(&files);
        let byte = (bit / 8) as usize % other[0].len();
        other[0][byte] ^= 1 << (bit % 8);
        let overwritten = Some((after, other));
        let trouble = Trouble { manifests, overwritten, ..Trouble::default() };
        let ran = run(&plan, &files, contents(&files), (0, 500), seed, trouble);
        let described = files.iter().map(|file| (file.described, |index| token_of(file, index)));
        let mut reference = Reference::new(&plan, described.collect()).unwrap();
        for (number, batch) in (0..).zip(&ran.host.batches) {
            let want = reference.batch(number);
            prop_assert_eq!(want.as_ref(), Ok(batch), "batch {}", number);
        }
        let at_byte = byte as u64 / SUM_BYTES * SUM_BYTES;
        match ran.host.end {
            // All that is needed was read before, or the bit is in none of the tokens that were read after.
            Some(Ok(())) => prop_assert_eq!(ran.host.batches.len(), 500),
            Some(Err(StreamError::Changed { dataset: 0, change })) if manifests => {
                prop_assert_eq!(change, Change::Block { at_byte });
            }
            Some(Err(StreamError::Changed { dataset: 0, change })) => {
                prop_assert_eq!(change, Change::Written { len: 2_400_000 });
            }
            other => prop_assert!(false, "{other:?}"),
        }
    }
}

#[test]
fn a_disk_that_fails_ends_a_local_stream() {
    let files = [file(Dtype::U32, 5_000, 1)];
    let plan = Plan::parse("window(10) | batch(3)", None).unwrap();
    for manifests in [false, true] {
        let trouble = Trouble { fault: Some(5), manifests, ..Trouble::default() };
        let ran = run(&plan, &files, contents(&files), (0, 9), 1, trouble);
        assert_eq!(ran.host.end, Some(Err(StreamError::Storage { dataset: 0, errno: 5 })));
        assert!(ran.host.batches.is_empty());
    }
}

/// A stream with an end reads each block that it needs once.
#[test]
fn a_local_stream_reads_what_it_needs() {
    let files = [file(Dtype::U32, 1_000_000, 1)];
    let plan = Plan::parse("window(100) | batch(1)", None).unwrap();
    // 2,621 samples fill a block of 1 MiB.
    for (batches, blocks) in [(1, 1), (2_621, 1), (2_622, 2), (10_000, 4)] {
        let trouble = Trouble::default();
        let ran = run(&plan, &files, contents(&files), (0, batches), batches, trouble);
        assert_eq!((ran.host.end, ran.disk.reads), (Some(Ok(())), blocks), "{batches} batches");
    }
}
