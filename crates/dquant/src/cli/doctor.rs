//! `dquant doctor`: checks this machine for RoCE ([`nic::doctor`]) and for reading files
//! ([`host::disk`]), and whether programs find the verbs library ([`super::run`]).

use std::fmt;

use clap::Args;
use nic::doctor::{self, Finding, Verdict};
use serde::Serialize;

use super::{Console, Report};
use crate::exit::{CliError, Exit};

/// Look at kernel, sockets, interfaces, ports, limits and permissions, and say what to do about them
///
/// Changes nothing. Ends with 1 when something fails; warnings are no failure: the data path works
/// with them, slower or with fewer checks.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant doctor
  dquant doctor --json | jq -r '.findings[] | select(.verdict != \"ok\") | .fix'"
)]
pub(super) struct Doctor {}

/// Everything that was checked.
#[derive(Debug, Serialize)]
struct Examined {
    verdict: &'static str,
    findings: Vec<Looked>,
}

/// One thing that was checked.
#[derive(Debug, Serialize)]
struct Looked {
    topic: String,
    verdict: &'static str,
    text: String,
    fix: Option<String>,
}

impl From<Finding> for Looked {
    fn from(finding: Finding) -> Looked {
        let Finding { topic, verdict, text, fix } = finding;
        Looked { topic, verdict: verdict.name(), text, fix }
    }
}

impl Report for Examined {
    const SCHEMA: &'static str = "dquant.doctor/1";
}

impl fmt::Display for Examined {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Looked { topic, verdict, text, fix } in &self.findings {
            writeln!(f, "{verdict:<5} {topic}: {text}")?;
            if let Some(fix) = fix {
                writeln!(f, "      fix: {fix}")?;
            }
        }
        let with = |verdict: Verdict| {
            self.findings.iter().filter(|one| one.verdict == verdict.name()).count()
        };
        write!(
            f,
            "{} ok, {} warn, {} fail",
            with(Verdict::Ok),
            with(Verdict::Warn),
            with(Verdict::Fail)
        )
    }
}

/// Without io_uring no storage target can run here.
fn io_uring() -> Finding {
    let (verdict, text, fix) = match host::disk::probe() {
        Ok(()) => (Verdict::Ok, "can be used for reading files".to_owned(), None),
        Err(error) => (
            Verdict::Warn,
            format!("refused ({error}): storage targets cannot run here"),
            Some("sysctl -w kernel.io_uring_disabled=0; in a container, allow io_uring in its seccomp profile".to_owned()),
        ),
    };
    Finding { topic: "io_uring".to_owned(), verdict, text, fix }
}

/// What `dquant run` would give to programs. Everything else works without it.
fn verbs_library() -> Finding {
    let topic = "verbs library".to_owned();
    match super::run::prospect() {
        Ok(path) => Finding {
            topic,
            verdict: Verdict::Ok,
            text: format!("{}: `dquant run -- PROGRAM` uses it", path.display()),
            fix: None,
        },
        Err(error) => {
            let (why, hint) = error.parts();
            let text = format!("{why}: `dquant run` cannot start programs");
            let fix = hint.or_else(|| Some("name an existing file there, or unset it".to_owned()));
            Finding { topic, verdict: Verdict::Warn, text, fix }
        }
    }
}

impl Doctor {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let mut findings = doctor::network();
        findings.push(io_uring());
        findings.extend(doctor::memory());
        findings.push(verbs_library());
        let worst = findings.iter().map(|finding| finding.verdict).max().unwrap_or(Verdict::Ok);
        let findings = findings.into_iter().map(Looked::from).collect();
        console.report(&Examined { verdict: worst.name(), findings })?;
        Ok(if worst == Verdict::Fail { Exit::CheckFailed } else { Exit::Good })
    }
}
