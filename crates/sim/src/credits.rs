//! InfiniBand's link-level flow control: a sender never sends what the receiver has no buffer for.
//!
//! For each virtual lane, both ends count blocks of 64 bytes modulo 4096 (IBA 7.9.4):
//!
//! | number | whose | what it counts |
//! |---|---|---|
//! | FCTBS | sender | blocks sent since the link came up |
//! | ABR | receiver | blocks received; set to FCTBS by each flow control packet of the sender |
//! | FCCL | receiver | ABR plus the blocks that its buffer still takes, 2048 at most |
//!
//! The sender may send a packet of `n` blocks while (FCCL - FCTBS - n) modulo 4096 is at most 2048.
//! Packets that the link lost were counted by the sender only: each costs credit until the sender's
//! next flow control packet sets ABR right. Flow control packets that are lost cost time only, as
//! each has the whole state.
//!
//! When flow control packets are sent, and what a block waits for, is for the
//! [`network`](crate::network).

/// Bytes of a block.
pub const BLOCK_BYTES: u32 = 64;

/// Most blocks that a receiver advertises, and the most that may be outstanding.
pub const MOST_BLOCKS: u16 = 2048;

const MASK: u16 = 0x0fff;

/// Blocks of a packet of so many bytes.
pub const fn blocks(bytes: u32) -> u16 {
    bytes.div_ceil(BLOCK_BYTES) as u16
}

/// The sending end of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sender {
    /// FCTBS.
    sent: u16,
    /// FCCL, as the receiver said last.
    limit: u16,
}

impl Sender {
    /// A link that came up: it has what the receiver's first flow control packet says, nothing
    /// before.
    pub const fn new() -> Sender {
        Sender { sent: 0, limit: 0 }
    }

    /// Whether a packet of so many blocks may be sent.
    pub const fn may_send(&self, blocks: u16) -> bool {
        self.limit.wrapping_sub(self.sent).wrapping_sub(blocks) & MASK <= MOST_BLOCKS
            && blocks <= MOST_BLOCKS
    }

    /// A packet of so many blocks is sent.
    pub const fn send(&mut self, blocks: u16) {
        self.sent = self.sent.wrapping_add(blocks) & MASK;
    }

    /// A flow control packet of the receiver, with this FCCL.
    pub const fn heard(&mut self, limit: u16) {
        self.limit = limit & MASK;
    }

    /// FCCL, as the receiver said last.
    pub const fn limit(&self) -> u16 {
        self.limit
    }

    /// What a flow control packet to the receiver says: FCTBS.
    pub const fn total(&self) -> u16 {
        self.sent
    }
}

impl Default for Sender {
    fn default() -> Sender {
        Sender::new()
    }
}

/// The receiving end of a lane, with its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receiver {
    /// ABR.
    received: u16,
    capacity: u32,
    used: u32,
}

impl Receiver {
    /// A buffer of so many blocks.
    pub const fn new(capacity: u32) -> Receiver {
        Receiver { received: 0, capacity, used: 0 }
    }

    /// A packet of so many blocks has arrived; false if the sender overran the buffer, and the
    /// packet is dropped.
    pub const fn receive(&mut self, blocks: u16) -> bool {
        self.received = self.received.wrapping_add(blocks) & MASK;
        let fits = self.used + blocks as u32 <= self.capacity;
        if fits {
            self.used += blocks as u32;
        }
        fits
    }

    /// The link was down, and counts from the beginning. What arrived before still has its place in
    /// the buffer.
    pub const fn restart(&mut self) {
        self.received = 0;
    }

    /// Whether the sender knows how much room there is, and the buffer is empty.
    pub const fn is_at_rest_with(&self, sender: &Sender) -> bool {
        let agrees = self.received == sender.sent && self.limit() == sender.limit;
        self.used == 0 && agrees
    }

    /// So many blocks of the buffer are free again.
    pub const fn free(&mut self, blocks: u16) {
        self.used -= blocks as u32;
    }

    /// A flow control packet of the sender, with this FCTBS.
    pub const fn heard(&mut self, total: u16) {
        self.received = total & MASK;
    }

    /// ABR.
    pub const fn received(&self) -> u16 {
        self.received
    }

    /// What a flow control packet to the sender says: FCCL.
    pub const fn limit(&self) -> u16 {
        let room = self.capacity - self.used;
        let room = if room < MOST_BLOCKS as u32 { room as u16 } else { MOST_BLOCKS };
        self.received.wrapping_add(room) & MASK
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    use crate::chance::Chance;

    /// What travels, and when it arrives.
    #[derive(Clone, Copy, Debug)]
    enum Sent {
        Packet(u16),
        Total(u16),
        Limit(u16),
    }

    /// One lane in steps of a block's time.
    struct Lane {
        sender: Sender,
        receiver: Receiver,
        delay: u64,
        loss: u32,
        there: VecDeque<(u64, Sent)>,
        back: VecDeque<(u64, Sent)>,
        /// Packets in the buffer: when they leave it, and their blocks.
        buffered: VecDeque<(u64, u16)>,
        delivered: u64,
        overruns: u64,
        chance: Chance,
    }

    impl Lane {
        fn new(capacity: u32, delay: u64, loss: u32, seed: u64) -> Lane {
            Lane {
                sender: Sender::new(),
                receiver: Receiver::new(capacity),
                delay,
                loss,
                there: VecDeque::new(),
                back: VecDeque::new(),
                buffered: VecDeque::new(),
                delivered: 0,
                overruns: 0,
                chance: Chance::new(seed),
            }
        }

        /// `stay` is how long packets stay in the buffer at most; the sender has packets of `least`
        /// to `most` blocks.
        fn run(&mut self, steps: u64, stay: u64, least: u64, most: u64) {
            let (mut busy_until, mut next) = (0, self.chance.between(least, most) as u16);
            for now in 0..steps {
                if now.is_multiple_of(64) {
                    self.there.push_back((now + self.delay, Sent::Total(self.sender.total())));
                }
                if now >= busy_until && self.sender.may_send(next) {
                    self.sender.send(next);
                    busy_until = now + u64::from(next);
                    self.there.push_back((busy_until + self.delay, Sent::Packet(next)));
                    next = self.chance.between(least, most) as u16;
                }
                self.arrive(now, stay);
                if now.is_multiple_of(16) {
                    self.back.push_back((now + self.delay, Sent::Limit(self.receiver.limit())));
                }
                while let Some((_, sent)) = self.back.pop_front_if(|&mut (at, _)| at <= now) {
                    if let (Sent::Limit(limit), false) = (sent, self.chance.per_mille(self.loss)) {
                        self.sender.heard(limit);
                    }
                }
            }
        }

        fn arrive(&mut self, now: u64, stay: u64) {
            // A flow control packet never overtakes data.
            while let Some((_, sent)) = self.there.pop_front_if(|&mut (at, _)| at <= now) {
                match sent {
                    _ if self.chance.per_mille(self.loss) => {}
                    Sent::Packet(blocks) if self.receiver.receive(blocks) => {
                        let leaves = now + self.chance.below(stay + 1);
                        let last = self.buffered.back().map_or(0, |&(at, _)| at);
                        self.buffered.push_back((leaves.max(last), blocks));
                    }
                    Sent::Packet(_) => self.overruns += 1,
                    Sent::Total(total) => self.receiver.heard(total),
                    Sent::Limit(_) => {}
                }
            }
            while let Some((_, blocks)) = self.buffered.pop_front_if(|&mut (at, _)| at <= now) {
                self.receiver.free(blocks);
                self.delivered += u64::from(blocks);
            }
        }
    }

    #[test]
    fn the_buffer_is_never_overrun_whatever_is_lost() {
        for seed in 0..200 {
            let mut chance = Chance::new(seed);
            let capacity = chance.between(64, 6_000) as u32;
            let (delay, loss) = (chance.below(2_000), chance.pick(&[0, 1, 50, 500]));
            let mut lane = Lane::new(capacity, delay, loss, seed);
            lane.run(50_000, chance.below(5_000), 1, 64.min(capacity.into()));
            assert_eq!(lane.overruns, 0, "seed {seed}");
            assert!(lane.delivered > 0, "seed {seed}: {capacity} {delay} {loss}");
        }
    }

    #[test]
    fn lost_packets_cost_credit_only_until_the_next_flow_control_packet() {
        let mut lane = Lane::new(256, 10, 900, 1);
        lane.run(20_000, 0, 16, 16);
        // The link gets better: nothing remains of what it lost.
        (lane.loss, lane.delivered) = (0, 0);
        lane.run(20_000, 0, 16, 16);
        assert!(lane.delivered > 19_000, "{}", lane.delivered);
    }

    #[test]
    fn throughput_is_the_rate_or_the_buffer_per_round_trip() {
        for (capacity, delay) in [(1_024, 100), (1_024, 2_000), (256, 1_000), (2_048, 4_000)] {
            let mut lane = Lane::new(capacity, delay, 0, 1);
            let steps = 400_000;
            lane.run(steps, 0, 16, 16);
            // A packet has arrived when its last block has; its credit is back with the next flow
            // control packet, 8 steps later on average.
            let round_trip = 2 * delay + 16 + 8;
            let expected = (steps * u64::from(capacity) / round_trip).min(steps);
            let percent = lane.delivered * 100 / expected;
            assert!((90..=101).contains(&percent), "{capacity} {delay}: {percent} %");
        }
    }
}
