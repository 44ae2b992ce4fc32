//! The program as its users meet it: what it prints, where, and how it ends.
//!
//! Every test runs the built binary in a folder of its own that is removed with the test. Nothing
//! here uses a network beyond loopback.

mod capture;
mod cluster;
mod conduct;
mod convert;
mod doctor;
mod explain;
#[path = "../../../../testing/h2.rs"]
mod h2;
mod inspect;
mod perf;
mod perf_roce_v1;
mod perf_xdp;
mod plan;
mod replay;
mod run;
mod scenarios;
#[path = "../../../../testing/seeds.rs"]
mod seeds;
mod sim;
#[path = "../../../../testing/skip.rs"]
mod skip;
mod subnet;
mod tokenize;
#[cfg(feature = "hugging-face")]
mod tokenize_chat;
mod tokenize_holdout;
mod tokenize_ids;
mod tokenize_inputs;
mod tokenize_resume;
mod top;
mod tutorials;
mod verbs_kit;
mod wild;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use nic::driver::RESCUED;

/// A folder that is removed with the test.
struct Folder(PathBuf);

impl Folder {
    /// The name must be unique among the tests: they run at the same time.
    fn new(name: &str) -> Folder {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("the folder for tests is writable");
        Folder(path)
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        let path = self.0.join(name);
        fs::create_dir_all(path.parent().expect("below the folder")).expect("writable");
        fs::write(path, content).expect("writable");
    }

    fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.0.join(name)).expect("the file exists")
    }

    /// The program, to be run in this folder without the user's settings for colour.
    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dquant"));
        command.args(args).current_dir(&self.0);
        command.env_remove("NO_COLOR").env_remove("CLICOLOR_FORCE");
        command
    }

    fn run(&self, args: &[&str]) -> Ran {
        Ran::new(&self.command(args).output().expect("the program starts"))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// How a run ended.
#[derive(Debug)]
struct Ran {
    exit: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Ran {
    fn new(output: &Output) -> Ran {
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("output is UTF-8");
        let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
        assert!(!stderr.contains(RESCUED), "{stderr}");
        Ran { exit: output.status.code(), stdout, stderr }
    }

    #[track_caller]
    fn good(self) -> Ran {
        assert_eq!(self.exit, Some(0), "{self:?}");
        self
    }

    /// Checks for an error of the house form: no result, one `error:` line, and a hint that
    /// contains this text.
    #[track_caller]
    fn failed(&self, exit: i32, error: &str, hint: &str) {
        assert_eq!(self.exit, Some(exit), "{self:?}");
        assert_eq!(self.stdout, "", "{self:?}");
        let lines: Vec<&str> = self.stderr.lines().collect();
        let has = |label: &str, text: &str| {
            lines.iter().any(|line| line.starts_with(label) && line.contains(text))
        };
        assert!(has("error: ", error), "{self:?}");
        assert!(hint.is_empty() || has("hint: ", hint), "{self:?}");
    }

    /// The one JSON object of the output.
    #[track_caller]
    fn json(&self) -> serde_json::Value {
        let mut lines = self.stdout.lines();
        let object = lines.next().expect("one line of output");
        assert_eq!(lines.next(), None);
        serde_json::from_str(object).expect("a JSON object")
    }
}
