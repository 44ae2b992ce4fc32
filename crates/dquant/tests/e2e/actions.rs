//! WebAssembly modules of users: the same batches in every placement, what a module may do wrong,
//! and that the target goes on serving others.

use std::fs;

use sha2::{Digest, Sha256};
use xio::dataset::Dtype;
use xio::documents::Documents;
use xio::plan::Plan;
use xio::reference::Reference;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::harness::{Cat, Daemon, Ran, World, path};

/// A module that maps tokens of `u16` by the body of its loop.
fn module_of_u16(body: &str) -> String {
    let wide = module(body);
    let wide = wide.replace("dquant_map_u32", "dquant_map_u16");
    let wide = wide.replace("(local.get $i) (i32.const 2)", "(local.get $i) (i32.const 1)");
    let wide = wide.replace("(i32.load (local.get $at))", "(i32.load16_u (local.get $at))");
    wide.replace("(i32.store (local.get $at)", "(i32.store16 (local.get $at)")
}

/// A module that maps tokens of `u32` by the body of its loop.
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

/// Runs a plan over `web`, flat tokens of `u32`, with and without offload, and without daemons;
/// `{wasm}` stands for the module.
fn every_way(
    world: &World,
    daemons: (&Daemon, &Daemon),
    plan: &str,
    module: &[String; 2],
    batches: &str,
) -> [Ran; 3] {
    let args = ["--batches", batches, "--dtype", "u32"];
    every_way_over(world, daemons, "web", plan, module, &args)
}

/// The same over datasets that tell their types.
fn every_way_over(
    world: &World,
    (target, dpu): (&Daemon, &Daemon),
    name: &str,
    plan: &str,
    [remote, local]: &[String; 2],
    more: &[&str],
) -> [Ran; 3] {
    let (remote, local) = (plan.replace("{wasm}", remote), plan.replace("{wasm}", local));
    let (remote, local) =
        ([&["--plan", &remote], more].concat(), [&["--plan", &local], more].concat());
    let url = target.url(name);
    [
        Cat::through(world, dpu, &url, &remote).finish(),
        Cat::alone(world, &url, &remote).finish(),
        Cat::local(world, name, &local).finish(),
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

/// Two files of many documents, some of them empty.
fn documents(world: &World) -> [Corpus; 2] {
    [("web", 3_000, 1), ("code", 1_000, 2)].map(|(name, count, salt)| {
        let lengths: Vec<u32> = (0..count).map(|i| i * 37 % 150).collect();
        let ids = tokens(lengths.iter().sum::<u32>() as usize, salt);
        Corpus::with_documents(&world.data(&format!("{name}.bin")), ids, lengths)
    })
}

/// Samples of documents, rows of positions, and `remap` before the module; every form on the wire.
#[test]
fn a_module_maps_tokens_of_documents_in_every_placement() {
    let Some(world) = World::new("a_module_maps_tokens_of_documents") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let [web, _] = documents(&world);
    let table: Vec<i128> = (0..50_257).map(|id| (id * 40_503 + 11) % 50_257).collect();
    Corpus::flat(&world.data("ids.bin"), Dtype::U32, table.clone());
    let alone = install(&world, "add", &module_of_u16(ADD));
    let [remote, local] = &alone;
    let ids = world.data("ids.bin");
    let remapped =
        [format!("remap(\"ids\") | {remote}"), format!("remap(\"{}\") | {local}", path(&ids))];
    for (plan, module) in [
        ("window(64) | pack(best, pad=3) | shuffle(7) | {wasm} | batch(10)", &alone),
        ("window(64) | pack(first) | {wasm} | compress(zstd, when=always) | batch(10)", &alone),
        (
            "window(65, overlap=1) | {wasm} | widen(i64) | pairs(ignore=-100) | positions | batch(10)",
            &alone,
        ),
        (
            "window(64) | pack(single) | shuffle(7) | {wasm} | widen(u32) | positions | batch(10) \
             | compress(lz4, when=always)",
            &remapped,
        ),
        (
            "window(64) | shuffle(7) | {wasm} | compress(zstd, level=3, when=always) | batch(10)",
            &remapped,
        ),
    ] {
        let parsed = Plan::parse(&plan.replace("{wasm}", &module[0]), None).expect("a plan");
        let ids = web.tokens.clone();
        let file = xio::dataset::flat(Dtype::U16, 2 * ids.len() as u64).expect("whole tokens");
        let read = move |index: u64| ids.get(index as usize).copied();
        let reference = Reference::new(&parsed, vec![(file, read)]).expect("it fits");
        let reference = reference.with_documents(vec![web.documents.clone()]).expect("documents");
        let table = table.iter().map(|id| *id as u32).collect();
        let mut reference = reference.with_table(table).with_action(add);
        let want: Vec<u8> =
            (0..180).flat_map(|batch| reference.batch(batch).expect("it fits")).collect();
        let batches = ["--batches", "180"];
        for ran in every_way_over(&world, (&target, &dpu), "web", plan, module, &batches) {
            assert_same(&ran.good().stdout, &want);
        }
    }
}

/// The pieces of Megatron-core's samples lie anywhere in the files: a module knows where.
#[test]
fn a_module_maps_tokens_in_the_order_of_megatron_in_every_placement() {
    let Some(world) = World::new("a_module_maps_tokens_in_the_order_of_megatron") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let corpora = documents(&world);
    let module = install(&world, "add", &module_of_u16(ADD));
    let text = "window(65, overlap=1) | order(megatron, seed=7, samples=1200, split=\"8,2\") \
                | blend(web=0.7, code=0.3) | {wasm} | pairs | positions | batch(10)";
    let plan = Plan::parse(&text.replace("{wasm}", &module[0]), None).expect("a plan");
    let tables = corpora
        .each_ref()
        .map(|corpus| Documents::new(corpus.documents.iter().cloned()).expect("they are in order"));
    let order = plan.megatron_order(tables.into(), 1 << 30).expect("it has this order");
    let order = order.expect("the datasets are good");
    let picks: Vec<(usize, u64)> = order.cursor_at(0).take(1200).collect();
    let mut want: Vec<u16> = Vec::new();
    for batch in picks.chunks(10) {
        let mut rows = [const { Vec::new() }; 4];
        for (dataset, k) in batch {
            let (mut sample, mut places) = (Vec::new(), Vec::new());
            for (number, piece) in (1..).zip(order.pieces(*dataset, *k)) {
                places.extend((0..(piece.end - piece.start) as u16).map(|at| (at, number)));
                let mapped = |at: u64| add(at, corpora[*dataset].tokens[at as usize]) as u16;
                sample.extend(piece.map(mapped));
            }
            rows[0].extend(&sample[..64]);
            rows[1].extend(&sample[1..]);
            rows[2].extend(places[..64].iter().map(|place| place.0));
            rows[3].extend(places[..64].iter().map(|place| place.1));
        }
        want.extend(rows.concat());
    }
    let want: Vec<u8> = want.into_iter().flat_map(u16::to_le_bytes).collect();
    for form in ["", " | compress(lz4, when=always)"] {
        let plan = format!("{text}{form}");
        for ran in every_way_over(&world, (&target, &dpu), "", &plan, &module, &[]) {
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
