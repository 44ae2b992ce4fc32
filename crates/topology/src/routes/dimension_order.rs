//! Shortest paths by the lowest port.
//!
//! Where the ports of switches go by dimension, as those of the shape `torus` do, packets pass the
//! first dimension to its end before they enter the second. In a mesh such paths cannot wait for
//! each other in a cycle; the rings of a torus need a second lane.

use super::{Tables, by_switch};
use crate::channels::Channels;

/// Tables for every end port.
pub fn route(channels: &Channels) -> Tables {
    let mut tables = Tables::new(channels);
    for (there, end_ports, distances) in by_switch(channels) {
        for switch in (0..channels.switches().len() as u32).filter(|switch| *switch != there) {
            let mut closer = channels.leaving(switch).filter(|channel| {
                distances[channels.get(*channel).to as usize] < distances[switch as usize]
            });
            if let Some(channel) = closer.next() {
                for end_port in &end_ports {
                    tables.set(switch, *end_port, channels.get(channel).port);
                }
            }
        }
    }
    tables
}
