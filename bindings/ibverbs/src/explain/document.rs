//! The document sent to clients: each device with its path, its counters, its queue pairs.
//!
//! `docs/verbs.md` describes it. Members may be added; changing the meaning of one, or removing
//! one, changes [`FORMAT`]. Counters that are zero are left out, as are members that do not apply.

use nic::clock;
use nic::device::DeviceWire;
use nic::local_peers::FifoCounters;
use nic::udp::{TxCounters, UdpCounters};
use roce::congestion::rtt::RttMeter;
use roce::congestion::{Follows, WindowReport};
use roce::endpoint::{Counters, QpState, TimeoutReason};
use roce::report::{Credits, Flow, LastError, Peer, QpReport};
use roce::verbs::Transport;
use roce::{Duration, Time};

use super::QPS_PER_LOCK;
use super::json::Value;
use crate::engine::shared::SharedReport;
use crate::engine::{self, Core, Engine};

/// The value of `format`.
const FORMAT: &str = "dquant-verbs/1";

/// Why programs use UDP sockets.
const WHY_UDP: &str = "UDP sockets are the one path that needs no driver, no root and no hardware; \
                       queue pairs with the path \"direct\" use shared memory in their place";

/// State of the wire.
struct WireFacts {
    choices: Vec<String>,
    counters: UdpCounters,
    overrun: u64,
}

impl WireFacts {
    fn of(wire: &DeviceWire) -> WireFacts {
        WireFacts {
            choices: wire.to_string().lines().map(str::to_owned).collect(),
            counters: *wire.counters(),
            overrun: wire.overrun(),
        }
    }
}

/// State copied under the engine's lock, except queue pairs.
struct Snapshot {
    wire: Option<WireFacts>,
    fifos: Option<FifoCounters>,
    counters: Counters,
    rescued_wakeups: u64,
    past_errors: Vec<LastError>,
    completion_queues: usize,
    shared_receive_queues: usize,
}

impl Snapshot {
    fn of(core: &mut Core) -> Snapshot {
        Snapshot {
            wire: core.wire().ok().map(|wire| WireFacts::of(wire)),
            fifos: core.fifo_counters().copied(),
            counters: *core.endpoint().counters(),
            rescued_wakeups: core.rescued_wakeups(),
            past_errors: core.endpoint().past_errors().copied().collect(),
            completion_queues: core.queues().0,
            shared_receive_queues: core.queues().1,
        }
    }
}

/// The document for all open devices.
pub(super) fn of_all() -> String {
    let members = vec![
        ("format", FORMAT.into()),
        ("pid", std::process::id().into()),
        ("program", program().into()),
        ("devices", engine::all().iter().map(|engine| device(engine)).collect()),
    ];
    Value::Object(members).to_string()
}

fn device(engine: &Engine) -> Value {
    let snapshot = Snapshot::of(&mut engine.lock());
    let queue_pairs = queue_pairs(engine);
    let now = clock::now();
    let interface = &engine.interface;
    let mut members = vec![
        ("device", interface.device_name().into()),
        ("interface", interface.name.as_str().into()),
        ("addresses", interface.addresses.iter().map(ToString::to_string).collect()),
        ("mtu", engine.mtu().bytes().into()),
        ("completion_queues", snapshot.completion_queues.into()),
        ("shared_receive_queues", snapshot.shared_receive_queues.into()),
        ("counters", nonzero(snapshot.counters.named())),
    ];
    if let Some(wire) = &snapshot.wire {
        members.push(("path", path(wire)));
        let fifos = snapshot.fifos.iter().flat_map(FifoCounters::named);
        let rescued = [("rescued_wakeups", snapshot.rescued_wakeups)];
        let counters = wire_counters(wire).into_iter().chain(fifos).chain(rescued);
        members.push(("wire_counters", nonzero(counters)));
    }
    members.extend(engine.shared_report().map(|report| ("memory", memory(&report))));
    let past = snapshot.past_errors.iter().map(|error| last_error(error, now));
    members.push(("past_errors", past.collect()));
    let described = queue_pairs.iter().map(|(report, path)| queue_pair(report, path, now));
    members.push(("queue_pairs", described.collect()));
    Value::Object(members)
}

/// Every queue pair. Those created or destroyed meanwhile may be missing.
fn queue_pairs(engine: &Engine) -> Vec<(QpReport, String)> {
    let mut all = Vec::new();
    loop {
        all.reserve(QPS_PER_LOCK);
        let before = all.len();
        let core = engine.lock();
        let some = core.endpoint().queue_pairs().skip(before).take(QPS_PER_LOCK);
        all.extend(some.map(|report| {
            let path = core.path_of(report.qpn, report.transport);
            (report, path)
        }));
        drop(core);
        if all.len() < before + QPS_PER_LOCK {
            return all;
        }
        std::thread::yield_now();
    }
}

/// The kernel's name for this program.
fn program() -> Option<String> {
    let path = std::env::current_exe().ok()?;
    Some(path.file_name()?.to_string_lossy().into_owned())
}

fn nonzero(counters: impl IntoIterator<Item = (&'static str, u64)>) -> Value {
    let counted = counters.into_iter().filter(|&(_, count)| count > 0);
    Value::Object(counted.map(|(name, count)| (name, count.into())).collect())
}

fn path(wire: &WireFacts) -> Value {
    Value::Object(vec![
        ("kind", "UDP sockets".into()),
        ("why", WHY_UDP.into()),
        ("choices", wire.choices.iter().map(String::as_str).collect()),
    ])
}

/// Memory that moved to where local peers can map it.
fn memory(report: &Result<SharedReport, &str>) -> Value {
    let SharedReport { ranges, bytes, stayed } = match report {
        Ok(report) => report,
        Err(why) => return Value::Object(vec![("why_not", (*why).into())]),
    };
    let stayed = stayed.iter().map(|(why, count)| {
        Value::Object(vec![("why", why.as_str().into()), ("registrations", (*count).into())])
    });
    Value::Object(vec![
        ("ranges", (*ranges as u64).into()),
        ("bytes", (*bytes).into()),
        ("stayed", stayed.collect()),
    ])
}

fn wire_counters(wire: &WireFacts) -> Vec<(&'static str, u64)> {
    let UdpCounters { tx, rx, sharing } = wire.counters;
    let unsent = |tx: &TxCounters| tx.dropped.total();
    vec![
        ("sent_packets", tx.packets),
        ("sent_bytes", tx.bytes),
        ("sent_segmented", tx.gso_batches),
        ("send_calls", tx.syscalls),
        ("send_waits", tx.waits),
        ("not_sent_buffer_full", tx.dropped.full),
        ("not_sent_too_long", tx.dropped.too_long),
        ("not_sent_wrong_family", tx.dropped.family),
        ("not_sent_to_stopped_process", tx.dropped.stopped),
        ("not_sent_refused", tx.dropped.refused),
        ("not_sent_last_errno", tx.dropped.last_errno.unsigned_abs().into()),
        ("received_packets", rx.packets),
        ("received_bytes", rx.bytes),
        ("received_coalesced", rx.gro_batches),
        ("receive_calls", rx.syscalls),
        ("accepted", rx.accepted),
        ("unexpected_ip_ids", rx.unexpected_ip_ids),
        ("bad_icrc", rx.bad_icrc),
        ("truncated", rx.truncated),
        ("unparsable", rx.unparsable.total()),
        ("receive_errors", rx.errors),
        ("receive_buffer_overruns", wire.overrun),
        ("forwarded", sharing.forwarded.packets),
        ("not_forwarded", unsent(&sharing.forwarded)),
        ("forwarded_received", sharing.accepted),
        ("forwarded_untrusted", sharing.foreign),
        ("forwarded_misrouted", sharing.misrouted),
        ("probes_received", sharing.probes),
        ("backpressure_waits", sharing.backpressure_waits),
    ]
}

fn queue_pair(report: &QpReport, path: &str, now: Time) -> Value {
    let QpReport { qpn, transport, attr, sends, receives, flow, deadline, .. } = report;
    let mut members = vec![
        ("qpn", qpn.get().into()),
        ("transport", transport_name(*transport).into()),
        ("state", attr.state.name().into()),
        ("sends", (*sends).into()),
        ("receives", (*receives).into()),
        ("counters", nonzero(report.counters.named())),
    ];
    if *transport != Transport::Ud && !matches!(attr.state, QpState::Reset | QpState::Init) {
        let other = Peer { ip: attr.path.remote.ip(), qpn: attr.dest_qp };
        members.push(("peer", peer(&other)));
        members.push(("mtu", attr.mtu.bytes().into()));
    }
    if *transport == Transport::Rc {
        members.push(("path", path.into()));
        members.push(("timeout_ns", timeout_ns(attr.timeout).into()));
        members.push(("retry_count", attr.retry_count.into()));
        members.push(("rnr_retry", attr.rnr_retry.into()));
    }
    members.extend(flow.as_ref().map(|stands| ("flow", self::flow(stands))));
    if let Some((at, reason)) = *deadline {
        let left = at.as_nanos().saturating_sub(now.as_nanos());
        let waits = vec![("for", reason_name(reason).into()), ("ns", left.into())];
        members.push(("waits", Value::Object(waits)));
    }
    members.extend(report.rate_bps.map(|rate| ("rate_bps", rate.into())));
    members.extend(report.window.map(|report| ("congestion", congestion(&report, now))));
    members
        .extend(report.rtt.filter(|rtt| rtt.histogram.total() > 0).map(|rtt| ("rtt", times(&rtt))));
    members.extend(report.last_error.map(|error| ("last_error", last_error(&error, now))));
    Value::Object(members)
}

/// Congestion control by delay.
fn congestion(report: &WindowReport, now: Time) -> Value {
    let nanos = |delay: Option<Duration>| Value::from(delay.map(Duration::as_nanos));
    let follows = match report.follows {
        Follows::Nothing => "nothing yet",
        Follows::Delay => "delay",
        Follows::Losses => "losses",
    };
    let age = report.base.map(|_| now.as_nanos().saturating_sub(report.since.as_nanos()));
    Value::Object(vec![
        ("follows", follows.into()),
        ("age_ns", age.into()),
        ("draining", report.is_draining.into()),
        ("window_millipackets", report.window_millipackets.into()),
        ("base_ns", nanos(report.base)),
        ("delay_ns", nanos(report.smoothed)),
    ])
}

/// Round-trip times; bucket `n` of the histogram ends at 2^n us.
fn times(rtt: &RttMeter) -> Value {
    let nanos = |time: Option<Duration>| Value::from(time.map(Duration::as_nanos));
    Value::Object(vec![
        ("min_ns", nanos(rtt.estimator.min_rtt())),
        ("smoothed_ns", nanos(rtt.estimator.smoothed())),
        ("histogram", rtt.histogram.counts().iter().copied().collect()),
    ])
}

fn transport_name(transport: Transport) -> &'static str {
    match transport {
        Transport::Rc => "RC",
        Transport::Uc => "UC",
        Transport::Ud => "UD",
    }
}

fn reason_name(reason: TimeoutReason) -> &'static str {
    match reason {
        TimeoutReason::AckTimeout => "ack",
        TimeoutReason::RnrWait => "rnr",
        TimeoutReason::LossProbe => "loss probe",
        TimeoutReason::Pacing => "pacing",
    }
}

/// The local ACK timeout: 4.096 us * 2^n, none for 0.
fn timeout_ns(exponent: u8) -> Option<u64> {
    (exponent > 0).then(|| 4096 << exponent.min(31))
}

fn flow(flow: &Flow) -> Value {
    let credits = match flow.credits {
        Credits::Unknown => Value::from("unknown"),
        Credits::Unlimited => Value::from("unlimited"),
        Credits::Messages(count) => Value::from(count),
    };
    Value::Object(vec![
        ("unacknowledged_psn", flow.unacknowledged.get().into()),
        ("next_psn", flow.next.get().into()),
        ("expected_psn", flow.expected.get().into()),
        ("in_flight_packets", flow.in_flight_packets.into()),
        ("window_packets", flow.window_packets.into()),
        ("credits", credits),
        ("retries_left", flow.retries_left.into()),
        ("rnr_retries_left", flow.rnr_retries_left.into()),
    ])
}

fn peer(peer: &Peer) -> Value {
    Value::Object(vec![("ip", peer.ip.to_string().into()), ("qpn", peer.qpn.get().into())])
}

fn last_error(error: &LastError, now: Time) -> Value {
    let age_ns = now.as_nanos().saturating_sub(error.at.as_nanos());
    Value::Object(vec![
        ("qpn", error.qpn.get().into()),
        ("cause", error.cause.name().into()),
        ("text", error.to_string().into()),
        ("peer", error.peer.as_ref().map_or(Value::Null, peer)),
        ("psn", error.psn.map(|psn| psn.get()).into()),
        ("acknowledged_psn", error.acknowledged.map(|psn| psn.get()).into()),
        ("wr_id", error.wr_id.into()),
        ("retries", error.retries.into()),
        ("age_ns", age_ns.into()),
    ])
}
