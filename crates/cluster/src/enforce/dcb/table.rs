//! What a NIC is to do with a plan's queues: bandwidth of traffic classes (IEEE 802.1Qaz ETS), and
//! which priority each DSCP has. Nothing here talks to the kernel.
//!
//! A priority and the traffic class that serves it have one number:
//!
//! | class | traffic | selection |
//! |---|---|---|
//! | 0 | all that is no job's | ETS, what jobs leave, at least 1 % |
//! | 1 to `n` | the `n` queues of the plan that have jobs | ETS, the queue's weight in percent |
//! | `n + 1` | congestion notifications (DSCP 48), where a class is left for them | strict |
//!
//! Percentages are rounded up, so no queue has less than its weight; where they then leave nothing
//! for other traffic, weights are scaled to 99 % and rounded. With 7 queues congestion
//! notifications are in class 0; 8 leave no class for other traffic.

use parfait::queues::{Dscp, Plan};
use thiserror::Error;

/// Traffic classes, and priorities, of IEEE 802.1Qaz.
pub(super) const CLASSES: usize = 8;

/// Transmission selection (`IEEE_8021QAZ_TSA_*`).
pub(super) const STRICT: u8 = 0;
/// Enhanced transmission selection: by bandwidth.
pub(super) const ETS: u8 = 2;

/// The DSCP of congestion notification packets (class selector 6).
const CNP_DSCP: u8 = 48;

/// By class, and by priority: what this program decides of ETS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bandwidth {
    /// Percent of each class.
    pub(super) percent: [u8; CLASSES],
    /// The selection of each class.
    pub(super) selection: [u8; CLASSES],
    /// The class of each priority.
    pub(super) class_of: [u8; CLASSES],
}

/// Which priority packets with a DSCP have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Mapping {
    /// The code point.
    pub(super) dscp: u8,
    /// The priority.
    pub(super) priority: u8,
}

impl Mapping {
    /// Whether this program decides about this code point: those of jobs, and that of congestion
    /// notifications.
    pub(super) fn is_governed(self) -> bool {
        self.dscp == CNP_DSCP || Dscp::new(self.dscp).is_ok()
    }
}

/// What an interface is to have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Table {
    /// Of its traffic classes.
    pub(super) bandwidth: Bandwidth,
    /// Of the code points that are governed, in order.
    pub(super) mappings: Vec<Mapping>,
}

/// A plan with more queues than the NIC has traffic classes for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "{queues} queues of jobs and one for other traffic, and the NIC has {classes} traffic classes"
)]
pub(super) struct TooMany {
    queues: usize,
    classes: usize,
}

impl Table {
    /// For a NIC with that many traffic classes.
    pub(super) fn of(plan: &Plan, classes: usize) -> Result<Table, TooMany> {
        let classes = classes.min(CLASSES);
        let queues: Vec<u8> = (0..)
            .zip(plan.weights())
            .filter(|(_, weight)| **weight > 0)
            .map(|(queue, _)| queue)
            .collect();
        let weights: Vec<u32> =
            queues.iter().map(|queue| plan.weights()[usize::from(*queue)]).collect();
        if weights.len() + 1 > classes {
            return Err(TooMany { queues: weights.len(), classes });
        }
        let notifications = Some(weights.len() + 1).filter(|class| *class < classes);
        let class = |queue: u8| {
            (1..).zip(&queues).find(|(_, own)| **own == queue).map_or(0, |(class, _)| class)
        };
        let bindings = plan.bindings().iter();
        let mapping = |dscp, priority| Mapping { dscp, priority };
        let mut mappings: Vec<Mapping> = bindings
            .map(|own| mapping(own.guarantee.dscp.value(), class(own.queue)))
            .chain(notifications.map(|class| mapping(CNP_DSCP, class as u8)))
            .collect();
        mappings.sort_unstable();
        let percents = percents(&weights, plan.port().weight_units);
        Ok(Table { bandwidth: bandwidth(&percents, notifications), mappings })
    }
}

/// Of classes with that bandwidth, the others first, and one for congestion notifications.
fn bandwidth(percents: &[u8], notifications: Option<usize>) -> Bandwidth {
    let mut all =
        Bandwidth { percent: [0; CLASSES], selection: [STRICT; CLASSES], class_of: [0; CLASSES] };
    for (class, percent) in percents.iter().enumerate() {
        all.percent[class] = *percent;
        all.selection[class] = ETS;
        all.class_of[class] = class as u8;
    }
    if let Some(class) = notifications {
        all.class_of[class] = class as u8;
    }
    all
}

/// Percent of other traffic and of each queue, which add up to 100.
fn percents(weights: &[u32], units: u32) -> Vec<u8> {
    let units = u64::from(units.max(1));
    let up = |weight: &u32| (u64::from(*weight) * 100).div_ceil(units);
    let mut queues: Vec<u64> = weights.iter().map(up).collect();
    if queues.iter().sum::<u64>() > 99 {
        queues = apportioned(weights, 99);
    }
    let others = 100 - queues.iter().sum::<u64>().min(99);
    [others].iter().chain(&queues).map(|percent| *percent as u8).collect()
}

/// `whole` in the ratio of the weights, at least 1 for each, by largest remainders. Weights are
/// fewer than `whole`.
fn apportioned(weights: &[u32], whole: u64) -> Vec<u64> {
    let sum: u64 = weights.iter().map(|weight| u64::from(*weight)).sum();
    let parts = || weights.iter().map(|weight| u64::from(*weight) * whole);
    let mut shares: Vec<u64> = parts().map(|part| (part / sum.max(1)).max(1)).collect();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by_key(|at| std::cmp::Reverse(u64::from(weights[*at]) * whole % sum.max(1)));
    let given: u64 = shares.iter().sum();
    // Fewer than there are queues are left over; and fewer are missing, where small ones were
    // raised to 1.
    let left = whole.saturating_sub(given) as usize;
    order.iter().take(left).for_each(|at| shares[*at] += 1);
    for _ in 0..given.saturating_sub(whole) {
        if let Some(largest) = shares.iter_mut().max() {
            *largest -= 1;
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use parfait::queues::Port;

    use super::super::fake::plan_of;
    use super::*;

    const MBIT: u64 = 1_000_000;

    fn plan(queues: u8, jobs: &[(u64, u8, u64)]) -> Plan {
        let port = Port {
            rate_bps: 1000 * MBIT,
            queues,
            weight_units: 1000,
            quantum_bytes: 64,
            frame_bytes: 1518,
            buffer_bytes: 1 << 20,
        };
        plan_of(port, jobs)
    }

    #[test]
    fn queues_become_classes_and_code_points_priorities() {
        let plan = plan(4, &[(1, 10, 500 * MBIT), (2, 18, 300 * MBIT)]);
        let table = Table::of(&plan, CLASSES).expect("room");
        let of =
            |dscp| table.mappings.iter().find(|own| own.dscp == dscp).expect("mapped").priority;
        let Bandwidth { percent, selection, class_of } = table.bandwidth;
        assert_eq!(percent[usize::from(of(10))], 50);
        assert_eq!(percent[usize::from(of(18))], 30);
        assert_eq!((percent[0], of(48)), (20, 3));
        assert_eq!(selection, [ETS, ETS, ETS, STRICT, STRICT, STRICT, STRICT, STRICT]);
        assert_eq!(class_of, [0, 1, 2, 3, 0, 0, 0, 0]);
    }

    #[test]
    fn seven_queues_leave_no_class_for_notifications_and_eight_none_for_others() {
        let jobs: Vec<(u64, u8, u64)> =
            (1..=8).map(|job| (job, 2 * job as u8, (30 + 10 * job) * MBIT)).collect();
        let table = Table::of(&plan(7, &jobs[..7]), CLASSES).expect("room");
        assert!(table.mappings.iter().all(|own| own.dscp != 48));
        assert_eq!(table.bandwidth.percent.iter().map(|part| u32::from(*part)).sum::<u32>(), 100);
        let refused = Table::of(&plan(8, &jobs), CLASSES).expect_err("no class is left");
        assert_eq!(refused, TooMany { queues: 8, classes: 8 });
        assert_eq!(
            Table::of(&plan(3, &jobs[..3]), 3).map(|_| ()).expect_err("4 are needed").classes,
            3
        );
    }

    #[test]
    fn percentages_add_up_and_leave_something_for_everybody() {
        for weights in [
            &[1000][..],
            &[998, 1, 1],
            &[994, 1, 1, 1, 1, 1, 1],
            &[500, 300, 200],
            &[333, 333, 334],
            &[1; 7],
            &[],
        ] {
            let percents = percents(weights, 1000);
            assert_eq!(
                percents.iter().map(|part| u32::from(*part)).sum::<u32>(),
                100,
                "{weights:?}"
            );
            assert!(percents.iter().all(|part| *part > 0), "{weights:?}: {percents:?}");
            for (weight, percent) in weights.iter().zip(&percents[1..]) {
                let short = f64::from(*weight) / 10.0 - f64::from(*percent);
                // One for other traffic, and one for each that is raised to 1.
                assert!(short < 1.0 + weights.len() as f64, "{weights:?}: {percents:?}");
            }
        }
        assert_eq!(percents(&[250, 333], 1000), [41, 25, 34]);
        assert_eq!(percents(&[500, 300, 200], 1000), [1, 49, 30, 20]);
    }
}
