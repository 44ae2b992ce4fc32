//! The faults of a scenario: what its tables say, resolved to links and switches, with every
//! repetition.
//!
//! Places are named as in topologies and reports: `leaf0`, `leaf0:3`, `leaf0 -> spine1`. Random
//! ones are drawn from the seed, apart from everything else that is drawn: a scenario with faults
//! has the same flows as without.

use std::fmt;

use ::topology::graph::{Kind, LinkId, NodeId, Topology};
use roce::{Duration, Time};
use sim::chance::Chance;
use sim::traffic::{MAX_FAULTS, TimedFault, Trouble};

use super::file::{Fault, FaultKind};
use service::Error;

/// Sets the places of faults apart from the flows of a seed.
const FAULTS: u64 = 0x0000_6661_756c_7473;

/// What a place is called that is drawn.
const RANDOM: &str = "random";

/// A fault, and how people name it.
#[derive(Clone, Debug)]
pub struct NamedFault {
    /// What happens, and when.
    pub timed: TimedFault,
    /// What the scenario calls it.
    pub kind: FaultKind,
    /// Where it strikes.
    pub place: String,
}

/// Resolves the faults of a scenario that ends at `deadline`.
///
/// # Errors
/// With the number of the fault that cannot be, from 1.
pub fn resolve(
    faults: &[Fault],
    topology: &Topology,
    deadline: Time,
    seed: u64,
) -> Result<Vec<NamedFault>, Error> {
    let places = Places::of(topology);
    let mut chance = Chance::new(seed ^ FAULTS);
    let mut all = Vec::new();
    for (number, fault) in (1..).zip(faults) {
        let bad = |why: String| {
            let kind = fault.kind;
            Error::invalid(format_args!("fault {number} ({kind}): {why}"))
                .hint("docs/scenarios.md#faults has every kind and its keys")
        };
        let spans = spans(fault, deadline).map_err(bad)?;
        for (trouble, place) in places.troubles(fault, &mut chance).map_err(bad)? {
            if all.len() + spans.len() > MAX_FAULTS {
                return Err(bad(format!("more than {MAX_FAULTS} faults in all")));
            }
            all.extend(spans.iter().map(|&(from, until)| NamedFault {
                timed: TimedFault { trouble, from, until },
                kind: fault.kind,
                place: place.clone(),
            }));
        }
    }
    Ok(all)
}

/// When a fault begins and ends: the first time, and each later one before the run ends.
fn spans(fault: &Fault, deadline: Time) -> Result<Vec<(Time, Option<Time>)>, String> {
    let at = Time::ZERO + fault.at;
    let lasts = match (fault.lasts, fault.until) {
        (Some(_), Some(_)) => return Err("it has both 'for' and 'until'".to_owned()),
        (Some(lasts), None) => Some(lasts),
        (None, Some(until)) if until <= fault.at => {
            return Err("it ends before it begins".to_owned());
        }
        (None, Some(until)) => Some((Time::ZERO + until).since(at)),
        (None, None) => None,
    };
    if lasts == Some(Duration::ZERO) {
        return Err("it ends when it begins".to_owned());
    }
    let (every, times) = match (fault.every, fault.times) {
        (_, Some(0)) => return Err("'times' is 0".to_owned()),
        (None, None | Some(1)) => return Ok(vec![(at, lasts.map(|lasts| at + lasts))]),
        (None, Some(_)) => {
            return Err("'times' needs 'every', the distance of repetitions".to_owned());
        }
        (Some(_), None) => return Err("'every' needs 'times', how often it happens".to_owned()),
        (Some(every), Some(times)) => (every, times),
    };
    let Some(lasts) = lasts.filter(|&lasts| lasts < every) else {
        return Err("it is repeated before it has ended: 'for' is not below 'every'".to_owned());
    };
    let starts = std::iter::successors(Some(at), |&at| Some(at + every));
    let starts = starts.take(times as usize).take_while(|&start| start == at || start < deadline);
    // One more than there can be is enough to be refused.
    Ok(starts.take(MAX_FAULTS + 1).map(|at| (at, Some(at + lasts))).collect())
}

/// What faults can strike.
struct Places<'a> {
    topology: &'a Topology,
    /// In the order in which the graph has them.
    links: Vec<LinkId>,
    switches: Vec<NodeId>,
}

impl<'a> Places<'a> {
    fn of(topology: &'a Topology) -> Places<'a> {
        Places {
            topology,
            links: topology.links().map(|(id, _)| id).collect(),
            switches: topology.switches().collect(),
        }
    }

    /// Everything that a fault strikes, with its name.
    fn troubles(
        &self,
        fault: &Fault,
        chance: &mut Chance,
    ) -> Result<Vec<(Trouble, String)>, String> {
        let Fault { kind, count, rate, by, .. } = *fault;
        let key = kind.place();
        let given = [("link", &fault.link), ("switch", &fault.switch), ("port", &fault.port)];
        if let Some((other, _)) = given.iter().find(|(name, value)| *name != key && value.is_some())
        {
            return Err(format!("it strikes a {key}, and has no '{other}'"));
        }
        let place = given.into_iter().find(|(name, _)| *name == key);
        let place = place.and_then(|(_, value)| value.as_deref());
        let place = place.ok_or_else(|| format!("'{key}' is missing: where it strikes"))?;
        let own_values = [
            ("rate", "bit errors per bit", FaultKind::BitErrors, rate.is_some()),
            ("by", "what the rate of the link is divided by", FaultKind::SlowLink, by.is_some()),
        ];
        for (name, meaning, owner, is_given) in own_values {
            if is_given != (kind == owner) {
                let what =
                    if is_given { format!("belongs to {owner}") } else { "is missing".to_owned() };
                return Err(format!("'{name}', {meaning}, {what}"));
            }
        }
        let numbers = match (place, kind) {
            (RANDOM, _) => self.draw(kind, count, chance)?,
            _ if count != 1 => return Err("'count' is for random places".to_owned()),
            (name, FaultKind::SwitchDown) => vec![self.switch(name)?],
            (name, FaultKind::PortDown) => vec![self.port(name)?],
            (name, _) => vec![self.link(name)?],
        };
        let trouble = |number: u32| -> Result<Trouble, String> {
            Ok(match kind {
                FaultKind::LinkDown | FaultKind::PortDown => Trouble::LinkDown(number),
                FaultKind::SwitchDown => Trouble::SwitchDown(number),
                FaultKind::SlowLink => Trouble::SlowLink { link: number, by: divisor(by)? },
                FaultKind::BitErrors => {
                    Trouble::BitErrors { link: number, per_10_15: errors(rate)? }
                }
            })
        };
        let named = |number| Ok((trouble(number)?, self.name(kind, number)));
        numbers.into_iter().map(named).collect()
    }

    /// Different places at random: links between switches, switches, or any links.
    fn draw(&self, kind: FaultKind, count: u32, chance: &mut Chance) -> Result<Vec<u32>, String> {
        let (mut left, what): (Vec<u32>, _) = match kind {
            FaultKind::SwitchDown => ((0..self.switches.len() as u32).collect(), "switches"),
            FaultKind::PortDown => ((0..self.links.len() as u32).collect(), "connected ports"),
            FaultKind::LinkDown | FaultKind::SlowLink | FaultKind::BitErrors => {
                let inner = (0..).zip(&self.links).filter(|&(_, &id)| self.is_inner(id));
                (inner.map(|(number, _)| number).collect(), "links between switches")
            }
        };
        if count == 0 || count as usize > left.len() {
            let there = left.len();
            return Err(format!("'count' is {count}; there are {there} {what}"));
        }
        let pick = |_| left.swap_remove(chance.below(left.len() as u64) as usize);
        Ok((0..count).map(pick).collect())
    }

    fn is_inner(&self, id: LinkId) -> bool {
        let is_switch = |node| self.topology.node(node).kind() == Kind::Switch;
        let link = self.topology.link(id);
        link.is_some_and(|link| link.ends.iter().all(|end| is_switch(end.node)))
    }

    fn switch(&self, name: &str) -> Result<u32, String> {
        let id = self.node(name)?;
        let place = self.switches.iter().position(|&switch| switch == id);
        place.map(|place| place as u32).ok_or_else(|| format!("'{name}' is a host, and no switch"))
    }

    fn node(&self, name: &str) -> Result<NodeId, String> {
        self.topology.named(name).ok_or_else(|| format!("there is no host or switch '{name}'"))
    }

    /// The link at `leaf0:3`.
    fn port(&self, text: &str) -> Result<u32, String> {
        match self.end(text)? {
            (id, Some(port)) => {
                let link = self.topology.node(id).link_at(port);
                let link = link.ok_or_else(|| format!("nothing is connected to '{text}'"))?;
                Ok(self.number(link))
            }
            (_, None) => Err(format!("'{text}' is no port; write one like leaf0:3")),
        }
    }

    /// The link of `leaf0 -> spine1`; with a port where several join them.
    fn link(&self, text: &str) -> Result<u32, String> {
        let ends = text.split_once(" -> ").or_else(|| text.split_once(" - "));
        let ends = ends.ok_or_else(|| {
            format!("'{text}' is no link; write one like leaf0 -> spine1, or random")
        })?;
        let [(a, a_port), (b, b_port)] = [self.end(ends.0.trim())?, self.end(ends.1.trim())?];
        let fits = |(_, link): &(u32, LinkId)| {
            let Some([one, other]) = self.topology.link(*link).map(|link| link.ends) else {
                return false;
            };
            let (own, peer) = if one.node == a { (one, other) } else { (other, one) };
            let has_port = |port: Option<u8>, at: u8| port.is_none_or(|port| port == at);
            own.node == a
                && peer.node == b
                && has_port(a_port, own.port)
                && has_port(b_port, peer.port)
        };
        let mut found = (0..).zip(self.links.iter().copied()).filter(fits);
        match (found.next(), found.count()) {
            (None, _) => Err(format!("no link joins '{}' and '{}'", ends.0.trim(), ends.1.trim())),
            (Some((number, _)), 0) => Ok(number),
            (Some(_), more) => Err(format!(
                "{} links join '{}' and '{}'; name a port, as in leaf0:3 -> spine1",
                more + 1,
                ends.0.trim(),
                ends.1.trim()
            )),
        }
    }

    /// A node, or one of its ports: `leaf0`, `leaf0:3`.
    fn end(&self, text: &str) -> Result<(NodeId, Option<u8>), String> {
        if let Some(id) = self.topology.named(text) {
            return Ok((id, None));
        }
        let port = text.rsplit_once(':').and_then(|(name, port)| {
            let port = port.parse::<u8>().ok()?;
            Some((self.topology.named(name)?, name, port))
        });
        let Some((id, name, port)) = port else {
            return Err(format!("there is no host or switch '{text}'"));
        };
        match self.topology.node(id).ports() {
            ports if port == 0 || port > ports => {
                Err(format!("'{name}' has ports 1 to {ports}, not {port}"))
            }
            _ => Ok((id, Some(port))),
        }
    }

    fn number(&self, link: LinkId) -> u32 {
        self.links.iter().position(|&id| id == link).unwrap_or(0) as u32
    }

    fn name(&self, kind: FaultKind, number: u32) -> String {
        let name = |id: NodeId| self.topology.node(id).name();
        if kind == FaultKind::SwitchDown {
            return name(self.switches[number as usize]).to_owned();
        }
        let link = self.topology.link(self.links[number as usize]);
        link.map_or(String::new(), |link| {
            let [a, b] = link.ends.map(|end| name(end.node));
            format!("{a} -> {b}")
        })
    }
}

fn divisor(by: Option<u32>) -> Result<u32, String> {
    let by = by.unwrap_or(0);
    if (2..=1_000_000).contains(&by) {
        Ok(by)
    } else {
        Err(format!("'by' is {by}; a rate is divided by 2 to 1,000,000"))
    }
}

/// Errors in 10^15 bits.
fn errors(rate: Option<f64>) -> Result<u64, String> {
    let rate = rate.unwrap_or(0.0);
    // Above, whole frames are lost, and a sum of probabilities is not one.
    if (1e-15..=1e-5).contains(&rate) {
        Ok((rate * 1e15).round() as u64)
    } else {
        Err(format!("'rate' is {rate}; it can be 1e-15 to 1e-5 errors per bit"))
    }
}

impl fmt::Display for NamedFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |at: Time| at.as_nanos() as f64 / 1e6;
        write!(f, "{} {} from {:.3}", self.kind, self.place, ms(self.timed.from))?;
        match self.timed.until {
            Some(until) => write!(f, " to {:.3} ms", ms(until)),
            None => f.write_str(" ms on"),
        }
    }
}
