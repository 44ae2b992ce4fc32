//! Splits a plan into words, quoted names and punctuation, each with its position in the text.

use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Range;

use super::error::{PlanError, Problem};

/// The kind of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A name or a number: a run of bare characters.
    Word(String),
    /// A name in quotes, without them.
    Quoted(String),
    /// One of `( ) , = |`.
    Mark(char),
    /// The end of the plan.
    End,
}

impl Kind {
    /// Its name in error messages.
    pub(super) fn describe(&self) -> String {
        match self {
            Kind::Word(text) => alloc::format!("`{text}`"),
            Kind::Quoted(text) => alloc::format!("\"{text}\""),
            Kind::Mark(mark) => alloc::format!("`{mark}`"),
            Kind::End => String::from("the end of the plan"),
        }
    }
}

/// A token and its byte range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) kind: Kind,
    pub(super) span: Range<usize>,
}

/// Whether a name needs no quotes.
pub(super) fn is_bare(name: &str) -> bool {
    !name.is_empty() && name.chars().all(is_bare_char)
}

fn is_bare_char(c: char) -> bool {
    c.is_alphanumeric() || "_-./:@+~%".contains(c)
}

/// All tokens of a plan, the last of which is [`Kind::End`].
pub(super) fn tokens(text: &str) -> Result<Vec<Token>, PlanError> {
    let mut tokens = Vec::new();
    let mut at = 0;
    while let Some(c) = text[at..].chars().next() {
        let rest = &text[at..];
        let (kind, len) = match c {
            _ if c.is_whitespace() => {
                at += c.len_utf8();
                continue;
            }
            '(' | ')' | ',' | '=' | '|' => (Kind::Mark(c), 1),
            '"' | '\'' => quoted(rest, c, at)?,
            _ if is_bare_char(c) => {
                let len = rest.find(|c| !is_bare_char(c)).unwrap_or(rest.len());
                (Kind::Word(String::from(&rest[..len])), len)
            }
            _ => {
                return Err(PlanError::new(Problem::Character { c }, at..at + c.len_utf8()));
            }
        };
        tokens.push(Token { kind, span: at..at + len });
        at += len;
    }
    tokens.push(Token { kind: Kind::End, span: text.len()..text.len() });
    Ok(tokens)
}

/// A quoted name at the front of `rest`, and its length in bytes with its quotes.
fn quoted(rest: &str, quote: char, at: usize) -> Result<(Kind, usize), PlanError> {
    let mut name = String::new();
    let mut chars = rest.char_indices().skip(1);
    while let Some((i, c)) = chars.next() {
        let literal = match c {
            _ if c == quote => return Ok((Kind::Quoted(name), i + 1)),
            '\\' => {
                chars.next().map(|(_, escaped)| escaped).filter(|e| matches!(e, '\\' | '"' | '\''))
            }
            _ => Some(c).filter(|c| !c.is_control()),
        };
        let here = at + i..at + i + c.len_utf8();
        name.push(literal.ok_or_else(|| PlanError::new(Problem::Escape, here))?);
    }
    Err(PlanError::new(Problem::OpenQuote, at..at + rest.len()))
}
