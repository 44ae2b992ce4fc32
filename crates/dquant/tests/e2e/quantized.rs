//! Values of floating point, as they are and quantized: the same batches in every placement, and
//! what is refused.

use std::fs;

use xio::dataset::Dtype;

use super::corpus::{Corpus, assert_same, expected};
use super::harness::{Cat, Daemon, Ran, World};

/// Runs a stream with and without offload, and without daemons.
fn every_way(world: &World, target: &Daemon, dpu: &Daemon, name: &str, args: &[&str]) -> [Ran; 3] {
    let url = target.url(name);
    let through = Cat::through(world, dpu, &url, args).finish();
    let alone = Cat::alone(world, &url, args).finish();
    [through, alone, Cat::local(world, name, args).finish()]
}

/// Bits of finite values of many sizes.
fn values(count: usize, dtype: Dtype, salt: u64) -> Vec<i128> {
    let mixed = |i: u64| (i + salt * 1_000_003).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16;
    let bits = |i: u64| match dtype {
        Dtype::F32 => {
            let exponent = 100 + (mixed(i) >> 24) % 40;
            (mixed(i) & 0x807f_ffff) | exponent << 23
        }
        Dtype::F16 => (mixed(i) & 0x83ff) | (((mixed(i) >> 20) % 31) << 10),
        _ => (mixed(i) & 0x807f) | (90 + (mixed(i) >> 20) % 60) << 7,
    };
    (0..count as u64).map(|i| i128::from(bits(i))).collect()
}

/// As numpy writes it; a type that numpy has.
fn npy(world: &World, name: &str, corpus: &Corpus) {
    let (descr, count) = (corpus.dtype.npy(), corpus.tokens.len());
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({count},), }}\n");
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend(u16::try_from(header.len()).expect("a short header").to_le_bytes());
    file.extend(header.as_bytes());
    file.extend(fs::read(&corpus.path).expect("readable"));
    fs::write(world.data(name), file).expect("writable");
}

#[test]
fn values_are_the_same_quantized_in_every_placement() {
    let Some(world) = World::new("values_are_the_same_quantized") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let single = values(700_000, Dtype::F32, 1);
    let single = Corpus::flat(&world.data("single.bin"), Dtype::F32, single);
    let half = Corpus::flat(&world.data("half.bin"), Dtype::F16, values(800_000, Dtype::F16, 2));
    let brain =
        Corpus::flat(&world.data("brain.bin"), Dtype::Bf16, values(600_000, Dtype::Bf16, 3));
    npy(&world, "array.npy", &single);
    npy(&world, "halves.npy", &half);
    for (name, corpus, plan) in [
        ("single", &single, "window(501, overlap=1) | shuffle(3) | pairs"),
        ("array", &single, "window(640) | shuffle(3, blocks=2) | quantize(int8)"),
        ("single", &single, "window(784) | quantize(e4m3) | compress(zstd, when=always)"),
        ("single", &single, "window(500) | shuffle(1) | quantize(e5m2, deliver=bf16)"),
        ("single", &single, "window(33) | shuffle(3) | quantize(int8, deliver=quantized)"),
        ("halves", &half, "window(96) | shuffle(3) | quantize(e4m3)"),
        ("half", &half, "window(1000) | quantize(int8, deliver=f32) | compress(lz4, when=always)"),
        ("brain", &brain, "window(64) | shuffle(3) | quantize(e4m3, deliver=quantized)"),
        ("brain", &brain, "window(65) | shuffle(3) | quantize(e5m2) | pairs"),
        ("brain", &brain, "window(2048) | shuffle(3)"),
    ] {
        let plan = format!("{plan} | batch(20)");
        let want = expected(&plan, &[corpus], 0..25);
        let args = ["--plan", &plan, "--batches", "25", "--dtype", corpus.dtype.name()];
        for ran in every_way(&world, &target, &dpu, name, &args) {
            assert!(!ran.stderr.contains("guess"), "{}", ran.stderr);
            assert_same(&ran.good().stdout, &want);
        }
    }
    // Files of two types, delivered as one; each says its own.
    let plan = "window(100) | blend(array=2, halves=1) | quantize(e4m3, deliver=f32) | batch(20)";
    let want = expected(plan, &[&single, &half], 0..25);
    for ran in every_way(&world, &target, &dpu, "", &["--plan", plan, "--batches", "25"]) {
        assert_same(&ran.good().stdout, &want);
    }
}

/// A file, a plan, further arguments, parts of the message, and part of the hint.
type Refused =
    (&'static str, &'static str, &'static [&'static str], &'static [&'static str], &'static str);

#[test]
fn what_cannot_be_quantized_is_refused() {
    let Some(world) = World::new("what_cannot_be_quantized") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let good = Corpus::flat(&world.data("good.bin"), Dtype::F32, values(400_000, Dtype::F32, 1));
    let mut bits = good.tokens.clone();
    for (name, bad) in [("nan", f32::NAN), ("infinite", f32::NEG_INFINITY), ("large", 1e9)] {
        bits[123_456] = bad.to_bits().into();
        Corpus::flat(&world.data(&format!("{name}.bin")), Dtype::F32, bits.clone());
    }
    for (name, action, parts) in [
        ("nan", "quantize(int8)", ["is NaN", "int8 has no such value"]),
        ("infinite", "quantize(e4m3)", ["is -inf", "e4m3 has no such value"]),
        ("large", "quantize(e5m2, deliver=f16)", ["is 939524100", "does not fit f16"]),
    ] {
        let plan = format!("window(1000) | {action} | batch(10)");
        let want = expected(&plan, &[&good], 0..12);
        let args = ["--plan", &plan, "--batches", "30", "--dtype", "f32"];
        for ran in every_way(&world, &target, &dpu, name, &args) {
            let name = format!("{name}.bin");
            ran.failed(1, &[&name, "token 123456 (byte 493824)", parts[0], parts[1]], "quantize");
            assert_same(&ran.stdout, &want);
        }
    }
    Corpus::flat(
        &world.data("tokens.bin"),
        Dtype::U32,
        (0..50_000).map(|i| i * 37 % 50_257).collect(),
    );
    fs::write(world.data("odd.bin"), [0; 4_098]).expect("writable");
    let floats: &[&str] = &["--dtype", "f32"];
    let cases: [Refused; 8] = [
        ("good", "quantize(int4)", floats, &["no quantized type `int4`"], "int8, e4m3 and e5m2"),
        ("good", "quantize(int8) | narrow(u16)", floats, &["exclude each other"], "keep one"),
        (
            "good",
            "narrow(u16)",
            floats,
            &["good.bin holds f32, and narrow is for tokens"],
            "quantize",
        ),
        ("good", "widen(i64)", floats, &["widen is for tokens"], "leave widen out"),
        ("tokens", "quantize(int8)", &["--dtype", "u32"], &["tokens.bin holds u32"], "--dtype f32"),
        ("tokens", "quantize(int8)", floats, &["tokens.bin", "is not f32 but u32"], "--dtype"),
        ("odd", "quantize(int8)", floats, &["odd.bin", "no multiple of f32"], ""),
        ("good", "batch(1)", &["--dtype", "f32", "--vocab", "9"], &["no tokens"], "--vocab"),
    ];
    for (name, action, more, parts, hint) in cases {
        let plan = format!("window(1000) | {action}");
        let args = [&["--plan", &plan, "--batches", "5"], more].concat();
        for ran in every_way(&world, &target, &dpu, name, &args) {
            ran.failed(2, parts, hint);
        }
    }
    let plan = "window(1000, overlap=1) | quantize(int8)";
    let ran = Cat::local(&world, "good", &["--plan", plan, "--dtype", "f32"]).finish();
    ran.failed(2, &["quantize and overlap exclude each other"], "keep one");
}
