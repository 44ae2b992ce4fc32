//! The table of gains in `docs/parfait-demands.md`, computed anew.

use std::fmt::Write;
use std::path::Path;

use parfait::demand::{Abstraction, Demand};
use parfait::pattern::Pattern;
use parfait::runs::Run;

/// A pattern, the workers on one side of a link, and how the table names them.
type Row = (&'static str, &'static [(u32, u32)], &'static str);

const ROWS: &[Row] = &[
    ("ring:16@1G", &[(0, 8)], "half, one run"),
    ("ring:64@1G", &[(0, 32)], "half, one run"),
    ("ring:64@1G", &[(0, 8), (16, 24), (32, 40), (48, 56)], "half, four runs"),
    ("tree:64@1G", &[(0, 32)], "half, one run"),
    ("torus:8x8@1G,1G", &[(0, 32)], "four rows of eight"),
    ("torus:8x8@1G,1G", &[(0, 4)], "half a row"),
    ("hierarchical:8x8@1G,1G", &[(0, 32)], "four groups of eight"),
    ("hierarchical:8x8@1G,1G", &[(0, 4)], "half a group"),
    ("ps:48+16@1G", &[(0, 24)], "half of the workers"),
    ("ps:48+16@1G", &[(0, 24), (48, 56)], "half of both"),
    ("async-ps:48+16@1G", &[(0, 24), (48, 56)], "half of both"),
    ("mesh:16@1G", &[(0, 8)], "half"),
    ("mesh:64@1G", &[(0, 32)], "half"),
    ("pipeline:16@1G", &[(0, 8)], "half, one run"),
    ("parallel:8x4x2@1G,1G,1G", &[(0, 32)], "one of two stages"),
    ("parallel:8x4x2@1G,1G,1G", &[(0, 16)], "two of four replicas of a stage"),
    ("parallel:8x4x2@1G,1G,1G", &[(0, 8)], "one tensor-parallel group"),
];

fn table() -> String {
    let mut table = String::from(
        "| pattern | behind the link | Parfait | TAG | virtual cluster | TAG / Parfait | virtual cluster / Parfait |\n\
         |---|---|---|---|---|---|---|\n",
    );
    for (text, runs, side) in ROWS {
        let pattern: Pattern = text.parse().expect(text);
        let demand = Demand::of(&pattern).expect(text);
        let runs: Vec<Run> = runs.iter().map(|(first, end)| Run::new(*first, *end)).collect();
        let [parfait, tag, hose] = Abstraction::ALL.map(|abstraction| {
            let cut = demand.reservation(abstraction, &runs);
            cut.out_bps.max(cut.in_bps) / 1_000_000_000
        });
        let gain = |other: u64| format!("{:.1}", other as f64 / parfait as f64);
        let (over_tag, over_hose) = (gain(tag), gain(hose));
        writeln!(
            table,
            "| `{text}` | {side} | {parfait} | {tag} | {hose} | {over_tag} | {over_hose} |"
        )
        .expect("a string");
    }
    table
}

#[test]
fn the_documented_gains_are_those_computed() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/parfait-demands.md");
    let page = std::fs::read_to_string(page).expect("the page");
    let table = table();
    assert!(page.contains(&table), "docs/parfait-demands.md needs this table:\n{table}");
}
