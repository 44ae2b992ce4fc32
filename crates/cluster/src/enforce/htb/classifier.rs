//! The classifier: a classic BPF program that turns the DSCP of a RoCEv2 packet into the number of
//! its class.
//!
//! The number is computed ([`JOBS`] and the DSCP), so the program is the same for every plan: a
//! job's packets are in its class from the moment at which the class exists, and with other traffic
//! where there is none. IPv4 with options, and IPv6; a fragment has no port, so it is other
//! traffic, as is all that is not UDP to port 4791.
//!
//! Classic programs need no capability but `CAP_NET_ADMIN`, and no `bpf` system call. At an
//! interface's queues packets begin with the Ethernet header; a load from behind the end of a
//! packet ends the program with "no match".

use super::tree::JOBS;

/// The port of RoCEv2 (InfiniBand Architecture, annex A17).
const ROCE_PORT: u32 = 4791;
/// The protocol number of UDP.
const UDP: u32 = 17;
const ETHERTYPE_IPV4: u32 = 0x0800;
const ETHERTYPE_IPV6: u32 = 0x86dd;

/// Bytes of the Ethernet header.
const ETHERNET: u32 = 14;

/// Where the kernel shows a packet's Ethernet type, a VLAN tag in hardware not counted.
const PACKET_PROTOCOL: u32 = -0x1000i32 as u32;

/// Instructions, as `linux/filter.h` encodes them.
mod op {
    pub(super) const LOAD_U16: u16 = 0x28;
    pub(super) const LOAD_U8: u16 = 0x30;
    pub(super) const LOAD_U16_BEHIND_X: u16 = 0x48;
    pub(super) const X_IS_IP_HEADER_LENGTH: u16 = 0xb1;
    pub(super) const IF_EQUAL: u16 = 0x15;
    pub(super) const IF_ANY: u16 = 0x45;
    pub(super) const SHIFT_RIGHT: u16 = 0x74;
    pub(super) const AND: u16 = 0x54;
    pub(super) const OR: u16 = 0x44;
    pub(super) const RETURN: u16 = 0x06;
    pub(super) const RETURN_A: u16 = 0x16;
}

/// Instructions before the last one, which is "no match".
const LEN: u8 = 23;

/// Code, number of instructions to skip if true and if false, operand.
type Instruction = (u16, u8, u8, u32);

/// The program for classes of the queueing discipline with that number.
pub(super) fn program(major: u16) -> Vec<u8> {
    let class = u32::from(major) << 16 | u32::from(JOBS);
    // From instruction `at` to the last one.
    let none = |at: u8| LEN - 1 - at;
    let is = |at: u8, value: u32| (op::IF_EQUAL, 0, none(at), value);
    let code: [Instruction; LEN as usize] = [
        (op::LOAD_U16, 0, 0, PACKET_PROTOCOL),
        (op::IF_EQUAL, 0, 11, ETHERTYPE_IPV4),
        (op::LOAD_U8, 0, 0, ETHERNET + 9),
        is(3, UDP),
        (op::LOAD_U16, 0, 0, ETHERNET + 6),
        // More fragments follow, or some went before.
        (op::IF_ANY, none(5), 0, 0x3fff),
        (op::X_IS_IP_HEADER_LENGTH, 0, 0, ETHERNET),
        (op::LOAD_U16_BEHIND_X, 0, 0, ETHERNET + 2),
        is(8, ROCE_PORT),
        (op::LOAD_U8, 0, 0, ETHERNET + 1),
        (op::SHIFT_RIGHT, 0, 0, 2),
        (op::OR, 0, 0, class),
        (op::RETURN_A, 0, 0, 0),
        is(13, ETHERTYPE_IPV6),
        (op::LOAD_U8, 0, 0, ETHERNET + 6),
        is(15, UDP),
        (op::LOAD_U16, 0, 0, ETHERNET + 42),
        is(17, ROCE_PORT),
        (op::LOAD_U16, 0, 0, ETHERNET),
        (op::SHIFT_RIGHT, 0, 0, 6),
        (op::AND, 0, 0, 0x3f),
        (op::OR, 0, 0, class),
        (op::RETURN_A, 0, 0, 0),
    ];
    code.iter().chain([&(op::RETURN, 0, 0, 0)]).flat_map(encode).collect()
}

fn encode((code, if_true, if_false, operand): &Instruction) -> Vec<u8> {
    let mut bytes = code.to_ne_bytes().to_vec();
    bytes.extend([*if_true, *if_false]);
    bytes.extend(operand.to_ne_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAJOR: u16 = 0xabcd;

    /// What the program returns for a packet, as the kernel runs it: a load from behind the end
    /// returns 0.
    fn run(packet: &[u8], protocol: u32) -> u32 {
        execute(&program(MAJOR), packet, protocol).unwrap_or(0)
    }

    fn execute(program: &[u8], packet: &[u8], protocol: u32) -> Option<u32> {
        let code: Vec<&[u8; 8]> = program.as_chunks().0.iter().collect();
        let load = |at: u32, len: usize| {
            let at = at as usize;
            let bytes = packet.get(at..at + len)?;
            Some(bytes.iter().fold(0, |value, byte| value << 8 | u32::from(*byte)))
        };
        let (mut a, mut x, mut at) = (0, 0, 0);
        loop {
            let [op_low, op_high, if_true, if_false, operand @ ..] = *code[at];
            let k = u32::from_ne_bytes(operand);
            let branch = |is_true: bool| usize::from(if is_true { if_true } else { if_false });
            at += 1;
            match u16::from_ne_bytes([op_low, op_high]) {
                op::LOAD_U16 if k == PACKET_PROTOCOL => a = protocol,
                op::LOAD_U16 => a = load(k, 2)?,
                op::LOAD_U8 => a = load(k, 1)?,
                op::LOAD_U16_BEHIND_X => a = load(x + k, 2)?,
                op::X_IS_IP_HEADER_LENGTH => x = 4 * (load(k, 1)? & 0xf),
                op::IF_EQUAL => at += branch(a == k),
                op::IF_ANY => at += branch(a & k != 0),
                op::SHIFT_RIGHT => a >>= k,
                op::AND => a &= k,
                op::OR => a |= k,
                op::RETURN => return Some(k),
                op::RETURN_A => return Some(a),
                other => panic!("no such instruction: {other:#x}"),
            }
        }
    }

    /// A packet of 20 bytes behind its UDP header; with `options`, of so many words.
    fn ipv4(dscp: u8, options: u8, port: u16) -> Vec<u8> {
        let mut packet = vec![0; 12];
        packet.extend([8, 0, 0x45 + options, dscp << 2 | 2, 0, 0, 0, 0, 0x40, 0, 64, 17]);
        packet.resize(packet.len() + 10 + 4 * usize::from(options) + 2, 0xff);
        packet.extend(port.to_be_bytes());
        packet.resize(packet.len() + 24, 0);
        packet
    }

    fn ipv6(dscp: u8, next: u8, port: u16) -> Vec<u8> {
        let mut packet = vec![0; 12];
        let class = dscp << 2 | 1;
        packet.extend([
            0x86,
            0xdd,
            0x60 | class >> 4,
            class << 4 | 0xf,
            0xff,
            0xff,
            0,
            0,
            next,
            64,
        ]);
        packet.resize(packet.len() + 32 + 2, 0xff);
        packet.extend(port.to_be_bytes());
        packet.resize(packet.len() + 24, 0);
        packet
    }

    fn class(dscp: u8) -> u32 {
        u32::from(MAJOR) << 16 | u32::from(JOBS) | u32::from(dscp)
    }

    #[test]
    fn every_code_point_has_its_class() {
        for dscp in 0..64 {
            assert_eq!(run(&ipv4(dscp, 0, 4791), ETHERTYPE_IPV4), class(dscp));
            assert_eq!(run(&ipv4(dscp, 3, 4791), ETHERTYPE_IPV4), class(dscp), "with options");
            assert_eq!(run(&ipv6(dscp, 17, 4791), ETHERTYPE_IPV6), class(dscp));
        }
    }

    #[test]
    fn what_is_no_roce_packet_has_none() {
        let changed = |at: usize, value: u8| {
            let mut packet = ipv4(10, 0, 4791);
            packet[at] = value;
            packet
        };
        assert_eq!(run(&ipv4(10, 0, 4790), ETHERTYPE_IPV4), 0);
        assert_eq!(run(&changed(23, 6), ETHERTYPE_IPV4), 0, "TCP");
        assert_eq!(run(&changed(20, 0x20), ETHERTYPE_IPV4), 0, "the first fragment");
        assert_eq!(run(&changed(21, 1), ETHERTYPE_IPV4), 0, "a later fragment");
        assert_eq!(run(&ipv4(10, 0, 4791), 0x8100), 0, "a VLAN");
        assert_eq!(run(&ipv6(10, 44, 4791), ETHERTYPE_IPV6), 0, "a fragment of IPv6");
        assert_eq!(run(&ipv6(10, 17, 4792), ETHERTYPE_IPV6), 0);
    }

    #[test]
    fn packets_cut_off_have_none_before_their_port() {
        for (packet, protocol, port_ends) in
            [(ipv4(10, 0, 4791), ETHERTYPE_IPV4, 38), (ipv6(10, 17, 4791), ETHERTYPE_IPV6, 58)]
        {
            for len in 0..packet.len() {
                let wanted = if len < port_ends { 0 } else { class(10) };
                assert_eq!(run(&packet[..len], protocol), wanted, "{len} bytes");
            }
        }
    }
}
