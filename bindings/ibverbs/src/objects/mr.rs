//! Memory regions: the program's own memory, registered with the transport.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use roce::direct::RegionDescriptor;
use roce::verbs::{Access, MemoryRegion, PdId};
use rustix::io::Errno;

use super::{Mark, Object, Pd, living, object};
use crate::abi::*;
use crate::engine::dmabuf::{DmaBuf, page};
use crate::engine::shared::Place;
use crate::engine::{Engine, limits, populate};
use crate::process::errors::{Outcome, errno_of};

/// A memory region.
#[repr(C)]
pub(crate) struct Mr {
    c: UnsafeCell<ibv_mr>,
    mark: Mark,
    owner: *mut ibv_context,
    engine: Arc<Engine>,
    now: Mutex<Shape>,
    /// What keeps the memory mapped, if this library has mapped it.
    buffer: Mutex<Option<DmaBuf>>,
}

object!(Mr, ibv_mr);

/// The parameters of a registration; reregistering changes them.
#[derive(Clone, Copy)]
struct Shape {
    pd: PdId,
    addr: u64,
    len: u64,
    /// Address of the first byte for work requests and peers.
    iova: u64,
    access: u32,
    lkey: u32,
    /// Where the memory is for local peers.
    place: Place,
}

impl Shape {
    fn new(pd: PdId, (addr, len): (u64, u64), iova: u64, access: u32) -> Shape {
        Shape { pd, addr, len, iova, access, lkey: 0, place: Place::Private }
    }

    /// The region ends: its memory is the program's alone again, if no other region needs it in the
    /// file.
    fn unshare(&self, engine: &Engine) {
        engine.unshare(self.addr, self.len, self.place);
    }
}

/// Part of the buffer of another device.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    /// Its dma-buf; may be closed after the registration.
    pub(crate) fd: c_int,
    /// First byte in the buffer.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) length: usize,
    /// Address of the first byte for work requests and peers.
    pub(crate) iova: u64,
}

/// The arguments of `ibv_rereg_mr`.
pub(crate) struct Change {
    /// Which of the others apply: `IBV_REREG_MR_CHANGE_*`.
    pub(crate) flags: u32,
    pub(crate) pd: *mut ibv_pd,
    pub(crate) addr: *mut c_void,
    pub(crate) length: usize,
    pub(crate) access: u32,
}

impl Change {
    fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    /// # Errors
    /// `EINVAL` for flags that contradict each other or their arguments.
    pub(crate) fn check(&self) -> Outcome<()> {
        let translation = self.has(IBV_REREG_MR_CHANGE_TRANSLATION);
        let wrong = self.flags == 0
            || self.flags & !IBV_REREG_MR_FLAGS_SUPPORTED != 0
            || translation && (self.addr.is_null() || self.length == 0);
        if self.has(IBV_REREG_MR_CHANGE_PD) {
            living::<Pd>(self.pd)?;
        }
        if wrong { Err(Errno::INVAL) } else { Ok(()) }
    }

    fn apply(&self, mr: &Mr, shape: &mut Shape) -> Outcome<()> {
        if self.has(IBV_REREG_MR_CHANGE_TRANSLATION) {
            let start = self.addr as u64;
            (shape.addr, shape.iova, shape.len) = (start, start, self.length as u64);
        }
        if self.has(IBV_REREG_MR_CHANGE_PD) {
            let pd = living::<Pd>(self.pd)?;
            if pd.owner() != mr.owner {
                return Err(Errno::INVAL);
            }
            shape.pd = pd.id;
        }
        if self.has(IBV_REREG_MR_CHANGE_ACCESS) {
            shape.access = self.access;
        }
        Ok(())
    }
}

impl Mr {
    /// Registers memory under the address `iova`; a zero-based region has none.
    pub(crate) fn register(
        domain: &'static Pd,
        addr: *mut c_void,
        length: usize,
        iova: u64,
        access: u32,
    ) -> Outcome<&'static Mr> {
        let iova = if access & IBV_ACCESS_ZERO_BASED == 0 { iova } else { 0 };
        let shape = Shape::new(domain.id, (addr as u64, length as u64), iova, access);
        Mr::create(domain, shape, addr, None)
    }

    /// Registers part of the buffer of another device.
    ///
    /// # Errors
    /// `EINVAL` for rights that such a region cannot have (as in the kernel), and for an `iova`
    /// that lies elsewhere in its page than the offset; else as [`DmaBuf::map`].
    pub(crate) fn register_dmabuf(
        domain: &'static Pd,
        part: Part,
        access: u32,
    ) -> Outcome<&'static Mr> {
        const ALLOWED: u32 = IBV_ACCESS_LOCAL_WRITE
            | IBV_ACCESS_REMOTE_WRITE
            | IBV_ACCESS_REMOTE_READ
            | IBV_ACCESS_REMOTE_ATOMIC
            | IBV_ACCESS_OPTIONAL_RANGE;
        let Part { fd, offset, length, iova } = part;
        if access & !ALLOWED != 0 || (iova ^ offset) & (page() - 1) != 0 {
            return Err(Errno::INVAL);
        }
        let len = length as u64;
        let buffer = DmaBuf::map(fd, offset, len, access_of(access)?.local_write)?;
        let shape = Shape::new(domain.id, (buffer.addr(), len), iova, access);
        Mr::create(domain, shape, std::ptr::without_provenance_mut(offset as usize), Some(buffer))
    }

    /// `shown`: the address in the program's handle.
    fn create(
        domain: &'static Pd,
        mut shape: Shape,
        shown: *mut c_void,
        buffer: Option<DmaBuf>,
    ) -> Outcome<&'static Mr> {
        let region = enlist(&domain.engine, &mut shape)?;
        let owner = domain.owner();
        let c = ibv_mr {
            context: owner,
            pd: domain.handle(),
            addr: shown,
            length: shape.len as usize,
            handle: region.lkey,
            lkey: region.lkey,
            rkey: region.rkey,
        };
        Ok(Mr::arena().insert(Mr {
            c: UnsafeCell::new(c),
            mark: Mark::default(),
            owner,
            engine: Arc::clone(&domain.engine),
            now: Mutex::new(shape),
            buffer: Mutex::new(buffer),
        }))
    }

    pub(crate) fn deregister(&'static self) -> Outcome<()> {
        // First the region's lock, then the engine's, as where it is registered again.
        let shape = self.shape();
        retire(&self.engine, &shape, self.rkey())?;
        self.unmap();
        Mr::arena().retire(self);
        Ok(())
    }

    /// Ends the mapping of a buffer that is registered no more.
    fn unmap(&self) {
        drop(self.buffer.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// New memory gets new keys, since peers use the old ones with the old addresses. New rights or
    /// another domain leave the keys as they are, as NICs do.
    pub(crate) fn reregister(&self, change: &Change) -> Outcome<()> {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        let mut shape = *now;
        let is_mapped = self.buffer.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        if is_mapped && change.has(IBV_REREG_MR_CHANGE_TRANSLATION) {
            return Err(Errno::OPNOTSUPP);
        }
        change.apply(self, &mut shape)?;
        if change.has(IBV_REREG_MR_CHANGE_TRANSLATION) {
            shape.place = Place::Private;
            let region = replace(&self.engine, &mut shape, &now, self.rkey())?;
            // SAFETY: the program must not use the region while it is being registered again.
            let c = unsafe { &mut *self.c.get() };
            (c.addr, c.length) = (shape.addr as *mut c_void, shape.len as usize);
            (c.handle, c.lkey, c.rkey) = (region.lkey, region.lkey, region.rkey);
        } else {
            let access = access_of(shape.access)?;
            populate(shape.addr, shape.len, access.local_write)?;
            withdraw(&self.engine, &now, self.rkey())?;
            if access.is_remote() && shape.place == Place::Private {
                shape.place = self.engine.keep(shape.addr, shape.len);
                now.place = shape.place;
            }
            let mut core = self.engine.lock();
            let changed = core.endpoint_mut().change_region(now.lkey, shape.pd, access);
            let in_force = if changed.is_ok() { &shape } else { &*now };
            core.publish_region(now.lkey, &descriptor(in_force, self.rkey()));
            changed.map_err(errno_of)?;
        }
        *now = shape;
        if change.has(IBV_REREG_MR_CHANGE_PD) {
            // SAFETY: as above.
            unsafe { (*self.c.get()).pd = change.pd };
        }
        Ok(())
    }

    fn shape(&self) -> Shape {
        *self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn rkey(&self) -> u32 {
        // SAFETY: changed only while the region is registered again, when the program must not use
        // it.
        unsafe { (*self.c.get()).rkey }
    }

    /// Destroys it with its context.
    pub(super) fn end(&'static self) {
        if Mr::arena().retire(self) {
            let shape = self.shape();
            if retire(&self.engine, &shape, self.rkey()).is_err() {
                let _ = self.engine.lock().endpoint_mut().deregister(shape.lkey);
                shape.unshare(&self.engine);
            }
            self.unmap();
        }
    }
}

/// The access flags of a region.
///
/// # Errors
/// `EINVAL` for flags that do not exist, are not supported (on-demand paging), or contradict each
/// other: remote write and atomic need local write (IBA 10.6.3).
pub(super) fn access_of(flags: u32) -> Outcome<Access> {
    const KNOWN: u32 = IBV_ACCESS_LOCAL_WRITE
        | IBV_ACCESS_REMOTE_WRITE
        | IBV_ACCESS_REMOTE_READ
        | IBV_ACCESS_REMOTE_ATOMIC
        | IBV_ACCESS_MW_BIND
        | IBV_ACCESS_ZERO_BASED
        | IBV_ACCESS_HUGETLB
        | IBV_ACCESS_OPTIONAL_RANGE;
    let has = |flag| flags & flag != 0;
    let needs_local = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
    if flags & !KNOWN != 0 || has(needs_local) && !has(IBV_ACCESS_LOCAL_WRITE) {
        return Err(Errno::INVAL);
    }
    Ok(Access {
        local_write: has(IBV_ACCESS_LOCAL_WRITE),
        remote_write: has(IBV_ACCESS_REMOTE_WRITE),
        remote_read: has(IBV_ACCESS_REMOTE_READ),
        remote_atomic: has(IBV_ACCESS_REMOTE_ATOMIC),
        bind_window: has(IBV_ACCESS_MW_BIND),
    })
}

/// Registers with the endpoint, after faulting in the pages, and notes key and place.
fn enlist(engine: &Engine, shape: &mut Shape) -> Outcome<MemoryRegion> {
    let access = access_of(shape.access)?;
    if shape.len == 0 || shape.len > limits::MAX_MR_BYTES {
        return Err(Errno::INVAL);
    }
    populate(shape.addr, shape.len, access.local_write)?;
    let Shape { pd, iova, len, addr, .. } = *shape;
    // Only local peers need it there.
    if access.is_remote() {
        shape.place = engine.share(addr, len);
    }
    let mut core = engine.lock();
    let registered = core.endpoint_mut().register_at(pd, iova, len, addr, access);
    let region = match registered {
        Ok(region) => region,
        Err(error) => {
            drop(core);
            shape.unshare(engine);
            return Err(errno_of(error));
        }
    };
    shape.lkey = region.lkey;
    core.publish_region(region.lkey, &descriptor(shape, region.rkey));
    Ok(region)
}

/// What local peers learn about a region.
fn descriptor(shape: &Shape, rkey: u32) -> RegionDescriptor {
    let access = access_of(shape.access).unwrap_or_default();
    let Shape { pd, iova, len, addr, place, .. } = *shape;
    let in_file = place.in_file();
    RegionDescriptor { rkey, pd, addr: iova, len, backing: addr, in_file, access }
}

/// Takes a region from local peers, and waits for those that use it.
///
/// # Errors
/// `EBUSY` when one was stopped in the middle of an access: then nothing has changed.
fn withdraw(engine: &Engine, shape: &Shape, rkey: u32) -> Outcome<()> {
    engine.lock().withdraw_region(shape.lkey);
    if engine.quiesce() {
        return Ok(());
    }
    engine.lock().publish_region(shape.lkey, &descriptor(shape, rkey));
    Err(Errno::BUSY)
}

/// Deregisters a region: when this returns, nobody uses it.
fn retire(engine: &Engine, shape: &Shape, rkey: u32) -> Outcome<()> {
    withdraw(engine, shape, rkey)?;
    let mut core = engine.lock();
    core.endpoint_mut().deregister(shape.lkey).map_err(|error| {
        core.publish_region(shape.lkey, &descriptor(shape, rkey));
        errno_of(error)
    })?;
    drop(core);
    shape.unshare(engine);
    Ok(())
}

/// Registers `shape`, then deregisters the region that it replaces.
fn replace(engine: &Engine, shape: &mut Shape, before: &Shape, rkey: u32) -> Outcome<MemoryRegion> {
    let region = enlist(engine, shape)?;
    if let Err(error) = retire(engine, before, rkey) {
        // Windows are bound to the old region, so that stays. Nobody has the new key.
        let mut core = engine.lock();
        core.withdraw_region(region.lkey);
        let _ = core.endpoint_mut().deregister(region.lkey);
        drop(core);
        shape.unshare(engine);
        return Err(error);
    }
    Ok(region)
}

/// Checks that the range of an advice is in a region of the domain.
///
/// # Errors
/// As in the man page: `EFAULT` for keys that do not exist and bytes outside, `EPERM` for regions
/// of other domains and those that are not writable.
pub(crate) fn check_advised(pd: &Pd, writes: bool, piece: ibv_sge) -> Outcome<()> {
    let regions = Mr::arena().of_context(pd.owner());
    let named = regions.iter().map(|mr| mr.shape()).find(|shape| shape.lkey == piece.lkey);
    let shape = named.ok_or(Errno::FAULT)?;
    if shape.pd != pd.id || writes && shape.access & IBV_ACCESS_LOCAL_WRITE == 0 {
        return Err(Errno::PERM);
    }
    let offset = piece.addr.checked_sub(shape.iova).ok_or(Errno::FAULT)?;
    let fits = offset <= shape.len && u64::from(piece.length) <= shape.len - offset;
    if fits { Ok(()) } else { Err(Errno::FAULT) }
}
