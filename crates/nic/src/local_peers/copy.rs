//! Copies between this process and another, by the kernel (`process_vm_readv`,
//! `process_vm_writev`).

use std::io;

use arrayvec::ArrayVec;
use roce::direct::{DirectKind, DirectRequest, landing_order};
use roce::verbs::MAX_SGE;

/// Copies the bytes of a part of a request, those of a WRITE in ascending order with the last line
/// last, so that a program that polls the last byte sees all others.
///
/// # Errors
/// For atomics. When not all bytes were copied; `ESRCH` when the process is gone, `EPERM` when its
/// memory may not be accessed.
pub(super) fn copy(pid: i32, first: u64, request: &DirectRequest<'_>) -> io::Result<()> {
    // Filled in place: `collect` would move the room for all of them. A request has at most as many
    // pieces.
    let mut local = ArrayVec::<_, MAX_SGE>::new();
    for piece in request.local.iter().take(MAX_SGE) {
        local.push(span(piece.addr, u64::from(piece.len)));
    }
    let len = u64::from(request.part.len);
    // The kernel copies one span after the other.
    let mut remote = [span(first, len), EMPTY];
    let spans = match request.kind {
        DirectKind::Read | DirectKind::Atomic(_) => 1,
        DirectKind::Write => {
            let parts = landing_order(first, len);
            let places = remote.iter_mut().zip(&parts);
            places.map(|(place, &(addr, len))| *place = span(addr, len)).count()
        }
    };
    let (from, to) = (local.as_ptr(), remote.as_ptr());
    let (count, spans) = (local.len() as libc::c_ulong, spans as libc::c_ulong);
    // SAFETY: the lists are valid for their lengths. The local bytes lie in registered regions,
    // whose rights the endpoint has checked; the kernel checks every byte on both sides and returns
    // an error for bytes that are not mapped.
    let copied = unsafe {
        match request.kind {
            DirectKind::Write => libc::process_vm_writev(pid, from, count, to, spans, 0),
            DirectKind::Read => libc::process_vm_readv(pid, from, count, to, spans, 0),
            DirectKind::Atomic(_) => return Err(io::ErrorKind::Unsupported.into()),
        }
    };
    match u64::try_from(copied) {
        Err(_) => Err(io::Error::last_os_error()),
        Ok(copied) if copied == len => Ok(()),
        Ok(_) => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

const EMPTY: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

fn span(addr: u64, len: u64) -> libc::iovec {
    libc::iovec { iov_base: addr as *mut libc::c_void, iov_len: len as usize }
}
