//! How the files of the folder are found and made, and who may write them.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::Path;

use rustix::mm::ProtFlags;

use super::layout::{FILE_BYTES, MAGIC, Rates, Shared, SharedTable};
use super::mapping::Mapped;

pub(super) const BOTH: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Device and inode of `rates` and of `buckets`: either may be replaced, or come later.
pub(super) type Identity = [Option<(u64, u64)>; 2];

pub(super) fn identity(folder: &Path) -> Identity {
    ["rates", "buckets"]
        .map(|name| fs::metadata(folder.join(name)).ok().map(|found| (found.dev(), found.ino())))
}

/// What a sender finds: `rates` to read, and `buckets` to write, or its own ones if it may not.
///
/// # Errors
/// When there is no `rates` of this format.
pub(super) fn of_sender(folder: &Path) -> io::Result<SharedTable> {
    let rates = Mapped::<Rates>::new(&File::open(folder.join("rates"))?, ProtFlags::READ)?;
    if !rates.get().is_ours() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "no table of rate limits"));
    }
    let file = OpenOptions::new().read(true).write(true).open(folder.join("buckets"));
    let buckets = file.and_then(|file| Mapped::new(&file, BOTH));
    Ok(SharedTable { rates, buckets: buckets.map_or_else(|_| Shared::own(), Shared::ByAll) })
}

/// The agent's `rates`, readable by everyone; one of another format is replaced.
pub(super) fn rates_of_agent(folder: &Path, group: u32) -> io::Result<Mapped<Rates>> {
    let found = opened(&folder.join("rates")).and_then(|file| Mapped::<Rates>::new(&file, BOTH));
    match found {
        Ok(found) if found.get().is_ours() => Ok(found),
        _ => Mapped::new(&make(folder, "rates", 0o644, group, &MAGIC.to_ne_bytes())?, BOTH),
    }
}

/// New `buckets`, writable by the owner and the group.
pub(super) fn make_buckets(folder: &Path, group: u32) -> io::Result<File> {
    make(folder, "buckets", 0o660, group, &[])
}

/// A file of the right size.
pub(super) fn opened(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    match file.metadata()?.len() {
        FILE_BYTES => Ok(file),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Makes a file under another name, and moves it to its place when it is complete.
fn make(folder: &Path, name: &str, mode: u32, group: u32, start: &[u8]) -> io::Result<File> {
    let draft = folder.join(format!("{name}.{}", std::process::id()));
    let _ = fs::remove_file(&draft);
    let file =
        OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&draft)?;
    let made = (|| {
        file.set_len(FILE_BYTES)?;
        io::Write::write_all(&mut &file, start)?;
        chown(&draft, None, Some(group))?;
        fs::set_permissions(&draft, fs::Permissions::from_mode(mode))?;
        fs::rename(&draft, folder.join(name))
    })();
    if made.is_err() {
        let _ = fs::remove_file(&draft);
    }
    made.map(|()| file)
}
