//! Bounds on memory that clients choose the size of: rings and tables of documents of a DPU (C6).

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use service::error::Error;

/// Bytes that things of one kind may take together.
#[derive(Clone, Debug)]
pub struct Budget {
    limit: u64,
    used: Arc<Mutex<u64>>,
    /// What takes them, and what to do when they are taken.
    what: &'static str,
    hint: &'static str,
}

/// A part of a budget, given back when dropped.
#[derive(Debug)]
pub struct Lease {
    bytes: u64,
    used: Arc<Mutex<u64>>,
}

impl Budget {
    /// A budget of `limit` bytes for rings.
    pub fn rings(limit: u64) -> Budget {
        let hint = "use fewer --slots or a smaller --slot-size, or start the DPU with more --rings";
        Budget { limit, used: Arc::default(), what: "a ring", hint }
    }

    /// A budget of `limit` bytes for tables of documents.
    pub fn documents(limit: u64) -> Budget {
        let hint = "start the DPU with more --documents, or use a plan that needs no documents";
        Budget { limit, used: Arc::default(), what: "the tables of documents", hint }
    }

    /// Takes `bytes` from the budget.
    ///
    /// # Errors
    /// When less is left.
    pub fn take(&self, bytes: u64) -> Result<Lease, Error> {
        // A panic elsewhere cannot leave a number half changed.
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let left = self.limit.saturating_sub(*used);
        if bytes > left {
            let (need, left, limit) = (Bytes(bytes), Bytes(left), Bytes(self.limit));
            let text = format!("{} of {need}: {left} of {limit} are left", self.what);
            return Err(Error::invalid(text).hint(self.hint));
        }
        *used += bytes;
        Ok(Lease { bytes, used: Arc::clone(&self.used) })
    }

    /// Takes `bytes` more for something that grows.
    ///
    /// # Errors
    /// When less is left.
    pub fn grow(&self, lease: &mut Lease, bytes: u64) -> Result<(), Error> {
        let mut more = self.take(bytes)?;
        lease.bytes += std::mem::take(&mut more.bytes);
        Ok(())
    }

    /// Takes half of what is left, and at most `bytes`, for something whose size is known when it
    /// is made: then [`Lease::shrink`]. Half, so that another can be made at the same time.
    pub fn take_part(&self, bytes: u64) -> Lease {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = bytes.min(self.limit.saturating_sub(*used) / 2);
        *used += bytes;
        Lease { bytes, used: Arc::clone(&self.used) }
    }
}

impl Lease {
    /// How much was taken.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Gives back what is more than `bytes`.
    pub fn shrink(&mut self, bytes: u64) {
        let bytes = bytes.min(self.bytes);
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        *used = used.saturating_sub(self.bytes - bytes);
        self.bytes = bytes;
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        *used = used.saturating_sub(self.bytes);
    }
}

/// A size for people, in binary units: `1.5 MiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        if self.0 < 1024 {
            return write!(f, "{} B", self.0);
        }
        let exponent = (self.0.ilog2() / 10) as usize;
        let value = self.0 as f64 / (1_u64 << (10 * exponent)) as f64;
        write!(f, "{value:.1} {}", UNITS[exponent - 1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_dropped_can_be_taken_again() {
        let budget = Budget::rings(100);
        let first = budget.take(60).expect("room");
        assert!(budget.take(41).is_err());
        let second = budget.take(40).expect("exactly the rest");
        drop(first);
        assert!(budget.take(60).is_ok());
        drop(second);
    }

    #[test]
    fn what_is_made_takes_its_size_in_the_end() {
        let budget = Budget::documents(100);
        let mut first = budget.take_part(80);
        let second = budget.take_part(80);
        assert_eq!((first.bytes(), second.bytes()), (50, 25));
        first.shrink(10);
        assert_eq!(first.bytes(), 10);
        assert!(budget.take(65).is_ok() && budget.take(66).is_err());
        first.shrink(90);
        assert!(budget.grow(&mut first, 66).is_err() && budget.grow(&mut first, 20).is_ok());
        assert!(first.bytes() == 30 && budget.take(46).is_err());
        drop((first, second));
        assert!(budget.take(100).is_ok());
    }

    #[test]
    fn sizes_read_well() {
        assert_eq!(Bytes(1023).to_string(), "1023 B");
        assert_eq!(Bytes(1 << 20).to_string(), "1.0 MiB");
        assert_eq!(Bytes(u64::MAX).to_string(), "16.0 EiB");
    }

    #[test]
    fn a_size_beyond_all_numbers_is_refused() {
        assert!(Budget::rings(100).take(u64::MAX).is_err());
    }
}
