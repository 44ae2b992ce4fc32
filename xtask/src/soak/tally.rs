//! What happened, and the table at the end.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use serde_json::Value;

use super::draw::{CLASSES, Disturbance, Pair};
use super::growth::Growth;

/// What a counter of rescued wake-ups has in its name.
const RESCUED: &str = "rescued";

/// Streams, or verbs programs of one kind.
#[derive(Clone, Debug, Default)]
pub(super) struct Counts {
    pub(super) begun: u64,
    ended: u64,
    killed: u64,
    pub(super) stopped: u64,
    /// Opened anew after their DPU was killed.
    pub(super) resumed: u64,
    /// Batches or messages that were compared.
    items: u64,
    bytes: u64,
}

impl Counts {
    pub(super) fn ended(&mut self, was_killed: bool) {
        if was_killed { self.killed += 1 } else { self.ended += 1 }
    }

    /// How many have come to their end, in whatever way.
    pub(super) fn over(&self) -> u64 {
        self.ended + self.killed
    }

    pub(super) fn count(&mut self, items: u64, bytes: u64) {
        self.items += items;
        self.bytes += bytes;
    }
}

/// Everything that is counted.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) rounds: u64,
    pub(super) streams: Counts,
    verbs: BTreeMap<(usize, &'static str), Counts>,
    /// Of targets and DPUs: killed, stopped.
    target: [u64; 2],
    dpu: [u64; 2],
    /// The longest pauses: without what the machine took, and with it.
    pauses: BTreeMap<&'static str, (Duration, Duration)>,
    /// Counters of rescued wake-ups that are not zero.
    rescued: BTreeMap<String, u64>,
    has_rescued: bool,
    /// How long the canary was late, all in all.
    pub(super) machine_took: Duration,
}

impl Tally {
    /// The counts of such a pair.
    pub(super) fn verbs(&mut self, pair: &Pair) -> &mut Counts {
        self.verbs.entry((pair.class, pair.mode)).or_default()
    }

    pub(super) fn disturbed(&mut self, what: &Disturbance) {
        let counts = if what.is_dpu { &mut self.dpu } else { &mut self.target };
        counts[usize::from(what.is_stop)] += 1;
    }

    pub(super) fn pause(&mut self, kind: &'static str, counted: Duration, whole: Duration) {
        let longest = self.pauses.entry(kind).or_default();
        longest.0 = longest.0.max(counted);
        longest.1 = longest.1.max(whole);
    }

    /// Takes the counters of rescued wake-ups out of a daemon's counters.
    pub(super) fn rescued(&mut self, name: &str, counters: &BTreeMap<String, u64>) {
        for (counter, value) in counters.iter().filter(|(counter, _)| counter.contains(RESCUED)) {
            self.rescue(name, counter, *value);
        }
    }

    /// Takes them out of what a library explains.
    pub(super) fn rescued_in(&mut self, name: &str, value: &Value) {
        match value {
            Value::Object(fields) => {
                for (field, value) in fields {
                    match value.as_u64().filter(|_| field.contains(RESCUED)) {
                        Some(count) => self.rescue(name, field, count),
                        None => self.rescued_in(name, value),
                    }
                }
            }
            Value::Array(values) => values.iter().for_each(|value| self.rescued_in(name, value)),
            _ => {}
        }
    }

    fn rescue(&mut self, name: &str, counter: &str, value: u64) {
        self.has_rescued = true;
        if value > 0 {
            let highest = self.rescued.entry(format!("{name}: {counter}")).or_default();
            *highest = value.max(*highest);
        }
    }

    /// # Errors
    /// Names the counters of rescued wake-ups that are not zero.
    pub(super) fn check_rescued(&self) -> Result<(), String> {
        let all: Vec<String> =
            self.rescued.iter().map(|(name, value)| format!("{name} {value}")).collect();
        match all.is_empty() {
            true => Ok(()),
            false => Err(format!("wake-ups had to be rescued: {}", all.join(", "))),
        }
    }

    /// The table.
    pub(super) fn text(&self, growth: &Growth, no_verbs: Option<&str>) -> String {
        let mut text = String::new();
        self.write(&mut text, growth, no_verbs).unwrap_or_default();
        text
    }

    fn write(
        &self,
        text: &mut String,
        growth: &Growth,
        no_verbs: Option<&str>,
    ) -> Result<(), std::fmt::Error> {
        writeln!(text, "{} rounds", self.rounds)?;
        let [target, dpu] = [self.target, self.dpu];
        writeln!(
            text,
            "targets: {} killed, {} stopped; DPUs: {} killed, {} stopped\n",
            target[0], target[1], dpu[0], dpu[1]
        )?;
        let head = ["begun", "ended", "killed", "stopped", "resumed", "verified", "MiB"];
        row(text, "", &head)?;
        counts(text, "streams (batches)", &self.streams)?;
        for ((class, mode), found) in &self.verbs {
            counts(text, &format!("verbs, {mode}, {} (messages)", CLASSES[*class].0), found)?;
        }
        if let Some(why) = no_verbs {
            writeln!(text, "verbs programs: skipped: {why}")?;
        }
        row(text, "\nlongest pause, s", &["counted", "whole"])?;
        for (kind, (counted, whole)) in &self.pauses {
            let seconds = |time: &Duration| format!("{:.2}", time.as_secs_f64());
            row(text, kind, &[&seconds(counted), &seconds(whole)])?;
        }
        writeln!(text, "the canary was late by {:.1} s in all", self.machine_took.as_secs_f64())?;
        let head = ["rounds", "RSS MiB", "private", "fds", "threads", "mappings"];
        row(text, "\nbetween rounds, first and last", &head)?;
        for (name, first, last, rounds) in growth.rows() {
            let pair = |first: u64, last: u64| format!("{first} {last}");
            let cells = [
                rounds.to_string(),
                pair(first.resident_kib >> 10, last.resident_kib >> 10),
                pair(first.private_kib >> 10, last.private_kib >> 10),
                pair(first.descriptors, last.descriptors),
                pair(first.threads, last.threads),
                pair(first.shared_mappings, last.shared_mappings),
            ];
            row(text, name, &cells.each_ref().map(String::as_str))?;
        }
        let rescued: u64 = self.rescued.values().sum();
        match self.has_rescued {
            true => writeln!(text, "\nrescued wake-ups: {rescued}"),
            false => writeln!(text, "\nrescued wake-ups: not counted, no counter has that name"),
        }
    }
}

fn counts(text: &mut String, name: &str, found: &Counts) -> Result<(), std::fmt::Error> {
    let Counts { begun, ended, killed, stopped, resumed, items, bytes } = found;
    let cells = [begun, ended, killed, stopped, resumed, items, &(bytes >> 20)];
    row(text, name, &cells.map(u64::to_string).each_ref().map(String::as_str))
}

fn row(text: &mut String, name: &str, cells: &[&str]) -> Result<(), std::fmt::Error> {
    write!(text, "{name:<42}")?;
    cells.iter().try_for_each(|cell| write!(text, "{cell:>10}"))?;
    writeln!(text)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rescued_wake_ups_are_found_wherever_they_are_counted() {
        let mut tally = Tally::default();
        assert!(tally.text(&Growth::default(), None).contains("not counted"));
        let counters = BTreeMap::from([
            ("neighbours.rescued_wakeups".to_owned(), 0),
            ("roce.timeouts".to_owned(), 7),
        ]);
        tally.rescued("the target", &counters);
        tally.check_rescued().expect("none");
        assert!(tally.text(&Growth::default(), Some("no cc")).contains("rescued wake-ups: 0"));
        let device = json!({"device": "dq_lo", "same_host": [{"rescued_wakeups": 3}]});
        tally.rescued_in("a program", &device);
        let found = tally.check_rescued().expect_err("three");
        assert!(found.contains("a program: rescued_wakeups 3"), "{found}");
        assert!(!found.contains("target"), "{found}");
    }
}
