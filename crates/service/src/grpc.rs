//! What bounds a gRPC server of ours, whoever calls it.

use tonic::transport::Server;

/// Calls that one connection may have under way; more are reset.
pub const MAX_CALLS_PER_CONNECTION: u32 = 64;

/// Bytes of the headers of a call, decoded: a token and a few names.
const MAX_HEADER_LIST_BYTES: u32 = 8 << 10;

/// Calls that a peer has reset and no task has taken yet; more end the connection.
const MAX_PENDING_RESETS: usize = 20;

/// Calls of a connection that were reset because the peer broke the protocol or a limit; more end
/// it.
const MAX_LOCAL_RESETS: usize = 128;

/// A gRPC server whose connections are bounded in calls, headers and resets, whoever they are from.
/// All daemons begin with it: the library's own limits are none, or too wide for ports that
/// strangers reach.
pub fn bounded_server() -> Server {
    Server::builder()
        .max_concurrent_streams(MAX_CALLS_PER_CONNECTION)
        .http2_max_header_list_size(MAX_HEADER_LIST_BYTES)
        .http2_max_pending_accept_reset_streams(Some(MAX_PENDING_RESETS))
        .http2_max_local_error_reset_streams(Some(MAX_LOCAL_RESETS))
}
