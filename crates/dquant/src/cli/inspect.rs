//! `dquant inspect`: the command in front of [`crate::inspect`].

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use xio::dataset::{DatasetError, Dtype, Format};
use xio::kernel::Scan;

use super::{Console, Report};
use crate::exit::{CliError, Exit, INPUT_HINT};
use crate::inspect::{InspectError, TokenSource};
use crate::units::{Bytes, Count};

/// Show the contents of a token file and whether its ids fit 16 bits
///
/// The format is told from the first bytes: NumPy, or a Megatron pair (.bin with .idx, name
/// either). A file without a header is flat, and needs --dtype. Every token is read once.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant inspect corpus.bin --dtype u32
  dquant inspect corpus.npy --json
  dquant inspect my-corpus_text_document.idx"
)]
pub(super) struct Inspect {
    /// A flat token file, a .npy, or one half of a Megatron pair
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Type of the tokens: u16, u32, i32, u64 or i64; needed for flat files
    #[arg(long, value_name = "TYPE", value_parser = token_type)]
    dtype: Option<Dtype>,
}

impl Inspect {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let source = TokenSource::open(&self.file, self.dtype).map_err(explain)?;
        let total = source.description.data_bytes();
        let mut shown = Instant::now();
        let scan = source.scan(&mut |done| {
            if shown.elapsed() >= Duration::from_millis(200) {
                shown = Instant::now();
                console.progress(format_args!("{} of {}", Bytes(done), Bytes(total)));
            }
        });
        console.report(&Holding::new(&source, &scan.map_err(explain)?))?;
        Ok(Exit::Good)
    }
}

fn token_type(name: &str) -> Result<Dtype, String> {
    let dtype = Dtype::from_name(name).filter(|dtype| dtype.is_token());
    dtype.ok_or_else(|| "token types are u16, u32, i32, u64 and i64".to_owned())
}

fn explain(error: InspectError) -> CliError {
    let hint = match &error {
        InspectError::UnknownType { .. } => "if it is flat, name the type: --dtype u32",
        InspectError::OtherType { .. } => "leave --dtype out: the header tells the type",
        InspectError::Dataset { source: DatasetError::Ragged { .. }, .. } => {
            "the file is of another type, or incomplete"
        }
        InspectError::Dataset { .. } => {
            "token files are flat, .npy of integers, or Megatron .bin + .idx; this one may be incomplete"
        }
        InspectError::Io { .. } | InspectError::NotAFile { .. } => INPUT_HINT,
    };
    CliError::usage(&error).caused_by(&error).hint(hint)
}

/// The result: what the file holds.
#[derive(Debug, Serialize)]
struct Holding {
    file: String,
    format: &'static str,
    dtype: &'static str,
    tokens: u64,
    data_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    sequences: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    documents: Option<u64>,
    /// Bytes behind the array of a `.npy`.
    #[serde(skip_serializing_if = "Option::is_none")]
    trailing_bytes: Option<u64>,
    min_id: Option<i128>,
    max_id: Option<i128>,
    fits_u16: bool,
}

impl Holding {
    fn new(source: &TokenSource, scan: &Scan) -> Holding {
        let description = &source.description;
        let (sequences, documents) = match description.format {
            Format::Megatron { sequences, documents } => (Some(sequences), Some(documents)),
            Format::Flat | Format::Npy { .. } => (None, None),
        };
        let trailing_bytes = match description.format {
            Format::Npy { trailing_bytes, .. } if trailing_bytes > 0 => Some(trailing_bytes),
            _ => None,
        };
        Holding {
            file: source.path.display().to_string(),
            format: description.format.name(),
            dtype: description.dtype.name(),
            tokens: description.tokens,
            data_bytes: description.data_bytes(),
            sequences,
            documents,
            trailing_bytes,
            min_id: scan.range.map(|(min, _)| min),
            max_id: scan.range.map(|(_, max)| max),
            fits_u16: scan.range.is_none_or(|(min, max)| min >= 0 && max <= i128::from(u16::MAX)),
        }
    }
}

impl Report for Holding {
    const SCHEMA: &'static str = "dquant.inspect/1";
}

impl fmt::Display for Holding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tokens, bytes) = (Count(self.tokens), Bytes(self.data_bytes));
        writeln!(f, "{}: {}, {tokens} {} tokens, {bytes}", self.file, self.format, self.dtype)?;
        if let (Some(sequences), Some(documents)) = (self.sequences, self.documents) {
            writeln!(f, "  documents    {} in {} sequences", Count(documents), Count(sequences))?;
        }
        if let Some(bytes) = self.trailing_bytes {
            writeln!(f, "  note         {bytes} bytes behind the array are ignored")?;
        }
        let (Some(min), Some(max)) = (self.min_id, self.max_id) else {
            return write!(f, "  ids          none");
        };
        let fits = if self.fits_u16 {
            format!("fits u16: {} on the wire", Bytes(self.tokens * 2))
        } else {
            "does not fit u16".to_owned()
        };
        write!(f, "  ids          {min} to {max}, {fits}")
    }
}
