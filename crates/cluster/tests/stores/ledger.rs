//! The ledger in etcd under load while brains and members of etcd are killed, and a check of all
//! that clients saw.
//!
//! ```console
//! $ cargo test --release -p cluster --test stores -- ledger::a_long_storm --ignored --exact --nocapture
//! ```
//!
//! `DQUANT_ROUNDS` says how often something is killed.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cluster::brain::Cluster;
use cluster::keys::SIGNATURE_BYTES;
use cluster::store::Store;
use cluster::store::etcd::EtcdStore;
use parfait::brain::{Ask, Denial, Request, Which};
use parfait::log::{self, Batch, Book, Label, Outcome};
use parfait::network::Network;
use parfait::spread::Ecmp;
use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;
use tokio_stream::StreamExt;
use tonic::Status;
use topology::graph::Capacity;
use topology::shape::Shape;

use crate::brains::Running;
use crate::conformance::{candidate, take_lease};
use crate::history::{self, Entry, Seen};
use crate::members::Members;
use crate::members::rpc::event::EventType;
use crate::members::rpc::watch_client::WatchClient;
use crate::members::rpc::watch_request::RequestUnion;
use crate::members::rpc::{Event, WatchCreateRequest, WatchRequest, WatchResponse};
use crate::scratch::keys;

const BRAINS: usize = 3;
const CLIENTS: u64 = 12;

const PREFIX: &str = "/dquant/brain/";
const LEADER: &str = "/dquant/brain/leader";
const LOG: &str = "/dquant/brain/log/";

/// After the last kill, every request has to be answered within this.
const SETTLED: Duration = Duration::from_secs(60);

/// The next admission after the leader's lease is gone, where the members of etcd are not killed.
const TAKEOVER: Duration = Duration::from_secs(1);

fn cluster() -> Cluster {
    let shape: Shape = "leaf-spine:4x2x4".parse().expect("a shape");
    let topology = shape.build(Capacity::default()).expect("small");
    let (text, ecmp) = (String::new(), Ecmp::Even);
    Cluster { topology, text, slots: 16, reservable_ppm: 1_000_000, ecmp }
}

fn network() -> Network {
    cluster().ground().expect("connected").network
}

/// What clients, watchers and the one who kills share.
struct Storm {
    begun: Instant,
    brains: Mutex<Vec<Running>>,
    is_over: AtomicBool,
    /// When the leader's key was first seen to be gone, by revision.
    gone: Mutex<BTreeMap<i64, Duration>>,
}

impl Storm {
    fn brain(&self, place: usize) -> Running {
        self.brains.lock().expect("whole")[place % BRAINS].clone()
    }

    fn leading(&self) -> Option<usize> {
        self.brains.lock().expect("whole").iter().position(Running::is_leading)
    }
}

/// A client that has a few jobs, and repeats each request until it is answered.
async fn client(storm: Arc<Storm>, number: u64) -> Vec<Seen<Outcome>> {
    let mut random = Pcg32::new(number, 5);
    let (mut all, mut jobs, mut place) = (Vec::new(), Vec::new(), number as usize);
    for sequence in 1.. {
        if storm.is_over.load(Ordering::Relaxed) {
            break;
        }
        let is_release = jobs.len() > 3 || !jobs.is_empty() && random.next_u32().is_multiple_of(3);
        let ask = match is_release {
            true => Ask::Release { job: Which::Number(jobs.remove(0)), owner: None },
            false => Ask::Admit {
                label: Label { name: format!("job-{number}-{sequence}"), owner: String::new() },
                job: "ring:3@1G".parse().expect("a job"),
                unchanged_since: None,
            },
        };
        let request = Request { client: number, sequence, ask };
        let sent = storm.begun.elapsed();
        let outcome = loop {
            let answer = storm.brain(place).ask(request.clone(), Duration::from_secs(1)).await;
            match answer {
                Some(Ok(outcome)) => break outcome,
                Some(Err(Denial::NotLeading | Denial::Busy)) | None => {}
                Some(Err(denial)) => panic!("client {number}: {denial}"),
            }
            place += 1;
            tokio::time::sleep(Duration::from_millis(u64::from(5 + random.next_u32() % 10))).await;
        };
        if let Outcome::Admitted(job) = outcome {
            jobs.push(job);
        }
        let answered = Some((storm.begun.elapsed(), outcome));
        all.push(Seen { request: (number, sequence), sent, answered });
    }
    all
}

/// Events of keys from a revision on.
async fn watch(
    members: &Members,
    number: usize,
    prefix: &str,
    start_revision: i64,
) -> Result<tonic::Streaming<WatchResponse>, Status> {
    let (key, mut range_end) = (prefix.as_bytes().to_vec(), prefix.as_bytes().to_vec());
    *range_end.last_mut().expect("not empty") += 1;
    let create = WatchCreateRequest { key, range_end, start_revision };
    let request = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    let channel = members.connect(number).await;
    let channel = channel.map_err(|error| Status::unavailable(error.to_string()))?;
    // The member ends the watch when the requests end.
    let requests = tokio_stream::once(request).chain(tokio_stream::pending());
    let mut client = WatchClient::new(channel).max_decoding_message_size(usize::MAX);
    Ok(client.watch(requests).await?.into_inner())
}

/// Notes through one member when the leader's key goes.
async fn note_expiries(storm: Arc<Storm>, members: Arc<Members>, number: usize) {
    let mut next = 1;
    loop {
        if let Ok(mut answers) = watch(&members, number, LEADER, next).await {
            while let Ok(Some(answer)) = answers.message().await {
                for event in answer.events {
                    let revision = event.kv.as_ref().map_or(0, |key| key.mod_revision);
                    next = next.max(revision + 1);
                    if event.r#type() == EventType::Delete {
                        let now = storm.begun.elapsed();
                        storm.gone.lock().expect("whole").entry(revision).or_insert(now);
                    }
                }
            }
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// All that was ever written, in the order of revisions: etcd keeps it until it is compacted.
async fn written(members: &Members) -> Vec<Event> {
    members.put("/dquant/brain/~end", "").await;
    let mut answers = watch(members, 0, PREFIX, 1).await.expect("all is healed");
    let mut events: Vec<Event> = Vec::new();
    let is_end = |event: &Event| event.kv.as_ref().is_some_and(|key| key.key.ends_with(b"~end"));
    loop {
        let answer = answers.message().await.expect("it answers").expect("it goes on");
        assert!(!answer.canceled, "compacted");
        let is_complete = answer.events.iter().any(is_end);
        events.extend(answer.events);
        if is_complete {
            return events;
        }
    }
}

/// The batches of the log, and how often the lease was taken. Each was written while its leader had
/// the lease.
fn batches(events: &[Event]) -> (Vec<Batch>, usize) {
    let (mut batches, mut leader, mut leaders) = (Vec::new(), None, 0);
    for event in events {
        let Some(key) = &event.kv else { continue };
        let is_put = event.r#type() == EventType::Put;
        if key.key == LEADER.as_bytes() {
            leader = is_put.then_some(key.create_revision as u64);
            leaders += usize::from(is_put);
        } else if key.key.starts_with(LOG.as_bytes()) && is_put {
            let [batch] = &log::batches(&key.value[1 + SIGNATURE_BYTES..])[..] else {
                panic!("one batch a record")
            };
            assert_eq!(Some(batch.term), leader, "written by a brain without the lease");
            batches.push(batch.clone());
        }
    }
    (batches, leaders)
}

/// The outcome of every entry, and the book after the last.
fn replay(batches: &[Batch]) -> (Vec<Entry<Outcome>>, Book) {
    let (mut entries, mut book) = (Vec::new(), Book::new(network()));
    for batch in batches {
        assert_eq!(batch.first, book.next_index(), "a gap, or an entry that was replaced");
        for entry in &batch.entries {
            let outcome = book.apply(batch.term, entry).expect("it fits the ledger");
            if entry.client != 0 {
                entries.push(Entry { request: (entry.client, entry.sequence), outcome });
            }
        }
    }
    (entries, book)
}

/// What a storm came to.
#[derive(Default)]
struct Figures {
    brains_killed: usize,
    members_killed: usize,
    requests: usize,
    admissions: usize,
    leaders: usize,
    batches: usize,
    snapshots: usize,
    /// From the end of a leader's lease to the next admission.
    takeovers: Vec<Duration>,
    /// From the end of a leader, where only it was killed, to the end of its lease.
    expiries: Vec<Duration>,
    seconds: f64,
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |times: &[Duration]| {
            let mut times = times.to_vec();
            times.sort();
            let of = |place: usize| times.get(place).copied().unwrap_or_default();
            let (median, most) = (of(times.len() / 2), of(times.len().saturating_sub(1)));
            format!("{median:.2?} median, {most:.2?} most, of {}", times.len())
        };
        let Figures { brains_killed, members_killed, requests, admissions, leaders, .. } = self;
        writeln!(f, "{:.0} s, {CLIENTS} clients, {BRAINS} brains", self.seconds)?;
        writeln!(f, "killed: {brains_killed} leading brains, {members_killed} members of etcd")?;
        writeln!(f, "{requests} requests, {admissions} admissions, {} batches", self.batches)?;
        writeln!(f, "{leaders} times the lease was taken, {} snapshots", self.snapshots)?;
        writeln!(f, "from the kill to the end of the lease: {}", list(&self.expiries))?;
        write!(f, "from the end of the lease to the next admission: {}", list(&self.takeovers))
    }
}

/// Three brains, and who kills them and members of etcd.
struct Killer {
    storm: Arc<Storm>,
    members: Arc<Members>,
    random: Pcg32,
    next_brain: u64,
    figures: Figures,
    /// When brains alone were killed.
    kills: Vec<Duration>,
}

impl Killer {
    fn brain(&mut self) -> Running {
        self.next_brain += 1;
        let store = EtcdStore::new(&self.members.config(), &keys()).expect("valid");
        Running::start(store, cluster(), self.next_brain)
    }

    async fn pause(&mut self) {
        let pause = 500 + u64::from(self.random.next_u32() % 1500);
        tokio::time::sleep(Duration::from_millis(pause)).await;
    }

    /// Waits until a brain leads, and says which.
    async fn leader(&self) -> usize {
        let begun = Instant::now();
        loop {
            if let Some(leading) = self.storm.leading() {
                return leading;
            }
            assert!(begun.elapsed() < SETTLED, "no brain leads");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn kill_leader(&mut self) -> usize {
        let place = self.leader().await;
        self.storm.brain(place).kill();
        self.figures.brains_killed += 1;
        place
    }

    async fn replace(&mut self, place: usize) {
        self.pause().await;
        let next = self.brain();
        self.storm.brains.lock().expect("whole")[place] = next;
        self.leader().await;
    }

    async fn kill_member(&mut self, number: usize) {
        self.members.kill(number);
        self.figures.members_killed += 1;
    }

    /// One kill, or two at once.
    async fn round(&mut self, round: usize) {
        let member = round / 3 % 3;
        match round % 3 {
            0 => {
                let place = self.kill_leader().await;
                self.kills.push(self.storm.begun.elapsed());
                self.leader_again(place).await;
                self.replace(place).await;
            }
            1 => {
                self.kill_member(member).await;
                self.pause().await;
                self.members.restart(member);
            }
            _ => {
                self.kill_member(member).await;
                let place = self.kill_leader().await;
                self.replace(place).await;
                self.members.restart(member);
            }
        }
        self.members.wait().await;
        self.pause().await;
    }

    /// Waits until another brain than the one that was killed leads.
    async fn leader_again(&self, killed: usize) {
        while self.leader().await == killed {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Runs a storm and checks it.
async fn storm(rounds: usize) -> Option<Figures> {
    let members = Arc::new(Members::start(3, &[]).await?);
    let storm = Arc::new(Storm {
        begun: Instant::now(),
        brains: Mutex::default(),
        is_over: AtomicBool::new(false),
        gone: Mutex::default(),
    });
    let mut killer = Killer {
        storm: Arc::clone(&storm),
        members: Arc::clone(&members),
        random: Pcg32::new(rounds as u64, 9),
        next_brain: 100,
        figures: Figures::default(),
        kills: Vec::new(),
    };
    let brains = (0..BRAINS).map(|_| killer.brain()).collect();
    *storm.brains.lock().expect("whole") = brains;
    let watchers: Vec<_> = (0..3)
        .map(|number| tokio::spawn(note_expiries(Arc::clone(&storm), Arc::clone(&members), number)))
        .collect();
    killer.leader().await;
    let clients: Vec<_> =
        (1..=CLIENTS).map(|number| tokio::spawn(client(Arc::clone(&storm), number))).collect();
    for round in 0..rounds {
        killer.round(round).await;
        println!("round {} of {rounds} at {:.1?}", round + 1, storm.begun.elapsed());
    }
    storm.is_over.store(true, Ordering::Relaxed);
    let mut seen = Vec::new();
    for client in clients {
        let all = tokio::time::timeout(SETTLED, client).await;
        seen.extend(all.expect("every request is answered").expect("no client panics"));
    }
    for place in 0..BRAINS {
        storm.brain(place).kill();
    }
    let mut figures = killer.figures;
    figures.seconds = storm.begun.elapsed().as_secs_f64();
    judge(&members, &seen, &mut figures).await;
    for watcher in watchers {
        watcher.abort();
    }
    let gone: Vec<Duration> = storm.gone.lock().expect("whole").values().copied().collect();
    measure(&gone, &killer.kills, &seen, &mut figures);
    Some(figures)
}

/// Compares what clients saw with what was written, and that with what a new brain finds.
async fn judge(members: &Members, seen: &[Seen<Outcome>], figures: &mut Figures) {
    let events = tokio::time::timeout(SETTLED, written(members)).await.expect("etcd answers");
    let (batches, leaders) = batches(&events);
    let (entries, book) = replay(&batches);
    history::check(&entries, seen).unwrap_or_else(|violated| panic!("{violated}"));
    let store = EtcdStore::new(&members.config(), &keys()).expect("valid");
    let term = take_lease(&store, &candidate(1)).await;
    let image = store.open(term, 1).await.expect("it leads");
    let (found, _) = Book::recover(network(), &image.snapshot, &image.log).expect("whole");
    assert!(found.same_as(&book), "a new brain finds what the log says");

    let is_admission =
        |seen: &&Seen<Outcome>| matches!(&seen.answered, Some((_, Outcome::Admitted(_))));
    figures.requests = seen.len();
    figures.admissions = seen.iter().filter(is_admission).count();
    (figures.leaders, figures.batches) = (leaders, batches.len());
    figures.snapshots = events
        .iter()
        .filter_map(|event| event.kv.as_ref())
        .filter(|key| key.key.ends_with(b"/snapshot"))
        .count();
}

/// How long takeovers took of leaders that were killed while etcd was whole.
fn measure(gone: &[Duration], kills: &[Duration], seen: &[Seen<Outcome>], figures: &mut Figures) {
    let admitted = seen.iter().filter_map(|seen| match &seen.answered {
        Some((at, Outcome::Admitted(_))) => Some(*at),
        _ => None,
    });
    let mut admitted: Vec<_> = admitted.collect();
    admitted.sort();
    for kill in kills {
        let Some(expired) = gone.iter().find(|gone| *gone > kill) else { continue };
        let Some(next) = admitted.iter().find(|admitted| *admitted > expired) else { continue };
        figures.expiries.push(*expired - *kill);
        figures.takeovers.push(*next - *expired);
    }
}

/// One leading brain, one member, and both at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_storm() {
    let Some(figures) = storm(3).await else { return };
    println!("{figures}");
    assert!(figures.admissions > 0 && figures.leaders > 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "30 rounds take three minutes; a short one runs always"]
async fn a_long_storm() {
    let rounds = std::env::var("DQUANT_ROUNDS").map_or(30, |text| text.parse().expect("a number"));
    let Some(figures) = storm(rounds).await else { return };
    println!("{figures}");
    assert!(figures.snapshots > 0 && figures.leaders > rounds / 2);
    let most = figures.takeovers.iter().max().expect("brains were killed");
    assert!(*most <= TAKEOVER, "the next admission came {most:?} after the lease's end");
}
