//! Flows from a file, in the text of the simulators published with HPCC: their number, then a line
//! `source destination priority port bytes start` each, with the start in seconds. Time begins with
//! the first start.

use roce::Time;
use sim::traffic::{Flow, MAX_FLOWS};
use thiserror::Error;

/// Why a trace cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TraceError {
    /// The first line is not a number.
    #[error("line 1 is not the number of flows")]
    Count,
    /// There are more than can be simulated.
    #[error("line 1 says {0} flows; at most {MAX_FLOWS} are simulated")]
    TooMany(u64),
    /// A line is not a flow.
    #[error("line {line}: '{text}' is not 'source destination priority port bytes start'")]
    Line {
        /// Which one, from 1.
        line: usize,
        /// What it says.
        text: String,
    },
    /// The number of flows is another one.
    #[error("line 1 says {said} flows, and there are {there}")]
    Missing {
        /// What the first line says.
        said: u64,
        /// How many there are.
        there: u64,
    },
}

/// Reads the flows.
///
/// # Errors
/// With the line that cannot be read.
pub fn read(text: &str) -> Result<Vec<Flow>, TraceError> {
    let mut lines = (1..).zip(text.lines());
    let said = lines.next().and_then(|(_, line)| line.trim().parse::<u64>().ok());
    let said = said.ok_or(TraceError::Count)?;
    if said > MAX_FLOWS {
        return Err(TraceError::TooMany(said));
    }
    let mut flows = Vec::new();
    for (line, text) in lines.filter(|(_, text)| !text.trim().is_empty()) {
        let flow = flow(text).ok_or_else(|| {
            let text = text.chars().take(80).collect();
            TraceError::Line { line, text }
        })?;
        flows.push(flow);
        if flows.len() as u64 > said {
            break;
        }
    }
    let first = flows.iter().map(|flow| flow.at).min().unwrap_or(Time::ZERO);
    flows.iter_mut().for_each(|flow| flow.at = Time::ZERO + flow.at.since(first));
    let there = flows.len() as u64;
    if there == said { Ok(flows) } else { Err(TraceError::Missing { said, there }) }
}

fn flow(line: &str) -> Option<Flow> {
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    let [from, to, _priority, _port, bytes, start] = fields[..] else {
        return None;
    };
    Some(Flow {
        from: from.parse().ok()?,
        to: to.parse().ok()?,
        bytes: bytes.parse().ok()?,
        at: Time::from_nanos(nanoseconds(start)?),
        after: Vec::new(),
    })
}

/// Decimal seconds in nanoseconds, without rounding through a binary fraction.
fn nanoseconds(text: &str) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !is_number(whole) || !is_number(fraction) {
        return None;
    }
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    let nanos = digits.parse::<u64>().ok()?;
    whole.parse::<u64>().ok()?.checked_mul(1_000_000_000)?.checked_add(nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flows_are_read_with_their_start_to_the_nanosecond() {
        let flows =
            read("2\n0 5 3 100 1048576 2.000000001\n7 1 3 100 1 0.13\n\n").expect("a trace");
        assert_eq!(flows.len(), 2);
        assert_eq!((flows[0].from, flows[0].to, flows[0].bytes), (0, 5, 1_048_576));
        assert_eq!(flows[0].at.as_nanos(), 1_870_000_001);
        assert_eq!(flows[1].at.as_nanos(), 0, "the first one");
    }

    #[test]
    fn what_is_no_trace_is_refused_with_its_line() {
        assert_eq!(read(""), Err(TraceError::Count));
        assert_eq!(read("x\n"), Err(TraceError::Count));
        assert_eq!(read("99999999999\n"), Err(TraceError::TooMany(99_999_999_999)));
        assert_eq!(read("2\n0 1 3 1 1 0\n"), Err(TraceError::Missing { said: 2, there: 1 }));
        assert_eq!(read("0\n0 1 3 1 1 0\n"), Err(TraceError::Missing { said: 0, there: 1 }));
        for line in ["0 1 3 1 1", "0 1 3 1 x 0", "0 1 3 1 1 -1", "0 1 3 1 1 1e9", "a 1 3 1 1 0"] {
            let error = TraceError::Line { line: 2, text: line.to_owned() };
            assert_eq!(read(&format!("1\n{line}\n")), Err(error));
        }
    }
}
