//! `cargo xtask soak`: real processes that begin, end, are killed and are stopped, while somebody
//! looks at the clock.
//!
//! Storage targets and DPUs serve streams, verbs programs run beside them on the drop-in library,
//! both through shared memory and as packets. Everything is drawn from a seed. This file has the
//! command line and starts a second process of this program, the inner one, in a network namespace
//! of its own where that is allowed. The inner one ends when its standard input does, so an
//! interrupt or a crash of the outer one leaves no process and no file.
//!
//! | part | what it does |
//! |---|---|
//! | [`prepare`] | builds the programs, and the C program for verbs |
//! | [`draw`] | what happens, from the seed |
//! | [`mod@run`] | the rounds |
//! | [`ground`] | what all parts share: the folder, the first failure, the processes |
//! | [`locks`] | locks that all parts take |
//! | [`process`] | one process: started, signalled, awaited, ended |
//! | [`place`] | a target and a DPU |
//! | [`data`] | token files and the batches that must come out of them |
//! | [`stream`], [`pair`] | a trainer; two verbs programs |
//! | [`pulse`], [`watch`] | progress and pauses; who has made none for too long, without the time that the machine took |
//! | [`growth`] | memory, descriptors, threads and files between rounds |
//! | [`tally`], [`report`] | the table at the end; what is printed of a failure |

mod data;
mod draw;
mod ground;
mod growth;
mod locks;
mod pair;
mod place;
mod prepare;
mod process;
mod pulse;
mod report;
mod run;
mod stream;
mod tally;
mod watch;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, SystemTime};

use crate::Command;
use crate::flags::Flags;
use crate::shell::{self, Failure};

pub(crate) const COMMAND: Command = Command {
    name: "soak",
    summary: "Real processes, killed and stopped at random: nothing may hang, grow or be wrong",
    help: "\
Usage: cargo xtask soak [OPTIONS]

Runs storage targets, DPUs, 1 to 8 streams and pairs of verbs programs at once, in rounds, through
shared memory and as packets. Streams and programs begin, end, are killed and are stopped; in every
other pair of rounds so are target and DPU. Every byte is compared. Fails when something makes no
progress for 5 s, on a wrong byte, on an unexpected end, on growth, and when a wake-up had to be
rescued. docs/soak.md has the details. A failure prints the line that replays its round.

Options:
  --for TIME      how long: 20s, 60m, 1h [default: 60s]
  --seed N        of the first round; the next ones count up [default: from the clock]
  --binary PATH   this dquant and the libibverbs.so beside it, and build nothing

Exit code: 0 nothing found, 1 something failed, 2 usage or environment.

Examples:
  cargo xtask soak                         a minute
  cargo xtask soak --for 60m               by hand, before a release
  cargo xtask soak --seed 17 --for 20s     the round that failed, and those after it",
    run,
};

/// The user's options.
#[derive(Clone, Debug, PartialEq)]
struct Options {
    length: Duration,
    seed: Option<u64>,
    binary: Option<PathBuf>,
    /// Set for the inner process: the folder.
    inside: Option<PathBuf>,
    /// For the inner process: why there is no program for verbs.
    no_verbs: Option<String>,
    /// For the inner process: it has namespaces of its own.
    is_alone: bool,
}

const SHORTEST: Duration = Duration::from_secs(1);

const DEFAULT: Options = Options {
    length: Duration::from_secs(60),
    seed: None,
    binary: None,
    inside: None,
    no_verbs: None,
    is_alone: false,
};

fn run(args: &[String]) -> Result<(), Failure> {
    let options = parse(args)?;
    match (&options.inside, &options.binary) {
        (Some(folder), Some(binary)) => {
            let programs = prepare::Programs::at(binary, folder, options.no_verbs.as_deref());
            let seed = options.seed.unwrap_or(0);
            run::run(folder, programs, seed, options.length, options.is_alone)
        }
        _ => outside(&options),
    }
}

/// Builds, starts the inner process and removes its folder if that has not done it.
fn outside(options: &Options) -> Result<(), Failure> {
    let seed = options.seed.unwrap_or_else(seed_of_the_clock);
    let binary = match &options.binary {
        Some(path) => path
            .canonicalize()
            .map_err(|error| Failure::usage(format!("--binary {}: {error}", path.display())))?,
        None => prepare::build()?,
    };
    // Short, because the path of a socket has at most 107 bytes.
    let folder = std::env::temp_dir().join(format!("dquant-soak-{}", std::process::id()));
    fs::create_dir_all(&folder)
        .map_err(|error| Failure::usage(format!("cannot make {}: {error}", folder.display())))?;
    let no_verbs = prepare::compile(&folder).err();
    let mut child = start_inside(options, seed, &binary, &folder, no_verbs)?;
    // Its standard input stays open until it has ended.
    let stdin = child.stdin.take();
    let status = child.wait();
    drop(stdin);
    let _ = fs::remove_dir_all(&folder);
    match status.ok().and_then(|status| status.code()) {
        Some(0) => Ok(()),
        Some(2) => Err(Failure::usage("the soak did not run to its end, see above")),
        _ => Err(Failure::check("the soak failed, see above")),
    }
}

fn start_inside(
    options: &Options,
    seed: u64,
    binary: &Path,
    folder: &Path,
    no_verbs: Option<String>,
) -> Result<Child, Failure> {
    use std::os::unix::process::CommandExt;
    let cannot = |error: std::io::Error| Failure::usage(format!("cannot start: {error}"));
    let own = std::env::current_exe().map_err(cannot)?;
    let mut command = match own_namespaces(folder) {
        Some(script) => {
            let mut command = std::process::Command::new("unshare");
            // `exec` keeps the process that holds the standard input.
            command.args(["-nm", "--", "sh", "-c", &format!("{script} && exec \"$@\""), "sh"]);
            command.arg(own).arg("soak").args(["--alone", "yes"]);
            command
        }
        None => {
            let mut command = std::process::Command::new(own);
            command.arg("soak");
            command
        }
    };
    command.args(["--seed", &seed.to_string()]);
    command.args(["--for", &format!("{}ms", options.length.as_millis())]);
    command.arg("--binary").arg(binary).arg("--inside").arg(folder);
    if let Some(why) = no_verbs {
        command.args(["--no-verbs", &why]);
    }
    // A group of its own: an interrupt at the terminal reaches only the outer process, whose end is
    // what the inner one sees.
    command.stdin(Stdio::piped()).process_group(0).spawn().map_err(cannot)
}

/// Prepares a network and a mount namespace in which nobody else has addresses, shared memory or
/// run-time files: a script for a shell. `None` where they cannot be made, which takes root,
/// `unshare`, `mount` and `ip`.
fn own_namespaces(folder: &Path) -> Option<String> {
    let folder = folder.canonicalize().ok()?;
    let hidden = growth::PLACES.iter().filter(|place| !folder.starts_with(place));
    let mut script = "ip link set lo up".to_owned();
    hidden.for_each(|place| script += &format!(" && mount -t tmpfs soak {place}"));
    shell::answers("unshare", &["-nm", "--", "sh", "-c", &script]).then_some(script)
}

fn seed_of_the_clock() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    // Short enough to type.
    since.as_millis() as u64 % 1_000_000_000
}

fn parse(args: &[String]) -> Result<Options, Failure> {
    let mut options = DEFAULT;
    let mut flags = Flags::new(args);
    while let Some(flag) = flags.next() {
        match flag {
            "--for" => options.length = flags.time(SHORTEST)?,
            "--seed" => options.seed = Some(seed(flags.value()?)?),
            "--binary" => options.binary = Some(flags.value()?.into()),
            "--inside" => options.inside = Some(flags.value()?.into()),
            "--alone" => options.is_alone = flags.value()? == "yes",
            "--no-verbs" => options.no_verbs = Some(flags.value()?.to_owned()),
            _ => return Err(flags.unknown()),
        }
    }
    Ok(options)
}

fn seed(text: &str) -> Result<u64, Failure> {
    text.parse().map_err(|_| Failure::usage(format!("--seed is a number, not '{text}'")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags;

    fn parsed(line: &str) -> Result<Options, Failure> {
        parse(&flags::words(line))
    }

    #[test]
    fn options_are_parsed_and_mistakes_refused() {
        let options = parsed("--seed 17 --for 60m --binary a/dquant").expect("good");
        assert_eq!((options.seed, options.length), (Some(17), Duration::from_secs(3_600)));
        assert_eq!(parsed("").expect("good"), DEFAULT);
        assert_eq!(parsed("--for 1500ms").expect("good").length, Duration::from_millis(1_500));
        for line in ["--for", "--for 0s", "--for x", "--for 5d", "--seed -1", "--sed 1", "20s"] {
            assert_eq!(parsed(line).expect_err(line).exit_code(), 2, "{line}");
        }
    }
}
