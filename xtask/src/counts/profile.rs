//! Reads a profile of callgrind and the output of the benchmark, and joins them to figures.

use std::collections::BTreeMap;

/// Prefix of the functions that stand for phases.
const PHASE: &str = "counted_";

/// One count of one case.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Figure {
    pub(crate) case: String,
    /// A phase, or a system call.
    pub(crate) what: String,
    pub(crate) count: f64,
    /// What is counted, and per what.
    pub(crate) unit: String,
}

impl Figure {
    /// A figure with the digits that the file keeps, so that it compares with one that was read.
    fn new(case: &str, what: &str, count: f64, unit: String) -> Figure {
        let scale = 10_f64.powi(digits(&unit) as i32);
        let (case, what) = (case.to_owned(), what.to_owned());
        Figure { case, what, count: (count * scale).round() / scale, unit }
    }

    /// What it is compared by.
    pub(crate) fn key(&self) -> (&str, &str) {
        (&self.case, &self.what)
    }
}

/// Digits behind the point: system calls are few, and a hundredth of one is a change.
pub(crate) fn digits(unit: &str) -> usize {
    if unit.starts_with("calls/") { 3 } else { 1 }
}

/// The figures of a case: from `printed`, the benchmark's output, and its `profile`.
///
/// # Errors
/// When either is incomplete.
pub(crate) fn figures(case: &str, printed: &str, profile: &str) -> Result<Vec<Figure>, String> {
    let costs = inclusive(profile);
    let wrong = |line: &str| format!("{case}: the benchmark printed '{line}'");
    let messages = printed.lines().find_map(|line| line.strip_prefix("messages "));
    let messages: f64 =
        messages.and_then(|n| n.parse().ok()).ok_or_else(|| wrong("no messages"))?;
    let figure = |what: &str, count: f64, unit: String| Figure::new(case, what, count, unit);
    let (mut figures, mut calls, mut total) = (Vec::new(), Vec::new(), 0.0);
    for line in printed.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["phase", phase, operations, unit] => {
                let operations: f64 = operations.parse().map_err(|_| wrong(line))?;
                let symbol = format!("{PHASE}{}", phase.replace('-', "_"));
                let cost = costs.get(&symbol).ok_or_else(|| {
                    format!("{case}: no {symbol} in the profile; was it inlined or renamed?")
                })?;
                // A turn with nothing to do is no part of a message.
                total += if phase == "idle" { 0.0 } else { *cost as f64 };
                let unit = format!("instructions/{unit}");
                figures.push(figure(phase, *cost as f64 / operations, unit));
            }
            ["calls", kind, count] => {
                let count: f64 = count.parse().map_err(|_| wrong(line))?;
                calls.push(figure(kind, count / messages, "calls/message".to_owned()));
            }
            ["messages", _] => {}
            _ => return Err(wrong(line)),
        }
    }
    figures.push(figure("all", total / messages, "instructions/message".to_owned()));
    figures.extend(calls);
    Ok(figures)
}

/// Instructions of each phase, and of everything that it called.
///
/// A call is three lines: `cfn=NAME`, `calls=COUNT POSITION`, and the position of the call with its
/// inclusive cost.
fn inclusive(profile: &str) -> BTreeMap<String, u64> {
    let (mut costs, mut callee) = (BTreeMap::new(), "");
    let mut lines = profile.lines();
    while let Some(line) = lines.next() {
        if let Some(name) = line.strip_prefix("cfn=") {
            callee = name;
        } else if line.starts_with("calls=") && callee.starts_with(PHASE) {
            let cost = lines.next().and_then(|line| line.rsplit(' ').next()?.parse::<u64>().ok());
            *costs.entry(symbol(callee).to_owned()).or_insert(0) += cost.unwrap_or(0);
        }
    }
    costs
}

/// The name without what the compiler appends to copies of a function.
fn symbol(name: &str) -> &str {
    name.split('.').next().unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROFILE: &str = "\
# callgrind format
events: Ir

fl=a.rs
fn=counted_send
12 40
cfn=roce::poll_transmit
calls=10 77
12 960
fn=main
3 5
cfn=counted_send
calls=6 12
7 600
cfn=counted_send
calls=4 12
9 400
cfn=counted_post_receive.specialized.1
calls=1 12
9 7
totals: 1005
";

    #[test]
    fn costs_are_those_of_calls_into_a_phase_and_below() {
        let costs = inclusive(PROFILE);
        assert_eq!(costs["counted_send"], 1000);
        assert_eq!(costs["counted_post_receive"], 7);
    }

    #[test]
    fn figures_are_per_operation_and_all_of_them_per_message() {
        let printed =
            "phase send 10 packet\nphase post-receive 7 message\ncalls sendmmsg 3\nmessages 2\n";
        let figures = figures("a/b", printed, PROFILE).expect("complete");
        let shown: Vec<(&str, f64, &str)> =
            figures.iter().map(|f| (f.what.as_str(), f.count, f.unit.as_str())).collect();
        assert_eq!(
            shown,
            [
                ("send", 100.0, "instructions/packet"),
                ("post-receive", 1.0, "instructions/message"),
                ("all", 503.5, "instructions/message"),
                ("sendmmsg", 1.5, "calls/message"),
            ]
        );
    }

    #[test]
    fn a_phase_without_a_profile_and_unknown_lines_are_errors() {
        let lost = figures("a", "phase poll 1 message\nmessages 1\n", PROFILE);
        assert!(lost.expect_err("not there").contains("counted_poll"));
        assert!(figures("a", "phase send 1 packet\n", PROFILE).is_err(), "no messages");
        assert!(figures("a", "nonsense\nmessages 1\n", PROFILE).is_err());
    }
}
