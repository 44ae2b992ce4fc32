//! Which congestion control a connection has.
//!
//! A [`Control`] holds a [`ControllerFactory`]; what that makes is opaque here. What it asks of the
//! queue pairs on both ends is in its [`Needs`], read once, so that no packet asks the factory.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::fmt;

use super::{AdvertisedParams, Controller};
use crate::time::Duration;
use crate::wire::telemetry::Form;

/// Minimum time between two notifications to a peer, unless the control says otherwise.
const CNP_INTERVAL: Duration = Duration::from_micros(50);

/// What a control needs of its queue pair, and of the peer's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// Minimum time between two notifications to the peer.
    pub cnp_interval: Duration,
    /// It needs to hear of every packet: all request acknowledgements, and round-trip times are
    /// measured more than once per round trip.
    pub every_ack: bool,
    /// The peer is to be notified of every marked packet.
    pub counts_marks: bool,
    /// What data packets collect from switches, if anything, and that one of so many does.
    /// Acknowledgements return it.
    pub telemetry: Option<(Form, u32)>,
    /// Receivers advertise windows: data packets say how much is to follow, acknowledgements how
    /// much may be in flight.
    pub advertised: Option<AdvertisedParams>,
}

impl Needs {
    /// Nothing but notifications.
    pub const LEAST: Needs = Needs {
        cnp_interval: CNP_INTERVAL,
        every_ack: false,
        counts_marks: false,
        telemetry: None,
        advertised: None,
    };
}

/// Makes the controllers of queue pairs, one for each that starts.
pub trait ControllerFactory: fmt::Debug + Send + Sync {
    /// What its controllers need; always the same.
    fn needs(&self) -> Needs {
        Needs::LEAST
    }

    /// The controller of a queue pair that starts, with full packets of `packet_bytes` and its own
    /// window.
    fn controller(&self, packet_bytes: u32, window_packets: u32) -> Box<dyn Controller>;
}

/// The congestion control of a connection.
#[derive(Clone, Debug)]
pub struct Control {
    needs: Needs,
    factory: Option<Arc<dyn ControllerFactory>>,
}

impl Control {
    /// None: it sends as fast as its window allows.
    pub const OFF: Control = Control { needs: Needs::LEAST, factory: None };

    /// What this factory makes.
    pub fn new(factory: impl ControllerFactory + 'static) -> Control {
        Control { needs: factory.needs(), factory: Some(Arc::new(factory)) }
    }

    /// Whether there is none.
    pub fn is_off(&self) -> bool {
        self.factory.is_none()
    }

    /// What it needs.
    #[inline]
    pub fn needs(&self) -> &Needs {
        &self.needs
    }

    pub(crate) fn controller(&self, packet_bytes: u32, window: u32) -> Option<Box<dyn Controller>> {
        self.factory.as_ref().map(|factory| factory.controller(packet_bytes, window))
    }
}

impl Default for Control {
    fn default() -> Control {
        Control::OFF
    }
}

/// Equal are clones of one, and all that are off.
impl PartialEq for Control {
    fn eq(&self, other: &Control) -> bool {
        match (&self.factory, &other.factory) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (one, other) => one.is_none() && other.is_none(),
        }
    }
}

impl Eq for Control {}
