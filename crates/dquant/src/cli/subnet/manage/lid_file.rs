//! The file that keeps LIDs across restarts: a line for each port, `GUID PORT LID`, sorted; `#`
//! begins a comment.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use lab::input;
use subnet::discovery::Place;
use subnet::lids::LAST_LID;

use crate::exit::{CliError, OUTPUT_HINT};

/// Largest file that is read: one of 48,000 ports has 1.5 MB.
const MAX_BYTES: u64 = 16 << 20;

/// See the module's text.
pub(super) struct LidFile {
    path: PathBuf,
    /// What was in it.
    pub(super) lids: BTreeMap<Place, u16>,
}

impl LidFile {
    /// Reads a file, if it is there.
    pub(super) fn open(path: &Path) -> Result<LidFile, CliError> {
        let text = match fs::metadata(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            _ => input::read(path, MAX_BYTES)?,
        };
        Ok(LidFile { path: path.to_owned(), lids: parse(path, &text)? })
    }

    /// Replaces the file as a whole, so that a crash leaves the old one or the new one.
    pub(super) fn write(&self, lids: &BTreeMap<Place, u16>) -> Result<(), CliError> {
        let mut text = String::from("# GUID, port, LID; port 0 is a switch itself\n");
        for ((guid, port), lid) in lids {
            // Writing to a string does not fail.
            let _ = writeln!(text, "{guid:#018x} {port} {lid}");
        }
        let mut new = self.path.clone().into_os_string();
        new.push(".new");
        let written = fs::write(&new, text).and_then(|()| fs::rename(&new, &self.path));
        written.map_err(|error| {
            let what = format_args!("cannot write {}", self.path.display());
            CliError::because(what, &error).hint(OUTPUT_HINT)
        })
    }
}

fn parse(path: &Path, text: &str) -> Result<BTreeMap<Place, u16>, CliError> {
    let mut lids = BTreeMap::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.split('#').next().unwrap_or("").trim();
        if line.is_empty() {
            continue;
        }
        let (place, lid) = entry(line).ok_or_else(|| {
            let what =
                format_args!("{} line {number}: '{line}' is no GUID, port and LID", path.display());
            CliError::usage(what).hint("remove the line; its port gets a LID that is free")
        })?;
        lids.insert(place, lid);
    }
    Ok(lids)
}

fn entry(line: &str) -> Option<(Place, u16)> {
    let mut words = line.split_whitespace();
    let guid = u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok()?;
    let port = words.next()?.parse().ok()?;
    let lid = words.next()?.parse().ok().filter(|lid| (1..=LAST_LID).contains(lid))?;
    words.next().is_none().then_some(((guid, port), lid))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_read_and_others_refused() {
        let path = Path::new("lids");
        let read = parse(path, "# all\n0x0010 1 7 # host\n\n0x20 0 49151\n").expect("two");
        assert_eq!(read, BTreeMap::from([((0x10, 1), 7), ((0x20, 0), 49_151)]));
        for bad in ["0x10 1", "10 1 7", "0x10 1 0", "0x10 1 49152", "0x10 256 7", "0x10 1 7 8"] {
            assert!(parse(path, bad).is_err(), "{bad}");
        }
    }
}
