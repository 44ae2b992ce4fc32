//! Records that are no tokens: the same bytes in every placement, and what is refused.

use std::fs;

use xio::dataset::Dtype;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::harness::{Cat, Daemon, Ran, World};

/// Label and image, as in the binary files of CIFAR-10.
const RECORD: usize = 3_073;

/// Runs a stream with and without offload, and without daemons.
fn every_way(world: &World, target: &Daemon, dpu: &Daemon, name: &str, args: &[&str]) -> [Ran; 3] {
    let url = target.url(name);
    let through = Cat::through(world, dpu, &url, args).finish();
    let alone = Cat::alone(world, &url, args).finish();
    [through, alone, Cat::local(world, name, args).finish()]
}

fn bytes(count: usize, salt: u64) -> Vec<i128> {
    tokens(count, salt).into_iter().map(|token| token % 256).collect()
}

/// A `.npy` file of records with this type and shape, as Python writes them.
fn npy(world: &World, name: &str, descr: &str, shape: &str, content: Vec<i128>) -> Corpus {
    let corpus = Corpus::flat(&world.data(name), Dtype::U8, content);
    let header = format!("{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n");
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend(u16::try_from(header.len()).expect("a short header").to_le_bytes());
    file.extend(header.as_bytes());
    file.extend(fs::read(&corpus.path).expect("readable"));
    fs::write(&corpus.path, file).expect("writable");
    corpus
}

#[test]
fn records_are_delivered_as_they_are() {
    let Some(world) = World::new("records_are_delivered_as_they_are") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let cifar = Corpus::flat(&world.data("cifar.bin"), Dtype::U8, bytes(RECORD * 1_000, 1));
    let descr =
        "[('id', '<u4'), ('image', '|u1', (3, 32, 32)), ('box', '<f4', (2, 2)), ('', '|V8')]";
    let structured = npy(&world, "structured.npy", descr, "(700,)", bytes(700 * 3_100, 2));
    let floats = npy(&world, "floats.npy", "'>f8'", "(500, 16, 24)", bytes(500 * 3_072, 3));
    let large = Corpus::flat(&world.data("large.bin"), Dtype::U8, bytes(3 << 20, 4));
    for (corpus, plan) in [
        (&cifar, "window(3073) | shuffle(7) | batch(20)"),
        (&cifar, "window(3073) | compress(zstd, when=always) | batch(20)"),
        (&structured, "window(3100) | shuffle(7, blocks=1) | batch(9)"),
        (&structured, "window(6200) | compress(lz4) | batch(9)"),
        (&floats, "window(3072) | shuffle(1) | batch(20)"),
        (&large, "window(1048576) | shuffle(1) | batch(1)"),
    ] {
        let name = corpus.path.file_stem().and_then(|name| name.to_str()).expect("a name");
        let want = expected(plan, &[corpus], 0..60);
        let args = ["--plan", plan, "--batches", "60", "--dtype", "bytes"];
        for ran in every_way(&world, &target, &dpu, name, &args) {
            assert!(!ran.stderr.contains("guess"), "{}", ran.stderr);
            assert_same(&ran.good().stdout, &want);
        }
    }
    let plan = "window(3073) | shuffle(3) | blend(cifar=0.7, more=0.3) | batch(20)";
    let more = Corpus::flat(&world.data("more.bin"), Dtype::U8, bytes(RECORD * 400, 9));
    // With a manifest every byte is compared with it.
    let file = more.path.to_str().expect("a path");
    let made = world.run(&["inspect", file, "--dtype", "u8", "--write-manifest", "--force"]);
    made.good();
    let want = expected(plan, &[&cifar, &more], 0..60);
    let args = ["--plan", plan, "--batches", "60", "--dtype", "bytes"];
    for ran in every_way(&world, &target, &dpu, "", &args) {
        assert_same(&ran.good().stdout, &want);
    }
}

/// A file, a plan, further arguments, parts of the message, and part of the hint.
type Refused =
    (&'static str, &'static str, &'static [&'static str], &'static [&'static str], &'static str);

#[test]
fn bytes_are_never_taken_for_tokens_nor_cut_into_pieces() {
    let Some(world) = World::new("bytes_are_never_taken_for_tokens") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    Corpus::flat(&world.data("cifar.bin"), Dtype::U8, bytes(RECORD * 1_000, 1));
    Corpus::flat(&world.data("torn.bin"), Dtype::U8, bytes(RECORD * 1_000 + 5, 1));
    npy(&world, "images.npy", "'|u1'", "(100, 28, 28)", bytes(78_400, 1));
    npy(&world, "fields.npy", "[('a', '<u4'), ('b', '<f4')]", "(99,)", bytes(792, 1));
    npy(&world, "objects.npy", "'|O'", "(99,)", bytes(792, 1));
    const ASK: &[&str] = &["--dtype", "bytes"];
    let hint = "--dtype bytes";
    let cases: [Refused; 15] = [
        ("cifar", "window(3073)", &["--dtype", "u8"], &["cifar.bin", "u8 is not delivered"], hint),
        ("images", "window(784)", &[], &["images.npy", "u8 is not delivered"], hint),
        ("fields", "window(8)", &[], &["fields.npy", "a structure"], hint),
        ("objects", "window(8)", ASK, &["objects.npy", "no fixed size"], "fixed size"),
        ("torn", "window(3073)", ASK, &["torn.bin", "3073005 bytes", "5 are left"], "of a record"),
        ("cifar", "window(3072)", ASK, &["cifar.bin", "1000 are left over"], "of a record"),
        ("images", "window(28)", ASK, &["a record has 784 bytes"], "window(784)"),
        ("fields", "window(16)", ASK, &["fields.npy", "8 are left over"], "of several"),
        ("cifar", "window(3073) | narrow(u16)", ASK, &["narrow is for tokens"], "leave narrow"),
        ("cifar", "window(3073) | widen(i64)", ASK, &["widen is for tokens"], "leave widen"),
        ("cifar", "window(3073) | bitpack(9)", ASK, &["bitpack is for tokens"], "leave bitpack"),
        ("cifar", "window(3073) | pairs", ASK, &["pairs is for tokens"], "leave pairs"),
        ("cifar", "window(3073, overlap=1)", ASK, &["overlap is for tokens"], "leave overlap"),
        (
            "cifar",
            "window(3073)",
            &["--dtype", "bytes", "--vocab", "9"],
            &["vocabulary"],
            "--vocab",
        ),
        (
            "cifar",
            "window(3073)",
            &["--dtype", "byte"],
            &["\"byte\" is unknown"],
            "bytes for records",
        ),
    ];
    for (name, plan, more, parts, hint) in cases {
        let args = [&["--plan", plan, "--batches", "5"], more].concat();
        for ran in every_way(&world, &target, &dpu, name, &args) {
            ran.failed(2, parts, hint);
            assert!(ran.stdout.is_empty());
        }
    }
    let table = Corpus::flat(&world.data("table.bin"), Dtype::U32, vec![5; 300]);
    let plan = format!("window(3073) | remap(\"{}\")", table.path.display());
    let local = Cat::local(&world, "cifar", &["--plan", &plan, "--dtype", "bytes"]).finish();
    local.failed(2, &["remap is for tokens"], "leave remap");
}
