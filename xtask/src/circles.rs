//! Circles of files: two files of one folder that use each other, directly or through others.
//!
//! [`floors`] orders the modules that its table names. Here every folder of every crate is looked
//! at, without a table: a file may use the others of its folder, and its `mod.rs`, but not one that
//! uses it. `mod.rs` and `lib.rs` are the rooms themselves, so what they declare may be used, and
//! tests may use everything.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use crate::floors;
use crate::scan;
use crate::shell::Failure;
use crate::workspace::{self, root};

/// A module's path from the root of its crate.
type Module = Vec<String>;

/// Which files of a folder use which others of it.
type Uses = BTreeMap<String, BTreeSet<String>>;

/// Every circle, by folder.
///
/// # Errors
/// When git does not list the files.
pub(crate) fn complaints() -> Result<Vec<String>, Failure> {
    let mut crates: BTreeMap<String, Vec<(Module, String)>> = BTreeMap::new();
    for path in workspace::files()? {
        let Some((folder, module)) = module_of(&path) else { continue };
        // A file that git lists but that does not exist was deleted in the work tree.
        let Ok(text) = fs::read_to_string(root().join(&path)) else { continue };
        crates.entry(folder).or_default().push((module, scan::code_only(&text)));
    }
    let all = crates.iter().flat_map(|(folder, files)| of_crate(folder, files));
    Ok(all.collect())
}

/// The `src` folder and the module of a file; none for tests and what is no module.
fn module_of(path: &Path) -> Option<(String, Module)> {
    let text = path.to_str()?;
    let (folder, inner) = text.split_once("src/")?;
    let mut module: Module = inner.strip_suffix(".rs")?.split('/').map(str::to_owned).collect();
    if folder.contains("/tests/") || module.iter().any(|part| part == "tests") {
        return None;
    }
    module.pop_if(|last| matches!(last.as_str(), "mod" | "lib" | "main"));
    Some((format!("{folder}src"), module))
}

fn of_crate(folder: &str, files: &[(Module, String)]) -> Vec<String> {
    let names: BTreeSet<&[String]> = files.iter().map(|(module, _)| module.as_slice()).collect();
    let mut folders: BTreeMap<&[String], Uses> = BTreeMap::new();
    for (module, code) in files {
        for place in floors::places_used(module, code) {
            // The first folder above which the two part is the one in which one uses the other.
            let common = module.iter().zip(&place).take_while(|(a, b)| a == b).count();
            let (Some(from), Some(to)) = (module.get(common), place.get(common)) else { continue };
            if names.contains(&place[..=common]) {
                let uses = folders.entry(&module[..common]).or_default();
                uses.entry(from.clone()).or_default().insert(to.clone());
            }
        }
    }
    let found = folders.iter().flat_map(|(inner, uses)| {
        let place = [folder, &inner.join("/")].join("/");
        circles(uses).into_iter().map(move |circle| {
            format!("{}: a circle of {}", place.trim_end_matches('/'), circle.join(", "))
        })
    });
    found.collect()
}

/// The sets of files each of which uses all others, directly or through others.
fn circles(uses: &Uses) -> Vec<Vec<String>> {
    let reach: BTreeMap<&String, BTreeSet<&String>> =
        uses.keys().map(|from| (from, reached(uses, from))).collect();
    let together = |a: &String, b: &String| {
        reach.get(a).is_some_and(|all| all.contains(b))
            && reach.get(b).is_some_and(|all| all.contains(a))
    };
    let mut found: Vec<Vec<String>> = Vec::new();
    for name in uses.keys().filter(|name| together(name, name)) {
        match found.iter_mut().find(|circle| together(&circle[0], name)) {
            Some(circle) => circle.push(name.clone()),
            None => found.push(vec![name.clone()]),
        }
    }
    found
}

/// Everything that a file uses, directly or through others.
fn reached<'a>(uses: &'a Uses, from: &'a String) -> BTreeSet<&'a String> {
    let (mut all, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(name) = next.pop() {
        let used = uses.get(name).into_iter().flatten();
        next.extend(used.filter(|used| all.insert(*used)));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let parsed = |&(name, code): &(&str, &str)| {
            let module = name.split('/').filter(|part| !part.is_empty()).map(str::to_owned);
            (module.collect(), scan::code_only(code))
        };
        of_crate("c/src", &files.iter().map(parsed).collect::<Vec<_>>())
    }

    #[test]
    fn files_that_use_each_other_are_named_by_folder() {
        let two = [("m/a", "use super::b;"), ("m/b", "use crate::m::a::X;"), ("m", "")];
        assert_eq!(found(&two), ["c/src/m: a circle of a, b"]);
        let three = [
            ("a", "use crate::b;"),
            ("b", "use super::c::x;"),
            ("c/d", "use crate::a;"),
            ("c", ""),
        ];
        assert_eq!(found(&three), ["c/src: a circle of a, b, c"]);
    }

    #[test]
    fn one_direction_rooms_and_tests_are_no_circle() {
        let one_way = [
            ("m/a", "use super::{b, Item};"),
            ("m/b", "use super::Item;"),
            ("m", "mod a; mod b;\nuse self::a::A;"),
        ];
        assert!(found(&one_way).is_empty());
        let tests =
            [("m/a", "use super::b;"), ("m/b", "mod tests { use super::super::a; }"), ("m", "")];
        assert!(found(&tests).is_empty());
        assert_eq!(module_of(Path::new("c/src/m/tests/x.rs")), None);
    }
}
