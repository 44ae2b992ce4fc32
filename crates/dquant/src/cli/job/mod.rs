//! `dquant job`: jobs of a cluster, from submission to the question who took their bandwidth.

mod cancel;
mod explain;
mod list;
mod repair;
mod replay;
mod submit;
mod watch;

use clap::{Args, Subcommand};

use super::Console;
use crate::exit::{CliError, Exit};

/// Submit, list, explain and cancel jobs of a cluster; replay one
///
/// A job is a number of workers and the bandwidth that they need between each other. It is written as
/// its pattern with the rate of its edges: ring:8@5G is a ring of 8 workers, each of which sends
/// 5 Gbit/s to the next; torus:4x8@5G,2G slots=2 has two rates, and workers with two slots each.
/// `dquant brain` admits jobs, and `dquant agent` on hosts and switches enforces what they have.
/// docs/parfait.md has all patterns, docs/cluster.md a quick start.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    arg_required_else_help = true,
    after_help = "\
Exit codes: 0 done; 1 refused, or a job has no guarantee; 2 command line, token, certificate or file; 3 no brain leads.

Examples:
  dquant job submit 'ring:8@5G' --name llm
  dquant job list
  dquant job explain llm
  dquant job cancel llm
  dquant job replay 'ring:3@100M' --all"
)]
pub(super) struct JobCommand {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Submit(submit::Submit),
    List(list::List),
    Explain(explain::Explain),
    Cancel(cancel::Cancel),
    Watch(watch::Watch),
    Replay(replay::Replay),
    Down(repair::Down),
    Up(repair::Up),
    Defragment(repair::Defragment),
}

impl JobCommand {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        match self.verb {
            Verb::Submit(verb) => verb.run(console),
            Verb::List(verb) => verb.run(console),
            Verb::Explain(verb) => verb.run(console),
            Verb::Cancel(verb) => verb.run(console),
            Verb::Watch(verb) => verb.run(console),
            Verb::Replay(verb) => verb.run(console),
            Verb::Down(verb) => verb.run(console),
            Verb::Up(verb) => verb.run(console),
            Verb::Defragment(verb) => verb.run(console),
        }
    }
}

/// Who the caller is, as far as a name goes: a job's owner.
fn caller() -> String {
    let is_word = |name: &String| {
        !name.is_empty()
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
    };
    let named =
        ["USER", "LOGNAME"].iter().find_map(|name| std::env::var(name).ok().filter(is_word));
    named.unwrap_or_else(|| format!("uid{}", rustix::process::getuid().as_raw()))
}
