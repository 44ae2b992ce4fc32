//! The verbs objects: their contents, owners and lifetimes. Devices, contexts, protection domains,
//! regions, windows, queues, queue pairs, address handles, channels and events, each next to its C
//! structure.
//!
//! Objects are in arenas and live as long as the process needs them ([`arena`]); they hold their
//! [`Engine`](crate::engine::Engine), and the engine knows them as listeners by number. Functions
//! with C's calling convention are in the layer above and may not enter, nor may protocol
//! decisions.
//!
//! Order of locks: a region's, an engine's core, then arenas, groups of a queue pair, channels and
//! event queues.

mod ack;
pub(crate) mod ah;
mod arena;
pub(crate) mod batch;
mod channel;
mod context;
pub(crate) mod cq;
pub(crate) mod device;
mod event_queue;
pub(crate) mod events;
pub(crate) mod gid;
mod inline;
pub(crate) mod mr;
mod multicast;
mod mw;
mod pd;
pub(crate) mod qp;
mod qp_attr;
mod query;
mod srq;
pub(crate) mod sysfs;

use std::sync::Once;

use crate::engine;
use crate::process::fork;

pub(crate) use ah::Ah;
use arena::{Mark, object};
pub(crate) use arena::{Object, living, peek};
pub(crate) use channel::CompChannel;
pub(crate) use context::Context;
pub(crate) use cq::Cq;
pub(crate) use device::Device;
pub(crate) use mr::Mr;
pub(crate) use mw::Mw;
pub(crate) use pd::Pd;
pub(crate) use qp::Qp;
pub(crate) use srq::Srq;

/// Registers the handler for forked children. Must be called before anything is opened.
fn watch_forks() {
    static REGISTERED: Once = Once::new();
    // SAFETY: the handler does not allocate or block, as required in a child of a process with
    // several threads.
    REGISTERED.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(in_child));
    });
}

/// Objects stay the parent's, except devices, which are descriptions.
extern "C" fn in_child() {
    fork::begin_child();
    // SAFETY: a child begins with one thread, which is here and in no other function of the
    // library.
    unsafe {
        engine::renew();
        Context::arena().renew(false);
        Pd::arena().renew(false);
        Mr::arena().renew(false);
        Mw::arena().renew(false);
        Ah::arena().renew(false);
        Cq::arena().renew(false);
        CompChannel::arena().renew(false);
        Srq::arena().renew(false);
        Qp::arena().renew(false);
        device::renew();
        sysfs::renew();
    }
}
