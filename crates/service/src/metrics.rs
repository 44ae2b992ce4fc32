//! Metrics as text: the one writer of names, units and values, in the two formats that collectors
//! ask for.
//!
//! Prometheus and others read OpenMetrics 1.0 or, if they do not name it, Prometheus' text format
//! 0.0.4. The names of metrics and the values are the same in both; OpenMetrics also says the unit
//! and where the text ends. What is measured is the business of the daemons.

use std::fmt::{self, Write};

/// How metrics are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Prometheus' text format 0.0.4.
    Prometheus,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

impl Format {
    /// The one that a header `Accept` asks for.
    pub fn accepted(accept: Option<&str>) -> Format {
        match accept {
            Some(accept) if accept.contains("application/openmetrics-text") => Format::OpenMetrics,
            _ => Format::Prometheus,
        }
    }

    /// The type of the text, as HTTP names it.
    pub fn content_type(self) -> &'static str {
        match self {
            Format::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// What a metric counts in. Its name ends with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// It is a plain number.
    None,
    /// Bytes.
    Bytes,
    /// Bits in a second.
    BitsPerSecond,
}

impl Unit {
    fn name(self) -> Option<&'static str> {
        match self {
            Unit::None => None,
            Unit::Bytes => Some("bytes"),
            Unit::BitsPerSecond => Some("bits_per_second"),
        }
    }
}

/// What kind of number a metric is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It goes up and down.
    Gauge,
    /// Whatever the daemon counts under that name.
    Unknown,
}

/// A text of metrics, as it is written.
#[derive(Debug)]
pub struct Text {
    format: Format,
    out: String,
    family: String,
}

impl Text {
    /// Nothing yet, with room for so many bytes.
    pub fn new(format: Format, bytes: usize) -> Text {
        Text { format, out: String::with_capacity(bytes), family: String::new() }
    }

    /// Begins a metric. Its samples follow.
    pub fn family(&mut self, name: &str, kind: Kind, unit: Unit, help: &str) {
        let kind = match (kind, self.format) {
            (Kind::Gauge, _) => "gauge",
            (Kind::Unknown, Format::Prometheus) => "untyped",
            (Kind::Unknown, Format::OpenMetrics) => "unknown",
        };
        let _ = write!(self.out, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
        let unit = unit.name().filter(|_| self.format == Format::OpenMetrics);
        if let Some(unit) = unit {
            debug_assert!(name.ends_with(unit), "{name}");
            let _ = writeln!(self.out, "# UNIT {name} {unit}");
        }
        name.clone_into(&mut self.family);
    }

    /// Adds a value of the metric that was begun last.
    pub fn sample(&mut self, labels: &[(&str, &str)], value: impl fmt::Display) {
        self.out.push_str(&self.family);
        for (at, (label, text)) in labels.iter().enumerate() {
            self.out.push(if at == 0 { '{' } else { ',' });
            let _ = write!(self.out, "{label}=\"");
            self.escaped(text);
            self.out.push('"');
        }
        self.out.push_str(if labels.is_empty() { " " } else { "} " });
        let _ = writeln!(self.out, "{value}");
    }

    /// The value of a label, as both formats want it.
    fn escaped(&mut self, text: &str) {
        for letter in text.chars() {
            match letter {
                '\\' => self.out.push_str("\\\\"),
                '"' => self.out.push_str("\\\""),
                '\n' => self.out.push_str("\\n"),
                other => self.out.push(other),
            }
        }
    }

    /// The whole text.
    pub fn finish(mut self) -> String {
        if self.format == Format::OpenMetrics {
            self.out.push_str("# EOF\n");
        }
        self.out
    }
}

/// The metric of a counter whose name has dots: with `dquant_` before it, and no letter that the
/// formats refuse.
pub fn name_of(counter: &str) -> String {
    let valid = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '_' };
    "dquant_".chars().chain(counter.chars().map(valid)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(format: Format) -> String {
        let mut text = Text::new(format, 0);
        text.family("dquant_ring_bytes", Kind::Gauge, Unit::Bytes, "Memory.");
        text.sample(&[("name", "a\"b\\c\nd"), ("port", "1")], 7);
        text.family(&name_of("ring.lies-told"), Kind::Unknown, Unit::None, "Counted.");
        text.sample(&[], 3);
        text.finish()
    }

    #[test]
    fn both_formats_have_the_same_samples() {
        let samples = |text: &str| {
            let lines = text.lines().filter(|line| !line.starts_with('#'));
            lines.map(String::from).collect::<Vec<_>>()
        };
        let plain = text(Format::Prometheus);
        let expected =
            ["dquant_ring_bytes{name=\"a\\\"b\\\\c\\nd\",port=\"1\"} 7", "dquant_ring_lies_told 3"];
        assert_eq!(samples(&plain), expected);
        assert!(!plain.contains("# UNIT") && !plain.contains("# EOF"), "{plain}");
        assert!(plain.contains("# TYPE dquant_ring_lies_told untyped\n"), "{plain}");
        let open = text(Format::OpenMetrics);
        assert_eq!(samples(&open), expected);
        assert!(open.contains("# UNIT dquant_ring_bytes bytes\n"), "{open}");
        assert!(open.contains("# TYPE dquant_ring_lies_told unknown\n"), "{open}");
        assert!(open.ends_with("\n# EOF\n"), "{open}");
    }

    #[test]
    fn collectors_get_the_format_that_they_ask_for() {
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.3";
        assert_eq!(Format::accepted(Some(prometheus)), Format::OpenMetrics);
        for other in [None, Some("*/*"), Some("text/plain;version=0.0.4")] {
            assert_eq!(Format::accepted(other), Format::Prometheus);
        }
    }
}
