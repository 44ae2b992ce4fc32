//! What the order costs for each sample: the blend alone, and with the shuffle of its datasets.
//!
//! ```text
//! cargo run --release -p host --example order_bench
//! ```
//!
//! Prints nanoseconds of CPU time per sample, the least of several passes, and what seeking to the
//! last sample of a period takes. Nothing is read: files are only described.

use std::hint::black_box;

use rustix::time::{ClockId, clock_gettime};
use xio::dataset::{Dtype, Format, TokenFile};
use xio::order::{Blend, Order};
use xio::plan::Plan;

const STEPS: u32 = 300_000;
const PASSES: usize = 7;

/// CPU time of this thread.
fn now_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The least of several passes, in nanoseconds.
fn least<T>(mut work: impl FnMut() -> T) -> u64 {
    let pass = |_| {
        let begun = now_ns();
        black_box(work());
        now_ns() - begun
    };
    (0..PASSES).map(pass).min().unwrap_or(0)
}

/// The order of a plan over files of 10 million tokens.
fn order(weights: &[u32]) -> Result<Order, Box<dyn std::error::Error>> {
    let parts: Vec<String> =
        weights.iter().enumerate().map(|(at, weight)| format!("c{at}={weight}")).collect();
    let text = format!("window(2048) | shuffle(7) | blend({})", parts.join(", "));
    let plan = Plan::parse(&text, None)?;
    let file =
        TokenFile { dtype: Dtype::U16, data_offset: 0, tokens: 10_000_000, format: Format::Flat };
    let layouts = (0..weights.len()).map(|dataset| plan.layout(dataset, file));
    Ok(plan.order(&layouts.collect::<Result<Vec<_>, _>>()?)?)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("{:<28} {:>9} {:>14} {:>10}", "weights", "blend ns", "with order ns", "seek ms");
    let few = (String::from("one"), vec![1]);
    let three = (String::from("0.5, 0.3, 0.2"), vec![5, 3, 2]);
    let blends =
        [few, three].into_iter().chain([100, 1_000, 3_000, 4_096].into_iter().flat_map(|count| {
            // The longest period that there is, as files have it that are blended in proportion.
            let uneven = |at: u32| 1 + at.wrapping_mul(2_654_435_761) % (1_900_000 / count - 3);
            let uneven = (0..count).map(uneven).collect();
            [
                (format!("{count} even"), vec![1; count as usize]),
                (format!("{count} uneven"), uneven),
            ]
        }));
    for (name, weights) in blends {
        let blend = Blend::new(&weights)?;
        let order = order(&weights)?;
        let mut cursor = blend.cursor_at(12_345);
        let alone = least(|| (0..STEPS).fold(0, |sum, _| sum ^ cursor.step().1));
        let mut cursor = order.cursor_at(12_345);
        let whole = least(|| (0..STEPS).fold(0, |sum, _| sum ^ cursor.step().place.block));
        let seek = least(|| order.cursor_at(u64::from(blend.total()) * 41 - 1));
        let each = |ns: u64| ns as f64 / f64::from(STEPS);
        let (alone, whole, seek) = (each(alone), each(whole), seek as f64 / 1e6);
        println!("{name:<28} {alone:>9.0} {whole:>14.0} {seek:>10.2}");
    }
    Ok(())
}
