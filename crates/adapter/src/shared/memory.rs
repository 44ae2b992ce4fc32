//! The process's own memory, by address.
//!
//! The program registers the regions, and keeps them mapped with the right permissions while they
//! are registered; the endpoint accesses nothing else. As with a real device, the program may read
//! and write the bytes at the same time, with undefined contents as the result.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use nic::mappings::Mappings;
use roce::world::{AtomicOp, Memory, MemoryKind};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};

/// All memory of this process.
#[derive(Debug, Default)]
pub(super) struct ProcessMemory;

impl Memory for ProcessMemory {
    fn gather(&self, addr: u64, into: &mut [u8]) {
        // SAFETY: the range lies in a registered region, which was mapped readable when it was
        // registered (`populate`), and which the program must not unmap before it deregisters it.
        // The program may write the bytes meanwhile; no reference is made to them, and whatever is
        // copied is what is sent.
        unsafe { std::ptr::copy(addr as *const u8, into.as_mut_ptr(), into.len()) }
    }

    fn scatter(&mut self, addr: u64, from: &[u8]) {
        let Some((last, body)) = from.split_last() else {
            return;
        };
        let to = addr as *mut u8;
        // SAFETY: as above, and the region was mapped writable: the endpoint asks for this only
        // with local write access.
        unsafe { std::ptr::copy(body.as_ptr(), to, body.len()) };
        // Programs poll the last byte of a WRITE, and a copy may store the beginning last.
        fence(Ordering::Release);
        // SAFETY: the last byte of the same range.
        unsafe { to.add(body.len()).write_volatile(*last) };
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }

    fn atomic(&mut self, addr: u64, op: AtomicOp) -> u64 {
        // SAFETY: the endpoint asks for aligned words in writable registered memory only.
        let word = unsafe { AtomicU64::from_ptr(addr as *mut u64) };
        op.execute(word)
    }
}

/// Faults in every page of the range, so that a later access cannot fail.
///
/// # Errors
/// `EFAULT` when some page is not mapped, or not with the requested access; `ENOMEM` when there is
/// no memory for it.
pub fn populate(addr: u64, len: u64, write: bool) -> Result<(), Errno> {
    let page = rustix::param::page_size() as u64;
    let first = addr / page * page;
    let end = addr.checked_add(len).and_then(|end| end.checked_next_multiple_of(page));
    let bytes = end.ok_or(Errno::INVAL)?.wrapping_sub(first) as usize;
    let advice = if write { Advice::LinuxPopulateWrite } else { Advice::LinuxPopulateRead };
    loop {
        // SAFETY: populating changes no content; the range is not touched if it is not mapped.
        match unsafe { madvise(first as *mut _, bytes, advice) } {
            Ok(()) => return Ok(()),
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(Errno::FAULT) => return Err(Errno::FAULT),
            // Not mapped or no memory left; or mapped otherwise; or Linux before 5.14, which does
            // not have this advice: then pages are faulted in on first access.
            Err(error) => {
                permitted(first, first + bytes as u64, write)?;
                return if error == Errno::NOMEM { Err(error) } else { Ok(()) };
            }
        }
    }
}

/// `EFAULT` unless all of the range is mapped for the access.
fn permitted(first: u64, end: u64, write: bool) -> Result<(), Errno> {
    let mut at = first;
    for mapping in Mappings::now().map_err(|_| Errno::FAULT)?.iter() {
        if mapping.first > at || at >= end {
            break;
        }
        let permissions = mapping.permissions;
        let allowed = permissions.starts_with('r') && (!write || permissions[1..].starts_with('w'));
        if mapping.end > at && allowed {
            at = mapping.end;
        }
    }
    if at >= end { Ok(()) } else { Err(Errno::FAULT) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_memory_is_populated_and_unmapped_refused() {
        let bytes = vec![1_u8; 100_000];
        populate(bytes.as_ptr() as u64, 100_000, true).expect("it is mapped");
        assert_eq!(populate(4096, 10, false), Err(Errno::FAULT));
        assert_eq!(populate(u64::MAX - 5, 100, false), Err(Errno::INVAL));
    }

    #[test]
    fn read_only_memory_is_not_populated_for_writing() {
        static CONSTANT: [u8; 8192] = [7; 8192];
        let addr = CONSTANT.as_ptr() as u64;
        populate(addr, 8192, false).expect("it is mapped");
        assert_eq!(populate(addr, 8192, true), Err(Errno::FAULT));
    }

    #[test]
    fn permissions_are_read_from_the_map() {
        let bytes = vec![0_u8; 100_000];
        let first = bytes.as_ptr() as u64 & !4095;
        assert_eq!(permitted(first, first + 90_000, true), Ok(()));
        assert_eq!(permitted(0, 4096, false), Err(Errno::FAULT));
    }

    #[test]
    fn bytes_are_copied_in_and_out_while_the_program_writes_beside_them() {
        let owner = Box::into_raw(Box::new([7_u8; 64]));
        let program = owner.cast::<u8>();
        let addr = program.expose_provenance() as u64;
        let memory = &mut ProcessMemory;
        let mut bytes = [0; 16];
        memory.gather(addr + 8, &mut bytes);
        assert_eq!(bytes, [7; 16]);
        memory.scatter(addr + 1, &[1, 2, 3]);
        // SAFETY: no other reference to the bytes exists.
        unsafe { program.write(9) };
        memory.gather(addr, &mut bytes[..5]);
        assert_eq!(bytes[..5], [9, 1, 2, 3, 7]);
        memory.scatter(addr, &[]);
        // SAFETY: it came from a box.
        drop(unsafe { Box::from_raw(owner) });
    }

    #[test]
    fn atomics_return_the_former_value() {
        let word = AtomicU64::new(5);
        let addr = word.as_ptr() as u64;
        let memory = &mut ProcessMemory;
        assert_eq!(memory.atomic(addr, AtomicOp::FetchAdd(2)), 5);
        let swap = AtomicOp::CompareSwap { compare: 7, swap: 9 };
        assert_eq!(memory.atomic(addr, swap), 7);
        assert_eq!(memory.atomic(addr, swap), 9);
        assert_eq!(word.load(Ordering::Relaxed), 9);
    }
}
