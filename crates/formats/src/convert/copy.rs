//! Chunks into a writer, with an account of what was written.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use xio::dataset::Dtype;

use super::choice::Choice;
use crate::digest::Digest;
use crate::error::Error;
use crate::reading::Chunk;
use crate::source::weights::WEIGHT_BYTES;
use crate::value;
use crate::writer::{Settled, Writer};

/// Which documents are written, and how they are cut.
#[derive(Clone, Copy)]
pub(super) struct Cut<'a> {
    /// These alone.
    pub(super) choice: Option<&'a Choice>,
    /// Into pieces of this many tokens.
    pub(super) split: Option<u64>,
    /// Leave out those without tokens.
    pub(super) drop_empty: bool,
    /// Keep the sequences of documents.
    pub(super) sequences: bool,
}

/// A place in the source, and what the output holds of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Progress {
    /// The part of the source, and what was taken from it.
    pub(super) part: u64,
    pub(super) part_tokens: u64,
    part_ends: u64,
    /// Tokens and documents of the source, those that are not written included.
    pub(super) source_tokens: u64,
    source_documents: u64,
    /// Tokens since the last end of a document, in the source and in the output.
    source_document: u64,
    document: u64,
    /// Sequences of the document that ended, and are not written yet: a document that is left out
    /// has none.
    sequences_due: u64,
    /// Everything so far.
    pub(super) tokens: Digest,
    pub(super) documents: Digest,
    /// Where documents go on with another sequence.
    pub(super) sequences: Digest,
    /// The bits of the loss weights.
    pub(super) weights: Digest,
    /// The last token.
    last: Option<i128>,
    /// The last token of the first document, and whether all others end in another.
    pub(super) first_end: Option<i128>,
    ends_differ: bool,
}

impl Progress {
    /// The id that ends every document and occurs nowhere else, if there is one; `occurrences` is
    /// how often `first_end` occurs.
    pub(super) fn common_end(&self, occurrences: u64) -> Option<i128> {
        let common = !self.ends_differ && self.document == 0 && occurrences == self.documents.count;
        // One end says nothing about the rest of a dataset.
        self.first_end.filter(|_| common && self.documents.count > 1)
    }
}

/// What writers need to go on.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Saved {
    pub(super) tokens: Value,
    pub(super) weights: Option<Value>,
}

/// Writes chunks.
pub(super) struct Copier<'a> {
    writer: Box<dyn Writer>,
    /// The writer of loss weights, where they are kept; that of the tokens settles as it goes then,
    /// too.
    weights: Option<Box<dyn Writer>>,
    cut: Cut<'a>,
    dtype: Dtype,
    progress: Progress,
    /// Where the current document of the output begins.
    before: Progress,
    /// What the writer has in its files.
    settled: Progress,
    /// Still to be skipped: what an earlier run has taken of the part.
    skip_tokens: u64,
    skip_ends: u64,
}

impl Copier<'_> {
    pub(super) fn new(
        writer: Box<dyn Writer>,
        weights: Option<Box<dyn Writer>>,
        progress: Progress,
        cut: Cut<'_>,
        dtype: Dtype,
    ) -> Copier<'_> {
        let Progress { part_tokens, part_ends, .. } = progress;
        Copier {
            writer,
            weights,
            cut,
            dtype,
            progress,
            before: progress,
            settled: progress,
            skip_tokens: part_tokens,
            skip_ends: part_ends,
        }
    }

    pub(super) fn tokens(&self) -> u64 {
        self.progress.tokens.count
    }

    pub(super) fn settled_tokens(&self) -> u64 {
        self.settled.tokens.count
    }

    /// Writes a chunk of the source.
    pub(super) fn take(&mut self, chunk: &Chunk) -> Result<(), Error> {
        if chunk.part != self.progress.part {
            self.progress.part = chunk.part;
            (self.progress.part_tokens, self.progress.part_ends) = (0, 0);
            (self.skip_tokens, self.skip_ends) = (0, 0);
        }
        let width = self.dtype.bytes() as usize;
        let tokens = chunk.tokens.len() / width;
        let mut at = self.skip_tokens.min(tokens as u64) as usize;
        self.skip_tokens -= at as u64;
        let skipped_ends = self.skip_ends.min(chunk.ends.len() as u64) as usize;
        self.skip_ends -= skipped_ends as u64;
        let weights = |run: Range<usize>| match chunk.weights.is_empty() {
            true => &[][..],
            false => &chunk.weights[run.start * WEIGHT_BYTES..run.end * WEIGHT_BYTES],
        };
        for end in &chunk.ends[skipped_ends..] {
            self.put(&chunk.tokens[at * width..end.at * width], weights(at..end.at))?;
            at = end.at;
            self.progress.part_ends += 1;
            match end.is_document {
                true => self.end_in_source()?,
                false => {
                    self.progress.sequences_due += u64::from(self.cut.sequences && self.writes());
                }
            }
        }
        self.put(&chunk.tokens[at * width..], weights(at..tokens))
    }

    /// Whether the current document of the source is written.
    fn writes(&self) -> bool {
        let document = self.progress.source_documents;
        self.cut.choice.is_none_or(|choice| choice.keeps(document))
    }

    /// Tokens of one document of the source, and their loss weights, if they are read.
    fn put(&mut self, mut bytes: &[u8], mut weights: &[u8]) -> Result<(), Error> {
        let width = u64::from(self.dtype.bytes());
        if !self.writes() {
            let count = bytes.len() as u64 / width;
            self.progress.part_tokens += count;
            self.progress.source_tokens += count;
            return Ok(());
        }
        if !bytes.is_empty() {
            self.end_sequences()?;
        }
        while !bytes.is_empty() {
            let room = self.cut.split.map_or(u64::MAX, |split| split - self.progress.document);
            let len = (bytes.len() as u64).min(room.saturating_mul(width)) as usize;
            let (piece, rest) = bytes.split_at(len);
            let count = len as u64 / width;
            let settled = self.writer.tokens(piece)?;
            self.progress.tokens.extend(piece, self.dtype);
            if let Some(writer) = &mut self.weights {
                let (piece, rest) = weights.split_at(count as usize * WEIGHT_BYTES);
                writer.tokens(piece)?;
                self.progress.weights.extend(piece, Dtype::F32);
                weights = rest;
            }
            self.progress.part_tokens += count;
            self.progress.source_tokens += count;
            self.progress.source_document += count;
            self.progress.document += count;
            self.progress.last = value::last(piece, self.dtype);
            self.settle(settled);
            if self.cut.split == Some(self.progress.document) {
                self.end_in_output()?;
            }
            bytes = rest;
        }
        Ok(())
    }

    /// The document of the source ends.
    fn end_in_source(&mut self) -> Result<(), Error> {
        let is_written = self.writes();
        self.progress.source_documents += 1;
        let tokens = std::mem::take(&mut self.progress.source_document);
        // What was cut into whole pieces has ended already.
        let ended = self.progress.document == 0 && tokens > 0;
        let dropped = tokens == 0 && self.cut.drop_empty;
        if ended || dropped || !is_written {
            self.progress.sequences_due = 0;
            return Ok(());
        }
        self.end_in_output()
    }

    /// Writes the ends of sequences that are due.
    fn end_sequences(&mut self) -> Result<(), Error> {
        for _ in 0..std::mem::take(&mut self.progress.sequences_due) {
            self.writer.end_sequence()?;
            self.progress.sequences.push(self.progress.documents.count);
            self.progress.sequences.push(self.progress.document);
        }
        Ok(())
    }

    fn end_in_output(&mut self) -> Result<(), Error> {
        self.end_sequences()?;
        let settled = self.writer.end_document()?;
        let tokens = std::mem::take(&mut self.progress.document);
        let last = self.progress.last.filter(|_| tokens > 0);
        if self.progress.documents.count == 0 {
            self.progress.first_end = last;
        }
        self.progress.ends_differ |= last != self.progress.first_end;
        self.progress.documents.push(tokens);
        self.settle(settled);
        self.before = self.progress;
        Ok(())
    }

    fn settle(&mut self, settled: Settled) {
        match settled {
            Settled::Same => {}
            Settled::BeforeDocument => self.settled = self.before,
            Settled::All => self.settled = self.progress,
        }
    }

    /// Puts what is settled on the disk.
    pub(super) fn save(&mut self) -> Result<(Progress, Saved), Error> {
        let weights = self.weights.as_mut().map(|writer| writer.save()).transpose()?;
        self.writer.save().map(|tokens| (self.settled, Saved { tokens, weights }))
    }

    /// Completes the output.
    pub(super) fn finish(mut self) -> Result<Progress, Error> {
        if self.progress.document > 0 {
            self.end_in_output()?;
        }
        self.weights.map_or(Ok(()), |writer| writer.finish())?;
        self.writer.finish().map(|()| self.progress)
    }
}
