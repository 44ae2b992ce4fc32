//! A text column of a Parquet file.
//!
//! Rows are read a page at a time, one row group after the other, and their texts are slices of the
//! page. The format needs to be entered at its end, so standard input and compressed files are
//! first copied to an unnamed file beside the output.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::Path;

use parquet::basic::Type;
use parquet::column::reader::ColumnReader;
use parquet::data_type::ByteArray;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::schema::types::SchemaDescriptor;

use super::TokenizeError;
use super::guard::guarded;
use super::input::{self, BytesRead};
use super::sources::Source;

/// Rows decoded at once.
const ROWS: usize = 256;

/// The text column of an open file.
pub(super) struct TextColumn<'a> {
    source: &'a Source,
    file: SerializedFileReader<File>,
    column: usize,
    /// The definition level of a row that has a text.
    present: i16,
    next_group: usize,
    group: Option<ColumnReader>,
    /// Rows to pass over.
    skip: u64,
    bytes_read: BytesRead,
    /// Bytes of the input that stand for one row group, for the progress.
    bytes_per_group: u64,
}

impl<'a> TextColumn<'a> {
    /// Opens the column `field` at row `skip`.
    ///
    /// # Errors
    /// When the file is no Parquet file, or the column is missing or holds no text.
    pub(super) fn open(
        source: &'a Source,
        field: &str,
        skip: u64,
        spool: &Path,
        bytes_read: &BytesRead,
    ) -> Result<TextColumn<'a>, TokenizeError> {
        let (file, seekable) = seekable(source, spool, bytes_read)?;
        let file = checked(source, || SerializedFileReader::new(file))?;
        let metadata = file.metadata().file_metadata();
        let column = find(metadata.schema_descr(), field).map_err(|reason| {
            TokenizeError::Column { path: source.path.clone(), column: field.to_owned(), reason }
        })?;
        let groups = file.num_row_groups().max(1) as u64;
        let bytes = if seekable { source.bytes.unwrap_or(0) } else { 0 };
        Ok(TextColumn {
            source,
            present: metadata.schema_descr().column(column).max_def_level(),
            file,
            column,
            next_group: 0,
            group: None,
            skip,
            bytes_read: bytes_read.clone(),
            bytes_per_group: bytes / groups,
        })
    }

    /// The texts of the next rows, `None` where a row is null; none at the end of the file.
    ///
    /// # Errors
    /// When the file is damaged.
    pub(super) fn next_rows(&mut self) -> Result<Vec<Option<ByteArray>>, TokenizeError> {
        loop {
            let source = self.source;
            if self.group.is_none() && !checked(source, || self.next_group())? {
                return Ok(Vec::new());
            }
            let rows = checked(source, || self.rows())?;
            if !rows.is_empty() {
                return Ok(rows);
            }
            self.group = None;
            self.bytes_read.add(self.bytes_per_group);
        }
    }

    /// Opens the next row group; false at the end.
    fn next_group(&mut self) -> Result<bool, ParquetError> {
        while self.next_group < self.file.num_row_groups() {
            let group = self.file.get_row_group(self.next_group)?;
            self.next_group += 1;
            let rows = u64::try_from(group.metadata().num_rows()).unwrap_or(0);
            if self.skip >= rows {
                self.skip -= rows;
                self.bytes_read.add(self.bytes_per_group);
                continue;
            }
            let mut column = group.get_column_reader(self.column)?;
            if let ColumnReader::ByteArrayColumnReader(column) = &mut column {
                column.skip_records(self.skip as usize)?;
            }
            self.skip = 0;
            self.group = Some(column);
            return Ok(true);
        }
        Ok(false)
    }

    fn rows(&mut self) -> Result<Vec<Option<ByteArray>>, ParquetError> {
        // `find` has checked the type of the column.
        let Some(ColumnReader::ByteArrayColumnReader(column)) = &mut self.group else {
            return Ok(Vec::new());
        };
        let (mut levels, mut values) = (Vec::new(), Vec::new());
        let (rows, _, _) = column.read_records(ROWS, Some(&mut levels), None, &mut values)?;
        let mut values = values.into_iter();
        let is_null = |row| self.present > 0 && levels.get(row) != Some(&self.present);
        Ok((0..rows).map(|row| if is_null(row) { None } else { values.next() }).collect())
    }
}

/// The column of this name that holds one text per row.
fn find(schema: &SchemaDescriptor, field: &str) -> Result<usize, String> {
    let columns = schema.columns();
    let column = columns.iter().position(|column| column.path().string() == field);
    let Some(column) = column else {
        let names: Vec<String> = columns.iter().take(20).map(|c| c.path().string()).collect();
        return Err(format!("the columns are {}", names.join(", ")));
    };
    let found = &columns[column];
    if found.max_rep_level() > 0 {
        return Err(String::from("it holds lists"));
    }
    match found.physical_type() {
        Type::BYTE_ARRAY => Ok(column),
        other => Err(format!("it holds {other}, not text")),
    }
}

/// A call into the library, which panics on some damaged files.
fn checked<T>(
    source: &Source,
    call: impl FnOnce() -> Result<T, ParquetError>,
) -> Result<T, TokenizeError> {
    let result = guarded(call).and_then(|result| result.map_err(|error| error.to_string()));
    result.map_err(|reason| TokenizeError::Parquet { path: source.path.clone(), reason })
}

/// The file itself if it can be read in place, or a copy.
fn seekable(
    source: &Source,
    spool: &Path,
    bytes_read: &BytesRead,
) -> Result<(File, bool), TokenizeError> {
    let compressed = [".gz", ".zst", ".zstd"];
    let name = source.path.as_os_str().to_string_lossy().to_ascii_lowercase();
    if !source.is_stdin() && !compressed.iter().any(|end| name.ends_with(end)) {
        let file = File::open(&source.path).map_err(TokenizeError::io("open", &source.path))?;
        return Ok((file, true));
    }
    let mut bytes = input::open(&source.path, source.is_stdin(), bytes_read)?;
    let mut options = OpenOptions::new();
    let copy = options.read(true).write(true).create(true).truncate(true).open(spool);
    let mut copy = copy.map_err(TokenizeError::io("create", spool))?;
    // Without a name, it is gone however the run ends.
    fs::remove_file(spool).map_err(TokenizeError::io("create", spool))?;
    io::copy(&mut bytes, &mut copy).map_err(|error| {
        let action = if error.kind() == io::ErrorKind::StorageFull { "write" } else { "read" };
        TokenizeError::io(action, &source.path)(error)
    })?;
    Ok((copy, false))
}
