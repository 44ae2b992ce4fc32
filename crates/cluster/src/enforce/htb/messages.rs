//! What the kernel is told and asked about queueing disciplines, classes and filters: messages of
//! route netlink, as `linux/pkt_sched.h` and `linux/pkt_cls.h` define them, and what comes back.

use nic::netlink::{Request, attribute, flag, text_of, u16_at, u32_at, u64_at};

use super::classifier;
use super::tree::{self, Class, Leaf, Tree};

/// The number of our root: how it is recognised after a restart.
pub(super) const MAJOR: u16 = 0xdaa0;

/// Numbers of the queues below the classes: this, and the class's DSCP, or [`OTHERS_QUEUE`].
const QUEUES: u16 = 0xdb00;
/// The number of the queue of other traffic: behind all DSCPs.
const OTHERS_QUEUE: u16 = QUEUES | 0x40;

const NEW_QDISC: u16 = 36;
const DELETE_QDISC: u16 = 37;
const GET_QDISC: u16 = 38;
const NEW_CLASS: u16 = 40;
const DELETE_CLASS: u16 = 41;
const GET_CLASS: u16 = 42;
const NEW_FILTER: u16 = 44;
const GET_FILTER: u16 = 46;
const GET_LINK: u16 = 18;

/// The parent of a root (`TC_H_ROOT`).
const ROOT: u32 = u32::MAX;

/// Bytes of the fixed header of an interface (`ifinfomsg`).
const LINK_BYTES: usize = 16;
/// Bytes of the fixed header of all the others (`tcmsg`).
const TRAFFIC_BYTES: usize = 20;

const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_STATS2: u16 = 7;
const TCA_STATS_BASIC: u16 = 1;
const TCA_STATS_QUEUE: u16 = 3;
const HTB_PARAMETERS: u16 = 1;
const HTB_ROOT: u16 = 2;
const HTB_RATE64: u16 = 6;
const HTB_CEIL64: u16 = 7;
const BPF_INSTRUCTIONS: u16 = 4;
const BPF_CODE: u16 = 5;
const IFLA_IFNAME: u16 = 3;

/// The version of HTB's messages.
const HTB_VERSION: u32 = 3;
/// Rates are not taken from tables of the sender (`TC_LINKLAYER_ETHERNET`).
const LINK_LAYER_ETHERNET: u8 = 1;
/// Packets of every protocol, in network order (`ETH_P_ALL`), to a filter of priority 1.
const ALL_PACKETS: u32 = 1 << 16 | (0x0003u16.to_be() as u32);
/// The number of our filter.
const FILTER: u32 = 1;

/// An interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Link {
    /// Its number.
    pub(super) index: i32,
    /// Its name.
    pub(super) name: String,
    /// The kind of its addresses (`ARPHRD_*`).
    pub(super) kind: u16,
}

/// Asks for an interface by its name.
pub(super) fn get_link(name: &str) -> Request {
    Request::new(GET_LINK, 0, &[0; LINK_BYTES]).text(IFLA_IFNAME, name)
}

/// Asks for all interfaces.
pub(super) fn get_links() -> Request {
    Request::new(GET_LINK, flag::DUMP, &[0; LINK_BYTES])
}

/// What comes back.
pub(super) fn link(message: &[u8]) -> Option<Link> {
    let name = text_of(attribute(message.get(LINK_BYTES..)?, IFLA_IFNAME)?);
    let index = u32_at(message, 4)? as i32;
    Some(Link { index, name, kind: u16_at(message, 2)? })
}

fn traffic(kind: u16, flags: u16, index: i32, handle: u32, parent: u32, info: u32) -> Request {
    let mut header = vec![0; 4];
    header.extend(index.to_ne_bytes());
    [handle, parent, info].iter().for_each(|number| header.extend(number.to_ne_bytes()));
    Request::new(kind, flags, &header)
}

fn class_id(number: u16) -> u32 {
    u32::from(MAJOR) << 16 | u32::from(number)
}

/// The number of the queue below a class.
fn queue_id(class: u16) -> u32 {
    let queue = match class {
        tree::OTHERS => OTHERS_QUEUE,
        _ => QUEUES | class & 0x3f,
    };
    u32::from(queue) << 16
}

/// Creates our root; in place of another one if that `replaces` it.
pub(super) fn new_root(index: i32, replaces: bool) -> Request {
    let flags = flag::CREATE | if replaces { flag::REPLACE } else { flag::EXCLUSIVE };
    let mut parameters = Vec::new();
    // Version, divisor of rates for quanta (unused, all have one), default class, and two that are
    // only read.
    [HTB_VERSION, 10, tree::OTHERS.into(), 0, 0]
        .iter()
        .for_each(|number: &u32| parameters.extend(number.to_ne_bytes()));
    traffic(NEW_QDISC, flags, index, class_id(0), ROOT, 0)
        .text(TCA_KIND, "htb")
        .nest(TCA_OPTIONS, |options| options.attribute(HTB_ROOT, &parameters))
}

/// Removes our root and all below it. The kernel puts its default in its place.
pub(super) fn delete_root(index: i32) -> Request {
    traffic(DELETE_QDISC, 0, index, class_id(0), ROOT, 0)
}

/// Creates a class, the port's or one below it, or changes it in place.
pub(super) fn put_class(index: i32, number: u16, class: &Class) -> Request {
    let parent = class_id(if number == tree::PORT { 0 } else { tree::PORT });
    traffic(NEW_CLASS, flag::CREATE, index, class_id(number), parent, 0).text(TCA_KIND, "htb").nest(
        TCA_OPTIONS,
        |mut options| {
            options = options.attribute(HTB_PARAMETERS, &parameters(class));
            for (kind, rate) in [(HTB_RATE64, class.rate), (HTB_CEIL64, class.ceil)] {
                if rate > u32::MAX.into() {
                    options = options.attribute(kind, &rate.to_ne_bytes());
                }
            }
            options
        },
    )
}

/// Removes a class and what waits in it.
pub(super) fn delete_class(index: i32, number: u16) -> Request {
    traffic(DELETE_CLASS, 0, index, class_id(number), 0, 0)
}

/// `tc_htb_opt`.
fn parameters(class: &Class) -> Vec<u8> {
    let mut bytes = Vec::new();
    for rate in [class.rate, class.ceil] {
        bytes.extend([0, LINK_LAYER_ETHERNET, 0, 0, 0, 0, 0, 0]);
        bytes.extend(u32::try_from(rate).unwrap_or(u32::MAX).to_ne_bytes());
    }
    let level = 0;
    [class.burst_ticks, class.ceil_burst_ticks, class.quantum_bytes, level, class.priority]
        .iter()
        .for_each(|number: &u32| bytes.extend(number.to_ne_bytes()));
    bytes
}

/// Creates the queue of a class, of that many bytes, or changes it in place.
pub(super) fn put_queue(index: i32, class: u16, bytes: u32) -> Request {
    let flags = flag::CREATE | flag::REPLACE;
    traffic(NEW_QDISC, flags, index, queue_id(class), class_id(class), 0)
        .text(TCA_KIND, "bfifo")
        .attribute(TCA_OPTIONS, &bytes.to_ne_bytes())
}

/// Classifies packets from now on, in place of an earlier classifier.
pub(super) fn classify(index: i32) -> Request {
    let code = classifier::program(MAJOR);
    let instructions = (code.len() / 8) as u16;
    traffic(NEW_FILTER, flag::CREATE, index, FILTER, class_id(0), ALL_PACKETS)
        .text(TCA_KIND, "bpf")
        .nest(TCA_OPTIONS, |options| {
            let options = options.attribute(BPF_INSTRUCTIONS, &instructions.to_ne_bytes());
            options.attribute(BPF_CODE, &code)
        })
}

/// Asks for the queueing disciplines of all interfaces.
pub(super) fn get_qdiscs() -> Request {
    traffic(GET_QDISC, flag::DUMP, 0, 0, 0, 0)
}

/// Asks for the classes of an interface.
pub(super) fn get_classes(index: i32) -> Request {
    traffic(GET_CLASS, flag::DUMP, index, 0, 0, 0)
}

/// Asks for the filters of our root.
pub(super) fn get_filters(index: i32) -> Request {
    traffic(GET_FILTER, flag::DUMP, index, 0, class_id(0), 0)
}

/// A queueing discipline, as the kernel describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Qdisc {
    index: i32,
    handle: u32,
    parent: u32,
    kind: String,
    /// That of a queue, if it has one.
    limit: Option<u32>,
}

/// Who has put the root of an interface there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Root {
    /// The kernel.
    Default,
    /// This program, or one before it.
    Ours,
    /// Somebody else; its kind and number.
    Foreign(String),
}

/// What comes back for a queueing discipline.
pub(super) fn qdisc(message: &[u8]) -> Option<Qdisc> {
    let attributes = message.get(TRAFFIC_BYTES..)?;
    let kind = text_of(attribute(attributes, TCA_KIND)?);
    let limit = attribute(attributes, TCA_OPTIONS).and_then(|options| u32_at(options, 0));
    let limit = limit.filter(|_| kind == "bfifo");
    let index = u32_at(message, 4)? as i32;
    Some(Qdisc { index, handle: u32_at(message, 8)?, parent: u32_at(message, 12)?, kind, limit })
}

/// Whose root an interface has.
pub(super) fn root(qdiscs: &[Qdisc], index: i32) -> Root {
    let root = qdiscs.iter().find(|qdisc| qdisc.index == index && qdisc.parent == ROOT);
    match root {
        // The kernel numbers its own 0; whoever configures one gets another number.
        None => Root::Default,
        Some(qdisc) if qdisc.handle == 0 => Root::Default,
        Some(qdisc) if qdisc.handle == class_id(0) && qdisc.kind == "htb" => Root::Ours,
        Some(qdisc) => Root::Foreign(format!("{} {:x}:", qdisc.kind, qdisc.handle >> 16)),
    }
}

/// The interfaces with our root.
pub(super) fn ours(qdiscs: &[Qdisc]) -> Vec<i32> {
    let is_root = |qdisc: &&Qdisc| qdisc.parent == ROOT;
    let roots = qdiscs.iter().filter(is_root).map(|qdisc| qdisc.index);
    roots.filter(|index| root(qdiscs, *index) == Root::Ours).collect()
}

/// What is at an interface with our root.
pub(super) fn tree(qdiscs: &[Qdisc], index: i32, classes: &[Vec<u8>], filters: &[Vec<u8>]) -> Tree {
    let mut tree = Tree { has_root: true, ..Tree::default() };
    for (number, class) in classes.iter().filter_map(|message| class(message)) {
        if number == tree::PORT {
            // The kernel does not change the quantum of a class with others below it, nor use it.
            tree.port = Some(Class { quantum_bytes: tree::LARGEST_PACKET_BYTES, ..class });
            continue;
        }
        let is_own = |qdisc: &&Qdisc| {
            (qdisc.index, qdisc.parent, qdisc.handle) == (index, class_id(number), queue_id(number))
        };
        let limit_bytes = qdiscs.iter().find(is_own).and_then(|qdisc| qdisc.limit);
        tree.leaves.insert(number, Leaf { class, limit_bytes });
    }
    tree.has_filter = filters.iter().any(|message| is_classifier(message));
    tree
}

/// The class of a message with its number, if it is one of our root's.
fn class(message: &[u8]) -> Option<(u16, Class)> {
    let options = attribute(message.get(TRAFFIC_BYTES..)?, TCA_OPTIONS)?;
    let bytes = attribute(options, HTB_PARAMETERS)?;
    let wide = |kind| attribute(options, kind).and_then(|value| u64_at(value, 0));
    let class = Class {
        rate: wide(HTB_RATE64).or(u32_at(bytes, 8).map(u64::from))?,
        ceil: wide(HTB_CEIL64).or(u32_at(bytes, 20).map(u64::from))?,
        burst_ticks: u32_at(bytes, 24)?,
        ceil_burst_ticks: u32_at(bytes, 28)?,
        quantum_bytes: u32_at(bytes, 32)?,
        priority: u32_at(bytes, 40)?,
    };
    Some((number(message)?, class))
}

/// The number of a class below our root.
fn number(message: &[u8]) -> Option<u16> {
    let handle = u32_at(message, 8)?;
    (handle >> 16 == u32::from(MAJOR)).then_some(handle as u16)
}

fn is_classifier(message: &[u8]) -> bool {
    let code = || {
        let attributes = message.get(TRAFFIC_BYTES..)?;
        let options = attribute(attributes, TCA_OPTIONS)?;
        (u32_at(message, 8)? == FILTER).then_some(attribute(options, BPF_CODE)?)
    };
    code().is_some_and(|code| code == classifier::program(MAJOR))
}

/// What a class has counted since it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// Bytes that have left.
    pub(super) bytes: u64,
    /// Packets that found no room.
    pub(super) dropped_packets: u64,
    /// Bytes that wait.
    pub(super) backlog_bytes: u64,
}

/// The class of a message with its counts.
pub(super) fn counts(message: &[u8]) -> Option<(u16, Counts)> {
    let statistics = attribute(message.get(TRAFFIC_BYTES..)?, TCA_STATS2)?;
    let basic = attribute(statistics, TCA_STATS_BASIC)?;
    let queue = attribute(statistics, TCA_STATS_QUEUE)?;
    let counts = Counts {
        bytes: u64_at(basic, 0)?,
        dropped_packets: u32_at(queue, 8)?.into(),
        backlog_bytes: u32_at(queue, 4)?.into(),
    };
    Some((number(message)?, counts))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel describes a class with the attributes by which it was made.
    fn described(number: u16, class: &Class) -> Vec<u8> {
        put_class(7, number, class).body().to_vec()
    }

    #[test]
    fn classes_come_back_as_they_were_made() {
        for rate in [1, 125_000_000, u32::MAX.into(), 1 << 32, u64::MAX] {
            let made = Class {
                rate,
                ceil: rate.saturating_add(1),
                burst_ticks: 3,
                ceil_burst_ticks: 4,
                quantum_bytes: 5,
                priority: 6,
            };
            assert_eq!(class(&described(tree::JOBS | 10, &made)), Some((tree::JOBS | 10, made)));
        }
    }

    #[test]
    fn descriptions_that_are_cut_off_are_no_trees() {
        let some = Class {
            rate: 1 << 33,
            ceil: 1 << 34,
            burst_ticks: 3,
            ceil_burst_ticks: 4,
            quantum_bytes: 5,
            priority: 6,
        };
        let whole = described(tree::OTHERS, &some);
        let queue = put_queue(7, tree::OTHERS, 1000).body().to_vec();
        let filter = classify(7).body().to_vec();
        let described = qdisc(&queue).expect("whole");
        let (classes, filters) = (std::slice::from_ref(&whole), std::slice::from_ref(&filter));
        let found = tree(&[described], 7, classes, filters);
        assert_eq!((found.leaves[&tree::OTHERS].limit_bytes, found.has_filter), (Some(1000), true));
        for len in 0..whole.len() {
            let cut = tree(&[], 7, &[whole[..len].to_vec()], &[]);
            // Without its wide rates a class looks slower, and is changed again.
            assert!(cut.leaves.values().all(|leaf| leaf.class != some), "{len} bytes");
        }
        for len in 0..filter.len() {
            assert!(!tree(&[], 7, &[], &[filter[..len].to_vec()]).has_filter, "{len} bytes");
        }
        for len in 0..queue.len() {
            assert!(qdisc(&queue[..len]).is_none_or(|qdisc| qdisc.limit.is_none()), "{len} bytes");
            assert!(link(&queue[..len]).is_none() && counts(&queue[..len]).is_none());
        }
    }
}
