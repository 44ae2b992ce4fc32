//! Options of the commands that open a stream.

use std::net::SocketAddr;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args};
use lab::units;

use super::daemons::{TokenArgs, roce_address, span};
use crate::exit::CliError;
use client::{Group, Options, Rank};

/// Parses `R/N`.
fn rank(text: &str) -> Result<(u32, u32), String> {
    let numbers = text.split_once('/').map(|(rank, ranks)| (rank.parse(), ranks.parse()));
    match numbers {
        Some((Ok(rank), Ok(ranks))) if rank < ranks => Ok((rank, ranks)),
        _ => Err("write it as R/N, with R from 0 to N - 1: 0/8".to_owned()),
    }
}

/// How to open a stream.
#[derive(Debug, Args)]
pub(super) struct StreamArgs {
    /// Whether the DPU does the work, or this process
    #[arg(long, value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    pub(super) offload: bool,

    /// Local socket of the DPU [default: $XDG_RUNTIME_DIR/dquant-dpu.sock]
    ///
    /// Without that variable it is in $TMPDIR, else in /tmp.
    #[arg(long, value_name = "PATH", env = "DQUANT_DPU")]
    dpu: Option<PathBuf>,

    /// Another user whose DPU may have the token, by name or number
    ///
    /// Without it the token goes to a DPU of this user or of root only.
    #[arg(long, value_name = "USER", env = "DQUANT_DPU_USER")]
    dpu_user: Option<String>,

    /// Token type of flat files [default: from their manifests, else as their bytes look]
    ///
    /// A type that the manifest or the bytes of a file contradict is refused.
    ///
    /// bytes: flat and .npy files hold records that are no tokens; window(N) is the length of one.
    #[arg(long, value_name = "TYPE", default_value = "", hide_default_value = true)]
    dtype: String,

    /// Size of the vocabulary: refuse files with larger ids
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    vocab: Option<u64>,

    /// Seed that the word `seed` in the plan stands for
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// First batch to deliver: resume at any number
    #[arg(long, value_name = "N", default_value_t = 0)]
    first_batch: u64,

    /// Batches to deliver, those left out included; without it the stream has no end
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    batches: Option<u64>,

    /// Only the batches of data-parallel rank R of N: every N-th
    #[arg(long, value_name = "R/N", value_parser = rank)]
    rank: Option<(u32, u32)>,

    /// Read one stream of the DPU with the other ranks, all on this machine, that give the same name
    #[arg(long, value_name = "NAME", requires = "rank")]
    group: Option<String>,

    /// Batches not to deliver: 1000..1200 leaves out 1000 to 1199
    ///
    /// May be given several times. The other batches keep their numbers and bytes.
    #[arg(long, value_name = "A..B", value_parser = batch_range)]
    leave_out: Vec<Range<u64>>,

    /// Slots of the ring between DPU and this process
    #[arg(long, value_name = "N", default_value_t = 16)]
    slots: u32,

    /// Size of a slot; it must hold a batch [default: 1MiB, or a batch where that is larger]
    #[arg(long, value_name = "SIZE", value_parser = units::size_bytes)]
    slot_size: Option<u64>,

    /// Without offload: address of this process's RoCE endpoint
    ///
    /// A target that was started with --device reaches only port 4791: give this process an
    /// address of its own, whose port is then 4791.
    #[arg(long, value_name = "IP[:PORT]", value_parser = roce_address, verbatim_doc_comment)]
    roce: Option<SocketAddr>,

    /// Without offload: registered memory
    #[arg(long, value_name = "SIZE", default_value = "128MiB", value_parser = units::size_bytes)]
    memory: u64,

    /// Without offload: drop this share of received packets, for tests
    #[arg(long, value_name = "SHARE", default_value = "0%", value_parser = units::fraction_ppm)]
    loss: u32,

    /// Without offload: how long to retry a lost target
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = span)]
    reconnect: Duration,

    #[command(flatten)]
    token: TokenArgs,
}

impl StreamArgs {
    fn rank(&self) -> Rank {
        let Some((rank, ranks)) = self.rank else {
            return Rank::default();
        };
        let group = self.group.clone();
        let group = group.map(|name| Group { name, first: 0, count: ranks, readers: 1, reader: 0 });
        Rank { ranks, rank, group }
    }

    pub(super) fn options(&self) -> Result<Options, CliError> {
        let too_large =
            |_| CliError::usage("a slot is larger than 4 GiB").hint("leave --slot-size out");
        let slot_bytes = self.slot_size.map(u32::try_from).transpose().map_err(too_large)?;
        let slot_bytes = match slot_bytes {
            Some(0) => {
                return Err(CliError::usage("a slot has no byte").hint("leave --slot-size out"));
            }
            slot_bytes => slot_bytes.unwrap_or(0),
        };
        let defaults = Options::from_env();
        Ok(Options {
            dpu: self.dpu.clone().unwrap_or(defaults.dpu),
            dpu_user: self.dpu_user.clone().filter(|user| !user.is_empty()),
            token: self.token.given()?.unwrap_or(defaults.token),
            dtype: self.dtype.clone(),
            vocabulary: self.vocab,
            seed: self.seed,
            first_batch: self.first_batch,
            batches: self.batches,
            shift: 0,
            leave_out: self.leave_out.clone(),
            rank: self.rank(),
            slots: self.slots,
            slot_bytes,
            roce: self.roce,
            memory: self.memory,
            loss_ppm: self.loss,
            reconnect: self.reconnect,
        })
    }
}

fn batch_range(text: &str) -> Result<Range<u64>, String> {
    let number = |text: &str| text.replace('_', "").parse::<u64>().ok();
    let ends = text.split_once("..").and_then(|(a, b)| Some((number(a)?, number(b)?)));
    match ends {
        Some((first, end)) if first < end => Ok(first..end),
        Some(_) => Err("the range is empty; its last batch is END - 1".to_owned()),
        None => Err("write it as FIRST..END, such as 1000..1200".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_batches() {
        assert_eq!(batch_range("1_000..1200"), Ok(1_000..1_200));
        for wrong in ["", "5", "5..", "..5", "5..5", "6..5", "-1..5", "1...5", "1..x"] {
            assert!(batch_range(wrong).is_err(), "{wrong}");
        }
    }
}
