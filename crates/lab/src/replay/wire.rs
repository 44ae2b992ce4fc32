//! What ranks tell each other, as it is written, and in which words a bootstrap fails.
//!
//! The words are those of `dquant job replay`: other users of [`comm::bootstrap`] have other
//! options to name.

use std::io;
use std::net::IpAddr;
use std::time::Duration;

use comm::bootstrap::{self, Failure, Join, Loss, Reason, Refusal};
use serde::{Deserialize, Serialize};
use service::Error;

/// Version of the messages.
pub(super) const VERSION: u32 = 1;

const LOST_HINT: &str = "its output says why; all ranks end when one does";
const SAME_VERSION_HINT: &str = "use the same version of dquant everywhere";

/// What has to be the same at all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Terms {
    /// The pattern as it is written.
    pub pattern: String,
    /// Bytes of the edges with the highest rate.
    pub bytes: u64,
    /// Parts of each phase.
    pub steps: u32,
    /// Iterations, those that are not measured among them.
    pub iterations: u32,
}

/// The queue pairs of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankInfo {
    /// UDP port of its device.
    pub port: u16,
    /// Largest path MTU that it can have towards rank 0, in payload bytes.
    pub mtu: u32,
    /// Peer, number of the queue pair towards it, and its first packet sequence number.
    pub qps: Vec<(u32, u32, u32)>,
}

impl RankInfo {
    /// What one rank has to know of it: of a full mesh of 256 ranks, each gets 20 KB instead of all
    /// 65,000 queue pairs.
    fn towards(mut self, rank: u32) -> RankInfo {
        self.qps.retain(|(peer, ..)| *peer == rank);
        self
    }
}

/// A message as it is written; [`bootstrap::Message`] says what each means.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Message {
    Join {
        version: u32,
        rank: u32,
        terms: Terms,
        // As all builds have written it but one, which wrote `info`.
        #[serde(rename = "seat", alias = "info")]
        info: RankInfo,
    },
    Refused {
        why: String,
        hint: String,
    },
    Seats(Vec<RankInfo>),
    Connected,
    Go,
    Done,
    Bye,
    Failed {
        why: String,
        hint: String,
    },
}

impl Message {
    pub(super) fn heard(self) -> bootstrap::Message<Terms, RankInfo> {
        match self {
            Message::Join { version, rank, terms, info } => {
                bootstrap::Message::Join(Join { version, rank, terms, info })
            }
            Message::Refused { why, hint } => bootstrap::Message::Refused(Reason { why, hint }),
            Message::Seats(infos) => bootstrap::Message::Ranks(infos),
            Message::Connected => bootstrap::Message::Connected,
            Message::Go => bootstrap::Message::Go,
            Message::Done => bootstrap::Message::Done,
            Message::Bye => bootstrap::Message::Bye,
            Message::Failed { why, hint } => {
                bootstrap::Message::Failed(Failure::Told(Reason { why, hint }))
            }
        }
    }

    /// What is said to a rank; ranks waited so long for each other.
    pub(super) fn of(
        said: bootstrap::Message<Terms, RankInfo>,
        rank: u32,
        wait: Duration,
    ) -> Message {
        match said {
            bootstrap::Message::Join(Join { version, rank, terms, info }) => {
                Message::Join { version, rank, terms, info }
            }
            bootstrap::Message::Refused(Reason { why, hint }) => Message::Refused { why, hint },
            bootstrap::Message::Ranks(infos) => {
                Message::Seats(infos.into_iter().map(|info| info.towards(rank)).collect())
            }
            bootstrap::Message::Connected => Message::Connected,
            bootstrap::Message::Go => Message::Go,
            bootstrap::Message::Done => Message::Done,
            bootstrap::Message::Bye => Message::Bye,
            bootstrap::Message::Failed(failure) => {
                let Reason { why, hint } = in_words(&failure, wait);
                Message::Failed { why, hint }
            }
        }
    }
}

/// What rank 0, which takes the job for `ours`, answers a newcomer that comes from an address.
pub(super) fn refusal(refusal: &Refusal<Terms>, ours: &Terms, from: IpAddr) -> Message {
    let (why, hint) = match refusal {
        Refusal::Version => {
            ("rank 0 has another version of dquant".to_owned(), "use the same everywhere")
        }
        Refusal::NoRank(rank) => {
            (format!("there is no rank {rank}"), "--rank is a place in --peers, from 0")
        }
        Refusal::Elsewhere(bootstrap::Peer { rank, ip }) => (
            format!("rank {rank} is at {ip} in the peers of rank 0, not at {from}"),
            "give all ranks the same --peers, with the addresses that packets leave from",
        ),
        Refusal::Taken(rank) => {
            (format!("rank {rank} is there already"), "give each its own --rank")
        }
        Refusal::OtherTerms(theirs) => (
            format!("rank 0 replays {ours:?}, this rank {theirs:?}"),
            "give all ranks the same options",
        ),
        Refusal::Over => ("the job has ended".to_owned(), "start all ranks again"),
    };
    Message::Refused { why, hint: hint.to_owned() }
}

/// What rank 0 answers a newcomer whose first line it cannot read.
pub(super) fn unreadable(error: &io::Error) -> Message {
    Message::Refused { why: format!("rank 0 got {error}"), hint: SAME_VERSION_HINT.to_owned() }
}

/// A failure for people to read; ranks waited so long for each other.
pub(super) fn in_words(failure: &Failure, wait: Duration) -> Reason {
    let (why, hint) = match failure {
        Failure::Told(reason) | Failure::Refused(reason) => return reason.clone(),
        Failure::Missing(peers) => {
            let names: Vec<String> = peers.iter().map(ToString::to_string).collect();
            (
                format!("{} did not come within {wait:?}", names.join(", ")),
                "start every rank with the same pattern and --peers; --wait gives more time",
            )
        }
        Failure::Late(peer) => (format!("{peer}: no reply in time"), LOST_HINT),
        Failure::Lost(peer, Loss::Ended) => (format!("{peer} has ended"), LOST_HINT),
        Failure::Lost(peer, Loss::Broken(why)) => (format!("{peer}: {why}"), LOST_HINT),
        Failure::Lost(peer, Loss::Garbled(why)) => {
            (format!("{peer}: {why}"), "is it the same version of dquant?")
        }
        Failure::OutOfTurn(peer, said) => {
            (format!("{peer} said {said} out of turn"), SAME_VERSION_HINT)
        }
    };
    Reason { why, hint: hint.to_owned() }
}

/// The error of a rank that ends early.
pub(super) fn error(failure: &Failure, wait: Duration) -> Error {
    let Reason { why, hint } = in_words(failure, wait);
    match failure {
        Failure::Refused(_) => Error::invalid(why).hint(hint),
        _ => Error::unreachable(why).hint(hint),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranks of different builds take part in one job.
    #[test]
    fn messages_are_written_as_ever() {
        let terms = Terms { pattern: "ring:2@1G".to_owned(), bytes: 4, steps: 1, iterations: 3 };
        let info = RankInfo { port: 4791, mtu: 1024, qps: vec![(1, 2, 3)] };
        let (why, hint) = ("no".to_owned(), "ask".to_owned());
        for (message, line) in [
            (
                Message::Join { version: 1, rank: 2, terms, info: info.clone() },
                r#"{"join":{"version":1,"rank":2,"terms":{"pattern":"ring:2@1G","bytes":4,"steps":1,"iterations":3},"seat":{"port":4791,"mtu":1024,"qps":[[1,2,3]]}}}"#,
            ),
            (
                Message::Refused { why: why.clone(), hint: hint.clone() },
                r#"{"refused":{"why":"no","hint":"ask"}}"#,
            ),
            (Message::Seats(vec![info]), r#"{"seats":[{"port":4791,"mtu":1024,"qps":[[1,2,3]]}]}"#),
            (Message::Connected, r#""connected""#),
            (Message::Go, r#""go""#),
            (Message::Done, r#""done""#),
            (Message::Bye, r#""bye""#),
            (Message::Failed { why, hint }, r#"{"failed":{"why":"no","hint":"ask"}}"#),
        ] {
            assert_eq!(serde_json::to_string(&message).expect("JSON"), line);
            let heard: Message = serde_json::from_str(line).expect("a message");
            assert_eq!(Message::of(heard.clone().heard(), 1, Duration::ZERO), message);
            assert_eq!(heard, message);
        }
    }

    /// The line of a full mesh of the most ranks fits into what [`service::control`] takes.
    #[test]
    fn a_rank_is_told_what_leads_to_it() {
        let qps = (0..256).map(|peer| (peer, 0xff_ffff, 0xff_ffff)).collect();
        let info = RankInfo { port: u16::MAX, mtu: 4096, qps };
        let all = vec![info; 256];
        let said = Message::of(bootstrap::Message::Ranks(all), 7, Duration::ZERO);
        assert!(serde_json::to_vec(&said).expect("JSON").len() < 32 << 10);
        let Message::Seats(infos) = said else { panic!("{said:?}") };
        assert_eq!(infos.len(), 256);
        assert!(infos.iter().all(|info| info.qps == [(7, 0xff_ffff, 0xff_ffff)]));
    }
}
