//! The filter that keeps everything but RoCE in the kernel: classic BPF over the IP header.
//!
//! Offsets count from the network header wherever the link puts it (`SKF_NET_OFF`). IP options and
//! extension headers have no place in RoCE, so packets with them do not match; neither do fragments
//! after the first, which have no ports.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use roce::wire::{PROCESS_PORT_BASE, ROCE_PORT};

type Step = libc::sock_filter;

/// `SKF_NET_OFF`, start of the network header, and the place of the protocol (linux/filter.h).
const NET: u32 = -0x10_0000_i32 as u32;
const PROTOCOL: u32 = (-0x1000_i32) as u32;

const IPV4: u32 = 0x0800;
const IPV6: u32 = 0x86dd;
const UDP: u32 = 17;
const FRAGMENT_OFFSET: u32 = 0x1fff;

const fn step(code: u32, jt: u8, jf: u8, k: u32) -> Step {
    Step { code: code as u16, jt, jf, k }
}

const fn load(size: u32, at: u32) -> Step {
    step(libc::BPF_LD | size | libc::BPF_ABS, 0, 0, at)
}

/// A jump over the given numbers of steps for yes and for no.
const fn jump(test: u32, k: u32, yes: u8, no: u8) -> Step {
    step(libc::BPF_JMP | test | libc::BPF_K, yes, no, k)
}

const fn give(bytes: u32) -> Step {
    step(libc::BPF_RET | libc::BPF_K, 0, 0, bytes)
}

/// Place of the last step, which rejects the packet.
const REFUSE: u8 = 16;

/// How far it is from step `at` to the last one.
const fn refuse_from(at: u8) -> u8 {
    REFUSE - at - 1
}

/// UDP to the RoCE port or to the port of a process.
pub(super) const fn roce() -> [Step; REFUSE as usize + 1] {
    let (half, byte) = (libc::BPF_H, libc::BPF_B);
    let first = PROCESS_PORT_BASE as u32 + 1;
    [
        load(half, PROTOCOL),
        jump(libc::BPF_JEQ, IPV4, 0, 6),
        load(byte, NET + 9),
        jump(libc::BPF_JEQ, UDP, 0, refuse_from(3)),
        load(half, NET + 6),
        jump(libc::BPF_JSET, FRAGMENT_OFFSET, refuse_from(5), 0),
        load(half, NET + 22),
        step(libc::BPF_JMP | libc::BPF_JA, 0, 0, 4),
        jump(libc::BPF_JEQ, IPV6, 0, refuse_from(8)),
        load(byte, NET + 6),
        jump(libc::BPF_JEQ, UDP, 0, refuse_from(10)),
        load(half, NET + 42),
        jump(libc::BPF_JEQ, ROCE_PORT as u32, 2, 0),
        jump(libc::BPF_JGE, first, 0, refuse_from(13)),
        jump(libc::BPF_JGT, first + 253, refuse_from(14), 0),
        give(0x4_0000),
        give(0),
    ]
}

/// Attaches a filter to a socket.
pub(super) fn attach(fd: &OwnedFd, program: &[Step]) -> io::Result<()> {
    let len = u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut() };
    // SAFETY: the kernel copies `len` steps out of the program during the call and changes none.
    let rc = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const program).cast(),
            size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
