//! WebAssembly modules of users: the same batches in every placement, what a module may do wrong, and that the
//! target goes on serving others.

use std::fs;

use sha2::{Digest, Sha256};
use xio::dataset::Dtype;
use xio::plan::Plan;
use xio::reference::Reference;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::harness::{Cat, Daemon, Ran, World, path};

/// A module that maps tokens of `u32` (or of `u16` with other widths) by the body of its loop.
fn module(body: &str) -> String {
    format!(
        "(module
           (memory (export \"memory\") 20)
           (func (export \"dquant_buffer\") (param i32) (result i32) (i32.const 65536))
           (func (export \"dquant_map_u32\")
             (param $buffer i32) (param $count i32) (param $first i64) (result i32)
             (local $i i32) (local $at i32) (local $token i32)
             (loop $next
               (local.set $at (i32.add (local.get $buffer) (i32.shl (local.get $i) (i32.const 2))))
               (local.set $token (i32.load (local.get $at)))
               {body}
               (i32.store (local.get $at) (local.get $token))
               (local.set $i (i32.add (local.get $i) (i32.const 1)))
               (br_if $next (i32.lt_u (local.get $i) (local.get $count))))
             (i32.const 0)))"
    )
}

/// Adds twice its number to a token, modulo 50,000.
const ADD: &str = "(local.set $token (i32.rem_u
    (i32.add (local.get $token) (i32.shl (i32.wrap_i64
        (i64.add (local.get $first) (i64.extend_i32_u (local.get $i)))) (i32.const 1)))
    (i32.const 50000)))";

fn add(number: u64, value: i128) -> i128 {
    let sum = (value as u32).wrapping_add((number as u32).wrapping_mul(2));
    i128::from(sum % 50_000)
}

/// Writes a module below the root and returns its part of a plan at the target and for local files.
fn install(world: &World, name: &str, text: &str) -> [String; 2] {
    let bytes = wat::parse_str(text).expect("the text is a module");
    let file = world.data(&format!("{name}.wasm"));
    fs::write(&file, &bytes).expect("writable");
    let hash: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    let part = |name: &str| format!("wasm(\"{name}\", sha256={hash})");
    [part(name), part(path(&world.data(name)))]
}

/// Runs a plan with and without offload, and without daemons; `{wasm}` stands for the module.
fn every_way(
    world: &World,
    daemons: (&Daemon, &Daemon),
    plan: &str,
    [remote, local]: &[String; 2],
    batches: &str,
) -> [Ran; 3] {
    let (target, dpu) = daemons;
    let (remote, local) = (plan.replace("{wasm}", remote), plan.replace("{wasm}", local));
    let args = |plan| ["--plan", plan, "--batches", batches, "--dtype", "u32"];
    let url = target.url("web");
    [
        Cat::through(world, dpu, &url, &args(&remote)).finish(),
        Cat::alone(world, &url, &args(&remote)).finish(),
        Cat::local(world, "web", &args(&local)).finish(),
    ]
}

#[test]
fn a_module_maps_tokens_in_every_placement() {
    let Some(world) = World::new("a_module_maps_tokens") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let web = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(900_000, 1));
    let module = install(&world, "add", &module(ADD));
    for form in ["narrow(u16) | compress(zstd, when=always)", "widen(i64) | pairs", "bitpack(17)"] {
        let plan = format!("window(501, overlap=1) | shuffle(7) | {{wasm}} | {form} | batch(10)");
        let parsed = Plan::parse(&plan.replace("{wasm}", &module[0]), None).expect("a plan");
        let tokens = web.tokens.clone();
        let file = xio::dataset::flat(Dtype::U32, 3_600_000).expect("whole tokens");
        let read = move |index: u64| tokens.get(index as usize).copied();
        let reference = Reference::new(&parsed, vec![(file, read)]).expect("it fits");
        let mut reference = reference.with_action(add);
        let want: Vec<u8> =
            (0..180).flat_map(|batch| reference.batch(batch).expect("it fits")).collect();
        for ran in every_way(&world, (&target, &dpu), &plan, &module, "180") {
            assert_same(&ran.good().stdout, &want);
        }
    }
}

#[test]
fn a_module_that_misbehaves_ends_its_stream_and_no_other() {
    let Some(world) = World::new("a_module_that_misbehaves") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let mut ids = tokens(700_000, 1);
    ids[400_123] = 60_000;
    let web = Corpus::flat(&world.data("web.bin"), Dtype::U32, ids);
    let at_large =
        |body: &str| format!("(if (i32.eq (local.get $token) (i32.const 60000)) (then {body}))");
    let plan = "window(1000) | {wasm} | batch(10)";
    let good = expected("window(1000) | batch(10)", &[&web], 0..40);
    // What a token causes ends the stream at its sample.
    for (name, body, why) in [
        ("traps", at_large("unreachable"), "`unreachable`"),
        ("outside", at_large("(local.set $token (i32.load (i32.const -4)))"), "outside its memory"),
        ("refuses", at_large("(return (i32.const 17))"), "error code 17"),
    ] {
        let module = install(&world, name, &module(&body));
        for ran in every_way(&world, (&target, &dpu), plan, &module, "60") {
            let named = format!("{name} failed on the sample from token 400000 on");
            ran.failed(1, &["web.bin: the module", &named, why], "");
            assert_same(&ran.stdout, &good);
        }
    }
    // What ends it at a block.
    let grow = at_large("(drop (memory.grow (i32.const 1000)))");
    let last = "(local.set $token (i32.add (local.get $token) (local.get $count)))";
    for (name, body, why, hint) in [
        ("loops", at_large("(loop $for_ever (br $for_ever))"), "exceeded its time", "50 ms"),
        ("grows", grow, "exceeded its memory", "32 MiB"),
        ("counts", last.to_owned(), "other tokens", "cut differently"),
    ] {
        let module = install(&world, name, &module(&body));
        for ran in every_way(&world, (&target, &dpu), plan, &module, "60") {
            let named = format!("{name} failed on the block from token ");
            ran.failed(1, &["web.bin: the module", &named, why], hint);
        }
    }
    // The target has counted them, and serves others.
    let status = target.status(&world);
    assert!(status.counter("target.action_faults") >= 12);
    let args = ["--plan", "window(1000) | batch(10)", "--batches", "40", "--dtype", "u32"];
    let ran = Cat::through(&world, &dpu, &target.url("web"), &args).finish().good();
    assert_same(&ran.stdout, &good);
}

#[test]
fn a_module_that_may_not_run_is_refused_when_the_stream_opens() {
    let Some(world) = World::new("a_module_that_may_not_run") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(100_000, 1));
    let plan = "window(1000) | {wasm} | batch(10)";
    let good = install(&world, "good", &module(ADD));
    let zeros = "0".repeat(64);
    let other = good.each_ref().map(|part| {
        let (name, _) = part.split_once(", sha256=").expect("a hash");
        format!("{name}, sha256={zeros})")
    });
    let absent = good.each_ref().map(|part| part.replace("good", "absent"));
    let import = module(ADD).replace("(memory (", "(import \"env\" \"now\" (func)) (memory (");
    let no_buffer = module(ADD).replace("dquant_buffer", "buffer");
    let for_u16 = module(ADD).replace("dquant_map_u32", "dquant_map_u16");
    fs::write(world.data("text.wasm"), "(module)").expect("writable");
    let text_hash: String =
        Sha256::digest(b"(module)").iter().map(|byte| format!("{byte:02x}")).collect();
    let text = good.each_ref().map(|part| {
        let (name, _) = part.split_once(", sha256=").expect("a hash");
        format!("{}, sha256={text_hash})", name.replace("good", "text"))
    });
    let cases = [
        (other, "good.wasm: its SHA-256 is", "sha256sum"),
        (absent, "absent", "with or without .wasm"),
        (install(&world, "imports", &import), "imports env.now", "may import nothing"),
        (
            install(&world, "half", &no_buffer),
            "no export dquant_buffer(i32) -> i32",
            "docs/plan.md",
        ),
        (
            install(&world, "u16", &for_u16),
            "no export dquant_map_u32(i32, i32, i64)",
            "docs/plan.md",
        ),
        (text, "it is no WebAssembly module", "docs/plan.md"),
    ];
    for (module, part, hint) in &cases {
        for ran in every_way(&world, (&target, &dpu), plan, module, "10") {
            ran.failed(2, &[part], hint);
        }
    }
    // At a target modules lie below its roots.
    for (name, part) in [("../outside", "outside"), ("/etc/passwd", "is absolute")] {
        let plan = format!("window(1000) | wasm(\"{name}\", sha256={zeros})");
        let ran = Cat::through(&world, &dpu, &target.url("web"), &["--plan", &plan]).finish();
        ran.failed(2, &[part], "");
    }
}
