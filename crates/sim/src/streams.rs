//! Streams for measurements: one side WRITEs continuously to the other.
//!
//! Payload is phantom: measurements concern packets, time and queues. A stream keeps a number of
//! messages posted, so that its window, its rate limit or the network limits it and never its
//! program.

#[cfg(test)]
mod failing;
#[cfg(test)]
mod governed;
#[cfg(test)]
mod told;

use alloc::vec::Vec;

use roce::Time;
use roce::device;
use roce::endpoint::{Connect, QpConfig};
use roce::verbs::{Access, CqId, MemoryRegion, Qpn, SendOp, SendWr, Sge, VerbsError, WcStatus};

use crate::memory::Phantom;
use crate::network::Network;

/// Messages posted and not completed.
const DEPTH: u32 = 32;

/// Why a measurement did not finish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamError {
    /// A verb was refused.
    Verbs(VerbsError),
    /// A stream ended, with this status.
    Ended(WcStatus),
}

impl core::fmt::Display for StreamError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            StreamError::Verbs(error) => error.fmt(f),
            StreamError::Ended(status) => write!(f, "a stream ended with {status:?}"),
        }
    }
}

impl core::error::Error for StreamError {}

impl From<VerbsError> for StreamError {
    fn from(error: VerbsError) -> StreamError {
        StreamError::Verbs(error)
    }
}

/// One stream of WRITEs.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) from: u32,
    to: u32,
    qpn: Qpn,
    peer_qpn: Qpn,
    cq: CqId,
    local: MemoryRegion,
    remote: MemoryRegion,
    outstanding: u32,
}

impl Stream {
    /// Connects two nodes; `adjust` gets the attributes of both sides before they are used.
    pub(crate) fn open(
        network: &mut Network<Phantom>,
        from: u32,
        to: u32,
        message_bytes: u64,
        adjust: impl Fn(&mut Connect),
    ) -> Result<Stream, StreamError> {
        let now = network.now();
        let (cq, qpn, local) = end(network, from, message_bytes)?;
        let (_, peer_qpn, remote) = end(network, to, message_bytes)?;
        for (own, own_qpn, peer, peer_qpn) in [(from, qpn, to, peer_qpn), (to, peer_qpn, from, qpn)]
        {
            let psn = network.node(peer).endpoint.query_qp(peer_qpn)?.sq_psn;
            let connect = Connect::new(network.path_to(peer), peer_qpn, psn);
            let endpoint = &mut network.node_mut(own).endpoint;
            let local_psn = endpoint.query_qp(own_qpn)?.sq_psn;
            let mut connect = Connect { local_psn, ..connect };
            adjust(&mut connect);
            device::connect(endpoint, now, own_qpn, &connect)?;
        }
        Ok(Stream { from, to, qpn, peer_qpn, cq, local, remote, outstanding: 0 })
    }

    /// Polls completions and posts as many new messages.
    pub(crate) fn turn(&mut self, network: &mut Network<Phantom>) -> Result<(), StreamError> {
        while let Some(done) = network.node_quietly(self.from).endpoint.poll_cq(self.cq) {
            if done.status != WcStatus::Success {
                return Err(StreamError::Ended(done.status));
            }
            self.outstanding -= 1;
        }
        if self.outstanding == DEPTH {
            return Ok(());
        }
        let now = network.now();
        let endpoint = &mut network.node_mut(self.from).endpoint;
        while self.outstanding < DEPTH {
            let MemoryRegion { addr, len, lkey, .. } = self.local;
            let (remote_addr, rkey) = (self.remote.addr, self.remote.rkey);
            let wr = SendWr {
                op: SendOp::Write { remote_addr, rkey },
                sges: [Sge { addr, len: len as u32, lkey }].into_iter().collect(),
                signaled: true,
                ..SendWr::default()
            };
            endpoint.post_send(now, self.qpn, wr)?;
            self.outstanding += 1;
        }
        Ok(())
    }

    /// Whether it has messages posted: it has started.
    pub(crate) fn is_busy(&self) -> bool {
        self.outstanding > 0
    }

    /// Payload bytes that have arrived in order.
    pub(crate) fn arrived(&self, network: &Network<Phantom>) -> u64 {
        let counters = network.node(self.to).endpoint.qp_counters(self.peer_qpn);
        counters.map_or(0, |counters| counters.bytes_received)
    }
}

fn end(
    network: &mut Network<Phantom>,
    node: u32,
    bytes: u64,
) -> Result<(CqId, Qpn, MemoryRegion), VerbsError> {
    let entry = network.node_mut(node);
    let region = entry.register(1 << 32, bytes, Access::ALL)?;
    let cq = entry.endpoint.create_cq(2 * DEPTH)?;
    let qpn = entry.endpoint.create_qp(QpConfig::rc(entry.pd, cq, DEPTH, 1))?;
    Ok((cq, qpn, region))
}

/// Runs the streams until this time.
pub(crate) fn run_until(
    network: &mut Network<Phantom>,
    streams: &mut [Stream],
    until: Time,
) -> Result<(), StreamError> {
    streams.iter_mut().try_for_each(|stream| stream.turn(network))?;
    network.wake_at(until, 0);
    let mut touched = Vec::new();
    while network.now() < until && network.advance() {
        touched.clear();
        touched.extend_from_slice(network.touched());
        for stream in streams.iter_mut().filter(|stream| touched.contains(&stream.from)) {
            stream.turn(network)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use roce::Duration;

    use crate::graph::Graph;
    use crate::link::{LinkConfig, Vertex};
    use crate::network::NetworkConfig;

    /// Payload bytes that two streams get over a trunk of 10 Gbit/s in 4 ms; the second with this
    /// DSCP.
    fn over_trunk(dscp: u8) -> [u64; 2] {
        use Vertex::{Node, Switch};
        let delay = Duration::from_micros(1);
        let edge = LinkConfig::new(25_000_000_000, delay);
        let trunk = LinkConfig { classes: 2, ..LinkConfig::new(10_000_000_000, delay) };
        let joins = [
            (Node(0), Switch(0)),
            (Node(1), Switch(0)),
            (Node(2), Switch(1)),
            (Node(3), Switch(1)),
        ];
        let graph = Graph::new(4, 2).join(Switch(0), Switch(1), trunk, trunk);
        let graph = joins.into_iter().fold(graph, |graph, (a, b)| graph.join(a, b, edge, edge));
        let config = NetworkConfig::new(graph, 1);
        let mut network = Network::new(&config, |_| Phantom);
        let mut streams = [(0, 2, 0), (1, 3, dscp)].map(|(from, to, dscp)| {
            let adjust = |connect: &mut Connect| connect.path.dscp = dscp;
            Stream::open(&mut network, from, to, 1 << 16, adjust).unwrap()
        });
        run_until(&mut network, &mut streams, Time::from_nanos(4_000_000)).unwrap();
        streams.each_ref().map(|stream| stream.arrived(&network))
    }

    #[test]
    fn streams_share_a_trunk_and_the_higher_class_goes_first() {
        let [a, b] = over_trunk(0);
        // 10 Gbit/s are 5 MB in 4 ms, headers and framing included.
        assert!((4_400_000..4_900_000).contains(&(a + b)) && a.abs_diff(b) < 500_000, "{a} {b}");
        let [a, b] = over_trunk(40);
        assert!(b > 4_300_000 && a < 400_000, "{a} {b}");
    }
}
