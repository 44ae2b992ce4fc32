//! House rules that the compiler does not check: module headers, no stray words or conflicts, names
//! in documents, columns of prose.
//!
//! A ratchet, not a style guide: each rule stops one kind of slow decay and names the file and
//! line. What rustfmt or clippy can check is left to them.

use std::fs;
use std::path::Path;

use crate::columns;
use crate::names::Names;
use crate::shell::{Failure, Outcome};
use crate::workspace::{self, root};

/// Types of handwritten files, which are searched for stray words.
const TEXT: &[&str] =
    &["rs", "toml", "md", "py", "pyi", "proto", "sh", "yml", "yaml", "html", "js", "css"];

/// Words that mean "not finished" or "only on my machine". Each is split here, or this file would
/// match itself.
const STRAY_WORDS: &[(&str, &str)] = &[
    (concat!("TO", "DO"), "finish it, or write an issue"),
    (concat!("FIX", "ME"), "fix it, or write an issue"),
    (concat!("XX", "X"), "say what is meant"),
    (concat!("dbg", "!"), "left over from debugging"),
    (concat!("/wo", "rk/"), "a path of one machine"),
    (concat!("/tm", "p/h/"), "a path of one machine"),
    (concat!("replace", "-with"), "where packages are fetched from is the user's own setting"),
    (concat!("index", "-url"), "where packages are fetched from is the user's own setting"),
    (concat!("sparse", "+http"), "where packages are fetched from is the user's own setting"),
];

pub(crate) fn check() -> Result<Outcome, Failure> {
    let (mut complaints, mut names, mut documents) = (Vec::new(), Names::default(), Vec::new());
    for path in workspace::files()? {
        let Some(extension) = path.extension().and_then(|name| name.to_str()) else {
            continue;
        };
        if !TEXT.contains(&extension) {
            continue;
        }
        // A file that git lists but that does not exist was deleted in the work tree.
        let Ok(text) = fs::read_to_string(root().join(&path)) else {
            continue;
        };
        complaints.extend(judge(&path, extension, &text));
        match extension {
            "rs" | "py" => names.add(&path, &text),
            "md" if quotes_sources(&path) => documents.push((path, text)),
            _ => {}
        }
    }
    complaints.extend(documents.iter().flat_map(|(path, text)| names.missing(path, text)));
    for complaint in &complaints {
        eprintln!("    {complaint}");
    }
    match complaints.len() {
        0 => Ok(Outcome::Passed),
        n => Err(Failure::check(format!("{n} breaches of the house rules"))),
    }
}

/// Whether the document is about the sources as they are, unlike a change log.
fn quotes_sources(path: &Path) -> bool {
    path.starts_with("docs") || path == "SECURITY.md" || path == "ARCHITECTURE.md"
}

fn judge(path: &Path, extension: &str, text: &str) -> Vec<String> {
    let mut complaints = stray_words(path, text);
    complaints.extend(conflict(path, text));
    match extension {
        "rs" => {
            complaints.extend(missing_header(path, text));
            complaints.extend(one_processor(path, text));
            complaints.extend(columns::rust(path, text));
        }
        "md" => complaints.extend(columns::markdown(path, text)),
        _ => {}
    }
    complaints
}

/// A path for one processor has a portable one in the same file, and can be turned off, so that the
/// portable one is tested (`cargo xtask check portable`).
fn one_processor(path: &Path, text: &str) -> Option<String> {
    let arch = concat!("target", "_arch");
    let named = |line: &&str| line.trim_start().starts_with("#[cfg(") && line.contains(arch);
    let lines: Vec<&str> = text.lines().filter(named).collect();
    let has_portable = lines.iter().any(|line| {
        line.contains(&format!("not({arch}"))
            || line.contains("not(all(")
            || line.contains("not(any(")
    });
    (!lines.is_empty() && !has_portable).then(|| {
        format!("{}: a path for one processor, and no #[cfg(not(…))] beside it", path.display())
    })
}

fn stray_words(path: &Path, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        for (word, remedy) in STRAY_WORDS {
            if contains_word(line, word) {
                found.push(format!("{}:{}: '{word}': {remedy}", path.display(), number + 1));
            }
        }
    }
    found
}

/// Whether the line contains `word` other than inside a longer name.
fn contains_word(line: &str, word: &str) -> bool {
    let name_char = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        let inside_left = word.starts_with(name_char) && line[..at].ends_with(name_char);
        let inside_right =
            word.ends_with(name_char) && line[at + word.len()..].starts_with(name_char);
        !inside_left && !inside_right
    })
}

/// The first marker of a conflict that a merge left.
fn conflict(path: &Path, text: &str) -> Option<String> {
    let is_marker = |line: &str| line.starts_with("<<<<<<< ") || line.starts_with(">>>>>>> ");
    let at = text.lines().position(is_marker)?;
    Some(format!("{}:{}: a conflict of a merge: settle it", path.display(), at + 1))
}

fn missing_header(path: &Path, text: &str) -> Option<String> {
    let has_header = text.lines().find(|line| !line.trim().is_empty())?.starts_with("//!");
    (!has_header).then(|| {
        format!(
            "{}:1: no `//!` header: say what belongs in this file and what does not",
            path.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(text: &str) -> Vec<String> {
        judge(Path::new("crates/a/src/b.rs"), "rs", text)
    }

    #[test]
    fn a_path_for_one_processor_needs_a_portable_one() {
        let only = concat!("#[cfg(target", "_arch = \"x86_64\")]\nfn f() {}\n");
        let path = Path::new("c/src/x.rs");
        assert!(one_processor(path, only).is_some_and(|why| why.contains("c/src/x.rs")));
        let both =
            format!("{only}{}", concat!("#[cfg(not(target", "_arch = \"x86_64\"))]\nfn f() {}"));
        assert_eq!(one_processor(path, &both), None);
        assert_eq!(one_processor(path, "fn f() {}"), None);
    }

    #[test]
    fn a_file_begins_with_its_header() {
        assert!(judged("//! What it is for.\n").is_empty());
        assert!(judged("").is_empty());
        assert_eq!(judged("use std::fmt;\n").len(), 1);
    }

    #[test]
    fn a_merge_leaves_no_conflict() {
        let sides = "//! a\n<<<<<<< HEAD\n// one\n=======\n// other\n>>>>>>> 1234567\n";
        assert_eq!(judged(sides).len(), 1);
        assert!(judged("//! a\n// =======\nlet a = b << 7;\n").is_empty());
    }

    #[test]
    fn stray_words_are_whole_words() {
        let word = STRAY_WORDS[0].0;
        assert_eq!(judged(&format!("//! a\n// {word}: later\n")).len(), 1);
        assert!(judged(&format!("//! a\nconst {word}S: u8 = 1;\n")).is_empty());
    }
}
