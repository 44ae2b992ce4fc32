//! The catalogue of a storage target: names to files of the places that it exports, and what is in
//! them.
//!
//! A name is that of a file of a place, with or without its ending. What a file holds is decided by
//! [`formats::settle`], as for the local commands: by its header, by a `name.idx` beside it
//! (Megatron), or a flat one by its manifest or the request, against which its bytes are checked.
//! What may be opened at all, whatever a name contains, is decided by the places ([`Opener`]):
//! folders of this machine, or what else holds datasets.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use formats::dochash::{self, ListReader, Subject, WRITE_HINT, Words};
use formats::documents::{Described, Entry, Fingerprint, IndexReader, NO_INDEX_HINT, Sequences};
use formats::manifest::{ENDING, MAX_BYTES, MAX_TURNS, REWRITE_HINT};
use formats::settle::{self, Asked, Cause, Identified, NoTokens, Origin, Refusal};
use formats::{DOCUMENTLESS_HINT, Manifest, ReadAt};
use host::root::Root;
use service::descriptors::make_room;
use service::error::{Error, with_limit_hint};
use tonic::Status;
use xio::dataset::guess::Evidence;
use xio::dataset::{self, BYTES, DatasetError, Dtype, Format, Sniff, TokenFile, npy};
use xio::documents::{Documents, DocumentsError, TargetsBuilder};
use xio::opener::{IoChoice, OpenError, Opener, Reason, Stored};
use xio::sums::FileSums;

use crate::action;
use crate::proto::{DatasetInfo, DatasetRef, DatasetRefusal, ListReply, ListedDataset};

/// Datasets one request may name: those of a blend, and a table.
const MAX_DATASETS: usize = xio::order::MAX_DATASETS + 1;

/// Those of a session: a blend, and the loss weights of its datasets.
const MAX_SERVED: usize = 2 * xio::order::MAX_DATASETS;

/// Datasets that one reply lists.
const MAX_LISTED: usize = 1_000;

/// Files that are looked at for them.
const MAX_LISTED_FILES: usize = 20_000;

/// Fewer datasets than this are opened on one thread, and need no more descriptors than a process
/// may have.
const MANY_DATASETS: usize = 64;

/// Entries of a table of `remap`: four times the largest vocabularies in use.
const MAX_TABLE_IDS: u64 = 1 << 20;

/// Bytes of a file that hold its header: enough for every `.npy` header in use.
const HEAD_BYTES: u64 = 64 << 10;

/// Largest Megatron index that is read, 4 GiB: 200 million documents.
const MAX_INDEX_BYTES: u64 = 4 << 30;

const NAMES_HINT: &str = "names are paths below a --root, with or without .bin or .npy";

const VOCABULARY_HINT: &str = "leave --vocab out: only tokens have a vocabulary";
/// What to do about documents that are too long or too many.
pub(crate) const SPLIT_HINT: &str =
    "split what is too long or too much, or use a plan that needs no documents";

const INSPECT_HINT: &str = "`dquant inspect FILE` shows what is in it";

const NO_INDEX: &str = "has no index beside it that says where its documents are";

const DENIED_HINT: &str = "the user that runs `dquant serve` needs read permission";

/// What a target exports.
#[derive(Debug)]
pub struct Catalog {
    roots: Vec<Box<dyn Opener>>,
    io: IoChoice,
}

/// A dataset that was found and opened.
#[derive(Debug)]
pub struct Found {
    /// For the peer.
    pub info: DatasetInfo,
    /// The open file with the tokens.
    pub file: Box<dyn Stored>,
    /// Where they are in it.
    pub layout: TokenFile,
    /// What its manifest says of its bytes, if it has one.
    pub sums: Option<FileSums>,
    /// Its documents, where they were asked for and it is a file of this machine.
    pub documents: Option<Documents>,
    /// Their hashes, in the same case.
    pub hashes: Option<Vec<u64>>,
    /// Its loss weights, where they were asked for and it has some. Their file is opened for
    /// buffered reads.
    pub loss_weights: Option<Box<Found>>,
}

fn refuse(name: &str, why: impl std::fmt::Display, hint: &str) -> Status {
    Status::invalid_argument(format!("{name}: {why}\n{hint}"))
}

/// A file that is no dataset, with the kind of reason for programs.
struct Refused {
    reason: DatasetRefusal,
    status: Status,
}

impl From<Status> for Refused {
    fn from(status: Status) -> Refused {
        Refused { reason: DatasetRefusal::Unspecified, status }
    }
}

impl From<Refused> for Status {
    fn from(refused: Refused) -> Status {
        refused.status
    }
}

impl DatasetRefusal {
    /// A refusal for this kind of reason.
    fn with(self, status: Status) -> Refused {
        Refused { reason: self, status }
    }
}

/// Does the same with all items, on all cores if there are many; each thread has a function of its
/// own. Of several errors that of the first item counts.
fn each<T: Sync, R: Send, E: Send, F: FnMut(&T) -> Result<R, E>>(
    items: &[T],
    function: impl Fn() -> F + Sync,
) -> Result<Vec<R>, E> {
    if items.len() < MANY_DATASETS {
        return items.iter().map(function()).collect();
    }
    make_room(items.len());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let part = |part: &[T]| part.iter().map(function()).collect::<Result<Vec<R>, E>>();
    let part = &part;
    std::thread::scope(|scope| {
        let parts = items.chunks(items.len().div_ceil(threads));
        let threads: Vec<_> = parts.map(|items| scope.spawn(move || part(items))).collect();
        let mut all = Vec::with_capacity(items.len());
        for thread in threads {
            all.extend(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        }
        Ok(all)
    })
}

impl Catalog {
    /// A catalogue of what `roots` hold: where several hold a name, the first counts.
    pub fn new(roots: Vec<Box<dyn Opener>>, io: IoChoice) -> Catalog {
        Catalog { roots, io }
    }

    /// Finds and opens every dataset, or returns which one cannot be opened.
    pub fn find_all(&self, refs: &[DatasetRef]) -> Result<Vec<Found>, Status> {
        Catalog::check_count(refs)?;
        each(refs, || |dataset| Ok(self.find(dataset, self.io)?))
    }

    /// As [`find_all`](Catalog::find_all), for a session.
    pub(crate) fn find_served(&self, refs: &[DatasetRef]) -> Result<Vec<Found>, Status> {
        check_count(refs, MAX_SERVED)?;
        each(refs, || |dataset| Ok(self.find(dataset, self.io)?))
    }

    /// Describes what lies below the roots under names that begin with `prefix`, as far as one
    /// reply has room.
    pub(crate) fn datasets(&self, prefix: &str) -> Result<ListReply, Status> {
        let (mut names, mut reply) = (BTreeSet::new(), ListReply::default());
        for root in &self.roots {
            let listing = root.list(MAX_LISTED_FILES).map_err(|error| refused_open(&error))?;
            reply.truncated |= listing.truncated;
            reply.skipped += listing.skipped as u64;
            let wanted = |name: &String| name.starts_with(prefix) && !is_beside(name);
            names.extend(listing.entries.into_iter().map(|entry| entry.name).filter(wanted));
        }
        reply.truncated |= names.len() > MAX_LISTED;
        let refs: Vec<DatasetRef> = names
            .into_iter()
            .take(MAX_LISTED)
            .map(|name| DatasetRef { name, ..DatasetRef::default() })
            .collect();
        reply.datasets = each(&refs, || {
            |dataset: &DatasetRef| -> Result<ListedDataset, Status> {
                let name = dataset.name.clone();
                Ok(match self.find(dataset, IoChoice::Buffered) {
                    Ok(found) => {
                        ListedDataset { info: Some(found.info), ..ListedDataset::default() }
                    }
                    Err(Refused { reason, status }) => ListedDataset {
                        info: Some(DatasetInfo { name, ..DatasetInfo::default() }),
                        refused: status.message().lines().next().unwrap_or_default().to_owned(),
                        reason: reason.into(),
                    },
                })
            }
        })?;
        Ok(reply)
    }

    /// Refuses a request for no dataset, or for more than a plan can name.
    pub(crate) fn check_count(refs: &[DatasetRef]) -> Result<(), Status> {
        check_count(refs, MAX_DATASETS)
    }

    /// Finds and reads the table of this name.
    pub(crate) fn table(&self, name: &str) -> Result<Table, Status> {
        Table::read(self.find(&Table::request(name), IoChoice::Buffered)?)
    }

    /// Finds and reads the module of this name: the name as found, and its bytes.
    pub(crate) fn module(&self, name: &str) -> Result<(String, Vec<u8>), Status> {
        for root in &self.roots {
            for ending in ["", action::ENDING] {
                let full = format!("{name}{ending}");
                match root.open(&full, IoChoice::Buffered) {
                    Ok(file) => {
                        let bytes = read(&full, &file, action::READ_BYTES)?;
                        return Ok((full, bytes));
                    }
                    Err(error) if error.reason == Reason::NotFound => {}
                    Err(error) => return Err(refused_open(&error).into()),
                }
            }
        }
        let hint = "a module is named by its path below a --root, with or without .wasm";
        Err(Status::not_found(format!("{name}: no such module below the exported roots\n{hint}")))
    }

    /// Whether the manifest of a dataset says that it has targets.
    pub(crate) fn has_targets(&self, name: &str) -> Result<bool, Status> {
        let manifest =
            self.locate(name, IoChoice::Buffered, |root, name, _| manifest_of(root, &name))?;
        Ok(manifest.is_some_and(|manifest| manifest.targets))
    }

    /// Opens the index of a dataset of this name, to be read once.
    pub(crate) fn index(&self, name: &str) -> Result<IndexReader, Status> {
        let index = self.locate(name, IoChoice::Buffered, |root, name, file| {
            let file_of = |layout: TokenFile| Described {
                bytes: layout.data_bytes(),
                dtype: Some(layout.dtype),
            };
            let size = file.bytes();
            let sniffed = settle::sniff(&file, size);
            let described = match sniffed.map_err(|error| refused_file(&name, error))? {
                Sniff::Npy => {
                    let layout = npy::parse(&read(&name, &file, HEAD_BYTES)?, size);
                    file_of(layout.map_err(|error| refuse(&name, error, INSPECT_HINT))?)
                }
                Sniff::Headed(layout) => file_of(layout),
                _ => Described { bytes: size, dtype: None },
            };
            let index = open_index(root, &name, described)?;
            Ok(index.ok_or_else(|| refuse(&name, NO_INDEX, NO_INDEX_HINT))?)
        });
        Ok(index?)
    }

    /// Opens the hashes of a dataset of this name, to be read once.
    pub(crate) fn hashes(&self, name: &str) -> Result<Words, Status> {
        let found = |root: &dyn Opener, name: String, _| Ok(open_hashes(root, &name)?.1);
        Ok(self.locate(name, IoChoice::Buffered, found)?)
    }

    /// Opens the list of hashes of this name, to be read once.
    pub(crate) fn list(&self, name: &str) -> Result<ListReader, Status> {
        let found = |_: &dyn Opener, name: String, file| {
            let list = ListReader::new(Path::new(&name), file);
            Ok(list.map_err(|error| refused_hashes(&error))?)
        };
        Ok(self.locate(name, IoChoice::Buffered, found)?)
    }

    fn find(&self, dataset: &DatasetRef, io: IoChoice) -> Result<Found, Refused> {
        self.locate(&dataset.name, io, |root, name, file| {
            describe_with_weights(root, name, file, dataset, &mut |_| ())
        })
    }

    /// Opens the file of this name, with or without its ending, and passes it on with its full
    /// name.
    fn locate<R>(
        &self,
        name: &str,
        io: IoChoice,
        found: impl FnOnce(&dyn Opener, String, Box<dyn Stored>) -> Result<R, Refused>,
    ) -> Result<R, Refused> {
        // A folder `web` does not hide `web.bin`, but is reported if there is nothing else.
        let mut irregular = None;
        for root in &self.roots {
            for ending in ["", ".bin", ".npy"] {
                let full = format!("{name}{ending}");
                match root.open(&full, io) {
                    Ok(file) => return found(&**root, full, file),
                    Err(error) if error.reason == Reason::NotFound => {}
                    Err(error) if error.reason == Reason::NotFile => {
                        irregular.get_or_insert(error);
                    }
                    Err(error) => return Err(refused_open(&error)),
                }
            }
        }
        match irregular {
            Some(error) => Err(refused_open(&error)),
            None => Err(Status::not_found(format!(
                "{name}: no such dataset below the exported roots\n{NAMES_HINT}"
            ))
            .into()),
        }
    }
}

fn check_count(refs: &[DatasetRef], most: usize) -> Result<(), Status> {
    if (1..=most).contains(&refs.len()) {
        return Ok(());
    }
    let why = format!("{} datasets named, 1 to {most} allowed", refs.len());
    Err(Status::invalid_argument(why))
}

/// A table of `remap`.
#[derive(Debug)]
pub(crate) struct Table {
    /// For the peer.
    pub(crate) info: DatasetInfo,
    /// Its entries.
    pub(crate) ids: Arc<[u32]>,
}

impl Table {
    /// The request for a table: flat files are taken as `u32`.
    pub(crate) fn request(name: &str) -> DatasetRef {
        DatasetRef {
            name: name.to_owned(),
            dtype: Dtype::U32.to_string(),
            vocabulary: 0,
            ..DatasetRef::default()
        }
    }

    /// The number of entries, from the description of a table.
    ///
    /// # Errors
    /// When it is not one.
    pub(crate) fn ids_of(info: &DatasetInfo) -> Result<u32, Error> {
        let DatasetInfo { name, dtype, tokens, .. } = info;
        let refused = |why: String| {
            let hint =
                "a table of remap is a .npy or a flat file of u32: the new id of each old one";
            Err(Error::invalid(format!("{name}: {why}")).hint(hint))
        };
        match u32::try_from(*tokens) {
            _ if *dtype != Dtype::U32.to_string() => {
                refused(format!("it holds {dtype}, a table of remap holds u32"))
            }
            Ok(ids) if (1..=MAX_TABLE_IDS).contains(&ids.into()) => Ok(ids),
            _ => refused(format!("a table has 1 to {MAX_TABLE_IDS} ids, this has {tokens}")),
        }
    }

    /// Reads a table that was opened for buffered reads.
    fn read(found: Found) -> Result<Table, Status> {
        let Found { info, file, layout, sums, .. } = found;
        Table::ids_of(&info).map_err(|error| {
            let (message, hint) = error.parts();
            Status::invalid_argument(format!("{message}\n{}", hint.unwrap_or_default()))
        })?;
        // Whole, header and all, as the manifest has it.
        let data_offset = layout.data_offset as usize;
        let mut bytes = vec![0; data_offset + layout.data_bytes() as usize];
        let read = file.read_exact_at(&mut bytes, 0);
        read.map_err(|error| Status::internal(format!("{}: {error}", info.name)))?;
        let changed = |what: &str| Status::failed_precondition(format!("{}: {what}", info.name));
        if file.change().is_some() {
            return Err(changed("the table was changed while it was read"));
        }
        if let Some(sums) = sums
            && let Err(differs) = sums.check_whole(&bytes, host::kernels::best().0.crc32c)
        {
            let what = format!("the block at byte {} differs from the manifest", differs.at_byte);
            return Err(changed(&what));
        }
        let ids =
            bytes[data_offset..].as_chunks().0.iter().map(|raw| u32::from_le_bytes(*raw)).collect();
        Ok(Table { info, ids })
    }

    /// Reads a table of this machine by its path.
    pub(crate) fn read_local(path: &str) -> Result<Table, Error> {
        let found = find_file(Path::new(path), &Table::request(""))?;
        Table::read(found).map_err(|status| local_error(&status))
    }

    /// Whether tokens of this type can hold every id.
    pub(crate) fn fits(ids: &[u32], dtype: Dtype) -> bool {
        ids.iter().max().is_none_or(|largest| i128::from(*largest) <= dtype.range().1)
    }
}

/// An error of a file of this machine.
fn local_error(status: &Status) -> Error {
    match status.message().split_once('\n') {
        Some((message, hint)) => Error::invalid(message).hint(hint),
        None => Error::invalid(status.message()),
    }
}

/// Finds and opens a file of this machine by its path, with or without its ending, for buffered
/// reads. The dataset is named as the path was given; the name in `request` does not matter. Its
/// documents are read where the request asks for them.
pub fn find_file(path: &Path, request: &DatasetRef) -> Result<Found, Error> {
    find_file_in(&mut Folder::default(), path, request)
}

/// Finds and opens files as [`find_file`], all in all as fast as it goes.
pub(crate) fn find_files(paths: &[PathBuf], request: &DatasetRef) -> Result<Vec<Found>, Error> {
    each(paths, || {
        let mut folder = Folder::default();
        move |path: &PathBuf| find_file_in(&mut folder, path, request)
    })
}

/// The folder of the file that was found last: thousands of corpora usually lie in one.
#[derive(Default)]
struct Folder(Option<(PathBuf, Root)>);

impl Folder {
    fn open(&mut self, path: &Path) -> Result<&dyn Opener, OpenError> {
        let opened = match self.0.take().filter(|(known, _)| known == path) {
            Some(opened) => opened,
            None => (path.to_owned(), Root::new(path)?),
        };
        let (_, root) = self.0.insert(opened);
        Ok(root)
    }
}

fn find_file_in(folder: &mut Folder, path: &Path, request: &DatasetRef) -> Result<Found, Error> {
    let mut found = find_alone(folder, path, request)?;
    if request.loss_weights {
        // Beside the name that was given, also where that is a link.
        let beside = settle::loss_weights_of(Path::new(&found.info.name));
        found.loss_weights = find_weights(folder, &beside, &found.info)?.map(Box::new);
        found.info.loss_weights =
            found.loss_weights.as_ref().map(|found| Box::new(found.info.clone()));
    }
    Ok(found)
}

/// The loss weights of a file of this machine, if there are any under this name, which may be a
/// link.
fn find_weights(
    folder: &mut Folder,
    path: &Path,
    of: &DatasetInfo,
) -> Result<Option<Found>, Error> {
    match path.symlink_metadata() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        _ => {}
    }
    let shown = path.display().to_string();
    let refused = |error: &dyn std::fmt::Display| Error::invalid(format!("{shown}: {error}"));
    let real = path.canonicalize().map_err(|error| refused(&error))?;
    let name = real.file_name().and_then(|name| name.to_str());
    let (Some(parent), Some(name)) = (real.parent(), name) else {
        return Err(refused(&"its name is not UTF-8"));
    };
    let root = folder.open(parent).map_err(|error| refused(&error))?;
    let found =
        loss_weights(root, name, of.tokens).map_err(|refused| local_error(&refused.status))?;
    Ok(found.map(|found| Found { info: DatasetInfo { name: shown, ..found.info }, ..found }))
}

/// The file itself.
fn find_alone(folder: &mut Folder, path: &Path, request: &DatasetRef) -> Result<Found, Error> {
    let given = path.display().to_string();
    let with = |ending: &str| PathBuf::from(format!("{given}{ending}"));
    let full = ["", ".bin", ".npy"].iter().map(|ending| with(ending)).find(|path| path.is_file());
    let Some(full) = full else {
        let error = if path.is_dir() {
            Error::invalid(format!("{given} is a folder"))
                .hint("name a file in it, or all of them: FOLDER/*.bin")
        } else {
            Error::invalid(format!("{given}: no such file"))
                .hint("a path names a local file, with or without .bin or .npy; dq://HOST/NAME one at a target")
        };
        return Err(error);
    };
    let refused = |error: &dyn std::fmt::Display| Error::invalid(format!("{given}: {error}"));
    // A link is followed: what is served to others has to stay below a root, one's own files need
    // not.
    let real = match full.is_symlink() {
        true => full.canonicalize().map_err(|error| refused(&error))?,
        false => full.clone(),
    };
    let (Some(parent), Some(name)) =
        (real.parent(), real.file_name().and_then(|name| name.to_str()))
    else {
        return Err(refused(&"its name is not UTF-8"));
    };
    let here = Path::new(".");
    let parent = if parent.as_os_str().is_empty() { here } else { parent };
    let root = folder.open(parent).map_err(|error| refused(&error))?;
    let mut index = Index { wants_targets: request.sequences, ..Index::default() };
    let mut open = || {
        let file = root.open(name, IoChoice::Buffered).map_err(|error| refused_open(&error))?;
        describe(root, name.to_owned(), file, request, &mut |entry| index.push(entry))
    };
    let found = open().map_err(|refused| local_error(&refused.status))?;
    let info = DatasetInfo { name: full.display().to_string(), ..found.info };
    let documents = request.documents.then(|| index.finish(info.has_targets)).transpose();
    let documents = documents.map_err(|error| refused(&error).hint(SPLIT_HINT))?;
    let hashes = || {
        let (header, mut words) = open_hashes(root, name)?;
        let hashes = words.next(header.of.documents as usize);
        let hashes = hashes.map_err(|error| refused_hashes(&error))?;
        check_digest(&info.name, info.document_hashes, &hashes)?;
        Ok(hashes)
    };
    let hashes = request.document_hashes.then(hashes).transpose();
    let hashes = hashes.map_err(|status| local_error(&status))?;
    Ok(Found { info, documents, hashes, ..found })
}

/// The documents of a file as they are read from its index.
#[derive(Default)]
struct Index {
    /// Whether targets are wanted.
    wants_targets: bool,
    lengths: Vec<u64>,
    targets: TargetsBuilder,
    /// Whether the next sequence is one of targets: in each document every second is.
    is_target: bool,
}

impl Index {
    fn push(&mut self, entry: Entry) {
        match entry {
            Entry::Sequence(_) if !self.wants_targets => {}
            Entry::Sequence(tokens) => {
                self.targets.push(tokens, self.is_target);
                self.is_target = !self.is_target;
            }
            Entry::Document { tokens, .. } => {
                self.lengths.push(tokens);
                self.is_target = false;
            }
        }
    }

    /// The documents, one after the other.
    fn finish(self, has_targets: bool) -> Result<Documents, DocumentsError> {
        let mut end = 0;
        let documents = Documents::new(self.lengths.iter().map(|tokens| {
            let start = end;
            end += tokens;
            start..end
        }))?;
        let has_targets = has_targets && self.wants_targets;
        Ok(documents.with_targets(has_targets.then(|| self.targets.finish())))
    }
}

/// The error names the file itself, with the ending that was tried.
fn refused_open(error: &OpenError) -> Refused {
    match error.reason {
        Reason::Outside => Status::permission_denied(format!("{error}\n{NAMES_HINT}")).into(),
        Reason::BadName | Reason::NotFile => {
            Status::invalid_argument(format!("{error}\n{NAMES_HINT}")).into()
        }
        Reason::Denied => {
            let status = Status::invalid_argument(format!("{error}\n{DENIED_HINT}"));
            DatasetRefusal::Denied.with(status)
        }
        // The message has a hint of its own.
        Reason::NotFound | Reason::Failed => {
            let status = Status::invalid_argument(with_limit_hint(error, "\n"));
            DatasetRefusal::Unreadable.with(status)
        }
    }
}

/// Passes the lengths of the documents of a file whose format has none: there is an index beside
/// it.
fn read_other_index(
    root: &dyn Opener,
    name: &str,
    layout: &TokenFile,
    note: impl FnMut(Entry),
) -> Result<(), Refused> {
    let of = Described { bytes: layout.data_bytes(), dtype: Some(layout.dtype) };
    let index = open_index(root, name, of)?;
    let index = index.ok_or_else(|| refuse(name, NO_INDEX, NO_INDEX_HINT))?;
    index.read_all(note).map_err(|error| refused_index(name, &error))?;
    Ok(())
}

/// Checks a file against its manifest.
fn agrees(
    manifest: &Manifest,
    name: &str,
    size: u64,
    layout: &TokenFile,
    holds_records: bool,
) -> Result<(), Refusal> {
    // Bytes are those of the tokens, if it describes tokens.
    let stored = if holds_records { manifest.dtype() } else { layout.dtype };
    let tokens = layout.data_bytes() / u64::from(stored.bytes());
    settle::agrees(manifest, (name, size), (stored, tokens))
}

/// Describes an open file. Where its documents are asked for, passes what the index says of them to
/// `each`.
fn describe(
    root: &dyn Opener,
    name: String,
    file: Box<dyn Stored>,
    request: &DatasetRef,
    each: &mut dyn FnMut(Entry),
) -> Result<Found, Refused> {
    refuse_description(&name)?;
    let manifest = manifest_of(root, &name)?;
    let refused = |refusal: Refusal| refused_file(&name, refusal.into());
    let holds_records = request.dtype == BYTES;
    let has_targets = manifest.as_ref().is_some_and(|manifest| manifest.targets);
    let (mut documents, mut single) = (Fingerprint::default(), 0);
    let (mut turns, mut most) = (Sequences::default(), 0);
    let mut note = |entry| {
        if let Entry::Document { tokens, sequences } = entry {
            documents.push(tokens);
            single += u64::from(sequences == 1);
            most = most.max(sequences);
        }
        if has_targets {
            turns.push(entry);
        }
        each(entry);
    };
    let (layout, origin, record_bytes) =
        layout_of((root, &name, &*file), request, manifest.as_ref(), &mut note)?;
    if request.documents && !holds_records && !matches!(layout.format, Format::Megatron { .. }) {
        read_other_index(root, &name, &layout, &mut note)?;
    }
    if let Some(manifest) = &manifest {
        agrees(manifest, &name, file.bytes(), &layout, holds_records).map_err(refused)?;
        if has_targets && request.documents {
            check_index(root, &name, manifest)?;
        }
    }
    if request.sequences && has_targets && most > MAX_TURNS {
        let why =
            format!("a document has {most} sequences in turns, at most {MAX_TURNS} are supported");
        return Err(refuse(&name, why, SPLIT_HINT).into());
    }
    if let Some(vocabulary) = Some(request.vocabulary).filter(|size| *size > 0) {
        let tokens = layout.data_offset..layout.data_offset + layout.data_bytes();
        let evidence = settle::sample(&file, tokens, Some(vocabulary));
        let evidence = evidence.map_err(|error| refused_file(&name, error.into()))?;
        within_vocabulary(vocabulary, manifest.as_ref(), layout.dtype, &evidence)
            .map_err(refused)?;
    }
    let sums = manifest.as_ref().map(|manifest| sums_of(manifest, &name)).transpose()?;
    // Records have no ids.
    let ids = manifest.as_ref().filter(|_| !holds_records);
    let mut info = DatasetInfo {
        name,
        format: layout.format.name().to_owned(),
        dtype: layout.dtype.to_string(),
        tokens: layout.tokens,
        data_offset: layout.data_offset,
        fingerprint: file.identity().version,
        dtype_origin: origin.to_string(),
        tokenizer: ids.and_then(|manifest| manifest.tokenizer.clone()).unwrap_or_default(),
        max_id: ids.and_then(|manifest| u64::try_from(manifest.max_id?).ok()),
        min_id: ids.and_then(below_zero),
        other_part: manifest.as_ref().and_then(|manifest| manifest.other_part()).unwrap_or(0),
        content: manifest.map_or(0, |manifest| manifest.fingerprint()),
        record_bytes,
        documents: if request.documents { documents.value() } else { 0 },
        document_count: documents.documents(),
        single_sequence_documents: single,
        has_targets,
        targets: if has_targets && request.documents { turns.value() } else { 0 },
        sequences: turns.count(),
        ..DatasetInfo::default()
    };
    if request.document_hashes {
        info.document_hashes = current_hashes(root, &info)?;
    }
    Ok(Found { info, file, layout, sums, documents: None, hashes: None, loss_weights: None })
}

/// As [`describe`], with the loss weights beside the file where they are asked for.
fn describe_with_weights(
    root: &dyn Opener,
    name: String,
    file: Box<dyn Stored>,
    request: &DatasetRef,
    each: &mut dyn FnMut(Entry),
) -> Result<Found, Refused> {
    let mut found = describe(root, name, file, request, each)?;
    if request.loss_weights {
        let beside = settle::loss_weights_of(Path::new(&found.info.name));
        let beside = beside.to_string_lossy();
        found.loss_weights = loss_weights(root, &beside, found.info.tokens)?.map(Box::new);
        found.info.loss_weights =
            found.loss_weights.as_ref().map(|found| Box::new(found.info.clone()));
    }
    Ok(found)
}

/// The loss weights of so many tokens under this name, if there are any.
fn loss_weights(root: &dyn Opener, name: &str, tokens: u64) -> Result<Option<Found>, Refused> {
    let file = match root.open(name, IoChoice::Buffered) {
        Ok(file) => file,
        Err(error) if error.reason == Reason::NotFound => return Ok(None),
        Err(error) => return Err(refused_open(&error)),
    };
    let hint = "save them with numpy: numpy.save(NAME, weights.astype(\"float32\"))";
    let head = read(name, &file, HEAD_BYTES)?;
    match npy::parse(&head, file.bytes()) {
        Ok(layout) if layout.dtype == Dtype::F32 => {}
        Ok(layout) => {
            let why = format!("holds {}, and loss weights are float32", layout.dtype);
            return Err(refuse(name, why, hint).into());
        }
        Err(error) => {
            let why = format!("holds no loss weights, which are an array of float32: {error}");
            return Err(refuse(name, why, hint).into());
        }
    }
    let found = describe(root, name.to_owned(), file, &DatasetRef::default(), &mut |_| ())?;
    let Found { layout, .. } = &found;
    if layout.tokens != tokens {
        let why = format!("holds {} loss weights for {tokens} tokens", layout.tokens);
        return Err(refuse(name, why, "write one for each token, in their order").into());
    }
    Ok(Some(found))
}

/// The smallest id, where it is below 0.
fn below_zero(manifest: &Manifest) -> Option<i64> {
    i64::try_from(manifest.min_id?).ok().filter(|id| *id < 0)
}

/// Where the tokens of an open file are, who says their type, and the bytes of a record. Where
/// documents are asked for and its format has them, passes on their lengths.
fn layout_of(
    (root, name, file): (&dyn Opener, &str, &dyn Stored),
    request: &DatasetRef,
    manifest: Option<&Manifest>,
    note: &mut dyn FnMut(Entry),
) -> Result<(TokenFile, Origin, u64), Refused> {
    let sniffed = settle::sniff(&file, file.bytes());
    if request.dtype == BYTES {
        // Records are what the user says; only an array knows better how long they are.
        let is_array = matches!(sniffed, Ok(Sniff::Npy));
        let (layout, bytes) = records_of(name, file, is_array)?;
        return Ok((layout, Origin::Given, bytes));
    }
    let sniffed = sniffed.map_err(|error| refused_file(name, error))?;
    let whole_file = Described { bytes: file.bytes(), dtype: None };
    let index = || open_index(root, name, whole_file);
    match settle::identify(Path::new(name), sniffed, manifest, index)? {
        Identified::Indexed(index) => {
            let read = match request.documents {
                true => index.read_all(note),
                false => index.read_all(|_| ()),
            };
            let read =
                read.map_err(|error| DatasetRefusal::Index.with(refused_index(name, &error)))?;
            return Ok((read, Origin::File, 0));
        }
        Identified::Samples(container) => {
            return Err(refused_file(name, Refusal::from(container.foreign()).into()));
        }
        Identified::Alone | Identified::Index => {}
    }
    let dtype = given_type(name, &request.dtype)?;
    let vocabulary = Some(request.vocabulary).filter(|size| *size > 0);
    let asked = Asked { dtype, vocabulary, ..Asked::default() };
    let found = settle::describe(&file, file.bytes(), asked, manifest);
    let (layout, origin) = found.map_err(|error| refused_file(name, error))?;
    Ok((layout, origin, 0))
}

/// A file that holds no tokens that are read.
fn refused_file(name: &str, error: NoTokens) -> Refused {
    match error {
        NoTokens::Io(error) => {
            DatasetRefusal::Unreadable.with(Status::internal(format!("{name}: {error}")))
        }
        NoTokens::Dataset(error) => {
            DatasetRefusal::Invalid.with(refuse(name, &error, hint_of(&error)))
        }
        NoTokens::Refused(Refusal { why, hint, cause }) => {
            let reason = match cause {
                Cause::Foreign => DatasetRefusal::Foreign,
                Cause::Type => DatasetRefusal::Type,
                Cause::Manifest => DatasetRefusal::Manifest,
            };
            reason.with(refuse(name, why, &hint))
        }
    }
}

/// Whether a file of this name describes a dataset beside it: an index, a manifest, hashes.
fn is_description(name: &str) -> bool {
    name.ends_with(".idx") || settle::is_sidecar(name)
}

/// Whether a file of this name describes a dataset beside it, or holds its loss weights: patterns
/// do not mean it.
pub fn is_beside(name: &str) -> bool {
    is_description(name) || settle::is_loss_weights(name)
}

/// Refuses what describes a dataset.
fn refuse_description(name: &str) -> Result<(), Status> {
    match is_description(name) {
        true => {
            let why = "what describes a dataset, such as an index or a manifest, holds no tokens";
            Err(refuse(name, why, "name the file that it describes"))
        }
        false => Ok(()),
    }
}

/// A file as records, and the bytes of one where the file says them.
fn records_of(name: &str, file: &dyn Stored, is_array: bool) -> Result<(TokenFile, u64), Status> {
    if !is_array {
        return Ok((dataset::bytes(file.bytes()), 0));
    }
    let parsed = npy::parse_records(&read(name, &file, HEAD_BYTES)?, file.bytes());
    parsed.map_err(|error| refuse(name, &error, hint_of(&error)))
}

/// Checks the ids against the vocabulary, which only tokens have.
fn within_vocabulary(
    vocabulary: u64,
    manifest: Option<&Manifest>,
    dtype: Dtype,
    evidence: &Evidence,
) -> Result<(), Refusal> {
    if !dtype.is_token() {
        let why = "it holds no tokens of a vocabulary";
        return Err(Refusal::of_type(why, VOCABULARY_HINT));
    }
    settle::within_vocabulary(vocabulary, manifest, dtype, evidence)
}

/// What to try with a file that is not accepted.
fn hint_of(error: &DatasetError) -> &'static str {
    match error {
        DatasetError::NotTokens { .. }
        | DatasetError::NotInteger { .. }
        | DatasetError::BigEndian { .. } => {
            "if it holds records that are no tokens, such as images: --dtype bytes and window(BYTES OF A RECORD)"
        }
        DatasetError::Documentless { .. } => DOCUMENTLESS_HINT,
        DatasetError::NoRecords { .. } => "save an array of a type of fixed size",
        _ => INSPECT_HINT,
    }
}

/// The token type in the request, if there is one.
fn given_type(name: &str, given: &str) -> Result<Option<Dtype>, Status> {
    let hint = "the types of flat files are u16, u32, i32, u64 and i64, for example --dtype u32; f32, f16 and bf16 for \
                values, bytes for records";
    match given {
        "" => Ok(None),
        given => Dtype::from_name(given)
            .map(Some)
            .ok_or_else(|| refuse(name, format!("token type {given:?} is unknown"), hint)),
    }
}

/// The manifest beside a file, if there is one.
fn manifest_of(root: &dyn Opener, name: &str) -> Result<Option<Manifest>, Refused> {
    let path = format!("{name}{ENDING}");
    let hint = "write it anew with `dquant inspect FILE --write-manifest`, or remove it";
    match root.open(&path, IoChoice::Buffered) {
        Ok(file) if file.bytes() > MAX_BYTES => {
            let why = format!("a manifest of {} bytes is larger than {MAX_BYTES}", file.bytes());
            Err(DatasetRefusal::Manifest.with(refuse(&path, why, hint)))
        }
        Ok(file) => {
            let text = read(&path, &file, MAX_BYTES)?;
            Manifest::parse(&text)
                .map(Some)
                .map_err(|why| DatasetRefusal::Manifest.with(refuse(&path, why, hint)))
        }
        Err(error) if error.reason == Reason::NotFound => Ok(None),
        Err(error) => Err(refused_open(&error)),
    }
}

/// What a manifest says of the bytes of the file `name`.
fn sums_of(manifest: &Manifest, name: &str) -> Result<FileSums, Refused> {
    let base = name.rsplit('/').next().unwrap_or(name);
    let file = manifest.files.iter().find(|file| file.name == base);
    let sums = file.and_then(|file| {
        FileSums::new(manifest.fingerprint(), file.bytes, file.blocks().collect())
    });
    // It has been found to describe this file.
    sums.ok_or_else(|| {
        let why = "its manifest has no checksums of it";
        DatasetRefusal::Manifest.with(refuse(name, why, REWRITE_HINT))
    })
}

/// The index beside a `.bin` or `.npy`, if there is one, which has to describe these tokens.
fn open_index(
    root: &dyn Opener,
    name: &str,
    of: Described,
) -> Result<Option<IndexReader>, Refused> {
    let Some(index) = settle::index_of(Path::new(name)) else {
        return Ok(None);
    };
    let index = index.display().to_string();
    match root.open(&index, IoChoice::Buffered) {
        Ok(file) if file.bytes() > MAX_INDEX_BYTES => {
            let bytes = file.bytes();
            let why = format!("index of {bytes} bytes is larger than {MAX_INDEX_BYTES}");
            Err(DatasetRefusal::Index.with(refuse(&index, why, "split the dataset")))
        }
        Ok(file) => IndexReader::new(Path::new(&index), file, of)
            .map(Some)
            .map_err(|error| DatasetRefusal::Index.with(refused_index(name, &error))),
        Err(error) if error.reason == Reason::NotFound => Ok(None),
        Err(error) => Err(refused_open(&error)),
    }
}

/// Whether the index beside a file is the one that its manifest describes. Where it only tells
/// documents apart, its own checks suffice; where it says what is trained on, another one of the
/// same documents would turn labels around.
fn check_index(root: &dyn Opener, name: &str, manifest: &Manifest) -> Result<(), Status> {
    let Some(index) = settle::index_of(Path::new(name)) else { return Ok(()) };
    let index = index.display().to_string();
    let file = root.open(&index, IoChoice::Buffered).map_err(|error| refused_open(&error))?;
    let base = index.rsplit('/').next().unwrap_or(&index);
    manifest
        .check_file(base, &file)
        .map_err(|why| refuse(&index, format!("is not that of its manifest: {why}"), REWRITE_HINT))
}

/// What hashes of the documents of a dataset have to be of.
pub fn subject(info: &DatasetInfo) -> Subject {
    Subject {
        documents: info.document_count,
        tokens: info.tokens,
        lengths: info.documents,
        file: info.fingerprint,
        content: info.content,
    }
}

/// The hashes beside a file.
fn open_hashes(root: &dyn Opener, name: &str) -> Result<(dochash::Header, Words), Status> {
    let path = format!("{name}{}", dochash::ENDING);
    match root.open(&path, IoChoice::Buffered) {
        Ok(file) => {
            Words::of_sidecar(Path::new(&path), file).map_err(|error| refused_hashes(&error))
        }
        Err(error) if error.reason == Reason::NotFound => {
            Err(refuse(name, "has no hashes of its documents beside it", WRITE_HINT))
        }
        Err(error) => Err(refused_open(&error).into()),
    }
}

/// The digest of the hashes beside a file, which have to be of the documents that were described.
fn current_hashes(root: &dyn Opener, info: &DatasetInfo) -> Result<u64, Status> {
    let (header, _) = open_hashes(root, &info.name)?;
    match header.of.difference(&subject(info)) {
        None => Ok(header.digest),
        Some(why) => {
            let why = format!("the hashes of its documents are stale: {why}");
            Err(refuse(&info.name, why, WRITE_HINT))
        }
    }
}

/// Hashes that cannot be read.
pub(crate) fn refused_hashes(error: &formats::Error) -> Status {
    match error {
        formats::Error::Io { .. } => Status::internal(error.to_string()),
        _ => Status::invalid_argument(format!("{error}\n{}", error.hint())),
    }
}

/// Whether hashes are those that their sidecar was written with.
fn check_digest(name: &str, expected: u64, hashes: &[u64]) -> Result<(), Status> {
    let mut digest = dochash::Digest::default();
    digest.extend(hashes);
    match digest.value() == expected {
        true => Ok(()),
        false => Err(refuse(name, "the hashes of its documents are damaged", WRITE_HINT)),
    }
}

/// Reads a list of hashes of this machine by its path.
///
/// # Errors
/// When it cannot be read, or is no list of hashes.
pub fn read_list(path: &str) -> Result<Vec<u64>, Error> {
    let refused = |error: &formats::Error| local_error(&refused_hashes(error));
    let file = File::open(path).map_err(|error| {
        Error::invalid(format!("{path}: {error}"))
            .hint("name a list of hashes that exists and is readable")
    })?;
    let mut list = ListReader::new(Path::new(path), file).map_err(|error| refused(&error))?;
    let mut hashes = Vec::new();
    loop {
        let more = list.next(1 << 16).map_err(|error| refused(&error))?;
        if more.is_empty() {
            return Ok(hashes);
        }
        hashes.extend(more);
    }
}

/// An index that does not describe the file `name`.
pub(crate) fn refused_index(name: &str, error: &formats::Error) -> Status {
    match error {
        // Which array of the index is wrong with which value; the file may be what is wrong.
        formats::Error::Dataset { source, .. } => refuse(name, source, hint_of(source)),
        formats::Error::Io { .. } => Status::internal(error.to_string()),
        _ => Status::invalid_argument(format!("{error}\n{}", error.hint())),
    }
}

/// The first `bytes` of a file, or all of it.
fn read(name: &str, file: &dyn ReadAt, bytes: u64) -> Result<Vec<u8>, Status> {
    file.head(bytes).map_err(|error| Status::internal(format!("{name}: {error}")))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use formats::ReadOptions;
    use formats::manifest::Contents;
    use xio::dataset::megatron::MAGIC;

    use super::*;

    const TOKENS: u64 = 9_000;

    fn ids() -> Vec<u8> {
        let mix = |i: u64| i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        (1..=TOKENS).flat_map(|i| ((mix(i) % 50_257) as u16).to_le_bytes()).collect()
    }

    /// An index of 16-bit tokens: one document.
    fn index(tokens: u64) -> Vec<u8> {
        let mut index = MAGIC.to_vec();
        index.extend(1_u64.to_le_bytes().iter().chain(&[8]));
        index.extend([1_u64, 2].iter().flat_map(|count| count.to_le_bytes()));
        index.extend((tokens as u32).to_le_bytes());
        index.extend([0_u64, 0, 1].iter().flat_map(|number| number.to_le_bytes()));
        index
    }

    fn llm_c(tokens: u64) -> Vec<u8> {
        let mut header: Vec<u8> =
            [20_240_520, 1, tokens as u32].iter().flat_map(|word| word.to_le_bytes()).collect();
        header.resize(1_024, 0);
        header
    }

    fn request(name: &str) -> DatasetRef {
        DatasetRef { name: name.into(), ..DatasetRef::default() }
    }

    /// A folder that is removed with the test.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("dquant-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir_all(&path).expect("a folder");
            Folder(path)
        }

        fn write(&self, name: &str, bytes: &[u8]) {
            fs::write(self.0.join(name), bytes).expect("writable");
        }

        fn catalog(&self) -> Catalog {
            let root = Root::new(&self.0).expect("it is there");
            Catalog::new(vec![Box::new(root)], IoChoice::Buffered)
        }

        /// What a target says of a file: its format, type and origin, where its tokens begin, and
        /// how many they are.
        fn served(&self, name: &str) -> Result<Answer, String> {
            let found = self.catalog().find_all(&[request(name)]);
            found.map(|found| answer(&found[0])).map_err(|status| status.message().to_owned())
        }

        /// What `cat` and `plan` say.
        fn streamed(&self, name: &str) -> Result<Answer, String> {
            let found = find_file(&self.0.join(name), &request(""));
            found.map(|found| answer(&found)).map_err(|error| format!("{:?}", error.parts()))
        }

        /// What `inspect` and `convert` say.
        fn opened(&self, name: &str) -> Result<Answer, String> {
            let source = formats::open(&self.0.join(name), &ReadOptions::default());
            let source = source.map_err(|error| error.to_string())?;
            let layout = source.layout();
            let run = layout.run.ok_or("it is no run of tokens")?;
            let format = layout.kind.name().to_owned();
            Ok((format, layout.dtype, layout.origin.to_string(), (run.data_offset, run.tokens)))
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    type Answer = (String, Dtype, String, (u64, u64));

    fn answer(found: &Found) -> Answer {
        let (info, layout) = (&found.info, &found.layout);
        let place = (layout.data_offset, layout.tokens);
        (info.format.clone(), layout.dtype, info.dtype_origin.clone(), place)
    }

    /// A target lists what it serves: descriptions of datasets are none, and what no stream can
    /// read has its reason.
    #[test]
    fn a_listing_says_what_streams_can_read() {
        let folder = Folder::new("listing");
        fs::create_dir(folder.0.join("more")).expect("a folder");
        folder.write("web.bin", &ids());
        folder.write("web.idx", &index(TOKENS));
        folder.write("more/rows.bin", &[b"PAR1", ids().as_slice()].concat());
        folder.write("more/code.bin", &ids());
        let listed = |prefix: &str| {
            let reply = folder.catalog().datasets(prefix).expect("it is readable");
            let line = |listed: ListedDataset| {
                let info = listed.info.expect("each has a name");
                (info.name, info.tokens, (listed.reason, listed.refused))
            };
            reply.datasets.into_iter().map(line).collect::<Vec<_>>()
        };
        let all = listed("");
        let names: Vec<&str> = all.iter().map(|(name, ..)| name.as_str()).collect();
        assert_eq!(names, ["more/code.bin", "more/rows.bin", "web.bin"]);
        assert_eq!((all[0].1, all[2].1), (TOKENS, TOKENS));
        let (reason, refused) = &all[1].2;
        assert!(refused.contains("is a Parquet file"), "{all:?}");
        assert_eq!(*reason, i32::from(DatasetRefusal::Foreign));
        assert_eq!((listed("more/"), listed("x")), (all[..2].to_vec(), Vec::new()));
    }

    /// Headers, indices, marks of other formats and names contradict each other, and everyone
    /// settles it the same way.
    #[test]
    fn every_command_and_the_target_say_the_same_of_a_file() {
        let folder = Folder::new("same-answer");
        let (ids, whole) = (ids(), index(TOKENS));
        let behind = |header: &[u8]| [header, &ids].concat();
        let instead = |mark: &[u8]| [mark, &ids[mark.len()..]].concat();
        let lit = [&b"LITPKDS"[..], &1_u64.to_le_bytes(), &[8], &TOKENS.to_le_bytes()].concat();
        let npy = b"\x93NUMPY\x01\x00\x46\x00{'descr': '<u2', 'fortran_order': False, 'shape': (9000,), }         \n";
        assert_eq!(npy.len(), 80);
        let with_header = index(TOKENS + 512);
        let beside = |bytes: &[u8]| Some(bytes.to_vec());
        let flat = |origin, offset| Ok(("flat", origin, (offset, TOKENS)));
        let megatron = Ok(("megatron", "file", (0, TOKENS)));
        let wrong = Err("Megatron .bin is longer");
        let headed = "file: its header of 1024 bytes, as llm.c writes it";
        let packed = "file: its header of 24 bytes, as Lit-GPT writes it";
        for (name, file, beside, expected) in [
            ("plain.bin", ids.clone(), None, flat("guess: ", 0)),
            ("pair.bin", ids.clone(), beside(&whole), megatron),
            ("stale.bin", ids.clone(), beside(&index(7)), wrong),
            ("no-pair.arr", ids.clone(), beside(&whole), flat("guess: ", 0)),
            // Headers of their own.
            ("headed.bin", behind(&llm_c(TOKENS)), beside(&whole), flat(headed, 1_024)),
            ("counted.bin", behind(&llm_c(TOKENS)), beside(&with_header), flat(headed, 1_024)),
            ("packed.bin", behind(&lit), beside(&whole), flat(packed, 24)),
            ("cut.bin", behind(&llm_c(TOKENS + 1)), beside(&with_header), Err("ends early")),
            // Arrays with NumPy's header and, as of OLMo, without.
            ("array.npy", behind(npy), beside(&whole), Ok(("npy", "file", (80, TOKENS)))),
            ("array.bin", behind(npy), beside(&whole), Ok(("npy", "file", (80, TOKENS)))),
            ("olmo.npy", ids.clone(), beside(&whole), megatron),
            ("olmo-alone.npy", ids.clone(), None, flat("guess: ", 0)),
            // Ids that spell a mark.
            ("par.bin", instead(b"PAR1"), beside(&whole), megatron),
            ("zip.npy", instead(b"PK\x03\x04"), beside(&whole), megatron),
            ("zip-alone.bin", instead(b"PK\x03\x04"), None, Err("is a zip archive")),
            ("six.bin", instead(b"ARROW1\x05\x06"), None, flat("guess: ", 0)),
        ] {
            folder.write(name, &file);
            if let Some(index) = beside {
                let name = Path::new(name).with_extension("idx");
                folder.write(&name.to_string_lossy(), &index);
            }
            for answer in [folder.served(name), folder.streamed(name), folder.opened(name)] {
                match (&answer, &expected) {
                    (Ok((format, dtype, origin, place)), Ok((wanted, from, at))) => {
                        let same = (format.as_str(), *dtype, place) == (*wanted, Dtype::U16, at);
                        assert!(same && origin.starts_with(from), "{name}: {answer:?}");
                    }
                    (Err(error), Err(what)) => assert!(error.contains(what), "{name}: {error}"),
                    _ => panic!("{name}: {answer:?}, not {expected:?}"),
                }
            }
            assert_eq!(folder.served(name).ok(), folder.opened(name).ok(), "{name}");
        }
    }

    /// What has to be converted is never a run of tokens for anyone, unless a manifest says so.
    #[test]
    fn samples_between_headers_are_no_run_for_anyone() {
        let folder = Folder::new("no-run");
        let mut tar = [0; 1_024].to_vec();
        tar[257..262].copy_from_slice(b"ustar");
        let behind = |mark: &[u8]| [mark, &ids()].concat();
        for (name, file, what) in [
            ("rows.bin", behind(b"PAR1"), "is a Parquet file"),
            ("rows.npy", behind(b"ARROW1\0\0"), "is an Arrow file"),
            ("members.bin", tar, "is a tar archive"),
            ("stream.arrow", ids(), "is an Arrow file"),
            ("oldest.tar", ids(), "is a tar archive"),
        ] {
            folder.write(name, &file);
            for answer in [folder.served(name), folder.streamed(name)] {
                let error = answer.expect_err("refused");
                assert!(error.contains(what) && error.contains("dquant convert"), "{error}");
            }
            assert!(folder.opened(name).is_err(), "{name}");
            let contents = Contents { tokens: file.len() as u64 / 2, ..Contents::default() };
            let described = ("flat", Dtype::U16);
            let files = [name.into()];
            let manifest = Manifest::create(described, contents, &folder.0, &files, &|_| ());
            manifest.expect("readable").store(&folder.0.join(name)).expect("writable");
            let served = folder.served(name).expect("the manifest says so");
            assert_eq!((served.0.as_str(), served.2.as_str()), ("flat", "manifest"), "{name}");
            assert_eq!(folder.opened(name), Ok(served), "{name}");
        }
    }

    /// The index beside a file with a header is of the tokens behind it, in the description and
    /// when it is sent.
    #[test]
    fn documents_behind_a_header_are_described_and_sent() {
        let folder = Folder::new("headed-documents");
        folder.write("web.bin", &[llm_c(TOKENS), ids()].concat());
        folder.write("web.idx", &index(TOKENS));
        let catalog = folder.catalog();
        let found = catalog.find_all(&[DatasetRef { documents: true, ..request("web") }]);
        assert_eq!(found.expect("it describes them")[0].info.document_count, 1);
        let mut lengths = Vec::new();
        let read = catalog.index("web").expect("it is there").read_all(|entry| lengths.push(entry));
        assert!(read.is_ok(), "{read:?}");
        let document = Entry::Document { tokens: TOKENS, sequences: 1 };
        assert_eq!(lengths, [Entry::Sequence(TOKENS), document]);
    }
}
