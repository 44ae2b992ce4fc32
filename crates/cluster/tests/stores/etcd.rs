//! The store in etcd: its rules, members that are gone, and an etcd without space.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use cluster::store::etcd::{Config, EtcdStore, User};
use cluster::store::{SetupError, Store};
use parfait::brain::StorageError;
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use crate::conformance::{Site, candidate, conformance, take_lease};
use crate::members::Members;
use crate::scratch::{Scratch, keys};

impl Site for Members {
    type Store = EtcdStore;

    fn handle(&self) -> EtcdStore {
        // Rules are tested here, not times, and the machine may be busy.
        let (request_timeout, call_timeout) = (Duration::from_secs(5), Duration::from_secs(20));
        let config = Config { request_timeout, call_timeout, ..self.config() };
        EtcdStore::new(&config, &keys()).expect("valid endpoints")
    }
}

conformance!(Members::start(1, &[]).await);

#[test]
fn endpoints_are_checked() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let _inside = runtime.enter();
    for (endpoints, hint) in [
        (vec![], "no member is named"),
        (vec!["https://10.0.0.1:2379"], "has to be http://HOST:PORT"),
        (vec!["http://10.0.0.1:2379", "10.0.0.2:2379"], "has to be http://HOST:PORT"),
        (vec!["http://[::1"], ""),
    ] {
        let config = Config::new(endpoints.iter().map(|one| (*one).to_string()).collect());
        let error = EtcdStore::new(&config, &keys()).expect_err("malformed");
        assert!(matches!(&error, SetupError::Endpoint { .. }));
        assert!(error.to_string().contains(hint), "{error}");
    }
}

/// Nobody listens: each call fails within its time and says why.
#[tokio::test]
async fn without_etcd_calls_fail_in_time() {
    let config = Config::new(vec!["http://127.0.0.1:1".to_string()]);
    let store = EtcdStore::new(&config, &keys()).expect("valid");
    let begun = Instant::now();
    assert_eq!(store.claim(&candidate(1)).await, Err(StorageError::Unavailable));
    assert_eq!(store.open(3, 1).await, Err(StorageError::Unavailable));
    // The machine may be busy.
    let late = Duration::from_secs(20);
    assert!(begun.elapsed() < config.lease + config.call_timeout + late);
    assert_eq!(store.append(1, 0, vec![1]).await, Err(StorageError::Unavailable));
    let report = store.report();
    assert_eq!(report.counters.unavailable, 3);
    assert!(report.counters.retries > 3);
}

/// One of three members is gone, another one hangs for a while: calls go to those that answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_that_are_gone_or_hang_are_passed_over() {
    let Some(members) = Members::start(3, &[]).await else { return };
    let store = EtcdStore::new(&members.config(), &keys()).expect("valid endpoints");
    let term = take_lease(&store, &candidate(1)).await;
    store.open(term, 1).await.expect("it leads");
    let mut log = OpenLog { store: &store, opening: 1, at: 0 };
    for number in 0..3 {
        members.kill(number);
        log.append_until_confirmed().await;
        members.restart(number);
        members.wait().await;
    }
    assert!(store.report().counters.retries > 0);
    for number in 0..3 {
        members.signal(number, "STOP");
        log.append_until_confirmed().await;
        members.signal(number, "CONT");
        members.wait().await;
    }
    assert!(log.at >= 6 * RECORD.len() as u64);
}

const RECORD: &[u8] = b"record";

/// A log as a brain keeps it: what failed is opened again.
struct OpenLog<'a> {
    store: &'a EtcdStore,
    opening: u64,
    at: u64,
}

impl OpenLog<'_> {
    async fn append_until_confirmed(&mut self) {
        let begun = Instant::now();
        while self.store.append(self.opening, self.at, RECORD.to_vec()).await.is_err() {
            assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", self.store.report());
            let term = take_lease(self.store, &candidate(1)).await;
            self.opening += 1;
            // A write that was given up may be there.
            if let Ok(image) = self.store.open(term, self.opening).await {
                let records = image.log.chunks(RECORD.len());
                assert!(records.into_iter().all(|record| record == RECORD));
                assert!(image.log.len() as u64 >= self.at, "confirmed and lost");
                self.at = image.log.len() as u64;
            }
        }
        self.at += RECORD.len() as u64;
    }
}

/// The space quota of etcd.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_etcd_without_space_is_full_and_can_be_read() {
    let quota = ["--quota-backend-bytes=2000000"];
    let Some(members) = Members::start(1, &quota).await else { return };
    let store = members.handle();
    let term = take_lease(&store, &candidate(1)).await;
    store.open(term, 1).await.expect("it leads");
    let mut written = 0;
    let error = loop {
        match store.append(1, written * 90_000, vec![3; 90_000]).await {
            Ok(()) => written += 1,
            Err(error) => break error,
        }
        // etcd knows its size when it commits, every 100 ms.
        assert!(written < 2000, "the quota does not hold");
    };
    assert_eq!(error, StorageError::Full);
    let report = store.report();
    assert_eq!(report.counters.full, 1);
    assert!(report.last_failure.is_some_and(|reason| reason.contains("space exceeded")));
    let image = store.claim(&candidate(1)).await.expect("leases are kept");
    assert_eq!(image.lease.term, term);
}

/// A brain of this version must not take the lease from those that can read the state.
#[tokio::test]
async fn another_format_is_refused_before_the_lease_is_taken() {
    let Some(members) = Members::start(1, &[]).await else { return };
    members.put("/dquant/brain/format", "3").await;
    let store = members.handle();
    assert_eq!(store.claim(&candidate(1)).await, Err(StorageError::Unavailable));
    let report = store.report();
    assert_eq!(report.counters.leases_taken, 0);
    let reason = report.last_failure.expect("it failed");
    assert!(reason.contains("of format 3, and this is format 2: run the version"), "{reason}");
}

/// Claims are answered while a long snapshot is written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_lease_is_kept_during_long_writes() {
    let Some(members) = Members::start(1, &[]).await else { return };
    let store = members.handle();
    let term = take_lease(&store, &candidate(1)).await;
    store.open(term, 1).await.expect("it leads");
    let (mut claims, mut writes) = (0, std::pin::pin!(store.snapshot(1, vec![5; 60 << 20])));
    let stored = loop {
        tokio::select! {
            stored = &mut writes => break stored,
            () = tokio::time::sleep(Duration::from_millis(20)) => {
                let holder = store.claim(&candidate(1)).await.expect("etcd answers");
                assert_eq!((holder.lease.holder, holder.lease.term), (1, term));
                claims += 1;
            }
        }
    };
    assert_eq!(stored, Ok(()));
    assert!(claims > 2, "{claims} claims");
}

/// Runs a program that not every machine has; `None` where it is missing.
fn run(folder: &Path, program: &str, arguments: &str) -> Option<()> {
    let words = arguments.split_whitespace();
    match Command::new(program).args(words).current_dir(folder).output() {
        Ok(output) if output.status.success() => Some(()),
        Ok(output) => panic!("{program} {arguments}: {}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => {
            crate::skip_because(&format!("{program}: {error}"));
            None
        }
    }
}

/// An authority, and what it signed for both sides.
fn certificates(folder: &Path) -> Option<()> {
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2";
    run(folder, "openssl", &format!("req -x509 {key} -keyout ca.key -out ca.pem -subj /CN=ca"))?;
    fs::write(folder.join("names"), "subjectAltName=IP:127.0.0.1\n").expect("space");
    for side in ["member", "brain"] {
        let request = format!("req {key} -keyout {side}.key -out {side}.csr -subj /CN={side}");
        run(folder, "openssl", &request.replace(" -days 2", ""))?;
        let sign = "-CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names";
        run(folder, "openssl", &format!("x509 -req -in {side}.csr -out {side}.pem {sign}"))?;
    }
    Some(())
}

/// Both sides show certificates.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_is_spoken_with_certificates() {
    let scratch = Scratch::new("tls");
    let Some(()) = certificates(scratch.path()) else { return };
    let file = |name: &str| scratch.path().join(name);
    let read = |name: &str| fs::read(file(name)).expect("it was made");
    let authority = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read("ca.pem")));
    let identity = Identity::from_pem(read("brain.pem"), read("brain.key"));
    let tls = authority.clone().identity(identity);
    let options = [
        format!("--cert-file={}", file("member.pem").display()),
        format!("--key-file={}", file("member.key").display()),
        format!("--trusted-ca-file={}", file("ca.pem").display()),
        "--client-cert-auth".to_string(),
    ];
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let Some(members) = Members::start_with(1, &options, Some(tls)).await else { return };
    let store = members.handle();
    let term = take_lease(&store, &candidate(1)).await;
    store.open(term, 1).await.expect("it leads");
    store.append(1, 0, b"over TLS".to_vec()).await.expect("space");

    let config = Config { tls: Some(authority), ..members.config() };
    let stranger = EtcdStore::new(&config, &keys()).expect("valid");
    let refused = stranger.claim(&candidate(2)).await;
    assert_eq!(refused, Err(StorageError::Unavailable), "it shows no certificate");
}

/// A user with a password. A member that was restarted knows no tokens, so the store asks for a new
/// one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_logs_in_again_when_its_token_is_unknown() {
    let Some(members) = Members::start(1, &[]).await else { return };
    let at = format!("--endpoints={}", members.urls()[0]);
    for command in ["user add root:secret", "user grant-role root root", "auth enable"] {
        let scratch = Scratch::new("ctl");
        let Some(()) = run(scratch.path(), "etcdctl", &format!("{at} {command}")) else { return };
    }
    let user =
        |password: &str| Some(User { name: "root".to_string(), password: password.to_string() });
    let wrong = EtcdStore::new(&Config { user: user("guess"), ..members.config() }, &keys());
    let wrong = wrong.expect("valid");
    assert!(!format!("{wrong:?}").contains("guess"));
    assert_eq!(wrong.claim(&candidate(2)).await, Err(StorageError::Unavailable));
    let reason = wrong.report().last_failure.expect("it failed");
    assert!(reason.contains("authentication failed"), "{reason}");
    assert!(members.handle().claim(&candidate(2)).await.is_err(), "without a user");

    let store = EtcdStore::new(&Config { user: user("secret"), ..members.config() }, &keys());
    let store = store.expect("valid");
    let term = take_lease(&store, &candidate(1)).await;
    store.open(term, 1).await.expect("it leads");
    members.kill(0);
    members.restart(0);
    let again = take_lease(&store, &candidate(1)).await;
    store.open(again, 2).await.expect("it leads");
}
