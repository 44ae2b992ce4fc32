//! The order of Megatron-core against what megatron-core itself made: `interop/megatron_order.py`
//! describes the file.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fmt::Write;

use xio::documents::Documents;
use xio::order::megatron::{DEFAULT_MAX_TABLE_BYTES, MegatronOrder, Settings, Source, split};

const GOLDEN: &str = include_str!("data/megatron.txt");

/// Samples under one checksum.
const BLOCK: u64 = 256;

/// The lines of a case, by their first word. Lines of samples are joined.
#[derive(Default)]
struct Case<'a> {
    name: &'a str,
    facts: BTreeMap<&'a str, Vec<&'a str>>,
}

impl Case<'_> {
    fn number(&self, key: &str) -> u64 {
        self.facts[key][0].parse().unwrap()
    }

    fn order(&self, corpora: &BTreeMap<&str, Documents>) -> MegatronOrder {
        let ratio = self.facts["split"][0].split(',').map(|share| share.parse().unwrap());
        let ratio: Vec<f64> = ratio.collect();
        let part = self.facts["split"][1].parse::<usize>().unwrap();
        let (mut sources, mut weights) = (Vec::new(), Vec::new());
        for data in &self.facts["data"] {
            let (name, weight) = data.split_once('=').unwrap_or((data, ""));
            let documents = corpora[name].clone();
            let part = split(&ratio, documents.len()).unwrap()[part].clone().unwrap();
            sources.push(Source { documents, part });
            weights.extend(weight.parse::<f64>());
        }
        let settings = Settings {
            seed: self.number("seed") as u32,
            sequence_tokens: self.number("sequence") as u32,
            extra_token: self.number("extra") == 1,
            samples: self.facts["samples"][0].parse().ok(),
            max_table_bytes: DEFAULT_MAX_TABLE_BYTES,
        };
        let weights = Some(weights.as_slice()).filter(|weights| !weights.is_empty());
        MegatronOrder::new(sources, weights, &settings).unwrap()
    }
}

fn golden() -> (BTreeMap<&'static str, Documents>, Vec<Case<'static>>) {
    let (mut corpora, mut cases) = (BTreeMap::new(), Vec::<Case<'_>>::new());
    for line in GOLDEN.lines().filter(|line| !line.starts_with('#')) {
        let (key, rest) = line.split_once(' ').unwrap();
        if key == "case" {
            cases.push(Case { name: rest, ..Case::default() });
        } else if key == "corpus" {
            let (name, lengths) = rest.split_once(' ').unwrap();
            let lengths = lengths.split(' ').map(|length| length.parse().unwrap());
            corpora.insert(name, Documents::contiguous(lengths).unwrap());
        } else {
            let facts = &mut cases.last_mut().unwrap().facts;
            match key {
                "sample" => facts.entry(key).or_default().push(rest),
                _ => facts.entry(key).or_default().extend(rest.split(' ')),
            }
        }
    }
    (corpora, cases)
}

/// CRC-32 as of zlib.
fn crc32(crc: u32, bytes: &[u8]) -> u32 {
    let bit = |crc: u32, _| (crc >> 1) ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 };
    !bytes.iter().fold(!crc, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), bit))
}

/// A sample as the file shows it: neighbours in one run, even across documents.
fn shown(dataset: usize, tokens: &[u32]) -> String {
    let mut text = dataset.to_string();
    for run in tokens.chunk_by(|a, b| a + 1 == *b) {
        write!(text, " {}-{}", run[0], run[run.len() - 1]).unwrap();
    }
    text
}

#[test]
fn samples_are_those_of_megatron_core() {
    let (corpora, cases) = golden();
    assert!(cases.len() >= 50);
    for case in cases {
        let order = case.order(&corpora);
        let (name, seed) = (case.name, case.number("seed"));
        let (mut crc, mut crcs, mut first) = (0, Vec::new(), Vec::new());
        for (n, (dataset, k)) in order.cursor_at(0).enumerate() {
            let tokens: Vec<u32> =
                order.pieces(dataset, k).flatten().map(|token| token as u32).collect();
            if first.len() < case.facts["sample"].len() {
                first.push(shown(dataset, &tokens));
            }
            crc = crc32(crc, &(dataset as u32).to_le_bytes());
            crc = tokens.iter().fold(crc, |crc, token| crc32(crc, &token.to_le_bytes()));
            let end = n as u64 + 1;
            if end.is_multiple_of(BLOCK) || end == order.samples() {
                crcs.push(format!("{crc:08x}"));
                crc = 0;
            }
        }
        assert_eq!(first, case.facts["sample"], "{name}, seed {seed}");
        assert_eq!(crcs, case.facts["crc"], "{name}, seed {seed}");
        let sizes = (0..).map_while(|dataset| order.dataset_samples(dataset));
        let sizes: Vec<String> = sizes.map(|size| size.to_string()).collect();
        assert_eq!(sizes, case.facts["sizes"], "{name}, seed {seed}");
        // The length of the blend in megatron-core may be larger by rounding, that of one dataset
        // by whole epochs.
        assert!(order.samples() <= case.number("length"), "{name}, seed {seed}");
    }
}
