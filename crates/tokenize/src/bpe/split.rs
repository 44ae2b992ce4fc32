//! How an encoding splits text into pieces: the patterns of tiktoken, as plain code.
//!
//! A pattern engine with look-ahead takes most of the time of tiktoken's encoder. Each pattern here
//! is a function from the rest of the text to the length of its next piece. Character classes come
//! from `regex-syntax`, the crate that also parses the original patterns, so both follow the same
//! Unicode version. The test compares the functions with the original encoder on random text.

use regex_syntax::hir::{Class, HirKind};

/// `\p{L}`.
const LETTER: u8 = 1;
/// `\p{N}`.
const NUMBER: u8 = 2;
/// `\s`.
const SPACE: u8 = 4;
/// `[\r\n]`.
const LINE_BREAK: u8 = 8;
/// `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`.
const UPPER: u8 = 16;
/// `[\p{Ll}\p{Lm}\p{Lo}\p{M}]`.
const LOWER: u8 = 32;

/// The pattern of an encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// `'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s`
    R50k,
    /// `'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|…`
    Cl100k,
    /// That of `o200k_base`, which tells upper from lower case.
    O200k,
}

/// A pattern with the classes of all characters.
#[derive(Clone)]
pub struct Splitter {
    pattern: Pattern,
    /// Classes by code point.
    classes: Box<[u8]>,
}

impl Splitter {
    /// Looks up the classes of all characters.
    ///
    /// # Errors
    /// When `regex-syntax` lacks the Unicode tables.
    pub fn new(pattern: Pattern) -> Result<Splitter, String> {
        let mut classes = vec![0; char::MAX as usize + 1].into_boxed_slice();
        for (bit, class) in [
            (LETTER, r"\p{L}"),
            (NUMBER, r"\p{N}"),
            (SPACE, r"\s"),
            (LINE_BREAK, r"[\r\n]"),
            (UPPER, r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"),
            (LOWER, r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"),
        ] {
            let HirKind::Class(Class::Unicode(class)) =
                regex_syntax::parse(class).map_err(|e| e.to_string())?.into_kind()
            else {
                continue;
            };
            for range in class.ranges() {
                let range = range.start() as usize..=range.end() as usize;
                classes[range].iter_mut().for_each(|class| *class |= bit);
            }
        }
        Ok(Splitter { pattern, classes })
    }

    /// Bytes of the first piece of `text`; at least one character, 0 only for empty text.
    pub fn piece(&self, text: &str) -> usize {
        let cursor = Cursor { text, classes: &self.classes };
        let Some((class, first)) = cursor.at(0) else {
            return 0;
        };
        let piece = match self.pattern {
            Pattern::R50k => cursor.r50k(class),
            Pattern::Cl100k => cursor.cl100k(class, first),
            Pattern::O200k => cursor.o200k(class, first),
        };
        piece.max(first)
    }
}

/// The rest of a text, addressed in bytes.
#[derive(Clone, Copy)]
struct Cursor<'a> {
    text: &'a str,
    classes: &'a [u8],
}

impl Cursor<'_> {
    /// Classes and length of the character at `at`; `None` at the end.
    #[inline]
    fn at(self, at: usize) -> Option<(u8, usize)> {
        let byte = *self.text.as_bytes().get(at)?;
        if byte < 0x80 {
            return Some((self.classes[usize::from(byte)], 1));
        }
        let c = self.text.get(at..)?.chars().next()?;
        Some((self.classes[c as usize], c.len_utf8()))
    }

    /// The end of the run of characters from `at` that `belongs` accepts, of at most `limit`
    /// characters.
    #[inline]
    fn run(self, mut at: usize, limit: usize, belongs: impl Fn(u8) -> bool) -> usize {
        for _ in 0..limit {
            match self.at(at) {
                Some((class, len)) if belongs(class) => at += len,
                _ => break,
            }
        }
        at
    }

    /// The end of the run of characters of this class.
    #[inline]
    fn run_of(self, at: usize, class: u8) -> usize {
        self.run(at, usize::MAX, |found| found & class != 0)
    }

    /// The end of the run of characters that are neither white space, letter nor number.
    #[inline]
    fn run_of_marks(self, at: usize) -> usize {
        self.run(at, usize::MAX, |found| found & (SPACE | LETTER | NUMBER) == 0)
    }

    fn is(self, at: usize, class: u8) -> bool {
        self.at(at).is_some_and(|(found, _)| found & class != 0)
    }

    fn is_byte(self, at: usize, byte: u8) -> bool {
        self.text.as_bytes().get(at) == Some(&byte)
    }

    /// The end of an English contraction from the apostrophe at `at`; `at` if there is none.
    fn contraction(self, at: usize, any_case: bool) -> usize {
        let rest = self.text.as_bytes().get(at..).unwrap_or_default();
        let fold = |byte: &u8| if any_case { byte.to_ascii_lowercase() } else { *byte };
        match (rest.first(), rest.get(1).map(fold), rest.get(2).map(fold)) {
            (Some(b'\''), Some(b's' | b'd' | b'm' | b't'), _) => at + 2,
            (Some(b'\''), Some(b'l'), Some(b'l')) => at + 3,
            (Some(b'\''), Some(b'v' | b'r'), Some(b'e')) => at + 3,
            // Without regard to case, `s` is also the long s.
            (Some(b'\''), ..) if any_case && rest[1..].starts_with("ſ".as_bytes()) => at + 3,
            _ => at,
        }
    }

    fn r50k(self, class: u8) -> usize {
        let contraction = self.contraction(0, false);
        if contraction > 0 {
            return contraction;
        }
        if class & SPACE != 0 && !self.is_spaced(0) {
            return self.spaces(self.run_of(0, SPACE));
        }
        let start = usize::from(class & SPACE != 0);
        match self.at(start) {
            Some((class, _)) if class & LETTER != 0 => self.run_of(start, LETTER),
            Some((class, _)) if class & NUMBER != 0 => self.run_of(start, NUMBER),
            _ => self.run_of_marks(start),
        }
    }

    fn cl100k(self, class: u8, first: usize) -> usize {
        let contraction = self.contraction(0, true);
        if contraction > 0 {
            return contraction;
        }
        if class & (LETTER | NUMBER | LINE_BREAK) == 0 && self.is(first, LETTER) {
            return self.run_of(first, LETTER);
        }
        if class & LETTER != 0 {
            return self.run_of(0, LETTER);
        }
        if class & NUMBER != 0 {
            return self.run(0, 3, |class| class & NUMBER != 0);
        }
        if let Some(end) = self.marks(class) {
            return self.run_of(end, LINE_BREAK);
        }
        let end = self.run_of(0, SPACE);
        if end == self.text.len() {
            return end;
        }
        self.last_line_break(end).unwrap_or_else(|| self.spaces(end))
    }

    fn o200k(self, class: u8, first: usize) -> usize {
        let prefix = (class & (LETTER | NUMBER | LINE_BREAK) == 0).then_some(first);
        let starts = [prefix, Some(0)];
        let mut words = starts.into_iter().flatten().filter_map(|at| self.ends_lower(at));
        if let Some(end) = words.next() {
            return self.contraction(end, true);
        }
        let mut words = starts.into_iter().flatten().filter(|at| self.is(*at, UPPER));
        if let Some(at) = words.next() {
            let end = self.run_of(self.run_of(at, UPPER), LOWER);
            return self.contraction(end, true);
        }
        if class & NUMBER != 0 {
            return self.run(0, 3, |class| class & NUMBER != 0);
        }
        if let Some(mut end) = self.marks(class) {
            while self.is(end, LINE_BREAK) || self.is_byte(end, b'/') {
                end += 1;
            }
            return end;
        }
        let end = self.run_of(0, SPACE);
        self.last_line_break(end).unwrap_or_else(|| self.spaces(end))
    }

    /// `U*L+` from `at`, where characters without case are both: the upper run gives back what the
    /// lower run needs.
    fn ends_lower(self, at: usize) -> Option<usize> {
        let (mut end, mut given_back) = (at, None);
        while let Some((class, len)) = self.at(end).filter(|(class, _)| class & UPPER != 0) {
            end += len;
            given_back = if class & LOWER != 0 { Some(end) } else { given_back };
        }
        if self.is(end, LOWER) { Some(self.run_of(end, LOWER)) } else { given_back }
    }

    /// Whether a space at `at` is followed by something that is not white space.
    fn is_spaced(self, at: usize) -> bool {
        self.is_byte(at, b' ') && self.at(at + 1).is_some_and(|(class, _)| class & SPACE == 0)
    }

    /// ` ?[^\s\p{L}\p{N}]+` from the start, whose first character has this class.
    fn marks(self, class: u8) -> Option<usize> {
        let start = if class & SPACE == 0 { 0 } else { usize::from(self.is_byte(0, b' ')) };
        let end = self.run_of_marks(start);
        (end > start).then_some(end)
    }

    /// The end of the last line break in the white space before `end`.
    fn last_line_break(self, end: usize) -> Option<usize> {
        memchr::memrchr2(b'\r', b'\n', &self.text.as_bytes()[..end]).map(|at| at + 1)
    }

    /// `\s+(?!\S)|\s` for white space before `end`: the last character stays with what follows.
    fn spaces(self, end: usize) -> usize {
        if end == self.text.len() {
            return end;
        }
        let last = self.text[..end].chars().next_back().map_or(0, char::len_utf8);
        if end > last { end - last } else { end }
    }
}
