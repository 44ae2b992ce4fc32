//! The `dquant` program: all code is in the library, so that tests and bindings can use it too.

use std::process::ExitCode;

fn main() -> ExitCode {
    dquant::cli::main(std::env::args_os())
}
