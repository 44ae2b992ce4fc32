//! Forged packets: real ones with a change, and invented ones.
//!
//! Changes are made to the bytes, so that headers which cannot be represented are tried, too.
//! Invented packets stay close to what would be accepted: sequence numbers around the last one
//! seen, keys and addresses of regions, lengths around the MTU.

use roce::verbs::{MemoryRegion, Qpn};
use roce::wire::{
    Aeth, AtomicAckEth, AtomicEth, BTH_BYTES, Bth, DEFAULT_PKEY, Deth, Ext, ExtKind, Headers,
    ICRC_BYTES, Opcode, Psn, Reth, Sack, Sreth, Syndrome,
};

use crate::node::QKEY;
use crate::script::{Record, pick};

/// A forger's knowledge of its victim.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    /// Queue pair that the packet goes to.
    pub(crate) qpn: Qpn,
    /// Sequence number of the last request, or response, that went there.
    pub(crate) request_psn: Psn,
    pub(crate) response_psn: Psn,
    /// A region of the victim, and a key of another one or of none.
    pub(crate) region: Option<MemoryRegion>,
    pub(crate) other_key: u32,
}

/// Interesting payload lengths.
const LENGTHS: [u16; 16] =
    [0, 0, 1, 4, 8, 40, 255, 256, 257, 512, 1023, 1024, 1025, 4096, 4100, 8000];

const SYNDROMES: [u8; 16] = [
    0x1f, 0x1f, 0x00, 0x05, 0x1e, 0x20, 0x21, 0x3f, 0x60, 0x60, 0x61, 0x62, 0x63, 0x64, 0x40, 0x65,
];

/// An invented packet.
pub(crate) fn make(target: &Target, record: Record) -> Vec<u8> {
    let Record { b, c, d, e, .. } = record;
    let opcode = Opcode::ALL[usize::from(b) % Opcode::ALL.len()];
    let len = if e & 0x80 == 0 { LENGTHS[usize::from(e & 15)] } else { u16::from(e & 0x7f) };
    let near = if opcode.is_response() { target.response_psn } else { target.request_psn };
    let bth = Bth {
        opcode,
        solicited: d & 1 != 0,
        mig_req: true,
        pad: (len.wrapping_neg() & 3) as u8,
        pkey: DEFAULT_PKEY,
        fecn: false,
        becn: false,
        dest_qp: target.qpn,
        ack_req: d & 2 != 0,
        psn: shifted(near, c),
    };
    let ext = extension(opcode.ext_kind(), target, len, record);
    let mut bytes = match Headers::new(bth, ext) {
        Ok(headers) => headers.emit().to_vec(),
        Err(_) => Vec::new(),
    };
    let padded = usize::from(len).next_multiple_of(4);
    bytes.resize(bytes.len() + padded + ICRC_BYTES, 0xee);
    bytes
}

/// Mostly near, sometimes half the number space away.
fn shifted(psn: Psn, by: u8) -> Psn {
    match by {
        0x80 => psn.plus(1 << 23),
        0x81 => psn.plus((1 << 23) - 1),
        0x82..=0xff => psn.minus(u32::from(by.wrapping_neg())),
        0..0x80 => psn.plus(u32::from(by)),
    }
}

fn extension(kind: ExtKind, target: &Target, len: u16, record: Record) -> Ext {
    let word = record.word();
    let reth = reth(target, len, record.d);
    let syndrome = SYNDROMES[usize::from(record.d >> 4)];
    let syndrome = Syndrome::from_u8(syndrome).unwrap_or(Syndrome::SequenceError);
    let aeth = Aeth { syndrome, msn: u32::from(record.a >> 3) };
    let qkey = if record.c & 0x40 == 0 { QKEY } else { word as u32 };
    let deth = Deth { qkey, src_qp: Qpn::new(word as u32) };
    let atomic = AtomicEth {
        addr: reth.addr & !u64::from(7 * (record.a >> 7)),
        rkey: reth.rkey,
        swap_or_add: word,
        compare: 0x5a5a_5a5a_5a5a_5a5a,
    };
    let sreth = Sreth {
        sequence: u32::from(record.a >> 4),
        offset: u32::from(record.d & 3) * 256 + u32::from(record.d >> 7),
    };
    let start = shifted(target.response_psn, record.c);
    let sack = Sack::new(u32::from(record.a), start, u128::from(word) << (record.d & 63));
    match kind {
        ExtKind::None => Ext::None,
        ExtKind::Imm => Ext::Imm(word as u32),
        ExtKind::Ieth => Ext::Ieth(reth.rkey),
        ExtKind::Reth => Ext::Reth(reth),
        ExtKind::RethImm => Ext::RethImm(reth, word as u32),
        ExtKind::Aeth => Ext::Aeth(aeth),
        ExtKind::AtomicEth => Ext::AtomicEth(atomic),
        ExtKind::AethAtomicAck => Ext::AethAtomicAck(aeth, AtomicAckEth { original: word }),
        ExtKind::Deth => Ext::Deth(deth),
        ExtKind::DethImm => Ext::DethImm(deth, word as u32),
        ExtKind::Cnp => Ext::Cnp,
        ExtKind::Sreth => Ext::Sreth(sreth),
        ExtKind::SrethImm => Ext::SrethImm(sreth, word as u32),
        ExtKind::SrethIeth => Ext::SrethIeth(sreth, reth.rkey),
        ExtKind::RethSreth => Ext::RethSreth(reth, sreth),
        ExtKind::RethSrethImm => Ext::RethSrethImm(reth, sreth, word as u32),
        ExtKind::AethSreth => Ext::AethSreth(aeth, sreth),
        ExtKind::AethSack => Ext::AethSack(aeth, sack),
    }
}

fn reth(target: &Target, len: u16, choice: u8) -> Reth {
    let region = target.region.unwrap_or(MemoryRegion { addr: 0, len: 0, lkey: 0, rkey: 0 });
    let addr = match choice >> 2 & 3 {
        0 | 1 => region.addr,
        2 => region.addr + region.len - u64::from(len).min(region.len),
        _ => region.addr.wrapping_add(region.len + 1).wrapping_sub(u64::from(len)),
    };
    let rkey = match choice >> 4 & 3 {
        0 | 1 => region.rkey,
        2 => region.lkey,
        _ => target.other_key,
    };
    let len = pick(choice >> 6, &[u32::from(len), u32::from(len), 2 * u32::from(len), 1 << 31]);
    Reth { addr, rkey, len }
}

/// Changes one thing about a packet.
pub(crate) fn bend(bytes: &mut Vec<u8>, target: &Target, record: Record) {
    let Record { b, c, d, e, .. } = record;
    if bytes.len() < BTH_BYTES + ICRC_BYTES {
        return;
    }
    match b % 12 {
        0 => bytes[0] = Opcode::ALL[usize::from(d) % Opcode::ALL.len()].as_u8(),
        1 => {
            let psn = shifted(psn_of(bytes), d);
            set_psn(bytes, psn);
        }
        2 => bytes[2..4].copy_from_slice(&[d, e]),
        3 => bytes[5..8].copy_from_slice(&target.qpn.get().to_be_bytes()[1..]),
        4 => bytes[1] ^= d,
        5 => bytes[4] ^= d,
        6 => bytes[8] ^= 0x80 | d,
        7 => bytes[BTH_BYTES] = SYNDROMES[usize::from(d & 15)],
        8 => replace_key(bytes, target.other_key),
        9 => resize(bytes, usize::from(LENGTHS[usize::from(d & 15)])),
        10 => xor_at(bytes, BTH_BYTES + usize::from(c % 32), d),
        _ => xor_at(bytes, usize::from(record.de()), 1 << (c & 7)),
    }
}

fn psn_of(bytes: &[u8]) -> Psn {
    Psn::new(u32::from_be_bytes([0, bytes[9], bytes[10], bytes[11]]))
}

fn set_psn(bytes: &mut [u8], psn: Psn) {
    bytes[9..12].copy_from_slice(&psn.get().to_be_bytes()[1..]);
}

/// Replaces the key of a RETH or AtomicETH, at its offset.
fn replace_key(bytes: &mut [u8], key: u32) {
    if let Some(place) = bytes.get_mut(BTH_BYTES + 8..BTH_BYTES + 12) {
        place.copy_from_slice(&key.to_be_bytes());
    }
}

fn resize(bytes: &mut Vec<u8>, payload: usize) {
    let kind = Opcode::from_u8(bytes[0]).map_or(ExtKind::None, Opcode::ext_kind);
    bytes.resize(BTH_BYTES + kind.len() + payload.next_multiple_of(4) + ICRC_BYTES, 0xdd);
}

fn xor_at(bytes: &mut [u8], at: usize, bits: u8) {
    let len = bytes.len();
    bytes[at % len] ^= bits;
}
