//! What earlier programs left in the user's private directory: drafts of processes that were
//! killed, links to removed libraries, old views of `/sys/class/infiniband`.
//!
//! Only our own names are touched, links are not followed, and nothing recent is removed:
//! containers share temporary directories, and processes of another container are not visible here.
//! A running library recreates its view when it is missing.

use std::path::Path;
use std::time::{Duration, SystemTime};
use std::{fs, io};

use rustix::process::{Pid, test_kill_process};

use super::SONAME;

const HOUR: Duration = Duration::from_secs(3600);

/// Age of an abandoned draft.
const OLD_DRAFT: Duration = HOUR;

/// Age of a link whose library is not built again.
const OLD_LINK: Duration = Duration::from_secs(24 * 3600);

/// Age of a view that is recreated rather than kept.
const OLD_VIEW: Duration = Duration::from_secs(30 * 24 * 3600);

/// Removes old leftovers. What cannot be removed stays: it does no harm.
pub(super) fn remove(own: &Path) {
    let Ok(entries) = fs::read_dir(own) else {
        return;
    };
    for path in entries.flatten().map(|entry| entry.path()) {
        if is_leftover(&path).unwrap_or(false) {
            // Follows no links.
            let _ = fs::remove_dir_all(&path);
        }
    }
}

fn is_leftover(path: &Path) -> io::Result<bool> {
    let found = fs::symlink_metadata(path)?;
    let Some(name) = path.file_name().and_then(|name| name.to_str()).filter(|_| found.is_dir())
    else {
        return Ok(false);
    };
    // A clock that was set back makes files look recent.
    let age = SystemTime::now().duration_since(found.modified()?).unwrap_or_default();
    if let Some(pid) = drafted_by(name) {
        return Ok(age > OLD_DRAFT && is_gone(pid));
    }
    if is_numbered(name, "lib-") {
        return Ok(age > OLD_LINK && !path.join(SONAME).exists());
    }
    Ok(is_numbered(name, "sys-") && age > OLD_VIEW)
}

/// The process of `draft-PID-lib-NUMBER` and `draft-PID-NUMBER`.
fn drafted_by(name: &str) -> Option<Pid> {
    let (pid, rest) = name.strip_prefix("draft-")?.split_once('-')?;
    let known = is_numbered(rest, "lib-") || is_numbered(rest, "");
    pid.parse().ok().filter(|_| known).and_then(Pid::from_raw)
}

/// Whether a name is `prefix` and the number of contents.
fn is_numbered(name: &str, prefix: &str) -> bool {
    let digits = name.strip_prefix(prefix).unwrap_or_default();
    digits.len() == 16 && digits.bytes().all(|digit| digit.is_ascii_hexdigit())
}

fn is_gone(pid: Pid) -> bool {
    test_kill_process(pid) == Err(rustix::io::Errno::SRCH)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::symlink;

    const NUMBER: &str = "0123456789abcdef";

    /// No process has it: numbers end at 2^22.
    const NOBODY: u32 = 1 << 30;

    #[test]
    fn only_old_things_of_ours_that_nobody_needs_are_removed() {
        let own = std::env::temp_dir().join(format!("dquant-leftovers-{}", std::process::id()));
        let _ = fs::remove_dir_all(&own);
        let me = std::process::id();
        let make = |name: String, age: Duration| {
            let path = own.join(&name);
            fs::create_dir_all(&path).expect("writable");
            File::open(&path)
                .and_then(|dir| dir.set_modified(SystemTime::now() - age))
                .expect("it is ours");
            path
        };
        let (hours, long_ago) = (2 * HOUR, 2 * OLD_VIEW);
        let gone = [
            make(format!("draft-{NOBODY}-lib-{NUMBER}"), hours),
            make(format!("draft-{NOBODY}-{NUMBER}"), hours),
            make(format!("lib-{NUMBER}"), long_ago),
            make(format!("sys-{NUMBER}"), long_ago),
        ];
        let mut kept = vec![
            make(format!("draft-{NOBODY}-lib-{NUMBER}0"), long_ago),
            make(format!("draft-{NOBODY}-other"), long_ago),
            make(format!("draft-{NOBODY}-lib-fedcba9876543210"), Duration::ZERO),
            make(format!("draft-{me}-lib-{NUMBER}"), long_ago),
            make(format!("draft-0-{NUMBER}"), long_ago),
            make("lib-fedcba9876543210".to_owned(), hours),
            make("sys-fedcba9876543210".to_owned(), hours),
            make("sys-somebody-elses".to_owned(), long_ago),
        ];
        let used = make("lib-00000000ffffffff".to_owned(), Duration::ZERO);
        symlink("/dev/null", used.join(SONAME)).expect("writable");
        kept.push(make("lib-00000000ffffffff".to_owned(), long_ago));
        let link = own.join("sys-1111111111111111");
        symlink(&kept[0], &link).expect("writable");
        kept.push(link);
        remove(&own);
        for path in gone {
            assert!(!path.exists(), "{}", path.display());
        }
        for path in kept {
            assert!(path.exists(), "{}", path.display());
        }
        fs::remove_dir_all(&own).expect("it is ours");
    }
}
