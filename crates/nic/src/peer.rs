//! Who is at the other end of a Unix socket.
//!
//! A process of another PID namespace that is not below this one has no number here: the kernel
//! says 0. Containers of one pod share a network namespace and often nothing else, so that is no
//! failure.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};

/// The credentials of a peer, when it connected or began to listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its number in this PID namespace; none if it is not visible here.
    pub pid: Option<u32>,
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
}

/// The peer of a connected Unix socket.
///
/// # Errors
/// When it is no such socket.
pub fn of(socket: impl AsFd) -> io::Result<Peer> {
    let socket = socket.as_fd().as_raw_fd();
    let mut found = MaybeUninit::<libc::ucred>::zeroed();
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to a structure of that size.
    let code = unsafe {
        let (level, option) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
        libc::getsockopt(socket, level, option, found.as_mut_ptr().cast(), &raw mut len)
    };
    if code != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: three numbers, of which every bit pattern is valid; what was not written is zero.
    let libc::ucred { pid, uid, gid } = unsafe { found.assume_init() };
    Ok(Peer { pid: u32::try_from(pid).ok().filter(|pid| *pid != 0), uid, gid })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_socket_of_this_process_has_its_credentials() {
        let (one, _other) = UnixStream::pair().expect("sockets");
        let peer = of(&one).expect("connected");
        assert_eq!(peer.pid, Some(std::process::id()));
        assert_eq!(peer.uid, rustix::process::geteuid().as_raw());
        assert_eq!(peer.gid, rustix::process::getegid().as_raw());
        let file = std::fs::File::open("/dev/null").expect("every system has it");
        assert!(of(&file).is_err());
    }
}
