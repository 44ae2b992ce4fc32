//! Memory regions: register, reregister, deregister, advise.

use std::ffi::{c_int, c_void};

use rustix::io::Errno;

use super::{code, handle_or_null};
use crate::abi::*;
use crate::objects::mr::{Change, Part, check_advised};
use crate::objects::{Mr, Pd, living};
use crate::process::errors::Outcome;

fn register(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: u32,
) -> Outcome<&'static Mr> {
    Mr::register(living::<Pd>(pd)?, addr, length, iova, access)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: u32,
) -> *mut ibv_mr {
    handle_or_null(register(pd, addr, length, iova, access))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    handle_or_null(register(pd, addr, length, addr as u64, access as u32))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    handle_or_null(register(pd, addr, length, iova, access as u32))
}

/// The handle's `addr` is the offset, as in rdma-core.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    let part = Part { fd, offset, length, iova };
    handle_or_null(living::<Pd>(pd).and_then(|pd| Mr::register_dmabuf(pd, part, access as u32)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    code(living::<Mr>(mr).and_then(Mr::deregister))
}

/// Codes of `enum ibv_rereg_mr_err_code`.
const ERR_INPUT: c_int = -1;
const ERR_CMD: c_int = -4;

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let flags = flags as u32;
    let Ok(mr) = living::<Mr>(mr) else {
        code(Err(Errno::INVAL));
        return ERR_INPUT;
    };
    let change = Change { flags, pd, addr, length, access: access as u32 };
    match change.check() {
        Ok(()) if code(mr.reregister(&change)) == 0 => 0,
        Ok(()) => ERR_CMD,
        Err(error) => {
            code(Err(error));
            ERR_INPUT
        }
    }
}

/// Regions are in memory from registration on, so the advice is only checked.
pub(super) unsafe extern "C" fn advise_mr(
    pd: *mut ibv_pd,
    advice: u32,
    flags: u32,
    sg_list: *mut ibv_sge,
    num_sge: u32,
) -> c_int {
    code(living::<Pd>(pd).and_then(|pd| {
        if flags & !IBV_ADVISE_MR_FLAG_FLUSH != 0 || sg_list.is_null() && num_sge > 0 {
            return Err(Errno::INVAL);
        }
        if advice > IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT {
            return Err(Errno::OPNOTSUPP);
        }
        let writes = advice == IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE;
        // SAFETY: the caller's list of `num_sge` pieces.
        (0..num_sge as usize)
            .try_for_each(|at| check_advised(pd, writes, unsafe { *sg_list.add(at) }))
    }))
}
