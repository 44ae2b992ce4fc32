//! Numbers of users and groups by their names, as `/etc/passwd` and `/etc/group` have them.
//!
//! No name service is asked: that would load its modules into the process, and containers have
//! none. Accounts of a directory (LDAP, SSSD) are given by number, which `id` prints.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use thiserror::Error;

/// Largest file of accounts that is read, in bytes.
const MAX_BYTES: u64 = 16 << 20;

/// The number by which the kernel shows every user that a user namespace does not map.
const UNMAPPED: u32 = 65_534;

/// Why a user or a group has no number.
#[derive(Debug, Error)]
pub enum AccountError {
    /// The file has no such name.
    #[error("{file} has no {what} '{name}'")]
    Unknown {
        /// "user" or "group".
        what: &'static str,
        /// The name.
        name: String,
        /// Where it was looked for.
        file: &'static str,
    },
    /// The kernel uses that number for "none".
    #[error("{number} is the number of no {what}")]
    Reserved {
        /// "user" or "group".
        what: &'static str,
        /// The number.
        number: u32,
    },
    /// The file cannot be read.
    #[error("cannot read {file}: {source}")]
    Unreadable {
        /// The file.
        file: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// The number of a user, given by name or number.
///
/// # Errors
/// When there is no such user.
pub fn user(text: &str) -> Result<u32, AccountError> {
    find(text, "user", "/etc/passwd")
}

/// The number of a group, given by name or number.
///
/// # Errors
/// When there is no such group.
pub fn group(text: &str) -> Result<u32, AccountError> {
    find(text, "group", "/etc/group")
}

/// Whether the number of a user, as the kernel reports it of another process, stands for one user.
/// In a user namespace, such as that of a rootless container, all users without a number of their
/// own there have the same one.
pub fn is_one_user(uid: u32) -> bool {
    match uid {
        UNMAPPED => {
            std::fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| has_everyone(&map))
        }
        uid => uid != u32::MAX,
    }
}

/// Whether a map of a user namespace is that of the machine's own, which has all users.
fn has_everyone(map: &str) -> bool {
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

fn find(text: &str, what: &'static str, file: &'static str) -> Result<u32, AccountError> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let unknown = || AccountError::Unknown { what, name: text.to_owned(), file };
    let number = if is_number {
        text.parse().map_err(|_| unknown())?
    } else {
        let list = read(Path::new(file));
        let list = list.map_err(|source| AccountError::Unreadable { file, source })?;
        number_in(&list, text).ok_or_else(unknown)?
    };
    // `chown` takes it for "leave as it is".
    if number == u32::MAX { Err(AccountError::Reserved { what, number }) } else { Ok(number) }
}

fn read(file: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(file)?.take(MAX_BYTES).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The third field of the line whose first is `name`. Both files have that form.
fn number_in(list: &str, name: &str) -> Option<u32> {
    list.lines().find_map(|line| {
        let mut fields = line.split(':');
        let found = fields.next() == Some(name);
        fields.nth(1).filter(|_| found)?.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_in_lists() {
        let list =
            "root:x:0:0:root:/root:/bin/sh\n# note\n\nhalf:x\nodd:x:many:\ndquant:x:990:985::/:\n";
        assert_eq!(number_in(list, "root"), Some(0));
        assert_eq!(number_in(list, "dquant"), Some(990));
        for none in ["half", "odd", "", "x", "# note", "dquan", "dquant:x"] {
            assert_eq!(number_in(list, none), None, "{none}");
        }
    }

    #[test]
    fn the_number_of_unmapped_users_is_one_user_where_all_are_mapped() {
        assert!(has_everyone("         0          0 4294967295\n"));
        for partial in [
            "",
            "0 1000 1\n",
            "0 1000 1\n1 100000 65536\n",
            "0 0 65536\n",
            "0 0 1\n1 1 4294967294\n",
        ] {
            assert!(!has_everyone(partial), "{partial}");
        }
        assert!(is_one_user(0) && is_one_user(1_000) && !is_one_user(u32::MAX));
    }

    #[test]
    fn numbers_need_no_list() {
        assert_eq!(user("123456").expect("a number"), 123_456);
        assert_eq!(group("0").expect("a number"), 0);
        assert!(matches!(user("4294967295"), Err(AccountError::Reserved { .. })));
        for none in ["", "no such name", "4294967296", "-1", "99999999999999999999"] {
            assert!(matches!(group(none), Err(AccountError::Unknown { .. })), "{none}");
        }
    }
}
