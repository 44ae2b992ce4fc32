//! `dquant tokenize --holdout`: two outputs, each document in one of them.

use std::fs;

use formats::manifest::Part;
use tokenize::Rule;

use super::seeds::{Replay, seeds};
use super::tokenize_inputs::{Random, documents};
use super::{Folder, Ran};

fn run(folder: &Folder, inputs: &[&str], more: &[&str]) -> Ran {
    let args = ["--encoding", "r50k_base", "--json", "-o", "web.bin"];
    folder.run(&[&["tokenize"], inputs, &args, more].concat())
}

fn json_lines(texts: &[String]) -> String {
    texts.iter().map(|text| serde_json::json!({ "text": text }).to_string() + "\n").collect()
}

/// Texts of which some occur several times, and a few are longer than what decides about them.
fn texts(random: &mut Random, count: usize) -> Vec<String> {
    let mut texts: Vec<String> = Vec::new();
    for number in 0..count {
        let text = match random.below(30) {
            0..5 if !texts.is_empty() => texts[random.below(texts.len())].clone(),
            5 => random.text(30_000),
            _ => random.text(40),
        };
        texts.push(if text.is_empty() { format!("text {number}") } else { text });
    }
    texts
}

fn rule(share: &str, seed: u64) -> Rule {
    Rule { share: share.parse().expect("a share"), seed }
}

fn manifest(folder: &Folder, name: &str) -> serde_json::Value {
    serde_json::from_slice(&folder.read(&format!("{name}.dquant.json"))).expect("JSON")
}

/// Both manifests name the other output, by name and fingerprint.
fn check_manifests(folder: &Folder, names: [&str; 2], (share, seed): (&str, u64)) {
    let found = names.map(|name| {
        folder.run(&["inspect", name, "--verify"]).good();
        manifest(folder, name)
    });
    for (this, other, part) in [(0, 1, "train"), (1, 0, "validation")] {
        let split = serde_json::json!({
            "part": part, "seed": seed, "share": share, "other": names[other],
            "other_fingerprint": found[other]["fingerprint"],
        });
        assert_eq!(found[this]["split"], split);
    }
}

/// The documents of both outputs are those that the rule gives them, in the order of the input.
fn check_parts(folder: &Folder, bpe: &tiktoken_rs::CoreBPE, texts: &[String], rule: Rule) {
    for (name, part) in [("web.bin", Part::Train), ("web-valid.bin", Part::Validation)] {
        let wanted = texts.iter().filter(|text| rule.part(text.as_bytes()) == part);
        let ids = |text: &String| [bpe.encode_ordinary(text), vec![50_256]].concat();
        assert!(documents(folder, name) == wanted.map(ids).collect::<Vec<_>>(), "{name}");
    }
}

#[test]
fn every_document_is_in_the_part_that_its_text_decides() {
    let bpe = tiktoken_rs::r50k_base().expect("ranks");
    let folder = Folder::new("holdout-parts");
    for seed in seeds(0..6) {
        let _replay = Replay { test: "every_document_is_in_the_part_that_its_text_decides", seed };
        let mut random = Random::new(seed);
        let texts = texts(&mut random, 300);
        let share = ["20%", "0.5%", "77.7%"][random.below(3)];
        let rule = rule(share, seed);
        let parts = texts.iter().map(|text| rule.part(text.as_bytes()));
        let held_out = parts.filter(|part| *part == Part::Validation).count();
        folder.write("a.jsonl", json_lines(&texts));
        let seed_text = seed.to_string();
        let args = ["--force", "--holdout", share, "--seed", &seed_text, "--jobs", "3"];
        let ran = run(&folder, &["a.jsonl"], &args);
        if held_out == 0 {
            ran.failed(1, "none of 300 documents went to web-valid.bin", "--seed");
            continue;
        }
        let summary = ran.good().json();
        assert_eq!(summary["documents"], 300 - held_out);
        assert_eq!(summary["held_out"]["documents"], held_out);
        assert_eq!(summary["held_out"]["output"], "web-valid.bin");
        check_parts(&folder, &bpe, &texts, rule);
        check_manifests(&folder, ["web.bin", "web-valid.bin"], (share, seed));
        // In another order, in small chunks, on one core.
        let turned: Vec<String> = texts.iter().rev().cloned().collect();
        folder.write("a.jsonl", json_lines(&turned));
        let args = [&args[..5], &["--jobs", "1", "--chunk", "64KiB"]].concat();
        run(&folder, &["a.jsonl"], &args).good();
        check_parts(&folder, &bpe, &turned, rule);
    }
}

/// Plain text is read in chunks; the part is that of the same text in a line of JSON.
#[test]
fn files_of_text_go_where_their_text_does() {
    let bpe = tiktoken_rs::r50k_base().expect("ranks");
    let folder = Folder::new("holdout-files");
    let mut random = Random::new(4);
    let texts: Vec<String> = (0..24)
        .map(|number| format!("{number} ") + &random.text([30, 60_000][number % 2]))
        .collect();
    for (number, text) in texts.iter().enumerate() {
        folder.write(&format!("t/{number:02}.txt"), text);
        // What is no text leaves nothing in either part.
        let broken = [text.as_bytes(), &[0xff]].concat();
        folder.write(&format!("t/{number:02}-broken.txt"), broken);
    }
    for (seed, jobs, chunk) in [(1, "1", "64KiB"), (2, "3", "64KiB"), (2, "2", "1MiB")] {
        let seed_text = seed.to_string();
        let args = ["--force", "--holdout", "40%", "--seed", &seed_text, "--jobs", jobs];
        let summary = run(&folder, &["t"], &[&args[..], &["--chunk", chunk]].concat()).good();
        assert_eq!(summary.json()["skipped_not_utf8"], 24);
        check_parts(&folder, &bpe, &texts, rule("40%", seed));
    }
    let summary = run(&folder, &["t"], &["--force", "--holdout", "0.000001%"]);
    summary.failed(1, "none of 24 documents went to web-valid.bin", "--holdout");
}

#[test]
fn both_parts_are_extended_by_the_same_rule() {
    let folder = Folder::new("holdout-append");
    let mut random = Random::new(9);
    let (first, second) = (texts(&mut random, 150), texts(&mut random, 200));
    folder.write("a.jsonl", json_lines(&first));
    folder.write("b.jsonl", json_lines(&second));
    let holdout = ["--holdout", "10%", "--seed", "3"];
    let with = |more: &[&'static str]| [&holdout[..], more].concat();
    run(&folder, &["a.jsonl", "b.jsonl"], &with(&[])).good();
    let whole = ["web.bin", "web.idx", "web-valid.bin", "web-valid.idx"].map(|name| {
        let bytes = folder.read(name);
        fs::remove_file(folder.0.join(name)).expect("there");
        (name, bytes)
    });
    run(&folder, &["a.jsonl"], &with(&["--append"])).good();
    let append = |more: &[&str]| run(&folder, &["b.jsonl"], &[&["--append"], more].concat());
    let before = folder.read("web.bin");
    append(&["--holdout", "10%"]).failed(
        2,
        "cannot append: web.bin: it was split at 10% by seed 3, not 10% by seed 0",
        "give --holdout 10% --seed 3",
    );
    append(&["--holdout", "10.1%", "--seed", "3"]).failed(2, "not 10.1% by seed 3", "10% --seed 3");
    append(&[]).failed(
        2,
        "web.bin: it is the train part of a split, 10% by seed 3",
        "extend both: -o web.bin --holdout 10% --seed 3",
    );
    let exchanged = ["-o", "web-valid.bin", "--holdout-output", "web.bin"];
    let args = [&["tokenize", "b.jsonl", "--encoding", "r50k_base", "--append"], &holdout[..]];
    let args = [&args.concat()[..], &exchanged].concat();
    folder.run(&args).failed(2, "it is the validation part of a split", "exchange");
    let manifests = ["web.bin.dquant.json", "web-valid.bin.dquant.json"];
    let kept = manifests.map(|name| folder.read(name));
    folder.write(manifests[1], &kept[0]);
    append(&holdout).failed(2, "web-valid.bin: it is the train part", "exchange");
    fs::remove_file(folder.0.join(manifests[1])).expect("there");
    append(&holdout).failed(2, "web-valid.bin: it has no manifest", "new outputs");
    folder.write(manifests[1], &kept[1]);
    fs::rename(folder.0.join("web-valid.bin"), folder.0.join("away.bin")).expect("there");
    append(&holdout).failed(2, "web-valid.bin: it does not exist", "new outputs");
    fs::rename(folder.0.join("away.bin"), folder.0.join("web-valid.bin")).expect("there");
    assert_eq!(folder.read("web.bin"), before);
    let summary = append(&holdout).good().json();
    assert!(summary["held_out"]["tokens_before"].as_u64() > Some(0), "{summary}");
    for (name, bytes) in whole {
        assert!(folder.read(name) == bytes, "{name}: not that of one run");
    }
    check_manifests(&folder, ["web.bin", "web-valid.bin"], ("10%", 3));
}

/// Parts of two runs by the same rule belong to different documents.
#[test]
fn a_part_of_another_run_is_not_extended() {
    let folder = Folder::new("holdout-other");
    let mut random = Random::new(2);
    for name in ["a.jsonl", "b.jsonl"] {
        folder.write(name, json_lines(&texts(&mut random, 100)));
    }
    let holdout = ["--holdout", "30%"];
    run(&folder, &["a.jsonl"], &holdout).good();
    let other = [&holdout[..], &["--holdout-output", "other.bin", "-o", "b.bin"]].concat();
    let args = ["tokenize", "b.jsonl", "--encoding", "r50k_base"];
    folder.run(&[&args[..], &other].concat()).good();
    let mixed = [&holdout[..], &["--append", "--holdout-output", "other.bin"]].concat();
    run(&folder, &["b.jsonl"], &mixed).failed(
        2,
        "web.bin: it and other.bin are not parts of one split",
        "web-valid.bin",
    );
    // Whatever the two are called, and wherever they are.
    let elsewhere = ["--force", "--holdout", "30%", "--holdout-output", "held/out.bin"];
    fs::create_dir(folder.0.join("held")).expect("writable");
    fs::remove_file(folder.0.join("web-valid.bin")).expect("written");
    run(&folder, &["a.jsonl"], &elsewhere).good();
    assert_eq!(manifest(&folder, "web.bin")["split"]["other"], "held/out.bin");
    assert_eq!(manifest(&folder, "held/out.bin")["split"]["other"], "../web.bin");
    let shown = folder.run(&["inspect", "held/out.bin"]).good().stdout;
    assert!(
        shown.contains(
            "split        validation part, 30% held out by seed 0; train part: ../web.bin"
        ),
        "{shown}"
    );
}

/// A stream over a converted part and the other part is refused as before.
#[test]
fn a_converted_part_still_names_the_other_one() {
    let folder = Folder::new("holdout-convert");
    folder.write("a.jsonl", json_lines(&texts(&mut Random::new(8), 200)));
    run(&folder, &["a.jsonl"], &["--holdout", "30%", "--seed", "2"]).good();
    fs::create_dir(folder.0.join("sub")).expect("writable");
    folder.run(&["documents", "web.bin", "--hash"]).good();
    let hash = folder.run(&["documents", "web.bin", "--hashes", "--json"]).good().json();
    folder.write("list.txt", hash["hashes"][3].as_str().expect("digits"));
    let fingerprint = manifest(&folder, "web-valid.bin")["fingerprint"].clone();
    for (output, other, more) in [
        ("narrow.bin", "web-valid.bin", &["--to", "megatron", "--to-dtype", "u16"][..]),
        ("sub/array.npy", "../web-valid.bin", &[]),
        ("sub/lit", "../../web-valid.bin", &["--to", "litdata"]),
        ("clean.bin", "web-valid.bin", &["--to", "megatron", "--filter", "list.txt"]),
    ] {
        folder.run(&[&["convert", "web.bin", output], more].concat()).good();
        let name = if output.ends_with("lit") { "sub/lit/dquant.json" } else { output };
        let text = match name == output {
            true => manifest(&folder, output),
            false => serde_json::from_slice(&folder.read(name)).expect("JSON"),
        };
        let split = serde_json::json!({
            "part": "train", "seed": 2, "share": "30%", "other": other, "other_fingerprint": fingerprint,
        });
        assert_eq!(text["split"], split, "{output}");
    }
    let plan = "window(16) | blend(clean.bin=1, web-valid.bin=1) | batch(2)";
    let args = ["cat", ".", "--plan", plan, "--batches", "2"];
    folder.run(&args).failed(2, "two parts of one hold-out", "weight 0");
}

#[test]
fn one_part_is_not_replaced_alone() {
    let folder = Folder::new("holdout-force");
    folder.write("a.jsonl", json_lines(&texts(&mut Random::new(6), 100)));
    let holdout = ["--force", "--holdout", "30%"];
    run(&folder, &["a.jsonl"], &holdout).good();
    let before = folder.read("web.bin");
    let refused = |more: &[&str], path: &str, other: &str| {
        let why = format!("{path} is one part of a split, and {other} the other");
        run(&folder, &["a.jsonl"], more).failed(2, &why, "replace both");
    };
    refused(&["--force"], "web.bin", "web-valid.bin");
    let renamed = [&holdout[..], &["--seed", "1", "--holdout-output", "b.bin"]].concat();
    refused(&renamed, "web.bin", "web-valid.bin");
    let args = ["tokenize", "a.jsonl", "--encoding", "r50k_base", "--force", "-o", "web-valid.bin"];
    folder.run(&args).failed(2, "web-valid.bin is one part of a split, and web.bin", "remove");
    assert_eq!(folder.read("web.bin"), before);
    // Both at once, under any names, or when the other one is gone.
    run(&folder, &["a.jsonl"], &[&holdout[..], &["--seed", "1"]].concat()).good();
    check_manifests(&folder, ["web.bin", "web-valid.bin"], ("30%", 1));
    fs::remove_file(folder.0.join("web-valid.bin")).expect("written");
    run(&folder, &["a.jsonl"], &["--force"]).good();
    assert_eq!(manifest(&folder, "web.bin")["split"], serde_json::Value::Null);
}

#[test]
fn shares_and_outputs_that_cannot_be_are_refused() {
    let folder = Folder::new("holdout-refused");
    folder.write("a.jsonl", json_lines(&texts(&mut Random::new(1), 50)));
    for (share, why) in [
        ("0%", "more than 0% and less than 100%"),
        ("100%", "more than 0% and less than 100%"),
        ("1000", "a percentage, such as 1% or 0.5%; a number of documents cannot be held out"),
        ("one%", "`one` is no decimal number"),
    ] {
        run(&folder, &["a.jsonl"], &["--holdout", share]).failed(2, why, "");
    }
    let ran = run(&folder, &["a.jsonl"], &["--seed", "3"]);
    assert!(ran.exit == Some(2) && ran.stderr.contains("--holdout"), "{ran:?}");
    let to = |output: &'static str| ["--holdout", "50%", "--holdout-output", output];
    run(&folder, &["a.jsonl"], &to("./web.bin")).failed(2, "cannot both be outputs", "another");
    run(&folder, &["a.jsonl"], &to("valid")).failed(2, "valid is no name for a pair", "--flat");
    run(&folder, &["a.jsonl"], &to("no/valid.bin")).failed(2, "no/", "must exist");
    run(&folder, &["a.jsonl"], &to("a.jsonl")).failed(2, "to be read and to be written", "-o");
    folder.write("taken.bin", "precious");
    run(&folder, &["a.jsonl"], &to("taken.bin")).failed(2, "taken.bin exists", "--force");
    let flat = [&to("web.idx")[..], &["--flat"]].concat();
    run(&folder, &["a.jsonl"], &flat).failed(2, "cannot both be outputs", "--holdout-output");
    let mut names: Vec<_> = fs::read_dir(&folder.0).expect("readable").flatten().collect();
    names.retain(|entry| entry.file_name() != "a.jsonl" && entry.file_name() != "taken.bin");
    assert!(names.is_empty(), "something is left: {names:?}");
    run(&folder, &["a.jsonl"], &[&to("valid")[..], &["--flat"]].concat()).good();
    assert!(folder.0.join("valid").exists() && !folder.0.join("valid.idx").exists());
    check_manifests(&folder, ["web.bin", "valid"], ("50%", 0));
}
