//! Event counters, by reason.
//!
//! A software transport is debugged from its counters: nothing on the packet path is logged, so
//! every drop, refusal and retransmission has a name here. The same set is kept twice, once for the
//! whole endpoint (which outlives its queue pairs) and once for each queue pair.
//!
//! Counters only grow. They are plain numbers: no rate, no reset, no meaning beyond "this often".

macro_rules! counters {
    ($( $(#[doc = $doc:literal])+ $name:ident, )+) => {
        /// Events since the endpoint, or the queue pair, was created.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $( $(#[doc = $doc])+ pub $name: u64, )+
        }

        impl Counters {
            /// Every counter with its name, in the order of declaration.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [ $( (stringify!($name), self.$name), )+ ].into_iter()
            }
        }
    };
}

counters! {
    /// Packets handed in, accepted or not.
    packets_received,
    /// Payload bytes that were placed in registered memory.
    bytes_received,
    /// Packets handed out, retransmissions included.
    packets_sent,
    /// Payload bytes handed out, retransmissions included.
    bytes_sent,

    /// Request packets retransmitted (a READ request for the rest of its data counts as one).
    retransmitted_packets,
    /// Local ACK timer expiries that led to a retry.
    timeouts,
    /// Local ACK timer expiries that used no retry: the peer's process, or this one, was not
    /// running.
    stall_timeouts,
    /// Retries because the response to a READ or atomic was missing although later ones had
    /// arrived.
    implied_naks,
    /// Selective repeat: packets and READ ranges retransmitted.
    selective_retransmits,
    /// Selective repeat: packets marked lost because later ones had arrived.
    packets_marked_lost,
    /// Selective repeat: spurious retransmissions, of packets that had arrived or were about to.
    spurious_retransmits,
    /// Selective repeat: packets retransmitted because no acknowledgement arrived.
    loss_probes,
    /// Selective repeat: SACKs sent.
    selective_acks_sent,
    /// Selective repeat: request packets placed out of order.
    out_of_order_packets,
    /// Selective repeat: packets placed in part, because later ones that overlap them had arrived
    /// before.
    overlapped_packets,
    /// Selective repeat: out-of-order packets discarded because an earlier one overlapped them in
    /// too many pieces.
    out_of_order_packets_discarded,
    /// Retry counters that ran out.
    retries_exceeded,
    /// RNR retry counters that ran out.
    rnr_retries_exceeded,
    /// Request packets sent to probe for credits while there were none.
    credit_probes,

    /// Positive acknowledgements sent, READ responses not counted.
    acks_sent,
    /// Positive acknowledgements received, READ responses not counted.
    acks_received,
    /// Acknowledgements and READ responses for requests that were already acknowledged.
    duplicate_acks,
    /// NAKs sent: sequence error.
    seq_naks_sent,
    /// NAKs received: sequence error.
    seq_naks_received,
    /// NAKs sent: receiver not ready.
    rnr_naks_sent,
    /// NAKs received: receiver not ready.
    rnr_naks_received,
    /// NAKs sent: invalid request.
    invalid_request_naks_sent,
    /// NAKs sent: remote access error.
    remote_access_naks_sent,
    /// NAKs sent: remote operational error.
    remote_operation_naks_sent,
    /// NAKs received that end the connection.
    fatal_naks_received,

    /// Duplicate request packets: acknowledged again, not executed again.
    duplicates,
    /// Duplicate READ requests executed again because responses had been lost.
    duplicate_reads,
    /// Atomics executed for the peer.
    atomics,
    /// Duplicate atomics: the saved response is returned, nothing is executed.
    duplicate_atomics,
    /// Duplicate atomics too old to have a saved response: dropped.
    stale_atomics,
    /// READ requests and atomics before the expected PSN that do not match a saved request: dropped
    /// without a response.
    unmatched_duplicates,
    /// Request packets ahead of the expected PSN, dropped.
    out_of_sequence,
    /// Requests dropped because READs before them were still being answered; a NAK requests them
    /// later.
    deferred_requests,
    /// READ requests and atomics beyond `max_dest_rd_atomic`.
    too_many_reads,

    /// Packets for a queue pair that does not exist.
    unknown_qp,
    /// Packets for a queue pair whose state does not accept them.
    wrong_state,
    /// Packets from an address that is not the peer's.
    wrong_source,
    /// Packets of another partition.
    bad_pkey,
    /// Packets of another service, operations that are not supported, or opcodes out of order.
    bad_opcode,
    /// Packets whose length contradicts the MTU, the opcode, the RETH or the request.
    bad_length,
    /// Responses with a PSN that was never sent, READ requests with PSNs that do not fit.
    bad_psn,
    /// Protection errors: no region or window has the key.
    bad_key,
    /// Protection errors: region or window and queue pair have different protection domains, or the
    /// window is bound to another queue pair.
    bad_pd,
    /// Protection errors: the region, the window or the queue pair does not allow this kind of
    /// access.
    bad_access,
    /// Protection errors: outside the region or window.
    bad_bounds,
    /// Atomics on words that are not aligned to 8 bytes.
    misaligned_atomics,
    /// Responses that do not belong to the request with their PSN.
    bad_response,

    /// UC messages abandoned because a packet was missing or refused.
    broken_messages,
    /// UC packets dropped because the beginning of their message is missing or was refused.
    orphan_packets,
    /// UC and UD messages dropped because no receive was posted.
    no_receive,
    /// Datagrams with a wrong queue key.
    bad_qkey,

    /// Messages longer than the posted receive.
    receive_too_small,
    /// Completions lost because their queue was full.
    cq_overflows,
    /// Queue pairs that went to the error state.
    qp_errors,
    /// UC and UD queue pairs that stopped sending because a send failed.
    send_queue_errors,
    /// Congestion notification packets received.
    cnps_received,
    /// Packets that the network had marked: congestion experienced.
    ecn_marked,
    /// Congestion notification packets sent.
    cnps_sent,
    /// Packets that were held back by congestion control.
    paced_packets,
    /// Times that congestion control began to compete with others that fill the queue of the path.
    competitions,
    /// Watermarks of switch buffers taken from the control plane of the network.
    watermarks_heard,
    /// Watermarks refused: of no connection, stale, or of a time that cannot be.
    watermarks_refused,

    /// WRITEs carried out within the machine, without packets.
    direct_writes,
    /// READs carried out within the machine, without packets.
    direct_reads,
    /// Atomics carried out within the machine, without packets.
    direct_atomics,
    /// SENDs handed to a local peer.
    direct_sends,
    /// Of these, those that it refused: they were sent again as packets.
    direct_sends_refused,
    /// SENDs taken from a local peer without packets.
    direct_receives,
    /// Their bytes.
    direct_bytes_received,
    /// SENDs of a local peer that were refused, and then sent as packets.
    direct_receives_refused,
    /// Bytes of all three.
    direct_bytes,
    /// Requests to a process of this machine that waited for the packets before them, to be carried
    /// out without.
    direct_held,
    /// Requests to a process of this machine sent as packets: requests before them were not done.
    direct_refused_outstanding,
    /// The same: the rate of their queue pair is limited.
    direct_refused_paced,
    /// The same: a local buffer may not be used, or the completion queue was full.
    direct_refused_local,
    /// The same: the queue pair at the other end does not serve them.
    direct_refused_peer,
    /// The same: the peer has published no region with the key, the right and the bytes.
    direct_refused_region,
    /// The same: the operating system did not copy the bytes.
    direct_refused_system,
    /// SENDs as packets because there was no room for messages without.
    direct_refused_full,
}

/// The counters of one queue pair. Fields that do not apply to a queue pair stay zero.
pub type QpCounters = Counters;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_fields() {
        let counters = Counters { timeouts: 3, ..Counters::default() };
        assert!(counters.named().any(|counter| counter == ("timeouts", 3)));
        assert_eq!(counters.named().map(|(_, value)| value).sum::<u64>(), 3);
    }
}
