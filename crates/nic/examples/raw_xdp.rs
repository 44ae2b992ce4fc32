//! Frames of UDP datagrams without a protocol: how fast an AF_XDP socket answers an AF_XDP socket.
//!
//! `raw_xdp serve ADDRESS` answers each frame with one of the same length until a second passes
//! without any. `raw_xdp ping LOCAL ADDRESS BYTES SECONDS` sends one frame at a time and prints the
//! median of half a round trip in microseconds. Both spin, need root, and use the first queue of
//! the interface that has the address. `cargo xtask bench fabric` compares the fabric with it: the
//! difference is the price of the protocol.

use std::io::{self, Error};
use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nic::xdp::RawFrames;
use roce::wire::ROCE_PORT;

/// Headers of Ethernet, IPv4 and UDP.
const HEADERS: usize = 14 + 20 + 8;

/// The server ends after this time without a frame; the client gives a frame up after it.
const QUIET: Duration = Duration::from_secs(1);

/// It gives up when no frame ever comes.
const PATIENCE: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match words[..] {
        ["serve", at] => serve(at),
        ["ping", from, to, bytes, seconds] => ping(from, to, bytes, seconds),
        _ => Err(Error::other("raw_xdp serve ADDRESS | ping LOCAL ADDRESS BYTES SECONDS")),
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
    text.parse().map_err(|_| Error::other(format!("'{text}' is invalid")))
}

fn open(address: &str) -> io::Result<RawFrames> {
    let address: Ipv4Addr = parse(address)?;
    RawFrames::open(address.into()).map_err(Error::other)
}

/// A frame to everybody on the link, so no address needs to be resolved.
fn frame(from: Ipv4Addr, to: Ipv4Addr, bytes: usize) -> Vec<u8> {
    let mut frame = vec![7; HEADERS + bytes];
    let total = (20 + 8 + bytes) as u16;
    frame[..6].fill(0xff);
    frame[6..14].copy_from_slice(&[2, 0, 0, 0, 0, 1, 0x08, 0x00]);
    frame[14..26].copy_from_slice(&[0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17, 0, 0]);
    frame[16..18].copy_from_slice(&total.to_be_bytes());
    frame[26..30].copy_from_slice(&from.octets());
    frame[30..34].copy_from_slice(&to.octets());
    let words = frame[14..34].chunks(2).map(|two| u32::from(two[0]) << 8 | u32::from(two[1]));
    let sum: u32 = words.sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    frame[24..26].copy_from_slice(&(!(folded as u16)).to_be_bytes());
    frame[34..36].copy_from_slice(&ROCE_PORT.to_be_bytes());
    frame[36..38].copy_from_slice(&ROCE_PORT.to_be_bytes());
    frame[38..40].copy_from_slice(&(total - 20).to_be_bytes());
    frame[40..42].fill(0);
    frame
}

fn serve(at: &str) -> io::Result<()> {
    let mut socket = open(at)?;
    let local: Ipv4Addr = parse(at)?;
    let (started, mut last, mut answer) = (Instant::now(), None, Vec::new());
    loop {
        let mut peer = None;
        socket.receive(|frame| {
            if let Some([a, b, c, d]) = frame.get(26..30) {
                peer = Some((Ipv4Addr::new(*a, *b, *c, *d), frame.len().saturating_sub(HEADERS)));
            }
        });
        if let Some((peer, bytes)) = peer {
            if answer.len() != HEADERS + bytes {
                answer = frame(local, peer, bytes);
            }
            socket.send(&answer);
            last = Some(Instant::now());
        } else if last.map_or(started.elapsed() > PATIENCE, |last| last.elapsed() > QUIET) {
            return last.map(|_| ()).ok_or_else(|| Error::other("no frame came"));
        }
    }
}

fn ping(from: &str, to: &str, bytes: &str, seconds: &str) -> io::Result<()> {
    let (bytes, seconds): (usize, f64) = (parse(bytes)?, parse(seconds)?);
    if !(18..=1400).contains(&bytes) || !(0.0..=60.0).contains(&seconds) {
        return Err(Error::other(
            "a frame has 18 to 1400 bytes of payload; a run at most a minute",
        ));
    }
    let question = frame(parse(from)?, parse(to)?, bytes);
    let mut socket = open(from)?;
    let (begin, mut times, mut lost) = (Instant::now(), Vec::new(), 0_u32);
    while begin.elapsed().as_secs_f64() < seconds {
        let sent = Instant::now();
        socket.send(&question);
        while socket.receive(|_| {}) == 0 {
            if sent.elapsed() > QUIET {
                lost += 1;
                break;
            }
        }
        times.push(sent.elapsed().as_nanos());
    }
    if lost as usize >= times.len().min(5) {
        return Err(Error::other(format!("{lost} of {} frames had no answer", times.len())));
    }
    times.sort_unstable();
    println!("{:.3}", times[times.len() / 2] as f64 / 2e3);
    Ok(())
}
