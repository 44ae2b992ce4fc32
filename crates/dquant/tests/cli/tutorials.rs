//! The commands of the tutorials, word for word, with the output that is printed there.
//!
//! Each tutorial is one session of bash in a network of its own, in a folder that looks like a
//! clone of the project, with the programs of this build first on `PATH`. Blocks of the language
//! `console` are run: lines that begin with `$ ` are commands, with `> ` their next lines, and what
//! follows is what they print. There, `...` stands for any text in a line and, alone, for any
//! lines. A command has to succeed. Blocks of any other language are not run.
//!
//! What a block cannot do without stands behind its language, as in `console needs=cc`; on a
//! machine without it the rest of the tutorial's commands that need it are skipped, and the reason
//! is reported.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use super::{Folder, skip};

/// Longer than any command of a tutorial takes on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the session prints when a command has ended, with its exit code.
const MARK: &str = "\u{1}ended ";

/// What daemons of other commands may print at any time.
const LOG: &str = "dquant: ";

/// A command with what it prints, from a block of the page.
#[derive(Debug, PartialEq)]
struct Step {
    line: usize,
    needs: Vec<String>,
    command: String,
    output: Vec<String>,
}

impl Step {
    /// Whether the session goes on while the command runs.
    fn is_in_background(&self) -> bool {
        self.command.ends_with('&') && !self.command.ends_with("&&")
    }
}

/// The commands of a page.
fn steps(page: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut block: Option<Vec<String>> = None;
    let mut other = false;
    for (number, text) in page.lines().enumerate() {
        if let Some(language) = text.strip_prefix("```") {
            let was_open = block.take().is_some() || std::mem::take(&mut other);
            let mut words = language.split_whitespace();
            match words.next() {
                Some("console") if !was_open => block = Some(needs(words.next())),
                _ => other = !was_open,
            }
            continue;
        }
        let Some(needs) = &block else { continue };
        if let Some(command) = text.strip_prefix("$ ") {
            let (needs, command) = (needs.clone(), command.to_owned());
            steps.push(Step { line: number + 1, needs, command, output: Vec::new() });
            continue;
        }
        let step = steps.last_mut().expect("a block begins with a command");
        match text.strip_prefix("> ").filter(|_| step.output.is_empty()) {
            Some(more) => step.command = format!("{}\n{more}", step.command),
            None => step.output.push(text.to_owned()),
        }
    }
    steps
}

fn needs(word: Option<&str>) -> Vec<String> {
    let list = word.and_then(|word| word.strip_prefix("needs="));
    list.map(|list| list.split(',').map(str::to_owned).collect()).unwrap_or_default()
}

/// Whether a line is what the page shows, where `...` is any text.
fn fits(line: &str, shown: &str) -> bool {
    let mut parts = shown.trim_end().split("...");
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = line.trim_end().strip_prefix(first) else { return false };
    let mut parts = parts.peekable();
    if parts.peek().is_none() {
        return rest.is_empty();
    }
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rest.ends_with(part);
        }
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    true
}

/// Whether the lines are those that the page shows, but for what daemons log meanwhile.
fn all_fit(lines: &[&str], shown: &[String]) -> bool {
    let Some((first, rest)) = shown.split_first() else {
        return lines.iter().all(|line| line.starts_with(LOG));
    };
    if first.trim() == "..." {
        return (0..=lines.len()).any(|skipped| all_fit(&lines[skipped..], rest));
    }
    let Some((line, others)) = lines.split_first() else { return false };
    (fits(line, first) && all_fit(others, rest))
        || (line.starts_with(LOG) && all_fit(others, shown))
}

/// What a command has printed, its exit code, and what belongs to later commands: daemons write
/// while the shell does, and a line of theirs may come in two pieces.
fn split(text: &str) -> Option<(String, i32, String)> {
    let (before, after) = text.split_once(MARK)?;
    let (code, after) = after.split_once('\n')?;
    let at = before.rfind('\n').map_or(0, |at| at + 1);
    let (lines, piece) = before.split_at(at);
    let code = code.parse().ok()?;
    match piece.starts_with(LOG.trim_end()) {
        true => Some((lines.to_owned(), code, format!("{piece}{after}"))),
        false => Some((before.to_owned(), code, after.to_owned())),
    }
}

/// What a session has printed and nobody has read yet, and whether that was the last of it.
#[derive(Default)]
struct Printed(Mutex<(String, bool)>, Condvar);

/// A shell that runs one command after the other.
struct Session {
    shell: Child,
    input: ChildStdin,
    printed: Arc<Printed>,
}

impl Session {
    /// Starts bash in the folder, in a network that has loopback only.
    fn start(folder: &Folder) -> io::Result<Session> {
        let (mut reader, writer) = io::pipe()?;
        let mut command = Command::new("unshare");
        command.args(["-Urn", "bash", "-c", "ip link set lo up && exec bash --noprofile --norc"]);
        command.current_dir(&folder.0).env("PATH", path()).env("HOME", &folder.0);
        for name in ["TMPDIR", "XDG_RUNTIME_DIR"] {
            command.env(name, folder.0.join("run"));
        }
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("DQUANT_") {
                command.env_remove(name);
            }
        }
        command.process_group(0).stdin(Stdio::piped());
        command.stdout(writer.try_clone()?).stderr(writer);
        let mut shell = command.spawn()?;
        // The command holds the writing end, and the reader is to see its end.
        drop(command);
        let printed = Arc::new(Printed::default());
        let keeper = Arc::clone(&printed);
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            let mut bytes = Vec::new();
            while let Ok(count @ 1..) = reader.read(&mut buffer) {
                // A character may be in two pieces, and a line is not.
                bytes.extend_from_slice(&buffer[..count]);
                let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
                let text = String::from_utf8_lossy(&bytes[..whole]).into_owned();
                bytes.drain(..whole);
                keeper.0.lock().expect("nobody panics with it").0.push_str(&text);
                keeper.1.notify_all();
            }
            keeper.0.lock().expect("nobody panics with it").1 = true;
            keeper.1.notify_all();
        });
        let input = shell.stdin.take().expect("it is piped");
        Ok(Session { shell, input, printed })
    }

    /// Runs a command and returns its exit code and what was printed meanwhile; what was printed,
    /// if the command does not end or the session does.
    fn run(&mut self, command: &str) -> Result<(i32, String), String> {
        // Fails when the shell has ended, and then so does what it prints.
        let _ = writeln!(self.input, "{command}\necho \"{MARK}$?\"");
        let text = self.wait(|text| split(text).is_some())?;
        let (output, code, later) = split(&text).expect("it was waited for");
        self.printed.0.lock().expect("nobody panics with it").0.insert_str(0, &later);
        Ok((code, output))
    }

    /// Takes what was printed, once that is enough; all there is if that takes too long.
    fn wait(&self, enough: impl Fn(&str) -> bool) -> Result<String, String> {
        let begun = Instant::now();
        let mut printed = self.printed.0.lock().expect("nobody panics with it");
        while !enough(&printed.0) {
            let left = PATIENCE.saturating_sub(begun.elapsed());
            if left.is_zero() || printed.1 {
                return Err(std::mem::take(&mut printed.0));
            }
            printed = self.printed.1.wait_timeout(printed, left).expect("nobody panics with it").0;
        }
        Ok(std::mem::take(&mut printed.0))
    }

    /// Runs a step and compares.
    fn follow(&mut self, page: &str, step: &Step) {
        let at = format!("{page}:{}: $ {}", step.line, step.command);
        let (code, mut text) =
            self.run(&step.command).unwrap_or_else(|text| panic!("{at}: no end\n{text}"));
        assert_eq!(code, 0, "{at}\n{text}");
        let has_all =
            |text: &str| all_fit(&text.split_terminator('\n').collect::<Vec<_>>(), &step.output);
        if step.is_in_background() && !has_all(&text) {
            let before = text.clone();
            text +=
                &self.wait(|more| has_all(&format!("{before}{more}"))).unwrap_or_else(|all| all);
        }
        let shown = step.output.join("\n");
        assert!(has_all(&text), "{at}\nprints\n{text}\nand the page shows\n{shown}");
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = kill_process_group(Pid::from_child(&self.shell), Signal::KILL);
        let _ = self.shell.wait();
    }
}

/// `PATH` with the programs of this build first.
fn path() -> std::ffi::OsString {
    let own = Path::new(env!("CARGO_BIN_EXE_dquant")).parent().expect("it is in a folder");
    let others = std::env::var_os("PATH").unwrap_or_default();
    let all = std::iter::once(own.to_owned()).chain(std::env::split_paths(&others));
    std::env::join_paths(all).expect("folders of cargo have no colon")
}

/// Why the machine cannot do what a block needs.
fn lack(need: &str) -> Option<String> {
    let (script, hint) = match need {
        "libibverbs-dev" => (
            "echo '#include <infiniband/verbs.h>' | cc -E -xc - && echo 'int main(){}' | cc -xc - -libverbs -o /dev/null",
            "its headers are missing",
        ),
        "python3:dquant" => ("python3 -c 'import dquant'", "pip install ./bindings/python"),
        program => {
            let found = std::env::split_paths(&path()).any(|folder| folder.join(program).is_file());
            return (!found).then(|| format!("no {program}"));
        }
    };
    let mut command = Command::new("sh");
    command.args(["-c", script]).stdout(Stdio::null()).stderr(Stdio::null());
    let works = command.status().is_ok_and(|status| status.success());
    (!works).then(|| format!("no {need}: {hint}"))
}

/// The root of the project.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("it exists")
}

/// What a clone of the project has, by links: commands write beside them.
fn clone_of_links(folder: &Folder) {
    for entry in fs::read_dir(root()).expect("it can be read").flatten() {
        let hidden = entry.file_name().to_string_lossy().starts_with('.');
        if !hidden && entry.file_name() != "target" {
            symlink(entry.path(), folder.0.join(entry.file_name())).expect("the folder is empty");
        }
    }
    fs::create_dir(folder.0.join("run")).expect("the folder is writable");
}

fn follow(name: &str) {
    let (test, page) = (format!("tutorials::{name}"), format!("docs/tutorials/{name}.md"));
    let text = fs::read_to_string(root().join(&page)).expect("the tutorial exists");
    let steps = steps(&text);
    assert!(steps.len() > 5, "{page} has {} commands", steps.len());
    let folder = Folder::new(&format!("tutorial-{name}"));
    clone_of_links(&folder);
    let mut session = match Session::start(&folder) {
        Ok(session) => session,
        Err(error) => return skip::note(&test, &format!("unshare: {error}")),
    };
    match session.run("ip -o link show up dev lo") {
        Ok((0, text)) if text.contains("LOOPBACK") => {}
        Ok((_, why)) | Err(why) => {
            return skip::note(&test, &format!("no network of its own: {}", why.trim()));
        }
    }
    let mut said = BTreeSet::new();
    for step in &steps {
        let lacks: Vec<String> = step.needs.iter().filter_map(|need| lack(need)).collect();
        if lacks.is_empty() {
            session.follow(&page, step);
        }
        for lack in lacks {
            if said.insert(lack.clone()) {
                skip::note(&test, &format!("from {page}:{}: {lack}", step.line));
            }
        }
    }
}

#[test]
fn trainer() {
    follow("trainer");
}

#[test]
fn rdma() {
    follow("rdma");
}

#[test]
fn operator() {
    follow("operator");
}

#[test]
fn contributor() {
    follow("contributor");
}

#[test]
fn commands_of_a_page_are_those_of_its_consoles() {
    let page = "text\n```console needs=cc,python3\n$ cat <<E\n> one\n> E\none\n\n> two\n$ true &\n```\n```shell\n$ no\n```\n\
                ```text\n```\n```console\n$ a\n```\n";
    let step = |line: usize, needs: &[&str], command: &str, output: &[&str]| Step {
        line,
        needs: needs.iter().map(ToString::to_string).collect(),
        command: command.to_owned(),
        output: output.iter().map(ToString::to_string).collect(),
    };
    let both = ["cc", "python3"];
    let expected = [
        step(3, &both, "cat <<E\none\nE", &["one", "", "> two"]),
        step(9, &both, "true &", &[]),
        step(17, &[], "a", &[]),
    ];
    assert_eq!(steps(page), expected);
    assert!(expected[1].is_in_background() && !expected[0].is_in_background());
}

#[test]
fn lines_of_daemons_are_not_cut_by_the_end_of_a_command() {
    let parts = |text: &str| split(text);
    let is =
        |output: &str, code: i32, later: &str| Some((output.to_owned(), code, later.to_owned()));
    assert_eq!(parts(&format!("a\nb{MARK}3\nc\n")), is("a\nb", 3, "c\n"));
    assert_eq!(parts(&format!("a\ndquant: {MARK}0\nready\n")), is("a\n", 0, "dquant: ready\n"));
    assert_eq!(parts(&format!("a\n{MARK}0")), None);
    assert_eq!(parts("a\n"), None);
}

#[test]
fn dots_stand_for_text_and_for_lines() {
    let shows = |shown: &str, printed: &str| {
        let shown: Vec<String> = shown.lines().map(str::to_owned).collect();
        all_fit(&printed.lines().collect::<Vec<_>>(), &shown)
    };
    for (shown, printed) in [
        ("a", "a"),
        ("a ... c", "a b c"),
        ("...", ""),
        ("...\nc", "a\nb\nc"),
        ("a\n...", "a"),
        ("took ... s on ... threads", "took 0.1 s on 2 threads"),
        ("a", "dquant: session begins\na\ndquant: session ends"),
        ("dquant: ready", "dquant: session begins\ndquant: ready"),
        ("", "dquant: session begins"),
    ] {
        assert!(shows(shown, printed), "{shown:?} {printed:?}");
    }
    for (shown, printed) in [
        ("a", "b"),
        ("a", ""),
        ("", "a"),
        ("a", "a\nb"),
        ("a ... c", "a b d"),
        ("a...", "ba"),
        ("...\nc", "a\nb"),
        ("aa...a", "aa"),
        ("dquant: ready", "dquant: session begins"),
    ] {
        assert!(!shows(shown, printed), "{shown:?} {printed:?}");
    }
}
