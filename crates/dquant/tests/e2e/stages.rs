//! The stages that a session agrees on: what is refused, and that both ends run what was agreed.

use engine::control::target::TargetControl;
use engine::proto::stage::Kind;
use engine::proto::{
    ChecksumStage, CompressStage, DatasetRef, NarrowStage, PackStage, QueuePair, ReadStage,
    RemapStage, SessionRequest, Stage, TargetStages, WasmStage,
};
use xio::dataset::Dtype;
use xio::plan::Plan;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::harness::{Cat, TOKEN, World, fresh_ip};
use super::hostile_packets::runtime;
use super::hostile_target::{FakeTarget, Lies};

fn read(dtype: &str) -> Option<Kind> {
    Some(Kind::Read(ReadStage { dtype: dtype.into() }))
}

fn narrow(from: &str, to: &str) -> Option<Kind> {
    Some(Kind::Narrow(NarrowStage { from: from.into(), to: to.into(), instead: None }))
}

fn checksum(dtype: &str) -> Option<Kind> {
    Some(Kind::Checksum(ChecksumStage { dtype: dtype.into() }))
}

fn pack(bits: u32) -> Option<Kind> {
    Some(Kind::Pack(PackStage { dtype: "u16".into(), bits, packs_others: false }))
}

fn compress(codec: &str, level: i32) -> Option<Kind> {
    let (dtype, codec) = ("u16".into(), codec.into());
    Some(Kind::Compress(CompressStage { dtype, codec, level, always: false, packed: false }))
}

fn remap(ids: u32) -> Option<Kind> {
    let (dtype, table) = ("u32".into(), "web".into());
    Some(Kind::Remap(RemapStage { dtype, table, ids, fingerprint: 5 }))
}

fn wasm(module: &str, sha256: &[u8]) -> Option<Kind> {
    let (dtype, module, sha256) = ("u32".into(), module.into(), sha256.to_vec());
    Some(Kind::Wasm(WasmStage { dtype, module, sha256 }))
}

fn list(kinds: &[Option<Kind>]) -> TargetStages {
    TargetStages { stages: kinds.iter().map(|kind| Stage { kind: kind.clone() }).collect() }
}

/// A target's stages for blocks of `u32` that are to be delivered as `u16`.
pub(crate) fn u32_to_u16() -> TargetStages {
    list(&[read("u32"), narrow("u32", "u16"), checksum("u16")])
}

/// Asks for a session over `web` with these stages, which the target has to refuse.
async fn assert_refused(
    control: &TargetControl,
    stages: Vec<TargetStages>,
    part: &str,
    hint: &str,
) {
    let address = format!("{}:4791", fresh_ip());
    let reader = QueuePair { address, qpn: 5, psn: 0, mtu: 4096, selective_repeat: false };
    let (name, dtype) = ("web".into(), "u32".into());
    let datasets = vec![DatasetRef { name, dtype, ..DatasetRef::default() }];
    let request = SessionRequest { datasets, reader: Some(reader), credits: 4, stages };
    let error = control.session(request).await.map(drop).expect_err(part);
    let (message, hinted) = error.parts();
    assert!(message.contains(part), "{part:?} is not in {message:?}");
    let hinted = hinted.expect("every refusal has a hint");
    assert!(hinted.contains(hint), "{hint:?} is not in {hinted:?}");
    assert_eq!(
        (error.kind(), error.is_transient()),
        (service::error::Kind::Invalid, false),
        "{message}"
    );
}

#[test]
fn a_target_refuses_stages_that_it_cannot_run() {
    let Some(world) = World::new("a_target_refuses_stages") else {
        return;
    };
    let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(100_000, 1));
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let [r, n, c] = [read("u32"), narrow("u32", "u16"), checksum("u16")];
    let unknown = [r.clone(), None, c.clone()];
    let many = vec![r.clone(); 9];
    let version = "same version";
    let with = |last: Option<Kind>| vec![list(&[r.clone(), n.clone(), c.clone(), last])];
    let cases: [(Vec<TargetStages>, &str, &str); 22] = [
        (with(pack(16)), "stage 4, pack, is not defined", ""),
        (with(pack(300)), "stage 4 is of an unknown kind", version),
        (with(pack(0)), "stage 4, pack, is not defined", ""),
        (with(compress("brotli", 1)), "stage 4 is of an unknown kind", version),
        (with(compress("zstd", 22)), "stage 4 is of an unknown kind", version),
        (with(checksum("u16")), "stage 4, checksum, takes blocks of u16", ""),
        (vec![list(&[r.clone(), remap(0), n.clone(), c.clone()])], "remap, is not defined", ""),
        (
            vec![list(&[r.clone(), remap(9), n.clone(), c.clone()])],
            "web: the table has changed",
            "again",
        ),
        (
            vec![list(&[r.clone(), wasm("web", &[7; 31]), n.clone(), c.clone()])],
            "web: its hash is no SHA-256",
            version,
        ),
        (
            vec![list(&[r.clone(), n.clone(), wasm("web", &[7; 32]), c.clone()])],
            "stage 3, wasm, takes blocks of u32",
            "",
        ),
        // A reader without support for stages.
        (vec![], "0 lists of stages for 1 datasets", version),
        (vec![u32_to_u16(); 2], "2 lists of stages for 1 datasets", version),
        (vec![list(&[])], "web.bin: no stage", version),
        (vec![list(&unknown)], "web.bin: stage 2 is of an unknown kind", version),
        (vec![list(&[read("float8"), c.clone()])], "stage 1 is of an unknown kind", version),
        (vec![list(&many)], "9 stages are given, at most 8", ""),
        (vec![list(&[read("u64"), checksum("u64")])], "given a file of u32", ""),
        (vec![list(&[r.clone(), c.clone()])], "stage 2, checksum, takes blocks of u16", ""),
        (vec![list(&[n.clone(), c.clone()])], "stage 1, narrow, takes blocks", ""),
        (vec![list(&[r.clone(), narrow("u32", "u64"), c])], "narrow, is not defined", ""),
        (vec![list(&[r.clone(), n])], "only blocks with a checksum cross the wire", ""),
        (vec![list(&[r])], "only blocks with a checksum cross the wire", ""),
    ];
    let count = cases.len() as u64;
    runtime().block_on(async {
        let control = TargetControl::connect(target.control(), TOKEN).await.expect("reachable");
        for (stages, part, hint) in cases {
            assert_refused(&control, stages, part, hint).await;
        }
    });
    let status = target.status(&world);
    assert_eq!(status.counter("target.refused.stages"), count);
    assert_eq!(status.counter("target.sessions"), 0);
    let plan = "window(100) | narrow(u16) | batch(8)";
    let args = ["--plan", plan, "--batches", "20"];
    let ran = Cat::through(&world, &dpu, &target.url("web"), &args).finish().good();
    assert_same(&ran.stdout, &expected(plan, &[&corpus], 0..20));
}

#[test]
fn a_reader_refuses_a_target_that_agrees_to_other_stages() {
    let Some(world) = World::new("a_reader_refuses_other_stages") else {
        return;
    };
    let dpu = world.dpu(&[]);
    let runtime = runtime();
    let args = ["--plan", "window(100) | narrow(u16)", "--batches", "3"];
    for stages in [
        // A target without support for stages.
        vec![],
        vec![list(&[read("u32"), narrow("u32", "u32"), checksum("u32")])],
        vec![u32_to_u16(), u32_to_u16()],
        vec![list(&[read("u32"), None, checksum("u16")])],
    ] {
        let fake = FakeTarget::start(&runtime, Lies::running(stages));
        for ran in [
            Cat::through(&world, &dpu, &fake.url("web"), &args).finish(),
            Cat::alone(&world, &fake.url("web"), &args).finish(),
        ] {
            ran.failed(2, &["target", "other stages than requested"], "same version");
        }
    }
    assert_eq!(dpu.status(&world).counter("dpu.streams"), 0);
}

/// A conversion that saves no bytes: the daemons' counters show it where the table puts it.
#[test]
fn the_table_says_what_the_counters_show() {
    let Some(world) = World::new("the_table_says_what_the_counters_show") else {
        return;
    };
    let corpus = Corpus::flat(&world.data("web.bin"), Dtype::I32, tokens(400_000, 1));
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let plan = "window(1000) | narrow(u32) | batch(10)";
    let want = expected(plan, &[&corpus], 0..40);
    let args = ["--dtype", "i32", "--plan", plan, "--batches", "40"];
    let at = |offload: bool| {
        let pipeline = Plan::parse(plan, None).expect("a plan").compile(&[Dtype::I32], offload);
        let row = pipeline.expect("it fits").table().rows.swap_remove(0);
        assert_eq!(row.action, "narrow(u32)");
        row.place.name()
    };
    let converted = || {
        let target = target.status(&world).counter("target.narrowed_blocks");
        (target, dpu.status(&world).counter("stream.narrowed_blocks"))
    };
    assert_same(
        &Cat::through(&world, &dpu, &target.url("web"), &args).finish().good().stdout,
        &want,
    );
    let (at_target, at_dpu) = converted();
    assert_eq!((at(true), at_target > 0, at_dpu > 0), ("target", true, false));
    // The host is not a daemon: what it converts, no daemon does.
    assert_same(&Cat::alone(&world, &target.url("web"), &args).finish().good().stdout, &want);
    assert_eq!((at(false), converted()), ("host", (at_target, 0)));
}
