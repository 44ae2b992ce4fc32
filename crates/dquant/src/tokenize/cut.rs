//! Where a document may be cut without changing its tokens, and the reader that cuts there.
//!
//! An encoding first splits text into pieces by a pattern that reads from left to right and never looks back, then
//! encodes each piece alone. So a cut changes nothing if the pattern ends a piece there in the whole text, and ends
//! the same pieces when the text stops there. White space makes the second condition delicate: all four patterns
//! treat white space at the end of the text, and before more text, differently. Three places are safe in all of them:
//!
//! - between a character that is not white space and one that is, unless that is a line break: a piece may begin with
//!   white space or consist of it, but none continues into it;
//! - between an ASCII letter or digit and a line break: only punctuation includes following line breaks;
//! - after a single line feed between two characters that are not white space, unless the second is a slash, which
//!   one pattern lets follow a line break inside a piece.
//!
//! The property test below compares cut and uncut text at every such place. Text without any of these places within
//! [`MAX_CHUNKS_WITHOUT_CUT`] chunks, which no language has, is cut between two characters and counted.

use std::io::{self, Read};

/// How many chunks of text may accumulate before a cut is forced; bounds memory.
pub const MAX_CHUNKS_WITHOUT_CUT: usize = 4;

/// The last place in `text` where a cut changes no token; never at its ends.
pub fn last_safe_cut(text: &str) -> Option<usize> {
    let mut after: Option<char> = None;
    let mut before = text.char_indices().rev().peekable();
    while let Some((at, c)) = before.next() {
        let earlier = before.peek().map(|(_, earlier)| *earlier);
        if let Some(next) = after
            && is_safe(earlier, c, next)
        {
            return Some(at + c.len_utf8());
        }
        after = Some(c);
    }
    None
}

/// Whether text may be cut between `left` and `right`; `earlier` is the character before `left`.
fn is_safe(earlier: Option<char>, left: char, right: char) -> bool {
    let line_break = matches!(right, '\r' | '\n');
    if !left.is_whitespace() && right.is_whitespace() {
        return !line_break || left.is_ascii_alphanumeric();
    }
    let single_line_feed = left == '\n' && earlier.is_some_and(|c| !c.is_whitespace());
    single_line_feed && !right.is_whitespace() && right != '/'
}

/// The last boundary between two characters at or before `at`, but not 0 unless the text is one character.
pub fn last_char_boundary(text: &str, at: usize) -> usize {
    let first = text.chars().next().map_or(0, char::len_utf8);
    let mut at = at.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at.max(first)
}

/// One chunk of a document.
#[derive(Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The text; never empty.
    pub text: String,
    /// Whether it ends at a place that may change a token or two.
    pub forced_cut: bool,
}

/// Why a document cannot be read to its end.
#[derive(Debug)]
pub enum ReadError {
    /// An error of the operating system.
    Io(io::Error),
    /// The text is not UTF-8.
    NotUtf8,
}

/// Reads a document in chunks of about `chunk_bytes`, at most [`MAX_CHUNKS_WITHOUT_CUT`] times as large.
#[derive(Debug)]
pub struct ChunkReader<R> {
    source: R,
    chunk_bytes: usize,
    /// Bytes read and not returned yet.
    pending: Vec<u8>,
    ended: bool,
}

impl<R: Read> ChunkReader<R> {
    /// Starts at the beginning of `source`.
    pub fn new(source: R, chunk_bytes: usize) -> ChunkReader<R> {
        // Four bytes hold any character, so every chunk can make progress.
        ChunkReader { source, chunk_bytes: chunk_bytes.max(4), pending: Vec::new(), ended: false }
    }

    /// The next chunk; `None` at the end.
    ///
    /// # Errors
    /// When the source fails or is not UTF-8.
    pub fn next_chunk(&mut self) -> Result<Option<Chunk>, ReadError> {
        let mut wanted = self.chunk_bytes;
        loop {
            self.fill(wanted).map_err(ReadError::Io)?;
            let text = valid_prefix(&self.pending, self.ended)?;
            if self.ended {
                let len = text.len();
                return Ok((len > 0).then(|| self.take(len, false)));
            }
            if let Some(cut) = last_safe_cut(text) {
                return Ok(Some(self.take(cut, false)));
            }
            if wanted >= self.chunk_bytes * MAX_CHUNKS_WITHOUT_CUT {
                let len = text.len();
                return Ok(Some(self.take(len, true)));
            }
            wanted += self.chunk_bytes;
        }
    }

    /// Reads until `wanted` bytes are pending or the source ends.
    fn fill(&mut self, wanted: usize) -> io::Result<()> {
        let missing = wanted.saturating_sub(self.pending.len()) as u64;
        let read = self.source.by_ref().take(missing).read_to_end(&mut self.pending)?;
        self.ended |= (read as u64) < missing;
        Ok(())
    }

    fn take(&mut self, len: usize, forced_cut: bool) -> Chunk {
        let rest = self.pending.split_off(len);
        let taken = std::mem::replace(&mut self.pending, rest);
        // `len` came from `valid_prefix`, so the lossy conversion replaces nothing.
        Chunk { text: String::from_utf8_lossy(&taken).into_owned(), forced_cut }
    }
}

/// The text at the start of `bytes`; a character cut in two at the end is left for later unless the source has ended.
fn valid_prefix(bytes: &[u8], ended: bool) -> Result<&str, ReadError> {
    let error = match std::str::from_utf8(bytes) {
        Ok(text) => return Ok(text),
        Err(error) => error,
    };
    if ended || error.error_len().is_some() {
        return Err(ReadError::NotUtf8);
    }
    std::str::from_utf8(&bytes[..error.valid_up_to()]).map_err(|_| ReadError::NotUtf8)
}

/// How many bytes at the start of a source are UTF-8; `None` when all of them are.
///
/// # Errors
/// When the source cannot be read.
pub fn first_invalid_byte(source: impl Read) -> io::Result<Option<u64>> {
    const WINDOW_BYTES: u64 = 64 * 1024;
    let mut source = source;
    let (mut window, mut seen) = (Vec::with_capacity(WINDOW_BYTES as usize), 0_u64);
    loop {
        let read = source.by_ref().take(WINDOW_BYTES).read_to_end(&mut window)?;
        let Err(error) = std::str::from_utf8(&window) else {
            seen += window.len() as u64;
            window.clear();
            if read == 0 {
                return Ok(None);
            }
            continue;
        };
        let valid = error.valid_up_to();
        if error.error_len().is_some() || read == 0 {
            return Ok(Some(seen + valid as u64));
        }
        seen += valid as u64;
        window.drain(..valid);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::tokenize::Encoding;

    /// Characters that the four patterns treat differently from one another.
    const DELICATE: &[char] = &[
        'a', 'B', 's', 't', 'l', '1', '2', ' ', ' ', '\n', '\n', '\r', '\t', '.', '!', '/', '\'',
        '_', '中', '文', '。', '\u{3000}', '\u{a0}', '\u{301}', 'ß', 'Ǆ', 'ǅ', '²', 'Ⅷ', '😀',
        '\u{2028}', '\u{200d}', '\u{85}',
    ];

    /// A generator with a fixed stream: the seed in a failure message replays the case.
    fn text_of(seed: u64) -> String {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 33) as usize
        };
        let len = 2 + next() % 24;
        (0..len).map(|_| DELICATE[next() % DELICATE.len()]).collect()
    }

    fn safe_cuts(text: &str) -> Vec<usize> {
        let chars: Vec<(usize, char)> = text.char_indices().collect();
        let is_safe_at = |at: &usize| {
            let earlier = at.checked_sub(2).map(|earlier| chars[earlier].1);
            is_safe(earlier, chars[at - 1].1, chars[*at].1)
        };
        (1..chars.len()).filter(is_safe_at).map(|at| chars[at].0).collect()
    }

    #[test]
    fn a_safe_cut_changes_no_token() {
        for encoding in Encoding::ALL {
            let encoder = encoding.load().unwrap();
            for seed in 0..4_000 {
                let text = text_of(seed);
                let whole = encoder.encode(&text).tokens;
                for cut in safe_cuts(&text) {
                    let mut parts = encoder.encode(&text[..cut]).tokens;
                    parts.extend(encoder.encode(&text[cut..]).tokens);
                    assert_eq!(
                        parts, whole,
                        "replay: {encoding} text_of({seed}) = {text:?} cut {cut}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_last_safe_cut_is_the_last_of_all_safe_cuts() {
        for seed in 0..4_000 {
            let text = text_of(seed);
            assert_eq!(
                last_safe_cut(&text),
                safe_cuts(&text).last().copied(),
                "replay: text_of({seed})"
            );
        }
    }

    #[test]
    fn chunks_put_together_are_the_document() {
        for seed in 0..500 {
            let text: String = (seed * 50..seed * 50 + 50).map(text_of).collect();
            for chunk_bytes in [1, 7, 64, 1 << 20] {
                let mut reader = ChunkReader::new(text.as_bytes(), chunk_bytes);
                let mut whole = String::new();
                while let Some(chunk) = reader.next_chunk().unwrap() {
                    assert!(!chunk.text.is_empty());
                    assert!(chunk.text.len() <= chunk_bytes.max(4) * MAX_CHUNKS_WITHOUT_CUT);
                    whole += &chunk.text;
                }
                assert_eq!(whole, text, "replay: seed {seed}, chunks of {chunk_bytes}");
            }
        }
    }

    #[test]
    fn text_without_a_place_to_cut_is_cut_and_said() {
        let text = "中".repeat(100);
        let mut reader = ChunkReader::new(text.as_bytes(), 16);
        assert!(reader.next_chunk().unwrap().unwrap().forced_cut);
    }

    #[test]
    fn invalid_text_is_found_at_its_first_byte() {
        assert_eq!(first_invalid_byte(&b"plain"[..]).unwrap(), None);
        assert_eq!(first_invalid_byte(&b""[..]).unwrap(), None);
        assert_eq!(first_invalid_byte(&b"ab\xff"[..]).unwrap(), Some(2));
        assert_eq!(first_invalid_byte("a中".as_bytes().split_at(3).0).unwrap(), Some(1));
        let long = "中".repeat(70_000);
        assert_eq!(first_invalid_byte(long.as_bytes()).unwrap(), None);
        let mut broken = long.into_bytes();
        broken[150_000] = 0xff;
        assert_eq!(first_invalid_byte(&broken[..]).unwrap(), Some(150_000));
        let mut reader = ChunkReader::new(&broken[..], 1 << 20);
        assert!(matches!(reader.next_chunk(), Err(ReadError::NotUtf8)));
    }
}
