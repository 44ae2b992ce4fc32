//! Rate limits.

use std::fs::OpenOptions;

use super::*;

#[test]
fn without_a_table_everything_is_admitted_and_a_new_one_is_found() {
    let folder = Folder::new("absent");
    let mut limits = folder.limits();
    assert_eq!(limits.admits(START, &path(26), 1000), 1000);
    assert_eq!(limits.next_wakeup(), None);
    folder.table().set(rated([(26, 1_000_000)]));
    let before = START + Duration::from_nanos(LOOK_EVERY.as_nanos() - 1);
    assert_eq!(limits.admits(before, &path(26), 1000), 1000, "it does not look for each packet");
    assert!(limits.admits(START + LOOK_EVERY, &path(26), 1000) < 20);
    fs::remove_dir_all(&folder.0).expect("it is ours");
    assert_eq!(limits.admits(START + LOOK_EVERY * 2, &path(26), 1000), 1000, "it is gone");
    assert_eq!(RateLimits::of(None).admits(START, &path(26), 7), 7);
}

#[test]
fn processes_keep_a_pace_together_and_who_is_alone_has_all_of_it() {
    let folder = Folder::new("together");
    let table = folder.table();
    for bps in [10_000_000, 1_000_000_000, 40_000_000_000] {
        table.set(rated([(26, bps)]));
        let time = Duration::from_millis(1_000);
        for count in [1, 2, 5] {
            let mut all: Vec<RateLimits> = (0..count).map(|_| folder.limits()).collect();
            // Far enough from what was measured before.
            let from =
                START + Duration::from_millis(20_000 * u64::from(bps.ilog10()) + 3_000 * count);
            let each = rates(&mut all, from, time, 26);
            assert_near(each.iter().sum(), bps, 60);
            assert!(all.iter().all(|limits| limits.shaper().held() > 0));
        }
    }
    assert!(table.sent_bytes(26) > 0 && table.sent_bytes(27) == 0);
}

#[test]
fn one_job_has_no_effect_on_another() {
    let folder = Folder::new("others");
    folder.table().set(rated([(26, 1_000_000)]));
    let mut limits = folder.limits();
    send(&mut limits, START, 26);
    assert_eq!(limits.admits(START, &path(26), 8), 0);
    assert_eq!(limits.admits(START, &path(27), 100_000), 100_000);
}

#[test]
fn a_changed_pace_holds_from_the_next_packet() {
    let folder = Folder::new("changes");
    let table = folder.table();
    table.set(rated([(26, 1_000_000)]));
    let mut limits = [folder.limits()];
    let time = Duration::from_millis(500);
    rates(&mut limits, START, time, 26);
    // The debt of the slow pace is no debt of the fast one; waiting ends at the next look.
    let later = START + time;
    let waits_until = limits[0].next_wakeup().expect("it waits");
    assert!(waits_until <= later + LOOK_EVERY);
    table.set(rated([(26, 1_000_000_000)]));
    let from = waits_until.max(later);
    assert_near(rates(&mut limits, from, time, 26)[0], 1_000_000_000, 60);
    table.set([]);
    assert_eq!(limits[0].admits(from + time, &path(26), 9999), 9999);
}

#[test]
fn a_wrong_bucket_stops_nobody_for_long() {
    let folder = Folder::new("wrong");
    let table = folder.table();
    table.set(rated([(26, 100_000_000)]));
    folder.buckets().get().0[26].full_at.set(u64::MAX);
    let mut limits = [folder.limits()];
    let time = Duration::from_millis(1_000);
    assert_near(rates(&mut limits, START, time, 26)[0], 100_000_000, 60);
    // One that could be true is waited for.
    let from = START + time;
    // 64 KiB at 100 Mbit/s.
    const LEAST_DEPTH_NS: u64 = 5_242_880;
    let soon = from.as_nanos() + LEAST_DEPTH_NS + 5_000_000;
    folder.buckets().get().0[26].full_at.set(soon);
    assert_eq!(send(&mut limits[0], from, 26), 0);
    assert_near(rates(&mut limits, from, time, 26)[0], 100_000_000, 60);
}

/// Whoever may write the buckets may truncate them: with a mapping, a read behind their end is a
/// SIGBUS.
#[test]
fn the_agent_survives_buckets_that_are_truncated_and_replaces_them() {
    let (folder, table) = gated("truncated", 0);
    let mut limits = folder.limits();
    assert!(tries(&mut limits, ms(130), 26));
    assert_eq!((table.exchanges(26).begun, table.sent_bytes(26)), (1, BYTES));
    assert!(!table.repair().expect("it can be looked at"));
    for (len, at) in [(26 * 64 + 8, 230), (0, 330)] {
        let buckets = OpenOptions::new().write(true).open(folder.0.join("buckets"));
        buckets.and_then(|file| file.set_len(len)).expect("it is ours");
        assert_eq!((table.exchanges(26), table.sent_bytes(26)), (Exchanges::default(), 0));
        assert_eq!(table.exchanges(200), Exchanges::default());
        assert!(table.repair().expect("the folder is ours"));
        assert!(tries(&mut limits, ms(at), 26), "senders find the new ones");
        assert_eq!((table.exchanges(26).begun, table.sent_bytes(26)), (1, BYTES));
    }
}

#[test]
fn a_burst_makes_a_bucket_deeper_within_bounds() {
    let folder = Folder::new("burst");
    let table = folder.table();
    // In bytes of a pace of 1 Gbit/s: 2 ms, 5 ms, and 10 ms however much is asked for.
    let bursts = [(0, 250_000), (625_000, 625_000), (u64::MAX, 1_250_000)];
    for (round, (burst_bytes, wanted)) in (0..).zip(bursts) {
        table.set([(26, RateLimit { bps: 1_000_000_000, burst_bytes })]);
        let later = START + Duration::from_millis(100 * round);
        let bytes = send(&mut folder.limits(), later, 26) * BYTES;
        assert_near(bytes, wanted, 30);
    }
}
