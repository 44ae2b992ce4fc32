//! The ends of round trips, seen in acknowledgements.
//!
//! Algorithms that change their reference once per round trip wait for the acknowledgement of a
//! packet that was sent after the last change. What was in flight at that time tells how many
//! packets that is.

/// Counts acknowledged packets up to the end of a round trip.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rounds {
    /// Packets to be acknowledged before the round trip is over.
    left: u32,
}

impl Rounds {
    /// `packets` were acknowledged and `in_flight` still are not. Returns whether a round trip is
    /// over, which the first acknowledgement of all always is.
    pub(super) fn acknowledged(&mut self, packets: u32, in_flight: u32) -> bool {
        self.left = self.left.saturating_sub(packets);
        if self.left > 0 {
            return false;
        }
        // Those in flight were sent before this moment; the one after them is the first of the new
        // round.
        self.left = in_flight.saturating_add(1);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_ends_with_the_first_packet_sent_in_it() {
        let mut rounds = Rounds::default();
        assert!(rounds.acknowledged(1, 8));
        // The eight in flight, one acknowledgement each, while as many follow.
        assert!((0..8).all(|_| !rounds.acknowledged(1, 8)));
        assert!(rounds.acknowledged(1, 8));
        assert!(
            !rounds.acknowledged(4, 8) && !rounds.acknowledged(4, 0) && rounds.acknowledged(4, 0)
        );
        assert!(rounds.acknowledged(1, 0));
    }
}
