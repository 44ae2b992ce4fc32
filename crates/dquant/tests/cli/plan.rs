//! `dquant plan explain`: plans before they run.

use serde_json::Value;

use super::{Folder, Ran};

fn explained(folder: &Folder, args: &[&str]) -> Value {
    let ran = folder.run(&[&["plan", "explain", "--json"], args].concat());
    serde_json::from_str(&ran.good().stdout).expect("one object")
}

/// A figure of a placement; `path` is of the form `a.b`.
fn figure(placed: &Value, path: &str) -> f64 {
    let found = path.split('.').fold(placed, |value, name| &value[name]);
    found.as_f64().unwrap_or_else(|| panic!("{path} in {placed}"))
}

fn near(found: f64, wanted: f64) {
    assert!((found - wanted).abs() < 1e-6, "{found}, not {wanted}");
}

fn stages(placed: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    let rows = placed["rows"].as_array().expect("rows").iter();
    rows.map(|row| (text(&row["place"]), text(&row["stage"]))).collect()
}

#[test]
fn types_suffice_to_explain_a_plan() {
    let folder = Folder::new("plan-types");
    let plan = "window(2048) | shuffle(7) | narrow(u16)";
    let shown = explained(&folder, &[plan, "--dtype", "u32"]);
    assert_eq!(shown["schema"], "dquant.plan/1");
    assert_eq!(shown["measured"], false);
    let placed = shown["placements"].as_array().expect("placements");
    let names: Vec<_> = placed.iter().map(|placed| placed["placement"].clone()).collect();
    assert_eq!(names, ["offload", "no_offload", "local"]);
    for (placed, wire, places) in [
        (&placed[0], 2.0, "target dpu host"),
        (&placed[1], 4.0, "target host"),
        (&placed[2], 0.0, "host"),
    ] {
        near(figure(placed, "wire_bytes"), wire);
        near(figure(placed, "delivered_bytes"), 2.0);
        let mut found: Vec<_> = stages(placed).into_iter().map(|(place, _)| place).collect();
        found.dedup();
        assert_eq!(found.join(" "), places);
        // The sums are those of the rows, and who takes part needs memory.
        for place in ["target", "dpu", "host"] {
            let rows = placed["rows"].as_array().expect("rows").iter();
            let there = rows.filter(|row| row["place"] == place);
            let sum: f64 = there.map(|row| row["cpu_s"].as_f64().expect("a figure")).sum();
            near(figure(placed, &format!("cpu_s.{place}")), sum);
            let memory = figure(placed, &format!("memory_bytes.{place}"));
            assert_eq!(memory > 0.0, places.contains(place), "{place}");
        }
    }
    let narrows = |placed: &Value| {
        let found = stages(placed).into_iter().find(|(_, stage)| stage == "narrow(u16)");
        found.expect("it narrows").0
    };
    assert_eq!((narrows(&placed[0]), narrows(&placed[1])), ("target".into(), "host".into()));
}

#[test]
fn files_of_a_blend_are_weighted_and_measured() {
    let folder = Folder::new("plan-files");
    let tokens = |count: u32| (0..count).map(|token| token * 7_919 % 50_000);
    let wide: Vec<u8> = tokens(300_000).flat_map(u32::to_le_bytes).collect();
    let narrow: Vec<u8> = tokens(300_000).flat_map(|token| (token as u16).to_le_bytes()).collect();
    folder.write("web.bin", &wide);
    folder.write("code.bin", narrow);
    for (name, dtype) in [("web.bin", "u32"), ("code.bin", "u16")] {
        folder.run(&["inspect", name, "--dtype", dtype, "--write-manifest"]).good();
    }
    let plan = "window(1025, overlap=1) | blend(web=3, code=1) | narrow(u16) | compress(lz4) | widen(i64) | pairs";
    let shown = explained(&folder, &[plan, ".", "--measure", "--placement", "offload"]);
    assert_eq!(shown["datasets"][1]["dtype"], "u16");
    assert_eq!(shown["datasets"][1]["origin"], "manifest");
    let [placed] = shown["placements"].as_array().expect("placements").as_slice() else {
        panic!("{shown}");
    };
    near(figure(&placed["rows"][0], "bytes_out"), 3.5);
    // 1,024 tokens of a window are new; inputs and labels are 8 bytes each.
    near(figure(placed, "delivered_bytes"), 16.0);
    let compressed = figure(placed, "wire_bytes");
    assert!(compressed > 0.0 && compressed <= 2.0, "{compressed}");
    let rows = placed["rows"].as_array().expect("rows");
    assert!(rows.iter().all(|row| row["cpu_s"].as_f64() >= Some(0.0)), "{placed}");
    let text = folder.run(&["plan", "explain", plan, "."]).good().stdout;
    for part in [
        "OFFLOAD",
        "NO OFFLOAD",
        "LOCAL FILES",
        "as its manifest says",
        "undo compress(lz4)",
        "wire: ",
        "memory: target",
        "depends on the data",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    assert!(
        text.lines().all(|line| line.chars().count() <= 150 && line.trim_end() == line),
        "{text}"
    );
    // A token that a stream would refuse ends the measurement.
    let mut wide = wide;
    wide[400..404].copy_from_slice(&70_000_u32.to_le_bytes());
    folder.write("bad.bin", wide);
    let ran = folder.run(&[
        "plan",
        "explain",
        "window(4) | narrow(u16)",
        "bad.bin",
        "--dtype",
        "u32",
        "--measure",
    ]);
    ran.failed(1, "a token is 70000: it does not fit u16", "without --measure");
}

/// Loss weights are read, checked and sent beside the tokens.
#[test]
fn loss_weights_are_explained() {
    let folder = Folder::new("plan-weights");
    let shown = explained(&folder, &["window(64) | pairs | loss_weights", "--dtype", "u16"]);
    let placed = shown["placements"].as_array().expect("placements");
    let rows = stages(&placed[0]);
    let at = |place: &str, stage: &str| {
        let row = (place.to_owned(), stage.to_owned());
        rows.iter().position(|found| *found == row).unwrap_or_else(|| panic!("{row:?}: {rows:?}"))
    };
    let order = [
        at("target", "read loss weights"),
        at("target", "checksum loss weights"),
        at("target", "send"),
        at("dpu", "receive"),
        at("dpu", "verify loss weights"),
    ];
    assert!(order.is_sorted(), "{rows:?}");
    near(figure(&placed[0], "wire_bytes"), 2.0 + 4.0);
    let local = placed.iter().find(|placed| placed["placement"] == "local").expect("three");
    assert!(stages(local).iter().all(|(_, stage)| !stage.contains("checksum")), "{local}");
}

/// Plans whose figures depend on documents, and forms of what is no token.
#[test]
fn documents_and_values_are_explained() {
    let folder = Folder::new("plan-forms");
    let wasm = format!("wasm(m, sha256={})", "00".repeat(32));
    for (plan, dtype, wire, delivered, noted) in [
        ("window(2048) | quantize(int8)", "f32", 1.03125, 4.0, ""),
        ("window(2048) | quantize(e4m3, deliver=bf16)", "f16", 1.03125, 2.0, ""),
        ("window(64) | quantize(e5m2, deliver=quantized)", "bf16", 1.03125, 1.03125, ""),
        ("window(100) | shuffle(1)", "bytes", 1.0, 1.0, ""),
        ("window(512) | pack(best) | positions", "u16", 2.0, 6.0, "count as full"),
        ("window(512) | pack(first) | filter(l) | dedup", "u16", 2.0, 2.0, "not subtracted"),
        ("window(512) | order(megatron, seed=1, samples=9)", "u16", 2.0, 2.0, "order(megatron)"),
        ("window(8) | blend(a=1:0, b=0:1) | phases(9)", "u16", 2.0, 2.0, "first phase"),
        (&format!("window(8) | {wasm} | narrow(u16)"), "u32", 2.0, 2.0, ""),
    ] {
        for measure in [&[][..], &["--measure"]] {
            if plan.contains("wasm") && !measure.is_empty() {
                continue;
            }
            let shown = explained(&folder, &[&[plan, "--dtype", dtype], measure].concat());
            let notes = shown["notes"].as_array().expect("notes");
            let notes: Vec<_> = notes.iter().filter_map(Value::as_str).collect();
            assert_eq!(notes.is_empty(), noted.is_empty(), "{plan}: {notes:?}");
            assert!(noted.is_empty() || notes.join(" ").contains(noted), "{plan}: {notes:?}");
            let placed = shown["placements"].as_array().expect("placements");
            near(figure(&placed[0], "wire_bytes"), wire);
            placed.iter().for_each(|placed| near(figure(placed, "delivered_bytes"), delivered));
        }
    }
    let text = folder.run(&["plan", "explain", "window(64) | quantize(int8)", "--dtype", "f32"]);
    assert!(text.good().stdout.contains("undo quantize(int8)"));
    let text = folder.run(&["plan", "explain", "window(64) | pack(best)", "--dtype", "u16"]);
    assert!(text.good().stdout.contains("packed samples count as full"));
}

/// Where the documents are at hand, their figures take the place of notes.
#[test]
fn documents_that_are_known_are_counted() {
    let folder = Folder::new("plan-documents");
    // Nine documents of 40 tokens, of which two are one document, and one of 100.
    let lengths = [40_u32, 40, 40, 40, 40, 40, 40, 40, 40, 100];
    let ids = (0..460_u16).map(|at| if at / 40 == 3 { at - 40 } else { at });
    folder.write("web.bin", ids.flat_map(u16::to_le_bytes).collect::<Vec<_>>());
    let mut index = b"MMIDIDX\0\0".to_vec();
    index.extend(1_u64.to_le_bytes());
    index.push(8);
    index.extend(10_u64.to_le_bytes());
    index.extend(11_u64.to_le_bytes());
    index.extend(lengths.iter().flat_map(|length| length.to_le_bytes()));
    index.extend((0..10_u64).flat_map(|document| (80 * document).to_le_bytes()));
    index.extend((0..11_u64).flat_map(u64::to_le_bytes));
    folder.write("web.idx", index);
    folder.run(&["documents", "web.bin", "--hash"]).good();
    let shown = folder.run(&["documents", "web.bin", "--hashes", "--json"]).good().stdout;
    let listing: Value = serde_json::from_str(&shown).expect("one object");
    folder.write("list.txt", listing["hashes"][0].as_str().expect("a hash"));
    let plan = "window(64) | pack(single) | filter(\"list.txt\") | dedup | positions";
    let shown = explained(&folder, &[plan, "web.bin"]);
    let drawn = &shown["datasets"][0]["drawn"];
    for (name, count) in [
        ("documents", 8),
        ("tokens", 380),
        ("filtered_documents", 1),
        ("filtered_tokens", 40),
        ("duplicate_documents", 1),
        ("duplicate_tokens", 40),
    ] {
        assert_eq!(drawn[name], count, "{name} in {drawn}");
    }
    // Seven of a sample each, and two of the longest; read from the second document on.
    assert_eq!(
        (&drawn["packed"]["samples"], &drawn["packed"]["read_tokens"]),
        (&9.into(), &420.into())
    );
    near(figure(drawn, "packed.padding"), 1.0 - 380.0 / (9.0 * 64.0));
    for placed in shown["placements"].as_array().expect("placements") {
        // Three rows of two bytes for each token of a sample.
        near(figure(placed, "delivered_bytes"), 9.0 * 64.0 * 6.0 / 420.0);
        let rows = placed["rows"].as_array().expect("rows");
        for stage in ["pack(single, pad=0)", "positions"] {
            let row = rows.iter().find(|row| row["stage"] == stage).expect("a stage");
            assert!(row["cpu_s"].as_f64() > Some(0.0), "{row}");
        }
    }
    assert_eq!(shown["notes"], serde_json::json!(["memory is without the tables of documents"]));
    let text = folder.run(&["plan", "explain", plan, "web.bin"]).good().stdout;
    for part in [
        "filter drops 1 documents, 40 tokens",
        "dedup drops 1 documents, 40 tokens",
        "8 documents, 380 tokens in 9 samples, 34.0 % padding",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    // Files of a pattern are blended by these samples. What lies at the target is not known here.
    folder.write("code.bin", [0_u8; 2 * 640]);
    let two = [plan, "web.bin", "code.bin", "--dtype", "u16"];
    let shown = explained(&folder, &two);
    let notes = shown["notes"].to_string();
    assert!(
        notes.contains("count as full") && notes.contains("documents are not known: code"),
        "{notes}"
    );
    let shown =
        explained(&folder, &["window(64) | narrow(u16)", "web.bin", "code.bin", "--dtype", "u16"]);
    let plan = shown["plan"].as_str().expect("text");
    assert!(plan.contains("blend(web.bin=7, code.bin=10)"), "{plan}");
}

/// What a stream would refuse is refused here, too, and what a part leaves is counted.
#[test]
fn ids_are_checked_and_parts_counted() {
    let folder = Folder::new("plan-ids");
    folder.write("text.txt", "one two three\n".repeat(4_000));
    let tokenize = ["tokenize", "text.txt", "--encoding", "cl100k_base", "-o", "big.bin"];
    folder.run(&tokenize).good();
    let ran = folder.run(&["plan", "explain", "window(64) | narrow(u16)", "big.bin"]);
    ran.failed(2, "big.bin holds ids up to 100257, which narrow(u16) refuses", "overflow=");
    // Labels taken for tokens.
    folder.write("labels.bin", [7_i64, -100, 9].map(i64::to_le_bytes).concat().repeat(100));
    folder.run(&["inspect", "labels.bin", "--dtype", "i64", "--write-manifest"]).good();
    let ran = folder.run(&["plan", "explain", "window(64) | narrow(u16)", "labels.bin"]);
    ran.failed(
        2,
        "labels.bin holds ids from -100 on, which narrow(u16) refuses",
        "ids below 0 are no tokens",
    );
    let lines: String = (0..400).map(|line| format!("{{\"text\": \"line {line}\"}}\n")).collect();
    folder.write("lines.jsonl", lines);
    let tokenize = ["tokenize", "lines.jsonl", "--encoding", "r50k_base", "-o", "lines.bin"];
    folder.run(&tokenize).good();
    let of = |part: &str| {
        let plan = format!("window(64) | pack(best) | split(\"3,1\", part={part}, seed=1)");
        let shown = explained(&folder, &[&plan, "lines.bin"]);
        let drawn = &shown["datasets"][0]["drawn"];
        (figure(drawn, "documents") as u64, figure(drawn, "tokens") as u64)
    };
    let whole = explained(&folder, &["window(64) | pack(best)", "lines.bin"]);
    let all = figure(&whole["datasets"][0]["drawn"], "tokens") as u64;
    let (train, valid) = (of("train"), of("valid"));
    assert_eq!((train.0, valid.0, train.1 + valid.1), (300, 100, all));
}

#[test]
fn mistakes_are_refused_with_a_hint() {
    let folder = Folder::new("plan-mistakes");
    folder.write("short.bin", [1, 0, 0, 0]);
    let refused = |args: &[&str], part: &str, hint: &str| {
        let ran: Ran = folder.run(&[&["plan", "explain"], args].concat());
        ran.failed(2, part, hint);
    };
    refused(&["window(8)"], "neither files nor a token type", "--dtype u32");
    refused(&["windw(8)", "--dtype", "u32"], "invalid plan", "did you mean `window`?");
    refused(&["window(8)", "--dtype", "i8"], "types are u16", "");
    let wasm = format!("window(8) | wasm(m, sha256={})", "00".repeat(32));
    refused(&[&wasm, "--dtype", "f32"], "wasm", "types of the datasets");
    refused(&["window(8) | quantize(int8)", "--dtype", "u16"], "quantize", "types");
    refused(&["window(8)", "absent.bin"], "absent.bin: no such file", "");
    refused(&["window(8)", "short.bin", "--dtype", "u32"], "short.bin", "smaller window");
    refused(&["window(8) | narrow(u32)", "--dtype", "u16"], "narrow(u32) cannot deliver", "types");
    let blend = "window(8) | blend(a=1, b=1)";
    refused(
        &[blend, "--dtype", "u16", "--dtype", "u16", "--dtype", "u16"],
        "3 token types for 2",
        "once",
    );
    refused(&[blend, "short.bin"], "1 files for a blend of 2", "their folder");
}
