//! Which member of the workspace may depend on which.
//!
//! Two rules of the architecture are checked, against the dependencies that cargo resolved rather
//! than against the manifests. First, the direction of dependencies between members is the table
//! [`LAYERS`]; a member that is not in the table is refused, so a new crate cannot slip past it.
//! Second, a pure crate depends only on crates that are used without their default features and
//! without `std`; the build of `xtask/no-os-proof` then proves the same independently. In addition,
//! every dependency must come from the default registry. The same step checks the floors inside
//! crates ([`floors`]), and that no files of a folder use each other in a circle ([`circles`]).

use cargo_metadata::{Dependency, DependencyKind, Metadata, Package, Source};

use crate::circles;
use crate::floors;
use crate::shell::{Failure, Outcome};
use crate::workspace;

/// One member of the workspace and its allowed dependencies.
struct Layer {
    name: &'static str,
    /// Members it may depend on.
    may_use: &'static [&'static str],
    /// Members that its tests may depend on as well.
    tests_may_use: &'static [&'static str],
    /// Whether it is a state machine without an operating system.
    pure: bool,
}

const LAYERS: &[Layer] = &[
    Layer { name: "roce", may_use: &[], tests_may_use: &["controls", "sim"], pure: true },
    Layer { name: "controls", may_use: &["roce"], tests_may_use: &[], pure: true },
    Layer { name: "topology", may_use: &[], tests_may_use: &[], pure: true },
    Layer { name: "subnet", may_use: &["topology"], tests_may_use: &[], pure: true },
    Layer { name: "parfait", may_use: &["topology"], tests_may_use: &[], pure: true },
    Layer {
        name: "sim",
        may_use: &["roce", "controls", "topology"],
        tests_may_use: &[],
        pure: true,
    },
    Layer { name: "xio", may_use: &["roce"], tests_may_use: &["sim"], pure: true },
    Layer { name: "comm", may_use: &["roce"], tests_may_use: &[], pure: true },
    Layer { name: "nic", may_use: &["roce"], tests_may_use: &["sim"], pure: false },
    Layer {
        name: "adapter",
        may_use: &["roce", "controls", "comm", "nic"],
        tests_may_use: &[],
        pure: false,
    },
    Layer { name: "host", may_use: &["xio"], tests_may_use: &["roce", "nic"], pure: false },
    Layer { name: "formats", may_use: &["xio"], tests_may_use: &[], pure: false },
    Layer { name: "tokenize", may_use: &["xio", "formats"], tests_may_use: &[], pure: false },
    Layer {
        name: "ibverbs",
        may_use: &["roce", "controls", "nic", "adapter"],
        tests_may_use: &[],
        pure: false,
    },
    Layer { name: "service", may_use: &[], tests_may_use: &[], pure: false },
    Layer {
        name: "engine",
        may_use: &["roce", "controls", "xio", "nic", "adapter", "host", "formats", "service"],
        tests_may_use: &[],
        pure: false,
    },
    Layer {
        name: "cluster",
        may_use: &["topology", "parfait", "nic", "service"],
        tests_may_use: &[],
        pure: false,
    },
    Layer {
        name: "client",
        may_use: &["xio", "host", "service", "engine"],
        tests_may_use: &[],
        pure: false,
    },
    Layer {
        name: "lab",
        may_use: &[
            "roce", "controls", "sim", "topology", "parfait", "xio", "comm", "nic", "adapter",
            "host", "service",
        ],
        tests_may_use: &[],
        pure: false,
    },
    Layer {
        name: "dquant",
        may_use: &[
            "roce", "controls", "sim", "topology", "subnet", "parfait", "xio", "nic", "adapter",
            "host", "formats", "tokenize", "service", "engine", "cluster", "client", "lab",
            "ibverbs",
        ],
        tests_may_use: &[],
        pure: false,
    },
    Layer { name: "dquant-python", may_use: &["client"], tests_may_use: &[], pure: false },
    Layer { name: "fuzz", may_use: &["roce", "controls", "sim"], tests_may_use: &[], pure: false },
    Layer { name: "xtask", may_use: &[], tests_may_use: &[], pure: false },
];

pub(crate) fn check() -> Result<Outcome, Failure> {
    let metadata = workspace::metadata()?;
    let mut complaints = complaints(&metadata);
    complaints.extend(floors::complaints()?);
    complaints.extend(circles::complaints()?);
    for complaint in &complaints {
        eprintln!("    {complaint}");
    }
    match complaints.len() {
        0 => Ok(Outcome::Passed),
        n => Err(Failure::check(format!("{n} dependencies break the layering"))),
    }
}

fn complaints(metadata: &Metadata) -> Vec<String> {
    let mut found = Vec::new();
    for package in &metadata.packages {
        if metadata.workspace_members.contains(&package.id) {
            found.extend(member(package));
        } else {
            found.extend(source(package));
        }
    }
    found
}

fn member(package: &Package) -> Vec<String> {
    let name = package.name.as_str();
    let Some(layer) = LAYERS.iter().find(|layer| layer.name == name) else {
        return vec![format!("{name}: not in the table of xtask/src/layers.rs; add it there")];
    };
    package.dependencies.iter().filter_map(|edge| judge(layer, edge)).collect()
}

/// Returns what is wrong with one declared dependency.
fn judge(layer: &Layer, edge: &Dependency) -> Option<String> {
    let (from, to) = (layer.name, edge.name.as_str());
    if edge.path.is_some() {
        let for_tests = edge.kind == DependencyKind::Development;
        let allowed = layer.may_use.contains(&to) || for_tests && layer.tests_may_use.contains(&to);
        return (!allowed).then(|| format!("{from} must not depend on {to}"));
    }
    if !layer.pure || edge.kind != DependencyKind::Normal {
        return None;
    }
    if edge.uses_default_features {
        return Some(format!("{from} is pure: {to} needs `default-features = false`"));
    }
    let std = edge.features.iter().any(|feature| feature == "std");
    std.then(|| format!("{from} is pure: {to} must be used without its feature `std`"))
}

fn source(package: &Package) -> Option<String> {
    let source = package.source.as_ref();
    let from_registry = source.is_some_and(Source::is_crates_io);
    let (name, source) = (&package.name, source.map_or("a folder", |source| &source.repr));
    (!from_registry).then(|| format!("{name}: from {source}, which is not the default registry"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn edge(name: &str, kind: Value, path: Value) -> Value {
        json!({
            "name": name, "kind": kind, "path": path, "req": "*", "optional": false,
            "uses_default_features": false, "features": [],
        })
    }

    fn metadata_of(package: (&str, Value), members: &[&str], dependencies: &[Value]) -> Metadata {
        let (name, source) = package;
        let json = json!({
            "version": 1, "workspace_root": "/w", "target_directory": "/w/target",
            "workspace_members": members,
            "packages": [{
                "id": "m", "name": name, "version": "0.1.0", "source": source, "targets": [],
                "features": {}, "manifest_path": "/w/Cargo.toml", "dependencies": dependencies,
            }],
        });
        serde_json::from_value(json).expect("the form of cargo metadata")
    }

    fn judged(member: &str, dependency: Value) -> Vec<String> {
        complaints(&metadata_of((member, Value::Null), &["m"], &[dependency]))
    }

    #[test]
    fn an_edge_against_the_direction_is_named() {
        let found = judged("xio", edge("nic", Value::Null, json!("/w/crates/nic")));
        assert_eq!(found, ["xio must not depend on nic"]);
    }

    #[test]
    fn tests_may_use_what_their_crate_may_not() {
        let sim = |kind| edge("sim", kind, json!("/w/crates/sim"));
        assert!(judged("xio", sim(json!("dev"))).is_empty());
        for kind in [Value::Null, json!("build")] {
            assert_eq!(judged("xio", sim(kind)), ["xio must not depend on sim"]);
        }
    }

    #[test]
    fn a_pure_crate_may_not_ask_for_std_by_default_or_by_name() {
        let mut by_default = edge("thiserror", Value::Null, Value::Null);
        let mut by_name = by_default.clone();
        by_default["uses_default_features"] = json!(true);
        by_name["features"] = json!(["std"]);
        for edge in [by_default, by_name] {
            assert_eq!(judged("roce", edge.clone()).len(), 1);
            assert!(judged("nic", edge).is_empty());
        }
    }

    #[test]
    fn tests_of_a_pure_crate_may_use_std() {
        let mut proptest = edge("proptest", json!("dev"), Value::Null);
        proptest["uses_default_features"] = json!(true);
        proptest["features"] = json!(["std"]);
        assert!(judged("roce", proptest).is_empty());
    }

    #[test]
    fn an_unknown_member_and_a_foreign_source_are_refused() {
        assert_eq!(judged("utils", edge("serde", Value::Null, Value::Null)).len(), 1);
        let foreign = ("fork", json!("git+https://example.invalid/fork"));
        assert_eq!(complaints(&metadata_of(foreign, &[], &[])).len(), 1);
    }
}
