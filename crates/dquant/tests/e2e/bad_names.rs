//! Names that do not exist, or that lead outside the exported folder.

use std::fs;
use std::os::unix::fs::symlink;

use xio::dataset::Dtype;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::harness::{Cat, World};

const ARGS: &[&str] = &["--plan", "window(100) | narrow(u16)", "--batches", "3"];

#[test]
fn nothing_outside_the_root_is_opened() {
    let Some(world) = World::new("nothing_outside_the_root_is_opened") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let secret = world.path("secret.bin");
    Corpus::flat(&secret, Dtype::U32, tokens(10_000, 1));
    fs::create_dir(world.data("sub")).expect("writable");
    symlink(&secret, world.data("out.bin")).expect("links work");
    symlink("../secret.bin", world.data("relative-out.bin")).expect("links work");
    symlink(world.path(""), world.data("parent")).expect("links work");
    symlink("/dev/zero", world.data("zero.bin")).expect("links work");
    let absolute = secret.display().to_string();
    for name in [
        "../secret.bin",
        "../secret",
        "sub/../../secret.bin",
        "sub/./../../secret.bin",
        &absolute,
        "/etc/passwd",
        "out.bin",
        "out",
        "relative-out",
        "parent/secret.bin",
        "zero",
        "/proc/self/root/etc/passwd",
    ] {
        for cat in [
            Cat::through(&world, &dpu, &target.url(name), ARGS),
            Cat::alone(&world, &target.url(name), ARGS),
        ] {
            let ran = cat.finish();
            ran.failed(2, &[name], "");
            assert!(ran.stdout.is_empty(), "{name}");
            // Nor does it reveal how long the file is, or whether it exists.
            assert!(!ran.stderr.contains("40000"), "{}", ran.stderr);
        }
    }
}

/// A target says what it serves, to those who know its token, and nothing of what lies elsewhere.
#[test]
fn a_target_lists_its_datasets() {
    let Some(world) = World::new("a_target_lists_its_datasets") else { return };
    let target = world.target(&[]);
    Corpus::flat(&world.path("secret.bin"), Dtype::U32, tokens(10_000, 1));
    symlink(world.path("secret.bin"), world.data("out.bin")).expect("links work");
    fs::create_dir(world.data("more")).expect("writable");
    Corpus::flat(&world.data("web.bin"), Dtype::U16, tokens(10_000, 2));
    Corpus::flat(&world.data("more/code.bin"), Dtype::U16, tokens(5_000, 3));
    fs::write(world.data("more/rows.bin"), b"PAR1 and more").expect("writable");
    let url = |prefix: &str| format!("dq://{}{prefix}", target.control());
    let said = |args: &[&str]| {
        let ran = world.run(args).good();
        String::from_utf8_lossy(&ran.stdout).into_owned()
    };
    let all = said(&["datasets", &url("")]);
    for part in
        ["web.bin", "more/code.bin", "more/rows.bin", "no stream can read it", "10,000 tokens"]
    {
        assert!(all.contains(part), "{part}: {all}");
    }
    assert!(!all.contains("secret") && !all.contains("out.bin"), "{all}");
    let more = said(&["datasets", &url("/more/"), "--json"]);
    assert!(more.contains("code.bin") && !more.contains("web.bin"), "{more}");
    world.run(&["datasets", &url(""), "--token", "wrong-token"]).failed(2, &["token"], "");
    world.run(&["datasets", "web.bin"]).failed(2, &["dq://"], "dquant inspect");
}

#[test]
fn what_is_not_a_token_file_is_refused() {
    let Some(world) = World::new("what_is_not_a_token_file_is_refused") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    fs::create_dir(world.data("folder")).expect("writable");
    fs::create_dir(world.data("folder.bin")).expect("writable");
    let long = "x".repeat(300);
    let longer = format!("{}y", "x/".repeat(3000));
    for (name, part) in [
        ("none", "none"),
        ("folder.bin", "directory"),
        ("folder", "folder"),
        ("", "no dataset"),
        ("folder/none", "folder/none"),
        (&long, "xxx"),
        (&longer, "too long"),
    ] {
        let ran = Cat::through(&world, &dpu, &target.url(name), ARGS).finish();
        ran.failed(2, &[part], "");
    }
    for url in ["http://127.0.0.1/x", "dq://", "web"] {
        Cat::through(&world, &dpu, url, ARGS).finish().failed(2, &[url], "dq://HOST");
    }
}

#[test]
fn links_and_folders_inside_the_root_work() {
    let Some(world) = World::new("links_and_folders_inside_the_root_work") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    fs::create_dir_all(world.data("a/b")).expect("writable");
    let corpus = Corpus::flat(&world.data("a/b/web.bin"), Dtype::U32, tokens(10_000, 1));
    symlink("a/b/web.bin", world.data("link.bin")).expect("links work");
    symlink("b", world.data("a/c")).expect("links work");
    let want = expected(ARGS[1], &[&corpus], 0..3);
    for name in ["a/b/web.bin", "a/b/web", "link", "link.bin", "a/c/web", "a/b/../b/web"] {
        let ran = Cat::through(&world, &dpu, &target.url(name), ARGS).finish().good();
        assert_same(&ran.stdout, &want);
    }
    // Below a folder, with a name that needs quotes.
    fs::copy(&corpus.path, world.data("a/my file.bin")).expect("writable");
    let plan = "window(100) | blend(\"my file\"=1) | narrow(u16)";
    let args = ["--plan", plan, "--batches", "3"];
    let ran = Cat::through(&world, &dpu, &target.url("a"), &args).finish().good();
    assert_same(&ran.stdout, &want);
}
