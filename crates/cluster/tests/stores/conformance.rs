//! What every store has to do, as functions over a [`Site`].

use std::time::{Duration, Instant};

use cluster::store::{Candidate, Holder, Store};
use parfait::brain::{Image, StorageError};
use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;

/// Within this a lease is free again after its holder's end.
const TAKEOVER: Duration = Duration::from_secs(20);

/// A store, which brains open.
pub(crate) trait Site {
    type Store: Store;

    /// What one more brain has of the store.
    fn handle(&self) -> Self::Store;
}

/// The brain with that number.
pub(crate) fn candidate(number: u64) -> Candidate {
    Candidate { number, address: format!("[2001:db8::{number}]:4790") }
}

/// Claims until the lease is the candidate's, and returns the term.
pub(crate) async fn take_lease(store: &impl Store, candidate: &Candidate) -> u64 {
    let begun = Instant::now();
    loop {
        match store.claim(candidate).await {
            Ok(holder) if holder.lease.holder == candidate.number => {
                assert_eq!(holder.address, candidate.address);
                return holder.lease.term;
            }
            answer => {
                let waited = begun.elapsed();
                assert!(waited < TAKEOVER, "{answer:?} {:?}", store.report().last_failure);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

/// Claims until the store answers.
async fn claim(store: &impl Store, candidate: &Candidate) -> Holder {
    let begun = Instant::now();
    loop {
        match store.claim(candidate).await {
            Ok(holder) => return holder,
            Err(error) => {
                let reason = store.report().last_failure;
                assert!(begun.elapsed() < TAKEOVER, "{error}: {reason:?}");
            }
        }
    }
}

async fn open(store: &impl Store, term: u64, opening: u64) -> Image {
    let opened = store.open(term, opening).await;
    opened.unwrap_or_else(|error| panic!("{error}: {:?}", store.report().last_failure))
}

async fn append(store: &impl Store, opening: u64, at: u64, record: &[u8]) {
    let appended = store.append(opening, at, record.to_vec()).await;
    appended.unwrap_or_else(|error| panic!("{error}: {:?}", store.report().last_failure));
}

fn log(bytes: &[u8]) -> Image {
    Image { snapshot: Vec::new(), log: bytes.to_vec() }
}

/// All of it; each begins with an empty store.
macro_rules! conformance {
    ($site:expr) => {
        $crate::conformance::conformance!($site;
            the_lease_has_one_holder, terms_rise, what_was_confirmed_is_there_after_opening,
            an_append_cuts_what_is_behind, a_gap_is_refused, a_snapshot_empties_the_log,
            large_values_are_written_as_a_whole, an_old_term_is_fenced,
            a_late_opening_is_fenced, late_writes_change_nothing);
    };
    ($site:expr; $($name:ident),*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                let Some(site) = $site else { return };
                $crate::conformance::$name(&site).await;
            }
        )*
    };
}
pub(crate) use conformance;

/// S1, between two brains that claim again and again.
pub(crate) async fn the_lease_has_one_holder(site: &impl Site) {
    let (one, other) = (site.handle(), site.handle());
    let term = take_lease(&one, &candidate(1)).await;
    for _ in 0..3 {
        let seen = claim(&other, &candidate(2)).await;
        assert_eq!((seen.lease.holder, seen.lease.term), (1, term));
        assert_eq!(seen.address, candidate(1).address);
        assert_eq!(take_lease(&one, &candidate(1)).await, term, "it is kept");
    }
    other.resign(&candidate(2)).await.expect("nothing to give back");
    assert_eq!(take_lease(&one, &candidate(1)).await, term);
}

/// S1, over brains that give up and brains that end.
pub(crate) async fn terms_rise(site: &impl Site) {
    let mut last = 0;
    for number in 1..=4 {
        let store = site.handle();
        let term = take_lease(&store, &candidate(number)).await;
        assert!(term > last, "{term} after {last}");
        last = term;
        if number % 2 == 0 {
            store.resign(&candidate(number)).await.expect("it has the lease");
            let next = site.handle();
            let claimed = claim(&next, &candidate(number + 10)).await;
            assert_eq!(claimed.lease.holder, number + 10, "at once");
            assert!(claimed.lease.term > last);
            last = claimed.lease.term;
        }
    }
}

/// S3, and S2 between openings of one term.
pub(crate) async fn what_was_confirmed_is_there_after_opening(site: &impl Site) {
    let store = site.handle();
    let term = take_lease(&store, &candidate(1)).await;
    assert_eq!(open(&store, term, 3).await, Image::default());
    append(&store, 3, 0, b"first").await;
    append(&store, 3, 5, b"second").await;
    assert_eq!(open(&store, term, 4).await, log(b"firstsecond"));
    assert_eq!(store.append(3, 11, b"late".to_vec()).await, Err(StorageError::Fenced));
    assert_eq!(store.snapshot(3, b"late".to_vec()).await, Err(StorageError::Fenced));
    append(&store, 4, 11, b"third").await;
    drop(store);
    let next = site.handle();
    let term = take_lease(&next, &candidate(2)).await;
    assert_eq!(open(&next, term, 1).await, log(b"firstsecondthird"));
    let counters = next.report().counters;
    assert_eq!((counters.leases_taken, counters.openings, counters.appends), (1, 1, 0));
}

pub(crate) async fn an_append_cuts_what_is_behind(site: &impl Site) {
    let store = site.handle();
    let term = take_lease(&store, &candidate(1)).await;
    open(&store, term, 1).await;
    for at in 0..6 {
        append(&store, 1, at * 4, format!("rec{at}").as_bytes()).await;
    }
    append(&store, 1, 12, b"cut").await;
    assert_eq!(open(&store, term, 2).await, log(b"rec0rec1rec2cut"), "between records");
    append(&store, 2, 6, b"in").await;
    assert_eq!(open(&store, term, 3).await, log(b"rec0rein"), "in a record");
    append(&store, 3, 0, b"all").await;
    assert_eq!(open(&store, term, 4).await, log(b"all"));
}

pub(crate) async fn a_gap_is_refused(site: &impl Site) {
    let store = site.handle();
    let term = take_lease(&store, &candidate(1)).await;
    open(&store, term, 1).await;
    append(&store, 1, 0, b"four").await;
    let gap = store.append(1, 5, b"lost".to_vec()).await;
    assert_eq!(gap, Err(StorageError::Unavailable));
    let after = store.append(1, 4, b"lost".to_vec()).await;
    assert!(after.is_err(), "after an error the log has to be opened");
    let term = take_lease(&store, &candidate(1)).await;
    assert_eq!(open(&store, term, 2).await, log(b"four"));
}

pub(crate) async fn a_snapshot_empties_the_log(site: &impl Site) {
    let store = site.handle();
    let term = take_lease(&store, &candidate(1)).await;
    open(&store, term, 1).await;
    append(&store, 1, 0, b"before").await;
    for (snapshot, opening) in [(&b"one"[..], 2), (b"", 3), (b"three", 4)] {
        store.snapshot(opening - 1, snapshot.to_vec()).await.expect("space");
        let image = open(&store, term, opening).await;
        assert_eq!(image, Image { snapshot: snapshot.to_vec(), log: Vec::new() });
        append(&store, opening, 0, b"after").await;
    }
    let image = open(&store, term, 5).await;
    assert_eq!(image, Image { snapshot: b"three".to_vec(), log: b"after".to_vec() });
}

/// Longer than one request of any store may be.
pub(crate) async fn large_values_are_written_as_a_whole(site: &impl Site) {
    let bytes = |seed: u64, length: usize| {
        let mut random = Pcg32::new(seed, 1);
        (0..length).map(|_| random.next_u32() as u8).collect::<Vec<u8>>()
    };
    let store = site.handle();
    let term = take_lease(&store, &candidate(1)).await;
    open(&store, term, 1).await;
    let (record, next, snapshot) = (bytes(1, 3_000_000), bytes(2, 40), bytes(3, 9_000_000));
    append(&store, 1, 0, &record).await;
    append(&store, 1, record.len() as u64, &next).await;
    let all = [record.clone(), next.clone()].concat();
    assert!(open(&store, term, 2).await == log(&all));
    store.snapshot(2, snapshot.clone()).await.expect("space");
    append(&store, 2, 0, &next).await;
    append(&store, 2, 40, &record).await;
    append(&store, 2, 1_000, &next).await;
    let image = open(&store, term, 3).await;
    let kept = [next.clone(), record[..960].to_vec(), next.clone()].concat();
    assert!(image == Image { snapshot, log: kept });
    store.snapshot(3, b"small".to_vec()).await.expect("space");
    let image = open(&store, term, 4).await;
    assert!(image == Image { snapshot: b"small".to_vec(), log: Vec::new() });
}

/// S2 between terms: a brain that does not know yet that it lost the lease.
pub(crate) async fn an_old_term_is_fenced(site: &impl Site) {
    let (old, new) = (site.handle(), site.handle());
    let before = take_lease(&old, &candidate(1)).await;
    assert_eq!(old.open(before + 1, 1).await, Err(StorageError::Fenced), "no such term");
    open(&old, before, 2).await;
    append(&old, 2, 0, b"kept").await;
    old.resign(&candidate(1)).await.expect("it has the lease");
    assert_eq!(old.append(2, 4, b"late".to_vec()).await, Err(StorageError::Fenced));
    let term = take_lease(&new, &candidate(2)).await;
    assert_eq!(open(&new, term, 1).await, log(b"kept"));
    assert_eq!(old.append(2, 4, b"late".to_vec()).await, Err(StorageError::Fenced));
    assert_eq!(old.snapshot(2, b"late".to_vec()).await, Err(StorageError::Fenced));
    assert_eq!(old.open(before, 9).await, Err(StorageError::Fenced));
    append(&new, 1, 4, b"more").await;
    assert_eq!(open(&new, term, 2).await, log(b"keptmore"));
    assert_eq!(old.report().counters.fenced, 5);
}

pub(crate) async fn a_late_opening_is_fenced(site: &impl Site) {
    let store = site.handle();
    let term = take_lease(&store, &candidate(1)).await;
    open(&store, term, 9).await;
    assert_eq!(store.open(term, 7).await, Err(StorageError::Fenced));
    assert_eq!(store.open(term, 9).await, Err(StorageError::Fenced));
    append(&store, 9, 0, b"on").await;
    assert_eq!(open(&store, term, 10).await, log(b"on"));
}

/// S2 with writes under way while the log is opened again.
pub(crate) async fn late_writes_change_nothing(site: &impl Site) {
    let mut random = Pcg32::new(7, 7);
    let store = site.handle();
    let term = take_lease(&store, &candidate(1)).await;
    let mut end = open(&store, term, 1).await.log.len() as u64;
    for opening in (2..60).step_by(2) {
        let record = vec![opening as u8; 1 + random.next_u32() as usize % 700_000];
        let delay = Duration::from_micros(u64::from(random.next_u32() % 8000));
        let late = async {
            match opening % 3 {
                0 => store.snapshot(opening - 1, record.clone()).await,
                _ => store.append(opening - 1, end, record.clone()).await,
            }
        };
        // Given up, but it may be under way.
        let written = tokio::time::timeout(delay, late).await;
        let image = open(&store, term, opening).await;
        let is_there = image.log.ends_with(&record) || image.snapshot == record;
        assert!(written != Ok(Ok(())) || is_there, "confirmed and lost");
        tokio::time::sleep(Duration::from_millis(5)).await;
        let again = open(&store, term, opening + 1).await;
        assert!(again == image, "changed after the opening");
        end = again.log.len() as u64;
    }
}
