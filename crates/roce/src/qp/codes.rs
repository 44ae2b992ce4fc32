//! Five-bit codes of the AETH and of queue pair attributes, and their values.

use crate::time::Duration;

/// AETH credit code that means "no credits are given": the requester need not count.
pub(crate) const NO_CREDITS: u8 = 31;

/// Receives promised by each credit code (IBA table 48).
const CREDITS: [u32; 31] = [
    0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
    2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768,
];

/// RNR NAK delays in units of 10 us by timer code (IBA table 45).
const RNR_DELAYS: [u64; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
    2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

/// The credit code for `receives` posted receives, rounded down.
pub(crate) fn credit_code(receives: u32) -> u8 {
    CREDITS.partition_point(|&count| count <= receives) as u8 - 1
}

/// Receives promised by a credit code; `None` for [`NO_CREDITS`].
pub(crate) fn credit_count(code: u8) -> Option<u32> {
    CREDITS.get(usize::from(code)).copied()
}

/// How long a requester waits after an RNR NAK with this timer code.
pub(crate) fn rnr_delay(code: u8) -> Duration {
    Duration::from_micros(10) * RNR_DELAYS[usize::from(code & 31)]
}

/// The local ACK timeout for an exponent: 4.096 us * 2^n, or none for 0 (IBA 9.7.6.1.3).
pub(crate) fn ack_timeout(exponent: u8) -> Option<Duration> {
    (exponent != 0).then(|| Duration::from_nanos(4096 << exponent.min(31)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credit_codes_round_down_and_never_promise_too_much() {
        for receives in (0..40_000).chain([u32::MAX]) {
            let code = credit_code(receives);
            let promised = credit_count(code).unwrap();
            assert!(promised <= receives, "{receives} receives, code {code}");
            assert!(code == 30 || credit_count(code + 1).unwrap() > receives);
        }
        assert_eq!(credit_count(NO_CREDITS), None);
    }

    #[test]
    fn delays_match_the_tables_at_their_ends() {
        assert_eq!(rnr_delay(0), Duration::from_nanos(655_360_000));
        assert_eq!(rnr_delay(1), Duration::from_micros(10));
        assert_eq!(rnr_delay(12), Duration::from_micros(640));
        assert_eq!(rnr_delay(31), Duration::from_nanos(491_520_000));
        assert_eq!(ack_timeout(0), None);
        assert_eq!(ack_timeout(14), Some(Duration::from_nanos(67_108_864)));
        assert_eq!(ack_timeout(31), Some(Duration::from_nanos(4096 << 31)));
    }
}
