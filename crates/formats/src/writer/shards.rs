//! Shards of MosaicML and chunks of LitData.
//!
//! The table of offsets comes before the samples, so a shard is collected in memory and written at
//! once, by a thread of its own that also compresses it. As many shards as there are threads are
//! under way.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::thread::JoinHandle;

use serde_json::{Value, json};
use xio::dataset::Dtype;

use super::{MAX_DOCUMENT_BYTES, Place, Settled, WriteOptions, Writer, restore, state, too_long};
use crate::error::Error;
use crate::kind::Kind;
use crate::source::litdata;
use crate::source::shard::MAX_SAMPLES;

/// The column of tokens, as LLM Foundry names it.
const COLUMN: &str = "tokens";

struct Shards {
    place: Place,
    options: WriteOptions,
    dtype: Dtype,
    threads: usize,
    /// What the index says of every shard that is written.
    written: Vec<Value>,
    under_way: VecDeque<JoinHandle<Result<Value, Error>>>,
    /// Ends of the collected samples, from the first byte of `samples`.
    ends: Vec<u32>,
    samples: Vec<u8>,
    document: Vec<u8>,
}

pub(super) fn create(
    place: Place,
    options: &WriteOptions,
    dtype: Dtype,
    threads: usize,
    saved: Option<Value>,
) -> Result<Box<dyn Writer>, Error> {
    #[cfg(not(feature = "zstd"))]
    if options.zstd_level.is_some() {
        return Err(Error::not_built(&place.folder, "is to be compressed with zstd", "compressed"));
    }
    let written = match saved {
        Some(saved) => restore(&place.folder, saved)?,
        None => Vec::new(),
    };
    Ok(Box::new(Shards {
        place,
        options: options.clone(),
        dtype,
        threads,
        written,
        under_way: VecDeque::new(),
        ends: Vec::new(),
        samples: Vec::new(),
        document: Vec::new(),
    }))
}

impl Shards {
    fn is_mds(&self) -> bool {
        self.options.kind == Kind::Mds
    }

    /// The bytes in front of the tokens of a document.
    fn sample_header(&self) -> Result<Vec<u8>, Error> {
        if !self.is_mds() {
            return Ok(Vec::new());
        }
        let tokens = (self.document.len() / self.dtype.bytes() as usize) as u64;
        if tokens == 0 {
            let why = "a document is empty, and MosaicML's arrays are not";
            return Err(Error::refused(
                &self.place.folder,
                why,
                "leave such documents out: --drop-empty",
            ));
        }
        // An array of one axis whose length takes as few bytes as it needs.
        let width = [0xff, 0xffff].iter().filter(|most| tokens > **most).count();
        let array = 1 + (1 << width);
        let mut header = ((array + self.document.len()) as u32).to_le_bytes().to_vec();
        header.push(1 << 2 | width as u8);
        header.extend(&tokens.to_le_bytes()[..1 << width]);
        Ok(header)
    }

    /// The shard without a name, as bytes.
    fn encode(&mut self) -> Vec<u8> {
        let header = if self.is_mds() { self.config().to_string() } else { String::new() };
        let (ends, samples) = (std::mem::take(&mut self.ends), std::mem::take(&mut self.samples));
        let first = 4 + 4 * (ends.len() + 1) + header.len();
        let mut shard = Vec::with_capacity(first + samples.len());
        shard.extend((ends.len() as u32).to_le_bytes());
        shard.extend((first as u32).to_le_bytes());
        shard.extend(ends.iter().flat_map(|end| (first as u32 + end).to_le_bytes()));
        shard.extend(header.as_bytes());
        shard.extend(samples);
        shard
    }

    /// What MosaicML says of every shard, in the index and in the shard.
    fn config(&self) -> Value {
        let column = self.options.column.as_deref().unwrap_or(COLUMN);
        let dtype =
            self.dtype.name().replace('u', "uint").replace('i', "int").replace("uintnt", "uint");
        json!({
            "version": 2,
            "format": "mds",
            "compression": self.options.zstd_level.map(|level| format!("zstd:{level}")),
            "hashes": [],
            "size_limit": self.options.shard_bytes,
            "column_names": [column],
            "column_encodings": [format!("ndarray:{dtype}")],
            "column_sizes": [null],
        })
    }

    /// Hands the collected samples to a thread.
    fn flush(&mut self) -> Result<(), Error> {
        if self.ends.is_empty() {
            return Ok(());
        }
        while self.under_way.len() >= self.threads.max(1) {
            self.wait_for_one()?;
        }
        let (number, samples) = (self.written.len() + self.under_way.len(), self.ends.len());
        let tokens = self.samples.len() / self.dtype.bytes() as usize;
        let config = self.config();
        let shard = self.encode();
        let (folder, level, is_mds) =
            (self.place.folder.clone(), self.options.zstd_level, self.is_mds());
        let write = move || {
            let raw_bytes = shard.len();
            let raw =
                if is_mds { format!("shard.{number:05}.mds") } else { format!("chunk-0-{number}") };
            let (data, name) = match (level, is_mds) {
                (None, true) => (shard, raw.clone()),
                (None, false) => (shard, format!("{raw}.bin")),
                (Some(level), true) => (compress(&folder, &shard, level)?, format!("{raw}.zstd")),
                (Some(level), false) => {
                    (compress(&folder, &shard, level)?, format!("{raw}.zstd.bin"))
                }
            };
            store(&folder.join(&name), &data)?;
            if !is_mds {
                return Ok(json!({
                    "chunk_bytes": raw_bytes, "chunk_size": samples, "dim": tokens, "filename": name,
                }));
            }
            let file = |name: &str, bytes| json!({"basename": name, "bytes": bytes, "hashes": {}});
            let mut info = config;
            info["samples"] = samples.into();
            info["raw_data"] = file(&raw, raw_bytes);
            info["zip_data"] = level.map_or(Value::Null, |_| file(&name, data.len()));
            Ok(info)
        };
        let thread = std::thread::Builder::new().name("dquant-shard".into()).spawn(write);
        self.under_way.push_back(thread.map_err(Error::write(&self.place.folder))?);
        Ok(())
    }

    fn wait_for_one(&mut self) -> Result<(), Error> {
        if let Some(thread) = self.under_way.pop_front() {
            let stopped = |_| Err(Error::Stopped { path: self.place.folder.clone() });
            self.written.push(thread.join().unwrap_or_else(stopped)?);
        }
        Ok(())
    }

    fn wait_for_all(&mut self) -> Result<(), Error> {
        while !self.under_way.is_empty() {
            self.wait_for_one()?;
        }
        Ok(())
    }

    fn index(&self) -> Value {
        if self.is_mds() {
            return json!({"version": 2, "shards": self.written});
        }
        // `data_spec` is the layout of an item in the words of LitData: nothing but one leaf.
        let spec = r#"[1, {"type": null, "context": null, "children_spec": []}]"#;
        json!({
            "chunks": self.written,
            "config": {
                "chunk_bytes": self.options.shard_bytes,
                "chunk_size": null,
                "compression": self.options.zstd_level.map(|_| "zstd"),
                "data_format": [litdata::format_of(self.dtype)],
                "data_spec": spec,
                "encryption": null,
                "item_loader": "TokensLoader",
            },
            "updated_at": "0",
        })
    }
}

impl Writer for Shards {
    fn tokens(&mut self, bytes: &[u8]) -> Result<Settled, Error> {
        if self.document.len() + bytes.len() > MAX_DOCUMENT_BYTES {
            return Err(too_long(&self.place.folder));
        }
        self.document.extend_from_slice(bytes);
        Ok(Settled::Same)
    }

    fn end_document(&mut self) -> Result<Settled, Error> {
        let header = self.sample_header()?;
        let bytes = header.len() + self.document.len();
        let full =
            (self.samples.len() + 4 * self.ends.len() + bytes) as u64 > self.options.shard_bytes;
        let flushed = (full || self.ends.len() as u64 >= MAX_SAMPLES) && !self.ends.is_empty();
        if flushed {
            self.flush()?;
        }
        self.samples.extend(header);
        self.samples.append(&mut self.document);
        // At most a shard and a document: far below 4 GiB.
        self.ends.push(self.samples.len() as u32);
        Ok(if flushed { Settled::BeforeDocument } else { Settled::Same })
    }

    fn save(&mut self) -> Result<Value, Error> {
        self.wait_for_all()?;
        state(&self.place.folder, &self.written)
    }

    fn finish(mut self: Box<Self>) -> Result<(), Error> {
        self.flush()?;
        self.wait_for_all()?;
        let index = self.index().to_string();
        store(&self.place.folder.join("index.json"), index.as_bytes())
    }
}

/// Writes a file and puts it on the disk.
fn store(path: &Path, data: &[u8]) -> Result<(), Error> {
    let written = File::create(path).and_then(|mut file| {
        file.write_all(data)?;
        file.sync_all()
    });
    written.map_err(Error::write(path))
}

#[cfg(feature = "zstd")]
fn compress(folder: &Path, data: &[u8], level: i32) -> Result<Vec<u8>, Error> {
    zstd::bulk::compress(data, level).map_err(Error::write(folder))
}

#[cfg(not(feature = "zstd"))]
fn compress(folder: &Path, _data: &[u8], _level: i32) -> Result<Vec<u8>, Error> {
    // `create` has refused it.
    Err(Error::Stopped { path: folder.to_owned() })
}
