//! Buffers of other devices, behind dma-buf descriptors.
//!
//! This device copies with the processor, so it reaches a buffer by mapping it. Exporters of
//! ordinary memory can be mapped (udmabuf, dma heaps, vgem, most integrated GPUs); many with memory
//! of their own cannot.

use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;
use std::ptr;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use rustix::ioctl::{Setter, ioctl, opcode};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::process::errors::Outcome;

/// `DMA_BUF_IOCTL_SYNC` of `linux/dma-buf.h`; its argument is one word of flags.
const SYNC: rustix::ioctl::Opcode = opcode::write::<u64>(b'b', 0);

/// `DMA_BUF_SYNC_START | DMA_BUF_SYNC_RW`.
const START: u64 = 0b11;

/// Part of a buffer, mapped until it is dropped.
#[derive(Debug)]
pub(crate) struct DmaBuf {
    pages: *mut c_void,
    bytes: usize,
    /// Where the part begins.
    offset: u64,
}

// SAFETY: the mapping belongs to the process, not to a thread.
unsafe impl Send for DmaBuf {}

impl DmaBuf {
    /// Maps `length` bytes at `offset`, shared, for reading and if wanted for writing.
    ///
    /// # Errors
    /// `EBADF` for no descriptor; `EINVAL` for one that is no dma-buf, and for bytes that it does
    /// not have; `EOPNOTSUPP` when its exporter does not let it be mapped; `EACCES` when it may not
    /// be written.
    pub(crate) fn map(fd: c_int, offset: u64, length: u64, write: bool) -> Outcome<DmaBuf> {
        // SAFETY: only borrowed for this call; what is not open is found out by the kernel.
        let fd = if fd < 0 { Err(Errno::BADF) } else { Ok(unsafe { BorrowedFd::borrow_raw(fd) }) }?;
        check_kind(fd)?;
        let size = seek(fd, SeekFrom::End(0))?;
        let end = offset.checked_add(length).filter(|end| length > 0 && *end <= size);
        let end = end.ok_or(Errno::INVAL)?;
        // From the buffer's beginning: graphics drivers of the kernel ignore the offset of a
        // mapping.
        let bytes = usize::try_from(end.next_multiple_of(page())).map_err(|_| Errno::INVAL)?;
        let writable = if write { ProtFlags::WRITE } else { ProtFlags::empty() };
        let rights = ProtFlags::READ | writable;
        // SAFETY: a new mapping, of which nobody else knows.
        let mapped = unsafe { mmap(ptr::null_mut(), bytes, rights, MapFlags::SHARED, fd, 0) };
        let pages = mapped.map_err(|error| match error {
            // Of an exporter that has no such operation.
            Errno::INVAL | Errno::NODEV | Errno::NOTSUP => Errno::OPNOTSUPP,
            other => other,
        })?;
        let mapping = DmaBuf { pages, bytes, offset };
        // Waits for what the exporter still writes, and may move the bytes to where the processor
        // reaches them. The matching end is left out: the descriptor may be closed by then, and its
        // number be that of another file. SAFETY: the descriptor is a dma-buf, and the argument is
        // the call's.
        unsafe { ioctl(fd, Setter::<SYNC, u64>::new(START)) }?;
        Ok(mapping)
    }

    /// Address of the first byte of the part.
    pub(crate) fn addr(&self) -> u64 {
        self.pages.addr() as u64 + self.offset
    }
}

impl Drop for DmaBuf {
    fn drop(&mut self) {
        // SAFETY: made by `map`; regions of it are deregistered before it is dropped.
        let _ = unsafe { munmap(self.pages, self.bytes) };
    }
}

/// Bytes of a page.
pub(crate) fn page() -> u64 {
    rustix::param::page_size() as u64
}

/// The kernel describes each dma-buf by the name of its exporter.
fn check_kind(fd: BorrowedFd<'_>) -> Outcome<()> {
    use std::os::fd::AsRawFd;
    rustix::io::fcntl_getfd(fd)?;
    let path = format!("/proc/self/fdinfo/{}", fd.as_raw_fd());
    let about = std::fs::read_to_string(path).map_err(|_| Errno::INVAL)?;
    let is_dmabuf = about.lines().any(|line| line.starts_with("exp_name:"));
    if is_dmabuf { Ok(()) } else { Err(Errno::INVAL) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn what_is_no_buffer_of_a_device_is_refused() {
        let map = |fd| DmaBuf::map(fd, 0, 64, true).map(|_| ());
        assert_eq!(map(-1), Err(Errno::BADF));
        assert_eq!(map(1 << 20), Err(Errno::BADF));
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert_eq!(map(file.as_raw_fd()), Err(Errno::INVAL));
        let memory = rustix::fs::memfd_create("plain", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, 4096).unwrap();
        assert_eq!(map(memory.as_raw_fd()), Err(Errno::INVAL));
    }
}
