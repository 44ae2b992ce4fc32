//! Trees of several roots: up, then down, and by which way up the digits of the end port's place
//! decide (D-mod-K; Zahavi, "D-Mod-K routing providing non-blocking traffic for shift permutations
//! on real life fat trees", 2010).
//!
//! A switch of the lowest level forwards to end port `d` by its up port number `d` modulo their
//! count, one of the next level by `d` divided by that count, and so on. In a full tree every up
//! and every down port then has its equal share of end ports, and the end ports that a leaf sends
//! to by one way come down to different leaves by different ways.
//!
//! Places are counted leaf by leaf, in the order of the switches. Where leaves of one pod do not
//! follow each other in that order, as the GUIDs of a real fabric may not, the shares of the upper
//! levels are not equal.

use alloc::string::ToString;
use alloc::vec::Vec;

use super::up_down::{Hops, by_rank};
use super::{Engine, RouteError, Tables, by_switch};
use crate::channels::Channels;
use crate::graph::Topology;

/// Tables for every end port.
///
/// # Errors
/// When a link joins two switches that are not on neighbouring levels.
pub fn route(topology: &Topology, channels: &Channels) -> Result<Tables, RouteError> {
    let levels = levels(topology, channels)?;
    let top = levels.iter().copied().max().unwrap_or(0);
    let rank: Vec<u32> = levels.iter().map(|level| u32::from(top - level)).collect();
    let order = by_rank(&rank);
    let strides = strides(channels, &rank, &levels, top);
    let places = places(channels);
    let mut tables = Tables::new(channels);
    for (there, end_ports, _) in by_switch(channels) {
        let hops = Hops::to(channels, there, &rank, &order);
        for switch in (0..levels.len() as u32).filter(|switch| *switch != there) {
            let ways: Vec<u32> = channels
                .leaving(switch)
                .filter(|channel| hops.is_best(channels, *channel))
                .collect();
            if ways.is_empty() {
                let why = "links are missing: some switches reach each other only down and then up";
                return Err(RouteError::Unsuitable {
                    engine: Engine::FatTree,
                    why: why.to_string(),
                });
            }
            let stride = strides[usize::from(levels[switch as usize])];
            for end_port in &end_ports {
                let way = ways[places[*end_port as usize] / stride % ways.len()];
                tables.set(switch, *end_port, channels.get(way).port);
            }
        }
    }
    Ok(tables)
}

/// The place of each end port, leaf by leaf.
fn places(channels: &Channels) -> Vec<usize> {
    let end_ports = channels.end_ports();
    let mut order: Vec<usize> = (0..end_ports.len()).collect();
    order.sort_by_key(|at| (end_ports[*at].switch, end_ports[*at].port));
    let mut places = alloc::vec![0; order.len()];
    order.into_iter().enumerate().for_each(|(place, at)| places[at] = place);
    places
}

/// The level of each switch: 0 for those with hosts.
fn levels(topology: &Topology, channels: &Channels) -> Result<Vec<u16>, RouteError> {
    let all = 0..channels.switches().len() as u32;
    let leaves: Vec<u32> = all.filter(|switch| channels.sources(*switch) > 0).collect();
    let levels = channels.distances_from_any(&leaves);
    let level = |switch: u32| levels[switch as usize];
    let wrong = channels.all().iter().find(|one| level(one.from) == level(one.to));
    let name = |switch: u32| topology.node(channels.switches()[switch as usize]).name().to_string();
    match wrong {
        None => Ok(levels),
        Some(one) => Err(RouteError::Unsuitable {
            engine: Engine::FatTree,
            why: alloc::format!(
                "'{}' and '{}' are joined, and both are on level {}; a switch with hosts is on level 0",
                name(one.from),
                name(one.to),
                level(one.from)
            ),
        }),
    }
}

/// What the place of an end port is divided by on each level: the product of the most up ports of
/// the levels below.
fn strides(channels: &Channels, rank: &[u32], levels: &[u16], top: u16) -> Vec<usize> {
    let mut most = alloc::vec![1_usize; usize::from(top) + 1];
    for switch in 0..rank.len() as u32 {
        let leads_up =
            |channel: &u32| rank[channels.get(*channel).to as usize] < rank[switch as usize];
        let ups = channels.leaving(switch).filter(leads_up).count();
        let level = usize::from(levels[switch as usize]);
        most[level] = most[level].max(ups);
    }
    let below = most.iter().scan(1_usize, |product, most| {
        let stride = *product;
        *product = product.saturating_mul(*most);
        Some(stride)
    });
    below.collect()
}
