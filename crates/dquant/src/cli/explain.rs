//! `dquant explain`: what the queue pairs of a running verbs program do, and why they fail.
//!
//! The program's own library replies ([`ask`]): one document for each open device ([`document`]),
//! which is formatted as text ([`text`]). Nothing is changed in the program, and it does not wait
//! for us.

mod ask;
mod document;
mod text;

use std::fmt;
use std::io::ErrorKind;
use std::time::Duration;

use clap::Args;
use lab::units;
use serde::Serialize;
use service::text::one_line;

use super::{Console, Report};
use crate::exit::{CliError, Exit};
use ask::{Endpoint, Reply};
use document::Document;

/// Show the queue pairs of a running RDMA program and why they failed
///
/// For programs started with `dquant run`: which path their packets take and why, every queue pair
/// with state, peer, packet numbers, timers and counters, and the last error with packet, peer and
/// cause. Without PID it lists the programs that can be queried: those of this user (all for root)
/// in this network namespace. A program that has ended cannot be queried any more. The daemons of
/// dquant answer `dquant status`; those started with --device on this library appear here too.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Words:
  PSN            packet sequence number: 24 bits, counted up for each packet
  ACK, NAK       the peer's responses: arrived; refused or missing, with the cause
  RNR            receiver not ready: the peer has no receive posted for a message
  credits        messages that the peer has receives for, as far as it said
  retries        how often a packet is retransmitted before the queue pair fails
  ECN, CNP       a packet marked by a full switch; the notification that slows the sender down
  round trips    from a packet to its acknowledgement, as a histogram

Examples:
  dquant explain
  dquant explain 4711
  dquant explain 4711 --device dq_eth0 --qp 0x10012 --watch 1s
  dquant explain 4711 --json | jq '.queue_pairs[].last_error.text'"
)]
pub(super) struct Explain {
    /// Process to show; without it, list all
    pid: Option<u32>,

    /// Only this device
    #[arg(long, value_name = "NAME", requires = "pid")]
    device: Option<String>,

    /// Only this queue pair
    #[arg(long, value_name = "NUMBER", requires = "pid", value_parser = qp_number)]
    qp: Option<u32>,

    /// Refresh at this interval
    #[arg(long, value_name = "TIME", requires = "pid", value_parser = interval)]
    watch: Option<Duration>,
}

/// A queue pair number as users write it: `65554` or `0x10012`.
fn qp_number(text: &str) -> Result<u32, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| format!("'{text}' is no queue pair number; write it like 0x10012"))
}

fn interval(text: &str) -> Result<Duration, units::UnitError> {
    units::duration(text).map(|time| Duration::from_nanos(time.as_nanos()))
}

/// The reply of one device.
#[derive(Debug, Serialize)]
struct Explained {
    #[serde(flatten)]
    document: Document,
}

impl Report for Explained {
    const SCHEMA: &'static str = "dquant.explain/1";
}

impl fmt::Display for Explained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&text::of(&self.document))
    }
}

/// One line of the list.
#[derive(Debug, Serialize)]
struct Listed {
    pid: u32,
    device: String,
    program: Option<String>,
    queue_pairs: usize,
    failed: usize,
}

impl Listed {
    fn new(document: Document) -> Listed {
        let failures = document.queue_pairs.iter().filter(|qp| qp.state == "ERROR").count();
        Listed {
            pid: document.pid,
            device: document.device,
            program: document.program,
            queue_pairs: document.queue_pairs.len(),
            failed: failures + document.past_errors.len(),
        }
    }
}

impl Report for Listed {
    const SCHEMA: &'static str = "dquant.explain.list/1";
}

impl fmt::Display for Listed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Listed { pid, device, program, queue_pairs, failed } = self;
        let program = program.as_deref().unwrap_or("?");
        let plural = if *queue_pairs == 1 { "" } else { "s" };
        let line =
            format!("process {pid:>7}  {device:<16} {program}: {queue_pairs} queue pair{plural}");
        f.write_str(&one_line(&line))?;
        if *failed > 0 { write!(f, ", {failed} failed") } else { Ok(()) }
    }
}

impl Explain {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let Some(pid) = self.pid else {
            return list(console);
        };
        if let Some(text) = self.explain(pid, console)? {
            console.note(text);
        }
        while let Some(pause) = self.watch {
            std::thread::sleep(pause);
            if let Err(error) = self.explain(pid, console) {
                // The program was there before: its end is no failure of ours.
                if !ask::is_gone(Endpoint { pid })? {
                    return Err(error);
                }
                console.note(format_args!("process {pid} has ended, or closed its devices"));
                break;
            }
        }
        Ok(Exit::Good)
    }

    /// Returns what a reader has to know of the process's number.
    fn explain(&self, pid: u32, console: &mut Console) -> Result<Option<String>, CliError> {
        let found = ask::endpoints()?.into_iter().find(|endpoint| endpoint.pid == pid);
        let reply =
            found.map(|endpoint| endpoint.ask().map_err(|error| unanswered(endpoint, &error)));
        let (mut devices, elsewhere) =
            reply.transpose()?.map(|reply| (reply.documents, reply.elsewhere)).unwrap_or_default();
        devices.retain(|document| self.device.as_ref().is_none_or(|name| *name == document.device));
        if devices.is_empty() {
            return Err(nobody(pid, self.device.as_deref()));
        }
        let mut shown = 0;
        for mut document in devices {
            document.fill_in_zeros(text::known_counters);
            if let Some(number) = self.qp {
                document.queue_pairs.retain(|qp| qp.qpn == number);
            }
            shown += document.queue_pairs.len();
            if self.qp.is_none() || !document.queue_pairs.is_empty() {
                console.report(&Explained { document })?;
            }
        }
        match self.qp {
            Some(number) if shown == 0 => {
                Err(CliError::usage(format_args!("process {pid} has no queue pair {number:#x}")))
            }
            _ => Ok(elsewhere),
        }
    }
}

fn list(console: &mut Console) -> Result<Exit, CliError> {
    let (mut listed, mut refused, mut silent) = (0, 0, 0);
    for endpoint in ask::endpoints()? {
        match endpoint.ask() {
            Ok(Reply { documents, elsewhere }) => {
                for document in documents {
                    console.report(&Listed::new(document))?;
                    listed += 1;
                }
                if let Some(text) = elsewhere {
                    console.note(text);
                }
            }
            Err(error) if error.kind() == ErrorKind::PermissionDenied => refused += 1,
            Err(error) if error.kind() == ErrorKind::TimedOut => {
                let pid = endpoint.pid;
                console.note(format_args!("process {pid:>7}  does not respond; is it stopped?"));
                silent += 1;
            }
            // Ended since: a query by its number reports that.
            Err(_) => {}
        }
    }
    if refused > 0 {
        console
            .note(format_args!("{refused} more of other users; only they and root may query them"));
    }
    if listed + silent == 0 {
        console.note("no verbs program of this user has a device open in this network namespace");
        console
            .note("start one with `dquant run -- PROGRAM`; for daemons there is `dquant status`");
    }
    Ok(Exit::Good)
}

fn nobody(pid: u32, device: Option<&str>) -> CliError {
    if ask::has_ended(pid) {
        return CliError::usage(format_args!("there is no process {pid}")).hint(
            "a program that has ended cannot be queried; `dquant explain` lists the running ones",
        );
    }
    let what = device.map_or_else(|| "device".to_owned(), |name| format!("device {name}"));
    CliError::usage(format_args!("process {pid} has no {what} open in this network namespace"))
        .hint(
            "`dquant explain` lists the programs that can be queried; `ip netns exec` enters another namespace; \
             for daemons there is `dquant status`",
        )
}

fn unanswered(Endpoint { pid }: Endpoint, error: &std::io::Error) -> CliError {
    let hint = match error.kind() {
        ErrorKind::PermissionDenied => {
            "only the user that a program runs as, and root, may query it"
        }
        ErrorKind::TimedOut => "is it stopped, by a signal or a debugger?",
        _ => "is it a program that `dquant run` started, with the library of this version?",
    };
    CliError::peer_unreachable(format_args!("process {pid}: {error}")).caused_by(error).hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_pair_numbers_come_in_two_spellings() {
        assert_eq!((qp_number("65554"), qp_number("0x10012")), (Ok(65554), Ok(65554)));
        assert!(qp_number("qp7").is_err());
    }
}
