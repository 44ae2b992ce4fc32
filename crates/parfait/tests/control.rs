//! One agent and one brain by themselves: what they refuse and count.

use fabric::shape::Shape;
use fabric::topology::Capacity;
use parfait::agent::{
    Agent, Command, MAX_SHARES, Measure, Objection, Position, Reply, Saved, Share, Step,
};
use parfait::brain::{
    Ask, Brain, Config, Denial, Effect, Image, Lease, MAX_WAITING, Request, State, StorageError,
};
use parfait::demand::Abstraction;
use parfait::job::Latency;
use parfait::log::{MAX_CLIENTS, Outcome};
use parfait::network::{Network, Routing};
use parfait::spread::Ecmp;

fn share(job: u64, out_bps: u64) -> Share {
    Share { job, out_bps, in_bps: 1, burst_bytes: 64_000, latency: Latency::Normal }
}

fn command(term: u64, sequence: u64, plan: Vec<Share>) -> Command {
    Command { position: Position { term, sequence }, plan }
}

/// The agent's answer to a command that it enforces if asked to.
fn tell(agent: &mut Agent, command: Command) -> Reply {
    match agent.handle_command(command, 5) {
        Step::Answer(reply) => reply,
        Step::Enforce => agent.enforced(true),
    }
}

#[test]
fn an_agent_follows_positions_and_answers_repetitions_the_same() {
    let mut agent = Agent::new(100, Saved::default());
    assert_eq!((agent.report(), agent.silent_ns(9)), (None, None));
    assert_eq!(tell(&mut agent, command(4, 2, vec![share(1, 60)])).verdict, Ok(()));
    let first = tell(&mut agent, command(4, 3, vec![share(1, 50), share(2, 50)]));
    assert_eq!(first.verdict, Ok(()));
    assert_eq!(
        tell(&mut agent, command(4, 3, vec![share(9, 1)])),
        first,
        "its plan is not looked at again"
    );
    assert_eq!(agent.plan().len(), 2);
    assert_eq!(
        tell(&mut agent, command(4, 2, vec![])).verdict,
        Err(Objection::Overtaken { seen: 3 })
    );
    assert_eq!(
        tell(&mut agent, command(3, 9, vec![])).verdict,
        Err(Objection::LowerTerm { seen: 4 })
    );
    assert_eq!(tell(&mut agent, command(5, 1, vec![share(2, 7)])).verdict, Ok(()));

    let mut agent = Agent::new(100, agent.saved().clone());
    assert_eq!(
        tell(&mut agent, command(4, 7, vec![])).verdict,
        Err(Objection::LowerTerm { seen: 5 })
    );
    assert_eq!(agent.plan(), [share(2, 7)], "it stays in force, however long nobody is heard");
    assert_eq!(agent.counters().lower_term, 1);
}

#[test]
fn an_agent_keeps_its_plan_when_the_next_one_is_impossible_or_fails() {
    let mut agent = Agent::new(100, Saved::default());
    tell(&mut agent, command(1, 1, vec![share(1, 60)]));
    let many = (0..=MAX_SHARES as u64).map(|job| share(job, 0)).collect();
    let impossible = [
        (
            vec![share(1, 60), share(2, 41)],
            Objection::Overbooked { planned_bps: 101, port_bps: 100 },
        ),
        (
            vec![share(1, u64::MAX), share(2, u64::MAX)],
            Objection::Overbooked { planned_bps: u64::MAX, port_bps: 100 },
        ),
        (vec![share(2, 1), share(2, 1)], Objection::Unsorted(2)),
        (many, Objection::TooManyJobs(MAX_SHARES + 1)),
    ];
    for ((plan, objection), sequence) in impossible.into_iter().zip(2..) {
        for _ in 0..2 {
            let reply = tell(&mut agent, command(1, sequence, plan.clone()));
            assert_eq!(reply.verdict, Err(objection));
        }
        assert_eq!(agent.plan(), [share(1, 60)]);
    }
    assert_eq!((agent.counters().impossible, agent.counters().repeated), (4, 4));
    assert_eq!(agent.handle_command(command(1, 9, vec![share(3, 3)]), 6), Step::Enforce);
    assert_eq!(agent.enforced(false).verdict, Err(Objection::NotEnforced));
    assert_eq!(agent.plan(), [share(1, 60)]);

    agent.measure(1, 55);
    agent.measure(3, 55);
    let report = agent.report().expect("it had commands");
    assert_eq!(report.measures, [Measure { job: 1, out_bps: 55 }]);
    assert_eq!((agent.counters().unknown_jobs, agent.silent_ns(10)), (1, Some(4)));
}

fn brain() -> Brain {
    let shape: Shape = "leaf-spine:3x2x2".parse().expect("a shape");
    let topology = shape.build(Capacity::default()).expect("small");
    let routing = Routing::Ecmp(Ecmp::Even);
    let network =
        Network::new(&topology, 4, routing, |_, link| link.capacity.rate_bps).expect("connected");
    let config = Config {
        holder: 7,
        lease_ns: 1000,
        claim_every_ns: 300,
        resend_ns: 100,
        storage_timeout_ns: 500,
        snapshot_bytes: 1 << 20,
        abstraction: Abstraction::Parfait,
        iterations: 8,
    };
    Brain::new(config, network)
}

fn drain(brain: &mut Brain) -> Vec<Effect> {
    std::iter::from_fn(|| brain.poll_effect()).collect()
}

fn ticket_of(effects: &[Effect]) -> u64 {
    let ticket = effects.iter().find_map(|effect| match effect {
        Effect::Claim { ticket } | Effect::Open { ticket, .. } | Effect::Sync { ticket, .. } => {
            Some(*ticket)
        }
        _ => None,
    });
    ticket.expect("a claim, an opening or a sync")
}

/// A brain that has the lease and asks for the log.
fn opening() -> (Brain, u64) {
    let mut brain = brain();
    brain.handle_timeout(10);
    let claim = ticket_of(&drain(&mut brain));
    brain.handle_lease(claim, Lease { holder: 7, term: 4 }, 20);
    assert_eq!(brain.state(), State::Opening);
    let open = ticket_of(&drain(&mut brain));
    (brain, open)
}

fn leading() -> Brain {
    let (mut brain, open) = opening();
    brain.handle_opened(open, Ok(Image::default()), 30);
    let sync = ticket_of(&drain(&mut brain));
    brain.handle_stored(sync, Ok(()), 40);
    assert_eq!(brain.state(), State::Leading);
    let effects = drain(&mut brain);
    assert_eq!(effects.iter().filter(|effect| matches!(effect, Effect::Send { .. })).count(), 6);
    brain
}

fn request(client: u64, sequence: u64, job: &str) -> Request {
    Request { client, sequence, ask: Ask::Admit(job.parse().expect("a job")) }
}

fn answers(effects: &[Effect]) -> Vec<(u64, Result<Outcome, Denial>)> {
    let answer = |effect: &Effect| match effect {
        Effect::Answer { client, answer, .. } => Some((*client, answer.clone())),
        _ => None,
    };
    effects.iter().filter_map(answer).collect()
}

#[test]
fn a_brain_answers_when_it_is_durable_and_says_why_a_job_does_not_fit() {
    let mut brain = leading();
    brain.handle_request(request(1, 1, "ring:4@10G slots=2"), 50);
    let effects = drain(&mut brain);
    assert_eq!(answers(&effects), []);
    brain.handle_request(request(1, 1, "ring:4@10G slots=2"), 51);
    brain.handle_request(request(2, 1, "ring:40@10G"), 52);
    assert_eq!(drain(&mut brain), []);
    brain.handle_stored(ticket_of(&effects), Ok(()), 60);
    let effects = drain(&mut brain);
    assert_eq!(answers(&effects), [(1, Ok(Outcome::Admitted(1)))]);
    brain.handle_stored(ticket_of(&effects), Ok(()), 70);
    let reason = "all hosts together have 16 free slots, and 40 are needed".to_string();
    assert_eq!(answers(&drain(&mut brain)), [(2, Ok(Outcome::Refused(reason)))]);
    brain.handle_request(request(1, 1, "ring:4@10G slots=2"), 80);
    assert_eq!(answers(&drain(&mut brain)), [(1, Ok(Outcome::Admitted(1)))]);
    brain.handle_request(request(1, 0, "ring:4@10G"), 80);
    assert_eq!(answers(&drain(&mut brain)), [(1, Err(Denial::Stale { last: 1 }))]);
    assert_eq!((brain.counters().repeated, brain.counters().stale), (2, 1));
}

#[test]
fn a_flood_is_denied_and_counted() {
    let mut idle = brain();
    idle.handle_request(request(1, 1, "ring:2@1G"), 1);
    assert_eq!(answers(&drain(&mut idle)), [(1, Err(Denial::NotLeading))]);

    let mut brain = leading();
    brain.handle_request(request(0, 1, "ring:2@1G"), 50);
    assert_eq!(answers(&drain(&mut brain)), [(0, Err(Denial::NoClient))]);
    for client in 1..=MAX_WAITING as u64 + 3 {
        brain.handle_request(request(client, 1, "ring:2@1G"), 50);
    }
    // The first one is being stored.
    let effects = drain(&mut brain);
    assert_eq!(answers(&effects).len(), 2);
    assert!(answers(&effects).iter().all(|(_, answer)| *answer == Err(Denial::Busy)));
    assert_eq!(brain.counters().busy, 2);

    let mut effects = effects;
    let mut client = 5000;
    let denied = loop {
        brain.handle_stored(ticket_of(&effects), Ok(()), 60);
        for _ in 0..64 {
            client += 1;
            brain.handle_request(request(client, 1, "ring:2@1G"), 60);
        }
        effects = drain(&mut brain);
        if let Some((_, denied)) = answers(&effects)
            .into_iter()
            .find(|(_, answer)| answer.is_err() && *answer != Err(Denial::Busy))
        {
            break denied;
        }
    };
    assert_eq!(denied, Err(Denial::TooManyClients));
    let (book, _) = brain.book().expect("it leads");
    assert!(book.clients().len() <= MAX_CLIENTS);
}

#[test]
fn a_brain_that_loses_the_log_answers_nothing_and_writes_no_more() {
    for (error, state) in [
        (StorageError::Fenced, State::Standby),
        (StorageError::Full, State::Opening),
        (StorageError::Unavailable, State::Opening),
    ] {
        let mut brain = leading();
        brain.handle_request(request(1, 1, "ring:2@1G"), 50);
        let sync = ticket_of(&drain(&mut brain));
        brain.handle_request(request(2, 1, "ring:2@1G"), 55);
        brain.handle_stored(sync, Err(error), 60);
        assert_eq!(brain.state(), state);
        assert_eq!(
            drain(&mut brain),
            [Effect::Answer { client: 2, sequence: 1, answer: Err(Denial::NotLeading) }]
        );
        let counters = brain.counters();
        assert_eq!(counters.fenced + counters.storage_failed, 1);
    }
    let mut brain = leading();
    brain.handle_timeout(1500);
    assert_eq!((brain.state(), brain.counters().leases_lost), (State::Standby, 1));
}

#[test]
fn a_brain_that_cannot_read_the_log_leaves_the_lease_to_others() {
    let (mut brain, open) = opening();
    // Version 2, an empty batch.
    let header = [20, 0, 0, 0, 2, 0, 0, 0];
    let body = [0; 20];
    let log = [&header[..], &crc(&[&header[..], &body].concat()).to_le_bytes(), &body].concat();
    brain.handle_opened(open, Ok(Image { snapshot: Vec::new(), log }), 30);
    assert_eq!((brain.state(), brain.counters().logs_refused), (State::Standby, 1));
    assert!(brain.last_error().expect("refused").to_string().contains("of version 2"));
    brain.handle_timeout(4000);
    assert_eq!(drain(&mut brain), [], "longer than a lease");
    brain.handle_timeout(30 + 300 + 4000);
    assert!(matches!(drain(&mut brain)[..], [Effect::Claim { .. }]));
}

/// CRC-32 as of IEEE 802.3, bit by bit.
fn crc(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

#[test]
fn a_lying_agent_is_counted() {
    let mut brain = leading();
    let (plan, is_answered) = brain.plan(0).expect("it leads");
    assert!(plan.is_empty() && !is_answered);
    let position = Position { term: 4, sequence: 1 };
    let measures = vec![Measure { job: 9, out_bps: u64::MAX }; 3];
    brain.handle_reply(0, Reply { position, verdict: Ok(()), measures: measures.clone() });
    assert_eq!(brain.plan(0), Some((&[][..], true)));
    assert!(brain.measures(0).is_empty());
    brain.handle_reply(99, Reply { position, verdict: Ok(()), measures: measures.clone() });
    let future = Position { term: 5, sequence: 1 };
    brain.handle_reply(1, Reply { position: future, verdict: Ok(()), measures });
    assert_eq!((brain.counters().implausible, brain.counters().strays), (3, 2));
    assert_eq!(brain.plan(1), Some((&[][..], false)));
}
