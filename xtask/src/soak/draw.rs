//! What happens in a round, drawn from its seed.
//!
//! Which round is of which kind counts with the seed, so that four in a row have both paths, each
//! with daemons that live on and with daemons that are killed. What happens to a stream or a
//! program is counted in batches and messages, not in time: what hangs never gets there, so it is
//! never killed before it is noticed.

use std::fmt;
use std::time::Duration;

/// A generator of numbers: SplitMix64.
#[derive(Clone, Debug)]
pub(super) struct Draw(u64);

impl Draw {
    pub(super) fn new(seed: u64) -> Draw {
        Draw(seed.wrapping_mul(0xa076_1d64_78bd_642f) ^ 0xe703_7ed1_a0b4_28db)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// One of `low..=high`.
    pub(super) fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }

    /// Whether something that happens so often in a hundred happens.
    pub(super) fn percent(&mut self, share: u64) -> bool {
        self.next() % 100 < share
    }

    pub(super) fn millis(&mut self, low: u64, high: u64) -> Duration {
        Duration::from_millis(self.within(low, high))
    }

    /// One of a list that is not empty.
    pub(super) fn one<T: Copy>(&mut self, list: &[T]) -> T {
        list[(self.next() % list.len() as u64) as usize]
    }

    /// A generator of its own, for another thread.
    pub(super) fn fork(&mut self) -> Draw {
        Draw(self.next())
    }
}

/// The path between processes: the value of `DQUANT_PATH`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Path {
    SharedMemory,
    Packets,
}

impl Path {
    pub(super) fn setting(self) -> &'static str {
        match self {
            Path::SharedMemory => "auto",
            Path::Packets => "udp",
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Path::SharedMemory => "shared memory",
            Path::Packets => "packets",
        }
    }
}

/// One round.
#[derive(Clone, Debug)]
pub(super) struct Round {
    pub(super) seed: u64,
    pub(super) path: Path,
    /// Whether target and DPU are killed and stopped.
    pub(super) is_mortal: bool,
    pub(super) length: Duration,
    pub(super) streams: u64,
    pub(super) pairs: u64,
    pub(super) draw: Draw,
}

impl Round {
    pub(super) fn new(seed: u64) -> Round {
        let mut draw = Draw::new(seed);
        let path = if seed.is_multiple_of(2) { Path::SharedMemory } else { Path::Packets };
        let is_mortal = seed % 4 >= 2;
        let length = draw.millis(2_500, 4_500);
        // Streams that find a new daemon at the same moment: at least two.
        let streams = draw.within(if is_mortal { 2 } else { 1 }, 8);
        let pairs = draw.within(1, 2);
        Round { seed, path, is_mortal, length, streams, pairs, draw }
    }
}

impl fmt::Display for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Round { seed, streams, pairs, .. } = self;
        let path = self.path.name();
        let daemons = if self.is_mortal { "killed and stopped" } else { "as they are" };
        write!(f, "seed {seed}: {path}, {streams} streams, {pairs} pairs, daemons {daemons}")
    }
}

/// What happens to a reader or a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    /// SIGSTOP, and SIGCONT after this time.
    Stop(Duration),
    Kill,
    /// It gets no reader any more.
    HangUp,
}

/// One stream.
#[derive(Clone, Debug)]
pub(super) struct Stream {
    /// Number of the plan.
    pub(super) plan: usize,
    pub(super) first: u64,
    pub(super) count: u64,
    /// Without the DPU.
    pub(super) is_alone: bool,
    /// What the trainer does with each batch.
    pub(super) step: Duration,
    /// After so many batches.
    pub(super) act: Option<(u64, Act)>,
}

impl Stream {
    /// `batches` are those of each plan.
    pub(super) fn new(draw: &mut Draw, batches: &[u64]) -> Stream {
        let plan = draw.within(0, batches.len() as u64 - 1) as usize;
        let first = draw.within(0, batches[plan] - 1);
        let count = draw.within(1, batches[plan] - first);
        let act = match draw.within(0, 99) {
            0..25 => Some(Act::Stop(draw.millis(50, 3_000))),
            25..40 => Some(Act::Kill),
            40..50 => Some(Act::HangUp),
            _ => None,
        };
        let act = act.map(|act| (draw.within(1, count), act));
        let step = match draw.within(0, 3) {
            0 => draw.millis(1, 3),
            1 => draw.millis(5, 30),
            _ => Duration::ZERO,
        };
        Stream { plan, first, count, is_alone: draw.percent(20), step, act }
    }
}

/// How verbs programs learn of completions.
pub(super) const MODES: [&str; 3] = ["poll", "event", "mixed"];

/// Requests of a pair: SENDs, WRITEs, a SEND after each WRITE, READs, atomics. Most pairs mix them.
const KINDS: [&str; 7] = ["swmra", "swmra", "s", "w", "m", "r", "a"];

/// Largest messages of each class.
pub(super) const CLASSES: [(&str, u64); 5] = [
    ("to 64 B", 64),
    ("to 4 KiB", 4 << 10),
    ("to 64 KiB", 64 << 10),
    ("to 1 MiB", 1 << 20),
    ("to 16 MiB", 16 << 20),
];

/// Two verbs programs.
#[derive(Clone, Debug)]
pub(super) struct Pair {
    pub(super) mode: &'static str,
    /// Number of [`CLASSES`].
    pub(super) class: usize,
    pub(super) lanes: u64,
    pub(super) kinds: &'static str,
    /// Whether registered memory moves to where others map it.
    pub(super) is_shared: bool,
    pub(super) life: Duration,
    pub(super) seed: u64,
    /// To which side, after so many messages.
    pub(super) act: Option<(usize, u64, Act)>,
}

impl Pair {
    pub(super) fn new(draw: &mut Draw) -> Pair {
        let mode = draw.one(&MODES);
        let class = draw.within(0, CLASSES.len() as u64 - 1) as usize;
        // Programs that poll take a processor each, and long messages memory.
        let most = if mode == "poll" || class == CLASSES.len() - 1 { 2 } else { 4 };
        let act = match draw.within(0, 99) {
            0..25 => Some(Act::Stop(draw.millis(50, 2_500))),
            25..50 => Some(Act::Kill),
            _ => None,
        };
        let act = act.map(|act| (draw.within(0, 1) as usize, draw.within(1, 400), act));
        Pair {
            mode,
            class,
            lanes: draw.within(1, most),
            kinds: draw.one(&KINDS),
            is_shared: draw.percent(25),
            life: draw.millis(500, 4_000),
            seed: draw.within(0, u64::MAX / 2),
            act,
        }
    }
}

/// What happens to a daemon.
#[derive(Clone, Debug)]
pub(super) struct Disturbance {
    pub(super) is_dpu: bool,
    /// Stopped, not killed.
    pub(super) is_stop: bool,
    /// How long it is away.
    pub(super) away: Duration,
    /// Until the next one.
    pub(super) pause: Duration,
}

impl Disturbance {
    pub(super) fn new(draw: &mut Draw) -> Disturbance {
        Disturbance {
            is_dpu: draw.percent(40),
            is_stop: draw.percent(40),
            away: draw.millis(10, 1_500),
            pause: draw.millis(300, 1_500),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_draws_the_same_round_and_four_in_a_row_are_of_all_kinds() {
        let kind = |seed| {
            let round = Round::new(seed);
            (round.path, round.is_mortal)
        };
        let mut kinds: Vec<_> = (1_000..1_004).map(kind).collect();
        kinds.sort_unstable();
        kinds.dedup();
        assert_eq!(kinds.len(), 4);
        let text = |seed| format!("{:?}", Round::new(seed));
        assert_eq!(text(7), text(7));
        assert_ne!(text(7), text(8));
    }

    #[test]
    fn everything_is_drawn_and_within_its_bounds() {
        let mut draw = Draw::new(1);
        let mut acts = 0;
        for _ in 0..2_000 {
            let stream = Stream::new(&mut draw, &[1, 100]);
            assert!(stream.first + stream.count <= [1, 100][stream.plan] && stream.count > 0);
            assert!(stream.act.is_none_or(|(after, _)| (1..=stream.count).contains(&after)));
            let pair = Pair::new(&mut draw);
            assert!((1..=4).contains(&pair.lanes) && pair.class < CLASSES.len());
            assert!((1..=8).contains(&Round::new(draw.within(0, 1 << 40)).streams));
            acts += usize::from(stream.act.is_some()) + usize::from(pair.act.is_some());
        }
        assert!((1_000..3_000).contains(&acts), "{acts}");
    }
}
