//! `dquant tokenize --chat`: conversations, rendered by templates and divided into turns.
//!
//! `tests/golden/chat.py` asks transformers, by the Python that `DQUANT_PEERS_PYTHON` names.

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::seeds::{Replay, seeds};
use super::tokenize::words;
use super::tokenize_inputs::Random;
use super::{Folder, Ran, skip};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");

/// Tokens that templates write, behind those of `bpe.json`.
const SPECIAL: &[&str] = &[
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
];

/// A folder with the tokenizer of a model, and its template if it has one in
/// `tests/golden/templates`.
fn model(test: &str, template: &str) -> Folder {
    let folder = Folder::new(&format!("tokenize-chat-{test}"));
    let tokenizer = fs::read(format!("{GOLDEN}/bpe.json")).expect("checked in");
    let mut tokenizer: Value = serde_json::from_slice(&tokenizer).expect("JSON");
    let added = tokenizer["added_tokens"].as_array_mut().expect("a list");
    for (id, content) in (700..).zip(SPECIAL) {
        added.push(json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        }));
    }
    folder.write("m/tokenizer.json", tokenizer.to_string());
    let config = json!({ "bos_token": "<s>", "eos_token": { "content": "</s>" } });
    folder.write("m/tokenizer_config.json", config.to_string());
    if !template.is_empty() {
        let source = fs::read(format!("{GOLDEN}/templates/{template}.jinja")).expect("checked in");
        folder.write("m/chat_template.jinja", source);
    }
    folder
}

fn run(folder: &Folder, input: &str, more: &[&str]) -> Ran {
    let args = ["tokenize", input, "--tokenizer", "m/tokenizer.json", "-o", "a.bin", "--json"];
    let names_template = more.iter().any(|arg| arg.starts_with("--chat="));
    let chat: &[&str] = if names_template { &[] } else { &["--chat"] };
    folder.run(&[&args, chat, more].concat())
}

/// The sequences of each document of a pair.
fn documents(folder: &Folder, name: &str) -> Vec<Vec<Vec<u32>>> {
    let index = folder.read(&name.replace(".bin", ".idx"));
    let number = |at: usize| u64::from_le_bytes(index[at..][..8].try_into().expect("8 bytes"));
    let (sequences, ends) = (number(18) as usize, number(26) as usize);
    let (lengths, _) = index[34..][..4 * sequences].as_chunks::<4>();
    let mut ids = words(&folder.read(name)).into_iter();
    let mut lengths = lengths.iter().map(|length| u32::from_le_bytes(*length) as usize);
    let mut documents = Vec::new();
    for document in 1..ends {
        let at = |which: usize| number(34 + 12 * sequences + 8 * which) as usize;
        let count = at(document) - at(document - 1);
        let sequence = |length| ids.by_ref().take(length).collect();
        documents.push(lengths.by_ref().take(count).map(sequence).collect());
    }
    assert_eq!((ids.next(), lengths.next()), (None, None));
    documents
}

/// The text of ids, where it is ASCII.
fn texts(folder: &Folder, name: &str) -> Vec<Vec<String>> {
    let tokenizer: Value = serde_json::from_slice(&folder.read("m/tokenizer.json")).expect("JSON");
    let mut pieces = vec![String::new(); 800];
    for (piece, id) in tokenizer["model"]["vocab"].as_object().expect("an object") {
        pieces[id.as_u64().expect("an id") as usize] = piece.replace('Ġ', " ").replace('Ċ', "\n");
    }
    for token in tokenizer["added_tokens"].as_array().expect("a list") {
        let id = token["id"].as_u64().expect("an id") as usize;
        pieces[id] = token["content"].as_str().expect("text").to_owned();
    }
    let text = |ids: &Vec<u32>| ids.iter().map(|id| pieces[*id as usize].as_str()).collect();
    let document = |sequences: &Vec<Vec<u32>>| sequences.iter().map(text).collect();
    documents(folder, name).iter().map(document).collect()
}

/// A line of messages of alternating user and assistant.
fn chat(texts: &[&str]) -> String {
    let role = |at: usize| if at.is_multiple_of(2) { "user" } else { "assistant" };
    let messages = texts.iter().enumerate();
    let messages: Vec<Value> =
        messages.map(|(at, text)| json!({ "role": role(at), "content": text })).collect();
    json!({ "messages": messages }).to_string() + "\n"
}

#[test]
fn the_assistant_is_found_with_and_without_generation_blocks() {
    let line = chat(&["hi", "hello", "more?", ""]);
    for (template, expected) in [
        (
            "chatml",
            &[
                "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
                "hello<|im_end|>\n",
                "<|im_start|>user\nmore?<|im_end|>\n<|im_start|>assistant\n",
                "<|im_end|>\n",
            ][..],
        ),
        (
            "chatml-generation",
            &[
                "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
                "hello<|im_end|>",
                "\n<|im_start|>user\nmore?<|im_end|>\n<|im_start|>assistant\n",
                "<|im_end|>",
                "\n",
            ],
        ),
        (
            "llama3-generation",
            &[
                "<s><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>\
                 <|start_header_id|>assistant<|end_header_id|>\n\n",
                "hello<|eot_id|>",
                "<|start_header_id|>user<|end_header_id|>\n\nmore?<|eot_id|>\
                 <|start_header_id|>assistant<|end_header_id|>\n\n",
                "<|eot_id|>",
            ],
        ),
        ("mistral", &["<s>[INST] hi[/INST]", " hello</s>", "[INST] more?[/INST]", " </s>"]),
    ] {
        let folder = model(template, template);
        folder.write("chat.jsonl", &line);
        let summary = run(&folder, "chat.jsonl", &[]).good().json();
        assert_eq!(texts(&folder, "a.bin"), [expected], "{template}");
        let said: usize =
            documents(&folder, "a.bin")[0].iter().skip(1).step_by(2).map(Vec::len).sum();
        assert_eq!(
            (summary["targets"].as_u64(), &summary["eos"]),
            (Some(said as u64), &Value::Null)
        );
        let manifest: Value =
            serde_json::from_slice(&folder.read("a.bin.dquant.json")).expect("JSON");
        assert_eq!((&manifest["targets"], &manifest["eos"]), (&json!(true), &Value::Null));
        assert_eq!(manifest["documents"], 1);
        folder.run(&["inspect", "a.bin", "--verify"]).good();
    }
}

#[test]
fn a_document_begins_with_what_is_not_said_and_ends_as_its_template_says() {
    let folder = model("begins", "");
    let template = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}\
                    {% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}";
    folder.write("m/chat_template.jinja", template);
    let message = |role: &str, content: &str| json!({ "role": role, "content": content });
    let both = json!({ "messages": [message("assistant", "said</s>"), message("user", "x")] });
    let user = json!({ "messages": [{ "role": "user", "content": "alone" }] });
    folder.write("c.jsonl", format!("{both}{user}\n{}", chat(&["a\n\n", "b"])));
    run(&folder, "c.jsonl", &[]).good();
    assert_eq!(
        texts(&folder, "a.bin"),
        [vec!["", "said</s>", "x"], vec!["alone"], vec!["a\n\n", "b"]]
    );
    assert!(documents(&folder, "a.bin")[0][1].contains(&701), "special tokens are parsed");
    // A token that is asked for belongs to the last turn.
    run(&folder, "c.jsonl", &["--force", "--eos", "</s>"]).good();
    assert_eq!(
        texts(&folder, "a.bin"),
        [vec!["", "said</s>", "x</s>"], vec!["alone</s>"], vec!["a\n\n", "b</s>"]]
    );
    let manifest = String::from_utf8(folder.read("a.bin.dquant.json")).expect("UTF-8");
    assert!(!manifest.contains("\"eos\""), "the id occurs elsewhere, too: {manifest}");
}

/// What a file says is not to be learnt is no target, or its record is left out; nor does a record
/// rename the model's tokens.
#[test]
fn messages_without_weight_are_no_targets() {
    let folder = model("weights", "chatml");
    let message = |role: &str, content: &str| json!({ "role": role, "content": content });
    let mut first = message("assistant", "hello");
    first["weight"] = json!(0);
    let rest = [message("user", "more?"), message("assistant", "no")];
    let line =
        json!({ "messages": [message("user", "hi"), first, rest[0], rest[1]], "eos_token": "x" });
    folder.write("c.jsonl", format!("{line}\n"));
    run(&folder, "c.jsonl", &[]).good();
    let turns = &texts(&folder, "a.bin")[0];
    assert_eq!(turns.len(), 2, "{turns:?}");
    assert!(turns[0].contains("hello") && turns[1].starts_with("no"), "{turns:?}");
    let folder = model("weights-generation", "chatml-generation");
    folder.write("c.jsonl", format!("{line}\n"));
    let ran = run(&folder, "c.jsonl", &["--strict"]);
    ran.failed(1, "message 1 is not to be learnt", "");
}

/// Mistakes of the first try: the template as an input, and conversations without `--chat`.
#[test]
fn what_was_meant_for_chat_names_the_option() {
    let folder = model("meant", "chatml");
    folder.write("c.jsonl", chat(&["hi", "no"]));
    let ran = run(&folder, "m/chat_template.jinja", &["c.jsonl"]);
    ran.failed(2, "chat_template.jinja is a chat template", "--chat=FILE");
    let args =
        ["tokenize", "c.jsonl", "--tokenizer", "m/tokenizer.json", "--eos", "none", "-o", "x.bin"];
    folder.run(&args).failed(1, "; the first is c.jsonl:1", "--chat reads conversations");
}

/// A weight in between would be trained in full.
#[test]
fn weights_that_are_not_understood_are_refused() {
    let folder = model("halves", "chatml");
    for (name, value, reason) in [
        ("weight", json!(0.5), "message 1 has a weight of 0.5, neither 0 nor 1: --loss-weights"),
        ("weight", json!(-1), "a weight of `-1`"),
        ("weight", json!("0"), "a weight of `\"0\"`"),
        ("weight", json!(false), "a weight of `false`"),
        ("train", json!(0), "a `train` that is a number, not a boolean"),
    ] {
        let mut said = json!({ "role": "assistant", "content": "no" });
        said[name] = value;
        let line = json!({ "messages": [{ "role": "user", "content": "hi" }, said] });
        folder.write("c.jsonl", format!("{line}\n"));
        run(&folder, "c.jsonl", &["--strict"]).failed(1, reason, "");
        run(&folder, "c.jsonl", &[]).failed(1, "no file holds conversations", "--field names");
    }
    for value in [json!(0), json!(1), json!(0.0), json!(1.0), json!(null)] {
        let line =
            json!({ "messages": [{ "role": "assistant", "content": "no", "weight": value }] });
        folder.write("c.jsonl", format!("{line}\n{}", chat(&["hi", "no"])));
        run(&folder, "c.jsonl", &["--strict", "--force"]).good();
    }
}

/// The loss weights beside an output, which has to have a manifest of them.
fn weights(folder: &Folder, name: &str) -> Vec<f32> {
    let beside = name.replace(".bin", ".loss_weights.npy");
    let manifest: Value =
        serde_json::from_slice(&folder.read(&format!("{beside}.dquant.json"))).expect("JSON");
    let bytes = folder.read(&beside);
    let head = 10 + u16::from_le_bytes([bytes[8], bytes[9]]) as usize;
    let text = String::from_utf8_lossy(&bytes[..head]).into_owned();
    let values = bytes[head..].as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    let values: Vec<f32> = values.collect();
    assert!(text.contains("<f4") && text.contains(&format!("({},)", values.len())), "{text}");
    assert_eq!((&manifest["dtype"], &manifest["tokens"]), (&json!("f32"), &json!(values.len())));
    values
}

/// A line whose messages of the assistant have these weights.
fn weighed(texts: &[(&str, &str, Value)]) -> String {
    let turn = |(user, said, weight): &(&str, &str, Value)| {
        let mut said = json!({ "role": "assistant", "content": said });
        if !weight.is_null() {
            said["weight"] = weight.clone();
        }
        [json!({ "role": "user", "content": user }), said]
    };
    json!({ "messages": texts.iter().flat_map(turn).collect::<Vec<Value>>() }).to_string() + "\n"
}

/// The weights of the sequences of each document, of which each has one.
fn weights_of_turns(folder: &Folder, name: &str) -> Vec<Vec<f32>> {
    let mut all = weights(folder, name).into_iter();
    let mut turn = |ids: &Vec<u32>| {
        let weights: Vec<f32> = all.by_ref().take(ids.len()).collect();
        assert!(weights.windows(2).all(|pair| pair[0] == pair[1]), "one for a turn: {weights:?}");
        weights.first().copied().unwrap_or(-1.0)
    };
    let documents = documents(folder, name);
    let found = documents.iter().map(|document| document.iter().map(&mut turn).collect()).collect();
    assert_eq!(all.next(), None);
    found
}

/// What messages say of their weight lies beside the ids: in both parts of a split, behind what is
/// extended.
#[test]
fn messages_weigh_what_they_say() {
    let folder = model("weighed", "chatml");
    let lines = [
        weighed(&[("hi", "hello", json!(0.5)), ("more?", "no", json!(null))]),
        weighed(&[("hi", "hello", json!(0)), ("more?", "no", json!(2.25))]),
        chat(&["hi", "no"]),
    ];
    folder.write("c.jsonl", lines.concat());
    run(&folder, "c.jsonl", &["--loss-weights", "--eos", "</s>", "--strict"]).good();
    // What is not to be learnt is no turn of its own.
    let expected = vec![vec![0.0, 0.5, 0.0, 1.0], vec![0.0, 2.25], vec![0.0, 1.0]];
    assert_eq!(weights_of_turns(&folder, "a.bin"), expected);
    folder.run(&["inspect", "a.bin", "--verify"]).good();
    let more = ["--append", "--loss-weights", "--eos", "</s>"];
    run(&folder, "c.jsonl", &more).good();
    assert_eq!(weights_of_turns(&folder, "a.bin"), [&expected[..], &expected[..]].concat());
    run(&folder, "c.jsonl", &["--append"]).failed(2, "it has loss weights: add --loss-weights", "");
    // Without the option there are none, and those that were there are not left to other tokens.
    folder.write("plain.jsonl", chat(&["hi", "no"]));
    run(&folder, "plain.jsonl", &["--force"]).good();
    assert!(!folder.0.join("a.loss_weights.npy").exists());
    assert!(!folder.0.join("a.loss_weights.npy.dquant.json").exists());
    let refused = run(&folder, "c.jsonl", &["--append", "--loss-weights"]);
    refused.failed(2, "it has no loss weights: leave --loss-weights out", "");
    let many: String = (0..60)
        .map(|at| weighed(&[(&format!("question {at}"), "no", json!(f64::from(at) / 4.0))]))
        .collect();
    folder.write("many.jsonl", many);
    run(&folder, "many.jsonl", &["--force", "--loss-weights", "--holdout", "30%"]).good();
    let mut seen = Vec::new();
    for name in ["a.bin", "a-valid.bin"] {
        for (text, weights) in texts(&folder, name).iter().zip(weights_of_turns(&folder, name)) {
            let number = text[0].split("question ").nth(1).and_then(|rest| rest.split('<').next());
            let number: f32 =
                number.and_then(|digits| digits.trim().parse().ok()).expect("a number");
            let all_in_one = number == 0.0 && weights == [0.0];
            assert!(all_in_one || weights == [0.0, number / 4.0], "{text:?} {weights:?}");
            seen.push(number as u32);
        }
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..60).collect::<Vec<u32>>());
    let args =
        ["tokenize", "c.jsonl", "--tokenizer", "m/tokenizer.json", "-o", "b.bin", "--loss-weights"];
    let ran = folder.run(&args);
    assert!(ran.exit == Some(2) && ran.stderr.contains("--chat"), "{}", ran.stderr);
    // A grade that failed, and weights of a file that is not there.
    for weight in ["NaN", "Infinity", "null", "-1", "3.5e38", "\"2\""] {
        let line = weighed(&[("hi", "no", json!(1))])
            .replace("\"weight\":1", &format!("\"weight\":{weight}"));
        folder.write("bad.jsonl", line);
        let ran = run(
            &folder,
            "bad.jsonl",
            &["--loss-weights", "--strict", "--force", "--holdout", "30%"],
        );
        ran.failed(1, "which is no number from 0 on", "");
    }
    folder.write("d.loss_weights.npy", "mine");
    let args = ["tokenize", "c.jsonl", "--tokenizer", "m/tokenizer.json", "-o", "d.bin", "--chat"];
    folder.run(&args).failed(2, "d.loss_weights.npy", "--force replaces it");
    assert_eq!(folder.read("d.loss_weights.npy"), b"mine");
    let generation = model("weighed-generation", "chatml-generation");
    generation.write("c.jsonl", &lines[0]);
    let ran = run(&generation, "c.jsonl", &["--loss-weights", "--strict"]);
    ran.failed(1, "message 1 weighs more or less than others", "");
}

/// Killed at any instant and resumed, a run leaves the weights of a run that was not.
#[test]
fn weights_survive_kills() {
    let folder = model("weighed-killed", "chatml");
    let mut random = Random::new(3);
    let line = |at: usize| {
        let (asked, said) = (random.text(60), random.text(90));
        weighed(&[(&asked, &said, json!(at as f64 / 8.0)), ("more?", "no", json!(null))])
    };
    folder.write("c.jsonl", (0..3_000).map(line).collect::<String>());
    let started = Instant::now();
    run(&folder, "c.jsonl", &["--loss-weights"]).good();
    let whole = started.elapsed();
    let names = ["a.bin", "a.idx", "a.loss_weights.npy", "a.loss_weights.npy.dquant.json"];
    let want = names.map(|name| folder.read(name));
    assert_eq!(weights_of_turns(&folder, "a.bin").len(), 3_000);
    let more =
        ["--loss-weights", "--resume", "--force", "--checkpoint", "64KiB", "--chunk", "64KiB"];
    let mut resumed = 0;
    let is_replay = std::env::var_os("DQUANT_SEED").is_some();
    for seed in seeds(0..4).chain(4..60) {
        if seed >= 4 && (resumed > 0 || is_replay) {
            break;
        }
        let _replay = Replay { test: "weights_survive_kills", seed };
        let mut random = Random::new(seed);
        names.iter().for_each(|name| drop(fs::remove_file(folder.0.join(name))));
        for _ in 0..=random.below(3) {
            let args = ["tokenize", "c.jsonl", "--tokenizer", "m/tokenizer.json", "-o", "a.bin"];
            let mut command = folder.command(&[&args[..], &["--chat"], &more].concat());
            let mut child =
                command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("ours");
            let micros = whole.as_micros() as usize;
            std::thread::sleep(Duration::from_micros(random.below(micros) as u64));
            child.kill().expect("our child");
            child.wait().expect("our child");
        }
        let ran = run(&folder, "c.jsonl", &more).good();
        resumed += usize::from(ran.stderr.contains("resumed after"));
        for (name, want) in names.iter().zip(&want) {
            assert!(folder.read(name) == *want, "seed {seed}: another {name}");
        }
        assert!(!folder.0.join(".a.bin.weights").exists());
    }
    assert!(resumed > 0 || is_replay, "no kill hit a run");
}

/// Roles that nobody trains, and files that are mostly left out, are told.
#[test]
fn what_leaves_nothing_to_learn_is_told() {
    let folder = model("untold", "chatml");
    let line = json!({ "messages": [{ "role": "user", "content": "hi" }, { "role": "Assistant", "content": "ho" }] });
    folder.write("c.jsonl", format!("{line}\n"));
    let ran = run(&folder, "c.jsonl", &[]).good();
    assert!(ran.stderr.contains("none of the tokens is a target"), "{}", ran.stderr);
    assert!(!ran.stderr.contains("are skipped"), "{}", ran.stderr);
    folder.write("c.jsonl", format!("{line}\n{line}\n{}", chat(&["hi", "no"])));
    let ran = run(&folder, "c.jsonl", &["--force"]).good();
    assert!(ran.stderr.contains("2 documents have no targets"), "{}", ran.stderr);
    assert_eq!(ran.json()["documents_without_targets"], 2);
    folder.write("c.jsonl", format!("{}{{}}\n[]\n", chat(&["hi", "no"])));
    let ran = run(&folder, "c.jsonl", &["--force"]).good();
    assert!(ran.stderr.contains("2 documents are skipped, and 1 written"), "{}", ran.stderr);
    assert!(!ran.stderr.contains("none of the tokens"), "{}", ran.stderr);
}

/// A record of more turns than a reader takes would make the whole file unreadable.
#[test]
fn records_of_too_many_turns_are_left_out() {
    let folder = model("turns", "llama3-generation");
    let long: Vec<&str> = ["hi", "no"].into_iter().cycle().take(20_000).collect();
    folder.write("c.jsonl", format!("{}{}", chat(&long), chat(&["hi", "no"])));
    let ran = run(&folder, "c.jsonl", &[]).good();
    assert!(ran.stderr.contains("turns more than 16384 times"), "{}", ran.stderr);
    assert_eq!(documents(&folder, "a.bin").len(), 1);
}

#[test]
fn both_shapes_and_compressed_lines_and_any_field_give_the_same() {
    let folder = model("shapes", "chatml");
    folder.write("openai.jsonl", chat(&["hi", "hello"]));
    run(&folder, "openai.jsonl", &[]).good();
    let expected = documents(&folder, "a.bin");
    let message = |from: &str, value: &str| json!({ "from": from, "value": value });
    let sharegpt = json!({ "conversations": [message("human", "hi"), message("gpt", "hello")] });
    folder.write("sharegpt.jsonl", sharegpt.to_string());
    folder.write("field.jsonl", chat(&["hi", "hello"]).replace("messages", "dialogue"));
    #[cfg_attr(not(feature = "compressed"), expect(unused_mut))]
    let mut cases = vec![("sharegpt.jsonl", None), ("field.jsonl", Some("dialogue"))];
    #[cfg(feature = "compressed")]
    {
        let packed = super::tokenize_inputs::gzip(chat(&["hi", "hello"]).as_bytes());
        folder.write("openai.jsonl.gz", packed);
        cases.push(("openai.jsonl.gz", None));
    }
    for (input, field) in cases {
        let more: Vec<&str> = field.map(|field| ["--field", field]).into_iter().flatten().collect();
        run(&folder, input, &[&["--force"], &more[..]].concat()).good();
        assert_eq!(documents(&folder, "a.bin"), expected, "{input}");
    }
}

#[test]
fn what_is_no_conversation_is_left_out_with_its_line_and_the_reason() {
    let folder = model("broken", "mistral");
    let odd = chat(&["a", "b"]).replace("assistant", "user");
    let lines = [
        chat(&["hi", "hello"]),
        String::from("{broken\n"),
        String::from("{\"text\":\"a\"}\n"),
        String::from("{\"messages\":[{\"role\":7,\"content\":\"a\"}]}\n"),
        String::from("{\"messages\":[{\"role\":\"user\",\"content\":{}}]}\n"),
        odd,
        chat(&["more", "yes"]),
    ];
    folder.write("c.jsonl", lines.concat());
    let ran = run(&folder, "c.jsonl", &[]).good();
    let summary = ran.json();
    assert_eq!((&summary["documents"], &summary["skipped_broken"]), (&json!(2), &json!(5)));
    for (line, why) in [
        (2, "key must be a string"),
        (3, "no field `messages` or `conversations`"),
        (4, "message 0 of `messages` has a role that is a number, not a string"),
        (5, "message 0 of `messages` has a content that is an object, not a string"),
        (6, "conversation roles must alternate"),
    ] {
        let named = |text: &str| text.contains(&format!("c.jsonl:{line}: ")) && text.contains(why);
        assert!(ran.stderr.lines().any(named), "{line}: {why}: {}", ran.stderr);
    }
    run(&folder, "c.jsonl", &["--force", "--strict"]).failed(1, "c.jsonl:2: ", "--strict");
    folder.write("none.jsonl", "{}\n");
    run(&folder, "none.jsonl", &["--force"]).failed(1, "1 are broken", "--field");
}

#[test]
fn an_assistant_that_cannot_be_found_is_refused() {
    let folder = model("prefix", "");
    // Earlier turns are written without their last word, as thoughts are dropped.
    let drops = "{% for m in messages %}{{ m.role }}:{{ m.content if loop.last else m.content[:1] }};{% endfor %}\
                 {% if add_generation_prompt %}assistant:{% endif %}";
    folder.write("m/chat_template.jinja", drops);
    folder.write("c.jsonl", chat(&["hi", "hello", "more", "yes"]));
    let ran = run(&folder, "c.jsonl", &["--strict"]);
    ran.failed(1, "message 1, so that it is not known", "");
    assert!(ran.stderr.contains("{% generation %}"), "{ran:?}");
    folder.write(
        "m/chat_template.jinja",
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ '>' if add_generation_prompt }}",
    );
    run(&folder, "c.jsonl", &["--strict"]).failed(1, "does not end its prompt", "");
}

#[test]
fn templates_come_from_the_folder_of_the_model_or_a_file() {
    let folder = model("places", "");
    folder.write("c.jsonl", chat(&["hi", "hello"]));
    run(&folder, "c.jsonl", &[]).failed(
        2,
        "no chat template beside m/tokenizer.json",
        "--chat=FILE",
    );
    let config = |template: Value| {
        let config = json!({ "bos_token": "<s>", "chat_template": template }).to_string();
        folder.write("m/tokenizer_config.json", config);
    };
    let first = |more: &[&str]| {
        run(&folder, "c.jsonl", &[&["--force"], more].concat()).good();
        texts(&folder, "a.bin")[0].concat()
    };
    let all = "{% for m in messages %}{{ m.content }}{% endfor %}";
    config(json!(format!("config {all}")));
    assert_eq!(first(&[]), "config hihello");
    let named = |name: &str, template: &str| json!({ "name": name, "template": template });
    config(json!([named("tool_use", &format!("tools {all}")), named("default", all)]));
    assert_eq!(first(&[]), "hihello");
    folder.write(
        "t.jsonl",
        chat(&["hi", "hello"]).replace("{\"messages", "{\"tools\":[{}],\"messages"),
    );
    run(&folder, "t.jsonl", &["--force"]).good();
    assert_eq!(texts(&folder, "a.bin")[0].concat(), "tools hihello");
    config(json!([named("other", all)]));
    run(&folder, "c.jsonl", &["--force"]).failed(2, "none of its chat templates is `default`", "");
    folder.write("m/chat_template.jinja", format!("beside {{{{ bos_token }}}}{all}"));
    assert_eq!(first(&[]), "beside <s>hihello");
    folder.write("mine.jinja", format!("mine {all}"));
    assert_eq!(first(&["--chat=mine.jinja"]), "mine hihello");
    run(&folder, "c.jsonl", &["--force", "--chat=none.jinja"]).failed(
        2,
        "cannot open none.jinja",
        "",
    );
}

#[test]
fn templates_that_are_broken_or_never_end_are_refused() {
    let folder = model("endless", "");
    folder.write("c.jsonl", chat(&["hi", "hello"]));
    for (template, why) in [
        ("a\n{% for m in messages %}", "(line 2)"),
        ("{{ 'x' }", "(line 1)"),
        ("{% include 'x' %}", "no usable chat template"),
    ] {
        folder.write("m/chat_template.jinja", template);
        let ran = run(&folder, "c.jsonl", &[]);
        ran.failed(2, "m/chat_template.jinja is no usable chat template: ", "--chat=FILE");
        assert!(ran.stderr.contains(why), "{ran:?}");
    }
    for (template, why) in [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "does not end",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ raise_exception('no thanks') }}", "no thanks"),
        ("{{ messages[0].a.b }}", "undefined"),
    ] {
        folder.write("m/chat_template.jinja", template);
        run(&folder, "c.jsonl", &["--strict"]).failed(1, why, "");
    }
}

#[test]
fn what_cannot_hold_turns_is_refused() {
    let folder = model("refused", "chatml");
    folder.write("c.jsonl", chat(&["hi", "hello"]));
    folder.write("in/a.jsonl", chat(&["hi", "hello"]));
    folder.write("in/README.md", "text");
    folder.write("p.parquet", "x");
    run(&folder, "c.jsonl", &["--flat"]).failed(2, "ids alone do not tell", "leave out --flat");
    let base = ["tokenize", "c.jsonl", "--chat", "-o"];
    let encoding = [&base[..], &["a.bin", "--encoding", "r50k_base"]].concat();
    folder.run(&encoding).failed(2, "no chat template", "--tokenizer");
    let array = [&base[..], &["a.npy", "--tokenizer", "m/tokenizer.json"]].concat();
    folder.run(&array).failed(2, "no name for a pair", ".bin");
    run(&folder, "in/README.md", &[]).failed(2, "in/README.md is plain text", "--format jsonl");
    run(&folder, "p.parquet", &[]).failed(2, "p.parquet is Parquet", "to_json");
    run(&folder, "c.jsonl", &["--format", "text"]).failed(2, "c.jsonl is plain text", "");
    let ran = run(&folder, "in", &[]).good();
    assert!(ran.stderr.contains("in/README.md is left out: it is plain text"), "{ran:?}");
    assert_eq!(ran.json()["documents"], 1);
}

#[test]
fn conversations_are_appended_to_conversations_only() {
    let folder = model("append", "chatml");
    folder.write("one.jsonl", chat(&["hi", "hello"]));
    folder.write("two.jsonl", chat(&["more", "yes", "a", "b"]));
    folder.write("all.jsonl", chat(&["hi", "hello"]) + &chat(&["more", "yes", "a", "b"]));
    run(&folder, "all.jsonl", &[]).good();
    let whole = [folder.read("a.bin"), folder.read("a.idx"), folder.read("a.bin.dquant.json")];
    run(&folder, "one.jsonl", &["--force"]).good();
    run(&folder, "two.jsonl", &["--append"]).good();
    let appended = [folder.read("a.bin"), folder.read("a.idx"), folder.read("a.bin.dquant.json")];
    assert!(whole == appended, "the same bytes, and the same manifest");

    folder.write("text.jsonl", "{\"text\":\"hi\"}\n");
    let plain =
        ["tokenize", "text.jsonl", "--tokenizer", "m/tokenizer.json", "--eos", "none", "-o"];
    folder.run(&[&plain[..], &["a.bin", "--append"]].concat()).failed(
        2,
        "it holds conversations, made with --chat",
        "--force",
    );
    folder.run(&[&plain[..], &["b.bin"]].concat()).good();
    let args =
        ["tokenize", "one.jsonl", "--tokenizer", "m/tokenizer.json", "--chat", "-o", "b.bin"];
    for _ in 0..2 {
        let appended = folder.run(&[&args[..], &["--append"]].concat());
        appended.failed(2, "does not say that it holds conversations", "--force");
        let _ = fs::remove_file(folder.0.join("b.bin.dquant.json"));
    }
    assert!(whole[0] == folder.read("a.bin"), "nothing was changed");
}

/// Many conversations of random shape, some of them broken.
fn many(seed: u64, count: usize) -> String {
    let mut random = Random::new(seed);
    let mut lines = String::new();
    for _ in 0..count {
        let texts: Vec<String> = (0..1 + random.below(7)).map(|_| random.text(20)).collect();
        lines += &match random.below(12) {
            0 => String::from("{\"messages\":[]}\n"),
            _ => chat(&texts.iter().map(String::as_str).collect::<Vec<_>>()),
        };
    }
    lines
}

#[test]
fn held_out_conversations_are_the_same_with_every_template() {
    let folder = model("holdout", "chatml");
    folder.write("c.jsonl", many(3, 400));
    let held_out = |template: &str| {
        let more = ["--holdout", "25%", "--force"];
        let template = format!("--chat={GOLDEN}/templates/{template}.jinja");
        run(&folder, "c.jsonl", &[&more[..], &[&template]].concat()).good();
        for name in ["a.bin", "a-valid.bin"] {
            folder.run(&["inspect", name, "--verify"]).good();
            let manifest = folder.read(&format!("{name}.dquant.json"));
            let manifest: Value = serde_json::from_slice(&manifest).expect("JSON");
            assert_eq!(manifest["targets"], true);
        }
        let [train, valid] = ["a.bin", "a-valid.bin"].map(|name| documents(&folder, name).len());
        (train, valid, texts(&folder, "a-valid.bin").len())
    };
    let (train, valid, _) = held_out("chatml");
    assert!(train > 200 && (50..150).contains(&valid), "{train} and {valid}");
    assert_eq!(held_out("chatml-generation"), held_out("chatml"));
    assert_eq!(held_out("llama3-generation").1, valid);
    // Both are extended.
    folder.write("d.jsonl", many(4, 100));
    let template = format!("--chat={GOLDEN}/templates/llama3-generation.jinja");
    run(&folder, "d.jsonl", &["--holdout", "25%", "--append", &template]).good();
    folder.write("all.jsonl", many(3, 400) + &many(4, 100));
    let args = ["--holdout", "25%", &template, "-o", "b.bin"];
    let all = ["tokenize", "all.jsonl", "--tokenizer", "m/tokenizer.json"];
    folder.run(&[&all[..], &args].concat()).good();
    for (ours, whole) in [("a", "b"), ("a-valid", "b-valid")] {
        for end in ["bin", "idx"] {
            assert!(
                folder.read(&format!("{ours}.{end}")) == folder.read(&format!("{whole}.{end}")),
                "{ours}.{end}"
            );
        }
    }
}

/// A run that is killed at any instant and resumed writes what one writes that was not; so does any
/// number of threads.
#[test]
fn a_killed_run_is_resumed() {
    const TEST: &str = "tokenize_chat::a_killed_run_is_resumed";
    let folder = model("resume", "chatml-generation");
    // The time of the first run is that of those that resume it.
    let template = folder.read("m/chat_template.jinja");
    folder.write("m/chat_template.jinja", [b"{{ strftime_now('%Y') }}", &template[..]].concat());
    folder.write("c.jsonl", many(7, 4_000));
    let more = ["--jobs", "2", "--chunk", "64KiB", "--checkpoint", "64KiB", "--holdout", "10%"];
    let started = Instant::now();
    run(&folder, "c.jsonl", &more).good();
    let micros = started.elapsed().as_micros() as usize;
    let files = ["a.bin", "a.idx", "a.bin.dquant.json", "a-valid.bin", "a-valid.idx"];
    let whole = files.map(|name| folder.read(name));
    run(&folder, "c.jsonl", &["--force", "--jobs", "1", "--holdout", "10%"]).good();
    assert!(files.map(|name| folder.read(name)) == whole, "other threads and chunks");
    let args = ["tokenize", "c.jsonl", "--tokenizer", "m/tokenizer.json", "--chat", "-o", "a.bin"];
    let args = [&args[..], &more, &["--resume", "--force"]].concat();
    let start = || {
        let mut command = folder.command(&args);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts")
    };
    for seed in seeds(0..6) {
        let _replay = Replay { test: TEST, seed };
        let mut random = Random::new(seed);
        for _ in 0..2 {
            let mut child = start();
            std::thread::sleep(Duration::from_micros(random.below(micros) as u64));
            child.kill().expect("our child");
            child.wait().expect("our child");
        }
        folder.run(&args).good();
        assert!(files.map(|name| folder.read(name)) == whole);
    }
    let mut child = start();
    while !folder.0.join(".a.bin.state").exists() {
        assert_eq!(child.try_wait().expect("our child"), None, "a state is saved before the end");
    }
    child.kill().expect("our child");
    child.wait().expect("our child");
    folder.write("m/chat_template.jinja", &template);
    folder.run(&args).failed(2, "its chat template was chat_template.jinja", "without --resume");
}

/// Asks transformers about random conversations; false where it is missing.
fn ask(test: &str, folder: &Folder, seed: u64) -> bool {
    let Some(python) = std::env::var_os("DQUANT_PEERS_PYTHON") else {
        skip::note(test, "DQUANT_PEERS_PYTHON names no Python with transformers and jinja2");
        return false;
    };
    let mut command = Command::new(python);
    command.arg(format!("{GOLDEN}/chat.py")).arg("write").arg(&folder.0).arg(seed.to_string());
    let asked = command.output().expect("DQUANT_PEERS_PYTHON starts");
    if asked.status.code() == Some(77) {
        skip::note(test, String::from_utf8_lossy(&asked.stdout).trim());
        return false;
    }
    assert!(asked.status.success(), "{}", String::from_utf8_lossy(&asked.stderr));
    true
}

#[test]
fn transformers_agrees_on_random_conversations() {
    const TEST: &str = "tokenize_chat::transformers_agrees_on_random_conversations";
    let folder = Folder::new("tokenize-chat-peers");
    for seed in seeds(0..1) {
        let _replay = Replay { test: TEST, seed };
        if !ask(TEST, &folder, seed) {
            return;
        }
        let mut compared = [0; 2];
        for entry in fs::read_dir(&folder.0).expect("readable") {
            let name = entry.expect("readable").file_name().into_string().expect("UTF-8");
            if let Some(name) = name.strip_suffix(".jsonl") {
                let [agreed, refused] = compare(&folder, name);
                compared = [compared[0] + agreed, compared[1] + refused];
            }
        }
        println!("{} conversations agree, {} are refused by both", compared[0], compared[1]);
        assert!(compared[0] >= 200, "{compared:?}");
    }
}

/// Compares every conversation of one template and tokenizer; returns how many both encode, and how
/// many both refuse.
fn compare(folder: &Folder, name: &str) -> [usize; 2] {
    let expected: Vec<Value> =
        serde_json::from_slice(&folder.read(&format!("{name}.json"))).expect("a list");
    let lines = folder.read(&format!("{name}.jsonl"));
    let lines: Vec<&str> = std::str::from_utf8(&lines).expect("UTF-8").lines().collect();
    let tokenizer = format!("{name}/tokenizer.json");
    let input = format!("{name}.jsonl");
    let args = ["tokenize", &input, "--tokenizer", &tokenizer, "--chat", "--force", "-o", "a.bin"];
    folder.run(&args).good();
    let mut found = documents(folder, "a.bin").into_iter();
    let mut count = [0; 2];
    for (at, expected) in expected.iter().enumerate() {
        if expected.is_null() {
            count[1] += 1;
            continue;
        }
        count[0] += 1;
        let numbers =
            |of: &str| serde_json::from_value::<Vec<u32>>(expected[of].clone()).expect(of);
        let (ids, mask) = (numbers("ids"), numbers("mask"));
        let found = found.next().unwrap_or_default();
        assert_eq!(found.concat(), ids, "{name}:{}: {}", at + 1, lines[at]);
        let said = |(turn, ids): (usize, &Vec<u32>)| vec![turn as u32 % 2; ids.len()];
        let said: Vec<u32> = found.iter().enumerate().flat_map(said).collect();
        assert_eq!(said, mask, "{name}:{}: {}", at + 1, lines[at]);
    }
    assert_eq!(found.next(), None, "{name}: more than transformers encodes");
    count
}
