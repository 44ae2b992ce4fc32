//! Known bugs of brain and agent, seeded one at a time, to test that the simulation finds them.
//!
//! With the feature `seeded-bugs` a brain or an agent can have one (`Brain::plant`, `Agent::plant`,
//! which exist only with that feature). Without it the selector is empty, each query returns a
//! constant, and nothing of this remains.

/// A seeded bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Bug {
    /// An agent accepts commands of a lower term than it has seen.
    LowerTermAccepted,
    /// An agent accepts commands of its term that were overtaken by a later one.
    OvertakenAccepted,
    /// A brain answers when a batch is appended, not when it is durable.
    AnswerBeforeSync,
    /// A brain executes a repeated request again.
    RepeatCountedTwice,
    /// A brain takes a delayed write for done although the lease, and with it the log, went to
    /// another meanwhile.
    LeaseUnchecked,
    /// A brain appends behind a torn tail and does not cut it.
    TornTailKept,
    /// A brain keeps the times of jobs whose partner was released.
    ShiftsStale,
}

impl Bug {
    /// Every bug.
    pub const ALL: [Bug; 7] = [
        Bug::LowerTermAccepted,
        Bug::OvertakenAccepted,
        Bug::AnswerBeforeSync,
        Bug::RepeatCountedTwice,
        Bug::LeaseUnchecked,
        Bug::TornTailKept,
        Bug::ShiftsStale,
    ];
}

impl core::fmt::Display for Bug {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Bug::LowerTermAccepted => "lower-term-accepted",
            Bug::OvertakenAccepted => "overtaken-accepted",
            Bug::AnswerBeforeSync => "answer-before-sync",
            Bug::RepeatCountedTwice => "repeat-counted-twice",
            Bug::LeaseUnchecked => "lease-unchecked",
            Bug::TornTailKept => "torn-tail-kept",
            Bug::ShiftsStale => "shifts-stale",
        })
    }
}

/// Which bug a brain or an agent has.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seeded {
    #[cfg(feature = "seeded-bugs")]
    bug: Option<Bug>,
}

impl Seeded {
    #[cfg(feature = "seeded-bugs")]
    pub(crate) const fn new(bug: Bug) -> Seeded {
        Seeded { bug: Some(bug) }
    }

    /// Whether this bug is enabled.
    pub(crate) fn is(self, bug: Bug) -> bool {
        #[cfg(feature = "seeded-bugs")]
        return self.bug == Some(bug);
        #[cfg(not(feature = "seeded-bugs"))]
        {
            let _ = bug;
            false
        }
    }
}
