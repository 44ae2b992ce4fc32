//! The control connection: one JSON object per line, in turn, over TCP.
//!
//! Lines are bounded, unknown fields are refused, and a side that stops in the middle of a line is
//! given up. While a test runs, the connection does not block: packets are moved by the same
//! thread.

use std::io::{self, ErrorKind, Read, Write};
use std::marker::PhantomData;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use adapter::connect::QpAddress;
use roce::endpoint::Reliability;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::test::Test;
use crate::exit::CliError;
use crate::input;

/// Version of the messages.
pub const VERSION: u32 = 2;

/// Port of the control connection.
pub const PERF_PORT: u16 = 4792;

/// Longest line: the numbers of 1024 queue pairs, with room.
const MAX_LINE: usize = 256 << 10;

/// How long the other side may take to reply.
const REPLY_LIMIT: Duration = Duration::from_secs(30);

/// One end of the queue pairs of a test.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct End {
    /// Where packets go.
    pub address: SocketAddr,
    /// First byte of the registered memory.
    pub memory: u64,
    /// Its remote key.
    pub rkey: u32,
    /// Largest path MTU in payload bytes.
    pub mtu: u32,
    /// Whether it recovers losses selectively.
    pub selective: bool,
    /// Why its packets do not take the AF_XDP socket that the test wants, if they do not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_xdp: Option<String>,
    /// Numbers of its queue pairs, and their first packet sequence numbers.
    pub qps: Vec<(u32, u32)>,
}

impl End {
    /// Its queue pairs.
    pub fn queue_pairs(&self) -> impl Iterator<Item = QpAddress> {
        let reliability =
            if self.selective { Reliability::Selective } else { Reliability::GoBackN };
        let address =
            move |&numbers| QpAddress::received(self.address, numbers, reliability, self.mtu);
        self.qps.iter().map(address)
    }
}

/// What a server has counted since the test began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    /// Its clock.
    pub at_ns: u64,
    /// CPU time of the test, user and system.
    pub cpu_ns: u64,
    /// Messages that arrived in receives.
    pub received: u64,
    /// Messages that were sent and did not arrive, as far as their numbers tell.
    pub lost: u64,
    /// Packets sent again; none where the device does not tell.
    pub retransmitted: Option<u64>,
}

/// What a side found in its memory at the end of a test.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Verdict {
    /// Bytes that were compared.
    pub verified_bytes: u64,
    /// Buffers with a byte that is wrong.
    pub wrong_buffers: u64,
    /// Messages that arrived in the wrong order, or twice.
    pub out_of_order: u64,
}

/// What the sides tell each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Message {
    /// The client's first words.
    Hello {
        /// Of its messages.
        version: u32,
    },
    /// The server's.
    Welcome {
        /// Of its messages.
        version: u32,
    },
    /// A test is wanted.
    Begin(Test),
    /// The server has prepared it.
    Ready(End),
    /// The server does not do it.
    Refused {
        /// Why.
        why: String,
        /// What to try.
        hint: String,
    },
    /// The client's end.
    Connect(End),
    /// Queue pairs are connected and receives posted.
    Connected,
    /// A snapshot is wanted.
    Mark,
    /// Here it is.
    Marked(Snapshot),
    /// The test is over: messages that the client has sent on each queue pair.
    Finish(Vec<u64>),
    /// What the server found.
    Finished(Verdict),
}

/// The connection to the other side, which carries messages of one kind.
#[derive(Debug)]
pub struct Control<M = Message> {
    stream: TcpStream,
    received: Vec<u8>,
    is_blocking: bool,
    kind: PhantomData<fn() -> M>,
}

impl<M: Serialize + DeserializeOwned> Control<M> {
    /// Takes over a connection.
    ///
    /// # Errors
    /// When the connection is gone.
    pub fn new(stream: TcpStream) -> io::Result<Control<M>> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(REPLY_LIMIT))?;
        Ok(Control { stream, received: Vec::new(), is_blocking: true, kind: PhantomData })
    }

    /// The address of this side.
    ///
    /// # Errors
    /// When the connection is gone.
    pub fn local(&self) -> io::Result<SocketAddr> {
        self.stream.local_addr()
    }

    /// The address of the other side.
    ///
    /// # Errors
    /// When the connection is gone.
    pub fn peer(&self) -> io::Result<SocketAddr> {
        self.stream.peer_addr()
    }

    /// The descriptor that is readable when a message has arrived.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Sends a message.
    ///
    /// # Errors
    /// When the other side is gone.
    pub fn send(&mut self, message: &M) -> io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        self.set_blocking(true)?;
        self.stream.write_all(&line)
    }

    /// Waits for a message, half a minute at most.
    ///
    /// # Errors
    /// When the other side is gone, says nothing in time, or nothing that is understood.
    pub fn receive(&mut self) -> io::Result<M> {
        self.receive_within(REPLY_LIMIT)
    }

    /// Waits for a message.
    ///
    /// # Errors
    /// As [`receive`](Control::receive).
    pub fn receive_within(&mut self, limit: Duration) -> io::Result<M> {
        let until = Instant::now() + limit;
        self.set_blocking(true)?;
        loop {
            if let Some(message) = self.next_line()? {
                return Ok(message);
            }
            // The limit is for the whole message: one byte now and then does not extend it.
            let left = until.saturating_duration_since(Instant::now());
            let late = || io::Error::new(ErrorKind::TimedOut, "no reply in time");
            if left.is_zero() {
                return Err(late());
            }
            self.stream.set_read_timeout(Some(left))?;
            self.read_some().map_err(|error| match error.kind() {
                ErrorKind::WouldBlock => late(),
                _ => error,
            })?;
        }
    }

    /// A message, if one has arrived.
    ///
    /// # Errors
    /// As [`receive`](Control::receive).
    pub fn poll(&mut self) -> io::Result<Option<M>> {
        self.set_blocking(false)?;
        if let Some(message) = self.next_line()? {
            return Ok(Some(message));
        }
        match self.read_some() {
            Ok(()) => self.next_line(),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn set_blocking(&mut self, blocking: bool) -> io::Result<()> {
        if self.is_blocking != blocking {
            self.stream.set_nonblocking(!blocking)?;
            self.is_blocking = blocking;
        }
        Ok(())
    }

    fn read_some(&mut self) -> io::Result<()> {
        let mut bytes = [0; 4096];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(len) => {
                    self.received.extend_from_slice(&bytes[..len]);
                    return Ok(());
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn next_line(&mut self) -> io::Result<Option<M>> {
        let Some(end) = self.received.iter().position(|byte| *byte == b'\n') else {
            let is_long = self.received.len() > MAX_LINE;
            return if is_long { Err(nonsense("a line without end")) } else { Ok(None) };
        };
        let message = input::heard(&self.received[..end]);
        self.received.drain(..=end);
        message.map(Some).map_err(|error| nonsense(&error.to_string()))
    }
}

fn nonsense(why: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("not a message of this protocol: {why}"))
}

/// A lost connection as an error for the user.
pub(super) fn lost(peer: SocketAddr, error: &io::Error) -> CliError {
    match error.kind() {
        ErrorKind::InvalidData => CliError::usage(format_args!("{peer}: {error}"))
            .hint("is it `dquant perf serve` of the same version?"),
        ErrorKind::UnexpectedEof => {
            CliError::peer_unreachable(format_args!("{peer} has closed the connection"))
                .hint("its output says why; is it still running?")
        }
        _ => CliError::peer_unreachable(format_args!("{peer}: {error}"))
            .hint("is it still running, and reachable?"),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::super::test::tests::sample;
    use super::*;

    fn pair() -> (Control, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let stream = TcpStream::connect(listener.local_addr().expect("bound")).expect("connects");
        let (other, _) = listener.accept().expect("accepts");
        (Control::new(stream).expect("a connection"), other)
    }

    #[test]
    fn messages_arrive_as_they_were_sent() {
        let (mut control, other) = pair();
        let mut peer: Control = Control::new(other).expect("a connection");
        assert_eq!(peer.poll().expect("connected"), None);
        let end = End {
            address: "127.0.0.1:4791".parse().expect("literal"),
            memory: u64::MAX,
            rkey: 7,
            mtu: 1024,
            selective: true,
            no_xdp: Some("no root".to_owned()),
            qps: vec![(1, 2), (3, 4)],
        };
        for message in [Message::Begin(sample()), Message::Ready(end), Message::Mark] {
            control.send(&message).expect("sent");
            assert_eq!(peer.receive().expect("arrived"), message);
        }
        drop(control);
        assert_eq!(peer.receive().expect_err("gone").kind(), ErrorKind::UnexpectedEof);
    }

    #[test]
    fn what_is_no_message_is_refused() {
        for bytes in [
            "GET / HTTP/1.1\n",
            "{\"begin\":{\"bytes\":1}}\n",
            "\"mark\" \"mark\"\n",
            "{\"hello\":{}}\n",
        ] {
            let (mut control, mut other) = pair();
            other.write_all(bytes.as_bytes()).expect("sent");
            let error = control.receive().expect_err(bytes);
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{bytes}");
        }
        let (mut control, mut other) = pair();
        let writer = std::thread::spawn(move || {
            // Ends with an error when the reader gives up.
            while other.write_all(&vec![b'x'; 65_536]).is_ok() {}
        });
        assert_eq!(control.receive().expect_err("endless").kind(), ErrorKind::InvalidData);
        drop(control);
        writer.join().expect("it ends");
    }
}
