//! The classifier: a classic BPF program that turns the DSCP of a RoCEv2 packet into the number of its class.
//!
//! The number is computed ([`JOBS`](super::tree::JOBS) and the DSCP), so the program is the same for every plan: a job's
//! packets are in its class from the moment at which the class exists, and with other traffic where there is none. IPv4
//! with options, and IPv6; a fragment has no port, so it is other traffic, as is all that is not UDP to port 4791.
//!
//! Classic programs need no capability but `CAP_NET_ADMIN`, and no `bpf` system call. At an interface's queues packets begin
//! with the Ethernet header; a load from behind the end of a packet ends the program with "no match".

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
