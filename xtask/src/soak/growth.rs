//! What daemons hold between rounds, when nobody uses them, and what the soak has left behind.
//!
//! The first rounds fill caches of the allocator and touch memory that is reserved from the start,
//! so each daemon is compared with the least that it held after a round. In a long soak the last
//! quarter is compared with the second one, too, which finds slow leaks.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Private memory that a daemon may hold more than after another round: a round of 8 streams after
/// one with a single stream needs that for tables, and the allocator keeps it.
const MAX_GROWTH_KIB: u64 = 24 << 10;

/// The same from the second quarter to the last one of a long soak.
const MAX_LEAK_KIB: u64 = 4 << 10;

/// Rounds from which quarters say something.
const LONG: usize = 24;

/// How long a daemon may take to give back what it shared with processes that were killed: it looks
/// for them once a second.
const FORGETS: Duration = Duration::from_secs(5);

/// Interval between two looks at what it holds meanwhile.
const LOOK: Duration = Duration::from_millis(100);

/// Descriptors, threads and mappings that may be more: the runtime's own threads come and go.
const SLACK: u64 = 12;

/// One look at a daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) resident_kib: u64,
    /// Of it, what no file or shared memory stands behind.
    pub(super) private_kib: u64,
    pub(super) descriptors: u64,
    pub(super) threads: u64,
    /// Mappings of shared memory.
    pub(super) shared_mappings: u64,
}

impl Held {
    fn of(pid: u32) -> Option<Held> {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count() as u64;
        let shared_mappings = maps.lines().filter(|line| line.contains("memfd:")).count() as u64;
        Some(Held {
            resident_kib: field(&status, "VmRSS")?,
            private_kib: field(&status, "RssAnon")?,
            descriptors,
            threads: field(&status, "Threads")?,
            shared_mappings,
        })
    }

    /// The smaller of each.
    fn least(self, other: Held) -> Held {
        Held {
            resident_kib: self.resident_kib.min(other.resident_kib),
            private_kib: self.private_kib.min(other.private_kib),
            descriptors: self.descriptors.min(other.descriptors),
            threads: self.threads.min(other.threads),
            shared_mappings: self.shared_mappings.min(other.shared_mappings),
        }
    }

    /// What is more than it may be.
    fn beyond(&self, least: &Held) -> Vec<String> {
        [
            ("KiB of private memory", self.private_kib, least.private_kib, MAX_GROWTH_KIB),
            ("descriptors", self.descriptors, least.descriptors, SLACK),
            ("threads", self.threads, least.threads, SLACK),
            ("shared mappings", self.shared_mappings, least.shared_mappings, SLACK),
        ]
        .into_iter()
        .filter(|(_, now, least, slack)| *now > least + slack)
        .map(|(what, now, least, _)| format!("{now} {what}, {least} after another round"))
        .collect()
    }
}

fn field(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse().ok()
}

/// What each daemon held after each round.
#[derive(Debug, Default)]
pub(super) struct Growth(BTreeMap<String, Vec<Held>>);

impl Growth {
    /// Looks at a daemon after a round, by the number of its process.
    ///
    /// # Errors
    /// When it holds too much, or cannot be looked at.
    pub(super) fn look(&mut self, name: &str, pid: Option<u32>) -> Result<(), String> {
        let all = self.0.entry(name.to_owned()).or_default();
        let least = all.iter().copied().reduce(Held::least);
        let begun = Instant::now();
        let held = loop {
            let held = pid.and_then(Held::of);
            let held = held.ok_or_else(|| format!("{name} cannot be looked at"))?;
            let grown = held.beyond(&least.unwrap_or(held));
            if grown.is_empty() {
                break held;
            }
            if begun.elapsed() > FORGETS {
                return Err(format!("{name} has grown: {}", grown.join("; ")));
            }
            thread::sleep(LOOK);
        };
        all.push(held);
        Ok(())
    }

    /// # Errors
    /// When private memory grew slowly and steadily.
    pub(super) fn check_quarters(&self) -> Result<(), String> {
        for (name, all) in &self.0 {
            if let Some(leak) = leak_kib(all).filter(|leak| *leak > MAX_LEAK_KIB) {
                return Err(format!("{name} has grown by {leak} KiB from quarter to quarter"));
            }
        }
        Ok(())
    }

    /// Rows of the table: each daemon after its first and last round.
    pub(super) fn rows(&self) -> impl Iterator<Item = (&String, Held, Held, usize)> {
        self.0.iter().filter_map(|(name, all)| Some((name, *all.first()?, *all.last()?, all.len())))
    }
}

/// From the second quarter to the last, if there are enough rounds.
fn leak_kib(all: &[Held]) -> Option<u64> {
    if all.len() < LONG {
        return None;
    }
    let quarter = all.len() / 4;
    let median = |part: &[Held]| {
        let mut values: Vec<u64> = part.iter().map(|held| held.private_kib).collect();
        values.sort_unstable();
        values[values.len() / 2]
    };
    let last = median(&all[all.len() - quarter..]);
    Some(last.saturating_sub(median(&all[quarter..2 * quarter])))
}

/// Where programs may leave files. They are empty at the beginning where the soak has namespaces of
/// its own.
pub(super) const PLACES: [&str; 2] = ["/dev/shm", "/run"];

/// In the folder for run-time files, programs share links to libraries and views of `/sys`, one for
/// each kind.
const MAX_RUNTIME_FILES: usize = 8;

/// # Errors
/// Names a file that somebody has left.
pub(super) fn check_leftovers(runtime: &Path, is_alone: bool) -> Result<(), String> {
    let names = |folder: &Path| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect::<Vec<PathBuf>>()
    };
    if let Some(left) = PLACES.iter().flat_map(|place| names(Path::new(place))).find(|_| is_alone) {
        return Err(format!("{} was left behind", left.display()));
    }
    let all: Vec<PathBuf> = names(runtime).iter().flat_map(|folder| names(folder)).collect();
    match all.len() {
        0..=MAX_RUNTIME_FILES => Ok(()),
        count => Err(format!("{count} run-time files were left behind, such as {:?}", all[0])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(private_kib: u64) -> Held {
        Held { private_kib, ..Held::default() }
    }

    #[test]
    fn growth_beyond_the_slack_is_named() {
        let first = held(5_000);
        assert!(held(5_000 + MAX_GROWTH_KIB).beyond(&first).is_empty());
        assert!(held(5_001 + MAX_GROWTH_KIB).beyond(&first)[0].contains("private memory"));
        let more = Held { descriptors: 40, threads: 13, shared_mappings: 50, ..first };
        assert_eq!(more.beyond(&first).len(), 3);
    }

    #[test]
    fn slow_leaks_are_found_in_long_soaks() {
        let leak: Vec<Held> = (0..100).map(|round| held(9_000 + 100 * round)).collect();
        assert!(leak_kib(&leak).is_some_and(|leak| leak > MAX_LEAK_KIB));
        assert_eq!(leak_kib(&[held(7_000); 100]), Some(0));
        assert_eq!(leak_kib(&leak[..LONG - 1]), None);
    }

    #[test]
    fn leftovers_are_found() {
        let folder = std::env::temp_dir().join(format!("soak-growth-{}", std::process::id()));
        let below = folder.join("dquant-verbs-0");
        fs::create_dir_all(&below).expect("the temporary folder is writable");
        let look = || check_leftovers(&folder, false);
        let few = look();
        for number in 0..=MAX_RUNTIME_FILES {
            fs::write(below.join(number.to_string()), "").expect("it is writable");
        }
        let many = look();
        fs::remove_dir_all(&folder).expect("it is ours");
        assert_eq!(few, Ok(()));
        assert!(many.is_err_and(|why| why.contains("9 run-time files")));
    }

    #[test]
    fn a_process_is_looked_at() {
        let own = Held::of(std::process::id()).expect("it runs");
        assert!(own.resident_kib >= own.private_kib && own.private_kib > 0 && own.threads > 0);
        assert!(own.descriptors > 0);
        assert_eq!(field("VmRSS:\t  12 kB\n", "VmRSS"), Some(12));
    }
}
