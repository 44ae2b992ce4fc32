//! The command line: one verb per file, and what all verbs share.
//!
//! A command is a type of arguments with a `run` that writes through a [`Console`] and ends with an
//! [`Exit`] or a [`CliError`]. Adding one takes a file here, a line in [`Command`] and a line in
//! its `run`. What a command *does* belongs in the library behind it; only its command line and its
//! output belong here.
//!
//! Everywhere: results on stdout and narration on stderr, `--json` for one object per line, exit
//! codes from [`crate::exit`], help that ends with examples, and silence when the reader closes the
//! pipe.

mod agent;
mod brain;
mod capture;
mod cat;
mod cluster;
mod console;
mod convert;
mod daemons;
mod datasets;
mod demo;
mod doctor;
mod documents;
mod dpu;
mod explain;
mod inspect;
mod job;
mod local;
mod parfait;
mod perf;
mod plan;
mod remote;
mod run;
mod serve;
mod sim;
mod status;
mod stream_args;
mod subnet;
mod targets;
mod tokenize;
mod top;
mod trainer;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

pub use console::{Console, Report};

use crate::exit::{CliError, Exit};

/// RDMA for training: data from storage into host memory over RoCE, and jobs whose bandwidth is guaranteed.
#[derive(Debug, Parser)]
#[command(
    name = "dquant",
    version,
    arg_required_else_help = true,
    after_help = "\
Where to begin:
  data into trainers         demo serve dpu datasets cat status tokenize convert inspect documents
                             plan
  RDMA programs, networks    run explain perf doctor capture sim subnet
  bandwidth that jobs have   brain agent job top parfait (docs/cluster.md has a quick start)

Exit codes: 0 good, 1 ran but a check failed, 2 usage or environment, 3 peer unreachable.

Examples:
  dquant demo
  dquant serve --root /data/tokens --token-file token
  dquant dpu --roce 127.0.0.2:4791 --token-file token
  dquant datasets dq://127.0.0.1 --token-file token
  dquant cat dq://127.0.0.1/web.bin --batches 100 -o web.u16
  dquant tokenize corpus/ --encoding r50k_base -o corpus.bin
  dquant convert mds/ corpus.bin
  dquant inspect corpus.bin
  dquant plan explain 'window(2048) | shuffle(7) | narrow(u16)' corpus.bin
  dquant documents corpus.bin
  dquant capture check run.pcap
  dquant doctor
  dquant run -- ibv_devinfo -v
  dquant explain 4711
  dquant perf 10.0.0.5 write
  dquant job replay ring:3@100M --all
  dquant sim chaos --seeds 0..2000
  dquant subnet plan fat-tree:8
  dquant brain --topology fat-tree:8 --state brain.redb --token-file token
  dquant agent --node host0 --port 1=eth0:1Gbit --token-file token
  dquant job submit 'ring:8@5G' --name llm
  dquant parfait profile run.pcap
  dquant top --cluster --from http://10.0.0.5:4796
  dquant parfait prove --topology fat-tree:4 ring:8@2G
  dquant COMMAND --help    options and examples of one command"
)]
struct Cli {
    /// Print results as JSON, one object per line.
    #[arg(long, global = true)]
    json: bool,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Demo(demo::Demo),
    Serve(serve::Serve),
    Dpu(dpu::DpuCommand),
    Cat(cat::Cat),
    Status(status::StatusCommand),
    Tokenize(tokenize::Tokenize),
    Convert(convert::Convert),
    Plan(plan::PlanCommand),
    Inspect(inspect::Inspect),
    Documents(documents::DocumentsCommand),
    Datasets(remote::Datasets),
    Capture(capture::Capture),
    Doctor(doctor::Doctor),
    Run(run::Run),
    Explain(explain::Explain),
    Perf(perf::PerfCommand),
    Sim(sim::Sim),
    Subnet(subnet::Subnet),
    Brain(Box<brain::BrainCommand>),
    Agent(agent::AgentCommand),
    Job(job::JobCommand),
    Parfait(parfait::Parfait),
    Top(top::Top),
    #[command(hide = true)]
    Trainer(trainer::Trainer),
}

impl Command {
    fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        match self {
            Command::Demo(command) => command.run(console),
            Command::Serve(command) => command.run(console),
            Command::Dpu(command) => command.run(console),
            Command::Cat(command) => command.run(console),
            Command::Status(command) => command.run(console),
            Command::Tokenize(command) => command.run(console),
            Command::Convert(command) => command.run(console),
            Command::Plan(command) => command.run(console),
            Command::Inspect(command) => command.run(console),
            Command::Documents(command) => command.run(console),
            Command::Datasets(command) => command.run(console),
            Command::Capture(command) => command.run(console),
            Command::Doctor(command) => command.run(console),
            Command::Run(command) => command.run(console),
            Command::Explain(command) => command.run(console),
            Command::Perf(command) => command.run(console),
            Command::Job(command) => command.run(console),
            Command::Sim(command) => command.run(console),
            Command::Subnet(command) => command.run(console),
            Command::Brain(command) => command.run(console),
            Command::Agent(command) => command.run(console),
            Command::Parfait(command) => command.run(console),
            Command::Top(command) => command.run(console),
            Command::Trainer(command) => command.run(console),
        }
    }
}

/// Runs the program with these arguments, the program's own name first.
pub fn main(args: impl Iterator<Item = OsString>) -> ExitCode {
    let exit = match Cli::try_parse_from(without_help_flags(args)) {
        Ok(cli) => execute(cli),
        Err(error) => explain(&error),
    };
    ExitCode::from(exit as u8)
}

/// `dquant help … --help` and `dquant sim help … --help` request the same page twice; clap would read the flag as
/// the name of a command.
fn without_help_flags(args: impl Iterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    let args: Vec<OsString> = args.collect();
    let is = |at: usize, name: &str| args.get(at).is_some_and(|arg| arg == name);
    let has_verbs =
        ["sim", "capture", "plan", "subnet", "job", "parfait"].iter().any(|name| is(1, name));
    let asks_for_help = is(1, "help") || has_verbs && is(2, "help");
    let redundant = move |arg: &OsString| asks_for_help && (arg == "--help" || arg == "-h");
    args.into_iter().filter(move |arg| !redundant(arg))
}

fn execute(cli: Cli) -> Exit {
    let mut console = Console::new(cli.json);
    let result = cli.command.run(&mut console).and_then(|exit| console.finish().map(|()| exit));
    match result {
        Ok(exit) => exit,
        Err(error) => {
            console.error(&error);
            error.exit()
        }
    }
}

/// Prints clap's message: help and version are results, everything else is a usage error.
fn explain(error: &clap::Error) -> Exit {
    // A user who requested help and closed the pipe has what they wanted.
    let _ = error.print();
    if error.use_stderr() { Exit::Usage } else { Exit::Good }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }
}
