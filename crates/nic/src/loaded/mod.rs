//! A device behind a verbs library that is found at run time: an adapter's, the kernel's, or ours.
//!
//! [`LoadedDevice`] is the [`Device`] of such a library. The
//! library moves packets without us; completions and events are announced by descriptors.
//!
//! Posting, polling and arming are inline functions of the header: they go through the table in the
//! context (`context->ops`). The extended query of the port goes through the structure around the
//! context (`verbs_context`). Everything else is an exported function.
//!
//! Such a device differs from the software one: its `Completion`s do not show whether they were
//! solicited or came over IPv4; re-registered regions may get new keys; paths lead to UDP port 4791
//! only; loss recovery and congestion control are the device's own.
//!
//! | module | what it holds |
//! |---|---|
//! | `library` | the library and its functions |
//! | `translate` | values in C's terms and back |
//! | `context` | the open handles, and what is asked once |
//! | `objects` | what the device has made and not destroyed |
//! | `posting` | chains of work requests |
//! | `wakeups` | which queues are armed, and which were notified |
//! | `reports` | what the operator hears |
//! | `events` | what a library's device reports by itself |

mod context;
mod events;
mod library;
mod objects;
mod posting;
mod reports;
mod translate;
mod wakeups;

use std::ffi::c_int;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::ptr;

use arrayvec::ArrayVec;
use roce::Time;
use roce::device::{Device, PostError};
use roce::endpoint::{AsyncEvent, AttrMask, QpAttr, QpConfig, QpState, Reliability, SrqConfig};
use roce::verbs::{
    Access, AddressHandle, Completion, CqId, MemoryRegion, PdId, Qpn, RecvWr, SendWr, SrqId,
    Transport, VerbsError, WindowId,
};
use roce::wire::ROCE_PORT;
use roce::world::Path;

use crate::abi::*;
use context::{Context, Port};
pub use library::{DEFAULT_LIBRARY, Library, LoadError};
use objects::{Objects, QueuePair, Region, UnknownObject};
use reports::Reports;
pub use reports::Trouble;
pub use translate::OTHER_PORT;
use translate::{last_refused, refused};
use wakeups::Wakeups;

/// Completions taken from the library in one call.
const POLL_BATCH: usize = 16;

/// Notifications and events taken from the library in one call. A library may report without end,
/// and the descriptors stay readable until all are taken.
const EVENT_BATCH: usize = 16;

/// Completions of no queue pair that one call of `poll_cq` drops. A library may return them without
/// end.
const MAX_UNKNOWN: usize = 4096;

/// An open device of a verbs library.
#[derive(Debug)]
pub struct LoadedDevice {
    context: Context,
    port: Port,
    objects: Objects,
    wakeups: Wakeups,
    reports: Reports,
}

// SAFETY: the objects behind the pointers belong to the library, which allows calls from any
// thread. Nobody else has these pointers.
unsafe impl Send for LoadedDevice {}

impl LoadedDevice {
    /// Opens the device of this name.
    ///
    /// # Errors
    /// When the library has no such device, it cannot be opened, lacks an operation, or has no
    /// address for RoCEv2.
    pub fn open(library: &Library, name: &str) -> Result<LoadedDevice, LoadError> {
        LoadedDevice::adopt(library, name, library.open(name)?)
    }

    /// The device of a context that this library has opened.
    fn adopt(
        library: &Library,
        name: &str,
        context: *mut ibv_context,
    ) -> Result<LoadedDevice, LoadError> {
        let context = Context::adopt(library.functions, name, context)?;
        let port = context.port()?;
        let (objects, wakeups, reports) = Default::default();
        Ok(LoadedDevice { context, port, objects, wakeups, reports })
    }

    /// Where peers reach the device: its first address.
    pub fn local(&self) -> SocketAddr {
        SocketAddr::new(self.port.gids[0].ip, ROCE_PORT)
    }

    /// Its addresses, in the order in which [`Path::source`] counts them.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.port.gids.iter().map(|gid| gid.ip)
    }

    /// Descriptors that are readable when an armed completion queue has a notification, or when
    /// there is an asynchronous event.
    pub fn fds(&self) -> [BorrowedFd<'_>; 2] {
        // SAFETY: the descriptors stay open as long as the device, which is borrowed.
        self.context.fds().map(|fd| unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Counts a completion of a queue pair that does not exist.
    fn note_unknown_completion(&mut self, qp_num: u32) {
        if self.objects.was_destroyed(qp_num) {
            self.reports.unknown.late_completions += 1;
        } else {
            const WHAT: &str = "a completion of the unknown queue pair";
            self.reports.unknown.completions += 1;
            self.reports.unknown(&self.context.name, WHAT, qp_num);
        }
    }

    /// The error of a rejected post.
    fn post_refused(&self, qpn: Qpn, queue: usize, errno: c_int) -> VerbsError {
        let (call, names) = (["ibv_post_send", "ibv_post_recv"][queue], ["send", "receive"]);
        match (errno, self.objects.qp(qpn)) {
            (libc::ENOMEM, Ok(qp)) => {
                let (queue, limit) = (names[queue], qp.limits[queue]);
                VerbsError::QueueFull { qpn: qpn.get(), queue, limit }
            }
            (libc::EINVAL, Ok(_)) => {
                VerbsError::Invalid { qpn: qpn.get(), why: "the device refused the work request" }
            }
            _ => refused(call, errno),
        }
    }
}

/// The result of a call that returns an error number.
fn done(call: &'static str, result: c_int) -> Result<(), VerbsError> {
    match result {
        0 => Ok(()),
        // Older libraries return -1 and leave the number in errno.
        ..0 => Err(last_refused(call)),
        errno => Err(refused(call, errno)),
    }
}

/// The result of a call that makes an object.
fn made<T>(call: &'static str, object: *mut T) -> Result<*mut T, VerbsError> {
    if object.is_null() { Err(last_refused(call)) } else { Ok(object) }
}

/// Maps `EBUSY` to `in_use`.
fn busy(result: Result<(), VerbsError>, in_use: VerbsError) -> Result<(), VerbsError> {
    result.map_err(|error| match error {
        VerbsError::Device { errno: libc::EBUSY, .. } => in_use,
        error => error,
    })
}

// Every call below hands the library objects that it made itself and that were not destroyed: they
// come from the tables, which hold them from creation to destruction. Structures that it reads or
// fills live on this stack until the call returns. This is what the comments mean by "living
// objects".
impl Device for LoadedDevice {
    fn alloc_pd(&mut self) -> Result<PdId, VerbsError> {
        // SAFETY: living objects.
        let pd = unsafe { (self.context.functions.alloc_pd)(self.context.handle) };
        Ok(PdId(self.objects.pds.add(made("ibv_alloc_pd", pd)?)))
    }

    fn dealloc_pd(&mut self, pd: PdId) -> Result<(), VerbsError> {
        let c = self.objects.pd(pd)?;
        // SAFETY: living objects.
        let result = unsafe { (self.context.functions.dealloc_pd)(c) };
        busy(done("ibv_dealloc_pd", result), VerbsError::PdInUse(pd.0))?;
        self.objects.pds.objects.remove(&pd.0);
        Ok(())
    }

    fn create_cq(&mut self, depth: u32) -> Result<CqId, VerbsError> {
        let id = self.objects.cqs.next;
        let name = ptr::without_provenance_mut(id as usize);
        // SAFETY: living objects.
        let cq = unsafe {
            let create = self.context.functions.create_cq;
            create(self.context.handle, depth as c_int, name, self.context.channel, 0)
        };
        Ok(CqId(self.objects.cqs.add(made("ibv_create_cq", cq)?)))
    }

    fn resize_cq(&mut self, cq: CqId, depth: u32) -> Result<(), VerbsError> {
        let c = self.objects.cq(cq)?;
        // SAFETY: living objects.
        done("ibv_resize_cq", unsafe { (self.context.functions.resize_cq)(c, depth as c_int) })
    }

    fn destroy_cq(&mut self, cq: CqId) -> Result<(), VerbsError> {
        let c = self.objects.cq(cq)?;
        // SAFETY: living objects; every event was acknowledged when it was taken, so this does not
        // wait.
        let result = unsafe { (self.context.functions.destroy_cq)(c) };
        busy(done("ibv_destroy_cq", result), VerbsError::CqInUse(cq.0))?;
        self.objects.cqs.objects.remove(&cq.0);
        self.wakeups.forget(cq);
        Ok(())
    }

    fn poll_cq<const N: usize>(
        &mut self,
        cq: CqId,
        into: &mut ArrayVec<Completion, N>,
    ) -> Result<(), VerbsError> {
        let c = self.objects.cq(cq)?;
        let poll = self.context.ops().poll_cq.ok_or(VerbsError::Unsupported("ibv_poll_cq"))?;
        let mut unknown = 0;
        while !into.is_full() && unknown < MAX_UNKNOWN {
            // SAFETY: numbers only, for which zero is a value.
            let mut batch: [ibv_wc; POLL_BATCH] = unsafe { std::mem::zeroed() };
            let wanted = into.remaining_capacity().min(POLL_BATCH);
            // SAFETY: living objects; the function fills at most as many as it is told.
            let count = unsafe { poll(c, wanted as c_int, batch.as_mut_ptr()) };
            let polled = match usize::try_from(count) {
                Ok(count) if count <= wanted => Ok(count),
                Ok(_) => Err(refused("ibv_poll_cq", libc::EOVERFLOW)),
                Err(_) => Err(last_refused("ibv_poll_cq")),
            };
            let count = polled.inspect_err(|error| {
                self.reports.degraded(&self.context.name, "ibv_poll_cq", error);
            })?;
            for wc in &batch[..count] {
                if let Some(qp) = self.objects.qps.get(&wc.qp_num) {
                    into.push(translate::completion(wc, qp.transport));
                } else {
                    self.note_unknown_completion(wc.qp_num);
                    unknown += 1;
                }
            }
            if count < wanted {
                break;
            }
        }
        Ok(())
    }

    fn req_notify(&mut self, cq: CqId, solicited_only: bool) -> Result<(), VerbsError> {
        let c = self.objects.cq(cq)?;
        let arm =
            self.context.ops().req_notify_cq.ok_or(VerbsError::Unsupported("ibv_req_notify_cq"))?;
        // SAFETY: living objects.
        done("ibv_req_notify_cq", unsafe { arm(c, c_int::from(solicited_only)) })
    }

    fn poll_notified(&mut self) -> Option<CqId> {
        for _ in 0..EVENT_BATCH {
            let (mut cq, mut name) = (ptr::null_mut(), ptr::null_mut());
            let functions = &self.context.functions;
            // SAFETY: living objects; the channel's descriptor does not wait.
            let result = unsafe {
                (functions.get_cq_event)(self.context.channel, &raw mut cq, &raw mut name)
            };
            if result != 0 {
                break;
            }
            // SAFETY: the queue of an event that was not acknowledged yet, so it is not destroyed.
            unsafe { (functions.ack_cq_events)(cq, 1) };
            let cq = CqId(name.addr() as u32);
            if self.objects.cqs.get(cq.0).is_none() {
                const WHAT: &str = "a notification of the unknown completion queue";
                self.reports.unknown.notifications += 1;
                self.reports.unknown(&self.context.name, WHAT, cq.0);
            } else {
                self.wakeups.push(cq);
            }
        }
        self.wakeups.pop()
    }

    fn create_qp(&mut self, config: QpConfig) -> Result<Qpn, VerbsError> {
        let QpConfig { transport, pd, send_cq, recv_cq, max_send_wr, max_recv_wr, srq } = config;
        let own_receives = if srq.is_some() { 0 } else { max_recv_wr };
        let mut init = ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: self.objects.cq(send_cq)?,
            recv_cq: self.objects.cq(recv_cq)?,
            srq: srq.map_or(Ok(ptr::null_mut()), |srq| self.objects.srq(srq).map(|(c, _)| c))?,
            cap: ibv_qp_cap {
                max_send_wr,
                max_recv_wr: own_receives,
                max_send_sge: self.port.max_sge,
                max_recv_sge: if srq.is_some() { 0 } else { self.port.max_sge },
                max_inline_data: 0,
            },
            qp_type: translate::qp_type(transport),
            sq_sig_all: 0,
        };
        // SAFETY: living objects.
        let qp = unsafe { (self.context.functions.create_qp)(self.objects.pd(pd)?, &raw mut init) };
        let c = made("ibv_create_qp", qp)?;
        // SAFETY: the queue pair was just made.
        let number = unsafe { (*c).qp_num };
        let limits = [init.cap.max_send_wr, init.cap.max_recv_wr];
        self.objects.add_qp(number, QueuePair { c, transport, limits });
        Ok(Qpn::new(number))
    }

    fn modify_qp(&mut self, _now: Time, qpn: Qpn, attr: &QpAttr) -> Result<(), VerbsError> {
        if attr.mask.contains(AttrMask::STATE) && attr.state == QpState::Rtr {
            // The device does loss recovery and congestion control in its own way.
            if attr.reliability != Reliability::GoBackN {
                return Err(VerbsError::Unsupported("selective repeat"));
            }
            if !attr.congestion.is_off() {
                return Err(VerbsError::Unsupported("congestion control of our own"));
            }
        }
        let c = self.objects.qp(qpn)?.c;
        let mut values = translate::attributes(&self.port.gids, attr)?;
        let mask = attr.mask.bits() as c_int;
        // SAFETY: living objects.
        let result = unsafe { (self.context.functions.modify_qp)(c, &raw mut values, mask) };
        done("ibv_modify_qp", result)
    }

    fn query_qp(&mut self, qpn: Qpn) -> Result<QpAttr, VerbsError> {
        let c = self.objects.qp(qpn)?.c;
        // SAFETY: numbers and pointers, for which zero is a value.
        let (mut attr, mut init) =
            unsafe { (std::mem::zeroed::<ibv_qp_attr>(), std::mem::zeroed::<ibv_qp_init_attr>()) };
        let mask = (AttrMask::FIELDS - AttrMask::RATE_LIMIT).bits() as c_int;
        let query = self.context.functions.query_qp;
        // SAFETY: living objects.
        done("ibv_query_qp", unsafe { query(c, &raw mut attr, mask, &raw mut init) })?;
        Ok(translate::attributes_of(&self.port.gids, &attr))
    }

    fn transport(&self, qpn: Qpn) -> Result<Transport, VerbsError> {
        self.objects.qp(qpn).map(|qp| qp.transport)
    }

    fn destroy_qp(&mut self, _now: Time, qpn: Qpn) -> Result<(), VerbsError> {
        let c = self.objects.qp(qpn)?.c;
        // SAFETY: living objects; every event was acknowledged when it was taken, so this does not
        // wait.
        done("ibv_destroy_qp", unsafe { (self.context.functions.destroy_qp)(c) })?;
        self.objects.remove_qp(qpn.get());
        Ok(())
    }

    fn register(
        &mut self,
        pd: PdId,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        let bad = |why| VerbsError::BadRegion { addr, len, why };
        let (Ok(start), Ok(bytes)) = (usize::try_from(addr), usize::try_from(len)) else {
            return Err(bad("it does not fit the address space"));
        };
        let flags = translate::access_flags(access) as c_int;
        let (pd, start) = (self.objects.pd(pd)?, ptr::with_exposed_provenance_mut(start));
        // SAFETY: living objects. The library touches the memory only as work requests say, which
        // name it by the keys of the region.
        let mr = unsafe { (self.context.functions.reg_mr)(pd, start, bytes, flags) };
        if mr.is_null() {
            return Err(match last_refused("ibv_reg_mr") {
                VerbsError::Device { errno: libc::EINVAL, .. } => bad("the device refused it"),
                error => error,
            });
        }
        // SAFETY: the region was just made.
        let (lkey, rkey) = unsafe { ((*mr).lkey, (*mr).rkey) };
        let region = MemoryRegion { addr, len, lkey, rkey };
        self.objects.regions.insert(lkey, Region { c: mr, region });
        Ok(region)
    }

    fn change_region(
        &mut self,
        region: &MemoryRegion,
        pd: PdId,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        let c = self.objects.region(region.lkey)?.c;
        let what = (IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS) as c_int;
        let (pd, flags) = (self.objects.pd(pd)?, translate::access_flags(access) as c_int);
        let rereg = self.context.functions.rereg_mr;
        // SAFETY: living objects; the place of the region does not change.
        let result = unsafe { rereg(c, what, pd, ptr::null_mut(), 0, flags) };
        let in_use = VerbsError::RegionInUse(region.lkey);
        // On failure it returns which change failed; the error is in errno.
        let result = if result == 0 { Ok(()) } else { Err(last_refused("ibv_rereg_mr")) };
        busy(result, in_use)?;
        // SAFETY: the region still exists.
        let (lkey, rkey) = unsafe { ((*c).lkey, (*c).rkey) };
        let changed = MemoryRegion { lkey, rkey, ..*region };
        self.objects.regions.remove(&region.lkey);
        self.objects.regions.insert(lkey, Region { c, region: changed });
        Ok(changed)
    }

    fn deregister(&mut self, lkey: u32) -> Result<(), VerbsError> {
        let found = self.objects.region(lkey)?;
        let (c, rkey) = (found.c, found.region.rkey);
        // SAFETY: living objects.
        let result = unsafe { (self.context.functions.dereg_mr)(c) };
        busy(done("ibv_dereg_mr", result), VerbsError::RegionInUse(rkey))?;
        self.objects.regions.remove(&lkey);
        Ok(())
    }

    fn alloc_window(&mut self, pd: PdId, type_2: bool) -> Result<(WindowId, u32), VerbsError> {
        let alloc = self.context.ops().alloc_mw.ok_or(VerbsError::Unsupported("ibv_alloc_mw"))?;
        let kind = if type_2 { IBV_MW_TYPE_2 } else { IBV_MW_TYPE_1 };
        // SAFETY: living objects.
        let mw = made("ibv_alloc_mw", unsafe { alloc(self.objects.pd(pd)?, kind) })?;
        // SAFETY: the window was just made.
        let rkey = unsafe { (*mw).rkey };
        Ok((WindowId(self.objects.windows.add(mw)), rkey))
    }

    fn dealloc_window(&mut self, window: WindowId) -> Result<(), VerbsError> {
        let dealloc =
            self.context.ops().dealloc_mw.ok_or(VerbsError::Unsupported("ibv_dealloc_mw"))?;
        let mw = self.objects.window(window)?;
        // SAFETY: living objects.
        done("ibv_dealloc_mw", unsafe { dealloc(mw) })?;
        self.objects.windows.objects.remove(&window.0);
        Ok(())
    }

    fn create_srq(&mut self, config: SrqConfig) -> Result<SrqId, VerbsError> {
        let SrqConfig { pd, max_wr, limit } = config;
        let name = ptr::without_provenance_mut(self.objects.srqs.next as usize);
        let attr = ibv_srq_attr { max_wr, max_sge: self.port.max_sge, srq_limit: 0 };
        let mut init = ibv_srq_init_attr { srq_context: name, attr };
        // SAFETY: living objects.
        let srq =
            unsafe { (self.context.functions.create_srq)(self.objects.pd(pd)?, &raw mut init) };
        let srq = SrqId(self.objects.srqs.add((made("ibv_create_srq", srq)?, pd)));
        if limit > 0
            && let Err(error) = self.set_srq_limit(srq, limit)
        {
            self.destroy_srq(srq)?;
            return Err(error);
        }
        Ok(srq)
    }

    fn set_srq_limit(&mut self, srq: SrqId, limit: u32) -> Result<(), VerbsError> {
        let (c, _) = self.objects.srq(srq)?;
        let mut attr = ibv_srq_attr { max_wr: 0, max_sge: 0, srq_limit: limit };
        let modify = self.context.functions.modify_srq;
        // SAFETY: living objects.
        done("ibv_modify_srq", unsafe { modify(c, &raw mut attr, IBV_SRQ_LIMIT as c_int) })
    }

    fn query_srq(&mut self, srq: SrqId) -> Result<SrqConfig, VerbsError> {
        let (c, pd) = self.objects.srq(srq)?;
        let mut attr = ibv_srq_attr { max_wr: 0, max_sge: 0, srq_limit: 0 };
        // SAFETY: living objects.
        let result = unsafe { (self.context.functions.query_srq)(c, &raw mut attr) };
        done("ibv_query_srq", result)?;
        Ok(SrqConfig { pd, max_wr: attr.max_wr, limit: attr.srq_limit })
    }

    fn destroy_srq(&mut self, srq: SrqId) -> Result<(), VerbsError> {
        let (c, _) = self.objects.srq(srq)?;
        // SAFETY: living objects; every event was acknowledged when it was taken, so this does not
        // wait.
        let result = unsafe { (self.context.functions.destroy_srq)(c) };
        busy(done("ibv_destroy_srq", result), VerbsError::SrqInUse(srq.0))?;
        self.objects.srqs.objects.remove(&srq.0);
        Ok(())
    }

    fn create_ah(&mut self, pd: PdId, path: &Path) -> Result<AddressHandle, VerbsError> {
        let mut attr = translate::address(&self.port.gids, path)?;
        // SAFETY: living objects.
        let ah = unsafe { (self.context.functions.create_ah)(self.objects.pd(pd)?, &raw mut attr) };
        let id = self.objects.handles.add(made("ibv_create_ah", ah)?);
        Ok(AddressHandle { path: *path, id })
    }

    fn destroy_ah(&mut self, handle: AddressHandle) -> Result<(), VerbsError> {
        let ah = self.objects.handle(handle.id)?;
        // SAFETY: living objects.
        done("ibv_destroy_ah", unsafe { (self.context.functions.destroy_ah)(ah) })?;
        self.objects.handles.objects.remove(&handle.id);
        Ok(())
    }

    fn attach_multicast(&mut self, qpn: Qpn, group: IpAddr) -> Result<(), VerbsError> {
        let (c, gid) = (self.objects.qp(qpn)?.c, translate::gid_of(group));
        // SAFETY: living objects.
        let result = unsafe { (self.context.functions.attach_mcast)(c, &raw const gid, 0) };
        done("ibv_attach_mcast", result)
    }

    fn detach_multicast(&mut self, qpn: Qpn, group: IpAddr) -> Result<(), VerbsError> {
        let (c, gid) = (self.objects.qp(qpn)?.c, translate::gid_of(group));
        // SAFETY: living objects.
        let result = unsafe { (self.context.functions.detach_mcast)(c, &raw const gid, 0) };
        done("ibv_detach_mcast", result)
    }

    fn post_send(&mut self, _now: Time, qpn: Qpn, wrs: &[SendWr]) -> Result<(), PostError> {
        let none = |error| PostError { accepted: 0, error };
        let &QueuePair { c, transport, .. } = self.objects.qp(qpn).map_err(none)?;
        let post =
            self.context.ops().post_send.ok_or(none(VerbsError::Unsupported("ibv_post_send")))?;
        let translate = |wr: &SendWr| self.objects.send_wr(wr, transport);
        let refused = |errno| self.post_refused(qpn, 0, errno);
        // SAFETY: living objects; a chain of work requests that ends with a null pointer.
        posting::sends(wrs, translate, |first, bad| unsafe { post(c, first, bad) }, refused)
    }

    fn post_recv(&mut self, _now: Time, qpn: Qpn, wrs: &[RecvWr]) -> Result<(), PostError> {
        let none = |error| PostError { accepted: 0, error };
        let c = self.objects.qp(qpn).map_err(none)?.c;
        let post =
            self.context.ops().post_recv.ok_or(none(VerbsError::Unsupported("ibv_post_recv")))?;
        // SAFETY: living objects; a chain of work requests that ends with a null pointer.
        let post = |first, bad| unsafe { post(c, first, bad) };
        posting::receives(wrs, post, |errno| self.post_refused(qpn, 1, errno))
    }

    fn post_srq_recv(&mut self, srq: SrqId, wrs: &[RecvWr]) -> Result<(), PostError> {
        let none = |error| PostError { accepted: 0, error };
        let (c, _) = self.objects.srq(srq).map_err(none)?;
        let post = self.context.ops().post_srq_recv;
        let post = post.ok_or(none(VerbsError::Unsupported("ibv_post_srq_recv")))?;
        // SAFETY: living objects; a chain of work requests that ends with a null pointer.
        let post = |first, bad| unsafe { post(c, first, bad) };
        posting::receives(wrs, post, |errno| refused("ibv_post_srq_recv", errno))
    }

    fn poll_event(&mut self) -> Option<AsyncEvent> {
        let functions = self.context.functions;
        for _ in 0..EVENT_BATCH {
            // SAFETY: numbers and pointers, for which zero is a value.
            let mut event: ibv_async_event = unsafe { std::mem::zeroed() };
            // SAFETY: living objects; the context's descriptor does not wait.
            if unsafe { (functions.get_async_event)(self.context.handle, &raw mut event) } != 0 {
                return None;
            }
            let told = self.objects.describe(&event);
            // SAFETY: an event that was just taken.
            unsafe { (functions.ack_async_event)(&raw mut event) };
            if event.event_type == IBV_EVENT_DEVICE_FATAL {
                self.reports.gone(&self.context.name);
            }
            match told {
                Ok(None) => {}
                Ok(told) => return told,
                Err(UnknownObject) => {
                    const WHAT: &str = "for an unknown object the event";
                    self.reports.unknown.events += 1;
                    self.reports.unknown(&self.context.name, WHAT, event.event_type);
                }
            }
        }
        None
    }
}

impl Drop for LoadedDevice {
    fn drop(&mut self) {
        self.objects.destroy_all(&self.context);
    }
}

#[cfg(test)]
mod tests;
