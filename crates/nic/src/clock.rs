//! The clocks of the machine: wall, process, thread; and how much memory the process holds.
//!
//! Everything is an integer in nanoseconds or bytes. Pure crates never read a clock: they receive
//! [`roce::Time`]. CPU time is the measure of the data path, so it is split into user and system
//! time where the kernel separates them.

use std::mem::MaybeUninit;

use roce::Time;

/// CPU time used so far, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTime {
    /// In the program.
    pub user_ns: u64,
    /// In the kernel on the program's behalf.
    pub system_ns: u64,
}

impl CpuTime {
    /// User and system time together, in nanoseconds.
    pub const fn total_ns(self) -> u64 {
        self.user_ns + self.system_ns
    }

    /// CPU time used since `earlier`, zero where `earlier` is later.
    pub const fn since(self, earlier: CpuTime) -> CpuTime {
        CpuTime {
            user_ns: self.user_ns.saturating_sub(earlier.user_ns),
            system_ns: self.system_ns.saturating_sub(earlier.system_ns),
        }
    }
}

/// The monotonic clock. Its origin is the start of the machine, so instants of two processes on one
/// machine compare.
pub fn now() -> Time {
    Time::from_nanos(clock_ns(libc::CLOCK_MONOTONIC))
}

/// Unix time minus the monotonic clock, in nanoseconds: to be read again from time to time, since
/// Unix time may be set.
pub(crate) fn unix_offset_ns() -> u64 {
    let before = clock_ns(libc::CLOCK_MONOTONIC);
    let unix = clock_ns(libc::CLOCK_REALTIME);
    let after = clock_ns(libc::CLOCK_MONOTONIC);
    unix.wrapping_sub(before + (after - before) / 2)
}

/// CPU time of all threads of the process.
pub fn process_cpu() -> CpuTime {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `usage` is a valid place for one `rusage`; all zeroes is a valid value of it, so it
    // is initialised whether or not the call writes it.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    CpuTime { user_ns: timeval_ns(usage.ru_utime), system_ns: timeval_ns(usage.ru_stime) }
}

/// CPU time of the calling thread, in nanoseconds.
pub fn thread_cpu_ns() -> u64 {
    clock_ns(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Bytes of physical memory that the process holds, shared pages included. `None` where `/proc` is
/// not mounted.
pub fn resident_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some(pages * page_bytes())
}

/// Size of a base page in bytes.
pub fn page_bytes() -> u64 {
    // SAFETY: sysconf takes no pointers.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(bytes).unwrap_or(4096)
}

fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut at = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `at` is a valid timespec. Both clocks exist on every Linux, so the call cannot fail;
    // if it did, `at` would still be initialised.
    unsafe { libc::clock_gettime(clock, &mut at) };
    at.tv_sec as u64 * 1_000_000_000 + at.tv_nsec as u64
}

fn timeval_ns(at: libc::timeval) -> u64 {
    at.tv_sec as u64 * 1_000_000_000 + at.tv_usec as u64 * 1_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_never_go_backwards() {
        let (wall, cpu, thread) = (now(), process_cpu(), thread_cpu_ns());
        let sum = (0..100_000u64).fold(0, |sum: u64, x| std::hint::black_box(sum ^ x));
        assert!(std::hint::black_box(sum) < u64::MAX);
        assert!(now() >= wall);
        assert!(process_cpu().total_ns() >= cpu.total_ns());
        assert!(thread_cpu_ns() > thread);
    }

    #[test]
    fn resident_memory_is_at_least_a_page() {
        assert!(resident_bytes().expect("/proc is mounted") >= page_bytes());
    }
}
