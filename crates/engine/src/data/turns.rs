//! How long an engine's turns take, by what they were spent on.
//!
//! While an engine works for one client, all others wait. The longest time of each kind of work
//! shows which kind makes them wait. It is wall time, including the time that the scheduler gave to
//! other threads.

use nic::clock;
use nic::driver::RESCUED;
use roce::{Duration, Time};
use service::log;

use crate::status::Counters;

/// How far back "recent" reaches: to between one and two of these.
const RECENT: Duration = Duration::from_millis(10_000);

/// Kind of work in a part of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Packets in and out, timers.
    Packets,
    /// One stream: replies, a block checked, samples copied, requests.
    Stream,
    /// Sessions of a target: requests, a block converted, reads started.
    Sessions,
    /// A stream or session begun.
    Open,
    /// A queue pair made.
    NewQp,
    /// A queue pair connected.
    Connect,
    /// A connection of a stream dropped, or all of them.
    Drop,
    /// A stream or session ended.
    Close,
    /// Files of ended sessions removed from the disk.
    Files,
    /// Counters collected.
    Status,
}

impl Work {
    const ALL: [(Work, &'static str); 10] = [
        (Work::Packets, "packets"),
        (Work::Stream, "stream"),
        (Work::Sessions, "sessions"),
        (Work::Open, "open"),
        (Work::NewQp, "new_qp"),
        (Work::Connect, "connect"),
        (Work::Drop, "drop"),
        (Work::Close, "close"),
        (Work::Files, "files"),
        (Work::Status, "status"),
    ];
}

/// The longest times of one kind of work, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Longest {
    ever_ns: u64,
    current_ns: u64,
    previous_ns: u64,
}

/// A stopwatch over the parts of a turn; it reads the clock once for each.
#[derive(Debug)]
pub(crate) struct Turns {
    longest: [Longest; Work::ALL.len()],
    /// When the current part began.
    since: Time,
    window_began: Time,
    turns: u64,
    sleeps: u64,
    rescued_wakeups: u64,
}

impl Turns {
    pub(crate) fn new(now: Time) -> Turns {
        let longest = [Longest::default(); Work::ALL.len()];
        Turns { longest, since: now, window_began: now, turns: 0, sleeps: 0, rescued_wakeups: 0 }
    }

    /// A turn begins.
    pub(crate) fn begin(&mut self, now: Time) {
        self.turns += 1;
        self.since = now;
    }

    /// Ends the current part, which was spent on `work`.
    pub(crate) fn spent(&mut self, work: Work) {
        self.spent_until(work, clock::now());
    }

    fn spent_until(&mut self, work: Work, now: Time) -> Time {
        if now.since(self.window_began) >= RECENT {
            self.turn_window(now);
        }
        let took_ns = now.since(self.since).as_nanos();
        let longest = &mut self.longest[work as usize];
        longest.ever_ns = longest.ever_ns.max(took_ns);
        longest.current_ns = longest.current_ns.max(took_ns);
        self.since = now;
        now
    }

    fn turn_window(&mut self, now: Time) {
        self.window_began = now;
        for longest in &mut self.longest {
            longest.previous_ns = std::mem::take(&mut longest.current_ns);
        }
    }

    pub(crate) fn slept(&mut self) {
        self.sleeps += 1;
    }

    /// A sleep ended by time, with work that nobody had announced.
    pub(crate) fn rescued(&mut self) {
        self.rescued_wakeups += 1;
        log::defect(RESCUED);
    }

    pub(crate) fn report(&self, counters: &mut Counters) {
        counters.set("engine.turns", self.turns);
        counters.set("engine.sleeps", self.sleeps);
        counters.set("engine.rescued_wakeups", self.rescued_wakeups);
        for ((_, name), longest) in Work::ALL.iter().zip(self.longest) {
            let recent_ns = longest.current_ns.max(longest.previous_ns);
            counters.set(&format!("engine.longest_us.{name}"), longest.ever_ns / 1_000);
            counters.set(&format!("engine.recent_us.{name}"), recent_ns / 1_000);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(us: u64) -> Time {
        Time::from_nanos(us * 1_000)
    }

    #[test]
    fn the_longest_of_each_kind_is_kept_and_the_recent_forgotten() {
        let mut turns = Turns::new(at(0));
        turns.spent_until(Work::Open, at(900));
        turns.spent_until(Work::Packets, at(950));
        turns.spent_until(Work::Open, at(1_000));
        let report = |turns: &Turns| {
            let mut counters = Counters::default();
            turns.report(&mut counters);
            ["longest_us.open", "recent_us.open", "longest_us.packets", "longest_us.close"]
                .map(|name| counters.get(&format!("engine.{name}")))
        };
        assert_eq!(report(&turns), [900, 900, 50, 0]);
        for second in 1..=30 {
            turns.since = at(second * 1_000_000 - 3);
            turns.spent_until(Work::Open, at(second * 1_000_000));
        }
        assert_eq!(report(&turns), [900, 3, 50, 0]);
    }

    #[test]
    fn a_rescue_is_in_the_report() {
        let mut turns = Turns::new(at(0));
        let mut counters = Counters::default();
        turns.report(&mut counters);
        assert_eq!(counters.get("engine.rescued_wakeups"), 0);
        turns.rescued();
        turns.report(&mut counters);
        assert_eq!(counters.get("engine.rescued_wakeups"), 1);
    }

    #[test]
    fn every_kind_has_its_place() {
        for (place, (work, _)) in Work::ALL.into_iter().enumerate() {
            assert_eq!(work as usize, place);
        }
    }
}
