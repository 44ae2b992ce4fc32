//! The published file of the Lingjun cluster: read, whole, and routed without a credit loop.
//!
//! `DQUANT_LINGJUN` may name it; without that, `shared/data/lingjun/topo.csv` beside the workspace
//! is used if it exists.

use std::path::{Path, PathBuf};

use topology::channels::Channels;
use topology::graph::Capacity;
use topology::lanes::Lanes;
use topology::lingjun;
use topology::routes::Engine;
use topology::validator::validate;

#[test]
fn the_published_cluster_is_routed() {
    let named = std::env::var_os("DQUANT_LINGJUN").map(PathBuf::from);
    let beside =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/lingjun/topo.csv");
    let path = named.clone().unwrap_or(beside);
    let Ok(text) = std::fs::read_to_string(&path) else {
        assert!(named.is_none(), "cannot read {}", path.display());
        println!("skipped: no file {}; set DQUANT_LINGJUN", path.display());
        return;
    };
    let topology = lingjun::read(&text, Capacity::default()).expect("a topology");
    assert_eq!(topology.check(), Ok(()));
    // 119 switches below, and eight planes of three groups and of the one above them.
    assert_eq!((topology.hosts().count(), topology.switches().count()), (847, 119 + 8 * 4));
    let channels = Channels::of(&topology);
    let tables = Engine::FatTree.route(&topology, &channels).expect("a tree");
    let findings = validate(&channels, &tables, &Lanes::one(&channels));
    assert!(findings.is_whole(), "{findings:?}");
}
