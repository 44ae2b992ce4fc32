//! Samples as CSV: a heading, then one line each.

use std::fmt::Write;
use std::str::FromStr;

use thiserror::Error;

use super::{MOST_SAMPLES, Sample};

const HEADING: &str =
    "time_ns,flow,acknowledged_bytes,in_flight_packets,window_packets,rate_bps,rtt_ns";

/// Why a text is not a file of samples.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum FileError {
    /// It begins with another heading.
    #[error("the first line is not '{HEADING}'")]
    Heading,
    /// A line has another number of values, or one that cannot be.
    #[error("line {line}: '{text}' is no sample")]
    Line {
        /// Which one, from 1.
        line: usize,
        /// What is written.
        text: String,
    },
    /// There are more than are read.
    #[error("more than {MOST_SAMPLES} samples")]
    TooMany,
    /// Time goes backwards.
    #[error("line {line}: earlier than the line before")]
    Backwards {
        /// Which one, from 1.
        line: usize,
    },
}

/// The samples as text. What is not known is left empty.
pub fn write(samples: &[Sample]) -> String {
    let optional = |value: Option<u64>| value.map(|value| value.to_string()).unwrap_or_default();
    let mut text = format!("{HEADING}\n");
    for sample in samples {
        let Sample { at_ns, flow, acknowledged_bytes, in_flight_packets, window_packets, .. } =
            sample;
        let (rate, rtt) = (optional(sample.rate_bps), optional(sample.rtt_ns));
        let _ = writeln!(
            text,
            "{at_ns},{flow},{acknowledged_bytes},{in_flight_packets},{window_packets},{rate},{rtt}"
        );
    }
    text
}

/// Reads what [`write()`] has written.
///
/// # Errors
/// With the line that is no sample.
pub fn read(text: &str) -> Result<Vec<Sample>, FileError> {
    let mut lines = (1..).zip(text.lines());
    if lines.next().is_none_or(|(_, heading)| heading.trim_end() != HEADING) {
        return Err(FileError::Heading);
    }
    let mut samples: Vec<Sample> = Vec::new();
    for (line, text) in lines {
        if samples.len() == MOST_SAMPLES {
            return Err(FileError::TooMany);
        }
        let sample = sample(text.trim_end());
        let sample = sample
            .ok_or_else(|| FileError::Line { line, text: text.chars().take(80).collect() })?;
        if samples.last().is_some_and(|last| last.at_ns > sample.at_ns) {
            return Err(FileError::Backwards { line });
        }
        samples.push(sample);
    }
    Ok(samples)
}

fn sample(line: &str) -> Option<Sample> {
    let mut fields = line.split(',');
    let sample = Sample {
        at_ns: number(fields.next())?,
        flow: number(fields.next())?,
        acknowledged_bytes: number(fields.next())?,
        in_flight_packets: number(fields.next())?,
        window_packets: number(fields.next())?,
        rate_bps: optional(fields.next())?,
        rtt_ns: optional(fields.next())?,
    };
    fields.next().is_none().then_some(sample)
}

fn number<N: FromStr>(field: Option<&str>) -> Option<N> {
    field?.parse().ok()
}

/// The outer `None`: no such field, or no number.
fn optional(field: Option<&str>) -> Option<Option<u64>> {
    match field? {
        "" => Some(None),
        digits => digits.parse().ok().map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read() {
        let sample = Sample {
            at_ns: 5,
            flow: 1,
            acknowledged_bytes: u64::MAX,
            in_flight_packets: 2,
            window_packets: 3,
            rate_bps: None,
            rtt_ns: Some(40),
        };
        let samples = [sample, Sample { at_ns: 6, rate_bps: Some(7), rtt_ns: None, ..sample }];
        assert_eq!(read(&write(&samples)), Ok(samples.to_vec()));
        assert_eq!(read(&write(&[])), Ok(Vec::new()));
    }

    #[test]
    fn what_is_no_sample_is_refused_with_its_line() {
        assert_eq!(read(""), Err(FileError::Heading));
        assert_eq!(read("time,flow\n"), Err(FileError::Heading));
        let wrong = ["", "1", "1,2,3,4,5,6,7,8", "1,2,3,4,5,6", "-1,2,3,4,5,,", "1,2,3,4,5,x,"];
        for text in wrong {
            let whole = format!("{HEADING}\n1,2,3,4,5,,\n{text}\n");
            let expected = FileError::Line { line: 3, text: text.to_owned() };
            assert_eq!(read(&whole), Err(expected), "{text}");
        }
        let whole = format!("{HEADING}\n2,0,0,0,1,,\n1,0,0,0,1,,\n");
        assert_eq!(read(&whole), Err(FileError::Backwards { line: 3 }));
    }
}
