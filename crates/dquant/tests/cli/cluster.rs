//! Brains, agents and the commands of a cluster as processes: where brains say that they are, who
//! leads, and what goes wrong with files, ports, certificates and proofs.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cluster::proto::brain_server::{Brain, BrainServer};
use cluster::proto::handshake_server::{Handshake, HandshakeServer};
use cluster::proto::{self, Serialised};
use serde_json::Value;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Request, Response, Status, Streaming};

use super::{Folder, Ran, h2, skip};

const TOKEN: &str = "a-token-of-the-tests";

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(30);

/// A daemon that runs; it is killed with the test.
struct Daemon {
    child: Child,
    ready: Value,
    log: std::path::PathBuf,
}

impl Daemon {
    /// Starts a daemon in that folder and waits until it is ready. Its log is the file `NAME.log`.
    fn start(folder: &Folder, name: &str, args: &[&str]) -> Daemon {
        Daemon::run(folder, name, folder.command(args))
    }

    fn run(folder: &Folder, name: &str, mut command: Command) -> Daemon {
        let log = folder.0.join(format!("{name}.log"));
        command.args(["--json", "--die-with-parent"]).env("DQUANT_TOKEN", TOKEN);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        command.stderr(File::create(&log).expect("the folder is writable"));
        let mut child = command.spawn().expect("the program starts");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("it is piped");
        BufReader::new(stdout).read_line(&mut line).expect("it is read");
        let ready = serde_json::from_str(&line)
            .unwrap_or_else(|_| panic!("{name}: {}", fs::read_to_string(&log).unwrap_or_default()));
        Daemon { child, ready, log }
    }

    fn brain(folder: &Folder, name: &str, more: &[&str]) -> Daemon {
        let args = ["brain", "--topology", "leaf-spine:2x2x2", "--state", "brain.redb"];
        Daemon::start(folder, name, &[&args[..], more].concat())
    }

    /// Where others reach a brain.
    fn address(&self) -> &str {
        self.ready["address"].as_str().expect("a brain has one")
    }

    /// The port at which a brain listens.
    fn port(&self) -> &str {
        let listen = self.ready["listen"].as_str().expect("a brain listens");
        listen.rsplit_once(':').expect("it has a port").1
    }

    /// Waits for a line in its log.
    #[track_caller]
    fn says(&self, text: &str) {
        let begun = Instant::now();
        loop {
            let log = fs::read_to_string(&self.log).expect("it has a log");
            if log.contains(text) {
                return;
            }
            assert!(begun.elapsed() < PATIENCE, "{text:?} in vain: {log}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs a command of a cluster.
fn run(folder: &Folder, args: &[&str]) -> Ran {
    let output = folder.command(args).env("DQUANT_TOKEN", TOKEN).output();
    Ran::new(&output.expect("the program starts"))
}

#[test]
fn a_brain_advertises_an_address_that_others_can_reach() {
    let folder = Folder::new("cluster-advertise");
    let all = Daemon::brain(&folder, "all", &["--listen", "0.0.0.0:0"]);
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    assert_eq!(all.address(), format!("{host}:{}", all.port()));
    drop(all);
    let told = ["--listen", "[::1]:0", "--advertise", "brain5"];
    assert_eq!(Daemon::brain(&folder, "told", &told).address(), "brain5:4795");
    let free = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("it is bound");
    let listen = free.to_string();
    let other = ["--listen", &listen, "--advertise", "brain5"];
    let expected = format!("brain5:{}", free.port());
    assert_eq!(Daemon::brain(&folder, "other", &other).address(), expected);
    let brain = |more: &[&str]| {
        let args = ["brain", "--topology", "leaf-spine:2x2x2"];
        run(&folder, &[&args[..], more].concat())
    };
    for listen in ["0.0.0.0", "[::]"] {
        let refused = brain(&["--etcd", "127.0.0.1:1", "--listen", listen]);
        refused.failed(
            2,
            "no other machine reaches a brain at that address",
            "--advertise 10.0.0.5:4795",
        );
    }
    for nowhere in ["0.0.0.0:4795", "[::]:4795", ":4795"] {
        let refused = brain(&["--state", "brain.redb", "--advertise", nowhere]);
        refused.failed(2, "nobody reaches a brain there", "--advertise 10.0.0.5");
    }
}

#[test]
fn a_standby_says_who_leads_and_when_that_changes() {
    let folder = Folder::new("cluster-standby");
    let brain = |name: &str| Daemon::brain(&folder, name, &["--listen", "127.0.0.1:0"]);
    let first = brain("first");
    first.says("leads in term 1, with 0 jobs");
    let (second, third) = (brain("second"), brain("third"));
    for standby in [&second, &third] {
        standby.says(&format!("stands by: {} leads in term 1", first.address()));
    }
    drop(first);
    // One of them leads, and the other says so.
    let begun = Instant::now();
    let leads = |daemon: &Daemon| {
        fs::read_to_string(&daemon.log).expect("a log").contains("leads in term 2, with")
    };
    while !leads(&second) && !leads(&third) {
        assert!(begun.elapsed() < PATIENCE, "nobody leads");
        std::thread::sleep(Duration::from_millis(20));
    }
    let (leader, other) = if leads(&second) { (&second, &third) } else { (&third, &second) };
    other.says(&format!("stands by: {} leads in term 2", leader.address()));
}

#[test]
fn one_state_file_has_one_agent_and_ports_are_checked_at_the_start() {
    let folder = Folder::new("cluster-agent");
    let brain = Daemon::brain(&folder, "brain", &["--listen", "127.0.0.1:0"]);
    let agent = |port: &'static str| {
        let args = ["agent", "--node", "host0", "--port", port, "--enforce", "none"];
        let more = ["--state", "agent.state", "--socket", "", "--brain", brain.address()];
        // The usual folder is the machine's, and this is a test.
        [&args[..], &more, &["--rate-limits", ""]].concat()
    };
    let wrong = agent("7=lo:100Gbit");
    let first = Daemon::start(&folder, "agent", &wrong);
    run(&folder, &wrong).failed(2, "agent.state: process", "another --state");
    // The brain says at once that host0 has no port 7.
    brain
        .says("the agent of 'host0' has a port 7 (lo), and the topology gives 'host0' port 1 only");
    let begun = Instant::now();
    let top = loop {
        let top = run(&folder, &["top", "--cluster", "--brain", brain.address()]).good().stdout;
        if top.contains("has no port 1, which leads to 'leaf0'") {
            break top;
        }
        assert!(begun.elapsed() < PATIENCE, "{top}");
    };
    assert!(top.contains("ALARMS"), "{top}");
    drop(first);
    drop(Daemon::start(&folder, "again", &agent("1=lo:100Gbit")));
    let htb = ["agent", "--node", "host0", "--state", "htb.state", "--port", "1=none-such:1Gbit"];
    let htb = [&htb[..], &["--rate-limits", ""]].concat();
    run(&folder, &htb).failed(2, "port 1: there is no interface 'none-such'", "ip link");
    let folderless = ["agent", "--node", "host0", "--port", "1=lo:1Gbit", "--enforce", "none"];
    let folderless =
        [&folderless[..], &["--state", "none/agent.state", "--rate-limits", ""]].concat();
    run(&folder, &folderless).failed(2, "none/agent.state.lock", "a folder that exists");
}

/// A service manager or a careful root may give it one that closes what it makes.
#[test]
fn programs_of_all_users_reach_an_agent_whatever_its_umask() {
    let folder = Folder::new("cluster-umask");
    let args = ["agent", "--node", "host0", "--port", "1=lo:1Gbit", "--enforce", "none"];
    let places = ["--socket", "run/agent.sock", "--rate-limits", "paces/of/all"];
    let more = ["--state", "agent.state", "--brain", "127.0.0.1:1"];
    let usual = folder.command(&[&args[..], &places, &more].concat());
    let mut narrow = Command::new("sh");
    narrow.args(["-c", "umask 077; exec \"$0\" \"$@\""]).arg(usual.get_program());
    narrow.args(usual.get_args()).current_dir(&folder.0);
    let _agent = Daemon::run(&folder, "agent", narrow);
    let mode = |name: &str| {
        fs::metadata(folder.0.join(name)).expect("it made it").permissions().mode() & 0o777
    };
    assert_eq!(["run", "paces", "paces/of", "paces/of/all"].map(mode), [0o755; 4]);
    assert_eq!(mode("run/agent.sock") & 0o666, 0o666);
    assert_eq!(mode("agent.state") & 0o077, 0);
}

#[test]
fn what_is_counted_is_singular_or_plural() {
    let folder = Folder::new("cluster-words");
    let brain = Daemon::brain(&folder, "brain", &["--listen", "127.0.0.1:0", "--slots", "1"]);
    let job = |args: &[&str]| {
        run(&folder, &[&["job"], args, &["--brain", brain.address()]].concat()).good().stdout
    };
    job(&["submit", "ring:2@1G", "--name", "one"]);
    assert!(job(&["list"]).starts_with("1 job on 4 hosts; 2 of 4 slots are free"));
    let host = job(&["list", "--json"]);
    let host: Value = serde_json::from_str(&host).expect("JSON");
    let host = host["jobs"][0]["hosts"][0].as_str().expect("a host").to_owned();
    assert_eq!(job(&["down", &host]).trim(), "1 job hit, 1 worker moved, 0 jobs degraded");
    assert_eq!(job(&["up", &host]).trim(), "0 jobs hit, 0 workers moved, 0 jobs degraded");
}

#[test]
fn a_proof_of_nothing_is_none() {
    let folder = Folder::new("cluster-prove");
    let prove = |job: &str| {
        let quick = ["--windows", "1", "--iterate", "0s", "--rate", "1Gbit"];
        let args = ["parfait", "prove", "--topology", "leaf-spine:2x2x2", job];
        folder.run(&[&args[..], &quick].concat())
    };
    let refused = prove("ring:4@100G");
    assert_eq!(refused.exit, Some(1), "{refused:?}");
    assert!(refused.stdout.contains("refused: "), "{refused:?}");
    assert!(refused.stderr.starts_with("error: no job was admitted"), "{refused:?}");
    prove("ring:4@100M").good();
}

/// Runs openssl, which not every machine has.
fn openssl(folder: &Folder, arguments: &str) -> Option<()> {
    let words = arguments.split_whitespace();
    match Command::new("openssl").args(words).current_dir(&folder.0).output() {
        Ok(output) if output.status.success() => Some(()),
        Ok(output) => panic!("{arguments}: {}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => {
            skip::note("cluster::tls", &format!("openssl: {error}"));
            None
        }
    }
}

/// Two authorities, a certificate of a brain at 127.0.0.1, and one of a client from each authority.
fn certificates(folder: &Folder) -> Option<()> {
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes";
    folder.write("brain.ext", "subjectAltName=IP:127.0.0.1\n");
    folder.write("client.ext", "extendedKeyUsage=clientAuth\n");
    for authority in ["ca", "other"] {
        let files = format!("-keyout {authority}.key -out {authority}.pem -subj /CN={authority}");
        openssl(folder, &format!("req -x509 {key} -days 2 {files}"))?;
    }
    for (name, authority, extensions) in
        [("brain", "ca", "brain"), ("client", "ca", "client"), ("stranger", "other", "client")]
    {
        openssl(folder, &format!("req {key} -keyout {name}.key -out {name}.csr -subj /CN={name}"))?;
        let sign = format!("-CA {authority}.pem -CAkey {authority}.key -CAcreateserial -days 2");
        let files = format!("-in {name}.csr -out {name}.pem -extfile {extensions}.ext");
        openssl(folder, &format!("x509 -req {sign} {files}"))?;
    }
    Some(())
}

#[test]
fn a_flood_of_calls_without_the_token_is_cut_off() {
    let folder = Folder::new("cluster-flood");
    let brain = Daemon::brain(&folder, "brain", &["--listen", "127.0.0.1:0"]);
    let path = "/dquant.cluster.v1.Brain/View";
    let said = h2::calls_without_a_token(brain.address(), path, 20_000);
    // The numbers of HTTP/2: streams at once, and bytes of headers.
    assert!(said.settings.contains(&(3, 64)), "{said:?}");
    assert!(said.settings.contains(&(6, 8192)), "{said:?}");
    assert!(said.answers < 2_000, "{} answers to 20,000 calls", said.answers);
    brain.says("closed: 16 calls without the token");
    run(&folder, &["job", "list", "--brain", brain.address()]).good();
}

#[test]
fn secrets_that_others_may_read_are_warned_of() {
    let folder = Folder::new("cluster-secrets");
    folder.write("token", TOKEN);
    let brain =
        Daemon::brain(&folder, "brain", &["--listen", "127.0.0.1:0", "--http", "0.0.0.0:0"]);
    brain.says("its token goes over the network in clear");
    let list = |mode: u32| {
        let token = fs::Permissions::from_mode(mode);
        fs::set_permissions(folder.0.join("token"), token).expect("it is ours");
        run(&folder, &["job", "list", "--brain", brain.address(), "--token-file", "token"]).good()
    };
    let warned = list(0o644).stderr;
    let warning = "warning: token file token: every user of this machine can read it\n\
                   hint: `chmod 600 token`\n";
    assert_eq!(warned, warning);
    assert_eq!(list(0o600).stderr, "");
    assert_eq!(list(0o640).stderr, "", "a group may be meant to");
}

#[test]
fn a_ledger_that_cannot_be_written_is_reported_with_the_systems_reason() {
    let folder = Folder::new("cluster-ledger");
    // Nobody can make files there, root included.
    let args = ["brain", "--topology", "leaf-spine:2x2x2", "--state", "/proc/self/brain.redb"];
    let brain =
        Daemon::start(&folder, "brain", &[&args[..], &["--listen", "127.0.0.1:0"]].concat());
    brain.says("the lease: the log cannot be reached: ");
    brain.says("(os error ");
}

#[test]
fn each_failure_of_tls_names_what_to_check() {
    let folder = Folder::new("cluster-tls");
    let Some(()) = certificates(&folder) else { return };
    let listen = ["--listen", "127.0.0.1:0"];
    let own = ["--tls-cert", "brain.pem", "--tls-key", "brain.key"];
    let plain = Daemon::brain(&folder, "plain", &listen);
    let list = |brain: &str, more: &[&str]| {
        run(&folder, &[&["job", "list", "--brain", brain], more].concat())
    };
    let ca = ["--tls-ca", "ca.pem"];
    list(plain.address(), &ca).failed(2, "InvalidContentType", "leave out --tls-ca");
    drop(plain);

    let open = Daemon::brain(&folder, "open", &[&listen[..], &own].concat());
    list(open.address(), &ca).good();
    list(open.address(), &["--tls-ca", "other.pem"]).failed(
        2,
        "UnknownIssuer",
        "the authority that signed",
    );
    let by_name = format!("localhost:{}", open.port());
    list(&by_name, &ca).failed(2, "not valid for name \"localhost\"", "subjectAltName");
    // What a client without TLS makes of the end of its connection depends on how far it came.
    let closed = list(open.address(), &[]);
    assert!(matches!(closed.exit, Some(2 | 3)), "{closed:?}");
    assert!(closed.stderr.contains("hint: if the brain speaks TLS, give --tls-ca"), "{closed:?}");
    assert!(!closed.stderr.contains("frame with invalid size"), "{closed:?}");
    drop(open);

    let strict = Daemon::brain(&folder, "strict", &[&listen[..], &own, &ca].concat());
    let shown = |name: &str| {
        let (certificate, key) = (format!("{name}.pem"), format!("{name}.key"));
        list(
            strict.address(),
            &[&ca[..], &["--tls-cert", &certificate, "--tls-key", &key]].concat(),
        )
    };
    shown("client").good();
    list(strict.address(), &ca).failed(
        2,
        "CertificateRequired",
        "the brain asks for a certificate",
    );
    shown("stranger").failed(2, "alert: UnknownCA", "signed by the brain's --tls-ca");
    list(strict.address(), &["--tls-ca", "none.pem"]).failed(2, "none.pem", "PEM files");
}

/// Who listens where a brain should be: passes for one as far as that goes without the token, and
/// keeps what it hears.
#[derive(Clone, Default)]
struct Rogue(Arc<Mutex<Heard>>);

#[derive(Default)]
struct Heard {
    handshakes: usize,
    tokens: usize,
    calls: Vec<&'static str>,
}

type Answer<T> = Result<Response<T>, Status>;

impl Rogue {
    fn hear<T>(
        &self,
        what: &'static str,
        request: &Request<T>,
    ) -> std::sync::MutexGuard<'_, Heard> {
        let mut heard = self.0.lock().expect("nothing panics");
        let sent = |value: &str| value.contains(TOKEN);
        heard.tokens += request
            .metadata()
            .iter()
            .filter(|entry| match entry {
                tonic::metadata::KeyAndValueRef::Ascii(_, value) => value.to_str().is_ok_and(sent),
                tonic::metadata::KeyAndValueRef::Binary(..) => false,
            })
            .count();
        if !what.is_empty() {
            heard.calls.push(what);
        }
        heard
    }

    /// Listens until the runtime is dropped.
    fn start(&self, address: &str) -> tokio::runtime::Runtime {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let listener =
            runtime.block_on(tokio::net::TcpListener::bind(address)).expect("it is free");
        let server = tonic::transport::Server::builder()
            .add_service(HandshakeServer::new(self.clone()))
            .add_service(BrainServer::new(self.clone()));
        runtime.spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        runtime
    }
}

#[tonic::async_trait]
impl Handshake for Rogue {
    async fn begin(&self, call: Request<proto::BeginRequest>) -> Answer<proto::BeginReply> {
        self.hear("", &call).handshakes += 1;
        Ok(Response::new(proto::BeginReply { nonce: call.into_inner().nonce }))
    }

    async fn finish(&self, call: Request<proto::FinishRequest>) -> Answer<proto::FinishReply> {
        drop(self.hear("", &call));
        Ok(Response::new(proto::FinishReply { proof: call.into_inner().proof }))
    }
}

#[tonic::async_trait]
impl Brain for Rogue {
    type EventsStream = ReceiverStream<Result<proto::Event, Status>>;
    type AttachStream = ReceiverStream<Result<proto::Command, Status>>;

    async fn submit(&self, call: Request<proto::SubmitRequest>) -> Answer<proto::SubmitReply> {
        drop(self.hear("submit", &call));
        Ok(Response::new(Default::default()))
    }

    async fn place(&self, call: Request<proto::PlaceRequest>) -> Answer<proto::PlaceReply> {
        drop(self.hear("place", &call));
        Ok(Response::new(Default::default()))
    }

    async fn release(&self, call: Request<proto::ReleaseRequest>) -> Answer<proto::ReleaseReply> {
        drop(self.hear("release", &call));
        Ok(Response::new(Default::default()))
    }

    async fn outage(&self, call: Request<proto::OutageRequest>) -> Answer<proto::RepairReply> {
        drop(self.hear("outage", &call));
        Ok(Response::new(Default::default()))
    }

    async fn defragment(
        &self,
        call: Request<proto::DefragmentRequest>,
    ) -> Answer<proto::RepairReply> {
        drop(self.hear("defragment", &call));
        Ok(Response::new(Default::default()))
    }

    async fn view(&self, call: Request<proto::ViewRequest>) -> Answer<Serialised> {
        drop(self.hear("view", &call));
        Ok(Response::new(Serialised::of(&proto::ViewReply { json: b"{}".to_vec() })))
    }

    async fn topology(&self, call: Request<proto::TopologyRequest>) -> Answer<Serialised> {
        drop(self.hear("topology", &call));
        Ok(Response::new(Default::default()))
    }

    async fn events(&self, call: Request<proto::EventsRequest>) -> Answer<Self::EventsStream> {
        drop(self.hear("events", &call));
        Ok(Response::new(ReceiverStream::new(tokio::sync::mpsc::channel(1).1)))
    }

    async fn attach(
        &self,
        call: Request<Streaming<proto::AgentMessage>>,
    ) -> Answer<Self::AttachStream> {
        drop(self.hear("attach", &call));
        let (commands, receiver) = tokio::sync::mpsc::channel(1);
        // An empty plan of the last of all terms.
        let last = proto::Position { term: u64::MAX, sequence: u64::MAX };
        let order = proto::Order { position: Some(last), ..proto::Order::default() };
        let order = prost::Message::encode_to_vec(&order);
        let signature = vec![0; 32];
        commands.try_send(Ok(proto::Command { order, signature })).expect("it is new");
        tokio::spawn(async move { commands.closed().await });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

#[test]
fn who_takes_the_place_of_a_brain_learns_no_token_and_an_agent_keeps_its_plan() {
    let folder = Folder::new("cluster-rogue");
    let free = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("it is bound");
    let address = free.to_string();
    let listen = ["--listen", &address];
    let brain = Daemon::brain(&folder, "brain", &listen);
    let args = ["agent", "--node", "host0", "--port", "1=lo:100Gbit", "--enforce", "none"];
    let more = ["--state", "agent.state", "--socket", "", "--rate-limits", "", "--brain", &address];
    let agent = Daemon::start(&folder, "agent", &[&args[..], &more].concat());
    let job = ["job", "submit", "ring:4@5G spread=hosts:4", "--name", "llm", "--brain", &address];
    run(&folder, &job).good();
    agent.says("guarantees of 1 job are in force, term 1");

    drop(brain);
    let rogue = Rogue::default();
    let runtime = rogue.start(&address);
    let begun = Instant::now();
    while rogue.0.lock().expect("whole").handshakes < 3 {
        assert!(begun.elapsed() < PATIENCE, "the agent does not come");
        std::thread::sleep(Duration::from_millis(20));
    }
    agent.says("who listens there does not know the token: its proof is wrong");
    runtime.shutdown_background();
    let heard = rogue.0.lock().expect("whole");
    assert_eq!((heard.tokens, &heard.calls[..]), (0, &[][..]), "it was told nothing");

    // The next brain tells the agent what is to be in force, in a term after the first one's.
    let begun = Instant::now();
    let brain = loop {
        // The port may not be free at once.
        if TcpListener::bind(&address).is_ok() {
            break Daemon::brain(&folder, "again", &listen);
        }
        assert!(begun.elapsed() < PATIENCE, "the port stays in use");
    };
    agent.says("guarantees of 1 job are in force, term 2");
    drop(agent);
    let again = Daemon::start(&folder, "agent-again", &[&args[..], &more].concat());
    again.says(&format!("follows brain {address}"));
    assert_eq!(again.ready["jobs"], 1, "its plan is in its file");
    drop(brain);
}

#[test]
fn a_new_token_needs_a_log_that_is_signed_with_it() {
    let folder = Folder::new("cluster-tokens");
    let listen = ["--listen", "127.0.0.1:0"];
    let brain = Daemon::brain(&folder, "brain", &listen);
    let sign = |more: &[&str]| {
        run(&folder, &[&["brain", "sign-log", "--state", "brain.redb"], more].concat())
    };
    // The file is made when the lease is taken.
    brain.says("leads in term 1, with 0 jobs");
    sign(&[]).failed(2, "a brain uses it: stop it first", "agents keep their plans");
    run(&folder, &["job", "submit", "ring:2@1G", "--name", "llm", "--brain", brain.address()])
        .good();
    drop(brain);
    let ran = sign(&[]).good();
    assert!(ran.stdout.contains("it was signed with this token already"), "{ran:?}");

    folder.write("old", TOKEN);
    folder.write("new", "a-new-token-of-the-tests");
    let new = ["--token-file", "new"];
    let args = ["brain", "--topology", "leaf-spine:2x2x2", "--state", "brain.redb"];
    let started = run(&folder, &[&args[..], &listen, &new].concat());
    started.failed(2, "is not signed with the token of this cluster", "`dquant brain sign-log`");
    sign(&new).failed(2, "is not signed with the token of this cluster", "--old-token-file");
    let ran = sign(&[&new[..], &["--old-token-file", "old", "--json"]].concat()).good();
    let ran: Value = serde_json::from_str(&ran.stdout).expect("JSON");
    assert_eq!((&ran["before"], &ran["store"]), (&"old token".into(), &"file brain.redb".into()));
    let brain = Daemon::brain(&folder, "again", &[&listen[..], &new].concat());
    let list = ["job", "list", "--brain", brain.address()];
    run(&folder, &list).failed(2, "the token is not the one", "--token-file");
    let listed = run(&folder, &[&list[..], &new].concat()).good();
    assert!(listed.stdout.contains("llm"), "{listed:?}");
}
