//! A caller of HTTP/2 that knows no token and keeps no limits: what a stranger can do to a port of
//! gRPC.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// How long a server may take to end the connection.
const PATIENCE: Duration = Duration::from_secs(30);

const SETTINGS: u8 = 4;
const HEADERS: u8 = 1;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A field that is in no table.
fn field(name: &str, value: &str) -> Vec<u8> {
    let text = |text: &str| [&[text.len() as u8], text.as_bytes()].concat();
    [vec![0], text(name), text(value)].concat()
}

/// What a server said before it ended the connection.
#[derive(Debug, Default)]
pub(crate) struct Said {
    /// Its settings, by number.
    pub(crate) settings: Vec<(u16, u32)>,
    /// Frames with headers: calls that it answered.
    pub(crate) answers: usize,
}

/// Makes so many calls of `path` without a token over one connection, as fast as they are taken,
/// and reads until the server ends the connection.
pub(crate) fn calls_without_a_token(address: &str, path: &str, calls: u32) -> Said {
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    let headers: Vec<u8> = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "x"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
    .iter()
    .flat_map(|(name, value)| field(name, value))
    .collect();
    let mut sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    sent.extend(frame(SETTINGS, 0, 0, &[]));
    for call in 0..calls {
        sent.extend(frame(HEADERS, 5, 2 * call + 1, &headers));
    }
    let mut writer = stream.try_clone().expect("a descriptor");
    // The server may end the connection before all is sent.
    let writing = std::thread::spawn(move || drop(writer.write_all(&sent)));
    let mut received = Vec::new();
    let mut piece = [0; 4096];
    loop {
        match stream.read(&mut piece) {
            Ok(0) => break,
            Ok(read) => received.extend_from_slice(&piece[..read]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::ConnectionReset, "it is still open");
                break;
            }
        }
    }
    writing.join().expect("no panic");
    heard(&received)
}

fn heard(mut bytes: &[u8]) -> Said {
    let mut said = Said::default();
    while let Some((head, rest)) = bytes.split_at_checked(9) {
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let Some((payload, rest)) = rest.split_at_checked(length) else { break };
        match head[3] {
            SETTINGS => {
                let (pairs, _) = payload.as_chunks::<6>();
                said.settings.extend(pairs.iter().map(|[a, b, c, d, e, f]| {
                    (u16::from_be_bytes([*a, *b]), u32::from_be_bytes([*c, *d, *e, *f]))
                }));
            }
            HEADERS => said.answers += 1,
            _ => {}
        }
        bytes = rest;
    }
    said
}
