//! Which files a run reads, in which order, and what they hold.
//!
//! A folder stands for every file below it, sorted by path bytes, so the same tree gives the same
//! dataset on any machine. Below a folder, three kinds of names are left out. Those that begin with
//! a dot, and what describes token files (manifests, hashes, datatrove's sidecars), are rarely
//! intended as input; symbolic links can form loops. Paths named on the command line are always
//! read; `-` is standard input. What a file holds follows from its name, without `.gz`, `.zst` or
//! `.zstd`, unless the user says otherwise. An ending that stands for several things, `.json`, is
//! decided by the first bytes. What is known to hold no documents is refused, or left out of a
//! folder and named; what nobody knows is read as text, and named too.

use std::fs::{self, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fmt, io};

use clap::ValueEnum;
use formats::settle::is_sidecar;
use twox_hash::XxHash3_128;

use super::{TokenizeError, input};

/// What an input holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// One document of plain text per file
    Text,
    /// One document per line, in a field of a JSON object
    Jsonl,
    /// One document per row, in a column
    Parquet,
}

/// Endings of plain text, of source code, and of what people write text in.
const TEXT: &[&str] = &[
    "adoc", "asm", "bash", "bat", "bib", "c", "cc", "cfg", "clj", "cmake", "conf", "cpp", "cs",
    "css", "cu", "cuh", "cxx", "dart", "diff", "el", "ex", "exs", "f90", "fs", "go", "gradle", "h",
    "hh", "hpp", "hs", "htm", "html", "ini", "java", "jl", "js", "jsx", "kt", "latex", "less",
    "lisp", "log", "lua", "m", "markdown", "md", "mdx", "ml", "mm", "org", "pas", "patch", "php",
    "pl", "pm", "ps1", "py", "pyi", "pyx", "r", "rb", "rkt", "rmd", "rs", "rst", "s", "sass",
    "scala", "scm", "scss", "sh", "sol", "sql", "srt", "sv", "swift", "tcl", "tex", "text", "toml",
    "ts", "tsx", "txt", "v", "vb", "vhd", "vim", "vtt", "vue", "wiki", "yaml", "yml", "zig", "zsh",
];

/// What a file is that was meant for `--chat`.
pub const CHAT_TEMPLATE: &str = "a chat template";

/// Endings of files that hold no documents that are read, and what such a file is.
const NO_DOCUMENTS: &[(&[&str], &str)] = &[
    (&["warc", "wet", "wat", "arc"], "a web archive"),
    (&["csv", "tsv", "psv"], "a table"),
    (&["xml", "xlsx", "ods"], "a document with structure of its own"),
    (&["arrow", "feather", "avro", "orc"], "a file of columns, which `--format` does not know"),
    (&["tar", "tgz", "zip", "7z", "rar"], "an archive"),
    (&["bz2", "xz", "lz4", "br", "sz", "snappy"], "compressed in a way that is not read"),
    (
        &["bin", "idx", "npy", "npz", "pt", "pth", "pkl", "pickle", "safetensors", "h5", "hdf5"],
        "a file of numbers",
    ),
    (&["ds", "tfrecord", "tfrecords", "array_record", "mds", "db", "sqlite"], "a file of records"),
    (&["jinja", "jinja2", "j2"], CHAT_TEMPLATE),
    (&["pdf", "epub", "doc", "docx", "odt", "rtf"], "a document with structure of its own"),
];

/// What the name of a file says it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Named {
    Format(Format),
    /// Lines or one value: the first bytes tell.
    Json,
    /// Nothing that is read.
    Not(&'static str),
    /// Nothing known.
    Unknown,
}

impl Named {
    fn of(path: &Path) -> Named {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        let compressed = [".gz", ".zst", ".zstd"].iter().find_map(|end| name.strip_suffix(end));
        let name = compressed.unwrap_or(&name);
        let Some((_, ending)) = name.rsplit_once('.') else {
            return Named::Format(Format::Text);
        };
        match ending {
            "jsonl" | "ndjson" | "jsonlines" => Named::Format(Format::Jsonl),
            "parquet" => Named::Format(Format::Parquet),
            "json" => Named::Json,
            ending if TEXT.contains(&ending) => Named::Format(Format::Text),
            ending => NO_DOCUMENTS
                .iter()
                .find(|(endings, _)| endings.contains(&ending))
                .map_or(Named::Unknown, |(_, what)| Named::Not(what)),
        }
    }
}

/// What a file holds whose name says JSON: lines, if the first is an object.
fn json(path: &Path) -> Result<Format, TokenizeError> {
    let head = input::head(path)?;
    let text = head.strip_prefix("\u{feff}".as_bytes()).unwrap_or(&head).trim_ascii_start();
    let line = text.split(|byte| *byte == b'\n').next().unwrap_or(text);
    // One that is longer than what was read is no object of a few fields over many lines.
    let is_whole = line.len() < text.len() || head.len() < input::HEAD_BYTES as usize;
    let what = match text.first() {
        None => return Ok(Format::Jsonl),
        Some(b'{') if !is_whole || line.trim_ascii_end().ends_with(b"}") => {
            return Ok(Format::Jsonl);
        }
        Some(b'{') => "one JSON object over several lines",
        Some(b'[') => "a JSON list",
        _ => "no JSON object per line",
    };
    Err(TokenizeError::NoDocumentsIn { path: path.to_owned(), what })
}

/// An input to read.
#[derive(Clone, Debug)]
pub struct Source {
    /// Its path; `-` for standard input.
    pub path: PathBuf,
    /// What it holds.
    pub format: Format,
    /// Its size on the disk; `None` for standard input.
    pub bytes: Option<u64>,
    /// Distinguishes a file from another of the same name.
    modified_ns: i128,
}

impl Source {
    fn file(
        path: PathBuf,
        format: Option<Format>,
        metadata: &Metadata,
        note: &mut dyn FnMut(&Path, Noted),
    ) -> Result<Source, TokenizeError> {
        let format = match (format, Named::of(&path)) {
            (Some(format), _) | (None, Named::Format(format)) => format,
            (None, Named::Json) => json(&path)?,
            (None, Named::Not(what)) => return Err(TokenizeError::NoDocumentsIn { path, what }),
            (None, Named::Unknown) => {
                note(&path, Noted::AsText);
                Format::Text
            }
        };
        let modified_ns =
            i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec());
        Ok(Source { path, format, bytes: Some(metadata.len()), modified_ns })
    }

    /// Whether this is standard input.
    pub fn is_stdin(&self) -> bool {
        self.bytes.is_none()
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_stdin() { f.write_str("standard input") } else { self.path.display().fmt(f) }
    }
}

/// Distinguishes lists of inputs, by their names, formats, sizes and times of change.
pub fn fingerprint(sources: &[Source]) -> String {
    let mut hash = XxHash3_128::new();
    for Source { path, format, bytes, modified_ns } in sources {
        hash.write(path.as_os_str().as_bytes());
        hash.write(format!("\0{format:?} {bytes:?} {modified_ns}\0").as_bytes());
    }
    format!("{} files, xxh3 {:032x}", sources.len(), hash.finish_128())
}

/// What a user should know of an input before it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Noted {
    /// It is read as plain text, although nothing says that it is.
    AsText,
    /// It lies in a folder and is left out, because it is this.
    LeftOut(&'static str),
}

/// Lists the sources of all inputs, in the order of the inputs. Files in `outputs` are not inputs.
/// `note` takes what is assumed of files whose names do not tell what they hold.
///
/// # Errors
/// When a folder cannot be read, an input is neither file nor folder, holds no documents, nothing
/// is found, standard input is named twice, or an output is named as an input.
pub fn list(
    inputs: &[PathBuf],
    format: Option<Format>,
    outputs: &[PathBuf],
    note: &mut dyn FnMut(&Path, Noted),
) -> Result<Vec<Source>, TokenizeError> {
    let outputs: Vec<PathBuf> = outputs.iter().flat_map(fs::canonicalize).collect();
    let is_output = |path: &Path| fs::canonicalize(path).is_ok_and(|path| outputs.contains(&path));
    let mut sources = Vec::new();
    for input in inputs {
        if input.as_os_str() == "-" {
            if sources.iter().any(Source::is_stdin) {
                return Err(TokenizeError::StdinTwice);
            }
            let format = format.unwrap_or_else(|| {
                note(input, Noted::AsText);
                Format::Text
            });
            sources.push(Source { path: input.clone(), format, bytes: None, modified_ns: 0 });
            continue;
        }
        let metadata = fs::metadata(input).map_err(TokenizeError::io("open", input))?;
        if metadata.is_dir() {
            walk(input, &mut |path, metadata| {
                if is_output(&path) {
                    return Ok(());
                }
                match Source::file(path, format, metadata, note) {
                    Ok(source) => sources.push(source),
                    Err(TokenizeError::NoDocumentsIn { path, what }) => {
                        note(&path, Noted::LeftOut(what));
                    }
                    Err(error) => return Err(error),
                }
                Ok(())
            })?;
        } else if !metadata.is_file() {
            return Err(TokenizeError::NotAFile { path: input.clone() });
        } else if is_output(input) {
            return Err(TokenizeError::OutputIsInput { path: input.clone() });
        } else {
            sources.push(Source::file(input.clone(), format, &metadata, note)?);
        }
    }
    if sources.is_empty() {
        let inputs: Vec<String> = inputs.iter().map(|path| path.display().to_string()).collect();
        return Err(TokenizeError::NoFiles { inputs: inputs.join(", ") });
    }
    Ok(sources)
}

/// Visits the files below `folder`, depth first in sorted order.
fn walk(
    folder: &Path,
    visit: &mut dyn FnMut(PathBuf, &Metadata) -> Result<(), TokenizeError>,
) -> Result<(), TokenizeError> {
    let mut unread = vec![folder.to_owned()];
    while let Some(path) = unread.pop() {
        let metadata = fs::symlink_metadata(&path).map_err(TokenizeError::io("open", &path))?;
        // The folder itself was named by the user and may be a link.
        if metadata.is_dir() || path == folder {
            let mut entries = entries(&path).map_err(TokenizeError::io("read", &path))?;
            // Popped from the end, so the largest name goes in first.
            entries.sort_by(|a, b| b.as_os_str().as_bytes().cmp(a.as_os_str().as_bytes()));
            unread.extend(entries);
        } else if metadata.is_file() {
            visit(path, &metadata)?;
        }
    }
    Ok(())
}

fn entries(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut entries = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        // What describes the outputs of this run or of another program is no text to tokenise.
        if !name.as_bytes().starts_with(b".") && !is_sidecar(&name.to_string_lossy()) {
            entries.push(entry.path());
        }
    }
    Ok(entries)
}
