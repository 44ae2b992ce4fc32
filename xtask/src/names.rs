//! Names of the sources that documents quote: each must still exist.
//!
//! A constant, a path with `::` and a function's name of four or more underscores are clearly ours,
//! and so is a file of Rust, named by the end of its path. Shorter names may be words of another
//! program, and the contents of code blocks are examples: neither is looked at.

use std::collections::HashSet;
use std::path::Path;

/// What documents may quote.
#[derive(Default)]
pub(crate) struct Names {
    /// Identifiers of the sources, without those that occur only in comments.
    words: HashSet<String>,
    /// Paths of the sources.
    files: Vec<String>,
}

impl Names {
    /// Adds the identifiers of a source file.
    pub(crate) fn add(&mut self, path: &Path, source: &str) {
        let code = source.lines().map(|line| line.split("//").next().unwrap_or(line));
        self.words.extend(code.flat_map(words).map(str::to_owned));
        self.files.push(path.display().to_string());
    }

    /// Whether a source has the name, whole or behind a prefix such as `IBV_WC_`.
    fn has(&self, name: &str) -> bool {
        let is_end_of =
            |known: &String| known.strip_suffix(name).is_some_and(|before| before.ends_with('_'));
        self.words.contains(name) || self.words.iter().any(is_end_of)
    }

    /// Whether a path of the sources is this, or ends with it.
    fn has_file(&self, name: &str) -> bool {
        let ends = |path: &String| path.strip_suffix(name).is_some_and(|at| at.ends_with('/'));
        self.files.iter().any(|path| path == name || ends(path))
    }

    /// The quoted names of a document that no source has.
    pub(crate) fn missing(&self, path: &Path, text: &str) -> Vec<String> {
        let mut complaints = Vec::new();
        let mut in_block = false;
        for (number, line) in text.lines().enumerate() {
            in_block ^= line.starts_with("```");
            let at = format!("{}:{}", path.display(), number + 1);
            for name in line.split('`').skip(1).step_by(2).filter(|_| !in_block) {
                if is_file(name) && !self.has_file(name) {
                    complaints.push(format!("{at}: there is no file `{name}`"));
                }
                let words = words(name).filter(|_| is_name(name));
                if let Some(word) = words.into_iter().find(|word| !self.has(word)) {
                    complaints.push(format!("{at}: no source has '{word}' of `{name}`"));
                }
            }
        }
        complaints
    }
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

fn is_file(quoted: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || "_-/.".contains(c);
    quoted.ends_with(".rs") && quoted.chars().all(fits)
}

fn is_name(quoted: &str) -> bool {
    let all = |fits: fn(char) -> bool| quoted.chars().all(|c| c == '_' || fits(c));
    let is_constant = all(|c| c.is_ascii_uppercase() || c.is_ascii_digit())
        && quoted.starts_with(|c: char| c.is_ascii_uppercase())
        && quoted.len() > 1;
    let is_path = quoted.contains("::") && all(|c| c.is_alphanumeric() || ":()".contains(c));
    let is_long = quoted.matches('_').count() >= 4 && all(|c| c.is_ascii_alphanumeric());
    is_constant || is_path || is_long
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quoted_name_that_no_source_has_is_found() {
        let mut names = Names::default();
        let source = Path::new("crates/a/src/b/c.rs");
        names.add(source, "const LIMIT: u8 = 1; // OLD_LIMIT\nmod a { fn it_is_as_it_was() {} const IBV_NO_ERR: u8 = 2; }");
        let missing = |text: &str| names.missing(Path::new("docs/a.md"), text);
        let good = "`LIMIT` in `a::it_is_as_it_was`, `NO_ERR`, `it_is_as_it_was`, `no_name`, `--x`, `b/c.rs`, `a.py`\n```\n`OLD`\n```";
        assert_eq!(missing(good), Vec::<String>::new());
        for bad in [
            "`d.rs`",
            "`a/c.rs`",
            "`OLD_LIMIT`",
            "`a::gone`",
            "`it_was_as_it_is`",
            "```\n```\n`GONE`",
        ] {
            assert_eq!(missing(bad).len(), 1, "{bad}");
        }
    }
}
