//! The document as text: what people need first when they look for a fault comes first.
//!
//! Counters have names in the document and phrases here; a name without a phrase is shown as it is.
//! Hints name the usual cause of a failure and what to try, never more than the counters support.

use std::fmt::Write;

use engine::budget::Bytes;
use lab::units::Count;

use super::document::{
    Congestion, Counters, Document, Failure, Flow, PathTaken, QueuePair, Rtt, SharedMemory, Stayed,
};

/// Width of the longest bar of a histogram, in characters.
const BAR: u64 = 40;

/// Counters shown on a line of their own, not in the list.
const TRAFFIC: [&str; 4] = ["packets_sent", "bytes_sent", "packets_received", "bytes_received"];

/// Counters of a healthy queue pair, with their phrases.
const USUAL: &[(&str, &str)] = &[
    ("acks_sent", "ACKs sent"),
    ("acks_received", "ACKs received"),
    ("atomics", "atomics executed for the peer"),
    ("credit_probes", "packets sent to probe for credits"),
    ("selective_acks_sent", "SACKs sent"),
    ("out_of_order_packets", "packets received out of order"),
    ("overlapped_packets", "packets placed in part, where later ones had arrived before"),
    ("paced_packets", "packets held back by congestion control"),
    ("competitions", "times congestion control began to compete with others for the queue"),
    ("watermarks_heard", "watermarks of switch buffers heard"),
    ("direct_writes", "WRITEs without packets"),
    ("direct_reads", "READs without packets"),
    ("direct_atomics", "atomics without packets"),
    ("direct_sends", "SENDs handed to a local peer without packets"),
    ("direct_sends_refused", "SENDs that a local peer refused: sent again as packets"),
    ("direct_receives", "SENDs taken from a local peer without packets"),
    ("direct_bytes_received", "their bytes"),
    ("direct_receives_refused", "SENDs of a local peer refused: no fitting receive"),
    ("direct_bytes", "bytes without packets"),
    ("direct_held", "requests that waited for packets before them, to need none"),
    ("direct_refused_outstanding", "requests by packets: others before them were not done"),
    ("direct_refused_full", "SENDs by packets: no room for messages"),
    ("direct_refused_paced", "requests by packets: the rate is limited"),
    ("direct_refused_local", "requests by packets: a local buffer or the completion queue"),
    ("direct_refused_peer", "requests by packets: the peer's queue pair does not serve them"),
    ("direct_refused_region", "requests by packets: no such region, right or bytes"),
    (
        "direct_refused_system",
        "requests by packets: the kernel did not copy, or the peer has ended",
    ),
];

/// All others: each of them is a loss, a wait, a refusal or a failure.
const TROUBLES: &[(&str, &str)] = &[
    ("retransmitted_packets", "packets retransmitted"),
    ("timeouts", "ACK timeouts"),
    (
        "stall_timeouts",
        "ACK timeouts without a retry: the peer's process, or this one, was stopped",
    ),
    ("implied_naks", "implied NAKs: a READ or atomic response was missing"),
    ("selective_retransmits", "packets and READ ranges retransmitted (selective repeat)"),
    ("packets_marked_lost", "packets marked lost"),
    ("spurious_retransmits", "packets retransmitted that had arrived"),
    ("loss_probes", "packets retransmitted as probes, without an acknowledgement"),
    ("out_of_order_packets_discarded", "out-of-order packets discarded"),
    ("retries_exceeded", "times the retries ran out"),
    ("rnr_retries_exceeded", "times the RNR retries ran out"),
    ("duplicate_acks", "duplicate ACKs"),
    ("seq_naks_sent", "NAKs sent: packets missing here"),
    ("seq_naks_received", "NAKs received: packets missing at the peer"),
    ("rnr_naks_sent", "RNR NAKs sent: no receive posted here"),
    ("rnr_naks_received", "RNR NAKs received: no receive posted at the peer"),
    ("invalid_request_naks_sent", "NAKs sent: invalid request"),
    ("remote_access_naks_sent", "NAKs sent: access refused"),
    ("remote_operation_naks_sent", "NAKs sent: operation failed"),
    ("fatal_naks_received", "NAKs received that ended the connection"),
    ("duplicates", "duplicate requests"),
    ("duplicate_reads", "duplicate READs, executed again"),
    ("duplicate_atomics", "duplicate atomics, answered from the saved result"),
    ("stale_atomics", "duplicate atomics too old to be answered"),
    ("unmatched_duplicates", "duplicate READs and atomics that match no executed request, dropped"),
    ("out_of_sequence", "requests ahead of the expected PSN, dropped"),
    ("deferred_requests", "requests behind unanswered READs, dropped until later"),
    ("too_many_reads", "READs and atomics beyond max_dest_rd_atomic"),
    ("unknown_qp", "packets for queue pairs that do not exist"),
    ("wrong_state", "packets that the state does not accept"),
    ("wrong_source", "packets from an address that is not the peer's"),
    ("bad_pkey", "packets of another partition"),
    ("bad_opcode", "packets of another service or out of order"),
    ("bad_length", "packets of an invalid length"),
    ("bad_psn", "responses to a PSN that was never sent"),
    ("bad_key", "protection errors: no such key"),
    ("bad_pd", "protection errors: another protection domain"),
    ("bad_access", "protection errors: access not allowed"),
    ("bad_bounds", "protection errors: outside the region"),
    ("misaligned_atomics", "atomics not aligned to 8 bytes"),
    ("bad_response", "responses that match no request"),
    ("broken_messages", "messages abandoned: a packet was missing"),
    ("orphan_packets", "packets of messages whose beginning is missing"),
    ("no_receive", "messages dropped: no receive posted"),
    ("bad_qkey", "datagrams with another Q_Key"),
    ("receive_too_small", "messages longer than their receive"),
    ("cq_overflows", "completions lost: queue full"),
    ("qp_errors", "transitions to the error state"),
    ("send_queue_errors", "stops of the send queue after a failed send"),
    ("cnps_received", "congestion notifications (CNP) received"),
    ("cnps_sent", "congestion notifications (CNP) sent"),
    ("ecn_marked", "packets marked by the network (ECN)"),
    ("watermarks_refused", "watermarks of switch buffers refused"),
];

/// Every counter of a queue pair that this program knows.
pub(super) fn known_counters() -> impl Iterator<Item = &'static str> {
    let described = USUAL.iter().chain(TROUBLES).map(|(name, _)| *name);
    described.chain(TRAFFIC)
}

/// Counters of the wire that require action, and which.
const WIRE_ADVICE: &[(&str, &str)] = &[
    (
        "receive_buffer_overruns",
        "the receive buffer was full (RC retransmits the packets, UC and UD lose them): see `dquant \
         doctor`, socket buffers",
    ),
    ("bad_icrc", "packets arrive corrupted, or something on the path rewrites them"),
    ("not_sent_refused", "the kernel refuses to send: no route, or a firewall"),
    (
        "not_sent_to_stopped_process",
        "packets for a local process that does not read: it is stopped, or gets no CPU time",
    ),
    ("not_sent_too_long", "packets longer than the path MTU: use a smaller MTU"),
    ("not_sent_buffer_full", "the send buffer stayed full: see `dquant doctor`, socket buffers"),
    ("unparsable", "malformed packets on the RoCE port"),
    (
        "fifo_lost_stopped",
        "packets for a local peer that does not read its shared memory: it is stopped, or gets no CPU time",
    ),
    ("fifo_malformed", "malformed packets in shared memory: a local peer is broken, or hostile"),
    ("fifo_broken", "a local peer broke its shared memory, which is not read any more"),
    ("fifo_unfit", "packets longer than any MTU: report it"),
];

/// The whole document, without a final line end.
pub(super) fn of(document: &Document) -> String {
    let mut out = head(document);
    for error in &document.past_errors {
        let qpn = error.qpn;
        line(&mut out, format_args!("queue pair {qpn:#x} (destroyed): {}", failure(error)));
        line(&mut out, format_args!("  hint: {}", hint(error, "")));
    }
    for qp in &document.queue_pairs {
        queue_pair(&mut out, qp);
    }
    if document.queue_pairs.is_empty() {
        line(&mut out, format_args!("no queue pairs"));
    }
    out.truncate(out.trim_end().len());
    out
}

fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = writeln!(out, "{text}");
}

/// The end of the path of a queue pair whose peer was a process of this machine.
const ENDED: &str = "the peer's process has ended";

/// One fact about a queue pair.
fn fact(out: &mut String, name: &str, text: impl std::fmt::Display) {
    line(out, format_args!("  {name:<12} {text}"));
}

fn head(document: &Document) -> String {
    let Document { pid, program, device, interface, addresses, mtu, .. } = document;
    let mut out = String::new();
    let program = program.as_deref().unwrap_or("process");
    let addresses = addresses.join(", ");
    line(
        &mut out,
        format_args!(
            "{program} (process {pid}) on {device}: interface {interface}, {addresses}, path MTU up \
             to {mtu}"
        ),
    );
    if let Some(PathTaken { kind, why, choices }) = &document.path {
        line(&mut out, format_args!("path: {kind}"));
        line(&mut out, format_args!("  why: {why}"));
        choices.iter().for_each(|choice| line(&mut out, format_args!("  {choice}")));
    }
    if let Some(memory) = &document.memory {
        shared_memory(&mut out, memory);
    }
    wire(&mut out, &document.wire_counters);
    if let Some(&lost) = document.counters.get("unknown_qp") {
        let lost = Count(lost);
        line(&mut out, format_args!("{lost} packets were for queue pairs that do not exist here"));
    }
    out
}

fn shared_memory(out: &mut String, memory: &SharedMemory) {
    let SharedMemory { ranges, bytes, why_not, stayed } = memory;
    if let Some(why) = why_not {
        return line(out, format_args!("DQUANT_MEMORY=shared: nothing moves: {why}"));
    }
    let (ranges, bytes) = (Count(*ranges), Bytes(*bytes));
    line(
        out,
        format_args!(
            "DQUANT_MEMORY=shared: {ranges} ranges, {bytes}, can be mapped by local peers"
        ),
    );
    for Stayed { why, registrations } in stayed {
        let count = Count(*registrations);
        line(out, format_args!("  {count} registrations of memory that did not move: {why}"));
    }
}

fn wire(out: &mut String, counters: &Counters) {
    let of = |name: &str| counters.get(name).copied().unwrap_or(0);
    let (sent, received) = (Count(of("sent_packets")), Count(of("received_packets")));
    line(out, format_args!("wire: {sent} packets sent, {received} received"));
    let (sent, received) = (of("fifo_sent_packets"), of("fifo_received_packets"));
    if sent + received > 0 {
        let (sent, received) = (Count(sent), Count(received));
        line(out, format_args!("shared memory: {sent} packets sent, {received} received"));
    }
    for (name, advice) in WIRE_ADVICE {
        if let Some(&count) = counters.get(*name) {
            line(out, format_args!("  {} {}: {advice}", name.replace('_', " "), Count(count)));
        }
    }
}

fn queue_pair(out: &mut String, qp: &QueuePair) {
    let QueuePair { qpn, transport, state, .. } = qp;
    let _ = write!(out, "queue pair {qpn:#x} {transport}: {state}{}", meaning(state));
    if let Some(peer) = &qp.peer {
        let _ = write!(out, ", peer {} qp {:#x}", peer.ip, peer.qpn);
    }
    let mtu = qp.mtu.map(|mtu| format!(", MTU {mtu}")).unwrap_or_default();
    line(out, format_args!("{mtu}"));
    if let Some(error) = &qp.last_error {
        fact(out, "last error", failure(error));
        fact(out, "hint", hint(error, qp.path.as_deref().unwrap_or_default()));
    }
    let receives = qp.receives.map_or("shared".to_owned(), |count| Count(count.into()).to_string());
    let sends = Count(qp.sends.into());
    fact(out, "posted", format_args!("sends {sends}, receives {receives}"));
    if let Some(flow) = &qp.flow {
        self::flow(out, flow, state);
    }
    if let Some(path) = &qp.path {
        fact(out, "path", path);
    }
    timers(out, qp);
    if let Some(bps) = qp.rate_bps {
        fact(out, "rate", format_args!("{:.3} Gbit/s at most", bps as f64 / 1e9));
    }
    if let Some(control) = &qp.congestion {
        congestion(out, control);
    }
    counters(out, &qp.counters);
    if let Some(rtt) = &qp.rtt {
        histogram(out, rtt);
    }
}

/// The meaning of a state, from the verbs' own table.
fn meaning(state: &str) -> &'static str {
    match state {
        "RESET" => " (new, not connected)",
        "INIT" => " (not connected yet)",
        "RTR" => " (ready to receive)",
        "RTS" => " (ready to send and receive)",
        "SQD" => " (the program paused sending)",
        "SQE" => " (a send failed; it still receives)",
        "ERROR" => " (stopped)",
        _ => "",
    }
}

fn flow(out: &mut String, flow: &Flow, state: &str) {
    let Flow { unacknowledged_psn, next_psn, expected_psn, .. } = flow;
    let ours = match unacknowledged_psn == next_psn {
        true => format!("all acknowledged before {next_psn:#08x}"),
        false => format!("{unacknowledged_psn:#08x} unacknowledged, next to send {next_psn:#08x}"),
    };
    fact(out, "PSN", format_args!("{ours}; expected from the peer {expected_psn:#08x}"));
    let credits = match &flow.credits {
        serde_json::Value::Number(count) => format!("{count} messages"),
        serde_json::Value::String(word) => word.clone(),
        _ => "unknown".to_owned(),
    };
    let Flow { in_flight_packets, window_packets, retries_left, rnr_retries_left, .. } = flow;
    // They are set with the state that may send.
    let left = match state {
        "RESET" | "INIT" | "RTR" => String::new(),
        _ => format!("; retries left: {retries_left}, for RNR {rnr_retries_left}"),
    };
    fact(
        out,
        "in flight",
        format_args!("{in_flight_packets} of {window_packets} packets; credits: {credits}{left}"),
    );
}

fn congestion(out: &mut String, control: &Congestion) {
    let Congestion { follows, age_ns, draining, window_millipackets, base_ns, delay_ns } = control;
    let window = *window_millipackets as f64 / 1e3;
    let since = age_ns.map(|ns| format!(" for {}", span(ns))).unwrap_or_default();
    let draining = if *draining { ", measuring the path" } else { "" };
    let known = |ns: Option<u64>| ns.map_or("unknown".to_owned(), span);
    let (base, delay) = (known(*base_ns), known(*delay_ns));
    fact(
        out,
        "congestion",
        format_args!(
            "window {window:.1} packets, follows {follows}{since}{draining}; delay {delay}, without \
             queues {base}"
        ),
    );
}

fn timers(out: &mut String, qp: &QueuePair) {
    if let Some(retries) = qp.retry_count {
        let timeout = qp.timeout_ns.map_or("never".to_owned(), span);
        let rnr = match qp.rnr_retry {
            Some(7) => "unlimited".to_owned(),
            count => count.unwrap_or(0).to_string(),
        };
        fact(out, "settings", format_args!("timeout {timeout}, retries {retries}, for RNR {rnr}"));
    }
    if let Some(waits) = &qp.waits {
        let what = match waits.what.as_str() {
            "ack" => "for an acknowledgement",
            "rnr" => "for the peer to post receives",
            "loss probe" => "for an acknowledgement, then a loss probe",
            "pacing" => "until its rate allows the next packet",
            other => other,
        };
        let left =
            if waits.ns == 0 { "now".to_owned() } else { format!("{} left", span(waits.ns)) };
        fact(out, "waits", format_args!("{what}, {left}"));
    }
}

fn counters(out: &mut String, counters: &Counters) {
    let of = |name: &str| counters.get(name).copied().unwrap_or(0);
    let [sent, sent_bytes, received, received_bytes] = TRAFFIC.map(of);
    fact(
        out,
        "payload",
        format_args!(
            "{} out in {} packets, {} in from {} packets",
            Bytes(sent_bytes),
            Count(sent),
            Bytes(received_bytes),
            Count(received)
        ),
    );
    let (usual, troubles): (Vec<_>, Vec<_>) = counters
        .iter()
        .filter(|&(name, &value)| value > 0 && !TRAFFIC.contains(&name.as_str()))
        .partition(|(name, _)| USUAL.iter().any(|(usual, _)| usual == name));
    for (name, &value) in usual {
        line(out, format_args!("  {:>14} {}", Count(value), words(name)));
    }
    let none = "none: no retransmission, no timeout, no NAK, no RNR, no CNP, nothing refused";
    fact(out, "troubles", if troubles.is_empty() { none } else { "" });
    out.truncate(out.trim_end().len());
    line(out, format_args!(""));
    for (name, &value) in troubles {
        line(out, format_args!("  {:>14} {}", Count(value), words(name)));
    }
}

fn words(name: &str) -> String {
    let known = USUAL.iter().chain(TROUBLES).find(|(counter, _)| *counter == name);
    known.map_or_else(|| name.replace('_', " "), |(_, words)| (*words).to_owned())
}

/// Bars from the first to the last bucket that holds samples.
fn histogram(out: &mut String, rtt: &Rtt) {
    let known = |ns: Option<u64>| ns.map_or("unknown".to_owned(), span);
    let (min, smoothed) = (known(rtt.min_ns), known(rtt.smoothed_ns));
    fact(out, "round trips", format_args!("smoothed {smoothed}, minimum {min}"));
    let most = rtt.histogram.iter().copied().max().unwrap_or(0);
    let first = rtt.histogram.iter().position(|&count| count > 0);
    let last = rtt.histogram.iter().rposition(|&count| count > 0);
    let (Some(first), Some(last)) = (first, last) else {
        return;
    };
    for (bucket, &count) in rtt.histogram.iter().enumerate().take(last + 1).skip(first) {
        let below = span(1_000_u64.checked_shl(bucket as u32).unwrap_or(u64::MAX));
        let bar = "#".repeat((count as u128 * BAR as u128).div_ceil(most.max(1) as u128) as usize);
        let text = format!("  {:>14} below {below:>8}  {bar}", Count(count));
        line(out, format_args!("{}", text.trim_end()));
    }
}

/// A failure in one line, with its age.
fn failure(error: &Failure) -> String {
    let age = error.age_ns.map(|ns| format!(", {} ago", span(ns))).unwrap_or_default();
    format!("{}{age}", error.text)
}

/// A span of time for people to read.
fn span(ns: u64) -> String {
    let value = ns as f64;
    match ns {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{:.1} us", value / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", value / 1e6),
        _ => format!("{:.1} s", value / 1e9),
    }
}

/// Path of a queue pair whose requests need no packets.
const DIRECT: &str = "direct";

/// The usual cause of a failure, and what to try, knowing the path of the queue pair.
fn hint(error: &Failure, path: &str) -> &'static str {
    match error.cause.as_str() {
        "no_response" if path.ends_with(ENDED) => {
            "the peer's process has ended: look for how, in its own output or in the kernel's log"
        }
        "no_response" if path == DIRECT && error.acknowledged_psn.is_none() => {
            "the peer's process, on this machine, never responded: is it stopped, does it hang, are \
             its queue pair number and first PSN the ones that were exchanged?"
        }
        "no_response" if path == DIRECT => {
            "the peer's process, on this machine, responded before: is it stopped, does it hang, or \
             has its queue pair failed (explain it there)?"
        }
        "no_response" if error.acknowledged_psn.is_none() => {
            "the peer never responded: is its process running, does the address lead there (GID \
             index), may UDP port 4791 pass, are its queue pair number and first PSN the ones that \
             were exchanged?"
        }
        "no_response" => {
            "the peer responded before: has its process ended, has its queue pair failed (explain \
             it there), or does the path lose packets? A longer timeout helps a peer that is slow"
        }
        "sequence_errors" => {
            "the peer responds and still misses packets: look for loss on the path (full buffers, \
             an MTU too large for the path), or raise retry_cnt"
        }
        "receiver_not_ready" => {
            "the peer posts receives too late or too few: post them before the other side sends, \
             or raise rnr_retry (7 retries for ever)"
        }
        "peer_refused" => {
            "the peer's side says why: explain it there. Usual causes: a wrong or stale rkey, an \
             address outside the region, access flags of region or queue pair"
        }
        "bad_response" => "the peer breaks the protocol: capture the packets and compare",
        "local" => {
            "the work request is wrong on this side: its lkey, an address outside the region, a \
             region without local write, or a length that the queue pair cannot carry"
        }
        "refused" => {
            "a request of the peer's was wrong; the counters say which check failed: key, bounds, \
             access, or protection domain"
        }
        "receive" => {
            "a message was longer than the receive posted for it, or the receive was not writable"
        }
        "cq_overrun" => {
            "make the completion queue as deep as the queues that complete into it, or poll more"
        }
        _ => "nothing failed",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(counters: &[(&str, u64)]) -> Counters {
        counters.iter().map(|&(name, value)| (name.to_owned(), value)).collect()
    }

    fn failed() -> Failure {
        Failure {
            qpn: 0x10012,
            cause: "no_response".to_owned(),
            text: "retry exceeded: 7 retries".to_owned(),
            acknowledged_psn: Some(5),
            age_ns: Some(3_200_000_000),
            ..Failure::default()
        }
    }

    #[test]
    fn shared_memory_shows_what_moved_and_why_other_memory_did_not() {
        let text = |memory| {
            let mut out = String::new();
            shared_memory(&mut out, &memory);
            out
        };
        let stayed =
            vec![Stayed { why: "it is on a heap or a stack".to_owned(), registrations: 2 }];
        let moved = SharedMemory { ranges: 3, bytes: 8 << 20, stayed, why_not: None };
        let expected = "DQUANT_MEMORY=shared: 3 ranges, 8.0 MiB, can be mapped by local peers\n  \
                        2 registrations of memory that did not move: it is on a heap or a stack\n";
        assert_eq!(text(moved), expected);
        let why_not = Some("DQUANT_PATH=udp".to_owned());
        let none = SharedMemory { why_not, ..SharedMemory::default() };
        assert_eq!(text(none), "DQUANT_MEMORY=shared: nothing moves: DQUANT_PATH=udp\n");
    }

    #[test]
    fn a_broken_connection_begins_with_its_error_and_a_hint() {
        let qp = QueuePair {
            qpn: 0x10012,
            transport: "RC".to_owned(),
            state: "ERROR".to_owned(),
            receives: Some(500),
            last_error: Some(failed()),
            counters: counted(&[
                ("timeouts", 7),
                ("packets_sent", 2000),
                ("new_thing", 1),
                ("acks_sent", 3),
            ]),
            ..QueuePair::default()
        };
        let mut out = String::new();
        queue_pair(&mut out, &qp);
        let lines: Vec<&str> = out.lines().collect();
        assert_eq!(lines[0], "queue pair 0x10012 RC: ERROR (stopped)");
        assert_eq!(lines[1], "  last error   retry exceeded: 7 retries, 3.2 s ago");
        assert!(lines[2].starts_with("  hint         the peer responded before"), "{out}");
        assert_eq!(lines[3], "  posted       sends 0, receives 500");
        assert_eq!(lines[4], "  payload      0 B out in 2,000 packets, 0 B in from 0 packets");
        assert_eq!(lines[5], "               3 ACKs sent");
        assert_eq!(lines[6], "  troubles");
        assert_eq!(lines[7], "               1 new thing");
        assert_eq!(lines[8], "               7 ACK timeouts");
        assert_eq!(lines.len(), 9);
    }

    #[test]
    fn the_window_is_shown_with_what_it_follows() {
        let mut control = Congestion {
            follows: "losses".to_owned(),
            age_ns: Some(3_200_000_000),
            window_millipackets: 12_345,
            base_ns: Some(400_000),
            delay_ns: Some(51_000_000),
            ..Congestion::default()
        };
        let line = |control: &Congestion| {
            let mut out = String::new();
            congestion(&mut out, control);
            out
        };
        assert_eq!(
            line(&control),
            "  congestion   window 12.3 packets, follows losses for 3.2 s; delay 51.0 ms, without queues \
             400.0 us\n"
        );
        control.draining = true;
        assert!(line(&control).contains("losses for 3.2 s, measuring the path;"));
        let fresh = Congestion { follows: "nothing yet".to_owned(), ..Congestion::default() };
        assert!(
            line(&fresh).contains("follows nothing yet; delay unknown, without queues unknown")
        );
    }

    #[test]
    fn a_queue_pair_without_troubles_says_so() {
        let counters = counted(&[("acks_sent", 3), ("packets_sent", 9), ("timeouts", 0)]);
        let mut out = String::new();
        queue_pair(&mut out, &QueuePair { counters, ..QueuePair::default() });
        assert!(out.ends_with("3 ACKs sent\n  troubles     none: no retransmission, no timeout, no NAK, no RNR, no CNP, nothing refused\n"), "{out}");
    }

    #[test]
    fn every_counter_has_words() {
        let known: Vec<&str> = known_counters().collect();
        for (name, _) in roce::endpoint::Counters::default().named() {
            let times = known.iter().filter(|known| **known == name).count();
            assert_eq!(times, 1, "{name}");
        }
    }

    #[test]
    fn a_peer_never_heard_of_gets_another_hint() {
        let silent = Failure { acknowledged_psn: None, ..failed() };
        assert!(hint(&silent, "packets").contains("UDP port 4791"));
        for (error, said) in [(&silent, "never responded"), (&failed(), "responded before")] {
            // Without packets there is no port to let pass, and no path that loses any.
            let hint = hint(error, "direct");
            assert!(hint.contains(said) && hint.contains("stopped"), "{hint}");
            assert!(!hint.contains("UDP") && !hint.contains("path"), "{hint}");
        }
        let ended = "packets: the peer's process has ended";
        assert!(hint(&silent, ended).starts_with("the peer's process has ended"));
        assert_ne!(hint(&silent, ""), hint(&failed(), ""));
    }

    #[test]
    fn bars_span_the_samples_and_no_more() {
        let histogram = vec![0, 0, 1, 0, 80, 0];
        let rtt = Rtt { smoothed_ns: Some(12_300), min_ns: Some(3_000), histogram };
        let mut out = String::new();
        super::histogram(&mut out, &rtt);
        let most = format!("              80 below  16.0 us  {}", "#".repeat(40));
        let wanted = [
            "  round trips  smoothed 12.3 us, minimum 3.0 us",
            "               1 below   4.0 us  #",
            "               0 below   8.0 us",
            &most,
        ];
        let out: Vec<&str> = out.lines().collect();
        assert_eq!(out, wanted);
    }

    #[test]
    fn the_wire_says_what_to_do_about_its_troubles() {
        let wire_counters = counted(&[("sent_packets", 12), ("bad_icrc", 3)]);
        let text = of(&Document { wire_counters, ..Document::default() });
        assert!(
            text.contains("wire: 12 packets sent, 0 received\n  bad icrc 3: packets"),
            "{text}"
        );
        assert!(text.ends_with("no queue pairs"), "{text}");
        let wire_counters = counted(&[("fifo_sent_packets", 7), ("fifo_broken", 1)]);
        let text = of(&Document { wire_counters, ..Document::default() });
        let wanted = "\nshared memory: 7 packets sent, 0 received\n  fifo broken 1: a local peer";
        assert!(text.contains(wanted), "{text}");
    }

    #[test]
    fn spans_of_time() {
        let spans = [999, 67_108_864, 1_500, 2_000_000_000].map(span);
        assert_eq!(spans, ["999 ns", "67.1 ms", "1.5 us", "2.0 s"]);
    }
}
