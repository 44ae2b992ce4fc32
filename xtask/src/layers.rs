//! Who may depend on whom.
//!
//! Two rules from the architecture, checked against what cargo resolved and not against what the manifests seem to
//! say. First, the direction of dependencies between members is the table [`LAYERS`]; a member that is not in the
//! table is refused, so a new crate cannot slip past it. Second, a pure crate depends only on crates that are used
//! without their default features and without `std`; the build of `xtask/no-os-proof` then proves the same thing from
//! the other side. In passing: every dependency comes from the default registry.

use serde_json::Value;

use crate::check::Outcome;
use crate::shell::Failure;
use crate::workspace;

/// One member of the workspace and what it may see.
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
    Layer { name: "roce", may_use: &[], tests_may_use: &["sim"], pure: true },
    Layer { name: "sim", may_use: &["roce"], tests_may_use: &[], pure: true },
    Layer { name: "xio", may_use: &["roce"], tests_may_use: &["sim"], pure: true },
    Layer { name: "nic", may_use: &["roce"], tests_may_use: &["sim"], pure: false },
    Layer { name: "host", may_use: &["xio"], tests_may_use: &["roce", "nic"], pure: false },
    Layer { name: "ibverbs", may_use: &["roce", "nic"], tests_may_use: &[], pure: false },
    Layer {
        name: "engine",
        may_use: &["roce", "xio", "nic", "host"],
        tests_may_use: &[],
        pure: false,
    },
    Layer { name: "client", may_use: &["xio", "host", "engine"], tests_may_use: &[], pure: false },
    Layer {
        name: "dquant",
        may_use: &["roce", "sim", "xio", "nic", "host", "engine", "client", "ibverbs"],
        tests_may_use: &[],
        pure: false,
    },
    Layer { name: "fuzz", may_use: &["roce", "sim"], tests_may_use: &[], pure: false },
    Layer { name: "xtask", may_use: &[], tests_may_use: &[], pure: false },
];

/// The end of the source id of the default registry.
const DEFAULT_REGISTRY: &str = "/crates.io-index";

pub(crate) fn check() -> Result<Outcome, Failure> {
    let metadata = workspace::metadata()?;
    let complaints = complaints(&metadata);
    for complaint in &complaints {
        eprintln!("    {complaint}");
    }
    match complaints.len() {
        0 => Ok(Outcome::Passed),
        n => Err(Failure::check(format!("{n} dependencies break the layering"))),
    }
}

fn complaints(metadata: &Value) -> Vec<String> {
    let members = array(&metadata["workspace_members"]);
    let mut found = Vec::new();
    for package in array(&metadata["packages"]) {
        if members.contains(&package["id"]) {
            found.extend(member(package));
        } else {
            found.extend(source(package));
        }
    }
    found
}

fn member(package: &Value) -> Vec<String> {
    let name = text(&package["name"]);
    let Some(layer) = LAYERS.iter().find(|layer| layer.name == name) else {
        return vec![format!("{name}: not in the table of xtask/src/layers.rs; add it there")];
    };
    array(&package["dependencies"]).iter().filter_map(|edge| judge(layer, edge)).collect()
}

/// Says what is wrong with one declared dependency.
fn judge(layer: &Layer, edge: &Value) -> Option<String> {
    let (from, to) = (layer.name, text(&edge["name"]));
    let (normal, for_tests) = (edge["kind"].is_null(), edge["kind"] == "dev");
    if !edge["path"].is_null() {
        let allowed = layer.may_use.contains(&to) || for_tests && layer.tests_may_use.contains(&to);
        return (!allowed).then(|| format!("{from} must not depend on {to}"));
    }
    if !layer.pure || !normal {
        return None;
    }
    if edge["uses_default_features"].as_bool() != Some(false) {
        return Some(format!("{from} is pure: {to} needs `default-features = false`"));
    }
    let std = array(&edge["features"]).iter().any(|feature| text(feature) == "std");
    std.then(|| format!("{from} is pure: {to} must be used without its feature `std`"))
}

fn source(package: &Value) -> Option<String> {
    let from_registry = text(&package["source"]).ends_with(DEFAULT_REGISTRY);
    let (name, source) = (text(&package["name"]), &package["source"]);
    (!from_registry).then(|| format!("{name}: from {source}, which is not the default registry"))
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn workspace_with(name: &str, dependency: Value) -> Value {
        json!({
            "workspace_members": ["m"],
            "packages": [{ "id": "m", "name": name, "dependencies": [dependency] }],
        })
    }

    #[test]
    fn an_edge_against_the_direction_is_named() {
        let edge = json!({ "name": "nic", "path": "/w/crates/nic", "kind": null });
        let found = complaints(&workspace_with("xio", edge));
        assert_eq!(found, ["xio must not depend on nic"]);
    }

    #[test]
    fn tests_may_use_what_their_crate_may_not() {
        let edge = |kind: Value| json!({ "name": "sim", "path": "/w/crates/sim", "kind": kind });
        assert!(complaints(&workspace_with("xio", edge(json!("dev")))).is_empty());
        for kind in [Value::Null, json!("build")] {
            let found = complaints(&workspace_with("xio", edge(kind)));
            assert_eq!(found, ["xio must not depend on sim"]);
        }
    }

    #[test]
    fn a_pure_crate_may_not_ask_for_std_by_default_or_by_name() {
        let by_default = json!({ "name": "thiserror", "kind": null, "path": null,
                                 "uses_default_features": true, "features": [] });
        let by_name = json!({ "name": "thiserror", "kind": null, "path": null,
                              "uses_default_features": false, "features": ["std"] });
        for edge in [by_default, by_name] {
            assert_eq!(complaints(&workspace_with("roce", edge.clone())).len(), 1);
            assert!(complaints(&workspace_with("nic", edge)).is_empty());
        }
    }

    #[test]
    fn tests_of_a_pure_crate_may_use_std() {
        let edge = json!({ "name": "proptest", "kind": "dev", "path": null,
                           "uses_default_features": true, "features": ["std"] });
        assert!(complaints(&workspace_with("roce", edge)).is_empty());
    }

    #[test]
    fn an_unknown_member_and_a_foreign_source_are_refused() {
        let edge = json!({ "name": "serde", "kind": null, "path": null });
        assert_eq!(complaints(&workspace_with("utils", edge)).len(), 1);
        let foreign = json!({
            "workspace_members": [],
            "packages": [{ "id": "f", "name": "fork", "source": "git+https://example.invalid/fork" }],
        });
        assert_eq!(complaints(&foreign).len(), 1);
    }
}
