//! Goodput of one connection under random loss: selective repeat compared with go-back-N.
//!
//! Messages of 1 MiB over a cable of 100 Gbit/s and 10 us, 1 % of all packets lost in either
//! direction. Time is virtual, so the figures are those of the protocol and the same on every
//! machine. `--nocapture` prints the table.

use std::fmt;

use roce::Duration;
use roce::Time;
use roce::device;
use roce::endpoint::{Connect, Mtu, QpConfig};
use roce::verbs::{Access, CqId, Qpn, RecvWr, SendOp, SendWr, SgList, Sge, WcStatus};
use sim::fabric::{Fabric, FabricConfig};
use sim::faults::{Fault, FaultMix};
use sim::graph::Graph;
use sim::link::LinkConfig;
use sim::memory::Phantom;

const MESSAGE_BYTES: u32 = 1 << 20;
const MESSAGES: u64 = 400;
/// The same for go-back-N, which sends much more than it delivers.
const FEW_MESSAGES: u64 = 48;
/// Messages outstanding.
const DEPTH: u64 = 16;
/// Buffers that messages use in turn.
const BUFFERS: u64 = 2 * DEPTH;
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
    window_packets: u32,
    loss_ppm: u32,
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
    fabric: Fabric<Phantom>,
    qpns: [Qpn; 2],
    cqs: [CqId; 2],
    /// Buffers on each side, one per message outstanding.
    buffers: [Sge; 2],
    rkey: u32,
}

fn ends(case: &Case) -> Ends {
    let link = LinkConfig::new(100_000_000_000, Duration::from_micros(10));
    let config = FabricConfig::new(Graph::cable(link), 7);
    let mut fabric = Fabric::new(&config, |_| Phantom);
    fabric.mix = FaultMix::NONE.with(Fault::Loss, case.loss_ppm);
    let len = MESSAGE_BYTES * BUFFERS as u32;
    let made = [0, 1].map(|node| {
        let node = fabric.node_mut(node);
        let region = node.register(1 << 30, len.into(), Access::ALL).unwrap();
        let cq = node.endpoint.create_cq(1024).unwrap();
        let qpn = node.endpoint.create_qp(QpConfig::rc(node.pd, cq, 64, 64)).unwrap();
        (qpn, cq, Sge { addr: region.addr, len: MESSAGE_BYTES, lkey: region.lkey }, region.rkey)
    });
    for (own, peer) in [(0, 1), (1, 0)] {
        let psn = fabric.node(peer).endpoint.query_qp(made[peer as usize].0).unwrap().sq_psn;
        let plain = Connect::new(fabric.path_to(peer), made[peer as usize].0, psn);
        let mode = if case.is_selective { plain.selective() } else { plain };
        let window_packets = case.window_packets;
        // 4 ms: longer than 16 MiB take, which a READ of go-back-N may have to wait for.
        let (endpoint, qpn) = (&mut fabric.node_mut(own).endpoint, made[own as usize].0);
        let local_psn = endpoint.query_qp(qpn).unwrap().sq_psn;
        let connect = Connect { mtu: case.mtu, window_packets, timeout: 10, local_psn, ..mode };
        device::connect(endpoint, Time::ZERO, qpn, &connect).unwrap();
    }
    Ends {
        fabric,
        qpns: [made[0].0, made[1].0],
        cqs: [made[0].1, made[1].1],
        buffers: [made[0].2, made[1].2],
        rkey: made[1].3,
    }
}

impl Ends {
    fn post(&mut self, stream: Stream, number: u64) {
        let offset = number % BUFFERS * u64::from(MESSAGE_BYTES);
        let [own, peer] = self.buffers.map(|sge| Sge { addr: sge.addr + offset, ..sge });
        let list = |sge| SgList::from_iter([sge]);
        let (remote_addr, rkey) = (peer.addr, self.rkey);
        let op = match stream {
            Stream::Write => SendOp::Write { remote_addr, rkey },
            Stream::Send => SendOp::Send,
            Stream::Read => SendOp::Read { remote_addr, rkey },
        };
        let now = self.fabric.now();
        if let Stream::Send = stream {
            let wr = RecvWr { wr_id: 0, sges: list(peer) };
            self.fabric.node_mut(1).endpoint.post_recv(now, self.qpns[1], wr).unwrap();
        }
        let wr = SendWr { op, sges: list(own), signaled: true, ..SendWr::default() };
        self.fabric.node_mut(0).endpoint.post_send(now, self.qpns[0], wr).unwrap();
    }

    fn completed(&mut self) -> u64 {
        let [own, peer] = self.cqs;
        while self.fabric.node_quietly(1).endpoint.poll_cq(peer).is_some() {}
        let mut count = 0;
        while let Some(done) = self.fabric.node_quietly(0).endpoint.poll_cq(own) {
            assert_eq!(done.status, WcStatus::Success);
            count += 1;
        }
        count
    }
}

/// Gbit/s of message bytes.
fn goodput(case: &Case) -> f64 {
    let mut ends = ends(case);
    let (mut posted, mut done) = (0, 0);
    let mut last = Time::ZERO;
    let messages = if case.is_selective { MESSAGES } else { FEW_MESSAGES };
    while done < messages {
        while posted < messages && posted - done < DEPTH {
            ends.post(case.stream, posted);
            posted += 1;
        }
        assert!(ends.fabric.advance(), "{case}: nothing will ever happen");
        let now = ends.completed();
        if now > 0 {
            (done, last) = (done + now, ends.fabric.now());
        }
    }
    (messages * u64::from(MESSAGE_BYTES) * 8) as f64 / last.as_nanos() as f64
}

#[test]
fn one_percent_loss_costs_selective_repeat_less_than_a_fifth() {
    for mtu in [Mtu::M1024, Mtu::M4096] {
        for stream in [Stream::Write, Stream::Send, Stream::Read] {
            let window_packets = 512;
            let case = Case { stream, mtu, is_selective: true, window_packets, loss_ppm: 0 };
            let (whole, lossy) = (goodput(&case), goodput(&Case { loss_ppm: LOSS_PPM, ..case }));
            println!("{case}: {whole:.2} -> {lossy:.2} Gbit/s, {:.1} %", 100.0 * lossy / whole);
            let old = Case { is_selective: false, ..case };
            let (old_whole, old_lossy) =
                (goodput(&old), goodput(&Case { loss_ppm: LOSS_PPM, ..old }));
            let percent = 100.0 * old_lossy / old_whole;
            println!("  {old}: {old_whole:.2} -> {old_lossy:.2} Gbit/s, {percent:.1} %");
            assert!(lossy >= 0.8 * whole, "{case}: {lossy:.2} of {whole:.2} Gbit/s");
            assert!(whole > 0.99 * old_whole, "{case}: {whole:.2}, go-back-N {old_whole:.2}");
        }
    }
}
