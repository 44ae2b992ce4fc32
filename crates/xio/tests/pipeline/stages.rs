//! The table of a pipeline matches the counters of a run.

use sim::chance::Chance;
use xio::dataset::Dtype;
use xio::plan::Plan;
use xio::stage::Place;

use super::corpus::{Corpus, Shape};
use super::world::{Setup, World};

/// Blocks converted by the target and by the reader, and where the table puts the conversion.
fn converted(text: &str, dtype: Dtype, offload: bool) -> (u64, u64, Option<Place>) {
    let plan = Plan::parse(text, None).unwrap();
    let table = plan.compile(&[dtype], offload).unwrap().table();
    let narrow = table.rows.iter().find(|row| row.action.starts_with("narrow"));
    let shape = Shape { dtype, data_offset: 64, samples: 40, tail_tokens: 1, per_block: 1 };
    let corpus = Corpus::of_plan(&plan, &[shape], &mut Chance::new(1));
    let setup = Setup { narrow_at_target: offload, ..Setup::plain(&corpus, 5) };
    let mut world = World::new(&corpus, &setup);
    world.run();
    world.assert_delivered();
    let target = world.target.target.counters().narrowed_blocks;
    (target, world.readers[0].reader.counters().narrowed_blocks, narrow.map(|row| row.place))
}

#[test]
fn conversions_run_where_the_table_says() {
    let (wide, narrow) = ("window(900) | narrow(u16)", "window(900) | narrow(u32)");
    for (text, dtype) in [
        (wide, Dtype::U32),
        (wide, Dtype::I64),
        // As many bytes as before.
        (narrow, Dtype::I32),
        // Nothing to convert.
        (wide, Dtype::U16),
        ("window(900)", Dtype::I32),
    ] {
        for offload in [true, false] {
            let (target, reader, place) = converted(text, dtype, offload);
            let runs_at = match (target > 0, reader > 0) {
                (true, false) => Some(Place::Target),
                (false, true) => Some(Place::of_reader(offload)),
                (false, false) => None,
                (true, true) => panic!("{text} over {dtype}: converted twice"),
            };
            assert_eq!(runs_at, place, "{text} over {dtype}, offload {offload}");
        }
    }
}
