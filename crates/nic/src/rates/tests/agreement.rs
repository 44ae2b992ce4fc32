//! The simulator runs the same rules over cells: on random traces, both sides say the same.

use roce::shaping::{Shaper, Table};
use sim::chance::Chance;
use sim::rates::CellTable;

use super::*;

const SEEDS: u64 = 60;
const STEPS: u32 = 400;
const DSCPS: [u8; 3] = [8, 26, 63];
const PEERS: [[u8; 4]; 3] = [[10, 0, 0, 1], [10, 0, 0, 2], [10, 0, 0, 3]];

/// One set of rules over the files, and one over cells, with as many senders each.
struct Both {
    _folder: Folder,
    table: RateTable,
    wires: Vec<RateLimits>,
    cells: CellTable,
    shapers: Vec<Shaper>,
    chance: Chance,
    now: Time,
}

impl Both {
    fn new(seed: u64) -> Both {
        let folder = Folder::new(&format!("agreement-{seed}"));
        let table = folder.table();
        let (mut chance, mut cells) = (Chance::new(seed), CellTable::default());
        let senders = chance.between(1, 3) as usize;
        let wires: Vec<_> = (0..senders).map(|_| folder.limits()).collect();
        let shapers = vec![Shaper::default(); senders];
        // The agent's own reading of the clock is recent: traces are shorter than gates last.
        let now = table.rates().clock().read_at;
        let unix_offset_ns = chance.word();
        table.set_unix_offset(unix_offset_ns);
        cells.set_unix_offset(unix_offset_ns);
        Both { _folder: folder, table, wires, cells, shapers, chance, now }
    }

    /// What the agent sets changes.
    fn govern(&mut self) {
        let mut limits = Vec::new();
        let mut gates = Vec::new();
        for dscp in DSCPS {
            let chance = &mut self.chance;
            let bps = chance.pick(&[0, 1_000_000, 100_000_000, 10_000_000_000]);
            let limit = RateLimit { bps, burst_bytes: chance.below(4 << 20) };
            limits.push((dscp, limit));
            self.cells.set_limiter(dscp, limit.limiter());
            let gate = chance.per_mille(400).then(|| TransmissionGate {
                period_ns: chance.between(1, 80_000_000),
                shift_ns: chance.below(100_000_000),
                tolerance_ns: chance.below(4_000_000),
                quiet_ns: chance.below(8_000_000),
            });
            gates.extend(gate.map(|gate| (dscp, gate)));
            self.cells.set_gate(dscp, gate);
        }
        self.table.set(limits);
        self.table.set_gates(gates);
    }

    /// A queue pair wants to send, and sends some of what is admitted.
    fn send(&mut self, who: usize) {
        let (dscp, peer) = (self.chance.pick(&DSCPS), self.chance.pick(&PEERS));
        let path = Path { dscp, ..Path::new(SocketAddr::from((peer, 4791))) };
        let wanted = self.chance.between(1, 64) as usize;
        let admitted = self.wires[who].admits(self.now, &path, wanted);
        let flow = (dscp, path.remote.ip());
        let own = &mut self.shapers[who];
        assert_eq!(own.admits(&self.cells, self.now, flow, wanted), admitted);
        if self.chance.per_mille(700) {
            let sent = self.chance.below(admitted as u64 + 1) as usize;
            let frames: Vec<_> = (0..sent).map(|_| TxFrame { path, ..frame(dscp) }).collect();
            self.wires[who].sent(self.now, &frames);
            let bytes = sent as u64 * BYTES;
            let run = (sent > 0).then_some((dscp, bytes));
            self.shapers[who].sent(&self.cells, self.now, run);
        }
    }

    fn receive(&mut self, who: usize) {
        let mut arrivals = Arrivals::default();
        for _ in 0..self.chance.below(4) {
            arrivals.note(self.chance.pick(&DSCPS), IpAddr::from(self.chance.pick(&PEERS)));
        }
        self.wires[who].lapse(self.now);
        self.shapers[who].lapse(self.now);
        // A wire is not told of anything while there are no gates.
        if self.wires[who].watches(self.now) {
            self.wires[who].received(self.now, &arrivals);
            self.shapers[who].received(&self.cells, self.now, &arrivals);
        }
    }

    fn compare(&self) {
        for (wire, own) in self.wires.iter().zip(&self.shapers) {
            assert_eq!(wire.next_wakeup(), own.next_wakeup());
            let told = [wire.shaper().held(), wire.shaper().gate_held()];
            assert_eq!(told, [own.held(), own.gate_held()]);
        }
        for dscp in DSCPS {
            assert_eq!(self.table.exchanges(dscp), self.cells.counted(dscp));
            let limiter = self.cells.limiter(usize::from(dscp)).map_or(0, |limiter| limiter.bps());
            assert_eq!(self.table.bps(dscp), limiter);
        }
    }

    /// Returns how many exchanges began, and how often senders were held back by limits and gates.
    fn run(&mut self) -> [u64; 3] {
        // All find the folder before anything is set.
        self.wires.iter_mut().for_each(|wire| assert!(!wire.watches(self.now)));
        self.govern();
        for _ in 0..STEPS {
            let who = self.chance.below(self.wires.len() as u64) as usize;
            match self.chance.below(20) {
                0 => self.govern(),
                1..=5 => self.receive(who),
                _ => self.send(who),
            }
            self.compare();
            // To when somebody wants to be woken, or by a little, or by a lot.
            let woken = self.wires[who].next_wakeup().filter(|_| self.chance.per_mille(500));
            let most_ns = self.chance.pick(&[1, 10_000, 1_000_000, 30_000_000]);
            let later = self.now + Duration::from_nanos(self.chance.below(most_ns));
            self.now = woken.unwrap_or(later).max(self.now);
        }
        let begun = DSCPS.iter().map(|dscp| self.cells.counted(*dscp).begun).sum();
        let [held, gate_held] = [Shaper::held, Shaper::gate_held]
            .map(|count| self.shapers.iter().map(count).sum::<u64>());
        [begun, held, gate_held]
    }
}

#[test]
fn shared_memory_and_the_simulator_agree_on_random_traces() {
    let mut all = [0; 3];
    for seed in 0..SEEDS {
        let counted = std::panic::catch_unwind(|| Both::new(seed).run());
        let counted = counted.unwrap_or_else(|_| panic!("seed {seed}"));
        all.iter_mut().zip(counted).for_each(|(all, own)| *all += own);
    }
    assert!(all.iter().all(|&count| count >= 4 * SEEDS), "they were put to no test: {all:?}");
}
