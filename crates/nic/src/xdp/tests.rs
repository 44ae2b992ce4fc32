//! Frames as they are built and opened, over seeds; the sockets are tested in `nic/tests/xdp.rs`.

use roce::verbs::Ecn;
use roce::wire::{Bth, DEFAULT_PKEY, Ext, Headers, Opcode, Psn};
use roce::world::{NoMemory, Payload, Telemetry};

use rand_pcg::Pcg64;
use rand_pcg::rand_core::{Rng, SeedableRng};

use super::*;

const SEEDS: u64 = 300;

fn addresses(v6: bool) -> (SocketAddr, SocketAddr) {
    let [a, b] = if v6 {
        ["[fd78::1]:4791", "[fd78::2]:4791"]
    } else {
        ["10.78.0.1:4791", "10.78.0.2:4791"]
    };
    (a.parse().expect("literal"), b.parse().expect("literal"))
}

/// A frame of a random packet from the first address to the second, and what it carries.
fn frame(v6: bool, chance: &mut Pcg64) -> (Vec<u8>, Vec<u8>, Path) {
    let (from, to) = addresses(v6);
    let payload: Vec<u8> = (0..chance.next_u32() % 1025).map(|_| chance.next_u32() as u8).collect();
    let pad = (4 - payload.len() % 4) as u8 % 4;
    let bth = Bth {
        opcode: Opcode::UcSendOnly,
        solicited: false,
        mig_req: false,
        pad,
        pkey: DEFAULT_PKEY,
        fecn: false,
        becn: false,
        dest_qp: Qpn::new(chance.next_u32() & 0x00ff_ffff),
        ack_req: false,
        psn: Psn::new(chance.next_u32() & 0x00ff_ffff),
    };
    let headers = Headers::new(bth, Ext::None).expect("an opcode without extension");
    let path = Path {
        dscp: (chance.next_u32() % 64) as u8,
        ecn: [Ecn::NotEct, Ecn::Ect0, Ecn::Ect1, Ecn::Ce][chance.next_u32() as usize % 4],
        hop_limit: 1 + (chance.next_u32() % 255) as u8,
        ..Path::new(to)
    };
    let tx = TxFrame {
        path,
        header: headers.emit(),
        payload: Payload::Bytes(&payload),
        pad,
        telemetry: Telemetry::None,
    };
    let mut body = Staging::new(0);
    let mut out = Vec::new();
    assert!(build(&tx, &NoMemory, from, [[2; 6], [4; 6]], &mut body, &mut out));
    (out, payload, path)
}

#[test]
fn what_is_built_opens_at_the_other_end() {
    for seed in 0..SEEDS {
        for v6 in [false, true] {
            let mut chance = Pcg64::seed_from_u64(seed);
            let (mut bytes, payload, path) = frame(v6, &mut chance);
            let (from, to) = addresses(v6);
            // Ethernet pads short frames.
            bytes.resize(bytes.len().max(60), 0);
            let (origin, packet) = open(&bytes, to).expect("our own frame");
            assert_eq!((origin.source, origin.dest), (from, to.ip()), "seed {seed}");
            assert_eq!((origin.dscp, origin.ecn), (path.dscp, path.ecn), "seed {seed}");
            assert_eq!(origin.hop_limit, path.hop_limit, "seed {seed}");
            assert_eq!(packet.payload, payload, "seed {seed}");
            assert_eq!(open(&bytes, from).err(), Some(XdpRefused::Foreign), "seed {seed}");
        }
    }
}

#[test]
fn no_changed_bit_and_no_shorter_frame_is_delivered_as_another_packet() {
    for seed in 0..SEEDS {
        for v6 in [false, true] {
            let mut chance = Pcg64::seed_from_u64(seed);
            let (bytes, payload, _) = frame(v6, &mut chance);
            let to = addresses(v6).1;
            let cut = chance.next_u32() as usize % bytes.len();
            assert!(
                open(&bytes[..cut], to).is_err(),
                "seed {seed}: {cut} of {} bytes",
                bytes.len()
            );
            let mut flipped = bytes.clone();
            let bit = chance.next_u32() as usize % (8 * bytes.len());
            flipped[bit / 8] ^= 1 << (bit % 8);
            // Ethernet addresses, traffic class, flow label and hop limit are free to change on the
            // way.
            if let Ok((_, packet)) = open(&flipped, to) {
                assert_eq!(packet.payload, payload, "seed {seed}: bit {bit}");
            }
        }
    }
}

#[test]
fn random_bytes_and_random_tails_never_panic() {
    for seed in 0..SEEDS {
        let mut chance = Pcg64::seed_from_u64(seed);
        let (mut bytes, _, _) = frame(seed % 2 == 0, &mut chance);
        let from = chance.next_u32() as usize % bytes.len();
        bytes[from..].iter_mut().for_each(|byte| *byte = chance.next_u32() as u8);
        bytes.truncate(chance.next_u32() as usize % (bytes.len() + 1));
        for v6 in [false, true] {
            let _ = open(&bytes, addresses(v6).1);
        }
    }
}

#[test]
fn tags_fragments_and_other_ports_are_refused_with_the_reason() {
    let mut chance = Pcg64::seed_from_u64(7);
    let (bytes, _, _) = frame(false, &mut chance);
    let to = addresses(false).1;
    let mut tagged = bytes.clone();
    tagged.splice(12..12, [0x81, 0, 0, 5]);
    assert_eq!(open(&tagged, to).err(), Some(XdpRefused::Foreign));
    let mut port = bytes.clone();
    port[37] ^= 1;
    assert_eq!(open(&port, to).err(), Some(XdpRefused::Foreign));
    let mut fragment = bytes.clone();
    fragment[20] |= 0x20;
    assert_eq!(open(&fragment, to).err(), Some(XdpRefused::Malformed));
    let mut corrupt = bytes;
    corrupt[50] ^= 1;
    assert_eq!(open(&corrupt, to).err(), Some(XdpRefused::Icrc));
}

#[test]
fn jumps_of_the_program_stay_inside() {
    for v6 in [false, true] {
        let program = program::instructions(addresses(v6).0, MAX_FRAME, 3);
        assert!(program::jumps_lead_to_the_end(&program));
    }
}
