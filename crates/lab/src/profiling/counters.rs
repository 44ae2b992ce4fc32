//! Samples from counters: a table of bytes by edge and time.
//!
//! ```text
//! time,from,to,bytes
//! 0.010,node0,node1,1048576
//! 0.010,node1,node2,1048576
//! 0.020,node0,node1,0
//! ```
//!
//! The first line names the columns, in any order. `time` is in seconds, `bytes` what the edge has
//! carried since its line before; with `total` instead, what it has carried since any beginning,
//! and a total that falls begins anew. Fields are separated by commas; lines that are empty or
//! begin with `#` do not count. Counters should be read at least ten times in an iteration.

use std::collections::BTreeMap;

use parfait::profile::Sample;

use super::{Names, Numbers, Traffic, TrafficError};

/// The places of the columns.
struct Columns {
    time: usize,
    from: usize,
    to: usize,
    bytes: usize,
    is_total: bool,
}

impl Columns {
    fn parse(header: &str) -> Option<Columns> {
        let names: Vec<&str> = header.split(',').map(str::trim).collect();
        let place = |name: &str| names.iter().position(|other| *other == name);
        let (bytes, total) = (place("bytes"), place("total"));
        Some(Columns {
            time: place("time")?,
            from: place("from")?,
            to: place("to")?,
            bytes: bytes.or(total)?,
            is_total: bytes.is_none(),
        })
    }
}

/// Samples of a table; names of a map apply to columns that are addresses.
///
/// # Errors
/// Names the line that cannot be read.
pub fn read(text: &str, names: &Names) -> Result<Traffic, TrafficError> {
    let mut numbers = Numbers::new(names);
    let mut traffic = Traffic::default();
    let mut columns = None;
    let mut totals: BTreeMap<(u32, u32), u64> = BTreeMap::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let refused = |why: String| TrafficError::Line { line: number + 1, why };
        let Some(columns) = &columns else {
            let found = Columns::parse(line);
            let none = || refused("the columns are time, from, to and bytes or total".to_owned());
            columns = Some(found.ok_or_else(none)?);
            continue;
        };
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let field = |at: usize| {
            fields.get(at).copied().ok_or_else(|| refused("a field is missing".to_owned()))
        };
        let at_ns = nanoseconds(field(columns.time)?)
            .ok_or_else(|| refused("time is not in seconds, as in 0.125".to_owned()))?;
        let bytes: u64 = field(columns.bytes)?
            .parse()
            .map_err(|_| refused("bytes are not a whole number".to_owned()))?;
        let mut worker = |name: &str| match name.parse() {
            Ok(address) => numbers.of_address(address),
            Err(_) => numbers.of_name(name).map(Some),
        };
        let (Some(from), Some(to)) = (worker(field(columns.from)?)?, worker(field(columns.to)?)?)
        else {
            traffic.others += 1;
            continue;
        };
        let bytes = match columns.is_total {
            false => bytes,
            true => {
                let before = totals.insert((from, to), bytes);
                // What came before the first line is not known.
                before.map_or(0, |before| bytes.checked_sub(before).unwrap_or(bytes))
            }
        };
        traffic.samples.push(Sample { at_ns, from, to, bytes });
    }
    traffic.workers = numbers.into_workers();
    Ok(traffic)
}

/// A time in seconds, with up to nine decimals.
fn nanoseconds(text: &str) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let is_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !is_digits(whole) || !is_digits(fraction) {
        return None;
    }
    let fraction: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    let whole: u64 = whole.parse().ok()?;
    whole.checked_mul(1_000_000_000)?.checked_add(fraction.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_and_differences_say_the_same() {
        let differences =
            "time,from,to,bytes\n# idle\n0.5,a,b,0\n1.25,a,b,70\n1.5,b,a,3\n2,a,b,30\n";
        let totals =
            "total,to,from,time\n1000,b,a,0.5\n1070,b,a,1.25\n0,a,b,1\n3,a,b,1.5\n1100,b,a,2\n";
        let [one, other] = [differences, totals].map(|text| {
            let mut traffic = read(text, &Names::default()).expect(text);
            traffic.samples.retain(|sample| sample.bytes > 0);
            let name = |number: u32| traffic.workers[number as usize].clone();
            let named = traffic.samples.iter();
            named.map(|s| (s.at_ns, name(s.from), name(s.to), s.bytes)).collect::<Vec<_>>()
        });
        assert_eq!(one, other);
        assert_eq!(one[0], (1_250_000_000, "a".to_owned(), "b".to_owned(), 70));
    }

    #[test]
    fn a_table_that_cannot_be_read_is_refused_with_the_line() {
        for (text, reason) in [
            ("a,b\n", "line 1: the columns are time, from, to and bytes or total"),
            ("time,from,to,bytes\n1,a\n", "line 2: a field is missing"),
            ("time,from,to,bytes\n\n-1,a,b,4\n", "line 3: time is not in seconds"),
            ("time,from,to,bytes\n1,a,b,-4\n", "line 2: bytes are not a whole number"),
        ] {
            let error = read(text, &Names::default()).expect_err(text).to_string();
            assert!(error.starts_with(reason), "{error}");
        }
    }
}
