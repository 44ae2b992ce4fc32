//! Congestion control of queue pairs: marked packets trigger notifications, and notifications slow
//! the sender down. The test carries packets by hand, so that each can be marked.

use core::num::NonZeroU64;
use std::net::SocketAddr;

use controls::{CongestionControl, DcqcnParams, DelayParams};
use roce::congestion::watermark::WatermarkError;
use roce::congestion::{AdvertisedParams, Watermark};
use roce::endpoint::{AttrMask, Endpoint, QpAttr, QpState, Reliability, TimeoutReason, Transmit};
use roce::verbs::{Access, MemoryRegion, Qpn, SendOp, SendWr, Sge};
use roce::wire::{Headers, Opcode, Psn};
use roce::world::{Ecn, Origin};
use roce::{Duration, Time};

use crate::harness::{BASE, End, Network, NetworkConfig};

const LINE_BPS: u64 = 10_000_000_000;
const MESSAGE_BYTES: u32 = 400_000;
/// Headers and ICRC of a middle packet over IPv4, and its payload.
const PACKET_BITS: u64 = 8 * (28 + 12 + 4 + 1024);

struct Pair {
    network: Network,
    ends: [End; 2],
    source: MemoryRegion,
    target: MemoryRegion,
}

fn pair(congestion: CongestionControl) -> Pair {
    let mut network = Network::new(&NetworkConfig::default());
    let (a, b) = network.pair(|connect| {
        connect.congestion = congestion.into();
        connect.window_packets = 10_000;
        connect.timeout = 0;
    });
    let [source, target] = [0, 1]
        .map(|node| network.nodes[node].register(BASE, MESSAGE_BYTES.into(), Access::ALL).unwrap());
    Pair { network, ends: [a, b], source, target }
}

impl Pair {
    fn endpoint(&mut self, side: usize) -> &mut Endpoint {
        &mut self.network.nodes[side].endpoint
    }

    /// Side 0 writes to side 1.
    fn write(&mut self) {
        self.write_bytes(MESSAGE_BYTES);
    }

    fn write_bytes(&mut self, len: u32) {
        let sge = Sge { addr: self.source.addr, len, lkey: self.source.lkey };
        let op = SendOp::Write { remote_addr: self.target.addr, rkey: self.target.rkey };
        let wr = SendWr { op, sges: [sge].into_iter().collect(), ..SendWr::default() };
        let qpn = self.ends[0].qpn;
        self.endpoint(0).post_send(Time::ZERO, qpn, wr).unwrap();
    }

    /// Everything that a side sends at `now`.
    fn sent(&mut self, side: usize, now: Time) -> Vec<Transmit> {
        let endpoint = self.endpoint(side);
        endpoint.handle_timeout(now);
        std::iter::from_fn(|| endpoint.poll_transmit(now)).collect()
    }

    /// Limits the rate of side 0; 0 for no limit.
    fn limit(&mut self, now: Time, rate_limit_bps: u64) {
        let mask = AttrMask::STATE | AttrMask::RATE_LIMIT;
        let attr = QpAttr { mask, rate_limit_bps, ..QpAttr::to(QpState::Rts) };
        let qpn = self.ends[0].qpn;
        self.endpoint(0).modify_qp(now, qpn, &attr).unwrap();
    }

    fn deliver(&mut self, to: usize, now: Time, packet: &Transmit, ecn: Ecn) {
        let from = SocketAddr::new(self.network.nodes[1 - to].ip(), 49_152);
        let origin = Origin { ecn, ..Origin::new(from, self.network.nodes[to].ip()) };
        let len = packet.payload_len();
        let _ = self.endpoint(to).handle_packet(now, &origin, &packet.headers, len);
    }

    fn rate(&mut self) -> Option<u64> {
        let qpn = self.ends[0].qpn;
        self.endpoint(0).qp_rate_bps(qpn)
    }
}

fn at(micros: u64) -> Time {
    Time::ZERO + Duration::from_micros(micros)
}

fn is_cnp(packet: &Transmit) -> bool {
    packet.headers.bth().opcode == Opcode::Cnp
}

#[test]
fn marked_packets_are_answered_by_notifications_at_their_interval() {
    let mut pair = pair(CongestionControl::Off);
    pair.write();
    let packets = pair.sent(0, at(0));
    assert!(packets.len() > 300 && packets.iter().all(|p| p.path.ecn == Ecn::Ect0));
    let mut notified = Vec::new();
    for (us, packet) in packets.iter().enumerate() {
        let now = at(1_000 + us as u64);
        let ecn = if us % 2 == 0 { Ecn::Ce } else { Ecn::Ect0 };
        pair.deliver(1, now, packet, ecn);
        notified.extend(pair.sent(1, now).into_iter().filter(is_cnp).map(|cnp| (us, cnp)));
    }
    let at_us: Vec<usize> = notified.iter().map(|&(us, _)| us).collect();
    assert_eq!(at_us, (0..packets.len()).step_by(50).collect::<Vec<_>>());
    for (_, cnp) in &notified {
        let bth = cnp.headers.bth();
        assert!(bth.becn && !bth.ack_req && bth.psn == Psn::new(0));
        assert_eq!((bth.dest_qp, cnp.payload_len()), (pair.ends[0].qpn, 0));
        assert_eq!((cnp.path.dscp, cnp.path.ecn), (48, Ecn::NotEct));
    }
    let counters = *pair.endpoint(1).counters();
    assert_eq!(counters.cnps_sent, notified.len() as u64);
    assert_eq!(counters.ecn_marked, packets.len().div_ceil(2) as u64);
}

/// The interval counts from when a notification leaves, which back-pressure may delay.
#[test]
fn a_notification_that_leaves_late_delays_the_next() {
    let mut pair = pair(CongestionControl::Off);
    pair.write();
    let packets = pair.sent(0, at(0));
    let mut notified = Vec::new();
    for (packet, us) in packets.iter().zip([1_000, 1_040, 1_050, 1_089, 1_090]) {
        pair.deliver(1, at(us), packet, Ecn::Ce);
        // The first waits until the second arrives.
        if us > 1_000 {
            notified.extend(pair.sent(1, at(us)).iter().filter(|cnp| is_cnp(cnp)).map(|_| us));
        }
    }
    assert_eq!(notified, [1_040, 1_090]);
}

/// A fixed rate, exact to the packet: for the duration of a message, and for the time of the next
/// one.
#[test]
fn packets_leave_at_the_rate_and_no_sooner() {
    let mut pair = pair(CongestionControl::Fixed(LINE_BPS));
    pair.write();
    let start = at(1_000);
    let mut now = start;
    let mut times = Vec::new();
    loop {
        times.extend(pair.sent(0, now).iter().map(|_| now));
        let Some((next, reason)) = pair.endpoint(0).poll_timeout() else {
            break;
        };
        assert_eq!(reason, TimeoutReason::Pacing);
        assert!(next > now);
        now = next;
    }
    assert_eq!(times.len() as u32, MESSAGE_BYTES.div_ceil(1024));
    // Nothing is saved up while idle.
    for pair in times.windows(2) {
        let gap = (pair[1] - pair[0]).as_nanos();
        let exact = PACKET_BITS * 1_000_000_000 / LINE_BPS;
        assert!(gap.abs_diff(exact) <= 2 + 16 * 8 / 10, "{gap} ns");
    }
    assert!(pair.endpoint(0).counters().paced_packets > 300);
}

/// A driver that is late sends at once what the rate yields in 20 us, and no more than that.
#[test]
fn late_drivers_catch_up_on_a_little() {
    let mut pair = pair(CongestionControl::Fixed(LINE_BPS));
    pair.write();
    let start = at(1_000);
    assert_eq!(pair.sent(0, start).len(), 1);
    let late = pair.sent(0, at(1_100)).len() as u64;
    assert_eq!(late, 20_000 * LINE_BPS / 1_000_000_000 / PACKET_BITS + 1);
    assert_eq!(pair.sent(0, at(1_100)).len(), 0);
}

#[test]
fn notifications_slow_the_sender_and_it_recovers() {
    let mut pair = pair(CongestionControl::Dcqcn(DcqcnParams::uet(LINE_BPS)));
    pair.write();
    let first = pair.sent(0, at(1_000)).remove(0);
    assert_eq!(pair.rate(), Some(LINE_BPS));
    pair.deliver(1, at(1_010), &first, Ecn::Ce);
    let cnp = pair.sent(1, at(1_010)).into_iter().find(is_cnp).expect("a notification");
    pair.deliver(0, at(1_020), &cnp, Ecn::NotEct);
    assert_eq!(pair.rate(), Some(LINE_BPS / 2));
    assert_eq!(pair.endpoint(0).counters().cnps_received, 1);
    // 55 us later half of the difference is made up.
    let _ = pair.sent(0, at(1_075));
    assert_eq!(pair.rate(), Some(LINE_BPS * 3 / 4));
    let _ = pair.sent(0, at(10_000));
    assert_eq!(pair.rate(), Some(LINE_BPS));
}

/// Forging notifications requires the peer's address and the queue pair number, no PSN. The sender
/// then has its minimum rate for as long as they arrive, and is back at line rate soon after.
#[test]
fn forged_notifications_cost_speed_while_they_come_and_for_a_while_after() {
    let mut off = pair(CongestionControl::Off);
    type Variant = fn(u64) -> DcqcnParams;
    let variants: [(Variant, u64); 3] =
        [(DcqcnParams::mlnx, 10_200), (DcqcnParams::paper, 1_900), (DcqcnParams::uet, 3_000)];
    for (variant, recovered_us) in variants {
        let params = variant(LINE_BPS);
        let mut pair = pair(CongestionControl::Dcqcn(params));
        pair.write();
        let first = pair.sent(0, at(0)).remove(0);
        pair.deliver(1, at(0), &first, Ecn::Ce);
        let cnp = pair.sent(1, at(0)).into_iter().find(is_cnp).expect("a notification");
        for us in 0..20_000 {
            pair.deliver(0, at(us), &cnp, Ecn::NotEct);
            assert!(pair.rate() >= Some(params.min_bps));
        }
        assert_eq!(pair.rate(), Some(params.min_bps), "{}", params.name);
        let back = (20_000..).step_by(100).find(|&us| {
            pair.endpoint(0).handle_timeout(at(us));
            pair.rate() == Some(LINE_BPS)
        });
        let after = Duration::from_micros(back.expect("it recovers") - 20_000);
        assert_eq!(after, Duration::from_micros(recovered_us), "{}", params.name);
        off.deliver(0, at(0), &cnp, Ecn::NotEct);
        assert!(off.endpoint(0).counters().cnps_received > 0);
        assert_eq!(off.rate(), None, "without congestion control they change nothing");
    }
}

/// Forged or not, marked packets trigger at most one notification in 50 us, whatever their PSN.
#[test]
fn forged_marks_are_no_amplifier() {
    let mut pair = pair(CongestionControl::Off);
    pair.write();
    let mut packet = pair.sent(0, at(0)).remove(0);
    let mut sent = 0;
    for us in 0..10_000_u32 {
        let mut bth = *packet.headers.bth();
        bth.psn = Psn::new(us.wrapping_mul(0x9e37_79b9));
        packet.headers = Headers::new(bth, *packet.headers.ext()).unwrap();
        pair.deliver(1, at(us.into()), &packet, Ecn::Ce);
        sent += pair.sent(1, at(us.into())).iter().filter(|packet| is_cnp(packet)).count();
    }
    assert_eq!(sent, 10_000 / 50);
}

/// Acknowledgements are not held back by the rate of the data going the same way.
#[test]
fn answers_do_not_wait_for_the_rate() {
    let mut pair = pair(CongestionControl::Fixed(1_000_000));
    pair.write();
    let first = pair.sent(0, at(0)).remove(0);
    assert_eq!(pair.sent(0, at(1)).len(), 0);
    let (qpn, target) = (pair.ends[1].qpn, pair.target);
    let source = pair.source;
    let sge = Sge { addr: target.addr, len: 10, lkey: target.lkey };
    let op = SendOp::Write { remote_addr: source.addr, rkey: source.rkey };
    let wr = SendWr { op, sges: [sge].into_iter().collect(), ..SendWr::default() };
    pair.endpoint(1).post_send(Time::ZERO, qpn, wr).unwrap();
    pair.deliver(1, at(1), &first, Ecn::Ect0);
    let request = pair.sent(1, at(1)).into_iter().find(|p| p.headers.bth().ack_req).unwrap();
    pair.deliver(0, at(2), &request, Ecn::Ect0);
    let answers = pair.sent(0, at(2));
    assert_eq!(answers.len(), 1);
    assert_eq!(answers[0].headers.bth().opcode, Opcode::RcAcknowledge);
}

#[test]
fn a_queue_pair_that_was_reset_owes_no_notification() {
    let params = DcqcnParams::named("dcqcn-mlnx", LINE_BPS).unwrap();
    let mut pair = pair(CongestionControl::Dcqcn(params));
    pair.write();
    let packets = pair.sent(0, at(0));
    pair.deliver(1, at(1), &packets[0], Ecn::Ce);
    let cnp = pair.sent(1, at(1)).into_iter().find(is_cnp).unwrap();
    pair.deliver(1, at(101), &packets[0], Ecn::Ce);
    let qpn = pair.ends[1].qpn;
    pair.endpoint(1).modify_qp(Time::ZERO, qpn, &QpAttr::to(QpState::Reset)).unwrap();
    assert!(pair.sent(1, at(102)).is_empty());
    // Nor does a rate lowered by a notification keep changing.
    pair.deliver(0, at(102), &cnp, Ecn::NotEct);
    assert!(pair.endpoint(0).poll_timeout().is_some());
    let qpn = pair.ends[0].qpn;
    pair.endpoint(0).modify_qp(Time::ZERO, qpn, &QpAttr::to(QpState::Reset)).unwrap();
    assert_eq!(pair.endpoint(0).poll_timeout(), None);
}

/// At 1 kbit/s a packet takes 9 s.
#[test]
fn a_limit_that_is_lifted_holds_nothing_back() {
    let mut pair = pair(CongestionControl::Off);
    pair.limit(at(0), 1_000);
    pair.write();
    assert_eq!(pair.sent(0, at(0)).len(), 1);
    pair.limit(at(1), 0);
    assert_eq!(pair.sent(0, at(1)).len(), MESSAGE_BYTES.div_ceil(1024) as usize - 1);
}

#[test]
fn a_limit_ends_with_its_connection() {
    let mut pair = pair(CongestionControl::Off);
    pair.limit(at(0), 1_000);
    let qpn = pair.ends[0].qpn;
    pair.endpoint(0).modify_qp(at(1), qpn, &QpAttr::to(QpState::Reset)).unwrap();
    assert_eq!(pair.endpoint(0).query_qp(qpn).unwrap().rate_limit_bps, 0);
}

/// A queue that is full drops a burst as it comes. So after each timeout fewer packets leave at
/// once.
#[test]
fn after_a_timeout_what_was_lost_leaves_within_the_window() {
    let mut network = Network::new(&NetworkConfig::default());
    let (a, b) = network.pair(|connect| {
        connect.congestion = CongestionControl::Delay(DelayParams::DEFAULT).into();
        connect.reliability = Reliability::Selective;
        connect.window_packets = 10_000;
        // 4.096 us * 2^14: 67 ms.
        connect.timeout = 14;
    });
    let [source, target] = [0, 1]
        .map(|node| network.nodes[node].register(BASE, MESSAGE_BYTES.into(), Access::ALL).unwrap());
    let mut pair = Pair { network, ends: [a, b], source, target };
    pair.write();
    let first = pair.sent(0, Time::ZERO).len();
    assert_eq!(first, 16, "the first window");
    let mut most_at_once = vec![0; 7];
    for ms in 1..470 {
        let left = pair.sent(0, at(1_000 * ms)).len();
        let timeouts = pair.endpoint(0).counters().timeouts as usize;
        most_at_once[timeouts] = left.max(most_at_once[timeouts]);
    }
    // Before the first timeout only probes leave; then half of the window, a quarter, and so on.
    assert_eq!(most_at_once, [1, 8, 4, 2, 1, 1, 1]);
}

/// While lost packets wait for the window, nothing new leaves: the peer would have to keep more
/// than a window.
#[test]
fn nothing_new_leaves_ahead_of_what_was_lost() {
    let mut network = Network::new(&NetworkConfig::default());
    let (a, b) = network.pair(|connect| {
        // The queue pair's own window is the smaller one; after a timeout there is one packet.
        let params = AdvertisedParams { path_bytes: 100 * 1_068, budget_per_mille: 1_000 };
        connect.congestion = CongestionControl::Advertised(params).into();
        connect.reliability = Reliability::Selective;
        connect.window_packets = 8;
        connect.timeout = 10;
    });
    let [source, target] = [0, 1]
        .map(|node| network.nodes[node].register(BASE, MESSAGE_BYTES.into(), Access::ALL).unwrap());
    let mut pair = Pair { network, ends: [a, b], source, target };
    pair.write();
    let window = pair.sent(0, Time::ZERO);
    assert_eq!(window.len(), 8);
    // One packet arrives and makes room for another, the only one since the last that requested an
    // acknowledgement.
    pair.deliver(1, at(10), &window[2], Ecn::Ect0);
    let report = pair.sent(1, at(10));
    pair.deliver(0, at(20), &report[0], Ecn::Ect0);
    let psn = |packet: &Transmit| packet.headers.bth().psn;
    let mut sent: Vec<_> = window.iter().map(psn).collect();
    sent.extend(pair.sent(0, at(20)).iter().map(psn));
    assert_eq!(sent.len(), 9);
    let mut resent = 0;
    for us in (100..30_000).step_by(100) {
        for packet in pair.sent(0, at(us)) {
            assert!(sent.contains(&psn(&packet)), "{packet:?} is new, at {us} us");
            resent += 1;
        }
    }
    assert!(resent > 4 && pair.endpoint(0).counters().timeouts > 1, "{resent}");
}

/// A short message and its acknowledgement take a class of their own, unless the queue pair was
/// given one: a program under a job's DSCP sends nothing outside it.
#[test]
fn urgent_packets_keep_a_dscp_that_was_asked_for() {
    for (asked, wanted) in [(0, 46), (26, 26)] {
        let mut network = Network::new(&NetworkConfig::default());
        let (a, b) = network.pair(|connect| {
            let params = AdvertisedParams { path_bytes: 100 * 1_068, budget_per_mille: 1_000 };
            connect.congestion = CongestionControl::Advertised(params).into();
            connect.path.dscp = asked;
        });
        let [source, target] =
            [0, 1].map(|node| network.nodes[node].register(BASE, 10_000, Access::ALL).unwrap());
        let mut pair = Pair { network, ends: [a, b], source, target };
        pair.write_bytes(5_000);
        let message = pair.sent(0, Time::ZERO);
        assert_eq!(message.len(), 5);
        message.iter().for_each(|packet| pair.deliver(1, at(10), packet, Ecn::Ect0));
        let acks = pair.sent(1, at(10));
        assert!(!acks.is_empty());
        for packet in message.iter().chain(&acks) {
            assert_eq!(packet.path.dscp, wanted, "{packet:?}");
        }
    }
}

/// Reports of the control plane slow down whom they concern, once; refused ones change nothing, and
/// are counted.
#[test]
fn watermarks_cut_what_the_path_delivers_and_impossible_ones_are_refused() {
    // At line rate from the beginning: nothing is acknowledged before all has left.
    let params = DcqcnParams { slow_start: false, ..DcqcnParams::mlnx(LINE_BPS) };
    let mut pair = pair(CongestionControl::Dcqcn(params));
    pair.write();
    let full = |from, until| Watermark {
        from: at(from),
        until: at(until),
        queue_bytes: u64::MAX,
        rate_bps: NonZeroU64::new(LINE_BPS).unwrap(),
    };
    let qpn = pair.ends[0].qpn;
    // The first report begins the measurement; a hundred packets then arrive within a millisecond.
    assert_eq!(pair.endpoint(0).handle_watermark(qpn, at(1_000), &full(0, 1_000)), Ok(()));
    let mut sent = Vec::new();
    while sent.len() < 100 {
        let now = at(1_000 + sent.len() as u64);
        sent.extend(pair.sent(0, now));
    }
    for packet in &sent {
        pair.deliver(1, at(1_500), packet, Ecn::Ect0);
    }
    for ack in pair.sent(1, at(1_600)) {
        pair.deliver(0, at(1_600), &ack, Ecn::Ect0);
    }
    assert_eq!(pair.rate(), Some(LINE_BPS));
    let stranger = Qpn::new(qpn.get() ^ 1);
    let refused = [
        (qpn, full(1_000, 2_001), WatermarkError::Future),
        (qpn, full(2_000, 2_000), WatermarkError::Empty),
        (stranger, full(1_000, 2_000), WatermarkError::NoConnection),
    ];
    for (qpn, watermark, why) in refused {
        let heard = pair.endpoint(0).handle_watermark(qpn, at(2_000), &watermark);
        assert_eq!((heard, pair.rate()), (Err(why), Some(LINE_BPS)));
    }
    pair.endpoint(0).handle_watermark(qpn, at(2_000), &full(1_000, 2_000)).unwrap();
    // Half of 100 packets per millisecond.
    let rate = pair.rate().unwrap();
    assert!((380_000_000..450_000_000).contains(&rate), "{rate}");
    // The same again is no news.
    pair.endpoint(0).handle_watermark(qpn, at(2_100), &full(1_000, 2_000)).unwrap();
    assert_eq!(pair.rate(), Some(rate));
    let counters = pair.endpoint(0).counters();
    assert_eq!((counters.watermarks_heard, counters.watermarks_refused), (3, 3));
    // The cap ends by its own timer.
    for _ in 0..10 {
        let Some((next, _)) = pair.endpoint(0).poll_timeout() else {
            break;
        };
        pair.endpoint(0).handle_timeout(next.max(at(20_000)));
    }
    assert_eq!(pair.rate(), Some(LINE_BPS));
}

/// A sender of short messages is measured by its bytes, not by its packets.
#[test]
fn watermarks_cut_senders_of_short_messages_as_well() {
    let delay = CongestionControl::Delay(DelayParams::default());
    for (control, first) in [(CongestionControl::Dcqcn(DcqcnParams::mlnx(LINE_BPS)), 1), (delay, 2)]
    {
        let mut pair = pair(control);
        let qpn = pair.ends[0].qpn;
        let hear = |pair: &mut Pair, ms: u64| {
            let watermark = Watermark {
                from: at(1_000 * (ms - 1)),
                until: at(1_000 * ms),
                queue_bytes: u64::MAX,
                rate_bps: NonZeroU64::new(LINE_BPS).unwrap(),
            };
            pair.endpoint(0).handle_watermark(qpn, at(1_000 * ms), &watermark).unwrap();
        };
        hear(&mut pair, 1);
        // 50 WRITEs in each millisecond, of 64 bytes in packets of 124: 49.6 Mbit/s. Cuts follow
        // each other at a distance.
        let mut cuts = Vec::new();
        let mut ms = 1;
        while cuts.len() < first && ms < 60 {
            for us in (0..1_000).step_by(20) {
                let now = at(1_000 * ms + us);
                pair.write_bytes(64);
                for packet in pair.sent(0, now) {
                    pair.deliver(1, now, &packet, Ecn::Ect0);
                }
                for ack in pair.sent(1, now) {
                    pair.deliver(0, now, &ack, Ecn::Ect0);
                }
                let cq = pair.ends[0].send_cq;
                while pair.endpoint(0).poll_cq(cq).is_some() {}
            }
            ms += 1;
            let before = pair.rate().unwrap_or(u64::MAX);
            hear(&mut pair, ms);
            cuts.extend(pair.rate().filter(|&rate| rate < before));
        }
        assert!(cuts.len() == first && cuts[first - 1] <= 30_000_000, "{cuts:?}");
    }
}
