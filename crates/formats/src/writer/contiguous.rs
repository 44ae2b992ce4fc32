//! Flat, NumPy and Megatron files.

use std::fs::{self, File};
use std::io::{BufReader, Read};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use xio::dataset::{Dtype, megatron, npy};

use super::append::Append;
use super::{Place, Settled, Writer, restore, state};
use crate::error::Error;
use crate::kind::Kind;

/// Bytes before the array of a `.npy`: room for any number of tokens.
const NPY_HEADER: usize = 128;

/// Tokens in a row, behind a header or none.
struct Run {
    file: Append,
    header_bytes: usize,
    dtype: Dtype,
}

pub(super) fn run(
    place: &Place,
    kind: Kind,
    dtype: Dtype,
    saved: Option<Value>,
) -> Result<Box<dyn Writer>, Error> {
    let path = place.file();
    let saved = saved.map(|saved| restore(&path, saved)).transpose()?;
    let header_bytes = if kind == Kind::Npy { NPY_HEADER } else { 0 };
    let mut file = Append::open(&path, saved)?;
    if saved.is_none() {
        file.write(&vec![0; header_bytes])?;
    }
    Ok(Box::new(Run { file, header_bytes, dtype }))
}

impl Writer for Run {
    fn tokens(&mut self, bytes: &[u8]) -> Result<Settled, Error> {
        self.file.write(bytes)?;
        Ok(Settled::All)
    }

    fn end_document(&mut self) -> Result<Settled, Error> {
        Ok(Settled::All)
    }

    fn save(&mut self) -> Result<Value, Error> {
        self.file.save().map(Value::from)
    }

    fn finish(self: Box<Self>) -> Result<(), Error> {
        let data = self.file.len() - self.header_bytes as u64;
        let head = match self.header_bytes {
            0 => Vec::new(),
            _ => npy_header(self.dtype, data / u64::from(self.dtype.bytes())),
        };
        self.file.finish(&head)
    }
}

/// A header of version 1.0 for a vector, as NumPy pads it.
pub fn npy_header(dtype: Dtype, tokens: u64) -> Vec<u8> {
    let descr = dtype.npy();
    let dict = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({tokens},), }}");
    // At most 79 bytes: the number has at most 20 digits.
    let width = NPY_HEADER - 11;
    let text = format!("{dict:width$}\n");
    let mut head = npy::MAGIC.to_vec();
    head.extend([1, 0]);
    head.extend((text.len() as u16).to_le_bytes());
    head.extend(text.as_bytes());
    head
}

/// Longest sequence of an index; longer documents have several.
const MAX_SEQUENCE: u64 = i32::MAX as u64;

/// A Megatron pair. The arrays of the index are collected in scratch files.
struct Megatron {
    place: Place,
    dtype: Dtype,
    code: u8,
    data: Append,
    lengths: Append,
    documents: Append,
    /// Tokens of the document so far that no sequence has.
    tokens: u64,
}

#[derive(Serialize, Deserialize)]
struct MegatronState {
    data: u64,
    lengths: u64,
    documents: u64,
    tokens: u64,
}

pub(super) fn megatron(
    place: &Place,
    dtype: Dtype,
    saved: Option<Value>,
) -> Result<Box<dyn Writer>, Error> {
    let path = place.file();
    let code = dtype.megatron().ok_or_else(|| {
        Error::refused(
            &path,
            format!("a Megatron index has no type {dtype}"),
            "use --to-dtype i32 or --to-dtype u16",
        )
    })?;
    let saved: Option<MegatronState> = saved.map(|saved| restore(&path, saved)).transpose()?;
    let open = |name: &str, len: fn(&MegatronState) -> u64| {
        Append::open(&place.scratch.join(name), saved.as_ref().map(len))
    };
    Ok(Box::new(Megatron {
        place: place.clone(),
        dtype,
        code,
        data: Append::open(&path, saved.as_ref().map(|saved| saved.data))?,
        lengths: open("lengths", |saved| saved.lengths)?,
        documents: open("documents", |saved| saved.documents)?,
        tokens: saved.map_or(0, |saved| saved.tokens),
    }))
}

impl Megatron {
    fn sequence(&mut self, tokens: u64) -> Result<(), Error> {
        self.lengths.write(&(tokens as u32).to_le_bytes())
    }

    fn index(&self) -> Result<(), Error> {
        let path = self.place.file().with_extension("idx");
        let (sequences, documents) = (self.lengths.len() / 4, self.documents.len() / 8);
        let mut index = Append::open(&path, None)?;
        index.write(megatron::MAGIC)?;
        index.write(&1_u64.to_le_bytes())?;
        index.write(&[self.code])?;
        index.write(&sequences.to_le_bytes())?;
        index.write(&(documents + 1).to_le_bytes())?;
        self.each("lengths", |length: [u8; 4]| index.write(&length))?;
        let mut pointer = 0_u64;
        self.each("lengths", |length: [u8; 4]| {
            index.write(&pointer.to_le_bytes())?;
            pointer += u64::from(u32::from_le_bytes(length)) * u64::from(self.dtype.bytes());
            Ok(())
        })?;
        index.write(&0_u64.to_le_bytes())?;
        self.each("documents", |end: [u8; 8]| index.write(&end))?;
        index.finish(&[])
    }

    /// Calls `each` for every entry of a scratch file.
    fn each<const N: usize>(
        &self,
        name: &str,
        mut each: impl FnMut([u8; N]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let path = self.place.scratch.join(name);
        let failed = Error::read(&path);
        let len = fs::metadata(&path).map_err(failed)?.len();
        let mut file = BufReader::with_capacity(1 << 20, File::open(&path).map_err(failed)?);
        for _ in 0..len / N as u64 {
            let mut entry = [0; N];
            file.read_exact(&mut entry).map_err(failed)?;
            each(entry)?;
        }
        Ok(())
    }
}

impl Writer for Megatron {
    fn tokens(&mut self, bytes: &[u8]) -> Result<Settled, Error> {
        self.data.write(bytes)?;
        self.tokens += bytes.len() as u64 / u64::from(self.dtype.bytes());
        while self.tokens > MAX_SEQUENCE {
            self.sequence(MAX_SEQUENCE)?;
            self.tokens -= MAX_SEQUENCE;
        }
        Ok(Settled::All)
    }

    fn end_sequence(&mut self) -> Result<(), Error> {
        let tokens = std::mem::take(&mut self.tokens);
        self.sequence(tokens)
    }

    fn end_document(&mut self) -> Result<Settled, Error> {
        self.end_sequence()?;
        let sequences = self.lengths.len() / 4;
        self.documents.write(&sequences.to_le_bytes())?;
        Ok(Settled::All)
    }

    fn save(&mut self) -> Result<Value, Error> {
        let saved = MegatronState {
            data: self.data.save()?,
            lengths: self.lengths.save()?,
            documents: self.documents.save()?,
            tokens: self.tokens,
        };
        state(&self.place.scratch, &saved)
    }

    fn finish(mut self: Box<Self>) -> Result<(), Error> {
        if self.tokens > 0 {
            self.end_document()?;
        }
        self.lengths.save()?;
        self.documents.save()?;
        self.index()?;
        self.data.finish(&[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_as_numpy_writes_them() {
        for tokens in [0, 7, u64::MAX / 16] {
            let head = npy_header(Dtype::U64, tokens);
            assert_eq!(head.len(), NPY_HEADER);
            let found = npy::parse(&head, 128 + tokens * 8).expect("a header");
            assert_eq!((found.dtype, found.tokens, found.data_offset), (Dtype::U64, tokens, 128));
        }
    }
}
