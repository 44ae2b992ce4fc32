//! LitData: a folder of chunks with an `index.json`.
//!
//! Read are items of one array without a header, as `optimize` writes them with `TokensLoader` (the
//! item is the array) or without it (the item is a list of lengths and leaves, one of which is such
//! an array). Chunks are plain or, as whole files, compressed with zstd. Compression inside a chunk
//! and encryption are refused.

use std::path::{Path, PathBuf};

use serde_json::Value;
use xio::dataset::Dtype;

use super::shard::Shard;
use super::{Layout, ReadOptions, Sink, Source};
use crate::error::Error;
use crate::kind::Kind;
use crate::manifest::is_plain;
use crate::settle::Origin;

/// LitData's numbers of NumPy types.
const NUMPY: [(u64, Dtype); 8] = [
    (0, Dtype::I8),
    (1, Dtype::I16),
    (2, Dtype::I32),
    (3, Dtype::I64),
    (4, Dtype::U8),
    (5, Dtype::U16),
    (6, Dtype::U32),
    (7, Dtype::U64),
];

/// LitData's numbers of torch types, some of which have two; the last is the one that is written.
const TORCH: [(u64, Dtype); 9] = [
    (11, Dtype::U8),
    (12, Dtype::I8),
    (13, Dtype::I16),
    (14, Dtype::I16),
    (15, Dtype::I32),
    (16, Dtype::I32),
    (17, Dtype::I64),
    (18, Dtype::I64),
    (20, Dtype::U16),
];

/// Largest number of leaves of an item.
const MAX_LEAVES: usize = 4096;

struct Chunk {
    path: PathBuf,
    items: u64,
    /// Bytes of the chunk when it is decompressed; none when it is not compressed.
    raw_bytes: Option<u64>,
}

struct LitData {
    chunks: Vec<Chunk>,
    /// Which leaf has the tokens, of how many; none where an item is nothing but its tokens.
    leaf: Option<(usize, usize)>,
    layout: Layout,
}

/// The type of a `data_format` entry, if it is an array of integers without a header.
fn leaf_type(text: &str) -> Option<Dtype> {
    let (name, number) = text.split_once(':')?;
    let number: u64 = number.parse().ok()?;
    let of = |table: &[(u64, Dtype)]| {
        table.iter().find(|(known, _)| *known == number).map(|(_, dtype)| *dtype)
    };
    match name {
        "no_header_tensor" => of(&TORCH),
        "no_header_numpy" => of(&NUMPY),
        _ => None,
    }
}

/// The `data_format` entry under which arrays of this type are written: as tensors where torch has
/// the type.
pub(crate) fn format_of(dtype: Dtype) -> String {
    let of = |table: &[(u64, Dtype)]| {
        table.iter().rev().find(|(_, known)| *known == dtype).map(|(number, _)| *number)
    };
    match (of(&TORCH), of(&NUMPY)) {
        (Some(number), _) => format!("no_header_tensor:{number}"),
        (None, number) => format!("no_header_numpy:{}", number.unwrap_or(0)),
    }
}

pub(super) fn open(
    folder: &Path,
    index: &Path,
    found: Value,
    options: &ReadOptions,
) -> Result<Box<dyn Source>, Error> {
    let config = &found["config"];
    let refused = |why: &str, hint: &str| Error::refused(index, why, hint);
    if !config["encryption"].is_null() {
        return Err(refused("its chunks are encrypted", "decrypt them with litdata first"));
    }
    let in_chunk = config["compression_level"].as_str().is_some_and(|level| level != "chunk");
    if in_chunk || !config["ipc_compression"].is_null() {
        let hint = "write it with compression=None, or with compression_level=\"chunk\"";
        return Err(refused("its chunks are compressed inside, which is not read", hint));
    }
    let codec = config["compression"].as_str();
    if codec.is_some_and(|codec| codec.split(':').next() != Some("zstd")) {
        let why = format!("is compressed with {codec:?}; zstd is read");
        return Err(refused(&why, "decompress it, or write it with zstd"));
    }
    let (leaf, dtype) = leaf(index, config, options)?;
    if let Some(given) = options.dtype.filter(|given| *given != dtype) {
        let why = format!("holds {dtype}, not {given}");
        return Err(refused(&why, "leave --dtype out: the index tells the type"));
    }
    let listed = found["chunks"].as_array();
    let listed = listed.ok_or_else(|| Error::corrupt(index, "`chunks` is no list"))?;
    let chunks = listed.iter().map(|chunk| {
        let name = chunk["filename"].as_str().filter(|name| is_plain(name));
        let (Some(name), Some(items)) = (name, chunk["chunk_size"].as_u64()) else {
            return Err(Error::corrupt(index, "a chunk has no filename in the folder, or no size"));
        };
        let raw_bytes = codec.map(|_| chunk["chunk_bytes"].as_u64().unwrap_or(0));
        // LitData leaves the name of the decompressed file as it was when it has decompressed a
        // chunk.
        Ok(Chunk { path: folder.join(name), items, raw_bytes })
    });
    let chunks = chunks.collect::<Result<Vec<_>, Error>>()?;
    let names = chunks.iter().map(|chunk| chunk.path.strip_prefix(folder).unwrap_or(&chunk.path));
    let mut files: Vec<PathBuf> = names.map(Path::to_owned).collect();
    files.push("index.json".into());
    let dims = listed.iter().map(|chunk| chunk["dim"].as_u64());
    let layout = Layout {
        kind: Kind::LitData,
        dtype,
        origin: Origin::File,
        tokens: dims.sum(),
        documents: Some(chunks.iter().fold(0, |sum: u64, chunk| sum.saturating_add(chunk.items))),
        note: Some(format!("{} chunks", chunks.len())),
        targets: false,
        loss_weights: false,
        unread: None,
        run: None,
        manifest: options.manifest(folder)?,
        folder: folder.to_owned(),
        files,
    };
    Ok(Box::new(LitData { chunks, leaf, layout }))
}

/// Chooses the leaf with the tokens.
fn leaf(
    index: &Path,
    config: &Value,
    options: &ReadOptions,
) -> Result<(Option<(usize, usize)>, Dtype), Error> {
    let leaves = config["data_format"].as_array();
    let leaves = leaves.ok_or_else(|| Error::corrupt(index, "`data_format` is no list"))?;
    let leaves: Vec<&str> = leaves.iter().map(|leaf| leaf.as_str().unwrap_or_default()).collect();
    let shown = leaves.join(", ");
    let typed = leaves.iter().enumerate();
    let mut typed: Vec<(usize, Dtype)> =
        typed.filter_map(|(at, leaf)| Some((at, leaf_type(leaf)?))).collect();
    if let Some(wanted) = &options.column {
        let wanted: usize = wanted.parse().unwrap_or(usize::MAX);
        typed.retain(|(at, _)| *at == wanted);
    }
    let [(at, dtype)] = typed[..] else {
        let why = format!("{} of its leaves are arrays of integers of one axis", typed.len());
        let hint = format!("name one with --column, counted from 0: {shown}");
        return Err(Error::refused(index, why, hint));
    };
    if leaves.len() > MAX_LEAVES {
        return Err(Error::corrupt(index, format!("items have more than {MAX_LEAVES} leaves")));
    }
    let leaf = match config["item_loader"].as_str() {
        Some("TokensLoader") => None,
        Some("PyTreeLoader") | None => Some((at, leaves.len())),
        Some(other) => {
            let why = format!("was written for {other}, which is not read");
            return Err(Error::refused(index, why, "write it with TokensLoader"));
        }
    };
    Ok((leaf, dtype))
}

impl LitData {
    fn item(
        &self,
        shard: &mut Shard,
        len: u64,
        (at, leaves): (usize, usize),
        sink: &mut dyn Sink,
    ) -> Result<(), Error> {
        let mut sizes = Vec::with_capacity(leaves);
        for _ in 0..leaves {
            sizes.push(u64::from(shard.u32()?));
        }
        let sum = 4 * leaves as u64 + sizes.iter().sum::<u64>();
        if sum != len {
            return Err(shard.bad_sample(format_args!("its leaves have {sum} bytes, it has {len}")));
        }
        shard.skip(sizes[..at].iter().sum())?;
        shard.tokens(sizes[at], self.layout.dtype, sink)?;
        shard.skip(sizes[at + 1..].iter().sum())
    }
}

impl Source for LitData {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn parts(&self) -> u64 {
        self.chunks.len() as u64
    }

    fn part_path(&self, part: u64) -> PathBuf {
        self.chunks[part as usize].path.clone()
    }

    fn read(&self, part: u64, sink: &mut dyn Sink) -> Result<(), Error> {
        let chunk = &self.chunks[part as usize];
        let mut shard = Shard::open(&chunk.path, chunk.items, chunk.raw_bytes)?;
        while let Some(len) = shard.next_sample()? {
            match self.leaf {
                Some(leaf) => self.item(&mut shard, len, leaf, sink)?,
                None => shard.tokens(len, self.layout.dtype, sink)?,
            }
            sink.end_document()?;
        }
        Ok(())
    }
}
