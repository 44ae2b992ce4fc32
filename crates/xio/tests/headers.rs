//! Whether a file of ids begins with a header: files with one are found, and files without are left
//! alone.
//!
//! The files without are drawn as tokenizers and packers make them: vocabularies of several sizes,
//! ids by the law of Zipf or all alike, frequent ids small or anywhere, documents of one topic
//! each, with or without an id that ends them, empty documents, padding with zeros on either side,
//! and lines of one sign. `DQUANT_SEEDS=0..100000` draws more.

#[path = "../../../testing/seeds.rs"]
mod seeds;

use seeds::{Replay, seeds};
use xio::dataset::Dtype;
use xio::dataset::guess::{Evidence, SAMPLE_BYTES, sample_offsets};

const TYPES: [Dtype; 5] = [Dtype::U16, Dtype::U32, Dtype::I32, Dtype::U64, Dtype::I64];

/// A generator with a fixed stream per seed.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) % bound.max(1)
    }

    fn of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len() as u64) as usize]
    }
}

#[derive(Clone, Copy, Debug)]
enum Padding {
    None,
    /// To a multiple of so many ids.
    Left(u64),
    Right(u64),
}

/// How the ids of a file are distributed.
#[derive(Clone, Copy, Debug)]
struct Corpus {
    dtype: Dtype,
    count: usize,
    vocabulary: u64,
    /// Exponent of the law of Zipf; 0 for ids that are all as frequent.
    zipf: f64,
    /// Whether frequent ids are the small ones; else they differ from topic to topic.
    is_ranked: bool,
    end: Option<u64>,
    longest_document: u64,
    padding: Padding,
}

impl Corpus {
    fn draw(random: &mut Random) -> Corpus {
        let vocabulary = random.of(&[256, 512, 8_192, 32_000, 50_257, 65_536]);
        let longest_count = random.of(&[3_000, 40_000]);
        let end = random.below(vocabulary);
        Corpus {
            dtype: random.of(&TYPES),
            count: 1_000 + random.below(longest_count) as usize,
            vocabulary,
            zipf: random.of(&[0.0, 0.9, 1.1, 1.4]),
            is_ranked: random.below(2) == 0,
            end: random.of(&[None, Some(0), Some(vocabulary - 1), Some(end)]),
            longest_document: random.of(&[1, 8, 60, 700, 20_000]),
            padding: random.of(&[
                Padding::None,
                Padding::None,
                Padding::Left(64),
                Padding::Right(64),
                Padding::Left(2_048),
                Padding::Right(2_048),
            ]),
        }
    }

    fn id(&self, random: &mut Random, topic: u64) -> u64 {
        let (ids, uniform) =
            (self.vocabulary as f64, random.below(1 << 31) as f64 / 2_f64.powi(31));
        // The continuous law, inverted, is close enough.
        let power = 1.0 - self.zipf;
        let rank = (1.0 + uniform * (ids.powf(power) - 1.0)).powf(1.0 / power) - 1.0;
        let rank = (rank as u64).min(self.vocabulary - 1);
        // Unless they are ranked, 0 is as rare as most.
        if self.is_ranked { rank } else { (rank * 7_919 + topic + 1) % self.vocabulary }
    }

    fn document(&self, random: &mut Random) -> Vec<u64> {
        let (topic, length) = (random.below(5) * 1_000, random.below(self.longest_document));
        let mut ids: Vec<u64> = (0..length).map(|_| self.id(random, topic)).collect();
        if random.below(10) == 0 {
            // A line of one sign, as below titles.
            let line = vec![self.id(random, topic); random.below(40) as usize];
            ids.splice(0..0, line);
        }
        ids.extend(self.end);
        let padded = |multiple: u64| (ids.len() as u64).next_multiple_of(multiple) as usize;
        match self.padding {
            Padding::None => ids,
            Padding::Right(multiple) => {
                ids.resize(padded(multiple), 0);
                ids
            }
            Padding::Left(multiple) => {
                let zeros = padded(multiple) - ids.len();
                std::iter::repeat_n(0, zeros).chain(ids).collect()
            }
        }
    }

    fn stored(&self, random: &mut Random) -> Vec<u8> {
        let mut ids = Vec::with_capacity(self.count);
        while ids.len() < self.count {
            ids.extend(self.document(random));
            // Documents may be empty, but a file of nothing else has no end.
            ids.push(self.id(random, 0));
        }
        ids.truncate(self.count);
        stored(&ids, self.dtype)
    }
}

fn stored(ids: &[u64], dtype: Dtype) -> Vec<u8> {
    let width = dtype.bytes() as usize;
    ids.iter().flat_map(|id| id.to_le_bytes()[..width].to_vec()).collect()
}

fn evidence(data: &[u8]) -> Evidence {
    let mut evidence = Evidence::new(data.len() as u64, None);
    for at in sample_offsets(data.len() as u64) {
        let end = data.len().min((at + SAMPLE_BYTES) as usize);
        evidence.add(&data[at as usize..end]);
    }
    evidence
}

#[test]
fn files_of_ids_and_nothing_else_have_no_header() {
    let mut refused = Vec::new();
    for seed in seeds(0..1_500) {
        let mut random = Random::new(seed);
        let corpus = Corpus::draw(&mut random);
        if let Some(why) = evidence(&corpus.stored(&mut random)).header(corpus.dtype) {
            refused.push(format!("seed {seed}, {corpus:?}: {why}"));
        }
    }
    assert!(refused.is_empty(), "{} refused:\n{}", refused.len(), refused.join("\n"));
}

/// Headers of `tokens` ids of this type that no list of magic numbers knows.
fn headers(dtype: Dtype, tokens: u64) -> Vec<(&'static str, Vec<u8>)> {
    let words = |words: &[u64], width: usize| -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()[..width].to_vec()).collect()
    };
    let padded = |mut bytes: Vec<u8>, length: usize| {
        bytes.resize(length, 0);
        bytes
    };
    let bytes = tokens * u64::from(dtype.bytes());
    vec![
        ("256 i32, as llm.c, of another number", padded(words(&[20_250_211, 1, tokens], 4), 1_024)),
        ("a number, a version, a count", words(&[0x5441_4400, 3, tokens], 4)),
        ("a number, a version, a count of 64 bits", {
            [words(&[0x1234_5678, 3], 4), words(&[tokens], 8)].concat()
        }),
        ("a count of 64 bits", words(&[tokens], 8)),
        ("a count", words(&[tokens], 4)),
        ("a version and a count", words(&[1, tokens], 4)),
        ("four letters, a version, a count, a vocabulary", {
            [b"TOKS".to_vec(), words(&[1, tokens, 50_257], 4)].concat()
        }),
        ("six numbers, one a count", words(&[1, 2, tokens, 0, 50_257, 0], 4)),
        ("a version, a count, a width", words(&[1, tokens, 2], 4)),
        ("a small number and padding", padded(words(&[77, 1], 4), 256)),
        ("big-endian bytes", [&b"TOK1"[..], &(bytes as u32).to_be_bytes()].concat()),
        ("JSON", padded(br#"{"vocabulary": 50257, "tokens": 4}"#.to_vec(), 64)),
        (
            "four letters and ten numbers",
            [b"PTOK".to_vec(), words(&[1, 4, 20, 8, 16, 11, 30, 77, 4_096, 12], 4)].concat(),
        ),
    ]
}

#[test]
fn unknown_headers_are_found() {
    for seed in seeds(0..60) {
        let _replay = Replay { test: "unknown_headers_are_found", seed };
        let mut random = Random::new(seed);
        let corpus = Corpus { padding: Padding::None, end: None, ..Corpus::draw(&mut random) };
        let count = 6_000 + random.below(40_000) as usize;
        let corpus = Corpus { vocabulary: 50_257, is_ranked: false, count, ..corpus };
        let data = corpus.stored(&mut random);
        let tokens = data.len() as u64 / u64::from(corpus.dtype.bytes());
        for (what, header) in headers(corpus.dtype, tokens) {
            let width = corpus.dtype.bytes() as usize;
            // What could be an id counts only where the header ends with it.
            let could_be_an_id = ["six numbers, one a count", "a version, a count, a width"]
                .contains(&what)
                && width >= 4
                || what == "a version and a count" && width == 8;
            if !header.len().is_multiple_of(width) || could_be_an_id {
                continue;
            }
            let file = [header, data.clone()].concat();
            let found = evidence(&file).header(corpus.dtype);
            assert!(found.is_some(), "{what}: {corpus:?}");
            assert_eq!(evidence(&data).header(corpus.dtype), None, "{corpus:?}");
        }
    }
}

#[test]
fn the_type_is_guessed_behind_a_header() {
    let mut random = Random::new(3);
    for dtype in [Dtype::U16, Dtype::U32, Dtype::I64] {
        let ids: Vec<u64> = (0..9_000).map(|_| random.below(50_257)).collect();
        let data = stored(&ids, dtype);
        assert_eq!(evidence(&data).guess_behind_header(), None);
        let mut file = [0x7f53_1234_u32.to_le_bytes(), 1_u32.to_le_bytes()].concat();
        file.resize(256, 0);
        file.extend(&data);
        let (found, why) = evidence(&file).guess_behind_header().expect("a header");
        assert_eq!(found, dtype, "{why}");
    }
}

#[test]
fn ends_of_documents_are_no_guess() {
    let mut random = Random::new(5);
    let ends = (0..5_000).scan(0, |end, _| {
        *end += random.below(60);
        Some(*end)
    });
    let ends: Vec<u64> = ends.collect();
    for dtype in [Dtype::U32, Dtype::I64] {
        let why = evidence(&stored(&ends, dtype)).guess().expect_err("an index");
        assert!(why.contains("only rise"), "{why}");
    }
}
