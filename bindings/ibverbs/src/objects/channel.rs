//! Completion channels, which programs sleep on until something completes.

use rustix::io::Errno;

use super::event_queue::EventQueue;
use super::{Context, Cq, Mark, Object, object};
use crate::abi::*;
use crate::engine::limits;
use crate::process::errors::Outcome;

/// A completion channel.
#[repr(C)]
pub(crate) struct CompChannel {
    c: ibv_comp_channel,
    mark: Mark,
    owner: *mut ibv_context,
    pub(super) events: EventQueue<&'static Cq>,
}

object!(CompChannel, ibv_comp_channel);

impl CompChannel {
    pub(crate) fn create(context: &'static Context) -> Outcome<&'static CompChannel> {
        let owner = context.handle();
        // Each completion queue has one event here at most.
        let events = EventQueue::new(limits::ENDPOINT.max_cqs as usize)?;
        let c = ibv_comp_channel { context: owner, fd: events.fd(), refcnt: 0 };
        Ok(CompChannel::arena().insert(CompChannel { c, mark: Mark::default(), owner, events }))
    }

    /// # Errors
    /// `EBUSY` while a completion queue uses it.
    pub(crate) fn destroy(&'static self) -> Outcome<()> {
        let uses = |cq: &&'static Cq| cq.channel.is_some_and(|used| std::ptr::eq(used, self));
        if Cq::arena().of_context(self.owner).iter().any(uses) {
            return Err(Errno::BUSY);
        }
        self.end();
        Ok(())
    }

    /// Destroys it, with its descriptor.
    pub(super) fn end(&'static self) {
        if CompChannel::arena().retire(self) {
            self.events.close();
        }
    }

    /// The oldest completion event; see [`EventQueue::pop`].
    pub(crate) fn next_event(&self) -> Outcome<&'static Cq> {
        self.events.pop(|cq| cq.comp_acks.read_one())
    }
}
