//! `cargo xtask`: every gate of a change as one command, with nothing to install.
//!
//! The table [`COMMANDS`] is the whole interface: a new command is one module with a `COMMAND`
//! constant and one line in the table. Commands print what they do and how long it took, report
//! what they skip and why, and end with 0 (good), 1 (a check failed) or 2 (the command line or the
//! machine was not as needed).
//!
//! This package stays light: the standard library, a JSON reader and the types of cargo's output.
//! It builds in seconds on a bare machine. Tools beyond cargo are searched for at run time and
//! named when they are missing.

mod bench;
mod chaos;
mod check;
mod circles;
mod columns;
mod counts;
mod coverage;
mod flags;
mod floors;
mod fuzz;
mod layers;
mod miri;
mod names;
mod no_os;
mod python;
mod scan;
mod shell;
mod soak;
mod test;
mod tidy;
mod workspace;

use std::process::ExitCode;

use shell::Failure;

/// One verb of `cargo xtask`.
pub(crate) struct Command {
    /// What the user types.
    pub(crate) name: &'static str,
    /// One line for the overview.
    pub(crate) summary: &'static str,
    /// Usage, options and examples, printed by `--help`.
    pub(crate) help: &'static str,
    /// Runs with the arguments that follow the verb.
    pub(crate) run: fn(&[String]) -> Result<(), Failure>,
}

const COMMANDS: &[Command] = &[
    check::COMMAND,
    test::COMMAND,
    bench::COMMAND,
    counts::COMMAND,
    chaos::COMMAND,
    soak::COMMAND,
    fuzz::COMMAND,
    coverage::COMMAND,
    miri::COMMAND,
    python::COMMAND,
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match dispatch(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::from(failure.exit_code())
        }
    }
}

fn dispatch(args: &[String]) -> Result<(), Failure> {
    let Some((verb, rest)) = args.split_first() else {
        print!("{}", overview());
        return Ok(());
    };
    if is_help(verb) {
        print!("{}", overview());
        return Ok(());
    }
    let Some(command) = COMMANDS.iter().find(|command| command.name == verb) else {
        let names: Vec<&str> = COMMANDS.iter().map(|command| command.name).collect();
        return Err(Failure::usage(format!(
            "no command '{verb}'; there are: {}",
            names.join(", ")
        )));
    };
    if rest.iter().take_while(|arg| *arg != "--").any(|arg| is_help(arg)) {
        println!("{}\n\n{}", command.summary, command.help.trim_end());
        return Ok(());
    }
    (command.run)(rest)
}

fn is_help(arg: &str) -> bool {
    matches!(arg, "-h" | "--help" | "help")
}

fn overview() -> String {
    let mut text = String::from("Usage: cargo xtask COMMAND [OPTIONS]\n\nCommands:\n");
    for command in COMMANDS {
        text += &format!("  {:<10}{}\n", command.name, command.summary);
    }
    text + "\nExamples:\n  cargo xtask check        everything a change must pass\n  \
            cargo xtask test         the whole test suite\n  \
            cargo xtask bench data   figures of the main job\n  \
            cargo xtask counts       instructions per packet and message\n  \
            cargo xtask chaos        the long run of the simulation\n  \
            cargo xtask soak         a minute of real processes, killed and stopped\n  \
            cargo xtask fuzz         a minute of each fuzzing harness\n  \
            cargo xtask check --help options and steps of one command\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_examples_in_its_help() {
        for command in COMMANDS {
            assert!(command.help.contains("Examples:"), "{}", command.name);
            assert!(overview().contains(command.summary));
        }
    }

    #[test]
    fn an_unknown_command_is_a_usage_error_that_lists_the_known_ones() {
        let failure = dispatch(&["chekc".to_owned()]).expect_err("no such command");
        assert_eq!(failure.exit_code(), 2);
        assert!(failure.to_string().contains("check"));
    }
}
