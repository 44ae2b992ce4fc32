//! The store in a file: its rules, files that are refused, writers that are killed, and disks that
//! are full.

use std::fs;
use std::io::{BufRead, BufReader, Lines, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use cluster::store::file::{FORMAT, FileStore};
use cluster::store::{SetupError, Store};
use parfait::brain::{Image, StorageError};
use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;
use redb::{Database, TableDefinition};

use crate::conformance::{Site, candidate, conformance, take_lease};
use crate::scratch::{Scratch, keys};

struct Folder(Scratch);

impl Folder {
    fn new() -> Folder {
        Folder(Scratch::new("file"))
    }

    fn file(&self) -> PathBuf {
        self.0.path().join("brain.state")
    }
}

impl Site for Folder {
    type Store = FileStore;

    fn handle(&self) -> FileStore {
        FileStore::new(&self.file(), &keys()).expect("a file")
    }
}

conformance!(Some(Folder::new()));

fn refusal(path: &Path) -> SetupError {
    FileStore::new(path, &keys()).expect_err("not a store")
}

#[test]
fn files_of_others_are_refused_and_not_changed() {
    let folder = Folder::new();
    let path = folder.file();
    for content in [&b"x"[..], b"# a configuration file\n", &[0; 5000]] {
        fs::write(&path, content).expect("space");
        assert!(matches!(refusal(&path), SetupError::Foreign { .. }));
        assert_eq!(fs::read(&path).expect("it is there"), content);
    }
    fs::remove_file(&path).expect("it is there");
    drop(Database::create(&path).expect("a database of something else"));
    let error = refusal(&path).to_string();
    assert!(error.contains("of format 0, and this is format 2: run the version"), "{error}");

    let missing = folder.0.path().join("missing/brain.state");
    let store = FileStore::new(&missing, &keys()).expect("it may appear");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let claimed = runtime.block_on(store.claim(&candidate(1)));
    assert_eq!(claimed, Err(StorageError::Unavailable));
    let report = store.report();
    assert!(report.last_failure.is_some_and(|reason| reason.contains("No such file")));
    assert_eq!(report.counters.unavailable, 1);
}

fn why(store: &FileStore) -> String {
    store.report().last_failure.unwrap_or_default()
}

#[tokio::test]
async fn a_brain_whose_file_is_removed_or_replaced_writes_and_leads_no_more() {
    for is_replaced in [false, true] {
        let folder = Folder::new();
        let first = folder.handle();
        let term = take_lease(&first, &candidate(1)).await;
        first.open(term, 1).await.expect("it leads");
        first.append(1, 0, b"one".to_vec()).await.expect("its file is there");
        fs::remove_file(folder.file()).expect("it is there");
        let second = is_replaced.then(|| folder.handle());
        if let Some(second) = &second {
            let held = second.claim(&candidate(2)).await.expect("a file of its own");
            assert_eq!(held.lease.holder, 2);
        }
        let written = first.append(1, 3, b"two".to_vec()).await;
        assert_eq!(written, Err(StorageError::Unavailable));
        assert!(
            why(&first).contains("was removed or replaced while this brain had it"),
            "{}",
            why(&first)
        );
        match second {
            // The other one leads.
            Some(_) => {
                let found = first.claim(&candidate(1)).await.expect("it is named");
                assert_eq!(found.lease.holder, 2);
            }
            // It does not begin anew: nobody said that there are no jobs.
            None => {
                first.claim(&candidate(1)).await.expect_err("there is no file");
                assert!(why(&first).contains("was removed: put it back"), "{}", why(&first));
                assert!(!folder.file().exists());
            }
        }
    }
}

#[tokio::test]
async fn a_lease_ends_with_its_file_though_nothing_is_written() {
    let folder = Folder::new();
    let store = folder.handle();
    let term = take_lease(&store, &candidate(1)).await;
    let aside = folder.0.path().join("aside");
    fs::rename(folder.file(), &aside).expect("it is there");
    store.claim(&candidate(1)).await.expect_err("the file is gone");
    fs::rename(&aside, folder.file()).expect("it is there");
    let again = store.claim(&candidate(1)).await.expect("it is back").lease;
    assert!(again.holder == 1 && again.term > term, "{again:?}");
}

#[tokio::test]
async fn other_users_can_not_open_the_file_and_so_not_lock_it() {
    let folder = Folder::new();
    let mode = || fs::metadata(folder.file()).expect("it is there").permissions().mode() & 0o777;
    take_lease(&folder.handle(), &candidate(1)).await;
    assert_eq!(mode(), 0o600);
    // As an earlier version left it.
    fs::set_permissions(folder.file(), fs::Permissions::from_mode(0o644)).expect("it is ours");
    take_lease(&folder.handle(), &candidate(2)).await;
    assert_eq!(mode(), 0o600);
    // A lock that somebody took before keeps the brain out, and is named.
    let stranger = fs::File::open(folder.file()).expect("it is ours");
    stranger.try_lock().expect("nobody has it");
    fs::remove_file(folder.0.path().join("brain.state.holder")).ok();
    let store = folder.handle();
    store.claim(&candidate(3)).await.expect_err("it is locked");
    let own = format!("process {} (", std::process::id());
    assert!(
        why(&store).starts_with(&own) && why(&store).ends_with(" has the file"),
        "{}",
        why(&store)
    );
}

#[test]
fn another_format_is_refused_by_name() {
    let folder = Folder::new();
    let database = Database::create(folder.file()).expect("space");
    let write = database.begin_write().expect("alone");
    let meta: TableDefinition<&str, u64> = TableDefinition::new("meta");
    write.open_table(meta).expect("new").insert("format", FORMAT + 1).expect("space");
    write.commit().expect("space");
    drop(database);
    match refusal(&folder.file()) {
        SetupError::Format { found, supported, .. } => {
            assert_eq!((found, supported), (FORMAT + 1, FORMAT));
        }
        other => panic!("{other}"),
    }
}

/// Each byte of the file in turn: what is there afterwards is what was written, or the file is
/// refused.
#[tokio::test]
async fn damage_is_found_or_harmless() {
    let folder = Folder::new();
    let written = {
        let store = folder.handle();
        let term = take_lease(&store, &candidate(1)).await;
        store.open(term, 1).await.expect("it leads");
        store.snapshot(1, vec![7; 5000]).await.expect("space");
        store.append(1, 0, vec![9; 5000]).await.expect("space");
        store.open(term, 2).await.expect("it leads")
    };
    let whole = fs::read(folder.file()).expect("it is there");
    let mut random = Pcg32::new(1, 2);
    let (mut refused, mut used) = (0, 0);
    for _ in 0..150 {
        let mut damaged = whole.clone();
        let at = match random.next_u32() % 2 {
            0 => random.next_u32() as usize % 512,
            _ => random.next_u32() as usize % whole.len(),
        };
        damaged[at] ^= 1 << (random.next_u32() % 8);
        fs::write(folder.file(), &damaged).expect("space");
        let Ok(store) = FileStore::new(&folder.file(), &keys()) else {
            refused += 1;
            continue;
        };
        let Ok(holder) = store.claim(&candidate(2)).await else {
            refused += 1;
            continue;
        };
        match store.open(holder.lease.term, 1).await {
            Ok(image) => assert!(image == written, "byte {at}"),
            Err(error) => assert_eq!(error, StorageError::Unavailable),
        }
        used += 1;
    }
    assert!(refused > 0 && used > 0, "{refused} refused, {used} used");
}

/// The writer's file, and how many writes there are between its snapshots.
const WRITER_FILE: &str = "DQUANT_TEST_WRITER_FILE";
const WRITER_PERIOD: &str = "DQUANT_TEST_WRITER_PERIOD";

/// Of writers that are killed, and of those that fill the disk.
const PERIOD: u64 = 23;
const NEVER: u64 = u64::MAX;

/// Numbered writes: record `i` is in the log, or a snapshot covers it.
fn record(number: u64) -> Vec<u8> {
    let mut record = number.to_le_bytes().to_vec();
    let length = Pcg32::new(number, 3).next_u32() as usize % 6000;
    record.extend(std::iter::repeat_n(number as u8, length));
    record
}

/// The number of the last write; everything before it has to be there.
fn last_write(image: &Image, period: u64) -> u64 {
    let number_of = |bytes: &[u8]| {
        bytes.first_chunk().map_or(0, |number: &[u8; 8]| u64::from_le_bytes(*number))
    };
    let mut last = number_of(&image.snapshot);
    assert!(last == 0 || last.is_multiple_of(period) && image.snapshot == record(last));
    let mut log = &image.log[..];
    while !log.is_empty() {
        last += 1;
        assert!(!last.is_multiple_of(period));
        log = log.strip_prefix(&record(last)[..]).expect("the next record, as a whole");
    }
    last
}

/// What the test below kills: writes until it dies, and says what was confirmed.
#[tokio::test]
#[ignore = "a process that another test starts and kills"]
async fn writer() {
    let Ok(path) = std::env::var(WRITER_FILE) else { return };
    let period = std::env::var(WRITER_PERIOD).expect("it is set, too").parse().expect("a number");
    let store = FileStore::new(Path::new(&path), &keys()).expect("a file");
    let me = candidate(u64::from(std::process::id()));
    let term = take_lease(&store, &me).await;
    let image = store.open(term, 1).await.expect("it leads");
    let mut at = image.log.len() as u64;
    let mut out = std::io::stdout();
    for number in last_write(&image, period) + 1.. {
        let bytes = record(number);
        let length = bytes.len() as u64;
        let stored = if number.is_multiple_of(period) {
            at = 0;
            store.snapshot(1, bytes).await
        } else {
            at += length;
            store.append(1, at - length, bytes).await
        };
        match stored {
            Ok(()) => writeln!(out, "confirmed {number}").expect("the test reads it"),
            Err(error) => {
                writeln!(out, "failed {error:?}").expect("the test reads it");
                return;
            }
        }
    }
}

/// Starts the writer, by a command that ends with the program and its arguments.
fn start_writer(command: &[&str], path: &Path, period: u64) -> Child {
    let program = std::env::current_exe().expect("this test");
    let mut words: Vec<_> = command.iter().map(std::ffi::OsString::from).collect();
    words.push(program.into());
    words.extend(["file::writer", "--exact", "--ignored", "--nocapture"].map(Into::into));
    Command::new(&words[0])
        .args(&words[1..])
        .env(WRITER_FILE, path)
        .env(WRITER_PERIOD, period.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts")
}

/// What a writer says.
struct Said {
    lines: Lines<BufReader<ChildStdout>>,
    /// The number of the last confirmed write.
    confirmed: u64,
    /// Why it ended by itself, if it did.
    failed: Option<String>,
}

impl Said {
    fn new(writer: &mut Child) -> Said {
        let lines = BufReader::new(writer.stdout.take().expect("a pipe")).lines();
        Said { lines, confirmed: 0, failed: None }
    }

    /// Reads on; `false` at the end.
    fn read_line(&mut self) -> bool {
        let Some(line) = self.lines.next() else { return false };
        let line = line.expect("text");
        if let Some(number) = line.strip_prefix("confirmed ") {
            // The last line may be cut.
            self.confirmed = number.parse().unwrap_or(self.confirmed);
        }
        self.failed = line.strip_prefix("failed ").map(str::to_string).or(self.failed.take());
        true
    }
}

/// Whatever instant a writer is killed at, what it confirmed is there, and nothing is there in
/// parts.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_writer_loses_nothing() {
    let kills = std::env::var("DQUANT_KILLS").map_or(40, |text| text.parse().expect("a number"));
    let folder = Folder::new();
    let mut random = Pcg32::new(11, 1);
    let (mut last, mut last_term, mut unconfirmed) = (0, 0, 0);
    for kill in 0..kills {
        let mut writer = start_writer(&[], &folder.file(), PERIOD);
        let mut said = Said::new(&mut writer);
        // Every third one while it opens the file, the others while they write.
        if kill % 3 > 0 {
            while said.confirmed == 0 && said.read_line() {}
        }
        let after = Duration::from_micros(u64::from(random.next_u32() % 40_000));
        tokio::time::sleep(after).await;
        writer.kill().expect("it runs");
        while said.read_line() {}
        writer.wait().expect("it was killed");
        assert_eq!(said.failed, None);
        let confirmed = said.confirmed;

        let store = folder.handle();
        let claimed = store.claim(&candidate(1_000_000 + kill)).await.expect("the lock is free");
        assert_eq!(claimed.lease.holder, 1_000_000 + kill, "at once");
        assert!(claimed.lease.term > last_term);
        last_term = claimed.lease.term;
        let found = last_write(&store.open(last_term, 1).await.expect("it leads"), PERIOD);
        assert!(found >= confirmed.max(last), "{found} of {confirmed} confirmed");
        assert!(confirmed == 0 || found <= confirmed + 1, "more than was sent");
        unconfirmed += u64::from(confirmed != 0 && found > confirmed);
        last = found;
    }
    println!("{kills} kills, {last} writes, {unconfirmed} found that were not confirmed");
    assert!(last > kills / 3, "writers were killed before they wrote");
}

/// Runs the writer until the disk is full, then checks that it said so and that all of it is there.
async fn fill(command: &[&str], path: &Path) {
    let mut writer = start_writer(command, path, NEVER);
    let mut said = Said::new(&mut writer);
    while said.read_line() {}
    writer.wait().expect("it ended");
    let confirmed = said.confirmed;
    assert_eq!(said.failed.as_deref(), Some("Full"));
    assert!(confirmed > 0);
    let store = FileStore::new(path, &keys()).expect("the file is whole");
    let term = take_lease(&store, &candidate(5)).await;
    let image = store.open(term, 1).await.expect("it leads");
    let found = last_write(&image, NEVER);
    assert!(found == confirmed || found == confirmed + 1, "{found} of {confirmed}");
    store.append(1, image.log.len() as u64, b"more".to_vec()).await.expect("space");
}

/// A limit of the file's length stands for a full disk where no small disk can be made.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_reported_and_loses_nothing() {
    let folder = Folder::new();
    let limit = r#"trap "" XFSZ; ulimit -f 4000; exec "$0" "$@""#;
    fill(&["sh", "-c", limit], &folder.file()).await;
}
