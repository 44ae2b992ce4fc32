//! Goodput of one connection under random loss: selective repeat compared with go-back-N.
//!
//! Messages of 1 MiB over a cable of 100 Gbit/s and 10 us, 1 % of all packets lost in either
//! direction. Time is virtual, so the figures are those of the protocol and the same on every
//! machine. `--nocapture` prints the table.

use std::fmt;

use controls::{CongestionControl, DelayParams};
use roce::Duration;
use roce::Time;
use roce::device;
use roce::endpoint::{Connect, Mtu, QpConfig};
use roce::verbs::{Access, CqId, Qpn, RecvWr, SendOp, SendWr, SgList, Sge, WcStatus};
use sim::faults::{Fault, FaultMix};
use sim::graph::Graph;
use sim::link::LinkConfig;
use sim::memory::Phantom;
use sim::network::{Network, NetworkConfig};

const LOSS_PPM: u32 = 10_000;

#[derive(Clone, Copy, Debug)]
enum Stream {
    Write,
    Send,
    Read,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    stream: Stream,
    mtu: Mtu,
    is_selective: bool,
    congestion: CongestionControl,
    window_packets: u32,
    loss_ppm: u32,
    message_bytes: u32,
    messages: u64,
    /// Messages outstanding.
    depth: u64,
    /// Buffers that messages use in turn.
    buffers: u64,
}

impl Case {
    /// Messages of 1 MiB, each outstanding one with its own buffer.
    fn new(stream: Stream, mtu: Mtu) -> Case {
        Case {
            stream,
            mtu,
            is_selective: true,
            congestion: CongestionControl::Off,
            window_packets: 512,
            loss_ppm: 0,
            message_bytes: 1 << 20,
            messages: 400,
            depth: 16,
            buffers: 32,
        }
    }

    /// The same in go-back-N, which sends much more than it delivers.
    fn go_back_n(self) -> Case {
        Case { is_selective: false, messages: self.messages / 8, ..self }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mode = if self.is_selective { "selective" } else { "go-back-N" };
        write!(
            f,
            "{:?} mtu {} window {} {mode}",
            self.stream,
            self.mtu.bytes(),
            self.window_packets
        )
    }
}

struct Ends {
    network: Network<Phantom>,
    qpns: [Qpn; 2],
    cqs: [CqId; 2],
    /// Buffers on each side, one per message outstanding.
    buffers: [Sge; 2],
    rkey: u32,
}

fn ends(case: &Case) -> Ends {
    let link = LinkConfig::new(100_000_000_000, Duration::from_micros(10));
    let config = NetworkConfig::new(Graph::cable(link), 7);
    let mut network = Network::new(&config, |_| Phantom);
    network.mix = FaultMix::NONE.with(Fault::Loss, case.loss_ppm);
    let len = u64::from(case.message_bytes) * case.buffers;
    let made = [0, 1].map(|node| {
        let node = network.node_mut(node);
        let region = node.register(1 << 30, len, Access::ALL).unwrap();
        let cq = node.endpoint.create_cq(1024).unwrap();
        let qpn = node.endpoint.create_qp(QpConfig::rc(node.pd, cq, 256, 256)).unwrap();
        (
            qpn,
            cq,
            Sge { addr: region.addr, len: case.message_bytes, lkey: region.lkey },
            region.rkey,
        )
    });
    for (own, peer) in [(0, 1), (1, 0)] {
        let psn = network.node(peer).endpoint.query_qp(made[peer as usize].0).unwrap().sq_psn;
        let plain = Connect::new(network.path_to(peer), made[peer as usize].0, psn);
        let mode = if case.is_selective { plain.selective() } else { plain };
        let window_packets = case.window_packets;
        // 4 ms: longer than 16 MiB take, which a READ of go-back-N may have to wait for.
        let (endpoint, qpn) = (&mut network.node_mut(own).endpoint, made[own as usize].0);
        let local_psn = endpoint.query_qp(qpn).unwrap().sq_psn;
        let congestion = case.congestion.into();
        let connect =
            Connect { mtu: case.mtu, window_packets, timeout: 10, local_psn, congestion, ..mode };
        device::connect(endpoint, Time::ZERO, qpn, &connect).unwrap();
    }
    Ends {
        network,
        qpns: [made[0].0, made[1].0],
        cqs: [made[0].1, made[1].1],
        buffers: [made[0].2, made[1].2],
        rkey: made[1].3,
    }
}

impl Ends {
    fn post(&mut self, case: &Case, number: u64) {
        let Case { stream, message_bytes, buffers, .. } = *case;
        let offset = number % buffers * u64::from(message_bytes);
        let [own, peer] = self.buffers.map(|sge| Sge { addr: sge.addr + offset, ..sge });
        let list = |sge| SgList::from_iter([sge]);
        let (remote_addr, rkey) = (peer.addr, self.rkey);
        let op = match stream {
            Stream::Write => SendOp::Write { remote_addr, rkey },
            Stream::Send => SendOp::Send,
            Stream::Read => SendOp::Read { remote_addr, rkey },
        };
        let now = self.network.now();
        if let Stream::Send = stream {
            let wr = RecvWr { wr_id: 0, sges: list(peer) };
            self.network.node_mut(1).endpoint.post_recv(now, self.qpns[1], wr).unwrap();
        }
        let wr = SendWr { op, sges: list(own), signaled: true, ..SendWr::default() };
        self.network.node_mut(0).endpoint.post_send(now, self.qpns[0], wr).unwrap();
    }

    fn completed(&mut self) -> u64 {
        let [own, peer] = self.cqs;
        while self.network.node_quietly(1).endpoint.poll_cq(peer).is_some() {}
        let mut count = 0;
        while let Some(done) = self.network.node_quietly(0).endpoint.poll_cq(own) {
            assert_eq!(done.status, WcStatus::Success);
            count += 1;
        }
        count
    }
}

/// Gbit/s of message bytes, and request packets and ranges retransmitted.
fn measure(case: &Case) -> (f64, u64) {
    let Case { messages, depth, message_bytes, .. } = *case;
    let mut ends = ends(case);
    let (mut posted, mut done) = (0, 0);
    let mut last = Time::ZERO;
    while done < messages {
        while posted < messages && posted - done < depth {
            ends.post(case, posted);
            posted += 1;
        }
        assert!(ends.network.advance(), "{case}: nothing will ever happen");
        let now = ends.completed();
        if now > 0 {
            (done, last) = (done + now, ends.network.now());
        }
    }
    let bits = (messages * u64::from(message_bytes) * 8) as f64;
    let retransmitted = ends.network.node(0).endpoint.counters().retransmitted_packets;
    (bits / last.as_nanos() as f64, retransmitted)
}

fn goodput(case: &Case) -> f64 {
    measure(case).0
}

#[test]
fn one_percent_loss_costs_selective_repeat_less_than_a_fifth() {
    for mtu in [Mtu::M1024, Mtu::M4096] {
        for stream in [Stream::Write, Stream::Send, Stream::Read] {
            let case = Case::new(stream, mtu);
            let (whole, lossy) = (goodput(&case), goodput(&Case { loss_ppm: LOSS_PPM, ..case }));
            println!("{case}: {whole:.2} -> {lossy:.2} Gbit/s, {:.1} %", 100.0 * lossy / whole);
            let old_whole = goodput(&case.go_back_n());
            assert!(lossy >= 0.8 * whole, "{case}: {lossy:.2} of {whole:.2} Gbit/s");
            assert!(whole > 0.99 * old_whole, "{case}: {whole:.2}, go-back-N {old_whole:.2}");
        }
    }
}

/// Messages of 64 KiB with one buffer on each side, as benchmarks send them.
#[test]
fn messages_that_reuse_one_buffer_keep_their_goodput_under_loss() {
    for stream in [Stream::Write, Stream::Send, Stream::Read] {
        let case = Case {
            message_bytes: 1 << 16,
            messages: 1_000,
            depth: 128,
            buffers: 1,
            ..Case::new(stream, Mtu::M1024)
        };
        let (whole, _) = measure(&case);
        for (loss_ppm, least) in [(1_000, 0.9), (10_000, 0.8), (30_000, 0.6)] {
            let lossy = Case { loss_ppm, ..case };
            let (rate, retransmitted) = measure(&lossy);
            let (old, _) = measure(&lossy.go_back_n());
            let loss = f64::from(loss_ppm) / 10_000.0;
            println!(
                "{case} loss {loss} %: {:.3} of {whole:.2} Gbit/s, {retransmitted} retransmitted; \
                 go-back-N {old:.2} Gbit/s",
                rate / whole
            );
            assert!(rate >= least * whole, "{lossy}: {rate:.2} of {whole:.2} Gbit/s");
            assert!(rate >= old, "{lossy}: {rate:.2}, go-back-N {old:.2} Gbit/s");
            // 64,000 packets; a lost packet is retransmitted until it arrives.
            let most = 64_000 * u64::from(loss_ppm) / 1_000_000 * 3 / 2;
            assert!(retransmitted <= most, "{lossy}: {retransmitted} retransmitted, not {most}");
        }
    }
}

/// Losses on a link without a queue are not congestion.
#[test]
fn delay_based_control_costs_no_goodput_on_a_link_that_only_loses() {
    for stream in [Stream::Write, Stream::Read] {
        for loss_ppm in [1_000, 30_000] {
            let case = Case { loss_ppm, messages: 100, ..Case::new(stream, Mtu::M4096) };
            let congestion = CongestionControl::Delay(DelayParams::DEFAULT);
            let (free, held) = (goodput(&case), goodput(&Case { congestion, ..case }));
            println!("{case} loss {loss_ppm} ppm: {free:.2}, with control {held:.2} Gbit/s");
            assert!(held >= 0.98 * free, "{case} loss {loss_ppm} ppm: {held:.2} of {free:.2}");
        }
    }
}
