//! What `dquant parfait profile` reads: packets of a capture, or counters, as samples of traffic
//! between workers.
//!
//! [`capture`] reads classic pcap and pcapng, whole packets or their headers alone. [`counters`]
//! reads a table of bytes by edge and time. Workers are addresses, or the names that a map gives
//! these.

pub mod capture;
pub mod counters;
mod pcapng;

use std::collections::BTreeMap;
use std::net::IpAddr;

use parfait::profile::sequence::Counts;
use parfait::profile::{MAX_WORKERS, Sample};
use thiserror::Error;

/// Samples between workers.
#[derive(Clone, Debug, Default)]
pub struct Traffic {
    /// By number: their addresses or names.
    pub workers: Vec<String>,
    /// What went from one to another.
    pub samples: Vec<Sample>,
    /// Bytes of headers and frame for a million bytes of payload.
    pub overhead_ppm: u64,
    /// Packets that were repeated, or missing in the capture.
    pub counts: Counts,
    /// Packets or lines that are of no worker, or no RoCE.
    pub others: u64,
}

/// Why a file says nothing about traffic.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TrafficError {
    /// It is no capture, or damaged.
    #[error("{0}")]
    Capture(#[from] roce::wire::capture::CaptureError),
    /// A block of a pcapng file is damaged.
    #[error("the pcapng block at byte {at} is damaged: {what}")]
    Block {
        /// Where it begins.
        at: usize,
        /// What is wrong.
        what: &'static str,
    },
    /// A line of a table cannot be read.
    #[error("line {line}: {why}")]
    Line {
        /// Its number, from 1.
        line: usize,
        /// Why.
        why: String,
    },
    /// There are too many workers.
    #[error("more than {MAX_WORKERS} addresses: name those of the job with --map")]
    TooMany,
}

/// Samples of a file: a capture if it begins as one or is no text, else a table of counters.
///
/// # Errors
/// When it is neither, with the place.
pub fn read(bytes: &[u8], names: &Names) -> Result<Traffic, TrafficError> {
    match std::str::from_utf8(bytes) {
        Ok(text) if !capture::is_capture(bytes) => counters::read(text, names),
        _ => capture::read(bytes, names),
    }
}

/// Names for addresses.
#[derive(Clone, Debug, Default)]
pub struct Names {
    by_address: BTreeMap<IpAddr, String>,
}

impl Names {
    /// Those of a file with an address and a name on each line. Addresses of one name are one
    /// worker.
    ///
    /// # Errors
    /// Names the line that cannot be read.
    pub fn parse(text: &str) -> Result<Names, TrafficError> {
        let mut names = Names::default();
        for (number, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let refused = |why: String| TrafficError::Line { line: number + 1, why };
            let (address, name) = line
                .split_once(char::is_whitespace)
                .ok_or_else(|| refused(format!("'{line}' is not ADDRESS NAME")))?;
            let address = address
                .parse()
                .map_err(|_| refused(format!("'{address}' is not an IP address")))?;
            if names.by_address.insert(address, name.trim().to_owned()).is_some() {
                return Err(refused(format!("{address} is there twice")));
            }
        }
        Ok(names)
    }
}

/// Numbers of workers, given out as they are met.
#[derive(Debug)]
struct Numbers<'a> {
    names: &'a Names,
    by_name: BTreeMap<String, u32>,
}

impl<'a> Numbers<'a> {
    fn new(names: &'a Names) -> Numbers<'a> {
        Numbers { names, by_name: BTreeMap::new() }
    }

    /// The number of the worker with this address; `None` if there is a map that does not have it.
    fn of_address(&mut self, address: IpAddr) -> Result<Option<u32>, TrafficError> {
        if self.names.by_address.is_empty() {
            return self.of_name(&address.to_string()).map(Some);
        }
        match self.names.by_address.get(&address) {
            Some(name) => self.of_name(name).map(Some),
            None => Ok(None),
        }
    }

    fn of_name(&mut self, name: &str) -> Result<u32, TrafficError> {
        if let Some(number) = self.by_name.get(name) {
            return Ok(*number);
        }
        if self.by_name.len() >= MAX_WORKERS {
            return Err(TrafficError::TooMany);
        }
        let number = self.by_name.len() as u32;
        self.by_name.insert(name.to_owned(), number);
        Ok(number)
    }

    fn into_workers(self) -> Vec<String> {
        let mut workers: Vec<(u32, String)> =
            self.by_name.into_iter().map(|(name, number)| (number, name)).collect();
        workers.sort_unstable();
        workers.into_iter().map(|(_, name)| name).collect()
    }
}
