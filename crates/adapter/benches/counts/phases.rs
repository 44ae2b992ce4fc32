//! The phases of a message, as functions that a profiler can tell apart.
//!
//! A phase runs its work inside a function with a fixed symbol. The profile has the instructions of
//! that function and of everything below it. Warm-up does not pass through them, so tables that
//! grow do so outside the count.

use std::collections::BTreeMap;
use std::fmt;
use std::hint::black_box;

/// Declares the phases, and a function with its own symbol for each.
macro_rules! phases {
    ($( $(#[$doc:meta])* $phase:ident $name:literal $symbol:ident; )+) => {
        /// One part of what happens to a message.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub(crate) enum Phase { $( $(#[$doc])* $phase, )+ }

        impl Phase {
            fn name(self) -> &'static str {
                match self { $( Phase::$phase => $name, )+ }
            }

            fn enter(self, work: &mut dyn FnMut()) {
                match self { $( Phase::$phase => $symbol(work), )+ }
            }
        }

        $(
            // The number makes the body unlike the others: equal functions may be merged.
            // SAFETY: no other symbol of this program has the name.
            #[unsafe(no_mangle)]
            #[inline(never)]
            fn $symbol(work: &mut dyn FnMut()) {
                black_box(work)();
                black_box(Phase::$phase as u32);
            }
        )+
    };
}

phases! {
    /// The requester posts work requests.
    Post "post" counted_post;
    /// The responder posts receives.
    PostReceive "post-receive" counted_post_receive;
    /// The requester makes one packet.
    Send "send" counted_send;
    /// The responder handles one packet.
    Receive "receive" counted_receive;
    /// The responder makes one acknowledgement or response.
    Answer "answer" counted_answer;
    /// The requester handles one acknowledgement or response.
    Complete "complete" counted_complete;
    /// The requester's turns, system calls made but not counted.
    Requester "requester" counted_requester;
    /// The responder's turns.
    Responder "responder" counted_responder;
    /// A turn of the requester with nothing to do.
    Idle "idle" counted_idle;
    /// The requester takes completions.
    Poll "poll" counted_poll;
    /// The responder takes completions of receives.
    PollReceive "poll-receive" counted_poll_receive;
}

/// How often each phase did its work.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    is_counting: bool,
    operations: BTreeMap<Phase, (u64, &'static str)>,
    /// System calls of the counted part, by kind.
    calls: BTreeMap<&'static str, u64>,
    messages: u64,
}

impl Tally {
    /// Ends the warm-up.
    pub(crate) fn begin(&mut self) {
        self.is_counting = true;
    }

    /// Runs the work of a phase.
    pub(crate) fn run<R>(&mut self, phase: Phase, work: impl FnOnce() -> R) -> R {
        if !self.is_counting {
            return work();
        }
        let (mut work, mut done) = (Some(work), None);
        phase.enter(&mut || done = work.take().map(|work| work()));
        done.unwrap()
    }

    /// Adds work that a phase did, in units such as "packet".
    pub(crate) fn add(&mut self, phase: Phase, operations: u64, unit: &'static str) {
        if self.is_counting {
            self.operations.entry(phase).or_insert((0, unit)).0 += operations;
        }
    }

    /// Adds messages that completed.
    pub(crate) fn add_messages(&mut self, messages: u64) {
        if self.is_counting {
            self.messages += messages;
        }
    }

    /// Notes the system calls of the counted part.
    pub(crate) fn set_calls(&mut self, kind: &'static str, calls: u64) {
        self.calls.insert(kind, calls);
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (phase, (operations, unit)) in &self.operations {
            writeln!(f, "phase {} {operations} {unit}", phase.name())?;
        }
        for (kind, calls) in &self.calls {
            writeln!(f, "calls {kind} {calls}")?;
        }
        writeln!(f, "messages {}", self.messages)
    }
}
