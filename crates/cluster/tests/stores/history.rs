//! Whether what clients saw can have happened one after the other.
//!
//! The durable log has an order of all entries. It explains what clients saw if
//!
//! - H1: each request has at most one entry, and each answered one has exactly one;
//! - H2: each answer is what the replay of the log gives for its entry;
//! - H3: an entry is not before that of a request which was answered before this one was sent.
//!
//! H1 to H3 make the log's order a linearisation: one of all requests that keeps the order of those
//! that did not overlap, with the same answers.

use std::collections::HashMap;
use std::fmt::Debug;
use std::time::Duration;

/// What a client saw. Times are since the same instant.
#[derive(Clone, Debug)]
pub(crate) struct Seen<A> {
    /// Client and its number of the request.
    pub(crate) request: (u64, u64),
    pub(crate) sent: Duration,
    /// When it was answered, and how; `None` when it was not by the end.
    pub(crate) answered: Option<(Duration, A)>,
}

/// An entry of the log, in its order.
#[derive(Clone, Debug)]
pub(crate) struct Entry<A> {
    pub(crate) request: (u64, u64),
    /// What its replay gives.
    pub(crate) outcome: A,
}

/// Checks H1 to H3 and says what is violated.
pub(crate) fn check<A: PartialEq + Debug>(
    entries: &[Entry<A>],
    seen: &[Seen<A>],
) -> Result<(), String> {
    let mut places = HashMap::new();
    for (place, entry) in entries.iter().enumerate() {
        if let Some(before) = places.insert(entry.request, place) {
            return Err(format!("H1: {:?} has entries {before} and {place}", entry.request));
        }
    }
    let mut in_order: Vec<(usize, &Seen<A>)> = Vec::new();
    for seen in seen {
        match (places.get(&seen.request), &seen.answered) {
            (Some(place), Some((_, answer))) if entries[*place].outcome != *answer => {
                let replayed = &entries[*place].outcome;
                return Err(format!("H2: {:?} got {answer:?}, not {replayed:?}", seen.request));
            }
            (Some(place), _) => in_order.push((*place, seen)),
            (None, Some((_, answer))) => {
                return Err(format!("H1: {:?} got {answer:?} and has no entry", seen.request));
            }
            (None, None) => {}
        }
    }
    in_order.sort_by_key(|(place, _)| *place);
    let mut latest: Option<&Seen<A>> = None;
    for (place, seen) in in_order {
        if let (Some(latest), Some((answered, _))) = (latest, &seen.answered)
            && *answered < latest.sent
        {
            return Err(format!(
                "H3: {:?} was answered before {:?} was sent, and its entry {place} is later",
                seen.request, latest.request
            ));
        }
        if latest.is_none_or(|latest| latest.sent < seen.sent) {
            latest = Some(seen);
        }
    }
    Ok(())
}

fn seen(request: u64, sent: u64, answered: Option<(u64, &'static str)>) -> Seen<&'static str> {
    let answered = answered.map(|(at, answer)| (Duration::from_millis(at), answer));
    Seen { request: (request, 1), sent: Duration::from_millis(sent), answered }
}

fn log(entries: &[(u64, &'static str)]) -> Vec<Entry<&'static str>> {
    let entry = |&(request, outcome)| Entry { request: (request, 1), outcome };
    entries.iter().map(entry).collect()
}

#[test]
fn histories_that_cannot_be_are_found() {
    let saw = [seen(1, 0, Some((5, "a"))), seen(2, 3, Some((9, "b"))), seen(3, 7, None)];
    let fine: [&[(u64, &str)]; 4] = [
        &[(1, "a"), (2, "b"), (3, "c")],
        &[(2, "b"), (1, "a")],
        &[(1, "a"), (2, "b")],
        &[(1, "a"), (3, "c"), (2, "b")],
    ];
    for entries in fine {
        assert_eq!(check(&log(entries), &saw), Ok(()));
    }
    let wrong: [(&[(u64, &str)], &str); 4] = [
        (&[(1, "a")], "H1: (2, 1) got \"b\" and has no entry"),
        (&[(1, "a"), (2, "b"), (1, "a")], "H1: (1, 1) has entries 0 and 2"),
        (&[(1, "a"), (2, "c")], "H2: (2, 1) got \"b\", not \"c\""),
        (&[(3, "c"), (2, "b"), (1, "a")], "H3: (1, 1) was answered before (3, 1) was sent"),
    ];
    for (entries, reason) in wrong {
        let error = check(&log(entries), &saw).expect_err(reason);
        assert!(error.starts_with(reason), "{error}");
    }
}
