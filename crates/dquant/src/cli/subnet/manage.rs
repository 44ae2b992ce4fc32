//! `dquant subnet manage`: a long-running subnet manager; the state machine is [`subnet::manager`].

mod lid_file;
mod socket;

use std::collections::VecDeque;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use clap::Args;
use lab::input;
use lab::units;
use nic::clock;
use nic::umad::{Address, Umad, UmadError};
use serde::{Deserialize, Serialize};
use service::signals::{on_end_signal, on_status_signal};
use subnet::administration::inform::InformCounters;
use subnet::administration::rmpp::RmppCounters;
use subnet::manager::event::{Event, Summary};
use subnet::manager::work::{Done, How};
use subnet::manager::{Config, Counters, Datagram, Manager, Peer};
use subnet::partitions::Partitions;

use super::super::{Console, Report};
use super::plan::Name;
use super::port::PortArgs;
use crate::exit::{CliError, Exit};
use lid_file::LidFile;
pub(super) use socket::SOCKET_PREFIX;
use socket::Socket;

/// Manage the InfiniBand subnet that this machine is connected to, until a signal ends it
///
/// Sets the fabric up and watches it: traps and light sweeps find changes, dead links are routed around by
/// writing only the table blocks that change, in an order without forwarding loops or credit loops. Takes
/// part in the election of the master: the highest priority wins, then the lowest port GUID. Ports keep
/// their LIDs; --lids keeps them across restarts. Whatever fails leaves the last good tables in place.
///
/// State changes are reported on stdout, with --json one object a line. 'dquant subnet status' asks for the
/// status, SIGUSR1 prints it here.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant subnet manage
  dquant subnet manage --priority 3 --lids /var/lib/dquant/lids
  dquant subnet manage --engine up-down --device mlx5_0 --port 1
  dquant subnet manage --partitions /etc/dquant/partitions.conf --enforce-partitions
  dquant subnet status"
)]
pub(super) struct Manage {
    #[command(flatten)]
    port: PortArgs,

    /// Routing engine: min-hop, up-down, fat-tree, dor, balanced
    ///
    /// up-down where its paths need more VLs than links have.
    #[arg(
        long,
        value_enum,
        default_value_t = Name::Balanced,
        value_name = "NAME",
        hide_possible_values = true
    )]
    engine: Name,

    /// GUIDs of the root switches for up-down, separated by commas [default: found]
    #[arg(long, value_name = "GUID", value_parser = key, value_delimiter = ',')]
    roots: Vec<u64>,

    /// Of the election, 0 to 15: the highest becomes master
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=15))]
    priority: u8,

    /// Between light sweeps
    #[arg(long, default_value = "10s", value_name = "TIME", value_parser = time)]
    interval: Duration,

    /// Between polls of the master while on standby
    #[arg(long, default_value = "1s", value_name = "TIME", value_parser = time)]
    poll: Duration,

    /// Polls without a response after which the master is replaced
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    misses: u32,

    /// LID mask control: every end port gets 2^N LIDs, on several paths
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=7))]
    lmc: u8,

    /// The M_Key that ports have; --m-key-protection sets it
    #[arg(long, default_value = "0", value_name = "KEY", value_parser = key)]
    m_key: u64,

    /// Set the M_Key: 0 guards what is set, 1 hides the key, 2 refuses all requests without it
    #[arg(long, value_name = "0..2", requires = "m_key", value_parser = clap::value_parser!(u8).range(0..=2))]
    m_key_protection: Option<u8>,

    /// How long a silent manager's protection outlasts wrong M_Keys; 0: for ever
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    m_key_lease: u16,

    /// The SM_Key of all managers of this subnet; opensm's is 1
    #[arg(long, default_value = "1", value_name = "KEY", value_parser = key)]
    sm_key: u64,

    /// Set up the partitions of this file, as in opensm's partitions.conf
    #[arg(long, value_name = "FILE")]
    partitions: Option<PathBuf>,

    /// Switches discard packets of partitions that a host is no member of
    #[arg(long, requires = "partitions")]
    enforce_partitions: bool,

    /// Keep LIDs in this file across restarts
    #[arg(long, value_name = "FILE")]
    lids: Option<PathBuf>,
}

/// A time that is not 0.
fn time(text: &str) -> Result<Duration, String> {
    let time = units::duration(text).map_err(|error| error.to_string())?;
    match Duration::from_nanos(time.as_nanos()) {
        Duration::ZERO => Err("it has to be more than 0".to_owned()),
        time => Ok(time),
    }
}

/// A key of 64 bits: `0x…` or decimal.
fn key(text: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed
        .map_err(|_| format!("'{text}' is no number of 64 bits; write it like 0x1122334455667788"))
}

/// Events that the status has.
const MAX_RECENT: usize = 10;

/// The longest wait for a datagram: signals are noticed in between.
const MOST_WAIT: Duration = Duration::from_millis(100);

/// Nodes from which on a fabric is routed in a thread of its own, while the manager goes on answering. Where paths need lanes,
/// that takes 15 s for a torus of 256 switches, and a standby takes over after 3 s of silence.
const LARGE: usize = 64;

/// The longest wait for a datagram while that thread is at work, so that its outcome does not lie around.
const WORK_WAIT: Duration = Duration::from_millis(1);

impl Manage {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        if self.m_key_protection.is_some() && self.m_key == 0 {
            return Err(CliError::usage("--m-key-protection with M_Key 0, which protects nothing")
                .hint("give all managers of the subnet the same --m-key, not 0"));
        }
        let file = self.lids.as_deref().map(LidFile::open).transpose()?;
        let lids = file.as_ref().map(|file| file.lids.clone()).unwrap_or_default();
        let partitions = self.partitions.as_deref().map(read_partitions).transpose()?;
        let umad = self.port.open_manager()?;
        let config = Config {
            engine: self.engine.engine(),
            priority: self.priority,
            interval: self.interval,
            poll: self.poll,
            misses: self.misses,
            lmc: self.lmc,
            m_key: self.m_key,
            guard: self.m_key_protection.map(|protection| (protection, self.m_key_lease)),
            sm_key: self.sm_key,
        };
        // Responses to the requests of a process before this one may still be under way.
        let transaction = clock::process_cpu().total_ns() as u32 ^ std::process::id() << 16;
        let mut manager = Manager::new(config, lids, transaction).with_roots(self.roots);
        if let Some(partitions) = partitions {
            manager = manager.with_partitions(partitions, self.enforce_partitions);
        }
        Daemon::new(manager, umad, file)?.run(console)
    }
}

/// Largest file of partitions that is read: one of 48,000 members has 1 MB.
const MAX_PARTITION_BYTES: u64 = 16 << 20;

fn read_partitions(path: &Path) -> Result<Partitions, CliError> {
    let text = input::read(path, MAX_PARTITION_BYTES)?;
    Partitions::parse(&text).map_err(|error| {
        let what = format_args!("{} {error}", path.display());
        CliError::usage(what)
            .hint("a partition is 'name=0x8001, ipoib : 0xGUID=full, ALL_CAS=limited;'")
    })
}

/// The loop between the manager and the port.
struct Daemon {
    manager: Manager,
    umad: Umad,
    file: Option<LidFile>,
    started: Instant,
    /// Nanoseconds of CPU time in the manager, without those of the library that sends and receives.
    cpu_ns: u64,
    /// Datagrams that the kernel did not take.
    failed_sends: u64,
    /// Events that could not be written to stdout.
    failed_reports: u64,
    /// The outcome of work that a thread does.
    work: Option<Receiver<(Done, u64)>>,
    /// The last events, the oldest first.
    recent: VecDeque<EventReport>,
    last_set_up: Option<LastSetUp>,
    /// None if it could not be opened.
    socket: Option<Socket>,
    is_asked_to_end: Arc<AtomicBool>,
    is_asked_for_status: Arc<AtomicBool>,
}

impl Daemon {
    fn new(manager: Manager, umad: Umad, file: Option<LidFile>) -> Result<Daemon, CliError> {
        let [is_asked_to_end, is_asked_for_status] =
            [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let end = Arc::clone(&is_asked_to_end);
        on_end_signal(move |_| end.store(true, Ordering::Relaxed))?;
        let status = Arc::clone(&is_asked_for_status);
        on_status_signal(move || status.store(true, Ordering::Relaxed))?;
        let (started, cpu_ns, work) = (Instant::now(), 0, None);
        Ok(Daemon {
            manager,
            umad,
            file,
            started,
            cpu_ns,
            failed_sends: 0,
            failed_reports: 0,
            work,
            recent: VecDeque::new(),
            last_set_up: None,
            socket: None,
            is_asked_to_end,
            is_asked_for_status,
        })
    }

    fn run(mut self, console: &mut Console) -> Result<Exit, CliError> {
        // Without it, SIGUSR1 prints the status.
        match Socket::listen() {
            Ok(socket) => self.socket = Some(socket),
            Err(error) => {
                console.error(&CliError::because("no socket for 'dquant subnet status'", &error));
            }
        }
        while !self.is_asked_to_end.load(Ordering::Relaxed) {
            self.report(console);
            self.transmit()?;
            self.work()?;
            self.receive()?;
        }
        self.report(console);
        console.report(&self.status())?;
        Ok(Exit::Good)
    }

    /// Calls the manager, and counts its CPU time.
    fn call<T>(&mut self, with: impl FnOnce(&mut Manager, Duration) -> T) -> T {
        let (now, before) = (self.started.elapsed(), clock::thread_cpu_ns());
        let result = with(&mut self.manager, now);
        self.cpu_ns += clock::thread_cpu_ns() - before;
        result
    }

    /// A full disk or a log that nobody reads is no reason to leave the fabric alone.
    fn report(&mut self, console: &mut Console) {
        while let Some(event) = self.manager.poll_event() {
            let time_ns = self.started.elapsed().as_nanos() as u64;
            let report = EventReport::new(&event, time_ns, self.cpu_ns);
            self.failed_reports += u64::from(console.report(&report).is_err());
            if let Some(set_up) = &report.set_up {
                self.last_set_up = Some(LastSetUp { time_ns, set_up: set_up.clone() });
            }
            self.recent.push_back(report);
            if self.recent.len() > MAX_RECENT {
                self.recent.pop_front();
            }
        }
        if let (Some(file), Some(lids)) = (&self.file, self.manager.take_lids())
            && let Err(error) = file.write(lids)
        {
            console.error(&error);
        }
        if self.is_asked_for_status.swap(false, Ordering::Relaxed) {
            self.failed_reports += u64::from(console.report(&self.status()).is_err());
        }
        if let Some(socket) = self.socket.as_ref().filter(|socket| socket.is_asked()) {
            // Numbers and text always have a JSON form.
            socket.reply(serde_json::to_string(&self.status()).unwrap_or_default());
        }
    }

    fn transmit(&mut self) -> Result<(), CliError> {
        let batch: Vec<Datagram> =
            self.call(|manager, now| std::iter::from_fn(|| manager.poll_transmit(now)).collect());
        for Datagram { peer, mad, len } in batch {
            match self.umad.send_to(&address(peer), &mad, len) {
                Ok(()) => {}
                Err(error) if error.is_device_gone() => return Err(broken(error)),
                // A request is sent again by the manager's own clock; whoever waits for a response
                // asks again.
                Err(_) => self.failed_sends += 1,
            }
        }
        Ok(())
    }

    /// Routes the fabric, here or in a thread.
    fn work(&mut self) -> Result<(), CliError> {
        if let Some(work) = self.manager.poll_work() {
            if work.nodes() < LARGE {
                self.call(|manager, now| {
                    let done = work.run();
                    manager.handle_work(now, done);
                });
            } else {
                let (sender, receiver) = channel();
                let run = move || {
                    let before = clock::thread_cpu_ns();
                    let done = work.run();
                    // The receiver is gone when the process ends.
                    let _ = sender.send((done, clock::thread_cpu_ns() - before));
                };
                let thread = std::thread::Builder::new().name("routing".into());
                let started = thread.spawn(run);
                started.map_err(|error| CliError::because("the thread that routes", &error))?;
                self.work = Some(receiver);
            }
        }
        let Some(receiver) = &self.work else {
            return Ok(());
        };
        match receiver.try_recv() {
            Ok((done, cpu_ns)) => {
                self.work = None;
                self.cpu_ns += cpu_ns;
                self.call(|manager, now| manager.handle_work(now, done));
            }
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => {
                return Err(CliError::usage("the thread that routes has ended without a result"));
            }
        }
        Ok(())
    }

    fn receive(&mut self) -> Result<(), CliError> {
        let now = self.started.elapsed();
        let due = self.manager.poll_timeout().map(|at| at.saturating_sub(now));
        let most = if self.work.is_some() { WORK_WAIT } else { MOST_WAIT };
        let wait = due.unwrap_or(most).min(most);
        let received = self.umad.receive_from(wait).map_err(broken)?;
        self.call(|manager, now| {
            // Those that come back without a response are sent again by the manager's own clock.
            if let Some(received) = received.filter(|received| !received.is_returned) {
                manager.handle_datagram(now, peer(received.from), &received.mad);
            }
            manager.handle_timeout(now);
        });
        Ok(())
    }

    fn status(&self) -> StatusReport {
        let manager = &self.manager;
        let (subscribers, informed) = manager.subscriptions();
        StatusReport {
            state: manager.standing().to_string(),
            guid: manager.guid().map(|guid| format!("{guid:#018x}")),
            up_ns: self.started.elapsed().as_nanos() as u64,
            cpu_ns: self.cpu_ns,
            lids: manager.fabric().map(|fabric| fabric.lids().count()),
            failed_sends: self.failed_sends,
            failed_reports: self.failed_reports,
            counters: CounterReport::new(&manager.counters()),
            tables: TableReport::new(&manager.tables()),
            subscribers,
            reports: InformReport::new(&informed),
            last_set_up: self.last_set_up.clone(),
            recent: self.recent.iter().cloned().collect(),
        }
    }
}

fn broken(error: UmadError) -> CliError {
    CliError::because("the InfiniBand port", &error)
}

/// The key of queue pair 1 (IBA 10.2.5).
const GENERAL_KEY: u32 = 0x8001_0000;

fn address(peer: Peer) -> Address {
    match peer {
        Peer::Directed => Address::DIRECTED,
        Peer::Lid { lid, queue_pair, service_level } => {
            let key = if queue_pair == 0 { 0 } else { GENERAL_KEY };
            Address { lid, queue_pair, key, service_level }
        }
    }
}

fn peer(from: Address) -> Peer {
    match from {
        Address { lid: 0xffff, .. } => Peer::Directed,
        Address { lid, queue_pair, service_level, .. } => {
            Peer::Lid { lid, queue_pair, service_level }
        }
    }
}

/// One event, as a line.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct EventReport {
    /// Since the start.
    time_ns: u64,
    /// CPU time of the manager so far, without the library that sends and receives.
    cpu_ns: u64,
    event: String,
    message: String,
    hint: Option<String>,
    is_warning: bool,
    /// Of a fabric that was set up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    set_up: Option<SetUpReport>,
}

impl EventReport {
    fn new(event: &Event, time_ns: u64, cpu_ns: u64) -> EventReport {
        let (message, is_warning) = (event.to_string(), event.is_warning());
        let hint = event.hint().map(str::to_owned);
        let set_up = match event {
            Event::SetUp(summary) => Some(SetUpReport::new(summary)),
            _ => None,
        };
        let event = event.name().to_owned();
        EventReport { time_ns, cpu_ns, event, message, hint, is_warning, set_up }
    }
}

/// When a fabric was set up last, and to what.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct LastSetUp {
    /// Since the start.
    time_ns: u64,
    set_up: SetUpReport,
}

/// See [`Summary`].
#[derive(Clone, Debug, Serialize, Deserialize)]
struct SetUpReport {
    hosts: usize,
    switches: usize,
    links: usize,
    lids: usize,
    engine: String,
    how: String,
    /// LIDs whose entries changed; of these, switch by switch, and with none for a moment.
    changed: usize,
    ordered: usize,
    drained: usize,
    /// Blocks of forwarding tables that were written.
    blocks: usize,
    /// Virtual lanes of paths.
    lanes: u8,
    wall_ns: u64,
}

impl SetUpReport {
    fn new(summary: &Summary) -> SetUpReport {
        let Summary { hosts, switches, links, lids, changed, ordered, drained, blocks, .. } =
            *summary;
        SetUpReport {
            hosts,
            switches,
            links,
            lids,
            engine: summary.engine.to_string(),
            how: match summary.how {
                How::Kept => "kept",
                How::Mended => "mended",
                How::Computed => "computed",
                How::Fallback(_) => "fallback",
            }
            .to_owned(),
            changed,
            ordered,
            drained,
            blocks,
            lanes: summary.lanes,
            wall_ns: summary.nanoseconds,
        }
    }
}

impl Report for EventReport {
    const SCHEMA: &'static str = "dquant.subnet.event/1";
}

impl fmt::Display for EventReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.is_warning { "warning: " } else { "" };
        write!(f, "{:>10.3} s  {what}{}", self.time_ns as f64 / 1e9, self.message)?;
        self.hint.as_ref().map_or(Ok(()), |hint| write!(f, "\n{:>14}hint: {hint}", ""))
    }
}

/// See [`RmppCounters`].
#[derive(Debug, Serialize, Deserialize)]
struct TableReport {
    sent: u64,
    segments: u64,
    repeated: u64,
    given_up: u64,
    unacknowledged: u64,
    senseless: u64,
    foreign: u64,
}

impl TableReport {
    fn new(counters: &RmppCounters) -> TableReport {
        let RmppCounters { sent, segments, repeated, given_up, .. } = *counters;
        let RmppCounters { unacknowledged, senseless, foreign, .. } = *counters;
        TableReport { sent, segments, repeated, given_up, unacknowledged, senseless, foreign }
    }
}

/// See [`InformCounters`].
#[derive(Debug, Serialize, Deserialize)]
struct InformReport {
    sent: u64,
    taken: u64,
    given_up: u64,
    lost: u64,
    dropped: u64,
    foreign: u64,
}

impl InformReport {
    fn new(counters: &InformCounters) -> InformReport {
        let InformCounters { sent, taken, given_up, lost, dropped, foreign } = *counters;
        InformReport { sent, taken, given_up, lost, dropped, foreign }
    }
}

/// See [`Counters`].
#[derive(Debug, Serialize, Deserialize)]
struct CounterReport {
    sent: u64,
    heavy_sweeps: u64,
    light_sweeps: u64,
    trap_looks: u64,
    failed_sweeps: u64,
    traps: u64,
    ignored_traps: u64,
    refused_controls: u64,
    wrong_keys: u64,
    malformed: u64,
    unasked: u64,
    mismatched: u64,
    dropped_replies: u64,
    dropped_events: u64,
    answered: u64,
    unanswered: u64,
    without_room: u64,
    failed_groups: u64,
    terms: u64,
}

impl CounterReport {
    fn new(counters: &Counters) -> CounterReport {
        let Counters { sent, heavy_sweeps, light_sweeps, trap_looks, failed_sweeps, .. } =
            *counters;
        let Counters { traps, ignored_traps, refused_controls, wrong_keys, malformed, .. } =
            *counters;
        let Counters { unasked, mismatched, dropped_replies, dropped_events, terms, .. } =
            *counters;
        let Counters { answered, unanswered, without_room, failed_groups, .. } = *counters;
        CounterReport {
            sent,
            heavy_sweeps,
            light_sweeps,
            trap_looks,
            failed_sweeps,
            traps,
            ignored_traps,
            refused_controls,
            wrong_keys,
            malformed,
            unasked,
            mismatched,
            dropped_replies,
            dropped_events,
            answered,
            unanswered,
            without_room,
            failed_groups,
            terms,
        }
    }
}

/// What the manager is and has done.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct StatusReport {
    state: String,
    /// Of its port; none before that has responded.
    guid: Option<String>,
    up_ns: u64,
    /// CPU time of the manager, without the library that sends and receives.
    cpu_ns: u64,
    /// Ports with LIDs, if it has set the fabric up.
    lids: Option<usize>,
    /// Datagrams that the kernel did not take.
    failed_sends: u64,
    /// Events that could not be written.
    failed_reports: u64,
    counters: CounterReport,
    /// Tables of subnet administration that took several datagrams.
    tables: TableReport,
    /// Subscribers to ports and groups that come and go, and reports to them.
    subscribers: usize,
    reports: InformReport,
    /// None before the first.
    last_set_up: Option<LastSetUp>,
    /// The last events, the oldest first.
    recent: Vec<EventReport>,
}

impl Report for StatusReport {
    const SCHEMA: &'static str = "dquant.subnet.status/1";
}

impl fmt::Display for StatusReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StatusReport { state, guid, up_ns, cpu_ns, lids, counters, .. } = self;
        let StatusReport { failed_sends, failed_reports, .. } = self;
        let guid = guid.as_deref().unwrap_or("no GUID yet");
        write!(f, "{state} ({guid}) after {:.1} s, ", *up_ns as f64 / 1e9)?;
        write!(f, "{:.1} ms of CPU time", *cpu_ns as f64 / 1e6)?;
        lids.map_or(Ok(()), |lids| write!(f, ", {lids} LIDs"))?;
        let CounterReport { heavy_sweeps, light_sweeps, failed_sweeps, traps, sent, .. } = counters;
        write!(
            f,
            "\n  {heavy_sweeps} heavy and {light_sweeps} light sweeps, {failed_sweeps} failed; {traps} traps; {sent} datagrams"
        )?;
        let CounterReport { ignored_traps, refused_controls, malformed, unasked, .. } = counters;
        let CounterReport { mismatched, dropped_replies, dropped_events, .. } = counters;
        write!(
            f,
            "\n  not used: {ignored_traps} traps, {refused_controls} control messages, {malformed} malformed, {unasked} late or of others, {mismatched} for other requests; dropped: {dropped_replies} replies, {dropped_events} events; failed: {failed_sends} sends, {failed_reports} log lines"
        )?;
        let CounterReport { answered, unanswered, without_room, wrong_keys, .. } = counters;
        write!(
            f,
            "\n  subnet administration: {answered} answered, {} of them tables, {without_room} without room, {unanswered} not answered; {} subscribers, {} reports taken; wrong M_Keys: {wrong_keys}",
            self.tables.sent, self.subscribers, self.reports.taken
        )?;
        if let Some(LastSetUp { time_ns, set_up }) = &self.last_set_up {
            let ago_s = self.up_ns.saturating_sub(*time_ns) as f64 / 1e9;
            let SetUpReport { hosts, switches, links, engine, how, lanes, .. } = set_up;
            write!(
                f,
                "\n  set up {ago_s:.1} s ago in {:.1} ms: {hosts} hosts, {switches} switches, {links} links, engine {engine} ({how}), VLs: {lanes}",
                set_up.wall_ns as f64 / 1e6
            )?;
        }
        if !self.recent.is_empty() {
            f.write_str("\n  last events:")?;
        }
        self.recent.iter().try_for_each(|event| write!(f, "\n{event}"))
    }
}
