//! A control connection between two processes: one JSON object per line, in turn, over TCP.
//!
//! Lines are bounded, text in them is fit for a terminal, and a side that stops in the middle of a
//! line is given up. Between two turns of a driver the connection does not block: packets are moved
//! by the same thread. What the messages are, and who may connect, belongs to the users.

use std::io::{self, ErrorKind, Read, Write};
use std::marker::PhantomData;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::json::heard;

/// Longest line: the numbers of 1024 queue pairs, with room.
const MAX_LINE: usize = 256 << 10;

/// How long the other side may take to reply.
const REPLY_LIMIT: Duration = Duration::from_secs(30);

/// The connection to the other side, which carries messages of one kind.
#[derive(Debug)]
pub struct Control<M> {
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
    /// When the other side is gone, or would not take a line of this length.
    pub fn send(&mut self, message: &M) -> io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        if line.len() > MAX_LINE {
            let why = format!("a message of {} bytes; {MAX_LINE} are taken", line.len());
            return Err(io::Error::new(ErrorKind::InvalidInput, why));
        }
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
        let message = heard(&self.received[..end]);
        self.received.drain(..=end);
        message.map(Some).map_err(|error| nonsense(&error.to_string()))
    }
}

fn nonsense(why: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("not a message of this protocol: {why}"))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use serde::Deserialize;

    use super::*;

    #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Message {
        Hello { version: u32 },
        Mark,
    }

    fn pair() -> (Control<Message>, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let stream = TcpStream::connect(listener.local_addr().expect("bound")).expect("connects");
        let (other, _) = listener.accept().expect("accepts");
        (Control::new(stream).expect("a connection"), other)
    }

    #[test]
    fn messages_arrive_as_they_were_sent() {
        let (mut control, other) = pair();
        let mut peer: Control<Message> = Control::new(other).expect("a connection");
        assert_eq!(peer.poll().expect("connected"), None);
        for message in [Message::Hello { version: u32::MAX }, Message::Mark] {
            control.send(&message).expect("sent");
            assert_eq!(peer.receive().expect("arrived"), message);
        }
        drop(control);
        assert_eq!(peer.receive().expect_err("gone").kind(), ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_line_that_the_other_side_would_not_take_is_not_sent() {
        let (_, other) = pair();
        let mut control: Control<String> = Control::new(other).expect("a connection");
        let error = control.send(&"x".repeat(MAX_LINE)).expect_err("too long");
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn what_is_no_message_is_refused() {
        for bytes in [
            "GET / HTTP/1.1\n",
            "{\"hello\":{\"other\":1}}\n",
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
