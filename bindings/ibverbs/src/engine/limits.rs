//! The limits of a device. At least as much as `ibv_query_device` reports is possible; of
//! protection domains, memory windows and shared receive queues more is.

use roce::endpoint::EndpointConfig;

/// Sizes of the endpoint's tables.
pub(crate) const ENDPOINT: EndpointConfig = EndpointConfig {
    max_qps: 1 << 12,
    max_cqs: 1 << 14,
    max_regions: 1 << 16,
    max_cqe: 1 << 20,
    max_qp_wr: 1 << 14,
    burst_packets: 32,
    qpn_prefix: 0,
    mtu: roce::endpoint::Mtu::M4096,
    seed: 0,
};

/// Most bytes of inline data of a work request. They are copied when posted, into memory reserved
/// for the whole send queue when the queue pair is created.
pub(crate) const MAX_INLINE_BYTES: u32 = 1024;

/// Most READs and atomics of a queue pair in flight, in each direction.
pub(crate) const MAX_RD_ATOMIC: u8 = roce::endpoint::MAX_RD_ATOMIC;

/// Most receives of a shared receive queue.
pub(crate) const MAX_SRQ_WR: u32 = ENDPOINT.max_qp_wr;

/// Longest region: the address space of a process.
pub(crate) const MAX_MR_BYTES: u64 = 1 << 47;

/// Longest message in bytes.
pub(crate) const MAX_MESSAGE_BYTES: u32 = 1 << 31;

/// Most protection domains.
pub(crate) const MAX_PDS: u32 = 1 << 16;

/// Most memory windows.
pub(crate) const MAX_WINDOWS: u32 = 1 << 14;

/// Most shared receive queues.
pub(crate) const MAX_SRQS: u32 = 1 << 12;

/// Most multicast groups, and queue pairs in one of them.
pub(crate) const MAX_GROUPS: u32 = 256;
/// See [`MAX_GROUPS`].
pub(crate) const MAX_GROUP_QPS: u32 = 256;
/// Most of both together, the endpoint's limit.
pub(crate) const MAX_GROUP_ATTACHMENTS: u32 = 1 << 13;
