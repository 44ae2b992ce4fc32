//! A DPU inside a trainer's own process, for streams without offload.
//!
//! The trainer talks to it as to a daemon, over a pair of sockets: batches and messages are the
//! same (C4). It serves one stream and ends with it.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::thread::JoinHandle;
use std::time::Duration;

use adapter::congestion::Choice;
use host::attach::Connection;
use roce::endpoint::Mtu;
use roce::wire::ROCE_PORT;
use service::error::Error;
use service::runtime;
use service::seed::fresh_seed;
use tokio::runtime::Runtime;
use xio::documents::MAX_DOCUMENTS;

use crate::budget::Budget;
use crate::control::documents::DOCUMENT_BYTES;
use crate::data::dpu::DpuEngine;
use crate::data::{EngineError, HostConfig};
use crate::group::Groups;
use crate::path::{PathMtus, Waiting};
use crate::stream::{DpuContext, serve_client};

/// How to run a DPU for one stream.
#[derive(Clone, Debug)]
pub struct LocalConfig {
    /// `host:port` of its target.
    pub target: String,
    /// Address of its RoCE endpoint; by default one is chosen from which the target can be reached.
    pub roce: Option<SocketAddr>,
    /// Bytes of registered memory.
    pub memory: u64,
    /// Bytes for the ring.
    pub ring: u64,
    /// Received packets to drop, in parts per million.
    pub loss_ppm: u32,
    /// How long a lost target may stay away.
    pub reconnect: Duration,
}

/// A running DPU of this process. Dropping it ends it: drop the connection to it first.
#[derive(Debug)]
pub struct LocalDpu {
    client: Option<JoinHandle<()>>,
    // Dropped in this order: streams first, then the engine, then what their control calls run on.
    engine: Option<DpuEngine>,
    _runtime: Runtime,
}

impl LocalDpu {
    /// Starts it. The connection is the trainer's end of its local socket.
    ///
    /// # Errors
    /// When the engine cannot be started at its address, or has no way to the target.
    pub fn start(config: &LocalConfig) -> Result<(Connection, LocalDpu), Error> {
        let runtime = runtime::multi_thread()?;
        let engine = start_engine(config)?;
        let context = DpuContext {
            commands: engine.commands.clone(),
            roce: engine.roce,
            runtime: runtime.handle().clone(),
            reconnect: config.reconnect,
            offload: false,
            memory: config.memory,
            rings: Budget::rings(config.ring),
            documents: Budget::documents(MAX_DOCUMENTS as u64 * DOCUMENT_BYTES),
            waiting: Waiting::default(),
            path_mtus: PathMtus::default(),
            discovery: engine.discovery.clone(),
            groups: Groups::default(),
        };
        let (ours, theirs) = Connection::pair().map_err(Error::from_cause)?;
        let client = std::thread::Builder::new()
            .name("dquant-stream".into())
            .spawn(move || serve_client(&context, theirs, || ()))
            .map_err(Error::from_cause)?;
        Ok((ours, LocalDpu { client: Some(client), engine: Some(engine), _runtime: runtime }))
    }
}

impl Drop for LocalDpu {
    fn drop(&mut self) {
        drop(self.engine.take());
        if let Some(client) = self.client.take() {
            let _ = client.join();
        }
    }
}

/// Engine settings for this address.
fn host_config(config: &LocalConfig, roce: SocketAddr) -> Result<HostConfig, Error> {
    let LocalConfig { memory, loss_ppm, .. } = *config;
    let (congestion, mtu) = (Choice::default(), Mtu::M4096);
    let (device, rate_limit_bps, seed) = (None, 0, fresh_seed()?);
    Ok(HostConfig { roce, device, memory, congestion, rate_limit_bps, mtu, loss_ppm, seed })
}

/// Starts an engine at the configured address, or at one from which the target can be reached: on
/// the RoCE port if it is free, else on any port.
fn start_engine(config: &LocalConfig) -> Result<DpuEngine, Error> {
    if let Some(roce) = config.roce {
        return DpuEngine::start(host_config(config, roce)?).map_err(Error::from);
    }
    let ip = local_ip_towards(&config.target)?;
    let host = host_config(config, SocketAddr::new(ip, ROCE_PORT))?;
    match DpuEngine::start(host.clone()) {
        Err(EngineError::Udp(_)) => {
            let any_port = HostConfig { roce: SocketAddr::new(ip, 0), ..host };
            DpuEngine::start(any_port).map_err(Error::from)
        }
        started => started.map_err(Error::from),
    }
}

/// The address this machine would use to talk to `host:port`. No packet is sent.
fn local_ip_towards(target: &str) -> Result<IpAddr, Error> {
    let ip = (|| {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        if socket.connect(target).is_err() {
            let socket = UdpSocket::bind("[::]:0")?;
            socket.connect(target)?;
            return socket.local_addr();
        }
        socket.local_addr()
    })();
    ip.map(|address| address.ip()).map_err(|error| {
        Error::unreachable(format!("no route to {target}: {error}"))
            .caused_by(&error)
            .hint("name the address of this process's endpoint with --roce")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two processes may have the same number, each in its container, and so may two starts.
    #[test]
    fn engines_of_one_process_number_have_seeds_of_their_own() {
        let config = LocalConfig {
            target: String::new(),
            roce: None,
            memory: 0,
            ring: 0,
            loss_ppm: 0,
            reconnect: Duration::ZERO,
        };
        let at = SocketAddr::from(([127, 0, 0, 1], 0));
        let seed = || host_config(&config, at).expect("the system has random numbers").seed;
        assert_ne!(seed(), seed());
    }
}
