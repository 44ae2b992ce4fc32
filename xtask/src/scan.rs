//! Just enough of Rust's lexical rules to measure functions.
//!
//! [`code_only`] blanks comments, strings and character literals and keeps every line break, so that what is left can
//! be searched for braces without being fooled by text. [`functions`] then finds each `fn` with a body and counts its
//! lines. It works on tokens, not on a syntax tree: functions inside macros are found too, and nothing is expanded.

/// A function with a body.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Function {
    pub(crate) name: String,
    /// Line of the `fn` keyword, counted from 1.
    pub(crate) line: usize,
    /// Lines from the `fn` keyword to the closing brace, both included.
    pub(crate) lines: usize,
}

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

/// A quote opens a character literal when an escape follows or the second character is the closing quote; otherwise it
/// is a lifetime.
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

/// Every function with a body, in order; `code` comes from [`code_only`].
pub(crate) fn functions(code: &str) -> Vec<Function> {
    let keyword = code.match_indices("fn ").map(|(at, _)| at);
    keyword
        .filter(|at| !code[..*at].ends_with(is_name_char))
        .filter_map(|at| measure(code, at))
        .collect()
}

fn measure(code: &str, at: usize) -> Option<Function> {
    let after = code[at + 3..].trim_start();
    let name: String = after.chars().take_while(|c| is_name_char(*c)).collect();
    if name.is_empty() {
        return None;
    }
    let end = body_end(&code[at..])?;
    let line = code[..at].matches('\n').count() + 1;
    Some(Function { name, line, lines: code[at..at + end].matches('\n').count() + 1 })
}

/// Bytes from the `fn` keyword past the closing brace; `None` for a declaration without a body.
fn body_end(code: &str) -> Option<usize> {
    let (mut nesting, mut braces) = (0_i32, 0_i32);
    for (at, c) in code.char_indices() {
        match c {
            '(' | '[' => nesting += 1,
            ')' | ']' => nesting -= 1,
            ';' if nesting == 0 && braces == 0 => return None,
            '{' => braces += 1,
            '}' => braces -= 1,
            _ => continue,
        }
        if c == '}' && braces == 0 && nesting == 0 {
            return Some(at + 1);
        }
    }
    None
}

fn is_name_char(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(source: &str) -> Vec<(String, usize, usize)> {
        functions(&code_only(source)).into_iter().map(|f| (f.name, f.line, f.lines)).collect()
    }

    #[test]
    fn braces_in_text_do_not_count() {
        let source = "fn a() {\n    let _ = (\"}\", '}', b'}', r#\"}\"}\"#); // }\n    /* } /* } */ */\n}\nfn b() {}\n";
        assert_eq!(measured(source), [("a".to_owned(), 1, 4), ("b".to_owned(), 5, 1)]);
    }

    #[test]
    fn lifetimes_are_not_character_literals() {
        let source = "fn a<'a>(x: &'a str) -> &'a str {\n    x\n}\n";
        assert_eq!(measured(source), [("a".to_owned(), 1, 3)]);
    }

    #[test]
    fn declarations_and_function_types_have_no_body() {
        let source = "trait T {\n    fn a(&self, f: fn (u8) -> [u8; 4]);\n    fn b() -> [u8; { 2 + 2 }] {\n    }\n}\n";
        assert_eq!(measured(source), [("b".to_owned(), 3, 2)]);
    }

    #[test]
    fn escapes_end_where_rust_ends_them() {
        let source = "fn a() {\n    let _ = ('\\'', \"\\\\\", '\\u{7d}');\n}\nfn b() {\n}\n";
        assert_eq!(measured(source), [("a".to_owned(), 1, 3), ("b".to_owned(), 4, 2)]);
    }

    #[test]
    fn blanking_keeps_every_line_break() {
        let source = "/* one\ntwo */ \"three\nfour\" // five\n";
        let code = code_only(source);
        assert_eq!(code.matches('\n').count(), source.matches('\n').count());
        assert!(code.trim().is_empty());
    }
}
