//! MosaicML Streaming (MDS): a folder of shards with an `index.json`.
//!
//! A sample is a record of named columns; one of them holds tokens. Read are `ndarray` columns of
//! integers, with or without a fixed type and shape, and `bytes` columns whose type the user names.
//! Shards are raw or compressed with zstd; where both files exist the raw one is read. Hashes that
//! the index records of a shard are compared with the file before any of its samples is passed on.
//! A second column may say which tokens are [targets](super::turns), and a third what they
//! [weigh](super::weights): as `ndarray` of `float32` or integers, or as plain bytes of `float32`.

use std::fmt::Display;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::Value;
use xio::dataset::Dtype;

use super::hashes::Hashes;
use super::shard::Shard;
use super::turns::{self, Form, Row, Told};
use super::weights::{self, WEIGHT_BYTES};
use super::{Layout, ReadOptions, Sink, Source};
use crate::error::Error;
use crate::kind::Kind;
use crate::manifest::is_plain;
use crate::settle::{self, Origin};
use crate::value;

/// Most bytes of one column of a sample that is read with its targets: it is held in memory.
const MAX_ROW_BYTES: u64 = 64 << 20;

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

/// That of the floating point of loss weights.
const FLOAT_CODE: u8 = 34;

/// How a column of numbers is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Column {
    index: usize,
    /// Type and number of values, where the column fixes them.
    dtype: Option<Dtype>,
    values: Option<u64>,
    /// Plain bytes: no header of an array.
    is_bytes: bool,
    /// Its values may be `f32`.
    are_weights: bool,
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
    /// The tokens.
    column: Column,
    /// What says which of them are targets.
    marks: Option<Column>,
    /// What says how much they weigh.
    weights: Option<Column>,
    /// A column that says something of each token and is not read.
    unread: Option<String>,
}

struct Mds {
    shards: Vec<ShardFile>,
    /// Name of the column that says which tokens are targets, and what it holds.
    targets: Option<(String, Form)>,
    /// Name of the column with the loss weights.
    weights: Option<String>,
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
    let targets = options.targets.as_deref();
    let targets =
        targets.map(|name| Ok((name.to_owned(), find_form(index, &shards, name, dtype)?)));
    let targets = targets.transpose()?;
    let by = options.targets.as_ref().map(|name| format!(", targets by {name}"));
    let weights = options.loss_weights.clone();
    let weighed = weights.as_ref().map(|name| format!(", loss weights by {name}"));
    let layout = Layout {
        kind: Kind::Mds,
        dtype,
        origin,
        tokens: None,
        documents: Some(documents),
        note: Some(format!(
            "{} shards{}{}{}",
            shards.len(),
            by.unwrap_or_default(),
            weighed.unwrap_or_default(),
            unchecked.unwrap_or_default()
        )),
        targets: targets.is_some(),
        loss_weights: weights.is_some(),
        unread: shards.first().and_then(|shard| shard.unread.clone()),
        run: None,
        manifest: options.manifest(folder)?,
        folder: folder.to_owned(),
        files,
    };
    Ok(Box::new(Mds { shards, targets, weights, layout }))
}

/// What a column of targets holds, from the first sample that tells. Samples that do not fit are
/// refused when they are read.
fn find_form(index: &Path, shards: &[ShardFile], name: &str, dtype: Dtype) -> Result<Form, Error> {
    let mut is_unclear = false;
    for file in shards {
        file.hashes.check(&file.path)?;
        let mut shard = file.open()?;
        while let Some(len) = shard.next_sample()? {
            let sample = file.whole_sample(&mut shard, len, dtype)?;
            match sample.with_row(name, |row| row.told()) {
                Told::Form(form) => return Ok(form),
                Told::Both => is_unclear = true,
                Told::Nothing => {}
            }
        }
    }
    if is_unclear { Err(turns::is_unclear(index, name)) } else { Ok(Form::Mask) }
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
    let Chosen { column, marks, weights } = columns(index, names, encodings, options)?;
    let names: Vec<&str> = names.iter().filter_map(Value::as_str).collect();
    let unread = super::unread(&names, names.get(column.index).copied(), options);
    Ok(ShardFile { path, samples, hashes, raw_bytes, sizes, column, marks, weights, unread })
}

/// The columns that are read.
struct Chosen {
    column: Column,
    marks: Option<Column>,
    weights: Option<Column>,
}

/// Chooses the column with the tokens, and finds those that say which of them are targets, and what
/// they weigh.
fn columns(
    index: &Path,
    names: &[Value],
    encodings: &[Value],
    options: &ReadOptions,
) -> Result<Chosen, Error> {
    let texts = |values: &[Value]| -> Vec<String> {
        values.iter().map(|value| value.as_str().unwrap_or_default().to_owned()).collect()
    };
    let (names, encodings) = (texts(names), texts(encodings));
    let shown = || {
        let both =
            names.iter().zip(&encodings).map(|(name, encoding)| format!("{name} ({encoding})"));
        both.collect::<Vec<_>>().join(", ")
    };
    let candidate = |at: usize| {
        array_column(&encodings[at], false).map(|column| Column { index: at, ..column })
    };
    let place = |wanted: &String| names.iter().position(|name| name == wanted);
    let named = |wanted: &String| {
        place(wanted).and_then(candidate).ok_or_else(|| {
            let why = format!("column {wanted:?} does not exist or holds no integers");
            let hint = format!("its columns are {}; cast masks to integers", shown());
            Error::refused(index, why, hint)
        })
    };
    let of_weights = |wanted: &String| {
        let found = place(wanted).and_then(|at| {
            array_column(&encodings[at], true).map(|column| Column { index: at, ..column })
        });
        found.ok_or_else(|| {
            let why = format!("column {wanted:?} does not exist or holds no float32");
            let hint = format!("its columns are {}; weights.astype(\"float32\")", shown());
            Error::refused(index, why, hint)
        })
    };
    let marks = options.targets.as_ref().map(named).transpose()?;
    let weights = options.loss_weights.as_ref().map(of_weights).transpose()?;
    let read = [&options.column, &options.targets, &options.loss_weights];
    let twice = (1..read.len()).find(|at| read[*at].is_some() && read[..*at].contains(&read[*at]));
    if let Some(name) = twice.and_then(|at| read[at].as_ref()) {
        let why = format!("column {name:?} cannot hold two of tokens, targets and loss weights");
        return Err(Error::refused(index, why, format!("its columns are {}", shown())));
    }
    if let Some(wanted) = &options.column {
        return Ok(Chosen { column: named(wanted)?, marks, weights });
    }
    let beside = [&marks, &weights];
    let is_other = |column: &Column| {
        beside.iter().all(|other| other.as_ref().is_none_or(|other| other.index != column.index))
    };
    let bytes: Vec<Column> = (0..names.len()).filter_map(candidate).filter(is_other).collect();
    let arrays: Vec<Column> = bytes.iter().filter(|column| !column.is_bytes).cloned().collect();
    let mut chosen = if arrays.is_empty() { bytes } else { arrays };
    if chosen.len() > 1 {
        chosen.retain(|column| super::TOKEN_COLUMNS.contains(&names[column.index].as_str()));
    }
    match &chosen[..] {
        [only] => Ok(Chosen { column: only.clone(), marks, weights }),
        _ => {
            let why = format!("{} of its columns may hold tokens", chosen.len());
            Err(Error::refused(index, why, format!("name one with --column: {}", shown())))
        }
    }
}

/// The column that an encoding stands for, if it can hold tokens, or loss weights.
fn array_column(encoding: &str, are_weights: bool) -> Option<Column> {
    if encoding == "bytes" {
        return Some(Column { index: 0, dtype: None, values: None, is_bytes: true, are_weights });
    }
    let mut parts = encoding.split(':');
    if parts.next() != Some("ndarray") {
        return None;
    }
    let of_name = |name| match name {
        "float32" if are_weights => Some(Dtype::F32),
        name => Dtype::integer_from_name(name),
    };
    let dtype = parts.next().map(of_name);
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
            are_weights,
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
        of_code(&shard, code[0], false)
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

    /// Lengths of the columns of a sample, whose content follows.
    fn lengths(&self, shard: &mut Shard, len: u64) -> Result<Vec<u64>, Error> {
        let mut lengths = Vec::with_capacity(self.sizes.len());
        let mut sum = 0_u64;
        for size in &self.sizes {
            let length = match size {
                Some(size) => *size,
                None => {
                    sum = sum.saturating_add(4);
                    u64::from(shard.u32()?)
                }
            };
            // Column sizes come from the index: any 64 bits.
            sum = sum.saturating_add(length);
            lengths.push(length);
        }
        // A sum that was cut off is that of no sample: those have 32 bits.
        if sum != len {
            return Err(
                shard.bad_sample(format_args!("its columns have {sum} bytes, it has {len}"))
            );
        }
        Ok(lengths)
    }

    /// Skips to the column; returns its length and the bytes that follow it in the sample.
    fn to_column(&self, shard: &mut Shard, len: u64) -> Result<(u64, u64), Error> {
        let (lengths, at) = (self.lengths(shard, len)?, self.column.index);
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
        let (bytes, rest) = self.to_column(shard, len)?;
        let (bytes, _) = self.column.to_values(shard, bytes, Some(dtype))?;
        shard.tokens(bytes, dtype, sink)?;
        shard.skip(rest)
    }

    /// A sample of which more than the tokens is read.
    fn whole_sample(
        &self,
        shard: &mut Shard,
        len: u64,
        dtype: Dtype,
    ) -> Result<WholeSample, Error> {
        let mut sample = WholeSample { tokens: (Vec::new(), dtype), marks: None, weights: None };
        let is = |column: &Option<Column>, index: usize| {
            column.clone().filter(|column| column.index == index)
        };
        for (index, length) in self.lengths(shard, len)?.into_iter().enumerate() {
            let (marks, weights) = (is(&self.marks, index), is(&self.weights, index));
            let is_tokens = index == self.column.index;
            if !is_tokens && marks.is_none() && weights.is_none() {
                shard.skip(length)?;
                continue;
            }
            if length > MAX_ROW_BYTES {
                let sample = shard.number();
                let why = format!(
                    "sample {sample}: a column of {length} bytes, more than {MAX_ROW_BYTES}"
                );
                return Err(Error::refused(&self.path, why, "cut such samples into several"));
            }
            if let Some(column) = marks {
                let (bytes, found) = column.to_values(shard, length, None)?;
                sample.marks = Some((shard.bytes(bytes)?, found));
            } else if let Some(column) = weights {
                let (bytes, found) = column.to_values(shard, length, None)?;
                sample.weights = Some((shard.bytes(bytes)?, found.unwrap_or(Dtype::F32)));
            } else {
                let (bytes, _) = self.column.to_values(shard, length, Some(dtype))?;
                sample.tokens.0 = shard.bytes(bytes)?;
            }
        }
        let (tokens, marks, weights) = (&sample.tokens, sample.marks(), &sample.weights);
        let marks = marks.map(|(values, dtype)| (values.len(), dtype));
        let weights = weights.as_ref().map(|(values, dtype)| (values.len(), *dtype));
        for (bytes, dtype) in [Some((tokens.0.len(), dtype)), marks, weights].into_iter().flatten()
        {
            if !bytes.is_multiple_of(dtype.bytes() as usize) {
                let why = format_args!("{bytes} bytes are no whole number of {dtype}");
                return Err(shard.bad_sample(why));
            }
        }
        Ok(sample)
    }
}

/// The columns of a sample, whole numbers of values.
struct WholeSample {
    tokens: (Vec<u8>, Dtype),
    /// What says which tokens are targets; its type where it is recorded.
    marks: Option<(Vec<u8>, Option<Dtype>)>,
    weights: Option<(Vec<u8>, Dtype)>,
}

impl WholeSample {
    fn count(&self) -> usize {
        self.tokens.0.len() / self.tokens.1.bytes() as usize
    }

    /// What says which tokens are targets, and its type. Plain bytes are as wide as the tokens, or
    /// one for each.
    fn marks(&self) -> Option<(&[u8], Dtype)> {
        let (values, found) = self.marks.as_ref()?;
        let plain = if values.len() == self.count() { Dtype::U8 } else { self.tokens.1 };
        Some((values, found.unwrap_or(plain)))
    }

    /// Calls what it is given with the sample as a row.
    fn with_row<T>(&self, name: &str, each: impl FnOnce(&Row<'_>) -> T) -> T {
        let (tokens, dtype) = &self.tokens;
        let (marks, marks_dtype) = self.marks().unwrap_or((&[], Dtype::U8));
        each(&Row {
            name,
            tokens: self.count(),
            values: marks.len() / marks_dtype.bytes() as usize,
            token: &|at| value::at(tokens, *dtype, at).unwrap_or_default(),
            value: &|at| value::at(marks, marks_dtype, at).unwrap_or_default(),
        })
    }

    /// The loss weights, as they are passed on.
    fn weights(
        &self,
        name: Option<&str>,
        refused: &dyn Fn(&dyn Display) -> Error,
    ) -> Result<Option<Vec<u8>>, Error> {
        let (Some(name), Some((values, dtype))) = (name, &self.weights) else {
            return Ok(None);
        };
        let weight = |at| match (dtype, value::at(values, *dtype, at).unwrap_or_default()) {
            (Dtype::F32, bits) => f64::from(f32::from_bits(bits as u32)),
            (_, number) => number as f64,
        };
        let count = values.len() / dtype.bytes() as usize;
        weights::append((name, self.count(), count), weight, refused).map(Some)
    }

    /// Passes it on as a document, whose sequences take turns if its targets are told.
    fn pass(
        &self,
        targets: Option<&(String, Form)>,
        weights: Option<&str>,
        sink: &mut dyn Sink,
        refused: &dyn Fn(&dyn Display, &str) -> Error,
    ) -> Result<(), Error> {
        let width = self.tokens.1.bytes() as usize;
        let weights = self.weights(weights, &|why| refused(why, weights::HINT))?;
        let put = |sink: &mut dyn Sink, run: Range<usize>| {
            let tokens = &self.tokens.0[run.start * width..run.end * width];
            let of = |all: &Vec<u8>| all[run.start * WEIGHT_BYTES..run.end * WEIGHT_BYTES].to_vec();
            weights::pass(sink, tokens, width, weights.as_ref().map(of).as_deref())
        };
        match targets {
            Some((name, form)) => self.with_row(name, |row| {
                row.pass(*form, sink, &put, &|why| refused(why, turns::HINT))
            }),
            None => {
                put(sink, 0..self.count())?;
                sink.end_document()
            }
        }
    }
}

impl Column {
    /// Goes to the values of an array of `bytes` bytes: how many bytes they have, and their type
    /// where it is recorded. They have to be of type `dtype` where it is given.
    fn to_values(
        &self,
        shard: &mut Shard,
        bytes: u64,
        dtype: Option<Dtype>,
    ) -> Result<(u64, Option<Dtype>), Error> {
        if self.is_bytes {
            return Ok((bytes, None));
        }
        let Header { bytes: header, found, values } = self.header(shard, bytes)?;
        if let (Some(found), Some(dtype)) = (found, dtype)
            && found != dtype
        {
            let why = format_args!("holds {found}, the samples before {dtype}");
            return Err(shard.bad_sample(why));
        }
        let dtype = self.dtype.or(found);
        let width = dtype.map_or(1, |dtype| u64::from(dtype.bytes()));
        let need = values.and_then(|values| values.checked_mul(width));
        if need.and_then(|need| need.checked_add(header)) != Some(bytes) {
            let why = format_args!("an array of {values:?} values in {bytes} bytes");
            return Err(shard.bad_sample(why));
        }
        Ok((bytes - header, dtype))
    }

    /// Reads the header of an array of `bytes` bytes.
    fn header(&self, shard: &mut Shard, bytes: u64) -> Result<Header, Error> {
        let (mut header, mut byte, mut found) = (0, [0], None);
        let short = || "its array has no header".to_owned();
        if self.dtype.is_none() {
            header += 1;
            if bytes < header {
                return Err(shard.bad_sample(short()));
            }
            shard.exact(&mut byte)?;
            found = Some(of_code(shard, byte[0], self.are_weights)?);
        }
        if self.values.is_some() {
            return Ok(Header { bytes: header, found, values: self.values });
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
        Ok(Header { bytes: header, found, values })
    }
}

/// What stands before the values of an array.
struct Header {
    /// Its own length.
    bytes: u64,
    /// The type, where the column does not fix it.
    found: Option<Dtype>,
    /// Number of values; none beyond 64 bits.
    values: Option<u64>,
}

fn of_code(shard: &Shard, code: u8, are_weights: bool) -> Result<Dtype, Error> {
    let found = CODES.iter().find(|(known, _)| *known == code).map(|(_, dtype)| *dtype);
    match found {
        Some(dtype) => Ok(dtype),
        None if are_weights && code == FLOAT_CODE => Ok(Dtype::F32),
        None if are_weights => {
            let why = format!("type code {code} is neither float32 nor an integer type");
            Err(shard.refused(&why, "write loss weights as weights.astype(\"float32\")"))
        }
        None => Err(shard.bad_sample(format_args!("type code {code} is no integer type"))),
    }
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
            if self.targets.is_none() && self.weights.is_none() {
                file.sample(&mut shard, len, self.layout.dtype, sink)?;
                sink.end_document()?;
                continue;
            }
            let sample = file.whole_sample(&mut shard, len, self.layout.dtype)?;
            let refused = |why: &dyn Display, hint: &str| {
                Error::refused(&file.path, format!("sample {}: {why}", shard.number()), hint)
            };
            sample.pass(self.targets.as_ref(), self.weights.as_deref(), sink, &refused)?;
        }
        Ok(())
    }
}
