//! Byte-pair encoding with tiktoken's vocabularies, several times as fast as tiktoken's own
//! encoder.
//!
//! Text is [`split`] into pieces. A piece that is a token is one table look-up; of any other, the
//! pair of neighbours with the lowest rank is merged until no pair is a token, as tiktoken does.
//! Short tokens are keys of 16 bytes in one table, so a look-up touches one cache line. Nothing
//! here can fail: every byte is a token.

pub mod split;

use rustc_hash::FxHashMap;
use split::Splitter;

/// Bytes of the longest token that is packed into a key.
const PACKED_BYTES: usize = 15;

/// A rank that no token has.
const NONE: u32 = u32::MAX;

/// Pieces with at least this many bytes are merged with a heap instead of repeated scans.
const LONG_PIECE_BYTES: usize = 128;

/// Ids of tokens by their bytes; the id is also the rank.
#[derive(Clone, Default)]
pub struct Ranks {
    packed: FxHashMap<u128, u32>,
    long: FxHashMap<Box<[u8]>, u32>,
}

impl Ranks {
    /// Adds a token.
    pub fn insert(&mut self, token: &[u8], id: u32) {
        match pack(token) {
            Some(key) => self.packed.insert(key, id),
            None => self.long.insert(token.into(), id),
        };
    }

    /// The id of these bytes, [`NONE`] when they are no token.
    #[inline]
    fn get(&self, bytes: &[u8]) -> u32 {
        let id = match pack(bytes) {
            Some(key) => self.packed.get(&key),
            None => self.long.get(bytes),
        };
        id.copied().unwrap_or(NONE)
    }

    /// The id of the token with these bytes.
    pub fn id_of(&self, bytes: &[u8]) -> Option<u32> {
        Some(self.get(bytes)).filter(|id| *id != NONE)
    }

    /// Whether every byte alone is a token.
    pub fn is_complete(&self) -> bool {
        (0..=u8::MAX).all(|byte| self.get(&[byte]) != NONE)
    }
}

/// Up to [`PACKED_BYTES`] bytes and their number as one key.
#[inline]
fn pack(bytes: &[u8]) -> Option<u128> {
    if bytes.len() > PACKED_BYTES {
        return None;
    }
    let mut key = [0; 16];
    key[..bytes.len()].copy_from_slice(bytes);
    key[PACKED_BYTES] = bytes.len() as u8;
    Some(u128::from_le_bytes(key))
}

/// Appends the ids of `text` to `tokens`.
pub fn encode(splitter: &Splitter, ranks: &Ranks, text: &str, tokens: &mut Vec<u32>) {
    let mut scratch = Vec::new();
    let mut at = 0;
    while at < text.len() {
        let end = at + splitter.piece(&text[at..]);
        let piece = &text.as_bytes()[at..end];
        match ranks.get(piece) {
            NONE if piece.len() < LONG_PIECE_BYTES => {
                merge_short(ranks, piece, &mut scratch, tokens);
            }
            NONE => merge_long(ranks, piece, tokens),
            id => tokens.push(id),
        }
        at = end;
    }
}

/// Merges by scanning for the lowest rank: quadratic, and the fastest way for short pieces.
fn merge_short(ranks: &Ranks, piece: &[u8], parts: &mut Vec<(usize, u32)>, tokens: &mut Vec<u32>) {
    // Each part is its start and the rank of its merge with the next part.
    let pair = |parts: &[(usize, u32)], at: usize| match parts.get(at + 2) {
        Some((end, _)) => ranks.get(&piece[parts[at].0..*end]),
        None => NONE,
    };
    parts.clear();
    parts.extend((0..=piece.len()).map(|start| (start, NONE)));
    for at in 0..piece.len() {
        parts[at].1 = pair(parts, at);
    }
    loop {
        let lowest = parts.iter().enumerate().min_by_key(|(_, (_, rank))| *rank);
        let Some((at, _)) = lowest.filter(|(_, (_, rank))| *rank != NONE) else {
            break;
        };
        parts.remove(at + 1);
        parts[at].1 = pair(parts, at);
        if let Some(before) = at.checked_sub(1) {
            parts[before].1 = pair(parts, before);
        }
    }
    let ends = parts.windows(2).map(|part| ranks.get(&piece[part[0].0..part[1].0]));
    tokens.extend(ends);
}

/// Merges with a heap of candidate pairs, so that a piece of a million characters takes no
/// quadratic time.
fn merge_long(ranks: &Ranks, piece: &[u8], tokens: &mut Vec<u32>) {
    use std::cmp::Reverse;
    use std::collections::BinaryHeap;
    // `next[start]` is the end of the part that starts there, `before[start]` the start of the part
    // before it.
    let len = piece.len();
    let mut next: Vec<usize> = (1..=len).collect();
    let mut before: Vec<usize> = (0..len).map(|start| start.wrapping_sub(1)).collect();
    let candidate = |next: &[usize], start: usize| {
        let end = *next.get(*next.get(start)?)?;
        let rank = ranks.get(&piece[start..end]);
        (rank != NONE).then_some(Reverse((rank, start, end)))
    };
    let mut heap: BinaryHeap<_> = (0..len).filter_map(|start| candidate(&next, start)).collect();
    while let Some(Reverse((_, start, end))) = heap.pop() {
        // A candidate is stale when its left part is gone, or when either part has grown since.
        let middle = next[start];
        if middle >= len || next[middle] != end {
            continue;
        }
        next[start] = end;
        next[middle] = usize::MAX;
        if let Some(after) = before.get_mut(end) {
            *after = start;
        }
        heap.extend(candidate(&next, start));
        if start > 0 {
            heap.extend(candidate(&next, before[start]));
        }
    }
    let mut start = 0;
    while start < len {
        tokens.push(ranks.get(&piece[start..next[start]]));
        start = next[start];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks() -> Ranks {
        let mut ranks = Ranks::default();
        for byte in 0..=u8::MAX {
            ranks.insert(&[byte], u32::from(byte));
        }
        for (id, token) in ["ab", "bc", "abc", "aa", "aaaa", "bb", "abab", "ca"].iter().enumerate()
        {
            ranks.insert(token.as_bytes(), 256 + id as u32);
        }
        ranks
    }

    /// Both ways to merge give the same ids on random pieces of few letters, where pairs overlap
    /// most.
    #[test]
    fn both_ways_to_merge_agree() {
        let ranks = ranks();
        assert!(ranks.is_complete());
        let mut state = 1_u64;
        for case in 0..20_000 {
            let mut letter = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                b'a' + (state >> 62) as u8
            };
            let piece: Vec<u8> = (0..2 + case % 40).map(|_| letter()).collect();
            let (mut short, mut long) = (Vec::new(), Vec::new());
            merge_short(&ranks, &piece, &mut Vec::new(), &mut short);
            merge_long(&ranks, &piece, &mut long);
            assert_eq!(short, long, "case {case}: {:?}", String::from_utf8_lossy(&piece));
        }
    }

    #[test]
    fn the_pair_of_lowest_rank_is_merged_first_and_the_left_one_of_equals() {
        let encode = |piece: &str| {
            let mut tokens = Vec::new();
            merge_short(&ranks(), piece.as_bytes(), &mut Vec::new(), &mut tokens);
            tokens
        };
        assert_eq!(encode("abc"), [258]);
        assert_eq!(encode("aaa"), [259, u32::from(b'a')]);
        assert_eq!(encode("aaaa"), [260]);
    }
}
