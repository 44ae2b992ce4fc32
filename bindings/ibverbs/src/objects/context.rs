//! Open devices.

use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::EventfdFlags;

use super::event_queue::EventQueue;
use super::events::QueuedEvent;
use super::{Ah, CompChannel, Cq, Device, Mark, Mr, Mw, Object, Pd, Qp, Srq, object};
use crate::abi::*;
use crate::engine::Engine;
use crate::process::descriptor::Descriptor;
use crate::process::errors::Failure;

/// Asynchronous events that nobody has read; one more drops the oldest.
const MAX_ASYNC_EVENTS: usize = 4096;

/// An open device, one for each call of `ibv_open_device`.
#[repr(C)]
pub(crate) struct Context {
    verbs: verbs_context,
    mark: Mark,
    owner: *mut ibv_context,
    pub(crate) device: &'static Device,
    pub(crate) engine: Arc<Engine>,
    pub(crate) async_events: EventQueue<QueuedEvent>,
    /// The command descriptor that programs see, until the device is closed. Nothing is ever
    /// written to it.
    command: Mutex<Option<Descriptor>>,
}

object!(Context, ibv_context, verbs.context);

impl Context {
    /// Opens a device. `verbs` is the C structure without its descriptors.
    ///
    /// # Errors
    /// When the interface is gone, or the machine lacks a resource for the device.
    pub(crate) fn open(
        device: &'static Device,
        mut verbs: verbs_context,
    ) -> Result<&'static Context, Failure> {
        let interface = device.find_interface()?;
        let name = interface.device_name();
        let lacking = |what| {
            let name = &name;
            move |errno| {
                Failure::new(errno, format_args!("{name}: no descriptor for its {what}: {errno}"))
            }
        };
        let async_events = EventQueue::new(MAX_ASYNC_EVENTS).map_err(lacking("events"))?;
        let command = Descriptor::event(EventfdFlags::empty()).map_err(lacking("commands"))?;
        let engine = Engine::open(interface)?;
        verbs.context.cmd_fd = command.as_raw_fd();
        verbs.context.async_fd = async_events.fd();
        Ok(Context::arena().insert(Context {
            verbs,
            mark: Mark::default(),
            owner: std::ptr::null_mut(),
            device,
            engine,
            async_events,
            command: Mutex::new(Some(command)),
        }))
    }

    /// Objects left in the context are destroyed with it, as when the kernel closes a device.
    pub(crate) fn close(&'static self) {
        let handle = self.handle();
        Qp::arena().of_context(handle).into_iter().for_each(Qp::end);
        Srq::arena().of_context(handle).into_iter().for_each(Srq::end);
        Cq::arena().of_context(handle).into_iter().for_each(Cq::end);
        Mw::arena().of_context(handle).into_iter().for_each(Mw::end);
        Mr::arena().of_context(handle).into_iter().for_each(Mr::end);
        Ah::arena().of_context(handle).into_iter().for_each(Ah::destroy);
        Pd::arena().of_context(handle).into_iter().for_each(Pd::end);
        CompChannel::arena().of_context(handle).into_iter().for_each(CompChannel::end);
        if Context::arena().retire(self) {
            self.async_events.close();
            drop(self.command.lock().unwrap_or_else(PoisonError::into_inner).take());
            self.engine.release();
        }
    }
}
