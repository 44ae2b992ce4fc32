//! Memory windows.

use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::sync::Arc;

use roce::verbs::{WindowBinding, WindowId};
use rustix::io::Errno;

use crate::abi::*;
use crate::engine::Engine;
use crate::errors::{Outcome, code, errno_of, or_null};
use crate::mr::{Mr, access_of};
use crate::object::{Mark, Object, living, object, peek};
use crate::pd::Pd;
use crate::qp::Qp;

/// A memory window.
#[repr(C)]
pub(crate) struct Mw {
    c: UnsafeCell<ibv_mw>,
    mark: Mark,
    owner: *mut ibv_context,
    engine: Arc<Engine>,
    id: WindowId,
}

object!(Mw, ibv_mw);

impl Mw {
    /// Ends it with its context.
    pub(crate) fn end(&'static self) {
        if Mw::arena().retire(self) {
            let _ = self.engine.lock().endpoint.dealloc_window(self.id);
        }
    }
}

fn alloc(pd: *mut ibv_pd, kind: u32) -> Outcome<*mut ibv_mw> {
    let domain = living::<Pd>(pd)?;
    if kind != IBV_MW_TYPE_1 && kind != IBV_MW_TYPE_2 {
        return Err(Errno::INVAL);
    }
    let type_2 = kind == IBV_MW_TYPE_2;
    let made = domain.engine.lock().endpoint.alloc_window(domain.id, type_2);
    let (id, rkey) = made.map_err(errno_of)?;
    let owner = domain.owner();
    let c = ibv_mw { context: owner, pd, rkey, handle: id.0, r#type: kind };
    let engine = Arc::clone(&domain.engine);
    let mw = Mw { c: UnsafeCell::new(c), mark: Mark::default(), owner, engine, id };
    Ok(Mw::arena().insert(mw).handle())
}

pub(crate) unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: u32) -> *mut ibv_mw {
    or_null(alloc(pd, kind))
}

pub(crate) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    code(living::<Mw>(mw).and_then(|mw| {
        mw.engine.lock().endpoint.dealloc_window(mw.id).map_err(errno_of)?;
        Mw::arena().retire(mw);
        Ok(())
    }))
}

/// What a bind asks for. A length of 0 unbinds and needs no region.
pub(crate) fn binding(
    qp: &Qp,
    mw: *mut ibv_mw,
    rkey: u32,
    info: &ibv_mw_bind_info,
) -> Outcome<WindowBinding> {
    let mw = peek::<Mw>(mw)?;
    // Numbers of windows are those of one device.
    if !Arc::ptr_eq(&mw.engine, &qp.engine) {
        return Err(Errno::INVAL);
    }
    // The flags of a window need no local write: that is the region's.
    let access = access_of(info.mw_access_flags | IBV_ACCESS_LOCAL_WRITE)?;
    let lkey = match peek::<Mr>(info.mr) {
        // SAFETY: the region is alive.
        Ok(_) => unsafe { (*info.mr).lkey },
        Err(_) if info.length == 0 => 0,
        Err(error) => return Err(error),
    };
    let (addr, len) = (info.addr, info.length);
    let zero_based = info.mw_access_flags & IBV_ACCESS_ZERO_BASED != 0;
    Ok(WindowBinding { window: mw.id, rkey, lkey, addr, len, access, zero_based })
}

pub(crate) unsafe extern "C" fn bind_mw(
    qp: *mut ibv_qp,
    mw: *mut ibv_mw,
    bind: *mut ibv_mw_bind,
) -> c_int {
    // SAFETY: null or the caller's request.
    let bind = unsafe { bind.as_ref() }.copied();
    code(bind.ok_or(Errno::INVAL).and_then(|bind| bind_type_1(qp, mw, &bind)))
}

fn bind_type_1(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: &ibv_mw_bind) -> Outcome<()> {
    let qp = peek::<Qp>(qp.cast())?;
    let window = peek::<Mw>(mw)?;
    let wanted = binding(qp, mw, 0, &bind.bind_info)?;
    let signaled = qp.signals_all || bind.send_flags & IBV_SEND_SIGNALED != 0;
    let bound =
        qp.engine.verb(|core| core.endpoint.bind_window(qp.number, bind.wr_id, wanted, signaled));
    let rkey = bound.map_err(errno_of)?;
    // SAFETY: the window is the caller's while it binds it.
    unsafe { (*window.c.get()).rkey = rkey };
    Ok(())
}
