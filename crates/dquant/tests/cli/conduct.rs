//! What holds for every command: help, exit codes, colours, pipes.

use std::io;

use super::{Folder, Ran};

/// Every command with its own help page.
const COMMANDS: &[&[&str]] = &[
    &[],
    &["serve"],
    &["dpu"],
    &["cat"],
    &["status"],
    &["tokenize"],
    &["convert"],
    &["inspect"],
    &["plan"],
    &["plan", "explain"],
    &["documents"],
    &["datasets"],
    &["capture"],
    &["capture", "check"],
    &["capture", "live"],
    &["doctor"],
    &["run"],
    &["explain"],
    &["brain"],
    &["agent"],
    &["job"],
    &["job", "submit"],
    &["job", "list"],
    &["job", "explain"],
    &["job", "cancel"],
    &["job", "watch"],
    &["job", "replay"],
    &["job", "down"],
    &["job", "up"],
    &["job", "defragment"],
    &["parfait"],
    &["parfait", "profile"],
    &["parfait", "prove"],
    &["parfait", "shifts"],
    &["parfait", "slurm-topology"],
    &["parfait", "violations"],
    &["perf"],
    &["perf", "serve"],
    &["sim"],
    &["sim", "chaos"],
    &["sim", "compare"],
    &["sim", "deadlock"],
    &["sim", "goodput"],
    &["sim", "incast"],
    &["sim", "run"],
    &["sim", "sweep"],
    &["subnet"],
    &["subnet", "plan"],
    &["subnet", "discover"],
    &["subnet", "manage"],
    &["subnet", "status"],
    &["subnet", "sweep"],
    &["top"],
    &["demo"],
];

#[test]
fn every_help_page_ends_with_examples() {
    let folder = Folder::new("help");
    for command in COMMANDS {
        let args = [*command, &["--help"]].concat();
        let help = folder.run(&args).good();
        assert_eq!(help.stderr, "", "{command:?}");
        let (before, examples) = help.stdout.split_once("\nExamples:\n").expect("examples");
        assert!(before.contains("Usage: dquant"), "{command:?}");
        assert!(examples.lines().all(|line| line.starts_with("  ")), "{command:?}: {examples}");
        assert!(examples.contains("  dquant "), "{command:?}: {examples}");
    }
}

#[test]
fn every_command_of_the_overview_is_covered_here() {
    let folder = Folder::new("overview");
    let overview = folder.run(&["--help"]).good().stdout;
    let (_, commands) = overview.split_once("Commands:\n").expect("a list of commands");
    for line in commands.lines().take_while(|line| !line.is_empty()) {
        let name = line.split_whitespace().next().expect("a name");
        let covered = COMMANDS.iter().any(|command| command.first() == Some(&name));
        assert!(covered || name == "help", "add {name} to COMMANDS");
    }
}

#[test]
fn help_of_help_is_help() {
    let folder = Folder::new("help-help");
    let overview = folder.run(&["--help"]).good().stdout;
    for flag in ["--help", "-h"] {
        assert_eq!(folder.run(&["help", flag]).good().stdout, overview);
        let page = folder.run(&["help", "cat", flag]).good().stdout;
        assert_eq!(page, folder.run(&["cat", "--help"]).good().stdout);
        let page = folder.run(&["sim", "help", flag]).good().stdout;
        assert_eq!(page, folder.run(&["sim", "help"]).good().stdout);
    }
}

#[test]
fn lines_of_help_fit_a_wide_terminal() {
    let folder = Folder::new("help-width");
    for command in COMMANDS {
        for flag in ["-h", "--help"] {
            let help = folder.run(&[*command, &[flag]].concat()).good().stdout;
            let widest = help.lines().map(|line| line.chars().count()).max();
            assert!(widest <= Some(120), "{command:?} {flag}: {widest:?}");
        }
    }
}

#[test]
fn a_wrong_command_line_ends_with_2() {
    let folder = Folder::new("usage");
    for args in [&[][..], &["tokenise"], &["tokenize"], &["inspect", "--dtype", "f32", "x"]] {
        let ran = folder.run(args);
        assert_eq!(ran.exit, Some(2), "{ran:?}");
        assert_eq!(ran.stdout, "", "{ran:?}");
    }
    let typo = folder.run(&["insepct", "x"]);
    assert!(typo.stderr.starts_with("error: ") && typo.stderr.contains("'inspect'"), "{typo:?}");
}

/// The control of congestion is named alike wherever it is set.
#[test]
fn congestion_control_is_explained_and_a_wrong_name_refused_with_the_right_ones() {
    let folder = Folder::new("congestion");
    let corpus = ["--root", "."];
    for command in [&["serve"][..], &["dpu"], &["perf"]] {
        let help = folder.run(&[command, &["--help"]].concat()).good().stdout;
        assert!(help.contains("--cc <NAME>") && help.contains("[default: auto]"), "{help}");
        let options: &[&str] = match command {
            ["serve"] => &corpus,
            ["perf"] => &["127.0.0.1"],
            _ => &[],
        };
        for bad in ["reno", "Auto", "dcqcn-mlnx:0"] {
            let ran = folder.run(&[command, options, &["--cc", bad]].concat());
            assert_eq!((ran.exit, ran.stdout.as_str()), (Some(2), ""), "{ran:?}");
            assert!(ran.stderr.starts_with("error: ") && ran.stderr.contains("--cc"), "{ran:?}");
            assert!(
                ran.stderr
                    .contains("expected auto, off, delay, swift, or one of advertised, dcqcn-mlnx"),
                "{ran:?}"
            );
        }
    }
}

#[test]
fn a_missing_file_is_named() {
    let folder = Folder::new("missing");
    for args in [
        &["inspect", "none.bin"][..],
        &["capture", "check", "none.pcap"],
        &["tokenize", "none.txt", "--encoding", "r50k_base", "-o", "out.bin"],
    ] {
        folder.run(args).failed(2, "none.", "");
    }
}

#[test]
fn colour_is_for_terminals_and_for_those_who_force_it() {
    let folder = Folder::new("colour");
    let run = |name: Option<(&str, &str)>| {
        let mut command = folder.command(&["inspect", "none.bin"]);
        Ran::new(&command.envs(name).output().expect("the program starts")).stderr
    };
    assert!(!run(None).contains('\x1b'));
    assert!(!run(Some(("CLICOLOR_FORCE", "0"))).contains('\x1b'));
    assert!(run(Some(("CLICOLOR_FORCE", "1"))).starts_with("\x1b[1;31merror:\x1b[0m "));
    let mut both = folder.command(&["inspect", "none.bin"]);
    both.env("CLICOLOR_FORCE", "1").env("NO_COLOR", "1");
    assert!(!Ran::new(&both.output().expect("starts")).stderr.contains('\x1b'));
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let folder = Folder::new("pipe");
    folder.write("a.bin", [1, 0, 2, 0]);
    for args in [&["inspect", "a.bin", "--dtype", "u16"][..], &["--help"], &["inspect", "--help"]] {
        let (reader, writer) = io::pipe().expect("a pipe");
        drop(reader);
        let output = folder.command(args).stdout(writer).output().expect("the program starts");
        let ran = Ran::new(&output).good();
        assert_eq!(ran.stderr, "", "{args:?}");
    }
}
