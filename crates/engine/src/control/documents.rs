//! Tables of documents on their way from a target to a reader, in pieces.
//!
//! The target reads an index while it sends, so a call holds one block of three arrays and one
//! piece there, however large the index is. The reader trusts nothing: number, tokens and
//! fingerprint of the documents have to be those of the description that it got before, so an index
//! that changed in between is noticed.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use formats::dochash::{Digest, ListReader, WRITE_HINT, Words};
use formats::documents::{Fingerprint, IndexReader, Sequences};
use formats::manifest::MAX_TURNS;
use service::error::Error;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{Instant, timeout_at};
use tokio_stream::Stream;
use tonic::Status;
use xio::documents::{Documents, MAX_DOCUMENTS, MAX_LIST, TARGET_BYTES, TargetsBuilder};

use super::{CALL_TIMEOUT, SAME_VERSION};
use crate::budget::{Budget, Lease};
use crate::catalog::{Catalog, SPLIT_HINT, refused_hashes, refused_index};
use crate::proto::{DatasetInfo, DocumentsReply, DocumentsRequest};

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

/// The same where documents are selected by their hashes, which are sorted.
pub(crate) const HASHED_BYTES: u64 = 64;

/// Bytes of a reader's memory that a sequence takes at most, where they tell the targets.
pub(crate) const SEQUENCE_BYTES: u64 = 2 * TARGET_BYTES;

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
pub(super) struct Readers {
    places: Arc<Semaphore>,
    /// Within which a reader takes a piece.
    piece_limit: Duration,
}

impl Default for Readers {
    fn default() -> Readers {
        Readers { places: Arc::new(Semaphore::new(MAX_READERS)), piece_limit: CALL_TIMEOUT }
    }
}

/// The pieces of a call, and why they end early.
#[derive(Debug)]
pub(super) struct Pieces {
    pieces: mpsc::Receiver<Result<DocumentsReply, Status>>,
    /// The reader did not take one in time: it has to be told, or what it got would seem to be all.
    late: Arc<AtomicBool>,
}

impl Stream for Pieces {
    type Item = Result<DocumentsReply, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let piece = ready!(self.pieces.poll_recv(context));
        let late = || self.late.swap(false, Ordering::Acquire).then(|| Err(too_late()));
        Poll::Ready(piece.or_else(late))
    }
}

fn too_late() -> Status {
    let (piece, all) = (CALL_TIMEOUT.as_secs(), TABLES_TIMEOUT.as_secs());
    let why = format!(
        "a piece of the tables of documents was not taken within {piece} s, or all within {all} s"
    );
    let hint = "the path or the reader is too slow for tables of this size: see the load of both, or split the dataset";
    Status::deadline_exceeded(format!("{why}\n{hint}"))
}

impl Readers {
    /// Begins to read what is asked for. `call` is held until the last piece was taken; `refused`
    /// gets to know why there are fewer.
    ///
    /// # Errors
    /// When too many others read tables.
    pub(super) async fn read(
        &self,
        catalog: Arc<Catalog>,
        asked: DocumentsRequest,
        call: impl Send + 'static,
        refused: impl Fn(&Status) + Send + Sync + 'static,
    ) -> Result<Pieces, Status> {
        let place = tokio::time::timeout(WAIT, Arc::clone(&self.places).acquire_owned()).await;
        let Ok(Ok(place)) = place else {
            let why = format!("{MAX_READERS} readers get tables of documents already");
            return Err(Status::resource_exhausted(format!("{why}\ntry again a little later")));
        };
        let (send, pieces) = mpsc::channel(PIECES);
        let late = Arc::new(AtomicBool::new(false));
        let (is_late, piece_limit) = (Arc::clone(&late), self.piece_limit);
        tokio::spawn(async move {
            let _held = (call, place);
            let deadline = Instant::now() + TABLES_TIMEOUT;
            let mut tables = Tables { catalog, asked, at: 0, current: None };
            loop {
                // File work blocks. No thread waits for the reader.
                let read = tokio::task::spawn_blocking(move || {
                    let piece = tables.next();
                    (tables, piece)
                });
                let Ok((rest, piece)) = read.await else { return };
                tables = rest;
                let Some(piece) = piece.transpose() else { return };
                let is_last = piece.as_ref().inspect_err(|why| refused(why)).is_err();
                let soon = deadline.min(Instant::now() + piece_limit);
                match timeout_at(soon, send.send(piece)).await {
                    Ok(Ok(())) if !is_last => {}
                    // The last, or the reader has left.
                    Ok(_) => return,
                    Err(_) => {
                        is_late.store(true, Ordering::Release);
                        return refused(&too_late());
                    }
                }
            }
        });
        Ok(Pieces { pieces, late })
    }
}

/// What a call sends, as far as it was not sent yet.
struct Tables {
    catalog: Arc<Catalog>,
    asked: DocumentsRequest,
    /// The dataset that is read; their number for the list.
    at: usize,
    /// What is read of it.
    current: Option<Part>,
}

/// What is sent of a dataset, and the list.
enum Part {
    Lengths(IndexReader),
    Hashes(Words),
    List(ListReader),
}

/// Hashes of a piece.
const PIECE_HASHES: usize = PIECE_BYTES / 8;

impl Tables {
    /// Reads the next piece; none behind the last.
    fn next(&mut self) -> Result<Option<DocumentsReply>, Status> {
        loop {
            let part = match self.current.take() {
                Some(part) => part,
                None => match self.begin()? {
                    Some(part) => part,
                    None => return Ok(None),
                },
            };
            let mut piece = DocumentsReply { dataset: self.at as u32, ..DocumentsReply::default() };
            match part {
                Part::Lengths(index) => match self.asked.datasets[self.at].sequences {
                    true => piece.sequences = self.sequences(index)?,
                    false => piece.lengths = self.lengths(index)?,
                },
                Part::Hashes(mut words) => {
                    let hashes =
                        words.next(PIECE_HASHES).map_err(|error| refused_hashes(&error))?;
                    self.current = (!hashes.is_empty()).then_some(Part::Hashes(words));
                    piece.hashes = to_bytes(&hashes);
                    self.at += usize::from(hashes.is_empty());
                }
                Part::List(mut list) => {
                    let hashes = list.next(PIECE_HASHES).map_err(|error| refused_hashes(&error))?;
                    self.current = (!hashes.is_empty()).then_some(Part::List(list));
                    piece.hashes = to_bytes(&hashes);
                    piece.end = hashes.is_empty();
                    self.at += usize::from(hashes.is_empty());
                }
            }
            let is_empty =
                [&piece.lengths, &piece.sequences, &piece.hashes].iter().all(|b| b.is_empty());
            if piece.end || !is_empty {
                return Ok(Some(piece));
            }
        }
    }

    /// Begins with the next dataset, or with the list behind the last.
    fn begin(&mut self) -> Result<Option<Part>, Status> {
        match self.asked.datasets.get(self.at) {
            Some(dataset) if dataset.sequences && !self.catalog.has_targets(&dataset.name)? => {
                let why =
                    format!("{}: its manifest does not say that it has targets", dataset.name);
                Err(Status::invalid_argument(format!("{why}\n{CHANGED_HINT}")))
            }
            Some(dataset) => self.catalog.index(&dataset.name).map(Part::Lengths).map(Some),
            None if self.at == self.asked.datasets.len() && !self.asked.list.is_empty() => {
                self.catalog.list(&self.asked.list).map(Part::List).map(Some)
            }
            None => Ok(None),
        }
    }

    /// The next lengths of the current dataset.
    fn lengths(&mut self, mut index: IndexReader) -> Result<Vec<u8>, Status> {
        let name = &self.asked.datasets[self.at].name;
        let refused = |error| refused_index(name, &error);
        let mut lengths = Vec::with_capacity(PIECE_BYTES);
        while lengths.len() + MAX_VARINT <= PIECE_BYTES {
            let Some(tokens) = index.next_document().map_err(refused)? else {
                self.end(index)?;
                return Ok(lengths);
            };
            put_varint(&mut lengths, length(name, tokens)?);
        }
        self.current = Some(Part::Lengths(index));
        Ok(lengths)
    }

    /// The next sequences of the current dataset, of whole documents.
    fn sequences(&mut self, mut index: IndexReader) -> Result<Vec<u8>, Status> {
        const MOST_BYTES: usize = MAX_TURNS as usize * MAX_VARINT;
        let name = &self.asked.datasets[self.at].name;
        let mut numbers = Vec::with_capacity(PIECE_BYTES);
        while numbers.len() + MOST_BYTES <= PIECE_BYTES {
            let (mut known, begun) = (Sequences::default(), numbers.len());
            let mut put = |entry| match known.push(entry) {
                // One more than fits: it is refused below.
                Some(number) if numbers.len() - begun <= MOST_BYTES => {
                    put_varint(&mut numbers, number);
                }
                _ => {}
            };
            let document = index.next_entries(&mut put);
            let Some(tokens) = document.map_err(|error| refused_index(name, &error))? else {
                self.end(index)?;
                return Ok(numbers);
            };
            length(name, tokens)?;
            if numbers.len() - begun > MOST_BYTES {
                let why = format!("a document has more than {MAX_TURNS} sequences in turns");
                return Err(Status::invalid_argument(format!("{name}: {why}\n{SPLIT_HINT}")));
            }
        }
        self.current = Some(Part::Lengths(index));
        Ok(numbers)
    }

    /// Ends the table of the current dataset.
    fn end(&mut self, index: IndexReader) -> Result<(), Status> {
        let name = &self.asked.datasets[self.at].name;
        index.finish().map_err(|error| refused_index(name, &error))?;
        match self.asked.hashes {
            true => self.current = Some(Part::Hashes(self.catalog.hashes(name)?)),
            false => self.at += 1,
        }
        Ok(())
    }
}

fn to_bytes(hashes: &[u64]) -> Vec<u8> {
    hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect()
}

fn length(name: &str, tokens: u64) -> Result<u32, Status> {
    u32::try_from(tokens).map_err(|_| {
        let why = format!("a document has {tokens} tokens, at most 4,294,967,295 are supported");
        Status::invalid_argument(format!("{name}: {why}\n{SPLIT_HINT}"))
    })
}

/// What a call got.
#[derive(Debug, Default)]
pub struct Received {
    /// The documents of each dataset.
    pub tables: Vec<Documents>,
    /// Their hashes, if they were asked for.
    pub hashes: Vec<Vec<u64>>,
    /// The list of hashes, if one was asked for.
    pub list: Vec<u64>,
    /// The list's share of the memory for tables.
    pub(crate) list_lease: Option<Lease>,
}

/// Tables that arrive.
#[derive(Debug)]
pub(super) struct Arriving<'a> {
    infos: &'a [DatasetInfo],
    /// Where the memory for the list is taken from: it is not known before how long it is.
    budget: &'a Budget,
    /// Whether hashes and a list come, too.
    asked: (bool, bool),
    /// Whether sequences come in place of the lengths of datasets that have targets.
    targets: bool,
    received: Received,
    /// The documents of the next dataset so far, and their hashes.
    lengths: Vec<u32>,
    fingerprint: Fingerprint,
    turns: Option<Turns>,
    hashes: Vec<u64>,
    digest: Digest,
    list_has_ended: bool,
}

/// The sequences of a dataset, as far as they have arrived.
#[derive(Debug)]
struct Turns {
    targets: TargetsBuilder,
    known: Sequences,
    /// Whether the next sequence is one of targets: in each document every second is.
    is_target: bool,
    /// Tokens of the current document so far.
    tokens: u64,
}

impl Turns {
    fn new(sequences: u64) -> Turns {
        // Within the memory for tables.
        let targets = TargetsBuilder::with_capacity(sequences as usize / 2 + 1);
        Turns { targets, known: Sequences::default(), is_target: false, tokens: 0 }
    }

    /// Takes a sequence. The tokens of its document, if that ends with it.
    fn push(&mut self, number: u32) -> Option<u64> {
        let (tokens, is_last) = (u64::from(number >> 1), number & 1 == 1);
        self.known.push_code(number);
        self.targets.push(tokens, self.is_target);
        self.tokens += tokens;
        self.is_target = !self.is_target && !is_last;
        is_last.then(|| std::mem::take(&mut self.tokens))
    }
}

/// What to do when an index is not what it was.
const CHANGED_HINT: &str =
    "open the stream again; if the index changes all the time, let what writes it end first";

/// A target that does not follow the protocol.
fn malformed(text: String) -> Error {
    Error::invalid(text).hint(SAME_VERSION)
}

impl<'a> Arriving<'a> {
    /// The tables of the datasets that were described as `infos`; `asked` says whether hashes and a
    /// list were.
    ///
    /// # Errors
    /// When a description lacks the documents, or has more than are supported.
    pub(super) fn new(
        infos: &'a [DatasetInfo],
        asked: (bool, bool),
        budget: &'a Budget,
    ) -> Result<Arriving<'a>, Error> {
        for DatasetInfo { name, documents, document_count, document_hashes, .. } in infos {
            if *documents == 0 || asked.0 && *document_hashes == 0 {
                return Err(malformed(format!("{name}: the target does not tell its documents")));
            }
            if *document_count > MAX_DOCUMENTS as u64 {
                let text = format!(
                    "{name}: {document_count} documents, at most {MAX_DOCUMENTS} are supported"
                );
                return Err(Error::invalid(text).hint(SPLIT_HINT));
            }
        }
        Ok(Arriving {
            infos,
            budget,
            asked,
            targets: false,
            received: Received::default(),
            lengths: Vec::new(),
            fingerprint: Fingerprint::default(),
            turns: None,
            hashes: Vec::new(),
            digest: Digest::default(),
            list_has_ended: false,
        })
    }

    /// The same, of datasets whose targets are wanted.
    ///
    /// # Errors
    /// When a description says that there are some and not which.
    pub(super) fn with_targets(self, targets: bool) -> Result<Arriving<'a>, Error> {
        let unknown = self.infos.iter().find(|info| info.has_targets && info.targets == 0);
        match unknown.filter(|_| targets) {
            Some(DatasetInfo { name, .. }) => {
                Err(malformed(format!("{name}: the target does not tell its targets")))
            }
            None => Ok(Arriving { targets, ..self }),
        }
    }

    /// Takes the next piece.
    ///
    /// # Errors
    /// When it is invalid, or a table that ends before it is not the described one.
    pub(super) fn take(&mut self, piece: &DocumentsReply) -> Result<(), Error> {
        let dataset = piece.dataset as usize;
        let out_of_order = || malformed(format!("documents of dataset {dataset}, out of order"));
        if dataset < self.received.tables.len() || dataset > self.infos.len() {
            return Err(out_of_order());
        }
        while self.received.tables.len() < dataset {
            self.end_table()?;
        }
        let (hashes, cut) = piece.hashes.as_chunks::<8>();
        let hashes: Vec<u64> = hashes.iter().map(|hash| u64::from_le_bytes(*hash)).collect();
        let Some(info) = self.infos.get(dataset) else {
            if !self.asked.1 || self.list_has_ended || !cut.is_empty() {
                return Err(out_of_order());
            }
            if hashes.is_empty() && !piece.end {
                return Err(malformed("a piece of the list of hashes is empty".into()));
            }
            self.list_has_ended = piece.end;
            match &mut self.received.list_lease {
                Some(lease) => self.budget.grow(lease, piece.hashes.len() as u64)?,
                none => *none = Some(self.budget.take(piece.hashes.len() as u64)?),
            }
            self.received.list.extend(hashes);
            return match self.received.list.len() <= MAX_LIST {
                true => Ok(()),
                false => Err(malformed(format!("the list has more than {MAX_LIST} hashes"))),
            };
        };
        self.take_lengths(info, piece)?;
        let room = info.document_count - self.hashes.len() as u64;
        if !cut.is_empty() || hashes.len() as u64 > if self.asked.0 { room } else { 0 } {
            return Err(malformed(format!("{}: hashes that no document has", info.name)));
        }
        self.digest.extend(&hashes);
        self.hashes.extend(hashes);
        Ok(())
    }

    /// Takes lengths of documents, or their sequences.
    fn take_lengths(&mut self, info: &DatasetInfo, piece: &DocumentsReply) -> Result<(), Error> {
        let wrong = |text: &str| malformed(format!("{}: {text}", info.name));
        let (mut bytes, unasked) = match self.targets {
            true if info.targets != 0 => (&piece.sequences[..], &piece.lengths),
            _ => (&piece.lengths[..], &piece.sequences),
        };
        if !unasked.is_empty() {
            return Err(wrong("lengths or sequences of documents that were not asked for"));
        }
        while !bytes.is_empty() {
            let Some(mut tokens) = take_varint(&mut bytes) else {
                return Err(wrong("a length of its documents is cut off or too large"));
            };
            if self.fingerprint.documents() == info.document_count {
                return Err(changed(info, "more documents"));
            }
            if self.targets && info.targets != 0 {
                let turns = self.turns.get_or_insert_with(|| Turns::new(info.sequences));
                if turns.known.count() == info.sequences {
                    return Err(changed(info, "more sequences"));
                }
                let Some(document) = turns.push(tokens) else { continue };
                let long = |_| wrong("a document has more than 4,294,967,295 tokens");
                tokens = u32::try_from(document).map_err(long)?;
            }
            self.fingerprint.push(tokens.into());
            self.lengths.push(tokens);
        }
        Ok(())
    }

    /// What was received, when the last piece was taken.
    ///
    /// # Errors
    /// When a table is not the described one, and when the list did not end.
    pub(super) fn finish(mut self) -> Result<Received, Error> {
        while self.received.tables.len() < self.infos.len() {
            self.end_table()?;
        }
        if self.asked.1 != self.list_has_ended {
            let text = "the target did not send the whole list of hashes";
            return Err(Error::unreachable(text).hint("see its log, and open the stream again"));
        }
        Ok(self.received)
    }

    fn end_table(&mut self) -> Result<(), Error> {
        let info = &self.infos[self.received.tables.len()];
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
        if self.asked.0 {
            let digest = std::mem::take(&mut self.digest).value();
            let hashes = std::mem::take(&mut self.hashes);
            if (hashes.len() as u64, digest) != (info.document_count, info.document_hashes) {
                let text = format!("{}: the hashes of its documents are damaged", info.name);
                return Err(Error::invalid(text).hint(WRITE_HINT));
            }
            self.received.hashes.push(hashes);
        }
        let table = Documents::contiguous(std::mem::take(&mut self.lengths));
        let table = table.map_err(|error| Error::invalid(format!("{}: {error}", info.name)))?;
        let turns = self.turns.take();
        if turns.as_ref().is_some_and(|turns| turns.known.value() != info.targets) {
            return Err(changed(info, "other sequences"));
        }
        self.received.tables.push(table.with_targets(turns.map(|turns| turns.targets.finish())));
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
    use crate::proto::DatasetRef;

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
        DocumentsReply { dataset, lengths: bytes, ..DocumentsReply::default() }
    }

    fn arrive(infos: &[DatasetInfo], pieces: &[DocumentsReply]) -> Result<Vec<Documents>, Error> {
        Ok(arrive_with((false, false), infos, pieces)?.tables)
    }

    fn arrive_with(
        asked: (bool, bool),
        infos: &[DatasetInfo],
        pieces: &[DocumentsReply],
    ) -> Result<Received, Error> {
        let budget = Budget::documents(100);
        let mut arriving = Arriving::new(infos, asked, &budget)?;
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
        says(&[piece(3, &[1])], "out of order");
        let mut cut = piece(0, &[3, 400]);
        cut.lengths.pop();
        says(&[cut], "cut off");
        let unknown = [DatasetInfo { documents: 0, ..info(&[]) }];
        assert!(arrive(&unknown, &[]).is_err());
        let many = [DatasetInfo { document_count: 300_000_000, ..info(&[]) }];
        assert!(arrive(&many, &[]).is_err());
    }

    /// The numbers of sequences of documents.
    fn numbers(documents: &[&[u32]]) -> Vec<u32> {
        let of = |document: &[u32]| {
            let last = document.len() - 1;
            let numbers = document.iter().enumerate();
            numbers.map(|(at, tokens)| Sequences::code(*tokens, at == last)).collect::<Vec<_>>()
        };
        documents.iter().flat_map(|document| of(document)).collect()
    }

    #[test]
    fn sequences_arrive_in_place_of_lengths() {
        let documents: [&[u32]; 4] = [&[3, 4, 0, 2], &[0], &[0, 5], &[7]];
        let all = numbers(&documents);
        let mut known = Sequences::default();
        all.iter().for_each(|number| known.push_code(*number));
        let lengths: Vec<u32> = documents.iter().map(|document| document.iter().sum()).collect();
        let (targets, sequences) = (known.value(), known.count());
        let chat = DatasetInfo { has_targets: true, targets, sequences, ..info(&lengths) };
        let infos = [info(&[6]), chat];
        let of = |numbers: &[u32]| {
            let DocumentsReply { lengths, .. } = piece(1, numbers);
            DocumentsReply { dataset: 1, sequences: lengths, ..DocumentsReply::default() }
        };
        let arrive = |pieces: &[DocumentsReply]| {
            let budget = Budget::documents(1 << 10);
            let mut arriving =
                Arriving::new(&infos, (false, false), &budget)?.with_targets(true)?;
            pieces.iter().try_for_each(|piece| arriving.take(piece))?;
            arriving.finish()
        };
        let other = piece(0, &[6]);
        let good = [other.clone(), of(&all[..3]), of(&all[3..])];
        let tables = arrive(&good).expect("as described").tables;
        assert_eq!(tables[0].targets(), None);
        assert_eq!(tables[1].lengths(), lengths);
        let runs: Vec<_> = tables[1].targets().expect("it has some").iter().collect();
        assert_eq!(runs, vec![3..14; 1]);
        let says = |pieces: &[DocumentsReply], what: &str| {
            let (text, hint) = arrive(pieces).expect_err(what).parts();
            assert!(text.contains(what) && hint.is_some(), "{text}");
        };
        let moved = numbers(&[&[4, 3, 0, 2], &[0], &[0, 5], &[7]]);
        says(&[other.clone(), of(&moved)], "other sequences");
        says(&[other.clone(), of(&[&all[..], &[2]].concat())], "more documents");
        says(&[other.clone(), of(&all[..7])], "fewer documents");
        let longer = numbers(&[&[3, 4, 0, 2], &[0], &[0, 5], &[0, 0, 7]]);
        says(&[other.clone(), of(&longer)], "more sequences");
        says(&[other.clone(), piece(1, &lengths)], "not asked for");
        says(&[DocumentsReply { sequences: vec![1], ..other.clone() }], "not asked for");
        says(&[other, DocumentsReply { sequences: vec![0x80], ..of(&[]) }], "cut off");
    }

    /// What a reader got is no table if the rest was not sent: it has to be told that it is too
    /// slow.
    #[test]
    fn a_reader_that_is_too_slow_is_told() {
        let folder =
            std::env::temp_dir().join(format!("dquant-slow-tables-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        std::fs::write(folder.join("web.bin"), [0; 6]).expect("a file");
        let numbers = [1_u64, 1, 2].map(u64::to_le_bytes);
        let mut index = xio::dataset::megatron::MAGIC.to_vec();
        index.extend(numbers[0].iter().chain(&[8]).chain(&numbers[1]).chain(&numbers[2]));
        index.extend([3, 0, 0, 0].iter().chain(&[0; 16]).chain(&numbers[0]));
        std::fs::write(folder.join("web.idx"), index).expect("a file");
        let root = host::root::Root::new(&folder).expect("it is there");
        let catalog = Arc::new(Catalog::new(vec![Box::new(root)], host::root::IoChoice::Buffered));
        let dataset = DatasetRef { name: "web".into(), ..DatasetRef::default() };
        let asked = |count| DocumentsRequest {
            datasets: vec![dataset.clone(); count],
            ..DocumentsRequest::default()
        };
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        runtime.expect("threads").block_on(async {
            let limited = |piece_limit| Readers { piece_limit, ..Readers::default() };
            let logged = Arc::new(AtomicBool::new(false));
            let log = Arc::clone(&logged);
            let log = move |_: &Status| log.store(true, Ordering::Relaxed);
            let slow = limited(Duration::from_millis(20));
            let slow = slow.read(Arc::clone(&catalog), asked(8), (), log).await.expect("a place");
            while !logged.load(Ordering::Relaxed) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let got: Vec<_> = tokio_stream::StreamExt::collect(slow).await;
            let why = got.last().and_then(|last| last.as_ref().err()).expect("not the whole");
            assert!(got.len() < 8 && why.message().contains("was not taken"), "{why}");
            let quick = limited(Duration::from_secs(60));
            let quick = quick.read(catalog, asked(8), (), |why| panic!("{why}")).await;
            let got: Vec<_> = tokio_stream::StreamExt::collect(quick.expect("a place")).await;
            assert_eq!(got.iter().filter(|piece| piece.is_ok()).count(), 8);
        });
        std::fs::remove_dir_all(folder).expect("its own");
    }

    #[test]
    fn hashes_and_a_list_arrive_behind_the_lengths() {
        let hashes = |dataset, hashes: &[u64], end| DocumentsReply {
            dataset,
            hashes: to_bytes(hashes),
            end,
            ..DocumentsReply::default()
        };
        let mut digest = Digest::default();
        digest.extend(&[7, 8]);
        let infos = [DatasetInfo { document_hashes: digest.value(), ..info(&[3, 4]) }];
        let good = [
            piece(0, &[3, 4]),
            hashes(0, &[7], false),
            hashes(0, &[8], false),
            hashes(1, &[9], false),
            hashes(1, &[], true),
        ];
        let received = arrive_with((true, true), &infos, &good).expect("as described");
        assert_eq!((received.hashes, received.list), (vec![vec![7, 8]], vec![9]));
        let says = |asked, pieces: &[DocumentsReply], what: &str| {
            let (text, hint) = arrive_with(asked, &infos, pieces).expect_err(what).parts();
            assert!(text.contains(what) && hint.is_some(), "{text}");
        };
        let both = (true, true);
        says(both, &good[..4], "did not send the whole list");
        says(both, &good[..1], "hashes of its documents are damaged");
        says(both, &[good[0].clone(), hashes(0, &[8, 7], false)], "damaged");
        says(both, &[good[0].clone(), hashes(0, &[7, 8, 9], false)], "no document has");
        says((false, true), &good, "no document has");
        says((true, false), &good, "out of order");
        says(both, &[&good[..], &good[3..4]].concat(), "out of order");
        let endless = [&good[..3], &[hashes(1, &[], false)]].concat();
        says(both, &endless, "list of hashes is empty");
        let mut cut = good.clone();
        cut[3].hashes.pop();
        says(both, &cut, "out of order");
        let long = [good[0].clone(), hashes(0, &[7, 8], false), hashes(1, &[1; 13], true)];
        says(both, &long, "104 B: 100 B of 100 B are left");
        let none = [DatasetInfo { document_hashes: 0, ..infos[0].clone() }];
        assert!(arrive_with(both, &none, &good).is_err());
    }
}
