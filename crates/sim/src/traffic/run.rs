//! Flows over a simulated network.
//!
//! [`Runner::advance`] starts what is due, moves time to the next event and takes completions,
//! until every flow has arrived or the deadline is reached.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use controls::{CongestionControl, HpccParams};
use roce::device;
use roce::endpoint::{Connect, EndpointConfig, Mtu, QpConfig};
use roce::report::QpProgress;
use roce::verbs::{
    Access, Completion, CqId, MAX_MESSAGE_BYTES, MemoryRegion, Qpn, RecvWr, Reliability, SendOp,
    SendWr, SgList, Sge, VerbsError, WcOpcode, WcStatus,
};
use roce::{Duration, Time};
use thiserror::Error;

use super::failing::{Schedule, TimedFault};
use super::ideal::completion_time;
use super::outcome::{GivenUp, Outcome, Record};
use super::workload::Flow;
use crate::buffer::BufferConfig;
use crate::graph::Graph;
use crate::link::LinkConfig;
use crate::memory::Phantom;
use crate::network::{
    Collector, Islands, Network, NetworkConfig, QueueSample, Rerouting, Watchdog,
};

/// Completions of one instant that a host's queue holds: more than its links can deliver at once.
const QUEUE_DEPTH: u32 = 128;

/// Where every host's memory is, in its own addresses.
const MEMORY_AT: u64 = 1 << 32;

/// A network and how its hosts use it.
#[derive(Clone, Debug)]
pub struct Testbed {
    /// Hosts, switches and links.
    pub graph: Graph,
    /// The buffer of each switch, shared by its ports; `None` for a queue of its own at each link.
    pub buffer: Option<BufferConfig>,
    /// Who reads the watermarks of switches, if anybody.
    pub watermarks: Option<Collector>,
    /// IPv6 instead of IPv4.
    pub ipv6: bool,
    /// RoCEv1: a GRH in place of IP and UDP.
    pub roce_v1: bool,
    /// Path MTU.
    pub mtu: Mtu,
    /// Most unacknowledged packets of a flow.
    pub window_packets: u32,
    /// Loss recovery.
    pub reliability: Reliability,
    /// Local ACK timeout: 4.096 us · 2ⁿ.
    pub timeout: u8,
    /// Retries after timeouts and sequence errors before a connection fails, 0–7.
    pub retry_count: u8,
    /// Congestion control.
    pub congestion: CongestionControl,
    /// What fails, and when.
    pub faults: Vec<TimedFault>,
    /// Whether and when switches find other ways; without faults nothing changes.
    pub rerouting: Option<Rerouting>,
    /// The watchdog of every switch, for links that hold packets back.
    pub watchdog: Option<Watchdog>,
    /// Random seed.
    pub seed: u64,
}

impl Testbed {
    /// The longest round-trip time of a packet and its acknowledgement without queues, roughly.
    pub fn base_rtt(graph: &Graph, mtu: Mtu) -> Duration {
        let packet = u64::from(mtu.bytes()) + 100;
        let both_ways = |link: &LinkConfig| {
            link.delay * 2 + link.serialization(packet) + link.serialization(100)
        };
        graph.longest_path().iter().map(both_ways).fold(Duration::ZERO, |sum, span| sum + span)
    }
}

/// Why a run cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum TrafficError {
    /// A verb was refused.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
}

/// A connection: its queue pair at the sender and at the receiver.
#[derive(Clone, Copy, Debug)]
struct Connection {
    sender: Qpn,
    receiver: Qpn,
    /// Most unacknowledged packets.
    window: u32,
}

/// What a host has for its flows, once it has one.
#[derive(Clone, Copy, Debug)]
struct Host {
    cq: CqId,
    memory: MemoryRegion,
}

/// A run under way.
#[derive(Debug)]
pub struct Runner {
    network: Network<Phantom>,
    testbed: Connecting,
    keeps_connections: bool,
    hosts: Vec<Option<Host>>,
    flows: Vec<Flow>,
    records: Vec<Record>,
    /// By flow: how many of those that it waits for have not arrived.
    waits_for: Vec<u32>,
    /// By flow: those that wait for it.
    followers: Vec<Vec<u32>>,
    /// Flows that wait for their time only, the earliest last.
    to_come: Vec<u32>,
    /// The time for which a wake-up is set.
    woken_for: Option<Time>,
    open: BTreeMap<u32, Connection>,
    idle: BTreeMap<(u32, u32), Vec<Connection>>,
    /// Flows that have neither arrived nor failed.
    left: u32,
    failed: u32,
    sample_every: Option<Duration>,
    samples: Vec<QueueSample>,
    /// Whether flows are sampled beside the queues, and what they said at the same times.
    samples_flows: bool,
    progress: Vec<Vec<(u32, QpProgress)>>,
    /// Samples taken.
    sampled: u64,
    schedule: Schedule,
    /// The time for which a wake-up is set, for faults.
    struck_for: Option<Time>,
    /// Which hosts have ways to each other, since the last fault began or ended.
    islands: Option<Islands>,
}

/// The part of a [`Testbed`] that connections need.
#[derive(Clone, Copy, Debug)]
struct Connecting {
    mtu: Mtu,
    window_packets: u32,
    reliability: Reliability,
    timeout: u8,
    retry_count: u8,
    congestion: CongestionControl,
}

impl Runner {
    /// The flows, which are in order and fit the network, before anything has started.
    pub fn new(testbed: &Testbed, flows: Vec<Flow>, keeps_connections: bool) -> Runner {
        let config = NetworkConfig {
            endpoint: EndpointConfig {
                // As a NIC serves its queue pairs: a packet each.
                burst_packets: 1,
                max_qps: 1 << 16,
                ..EndpointConfig::default()
            },
            buffer: testbed.buffer,
            watermarks: testbed.watermarks,
            ipv6: testbed.ipv6,
            roce_v1: testbed.roce_v1,
            rerouting: testbed.rerouting.filter(|_| !testbed.faults.is_empty()),
            watchdog: testbed.watchdog,
            nic_packets: Some(1),
            ..NetworkConfig::new(testbed.graph.clone(), testbed.seed)
        };
        let config = match testbed.congestion {
            CongestionControl::Hpcc(HpccParams { base_rtt: telemetry_rtt, .. }) => {
                NetworkConfig { telemetry_rtt, ..config }
            }
            _ => config,
        };
        let network = Network::new(&config, |_| Phantom);
        let records = flows.iter().map(|flow| record(&network, testbed.mtu, flow)).collect();
        let mut followers = alloc::vec![Vec::new(); flows.len()];
        for (number, flow) in (0..).zip(&flows) {
            for &before in &flow.after {
                followers[before as usize].push(number);
            }
        }
        let mut to_come: Vec<u32> = (0..flows.len() as u32).collect();
        to_come.retain(|&number| flows[number as usize].after.is_empty());
        to_come.sort_by_key(|&number| core::cmp::Reverse((flows[number as usize].at, number)));
        let &Testbed { mtu, window_packets, reliability, timeout, .. } = testbed;
        let (retry_count, congestion) = (testbed.retry_count, testbed.congestion);
        let reliable =
            Connecting { mtu, window_packets, reliability, timeout, retry_count, congestion };
        Runner {
            testbed: reliable,
            keeps_connections,
            hosts: alloc::vec![None; network.len() as usize],
            waits_for: flows.iter().map(|flow| flow.after.len() as u32).collect(),
            left: flows.len() as u32,
            network,
            flows,
            records,
            followers,
            to_come,
            woken_for: None,
            open: BTreeMap::new(),
            idle: BTreeMap::new(),
            failed: 0,
            sample_every: None,
            samples: Vec::new(),
            samples_flows: false,
            progress: Vec::new(),
            sampled: 0,
            schedule: Schedule::new(&testbed.faults),
            struck_for: None,
            islands: None,
        }
    }

    /// Samples the queues this often, and later less often, so that there are never more than a few
    /// thousand samples.
    pub fn sample_every(&mut self, span: Duration) {
        self.sample_every = Some(span);
        self.network.wake_at(Time::ZERO, SAMPLE);
    }

    /// Where the queues are sampled, samples every flow under way, too: for runs of a few flows.
    pub fn sample_flows(&mut self) {
        self.samples_flows = true;
    }

    /// The present of the simulation.
    pub fn now(&self) -> Time {
        self.network.now()
    }

    /// Flows that have neither arrived nor failed.
    pub fn left(&self) -> u32 {
        self.left
    }

    /// Events so far.
    pub fn events(&self) -> u64 {
        self.network.events_handled() - self.sampled
    }

    /// Goes to the next event; false when nothing is left to do, and at the deadline.
    ///
    /// # Errors
    /// When a verb is refused, which would be a mistake of this module.
    pub fn advance(&mut self, deadline: Time) -> Result<bool, TrafficError> {
        self.strike();
        self.start_due()?;
        // What was posted at this instant has not made its events yet.
        if !self.network.is_settled() {
            self.network.settle_changed();
            self.take_touched()?;
        }
        if self.left == 0 || !self.network.advance_within(deadline) {
            return Ok(false);
        }
        if self.network.wakes().contains(&SAMPLE) {
            self.sample();
        }
        self.take_touched()?;
        Ok(true)
    }

    /// Takes the completions of all hosts that may have some.
    fn take_touched(&mut self) -> Result<(), TrafficError> {
        for place in 0..self.network.touched().len() {
            let host = self.network.touched()[place];
            self.take_completions(host)?;
        }
        Ok(())
    }

    /// What the run has come to.
    pub fn outcome(mut self) -> Outcome {
        let ended = self.records.iter().filter_map(|record| record.arrived).max();
        let ended = if self.left == 0 { ended } else { None };
        let packets = self.network.nodes.iter().map(|node| node.packets());
        let packets = packets.fold([0; 3], |sum, own| [0, 1, 2].map(|at| sum[at] + own[at]));
        if !self.schedule.is_empty() {
            let islands = self.network.islands();
            for record in self.records.iter_mut().filter(|record| record.is_under_way()) {
                record.is_cut = !islands.has_way(record.from, record.to);
            }
        }
        let conduct = self.network.conduct();
        Outcome {
            failed: self.failed,
            ended: ended.unwrap_or(self.network.now()),
            links: self.network.link_reports(),
            packets,
            events: self.events(),
            unrouted: conduct.unrouted,
            reroutes: conduct.reroutes,
            losses: self.network.loss_report().clone(),
            faults: self.schedule.begun,
            deadlock: if self.left > 0 { self.network.find_deadlock() } else { None },
            samples: self.samples,
            progress: self.progress,
            records: self.records,
        }
    }

    // ---- faults --------------------------------------------------------------------------------

    /// Begins and ends the faults whose time has come, and asks to be woken for the next one.
    fn strike(&mut self) {
        if self.schedule.is_empty() {
            return;
        }
        if self.schedule.strike(&mut self.network) {
            self.islands = None;
        }
        let next = self.schedule.next_at();
        if let Some(at) = next.filter(|&at| self.struck_for.replace(at) != Some(at)) {
            self.network.wake_at(at, FAULT);
        }
    }

    // ---- flows ---------------------------------------------------------------------------------

    /// Starts the flows whose time has come, and asks to be woken for the next one.
    fn start_due(&mut self) -> Result<(), TrafficError> {
        let now = self.network.now();
        while let Some(&next) = self.to_come.last() {
            let at = self.flows[next as usize].at;
            if at > now {
                if self.woken_for.replace(at) != Some(at) {
                    self.network.wake_at(at, START);
                }
                break;
            }
            self.to_come.pop();
            self.start(next)?;
        }
        Ok(())
    }

    fn start(&mut self, number: u32) -> Result<(), TrafficError> {
        let Flow { from, to, bytes, .. } = self.flows[number as usize];
        let now = self.network.now();
        let connection = self.connection(from, to, bytes)?;
        self.open.insert(number, connection);
        if !self.schedule.is_empty() {
            self.network.watch(to, connection.receiver);
        }
        self.records[number as usize].started = Some(now);
        let (source, dest) = (self.host(from)?.memory, self.host(to)?.memory);
        let recv = RecvWr { wr_id: number.into(), sges: SgList::new() };
        self.network.node_quietly(to).endpoint.post_recv(now, connection.receiver, recv)?;
        let op = SendOp::WriteImm { remote_addr: dest.addr, rkey: dest.rkey, imm: number };
        let sge = Sge { addr: source.addr, len: bytes as u32, lkey: source.lkey };
        let wr = SendWr {
            wr_id: number.into(),
            op,
            sges: [sge].into_iter().collect(),
            signaled: true,
            ..SendWr::default()
        };
        self.network.node_mut(from).endpoint.post_send(now, connection.sender, wr)?;
        Ok(())
    }

    fn take_completions(&mut self, host: u32) -> Result<(), TrafficError> {
        let Some(Host { cq, .. }) = self.hosts[host as usize] else {
            return Ok(());
        };
        while let Some(done) = self.network.node_quietly(host).endpoint.poll_cq(cq) {
            let number = done.wr_id as u32;
            let Completion { status, opcode, .. } = done;
            match (status, opcode) {
                (WcStatus::Success, WcOpcode::RecvWriteImm) => self.arrived(number)?,
                (WcStatus::Success, _) => self.acknowledged(number)?,
                _ => self.failed(number, status)?,
            }
        }
        Ok(())
    }

    /// The last byte of a flow is there.
    fn arrived(&mut self, number: u32) -> Result<(), TrafficError> {
        self.records[number as usize].arrived = Some(self.network.now());
        self.left -= 1;
        if let Some(connection) = self.open.get(&number).filter(|_| !self.schedule.is_empty()) {
            self.network.end_watch(self.flows[number as usize].to, connection.receiver, true);
        }
        for next in core::mem::take(&mut self.followers[number as usize]) {
            let waits_for = &mut self.waits_for[next as usize];
            *waits_for -= 1;
            if *waits_for == 0 {
                self.start(next)?;
            }
        }
        Ok(())
    }

    /// A flow's sender knows that it has arrived.
    fn acknowledged(&mut self, number: u32) -> Result<(), TrafficError> {
        let Some(connection) = self.open.remove(&number) else {
            return Ok(());
        };
        let Flow { from, to, .. } = self.flows[number as usize];
        if self.keeps_connections {
            self.idle.entry((from, to)).or_default().push(connection);
            return Ok(());
        }
        self.close(from, to, connection)
    }

    /// A flow's connection has ended. Those that wait for it never start.
    fn failed(&mut self, number: u32, status: WcStatus) -> Result<(), TrafficError> {
        let Some(connection) = self.open.remove(&number) else {
            return Ok(());
        };
        let Flow { from, to, .. } = self.flows[number as usize];
        if self.records[number as usize].arrived.is_none() {
            self.left -= 1;
            self.failed += 1;
            let islands = self.islands.get_or_insert_with(|| self.network.islands());
            let record = &mut self.records[number as usize];
            record.gave_up = Some(GivenUp { at: self.network.now(), status });
            record.is_cut = !islands.has_way(from, to);
            self.network.end_watch(to, connection.receiver, false);
        }
        self.close(from, to, connection)
    }

    fn close(&mut self, from: u32, to: u32, connection: Connection) -> Result<(), TrafficError> {
        let now = self.network.now();
        self.network.node_mut(from).endpoint.destroy_qp(now, connection.sender)?;
        self.network.node_mut(to).endpoint.destroy_qp(now, connection.receiver)?;
        Ok(())
    }

    // ---- connections ---------------------------------------------------------------------------

    /// A connection for a flow of so many bytes.
    fn connection(&mut self, from: u32, to: u32, bytes: u64) -> Result<Connection, TrafficError> {
        // What both ends keep grows with the window, and a flow never needs more than its packets.
        let packets = bytes.div_ceil(self.testbed.mtu.bytes().into());
        let packets = u32::try_from(packets).unwrap_or(u32::MAX);
        let window = self.testbed.window_packets.min(packets).max(1);
        // One that a shorter flow has left may be too narrow.
        let idle = self.idle.get_mut(&(from, to)).and_then(|idle| {
            let place = idle.iter().rposition(|one| one.window >= window)?;
            Some(idle.swap_remove(place))
        });
        idle.map_or_else(|| self.connect(from, to, window), Ok)
    }

    fn connect(&mut self, from: u32, to: u32, window: u32) -> Result<Connection, TrafficError> {
        let sender = self.queue_pair(from)?;
        let receiver = self.queue_pair(to)?;
        self.join((from, sender), (to, receiver), window)?;
        self.join((to, receiver), (from, sender), window)?;
        Ok(Connection { sender, receiver, window })
    }

    fn queue_pair(&mut self, host: u32) -> Result<Qpn, TrafficError> {
        let Host { cq, .. } = self.host(host)?;
        let node = self.network.node_quietly(host);
        Ok(node.endpoint.create_qp(QpConfig::rc(node.pd, cq, 1, 1))?)
    }

    /// Connects one end, a queue pair of a host, with the other one.
    fn join(
        &mut self,
        (own, qpn): (u32, Qpn),
        (peer, peer_qpn): (u32, Qpn),
        window_packets: u32,
    ) -> Result<(), TrafficError> {
        let now = self.network.now();
        let remote_psn = self.network.node(peer).endpoint.query_qp(peer_qpn)?.sq_psn;
        let path = self.network.path_to(peer);
        let endpoint = &mut self.network.node_quietly(own).endpoint;
        let Connecting { mtu, reliability, timeout, retry_count, congestion, .. } = self.testbed;
        let connect = Connect {
            local_psn: endpoint.query_qp(qpn)?.sq_psn,
            mtu,
            window_packets,
            reliability,
            timeout,
            retry_count,
            congestion: congestion.into(),
            ..Connect::new(path, peer_qpn, remote_psn)
        };
        Ok(device::connect(endpoint, now, qpn, &connect)?)
    }

    /// A host's queue and memory, created when it is needed first.
    fn host(&mut self, host: u32) -> Result<Host, TrafficError> {
        if let Some(known) = self.hosts[host as usize] {
            return Ok(known);
        }
        let node = self.network.node_quietly(host);
        let memory = node.register(MEMORY_AT, MAX_MESSAGE_BYTES, Access::ALL)?;
        let cq = node.endpoint.create_cq(QUEUE_DEPTH)?;
        let new = Host { cq, memory };
        self.hosts[host as usize] = Some(new);
        Ok(new)
    }

    // ---- samples -------------------------------------------------------------------------------

    /// How far the flows under way have come.
    fn progress_now(&self) -> Vec<(u32, QpProgress)> {
        let pace = |(&number, connection): (&u32, &Connection)| {
            let from = self.flows[number as usize].from;
            Some((number, self.network.node(from).endpoint.progress(connection.sender)?))
        };
        self.open.iter().filter_map(pace).collect()
    }

    fn sample(&mut self) {
        self.sampled += 1;
        // Where nothing else is to happen, samples end, too.
        if self.network.next_at().is_none() {
            return;
        }
        self.samples.push(self.network.queues());
        if self.samples_flows {
            self.progress.push(self.progress_now());
        }
        let Some(span) = self.sample_every else {
            return;
        };
        let mut next = span;
        if self.samples.len() == MOST_SAMPLES {
            // Every second one, from now on at twice the distance.
            keep_every_second(&mut self.samples);
            keep_every_second(&mut self.progress);
            next = span * 2;
            self.sample_every = Some(next);
        }
        self.network.wake_at(self.network.now() + next, SAMPLE);
    }
}

fn keep_every_second<T>(samples: &mut Vec<T>) {
    let mut number = 0;
    samples.retain(|_| {
        number += 1;
        number % 2 == 1
    });
}

/// Most samples of the queues.
const MOST_SAMPLES: usize = 4_096;

/// Tokens of wake-ups.
const START: u32 = 0;
const SAMPLE: u32 = 1;
const FAULT: u32 = 2;

fn record(network: &Network<Phantom>, mtu: Mtu, flow: &Flow) -> Record {
    let path: Vec<LinkConfig> = network.path(flow.from, flow.to);
    let Flow { from, to, bytes, .. } = *flow;
    let ideal = completion_time(&path, bytes, mtu, network.network_bytes());
    let (started, arrived, gave_up, is_cut) = (None, None, None, false);
    Record { from, to, bytes, started, arrived, ideal, gave_up, is_cut }
}
