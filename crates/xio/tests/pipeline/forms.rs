//! Blocks that cross the wire packed or compressed: the same bytes are delivered, whatever form
//! each has.

use sim::chance::Chance;
use xio::capsule::Outcome;
use xio::dataset::Dtype;
use xio::kernel::{Codec, Compression, Quant};
use xio::stage::{BlockPlan, Packing};

use super::corpus::{Corpus, Recipe, Shape};
use super::raw::{Fake, Reply};
use super::ring::End;
use super::seeds::{Replay, seeds};
use super::world::{Setup, World};

/// Leaves only these bits of every token.
fn mask_tokens(corpus: &mut Corpus, mask: u64) {
    for dataset in &mut corpus.datasets {
        let (mut bytes, start) = (dataset.bytes.to_vec(), dataset.byte_of(0) as usize);
        let width = dataset.layout.file.dtype.bytes() as usize;
        for token in bytes[start..].chunks_exact_mut(width) {
            token.iter_mut().zip(mask.to_le_bytes()).for_each(|(byte, mask)| *byte &= mask);
        }
        dataset.bytes = bytes.into();
    }
}

fn lz4(always: bool) -> Option<Compression> {
    Compression::new(Codec::Lz4, 0, always)
}

/// A corpus whose blocks have a form on the wire.
fn draw_corpus(draw: &mut Chance) -> Corpus {
    loop {
        let mut corpus = Corpus::draw(draw);
        let (packing, compression, bits) = match (draw.below(5), corpus.deliver) {
            (0, Dtype::U16) => (Some(Packing::Bits(11)), None, 11),
            (0, Dtype::U32) => (Some(Packing::Bits(17)), None, 17),
            (1, Dtype::U32) => (Some(Packing::Escape), None, draw.pick(&[16, 17, 32])),
            (2, Dtype::U32) => (Some(Packing::EscapeWhole), lz4(true), draw.pick(&[8, 16, 20])),
            (3, _) => (None, lz4(true), draw.pick(&[7, 15, 60])),
            (4, _) => (None, lz4(false), 7),
            _ => continue,
        };
        mask_tokens(&mut corpus, (1 << bits) - 1);
        corpus.asked = BlockPlan { packing, compression, ..corpus.asked };
        return corpus;
    }
}

#[test]
fn every_form_delivers_the_same_bytes() {
    let (mut packed, mut compressed, mut plain) = (0, 0, 0);
    for seed in seeds(0..60) {
        let _replay = Replay { test: "every_form_delivers_the_same_bytes", seed };
        let mut draw = Chance::new(seed);
        let corpus = draw_corpus(&mut draw);
        let mut setup = Setup::draw(&corpus, &mut draw);
        setup.narrow_at_target = draw.per_mille(700);
        let mut world = World::new(&corpus, &setup);
        world.run();
        world.assert_delivered();
        let counters = world.target.target.counters();
        packed += counters.packed_blocks;
        compressed += counters.compressed_blocks;
        plain += counters.plain_blocks_no_gain;
        let sent = counters.compressed_blocks;
        let arrived: u64 =
            world.readers.iter().map(|host| host.reader.counters().compressed_blocks).sum();
        assert!(arrived <= sent, "{arrived} of {sent} compressed blocks");
    }
    assert!(packed > 50 && compressed > 50 && plain > 50, "{packed}, {compressed}, {plain}");
}

/// A corpus of values that every code can stand for, so that they come back as they were.
fn exact_values(draw: &mut Chance) -> Corpus {
    let window = draw.between(1, 99) as u32;
    let shape = |draw: &mut Chance| Shape {
        dtype: Dtype::F32,
        data_offset: draw.pick(&[0, 64, 128, 4_096]),
        samples: draw.between(1, 89),
        tail_tokens: draw.below(window.into()),
        per_block: draw.between(1, 12) as u32,
    };
    let shapes: Vec<Shape> = (0..draw.between(1, 3)).map(|_| shape(draw)).collect();
    let recipe = Recipe {
        window,
        batch_samples: draw.between(1, 6) as u32,
        deliver: Dtype::F32,
        weights: shapes.iter().map(|_| draw.between(1, 5) as u32).collect(),
        group: draw.per_mille(800).then(|| draw.between(1, 8) as u32),
        seed: draw.word(),
    };
    let mut corpus = Corpus::new(&shapes, &recipe, draw);
    let (quant, largest) = draw.pick(&[(Quant::Int8, 127), (Quant::E4m3, 14), (Quant::E5m2, 7)]);
    for dataset in &mut corpus.datasets {
        let (mut bytes, start) = (dataset.bytes.to_vec(), dataset.byte_of(0) as usize);
        for raw in bytes[start..].as_chunks_mut().0 {
            let value = (u32::from_le_bytes(*raw) >> 3) % (2 * largest + 1);
            // The sum has no sign where it is zero, which not every code has.
            *raw = (value as f32 - largest as f32).to_le_bytes();
        }
        dataset.bytes = bytes.into();
    }
    let compression = draw.per_mille(500).then(|| lz4(true)).flatten();
    corpus.asked = BlockPlan { quantize: Some((quant, window)), compression, ..corpus.asked };
    corpus
}

#[test]
fn quantized_blocks_come_back_as_values() {
    for seed in seeds(0..60) {
        let _replay = Replay { test: "quantized_blocks_come_back_as_values", seed };
        let mut draw = Chance::new(seed);
        let corpus = exact_values(&mut draw);
        let mut setup = Setup::draw(&corpus, &mut draw);
        setup.narrow_at_target = draw.per_mille(700);
        let mut world = World::new(&corpus, &setup);
        world.run();
        world.assert_delivered();
        let (read, sent) = {
            let counters = world.target.target.counters();
            (counters.source_bytes, counters.written_bytes)
        };
        assert!(corpus.window < 32 || sent * 2 < read, "{sent} bytes of {read}");
    }
}

/// A link that needs less time for the bytes that are saved than the codec for the block.
#[test]
fn a_codec_slower_than_the_link_is_skipped_unless_the_plan_insists() {
    let fast = Compression::new(Codec::Zstd, 1, false);
    for (compression, skips) in [(lz4(false), true), (lz4(true), false), (fast, false)] {
        let mut corpus = Corpus::one_file(&mut Chance::new(7));
        mask_tokens(&mut corpus, 0x7f);
        corpus.asked = BlockPlan { compression, ..corpus.asked };
        let mut world = World::new(&corpus, &Setup::plain(&corpus, 2_000));
        world.run();
        world.assert_delivered();
        let counters = *world.target.target.counters();
        let all = counters.compressed_blocks + counters.plain_blocks_fast_link;
        assert_eq!((counters.done, counters.plain_blocks_no_gain), (all, 0));
        let reader = world.readers[0].reader.counters();
        assert_eq!(reader.compressed_blocks, counters.compressed_blocks);
        assert_eq!(reader.plain_blocks, counters.plain_blocks_fast_link);
        assert!(counters.codec_out_bytes < counters.codec_in_bytes);
        match skips {
            true => assert!(counters.plain_blocks_fast_link > all / 2, "{counters:?}"),
            false => assert_eq!(counters.plain_blocks_fast_link, 0),
        }
    }
}

/// A target that lies about forms and sends anything: no panic, and never wrong bytes.
#[test]
fn forms_that_a_target_makes_up_are_refused() {
    let (mut finished, mut refused) = (0, 0);
    for seed in seeds(0..60) {
        let _replay = Replay { test: "forms_that_a_target_makes_up_are_refused", seed };
        let mut draw = Chance::new(seed);
        let mut corpus = Corpus::one_file(&mut draw);
        corpus.asked = match draw.below(2) {
            0 => BlockPlan { compression: lz4(true), ..corpus.asked },
            _ => corpus.asked,
        };
        let (mut lies, rate) = (Chance::new(draw.word()), draw.pick(&[20, 60]));
        let fake = Fake::new(&corpus, move |_, reply| {
            if lies.per_mille(rate) {
                lie(reply, &mut lies);
            }
        });
        let mut world = World::with_fake(&corpus, &Setup::plain(&corpus, 110), fake);
        world.run();
        let ring = &world.readers[0].ring;
        assert!(ring.seen == corpus.expected(0, ring.batches_seen), "wrong bytes were delivered");
        finished += u64::from(ring.end() == Some(End::Finished));
        refused += world.readers[0].reader.counters().corrupt_blocks;
    }
    assert!(finished > 10 && refused > 30, "{finished} finished, {refused} refused");
}

fn lie(reply: &mut Reply, draw: &mut Chance) {
    let Outcome::Done { bytes, bits, codec, replaced, .. } = &mut reply.response.outcome else {
        return;
    };
    match draw.below(4) {
        0 => *bits = draw.word() as u8,
        1 => *codec = Some(draw.pick(&Codec::ALL)),
        2 => {
            (*codec, *bytes) = (Some(Codec::Lz4), draw.below(u64::from(*bytes) + 9) as u32);
            let at = draw.below(reply.data.len() as u64) as usize;
            reply.data[at] ^= draw.word() as u8;
        }
        // Nothing checks what a target says it has replaced.
        _ => *replaced = draw.word() as u32,
    }
}
