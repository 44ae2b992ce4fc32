//! Files of daemons on a machine with other users: locks that only their owner can take, who holds
//! a lock, and folders that everybody may enter.
//!
//! A lock of the kernel (`flock`) can be taken by whoever can open the file, for reading as well.
//! So a lock's file has mode 0600, also where an earlier version or a umask left another one. Who
//! opened it before may still hold it: a refusal names the holder as far as `/proc/locks` does.

use std::fmt;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{FlockOperation, flock, major, minor};
use thiserror::Error;

/// More than `/proc/locks` has on any machine.
const MAX_LOCKS_BYTES: u64 = 16 << 20;

/// Why a lock is not taken.
#[derive(Debug, Error)]
pub enum LockError {
    /// Another process has it.
    #[error("{0} has locked it")]
    Held(Holder),
    /// The file cannot be opened or locked.
    #[error(transparent)]
    Failed(#[from] io::Error),
}

/// Who holds the lock of a file, as far as that can be found out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holder(Option<Process>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Process {
    pid: u32,
    /// Its name and its user; none of a process that is not shown.
    about: Option<(String, u32)>,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            None => f.write_str("another process"),
            Some(Process { pid, about: None }) => write!(f, "process {pid}"),
            Some(Process { pid, about: Some((name, user)) }) => {
                write!(f, "process {pid} ({name}, user {user})")
            }
        }
    }
}

impl Holder {
    /// Whether it is known to belong to another user.
    pub fn is_foreign(&self) -> bool {
        let user = self.0.as_ref().and_then(|process| process.about.as_ref()).map(|about| about.1);
        user.is_some_and(|user| user != rustix::process::geteuid().as_raw())
    }

    /// Who holds a lock on the file with these metadata.
    pub fn of(file: &Metadata) -> Holder {
        let read = File::open("/proc/locks").and_then(|locks| {
            let mut text = String::new();
            io::Read::read_to_string(&mut io::Read::take(locks, MAX_LOCKS_BYTES), &mut text)?;
            Ok(text)
        });
        let pid = read.ok().and_then(|text| holder_in(&text, file.dev(), file.ino()));
        Holder(pid.map(|pid| Process { pid, about: about(pid) }))
    }
}

/// The process with a lock on that file in the text of `/proc/locks`. Locks of descriptors have no
/// process there, -1.
fn holder_in(text: &str, dev: u64, inode: u64) -> Option<u32> {
    let file = format!("{:02x}:{:02x}:{inode}", major(dev), minor(dev));
    let pid = |line: &str| {
        let mut words = line.split_whitespace().skip_while(|word| word.ends_with(':'));
        // Who waits for a lock holds none.
        let held = words.next().filter(|word| *word != "->")?;
        let at = if matches!(held, "FLOCK" | "POSIX" | "OFDLCK") { 2 } else { return None };
        let pid = words.nth(at)?;
        (words.next()? == file).then(|| pid.parse().ok())?
    };
    text.lines().find_map(pid)
}

fn about(pid: u32) -> Option<(String, u32)> {
    let name = fs::read(format!("/proc/{pid}/comm")).ok()?;
    let user = fs::metadata(format!("/proc/{pid}")).ok()?.uid();
    // A process chooses its name.
    let show = |char: char| if char.is_control() { '\u{fffd}' } else { char };
    Some((String::from_utf8_lossy(&name).trim_end().chars().map(show).collect(), user))
}

/// Takes the lock in the file at `path`, which is made if it is missing, for as long as the result
/// is open. The file has the number of the process that took it, for people.
///
/// # Errors
/// When another process has it, or the file cannot be opened.
pub fn lock(path: &Path) -> Result<File, LockError> {
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)?;
    hide(&file)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            return Err(LockError::Held(Holder::of(&file.metadata()?)));
        }
        Err(errno) => return Err(LockError::Failed(errno.into())),
    }
    // For people alone: a full disk must not keep a daemon from starting.
    let _ = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
    Ok(file)
}

/// Makes a regular file inaccessible to others. One that belongs to another user stays as it is:
/// who may change that is root.
fn hide(file: &File) -> io::Result<()> {
    let found = file.metadata()?;
    if !found.is_file() || found.mode() & 0o077 == 0 {
        return Ok(());
    }
    match file.set_permissions(Permissions::from_mode(0o600)) {
        Err(error) if error.kind() != ErrorKind::PermissionDenied => Err(error),
        _ => Ok(()),
    }
}

/// The same for a file by its name; nothing where there is none.
///
/// # Errors
/// When it cannot be opened or changed.
pub fn hide_at(path: &Path) -> io::Result<()> {
    match OpenOptions::new().read(true).write(true).open(path) {
        Ok(file) => hide(&file),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// A new, empty file under this name, in place of an old one, that other users cannot open.
///
/// # Errors
/// When the old one cannot be removed, or the new one not be made.
pub fn create_private(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => OpenOptions::new().write(true).create_new(true).mode(0o600).open(path),
    }
}

/// Makes a folder, and those above it, that are missing. All may enter and read what it makes,
/// whatever the umask says.
///
/// # Errors
/// When one cannot be made.
pub fn make_shared_folder(folder: &Path) -> io::Result<()> {
    if folder.as_os_str().is_empty() || folder.is_dir() {
        return Ok(());
    }
    if let Some(parent) = folder.parent() {
        make_shared_folder(parent)?;
    }
    match DirBuilder::new().mode(0o755).create(folder) {
        Ok(()) => fs::set_permissions(folder, Permissions::from_mode(0o755)),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path =
                std::env::temp_dir().join(format!("nic-files-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir_all(&path).expect("a temporary folder");
            Folder(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("it is there").mode() & 0o777
    }

    #[test]
    fn a_lock_cannot_be_opened_by_others_and_its_holder_is_named() {
        let folder = Folder::new("lock");
        let path = folder.0.join("lock");
        // As an earlier version left it.
        fs::write(&path, "").expect("a file");
        fs::set_permissions(&path, Permissions::from_mode(0o644)).expect("it is ours");
        let held = lock(&path).expect("nobody has it");
        assert_eq!(mode(&path), 0o600);
        let refused = lock(&path).expect_err("it is held").to_string();
        let own = format!("process {} (", std::process::id());
        assert!(refused.starts_with(&own) && refused.ends_with(") has locked it"), "{refused}");
        drop(held);
        drop(lock(&path).expect("free again"));
        let _ = fs::remove_file(&path);
        drop(lock(&path).expect("a new file"));
        assert_eq!(mode(&path), 0o600);
        hide_at(&folder.0.join("none")).expect("nothing to hide");
    }

    #[test]
    fn the_holder_is_read_from_the_kernels_list() {
        let list = "1: POSIX  ADVISORY  WRITE 708 00:19:12 0 EOF\n\
                    2: FLOCK  ADVISORY  WRITE 99 08:02:34 0 EOF\n\
                    2: -> FLOCK  ADVISORY  WRITE 98 08:02:35 0 EOF\n\
                    3: OFDLCK ADVISORY  WRITE -1 08:02:36 0 EOF\n\
                    4: LEASE  ACTIVE    READ 97 08:02:37 0 EOF\n\
                    5:\n";
        let dev = rustix::fs::makedev(8, 2);
        assert_eq!(holder_in(list, dev, 34), Some(99));
        assert_eq!(holder_in(list, rustix::fs::makedev(0, 0x19), 12), Some(708));
        for nobody in [35, 36, 37, 38] {
            assert_eq!(holder_in(list, dev, nobody), None, "{nobody}");
        }
        assert_eq!(Holder(None).to_string(), "another process");
        let unseen = Holder(Some(Process { pid: 7, about: None }));
        assert_eq!(unseen.to_string(), "process 7");
    }

    #[test]
    fn folders_are_for_everybody_and_those_that_exist_stay_as_they_are() {
        let folder = Folder::new("shared");
        let outer = folder.0.join("outer");
        fs::create_dir(&outer).expect("ours");
        fs::set_permissions(&outer, Permissions::from_mode(0o700)).expect("it is ours");
        let inner = outer.join("a/b");
        make_shared_folder(&inner).expect("ours");
        make_shared_folder(&inner).expect("it exists");
        assert_eq!([mode(&outer), mode(&outer.join("a")), mode(&inner)], [0o700, 0o755, 0o755]);
        fs::write(outer.join("file"), "").expect("ours");
        assert!(make_shared_folder(&outer.join("file/c")).is_err());
    }
}
