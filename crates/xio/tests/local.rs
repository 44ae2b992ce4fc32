//! The reader over local files against the reference, byte for byte: random plans, files and
//! starts, a disk that completes in any order, and a host of any pace.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use proptest::prelude::*;
use sim::chance::Chance;
use sim::memory::Arena;
use xio::dataset::{Dtype, TokenFile, flat};
use xio::disk::{Change, Disk, DiskDone, DiskFault, DiskRead, FileId};
use xio::documents::{Documents, TargetsBuilder};
use xio::order::{Cut, Fit, SampleLayout, StreamOrder};
use xio::plan::Plan;
use xio::reader::{
    Delivery, LeaveOut, LeaveOutError, LocalFile, LocalReader, ReaderSetup, ReaderSource, Share,
    Sink, SlotMeta, StreamError,
};
use xio::reference::{Reference, ReferenceError, TokenReader};
use xio::stage::{Branch, Limit, Pipeline};
use xio::sums::{FileSums, SUM_BYTES};

#[path = "toy/flip.rs"]
mod flip;
mod toy;

use flip::Flip;

/// Slots of the ring, and bytes of each.
const SLOTS: usize = 3;
const SLOT_BYTES: u32 = 12_000;

struct File {
    described: TokenFile,
    bytes: Vec<u8>,
    documents: Vec<Range<u64>>,
    /// Runs of tokens and whether they are targets; none where all are.
    turns: Option<Vec<(u64, bool)>>,
    /// The loss weight of each token; none where it has none.
    loss_weights: Option<Vec<f32>>,
}

impl File {
    fn documents(&self) -> Documents {
        let documents = Documents::new(self.documents.iter().cloned()).unwrap();
        documents.with_targets(self.turns.as_ref().map(|turns| {
            let mut builder = TargetsBuilder::default();
            turns.iter().for_each(|(tokens, are_targets)| builder.push(*tokens, *are_targets));
            builder.finish()
        }))
    }

    /// The runs of targets.
    fn targets(&self) -> Option<Vec<Range<u64>>> {
        let mut end = 0;
        let runs = self.turns.as_ref()?.iter().map(|(tokens, are_targets)| {
            end += tokens;
            (end - tokens..end, *are_targets)
        });
        Some(runs.filter(|(_, are_targets)| *are_targets).map(|(run, _)| run).collect())
    }
}

/// Runs of 0 to 29 tokens; every third file has none.
fn turns(tokens: u64, salt: u64) -> Option<Vec<(u64, bool)>> {
    let (mut draw, mut end, mut turns) = (Chance::new(tokens ^ salt << 32), 0, Vec::new());
    while end < tokens {
        let run = draw.below(30).min(tokens - end);
        end += run;
        turns.push((run, draw.below(2) == 0));
    }
    (draw.below(3) > 0).then_some(turns)
}

/// Loss weights of 0 to 1.5; every third file has none.
fn loss_weights(tokens: u64, salt: u64) -> Option<Vec<f32>> {
    let mut draw = Chance::new(tokens ^ salt << 24);
    let weights = (0..tokens).map(|_| draw.below(7) as f32 / 4.0).collect();
    (draw.below(3) > 0).then_some(weights)
}

/// Documents of 0 to 49 tokens, some of them some tokens apart.
fn documents(tokens: u64, salt: u64) -> Vec<Range<u64>> {
    let (mut draw, mut end, mut documents) = (Chance::new(tokens ^ salt), 0, Vec::new());
    while end < tokens {
        let start = (end + draw.below(8).saturating_sub(5)).min(tokens);
        end = (start + draw.below(50)).min(tokens);
        documents.push(start..end);
    }
    documents
}

/// A file whose tokens encode their position.
fn file(dtype: Dtype, tokens: u64, salt: u64) -> File {
    let value = |i: u64| (i.wrapping_mul(2_654_435_761) >> 7).wrapping_add(salt) & 0x7fff;
    let width = dtype.bytes() as usize;
    let bytes: Vec<u8> =
        (0..tokens).flat_map(|i| value(i).to_le_bytes()[..width].to_vec()).collect();
    let (documents, turns) = (documents(tokens, salt), turns(tokens, salt));
    let described = flat(dtype, bytes.len() as u64).unwrap();
    File { described, bytes, documents, turns, loss_weights: loss_weights(tokens, salt) }
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
    /// Every read so far, and where it was.
    reads: u64,
    offsets: Vec<u64>,
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
        self.offsets.push(read.offset);
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
    /// By the plan's numbers, if there is one ring.
    batches: Vec<(u64, Vec<u8>)>,
    /// By ring: its batches, and their numbers in it.
    by_ring: BTreeMap<u32, Vec<(u64, Vec<u8>)>>,
    /// Batches of each slot published.
    slot_batches: Vec<u32>,
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
        let SlotMeta { first_batch, batches, batch_bytes } = meta;
        self.slot_batches.push(batches);
        let bytes = &self.slots[slot as usize][..(batches * batch_bytes) as usize];
        let each = bytes.chunks(batch_bytes as usize).map(<[u8]>::to_vec);
        let batches: Vec<(u64, Vec<u8>)> = (first_batch..).zip(each).collect();
        let ring = self.by_ring.entry(self.rings[&slot]).or_default();
        let after_the_last = ring.last().is_none_or(|(last, _)| *last < first_batch);
        assert!(after_the_last, "the ring's own batches are counted");
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

/// What is delivered of a plan, and to whom.
struct Part {
    /// First batch, and how many.
    range: (u64, u64),
    left_out: LeaveOut,
    shift: u32,
    share: Share,
}

impl Part {
    /// All of these batches, to one trainer.
    fn all(range: (u64, u64)) -> Part {
        Part::without(range, LeaveOut::default())
    }

    fn without(range: (u64, u64), left_out: LeaveOut) -> Part {
        Part { range, left_out, shift: 0, share: Share::WHOLE }
    }
}

/// How samples are cut from the files.
fn cut(plan: &Plan, pipeline: &Pipeline, files: &[File]) -> (Vec<SampleLayout>, Vec<Cut>) {
    let layouts = files.iter().enumerate().map(|(i, file)| pipeline.layout(i, file.described));
    let cut = |(dataset, (layout, file)): (usize, (SampleLayout, &File))| {
        let documents = file.documents();
        match plan.needs_documents() {
            true if plan.megatron().is_some() => (layout, Cut::Listed),
            true => plan.cut(dataset, layout, documents).unwrap(),
            false => (layout, Cut::Windows),
        }
    };
    let layouts: Vec<SampleLayout> = layouts.collect::<Result<_, _>>().unwrap();
    layouts.into_iter().zip(files).enumerate().map(cut).unzip()
}

/// The sources of tokens.
fn sources(
    pipeline: &Pipeline,
    layouts: &[SampleLayout],
    cuts: Vec<Cut>,
    whole_pages: bool,
) -> Vec<ReaderSource> {
    let branches = pipeline.branches().iter().zip(layouts.iter().zip(cuts));
    let source = |(source, (branch, (layout, cut))): (u32, (&Branch, (&SampleLayout, Cut)))| {
        let (layout, stages, weighs) = (*layout, branch.blocks().clone(), None);
        ReaderSource { connection: 0, source, layout, cut, stages, whole_pages, weighs }
    };
    (0..).zip(branches).map(source).collect()
}

/// Adds the loss weights of the files that have any, where the plan delivers them: their files
/// follow those of tokens.
fn with_weights(
    mut sources: Vec<ReaderSource>,
    pipeline: &Pipeline,
    files: &[File],
) -> Vec<ReaderSource> {
    let Some(stages) = pipeline.loss_weights() else { return sources };
    for (dataset, _) in files.iter().enumerate().filter(|(_, file)| file.loss_weights.is_some()) {
        let weights = sources[dataset].loss_weights(0, stages.clone());
        sources.push(ReaderSource { source: sources.len() as u32, ..weights });
    }
    sources
}

/// The files of a reader, in the order of [`contents`].
fn described(files: &[File], manifests: bool) -> Vec<LocalFile> {
    let described = |(id, bytes): (u32, Vec<u8>)| {
        let sums = manifests.then(|| sums(id.into(), &bytes));
        LocalFile { file: FileId(id), sums }
    };
    (0..).zip(contents(files)).map(described).collect()
}

fn run(
    plan: &Plan,
    files: &[File],
    on_disk: Vec<Vec<u8>>,
    part: Part,
    seed: u64,
    trouble: Trouble,
) -> Run {
    let Part { range: (first_batch, batches), left_out, shift, share } = part;
    let mut draw = Chance::new(seed);
    let dtypes: Vec<Dtype> = files.iter().map(|file| file.described.dtype).collect();
    let pipeline = plan.compile_local(&dtypes, Some(table().len() as u32)).unwrap();
    let (layouts, cuts) = cut(plan, &pipeline, files);
    let sources = sources(&pipeline, &layouts, cuts, trouble.manifests);
    let sources = with_weights(sources, &pipeline, files);
    let documents = files.iter().map(File::documents).collect();
    let order: StreamOrder = match plan.megatron_order(documents, 1 << 20) {
        Some(order) => order.unwrap().into(),
        None => pipeline.order(&layouts).unwrap().into(),
    };
    let delivery = Delivery {
        window_tokens: pipeline.sample_tokens(),
        batch_samples: pipeline.batch_samples(),
        sample_dtype: pipeline.sample_dtype(),
        dtype: pipeline.dtype(),
        rows: pipeline.rows(),
        first_batch,
        batches: Some(batches),
        shift,
        share,
        slot_bytes: SLOT_BYTES,
    };
    let setup = ReaderSetup::leaving_out(order, sources, delivery, &left_out);
    let memory_bytes = LocalReader::memory_bytes(&setup, trouble.manifests);
    let mut memory = Arena::new(memory_bytes as usize, &mut draw);
    let depth = 1 + draw.below(16) as u32;
    let files = described(files, trouble.manifests);
    let mut reader = LocalReader::new(setup, files, depth, Arena::BASE, toy::KERNELS);
    reader.set_table(table());
    reader.set_action(Some(Arc::new(Flip)));
    let mut disk = TestDisk {
        files: on_disk,
        // At times fewer reads than the reader would have under way.
        depth: 1 + draw.below(16) as usize,
        under_way: Vec::new(),
        landed: VecDeque::new(),
        reads: 0,
        offsets: Vec::new(),
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

/// A loss weight that is no number ends the stream at its sample, after all that come before it.
#[test]
fn a_weight_that_is_not_finite_ends_the_stream() {
    for (text, seed) in
        [("", 1), (" | shuffle(3, blocks=2, block=4KiB)", 2), (" | pack(best, pad=9)", 3)]
    {
        let mut files = [file(Dtype::U16, 9_000, 1)];
        let mut weights: Vec<f32> = (0..9_000).map(|at| at as f32).collect();
        weights[4_321] = if seed == 2 { f32::INFINITY } else { f32::NAN };
        files[0].loss_weights = Some(weights);
        let plan =
            Plan::parse(&format!("window(50) | loss_weights | batch(3){text}"), None).unwrap();
        let ran =
            run(&plan, &files, contents(&files), Part::all((0, 200)), seed, Trouble::default());
        let described = files.iter().map(|file| (file.described, |index| token_of(file, index)));
        let mut reference = known(Reference::new(&plan, described.collect()), &files);
        for (number, batch) in &ran.host.batches {
            assert_eq!(reference.batch(*number).as_ref(), Ok(batch), "batch {number}");
        }
        let refused = reference.batch(ran.host.batches.len() as u64);
        assert_eq!(refused, Err(ReferenceError::Weight { dataset: 0, token: 4_321 }));
        let Some(Err(error @ StreamError::Overflow { dataset: 1, token: 4_321, limit, .. })) =
            ran.host.end
        else {
            panic!("{:?}", ran.host.end);
        };
        assert_eq!(limit, Limit::Finite);
        let shown = if seed == 2 {
            "token 4321 (byte 17284) is inf"
        } else {
            "token 4321 (byte 17284) is NaN"
        };
        assert!(error.to_string().contains(shown), "{error}");
    }
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

/// The actions that make rows of a sample.
fn rows_text(
    (pairs, ignore, positions): (bool, u32, bool),
    narrow: &str,
    widen: u32,
) -> &'static str {
    match (pairs, ignore, positions) {
        (true, 0, true) => " | pairs(ignore=7, labels=targets) | positions",
        (true, 0, false) => " | pairs(ignore=7)",
        (true, 1, _) if narrow == "u32" && widen == 2 => " | positions | pairs(ignore=-100)",
        (true, 2, false) => " | pairs(ignore=9, labels=targets)",
        (true, _, true) => " | pairs | positions",
        (true, _, false) => " | pairs",
        (false, _, true) => " | positions",
        (false, _, false) => "",
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
    let rows = (0..6usize, 0..3u32, any::<bool>(), parts(), weights_text());
    (files, shuffle, form, wide, range, (2..40u32, 1..9u32, 0..4u32, 0..8u32, rows)).prop_map(
        |(
            files,
            shuffle,
            (narrow, widen, pairs, overlap),
            wide,
            range,
            (window, batch, policy, form, (pack, ignore, positions, (part, part_seed), weights)),
        )| {
            let (first_batch, batches, seed, starts, leave_out) = range;
            let narrow = if files.iter().any(|file| file.0 == Dtype::U16) { "u16" } else { narrow };
            let fit = Fit::ALL.get(pack).filter(|_| files.len() < 4);
            let overlap = if fit.is_some() { 0 } else { overlap % window };
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
            text += &if form == 3 { Flip::text() } else { String::new() };
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
            text += rows_text((pairs, ignore, positions), narrow, widen);
            text += weights;
            text += &fit.map_or(String::new(), |fit| format!(" | pack({}, pad=9)", fit.name()));
            text += &part_text(fit.is_some(), part, part_seed);
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

/// Parts of which every file has a sample.
fn parts() -> impl Strategy<Value = (&'static str, u64)> {
    let parts = vec!["", "", "split('1,3', part=valid", "split('0,1,2', part=test"];
    (prop::sample::select(parts), any::<u64>())
}

fn weights_text() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec!["", "", "", " | loss_weights", " | loss_weights(missing=0.3)"])
}

/// A part of the files; packed documents are divided before they get here.
fn part_text(is_packed: bool, part: &str, seed: u64) -> String {
    if is_packed || part.is_empty() { String::new() } else { format!(" | {part}, seed={seed})") }
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

/// The files of tokens, then those of loss weights.
fn contents(files: &[File]) -> Vec<Vec<u8>> {
    let tokens = files.iter().map(|file| file.bytes.clone());
    let weights = files.iter().filter_map(|file| file.loss_weights.as_ref());
    let bytes =
        |weights: &Vec<f32>| weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
    tokens.chain(weights.map(bytes)).collect()
}

/// A reference that knows the documents of its files.
fn known<R: TokenReader>(
    reference: Result<Reference<R>, ReferenceError>,
    files: &[File],
) -> Reference<R> {
    let documents = files.iter().map(|file| file.documents.clone()).collect();
    let targets = files.iter().map(File::targets).collect();
    let weights = files.iter().map(|file| file.loss_weights.clone()).collect();
    let reference = reference.unwrap().with_documents(documents).unwrap();
    reference.with_targets(targets).with_loss_weights(weights)
}

proptest! {
    /// Every batch is the reference's, up to the one that holds a token that does not fit.
    #[test]
    fn local_streams_deliver_what_the_reference_says(case in case(), manifests in any::<bool>()) {
        let plan = Plan::parse(&case.text, None).unwrap();
        let files = made(&case);
        let described = files.iter().map(|file| (file.described, |index| token_of(file, index)));
        let reference = known(Reference::new(&plan, described.collect()), &files);
        let mut reference = reference.with_table(table().to_vec()).with_action(Flip::one);
        let Case { first_batch, batches, seed, .. } = case;
        let trouble = Trouble { manifests, ..Trouble::default() };
        let (range, numbers) = ((first_batch, batches), case.numbers());
        let ran = run(&plan, &files, contents(&files), Part::without(range, case.left_out()), seed, trouble);
        let delivered = ran.host.batches.len();
        for (number, (said, batch)) in numbers.iter().zip(&ran.host.batches) {
            prop_assert_eq!(said, number);
            let want = reference.batch(*number);
            prop_assert_eq!(want.as_ref(), Ok(batch), "batch {}", number);
        }
        match ran.host.end {
            Some(Ok(())) => prop_assert_eq!(delivered, numbers.len()),
            Some(Err(StreamError::Overflow { dataset, token, value, limit, .. })) => {
                let refused = reference.batch(numbers[delivered]);
                let dataset = dataset as usize;
                let expected = ReferenceError::Overflow { dataset, token, value, limit };
                prop_assert_eq!(refused, Err(expected));
            }
            other => prop_assert!(false, "{other:?}"),
        }
    }

    /// The rings of all ranks together hold the order, whatever the number of ranks, the share of a
    /// stream, the sample that it begins with and the steps that are left out.
    #[test]
    fn ranks_share_the_order(
        case in case(),
        (ranks, first, count) in (1..9u32, any::<u32>(), any::<u32>()),
        shift in any::<u32>(),
        gone in (0..30u64, 1..5u64),
    ) {
        let case = Case { wide: None, text: case.text.replace(" | remap(t)", ""), ..case };
        let plan = Plan::parse(&case.text, None).unwrap();
        let first = first % ranks;
        let share = Share { ranks, first, count: 1 + count % (ranks - first) };
        let shift = shift % plan.batch();
        let files = made(&case);
        let Case { first_batch, batches, seed, .. } = case;
        let in_batches = |step: u64| first_batch + step * u64::from(ranks);
        let gone = gone.0..gone.0 + gone.1;
        let left_out = LeaveOut::new(std::iter::once(in_batches(gone.start)..in_batches(gone.end)));
        let part = Part { range: (first_batch, batches), left_out: left_out.unwrap(), shift, share };
        let ran = run(&plan, &files, contents(&files), part, seed, Trouble::default());
        let steps: Vec<u64> = (0..batches).filter(|step| !gone.contains(step)).collect();
        prop_assert_eq!(ran.host.end, Some(Ok(())));
        let rings = if steps.is_empty() { 0 } else { share.count as usize };
        prop_assert_eq!(ran.host.by_ring.len(), rings);
        let one_by_one = case.text.replace(&format!("batch({})", plan.batch()), "batch(1)");
        let single = Plan::parse(&one_by_one, None).unwrap();
        let described = files.iter().map(|file| (file.described, |index| token_of(file, index)));
        let mut reference = known(Reference::new(&single, described.collect()), &files).with_action(Flip::one);
        let size = u64::from(plan.batch());
        for (ring, batches) in &ran.host.by_ring {
            prop_assert_eq!(batches.len(), steps.len());
            for (step, (numbered, batch)) in steps.iter().zip(batches) {
                prop_assert_eq!(*numbered, first_batch + step);
                let number = first_batch + step * u64::from(ranks) + u64::from(first + ring);
                let begin = number * size + u64::from(shift);
                let samples: Vec<Vec<u8>> =
                    (begin..begin + size).map(|sample| reference.batch(sample).unwrap()).collect();
                let rows = if plan.pairs() { 2 } else { 1 } + if plan.positions() { 2 } else { 0 };
                let tokens = (plan.window() - u32::from(plan.pairs())) as usize;
                let width = reference.dtype().bytes() as usize * tokens;
                let each = |bytes: Range<usize>| {
                    samples.iter().flat_map(|sample| sample[bytes.clone()].to_vec()).collect()
                };
                let row = |row: usize| -> Vec<u8> { each(row * width..(row + 1) * width) };
                let mut want: Vec<u8> = (0..rows).flat_map(row).collect();
                if plan.loss_weights().is_some() {
                    let first = (rows * width).next_multiple_of(4);
                    want.resize(want.len().next_multiple_of(4), 0);
                    want.extend::<Vec<u8>>(each(first..first + 4 * tokens));
                    want.resize(want.len().next_multiple_of(8), 0);
                }
                prop_assert_eq!(batch, &want, "batch {}", number);
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
        let reference = known(Reference::new(&plan, described.collect()), &files);
        let mut reference = reference.with_table(table().to_vec()).with_action(Flip::one);
        let Case { first_batch, batches, seed, .. } = case;
        let (range, numbers) = ((first_batch, batches), case.numbers());
        let trouble = Trouble::default();
        let ran = run(&plan, &files, on_disk, Part::without(range, case.left_out()), seed, trouble);
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Files overwritten in place end the stream, or nothing of their new bytes is delivered. With
    /// a manifest one changed bit in a block that is read afterwards suffices, and the error names
    /// the block.
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
        let ran = run(&plan, &files, contents(&files), Part::all((0, 500)), seed, trouble);
        let described = files.iter().map(|file| (file.described, |index| token_of(file, index)));
        let mut reference = Reference::new(&plan, described.collect()).unwrap().with_action(Flip::one);
        for (number, batch) in &ran.host.batches {
            let want = reference.batch(*number);
            prop_assert_eq!(want.as_ref(), Ok(batch), "batch {}", number);
        }
        let at_byte = byte as u64 / SUM_BYTES * SUM_BYTES;
        match ran.host.end {
            // All that is needed was read before, or the bit is in none of the tokens that were
            // read after.
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Samples of Megatron-core's order, whose pieces lie anywhere in the files: on any disk, for
    /// any ranks.
    #[test]
    fn listed_samples_are_delivered_piece_by_piece(
        lengths in prop::collection::vec(200..900u64, 1..4),
        (window, samples, seed) in (2..60u32, 20..200u64, any::<u32>()),
        (batch, first_batch, ranks, first) in (1..5u32, 0..8u64, 1..4u32, any::<u32>()),
        (pairs, positions) in (any::<bool>(), any::<bool>()),
        manifests in any::<bool>(),
    ) {
        let names: Vec<String> = (0..lengths.len()).map(|i| format!("d{i}={}", i + 1)).collect();
        let blend = if names.len() > 1 { format!(" | blend({})", names.join(", ")) } else { String::new() };
        let text = format!(
            "window({window}, overlap=1) | order(megatron, seed={seed}, samples={samples}){blend} | batch({batch}){}{}",
            if pairs { " | pairs" } else { "" },
            if positions { " | positions" } else { "" },
        );
        let plan = Plan::parse(&text, None).unwrap();
        let files: Vec<File> =
            (0..).zip(&lengths).map(|(salt, tokens)| file(Dtype::U16, *tokens, salt)).collect();
        let documents: Vec<Documents> = files
            .iter()
            .map(|file| Documents::new(file.documents.iter().cloned()).unwrap())
            .collect();
        let order = plan.megatron_order(documents, 1 << 20).unwrap();
        prop_assume!(order.is_ok());
        let order = order.unwrap();
        let steps = (order.samples() / u64::from(batch)).saturating_sub(first_batch) / u64::from(ranks);
        prop_assume!(steps > 0);
        let share = Share { ranks, first: first % ranks, count: 1 };
        let part = Part { share, ..Part::all((first_batch, steps)) };
        let trouble = Trouble { manifests, ..Trouble::default() };
        let ran = run(&plan, &files, contents(&files), part, seed.into(), trouble);
        prop_assert_eq!(&ran.host.end, &Some(Ok(())));
        prop_assert_eq!(ran.host.batches.len() as u64, steps);
        let mut picks = order.cursor_at(0).collect::<Vec<_>>().into_iter();
        let picks = picks.as_mut_slice();
        for (step, (_, got)) in (0..).zip(&ran.host.batches) {
            let number = first_batch + step * u64::from(ranks) + u64::from(share.first);
            let mut rows: Vec<Vec<u16>> = vec![Vec::new(); 1 + usize::from(pairs) + 2 * usize::from(positions)];
            for n in number * u64::from(batch)..(number + 1) * u64::from(batch) {
                let (dataset, k) = picks[n as usize];
                let (mut tokens, mut places) = (Vec::new(), Vec::new());
                for (document, piece) in (1..).zip(order.pieces(dataset, k)) {
                    places.extend((0..(piece.end - piece.start) as u16).map(|i| (i, document)));
                    tokens.extend(piece.map(|token| token_of(&files[dataset], token).unwrap() as u16));
                }
                let inputs = tokens.len() - usize::from(pairs);
                rows[0].extend(&tokens[..inputs]);
                if pairs {
                    rows[1].extend(&tokens[1..]);
                }
                if positions {
                    let last = rows.len() - 1;
                    rows[last - 1].extend(places[..inputs].iter().map(|place| place.0));
                    rows[last].extend(places[..inputs].iter().map(|place: &(u16, u16)| place.1));
                }
            }
            let want: Vec<u8> = rows.iter().flatten().flat_map(|value| value.to_le_bytes()).collect();
            prop_assert!(got == &want, "batch {}", number);
        }
    }
}

/// Of a block of packed documents only the sample with a token that does not fit fails, and none if
/// it is in no document.
#[test]
fn a_packed_sample_fails_alone() {
    let text =
        "window(64) | pack(best) | shuffle(1, blocks=1, block=4KiB) | narrow(u16) | batch(1)";
    let plan = Plan::parse(text, None).unwrap();
    for is_in_a_document in [true, false] {
        let mut files = [file(Dtype::U32, 4_000, 1)];
        let is_in = |token: &u64| files[0].documents.iter().any(|range| range.contains(token));
        let bad = (0..4_000).rev().find(|token| is_in(token) == is_in_a_document).unwrap();
        files[0].bytes[4 * bad as usize + 3] = 1;
        let described = files.iter().map(|file| (file.described, |index| token_of(file, index)));
        let mut reference = known(Reference::new(&plan, described.collect()), &files);
        let samples = (0..200).take_while(|number| reference.batch(*number).is_ok()).count();
        for manifests in [false, true] {
            let trouble = Trouble { manifests, ..Trouble::default() };
            let ran = run(&plan, &files, contents(&files), Part::all((0, 200)), 1, trouble);
            assert_eq!(ran.host.batches.len(), samples);
            for (number, batch) in &ran.host.batches {
                assert_eq!(reference.batch(*number).as_ref(), Ok(batch));
            }
            match ran.host.end {
                Some(Err(StreamError::Overflow { token, .. })) if is_in_a_document => {
                    assert_eq!(token, bad);
                }
                other => assert!(!is_in_a_document && other == Some(Ok(())), "{other:?}"),
            }
        }
    }
}

/// Parts of datasets whose runs have several samples, in file order and shuffled: all of them as
/// the reference says.
#[test]
fn parts_of_large_files_are_what_the_reference_says() {
    let files = [file(Dtype::U16, 40_003, 1), file(Dtype::U32, 90_010, 2)];
    for shuffle in ["", " | shuffle(5)", " | shuffle(5, blocks=3, block=4KiB)"] {
        for part in ["train", "valid", "test"] {
            let text = format!(
                "window(4, overlap=1) | blend(a=1, b=2) | narrow(u16) | split('96,3,1', part={part}, seed=9){shuffle} | batch(7)"
            );
            let plan = Plan::parse(&text, None).unwrap();
            let described = files.iter().map(|file| (file.described, |i| token_of(file, i)));
            let mut reference = known(Reference::new(&plan, described.collect()), &files);
            let trouble = Trouble::default();
            let ran = run(&plan, &files, contents(&files), Part::all((3, 400)), 1, trouble);
            assert_eq!((ran.host.end, ran.host.batches.len()), (Some(Ok(())), 400), "{text}");
            for (number, batch) in &ran.host.batches {
                assert_eq!(reference.batch(*number).as_ref(), Ok(batch), "{text}, batch {number}");
            }
        }
    }
}

/// Few documents that lie far apart are packed in blocks of fewer samples: before, such a plan was
/// refused.
#[test]
fn documents_far_apart_are_packed_into_smaller_blocks() {
    let mut files = [file(Dtype::U16, 3_000_000, 1)];
    let document = |at: u64| at * 40_000..at * 40_000 + 50 + at * 37 % 600;
    files[0].documents = (0..75).map(document).collect();
    for fit in ["best", "first", "single"] {
        for shuffle in ["", " | shuffle(5)"] {
            let text = format!("window(500) | pack({fit}) | narrow(u16){shuffle} | batch(3)");
            let plan = Plan::parse(&text, None).unwrap();
            let described = files.iter().map(|file| (file.described, |i| token_of(file, i)));
            let mut reference = known(Reference::new(&plan, described.collect()), &files);
            let trouble = Trouble::default();
            let ran = run(&plan, &files, contents(&files), Part::all((0, 60)), 1, trouble);
            assert_eq!((ran.host.end, ran.host.batches.len()), (Some(Ok(())), 60), "{text}");
            for (number, batch) in &ran.host.batches {
                assert_eq!(reference.batch(*number).as_ref(), Ok(batch), "{text}, batch {number}");
            }
        }
    }
}

#[test]
fn a_disk_that_fails_ends_a_local_stream() {
    let files = [file(Dtype::U32, 5_000, 1)];
    let plan = Plan::parse("window(10) | batch(3)", None).unwrap();
    for manifests in [false, true] {
        let trouble = Trouble { fault: Some(5), manifests, ..Trouble::default() };
        let ran = run(&plan, &files, contents(&files), Part::all((0, 9)), 1, trouble);
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
        let (part, trouble) = (Part::all((0, batches)), Trouble::default());
        let ran = run(&plan, &files, contents(&files), part, batches, trouble);
        assert_eq!((ran.host.end, ran.disk.reads), (Some(Ok(())), blocks), "{batches} batches");
    }
}

/// Batches that are left out are not read, whatever their number; nothing of the others is read
/// twice.
#[test]
fn what_is_left_out_is_not_read() {
    let files = [file(Dtype::U32, 1_000_000, 1)];
    let plan = Plan::parse("window(100) | batch(1)", None).unwrap();
    // 2,621 samples fill a block of 1 MiB: batches of the first and of the last of four.
    let far = LeaveOut::new(std::iter::once(5..9_000)).unwrap();
    let ran =
        run(&plan, &files, contents(&files), Part::without((0, 9_005), far), 3, Trouble::default());
    let numbers: Vec<u64> = ran.host.batches.iter().map(|(number, _)| *number).collect();
    assert_eq!(numbers, [0, 1, 2, 3, 4, 9_000, 9_001, 9_002, 9_003, 9_004]);
    assert_eq!((ran.host.end, ran.disk.reads), (Some(Ok(())), 2));
    // Nothing is left, and a token that would end the stream is not reached.
    let mut bad = [file(Dtype::U32, 5_000, 1)];
    bad[0].bytes[4 * 550 + 3] = 1;
    let plan = Plan::parse("window(100) | narrow(u16) | batch(1)", None).unwrap();
    for (left_out, delivered) in [(0..50, 0), (5..6, 9), (9..60, 5), (5..7, 8)] {
        let left_out = LeaveOut::new(std::iter::once(left_out.clone())).unwrap();
        let part = Part::without((0, 10), left_out.clone());
        let ran = run(&plan, &bad, contents(&bad), part, 4, Trouble::default());
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

/// A batch of 4 samples takes at most 4 of the 64 blocks of its group: they are read before the
/// others.
#[test]
fn the_first_batch_waits_for_its_own_blocks_only() {
    let plan = "window(64) | shuffle(7, blocks=64, block=4KiB) | batch(4)";
    let plan = Plan::parse(plan, None).unwrap();
    for seed in 0..20 {
        let files = [file(Dtype::U16, 64 << 11, seed)];
        let order = plan.order(&[plan.layout(0, files[0].described).unwrap()]).unwrap();
        let mut needed = Vec::new();
        for place in order.cursor_at(seed * 400).take(4).map(|sample| sample.place) {
            if !needed.contains(&(place.block << 12)) {
                needed.push(place.block << 12);
            }
        }
        let on_disk = vec![files[0].bytes.clone()];
        let part = Part::all((seed * 100, 40));
        let ran = run(&plan, &files, on_disk, part, seed, Trouble::default());
        assert_eq!(ran.host.slot_batches[..2], [1, 23], "seed {seed}: the first comes at once");
        assert_eq!(ran.disk.offsets[..needed.len()], needed, "seed {seed}");
        assert_eq!(ran.host.batches.len(), 40);
    }
}

/// Most datasets have blocks of a few samples, one has large ones in groups.
#[test]
fn hundreds_of_files_are_what_the_reference_says() {
    let (count, batches) = (200, 30);
    let files: Vec<File> = (0..count).map(|i| file(Dtype::U16, 700 + 13 * i, i)).collect();
    for (text, seed) in [("shuffle(5) | ", 1), ("", 2), ("shuffle(5, blocks=3, block=4KiB) | ", 3)]
    {
        let weight = |i: u64| if i == 7 { 50_000 } else { 1 + i % 40 };
        let parts: Vec<String> = (0..count).map(|i| format!("f{i}={}", weight(i))).collect();
        let text = format!("window(64) | {text}batch(16) | blend({})", parts.join(", "));
        let plan = Plan::parse(&text, None).unwrap();
        let on_disk = files.iter().map(|file| file.bytes.clone()).collect();
        let part = Part::all((100, batches));
        let ran = run(&plan, &files, on_disk, part, seed, Trouble::default());
        let reader = |file: &File| {
            let (described, file) = (file.described, file.bytes.clone());
            let token = move |index: u64| {
                let raw = file.get(2 * index as usize..2 * index as usize + 2)?;
                Some(i128::from(u16::from_le_bytes([raw[0], raw[1]])))
            };
            (described, token)
        };
        let mut reference = Reference::new(&plan, files.iter().map(reader).collect()).unwrap();
        assert_eq!(ran.host.batches.len() as u64, batches);
        for (number, bytes) in &ran.host.batches {
            assert!(*bytes == reference.batch(*number).unwrap(), "{text}: batch {number}");
        }
    }
}
