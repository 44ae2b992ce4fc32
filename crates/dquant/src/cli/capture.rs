//! `dquant capture`: make packet captures, and check them against the packet code
//! ([`roce::wire::capture`]).

mod live;

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use engine::budget::Bytes;
use roce::wire::capture::{self, CaptureError, CaptureReport};
use serde::Serialize;

use super::{Console, Report};
use crate::exit::{CliError, Exit, INPUT_HINT};

/// The largest capture that is read; a check holds the whole file in memory.
const MAX_CAPTURE_BYTES: u64 = 2 << 30;

/// Work with packet captures.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dquant capture live --interface any --duration 10s -o run.pcap
  dquant capture check run.pcap
  dquant capture check --help")]
pub(super) struct Capture {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Check(Check),
    Live(live::Live),
}

/// Decode every RoCE packet, verify its ICRC, encode it again and compare
///
/// Counts packets by opcode and lists every difference with the packet's number as Wireshark
/// counts. Ends with 1 when there is any, or when the file is truncated. Reads classic pcap of
/// Ethernet, raw IP and Linux cooked links.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant capture check run.pcap
  dquant capture check a.pcap b.pcap --json
  dquant capture live --interface any -o run.pcap    makes a capture"
)]
struct Check {
    /// Captures in pcap format
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
}

impl Capture {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        match self.verb {
            Verb::Check(check) => check.run(console),
            Verb::Live(live) => live.run(console),
        }
    }
}

impl Check {
    fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let mut exit = Exit::Good;
        for path in &self.files {
            let report = capture::check(&read(path)?);
            refuse_foreign(path, &report)?;
            if report.roce == 0 {
                console.note(format_args!(
                    "{}: no packet to UDP port 4791, and none of RoCEv1",
                    path.display()
                ));
            }
            if !report.is_clean() {
                exit = Exit::CheckFailed;
            }
            console.report(&Checked::new(path, report))?;
        }
        Ok(exit)
    }
}

fn read(path: &Path) -> Result<Vec<u8>, CliError> {
    let unreadable = |error: std::io::Error| {
        CliError::because(format_args!("cannot read {}", path.display()), &error).hint(INPUT_HINT)
    };
    let too_long = |what| {
        let (path, most) = (path.display(), Bytes(MAX_CAPTURE_BYTES));
        CliError::usage(format_args!("{path} has {what}; the most is {most}"))
            .hint("cut it with `editcap -c PACKETS IN OUT` and check the parts")
    };
    let file = fs::File::open(path).map_err(unreadable)?;
    let len = file.metadata().map_err(unreadable)?.len();
    if len > MAX_CAPTURE_BYTES {
        return Err(too_long(Bytes(len).to_string()));
    }
    // Devices and pipes do not report their size.
    let mut bytes = Vec::with_capacity(usize::try_from(len).unwrap_or(0));
    file.take(MAX_CAPTURE_BYTES + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > MAX_CAPTURE_BYTES {
        return Err(too_long("more".to_owned()));
    }
    Ok(bytes)
}

/// A file whose header cannot be read is not a capture, and nothing was checked.
fn refuse_foreign(path: &Path, report: &CaptureReport) -> Result<(), CliError> {
    let (Some(damage), None) = (report.damage, report.link) else {
        return Ok(());
    };
    let error = CliError::usage(format_args!("{}: {damage}", path.display()));
    Err(match damage {
        CaptureError::Magic(_) | CaptureError::TooShort(_) => {
            error.hint("classic pcap files are read, as `tcpdump -w` writes them")
        }
        _ => error,
    })
}

/// The result for one file.
#[derive(Debug, Serialize)]
struct Checked {
    file: String,
    link: Option<String>,
    clean: bool,
    packets: u64,
    skipped: u64,
    roce: u64,
    decoded: u64,
    icrc_right: u64,
    reproduced: u64,
    udp_checksum_wrong: u64,
    by_opcode: BTreeMap<String, u64>,
    difference_count: u64,
    differences: Vec<Difference>,
    damage: Option<String>,
    #[serde(skip)]
    text: CaptureReport,
}

/// One packet that failed.
#[derive(Debug, Serialize)]
struct Difference {
    packet: u64,
    reason: String,
}

impl Checked {
    fn new(path: &Path, report: CaptureReport) -> Checked {
        let by_opcode = report.by_opcode.iter();
        let differences = report.differences.iter();
        Checked {
            file: path.display().to_string(),
            link: report.link.map(|link| link.to_string()),
            clean: report.is_clean(),
            packets: report.packets,
            skipped: report.skipped_count(),
            roce: report.roce,
            decoded: report.decoded,
            icrc_right: report.icrc_right,
            reproduced: report.reproduced,
            udp_checksum_wrong: report.udp_checksum_wrong,
            by_opcode: by_opcode.map(|((ip, op), count)| (format!("{ip} {op}"), *count)).collect(),
            difference_count: report.difference_count,
            differences: differences
                .map(|d| Difference { packet: d.packet, reason: d.reason.to_string() })
                .collect(),
            damage: report.damage.map(|damage| damage.to_string()),
            text: report,
        }
    }
}

impl Report for Checked {
    const SCHEMA: &'static str = "dquant.capture.check/1";
}

impl fmt::Display for Checked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.clean { "no differences" } else { "DIFFERS" };
        write!(f, "{}: {verdict}", self.file)?;
        for line in self.text.to_string().lines() {
            write!(f, "\n  {line}")?;
        }
        Ok(())
    }
}
