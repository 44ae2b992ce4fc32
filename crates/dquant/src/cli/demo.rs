//! `dquant demo`: the main job in one command.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args};
use lab::units;

use super::daemons::span;
use super::serve::Io;
use super::{Console, Report};
use crate::demo::report::Summary;
use crate::demo::trainer::Verify;
use crate::demo::{self, Config, Watch};
use crate::exit::{CliError, Exit};

/// Run target, DPU and trainer on this machine; verify and measure what arrives
///
/// Token files are made (or given with --data), blended, shuffled and narrowed on their way from
/// the target through the DPU into the trainer: three processes that talk RoCE within this machine.
/// Batches are verified against a slow reference that reads the files directly. Then the same work
/// is done without offload, to compare.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant demo
  dquant demo --loss 1% --verify all --seconds 3
  dquant demo --data web.bin=0.5 --data code.bin=0.3 --data books.bin=0.2
  dquant demo --offload false --batches 1000 --json"
)]
pub(super) struct Demo {
    /// A token file and its weight; may be given more than once. Without any, corpora are made
    #[arg(long, value_name = "PATH=WEIGHT", value_parser = weighted)]
    data: Vec<(PathBuf, String)>,

    /// How many corpora to make, 1 to 3
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=3))]
    corpora: u8,

    /// Token type of flat files [default: from their manifests, else as their bytes look]
    #[arg(long, value_name = "TYPE")]
    dtype: Option<String>,

    /// Tokens per sample
    #[arg(long, value_name = "N", default_value_t = 2048)]
    window: u32,

    /// Samples per batch
    #[arg(long, value_name = "N", default_value_t = 32)]
    batch: u32,

    /// Whether the DPU does the work
    #[arg(long, value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    offload: bool,

    /// Drop this share of packets on every receiving side
    #[arg(long, value_name = "SHARE", default_value = "0%", value_parser = units::fraction_ppm)]
    loss: u32,

    /// What to verify
    ///
    /// `all` slows the stream down to the pace of the reference.
    #[arg(long, value_enum, default_value = "sample")]
    verify: Verify,

    /// Length of the measured part of each run
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = seconds)]
    seconds: Duration,

    /// Deliver exactly this many batches instead
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    batches: Option<u64>,

    /// Seed of the made corpora, the order of samples and the losses
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// Whether to do the work without offload, too
    #[arg(long, value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    compare: bool,

    /// How the target reads files
    #[arg(long, value_enum, default_value = "auto")]
    io: Io,
}

fn weighted(text: &str) -> Result<(PathBuf, String), String> {
    match text.rsplit_once('=') {
        Some((path, weight)) if !path.is_empty() && !weight.is_empty() => {
            Ok((path.into(), weight.to_owned()))
        }
        _ => Err("write it as PATH=WEIGHT, for example corpora/web.bin=0.5".into()),
    }
}

/// A time; a bare number means seconds.
pub(super) fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && (0.0..1e6).contains(&number) => {
            Ok(Duration::from_secs_f64(number))
        }
        Ok(_) => Err("not a length of time".into()),
        Err(_) => span(text).map_err(|error| error.to_string()),
    }
}

impl Report for Summary {
    const SCHEMA: &'static str = "dquant.demo/1";
}

impl Watch for Console {
    fn note(&mut self, text: &str) {
        Console::note(self, text);
    }

    fn progress(&mut self, text: &str) {
        Console::progress(self, text);
    }
}

impl Demo {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        // The made corpora are flat files of this type.
        let made = if self.data.is_empty() { "u32" } else { "" };
        let config = Config {
            dtype: self.dtype.unwrap_or_else(|| made.to_owned()),
            data: self.data,
            corpora: usize::from(self.corpora),
            window: self.window,
            batch: self.batch,
            offload: self.offload,
            loss_ppm: self.loss,
            verify: self.verify,
            seconds: self.seconds,
            batches: self.batches,
            seed: self.seed,
            compare: self.compare,
            io: self.io.name().to_owned(),
        };
        let summary = demo::run(&config, console)?;
        console.report(&summary)?;
        Ok(summary.exit())
    }
}
