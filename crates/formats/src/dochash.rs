//! Hashes of documents: the sidecar beside a token file that holds them, and lists of them.
//!
//! The hash of a document is the XXH3 hash (64 bits) of its ids as signed 64-bit little-endian
//! numbers, so the same text has the same hash in files of any type. A sidecar says which documents
//! of which file it is of; whether that is the file beside it is for the caller to compare.
//! Sidecars and lists are input from outside: sizes are checked before use.
//!
//! ```text
//! offset  bytes  field, numbers are 64 bits and little-endian
//!      0      8  magic "DQDOCHSH"
//!      8      8  version, 1
//!     16      8  N, number of documents
//!     24      8  tokens of all documents
//!     32      8  fingerprint of their lengths
//!     40      8  fingerprint of the file: inode, length, time of change
//!     48      8  fingerprint of its manifest; 0 without one
//!     56      8  XXH3 hash (64 bits) of the hashes, 1 in place of 0
//!     64     8N  hashes
//! ```

use std::fs::File;
use std::hash::Hasher;
use std::io::{self, BufRead, BufReader, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use twox_hash::XxHash3_64;
use xio::dataset::{Dtype, TokenFile, npy};
use xio::documents::{Documents, MAX_LIST};

use crate::cores;
use crate::error::Error;
use crate::read_at::{ReadAt, Sequential};
use crate::value;

/// What is appended to the name of a file.
pub const ENDING: &str = ".dochash";

/// What to do for a file without hashes, or with those of another file.
pub const WRITE_HINT: &str = "write them: dquant documents FILE --hash";

/// Bytes before the hashes.
pub const HEADER_BYTES: usize = 64;

const MAGIC: [u8; 8] = *b"DQDOCHSH";

/// Documents that a thread hashes before it takes others; the tokens of one may be many more.
const SHARE_TOKENS: u64 = 1 << 19;

/// Bytes that are read at once; a multiple of every token size.
const READ_BYTES: u64 = 1 << 18;

/// Longest line of a list.
const MAX_LINE: u64 = 256;

/// Which documents of which file the hashes are of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Subject {
    /// How many documents.
    pub documents: u64,
    /// Their tokens together.
    pub tokens: u64,
    /// Fingerprint of their lengths.
    pub lengths: u64,
    /// Fingerprint of the file.
    pub file: u64,
    /// Fingerprint of its manifest; 0 without one.
    pub content: u64,
}

impl Subject {
    /// How it differs from what is there `now`. Two manifests decide by their contents; without two
    /// the files must be the same.
    pub fn difference(&self, now: &Subject) -> Option<&'static str> {
        let table = |of: &Subject| (of.documents, of.tokens, of.lengths);
        if table(self) != table(now) {
            Some("they are of other documents than the index describes")
        } else if self.content != 0 && now.content != 0 {
            (self.content != now.content)
                .then_some("its manifest describes other contents than when they were written")
        } else {
            (self.file != now.file).then_some("it was written or replaced since they were written")
        }
    }
}

/// The beginning of a sidecar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the hashes are of.
    pub of: Subject,
    /// The hash of the hashes, which is not 0.
    pub digest: u64,
}

impl Header {
    /// Reads the header of a sidecar of `len` bytes.
    ///
    /// # Errors
    /// Says what is wrong with it.
    pub fn parse(head: &[u8], len: u64) -> Result<Header, String> {
        let words: Vec<u64> =
            head.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let [magic, version, documents, tokens, lengths, file, content, digest] = words[..] else {
            return Err(format!("ends early: {len} bytes"));
        };
        if magic.to_le_bytes() != MAGIC {
            return Err("holds no hashes of documents".into());
        }
        if version != 1 {
            return Err(format!("is of version {version}; this program reads version 1"));
        }
        let expected =
            documents.checked_mul(8).and_then(|bytes| bytes.checked_add(HEADER_BYTES as u64));
        if expected != Some(len) {
            return Err(format!("has {len} bytes, which are not those of {documents} hashes"));
        }
        Ok(Header { of: Subject { documents, tokens, lengths, file, content }, digest })
    }

    fn to_bytes(self) -> Vec<u8> {
        let Subject { documents, tokens, lengths, file, content } = self.of;
        let words = [1, documents, tokens, lengths, file, content, self.digest];
        MAGIC.into_iter().chain(words.iter().flat_map(|word| word.to_le_bytes())).collect()
    }
}

/// The hash of hashes, in the order of their documents; never 0.
#[derive(Clone, Default)]
pub struct Digest(XxHash3_64);

impl Digest {
    /// Appends hashes.
    pub fn extend(&mut self, hashes: &[u64]) {
        hashes.iter().for_each(|hash| self.0.write(&hash.to_le_bytes()));
    }

    /// Their hash.
    pub fn value(&self) -> u64 {
        self.0.finish().max(1)
    }
}

impl std::fmt::Debug for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Digest({:016x})", self.value())
    }
}

/// The sidecar of the file at `path`.
pub fn path_of(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(ENDING);
    path.with_file_name(name)
}

/// Writes the sidecar of the file at `path`; it appears when it is complete.
///
/// # Errors
/// When the folder cannot be written.
pub fn store(path: &Path, of: Subject, hashes: &[u64]) -> Result<PathBuf, Error> {
    let mut digest = Digest::default();
    digest.extend(hashes);
    let mut bytes = Header { of, digest: digest.value() }.to_bytes();
    bytes.extend(hashes.iter().flat_map(|hash| hash.to_le_bytes()));
    let path = path_of(path);
    crate::whole::write(&path, &bytes).map(|()| path)
}

/// Reads numbers of 64 bits from a file, in blocks.
#[derive(Debug)]
pub struct Words {
    path: PathBuf,
    file: Box<dyn ReadAt>,
    at: u64,
    left: u64,
}

impl Words {
    /// The hashes behind the header of a sidecar. Errors name it `path`, which is not opened.
    ///
    /// # Errors
    /// When it cannot be read, or its header is invalid.
    pub fn of_sidecar(path: &Path, file: impl ReadAt + 'static) -> Result<(Header, Words), Error> {
        let read = Error::read(path);
        let len = file.total_bytes().map_err(read)?;
        let head = file.head(HEADER_BYTES as u64).map_err(read)?;
        let header =
            Header::parse(&head, len).map_err(|why| Error::refused(path, why, WRITE_HINT))?;
        let (path, at) = (path.to_owned(), HEADER_BYTES as u64);
        let file = Box::new(file);
        Ok((header, Words { path, file, at, left: header.of.documents }))
    }

    /// Up to `most` further numbers; none at the end.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn next(&mut self, most: usize) -> Result<Vec<u64>, Error> {
        let count = self.left.min(most as u64);
        let mut bytes = vec![0; 8 * count as usize];
        self.file.read_exact_at(&mut bytes, self.at).map_err(Error::read(&self.path))?;
        (self.at, self.left) = (self.at + 8 * count, self.left - count);
        Ok(bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect())
    }
}

/// A list of hashes: a `.npy` of `u64`, or text with the hexadecimal digits of one in each line.
#[derive(Debug)]
pub struct ListReader {
    path: PathBuf,
    body: Body,
    count: usize,
}

#[derive(Debug)]
enum Body {
    Words(Words),
    Text { file: BufReader<Sequential>, line: u64 },
}

impl ListReader {
    /// Begins to read a list. Errors name it `path`, which is not opened.
    ///
    /// # Errors
    /// When it cannot be read, or is a `.npy` of something else.
    pub fn new(path: &Path, file: impl ReadAt + 'static) -> Result<ListReader, Error> {
        const HEAD_BYTES: u64 = 64 << 10;
        let read = Error::read(path);
        let len = file.total_bytes().map_err(read)?;
        let head = file.head(HEAD_BYTES).map_err(read)?;
        let file = Box::new(file);
        let body = if head.starts_with(npy::MAGIC) {
            let found = npy::parse(&head, len).map_err(Error::dataset(path))?;
            if found.dtype != Dtype::U64 {
                let why = format!("holds {}, a list of hashes holds u64", found.dtype);
                return Err(Error::refused(path, why, LIST_HINT));
            }
            let path = path.to_owned();
            Body::Words(Words { path, file, at: found.data_offset, left: found.tokens })
        } else {
            Body::Text {
                file: BufReader::with_capacity(1 << 18, Sequential { file, at: 0 }),
                line: 0,
            }
        };
        Ok(ListReader { path: path.to_owned(), body, count: 0 })
    }

    /// Up to `most` further hashes; none at the end.
    ///
    /// # Errors
    /// When the list cannot be read, is empty or too long, or a line is not a hash.
    pub fn next(&mut self, most: usize) -> Result<Vec<u64>, Error> {
        let refused = |why: String| Error::refused(&self.path, why, LIST_HINT);
        let hashes = match &mut self.body {
            Body::Words(words) => words.next(most)?,
            Body::Text { file, line } => {
                let mut hashes = Vec::new();
                while hashes.len() < most {
                    let mut text = Vec::new();
                    let read = file.by_ref().take(MAX_LINE).read_until(b'\n', &mut text);
                    if read.map_err(Error::read(&self.path))? == 0 {
                        break;
                    }
                    *line += 1;
                    hashes.extend(hash_of(&text).map_err(|()| {
                        refused(format!("line {line} is not a hash of 16 hexadecimal digits"))
                    })?);
                }
                hashes
            }
        };
        self.count += hashes.len();
        match self.count {
            0 => Err(refused("the list of hashes is empty".into())),
            1..=MAX_LIST => Ok(hashes),
            _ => Err(refused(format!("the list has more than {MAX_LIST} hashes"))),
        }
    }
}

/// Reads a whole list of hashes.
///
/// # Errors
/// As [`ListReader`].
pub fn read_list(path: &Path) -> Result<Vec<u64>, Error> {
    // Checked before it is opened: opening a pipe waits for a writer.
    let found = std::fs::metadata(path).map_err(Error::read(path))?;
    if !found.is_file() {
        return Err(Error::refused(path, "is not a file", LIST_HINT));
    }
    let mut list = ListReader::new(path, File::open(path).map_err(Error::read(path))?)?;
    let mut all = Vec::new();
    loop {
        match list.next(1 << 16)? {
            hashes if hashes.is_empty() => return Ok(all),
            hashes => all.extend(hashes),
        }
    }
}

const LIST_HINT: &str = "a list is a .npy of u64, or text with 16 hexadecimal digits in each line, as `dquant documents` shows them; without hashes to filter by, leave filter out";

/// The hash in a line; none in an empty one and in a comment.
fn hash_of(line: &[u8]) -> Result<Option<u64>, ()> {
    let text = str::from_utf8(line).map_err(drop)?.trim();
    if text.is_empty() || text.starts_with('#') {
        return Ok(None);
    }
    let all_hex = text.len() == 16 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
    if all_hex { u64::from_str_radix(text, 16).map(Some).map_err(drop) } else { Err(()) }
}

/// Computes the hash of each document of a file, on all cores. `watch` gets the tokens that were
/// read since it was called before, on any thread.
///
/// # Errors
/// When the file cannot be read.
pub fn compute(
    (path, file): (&Path, &dyn ReadAt),
    of: &TokenFile,
    documents: &Documents,
    watch: &(dyn Fn(u64) + Sync),
) -> Result<Vec<u64>, Error> {
    let shares = shares(documents);
    let next = AtomicUsize::new(0);
    let hashes = Mutex::new(vec![0; documents.len()]);
    let work = || {
        let mut buffers = Buffers::default();
        loop {
            let Some(share) = shares.get(next.fetch_add(1, Ordering::Relaxed)) else {
                return Ok(());
            };
            let mut found = Vec::with_capacity(share.len());
            let mut tokens = 0;
            for document in share.clone() {
                let range = documents.range(document);
                tokens += range.end - range.start;
                found.push(buffers.hash(file, of, range)?);
            }
            // Written whole or not at all: a panicking thread cannot leave half a share.
            hashes.lock().unwrap_or_else(PoisonError::into_inner)[share.clone()]
                .copy_from_slice(&found);
            watch(tokens);
        }
    };
    cores::on_all(shares.len(), work).map_err(Error::read(path))?;
    Ok(hashes.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Runs of documents that hold about as many tokens.
fn shares(documents: &Documents) -> Vec<Range<usize>> {
    let (mut shares, mut first, mut weight) = (Vec::new(), 0, 0);
    for (document, tokens) in documents.lengths().iter().enumerate() {
        // A short document costs some time, too.
        weight += u64::from(*tokens) + 64;
        if weight >= SHARE_TOKENS || document + 1 == documents.len() {
            shares.push(first..document + 1);
            (first, weight) = (document + 1, 0);
        }
    }
    shares
}

/// The hash of a document whose tokens come in pieces.
#[derive(Clone, Default)]
pub(crate) struct Hashing {
    hash: XxHash3_64,
    wide: Vec<u8>,
}

impl Hashing {
    /// Appends tokens of this type.
    pub(crate) fn write(&mut self, tokens: &[u8], dtype: Dtype) -> io::Result<()> {
        if dtype == Dtype::U64 {
            // As the same bits: ids beyond the range of i64 have no other form.
            self.hash.write(tokens);
            return Ok(());
        }
        self.wide.clear();
        if value::cast(tokens, dtype, Dtype::I64, &mut self.wide).is_err() {
            return Err(io::Error::other("an id does not fit 64 bits"));
        }
        self.hash.write(&self.wide);
        Ok(())
    }

    /// The hash of the document, which ends; the next one begins.
    pub(crate) fn finish(&mut self) -> u64 {
        std::mem::take(&mut self.hash).finish()
    }
}

#[derive(Default)]
struct Buffers {
    read: Vec<u8>,
    hasher: Hashing,
}

impl Buffers {
    /// The hash of these tokens.
    fn hash(&mut self, file: &dyn ReadAt, of: &TokenFile, tokens: Range<u64>) -> io::Result<u64> {
        let width = u64::from(of.dtype.bytes());
        let (mut at, end) =
            (of.data_offset + tokens.start * width, of.data_offset + tokens.end * width);
        while at < end {
            self.read.resize(READ_BYTES.min(end - at) as usize, 0);
            file.read_exact_at(&mut self.read, at)?;
            at += self.read.len() as u64;
            self.hasher.write(&self.read, of.dtype)?;
        }
        Ok(self.hasher.finish())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::{Seek, Write};
    use xio::dataset::Format;

    /// A file that has no name.
    fn file(test: &str, bytes: &[u8]) -> File {
        let path =
            std::env::temp_dir().join(format!("dquant-dochash-{test}-{}", std::process::id()));
        let mut file =
            File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        file.write_all(bytes).unwrap();
        file.rewind().unwrap();
        file
    }

    fn hashes(dtype: Dtype, ids: &[u16], documents: &Documents) -> Vec<u64> {
        let width = dtype.bytes() as usize;
        let wide = |id: &u16| u64::from(*id).to_le_bytes()[..width].to_vec();
        let bytes: Vec<u8> = [0; 16].into_iter().chain(ids.iter().flat_map(wide)).collect();
        let of =
            TokenFile { dtype, data_offset: 16, tokens: ids.len() as u64, format: Format::Flat };
        let file = file(&format!("{dtype}"), &bytes);
        compute((Path::new("web.bin"), &file), &of, documents, &|_| ()).unwrap()
    }

    #[test]
    fn the_type_of_the_file_does_not_matter() {
        let ids: Vec<u16> = (0..700_000_u64).map(|i| (i * i % 50_021) as u16).collect();
        // Long ones, many short ones, and an empty one.
        let lengths = [600_000, 0, 5].into_iter().chain((0..33_331).map(|i| i % 4));
        let documents = Documents::contiguous(lengths).unwrap();
        assert!(documents.end() <= ids.len() as u64);
        let plain = |range: Range<u64>| {
            let ids = &ids[range.start as usize..range.end as usize];
            let bytes: Vec<u8> = ids.iter().flat_map(|id| i64::from(*id).to_le_bytes()).collect();
            XxHash3_64::oneshot(&bytes)
        };
        let want: Vec<u64> = documents.iter().map(plain).collect();
        for dtype in [Dtype::U16, Dtype::U32, Dtype::I32, Dtype::U64, Dtype::I64] {
            assert!(hashes(dtype, &ids, &documents) == want, "{dtype}");
        }
    }

    #[test]
    fn sidecars_are_read_back_and_damage_is_refused() {
        let of = Subject { documents: 3, tokens: 9, lengths: 5, file: 6, content: 0 };
        let mut digest = Digest::default();
        digest.extend(&[1, 2, 3]);
        let header = Header { of, digest: digest.value() };
        let mut bytes = header.to_bytes();
        bytes.extend([1_u64, 2, 3].iter().flat_map(|hash| hash.to_le_bytes()));
        let read = |bytes: &[u8]| Words::of_sidecar(Path::new("w.dochash"), file("sidecar", bytes));
        let (found, mut words) = read(&bytes).unwrap();
        assert_eq!(found, header);
        assert_eq!(
            (words.next(2).unwrap(), words.next(2).unwrap(), words.next(2).unwrap()),
            (vec![1, 2], vec![3], vec![])
        );
        for cut in [0, 7, 63, 64, bytes.len() - 1] {
            assert!(read(&bytes[..cut]).is_err(), "{cut}");
        }
        for (at, byte) in [(0, 0), (8, 2), (16, 4), (23, 0xff)] {
            let mut bytes = bytes.clone();
            bytes[at] = byte;
            assert!(read(&bytes).is_err(), "{at}");
        }
        assert_eq!(of.difference(&of), None);
        let says = |then: Subject, now: Subject, what: &str| {
            assert!(then.difference(&now).unwrap().contains(what));
        };
        says(of, Subject { lengths: 4, ..of }, "other documents");
        says(of, Subject { file: 7, content: 2, ..of }, "written or replaced");
        let with = Subject { content: 2, ..of };
        assert_eq!(with.difference(&Subject { file: 9, ..with }), None);
        says(with, Subject { content: 3, ..of }, "other contents");
    }

    fn list(bytes: &[u8]) -> Result<Vec<u64>, Error> {
        let mut list = ListReader::new(Path::new("bad.txt"), file("list", bytes))?;
        let mut all = Vec::new();
        loop {
            match list.next(2)? {
                hashes if hashes.is_empty() => return Ok(all),
                hashes => all.extend(hashes),
            }
        }
    }

    #[test]
    fn lists_are_text_or_arrays() {
        let text = b"# known\n00000000000000ff\n\n  FFffffffffffffff \r\n0000000000000001";
        assert_eq!(list(text).unwrap(), [255, u64::MAX, 1]);
        let head = b"{'descr': '<u8', 'fortran_order': False, 'shape': (3,), }\n";
        let mut array =
            [&b"\x93NUMPY\x01\x00"[..], &(head.len() as u16).to_le_bytes(), head].concat();
        array.extend([7_u64, 8, 9].iter().flat_map(|hash| hash.to_le_bytes()));
        assert_eq!(list(&array).unwrap(), [7, 8, 9]);
        let says = |bytes: &[u8], what: &str| {
            let error = list(bytes).unwrap_err();
            assert!(error.to_string().contains(what) && !error.hint().is_empty(), "{error}");
        };
        says(b"", "empty");
        says(b"# nothing\n", "empty");
        says(b"00000000000000ff\n0xff\n", "line 2 is not a hash");
        says(&[b'0'; 1000], "line 1 is not a hash");
        says(b"\xff\xfe", "line 1");
        says(&array[..array.len() - 1], "ends early");
        let narrow = [
            &array[..10],
            &array[10..].iter().map(|b| if *b == b'8' { b'4' } else { *b }).collect::<Vec<_>>(),
        ]
        .concat();
        says(&narrow, "holds u32");
    }
}
