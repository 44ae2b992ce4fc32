//! Changing keys: memory windows, invalidation by either side, regions at other addresses, access
//! rights of queue pairs, and the order of local operations and fences among the sends.

use roce::Time;
use roce::endpoint::{AttrMask, Counters, QpAttr, QpState, SrqConfig};
use roce::verbs::{
    Access, Completion, Qpn, RecvWr, SendOp, SendWr, SgList, VerbsError, WcOpcode, WcStatus,
    WindowBinding, WindowId,
};
use roce::wire::{Ext, Headers, Opcode};

use WcStatus::{Success, WrFlushError};

use crate::harness::{BASE, End};
use crate::kit::register_at;
use crate::pair::{Endings, Pair, REGION_BYTES};

/// The window is bound to node 1's bytes from here on.
const SHOWN: u64 = 4096;
const SHOWN_BYTES: u64 = 1000;

/// A work request of a node without buffers.
fn local(wr_id: u64, op: SendOp) -> SendWr {
    SendWr { wr_id, op, signaled: true, ..SendWr::default() }
}

/// Posts on node 1, the owner of the memory, and runs until nothing happens.
fn on_owner(pair: &mut Pair, wr: SendWr) -> Vec<Completion> {
    pair.network.nodes[1].endpoint.post_send(Time::ZERO, pair.b.qpn, wr).unwrap();
    pair.network.run(10_000);
    pair.network.sent_by(pair.b)
}

fn binding(pair: &Pair, window: WindowId, rkey: u32) -> WindowBinding {
    WindowBinding {
        window,
        rkey,
        lkey: pair.regions[1].lkey,
        addr: BASE + SHOWN,
        len: SHOWN_BYTES,
        access: Access::ALL,
        zero_based: false,
    }
}

/// The key after `rkey`, as a program chooses it.
fn next_key(rkey: u32) -> u32 {
    rkey & !0xff | rkey.wrapping_add(1) & 0xff
}

/// A type 2 window of node 1, bound on its queue pair, and its key.
fn window(pair: &mut Pair) -> (WindowId, u32) {
    let node = &mut pair.network.nodes[1];
    let (window, first) = node.endpoint.alloc_window(node.pd, true).unwrap();
    let key = next_key(first);
    let wanted = binding(pair, window, key);
    let done = on_owner(pair, local(100, SendOp::BindWindow(wanted)));
    assert_eq!((done[0].status, done[0].opcode), (Success, WcOpcode::BindWindow));
    (window, key)
}

/// The key of a type 2 window of node 0, bound on its queue pair: something to invalidate.
fn own_window(pair: &mut Pair) -> u32 {
    let lkey = pair.regions[0].lkey;
    let node = &mut pair.network.nodes[0];
    let (window, first) = node.endpoint.alloc_window(node.pd, true).unwrap();
    let wanted = WindowBinding { lkey, ..binding(pair, window, next_key(first)) };
    let bind = SendWr { signaled: false, ..local(100, SendOp::BindWindow(wanted)) };
    pair.network.nodes[0].endpoint.post_send(Time::ZERO, pair.a.qpn, bind).unwrap();
    pair.network.run(10_000);
    wanted.rkey
}

/// WRITE, READ and fetch-and-add of the peer at `offset` under a key.
fn uses(rkey: u32, offset: u64) -> [SendOp; 3] {
    let remote_addr = BASE + offset;
    [
        SendOp::Write { remote_addr, rkey },
        SendOp::Read { remote_addr, rkey },
        SendOp::FetchAdd { remote_addr, rkey, add: 1 },
    ]
}

fn post_all(pair: &mut Pair, ops: impl IntoIterator<Item = SendOp>) {
    for (wr_id, op) in ops.into_iter().enumerate() {
        let wr = pair.wr(wr_id as u64, op, 50_000, 8);
        pair.post(wr);
    }
}

/// How one use of a key ends, on a pair that `make` has prepared.
fn one_use(which: usize, make: impl FnOnce(&mut Pair) -> (u32, u64)) -> (WcStatus, Counters) {
    let mut pair = Pair::new();
    let (rkey, offset) = make(&mut pair);
    post_all(&mut pair, [uses(rkey, offset)[which]]);
    let (sent, _) = pair.run();
    (sent[0].1, *pair.counters(1))
}

// ---- windows -----------------------------------------------------------------------------------

#[test]
fn a_window_shows_its_part_and_no_more() {
    for which in 0..3 {
        for (offset, status) in [
            (SHOWN, Success),
            (SHOWN + SHOWN_BYTES - 8, Success),
            (SHOWN - 8, WcStatus::RemoteAccessError),
            (SHOWN + SHOWN_BYTES, WcStatus::RemoteAccessError),
        ] {
            let (ended, counters) = one_use(which, |pair| (window(pair).1, offset));
            assert_eq!(ended, status, "use {which} at {offset}");
            assert_eq!(counters.bad_bounds, u64::from(status != Success));
        }
    }
}

#[test]
fn a_window_allows_what_it_was_bound_with() {
    let rights = [Access::REMOTE_WRITE, Access::REMOTE_READ];
    for (granted, access) in rights.into_iter().enumerate() {
        for which in 0..3 {
            let (ended, counters) = one_use(which, |pair| {
                let node = &mut pair.network.nodes[1];
                let (window, first) = node.endpoint.alloc_window(node.pd, true).unwrap();
                let rkey = next_key(first);
                let wanted = WindowBinding { access, ..binding(pair, window, rkey) };
                on_owner(pair, local(100, SendOp::BindWindow(wanted)));
                (rkey, SHOWN)
            });
            let refused = u64::from(granted != which);
            assert_eq!((ended == Success, counters.bad_access), (refused == 0, refused));
        }
    }
}

/// A second connection between the same nodes, and its end on node 0.
fn second_connection(pair: &mut Pair) -> (End, End) {
    pair.network.pair(|_| {})
}

fn use_on(pair: &mut Pair, end: End, rkey: u32) -> WcStatus {
    let wr = pair.wr(9, uses(rkey, SHOWN)[0], 0, 8);
    pair.network.nodes[0].endpoint.post_send(Time::ZERO, end.qpn, wr).unwrap();
    pair.network.run(10_000);
    pair.network.sent_by(end)[0].status
}

#[test]
fn a_type_2_window_serves_one_queue_pair_and_type_1_the_domain() {
    let mut pair = Pair::new();
    let (_, rkey) = window(&mut pair);
    let (other, _) = second_connection(&mut pair);
    assert_eq!(use_on(&mut pair, other, rkey), WcStatus::RemoteAccessError);
    assert_eq!(pair.counters(1).bad_pd, 1);

    let mut pair = Pair::new();
    let node = &mut pair.network.nodes[1];
    let (window, _) = node.endpoint.alloc_window(node.pd, false).unwrap();
    let wanted = binding(&pair, window, 0);
    let endpoint = &mut pair.network.nodes[1].endpoint;
    let rkey = endpoint.bind_window(Time::ZERO, pair.b.qpn, 3, wanted, true).unwrap();
    pair.network.run(1_000);
    let done = pair.network.sent_by(pair.b);
    assert_eq!((done[0].wr_id, done[0].opcode), (3, WcOpcode::BindWindow));
    let (other, _) = second_connection(&mut pair);
    assert_eq!(use_on(&mut pair, other, rkey), Success);
}

#[test]
fn a_type_1_window_is_bound_again_and_its_old_key_dies() {
    let mut pair = Pair::new();
    let node = &mut pair.network.nodes[1];
    let (window, _) = node.endpoint.alloc_window(node.pd, false).unwrap();
    let wanted = binding(&pair, window, 0);
    let endpoint = &mut pair.network.nodes[1].endpoint;
    let keys =
        [0, 1].map(|_| endpoint.bind_window(Time::ZERO, pair.b.qpn, 0, wanted, true).unwrap());
    assert_ne!(keys[0], keys[1]);
    pair.network.run(1_000);
    post_all(&mut pair, [uses(keys[1], SHOWN)[0], uses(keys[0], SHOWN)[0]]);
    assert_eq!(pair.run().0, [(0, Success), (1, WcStatus::RemoteAccessError)]);
}

#[test]
fn windows_of_the_wrong_kind_or_of_nobody_are_refused_at_once() {
    let mut pair = Pair::new();
    let (b, node) = (pair.b.qpn, &mut pair.network.nodes[1]);
    let (type_2, _) = node.endpoint.alloc_window(node.pd, true).unwrap();
    let wanted = binding(&pair, type_2, 0);
    let endpoint = &mut pair.network.nodes[1].endpoint;
    let wrong = endpoint.bind_window(Time::ZERO, b, 0, wanted, true);
    assert!(matches!(wrong, Err(VerbsError::Invalid { .. })));
    let stranger = WindowBinding { window: WindowId(9), ..wanted };
    assert_eq!(
        endpoint.bind_window(Time::ZERO, b, 0, stranger, true),
        Err(VerbsError::NoWindow(9))
    );
    assert_eq!(endpoint.dealloc_window(WindowId(9)), Err(VerbsError::NoWindow(9)));
    let buffers = pair.sge(1, 0, 8);
    let with_buffers = SendWr { sges: buffers, ..local(0, SendOp::BindWindow(wanted)) };
    let endpoint = &mut pair.network.nodes[1].endpoint;
    let refused = endpoint.post_send(Time::ZERO, b, with_buffers);
    assert!(matches!(refused, Err(VerbsError::Invalid { .. })));
}

#[test]
fn a_binding_that_is_not_legal_is_a_bind_error_and_ends_the_connection() {
    type Spoil = fn(&mut WindowBinding);
    let cases: [Spoil; 5] = [
        |wanted| wanted.lkey ^= 1 << 20,
        |wanted| wanted.len = REGION_BYTES,
        |wanted| wanted.len = 0,
        |wanted| wanted.rkey ^= 1 << 12,
        |wanted| wanted.window = WindowId(77),
    ];
    for (index, spoil) in cases.into_iter().enumerate() {
        let mut pair = Pair::new();
        let node = &mut pair.network.nodes[1];
        let (window, first) = node.endpoint.alloc_window(node.pd, true).unwrap();
        let mut wanted = binding(&pair, window, next_key(first));
        spoil(&mut wanted);
        let done = on_owner(&mut pair, local(0, SendOp::BindWindow(wanted)));
        assert_eq!(done[0].status, WcStatus::WindowBindError, "case {index}");
        assert_eq!(pair.state(1), QpState::Error);
    }
}

#[test]
fn regions_stay_while_windows_are_bound_to_them() {
    let mut pair = Pair::new();
    let lkey = pair.regions[1].lkey;
    let (window, rkey) = window(&mut pair);
    let endpoint = &mut pair.network.nodes[1].endpoint;
    assert_eq!(endpoint.deregister(lkey), Err(VerbsError::RegionInUse(lkey)));
    endpoint.dealloc_window(window).unwrap();
    post_all(&mut pair, [uses(rkey, SHOWN)[0]]);
    assert_eq!(pair.run().0, [(0, WcStatus::RemoteAccessError)]);
    pair.network.nodes[1].endpoint.deregister(lkey).unwrap();
}

#[test]
fn domains_stay_while_regions_or_windows_belong_to_them() {
    let mut pair = Pair::new();
    let node = &mut pair.network.nodes[1];
    let pd = node.endpoint.alloc_pd();
    let region = node.endpoint.register(pd, BASE, 64, Access::LOCAL).unwrap();
    assert_eq!(node.endpoint.dealloc_pd(pd), Err(VerbsError::PdInUse(pd.0)));
    node.endpoint.deregister(region.lkey).unwrap();
    let (window, _) = node.endpoint.alloc_window(pd, true).unwrap();
    assert_eq!(node.endpoint.dealloc_pd(pd), Err(VerbsError::PdInUse(pd.0)));
    node.endpoint.dealloc_window(window).unwrap();
    node.endpoint.dealloc_pd(pd).unwrap();
    assert_eq!(node.endpoint.alloc_window(pd, true), Err(VerbsError::NoPd(pd.0)));
}

// ---- invalidation ------------------------------------------------------------------------------

/// Node 0 sends 100 bytes and invalidates `rkey` of node 1 with them.
fn send_invalidate(pair: &mut Pair, rkey: u32) -> (Endings, Vec<Completion>) {
    pair.receive(7, 100);
    pair.receive(8, 100);
    let wr = pair.wr(1, SendOp::SendInvalidate(rkey), 0, 100);
    pair.post(wr);
    pair.network.run(10_000);
    let brief = |wc: &Completion| (wc.wr_id, wc.status);
    let sent = pair.network.sent_by(pair.a).iter().map(brief).collect();
    (sent, pair.network.received_by(pair.b))
}

#[test]
fn a_send_takes_a_window_away_and_says_so() {
    let mut pair = Pair::new();
    let (_, rkey) = window(&mut pair);
    let (sent, received) = send_invalidate(&mut pair, rkey);
    assert_eq!(sent, [(1, Success)]);
    let [first] = received[..] else { panic!("{received:?}") };
    let told = (first.wr_id, first.status, first.opcode, first.byte_len, first.invalidated);
    assert_eq!(told, (7, Success, WcOpcode::Recv, 100, Some(rkey)));
    assert_eq!(pair.trace()[0].ext(), &Ext::Ieth(rkey));
    post_all(&mut pair, [uses(rkey, SHOWN)[1]]);
    assert_eq!(pair.run().0, [(0, WcStatus::RemoteAccessError)]);
    assert_eq!(pair.counters(1).bad_key, 1);
}

#[test]
fn a_long_send_takes_the_key_away_with_its_last_packet() {
    let mut pair = Pair::with(|connect| connect.mtu = roce::endpoint::Mtu::M256);
    let (_, rkey) = window(&mut pair);
    pair.receive(7, 600);
    let wr = pair.wr(1, SendOp::SendInvalidate(rkey), 0, 600);
    pair.lose(|asked, _| asked == 2);
    pair.post(wr);
    assert_eq!(pair.run(), (vec![(1, Success)], vec![(7, Success)]));
    let carried = pair.trace().iter().filter(|headers| headers.bth().opcode.carries_invalidate());
    assert!(carried.into_iter().all(|h| h.bth().opcode == Opcode::RcSendLastInvalidate));
}

#[test]
fn a_window_ends_with_its_queue_pair() {
    let mut pair = Pair::new();
    let (id, rkey) = window(&mut pair);
    let (lkey, number) = (pair.regions[1].lkey, pair.b.qpn);
    let endpoint = &mut pair.network.nodes[1].endpoint;
    assert_eq!(endpoint.deregister(lkey), Err(VerbsError::RegionInUse(lkey)));
    endpoint.destroy_qp(Time::ZERO, number).unwrap();
    endpoint.deregister(lkey).unwrap();
    endpoint.dealloc_window(id).unwrap();
    post_all(&mut pair, [uses(rkey, SHOWN)[1]]);
    assert_ne!(pair.run().0, [(0, Success)]);
}

#[test]
fn a_key_that_may_not_be_taken_away_ends_the_connection() {
    type Key = fn(&mut Pair) -> u32;
    let cases: [Key; 6] = [
        |pair| pair.regions[1].lkey,
        |pair| pair.regions[1].rkey ^ 0x8000_0000,
        |pair| pair.network.nodes[1].register(BASE, 64, Access::ALL).unwrap().rkey,
        |pair| {
            let node = &mut pair.network.nodes[1];
            let other = node.endpoint.alloc_pd();
            node.register_at(other, BASE, 64, BASE, Access::ALL).unwrap().rkey
        },
        |pair| {
            window(pair);
            pair.regions[1].rkey
        },
        |pair| {
            let node = &mut pair.network.nodes[1];
            let (window, _) = node.endpoint.alloc_window(node.pd, false).unwrap();
            let wanted = binding(pair, window, 0);
            let endpoint = &mut pair.network.nodes[1].endpoint;
            endpoint.bind_window(Time::ZERO, pair.b.qpn, 3, wanted, false).unwrap()
        },
    ];
    for (index, key) in cases.into_iter().enumerate() {
        let mut pair = Pair::new();
        let rkey = key(&mut pair);
        pair.network.run(1_000);
        let (sent, received) = send_invalidate(&mut pair, rkey);
        assert_eq!(sent, [(1, WcStatus::RemoteAccessError)], "case {index}");
        let ends: Vec<_> = received.iter().map(|wc| (wc.wr_id, wc.status)).collect();
        assert_eq!(ends, [(7, WcStatus::RemoteInvalidRequest), (8, WrFlushError)]);
        assert_eq!(pair.counters(1).bytes_received, 0);
    }
}

#[test]
fn a_repeated_send_takes_nothing_away_again() {
    let mut pair = Pair::new();
    let (window, rkey) = window(&mut pair);
    let mut lost = false;
    pair.lose(move |_, headers| {
        headers.bth().opcode == Opcode::RcAcknowledge && !std::mem::replace(&mut lost, true)
    });
    pair.receive(7, 8);
    let wr = pair.wr(1, SendOp::SendInvalidate(rkey), 0, 8);
    pair.post(wr);
    pair.network.settle();
    pair.network.advance();
    // Bound again under another key before the SEND is duplicated.
    let again = binding(&pair, window, next_key(rkey));
    pair.network.nodes[1]
        .endpoint
        .post_send(Time::ZERO, pair.b.qpn, local(1, SendOp::BindWindow(again)))
        .unwrap();
    assert_eq!(pair.run(), (vec![(1, Success)], vec![(7, Success)]));
    assert_eq!(pair.counters(1).duplicates, 1);
    post_all(&mut pair, [uses(again.rkey, SHOWN)[0]]);
    assert_eq!(pair.run().0, [(0, Success)]);
}

#[test]
fn a_local_invalidation_takes_the_key_away_here() {
    let mut pair = Pair::new();
    let (_, rkey) = window(&mut pair);
    let done = on_owner(&mut pair, local(4, SendOp::LocalInvalidate(rkey)));
    let brief = (done[0].wr_id, done[0].status, done[0].opcode);
    assert_eq!(brief, (4, Success, WcOpcode::LocalInvalidate));
    post_all(&mut pair, [uses(rkey, SHOWN)[0]]);
    assert_eq!(pair.run().0, [(0, WcStatus::RemoteAccessError)]);

    let mut pair = Pair::new();
    let wrong = pair.regions[1].lkey;
    let done = on_owner(&mut pair, local(4, SendOp::LocalInvalidate(wrong)));
    assert_eq!((done[0].status, pair.counters(1).bad_key), (WcStatus::LocalQpError, 1));
}

// ---- order -------------------------------------------------------------------------------------

#[test]
fn local_operations_complete_in_their_turn() {
    let mut pair = Pair::new();
    let key = own_window(&mut pair);
    pair.write(0, 0, 100);
    pair.post(local(1, SendOp::LocalInvalidate(key)));
    pair.write(2, 0, 100);
    pair.network.settle();
    // Executed at once, it waits for the WRITE before it; the WRITE behind it does not wait.
    assert_eq!(pair.opcodes(), [Opcode::RcWriteOnly; 2]);
    assert_eq!(pair.network.sent_by(pair.a), []);
    assert_eq!(pair.run().0, [(0, Success), (1, Success), (2, Success)]);
}

#[test]
fn a_local_operation_is_carried_out_once_although_sends_are_repeated() {
    let mut pair = Pair::with(|connect| connect.timeout = 8);
    let key = own_window(&mut pair);
    let mut left = 4;
    pair.lose(move |_, headers| {
        let hit = headers.bth().opcode.is_request() && left > 0;
        left -= i32::from(hit);
        hit
    });
    pair.write(0, 0, 100);
    pair.post(local(1, SendOp::LocalInvalidate(key)));
    pair.write(2, 0, 100);
    assert_eq!(pair.run().0, [(0, Success), (1, Success), (2, Success)]);
    assert_eq!(pair.counters(0).timeouts, 3);
    assert_eq!(pair.counters(0).bad_key, 0);
}

#[test]
fn a_local_operation_that_fails_lets_what_was_before_it_finish() {
    let mut pair = Pair::new();
    pair.read(0, 5000);
    pair.write(1, 0, 100);
    pair.post(local(2, SendOp::LocalInvalidate(12)));
    pair.write(3, 0, 100);
    let wanted = [(0, Success), (1, Success), (2, WcStatus::LocalQpError), (3, WrFlushError)];
    assert_eq!(pair.run().0, wanted);
}

#[test]
fn only_local_operations_need_no_packets_at_all() {
    let mut pair = Pair::new();
    let keys: Vec<u32> = (0..5).map(|_| own_window(&mut pair)).collect();
    for (wr_id, key) in (0..).zip(keys) {
        pair.post(SendWr { signaled: wr_id != 1, ..local(wr_id, SendOp::LocalInvalidate(key)) });
    }
    assert_eq!(pair.run().0, [(0, Success), (2, Success), (3, Success), (4, Success)]);
    assert_eq!(pair.trace(), []);
}

/// Requests sent before any was acknowledged.
fn leaves_at_once(pair: &mut Pair) -> Vec<Opcode> {
    pair.network.settle();
    pair.opcodes()
}

#[test]
fn a_fenced_request_waits_for_reads_and_atomics_only() {
    use Opcode::{RcFetchAdd, RcReadRequest, RcWriteOnly};
    for (op, opcode) in [(1, RcReadRequest), (2, RcFetchAdd)] {
        let mut pair = Pair::new();
        let first = uses(pair.regions[1].rkey, 0)[op];
        post_all(&mut pair, [first]);
        let fenced = pair.wr(1, pair.write_op(0), 0, 8);
        pair.post(SendWr { fence: true, ..fenced });
        pair.write(2, 0, 8);
        assert_eq!(leaves_at_once(&mut pair), [opcode]);
        assert_eq!(pair.run().0, [(0, Success), (1, Success), (2, Success)]);
    }
    let mut pair = Pair::new();
    pair.write(0, 0, 8);
    let fenced = pair.wr(1, pair.read_op(), 100, 8);
    pair.post(SendWr { fence: true, ..fenced });
    pair.read(2, 8);
    assert_eq!(leaves_at_once(&mut pair), [RcWriteOnly, RcReadRequest, RcReadRequest]);
}

#[test]
fn a_local_operation_waits_for_reads() {
    let mut pair = Pair::new();
    let key = own_window(&mut pair);
    pair.read(0, 5000);
    pair.post(local(1, SendOp::LocalInvalidate(key)));
    pair.write(2, 0, 8);
    assert_eq!(leaves_at_once(&mut pair), [Opcode::RcReadRequest]);
    assert_eq!(pair.run().0, [(0, Success), (1, Success), (2, Success)]);
}

/// The fence also holds when a lost response makes the requester request the READ again.
#[test]
fn a_fence_holds_across_losses() {
    let mut pair = Pair::with(|connect| connect.timeout = 8);
    let mut left = 3;
    pair.lose(move |_, headers| {
        let hit = headers.bth().opcode.is_read_response() && left > 0;
        left -= i32::from(hit);
        hit
    });
    // The source of the READ is overwritten right behind the fence.
    let before = pair.network.nodes[1].memory.peek(BASE, 100).to_vec();
    pair.read(0, 100);
    let fenced = pair.wr(1, pair.write_op(0), 0, 100);
    pair.post(SendWr { fence: true, ..fenced });
    assert_eq!(pair.run().0, [(0, Success), (1, Success)]);
    assert_eq!(pair.network.nodes[0].memory.peek(BASE + 100_000, 100), before);
    assert!(pair.arrived(0, 100));
}

// ---- regions at other addresses ----------------------------------------------------------------

#[test]
fn regions_are_named_by_their_own_addresses() {
    let mut pair = Pair::new();
    let backing = BASE + 700_000;
    let far = register_at(&mut pair.network.nodes[1], 0, 4096, backing);
    let near = register_at(&mut pair.network.nodes[0], u64::MAX - 8191, 8191, BASE + 800_000);
    let sges = |len| -> SgList {
        [roce::verbs::Sge { addr: near.addr + 10, len, lkey: near.lkey }].into_iter().collect()
    };
    let sent = pair.network.nodes[0].memory.peek(BASE + 800_010, 3000).to_vec();
    let write = SendOp::Write { remote_addr: 96, rkey: far.rkey };
    pair.post(SendWr { sges: sges(3000), ..local(0, write) });
    assert_eq!(pair.run().0, [(0, Success)]);
    assert_eq!(pair.network.nodes[1].memory.peek(backing + 96, 3000), sent);
    let add = SendOp::FetchAdd { remote_addr: 4088, rkey: far.rkey, add: 5 };
    let read = SendOp::Read { remote_addr: 4000, rkey: far.rkey };
    pair.post(SendWr { sges: sges(8), ..local(1, add) });
    pair.post(SendWr { sges: sges(96), ..local(2, read) });
    assert_eq!(pair.run().0, [(1, Success), (2, Success)]);
    let [to, from] = [0, 1].map(|node: usize| &pair.network.nodes[node].memory);
    assert_eq!(to.peek(BASE + 800_010, 96), from.peek(backing + 4000, 96));
}

#[test]
fn a_zero_based_window_over_a_zero_based_region() {
    let mut pair = Pair::new();
    let backing = BASE + 700_000;
    let node = &mut pair.network.nodes[1];
    let region = register_at(node, 0, 4096, backing);
    let (window, first) = node.endpoint.alloc_window(node.pd, true).unwrap();
    let rkey = next_key(first);
    let (lkey, access) = (region.lkey, Access::REMOTE_WRITE);
    let wanted =
        WindowBinding { window, rkey, lkey, addr: 1000, len: 100, access, zero_based: true };
    on_owner(&mut pair, local(0, SendOp::BindWindow(wanted)));
    let wr = pair.wr(1, SendOp::Write { remote_addr: 10, rkey }, 0, 90);
    pair.post(wr);
    assert_eq!(pair.run().0, [(1, Success)]);
    let [from, to] = [0, 1].map(|node: usize| &pair.network.nodes[node].memory);
    assert_eq!(from.peek(BASE, 90), to.peek(backing + 1010, 90));
}

// ---- what queue pairs allow --------------------------------------------------------------------

/// Sets the peer's rights on node 1's queue pair.
fn restrict(pair: &mut Pair, access: Access) {
    let attr = QpAttr { mask: AttrMask::ACCESS_FLAGS, access, ..QpAttr::to(QpState::Rts) };
    pair.network.nodes[1].endpoint.modify_qp(Time::ZERO, pair.b.qpn, &attr).unwrap();
}

#[test]
fn the_queue_pair_has_to_allow_it_too() {
    let without = [
        Access { remote_write: false, ..Access::ALL },
        Access { remote_read: false, ..Access::ALL },
        Access { remote_atomic: false, ..Access::ALL },
    ];
    for (forbidden, access) in without.into_iter().enumerate() {
        for which in 0..3 {
            let (ended, counters) = one_use(which, |pair| {
                restrict(pair, access);
                (pair.regions[1].rkey, 0)
            });
            let refused = u64::from(forbidden == which);
            let status = if refused == 1 { WcStatus::RemoteInvalidRequest } else { Success };
            assert_eq!((ended, counters.bad_access), (status, refused));
        }
    }
}

#[test]
fn sends_need_no_rights() {
    let mut pair = Pair::new();
    restrict(&mut pair, Access::default());
    pair.receive(7, 100);
    pair.send(1, 100);
    assert_eq!(pair.run(), (vec![(1, Success)], vec![(7, Success)]));
}

// ---- receives ----------------------------------------------------------------------------------

#[test]
fn solicited_events_follow_the_last_packet() {
    let mut pair = Pair::with(|connect| connect.mtu = roce::endpoint::Mtu::M256);
    (0..4).for_each(|wr_id| pair.receive(wr_id, 1000));
    let rkey = pair.regions[1].rkey;
    let write = SendOp::WriteImm { remote_addr: BASE, rkey, imm: 1 };
    for (wr_id, op, solicited) in
        [(0, SendOp::Send, true), (1, SendOp::Send, false), (2, write, true), (3, write, false)]
    {
        let wr = pair.wr(wr_id, op, 0, 600);
        pair.post(SendWr { solicited, ..wr });
    }
    pair.network.run(10_000);
    let told: Vec<_> = pair.network.received_by(pair.b).iter().map(|wc| wc.solicited).collect();
    assert_eq!(told, [true, false, true, false]);
    let marked: Vec<_> =
        pair.trace().iter().filter(|h| h.bth().solicited).map(|h| h.bth().opcode).collect();
    assert_eq!(marked, [Opcode::RcSendLast, Opcode::RcWriteLastImm]);
}

#[test]
fn the_receive_in_progress_is_flushed_first() {
    let mut pair = Pair::with(|connect| connect.mtu = roce::endpoint::Mtu::M256);
    (0..3).for_each(|wr_id| pair.receive(wr_id, 1000));
    pair.lose(|asked, _| asked > 1);
    pair.send(1, 600);
    pair.network.settle();
    pair.network.advance();
    pair.network.nodes[1]
        .endpoint
        .modify_qp(Time::ZERO, pair.b.qpn, &QpAttr::to(QpState::Error))
        .unwrap();
    let ends: Vec<_> =
        pair.network.received_by(pair.b).iter().map(|wc| (wc.wr_id, wc.status)).collect();
    assert_eq!(ends, [(0, WrFlushError), (1, WrFlushError), (2, WrFlushError)]);
}

/// Two reliable connections whose receivers share a receive queue.
fn sharing() -> (Pair, [(End, End); 2], roce::verbs::SrqId) {
    let mut pair = Pair::with(|connect| connect.min_rnr_timer = 1);
    let pd = pair.network.nodes[1].pd;
    let config = SrqConfig { pd, max_wr: 16, limit: 0 };
    let srq = pair.network.nodes[1].endpoint.create_srq(config).unwrap();
    let ends = [0, 1].map(|_| {
        let from = pair.network.create_end(0, 16, 64);
        let to = pair.network.create_end_with(1, 16, 64, Some(srq));
        pair.network.connect(from, to, |connect| connect.min_rnr_timer = 1);
        (from, to)
    });
    (pair, ends, srq)
}

fn post_shared(pair: &mut Pair, srq: roce::verbs::SrqId, wr_id: u64) {
    let sges = pair.sge(1, 200_000 + 1000 * wr_id, 1000);
    pair.network.nodes[1].endpoint.post_srq_recv(srq, RecvWr { wr_id, sges }).unwrap();
}

fn send_on(pair: &mut Pair, qpn: Qpn, wr_id: u64) {
    let wr = pair.wr(wr_id, SendOp::Send, 0, 800);
    pair.network.nodes[0].endpoint.post_send(Time::ZERO, qpn, wr).unwrap();
}

#[test]
fn connections_share_receives_and_are_told_of_no_credits() {
    let (mut pair, ends, srq) = sharing();
    (0..4).for_each(|wr_id| post_shared(&mut pair, srq, wr_id));
    for wr_id in 0..2 {
        ends.iter().for_each(|(from, _)| send_on(&mut pair, from.qpn, wr_id));
    }
    pair.network.run(10_000);
    let mut taken: Vec<u64> = Vec::new();
    for (from, to) in ends {
        assert_eq!(pair.network.sent_by(from).len(), 2);
        taken.extend(pair.network.received_by(to).iter().map(|wc| wc.wr_id));
    }
    taken.sort_unstable();
    assert_eq!(taken, [0, 1, 2, 3]);
    let no_credits = |headers: &&Headers| {
        headers
            .ext()
            .aeth()
            .is_some_and(|aeth| aeth.syndrome == roce::wire::Syndrome::Ack { credits: 31 })
    };
    assert!(pair.trace().iter().filter(no_credits).count() >= 2);
    assert_eq!(pair.counters(0).credit_probes, 0);
}

#[test]
fn an_empty_shared_queue_makes_senders_wait() {
    let (mut pair, ends, srq) = sharing();
    let (from, to) = ends[0];
    send_on(&mut pair, from.qpn, 0);
    pair.network.run_until(Time::from_nanos(200_000));
    assert!(pair.counters(1).rnr_naks_sent > 2);
    post_shared(&mut pair, srq, 5);
    pair.network.run(10_000);
    assert_eq!(pair.network.sent_by(from)[0].status, Success);
    assert_eq!(pair.network.received_by(to)[0].wr_id, 5);
}

#[test]
fn a_broken_connection_flushes_the_receive_that_it_took_and_no_other() {
    let (mut pair, ends, srq) = sharing();
    (0..3).for_each(|wr_id| post_shared(&mut pair, srq, wr_id));
    let (from, to) = ends[0];
    pair.lose(|asked, _| asked > 1);
    let wr = pair.wr(0, SendOp::Send, 0, 1000);
    let long = SendWr { sges: pair.sge(0, 0, 5000), ..wr };
    pair.network.nodes[0].endpoint.post_send(Time::ZERO, from.qpn, long).unwrap();
    pair.network.settle();
    pair.network.advance();
    // The first packet does not fit: 1024 bytes into 1000.
    let ends_of: Vec<_> =
        pair.network.received_by(to).iter().map(|wc| (wc.wr_id, wc.status)).collect();
    assert_eq!(ends_of, [(0, WcStatus::LocalLengthError)]);
    pair.network.keep_all();
    send_on(&mut pair, ends[1].0.qpn, 1);
    pair.network.run(100_000);
    assert_eq!(pair.network.received_by(ends[1].1)[0].wr_id, 1);
}

// ---- draining ----------------------------------------------------------------------------------

fn drain_sends(pair: &mut Pair) {
    let attr = QpAttr { mask: AttrMask::STATE, ..QpAttr::to(QpState::Sqd) };
    pair.network.nodes[0].endpoint.modify_qp(Time::ZERO, pair.a.qpn, &attr).unwrap();
}

#[test]
fn a_draining_queue_pair_finishes_what_it_began_and_begins_nothing() {
    let mut pair = Pair::with(|connect| {
        connect.window_packets = 4;
        connect.mtu = roce::endpoint::Mtu::M256;
        connect.timeout = 8;
    });
    let key = own_window(&mut pair);
    pair.lose(|asked, _| asked == 3);
    pair.write(0, 0, 2000);
    pair.post(local(1, SendOp::LocalInvalidate(key)));
    pair.write(2, 0, 100);
    pair.network.settle();
    drain_sends(&mut pair);
    assert_eq!(pair.run().0, [(0, Success)]);
    let wanted = QpAttr { cur_state: QpState::Sqd, ..QpAttr::to(QpState::Rts) };
    pair.network.nodes[0].endpoint.modify_qp(Time::ZERO, pair.a.qpn, &wanted).unwrap();
    assert_eq!(pair.run().0, [(1, Success), (2, Success)]);
}
