//! The newest events of the cluster, and how a subscriber reads on where it stopped.
//!
//! The log is a ring of [`MAX_EVENTS`] events; writers never wait for readers. A subscriber reads
//! by position and is told when events it has not seen are gone. Numbers of [`ClusterEvent`]s begin
//! anew when another brain leads, so the positions that subscribers see also name the series:
//! `SERIES-NUMBER`.

use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use crate::view::ClusterEvent;

/// Events that are kept.
pub const MAX_EVENTS: usize = 4096;

/// The longest text of an event that is kept, in bytes; the rest is cut off.
const MAX_TEXT_BYTES: usize = 1024;

/// Events that a subscriber gets at once.
const BATCH: usize = 64;

/// See the module's text.
#[derive(Debug)]
pub struct EventLog {
    ring: Mutex<Ring>,
    /// Changes with each event, which wakes the subscribers.
    news: watch::Sender<()>,
}

#[derive(Debug)]
struct Ring {
    events: VecDeque<Arc<ClusterEvent>>,
    /// Of the events in the ring.
    series: u64,
}

/// Where a subscriber is: the series, and the number of the last event that it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    series: u64,
    number: u64,
}

impl Position {
    /// Reads what [`EventLog::after`] wrote as `id`.
    pub(super) fn parse(text: &str) -> Option<Position> {
        let (series, number) = text.split_once('-')?;
        Some(Position { series: series.parse().ok()?, number: number.parse().ok()? })
    }
}

impl EventLog {
    /// An empty log. `series` tells it from that of an earlier process: the time or a random
    /// number.
    pub fn new(series: u64) -> EventLog {
        let ring = Ring { events: VecDeque::new(), series };
        EventLog { ring: Mutex::new(ring), news: watch::Sender::new(()) }
    }

    /// Adds an event. One whose number is not above the last begins a new series, and the old
    /// events go.
    pub fn push(&self, mut event: ClusterEvent) {
        let cut = event.text.floor_char_boundary(MAX_TEXT_BYTES);
        event.text.truncate(cut);
        let mut ring = self.ring();
        if ring.events.back().is_some_and(|last| event.number <= last.number) {
            ring.events.clear();
            ring.series = ring.series.wrapping_add(1);
        }
        if ring.events.len() == MAX_EVENTS {
            ring.events.pop_front();
        }
        ring.events.push_back(Arc::new(event));
        drop(ring);
        self.news.send_replace(());
    }

    /// Changes with each event.
    pub fn subscribe(&self) -> watch::Receiver<()> {
        self.news.subscribe()
    }

    /// The number of the newest event; 0 if there is none.
    pub fn last(&self) -> u64 {
        self.ring().events.back().map_or(0, |event| event.number)
    }

    /// The oldest kept events after that number, at most so many.
    pub fn since(&self, number: u64, most: usize) -> Vec<Arc<ClusterEvent>> {
        let ring = self.ring();
        let from = ring.events.partition_point(|event| event.number <= number);
        ring.events.iter().skip(from).take(most).cloned().collect()
    }

    /// The next events after `position`, as server-sent events, and the position behind them. Empty
    /// if there are none.
    pub(super) fn after(&self, position: Option<Position>) -> (String, Option<Position>) {
        let ring = self.ring();
        let mut text = String::new();
        let known = position.filter(|position| position.series == ring.series);
        let first = ring.events.front().map_or(0, |event| event.number);
        let last = ring.events.back().map_or(0, |event| event.number);
        let seen = known.map_or(0, |position| position.number.min(last));
        let has_news = seen < last;
        if has_news && position.is_some() && known.is_none() {
            text.push_str("event: reset\ndata: {}\n\n");
        } else if has_news && known.is_some() && seen + 1 < first {
            let _ = write!(text, "event: gap\ndata: {{\"missed\":{}}}\n\n", first - seen - 1);
        }
        let from = ring.events.partition_point(|event| event.number <= seen);
        let batch: Vec<Arc<ClusterEvent>> =
            ring.events.iter().skip(from).take(BATCH).cloned().collect();
        let series = ring.series;
        drop(ring);
        for event in &batch {
            // A cluster event is plain data, and JSON has no line breaks in it.
            let json = serde_json::to_string(&**event).unwrap_or_default();
            let _ = write!(text, "id: {series}-{}\ndata: {json}\n\n", event.number);
        }
        let number = batch.last().map(|event| event.number);
        (text, number.map(|number| Position { series, number }).or(position))
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        // Nothing panics while it is held.
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(number: u64, text: &str) -> ClusterEvent {
        ClusterEvent { number, kind: "agent".into(), text: text.into(), ..ClusterEvent::default() }
    }

    fn numbers(text: &str) -> Vec<u64> {
        let ids = text.lines().filter_map(|line| line.strip_prefix("id: "));
        ids.filter_map(|id| Position::parse(id).map(|position| position.number)).collect()
    }

    /// Reads to the end, and returns the numbers and all of the text.
    fn read(
        log: &EventLog,
        mut position: Option<Position>,
    ) -> (Vec<u64>, String, Option<Position>) {
        let (mut found, mut all) = (Vec::new(), String::new());
        loop {
            let (text, next) = log.after(position);
            if text.is_empty() {
                return (found, all, position);
            }
            found.extend(numbers(&text));
            all.push_str(&text);
            position = next;
        }
    }

    #[test]
    fn a_subscriber_reads_everything_once_and_resumes() {
        let log = EventLog::new(7);
        (1..=200).for_each(|number| log.push(event(number, "x")));
        let (found, text, position) = read(&log, None);
        assert_eq!(found, (1..=200).collect::<Vec<_>>());
        assert!(!text.contains("event: gap"));
        log.push(event(201, "line\nbreak"));
        let (found, text, _) = read(&log, position);
        assert_eq!(found, [201]);
        assert_eq!(text.lines().count(), 3, "{text}");
        let resumed = Position::parse("7-150");
        assert_eq!(read(&log, resumed).0, (151..=201).collect::<Vec<_>>());
    }

    #[test]
    fn lost_events_are_told_and_memory_has_a_bound() {
        let log = EventLog::new(1);
        let many = MAX_EVENTS as u64 + 100;
        (1..=many).for_each(|number| log.push(event(number, &"\u{e9}".repeat(4000))));
        assert_eq!(log.ring().events.len(), MAX_EVENTS);
        assert!(log.ring().events.iter().all(|event| event.text.len() <= MAX_TEXT_BYTES));
        let (found, text, _) = read(&log, Position::parse("1-10"));
        assert!(text.starts_with("event: gap\ndata: {\"missed\":90}\n\n"), "{}", &text[..80]);
        assert_eq!(found.len(), MAX_EVENTS);
    }

    #[test]
    fn another_leader_begins_a_series() {
        let log = EventLog::new(1);
        (1..=5).for_each(|number| log.push(event(number, "old")));
        let (.., position) = read(&log, None);
        (1..=9).for_each(|number| log.push(event(number, "new")));
        let (found, text, position) = read(&log, position);
        assert!(text.starts_with("event: reset\n"));
        assert_eq!(found, (1..=9).collect::<Vec<_>>());
        assert_eq!(position, Position::parse("2-9"));
    }

    #[test]
    fn positions_that_nobody_wrote_are_no_position_or_an_old_one() {
        for text in ["", "7", "-", "a-1", "1-b", "1-2-3", "99999999999999999999-1"] {
            assert_eq!(Position::parse(text), None, "{text}");
        }
        let log = EventLog::new(1);
        log.push(event(1, "x"));
        assert_eq!(read(&log, Position::parse("1-18446744073709551615")).0, [0; 0]);
    }
}
