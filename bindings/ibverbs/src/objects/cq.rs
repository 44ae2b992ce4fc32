//! Completion queues.

use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::{PTHREAD_MUTEX_INITIALIZER, pthread_mutex_t};
use roce::verbs::{Completion, CqId, WcOpcode, WcStatus};
use rustix::io::Errno;

use super::ack::Acks;
use super::events::{Subject, count};
use super::{CompChannel, Context, Mark, Object, object};
use crate::abi::*;
use crate::engine::limits::ENDPOINT;
use crate::engine::{Core, Engine, Listener, Notice};
use crate::process::counter::Signal;
use crate::process::errors::{Outcome, errno_of};

/// A completion queue. All have the extended interface; plain ones have the same first fields.
#[repr(C)]
pub(crate) struct Cq {
    pub(super) c: UnsafeCell<ibv_cq_ex>,
    mark: Mark,
    owner: *mut ibv_context,
    engine: Arc<Engine>,
    pub(super) id: CqId,
    pub(super) channel: Option<&'static CompChannel>,
    /// It was armed, and has neither made an event nor been polled in vain since: who does that is
    /// about to sleep.
    armed: AtomicBool,
    pub(super) comp_acks: Acks,
    pub(super) async_acks: Acks,
    pub(crate) cursor: Cursor,
}

object!(Cq, ibv_cq_ex);

/// The completion that a program reads field by field. It is locked from a successful start to the
/// end of polling, unless the program declared the queue single-threaded.
pub(crate) struct Cursor {
    lock: UnsafeCell<pthread_mutex_t>,
    locked: bool,
    wc: UnsafeCell<ibv_wc>,
}

impl Cursor {
    fn new(single_threaded: bool) -> Cursor {
        // SAFETY: all-zero bytes are a valid completion: numbers only.
        let wc = unsafe { std::mem::zeroed() };
        let lock = UnsafeCell::new(PTHREAD_MUTEX_INITIALIZER);
        Cursor { lock, locked: !single_threaded, wc: UnsafeCell::new(wc) }
    }

    pub(crate) fn acquire(&self) {
        if self.locked {
            // SAFETY: the mutex is initialised and never moves: its queue lies in an arena.
            unsafe { libc::pthread_mutex_lock(self.lock.get()) };
        }
    }

    pub(crate) fn release(&self) {
        if self.locked {
            // SAFETY: as above; the calling thread acquired it.
            unsafe { libc::pthread_mutex_unlock(self.lock.get()) };
        }
    }

    /// The completion being read.
    ///
    /// # Safety
    /// The calling thread has acquired the cursor, or the program has declared it single-threaded.
    pub(crate) unsafe fn wc(&self) -> ibv_wc {
        // SAFETY: as the caller promises.
        unsafe { *self.wc.get() }
    }
}

impl Cq {
    /// `channel` is the one in `attr`; `c` is the structure for programs, without the queue's
    /// number.
    pub(crate) fn create(
        context: &'static Context,
        channel: Option<&'static CompChannel>,
        attr: &ibv_cq_init_attr_ex,
        single_threaded: bool,
        mut c: ibv_cq_ex,
    ) -> Outcome<&'static Cq> {
        let valid = (1..=ENDPOINT.max_cqe).contains(&attr.cqe) && attr.comp_vector == 0;
        let foreign = channel.is_some_and(|channel| channel.owner() != context.handle());
        if !valid || foreign {
            return Err(Errno::INVAL);
        }
        let engine = Arc::clone(&context.engine);
        let id = engine.lock().endpoint_mut().create_cq(attr.cqe).map_err(errno_of)?;
        c.handle = id.0;
        let owner = context.handle();
        let cq = Cq::arena().insert(Cq {
            c: UnsafeCell::new(c),
            mark: Mark::default(),
            owner,
            engine,
            id,
            channel,
            armed: AtomicBool::new(false),
            comp_acks: Acks::default(),
            async_acks: Acks::default(),
            cursor: Cursor::new(single_threaded),
        });
        cq.engine.lock().listen_cq(id, cq);
        Ok(cq)
    }

    /// Destroys it with its context, whose queue pairs are gone.
    pub(super) fn end(&'static self) {
        if Cq::arena().retire(self) {
            self.leave(&mut self.engine.lock()).unwrap_or(());
        }
    }

    fn leave(&self, core: &mut Core) -> Outcome<()> {
        core.endpoint_mut().destroy_cq(self.id).map_err(errno_of)?;
        core.leave_cq(self.id);
        Ok(())
    }

    pub(crate) fn destroy(&'static self) -> Outcome<()> {
        self.leave(&mut self.engine.lock())?;
        if let Some(channel) = self.channel {
            channel.events.remove(|queued| std::ptr::eq(*queued, self));
        }
        self.comp_acks.wait();
        Subject::Cq(self).forget();
        Cq::arena().retire(self);
        Ok(())
    }

    /// Takes up to `room` completions; takes one turn if there is none yet.
    #[inline]
    pub(crate) fn poll(&self, room: usize, mut take: impl FnMut(&Completion)) -> Outcome<usize> {
        let mut core = self.engine.lock();
        let mut taken = self.take(&mut core, room, &mut take);
        let mut idle_at = None;
        if taken == 0 && room > 0 && core.turn_messages() {
            taken = self.take(&mut core, room, &mut take);
        }
        if taken == 0 && room > 0 {
            if !self.armed.load(Ordering::Relaxed) && core.may_skip_turn() {
                return Ok(0);
            }
            let is_idle = self.engine.turn_for(&mut core, Some(self.id)).is_idle();
            idle_at = (is_idle && !core.rests()).then_some(core.now());
            taken = self.take(&mut core, room, &mut take);
        }
        if taken == 0 && core.endpoint().cq_overrun(self.id) == Some(true) {
            return Err(Errno::OVERFLOW);
        }
        drop(core);
        if taken == 0 && room > 0 && self.armed.swap(false, Ordering::Relaxed) {
            // As the manuals have it: armed, polled until it is empty, and only then waited for.
            // Who goes on polling polls.
            self.engine.expect_sleep();
        } else {
            self.engine.polled(idle_at);
        }
        Ok(taken)
    }

    /// Puts the next completion into the cursor and into the C structure; `false` when there is
    /// none.
    ///
    /// # Safety
    /// As [`Cursor::wc`].
    pub(crate) unsafe fn advance(&self) -> Outcome<bool> {
        let taken = self.poll(1, |completion| {
            let wc = wc_of(completion);
            // SAFETY: as the caller promises.
            unsafe {
                self.cursor.wc.get().write(wc);
                (*self.c.get()).status = wc.status;
                (*self.c.get()).wr_id = wc.wr_id;
            }
        })?;
        Ok(taken > 0)
    }

    fn take(&self, core: &mut Core, room: usize, take: &mut impl FnMut(&Completion)) -> usize {
        let next = || core.endpoint_mut().poll_cq(self.id);
        std::iter::from_fn(next).take(room).map(|completion| take(&completion)).count()
    }

    /// # Errors
    /// `EINVAL` for a depth that is not allowed or too small for the entries now in the queue.
    pub(crate) fn resize(&self, cqe: c_int) -> Outcome<()> {
        let depth = u32::try_from(cqe).ok().filter(|cqe| (1..=ENDPOINT.max_cqe).contains(cqe));
        let depth = depth.ok_or(Errno::INVAL)?;
        self.engine.lock().endpoint_mut().resize_cq(self.id, depth).map_err(|_| Errno::INVAL)?;
        // SAFETY: the program must not use the size while it changes it.
        unsafe { (*self.c.get()).cqe = cqe };
        Ok(())
    }

    /// Requests one event, also for completions already in the queue.
    pub(crate) fn arm(&self, solicited_only: bool) -> Outcome<()> {
        let mut core = self.engine.lock();
        self.armed.store(self.channel.is_some(), Ordering::Relaxed);
        core.endpoint_mut().req_notify(self.id, solicited_only).map_err(errno_of)?;
        self.engine.turn(&mut core);
        drop(core);
        self.engine.expect_sleep();
        Ok(())
    }

    /// The program has acknowledged completion events.
    pub(crate) fn acknowledge(&self, events: u32) {
        self.comp_acks.acknowledge(events);
        // SAFETY: the member is aligned and changed here only; programs read it.
        unsafe { count(&raw mut (*self.c.get()).comp_events_completed, events) };
    }
}

impl Listener for Cq {
    fn notify(&'static self, notice: Notice) -> Option<Signal> {
        match notice {
            // An unread event covers this one too: a program that arms repeatedly must not push out
            // events of other queues.
            Notice::Completed => {
                self.armed.store(false, Ordering::Relaxed);
                let events = &self.channel?.events;
                events.push_once(self, |queued| std::ptr::eq(*queued, self))
            }
            Notice::Event(event) => {
                Subject::Cq(self).deliver(event);
                None
            }
        }
    }
}

/// The C form of a completion.
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

/// The service level has no meaning on Ethernet. For a datagram, programs read the packet type
/// there, with the codes of the vendor that introduced it: 1 for RoCEv2 over IPv6, 2 over IPv4. UCX
/// needs only this to find the destination's address in the route header.
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
