//! Misuse by programs must return an error, never crash.

use std::ffi::c_int;
use std::mem::zeroed;
use std::ptr::null_mut;

use super::kit::*;
use crate::abi::*;

/// Calls that take a handle first and return an error code, without their other arguments' types.
mod codes {
    type Call = unsafe extern "C" fn(*mut u8, *mut u8, *mut u8, *mut u8, *mut u8, *mut u8) -> i32;

    macro_rules! symbols {
        ($($name:ident)+) => {
            unsafe extern "C" {
                $( fn $name(
                    a: *mut u8, b: *mut u8, c: *mut u8, d: *mut u8, e: *mut u8, f: *mut u8,
                ) -> i32; )+
            }
            pub(super) const ALL: &[(&str, Call)] = &[ $( (stringify!($name), $name), )+ ];
        };
    }

    symbols! {
        ibv_query_device ibv_dealloc_pd ibv_dereg_mr ibv_destroy_cq ibv_resize_cq ibv_destroy_srq
        ibv_modify_srq ibv_query_srq ibv_modify_qp ibv_query_qp ibv_destroy_qp ibv_destroy_ah
        ibv_attach_mcast ibv_detach_mcast ibv_destroy_comp_channel ibv_set_ece ibv_query_ece
    }
}

/// Null, a pointer that never was a handle, and a handle of another kind.
fn wrong_handles(side: &Side) -> [*mut u8; 3] {
    [null_mut(), 64 as *mut u8, side.bytes.as_ptr().cast_mut()]
}

#[test]
fn handles_that_are_none_are_refused() {
    let side = Side::new();
    for wrong in wrong_handles(&side) {
        for (name, call) in codes::ALL {
            // SAFETY: the calls look at no other argument when the handle is wrong.
            let code =
                unsafe { call(wrong, null_mut(), null_mut(), null_mut(), null_mut(), null_mut()) };
            assert_eq!(code, libc::EINVAL, "{name}({wrong:p})");
        }
        // SAFETY: as above.
        unsafe {
            assert!(ibv_alloc_pd(wrong.cast()).is_null());
            assert!(ibv_reg_mr(wrong.cast(), wrong.cast(), 1, 0).is_null());
            assert!(ibv_create_cq(wrong.cast(), 1, null_mut(), null_mut(), 0).is_null());
            assert!(ibv_create_qp(wrong.cast(), &mut qp_init(side.cq, IBV_QPT_RC, 1)).is_null());
            assert!(ibv_create_qp(side.pd, &mut qp_init(wrong.cast(), IBV_QPT_RC, 1)).is_null());
            assert!(ibv_create_comp_channel(wrong.cast()).is_null());
            assert_eq!((ibv_close_device(wrong.cast()), errno()), (-1, libc::EINVAL));
            ibv_ack_async_event(null_mut());
        }
    }
}

#[test]
fn objects_that_are_gone_are_refused() {
    let side = Side::new();
    let qp = side.qp(IBV_QPT_RC, 4);
    let mut sge = side.sge(0, 8);
    // SAFETY: handles of objects that once lived may be handed in.
    unsafe {
        assert_eq!((ibv_destroy_qp(qp), ibv_destroy_qp(qp)), (0, libc::EINVAL));
        assert_eq!(post_send(qp, &mut send_wr(1, IBV_WR_SEND, &mut sge)).0, libc::EINVAL);
        assert_eq!(post_recv(qp, 1, &mut sge), libc::EINVAL);
        assert_eq!((ibv_dereg_mr(side.mr), ibv_dereg_mr(side.mr)), (0, libc::EINVAL));
        assert_eq!((ibv_destroy_cq(side.cq), ibv_destroy_cq(side.cq)), (0, libc::EINVAL));
        let mut wc: ibv_wc = zeroed();
        assert!(((*side.context).ops.poll_cq.unwrap())(side.cq, 1, &mut wc) < 0);
        assert_eq!(((*side.context).ops.req_notify_cq.unwrap())(side.cq, 0), libc::EINVAL);
        assert_eq!((ibv_dealloc_pd(side.pd), ibv_dealloc_pd(side.pd)), (0, libc::EINVAL));
    }
}

#[test]
fn objects_in_use_stay() {
    let side = Side::new();
    let qp = side.qp(IBV_QPT_RC, 4);
    // SAFETY: the objects are alive.
    unsafe {
        assert_eq!(ibv_destroy_cq(side.cq), libc::EBUSY);
        assert_eq!(ibv_dealloc_pd(side.pd), libc::EBUSY);
        assert_eq!(ibv_destroy_qp(qp), 0);
        assert_eq!(ibv_dealloc_pd(side.pd), libc::EBUSY, "a region is left");
        assert_eq!((ibv_destroy_cq(side.cq), ibv_dereg_mr(side.mr)), (0, 0));
        assert_eq!(ibv_dealloc_pd(side.pd), 0);
    }
}

#[test]
fn posting_in_the_wrong_state_names_the_request() {
    let side = Side::new();
    let qp = side.qp(IBV_QPT_RC, 4);
    let mut sge = side.sge(0, 8);
    let mut wr = send_wr(1, IBV_WR_SEND, &mut sge);
    let wanted = (libc::EINVAL, std::ptr::from_mut(&mut wr));
    assert_eq!(post_send(qp, &mut wr), wanted, "RESET");
    to_init(qp);
    assert_eq!(post_send(qp, &mut wr), wanted, "INIT");
    // SAFETY: all-zero bytes are valid attributes.
    let mut attr: ibv_qp_attr = unsafe { zeroed() };
    attr.qp_state = IBV_QPS_RTS;
    // SAFETY: the queue pair is alive.
    let code = unsafe { ibv_modify_qp(qp, &mut attr, IBV_QP_STATE as c_int) };
    assert_eq!(code, libc::EINVAL, "INIT to RTS");
    to_error(qp);
    assert_eq!(post_send(qp, &mut wr).0, 0);
    assert_eq!(side.wait().status, 5, "flushed");
}

#[test]
fn malformed_requests_are_refused() {
    let (a, b) = (Side::new(), Side::new());
    let (qa, _) = connected(&a, &b);
    let mut sge = a.sge(0, 200);
    let change: [fn(&mut ibv_send_wr); 6] = [
        |wr| wr.opcode = 99,
        |wr| wr.num_sge = 3,
        |wr| wr.num_sge = -1,
        |wr| wr.sg_list = null_mut(),
        // 200 bytes, and the queue pair takes 128.
        |wr| wr.send_flags = IBV_SEND_INLINE,
        |wr| (wr.opcode, wr.send_flags) = (IBV_WR_RDMA_READ, IBV_SEND_INLINE),
    ];
    for (index, change) in change.iter().enumerate() {
        let mut wr = send_wr(1, IBV_WR_SEND, &mut sge);
        change(&mut wr);
        assert_eq!(post_send(qa, &mut wr).0, libc::EINVAL, "change {index}");
    }
    assert!(a.poll().is_none());
}

#[test]
fn queues_take_what_they_were_made_for_and_no_more() {
    let side = Side::new();
    let qp = side.qp(IBV_QPT_RC, 4);
    to_init(qp);
    let mut sge = side.sge(0, 8);
    let receives: Vec<c_int> = (0..6).map(|wr_id| post_recv(qp, wr_id, &mut sge)).collect();
    assert_eq!(receives, [0, 0, 0, 0, libc::ENOMEM, libc::ENOMEM]);
    // The peer does not exist: nothing is ever acknowledged.
    to_rts(qp, 0x00fe_0001);
    let mut list: Vec<ibv_send_wr> = (0..6).map(|id| send_wr(id, IBV_WR_SEND, &mut sge)).collect();
    for at in 0..5 {
        list[at].next = &mut list[at + 1];
    }
    let fifth = std::ptr::from_mut(&mut list[4]);
    assert_eq!(post_send(qp, &mut list[0]), (libc::ENOMEM, fifth));
}

#[test]
fn a_region_that_goes_while_it_is_used_fails_its_requests() {
    let (a, b) = (Side::new(), Side::new());
    let (qa, _) = connected(&a, &b);
    let (rkey, target) = (b.rkey(), b.addr(0));
    // SAFETY: the region is alive.
    assert_eq!(unsafe { ibv_dereg_mr(b.mr) }, 0);
    let mut sge = a.sge(0, 64);
    let mut wr = send_wr(1, IBV_WR_RDMA_WRITE, &mut sge);
    wr.wr.rdma = wr_rdma { remote_addr: target, rkey };
    assert_eq!(post_send(qa, &mut wr).0, 0);
    assert_eq!(a.wait().status, 10, "remote access error");

    let (qa, _) = connected(&a, &b);
    let mut sge = a.sge(0, 64);
    // SAFETY: the region is alive.
    assert_eq!(unsafe { ibv_dereg_mr(a.mr) }, 0);
    assert_eq!(post_send(qa, &mut send_wr(2, IBV_WR_SEND, &mut sge)).0, 0);
    assert_eq!(a.wait().status, 4, "local protection error");
}

#[test]
fn memory_that_cannot_be_registered_is_refused() {
    let side = Side::new();
    let start = side.bytes.as_ptr().cast_mut();
    let cases = [
        (16 as *mut u8, 4096, EVERY_ACCESS, libc::EFAULT),
        (start, 0, EVERY_ACCESS, libc::EINVAL),
        (start, usize::MAX, EVERY_ACCESS, libc::EINVAL),
        (start, 8, IBV_ACCESS_REMOTE_WRITE as c_int, libc::EINVAL),
        (start, 8, IBV_ACCESS_REMOTE_ATOMIC as c_int, libc::EINVAL),
        (start, 8, 1 << 15, libc::EINVAL),
        (start, 8, 1 << 6, libc::EINVAL),
    ];
    for (addr, len, access, wanted) in cases {
        // SAFETY: registering looks at nothing that is not mapped.
        let mr = unsafe { ibv_reg_mr(side.pd, addr.cast(), len, access) };
        assert_eq!((mr.is_null(), errno()), (true, wanted), "{addr:p} {len} {access:#x}");
    }
}

#[test]
fn a_device_closed_with_live_objects_takes_them_along() {
    let (a, b) = (Side::new(), Side::new());
    let (qa, qb) = connected(&a, &b);
    let mut sge = a.sge(0, 64);
    assert_eq!(post_recv(qb, 1, &mut b.sge(0, 64)), 0);
    // SAFETY: handles of objects that once lived may be handed in.
    unsafe {
        assert_eq!(ibv_close_device(a.context), 0);
        assert_eq!(post_send(qa, &mut send_wr(1, IBV_WR_SEND, &mut sge)).0, libc::EINVAL);
        assert_eq!((ibv_destroy_qp(qa), ibv_dereg_mr(a.mr)), (libc::EINVAL, libc::EINVAL));
        assert_eq!((ibv_close_device(a.context), errno()), (-1, libc::EINVAL));
    }
    // The other context of the same device goes on.
    let again = Side::new();
    let (qc, qd) = connected(&again, &b);
    assert_eq!(post_recv(qd, 2, &mut b.sge(0, 64)), 0);
    assert_eq!(post_send(qc, &mut send_wr(3, IBV_WR_SEND, &mut again.sge(0, 64))).0, 0);
    assert_eq!((again.wait().wr_id, b.wait().wr_id), (3, 2));
}

#[test]
fn a_forked_child_is_refused_and_the_parent_goes_on() {
    let (a, b) = (Side::new(), Side::new());
    let (qa, qb) = connected(&a, &b);
    let mut sge = a.sge(0, 64);
    // SAFETY: the child calls verbs, which touch nothing but an atomic there, and exits at once.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let posted = post_send(qa, &mut send_wr(1, IBV_WR_SEND, &mut sge)).0;
        // SAFETY: as above.
        unsafe {
            let gone = ibv_alloc_pd(a.context).is_null() && ibv_dereg_mr(a.mr) == libc::ENODEV;
            libc::_exit(if gone && posted == libc::ENODEV { 0 } else { 1 });
        }
    }
    let mut status = 0;
    // SAFETY: the child exists; `status` is a place for its end.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child's calls");
    assert_eq!(post_recv(qb, 1, &mut b.sge(0, 64)), 0);
    assert_eq!(post_send(qa, &mut send_wr(2, IBV_WR_SEND, &mut sge)).0, 0);
    assert_eq!((a.wait().status, b.wait().status), (0, 0));
}

#[test]
fn what_a_device_does_not_have_is_not_granted() {
    let side = Side::new();
    let mut attr = qp_init(side.cq, 9, 4);
    // SAFETY: the objects are alive.
    unsafe {
        assert!(ibv_create_qp(side.pd, &mut attr).is_null());
        assert_eq!(errno(), libc::EOPNOTSUPP, "XRC");
        let too_large: [fn(&mut ibv_qp_cap); 4] = [
            |cap| cap.max_send_wr = 1 << 20,
            |cap| cap.max_recv_sge = roce::verbs::MAX_SGE as u32 + 1,
            |cap| cap.max_inline_data = 1 << 20,
            |cap| cap.max_recv_wr = u32::MAX,
        ];
        for change in too_large {
            let mut attr = qp_init(side.cq, IBV_QPT_RC, 4);
            change(&mut attr.cap);
            assert!(ibv_create_qp(side.pd, &mut attr).is_null());
            assert_eq!(errno(), libc::EINVAL);
        }
        assert!(ibv_create_cq(side.context, 0, null_mut(), null_mut(), 0).is_null());
        assert!(ibv_create_cq(side.context, 1, null_mut(), null_mut(), 1).is_null());
    }
}
