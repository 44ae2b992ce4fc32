//! Between the messages of the wire and the types of `parfait`. Whatever comes from outside is
//! checked here.

use parfait::agent::{Command, MAX_SHARES, Measure, Objection, Phase, Position, Reply, Share};
use parfait::demand::{Abstraction, Order};
use parfait::job::Latency;
use parfait::loads::Piece;
use parfait::log::{Held, Label, Reason, Refused};
use parfait::network::Network;
use parfait::outage::Names;
use parfait::queues::Dscp;
use parfait::runs::Run;
use prost::Message;
use thiserror::Error;
use topology::graph::NodeId;

use crate::keys::{Key, Nonce};
use crate::proto;
use crate::proto::objection::Objection as Kind;

/// Most measures of one reply that are looked at; a plan has no more shares.
const MAX_MEASURES: usize = MAX_SHARES;

/// A message that says something impossible.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct Malformed(String);

impl Malformed {
    fn new(text: impl Into<String>) -> Malformed {
        Malformed(text.into())
    }
}

/// The reasons of refusals by name, in messages and in the state machine.
const REASONS: [(proto::Refusal, Reason); 8] = [
    (proto::Refusal::Unspecified, Reason::Unsaid),
    (proto::Refusal::NameTaken, Reason::NameTaken),
    (proto::Refusal::BadName, Reason::BadName),
    (proto::Refusal::TooLarge, Reason::TooLarge),
    (proto::Refusal::NoRoom, Reason::NoRoom),
    (proto::Refusal::Changed, Reason::Changed),
    (proto::Refusal::NoJob, Reason::NoJob),
    (proto::Refusal::NotOwner, Reason::NotOwner),
];

/// A reason as messages say it.
pub fn reason(reason: Reason) -> proto::Refusal {
    let found = REASONS.iter().find(|(_, own)| *own == reason);
    found.map_or(proto::Refusal::Unspecified, |(message, _)| *message)
}

/// A refusal from a message. Reasons that a later brain may have are unknown here; its words are
/// shown.
pub fn refused(reason: i32, text: String) -> Refused {
    let found = REASONS.iter().find(|(message, _)| *message as i32 == reason);
    Refused { reason: found.map_or(Reason::Unsaid, |(_, own)| *own), text }
}

const LATENCIES: [Latency; 3] = [Latency::Low, Latency::Normal, Latency::Bulk];

const ORDERS: [(Order, &str); 4] = [
    (Order::Ranks, "ranks"),
    (Order::Across, "across"),
    (Order::Mixed, "mixed"),
    (Order::ServersFirst, "servers-first"),
];

const ABSTRACTIONS: [(Abstraction, &str); 3] =
    [(Abstraction::Parfait, "parfait"), (Abstraction::Tag, "tag"), (Abstraction::Hose, "hose")];

/// The word for an order of placement.
pub fn order_name(order: Order) -> &'static str {
    ORDERS.iter().find(|(own, _)| *own == order).map_or("", |(_, name)| name)
}

fn port(number: u32) -> Result<u8, Malformed> {
    u8::try_from(number).map_err(|_| Malformed::new(format!("there is no port {number}")))
}

fn dscp(value: u32) -> Result<Dscp, Malformed> {
    let dscp = u8::try_from(value).ok().and_then(|value| Dscp::new(value).ok());
    dscp.ok_or_else(|| Malformed::new(format!("{value} is no DSCP for a job")))
}

/// A position; none counts as (0, 0).
pub fn position(message: Option<proto::Position>) -> Position {
    let proto::Position { term, sequence } = message.unwrap_or_default();
    Position { term, sequence }
}

/// A position for the wire.
pub fn position_message(position: Position) -> Option<proto::Position> {
    let Position { term, sequence } = position;
    Some(proto::Position { term, sequence })
}

/// A share, without its name.
///
/// # Errors
/// When port, DSCP or latency class are none.
pub fn share(message: &proto::Share) -> Result<Share, Malformed> {
    let proto::Share { job, bps, burst_bytes, .. } = *message;
    let latency = LATENCIES.get(message.latency as usize).copied();
    let latency = latency.ok_or_else(|| Malformed::new("there is no such latency class"))?;
    let phase = message.phase.map(|phase| {
        let proto::Phase { period_ns, shift_ns, exchange_ns } = phase;
        Phase { period_ns, shift_ns, exchange_ns }
    });
    Ok(Share {
        port: port(message.port)?,
        job,
        dscp: dscp(message.dscp)?,
        bps,
        burst_bytes,
        latency,
        phase,
    })
}

/// A share for the wire, with the name of its job.
pub fn share_message(share: &Share, name: &str) -> proto::Share {
    let phase = share.phase.map(|phase| {
        let Phase { period_ns, shift_ns, exchange_ns } = phase;
        proto::Phase { period_ns, shift_ns, exchange_ns }
    });
    proto::Share {
        port: share.port.into(),
        job: share.job,
        dscp: share.dscp.value().into(),
        bps: share.bps,
        burst_bytes: share.burst_bytes,
        latency: LATENCIES.iter().position(|one| *one == share.latency).unwrap_or(1) as u32,
        name: name.to_owned(),
        phase,
    }
}

/// An order with a brain's signature.
pub fn signed(order: &proto::Order, key: &Key) -> proto::Command {
    let order = order.encode_to_vec();
    let signature = key.sign(&[&order]).to_vec();
    proto::Command { order, signature }
}

/// The order of a command that a brain has signed for this node and this connection of its agent.
///
/// # Errors
/// When it is not signed so.
pub fn order(
    message: &proto::Command,
    key: &Key,
    node: &str,
    nonce: &Nonce,
) -> Result<proto::Order, Malformed> {
    if message.signature.is_empty() {
        return Err(Malformed::new("it is not signed"));
    }
    if !key.has_signed(&[&message.order], &message.signature) {
        return Err(Malformed::new("it is not signed with the token of this cluster"));
    }
    let order = proto::Order::decode(&*message.order)
        .map_err(|error| Malformed::new(format!("it is signed and malformed: {error}")))?;
    if order.node != node {
        return Err(Malformed::new(format!("it is signed for '{}'", order.node)));
    }
    if order.nonce != nonce {
        return Err(Malformed::new("it is signed for another connection"));
    }
    Ok(order)
}

/// A command, from an order whose signature is right.
///
/// # Errors
/// When a share is malformed, or there are too many.
pub fn command(message: &proto::Order) -> Result<Command, Malformed> {
    if message.plan.len() > MAX_SHARES {
        return Err(Malformed::new(format!("a plan of {} shares", message.plan.len())));
    }
    let plan = message.plan.iter().map(share).collect::<Result<_, _>>()?;
    Ok(Command { position: position(message.position), plan })
}

/// Why a plan is refused.
///
/// # Errors
/// When nothing is said, or something impossible.
pub fn objection(message: &proto::Objection) -> Result<Objection, Malformed> {
    let kind = message.objection.as_ref().ok_or_else(|| Malformed::new("an empty objection"))?;
    Ok(match *kind {
        Kind::LowerTerm(seen) => Objection::LowerTerm { seen },
        Kind::Overtaken(seen) => Objection::Overtaken { seen },
        Kind::Leap(seen) => Objection::Leap { seen },
        Kind::TooManyShares(shares) => Objection::TooManyShares(shares as usize),
        Kind::Unsorted(job) => Objection::Unsorted(job),
        Kind::SharedDscp(proto::SharedDscp { port: at, dscp: shared }) => {
            Objection::SharedDscp { port: port(at)?, dscp: dscp(shared)? }
        }
        Kind::NoPort(number) => Objection::NoPort(port(number)?),
        Kind::Overbooked(proto::Overbooked { port: at, planned_bps, port_bps }) => {
            Objection::Overbooked { port: port(at)?, planned_bps, port_bps }
        }
        Kind::Phase(job) => Objection::Phase(job),
        Kind::NotEnforced(_) => Objection::NotEnforced,
    })
}

/// An objection for the wire.
pub fn objection_message(objection: Objection) -> proto::Objection {
    let kind = match objection {
        Objection::LowerTerm { seen } => Kind::LowerTerm(seen),
        Objection::Overtaken { seen } => Kind::Overtaken(seen),
        Objection::Leap { seen } => Kind::Leap(seen),
        Objection::TooManyShares(shares) => Kind::TooManyShares(shares as u32),
        Objection::Unsorted(job) => Kind::Unsorted(job),
        Objection::SharedDscp { port, dscp } => {
            let (port, dscp) = (port.into(), dscp.value().into());
            Kind::SharedDscp(proto::SharedDscp { port, dscp })
        }
        Objection::NoPort(port) => Kind::NoPort(port.into()),
        Objection::Overbooked { port, planned_bps, port_bps } => {
            Kind::Overbooked(proto::Overbooked { port: port.into(), planned_bps, port_bps })
        }
        Objection::Phase(job) => Kind::Phase(job),
        Objection::NotEnforced => Kind::NotEnforced(true),
    };
    proto::Objection { objection: Some(kind) }
}

/// An agent's answer.
///
/// # Errors
/// When it says something impossible.
pub fn reply(message: &proto::Reply) -> Result<Reply, Malformed> {
    let measure = |message: &proto::Measure| {
        let proto::Measure { job, bps, backlog_bytes, dropped_packets, .. } = *message;
        Ok(Measure { port: port(message.port)?, job, bps, backlog_bytes, dropped_packets })
    };
    if message.measures.len() > MAX_MEASURES {
        return Err(Malformed::new(format!("a reply with {} measures", message.measures.len())));
    }
    let refused = message.objection.as_ref().map(objection).transpose()?;
    Ok(Reply {
        position: position(message.position),
        verdict: refused.map_or(Ok(()), Err),
        measures: message.measures.iter().map(measure).collect::<Result<_, _>>()?,
    })
}

/// An agent's answer for the wire, with a note for people and the ports without a carrier.
pub fn reply_message(reply: &Reply, note: &str, down_ports: Vec<u32>) -> proto::Reply {
    let measure = |measure: &Measure| {
        let Measure { port, job, bps, backlog_bytes, dropped_packets } = *measure;
        proto::Measure { port: port.into(), job, bps, backlog_bytes, dropped_packets }
    };
    proto::Reply {
        position: position_message(reply.position),
        objection: reply.verdict.err().map(objection_message),
        measures: reply.measures.iter().map(measure).collect(),
        note: note.to_owned(),
        down_ports,
    }
}

/// An admitted job for the wire.
pub fn held_message(job: u64, held: &Held, network: &Network) -> proto::Held {
    let piece = |piece: &Piece| proto::Piece {
        host: network.host_name(piece.host).to_owned(),
        first: piece.run.first,
        count: piece.run.len(),
    };
    let abstraction = ABSTRACTIONS.iter().find(|(own, _)| *own == held.abstraction);
    proto::Held {
        job,
        name: held.label.name.clone(),
        owner: held.label.owner.clone(),
        request: held.job.to_string(),
        dscp: held.dscp.value().into(),
        abstraction: abstraction.map_or("", |(_, name)| name).to_owned(),
        order: order_name(held.order).to_owned(),
        pieces: held.pieces.iter().map(piece).collect(),
        is_degraded: false,
    }
}

/// What is down, for the wire.
pub fn down_message(down: &Names) -> proto::Down {
    let link = |(node, port): &(String, u8)| {
        let (node, port) = (node.clone(), u32::from(*port));
        proto::LinkEnd { node, port }
    };
    proto::Down { nodes: down.nodes.clone(), links: down.links.iter().map(link).collect() }
}

/// What is down; nothing where nothing is said.
///
/// # Errors
/// When a port is none.
pub fn down(message: Option<&proto::Down>) -> Result<Names, Malformed> {
    let Some(proto::Down { nodes, links }) = message else { return Ok(Names::default()) };
    let link = |link: &proto::LinkEnd| Ok((link.node.clone(), port(link.port)?));
    let links = links.iter().map(link).collect::<Result<_, Malformed>>()?;
    Ok(Names { nodes: nodes.clone(), links, carriers: Vec::new() })
}

/// An admitted job, on a network that has its hosts.
///
/// # Errors
/// When something in it is impossible there.
pub fn held(message: &proto::Held, network: &Network) -> Result<Held, Malformed> {
    let unknown = |what: &str, name: &str| Malformed::new(format!("there is no {what} '{name}'"));
    let piece = |piece: &proto::Piece| {
        let host = network.host_named(&piece.host);
        let host = host.ok_or_else(|| unknown("host", &piece.host))?;
        let end = piece.first.checked_add(piece.count);
        let end = end.ok_or_else(|| Malformed::new("a run of workers without end"))?;
        Ok(Piece { host, run: Run::new(piece.first, end) })
    };
    let order = ORDERS.iter().find(|(_, name)| *name == message.order);
    let abstraction = ABSTRACTIONS.iter().find(|(_, name)| *name == message.abstraction);
    Ok(Held {
        label: Label { name: message.name.clone(), owner: message.owner.clone() },
        dscp: dscp(message.dscp)?,
        job: message.request.parse().map_err(|error| Malformed::new(format!("{error}")))?,
        abstraction: abstraction.ok_or_else(|| unknown("abstraction", &message.abstraction))?.0,
        order: order.ok_or_else(|| unknown("order", &message.order))?.0,
        pieces: message.pieces.iter().map(piece).collect::<Result<_, _>>()?,
    })
}

/// The node with that name, if it can have an agent.
pub fn node_named(
    network: &Network,
    name: &str,
    governed: impl Iterator<Item = NodeId>,
) -> Option<NodeId> {
    let mut governed = governed;
    governed.find(|node| network.node_name(*node) == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::Keys;

    const NONCE: Nonce = [3; 32];

    fn key(token: &str) -> Key {
        Keys::of_token(token).plan
    }

    fn example() -> proto::Order {
        let position = Some(proto::Position { term: 4, sequence: 9 });
        let share = proto::Share { port: 1, job: 2, dscp: 8, bps: 5, ..proto::Share::default() };
        let (node, nonce) = ("host0".to_owned(), NONCE.to_vec());
        proto::Order { node, nonce, position, plan: vec![share] }
    }

    #[test]
    fn reasons_pass_the_wire_and_unknown_ones_are_words() {
        for (message, own) in REASONS {
            assert_eq!(reason(own), message);
            assert_eq!(refused(message as i32, String::new()).reason, own);
        }
        let later = refused(99, "of a later brain".to_owned());
        assert_eq!((later.reason, later.text.as_str()), (Reason::Unsaid, "of a later brain"));
    }

    #[test]
    fn an_order_is_for_one_node_and_one_connection_and_of_those_who_know_the_token() {
        let (ours, theirs) = (key("a-token-of-ours"), key("a-token-of-theirs"));
        let command = signed(&example(), &ours);
        let opened = |command: &proto::Command, node: &str, nonce: &Nonce| {
            order(command, &ours, node, nonce).map_err(|Malformed(why)| why)
        };
        assert_eq!(opened(&command, "host0", &NONCE), Ok(example()));
        let refused = |command: &proto::Command, node, nonce| {
            opened(command, node, nonce).expect_err("it is not to be believed")
        };
        assert_eq!(refused(&command, "host1", &NONCE), "it is signed for 'host0'");
        assert_eq!(refused(&command, "host0", &[4; 32]), "it is signed for another connection");
        let unsigned = proto::Command { signature: Vec::new(), ..command.clone() };
        assert_eq!(refused(&unsigned, "host0", &NONCE), "it is not signed");
        assert_eq!(refused(&proto::Command::default(), "host0", &NONCE), "it is not signed");
        let wrong = "it is not signed with the token of this cluster";
        assert_eq!(refused(&signed(&example(), &theirs), "host0", &NONCE), wrong);
        for bit in 0..command.order.len() * 8 {
            let mut changed = command.clone();
            changed.order[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(refused(&changed, "host0", &NONCE), wrong, "bit {bit}");
        }
        // A key for another purpose signs no plans.
        let other = signed(&example(), &Keys::of_token("a-token-of-ours").state);
        assert_eq!(refused(&other, "host0", &NONCE), wrong);
    }
}
