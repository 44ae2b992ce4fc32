//! The store in one file, for the brains of one machine.
//!
//! The file is a redb database with three tables: `meta` (the format and the last term),
//! `snapshot`, and `log`, whose records are under the number of bytes before them. Snapshot and
//! records are signed. Each call is one durable transaction, so a process may be killed at any
//! instant.
//!
//! **The lease** is the lock of the file, which the kernel takes back when a process ends, however
//! it ends. Who gets it raises the term, durably. The others are told who has it by a second file,
//! `PATH.holder`; they never depend on what it says. After a failed write the file is closed and
//! with it the lease given up: the next claim opens it again, in a new term, and finds what is
//! really there.
//!
//! The file has mode 0600: a user who may read a file may lock it. A file that was removed or
//! replaced while a brain had it is not that brain's any more, whatever lock it holds: another
//! brain may lead with the file that is at the path now. So the path is compared with the open file
//! before each write and each renewal, and a file that was there and is missing is not made anew.
//!
//! A new file is made under another name and moved to its place when it is whole, so `PATH` never
//! is half a database.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, TryLockError};

use nic::local_files::{Holder as LockHolder, create_private, hide_at};
use parfait::brain::{Image, Lease, StorageError};
use redb::backends::FileBackend;
use redb::{
    Builder, Database, DatabaseError, ReadableDatabase, ReadableTable, TableDefinition, TableError,
};

use super::signed::{self, Chain, SignedLog, Signer, signature_of};
use super::{Candidate, Failure, Holder, Report, SetupError, Store, Tally, lock};
use crate::keys::{Keys, Signature};

/// The format that is written, and the only one that is read.
pub const FORMAT: u64 = 2;

/// The format without signatures.
const UNSIGNED_FORMAT: u64 = 1;

/// Memory for pages that were read: the file is read once, when it is opened.
const CACHE_BYTES: usize = 16 << 20;

/// More than a holder's file ever has.
const MAX_HOLDER_BYTES: u64 = 1024;

const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
const SNAPSHOT: TableDefinition<(), &[u8]> = TableDefinition::new("snapshot");
const LOG: TableDefinition<u64, &[u8]> = TableDefinition::new("log");

/// See the module's text.
#[derive(Debug)]
pub struct FileStore {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    signer: Signer,
    /// This brain, while it has the lease. Claims read it without waiting for a write.
    held: Mutex<Option<(Holder, Identity)>>,
    log: Mutex<Log>,
    tally: Tally,
    /// Whether the file has existed since this process began.
    has_existed: AtomicBool,
}

/// Device and inode of a file.
type Identity = (u64, u64);

#[derive(Debug, Default)]
struct Log {
    /// Open while this brain has the lease.
    database: Option<Database>,
    /// The last opening; only its writes are carried out.
    opening: Option<u64>,
}

impl FileStore {
    /// The store in that file, which is made when the first brain claims the lease, if it does not
    /// exist.
    ///
    /// # Errors
    /// When the file is of another format, none of a brain, not signed with these keys, damaged, or
    /// cannot be opened.
    pub fn new(path: &Path, keys: &Keys) -> Result<FileStore, SetupError> {
        let shared = Shared {
            path: path.to_path_buf(),
            signer: Signer::new(keys, ""),
            held: Mutex::default(),
            log: Mutex::default(),
            tally: Tally::default(),
            has_existed: AtomicBool::new(false),
        };
        match shared.open_existing() {
            Ok(database) => {
                let read = read_image(&database, &mut Chain::signed([&shared.signer]));
                drop(database);
                read.map_err(|failure| setup_error(path, failure))?;
                Ok(FileStore { shared: Arc::new(shared) })
            }
            Err(Refusal::Locked | Refusal::Missing) => Ok(FileStore { shared: Arc::new(shared) }),
            Err(Refusal::Unusable(error)) => Err(error),
            Err(Refusal::Failed(failure)) => Err(setup_error(path, failure)),
        }
    }

    /// Signs the log in that file anew: one without signatures, or one that was signed with `old`
    /// keys. All of it or nothing.
    ///
    /// # Errors
    /// When the file cannot be opened, a brain uses it, or it is signed with other keys.
    pub fn sign_log(path: &Path, keys: &Keys, old: Option<&Keys>) -> Result<SignedLog, SetupError> {
        let (own, old) = (Signer::new(keys, ""), old.map(|old| Signer::new(old, "")));
        let unopened = |reason: &str| SetupError::Unopened {
            path: path.to_path_buf(),
            reason: reason.to_owned(),
        };
        let (database, format) = match open_any(path) {
            Ok(opened) => opened,
            Err(Refusal::Unusable(error)) => return Err(error),
            Err(Refusal::Failed(failure)) => return Err(unopened(&failure.reason)),
            Err(Refusal::Missing) => return Err(unopened("there is no such file")),
            Err(Refusal::Locked) => {
                let reason = "a brain uses it: stop it first".to_owned();
                return Err(SetupError::Busy { place: path.display().to_string(), reason });
            }
        };
        let mut chain = match format {
            UNSIGNED_FORMAT => Chain::unsigned(),
            FORMAT => Chain::signed(old.iter().chain([&own])),
            found => {
                let path = path.to_path_buf();
                return Err(SetupError::Format { path, found, supported: FORMAT });
            }
        };
        let signed = read_image(&database, &mut chain).and_then(|image| {
            rewrite(&database, &own, &image)?;
            Ok(SignedLog::of(&image, &chain, &own))
        });
        signed.map_err(|failure| setup_error(path, failure))
    }

    /// Carries out a call that waits for the disk.
    async fn blocking<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Shared) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let shared = self.shared.clone();
        tokio::task::spawn_blocking(move || call(&shared))
            .await
            .unwrap_or_else(|error| Err(Failure::unavailable(error.to_string())))
    }
}

impl Store for FileStore {
    async fn claim(&self, candidate: &Candidate) -> Result<Holder, StorageError> {
        let held = lock(&self.shared.held).clone();
        let claimed = match held {
            Some(_) => self.blocking(|shared| shared.keep_lease()).await,
            None => {
                let candidate = candidate.clone();
                self.blocking(move |shared| shared.take_lease(&candidate)).await
            }
        };
        self.shared.tally.record(claimed, |counters| counters.claims += 1)
    }

    async fn resign(&self, candidate: &Candidate) -> Result<(), StorageError> {
        let number = candidate.number;
        let resigned = self.blocking(move |shared| shared.resign(number)).await;
        self.shared.tally.record(resigned, |_| {})
    }

    async fn open(&self, term: u64, opening: u64) -> Result<Image, StorageError> {
        let opened = self.blocking(move |shared| shared.open_log(term, opening)).await;
        self.shared.tally.record(opened, |counters| counters.openings += 1)
    }

    async fn append(&self, opening: u64, at: u64, record: Vec<u8>) -> Result<(), StorageError> {
        let length = record.len() as u64;
        let appended = self.blocking(move |shared| {
            shared.write(opening, |database| append(database, &shared.signer, at, &record))
        });
        self.shared.tally.record(appended.await, |counters| {
            counters.appends += 1;
            counters.appended_bytes += length;
        })
    }

    async fn snapshot(&self, opening: u64, snapshot: Vec<u8>) -> Result<(), StorageError> {
        let length = snapshot.len() as u64;
        let stored = self.blocking(move |shared| {
            shared.write(opening, |database| replace_snapshot(database, &shared.signer, &snapshot))
        });
        self.shared.tally.record(stored.await, |counters| {
            counters.snapshots += 1;
            counters.snapshot_bytes += length;
        })
    }

    fn report(&self) -> Report {
        lock(&self.shared.tally.0).clone()
    }
}

/// Why the file is not opened.
enum Refusal {
    /// Another process has it.
    Locked,
    /// There is none.
    Missing,
    /// No later attempt can succeed.
    Unusable(SetupError),
    /// A later attempt may succeed.
    Failed(Failure),
}

impl Shared {
    fn take_lease(&self, candidate: &Candidate) -> Result<Holder, Failure> {
        let mut log = match self.log.try_lock() {
            Ok(log) => log,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                return Err(Failure::unavailable("the call before is not done"));
            }
        };
        if let Some((holder, _)) = &*lock(&self.held) {
            return Ok(holder.clone());
        }
        // A file that was given up without the log's lock, as a write may take long.
        log.database = None;
        let mut before = self.identity();
        let opened = match self.open_existing() {
            Err(Refusal::Missing) if self.has_existed.load(Ordering::Relaxed) => {
                return Err(Failure::unavailable(format!(
                    "{} was removed: put it back, or start the brain again to begin without jobs",
                    self.path.display()
                )));
            }
            Err(Refusal::Missing) => {
                self.create(candidate.number)?;
                before = self.identity();
                self.open_existing()
            }
            other => other,
        };
        let database = match opened {
            Ok(database) => database,
            Err(Refusal::Locked) => return self.other_holder(candidate),
            Err(Refusal::Missing) => return Err(Failure::unavailable("the file was removed")),
            Err(Refusal::Unusable(error)) => return Err(Failure::unavailable(error.to_string())),
            Err(Refusal::Failed(failure)) => return Err(failure),
        };
        let identity = self.identity()?;
        if before.ok() != Some(identity) {
            return Err(self.replaced());
        }
        let term = raise_term(&database).map_err(failure)?;
        let lease = Lease { holder: candidate.number, term };
        let holder = Holder { lease, address: candidate.address.clone() };
        *log = Log { database: Some(database), opening: log.opening };
        *lock(&self.held) = Some((holder.clone(), identity));
        self.tally.count(|counters| counters.leases_taken += 1);
        // Without it the others know that someone has the lease, and no more.
        let _ = self.write_holder(&holder);
        Ok(holder)
    }

    /// The lease, if the file at the path is still the one that is open.
    fn keep_lease(&self) -> Result<Holder, Failure> {
        let held = lock(&self.held).clone();
        let Some((holder, identity)) = held else {
            return Err(Failure::unavailable("the lease was given up"));
        };
        match self.identity() {
            Ok(found) if found == identity => Ok(holder),
            _ => {
                *lock(&self.held) = None;
                Err(self.replaced())
            }
        }
    }

    fn identity(&self) -> Result<Identity, Failure> {
        let found = fs::metadata(&self.path);
        found.map(|found| (found.dev(), found.ino())).map_err(|_| self.replaced())
    }

    fn replaced(&self) -> Failure {
        Failure::unavailable(format!(
            "{} was removed or replaced while this brain had it: it leads no more",
            self.path.display()
        ))
    }

    fn open_existing(&self) -> Result<Database, Refusal> {
        let opened = self.open_file();
        if !matches!(opened, Err(Refusal::Missing)) {
            self.has_existed.store(true, Ordering::Relaxed);
        }
        opened
    }

    fn open_file(&self) -> Result<Database, Refusal> {
        let path = self.path.clone();
        // Where that fails, opening says why. A file of something else stays as it is.
        if is_database(&path) {
            let _ = hide_at(&path);
        }
        let error = match open_any(&path)? {
            (database, FORMAT) => return Ok(database),
            (_, UNSIGNED_FORMAT) => {
                let Failure { reason, .. } = Failure::unsigned("the log, of format 1,");
                SetupError::Unsigned { place: path.display().to_string(), reason }
            }
            (_, found) => SetupError::Format { path, found, supported: FORMAT },
        };
        Err(Refusal::Unusable(error))
    }

    /// Makes an empty file. If another brain is faster, its file stays.
    fn create(&self, number: u64) -> Result<(), Failure> {
        let new = with_suffix(&self.path, &format!(".new-{number}"));
        let made =
            create(&new).map_err(failure).and_then(|()| match fs::hard_link(&new, &self.path) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                    Err(failure(redb::Error::Io(error)))
                }
                _ => sync_folder(&self.path).map_err(|error| failure(redb::Error::Io(error))),
            });
        let _ = fs::remove_file(&new);
        made
    }

    fn holder_path(&self) -> PathBuf {
        with_suffix(&self.path, ".holder")
    }

    fn write_holder(&self, holder: &Holder) -> io::Result<()> {
        let path = self.holder_path();
        let new = with_suffix(&path, ".new");
        let Holder { lease, address } = holder;
        let words = format!("{} {} {address}", lease.term, lease.holder);
        let text = format!("{}\n", self.signer.holder_text(&words));
        let written = create_private(&new)
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .and_then(|()| fs::rename(&new, path));
        if written.is_err() {
            let _ = fs::remove_file(new);
        }
        written
    }

    /// Who has the lease, if another has: the file may be missing, or that of the holder before.
    fn other_holder(&self, candidate: &Candidate) -> Result<Holder, Failure> {
        let process = fs::metadata(&self.path)
            .map_or_else(|_| LockHolder::default(), |found| LockHolder::of(&found));
        if process.is_foreign() {
            let path = self.path.display();
            return Err(Failure::unavailable(format!(
                "{process} has locked {path}: end that process, no other user can open the file from now on"
            )));
        }
        let mut text = String::new();
        let read = File::open(self.holder_path())
            .and_then(|file| file.take(MAX_HOLDER_BYTES).read_to_string(&mut text));
        let holder = read.ok().and_then(|_| parse_holder(&self.signer, &text));
        holder
            .filter(|holder| holder.lease.holder != candidate.number)
            .ok_or_else(|| Failure::unavailable(format!("{process} has the file")))
    }

    fn resign(&self, number: u64) -> Result<(), Failure> {
        let mut log = lock(&self.log);
        let held = lock(&self.held).clone();
        if held.is_some_and(|(holder, _)| holder.lease.holder == number) {
            let _ = fs::remove_file(self.holder_path());
            self.give_up(&mut log);
        }
        Ok(())
    }

    /// Closes the file, which gives the lease back.
    fn give_up(&self, log: &mut Log) {
        *lock(&self.held) = None;
        log.database = None;
    }

    fn open_log(&self, term: u64, opening: u64) -> Result<Image, Failure> {
        let mut log = lock(&self.log);
        let held = lock(&self.held).as_ref().map(|(holder, _)| holder.lease.term);
        if held != Some(term) {
            return Err(Failure::fenced(format!("the lease of term {term} is lost")));
        }
        if let Some(last) = log.opening.filter(|last| *last >= opening) {
            return Err(Failure::fenced(format!("opening {opening} is overtaken by {last}")));
        }
        log.opening = Some(opening);
        let Some(database) = &log.database else {
            return Err(Failure::unavailable("the file is closed"));
        };
        let read = read_image(database, &mut Chain::signed([&self.signer]));
        if read.is_err() {
            self.give_up(&mut log);
        }
        read
    }

    /// Carries out a write of that opening.
    fn write(
        &self,
        opening: u64,
        write: impl FnOnce(&Database) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let mut log = lock(&self.log);
        let database = match &log.database {
            Some(database) if log.opening == Some(opening) => database,
            _ => return Err(Failure::fenced(format!("opening {opening} is over"))),
        };
        let held = lock(&self.held).as_ref().map(|(_, identity)| *identity);
        let written = match self.identity() {
            Ok(found) if held == Some(found) => write(database),
            _ => Err(self.replaced()),
        };
        if written.is_err() {
            self.give_up(&mut log);
        }
        written
    }
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_os_string();
    name.push(suffix);
    PathBuf::from(name)
}

/// Makes a new name in the folder of `path` durable.
fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

fn parse_holder(signer: &Signer, text: &str) -> Option<Holder> {
    let (term, words) = signer.holder_words(text.strip_suffix('\n')?)?.split_once(' ')?;
    signed::holder(words, term.parse().ok()?)
}

fn setup_error(path: &Path, failure: Failure) -> SetupError {
    let Failure { error, reason } = failure;
    match error {
        StorageError::Unsigned => {
            SetupError::Unsigned { place: path.display().to_string(), reason }
        }
        _ => SetupError::Unopened { path: path.to_path_buf(), reason },
    }
}

/// A file of a brain, and its format.
fn open_any(path: &Path) -> Result<(Database, u64), Refusal> {
    let foreign = |error: String| {
        Refusal::Unusable(SetupError::Foreign { path: path.to_path_buf(), reason: error })
    };
    let opened =
        Builder::new().set_cache_size(CACHE_BYTES).set_check_integrity_on_open(true).open(path);
    let database = match opened {
        Ok(database) => database,
        Err(DatabaseError::DatabaseAlreadyOpen) => return Err(Refusal::Locked),
        Err(DatabaseError::Storage(redb::StorageError::Io(error)))
            if error.kind() == ErrorKind::NotFound =>
        {
            return Err(Refusal::Missing);
        }
        Err(DatabaseError::Storage(redb::StorageError::Io(error)))
            if error.kind() != ErrorKind::InvalidData =>
        {
            return Err(Refusal::Failed(failure(redb::Error::Io(error))));
        }
        Err(error) => return Err(foreign(error.to_string())),
    };
    let format = format(&database).map_err(|error| foreign(error.to_string()))?;
    Ok((database, format))
}

fn failure(error: impl Into<redb::Error>) -> Failure {
    let error = error.into();
    let is_full = match &error {
        redb::Error::Io(error) => matches!(
            error.kind(),
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge
        ),
        _ => false,
    };
    let kind = if is_full { StorageError::Full } else { StorageError::Unavailable };
    Failure { error: kind, reason: error.to_string() }
}

fn create(path: &Path) -> Result<(), redb::Error> {
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
    let backend = FileBackend::new(file)?;
    let database = Builder::new().set_cache_size(CACHE_BYTES).create_with_backend(backend)?;
    let transaction = database.begin_write()?;
    {
        let mut meta = transaction.open_table(META)?;
        meta.insert("format", FORMAT)?;
        meta.insert("term", 0)?;
        transaction.open_table(SNAPSHOT)?;
        transaction.open_table(LOG)?;
    }
    transaction.commit()?;
    database.close()?;
    Ok(())
}

/// The format of the file; 0 where it says none.
fn format(database: &Database) -> Result<u64, redb::Error> {
    let transaction = database.begin_read()?;
    let meta = match transaction.open_table(META) {
        Err(TableError::TableDoesNotExist(_)) => return Ok(0),
        other => other?,
    };
    Ok(meta.get("format")?.map_or(0, |format| format.value()))
}

/// Whether a file begins as databases of this kind do.
fn is_database(path: &Path) -> bool {
    let mut start = [0; 4];
    File::open(path).and_then(|mut file| file.read_exact(&mut start)).is_ok() && start == *b"redb"
}

fn raise_term(database: &Database) -> Result<u64, redb::Error> {
    let transaction = database.begin_write()?;
    let term = {
        let mut meta = transaction.open_table(META)?;
        let last = meta.get("term")?.map_or(0, |term| term.value());
        let term = last.checked_add(1).ok_or_else(|| {
            redb::Error::Corrupted("the term of the file cannot be raised".to_string())
        })?;
        meta.insert("term", term)?;
        term
    };
    transaction.commit()?;
    Ok(term)
}

fn read_image(database: &Database, chain: &mut Chain<'_>) -> Result<Image, Failure> {
    let mut image = Image::default();
    let transaction = database.begin_read().map_err(failure)?;
    let snapshot = transaction.open_table(SNAPSHOT).map_err(failure)?;
    if let Some(value) = snapshot.get(()).map_err(failure)? {
        image.snapshot = chain.snapshot(value.value())?.to_vec();
    }
    let log = transaction.open_table(LOG).map_err(failure)?;
    for piece in log.iter().map_err(failure)? {
        let (at, value) = piece.map_err(failure)?;
        if at.value() != image.log.len() as u64 {
            let reason = format!("bytes {} to {} are missing", image.log.len(), at.value());
            return Err(Failure::unavailable(reason));
        }
        image.log.extend_from_slice(chain.record(at.value(), value.value())?);
    }
    Ok(image)
}

/// A record as it is stored.
struct Piece {
    start: u64,
    signature: Signature,
    /// Bytes of the log.
    length: u64,
}

/// The last record that begins before that byte of the log.
fn piece_before(
    log: &impl ReadableTable<u64, &'static [u8]>,
    at: u64,
) -> Result<Option<Piece>, Failure> {
    let mut before = log.range(..at).map_err(failure)?;
    let Some(piece) = before.next_back() else { return Ok(None) };
    let (start, value) = piece.map_err(failure)?;
    let start = start.value();
    let (signature, bytes) = value
        .value()
        .split_first_chunk()
        .ok_or_else(|| Failure::unsigned(&format!("the record at byte {start} of the log")))?;
    Ok(Some(Piece { start, signature: *signature, length: bytes.len() as u64 }))
}

fn append(database: &Database, signer: &Signer, at: u64, record: &[u8]) -> Result<(), Failure> {
    let transaction = database.begin_write().map_err(failure)?;
    {
        let snapshot = transaction.open_table(SNAPSHOT).map_err(failure)?;
        let root = snapshot.get(()).map_err(failure)?;
        let root = root.and_then(|value| signature_of(value.value())).unwrap_or_default();
        let mut log = transaction.open_table(LOG).map_err(failure)?;
        log.retain_in(at.., |_, _| false).map_err(failure)?;
        let last = piece_before(&log, at)?;
        let end = last.as_ref().map_or(0, |last| last.start + last.length);
        if end < at {
            return Err(Failure::unavailable(format!("byte {at} is behind the log's end")));
        }
        let behind = match last {
            None => root,
            Some(last) if end == at => last.signature,
            Some(Piece { start, signature, .. }) => {
                let value = log.get(start).map_err(failure)?;
                let value = value.map_or_else(Vec::new, |value| value.value().to_vec());
                let kept = &value[signature.len()..][..(at - start) as usize];
                let before = piece_before(&log, start)?.map_or(root, |piece| piece.signature);
                let (signature, value) = signer.record_value(&before, start, kept);
                log.insert(start, &value[..]).map_err(failure)?;
                signature
            }
        };
        let (_, value) = signer.record_value(&behind, at, record);
        log.insert(at, &value[..]).map_err(failure)?;
    }
    transaction.commit().map_err(failure)
}

fn replace_snapshot(database: &Database, signer: &Signer, snapshot: &[u8]) -> Result<(), Failure> {
    let transaction = database.begin_write().map_err(failure)?;
    {
        let mut table = transaction.open_table(SNAPSHOT).map_err(failure)?;
        table.insert((), &signer.snapshot_value(snapshot).1[..]).map_err(failure)?;
        let mut log = transaction.open_table(LOG).map_err(failure)?;
        log.retain(|_, _| false).map_err(failure)?;
    }
    transaction.commit().map_err(failure)
}

/// Replaces snapshot and log by the same with these signatures.
fn rewrite(database: &Database, signer: &Signer, image: &Image) -> Result<(), Failure> {
    let transaction = database.begin_write().map_err(failure)?;
    {
        let mut root = Signature::default();
        if !image.snapshot.is_empty() {
            let (signed, value) = signer.snapshot_value(&image.snapshot);
            let mut table = transaction.open_table(SNAPSHOT).map_err(failure)?;
            table.insert((), &value[..]).map_err(failure)?;
            root = signed;
        }
        let mut log = transaction.open_table(LOG).map_err(failure)?;
        log.retain(|_, _| false).map_err(failure)?;
        if !image.log.is_empty() {
            log.insert(0, &signer.record_value(&root, 0, &image.log).1[..]).map_err(failure)?;
        }
        let mut meta = transaction.open_table(META).map_err(failure)?;
        meta.insert("format", FORMAT).map_err(failure)?;
    }
    transaction.commit().map_err(failure)
}
