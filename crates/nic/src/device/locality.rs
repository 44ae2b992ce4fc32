//! Which addresses belong to this machine (to this network namespace): packets to those go straight
//! from process to process.
//!
//! The list is read when a wire is opened and again at most once in [`MAX_AGE`], so an address that
//! moves to another machine, or comes here, is noticed.

use std::net::{IpAddr, SocketAddr};

use roce::{Duration, Time};

use crate::clock;
use crate::interfaces;

/// Longest time that a moved address goes unnoticed.
pub(super) const MAX_AGE: Duration = Duration::from_millis(1_000);

/// A list of this age may lack an address that a process is known to have.
const MIN_AGE: Duration = Duration::from_millis(10);

/// The addresses of this machine when last read.
#[derive(Debug)]
pub(super) struct Locality {
    /// Sorted; with the interface for IPv6 link-local ones, else 0.
    addresses: Vec<(IpAddr, u32)>,
    taken: Time,
}

impl Locality {
    pub(super) fn now() -> Locality {
        let mut locality = Locality { addresses: Vec::new(), taken: clock::now() };
        locality.read();
        locality
    }

    /// Reads the list again when it is old.
    pub(super) fn refresh(&mut self, now: Time) {
        if now.since(self.taken) >= MAX_AGE {
            self.taken = now;
            self.read();
        }
    }

    /// Reads the list again if it lacks this address: whoever met the process there has seen a
    /// newer one.
    pub(super) fn refresh_for(&mut self, addr: SocketAddr) {
        if !self.contains(addr) && clock::now().since(self.taken) >= MIN_AGE {
            self.taken = clock::now();
            self.read();
        }
    }

    fn read(&mut self) {
        // Without a new list the old one is the best guess.
        let Ok(addresses) = interfaces::addresses() else {
            return;
        };
        self.addresses.clear();
        self.addresses.extend(addresses.iter().map(key));
        self.addresses.sort_unstable();
        self.addresses.dedup();
    }

    /// Whether packets to this address stay on the machine.
    pub(super) fn contains(&self, addr: SocketAddr) -> bool {
        addr.ip().is_loopback() || self.addresses.binary_search(&key(&addr)).is_ok()
    }
}

fn key(addr: &SocketAddr) -> (IpAddr, u32) {
    let scope = match addr {
        SocketAddr::V4(_) => 0,
        SocketAddr::V6(addr) => addr.scope_id(),
    };
    (addr.ip(), scope)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_here_and_documentation_is_not() {
        let mut locality = Locality::now();
        let at = |ip: &str| SocketAddr::new(ip.parse().expect("literal"), 4791);
        for _ in 0..2 {
            assert!(locality.contains(at("127.0.0.1")) && locality.contains(at("127.9.9.9")));
            assert!(
                !locality.contains(at("198.51.100.7")) && !locality.contains(at("2001:db8::1"))
            );
            locality.refresh(locality.taken + MAX_AGE);
        }
    }

    #[test]
    fn an_address_that_is_missed_is_looked_for_in_a_new_list() {
        let mut locality = Locality::now();
        let all = std::mem::take(&mut locality.addresses);
        let elsewhere = SocketAddr::from(([198, 51, 100, 7], 4791));
        std::thread::sleep(std::time::Duration::from_nanos(MIN_AGE.as_nanos()));
        locality.refresh_for(SocketAddr::from(([127, 0, 0, 1], 4791)));
        assert!(locality.addresses.is_empty(), "loopback is always here");
        locality.refresh_for(elsewhere);
        assert_eq!(locality.addresses, all);
    }
}
