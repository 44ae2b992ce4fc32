//! The states of a queue pair: every transition with every attribute, and what each state allows.
//!
//! The table here is written by hand in another form than the crate's, attribute by attribute as in
//! a manual; the two have to agree on every transition, transport and attribute.

use roce::device;
use roce::endpoint::{
    AsyncEvent, AttrMask, Connect, Endpoint, EndpointConfig, Mtu, QpAttr, QpConfig, QpState,
    Reliability,
};
use roce::verbs::{
    Access, CqId, Datagram, MemoryRegion, Qpn, SendOp, SendWr, SgList, Sge, Transport, VerbsError,
    WcStatus,
};
use roce::wire::{Opcode, Psn};
use roce::world::Path;
use roce::{Duration, Time};

use QpState::{Error, Init, Reset, Rtr, Rts, Sqd, Sqe};
use WcStatus::{LocalProtectionError, RetryExceeded, Success, WrFlushError};

use crate::harness::{BASE, End, Network, NetworkConfig, Node};
use crate::kit::{
    QKEY, STATES, TRANSPORTS, attributes, brief, bring_to, list, recv, registered, send, step_attr,
};

/// Attributes by name, with their bits in the verbs API.
const NAMES: [(&str, u32); 22] = [
    ("cur_state", 1),
    ("sqd_notify", 2),
    ("access", 3),
    ("pkey", 4),
    ("port", 5),
    ("qkey", 6),
    ("av", 7),
    ("mtu", 8),
    ("timeout", 9),
    ("retry", 10),
    ("rnr_retry", 11),
    ("rq_psn", 12),
    ("rd_atomic", 13),
    ("alt_path", 14),
    ("rnr_timer", 15),
    ("sq_psn", 16),
    ("dest_rd_atomic", 17),
    ("migration", 18),
    ("cap", 19),
    ("dest_qpn", 20),
    ("rate", 25),
    ("unknown", 30),
];

/// Transition, transports, attributes; `!` marks those that must be there.
const TABLE: &str = "
    RESET INIT   rc,uc     !pkey !port !access
    RESET INIT   ud        !pkey !port !qkey
    INIT  INIT   rc,uc     pkey port access
    INIT  INIT   ud        pkey port qkey
    INIT  RTR    rc        !av !mtu !dest_qpn !rq_psn !dest_rd_atomic !rnr_timer alt_path access pkey
    INIT  RTR    uc        !av !mtu !dest_qpn !rq_psn alt_path access pkey
    INIT  RTR    ud        pkey qkey
    RTR   RTS    rc        !timeout !retry !rnr_retry !sq_psn !rd_atomic cur_state alt_path access rnr_timer migration rate
    RTR   RTS    uc        !sq_psn cur_state alt_path access migration rate
    RTR   RTS    ud        !sq_psn cur_state qkey rate
    RTS   RTS    rc        cur_state access alt_path migration rnr_timer rate
    RTS   RTS    uc        cur_state access alt_path migration rate
    RTS   RTS    ud        cur_state qkey rate
    RTS   SQD    rc,uc,ud  sqd_notify
    SQD   RTS    rc        cur_state alt_path access rnr_timer migration rate
    SQD   RTS    uc        cur_state alt_path access migration rate
    SQD   RTS    ud        cur_state qkey rate
    SQD   SQD    rc        port av timeout retry rnr_retry rd_atomic dest_rd_atomic alt_path access pkey rnr_timer migration
    SQD   SQD    uc        av alt_path access pkey migration
    SQD   SQD    ud        pkey qkey
    SQE   RTS    uc        cur_state access
    SQE   RTS    ud        cur_state qkey
";

fn name_of(transport: Transport) -> &'static str {
    match transport {
        Transport::Rc => "rc",
        Transport::Uc => "uc",
        Transport::Ud => "ud",
    }
}

/// Bits that must and that may be set, or `None` for no such transition.
fn expected(transport: Transport, from: QpState, to: QpState) -> Option<(u32, u32)> {
    if matches!(to, Reset | Error) {
        return Some((0, 0));
    }
    let line = TABLE.lines().map(str::split_whitespace).find_map(|mut words| {
        let matches = words.next() == Some(from.name())
            && words.next() == Some(to.name())
            && words.next()?.split(',').any(|name| name == name_of(transport));
        matches.then_some(words)
    })?;
    let bit = |name: &str| 1 << NAMES.iter().find(|known| known.0 == name).unwrap().1;
    Some(line.fold((0, 0), |(must, may), word| match word.strip_prefix('!') {
        Some(name) => (must | bit(name), may),
        None => (must, may | bit(word)),
    }))
}

/// One queue pair that was taken to a state.
struct Lone {
    network: Network,
    end: End,
    qpn: Qpn,
    base: QpAttr,
}

impl Lone {
    /// `None` if the transport does not have the state.
    fn in_state(transport: Transport, state: QpState) -> Option<Lone> {
        if transport == Transport::Rc && state == Sqe {
            return None;
        }
        let mut network =
            Network::new(&NetworkConfig { arena_bytes: 64, ..NetworkConfig::default() });
        let end = network.create(0, transport, None);
        let (qpn, peer) = (end.qpn, Qpn::new(77));
        let base = attributes(network.nodes[1].path(), qpn, peer, Mtu::M1024);
        let endpoint = &mut network.nodes[0].endpoint;
        match state {
            Reset => {}
            Init | Rtr | Rts => bring_to(endpoint, qpn, transport, &base, state),
            Error => endpoint.modify_qp(Time::ZERO, qpn, &QpAttr::to(Error)).unwrap(),
            Sqd | Sqe => bring_to(endpoint, qpn, transport, &base, Rts),
        }
        if state == Sqd {
            endpoint.modify_qp(Time::ZERO, qpn, &QpAttr::to(Sqd)).unwrap();
        }
        if state == Sqe {
            let bad: SgList = [Sge { addr: BASE, len: 8, lkey: 1 }].into_iter().collect();
            let to = Some(network.address(end));
            let wr = SendWr { to, ..send(1, SendOp::Send, bad) };
            network.post_send(end, wr);
            network.settle();
            assert_eq!(brief(&network.sent_by(end)), [(1, LocalProtectionError)]);
        }
        assert_eq!(network.state(end), state);
        Some(Lone { network, end, qpn, base })
    }

    fn endpoint(&mut self) -> &mut Endpoint {
        &mut self.network.nodes[0].endpoint
    }

    /// Tries a transition with exactly these attributes, all of legal value.
    fn attempt(&mut self, from: QpState, to: QpState, bits: u32) -> Result<(), VerbsError> {
        let mask = AttrMask::from_bits_retain(bits) | AttrMask::STATE;
        let attr = QpAttr { mask, state: to, cur_state: from, ..self.base.clone() };
        let qpn = self.qpn;
        let before = self.endpoint().query_qp(qpn).unwrap();
        let done = self.endpoint().modify_qp(Time::ZERO, qpn, &attr);
        let after = self.endpoint().query_qp(qpn).unwrap();
        if done.is_ok() {
            assert_eq!(after.state, to);
        } else {
            assert_eq!(after, before, "a refused transition changed something");
        }
        done
    }
}

/// Attributes that Ethernet has no values for.
const NO_VALUES: u32 = 1 << 14 | 1 << 18;

fn check(transport: Transport, from: QpState, to: QpState, bits: u32) {
    let Some(mut lone) = Lone::in_state(transport, from) else {
        return;
    };
    let done = lone.attempt(from, to, bits);
    let is_legal = expected(transport, from, to)
        .is_some_and(|(must, may)| bits & must == must && bits & !(must | may) == 0);
    let what = format!("{transport:?} {from:?} -> {to:?} with {bits:#x}: {done:?}");
    match done {
        Ok(()) => assert!(is_legal && bits & NO_VALUES == 0, "{what}"),
        Err(VerbsError::Invalid { .. }) => assert!(is_legal && bits & NO_VALUES != 0, "{what}"),
        Err(VerbsError::Transition { .. }) => assert!(!is_legal, "{what}"),
        Err(_) => panic!("{what}"),
    }
}

#[test]
fn transitions_need_and_allow_what_the_table_says() {
    for transport in TRANSPORTS {
        for (from, to) in STATES.into_iter().flat_map(|from| STATES.map(|to| (from, to))) {
            let (must, may) = expected(transport, from, to).unwrap_or_default();
            check(transport, from, to, must);
            check(transport, from, to, (must | may) & !NO_VALUES);
            for (_, bit) in NAMES {
                check(transport, from, to, must & !(1 << bit));
                check(transport, from, to, must | 1 << bit);
            }
        }
    }
}

#[test]
fn the_state_may_be_left_out() {
    let mut lone = Lone::in_state(Transport::Ud, Rts).unwrap();
    let attr = QpAttr { mask: AttrMask::QKEY, qkey: 5, ..lone.base.clone() };
    let qpn = lone.qpn;
    lone.endpoint().modify_qp(Time::ZERO, qpn, &attr).unwrap();
    let now = lone.endpoint().query_qp(qpn).unwrap();
    assert_eq!((now.state, now.qkey), (Rts, 5));
    let mut lone = Lone::in_state(Transport::Ud, Rtr).unwrap();
    let qpn = lone.qpn;
    assert!(
        lone.endpoint().modify_qp(Time::ZERO, qpn, &attr).is_err(),
        "nothing can be set in RTR"
    );
}

#[test]
fn the_current_state_has_to_be_right() {
    let mut lone = Lone::in_state(Transport::Uc, Sqd).unwrap();
    let mask = AttrMask::STATE | AttrMask::CUR_STATE;
    let wrong = QpAttr { mask, state: Rts, cur_state: Rts, ..lone.base.clone() };
    let qpn = lone.qpn;
    let refused = lone.endpoint().modify_qp(Time::ZERO, qpn, &wrong);
    assert!(matches!(refused, Err(VerbsError::Transition { from: "SQD", to: "RTS", .. })));
    lone.endpoint().modify_qp(Time::ZERO, qpn, &QpAttr { cur_state: Sqd, ..wrong }).unwrap();
}

/// Changes one value to an illegal one, in the transition that sets it.
fn refused(transport: Transport, to: QpState, spoil: impl Fn(&mut QpAttr)) {
    let from = match to {
        Init => Reset,
        Rtr => Init,
        _ => Rtr,
    };
    let mut lone = Lone::in_state(transport, from).unwrap();
    let mut attr = step_attr(transport, to, &lone.base);
    spoil(&mut attr);
    let qpn = lone.qpn;
    let before = lone.endpoint().query_qp(qpn).unwrap();
    let done = lone.endpoint().modify_qp(Time::ZERO, qpn, &attr);
    assert!(matches!(done, Err(VerbsError::Invalid { .. })), "{done:?}");
    assert_eq!(lone.endpoint().query_qp(qpn).unwrap(), before);
}

#[test]
fn values_out_of_range_are_refused() {
    let rc = Transport::Rc;
    refused(rc, Init, |attr| attr.pkey_index = 1);
    refused(rc, Init, |attr| attr.port = 2);
    refused(Transport::Ud, Init, |attr| attr.port = 0);
    refused(rc, Rtr, |attr| attr.max_dest_rd_atomic = 129);
    refused(rc, Rtr, |attr| attr.path.dscp = 64);
    for nobody in
        ["0.0.0.0:4791", "224.0.0.1:4791", "255.255.255.255:4791", "[::]:1", "[ff02::1]:1"]
    {
        refused(rc, Rtr, |attr| attr.path = Path::new(nobody.parse().unwrap()));
    }
    refused(rc, Rts, |attr| attr.timeout = 32);
    refused(rc, Rts, |attr| attr.max_rd_atomic = 129);
}

/// Adapters have so many bits for these, and programs set more: a library in use asks for an RNR
/// timer of 32.
#[test]
fn only_the_bits_that_adapters_have_are_kept() {
    let mut lone = Lone::in_state(Transport::Rc, Init).unwrap();
    let (qpn, base) = (lone.qpn, lone.base.clone());
    let to_rtr = QpAttr { min_rnr_timer: 0xe5, ..step_attr(Transport::Rc, Rtr, &base) };
    let to_rtr = QpAttr { dest_qp: Qpn::new(0x0112_3456), ..to_rtr };
    lone.endpoint().modify_qp(Time::ZERO, qpn, &to_rtr).unwrap();
    let to_rts = step_attr(Transport::Rc, Rts, &base);
    let to_rts = QpAttr { retry_count: 0xfa, rnr_retry: 0x0b, ..to_rts };
    lone.endpoint().modify_qp(Time::ZERO, qpn, &to_rts).unwrap();
    let now = lone.endpoint().query_qp(qpn).unwrap();
    assert_eq!((now.min_rnr_timer, now.retry_count, now.rnr_retry), (5, 2, 3));
    assert_eq!(now.dest_qp, Qpn::new(0x12_3456));
    let flow = lone.endpoint().queue_pairs().find(|qp| qp.qpn == qpn).unwrap().flow.unwrap();
    assert_eq!((flow.retries_left, flow.rnr_retries_left), (2, 3));
}

#[test]
fn a_path_mtu_above_the_ports_is_refused() {
    let config = EndpointConfig { mtu: Mtu::M1024, ..EndpointConfig::default() };
    let mut endpoint = Endpoint::new(config);
    let pd = endpoint.alloc_pd();
    let cq = endpoint.create_cq(8).unwrap();
    let qpn = endpoint.create_qp(QpConfig::rc(pd, cq, 8, 8)).unwrap();
    let path = Path::new("10.0.0.2:4791".parse().unwrap());
    let base = attributes(path, qpn, Qpn::new(9), Mtu::M2048);
    bring_to(&mut endpoint, qpn, Transport::Rc, &base, Init);
    let refused = endpoint.modify_qp(Time::ZERO, qpn, &step_attr(Transport::Rc, Rtr, &base));
    assert!(matches!(refused, Err(VerbsError::Invalid { .. })));
    let base = QpAttr { mtu: Mtu::M1024, ..base };
    endpoint.modify_qp(Time::ZERO, qpn, &step_attr(Transport::Rc, Rtr, &base)).unwrap();
}

#[test]
fn attributes_can_be_asked_for() {
    for transport in TRANSPORTS {
        let mut lone = Lone::in_state(transport, Rts).unwrap();
        let qpn = lone.qpn;
        let now = lone.endpoint().query_qp(qpn).unwrap();
        assert_eq!((now.state, now.cur_state, now.port), (Rts, Rts, 1));
        assert_eq!(now.sq_psn, lone.base.sq_psn);
        if transport == Transport::Ud {
            assert_eq!(now.qkey, QKEY);
        } else {
            let wanted = (lone.base.path, lone.base.dest_qp, lone.base.rq_psn, Mtu::M1024);
            assert_eq!((now.path, now.dest_qp, now.rq_psn, now.mtu), wanted);
        }
    }
    let mut endpoint = Endpoint::new(EndpointConfig::default());
    let (ghost, any) = (Qpn::new(5), QpAttr::to(Init));
    assert_eq!(endpoint.query_qp(ghost), Err(VerbsError::NoQp(5)));
    assert_eq!(endpoint.modify_qp(Time::ZERO, ghost, &any), Err(VerbsError::NoQp(5)));
}

#[test]
fn a_connect_that_is_refused_leaves_a_queue_pair_in_reset_that_works() {
    // An address is checked on the way to RTR, the number of READs on the way to RTS.
    let refusals: [fn(&mut Connect); 2] = [
        |connect| connect.path.remote.set_ip([224, 0, 0, 1].into()),
        |connect| connect.max_rd_atomic = 129,
    ];
    for (refusal, is_initialized) in
        refusals.into_iter().flat_map(|refusal| [(refusal, false), (refusal, true)])
    {
        let mut network = Network::new(&NetworkConfig::default());
        let [a, b] = [0, 1].map(|node| network.create(node, Transport::Rc, None));
        let good = Connect::new(network.nodes[1].path(), b.qpn, Psn::new(1));
        let mut bad = good;
        refusal(&mut bad);
        let endpoint = network.endpoint(a);
        if is_initialized {
            device::initialize(endpoint, Time::ZERO, a.qpn).unwrap();
        }
        let refused = device::connect(endpoint, Time::ZERO, a.qpn, &bad);
        assert!(matches!(refused, Err(VerbsError::Invalid { .. })), "{refused:?}");
        assert_eq!(endpoint.qp_state(a.qpn), Some(Reset));
        network.connect(a, b, |_| {});
        network.post_recv(b, recv(1, SgList::new()));
        network.post_send(a, send(2, SendOp::Send, SgList::new()));
        network.run(100);
        assert_eq!(brief(&network.sent_by(a)), [(2, Success)]);
        assert_eq!(brief(&network.received_by(b)), [(1, Success)]);
    }
}

// ---- what states allow -------------------------------------------------------------------------

#[test]
fn posting_follows_the_state() {
    for (transport, state) in TRANSPORTS.into_iter().flat_map(|t| STATES.map(|s| (t, s))) {
        let Some(mut lone) = Lone::in_state(transport, state) else {
            continue;
        };
        let qpn = lone.qpn;
        let to = Some(Datagram { ah: lone.base.path.into(), dest_qp: qpn, qkey: QKEY });
        let wr = SendWr { to, ..send(1, SendOp::Send, SgList::new()) };
        let sent = lone.endpoint().post_send(Time::ZERO, qpn, wr);
        let wrong = VerbsError::WrongState { qpn: qpn.get(), state: state.name() };
        let wanted = if matches!(state, Reset | Init | Rtr) { Err(wrong) } else { Ok(()) };
        assert_eq!(sent, wanted, "{transport:?} {state:?}");
        assert_eq!(lone.endpoint().post_recv(Time::ZERO, qpn, recv(2, SgList::new())), Ok(()));
    }
}

#[test]
fn reset_discards_all_work_in_silence() {
    for transport in TRANSPORTS {
        let mut network = Network::new(&NetworkConfig::default());
        let region = registered(&mut network.nodes[0]);
        let (a, b) = network.pair_of(transport, Mtu::M256);
        let to = Some(network.address(b));
        for wr_id in 0..5 {
            let wr = send(wr_id, SendOp::Send, list(region, 0, 200));
            network.post_send(a, SendWr { to, ..wr });
            network.post_recv(a, recv(wr_id, list(region, 0, 200)));
        }
        network.endpoint(a).modify_qp(Time::ZERO, a.qpn, &QpAttr::to(Reset)).unwrap();
        network.run(1_000);
        assert_eq!(network.state(a), Reset);
        assert!(network.sent_by(a).is_empty() && network.received_by(a).is_empty());
        assert!(network.endpoint(a).poll_timeout().is_none());
        // It works again afterwards, for both sides.
        let reset = network.endpoint(b).modify_qp(Time::ZERO, b.qpn, &QpAttr::to(Reset));
        assert_eq!(reset, Ok(()));
        let target = registered(&mut network.nodes[1]);
        network.bring_up(a, b, transport, Mtu::M256);
        network.bring_up(b, a, transport, Mtu::M256);
        network.post_recv(b, recv(7, list(target, 0, 300)));
        let wr = send(9, SendOp::Send, list(region, 0, 200));
        network.post_send(a, SendWr { to, ..wr });
        network.run(1_000);
        assert_eq!(brief(&network.sent_by(a)), [(9, Success)], "{transport:?}");
        assert_eq!(brief(&network.received_by(b)), [(7, Success)], "{transport:?}");
    }
}

#[test]
fn the_error_state_flushes_every_transport() {
    for transport in TRANSPORTS {
        let mut lone = Lone::in_state(transport, Sqd).unwrap();
        let qpn = lone.qpn;
        let to = Some(Datagram { ah: lone.base.path.into(), dest_qp: qpn, qkey: QKEY });
        let wr = |id| SendWr { to, ..send(id, SendOp::Send, SgList::new()) };
        let endpoint = lone.endpoint();
        endpoint.post_send(Time::ZERO, qpn, wr(1)).unwrap();
        endpoint.post_recv(Time::ZERO, qpn, recv(2, SgList::new())).unwrap();
        endpoint.modify_qp(Time::ZERO, qpn, &QpAttr::to(Error)).unwrap();
        endpoint.post_send(Time::ZERO, qpn, wr(3)).unwrap();
        endpoint.post_recv(Time::ZERO, qpn, recv(4, SgList::new())).unwrap();
        let end = lone.end;
        assert_eq!(brief(&lone.network.sent_by(end)), [(1, WrFlushError), (3, WrFlushError)]);
        assert_eq!(brief(&lone.network.received_by(end)), [(2, WrFlushError), (4, WrFlushError)]);
    }
}

/// Two queue pairs of node 0 that share both completion queues, each with two sends and three
/// receives flushed: posted in turns.
fn flushed_pair(transport: Transport) -> (Network, [Qpn; 2], CqId) {
    let mut network = Network::new(&NetworkConfig::default());
    let Node { endpoint, pd, .. } = &mut network.nodes[0];
    let cq = endpoint.create_cq(64).unwrap();
    let config = QpConfig { transport, ..QpConfig::rc(*pd, cq, 8, 8) };
    let qpns = [0, 1].map(|_| endpoint.create_qp(config).unwrap());
    for qpn in qpns {
        endpoint.modify_qp(Time::ZERO, qpn, &QpAttr::to(Error)).unwrap();
    }
    for wr_id in 0..6 {
        let qpn = qpns[wr_id as usize % 2];
        endpoint.post_recv(Time::ZERO, qpn, recv(wr_id, SgList::new())).unwrap();
    }
    (network, qpns, cq)
}

/// The program frees what `wr_id` refers to once the queue pair is gone.
#[test]
fn completions_go_with_their_queue_pair() {
    for (transport, destroys) in TRANSPORTS.into_iter().flat_map(|t| [(t, false), (t, true)]) {
        let (mut network, [gone, kept], cq) = flushed_pair(transport);
        let endpoint = &mut network.nodes[0].endpoint;
        assert_eq!(endpoint.poll_cq(cq).map(|done| done.wr_id), Some(0), "polled before: seen");
        match destroys {
            true => endpoint.destroy_qp(Time::ZERO, gone).unwrap(),
            false => endpoint.modify_qp(Time::ZERO, gone, &QpAttr::to(Reset)).unwrap(),
        }
        let left: Vec<_> =
            network.nodes[0].completions(cq).iter().map(|d| (d.wr_id, d.qpn)).collect();
        assert_eq!(left, [(1, kept), (3, kept), (5, kept)], "{transport:?}");
    }
}

#[test]
fn notifications_and_overruns_outlive_the_completions_that_made_them() {
    let (mut network, [gone, kept], cq) = flushed_pair(Transport::Rc);
    let endpoint = &mut network.nodes[0].endpoint;
    endpoint.req_notify(cq, false).unwrap();
    endpoint.destroy_qp(Time::ZERO, gone).unwrap();
    endpoint.destroy_qp(Time::ZERO, kept).unwrap();
    assert_eq!(endpoint.poll_notified(), Some(cq), "one notification too many is legal");
    endpoint.req_notify(cq, false).unwrap();
    assert_eq!((endpoint.poll_notified(), endpoint.poll_cq(cq)), (None, None), "nothing waits");
    // Freed slots do not restore what was lost.
    let pd = network.nodes[0].pd;
    let endpoint = &mut network.nodes[0].endpoint;
    let cq = endpoint.create_cq(2).unwrap();
    let [first, second] = [0, 1].map(|_| endpoint.create_qp(QpConfig::rc(pd, cq, 4, 4)).unwrap());
    for qpn in [first, second] {
        endpoint.post_recv(Time::ZERO, qpn, recv(1, SgList::new())).unwrap();
        endpoint.post_recv(Time::ZERO, qpn, recv(2, SgList::new())).unwrap();
        endpoint.modify_qp(Time::ZERO, qpn, &QpAttr::to(Error)).unwrap();
    }
    assert_eq!(endpoint.cq_overrun(cq), Some(true));
    endpoint.destroy_qp(Time::ZERO, first).unwrap();
    assert_eq!(endpoint.cq_overrun(cq), Some(true));
    endpoint.post_recv(Time::ZERO, second, recv(3, SgList::new())).unwrap();
    assert_eq!(endpoint.poll_cq(cq), None);
}

// ---- SQD ---------------------------------------------------------------------------------------

fn drain(notify: bool) -> QpAttr {
    let mask = AttrMask::STATE | AttrMask::EN_SQD_ASYNC_NOTIFY;
    QpAttr { mask, sqd_notify: notify, ..QpAttr::to(Sqd) }
}

/// Two messages of four packets each; the first has started when the send queue is told to drain.
fn half_sent(transport: Transport) -> (Network, End, End) {
    let mut network = Network::new(&NetworkConfig::default());
    let regions = [0, 1].map(|node: usize| registered(&mut network.nodes[node]));
    let (a, b) = network.pair_of(transport, Mtu::M256);
    for wr_id in [1, 2] {
        network.post_send(a, send(wr_id, SendOp::Send, list(regions[0], 0, 1024)));
        network.post_recv(b, recv(wr_id, list(regions[1], 1024 * wr_id, 1024)));
    }
    let first = network.endpoint(a).poll_transmit(Time::ZERO).unwrap();
    network.inject(a, &first);
    (network, a, b)
}

#[test]
fn a_draining_queue_finishes_what_it_began() {
    for transport in [Transport::Rc, Transport::Uc] {
        let (mut network, a, b) = half_sent(transport);
        network.endpoint(a).modify_qp(Time::ZERO, a.qpn, &drain(true)).unwrap();
        assert_eq!(network.endpoint(a).poll_event(), None, "{transport:?}: not drained yet");
        network.run(1_000);
        assert_eq!(brief(&network.sent_by(a)), [(1, Success)], "{transport:?}");
        assert_eq!(brief(&network.received_by(b)), [(1, Success)], "{transport:?}");
        let drained = AsyncEvent::SendQueueDrained(a.qpn);
        assert_eq!(network.endpoint(a).poll_event(), Some(drained));
        assert_eq!(network.endpoint(a).poll_event(), None);
        network.endpoint(a).modify_qp(Time::ZERO, a.qpn, &QpAttr::to(Rts)).unwrap();
        network.run(1_000);
        assert_eq!(brief(&network.sent_by(a)), [(2, Success)], "{transport:?}");
        assert_eq!(brief(&network.received_by(b)), [(2, Success)], "{transport:?}");
        assert_eq!(network.endpoint(a).poll_event(), None);
    }
}

#[test]
fn lost_packets_are_retransmitted_while_the_queue_drains() {
    let (mut network, a, b) = half_sent(Transport::Rc);
    let mut seen = 0;
    network.keep_if(move |headers| {
        seen += u32::from(headers.bth().opcode == Opcode::RcSendMiddle);
        seen != 1 || headers.bth().opcode != Opcode::RcSendMiddle
    });
    network.endpoint(a).modify_qp(Time::ZERO, a.qpn, &drain(true)).unwrap();
    network.run(1_000);
    assert!(network.endpoint(a).counters().retransmitted_packets > 0);
    assert_eq!(brief(&network.received_by(b)), [(1, Success)]);
    assert_eq!(network.endpoint(a).poll_event(), Some(AsyncEvent::SendQueueDrained(a.qpn)));
}

#[test]
fn an_idle_queue_is_drained_at_once_and_says_so_only_when_asked() {
    for (transport, notify) in TRANSPORTS.into_iter().flat_map(|t| [(t, true), (t, false)]) {
        let mut lone = Lone::in_state(transport, Rts).unwrap();
        let qpn = lone.qpn;
        lone.endpoint().modify_qp(Time::ZERO, qpn, &drain(notify)).unwrap();
        let wanted = notify.then_some(AsyncEvent::SendQueueDrained(qpn));
        assert_eq!(lone.endpoint().poll_event(), wanted);
    }
}

#[test]
fn limits_of_reads_change_while_the_queue_is_drained() {
    for (limit, served) in [(1, false), (2, true)] {
        let mut network = Network::new(&NetworkConfig::default());
        let regions = [0, 1].map(|node: usize| registered(&mut network.nodes[node]));
        let (a, b) = network.pair_of(Transport::Rc, Mtu::M256);
        let mask = AttrMask::STATE | AttrMask::MAX_DEST_RD_ATOMIC;
        let change = QpAttr { mask, max_dest_rd_atomic: limit, ..QpAttr::to(Sqd) };
        network.endpoint(b).modify_qp(Time::ZERO, b.qpn, &QpAttr::to(Sqd)).unwrap();
        network.endpoint(b).modify_qp(Time::ZERO, b.qpn, &change).unwrap();
        for wr_id in [1, 2] {
            let op = SendOp::Read { remote_addr: BASE, rkey: regions[1].rkey };
            network.post_send(a, send(wr_id, op, list(regions[0], 0, 64)));
        }
        network.run(1000);
        let done = network.sent_by(a);
        let all_done = done.iter().all(|done| done.status == Success);
        assert_eq!(all_done, served, "{limit}: {done:?}");
    }
}

// ---- attributes that change while connected ---------------------------------------------------

const MODES: [Reliability; 2] = [Reliability::GoBackN, Reliability::Selective];

/// A reliable connection with these attributes on both sides.
struct Tuned {
    network: Network,
    a: End,
    b: End,
    regions: [MemoryRegion; 2],
}

impl Tuned {
    fn new(adjust: impl Fn(&mut QpAttr)) -> Tuned {
        let mut network = Network::new(&NetworkConfig::default());
        let regions = [0, 1].map(|node: usize| registered(&mut network.nodes[node]));
        let [a, b] = [0, 1].map(|node| network.create(node, Transport::Rc, None));
        for (own, peer) in [(a, b), (b, a)] {
            let path = network.nodes[peer.node].path();
            let mut base = attributes(path, own.qpn, peer.qpn, Mtu::M256);
            adjust(&mut base);
            bring_to(network.endpoint(own), own.qpn, Transport::Rc, &base, Rts);
        }
        Tuned { network, a, b, regions }
    }

    fn post(&mut self, wr_id: u64, op: SendOp, len: u32) {
        self.network.post_send(self.a, send(wr_id, op, list(self.regions[0], 0, len)));
    }

    fn read(&mut self, wr_id: u64) {
        let op = SendOp::Read { remote_addr: BASE + 4096 * wr_id, rkey: self.regions[1].rkey };
        let sges = list(self.regions[0], 4096 * wr_id, 1500);
        self.network.post_send(self.a, send(wr_id, op, sges));
    }

    fn modify(&mut self, attr: &QpAttr) {
        let a = self.a;
        self.network.endpoint(a).modify_qp(Time::ZERO, a.qpn, attr).unwrap();
    }

    /// Goes to SQD and sets one attribute there.
    fn retune(&mut self, bit: AttrMask, adjust: impl Fn(&mut QpAttr)) {
        let mut attr = QpAttr { mask: bit, ..QpAttr::to(Sqd) };
        adjust(&mut attr);
        self.modify(&QpAttr::to(Sqd));
        self.modify(&attr);
    }

    fn limit_reads(&mut self, limit: u8) {
        self.retune(AttrMask::MAX_QP_RD_ATOMIC, |attr| attr.max_rd_atomic = limit);
    }

    fn ended(&mut self) -> Vec<(u64, WcStatus)> {
        self.network.run_until(self.network.now() + Duration::from_millis(2000));
        let a = self.a;
        brief(&self.network.sent_by(a))
    }

    /// Whether READ `wr_id` has returned the peer's bytes.
    fn has_read(&self, wr_id: u64) -> bool {
        let [ours, theirs] = [&self.network.nodes[0].memory, &self.network.nodes[1].memory];
        let at = BASE + 4096 * wr_id;
        ours.peek(at, 1500) == theirs.peek(at, 1500)
    }
}

#[test]
fn more_reads_may_be_in_flight_once_the_limit_is_raised() {
    for (mode, before) in MODES.into_iter().flat_map(|mode| [(mode, 0), (mode, 1), (mode, 3)]) {
        let mut tuned = Tuned::new(|attr| (attr.reliability, attr.max_rd_atomic) = (mode, before));
        // The slots in use do not begin with the first.
        for wr_id in 0..u64::from(before) / 2 {
            tuned.read(wr_id);
        }
        tuned.network.run(1_000);
        tuned.network.sent_by(tuned.a);
        tuned.limit_reads(16);
        tuned.modify(&QpAttr::to(Rts));
        let wanted: Vec<_> = (0..20).map(|wr_id| (wr_id, Success)).collect();
        (0..20).for_each(|wr_id| tuned.read(wr_id));
        assert_eq!(tuned.ended(), wanted, "{mode:?} from {before}");
        assert!((0..20).all(|wr_id| tuned.has_read(wr_id)), "{mode:?} from {before}");
    }
}

/// READs that were started are finished, losses and all, whatever the limit is now.
#[test]
fn the_limit_of_reads_changes_under_reads_in_flight() {
    for (mode, limit) in MODES.into_iter().flat_map(|mode| [0, 1, 2, 9].map(|limit| (mode, limit)))
    {
        let mut tuned = Tuned::new(|attr| (attr.reliability, attr.max_rd_atomic) = (mode, 4));
        let mut responses = 0;
        tuned.network.keep_if(move |headers| {
            responses += u32::from(headers.bth().opcode.is_response());
            !headers.bth().opcode.is_response() || responses > 12
        });
        (0..6).for_each(|wr_id| tuned.read(wr_id));
        tuned.network.settle();
        tuned.limit_reads(limit);
        let begun: Vec<_> = (0..4).map(|wr_id| (wr_id, Success)).collect();
        assert_eq!(tuned.ended(), begun, "{mode:?} to {limit}");
        tuned.limit_reads_from_drained(5);
        assert_eq!(tuned.ended(), [(4, Success), (5, Success)], "{mode:?} to {limit}");
        assert!((0..6).all(|wr_id| tuned.has_read(wr_id)), "{mode:?} to {limit}");
    }
}

impl Tuned {
    /// Sets the limit in SQD, and goes on.
    fn limit_reads_from_drained(&mut self, limit: u8) {
        let mask = AttrMask::MAX_QP_RD_ATOMIC;
        self.modify(&QpAttr { mask, max_rd_atomic: limit, ..QpAttr::to(Sqd) });
        self.modify(&QpAttr::to(Rts));
    }
}

#[test]
fn retries_and_timeout_are_those_set_last() {
    for mode in MODES {
        // More retries, while one is needed.
        let mut tuned = Tuned::new(|attr| {
            (attr.reliability, attr.retry_count, attr.timeout) = (mode, 0, 8);
        });
        let mut lost = 0;
        tuned.network.keep_if(move |_| {
            lost += 1;
            lost > 4
        });
        let (op, b) = (SendOp::Send, tuned.b);
        tuned.network.post_recv(b, recv(7, list(tuned.regions[1], 0, 100)));
        tuned.post(1, op, 100);
        tuned.network.settle();
        tuned.retune(AttrMask::RETRY_CNT, |attr| attr.retry_count = 7);
        assert_eq!(tuned.ended(), [(1, Success)], "{mode:?}");
        // A timeout, where there was none.
        let mut tuned = Tuned::new(|attr| (attr.reliability, attr.timeout) = (mode, 0));
        tuned.network.keep_if(|_| false);
        tuned.post(1, op, 100);
        assert_eq!(tuned.ended(), [], "{mode:?}: waits for ever");
        tuned.retune(AttrMask::TIMEOUT, |attr| attr.timeout = 8);
        assert_eq!(tuned.ended(), [(1, RetryExceeded)], "{mode:?}");
    }
}

// ---- SQE ---------------------------------------------------------------------------------------

#[test]
fn a_failed_send_stops_sending_but_not_receiving() {
    for transport in [Transport::Uc, Transport::Ud] {
        let mut network = Network::new(&NetworkConfig::default());
        let regions = [0, 1].map(|node: usize| registered(&mut network.nodes[node]));
        let (a, b) = network.pair_of(transport, Mtu::M256);
        let (to, back) = (Some(network.address(b)), Some(network.address(a)));
        let bad: SgList = [Sge { addr: BASE, len: 8, lkey: 1 }].into_iter().collect();
        let good = list(regions[0], 0, 100);
        for (wr_id, sges) in [(1, good.clone()), (2, bad), (3, good.clone())] {
            network.post_send(a, SendWr { to, ..send(wr_id, SendOp::Send, sges) });
        }
        network.run(1_000);
        let endings = [(1, Success), (2, LocalProtectionError), (3, WrFlushError)];
        assert_eq!(brief(&network.sent_by(a)), endings, "{transport:?}");
        assert_eq!(network.state(a), Sqe);
        network.post_send(a, SendWr { to, ..send(4, SendOp::Send, good.clone()) });
        assert_eq!(brief(&network.sent_by(a)), [(4, WrFlushError)]);
        network.post_recv(a, recv(5, list(regions[0], 4096, 300)));
        network.post_send(b, SendWr { to: back, ..send(6, SendOp::Send, list(regions[1], 0, 64)) });
        network.run(1_000);
        assert_eq!(brief(&network.received_by(a)), [(5, Success)], "{transport:?}");
        network.endpoint(a).modify_qp(Time::ZERO, a.qpn, &QpAttr::to(Rts)).unwrap();
        network.post_recv(b, recv(7, list(regions[1], 4096, 300)));
        network.post_send(a, SendWr { to, ..send(8, SendOp::Send, good) });
        network.run(1_000);
        assert_eq!(brief(&network.sent_by(a)), [(8, Success)]);
        assert_eq!(brief(&network.received_by(b)), [(7, Success)]);
    }
}

#[test]
fn sends_go_on_after_a_queue_failed_while_it_drained() {
    for asks_for_event in [false, true] {
        let mut network = Network::new(&NetworkConfig::default());
        let regions = [0, 1].map(|node: usize| registered(&mut network.nodes[node]));
        let (a, b) = network.pair_of(Transport::Uc, Mtu::M256);
        let gone = network.nodes[0].register(BASE + 8192, 4096, Access::ALL).unwrap();
        network.post_send(a, send(1, SendOp::Send, list(gone, 0, 1024)));
        let first = network.endpoint(a).poll_transmit(Time::ZERO).unwrap();
        network.inject(a, &first);
        network.endpoint(a).modify_qp(Time::ZERO, a.qpn, &drain(asks_for_event)).unwrap();
        network.nodes[0].deregister(gone.lkey).unwrap();
        network.run(1_000);
        assert_eq!(network.state(a), Sqe);
        assert_eq!(brief(&network.sent_by(a)), [(1, LocalProtectionError)]);
        network.endpoint(a).modify_qp(Time::ZERO, a.qpn, &QpAttr::to(Rts)).unwrap();
        network.post_recv(b, recv(2, list(regions[1], 0, 100)));
        network.post_send(a, send(3, SendOp::Send, list(regions[0], 0, 100)));
        network.run(1_000);
        assert_eq!(brief(&network.sent_by(a)), [(3, Success)]);
        assert_eq!(brief(&network.received_by(b)), [(2, Success)]);
        // The event of the failed queue is no longer requested.
        network.endpoint(a).modify_qp(Time::ZERO, a.qpn, &QpAttr::to(Sqd)).unwrap();
        assert_eq!(network.endpoint(a).poll_event(), None);
    }
}
