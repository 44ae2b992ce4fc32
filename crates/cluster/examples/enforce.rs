//! Puts a plan into force at an interface of this network namespace, as an agent does, and ends:
//! the queues stay.
//!
//! `enforce INTERFACE MBITS [JOB:DSCP:MBITS ...]` for a port of that many Mbit/s; without jobs it
//! has one queue only. `enforce --clear` removes all queues of ours. `--replace` first replaces
//! what somebody else has configured there. `--watch SECONDS` stays, and prints what each job sent
//! in every second.

use std::error::Error;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use cluster::enforce::htb::Htb;
use cluster::enforce::{EnforceError, Enforcer, PortPlan};
use parfait::job::Latency;
use parfait::queues::{Dscp, Guarantee, Plan, Port, Scheme};

const USAGE: &str =
    "enforce [--replace] [--watch SECONDS] INTERFACE MBITS [JOB:DSCP:MBITS ...] | --clear";

/// A queue holds 8 ms of the port, and two of the largest packets at least.
const BUFFER_US: u64 = 8000;

fn main() -> ExitCode {
    let Err(error) = run(std::env::args().skip(1).collect()) else { return ExitCode::SUCCESS };
    eprintln!("error: {error}");
    if let Some(error) = error.downcast_ref::<EnforceError>() {
        eprintln!("hint: {}", error.hint());
    }
    ExitCode::from(2)
}

fn run(mut arguments: Vec<String>) -> Result<(), Box<dyn Error>> {
    let mut htb = Htb::open()?;
    if take(&mut arguments, "--replace") {
        htb = htb.replacing();
    }
    if take(&mut arguments, "--clear") {
        return Ok(htb.apply(&[])?);
    }
    let seconds: u64 = match arguments.iter().position(|argument| argument == "--watch") {
        Some(at) if at + 1 < arguments.len() => {
            arguments.drain(at..=at + 1).nth(1).ok_or(USAGE)?.parse()?
        }
        _ => 0,
    };
    let [interface, rate, jobs @ ..] = arguments.as_slice() else { return Err(USAGE.into()) };
    let jobs = jobs.iter().map(|job| guarantee(job)).collect::<Result<Vec<_>, _>>()?;
    let plan = Plan::new(port(bps(rate)?), Scheme::Matched, &jobs)?;
    htb.apply(&[PortPlan { interface: interface.clone(), plan }])?;
    watch(&mut htb, seconds)
}

/// Takes an option out.
fn take(arguments: &mut Vec<String>, option: &str) -> bool {
    let at = arguments.iter().position(|argument| argument == option);
    at.map(|at| arguments.remove(at)).is_some()
}

fn bps(mbits: &str) -> Result<u64, Box<dyn Error>> {
    Ok(mbits.parse::<u64>()?.checked_mul(1_000_000).ok_or("that is too fast")?)
}

fn guarantee(job: &str) -> Result<Guarantee, Box<dyn Error>> {
    let mut parts = job.split(':');
    let (Some(job), Some(dscp), Some(rate), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(USAGE.into());
    };
    let (job, dscp, bps) = (job.parse()?, Dscp::new(dscp.parse()?)?, bps(rate)?);
    Ok(Guarantee {
        job,
        dscp,
        bps,
        flows: 1,
        latency: Latency::Normal,
        burst_bytes: 0,
        is_contended: true,
    })
}

fn port(rate_bps: u64) -> Port {
    let buffer_bytes = rate_bps / 8 / 1000 * BUFFER_US / 1000;
    Port {
        rate_bps,
        queues: 8,
        weight_units: 1000,
        quantum_bytes: 1500,
        frame_bytes: 1514,
        buffer_bytes,
    }
}

fn watch(htb: &mut Htb, seconds: u64) -> Result<(), Box<dyn Error>> {
    let mut before = htb.sent()?;
    for _ in 0..seconds {
        thread::sleep(Duration::from_secs(1));
        let now = htb.sent()?;
        for (job, earlier) in now.iter().zip(&before) {
            let mbits = (job.bytes - earlier.bytes) * 8 / 1_000_000;
            let (number, waiting, lost) = (job.job, job.backlog_bytes, job.dropped_packets);
            println!("job {number}: {mbits} Mbit/s, {waiting} bytes wait, {lost} packets dropped");
        }
        before = now;
    }
    Ok(())
}
