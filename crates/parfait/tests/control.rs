//! One agent and one brain by themselves: what they refuse and count.

use std::collections::{BTreeMap, BTreeSet};

use parfait::agent::{
    Agent, Command, MAX_SHARES, MAX_STEP, Measure, Objection, Phase, Position, Reply, Saved, Share,
    Step,
};
use parfait::brain::{
    Ask, Brain, Config, Denial, Effect, Image, Lease, MAX_WAITING, Request, State, StorageError,
    Which,
};
use parfait::demand::Abstraction;
use parfait::job::Latency;
use parfait::log::{Held, Label, LogError, MAX_CLIENTS, Outcome, Reason, Refused};
use parfait::network::{Network, Routing};
use parfait::queues::Dscp;
use parfait::repair_log::Part;
use parfait::site::{Ground, Site};
use parfait::spread::Ecmp;
use parfait::staggering::Alone;
use topology::graph::{Capacity, NodeId};
use topology::shape::Shape;

fn share(job: u64, bps: u64) -> Share {
    let dscp = Dscp::new(1 + (job % 40) as u8).expect("a code point for jobs");
    Share { port: 1, job, dscp, bps, burst_bytes: 64_000, latency: Latency::Normal, phase: None }
}

/// One whose two ports carry so much each.
fn agent(port_bps: u64, saved: Saved) -> Agent {
    Agent::new([(1, port_bps), (2, port_bps)].into(), saved)
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
    let mut agent = agent(100, Saved::default());
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

    let mut agent = self::agent(100, agent.saved().clone());
    assert_eq!(
        tell(&mut agent, command(4, 7, vec![])).verdict,
        Err(Objection::LowerTerm { seen: 5 })
    );
    assert_eq!(agent.plan(), [share(2, 7)], "it stays in force, however long nobody is heard");
    assert_eq!(agent.counters().lower_term, 1);
}

#[test]
fn an_agent_that_starts_again_judges_a_refused_plan_anew() {
    let mut agent = agent(10, Saved::default());
    assert_eq!(tell(&mut agent, command(4, 1, vec![share(1, 6)])).verdict, Ok(()));
    let too_much = command(4, 2, vec![share(1, 60)]);
    assert!(tell(&mut agent, too_much.clone()).verdict.is_err());
    assert!(tell(&mut agent, too_much.clone()).verdict.is_err());
    assert_eq!(agent.plan(), [share(1, 6)]);

    // Its operator has corrected what its port carries.
    let mut agent = self::agent(100, agent.saved().clone());
    assert_eq!((agent.report(), agent.plan()), (None, &[share(1, 6)][..]));
    assert_eq!(
        tell(&mut agent, command(4, 1, vec![])).verdict,
        Err(Objection::Overtaken { seen: 2 })
    );
    assert_eq!(tell(&mut agent, too_much).verdict, Ok(()));
    assert_eq!(agent.plan(), [share(1, 60)]);
}

#[test]
fn an_agent_is_not_shut_out_by_a_damaged_term_or_sequence() {
    let mut agent = agent(100, Saved::default());
    assert_eq!(tell(&mut agent, command(4, 1, vec![share(1, 60)])).verdict, Ok(()));
    for (term, sequence, seen) in [
        (u64::MAX, u64::MAX, 4),
        (4 + MAX_STEP + 1, 1, 4),
        (4, u64::MAX, 1),
        (4, 1 + MAX_STEP + 1, 1),
        (5, MAX_STEP + 1, 0),
    ] {
        let refused = tell(&mut agent, command(term, sequence, vec![])).verdict;
        assert_eq!(refused, Err(Objection::Leap { seen }), "{term} {sequence}");
        assert_eq!(agent.plan(), [share(1, 60)]);
    }
    assert_eq!(agent.counters().leaps, 5);
    assert_eq!(tell(&mut agent, command(4, 2, vec![share(2, 7)])).verdict, Ok(()));
    assert_eq!(tell(&mut agent, command(5, MAX_STEP, vec![share(3, 7)])).verdict, Ok(()));
    assert_eq!(tell(&mut agent, command(5 + MAX_STEP, 1, vec![])).verdict, Ok(()));
}

#[test]
fn an_agent_keeps_its_plan_when_the_next_one_is_impossible_or_fails() {
    let mut agent = agent(100, Saved::default());
    tell(&mut agent, command(1, 1, vec![share(1, 60)]));
    let never = Some(Phase { period_ns: 5, shift_ns: 5, exchange_ns: 1 });
    let many = (0..=MAX_SHARES as u64).map(|job| share(job, 0)).collect();
    let impossible = [
        (
            vec![share(1, 60), share(2, 41)],
            Objection::Overbooked { port: 1, planned_bps: 101, port_bps: 100 },
        ),
        (
            vec![share(1, u64::MAX), share(2, u64::MAX)],
            Objection::Overbooked { port: 1, planned_bps: u64::MAX, port_bps: 100 },
        ),
        (vec![share(2, 1), share(2, 1)], Objection::Unsorted(2)),
        (vec![share(1, 1), Share { port: 3, ..share(1, 1) }], Objection::NoPort(3)),
        (vec![share(1, 1), Share { phase: never, ..share(2, 1) }], Objection::Phase(2)),
        (
            vec![share(1, 1), share(41, 1)],
            Objection::SharedDscp { port: 1, dscp: share(1, 1).dscp },
        ),
        (many, Objection::TooManyShares(MAX_SHARES + 1)),
    ];
    for ((plan, objection), sequence) in impossible.into_iter().zip(2..) {
        for _ in 0..2 {
            let reply = tell(&mut agent, command(1, sequence, plan.clone()));
            assert_eq!(reply.verdict, Err(objection));
        }
        assert_eq!(agent.plan(), [share(1, 60)]);
    }
    assert_eq!((agent.counters().impossible, agent.counters().repeated), (7, 7));
    assert_eq!(agent.handle_command(command(1, 9, vec![share(3, 3)]), 6), Step::Enforce);
    assert_eq!(agent.enforced(false).verdict, Err(Objection::NotEnforced));
    assert_eq!(agent.plan(), [share(1, 60)]);

    let both = [share(1, 60), Share { port: 2, ..share(1, 60) }];
    tell(&mut agent, command(1, 10, both.to_vec()));
    assert_eq!(agent.plan(), both, "each port carries 100");
    let measure = |port, job| Measure { port, job, bps: 55, ..Measure::default() };
    agent.measure(measure(2, 1));
    agent.measure(measure(1, 3));
    let report = agent.report().expect("it had commands");
    assert_eq!(report.measures, [measure(2, 1)]);
    tell(&mut agent, command(1, 11, vec![share(1, 60)]));
    assert_eq!(agent.report().expect("it had commands").measures, [], "not in the plan any more");
    assert_eq!((agent.counters().unknown_jobs, agent.silent_ns(10)), (1, Some(5)));
}

fn brain() -> Brain {
    let shape: Shape = "leaf-spine:3x2x2".parse().expect("a shape");
    let topology = shape.build(Capacity::default()).expect("small");
    let routing = Routing::Ecmp(Ecmp::Even);
    let network =
        Network::new(&topology, 4, routing, |_, link| link.capacity.rate_bps).expect("connected");
    brain_on(network.into())
}

fn brain_on(ground: Ground) -> Brain {
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
    Brain::new(config, ground, &[])
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
    opened_by(brain())
}

fn opened_by(mut brain: Brain) -> (Brain, u64) {
    brain.handle_timeout(10);
    let claim = ticket_of(&drain(&mut brain));
    brain.handle_lease(claim, Lease { holder: 7, term: 4 }, 20);
    assert_eq!(brain.state(), State::Opening);
    let open = ticket_of(&drain(&mut brain));
    (brain, open)
}

fn leading() -> Brain {
    led_by(brain())
}

/// One that leads, and has sent each host its empty plan.
fn led_by(brain: Brain) -> Brain {
    let (mut brain, open) = opened_by(brain);
    brain.handle_opened(open, Ok(Image::default()), 30);
    let sync = ticket_of(&drain(&mut brain));
    brain.handle_stored(sync, Ok(()), 40);
    assert_eq!(brain.state(), State::Leading);
    let sent = drain(&mut brain);
    let sent = sent.iter().filter(|effect| matches!(effect, Effect::Send { .. })).count();
    assert_eq!(sent, brain.network().hosts() as usize);
    brain
}

/// One on a topology, so that it knows what is down.
fn leading_on(shape: &str, slots: u32) -> Brain {
    let shape: Shape = shape.parse().expect("a shape");
    let topology = shape.build(Capacity::default()).expect("small");
    let site = Site { topology, slots, ecmp: Ecmp::Even, reservable_ppm: 1_000_000 };
    led_by(brain_on(Ground::new(site).expect("connected")))
}

fn request(client: u64, sequence: u64, job: &str) -> Request {
    let label = Label { name: format!("job-{client}-{sequence}"), owner: "ada".to_string() };
    let job = job.parse().expect("a job");
    Request { client, sequence, ask: Ask::Admit { label, job, unchanged_since: None } }
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
    let text = "all hosts together have 16 free slots, and 40 are needed".to_string();
    assert_eq!(answers(&drain(&mut brain)), [(2, Ok(Outcome::Refused(text.into())))]);
    brain.handle_request(request(1, 1, "ring:4@10G slots=2"), 80);
    assert_eq!(answers(&drain(&mut brain)), [(1, Ok(Outcome::Admitted(1)))]);
    brain.handle_request(request(1, 0, "ring:4@10G"), 80);
    assert_eq!(answers(&drain(&mut brain)), [(1, Err(Denial::Stale { last: 1 }))]);
    assert_eq!((brain.counters().repeated, brain.counters().stale), (2, 1));
}

#[test]
fn two_waiting_requests_of_a_client_in_the_wrong_order_are_both_answered() {
    let mut brain = leading();
    brain.handle_request(request(2, 1, "ring:2@1G"), 50);
    let first = drain(&mut brain);
    brain.handle_request(request(1, 2, "ring:2@1G"), 51);
    brain.handle_request(request(1, 1, "ring:2@1G"), 52);
    assert_eq!(drain(&mut brain), []);
    brain.handle_stored(ticket_of(&first), Ok(()), 60);
    let second = drain(&mut brain);
    let stale = (1, Err(Denial::Stale { last: 2 }));
    assert!(answers(&second).contains(&stale), "{second:?}");
    brain.handle_stored(ticket_of(&second), Ok(()), 70);
    assert!(matches!(answers(&drain(&mut brain))[..], [(1, Ok(Outcome::Admitted(_)))]));
}

#[test]
fn a_write_has_no_more_requests_once_deciding_them_took_long() {
    let mut brain = leading();
    brain.handle_request(request(9, 1, "ring:2@1G"), 50);
    let mut effects = drain(&mut brain);
    for client in 1..=3 {
        brain.handle_request(request(client, 1, "ring:1000000@1G"), 50 + client);
    }
    for client in 4..=6 {
        brain.handle_request(request(client, 1, "ring:2@1G"), 50 + client);
    }
    for client in 7..=8 {
        let ask = Ask::Defragment { most_moved: 1 };
        brain.handle_request(Request { client, sequence: 1, ask }, 60);
    }
    brain.handle_request(request(10, 1, "ring:2@1G"), 60);
    let mut answered = Vec::new();
    for _ in 0..5 {
        brain.handle_stored(ticket_of(&effects), Ok(()), 60);
        effects = drain(&mut brain);
        answered.push(answers(&effects).len());
    }
    // Two large ones; the third, small ones and the first that may take any time; the second; and
    // what is left.
    assert_eq!(answered, [1, 2, 5, 1, 1]);
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

    // Who asked longest ago is forgotten, and nobody is turned away.
    let mut effects = effects;
    for client in (5000..).step_by(64).take(MAX_CLIENTS / 64 + 40) {
        brain.handle_stored(ticket_of(&effects), Ok(()), 60);
        (client..client + 64)
            .for_each(|client| brain.handle_request(request(client, 1, "ring:2@1G"), 60));
        effects = drain(&mut brain);
    }
    assert_eq!(brain.counters().busy, 2);
    let (book, _) = brain.book().expect("it leads");
    assert_eq!(book.clients().len(), MAX_CLIENTS);
    assert!(!book.clients().contains_key(&1));
}

/// The answer to one request, once it is stored.
fn asked(brain: &mut Brain, client: u64, ask: Ask) -> Outcome {
    brain.handle_request(Request { client, sequence: 1, ask }, 50);
    let ticket = ticket_of(&drain(brain));
    brain.handle_stored(ticket, Ok(()), 60);
    let [(_, Ok(outcome))] = &answers(&drain(brain))[..] else { panic!("one answer") };
    outcome.clone()
}

#[test]
fn names_owners_and_changes_since_decide_what_is_executed() {
    let mut brain = leading();
    let admit = |name: &str, unchanged_since| {
        let label = Label { name: name.to_string(), owner: "ada".to_string() };
        Ask::Admit { label, job: "ring:4@10G".parse().expect("a job"), unchanged_since }
    };
    let Outcome::Admitted(first) = asked(&mut brain, 1, admit("resnet", None)) else {
        panic!("it fits")
    };
    let refused = |outcome| match outcome {
        Outcome::Refused(Refused { reason, text }) => (reason, text),
        other => panic!("{other:?}"),
    };
    let taken = refused(asked(&mut brain, 2, admit("resnet", None)));
    assert_eq!(taken, (Reason::NameTaken, format!("job {first} is called 'resnet' too")));
    let long = "x".repeat(65);
    for (client, bad) in (3..).zip(["", "a b", "<b>", &long, "ä"]) {
        let (reason, text) = refused(asked(&mut brain, client, admit(bad, None)));
        assert!(text.starts_with("a name has letters"), "{bad}: {text}");
        assert_eq!(reason, Reason::BadName, "{bad}");
    }
    let old = refused(asked(&mut brain, 100, admit("other", Some(0))));
    let changed = "jobs came or went since the placement was computed";
    assert_eq!(old, (Reason::Changed, changed.to_string()));
    let since = brain.book().expect("it leads").0.changed_index();
    assert!(matches!(asked(&mut brain, 101, admit("other", Some(since))), Outcome::Admitted(_)));

    let release = |owner: Option<&str>| Ask::Release {
        job: Which::Name("resnet".to_string()),
        owner: owner.map(str::to_string),
    };
    let other = refused(asked(&mut brain, 102, release(Some("bob"))));
    assert_eq!(other, (Reason::NotOwner, format!("job {first} belongs to 'ada'")));
    assert_eq!(
        asked(&mut brain, 103, release(Some("ada"))),
        Outcome::Released { job: first, restored: vec![] }
    );
    let none = refused(asked(&mut brain, 105, release(None)));
    assert_eq!(none, (Reason::NoJob, "there is no job 'resnet'".to_string()));
    assert!(matches!(asked(&mut brain, 104, admit("resnet", None)), Outcome::Admitted(_)));
}

#[test]
fn jobs_that_meet_on_a_link_differ_in_their_dscp() {
    let mut brain = leading();
    let admit = |client: u64| {
        let label = Label { name: format!("job{client}"), owner: String::new() };
        // A worker takes most of a host, so that none of them is alone with its peer.
        let job = "ring:2@1M slots=3".parse().expect("a job");
        Ask::Admit { label, job, unchanged_since: None }
    };
    for client in 1..=3 {
        assert!(matches!(asked(&mut brain, client, admit(client)), Outcome::Admitted(_)));
    }
    let (book, _) = brain.book().expect("it leads");
    for trunk in 0..book.ledger().network().trunks() as u32 {
        let mut seen: Vec<_> = book.on_trunk(trunk).iter().map(|one| one.dscp).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), book.on_trunk(trunk).len());
    }
    let shares =
        brain.governed().iter().filter_map(|node| brain.plan(*node)).flat_map(|plan| plan.0);
    let reserved: u64 = shares.map(|share| share.bps).sum();
    assert_eq!(reserved, 3 * 2 * 1_000_000, "each of two workers sends 1 Mbit/s");
}

#[test]
fn a_brain_leaves_a_log_that_is_not_signed_to_others_until_it_can_be_read() {
    let (mut brain, open) = opening();
    brain.handle_opened(open, Err(StorageError::Unsigned), 30);
    assert_eq!((brain.state(), brain.counters().logs_refused), (State::Standby, 1));
    assert_eq!(brain.last_error(), Some(&LogError::Unsigned));
    assert_eq!(drain(&mut brain), [], "it does not try again at once");
    let due_ns = brain.poll_timeout();
    brain.handle_timeout(due_ns);
    let claim = ticket_of(&drain(&mut brain));
    brain.handle_lease(claim, Lease { holder: 7, term: 5 }, due_ns + 1);
    let open = ticket_of(&drain(&mut brain));
    brain.handle_opened(open, Ok(Image::default()), due_ns + 2);
    let sync = ticket_of(&drain(&mut brain));
    brain.handle_stored(sync, Ok(()), due_ns + 3);
    assert_eq!((brain.state(), brain.last_error()), (State::Leading, None));
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
fn plans_have_the_times_of_jobs_that_take_turns_until_one_is_released() {
    let mut brain = leading();
    // Each on all six hosts.
    let job = "ring:6@30G slots=2 most=host:1 cycle=24ms/7ms";
    brain.handle_request(request(1, 1, job), 50);
    let sync = ticket_of(&drain(&mut brain));
    brain.handle_stored(sync, Ok(()), 60);
    drain(&mut brain);
    let phases = |brain: &Brain, job: u64| {
        let nodes = brain.governed().iter();
        let shares = nodes.flat_map(|node| brain.plan(*node).expect("it leads").0);
        let own = shares.filter(|share| share.job == job);
        own.map(|share| share.phase).collect::<Vec<Option<Phase>>>()
    };
    assert_eq!(phases(&brain, 1), [None; 6], "it is alone");
    assert_eq!(brain.stagger(1).expect("it says its cycle").phase, Err(Alone::Free));
    brain.handle_request(request(1, 2, job), 70);
    let sync = ticket_of(&drain(&mut brain));
    assert_eq!(phases(&brain, 1), [None; 6], "not durable yet");
    brain.handle_stored(sync, Ok(()), 80);
    let sent = drain(&mut brain);
    let [first, second] = [1, 2].map(|job| {
        let all = phases(&brain, job);
        assert_eq!(all, [all[0]; 6]);
        all[0].expect("they take turns")
    });
    assert_eq!((first.period_ns, first.shift_ns, first.exchange_ns), (24_480_000, 0, 7_000_000));
    assert!((7_000_000..=17_000_000).contains(&second.shift_ns), "{second:?}");
    assert_eq!(brain.stagger(2).expect("it says its cycle").with, [1]);
    let commands = |effects: &[Effect]| {
        effects.iter().filter(|effect| matches!(effect, Effect::Send { .. })).count()
    };
    assert_eq!(commands(&sent), 6);
    // A job that does not say its cycle changes nobody's time.
    brain.handle_request(request(2, 1, "ring:2@1G latency=low"), 90);
    let sync = ticket_of(&drain(&mut brain));
    brain.handle_stored(sync, Ok(()), 95);
    assert_eq!(phases(&brain, 2), [Some(second); 6]);
    drain(&mut brain);
    let ask = Ask::Release { job: Which::Number(1), owner: None };
    brain.handle_request(Request { client: 1, sequence: 3, ask }, 100);
    let sync = ticket_of(&drain(&mut brain));
    brain.handle_stored(sync, Ok(()), 110);
    assert_eq!((phases(&brain, 1), phases(&brain, 2)), (vec![], vec![None; 6]));
    assert_eq!(commands(&drain(&mut brain)), 6);
    assert_eq!(brain.stagger(2).expect("it says its cycle").phase, Err(Alone::Free));
}

#[test]
fn the_agent_of_a_host_knows_jobs_that_send_nothing_beyond_it() {
    let mut brain = leading();
    brain.handle_request(request(1, 1, "ring:2@1G"), 50);
    let sync = ticket_of(&drain(&mut brain));
    brain.handle_stored(sync, Ok(()), 60);
    let commands: Vec<Command> = drain(&mut brain)
        .into_iter()
        .filter_map(|effect| match effect {
            Effect::Send { command, .. } => Some(command),
            _ => None,
        })
        .collect();
    let [Command { plan, .. }] = &commands[..] else { panic!("{commands:?}") };
    let [Share { job: 1, bps: 0, phase: None, dscp, port, .. }] = plan[..] else {
        panic!("{plan:?}")
    };
    let held = &brain.book().expect("it leads").0.jobs()[&1];
    assert_eq!((held.pieces.len(), held.dscp, port), (1, dscp, 1), "both workers are on one host");
    // Its agent takes the plan, and forgets the job when it is over.
    let mut agent = agent(100, Saved::default());
    assert_eq!(tell(&mut agent, commands[0].clone()).verdict, Ok(()));
    assert_eq!(agent.plan().len(), 1);
    let ask = Ask::Release { job: Which::Number(1), owner: None };
    brain.handle_request(Request { client: 1, sequence: 2, ask }, 100);
    let sync = ticket_of(&drain(&mut brain));
    brain.handle_stored(sync, Ok(()), 110);
    let gone = drain(&mut brain).into_iter().any(|effect| {
        matches!(effect, Effect::Send { command: Command { plan, .. }, .. } if plan.is_empty())
    });
    assert!(gone, "the host's agent hears it");
}

/// Admits a job, and returns its number and the nodes whose agents were told.
fn admitted(brain: &mut Brain, client: u64, job: &str) -> (u64, BTreeSet<NodeId>) {
    brain.handle_request(request(client, 1, job), 50);
    let sync = ticket_of(&drain(brain));
    brain.handle_stored(sync, Ok(()), 60);
    let effects = drain(brain);
    let [(_, Ok(Outcome::Admitted(number)))] = answers(&effects)[..] else { panic!("{effects:?}") };
    (number, told(&effects))
}

fn told(effects: &[Effect]) -> BTreeSet<NodeId> {
    let node = |effect: &Effect| match effect {
        Effect::Send { node, .. } => Some(*node),
        _ => None,
    };
    effects.iter().filter_map(node).collect()
}

/// By host: its jobs, as the plan of its agent says, which accepts it.
fn known(brain: &Brain) -> BTreeMap<NodeId, BTreeSet<u64>> {
    let jobs = |node: &NodeId| {
        let plan = brain.plan(*node).expect("it leads").0.to_vec();
        let jobs = plan.iter().map(|share| share.job).collect();
        let mut agent = Agent::new(brain.network().ports_bps(*node), Saved::default());
        assert_eq!(tell(&mut agent, command(4, 1, plan)).verdict, Ok(()));
        (*node, jobs)
    };
    brain.governed().iter().map(jobs).collect()
}

/// By host: jobs with workers there.
fn placed(brain: &Brain) -> BTreeMap<NodeId, BTreeSet<u64>> {
    let mut placed: BTreeMap<NodeId, BTreeSet<u64>> =
        brain.governed().iter().map(|node| (*node, BTreeSet::new())).collect();
    for (job, Held { pieces, .. }) in brain.book().expect("it leads").0.jobs() {
        for piece in pieces {
            placed.entry(brain.network().node_of(piece.host)).or_default().insert(*job);
        }
    }
    placed
}

#[test]
fn the_agent_of_a_host_knows_more_jobs_than_there_are_dscps() {
    let all = Dscp::all().count();
    let slots = 2 * all as u32 + 20;
    let mut brain = leading_on("leaf-spine:2x1x1", slots);
    let (wide, _) = admitted(&mut brain, 1, "ring:2@1M spread=hosts:2");
    for client in 2..slots.into() {
        admitted(&mut brain, client, "ring:2@1M");
    }
    let placed = placed(&brain);
    assert!(placed.values().all(|jobs| jobs.len() > all), "{placed:?}");
    assert_eq!(known(&brain), placed);
    let (book, _) = brain.book().expect("it leads");
    let wide = book.jobs()[&wide].dscp;
    assert_eq!(book.jobs().values().filter(|held| held.dscp == wide).count(), 1, "it alone sends");
    assert!(book.clashes(|_| false).is_empty());
}

#[test]
fn jobs_of_a_host_differ_in_their_dscp_while_one_is_free() {
    let all = Dscp::all().count() as u64;
    let mut brain = leading_on("leaf-spine:2x1x1", 2 * all as u32);
    for client in 1..=2 * all {
        admitted(&mut brain, client, "ring:2@1M");
    }
    // What is tried first depends on the number of the entry.
    for (client, job) in (2 * all + 1..).zip([5, 90, 40, 70, 20]) {
        asked(&mut brain, client, Ask::Release { job: Which::Number(job), owner: None });
        admitted(&mut brain, 1000 + client, "ring:2@1M");
    }
    let (book, _) = brain.book().expect("it leads");
    for (node, jobs) in placed(&brain) {
        let dscps: BTreeSet<Dscp> = jobs.iter().map(|job| book.jobs()[job].dscp).collect();
        assert_eq!(dscps.len(), jobs.len(), "{node:?}");
    }
}

#[test]
fn agents_know_a_degraded_job_unless_one_that_sends_has_its_dscp() {
    let mut brain = leading_on("leaf-spine:4x1x1", 200);
    let (job, _) = admitted(&mut brain, 1, "ring:4@1G spread=hosts:4");
    let parts = vec![Part::Node(brain.network().node_of(3))];
    let outage = Ask::Outage { parts, is_down: true, most_moved: 100 };
    let outcome = asked(&mut brain, 2, outage);
    assert_eq!(outcome, Outcome::Repaired { hit: 1, moved: 0, degraded: 1 });
    let everywhere = placed(&brain);
    assert_eq!(known(&brain), everywhere);
    assert!(everywhere.values().all(|jobs| jobs.contains(&job)), "{everywhere:?}");
    let degraded = brain.plan(brain.network().node_of(0)).expect("it leads").0;
    assert!(matches!(degraded, [Share { bps: 0, phase: None, .. }]), "{degraded:?}");

    // With it, these have all DSCPs.
    for client in 3..Dscp::all().count() as u64 + 2 {
        admitted(&mut brain, client, "ring:2@1M spread=hosts:2");
    }
    let dscp = |brain: &Brain, job| brain.book().expect("it leads").0.jobs()[&job].dscp;
    assert_eq!(known(&brain), placed(&brain), "each has a DSCP of its own");
    let (other, nodes) = admitted(&mut brain, 100, "ring:2@1M spread=hosts:2");
    assert_eq!(dscp(&brain, other), dscp(&brain, job), "the only one that nobody sends with");
    assert!(known(&brain).values().all(|jobs| !jobs.contains(&job)), "nowhere");
    assert_eq!(nodes, everywhere.into_keys().collect(), "all hosts of the degraded job are told");
    asked(&mut brain, 101, Ask::Release { job: Which::Number(other), owner: None });
    assert_eq!(known(&brain), placed(&brain));
}

#[test]
fn a_brain_that_cannot_read_the_log_leaves_the_lease_to_others() {
    let (mut brain, open) = opening();
    // Version 99, an empty batch.
    let header = [20, 0, 0, 0, 99, 0, 0, 0];
    let body = [0; 20];
    let log = [&header[..], &crc(&[&header[..], &body].concat()).to_le_bytes(), &body].concat();
    brain.handle_opened(open, Ok(Image { snapshot: Vec::new(), log }), 30);
    assert_eq!((brain.state(), brain.counters().logs_refused), (State::Standby, 1));
    assert!(brain.last_error().expect("refused").to_string().contains("of version 99"));
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
    let hosts: Vec<_> = (0..3).map(|host| brain.network().node_of(host)).collect();
    let shape: Shape = "leaf-spine:3x2x2".parse().expect("a shape");
    let topology = shape.build(Capacity::default()).expect("small");
    let switch = topology.switches().next().expect("a switch");
    let (plan, is_answered) = brain.plan(hosts[0]).expect("it leads");
    assert!(plan.is_empty() && !is_answered);
    let position = Position { term: 4, sequence: 1 };
    let measures = vec![Measure { port: 1, job: 9, bps: u64::MAX, ..Measure::default() }; 3];
    brain.handle_reply(hosts[0], Reply { position, verdict: Ok(()), measures: measures.clone() });
    assert_eq!(brain.plan(hosts[0]), Some((&[][..], true)));
    assert!(brain.measures(hosts[0]).is_empty());
    // A switch without an agent.
    brain.handle_reply(switch, Reply { position, verdict: Ok(()), measures: measures.clone() });
    let future = Position { term: 5, sequence: 1 };
    brain.handle_reply(hosts[1], Reply { position: future, verdict: Ok(()), measures });
    assert_eq!((brain.counters().implausible, brain.counters().stale_replies), (3, 2));
    assert_eq!(brain.plan(hosts[1]), Some((&[][..], false)));
}
