//! The table of ratios and the targets.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::{Map, Value, json};

use super::cases::{CASES, Case, Output, REFERENCES, find};
use crate::bench::table::{Spread, Target, align};
use crate::shell::Failure;

/// What the rounds measured, by the key of the case.
#[derive(Debug, Default)]
pub(super) struct Results {
    measured: BTreeMap<&'static str, Vec<Value>>,
    skipped: BTreeMap<&'static str, String>,
}

/// A figure that has a target.
struct Goal {
    figure: &'static str,
    of: fn(&Results) -> Option<f64>,
    digits: usize,
    target: Target,
}

const HOST: &str = "host_cpu_s_per_gtok";
const ALL: &str = "all_cpu_s_per_gtok";
const RATE: &str = "mtokens_per_s";

const GOALS: &[Goal] = &[
    Goal {
        figure: "host CPU s/10^9 tokens: offload, u16",
        of: |results| results.median("offload", HOST),
        digits: 3,
        target: Target::AtMost(0.05),
    },
    Goal {
        figure: "host CPU s/10^9 tokens: offload, int64 x and y in torch",
        of: |results| results.median("offload-pairs", HOST),
        digits: 3,
        target: Target::AtMost(0.10),
    },
    Goal {
        figure: "Mtokens/s: offload, files cached",
        of: |results| results.median("offload", RATE),
        digits: 0,
        target: Target::AtLeast(500.0),
    },
    Goal {
        figure: "Mtokens/s: offload, from disk / sequential reads of the disk",
        of: |results| results.ratio("offload-disk", "disk-sequential", RATE),
        digits: 2,
        target: Target::AtLeast(0.95),
    },
    Goal {
        figure: "CPU: local u32 files / plain loop preadv and narrow",
        of: |results| results.ratio("local", "preadv", HOST),
        digits: 2,
        target: Target::AtMost(1.3),
    },
    Goal {
        figure: "CPU s/10^9 tokens: local u16 files",
        of: |results| results.median("local-u16", HOST),
        digits: 3,
        target: Target::AtMost(0.45),
    },
    Goal {
        figure: "Mtokens/s: local u32 files",
        of: |results| results.median("local", RATE),
        digits: 0,
        target: Target::AtLeast(900.0),
    },
    Goal {
        figure: "Python overhead per batch, us: numpy",
        of: |results| results.median("overhead", "overhead_numpy_us"),
        digits: 2,
        target: Target::AtMost(3.0),
    },
    Goal {
        figure: "Python overhead per batch, us: torch",
        of: |results| results.median("overhead", "overhead_torch_us"),
        digits: 2,
        target: Target::AtMost(6.0),
    },
    Goal {
        figure: "open to first batch, ms: one corpus, daemons warm",
        of: |results| results.median("opening", "open_one_ms"),
        digits: 1,
        target: Target::AtMost(10.0),
    },
    Goal {
        figure: "open to first batch, ms: three corpora",
        of: |results| results.median("opening", "open_three_ms"),
        digits: 1,
        target: Target::AtMost(100.0),
    },
    Goal {
        figure: "open to first batch, ms: 3,000 local corpora, resumed",
        of: |results| results.median("opening", "open_many_ms"),
        digits: 1,
        target: Target::AtMost(500.0),
    },
];

impl Results {
    pub(super) fn add(&mut self, case: &Case, measured: Value) {
        self.measured.entry(case.key).or_default().push(measured);
    }

    /// Notes why a case has no figures, or fewer than there were rounds.
    pub(super) fn skip(&mut self, case: &Case, why: String) {
        self.skipped.insert(case.key, why);
    }

    /// Streams of Dquant over the same files are equal, however they came.
    pub(super) fn check_streams(&self) -> Result<(), Failure> {
        let mut seen: Vec<(&Case, &str)> = Vec::new();
        for (case, runs) in &self.measured {
            let case = find(case).filter(|case| !case.is_peer());
            for (case, digest) in case.into_iter().flat_map(|case| {
                runs.iter().filter_map(move |run| Some((case, run["digest"].as_str()?)))
            }) {
                let first = seen.iter().find(|(other, _)| other.stream() == case.stream());
                match first {
                    Some((other, wanted)) if *wanted != digest => {
                        return Err(Failure::check(format!(
                            "'{}' delivered another stream than '{}': {digest}, {wanted}",
                            case.key, other.key
                        )));
                    }
                    Some(_) => {}
                    None => seen.push((case, digest)),
                }
            }
        }
        Ok(())
    }

    fn spread(&self, key: &str, figure: &str) -> Option<Spread> {
        Spread::of(self.measured.get(key)?.iter().map(|run| run[figure].as_f64()))
    }

    fn median(&self, key: &str, figure: &str) -> Option<f64> {
        Some(self.spread(key, figure)?.median)
    }

    /// Of the medians: a row over another.
    fn ratio(&self, key: &str, other: &str, figure: &str) -> Option<f64> {
        Some(self.median(key, figure)? / self.median(other, figure)?)
    }

    /// The ratio of a row to the reference of its table.
    fn relative(&self, case: &Case, figure: &str) -> Option<f64> {
        let (_, reference) = REFERENCES.iter().find(|(output, _)| *output == case.output)?;
        self.ratio(case.key, reference, figure)
    }

    /// The tables for people.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for (output, name) in Output::TABLES {
            let rows = CASES.iter().filter(|case| case.output == output);
            let rows: Vec<_> = rows.filter_map(|case| self.row(case)).collect();
            if rows.is_empty() {
                continue;
            }
            let heads = [
                name,
                "Mtokens/s",
                "host CPU s/10^9",
                "all CPU s/10^9",
                "rate",
                "host CPU",
                "all CPU",
                "first batch s",
            ];
            let table: Vec<_> =
                [heads.map(str::to_owned).to_vec()].into_iter().chain(rows).collect();
            text += &align(&table);
            if let Some((_, key)) = REFERENCES.iter().find(|(of, _)| *of == output)
                && let Some(case) = find(key)
            {
                let _ = writeln!(text, "rate, host CPU, all CPU: relative to {}", case.name);
            }
            text.push('\n');
        }
        text += &self.goals();
        for (key, why) in &self.skipped {
            let _ = writeln!(text, "skipped: {key}: {why}");
        }
        for reason in self.refusals() {
            let _ = writeln!(text, "refused: {reason}");
        }
        text
    }

    /// A row of a table; `None` if the case did not run.
    fn row(&self, case: &Case) -> Option<Vec<String>> {
        let text = |figure, digits| {
            self.spread(case.key, figure).map_or("-".to_owned(), |spread| spread.text(digits))
        };
        let relative = |figure| {
            self.relative(case, figure).map_or(String::new(), |ratio| format!("{ratio:.3}"))
        };
        self.measured.get(case.key)?;
        Some(vec![
            case.name.to_owned(),
            text(RATE, 0),
            text(HOST, 3),
            text(ALL, 3),
            relative(RATE),
            relative(HOST),
            relative(ALL),
            text("first_batch_s", 3),
        ])
    }

    fn goals(&self) -> String {
        let heads = ["figure", "measured", "target", ""].map(str::to_owned).to_vec();
        let mut rows = vec![heads];
        for goal in GOALS {
            let measured = (goal.of)(self);
            let value = measured.map_or("-".to_owned(), |value| format!("{value:.*}", goal.digits));
            let word = match measured.and_then(|value| goal.target.is_met(value)) {
                Some(true) => "met",
                Some(false) => "missed",
                None => "not measured",
            };
            rows.push(vec![goal.figure.into(), value, goal.target.text(), word.into()]);
        }
        align(&rows)
    }

    /// Openings that Dquant refused, with the reason.
    fn refusals(&self) -> Vec<&str> {
        let last = self.measured.get("opening").and_then(|runs| runs.last());
        let fields = last.and_then(Value::as_object).into_iter().flatten();
        fields
            .filter(|(key, _)| key.ends_with("_refused"))
            .filter_map(|(_, why)| why.as_str())
            .collect()
    }

    /// The same for programs.
    pub(super) fn to_json(&self) -> Value {
        let mut cases = Map::new();
        for case in CASES.iter().filter(|case| self.measured.contains_key(case.key)) {
            let mut row = json!({ "name": case.name });
            for figure in [RATE, HOST, ALL, "first_batch_s"] {
                if let Some(Spread { median, lowest, highest }) = self.spread(case.key, figure) {
                    let relative = self.relative(case, figure);
                    row[figure] = json!({
                        "median": median, "lowest": lowest, "highest": highest, "relative": relative,
                    });
                }
            }
            cases.insert(case.key.to_owned(), row);
        }
        let goals = GOALS.iter().map(|goal| {
            let measured = (goal.of)(self);
            json!({
                "figure": goal.figure, "measured": measured, "target": goal.target.text(),
                "met": measured.and_then(|value| goal.target.is_met(value)),
            })
        });
        json!({ "cases": cases, "goals": goals.collect::<Vec<_>>(), "skipped": self.skipped })
    }

    /// Every run.
    pub(super) fn raw(&self) -> Value {
        json!(self.measured)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results(runs: &[(&str, f64, &str)]) -> Results {
        let mut results = Results::default();
        for (key, host, digest) in runs {
            let run = json!({ RATE: 500.0, HOST: host, ALL: host * 2.0, "digest": digest });
            results.add(find(key).expect("a case"), run);
        }
        results
    }

    #[test]
    fn rows_are_compared_with_the_reference_of_the_same_output() {
        let results = results(&[
            ("memmap-random", 2.0, ""),
            ("nanogpt", 5.0, ""),
            ("offload", 0.04, "a"),
            ("offload-pairs", 0.5, "b"),
        ]);
        let relative = |key| results.relative(find(key).expect("a case"), HOST);
        assert_eq!(relative("offload"), Some(0.02));
        assert_eq!(relative("offload-pairs"), Some(0.1));
        assert_eq!(relative("local"), None);
        let text = results.text();
        let goal =
            |name: &str| text.lines().find(|line| line.contains(name)).expect("a goal").to_owned();
        assert!(goal("offload, u16").ends_with("| met          |"), "{text}");
        assert!(goal("int64 x and y in torch").contains("missed"), "{text}");
        assert!(goal("local u16 files").contains("not measured"), "{text}");
    }

    #[test]
    fn streams_over_the_same_files_must_be_equal() {
        let equal = results(&[
            ("offload", 1.0, "a"),
            ("no-offload", 1.0, "a"),
            ("local", 1.0, "a"),
            ("local-u16", 1.0, "other files, other blocks"),
            ("offload-pairs", 1.0, "b"),
            ("litdata", 1.0, "c"),
        ]);
        assert!(equal.check_streams().is_ok());
        let failure = results(&[("offload", 1.0, "a"), ("local", 1.0, "b")]).check_streams();
        let failure = failure.expect_err("they differ");
        assert_eq!(failure.exit_code(), 1);
        assert!(failure.to_string().contains("'offload'"), "{failure}");
    }

    #[test]
    fn what_was_not_measured_is_told() {
        let mut results = results(&[("memmap-random", 1.0, "")]);
        results.skip(find("mds").expect("a case"), "no wheel".into());
        results
            .add(find("opening").expect("a case"), json!({ "open_many_ms_refused": "too many" }));
        let text = results.text();
        assert!(
            text.contains("skipped: mds: no wheel") && text.contains("refused: too many"),
            "{text}"
        );
        assert_eq!(results.to_json()["skipped"]["mds"], "no wheel");
        assert_eq!(results.to_json()["goals"][0]["met"], Value::Null);
    }

    #[test]
    fn every_reference_and_goal_names_a_case() {
        for (output, key) in REFERENCES {
            assert_eq!(find(key).expect("a case").output, output);
        }
        let everything: Vec<_> = CASES.iter().map(|case| (case.key, 1.0, "")).collect();
        let mut everything = results(&everything);
        let alone = [
            "overhead_numpy_us",
            "overhead_torch_us",
            "open_one_ms",
            "open_three_ms",
            "open_many_ms",
        ];
        for (key, runs) in &mut everything.measured {
            for figure in alone.iter().filter(|_| ["overhead", "opening"].contains(key)) {
                runs[0][figure] = json!(1.0);
            }
        }
        for goal in GOALS {
            assert!((goal.of)(&everything).is_some(), "{}", goal.figure);
        }
    }
}
