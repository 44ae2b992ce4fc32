//! Windows that the receiver advertises: who may send how much is decided where the senders meet.
//!
//! Every data packet says how many packets are still to be sent behind it, its sender's demand, and
//! every acknowledgement the window that its sender has from then on. Both are a [`Level`] in seven
//! bits of the BTH that others send as 0 and ignore, so they need no header of their own; both ends
//! of a connection must have agreed.
//!
//! - A sender that has been idle starts with [`AdvertisedParams::first_packets`], about what the
//!   path holds: nobody has to be asked for a short message. What fits into this is *urgent*, and
//!   takes a higher traffic class.
//! - A receiver divides a budget of about the same size among the senders with the least demand
//!   ([`Advertiser`]). The others have a window of one packet, which is enough to be heard again
//!   every round trip. As the demand of a sender runs out, the next one gets what it no longer
//!   needs, so the link does not run dry in between.
//! - A sender that has waited for [`PATIENCE`] gets a turn of a few budgets, and of no longer than
//!   that time, whatever its demand: none starves.
//!
//! Unlike credits, a window is a state and no quantity: an acknowledgement that is lost, repeated
//! or late does no harm. Shortest remaining first and the unasked first window are those of pHost
//! (CoNEXT 2015) and Homa (SIGCOMM 2018); that one endpoint arbitrates its link among all senders
//! is the idea of EQDS (NSDI 2022).

use alloc::collections::{BTreeMap, BTreeSet};

use arrayvec::ArrayVec;

use super::window_of;
use crate::time::{Duration, Time};

/// How long a sender waits before it has its turn.
pub const PATIENCE: Duration = Duration::from_millis(2);

/// A turn, in budgets.
const TURN: u64 = 4;

/// A turn ends after this time, too: its sender may be limited elsewhere.
const LONGEST_TURN: Duration = PATIENCE;

/// A sender that was not heard for so long is not counted any more. How long it has waited is
/// remembered.
const STALE: Duration = Duration::from_millis(1);

/// One that was not heard for so long is a new one.
const FORGOTTEN: Duration = Duration::from_millis(100);

/// Most senders whose windows are decided for one packet: what one packet costs is bounded.
const MOST_OPEN: usize = 32;

/// A number of packets in seven bits, rounded down: exact up to 16, then eight steps per power of
/// two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Level(u8);

impl Level {
    /// The largest; more packets are this, too.
    const MAX: u8 = 127;

    /// Of so many packets.
    pub const fn of(packets: u32) -> Level {
        if packets < 8 {
            return Level(packets as u8 + 1);
        }
        let power = packets.ilog2();
        let step = (packets >> (power - 3)) & 7;
        let code = 9 + (power - 3) * 8 + step;
        Level(if code < Level::MAX as u32 { code as u8 } else { Level::MAX })
    }

    /// From its seven bits; 0 means that there is none.
    pub const fn from_bits(bits: u8) -> Option<Level> {
        if bits == 0 || bits > Level::MAX { None } else { Some(Level(bits)) }
    }

    /// Its seven bits, never 0.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// How many packets it stands for.
    pub const fn packets(self) -> u32 {
        match self.0 {
            0..=8 => self.0.saturating_sub(1) as u32,
            code => (8 + (code as u32 - 9) % 8) << ((code as u32 - 9) / 8),
        }
    }
}

/// Parameters of advertised windows: those of both ends are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdvertisedParams {
    /// What the path holds: the link's rate times the round-trip time without queues, in bytes.
    pub path_bytes: u64,
    /// What a receiver lets its senders have in flight, in thousandths of `path_bytes`.
    pub budget_per_mille: u32,
}

impl AdvertisedParams {
    /// For links of `line_bps` and paths of this round-trip time. The budget is twice what the path
    /// holds, so that the link is used while one of the senders serves another receiver: all-to-all
    /// of 16 hosts carries a quarter more than with 1.25 times, and nothing else in
    /// docs/congestion.md gets worse by more than a tenth.
    pub const fn new(line_bps: u64, base_rtt: Duration) -> AdvertisedParams {
        let bits = line_bps as u128 * base_rtt.as_nanos() as u128 / 1_000_000_000;
        AdvertisedParams { path_bytes: (bits / 8) as u64, budget_per_mille: 2_000 }
    }

    /// The window of a sender that starts, in packets of this size.
    pub fn first_packets(&self, packet_bytes: u32) -> u32 {
        packets_in(self.path_bytes, packet_bytes)
    }

    fn budget_bytes(&self) -> u64 {
        self.path_bytes.saturating_mul(self.budget_per_mille.into()) / 1_000
    }
}

/// Packets that take so many bytes, at least one.
fn packets_in(bytes: u64, packet_bytes: u32) -> u32 {
    let second = Duration::from_millis(1_000);
    window_of(bytes.saturating_mul(8), second, packet_bytes.into()).get()
}

/// A sender as its receiver sees it.
#[derive(Clone, Copy, Debug)]
struct Sender {
    packet_bytes: u32,
    /// Packets to be sent; not 0.
    demand: u32,
    /// In packets.
    window: u32,
    /// The window that it knows, or will know by an acknowledgement that is due.
    told: u32,
    heard: Time,
    /// When it last had more than one packet, or began to wait.
    served: Time,
}

/// Divides a receiver's link among its senders. They are named by numbers of the caller's, the
/// slots of their queue pairs.
#[derive(Clone, Debug, Default)]
pub struct Advertiser {
    path_bytes: u64,
    budget_bytes: u64,
    senders: BTreeMap<u32, Sender>,
    /// By demand, then number.
    by_demand: BTreeSet<(u32, u32)>,
    /// By when they were served.
    by_wait: BTreeSet<(Time, u32)>,
    /// Those with more than one packet.
    open: ArrayVec<u32, MOST_OPEN>,
    turn: Option<Turn>,
}

/// The turn of a sender that has waited.
#[derive(Clone, Copy, Debug)]
struct Turn {
    number: u32,
    /// Bytes that are left of it.
    left: u64,
    until: Time,
}

impl Advertiser {
    /// A packet has arrived from a sender with these parameters, behind which it has `demand`
    /// packets to send. `tell` gets the senders that have to know at once of a larger window, and
    /// returns whether they will: the others learn theirs from the next acknowledgement.
    pub fn heard(
        &mut self,
        now: Time,
        number: u32,
        (params, packet_bytes): (&AdvertisedParams, u32),
        demand: u32,
        mut tell: impl FnMut(u32) -> bool,
    ) {
        self.path_bytes = self.path_bytes.max(params.path_bytes);
        self.budget_bytes = self.budget_bytes.max(params.budget_bytes());
        if demand == 0 {
            self.forget(number);
        } else {
            self.note(now, number, packet_bytes, demand);
        }
        self.divide(now);
        let step = packets_in(self.path_bytes / 8, packet_bytes);
        for &open in &self.open {
            let Some(sender) = self.senders.get_mut(&open) else {
                continue;
            };
            // Its own acknowledgement may be a while off, too, if it does not come for every
            // packet.
            if sender.window >= sender.told.saturating_add(step) && tell(open) {
                sender.told = sender.window;
            }
        }
    }

    /// The window to tell a sender of; none for one that has no demand.
    pub fn window(&mut self, number: u32) -> Option<u32> {
        let sender = self.senders.get_mut(&number)?;
        sender.told = sender.window;
        Some(sender.window)
    }

    /// A sender is gone, or has nothing more to send.
    pub fn forget(&mut self, number: u32) {
        self.leave_out(number);
        self.senders.remove(&number);
    }

    /// A sender is not counted until it is heard again.
    fn leave_out(&mut self, number: u32) {
        if let Some(sender) = self.senders.get(&number) {
            self.by_demand.remove(&(sender.demand, number));
            self.by_wait.remove(&(sender.served, number));
            self.open.retain(|open| *open != number);
            self.turn = self.turn.filter(|turn| turn.number != number);
        }
    }

    fn note(&mut self, now: Time, number: u32, packet_bytes: u32, demand: u32) {
        // A sender that starts has its first window.
        let first = packets_in(self.path_bytes, packet_bytes);
        let new = Sender { packet_bytes, demand, window: 1, told: first, heard: now, served: now };
        let before = self.senders.get(&number).copied();
        if let Some(before) = before {
            self.by_demand.remove(&(before.demand, number));
            self.by_wait.remove(&(before.served, number));
        }
        let before = before.filter(|before| now.since(before.heard) < FORGOTTEN);
        let Sender { window, told, served, .. } = before.unwrap_or(new);
        let is_served = before.is_none_or(|before| before.window > 1);
        let served = if is_served { now } else { served };
        self.senders.insert(number, Sender { window, told, served, ..new });
        self.by_demand.insert((demand, number));
        self.by_wait.insert((served, number));
        if let Some(turn) = self.turn.filter(|turn| turn.number == number) {
            let left = turn.left.saturating_sub(packet_bytes.into());
            self.turn = (left > 0).then_some(Turn { left, ..turn });
        }
    }

    /// Decides all windows anew.
    fn divide(&mut self, now: Time) {
        for number in self.open.take() {
            if let Some(sender) = self.senders.get_mut(&number) {
                sender.window = 1;
            }
        }
        self.forget_stale(now);
        self.take_turn(now);
        let turn = self.turn.map(|turn| turn.number);
        let by_demand = self.by_demand.iter().map(|&(_, number)| number);
        let by_demand = by_demand.filter(|&number| Some(number) != turn);
        let mut left = self.budget_bytes;
        for number in turn.into_iter().chain(by_demand).take(MOST_OPEN) {
            let Some(sender) = self.senders.get_mut(&number) else {
                continue;
            };
            let most = self.path_bytes.min(left);
            sender.window = packets_in(most, sender.packet_bytes);
            self.open.push(number);
            let needed = u64::from(sender.demand) * u64::from(sender.packet_bytes);
            left -= most.min(needed);
            if left < sender.packet_bytes.into() {
                break;
            }
        }
    }

    /// Senders that have gone silent are not counted: as many as windows are decided for, and the
    /// others with the next packets.
    fn forget_stale(&mut self, now: Time) {
        let first = self.by_demand.iter().map(|&(_, number)| number).take(MOST_OPEN);
        let longest = self.by_wait.first().map(|&(_, number)| number);
        let turn = self.turn.map(|turn| turn.number);
        let is_stale = |number: &u32| {
            self.senders.get(number).is_some_and(|sender| now.since(sender.heard) > STALE)
        };
        let looked_at = first.chain(longest).chain(turn).filter(is_stale);
        let stale: ArrayVec<u32, { MOST_OPEN + 2 }> = looked_at.collect();
        stale.into_iter().for_each(|number| self.leave_out(number));
    }

    /// Gives the sender that has waited longest its turn, if nobody has one.
    fn take_turn(&mut self, now: Time) {
        if let Some(turn) = self.turn.filter(|turn| turn.until <= now)
            && let Some(sender) = self.senders.get_mut(&turn.number)
        {
            self.by_wait.remove(&(sender.served, turn.number));
            sender.served = now;
            self.by_wait.insert((now, turn.number));
            self.turn = None;
        }
        if self.turn.is_none()
            && let Some(&(served, number)) = self.by_wait.first()
            && now.since(served) >= PATIENCE
        {
            let left = TURN * self.budget_bytes;
            self.turn = Some(Turn { number, left, until: now + LONGEST_TURN });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use alloc::vec::Vec;

    #[test]
    fn levels_are_exact_for_few_packets_and_near_for_many() {
        assert_eq!((Level::of(0).bits(), Level::from_bits(0)), (1, None));
        for packets in 0..100_000 {
            let level = Level::of(packets);
            let back = level.packets();
            assert!(back <= packets && packets - back <= packets / 8, "{packets} {back}");
            assert!(packets > 16 || back == packets);
            assert_eq!(Level::from_bits(level.bits()), Some(level));
            assert!(level <= Level::of(packets + 1));
        }
        assert_eq!(Level::of(u32::MAX).bits(), 127);
    }

    const PARAMS: AdvertisedParams =
        AdvertisedParams { path_bytes: 100_000, budget_per_mille: 1_000 };
    const PACKET: u32 = 1_000;

    fn at(us: u64) -> Time {
        Time::from_nanos(us * 1_000)
    }

    fn heard(advertiser: &mut Advertiser, us: u64, number: u32, demand: u32) -> Vec<u32> {
        let mut told = vec![];
        advertiser.heard(at(us), number, (&PARAMS, PACKET), demand, |number| {
            told.push(number);
            true
        });
        told
    }

    #[test]
    fn the_least_demand_has_the_link_and_the_next_gets_what_it_no_longer_needs() {
        let mut advertiser = Advertiser::default();
        heard(&mut advertiser, 0, 1, 5_000);
        assert_eq!(advertiser.window(1), Some(100));
        // A shorter one takes over; the longer one may be heard.
        heard(&mut advertiser, 1, 2, 500);
        assert_eq!([1, 2].map(|number| advertiser.window(number)), [Some(1), Some(100)]);
        // As it runs out, the longer one is told of what is left, in steps.
        assert_eq!(heard(&mut advertiser, 2, 2, 95), []);
        assert_eq!(heard(&mut advertiser, 3, 2, 60), [1]);
        assert_eq!([1, 2].map(|number| advertiser.window(number)), [Some(40), Some(100)]);
        assert_eq!(heard(&mut advertiser, 4, 2, 0), [1]);
        assert_eq!([1, 2].map(|number| advertiser.window(number)), [Some(100), None]);
    }

    #[test]
    fn who_waits_gets_a_turn_and_all_get_the_same() {
        let mut advertiser = Advertiser::default();
        let mut served = [0_u32; 8];
        // Each sender is heard once per round; whoever is open is heard for every packet of its
        // window.
        for round in 0..20_000 {
            for number in 0..8 {
                let window = advertiser.window(number).unwrap_or(1);
                let heard_times = if window > 1 { 10 } else { 1 };
                for _ in 0..heard_times {
                    heard(&mut advertiser, 10 * round, number, 50_000 + number);
                }
                served[number as usize] += u32::from(window > 1);
            }
        }
        let (least, most) = (served.iter().min(), served.iter().max());
        assert!(most.unwrap() - least.unwrap() < most.unwrap() / 4, "{served:?}");
    }

    #[test]
    fn senders_that_have_gone_silent_take_nothing() {
        let mut advertiser = Advertiser::default();
        heard(&mut advertiser, 0, 1, 10);
        heard(&mut advertiser, 900, 2, 1_000);
        assert_eq!(advertiser.window(2), Some(90));
        heard(&mut advertiser, 1_100, 2, 1_000);
        assert_eq!(advertiser.window(2), Some(100));
        advertiser.forget(2);
        assert!(advertiser.by_demand.is_empty() && advertiser.by_wait.is_empty());
    }

    #[test]
    fn many_that_have_gone_silent_stop_nobody() {
        let mut advertiser = Advertiser::default();
        for number in 0..1_000 {
            heard(&mut advertiser, 0, number, 3);
        }
        for us in (0..20_000).step_by(100) {
            heard(&mut advertiser, 2_000 + us, 5_000, 800);
            heard(&mut advertiser, 2_000 + us, 5_001, 900);
        }
        assert_eq!(advertiser.window(5_000).max(advertiser.window(5_001)), Some(100));
        assert_eq!(advertiser.by_demand.len(), 2);
    }

    #[test]
    fn one_that_is_heard_seldom_gets_its_turn_and_loses_it() {
        let mut advertiser = Advertiser::default();
        let mut had = 0;
        // Senders 1 and 2 have less to send; sender 3 is heard every 1.5 ms only.
        for us in (0..60_000).step_by(10) {
            heard(&mut advertiser, us, 1, 5_000);
            heard(&mut advertiser, us, 2, 6_000);
            if us % 1_500 == 0 {
                heard(&mut advertiser, us, 3, 50_000);
            }
            had += u32::from(advertiser.senders.get(&3).is_some_and(|sender| sender.window > 1));
            assert!(advertiser.turn.is_none_or(|turn| turn.until > at(us)));
        }
        assert!((300..4_000).contains(&had), "{had} of 6,000");
    }
}
