//! `dquant tokenize`: a run that is killed or interrupted, and the run that continues it (C8).

use std::fs;
use std::io::Write;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::seeds::{Replay, seeds};
use super::tokenize_inputs::Random;
use super::{Folder, Ran};

const ARGS: &[&str] = &[
    "tokenize",
    "in",
    "--encoding",
    "r50k_base",
    "--jobs",
    "2",
    "--chunk",
    "64KiB",
    "--checkpoint",
    "64KiB",
];

/// A folder with inputs of every kind that this build reads.
fn inputs(folder: &Folder) {
    let mut random = Random::new(11);
    let mut lines = |count: usize| -> String {
        let line = |_| serde_json::json!({ "text": random.text(90) }).to_string() + "\n";
        (0..count).map(line).collect()
    };
    let first = lines(6_000);
    folder.write("in/a.jsonl", first + "{broken\n" + &lines(100));
    let compressible = lines(4_000);
    #[cfg(feature = "compressed")]
    folder.write("in/b.jsonl.gz", super::tokenize_inputs::gzip(compressible.as_bytes()));
    #[cfg(not(feature = "compressed"))]
    folder.write("in/b.jsonl", compressible);
    #[cfg(feature = "parquet")]
    {
        let rows = (0..3_000).map(|_| Some(random.text(90).into_bytes())).collect::<Vec<_>>();
        let codec = parquet::basic::Compression::SNAPPY;
        let name = "in/c.parquet";
        folder.write(name, super::tokenize_inputs::parquet_files::parquet(&rows, 700, codec));
    }
    folder.write("in/d.txt", random.text(200_000));
    // The part that is written before the invalid byte is seen must vanish.
    folder.write("in/e.txt", [random.text(60_000).as_bytes(), &[0xff]].concat());
    folder.write("in/f.txt", random.text(10));
    folder.write("in/g.txt", random.text(50_000) + "end");
}

fn start(folder: &Folder, more: &[&str]) -> Child {
    let mut command = folder.command(&[ARGS, more].concat());
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the program starts")
}

/// The names beside the inputs.
fn names(folder: &Folder) -> Vec<String> {
    let entries = fs::read_dir(&folder.0).expect("readable");
    let name = |entry: std::io::Result<fs::DirEntry>| {
        entry.expect("readable").file_name().into_string().expect("UTF-8")
    };
    let mut names: Vec<String> = entries.map(name).filter(|name| name != "in").collect();
    names.sort();
    names
}

/// What belongs to an output of this name.
fn files(name: &str) -> [String; 3] {
    [".bin", ".bin.dquant.json", ".idx"].map(|end| format!("{name}{end}"))
}

/// A run that was never interrupted.
struct Whole {
    summary: serde_json::Value,
    duration: Duration,
    /// The ids and the index of each output.
    outputs: Vec<[Vec<u8>; 2]>,
    /// The arguments that name the outputs, and their names.
    more: &'static [&'static str],
    names: &'static [&'static str],
}

impl Whole {
    /// Runs with `whole_args` into `whole_names`; the runs to be killed have the other arguments
    /// and names.
    fn new(
        folder: &Folder,
        (whole_args, whole_names): (&[&str], &[&str]),
        (more, names): (&'static [&'static str], &'static [&'static str]),
    ) -> Whole {
        let started = Instant::now();
        let summary = folder.run(&[ARGS, whole_args, &["--json"]].concat()).good().json();
        let duration = started.elapsed();
        let pair = |name: &&str| ["bin", "idx"].map(|end| folder.read(&format!("{name}.{end}")));
        let outputs = whole_names.iter().map(pair).collect();
        Whole { summary, duration, outputs, more, names }
    }

    /// Kills some runs at any instant and resumes them; returns whether the last one found
    /// something to go on from.
    fn kill_and_resume(&self, folder: &Folder, seed: u64, others: &[String]) -> bool {
        let mut random = Random::new(seed);
        // A run that ended before it was killed is begun anew.
        let more = [&["--resume", "--force"], self.more].concat();
        for _ in 0..=random.below(4) {
            let mut child = start(folder, &more);
            let micros = self.duration.as_micros() as usize;
            std::thread::sleep(Duration::from_micros(random.below(micros) as u64));
            child.kill().expect("our child");
            child.wait().expect("our child");
            for (name, [ids, _]) in self.names.iter().zip(&self.outputs) {
                let exists = |end: &str| folder.0.join(format!("{name}{end}")).exists();
                let (has_ids, has_index) = (exists(".bin"), exists(".idx"));
                assert!(!has_ids || has_index, "ids appear last");
                assert!(
                    !has_ids || folder.read(&format!("{name}.bin")) == *ids,
                    "a part under the name"
                );
            }
        }
        let ran = folder.run(&[ARGS, &more, &["--json"]].concat()).good();
        let mut left = others.to_vec();
        for (name, [ids, index]) in self.names.iter().zip(&self.outputs) {
            let read = |end: &str| folder.read(&format!("{name}.{end}"));
            assert!(read("bin") == *ids, "seed {seed}: other ids");
            assert!(read("idx") == *index, "seed {seed}: other documents");
            folder.run(&["inspect", &format!("{name}.bin"), "--verify"]).good();
            left.extend(files(name));
        }
        left.sort();
        assert_eq!(names(folder), left, "nothing unfinished is left");
        let again = ran.json();
        let counted =
            ["documents", "tokens", "text_bytes", "max_id", "skipped_broken", "first_broken"];
        for counted in counted {
            assert_eq!(again[counted], self.summary[counted], "{counted}");
            let held_out = |of: &serde_json::Value| of["held_out"][counted].clone();
            assert_eq!(held_out(&again), held_out(&self.summary), "{counted}");
        }
        for name in self.names.iter().flat_map(|name| files(name)) {
            fs::remove_file(folder.0.join(name)).expect("there");
        }
        ran.stderr.contains("resumed after")
    }

    /// Does so for some seeds, of which at least one has to hit a run.
    fn survives(&self, test: &'static str, folder: &Folder) {
        let others = names(folder);
        let is_replay = std::env::var_os("DQUANT_SEED").is_some();
        let mut resumed_runs = 0;
        // On a busy machine more kills miss: it goes on until one has hit a run.
        for seed in seeds(0..6).chain(6..100) {
            if seed >= 6 && (resumed_runs > 0 || is_replay) {
                break;
            }
            let _replay = Replay { test, seed };
            resumed_runs += usize::from(self.kill_and_resume(folder, seed, &others));
        }
        assert!(resumed_runs > 0 || is_replay, "no kill hit a run");
    }
}

/// Whatever instant a run is killed at, the output is absent, and the run that resumes it writes
/// the same bytes as one that was never interrupted.
#[test]
fn a_killed_run_is_resumed_to_the_same_bytes() {
    let folder = Folder::new("tokenize-killed");
    inputs(&folder);
    let (whole, killed) = ((&["-o", "whole.bin"][..], &["whole"][..]), &["-o", "part.bin"][..]);
    let whole = Whole::new(&folder, whole, (killed, &["part"]));
    whole.survives("a_killed_run_is_resumed_to_the_same_bytes", &folder);
}

/// The same of two outputs: both are those of a run that was never interrupted.
#[test]
fn a_killed_run_with_a_holdout_is_resumed_to_the_same_parts() {
    let folder = Folder::new("tokenize-killed-holdout");
    inputs(&folder);
    let args = ["--holdout", "30%", "--seed", "5", "-o", "whole.bin"];
    let killed =
        &["--holdout", "30%", "--seed", "5", "-o", "part.bin", "--holdout-output", "rest.bin"];
    let outputs = (&args[..], &["whole", "whole-valid"][..]);
    let whole = Whole::new(&folder, outputs, (killed, &["part", "rest"]));
    whole.survives("a_killed_run_with_a_holdout_is_resumed_to_the_same_parts", &folder);
}

/// A text file that is longer than what decides about it is killed in its middle: the part of it is
/// kept.
#[test]
fn a_long_text_stays_in_its_part_when_it_is_resumed() {
    let folder = Folder::new("tokenize-long-holdout");
    let mut random = Random::new(21);
    for name in ["in/a.txt", "in/b.txt", "in/c.txt"] {
        folder.write(name, random.text(60_000));
    }
    for seed in ["0", "1", "2", "3"] {
        let args = ["--holdout", "50%", "--seed", seed, "-o"];
        let ran = folder.run(&[ARGS, &args, &["whole.bin", "--force"]].concat());
        if ran.exit == Some(1) {
            continue;
        }
        ran.good();
        interrupted(&folder, &[&args[..], &["part.bin"]].concat(), Signal::KILL);
        folder.run(&[ARGS, &args, &["part.bin", "--resume"]].concat()).good();
        for (whole, part) in [("whole", "part"), ("whole-valid", "part-valid")] {
            for end in ["bin", "idx"] {
                let read = |name: &str| folder.read(&format!("{name}.{end}"));
                assert!(read(whole) == read(part), "seed {seed}: {part}.{end}");
            }
        }
        for name in ["part", "part-valid"].iter().flat_map(|name| files(name)) {
            fs::remove_file(folder.0.join(name)).expect("there");
        }
    }
    assert!(folder.0.join("whole.bin").exists(), "one of four seeds has both parts");
}

/// Runs until the first state is saved, then ends it with this signal.
fn interrupted(folder: &Folder, more: &[&str], signal: Signal) {
    let mut child = start(folder, more);
    let state = || names(folder).iter().any(|name| name.ends_with(".state"));
    while !state() {
        assert!(child.try_wait().expect("our child").is_none(), "it ended too early");
        std::thread::sleep(Duration::from_millis(2));
    }
    kill_process(Pid::from_child(&child), signal).expect("it runs");
    child.wait().expect("our child");
}

#[test]
fn an_interrupted_run_is_kept_only_when_it_may_be_resumed() {
    let folder = Folder::new("tokenize-interrupted-resume");
    inputs(&folder);
    interrupted(&folder, &["-o", "a.bin"], Signal::INT);
    assert_eq!(names(&folder), [""; 0]);
    interrupted(&folder, &["-o", "a.bin", "--resume"], Signal::INT);
    assert!(names(&folder).iter().any(|name| name == ".a.bin.state"));
    // Dropped by a run that does not resume.
    let ran = folder.run(&[ARGS, &["-o", "a.bin"]].concat()).good();
    assert!(ran.stderr.contains("an interrupted run is dropped"), "{ran:?}");
    assert_eq!(names(&folder), ["a.bin", "a.bin.dquant.json", "a.idx"]);
}

#[test]
fn a_run_that_would_write_other_bytes_does_not_resume() {
    let folder = Folder::new("tokenize-other-resume");
    inputs(&folder);
    interrupted(&folder, &["-o", "a.bin", "--dtype", "u32"], Signal::KILL);
    let resume =
        |more: &[&str]| -> Ran { folder.run(&[ARGS, &["-o", "a.bin", "--resume"], more].concat()) };
    let hint = "without --resume";
    resume(&["--eos", "none"]).failed(
        2,
        "its end of documents was id 50256, and is none now",
        hint,
    );
    resume(&["--dtype", "u16"]).failed(2, "its type was u32, and is u16 now", hint);
    resume(&["--flat"]).failed(2, "its index was written, and is left out now", hint);
    resume(&["--holdout", "1%"]).failed(
        2,
        "its held-out share was nothing, and is 1% by seed 0 in a-valid.bin now",
        hint,
    );
    resume(&["--format", "text"]).failed(2, "its inputs was", hint);
    folder.write("in/new.txt", "hello");
    resume(&[]).failed(2, "its inputs was", hint);
    fs::remove_file(folder.0.join("in/new.txt")).expect("there");
    // The refusals have changed nothing.
    let ran = resume(&[]).good();
    assert!(ran.stderr.contains("resumed after"), "{ran:?}");
    folder.run(&[ARGS, &["-o", "b.bin"]].concat()).good();
    assert!(folder.read("a.bin") == folder.read("b.bin"));
}

#[test]
fn a_damaged_state_is_refused() {
    let folder = Folder::new("tokenize-damaged-state");
    inputs(&folder);
    interrupted(&folder, &["-o", "a.bin"], Signal::KILL);
    let state = folder.read(".a.bin.state");
    let resume = || folder.run(&[ARGS, &["-o", "a.bin", "--resume"]].concat());
    folder.write(".a.bin.state", &state[..state.len() / 2]);
    resume().failed(2, ".a.bin.state is damaged", "without --resume");
    folder.write(".a.bin.state", &state);
    folder.write(".a.bin.part", "");
    resume().failed(2, ".a.bin.part holds less than was written", "without --resume");
    folder.run(&[ARGS, &["-o", "a.bin"]].concat()).good();
}

/// A run on standard input, of which it has got this much.
fn piped(folder: &Folder, more: &[&str], input: &[u8]) -> Child {
    let args = ["tokenize", "-", "--encoding", "r50k_base", "-o", "a.bin", "--checkpoint", "64KiB"];
    let mut command = folder.command(&[&args[..], &["--chunk", "64KiB"], more].concat());
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the program starts");
    let stdin = child.stdin.as_mut().expect("piped");
    // A run that refuses to resume does not read everything.
    let _ = stdin.write_all(input).and_then(|()| stdin.flush());
    child
}

#[test]
fn standard_input_is_resumed_when_it_begins_with_the_same_bytes() {
    let folder = Folder::new("tokenize-stdin-resume");
    let text = Random::new(8).text(200_000);
    let mut child = piped(&folder, &["--resume"], &text.as_bytes()[..600_000]);
    while !folder.0.join(".a.bin.state").exists() {
        std::thread::sleep(Duration::from_millis(2));
    }
    // A second run of the same output waits for nobody.
    let args = ["tokenize", "-", "--encoding", "r50k_base", "-o", "a.bin"];
    let mut second = folder.command(&args);
    let second = Ran::new(&second.stdin(Stdio::null()).output().expect("the program starts"));
    second.failed(2, "another run is writing a.bin", "-o");
    child.kill().expect("our child");
    child.wait().expect("our child");
    let other = "other ".to_owned() + &text;
    let refused = piped(&folder, &["--resume"], other.as_bytes()).wait_with_output();
    let refused = Ran::new(&refused.expect("it ends"));
    refused.failed(2, "standard input does not begin with what was read from it", "");
    let resumed = piped(&folder, &["--resume"], text.as_bytes()).wait_with_output();
    let resumed = Ran::new(&resumed.expect("it ends")).good();
    assert!(resumed.stderr.contains("resumed after"), "{resumed:?}");
    let ids = folder.read("a.bin");
    let anew = piped(&folder, &["--force"], text.as_bytes()).wait_with_output();
    Ran::new(&anew.expect("it ends")).good();
    assert!(folder.read("a.bin") == ids);
}

#[test]
fn an_appending_run_is_resumed_too() {
    let folder = Folder::new("tokenize-append-resume");
    inputs(&folder);
    folder.write("before.txt", "hello");
    let before = ["tokenize", "before.txt", "--encoding", "r50k_base", "-o"];
    for name in ["a.bin", "b.bin"] {
        folder.run(&[&before[..], &[name]].concat()).good();
    }
    let old = folder.read("a.bin");
    interrupted(&folder, &["--append", "-o", "a.bin"], Signal::KILL);
    assert_eq!(folder.read("a.bin"), old, "the output is as it was");
    folder.run(&[ARGS, &["--append", "--resume", "-o", "a.bin"]].concat()).good();
    folder.run(&[ARGS, &["--append", "-o", "b.bin"]].concat()).good();
    assert!(folder.read("a.bin") == folder.read("b.bin"));
    assert!(folder.read("a.idx") == folder.read("b.idx"));
    // An output that has changed meanwhile is not the one that was copied.
    interrupted(&folder, &["--append", "-o", "b.bin"], Signal::KILL);
    folder.write("b.bin", "else");
    folder
        .run(&[ARGS, &["--append", "--resume", "--dtype", "u32", "-o", "b.bin"]].concat())
        .failed(2, "its extended output was", "without --resume");
}
