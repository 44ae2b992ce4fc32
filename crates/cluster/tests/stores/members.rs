//! Members of an etcd cluster: real processes with state of their own, which can be killed and
//! started again.

use std::fs::File;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use cluster::store::Store;
use cluster::store::etcd::{Config, EtcdStore};

use tonic::transport::{Channel, ClientTlsConfig, Endpoint};

use crate::conformance::candidate;
use crate::scratch::{Scratch, keys};

/// Messages of etcd.
#[allow(
    missing_docs,
    clippy::all,
    clippy::too_many_lines,
    unreachable_pub,
    unused_qualifications,
    dead_code
)]
pub(crate) mod rpc {
    tonic::include_proto!("etcdserverpb");
}

/// Debian's package `etcd-server` has it there.
const ETCD: &str = "/usr/bin/etcd";

struct Member {
    client_url: String,
    arguments: Vec<String>,
    process: Mutex<Option<Child>>,
}

/// Some members, and their state.
pub(crate) struct Members {
    members: Vec<Member>,
    tls: Option<ClientTlsConfig>,
    scratch: Scratch,
}

/// A port that is free now. Ports below those that the kernel gives to connections stay free while
/// a member is dead.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = std::process::id() as u16;
    loop {
        let number = first.wrapping_mul(31).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = 20_000 + number % 12_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

impl Members {
    /// Starts so many members and waits until they answer; `None` on machines without etcd.
    pub(crate) async fn start(count: usize, more: &[&str]) -> Option<Members> {
        Members::start_with(count, more, None).await
    }

    /// As `start`; with `tls`, `more` names the members' certificates.
    pub(crate) async fn start_with(
        count: usize,
        more: &[&str],
        tls: Option<ClientTlsConfig>,
    ) -> Option<Members> {
        if !Path::new(ETCD).exists() {
            crate::skip_because(&format!("no {ETCD}; Debian's package etcd-server has it"));
            return None;
        }
        let scratch = Scratch::new("etcd");
        let client_scheme = if tls.is_some() { "https" } else { "http" };
        let url = |scheme| format!("{scheme}://127.0.0.1:{}", free_port());
        let urls: Vec<_> = (0..count).map(|_| [client_scheme, "http"].map(url)).collect();
        let cluster: Vec<_> =
            urls.iter().zip(0..).map(|([_, peer], number)| format!("m{number}={peer}")).collect();
        let members = urls.iter().zip(0..).map(|([client, peer], number)| {
            let folder = scratch.path().join(format!("m{number}"));
            let options = [
                ("name", format!("m{number}")),
                ("data-dir", folder.display().to_string()),
                ("listen-client-urls", client.clone()),
                ("advertise-client-urls", client.clone()),
                ("listen-peer-urls", peer.clone()),
                ("initial-advertise-peer-urls", peer.clone()),
                ("initial-cluster", cluster.join(",")),
                ("initial-cluster-state", "new".to_string()),
            ];
            let mut arguments: Vec<_> =
                options.into_iter().map(|(name, value)| format!("--{name}={value}")).collect();
            arguments.extend(more.iter().map(|option| (*option).to_string()));
            Member { client_url: client.clone(), arguments, process: Mutex::default() }
        });
        let members = Members { members: members.collect(), tls, scratch };
        for number in 0..count {
            members.restart(number);
        }
        members.wait().await;
        Some(members)
    }

    pub(crate) fn urls(&self) -> Vec<String> {
        self.members.iter().map(|member| member.client_url.clone()).collect()
    }

    pub(crate) fn config(&self) -> Config {
        Config { tls: self.tls.clone(), ..Config::new(self.urls()) }
    }

    /// SIGKILL.
    pub(crate) fn kill(&self, number: usize) {
        let process = self.members[number].process.lock().expect("whole").take();
        if let Some(mut process) = process {
            process.kill().expect("it is our own");
            process.wait().expect("it is our own");
        }
    }

    pub(crate) fn restart(&self, number: usize) {
        let log = self.scratch.path().join(format!("m{number}.log"));
        let log = File::options().create(true).append(true).open(log).expect("space");
        let member = &self.members[number];
        let process = Command::new(ETCD)
            .args(&member.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("etcd can be started");
        *member.process.lock().expect("whole") = Some(process);
    }

    /// Sends a signal by name.
    pub(crate) fn signal(&self, number: usize, name: &str) {
        let process = self.members[number].process.lock().expect("whole");
        let id = process.as_ref().expect("it runs").id().to_string();
        let sent = Command::new("kill").args(["-s", name, &id]).status();
        assert!(sent.is_ok_and(|status| status.success()));
    }

    /// A connection to a member, for what stores do not do.
    pub(crate) async fn connect(&self, number: usize) -> Result<Channel, tonic::transport::Error> {
        let endpoint = Endpoint::from_shared(self.members[number].client_url.clone())?;
        endpoint.connect_timeout(Duration::from_millis(500)).connect().await
    }

    /// Writes a key.
    pub(crate) async fn put(&self, key: &str, value: &str) {
        let channel = self.connect(0).await.expect("it runs");
        let (key, value) = (key.as_bytes().to_vec(), value.as_bytes().to_vec());
        let put = rpc::PutRequest { key, value, lease: 0 };
        let request = Some(rpc::request_op::Request::RequestPut(put));
        let success = vec![rpc::RequestOp { request }];
        let request = rpc::TxnRequest { success, ..rpc::TxnRequest::default() };
        let answer = rpc::kv_client::KvClient::new(channel).txn(request).await;
        assert!(answer.expect("it answers").into_inner().succeeded);
    }

    /// Waits until a quorum answers.
    pub(crate) async fn wait(&self) {
        let begun = Instant::now();
        let config = Config { prefix: "/test/".to_string(), ..self.config() };
        let store = EtcdStore::new(&config, &keys()).expect("valid endpoints");
        while store.claim(&candidate(99)).await.is_err() {
            assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", store.report());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        store.resign(&candidate(99)).await.expect("it answers");
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        for number in 0..self.members.len() {
            self.kill(number);
        }
    }
}
