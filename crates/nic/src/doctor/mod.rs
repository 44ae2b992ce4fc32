//! Is this machine fit for RoCE without hardware, and what would make it faster?
//!
//! Every check tests the machine itself, mostly by doing the thing in question: it opens sockets,
//! sets options, binds ports. Nothing is changed. A check that cannot be made is reported as a
//! warning, so a diagnosis always completes.
//!
//! A failure means that the data path does not work here; a warning, that it is slower, checks
//! less, or reaches fewer peers. Both come with the next thing to do.

mod machine;
mod network;

use std::fmt;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// It works, and could be better.
    Warn,
    /// It does not work.
    Fail,
}

impl Verdict {
    /// The word for it.
    pub const fn name(self) -> &'static str {
        match self {
            Verdict::Ok => "ok",
            Verdict::Warn => "warn",
            Verdict::Fail => "fail",
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One thing that was checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What was checked.
    pub topic: String,
    /// How bad it is.
    pub verdict: Verdict,
    /// What was found.
    pub text: String,
    /// What to do about it; present unless the verdict is ok.
    pub fix: Option<String>,
}

impl Finding {
    fn ok(topic: impl Into<String>, text: impl Into<String>) -> Finding {
        Finding { topic: topic.into(), verdict: Verdict::Ok, text: text.into(), fix: None }
    }

    fn warn(topic: impl Into<String>, text: impl Into<String>, fix: impl Into<String>) -> Finding {
        let fix = Some(fix.into());
        Finding { topic: topic.into(), verdict: Verdict::Warn, text: text.into(), fix }
    }

    fn fail(topic: impl Into<String>, text: impl Into<String>, fix: impl Into<String>) -> Finding {
        Finding { verdict: Verdict::Fail, ..Finding::warn(topic, text, fix) }
    }
}

/// Checks what the network needs.
pub fn network() -> Vec<Finding> {
    let mut findings = vec![
        machine::kernel(),
        machine::processor(),
        network::segmented_sends(),
        network::coalesced_receives(),
        network::socket_buffers(),
        network::same_host(),
    ];
    findings.extend(network::interfaces());
    findings.extend(network::order());
    findings.extend(network::ports());
    findings.push(network::congestion_marks());
    findings.push(network::icrc());
    findings.push(network::captures());
    findings
}

/// Checks what registered memory needs.
pub fn memory() -> Vec<Finding> {
    vec![machine::huge_pages(), machine::locked_memory()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_complaint_comes_with_a_fix_and_this_machine_can_run_the_tests() {
        let findings = [network(), memory()].concat();
        assert!(findings.len() > 10);
        for finding in &findings {
            assert_eq!(finding.fix.is_none(), finding.verdict == Verdict::Ok, "{finding:?}");
            assert!(!finding.text.is_empty() && !finding.text.contains('\n'), "{finding:?}");
        }
        let topic = |name: &str| findings.iter().find(|finding| finding.topic == name);
        assert_ne!(topic("kernel").expect("looked at").verdict, Verdict::Fail);
        assert!(topic("interface lo").is_some());
    }
}
