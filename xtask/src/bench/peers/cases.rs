//! What is measured: peers and Dquant, and which of them deliver the same.

/// What a case delivers; only cases with the same output are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Output {
    /// Batches of 32 samples of 2,048 tokens as `u16`.
    Tokens,
    /// The same as `int64` inputs and labels.
    Pairs,
    /// Bytes of the device: what "from disk" is compared with.
    Device,
    /// Figures of Dquant alone.
    Alone,
}

impl Output {
    pub(super) const TABLES: [(Output, &str); 3] = [
        (Output::Tokens, "u16 [32, 2048]"),
        (Output::Pairs, "int64 x, y [32, 2048]"),
        (Output::Device, "bytes of the device"),
    ];
}

/// One row.
#[derive(Debug)]
pub(super) struct Case {
    /// Its name in `xtask/peers/measure.py`.
    pub(super) key: &'static str,
    pub(super) name: &'static str,
    pub(super) output: Output,
    /// Files of the corpus that it reads, heated before each run. Streams of Dquant from the same
    /// files are equal.
    pub(super) reads: &'static [&'static str],
    /// What must be installed.
    pub(super) needs: &'static [&'static str],
    /// How its target reads, if it has one.
    pub(super) target: Option<&'static str>,
}

/// The row that those of the same output are compared with.
pub(super) const REFERENCES: [(Output, &str); 2] =
    [(Output::Tokens, "memmap-random"), (Output::Pairs, "nanogpt")];

impl Case {
    /// Whether it measures others: they may fail.
    pub(super) fn is_peer(&self) -> bool {
        !self.name.starts_with("dquant") && self.output != Output::Alone
    }

    /// What its stream is, if it must be equal to others.
    pub(super) fn stream(&self) -> (Output, &'static [&'static str]) {
        (self.output, self.reads)
    }
}

const fn case(
    key: &'static str,
    name: &'static str,
    output: Output,
    reads: &'static [&'static str],
    needs: &'static [&'static str],
) -> Case {
    Case { key, name, output, reads, needs, target: None }
}

const fn at(target: &'static str, case: Case) -> Case {
    Case { target: Some(target), ..case }
}

const U32: &[&str] = &["u32"];
const ALL32: &[&str] = &["all32.bin"];
const ALL16: &[&str] = &["all16.bin"];
const TORCH: &[&str] = &["torch"];

/// In the order of the table, which is also that of a round.
pub(super) const CASES: &[Case] = &[
    case("memmap-random", "numpy memmap, random, u32 file", Output::Tokens, ALL32, &[]),
    case("memmap-random-u16", "numpy memmap, random, u16 file", Output::Tokens, ALL16, &[]),
    case("memmap-sequential", "numpy memmap, sequential, u32 file", Output::Tokens, ALL32, &[]),
    case("preadv", "plain loop: preadv and narrow, u32 file", Output::Tokens, ALL32, &[]),
    case("preadv-u16", "plain loop: preadv, u16 file", Output::Tokens, ALL16, &[]),
    case("litdata", "LitData, shuffled", Output::Tokens, &["litdata"], &["torch", "litdata"]),
    case("mds", "MosaicML Streaming, shuffled", Output::Tokens, &["mds"], &["torch", "mds"]),
    case(
        "webdataset",
        "WebDataset, shuffle 1000",
        Output::Tokens,
        &["webdataset"],
        &["torch", "webdataset"],
    ),
    at("buffered", case("offload", "dquant, offload", Output::Tokens, U32, &[])),
    at("direct", case("offload-disk", "dquant, offload, from disk", Output::Tokens, U32, &[])),
    at("buffered", case("no-offload", "dquant, no offload", Output::Tokens, U32, &[])),
    case("local", "dquant, local u32 files", Output::Tokens, U32, &[]),
    case("local-u16", "dquant, local u16 files", Output::Tokens, &["u16"], &[]),
    case("nanogpt", "nanoGPT style, u16 file", Output::Pairs, ALL16, TORCH),
    at("buffered", case("offload-pairs", "dquant, offload", Output::Pairs, U32, TORCH)),
    case("local-pairs", "dquant, local u32 files", Output::Pairs, U32, TORCH),
    case("disk-sequential", "O_DIRECT, 4 reads of 1 MiB", Output::Device, &[], &[]),
    at("buffered", case("overhead", "Python overhead", Output::Alone, U32, &[])),
    at(
        "buffered",
        case("opening", "open to first batch", Output::Alone, &["u32", "many-3000"], &[]),
    ),
];

/// The case of this key.
pub(super) fn find(key: &str) -> Option<&'static Case> {
    CASES.iter().find(|case| case.key == key)
}
