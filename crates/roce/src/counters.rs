//! What happened, counted by reason.
//!
//! A software transport is debugged from its counters: nothing on the packet path is logged, so
//! every drop, refusal and repetition has a name here. The same set is kept twice, once for the
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
    /// Packets handed in, whatever became of them.
    packets_received,
    /// Payload bytes that were placed in registered memory.
    bytes_received,
    /// Packets handed out, retransmissions included.
    packets_sent,
    /// Payload bytes handed out, retransmissions included.
    bytes_sent,

    /// Request packets sent again (a READ request for the rest of its data counts as one).
    retransmitted_packets,
    /// Local ACK timer expiries that led to a retry.
    timeouts,
    /// Retries because a READ response was missing although later ones had arrived.
    implied_naks,
    /// Retry counters that ran out.
    retries_exceeded,
    /// RNR retry counters that ran out.
    rnr_retries_exceeded,
    /// Request packets sent to ask for credits while there were none.
    credit_probes,

    /// Positive acknowledgements sent, READ responses not counted.
    acks_sent,
    /// Positive acknowledgements received, READ responses not counted.
    acks_received,
    /// Acknowledgements and READ responses for what was acknowledged before.
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

    /// Request packets that had been executed before: acknowledged again, not executed again.
    duplicates,
    /// READ requests executed again for data that had been lost.
    duplicate_reads,
    /// Request packets ahead of the expected PSN, dropped.
    out_of_sequence,
    /// READ requests beyond `max_dest_rd_atomic`.
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
    /// Accesses refused: no region has the key.
    bad_key,
    /// Accesses refused: region and queue pair have different protection domains.
    bad_pd,
    /// Accesses refused: the region does not allow this kind.
    bad_access,
    /// Accesses refused: outside the region.
    bad_bounds,
    /// Responses that do not belong to the request with their PSN.
    bad_response,

    /// Messages longer than the posted receive.
    receive_too_small,
    /// Completions that found their queue full.
    cq_overflows,
    /// Queue pairs that went to the error state.
    qp_errors,
    /// Congestion notification packets received.
    cnps_received,
}

/// The counters of one queue pair. Fields that concern no queue pair stay zero.
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
