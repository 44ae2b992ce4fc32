//! Whether a file of ids begins with a header that nobody knows.
//!
//! The first bytes are compared with the other samples of the same file, never with what ids are
//! like elsewhere: files differ in vocabulary, padding and the id that ends a document. Four kinds
//! of evidence count, and each is all but impossible where every number is an id:
//!
//! - *A number beyond every vocabulary*, such as a magic number, and none in the rest of the file.
//!   No id is one.
//! - *Zeros*: of the first 32 numbers at least 8 are zero, and more than four times as many as in
//!   any other 32 neighbours of the samples, of which there are at least 128. If the first ones are
//!   tokens like the others, the chance that they hold the most zeros of N such groups is 1/N. The
//!   zeros also have to lie as in a header: behind several small fields, or as padding that ends at
//!   a power of two. A file that begins with a zero is padded on the left, and is let pass.
//! - *The length of the file*: a field among the first bytes is the number of elements, or of
//!   bytes, behind a header that ends within 32 bytes or at a power of two, from 128 on behind
//!   padding. A field that could be a single id counts only where the header ends with it.
//! - *Text*: the first 32 bytes are printable and varied, and most of the others are not.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::{Dtype, LARGEST_VOCABULARY};

/// Longest header that is looked for.
const HEAD_BYTES: usize = 4 << 10;

/// Fewer numbers behind the head say nothing about it: of text and numbers that are no ids, and of
/// what ids may be.
const ENOUGH: usize = 256;
const ENOUGH_TO_COUNT: usize = 4 << 10;

/// Neighbours among which zeros are counted.
const GROUP: usize = 32;

/// Zeros of a group that ids rarely reach.
const MANY_ZEROS: usize = 8;

/// Fields whose upper halves are zero, which make zeros a header.
const SMALL_FIELDS: usize = 5;

/// Where fields of a header are looked for, in bytes, and those of which ids by chance are less
/// unlikely.
const FIELDS: usize = 32;
const SHORT_FIELDS: usize = 16;

/// Where a header may end, besides behind its last field: at any word near the beginning, or
/// padded.
const ENDS: [usize; 14] = [8, 12, 16, 20, 24, 28, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096];

/// Headers are often padded to one of these.
const PADDED: [usize; 8] = [32, 64, 128, 256, 512, 1_024, 2_048, 4_096];

/// From this length on, a header counts as padded only if it ends with this many equal bytes: a
/// small number that happens to be the length of a small file is not rare enough alone.
const LONG_HEADER: usize = 128;
const PADDING: usize = 8;

/// First bytes that are text in a header, and how many of them differ: a repeated id has few.
const TEXT_BYTES: usize = 32;
const TEXT_VARIETY: u32 = 10;

/// Numbers of this width, with their sign extended: labels such as -100 are negative.
pub(super) fn numbers(bytes: &[u8], width: u32) -> impl Iterator<Item = i64> + Clone {
    let width = width as usize;
    bytes.chunks_exact(width).map(move |number| {
        let negative = number[width - 1] >= 0x80 && width >= 4;
        let mut wide = if negative { [0xff; 8] } else { [0; 8] };
        wide[..width].copy_from_slice(number);
        i64::from_le_bytes(wide)
    })
}

/// The samples of a file of `file_len` bytes, cut behind the longest header that may be in front.
pub(super) fn split(sampled: &[u8], file_len: u64) -> (&[u8], &[u8]) {
    let quarter = usize::try_from(file_len / 4).unwrap_or(HEAD_BYTES);
    sampled.split_at(HEAD_BYTES.min(quarter & !7).min(sampled.len()))
}

/// Why the file begins with a header, where its samples leave no doubt that the rest are elements
/// of this type.
pub(super) fn header(sampled: &[u8], file_len: u64, dtype: Dtype) -> Option<String> {
    let (head, body) = split(sampled, file_len);
    if body.len() < ENOUGH * dtype.bytes() as usize {
        return None;
    }
    if begins_with_text(head, body) {
        return Some("its first bytes are text, the others are not".into());
    }
    if dtype.is_float() || dtype.bytes() == 1 {
        return None;
    }
    let width = dtype.bytes();
    let found = beyond(head, body, width).or_else(|| length_field(head, file_len, width));
    let is_enough = body.len() >= ENOUGH_TO_COUNT * width as usize;
    found.or_else(|| zeros(head, body, width).filter(|_| is_enough))
}

fn begins_with_text(head: &[u8], body: &[u8]) -> bool {
    let is_text = |byte: &u8| matches!(byte, b'\t' | b'\n' | b'\r' | b' '..=b'~');
    let begins = head.get(..TEXT_BYTES).is_some_and(|first| {
        let seen = first.iter().fold(0_u128, |seen, byte| seen | 1 << (byte & 0x7f));
        first.iter().all(is_text) && seen.count_ones() >= TEXT_VARIETY
    });
    begins && 2 * body.iter().filter(|byte| is_text(byte)).count() < body.len()
}

fn beyond(head: &[u8], body: &[u8], width: u32) -> Option<String> {
    // Negative labels are small, and what is far below zero is no label.
    let is_beyond = |id: &i64| !(-256..LARGEST_VOCABULARY as i64).contains(id);
    let (at, found) = numbers(head, width).enumerate().find(|(_, id)| is_beyond(id))?;
    let only_there = width >= 4 && !numbers(body, width).any(|id| is_beyond(&id));
    only_there.then(|| format!("its number {at} is {found}, and no other is beyond a vocabulary"))
}

fn zeros(head: &[u8], body: &[u8], width: u32) -> Option<String> {
    let group = GROUP * width as usize;
    let count = |bytes: &[u8]| numbers(bytes, width).filter(|id| *id == 0).count();
    let first = head.get(..group)?;
    let found = count(first);
    if found < MANY_ZEROS
        || numbers(first, width).next() == Some(0)
        || !lie_as_in_a_header(head, width)
    {
        return None;
    }
    let most = body.chunks_exact(group).map(count).max()?;
    (found > 4 * most).then(|| {
        format!("{found} of its first {GROUP} numbers are 0, elsewhere at most {most} of {GROUP}")
    })
}

/// Whether zeros among the first numbers follow several small fields, or pad a header.
fn lie_as_in_a_header(head: &[u8], width: u32) -> bool {
    let (mut runs, mut run, mut pads) = (0, 0, false);
    for (at, id) in numbers(head, width).enumerate() {
        match id {
            0 => {
                runs += usize::from(run == 0 && at < GROUP);
                run += 1;
            }
            _ => {
                pads |= run >= MANY_ZEROS && PADDED.contains(&(at * width as usize));
                run = 0;
            }
        }
    }
    pads || runs >= SMALL_FIELDS
}

/// A field that holds the length of what follows.
fn length_field(head: &[u8], file_len: u64, width: u32) -> Option<String> {
    let is_end = |end: &usize| *end < LONG_HEADER || is_padded(head, *end);
    let ends: Vec<usize> = ENDS.into_iter().filter(is_end).collect();
    for at in (0..FIELDS).step_by(4) {
        for size in [4, 8] {
            let Some(raw) = head.get(at..at + size) else { continue };
            for is_big in [false, true] {
                let mut wide = [0; 8];
                wide[..size].copy_from_slice(raw);
                if is_big {
                    wide[..size].reverse();
                }
                let value = u64::from_le_bytes(wide);
                let may_be_id = value < LARGEST_VOCABULARY && !is_big && size <= width as usize;
                if may_be_id && at > SHORT_FIELDS {
                    continue;
                }
                let ends = if may_be_id { &[][..] } else { &ends[..] };
                if let Some(end) = header_end(value, at + size, ends, (file_len, width)) {
                    return Some(format!(
                        "the field at its byte {at} is {value}, the length of what follows byte {end}"
                    ));
                }
            }
        }
    }
    None
}

/// Whether the bytes before `end` are padding.
fn is_padded(head: &[u8], end: usize) -> bool {
    let last = head.get(end - PADDING..end);
    last.is_some_and(|last| last.iter().all(|byte| *byte == last[0]))
}

/// Where a header ends whose field ends at `field_end`, if `value` is the number of elements or
/// bytes behind it.
fn header_end(
    value: u64,
    field_end: usize,
    ends: &[usize],
    (file_len, width): (u64, u32),
) -> Option<u64> {
    let later = ends.iter().copied().filter(|end| *end > field_end);
    core::iter::once(field_end).chain(later).map(|end| end as u64).find(|end| {
        let left = file_len.saturating_sub(*end);
        let elements = left / u64::from(width);
        let is_whole = left.is_multiple_of(width.into());
        is_whole && elements >= ENOUGH_TO_COUNT as u64 && (value == elements || value == left)
    })
}
