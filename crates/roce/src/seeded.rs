//! Known bugs, seeded one at a time, to test that the checkers of this crate find them.
//!
//! A checker that has never failed proves little. With the feature `seeded-bugs`, one bug can be
//! enabled per endpoint (`Endpoint::plant`, which exists only with that feature); without it, the
//! selector is empty, each query returns a constant, and nothing of this remains in the binary.
//!
//! The bugs are those that implementations of this protocol have had, or nearly had. Each is one
//! condition at the place where the right thing is done.

use crate::wire::{Psn, Syndrome};

/// A seeded bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Bug {
    /// Sequence numbers are compared as if they did not wrap.
    PsnNotCircular,
    /// A duplicate atomic is executed again.
    AtomicRepeated,
    /// An acknowledgement for packets that were never sent is accepted.
    AckBeyondWindow,
    /// A key of another protection domain is accepted.
    KeyOfOtherDomain,
    /// A region reaches one byte further than it was registered.
    BoundsOffByOne,
    /// A duplicate SEND consumes a second receive.
    DuplicateSendReceived,
    /// A READ response is placed although one before it is missing.
    LostReadIgnored,
    /// After an RNR NAK, the packet is retransmitted without waiting.
    RnrWaitForgotten,
    /// Of two completions in the queue, the later is polled first.
    CompletionsSwapped,
    /// One more credit is advertised than receives are posted.
    CreditTooMany,
    /// Requests do not wait for the READs before their fence.
    FenceIgnored,
    /// Unsignaled sends generate completions.
    UnsignaledCompleted,
    /// When a queue pair fails, one of its sends is not completed.
    FlushForgotten,
    /// A SEND with invalidate leaves the key valid.
    InvalidateForgotten,
    /// When the ACK timer expires, nothing is retransmitted.
    TimeoutForgotten,
    /// UC continues a message although a packet of it is missing.
    GapIgnored,
    /// Datagrams are accepted with any queue key.
    QueueKeyIgnored,
    /// Every marked packet triggers a notification, however soon after the last.
    NotificationStorm,
    /// In selective repeat, a SACK acknowledges the packet that is missing.
    ReportShifted,
    /// Requests are executed although READs before them are still being answered.
    ReadOvertaken,
    /// A duplicate READ is executed as it is, whether or not it matches an executed one and is
    /// allowed.
    DuplicateReadUnchecked,
    /// Arming a completion queue considers only later completions, not those already in it.
    ArmIgnoresWaiting,
    /// In selective repeat, READs beyond the initial limit of the connection are not tracked.
    ReadSlotsNotGrown,
    /// In selective repeat, an out-of-order WRITE without the right to write is dropped silently.
    OutOfOrderKeyFree,
    /// In selective repeat, one out-of-order SEND takes all shared receives up to its own.
    SharedReceivesHoarded,
    /// In selective repeat, a WRITE with immediate reports the length of its last packet only.
    LengthOfLastPacket,
    /// Completions of a queue pair that was reset or destroyed can still be polled.
    CompletionsKept,
    /// In selective repeat, a retransmitted WRITE overwrites a later one.
    OverlapIgnored,
    /// In selective repeat, nothing of a WRITE is placed that overlaps a later one.
    OverlapSkipsAll,
    /// A SEND with invalidate invalidates every window of its queue pair.
    InvalidateTooMuch,
    /// UC accepts nothing more once a packet was missing.
    GapForever,
    /// Of the queue pairs parked by back-pressure, only one returns to the ready queue.
    ParkedForgotten,
    /// Packets admitted for one burst and not sent in it are sent in the next.
    GrantKept,
    /// Without packets, a region reaches one byte further than it was registered.
    DirectBounds,
    /// Without packets, a region can be used after it was deregistered.
    DirectStaleKey,
    /// Without packets, a WRITE completes before its bytes have arrived.
    DirectCompletedEarly,
    /// Without packets, the end of a WRITE arrives before its beginning.
    DirectTailFirst,
    /// Without packets, an atomic reads the word first and stores the new value later.
    DirectAtomicTorn,
    /// Without packets, a request overtakes those before it that are packets.
    DirectOvertakes,
    /// A message that was handed over and refused is reported as taken.
    DirectRefusalLost,
    /// After a refused message, the next ones of its round are taken.
    DirectRoundIgnored,
    /// A switch does not pause the sender of a class that is full.
    PauseForgotten,
    /// A sender does not obey pauses.
    PauseIgnored,
    /// A pause never ends.
    ResumeLost,
    /// The credit of a packet that its link lost does not come back.
    CreditLeaked,
    /// When the last switch has its new routes, one packet is sent back to where it came from.
    LoopOnReroute,
    /// A receiver returns the telemetry of one queue pair's packets with the acknowledgements of
    /// another.
    TelemetryOfOtherFlow,
}

impl Bug {
    /// Every bug.
    pub const ALL: [Bug; 47] = [
        Bug::PsnNotCircular,
        Bug::AtomicRepeated,
        Bug::AckBeyondWindow,
        Bug::KeyOfOtherDomain,
        Bug::BoundsOffByOne,
        Bug::DuplicateSendReceived,
        Bug::LostReadIgnored,
        Bug::RnrWaitForgotten,
        Bug::CompletionsSwapped,
        Bug::CreditTooMany,
        Bug::FenceIgnored,
        Bug::UnsignaledCompleted,
        Bug::FlushForgotten,
        Bug::InvalidateForgotten,
        Bug::TimeoutForgotten,
        Bug::GapIgnored,
        Bug::QueueKeyIgnored,
        Bug::NotificationStorm,
        Bug::ReportShifted,
        Bug::ReadOvertaken,
        Bug::DuplicateReadUnchecked,
        Bug::ArmIgnoresWaiting,
        Bug::ReadSlotsNotGrown,
        Bug::OutOfOrderKeyFree,
        Bug::SharedReceivesHoarded,
        Bug::LengthOfLastPacket,
        Bug::CompletionsKept,
        Bug::OverlapIgnored,
        Bug::OverlapSkipsAll,
        Bug::InvalidateTooMuch,
        Bug::GapForever,
        Bug::ParkedForgotten,
        Bug::GrantKept,
        Bug::DirectBounds,
        Bug::DirectStaleKey,
        Bug::DirectCompletedEarly,
        Bug::DirectTailFirst,
        Bug::DirectAtomicTorn,
        Bug::DirectOvertakes,
        Bug::DirectRefusalLost,
        Bug::DirectRoundIgnored,
        Bug::PauseForgotten,
        Bug::PauseIgnored,
        Bug::ResumeLost,
        Bug::CreditLeaked,
        Bug::LoopOnReroute,
        Bug::TelemetryOfOtherFlow,
    ];
}

impl core::fmt::Display for Bug {
    /// Its name as one word: `PsnNotCircular` is `psn-not-circular`.
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        for (at, letter) in alloc::format!("{self:?}").char_indices() {
            let dash = if at > 0 && letter.is_ascii_uppercase() { "-" } else { "" };
            write!(f, "{dash}{}", letter.to_ascii_lowercase())?;
        }
        Ok(())
    }
}

/// Which bug an endpoint has.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seeded {
    #[cfg(feature = "seeded-bugs")]
    bug: Option<Bug>,
}

impl Seeded {
    #[cfg(feature = "seeded-bugs")]
    pub(crate) const fn new(bug: Option<Bug>) -> Seeded {
        Seeded { bug }
    }

    /// Whether this bug is enabled.
    #[inline(always)]
    pub(crate) fn is(self, bug: Bug) -> bool {
        #[cfg(feature = "seeded-bugs")]
        return self.bug == Some(bug);
        #[cfg(not(feature = "seeded-bugs"))]
        {
            let _ = bug;
            false
        }
    }

    /// How far `psn` is after `other`.
    #[inline(always)]
    pub(crate) fn distance(self, psn: Psn, other: Psn) -> i32 {
        match self.is(Bug::PsnNotCircular) {
            true => psn.get() as i32 - other.get() as i32,
            false => psn.distance_from(other),
        }
    }

    /// The syndrome to send instead of `right`.
    #[inline(always)]
    pub(crate) fn promise(self, right: Syndrome) -> Syndrome {
        match right {
            Syndrome::Ack { credits } if credits < 30 && self.is(Bug::CreditTooMany) => {
                Syndrome::Ack { credits: credits + 1 }
            }
            _ => right,
        }
    }
}
