//! What a daemon says about itself, whichever of the two it is.

use tonic::Code;

use super::auth::AddToken;
use super::peer::Peer;
use super::proto::dpu_client::DpuClient;
use super::proto::target_client::TargetClient;
use super::proto::{StatusReply, StatusRequest};
use crate::exit::CliError;

/// Asks the daemon at `host[:port]` for its status.
///
/// # Errors
/// When no daemon answers there, or it refuses the token.
pub async fn daemon_status(host: &str, token: &str) -> Result<StatusReply, CliError> {
    let peer = Peer::connect("daemon", host, "`dquant serve` or `dquant dpu`").await?;
    let token = AddToken::new(token);
    let mut target = TargetClient::with_interceptor(peer.channel.clone(), token.clone());
    match peer.answer(target.status(StatusRequest {})).await? {
        Ok(reply) => return Ok(reply.into_inner()),
        // Each daemon serves only its own kind: this one is no target.
        Err(status) if status.code() == Code::Unimplemented => {}
        Err(status) => return Err(peer.refused(&status)),
    }
    let mut dpu = DpuClient::with_interceptor(peer.channel.clone(), token);
    Ok(peer.within(dpu.status(StatusRequest {})).await?.into_inner())
}
