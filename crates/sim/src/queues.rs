//! Weighted queues of an egress port, chosen by a packet's DSCP.
//!
//! A port has a traffic class for each range of DSCPs, unless it is given [`Queues`]: then each
//! DSCP names its queue, and each queue has a weight. The port serves them by deficit weighted
//! round robin: in a turn a queue may send [`quantum_bytes`](Queues::new) for each unit of its
//! weight, and what it does not use is not kept. So a backlogged queue gets at least its weight's
//! part of the port, and what one leaves unused goes to the others. Packets of DSCPs that are bound
//! to no queue (acknowledgements of nobody's job, congestion notifications) have a queue of their
//! own, which is served first, where there is one left; otherwise they share the last one.

/// Most queues of a port: the traffic classes of IEEE 802.1Qaz.
pub const MAX_QUEUES: usize = 8;

/// Which queue a packet takes, and what each queue has of its port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queues {
    /// By DSCP.
    queue_of: [u8; 64],
    /// By queue: bytes of a turn; 0 for one that is served first.
    turns: [u64; MAX_QUEUES],
    /// Most bytes that wait in a queue.
    buffer_bytes: u64,
    /// How many queues have a weight.
    weighted: u8,
}

impl Queues {
    /// Queues with these weights, at most [`MAX_QUEUES`], each of which holds at most
    /// `buffer_bytes`. A queue of weight 0 is served as if it had 1: it has no guarantee, and does
    /// not starve. `quantum_bytes`, not 0, is what a queue may send in a turn for each unit of
    /// weight: the less, the shorter are turns.
    pub fn new(weights: &[u32], quantum_bytes: u32, buffer_bytes: u64) -> Queues {
        let weighted = weights.len().clamp(1, MAX_QUEUES);
        let mut turns = [0; MAX_QUEUES];
        for (queue, turn) in turns[..weighted].iter_mut().enumerate() {
            let weight = weights.get(queue).copied().unwrap_or(0).max(1);
            *turn = u64::from(weight) * u64::from(quantum_bytes.max(1));
        }
        let others = weighted.min(MAX_QUEUES - 1) as u8;
        Queues { queue_of: [others; 64], turns, buffer_bytes, weighted: weighted as u8 }
    }

    /// The same where packets with this DSCP take that queue.
    #[must_use]
    pub fn bind(mut self, dscp: u8, queue: u8) -> Queues {
        self.queue_of[usize::from(dscp & 63)] = queue.min(self.weighted - 1);
        self
    }

    /// The queue of packets with this DSCP.
    pub fn queue_of(&self, dscp: u8) -> usize {
        self.queue_of[usize::from(dscp & 63)].into()
    }

    /// Bytes of a queue's turn; 0 for the one that is served first.
    pub(crate) fn turn_bytes(&self, queue: usize) -> u64 {
        self.turns[queue]
    }

    /// Most bytes that wait in a queue.
    pub(crate) fn buffer_bytes(&self) -> u64 {
        self.buffer_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_bound_has_its_queue_and_the_rest_goes_first() {
        let queues = Queues::new(&[3, 5], 100, 1 << 20).bind(8, 0).bind(9, 1);
        assert_eq!([queues.queue_of(8), queues.queue_of(9), queues.queue_of(48)], [0, 1, 2]);
        let turns: [u64; 3] = core::array::from_fn(|queue| queues.turn_bytes(queue));
        assert_eq!(turns, [300, 500, 0]);
    }

    #[test]
    fn with_eight_queues_the_rest_shares_the_last() {
        let queues = Queues::new(&[0; 8], 100, 1 << 20).bind(9, 200);
        assert_eq!([queues.queue_of(48), queues.queue_of(9)], [7, 7]);
        assert_eq!(queues.turn_bytes(7), 100, "no weight is served all the same");
    }
}
