//! Stores into which somebody writes without the token, logs without signatures, and a token that
//! changes.

use std::path::{Path, PathBuf};

use cluster::keys::Keys;
use cluster::store::etcd::EtcdStore;
use cluster::store::file::FileStore;
use cluster::store::{Before, SetupError, SignedLog, Store};
use parfait::brain::{Image, StorageError};
use redb::{Database, ReadableTable, TableDefinition};

use crate::conformance::{candidate, take_lease};
use crate::members::Members;
use crate::scratch::{Scratch, keys};

const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
const SNAPSHOT: TableDefinition<(), &[u8]> = TableDefinition::new("snapshot");
const LOG: TableDefinition<u64, &[u8]> = TableDefinition::new("log");

fn others() -> Keys {
    Keys::of_token("the-token-of-others")
}

fn image() -> Image {
    Image { snapshot: b"snapshot".to_vec(), log: b"onetwothree".to_vec() }
}

/// Writes the image as a brain does.
async fn write(store: &impl Store) {
    let term = take_lease(store, &candidate(1)).await;
    store.open(term, 1).await.expect("it leads");
    store.snapshot(1, b"snapshot".to_vec()).await.expect("space");
    store.append(1, 0, b"one".to_vec()).await.expect("space");
    // The end is cut, and what is kept is signed again.
    store.append(1, 3, b"too much".to_vec()).await.expect("space");
    store.append(1, 4, b"wo".to_vec()).await.expect("space");
    store.append(1, 6, b"three".to_vec()).await.expect("space");
}

/// Opens the log as the next brain does.
async fn read(store: &impl Store) -> Result<Image, StorageError> {
    let term = take_lease(store, &candidate(2)).await;
    store.open(term, 1).await
}

/// Makes what a store has unreadable, or as it was before a change, or replaces it by what somebody
/// else has signed.
struct Forgery {
    what: &'static str,
    /// Changes the value of the snapshot, and of each record by where it begins; `None` removes it.
    snapshot: fn(Vec<u8>) -> Option<Vec<u8>>,
    record: fn(u64, Vec<u8>) -> Option<Vec<u8>>,
}

fn flipped(mut value: Vec<u8>) -> Option<Vec<u8>> {
    *value.last_mut()? ^= 1;
    Some(value)
}

/// A value without its signature.
fn bare(value: Vec<u8>) -> Option<Vec<u8>> {
    Some(value[32.min(value.len())..].to_vec())
}

const FORGERIES: [Forgery; 7] = [
    Forgery { what: "the snapshot", snapshot: flipped, record: |_, value| Some(value) },
    Forgery { what: "the snapshot", snapshot: bare, record: |_, value| Some(value) },
    Forgery {
        what: "the record at byte 0 of the log",
        snapshot: |_| None,
        record: |_, value| Some(value),
    },
    Forgery {
        what: "the record at byte 0 of the log",
        snapshot: Some,
        record: |at, value| if at == 0 { bare(value) } else { Some(value) },
    },
    Forgery {
        what: "the record at byte 3 of the log",
        snapshot: Some,
        record: |at, value| if at == 3 { flipped(value) } else { Some(value) },
    },
    Forgery {
        what: "the record at byte 4 of the log",
        snapshot: Some,
        record: |at, _| if at == 4 { Some(Vec::new()) } else { None },
    },
    Forgery {
        what: "the record at byte 6 of the log",
        snapshot: Some,
        record: |at, value| if at == 6 { flipped(value) } else { Some(value) },
    },
];

/// A file in a folder of its own.
struct Stored(Scratch);

impl Stored {
    async fn written() -> Stored {
        let stored = Stored(Scratch::new("signatures"));
        write(&stored.store(&keys()).expect("a new file")).await;
        stored
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("brain.redb")
    }

    fn store(&self, keys: &Keys) -> Result<FileStore, SetupError> {
        FileStore::new(&self.path(), keys)
    }

    fn forge(&self, forgery: &Forgery) {
        let database = Database::open(self.path()).expect("whole");
        let transaction = database.begin_write().expect("alone");
        {
            let mut snapshot = transaction.open_table(SNAPSHOT).expect("it is there");
            let value = snapshot.remove(()).expect("space").expect("it is there").value().to_vec();
            if let Some(value) = (forgery.snapshot)(value) {
                snapshot.insert((), &value[..]).expect("space");
            }
            let mut log = transaction.open_table(LOG).expect("it is there");
            let records: Vec<(u64, Vec<u8>)> = log
                .iter()
                .expect("whole")
                .map(|record| record.expect("whole"))
                .map(|(at, value)| (at.value(), value.value().to_vec()))
                .collect();
            for (at, value) in records {
                match (forgery.record)(at, value) {
                    Some(value) => drop(log.insert(at, &value[..]).expect("space")),
                    // Only the last ones: a gap is found anyway.
                    None if at > 4 => drop(log.remove(at).expect("space")),
                    None => {}
                }
            }
        }
        transaction.commit().expect("space");
    }
}

fn unsigned(refused: Result<impl Sized, SetupError>) -> String {
    match refused {
        Err(SetupError::Unsigned { reason, .. }) => reason,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it is believed"),
    }
}

#[tokio::test]
async fn a_file_that_was_written_without_the_token_is_refused() {
    let whole = Stored::written().await;
    let again = whole.store(&keys()).expect("signed");
    assert_eq!(read(&again).await, Ok(image()));
    drop(again);
    let reason = unsigned(whole.store(&others()));
    assert_eq!(reason, "the snapshot is not signed with the token of this cluster");
    for forgery in &FORGERIES {
        let stored = Stored::written().await;
        stored.forge(forgery);
        let reason = unsigned(stored.store(&keys()));
        assert!(reason.starts_with(forgery.what), "{}: {reason}", forgery.what);
    }
    // Changed while the brain does not look: it finds out when it opens the log.
    let stored = Stored::written().await;
    let store = stored.store(&keys()).expect("signed");
    stored.forge(&FORGERIES[0]);
    assert_eq!(read(&store).await, Err(StorageError::Unsigned));
    assert_eq!(store.report().counters.unsigned, 1);
}

/// As a version without signatures wrote it.
fn write_unsigned(path: &Path) {
    let database = Database::create(path).expect("space");
    let transaction = database.begin_write().expect("alone");
    {
        let mut meta = transaction.open_table(META).expect("new");
        meta.insert("format", 1).expect("space");
        meta.insert("term", 41).expect("space");
        let mut snapshot = transaction.open_table(SNAPSHOT).expect("new");
        snapshot.insert((), &b"snapshot"[..]).expect("space");
        let mut log = transaction.open_table(LOG).expect("new");
        log.insert(0, &b"one"[..]).expect("space");
        log.insert(3, &b"twothree"[..]).expect("space");
    }
    transaction.commit().expect("space");
}

fn signed(before: Before) -> SignedLog {
    SignedLog { before, snapshot_bytes: 8, log_bytes: 11 }
}

#[tokio::test]
async fn a_file_without_signatures_is_signed_once_and_again_when_the_token_changes() {
    let stored = Stored(Scratch::new("signatures"));
    let path = stored.path();
    write_unsigned(&path);
    let reason = unsigned(stored.store(&keys()));
    assert!(reason.starts_with("the log, of format 1, is not signed"), "{reason}");
    let sign = |keys: &Keys, old: Option<&Keys>| FileStore::sign_log(&path, keys, old);
    assert_eq!(sign(&keys(), None).expect("unsigned"), signed(Before::Unsigned));
    let store = stored.store(&keys()).expect("signed");
    assert_eq!(take_lease(&store, &candidate(1)).await, 42, "terms go on");
    assert_eq!(store.open(42, 1).await, Ok(image()));
    assert!(matches!(sign(&keys(), None), Err(SetupError::Busy { .. })), "a brain uses it");
    // Into what was signed as one record.
    store.append(1, 6, b"four".to_vec()).await.expect("space");
    drop(store);

    unsigned(sign(&others(), None));
    unsigned(sign(&others(), Some(&Keys::of_token("a-third-token"))));
    let again = SignedLog { log_bytes: 10, ..signed(Before::OldToken) };
    assert_eq!(sign(&others(), Some(&keys())).expect("signed"), again);
    let this = SignedLog { before: Before::ThisToken, ..again };
    assert_eq!(sign(&others(), Some(&keys())).expect("signed"), this, "once more");
    assert_eq!(sign(&others(), None).expect("signed"), this);
    unsigned(stored.store(&keys()));
    let log = b"onetwofour".to_vec();
    let store = stored.store(&others()).expect("signed");
    assert_eq!(read(&store).await, Ok(Image { log, ..image() }));
    // A log of one token, and a record of another.
    drop(store);
    let mixed = FileStore::sign_log(&path, &keys(), Some(&Keys::of_token("a-third-token")));
    unsigned(mixed);
}

const PREFIX: &str = "/dquant/brain/";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_others_wrote_into_etcd_is_refused() {
    let Some(members) = Members::start(1, &[]).await else { return };
    let store = |keys: &Keys| EtcdStore::new(&members.config(), keys).expect("valid");
    let put = async |key: &str, value: &str| members.put(&format!("{PREFIX}{key}"), value).await;
    let leading = store(&keys());
    write(&leading).await;
    leading.resign(&candidate(1)).await.expect("it answers");
    assert_eq!(read(&store(&keys())).await, Ok(image()));
    let second = store(&keys());
    let _ = take_lease(&second, &candidate(2)).await;
    second.resign(&candidate(2)).await.expect("it answers");

    let stranger = store(&others());
    assert_eq!(read(&stranger).await, Err(StorageError::Unsigned), "of another token");
    let reason = stranger.report().last_failure.expect("it failed");
    assert_eq!(reason, "the snapshot is not signed with the token of this cluster");
    let reader = store(&keys());
    let refused = reader.claim(&candidate(3)).await;
    assert_eq!(refused, Err(StorageError::Unsigned), "a leader of another token");
    stranger.resign(&candidate(2)).await.expect("it answers");

    // A record behind the last one, as etcd's other users can write it.
    put("log/000000000000000b", "\0forged, and longer than a signature is").await;
    assert_eq!(read(&reader).await, Err(StorageError::Unsigned));
    let reason = reader.report().last_failure.expect("it failed");
    assert!(reason.starts_with("the record at byte 11 of the log is not signed"), "{reason}");
    reader.resign(&candidate(2)).await.expect("it answers");
    put("leader", "5 10.0.0.66:4795").await;
    assert_eq!(reader.claim(&candidate(2)).await, Err(StorageError::Unsigned));
    let report = reader.report();
    assert_eq!(report.counters.unsigned, 3);
    let reason = report.last_failure.expect("it failed");
    assert!(reason.starts_with("etcd: the record of who leads is not signed"), "{reason}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_etcd_without_signatures_is_signed_once_and_again_when_the_token_changes() {
    let Some(members) = Members::start(1, &[]).await else { return };
    let config = members.config();
    for (key, value) in [
        ("format", "1"),
        ("snapshot", "\0snapshot"),
        ("log/0000000000000000", "\0one"),
        ("log/0000000000000003", "\0twothree"),
    ] {
        members.put(&format!("{PREFIX}{key}"), value).await;
    }
    let store = |keys: &Keys| EtcdStore::new(&config, keys).expect("valid");
    let early = store(&keys());
    assert_eq!(early.claim(&candidate(1)).await, Err(StorageError::Unsigned));
    let reason = early.report().last_failure.expect("it failed");
    assert!(reason.starts_with("etcd: the log, of format 1, is not signed"), "{reason}");
    let sign =
        async |keys: &Keys, old: Option<&Keys>| EtcdStore::sign_log(&config, keys, old).await;
    assert_eq!(sign(&keys(), None).await.expect("unsigned"), signed(Before::Unsigned));
    assert_eq!(read(&early).await, Ok(image()));
    assert!(matches!(sign(&keys(), None).await, Err(SetupError::Busy { .. })), "a brain leads");
    early.resign(&candidate(2)).await.expect("it answers");

    unsigned(sign(&others(), None).await);
    assert_eq!(sign(&others(), Some(&keys())).await.expect("signed"), signed(Before::OldToken));
    assert_eq!(sign(&others(), None).await.expect("signed"), signed(Before::ThisToken));
    let after = store(&others());
    assert_eq!(read(&after).await, Ok(image()));
    after.append(1, 11, vec![b'x'; 600 << 10]).await.expect("in parts");
    after.resign(&candidate(2)).await.expect("it answers");
    let back = sign(&keys(), Some(&others())).await.expect("signed");
    assert_eq!((back.before, back.log_bytes), (Before::OldToken, 11 + (600 << 10)));
    assert_eq!(read(&store(&keys())).await.expect("signed").log.len(), 11 + (600 << 10));
}
