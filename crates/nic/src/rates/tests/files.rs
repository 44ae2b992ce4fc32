//! Who makes the files, and what becomes of wrong ones.

use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use super::super::layout::FILE_BYTES;
use super::*;

#[test]
fn one_agent_keeps_a_folder() {
    let folder = Folder::new("lock");
    let table = folder.table();
    let second = RateTable::open(&folder.0).expect_err("it is kept");
    assert_eq!(second.kind(), io::ErrorKind::WouldBlock);
    let own = format!("process {} (", std::process::id());
    assert!(second.to_string().starts_with(&own), "{second}");
    drop(table);
    folder.table();
}

#[test]
fn a_lock_of_the_folder_itself_keeps_no_agent_out() {
    let folder = Folder::new("stranger");
    drop(folder.table());
    // Whoever may list the folder can lock it.
    let stranger = File::open(&folder.0).expect("everyone may read it");
    stranger.try_lock().expect("nobody else has it");
    let _table = folder.table();
    let mode = fs::metadata(folder.0.join("lock")).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn buckets_that_may_not_be_written_are_replaced_by_own_ones() {
    let folder = Folder::new("readable");
    folder.table().set(rated([(26, 100_000_000)]));
    // A folder in their place cannot be written by root either.
    fs::remove_file(folder.0.join("buckets")).expect("it is ours");
    fs::create_dir(folder.0.join("buckets")).expect("it is ours");
    let mut both = [folder.limits(), folder.limits()];
    let each = rates(&mut both, START, Duration::from_millis(1_000), 26);
    assert_near(each[0], 100_000_000, 60);
    assert_near(each[1], 100_000_000, 60);
}

#[test]
fn files_survive_the_agent_and_wrong_ones_are_replaced() {
    let folder = Folder::new("again");
    folder.table().set(rated([(26, 7), (63, 9), (64, 11)]));
    let before = fs::metadata(folder.0.join("rates")).expect("it is there").ino();
    let table = folder.table();
    assert_eq!((table.bps(26), table.bps(63), table.bps(64), table.bps(0)), (7, 9, 0, 0));
    assert_eq!(fs::metadata(folder.0.join("rates")).expect("it is there").ino(), before);
    drop(table);
    let older: Vec<u8> = b"dqpaces1".iter().copied().chain([7; FILE_BYTES as usize - 8]).collect();
    for content in [&b"short"[..], &[0; FILE_BYTES as usize], &older] {
        fs::write(folder.0.join("rates"), content).expect("it is ours");
        assert_eq!(folder.limits().admits(START, &path(26), 5000), 5000, "nothing is believed");
        assert_eq!(folder.table().bps(26), 0);
    }
    let mode = |name: &str| {
        fs::metadata(folder.0.join(name)).expect("it is there").permissions().mode() & 0o777
    };
    assert_eq!((mode("rates"), mode("buckets")), (0o644, 0o660));
    assert_eq!(fs::read_dir(&folder.0).expect("a folder").count(), 3, "and the lock");
}
