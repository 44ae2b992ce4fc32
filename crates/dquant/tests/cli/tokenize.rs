//! `dquant tokenize`: ids, order, types, and what is left out.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::Folder;

pub(super) fn words(bytes: &[u8]) -> Vec<u32> {
    let (words, rest) = bytes.as_chunks::<4>();
    assert!(rest.is_empty(), "whole tokens");
    words.iter().map(|word| u32::from_le_bytes(*word)).collect()
}

fn halves(bytes: &[u8]) -> Vec<u16> {
    let (halves, rest) = bytes.as_chunks::<2>();
    assert!(rest.is_empty(), "whole tokens");
    halves.iter().map(|half| u16::from_le_bytes(*half)).collect()
}

#[test]
fn known_text_gives_known_ids_and_an_end_of_text() {
    let folder = Folder::new("tokenize-known");
    folder.write("a.txt", "hello world");
    for (encoding, ids) in [
        ("r50k_base", [31373, 995, 50256]),
        ("p50k_base", [31373, 995, 50256]),
        ("cl100k_base", [15339, 1917, 100257]),
        ("o200k_base", [24912, 2375, 199999]),
    ] {
        let args = ["tokenize", "a.txt", "--encoding", encoding, "-o", "a.bin", "--force"];
        folder.run(&args).good();
        assert_eq!(words(&folder.read("a.bin")), ids, "{encoding}");
    }
}

#[test]
fn the_summary_counts_what_was_written() {
    let folder = Folder::new("tokenize-summary");
    folder.write("a.txt", "hello world");
    folder.write("b.txt", "hello");
    let args = ["tokenize", "a.txt", "b.txt", "--encoding", "r50k_base", "-o", "ab.bin"];
    let text = folder.run(&args).good();
    assert!(text.stdout.starts_with("ab.bin: 5 u32 tokens, r50k_base\n"), "{text:?}");
    let summary = folder.run(&[&args[..], &["--json", "--force"]].concat()).good().json();
    assert_eq!(summary["schema"], "dquant.tokenize/1");
    assert_eq!(summary["documents"], 2);
    assert_eq!(summary["text_bytes"], 16);
    assert_eq!(summary["tokens"], 5);
    assert_eq!(summary["max_id"], 50256);
    assert_eq!(summary["fits_u16"], true);
    assert_eq!(summary["forced_cuts"], 0);
}

#[test]
fn sixteen_bits_are_used_where_asked() {
    let folder = Folder::new("tokenize-u16");
    folder.write("a.txt", "hello world");
    let args = ["tokenize", "a.txt", "--encoding", "r50k_base", "--dtype", "u16", "-o", "a.bin"];
    folder.run(&args).good();
    assert_eq!(halves(&folder.read("a.bin")), [31373, 995, 50256]);
}

#[test]
fn an_id_beyond_sixteen_bits_is_refused_with_file_and_position() {
    let folder = Folder::new("tokenize-refused");
    folder.write("a.txt", "hello world");
    folder.write("out.bin", "what was there before");
    let args =
        ["tokenize", "a.txt", "--encoding", "cl100k_base", "--dtype", "u16", "-o", "out.bin"];
    let ran = folder.run(&[&args[..], &["--force"]].concat());
    ran.failed(
        1,
        "a.txt: token 2 of the document has id 100257, which does not fit u16",
        "--dtype u32",
    );
    assert_eq!(folder.read("out.bin"), b"what was there before");
    let names: Vec<_> = fs::read_dir(&folder.0).expect("readable").collect();
    assert_eq!(names.len(), 2, "nothing unfinished is left: {names:?}");
}

#[test]
fn an_output_that_exists_is_replaced_only_when_that_is_wanted() {
    let folder = Folder::new("tokenize-exists");
    folder.write("a.txt", "hello world");
    let run = |name: &str, more: &[&str]| {
        let args = ["tokenize", "a.txt", "--encoding", "r50k_base", "-o", name];
        folder.run(&[&args[..], more].concat())
    };
    folder.write("a.bin", "precious");
    for more in [&[][..], &["--resume"], &["--flat"]] {
        run("a.bin", more).failed(2, "a.bin exists", "--force replaces it, --append adds to it");
    }
    assert_eq!(folder.read("a.bin"), b"precious");
    run("a.bin", &["--force"]).good();
    assert_eq!(words(&folder.read("a.bin")), [31373, 995, 50256]);
    run("a.bin", &["--append"]).good();
    assert_eq!(words(&folder.read("a.bin")).len(), 6);
    // The index of another file of that name.
    folder.write("b.idx", "precious");
    for more in [&[][..], &["--append"]] {
        run("b.bin", more).failed(2, "b.idx exists", "--force");
    }
    assert_eq!(folder.read("b.idx"), b"precious");
    run("a.bin", &["--force", "--append"]).failed(2, "cannot be used with", "");
}

#[test]
fn an_id_beyond_the_vocabulary_of_the_model_is_refused_with_file_and_position() {
    let folder = Folder::new("tokenize-vocab");
    folder.write("a.txt", "hello world");
    let run = |vocab: &str| {
        let args = ["tokenize", "a.txt", "--encoding", "r50k_base", "-o", "a.bin", "--vocab"];
        folder.run(&[&args[..], &[vocab]].concat())
    };
    run("50256").failed(
        1,
        "a.txt: token 2 of the document has id 50256, beyond the vocabulary of 50256",
        "--vocab",
    );
    run("31373").failed(1, "a.txt: token 0 of the document has id 31373", "");
    assert!(!folder.0.join("a.bin").exists());
    run("50257").good();
}

#[test]
fn folders_are_read_in_the_order_of_their_paths() {
    let folder = Folder::new("tokenize-order");
    for (name, text) in [
        ("t/b.txt", "b"),
        ("t/a/z.txt", "z"),
        ("t/a.txt", "a"),
        ("t/.hidden", "h"),
        ("t/c/.x/y", "y"),
    ] {
        folder.write(name, text);
    }
    folder.run(&["tokenize", "t", "--encoding", "r50k_base", "-o", "t/out.bin"]).good();
    let letters: Vec<u32> = words(&folder.read("t/out.bin"));
    // One-letter ids of this vocabulary: '!' is 0, so 'a' is 64, 'b' 65, 'z' 89.
    assert_eq!(letters, [89, 50256, 64, 50256, 65, 50256]);
    // The output is in the folder now; a second run must not read it.
    let args = ["tokenize", "t", "--encoding", "r50k_base", "-o", "t/out.bin", "--force"];
    folder.run(&args).good();
    assert_eq!(words(&folder.read("t/out.bin")), letters);
}

#[test]
fn files_that_are_no_text_are_skipped_and_counted() {
    let folder = Folder::new("tokenize-skipped");
    folder.write("t/a.txt", "hello");
    folder.write("t/b.jpg", b"text\xff\xd8");
    folder.write("t/c.txt", "");
    let args = ["tokenize", "t", "--encoding", "r50k_base", "-o", "out.bin", "--json"];
    let ran = folder.run(&args).good();
    assert!(ran.stderr.contains("t/b.jpg: not UTF-8 at byte 4"), "{ran:?}");
    assert!(ran.stderr.contains("t/c.txt: empty"), "{ran:?}");
    let summary = ran.json();
    assert_eq!(summary["skipped_not_utf8"], 1);
    assert_eq!(summary["skipped_empty"], 1);
    assert_eq!(words(&folder.read("out.bin")), [31373, 50256]);
}

#[test]
fn the_tokens_do_not_depend_on_chunks_or_cores() {
    let folder = Folder::new("tokenize-chunks");
    let paragraph =
        "It isn't 1234567 words,\r\nbut\tsome; 中文。も\n\n   indented\n/slash/ x_y  \n";
    folder.write("a.txt", paragraph.repeat(6_000));
    for encoding in ["r50k_base", "cl100k_base", "o200k_base"] {
        let run = |chunk, jobs, name| {
            let args = [
                "tokenize",
                "a.txt",
                "--encoding",
                encoding,
                "--chunk",
                chunk,
                "--jobs",
                jobs,
                "--force",
                "-o",
                name,
            ];
            folder.run(&args).good();
            folder.read(name)
        };
        let whole = run("64MiB", "1", "whole.bin");
        assert!(whole == run("64KiB", "1", "cut.bin"), "{encoding}: chunks of 64KiB");
        assert!(whole == run("64KiB", "3", "cut.bin"), "{encoding}: three jobs");
    }
}

#[test]
fn an_output_among_the_inputs_is_refused() {
    let folder = Folder::new("tokenize-output");
    folder.write("a.txt", "hello");
    let ran = folder.run(&["tokenize", "a.txt", "--encoding", "r50k_base", "-o", "./a.txt"]);
    ran.failed(2, "a.txt is to be read and to be written", "-o");
    assert_eq!(folder.read("a.txt"), b"hello");
    folder.write("empty/.keep", "");
    let ran = folder.run(&["tokenize", "empty", "--encoding", "r50k_base", "-o", "out.bin"]);
    ran.failed(2, "no file in empty", "hidden");
    let ran =
        folder.run(&["tokenize", "a.txt", "--encoding", "r50k_base", "-o", "no/such/out.bin"]);
    ran.failed(2, "no/such", "must exist");
}

#[test]
fn inputs_without_any_text_are_an_error_and_leave_no_output() {
    let folder = Folder::new("tokenize-nothing");
    folder.write("t/b.jpg", b"text\xff\xd8");
    folder.write("t/c.txt", "");
    folder.write("out.bin", "what was there before");
    let args = ["tokenize", "t", "--encoding", "r50k_base", "-o", "out.bin", "--force"];
    let ran = folder.run(&args);
    assert_eq!(ran.exit, Some(1), "{ran:?}");
    assert!(ran.stderr.contains("no file holds text: 1 are not UTF-8, 1 are empty"), "{ran:?}");
    assert_eq!(folder.read("out.bin"), b"what was there before");
    // A reason that did not occur is not named.
    folder.write("t/b.jpg", "");
    let ran = folder.run(&args);
    assert!(ran.stderr.contains("no file holds text: 2 are empty"), "{ran:?}");
}

#[test]
fn an_interrupted_run_leaves_nothing_behind() {
    use rustix::process::{Pid, Signal, kill_process};
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let folder = Folder::new(&format!("tokenize-interrupted-{code}"));
        // A pipe in the place of a file would be refused, so there is work for a while.
        folder.write("a.txt", "It isn't 1234567 words. ".repeat(2_000_000));
        let args = ["tokenize", "a.txt", "--encoding", "o200k_base", "--jobs", "1", "-o", "a.bin"];
        let plain = folder.command(&args);
        // The test runner may ignore SIGHUP; the program would, too.
        let mut command = Command::new("env");
        command.args(["--default-signal=HUP"]).arg(plain.get_program()).args(args);
        command.current_dir(&folder.0);
        let mut child = command.stdout(Stdio::null()).spawn().expect("the program starts");
        let files = || fs::read_dir(&folder.0).expect("readable").count();
        while files() < 2 {
            assert!(child.try_wait().expect("our child").is_none(), "it ended too early");
            std::thread::sleep(Duration::from_millis(5));
        }
        kill_process(Pid::from_child(&child), signal).expect("it runs");
        assert_eq!(child.wait().expect("our child").code(), Some(code));
        assert_eq!(files(), 1, "only the input is left");
    }
}
