//! Connections of many tenants at once, each with its DSCP: backlogged, in bursts, or with so many
//! bytes to send.
//!
//! [`Tenants`] holds a network and connections from host to host. A connection WRITEs what it is
//! told to, in messages of [`MESSAGE_BYTES`], and keeps a few of them posted, so that its window,
//! its rate or the network limits it. Payload is phantom. What has arrived is counted at the
//! receiver, and [`Tenants::wire_bytes`] says what that took on a link.

use alloc::vec::Vec;

use controls::CongestionControl;
use roce::device;
use roce::endpoint::{Connect, EndpointConfig, QpConfig};
use roce::verbs::{
    Access, CqId, MemoryRegion, Mtu, Qpn, Reliability, SendOp, SendWr, Sge, WcStatus,
};
use roce::wire::ICRC_BYTES;
use roce::{Duration, Time};

use crate::memory::Phantom;
use crate::network::{Network, NetworkConfig};
use crate::packet::ETHERNET_BYTES;
use crate::streams::StreamError;

/// Bytes of a message.
pub const MESSAGE_BYTES: u64 = 1 << 16;

/// Messages of a connection that are posted and not completed.
const DEPTH: u32 = 8;

/// Completions that a host's queue holds: more than can come at one instant.
const QUEUE_DEPTH: u32 = 1 << 13;

/// Where every host's memory is, in its own addresses.
const MEMORY_AT: u64 = 1 << 32;

/// BTH, and RETH: of the first packet of a message, and of every packet with selective repeat.
const BTH_BYTES: u64 = 12;
const RETH_BYTES: u64 = 16;

/// How every connection sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transport {
    /// Path MTU.
    pub mtu: Mtu,
    /// Most unacknowledged packets of a connection.
    pub window_packets: u32,
    /// Loss recovery.
    pub reliability: Reliability,
    /// Congestion control.
    pub congestion: CongestionControl,
}

/// A connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// The sending host.
    pub from: u32,
    /// The receiving host.
    pub to: u32,
    /// That of its packets, acknowledgements among them.
    pub dscp: u8,
}

/// A connection and what it has to send.
#[derive(Clone, Copy, Debug)]
struct Line {
    pair: Pair,
    qpn: Qpn,
    peer_qpn: Qpn,
    /// Bytes to be posted; `None` if there are always more.
    owed: Option<u64>,
    outstanding: u32,
    /// Since when it has something to send, and how long it had before.
    busy_since: Option<Time>,
    busy: Duration,
}

impl Line {
    fn is_done(&self) -> bool {
        self.owed == Some(0) && self.outstanding == 0
    }

    fn note(&mut self, now: Time) {
        match self.busy_since {
            None if !self.is_done() => self.busy_since = Some(now),
            Some(since) if self.is_done() => {
                self.busy = self.busy + now.since(since);
                self.busy_since = None;
            }
            _ => {}
        }
    }
}

/// What a host has for its connections.
#[derive(Clone, Copy, Debug)]
struct Host {
    cq: CqId,
    memory: MemoryRegion,
}

/// See the module's text.
#[derive(Debug)]
pub struct Tenants {
    network: Network<Phantom>,
    transport: Transport,
    hosts: Vec<Option<Host>>,
    lines: Vec<Line>,
    finished: Vec<u32>,
}

impl Tenants {
    /// A network without connections. Endpoints serve their queue pairs a packet each, as a NIC
    /// does.
    pub fn new(config: &NetworkConfig, transport: Transport) -> Tenants {
        let endpoint = EndpointConfig { burst_packets: 1, max_qps: 1 << 16, ..config.endpoint };
        let network = Network::new(&NetworkConfig { endpoint, ..config.clone() }, |_| Phantom);
        let hosts = alloc::vec![None; network.len() as usize];
        Tenants { network, transport, hosts, lines: Vec::new(), finished: Vec::new() }
    }

    /// The network.
    pub fn network(&mut self) -> &mut Network<Phantom> {
        &mut self.network
    }

    /// The present.
    pub fn now(&self) -> Time {
        self.network.now()
    }

    /// Connects two hosts, which are not the same, and returns the connection's number. It has
    /// nothing to send.
    ///
    /// # Errors
    /// When a verb is refused: there are too many connections.
    pub fn connect(&mut self, pair: Pair) -> Result<u32, StreamError> {
        let [(qpn, psn), (peer_qpn, peer_psn)] = {
            let mut queue_pair = |host| -> Result<_, StreamError> {
                let Host { cq, .. } = self.host(host)?;
                let node = self.network.node_quietly(host);
                let config = QpConfig::rc(node.pd, cq, DEPTH, 1);
                let qpn = node.endpoint.create_qp(config)?;
                Ok((qpn, node.endpoint.query_qp(qpn)?.sq_psn))
            };
            [queue_pair(pair.from)?, queue_pair(pair.to)?]
        };
        let Transport { mtu, window_packets, reliability, congestion } = self.transport;
        let now = self.network.now();
        for (own, qpn, local_psn, peer, peer_qpn, remote_psn) in [
            (pair.from, qpn, psn, pair.to, peer_qpn, peer_psn),
            (pair.to, peer_qpn, peer_psn, pair.from, qpn, psn),
        ] {
            let mut path = self.network.path_to(peer);
            path.dscp = pair.dscp;
            let connect = Connect {
                local_psn,
                mtu,
                window_packets,
                reliability,
                congestion: congestion.into(),
                ..Connect::new(path, peer_qpn, remote_psn)
            };
            device::connect(&mut self.network.node_quietly(own).endpoint, now, qpn, &connect)?;
        }
        let (owed, outstanding, busy) = (Some(0), 0, Duration::ZERO);
        self.lines.push(Line { pair, qpn, peer_qpn, owed, outstanding, busy_since: None, busy });
        Ok(self.lines.len() as u32 - 1)
    }

    /// A host's queue and memory, created when it is needed first.
    fn host(&mut self, host: u32) -> Result<Host, StreamError> {
        if let Some(known) = self.hosts[host as usize] {
            return Ok(known);
        }
        let node = self.network.node_quietly(host);
        let memory = node.register(MEMORY_AT, MESSAGE_BYTES, Access::ALL)?;
        let cq = node.endpoint.create_cq(QUEUE_DEPTH)?;
        let new = Host { cq, memory };
        self.hosts[host as usize] = Some(new);
        Ok(new)
    }

    /// Lets a connection always have something to send, or no more than what is posted.
    ///
    /// # Errors
    /// When its connection has ended.
    pub fn set_backlogged(&mut self, line: u32, is_backlogged: bool) -> Result<(), StreamError> {
        self.lines[line as usize].owed = if is_backlogged { None } else { Some(0) };
        self.post(line)
    }

    /// Gives a connection so many more bytes to send; it is in [`finished`](Tenants::finished) when
    /// all are acknowledged.
    ///
    /// # Errors
    /// When its connection has ended.
    pub fn send(&mut self, line: u32, bytes: u64) -> Result<(), StreamError> {
        let owed = &mut self.lines[line as usize].owed;
        *owed = owed.map(|owed| owed.saturating_add(bytes));
        self.post(line)
    }

    /// Posts messages up to the depth.
    fn post(&mut self, line: u32) -> Result<(), StreamError> {
        let now = self.network.now();
        let entry = &mut self.lines[line as usize];
        while entry.outstanding < DEPTH && entry.owed != Some(0) {
            let bytes = entry.owed.unwrap_or(MESSAGE_BYTES).min(MESSAGE_BYTES);
            let host = |host: u32| self.hosts[host as usize].map(|host| host.memory);
            let (Some(local), Some(remote)) = (host(entry.pair.from), host(entry.pair.to)) else {
                return Ok(());
            };
            let op = SendOp::Write { remote_addr: remote.addr, rkey: remote.rkey };
            let sge = Sge { addr: local.addr, len: bytes as u32, lkey: local.lkey };
            let sges = [sge].into_iter().collect();
            let wr = SendWr { wr_id: line.into(), op, sges, signaled: true, ..SendWr::default() };
            self.network.node_mut(entry.pair.from).endpoint.post_send(now, entry.qpn, wr)?;
            entry.outstanding += 1;
            entry.owed = entry.owed.map(|owed| owed - bytes);
        }
        entry.note(now);
        Ok(())
    }

    /// Goes to the next event, at most to `until`, and takes completions; false if there is none
    /// before.
    ///
    /// # Errors
    /// When a connection has ended.
    pub fn advance(&mut self, until: Time) -> Result<bool, StreamError> {
        self.finished.clear();
        if !self.network.advance_within(until) {
            return Ok(false);
        }
        for place in 0..self.network.touched().len() {
            let host = self.network.touched()[place];
            self.take_completions(host)?;
        }
        Ok(true)
    }

    fn take_completions(&mut self, host: u32) -> Result<(), StreamError> {
        let Some(Host { cq, .. }) = self.hosts[host as usize] else {
            return Ok(());
        };
        while let Some(done) = self.network.node_quietly(host).endpoint.poll_cq(cq) {
            if done.status != WcStatus::Success {
                return Err(StreamError::Ended(done.status));
            }
            let line = done.wr_id as u32;
            self.lines[line as usize].outstanding -= 1;
            self.post(line)?;
            if self.lines[line as usize].is_done() {
                self.finished.push(line);
            }
        }
        Ok(())
    }

    /// Connections whose last byte was acknowledged in the last [`advance`](Tenants::advance).
    pub fn finished(&self) -> &[u32] {
        &self.finished
    }

    /// Runs until this time.
    ///
    /// # Errors
    /// When a connection has ended.
    pub fn run_until(&mut self, until: Time) -> Result<(), StreamError> {
        self.network.wake_at(until, 0);
        while self.network.now() < until && self.advance(until)? {}
        Ok(())
    }

    /// A connection.
    pub fn pair(&self, line: u32) -> Pair {
        self.lines[line as usize].pair
    }

    /// Payload bytes of a connection that have arrived.
    pub fn arrived(&self, line: u32) -> u64 {
        let Line { pair, peer_qpn, .. } = self.lines[line as usize];
        let counters = self.network.node(pair.to).endpoint.qp_counters(peer_qpn);
        counters.map_or(0, |counters| counters.bytes_received)
    }

    /// How long a connection has had something to send, up to now.
    pub fn busy(&self, line: u32) -> Duration {
        let Line { busy, busy_since, .. } = self.lines[line as usize];
        busy_since.map_or(busy, |since| busy + self.network.now().since(since))
    }

    /// Bytes that so much payload takes on a link: headers, Ethernet's preamble and the gap between
    /// frames among them.
    pub fn wire_bytes(&self, payload: u64) -> u64 {
        let around = u64::from(self.network.network_bytes() + ETHERNET_BYTES);
        let each = around + BTH_BYTES + ICRC_BYTES as u64;
        let packets = payload.div_ceil(self.transport.mtu.bytes().into());
        let with_address = match self.transport.reliability {
            Reliability::Selective => packets,
            Reliability::GoBackN => payload.div_ceil(MESSAGE_BYTES),
        };
        payload + packets * each + with_address * RETH_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Graph;
    use crate::link::LinkConfig;

    fn tenants(reliability: Reliability) -> Tenants {
        let link = LinkConfig::new(10_000_000_000, Duration::from_micros(1));
        let config = NetworkConfig::new(Graph::star(3, link, link), 1);
        let transport = Transport {
            mtu: Mtu::M4096,
            window_packets: 64,
            reliability,
            congestion: CongestionControl::Off,
        };
        Tenants::new(&config, transport)
    }

    #[test]
    fn what_arrives_took_as_many_bytes_on_the_link_as_is_said() {
        for reliability in [Reliability::Selective, Reliability::GoBackN] {
            let mut tenants = tenants(reliability);
            let line = tenants.connect(Pair { from: 1, to: 0, dscp: 8 }).unwrap();
            tenants.send(line, 10 << 20).unwrap();
            tenants.run_until(Time::from_nanos(50_000_000)).unwrap();
            assert_eq!(tenants.arrived(line), 10 << 20);
            let sent = tenants.network().ingress_stats(0).sent_bytes;
            assert_eq!(tenants.wire_bytes(10 << 20), sent);
            // 8.6 ms at 10 Gbit/s.
            let busy = tenants.busy(line).as_nanos();
            assert!((8_500_000..8_800_000).contains(&busy), "{busy}");
        }
    }

    #[test]
    fn a_backlogged_connection_stops_when_told_and_says_when_it_is_done() {
        let mut tenants = tenants(Reliability::Selective);
        let line = tenants.connect(Pair { from: 1, to: 2, dscp: 8 }).unwrap();
        tenants.set_backlogged(line, true).unwrap();
        tenants.run_until(Time::from_nanos(2_000_000)).unwrap();
        assert!(tenants.arrived(line) > 2_200_000, "{}", tenants.arrived(line));
        tenants.set_backlogged(line, false).unwrap();
        let mut finished = Vec::new();
        while tenants.advance(Time::from_nanos(9_000_000)).unwrap() {
            finished.extend_from_slice(tenants.finished());
        }
        assert_eq!(finished, [line]);
        let all = tenants.arrived(line);
        assert!(all.is_multiple_of(MESSAGE_BYTES) && all < 2_500_000 + 9 * MESSAGE_BYTES, "{all}");
    }
}
