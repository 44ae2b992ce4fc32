//! The cells: behaviour that every device has in common, written once.

use std::net::Ipv4Addr;

use arrayvec::ArrayVec;
use roce::device::Device;
use roce::endpoint::{AsyncEvent, AttrMask, Connect, QpAttr, QpState};
use roce::verbs::{
    Access, Completion, GRH_BYTES, Qpn, SendOp, SendWr, SgList, Sge, Transport, VerbsError,
    WcOpcode, WcStatus, WindowBinding, WindowId,
};

use super::rig::{BUFFER, Cell, Miss, Pair, Rig, Setup, ensure, ensure_eq};

/// A cell and its name.
pub(crate) type Named<R> = (&'static str, fn(&mut R) -> Cell);

/// Every cell by its name.
pub(crate) fn all<R: Rig>() -> Vec<Named<R>> {
    vec![
        ("rc: send", |rig| send(rig, Transport::Rc)),
        ("rc: send of many packets from several pieces", send_pieces),
        ("rc: send with immediate", |rig| send_imm(rig, Transport::Rc)),
        ("rc: send with invalidate", send_invalidate),
        ("rc: write", |rig| write(rig, Transport::Rc)),
        ("rc: write with immediate", |rig| write_imm(rig, Transport::Rc)),
        ("rc: read", read),
        ("rc: compare and swap", compare_swap),
        ("rc: fetch and add", fetch_add),
        ("rc: a batch completes in order", batch),
        ("rc: a batch that does not fit", batch_too_long),
        ("rc: attributes as they were set", attributes),
        ("rc: RNR retry exceeded", rnr_exceeded),
        ("rc: retry exceeded", retry_exceeded),
        ("rc: wrong remote key", |rig| refused(rig, Access::ALL, 0, 1)),
        ("rc: right that is missing", |rig| refused(rig, Access::LOCAL, 0, 0)),
        ("rc: remote bounds", |rig| refused(rig, Access::ALL, BUFFER - 4, 0)),
        ("rc: wrong local key", local_key),
        ("rc: receive that is too short", |rig| too_short(rig)),
        ("rc: flush", |rig| flush(rig, Transport::Rc)),
        ("rc: events of completion queues", events),
        ("rc: solicited events", solicited),
        ("rc: event of a refused request", access_event),
        ("rc: shared receives and their limit", shared_receives),
        ("rc: memory window", window),
        ("rc: bounds of a memory window", window_bounds),
        ("rc: region that changes", changed_region),
        ("rc: completion queue that grows", resized_queue),
        ("uc: send", |rig| send(rig, Transport::Uc)),
        ("uc: send with immediate", |rig| send_imm(rig, Transport::Uc)),
        ("uc: write", |rig| write(rig, Transport::Uc)),
        ("uc: write with immediate", |rig| write_imm(rig, Transport::Uc)),
        ("uc: flush", |rig| flush(rig, Transport::Uc)),
        ("ud: send", |rig| datagram(rig, None)),
        ("ud: send with immediate", |rig| datagram(rig, Some(0xa1b2_c3d4))),
        ("ud: wrong queue key", wrong_qkey),
        ("ud: membership of a multicast group", membership),
        ("ud: flush", |rig| flush(rig, Transport::Ud)),
        ("objects in use stay", in_use),
    ]
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + 3) as u8).collect()
}

fn send<R: Rig>(rig: &mut R, transport: Transport) -> Cell {
    let mut pair = Pair::new(rig, Setup::of(transport))?;
    pair.fill(0, 0, &pattern(100));
    pair.receive(1, 9, 64, 200)?;
    pair.send(SendOp::Send, 0, 100)?;
    let sent = pair.expect_sent(WcStatus::Success)?;
    ensure_eq!((sent.opcode, sent.wr_id), (WcOpcode::Send, 100), "the send");
    let done = pair.expect_received(1, WcStatus::Success)?;
    let seen = (done.opcode, done.wr_id, done.byte_len, done.imm);
    ensure_eq!(seen, (WcOpcode::Recv, 9, 100, None), "the receive");
    ensure_eq!(pair.bytes(1, 64, 100), pattern(100), "the message");
    pair.close()
}

fn send_pieces<R: Rig>(rig: &mut R) -> Cell {
    let mut pair = Pair::new(rig, Setup::of(Transport::Rc))?;
    let message = pattern(10_000);
    let (lkey, base) = (pair.regions[0].lkey, pair.regions[0].addr);
    let (mut sges, mut at) = (SgList::new(), 0);
    for (len, place) in [(1, 5), (4_999, 1_000), (5_000, 20_000)] {
        pair.fill(0, place, &message[at..at + len]);
        sges.push(Sge { addr: base + place, len: len as u32, lkey });
        at += len;
    }
    pair.receive(1, 1, 0, 10_000)?;
    pair.post(&[SendWr { sges, signaled: true, ..SendWr::default() }])?;
    pair.expect_sent(WcStatus::Success)?;
    ensure_eq!(pair.expect_received(1, WcStatus::Success)?.byte_len, 10_000, "the length");
    ensure!(pair.bytes(1, 0, 10_000) == message, "the message is another one");
    pair.close()
}

fn send_imm<R: Rig>(rig: &mut R, transport: Transport) -> Cell {
    let mut pair = Pair::new(rig, Setup::of(transport))?;
    pair.receive(1, 1, 0, 64)?;
    pair.send(SendOp::SendImm(0x0102_0304), 0, 10)?;
    pair.expect_sent(WcStatus::Success)?;
    let done = pair.expect_received(1, WcStatus::Success)?;
    ensure_eq!((done.opcode, done.byte_len), (WcOpcode::Recv, 10), "the receive");
    ensure_eq!(done.imm, Some(0x0102_0304), "the immediate");
    pair.close()
}

/// Binds a new window on side 1 to part of its buffer, and returns its key.
fn bind<R: Rig>(pair: &mut Pair<'_, R>, offset: u64, len: u64) -> Result<(WindowId, u32), Miss> {
    let pd = pair.pds[1];
    let (window, key) = pair.device(1).alloc_window(pd, true)?;
    let rkey = key & !0xff | (key.wrapping_add(1) & 0xff);
    let (lkey, addr) = (pair.regions[1].lkey, pair.regions[1].addr + offset);
    let (access, zero_based) = (Access { local_write: false, ..Access::REMOTE_WRITE }, false);
    let binding = WindowBinding { window, rkey, lkey, addr, len, access, zero_based };
    let wr = SendWr { op: SendOp::BindWindow(binding), signaled: true, ..SendWr::default() };
    let (now, qpn, cq) = (pair.rig.now(), pair.qpns[1], pair.send_cqs[1]);
    pair.device(1).post_send(now, qpn, &[wr])?;
    let bound = pair.wait("the window", |rig| {
        let mut done = ArrayVec::<Completion, 1>::new();
        rig.device(1).poll_cq(cq, &mut done)?;
        Ok(done.pop())
    })?;
    ensure_eq!((bound.status, bound.opcode), (WcStatus::Success, WcOpcode::BindWindow), "binding");
    Ok((window, rkey))
}

fn send_invalidate<R: Rig>(rig: &mut R) -> Cell {
    let mut pair = Pair::new(rig, Setup::of(Transport::Rc))?;
    let (window, key) = bind(&mut pair, 0, 4096)?;
    pair.receive(1, 1, 8192, 64)?;
    pair.send(SendOp::SendInvalidate(key), 0, 8)?;
    pair.expect_sent(WcStatus::Success)?;
    let done = pair.expect_received(1, WcStatus::Success)?;
    let remote_addr = pair.regions[1].addr;
    pair.send(SendOp::Write { remote_addr, rkey: key }, 0, 8)?;
    pair.expect_sent(WcStatus::RemoteAccessError)?;
    // Last, because soft-RoCE reports the key wrongly but invalidates it.
    ensure_eq!(done.invalidated, Some(key), "the reported key");
    pair.device(1).dealloc_window(window)?;
    pair.close()
}

fn write<R: Rig>(rig: &mut R, transport: Transport) -> Cell {
    let mut pair = Pair::new(rig, Setup::of(transport))?;
    pair.fill(0, 0, &pattern(3000));
    let (remote_addr, rkey) = pair.remote(100);
    pair.send(SendOp::Write { remote_addr, rkey }, 0, 3000)?;
    ensure_eq!(pair.expect_sent(WcStatus::Success)?.opcode, WcOpcode::Write, "the write");
    pair.wait("the bytes", |rig| {
        Ok((rig.read(1, remote_addr, 3000) == pattern(3000)).then_some(()))
    })?;
    pair.close()
}

fn write_imm<R: Rig>(rig: &mut R, transport: Transport) -> Cell {
    let mut pair = Pair::new(rig, Setup::of(transport))?;
    pair.fill(0, 0, &pattern(2000));
    pair.receive(1, 5, 60_000, 0)?;
    let (remote_addr, rkey) = pair.remote(512);
    pair.send(SendOp::WriteImm { remote_addr, rkey, imm: 77 }, 0, 2000)?;
    pair.expect_sent(WcStatus::Success)?;
    let done = pair.expect_received(1, WcStatus::Success)?;
    let seen = (done.opcode, done.wr_id, done.byte_len, done.imm);
    ensure_eq!(seen, (WcOpcode::RecvWriteImm, 5, 2000, Some(77)), "the receive");
    ensure!(pair.bytes(1, 512, 2000) == pattern(2000), "the bytes are others");
    pair.close()
}

fn read<R: Rig>(rig: &mut R) -> Cell {
    let mut pair = Pair::new(rig, Setup::of(Transport::Rc))?;
    pair.fill(1, 8, &pattern(5000));
    let (remote_addr, rkey) = pair.remote(8);
    pair.send(SendOp::Read { remote_addr, rkey }, 40, 5000)?;
    let done = pair.expect_sent(WcStatus::Success)?;
    ensure_eq!((done.opcode, done.byte_len), (WcOpcode::Read, 5000), "the read");
    ensure!(pair.bytes(0, 40, 5000) == pattern(5000), "the bytes are others");
    pair.close()
}

fn word<R: Rig>(pair: &mut Pair<'_, R>, side: usize, offset: u64) -> u64 {
    let bytes = pair.bytes(side, offset, 8);
    u64::from_ne_bytes(bytes.try_into().expect("eight bytes"))
}

fn compare_swap<R: Rig>(rig: &mut R) -> Cell {
    let mut pair = Pair::new(rig, Setup::of(Transport::Rc))?;
    pair.fill(1, 16, &40_u64.to_ne_bytes());
    let (remote_addr, rkey) = pair.remote(16);
    for (compare, swap, after) in [(40, 41, 41), (40, 99, 41)] {
        let before = word(&mut pair, 1, 16);
        pair.send(SendOp::CompareSwap { remote_addr, rkey, compare, swap }, 0, 8)?;
        let done = pair.expect_sent(WcStatus::Success)?;
        ensure_eq!(done.opcode, WcOpcode::CompareSwap, "the operation");
        ensure_eq!(word(&mut pair, 0, 0), before, "the former value");
        ensure_eq!(word(&mut pair, 1, 16), after, "the value");
    }
    pair.close()
}

fn fetch_add<R: Rig>(rig: &mut R) -> Cell {
    let mut pair = Pair::new(rig, Setup::of(Transport::Rc))?;
    pair.fill(1, 24, &u64::MAX.to_ne_bytes());
    let (remote_addr, rkey) = pair.remote(24);
    pair.send(SendOp::FetchAdd { remote_addr, rkey, add: 3 }, 8, 8)?;
    ensure_eq!(pair.expect_sent(WcStatus::Success)?.opcode, WcOpcode::FetchAdd, "the operation");
    ensure_eq!((word(&mut pair, 0, 8), word(&mut pair, 1, 24)), (u64::MAX, 2), "the values");
    pair.close()
}

fn batch<R: Rig>(rig: &mut R) -> Cell {
    let mut pair = Pair::new(rig, Setup::of(Transport::Rc))?;
    for slot in 0..20 {
        pair.receive(1, slot, slot * 64, 64)?;
    }
    let wrs: Vec<_> = (0..20).map(|n| pair.wr(SendOp::Send, 0, n + 1)).collect();
    pair.post(&wrs)?;
    for n in 0..20 {
        ensure_eq!(pair.expect_sent(WcStatus::Success)?.wr_id, n + 1, "which send");
        let done = pair.expect_received(1, WcStatus::Success)?;
        ensure_eq!((done.wr_id, u64::from(done.byte_len)), (n, n + 1), "which receive");
    }
    pair.close()
}

fn batch_too_long<R: Rig>(rig: &mut R) -> Cell {
    let mut pair = Pair::new(rig, Setup::of(Transport::Rc))?;
    let wrs = vec![pair.wr(SendOp::Send, 0, 1); 4000];
    let (now, qpn) = (pair.rig.now(), pair.qpns[0]);
    // Nothing is received, so no room is freed.
    match pair.device(0).post_send(now, qpn, &wrs) {
        Ok(()) => return Err(Miss::Wrong("4000 requests fit a queue of 32".into())),
        Err(refused) => {
            ensure!(refused.accepted >= 32, "only {} requests fit", refused.accepted);
            let is_full = matches!(refused.error, VerbsError::QueueFull { .. });
            ensure!(is_full, "another refusal: {}", refused.error);
        }
    }
    pair.close()
}

fn attributes<R: Rig>(rig: &mut R) -> Cell {
    let tune = |connect: &mut Connect| {
        (connect.timeout, connect.retry_count, connect.rnr_retry) = (15, 5, 3);
        (connect.max_rd_atomic, connect.max_dest_rd_atomic) = (4, 8);
    };
    let mut pair = Pair::new(rig, Setup { tune, ..Setup::of(Transport::Rc) })?;
    let (own, peer) = (pair.qpns[0], pair.qpns[1]);
    let path = pair.rig.path(1);
    let attr = pair.device(0).query_qp(own)?;
    ensure_eq!((attr.state, attr.dest_qp), (QpState::Rts, peer), "state and peer");
    ensure_eq!((attr.timeout, attr.retry_count, attr.rnr_retry), (15, 5, 3), "retries");
    ensure_eq!((attr.max_rd_atomic, attr.max_dest_rd_atomic), (4, 8), "READs");
    ensure_eq!((attr.sq_psn.get(), attr.rq_psn.get()), (0x00ff_fffe, 7), "PSNs");
    ensure_eq!((attr.mtu.bytes(), attr.path.remote), (1024, path.remote), "MTU and path");
    ensure_eq!(pair.device(0).transport(own)?, Transport::Rc, "the service");
    pair.close()
}

/// The state of a queue pair after it has failed.
fn expect_error<R: Rig>(pair: &mut Pair<'_, R>, side: usize) -> Cell {
    let qpn = pair.qpns[side];
    pair.wait("the error state", |rig| {
        let state = rig.device(side).query_qp(qpn)?.state;
        Ok((state == QpState::Error).then_some(()))
    })
}

fn rnr_exceeded<R: Rig>(rig: &mut R) -> Cell {
    let tune = |connect: &mut Connect| (connect.rnr_retry, connect.min_rnr_timer) = (1, 1);
    let mut pair = Pair::new(rig, Setup { tune, ..Setup::of(Transport::Rc) })?;
    pair.send(SendOp::Send, 0, 10)?;
    pair.expect_sent(WcStatus::RnrRetryExceeded)?;
    expect_error(&mut pair, 0)?;
    pair.close()
}

fn retry_exceeded<R: Rig>(rig: &mut R) -> Cell {
    let tune = |connect: &mut Connect| {
        connect.dest_qp = Qpn::new(connect.dest_qp.get() ^ 0x5a5a);
        (connect.timeout, connect.retry_count) = (8, 1);
    };
    let mut pair = Pair::new(rig, Setup { tune, ..Setup::of(Transport::Rc) })?;
    pair.send(SendOp::Send, 0, 10)?;
    pair.expect_sent(WcStatus::RetryExceeded)?;
    expect_error(&mut pair, 0)?;
    pair.close()
}

/// A WRITE that side 1 must refuse.
fn refused<R: Rig>(rig: &mut R, access: Access, offset: u64, wrong: u32) -> Cell {
    let mut pair = Pair::new(rig, Setup { access, ..Setup::of(Transport::Rc) })?;
    pair.fill(0, 0, &[0xee; 8]);
    let (remote_addr, rkey) = pair.remote(offset);
    pair.send(SendOp::Write { remote_addr, rkey: rkey ^ wrong << 4 }, 0, 8)?;
    pair.expect_sent(WcStatus::RemoteAccessError)?;
    expect_error(&mut pair, 0)?;
    ensure_eq!(pair.bytes(1, offset.min(BUFFER - 8), 8), vec![0; 8], "memory");
    pair.close()
}

fn local_key<R: Rig>(rig: &mut R) -> Cell {
    let mut pair = Pair::new(rig, Setup::of(Transport::Rc))?;
    pair.receive(1, 1, 0, 64)?;
    let mut wr = pair.wr(SendOp::Send, 0, 8);
    wr.sges[0].lkey ^= 0x30;
    pair.post(&[wr])?;
    pair.expect_sent(WcStatus::LocalProtectionError)?;
    pair.close()
}

fn too_short<R: Rig>(rig: &mut R) -> Cell {
    let mut pair = Pair::new(rig, Setup::of(Transport::Rc))?;
    pair.receive(1, 1, 0, 16)?;
    pair.send(SendOp::Send, 0, 17)?;
    pair.expect_received(1, WcStatus::LocalLengthError)?;
    pair.expect_sent(WcStatus::RemoteInvalidRequest)?;
    pair.close()
}

fn flush<R: Rig>(rig: &mut R, transport: Transport) -> Cell {
    let mut pair = Pair::new(rig, Setup::of(transport))?;
    (0..3).try_for_each(|slot| pair.receive(0, slot, slot * 64, 64))?;
    let (now, qpn) = (pair.rig.now(), pair.qpns[0]);
    pair.device(0).modify_qp(now, qpn, &QpAttr::to(QpState::Error))?;
    for slot in 0..3 {
        let done = pair.expect_received(0, WcStatus::WrFlushError)?;
        ensure_eq!(done.wr_id, slot, "which receive");
    }
    if transport == Transport::Ud {
        return pair.close();
    }
    pair.send(SendOp::Send, 0, 1)?;
    pair.expect_sent(WcStatus::WrFlushError)?;
    pair.close()
}

fn notified<R: Rig>(pair: &mut Pair<'_, R>) -> Cell {
    let cq = pair.recv_cqs[1];
    let told = pair.wait("the event", |rig| Ok(rig.device(1).poll_notified()))?;
    ensure_eq!(told, cq, "which queue");
    Ok(())
}

fn events<R: Rig>(rig: &mut R) -> Cell {
    let mut pair = Pair::new(rig, Setup::of(Transport::Rc))?;
    let cq = pair.recv_cqs[1];
    (0..3).try_for_each(|slot| pair.receive(1, slot, slot * 64, 64))?;
    pair.send(SendOp::Send, 0, 8)?;
    pair.expect_received(1, WcStatus::Success)?;
    ensure_eq!(pair.device(1).poll_notified(), None, "an event of a queue that is not armed");
    pair.device(1).req_notify(cq, false)?;
    pair.send(SendOp::Send, 0, 8)?;
    notified(&mut pair)?;
    pair.send(SendOp::Send, 0, 8)?;
    pair.rest();
    ensure_eq!(pair.device(1).poll_notified(), None, "a second event");
    pair.expect_received(1, WcStatus::Success)?;
    pair.expect_received(1, WcStatus::Success)?;
    pair.close()
}

fn solicited<R: Rig>(rig: &mut R) -> Cell {
    let mut pair = Pair::new(rig, Setup::of(Transport::Rc))?;
    let cq = pair.recv_cqs[1];
    (0..2).try_for_each(|slot| pair.receive(1, slot, slot * 64, 64))?;
    pair.device(1).req_notify(cq, true)?;
    pair.send(SendOp::Send, 0, 8)?;
    pair.expect_sent(WcStatus::Success)?;
    pair.rest();
    ensure_eq!(pair.device(1).poll_notified(), None, "an event that was not solicited");
    let wr = SendWr { solicited: true, ..pair.wr(SendOp::Send, 0, 8) };
    pair.post(&[wr])?;
    notified(&mut pair)?;
    pair.close()
}

fn access_event<R: Rig>(rig: &mut R) -> Cell {
    let setup = Setup { access: Access::LOCAL, ..Setup::of(Transport::Rc) };
    let mut pair = Pair::new(rig, setup)?;
    let (remote_addr, rkey) = pair.remote(0);
    pair.send(SendOp::Write { remote_addr, rkey }, 0, 8)?;
    pair.expect_sent(WcStatus::RemoteAccessError)?;
    let broken = pair.qpns[1];
    let event = pair.wait("the event", |rig| {
        let event = rig.device(1).poll_event();
        Ok(event.filter(|event| !matches!(event, AsyncEvent::CommunicationEstablished(_))))
    })?;
    let is_right = matches!(event, AsyncEvent::QpAccessError(_) | AsyncEvent::QpFatal(_));
    ensure!(is_right && event.qpn() == Some(broken), "another event: {event:?}");
    pair.close()
}

fn shared_receives<R: Rig>(rig: &mut R) -> Cell {
    let mut pair = Pair::new(rig, Setup { srq: Some((16, 0)), ..Setup::of(Transport::Rc) })?;
    let Some(srq) = pair.srq else {
        return Err(Miss::Wrong("no shared queue was made".into()));
    };
    (0..4).try_for_each(|slot| pair.receive(1, slot, slot * 64, 64))?;
    pair.device(1).set_srq_limit(srq, 3)?;
    let config = pair.device(1).query_srq(srq)?;
    ensure!(config.max_wr >= 16 && config.limit == 3, "another shared queue: {config:?}");
    for slot in 0..2 {
        pair.send(SendOp::Send, 0, 8)?;
        ensure_eq!(pair.expect_received(1, WcStatus::Success)?.wr_id, slot, "which receive");
    }
    let event = pair.wait("the limit's event", |rig| {
        let event = rig.device(1).poll_event();
        Ok(event.filter(|event| !matches!(event, AsyncEvent::CommunicationEstablished(_))))
    })?;
    ensure_eq!(event, AsyncEvent::SrqLimitReached(srq), "the event");
    ensure_eq!(pair.device(1).query_srq(srq)?.limit, 0, "the limit after its event");
    pair.close()
}

fn window<R: Rig>(rig: &mut R) -> Cell {
    let mut pair = Pair::new(rig, Setup::of(Transport::Rc))?;
    let (window, rkey) = bind(&mut pair, 1024, 256)?;
    pair.fill(0, 0, &pattern(16));
    let remote_addr = pair.regions[1].addr + 1024 + 240;
    pair.send(SendOp::Write { remote_addr, rkey }, 0, 16)?;
    pair.expect_sent(WcStatus::Success)?;
    ensure_eq!(pair.bytes(1, 1024 + 240, 16), pattern(16), "the bytes");
    pair.device(1).dealloc_window(window)?;
    pair.send(SendOp::Write { remote_addr, rkey }, 0, 16)?;
    pair.expect_sent(WcStatus::RemoteAccessError)?;
    pair.close()
}

fn window_bounds<R: Rig>(rig: &mut R) -> Cell {
    let mut pair = Pair::new(rig, Setup::of(Transport::Rc))?;
    let (window, rkey) = bind(&mut pair, 1024, 256)?;
    pair.fill(0, 0, &[0xee; 16]);
    let remote_addr = pair.regions[1].addr + 1024 + 241;
    pair.send(SendOp::Write { remote_addr, rkey }, 0, 16)?;
    pair.expect_sent(WcStatus::RemoteAccessError)?;
    ensure_eq!(pair.bytes(1, 1024 + 241, 16), vec![0; 16], "memory");
    pair.device(1).dealloc_window(window)?;
    pair.close()
}

fn changed_region<R: Rig>(rig: &mut R) -> Cell {
    let mut pair = Pair::new(rig, Setup::of(Transport::Rc))?;
    let (region, pd) = (pair.regions[1], pair.pds[1]);
    pair.regions[1] = pair.device(1).change_region(&region, pd, Access::LOCAL)?;
    let (remote_addr, rkey) = pair.remote(0);
    pair.send(SendOp::Write { remote_addr, rkey }, 0, 8)?;
    pair.expect_sent(WcStatus::RemoteAccessError)?;
    pair.close()
}

fn resized_queue<R: Rig>(rig: &mut R) -> Cell {
    let mut pair = Pair::new(rig, Setup::of(Transport::Rc))?;
    let cq = pair.recv_cqs[1];
    pair.device(1).resize_cq(cq, 200)?;
    pair.receive(1, 1, 0, 64)?;
    pair.send(SendOp::Send, 0, 8)?;
    pair.expect_received(1, WcStatus::Success)?;
    pair.close()
}

fn datagram<R: Rig>(rig: &mut R, imm: Option<u32>) -> Cell {
    let mut pair = Pair::new(rig, Setup::of(Transport::Ud))?;
    pair.fill(0, 0, &pattern(64));
    pair.receive(1, 3, 0, 512)?;
    let to = pair.datagram()?;
    let op = imm.map_or(SendOp::Send, SendOp::SendImm);
    let wr = SendWr { to: Some(to), ..pair.wr(op, 0, 64) };
    pair.post(&[wr])?;
    pair.expect_sent(WcStatus::Success)?;
    let done = pair.expect_received(1, WcStatus::Success)?;
    ensure_eq!((done.wr_id, done.byte_len), (3, 64 + GRH_BYTES), "the receive");
    ensure_eq!((done.imm, done.src_qp), (imm, Some(pair.qpns[0])), "what came with it");
    ensure_eq!(pair.bytes(1, u64::from(GRH_BYTES), 64), pattern(64), "the message");
    pair.device(0).destroy_ah(to.ah)?;
    pair.close()
}

fn wrong_qkey<R: Rig>(rig: &mut R) -> Cell {
    let mut pair = Pair::new(rig, Setup::of(Transport::Ud))?;
    pair.receive(1, 3, 0, 512)?;
    let right = pair.datagram()?;
    let wrong = roce::verbs::Datagram { qkey: right.qkey + 1, ..right };
    for (to, len) in [(wrong, 8), (right, 9)] {
        let wr = SendWr { to: Some(to), ..pair.wr(SendOp::Send, 0, len) };
        pair.post(&[wr])?;
        pair.expect_sent(WcStatus::Success)?;
    }
    let done = pair.expect_received(1, WcStatus::Success)?;
    ensure_eq!(done.byte_len, 9 + GRH_BYTES, "which datagram came");
    pair.device(0).destroy_ah(right.ah)?;
    pair.close()
}

/// Delivery to groups is tested with the wires (`device::tests`): it needs a port that has joined.
fn membership<R: Rig>(rig: &mut R) -> Cell {
    let group = Ipv4Addr::new(239, 8, 0, 1).into();
    let mut pair = Pair::new(rig, Setup::of(Transport::Ud))?;
    let qpn = pair.qpns[0];
    pair.device(0).attach_multicast(qpn, group)?;
    pair.device(0).detach_multicast(qpn, group)?;
    ensure!(pair.device(0).detach_multicast(qpn, group).is_err(), "left a group twice");
    let host = Ipv4Addr::LOCALHOST.into();
    ensure!(pair.device(0).attach_multicast(qpn, host).is_err(), "joined a host's address");
    pair.close()?;
    let mut pair = Pair::new(rig, Setup::of(Transport::Rc))?;
    let qpn = pair.qpns[0];
    ensure!(pair.device(0).attach_multicast(qpn, group).is_err(), "joined by a connection");
    pair.close()
}

fn in_use<R: Rig>(rig: &mut R) -> Cell {
    let mut pair = Pair::new(rig, Setup::of(Transport::Rc))?;
    let (pd, cq, now) = (pair.pds[0], pair.send_cqs[0], pair.rig.now());
    ensure_eq!(pair.device(0).dealloc_pd(pd), Err(VerbsError::PdInUse(pd.0)), "the domain");
    ensure_eq!(pair.device(0).destroy_cq(cq), Err(VerbsError::CqInUse(cq.0)), "the queue");
    let gone = Qpn::new(pair.qpns[0].get() ^ 0x7000);
    let missing = VerbsError::NoQp(gone.get());
    let attr = QpAttr { mask: AttrMask::STATE, ..QpAttr::to(QpState::Error) };
    ensure_eq!(pair.device(0).modify_qp(now, gone, &attr), Err(missing), "no queue pair");
    pair.close()
}
