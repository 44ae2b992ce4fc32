//! Messages that use the same memory again: whatever the network loses, duplicates and reorders,
//! memory ends as if every request had been executed in the order of posting, and a loss costs no
//! more than elsewhere.

use roce::Time;
use roce::endpoint::{Connect, Mtu};
use roce::verbs::WcStatus::Success;
use roce::verbs::{RecvWr, SendOp, SgList, Sge};

use crate::harness::{BASE, Chance, Fault, FaultMix, NetworkConfig};
use crate::pair::Pair;
use crate::seeds::{Replay, seeds};

/// Bytes of node 1 that every message goes to.
const TARGET_BYTES: u64 = 4_000;

/// Where node 0 takes the bytes of its messages from, and puts what it reads.
const SOURCE: u64 = 0;
const LANDING: u64 = 250_000;

/// Longest message.
const MAX_LEN: u64 = 3_000;

const REQUESTS: u64 = 40;

fn selective(connect: &mut Connect) {
    *connect = Connect { mtu: Mtu::M256, ..connect.selective() };
}

/// A message of a full packet to the same address, again and again: each loss costs one
/// retransmission, and nothing that has arrived is given up.
#[test]
fn a_loss_among_writes_to_one_buffer_costs_one_retransmission() {
    let mut pair = Pair::with(|connect| *connect = connect.selective());
    let writes = 60;
    let first = pair.first_psn();
    let mut lost = [3, 4, 11, 25, 26, 27, 40].map(|index| (first.plus(index), true));
    pair.lose(move |_, headers| {
        let psn = headers.bth().psn;
        let entry = lost.iter_mut().find(|entry| entry.0 == psn);
        entry.is_some_and(|entry| headers.bth().opcode.is_write() && std::mem::take(&mut entry.1))
    });
    for wr_id in 0..writes {
        let wr = pair.wr(wr_id, pair.write_op(0), SOURCE + 1024 * wr_id, 1024);
        pair.post(wr);
    }
    assert_eq!(pair.run().0.len() as u64, writes);
    assert_eq!(pair.counters(0).selective_retransmits, 7);
    assert_eq!(pair.counters(1).out_of_order_packets_discarded, 0);
    let last = pair.network.nodes[0].memory.peek(BASE + SOURCE + 1024 * (writes - 1), 1024);
    assert_eq!(pair.network.nodes[1].memory.peek(BASE, 1024), last);
}

/// The bytes of node 1 as they must end, and what the READs and atomics must return.
struct Model {
    target: Vec<u8>,
    /// Landing place and bytes.
    read: Vec<(u64, Vec<u8>)>,
    receives: Vec<SgList>,
}

impl Model {
    fn scatter(&mut self, list: &[Sge], bytes: &[u8]) {
        let mut left = bytes;
        for sge in list {
            let (now, later) = left.split_at(left.len().min(sge.len as usize));
            let at = (sge.addr - BASE) as usize;
            self.target[at..at + now.len()].copy_from_slice(now);
            left = later;
        }
    }
}

/// Up to four ranges of the target, `len` bytes in all.
fn scattered(pair: &Pair, chance: &mut Chance, len: u64) -> SgList {
    let (mut list, mut left) = (SgList::new(), len);
    while left > 0 {
        let piece = if list.len() == 3 { left } else { chance.between(1, left) };
        let offset = chance.below(TARGET_BYTES - piece + 1);
        list.extend(pair.sge(1, offset, piece as u32));
        left -= piece;
    }
    list
}

/// Posts a request and applies it to the model. Packets are small, so most messages are several.
fn post(pair: &mut Pair, model: &mut Model, chance: &mut Chance, wr_id: u64) {
    let longest = chance.pick(&[64, 300, MAX_LEN]);
    let len = chance.between(1, longest);
    let (source, offset) = (SOURCE + MAX_LEN * wr_id, chance.below(TARGET_BYTES - len + 1));
    let bytes = pair.network.nodes[0].memory.peek(BASE + source, len as usize).to_vec();
    let (landing, rkey) = (LANDING + MAX_LEN * wr_id, pair.regions[1].rkey);
    let at = offset as usize..(offset + len) as usize;
    let wr = match chance.below(20) {
        0 => {
            model.read.push((landing, model.target[at].to_vec()));
            let op = SendOp::Read { remote_addr: BASE + offset, rkey };
            pair.wr(wr_id, op, landing, len as u32)
        }
        1 => {
            let word = offset as usize / 8 * 8;
            let word = word.min(TARGET_BYTES as usize - 8);
            let old = u64::from_ne_bytes(model.target[word..word + 8].try_into().unwrap());
            let add = chance.word();
            model.read.push((landing, old.to_ne_bytes().to_vec()));
            model.target[word..word + 8].copy_from_slice(&old.wrapping_add(add).to_ne_bytes());
            let op = SendOp::FetchAdd { remote_addr: BASE + word as u64, rkey, add };
            pair.wr(wr_id, op, landing, 8)
        }
        2..=8 => {
            let list = model.receives.remove(0);
            model.scatter(&list, &bytes);
            pair.wr(wr_id, SendOp::Send, source, len as u32)
        }
        _ => {
            model.target[at].copy_from_slice(&bytes);
            pair.wr(wr_id, pair.write_op(offset), source, len as u32)
        }
    };
    pair.post(wr);
}

/// Compares with a model that executes one request after the other.
#[test]
fn memory_ends_as_if_requests_were_executed_one_by_one() {
    let (mut overlapped, mut discarded) = (0, 0);
    for seed in seeds(0..150) {
        let _replay = Replay { test: "memory_ends_as_if", seed };
        let config = NetworkConfig { seed, ..NetworkConfig::default() };
        let mut pair = Pair::build(&config, selective);
        let mut chance = Chance::new(seed);
        pair.network.mix = FaultMix::NONE
            .with(Fault::Loss, chance.pick(&[10_000, 50_000, 200_000]))
            .with(Fault::Duplicate, chance.pick(&[0, 50_000]))
            .with(Fault::Reorder, chance.pick(&[0, 100_000]));
        let target = pair.network.nodes[1].memory.peek(BASE, TARGET_BYTES as usize).to_vec();
        let mut model = Model { target, read: Vec::new(), receives: Vec::new() };
        for wr_id in 0..REQUESTS {
            let sges = scattered(&pair, &mut chance, MAX_LEN);
            model.receives.push(sges.clone());
            let (b, wr) = (pair.b.qpn, RecvWr { wr_id, sges });
            pair.network.nodes[1].endpoint.post_recv(Time::ZERO, b, wr).unwrap();
        }
        (0..REQUESTS).for_each(|wr_id| post(&mut pair, &mut model, &mut chance, wr_id));
        let sent = pair.run().0;
        assert_eq!(sent, (0..REQUESTS).map(|wr_id| (wr_id, Success)).collect::<Vec<_>>());
        let target = pair.network.nodes[1].memory.peek(BASE, TARGET_BYTES as usize);
        assert!(target == model.target, "seed {seed}");
        // A READ that was executed again may return later bytes.
        if pair.counters(1).duplicate_reads == 0 {
            for (at, bytes) in &model.read {
                let landed = pair.network.nodes[0].memory.peek(BASE + at, bytes.len());
                assert!(landed == &bytes[..], "seed {seed}");
            }
        }
        overlapped += pair.counters(1).overlapped_packets;
        discarded += pair.counters(1).out_of_order_packets_discarded;
    }
    println!("{overlapped} packets placed in part, {discarded} discarded");
    assert!(overlapped > 500 && discarded < overlapped, "{overlapped} {discarded}");
}
