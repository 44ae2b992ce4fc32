//! Datagrams without a protocol: what UDP sockets carry at most, with segmented sends and joined
//! receives.
//!
//! `raw_udp receive ADDRESS BYTES` receives until a second passes without a packet and prints
//! Gbit/s of payload that arrived. `raw_udp send LOCAL ADDRESS BYTES SECONDS` sends as fast as the
//! socket takes packets. `cargo xtask bench fabric` compares the fabric with it: the difference is
//! the price of reliability and checksums.

use std::io;
use std::mem::{size_of, zeroed};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::process::ExitCode;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// Bytes of one segmented send, headers left aside.
const SEND_BYTES: usize = 61_000;

/// Segmented sends in one system call.
const SENDS: usize = 4;

/// Buffers of one receive call, each as long as a joined datagram can be.
const RECEIVES: usize = 16;

/// The receiver ends after this time without a packet.
const QUIET: Duration = Duration::from_secs(1);

/// It gives up when no packet ever comes.
const PATIENCE: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match words[..] {
        ["receive", at, bytes] => receive(at, bytes),
        ["send", from, to, bytes, seconds] => send(from, to, bytes, seconds),
        _ => Err(io::Error::other(
            "raw_udp receive ADDRESS BYTES | send LOCAL ADDRESS BYTES SECONDS",
        )),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn parse<T: std::str::FromStr>(text: &str) -> io::Result<T> {
    text.parse().map_err(|_| io::Error::other(format!("'{text}' is invalid")))
}

fn set(socket: &UdpSocket, level: i32, option: i32, value: i32) -> io::Result<()> {
    // SAFETY: the option's value is an int that outlives the call.
    let code = unsafe {
        let value: *const i32 = &raw const value;
        libc::setsockopt(socket.as_raw_fd(), level, option, value.cast(), size_of::<i32>() as u32)
    };
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Buffers and headers for one call of `sendmmsg` or `recvmmsg`; they point into each other, so
/// they stay in place.
struct Batch {
    bytes: Vec<Vec<u8>>,
    iovecs: Vec<libc::iovec>,
    headers: Vec<libc::mmsghdr>,
}

impl Batch {
    fn new(count: usize, bytes: usize) -> Batch {
        let mut bytes: Vec<Vec<u8>> = (0..count).map(|_| vec![7; bytes]).collect();
        let mut iovecs: Vec<libc::iovec> = bytes
            .iter_mut()
            .map(|buffer| libc::iovec {
                iov_base: buffer.as_mut_ptr().cast(),
                iov_len: buffer.len(),
            })
            .collect();
        let header = |iovec: &mut libc::iovec| {
            // SAFETY: all zeroes are a valid header without address and control data.
            let mut header: libc::mmsghdr = unsafe { zeroed() };
            header.msg_hdr.msg_iov = iovec;
            header.msg_hdr.msg_iovlen = 1;
            header
        };
        let headers = iovecs.iter_mut().map(header).collect();
        Batch { bytes, iovecs, headers }
    }
}

fn send(from: &str, to: &str, bytes: &str, seconds: &str) -> io::Result<()> {
    let (bytes, seconds): (usize, f64) = (parse(bytes)?, parse(seconds)?);
    if !(1..=SEND_BYTES).contains(&bytes) || !(0.0..=3600.0).contains(&seconds) {
        return Err(io::Error::other("a packet has 1 to 61000 bytes; a run at most an hour"));
    }
    let socket = UdpSocket::bind((from, 0))?;
    socket.connect(parse::<SocketAddr>(to)?)?;
    set(&socket, libc::SOL_UDP, libc::UDP_SEGMENT, bytes as i32)?;
    // The kernel segments at most 64 packets.
    let packets = (SEND_BYTES / bytes).clamp(1, 64);
    let mut batch = Batch::new(SENDS, packets * bytes);
    let until = Instant::now() + Duration::from_secs_f64(seconds);
    while Instant::now() < until {
        // SAFETY: headers, vectors and buffers are alive and were made for each other.
        let sent = unsafe {
            libc::sendmmsg(socket.as_raw_fd(), batch.headers.as_mut_ptr(), SENDS as u32, 0)
        };
        if sent < 0 {
            let error = io::Error::last_os_error();
            // A receiver that has not come yet, and a full queue, are no failures.
            let raw = error.raw_os_error();
            if !matches!(raw, Some(libc::ECONNREFUSED | libc::ENOBUFS | libc::EAGAIN | libc::EINTR))
            {
                return Err(error);
            }
        }
    }
    Ok(())
}

fn receive(at: &str, bytes: &str) -> io::Result<()> {
    let _: usize = parse(bytes)?;
    let socket = UdpSocket::bind(parse::<SocketAddr>(at)?)?;
    set(&socket, libc::SOL_UDP, libc::UDP_GRO, 1)?;
    // The same request as the wire's; the kernel may grant less.
    set(&socket, libc::SOL_SOCKET, libc::SO_RCVBUF, 16 << 20)?;
    socket.set_read_timeout(Some(QUIET))?;
    let mut batch = Batch::new(RECEIVES, 1 << 16);
    let (started, mut first, mut last, mut total) = (Instant::now(), None, Instant::now(), 0_u64);
    loop {
        // SAFETY: headers, vectors and buffers are alive and were made for each other.
        let got = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                batch.headers.as_mut_ptr(),
                RECEIVES as u32,
                libc::MSG_WAITFORONE,
                null_mut(),
            )
        };
        if got <= 0 {
            match first {
                None if started.elapsed() < PATIENCE => continue,
                None => return Err(io::Error::other("no packet came")),
                Some(_) => break,
            }
        }
        last = Instant::now();
        first.get_or_insert(last);
        let arrived = &batch.headers[..got.unsigned_abs() as usize];
        total += arrived.iter().map(|header| u64::from(header.msg_len)).sum::<u64>();
    }
    let seconds = first.map_or(0.0, |first| last.duration_since(first).as_secs_f64());
    debug_assert_eq!(batch.bytes.len(), batch.iovecs.len());
    println!("{:.3}", total as f64 * 8.0 / 1e9 / seconds.max(1e-9));
    Ok(())
}
