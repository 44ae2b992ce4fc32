//! Every operation moves the right bytes, through both posting interfaces.

use std::ffi::c_int;
use std::mem::zeroed;

use super::kit::*;
use crate::abi::*;

#[test]
fn send_with_immediate_arrives() {
    let (mut a, b) = (Side::new(), Side::new());
    let (qa, qb) = connected(&a, &b);
    assert_eq!(post_recv(qb, 5, &mut b.sge(100, 4096)), 0);
    a.bytes[..3000].fill(0x5a);
    let mut sge = a.sge(0, 3000);
    let mut wr = send_wr(9, IBV_WR_SEND_WITH_IMM, &mut sge);
    wr.imm_data = 0x1234_5678_u32.to_be();
    assert_eq!(post_send(qa, &mut wr).0, 0);
    let (sent, received) = (a.wait(), b.wait());
    assert_eq!((sent.wr_id, sent.status, sent.opcode), (9, 0, IBV_WC_SEND));
    assert_eq!((received.wr_id, received.status, received.opcode), (5, 0, IBV_WC_RECV));
    assert_eq!((received.byte_len, received.wc_flags), (3000, IBV_WC_WITH_IMM));
    assert_eq!(u32::from_be(received.imm_data), 0x1234_5678);
    assert_eq!(b.bytes[100..3100], a.bytes[..3000]);
    assert_eq!(b.bytes[3100], 0);
}

#[test]
fn inline_data_is_taken_when_it_is_posted() {
    let (a, b) = (Side::new(), Side::new());
    let (qa, qb) = connected(&a, &b);
    for round in 0..40_u8 {
        assert_eq!(post_recv(qb, u64::from(round), &mut b.sge(usize::from(round) * 128, 128)), 0);
        let mut own = [round; 100];
        let mut sge = ibv_sge { addr: own.as_ptr() as u64, length: 100, lkey: 0 };
        let mut wr = send_wr(1, IBV_WR_SEND, &mut sge);
        wr.send_flags = IBV_SEND_INLINE;
        assert_eq!(post_send(qa, &mut wr).0, 0);
        own.fill(0xff);
        std::hint::black_box(&own);
        assert_eq!((a.wait().status, b.wait().status), (0, 0));
        assert_eq!(b.bytes[usize::from(round) * 128..][..100], [round; 100]);
    }
}

#[test]
fn write_read_and_atomics_touch_the_peer() {
    let (mut a, mut b) = (Side::new(), Side::new());
    let (qa, _qb) = connected(&a, &b);
    a.bytes[..5000].fill(7);
    let mut sge = a.sge(0, 5000);
    let mut wr = send_wr(1, IBV_WR_RDMA_WRITE, &mut sge);
    wr.wr.rdma = wr_rdma { remote_addr: b.addr(8192), rkey: b.rkey() };
    assert_eq!(post_send(qa, &mut wr).0, 0);
    assert_eq!((a.wait().status, &b.bytes[8192..13192]), (0, &[7; 5000][..]));

    b.bytes[..5000].fill(9);
    let mut sge = a.sge(20_000, 5000);
    let mut wr = send_wr(2, IBV_WR_RDMA_READ, &mut sge);
    wr.wr.rdma = wr_rdma { remote_addr: b.addr(0), rkey: b.rkey() };
    assert_eq!(post_send(qa, &mut wr).0, 0);
    let read = a.wait();
    assert_eq!((read.status, read.opcode, read.byte_len), (0, IBV_WC_RDMA_READ, 5000));
    assert_eq!(a.bytes[20_000..25_000], [9; 5000]);

    let word = (b.addr(0) + 7) & !7;
    let before = u64::from_ne_bytes([9; 8]);
    let mut sge = a.sge(0, 8);
    let mut wr = send_wr(3, IBV_WR_ATOMIC_FETCH_AND_ADD, &mut sge);
    wr.wr.atomic = wr_atomic { remote_addr: word, compare_add: 5, swap: 0, rkey: b.rkey() };
    assert_eq!(post_send(qa, &mut wr).0, 0);
    assert_eq!(a.wait().opcode, IBV_WC_FETCH_ADD);
    assert_eq!(a.bytes[..8], before.to_ne_bytes());
    let at = (word - b.addr(0)) as usize;
    assert_eq!(b.bytes[at..at + 8], (before + 5).to_ne_bytes());

    let mut wr = send_wr(4, IBV_WR_ATOMIC_CMP_AND_SWP, &mut sge);
    wr.wr.atomic =
        wr_atomic { remote_addr: word, compare_add: before + 5, swap: 1, rkey: b.rkey() };
    assert_eq!(post_send(qa, &mut wr).0, 0);
    assert_eq!(a.wait().opcode, IBV_WC_COMP_SWAP);
    assert_eq!(b.bytes[at..at + 8], 1_u64.to_ne_bytes());
}

/// A queue pair for the work-request interface.
fn extended(side: &Side) -> *mut ibv_qp {
    // SAFETY: all-zero bytes are valid attributes; the objects are alive.
    unsafe {
        let mut attr: ibv_qp_init_attr_ex = zeroed();
        let plain = qp_init(side.cq, IBV_QPT_RC, 16);
        (attr.send_cq, attr.recv_cq, attr.cap) = (plain.send_cq, plain.recv_cq, plain.cap);
        attr.qp_type = IBV_QPT_RC;
        attr.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        attr.pd = side.pd;
        attr.send_ops_flags = u64::from(IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE);
        let qp = crate::exports::create_qp_ex(side.context, &mut attr);
        assert!(!qp.is_null(), "errno {}", errno());
        qp
    }
}

unsafe extern "C" {
    fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex;
}

#[test]
fn the_work_request_interface_posts_a_batch_or_nothing() {
    let (mut a, b) = (Side::new(), Side::new());
    let (qa, qb) = (extended(&a), b.qp(IBV_QPT_RC, 16));
    to_init(qa);
    to_init(qb);
    // SAFETY: both are alive; the calls are in the order that the man page asks for.
    unsafe {
        to_rts(qa, (*qb).qp_num);
        to_rts(qb, (*qa).qp_num);
        a.bytes[..64].fill(3);
        assert_eq!(post_recv(qb, 1, &mut b.sge(0, 64)), 0);
        let ex = ibv_qp_to_qp_ex(qa);
        ((*ex).wr_start)(ex);
        (*ex).wr_id = 11;
        (*ex).wr_flags = IBV_SEND_SIGNALED;
        ((*ex).wr_rdma_write)(ex, b.rkey(), b.addr(1000));
        ((*ex).wr_set_sge)(ex, (*a.mr).lkey, a.addr(0), 64);
        (*ex).wr_id = 12;
        ((*ex).wr_send)(ex);
        let mut own = [4_u8; 64];
        ((*ex).wr_set_inline_data)(ex, own.as_mut_ptr().cast(), 64);
        own.fill(0);
        assert_eq!(((*ex).wr_complete)(ex), 0);
        assert_eq!((a.wait().wr_id, a.wait().wr_id, b.wait().byte_len), (11, 12, 64));
        assert_eq!((&b.bytes[1000..1064], &b.bytes[..64]), (&[3; 64][..], &[4; 64][..]));

        ((*ex).wr_start)(ex);
        ((*ex).wr_send)(ex);
        ((*ex).wr_set_inline_data)(ex, own.as_mut_ptr().cast(), 64);
        ((*ex).wr_send)(ex);
        ((*ex).wr_set_sge_list)(ex, 9, std::ptr::null());
        assert_eq!(((*ex).wr_complete)(ex), libc::EINVAL);
        ((*ex).wr_start)(ex);
        ((*ex).wr_send)(ex);
        ((*ex).wr_abort)(ex);
        ((*ex).wr_start)(ex);
        for _ in 0..17 {
            ((*ex).wr_send)(ex);
        }
        assert_eq!(((*ex).wr_complete)(ex), libc::ENOMEM);
        assert!(a.poll().is_none());
    }
}

#[test]
fn the_extended_completion_queue_is_read_field_by_field() {
    let (a, b) = (Side::new(), Side::new());
    // SAFETY: all-zero bytes are valid attributes; the objects are alive.
    unsafe {
        let mut attr: ibv_cq_init_attr_ex = zeroed();
        attr.cqe = 16;
        attr.wc_flags = u64::from(IBV_WC_STANDARD_FLAGS);
        let cq = crate::exports::create_cq_ex(b.context, &mut attr);
        assert!(!cq.is_null());
        let mut init = qp_init(cq.cast(), IBV_QPT_RC, 4);
        let (qa, qb) = (a.qp(IBV_QPT_RC, 4), ibv_create_qp(b.pd, &mut init));
        to_init(qa);
        to_init(qb);
        to_rts(qa, (*qb).qp_num);
        to_rts(qb, (*qa).qp_num);
        let mut unused: ibv_poll_cq_attr = zeroed();
        assert_eq!(((*cq).start_poll)(cq, &mut unused), libc::ENOENT);
        assert_eq!(post_recv(qb, 77, &mut b.sge(0, 64)), 0);
        assert_eq!(post_send(qa, &mut send_wr(1, IBV_WR_SEND, &mut a.sge(0, 33))).0, 0);
        a.wait();
        let mut started: c_int = libc::ENOENT;
        while started == libc::ENOENT {
            started = ((*cq).start_poll)(cq, &mut unused);
        }
        assert_eq!((started, (*cq).wr_id, (*cq).status), (0, 77, 0));
        assert_eq!((((*cq).read_opcode)(cq), ((*cq).read_byte_len)(cq)), (IBV_WC_RECV, 33));
        assert_eq!(((*cq).read_qp_num)(cq), (*qb).qp_num);
        assert_eq!(((*cq).next_poll)(cq), libc::ENOENT);
        ((*cq).end_poll)(cq);
        assert_eq!((ibv_destroy_qp(qb), ibv_destroy_cq(cq.cast())), (0, 0));
    }
}

/// The program frees what `wr_id` refers to with the queue pair; what is being read stays valid.
#[test]
fn completions_go_with_their_queue_pair_but_for_the_one_being_read() {
    let side = Side::new();
    // SAFETY: all-zero bytes are valid attributes; the objects are alive where they are used.
    unsafe {
        let mut attr: ibv_cq_init_attr_ex = zeroed();
        attr.cqe = 16;
        let cq = crate::exports::create_cq_ex(side.context, &mut attr);
        assert!(!cq.is_null());
        let mut init = qp_init(cq.cast(), IBV_QPT_RC, 4);
        let qps = [(); 2].map(|()| ibv_create_qp(side.pd, &mut init));
        for (first, qp) in [(0, qps[0]), (2, qps[1])] {
            to_init(qp);
            assert_eq!(post_recv(qp, first, &mut side.sge(0, 64)), 0);
            assert_eq!(post_recv(qp, first + 1, &mut side.sge(0, 64)), 0);
            to_error(qp);
        }
        let (gone, kept) = ((*qps[0]).qp_num, (*qps[1]).qp_num);
        let mut unused: ibv_poll_cq_attr = zeroed();
        assert_eq!(((*cq).start_poll)(cq, &mut unused), 0);
        assert_eq!(ibv_destroy_qp(qps[0]), 0);
        assert_eq!(((*cq).wr_id, ((*cq).read_qp_num)(cq)), (0, gone));
        for wr_id in [2, 3] {
            assert_eq!(((*cq).next_poll)(cq), 0);
            assert_eq!(((*cq).wr_id, ((*cq).read_qp_num)(cq)), (wr_id, kept));
        }
        assert_eq!(((*cq).next_poll)(cq), libc::ENOENT);
        ((*cq).end_poll)(cq);
        // RESET does the same.
        assert_eq!(post_recv(qps[1], 4, &mut side.sge(0, 64)), 0);
        let mut reset: ibv_qp_attr = zeroed();
        reset.qp_state = IBV_QPS_RESET;
        assert_eq!(ibv_modify_qp(qps[1], &mut reset, IBV_QP_STATE as c_int), 0);
        assert_eq!(((*cq).start_poll)(cq, &mut unused), libc::ENOENT);
        assert_eq!((ibv_destroy_qp(qps[1]), ibv_destroy_cq(cq.cast())), (0, 0));
    }
}
