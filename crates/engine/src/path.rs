//! What keeps a stream from its target: which packets still pass, in words, and where that is
//! shown.
//!
//! A lost connection shows by itself what the path carried while it lasted: whether the control
//! plane answered, whether requests (small packets, both ways with their acknowledgements) got
//! through, and whether data (packets of the path MTU) did. Where requests got through and the
//! target says that its data was never acknowledged, the next connection takes a smaller path MTU
//! ([`PathMtus`]): the data itself is the probe. No other packet is sent to find out. That no data
//! came proves nothing of the path: the target's storage may hang, or its process ended.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use roce::wire::ROCE_PORT;
use service::error::Error;

use crate::data::dpu::StreamId;

/// What has passed between a stream and its target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Traffic {
    /// Requests that the target's machine acknowledged.
    pub(crate) requests: u64,
    /// Bytes of data that arrived.
    pub(crate) bytes: u64,
}

impl Traffic {
    /// What has passed since `before`.
    pub(crate) fn since(&self, before: &Traffic) -> Traffic {
        Traffic {
            requests: self.requests.saturating_sub(before.requests),
            bytes: self.bytes.saturating_sub(before.bytes),
        }
    }
}

/// How a connection ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ending {
    /// Our queue pair ended because nothing was acknowledged.
    pub(crate) gave_up: bool,
    /// Of the data that the target sent with all its retries and nothing acknowledged, if it says
    /// so.
    pub(crate) unacknowledged_bytes: u32,
    /// Nothing went as packets: the target is a process of this machine.
    pub(crate) is_direct: bool,
}

/// What a connection that was lost says of the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PathState {
    /// Data arrived.
    Open,
    /// Requests were acknowledged, and packets with at least so many bytes of data never were.
    SmallOnly(u32),
    /// Nothing is wrong with the path as far as it was tried: the target's process sent no data.
    Silent,
    /// Requests were sent and never acknowledged.
    Closed,
    /// Nothing was sent that shows it.
    Untried,
}

/// The smallest path MTU: packets with no more data are small ones.
const SMALLEST_MTU: u32 = 256;

impl PathState {
    /// `mtu_bytes`: the path MTU of the connection.
    pub(crate) fn of(passed: &Traffic, ending: &Ending, mtu_bytes: u32) -> PathState {
        let Ending { gave_up, unacknowledged_bytes, is_direct } = *ending;
        let dropped = unacknowledged_bytes.min(mtu_bytes);
        match (passed.bytes, passed.requests) {
            (1.., _) => PathState::Open,
            (0, 1..) if dropped > SMALLEST_MTU && !is_direct => PathState::SmallOnly(dropped),
            (0, 1..) => PathState::Silent,
            (0, 0) if gave_up && is_direct => PathState::Silent,
            (0, 0) if gave_up => PathState::Closed,
            (0, 0) => PathState::Untried,
        }
    }

    /// What is known after a connection that said this, where `before` was known.
    pub(crate) fn after(self, before: PathState) -> PathState {
        if self == PathState::Untried { before } else { self }
    }

    /// The error of a stream whose target answers the control plane, while its connections fail
    /// like this.
    pub(crate) fn error(self, target: &str, ours: SocketAddr, peer: Option<PeerPath>) -> Error {
        let theirs = peer.map_or_else(|| target.to_owned(), |peer| peer.roce.to_string());
        let at_all = format!("target {target} accepts control connections, but");
        match self {
            PathState::Closed => {
                Error::unreachable(format!("{at_all} nothing arrives over RoCE")).hint(format!(
                    "a firewall may block UDP port {ROCE_PORT}: let it pass between {ours} and {theirs}, both ways"
                ))
            }
            PathState::SmallOnly(bytes) => {
                let text = format!("{at_all} no packet with {bytes} bytes of data arrives over RoCE; small ones do");
                Error::unreachable(text)
                    .hint(format!("the path from {theirs} to {ours} drops large packets: {NARROW}"))
            }
            PathState::Silent => Error::unreachable(format!("{at_all} sends no data")).hint(format!(
                "its storage may hang, or its process be stopped, overloaded or restarted: see its log, and `dquant status --control {target}`"
            )),
            PathState::Open | PathState::Untried => {
                Error::unreachable(format!("{at_all} RoCE connections fail"))
                    .hint("the logs of the target and of the DPU say how each connection ended")
            }
        }
    }
}

/// What is wrong with a path that drops large packets, and what to do about it.
const NARROW: &str = "a link or tunnel has a smaller MTU than the interfaces at its ends; raise it, or lower theirs: \
     ip link set DEV mtu 1500";

/// How long a path is remembered to drop large packets (RFC 8899, section 5.1.1: the timer before a
/// larger one is tried is 600 s).
const REMEMBERED: Duration = Duration::from_secs(600);

/// Path MTUs below those of the links, as connections found them. Shared by all streams of a DPU.
#[derive(Clone, Debug, Default)]
pub struct PathMtus(Arc<Mutex<BTreeMap<String, Narrow>>>);

/// A path that drops large packets.
#[derive(Clone, Copy, Debug)]
struct Narrow {
    /// The smallest payload that did not arrive, in bytes.
    dropped: u32,
    /// The payload to use.
    limit: u32,
    /// Whether data has arrived since.
    is_proven: bool,
    found: Instant,
}

impl PathMtus {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Narrow>> {
        let mut paths = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        paths.retain(|_, path| path.found.elapsed() < REMEMBERED);
        paths
    }

    /// The largest payload to try towards a target, in bytes.
    pub(crate) fn towards(&self, target: &str) -> u32 {
        self.lock().get(target).map_or(u32::MAX, |path| path.limit)
    }

    /// Packets with this payload do not arrive, smaller ones do. Returns the payload to try next:
    /// that of Ethernet with 1,500 bytes, then the smaller ones; `None` when there is none.
    pub(crate) fn lower(&self, target: &str, dropped: u32) -> Option<u32> {
        let limit = [1024, 512, SMALLEST_MTU].into_iter().find(|&limit| limit < dropped)?;
        let (is_proven, found) = (false, Instant::now());
        self.lock().insert(target.to_owned(), Narrow { dropped, limit, is_proven, found });
        Some(limit)
    }

    /// Whether a smaller payload is used and no data has arrived yet.
    pub(crate) fn is_unproven(&self, target: &str) -> bool {
        self.lock().get(target).is_some_and(|path| !path.is_proven)
    }

    /// Data arrives from the target. Returns what it proves of a path that dropped large packets,
    /// the first time.
    pub(crate) fn prove(&self, target: &str) -> Option<String> {
        let mut paths = self.lock();
        let path = paths.get_mut(target).filter(|path| !path.is_proven)?;
        path.is_proven = true;
        Some(path.sentence(target))
    }

    /// A sentence for each path that drops large packets.
    pub(crate) fn notes(&self) -> Vec<String> {
        let paths = self.lock();
        let proven = paths.iter().filter(|(_, path)| path.is_proven);
        proven.map(|(target, path)| path.sentence(target)).collect()
    }
}

impl Narrow {
    fn sentence(&self, target: &str) -> String {
        let Narrow { dropped, limit, .. } = self;
        format!(
            "the path from target {target} drops packets with {dropped} bytes of data, those with {limit} pass: {NARROW}"
        )
    }
}

/// The far end of a stream's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PeerPath {
    /// Its RoCE endpoint.
    pub(crate) roce: SocketAddr,
    /// Path MTU in bytes of payload.
    pub(crate) mtu_bytes: u32,
    /// Whether it is reached without packets.
    pub(crate) is_direct: bool,
}

/// Streams that wait for their target, and why: shown by `dquant status`.
#[derive(Clone, Debug, Default)]
pub struct Waiting(Arc<Mutex<BTreeMap<StreamId, Option<String>>>>);

impl Waiting {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<StreamId, Option<String>>> {
        // The table is never left half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An open stream, which does not wait. Only of such streams anything is noted: the task that
    /// notes ends later than its stream.
    pub(crate) fn enter(&self, stream: StreamId) {
        self.lock().insert(stream, None);
    }

    /// The stream is closed.
    pub(crate) fn leave(&self, stream: StreamId) {
        self.lock().remove(&stream);
    }

    /// Notes why an open stream waits. Whether that is news.
    pub(crate) fn set(&self, stream: StreamId, why: &str) -> bool {
        let mut streams = self.lock();
        let noted = streams.get_mut(&stream).filter(|noted| noted.as_deref() != Some(why));
        noted.map(|noted| *noted = Some(why.to_owned())).is_some()
    }

    /// Whether the stream is noted as waiting.
    pub(crate) fn has(&self, stream: StreamId) -> bool {
        self.lock().get(&stream).is_some_and(Option::is_some)
    }

    /// The stream waits no more.
    pub(crate) fn clear(&self, stream: StreamId) {
        if let Some(noted) = self.lock().get_mut(&stream) {
            *noted = None;
        }
    }

    /// A sentence for each stream that waits.
    pub(crate) fn notes(&self) -> Vec<String> {
        let streams = self.lock();
        let waiting = streams.iter().filter_map(|(id, why)| Some((id, why.as_ref()?)));
        waiting.map(|(id, why)| format!("stream {id} waits: {why}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_passed_tells_what_does_not() {
        let (ours, roce) = (([10, 0, 0, 1], 4791).into(), ([10, 0, 0, 2], 4791).into());
        let before = Traffic { requests: 5, bytes: 100 };
        let said = |now: [u64; 2], gave_up, unacknowledged_bytes, is_direct| {
            let passed = Traffic { requests: now[0], bytes: now[1] }.since(&before);
            let state =
                PathState::of(&passed, &Ending { gave_up, unacknowledged_bytes, is_direct }, 4096);
            let peer = PeerPath { roce, mtu_bytes: 4096, is_direct };
            let (text, hint) = state.error("t:4790", ours, Some(peer)).parts();
            (state, format!("{text} {}", hint.unwrap_or_default()))
        };
        let large = 1 << 20;
        for (now, gave_up, lost, state, parts) in [
            ([5, 100], true, 0, PathState::Closed, ["nothing arrives", "UDP port 4791"]),
            ([5, 100], false, 0, PathState::Untried, ["connections fail", "logs"]),
            ([5, 100], false, large, PathState::Untried, ["connections fail", "logs"]),
            ([9, 100], false, large, PathState::SmallOnly(4096), ["4096 bytes", "MTU"]),
            ([9, 100], true, large, PathState::SmallOnly(4096), ["small ones", "10.0.0.2:4791"]),
            ([9, 100], false, 2_000, PathState::SmallOnly(2_000), ["2000 bytes", "MTU"]),
            ([9, 101], true, large, PathState::Open, ["connections fail", "logs"]),
            // That is no large packet.
            ([9, 100], false, 256, PathState::Silent, ["sends no data", "storage"]),
            // A target that hangs, is killed or stopped takes requests, too.
            ([9, 100], false, 0, PathState::Silent, ["sends no data", "storage"]),
            ([9, 100], true, 0, PathState::Silent, ["sends no data", "status --control t:4790"]),
        ] {
            let (found, text) = said(now, gave_up, lost, false);
            assert_eq!(found, state);
            for part in parts.into_iter().chain(["t:4790"]) {
                assert!(text.contains(part), "{part:?} is not in {text:?}");
            }
            // Without packets there is neither a path MTU nor a firewall.
            let (found, text) = said(now, gave_up, lost, true);
            assert!(!matches!(found, PathState::SmallOnly(_) | PathState::Closed), "{found:?}");
            assert!(!text.contains("MTU") && !text.contains("firewall"), "{text}");
        }
    }

    /// On a loaded machine a connection may end before it has sent anything.
    #[test]
    fn a_connection_that_tried_nothing_leaves_what_is_known() {
        use PathState::{Closed, Open, SmallOnly, Untried};
        let seen = [Untried, Open, Closed, Untried, SmallOnly(4096), Untried, Open];
        let mut known = Untried;
        let after = seen.map(|path| {
            known = path.after(known);
            known
        });
        let small = SmallOnly(4096);
        assert_eq!(after, [Untried, Open, Closed, Closed, small, small, Open]);
    }

    #[test]
    fn a_path_mtu_is_lowered_until_data_arrives() {
        let paths = PathMtus::default();
        assert_eq!(paths.towards("t"), u32::MAX);
        assert_eq!(paths.prove("t"), None, "nothing was lowered");
        assert_eq!(paths.lower("t", 4096), Some(1024));
        assert_eq!((paths.towards("t"), paths.towards("u")), (1024, u32::MAX));
        assert!(paths.notes().is_empty(), "nothing has passed yet");
        assert_eq!(paths.lower("t", 1024), Some(512));
        let said = paths.prove("t").expect("data arrives");
        assert!(
            said.contains("drops packets with 1024") && said.contains("with 512 pass"),
            "{said}"
        );
        assert_eq!((paths.prove("t"), paths.notes()), (None, vec![said]));
        assert_eq!((paths.lower("t", 512), paths.lower("t", 256)), (Some(256), None));
        paths.lock().get_mut("t").expect("known").found -= REMEMBERED;
        assert_eq!((paths.towards("t"), paths.notes().len()), (u32::MAX, 0));
    }

    /// A task that is aborted may still be noting something: a note of a stream that is closed
    /// would stay.
    #[test]
    fn nothing_is_noted_of_a_closed_stream() {
        let (waiting, stream) = (Waiting::default(), StreamId::default());
        assert!(!waiting.set(stream, "it is not open yet") && waiting.notes().is_empty());
        waiting.enter(stream);
        assert!(waiting.set(stream, "the target is away") && waiting.has(stream));
        assert!(!waiting.set(stream, "the target is away"), "that is no news");
        assert_eq!(waiting.notes(), ["stream 0 waits: the target is away"]);
        waiting.clear(stream);
        assert!(!waiting.has(stream) && waiting.set(stream, "again"));
        waiting.leave(stream);
        waiting.clear(stream);
        assert!(!waiting.set(stream, "too late") && waiting.notes().is_empty());
    }
}
