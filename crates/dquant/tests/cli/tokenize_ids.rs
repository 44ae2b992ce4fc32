//! `dquant tokenize`: the ids are those of tiktoken and of Hugging Face's tokenizers.
//!
//! `tests/golden/ids.py` says how the checked-in ids and the two small tokenizers were made. With
//! `DQUANT_PEERS_PYTHON`, a Python that has both libraries, they are also asked directly, about
//! random text.

use std::process::Command;

use serde_json::Value;

use super::tokenize_inputs::{Random, documents};
use super::{Folder, skip};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");

/// The vocabularies of `ids.json`, as arguments.
fn vocabularies() -> Vec<(String, [String; 2])> {
    let mut all = Vec::new();
    for name in ["r50k_base", "p50k_base", "cl100k_base", "o200k_base"] {
        all.push((name.to_owned(), [String::from("--encoding"), name.to_owned()]));
    }
    if cfg!(feature = "hugging-face") {
        for name in ["bpe.json", "unigram.json"] {
            let path = format!("{GOLDEN}/{name}");
            all.push((name.to_owned(), [String::from("--tokenizer"), path]));
        }
    }
    all
}

#[test]
fn the_ids_are_those_of_the_libraries() {
    let folder = Folder::new("tokenize-golden");
    let golden = std::fs::read(format!("{GOLDEN}/ids.json")).expect("checked in");
    let golden: Value = serde_json::from_slice(&golden).expect("JSON");
    let texts = golden["texts"].as_array().expect("a list");
    let lines: Vec<String> =
        texts.iter().map(|text| serde_json::json!({ "text": text }).to_string() + "\n").collect();
    folder.write("golden.jsonl", lines.concat());
    for (name, [flag, value]) in vocabularies() {
        let args = ["tokenize", "golden.jsonl", &flag, &value, "--eos", "none", "-o", "a.bin"];
        folder.run(&[&args[..], &["--force"]].concat()).good();
        let expected: Vec<Vec<u32>> =
            serde_json::from_value(golden["ids"][&name].clone()).expect("ids");
        let found = documents(&folder, "a.bin");
        for (text, (found, expected)) in texts.iter().zip(found.iter().zip(&expected)) {
            assert_eq!(found, expected, "{name}: {text}");
        }
        assert_eq!(found.len(), expected.len(), "{name}");
    }
}

/// Runs `ids.py`; false when there is no Python with both libraries.
fn ask(test: &str, args: &[&str]) -> bool {
    let Some(python) = std::env::var_os("DQUANT_PEERS_PYTHON") else {
        skip::note(test, "DQUANT_PEERS_PYTHON names no Python with tiktoken and tokenizers");
        return false;
    };
    let asked = Command::new(python).arg(format!("{GOLDEN}/ids.py")).args(args).output();
    let asked = asked.expect("DQUANT_PEERS_PYTHON starts");
    assert!(asked.status.success(), "{}", String::from_utf8_lossy(&asked.stderr));
    true
}

#[test]
fn the_libraries_agree_on_random_text() {
    const TEST: &str = "the_libraries_agree_on_random_text";
    if !ask(TEST, &["check"]) {
        return;
    }
    let folder = Folder::new("tokenize-peers");
    let mut random = Random::new(1);
    let lines: Vec<String> = (0..3_000)
        .map(|_| serde_json::json!({ "text": random.text(120) }).to_string() + "\n")
        .collect();
    folder.write("random.jsonl", lines.concat());
    let source = folder.0.join("random.jsonl");
    let output = folder.0.join("a.bin");
    for (name, [flag, value]) in vocabularies() {
        let args = ["tokenize", "random.jsonl", &flag, &value, "--eos", "0", "-o", "a.bin"];
        folder.run(&[&args[..], &["--force"]].concat()).good();
        let paths = [source.to_str().expect("UTF-8"), output.to_str().expect("UTF-8")];
        ask(TEST, &["compare", &name, paths[0], paths[1]]);
    }
}

#[cfg(feature = "hugging-face")]
mod hugging_face {
    use tokenize::VocabularyName;
    use tokenize::vocabulary::Vocabulary;

    use super::*;
    use crate::seeds::{Replay, seeds};

    #[test]
    fn the_end_of_a_document_is_named_by_the_user_or_by_the_configuration() {
        let folder = Folder::new("tokenize-eos");
        folder.write("a.txt", "hello");
        std::fs::copy(format!("{GOLDEN}/unigram.json"), folder.0.join("tokenizer.json"))
            .expect("checked in");
        let base = ["tokenize", "a.txt", "--tokenizer", "tokenizer.json", "-o", "a.bin"];
        folder.run(&base).failed(2, "does not say which token ends a document", "--eos '</s>'");
        let last = |more: &[&str]| {
            folder.run(&[&base[..], &["--force"], more].concat()).good();
            *documents(&folder, "a.bin")[0].last().expect("a token")
        };
        assert_eq!(last(&["--eos", "</s>"]), 1);
        assert_eq!(last(&["--eos", "0"]), 0);
        assert!(last(&["--eos", "none"]) > 1);
        folder.write("tokenizer_config.json", r#"{"eos_token":{"content":"</s>"}}"#);
        assert_eq!(last(&[]), 1);
        for (eos, why) in [("<eos>", "no token `<eos>`"), ("500", "no token with id 500")] {
            let args = [&base[..], &["--force", "--eos", eos]].concat();
            folder.run(&args).failed(2, why, "--eos none");
        }
    }

    #[test]
    fn a_broken_tokenizer_is_named() {
        let folder = Folder::new("tokenize-broken-tokenizer");
        folder.write("a.txt", "hello");
        for (content, why) in [
            (&b""[..], "EOF"),
            (b"{}", "missing"),
            (b"not json", "expected"),
            (br#"{"model":{"type":"WordLevel","vocab":{},"unk_token":"x"}}"#, "empty"),
        ] {
            folder.write("t.json", content);
            let args = ["tokenize", "a.txt", "--tokenizer", "t.json", "-o", "a.bin"];
            let ran = folder.run(&args);
            ran.failed(2, "t.json is no usable tokenizer: ", "tokenizer.json");
            assert!(ran.stderr.contains(why), "{ran:?}");
        }
        let args = ["tokenize", "a.txt", "--tokenizer", "none.json", "-o", "a.bin"];
        folder.run(&args).failed(2, "cannot open none.json", "exist");
        assert_eq!(std::fs::read_dir(&folder.0).expect("readable").count(), 2);
    }

    /// A damaged file is refused, or is another tokenizer: nothing panics.
    #[test]
    fn a_damaged_tokenizer_is_refused_or_works() {
        let folder = Folder::new("tokenize-damaged-tokenizer");
        let (mut refused, mut loaded) = (0, 0);
        for seed in seeds(0..60) {
            let _replay = Replay { test: "a_damaged_tokenizer_is_refused_or_works", seed };
            let mut random = Random::new(seed);
            let name = ["bpe.json", "unigram.json"][random.below(2)];
            let mut file = std::fs::read(format!("{GOLDEN}/{name}")).expect("checked in");
            match random.below(3) {
                0 => file.truncate(random.below(file.len())),
                1 => {
                    let at = random.below(file.len());
                    file[at] = random.below(256) as u8;
                }
                _ => {
                    // A digit keeps the syntax and changes ids, scores and settings.
                    let digits: Vec<usize> =
                        (0..file.len()).filter(|at| file[*at].is_ascii_digit()).collect();
                    file[digits[random.below(digits.len())]] = b'0' + random.below(10) as u8;
                }
            }
            let path = folder.0.join("t.json");
            std::fs::write(&path, file).expect("writable");
            match Vocabulary::load(&VocabularyName::File(path)) {
                Err(error) => {
                    assert!(error.to_string().contains("t.json"), "{error}");
                    refused += 1;
                }
                Ok(vocabulary) => {
                    // The library may have a reason to refuse the text.
                    let _ = vocabulary.encode(&random.text(200), &mut Vec::new());
                    loaded += 1;
                }
            }
        }
        assert!(refused > 0 && loaded > 0 || std::env::var_os("DQUANT_SEED").is_some());
    }
}

#[cfg(not(feature = "hugging-face"))]
#[test]
fn a_build_without_the_library_says_so() {
    let folder = Folder::new("tokenize-no-hugging-face");
    folder.write("a.txt", "hello");
    let args = ["tokenize", "a.txt", "--tokenizer", "t.json", "-o", "a.bin"];
    folder.run(&args).failed(2, "t.json needs the feature `hugging-face`", "--features full");
}
