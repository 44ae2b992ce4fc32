//! What a daemon tells on standard error: one line for each session, stream or call that begins, ends,
//! fails or is refused.
//!
//! Lines carry no time: journald and container runtimes add their own, and in a terminal `ts` does. At
//! most [`LINES_PER_SECOND`] are written; the rest is counted, and the count is told with the next line,
//! so that a flood from outside is bounded; log rotation is up to the operator. Nothing is written for single packets. A program that
//! uses the library hears nothing: only daemons turn the lines on.

use std::fmt::Display;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::status::Event;

/// Lines written in any one second; more are counted.
const LINES_PER_SECOND: u32 = 50;

/// Characters of a line; what peers send is in it.
const MAX_CHARS: usize = 1000;

static ENABLED: AtomicBool = AtomicBool::new(false);
static PACE: Mutex<Pace> = Mutex::new(Pace { second: None, written: 0, suppressed: 0 });
pub(crate) static SUPPRESSED: Event = Event::new("log.suppressed_lines");

/// Turns the lines on.
pub(crate) fn enable() {
    ENABLED.store(true, Ordering::Relaxed);
}

/// Writes one line, if lines are wanted and this second has room for it.
pub(crate) fn line(text: impl Display) {
    if !ENABLED.load(Ordering::Relaxed) {
        return;
    }
    // Numbers cannot be left half changed.
    let admitted = PACE.lock().unwrap_or_else(PoisonError::into_inner).admit(Instant::now());
    let Some(missed) = admitted else {
        return SUPPRESSED.count();
    };
    let mut out = std::io::stderr().lock();
    if missed > 0 {
        let _ = writeln!(out, "dquant: {missed} more lines were suppressed");
    }
    // A daemon that nobody listens to goes on.
    let _ = writeln!(out, "dquant: {}", printable(&text.to_string()));
}

/// One line and no more, without control characters, whatever a peer put into it.
fn printable(text: &str) -> String {
    let show = |char: char| if char.is_control() { '\u{fffd}' } else { char };
    text.chars().take(MAX_CHARS).map(show).collect()
}

/// How many lines this second has seen.
#[derive(Debug)]
struct Pace {
    second: Option<Instant>,
    written: u32,
    suppressed: u64,
}

impl Pace {
    /// Whether a line may be written now, and how many could not since the last one.
    fn admit(&mut self, now: Instant) -> Option<u64> {
        let fresh = |second: Instant| now.duration_since(second) >= Duration::from_secs(1);
        if self.second.is_none_or(fresh) {
            (self.second, self.written) = (Some(now), 0);
        }
        if self.written >= LINES_PER_SECOND {
            self.suppressed += 1;
            return None;
        }
        self.written += 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_cut_and_counted() {
        let mut pace = Pace { second: None, written: 0, suppressed: 0 };
        let start = Instant::now();
        let admitted = (0..1000).filter(|_| pace.admit(start).is_some()).count();
        assert_eq!(admitted, LINES_PER_SECOND as usize);
        let later = start + Duration::from_secs(1);
        assert_eq!(pace.admit(later), Some(1000 - u64::from(LINES_PER_SECOND)));
        assert_eq!(pace.admit(later), Some(0));
    }

    #[test]
    fn a_line_is_one_line_whatever_a_peer_sends() {
        assert_eq!(printable("a\nb\x1b[2Jc\r"), "a\u{fffd}b\u{fffd}[2Jc\u{fffd}");
        assert_eq!(printable(&"x".repeat(5000)).len(), MAX_CHARS);
    }
}
