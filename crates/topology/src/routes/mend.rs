//! Tables after links or switches are gone: entries that still lead closer to their end port stay
//! as they are, the others are chosen anew, where the fewest end ports are routed.
//!
//! So a dead link changes the entries that used it, and those of switches that are now further
//! away; nothing else.

use super::up_down::{Hops, Ranks};
use super::{Tables, by_switch};
use crate::channels::{Channels, FAR};

/// What makes an entry right.
#[derive(Clone, Copy, Debug)]
pub enum Rule<'a> {
    /// It leads along a shortest path.
    Shortest,
    /// It leads along a shortest Up*/Down* path of these ranks.
    UpDown(&'a Ranks),
}

/// Mends tables, whose entries may lead nowhere. `None` where a switch has no path by this rule.
pub fn mend(channels: &Channels, tables: &Tables, rule: Rule<'_>) -> Option<Tables> {
    let mut mended = Tables::new(channels);
    let mut used = alloc::vec![0_u32; channels.all().len()];
    let switches = channels.switches().len() as u32;
    for pass in [Pass::Keep, Pass::Choose] {
        for (there, end_ports, distances) in by_switch(channels) {
            let hops = match rule {
                Rule::Shortest => None,
                Rule::UpDown(ranks) => Some(Hops::of(channels, there, ranks)),
            };
            let is_right = |channel: u32| match &hops {
                Some(hops) => hops.is_best(channels, channel),
                None => {
                    let channel = channels.get(channel);
                    let [from, to] = [channel.from, channel.to].map(|at| distances[at as usize]);
                    to != FAR && to + 1 == from
                }
            };
            for end_port in end_ports {
                for switch in (0..switches).filter(|switch| *switch != there) {
                    let old = tables.channel(channels, switch, end_port);
                    let kept = old.filter(|channel| is_right(*channel));
                    let chosen = match (pass, kept) {
                        (Pass::Keep, kept) => kept,
                        (Pass::Choose, Some(_)) => continue,
                        (Pass::Choose, None) => {
                            let right =
                                channels.leaving(switch).filter(|channel| is_right(*channel));
                            Some(right.min_by_key(|channel| used[*channel as usize])?)
                        }
                    };
                    if let Some(channel) = chosen {
                        used[channel as usize] += 1;
                        mended.set(switch, end_port, channels.get(channel).port);
                    }
                }
            }
        }
    }
    Some(mended)
}

/// Entries that stay are counted before others are chosen.
#[derive(Clone, Copy)]
enum Pass {
    Keep,
    Choose,
}
