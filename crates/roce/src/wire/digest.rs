//! A utilization in one byte: the digest of HPCC-PINT.
//!
//! PINT (Ben Basat et al., SIGCOMM 2020) lets a packet carry one number of a few bits however long
//! its way is: every switch that has a higher one overwrites it. Here it is a logarithm to the base
//! 1.05 of the utilization of a link,
//!
//! ```text
//! code 0          not stamped
//! code n > 0      1.05^(n - 1) / 256       from 0.4 % to 94,000 %
//! ```
//!
//! A utilization between two codes is rounded to one of them at random, to the nearer one more
//! often, so that the mean over packets is right although no digest is further off than 5 %. Base
//! and random rounding are those of the simulations published with PINT.

/// Fixed-point one of utilizations: 100 % of a link.
pub const ONE: u64 = 1 << 20;

/// The lowest utilization that has a code; those below are rounded up to it.
pub const LEAST: u64 = ONE / 256;

/// The highest utilization that has a code; those above are cut to it.
pub const MOST: u64 = POWERS[254];

/// By code, from 1 on: the utilization that it stands for.
const POWERS: [u64; 255] = powers();

const fn powers() -> [u64; 255] {
    const FRACTION: u32 = 32;
    let (mut powers, mut power, mut at) = ([0; 255], (LEAST as u128) << FRACTION, 0);
    while at < powers.len() {
        powers[at] = ((power + (1 << (FRACTION - 1))) >> FRACTION) as u64;
        power = power * 105 / 100;
        at += 1;
    }
    powers
}

/// The code of a utilization in units of 1 / [`ONE`]. Of the two that it is between, `random`
/// selects one: over all its values, the mean is the utilization.
pub fn encode(utilization: u64, random: u16) -> u8 {
    let utilization = utilization.clamp(LEAST, MOST);
    // At least one power is not above it.
    let below = POWERS.partition_point(|&power| power <= utilization) - 1;
    let rounds_up = POWERS.get(below + 1).is_some_and(|above| {
        let step = above - POWERS[below];
        u64::from(random) * step < (utilization - POWERS[below]) << 16
    });
    (below + 1 + usize::from(rounds_up)) as u8
}

/// The utilization of a code, in units of 1 / [`ONE`]; `None` if no switch stamped it.
pub fn decode(code: u8) -> Option<u64> {
    usize::from(code).checked_sub(1).map(|at| POWERS[at])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn codes_stand_for_powers_of_the_base() {
        assert_eq!((decode(0), decode(1)), (None, Some(LEAST)));
        for code in 1..=255 {
            let utilization = decode(code).unwrap();
            let exact = 1.05_f64.powi(i32::from(code) - 1) * LEAST as f64;
            assert!((utilization as f64 - exact).abs() <= 1.0, "{code}: {utilization}, {exact}");
            for random in [0, 1, 0x8000, u16::MAX] {
                assert_eq!(encode(utilization, random), code, "{random}");
            }
        }
        assert_eq!((encode(0, 0), encode(u64::MAX, u16::MAX)), (1, 255));
    }

    proptest! {
        /// No digest is further off than the base, and one of a higher utilization is not lower.
        #[test]
        fn a_digest_is_off_by_five_percent_at_most(
            utilization in LEAST..=MOST,
            more in 0..MOST,
            random: u16,
        ) {
            let code = encode(utilization, random);
            let read = decode(code).unwrap();
            // A unit for the rounding of the table.
            prop_assert!(read * 100 <= utilization * 105 + 200, "{utilization} {read}");
            prop_assert!(read * 105 + 200 >= utilization * 100, "{utilization} {read}");
            prop_assert!(encode(utilization.saturating_add(more), random) >= code);
        }

        /// The mean over all random words is the utilization, to one part in 65,536 of a step.
        #[test]
        fn rounding_has_no_bias(utilization in LEAST..=MOST) {
            let codes = (0..=u16::MAX).map(|random| decode(encode(utilization, random)).unwrap());
            let mean = codes.sum::<u64>() / (1 << 16);
            let step = utilization / 20;
            prop_assert!(mean.abs_diff(utilization) <= step / 65_536 + 1, "{utilization} {mean}");
        }
    }
}
