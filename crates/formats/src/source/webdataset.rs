//! WebDataset: tar archives whose members are samples, one file per field.
//!
//! `0001.npy` is the field `npy` of the sample `0001`. One field holds the tokens: an array in
//! NumPy's format, or raw bytes whose type the user names. Samples come in the order of the
//! archives. The archives are scanned when they are opened, headers only, so that parts can begin
//! in the middle of one.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use tar::Archive;
use xio::dataset::{Dtype, npy};

use super::{BLOCK_BYTES, Layout, PART_BYTES, ReadOptions, Sink, Source, folder_of, relative};
use crate::error::Error;
use crate::kind::Kind;
use crate::settle::{self, Origin};

/// Members of the first archive that are looked at to find the field.
const LOOK: usize = 64;

/// Most bytes of a part that are spent on members of other fields and headers.
const MAX_PART_BYTES: u64 = 8 * PART_BYTES;

/// Members in a row.
#[derive(Clone, Copy, Debug)]
struct Part {
    archive: usize,
    /// Offset of the first header.
    at: u64,
    /// Offset behind the last member.
    end: u64,
}

struct WebDataset {
    archives: Vec<PathBuf>,
    parts: Vec<Part>,
    field: String,
    layout: Layout,
}

/// A member of an archive.
struct Member<'a, R: Read> {
    /// The field; none for folders and hidden files.
    field: Option<String>,
    /// Whether the tokens follow: not for links and sparse files.
    is_plain: bool,
    name: String,
    entry: tar::Entry<'a, R>,
}

pub(super) fn open(
    path: &Path,
    archives: Vec<PathBuf>,
    options: &ReadOptions,
) -> Result<Box<dyn Source>, Error> {
    let first = archives.first().ok_or_else(|| Error::corrupt(path, "holds no archive"))?;
    let field = match &options.column {
        Some(field) => Some(field.to_lowercase()),
        None => only_field(first)?,
    };
    let (field, dtype, origin) = match (field, options.dtype) {
        (Some(field), _) => {
            let (dtype, origin) = type_of(first, &field, options)?;
            (field, dtype, origin)
        }
        (None, Some(given)) => ("npy".into(), given, Origin::Given),
        (None, None) => {
            return Err(Error::refused(first, "holds no sample", "name its type with --dtype"));
        }
    };
    let (mut parts, mut documents) = (Vec::new(), 0);
    for (number, archive) in archives.iter().enumerate() {
        documents += scan(archive, number, &field, &mut parts)?;
    }
    let folder = if path.is_dir() { path.to_owned() } else { folder_of(path) };
    let layout = Layout {
        kind: Kind::WebDataset,
        dtype,
        origin,
        tokens: None,
        documents: Some(documents),
        note: Some(format!("{} archives, field {field}", archives.len())),
        targets: false,
        loss_weights: false,
        unread: None,
        run: None,
        manifest: options.manifest(path)?,
        files: relative(&folder, &archives),
        folder,
    };
    Ok(Box::new(WebDataset { archives, parts, field, layout }))
}

/// Calls `each` for every member from offset `at` on, with the offset behind it, until it returns
/// false.
fn members(
    path: &Path,
    at: u64,
    mut each: impl FnMut(Member<'_, BufReader<From>>, u64) -> Result<bool, Error>,
) -> Result<(), Error> {
    let broken = |error| Error::corrupt(path, format!("is no valid tar archive: {error}"));
    let mut file = File::open(path).map_err(Error::read(path))?;
    file.seek(SeekFrom::Start(at)).map_err(Error::read(path))?;
    let len = file.metadata().map_err(Error::read(path))?.len();
    let mut archive = Archive::new(BufReader::new(From { file, at }));
    for entry in archive.entries_with_seek().map_err(broken)? {
        let entry = entry.map_err(broken)?;
        let begin = entry.raw_file_position().checked_add(at);
        let end = begin.and_then(|begin| begin.checked_add(entry.size()));
        let Some(end) = end.filter(|end| *end <= len) else {
            return Err(Error::corrupt(path, "ends in the middle of a member"));
        };
        let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        let kind = entry.header().entry_type();
        let (field, is_plain) = (field_of(&name).filter(|_| !kind.is_dir()), kind.is_file());
        // Members are padded to whole blocks of 512 bytes.
        if !each(Member { field, is_plain, name, entry }, end.div_ceil(512) * 512)? {
            break;
        }
    }
    Ok(())
}

/// A file from an offset on: the decoder counts from the start of what it reads.
struct From {
    file: File,
    at: u64,
}

impl Read for From {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.file.read(buffer)
    }
}

impl Seek for From {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let to = match to {
            SeekFrom::Start(offset) => SeekFrom::Start(offset.saturating_add(self.at)),
            to => to,
        };
        self.file.seek(to).map(|at| at.saturating_sub(self.at))
    }
}

/// The field of a member: its name behind the first dot of its last component. Hidden files are
/// none.
fn field_of(name: &str) -> Option<String> {
    let base = name.rsplit('/').next()?;
    let (key, field) = base.split_once('.')?;
    (!key.is_empty() && !field.is_empty()).then(|| field.to_lowercase())
}

/// The field with tokens, where there is no doubt: the only one, or the only array of NumPy. None
/// without samples.
fn only_field(path: &Path) -> Result<Option<String>, Error> {
    let mut fields: Vec<String> = Vec::new();
    let mut seen = 0;
    members(path, 0, |member, _| {
        if let Some(field) = member.field.filter(|field| !fields.contains(field)) {
            fields.push(field);
        }
        seen += 1;
        Ok(seen < LOOK)
    })?;
    let arrays: Vec<&String> = fields.iter().filter(|field| is_array(field)).collect();
    match (&arrays[..], &fields[..]) {
        ([only], _) => Ok(Some((*only).clone())),
        ([], [only]) => Ok(Some(only.clone())),
        ([], []) => Ok(None),
        _ => {
            let why = format!(
                "its samples have {} fields, none of which is the only array",
                fields.len()
            );
            let hint = format!("name the one with the tokens with --column: {}", fields.join(", "));
            Err(Error::refused(path, why, hint))
        }
    }
}

fn is_array(field: &str) -> bool {
    field == "npy" || field.ends_with(".npy")
}

/// The type of the first sample; those after it must have it too.
fn type_of(path: &Path, field: &str, options: &ReadOptions) -> Result<(Dtype, Origin), Error> {
    let known = ["npz", "pth", "pt", "pyd", "json", "txt", "cbor", "mp", "zst", "gz"];
    if known.iter().any(|ending| field.rsplit('.').next() == Some(ending)) {
        let why = format!("the field {field} is neither .npy nor raw tokens");
        return Err(Error::refused(path, why, "name another field with --column, or write .npy"));
    }
    if !is_array(field) {
        let hint = "name it with --dtype, for example --dtype u16";
        let why = format!("the field {field} does not record the type of its tokens");
        let given = options.dtype.ok_or_else(|| Error::refused(path, why, hint))?;
        settle::plain_bytes(given, &first_bytes(path, field, settle::PLAIN_BYTES)?).map_err(
            |refusal| {
                Error::refused(path, format!("the field {field} {}", refusal.why), refusal.hint)
            },
        )?;
        return Ok((given, Origin::Given));
    }
    let mut found = None;
    members(path, 0, |mut member, _| {
        if member.field.as_deref() == Some(field) {
            found = Some(array_header(path, &mut member)?.0);
        }
        Ok(found.is_none())
    })?;
    let why = format!("no sample has the field {field}");
    let dtype = found.ok_or_else(|| Error::refused(path, why, "name another with --column"))?;
    match options.dtype.filter(|given| *given != dtype) {
        None => Ok((dtype, Origin::File)),
        Some(given) => {
            let why = format!("holds {dtype}, not {given}");
            Err(Error::refused(path, why, "leave --dtype out: the arrays tell the type"))
        }
    }
}

/// The bytes of a field in the first samples, up to this many.
fn first_bytes(path: &Path, field: &str, most: usize) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    members(path, 0, |member, _| {
        if member.field.as_deref() == Some(field) && member.is_plain {
            let left = (most - bytes.len()) as u64;
            let read = member.entry.take(left).read_to_end(&mut bytes);
            read.map_err(Error::read(path))?;
        }
        Ok(bytes.len() < most)
    })?;
    Ok(bytes)
}

/// Reads the header of an array; returns its type and the bytes of its values.
fn array_header<R: Read>(path: &Path, member: &mut Member<'_, R>) -> Result<(Dtype, u64), Error> {
    let len = member.entry.size();
    let name = member.name.clone();
    let invalid = |why: String| Error::corrupt(path, format!("member {name}: {why}"));
    let mut head = vec![0; npy::PREFIX_BYTES.min(len as usize)];
    member.entry.read_exact(&mut head).map_err(|error| invalid(error.to_string()))?;
    let header = npy::header_bytes(&head).map_err(|error| invalid(error.to_string()))?;
    if header > len {
        return Err(invalid("ends early".into()));
    }
    let have = head.len();
    head.resize((header as usize).max(have), 0);
    member.entry.read_exact(&mut head[have..]).map_err(|error| invalid(error.to_string()))?;
    let found = npy::parse_integers(&head, len).map_err(|error| invalid(error.to_string()))?;
    if found.data_offset != head.len() as u64 {
        return Err(invalid("its header is too short".into()));
    }
    Ok((found.dtype, found.data_bytes()))
}

/// Cuts an archive into parts and counts its samples.
fn scan(path: &Path, archive: usize, field: &str, parts: &mut Vec<Part>) -> Result<u64, Error> {
    let mut samples = 0;
    let (mut at, mut last, mut bytes) = (0, 0, 0);
    members(path, 0, |member, end| {
        if member.field.as_deref() == Some(field) {
            samples += 1;
            bytes += member.entry.size();
        }
        last = end;
        if bytes >= PART_BYTES || end - at >= MAX_PART_BYTES {
            parts.push(Part { archive, at, end });
            (at, bytes) = (end, 0);
        }
        Ok(true)
    })?;
    if last > at {
        parts.push(Part { archive, at, end: last });
    }
    Ok(samples)
}

impl WebDataset {
    fn sample<R: Read>(
        &self,
        path: &Path,
        mut member: Member<'_, R>,
        sink: &mut dyn Sink,
    ) -> Result<(), Error> {
        let dtype = self.layout.dtype;
        if !member.is_plain {
            let why = format!("member {} is a link or a sparse file", member.name);
            return Err(Error::refused(path, why, "write the archive with plain files"));
        }
        let mut left = member.entry.size();
        if is_array(&self.field) {
            let (found, bytes) = array_header(path, &mut member)?;
            if found != dtype {
                let why = format!("member {} holds {found}, the first one {dtype}", member.name);
                return Err(Error::refused(path, why, "convert such samples separately"));
            }
            left = bytes;
        }
        if !left.is_multiple_of(u64::from(dtype.bytes())) {
            let why =
                format!("member {}: {left} bytes are no whole number of {dtype}", member.name);
            return Err(Error::corrupt(path, why));
        }
        let mut buffer = vec![0; left.min(BLOCK_BYTES) as usize];
        while left > 0 {
            let len = left.min(BLOCK_BYTES) as usize;
            member.entry.read_exact(&mut buffer[..len]).map_err(Error::read(path))?;
            sink.tokens(&buffer[..len])?;
            left -= len as u64;
        }
        sink.end_document()
    }
}

impl Source for WebDataset {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn parts(&self) -> u64 {
        self.parts.len() as u64
    }

    fn part_path(&self, part: u64) -> PathBuf {
        self.archives[self.parts[part as usize].archive].clone()
    }

    fn read(&self, part: u64, sink: &mut dyn Sink) -> Result<(), Error> {
        let part = self.parts[part as usize];
        let path = &self.archives[part.archive];
        members(path, part.at, |member, end| {
            if member.field.as_deref() == Some(&self.field) {
                self.sample(path, member, sink)?;
            }
            Ok(end < part.end)
        })
    }
}
