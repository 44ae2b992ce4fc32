//! Parquet files, and Arrow streams as Hugging Face datasets keeps them: one column of lists.
//!
//! Both end with what a reader needs to begin, so a file is complete or worthless: a folder of
//! files is continued at a file, a single file is begun anew.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use arrow_array::types::{
    Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{ArrayRef, ArrowPrimitiveType, ListArray, PrimitiveArray, RecordBatch};
use arrow_buffer::{OffsetBuffer, ScalarBuffer};
use arrow_ipc::writer::StreamWriter;
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use parquet::arrow::ArrowWriter;
use parquet::basic::Compression;
use parquet::file::properties::WriterProperties;
use serde_json::Value;
use xio::dataset::Dtype;

use super::{MAX_DOCUMENT_BYTES, Place, Settled, WriteOptions, Writer, restore, too_long};
use crate::error::Error;
use crate::kind::Kind;

/// Tokens of a batch, in bytes.
const BATCH_BYTES: usize = 8 << 20;

/// Batches of a row group.
const GROUP_BATCHES: u32 = 8;

enum Table {
    Parquet(Box<ArrowWriter<File>>),
    Arrow(Box<StreamWriter<std::io::BufWriter<File>>>),
}

struct Columns {
    place: Place,
    kind: Kind,
    dtype: Dtype,
    file_bytes: u64,
    schema: SchemaRef,
    /// Files that are complete.
    files: u64,
    /// The file that is written, its bytes of tokens, and its batches since the last row group.
    open: Option<(Table, u64, u32)>,
    values: Vec<u8>,
    ends: Vec<i32>,
    /// Values of the documents that have ended.
    ended: usize,
}

pub(super) fn create(
    place: Place,
    options: &WriteOptions,
    dtype: Dtype,
    saved: Option<Value>,
) -> Result<Box<dyn Writer>, Error> {
    let files = saved.map_or(Ok(0), |saved| restore(&place.folder, saved))?;
    let element = match dtype {
        Dtype::U8 => DataType::UInt8,
        Dtype::I8 => DataType::Int8,
        Dtype::U16 | Dtype::F16 | Dtype::Bf16 => DataType::UInt16,
        Dtype::I16 => DataType::Int16,
        Dtype::U32 | Dtype::F32 => DataType::UInt32,
        Dtype::I32 => DataType::Int32,
        Dtype::U64 => DataType::UInt64,
        Dtype::I64 => DataType::Int64,
    };
    let name = options.column.clone().unwrap_or_else(|| "tokens".into());
    let list = DataType::List(Arc::new(Field::new_list_field(element, false)));
    let schema = Arc::new(Schema::new(vec![Field::new(name, list, false)]));
    Ok(Box::new(Columns {
        place,
        kind: options.kind,
        dtype,
        file_bytes: options.shard_bytes,
        schema,
        files,
        open: None,
        values: Vec::new(),
        ends: Vec::new(),
        ended: 0,
    }))
}

impl Columns {
    fn path(&self) -> PathBuf {
        match &self.place.file {
            Some(_) => self.place.file(),
            None => self.place.folder.join(format!("part-{:05}.{}", self.files, self.kind)),
        }
    }

    fn failed(&self) -> impl Fn(&dyn std::fmt::Display) -> Error + use<> {
        let path = self.path();
        move |error| {
            // The decoders wrap errors of the disk in text of their own; the kind is lost, the
            // words are not.
            let full = error.to_string().contains("No space left on device");
            let kind =
                if full { std::io::ErrorKind::StorageFull } else { std::io::ErrorKind::Other };
            Error::write(&path)(std::io::Error::new(kind, error.to_string()))
        }
    }

    fn begin(&mut self) -> Result<(), Error> {
        if self.open.is_some() {
            return Ok(());
        }
        let (path, failed) = (self.path(), self.failed());
        let file = File::create(&path).map_err(Error::write(&path))?;
        let table = match self.kind {
            Kind::Parquet => {
                let properties =
                    WriterProperties::builder().set_compression(Compression::SNAPPY).build();
                let writer = ArrowWriter::try_new(file, self.schema.clone(), Some(properties));
                Table::Parquet(Box::new(writer.map_err(|error| failed(&error))?))
            }
            _ => {
                let writer = StreamWriter::try_new_buffered(file, &self.schema);
                Table::Arrow(Box::new(writer.map_err(|error| failed(&error))?))
            }
        };
        self.open = Some((table, 0, 0));
        Ok(())
    }

    /// Writes the documents that have ended.
    fn batch(&mut self) -> Result<(), Error> {
        self.begin()?;
        let failed = self.failed();
        let rest = self.values.split_off(self.ended);
        let values = std::mem::replace(&mut self.values, rest);
        self.ended = 0;
        let offsets = [0].into_iter().chain(std::mem::take(&mut self.ends));
        let offsets = OffsetBuffer::new(offsets.collect::<Vec<i32>>().into());
        let bytes = values.len() as u64;
        let DataType::List(element) = self.schema.field(0).data_type() else {
            return Err(failed(&"its schema is no list"));
        };
        let lists = ListArray::try_new(element.clone(), offsets, array(self.dtype, &values), None);
        let lists = lists.map_err(|error| failed(&error))?;
        let batch = RecordBatch::try_new(self.schema.clone(), vec![Arc::new(lists)]);
        let batch = batch.map_err(|error| failed(&error))?;
        let Some((table, written, batches)) = &mut self.open else {
            return Ok(());
        };
        (*written, *batches) = (*written + bytes, *batches + 1);
        match table {
            Table::Parquet(writer) => {
                writer.write(&batch).map_err(|error| failed(&error))?;
                if *batches >= GROUP_BATCHES {
                    *batches = 0;
                    writer.flush().map_err(|error| failed(&error))?;
                }
            }
            Table::Arrow(writer) => writer.write(&batch).map_err(|error| failed(&error))?,
        }
        Ok(())
    }

    /// Completes the file.
    fn close(&mut self) -> Result<(), Error> {
        if !self.ends.is_empty() {
            self.batch()?;
        }
        let failed = self.failed();
        let file = match self.open.take() {
            None => return Ok(()),
            Some((Table::Parquet(writer), ..)) => {
                writer.into_inner().map_err(|error| failed(&error))?
            }
            Some((Table::Arrow(writer), ..)) => {
                let buffered = writer.into_inner().map_err(|error| failed(&error))?;
                buffered.into_inner().map_err(|error| failed(&error))?
            }
        };
        file.sync_all().map_err(Error::write(&self.path()))?;
        self.files += 1;
        Ok(())
    }
}

/// Tokens as an array.
fn array(dtype: Dtype, bytes: &[u8]) -> ArrayRef {
    fn of<T: ArrowPrimitiveType, const N: usize>(
        bytes: &[u8],
        value: impl Fn([u8; N]) -> T::Native,
    ) -> ArrayRef {
        let values: Vec<T::Native> =
            bytes.as_chunks::<N>().0.iter().map(|bytes| value(*bytes)).collect();
        Arc::new(PrimitiveArray::<T>::new(ScalarBuffer::from(values), None))
    }
    match dtype {
        Dtype::U8 => of::<UInt8Type, 1>(bytes, u8::from_le_bytes),
        Dtype::I8 => of::<Int8Type, 1>(bytes, i8::from_le_bytes),
        Dtype::U16 | Dtype::F16 | Dtype::Bf16 => of::<UInt16Type, 2>(bytes, u16::from_le_bytes),
        Dtype::I16 => of::<Int16Type, 2>(bytes, i16::from_le_bytes),
        Dtype::U32 | Dtype::F32 => of::<UInt32Type, 4>(bytes, u32::from_le_bytes),
        Dtype::I32 => of::<Int32Type, 4>(bytes, i32::from_le_bytes),
        Dtype::U64 => of::<UInt64Type, 8>(bytes, u64::from_le_bytes),
        Dtype::I64 => of::<Int64Type, 8>(bytes, i64::from_le_bytes),
    }
}

impl Writer for Columns {
    fn tokens(&mut self, bytes: &[u8]) -> Result<Settled, Error> {
        if self.values.len() - self.ended + bytes.len() > MAX_DOCUMENT_BYTES {
            return Err(too_long(&self.place.folder));
        }
        self.values.extend_from_slice(bytes);
        Ok(Settled::Same)
    }

    fn end_document(&mut self) -> Result<Settled, Error> {
        self.ended = self.values.len();
        // At most a batch and a document: far below 2^31.
        self.ends.push((self.ended / self.dtype.bytes() as usize) as i32);
        let waiting = self.ended as u64;
        let written = self.open.as_ref().map_or(0, |(_, written, _)| *written);
        if self.place.file.is_none() && written + waiting >= self.file_bytes {
            self.close()?;
            return Ok(Settled::All);
        }
        if self.ended >= BATCH_BYTES || self.ends.len() >= BATCH_BYTES {
            self.batch()?;
        }
        Ok(Settled::Same)
    }

    fn save(&mut self) -> Result<Value, Error> {
        Ok(self.files.into())
    }

    fn finish(mut self: Box<Self>) -> Result<(), Error> {
        if self.place.file.is_some() {
            self.begin()?;
        }
        self.close()
    }
}
