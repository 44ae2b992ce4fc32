//! Known mistakes, planted one at a time, to see that whoever checks this crate finds them.
//!
//! A checker that has never failed proves little. With the feature `planted-bugs`, one mistake can be
//! switched on per endpoint (`Endpoint::plant`, which exists with that feature only); without it, the
//! selector is empty, every question it is asked is answered with a constant, and nothing of this
//! remains in the program.
//!
//! The mistakes are those that implementations of this protocol have made, or nearly made. Each is
//! one condition at the place where the right thing is done.

use crate::wire::{Psn, Syndrome};

/// A mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Bug {
    /// Sequence numbers are compared as if they did not wrap.
    PsnNotCircular,
    /// An atomic that is requested again is carried out again.
    AtomicRepeated,
    /// An acknowledgement for packets that were never sent is believed.
    AckBeyondWindow,
    /// A key of another protection domain opens its region.
    KeyOfOtherDomain,
    /// A region reaches one byte further than it was registered.
    BoundsOffByOne,
    /// A SEND that comes a second time takes a second receive.
    DuplicateSendReceived,
    /// A READ response is placed although one before it is missing.
    LostReadIgnored,
    /// After an RNR NAK, the packet is retransmitted at once.
    RnrWaitForgotten,
    /// Of two completions that wait, the later comes first.
    CompletionsSwapped,
    /// One receive more is promised than is posted.
    CreditTooMany,
    /// Requests do not wait for the READs before their fence.
    FenceIgnored,
    /// Sends that asked for no completion get one.
    UnsignaledCompleted,
    /// When a queue pair breaks, one of its sends is forgotten.
    FlushForgotten,
    /// A SEND that takes a key away leaves it as it was.
    InvalidateForgotten,
    /// When the ACK timer expires, nothing is retransmitted.
    TimeoutForgotten,
    /// UC goes on with a message although a packet of it is missing.
    GapIgnored,
    /// Datagrams are taken whatever their queue key.
    QueueKeyIgnored,
    /// Every marked packet is answered with a notification, however soon after the last.
    NotificationStorm,
    /// In selective repeat, a SACK acknowledges the packet that is missing.
    ReportShifted,
    /// Requests are executed although READs before them are not answered yet.
    ReadOvertaken,
    /// A duplicate READ is served as it comes, whether or not it was executed and is allowed.
    DuplicateReadUnchecked,
    /// Arming a completion queue looks at later completions only, not at those that wait.
    ArmIgnoresWaiting,
    /// In selective repeat, READs beyond the limit that the connection began with are not kept track of.
    ReadSlotsNotGrown,
    /// In selective repeat, an out-of-order WRITE that the peer may not do is dropped in silence.
    EarlyKeyFree,
    /// In selective repeat, one out-of-order SEND takes all shared receives up to its own.
    SharedReceivesHoarded,
    /// In selective repeat, a WRITE with immediate reports the length of its last packet only.
    LengthOfLastPacket,
    /// Completions of a queue pair that was reset or destroyed can still be polled.
    CompletionsKept,
}

impl Bug {
    /// Every mistake.
    pub const ALL: [Bug; 27] = [
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
        Bug::EarlyKeyFree,
        Bug::SharedReceivesHoarded,
        Bug::LengthOfLastPacket,
        Bug::CompletionsKept,
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

/// Which mistake an endpoint makes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Planted {
    #[cfg(feature = "planted-bugs")]
    bug: Option<Bug>,
}

impl Planted {
    #[cfg(feature = "planted-bugs")]
    pub(crate) const fn new(bug: Option<Bug>) -> Planted {
        Planted { bug }
    }

    /// Whether this mistake is to be made.
    #[inline(always)]
    pub(crate) fn is(self, bug: Bug) -> bool {
        #[cfg(feature = "planted-bugs")]
        return self.bug == Some(bug);
        #[cfg(not(feature = "planted-bugs"))]
        {
            let _ = bug;
            false
        }
    }

    /// How far `psn` lies after `other`.
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
