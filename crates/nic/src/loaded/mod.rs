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

mod events;
mod library;
mod translate;

use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::{c_int, c_void};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr;

use arrayvec::ArrayVec;
use roce::Time;
use roce::congestion::CongestionControl;
use roce::device::{Device, PostError};
use roce::endpoint::{AsyncEvent, AttrMask, QpAttr, QpConfig, QpState, Reliability, SrqConfig};
use roce::verbs::{
    Access, AddressHandle, Completion, CqId, MAX_SGE, MemoryRegion, PdId, Qpn, RecvWr, SendOp,
    SendWr, ShortList, SrqId, Transport, VerbsError, WindowId,
};
use roce::wire::ROCE_PORT;
use roce::world::Path;

use crate::abi::*;
pub use library::{DEFAULT_LIBRARY, Library, LoadError};
pub use translate::OTHER_PORT;
use translate::{Gid, PORT, last_refused, refused};

/// Entries looked at in the port's table of addresses.
const MAX_GIDS: u32 = 256;

/// Work requests handed to the library in one call.
const POST_BATCH: usize = 16;

/// Completions taken from the library in one call.
const POLL_BATCH: usize = 16;

/// Notifications and events taken from the library in one call. A library may report without end,
/// and the descriptors stay readable until all are taken.
const EVENT_BATCH: usize = 16;

/// Completions of no queue pair that one call of `poll_cq` drops. A library may return them without
/// end.
const MOST_STRAYS: usize = 4096;

/// Destroyed queue pairs remembered. Some drivers leave their completions in the queue.
const MAX_DESTROYED: usize = 1024;

/// Value of `abi_compat` in libraries with extended calls.
const EXTENDED: *mut c_void = ptr::without_provenance_mut(usize::MAX);

/// Objects by their numbers.
#[derive(Debug)]
struct Table<T> {
    objects: HashMap<u32, T>,
    next: u32,
}

impl<T> Table<T> {
    fn new() -> Table<T> {
        Table { objects: HashMap::new(), next: 1 }
    }

    /// The number of the next object. Numbers are never reused: 2^32 objects are more than a
    /// process makes.
    fn add(&mut self, object: T) -> u32 {
        let id = self.next;
        self.next = self.next.wrapping_add(1).max(1);
        self.objects.insert(id, object);
        id
    }

    fn get(&self, id: u32) -> Option<&T> {
        self.objects.get(&id)
    }
}

#[derive(Debug)]
struct QueuePair {
    c: *mut ibv_qp,
    transport: Transport,
    limits: [u32; 2],
}

#[derive(Debug)]
struct Region {
    c: *mut ibv_mr,
    region: MemoryRegion,
}

/// What an operator should know about a device; each is reported once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// It serves less well than it should.
    Degraded(String),
    /// It can no longer be used: nothing posted to it completes.
    Gone(String),
}

/// What the library has reported of objects that the device does not have. None of it is passed on.
#[derive(Debug, Default)]
struct Strays {
    /// Completions of queue pairs that were destroyed, which a driver may leave in the queue.
    late_completions: u64,
    /// Completions of queue pairs that never existed.
    completions: u64,
    /// Notifications of completion queues.
    notifications: u64,
    /// Events of queue pairs, completion queues and shared receive queues.
    events: u64,
}

/// An event is about no object of the device.
struct UnknownObject;

/// An open device of a verbs library.
#[derive(Debug)]
pub struct LoadedDevice {
    name: String,
    library: Library,
    context: *mut ibv_context,
    /// All completion queues report to this channel.
    channel: *mut ibv_comp_channel,
    gids: Vec<Gid>,
    max_sge: u32,
    /// Payload bytes.
    largest_mtu: u32,
    pds: Table<*mut ibv_pd>,
    cqs: Table<*mut ibv_cq>,
    srqs: Table<(*mut ibv_srq, PdId)>,
    windows: Table<*mut ibv_mw>,
    handles: Table<*mut ibv_ah>,
    qps: HashMap<u32, QueuePair>,
    /// The numbers of queue pairs destroyed last.
    destroyed: VecDeque<u32>,
    strays: Strays,
    notifications: u64,
    /// By local key.
    regions: HashMap<u32, Region>,
    notified: VecDeque<CqId>,
    /// Queues that were armed for a sleep and have not been notified since.
    armed: HashSet<CqId>,
    /// Whether some completion queue could not be armed at the last try.
    is_unarmed: bool,
    /// Not yet reported; bounded by the calls in `reported`.
    troubles: VecDeque<Trouble>,
    /// The calls whose trouble was reported.
    reported: Vec<&'static str>,
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
        let functions = library.functions;
        // SAFETY: the context is open.
        let channel = unsafe { (functions.create_comp_channel)(context) };
        // From here on, dropping closes what was opened.
        let mut device = LoadedDevice {
            name: name.into(),
            library: *library,
            context,
            channel,
            gids: Vec::new(),
            max_sge: 0,
            largest_mtu: 0,
            pds: Table::new(),
            cqs: Table::new(),
            srqs: Table::new(),
            windows: Table::new(),
            handles: Table::new(),
            qps: HashMap::new(),
            destroyed: VecDeque::new(),
            strays: Strays::default(),
            notifications: 0,
            regions: HashMap::new(),
            notified: VecDeque::new(),
            armed: HashSet::new(),
            is_unarmed: false,
            troubles: VecDeque::new(),
            reported: Vec::new(),
        };
        if channel.is_null() {
            return Err(LoadError::last("ibv_create_comp_channel"));
        }
        device.check_operations()?;
        device.raw_fds().into_iter().try_for_each(never_wait)?;
        let port = device.port()?;
        device.gids = device.find_gids(&port)?;
        device.largest_mtu = translate::mtu_of(port.active_mtu).bytes();
        device.max_sge = device.find_max_sge()?;
        Ok(device)
    }

    /// Where peers reach the device: its first address.
    pub fn local(&self) -> SocketAddr {
        SocketAddr::new(self.gids[0].ip, ROCE_PORT)
    }

    /// Its addresses, in the order in which [`Path::source`] counts them.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.gids.iter().map(|gid| gid.ip)
    }

    /// Descriptors that are readable when an armed completion queue has a notification, or when
    /// there is an asynchronous event.
    pub fn fds(&self) -> [BorrowedFd<'_>; 2] {
        // SAFETY: the descriptors stay open as long as the device, which is borrowed.
        self.raw_fds().map(|fd| unsafe { BorrowedFd::borrow_raw(fd) })
    }

    fn raw_fds(&self) -> [RawFd; 2] {
        // SAFETY: both structures live until they are closed, which is when the device is dropped.
        unsafe { [(*self.channel).fd, (*self.context).async_fd] }
    }

    fn find_max_sge(&self) -> Result<u32, LoadError> {
        // SAFETY: numbers only, for which zero is a value.
        let mut attr: ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open, and the function fills the structure.
        match unsafe { (self.library.functions.query_device)(self.context, &raw mut attr) } {
            0 => Ok(u32::try_from(attr.max_sge).unwrap_or(1).clamp(1, MAX_SGE as u32)),
            _ => Err(LoadError::last("ibv_query_device")),
        }
    }

    fn port(&self) -> Result<ibv_port_attr, LoadError> {
        // SAFETY: numbers only, for which zero is a value.
        let mut attr: ibv_port_attr = unsafe { std::mem::zeroed() };
        let result = match self.extended_query_port() {
            // SAFETY: the context is open, and the function fills as much as the length says.
            Some(query) => unsafe {
                query(self.context, PORT, &raw mut attr, size_of::<ibv_port_attr>())
            },
            // SAFETY: as above; the old function fills the front of the structure, and no more.
            None => unsafe {
                (self.library.functions.query_port)(self.context, PORT, &raw mut attr)
            },
        };
        match result {
            0 => Ok(attr),
            _ => Err(LoadError::last("ibv_query_port")),
        }
    }

    /// The extended query of the port, where the library has one.
    fn extended_query_port(&self) -> Option<QueryPort> {
        // SAFETY: the context is open.
        if unsafe { (*self.context).abi_compat } != EXTENDED {
            return None;
        }
        let offset = core::mem::offset_of!(verbs_context, context);
        // SAFETY: a context that says so is the last field of a `verbs_context`, which grows
        // towards lower addresses: its size field lies just in front of the context.
        let outer = unsafe { self.context.byte_sub(offset) }.cast::<verbs_context>();
        // SAFETY: as above; only this field is read, not the structure as a whole.
        let size = unsafe { (&raw const (*outer).sz).read() };
        if size < size_of::<verbs_context>() {
            return None;
        }
        // SAFETY: the structure is as large as ours, so it has this field.
        unsafe { (&raw const (*outer).query_port).read() }
    }

    /// The addresses that RoCEv2 packets can be sent from, IPv4 first, link-local ones last.
    fn find_gids(&self, port: &ibv_port_attr) -> Result<Vec<Gid>, LoadError> {
        let mut gids = Vec::new();
        let entries = u32::try_from(port.gid_tbl_len).unwrap_or(0).min(MAX_GIDS);
        for index in 0..entries {
            // SAFETY: numbers only, for which zero is a value.
            let mut entry: ibv_gid_entry = unsafe { std::mem::zeroed() };
            let size = size_of::<ibv_gid_entry>();
            // SAFETY: the context is open, and the function fills as much as the size says.
            let result = unsafe {
                let (query, port) = (self.library.functions.query_gid_ex, u32::from(PORT));
                query(self.context, port, index, &raw mut entry, 0, size)
            };
            // Entries that are empty cannot be queried.
            if result == 0 && entry.gid_type == IBV_GID_TYPE_ROCE_V2 {
                gids.push(Gid { ip: translate::ip_of(entry.gid), index: index as u8 });
            }
        }
        gids.sort_by_key(|gid| match gid.ip {
            IpAddr::V4(_) => 0,
            IpAddr::V6(ip) if ip.is_unicast_link_local() => 2,
            IpAddr::V6(_) => 1,
        });
        if gids.is_empty() { Err(LoadError::NoAddress(self.name.clone())) } else { Ok(gids) }
    }

    fn pd(&self, pd: PdId) -> Result<*mut ibv_pd, VerbsError> {
        self.pds.get(pd.0).copied().ok_or(VerbsError::NoPd(pd.0))
    }

    fn cq(&self, cq: CqId) -> Result<*mut ibv_cq, VerbsError> {
        self.cqs.get(cq.0).copied().ok_or(VerbsError::NoCq(cq.0))
    }

    fn srq(&self, srq: SrqId) -> Result<(*mut ibv_srq, PdId), VerbsError> {
        self.srqs.get(srq.0).copied().ok_or(VerbsError::NoSrq(srq.0))
    }

    fn qp(&self, qpn: Qpn) -> Result<&QueuePair, VerbsError> {
        self.qps.get(&qpn.get()).ok_or(VerbsError::NoQp(qpn.get()))
    }

    fn queues(&self) -> impl Iterator<Item = CqId> {
        self.cqs.objects.keys().map(|&id| CqId(id))
    }

    fn ops(&self) -> &ibv_context_ops {
        // SAFETY: the context is open as long as the device is not dropped; the table does not
        // change.
        unsafe { &(*self.context).ops }
    }

    /// Refuses a device on which engines would wait for ever. Operations of shared receive queues
    /// and windows may be missing.
    fn check_operations(&self) -> Result<(), LoadError> {
        let ops = self.ops();
        let needed = [
            ("poll_cq", ops.poll_cq.is_some()),
            ("req_notify_cq", ops.req_notify_cq.is_some()),
            ("post_send", ops.post_send.is_some()),
            ("post_recv", ops.post_recv.is_some()),
        ];
        match needed.into_iter().find(|(_, is_there)| !is_there) {
            Some((operation, _)) => {
                Err(LoadError::Operation { device: self.name.clone(), operation })
            }
            None => Ok(()),
        }
    }

    /// Notes what is wrong, the first time that this call fails or this kind of thing is reported.
    fn note_degraded(&mut self, what: &'static str, why: impl fmt::Display) {
        if !self.reported.contains(&what) {
            self.reported.push(what);
            self.troubles.push_back(Trouble::Degraded(format!("device {}: {why}", self.name)));
        }
    }

    /// Notes a report about an object that the device does not have.
    fn note_stray(&mut self, what: &'static str, number: u32) {
        let hint = "it is ignored, and the library may be defective";
        self.note_degraded(what, format_args!("the library reports {what} {number:#x}: {hint}"));
    }

    /// Counts a completion of a queue pair that does not exist.
    fn count_stray(&mut self, qp_num: u32) {
        if self.destroyed.contains(&qp_num) {
            self.strays.late_completions += 1;
        } else {
            self.strays.completions += 1;
            self.note_stray("a completion of the unknown queue pair", qp_num);
        }
    }

    /// Notes that the device cannot be used any more.
    fn note_gone(&mut self) {
        const EVENT: &str = "IBV_EVENT_DEVICE_FATAL";
        if !self.reported.contains(&EVENT) {
            self.reported.push(EVENT);
            let why = format!("device {} has failed: its library reports {EVENT}", self.name);
            self.troubles.push_back(Trouble::Gone(why));
        }
    }

    /// An event as the device trait reports it, if it is about an object. The event's pointers are
    /// compared with ours, not followed.
    fn describe(&self, event: &ibv_async_event) -> Result<Option<AsyncEvent>, UnknownObject> {
        // SAFETY: whatever the event is about, the union holds the bytes of a pointer.
        let (qp, cq, srq) = unsafe { (event.element.qp, event.element.cq, event.element.srq) };
        let about_qp = |make: fn(Qpn) -> AsyncEvent| {
            let found = self.qps.iter().find(|(_, known)| known.c == qp);
            found.map(|(number, _)| make(Qpn::new(*number)))
        };
        let told = match event.event_type {
            IBV_EVENT_QP_FATAL => about_qp(AsyncEvent::QpFatal),
            IBV_EVENT_QP_REQ_ERR => about_qp(AsyncEvent::QpRequestError),
            IBV_EVENT_QP_ACCESS_ERR => about_qp(AsyncEvent::QpAccessError),
            IBV_EVENT_COMM_EST => about_qp(AsyncEvent::CommunicationEstablished),
            IBV_EVENT_SQ_DRAINED => about_qp(AsyncEvent::SendQueueDrained),
            IBV_EVENT_QP_LAST_WQE_REACHED => about_qp(AsyncEvent::LastWqeReached),
            IBV_EVENT_SRQ_LIMIT_REACHED => {
                let found = self.srqs.objects.iter().find(|(_, (known, _))| *known == srq);
                found.map(|(id, _)| AsyncEvent::SrqLimitReached(SrqId(*id)))
            }
            IBV_EVENT_CQ_ERR => {
                let found = self.cqs.objects.iter().find(|(_, known)| **known == cq);
                found.map(|(id, _)| AsyncEvent::CqError(CqId(*id)))
            }
            // Those of ports and of the device have no counterpart here.
            _ => return Ok(None),
        };
        told.map(Some).ok_or(UnknownObject)
    }

    /// A send work request in C's terms, but for its list of memory and its successor.
    fn send_wr(&self, wr: &SendWr, transport: Transport) -> Result<ibv_send_wr, VerbsError> {
        // SAFETY: numbers and pointers, for which zero is a value.
        let mut out: ibv_send_wr = unsafe { std::mem::zeroed() };
        let (opcode, imm_data, args) = translate::operation(wr.op);
        (out.wr_id, out.opcode, out.imm_data) = (wr.wr_id, opcode, imm_data);
        out.send_flags = translate::send_flags(wr);
        if let Some(args) = args {
            out.wr = args;
        }
        if let Some(to) = wr.to.filter(|_| transport == Transport::Ud) {
            let missing = VerbsError::NoAddressHandle(to.ah.id);
            let ah = self.handles.get(to.ah.id).copied().ok_or(missing)?;
            let (remote_qpn, remote_qkey) = (to.dest_qp.get(), to.qkey);
            out.wr = ibv_send_wr_args { ud: wr_ud { ah, remote_qpn, remote_qkey } };
        }
        if let SendOp::BindWindow(binding) = wr.op {
            let window = binding.window.0;
            let mw = self.windows.get(window).copied().ok_or(VerbsError::NoWindow(window))?;
            // An unbind has no region.
            let mr = self.regions.get(&binding.lkey).map_or(ptr::null_mut(), |region| region.c);
            let zero_based = if binding.zero_based { IBV_ACCESS_ZERO_BASED } else { 0 };
            let mw_access_flags = translate::access_flags(binding.access) | zero_based;
            let (addr, length) = (binding.addr, binding.len);
            let bind_info = ibv_mw_bind_info { mr, addr, length, mw_access_flags };
            out.bind_mw = ibv_send_wr_bind { mw, rkey: binding.rkey, bind_info };
        }
        Ok(out)
    }

    /// Passes a chain of receives to `post`, which returns the library's result and the rejected
    /// request.
    fn post_receives(
        wrs: &[RecvWr],
        mut post: impl FnMut(*mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int,
    ) -> Result<(), (usize, c_int)> {
        for (batch, wrs) in wrs.chunks(POST_BATCH).enumerate() {
            let mut lists: ArrayVec<_, POST_BATCH> = wrs.iter().map(|wr| list(&wr.sges)).collect();
            let mut chain: ArrayVec<ibv_recv_wr, POST_BATCH> = wrs
                .iter()
                .zip(&mut lists)
                .map(|(wr, list)| ibv_recv_wr {
                    wr_id: wr.wr_id,
                    next: ptr::null_mut(),
                    sg_list: list.as_mut_ptr(),
                    num_sge: list.len() as c_int,
                })
                .collect();
            let first = chain.as_mut_ptr();
            for index in 1..chain.len() {
                // One pointer for all, so that the library may follow it from request to request.
                chain[index - 1].next = first.wrapping_add(index);
            }
            let mut bad = ptr::null_mut();
            match post(first, &raw mut bad) {
                0 => {}
                errno => return Err((batch * POST_BATCH + accepted(&chain, bad), errno)),
            }
        }
        Ok(())
    }

    /// The error of a rejected post.
    fn post_refused(&self, qpn: Qpn, queue: usize, errno: c_int) -> VerbsError {
        let (call, names) = (["ibv_post_send", "ibv_post_recv"][queue], ["send", "receive"]);
        match (errno, self.qp(qpn)) {
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

type QueryPort = unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, usize) -> c_int;

/// The place of the rejected work request in its chain. A library that rejects none of the chain
/// has not said how many it accepted: none are assumed.
fn accepted<T>(chain: &[T], rejected: *mut T) -> usize {
    chain.iter().position(|wr| ptr::eq(wr, rejected)).unwrap_or(0)
}

/// A list of memory in C's terms.
fn list(sges: &[roce::verbs::Sge]) -> ShortList<ibv_sge> {
    let pieces = sges.iter();
    pieces.map(|sge| ibv_sge { addr: sge.addr, length: sge.len, lkey: sge.lkey }).collect()
}

/// Makes reads of a descriptor nonblocking.
fn never_wait(fd: RawFd) -> Result<(), LoadError> {
    // SAFETY: the descriptor is open; the flags of nothing else change.
    let set = unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK)
    };
    if set == 0 { Ok(()) } else { Err(LoadError::last("fcntl")) }
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
        let pd = unsafe { (self.library.functions.alloc_pd)(self.context) };
        Ok(PdId(self.pds.add(made("ibv_alloc_pd", pd)?)))
    }

    fn dealloc_pd(&mut self, pd: PdId) -> Result<(), VerbsError> {
        let c = self.pd(pd)?;
        // SAFETY: living objects.
        let result = unsafe { (self.library.functions.dealloc_pd)(c) };
        busy(done("ibv_dealloc_pd", result), VerbsError::PdInUse(pd.0))?;
        self.pds.objects.remove(&pd.0);
        Ok(())
    }

    fn create_cq(&mut self, depth: u32) -> Result<CqId, VerbsError> {
        let id = self.cqs.next;
        let name = ptr::without_provenance_mut(id as usize);
        // SAFETY: living objects.
        let cq = unsafe {
            let create = self.library.functions.create_cq;
            create(self.context, depth as c_int, name, self.channel, 0)
        };
        Ok(CqId(self.cqs.add(made("ibv_create_cq", cq)?)))
    }

    fn resize_cq(&mut self, cq: CqId, depth: u32) -> Result<(), VerbsError> {
        let c = self.cq(cq)?;
        // SAFETY: living objects.
        done("ibv_resize_cq", unsafe { (self.library.functions.resize_cq)(c, depth as c_int) })
    }

    fn destroy_cq(&mut self, cq: CqId) -> Result<(), VerbsError> {
        let c = self.cq(cq)?;
        // SAFETY: living objects; every event was acknowledged when it was taken, so this does not
        // wait.
        let result = unsafe { (self.library.functions.destroy_cq)(c) };
        busy(done("ibv_destroy_cq", result), VerbsError::CqInUse(cq.0))?;
        self.cqs.objects.remove(&cq.0);
        self.notified.retain(|&other| other != cq);
        self.armed.remove(&cq);
        Ok(())
    }

    fn poll_cq<const N: usize>(
        &mut self,
        cq: CqId,
        into: &mut ArrayVec<Completion, N>,
    ) -> Result<(), VerbsError> {
        let c = self.cq(cq)?;
        let poll = self.ops().poll_cq.ok_or(VerbsError::Unsupported("ibv_poll_cq"))?;
        let mut strays = 0;
        while !into.is_full() && strays < MOST_STRAYS {
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
            let count = polled.inspect_err(|error| self.note_degraded("ibv_poll_cq", error))?;
            for wc in &batch[..count] {
                if let Some(qp) = self.qps.get(&wc.qp_num) {
                    into.push(translate::completion(wc, qp.transport));
                } else {
                    self.count_stray(wc.qp_num);
                    strays += 1;
                }
            }
            if count < wanted {
                break;
            }
        }
        Ok(())
    }

    fn req_notify(&mut self, cq: CqId, solicited_only: bool) -> Result<(), VerbsError> {
        let c = self.cq(cq)?;
        let arm = self.ops().req_notify_cq.ok_or(VerbsError::Unsupported("ibv_req_notify_cq"))?;
        // SAFETY: living objects.
        done("ibv_req_notify_cq", unsafe { arm(c, c_int::from(solicited_only)) })
    }

    fn poll_notified(&mut self) -> Option<CqId> {
        for _ in 0..EVENT_BATCH {
            let (mut cq, mut name) = (ptr::null_mut(), ptr::null_mut());
            let functions = &self.library.functions;
            // SAFETY: living objects; the channel's descriptor does not wait.
            let result =
                unsafe { (functions.get_cq_event)(self.channel, &raw mut cq, &raw mut name) };
            if result != 0 {
                break;
            }
            // SAFETY: the queue of an event that was not acknowledged yet, so it is not destroyed.
            unsafe { (functions.ack_cq_events)(cq, 1) };
            let cq = CqId(name.addr() as u32);
            if self.cqs.get(cq.0).is_none() {
                self.strays.notifications += 1;
                self.note_stray("a notification of the unknown completion queue", cq.0);
            } else if !self.notified.contains(&cq) {
                self.notified.push_back(cq);
            }
        }
        self.notified.pop_front()
    }

    fn create_qp(&mut self, config: QpConfig) -> Result<Qpn, VerbsError> {
        let QpConfig { transport, pd, send_cq, recv_cq, max_send_wr, max_recv_wr, srq } = config;
        let own_receives = if srq.is_some() { 0 } else { max_recv_wr };
        let mut init = ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: self.cq(send_cq)?,
            recv_cq: self.cq(recv_cq)?,
            srq: srq.map_or(Ok(ptr::null_mut()), |srq| self.srq(srq).map(|(c, _)| c))?,
            cap: ibv_qp_cap {
                max_send_wr,
                max_recv_wr: own_receives,
                max_send_sge: self.max_sge,
                max_recv_sge: if srq.is_some() { 0 } else { self.max_sge },
                max_inline_data: 0,
            },
            qp_type: translate::qp_type(transport),
            sq_sig_all: 0,
        };
        // SAFETY: living objects.
        let qp = unsafe { (self.library.functions.create_qp)(self.pd(pd)?, &raw mut init) };
        let c = made("ibv_create_qp", qp)?;
        // SAFETY: the queue pair was just made.
        let number = unsafe { (*c).qp_num };
        let limits = [init.cap.max_send_wr, init.cap.max_recv_wr];
        self.qps.insert(number, QueuePair { c, transport, limits });
        self.destroyed.retain(|&destroyed| destroyed != number);
        Ok(Qpn::new(number))
    }

    fn modify_qp(&mut self, _now: Time, qpn: Qpn, attr: &QpAttr) -> Result<(), VerbsError> {
        if attr.mask.contains(AttrMask::STATE) && attr.state == QpState::Rtr {
            // The device does loss recovery and congestion control in its own way.
            if attr.reliability != Reliability::GoBackN {
                return Err(VerbsError::Unsupported("selective repeat"));
            }
            if attr.congestion != CongestionControl::Off {
                return Err(VerbsError::Unsupported("congestion control of our own"));
            }
        }
        let c = self.qp(qpn)?.c;
        let mut values = translate::attributes(&self.gids, attr)?;
        let mask = attr.mask.bits() as c_int;
        // SAFETY: living objects.
        let result = unsafe { (self.library.functions.modify_qp)(c, &raw mut values, mask) };
        done("ibv_modify_qp", result)
    }

    fn query_qp(&mut self, qpn: Qpn) -> Result<QpAttr, VerbsError> {
        let c = self.qp(qpn)?.c;
        // SAFETY: numbers and pointers, for which zero is a value.
        let (mut attr, mut init) =
            unsafe { (std::mem::zeroed::<ibv_qp_attr>(), std::mem::zeroed::<ibv_qp_init_attr>()) };
        let mask = (AttrMask::FIELDS - AttrMask::RATE_LIMIT).bits() as c_int;
        let query = self.library.functions.query_qp;
        // SAFETY: living objects.
        done("ibv_query_qp", unsafe { query(c, &raw mut attr, mask, &raw mut init) })?;
        Ok(translate::attributes_of(&self.gids, &attr))
    }

    fn transport(&self, qpn: Qpn) -> Result<Transport, VerbsError> {
        self.qp(qpn).map(|qp| qp.transport)
    }

    fn destroy_qp(&mut self, _now: Time, qpn: Qpn) -> Result<(), VerbsError> {
        let c = self.qp(qpn)?.c;
        // SAFETY: living objects; every event was acknowledged when it was taken, so this does not
        // wait.
        done("ibv_destroy_qp", unsafe { (self.library.functions.destroy_qp)(c) })?;
        self.qps.remove(&qpn.get());
        if self.destroyed.len() == MAX_DESTROYED {
            self.destroyed.pop_front();
        }
        self.destroyed.push_back(qpn.get());
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
        let (pd, start) = (self.pd(pd)?, ptr::with_exposed_provenance_mut(start));
        // SAFETY: living objects. The library touches the memory only as work requests say, which
        // name it by the keys of the region.
        let mr = unsafe { (self.library.functions.reg_mr)(pd, start, bytes, flags) };
        if mr.is_null() {
            return Err(match last_refused("ibv_reg_mr") {
                VerbsError::Device { errno: libc::EINVAL, .. } => bad("the device refused it"),
                error => error,
            });
        }
        // SAFETY: the region was just made.
        let (lkey, rkey) = unsafe { ((*mr).lkey, (*mr).rkey) };
        let region = MemoryRegion { addr, len, lkey, rkey };
        self.regions.insert(lkey, Region { c: mr, region });
        Ok(region)
    }

    fn change_region(
        &mut self,
        region: &MemoryRegion,
        pd: PdId,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        let missing = VerbsError::NoRegion(region.lkey);
        let c = self.regions.get(&region.lkey).map(|region| region.c).ok_or(missing)?;
        let what = (IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS) as c_int;
        let (pd, flags) = (self.pd(pd)?, translate::access_flags(access) as c_int);
        let rereg = self.library.functions.rereg_mr;
        // SAFETY: living objects; the place of the region does not change.
        let result = unsafe { rereg(c, what, pd, ptr::null_mut(), 0, flags) };
        let in_use = VerbsError::RegionInUse(region.lkey);
        // On failure it returns which change failed; the error is in errno.
        let result = if result == 0 { Ok(()) } else { Err(last_refused("ibv_rereg_mr")) };
        busy(result, in_use)?;
        // SAFETY: the region still exists.
        let (lkey, rkey) = unsafe { ((*c).lkey, (*c).rkey) };
        let changed = MemoryRegion { lkey, rkey, ..*region };
        self.regions.remove(&region.lkey);
        self.regions.insert(lkey, Region { c, region: changed });
        Ok(changed)
    }

    fn deregister(&mut self, lkey: u32) -> Result<(), VerbsError> {
        let found = self.regions.get(&lkey).ok_or(VerbsError::NoRegion(lkey))?;
        let (c, rkey) = (found.c, found.region.rkey);
        // SAFETY: living objects.
        let result = unsafe { (self.library.functions.dereg_mr)(c) };
        busy(done("ibv_dereg_mr", result), VerbsError::RegionInUse(rkey))?;
        self.regions.remove(&lkey);
        Ok(())
    }

    fn alloc_window(&mut self, pd: PdId, type_2: bool) -> Result<(WindowId, u32), VerbsError> {
        let alloc = self.ops().alloc_mw.ok_or(VerbsError::Unsupported("ibv_alloc_mw"))?;
        let kind = if type_2 { IBV_MW_TYPE_2 } else { IBV_MW_TYPE_1 };
        // SAFETY: living objects.
        let mw = made("ibv_alloc_mw", unsafe { alloc(self.pd(pd)?, kind) })?;
        // SAFETY: the window was just made.
        let rkey = unsafe { (*mw).rkey };
        Ok((WindowId(self.windows.add(mw)), rkey))
    }

    fn dealloc_window(&mut self, window: WindowId) -> Result<(), VerbsError> {
        let dealloc = self.ops().dealloc_mw.ok_or(VerbsError::Unsupported("ibv_dealloc_mw"))?;
        let mw = self.windows.get(window.0).copied().ok_or(VerbsError::NoWindow(window.0))?;
        // SAFETY: living objects.
        done("ibv_dealloc_mw", unsafe { dealloc(mw) })?;
        self.windows.objects.remove(&window.0);
        Ok(())
    }

    fn create_srq(&mut self, config: SrqConfig) -> Result<SrqId, VerbsError> {
        let SrqConfig { pd, max_wr, limit } = config;
        let name = ptr::without_provenance_mut(self.srqs.next as usize);
        let attr = ibv_srq_attr { max_wr, max_sge: self.max_sge, srq_limit: 0 };
        let mut init = ibv_srq_init_attr { srq_context: name, attr };
        // SAFETY: living objects.
        let srq = unsafe { (self.library.functions.create_srq)(self.pd(pd)?, &raw mut init) };
        let srq = SrqId(self.srqs.add((made("ibv_create_srq", srq)?, pd)));
        if limit > 0
            && let Err(error) = self.set_srq_limit(srq, limit)
        {
            self.destroy_srq(srq)?;
            return Err(error);
        }
        Ok(srq)
    }

    fn set_srq_limit(&mut self, srq: SrqId, limit: u32) -> Result<(), VerbsError> {
        let (c, _) = self.srq(srq)?;
        let mut attr = ibv_srq_attr { max_wr: 0, max_sge: 0, srq_limit: limit };
        let modify = self.library.functions.modify_srq;
        // SAFETY: living objects.
        done("ibv_modify_srq", unsafe { modify(c, &raw mut attr, IBV_SRQ_LIMIT as c_int) })
    }

    fn query_srq(&mut self, srq: SrqId) -> Result<SrqConfig, VerbsError> {
        let (c, pd) = self.srq(srq)?;
        let mut attr = ibv_srq_attr { max_wr: 0, max_sge: 0, srq_limit: 0 };
        // SAFETY: living objects.
        let result = unsafe { (self.library.functions.query_srq)(c, &raw mut attr) };
        done("ibv_query_srq", result)?;
        Ok(SrqConfig { pd, max_wr: attr.max_wr, limit: attr.srq_limit })
    }

    fn destroy_srq(&mut self, srq: SrqId) -> Result<(), VerbsError> {
        let (c, _) = self.srq(srq)?;
        // SAFETY: living objects; every event was acknowledged when it was taken, so this does not
        // wait.
        let result = unsafe { (self.library.functions.destroy_srq)(c) };
        busy(done("ibv_destroy_srq", result), VerbsError::SrqInUse(srq.0))?;
        self.srqs.objects.remove(&srq.0);
        Ok(())
    }

    fn create_ah(&mut self, pd: PdId, path: &Path) -> Result<AddressHandle, VerbsError> {
        let mut attr = translate::address(&self.gids, path)?;
        // SAFETY: living objects.
        let ah = unsafe { (self.library.functions.create_ah)(self.pd(pd)?, &raw mut attr) };
        let id = self.handles.add(made("ibv_create_ah", ah)?);
        Ok(AddressHandle { path: *path, id })
    }

    fn destroy_ah(&mut self, handle: AddressHandle) -> Result<(), VerbsError> {
        let missing = VerbsError::NoAddressHandle(handle.id);
        let ah = self.handles.get(handle.id).copied().ok_or(missing)?;
        // SAFETY: living objects.
        done("ibv_destroy_ah", unsafe { (self.library.functions.destroy_ah)(ah) })?;
        self.handles.objects.remove(&handle.id);
        Ok(())
    }

    fn attach_multicast(&mut self, qpn: Qpn, group: IpAddr) -> Result<(), VerbsError> {
        let (c, gid) = (self.qp(qpn)?.c, translate::gid_of(group));
        // SAFETY: living objects.
        let result = unsafe { (self.library.functions.attach_mcast)(c, &raw const gid, 0) };
        done("ibv_attach_mcast", result)
    }

    fn detach_multicast(&mut self, qpn: Qpn, group: IpAddr) -> Result<(), VerbsError> {
        let (c, gid) = (self.qp(qpn)?.c, translate::gid_of(group));
        // SAFETY: living objects.
        let result = unsafe { (self.library.functions.detach_mcast)(c, &raw const gid, 0) };
        done("ibv_detach_mcast", result)
    }

    fn post_send(&mut self, _now: Time, qpn: Qpn, wrs: &[SendWr]) -> Result<(), PostError> {
        let none = |error| PostError { accepted: 0, error };
        let &QueuePair { c, transport, .. } = self.qp(qpn).map_err(none)?;
        let post = self.ops().post_send.ok_or(none(VerbsError::Unsupported("ibv_post_send")))?;
        for (batch, wrs) in wrs.chunks(POST_BATCH).enumerate() {
            let before = batch * POST_BATCH;
            let mut lists: ArrayVec<_, POST_BATCH> = wrs.iter().map(|wr| list(&wr.sges)).collect();
            let mut chain = ArrayVec::<ibv_send_wr, POST_BATCH>::new();
            let mut unfit = Ok(());
            for (wr, list) in wrs.iter().zip(&mut lists) {
                match self.send_wr(wr, transport) {
                    Ok(c) => {
                        let (sg_list, num_sge) = (list.as_mut_ptr(), list.len() as c_int);
                        chain.push(ibv_send_wr { sg_list, num_sge, ..c });
                    }
                    Err(error) => {
                        unfit = Err(PostError { accepted: before + chain.len(), error });
                        break;
                    }
                }
            }
            let first = chain.as_mut_ptr();
            for index in 1..chain.len() {
                // One pointer for all, so that the library may follow it from request to request.
                chain[index - 1].next = first.wrapping_add(index);
            }
            let mut bad = ptr::null_mut();
            // SAFETY: living objects; a chain of work requests that ends with a null pointer.
            let errno = if chain.is_empty() { 0 } else { unsafe { post(c, first, &raw mut bad) } };
            if errno != 0 {
                let accepted = before + accepted(&chain, bad);
                return Err(PostError { accepted, error: self.post_refused(qpn, 0, errno) });
            }
            unfit?;
        }
        Ok(())
    }

    fn post_recv(&mut self, _now: Time, qpn: Qpn, wrs: &[RecvWr]) -> Result<(), PostError> {
        let none = |error| PostError { accepted: 0, error };
        let c = self.qp(qpn).map_err(none)?.c;
        let post = self.ops().post_recv.ok_or(none(VerbsError::Unsupported("ibv_post_recv")))?;
        // SAFETY: living objects; a chain of work requests that ends with a null pointer.
        let posted = LoadedDevice::post_receives(wrs, |first, bad| unsafe { post(c, first, bad) });
        posted.map_err(|(accepted, errno)| PostError {
            accepted,
            error: self.post_refused(qpn, 1, errno),
        })
    }

    fn post_srq_recv(&mut self, srq: SrqId, wrs: &[RecvWr]) -> Result<(), PostError> {
        let none = |error| PostError { accepted: 0, error };
        let (c, _) = self.srq(srq).map_err(none)?;
        let post = self.ops().post_srq_recv;
        let post = post.ok_or(none(VerbsError::Unsupported("ibv_post_srq_recv")))?;
        // SAFETY: living objects; a chain of work requests that ends with a null pointer.
        let posted = LoadedDevice::post_receives(wrs, |first, bad| unsafe { post(c, first, bad) });
        posted.map_err(|(accepted, errno)| PostError {
            accepted,
            error: refused("ibv_post_srq_recv", errno),
        })
    }

    fn poll_event(&mut self) -> Option<AsyncEvent> {
        let functions = self.library.functions;
        for _ in 0..EVENT_BATCH {
            // SAFETY: numbers and pointers, for which zero is a value.
            let mut event: ibv_async_event = unsafe { std::mem::zeroed() };
            // SAFETY: living objects; the context's descriptor does not wait.
            if unsafe { (functions.get_async_event)(self.context, &raw mut event) } != 0 {
                return None;
            }
            let told = self.describe(&event);
            // SAFETY: an event that was just taken.
            unsafe { (functions.ack_async_event)(&raw mut event) };
            if event.event_type == IBV_EVENT_DEVICE_FATAL {
                self.note_gone();
            }
            match told {
                Ok(None) => {}
                Ok(told) => return told,
                Err(UnknownObject) => {
                    self.strays.events += 1;
                    self.note_stray("for an unknown object the event", event.event_type);
                }
            }
        }
        None
    }
}

impl Drop for LoadedDevice {
    /// Destroys what is left, in the order of the objects' dependencies. What the library refuses
    /// to destroy stays until the process ends.
    fn drop(&mut self) {
        let functions = &self.library.functions;
        // SAFETY: living objects, none of which is used again.
        unsafe {
            for qp in self.qps.values() {
                (functions.destroy_qp)(qp.c);
            }
            for &(srq, _) in self.srqs.objects.values() {
                (functions.destroy_srq)(srq);
            }
            for &ah in self.handles.objects.values() {
                (functions.destroy_ah)(ah);
            }
            for &mw in self.windows.objects.values() {
                self.ops().dealloc_mw.map(|dealloc| dealloc(mw));
            }
            for region in self.regions.values() {
                (functions.dereg_mr)(region.c);
            }
            for &cq in self.cqs.objects.values() {
                (functions.destroy_cq)(cq);
            }
            for &pd in self.pds.objects.values() {
                (functions.dealloc_pd)(pd);
            }
            if !self.channel.is_null() {
                (functions.destroy_comp_channel)(self.channel);
            }
            (functions.close_device)(self.context);
        }
    }
}

#[cfg(test)]
mod tests;
