//! MosaicML Streaming (MDS): a folder of shards with an `index.json`.
//!
//! A sample is a record of named columns; one of them holds tokens. Read are `ndarray` columns of integers, with or
//! without a fixed type and shape, and `bytes` columns whose type the user names. Shards are raw or compressed with
//! zstd; where both files exist the raw one is read. Hashes that the index records of a shard are compared with the
//! file before any of its samples is passed on.

use std::path::{Path, PathBuf};

use serde_json::Value;
use xio::dataset::Dtype;

use super::hashes::Hashes;
use super::shard::Shard;
use super::{Layout, ReadOptions, Sink, Source};
use crate::error::Error;
use crate::kind::Kind;
use crate::manifest::is_plain;
use crate::settle::{self, Origin};

/// Type codes of `ndarray` columns without a fixed type.
const CODES: [(u8, Dtype); 8] = [
    (8, Dtype::U8),
    (9, Dtype::I8),
    (16, Dtype::U16),
    (17, Dtype::I16),
    (32, Dtype::U32),
    (33, Dtype::I32),
    (64, Dtype::U64),
    (65, Dtype::I64),
];

/// How the column with the tokens is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Column {
    index: usize,
    /// Type and number of values, where the column fixes them.
    dtype: Option<Dtype>,
    values: Option<u64>,
    /// Plain bytes: no header of an array.
    is_bytes: bool,
}

struct ShardFile {
    path: PathBuf,
    samples: u64,
    /// What the index records of this file.
    hashes: Hashes,
    /// Bytes of the shard when it is decompressed; none when it is not compressed.
    raw_bytes: Option<u64>,
    /// Fixed size of each column, in bytes.
    sizes: Vec<Option<u64>>,
    column: Column,
}

struct Mds {
    shards: Vec<ShardFile>,
    layout: Layout,
}

pub(super) fn open(
    folder: &Path,
    index: &Path,
    found: Value,
    options: &ReadOptions,
) -> Result<Box<dyn Source>, Error> {
    let corrupt = |why: String| Error::corrupt(index, why);
    let listed = found.get("shards").and_then(Value::as_array);
    let listed = listed.ok_or_else(|| corrupt("`shards` is no list".into()))?;
    let mut shards = Vec::with_capacity(listed.len());
    for (number, shard) in listed.iter().enumerate() {
        let shard = shard_file(folder, index, shard, options);
        shards.push(shard.map_err(|error| match error {
            Error::Corrupt { path, why } => {
                Error::Corrupt { path, why: format!("shard {number}: {why}") }
            }
            error => error,
        })?);
    }
    let (dtype, origin) = type_of(index, &mut shards, options)?;
    let names = shards.iter().map(|shard| shard.path.strip_prefix(folder).unwrap_or(&shard.path));
    let mut files: Vec<PathBuf> = names.map(Path::to_owned).collect();
    files.push("index.json".into());
    let unchecked = shards.iter().flat_map(|shard| shard.hashes.unknown()).next();
    let unchecked = unchecked.map(|algorithm| format!("; hashes of {algorithm} are not checked"));
    let documents = shards.iter().fold(0_u64, |sum, shard| sum.saturating_add(shard.samples));
    let layout = Layout {
        kind: Kind::Mds,
        dtype,
        origin,
        tokens: None,
        documents: Some(documents),
        note: Some(format!("{} shards{}", shards.len(), unchecked.unwrap_or_default())),
        targets: false,
        run: None,
        manifest: options.manifest(folder)?,
        folder: folder.to_owned(),
        files,
    };
    Ok(Box::new(Mds { shards, layout }))
}

fn shard_file(
    folder: &Path,
    index: &Path,
    shard: &Value,
    options: &ReadOptions,
) -> Result<ShardFile, Error> {
    let corrupt = |why: &str| Error::corrupt(index, why);
    let list = |name: &str| {
        let list = shard.get(name).and_then(Value::as_array);
        list.ok_or_else(|| corrupt(&format!("`{name}` is no list")))
    };
    if shard.get("format").and_then(Value::as_str) != Some("mds") || shard["version"] != 2 {
        let why = "is not of format mds, version 2";
        return Err(Error::refused(index, why, "write it again with MDSWriter"));
    }
    let samples = shard["samples"].as_u64().ok_or_else(|| corrupt("`samples` is no number"))?;
    let (names, encodings) = (list("column_names")?, list("column_encodings")?);
    let sizes: Vec<Option<u64>> =
        list("column_sizes")?.iter().map(|size| size.as_u64().filter(|size| *size > 0)).collect();
    if names.len() != encodings.len() || names.len() != sizes.len() {
        return Err(corrupt("its lists of columns differ in length"));
    }
    let file = |field: &str| -> Result<Option<(PathBuf, u64, Hashes)>, Error> {
        let info = &shard[field];
        if info.is_null() {
            return Ok(None);
        }
        let (name, bytes) = (info["basename"].as_str(), info["bytes"].as_u64());
        let hashes = Hashes::parse(&info["hashes"])
            .ok_or_else(|| corrupt(&format!("`hashes` of `{field}` are no texts by name")))?;
        match (name.filter(|name| is_plain(name)), bytes) {
            (Some(name), Some(bytes)) => Ok(Some((folder.join(name), bytes, hashes))),
            _ => Err(corrupt(&format!("`{field}` has no basename in the folder, or no length"))),
        }
    };
    let raw = file("raw_data")?.ok_or_else(|| corrupt("`raw_data` is missing"))?;
    let (raw, raw_bytes, raw_hashes) = raw;
    let (path, raw_bytes, hashes) = match file("zip_data")? {
        Some((zipped, _, hashes)) if !raw.is_file() => {
            let codec = shard["compression"].as_str().unwrap_or_default();
            if codec.split(':').next() != Some("zstd") {
                let why = format!("is compressed with {codec:?}; zstd is read");
                return Err(Error::refused(&zipped, why, "decompress it, or write it with zstd"));
            }
            (zipped, Some(raw_bytes), hashes)
        }
        _ => (raw, None, raw_hashes),
    };
    let column = column(index, names, encodings, options)?;
    Ok(ShardFile { path, samples, hashes, raw_bytes, sizes, column })
}

/// Chooses the column with the tokens.
fn column(
    index: &Path,
    names: &[Value],
    encodings: &[Value],
    options: &ReadOptions,
) -> Result<Column, Error> {
    let texts = |values: &[Value]| -> Vec<String> {
        values.iter().map(|value| value.as_str().unwrap_or_default().to_owned()).collect()
    };
    let (names, encodings) = (texts(names), texts(encodings));
    let shown = || {
        let both =
            names.iter().zip(&encodings).map(|(name, encoding)| format!("{name} ({encoding})"));
        both.collect::<Vec<_>>().join(", ")
    };
    let candidate =
        |at: usize| array_column(&encodings[at]).map(|column| Column { index: at, ..column });
    if let Some(wanted) = &options.column {
        let at = names.iter().position(|name| name == wanted);
        let column = at.and_then(candidate);
        return column.ok_or_else(|| {
            let why = format!("column {wanted:?} does not exist or holds no integers");
            Error::refused(index, why, format!("its columns are {}", shown()))
        });
    }
    let arrays: Vec<Column> =
        (0..names.len()).filter_map(candidate).filter(|column| !column.is_bytes).collect();
    let bytes: Vec<Column> = (0..names.len()).filter_map(candidate).collect();
    let mut chosen = if arrays.is_empty() { bytes } else { arrays };
    if chosen.len() > 1 {
        chosen.retain(|column| super::TOKEN_COLUMNS.contains(&names[column.index].as_str()));
    }
    match &chosen[..] {
        [only] => Ok(only.clone()),
        _ => {
            let why = format!("{} of its columns may hold tokens", chosen.len());
            Err(Error::refused(index, why, format!("name one with --column: {}", shown())))
        }
    }
}

/// The column that an encoding stands for, if it can hold tokens.
fn array_column(encoding: &str) -> Option<Column> {
    if encoding == "bytes" {
        return Some(Column { index: 0, dtype: None, values: None, is_bytes: true });
    }
    let mut parts = encoding.split(':');
    if parts.next() != Some("ndarray") {
        return None;
    }
    let dtype = parts.next().map(Dtype::integer_from_name);
    let shape = parts.next().map(|shape| {
        shape.split(',').try_fold(1_u64, |product, axis| product.checked_mul(axis.parse().ok()?))
    });
    match (dtype, shape) {
        (Some(None), _) | (_, Some(None)) => None,
        (dtype, shape) => Some(Column {
            index: 0,
            dtype: dtype.flatten(),
            values: shape.flatten(),
            is_bytes: false,
        }),
    }
}

/// The one type of all shards.
fn type_of(
    index: &Path,
    shards: &mut [ShardFile],
    options: &ReadOptions,
) -> Result<(Dtype, Origin), Error> {
    let Some(first) = shards.iter().find(|shard| shard.samples > 0) else {
        return Ok((options.dtype.unwrap_or(Dtype::U32), Origin::File));
    };
    let (dtype, origin) = match (first.column.dtype, first.column.is_bytes, options.dtype) {
        (Some(dtype), ..) => (dtype, Origin::File),
        (None, true, Some(given)) => {
            let first = first.first_bytes(settle::PLAIN_BYTES)?;
            settle::plain_bytes(given, &first).map_err(|refusal| {
                Error::refused(index, format!("column {}", refusal.why), refusal.hint)
            })?;
            (given, Origin::Given)
        }
        (None, true, None) => {
            let why = "its column holds plain bytes, which do not record their type";
            return Err(Error::refused(index, why, "name it with --dtype; LLM Foundry writes i64"));
        }
        (None, false, _) => (first.first_type()?, Origin::File),
    };
    if let Some(given) = options.dtype.filter(|given| *given != dtype) {
        let why = format!("holds {dtype}, not {given}");
        return Err(Error::refused(index, why, "leave --dtype out: the index tells the type"));
    }
    for shard in shards {
        let fixed = shard.column.dtype.is_none_or(|fixed| fixed == dtype);
        if !fixed || shard.column.is_bytes != (origin == Origin::Given) {
            let why =
                format!("holds tokens of another type than {dtype}, the type of the first shard");
            return Err(Error::refused(&shard.path, why, "convert it separately"));
        }
    }
    Ok((dtype, origin))
}

impl ShardFile {
    fn open(&self) -> Result<Shard, Error> {
        Shard::open(&self.path, self.samples, self.raw_bytes)
    }

    /// The type of the first sample, which has its own header.
    fn first_type(&self) -> Result<Dtype, Error> {
        let mut shard = self.open()?;
        let len = shard.next_sample()?.unwrap_or(0);
        self.to_column(&mut shard, len)?;
        let mut code = [0];
        shard.exact(&mut code)?;
        of_code(&shard, code[0])
    }

    /// The plain bytes of the first samples, up to this many.
    fn first_bytes(&self, most: usize) -> Result<Vec<u8>, Error> {
        let mut shard = self.open()?;
        let mut bytes = Vec::new();
        while let Some(len) = shard.next_sample()? {
            let (length, rest) = self.to_column(&mut shard, len)?;
            let have = bytes.len();
            let taken = length.min((most - have) as u64);
            bytes.resize(have + taken as usize, 0);
            shard.exact(&mut bytes[have..])?;
            if bytes.len() == most {
                break;
            }
            shard.skip(length - taken + rest)?;
        }
        Ok(bytes)
    }

    /// Skips to the column; returns its length and the bytes that follow it in the sample.
    fn to_column(&self, shard: &mut Shard, len: u64) -> Result<(u64, u64), Error> {
        let mut lengths = Vec::with_capacity(self.sizes.len());
        let mut sum = 0_u64;
        for size in &self.sizes {
            let length = match size {
                Some(size) => *size,
                None => {
                    sum += 4;
                    u64::from(shard.u32()?)
                }
            };
            // Column sizes come from the index: any 64 bits.
            sum = sum.saturating_add(length);
            lengths.push(length);
        }
        if sum != len {
            return Err(
                shard.bad_sample(format_args!("its columns have {sum} bytes, it has {len}"))
            );
        }
        let at = self.column.index;
        shard.skip(lengths[..at].iter().sum())?;
        Ok((lengths[at], lengths[at + 1..].iter().sum()))
    }

    /// Passes the tokens of a sample on.
    fn sample(
        &self,
        shard: &mut Shard,
        len: u64,
        dtype: Dtype,
        sink: &mut dyn Sink,
    ) -> Result<(), Error> {
        let (mut bytes, rest) = self.to_column(shard, len)?;
        if !self.column.is_bytes {
            let (header, values) = self.array_header(shard, bytes, dtype)?;
            let need = values.and_then(|values| values.checked_mul(u64::from(dtype.bytes())));
            if need.and_then(|need| need.checked_add(header)) != Some(bytes) {
                let why = format!("an array of {values:?} values in {bytes} bytes");
                return Err(shard.bad_sample(why));
            }
            bytes -= header;
        }
        shard.tokens(bytes, dtype, sink)?;
        shard.skip(rest)
    }

    /// Reads the header of an array of `bytes` bytes: its length, and the number of values.
    fn array_header(
        &self,
        shard: &mut Shard,
        bytes: u64,
        dtype: Dtype,
    ) -> Result<(u64, Option<u64>), Error> {
        let (mut header, mut byte) = (0, [0]);
        let short = || "its array has no header".to_owned();
        if self.column.dtype.is_none() {
            header += 1;
            if bytes < header {
                return Err(shard.bad_sample(short()));
            }
            shard.exact(&mut byte)?;
            let found = of_code(shard, byte[0])?;
            if found != dtype {
                return Err(
                    shard.bad_sample(format_args!("holds {found}, the samples before {dtype}"))
                );
            }
        }
        if let Some(values) = self.column.values {
            return Ok((header, Some(values)));
        }
        header += 1;
        if bytes < header {
            return Err(shard.bad_sample(short()));
        }
        shard.exact(&mut byte)?;
        let (axes, width) = (u64::from(byte[0] >> 2), 1_u64 << (byte[0] & 3));
        header += axes * width;
        if bytes < header {
            return Err(shard.bad_sample(short()));
        }
        let mut values = Some(1_u64);
        for _ in 0..axes {
            let mut axis = [0; 8];
            shard.exact(&mut axis[..width as usize])?;
            values = values.and_then(|values| values.checked_mul(u64::from_le_bytes(axis)));
        }
        Ok((header, values))
    }
}

fn of_code(shard: &Shard, code: u8) -> Result<Dtype, Error> {
    let found = CODES.iter().find(|(known, _)| *known == code);
    let unknown = || shard.bad_sample(format_args!("type code {code} is no integer type"));
    found.map(|(_, dtype)| *dtype).ok_or_else(unknown)
}

impl Source for Mds {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn parts(&self) -> u64 {
        self.shards.len() as u64
    }

    fn part_path(&self, part: u64) -> PathBuf {
        self.shards[part as usize].path.clone()
    }

    fn read(&self, part: u64, sink: &mut dyn Sink) -> Result<(), Error> {
        let file = &self.shards[part as usize];
        file.hashes.check(&file.path)?;
        let mut shard = file.open()?;
        while let Some(len) = shard.next_sample()? {
            file.sample(&mut shard, len, self.layout.dtype, sink)?;
            sink.end_document()?;
        }
        Ok(())
    }
}
