//! Parquet and Arrow: a column of lists of integers, one list per document.
//!
//! Parts are row groups of Parquet and record batches of Arrow. An Arrow file is read as the stream
//! that it contains; the lengths of its messages are checked against the file before anything is
//! allocated. The decoders are those of the Arrow project; what they refuse is an error that names
//! the file.

mod targets;
mod weights;

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_buffer::Buffer;
use arrow_ipc::{MessageHeader, convert, reader, root_as_message};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use bytes::Bytes;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ParquetRecordBatchReaderBuilder};
use parquet::file::reader::{ChunkReader, Length};
use xio::dataset::Dtype;

use self::targets::{Rows, Targets};
use self::weights::{Weighted, Weights};
use super::turns::{self, Form, Told};
use super::weights as loss_weights;
use super::{BLOCK_BYTES, Layout, ReadOptions, Sink, Source, folder_of, relative, unread};
use crate::error::Error;
use crate::kind::Kind;
use crate::settle::Origin;

/// Largest record batch of Arrow, and largest message before one.
const MAX_BATCH_BYTES: u64 = 1 << 30;

/// Rows of Parquet that are decoded at once hold about this many bytes.
const DECODE_BYTES: u64 = 8 * BLOCK_BYTES;

/// The magic bytes of an Arrow file, at both ends.
const ARROW_MAGIC: &[u8; 6] = b"ARROW1";

/// A record batch in an Arrow file.
struct Batch {
    meta_at: u64,
    meta_bytes: u64,
    body_bytes: u64,
    rows: i64,
}

/// One file of the dataset.
enum Table {
    Parquet(ArrowReaderMetadata),
    Arrow(SchemaRef, Vec<Batch>),
}

impl Table {
    fn schema(&self) -> &Schema {
        match self {
            Table::Parquet(metadata) => metadata.schema(),
            Table::Arrow(schema, _) => schema,
        }
    }

    /// Rows of every part.
    fn rows(&self) -> Vec<u64> {
        let rows = |count| u64::try_from(count).unwrap_or(0);
        match self {
            Table::Parquet(metadata) => {
                let groups = metadata.metadata().row_groups().iter();
                groups.map(|group| rows(group.num_rows())).collect()
            }
            Table::Arrow(_, batches) => batches.iter().map(|batch| rows(batch.rows)).collect(),
        }
    }
}

/// A row group or record batch.
#[derive(Clone, Copy)]
struct Part {
    file: usize,
    number: usize,
    /// Number of its first row in the file.
    first_row: u64,
}

struct Columns {
    files: Vec<(PathBuf, Arc<File>, Table)>,
    parts: Vec<Part>,
    column: usize,
    targets: Option<Targets>,
    weights: Option<Weights>,
    layout: Layout,
}

pub(super) fn open(
    path: &Path,
    paths: Vec<PathBuf>,
    kind: Kind,
    options: &ReadOptions,
) -> Result<Box<dyn Source>, Error> {
    let mut files = Vec::with_capacity(paths.len());
    let (mut parts, mut documents) = (Vec::new(), 0_u64);
    for (number, path) in paths.iter().enumerate() {
        let file = Arc::new(File::open(path).map_err(Error::read(path))?);
        let table = match kind {
            Kind::Parquet => parquet_table(path, &file)?,
            _ => arrow_table(path, &file)?,
        };
        let mut first_row = 0_u64;
        for (part, rows) in table.rows().into_iter().enumerate() {
            parts.push(Part { file: number, number: part, first_row });
            first_row = first_row.saturating_add(rows);
        }
        if let Table::Parquet(metadata) = &table {
            let rows = metadata.metadata().file_metadata().num_rows();
            documents = documents.saturating_add(u64::try_from(rows).unwrap_or(0));
        }
        files.push((path.clone(), file, table));
    }
    let (first_path, _, first) =
        files.first().ok_or_else(|| Error::corrupt(path, "holds no file"))?;
    let find = |name: &String| Targets::find(first_path, first.schema(), name);
    let targets = options.targets.as_ref().map(find).transpose()?;
    let find = |name: &String| Weights::find(first_path, first.schema(), name);
    let weights = options.loss_weights.as_ref().map(find).transpose()?;
    let (column, dtype) = column(first_path, first.schema(), options)?;
    check_columns(first_path, column, targets.as_ref(), weights.as_ref())?;
    for (path, _, table) in &files {
        let differs =
            |column| table.schema().fields().get(column) != first.schema().fields().get(column);
        let beside = targets.iter().map(|found| found.column);
        let mut beside = beside.chain(weights.iter().map(|found| found.column));
        if differs(column) || beside.any(differs) {
            let why = "its columns are not those of the first file";
            return Err(Error::refused(path, why, "convert it separately"));
        }
    }
    let mut note = format!("column {}", first.schema().field(column).name());
    if let Some(Targets { name, .. }) = &targets {
        note += &format!(", targets by {name}");
    }
    if let Some(Weights { name, .. }) = &weights {
        note += &format!(", loss weights by {name}");
    }
    let names: Vec<&str> =
        first.schema().fields().iter().map(|field| field.name().as_str()).collect();
    let unread = unread(&names, names.get(column).copied(), options);
    let folder = if path.is_dir() { path.to_owned() } else { folder_of(path) };
    let layout = Layout {
        kind,
        dtype,
        origin: Origin::File,
        tokens: None,
        documents: (kind == Kind::Parquet).then_some(documents),
        targets: targets.is_some(),
        loss_weights: weights.is_some(),
        unread,
        note: Some(note),
        run: None,
        manifest: options.manifest(path)?,
        files: relative(&folder, &paths),
        folder,
    };
    let mut columns = Columns { files, parts, column, targets, weights, layout };
    columns.find_form()?;
    Ok(Box::new(columns))
}

/// Whether what is read comes from columns of its own.
fn check_columns(
    path: &Path,
    column: usize,
    targets: Option<&Targets>,
    weights: Option<&Weights>,
) -> Result<(), Error> {
    let Some(Weights { column: of_weights, name }) = weights else {
        return Ok(());
    };
    if *of_weights != column && targets.is_none_or(|targets| targets.column != *of_weights) {
        return Ok(());
    }
    let why = format!("column {name:?} cannot hold loss weights and something else");
    Err(Error::refused(path, why, loss_weights::HINT))
}

fn decoding(path: &Path) -> impl Fn(&dyn std::fmt::Display) -> Error + Copy + '_ {
    |error| Error::corrupt(path, format!("cannot be decoded: {error}"))
}

/// A file that several threads read: a reader of a copied descriptor would move the offset of all.
struct Positioned {
    file: Arc<File>,
    len: u64,
}

impl Length for Positioned {
    fn len(&self) -> u64 {
        self.len
    }
}

impl ChunkReader for Positioned {
    type T = BufReader<From>;

    fn get_read(&self, start: u64) -> parquet::errors::Result<BufReader<From>> {
        Ok(BufReader::new(From { file: self.file.clone(), at: start }))
    }

    fn get_bytes(&self, start: u64, length: usize) -> parquet::errors::Result<Bytes> {
        if start.checked_add(length as u64).is_none_or(|end| end > self.len) {
            return Err(parquet::errors::ParquetError::EOF(format!("{length} bytes at {start}")));
        }
        let mut buffer = vec![0; length];
        self.file.read_exact_at(&mut buffer, start)?;
        Ok(buffer.into())
    }
}

/// Reads from an offset on.
struct From {
    file: Arc<File>,
    at: u64,
}

impl Read for From {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(buffer, self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

fn positioned(path: &Path, file: &Arc<File>) -> Result<Positioned, Error> {
    let len = file.metadata().map_err(Error::read(path))?.len();
    Ok(Positioned { file: file.clone(), len })
}

fn parquet_table(path: &Path, file: &Arc<File>) -> Result<Table, Error> {
    let file = positioned(path, file)?;
    let load = || ArrowReaderMetadata::load(&file, Default::default());
    guarded(path, load)?.map(Table::Parquet).map_err(|error| decoding(path)(&error))
}

/// Calls a decoder, which may panic on a damaged file.
fn guarded<T>(path: &Path, decode: impl FnOnce() -> T) -> Result<T, Error> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(decode))
        .map_err(|_| Error::corrupt(path, "its decoder gave up on it: the file is damaged"))
}

/// Finds schema and record batches of an Arrow file or stream.
fn arrow_table(path: &Path, file: &File) -> Result<Table, Error> {
    let corrupt = |why: &str| Error::corrupt(path, why);
    let len = file.metadata().map_err(Error::read(path))?.len();
    let range = |at: u64, bytes: u64| -> Result<Vec<u8>, Error> {
        if at.checked_add(bytes).is_none_or(|end| end > len) || bytes > MAX_BATCH_BYTES {
            return Err(corrupt("ends early, or has a message of more than 1 GiB"));
        }
        let mut buffer = vec![0; bytes as usize];
        file.read_exact_at(&mut buffer, at).map_err(Error::read(path))?;
        Ok(buffer)
    };
    let is_file = range(0, 6)? == ARROW_MAGIC;
    if is_file && range(len.saturating_sub(6), 6)? != ARROW_MAGIC {
        return Err(corrupt("ends early: its last bytes are not those of an Arrow file"));
    }
    let mut at = if is_file { 8 } else { 0 };
    // The writer of Arrow's Rust library pads the magic bytes further.
    while is_file && at < 64 && range(at, 8)? == [0; 8] {
        at += 8;
    }
    let (mut schema, mut batches) = (None, Vec::new());
    loop {
        let mut bytes = u32_at(&range(at, 4)?);
        at += 4;
        if bytes == u32::MAX {
            bytes = u32_at(&range(at, 4)?);
            at += 4;
        }
        if bytes == 0 {
            break;
        }
        let meta = range(at, bytes.into())?;
        let message = root_as_message(&meta).map_err(|error| decoding(path)(&error))?;
        let body = u64::try_from(message.bodyLength())
            .map_err(|_| corrupt("has a message of negative length"))?;
        match message.header_type() {
            MessageHeader::Schema => {
                let found = message.header_as_schema().ok_or_else(|| corrupt("has no schema"))?;
                schema = Some(Arc::new(guarded(path, || convert::fb_to_schema(found))?));
            }
            MessageHeader::RecordBatch => {
                let rows = message.header_as_record_batch().map_or(0, |batch| batch.length());
                let meta_bytes = bytes.into();
                batches.push(Batch { meta_at: at, meta_bytes, body_bytes: body, rows });
            }
            _ => {}
        }
        at = at
            .checked_add(u64::from(bytes))
            .and_then(|at| at.checked_add(body))
            .unwrap_or(u64::MAX);
        if at > len {
            return Err(corrupt("ends in the middle of a batch"));
        }
    }
    let schema = schema.ok_or_else(|| corrupt("has no schema"))?;
    Ok(Table::Arrow(schema, batches))
}

fn u32_at(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

/// The column of this name, and where it is.
fn column_of<'a>(path: &Path, schema: &'a Schema, name: &str) -> Result<(usize, &'a Field), Error> {
    schema.column_with_name(name).ok_or_else(|| {
        let shown: Vec<&str> = schema.fields().iter().map(|f| f.name().as_str()).collect();
        let hint = format!("its columns are {}", shown.join(", "));
        Error::refused(path, format!("has no column {name:?}"), hint)
    })
}

/// The type of the elements, if the column holds lists of integers.
fn list_type(column: &DataType) -> Option<Dtype> {
    let (DataType::List(element)
    | DataType::LargeList(element)
    | DataType::FixedSizeList(element, _)) = column
    else {
        return None;
    };
    Some(match element.data_type() {
        DataType::UInt8 => Dtype::U8,
        DataType::Int8 => Dtype::I8,
        DataType::UInt16 => Dtype::U16,
        DataType::Int16 => Dtype::I16,
        DataType::UInt32 => Dtype::U32,
        DataType::Int32 => Dtype::I32,
        DataType::UInt64 => Dtype::U64,
        DataType::Int64 => Dtype::I64,
        _ => return None,
    })
}

/// Chooses the column with the tokens.
fn column(path: &Path, schema: &Schema, options: &ReadOptions) -> Result<(usize, Dtype), Error> {
    let fields = schema.fields().iter().enumerate();
    let mut lists: Vec<(usize, &str, Dtype)> = fields
        .filter_map(|(at, field)| Some((at, field.name().as_str(), list_type(field.data_type())?)))
        .collect();
    let beside = [options.targets.as_deref(), options.loss_weights.as_deref()];
    lists.retain(|(_, name, _)| !beside.contains(&Some(*name)));
    let shown: Vec<String> = schema.fields().iter().map(|field| field.name().clone()).collect();
    if let Some(wanted) = &options.column {
        lists.retain(|(_, name, _)| name == wanted);
    } else if lists.len() > 1 {
        lists.retain(|(_, name, _)| super::TOKEN_COLUMNS.contains(name));
    }
    let [(at, _, dtype)] = lists[..] else {
        let why = format!("{} of its columns hold lists of integers and may be meant", lists.len());
        let hint = format!("name one with --column: {}", shown.join(", "));
        return Err(Error::refused(path, why, hint));
    };
    match options.dtype.filter(|given| *given != dtype) {
        None => Ok((at, dtype)),
        Some(given) => {
            let why = format!("holds {dtype}, not {given}");
            Err(Error::refused(path, why, "leave --dtype out: the schema tells the type"))
        }
    }
}

/// The lists of a column.
struct Lists<'a> {
    column: &'a ArrayRef,
    values: &'a ArrayRef,
    /// Where a list begins among the values, or ends: there the next one begins.
    start: Box<dyn Fn(usize) -> usize + 'a>,
}

impl<'a> Lists<'a> {
    fn new(column: &'a ArrayRef) -> Lists<'a> {
        let (values, start): (&ArrayRef, Box<dyn Fn(usize) -> usize>) = match column.data_type() {
            DataType::List(_) => {
                let lists = column.as_list::<i32>();
                (lists.values(), Box::new(|row| lists.value_offsets()[row] as usize))
            }
            DataType::LargeList(_) => {
                let lists = column.as_list::<i64>();
                (lists.values(), Box::new(|row| lists.value_offsets()[row] as usize))
            }
            _ => {
                let lists = column.as_fixed_size_list();
                let width = lists.value_length() as usize;
                (lists.values(), Box::new(move |row| row * width))
            }
        };
        Lists { column, values, start }
    }

    /// The values of a row; `first` is the number of row 0 in the file.
    fn row(&self, path: &Path, first: u64, row: usize) -> Result<Range<usize>, Error> {
        let range = (self.start)(row)..(self.start)(row + 1);
        if range.start > range.end || range.end > self.values.len() {
            return Err(Error::corrupt(path, "has a list beyond its values"));
        }
        let has_null = self.values.null_count() > 0
            && range.clone().any(|at| self.values.is_null(at))
            || self.column.is_null(row);
        if has_null {
            let row = first + row as u64;
            let why = format!("row {row}: a list or a value in it is missing (null)");
            return Err(Error::refused(path, why, "fill or drop such rows first"));
        }
        Ok(range)
    }

    /// Passes the lists on, each a document.
    fn pass(
        &self,
        path: &Path,
        first: u64,
        weights: Option<&Weighted<'_>>,
        sink: &mut dyn Sink,
    ) -> Result<(), Error> {
        let (bytes, width) = raw_values(self.values)
            .ok_or_else(|| Error::corrupt(path, "has another type than its schema"))?;
        for row in 0..self.column.len() {
            let range = self.row(path, first, row)?;
            let weights = weights.map(|all| all.row(row, range.len())).transpose()?;
            let row = bytes.get(range.start * width..range.end * width).unwrap_or_default();
            loss_weights::pass(sink, row, width, weights.as_deref())?;
            sink.end_document()?;
        }
        Ok(())
    }
}

/// The bytes of an array of integers, and those of one value.
fn raw_values(array: &ArrayRef) -> Option<(&[u8], usize)> {
    macro_rules! raw {
        ($type:ty, $bytes:expr) => {
            // An aligned view of the values of this array alone: `values` has cut offset and
            // length.
            (array.as_primitive_opt::<$type>()?.values().inner().as_slice(), $bytes)
        };
    }
    Some(match array.data_type() {
        DataType::UInt8 => raw!(UInt8Type, 1),
        DataType::Int8 => raw!(Int8Type, 1),
        DataType::UInt16 => raw!(UInt16Type, 2),
        DataType::Int16 => raw!(Int16Type, 2),
        DataType::UInt32 => raw!(UInt32Type, 4),
        DataType::Int32 => raw!(Int32Type, 4),
        DataType::UInt64 => raw!(UInt64Type, 8),
        DataType::Int64 => raw!(Int64Type, 8),
        _ => return None,
    })
}

/// Receives rows and the number of the first in its file; whether more are wanted.
type Each<'a> = &'a mut dyn FnMut(&Path, u64, &RecordBatch) -> Result<bool, Error>;

impl Columns {
    /// The columns that are read, in the order of the schema.
    fn projection(&self) -> Vec<usize> {
        let mut columns = vec![self.column];
        columns.extend(self.targets.as_ref().map(|targets| targets.column));
        columns.extend(self.weights.as_ref().map(|weights| weights.column));
        columns.sort_unstable();
        columns
    }

    /// Finds out what the column of targets holds, from the first row that tells.
    fn find_form(&mut self) -> Result<(), Error> {
        if self.targets.is_none() {
            return Ok(());
        }
        let (mut found, mut unclear) = (None, None);
        for part in 0..self.parts() {
            self.each_batch(part, &mut |path, first, batch| {
                let Some(rows) = self.rows(path, first, batch)? else { return Ok(false) };
                match rows.told() {
                    _ if rows.are_booleans() => found = Some(Form::Mask),
                    Told::Form(form) => found = Some(form),
                    Told::Both => unclear = Some(path.to_owned()),
                    Told::Nothing => {}
                }
                Ok(found.is_none())
            })?;
            if found.is_some() {
                break;
            }
        }
        if let (None, Some(path), Some(targets)) = (found, unclear, &self.targets) {
            return Err(turns::is_unclear(&path, &targets.name));
        }
        if let Some(targets) = &mut self.targets {
            targets.form = found.unwrap_or(Form::Mask);
        }
        Ok(())
    }

    /// Both columns of a batch, where there is one of targets.
    fn rows<'a>(
        &'a self,
        path: &'a Path,
        first: u64,
        batch: &'a RecordBatch,
    ) -> Result<Option<Rows<'a>>, Error> {
        let Some(targets) = &self.targets else { return Ok(None) };
        let columns = [self.column, targets.column].map(|column| self.of(batch, column));
        Rows::new(path, targets, first, columns).map(Some)
    }

    /// The loss weights of a batch, where they are read.
    fn weighted<'a>(
        &'a self,
        path: &'a Path,
        first: u64,
        batch: &'a RecordBatch,
    ) -> Result<Option<Weighted<'a>>, Error> {
        let Some(weights) = &self.weights else { return Ok(None) };
        Weighted::new(path, weights, first, self.of(batch, weights.column)).map(Some)
    }

    /// A column of the schema, which is read, in what was decoded.
    fn of<'a>(&self, batch: &'a RecordBatch, column: usize) -> &'a ArrayRef {
        batch.column(self.projection().iter().filter(|read| **read < column).count())
    }

    /// Decodes the columns of a part that are read.
    fn each_batch(&self, part: u64, each: Each<'_>) -> Result<(), Error> {
        let Part { file, number, first_row } = self.parts[part as usize];
        match &self.files[file] {
            (path, file, Table::Parquet(metadata)) => {
                self.row_group((path, file, metadata), (number, first_row), each)
            }
            (path, file, Table::Arrow(schema, batches)) => {
                self.record_batch((path, file, schema), (&batches[number], first_row), each)
            }
        }
    }

    fn row_group(
        &self,
        (path, file, metadata): (&Path, &Arc<File>, &ArrowReaderMetadata),
        (group, mut first): (usize, u64),
        each: Each<'_>,
    ) -> Result<(), Error> {
        let failed = decoding(path);
        let described = metadata.metadata().row_group(group);
        let bytes = u64::try_from(described.total_byte_size()).unwrap_or(0).max(1);
        let rows = u64::try_from(described.num_rows()).unwrap_or(0);
        let batch =
            (u128::from(rows) * u128::from(DECODE_BYTES) / u128::from(bytes)).clamp(1, 8192);
        let file = positioned(path, file)?;
        let columns = ProjectionMask::roots(metadata.parquet_schema(), self.projection());
        let reader = ParquetRecordBatchReaderBuilder::new_with_metadata(file, metadata.clone())
            .with_row_groups(vec![group])
            .with_projection(columns)
            .with_batch_size(batch as usize)
            .build();
        let mut reader = reader.map_err(|error| failed(&error))?;
        while let Some(batch) = guarded(path, || reader.next())? {
            let batch: RecordBatch = batch.map_err(|error| failed(&error))?;
            if !each(path, first, &batch)? {
                break;
            }
            first += batch.num_rows() as u64;
        }
        Ok(())
    }

    fn record_batch(
        &self,
        (path, file, schema): (&Path, &File, &SchemaRef),
        (batch, first): (&Batch, u64),
        each: Each<'_>,
    ) -> Result<(), Error> {
        let bytes = batch.meta_bytes + batch.body_bytes;
        if bytes > MAX_BATCH_BYTES {
            let why = format!("has a batch of {bytes} bytes; at most {MAX_BATCH_BYTES} are read");
            return Err(Error::refused(path, why, "write it in smaller batches, or as Parquet"));
        }
        let mut buffer = vec![0; bytes as usize];
        file.read_exact_at(&mut buffer, batch.meta_at).map_err(Error::read(path))?;
        let body = Buffer::from(&buffer[batch.meta_bytes as usize..]);
        let message = root_as_message(&buffer[..batch.meta_bytes as usize]);
        let message = message.map_err(|error| decoding(path)(&error))?;
        let header = message.header_as_record_batch();
        let header = header.ok_or_else(|| Error::corrupt(path, "changed while it was read"))?;
        let (none, only) = (std::collections::HashMap::new(), self.projection());
        let decode = || {
            let version = message.version();
            reader::read_record_batch(&body, header, schema.clone(), &none, Some(&only), &version)
        };
        let batch = guarded(path, decode)?.map_err(|error| decoding(path)(&error))?;
        each(path, first, &batch).map(|_| ())
    }
}

impl Source for Columns {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn parts(&self) -> u64 {
        self.parts.len() as u64
    }

    fn part_path(&self, part: u64) -> PathBuf {
        self.files[self.parts[part as usize].file].0.clone()
    }

    fn read(&self, part: u64, sink: &mut dyn Sink) -> Result<(), Error> {
        self.each_batch(part, &mut |path, first, batch| {
            let weights = self.weighted(path, first, batch)?;
            match self.rows(path, first, batch)? {
                Some(rows) => rows.pass(weights.as_ref(), sink)?,
                None => {
                    let lists = Lists::new(self.of(batch, self.column));
                    lists.pass(path, first, weights.as_ref(), sink)?;
                }
            }
            Ok(true)
        })
    }
}
