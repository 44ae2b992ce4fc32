//! What the operator hears of a device: troubles, each once, and counters of what the library
//! reports of objects that the device does not have.

use std::collections::VecDeque;
use std::fmt;

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
pub(super) struct Unknown {
    /// Completions of queue pairs that were destroyed, which a driver may leave in the queue.
    pub(super) late_completions: u64,
    /// Completions of queue pairs that never existed.
    pub(super) completions: u64,
    /// Notifications of completion queues.
    pub(super) notifications: u64,
    /// Events of queue pairs, completion queues and shared receive queues.
    pub(super) events: u64,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Reports {
    pub(super) unknown: Unknown,
    /// Not yet reported; bounded by the calls in `reported`.
    pub(super) troubles: VecDeque<Trouble>,
    /// The calls whose trouble was reported.
    reported: Vec<&'static str>,
}

impl Reports {
    /// Notes what is wrong, the first time that this call fails or this kind of thing is reported.
    fn note(&mut self, what: &'static str, trouble: impl FnOnce() -> Trouble) {
        if !self.reported.contains(&what) {
            self.reported.push(what);
            self.troubles.push_back(trouble());
        }
    }

    /// The device serves less well than it should.
    pub(super) fn degraded(&mut self, device: &str, what: &'static str, why: impl fmt::Display) {
        self.note(what, || Trouble::Degraded(format!("device {device}: {why}")));
    }

    /// Notes a report about an object that the device does not have.
    pub(super) fn unknown(&mut self, device: &str, what: &'static str, number: u32) {
        let hint = "it is ignored, and the library may be defective";
        let why = format_args!("the library reports {what} {number:#x}: {hint}");
        self.degraded(device, what, why);
    }

    /// The device cannot be used any more.
    pub(super) fn gone(&mut self, device: &str) {
        const EVENT: &str = "IBV_EVENT_DEVICE_FATAL";
        let why = || format!("device {device} has failed: its library reports {EVENT}");
        self.note(EVENT, || Trouble::Gone(why()));
    }
}
