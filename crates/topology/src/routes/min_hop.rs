//! Shortest paths: each switch forwards to an end port by the port with the fewest end ports so
//! far, among those on a shortest path.
//!
//! Each switch looks at itself alone, so switches of a tree that look alike choose alike, and some
//! links of the level above stay unused. `balanced` sees all of them.

use super::{Tables, by_switch};
use crate::channels::Channels;

/// Tables for every end port.
pub fn route(channels: &Channels) -> Tables {
    let mut tables = Tables::new(channels);
    let mut used = alloc::vec![0_u32; channels.all().len()];
    for (there, end_ports, distances) in by_switch(channels) {
        for end_port in end_ports {
            for switch in (0..channels.switches().len() as u32).filter(|switch| *switch != there) {
                let closer = channels.leaving(switch).filter(|channel| {
                    let to = channels.get(*channel).to;
                    distances[to as usize] < distances[switch as usize]
                });
                if let Some(channel) = closer.min_by_key(|channel| used[*channel as usize]) {
                    used[channel as usize] += 1;
                    tables.set(switch, end_port, channels.get(channel).port);
                }
            }
        }
    }
    tables
}
