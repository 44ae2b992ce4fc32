//! Memory windows.

use std::cell::UnsafeCell;
use std::sync::Arc;

use roce::verbs::{WindowBinding, WindowId};
use rustix::io::Errno;

use super::mr::access_of;
use super::{Mark, Mr, Object, Pd, Qp, object, peek};
use crate::abi::*;
use crate::engine::Engine;
use crate::process::errors::{Outcome, errno_of};

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
    /// A window of a type with C's number.
    pub(crate) fn alloc(domain: &'static Pd, kind: u32) -> Outcome<&'static Mw> {
        if kind != IBV_MW_TYPE_1 && kind != IBV_MW_TYPE_2 {
            return Err(Errno::INVAL);
        }
        let type_2 = kind == IBV_MW_TYPE_2;
        let made = domain.engine.lock().endpoint_mut().alloc_window(domain.id, type_2);
        let (id, rkey) = made.map_err(errno_of)?;
        let (owner, pd) = (domain.owner(), domain.handle());
        let c = ibv_mw { context: owner, pd, rkey, handle: id.0, r#type: kind };
        let engine = Arc::clone(&domain.engine);
        let mw = Mw { c: UnsafeCell::new(c), mark: Mark::default(), owner, engine, id };
        Ok(Mw::arena().insert(mw))
    }

    pub(crate) fn dealloc(&'static self) -> Outcome<()> {
        self.engine.lock().endpoint_mut().dealloc_window(self.id).map_err(errno_of)?;
        Mw::arena().retire(self);
        Ok(())
    }

    /// Destroys it with its context.
    pub(super) fn end(&'static self) {
        if Mw::arena().retire(self) {
            let _ = self.engine.lock().endpoint_mut().dealloc_window(self.id);
        }
    }

    /// Binds a window of type 1; programs read its new key in the C structure.
    pub(crate) fn bind(&self, qp: &Qp, bind: &ibv_mw_bind) -> Outcome<()> {
        let wanted = self.binding(qp, 0, &bind.bind_info)?;
        let signaled = qp.signals_all || bind.send_flags & IBV_SEND_SIGNALED != 0;
        let bound =
            qp.engine.verb(|core| core.bind_window(qp.number, bind.wr_id, wanted, signaled));
        let rkey = bound.map_err(errno_of)?;
        // SAFETY: only the caller uses the window while it binds it.
        unsafe { (*self.c.get()).rkey = rkey };
        Ok(())
    }

    /// The requested binding. A length of 0 unbinds and needs no region.
    pub(crate) fn binding(
        &self,
        qp: &Qp,
        rkey: u32,
        info: &ibv_mw_bind_info,
    ) -> Outcome<WindowBinding> {
        // Numbers of windows are those of one device.
        if !Arc::ptr_eq(&self.engine, &qp.engine) {
            return Err(Errno::INVAL);
        }
        // A window's flags do not require local write: that is the region's right.
        let access = access_of(info.mw_access_flags | IBV_ACCESS_LOCAL_WRITE)?;
        let lkey = match peek::<Mr>(info.mr) {
            // SAFETY: the region is alive.
            Ok(_) => unsafe { (*info.mr).lkey },
            Err(_) if info.length == 0 => 0,
            Err(error) => return Err(error),
        };
        let (window, addr, len) = (self.id, info.addr, info.length);
        let zero_based = info.mw_access_flags & IBV_ACCESS_ZERO_BASED != 0;
        Ok(WindowBinding { window, rkey, lkey, addr, len, access, zero_based })
    }
}
