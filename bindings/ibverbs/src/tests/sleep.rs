//! Events: completion channels, asynchronous events, and service while the program sleeps.

use std::ffi::c_void;
use std::mem::zeroed;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use super::kit::*;
use crate::abi::*;

#[test]
fn a_sleeping_program_is_woken_by_a_completion() {
    let context = open();
    // SAFETY: the objects are alive.
    unsafe {
        let channel = ibv_create_comp_channel(context);
        let b = Side::with_channel(context, channel, 16);
        let a = Side::new();
        let (qa, qb) = connected(&a, &b);
        assert_eq!(post_recv(qb, 1, &mut b.sge(0, 64)), 0);
        assert_eq!(((*context).ops.req_notify_cq.unwrap())(b.cq, 0), 0);
        assert_eq!(post_send(qa, &mut send_wr(2, IBV_WR_SEND, &mut a.sge(0, 64))).0, 0);
        let (mut cq, mut cq_context) = (null_mut(), null_mut::<c_void>());
        assert_eq!(ibv_get_cq_event(channel, &mut cq, &mut cq_context), 0);
        assert_eq!((cq, cq_context as usize), (b.cq, 7));
        assert_eq!(b.wait().status, 0);
        ibv_ack_cq_events(cq, 1);
        assert_eq!(ibv_destroy_comp_channel(channel), libc::EBUSY);
        assert_eq!((ibv_destroy_qp(qb), ibv_destroy_cq(b.cq)), (0, 0));
        assert_eq!(ibv_destroy_comp_channel(channel), 0);
    }
}

/// Polls until empty, arms and sleeps: a completion between the two wakes it, even if no further
/// packet arrives.
#[test]
fn arming_wakes_for_what_has_completed_already() {
    let context = open();
    // SAFETY: the objects are alive.
    unsafe {
        let channel = ibv_create_comp_channel(context);
        let side = Side::with_channel(context, channel, 16);
        let qp = side.qp(IBV_QPT_RC, 4);
        to_init(qp);
        set_nonblocking((*channel).fd);
        let (mut cq, mut cq_context) = (null_mut(), null_mut::<c_void>());
        let mut events = || {
            let next = || ibv_get_cq_event(channel, &mut cq, &mut cq_context) == 0;
            let read = std::iter::repeat_with(next).take_while(|&read| read).count();
            ibv_ack_cq_events(side.cq, read as u32);
            read
        };
        assert!(side.poll().is_none());
        to_error(qp);
        assert_eq!(post_recv(qp, 1, &mut side.sge(0, 64)), 0);
        assert_eq!(events(), 0, "not armed");
        // However often it arms: one event until it is read.
        for _ in 0..5000 {
            assert_eq!(((*context).ops.req_notify_cq.unwrap())(side.cq, 0), 0);
        }
        assert_eq!(events(), 1);
        assert!(side.poll().is_some());
        // It has been armed since, and a queued completion generates one event. A flushed receive
        // is urgent.
        assert_eq!(post_recv(qp, 2, &mut side.sge(0, 64)), 0);
        assert_eq!(events(), 1);
        assert_eq!(((*context).ops.req_notify_cq.unwrap())(side.cq, 1), 0);
        assert_eq!(events(), 0, "an event was made for it");
        assert_eq!(post_recv(qp, 3, &mut side.sge(0, 64)), 0);
        assert_eq!(events(), 1);
        assert!(side.poll().is_some() && side.poll().is_some());
        assert_eq!(((*context).ops.req_notify_cq.unwrap())(side.cq, 0), 0);
        assert_eq!(events(), 0, "nothing waits");
        assert_eq!((ibv_destroy_qp(qp), ibv_destroy_cq(side.cq)), (0, 0));
        assert_eq!(ibv_destroy_comp_channel(channel), 0);
    }
}

#[test]
fn destroying_a_queue_waits_for_acknowledgements_and_forgets_the_rest() {
    let context = open();
    // SAFETY: the objects are alive where they are used.
    unsafe {
        let channel = ibv_create_comp_channel(context);
        let side = Side::with_channel(context, channel, 16);
        let qp = side.qp(IBV_QPT_RC, 4);
        to_init(qp);
        for wr_id in 0..2 {
            assert_eq!(((*context).ops.req_notify_cq.unwrap())(side.cq, 0), 0);
            assert_eq!(post_recv(qp, wr_id, &mut side.sge(0, 64)), 0);
        }
        to_error(qp);
        let (mut cq, mut cq_context) = (null_mut(), null_mut::<c_void>());
        assert_eq!(ibv_get_cq_event(channel, &mut cq, &mut cq_context), 0);
        assert_eq!(((*context).ops.req_notify_cq.unwrap())(side.cq, 0), 0);
        assert_eq!(ibv_destroy_qp(qp), 0);
        let cq = cq as usize;
        let acknowledging = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            ibv_ack_cq_events(cq as *mut ibv_cq, 1);
        });
        let started = Instant::now();
        assert_eq!(ibv_destroy_cq(side.cq), 0);
        assert!(started.elapsed() >= Duration::from_millis(40), "it did not wait");
        acknowledging.join().unwrap();
        set_nonblocking((*channel).fd);
        let (mut cq, mut cq_context) = (null_mut(), null_mut::<c_void>());
        assert_eq!(ibv_get_cq_event(channel, &mut cq, &mut cq_context), -1);
        assert_eq!(errno(), libc::EAGAIN);
    }
}

fn set_nonblocking(fd: i32) {
    // SAFETY: an open descriptor.
    assert_eq!(unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) }, 0);
}

/// The peer's WRITE is served although its owner never calls a verb.
#[test]
fn one_sided_requests_are_served_while_the_program_sleeps() {
    let b = Side::new();
    let (qa, rkey, target);
    let a = Side::new();
    (qa, _) = connected(&a, &b);
    (rkey, target) = (b.rkey(), b.addr(0));
    let mut sge = a.sge(0, 4096);
    let mut wr = send_wr(1, IBV_WR_RDMA_WRITE, &mut sge);
    wr.wr.rdma = wr_rdma { remote_addr: target, rkey };
    assert_eq!(post_send(qa, &mut wr).0, 0);
    // Neither side polls: the progress thread does the work of both.
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(a.poll().map(|wc| wc.status), Some(0));
}

#[test]
fn an_overrun_queue_makes_an_asynchronous_event() {
    let side = Side::with_channel(open(), null_mut(), 1);
    let qp = side.qp(IBV_QPT_RC, 8);
    to_init(qp);
    for wr_id in 0..8 {
        assert_eq!(post_recv(qp, wr_id, &mut side.sge(0, 64)), 0);
    }
    to_error(qp);
    // SAFETY: the objects are alive; all-zero bytes are a valid event and completions.
    unsafe {
        let mut event: ibv_async_event = zeroed();
        assert_eq!(ibv_get_async_event(side.context, &mut event), 0);
        assert_eq!((event.event_type, event.element.cq), (IBV_EVENT_CQ_ERR, side.cq));
        ibv_ack_async_event(&mut event);
        let mut wc: [ibv_wc; 8] = zeroed();
        let poll = (*side.context).ops.poll_cq.unwrap();
        assert_eq!(poll(side.cq, 8, wc.as_mut_ptr()), 1);
        assert!(poll(side.cq, 8, wc.as_mut_ptr()) < 0, "what was lost is not hidden");
        set_nonblocking((*side.context).async_fd);
        while ibv_get_async_event(side.context, &mut event) == 0 {
            ibv_ack_async_event(&mut event);
        }
        assert_eq!(errno(), libc::EAGAIN);
        assert_eq!((ibv_destroy_qp(qp), ibv_destroy_cq(side.cq)), (0, 0));
    }
}
