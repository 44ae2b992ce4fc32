//! Where a document may be cut without changing its tokens, and the reader that cuts there.
//!
//! An encoding first splits text into pieces by a pattern that reads from left to right and never
//! looks back, then encodes each piece alone. So a cut changes nothing if the pattern ends a piece
//! there in the whole text, and ends the same pieces when the text stops there. White space makes
//! the second condition delicate: all four patterns treat white space at the end of the text, and
//! before more text, differently. Three places are safe in all of them:
//!
//! - between a character that is not white space and one that is, unless that is a line break: a
//!   piece may begin with white space or consist of it, but none continues into it;
//! - between an ASCII letter or digit and a line break: only punctuation includes following line
//!   breaks;
//! - after a single line feed between two characters that are not white space, unless the second is
//!   a slash, which one pattern lets follow a line break inside a piece.
//!
//! The property test below compares cut and uncut text at every such place. Text without any of
//! these places within [`MAX_CHUNKS_WITHOUT_CUT`] chunks, which no language has, is cut between two
//! characters and counted.

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
    NotUtf8 {
        /// Bytes before the first that is not part of UTF-8 text, counted from where the reader
        /// started.
        valid_bytes: u64,
    },
}

/// Reads a document in chunks of about `chunk_bytes`, at most [`MAX_CHUNKS_WITHOUT_CUT`] times as
/// large.
#[derive(Debug)]
pub struct ChunkReader<R> {
    source: R,
    chunk_bytes: usize,
    /// Bytes read and not returned yet.
    pending: Vec<u8>,
    returned_bytes: u64,
    ended: bool,
}

impl<R: Read> ChunkReader<R> {
    /// Starts at the beginning of `source`.
    pub fn new(source: R, chunk_bytes: usize) -> ChunkReader<R> {
        // Four bytes hold any character, so every chunk can make progress.
        let chunk_bytes = chunk_bytes.max(4);
        ChunkReader { source, chunk_bytes, pending: Vec::new(), returned_bytes: 0, ended: false }
    }

    /// The next chunk; `None` at the end.
    ///
    /// # Errors
    /// When the source fails or is not UTF-8.
    pub fn next_chunk(&mut self) -> Result<Option<Chunk>, ReadError> {
        let mut wanted = self.chunk_bytes;
        loop {
            self.fill(wanted).map_err(ReadError::Io)?;
            let text = valid_prefix(&self.pending, self.ended).map_err(|valid| {
                ReadError::NotUtf8 { valid_bytes: self.returned_bytes + valid as u64 }
            })?;
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
        self.returned_bytes += len as u64;
        let rest = self.pending.split_off(len);
        let taken = std::mem::replace(&mut self.pending, rest);
        // `len` came from `valid_prefix`, so the lossy conversion replaces nothing.
        Chunk { text: String::from_utf8_lossy(&taken).into_owned(), forced_cut }
    }
}

/// The text at the start of `bytes`, or how many bytes before an invalid one; a character cut in
/// two at the end is left for later unless the source has ended.
fn valid_prefix(bytes: &[u8], ended: bool) -> Result<&str, usize> {
    let error = match std::str::from_utf8(bytes) {
        Ok(text) => return Ok(text),
        Err(error) => error,
    };
    let valid = error.valid_up_to();
    if ended || error.error_len().is_some() {
        return Err(valid);
    }
    std::str::from_utf8(&bytes[..valid]).map_err(|_| valid)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;
    use crate::Encoding;

    /// Characters that the four patterns treat differently from one another.
    const DELICATE: &[char] = &[
        'a', 'B', 's', 't', 'l', '1', '2', ' ', ' ', '\n', '\n', '\r', '\t', '.', '!', '/', '\'',
        '_', '中', '文', '。', '\u{3000}', '\u{a0}', '\u{301}', 'ß', 'Ǆ', 'ǅ', '²', 'Ⅷ', '😀',
        '\u{2028}', '\u{200d}', '\u{85}',
    ];

    /// A generator with a fixed stream: the seed in a failure message replays the case.
    pub(crate) fn text_of(seed: u64) -> String {
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
                let mut whole = Vec::new();
                encoder.encode(&text, &mut whole);
                for cut in safe_cuts(&text) {
                    let mut parts = Vec::new();
                    encoder.encode(&text[..cut], &mut parts);
                    encoder.encode(&text[cut..], &mut parts);
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
        let first_invalid_byte = |bytes: &[u8], chunk_bytes| {
            let mut reader = ChunkReader::new(bytes, chunk_bytes);
            loop {
                match reader.next_chunk() {
                    Ok(Some(_)) => {}
                    Ok(None) => return None,
                    Err(ReadError::NotUtf8 { valid_bytes }) => return Some(valid_bytes),
                    Err(error) => panic!("{error:?}"),
                }
            }
        };
        let mut broken = "中文 ".repeat(30_000).into_bytes();
        for chunk_bytes in [4, 1000, 1 << 20] {
            assert_eq!(first_invalid_byte(b"plain", chunk_bytes), None);
            assert_eq!(first_invalid_byte(b"", chunk_bytes), None);
            assert_eq!(first_invalid_byte(b"ab\xff", chunk_bytes), Some(2));
            assert_eq!(first_invalid_byte("a中".as_bytes().split_at(3).0, chunk_bytes), Some(1));
            assert_eq!(first_invalid_byte(&broken, chunk_bytes), None);
        }
        broken[150_003] = 0xff;
        for chunk_bytes in [4, 1000, 1 << 20] {
            assert_eq!(first_invalid_byte(&broken, chunk_bytes), Some(150_003));
        }
    }
}
