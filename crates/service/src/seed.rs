//! Seeds that differ between processes, starts and machines.
//!
//! Keys, queue pair numbers, first sequence numbers and the demo's token come from them. A process
//! number or a time is not a seed: in a container the first is often 1, and the second can be
//! guessed.

use crate::error::Error;

/// 64 bits from the operating system.
///
/// # Errors
/// When the system has no random numbers, which no Linux of the last ten years reports after boot.
pub fn fresh_seed() -> Result<u64, Error> {
    let mut bytes = [0; 8];
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    match filled {
        Ok(8) => Ok(u64::from_ne_bytes(bytes)),
        Ok(_) => Err(Error::invalid("the system returned too few random bytes")),
        Err(errno) => Err(Error::invalid(format!("no random numbers: getrandom: {errno}"))),
    }
}
