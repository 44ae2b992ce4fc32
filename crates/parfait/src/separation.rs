//! How far a job's workers are kept apart, from each other and from those of other jobs, so that
//! one failure does not stop all of them.
//!
//! | written | what it asks for |
//! |---|---|
//! | `spread=hosts:N` | workers spread evenly over N hosts: none has more than an Nth of them, rounded up |
//! | `spread=leaves:N` | the same for leaves: hosts that share their first switch |
//! | `most=host:K` | at most K workers on a host |
//! | `most=leaf:K` | at most K workers below a leaf |
//! | `apart=NAME` or `apart=NUMBER` | no host that has workers of this job |
//!
//! Several are joined by commas, as in `spread=hosts:4,leaves:2` and `apart=train-a,17`.

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

/// Most jobs that one is kept apart from.
pub const MAX_APART: usize = 16;

/// Most bytes of a job's name.
pub const MAX_NAME_BYTES: usize = 64;

/// Whether a job can be called that: letters, digits, `.`, `_` and `-`.
pub fn is_name(text: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    !text.is_empty() && text.len() <= MAX_NAME_BYTES && text.bytes().all(fits)
}

/// See the module's text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Separation {
    /// Hosts that workers are spread over: none has more than its part, rounded up; 0 if that does
    /// not matter.
    pub hosts: u32,
    /// Leaves that workers are spread over; 0 if that does not matter.
    pub leaves: u32,
    /// Workers on a host, at most; 0 if that does not matter.
    pub most_per_host: u32,
    /// Workers below a leaf, at most; 0 if that does not matter.
    pub most_per_leaf: u32,
    /// Jobs whose hosts it must not have, by name or number.
    pub apart: Vec<String>,
}

impl Separation {
    /// Whether nothing is asked for.
    pub fn is_none(&self) -> bool {
        *self == Separation::default()
    }

    /// Whether it is kept apart from the job with that number and name.
    pub fn names(&self, number: u64, name: &str) -> bool {
        let is_it = |other: &String| other == name || other.parse() == Ok(number);
        self.apart.iter().any(is_it)
    }

    /// Workers of so many that a host, and a leaf, may have.
    pub fn most(&self, workers: u32) -> (u32, u32) {
        let least = |most: u32, over: u32| {
            let even = workers.checked_div(over).map(|_| workers.div_ceil(over));
            let most = if most == 0 { u32::MAX } else { most };
            most.min(even.unwrap_or(u32::MAX))
        };
        (least(self.most_per_host, self.hosts), least(self.most_per_leaf, self.leaves))
    }

    /// Sets what the key says; `None` if there is no such key or value, or something is said twice.
    pub(crate) fn set(&mut self, key: &str, value: &str) -> Option<()> {
        match key {
            "spread" => self.set_numbers(value, ["hosts", "leaves"], false),
            "most" => self.set_numbers(value, ["host", "leaf"], true),
            "apart" => {
                for name in value.split(',') {
                    let is_new = !self.apart.iter().any(|other| other == name);
                    if !is_name(name) || !is_new || self.apart.len() == MAX_APART {
                        return None;
                    }
                    self.apart.push(name.to_string());
                }
                Some(())
            }
            _ => None,
        }
    }

    fn set_numbers(&mut self, value: &str, [host, leaf]: [&str; 2], is_most: bool) -> Option<()> {
        for part in value.split(',') {
            let (of, number) = part.split_once(':')?;
            let is_number = number.bytes().all(|byte| byte.is_ascii_digit());
            let number: u32 = number.parse().ok().filter(|number| is_number && *number > 0)?;
            let place = match (of == host, of == leaf, is_most) {
                (true, _, false) => &mut self.hosts,
                (_, true, false) => &mut self.leaves,
                (true, _, true) => &mut self.most_per_host,
                (_, true, true) => &mut self.most_per_leaf,
                _ => return None,
            };
            if *place != 0 {
                return None;
            }
            *place = number;
        }
        Some(())
    }
}

impl fmt::Display for Separation {
    /// With a space before each key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers = [
            ("spread", [("hosts", self.hosts), ("leaves", self.leaves)]),
            ("most", [("host", self.most_per_host), ("leaf", self.most_per_leaf)]),
        ];
        for (key, parts) in numbers {
            let parts = parts.iter().filter(|(_, number)| *number > 0);
            let parts: Vec<String> =
                parts.map(|(of, number)| alloc::format!("{of}:{number}")).collect();
            if !parts.is_empty() {
                write!(f, " {key}={}", parts.join(","))?;
            }
        }
        match self.apart.is_empty() {
            true => Ok(()),
            false => write!(f, " apart={}", self.apart.join(",")),
        }
    }
}
