//! `dquant capture live`: records the RoCE packets of an interface in a file, whoever sends or
//! receives them.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Args;
use lab::units;
use nic::capture::Capture;
use nic::clock;
use nic::interfaces::interfaces;
use nic::packet::PacketTap;
use nic::waiter::{Waiter, Waker};
use roce::{Duration, Time};
use serde::Serialize;
use service::signals::on_end_signal;

use crate::cli::{Console, Report};
use crate::exit::{CliError, Exit, OUTPUT_HINT};

/// Longest sleep: recorded packets reach the file soon, and the end is noticed in time.
const LOOK: Duration = Duration::from_millis(50);

/// Record the RoCE packets of an interface: UDP to port 4791, and between processes of this machine
///
/// The file has every packet as it is on the wire, from the IP header on: what the kernel moves as one
/// large packet is taken apart. Ends with Ctrl-C, after --count packets or after --duration; a file
/// that was cut off by a kill is valid. Needs CAP_NET_RAW. A process records its own traffic without
/// any privilege when it is told to (see the documentation of the verbs library).
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
tshark knows RoCE by port 4791, and has to be told of the ports between processes of one machine
that cannot share it. Disable its RPC-over-RDMA heuristic, which misreads every SEND.

Examples:
  dquant capture live --interface any -o run.pcap
  dquant capture live --interface eth0 --duration 10s -o run.pcap
  tshark -d udp.port==29185-29438,infiniband --disable-protocol rpcordma -r run.pcap"
)]
pub(super) struct Live {
    /// Name of the interface, or any for all of them
    #[arg(long, value_name = "NAME", default_value = "any")]
    interface: String,

    /// File to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,

    /// End after this many packets
    #[arg(long, value_name = "N")]
    count: Option<u64>,

    /// End after this time
    #[arg(long, value_name = "TIME", value_parser = units::duration)]
    duration: Option<Duration>,

    /// End when the file has reached this size
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = units::size_bytes)]
    limit: u64,
}

/// What was recorded.
#[derive(Debug, Serialize)]
struct Recorded {
    file: String,
    interface: String,
    packets: u64,
    coalesced: u64,
    unknown: u64,
    lost: u64,
    ended: Option<String>,
}

impl Report for Recorded {
    const SCHEMA: &'static str = "dquant.capture.live/1";
}

impl fmt::Display for Recorded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Recorded { file, interface, packets, coalesced, unknown, lost, .. } = self;
        write!(f, "{file}: {packets} packets of {interface}")?;
        if *coalesced > 0 {
            write!(f, ", {coalesced} buffers coalesced by the kernel")?;
        }
        if *unknown > 0 {
            write!(f, ", {unknown} left out (unknown link or offload)")?;
        }
        if *lost > 0 {
            write!(f, ", {lost} lost: too fast for this capture")?;
        }
        match &self.ended {
            Some(why) => write!(f, "; {why}"),
            None => Ok(()),
        }
    }
}

impl Live {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let waiter = Waiter::new().map_err(CliError::from_cause)?;
        let tap = PacketTap::open(index_of(&self.interface)?).map_err(refused)?;
        let capture = Capture::create(&self.output, self.limit)
            .map_err(|error| unwritable(&self.output, &error))?;
        let asked_to_end = end_on_signal(waiter.waker())?;
        console.note(format_args!("recording RoCE packets of {}", self.interface));
        let recording = Recording { waiter, tap, capture, left: self.count, asked_to_end };
        let (tap, capture) = recording.run(self.duration.map(|span| clock::now() + span))?;
        console.report(&self.recorded(tap, &capture))?;
        Ok(Exit::Good)
    }

    fn recorded(&self, mut tap: PacketTap, capture: &Capture) -> Recorded {
        let counters = tap.counters();
        Recorded {
            file: self.output.display().to_string(),
            interface: self.interface.clone(),
            packets: capture.records(),
            coalesced: counters.coalesced,
            unknown: counters.unknown,
            lost: counters.overrun,
            ended: capture.ended().map(str::to_owned),
        }
    }
}

/// A capture in progress.
struct Recording {
    waiter: Waiter,
    tap: PacketTap,
    capture: Capture,
    /// Packets still to record, if limited.
    left: Option<u64>,
    asked_to_end: Arc<AtomicBool>,
}

impl Recording {
    fn run(mut self, deadline: Option<Time>) -> Result<(PacketTap, Capture), CliError> {
        while !self.is_over(deadline) {
            let Recording { tap, capture, left, .. } = &mut self;
            let taken = tap.receive(&mut |time, packet| {
                if *left != Some(0) {
                    capture.packet(time, packet);
                    *left = left.map(|left| left - 1);
                }
            });
            let taken =
                taken.map_err(|error| CliError::because("the interface cannot be read", &error))?;
            self.capture.flush_if_due();
            if taken == 0 {
                let sleep = deadline.map_or(LOOK, |end| end.since(clock::now()).min(LOOK));
                self.waiter.wait(&[self.tap.fd()], Some(sleep)).map_err(CliError::from_cause)?;
            }
        }
        self.capture.flush();
        Ok((self.tap, self.capture))
    }

    fn is_over(&self, deadline: Option<Time>) -> bool {
        self.left == Some(0)
            || self.capture.ended().is_some()
            || self.asked_to_end.load(Ordering::Relaxed)
            || deadline.is_some_and(|end| clock::now() >= end)
    }
}

fn index_of(name: &str) -> Result<Option<u32>, CliError> {
    if name == "any" {
        return Ok(None);
    }
    let all = interfaces().map_err(CliError::from_cause)?;
    if let Some(found) = all.iter().find(|interface| interface.name == name) {
        return Ok(Some(found.index));
    }
    let names: Vec<&str> = all.iter().map(|interface| interface.name.as_str()).collect();
    Err(CliError::usage(format_args!("there is no interface {name}"))
        .hint(format_args!("one of {}, or any", names.join(", "))))
}

fn refused(error: io::Error) -> CliError {
    let failed = CliError::because("cannot listen to an interface", &error);
    if error.kind() != io::ErrorKind::PermissionDenied {
        return failed;
    }
    failed.hint("run it as root, or allow it: sudo setcap cap_net_raw+ep \"$(command -v dquant)\"")
}

fn unwritable(path: &Path, error: &io::Error) -> CliError {
    CliError::because(format_args!("cannot write {}", path.display()), error).hint(OUTPUT_HINT)
}

/// From here on a signal ends the recording and not the process.
fn end_on_signal(waker: Waker) -> Result<Arc<AtomicBool>, CliError> {
    let asked = Arc::new(AtomicBool::new(false));
    let raised = Arc::clone(&asked);
    on_end_signal(move |_| {
        raised.store(true, Ordering::Relaxed);
        waker.wake();
    })?;
    Ok(asked)
}
