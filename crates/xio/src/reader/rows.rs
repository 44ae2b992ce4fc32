//! The rows of a sample: tokens, or inputs and labels, and where its documents are.
//!
//! A batch holds the first row of all its samples, then the second of all, and so on. Rows are
//! written in the delivered type, piece by piece through a small buffer. Which sample comes next is
//! not known here.

use alloc::vec::Vec;
use core::ops::Range;

use crate::dataset::Dtype;
use crate::kernel::Kernels;

use super::{BATCH_ALIGN, Delivery, Sink, WEIGHT_BYTES};

/// Bytes written at a time: they stay in the first-level cache on their way to the ring.
const PIECE_BYTES: usize = 8 << 10;

/// What a sample consists of.
#[derive(Debug, Default)]
pub(super) struct Row {
    /// Its tokens, if they do not lie in one piece.
    pub(super) tokens: Vec<u8>,
    /// By document in it, the token after its last; none where documents do not matter.
    pub(super) ends: Vec<u32>,
    /// Whether any row depends on the ends.
    pub(super) needs_ends: bool,
    /// Which of its tokens are no targets.
    pub(super) others: Vec<Range<u32>>,
    /// Whether any row depends on them.
    pub(super) needs_others: bool,
}

impl Row {
    pub(super) fn new(delivery: &Delivery) -> Row {
        Row {
            needs_ends: delivery.rows.need_documents(),
            needs_others: delivery.rows.targets,
            ..Row::default()
        }
    }

    pub(super) fn clear(&mut self) {
        self.ends.clear();
        self.others.clear();
    }

    /// Notes what is no target of a piece of a file that begins with token `start` and lies at
    /// token `at` of the sample.
    pub(super) fn note_others(
        &mut self,
        others: impl Iterator<Item = Range<u64>>,
        start: u64,
        at: u32,
    ) {
        let in_sample = |token: u64| at + (token - start) as u32;
        self.others.extend(others.map(|run| in_sample(run.start)..in_sample(run.end)));
    }

    /// Adds padding to the tokens that were gathered, up to so many bytes; a token has `width`.
    pub(super) fn pad(&mut self, bytes: usize, pad: u32, width: u32) {
        let pad = u64::from(pad).to_le_bytes();
        while self.tokens.len() < bytes {
            self.tokens.extend_from_slice(&pad[..width as usize]);
        }
    }
}

/// The first loss weight that is NaN or infinite, and its bits.
pub(super) fn first_not_finite(weights: &[u8]) -> Option<(usize, u32)> {
    let weights = weights.as_chunks().0;
    let is_wrong = |bits: u32| bits & EXPONENT == EXPONENT;
    // Without a way out, so that it is done on vectors.
    let any = weights.iter().fold(false, |any, raw| any | is_wrong(u32::from_le_bytes(*raw)));
    let mut bits = weights.iter().map(|raw| u32::from_le_bytes(*raw)).enumerate();
    if any { bits.find(|(_, bits)| is_wrong(*bits)) } else { None }
}

/// The exponent of a `f32`, all of whose bits are set in NaN and infinities.
const EXPONENT: u32 = 0x7f80_0000;

/// Writes samples into slots.
pub(super) struct Writer<'a, S> {
    pub(super) sink: &'a mut S,
    pub(super) kernels: &'a Kernels,
    pub(super) delivery: &'a Delivery,
}

impl<S: Sink> Writer<'_, S> {
    /// Writes the sample with this number in a slot. Its documents end at the ends of the row; what
    /// is behind the last is padding.
    pub(super) fn write_sample(&mut self, slot: u32, number: u64, sample: &[u8], row: &Row) {
        let Delivery { rows, sample_dtype, .. } = *self.delivery;
        let ends = &row.ends[..];
        let width = sample_dtype.bytes() as usize;
        if rows.pairs {
            self.write_tokens(slot, self.row_at(number, 0), &sample[..sample.len() - width]);
            self.write_tokens(slot, self.row_at(number, 1), &sample[width..]);
        } else {
            self.write_tokens(slot, self.row_at(number, 0), sample);
        }
        if let Some(ignore) = rows.ignore {
            let labels = self.row_at(number, 1);
            self.ignore_labels(slot, labels, ends, ignore);
            self.hide_labels(slot, labels, &row.others, ignore);
        }
        if rows.positions {
            let first = 1 + u32::from(rows.pairs);
            self.write_numbers(slot, self.row_at(number, first), ends, |_| (0, 1));
            self.write_numbers(slot, self.row_at(number, first + 1), ends, |part| (part, 0));
        }
    }

    /// Writes the loss weights of the sample with this number: of its tokens, or of its labels.
    /// `weights` are those of its tokens, none where they have none. What is no label to learn, and
    /// padding, weighs nothing.
    pub(super) fn write_weights(
        &mut self,
        slot: u32,
        number: u64,
        weights: Option<&[u8]>,
        row: &Row,
    ) {
        let Delivery { rows, batch_samples, .. } = *self.delivery;
        let tokens = self.delivery.row_tokens();
        let at = self.weights_at(number);
        match weights {
            Some(weights) if rows.pairs => {
                self.sink.write(slot, at, &weights[WEIGHT_BYTES as usize..]);
            }
            Some(weights) => self.sink.write(slot, at, weights),
            None => self.write_weight(slot, at, 0..tokens, rows.missing_weight()),
        }
        let (ends, shift) = (&row.ends[..], u32::from(rows.pairs));
        let used = ends.last().copied();
        if rows.ignore.is_some() {
            for label in ends.iter().map(|end| end - 1).filter(|label| *label < tokens) {
                self.write_weight(slot, at, label..label + 1, 0.0);
            }
            for others in &row.others {
                self.write_weight(slot, at, others.start.saturating_sub(1)..others.end - 1, 0.0);
            }
        }
        if let (Some(used), None) = (used, weights) {
            self.write_weight(slot, at, used.saturating_sub(shift).min(tokens)..tokens, 0.0);
        }
        if number % u64::from(batch_samples) + 1 == u64::from(batch_samples) {
            self.write_gaps(slot, number);
        }
    }

    /// Writes zeros where nothing else is of a batch, whose last sample has this number.
    fn write_gaps(&mut self, slot: u32, number: u64) {
        let Delivery { batch_samples, .. } = *self.delivery;
        let begin = self.batch_at(number);
        let tokens = self.delivery.tokens_bytes() as u32;
        let weights = self.delivery.weights_at() as u32;
        let end = weights + batch_samples * self.delivery.weights_bytes();
        for gap in [tokens..weights, end..self.delivery.batch_bytes() as u32] {
            let zeros = [0; BATCH_ALIGN as usize];
            self.sink.write(slot, begin + gap.start, &zeros[..gap.len()]);
        }
    }

    /// Writes one weight in the place of several.
    fn write_weight(&mut self, slot: u32, at: u32, mut tokens: Range<u32>, weight: f32) {
        /// Weights written at a time.
        const SOME: usize = 64;
        let mut some = [0; SOME * WEIGHT_BYTES as usize];
        for each in some.chunks_exact_mut(WEIGHT_BYTES as usize) {
            each.copy_from_slice(&weight.to_le_bytes());
        }
        while !tokens.is_empty() {
            let count = tokens.len().min(SOME);
            let bytes = &some[..count * WEIGHT_BYTES as usize];
            self.sink.write(slot, at + tokens.start * WEIGHT_BYTES, bytes);
            tokens.start += count as u32;
        }
    }

    /// Offset in the slot of the batch of a sample. In range: a slot is smaller than 4 GiB.
    fn batch_at(&self, number: u64) -> u32 {
        (number / u64::from(self.delivery.batch_samples) * self.delivery.batch_bytes()) as u32
    }

    /// Offset in the slot of a row of a sample.
    fn row_at(&self, number: u64, row: u32) -> u32 {
        let batch = u64::from(self.delivery.batch_samples);
        let index = u64::from(row) * batch + number % batch;
        self.batch_at(number) + (index * u64::from(self.delivery.row_bytes())) as u32
    }

    /// Offset in the slot of the loss weights of a sample.
    fn weights_at(&self, number: u64) -> u32 {
        let in_batch = (number % u64::from(self.delivery.batch_samples)) as u32;
        let before = self.delivery.weights_at() as u32 + in_batch * self.delivery.weights_bytes();
        self.batch_at(number) + before
    }

    /// Writes tokens, widened if need be.
    fn write_tokens(&mut self, slot: u32, mut offset: u32, tokens: &[u8]) {
        let (from, to) = (self.delivery.sample_dtype, self.delivery.dtype);
        if from == to {
            return self.sink.write(slot, offset, tokens);
        }
        let mut wide = [0; PIECE_BYTES];
        let piece_bytes = PIECE_BYTES / to.bytes() as usize * from.bytes() as usize;
        for piece in tokens.chunks(piece_bytes) {
            let wide = &mut wide[..piece.len() / from.bytes() as usize * to.bytes() as usize];
            (self.kernels.widen)(piece, from, to, wide);
            self.sink.write(slot, offset, wide);
            offset += wide.len() as u32;
        }
    }

    /// Overwrites the labels that belong to another document than their input, and those of
    /// padding. Label `i` is token `i + 1`.
    fn ignore_labels(&mut self, slot: u32, row: u32, ends: &[u32], ignore: i64) {
        let labels = self.delivery.row_tokens();
        let used = ends.last().copied().unwrap_or(0);
        let borders = ends.iter().map(|end| end - 1);
        for label in borders.filter(|label| *label < labels) {
            self.write_label(slot, row, label..label + 1, ignore);
        }
        self.write_label(slot, row, used.min(labels)..labels, ignore);
    }

    /// Overwrites the labels that are no targets. Label `i` is token `i + 1`.
    fn hide_labels(&mut self, slot: u32, row: u32, others: &[Range<u32>], ignore: i64) {
        for others in others {
            self.write_label(slot, row, others.start.saturating_sub(1)..others.end - 1, ignore);
        }
    }

    /// Writes the same in the place of several labels.
    fn write_label(&mut self, slot: u32, row: u32, mut labels: Range<u32>, ignore: i64) {
        /// Labels written at a time.
        const SOME: u32 = 64;
        let width = self.delivery.dtype.bytes();
        let id = ignore.to_le_bytes();
        let mut some = [0; SOME as usize * size_of::<i64>()];
        let written = labels.len().min(SOME as usize) * width as usize;
        for label in some[..written].chunks_exact_mut(width as usize) {
            label.copy_from_slice(&id[..width as usize]);
        }
        while !labels.is_empty() {
            let count = (labels.end - labels.start).min(SOME);
            self.sink.write(slot, row + labels.start * width, &some[..(count * width) as usize]);
            labels.start += count;
        }
    }

    /// Writes a number for each token of a row: for the first of each part, counted from 1, and the
    /// steps from token to token, what `of` says; 0 for padding.
    fn write_numbers(&mut self, slot: u32, row: u32, ends: &[u32], of: impl Fn(u32) -> (u32, u32)) {
        let (tokens, dtype) = (self.delivery.row_tokens(), self.delivery.dtype);
        let mut piece = Piece { bytes: [0; PIECE_BYTES], len: 0, slot, offset: row, dtype };
        let mut token = 0;
        for (part, end) in (1..).zip(ends) {
            let end = (*end).min(tokens);
            let (first, step) = of(part);
            piece.push(self.sink, end - token, first, step);
            token = end;
        }
        piece.push(self.sink, tokens - token, 0, 0);
        piece.flush(self.sink);
    }
}

/// Numbers on their way to a slot.
struct Piece {
    bytes: [u8; PIECE_BYTES],
    len: usize,
    slot: u32,
    offset: u32,
    dtype: Dtype,
}

impl Piece {
    /// Adds so many numbers from `first` on, each `step` more than the one before.
    fn push<S: Sink>(&mut self, sink: &mut S, mut count: u32, mut first: u32, step: u32) {
        let width = self.dtype.bytes();
        while count > 0 {
            let room = (PIECE_BYTES - self.len) as u32 / width;
            let some = count.min(room);
            let end = self.len + (some * width) as usize;
            let bytes = &mut self.bytes[self.len..end];
            // Loops of their own, because vectors need a known width.
            match width {
                2 => fill(bytes, first, step, |number| (number as u16).to_le_bytes()),
                4 => fill(bytes, first, step, u32::to_le_bytes),
                _ => fill(bytes, first, step, |number| u64::from(number).to_le_bytes()),
            }
            (self.len, count, first) = (end, count - some, first + some * step);
            if some == room {
                self.flush(sink);
            }
        }
    }

    fn flush<S: Sink>(&mut self, sink: &mut S) {
        sink.write(self.slot, self.offset, &self.bytes[..self.len]);
        self.offset += self.len as u32;
        self.len = 0;
    }
}

/// Writes numbers from `first` on in steps, of which `bytes_of` makes bytes.
fn fill<const WIDTH: usize>(
    bytes: &mut [u8],
    first: u32,
    step: u32,
    bytes_of: impl Fn(u32) -> [u8; WIDTH],
) {
    for (at, number) in (0..).zip(bytes.as_chunks_mut().0) {
        *number = bytes_of(first + at * step);
    }
}
