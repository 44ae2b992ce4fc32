//! The messages between client and server, and what a lost connection means.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;

use adapter::connect::QpAddress;
use roce::endpoint::Reliability;
use serde::{Deserialize, Serialize};
use service::Error;

use super::test::Test;

/// The connection between client and server.
pub type Control = service::control::Control<Message>;

/// Version of the messages.
pub const VERSION: u32 = 2;

/// Port of the control connection.
pub const PERF_PORT: u16 = 4792;

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

/// A lost connection as an error for the user.
pub(super) fn lost(peer: SocketAddr, error: &io::Error) -> Error {
    match error.kind() {
        ErrorKind::InvalidData => Error::invalid(format_args!("{peer}: {error}"))
            .hint("is it `dquant perf serve` of the same version?"),
        ErrorKind::UnexpectedEof => {
            Error::unreachable(format_args!("{peer} has closed the connection"))
                .hint("its output says why; is it still running?")
        }
        _ => Error::unreachable(format_args!("{peer}: {error}"))
            .hint("is it still running, and reachable?"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::test::tests::sample;
    use super::*;

    /// Clients and servers of different builds talk to each other.
    #[test]
    fn messages_are_written_as_ever() {
        let end = End {
            address: "127.0.0.1:4791".parse().expect("literal"),
            memory: u64::MAX,
            rkey: 7,
            mtu: 1024,
            selective: true,
            no_xdp: None,
            qps: vec![(1, 2), (3, 4)],
        };
        let refused = Message::Refused { why: "no".to_owned(), hint: "ask".to_owned() };
        let reasoned = End { no_xdp: Some("no root".to_owned()), ..end.clone() };
        let snapshot = Snapshot { received: 3, retransmitted: None, ..Snapshot::default() };
        for (message, line) in [
            (Message::Hello { version: 2 }, r#"{"hello":{"version":2}}"#),
            (Message::Welcome { version: 2 }, r#"{"welcome":{"version":2}}"#),
            (
                Message::Begin(sample()),
                r#"{"begin":{"operation":"write","service":"rc","mode":"bandwidth","bytes":4096,"qps":2,"depth":8,"mtu":1024,"go_back_n":false,"by_sockets":false,"spin":false,"millis":100}}"#,
            ),
            (
                Message::Ready(end),
                r#"{"ready":{"address":"127.0.0.1:4791","memory":18446744073709551615,"rkey":7,"mtu":1024,"selective":true,"qps":[[1,2],[3,4]]}}"#,
            ),
            (refused, r#"{"refused":{"why":"no","hint":"ask"}}"#),
            (
                Message::Connect(reasoned),
                r#"{"connect":{"address":"127.0.0.1:4791","memory":18446744073709551615,"rkey":7,"mtu":1024,"selective":true,"no_xdp":"no root","qps":[[1,2],[3,4]]}}"#,
            ),
            (Message::Connected, r#""connected""#),
            (Message::Mark, r#""mark""#),
            (
                Message::Marked(snapshot),
                r#"{"marked":{"at_ns":0,"cpu_ns":0,"received":3,"lost":0,"retransmitted":null}}"#,
            ),
            (Message::Finish(vec![1, 2]), r#"{"finish":[1,2]}"#),
            (
                Message::Finished(Verdict::default()),
                r#"{"finished":{"verified_bytes":0,"wrong_buffers":0,"out_of_order":0}}"#,
            ),
        ] {
            assert_eq!(serde_json::to_string(&message).expect("JSON"), line);
            assert_eq!(serde_json::from_str::<Message>(line).expect("a message"), message);
        }
        let unknown =
            r#"{"finished":{"verified_bytes":0,"wrong_buffers":0,"out_of_order":0,"x":1}}"#;
        assert!(serde_json::from_str::<Message>(unknown).is_err());
    }
}
