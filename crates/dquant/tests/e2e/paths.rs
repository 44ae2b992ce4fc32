//! Networks between a DPU and its target that drop all packets, those of RoCE, or large ones: the
//! stream ends with an error that names the culprit, and the daemon's log and status name it
//! before.
//!
//! Target and DPU live in network namespaces, joined by a bridge in a third. Needs root, `ip` and
//! bridges; without them every test reports that and passes.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::Signal;
use xio::dataset::Dtype;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::harness::{Cat, Daemon, Ran, World, eventually};

/// 64 KiB a batch.
const PLAN: &str = "window(1024) | shuffle(11, blocks=2) | narrow(u16) | batch(32)";
const ARGS: &[&str] = &["--plan", PLAN, "--batches", "300", "--slots", "2", "--slot-size", "64KiB"];
const CONTROL: &str = "10.79.0.2:4790";
const URL: &str = "dq://10.79.0.2:4790/web";

fn ip(arguments: &str) -> bool {
    let run = Command::new("ip").args(arguments.split_whitespace()).output();
    run.is_ok_and(|output| output.status.success())
}

/// The namespaces of the DPU (10.79.0.1 and .3), of the target (.2), and of what is between them.
struct Lab {
    dpu: String,
    target: String,
    between: String,
}

impl Lab {
    fn new(test: &str) -> Option<Lab> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = |side| format!("dq{}-{number}{side}", std::process::id());
        let lab = Lab { dpu: name('d'), target: name('t'), between: name('b') };
        if lab.build() {
            return Some(lab);
        }
        let reason = "network namespaces and bridges need root and iproute2";
        super::skip::note(&format!("e2e::paths::{test}"), reason);
        None
    }

    fn build(&self) -> bool {
        let Lab { dpu, target, between } = self;
        let namespaces = [dpu, target, between].iter().all(|name| ip(&format!("netns add {name}")));
        let joined = namespaces
            && ip(&format!("-n {between} link add br0 type bridge"))
            && ip(&format!("-n {between} link set br0 up"));
        joined
            && [(dpu, "pd", "10.79.0.1/24"), (target, "pt", "10.79.0.2/24")].iter().all(
                |(name, port, address)| {
                    ip(&format!(
                        "link add v0 netns {name} mtu 9000 type veth peer name {port} mtu 9000 netns {between}"
                    )) && ip(&format!("-n {between} link set {port} master br0"))
                        && ip(&format!("-n {between} link set {port} up"))
                        // A device that cuts packets later would carry several in one past the
                        // bridge.
                        && ip(&format!("-n {name} link set v0 gso_max_segs 1"))
                        && ip(&format!("-n {name} addr add {address} dev v0"))
                        && ip(&format!("-n {name} link set v0 up"))
                        && ip(&format!("-n {name} link set lo up"))
                        // Rules of a test come before the one for local addresses.
                        && ip(&format!("-n {name} rule add pref 9 lookup local"))
                        && ip(&format!("-n {name} rule del pref 0"))
                },
            )
            && ip(&format!("-n {dpu} addr add 10.79.0.3/24 dev v0"))
    }

    /// Drops what arrives at one of the namespaces and matches: without a word to the sender.
    fn drop_at(&self, namespace: &str, what: &str) {
        assert!(ip(&format!("-n {namespace} rule add pref 1 iif v0 {what} blackhole")), "{what}");
    }

    /// The bridge passes no more packets of more than 1,500 bytes from and to the target.
    fn drop_large(&self) {
        assert!(ip(&format!("-n {} link set pt mtu 1500", self.between)));
    }

    fn pass_all(&self) {
        for namespace in [&self.dpu, &self.target] {
            while ip(&format!("-n {namespace} rule del pref 1")) {}
        }
        assert!(ip(&format!("-n {} link set pt mtu 9000", self.between)));
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for name in [&self.dpu, &self.target, &self.between] {
            ip(&format!("netns del {name}"));
        }
    }
}

/// Target and DPU at both ends of the path.
struct Scene {
    // Dropped before the namespaces.
    _target: Daemon,
    dpu: Daemon,
    corpus: Corpus,
    world: World,
    lab: Lab,
}

impl Scene {
    fn new(test: &str) -> Option<Scene> {
        let world = World::new(test)?;
        let lab = Lab::new(test)?;
        let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(786_432, 4));
        let serve = ["--control", CONTROL, "--roce", "10.79.0.2:4791"];
        let target = world.within(&lab.target, || world.target(&serve));
        let at = ["--control", "10.79.0.1:4792", "--roce", "10.79.0.1:4791", "--reconnect", "4s"];
        let dpu = world.within(&lab.dpu, || world.dpu(&at));
        Some(Scene { _target: target, dpu, corpus, world, lab })
    }

    /// Streams with and without offload.
    fn cats(&self) -> [Cat; 2] {
        self.world.within(&self.lab.dpu, || {
            let through = Cat::through(&self.world, &self.dpu, URL, ARGS);
            let own = ["--offload", "false", "--roce", "10.79.0.3:4791", "--reconnect", "4s"];
            let args = [&["cat", URL], &own[..], ARGS].concat();
            [through, Cat::start(&self.world, self.world.program(&args))]
        })
    }

    /// Streams in whose middle something happens to the path, and how they end. What they deliver
    /// is right.
    fn break_in_the_middle(&self, how: impl FnOnce()) -> [Ran; 2] {
        let mut cats = self.cats();
        let heads = cats.each_mut().map(|cat| cat.read(1 << 20));
        how();
        let want = expected(PLAN, &[&self.corpus], 0..300);
        let mut heads = heads.into_iter();
        cats.map(|cat| {
            let ran = cat.finish();
            let got = [heads.next().unwrap_or_default(), ran.stdout.clone()].concat();
            assert_same(&got, &want[..got.len()]);
            ran
        })
    }

    /// The reason for which the DPU's stream waits is in its status and in its log.
    fn assert_shown(&self, text: &str) {
        eventually("a note in the status", || {
            let status = self.world.within(&self.lab.dpu, || self.dpu.status(&self.world));
            let notes = status.0["notes"].as_array().cloned().unwrap_or_default();
            notes
                .iter()
                .any(|note| note.as_str().is_some_and(|note| note.contains(text)))
                .then_some(())
        });
        assert!(self.dpu.stderr().contains(text), "{text:?} is not in {}", self.dpu.stderr());
    }
}

const NO_ROCE: &str = "accepts control connections, but nothing arrives over RoCE";

#[test]
fn a_firewall_that_blocks_roce_is_named() {
    let Some(scene) = Scene::new("a_firewall_that_blocks_roce") else {
        return;
    };
    // At either end, from the first packet on.
    for namespace in [&scene.lab.target, &scene.lab.dpu] {
        scene.lab.drop_at(namespace, "ipproto udp dport 4791");
        let cats = scene.cats();
        scene.assert_shown(NO_ROCE);
        for cat in cats {
            let ran = cat.finish();
            ran.failed(3, &[CONTROL, NO_ROCE], "a firewall may block UDP port 4791");
            assert!(ran.stdout.is_empty());
        }
        scene.lab.pass_all();
    }
    for ran in scene.break_in_the_middle(|| {
        scene.lab.drop_at(&scene.lab.target, "ipproto udp dport 4791");
    }) {
        ran.failed(3, &[CONTROL, NO_ROCE], "a firewall may block UDP port 4791");
    }
}

/// What connections find out of a path that drops large packets is used, named, and known to the
/// next stream.
#[test]
fn a_path_that_drops_large_packets_is_named_and_used_with_small_ones() {
    let Some(scene) = Scene::new("a_path_that_drops_large_packets") else {
        return;
    };
    const FOUND: &str = "drops packets with 4096 bytes of data, those with 1024 pass";
    let want = expected(PLAN, &[&scene.corpus], 0..300);
    for ran in scene.break_in_the_middle(|| scene.lab.drop_large()) {
        ran.good();
    }
    let losses = || scene.dpu.stderr().matches("has lost target").count();
    let before = losses();
    let [mut through, alone] = scene.cats();
    let head = through.read(1 << 20);
    scene.assert_shown(FOUND);
    assert_same(&[head, through.finish().good().stdout].concat(), &want);
    assert_eq!(losses(), before, "the DPU knows the path: {}", scene.dpu.stderr());
    assert_same(&alone.finish().good().stdout, &want);
}

/// An operator may name the path MTU, and a limit of the rate: both hold.
#[test]
fn path_mtu_and_rate_are_those_of_the_operator() {
    let Some(world) = World::new("path_mtu_and_rate_are_those_of_the_operator") else {
        return;
    };
    let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(786_432, 4));
    let want = expected(PLAN, &[&corpus], 0..100);
    let args = ["--plan", PLAN, "--batches", "100", "--slots", "2", "--slot-size", "64KiB"];
    let stream = |serve: &[&str], dpu: &[&str]| {
        let (target, dpu) = (world.target(serve), world.dpu(dpu));
        let began = std::time::Instant::now();
        let cat = Cat::through(&world, &dpu, &target.url("web"), &args).finish().good();
        let took = began.elapsed();
        assert_same(&cat.stdout, &want);
        (took, target.stderr(), target.status(&world))
    };
    for (serve, dpu) in [(&["--mtu", "512"][..], &[][..]), (&[], &["--mtu", "512"])] {
        let (_, log, _) = stream(serve, dpu);
        assert!(log.contains("MTU 512"), "{log}");
    }
    // 6.5 MB at 20 MB/s, and the catching up of a late sender.
    let (took, _, status) = stream(&["--rate", "160Mbit/s"], &[]);
    assert!(took.as_secs_f64() > 0.25, "{took:?}");
    assert!(status.0["counters"]["roce.paced_packets"].as_u64() > Some(100), "{status:?}");
}

#[test]
fn a_target_behind_a_black_hole_is_named() {
    let Some(scene) = Scene::new("a_target_behind_a_black_hole") else {
        return;
    };
    const SILENT: &str = "no answer within 5 s";
    const HINT: &str = "TCP port 4790 and UDP port 4791";
    for ran in scene.break_in_the_middle(|| scene.lab.drop_at(&scene.lab.target, "")) {
        ran.failed(3, &[CONTROL, "could not be restored", SILENT], HINT);
    }
    for cat in scene.cats() {
        cat.finish().failed(3, &[CONTROL, SILENT], HINT);
    }
}

#[test]
fn a_path_that_heals_in_time_costs_nothing() {
    let Some(scene) = Scene::new("a_path_that_heals") else {
        return;
    };
    let [mut cat, alone] = scene.cats();
    drop(alone);
    let head = cat.read(1 << 20);
    scene.lab.drop_at(&scene.lab.target, "ipproto udp dport 4791");
    // Until the stream has noticed.
    let rest = std::thread::scope(|scope| {
        let rest = scope.spawn(move || cat.finish());
        scene.assert_shown(NO_ROCE);
        scene.lab.pass_all();
        rest.join().expect("it does not panic")
    });
    let got = [head, rest.good().stdout].concat();
    assert_same(&got, &expected(PLAN, &[&scene.corpus], 0..300));
}

#[test]
fn a_target_that_is_stopped_is_named() {
    let Some(world) = World::new("a_target_that_is_stopped") else {
        return;
    };
    Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(786_432, 4));
    let (target, dpu) = (world.target(&[]), world.dpu(&["--reconnect", "2s"]));
    let mut cat = Cat::through(&world, &dpu, &target.url("web"), ARGS);
    cat.read(1 << 20);
    target.signal(Signal::STOP);
    let ran = cat.finish();
    target.signal(Signal::CONT);
    ran.failed(3, &[target.control(), "did not reply within 5 s"], "stopped or overloaded");
}
