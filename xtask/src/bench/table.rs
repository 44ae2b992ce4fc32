//! Medians, spread and targets. The text is a table that also renders where it is pasted.

use serde_json::{Map, Value, json};

use super::configurations::{CONFIGURATIONS, Series};
use super::figures::Figures;

/// Target of a figure.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    None,
    AtLeast(f64),
    AtMost(f64),
}

/// A row of the table.
struct Metric {
    name: &'static str,
    /// Its name for programs.
    key: &'static str,
    digits: usize,
    of: fn(&Figures) -> Option<f64>,
    target: Target,
}

const METRICS: &[Metric] = &[
    Metric {
        name: "Mtokens/s",
        key: "mtokens_per_s",
        digits: 0,
        of: |run| Some(run.mtokens_per_s),
        target: Target::AtLeast(450.0),
    },
    Metric {
        name: "disk bytes/token",
        key: "disk_bytes_per_token",
        digits: 2,
        of: |run| Some(run.disk_bytes_per_token),
        target: Target::None,
    },
    Metric {
        name: "wire bytes/token",
        key: "wire_bytes_per_token",
        digits: 3,
        of: |run| Some(run.wire_bytes_per_token),
        target: Target::AtMost(2.1),
    },
    Metric {
        name: "host memory bytes/token",
        key: "host_bytes_per_token",
        digits: 2,
        of: |run| Some(run.host_bytes_per_token),
        target: Target::None,
    },
    Metric {
        name: "host CPU s/10^9 tokens",
        key: "host_cpu_s_per_gtok",
        digits: 3,
        of: |run| Some(run.host_cpu_s),
        target: Target::AtMost(0.06),
    },
    Metric {
        name: "DPU CPU s/10^9 tokens",
        key: "dpu_cpu_s_per_gtok",
        digits: 2,
        of: |run| run.dpu_cpu_s,
        target: Target::AtMost(0.9),
    },
    Metric {
        name: "target CPU s/10^9 tokens",
        key: "target_cpu_s_per_gtok",
        digits: 2,
        of: |run| Some(run.target_cpu_s),
        target: Target::AtMost(0.9),
    },
    Metric {
        name: "injected packet drops",
        key: "dropped_packets",
        digits: 0,
        of: |run| Some(run.dropped),
        target: Target::None,
    },
    Metric {
        name: "packets retransmitted",
        key: "retransmitted_packets",
        digits: 0,
        of: |run| Some(run.retransmitted),
        target: Target::None,
    },
    Metric {
        name: "DPU resident MiB, start",
        key: "dpu_resident_mib_start",
        digits: 0,
        of: |run| Some(run.dpu_resident?.start),
        target: Target::None,
    },
    Metric {
        name: "DPU resident MiB, middle",
        key: "dpu_resident_mib_middle",
        digits: 0,
        of: |run| Some(run.dpu_resident?.middle),
        target: Target::None,
    },
    Metric {
        name: "DPU resident MiB, end",
        key: "dpu_resident_mib_end",
        digits: 0,
        of: |run| Some(run.dpu_resident?.end),
        target: Target::None,
    },
    Metric {
        name: "DPU resident MiB, highest",
        key: "dpu_resident_mib_highest",
        digits: 0,
        of: |run| Some(run.dpu_resident?.highest),
        target: Target::AtMost(256.0),
    },
    Metric {
        name: "load average before",
        key: "load_before",
        digits: 1,
        of: |run| Some(run.load_before),
        target: Target::None,
    },
];

/// Median and range of a figure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Spread {
    pub(super) median: f64,
    pub(super) lowest: f64,
    pub(super) highest: f64,
}

impl Spread {
    /// `None` when no run has the figure.
    pub(super) fn of(values: impl Iterator<Item = Option<f64>>) -> Option<Spread> {
        let mut values: Vec<f64> = values.flatten().collect();
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        let median = match values.len() {
            0 => return None,
            odd if odd % 2 == 1 => values[middle],
            _ => (values[middle - 1] + values[middle]) / 2.0,
        };
        let (lowest, highest) = (*values.first()?, *values.last()?);
        Some(Spread { median, lowest, highest })
    }

    pub(super) fn text(self, digits: usize) -> String {
        let Spread { median, lowest, highest } = self;
        if lowest == highest {
            return format!("{median:.digits$}");
        }
        format!("{median:.digits$} ({lowest:.digits$}–{highest:.digits$})")
    }
}

impl Target {
    pub(super) fn text(self) -> String {
        match self {
            Target::None => String::new(),
            Target::AtLeast(bound) => format!("≥ {bound}"),
            Target::AtMost(bound) => format!("≤ {bound}"),
        }
    }

    pub(super) fn is_met(self, median: f64) -> Option<bool> {
        match self {
            Target::None => None,
            Target::AtLeast(bound) => Some(median >= bound),
            Target::AtMost(bound) => Some(median <= bound),
        }
    }
}

/// Whether the configuration of the target reaches it.
fn verdict(metric: &Metric, series: &[Series]) -> Option<bool> {
    let judged = CONFIGURATIONS.iter().zip(series).find(|(c, _)| c.has_targets)?.1;
    let median = Spread::of(judged.iter().map(metric.of))?.median;
    metric.target.is_met(median)
}

/// The table for people.
pub(super) fn text(series: &[Series]) -> String {
    let names = CONFIGURATIONS.iter().map(|configuration| configuration.name.to_owned());
    let heads = ["".to_owned()].into_iter().chain(names);
    let mut rows = vec![heads.chain(["target".to_owned(), "".to_owned()]).collect()];
    for metric in METRICS {
        let cell = |runs: &Series| {
            let spread = Spread::of(runs.iter().map(metric.of));
            spread.map_or("-".to_owned(), |spread| spread.text(metric.digits))
        };
        let word = match verdict(metric, series) {
            Some(true) => "met",
            Some(false) => "missed",
            None => "",
        };
        let mut row = vec![metric.name.to_owned()];
        row.extend(series.iter().map(cell));
        row.extend([metric.target.text(), word.to_owned()]);
        rows.push(row);
    }
    align(&rows)
}

/// Columns of equal width, the first row underlined.
pub(super) fn align(rows: &[Vec<String>]) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0).max(3)).collect();
    let mut text = String::new();
    for (number, row) in rows.iter().enumerate() {
        for (cell, width) in row.iter().zip(&widths) {
            text += &format!("| {cell:<width$} ");
        }
        text += "|\n";
        if number == 0 {
            let dashes = widths.iter().map(|width| format!("|{}", "-".repeat(width + 2)));
            text += &(dashes.collect::<String>() + "|\n");
        }
    }
    text
}

/// The same table for programs: by configuration and figure.
pub(super) fn to_json(series: &[Series]) -> Value {
    let mut configurations = Map::new();
    for (configuration, runs) in CONFIGURATIONS.iter().zip(series) {
        let mut figures = Map::new();
        for metric in METRICS {
            let Some(spread) = Spread::of(runs.iter().map(metric.of)) else {
                continue;
            };
            let Spread { median, lowest, highest } = spread;
            let mut figure = json!({ "median": median, "lowest": lowest, "highest": highest });
            if let Some(met) = metric.target.is_met(median).filter(|_| configuration.has_targets) {
                figure["target"] = json!(metric.target.text());
                figure["met"] = json!(met);
            }
            figures.insert(metric.key.to_owned(), figure);
        }
        configurations.insert(configuration.name.to_owned(), figures.into());
    }
    configurations.into()
}

#[cfg(test)]
mod tests {
    use super::super::figures::tests::ran;
    use super::*;

    fn series(rates: &[f64]) -> Vec<Series> {
        let offload = |configuration: &&super::super::configurations::Configuration| {
            configuration.name != "no offload"
        };
        let runs = |offload: bool| {
            let figures = |rate: &f64| Figures::of(&ran(*rate, offload)).expect("complete");
            rates.iter().map(figures).collect()
        };
        CONFIGURATIONS.iter().map(|configuration| runs(offload(&configuration))).collect()
    }

    #[test]
    fn medians_of_odd_and_even_counts() {
        let of = |values: &[f64]| Spread::of(values.iter().copied().map(Some));
        assert_eq!(
            of(&[3.0, 1.0, 2.0]).map(|s| (s.median, s.lowest, s.highest)),
            Some((2.0, 1.0, 3.0))
        );
        assert_eq!(of(&[4.0, 1.0]).map(|s| s.median), Some(2.5));
        assert_eq!(of(&[]), None);
        assert_eq!(Spread::of([None].into_iter()), None);
        assert_eq!(of(&[2.0]).expect("one").text(1), "2.0");
        assert_eq!(of(&[1.0, 3.0]).expect("two").text(0), "2 (1–3)");
    }

    #[test]
    fn targets_are_judged_by_the_median_of_the_first_configuration() {
        let text = text(&series(&[100.0, 460.0, 470.0]));
        let line =
            |name: &str| text.lines().find(|line| line.contains(name)).expect("a row").to_owned();
        assert!(line("Mtokens/s").contains("460 (100–470)"), "{text}");
        assert!(line("Mtokens/s").contains("| ≥ 450  | met"), "{text}");
        assert!(line("DPU CPU").contains("| -"), "no DPU without offload: {text}");
        let missed = super::text(&series(&[449.0]));
        assert!(missed.contains("missed"), "{missed}");
    }

    #[test]
    fn every_line_has_the_same_shape() {
        let text = text(&series(&[1.0, 1234.0]));
        let bars: Vec<usize> = text.lines().map(|line| line.matches('|').count()).collect();
        assert!(bars.iter().all(|count| *count == bars[0]), "{text}");
        let widths: Vec<usize> = text.lines().map(|line| line.chars().count()).collect();
        assert!(widths.iter().all(|width| *width == widths[0]), "{text}");
    }

    #[test]
    fn json_has_targets_where_they_are_meant() {
        let json = to_json(&series(&[500.0]));
        assert_eq!(json["offload"]["mtokens_per_s"]["met"], true);
        assert_eq!(json["no offload"]["mtokens_per_s"]["met"], Value::Null);
        assert_eq!(json["no offload"]["dpu_cpu_s_per_gtok"], Value::Null);
    }
}
