//! Tables of documents on their way from a target to a reader, in pieces.
//!
//! The target reads an index while it sends, so a call holds one block of three arrays and one piece there, however
//! large the index is. The reader trusts nothing: number, tokens and fingerprint of the documents have to be those of
//! the description that it got before, so an index that changed in between is noticed.

use std::sync::Arc;
use std::time::Duration;

use formats::documents::{Fingerprint, IndexReader};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{Instant, timeout_at};
use tonic::Status;
use xio::documents::{Documents, MAX_DOCUMENTS};

use super::CALL_TIMEOUT;
use crate::catalog::{Catalog, SPLIT_HINT, refused_index};
use crate::error::Error;
use crate::proto::{DatasetInfo, DatasetRef, DocumentsReply};

/// Most bytes of a piece.
const PIECE_BYTES: usize = 256 << 10;

/// Pieces that wait for a slow reader, and one beside them.
const PIECES: usize = 2;

/// Calls for tables that a target answers at once; further ones wait.
const MAX_READERS: usize = 8;

/// How long a call waits for one of them to end.
const WAIT: Duration = Duration::from_secs(4);

/// Time for all tables of a stream: of the target to send them, of the reader to get them.
pub(crate) const TABLES_TIMEOUT: Duration = Duration::from_secs(30);

/// Bytes of a reader's memory that a document takes at most while a table arrives, and 12 later.
pub(crate) const DOCUMENT_BYTES: u64 = 28;

/// Bytes of the longest number.
const MAX_VARINT: usize = 5;

/// Appends a number in LEB128.
fn put_varint(into: &mut Vec<u8>, mut number: u32) {
    while number >= 0x80 {
        into.push(number as u8 | 0x80);
        number >>= 7;
    }
    into.push(number as u8);
}

/// Takes a number from the front of `bytes`; none if it is cut off or has more than 32 bits.
fn take_varint(bytes: &mut &[u8]) -> Option<u32> {
    let mut number = 0_u64;
    for at in 0..MAX_VARINT {
        let byte = *bytes.get(at)?;
        number |= u64::from(byte & 0x7f) << (7 * at);
        if byte < 0x80 {
            *bytes = &bytes[at + 1..];
            return u32::try_from(number).ok();
        }
    }
    None
}

/// The calls for tables of one target.
#[derive(Clone, Debug)]
pub(super) struct Readers(Arc<Semaphore>);

impl Default for Readers {
    fn default() -> Readers {
        Readers(Arc::new(Semaphore::new(MAX_READERS)))
    }
}

impl Readers {
    /// Begins to read the tables of `datasets`. `call` is held until the last piece was taken.
    ///
    /// # Errors
    /// When too many others read tables.
    pub(super) async fn read(
        &self,
        catalog: Arc<Catalog>,
        datasets: Vec<DatasetRef>,
        call: impl Send + 'static,
    ) -> Result<mpsc::Receiver<Result<DocumentsReply, Status>>, Status> {
        let place = tokio::time::timeout(WAIT, Arc::clone(&self.0).acquire_owned()).await;
        let Ok(Ok(place)) = place else {
            let why = format!("{MAX_READERS} readers get tables of documents already");
            return Err(Status::resource_exhausted(format!("{why}\ntry again a little later")));
        };
        let (send, receive) = mpsc::channel(PIECES);
        tokio::spawn(async move {
            let _held = (call, place);
            let deadline = Instant::now() + TABLES_TIMEOUT;
            let mut tables = Tables { catalog, datasets, at: 0, current: None };
            loop {
                // File work blocks. No thread waits for the reader.
                let read = tokio::task::spawn_blocking(move || {
                    let piece = tables.next();
                    (tables, piece)
                });
                let Ok((rest, piece)) = read.await else { return };
                tables = rest;
                let Some(piece) = piece.transpose() else { return };
                let is_last = piece.is_err();
                let soon = deadline.min(Instant::now() + CALL_TIMEOUT);
                // A reader that does not take it misses the rest, and notices that.
                if !matches!(timeout_at(soon, send.send(piece)).await, Ok(Ok(()))) || is_last {
                    return;
                }
            }
        });
        Ok(receive)
    }
}

/// The tables of a call, as far as they were not sent yet.
struct Tables {
    catalog: Arc<Catalog>,
    datasets: Vec<DatasetRef>,
    /// The dataset that is read.
    at: usize,
    current: Option<IndexReader>,
}

impl Tables {
    /// Reads the next piece; none behind the last.
    fn next(&mut self) -> Result<Option<DocumentsReply>, Status> {
        while let Some(dataset) = self.datasets.get(self.at) {
            let mut index = match self.current.take() {
                Some(index) => index,
                None => self.catalog.index(&dataset.name)?,
            };
            let refused = |error| refused_index(&dataset.name, &error);
            let (mut lengths, mut is_over) = (Vec::with_capacity(PIECE_BYTES), false);
            while lengths.len() + MAX_VARINT <= PIECE_BYTES && !is_over {
                match index.next_document().map_err(refused)? {
                    Some(tokens) => put_varint(&mut lengths, length(&dataset.name, tokens)?),
                    None => is_over = true,
                }
            }
            let dataset = self.at as u32;
            if is_over {
                self.at += 1;
                index.finish().map_err(refused)?;
            } else {
                self.current = Some(index);
            }
            if !lengths.is_empty() {
                return Ok(Some(DocumentsReply { dataset, lengths }));
            }
        }
        Ok(None)
    }
}

fn length(name: &str, tokens: u64) -> Result<u32, Status> {
    u32::try_from(tokens).map_err(|_| {
        let why = format!("a document has {tokens} tokens, at most 4,294,967,295 are supported");
        Status::invalid_argument(format!("{name}: {why}\n{SPLIT_HINT}"))
    })
}

/// Tables that arrive.
#[derive(Debug)]
pub(super) struct Arriving<'a> {
    infos: &'a [DatasetInfo],
    tables: Vec<Documents>,
    /// The documents of the next one so far.
    lengths: Vec<u32>,
    fingerprint: Fingerprint,
}

/// What to do when an index is not what it was.
const CHANGED_HINT: &str =
    "open the stream again; if the index changes all the time, let what writes it end first";

impl<'a> Arriving<'a> {
    /// The tables of the datasets that were described as `infos`.
    ///
    /// # Errors
    /// When a description lacks the documents, or has more than are supported.
    pub(super) fn new(infos: &'a [DatasetInfo]) -> Result<Arriving<'a>, Error> {
        for DatasetInfo { name, documents, document_count, .. } in infos {
            if *documents == 0 {
                let text = format!("{name}: the target does not tell its documents");
                return Err(Error::invalid(text).hint(super::target::SAME_VERSION));
            }
            if *document_count > MAX_DOCUMENTS as u64 {
                let text = format!(
                    "{name}: {document_count} documents, at most {MAX_DOCUMENTS} are supported"
                );
                return Err(Error::invalid(text).hint(SPLIT_HINT));
            }
        }
        let fingerprint = Fingerprint::default();
        Ok(Arriving { infos, tables: Vec::new(), lengths: Vec::new(), fingerprint })
    }

    /// Takes the next piece.
    ///
    /// # Errors
    /// When it is invalid, or a table that ends before it is not the described one.
    pub(super) fn take(&mut self, piece: &DocumentsReply) -> Result<(), Error> {
        let dataset = piece.dataset as usize;
        let Some(info) = self.infos.get(dataset).filter(|_| dataset >= self.tables.len()) else {
            return Err(Error::invalid(format!("documents of dataset {dataset}, out of order"))
                .hint(super::target::SAME_VERSION));
        };
        while self.tables.len() < dataset {
            self.end_table()?;
        }
        let mut bytes = &piece.lengths[..];
        while !bytes.is_empty() {
            let Some(tokens) = take_varint(&mut bytes) else {
                let text =
                    format!("{}: a length of its documents is cut off or too large", info.name);
                return Err(Error::invalid(text).hint(super::target::SAME_VERSION));
            };
            if self.fingerprint.documents() == info.document_count {
                return Err(changed(info, "more documents"));
            }
            self.fingerprint.push(tokens.into());
            self.lengths.push(tokens);
        }
        Ok(())
    }

    /// The tables, when the last piece was taken.
    ///
    /// # Errors
    /// When a table is not the described one.
    pub(super) fn finish(mut self) -> Result<Vec<Documents>, Error> {
        while self.tables.len() < self.infos.len() {
            self.end_table()?;
        }
        Ok(self.tables)
    }

    fn end_table(&mut self) -> Result<(), Error> {
        let info = &self.infos[self.tables.len()];
        let found = std::mem::take(&mut self.fingerprint);
        if found.documents() != info.document_count {
            return Err(changed(info, "fewer documents"));
        }
        if found.tokens() != info.tokens {
            return Err(changed(info, "another number of tokens"));
        }
        if found.value() != info.documents {
            return Err(changed(info, "documents of other lengths"));
        }
        let table = Documents::contiguous(std::mem::take(&mut self.lengths));
        let table = table.map_err(|error| Error::invalid(format!("{}: {error}", info.name)))?;
        self.tables.push(table);
        Ok(())
    }
}

/// The index is not the one that was described.
fn changed(DatasetInfo { name, .. }: &DatasetInfo, how: &str) -> Error {
    let text = format!("{name}: its index has {how} than when it was described");
    Error::invalid(text).hint(CHANGED_HINT)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(lengths: &[u32]) -> DatasetInfo {
        let mut fingerprint = Fingerprint::default();
        lengths.iter().for_each(|tokens| fingerprint.push((*tokens).into()));
        DatasetInfo {
            name: "web.bin".into(),
            tokens: fingerprint.tokens(),
            documents: fingerprint.value(),
            document_count: fingerprint.documents(),
            ..DatasetInfo::default()
        }
    }

    fn piece(dataset: u32, lengths: &[u32]) -> DocumentsReply {
        let mut bytes = Vec::new();
        lengths.iter().for_each(|tokens| put_varint(&mut bytes, *tokens));
        DocumentsReply { dataset, lengths: bytes }
    }

    fn arrive(infos: &[DatasetInfo], pieces: &[DocumentsReply]) -> Result<Vec<Documents>, Error> {
        let mut arriving = Arriving::new(infos)?;
        pieces.iter().try_for_each(|piece| arriving.take(piece))?;
        arriving.finish()
    }

    #[test]
    fn numbers_survive_the_wire() {
        for number in [0, 1, 127, 128, 300, 16_383, 16_384, 1 << 28, u32::MAX] {
            let mut bytes = Vec::new();
            put_varint(&mut bytes, number);
            bytes.push(7);
            let mut rest = &bytes[..];
            assert_eq!(take_varint(&mut rest), Some(number));
            assert_eq!(rest, [7]);
            assert_eq!(take_varint(&mut &bytes[..bytes.len() - 2]), None, "{number} cut off");
        }
        assert_eq!(take_varint(&mut &[0xff, 0xff, 0xff, 0xff, 0x1f][..]), None, "33 bits");
        assert_eq!(take_varint(&mut &[0x80, 0x80, 0x80, 0x80, 0x80, 0][..]), None, "six bytes");
    }

    #[test]
    fn tables_arrive_in_pieces() {
        let all = [3, 0, 700, 1 << 20];
        let infos = [info(&[]), info(&all), info(&[]), info(&[5])];
        let pieces = [piece(1, &all[..1]), piece(1, &all[1..]), piece(3, &[5])];
        let tables = arrive(&infos, &pieces).expect("as described");
        let lengths: Vec<&[u32]> = tables.iter().map(Documents::lengths).collect();
        assert_eq!(lengths, [&[][..], &all, &[], &[5]]);
        assert_eq!(tables[1].range(2), 3..703);
    }

    #[test]
    fn tables_that_were_not_described_are_refused() {
        let infos = [info(&[3, 4]), info(&[5])];
        let one = [piece(0, &[3, 4]), piece(1, &[5])];
        assert!(arrive(&infos, &one).is_ok());
        let says = |pieces: &[DocumentsReply], what: &str| {
            let (text, hint) = arrive(&infos, pieces).expect_err(what).parts();
            assert!(text.contains(what) && hint.is_some(), "{text}");
        };
        says(&one[..1], "fewer documents");
        says(&one[1..], "fewer documents");
        says(&[piece(0, &[3, 4, 0])], "more documents");
        says(&[piece(0, &[3, 5]), piece(1, &[5])], "another number of tokens");
        says(&[piece(0, &[4, 3]), piece(1, &[5])], "documents of other lengths");
        says(&[piece(1, &[])], "fewer documents");
        says(&[piece(0, &[3, 4]), piece(1, &[5]), piece(0, &[3])], "out of order");
        says(&[piece(2, &[1])], "out of order");
        let mut cut = piece(0, &[3, 400]);
        cut.lengths.pop();
        says(&[cut], "cut off");
        let unknown = [DatasetInfo { documents: 0, ..info(&[]) }];
        assert!(arrive(&unknown, &[]).is_err());
        let many = [DatasetInfo { document_count: 300_000_000, ..info(&[]) }];
        assert!(arrive(&many, &[]).is_err());
    }
}
