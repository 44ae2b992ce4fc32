//! Just enough of Rust's lexical rules to search sources for names.
//!
//! [`code_only`] blanks comments, strings and character literals and keeps every line break, so
//! that text does not cause false matches. It works on characters, not on a syntax tree: nothing is
//! expanded.

/// The source with comments, strings and character literals turned into spaces; line breaks stay.
pub(crate) fn code_only(source: &str) -> String {
    let mut code = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(next) = rest.chars().next() {
        let skipped = literal_len(rest, code.chars().next_back());
        if skipped == 0 {
            code.push(next);
            rest = &rest[next.len_utf8()..];
            continue;
        }
        code.extend(rest[..skipped].chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
        rest = &rest[skipped..];
    }
    code
}

/// The comments that end with their line: the number of the line, from 0, and the text from its two
/// slashes on.
pub(crate) fn line_comments(source: &str) -> Vec<(usize, &str)> {
    let (mut found, mut number, mut rest, mut before) = (Vec::new(), 0, source, None);
    while let Some(next) = rest.chars().next() {
        let skipped = literal_len(rest, before);
        let length = if skipped == 0 { next.len_utf8() } else { skipped };
        let (piece, after) = rest.split_at(length);
        if piece.starts_with("//") {
            found.push((number, piece));
        }
        number += piece.matches('\n').count();
        (before, rest) = (Some(if skipped == 0 { next } else { ' ' }), after);
    }
    found
}

/// Bytes of the comment or literal that starts here; 0 when none does.
fn literal_len(rest: &str, before: Option<char>) -> usize {
    if rest.starts_with("//") {
        return rest.find('\n').unwrap_or(rest.len());
    }
    if rest.starts_with("/*") {
        return block_comment_len(rest);
    }
    match rest.as_bytes()[0] {
        b'"' => quoted_len(rest, '"'),
        b'\'' => char_literal_len(rest),
        b'r' if !before.is_some_and(is_name_char) || matches!(before, Some('b' | 'c')) => {
            raw_string_len(rest)
        }
        _ => 0,
    }
}

fn block_comment_len(rest: &str) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while at < rest.len() {
        if rest[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
        } else {
            at += rest[at..].chars().next().map_or(1, char::len_utf8);
        }
        if depth == 0 {
            return at;
        }
    }
    rest.len()
}

fn quoted_len(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        if !escaped && c == quote {
            return at + c.len_utf8();
        }
        escaped = !escaped && c == '\\';
    }
    rest.len()
}

/// A quote opens a character literal when an escape follows or the second character is the closing
/// quote; otherwise it is a lifetime.
fn char_literal_len(rest: &str) -> usize {
    let mut chars = rest.chars().skip(1);
    let (first, second) = (chars.next(), chars.next());
    if first == Some('\\') || second == Some('\'') { quoted_len(rest, '\'') } else { 0 }
}

fn raw_string_len(rest: &str) -> usize {
    let hashes = rest[1..].bytes().take_while(|b| *b == b'#').count();
    let body = 1 + hashes;
    if !rest[body..].starts_with('"') {
        return 0;
    }
    let end = format!("\"{}", "#".repeat(hashes));
    rest[body + 1..].find(&end).map_or(rest.len(), |at| body + 1 + at + end.len())
}

fn is_name_char(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is left, without the spaces.
    fn left(source: &str) -> String {
        code_only(source).split_whitespace().collect()
    }

    #[test]
    fn comments_and_literals_are_blanked() {
        let source = "a(\"x}\", '}', b'}', r#\"}\"}\"#); // }\n/* } /* } */ */b";
        assert_eq!(left(source), "a(,,b,);b");
    }

    #[test]
    fn comments_are_found_behind_code_and_not_in_literals() {
        let source =
            "/// one\nlet a = \"// no\n// no\"; // two\n/* // no */ r#\"\n// no\"#\n'/' // three";
        let expected = [(0, "/// one"), (2, "// two"), (5, "// three")];
        assert_eq!(line_comments(source), expected);
    }

    #[test]
    fn lifetimes_are_not_character_literals() {
        assert_eq!(left("fn a<'a>(x: &'a str)"), "fna<'a>(x:&'astr)");
    }

    #[test]
    fn escapes_end_where_rust_ends_them() {
        assert_eq!(left("('\\'', \"\\\\\", '\\u{7d}'); b"), "(,,);b");
    }

    #[test]
    fn blanking_keeps_every_line_break() {
        let source = "/* one\ntwo */ \"three\nfour\" // five\n";
        let code = code_only(source);
        assert_eq!(code.matches('\n').count(), source.matches('\n').count());
        assert!(code.trim().is_empty());
    }
}
