//! Files that are read as a whole, of bounded size.
//!
//! What a text means is a matter of its reader; so are formats that are read piece by piece.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use service::Error;

/// The text of a file of at most so many bytes.
///
/// # Errors
/// When it cannot be read, is longer, or is no file: a device has no end, and a FIFO perhaps no
/// writer.
pub fn read(path: &Path, most: u64) -> Result<String, Error> {
    let name = path.display();
    let cannot = |error| Error::because(format_args!("cannot read {name}"), &error);
    if !std::fs::metadata(path).map_err(cannot)?.is_file() {
        return Err(Error::invalid(format_args!("{name} is not a file")));
    }
    let mut text = String::new();
    let file = File::open(path).map_err(cannot)?;
    file.take(most + 1).read_to_string(&mut text).map_err(cannot)?;
    if text.len() as u64 > most {
        return Err(Error::invalid(format_args!("{name} has more than {} MiB", most >> 20)));
    }
    Ok(text)
}
