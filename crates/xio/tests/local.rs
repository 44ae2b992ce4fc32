//! The reader over local files against the reference, byte for byte: random plans, files and starts, a disk
//! that completes in any order, and a host of any pace.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;

use proptest::prelude::*;
use sim::chance::Chance;
use sim::memory::Arena;
use xio::dataset::{Dtype, TokenFile, flat};
use xio::disk::{Disk, DiskDone, DiskFault, DiskRead, FileId};
use xio::kernel::Kernels;
use xio::order::SampleLayout;
use xio::plan::Plan;
use xio::reader::{
    Delivery, LeaveOut, LeaveOutError, LocalReader, Reader, ReaderSetup, ReaderSource, Sink,
    SlotMeta, StreamError,
};
use xio::reference::{Reference, ReferenceError};

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
    fault: Option<i32>,
}

impl TestDisk {
    fn land_some(&mut self, memory: &mut Arena, draw: &mut Chance) {
        for read in &self.under_way {
            let garbage: Vec<u8> = (0..read.len.min(64)).map(|_| draw.word() as u8).collect();
            memory.poke(read.addr, &garbage);
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
            let result = match self.fault {
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
}

/// The host's side: slots are taken in order and returned at any pace.
#[derive(Default)]
struct Host {
    slots: Vec<Vec<u8>>,
    free: VecDeque<u32>,
    held: Vec<u32>,
    /// By the plan's numbers.
    batches: Vec<(u64, Vec<u8>)>,
    end: Option<Result<(), StreamError>>,
}

impl Host {
    fn new() -> Host {
        let slots = vec![vec![0xee; SLOT_BYTES as usize]; SLOTS];
        Host { slots, free: (0..SLOTS as u32).collect(), ..Host::default() }
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
    fn acquire(&mut self) -> Option<u32> {
        self.free.pop_front()
    }

    fn write(&mut self, slot: u32, offset: u32, bytes: &[u8]) {
        let at = offset as usize;
        self.slots[slot as usize][at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn publish(&mut self, slot: u32, meta: SlotMeta) {
        assert!(self.end.is_none(), "published after the end");
        let SlotMeta { first_batch, batches, batch_bytes } = meta;
        let bytes = &self.slots[slot as usize][..(batches * batch_bytes) as usize];
        let each = bytes.chunks(batch_bytes as usize).map(<[u8]>::to_vec);
        self.batches.extend((first_batch..).zip(each));
        self.held.push(slot);
    }

    fn fail(&mut self, error: &StreamError) {
        assert!(self.end.replace(Err(*error)).is_none());
    }

    fn finish(&mut self) {
        assert!(self.end.replace(Ok(())).is_none());
    }
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
    (first_batch, batches): (u64, u64),
    left_out: &LeaveOut,
    seed: u64,
    fault: Option<i32>,
) -> Run {
    let mut draw = Chance::new(seed);
    let dtypes: Vec<Dtype> = files.iter().map(|file| file.described.dtype).collect();
    let pipeline = plan.compile_local(&dtypes).unwrap();
    let layouts = files.iter().enumerate().map(|(i, file)| pipeline.layout(i, file.described));
    let layouts: Vec<SampleLayout> = layouts.collect::<Result<_, _>>().unwrap();
    let branches = pipeline.branches().iter().zip(&layouts);
    let sources: Vec<ReaderSource> = (0..)
        .zip(branches)
        .map(|(source, (branch, layout))| {
            let stages = branch.blocks().clone();
            ReaderSource { connection: 0, source, layout: *layout, stages }
        })
        .collect();
    let order = pipeline.order(&layouts).unwrap();
    let delivery = Delivery {
        window_tokens: pipeline.window_tokens(),
        batch_samples: pipeline.batch_samples(),
        sample_dtype: pipeline.sample_dtype(),
        dtype: pipeline.dtype(),
        pairs: pipeline.pairs(),
        first_batch,
        batches: Some(batches),
        slot_bytes: SLOT_BYTES,
    };
    let memory_bytes = Reader::memory_needed(&order, &sources);
    let mut memory = Arena::new(memory_bytes as usize, &mut draw);
    let setup = ReaderSetup::leaving_out(order, sources, delivery, left_out);
    let depth = 1 + draw.below(16) as u32;
    let ids = (0..files.len() as u32).map(FileId).collect();
    let mut reader = LocalReader::new(setup, ids, depth, Arena::BASE, Kernels::PORTABLE);
    let mut disk = TestDisk {
        files: on_disk,
        // At times fewer reads than the reader would have under way.
        depth: 1 + draw.below(16) as usize,
        under_way: Vec::new(),
        landed: VecDeque::new(),
        reads: 0,
        fault,
    };
    let mut host = Host::new();
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
    leave_out: Vec<Range<u64>>,
    seed: u64,
}

impl Case {
    fn left_out(&self) -> LeaveOut {
        LeaveOut::new(self.leave_out.iter().cloned()).unwrap()
    }

    /// Numbers of the batches to deliver.
    fn numbers(&self) -> Vec<u64> {
        let all = self.first_batch..self.first_batch + self.batches;
        all.filter(|number| self.leave_out.iter().all(|range| !range.contains(number))).collect()
    }
}

fn case() -> impl Strategy<Value = Case> {
    let types = prop::sample::select(vec![Dtype::U16, Dtype::U32, Dtype::I32, Dtype::I64]);
    let weights = prop::collection::vec(0..5u32, 3);
    let files = prop::collection::vec((types, 60..900u64, weights), 1..4);
    let groups = prop::sample::select(vec![
        "",
        ", blocks=1",
        ", blocks=3",
        ", blocks=2, block=4KiB",
        ", blocks=5, block=8KiB",
    ]);
    let shuffle = prop::option::of((any::<u64>(), groups));
    let starts = prop::collection::btree_set(1..900u64, 0..3);
    let leave_out = prop::collection::vec((0..230u64, 1..9u64), 0..6);
    let form = (prop::sample::select(vec!["u16", "u32"]), 0..4u32, any::<bool>(), 0..40u32);
    let wide = prop::option::of((any::<prop::sample::Index>(), any::<u64>(), 16..64u32));
    let range = (0..200u64, 1..30u64, any::<u64>(), starts, leave_out);
    (files, shuffle, form, wide, range, (2..40u32, 1..9u32)).prop_map(
        |(files, shuffle, (narrow, widen, pairs, overlap), wide, range, (window, batch))| {
            let (first_batch, batches, seed, starts, leave_out) = range;
            let narrow = if files.iter().any(|file| file.0 == Dtype::U16) { "u16" } else { narrow };
            let overlap = overlap % window;
            let mut text =
                format!("window({window}, overlap={overlap}) | narrow({narrow}) | batch({batch})");
            if files.len() > 1 {
                text += &blend(files.iter().map(|file| &file.2), &starts);
            }
            text += &shuffle
                .map_or(String::new(), |(seed, groups)| format!(" | shuffle({seed}{groups})"));
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
            let leave_out = leave_out.into_iter().map(|(first, len)| first..first + len).collect();
            Case { text, files, wide, first_batch, batches, leave_out, seed }
        },
    )
}

/// A blend by `weights` in phases from `starts` on; in each phase the first dataset has a weight.
fn blend<'a>(weights: impl Iterator<Item = &'a Vec<u32>>, starts: &BTreeSet<u64>) -> String {
    let of_phase = |dataset: usize, weight: u32| if dataset == 0 { weight.max(1) } else { weight };
    let parts = weights.enumerate().map(|(dataset, weights)| {
        let weights = weights.iter().take(starts.len() + 1);
        let weights: Vec<String> =
            weights.map(|weight| of_phase(dataset, *weight).to_string()).collect();
        format!("d{dataset}={}", weights.join(":"))
    });
    let mut text = format!(" | blend({})", parts.collect::<Vec<_>>().join(", "));
    if !starts.is_empty() {
        let starts: Vec<String> = starts.iter().map(u64::to_string).collect();
        text += &format!(" | phases({})", starts.join(", "));
    }
    text
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
    fn local_streams_deliver_what_the_reference_says(case in case()) {
        let plan = Plan::parse(&case.text, None).unwrap();
        let files = made(&case);
        let described = files.iter().map(|file| (file.described, |index| token_of(file, index)));
        let mut reference = Reference::new(&plan, described.collect()).unwrap();
        let Case { first_batch, batches, seed, .. } = case;
        let (range, numbers) = ((first_batch, batches), case.numbers());
        let ran = run(&plan, &files, contents(&files), range, &case.left_out(), seed, None);
        let delivered = ran.host.batches.len();
        for (number, (said, batch)) in numbers.iter().zip(&ran.host.batches) {
            prop_assert_eq!(said, number);
            let want = reference.batch(*number);
            prop_assert_eq!(want.as_ref(), Ok(batch), "batch {}", number);
        }
        match ran.host.end {
            Some(Ok(())) => prop_assert_eq!(delivered, numbers.len()),
            Some(Err(StreamError::Overflow { dataset, token, value, .. })) => {
                let refused = reference.batch(numbers[delivered]);
                let to = plan.narrow().unwrap();
                let dataset = dataset as usize;
                prop_assert_eq!(refused, Err(ReferenceError::Overflow { dataset, token, value, to }));
            }
            other => prop_assert!(false, "{other:?}"),
        }
    }

    /// A file that became shorter ends the stream after every batch before the cut.
    #[test]
    fn a_file_cut_short_ends_a_local_stream(case in case(), cut in any::<prop::sample::Index>()) {
        let case = Case { wide: None, ..case };
        let plan = Plan::parse(&case.text, None).unwrap();
        let files = made(&case);
        let mut on_disk = contents(&files);
        let left = cut.index(on_disk[0].len());
        on_disk[0].truncate(left);
        let described = files.iter().map(|file| (file.described, |index| token_of(file, index)));
        let mut reference = Reference::new(&plan, described.collect()).unwrap();
        let Case { first_batch, batches, seed, .. } = case;
        let (range, numbers) = ((first_batch, batches), case.numbers());
        let ran = run(&plan, &files, on_disk, range, &case.left_out(), seed, None);
        for (number, (said, batch)) in numbers.iter().zip(&ran.host.batches) {
            prop_assert_eq!(said, number);
            let want = reference.batch(*number);
            prop_assert_eq!(want.as_ref(), Ok(batch), "batch {}", number);
        }
        match ran.host.end {
            Some(Ok(())) => prop_assert_eq!(ran.host.batches.len(), numbers.len()),
            Some(Err(StreamError::Truncated { dataset: 0, at_byte })) => {
                prop_assert_eq!(at_byte, left as u64);
            }
            other => prop_assert!(false, "{other:?}"),
        }
    }
}

#[test]
fn a_disk_that_fails_ends_a_local_stream() {
    let files = [file(Dtype::U32, 5_000, 1)];
    let plan = Plan::parse("window(10) | batch(3)", None).unwrap();
    let ran = run(&plan, &files, contents(&files), (0, 9), &LeaveOut::default(), 1, Some(5));
    assert_eq!(ran.host.end, Some(Err(StreamError::Storage { dataset: 0, errno: 5 })));
    assert!(ran.host.batches.is_empty());
}

/// A stream with an end reads each block that it needs once.
#[test]
fn a_local_stream_reads_what_it_needs() {
    let files = [file(Dtype::U32, 1_000_000, 1)];
    let plan = Plan::parse("window(100) | batch(1)", None).unwrap();
    // 2,621 samples fill a block of 1 MiB.
    for (batches, blocks) in [(1, 1), (2_621, 1), (2_622, 2), (10_000, 4)] {
        let all = LeaveOut::default();
        let ran = run(&plan, &files, contents(&files), (0, batches), &all, batches, None);
        assert_eq!((ran.host.end, ran.disk.reads), (Some(Ok(())), blocks), "{batches} batches");
    }
}

/// Batches that are left out are not read, whatever their number; nothing of the others is read twice.
#[test]
fn what_is_left_out_is_not_read() {
    let files = [file(Dtype::U32, 1_000_000, 1)];
    let plan = Plan::parse("window(100) | batch(1)", None).unwrap();
    // 2,621 samples fill a block of 1 MiB: batches of the first and of the last of four.
    let far = LeaveOut::new(std::iter::once(5..9_000)).unwrap();
    let ran = run(&plan, &files, contents(&files), (0, 9_005), &far, 3, None);
    let numbers: Vec<u64> = ran.host.batches.iter().map(|(number, _)| *number).collect();
    assert_eq!(numbers, [0, 1, 2, 3, 4, 9_000, 9_001, 9_002, 9_003, 9_004]);
    assert_eq!((ran.host.end, ran.disk.reads), (Some(Ok(())), 2));
    // Nothing is left, and a token that would end the stream is not reached.
    let mut bad = [file(Dtype::U32, 5_000, 1)];
    bad[0].bytes[4 * 550 + 3] = 1;
    let plan = Plan::parse("window(100) | narrow(u16) | batch(1)", None).unwrap();
    for (left_out, delivered) in [(0..50, 0), (5..6, 9), (9..60, 5), (5..7, 8)] {
        let left_out = LeaveOut::new(std::iter::once(left_out.clone())).unwrap();
        let ran = run(&plan, &bad, contents(&bad), (0, 10), &left_out, 4, None);
        let ended = (ran.host.batches.len(), ran.host.end);
        let wanted = if delivered == 5 { None } else { Some(Ok(())) };
        assert_eq!(ended.0, delivered, "{left_out:?}");
        assert!(wanted.is_none_or(|wanted| ended.1 == Some(wanted)), "{left_out:?}");
    }
}

#[test]
fn ranges_to_leave_out_are_joined_or_refused() {
    let joined = LeaveOut::new([9..12, 1..3, 3..4, 10..11]).unwrap();
    assert_eq!(joined.ranges(), [1..4, 9..12]);
    let empty = LeaveOut::new([1..2, 7..7]);
    assert_eq!(empty, Err(LeaveOutError::Empty { start: 7, end: 7 }));
    let many = LeaveOut::new((0..65).map(|i| 3 * i..3 * i + 1));
    assert_eq!(many, Err(LeaveOutError::TooMany { ranges: 65 }));
    assert!(LeaveOut::new((0..65).map(|i| 3 * i..3 * i + 3)).is_ok());
}
