//! Which modules of a crate may use which of its other modules.
//!
//! The table [`FLOORS`] lists modules at the top of a crate's `src`, lowest floor first. The code of a floor may name
//! itself and what its line allows, by paths that begin with `crate::`; everything else is refused, so a new module
//! cannot slip in below. A chain of `super` that leaves the floor is refused as well, as it would hide a name.
//! Modules without a line are not checked. Names are found in the tokens that [`scan`] leaves: comments and text do
//! not count, and no macro is expanded.

use std::fs;
use std::path::{Path, PathBuf};

use crate::scan;
use crate::shell::Failure;
use crate::workspace::{self, root};

/// One module at the top of a crate, with all below it.
struct Floor {
    name: &'static str,
    /// Names at the top of the same crate that it may use.
    may_use: &'static [&'static str],
}

/// The floors of each crate, by the folder of its sources.
const FLOORS: &[(&str, &[Floor])] = &[
    (
        "crates/roce/src",
        &[
            Floor { name: "time", may_use: &[] },
            Floor { name: "counters", may_use: &[] },
            Floor { name: "rng", may_use: &[] },
            Floor { name: "slab", may_use: &["rng"] },
            Floor { name: "deadlines", may_use: &["rng", "time"] },
            Floor { name: "wire", may_use: &[] },
            Floor { name: "planted", may_use: &["wire"] },
            Floor { name: "congestion", may_use: &["time", "wire"] },
            Floor { name: "verbs", may_use: &["rng", "time", "wire", "congestion"] },
            Floor { name: "memory", may_use: &["planted", "rng", "slab", "verbs"] },
            Floor { name: "io", may_use: &["time", "wire", "verbs", "memory"] },
            Floor { name: "multicast", may_use: &["verbs"] },
            Floor { name: "events", may_use: &["verbs"] },
            Floor { name: "srq", may_use: &["rng", "slab", "verbs", "memory", "events"] },
            Floor { name: "cq", may_use: &["planted", "rng", "slab", "verbs", "srq"] },
            Floor { name: "report", may_use: &["counters", "time", "wire", "congestion", "verbs"] },
            Floor {
                name: "qp",
                may_use: &[
                    "counters",
                    "planted",
                    "rng",
                    "time",
                    "wire",
                    "congestion",
                    "verbs",
                    "memory",
                    "io",
                    "events",
                    "srq",
                    "cq",
                    "report",
                ],
            },
            Floor { name: "outbox", may_use: &["wire", "verbs", "io", "qp"] },
            Floor {
                name: "endpoint",
                may_use: &[
                    "counters",
                    "deadlines",
                    "planted",
                    "rng",
                    "slab",
                    "time",
                    "wire",
                    "congestion",
                    "verbs",
                    "memory",
                    "io",
                    "multicast",
                    "events",
                    "srq",
                    "cq",
                    "report",
                    "qp",
                    "outbox",
                ],
            },
            Floor { name: "world", may_use: &["time", "wire", "verbs", "io", "endpoint"] },
        ],
    ),
    (
        "bindings/ibverbs/src",
        &[
            Floor { name: "process", may_use: &[] },
            Floor { name: "engine", may_use: &["process"] },
            Floor { name: "explain", may_use: &["process", "engine"] },
            Floor { name: "objects", may_use: &["abi", "process", "engine"] },
            Floor { name: "exports", may_use: &["abi", "process", "engine", "explain", "objects"] },
        ],
    ),
];

/// Everything that violates the table, with file and line.
///
/// # Errors
/// When git does not list the files.
pub(crate) fn complaints() -> Result<Vec<String>, Failure> {
    let files = workspace::files()?;
    let all = FLOORS.iter().flat_map(|(src, floors)| floors.iter().map(move |floor| (*src, floor)));
    Ok(all.flat_map(|(src, floor)| of_floor(src, floor, &files)).collect())
}

fn of_floor(src: &str, floor: &Floor, files: &[PathBuf]) -> Vec<String> {
    let (mut found, mut any) = (Vec::new(), false);
    for path in files {
        let Some(depth) = path.strip_prefix(src).ok().and_then(|below| depth_in(floor, below))
        else {
            continue;
        };
        // A file that git lists but that does not exist was deleted in the work tree.
        if let Ok(text) = fs::read_to_string(root().join(path)) {
            any = true;
            found.extend(judge(floor, path, depth, &scan::code_only(&text)));
        }
    }
    if !any {
        found.push(format!("{src}: no module {}; correct xtask/src/floors.rs", floor.name));
    }
    found
}

/// How many modules a file of the floor lies below the top of its crate.
fn depth_in(floor: &Floor, below_src: &Path) -> Option<usize> {
    let module = below_src.with_extension("");
    let is_rust = below_src.extension().is_some_and(|extension| extension == "rs");
    let depth = module.components().count() - usize::from(module.ends_with("mod"));
    (is_rust && module.starts_with(floor.name)).then_some(depth)
}

fn judge(floor: &Floor, path: &Path, depth: usize, code: &str) -> Vec<String> {
    let line = |at: usize| code[..at].matches('\n').count() + 1;
    let place = |at| format!("{}:{}: {}", path.display(), line(at), floor.name);
    let named = names_at_the_top(code).into_iter();
    let not_allowed = named
        .filter(|(_, name)| *name != floor.name && !floor.may_use.contains(name))
        .map(|(at, name)| format!("{} must not use crate::{name}", place(at)));
    let too_high = climbs(code)
        .filter(|&(at, steps)| steps >= depth + inline_modules_around(code, at))
        .map(|(at, _)| format!("{} is left with `super`: write crate::", place(at)));
    not_allowed.chain(too_high).collect()
}

/// The first name of every path that begins with `crate::`, also of those in braces behind it.
fn names_at_the_top(code: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    for at in starts(code, "crate::") {
        let rest = code[at + "crate::".len()..].trim_start();
        let Some(group) = rest.strip_prefix('{') else {
            found.push((at, leading_name(rest)));
            continue;
        };
        let (mut nesting, mut piece) = (0_usize, 0);
        for (end, c) in group.char_indices() {
            match c {
                '{' => nesting += 1,
                '}' if nesting > 0 => nesting -= 1,
                ',' | '}' if nesting == 0 => {
                    found.push((at, leading_name(group[piece..end].trim_start())));
                    piece = end + 1;
                    if c == '}' {
                        break;
                    }
                }
                _ => {}
            }
        }
    }
    found.retain(|(_, name)| !name.is_empty());
    found
}

/// Every chain of `super::`, with its length.
fn climbs(code: &str) -> impl Iterator<Item = (usize, usize)> {
    let firsts = starts(code, "super::").filter(|&at| !code[..at].ends_with("super::"));
    firsts.map(|at| {
        let mut rest = &code[at..];
        let mut steps = 0;
        while let Some(behind) = rest.strip_prefix("super::") {
            (rest, steps) = (behind, steps + 1);
        }
        (at, steps)
    })
}

/// Modules with a body in this file that `at` lies in.
fn inline_modules_around(code: &str, at: usize) -> usize {
    let mut blocks = Vec::new();
    let mut statement = 0;
    for (place, c) in code[..at].char_indices() {
        match c {
            '{' => blocks.push(opens_module(&code[statement..place])),
            '}' => drop(blocks.pop()),
            ';' | ']' => {}
            _ => continue,
        }
        statement = place + 1;
    }
    blocks.into_iter().filter(|&is_module| is_module).count()
}

fn opens_module(statement: &str) -> bool {
    let mut words = statement.split_whitespace().rev();
    words.next().is_some() && words.next() == Some("mod")
}

/// Positions at which `word` is not the end of a longer name.
fn starts<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let all = code.match_indices(word).map(|(at, _)| at);
    all.filter(|&at| !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_'))
}

fn leading_name(text: &str) -> &str {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIDDLE: Floor = Floor { name: "middle", may_use: &["low"] };

    fn judged(below_src: &str, source: &str) -> Vec<String> {
        let path = Path::new(below_src);
        let depth = depth_in(&MIDDLE, path).expect("a file of the floor");
        judge(&MIDDLE, path, depth, &scan::code_only(source))
    }

    #[test]
    fn a_floor_uses_itself_and_what_its_line_allows() {
        let source = "use crate::low::{a, b};\nuse crate::middle::c;\n// crate::high\nlet d = \"crate::high\";";
        assert!(judged("middle/x.rs", source).is_empty());
        let found = judged("middle.rs", "use crate::low;\nfn f() { crate::high::g() }");
        assert_eq!(found, ["middle.rs:2: middle must not use crate::high"]);
    }

    #[test]
    fn names_in_braces_are_seen() {
        let found = judged("middle/x.rs", "use crate::{low::{a, high}, high::{b, c}, top};");
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].ends_with("crate::high") && found[1].ends_with("crate::top"), "{found:?}");
    }

    #[test]
    fn super_stays_on_the_floor() {
        assert!(
            judged("middle/x.rs", "use super::y;\nmod tests { use super::super::z; }").is_empty()
        );
        assert!(judged("middle/mod.rs", "#[cfg(test)]\nmod tests { use super::*; }").is_empty());
        assert_eq!(judged("middle/x.rs", "use super::super::high;").len(), 1);
        assert_eq!(judged("middle/mod.rs", "use super::high;").len(), 1);
        assert_eq!(judged("middle/x.rs", "mod m { fn f() { super::super::super::g() } }").len(), 1);
    }

    #[test]
    fn the_table_lists_a_floor_above_all_that_it_may_use() {
        for (src, floors) in FLOORS {
            for (height, floor) in floors.iter().enumerate() {
                let higher = floors[height..].iter().find(|one| floor.may_use.contains(&one.name));
                assert!(
                    higher.is_none(),
                    "{src}: {} is below {}",
                    floor.name,
                    higher.expect("listed").name
                );
            }
        }
    }

    #[test]
    fn every_module_of_roce_has_a_floor() {
        let source = fs::read_to_string(root().join("crates/roce/src/lib.rs")).expect("listed");
        let (_, floors) = FLOORS.iter().find(|(src, _)| *src == "crates/roce/src").expect("listed");
        for line in source.lines() {
            let module = line.trim_start_matches("pub ").strip_prefix("mod ");
            let Some(module) = module.and_then(|rest| rest.strip_suffix(';')) else { continue };
            assert!(floors.iter().any(|floor| floor.name == module), "{module} has no floor");
        }
    }

    #[test]
    fn files_of_other_modules_are_not_looked_at() {
        assert_eq!(depth_in(&MIDDLE, Path::new("middles/x.rs")), None);
        assert_eq!(depth_in(&MIDDLE, Path::new("middle/x.json")), None);
        assert_eq!(depth_in(&MIDDLE, Path::new("middle/x/mod.rs")), Some(2));
    }
}
