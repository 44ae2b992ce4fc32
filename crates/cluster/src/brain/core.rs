//! A brain without a network: the state machine in its actor, over a store, and what others ask it
//! with.
//!
//! The daemon puts gRPC around it. Tests drive it as it is, and kill it by dropping its future.

use std::sync::Arc;

use parfait::brain::{Denial, Request};
use parfait::log::Outcome;
use tokio::sync::{mpsc, oneshot, watch};

use super::actor::{Actor, Parts};
use super::calls::Handle;
use super::cluster::Cluster;
use super::events::Events;
use super::inputs::{Input, MAX_INPUTS};
use crate::store::Store;
use crate::view::View;
use crate::web::EventLog;

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Core {
    pub(super) inputs: mpsc::Sender<Input>,
    pub(super) view: watch::Receiver<Arc<View>>,
    pub(super) events: Arc<EventLog>,
    leading: watch::Receiver<bool>,
    cluster: Arc<Cluster>,
}

impl Core {
    /// A brain, and what has to run for it. When that is dropped, so is all that it waits for.
    pub fn new<S: Store>(parts: Parts<S>) -> (Core, impl Future<Output = ()> + Send + use<S>) {
        let (inputs, receiver) = mpsc::channel(MAX_INPUTS);
        let (sender, view) = watch::channel(Arc::new(View::default()));
        let events = Arc::new(Events::new());
        let core = Core {
            inputs,
            view,
            events: Arc::clone(events.log()),
            leading: events.leading(),
            cluster: Arc::new(parts.cluster.clone()),
        };
        (core, Actor::new(parts, receiver, sender, events).run())
    }

    /// Asks for a change. `None` when it has too much to do, stopped, or gave up leading: the
    /// request may or may not be carried out, and may be sent again.
    pub async fn ask(&self, request: Request) -> Option<Result<Outcome, Denial>> {
        let (answer, answered) = oneshot::channel();
        self.inputs.try_send(Input::Ask { request, answer }).ok()?;
        answered.await.ok()
    }

    /// Whether it runs and leads.
    pub fn is_leading(&self) -> bool {
        !self.inputs.is_closed() && *self.leading.borrow()
    }

    /// What calls over the network need.
    pub(super) fn handle(&self) -> Handle {
        Handle {
            inputs: self.inputs.clone(),
            view: self.view.clone(),
            events: Arc::clone(&self.events),
            leading: self.leading.clone(),
            cluster: Arc::clone(&self.cluster),
        }
    }
}
