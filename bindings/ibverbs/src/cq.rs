//! Completion queues.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

use roce::verbs::{Completion, CqId, Verbs, WcOpcode, WcStatus};
use rustix::io::Errno;

use crate::abi::*;
use crate::ack::Acks;
use crate::channel::CompChannel;
use crate::context::Context;
use crate::cq_ex::{self, Cursor};
use crate::engine::{Core, Engine};
use crate::errors::{Outcome, code, errno_of, or_null};
use crate::events::{self, Subject};
use crate::limits::ENDPOINT;
use crate::object::{Mark, Object, living, object, peek};

/// A completion queue. Every one has the extended interface; plain ones begin alike.
#[repr(C)]
pub(crate) struct Cq {
    pub(crate) c: UnsafeCell<ibv_cq_ex>,
    mark: Mark,
    owner: *mut ibv_context,
    pub(crate) engine: Arc<Engine>,
    pub(crate) id: CqId,
    pub(crate) channel: Option<&'static CompChannel>,
    pub(crate) comp_acks: Acks,
    pub(crate) async_acks: Acks,
    pub(crate) cursor: Cursor,
}

object!(Cq, ibv_cq_ex);

/// What a completion queue is made with.
pub(crate) struct Wanted {
    pub(crate) cqe: u32,
    pub(crate) cq_context: *mut c_void,
    pub(crate) channel: *mut ibv_comp_channel,
    pub(crate) comp_vector: u32,
    pub(crate) single_threaded: bool,
}

impl Cq {
    pub(crate) fn create(context: *mut ibv_context, wanted: &Wanted) -> Outcome<&'static Cq> {
        let context = living::<Context>(context)?;
        let valid = (1..=ENDPOINT.max_cqe).contains(&wanted.cqe) && wanted.comp_vector == 0;
        let channel = match wanted.channel.is_null() {
            true => None,
            false => Some(living::<CompChannel>(wanted.channel)?),
        };
        let foreign = channel.is_some_and(|channel| channel.owner() != context.handle());
        if !valid || foreign {
            return Err(Errno::INVAL);
        }
        let engine = Arc::clone(&context.engine);
        let id = engine.lock().endpoint.create_cq(wanted.cqe).map_err(errno_of)?;
        let owner = context.handle();
        let cq = Cq::arena().insert(Cq {
            c: UnsafeCell::new(cq_ex::table(owner, wanted, id)),
            mark: Mark::default(),
            owner,
            engine,
            id,
            channel,
            comp_acks: Acks::default(),
            async_acks: Acks::default(),
            cursor: Cursor::new(wanted.single_threaded),
        });
        cq.engine.lock().cqs.insert(id, cq);
        Ok(cq)
    }

    /// It was armed and got what it was armed for. An event that nobody has read yet stands for this
    /// one too: a program that arms again and again must not push events of other queues out.
    pub(crate) fn notify(&'static self) {
        if let Some(channel) = self.channel {
            channel.events.push_once(self, |queued| std::ptr::eq(*queued, self));
        }
    }

    /// Ends it with its context, whose queue pairs are gone.
    pub(crate) fn end(&'static self) {
        if Cq::arena().retire(self) {
            self.leave(&mut self.engine.lock()).unwrap_or(());
        }
    }

    fn leave(&self, core: &mut Core) -> Outcome<()> {
        core.endpoint.destroy_cq(self.id).map_err(errno_of)?;
        core.cqs.remove(&self.id);
        Ok(())
    }

    fn destroy(&'static self) -> Outcome<()> {
        self.leave(&mut self.engine.lock())?;
        if let Some(channel) = self.channel {
            channel.events.remove(|queued| std::ptr::eq(*queued, self));
        }
        self.comp_acks.wait();
        events::forget(self.owner, Subject::Cq(self));
        Cq::arena().retire(self);
        Ok(())
    }

    /// Up to `room` completions; drains the wire once when there is none yet.
    #[inline]
    pub(crate) fn poll(&self, room: usize, mut take: impl FnMut(&Completion)) -> Outcome<usize> {
        let mut core = self.engine.lock();
        let mut taken = self.take(&mut core, room, &mut take);
        let mut idle = false;
        if taken == 0 && room > 0 {
            idle = self.engine.drain(&mut core).is_idle();
            taken = self.take(&mut core, room, &mut take);
        }
        if taken == 0 && core.endpoint.cq_overrun(self.id) == Some(true) {
            return Err(Errno::OVERFLOW);
        }
        drop(core);
        self.engine.polled(idle);
        Ok(taken)
    }

    fn take(&self, core: &mut Core, room: usize, take: &mut impl FnMut(&Completion)) -> usize {
        let next = || core.endpoint.poll_cq(self.id);
        std::iter::from_fn(next).take(room).map(|completion| take(&completion)).count()
    }
}

/// A completion as C has it.
pub(crate) fn wc_of(completion: &Completion) -> ibv_wc {
    let flag = |set: bool, flag: u32| if set { flag } else { 0 };
    let wc_flags = flag(completion.imm.is_some(), IBV_WC_WITH_IMM)
        | flag(completion.invalidated.is_some(), IBV_WC_WITH_INV)
        | flag(completion.src_qp.is_some(), IBV_WC_GRH);
    let imm = completion.imm.map(u32::to_be);
    ibv_wc {
        wr_id: completion.wr_id,
        status: completion.status as u32,
        opcode: opcode(completion.opcode),
        vendor_err: if completion.status == WcStatus::Success {
            0
        } else {
            completion.status as u32
        },
        byte_len: completion.byte_len,
        imm_data: imm.or(completion.invalidated).unwrap_or(0),
        qp_num: completion.qpn.get(),
        src_qp: completion.src_qp.map_or(0, |qpn| qpn.get()),
        wc_flags,
        pkey_index: 0,
        slid: 0,
        sl: packet_type(completion),
        dlid_path_bits: 0,
    }
}

/// The service level means nothing on Ethernet. What programs read there for a datagram is how its
/// packet came, in the numbers of the vendor whose devices began with it: 1 for RoCEv2 over IPv6, 2
/// over IPv4. UCX finds the destination's address in the route header by this alone.
fn packet_type(completion: &Completion) -> u8 {
    match completion.src_qp {
        None => 0,
        Some(_) if completion.ipv4 => 2,
        Some(_) => 1,
    }
}

fn opcode(opcode: WcOpcode) -> u32 {
    match opcode {
        WcOpcode::Send => IBV_WC_SEND,
        WcOpcode::Write => IBV_WC_RDMA_WRITE,
        WcOpcode::Read => IBV_WC_RDMA_READ,
        WcOpcode::CompareSwap => IBV_WC_COMP_SWAP,
        WcOpcode::FetchAdd => IBV_WC_FETCH_ADD,
        WcOpcode::LocalInvalidate => IBV_WC_LOCAL_INV,
        WcOpcode::BindWindow => IBV_WC_BIND_MW,
        WcOpcode::Recv => IBV_WC_RECV,
        WcOpcode::RecvWriteImm => IBV_WC_RECV_RDMA_WITH_IMM,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> *mut ibv_cq {
    let wanted = Wanted {
        cqe: u32::try_from(cqe).unwrap_or(0),
        cq_context,
        channel,
        comp_vector: u32::try_from(comp_vector).unwrap_or(u32::MAX),
        single_threaded: false,
    };
    or_null(Cq::create(context, &wanted).map(|cq| cq.handle().cast()))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    code(living::<Cq>(cq.cast()).and_then(Cq::destroy))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    code(living::<Cq>(cq.cast()).and_then(|cq| {
        let depth = u32::try_from(cqe).ok().filter(|cqe| (1..=ENDPOINT.max_cqe).contains(cqe));
        let depth = depth.ok_or(Errno::INVAL)?;
        // It does not become smaller than what is in it.
        cq.engine.lock().endpoint.resize_cq(cq.id, depth).map_err(|_| Errno::INVAL)?;
        // SAFETY: the program must not use the size while it changes it.
        unsafe { (*cq.c.get()).cqe = cqe };
        Ok(())
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, nevents: u32) {
    if let Some(cq) = Cq::arena().peek(cq.cast()) {
        cq.comp_acks.acknowledge(nevents);
        // SAFETY: the member is aligned and changed here only; programs read it.
        unsafe { events::count(&raw mut (*cq.c.get()).comp_events_completed, nevents) };
    }
}

pub(crate) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int {
    let polled = peek::<Cq>(cq.cast()).and_then(|cq| {
        let room = usize::try_from(entries).map_err(|_| Errno::INVAL)?;
        if wc.is_null() && room > 0 {
            return Err(Errno::INVAL);
        }
        let mut place = wc;
        cq.poll(room, |completion| {
            // SAFETY: the caller has room for `entries` completions, and no more are taken.
            unsafe {
                place.write(wc_of(completion));
                place = place.add(1);
            }
        })
    });
    match polled {
        Ok(count) => count as c_int,
        Err(error) => -code(Err(error)),
    }
}

pub(crate) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    code(peek::<Cq>(cq.cast()).and_then(|cq| {
        let mut core = cq.engine.lock();
        core.endpoint.req_notify(cq.id, solicited_only != 0).map_err(errno_of)?;
        cq.engine.drain(&mut core);
        drop(core);
        cq.engine.expect_sleep();
        Ok(())
    }))
}
