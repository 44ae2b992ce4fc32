//! Subnet management packets (SMPs) with directed routes, and the attributes that they carry (IBA
//! 14.2).
//!
//! An SMP is a management datagram of 256 bytes: a header of 64, an attribute of 64, and two paths
//! of 64. It travels by the list of ports in its initial path, so it needs neither LIDs nor tables.
//! What arrives is checked for its form here; whether it makes sense is for who asked.
//!
//! Numbers of bytes are those of the specification, counted from the beginning of the attribute.

use alloc::string::String;

use thiserror::Error;

/// Bytes of a management datagram.
pub const MAD_BYTES: usize = 256;

/// Most hops of a directed route.
pub const MAX_HOPS: usize = 63;

/// Entries of a block of a linear forwarding table.
pub const LFT_BLOCK: usize = 64;

/// Management class "subnet management, directed route".
pub const DIRECTED_ROUTE: u8 = 0x81;

/// The permissive LID: the directed route alone leads the packet.
const PERMISSIVE_LID: u16 = 0xffff;

/// The prefix of the GIDs of a subnet that has no other: link-local.
pub const DEFAULT_PREFIX: u64 = 0xfe80 << 48;

const DATA: usize = 64;
const INITIAL_PATH: usize = 128;

/// What an SMP asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Read an attribute.
    Get,
    /// Write one, and read it back.
    Set,
    /// The response to both.
    Response,
}

impl Method {
    fn code(self) -> u8 {
        match self {
            Method::Get => 0x01,
            Method::Set => 0x02,
            Method::Response => 0x81,
        }
    }
}

/// An attribute, by its identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Attribute {
    /// The node's name.
    NodeDescription,
    /// What it is, and its GUIDs.
    NodeInfo,
    /// A switch's tables: how large they can be, and are.
    SwitchInfo,
    /// A port: its LID, its state, its link.
    PortInfo,
    /// A block of a port's partition keys.
    PKeyTable,
    /// The virtual lane of each service level at a port.
    SlToVl,
    /// How a port shares its link among virtual lanes.
    VlArbitration,
    /// A block of a linear forwarding table.
    LinearForwardingTable,
    /// A block of a multicast forwarding table, for 16 ports.
    MulticastForwardingTable,
    /// The subnet manager at a port.
    SmInfo,
}

impl Attribute {
    const ALL: [Attribute; 10] = [
        Attribute::NodeDescription,
        Attribute::NodeInfo,
        Attribute::SwitchInfo,
        Attribute::PortInfo,
        Attribute::PKeyTable,
        Attribute::SlToVl,
        Attribute::VlArbitration,
        Attribute::LinearForwardingTable,
        Attribute::MulticastForwardingTable,
        Attribute::SmInfo,
    ];

    /// Its identifier.
    pub fn id(self) -> u16 {
        match self {
            Attribute::NodeDescription => 0x10,
            Attribute::NodeInfo => 0x11,
            Attribute::SwitchInfo => 0x12,
            Attribute::PortInfo => 0x15,
            Attribute::PKeyTable => 0x16,
            Attribute::SlToVl => 0x17,
            Attribute::VlArbitration => 0x18,
            Attribute::LinearForwardingTable => 0x19,
            Attribute::MulticastForwardingTable => 0x1b,
            Attribute::SmInfo => 0x20,
        }
    }
}

/// Ports to leave by, from the node that sends.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DirectedRoute {
    hops: u8,
    ports: [u8; MAX_HOPS],
}

impl DirectedRoute {
    /// To the node itself.
    pub const HERE: DirectedRoute = DirectedRoute { hops: 0, ports: [0; MAX_HOPS] };

    /// One hop further; `None` where there are too many.
    pub fn then(mut self, port: u8) -> Option<DirectedRoute> {
        *self.ports.get_mut(usize::from(self.hops))? = port;
        self.hops += 1;
        Some(self)
    }

    /// Its ports.
    pub fn ports(&self) -> &[u8] {
        &self.ports[..usize::from(self.hops)]
    }
}

impl core::fmt::Debug for DirectedRoute {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{self}")
    }
}

impl core::fmt::Display for DirectedRoute {
    /// As the tools of InfiniBand write it: `0,1,3`.
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("0")?;
        self.ports().iter().try_for_each(|port| write!(f, ",{port}"))
    }
}

/// Why a datagram is no response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum MadError {
    /// It has not 256 bytes.
    #[error("{0} bytes, not 256")]
    Length(usize),
    /// It is of another class or version.
    #[error("class {class:#04x}, version {version}: not a directed-route SMP")]
    Class {
        /// The management class.
        class: u8,
        /// Of the class.
        version: u8,
    },
    /// It is no response.
    #[error("method {0:#04x} is not a response")]
    Method(u8),
    /// It has not been to its end and back.
    #[error("the direction bit is not set")]
    Outbound,
    /// Its path is longer than a path can be.
    #[error("{0} hops")]
    Hops(u8),
    /// Nobody asked for such an attribute.
    #[error("attribute {0:#06x}")]
    Attribute(u16),
}

/// An SMP with a directed route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Smp {
    /// What it asks for, or that it is a response.
    pub method: Method,
    /// Of a response: 0 if it went well (IBA 14.2.1.1 and 13.4.7).
    pub status: u16,
    /// Tells responses apart.
    pub transaction: u64,
    /// The attribute.
    pub attribute: Attribute,
    /// Which of several: a port, a block.
    pub modifier: u32,
    /// The M_Key.
    pub m_key: u64,
    /// To where.
    pub route: DirectedRoute,
    /// The attribute's bytes.
    pub data: [u8; 64],
}

impl Smp {
    /// A request.
    pub fn get(transaction: u64, route: DirectedRoute, attribute: Attribute, modifier: u32) -> Smp {
        let (method, status, m_key, data) = (Method::Get, 0, 0, [0; 64]);
        Smp { method, status, transaction, attribute, modifier, m_key, route, data }
    }

    /// As it is sent.
    pub fn emit(&self) -> [u8; MAD_BYTES] {
        let mut mad = [0; MAD_BYTES];
        mad[..4].copy_from_slice(&[1, DIRECTED_ROUTE, 1, self.method.code()]);
        let is_answer = self.method == Method::Response;
        let direction = if is_answer { 1 << 15 } else { 0 };
        put(&mut mad, 4, &(direction | self.status & 0x7fff).to_be_bytes());
        // The hop pointer is 0 where a request begins, and where a response has come back.
        mad[7] = self.route.hops;
        put(&mut mad, 8, &self.transaction.to_be_bytes());
        put(&mut mad, 16, &self.attribute.id().to_be_bytes());
        put(&mut mad, 20, &self.modifier.to_be_bytes());
        put(&mut mad, 24, &self.m_key.to_be_bytes());
        put(&mut mad, 32, &PERMISSIVE_LID.to_be_bytes());
        put(&mut mad, 34, &PERMISSIVE_LID.to_be_bytes());
        put(&mut mad, DATA, &self.data);
        // The entry 0 is not used.
        put(&mut mad, INITIAL_PATH + 1, self.route.ports());
        mad
    }

    /// An response, as it arrived.
    ///
    /// # Errors
    /// When it is none, or nobody requester for its attribute.
    pub fn parse_response(bytes: &[u8]) -> Result<Smp, MadError> {
        let mad: &[u8; MAD_BYTES] = bytes.try_into().map_err(|_| MadError::Length(bytes.len()))?;
        let [_, class, version, method, ..] = *mad;
        if class != DIRECTED_ROUTE || version != 1 {
            return Err(MadError::Class { class, version });
        }
        if method != Method::Response.code() {
            return Err(MadError::Method(method));
        }
        let status = u16_at(mad, 4);
        if status & 1 << 15 == 0 {
            return Err(MadError::Outbound);
        }
        if usize::from(mad[7]) > MAX_HOPS {
            return Err(MadError::Hops(mad[7]));
        }
        let id = u16_at(mad, 16);
        let attribute = Attribute::ALL.into_iter().find(|attribute| attribute.id() == id);
        let mut ports = [0; MAX_HOPS];
        let hops = usize::from(mad[7]);
        ports[..hops].copy_from_slice(&mad[INITIAL_PATH + 1..INITIAL_PATH + 1 + hops]);
        let mut data = [0; 64];
        data.copy_from_slice(&mad[DATA..INITIAL_PATH]);
        Ok(Smp {
            method: Method::Response,
            status: status & 0x7fff,
            transaction: u64_at(mad, 8),
            attribute: attribute.ok_or(MadError::Attribute(id))?,
            modifier: u32::from_be_bytes([mad[20], mad[21], mad[22], mad[23]]),
            m_key: u64_at(mad, 24),
            route: DirectedRoute { hops: mad[7], ports },
            data,
        })
    }
}

pub(crate) fn put(mad: &mut [u8; MAD_BYTES], at: usize, bytes: &[u8]) {
    mad[at..at + bytes.len()].copy_from_slice(bytes);
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

/// What a node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeType {
    /// A channel adapter: a host's port or ports.
    ChannelAdapter,
    /// A switch.
    Switch,
    /// A router to other subnets.
    Router,
}

/// Attribute `NodeInfo` (IBA 14.2.5.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeInfo {
    /// What it is.
    pub node_type: NodeType,
    /// Its ports, a switch's port 0 not counted.
    pub ports: u8,
    /// The GUID of the node.
    pub guid: u64,
    /// The GUID of the port that was asked; of a switch, of port 0.
    pub port_guid: u64,
    /// The port by which the request came.
    pub local_port: u8,
}

impl NodeInfo {
    /// `None` where the type is none.
    pub fn parse(data: &[u8; 64]) -> Option<NodeInfo> {
        let node_type = match data[2] {
            1 => NodeType::ChannelAdapter,
            2 => NodeType::Switch,
            3 => NodeType::Router,
            _ => return None,
        };
        Some(NodeInfo {
            node_type,
            ports: data[3],
            guid: u64_at(data, 12),
            port_guid: u64_at(data, 20),
            local_port: data[36],
        })
    }

    /// As a node responds.
    pub fn emit(&self) -> [u8; 64] {
        let mut data = [0; 64];
        let code = match self.node_type {
            NodeType::ChannelAdapter => 1,
            NodeType::Switch => 2,
            NodeType::Router => 3,
        };
        data[..4].copy_from_slice(&[1, 1, code, self.ports]);
        data[4..12].copy_from_slice(&self.guid.to_be_bytes());
        data[12..20].copy_from_slice(&self.guid.to_be_bytes());
        data[20..28].copy_from_slice(&self.port_guid.to_be_bytes());
        data[36] = self.local_port;
        data
    }
}

/// Attribute `NodeDescription`: text that ends at the first zero; what is no UTF-8 is replaced, and
/// quotes and line breaks, which names cannot have.
pub fn node_description(data: &[u8; 64]) -> String {
    let end = data.iter().position(|byte| *byte == 0).unwrap_or(data.len());
    let text = String::from_utf8_lossy(&data[..end]);
    let is_bad = |c: char| c.is_control() || matches!(c, '"' | '#' | '\\');
    text.trim().chars().map(|c| if is_bad(c) { '_' } else { c }).collect()
}

/// The logical state of a port (IBA table 155).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PortState {
    /// Nobody is at the other end.
    Down,
    /// The link is there; only SMPs pass.
    Initialize,
    /// Configured; no data yet.
    Armed,
    /// In use.
    Active,
}

impl PortState {
    /// Its number.
    pub fn code(self) -> u8 {
        match self {
            PortState::Down => 1,
            PortState::Initialize => 2,
            PortState::Armed => 3,
            PortState::Active => 4,
        }
    }
}

/// In the last byte of the capability mask: a subnet manager runs there.
const IS_MANAGER: u8 = 1 << 1;

/// What is read of attribute `PortInfo` (IBA 14.2.5.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortInfo {
    /// Its LID; of a switch, that of port 0 counts.
    pub lid: u16,
    /// The LID of the subnet manager.
    pub manager_lid: u16,
    /// Its state; `None` where it is none of the four.
    pub state: Option<PortState>,
    /// Low bits of the LID that it ignores.
    pub lmc: u8,
    /// Lanes for data that it can have, 1 to 15; 0 where the code is none.
    pub lanes: u8,
    /// A subnet manager runs there.
    pub is_manager: bool,
}

impl PortInfo {
    /// From the attribute.
    pub fn parse(data: &[u8; 64]) -> PortInfo {
        let state = match data[32] & 0xf {
            1 => Some(PortState::Down),
            2 => Some(PortState::Initialize),
            3 => Some(PortState::Armed),
            4 => Some(PortState::Active),
            _ => None,
        };
        let lanes = lanes_of(data[37] >> 4);
        PortInfo {
            lid: u16_at(data, 16),
            manager_lid: u16_at(data, 18),
            state,
            lmc: data[34] & 7,
            lanes,
            is_manager: data[23] & IS_MANAGER != 0,
        }
    }

    /// As a node responds, as far as it is read.
    pub fn emit(&self) -> [u8; 64] {
        let mut data = [0; 64];
        data[16..18].copy_from_slice(&self.lid.to_be_bytes());
        data[18..20].copy_from_slice(&self.manager_lid.to_be_bytes());
        data[23] = if self.is_manager { IS_MANAGER } else { 0 };
        data[32] = self.state.map_or(0, PortState::code);
        data[34] = self.lmc & 7;
        let code = if self.lanes >= 15 { 5 } else { (self.lanes.max(1).ilog2() + 1) as u8 };
        data[37] = code << 4;
        data
    }
}

/// How many virtual lanes of data a code of VLCap or OperationalVLs stands for; 0 if it is none.
fn lanes_of(code: u8) -> u8 {
    match code {
        1..=4 => 1 << (code - 1),
        5 => 15,
        _ => 0,
    }
}

/// Entries of a block of a VL arbitration table.
const ARBITRATION_BLOCK: u8 = 32;

/// How many virtual lanes of data a port can send on: what it has, or while it is in use what it
/// was set to, and each of them has to fit into the low-priority arbitration table
/// (VLArbitrationLowCap); from attribute `PortInfo`. At least 1.
pub fn usable_lanes(port_info: &[u8; 64]) -> u8 {
    let is_in_use = PortInfo::parse(port_info).state >= Some(PortState::Armed);
    let code = if is_in_use { port_info[43] >> 4 } else { port_info[37] >> 4 };
    lanes_of(code).min(port_info[40]).max(1)
}

/// Blocks of the low and of the high-priority arbitration table of a port; from attribute
/// `PortInfo`.
pub fn arbitration_blocks(port_info: &[u8; 64]) -> [u8; 2] {
    [port_info[40], port_info[39]].map(|entries| entries.div_ceil(ARBITRATION_BLOCK).min(2))
}

/// Attribute `SLtoVLMappingTable` (IBA 14.2.5.8): service levels take the lanes in turn, so the
/// first have their own.
pub fn level_mapping(lanes: u8) -> [u8; 64] {
    let lane = |level: usize| (level % usize::from(lanes.max(1))) as u8;
    core::array::from_fn(|at| match at {
        0..8 => lane(2 * at) << 4 | lane(2 * at + 1),
        _ => 0,
    })
}

/// The first block of attribute `VLArbitrationTable` (IBA 14.2.5.9) for the low priority: every
/// lane gets an equal share, in turns of 64 times 64 bytes, one packet of the largest MTU.
pub fn equal_arbitration(lanes: u8) -> [u8; 64] {
    core::array::from_fn(|at| match ((at / 2) as u8, at % 2) {
        (lane, _) if lane >= lanes => 0,
        (lane, 0) => lane,
        _ => 64,
    })
}

/// Whether a switch takes one `SLtoVLMappingTable` for all input ports at once
/// (OptimizedSLtoVLMappingProgramming); from attribute `SwitchInfo`.
pub fn maps_all_inputs(switch_info: &[u8; 64]) -> bool {
    switch_info[11] & 1 != 0
}

/// Whether a port can tell its clients to register anew (IsClientReregistrationSupported); from
/// attribute `PortInfo`.
pub fn can_reregister(port_info: &[u8; 64]) -> bool {
    port_info[20] & 1 << 1 != 0
}

/// The management key that guards a port (IBA 14.2.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyGuard {
    /// The M_Key.
    pub key: u64,
    /// M_KeyProtectBits: 1 hides the key from those who have not got it, 2 and 3 refuse all that
    /// they ask for; 0 does neither. Nothing can be set without the key.
    pub protection: u8,
    /// Seconds after which the port gives the protection up when its manager is silent after a
    /// violation; 0 is never.
    pub lease_s: u16,
}

impl KeyGuard {
    /// Of a port; from attribute `PortInfo`.
    pub fn parse(port_info: &[u8; 64]) -> KeyGuard {
        KeyGuard {
            key: u64_at(port_info, 0),
            protection: port_info[34] >> 6,
            lease_s: u16_at(port_info, 26),
        }
    }

    fn put(self, data: &mut [u8; 64]) {
        data[..8].copy_from_slice(&self.key.to_be_bytes());
        data[26..28].copy_from_slice(&self.lease_s.to_be_bytes());
        data[34] = data[34] & 0x3f | (self.protection & 3) << 6;
    }
}

/// In byte 43 of `PortInfo`: PartitionEnforcementInbound and Outbound.
const ENFORCEMENT: u8 = 0x0c;

/// Whether a port of a switch discards packets of partitions that its table does not hold, in both
/// directions; from attribute `PortInfo`.
pub fn enforces_partitions(port_info: &[u8; 64]) -> bool {
    port_info[43] & ENFORCEMENT == ENFORCEMENT
}

/// What a manager sets of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortSetting {
    /// Its LID.
    pub lid: u16,
    /// The LID of the manager.
    pub manager_lid: u16,
    /// The service level of packets to the manager (MasterSMSL).
    pub manager_level: u8,
    /// Who may manage it; `None` leaves that.
    pub guard: Option<KeyGuard>,
    /// Whether it discards packets of partitions that its table does not hold; `None` leaves it.
    pub enforces_partitions: Option<bool>,
    /// The state that it enters; `None` leaves it.
    pub state: Option<PortState>,
    /// Low bits of the LID that it ignores.
    pub lmc: u8,
}

impl PortSetting {
    /// The attribute that sets it, from those of the port and of the port at the other end, as they
    /// were read: the largest MTU and the most VLs that both have, unless the port is in use.
    /// Widths and speeds stay.
    pub fn emit(&self, own: &[u8; 64], far: Option<&[u8; 64]>) -> [u8; 64] {
        let far = far.unwrap_or(own);
        let is_in_use = PortInfo::parse(own).state.is_some_and(|now| now >= PortState::Armed);
        let mut data = *own;
        data[8..16].copy_from_slice(&DEFAULT_PREFIX.to_be_bytes());
        data[16..18].copy_from_slice(&self.lid.to_be_bytes());
        data[18..20].copy_from_slice(&self.manager_lid.to_be_bytes());
        // 0 changes nothing: the width, the states, the speeds.
        data[29] = 0;
        data[32] = data[32] & 0xf0 | self.state.map_or(0, PortState::code);
        data[33] = 0;
        data[34] = data[34] & !7 | self.lmc & 7;
        data[35] &= 0xf0;
        data[36] = data[36] & 0xf0 | self.manager_level & 0xf;
        if is_in_use {
            // The other end has the same, and is not changed with it. 0 lanes change nothing.
            data[43] &= 0xf;
        } else {
            let mtu = (own[41] & 0xf).min(far[41] & 0xf);
            data[36] = data[36] & 0xf | mtu << 4;
            let lanes = (own[37] >> 4).min(far[37] >> 4);
            data[43] = data[43] & 0xf | lanes << 4;
        }
        if let Some(guard) = self.guard {
            guard.put(&mut data);
        }
        if let Some(enforces) = self.enforces_partitions {
            data[43] = data[43] & !ENFORCEMENT | if enforces { ENFORCEMENT } else { 0 };
        }
        // Clients have to register anew with whoever manages now, where the port can tell them.
        data[51] =
            data[51] & 0x7f | if can_reregister(own) && self.state.is_none() { 0x80 } else { 0 };
        data[63] &= 0xe0;
        data
    }
}

/// The service level of packets to the manager (MasterSMSL); from attribute `PortInfo`.
pub fn manager_level(port_info: &[u8; 64]) -> u8 {
    port_info[36] & 0xf
}

/// How many LIDs the linear table of a switch can hold; from attribute `SwitchInfo`.
pub fn linear_capacity(switch_info: &[u8; 64]) -> u16 {
    u16_at(switch_info, 0)
}

/// The last LID of the linear table of a switch; from attribute `SwitchInfo`.
pub fn linear_top(switch_info: &[u8; 64]) -> u16 {
    u16_at(switch_info, 6)
}

/// How many LIDs the multicast table of a switch can hold; from attribute `SwitchInfo`.
pub fn multicast_capacity(switch_info: &[u8; 64]) -> u16 {
    u16_at(switch_info, 4)
}

/// Whether the state of a port has changed since it was last cleared; from attribute `SwitchInfo`.
pub fn has_port_change(switch_info: &[u8; 64]) -> bool {
    switch_info[11] & 1 << 2 != 0
}

/// The attribute `SwitchInfo` that sets the last LID of the linear table, and leaves
/// PortStateChange: a zero is ignored.
pub fn switch_setting(own: &[u8; 64], top: u16) -> [u8; 64] {
    let mut data = *own;
    data[6..8].copy_from_slice(&top.to_be_bytes());
    data[11] &= !(1 << 2);
    data
}

/// The attribute `SwitchInfo` that clears PortStateChange, and sets nothing else.
pub fn port_change_clearing(own: &[u8; 64]) -> [u8; 64] {
    let mut data = *own;
    data[11] |= 1 << 2;
    data
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(ports: &[u8]) -> DirectedRoute {
        ports.iter().fold(DirectedRoute::HERE, |route, port| route.then(*port).expect("short"))
    }

    /// A request for NodeInfo two hops away, written down by hand from the specification.
    #[test]
    fn a_question_is_laid_out_as_specified() {
        let smp = Smp::get(0x1122_3344_5566_7788, route(&[3, 7]), Attribute::NodeInfo, 9);
        let mad = smp.emit();
        let header: [u8; 36] = [
            1, 0x81, 1, 0x01, 0, 0, 0, 2, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0, 0x11,
            0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff,
        ];
        assert_eq!(mad[..36], header);
        assert_eq!(mad[128..132], [0, 3, 7, 0]);
        assert!(mad[36..128].iter().chain(&mad[132..]).all(|byte| *byte == 0));
    }

    #[test]
    fn answers_are_read_as_they_were_written() {
        let mut smp = Smp::get(7, route(&[1; MAX_HOPS]), Attribute::PortInfo, 2);
        (smp.method, smp.status, smp.m_key, smp.data) = (Method::Response, 0x1c, 5, [0xa5; 64]);
        assert_eq!(Smp::parse_response(&smp.emit()), Ok(smp));
        assert_eq!(route(&[1; MAX_HOPS]).then(1), None);
    }

    #[test]
    fn what_is_no_answer_is_refused() {
        let mut response = Smp::get(7, route(&[1, 2]), Attribute::PortInfo, 2);
        response.method = Method::Response;
        let mad = response.emit();
        let changed = |at: usize, to: u8| {
            let mut mad = mad;
            mad[at] = to;
            Smp::parse_response(&mad).expect_err("changed")
        };
        assert_eq!(Smp::parse_response(&mad[..255]), Err(MadError::Length(255)));
        assert_eq!(changed(1, 0x01), MadError::Class { class: 0x01, version: 1 });
        assert_eq!(changed(2, 2), MadError::Class { class: 0x81, version: 2 });
        assert_eq!(changed(3, 0x01), MadError::Method(1));
        assert_eq!(changed(4, 0), MadError::Outbound);
        assert_eq!(changed(7, 64), MadError::Hops(64));
        assert_eq!(changed(17, 0x99), MadError::Attribute(0x99));
    }

    #[test]
    fn attributes_are_read_as_they_were_written() {
        let node = NodeInfo {
            node_type: NodeType::Switch,
            ports: 36,
            guid: 0x20_0000,
            port_guid: 0x20_0001,
            local_port: 4,
        };
        assert_eq!(NodeInfo::parse(&node.emit()), Some(node));
        let mut unknown = node.emit();
        unknown[2] = 9;
        assert_eq!(NodeInfo::parse(&unknown), None);
        for state in [PortState::Down, PortState::Initialize, PortState::Armed, PortState::Active] {
            for lanes in [1, 2, 4, 8, 15] {
                let (lid, manager_lid) = (0xbfff, 1);
                let state = Some(state);
                let is_manager = lanes > 4;
                let port = PortInfo { lid, manager_lid, state, lmc: 7, lanes, is_manager };
                assert_eq!(PortInfo::parse(&port.emit()), port);
            }
        }
        let mut text = [0; 64];
        text[..9].copy_from_slice(b"a\"b\n#\xff e\0");
        assert_eq!(node_description(&text), "a_b__\u{fffd} e");
        assert_eq!(node_description(&[b'x'; 64]).len(), 64);
    }
}
