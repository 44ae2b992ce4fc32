//! A whole target whose datasets are in memory, and streams from it: no file system, and faults
//! where and when a test wants them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use adapter::congestion::Choice;
use host::attach::Connection;
use host::memory::MemoryStore;
use host::ring::{Consumer, RingFds};
use prost::Message;
use roce::endpoint::Mtu;
use service::admission::Admission;
use service::runtime;
use service::seed::fresh_seed;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tonic::transport::Server;
use xio::dataset::Dtype;
use xio::opener::IoChoice;

use crate::catalog::Catalog;
use crate::control::target::TargetService;
use crate::data::HostConfig;
use crate::data::target::TargetEngine;
use crate::local::{LocalConfig, LocalDpu};
use crate::proto::target_server::TargetServer;
use crate::proto::{
    DatasetRef, OpenReply, OpenRequest, StreamStatus, StreamStatusRequest, open_reply,
};

/// Far more than target, reader and ring hold: much is still to be read when a stream has begun.
const TOKENS: u32 = 8_000_000;

const WINDOW: u32 = 1_000;

fn loopback() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

/// A running target.
struct Target {
    store: MemoryStore,
    control: SocketAddr,
    engine: TargetEngine,
    _runtime: Runtime,
}

impl Target {
    fn start() -> Target {
        let store = MemoryStore::new();
        let (congestion, mtu) = (Choice::default(), Mtu::M4096);
        let host = HostConfig {
            roce: loopback(),
            device: None,
            memory: 8 << 20,
            congestion,
            rate_limit_bps: 0,
            mtu,
            loss_ppm: 0,
            seed: fresh_seed().expect("the system has random numbers"),
        };
        let open_disk = |memory, depth| store.disk(memory, depth);
        let engine = TargetEngine::start_with(host, 8, open_disk).expect("loopback");
        let runtime = runtime::multi_thread().expect("threads");
        let control = runtime.block_on(async {
            let listener = TcpListener::bind(loopback()).await.expect("a port");
            let control = listener.local_addr().expect("bound");
            let catalog = Catalog::new(vec![Box::new(store.clone())], IoChoice::Auto);
            let admission = Admission::new();
            let service = TargetService::new(
                catalog,
                engine.commands.clone(),
                Arc::clone(&admission),
                (control, engine.roce),
                engine.discovery.clone(),
                engine.notes.clone(),
            );
            let server = Server::builder().add_service(TargetServer::new(service));
            tokio::spawn(server.serve_with_incoming(admission.accept(listener)));
            control
        });
        Target { store, control, engine, _runtime: runtime }
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.engine.commands.stop();
    }
}

/// A stream of the samples of one dataset in their order.
struct Stream {
    consumer: Consumer,
    connection: Connection,
    _dpu: LocalDpu,
}

impl Stream {
    fn open(target: &Target, name: &str) -> Result<Stream, String> {
        let config = LocalConfig {
            target: target.control.to_string(),
            roce: Some(loopback()),
            memory: 12 << 20,
            ring: 8 << 20,
            loss_ppm: 0,
            reconnect: Duration::from_secs(2),
        };
        let (mut connection, dpu) = LocalDpu::start(&config).expect("loopback");
        connection.set_timeout(Duration::from_secs(30));
        let dataset = DatasetRef { name: name.into(), ..DatasetRef::default() };
        let request = OpenRequest {
            target: config.target,
            datasets: vec![dataset],
            plan: format!("window({WINDOW}) | batch(100)"),
            batches: u64::from(TOKENS / WINDOW / 100),
            slots: 4,
            ..OpenRequest::default()
        };
        connection.send(&request.encode_to_vec(), &[]).expect("it listens");
        let message = connection.recv(1 << 20).expect("an answer");
        let reply = OpenReply::decode(message.bytes.as_slice()).expect("a message");
        if let Some(open_reply::Result::Failure(failure)) = reply.result {
            return Err(failure.message);
        }
        let (_, fds) = message.with_fds::<{ RingFds::COUNT }>().expect("a ring");
        let liveness = connection.liveness().expect("a descriptor");
        let consumer = Consumer::attach(fds.into(), liveness).expect("an honest ring");
        Ok(Stream { consumer, connection, _dpu: dpu })
    }

    /// All tokens up to the end, or those up to a failure and why it failed.
    fn read(mut self, each: impl Fn(usize)) -> (Vec<u32>, Option<String>) {
        let mut tokens = Vec::new();
        loop {
            match self.consumer.next(Duration::from_secs(30)) {
                Ok(Some(slot)) => {
                    tokens.extend(slot.as_chunks().0.iter().map(|raw| u32::from_le_bytes(*raw)));
                    each(tokens.len());
                }
                Ok(None) => return (tokens, None),
                Err(error) => return (tokens, Some(format!("{error}; {}", self.status()))),
            }
        }
    }

    /// What its engine says of it.
    fn status(&self) -> String {
        let asked = StreamStatusRequest { version: 1 }.encode_to_vec();
        let answer = self.connection.send(&asked, &[]).and_then(|()| self.connection.recv(1 << 20));
        let status = answer.map(|answer| StreamStatus::decode(answer.bytes.as_slice()));
        format!("{status:?}")
    }
}

/// Tokens that tell their place, of a version.
fn tokens(version: u32) -> Vec<u32> {
    (0..TOKENS).map(|at| 100_000 + at.wrapping_mul(7 + version) % 1_000_000).collect()
}

/// The same as a file, whose header tells their type.
fn file(version: u32) -> Vec<u8> {
    let mut bytes = formats::npy_header(Dtype::U32, u64::from(TOKENS));
    bytes.extend(tokens(version).iter().flat_map(|token| token.to_le_bytes()));
    bytes
}

#[test]
fn a_stream_from_memory_has_every_token() {
    let target = Target::start();
    target.store.put("web.npy", file(0));
    let (seen, failure) = Stream::open(&target, "web").expect("it is there").read(|_| ());
    assert_eq!(failure, None);
    assert!(seen == tokens(0), "{} tokens", seen.len());
    let missing = Stream::open(&target, "code").err().expect("it is not there");
    assert!(missing.contains("no such dataset"), "{missing}");
}

/// Whatever happens to a file while it is read, a stream delivers tokens of the contents that it
/// began with, in their order, and then ends with an error that names the file.
#[test]
fn no_fault_of_a_place_mixes_contents() {
    type Fault = fn(&MemoryStore);
    let faults: [(&str, Fault); 4] = [
        ("changes", |store| store.put("web.npy", file(1))),
        ("vanishes", |store| store.remove("web.npy")),
        ("ends early", |store| store.cut("web.npy", 30_000_000)),
        ("cannot be read", |store| store.spoil("web.npy", 30_000_000)),
    ];
    for (what, fault) in faults {
        let target = Target::start();
        target.store.put("web.npy", file(0));
        let stream = Stream::open(&target, "web").expect(what);
        let is_done = std::cell::Cell::new(false);
        let (seen, failure) = stream.read(|count| {
            if count > 500_000 && !is_done.replace(true) {
                fault(&target.store);
            }
        });
        let failure = failure.expect(what);
        assert!(failure.contains("web.npy"), "{what}: {failure}");
        assert!(seen[..] == tokens(0)[..seen.len()] && seen.len() > 500_000, "{what}");
    }
}

#[test]
fn a_slow_place_delays_a_stream_and_harms_nothing() {
    let target = Target::start();
    target.store.put("web.npy", file(0));
    target.store.set_delay(Duration::from_millis(20));
    let began = Instant::now();
    let (seen, failure) = Stream::open(&target, "web").expect("it is there").read(|_| ());
    assert_eq!((failure, seen.len()), (None, TOKENS as usize));
    assert!(seen == tokens(0) && began.elapsed() >= Duration::from_millis(20));
}
