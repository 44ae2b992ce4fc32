//! The `dquant` program: everything is in the library, so that tests and bindings reach it too.

use std::process::ExitCode;

fn main() -> ExitCode {
    dquant::cli::main(std::env::args_os())
}
