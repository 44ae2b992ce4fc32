//! The extended completion queue: completions are read field by field.
//!
//! `start_poll` and `next_poll` put one completion into the queue's cursor; the readers take it
//! from there. The cursor is locked from a successful start to `end_poll`, unless the program
//! declared the queue single-threaded.

use std::ffi::c_int;

use libc::PTHREAD_MUTEX_INITIALIZER;
use rustix::io::Errno;

use super::{given, handle_or_null};
use crate::abi::*;
use crate::objects::{CompChannel, Context, Cq, Object, Pd, living, peek};
use crate::process::errors::Outcome;

/// The C structure of a new queue without its number.
fn table(context: *mut ibv_context, attr: &ibv_cq_init_attr_ex) -> ibv_cq_ex {
    ibv_cq_ex {
        context,
        channel: attr.channel,
        cq_context: attr.cq_context,
        handle: 0,
        cqe: attr.cqe as c_int,
        mutex: PTHREAD_MUTEX_INITIALIZER,
        cond: libc::PTHREAD_COND_INITIALIZER,
        comp_events_completed: 0,
        async_events_completed: 0,
        comp_mask: 0,
        status: 0,
        wr_id: 0,
        start_poll,
        next_poll,
        end_poll,
        read_opcode,
        read_vendor_err,
        read_byte_len,
        read_imm_data,
        read_qp_num,
        read_src_qp,
        read_wc_flags,
        read_slid,
        read_sl,
        read_dlid_path_bits,
        read_completion_ts: read_nothing_64,
        read_cvlan: read_nothing_16,
        read_flow_tag: read_nothing_32,
        read_tm_info: read_no_tag,
        read_completion_wallclock_ns: read_nothing_64,
    }
}

pub(crate) unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    // SAFETY: null or the caller's attributes.
    handle_or_null(unsafe { given(attr) }.and_then(|attr| create(context, attr)))
}

/// Creates a queue of either kind: the attributes of a plain one have no flags.
pub(super) fn create(
    context: *mut ibv_context,
    attr: &ibv_cq_init_attr_ex,
) -> Outcome<&'static Cq> {
    const FLAGS: u32 = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
    let flags = if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS == 0 { 0 } else { attr.flags };
    if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_PD != 0 {
        let domain = living::<Pd>(attr.parent_domain)?;
        if !domain.is_parent_domain() || domain.owner() != context {
            return Err(Errno::INVAL);
        }
    }
    let unsupported = attr.comp_mask & !(IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD)
        != 0
        || attr.wc_flags & !u64::from(IBV_WC_STANDARD_FLAGS) != 0
        || flags & !FLAGS != 0;
    if unsupported {
        return Err(Errno::OPNOTSUPP);
    }
    let opened = living::<Context>(context)?;
    let channel = match attr.channel.is_null() {
        true => None,
        false => Some(living::<CompChannel>(attr.channel)?),
    };
    let single_threaded = flags & IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0;
    Cq::create(opened, channel, attr, single_threaded, table(context, attr))
}

/// 0, or `ENOENT` when there is no completion.
fn advance(cq: &Cq) -> c_int {
    // SAFETY: the cursor is the calling thread's, by its lock or by the program's promise.
    match unsafe { cq.advance() } {
        Ok(true) => 0,
        Ok(false) => Errno::NOENT.raw_os_error(),
        Err(error) => error.raw_os_error(),
    }
}

unsafe extern "C" fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    // SAFETY: null or the caller's attributes.
    let extension = unsafe { attr.as_ref() }.is_some_and(|attr| attr.comp_mask != 0);
    let Ok(cq) = peek::<Cq>(cq) else {
        return Errno::INVAL.raw_os_error();
    };
    if extension {
        return Errno::INVAL.raw_os_error();
    }
    cq.cursor.acquire();
    let result = advance(cq);
    if result != 0 {
        cq.cursor.release();
    }
    result
}

unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    peek::<Cq>(cq).map_or_else(|error| error.raw_os_error(), advance)
}

unsafe extern "C" fn end_poll(cq: *mut ibv_cq_ex) {
    if let Ok(cq) = peek::<Cq>(cq) {
        cq.cursor.release();
    }
}

/// The completion being read; zeroes for a queue that does not exist.
fn current(cq: *mut ibv_cq_ex) -> ibv_wc {
    match peek::<Cq>(cq) {
        // SAFETY: read between start and end, when the cursor is the calling thread's.
        Ok(cq) => unsafe { cq.cursor.wc() },
        // SAFETY: all-zero bytes are a valid completion.
        Err(_) => unsafe { std::mem::zeroed() },
    }
}

macro_rules! readers {
    ($( $reader:ident: $field:ident -> $ty:ty; )+) => { $(
        unsafe extern "C" fn $reader(cq: *mut ibv_cq_ex) -> $ty {
            current(cq).$field.into()
        }
    )+ };
}

readers! {
    read_opcode: opcode -> u32;
    read_vendor_err: vendor_err -> u32;
    read_byte_len: byte_len -> u32;
    read_imm_data: imm_data -> u32;
    read_qp_num: qp_num -> u32;
    read_src_qp: src_qp -> u32;
    read_wc_flags: wc_flags -> u32;
    read_slid: slid -> u32;
    read_sl: sl -> u8;
    read_dlid_path_bits: dlid_path_bits -> u8;
}

// Queues with these fields are not created: a program that calls them gets zero, not a crash.

unsafe extern "C" fn read_nothing_64(_cq: *mut ibv_cq_ex) -> u64 {
    0
}

unsafe extern "C" fn read_nothing_32(_cq: *mut ibv_cq_ex) -> u32 {
    0
}

unsafe extern "C" fn read_nothing_16(_cq: *mut ibv_cq_ex) -> u16 {
    0
}

unsafe extern "C" fn read_no_tag(_cq: *mut ibv_cq_ex, _info: *mut std::ffi::c_void) {}
