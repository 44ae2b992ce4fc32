//! The tables of a run: ratios against what is asked, and every figure.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::{Map, Value, json};

use super::calibration::Calibrations;
use super::figures::Figure;
use super::rows::{Feature, Row};
use crate::bench::table::{Spread, align};

/// What the rounds measured.
#[derive(Debug, Default)]
pub(super) struct Results {
    samples: BTreeMap<String, Vec<f64>>,
    /// Why a figure was not taken; the last reason.
    obstacles: BTreeMap<String, String>,
    /// Parts of the product that do not exist yet, and what is said of them.
    pub(super) not_built: Vec<(Feature, &'static str)>,
}

impl Results {
    pub(super) fn add(&mut self, key: &str, value: f64) {
        self.samples.entry(key.to_owned()).or_default().push(value);
    }

    pub(super) fn skip(&mut self, key: &str, why: String) {
        self.obstacles.insert(key.to_owned(), why);
    }

    fn spread(&self, key: &str) -> Option<Spread> {
        Spread::of(self.samples.get(key)?.iter().copied().map(Some))
    }

    pub(super) fn median(&self, key: &str) -> Option<f64> {
        self.spread(key).map(|spread| spread.median)
    }

    /// Our figure, the best peer, their ratio and a verdict.
    fn judge(&self, row: &Row) -> Judged {
        let ours = self.median(&row.ours);
        let peer = row.asked.best(row.peers.iter().map(|key| self.median(key)));
        let not_built = self.not_built.iter().find(|(feature, _)| *feature == row.needs);
        let met = ours.and_then(|ours| row.asked.is_met(ours, peer));
        let verdict = match (not_built, met) {
            (Some((_, what)), _) => format!("not built: {what}"),
            (None, Some(true)) => "met".to_owned(),
            (None, Some(false)) => "missed".to_owned(),
            (None, None) => self.why_open(row, ours),
        };
        let is_missed = not_built.is_none() && met == Some(false);
        Judged { ours, peer, verdict, is_missed }
    }

    /// Why there is no verdict.
    fn why_open(&self, row: &Row, ours: Option<f64>) -> String {
        let keys = [&row.ours].into_iter().filter(|_| ours.is_none()).chain(&row.peers);
        let lacking = keys.filter(|key| !self.samples.contains_key(*key));
        let lacking: Vec<&str> = lacking.map(String::as_str).collect();
        match lacking[..] {
            [] => String::new(),
            _ => format!("no {}", lacking.join(", ")),
        }
    }

    /// Rows of which something was measured, or could not be.
    fn wanted<'a>(&self, rows: &'a [Row]) -> impl Iterator<Item = &'a Row> {
        let is_known =
            |key: &String| self.samples.contains_key(key) || self.obstacles.contains_key(key);
        let keys: Vec<bool> = rows.iter().map(|row| is_known(&row.ours)).collect();
        rows.iter().zip(keys).filter_map(|(row, is_wanted)| is_wanted.then_some(row))
    }

    /// The table of ratios.
    pub(super) fn ratios(&self, rows: &[Row]) -> String {
        let mut cells =
            vec![["figure", "ours", "best peer", "ratio", "asked", ""].map(str::to_owned).to_vec()];
        for row in self.wanted(rows) {
            let Judged { ours, peer, verdict, .. } = self.judge(row);
            let shown = |value: Option<f64>| value.map_or("-".to_owned(), short);
            let ratio = ours.zip(peer).map(|(ours, peer)| ours / peer);
            cells.push(vec![
                row.name.clone(),
                shown(ours),
                shown(peer),
                ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}")),
                row.asked.to_string(),
                verdict,
            ]);
        }
        align(&cells)
    }

    /// Every figure with its spread.
    pub(super) fn figures(&self, figures: &[Figure]) -> String {
        let mut cells =
            vec![["figure", "median (lowest–highest)", "unit"].map(str::to_owned).to_vec()];
        for figure in figures {
            if let Some(spread) = self.spread(&figure.key) {
                let digits = digits(spread.median);
                cells.push(vec![figure.name.clone(), spread.text(digits), figure.unit.to_owned()]);
            }
        }
        align(&cells)
    }

    /// What was not measured, and why; one line for each reason.
    pub(super) fn skipped(&self) -> String {
        let mut by_reason: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (key, why) in self.obstacles.iter().filter(|(key, _)| !self.samples.contains_key(*key))
        {
            by_reason.entry(why).or_default().push(key);
        }
        let mut text = String::new();
        for (why, keys) in by_reason {
            let _ = writeln!(text, "- {}: {why}", keys.join(", "));
        }
        text
    }

    pub(super) fn to_json(&self, rows: &[Row], calibrations: &Calibrations) -> Value {
        let verdicts: Vec<Value> = self
            .wanted(rows)
            .map(|row| {
                let Judged { ours, peer, verdict, is_missed } = self.judge(row);
                json!({
                    "row": row.name, "figure": row.ours, "ours": ours, "peer": peer,
                    "ratio": ours.zip(peer).map(|(ours, peer)| ours / peer),
                    "asked": row.asked.to_string(), "verdict": verdict, "missed": is_missed,
                })
            })
            .collect();
        let samples: Map<String, Value> =
            self.samples.iter().map(|(key, values)| (key.clone(), json!(values))).collect();
        json!({
            "rows": verdicts, "samples": samples, "skipped": self.obstacles,
            "calibration": calibrations.to_json(),
        })
    }
}

struct Judged {
    ours: Option<f64>,
    peer: Option<f64>,
    verdict: String,
    is_missed: bool,
}

/// Three digits that count.
fn short(value: f64) -> String {
    format!("{value:.*}", digits(value))
}

fn digits(value: f64) -> usize {
    match value.abs() {
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 1.0 => 2,
        _ => 3,
    }
}

#[cfg(test)]
mod tests {
    use super::super::rows::Asked;
    use super::*;

    fn row(asked: Asked, needs: Feature) -> Row {
        let peers = vec!["slow".to_owned(), "fast".to_owned()];
        Row { name: "latency".into(), ours: "ours".into(), peers, asked, needs }
    }

    fn results() -> Results {
        let mut results = Results::default();
        for value in [2.0, 1.0, 30.0] {
            results.add("ours", value);
            results.add("fast", 4.0);
        }
        results.skip("slow", "it is not installed".to_owned());
        results
    }

    #[test]
    fn medians_are_compared_with_the_best_peer_that_ran() {
        let asked = Asked::AtMost { times: 0.5, plus: 0.0 };
        let table = results().ratios(&[row(asked, Feature::Packets)]);
        let line = table.lines().last().expect("a row");
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        assert_eq!(cells[1..7], ["latency", "2.00", "4.00", "0.50", "≤ 0.5 x", "met"]);
        let table =
            results().ratios(&[row(Asked::AtMost { times: 0.4, plus: 0.0 }, Feature::Packets)]);
        assert!(table.contains("missed"), "{table}");
    }

    #[test]
    fn a_part_that_is_not_built_has_no_verdict() {
        let mut results = results();
        results.not_built.push((Feature::SameHost, "the path without packets"));
        let asked = Asked::AtMost { times: 0.1, plus: 0.0 };
        let table = results.ratios(&[row(asked, Feature::SameHost)]);
        assert!(table.contains("not built: the path") && !table.contains("missed"), "{table}");
    }

    #[test]
    fn what_was_not_measured_is_told_once_for_each_reason() {
        let mut results = results();
        results.skip("other", "it is not installed".to_owned());
        results.skip("fast", "one round failed".to_owned());
        assert_eq!(results.skipped(), "- other, slow: it is not installed\n");
        let json = results.to_json(&[], &Calibrations::default());
        assert_eq!(json["samples"]["ours"][2], 30.0);
    }
}
