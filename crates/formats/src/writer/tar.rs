//! Tar archives of WebDataset: one member per document, an array in NumPy's format.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use xio::dataset::Dtype;

use super::append::Append;
use super::contiguous::npy_header;
use super::{MAX_DOCUMENT_BYTES, Place, Settled, WriteOptions, Writer, restore, state, too_long};
use crate::error::Error;

/// Bytes of a block; members begin at whole ones.
const BLOCK: usize = 512;

struct Tar {
    place: Place,
    /// Bytes of an archive; none where there is one for all.
    archive_bytes: Option<u64>,
    field: String,
    dtype: Dtype,
    file: Append,
    archives: u64,
    members: u64,
    document: Vec<u8>,
}

#[derive(Serialize, Deserialize)]
struct State {
    len: u64,
    archives: u64,
    members: u64,
}

fn path(place: &Place, archives: u64) -> PathBuf {
    match &place.file {
        Some(_) => place.file(),
        None => place.folder.join(format!("shard-{archives:06}.tar")),
    }
}

pub(super) fn create(
    place: Place,
    options: &WriteOptions,
    dtype: Dtype,
    saved: Option<Value>,
) -> Result<Box<dyn Writer>, Error> {
    let saved: Option<State> = saved.map(|saved| restore(&place.folder, saved)).transpose()?;
    let archives = saved.as_ref().map_or(0, |saved| saved.archives);
    let file = Append::open(&path(&place, archives), saved.as_ref().map(|saved| saved.len))?;
    let members = saved.map_or(0, |saved| saved.members);
    let archive_bytes = place.file.is_none().then_some(options.shard_bytes);
    let field = options.column.clone().unwrap_or_else(|| "npy".into());
    if !field.ends_with("npy") || field.len() > 32 || field.contains('/') {
        let why = format!("the field {field:?} cannot hold arrays");
        return Err(Error::refused(&place.folder, why, "its name has to end with npy"));
    }
    let document = Vec::new();
    Ok(Box::new(Tar { place, archive_bytes, field, dtype, file, archives, members, document }))
}

impl Tar {
    /// Ends the archive and begins the next one.
    fn next_archive(&mut self) -> Result<(), Error> {
        self.archives += 1;
        let next = Append::open(&path(&self.place, self.archives), None)?;
        end(std::mem::replace(&mut self.file, next))
    }
}

/// Two blocks of zeros end an archive.
fn end(mut file: Append) -> Result<(), Error> {
    file.write(&[0; 2 * BLOCK])?;
    file.finish(&[])
}

impl Writer for Tar {
    fn tokens(&mut self, bytes: &[u8]) -> Result<Settled, Error> {
        if self.document.len() + bytes.len() > MAX_DOCUMENT_BYTES {
            return Err(too_long(&self.place.folder));
        }
        self.document.extend_from_slice(bytes);
        Ok(Settled::Same)
    }

    fn end_document(&mut self) -> Result<Settled, Error> {
        let tokens = self.document.len() / self.dtype.bytes() as usize;
        let array = npy_header(self.dtype, tokens as u64);
        let bytes = (array.len() + self.document.len()) as u64;
        let full = self.archive_bytes.is_some_and(|most| self.file.len() + bytes > most);
        if full && self.file.len() > 0 {
            self.next_archive()?;
        }
        let mut header = tar::Header::new_ustar();
        header.set_size(bytes);
        header.set_mode(0o644);
        header.set_entry_type(tar::EntryType::Regular);
        let name = format!("{:012}.{}", self.members, self.field);
        header.set_path(name).map_err(Error::write(&self.place.folder))?;
        header.set_cksum();
        self.file.write(header.as_bytes())?;
        self.file.write(&array)?;
        self.file.write(&self.document)?;
        let padding = bytes.next_multiple_of(BLOCK as u64) - bytes;
        self.file.write(&[0; BLOCK][..padding as usize])?;
        self.members += 1;
        self.document.clear();
        Ok(Settled::All)
    }

    fn save(&mut self) -> Result<Value, Error> {
        let (len, archives, members) = (self.file.save()?, self.archives, self.members);
        state(&self.place.folder, &State { len, archives, members })
    }

    fn finish(self: Box<Self>) -> Result<(), Error> {
        end(self.file)
    }
}
