//! A private directory of the user: what `dquant run` and the verbs library share between
//! processes.
//!
//! Code is loaded from it, so only this user may be able to write to it. Its name is
//! `dquant-verbs-UID`. Any user can take a name in a directory that all may write to, and in a user
//! namespace the name of the mapped root may be in use by the real one; then the user has another
//! directory beside it, `dquant-verbs-UID-` and a random number, which later processes find by its
//! owner.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use rustix::fs::{Access, access};
use rustix::rand::{GetRandomFlags, getrandom};

/// Writable in containers whose root file system is not.
const SHARED_MEMORY: &str = "/dev/shm";

/// Directories that are looked at to find the one of this user, when another user has its name.
const MAX_ENTRIES: usize = 65_536;

/// Random names that are tried.
const MAX_NAMES: u32 = 8;

/// The parents to try, best first. `sudo` and `su` leave another user's `XDG_RUNTIME_DIR` behind,
/// and containers name one that does not exist.
pub fn bases() -> Vec<PathBuf> {
    let runtime = env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()).map(PathBuf::from);
    let mut all: Vec<PathBuf> = runtime.into_iter().collect();
    for base in [env::temp_dir(), PathBuf::from(SHARED_MEMORY)] {
        if !all.contains(&base) {
            all.push(base);
        }
    }
    all
}

/// This user's directory below `base`, made if it does not exist.
///
/// # Errors
/// When there is none and none can be made, or it cannot be written to.
pub fn directory(base: &Path) -> io::Result<PathBuf> {
    let plain = base.join(name());
    let own = match make(&plain) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            if is_private(&plain) {
                plain
            } else {
                beside(base)?
            }
        }
        made => made.map(|()| plain)?,
    };
    access(&own, Access::WRITE_OK | Access::EXEC_OK)?;
    Ok(own)
}

/// Whether [`directory`] would have one. Changes nothing.
///
/// # Errors
/// As [`directory`].
pub fn prospect(base: &Path) -> io::Result<()> {
    let plain = base.join(name());
    let own = match fs::symlink_metadata(&plain) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        _ if is_private(&plain) => Some(plain),
        _ => find(base)?,
    };
    access(own.as_deref().unwrap_or(base), Access::WRITE_OK | Access::EXEC_OK)?;
    Ok(())
}

fn name() -> String {
    format!("dquant-verbs-{}", rustix::process::getuid().as_raw())
}

fn make(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().mode(0o700).create(path)
}

/// Whether a path is a directory of this user to which nobody else can write.
fn is_private(path: &Path) -> bool {
    let uid = rustix::process::getuid().as_raw();
    fs::symlink_metadata(path)
        .is_ok_and(|found| found.is_dir() && found.uid() == uid && found.mode() & 0o022 == 0)
}

/// The directory of a user whose plain name is taken by somebody else.
fn beside(base: &Path) -> io::Result<PathBuf> {
    if let Some(found) = find(base)? {
        return Ok(found);
    }
    let mut last = io::Error::from(io::ErrorKind::AlreadyExists);
    for _ in 0..MAX_NAMES {
        let mut random = [0; 8];
        getrandom(&mut random, GetRandomFlags::empty())?;
        let mut own = name() + "-";
        for byte in random {
            // Writing to a string does not fail.
            let _ = write!(own, "{byte:02x}");
        }
        let own = base.join(own);
        match make(&own) {
            Ok(()) => return Ok(own),
            Err(error) => last = error,
        }
        if last.kind() != io::ErrorKind::AlreadyExists {
            break;
        }
    }
    Err(last)
}

/// The first of this user's own directories by name, so that all processes take the same one.
fn find(base: &Path) -> io::Result<Option<PathBuf>> {
    let prefix = OsString::from(name() + "-");
    let entries = fs::read_dir(base)?.take(MAX_ENTRIES).flatten();
    let named = entries.filter(|entry| {
        entry.file_name().as_encoded_bytes().starts_with(prefix.as_encoded_bytes())
    });
    Ok(named.map(|entry| entry.path()).filter(|path| is_private(path)).min())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    /// A parent of its own, which is removed again.
    struct Base(PathBuf);

    impl Base {
        fn new(test: &str) -> Base {
            let base =
                env::temp_dir().join(format!("dquant-private-{}-{test}", std::process::id()));
            let _ = fs::remove_dir_all(&base);
            fs::create_dir(&base).expect("writable");
            Base(base)
        }
    }

    impl Drop for Base {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn processes_of_one_user_share_a_directory() {
        let base = Base::new("shared");
        prospect(&base.0).expect("it can be made");
        assert!(fs::read_dir(&base.0).expect("readable").next().is_none(), "nothing is made");
        let own = directory(&base.0).expect("it can be made");
        assert_eq!(own, base.0.join(name()));
        assert_eq!(directory(&base.0).expect("it exists"), own);
        prospect(&base.0).expect("it exists");
    }

    #[test]
    fn a_name_that_others_have_taken_is_done_without() {
        let base = Base::new("taken");
        // A file, or a directory that others may write to, as a stranger would leave them.
        for open in [false, true] {
            let plain = base.0.join(name());
            if open {
                fs::remove_file(&plain).expect("it is ours");
                fs::create_dir(&plain).expect("writable");
                fs::set_permissions(&plain, Permissions::from_mode(0o777)).expect("it is ours");
                let other = base.0.join(name() + "-0000");
                fs::create_dir(&other).expect("writable");
                fs::set_permissions(&other, Permissions::from_mode(0o777)).expect("it is ours");
            } else {
                fs::write(&plain, "").expect("writable");
            }
            prospect(&base.0).expect("another can be made");
            let own = directory(&base.0).expect("another can be made");
            assert!(is_private(&own) && own != plain, "{}", own.display());
            assert_eq!(directory(&base.0).expect("it is found again"), own);
        }
    }

    #[test]
    fn a_parent_that_does_not_exist_is_refused() {
        let missing = Base::new("missing").0.join("x");
        assert_eq!(directory(&missing).map_err(|error| error.kind()), Err(io::ErrorKind::NotFound));
        assert!(prospect(&missing).is_err());
    }
}
