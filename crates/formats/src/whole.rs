//! Files and folders that appear under their name when they are complete, and never before.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::error::Error;

/// A hidden name beside `path`, with this ending.
pub(crate) fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(ending);
    path.with_file_name(name)
}

/// Writes a small file at once; it replaces an earlier one when it is on the disk.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let unfinished = beside(path, ".part");
    let written = File::create(&unfinished)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .map_err(Error::write(&unfinished));
    if let Err(error) = written {
        // A failure here cannot be handled, and the name says that the file is unfinished.
        let _ = fs::remove_file(&unfinished);
        return Err(error);
    }
    rename(&unfinished, path)
}

/// Gives a complete file or folder its name, so that it has it after a power cut too.
pub(crate) fn rename(from: &Path, to: &Path) -> Result<(), Error> {
    fs::rename(from, to).map_err(Error::write(to))?;
    sync_folder_of(to)
}

/// Puts the names in the folder of `path` on the disk.
pub(crate) fn sync_folder_of(path: &Path) -> Result<(), Error> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(Error::write(folder))
}
