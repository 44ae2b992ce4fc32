//! The log of a daemon on standard error: one line for each session, stream or call that begins,
//! ends, fails or is refused.
//!
//! Lines carry no time: journald and container runtimes add their own, and in a terminal `ts` does.
//! A line that repeats the one before it is counted and not written, and at most
//! [`LINES_PER_WINDOW`] are written in ten seconds; the next line reports both counts. Refusals,
//! which anyone who reaches a port can cause, have a smaller limit of their own
//! ([`REFUSALS_PER_WINDOW`]), so they do not displace other lines. A flood from outside thus writes
//! at most 0.6 GB a day. Nothing is written for single packets. Programs that use the library write
//! nothing: only daemons enable the log. Defects of this program are written by all of them.

use std::fmt::Display;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::event::Event;
use crate::text::one_line;

/// Lines written in one window; more are counted.
const LINES_PER_WINDOW: u32 = 50;
/// Refusals written in one window, in addition; more are counted.
const REFUSALS_PER_WINDOW: u32 = 10;
/// Defects written in one window, in addition.
const DEFECTS_PER_WINDOW: u32 = 10;
const WINDOW: Duration = Duration::from_secs(10);

/// A repeating line is written once more after this time, with its count.
const REPEAT: Duration = Duration::from_secs(60);

/// Characters of a line, which may contain text from peers.
const MAX_CHARS: usize = 1000;

static ENABLED: AtomicBool = AtomicBool::new(false);
static LINES: Mutex<RateLimit> = Mutex::new(RateLimit::new("line", LINES_PER_WINDOW));
static DEFECTS: Mutex<RateLimit> = Mutex::new(RateLimit::new("defect", DEFECTS_PER_WINDOW));
static REFUSALS: Mutex<RateLimit> = Mutex::new(RateLimit::new("refusal", REFUSALS_PER_WINDOW));
/// Lines that were not written.
pub static SUPPRESSED: Event = Event::new("log.suppressed_lines");

/// Enables the log.
pub fn enable() {
    ENABLED.store(true, Ordering::Relaxed);
}

/// Writes one line, if the log is enabled, this window has room and the line is not a repetition.
pub fn line(text: impl Display) {
    if ENABLED.load(Ordering::Relaxed) {
        write(&LINES, text);
    }
}

/// Writes one line for a connection, call or request that was refused.
pub fn refusal(text: impl Display) {
    if ENABLED.load(Ordering::Relaxed) {
        write(&REFUSALS, text);
    }
}

/// Writes one line about a defect of this program, whether the log is enabled or not.
pub fn defect(text: impl Display) {
    write(&DEFECTS, text);
}

fn write(limit: &Mutex<RateLimit>, text: impl Display) {
    let text = printable(&text.to_string());
    // Nothing in it is left half changed.
    let mut limit = limit.lock().unwrap_or_else(PoisonError::into_inner);
    let (what, admitted) = (limit.what, limit.admit(&text, Instant::now()));
    drop(limit);
    let Some(Missed { repeated, suppressed }) = admitted else {
        return SUPPRESSED.count();
    };
    // All of it in one call: daemons that share a terminal or a file would otherwise write into
    // each other's lines.
    let mut out = Vec::new();
    if repeated > 0 {
        let _ = writeln!(out, "dquant: the {what} before was repeated {repeated} times");
    }
    if suppressed > 0 {
        let _ = writeln!(out, "dquant: {suppressed} more {what}s were suppressed");
    }
    let _ = writeln!(out, "dquant: {text}");
    // A daemon continues when nobody reads its standard error.
    let _ = std::io::stderr().write_all(&out);
}

/// A single line, whatever text of a peer it contains.
fn printable(text: &str) -> String {
    one_line(text).chars().take(MAX_CHARS).collect()
}

/// Lines that were not written since the last one.
#[derive(Debug, Default, PartialEq, Eq)]
struct Missed {
    repeated: u64,
    suppressed: u64,
}

/// The lines counted in this window, and the last one written.
#[derive(Debug)]
struct RateLimit {
    /// Of what.
    what: &'static str,
    most: u32,
    window: Option<Instant>,
    written: u32,
    last: String,
    last_at: Option<Instant>,
    missed: Missed,
}

impl RateLimit {
    const fn new(what: &'static str, most: u32) -> RateLimit {
        let missed = Missed { repeated: 0, suppressed: 0 };
        RateLimit {
            what,
            most,
            window: None,
            written: 0,
            last: String::new(),
            last_at: None,
            missed,
        }
    }

    /// Whether this line may be written now, and what was left out since the last one.
    fn admit(&mut self, text: &str, now: Instant) -> Option<Missed> {
        let within = |then: Option<Instant>, span| then.is_some_and(|at| now - at < span);
        if within(self.last_at, REPEAT) && self.last == text {
            self.missed.repeated += 1;
            return None;
        }
        if !within(self.window, WINDOW) {
            (self.window, self.written) = (Some(now), 0);
        }
        if self.written >= self.most {
            self.missed.suppressed += 1;
            return None;
        }
        self.written += 1;
        (self.last, self.last_at) = (text.to_owned(), Some(now));
        Some(std::mem::take(&mut self.missed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_cut_and_counted() {
        let (mut limit, start) = (RateLimit::new("line", LINES_PER_WINDOW), Instant::now());
        let mut admit = |number, now| limit.admit(&format!("line {number}"), now);
        let admitted = (0..1000).filter(|number| admit(*number, start).is_some()).count();
        assert_eq!(admitted, LINES_PER_WINDOW as usize);
        let (repeated, suppressed) = (0, 1000 - u64::from(LINES_PER_WINDOW));
        let later = start + WINDOW;
        assert_eq!(admit(1000, later), Some(Missed { repeated, suppressed }));
        assert_eq!(admit(1001, later), Some(Missed::default()));
    }

    #[test]
    fn a_line_that_repeats_is_written_once_a_minute() {
        let (mut limit, start) = (RateLimit::new("line", LINES_PER_WINDOW), Instant::now());
        assert_eq!(limit.admit("no descriptors", start), Some(Missed::default()));
        for second in 1..60 {
            let now = start + Duration::from_secs(second);
            assert_eq!(limit.admit("no descriptors", now), None);
        }
        let missed = |repeated| Some(Missed { repeated, suppressed: 0 });
        assert_eq!(limit.admit("no descriptors", start + REPEAT), missed(59));
        assert_eq!(limit.admit("no descriptors", start + REPEAT), None);
        assert_eq!(limit.admit("all is well", start + REPEAT), missed(1));
        assert_eq!(limit.admit("no descriptors", start + REPEAT), missed(0));
    }

    #[test]
    fn a_line_is_one_line_whatever_a_peer_sends() {
        assert_eq!(printable("a\nb\x1b[2Jc\r"), "a\u{fffd}b\u{fffd}[2Jc\u{fffd}");
        assert_eq!(printable(&"x".repeat(5000)).len(), MAX_CHARS);
    }
}
