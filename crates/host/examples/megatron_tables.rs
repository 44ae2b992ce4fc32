//! How long the tables of Megatron-core's order take to make, and how large they are.
//!
//! ```text
//! cargo run --release -p host --example megatron_tables -- 10_000_000 100_000_000 [0.5,0.3,0.2]
//! ```
//!
//! The arguments are documents of a dataset (1,000 tokens on average), samples of 2,049 tokens, and
//! weights.

#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::time::Instant;

use xio::documents::Documents;
use xio::order::megatron::{MegatronOrder, Settings, Source};

fn main() {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default: u64| {
        arguments.next().map_or(default, |text| text.replace('_', "").parse().unwrap())
    };
    let (count, samples) = (number(10_000_000), number(100_000_000));
    let weights = arguments
        .next()
        .map(|text| text.split(',').map(|weight| weight.parse().unwrap()).collect::<Vec<f64>>());
    // Lengths from 1 to 1,999 in a fixed order; only their number and mean matter here.
    let length = |at: u64| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32 % 1_999 + 1;
    let documents = Documents::contiguous((0..count).map(length)).unwrap();
    let part = 0..documents.len();
    let sources = vec![Source { documents, part }; weights.as_ref().map_or(1, Vec::len)];
    let settings = Settings {
        seed: 1234,
        sequence_tokens: 2_048,
        extra_token: true,
        samples: Some(samples),
        max_table_bytes: u64::MAX,
    };
    let start = Instant::now();
    let order = MegatronOrder::new(sources, weights.as_deref(), &settings).unwrap();
    let built = start.elapsed();
    let bytes = order.table_bytes();
    println!("{} epochs; {built:.2?}, {bytes} bytes", order.epochs(0).unwrap());
    let start = Instant::now();
    let (looked, pieces) = order
        .cursor_at(samples / 2)
        .take(1_000_000)
        .fold((0u32, 0usize), |(looked, pieces), (dataset, k)| {
            (looked + 1, pieces + order.pieces(dataset, k).count())
        });
    let each = start.elapsed() / looked.max(1);
    println!("{looked} samples of {pieces} pieces, {each:.0?} each");
}
