//! Flat, NumPy and Megatron files: the tokens of all documents in one run.
//!
//! A Megatron index is checked whole when it is opened, in blocks ([`megatron::Walk`]); of its
//! arrays only the starts of the parts are kept. Sequences of Megatron that belong to one document
//! are joined.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use xio::dataset::{DatasetError, Format, TokenFile, megatron};

use super::blocks::Blocks;
use super::weights::Beside;
use super::{
    BLOCK_BYTES, Layout, PART_BYTES, ReadOptions, Sink, Source, folder_of, no_tokens, relative,
};
use crate::error::Error;
use crate::kind::Kind;
use crate::manifest::Manifest;
use crate::settle::{self, Asked, Origin, Refusal};

/// Entries of an index that are read at once.
const INDEX_BLOCK: u64 = 1 << 16;

/// A file before its format is known.
struct Opened {
    path: PathBuf,
    file: File,
    len: u64,
}

impl Opened {
    fn new(path: &Path) -> Result<Opened, Error> {
        // Checked before it is opened: opening a pipe waits for a writer.
        let found = fs::metadata(path).map_err(Error::read(path))?;
        if !found.is_file() {
            return Err(Error::refused(path, "is not a file", "name a token file"));
        }
        let file = File::open(path).map_err(Error::read(path))?;
        Ok(Opened { path: path.to_owned(), file, len: found.len() })
    }

    /// The first `bytes` of the file, or all of it.
    fn head(&self, bytes: u64) -> Result<Vec<u8>, Error> {
        self.range(0, bytes.min(self.len))
    }

    fn range(&self, offset: u64, bytes: u64) -> Result<Vec<u8>, Error> {
        let mut range = vec![0; bytes as usize];
        self.file.read_exact_at(&mut range, offset).map_err(Error::read(&self.path))?;
        Ok(range)
    }
}

/// Where a part of a Megatron dataset begins.
#[derive(Clone, Copy, Debug, Default)]
struct Start {
    sequence: u64,
    byte: u64,
    /// The first document index that is an end in this part.
    document: u64,
}

/// The index of a Megatron dataset.
struct Index {
    file: Opened,
    header: megatron::Header,
    starts: Vec<Start>,
}

/// A dataset in one run.
struct Contiguous {
    data: Opened,
    token_file: TokenFile,
    index: Option<Index>,
    weights: Option<Beside>,
    layout: Layout,
}

pub(super) fn open(
    path: &Path,
    kind: Kind,
    options: &ReadOptions,
) -> Result<Box<dyn Source>, Error> {
    match kind {
        Kind::Megatron => {
            let data = Opened::new(&data_of(path))?;
            open_megatron(data, Opened::new(&path.with_extension("idx"))?, options)
        }
        _ => open_single(Opened::new(path)?, options),
    }
}

/// The file with the tokens of a pair, of which either half is named: a `.npy` is one without
/// NumPy's header.
fn data_of(path: &Path) -> PathBuf {
    let (bin, npy) = (path.with_extension("bin"), path.with_extension("npy"));
    let is_npy = path == npy || !bin.exists() && npy.exists();
    if is_npy { npy } else { bin }
}

/// A file that no index describes.
fn open_single(data: Opened, options: &ReadOptions) -> Result<Box<dyn Source>, Error> {
    let manifest = options.manifest(&data.path)?;
    let asked = Asked {
        dtype: options.dtype,
        vocabulary: options.vocabulary,
        trusted: options.trusted,
        any_integer: true,
    };
    let found = settle::describe(&data.file, data.len, asked, manifest.as_ref());
    let (token_file, origin) = found.map_err(|error| no_tokens(&data.path, error))?;
    let dtype = token_file.dtype;
    if dtype.is_float() {
        // Values of floating point are streamed, but are no token ids.
        let source = DatasetError::NotInteger { descr: dtype.to_string(), kind: 'f' };
        return Err(Error::Dataset { path: data.path, source });
    }
    let kind = if matches!(token_file.format, Format::Npy { .. }) { Kind::Npy } else { Kind::Flat };
    finish(data, token_file, None, manifest, (kind, origin), options)
}

fn open_megatron(
    data: Opened,
    index: Opened,
    options: &ReadOptions,
) -> Result<Box<dyn Source>, Error> {
    let head = index.head(megatron::HEADER_BYTES as u64)?;
    let header = megatron::Header::parse_integers(&head, index.len);
    let header = header.map_err(Error::dataset(&index.path))?;
    let mut walk = megatron::Walk::new(header, data.len);
    let mut starts = part_starts(&index, header, &mut walk)?;
    document_starts(&index, header, &mut walk, &mut starts)?;
    let token_file = walk.finish().map_err(Error::dataset(&index.path))?;
    let manifest = options.manifest(&data.path)?;
    let index = Index { file: index, header, starts };
    finish(data, token_file, Some(index), manifest, (Kind::Megatron, Origin::File), options)
}

/// Checks the sequences and notes where parts begin.
fn part_starts(
    index: &Opened,
    header: megatron::Header,
    walk: &mut megatron::Walk,
) -> Result<Vec<Start>, Error> {
    let mut starts = Vec::new();
    let (mut byte, mut next) = (0, 0);
    for (first, count) in entries(0, header.sequences) {
        let lengths = index.range(header.lengths_at() + 4 * first, 4 * count)?;
        let pointers = index.range(header.pointers_at() + 8 * first, 8 * count)?;
        walk.sequences(&lengths, &pointers).map_err(Error::dataset(&index.path))?;
        // Many sequences of few tokens are a part too.
        next = byte.min(next);
        for (sequence, length) in (first..).zip(lengths.as_chunks::<4>().0) {
            if byte >= next {
                starts.push(Start { sequence, byte, document: header.document_indices });
                next = byte + PART_BYTES;
            }
            // Not negative, and below the length of the file: the walk has checked it.
            byte += u32::from_le_bytes(*length) as u64 * u64::from(header.dtype.bytes());
        }
    }
    if starts.is_empty() && header.document_indices > 1 {
        // Documents without a sequence.
        starts.push(Start { document: header.document_indices, ..Start::default() });
    }
    Ok(starts)
}

/// Checks the documents and notes the first that ends in each part.
fn document_starts(
    index: &Opened,
    header: megatron::Header,
    walk: &mut megatron::Walk,
    starts: &mut [Start],
) -> Result<(), Error> {
    let mut part = 0;
    for (first, count) in entries(0, header.document_indices) {
        let indices = index.range(header.documents_at() + 8 * first, 8 * count)?;
        walk.documents(&indices).map_err(Error::dataset(&index.path))?;
        for (at, value) in (first..).zip(indices.as_chunks::<8>().0) {
            // The walk has checked that it is not negative.
            let end = i64::from_le_bytes(*value) as u64;
            // The first entry is the start of the first document, not an end.
            while at > 0 && starts.get(part).is_some_and(|start| part == 0 || start.sequence < end)
            {
                starts[part].document = at;
                part += 1;
            }
        }
    }
    Ok(())
}

/// Cuts entries `from .. to` into blocks: first entry and number of entries of each.
fn entries(from: u64, to: u64) -> impl Iterator<Item = (u64, u64)> {
    (from..to).step_by(INDEX_BLOCK as usize).map(move |first| (first, INDEX_BLOCK.min(to - first)))
}

/// Checks what user and manifest say about a file that was described.
fn finish(
    data: Opened,
    token_file: TokenFile,
    index: Option<Index>,
    manifest: Option<Manifest>,
    (kind, origin): (Kind, Origin),
    options: &ReadOptions,
) -> Result<Box<dyn Source>, Error> {
    let dtype = token_file.dtype;
    if let Some(given) = options.dtype.filter(|given| *given != dtype) {
        let why = format!("holds {dtype}, not {given}");
        return Err(Error::refused(
            &data.path,
            why,
            "leave --dtype out: the header tells the type",
        ));
    }
    let name = data.path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    let of_file = |refusal: Refusal| no_tokens(&data.path, refusal.into());
    if let Some(manifest) = &manifest {
        settle::agrees(manifest, (&name, data.len), (dtype, token_file.tokens)).map_err(of_file)?;
    }
    if let Some(vocabulary) = options.vocabulary {
        let start = token_file.data_offset;
        let range = start..start + token_file.data_bytes();
        let evidence = settle::sample(&data.file, range, options.vocabulary);
        let evidence = evidence.map_err(Error::read(&data.path))?;
        settle::within_vocabulary(vocabulary, manifest.as_ref(), dtype, &evidence)
            .map_err(of_file)?;
    }
    let documents = match &index {
        Some(index) => Some(index.header.document_indices.saturating_sub(1)),
        None => manifest.as_ref().and_then(|manifest| manifest.documents),
    };
    let weights = match options.weights_beside {
        true => Beside::open(&data.path, token_file.tokens)?,
        false => None,
    };
    let mut paths = vec![data.path.clone()];
    paths.extend(index.as_ref().map(|index| index.file.path.clone()));
    paths.extend(weights.as_ref().map(|weights| weights.path().to_owned()));
    let folder = folder_of(&data.path);
    let files = relative(&folder, &paths);
    let tokens = Some(token_file.tokens);
    let note = match token_file.format {
        Format::Headed { writer } => Some(format!(
            "tokens from byte {} on, behind a header of {writer}",
            token_file.data_offset
        )),
        _ => None,
    };
    let layout = Layout {
        kind,
        loss_weights: weights.is_some(),
        targets: index.is_some() && manifest.as_ref().is_some_and(|found| found.targets),
        unread: None,
        dtype,
        origin,
        tokens,
        documents,
        note,
        run: Some(token_file),
        manifest,
        folder,
        files,
    };
    Ok(Box::new(Contiguous { data, token_file, index, weights, layout }))
}

impl Contiguous {
    fn element(&self) -> u64 {
        u64::from(self.token_file.dtype.bytes())
    }

    /// Passes tokens on that begin at this byte of the run, with their weights.
    fn pass(&self, byte: u64, piece: &[u8], sink: &mut dyn Sink) -> Result<(), Error> {
        if let Some(weights) = &self.weights {
            let tokens = piece.len() / self.element() as usize;
            weights.pass(byte / self.element(), tokens, sink)?;
        }
        sink.tokens(piece)
    }

    /// A part of a file that is one document.
    fn read_run(&self, part: u64, sink: &mut dyn Sink) -> Result<(), Error> {
        let TokenFile { data_offset, .. } = self.token_file;
        let total = self.token_file.data_bytes();
        let (at, end) = (part * PART_BYTES, total.min((part + 1) * PART_BYTES));
        let mut blocks =
            Blocks::new(&self.data.file, &self.data.path, data_offset + at, data_offset + end);
        let mut left = end - at;
        while left > 0 {
            let piece = blocks.next(BLOCK_BYTES)?;
            self.pass(end - left, piece, sink)?;
            left -= piece.len() as u64;
        }
        if end == total { sink.end_document() } else { Ok(()) }
    }

    /// A part of a Megatron dataset: its sequences, and the ends of documents between them.
    fn read_sequences(&self, index: &Index, part: usize, sink: &mut dyn Sink) -> Result<(), Error> {
        let header = index.header;
        let start = index.starts[part];
        let next = index.starts.get(part + 1);
        let last = next.map_or(header.sequences, |next| next.sequence);
        let end_byte = next.map_or(self.data.len, |next| next.byte);
        let mut blocks = Blocks::new(&self.data.file, &self.data.path, start.byte, end_byte);
        let mut ends = Ends::new(index, start.document);
        let mut at = start.byte;
        if part == 0 {
            ends.up_to(0, sink)?;
        }
        for (first, count) in entries(start.sequence, last) {
            let lengths = index.file.range(header.lengths_at() + 4 * first, 4 * count)?;
            for (sequence, length) in (first..).zip(lengths.as_chunks::<4>().0) {
                let mut left = u64::from(u32::from_le_bytes(*length)) * self.element();
                while left > 0 {
                    let piece = blocks.next(left)?;
                    if piece.is_empty() {
                        return Err(Error::corrupt(&index.file.path, "changed while it was read"));
                    }
                    self.pass(at, piece, sink)?;
                    left -= piece.len() as u64;
                    at += piece.len() as u64;
                }
                if !ends.up_to(sequence + 1, sink)? {
                    sink.end_sequence()?;
                }
            }
        }
        Ok(())
    }
}

/// A cursor over the document indices.
struct Ends<'a> {
    index: &'a Index,
    next: u64,
    block: Vec<u8>,
    block_at: u64,
}

impl<'a> Ends<'a> {
    fn new(index: &'a Index, next: u64) -> Ends<'a> {
        Ends { index, next, block: Vec::new(), block_at: next }
    }

    /// Reports every document that ends before this sequence; whether there is one.
    fn up_to(&mut self, sequence: u64, sink: &mut dyn Sink) -> Result<bool, Error> {
        let (header, first) = (self.index.header, self.next);
        while self.next < header.document_indices {
            let at = (self.next - self.block_at) as usize;
            if at * 8 >= self.block.len() {
                let count = INDEX_BLOCK.min(header.document_indices - self.next);
                let offset = header.documents_at() + 8 * self.next;
                self.block = self.index.file.range(offset, 8 * count)?;
                self.block_at = self.next;
                continue;
            }
            let value = self.block.as_chunks::<8>().0[at];
            if u64::from_le_bytes(value) > sequence {
                break;
            }
            self.next += 1;
            sink.end_document()?;
        }
        Ok(self.next > first)
    }
}

impl Source for Contiguous {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn parts(&self) -> u64 {
        match &self.index {
            Some(index) => index.starts.len() as u64,
            None => self.token_file.data_bytes().div_ceil(PART_BYTES),
        }
    }

    fn part_path(&self, _part: u64) -> PathBuf {
        self.data.path.clone()
    }

    fn read(&self, part: u64, sink: &mut dyn Sink) -> Result<(), Error> {
        match &self.index {
            Some(index) => self.read_sequences(index, part as usize, sink),
            None => self.read_run(part, sink),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_covered_once() {
        for to in [0, 1, INDEX_BLOCK - 1, INDEX_BLOCK, INDEX_BLOCK + 1, 5 * INDEX_BLOCK + 7] {
            let mut next = 0;
            for (first, count) in entries(0, to) {
                assert_eq!(first, next);
                assert!(count > 0);
                next += count;
            }
            assert_eq!(next, to);
        }
    }
}
