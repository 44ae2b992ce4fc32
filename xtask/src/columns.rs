//! Prose ends at column 100, as rustfmt has it for code: paragraphs of Markdown, and comments in
//! Rust.
//!
//! Only what can be broken is refused. Tables, headings, code in fences and targets of links have
//! their own length, and a line of one word, such as an address or a span of code, has no place to
//! break it.

use std::path::Path;

use crate::scan;

/// `max_width` of `rustfmt.toml`.
const COLUMNS: usize = 100;

/// Where documentation is the text of `--help`, whose lines are those of a terminal.
const HELP: &str = "crates/dquant/src/cli";

/// Lines of a Markdown file that are too long.
pub(crate) fn markdown(path: &Path, text: &str) -> Vec<String> {
    let mut fence = Fence::default();
    let lines = text.lines().enumerate();
    let long = lines.filter(|(_, line)| fence.is_prose(line) && can_be_broken(line, line));
    long.map(|(number, line)| complaint(path, number, line)).collect()
}

/// Comments of a Rust file that are too long, those behind code included.
pub(crate) fn rust(path: &Path, text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let (mut fence, mut next) = (Fence::default(), 0);
    let mut complaints = Vec::new();
    for (number, comment) in scan::line_comments(text) {
        let Some(line) = lines.get(number) else { continue };
        // A block of code ends with the comment that it is in.
        let is_alone = line.trim_start().starts_with("//");
        if !is_alone || number != next {
            fence = Fence::default();
        }
        next = number + 1;
        let prose = comment.trim_start_matches('/').trim_start_matches('!');
        if path.starts_with(HELP) && line.trim_start().starts_with("///") {
            continue;
        }
        if fence.is_prose(prose) && can_be_broken(line, prose) {
            complaints.push(complaint(path, number, line));
        }
    }
    complaints
}

fn complaint(path: &Path, number: usize, line: &str) -> String {
    let at = format!("{}:{}", path.display(), number + 1);
    format!("{at}: prose of {} columns: break it at {COLUMNS}", line.chars().count())
}

/// Whether the reader is between the marks of a block of code.
#[derive(Default)]
struct Fence(Option<&'static str>);

impl Fence {
    /// Takes the next line and returns whether it is outside every block.
    fn is_prose(&mut self, line: &str) -> bool {
        let mark = ["```", "~~~"].into_iter().find(|mark| line.trim_start().starts_with(mark));
        match (self.0, mark) {
            (None, None) => return true,
            (None, Some(_)) => self.0 = mark,
            (Some(open), Some(close)) if open == close => self.0 = None,
            (Some(_), _) => {}
        }
        false
    }
}

/// Whether the line is too long and its prose has a place to break it.
fn can_be_broken(line: &str, prose: &str) -> bool {
    if line.chars().count() <= COLUMNS {
        return false;
    }
    let prose = without_marker(prose.trim());
    let is_table = prose.starts_with('|') && prose.ends_with('|');
    let is_target = prose.starts_with('[')
        && prose.split_once("]: ").is_some_and(|(_, target)| !target.contains(' '));
    !is_table && !is_target && !prose.starts_with('#') && has_space_outside_code(prose)
}

/// The text of an entry of a list.
fn without_marker(prose: &str) -> &str {
    let Some((marker, text)) = prose.split_once(' ') else {
        return prose;
    };
    let is_number = marker.ends_with(['.', ')'])
        && marker.len() > 1
        && marker[..marker.len() - 1].bytes().all(|byte| byte.is_ascii_digit());
    if is_number || ["-", "*", "+"].contains(&marker) { text.trim_start() } else { prose }
}

fn has_space_outside_code(prose: &str) -> bool {
    prose.split('`').step_by(2).any(|outside| outside.contains(' '))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn long(text: &str) -> usize {
        markdown(Path::new("docs/a.md"), text).len()
    }

    fn long_comments(text: &str) -> usize {
        rust(Path::new("a.rs"), text).len()
    }

    #[test]
    fn comments_end_at_the_last_column() {
        let of = |columns: usize| format!("    // {} word", "é".repeat(columns - 12));
        assert_eq!(long_comments(&of(COLUMNS)), 0);
        assert_eq!(long_comments(&of(COLUMNS + 1)), 1);
        assert_eq!(long_comments(&format!("{}\n", "let a = 1; ".repeat(12))), 0);
    }

    #[test]
    fn prose_ends_at_the_last_column() {
        let of = |columns: usize| format!("{} word\n", "é".repeat(columns - 5));
        assert_eq!(long(&of(COLUMNS)), 0);
        assert_eq!(long(&of(COLUMNS + 1)), 1);
        for prefix in ["- ", "12. ", "  ", "> ", "<a id=\"a\"></a>"] {
            assert_eq!(long(&format!("{prefix}{}", of(COLUMNS))), 1, "{prefix}");
        }
        assert_eq!(
            markdown(Path::new("a.md"), &format!("\n{}", of(103))),
            ["a.md:2: prose of 103 columns: break it at 100"]
        );
    }

    #[test]
    fn what_has_no_place_to_break_is_left() {
        let word = "w".repeat(COLUMNS + 1);
        let spaced = format!("{word} {word}");
        for kept in [
            word.clone(),
            format!("- {word}"),
            format!("3. `{spaced}`"),
            format!("| {spaced} |"),
            format!("## {spaced}"),
            format!("[name of it]: {word}"),
            format!("```console\n$ {spaced}\n```"),
            format!("~~~\n```\n{spaced}\n~~~"),
            format!("  ```text\n  {spaced}\n  ```"),
        ] {
            assert_eq!(long(&kept), 0, "{kept}");
        }
        for comment in ["//", "///", "//!"] {
            let kept = [
                format!("{comment} {word}"),
                format!("    {comment} | {spaced} |"),
                format!("{comment} ```text\n{comment} {spaced}\n{comment} ```"),
                format!("let a = \"\n{comment} {spaced}\";"),
            ];
            for kept in kept {
                assert_eq!(long_comments(&kept), 0, "{kept}");
            }
            let broken = [
                format!("    {comment} {spaced}"),
                format!("{comment} ```text\n\n{comment} {spaced}"),
                format!("let a = 1; {comment} {spaced}"),
                format!("{comment} - {spaced}"),
            ];
            for broken in broken {
                assert_eq!(long_comments(&broken), 1, "{broken}");
            }
        }
        for broken in [
            format!("```text\n```\n{spaced}"),
            format!("[name]: {spaced}"),
            format!("| {spaced}"),
            format!("`code` {word}"),
        ] {
            assert_eq!(long(&broken), 1, "{broken}");
        }
    }
}
