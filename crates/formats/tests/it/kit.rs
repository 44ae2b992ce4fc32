//! Folders and datasets of a test.

use std::fs;
use std::path::{Path, PathBuf};
use std::process;

use formats::convert::{self, Job, Summary};
use formats::source::Sink;
use formats::{Error, Kind, ReadOptions, Source, WriteOptions};
use xio::documents::Selection;

/// A folder that is removed with the test.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("dquant-formats-{name}-{}", process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("a folder");
        Folder(path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Names of everything in it, hidden files too.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).expect("readable");
        let name = |entry: fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
        let mut names: Vec<String> = entries.map(|entry| name(entry.expect("readable"))).collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The formats of this build.
pub(crate) fn kinds() -> Vec<Kind> {
    let with_columns = cfg!(feature = "parquet");
    let is_column = |kind: &Kind| matches!(kind, Kind::Parquet | Kind::Arrow);
    Kind::ALL.into_iter().filter(|kind| with_columns || !is_column(kind)).collect()
}

/// A dataset of this format in the folder.
pub(crate) fn name_of(kind: Kind) -> &'static str {
    match kind {
        Kind::Flat => "flat.bin",
        Kind::Npy => "array.npy",
        Kind::Megatron => "megatron.bin",
        Kind::Mds => "mds",
        Kind::LitData => "litdata",
        Kind::WebDataset => "web.tar",
        Kind::Parquet => "rows.parquet",
        Kind::Arrow => "rows.arrow",
    }
}

pub(crate) fn job(source: &Path, output: &Path, kind: Kind) -> Job {
    Job {
        source: source.to_owned(),
        output: output.to_owned(),
        read: ReadOptions::default(),
        write: WriteOptions { kind, zstd_level: None, shard_bytes: 40_000, column: None },
        dtype: None,
        eos: None,
        split: None,
        drop_empty: false,
        selection: Selection::default(),
        tokenizer: None,
        threads: 2,
        save_bytes: 1 << 20,
        restart: false,
    }
}

pub(crate) fn run(job: &Job) -> Summary {
    convert::convert(job, &mut |_| ()).unwrap_or_else(|error| panic!("{job:?}: {error}"))
}

/// A conversion that has to be refused, with this reason and hint.
pub(crate) fn refused(job: &Job, why: &str, hint: &str) {
    let error = convert::convert(job, &mut |_| ()).expect_err("refused");
    assert!(error.to_string().contains(why), "{error}");
    assert!(error.hint().contains(hint), "{}", error.hint());
}

/// The documents of a dataset, as bytes of its own type.
#[derive(Default)]
struct Collect {
    documents: Vec<Vec<u8>>,
    open: Vec<u8>,
}

impl Sink for Collect {
    fn tokens(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.open.extend_from_slice(bytes);
        Ok(())
    }

    fn end_document(&mut self) -> Result<(), Error> {
        self.documents.push(std::mem::take(&mut self.open));
        Ok(())
    }
}

/// Reads all documents, part by part.
pub(crate) fn read(source: &dyn Source) -> Result<Vec<Vec<u8>>, Error> {
    let mut collect = Collect::default();
    for part in 0..source.parts() {
        source.read(part, &mut collect)?;
    }
    assert!(collect.open.is_empty(), "tokens follow the last document");
    Ok(collect.documents)
}

/// The documents of a dataset as numbers.
pub(crate) fn documents(path: &Path, options: &ReadOptions) -> Vec<Vec<i64>> {
    let source = formats::open(path, options).unwrap_or_else(|error| panic!("{error}"));
    let width = source.layout().dtype.bytes() as usize;
    let signed = source.layout().dtype.is_signed();
    let value = |bytes: &[u8]| {
        let negative = signed && bytes[width - 1] >= 0x80;
        let mut wide = if negative { [0xff; 8] } else { [0; 8] };
        wide[..width].copy_from_slice(bytes);
        i64::from_le_bytes(wide)
    };
    let documents = read(&*source).unwrap_or_else(|error| panic!("{error}"));
    documents.iter().map(|tokens| tokens.chunks_exact(width).map(value).collect()).collect()
}

/// Documents of ids as a tokenizer makes them, each ended by id 50,256.
pub(crate) fn made(count: usize, longest: u64) -> Vec<Vec<u16>> {
    let mut state = 11_u64;
    let mut next = move || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        state >> 33
    };
    let document = |_| {
        let tokens = next() % longest;
        let mut document: Vec<u16> = (0..tokens).map(|_| (next() % 50_256) as u16).collect();
        document.push(50_256);
        document
    };
    (0..count).map(document).collect()
}

/// Writes documents as a flat file.
pub(crate) fn flat(path: &Path, documents: &[Vec<u16>]) {
    let bytes: Vec<u8> = documents.iter().flatten().flat_map(|id| id.to_le_bytes()).collect();
    fs::write(path, bytes).expect("writable");
}
