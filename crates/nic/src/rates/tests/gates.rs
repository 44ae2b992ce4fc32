//! Transmission gates.

use roce::shaping::{MAX_HEARD, PEERS_AT_ONCE, Word};

use super::*;

#[test]
fn an_exchange_begins_on_time_a_little_late_or_a_period_later() {
    // START is 0 of Unix time, in the first case.
    for (ahead, offset) in [(0, 0), (20, 20_000_000), (90, 90_000_000)] {
        let (folder, table) = gated("on-time", offset);
        let mut limits = folder.limits();
        // In milliseconds of Unix time: wanted, and begun.
        let wanted = [(130, 130), (235, 235), (336, 430), (510, 530), (629, 630), (630, 630)];
        for (round, (wants, at)) in (0..).zip(wanted) {
            let base = 1_000 * (round + 1) - ahead;
            let (began, asked) = begins(&mut limits, ms(base + wants));
            assert_eq!(began, ms(base + at), "wanted at {wants}");
            assert!(asked <= 3, "it asks every {LOOK_EVERY:?}");
        }
        assert_eq!(limits.shaper().gate_held(), 4);
        assert_eq!(table.exchanges(26), Exchanges { begun: 6, waited_ns: 115_000_000, late: 2 });
    }
}

#[test]
fn an_exchange_that_takes_longer_is_not_cut_and_the_next_one_waits() {
    let (folder, table) = gated("longer", 0);
    let mut limits = folder.limits();
    assert!(tries(&mut limits, ms(130), 26));
    // Through the times of two periods, with pauses that are shorter than quiet.
    for at in (148..400).step_by(18) {
        assert!(tries(&mut limits, ms(at), 26), "{at} ms");
    }
    assert_eq!(table.exchanges(26).begun, 1);
    assert_eq!(begins(&mut limits, ms(440)).0, ms(530));
    assert_eq!(table.exchanges(26), Exchanges { begun: 2, waited_ns: 90_000_000, late: 1 });
}

#[test]
fn what_peers_have_begun_is_not_held_back() {
    let (folder, table) = gated("received", 0);
    let mut limits = folder.limits();
    let bit = |dscp: u8| 1 << dscp;
    // Whoever has only received so far knows of the gate, too.
    assert!(limits.watches(ms(10)) && folder.limits().watches(ms(10)));
    assert!(!tries(&mut limits, ms(60), 26));
    arrive(&mut limits, ms(61), bit(27), &[]);
    assert!(limits.next_wakeup() > Some(ms(61)), "another job's");
    arrive(&mut limits, ms(70), bit(26) | bit(63), &[]);
    assert_eq!(limits.next_wakeup(), Some(ms(70)), "who waits asks at once");
    assert!(tries(&mut limits, ms(70), 26));
    // So is what is to be acknowledged later, or by another process.
    let mut other = folder.limits();
    assert!(tries(&mut other, ms(85), 26));
    assert_eq!(table.exchanges(26), Exchanges { begun: 1, waited_ns: 10_000_000, late: 1 });
    assert_eq!(table.exchanges(27), Exchanges::default());
}

#[test]
fn whoever_was_heard_is_answered_whatever_its_dscp() {
    let (folder, table) = gated("answers", 0);
    let mut limits = folder.limits();
    assert!(!tries(&mut limits, ms(60), 26));
    let other = IpAddr::from([10, 0, 0, 2]);
    arrive(&mut limits, ms(61), 0, &[other]);
    assert!(!tries(&mut limits, ms(62), 26), "somebody else was heard");
    arrive(&mut limits, ms(63), 0, &[path(26).remote.ip(), other]);
    assert_eq!(limits.next_wakeup(), Some(ms(63)), "who waits asks at once");
    assert!(tries(&mut limits, ms(64), 26));
    assert_eq!(table.exchanges(26).begun, 1);
    assert!(!tries(&mut limits, ms(104), 26), "that was long ago");
    let many: Vec<IpAddr> = (0..200).map(|at| IpAddr::from([10, 0, 1, at])).collect();
    many.chunks(PEERS_AT_ONCE).for_each(|some| arrive(&mut limits, ms(105), 0, some));
    assert_eq!(limits.shaper().heard(), MAX_HEARD);
}

#[test]
fn gates_without_an_agent_open_in_the_end() {
    let (folder, table) = gated("alone", 0);
    let mut limits = folder.limits();
    let followed = table.rates().clock().read_at;
    let at = |ms: u64| {
        // At 60 ms after a time, so that it is closed.
        let period = GATE.period_ns;
        let from = (followed + Duration::from_millis(ms)).as_nanos() / period * period;
        Time::from_nanos(from + GATE.shift_ns + 60_000_000)
    };
    assert!(!tries(&mut limits, at(59_000), 26));
    assert!(tries(&mut limits, at(60_200), 26));
    table.follow_clock();
    assert_eq!(table.gate(26), Some(GATE), "it is still there for an agent that comes back");
}

#[test]
fn a_gate_follows_a_clock_that_is_set() {
    let (folder, table) = gated("stepped", 0);
    let mut limits = folder.limits();
    assert!(!tries(&mut limits, ms(140), 26));
    // It was to begin at 230; 200 is now 230. Who waits notices when it looks.
    table.set_unix_offset(30_000_000);
    let at = limits.next_wakeup().expect("it waits");
    assert!(at <= ms(140) + LOOK_EVERY);
    assert_eq!(begins(&mut limits, at).0, ms(200));
    // Monotonic time may be ahead of Unix time, too.
    table.set_unix_offset(0u64.wrapping_sub(45_000_000));
    assert_eq!(begins(&mut limits, ms(300)).0, ms(375));
}

#[test]
fn processes_begin_an_exchange_together() {
    let (folder, table) = gated("processes", 0);
    let mut all: Vec<RateLimits> = (0..5).map(|_| folder.limits()).collect();
    for (at, limits) in (150..).zip(&mut all) {
        assert!(!tries(limits, ms(at), 26));
    }
    // One is on time. The others are woken late, each in its exchange.
    for (at, limits) in [231, 240, 255, 270, 288].into_iter().zip(&mut all) {
        assert!(tries(limits, ms(at), 26), "{at} ms");
    }
    // From the first that waited to the first that sent.
    assert_eq!(table.exchanges(26), Exchanges { begun: 1, waited_ns: 81_000_000, late: 1 });
    assert!(all.iter_mut().all(|limits| !tries(limits, ms(320), 26)));
}

/// Processes read their clocks at the beginning of a round, and write what they send at its end.
#[test]
fn who_read_its_clock_before_another_wrote_is_in_the_same_exchange() {
    let (folder, table) = gated("behind", 0);
    let (mut ahead, mut behind) = (folder.limits(), folder.limits());
    for at in (130..200).step_by(10) {
        assert!(tries(&mut ahead, ms(at + 1), 26));
        assert!(tries(&mut behind, ms(at), 26), "{at} ms");
    }
    assert_eq!(table.exchanges(26), Exchanges { begun: 1, waited_ns: 0, late: 0 });
    let active_at = folder.buckets().get().0[26].exchanges.active_at.get();
    assert_eq!(active_at, ms(191).as_nanos(), "it never goes back");
}

#[test]
fn impossible_instants_and_waits_of_the_dead_are_not_believed() {
    let (folder, table) = gated("believed", 0);
    let mut limits = folder.limits();
    let buckets = folder.buckets();
    let words = &buckets.get().0[26].exchanges;
    words.active_at.set(u64::MAX);
    assert!(!tries(&mut limits, ms(160), 26), "nothing is active in the future");
    assert!(tries(&mut limits, ms(230), 26));
    words.held_at.set(u64::MAX);
    assert_eq!(begins(&mut limits, ms(320)).0, ms(330));
    // Somebody waits and is killed; the next one is on time much later.
    assert!(!tries(&mut folder.limits(), ms(380), 26));
    assert!(tries(&mut limits, ms(930), 26));
    let Exchanges { begun, waited_ns, late } = table.exchanges(26);
    assert_eq!((begun, late), (3, 1));
    assert_eq!(waited_ns, 10_000_000);
}

#[test]
fn whoever_is_not_seen_waits_a_tenth_of_its_periods_at_most() {
    let (folder, table) = gated("unseen", 0);
    fs::remove_file(folder.0.join("buckets")).expect("it is ours");
    fs::create_dir(folder.0.join("buckets")).expect("it is ours");
    let mut limits = folder.limits();
    // Each wants to begin 120 ms after the one before, and misses its time by 20.
    let (mut now, mut waited_ms) = (ms(140), 0);
    for round in 0..300 {
        let began = begins(&mut limits, now).0;
        let wait_ms = began.since(now).as_nanos() / 1_000_000;
        assert!(
            round >= JUDGED_EXCHANGES || wait_ms == if round == 0 { 90 } else { 80 },
            "{round}: {wait_ms}"
        );
        waited_ms += wait_ms;
        assert!(tries(&mut limits, began + Duration::from_millis(15), 26));
        now = began + Duration::from_millis(120);
    }
    assert!((90 + 31 * 80..=300 * 10 + 100).contains(&waited_ms), "{waited_ms} ms");
    assert_eq!(table.exchanges(26), Exchanges::default());
}

#[test]
fn who_was_held_back_and_is_gone_wakes_nobody() {
    let (folder, _table) = gated("gone", 0);
    let mut limits = folder.limits();
    assert!(!tries(&mut limits, ms(60), 26));
    let at = limits.next_wakeup().expect("it waits");
    // Its queue pair is destroyed meanwhile, and only receives.
    limits.lapse(at);
    assert_eq!(limits.next_wakeup(), None);
    assert!(!tries(&mut limits, at + Duration::from_millis(1), 26));
    arrive(&mut limits, at + Duration::from_millis(2), 1 << 26, &[]);
    limits.lapse(at + Duration::from_millis(3));
    assert_eq!(limits.next_wakeup(), None);
}

#[test]
fn senders_follow_to_other_buckets() {
    let (folder, table) = gated("followed", 0);
    let mut limits = folder.limits();
    assert!(tries(&mut limits, ms(130), 26));
    assert_eq!(table.exchanges(26).begun, 1);
    drop(table);
    fs::remove_file(folder.0.join("buckets")).expect("it is ours");
    // Another look, before there are others.
    assert!(tries(&mut limits, ms(230), 26));
    let table = folder.table();
    table.set_unix_offset(0);
    assert!(tries(&mut limits, ms(330), 26));
    assert_eq!(table.exchanges(26).begun, 1, "the agent sees what they do");
}

#[test]
fn gates_come_and_go_and_those_that_stay_are_left_alone() {
    let (folder, table) = gated("gates", 0);
    let mut limits = folder.limits();
    assert!(!tries(&mut limits, ms(160), 26));
    assert!(tries(&mut limits, ms(160), 27), "another job has none");
    let other = TransmissionGate { period_ns: 50_000_000, ..GATE };
    table.set_gates([
        (26, GATE),
        (27, other),
        (64, GATE),
        (28, TransmissionGate { period_ns: 0, ..GATE }),
    ]);
    assert_eq!(
        [26, 27, 28, 64].map(|dscp| table.gate(dscp)),
        [Some(GATE), Some(other), None, None]
    );
    assert!(!tries(&mut limits, ms(161), 26) && !tries(&mut limits, ms(195), 27));
    drop(table);
    let table = folder.table();
    assert_eq!(table.gate(26), Some(GATE), "it is in force without its agent");
    // What it said of the clock is, too, until the next one reads it.
    table.set_unix_offset(0);
    table.set_gates([]);
    assert!(tries(&mut limits, ms(198), 26) && !limits.watches(ms(198)));
    assert_eq!(folder.limits().admits(ms(198), &path(26), 70), 70);
}
