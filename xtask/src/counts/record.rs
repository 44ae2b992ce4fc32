//! The file of counts. One line for each figure, so that a diff shows what moved.

use std::fmt;

use super::profile::{Figure, digits};

/// First line of the file.
const TITLE: &str =
    "# Instructions and system calls by `cargo xtask counts`; docs/benchmarks.md explains them.";

/// Counts that differ by less than this are equal, whatever their percentage.
const NEGLIGIBLE: f64 = 2.0;

/// The figures of one commit.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Record {
    /// Versions of what the counts depend on.
    pub(super) versions: String,
    pub(super) figures: Vec<Figure>,
}

impl Record {
    /// Reads the file; an empty text is an empty record.
    ///
    /// # Errors
    /// Names the line that is wrong.
    pub(super) fn parse(text: &str) -> Result<Record, String> {
        let mut record = Record::default();
        for (number, line) in text.lines().enumerate() {
            if let Some(versions) = line.strip_prefix("# With ") {
                versions.clone_into(&mut record.versions);
            }
            if line.starts_with('#') || line.is_empty() {
                continue;
            }
            let words: Vec<&str> = line.split_whitespace().collect();
            let figure = match words[..] {
                [case, what, count, unit] => count.parse().ok().map(|count| Figure {
                    case: case.to_owned(),
                    what: what.to_owned(),
                    count,
                    unit: unit.to_owned(),
                }),
                _ => None,
            };
            let wrong = || format!("{}:{}: '{line}' is no count", super::RECORD, number + 1);
            record.figures.push(figure.ok_or_else(wrong)?);
        }
        Ok(record)
    }

    fn find(&self, figure: &Figure) -> Option<&Figure> {
        self.figures.iter().find(|other| other.key() == figure.key())
    }

    /// A note when the other record was taken with other tools.
    pub(super) fn other_versions(&self, new: &Record) -> Option<String> {
        let differs = !self.versions.is_empty() && self.versions != new.versions;
        differs.then(|| {
            format!(
                "recorded with {}; here {}: small differences may be theirs",
                self.versions, new.versions
            )
        })
    }

    /// This record, and what `old` has of cases that were not counted now.
    pub(super) fn with_others_of(&self, old: &Record, only: &str) -> Record {
        if only.is_empty() {
            return self.clone();
        }
        let mut all = self.clone();
        let not_counted = |figure: &&Figure| !figure.case.contains(only);
        all.figures.extend(old.figures.iter().filter(not_counted).cloned());
        let place = |figure: &Figure| old.figures.iter().position(|one| one.key() == figure.key());
        // In the order of the file; what is new comes last.
        all.figures.sort_by_key(|figure| place(figure).unwrap_or(usize::MAX));
        all
    }

    /// Every count that differs from `old` by more than the tolerance, that is missing or that is
    /// new.
    pub(super) fn complaints(
        &self,
        old: &Record,
        tolerance_percent: f64,
        only: &str,
    ) -> Vec<String> {
        let mut found = Vec::new();
        for figure in &self.figures {
            let Figure { case, what, count, unit } = figure;
            let Some(was) = old.find(figure) else {
                found.push(format!("{case} {what}: not recorded yet"));
                continue;
            };
            let difference = count - was.count;
            let is_call = unit.starts_with("calls/");
            let allowed = was.count * tolerance_percent / 100.0;
            let allowed = if is_call { allowed } else { allowed.max(NEGLIGIBLE) };
            if difference.abs() > allowed + f64::EPSILON {
                let percent = percent(was.count, *count);
                found.push(format!(
                    "{case} {what}: {:.1} -> {count:.1} {unit} ({percent})",
                    was.count
                ));
            }
        }
        let is_gone = |was: &&Figure| was.case.contains(only) && self.find(was).is_none();
        let gone = old.figures.iter().filter(is_gone);
        found.extend(
            gone.map(|was| format!("{} {}: recorded, but not counted", was.case, was.what)),
        );
        found
    }

    /// The counts beside those of `old`, for people.
    pub(super) fn table(&self, old: &Record) -> String {
        let line = |figure: &Figure| {
            let was =
                old.find(figure).map_or("new".to_owned(), |was| percent(was.count, figure.count));
            format!("{} {was:>9}\n", Line(figure))
        };
        self.figures.iter().map(line).collect()
    }
}

fn percent(was: f64, is: f64) -> String {
    let change = (is - was) / was * 100.0;
    match change {
        change if was == is || change.abs() < 0.05 => "=".to_owned(),
        change if change.is_finite() => format!("{change:+.1} %"),
        _ => "new".to_owned(),
    }
}

/// One figure in columns.
struct Line<'a>(&'a Figure);

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Figure { case, what, count, unit } = self.0;
        let digits = digits(unit);
        write!(f, "{case:<34} {what:<13} {count:>12.digits$} {unit:<21}")
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{TITLE}\n# With {}", self.versions)?;
        let mut case = "";
        for figure in &self.figures {
            if figure.case != case {
                writeln!(f)?;
                case = &figure.case;
            }
            writeln!(f, "{}", Line(figure).to_string().trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(figures: &[(&str, &str, f64, &str)]) -> Record {
        let figure = |&(case, what, count, unit): &(&str, &str, f64, &str)| Figure {
            case: case.to_owned(),
            what: what.to_owned(),
            count,
            unit: unit.to_owned(),
        };
        Record { versions: "rustc 1".to_owned(), figures: figures.iter().map(figure).collect() }
    }

    fn sample() -> Record {
        record(&[
            ("udp/send", "post", 300.0, "instructions/message"),
            ("udp/send", "sendmmsg", 1.0, "calls/message"),
            ("udp/read", "post", 20.5, "instructions/message"),
        ])
    }

    #[test]
    fn the_file_is_read_as_it_was_written() {
        let text = sample().to_string();
        assert_eq!(Record::parse(&text), Ok(sample()), "{text}");
        assert_eq!(Record::parse(""), Ok(Record::default()));
        assert!(Record::parse("a b c\n").expect_err("three words").contains(":1:"));
        assert!(Record::parse("a b x d\n").is_err());
    }

    #[test]
    fn only_differences_above_the_tolerance_are_complaints() {
        let mut new = sample();
        (new.figures[0].count, new.figures[2].count) = (305.9, 22.4);
        assert_eq!(new.complaints(&sample(), 2.0, ""), Vec::<String>::new());
        (new.figures[0].count, new.figures[1].count) = (306.1, 1.03);
        let found = new.complaints(&sample(), 2.0, "");
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("+2.0 %"), "{found:?}");
        new.figures[0].count = 250.0;
        assert!(new.complaints(&sample(), 2.0, "")[0].contains("-16.7 %"), "a fall is one too");
    }

    #[test]
    fn what_is_new_or_gone_is_a_complaint() {
        let mut new = sample();
        new.figures.remove(2);
        let found = new.complaints(&sample(), 2.0, "");
        assert_eq!(found, ["udp/read post: recorded, but not counted"]);
        assert!(new.complaints(&sample(), 2.0, "udp/send").is_empty(), "it was not wanted");
        assert_eq!(sample().complaints(&new, 2.0, ""), ["udp/read post: not recorded yet"]);
    }

    #[test]
    fn a_part_replaces_its_own_lines_only() {
        let part = record(&[("udp/read", "post", 99.0, "instructions/message")]);
        let all = part.with_others_of(&sample(), "read");
        let counts: Vec<f64> = all.figures.iter().map(|figure| figure.count).collect();
        assert_eq!(counts, [300.0, 1.0, 99.0]);
        assert_eq!(part.with_others_of(&sample(), ""), part);
    }
}
